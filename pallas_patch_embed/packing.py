"""Packing: from a checkpoint's kernel, bias and positions to PatchEmbedParams.

One implementation serves known and traced values. `_packed` is one jitted function: outside of jit
it is compiled by itself, inside of a model's jit it becomes part of that program. Its arithmetic is
written so that XLA computes the same bits either way:

  no division of arrays by a constant   XLA multiplies by the reciprocal under jit only
  no sum of floats over K               its order is the compiler's; sums of int32 are exact
  no sum whose term is a product        LLVM may fuse them into one rounding (see `_rounded`)
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.typing import DTypeLike

from pallas_patch_embed.params import (
    PatchEmbedParams,
    check_dtype,
    check_grid,
    check_patch_size,
)
from pallas_patch_embed.problem import is_known, padded

# Layout of the kernel -> (its shape, the permutation to [N, height, width, channel]).
LAYOUTS = {
    "HWIO": ("[p, p, 3, N]", (3, 0, 1, 2)),
    "OIHW": ("[N, 3, p, p]", (0, 2, 3, 1)),
    "KN": ("[K, N]", (1, 0)),
    "NK": ("[N, K]", (0, 1)),
}

# The largest magnitude of each quantised format.
QUANTISED_MAX = {"float8_e4m3fn": 448.0, "int8": 127.0}

# 128 times the smallest normal float32: normal even after the factor 2 / 255 of int8.
SMALLEST_SCALE = 2.0**-119

FLOAT32 = np.finfo(np.float32)

# A float32 of at least this magnitude rounds to infinity in bfloat16: bfloat16's largest number and
# half of its step there.
BFLOAT16_OVERFLOW = 2.0**128 - 2.0**119


def pack(
    kernel: npt.ArrayLike,
    bias: npt.ArrayLike | None,
    position_embedding: npt.ArrayLike | None,
    *,
    patch_size: int,
    layout: Literal["HWIO", "OIHW", "KN", "NK"] = "HWIO",
    grid: tuple[int, int] | None = None,
    dtype: DTypeLike = "int8",
) -> PatchEmbedParams:
    """Packs a checkpoint's patch embedding into the form that the kernels read.

    It can be traced: under jit, vmap, scan, eval_shape and shard_map, and in a model's apply, it
    gives the bits that it gives outside, as long as the compiler is the same. A kernel sharded
    along N keeps its sharding. Outside of jit it is computed where its arguments are, numpy arrays
    on JAX's default device.

    Quantised weights have one scale per output channel: absmax / 448 for float8_e4m3fn, absmax /
    127 for int8, 1 for a channel of zeros (or of denormal numbers, which a GPU may flush to zero),
    and at least 2^-119, so that no GPU flushes it to zero. They are clipped to the format's range
    and rounded to nearest, ties to even. For int8, `scale` includes the encoding's factor 2 / 255.

    Args:
      kernel: floating-point array of the shape of `layout`.
      bias: [N], or None for no bias.
      position_embedding: [S, N], [1, S, N], [h, w, N], or None for no positions.
      patch_size: p, the side of a patch in pixels.
      layout: of the kernel. "HWIO" [p, p, 3, N] (flax), "OIHW" [N, 3, p, p] (PyTorch), "KN" [K, N]
        or "NK" [N, K], where K = 3 * p * p is flattened height, width, channel.
      grid: (h, w) with h * w = S; by default the sides of [h, w, N], otherwise a square.
      dtype: of patches and weight: "int8", "float8_e4m3fn", "bfloat16" or "float32".

    Returns:
      PatchEmbedParams.

    Raises:
      TypeError: an argument is not an array, or is not floating-point.
      ValueError: a shape, the patch size, the grid, the layout or the dtype is wrong; or a value is
        NaN, infinite or beyond the dtype's range. Values are checked where they are known: not
        those that jit traces, nor those of an array that this process cannot read whole.
    """
    patch_size, dtype = check_patch_size(patch_size), check_dtype(dtype)
    overflow = BFLOAT16_OVERFLOW if dtype == "bfloat16" else math.inf
    weights = _checked("kernel", kernel, overflow)
    N = _check_kernel_shape(weights, patch_size, layout)
    biases = None if bias is None else _checked("bias", bias)
    if biases is not None and biases.shape != (N,):
        raise ValueError(
            f"pack: bias has shape {list(biases.shape)}, expected [{N}]: one value for each of "
            "the kernel's output channels."
        )
    grid = None if grid is None else check_grid(grid)
    positions = None
    if position_embedding is not None:
        positions = _checked("position_embedding", position_embedding)
        grid = _grid_of(positions, N, grid)
    given = (weights, biases, positions)
    # Under a transfer guard, numpy arrays may not enter a jitted function by themselves.
    arrays = [x if x is None or isinstance(x, jax.Array) else jax.device_put(x) for x in given]
    weight, scale, offset, table = _packed(*arrays, layout=layout, dtype=dtype)
    _check_result("bias + the constant of int8", offset)
    _check_result("bias + position_embedding", table)
    return PatchEmbedParams(
        weight=weight,
        scale=scale,
        offset=offset,
        table=table,
        patch_size=patch_size,
        grid=grid,
        dtype=dtype,
        K=3 * patch_size**2,
    )


def _checked(name: str, value: Any, overflow: float = math.inf) -> Any:
    """A floating-point array, of JAX if it was one; refuses values of `overflow` and more."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        # A parameter of a framework, such as flax.nnx.Param.
        value = value.__jax_array__()
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError as error:
        raise TypeError(f"pack: {name} is not an array: {error}. Convert it to one.") from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"pack: {name} has dtype {array.dtype}, expected a floating-point array. Dequantise it "
            "or cast it to float32."
        )
    if not isinstance(array, jax.Array):
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    if is_known(array) and (wrong := _count_from(array, overflow)):
        beyond = "float32" if overflow == math.inf else "the range of bfloat16"
        raise ValueError(
            f"pack: {name} has {wrong} values that are NaN, infinite or beyond {beyond}. Expected "
            "finite values: check the checkpoint."
        )
    return array


