"""The patch embedding of SigLIP and SigLIP2 vision encoders as one fused JAX operator."""

from pallas_patch_embed import siglip2 as siglip2
from pallas_patch_embed.api import embed_images as embed_images
from pallas_patch_embed.api import explain as explain
from pallas_patch_embed.api import patch_embed as patch_embed
from pallas_patch_embed.api import patchify as patchify
from pallas_patch_embed.backends import Explanation as Explanation
from pallas_patch_embed.backends import backends as backends
from pallas_patch_embed.params import PatchEmbedParams as PatchEmbedParams
from pallas_patch_embed.params import pack as pack

__version__ = "0.1.0"
