"""Replaces the convolution of a flax nnx model by the operator.

python examples/flax_nnx.py
"""

import numpy as np
from flax import nnx

from pallas_patch_embed.frameworks import nnx as drop_in


class Tower(nnx.Module):
    """A convolution, positions and one layer, similar to jimm's towers."""

    def __init__(self, rngs):
        self.patch_embeddings = nnx.Conv(3, 256, (16, 16), (16, 16), padding="VALID", rngs=rngs)
        self.position_embeddings = nnx.Param(0.02 * rngs.params.normal((1, 196, 256)))
        self.norm = nnx.LayerNorm(256, rngs=rngs)
        self.layer = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, images):
        x = self.patch_embeddings(images).reshape(len(images), -1, 256)
        return self.layer(self.norm(x + self.position_embeddings[...]))


model = Tower(nnx.Rngs(0))
images = np.random.default_rng(0).uniform(-1, 1, (4, 224, 224, 3)).astype(np.float32)
expected = model(images)

print("replaced:", drop_in.replace(model))
found = nnx.jit(lambda model, images: model(images))(model, images)
difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
print(f"relative difference {difference:.4f}")
assert difference < 0.01
