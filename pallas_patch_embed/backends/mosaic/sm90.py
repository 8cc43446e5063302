"""The Hopper kernel, in Pallas Mosaic GPU: wgmma with a stationary weight and a stationary table.

A worker is a thread block of three warpgroups. It owns `tile_n` columns of N for its whole life and
walks the runs of row tiles that `schedule.py` gives it:

  feed       one warp of the third warpgroup: TMA of patches into one ring of slots, in the order in
             which they are multiplied.
  multiply   two warpgroups, each with half of every tile's rows, which take turns: while one
             multiplies, the other scales its accumulators, adds the table, and stores.

The weight stays in shared memory; where it does not fit, it comes through the ring with the
patches. The table's rows stay in registers for a run; where they do not fit, they are loaded for
each tile.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic import launch
from pallas_patch_embed.backends.mosaic.launch import ALIGNMENT
from pallas_patch_embed.backends.mosaic.layouts import Fragment
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import ROW_BYTES, Grid
from pallas_patch_embed.chips import H200, Chip, Target
from pallas_patch_embed.problem import Problem

CHIPS = (H200,)

EVIDENCE = (
    "interpreted with race detection, and compiled for sm_90a in the tests; every element of its "
    "results compared on an H200."
)

# The warpgroups that multiply.
CONSUMERS = 2

# Mosaic has up to 32 barriers in an array, and a slot has one for each of these warpgroups.
MOST_SLOTS = 32 // CONSUMERS

# Registers that setmaxnreg gives a thread of the feeding and of the two multiplying warpgroups, of
# the 168 that each has at launch: 128 * (40 + 2 * 232) = 128 * (24 + 2 * 240) = 3 * 128 * 168.
REGISTER_SPLITS = ((40, 232), (24, 240))

# What a multiplying thread needs beside accumulators, scales and table, and how much more if it
# holds the latter two, read from ptxas: less than this and it spills.
OTHER_REGISTERS = 48
HOLDING_REGISTERS = {"bfloat16": 0, "float32": 8}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of the Hopper kernel.

    Attributes:
      tile_n: columns of N of a worker, a multiple of 64.
      slots: depth of the ring; a slot holds 128 bytes of K of a warpgroup's rows.
      rows: of a warpgroup's half of a tile, 64 or 128.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
    """

    tile_n: int
    slots: int
    rows: int = 64
    stream_weight: bool = False

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return CONSUMERS * self.rows

    def grid(self, problem: Problem, chip: Chip) -> Grid:
        """The workers, and which tiles they share."""
        return Grid.of(problem, chip, self.tile_m, self.tile_n)

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory without the barriers."""
        weight_chunks = self.slots if self.stream_weight else tiles.chunks(problem)
        weight = weight_chunks * self.tile_n * ROW_BYTES
        patches = self.slots * self.rows * ROW_BYTES
        columns = 2 * -(-4 * self.tile_n // ALIGNMENT) * ALIGNMENT
        return weight + patches + columns

    def registers(self, problem: Problem, *, holds: bool) -> int:
        """Registers of a multiplying thread.

        Accumulators [rows, tile_n], and if it `holds` them scales [tile_n] and the packed table
        [rows, tile_n] or offsets [tile_n], over 128 threads of which 8 have the same columns; and
        the rest.
        """
        accumulators, columns = self.rows * self.tile_n // 128, self.tile_n // 4
        table = accumulators // 2 if problem.has_table else columns
        held = columns + table + HOLDING_REGISTERS[problem.out_dtype] if holds else 0
        return accumulators + held + OTHER_REGISTERS

    def holds(self, problem: Problem) -> bool:
        """Whether scales and table stay in registers."""
        return self.registers(problem, holds=True) <= REGISTER_SPLITS[-1][1]

    def register_split(self, problem: Problem) -> tuple[int, int]:
        """The first of REGISTER_SPLITS with enough for a multiplying thread."""
        needed = self.registers(problem, holds=self.holds(problem))
        return next(split for split in REGISTER_SPLITS if split[1] >= needed)

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `problem`."""
        if self.tile_n % 64 or problem.N % self.tile_n:
            raise NotImplementedError(
                f"N = {problem.N} is not cut into slices of tile_n = {self.tile_n} columns, "
                "multiples of 64."
            )
        if self.rows not in (64, 128):
            raise NotImplementedError(f"{self} has neither 64 nor 128 rows a warpgroup.")
        if not 2 <= self.slots <= MOST_SLOTS:
            raise NotImplementedError(f"{self} has not 2 to {MOST_SLOTS} slots.")
        launch.check_shared_memory(self.shared_memory_bytes(problem), chip, self)
        if (needed := self.registers(problem, holds=False)) > REGISTER_SPLITS[-1][1]:
            raise NotImplementedError(
                f"{self} needs {needed} registers a thread, there are {REGISTER_SPLITS[-1][1]}."
            )


