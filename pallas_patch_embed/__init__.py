"""The patch embedding of vision encoders as one fused JAX operator, and whole encoders."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_patch_embed import siglip2 as siglip2
    from pallas_patch_embed.backends import Explanation as Explanation
    from pallas_patch_embed.backends import backend_names as backend_names
    from pallas_patch_embed.backends.cuda import register_cuda_kernels as register_cuda_kernels
    from pallas_patch_embed.encoders.calibration import Calibration as Calibration
    from pallas_patch_embed.encoders.calibration import calibrate as calibrate
    from pallas_patch_embed.encoders.checkpoint import load_encoder as load_encoder
    from pallas_patch_embed.encoders.config import Config as Config
    from pallas_patch_embed.encoders.config import TextConfig as TextConfig
    from pallas_patch_embed.encoders.encoder import Encoder as Encoder
    from pallas_patch_embed.encoders.encoder import EncoderOutput as EncoderOutput
    from pallas_patch_embed.encoders.similarity import Similarity as Similarity
    from pallas_patch_embed.encoders.similarity import load_similarity as load_similarity
    from pallas_patch_embed.encoders.text_checkpoint import load_text_encoder as load_text_encoder
    from pallas_patch_embed.encoders.text_encoder import TextEncoder as TextEncoder
    from pallas_patch_embed.encoders.text_encoder import TextOutput as TextOutput
    from pallas_patch_embed.encoders.tokenizer import Tokenizer as Tokenizer
    from pallas_patch_embed.encoders.tokenizer import load_tokenizer as load_tokenizer
    from pallas_patch_embed.patch_embedding.api import embed_images as embed_images
    from pallas_patch_embed.patch_embedding.api import encode_patches as encode_patches
    from pallas_patch_embed.patch_embedding.api import explain as explain
    from pallas_patch_embed.patch_embedding.api import patch_embed as patch_embed
    from pallas_patch_embed.patch_embedding.api import patchify as patchify
    from pallas_patch_embed.patch_embedding.packing import pack as pack
    from pallas_patch_embed.patch_embedding.params import PatchEmbedParams as PatchEmbedParams
    from pallas_patch_embed.patch_embedding.positions import resize_positions as resize_positions

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Config",
    "Encoder",
    "EncoderOutput",
    "Explanation",
    "PatchEmbedParams",
    "Similarity",
    "TextConfig",
    "TextEncoder",
    "TextOutput",
    "Tokenizer",
    "__version__",
    "backend_names",
    "calibrate",
    "embed_images",
    "encode_patches",
    "explain",
    "load_encoder",
    "load_similarity",
    "load_text_encoder",
    "load_tokenizer",
    "pack",
    "patch_embed",
    "patchify",
    "register_cuda_kernels",
    "resize_positions",
    "siglip2",
]

if not TYPE_CHECKING:
    # Importing JAX takes a second, and the command line must be able to react to a signal during
    # that second. So the names above are imported when the first of them is used.
    import importlib

    def _import_all():
        """Imports the public names."""
        module = importlib.import_module
        names = {"siglip2": module(f"{__name__}.siglip2")}
        for home, members in {
            "patch_embedding.api": (
                *("embed_images", "encode_patches", "explain", "patch_embed", "patchify"),
            ),
            "backends": ("Explanation", "backend_names"),
            "backends.cuda": ("register_cuda_kernels",),
            "encoders.calibration": ("Calibration", "calibrate"),
            "encoders.checkpoint": ("load_encoder",),
            "encoders.config": ("Config", "TextConfig"),
            "encoders.encoder": ("Encoder", "EncoderOutput"),
            "encoders.similarity": ("Similarity", "load_similarity"),
            "encoders.text_checkpoint": ("load_text_encoder",),
            "encoders.text_encoder": ("TextEncoder", "TextOutput"),
            "encoders.tokenizer": ("Tokenizer", "load_tokenizer"),
            "patch_embedding.packing": ("pack",),
            "patch_embedding.params": ("PatchEmbedParams",),
            "patch_embedding.positions": ("resize_positions",),
        }.items():
            names |= {name: getattr(module(f"{__name__}.{home}"), name) for name in members}
        globals().update(names)

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _import_all()
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})

    # jax.export can read the package's pytrees only after the modules that define them were
    # imported. So a program that has imported JAX imports them together with the package.
    if "jax" in sys.modules:
        _import_all()
