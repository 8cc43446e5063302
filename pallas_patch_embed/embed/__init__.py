"""Embedding of pictures, and of texts, in bulk.

`sources` finds `units` of pictures: files, tars and the tables of `parquet`. `pictures`, `jpeg` and
`preprocessing` decode and resize a picture, or `resizing` resizes it on the device; `embedder`
embeds it, and an `output` (`npz` or `folder`) writes the embedding. Texts are in `parquet` and
`lines`, and `text_embedder` embeds them; what other modules say about pictures holds for texts,
too. A `ledger` knows which pictures the shards of a folder contain, and `provenance` what wrote
them. `pipeline` runs these steps on one machine, with the processes of `decoders`, and `on_ray`
runs them on a Ray cluster. `command` is the command `embed`, with the `options`. `written` reads an
output again, and `ranking` finds the embeddings in it that are most similar to one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_patch_embed.embed.embedder import Decoder as Decoder
    from pallas_patch_embed.embed.embedder import Embedder as Embedder
    from pallas_patch_embed.embed.preprocessing import Preprocessing as Preprocessing

__all__ = ["Decoder", "Embedder", "Preprocessing"]

if not TYPE_CHECKING:
    # The names above are imported when they are used, because processes that decode pictures import
    # this package but need no JAX.
    import importlib

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "preprocessing" if name == "Preprocessing" else "embedder"
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