def choose_config(problem: Problem, chip: Chip) -> Config:
    """The config for a problem on a chip.

    Raises:
      NotImplementedError: no config serves the problem.
    """
    widths = [n for n in (192, 128, 64) if problem.N % n == 0]
    if not widths:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")

    def deepest(least_slots, **choices):
        """The config with the most slots that fits, None if none does."""
        depths = range(MOST_SLOTS, least_slots - 1, -1)
        return tiles.first_that_fits(problem, chip, (Config(slots=s, **choices) for s in depths))

    def candidates(tile_n):
        # With fewer than 8 slots of 8 KiB the tensor cores wait for the memory.
        if stationary := deepest(8, tile_n=tile_n):
            return [stationary]
        return [deepest(4, tile_n=tile_n, rows=rows, stream_weight=True) for rows in (64, 128)]

    def time(config):
        """Of the worker with the most tiles, in products of a row and a column."""
        a_tile = config.tile_m * config.tile_n + tiles.TILE_OVERHEAD
        return config.grid(problem, chip).tiles_per_worker * a_tile

    return min(filter(None, itertools.chain(*map(candidates, widths))), key=time)


def plan(
    problem: Problem,
    target: Target,
    *,
    config: Config | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
    trace: str = "",
) -> Plan:
    """How this kernel, or Pallas' interpreter for it, computes a problem on a target.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: tile sizes and pipeline depth; None for those of `choose_config`.
      interpret: whether the kernel is interpreted, and how.
      trace: folder for a trace of what the warps of each block do first; none if empty.

    Raises:
      NotImplementedError: the kernel cannot serve; the message is the reason.
    """
    chip = tiles.chip_for(target, CHIPS)
    if chip is None:
        raise NotImplementedError(
            f"it needs compute capability 9.0 (H100, H200); this is {target}."
        )
    tiles.check_operands(problem)
    if config is None:
        config = choose_config(problem, chip)
    else:
        config.check(problem, chip)
    if trace:
        needed = config.shared_memory_bytes(problem) + launch.trace_bytes(trace, CONSUMERS + 1)
        launch.check_shared_memory(needed, chip, config)
    grid = config.grid(problem, chip)
    kernel = functools.partial(_kernel, config, grid, problem, interpret, trace)
    return launch.plan(problem, config, grid, kernel)


