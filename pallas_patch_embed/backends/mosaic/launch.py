"""Code that both Pallas kernels share: checks of a config, the launch, the tile loop, the ring."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed.backends import schedule, tiles
from pallas_patch_embed.backends.mosaic.layouts import Views
from pallas_patch_embed.backends.tiles import Tiling
from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.base.chips import Chip
from pallas_patch_embed.base.levels import to_levels
from pallas_patch_embed.base.problem import Epilogue, Problem

# Alignment of Mosaic's arrays in shared memory, in bytes.
ALIGNMENT = 1024

# Shared memory of a thread block that is reserved for barriers, in bytes.
BARRIER_BYTES = 1024

# Largest number of barriers in one of Mosaic's arrays of barriers.
MOST_BARRIERS = 32

# Indices of the fields of a segment.
FIELDS = (schedule.FIRST_TILE, schedule.TILES, schedule.STRIDE, schedule.TABLE_ROW)

# Largest number of spans in the trace of a warp. Later spans are not recorded.
SPANS = 64


# Checks of a config. Each raises NotImplementedError with what was given and what was expected.


def check_slice(tile_n: int, problem: Problem) -> None:
    """Refuses a slice of N whose width is not a multiple of 64 or does not divide N."""
    if tile_n < 64 or tile_n % 64 or problem.columns % tile_n:
        raise NotImplementedError(
            f"tile_n is {tile_n}, expected a multiple of 64 that divides N = {problem.columns}."
        )


def check_slots(slots: int, most: int) -> None:
    """Refuses a ring with fewer than 2 slots or more than `most` slots."""
    if not 2 <= slots <= most:
        raise NotImplementedError(f"slots is {slots}, expected 2 to {most}.")


def check_shared_memory(needed: int, chip: Chip, config: object) -> None:
    """Refuses more bytes than a thread block has after `BARRIER_BYTES` are reserved."""
    check_resource("bytes of shared memory", needed, chip.shared_memory - BARRIER_BYTES, config)


def check_registers(needed: int, available: int, config: object) -> None:
    """Refuses more registers than setmaxnreg assigns to a thread."""
    check_resource("registers per thread", needed, available, config)


def check_resource(what: str, needed: int, available: int, config: object) -> None:
    """Refuses more of a resource than is available."""
    if needed > available:
        raise NotImplementedError(
            f"{config} needs {needed} {what}, but only {available} are available."
        )


# Functions that launch a kernel.


class Operands(NamedTuple):
    """The arrays of a kernel in global memory.

    Attributes:
      patches: [M, K].
      weight: [N, K], or the view of it that `RegisterTile.view_weight` returns. Parameters of
        several layers lie behind one another, here [layers * N, K].
      scale: [N] float32.
      table: [period, N] bfloat16, or [N] float32.
      segments: [workers, R, 4] int32 from `schedule.segments`.
      y: the results, each [M, N / outputs].
      row_scale: [M] float32, if the epilogue has it.
      residual: [M, N] bfloat16, if the epilogue has it.
      factor: [N] float32, if the epilogue has levels.
      shift: [1] float32, if the epilogue has levels.
      layer: [1] int32, if the epilogue has parts.
    """

    patches: Any
    weight: Any
    scale: Any
    table: Any
    segments: Any
    y: tuple[Any, ...]
    row_scale: Any = None
    residual: Any = None
    factor: Any = None
    shift: Any = None
    layer: Any = None

    @classmethod
    def of(cls, epilogue: Epilogue, references: tuple[Any, ...]) -> "Operands":
        """Makes operands of the references of a kernel, of which the results are the last."""
        names = ("patches", "weight", "scale", "table", "segments", *epilogue.operands)
        return cls(**dict(zip(names, references)), y=references[len(names) :])


def trace_bytes(warpgroups: int) -> int:
    """Returns the shared memory of a trace in bytes.

    Each span of a warp takes 16 bytes: a name and a time for its beginning, and for its end.
    """
    return 4 * warpgroups * SPANS * 16


def compiler_params(trace: str, *, approximate: bool) -> plgpu.CompilerParams:
    """Returns the compiler options.

    Args:
      trace: folder into which the kernel writes a trace; no trace if it is empty.
      approximate: whether exp2 and reciprocals are single instructions of the GPU.
    """
    traced: dict[str, Any] = dict(
        profile_space=SPANS,
        profile_dir=trace,
        profile_trace_scope=plgpu.TraceScope.WARP,
        profile_bounds_check=True,
    )
    return plgpu.CompilerParams(
        approx_math=approximate,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        **(traced if trace else {}),
    )


def kernel(
    name: str,
    worker: Callable,
    scratch: Any,
    config: Any,
    tiling: Tiling,
    problem: Problem,
    memory: Any,
    trace: str,
    **options: Any,
) -> Callable:
    """Makes a Pallas kernel: (patches [M, K], weight, scale, table, segments, ...) -> y [M, N].

    The other operands are those of the epilogue. With several results y is a tuple of them.

    Args:
      name: name of the kernel in profiles.
      worker: constructor of the kernel's `Worker`, whose `run(warpgroup)` is the kernel's body.
      scratch: types of shared memory and barriers.
      config, tiling, problem: tile sizes; workers; shapes and dtypes.
      memory: the module `layouts` or `interpreted`.
      trace: folder for a trace; no trace if it is empty.
      options: further arguments of `plgpu.kernel`.
    """

    def body(*operands, scratch):
        block = lax.axis_index("worker")
        given = Operands.of(problem.epilogue, operands)
        worker(
            *(config, problem, given, scratch),
            memory.views_of(scratch.patches),
            column=lax.rem(block, tiling.slices) * config.tile_n,
            index=lax.div(block, tiling.slices),
            layer=given.layer[0] if problem.epilogue.parts else None,
        ).run(lax.axis_index("warpgroup"))

    body.__name__ = name
    result = jax.ShapeDtypeStruct((problem.rows, problem.columns), problem.out_dtype)
    # The plgpu.kernel of jax 0.11 does not accept a cost estimate.
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost(problem)
    return plgpu.kernel(
        body,
        out_type=result if problem.outputs == 1 else (result,) * problem.outputs,
        grid=(tiling.workers * tiling.slices,),
        grid_names=("worker",),
        thread_name="warpgroup",
        scratch_types=dict(scratch=scratch),
        compiler_params=compiler_params(trace, approximate=bool(problem.epilogue.activation)),
        **options,
    )


def cost(problem: Problem) -> pl.CostEstimate:
    """Returns the floating-point operations and the bytes that are read and written, for XLA."""
    itemsize, out_itemsize = (np.dtype(d).itemsize for d in (problem.dtype, problem.out_dtype))
    table_itemsize = np.dtype(problem.table_dtype).itemsize
    M, N, K = problem.rows, problem.N, problem.K
    read = (M + N) * K * itemsize + 4 * N + problem.table_period * N * table_itemsize
    return pl.CostEstimate(
        flops=2 * M * N * K, transcendentals=0, bytes_accessed=read + M * N * out_itemsize
    )


# The following code runs inside a kernel.


@dataclasses.dataclass(frozen=True)
class Worker:
    """A thread block: its operands, the loop over its tiles, and its ring of patches.

    An entry of the ring is one use of a slot. Entries are numbered in the order in which they are
    multiplied.

    Attributes:
      config, problem: tile sizes; shapes and dtypes.
      operands: arrays in global memory.
      scratch: shared memory and barriers. A phase of `freed[slot]` completes when the slot's entry
        has been multiplied.
      patches: the ring's memory.
      column: first column of this worker's slice of N.
      index: index of this worker among the workers of its slice.
      layer: number of the layer; None if the operands are those of one layer.
    """

    config: Any
    problem: Problem
    operands: Operands
    scratch: Any
    patches: Views
    column: Any
    index: Any
    layer: Any

    @property
    def weight_row(self):
        """The row of the weight, and index in scale, offsets and factor, of the first column."""
        return self.column if self.layer is None else self.layer * self.problem.N + self.column

    @property
    def result_place(self) -> tuple[Any, Any]:
        """The number of the result to which this slice belongs, and its first column there."""
        if self.problem.outputs == 1:
            return 0, self.column
        columns = self.problem.columns
        return lax.div(self.column, columns), lax.rem(self.column, columns)

    def for_each_tile(
        self, visit: Callable, begin: Callable | None = lambda table_row: None
    ) -> jax.Array:
        """Loops over the tiles of this worker in the order of its segments.

        Args:
          visit: function that is called for each tile with the number of the tile among this
            worker's tiles, its index among all tiles, and the result of `begin` for its segment.
          begin: function that is called before the tiles of each segment that has tiles, with the
            segment's table row. None also saves the branch around segments without tiles.

        Returns:
          The number of tiles.
        """
        segments = self.operands.segments

        def visit_segment(i, tiles_before):
            first, count, stride, table_row = (segments[self.index, i, f] for f in FIELDS)

            def visit_tiles(of_segment):
                def step(j, _):
                    visit(tiles_before + j, first + j * stride, of_segment)

                lax.fori_loop(0, count, step, None)

            if begin is None:
                visit_tiles(None)
            else:
                pl.when(count > 0)(lambda: visit_tiles(begin(table_row)))
            return tiles_before + count

        return lax.fori_loop(0, segments.shape[1], visit_segment, jnp.int32(0))

    @property
    def chunks(self) -> int:
        """Number of chunks of K, which is the number of ring entries for the same rows."""
        return tiles.chunks(self.problem)

    def chunk(self, k):
        """Returns the k-th chunk of K as a slice, one row of the swizzle wide."""
        tile_k = tiles.ROW_BYTES // jnp.dtype(self.problem.dtype).itemsize
        return pl.ds(k * tile_k, tile_k)

    def slot(self, entry):
        """Returns the slot of an entry."""
        return lax.rem(entry, self.config.slots)

    def result(self, sums, scales, terms, load: Mapping[str, Callable[[], jax.Array]]):
        """Scales and adds in float32, and applies the epilogue.

        Args:
          sums: part of an accumulator, [rows, columns].
          scales: scales of the columns, broadcast to sums.
          terms: rows of the table, or offsets, of the shape of sums.
          load: functions that load operands of the epilogue: "row_scale", [rows]; "residual", of
            the shape of sums; and "factor", broadcast to sums.

        Returns:
          The result in float32; levels have the dtype of the result.
        """
        epilogue = self.problem.epilogue
        y = sums.astype(jnp.float32) * scales
        if epilogue.row_scale:
            y = y * lax.broadcast_in_dim(load["row_scale"](), y.shape, (0,))
        y = y + terms.astype(jnp.float32)
        if epilogue.activation:
            y = ACTIVATIONS[epilogue.activation].in_kernel(y)
        if epilogue.residual:
            y = y + load["residual"]().astype(jnp.float32)
        if epilogue.levels:
            first = 0 if self.layer is None else self.layer * self.problem.outputs
            shift = self.operands.shift[first + self.result_place[0]]
            y = to_levels(y * load["factor"]() + shift, self.problem.out_dtype, in_kernel=True)
        return y

    def acquire(self, entry):
        """Waits until the previous entry of the slot has been multiplied; returns the slot."""
        slot = self.slot(entry)

        @pl.when(entry >= self.config.slots)
        def wait():
            plgpu.barrier_wait(self.scratch.freed.at[slot])

        return slot
