"""What the two Pallas kernels share: checks of a config, launch, walk over tiles, ring."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed.backends import schedule, tiles
from pallas_patch_embed.backends.tiles import Grid
from pallas_patch_embed.chips import Chip
from pallas_patch_embed.problem import Problem

# Mosaic aligns arrays in shared memory to so many bytes.
ALIGNMENT = 1024

# Shared memory of a thread block that is left for barriers.
BARRIER_BYTES = 1024

# Mosaic allows so many barriers in an array.
MOST_BARRIERS = 32

# The fields of a segment, in their order.
FIELDS = (schedule.FIRST_TILE, schedule.TILES, schedule.STRIDE, schedule.TABLE_ROW)

# The trace of a warp has room for so many spans; later ones are left out.
SPANS = 64


# Checks of a config. Each raises NotImplementedError with what was given and what was expected.


def check_slice(tile_n: int, problem: Problem) -> None:
    """Refuses a slice of N that is not a multiple of 64 columns, or does not divide N."""
    if tile_n % 64 or problem.N % tile_n:
        raise NotImplementedError(
            f"tile_n is {tile_n}, expected one of the multiples of 64 that divide N = {problem.N}."
        )


def check_slots(slots: int, most: int) -> None:
    """Refuses a ring of one slot, or of more than `most`."""
    if not 2 <= slots <= most:
        raise NotImplementedError(f"slots is {slots}, expected 2 to {most}.")


def check_shared_memory(needed: int, chip: Chip, config: object) -> None:
    """Refuses more bytes than a thread block can have beside its barriers."""
    check_resource("bytes of shared memory", needed, chip.shared_memory - BARRIER_BYTES, config)


def check_resource(what: str, needed: int, available: int, config: object) -> None:
    """Refuses more of a resource than there is."""
    if needed > available:
        raise NotImplementedError(f"{config} needs {needed} {what}, there are {available}.")


# The launch.


class Operands(NamedTuple):
    """What a kernel reads and writes in global memory.

    Attributes:
      patches: [M, K].
      weight: [N, K], in the view that the kernel wants.
      scale: [N] float32.
      table: [period, N] bfloat16, or [N] float32.
      segments: [workers, R, 4] int32 of `schedule.segments`.
      y: [M, N].
    """

    patches: Any
    weight: Any
    scale: Any
    table: Any
    segments: Any
    y: Any


def trace_bytes(warpgroups: int) -> int:
    """Shared memory of a trace: each span of a warp is two pairs of a name and a time."""
    return 4 * warpgroups * SPANS * 16


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


def kernel(
    name: str,
    worker: Callable,
    scratch: Any,
    config: Any,
    grid: Grid,
    problem: Problem,
    memory: Any,
    trace: str,
    **options: Any,
) -> Callable:
    """A Pallas kernel: (patches [M, K], weight, scale, table, segments) -> y [M, N].

    Args:
      name: of the kernel in profiles.
      worker: makes a `Worker` from its attributes; its `run(warpgroup)` is the kernel.
      scratch: types of shared memory and barriers.
      config, grid, problem: what is launched.
      memory: `layouts`, or `interpreted`.
      trace: folder for a trace; none if empty.
      options: of `plgpu.kernel`.
    """

    def body(*operands, scratch):
        block = lax.axis_index("worker")
        worker(
            *(config, problem, Operands(*operands), scratch, memory.views(scratch.patches)),
            column=lax.rem(block, grid.slices) * config.tile_n,
            index=lax.div(block, grid.slices),
        ).run(lax.axis_index("warpgroup"))

    body.__name__ = name
    # jax 0.11 has no cost estimate here.
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost(problem)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype),
        grid=(grid.workers * grid.slices,),
        grid_names=("worker",),
        thread_name="warpgroup",
        scratch_types=dict(scratch=scratch),
        compiler_params=compiler_params(trace),
        **options,
    )


def cost(problem: Problem) -> pl.CostEstimate:
    """Operations, and the bytes of all operands and of y, for XLA's scheduler."""
    itemsize, out_itemsize = (np.dtype(d).itemsize for d in (problem.dtype, problem.out_dtype))
    table_itemsize = np.dtype(problem.table_dtype).itemsize
    M, N, K = problem.rows, problem.N, problem.K
    read = (M + N) * K * itemsize + 4 * N + problem.table_period * N * table_itemsize
    return pl.CostEstimate(
        flops=2 * M * N * K, transcendentals=0, bytes_accessed=read + M * N * out_itemsize
    )


# Inside a kernel.


@dataclasses.dataclass(frozen=True)
class Worker:
    """A thread block: what it works on, the walk over its tiles, and its ring of patches.

    An entry of the ring is one use of a slot. Entries are numbered in the order of their products.

    Attributes:
      config, problem: what is computed, and how.
      operands: in global memory.
      scratch: shared memory and barriers. `freed` has a barrier for each slot, whose phase is
        complete when the slot's entry is multiplied.
      patches: the ring, as TMA writes it and as it is multiplied.
      column: first column of N.
      index: of the worker among those of its slice of N.
    """

    config: Any
    problem: Problem
    operands: Operands
    scratch: Any
    patches: tuple[Any, Any]
    column: Any
    index: Any

    def for_each_tile(
        self, visit: Callable, begin: Callable | None = lambda table_row: None
    ) -> jax.Array:
        """Walks the tiles of this worker in the order of its segments.

        Args:
          visit: called with the number of the tile among the worker's, its index among all tiles,
            and what `begin` gave.
          begin: called with the table row of each segment that has tiles, before they are visited.
            None if there is nothing to begin, and no branch around segments without tiles.

        Returns:
          How many tiles there were.
        """
        segments = self.operands.segments

        def visit_segment(i, tiles_before):
            first, count, stride, table_row = (segments[self.index, i, f] for f in FIELDS)

            def visit_tiles(begun):
                def step(j, _):
                    visit(tiles_before + j, first + j * stride, begun)

                lax.fori_loop(0, count, step, None)

            if begin is None:
                visit_tiles(None)
            else:
                pl.when(count > 0)(lambda: visit_tiles(begin(table_row)))
            return tiles_before + count

        return lax.fori_loop(0, segments.shape[1], visit_segment, jnp.int32(0))

    @property
    def chunks(self) -> int:
        """Chunks of K: entries of the ring for the rows of a tile."""
        return tiles.chunks(self.problem)

    def chunk(self, k):
        """The columns of the k-th chunk of K: one row of the swizzle."""
        tile_k = tiles.ROW_BYTES // jnp.dtype(self.problem.dtype).itemsize
        return pl.ds(k * tile_k, tile_k)

    def slot(self, entry):
        """The slot of an entry."""
        return lax.rem(entry, self.config.slots)

    def acquire(self, entry):
        """The slot of an entry, once the entry before it there is multiplied."""
        slot = self.slot(entry)

        @pl.when(entry >= self.config.slots)
        def wait():
            plgpu.barrier_wait(self.scratch.freed.at[slot])

        return slot