def _count_from(array: Any, overflow: float) -> int:
    """How many values are NaN or have a magnitude of at least `overflow`."""
    if isinstance(array, np.ndarray):
        return int(array.size - np.count_nonzero(np.abs(array) < np.float32(overflow)))
    # The values are known, though jit may be tracing around this.
    with jax.ensure_compile_time_eval():
        return int(jax.device_get(_count_from_traced(array, overflow)))


@functools.partial(jax.jit, static_argnums=1)
def _count_from_traced(array: jax.Array, overflow: float) -> jax.Array:
    fits = jnp.abs(array.astype(jnp.float32)) < np.float32(overflow)
    return jnp.sum(~fits, dtype=jnp.int32)


def _check_result(name: str, array: Any) -> None:
    if array is not None and is_known(array) and (wrong := _count_from(array, math.inf)):
        raise ValueError(
            f"pack: {name} has {wrong} values beyond the range of {array.dtype}. Expected "
            "parameters whose sums are finite: check the checkpoint."
        )


def _check_kernel_shape(kernel: Any, patch_size: int, layout: Any) -> int:
    """Returns N, the number of output channels."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"pack: layout is {layout!r}, expected one of {', '.join(LAYOUTS)}.")
    text, order = LAYOUTS[layout]
    K = 3 * patch_size**2
    expected = (patch_size, patch_size, 3) if len(order) == 4 else (K,)
    fits = kernel.ndim == len(order) and 0 not in kernel.shape
    N, *others = (kernel.shape[axis] for axis in order) if fits else (0,)
    if tuple(others) != expected:
        raise ValueError(
            f"pack: kernel has shape {list(kernel.shape)}, expected {text} for layout={layout!r} "
            f"and patch_size={patch_size} (p = {patch_size}, K = {K}). Pass the layout and the "
            "patch_size of the checkpoint."
        )
    return N


def _grid_of(positions: Any, N: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """The grid of patches for which these are the positions, after the checks."""
    given = f"pack: position_embedding has shape {list(positions.shape)}"
    if positions.ndim not in (2, 3) or positions.shape[-1] != N or 0 in positions.shape:
        raise ValueError(
            f"{given}, expected [S, {N}], [1, S, {N}] or [h, w, {N}] for a kernel of {N} output "
            "channels. Drop a class token's row, if there is one."
        )
    if positions.ndim == 3 and positions.shape[0] > 1:
        if grid is not None and grid != positions.shape[:2]:
            raise ValueError(f"{given}, but grid is {grid}. Leave grid=None.")
        grid = positions.shape[:2]
    S = math.prod(positions.shape[:-1])
    if grid is None:
        side = math.isqrt(S)
        if side * side != S:
            raise ValueError(f"{given}: {S} positions are not a square. Pass grid=(height, width).")
        grid = (side, side)
    if math.prod(grid) != S:
        raise ValueError(
            f"{given}: {S} positions, but grid={grid} has {math.prod(grid)} patches. Pass the grid "
            "(height, width) of the positions."
        )
    return grid


@functools.partial(jax.jit, static_argnames=("layout", "dtype"), inline=True)
def _packed(
    kernel: jax.Array,
    bias: jax.Array | None,
    positions: jax.Array | None,
    *,
    layout: str,
    dtype: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Weight, scale, offset and table."""
    weight = kernel.astype(jnp.float32).transpose(LAYOUTS[layout][1])
    N, *rest = weight.shape
    weight = weight.reshape(N, math.prod(rest))
    if dtype in QUANTISED_MAX:
        weight, scale = _quantised(weight, dtype)
    else:
        weight, scale = weight.astype(dtype), jnp.ones_like(weight, np.float32, shape=(N,))
    offset = jnp.zeros_like(scale) if bias is None else bias.astype(jnp.float32)
    if dtype == "int8":
        # A pixel u stands for (2 * (u - 128) + 1) / 255. The factor 2 / 255 is part of the scale,
        # so half of the scale is what is left to multiply the weights' sum by.
        total = jnp.sum(weight, axis=1, dtype=jnp.int32).astype(jnp.float32)
        offset = offset + _rounded(total * (scale * np.float32(0.5)))
    table = None
    if positions is not None:
        positions = positions.astype(jnp.float32)
        if positions.ndim == 3:
            positions = positions.reshape(-1, N)
        table = jnp.expand_dims(offset, 0) + positions
        table = table.astype(jnp.float32 if dtype == "float32" else jnp.bfloat16)
    K = weight.shape[1]
    weight = jnp.pad(weight, ((0, 0), (0, padded(K) - K)))
    return weight, scale, offset, table


