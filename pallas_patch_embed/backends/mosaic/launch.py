"""What the Pallas Mosaic GPU kernels share: plan, walk over the schedule, views of memory."""

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
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Grid, flatten_leading_axes
from pallas_patch_embed.chips import Chip
from pallas_patch_embed.problem import Problem

# Mosaic aligns arrays in shared memory to so many bytes.
ALIGNMENT = 1024

# Shared memory of a thread block that is left for barriers.
BARRIER_BYTES = 1024

# The fields of a segment, in their order.
FIELDS = (schedule.FIRST_TILE, schedule.TILES, schedule.STRIDE, schedule.TABLE_ROW)

# The trace of a warp has room for so many spans; later ones are left out.
SPANS = 64

SCALAR = plgpu.Layout.WG_SPLAT(())


def trace_bytes(trace: str, warpgroups: int) -> int:
    """Shared memory of a trace: each span of a warp is two pairs of a name and a time."""
    return 4 * warpgroups * SPANS * 16 if trace else 0


def check_shared_memory(needed: int, chip: Chip, config: object) -> None:
    """Raises NotImplementedError if one thread block cannot have so many bytes."""
    available = chip.shared_memory - BARRIER_BYTES
    if needed > available:
        raise NotImplementedError(
            f"{config} needs {needed} bytes of shared memory, there are {available}."
        )


def compiler_params(trace: str) -> plgpu.CompilerParams:
    """How the kernels are compiled; they write a trace if `trace` names a folder for it."""
    traced = dict(
        profile_space=SPANS,
        profile_dir=trace,
        profile_trace_scope=plgpu.TraceScope.WARP,
        profile_bounds_check=True,
    )
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **(traced if trace else {})
    )


def plan(problem: Problem, config: object, grid: Grid, make_kernel: Callable) -> Plan:
    """The plan of a Pallas kernel.

    Args:
      problem: shapes and dtypes, checked.
      config: of the kernel.
      grid: the workers, and which tiles they share.
      make_kernel: gives a function of patches [M, K], weight, scale, table [period, N] or [N], and
        the workers' segments, which gives y [M, N].
    """

    def compute(patches, *rest):
        segments = jnp.asarray(grid.schedule(problem.table_period))
        return make_kernel()(patches.reshape(problem.rows, -1), *rest, segments)

    return Plan(
        lambda *operands: flatten_leading_axes(problem, operands, compute), config=str(config)
    )


def for_each_segment(segments, worker, visit: Callable) -> jax.Array:
    """Calls visit((first tile, tiles, stride, table row), tiles before) for a worker's segments.

    Returns:
      The tiles of all segments.
    """

    def step(i, tiles):
        segment = tuple(segments[worker, i, field] for field in FIELDS)
        visit(segment, tiles)
        return tiles + segment[schedule.TILES]

    return lax.fori_loop(0, segments.shape[1], step, jnp.int32(0))


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
