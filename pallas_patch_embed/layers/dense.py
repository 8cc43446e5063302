"""Dense layers in 8 bits or bfloat16, with everything that follows the product in its epilogue.

The kernel is that of the patch embedding with another epilogue (`Epilogue`), and so is the choice
of a backend. The JAX primitive `dense_p` is lowered to the fastest backend that serves; in bfloat16
without scales to Hopper's kernel for few rows and with wide tiles, and otherwise to XLA's program.
That one is also used in exported programs, and if XLA partitions the program over several devices,
because XLA would gather the operands of a kernel. Products of int8 are exact in each backend.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

from pallas_patch_embed.backends import choose, xla
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.levels import refuse_gradient
from pallas_patch_embed.base.problem import LEVELS, Epilogue, Problem

# In bfloat16, where XLA has cuBLAS, the kernel was measured for a GPU of this capability, and to be
# faster for as few rows as one image of B/16 at 224 pixels has, and for as many as eight images of
# So400m/14 at 384 pixels have: among many calls a jit of the encoder takes 0.71 instead of 0.86 ms
# for one image of B/16, 1.49 instead of 1.83 for 16, 2.00 instead of 2.44 for 24, and 11.2 instead
# of 12.4 for eight images of So400m/14 (H200s, 2026-11-28 and 30).
CAPABILITY, FEWEST_ROWS, MOST_ROWS = (9, 0), 196, 8 * 729

# With more rows the kernel is faster than cuBLAS with its epilogues only with the widest tiles:
# their columns, rows of a consumer, and consumers. 512 images of B/16 take 32.96 ms with them
# instead of 34.38.
WIDEST = (192, 128, 2)

# The dtypes of x and weight.
DTYPES = (*EIGHT_BITS, "bfloat16", "float32")

# The largest number of products of two int8 whose sum int32 always holds.
MOST_PRODUCTS = (2**31 - 1) // 128**2

dense_p = Primitive("dense")
dense_p.multiple_results = True
dense_p.def_impl(functools.partial(apply_primitive, dense_p))


def dense(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    activation: str = "",
    row_scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    levels: tuple[jax.Array, jax.Array] | None = None,
    layer: jax.Array | None = None,
    scaled: bool = True,
) -> Any:
    """Computes a dense layer.

        y[m, n] = activation(sum_k x[m, k] weight[n, k] * scale[n] * row_scale[m] + bias[n])
                  + residual[m, n]

    Args:
      x: [..., S, K] int8, float8_e4m3fn or bfloat16, with K a multiple of 128 bytes for a kernel;
        or float32, for which there is none.
      weight: [N, K] of the same dtype.
      scale, bias: [N] float32.
      activation: one of `ACTIVATIONS`; empty for none.
      row_scale: [..., S] float32.
      residual: [..., S, N] bfloat16, not for several parts.
      levels: factor [N] and shift [1] float32, only for x in 8 bits: the result has the dtype of x,
        y * factor + shift rounded to nearest and clipped to [-127, 127], for float8 [-448, 448].
      layer: int32 in [0, layers), if weight, scale, bias and levels have another leading axis, of
        several layers. A kernel reads its layer's parameters in place. They may have yet another
        axis behind it, of parts, each with a result of its own.
      scaled: False if x is bfloat16 and all scales are 1. Then XLA's program rounds to bfloat16
        after each step, as `jnp.matmul` and what follows do, so that cuBLAS can compute it.

    Returns:
      [..., S, N] bfloat16, or of the dtype of x with `levels`; a tuple of them for parts.

    Raises:
      TypeError, ValueError: an operand has another shape or dtype, there is no such activation, or
        int32 cannot hold the sum of K products of int8.
    """
    factor, shift = (None, None) if levels is None else levels
    has_parts = weight.ndim == 4
    if has_parts and residual is not None:
        raise ValueError("dense: a residual cannot be added to the results of several parts.")
    if activation and activation not in ACTIVATIONS:
        raise ValueError(
            f"dense: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}, or ''."
        )
    others = dict(row_scale=row_scale, residual=residual, factor=factor, shift=shift)
    _check(x, weight, has_layers=layer is not None, scale=scale, bias=bias, **others)
    if not scaled and (x.dtype != jnp.bfloat16 or row_scale is not None or levels is not None):
        raise ValueError("dense: without scales x is bfloat16, without row_scale and levels.")
    if levels is not None and x.dtype.name not in EIGHT_BITS:
        raise ValueError(f"dense: levels are for x in 8 bits, but x is {x.dtype}.")
    if layer is not None and not has_parts:
        weight, scale, bias, factor, shift = (
            None if value is None else jnp.expand_dims(value, 1)
            for value in (weight, scale, bias, factor, shift)
        )
    number = None if layer is None else layer.reshape(1)
    given = dict(row_scale=row_scale, residual=residual, factor=factor, shift=shift, layer=number)
    epilogue = Epilogue(
        activation,
        row_scale=row_scale is not None,
        residual=residual is not None,
        levels=levels is not None,
        parts=0 if layer is None else weight.shape[1],
    )
    operands = (given[name] for name in epilogue.operands)
    found = dense_p.bind(x, weight, scale, bias, *operands, epilogue=epilogue, scaled=scaled)
    return tuple(found) if has_parts else found[0]


def _check(x: Any, weight: Any, *, has_layers: bool, **others: Any) -> None:
    """Checks the shapes and dtypes of `dense`.

    Args:
      has_layers: whether the weight is that of several layers.
      others: the other operands, or None for those that are not given.

    Raises:
      TypeError, ValueError: an operand has another dtype or shape.
    """
    if x.dtype.name not in DTYPES:
        raise TypeError(f"dense: x is {x.dtype}, expected one of {', '.join(DTYPES)}.")
    if x.ndim < 2 or weight.ndim not in ((3, 4) if has_layers else (2,)):
        wanted = "[layers, N, K] or [layers, parts, N, K]" if has_layers else "[N, K]"
        raise ValueError(
            f"dense: x has the shape {x.shape} and weight {weight.shape}, expected [..., S, K] and "
            f"{wanted}."
        )
    *rows, K = x.shape
    *parts, N, _ = weight.shape
    if x.dtype == jnp.int8 and K > MOST_PRODUCTS:
        raise ValueError(f"dense: K is {K}, expected at most {MOST_PRODUCTS} for int8.")
    expected = {
        "weight": (x.dtype, (*parts, N, K)),
        "scale": (jnp.float32, (*parts, N)),
        "bias": (jnp.float32, (*parts, N)),
        "row_scale": (jnp.float32, (*rows,)),
        "residual": (jnp.bfloat16, (*rows, N)),
        "factor": (jnp.float32, (*parts, N)),
        "shift": (jnp.float32, (*parts, 1)),
    }
    given = {"weight": weight, **others}
    for name, (dtype, shape) in expected.items():
        if (operand := given[name]) is None:
            continue
        if operand.dtype != dtype:
            raise TypeError(f"dense: {name} is {operand.dtype}, expected {jnp.dtype(dtype)}.")
        if operand.shape != shape:
            raise ValueError(f"dense: {name} has the shape {operand.shape}, expected {shape}.")


def problem_of(x: Any, weight: Any, epilogue: Epilogue) -> Problem:
    """Returns the problem of x [..., K] and weight [N, K], or [layers, parts, N, K]."""
    *leading, N, K = weight.shape
    N *= math.prod(leading[1:])
    return Problem(
        patches=tuple(x.shape),
        weight=(N, K),
        scale=(N,),
        table=(N,),
        dtype=jnp.dtype(weight.dtype).name,
        table_dtype="float32",
        out_dtype=_out_dtype(x, epilogue),
        epilogue=epilogue,
    )


def _out_dtype(x: Any, epilogue: Epilogue) -> str:
    return jnp.dtype(x.dtype).name if epilogue.levels else "bfloat16"


def formula(*operands: jax.Array, epilogue: Epilogue, scaled: bool = True) -> Any:
    """Computes `dense` by XLA; the operands are those of the primitive."""
    if scaled:
        return xla.run(*operands, out_dtype=_out_dtype(operands[0], epilogue), epilogue=epilogue)
    x, weight, _, bias, *others = operands
    given = dict(zip(epilogue.operands, others, strict=True))
    if epilogue.parts == 0:
        weight, bias = weight[None], bias[None]
    else:
        layer = given["layer"][0]
        weight, bias = (lax.dynamic_index_in_dim(p, layer, keepdims=False) for p in (weight, bias))
    found = [
        in_steps(x, weight[part].T, bias[part], epilogue.activation, given.get("residual"))
        for part in range(len(weight))
    ]
    return found[0] if epilogue.parts < 2 else tuple(found)


def in_steps(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    activation: str = "",
    residual: jax.Array | None = None,
) -> jax.Array:
    """Computes a dense layer with a kernel [K, N], and rounds to the dtype of x after each step."""
    y = jnp.matmul(x, kernel)
    if bias is not None:
        y = y + lax.expand_dims(bias.astype(y.dtype), range(y.ndim - 1))
    if activation:
        y = ACTIVATIONS[activation].of_array(y)
    return y if residual is None else residual + y


def _formula(*operands: jax.Array, **static: Any) -> list[jax.Array]:
    return jax.tree.leaves(formula(*operands, **static))


@dense_p.def_abstract_eval
def _result_type(*operands, **static):
    return jax.make_jaxpr(functools.partial(_formula, **static))(*operands).out_avals


def _differentiate(primals, tangents, *, epilogue, scaled):
    if epilogue.levels:
        refuse_gradient()
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    function = functools.partial(_formula, epilogue=epilogue, scaled=scaled)
    return jax.jvp(function, primals, tangents)


ad.primitive_jvps[dense_p] = _differentiate


def _batch(operands, axes, *, epilogue, scaled):
    """Makes the mapped axis a leading axis of x, if only operands with rows are mapped."""
    shared_operands = (*LEVELS, "layer")
    of_rows = [True, False, False, False]
    of_rows += [name not in shared_operands for name in epilogue.operands]
    shared = (axis is None for axis, has_rows in zip(axes, of_rows) if not has_rows)
    if not all(shared):
        function = functools.partial(_formula, epilogue=epilogue, scaled=scaled)
        found = jax.vmap(function, axes)(*operands)
        return found, [0] * len(found)
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes) if axis is not None}
    moved = [
        x
        if not has_rows
        else jnp.broadcast_to(x, (size, *x.shape))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis, has_rows in zip(operands, axes, of_rows)
    ]
    found = dense_p.bind(*moved, epilogue=epilogue, scaled=scaled)
    return found, [0] * len(found)


batching.primitive_batchers[dense_p] = _batch


def program_for(problem: Problem, target: Target, *, scaled: bool) -> Plan | None:
    """Chooses the program of a backend; None for `formula`."""
    if scaled:
        return choose(problem, target, None).plan
    chip = target.chip
    if chip is None or chip.capability != CAPABILITY:
        return None
    if problem.rows < FEWEST_ROWS:
        return None
    try:
        plan = SM90.plan(problem, target)
    except NotImplementedError:
        return None
    config = SM90.choose_config(problem, chip)
    shape = config.tile_n, config.rows, config.consumers
    return plan if problem.rows <= MOST_ROWS or shape == WIDEST else None


def _lower(ctx, *operands, **static):
    lower = mlir.lower_fun(functools.partial(_formula, **static), multiple_results=True)
    return lower(ctx, *operands)


def _lower_for_cuda(ctx, *operands, epilogue, scaled):
    target: Target = lowering.target_of(ctx.module_context, "cuda")
    plan = None
    if lowering.devices_left_to_xla(ctx.module_context) == 1 and target.known:
        x, weight, *_ = ctx.avals_in
        plan = program_for(problem_of(x, weight, epilogue), target, scaled=scaled)
    if plan is None:
        return _lower(ctx, *operands, epilogue=epilogue, scaled=scaled)

    def compute(*operands):
        return jax.tree.leaves(plan.run(*operands))

    with lowering.on_one_device(ctx) as plain:
        return mlir.lower_fun(compute, multiple_results=True)(plain, *operands)


mlir.register_lowering(dense_p, _lower)
mlir.register_lowering(dense_p, _lower_for_cuda, platform="cuda")
