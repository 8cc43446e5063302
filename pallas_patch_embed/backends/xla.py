"""The operator in plain XLA, for every platform, dtype and shape. It defines the result."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_patch_embed.backends import tiles, time_model
from pallas_patch_embed.backends.plan import CUTS_NO_IMAGES, Plan
from pallas_patch_embed.backends.time_model import Work
from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.base.chips import Chip, Target
from pallas_patch_embed.base.levels import to_levels
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import LEVELS, NO_EPILOGUE, Epilogue, Problem

# With at most this many rows of patches XLA may fuse the product with what follows.
FEW_ROWS = 1024


def plan(problem: Problem, target: Target, *, config: None = None) -> Plan:
    """Plans any problem of patches. XLA has no configs."""
    del config
    if problem.images is not None:
        raise NotImplementedError(CUTS_NO_IMAGES)
    time, tiled = None, problem.dtype in tiles.DTYPES  # Only then other backends may serve.
    if target.is_timed and not problem.is_symbolic and tiled:
        assert target.chip is not None
        found = work(problem, target.chip)
        time = time_model.microseconds(found, time_model.XLA, problem.dtype)
    run_problem = functools.partial(run, out_dtype=problem.out_dtype, epilogue=problem.epilogue)
    return Plan(run_problem, microseconds=time)


def work(problem: Problem, chip: Chip) -> Work:
    """Returns the work of two kernels: a product, and a pass that reads its sums again."""
    cycles = problem.rows * problem.N * problem.K / chip.rate(problem.dtype) / chip.multiprocessors
    writes_sums, reads_sums = (
        1e6 * bytes_each * problem.rows * problem.N / chip.bandwidth for bytes_each in (2, 6)
    )
    return Work(
        moved=time_model.moved(problem, chip) + writes_sums,
        products=cycles * time_model.cycle(chip),
        start=reads_sums,
    )


def candidates(problem: Problem, target: Target) -> tuple[()]:
    """Returns an empty tuple, because XLA has no configs."""
    del problem, target
    return ()


def config_of(fields: Mapping[str, Any]) -> None:
    """Raises ValueError, because XLA has no configs."""
    raise ValueError(f"the config is {printable(dict(fields))}, but xla has no configs.")


def run(
    patches: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *others: jax.Array,
    out_dtype: str,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Any:
    """Computes the operator.

    y[..., s, n] = out_dtype((sum_k patches[..., s, k] * weight[n, k]) * scale[n] + table[s, n])

    With an epilogue it computes a dense layer, as `Epilogue` says, which also lists the operands'
    leading axes.

    Args:
      patches: [..., S, K] float32, bfloat16, float8_e4m3fn or int8.
      weight: [..., N, K] of the same dtype.
      scale: [..., N] float32.
      table: [..., S, N], [..., 1, N] or [N], bfloat16 or float32.
      others: the operands of the epilogue.
      out_dtype: "bfloat16" or "float32"; the dtype of patches if the epilogue has levels.
      epilogue: that of a dense layer.

    Returns:
      [..., S, N] of out_dtype, rounded once; a tuple of them for several parts. The accumulator is
      exact int32 for int8, float32 for float32 (at Precision.HIGHEST) and bfloat16, and that of the
      platform's matrix product for float8.
    """
    given = dict(zip(epilogue.operands, others, strict=True))
    if epilogue.parts:
        layer = given.pop("layer")[0]
        of_one = functools.partial(run, out_dtype=out_dtype, epilogue=epilogue._replace(parts=0))

        def of_part(part: int, *parameters: jax.Array) -> list[jax.Array]:
            return [
                jax.lax.dynamic_index_in_dim(p, layer, keepdims=False)[part] for p in parameters
            ]

        found = [
            of_one(
                patches,
                *of_part(part, weight, scale, table),
                *(of_part(part, v)[0] if name in LEVELS else v for name, v in given.items()),
            )
            for part in range(epilogue.parts)
        ]
        return found[0] if epilogue.parts == 1 else tuple(found)
    exact = patches.dtype == jnp.int8
    precision = jax.lax.Precision.HIGHEST if patches.dtype == jnp.float32 else None
    accumulator = jnp.matmul(
        patches,
        jnp.swapaxes(weight, -1, -2),
        preferred_element_type=jnp.int32 if exact else jnp.float32,
        precision=precision or jax.lax.Precision.DEFAULT,
    )
    # Without the barrier XLA on a GPU applies scale and table in two passes, or writes the
    # broadcast table to memory. Then float8 takes 0.76 ms instead of 0.48 ms on an H200. With few
    # rows the barrier costs one more launch, and XLA can fuse everything without it
    # (docs/experiments/xla.md).
    sizes = accumulator.shape[:-1]
    if any(map(jax.export.is_symbolic_dim, sizes)) or math.prod(sizes) > FEW_ROWS:
        accumulator = jax.lax.optimization_barrier(accumulator)
    scale = jnp.expand_dims(scale, -2)
    rank = max(accumulator.ndim, scale.ndim, table.ndim)
    # All arrays get the same rank, because users may set jax_numpy_rank_promotion="raise".
    product, scale, table = (
        jax.lax.expand_dims(x.astype(jnp.float32), range(rank - x.ndim))
        for x in (accumulator, scale, table)
    )
    y = product * scale
    if epilogue == NO_EPILOGUE:
        return (y + table).astype(out_dtype)
    if epilogue.row_scale:
        y = y * given["row_scale"].reshape(*y.shape[:-1], 1)
    y = y + table
    if epilogue.activation:
        y = ACTIVATIONS[epilogue.activation].of_array(y)
    if epilogue.residual:
        y = y + given["residual"].reshape(y.shape).astype(jnp.float32)
    if epilogue.levels:
        factor, shift = (given[name].reshape((1,) * (y.ndim - 1) + (-1,)) for name in LEVELS)
        y = to_levels(y * factor + shift, out_dtype)
    return y.astype(out_dtype)
