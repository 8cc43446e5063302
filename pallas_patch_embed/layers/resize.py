"""Resizing of uint8 pictures on the device, with the pixels that Pillow computes.

Pillow resizes an axis in a pass: each result is a sum of pixels p times coefficients c, integers in
units of 2^-22, which is rounded to uint8. A second pass resizes the other axis. This module
computes the same integers, so every pixel is equal. Source: src/libImaging/Resample.c of Pillow
13.0.0, and of 11.0.0 to 12.3.0, which always resize the rows first.

No value exceeds int32. Let A be sum(|c|) 2^-22, which is below 1.6 (1.57 for lanczos, 1.27 for
bicubic, 1 for the other filters). Every partial sum is at most 255 A 2^22 < 2^30.7, in whatever
order the terms are added. Pillow adds 2^21 to the result and computes it in int32, too.

XLA computes up to TURN coefficients of a pass in one kernel, which reads the pixels where they are,
and leaves out most of the coefficients that are 0. If 500 pixels become 224, a result has 9 other
coefficients. A kernel that separates the pictures, and products of int8 on tensor cores with all
coefficients, take 1.2 to 2.1 times as long in all (docs/experiments/embed.md).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

# Number of bits of a coefficient after the point.
BITS = 22

# Sides in pixels to which pictures are padded on the device, so that there are few programs. A side
# of at least 128 pixels becomes at most 1.5 times as long, and 1.2 times on average over the
# logarithm of the side.
SIDES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_SIDE = SIDES[-1]

# Numbers of coefficients of a result for which there are programs. More than TURN are added in
# turns of so many, between which the sums are in memory.
TURN = 32
TAPS = (*range(4, TURN + 1, 4), 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


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


def most_taps(size: int, to: int, name: str) -> int:
    """Returns how many coefficients a result has at most, also of an axis of fewer pixels."""
    return min(size, math.ceil(2 * FILTERS[name][0] * max(size / to, 1)) + 1)


def padded_taps(most: int) -> int:
    """Returns the smallest of `TAPS` that is not smaller than this number of coefficients."""
    return next(number for number in TAPS if number >= most)


def stacked(parts: Sequence[Taps], pictures: int, most: int) -> Taps:
    """Stacks the coefficients of at most `pictures` pictures.

    Args:
      parts: from `taps`, for equally many results.
      pictures: number of pictures.
      most: as from `most_taps`, of all parts.

    Returns:
      `first` [pictures, results] and `taps` [pictures, K, results] with K from `TAPS`.
    """
    K = padded_taps(most)
    results = len(parts[0].first)
    found = Taps(
        np.zeros((pictures, results), np.int32), np.zeros((pictures, K, results), np.int32)
    )
    for i, part in enumerate(parts):
        found.first[i], found.taps[i, : part.taps.shape[1]] = part.first, part.taps.T
    return found


@functools.partial(jax.jit, static_argnames=("shape", "columns_first", "fill"))
def resize(
    pixels: jax.Array,
    where: jax.Array,
    vertical: Taps,
    horizontal: Taps,
    *,
    shape: tuple[int, int, int],
    columns_first: bool = False,
    fill: tuple[int, ...] = (0,),
) -> jax.Array:
    """Resizes pictures, and crops or pads the results, as Pillow does.

    Args:
      pixels: [N] uint8, pictures of [height, width, C] pixels without padding.
      where: [2, B] int32, where each picture begins, and its width.
      vertical, horizontal: the coefficients of both axes for h and w results, from `stacked`. They
        say which pixels belong to a picture.
      shape: (H, W, C), no smaller than the shape of a picture.
      columns_first: whether the columns are resized before the rows.
      fill: the value of each channel, or of all channels, outside of a picture.

    Returns:
      [B, h, w, C] uint8.
    """
    B, (H, W, C) = where.shape[1], shape
    h, w = (axis.first.shape[1] for axis in (vertical, horizontal))
    begins, pitches = where[0], C * where[1]
    between = (h, W, C) if columns_first else (H, w, C)
    passes = [(vertical, 0), (horizontal, 1)]
    for (coefficients, axis), results in zip(
        passes if columns_first else passes[::-1], (between, (h, w, C)), strict=True
    ):
        pixels = _resize_axis(pixels, begins, pitches, coefficients, axis, results).reshape(-1)
        pitch = results[1] * C
        begins = results[0] * pitch * jnp.arange(B, dtype=jnp.int32)
        pitches = jnp.full(B, pitch, jnp.int32)
    rows, columns = (jnp.any(axis.taps != 0, 1) for axis in (vertical, horizontal))
    inside = (rows[:, :, None] & columns[:, None, :])[..., None]
    return jnp.where(
        inside, pixels.reshape(B, h, w, C), jnp.array(fill, jnp.uint8)[None, None, None]
    )


def _resize_axis(
    pixels: jax.Array,
    begins: jax.Array,
    pitches: jax.Array,
    coefficients: Taps,
    axis: int,
    shape: tuple[int, int, int],
) -> jax.Array:
    """Computes one pass over pictures.

    Args:
      pixels: [N] uint8, the pictures, which need not fill it.
      begins, pitches: [B] int32, where each picture begins, and the distance of its rows.
      coefficients: as from `stacked`.
      axis: 0 if the pass resizes the columns, which changes the number of rows; 1 for the rows.
      shape: (rows, columns, C) of the results.

    Returns:
      [B, rows, columns, C] uint8. What is computed from pixels outside of a picture is arbitrary.
    """
    whole = len(begins), *shape
    row, column, channel = (lax.broadcasted_iota(jnp.int32, whole, i) for i in (1, 2, 3))

    def along(x: Any) -> jax.Array:
        """Broadcasts numbers of each picture [B], or of each of its results on the axis [B, n]."""
        return lax.broadcast_in_dim(x, whole, (0, 1 + axis)[: x.ndim])

    pitch, C = along(pitches), shape[2]
    place = along(begins) + channel + (column * C if axis == 0 else row * pitch)
    step = pitch if axis == 0 else C
    first, last = place + along(coefficients.first) * step, len(pixels) - 1
    K = coefficients.taps.shape[1]
    turn = min(K, TURN)

    def add(number: jax.Array | int, total: jax.Array) -> jax.Array:
        for i in range(turn):
            k = jnp.int32(number * turn + i)
            tap = lax.dynamic_index_in_dim(coefficients.taps, k, 1, keepdims=False)
            # A coefficient behind the others is 0, whatever is read for it.
            pixel = pixels.at[jnp.minimum(first + k * step, last)].get(mode="promise_in_bounds")
            total += along(tap) * pixel.astype(jnp.int32)
        return total

    total = jnp.zeros(whole, jnp.int32)
    total = add(0, total) if K == turn else lax.fori_loop(0, K // turn, add, total)
    return jnp.clip(total + 2 ** (BITS - 1) >> BITS, 0, 255).astype(jnp.uint8)