def _quantised(weight: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Weight [N, K] in `dtype`, and its scale [N], which for int8 includes the factor 2 / 255."""
    largest = QUANTISED_MAX[dtype]
    factor = 2 / 255 if dtype == "int8" else 1.0
    # The transposed kernel is read twice, for the scales and for the weights: the barrier makes XLA
    # write it out once.
    weight = lax.optimization_barrier(weight)
    magnitude = jnp.abs(weight)
    # One maximum finds the scale and also whether all weights of the channel are zero: then it is
    # -factor, whose magnitude is the scale of such a channel.
    scales = jnp.where(
        magnitude < FLOAT32.tiny,
        np.float32(-factor),
        jnp.maximum(magnitude * np.float32(factor / largest), np.float32(SMALLEST_SCALE * factor)),
    )
    scale = jnp.abs(jnp.max(scales, axis=1))
    inverse = np.float32(factor) / scale
    quantised = jnp.clip(weight * jnp.expand_dims(inverse, 1), -largest, largest)
    if dtype == "int8":
        quantised = jnp.round(quantised)
    return quantised.astype(dtype), scale


def _rounded(product: jax.Array) -> jax.Array:
    """The product, rounded to float32 before anything is added to it.

    LLVM fuses a product and a sum into one operation with one rounding, also across XLA's
    optimization_barrier; it does not across a maximum. No finite number is changed.
    """
    return jnp.maximum(product, -FLOAT32.max)
