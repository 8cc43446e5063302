"""The weights and scales of an encoder in 8 bits, computed on the host when it is calibrated.

Three things make a layer's result as exact as 8 bits allow:

- Smoothing (SmoothQuant, arXiv 2211.10438): the input's channel k is divided by s_k and the
  weight's row k multiplied, s_k = sqrt(max |x_k| / max |w_k|). For q, k, v and fc1 the division
  becomes part of the norm's scale and bias, for out part of v's columns. Both are exact.
- Error feedback (GPTQ, arXiv 2210.17323): weights are rounded one input channel after another, and
  each error is subtracted from the weights that follow as the covariance of the inputs says.
- The mean of the error that remains becomes part of the bias.

q, k, v and fc1 get the norm's result with a scale for each token. Attention's result has one scale
that is known before, and becomes part of v's columns, too. What fc2 gets has a factor for each
hidden unit and one shift, which becomes part of fc2's bias. The factor is the same for most units,
and smaller for the few that reach large numbers.
"""

import contextlib
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.encoders.config import Config, TextConfig
from pallas_patch_embed.encoders.layouts import layer_by_outputs, padded, split

type Array = npt.NDArray[Any]

# A dense layer of a block, as (number of the block, name of the layer).
type Unit = tuple[int, str]

# The layers whose inputs are divided by numbers that the blocks' other weights compensate.
SMOOTHED = ("qkv", "out", "fc1")

# Parts of the mean of the covariance's diagonal that are added to it: the first, which is GPTQ's
# default, with which the covariance of few pictures, a difference of float32, can be inverted.
DAMPINGS = (0.01, 0.1, 1.0, 10.0)

# The part of the hidden units whose largest numbers decide the levels of all units. On a DINOv2
# S/14 with its trained weights the mean cosine was 0.99952 with 0.99, 0.99954 with 0.97, 0.99953
# with 0.9 and 0.99909 with 1; the least was 0.9981, 0.9971, 0.9966 and 0.9967.
MOST_UNITS = 0.99

# Limits of the numbers by which the other units are divided, and how much larger the expected
# square of the weights' errors may become.
LIMITS, MOST_GROWTH = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0), 1.8

# Input channels whose errors change the later weights in one product, and half of the largest
# matrix that is inverted as a whole.
COLUMNS, SMALLEST_HALF = 64, 128


class Statistics(NamedTuple):
    """The inputs of a dense layer in each block, over all tokens.

    Attributes:
      least, largest, mean: of each channel, [L, K].
      moment: the mean of x_j x_k, [L, K, K].
    """

    least: Any
    largest: Any
    mean: Any
    moment: Any

    @property
    def magnitude(self) -> Array:
        """The largest magnitude of each channel."""
        return np.maximum(np.abs(self.least), np.abs(self.largest))

    def divided(self, by: Array) -> "Statistics":
        """Returns the statistics of the inputs divided by positive numbers [L, K]."""
        moment = self.moment / (by[:, :, None] * by[:, None, :])
        return Statistics(self.least / by, self.largest / by, self.mean / by, moment)

    def padded(self, columns: int) -> "Statistics":
        """Returns the statistics with channels of zeros behind the others."""
        pad = [(0, 0), (0, columns)]
        least, largest, mean = (np.pad(x, pad) for x in (self.least, self.largest, self.mean))
        return Statistics(least, largest, mean, np.pad(self.moment, [*pad, (0, columns)]))


class Prepared(NamedTuple):
    """Blocks in float32 that compute what the checkpoint's compute, ready to be rounded.

    Attributes:
      blocks: as in `Encoder`. out's input are levels before they are rounded, and the width of the
        MLP's hidden layer is a multiple of 128.
      statistics: of each dense layer's input.
      divisors: as for `smoothed`.
      factor, shift: [L, M] and [L, 1], of the levels that fc2 gets.
      dtype: dtype of levels and weights, one of `EIGHT_BITS`.
    """

    blocks: dict[str, Any]
    statistics: dict[str, Statistics]
    divisors: dict[str, Array]
    factor: Array
    shift: Array
    dtype: str


def prepare(
    blocks: dict[str, Any],
    statistics: dict[str, Statistics],
    config: Config | TextConfig,
    dtype: str,
) -> Prepared:
    """Pads the hidden layer, smooths the inputs of layers, and computes their static scales."""
    limit = TABLE[dtype].largest
    divisors = {layer: _smoothing(statistics[layer], blocks[layer]["kernel"]) for layer in SMOOTHED}
    largest = (statistics["out"].magnitude / divisors["out"]).max(1, keepdims=True)
    divisors["out"] = divisors["out"] * np.where(largest > 0, largest, 1) / limit
    blocks = smoothed(blocks, divisors, config)
    statistics = statistics | {
        layer: statistics[layer].divided(by) for layer, by in divisors.items()
    }
    statistics["fc2"] = statistics["fc2"].padded(blocks["fc2"]["kernel"].shape[1] - config.mlp)
    hidden = statistics["fc2"]
    by = np.ones_like(hidden.mean)
    if TABLE[dtype].holds_levels:  # The steps of float8 grow with the numbers.
        by = _above_most_units(hidden, blocks["fc2"]["kernel"], limit)
    least, largest = _range(hidden, by)
    if not TABLE[dtype].holds_levels:  # Float8 is most exact near 0, so 0 is not shifted.
        least, largest = -np.maximum(-least, largest), np.maximum(-least, largest)
    factor = 2 * limit / np.maximum(largest - least, 1e-30)
    shift = (-limit - least * factor).astype(np.float32)
    factor = (factor[:, None] / by).astype(np.float32)
    return Prepared(blocks, statistics, divisors, factor, shift[:, None], dtype)


