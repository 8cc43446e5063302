"""Packing of a checkpoint's kernel, bias and positions into PatchEmbedParams.

The same code packs known and traced values. `_packed` is one jitted function: outside of jit it is
compiled by itself, inside a model's jit it becomes part of that program. Its arithmetic avoids
everything that XLA may round differently in the two cases:

  division of arrays by a constant   XLA multiplies by the reciprocal, but only under jit
  reduction that adds floats         the compiler chooses its order; sums of int32 are exact
  product that is a term of a sum    LLVM may fuse the two into one rounding (see `rounded`)
"""

import functools
import math
import numbers
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.problem import is_known, padded
from pallas_patch_embed.patch_embedding.params import (
    PatchEmbedParams,
    PerChannel,
    check_channels,
    check_dtype,
    check_grid,
    check_normalisation,
    check_patch_size,
    patch_length,
)
from pallas_patch_embed.patch_embedding.patches import rounded
from pallas_patch_embed.patch_embedding.weight_rounding import (
    PatchShape,
    Rounding,
    check_rounding,
    relative_errors,
    round_to_nearest,
    round_with_feedback,
)

# The shape of the kernel in each layout, and the permutation that puts N first and K in the packed
# order.
LAYOUTS = {
    "HWIO": ("[p, p, C, N]", (3, 0, 1, 2)),
    "OIHW": ("[N, C, p, p]", (0, 2, 3, 1)),
    "OITHW": ("[N, C, T, p, p]", (0, 1, 2, 3, 4)),
    "KN": ("[K, N]", (1, 0)),
    "NK": ("[N, K]", (0, 1)),
}

# Smallest scale of a channel: 128 times the smallest normal float32, so that the scale is still a
# normal number after the multiplication by 2 / 255 for int8.
SMALLEST_SCALE = 2.0**-119

FLOAT32 = np.finfo(np.float32)

# A float32 of at least this magnitude rounds to infinity in bfloat16. It is the largest bfloat16
# plus half of the distance to the bfloat16 before it.
BFLOAT16_OVERFLOW = 2.0**128 - 2.0**119


