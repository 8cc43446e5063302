"""Images to patch rows: the range and encoding of pixels, the order of K, the padding of K."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed.problem import is_known, padded

# A float this close to a uint8 level is encoded as that level. The usual ways to normalise a pixel
# in float32, such as u / 255 * 2 - 1 and (u / 255 - 0.5) / 0.5, differ by at most 2^-23.
LEVEL_TOLERANCE = 2.0**-21

# What a value outside of [-1, 1] most likely comes from.
OUT_OF_RANGE = (
    "expected floating-point pixels in [-1, 1]. Pixels of 0 to 255, also those that a model has "
    "cast to float: pass them as uint8, or as pixels / 127.5 - 1. Normalisation by ImageNet's or "
    "CLIP's mean and standard deviation: normalise as SigLIP does, with 0.5 and 0.5. Overshoot of "
    "a bicubic or Lanczos resampling: resize as uint8, or clip with clip=True."
)


def check_range(name: str, pixels: Any) -> None:
    """Refuses NaN and floating-point pixels outside of [-1, 1] by more than their rounding.

    Values of numpy arrays are read, those of JAX arrays by one reduction on their device, for which
    this waits. Under jit they are unknown: then it is a `checkify.debug_check`, which a jit without
    checkify ignores. An array that this process cannot read whole is not checked.
    """
    if not jnp.issubdtype(pixels.dtype, jnp.floating) or 0 in pixels.shape:
        return
    limit = 1 + max(float(jnp.finfo(pixels.dtype).eps), LEVEL_TOLERANCE)
    if isinstance(pixels, jax.core.Tracer):
        # The pixels of a model that is trained are known to be right by their values alone.
        low, high = _extremes(jax.lax.stop_gradient(pixels))
        message = f"{name} have values from {{low}} to {{high}}, {OUT_OF_RANGE}"
        fits = (low >= -limit) & (high <= limit)
        checkify.debug_check(fits, message, low=low, high=high)
    elif is_known(pixels):
        if isinstance(pixels, np.ndarray):
            low, high = pixels.min(), pixels.max()
        else:
            with jax.ensure_compile_time_eval():
                low, high = jax.device_get(_extremes(pixels))
        if not (low >= -limit and high <= limit):
            raise ValueError(f"{name} have values from {low} to {high}, {OUT_OF_RANGE}")


@jax.jit
def _extremes(pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.min(pixels).astype(jnp.float32), jnp.max(pixels).astype(jnp.float32)


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
    return pad_rows(reshape(jnp.swapaxes(cut, -4, -3), h * w, K))


def pad_rows(patches: jax.Array) -> jax.Array:
    """Pads K with zeros to whole rows of the kernels."""
    K = patches.shape[-1]
    return jnp.pad(patches, [(0, 0)] * (patches.ndim - 1) + [(0, padded(K) - K)])


def _explicit(images: jax.Array, image_ndim: int) -> NamedSharding | None:
    """Explicit sharding of the leading axes as in `images`; `image_ndim` axes are not sharded."""
    sharding = jax.typeof(images).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-3], *[None] * image_ndim))
