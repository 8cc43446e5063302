"""Embeddings of pictures in bulk.

A picture's way: `sources` finds it, `pictures` and `preprocessing` decode and resize it,
`embedder` embeds it, `output` writes the embedding. `pipeline` drives this on one machine, with
the processes of `decoders`; `on_ray` on a Ray cluster; `command` is the command line's part.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_patch_embed.embed.embedder import Decoder as Decoder
    from pallas_patch_embed.embed.embedder import Embedder as Embedder
    from pallas_patch_embed.embed.preprocessing import Preprocessing as Preprocessing

__all__ = ["Decoder", "Embedder", "Preprocessing"]

if not TYPE_CHECKING:
    # The names above are imported when they are used: processes that decode import this package,
    # and need no JAX.
    import importlib

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "preprocessing" if name == "Preprocessing" else "embedder"
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