def pack(
    kernel: AnyArray,
    bias: AnyArray | None,
    position_embedding: AnyArray | None,
    *,
    patch_size: int,
    layout: Literal["HWIO", "OIHW", "OITHW", "KN", "NK"] = "HWIO",
    channels: int | None = None,
    grid: Sequence[int] | None = None,
    dtype: DTypeLike = "int8",
    rounding: Rounding = "feedback",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    prefix: AnyArray | None = None,
    warn_above: float | None = None,
) -> PatchEmbedParams:
    """Packs a checkpoint's patch embedding into the form that the kernels read.

    `pack` can be traced: under jit, vmap, scan, eval_shape and shard_map, and in a model's apply,
    it returns the same bits as outside of jit, as long as the compiler is the same. A kernel
    sharded along N keeps its sharding. Outside of jit `pack` computes on the device that holds its
    arguments; numpy arrays are put on JAX's default device.

    Quantised weights have one scale per output channel: absmax / 448 for float8_e4m3fn and
    absmax / 127 for int8, but at least 2^-119, so that no GPU flushes it to zero. The scale of a
    channel of zeros (or of denormal numbers, which a GPU may flush to zero) is 1. Weights stay
    within the format's range. For int8, `scale` includes the encoding's factor 2 / 255.

    The weights of a channel are rounded so that the errors of neighbouring pixels cancel. On
    photographs this removes most of the error (docs/numerics.md has a table). It takes a loop over
    the pixels of a patch, a few milliseconds on a GPU: a program that packs in every call may
    prefer rounding="nearest".

    Args:
      kernel: floating-point array with the shape that `layout` specifies.
      bias: [N], or None for no bias.
      position_embedding: [S, N], [1, S, N], [h, w, N], or None for no positions. With a prefix of R
        rows also [R + S, N] or [1, R + S, N], of which the first R rows are added to the prefix.
      patch_size: p, the side of a patch in pixels.
      layout: order of the kernel's axes: "HWIO" [p, p, C, N] (flax), "OIHW" [N, C, p, p]
        (PyTorch), "KN" [K, N] or "NK" [N, K], where K = C * p * p in the order height, width,
        channel; or "OITHW" [N, C, T, p, p] for patches of T frames, with K in the order channel,
        frame, height, width.
      channels: C, the number of the images' channels. The default is the number that the layout
        states; "KN" and "NK" do not state it, and have 3 by default.
      grid: (h, w) with h * w = S. The default is (h, w) of [h, w, N] positions, otherwise a square.
        With frames (t, h, w), or (h, w) for t = 1.
      dtype: dtype of patches and weight: "int8", "float8_e4m3fn", "bfloat16" or "float32". The
        default is int8 for every GPU, although a B300 is slow in int8: docs/usage.md says why.
      rounding: how int8 and float8 weights are rounded: "feedback" makes the errors of neighbouring
        pixels cancel, "nearest" rounds each weight by itself, ties to even.
      image_mean, image_std: normalisation in the model's preprocessing, one number for each
        channel: a pixel u in [0, 1] becomes (u - image_mean) / image_std. The default is 0.5 and
        0.5, as in SigLIP. Both become part of weight and offset, so that uint8 images stay exact at
        no cost. Floating-point images must then be normalised with them.
      prefix: [R, N] or [1, R, N], the class and register tokens, which become the first R rows of
        each image's embedding.
      warn_above: if given, a warning names the output channels that have a larger relative error
        on photographs because their weights are rounded; 0.01 means 1%. The values of the kernel
        must be known then.

    Returns:
      PatchEmbedParams.

    Raises:
      TypeError: an argument is not an array, or is not floating-point.
      ValueError: a shape, the patch size, the grid, the layout or the dtype is wrong; or a value is
        NaN, infinite or beyond the dtype's range. Values are not checked if jit traces them, or if
        this process can address only part of the array.
    """
    patch_size, dtype = check_patch_size(patch_size), check_dtype(dtype)
    check_rounding(rounding)
    channels = None if channels is None else check_channels(channels)
    weights = _floating("kernel", kernel)
    N, shape = _check_kernel_shape(weights, patch_size, layout, channels)
    image_mean, image_std = check_normalisation(image_mean, image_std, shape.channels)
    overflow = BFLOAT16_OVERFLOW if dtype == "bfloat16" else math.inf
    if image_std is not None:
        # `_packed` divides the weight by 2 * image_std.
        overflow = min(overflow, 2 * min(image_std) * min(overflow, float(FLOAT32.max)))
    _check_values("kernel", weights, overflow)
    if warn_above is not None:
        _check_warn_above(warn_above, weights)
    biases = None if bias is None else _finite("bias", bias)
    if biases is not None and biases.shape != (N,):
        raise ValueError(
            f"pack: bias has shape {list(biases.shape)}, expected [{N}]: one value for each of "
            "the kernel's output channels."
        )
    tokens = None if prefix is None else _finite("prefix", prefix)
    R = 0 if tokens is None else _check_prefix_shape(tokens, N)
    grid = None if grid is None else check_grid(grid, shape.frames)
    positions = None
    if position_embedding is not None:
        positions = _finite("position_embedding", position_embedding)
        grid = _grid_of(positions, N, grid, R, shape.frames)
    given = (weights, biases, positions, tokens)
    # A transfer guard refuses numpy arrays as arguments of a jitted function, but not device_put.
    arrays = [x if x is None or isinstance(x, jax.Array) else jax.device_put(x) for x in given]
    weight, scale, offset, table = _packed(
        *arrays,
        layout=layout,
        shape=shape,
        grid=grid,
        dtype=dtype,
        rounding=rounding,
        mean=image_mean,
        std=image_std,
    )
    _check_result("bias + the constant of the pixels' encoding", offset)
    _check_result("the sum of bias or prefix and position_embedding", table)
    params = PatchEmbedParams(
        weight=weight,
        scale=scale,
        offset=offset,
        table=table,
        patch_size=patch_size,
        grid=grid,
        dtype=dtype,
        K=patch_length(*shape),
        image_mean=image_mean,
        image_std=image_std,
        prefix=R,
        frames=shape.frames,
        channels=shape.channels,
    )
    if warn_above is not None:
        _warn_of_channels(weights, params, layout, shape, rounding, warn_above)
    return params


