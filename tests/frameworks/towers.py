"""Vision towers as functions of their parameters, each unchanged and with the operator in it.

The towers of big_vision and jimm are written here according to the trees of their parameters. The
towers of other packages are in the tests of their frameworks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PATCH, SIDE, WIDTH, HEADS, DEPTH, MLP = 16, 64, 64, 4, 2, 128
GRID = SIDE // PATCH


@dataclasses.dataclass
class Tower:
    """A tower, unchanged and with the operator in it.

    Attributes:
      parameters: a pytree of floating-point arrays.
      unchanged: function of (parameters, images) that returns the output.
      changed: function of the patch dtype that returns a function like `unchanged`.
      kernel, bias, positions: their paths among the parameters, as strings of
        `jax.tree_util.keystr`.
      channels_first: whether images are [B, 3, H, W].
      takes_uint8: whether uint8 images reach the operator without a conversion.
    """

    parameters: Any
    unchanged: Callable
    changed: Callable
    kernel: str
    bias: str
    positions: str
    channels_first: bool = False
    takes_uint8: bool = True

    def images(self, seed=0, count=2, side=SIDE):
        """Returns uint8 images, and the same images as floats in [-1, 1]."""
        pixels = np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)
        if self.channels_first:
            pixels = np.moveaxis(pixels, -1, 1)
        return pixels, np.float32(pixels) / 255 * 2 - 1

    def with_one_drawn_anew(self, path):
        """Returns the parameters with new random values at `path`."""
        found = []

        def draw(place, leaf):
            if jax.tree_util.keystr(place) != path:
                return leaf
            found.append(place)
            noise = np.random.default_rng(1).normal(0, 1 / np.sqrt(WIDTH), leaf.shape)
            return jnp.asarray(noise, leaf.dtype)

        drawn = jax.tree_util.tree_map_with_path(draw, self.parameters)
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(drawn)]
        assert len(found) == 1, f"{path} is not one of {paths}"
        return drawn


def randomised(parameters, seed=0):
    """Draws parameters without zeros, because a missing bias of zeros would not be noticed."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), parameters
    )


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(MLP)(x)))


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(y, y)
        return x + MlpBlock()(nn.LayerNorm()(x))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for layer in range(DEPTH):
            x = EncoderBlock(name=f"encoderblock_{layer}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class MAPHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]))
        probe = jnp.tile(probe, [len(x), 1, 1])
        x = nn.MultiHeadDotProductAttention(HEADS)(probe, x)
        return (x + MlpBlock()(nn.LayerNorm()(x)))[:, 0]


class BigVisionViT(nn.Module):
    """big_vision's ViT with learned positions and a pooling head.

    Attributes:
      patch_embed: None for the unchanged tower, otherwise a function of features, kernel_size and
        name.
    """

    patch_embed: Any = None

    @nn.compact
    def __call__(self, images):
        initial = nn.initializers.normal(1 / np.sqrt(WIDTH))
        if self.patch_embed is None:
            x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID", name="embedding")(
                images
            )
            x = x.reshape(len(x), -1, WIDTH)
            x = x + self.param("pos_embedding", initial, (1, x.shape[1], WIDTH))
        else:
            # These three lines are from docs/models.md.
            positions = self.param("pos_embedding", initial, (1, GRID**2, WIDTH))
            x = self.patch_embed(WIDTH, (PATCH, PATCH), name="embedding")(images, positions)
            x = x.reshape(len(x), -1, WIDTH)
        x = Encoder(name="Transformer")(x)
        return MAPHead()(x)


class JimmTransformerBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        up, down = nnx.Linear(WIDTH, MLP, rngs=rngs), nnx.Linear(MLP, WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(up, nnx.gelu, down)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class JimmViT(nnx.Module):
    """jimm's VisionTransformerBase with a pooling head.

    Args:
      patch_embed: class of `patch_embeddings`; with nnx.Conv the tower is unchanged.
      fused: whether the patch embedding adds the positions.
    """

    def __init__(self, rngs, patch_embed=nnx.Conv, fused=False):
        patch, strides = (PATCH, PATCH), (PATCH, PATCH)
        self.patch_embeddings = patch_embed(3, WIDTH, patch, strides, padding="VALID", rngs=rngs)
        positions = nnx.initializers.truncated_normal(0.02)(rngs.params(), (1, GRID**2, WIDTH))
        self.position_embeddings = nnx.Param(positions)
        self.encoder = nnx.Sequential(*(JimmTransformerBlock(rngs) for _ in range(DEPTH)))
        self.ln_post = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.probe = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 1, WIDTH)))
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.fused = fused

    def __call__(self, images):
        if self.fused:
            x = self.patch_embeddings(images, self.position_embeddings)
            x = x.reshape(len(x), -1, WIDTH)
        else:
            x = self.patch_embeddings(images)
            x = x.reshape(len(x), -1, WIDTH)
            x = x + self.position_embeddings[...]
        x = self.ln_post(self.encoder(x))
        return self.attn(jnp.tile(self.probe[...], (len(x), 1, 1)), x)[:, 0]