def smoothed(
    blocks: dict[str, Any], divisors: dict[str, Array], config: Config | TextConfig
) -> dict[str, Any]:
    """Returns `Prepared.blocks`.

    Args:
      blocks: of an encoder in float32, [in, out], on the host.
      divisors: for each layer of `SMOOTHED` the numbers [L, K] by which its inputs are divided,
        those of out to levels.
      config: of the encoder.
    """
    D, blocks = config.width, padded(blocks, config)
    for norm, layer in (("norm1", "qkv"), ("norm2", "fc1")):
        blocks[norm] = {name: x / divisors[layer] for name, x in blocks[norm].items()}
    for layer, by in divisors.items():
        blocks[layer] = blocks[layer] | {"kernel": blocks[layer]["kernel"] * by[:, :, None]}
    qkv = blocks["qkv"] | {"bias": blocks["qkv"]["bias"].copy()}
    qkv["kernel"][:, :, 2 * D :] /= divisors["out"][:, None, :]
    qkv["bias"][:, 2 * D :] /= divisors["out"]
    return blocks | {"qkv": qkv}


def _range(hidden: Statistics, by: Array) -> tuple[Array, Array]:
    """Returns the least and the largest number [L] of the hidden units divided by `by` [L, M]."""
    least, largest = (hidden.least / by).min(1), (hidden.largest / by).max(1)
    return np.minimum(least, 0), np.maximum(largest, 0)


def _above_most_units(hidden: Statistics, kernel: Array, limit: float) -> Array:
    """Returns the numbers [L, M] by which the hidden units are divided before they get levels.

    It is 1 for most units; for the few that reach larger numbers, how much larger they are.
    Otherwise these would make the steps of all units large. The weights of these units become
    larger instead, and with them the steps of other weights. So the numbers have a limit, that of
    LIMITS with which the expected square of fc2's error is least among those with which the part of
    the weights is at most MOST_GROWTH times as large. Pooling does not make that part smaller, as
    it does with errors of the input, which differ from token to token.
    """
    above = np.ones_like(hidden.mean)
    for block, row in enumerate(hidden.magnitude):
        if (used := row[row > 0]).size:
            above[block] = np.maximum(row / np.quantile(used, MOST_UNITS), 1)
    variance = np.einsum("lkk->lk", hidden.moment) - np.square(hidden.mean)

    def squares(by: Array) -> tuple[Array, Array]:
        """Returns the expected squares [L] of the errors that input and weights cause.

        The square of a rounding error is that of its step / 12.
        """
        least, largest = _range(hidden, by)
        step = by * ((largest - least) / (2 * limit))[:, None]
        of_input = np.minimum(np.square(step) / 12, variance) * np.square(kernel).sum(2)
        step = np.abs(kernel * by[:, :, None]).max(1) / limit
        of_weight = np.square(step).sum(1) / 12 * (variance / np.square(by)).sum(1)
        return of_input.sum(1), of_weight

    found = [np.minimum(above, most) for most in LIMITS]
    of_input, of_weight = np.stack([squares(by) for by in found], 1)
    allowed = of_weight <= MOST_GROWTH * of_weight[0]
    best = np.where(allowed, of_input + of_weight, np.inf).argmin(0)
    return np.stack(found)[best, np.arange(len(best))]


def _smoothing(statistics: Statistics, kernel: Array) -> Array:
    """Returns the numbers [L, K] by which the channels of a layer's input are divided."""
    x, weight = statistics.magnitude, np.abs(kernel).max(2)
    used = (x > 0) & (weight > 0)
    return np.sqrt(np.divide(x, weight, out=np.ones_like(x), where=used))


def rounded(prepared: Prepared) -> dict[str, dict[str, Array]]:
    """Returns the dense layers of all blocks in 8 bits.

    Returns:
      For each layer "weight" [L, N, K], "scale" [L, N] and "bias" [L, N]. fc2 also has "factor"
      [L, K] and "shift" [L, 1], of the levels that it gets.
    """
    found = {}
    for layer, moments in prepared.statistics.items():
        parts = [_round(prepared, block, layer) for block in range(len(moments.mean))]
        found[layer] = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    return found