def _finite(name: str, value: Any) -> Any:
    """Returns a floating-point array, after a check that its known values are finite."""
    array = _floating(name, value)
    _check_values(name, array, math.inf)
    return array


def _floating(name: str, value: Any) -> Any:
    """Returns a floating-point array: a JAX array as it is, anything else as numpy float32.

    Raises:
      TypeError: the value is not a floating-point array.
    """
    array = as_array(value, f"pack: {name}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"pack: {name} has dtype {array.dtype}, expected a floating-point array. Dequantise it "
            "or cast it to float32."
        )
    if not isinstance(array, jax.Array):
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return array


def _check_values(name: str, array: Any, overflow: float) -> None:
    """Raises ValueError if known values are NaN or have a magnitude of at least `overflow`."""
    if is_known(array) and (wrong := _count_from(array, overflow)):
        ranges = {math.inf: "float32", BFLOAT16_OVERFLOW: "the range of bfloat16"}
        beyond = ranges.get(overflow, f"{overflow:.3g}, the largest that image_std allows")
        raise ValueError(
            f"pack: {name} has {wrong} values that are NaN, infinite or beyond {beyond}. Expected "
            "finite values: check the checkpoint."
        )


def _count_from(array: Any, overflow: float) -> int:
    """Counts the values that are NaN or have a magnitude of at least `overflow`."""
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore"):  # A limit beyond float32 becomes infinity.
            return int(array.size - np.count_nonzero(np.abs(array) < np.float32(overflow)))
    # The values are known even if jit is tracing the caller, so they are counted at once.
    with jax.ensure_compile_time_eval():
        return int(jax.device_get(_count_from_traced(array, overflow)))


@functools.partial(jax.jit, static_argnums=1)
def _count_from_traced(array: jax.Array, overflow: float) -> jax.Array:
    fits = jnp.abs(array.astype(jnp.float32)) < np.float32(overflow)
    return jnp.sum(~fits, dtype=jnp.int32)


def _check_result(name: str, array: Any) -> None:
    # `rounded` turns -infinity into the lowest float32, so that number counts as an overflow too.
    overflow = float(FLOAT32.max)
    if array is not None and is_known(array) and (wrong := _count_from(array, overflow)):
        raise ValueError(
            f"pack: {name} has {wrong} values beyond the range of {array.dtype}. Expected finite "
            "sums: check the checkpoint."
        )


def _check_kernel_shape(
    kernel: Any, patch_size: int, layout: Any, channels: int | None
) -> tuple[int, PatchShape]:
    """Checks the kernel's shape; returns N and the shape of a patch."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"pack: layout is {layout!r}, expected one of {', '.join(LAYOUTS)}.")
    text, order = LAYOUTS[layout]
    p, C = patch_size, 3 if channels is None else channels
    fits = kernel.ndim == len(order) and 0 not in kernel.shape
    if fits and channels is None and "C" in text:
        C = kernel.shape[layout.index("I")]
    shape = PatchShape(p, C, kernel.shape[2] if fits and layout == "OITHW" else None)
    K = patch_length(*shape)
    N, *others = (kernel.shape[axis] for axis in order) if fits else (0,)
    if others != {2: [K], 4: [p, p, C], 5: [C, shape.frames, p, p]}[len(order)]:
        raise ValueError(
            f"pack: kernel has shape {list(kernel.shape)}, expected {text} for layout={layout!r} "
            f"and patch_size={p} (p = {p}, C = {C}, K = {K}). Pass the layout, the patch_size and "
            "the number of channels of the checkpoint."
        )
    return N, shape


def _check_prefix_shape(prefix: Any, N: int) -> int:
    """Checks the prefix's shape; returns R, its number of rows."""
    ones = prefix.shape[:-2]
    if prefix.ndim not in (2, 3) or prefix.shape[-1] != N or 0 in prefix.shape or ones > (1,):
        raise ValueError(
            f"pack: prefix has shape {list(prefix.shape)}, expected [R, {N}] or [1, R, {N}]: one "
            "row for each class or register token. Add the axis of a single token with "
            "prefix[None]."
        )
    return prefix.shape[-2]


