"""Layer norms in float32, with a kernel for Hopper GPUs.

XLA computes a layer norm in one kernel, with tiles of several rows. On an H100 it moves 1.4 to 2.5
TB/s, and the kernel below moves 2.7 to 3.0 TB/s (docs/experiments/encoder.md). This kernel, in
Pallas Mosaic GPU, gives each row to one warp, which keeps it in registers. The JAX primitive
`layer_norm_p` is lowered to the kernel where `serves` allows it, and otherwise to the formula. The
formula is also used in exported programs, and if XLA partitions the program over several devices,
because XLA would gather the operands of a kernel.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.levels import refuse_gradient, to_levels

# Rows of a thread block: one for each of its four warps.
ROWS = 4

# Largest number of columns for which a warp can keep a row in registers.
MOST_COLUMNS = 2048

# Fewest rows for which the kernel was measured, those of one image of B/16 at 224 pixels: 1.84
# instead of the 2.14 us of XLA's fusion (H200, 2026-11-28).
FEWEST_ROWS = 196

# The compute capability for which the kernel was measured.
CAPABILITY = (9, 0)

layer_norm_p = Primitive("layer_norm")
layer_norm_p.multiple_results = True
layer_norm_p.def_impl(functools.partial(apply_primitive, layer_norm_p))


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float, layer: jax.Array | None = None
) -> jax.Array:
    """Normalizes the last axis: scale * (x - mean) / sqrt(variance + eps) + bias.

    Args:
      x: [..., D]. Its dtype is that of the result.
      scale, bias: [D] float32; with `layer`, the rows of all layers, [layers, D].
      eps: added to the variance.
      layer: int32 in [0, layers), the row of scale and bias. The kernel reads the row itself.
        Otherwise XLA would copy two rows in front of each call (base/lowering.py).
    """
    (y,) = _bind(x, scale, bias, layer, eps=eps)
    return y


def layer_norm_levels(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    eps: float,
    dtype: str,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalizes the last axis as `layer_norm` does, and quantises each row.

    Args:
      x, scale, bias, eps, layer: as for `layer_norm`.
      dtype: dtype of the levels, one of `EIGHT_BITS`.

    Returns:
      The levels [..., D], whose largest magnitude in a row is that of the dtype, 127 or 448, and
      the scale of each row [...] float32: its largest magnitude / that of the dtype. A level times
      the scale is the normalized number.
    """
    levels, row_scale = _bind(x, scale, bias, layer, eps=eps, levels=dtype)
    return levels, row_scale


def _bind(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    layer: jax.Array | None,
    *,
    eps: float,
    levels: str = "",
) -> list[jax.Array]:
    if layer is None:
        scale, bias, layer = scale[None], bias[None], jnp.int32(0)
    return layer_norm_p.bind(x, scale, bias, layer, eps=eps, levels=levels)