def _kernel(config: Config, grid: Grid, problem: Problem, interpret, trace: str):
    """The kernel: (patches [M, K], weight, scale, table, segments) -> y [M, N]."""
    dtype, out_dtype = jnp.dtype(problem.dtype), jnp.dtype(problem.out_dtype)
    slots, tile_m, tile_n, rows = config.slots, config.tile_m, config.tile_n, config.rows
    streaming = config.stream_weight
    tile_k = ROW_BYTES // dtype.itemsize
    chunks, slices = tiles.chunks(problem), grid.slices
    has_table, period = problem.has_table, problem.table_period
    holds = config.holds(problem)
    feed_registers, multiply_registers = config.register_split(problem)
    tile = Fragment(out_dtype, rows, tile_n, bool(interpret))

    def body(patches, weight, scale, table, runs, out, ring, weights, **scratch):
        s = types.SimpleNamespace(**scratch)
        s.patches_in, s.patches = ring
        s.weight_in, s.weight = weights
        if interpret:
            s.patches_in, s.weight_in = s.patches, s.weight
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        column = lax.rem(block, slices) * tile_n
        worker = lax.div(block, slices)

        def entry_of(tile_number, member):
            """The ring entry of a warpgroup's first chunk of a tile."""
            return (tile_number * CONSUMERS + member) * chunks

        def slot_of(entry):
            return lax.rem(entry, slots)

        def filled(entry, member):
            """A warpgroup's barrier: its phases are those for which that warpgroup waits."""
            return s.filled.at[member * slots + slot_of(entry)]

        def load_weight(k, target, arrived):
            inner = pl.ds(k * tile_k, tile_k)
            for part, place in tile.copies_of_weight(weight, column, inner, target):
                plgpu.copy_gmem_to_smem(part, place, arrived)

        def load_columns():
            columns = pl.ds(column, tile_n)
            plgpu.copy_gmem_to_smem(scale.at[columns], s.scale_columns, s.columns_arrived)
            if not has_table:
                plgpu.copy_gmem_to_smem(table.at[columns], s.offset_columns, s.columns_arrived)
            if not streaming:

                @pl.loop(0, chunks)
                def load(k):
                    load_weight(k, s.weight_in.at[k], s.weight_arrived.at[k])

        def feed():
            def feed_run(run, tiles):
                first, count, stride, _ = run

                @jax.named_scope("feed a tile")
                def feed_tile(j, _):
                    for member in range(CONSUMERS):
                        row = (first + j * stride) * tile_m + member * rows
                        entry = entry_of(tiles + j, member)

                        @pl.loop(0, chunks)
                        def feed_chunk(k, row=row, entry=entry, member=member):
                            slot = slot_of(entry + k)

                            @pl.when(entry + k >= slots)
                            def wait():
                                plgpu.barrier_wait(s.freed.at[slot])

                            # The first patches follow their part of the weight, so that nobody
                            # waits for all of it before the first product.
                            if not streaming and member == 0:

                                @pl.when(entry == 0)
                                def wait_for_weight():
                                    plgpu.barrier_wait(s.weight_arrived.at[k])

                            part = patches.at[pl.ds(row, rows), pl.ds(k * tile_k, tile_k)]
                            arrived = filled(entry + k, member)
                            plgpu.copy_gmem_to_smem(part, s.patches_in.at[slot], arrived)
                            if streaming:
                                load_weight(k, s.weight_in.at[slot], arrived)

                lax.fori_loop(0, count, feed_tile, None)

            entries = entry_of(launch.for_each_segment(runs, worker, feed_run), 0)
            left = lax.min(entries, slots)

            @pl.loop(0, left)
            def drain(i):
                plgpu.barrier_wait(s.freed.at[slot_of(entries - left + i)])

        def multiply_and_store():
            member = warpgroup
            other = CONSUMERS - 1 - member
            plgpu.barrier_wait(s.columns_arrived)

            @pl.when(member == CONSUMERS - 1)
            def first_turn():
                plgpu.barrier_arrive(s.turn.at[0])

            def multiply(first):
                def free(k, *, pending):
                    """Frees the slot of chunk k, behind which `pending` chunks are multiplied."""
                    plgpu.wgmma_wait(pending)
                    plgpu.barrier_arrive(s.freed.at[slot_of(first + k)])

                def accumulate(accumulator):
                    with jax.named_scope("wait for a turn"):
                        plgpu.barrier_wait(s.turn.at[member])
                    for k in range(chunks):
                        slot = slot_of(first + k)
                        plgpu.barrier_wait(filled(first + k, member))
                        weight_tile = s.weight.at[slot if streaming else k]
                        plgpu.wgmma(accumulator, s.patches.at[slot], weight_tile.T)
                        if k == chunks - 1:
                            plgpu.barrier_arrive(s.turn.at[other])
                        if k > 0:
                            free(k - 1, pending=1)
                    free(chunks - 1, pending=0)
                    return accumulator[...]

                kind = jnp.int32 if dtype == jnp.int8 else jnp.float32
                return pl.run_scoped(accumulate, plgpu.ACC((rows, tile_n), kind))

            def load_scales(g):
                return tile.load_columns(s.scale_columns, g)

            def load_terms(g, row):
                """What is added to group g: rows of the table from `row` on, or the offsets."""
                if has_table:
                    return tile.load_rows(table, row, column, g, period)
                return tile.load_columns(s.offset_columns, g)

            def hold(load):
                return [load(g) for g in range(tile.groups)] if holds else None

            held_scales = hold(load_scales)

            def store(accumulator, held_terms, table_row, row):
                for g, y in enumerate(tile.regroup(accumulator)):
                    scales = held_scales[g] if holds else load_scales(g)
                    terms = held_terms[g] if holds else load_terms(g, table_row)
                    if not has_table:
                        terms = lax.broadcast_in_dim(terms, y.shape, (1,))
                    elif holds:
                        terms = tile.pinned(terms)
                    y = y.astype(jnp.float32) * lax.broadcast_in_dim(scales, y.shape, (1,))
                    y = (y + terms.astype(jnp.float32)).astype(out_dtype)
                    tile.store_rows(out, row, column, g, y, inside=problem.rows % tile_m == 0)

            def visit(run, tiles):
                first, count, stride, table_row = run

                @pl.when(count > 0)
                def walk():
                    table_rows = table_row + member * rows
                    held_terms = hold(lambda g: load_terms(g, table_rows))

                    def visit_tile(j, _):
                        with jax.named_scope("multiply"):
                            accumulator = multiply(entry_of(tiles + j, member))
                        row = (first + j * stride) * tile_m + member * rows
                        with jax.named_scope("scale, add and store"):
                            store(accumulator, held_terms, table_rows, row)

                    lax.fori_loop(0, count, visit_tile, None)

            launch.for_each_segment(runs, worker, visit)

            @pl.when(member == 0)
            def last_turn():
                plgpu.barrier_wait(s.turn.at[0])

        @pl.when(warpgroup == CONSUMERS)
        def producer():
            plgpu.set_max_registers(feed_registers, action="decrease")

            @plgpu.warp_map
            def roles(warp):
                pl.when(warp == 0)(feed)
                pl.when(warp == 1)(load_columns)

        @pl.when(warpgroup < CONSUMERS)
        def consumer():
            plgpu.set_max_registers(multiply_registers, action="increase")
            multiply_and_store()

    # TMA writes patches untiled, so that any number of rows will do.
    ring = (slots, rows, tile_k)
    kept = slots if streaming else chunks
    columns = plgpu.SMEM((tile_n,), jnp.float32)
    weight_copies = tile.weight_copies
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.rows, problem.N), out_dtype),
        grid=(grid.workers * slices,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=launch.compiler_params(trace),
        scratch_types=dict(
            ring=launch.two_views(dtype, ring, ring, interpret=interpret),
            # TMA brings the weight in the order of `layouts.py`.
            weights=launch.two_views(
                dtype,
                (kept, *tile.weight_shape(tile_k)),
                (kept, tile_n, tile_k),
                interpret=interpret,
            ),
            scale_columns=columns,
            offset_columns=columns,
            columns_arrived=plgpu.Barrier(num_arrivals=1 + (not has_table)),
            weight_arrived=plgpu.Barrier(
                num_arrivals=weight_copies, num_barriers=1 if streaming else chunks
            ),
            filled=plgpu.Barrier(
                num_arrivals=1 + (weight_copies if streaming else 0),
                num_barriers=CONSUMERS * slots,
            ),
            freed=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        ),
    )
    return lambda patches, weight, *rest: kernel(patches, tile.view_weight(weight), *rest)
