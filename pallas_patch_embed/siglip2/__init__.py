"""SigLIP and SigLIP2 vision encoders with `patch_embed` as their patch embedding."""

from pallas_patch_embed.siglip2.checkpoint import load_encoder as load_encoder
from pallas_patch_embed.siglip2.config import Config as Config
from pallas_patch_embed.siglip2.encoder import Encoder as Encoder
from pallas_patch_embed.siglip2.encoder import EncoderOutput as EncoderOutput
from pallas_patch_embed.siglip2.naflex import batch_naflex as batch_naflex
