"""SigLIP and SigLIP2: vision encoders with `patch_embed`, and text encoders."""

from pallas_patch_embed.encoders.checkpoint import load_siglip as load_encoder
from pallas_patch_embed.encoders.config import Config as Config
from pallas_patch_embed.encoders.encoder import Encoder as Encoder
from pallas_patch_embed.encoders.encoder import EncoderOutput as EncoderOutput
from pallas_patch_embed.encoders.naflex import PackedImages as PackedImages
from pallas_patch_embed.encoders.naflex import batch_naflex as batch_naflex
from pallas_patch_embed.encoders.naflex import pack_naflex as pack_naflex
from pallas_patch_embed.encoders.text_checkpoint import load_siglip_text as load_text_encoder

__all__ = [
    "Config",
    "Encoder",
    "EncoderOutput",
    "PackedImages",
    "batch_naflex",
    "load_encoder",
    "load_text_encoder",
    "pack_naflex",
]
