"""Images to patch rows: the order of K, the padding of K, and the encoding of pixels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed.problem import padded

# A float this close to a uint8 level is encoded as that level. The usual ways to normalise a pixel
# in float32, such as u / 255 * 2 - 1 and (u / 255 - 0.5) / 0.5, differ by at most 2^-23.
LEVEL_TOLERANCE = 2.0**-21


def encode(images: jax.Array, dtype: str) -> jax.Array:
    """Pixels in the encoding of `dtype`: int8 is u - 128, the others (2u - 255) / 255 in [-1, 1].

    The quotient is written as a product with float32(1 / 255): under jit XLA replaces a division by
    a constant with that product, outside of jit it does not, and the two differ in the last bit.
    """
    if images.dtype == jnp.uint8:
        level = images.astype(jnp.float32)
    else:
        pixel = jnp.clip(images.astype(jnp.float32), -1.0, 1.0)
        level = jnp.round((pixel + 1.0) * 127.5)
    if dtype == "int8":
        return (level - 128.0).astype(jnp.int8)
    at_level = (2.0 * level - 255.0) * np.float32(1 / 255)
    if images.dtype != jnp.uint8:
        at_level = jnp.where(jnp.abs(pixel - at_level) <= LEVEL_TOLERANCE, at_level, pixel)
    return at_level.astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def rows(images: jax.Array, patch_size: int, dtype: str) -> jax.Array:
    """Cuts [..., H, W, 3] into [..., S, K_padded] with K in the order height, width, channel.

    The zeros that pad K are part of the same XLA fusion: no further pass over the patches.
    """
    *leading, H, W, channels = images.shape
    p, h, w = patch_size, H // patch_size, W // patch_size
    K = p * p * channels

    if (whole := _explicit(images, 3)) is not None:
        images = jax.sharding.reshard(images, whole)

    def reshape(x: jax.Array, *image_shape: int) -> jax.Array:
        # A reshape of an axis with explicit sharding needs the sharding of the result.
        return x.reshape(*leading, *image_shape, out_sharding=_explicit(images, len(image_shape)))

    cut = reshape(encode(images[..., : h * p, : w * p, :], dtype), h, p, w, p, channels)
    patches = reshape(jnp.swapaxes(cut, -4, -3), h * w, K)
    return jnp.pad(patches, [(0, 0)] * (patches.ndim - 1) + [(0, padded(K) - K)])


def _explicit(images: jax.Array, image_ndim: int) -> NamedSharding | None:
    """Explicit sharding of the leading axes as in `images`; `image_ndim` axes are not sharded."""
    sharding = jax.typeof(images).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-3], *[None] * image_ndim))
