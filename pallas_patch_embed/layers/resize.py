"""Resizing of uint8 pictures on the device, with the pixels that Pillow computes.

Pillow resizes an axis in a pass: each result is a sum of pixels p times coefficients c, integers in
units of 2^-22, which is rounded to uint8. A second pass resizes the other axis. This module
computes the same integers, so every pixel is equal. Source: src/libImaging/Resample.c of Pillow
13.0.0, and of 11.0.0 to 12.3.0, which always resize the rows first.

A coefficient is c = c0 + 256 c1 + 65536 c2 with three signed bytes. So a pass is a matrix product
of int8 with sums in int32, which tensor cores compute:

    sum(c p) = sum(c (p - 128)) + 128 sum(c)

No value exceeds int32. Let an axis have n <= 2048 pixels, so a sum has at most n terms. Let A be
sum(|c|) 2^-22, which is below 1.6 (1.57 for lanczos, 1.27 for bicubic, 1 for the other filters).

- |c| is at most (A + 1) / 2 * 2^22, which three signed bytes can represent: they reach 1.99 * 2^22.
- Each of the three sums s0, s1, s2 of products of int8 is at most 2^14 n = 2^25.
- They are added as (s2 * 256 + s1) * 256 + s0. This is sum(c (p - 128)), at most 2^29 A < 2^29.7.
  The value before s0 is added differs from it by at most 2^25, and the others are smaller.
- 128 sum(c) is 2^29, except for the rounding of n coefficients.
- The result, sum(c p) + 2^21, is at most 255 * (A + 1) / 2 * 2^22 + 2^21 < 2^30.5. Pillow computes
  it in int32, too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

# Number of bits of a coefficient after the point.
BITS = 22

# Sides in pixels to which pictures are padded on the device, so that there are few programs: at
# most 81 for each number of coefficients and order of the passes. A side of at least 128 pixels
# becomes at most 1.5 times as long, and 1.2 times on average over the logarithm of the side.
SIDES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_SIDE = SIDES[-1]

# Fewest coefficients of a result in a program.
FEWEST_TAPS = 16


class Taps(NamedTuple):
    """The coefficients of a pass.

    Attributes:
      first: [results] int32, the number of the first pixel that counts for a result.
      taps: [results, K] int32, the coefficients of this and the following pixels, in units of
        2^-22, padded with 0. A result without any coefficient is outside of the picture.
    """

    first: npt.NDArray[np.int32]
    taps: npt.NDArray[np.int32]


def _of_libm(
    function: Callable[[float], float], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Computes a function of the C library, which Pillow calls; numpy's own may round otherwise."""
    return np.array([function(value) for value in x.flat]).reshape(x.shape)


