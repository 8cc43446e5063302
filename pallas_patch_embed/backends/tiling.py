"""What every kernel in tiles asks of its operands, of the GPU and of its config."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.problem import Problem

DTYPES = ("float8_e4m3fn", "bfloat16", "int8")

# Bytes of a row of the 128-byte swizzle: of K, in a slot of a ring.
ROW_BYTES = 128

# From so many chunks of 128 bytes of K on, up to so many rows a chunk, XLA is faster on an H200:
# it splits K among multiprocessors (B/32: up to 512 rows at one byte an element, 1024 at two).
SPLIT_CHUNKS = 24
SPLIT_ROWS = 22


def why_not(problem: Problem, choose_config: Callable) -> str | None:
    """The reason why such a kernel cannot serve a problem; None if it can.

    Args:
      problem: shapes and dtypes.
      choose_config: of the kernel, which raises NotImplementedError if no config serves.
    """
    try:
        check_operands(problem)
        choose_config(problem)
    except NotImplementedError as error:
        return str(error)
    return None


def why_rather_not(problem: Problem) -> tuple[str, str] | None:
    """XLA, and why it is faster; None if it is not known to be."""
    rows = math.prod(problem.patches[:-1])
    if chunks(problem) >= SPLIT_CHUNKS and rows <= SPLIT_ROWS * chunks(problem):
        K = problem.patches[-1]
        return "xla", f"{rows} rows are few for K = {K}: xla splits K and is faster."
    return None


def check_operands(problem: Problem) -> None:
    """Raises NotImplementedError with the reason if these operands are none for such a kernel."""
    K_bytes = problem.patches[-1] * np.dtype(problem.dtype).itemsize
    if problem.dtype not in DTYPES:
        reason = f"it multiplies {', '.join(DTYPES)}, not {problem.dtype}."
    elif len(problem.weight) > 2 or len(problem.scale) > 1:
        reason = "its weight is one matrix [N, K]; this call has several."
    elif K_bytes == 0 or K_bytes % ROW_BYTES:
        reason = f"K is {problem.patches[-1]}, expected a multiple of {ROW_BYTES} bytes (K_padded)."
    elif problem.table_dtype != ("float32" if len(problem.table) == 1 else "bfloat16"):
        reason = f"it adds a bfloat16 table, not {problem.table_dtype}."
    elif len(problem.table) > 1 and table_period(problem) is None:
        reason = (
            f"its table [..., S, N] repeats along leading axes or has them all; {problem.table} "
            f"does not for patches {problem.patches}."
        )
    else:
        return
    raise NotImplementedError(reason)


def chunks(problem: Problem) -> int:
    """Swizzled rows that K takes: slots of a ring for the rows of a tile."""
    return problem.patches[-1] * np.dtype(problem.dtype).itemsize // ROW_BYTES


def table_period(problem: Problem) -> int | None:
    """Rows after which the table repeats along the rows of patches; None if it does not repeat."""
    if len(problem.table) == 1:
        return 1
    *leading, S, _ = problem.table
    while leading and leading[0] == 1:
        leading = leading[1:]
    batch = problem.patches[:-2]
    fits = S == problem.patches[-2] and tuple(leading) == batch[len(batch) - len(leading) :]
    if not fits or len(problem.table) > len(problem.patches):
        return None
    return S * math.prod(leading)


def in_rows(problem: Problem, operands: tuple[jax.Array, ...], compute: Callable) -> jax.Array:
    """The operator by a kernel that knows rows instead of leading axes.

    Args:
      problem: of the operands, checked.
      operands: patches (or what stands for them), weight, scale, table.
      compute: M, patches, weight, scale, table [period, N] or [N] -> y [M, N]; not called without
        rows.

    Returns:
      [..., S, N].
    """
    patches, weight, scale, table = operands
    *leading, _ = problem.patches
    M = math.prod(leading)
    if M == 0:
        return jnp.zeros((*leading, problem.N), problem.out_dtype)
    if table.ndim > 1:
        table = table.reshape(table_period(problem), problem.N)
    return compute(M, patches, weight, scale, table).reshape(*leading, problem.N)


def multiprocessors(default: int) -> int:
    """How many multiprocessors the first device of this process has; `default` if it is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or default


def first_that_fits(problem: Problem, configs):
    """The first of these configs whose check passes; None if none does."""
    for config in configs:
        try:
            config.check(problem)
        except NotImplementedError:
            continue
        return config
    return None
