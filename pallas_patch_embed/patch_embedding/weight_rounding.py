"""Rounding of weights to int8 or float8, to nearest or with error feedback.

Pixels that are near one another are nearly equal, so the error of a patch embedding is small if the
rounding errors of neighbouring weights cancel. Error feedback makes them cancel: it rounds the
weights of a channel one after another and subtracts from those that follow what minimises the
expected error (GPTQ, arXiv 2210.17323, with a covariance of pixels that needs no data).

With e_k the error of weight k, C the covariance of the pixels and H = C + damping * I, the expected
error e^T H e is least if each error is followed by

    x_j -= e_k * U_kj / U_kk for all j > k,  where inv(H) = U^T U and U is upper triangular.

C is the Kronecker product of P, the covariance of pixels, and Q, that of colours. Q has two
eigenvalues: one for the mean of the colours and one for all differences from the mean. So inv(H)
and U consist of two matrices [pixels, pixels], whatever the number of colours.

All sums are of integers in fixed point, so they do not depend on the order in which a compiler adds
them: the bits are the same inside and outside of jit, on a CPU and on a GPU.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from pallas_patch_embed.base.dtypes import TABLE

# Distance in pixels at which the covariance of photographs has fallen to 1 / e, and the correlation
# of two colours of a pixel. Frames of a video count as one pixel apart.
CORRELATION_LENGTH = 20.0
COLOUR_CORRELATION = 0.92

# A larger number weakens the feedback. White noise has no neighbours that are alike, so feedback
# increases its error. The first number for which the increase is at most MOST_NOISE is taken: 0.02
# for patches of 5 x 5 pixels and larger (1.20 times for 16 x 16 in three colours, where 0.01 would
# be 1.25 times; the errors for photographs differ by 3%).
DAMPINGS = (0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
MOST_NOISE = 1.235

# Fraction bits of weights, of their errors and of the gains by which errors are multiplied. Weights
# and sums of products have the same number, so that a sum needs no shift.
WEIGHT_BITS, ERROR_BITS, GAIN_BITS = 21, 10, 11
# Added before the shift that drops fraction bits, so that the shift rounds to nearest.
HALF_ERROR = 1 << (WEIGHT_BITS - ERROR_BITS - 1)

# An error is stored as int16, so it is less than 32. The largest sum of the magnitudes of the gains
# for which no sum exceeds int32: 448 + 32 * 17 < 1024 = 2^(31 - 21).
LARGEST_WEIGHT, LARGEST_GAINS = 448.0, 17.0

type Rounding = Literal["feedback", "nearest"]

ROUNDINGS = ("feedback", "nearest")


def check_rounding(rounding: Any) -> Rounding:
    """Returns the name of a way to round; raises ValueError if it is not one of ROUNDINGS."""
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding is {rounding!r}, expected 'feedback', so that the errors of neighbouring "
            "pixels cancel, or 'nearest'."
        )
    return rounding  # type: ignore[return-value]


class PatchShape(NamedTuple):
    """The pixels of a patch, and their order along K.

    Attributes:
      patch_size: side of the patch in pixels.
      channels: number of colours.
      frames: frames of a video in one patch; None for images.
    """

    patch_size: int
    channels: int
    frames: int | None

    @property
    def pixels(self) -> int:
        return self.patch_size**2 * (self.frames or 1)

    def by_channel(self, weight: Any) -> Any:
        """Returns a weight [N, K] as [N, channels, pixels]."""
        if self.frames is None:
            return weight.reshape(-1, self.pixels, self.channels).swapaxes(1, 2)
        return weight.reshape(-1, self.channels, self.pixels)

    def by_k(self, weight: jax.Array) -> jax.Array:
        """Returns a weight [N, channels, pixels] as [N, K]."""
        if self.frames is None:
            weight = weight.swapaxes(1, 2)
        return weight.reshape(len(weight), -1)


class Gains(NamedTuple):
    """Factors from the error of a weight to the weights that follow, with GAIN_BITS fraction bits.

    Attributes:
      same: [pixels, pixels] int32, the gain from an earlier pixel (second axis) to a later one
        (first axis), for the same colour.
      mean: [pixels, pixels] int32, the further gain from the sum of all colours of the earlier
        pixel to each colour of the later one.
      within: [pixels, channels] int32, the gain from a colour to each later colour of its pixel.
    """

    same: npt.NDArray[np.int32]
    mean: npt.NDArray[np.int32]
    within: npt.NDArray[np.int32]


def covariance(shape: PatchShape) -> npt.NDArray[np.float64]:
    """Returns the covariance P [pixels, pixels] of photographs: exp(-distance / 20 pixels)."""
    sides = shape.frames or 1, shape.patch_size, shape.patch_size
    place = np.indices(sides).reshape(3, -1).T.astype(np.float64)
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b, exact for integers.
    squares = np.sum(place**2, 1)
    distance = np.sqrt(squares[:, None] + squares - 2 * place @ place.T)
    return np.exp(-distance / CORRELATION_LENGTH)


@functools.cache
def gains(shape: PatchShape) -> Gains:
    """Computes the gains, in float64 on the host."""
    for damping in DAMPINGS:
        found = _gains(shape, damping)
        if _noise(*found) <= MOST_NOISE:
            break
    assert all(np.abs(gain).max() <= 1 for gain in found)
    same, of_all, inner = (np.abs(gain) for gain in found)
    assert (same.sum(1) + shape.channels * of_all.sum(1) + inner.sum(1)).max() < LARGEST_GAINS
    return Gains(*(np.round(gain * 2**GAIN_BITS).astype(np.int32) for gain in found))


def _noise(same: npt.NDArray[Any], mean: npt.NDArray[Any], within: npt.NDArray[Any]) -> float:
    """Returns the factor by which feedback increases the error for white noise.

    The arguments are gains as floats. The errors of the loop are independent of each other. Each
    one changes the later colours of its pixel, and the changes of a pixel change all later pixels.
    """
    channels = within.shape[1]
    later = np.arange(channels)[::-1]
    own, total = 1 + later * within**2, 1 + later * within
    squares = 1 + (same**2).sum(0), (2 * same * mean + channels * mean**2).sum(0)
    return float(np.sqrt(np.mean(own * squares[0][:, None] + total**2 * squares[1][:, None])))


def _gains(shape: PatchShape, damping: float) -> tuple[npt.NDArray[Any], ...]:
    """Computes the gains of `Gains` as floats."""
    P, channels = covariance(shape), shape.channels
    along_mean = 1 + (channels - 1) * COLOUR_CORRELATION
    # U / diag(U) and diag(U)^2, for the mean of the colours and for the differences from it.
    factors = []
    for eigenvalue in (along_mean, 1 - COLOUR_CORRELATION):
        inverse = np.linalg.inv(eigenvalue * P + damping * np.eye(len(P)))
        upper = np.linalg.cholesky(inverse).T
        diagonal = np.diag(upper)
        factors.append((np.triu(upper / diagonal[:, None], 1), diagonal**2))
    (mean, of_mean), (difference, of_difference) = factors
    # The colours of a pixel have inv(H) = a * I + b, of which each colour that has been rounded
    # leaves a matrix of the same form for the others.
    a, b = of_difference, (of_mean - of_difference) / channels
    within = np.zeros((len(P), channels))
    for colour in range(channels - 1):
        within[:, colour] = b / (a + b)
        b = a * b / (a + b)
    return difference.T, (mean - difference).T / channels, within


def relative_errors(
    exact: npt.NDArray[Any], rounded: npt.NDArray[Any], shape: PatchShape
) -> npt.NDArray[np.float64]:
    """Returns the expected relative error of each output channel on photographs, [N].

    sqrt((e^T C e) / (w^T C w)) for the weight w of a channel and its rounding error e; 0 for a
    channel of zeros.

    Args:
      exact, rounded: [N, K].
      shape: the shape of a patch, of K numbers.
    """

    def expected_square(weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        of_channels = np.asarray(shape.by_channel(weight))
        total = of_channels.sum(1)
        same = np.einsum("ncp,ncp->n", of_channels @ P, of_channels)
        between = np.einsum("np,np->n", total @ P, total)
        return (1 - COLOUR_CORRELATION) * same + COLOUR_CORRELATION * between

    P = covariance(shape)
    exact = exact.astype(np.float64)
    square, signal = expected_square(rounded - exact), expected_square(exact)
    return np.sqrt(np.divide(square, signal, out=np.zeros_like(square), where=signal > 0))


def round_to_nearest(x: jax.Array, dtype: str) -> jax.Array:
    """Rounds float32 to the nearest number of int8 or a float8, ties to even.

    Numbers beyond the range become the largest of that sign. XLA's own conversion to float8 rounds
    twice on a CPU, first to float16.
    """
    largest = TABLE[dtype].largest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(x), -largest, largest).astype(dtype)
    # Float32 has 23 fraction bits. Below the smallest normal number the distance between two
    # numbers of the dtype is `step`.
    format = jnp.finfo(dtype)
    dropped = 23 - format.nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + (2 ** (dropped - 1) - 1) + ((bits >> dropped) & 1)) & -(2**dropped)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    step = 2.0 ** int(format.minexp - format.nmant)
    subnormal = jnp.round(x * np.float32(1 / step)) * np.float32(step)
    nearest = jnp.where(jnp.abs(x) < 2.0 ** int(format.minexp), subnormal, normal)
    return jnp.clip(nearest, -largest, largest).astype(dtype)


def round_with_feedback(x: jax.Array, dtype: str, shape: PatchShape) -> jax.Array:
    """Rounds a scaled weight [N, K] so that the errors of neighbouring weights cancel.

    Args:
      x: float32, with magnitudes up to the largest of `dtype`.
      dtype: "int8" or a float8.
      shape: the shape of a patch, of K numbers.

    Returns:
      [N, K] of `dtype`. The rounding of a channel does not depend on the other channels.
    """
    # Formats with a larger range than float8_e4m3fn have fewer fraction bits.
    more = max(0, math.ceil(math.log2(TABLE[dtype].largest / LARGEST_WEIGHT)))
    unit = np.float32(2.0 ** (WEIGHT_BITS - more))
    fixed = jnp.round(shape.by_channel(x) * unit).astype(jnp.int32)
    same, mean, within = map(jnp.asarray, gains(shape))

    def fed_back(errors: jax.Array, gain: jax.Array) -> jax.Array:
        """Sums errors [N, channels, pixels] times gain [pixels] over the pixels."""
        return jnp.sum(errors.astype(jnp.int32) * lax.expand_dims(gain, (0, 1)), axis=2)

    def error_of(exact: jax.Array, rounded: jax.Array) -> jax.Array:
        back = (rounded.astype(jnp.float32) * unit).astype(jnp.int32)
        error = (exact - back + HALF_ERROR) >> (WEIGHT_BITS - ERROR_BITS)
        return jnp.clip(error, -(2**15) + 1, 2**15 - 1)

    def round_pixel(errors: jax.Array, of_pixel: Any) -> tuple[jax.Array, jax.Array]:
        index, exact, same, mean, within = of_pixel
        of_all_colours = jnp.sum(fed_back(errors, mean), axis=1, keepdims=True)
        exact = exact - fed_back(errors, same) - of_all_colours

        def round_channel(change: jax.Array, of_channel: Any) -> tuple[jax.Array, jax.Array]:
            exact, within = of_channel
            changed = exact - change
            rounded = round_to_nearest(changed.astype(jnp.float32) * (1 / unit), dtype)
            return change + error_of(changed, rounded) * within, rounded

        # Unrolled, because on a GPU every step of a loop launches kernels.
        _, rounded = lax.scan(
            round_channel, exact[:, 0] * 0, (exact.T, within), unroll=min(shape.channels, 4)
        )
        error = error_of(exact, rounded.T).astype(jnp.int16)
        return lax.dynamic_update_index_in_dim(errors, error, index, 2), rounded

    of_pixels = jnp.arange(shape.pixels), jnp.moveaxis(fixed, 2, 0), same, mean, within
    _, rounded = lax.scan(round_pixel, (fixed * 0).astype(jnp.int16), of_pixels)
    return shape.by_k(jnp.moveaxis(rounded, (2, 1), (0, 1)))