def quantised(y: jax.Array, dtype: str, *, in_kernel: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the levels of the rows of float32, of this dtype, and the rows' scales."""
    # A row of zeros has the smallest scale.
    most = jnp.maximum(jnp.max(jnp.abs(y), axis=-1), 2.0**-100)
    factor = TABLE[dtype].largest / most
    y = y * lax.broadcast_in_dim(factor, y.shape, range(y.ndim - 1))
    return to_levels(y, dtype, in_kernel=in_kernel), most * (1 / TABLE[dtype].largest)


def formula(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    levels: str = "",
) -> tuple[jax.Array, ...]:
    """Computes the results of the primitive without a kernel, with scale and bias [layers, D].

    `levels` is the dtype of `layer_norm_levels`; empty for `layer_norm`.
    """
    scale, bias = (lax.dynamic_index_in_dim(v, layer, keepdims=False) for v in (scale, bias))
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    # Users may forbid implicit rank promotion.
    scale, bias = (jnp.expand_dims(v, range(y.ndim - 1)) for v in (scale, bias))
    y = y * scale + bias
    return quantised(y, levels) if levels else (y.astype(x.dtype),)


def kernel(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    levels: str = "",
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Computes `formula` for at least `ROWS` rows of bfloat16, with a warp for each row."""
    M, D = x.size // x.shape[-1], x.shape[-1]
    # A thread loads up to 8 contiguous columns at once.
    vector = math.gcd(D // 32, 8)
    tiling = plgpu.Tiling(((ROWS, 32 * vector), (vector,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def normalize(x_ref, scale_ref, bias_ref, layer_ref, y_ref, row_scale_ref=None):
        # The last block also has rows of the block before it if M is not a multiple of ROWS.
        rows = pl.ds(jnp.minimum(lax.axis_index("block") * ROWS, M - ROWS), ROWS)
        x = plgpu.load(x_ref.at[rows, :], layout=layout, optimized=False).astype(jnp.float32)

        def of_rows(sums):
            return lax.broadcast_in_dim(sums, x.shape, (0,))

        def of_columns(ref):
            row = ref.at[layer_ref[0], :]
            values = plgpu.load(row, layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(values, x.shape, (1,))

        y = x - of_rows(jnp.sum(x, axis=1) * (1 / D))
        y = y * of_rows(lax.rsqrt(jnp.sum(y * y, axis=1) * (1 / D) + eps))
        y = y * of_columns(scale_ref) + of_columns(bias_ref)
        if row_scale_ref is None:
            y_ref[rows, :] = y.astype(y_ref.dtype)
        else:
            y, row_scale = quantised(y, levels, in_kernel=True)
            store(y_ref.at[rows, :], y)
            store(row_scale_ref.at[rows], row_scale)

    normalize.__name__ = "layer_norm"
    y_dtype = levels or x.dtype
    results = jax.ShapeDtypeStruct((M, D), y_dtype), jax.ShapeDtypeStruct((M,), jnp.float32)
    call = plgpu.kernel(
        normalize,
        out_type=results if levels else results[0],
        grid=(pl.cdiv(M, ROWS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    found = lowering.call_kernel(call, x.reshape(M, D), scale, bias, layer.reshape(1))
    if not levels:
        return (found.reshape(x.shape),)
    y, row_scale = found
    return y.reshape(x.shape), row_scale.reshape(x.shape[:-1])


def store(reference: Any, value: jax.Array) -> None:
    """Stores to global memory, also fewer than 4 bytes a thread or 32 bytes a row."""
    if hasattr(plgpu, "store"):
        plgpu.store(reference, value, optimized=False)
    else:  # jax 0.11
        reference[...] = value


def serves(x: Any, target: Target) -> bool:
    """Returns whether the kernel normalizes an array of this shape and dtype on this target."""
    D, chip = x.shape[-1], target.chip
    hopper = target.known and chip is not None and chip.capability == CAPABILITY
    columns = D % 64 == 0 and D <= MOST_COLUMNS
    return hopper and x.dtype == jnp.bfloat16 and columns and x.size >= FEWEST_ROWS * D


@layer_norm_p.def_abstract_eval
def _result_types(*operands, **static):
    return jax.make_jaxpr(functools.partial(formula, **static))(*operands).out_avals


def _differentiate(primals, tangents, *, eps, levels):
    if levels:
        refuse_gradient()
    *primals, layer = primals
    tangents = tuple(map(ad.instantiate_zeros, tangents[:-1]))

    def of_layer(x, scale, bias):
        return formula(x, scale, bias, layer, eps=eps)

    return jax.jvp(of_layer, tuple(primals), tangents)


ad.primitive_jvps[layer_norm_p] = _differentiate


def _batch(operands, axes, **static):
    (x, *parameters), (axis, *others) = operands, axes
    if others == [None, None, None]:
        found = layer_norm_p.bind(jnp.moveaxis(x, axis, 0), *parameters, **static)
    else:
        found = jax.vmap(functools.partial(formula, **static), axes)(*operands)
    return found, [0] * len(found)


batching.primitive_batchers[layer_norm_p] = _batch


def _lower(ctx, *operands, **static):
    lower = mlir.lower_fun(functools.partial(formula, **static), multiple_results=True)
    return lower(ctx, *operands)


def _lower_for_cuda(ctx, *operands, **static):
    split = lowering.devices_left_to_xla(ctx.module_context) > 1
    target = lowering.target_of(ctx.module_context, "cuda")
    if split or not serves(ctx.avals_in[0], target):
        return _lower(ctx, *operands, **static)
    lower = mlir.lower_fun(functools.partial(kernel, **static), multiple_results=True)
    with lowering.on_one_device(ctx) as plain:
        return lower(plain, *operands)


mlir.register_lowering(layer_norm_p, _lower)
mlir.register_lowering(layer_norm_p, _lower_for_cuda, platform="cuda")
