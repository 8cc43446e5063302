"""The Hopper kernel, in Pallas Mosaic GPU: wgmma with a stationary weight and a stationary table.

A worker is a thread block of two to four warpgroups. It computes the same `tile_n` columns of N
for all row tiles that `schedule.py` assigns to it:

  load_constants       one warp: loads scale, offsets if there is no table, and a stationary weight.
  feed                 one warp, the producer: loads patches, and a streamed weight, into the slots
                       of a ring, in the order of the products. Both warps load by TMA.
  multiply_and_store   one to three warpgroups, the consumers, each with its rows of every tile:
                       they take turns to multiply, and meanwhile the others scale their
                       accumulators, add the table, and store.

The table's rows stay in registers for a segment. If they do not fit, they are loaded for each tile.

  barrier                arrivals of a phase    its phase completes when           who waits
  columns_arrived        1 to 3 copies          scale (offsets, factor) arrived    all consumers
  weight_arrived[k]      copies of a chunk      chunk k of a stationary weight     feed, before the
                                                has arrived                        first patches
  filled[consumer,slot]  1 copy, plus copies    the consumer's next chunk is in    that consumer
                         of streamed weight     the slot
  freed[slot]            1 consumer             the slot's chunk is multiplied     feed
  products_issued[c]     the consumer before    it has issued the products of its  consumer c
                                                rows of a tile, so it is c's turn

No phase of a barrier may be left without a wait. feed does not wait before the first use of a slot;
instead it waits for the last phases before it returns.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic import interpreted, launch, layouts
from pallas_patch_embed.backends.tiles import ROW_BYTES, Tiling
from pallas_patch_embed.backends.time_model import Work, work_of
from pallas_patch_embed.base.chips import Chip
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.problem import NO_EPILOGUE, Problem

# Largest number of slots: one array contains a barrier for each slot and consumer, of which there
# are at least two.
MOST_SLOTS = launch.MOST_BARRIERS // 2

# Registers of a thread in the loading warpgroup and in a multiplying warpgroup, by the number of
# consumers. At launch every thread has 168 with two consumers, and 128 with three; setmaxnreg
# changes that:
# 128 * (40 + 2 * 232) = 128 * (24 + 2 * 240) = 3 * 128 * 168, 128 * (32 + 3 * 160) = 4 * 128 * 128.
# With one consumer every thread may have 255 from the launch on, so no instruction is needed.
REGISTER_SPLITS = {1: ((240, 240),), 2: ((40, 232), (24, 240)), 3: ((32, 160),)}

# Registers of a multiplying thread for addresses and temporaries, and how many more it needs, by
# output dtype, if scales and table stay in registers. With fewer, ptxas was measured to spill.
OTHER_REGISTERS = 48
KEEPING_REGISTERS = {"bfloat16": 0, "float32": 8, "int8": 16, "float8_e4m3fn": 16}

# Further registers of a thread for an activation beside scales that stay, and for an epilogue whose
# last tile has rows beyond M.
ACTIVATION_REGISTERS, TAIL_REGISTERS = 16, 8

# The largest number of chunks whose products are unrolled, and how many a turn of a loop has if
# there are more. Without a loop the compilers took 41 s for a tile of 256 x 192 and 48 chunks, and
# spilled; with it 4.2 s. The machine code waits in the same places.
UNROLLED = (12, 4)

# The same with few rows, where somebody waits for the compilers: a whole B/16 takes 13 to 30% less.
# One, two and eight images of a whole B/16 take as long as with the numbers above, up to 2%, four
# perhaps 3% longer (docs/experiments/encoder.md).
FEW_ROWS, UNROLLED_FOR_FEW = 8 * 196, (4, 2)


def unrolled(problem: Problem) -> tuple[int, int]:
    """Returns how many chunks are unrolled at most, and how many a turn of a loop has."""
    return UNROLLED_FOR_FEW if problem.rows <= FEW_ROWS else UNROLLED


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """Tile sizes and pipeline depth of the Hopper kernel.

    Attributes:
      tile_n: columns of N that a worker computes, a multiple of 64.
      slots: number of slots of the ring; a slot has 128 bytes of K for each row of a consumer.
      rows: rows of a tile that a consumer has, 64 or 128.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
      consumers: warpgroups that multiply, 1 to 3. With three, two are storing while one multiplies,
        which pays if an epilogue takes longer than the products. One spreads few rows over more
        multiprocessors, and waits for no other.
    """

    tile_n: int
    slots: int
    rows: int = 64
    stream_weight: bool = False
    consumers: int = 2

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a thread block."""
        return self.consumers + 1

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.consumers * self.rows

    def tiling(self, problem: Problem, chip: Chip) -> Tiling:
        """Returns the tiles and workers for a problem."""
        return Tiling.of(problem, chip, self.tile_m, self.tile_n)

    def work(self, problem: Problem, chip: Chip) -> Work:
        """Returns the work of a launch, from which its time is predicted."""
        return work_of(
            problem,
            chip,
            self.tiling(problem, chip),
            tile_n=self.tile_n,
            slots=self.slots,
            rows=self.rows,
            columns=self.tile_n,
            passes=self.consumers,
            streamed=float(self.stream_weight),
        )

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Returns the shared memory of a thread block in bytes, without the barriers."""
        weight_chunks = self.slots if self.stream_weight else tiles.chunks(problem)
        arrays = 3 if problem.epilogue.levels else 2
        columns = arrays * -(-4 * self.tile_n // launch.ALIGNMENT) * launch.ALIGNMENT
        return (weight_chunks * self.tile_n + self.slots * self.rows) * ROW_BYTES + columns

    def registers(self, problem: Problem, *, keeps_columns: bool) -> int:
        """Returns the number of registers that a multiplying thread needs.

        The 128 threads of a warpgroup share an accumulator [rows, tile_n]. If `keeps_columns`, they
        also keep scales [tile_n], and the packed table [rows, tile_n] or offsets [tile_n]. Each
        thread has a quarter of the columns.
        """
        accumulators, columns = self.rows * self.tile_n // 128, self.tile_n // 4
        table = accumulators // 2 if problem.has_table else columns
        kept = columns + table + KEEPING_REGISTERS[problem.out_dtype] if keeps_columns else 0
        if keeps_columns and problem.epilogue.activation:
            kept += ACTIVATION_REGISTERS
        elif problem.epilogue != NO_EPILOGUE and problem.rows % self.tile_m:
            kept += TAIL_REGISTERS
        return accumulators + kept + OTHER_REGISTERS

    def keeps_columns(self, problem: Problem) -> bool:
        """Returns whether scales and table stay in registers."""
        return self.registers(problem, keeps_columns=True) <= self.most_registers

    @property
    def most_registers(self) -> int:
        """The largest number of registers of a multiplying thread."""
        return REGISTER_SPLITS[self.consumers][-1][1]

    def register_split(self, problem: Problem) -> tuple[int, int]:
        """Returns the first of REGISTER_SPLITS with enough registers for a multiplying thread."""
        needed = self.registers(problem, keeps_columns=self.keeps_columns(problem))
        return next(split for split in REGISTER_SPLITS[self.consumers] if split[1] >= needed)

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `problem`."""
        launch.check_slice(self.tile_n, problem)
        if self.consumers not in REGISTER_SPLITS:
            raise NotImplementedError(f"consumers is {self.consumers}, expected 1 to 3.")
        launch.check_slots(self.slots, launch.MOST_BARRIERS // self.consumers)
        if self.rows not in (64, 128):
            raise NotImplementedError(f"rows is {self.rows}, expected 64 or 128.")
        launch.check_shared_memory(self.shared_memory_bytes(problem), chip, self)
        registers = self.registers(problem, keeps_columns=False)
        launch.check_registers(registers, self.most_registers, self)


def make(config: HopperConfig, tiling: Tiling, problem: Problem, interpret, trace: str):
    """Makes the kernel: (patches [M, K], weight, scale, table, segments, ...) -> y [M, N]."""
    memory = interpreted if interpret else layouts
    tile = memory.RegisterTile(jnp.dtype(problem.out_dtype), config.rows, config.tile_n)
    kernel = launch.kernel(
        "patch_embed_sm90",
        functools.partial(Worker, tile=tile, views_of=memory.views_of),
        Scratch.types(config, problem, tile, memory),
        *(config, tiling, problem, memory, trace),
        num_threads=config.warpgroups,
        interpret=interpret,
    )
    return lambda patches, weight, *rest: kernel(patches, tile.view_weight(weight), *rest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory and barriers of a thread block."""

    columns_arrived: Any
    factor: Any  # [tile_n] float32, or None
    filled: Any
    freed: Any
    offset: Any  # [tile_n] float32
    patches: Any  # [slots, rows, 128 bytes]
    scale: Any  # [tile_n] float32
    products_issued: Any
    weight_arrived: Any
    weight: Any  # [chunks or slots, tile_n, 128 bytes], with rows permuted as in `layouts.py`

    @classmethod
    def types(cls, config: HopperConfig, problem: Problem, tile, memory) -> "Scratch":
        """Returns the types of all members."""
        dtype, slots, tile_n = jnp.dtype(problem.dtype), config.slots, config.tile_n
        tile_k, streams = ROW_BYTES // dtype.itemsize, config.stream_weight
        parts = slots if streams else tiles.chunks(problem)
        ring, written = (slots, config.rows, tile_k), (parts, *tile.weight_shape(tile_k))
        copies, columns = tile.weight_copies, plgpu.SMEM((tile_n,), jnp.float32)
        return cls(
            patches=memory.two_views(dtype, ring, ring),
            weight=memory.two_views(dtype, written, (parts, tile_n, tile_k)),
            scale=columns,
            offset=columns,
            factor=columns if problem.epilogue.levels else None,
            columns_arrived=plgpu.Barrier(
                num_arrivals=2 - problem.has_table + problem.epilogue.levels
            ),
            weight_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=1 if streams else parts),
            filled=plgpu.Barrier(
                num_arrivals=1 + copies * streams, num_barriers=config.consumers * slots
            ),
            freed=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            products_issued=plgpu.Barrier(num_arrivals=1, num_barriers=config.consumers),
        )


@dataclasses.dataclass(frozen=True)
class Worker(launch.Worker):
    """A thread block, with a method for each role.

    Attributes:
      tile: a consumer's part of a tile in registers.
      views_of: function from the memory of the weight to its two views.
    """

    tile: layouts.RegisterTile
    views_of: Any

    def run(self, warpgroup) -> None:
        """Assigns each warpgroup its registers and its role."""
        feed_registers, multiply_registers = self.config.register_split(self.problem)
        changes = feed_registers != multiply_registers

        @pl.when(warpgroup == self.config.consumers)
        def load():
            if changes:
                plgpu.set_max_registers(feed_registers, action="decrease")

            @plgpu.warp_map
            def roles(warp):
                pl.when(warp == 0)(self.feed)
                pl.when(warp == 1)(self.load_constants)

        @pl.when(warpgroup < self.config.consumers)
        def consume():
            if changes:
                plgpu.set_max_registers(multiply_registers, action="increase")
            self.multiply_and_store(warpgroup)

    def first_row(self, tile, consumer):
        """Returns the first row of a consumer's part of a tile."""
        return tile * self.config.tile_m + consumer * self.config.rows

    def first_entry(self, number, consumer):
        """Returns the first ring entry of a consumer's part of the `number`-th tile."""
        return (number * self.config.consumers + consumer) * self.chunks

    def filled(self, entry, consumer):
        return self.scratch.filled.at[consumer * self.config.slots + self.slot(entry)]

    def load_constants(self) -> None:
        s, columns = self.scratch, pl.ds(self.weight_row, self.config.tile_n)
        plgpu.copy_gmem_to_smem(self.operands.scale.at[columns], s.scale, s.columns_arrived)
        if not self.problem.has_table:
            plgpu.copy_gmem_to_smem(self.operands.table.at[columns], s.offset, s.columns_arrived)
        if self.problem.epilogue.levels:
            plgpu.copy_gmem_to_smem(self.operands.factor.at[columns], s.factor, s.columns_arrived)
        if not self.config.stream_weight:

            @pl.loop(0, self.chunks)
            def load(k):
                self.load_weight(k, k, s.weight_arrived.at[k])

    def load_weight(self, k, slot, arrived) -> None:
        """Loads chunk k of the weight to `scratch.weight[slot]`."""
        target = self.views_of(self.scratch.weight).written.at[slot]
        self.tile.load_weight(self.operands.weight, self.weight_row, self.chunk(k), target, arrived)

    def feed(self) -> None:
        entries = self.first_entry(self.for_each_tile(self.feed_tile, begin=None), 0)
        left = lax.min(entries, self.config.slots)

        @pl.loop(0, left)
        def drain(i):
            plgpu.barrier_wait(self.scratch.freed.at[self.slot(entries - left + i)])

    @jax.named_scope("feed a tile")
    def feed_tile(self, number, tile, _) -> None:
        for consumer in range(self.config.consumers):
            rows = pl.ds(self.first_row(tile, consumer), self.config.rows)
            self.feed_part(self.first_entry(number, consumer), consumer, rows)

    def feed_part(self, first, consumer: int, rows) -> None:
        """Fills the ring entries of a consumer's part of a tile."""

        @pl.loop(0, self.chunks)
        def feed_chunk(k):
            slot = self.acquire(first + k)

            # The first patches are loaded when their chunk of the weight has arrived, so that the
            # first product need not wait for the whole weight.
            if not self.config.stream_weight and consumer == 0:

                @pl.when(first == 0)
                def wait_for_weight():
                    plgpu.barrier_wait(self.scratch.weight_arrived.at[k])

            arrived = self.filled(first + k, consumer)
            patches = self.operands.patches.at[rows, self.chunk(k)]
            plgpu.copy_gmem_to_smem(patches, self.patches.written.at[slot], arrived)
            if self.config.stream_weight:
                self.load_weight(k, slot, arrived)

    def multiply_and_store(self, consumer) -> None:
        issued = self.scratch.products_issued
        plgpu.barrier_wait(self.scratch.columns_arrived)

        # Consumer 0 multiplies first, so the last one arrives once before it has issued products.
        @pl.when(consumer == self.config.consumers - 1)
        def let_consumer_0_begin():
            plgpu.barrier_arrive(issued.at[0])

        scales = self.keep(lambda g: self.tile.load_columns(self.scratch.scale, g))

        def begin_segment(table_row):
            first_row = table_row + consumer * self.config.rows
            return first_row, self.keep(lambda g: self.load_terms(g, first_row))

        def visit(number, tile, of_segment):
            with jax.named_scope("multiply"):
                accumulator = self.multiply(consumer, self.first_entry(number, consumer))
            with jax.named_scope("scale, add and store"):
                self.store(accumulator, self.first_row(tile, consumer), scales, *of_segment)

        self.for_each_tile(visit, begin_segment)

        @pl.when(consumer == 0)
        def await_the_last_arrival():
            plgpu.barrier_wait(issued.at[0])

    def multiply(self, consumer, first):
        """Computes the accumulator of a consumer's part of a tile."""
        s, patches = self.scratch, self.patches.multiplied
        following = lax.rem(consumer + 1, self.config.consumers)
        weight = self.views_of(s.weight).multiplied

        def free(k, *, pending):
            """Frees the slot of chunk k, after which products of `pending` chunks were issued."""
            plgpu.wgmma_wait(pending)
            plgpu.barrier_arrive(s.freed.at[self.slot(first + k)])

        def accumulate(accumulator):
            with jax.named_scope("wait for the others' products"):
                plgpu.barrier_wait(s.products_issued.at[consumer])

            def issue(k):
                slot = self.slot(first + k)
                plgpu.barrier_wait(self.filled(first + k, consumer))
                chunk = weight.at[slot if self.config.stream_weight else k]
                plgpu.wgmma(accumulator, patches.at[slot], chunk.T)

            def issue_and_free(k):
                issue(k)
                free(k - 1, pending=1)

            last = self.chunks - 1
            most, in_turn = unrolled(self.problem)
            turns = 0 if self.chunks <= most else (last - 1) // in_turn
            looped = last - turns * in_turn
            issue(0)
            for k in range(1, looped):
                issue_and_free(k)
            if turns:

                @pl.loop(0, turns)
                def turn(i):
                    for j in range(in_turn):
                        issue_and_free(looped + i * in_turn + j)

            if last > 0:
                issue(last)
            plgpu.barrier_arrive(s.products_issued.at[following])
            if last > 0:
                free(last - 1, pending=1)
            free(last, pending=0)
            return accumulator[...]

        kind = jnp.dtype(TABLE[self.problem.dtype].accumulator)
        return pl.run_scoped(accumulate, plgpu.ACC((self.config.rows, self.config.tile_n), kind))

    def load_terms(self, g: int, table_row):
        """Loads what is added to column group g: rows of the table from `table_row`, or offsets."""
        table, period = self.operands.table, self.problem.table_period
        if self.problem.has_table:
            return self.tile.load_rows(table, table_row, self.column, g, period)
        return self.tile.load_columns(self.scratch.offset, g)

    def keep(self, load):
        """Returns load(g) for every column group; None if registers cannot hold all of them."""
        if not self.config.keeps_columns(self.problem):
            return None
        return [load(g) for g in range(self.tile.groups)]

    def store(self, accumulator, row, kept_scales, table_row, kept_terms) -> None:
        """Scales and adds in float32, rounds, and stores a consumer's part of a tile."""
        inside = self.problem.rows % self.config.tile_m == 0
        of_rows = None
        if self.problem.epilogue.row_scale:
            of_rows = self.tile.load_row_values(self.operands.row_scale, row)
        for g, y in enumerate(self.tile.regroup(accumulator)):
            if keeps := kept_terms is not None:
                scales, terms = kept_scales[g], kept_terms[g]
            else:
                scales = self.tile.load_columns(self.scratch.scale, g)
                terms = self.load_terms(g, table_row)
            if not self.problem.has_table:
                terms = lax.broadcast_in_dim(terms, y.shape, (1,))
            elif keeps:
                terms = self.tile.pinned(terms)

            def load_residual(g=g):
                residual, period = self.operands.residual, self.problem.rows
                return self.tile.load_rows(residual, row, self.column, g, period)

            def load_factor(g=g, shape=y.shape):
                factor = self.tile.load_columns(self.scratch.factor, g)
                return lax.broadcast_in_dim(factor, shape, (1,))

            load = dict(row_scale=lambda: of_rows, residual=load_residual, factor=load_factor)
            y = self.result(y, lax.broadcast_in_dim(scales, y.shape, (1,)), terms, load)
            y = y.astype(self.problem.out_dtype)
            self.tile.store_rows(self.operands.y, *self.result_place, row, g, y, inside=inside)
