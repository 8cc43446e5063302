"""Conversion of images to rows of patches: range and encoding of pixels, order and padding of K."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed.base import range_check
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.problem import PatchGeometry, is_known, padded

# A float pixel within this distance of the value of a uint8 level is encoded as that level. The
# usual ways to normalise a pixel in float32, such as u / 255 * 2 - 1 and (u / 255 - 0.5) / 0.5,
# differ by at most 2^-23.
LEVEL_TOLERANCE = 2.0**-21

# The end of the error for pixels outside of [-1, 1], with the most likely causes.
OUT_OF_RANGE = (
    "expected floating-point pixels {normalised}. If they are pixels of 0 to 255 that were cast to "
    "float, pass them as uint8 or normalise them. If they are normalised by another mean and "
    "standard deviation, such as ImageNet's or CLIP's, {fix}. If bicubic or Lanczos resampling "
    "overshot the range, resize as uint8, or pass clip=True."
)


class Encoding(NamedTuple):
    """How pixels are normalised and encoded, as a static argument of jitted functions.

    Attributes:
      dtype: dtype of the patches.
      image_mean, image_std: mean and standard deviation of each channel, by which floating-point
        pixels are normalised; None if pixels are in [-1, 1].
      colours_last: whether the channel is the last axis of a patch (True) or the first.
    """

    dtype: str
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    colours_last: bool = True

    def undo(self, length: int) -> tuple[Any, Any]:
        """Returns the factor and summand that map `length` normalised numbers to [-1, 1]."""
        if self.image_mean is None or self.image_std is None:
            return np.float32(1), np.float32(0)
        spread = np.tile if self.colours_last else np.repeat
        factor = np.array([2 * std for std in self.image_std], np.float32)
        summand = np.array([2 * mean - 1 for mean in self.image_mean], np.float32)
        each = length // len(factor)
        return spread(factor, each), spread(summand, each)


def check_range(name: str, pixels: Any, encoding: Encoding) -> Any:
    """Returns the pixels after a check that floats are in [-1, 1], up to rounding, and not NaN.

    The values of numpy arrays are checked on the host, those of JAX arrays by a reduction on their
    device, for which this function waits. Under jit the values are unknown: the returned array
    carries a check that runs if the program is checkified and does nothing otherwise. An array of
    which this process can address only a part is not checked.

    Raises:
      ValueError: a pixel is NaN or out of range.
    """
    if not jnp.issubdtype(pixels.dtype, jnp.floating) or 0 in pixels.shape:
        return pixels
    rounding = max(float(jnp.finfo(pixels.dtype).eps), LEVEL_TOLERANCE)
    # Mean and standard deviation are rounded too, which doubles the error; 0.5 is exact.
    limit = 1 + (rounding if encoding.image_mean is None else 2 * rounding)
    given, normalised = "values", "in [-1, 1]"
    fix = (
        "normalise by mean 0.5 and standard deviation 0.5 instead, or pack the params with "
        "image_mean and image_std"
    )
    if encoding.image_mean is not None:
        given = "values that represent pixels"
        normalised = (
            f"in [-1, 1] after image_mean={encoding.image_mean} and image_std="
            f"{encoding.image_std} are undone"
        )
        fix = "normalise by the image_mean and image_std with which the params were packed"
    expected = OUT_OF_RANGE.format(normalised=normalised, fix=fix)
    if isinstance(pixels, jax.core.Tracer):
        escaped = expected.replace("{", "{{").replace("}", "}}")
        message = f"{name} have {given} from {{low}} to {{high}}, {escaped}"
        range_of = functools.partial(_range_of, encoding=encoding, limit=limit)
        return range_check.checked(pixels, range_check.Check(range_of, message))
    if is_known(pixels):
        if isinstance(pixels, np.ndarray):
            with np.errstate(over="ignore"):
                fits, low, high = _range_of(pixels, encoding, limit)
        else:
            with jax.ensure_compile_time_eval():
                fits, low, high = jax.device_get(_range(pixels, encoding, limit))
        if not fits:
            raise ValueError(f"{name} have {given} from {low} to {high}, {expected}")
    return pixels


def _range_of(pixels: Any, encoding: Encoding, limit: float) -> tuple[Any, Any, Any]:
    """Returns whether all pixels are in [-limit, limit], the smallest pixel and the largest."""
    axes = None if encoding.image_mean is None else tuple(range(pixels.ndim - 1))
    factor, summand = encoding.undo(pixels.shape[-1])
    low, high = (
        x.astype(np.float32) * factor + summand for x in (pixels.min(axes), pixels.max(axes))
    )
    low, high = low.min(), high.max()
    return (low >= -limit) & (high <= limit), low, high


_range = jax.jit(_range_of, static_argnums=(1, 2))


def encode(pixels: jax.Array, encoding: Encoding) -> jax.Array:
    """Encodes pixels u: int8 is u - 128, the other dtypes are (2u - 255) / 255 in [-1, 1].

    The last axis is either the colours of images or K. The quotient is written as a product with
    float32(1 / 255): under jit XLA replaces a division by a constant with that product, outside of
    jit it does not, and the two differ in the last bit.
    """
    if pixels.dtype == jnp.uint8:
        level = pixels.astype(jnp.float32)
    else:
        pixel = pixels.astype(jnp.float32)
        if encoding.image_mean is not None:
            # Both arrays get as many axes as the pixels, because users may set
            # jax_numpy_rank_promotion="raise".
            axes = tuple(range(pixel.ndim - 1))
            factor, summand = (np.expand_dims(x, axes) for x in encoding.undo(pixel.shape[-1]))
            pixel = rounded(pixel * factor) + summand
        pixel = jnp.clip(pixel, -1.0, 1.0)
        level = jnp.round((pixel + 1.0) * 127.5)
    if TABLE[encoding.dtype].holds_levels:
        return (level - 128.0).astype(jnp.int8)
    at_level = (2.0 * level - 255.0) * np.float32(1 / 255)
    if pixels.dtype != jnp.uint8:
        at_level = jnp.where(jnp.abs(pixel - at_level) <= LEVEL_TOLERANCE, at_level, pixel)
    return at_level.astype(encoding.dtype)


def rounded(product: jax.Array) -> jax.Array:
    """Returns the product, rounded to float32 before anything is added to it.

    LLVM fuses a product and a sum into one operation with a single rounding, even across XLA's
    optimization_barrier, but not across a maximum. The maximum leaves finite numbers unchanged.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def cut_into_rows(images: jax.Array, geometry: PatchGeometry, encoding: Encoding) -> jax.Array:
    """Cuts images [..., H, W, C] or videos [..., F, H, W, C] into rows [..., R + S, K_padded].

    K is in the order height, width, channel; for videos channel, frame, height, width. The R rows
    of zeros in front and the zeros that pad K are written by the same XLA fusion, so the patches
    are written only once.
    """
    p, frames, prefix = geometry
    *sides, h, w = geometry.grid(images.shape)
    leading, C = images.shape[: -geometry.image_ndim], images.shape[-1]
    K = C * p * p * (frames or 1)

    if (whole := _explicit(images, geometry.image_ndim, geometry)) is not None:
        images = jax.sharding.reshard(images, whole)

    def reshape(x: jax.Array, *image_shape: int) -> jax.Array:
        # Reshaping an axis with explicit sharding requires out_sharding.
        sharding = _explicit(images, len(image_shape), geometry)
        return x.reshape(*leading, *image_shape, out_sharding=sharding)

    encoded = encode(images[..., : h * p, : w * p, :], encoding)
    if frames is None:
        cut = jnp.swapaxes(reshape(encoded, h, p, w, p, C), -4, -3)
    else:
        encoded = encoded[..., : sides[0] * frames, :, :, :]
        # Transposes [time, frame, h, y, w, x, colour] to [time, h, w, colour, frame, y, x].
        cut = reshape(encoded, *sides, frames, h, p, w, p, C)
        cut = jnp.moveaxis(cut, (-7, -5, -3, -1, -6, -4, -2), range(-7, 0))
    return pad_rows(reshape(cut, math.prod((*sides, h, w)), K), prefix)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def encode_rows(patches: jax.Array, geometry: PatchGeometry, encoding: Encoding) -> jax.Array:
    """Encodes patches [..., S, K] of pixels into the rows [..., R + S, K_padded] of `rows`."""
    return pad_rows(encode(patches, encoding), geometry.prefix)


def pad_rows(patches: jax.Array, prefix: int = 0) -> jax.Array:
    """Adds `prefix` rows of zeros in front of the patches, and pads K with zeros to K_padded."""
    K = patches.shape[-1]
    outer = [(0, 0)] * (patches.ndim - 2)
    return jnp.pad(patches, [*outer, (prefix, 0), (0, padded(K) - K)])


def _explicit(images: jax.Array, ndim: int, geometry: PatchGeometry) -> NamedSharding | None:
    """Returns a sharding with the leading axes of `images`, then `ndim` axes without sharding.

    Returns None if `images` have no axis with explicit sharding.
    """
    sharding = jax.typeof(images).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    leading = sharding.spec[: -geometry.image_ndim]
    return NamedSharding(sharding.mesh, PartitionSpec(*leading, *[None] * ndim))