def _round(prepared: Prepared, block: int, layer: str) -> dict[str, Array]:
    """Returns a layer of `rounded` of one block."""
    kernel, bias = (prepared.blocks[layer][name][block] for name in ("kernel", "bias"))
    moments = prepared.statistics[layer]
    mean = moments.mean[block].astype(np.float64)
    covariance = moments.moment[block].astype(np.float64) - np.outer(mean, mean)
    exact, levels = kernel.T.astype(np.float64), {}
    if layer == "fc2":
        levels = {"factor": prepared.factor[block], "shift": prepared.shift[block]}
        factor, shift = (x.astype(np.float64) for x in levels.values())
        # In units of the levels' steps.
        exact, mean = exact / factor, mean * factor
        covariance = covariance * np.outer(factor, factor)
    largest = np.abs(exact).max(1)
    scale = np.where(largest > 0, largest, 1) / TABLE[prepared.dtype].largest
    weight = round_with_covariance(exact / scale[:, None], covariance, prepared.dtype)
    found = weight.astype(np.float64) * scale[:, None]
    bias = bias + (exact - found) @ mean
    if layer == "fc2":
        bias = bias - found.sum(1) * shift
    return {
        "weight": weight,
        "scale": scale.astype(np.float32),
        "bias": bias.astype(np.float32),
    } | levels


def round_with_covariance(x: Array, covariance: Array, dtype: str) -> Array:
    """Rounds a scaled weight [N, K] to this dtype so that the errors of a row cancel.

    The expected square of a row's error is e^T C e for the errors e = x - rounded and the inputs'
    covariance C. Each channel's error changes the weights of the channels that follow:

        x_j -= e_k * U_kj / U_kk for all j > k,  where inv(C + damping) = U^T U, U upper triangular.

    Channels of large variance come first, because later errors are larger.
    """
    K = len(covariance)
    order = np.argsort(-np.diag(covariance), kind="stable")
    gains = _gains(covariance[np.ix_(order, order)]).astype(np.float32)
    left = x[:, order].astype(np.float32).T.copy()  # [K, N], so that a channel is contiguous.
    limit, rounded = TABLE[dtype].largest, np.empty(left.shape, dtype)
    for first in range(0, K, COLUMNS):
        last = min(first + COLUMNS, K)
        errors = np.empty((last - first, len(x)), np.float32)
        for k in range(first, last):
            nearest = np.round(left[k]) if TABLE[dtype].holds_levels else left[k]
            rounded[k] = np.clip(nearest, -limit, limit).astype(dtype)
            errors[k - first] = left[k] - rounded[k].astype(np.float32)
            left[k + 1 : last] -= np.outer(gains[k, k + 1 : last], errors[k - first])
        left[last:] -= gains[first:last, last:].T @ errors
    found = np.empty_like(rounded)
    found[order] = rounded
    return found.T


def _gains(covariance: Array) -> Array:
    """Returns U_kj / U_kk [K, K]; the identity, which rounds to nearest, for inputs of zeros."""
    eye, mean = np.eye(len(covariance)), covariance.diagonal().mean()
    for damping in DAMPINGS:
        with contextlib.suppress(np.linalg.LinAlgError):
            # inv(C) = U^T U if J C J = L L^T and U = J inv(L) J, where J reverses the channels.
            damped = covariance + damping * mean * eye
            upper = _inverse_factor(damped[::-1, ::-1])[::-1, ::-1]
            return upper / upper.diagonal()[:, None]
    return eye


def _inverse_factor(matrix: Array) -> Array:
    """Returns inv(L) of a positive definite matrix L L^T, L lower triangular.

    It divides the matrix into halves, so that nearly all of the work is in products: two cores take
    half of the time of `np.linalg.inv` and `cholesky`.
    """
    half = len(matrix) // 2
    if half < SMALLEST_HALF:
        return np.linalg.inv(np.linalg.cholesky(matrix))
    found = np.zeros_like(matrix)
    first = found[:half, :half] = _inverse_factor(matrix[:half, :half])
    below = matrix[half:, :half] @ first.T
    last = found[half:, half:] = _inverse_factor(matrix[half:, half:] - below @ below.T)
    found[half:, :half] = -last @ (below @ first)
    return found


def runs(
    blocks: dict[str, Any],
    in_8_bits: dict[str, dict[str, Array]],
    kept: Collection[Unit],
    config: Config | TextConfig,
) -> tuple[dict[str, Any], ...]:
    """Returns the blocks of an encoder in 8 bits.

    Args:
      blocks: as from `smoothed`.
      in_8_bits: the dense layers, as from `rounded`.
      kept: the layers that are in bfloat16.
      config: of the encoder.
    """
    patterns = [
        tuple(layer for layer in in_8_bits if (block, layer) in kept)
        for block in range(config.depth)
    ]
    found = []
    for kept_layers, numbers in itertools.groupby(range(config.depth), patterns.__getitem__):
        rows = list(numbers)
        rounded_layers = in_8_bits.keys() - set(kept_layers)
        run = {
            name: {key: x[rows] for key, x in p.items()}
            for name, p in blocks.items()
            if name not in rounded_layers
        }
        for layer in kept_layers:
            run[layer] = layer_by_outputs(run[layer], layer, config)
        for layer in rounded_layers:
            run[layer] = {key: split(x[rows], layer, config) for key, x in in_8_bits[layer].items()}
        found.append(run)
    return tuple(found)