def _grid_of(
    positions: Any, N: int, grid: tuple[int, ...] | None, R: int, frames: int | None
) -> tuple[int, ...]:
    """Checks the shape of the positions; returns their grid of patches."""
    given = f"pack: position_embedding has shape {list(positions.shape)}"
    if positions.ndim not in (2, 3) or positions.shape[-1] != N or 0 in positions.shape:
        advice = "" if R else " Drop the row of a class token, or pass the class token as prefix."
        raise ValueError(
            f"{given}, expected [S, {N}], [1, S, {N}] or [h, w, {N}] for a kernel of {N} output "
            f"channels.{advice}"
        )
    if positions.ndim == 3 and positions.shape[0] > 1:
        sides = check_grid(positions.shape[:2], frames)
        if grid is not None and grid != sides:
            raise ValueError(f"{given}, but grid is {grid}. Leave grid=None.")
        return sides
    rows = math.prod(positions.shape[:-1])
    if grid is None:
        squares = {S for S in (rows, rows - R) if S > 0 and math.isqrt(S) ** 2 == S}
        if len(squares) != 1:
            both = f"both {rows} and" if squares else f"neither {rows} nor"
            raise ValueError(
                f"{given} with a prefix of {R} rows, and {both} {rows - R} positions form a "
                "square. Pass grid=(height, width)."
                if R
                else f"{given}: {rows} positions do not form a square. Pass grid=(height, width)."
            )
        side = math.isqrt(*squares)
        grid = check_grid((side, side), frames)
    if rows not in (math.prod(grid), R + math.prod(grid)):
        raise ValueError(
            f"{given}: {rows} positions, but grid={grid} has {math.prod(grid)} patches"
            f"{f' and the prefix has {R} rows' if R else ''}. Pass the grid (height, width) of the "
            "positions."
        )
    return grid


