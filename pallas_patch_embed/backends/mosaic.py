"""What the Pallas Mosaic GPU kernels share: the launch, the walk over the runs, views of memory."""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_patch_embed.backends import schedule
from pallas_patch_embed.backends.tiling import check_operands, in_rows, table_period
from pallas_patch_embed.problem import Problem

# What Mosaic aligns shared memory to.
ALIGNMENT = 1024

# The fields of a run, in their order.
FIELDS = (schedule.FIRST_TILE, schedule.TILES, schedule.STRIDE, schedule.TABLE_ROW)

# Spans that a warp's trace has room for; later ones are left out.
SPANS = 64

SCALAR = plgpu.Layout.WG_SPLAT(())


def profile_bytes(profile: str, warpgroups: int) -> int:
    """Shared memory that a trace takes: per warp, a span is two pairs of a name and a time."""
    return 4 * warpgroups * SPANS * 16 if profile else 0


def compiler_params(profile: str) -> plgpu.CompilerParams:
    """How the kernels are compiled; with a trace, if `profile` names a folder for it."""
    traced = dict(
        profile_space=SPANS,
        profile_dir=profile,
        profile_trace_scope=plgpu.TraceScope.WARP,
        profile_bounds_check=True,
    )
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **(traced if profile else {})
    )


def launch(operands, out_dtype: str, config, choose_config: Callable, make_kernel: Callable):
    """y[..., s, n] = out_dtype((sum_k patches[..., s, k] * weight[n, k]) * scale[n] + table[s, n]).

    Args:
      operands: patches [..., S, K] float8_e4m3fn, bfloat16 or int8; weight [N, K] of the same
        dtype; scale [N] float32; table [S, N] bfloat16, with leading axes if images have tables of
        their own, or [N] float32.
      out_dtype: "bfloat16" or "float32".
      config: with `check`, `tile_m` and `workers`, or None for that of `choose_config`.
      choose_config: problem -> config.
      make_kernel: (config, problem, M) -> a function of patches [M, K], weight, scale, table
        [period, N] or [N], and the runs of tiles, which gives y [M, N].

    Returns:
      [..., S, N] of out_dtype, rounded once. The accumulator is int32 for int8, else float32 as
      the tensor cores accumulate it, which for float8 on Hopper has fewer bits.
    """
    problem = Problem.of(*operands, out_dtype=out_dtype)
    check_operands(problem)
    config = config or choose_config(problem)
    config.check(problem)

    def compute(M, patches, *rest):
        runs = schedule.runs(M, table_period(problem), config.tile_m, config.workers(problem))
        kernel = make_kernel(config, problem, M)
        return kernel(patches.reshape(M, -1), *rest, jnp.asarray(runs))

    return in_rows(problem, operands, compute)


def for_each_run(runs, worker, visit: Callable) -> jax.Array:
    """Calls visit((first tile, tiles, stride, table row), tiles before) for each run of a worker.

    Returns:
      The tiles of all runs.
    """

    def step(i, tiles):
        run = tuple(runs[worker, i, field] for field in FIELDS)
        visit(run, tiles)
        return tiles + run[schedule.TILES]

    return lax.fori_loop(0, runs.shape[1], step, jnp.int32(0))


def swizzled(dtype, *shape: int, tiled: bool) -> plgpu.SMEM:
    """Shared memory with rows of up to 128 bytes: tiled as the tensor cores want it, or not.

    TMA writes and reads untiled memory in any number of rows, else in multiples of 8.
    """
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    tiling = (plgpu.TilingTransform((8, shape[-1])),) if tiled else ()
    return plgpu.SMEM(shape, dtype, transforms=(*tiling, plgpu.SwizzleTransform(row_bytes)))


def two_views(dtype, written: tuple[int, ...], multiplied: tuple[int, ...], *, interpret):
    """One memory as TMA writes it, untiled, and as the tensor cores read it, tiled.

    The interpreter has no such memory; there it is two, of which the second serves for both.
    """
    views = swizzled(dtype, *written, tiled=False), swizzled(dtype, *multiplied, tiled=True)
    return views if interpret else plgpu.RefUnion(*views)


def load_rows(source, row, column, kind, *, period: int, skip: int = 0, interpret=False):
    """Rows of an array [period, N] in global memory: row, row + 1, ... modulo `period`.

    Args:
      source: the array.
      row: the first row.
      column: the first column, less `skip`.
      kind: shape, dtype and layout of the result.
      period: rows of the array.
      skip: columns.
      interpret: whether the kernel runs in the interpreter, which has no registers.
    """
    if interpret:
        rows, columns = kind.shape
        part = source[:, pl.ds(column + skip, columns)]
        return jnp.take(part, lax.rem(row + jnp.arange(rows), period), axis=0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=kind)
    def loaded(_, source, row, column):
        layout = kind.layout.to_mgpu()
        element = ir.MemRefType(source.type).element_type
        vector = ir.VectorType.get((layout.vector_length,), element)
        registers = np.empty(layout.registers_shape(kind.shape), object)
        places = places_of(source, row, column, layout, kind.shape, period=period, skip=skip)
        registers.flat = [llvm.load(vector, address) for _, address in places]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return loaded(source, row, column)


def i32(value: int) -> ir.Value:
    """A constant of 32 bits."""
    return arith.constant(ir.IntegerType.get_signless(32), value)


def places_of(array, row, column, layout, shape, *, period: int | None = None, skip: int = 0):
    """Row and address, for each register of a thread, of what it has of a tile of global memory.

    The tile begins with `row` and `column + skip` of an array [rows, columns]; rows are taken
    modulo `period`, if there is one.
    """
    word, long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(array.type)
    base, stride = mgpu.utils.memref_ptr(array), kind.shape[1]

    def address(at_row, at_column):
        first = arith.muli(arith.extui(long, at_row), arith.constant(long, stride))
        offset = arith.addi(first, arith.extui(long, at_column))
        return mgpu.utils.getelementptr(base, [offset], kind.element_type)

    # A thread's first element; the others are constants away.
    below, beside = (arith.index_castui(word, i) for i in next(iter(layout.thread_idxs(shape))))
    first_row = arith.addi(row.registers.item(), below)
    first_column = arith.addi(column.registers.item(), beside)
    first_address = address(first_row, first_column)
    addresses = {}
    steps = layout.tiling.tile_strides((shape[1], 1))
    for index in np.ndindex(layout.registers_shape(shape)):
        rows, columns = divmod(sum(i * step for i, step in zip(index, steps)), shape[1])
        at_row = arith.addi(first_row, i32(rows))
        near, away = first_address, rows * stride + columns + skip
        if period is not None:
            if rows not in addresses:
                addresses[rows] = address(arith.remui(at_row, i32(period)), first_column)
            near, away = addresses[rows], columns + skip
        yield at_row, mgpu.utils.getelementptr(near, [away], kind.element_type)
