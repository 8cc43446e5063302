"""SigLIP and SigLIP2 vision encoders with `patch_embed` as their patch embedding."""

from pallas_patch_embed.encoders.checkpoint import load_encoder as load_encoder
from pallas_patch_embed.encoders.config import Config as Config
from pallas_patch_embed.encoders.encoder import Encoder as Encoder
from pallas_patch_embed.encoders.encoder import EncoderOutput as EncoderOutput
from pallas_patch_embed.encoders.naflex import batch_naflex as batch_naflex