def _sinc(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x * math.pi
    return np.where(x == 0, 1.0, _of_libm(math.sin, x) / np.where(x == 0, 1.0, x))


def _box(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where((-0.5 < x) & (x <= 0.5), 1.0, 0.0)


def _bilinear(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _hamming(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # Pillow's two constants are float32.
    window = float(np.float32(0.54)) + float(np.float32(0.46)) * _of_libm(
        math.cos, np.abs(x) * math.pi
    )
    return np.where(np.abs(x) < 1, _sinc(np.abs(x)) * window, 0.0)


def _bicubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


def _lanczos(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where((-3 <= x) & (x < 3), _sinc(x) * _sinc(x / 3), 0.0)


# The filters with the distances that they reach, in pixels of the smaller picture.
FILTERS: dict[str, tuple[float, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]]] = {
    "box": (0.5, _box),
    "bilinear": (1.0, _bilinear),
    "hamming": (1.0, _hamming),
    "bicubic": (2.0, _bicubic),
    "lanczos": (3.0, _lanczos),
}


@functools.lru_cache(maxsize=4096)
def taps(size: int, to: int, name: str, begin: int = 0, results: int | None = None) -> Taps:
    """Computes Pillow's coefficients for resizing an axis of `size` pixels to `to` pixels.

    A result is the weighted mean of the pixels that the filter reaches around its centre. If the
    axis becomes shorter, the filter reaches farther by the factor size / to. The weights are
    float64, are divided by their sum, and are rounded to 22 bits, a half away from zero.

    Args:
      size, to: numbers of pixels before and after.
      name: one of FILTERS.
      begin: number of the first result of a crop; negative if results outside of the picture
        precede it.
      results: number of results of the crop; None for `to`.
    """
    reach, weight = FILTERS[name]
    results = to if results is None else results
    scale = size / to
    wider = max(scale, 1.0)
    result = begin + np.arange(results)
    center = (result + 0.5) * scale
    # A cast to integers truncates, as in C.
    first = np.maximum((center - reach * wider + 0.5).astype(np.int64), 0)
    end = np.minimum((center + reach * wider + 0.5).astype(np.int64), size)
    inside = (0 <= result) & (result < to)
    first, end = np.where(inside, first, 0), np.where(inside, end, 0)
    pixel = first[:, None] + np.arange(max((end - first).max(), 1))
    weights = weight((pixel - center[:, None] + 0.5) * (1.0 / wider))
    weights = np.where(pixel < end[:, None], weights, 0.0)
    # `sum` would add in another order.
    total = np.cumsum(weights, 1)[:, -1:]
    weights /= np.where(total == 0, 1.0, total)
    rounded = np.trunc(weights * 2**BITS + np.copysign(0.5, weights))
    return Taps(first.astype(np.int32), rounded.astype(np.int32))


def columns_first(size: tuple[int, int], to: tuple[int, int]) -> bool:
    """Returns whether Pillow 13 resizes the columns before the rows.

    Args:
      size, to: (height, width) before and after.
    """
    shrinks, narrows = (before - after for before, after in zip(size, to))
    return shrinks > 0 and shrinks > 2 * narrows


def padded(side: int) -> int:
    """Returns the smallest of `SIDES` that is not smaller than this side of a picture."""
    return next(padded for padded in SIDES if padded >= side)


def stacked(parts: Sequence[Taps], pictures: int) -> Taps:
    """Stacks the coefficients of at most `pictures` pictures, [pictures, results, ...]."""
    most = max(FEWEST_TAPS, *(part.taps.shape[1] for part in parts))
    K = 1 << (most - 1).bit_length()  # There are few programs.
    results = len(parts[0].first)
    found = Taps(
        np.zeros((pictures, results), np.int32), np.zeros((pictures, results, K), np.int32)
    )
    for i, part in enumerate(parts):
        found.first[i], found.taps[i, :, : part.taps.shape[1]] = part
    return found


@functools.partial(jax.jit, static_argnames=("shape",))
def unpack(pixels: jax.Array, where: jax.Array, *, shape: tuple[int, int, int]) -> jax.Array:
    """Separates pictures that follow each other in memory.

    Args:
      pixels: [N] uint8, the pictures, each [height, width, C] without padding. At least W * C other
        values follow the last picture.
      where: [2, B] int32, where each picture begins, and its width.
      shape: (H, W, C), no smaller than the shape of a picture.

    Returns:
      [B, H, W, C] uint8. What is outside of a picture is arbitrary.
    """
    H, W, C = shape
    begins, widths = where
    starts = begins[:, None] + C * widths[:, None] * jnp.arange(H, dtype=jnp.int32)[None]
    # The end of a row is the beginning of the next one.
    rows = lax.gather(
        pixels,
        starts[..., None],
        lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(), start_index_map=(0,)),
        slice_sizes=(W * C,),
        mode=lax.GatherScatterMode.CLIP,
    )
    return rows.reshape(len(begins), H, W, C)


@functools.partial(jax.jit, static_argnames=("columns_first", "fill"))
def resize(
    pictures: jax.Array,
    vertical: Taps,
    horizontal: Taps,
    *,
    columns_first: bool = False,
    fill: tuple[int, ...] = (0,),
) -> jax.Array:
    """Resizes pictures, and crops or pads the results, as Pillow does.

    Args:
      pictures: [B, H, W, C] uint8 with H, W <= `MOST_SIDE`. The coefficients say which pixels
        belong to a picture; the others may be arbitrary.
      vertical, horizontal: the coefficients of both axes for h and w results, [B, h or w, ...].
      columns_first: whether the columns are resized before the rows.
      fill: the value of each channel, or of all channels, outside of a picture.

    Returns:
      [B, h, w, C] uint8.
    """
    signed = _signed(pictures)
    passes = [(2, horizontal), (1, vertical)]
    for axis, coefficients in reversed(passes) if columns_first else passes:
        signed = _resize_axis(signed, axis, coefficients)
    resized = lax.bitcast_convert_type(signed, jnp.uint8) ^ 128
    rows, columns = (jnp.any(axis.taps != 0, -1) for axis in (vertical, horizontal))
    inside = rows[:, :, None] & columns[:, None, :]
    return jnp.where(inside[..., None], resized, jnp.array(fill, jnp.uint8)[None, None, None])


def _signed(pixels: jax.Array) -> jax.Array:
    """Returns uint8 pixels minus 128, as int8."""
    return lax.bitcast_convert_type(pixels ^ 128, jnp.int8)


def _resize_axis(signed: jax.Array, axis: int, coefficients: Taps) -> jax.Array:
    """Computes one pass over an axis of pictures [B, H, W, C] of pixels minus 128."""
    dense = _dense(coefficients, signed.shape[axis])
    low = (dense + 128 & 255) - 128
    rest = dense - low >> 8
    middle = (rest + 128 & 255) - 128
    digits = jnp.stack([low, middle, rest - middle >> 8], 1).astype(jnp.int8)
    # [B, digit, result, ...] with the other axes of a picture.
    sums = lax.dot_general(
        digits, signed, (((3,), (axis,)), ((0,), (0,))), preferred_element_type=jnp.int32
    )
    total = (sums[:, 2] * 256 + sums[:, 1]) * 256 + sums[:, 0]
    total += (128 * dense.sum(-1, dtype=jnp.int32) + 2 ** (BITS - 1))[..., None, None]
    return jnp.moveaxis(_signed(jnp.clip(total >> BITS, 0, 255).astype(jnp.uint8)), 1, axis)


def _dense(coefficients: Taps, size: int) -> jax.Array:
    """Returns the coefficients as matrices [B, results, size] int32."""
    first, taps = coefficients
    place = jnp.arange(size, dtype=jnp.int32)[None, None] - first[..., None]
    K = taps.shape[-1]
    found = jnp.take_along_axis(taps, jnp.clip(place, 0, K - 1), -1)
    return jnp.where((place >= 0) & (place < K), found, 0)
