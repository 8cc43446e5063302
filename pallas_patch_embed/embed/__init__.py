"""Embeddings of pictures in bulk.

A picture's way: `sources` finds it, `pictures` and `preprocessing` decode and resize it,
`embedder` embeds it, `output` writes the embedding. `pipeline` drives this in one process, `on_ray`
on a Ray cluster, `command` is the command line's part.
"""

from pallas_patch_embed.embed.embedder import Decoder as Decoder
from pallas_patch_embed.embed.embedder import Embedder as Embedder
from pallas_patch_embed.embed.preprocessing import Preprocessing as Preprocessing
