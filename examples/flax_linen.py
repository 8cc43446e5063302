"""Replaces the convolution of a flax linen model by the operator, with and without an edit.

python examples/flax_linen.py
"""

import flax.linen as nn
import jax
import numpy as np

from pallas_patch_embed.frameworks import linen

WIDTH, PATCH, GRID = 256, 16, 14


class Tower(nn.Module):
    """A convolution, positions and one layer, similar to big_vision's ViT."""

    @nn.compact
    def __call__(self, images):
        stem = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID", name="embedding")
        x = stem(images).reshape(len(images), -1, WIDTH)
        x += self.param("pos_embedding", nn.initializers.normal(0.02), (1, GRID**2, WIDTH))
        return nn.Dense(WIDTH, name="layer")(nn.LayerNorm(name="norm")(x))


class EditedTower(nn.Module):
    """The same tower with the operator, which also adds the positions."""

    @nn.compact
    def __call__(self, images):
        positions = self.param("pos_embedding", nn.initializers.normal(0.02), (1, GRID**2, WIDTH))
        x = linen.PatchEmbed(WIDTH, (PATCH, PATCH), name="embedding")(images, positions)
        x = x.reshape(len(images), -1, WIDTH)
        return nn.Dense(WIDTH, name="layer")(nn.LayerNorm(name="norm")(x))


@jax.jit
def intercepted(variables, images):
    """Applies the unedited tower with the operator in place of its convolution."""
    with linen.intercept():
        return Tower().apply(variables, images)


pixels = np.random.default_rng(0).integers(0, 256, (4, 224, 224, 3), np.uint8)
images = np.float32(pixels) / 255 * 2 - 1
variables = Tower().init(jax.random.key(0), images)
expected = jax.jit(Tower().apply)(variables, images)
for name, found in (
    ("edited, uint8 images", jax.jit(EditedTower().apply)(variables, pixels)),
    ("intercepted", intercepted(variables, images)),
):
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(f"{name}: relative difference {difference:.4f}")
    assert difference < 0.01