@functools.partial(
    jax.jit,
    static_argnames=("layout", "shape", "grid", "dtype", "rounding", "mean", "std"),
    inline=True,
)
def _packed(
    kernel: jax.Array,
    bias: jax.Array | None,
    positions: jax.Array | None,
    prefix: jax.Array | None,
    *,
    layout: str,
    shape: PatchShape,
    grid: tuple[int, ...] | None,
    dtype: str,
    rounding: str,
    mean: PerChannel | None,
    std: PerChannel | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes weight, scale, offset and table."""
    weight = _weight_of_pixels(kernel, layout, shape, std)
    if TABLE[dtype].scaled:
        weight, scale = _quantised(weight, dtype, rounding, shape)
    else:
        scale = jnp.ones_like(weight, np.float32, shape=(len(weight),))
        weight = weight.astype(dtype)
    offset = jnp.zeros_like(scale) if bias is None else bias.astype(jnp.float32)
    for constant in _constants(weight, scale, mean, shape):
        offset = offset + rounded(constant)
    table = _table(offset, positions, prefix, grid, TABLE[dtype].table)
    K = weight.shape[1]
    weight = jnp.pad(weight, ((0, 0), (0, padded(K) - K)))
    return weight, scale, offset, table


def _table(offset: jax.Array, positions: Any, prefix: Any, grid: Any, dtype: Any) -> Any:
    """Returns the rows of prefix (plus their positions, if any), then offset + positions."""
    N, parts = len(offset), []
    if positions is not None:
        positions = positions.astype(jnp.float32)
        if positions.ndim == 3:
            positions = positions.reshape(-1, N)
        parts = [jnp.expand_dims(offset, 0) + positions[-math.prod(grid) :]]
    if prefix is not None:
        prefix = prefix.astype(jnp.float32)
        if prefix.ndim == 3:
            prefix = prefix.reshape(-1, N)
        if positions is not None and len(positions) > math.prod(grid):
            prefix = prefix + positions[: len(prefix)]
        parts = [prefix, *parts]
    if not parts:
        return None
    return (parts[0] if len(parts) == 1 else prepend_prefix(*parts)).astype(dtype)


def prepend_prefix(prefix: jax.Array, table: jax.Array) -> jax.Array:
    """Returns [..., R + S, N]: the prefix [R, N], then the table [..., S, N].

    With explicit sharding, the result is sharded like the table, except along S.
    """
    prefix = jnp.broadcast_to(prefix, (*table.shape[:-2], *prefix.shape))
    sharding = jax.typeof(table).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        *leading, _, along_n = sharding.spec
        spec = PartitionSpec(*leading, None, along_n)
        whole = NamedSharding(sharding.mesh, spec)
        prefix, table = (jax.sharding.reshard(x, whole) for x in (prefix, table))
    return jnp.concatenate([prefix, table], axis=-2)


def _weight_of_pixels(
    kernel: jax.Array, layout: str, shape: PatchShape, std: PerChannel | None
) -> jax.Array:
    """Returns the weight [N, K] of pixels in [-1, 1], in float32."""
    weight = kernel.astype(jnp.float32).transpose(LAYOUTS[layout][1])
    weight = weight.reshape(len(weight), patch_length(*shape))
    if std is None:
        return weight
    # A pixel v in [-1, 1] is normalised to v / (2 std) + (1 - 2 mean) / (2 std).
    factor = np.array([1 / (2 * x) for x in std], np.float32)
    spread = np.tile if shape.frames is None else np.repeat
    return rounded(weight * jnp.asarray(spread(factor, shape.pixels))[None])


def _constants(
    weight: jax.Array, scale: jax.Array, mean: Any, shape: PatchShape
) -> Iterator[jax.Array]:
    """Yields arrays [N] whose sum is the encoding's constant, a part of the offset.

    A uint8 pixel u is encoded as v = (2u - 255) / 255, but the model's normalised pixel is
    (v + 1 - 2 mean) / (2 std). The weight includes the factor 1 / (2 std), so the constant is the
    sum over k of weight * (1 - 2 mean). For int8 the pixel is encoded as i = u - 128, and
    v = (2i + 1) / 255: 2 / 255 is part of the scale, and 1 / 255 is added to 1 - 2 mean.
    """
    levels = TABLE[weight.dtype.name].holds_levels
    shift = [1 - 2 * x for x in (mean or (0.5,))]
    factors = [0.5 + 127.5 * x for x in shift] if levels else shift
    # With the default mean all channels have the same constant.
    of_channels = jnp.expand_dims(weight, 1) if mean is None else shape.by_channel(weight)
    for channel, factor in enumerate(factors):
        if factor:
            total = _sum(of_channels[:, channel])
            yield total * (scale * np.float32(factor))


def _sum(weight: jax.Array) -> jax.Array:
    """Sums the last axis as integers, so that the order of summation does not change the bits.

    Each float is split into two integer multiples of powers of two, which are chosen for its row.
    The remainder that is dropped is at most 2^-29 of the row's largest magnitude.
    """
    if jnp.issubdtype(weight.dtype, jnp.integer):
        return jnp.sum(weight, axis=1, dtype=jnp.int32).astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    exponent = jnp.int32(0xFF << 23)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(weight), axis=1), jnp.int32) & exponent
    # The clip keeps the unit and its reciprocal positive and finite.
    bits = jnp.clip(bits, 1 << 23, 253 << 23)
    unit = lax.bitcast_convert_type(bits, jnp.float32)
    reciprocal = lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    # Integers of at most 2^13 (whole) and 2^16 (fine), so that a sum of 2^15 of them fits int32.
    coarse = weight * jnp.expand_dims(reciprocal, 1) * np.float32(2.0**11)
    whole = jnp.round(coarse)
    fine = jnp.round((coarse - whole) * np.float32(2.0**17))

    def sum_exactly(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.int32), axis=1, dtype=jnp.int32).astype(jnp.float32)

    total = sum_exactly(whole) + sum_exactly(fine) * np.float32(2.0**-17)
    return total * np.float32(2.0**-11) * unit


def _quantised(
    weight: jax.Array, dtype: str, rounding: str, shape: PatchShape
) -> tuple[jax.Array, jax.Array]:
    """Quantises a weight [N, K] to `dtype`; returns it and its scale [N].

    For int8 the scale includes the factor 2 / 255.
    """
    largest, factor = TABLE[dtype].largest, TABLE[dtype].unit
    # The transposed kernel is read twice, for the scales and for the weights. The barrier makes XLA
    # transpose it only once.
    weight = lax.optimization_barrier(weight)
    magnitude = jnp.abs(weight)
    # One maximum per channel finds the scale and also whether all weights are zero: then the
    # maximum is -factor, and its magnitude is the scale for a channel of zeros.
    scales = jnp.where(
        magnitude < FLOAT32.tiny,
        np.float32(-factor),
        jnp.maximum(magnitude * np.float32(factor / largest), np.float32(SMALLEST_SCALE * factor)),
    )
    scale = jnp.abs(jnp.max(scales, axis=1))
    if rounding == "nearest":
        # XLA fuses this division with the rounding. It would launch a kernel for `_reciprocal`.
        inverse = np.float32(factor) / scale
    else:
        inverse = np.float32(factor) * _reciprocal(scale)
    scaled = jnp.clip(weight * jnp.expand_dims(inverse, 1), -largest, largest)
    if rounding == "nearest":
        return round_to_nearest(scaled, dtype), scale
    return round_with_feedback(scaled, dtype, shape), scale


def _reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x of positive normal numbers up to 2^126, rounded down.

    It divides integers, because a GPU's division of floats is approximate. After a weight that is
    rounded in the other direction than on a CPU, error feedback would change all later ones.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, mantissa = bits >> 23, (bits & 0x7FFFFF) | 0x800000
    # 2^47 / mantissa, eight bits at a time: a remainder is below 2^24, so 2^8 times it fits uint32.
    quotient = jnp.zeros_like(mantissa)
    remainder = jnp.full_like(mantissa, 1 << 23)
    for _ in range(3):
        remainder = remainder << 8
        quotient = (quotient << 8) + lax.div(remainder, mantissa)
        remainder = lax.rem(remainder, mantissa)
    # x is mantissa * 2^(exponent - 150).
    power = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return quotient.astype(jnp.float32) * np.float32(2**-24) * power


def _check_warn_above(warn_above: Any, kernel: Any) -> None:
    number = isinstance(warn_above, numbers.Real) and not isinstance(warn_above, bool)
    if not number or not 0 < warn_above < math.inf:
        raise ValueError(
            f"pack: warn_above is {warn_above!r}, expected a positive number, such as 0.01 for 1%."
        )
    if not is_known(kernel):
        raise ValueError(
            "pack: warn_above needs the kernel's values, but jit traces them or other processes "
            "hold some of them. Pack outside of jit, or leave warn_above out."
        )


def _warn_of_channels(
    kernel: Any,
    params: PatchEmbedParams,
    layout: str,
    shape: PatchShape,
    rounding: str,
    warn_above: float,
) -> None:
    """Warns of the output channels whose rounded weight has a larger error than `warn_above`."""
    std = params.image_std
    # The kernel is known, but jit may trace the params, for example because it traces the bias.
    with jax.ensure_compile_time_eval():
        kernel = jax.device_put(kernel)
        exact = jax.device_get(_weight_of_pixels(kernel, layout, shape, std))
        packing = dict(layout=layout, shape=shape, dtype=params.dtype, rounding=rounding)
        packed = _packed(kernel, None, None, None, **packing, grid=None, mean=None, std=std)
        weight, scale = jax.device_get(packed[:2])
    weight, scale = weight[:, : params.K].astype(np.float64), scale.astype(np.float64)
    scale = scale / TABLE[params.dtype].unit
    errors = relative_errors(exact, weight * scale[:, None], shape)
    found = np.flatnonzero(errors > warn_above)
    if not found.size:
        return
    worst = found[np.argsort(-errors[found])]
    named = ", ".join(f"{channel} ({errors[channel]:.2%})" for channel in worst[:10])
    more = f" and {found.size - 10} more" if found.size > 10 else ""
    warnings.warn(
        f"pack: in {params.dtype} the relative error on photographs is above {warn_above:.2%} for "
        f"{found.size} of {params.N} output channels: {named}{more}. Use bfloat16 if they matter.",
        stacklevel=3,
    )
