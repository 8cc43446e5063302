"""Images to patch rows: the range and encoding of pixels, the order of K, the padding of K."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed import range_check
from pallas_patch_embed.problem import PatchLayout, is_known, padded

# A float this close to a uint8 level is encoded as that level. The usual ways to normalise a pixel
# in float32, such as u / 255 * 2 - 1 and (u / 255 - 0.5) / 0.5, differ by at most 2^-23.
LEVEL_TOLERANCE = 2.0**-21

# What a value outside of [-1, 1] most likely comes from.
OUT_OF_RANGE = (
    "expected floating-point pixels {normalised}. Pixels of 0 to 255, also those that a model has "
    "cast to float: pass them as uint8, or normalise them. Normalisation by another mean and "
    "standard deviation, such as ImageNet's or CLIP's: {fix}. Overshoot of a bicubic or Lanczos "
    "resampling: resize as uint8, or clip with clip=True."
)


class Encoding(NamedTuple):
    """What pixels are and what they become. Static.

    Attributes:
      dtype: dtype of the patches.
      image_mean, image_std: mean and standard deviation of red, green and blue, by which
        floating-point pixels are normalised; None where pixels are in [-1, 1].
      colours_last: whether the colour is the last axis of a patch, or its first one.
    """

    dtype: str
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    colours_last: bool = True

    def undo(self, length: int) -> tuple[Any, Any]:
        """Factor and summand that take `length` normalised numbers to pixels in [-1, 1]."""
        if self.image_mean is None or self.image_std is None:
            return np.float32(1), np.float32(0)
        spread = np.tile if self.colours_last else np.repeat
        factor = np.array([2 * std for std in self.image_std], np.float32)
        summand = np.array([2 * mean - 1 for mean in self.image_mean], np.float32)
        return spread(factor, length // 3), spread(summand, length // 3)


def check_range(name: str, pixels: Any, encoding: Encoding) -> Any:
    """Returns pixels; refuses NaN, and floats outside of [-1, 1] by more than their rounding.

    Values of numpy arrays are read, those of JAX arrays by one reduction on their device, for which
    this waits. Under jit they are unknown: then checkify finds a check in what is returned, and a
    jit without checkify nothing. An array that this process cannot read whole is not checked.
    """
    if not jnp.issubdtype(pixels.dtype, jnp.floating) or 0 in pixels.shape:
        return pixels
    rounding = max(float(jnp.finfo(pixels.dtype).eps), LEVEL_TOLERANCE)
    # Mean and standard deviation are rounded too; 0.5 is not.
    limit = 1 + (rounding if encoding.image_mean is None else 2 * rounding)
    given, normalised = "values", "in [-1, 1]"
    fix = "normalise by 0.5 and 0.5, or pack with image_mean and image_std"
    if encoding.image_mean is not None:
        given = "values that stand for pixels"
        normalised = (
            f"in [-1, 1] once image_mean={encoding.image_mean} and image_std={encoding.image_std} "
            "are undone"
        )
        fix = "normalise by those that the params were packed with"
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
    """Whether pixels are in [-limit, limit], the smallest one and the largest one."""
    axes = None if encoding.image_mean is None else tuple(range(pixels.ndim - 1))
    factor, summand = encoding.undo(pixels.shape[-1])
    low, high = (
        x.astype(np.float32) * factor + summand for x in (pixels.min(axes), pixels.max(axes))
    )
    low, high = low.min(), high.max()
    return (low >= -limit) & (high <= limit), low, high


_range = jax.jit(_range_of, static_argnums=(1, 2))


def encode(pixels: jax.Array, encoding: Encoding) -> jax.Array:
    """Pixels in their encoding: int8 is u - 128, the other dtypes (2u - 255) / 255 in [-1, 1].

    The last axis is the colours of images or a row of a patch. The quotient is written as a product
    with float32(1 / 255): under jit XLA replaces a division by a constant with that product,
    outside of jit it does not, and the two differ in the last bit.
    """
    if pixels.dtype == jnp.uint8:
        level = pixels.astype(jnp.float32)
    else:
        pixel = pixels.astype(jnp.float32)
        if encoding.image_mean is not None:
            # All axes, for users who have JAX refuse to add them.
            axes = tuple(range(pixel.ndim - 1))
            factor, summand = (np.expand_dims(x, axes) for x in encoding.undo(pixel.shape[-1]))
            pixel = rounded(pixel * factor) + summand
        pixel = jnp.clip(pixel, -1.0, 1.0)
        level = jnp.round((pixel + 1.0) * 127.5)
    if encoding.dtype == "int8":
        return (level - 128.0).astype(jnp.int8)
    at_level = (2.0 * level - 255.0) * np.float32(1 / 255)
    if pixels.dtype != jnp.uint8:
        at_level = jnp.where(jnp.abs(pixel - at_level) <= LEVEL_TOLERANCE, at_level, pixel)
    return at_level.astype(encoding.dtype)


def rounded(product: jax.Array) -> jax.Array:
    """The product, rounded to float32 before anything is added to it.

    LLVM fuses a product and a sum into one operation with one rounding, also across XLA's
    optimization_barrier; it does not across a maximum. No finite number is changed.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def rows(images: jax.Array, layout: PatchLayout, encoding: Encoding) -> jax.Array:
    """Cuts images [..., H, W, 3] or videos [..., F, H, W, 3] into rows [..., R + S, K_padded].

    K is in the order height, width, channel, for videos channel, frame, height, width. The R rows
    of zeros in front and the zeros that pad K are part of the same XLA fusion: there is no further
    pass over the patches.
    """
    p, frames, prefix = layout
    *sides, h, w = layout.grid(images.shape)
    leading = images.shape[: -layout.image_ndim]
    K = 3 * p * p * (frames or 1)

    if (whole := _explicit(images, layout.image_ndim, layout)) is not None:
        images = jax.sharding.reshard(images, whole)

    def reshape(x: jax.Array, *image_shape: int) -> jax.Array:
        # A reshape of an axis with explicit sharding needs the sharding of the result.
        sharding = _explicit(images, len(image_shape), layout)
        return x.reshape(*leading, *image_shape, out_sharding=sharding)

    encoded = encode(images[..., : h * p, : w * p, :], encoding)
    if frames is None:
        cut = jnp.swapaxes(reshape(encoded, h, p, w, p, 3), -4, -3)
    else:
        encoded = encoded[..., : sides[0] * frames, :, :, :]
        # [time, frame, h, y, w, x, colour] to [time, h, w, colour, frame, y, x].
        cut = reshape(encoded, *sides, frames, h, p, w, p, 3)
        cut = jnp.moveaxis(cut, (-7, -5, -3, -1, -6, -4, -2), range(-7, 0))
    return pad_rows(reshape(cut, math.prod((*sides, h, w)), K), prefix)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def encoded_rows(patches: jax.Array, layout: PatchLayout, encoding: Encoding) -> jax.Array:
    """Patches [..., S, K] of pixels as `rows` gives them."""
    return pad_rows(encode(patches, encoding), layout.prefix)


def pad_rows(patches: jax.Array, prefix: int = 0) -> jax.Array:
    """Puts rows of zeros in front, and pads K with zeros to whole rows of the kernels."""
    K = patches.shape[-1]
    outer = [(0, 0)] * (patches.ndim - 2)
    return jnp.pad(patches, [*outer, (prefix, 0), (0, padded(K) - K)])


def _explicit(images: jax.Array, ndim: int, layout: PatchLayout) -> NamedSharding | None:
    """Explicit sharding of the leading axes as in `images`; `ndim` axes are not sharded."""
    sharding = jax.typeof(images).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    leading = sharding.spec[: -layout.image_ndim]
    return NamedSharding(sharding.mesh, PartitionSpec(*leading, *[None] * ndim))
