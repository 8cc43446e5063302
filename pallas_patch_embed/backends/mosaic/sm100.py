"""The Blackwell kernel, in Pallas Mosaic GPU: tcgen05 with a stationary weight and table.

A worker is a cluster of two thread blocks, or one block, of three warpgroups each. It computes the
same `tile_n` columns of N for all row tiles that `schedule.py` assigns to it. Each block has 128
rows of every tile:

  feed       one warp of each block, the producer: loads patches by TMA into the slots of a ring. It
             loads a stationary weight once, and a streamed weight together with the patches.
  multiply   one warp of the first block: issues tcgen05.mma for both blocks, which accumulates the
             products of a tile in one of two accumulators in tensor memory.
  store      two warpgroups of each block, each with half of the columns: load the sums of the
             accumulator that is complete, scale them, add the table, and store by TMA. The table's
             rows stay in registers for a segment, a sequence of tiles that need the same rows.

  barrier          arrivals of a phase     its phase completes when              who waits
  weight_arrived   1 per chunk, by TMA     a stationary weight has arrived       multiply, once
  filled[slot]     1 by TMA, or 2 with a   the slot's patches, and the streamed  multiply
                   streamed weight         weight for them, have arrived
  freed[slot]      1 tcgen05.commit        the slot's chunk is multiplied        feed of each block
  multiplied[a]    1 tcgen05.commit        accumulator a has all products        store of each block
  read[a]          1 per store warpgroup   all sums of accumulator a are loaded  multiply

In a cluster of two, TMA loads arrive only at the first block's barriers. All other arrivals reach
both blocks, so the second block's multiply warp waits for `read` too; it does nothing else. At each
wait Mosaic flips the parity that it expects of the barrier, so every phase needs a wait. Slots and
accumulators are free before their first use, so feed and multiply do not wait then. Instead they
wait for the last phases before they return; no block may exit before its peer's last arrival.
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
from pallas_patch_embed.base.problem import Problem

# Rows of an accumulator, which are the lanes of tensor memory.
ROWS = 128
ACCUMULATORS = 2  # One is filled while the other one is stored.

STORERS = 2  # Warpgroups that store.

# Largest number of columns whose sums a storing thread has in registers at a time; with an
# activation half of them, because ptxas spills with more.
MOST_COLUMNS = 64

# Registers of a thread in the first and in a storing warpgroup, set by setmaxnreg. At launch every
# thread has 168: 40 + 2 * 232 = 3 * 168. If the total were larger, setmaxnreg would wait forever.
REGISTER_SPLIT = (40, 232)

# Registers that a storing thread needs in addition to those for sums, scales and table. With fewer,
# ptxas spills. Addresses are not included, because they are in uniform registers.
OTHER_REGISTERS = 8


@dataclasses.dataclass(frozen=True)
class BlackwellConfig:
    """Tile sizes and pipeline depth of the Blackwell kernel.

    Attributes:
      tile_n: columns of N that a worker computes, a multiple of 64.
      slots: number of slots of the ring; a slot has 128 bytes of K for each row of a block.
      collective: whether a worker is two blocks, each with half of the rows of its weight.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
      buffers: staging buffers of each storing warpgroup, 1 or 2. With two, TMA stores one while the
        other one is filled.
    """

    tile_n: int
    slots: int
    collective: bool = True
    stream_weight: bool = False
    buffers: int = 2

    @property
    def blocks(self) -> int:
        """Number of thread blocks of a worker."""
        return 2 if self.collective else 1

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a thread block."""
        return 1 + STORERS

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks

    def tiling(self, problem: Problem, chip: Chip) -> Tiling:
        """Returns the tiles and workers for a problem."""
        return Tiling.of(problem, chip, self.tile_m, self.tile_n, blocks=self.blocks)

    def work(self, problem: Problem, chip: Chip) -> Work:
        """Returns the work of a launch, from which its time is predicted."""
        return work_of(
            problem,
            chip,
            self.tiling(problem, chip),
            tile_n=self.tile_n,
            slots=self.slots,
            rows=ROWS,
            columns=self.tile_n // self.blocks,
            streamed=float(self.stream_weight),
        )

    def store_n(self, problem: Problem) -> int:
        """Returns the columns of a TMA store, of 128, 64 or 32 bytes."""
        itemsize, columns = jnp.dtype(problem.out_dtype).itemsize, self.tile_n // STORERS
        most = MOST_COLUMNS // 2 if problem.epilogue.activation else MOST_COLUMNS
        widths = (size // itemsize for size in (128, 64, 32))
        return next(n for n in widths if n <= most and columns % n == 0)

    def tensor_memory_columns(self) -> int:
        """Returns the number of columns of tensor memory to allocate, a power of two."""
        return 1 << (ACCUMULATORS * self.tile_n - 1).bit_length()

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Returns the shared memory of a thread block in bytes, without the barriers."""
        weight_chunks = self.slots if self.stream_weight else tiles.chunks(problem)
        weight = weight_chunks * self.tile_n // self.blocks * ROW_BYTES
        patches = self.slots * ROWS * ROW_BYTES
        store_bytes = ROWS * self.store_n(problem) * jnp.dtype(problem.out_dtype).itemsize
        sizes = (weight, patches, STORERS * self.buffers * store_bytes)
        return sum(-(-size // launch.ALIGNMENT) * launch.ALIGNMENT for size in sizes)

    def registers(self, problem: Problem) -> int:
        """Returns the number of registers that a storing thread needs.

        A thread has a quarter of its warpgroup's columns in each of four rows. It keeps 32-bit
        numbers: the sums of one step, and scales and table for all its columns. Scales are the same
        in all rows, and so are the offsets of a problem without a table.
        """
        columns = self.tile_n // STORERS
        terms = columns if problem.has_table else columns // 4
        if problem.epilogue.residual:
            terms += self.store_n(problem)
        if problem.epilogue.levels:
            terms += self.store_n(problem) // 4
        return self.store_n(problem) + columns // 4 + terms + OTHER_REGISTERS

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `problem`."""
        launch.check_slice(self.tile_n, problem)
        launch.check_slots(self.slots, launch.MOST_BARRIERS)
        if self.buffers not in (1, 2):
            raise NotImplementedError(f"{self} has {self.buffers} buffers, expected 1 or 2.")
        columns = self.tensor_memory_columns()
        launch.check_resource("columns of tensor memory", columns, chip.tensor_memory, self)
        launch.check_shared_memory(self.shared_memory_bytes(problem), chip, self)
        launch.check_registers(self.registers(problem), REGISTER_SPLIT[1], self)


def make(config: BlackwellConfig, tiling: Tiling, problem: Problem, interpret, trace: str):
    """Makes the kernel: (patches [M, K], weight, scale, table, segments) -> y [M, N]."""
    memory = interpreted if interpret else layouts
    tile = memory.TensorTile(config.store_n(problem))
    return launch.kernel(
        "patch_embed_sm100",
        lambda *args, **kw: Worker(*args, **kw | dict(step_tile=tile, rank=lax.axis_index("rank"))),
        Scratch.types(config, problem, memory),
        *(config, tiling, problem, memory, trace),
        cluster=(config.blocks,),
        cluster_names=("rank",),
        num_threads=config.warpgroups,
        interpret=interpret,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory, tensor memory and barriers of a thread block."""

    accumulators: Any  # [128 rows, accumulators * tile_n], in tensor memory
    filled: Any
    freed: Any
    multiplied: Any
    read: Any
    patches: Any  # [slots, 128 rows, 128 bytes], with the two views of `Worker.patches`
    staged: Any  # [storing warpgroups * buffers, 128 rows, store_n]
    weight_arrived: Any
    weight: Any  # [chunks (slots if the weight is streamed), rows of this block, 128 bytes]

    @classmethod
    def types(cls, config: BlackwellConfig, problem: Problem, memory) -> "Scratch":
        """Returns the types of all members; `memory` is the module `layouts` or `interpreted`."""
        dtype, slots, chunks = jnp.dtype(problem.dtype), config.slots, tiles.chunks(problem)
        tile_k, weight_rows = ROW_BYTES // dtype.itemsize, config.tile_n // config.blocks
        weight_chunks = slots if config.stream_weight else chunks
        staged = (STORERS * config.buffers, ROWS, config.store_n(problem))
        ring, columns = (slots, ROWS, tile_k), ACCUMULATORS * config.tile_n
        sum_dtype = jnp.dtype(TABLE[problem.dtype].accumulator)
        ordered: Any = dict(orders_tensor_core=True)
        pair_barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",))
        read_barrier = pair_barrier if config.collective else plgpu.Barrier
        return cls(
            patches=memory.two_views(dtype, ring, ring),
            weight=layouts.swizzled(dtype, weight_chunks, weight_rows, tile_k, tiled=True),
            staged=layouts.swizzled(jnp.dtype(problem.out_dtype), *staged, tiled=False),
            accumulators=plgpu.TMEM((ROWS, columns), sum_dtype, collective=config.collective),
            weight_arrived=plgpu.Barrier(num_arrivals=chunks),
            filled=plgpu.Barrier(num_arrivals=1 + config.stream_weight, num_barriers=slots),
            freed=plgpu.Barrier(num_arrivals=1, num_barriers=slots, **ordered),
            multiplied=plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, **ordered),
            read=read_barrier(num_arrivals=STORERS, num_barriers=ACCUMULATORS, **ordered),
        )


@dataclasses.dataclass(frozen=True)
class Worker(launch.Worker):
    """The roles of one block of a worker. The tile loop and the ring are in `launch.Worker`.

    A tile has a `number` among this worker's tiles, and a `tile_index` among all tiles. The storing
    warpgroup `storer`, 0 or 1, handles its half of a tile's columns in steps of one TMA store.

    Attributes:
      step_tile: layout of the columns of one step in registers.
      rank: rank of this block in the cluster.
    """

    step_tile: layouts.TensorTile
    rank: Any

    def run(self, warpgroup) -> None:
        """Assigns each warpgroup its registers and its role."""
        first_registers, store_registers = REGISTER_SPLIT

        @pl.when(warpgroup == 0)
        def feed_and_multiply():
            plgpu.set_max_registers(first_registers, action="decrease")

            @plgpu.warp_map
            def roles(warp):
                pl.when(warp == 0)(self.feed)
                pl.when(warp == 1)(self.multiply)

        @pl.when(warpgroup > 0)
        def store():
            plgpu.set_max_registers(store_registers, action="increase")
            self.store(warpgroup - 1)

    def drain(self, barriers, count: int, uses) -> None:
        """Waits for the last phases of `count` barriers, which were used in turn `uses` times."""

        @pl.loop(0, lax.min(uses, count))
        def wait(i):
            plgpu.barrier_wait(barriers.at[i])

    def accumulator(self, number, first: int, width: int):
        """Returns `width` columns of the `number`-th tile's accumulator, beginning at `first`."""
        begin = lax.rem(number, ACCUMULATORS) * self.config.tile_n + first
        return self.scratch.accumulators.at[:, pl.ds(begin, width)]

    def load(self, source, target, arrived) -> None:
        """Loads this block's rows of `source`. The first block's barrier counts all bytes."""
        pair: dict[str, Any] = {}
        if self.config.collective:
            pair = dict(collective_axes="rank", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))
        plgpu.copy_gmem_to_smem(source, target, arrived, **pair)

    def load_weight(self, k, slot, arrived) -> None:
        """Loads chunk k of the weight to `scratch.weight[slot]`."""
        rows, columns = pl.ds(self.weight_row, self.config.tile_n), self.chunk(k)
        self.load(self.operands.weight.at[rows, columns], self.scratch.weight.at[slot], arrived)

    def feed(self) -> None:
        if not self.config.stream_weight:

            @pl.loop(0, self.chunks)
            def load_chunk(k):
                self.load_weight(k, k, self.scratch.weight_arrived)

        count = self.for_each_tile(self.feed_tile)
        self.drain(self.scratch.freed, self.config.slots, count * self.chunks)

    @jax.named_scope("feed a tile")
    def feed_tile(self, number, tile_index, _) -> None:
        rows = pl.ds(tile_index * self.config.tile_m, self.config.tile_m)

        @pl.loop(0, self.chunks)
        def feed_chunk(k):
            slot = self.acquire(number * self.chunks + k)
            arrived = self.scratch.filled.at[slot]
            patches = self.operands.patches.at[rows, self.chunk(k)]
            self.load(patches, self.patches.written.at[slot], arrived)
            if self.config.stream_weight:
                self.load_weight(k, slot, arrived)

    def multiply(self) -> None:
        if not self.config.stream_weight:

            @pl.when(self.rank == 0)
            def await_weight():
                plgpu.barrier_wait(self.scratch.weight_arrived)

        self.drain(self.scratch.read, ACCUMULATORS, self.for_each_tile(self.multiply_tile))

    def multiply_tile(self, number, tile_index, _) -> None:
        """Waits until the accumulator's previous sums have been loaded, then multiplies a tile."""

        @pl.when(number >= ACCUMULATORS)
        @jax.named_scope("wait for an accumulator")
        def wait():
            plgpu.barrier_wait(self.scratch.read.at[lax.rem(number, ACCUMULATORS)])

        @pl.when(self.rank == 0)
        @jax.named_scope("multiply")
        def issue():
            s = self.scratch
            pair: Any = dict(collective_axis="rank") if self.config.collective else {}
            sums = self.accumulator(number, 0, self.config.tile_n)
            for k in range(self.chunks):
                slot = self.slot(number * self.chunks + k)
                plgpu.barrier_wait(s.filled.at[slot])
                weight = s.weight.at[slot if self.config.stream_weight else k].T
                patches, freed = self.patches.multiplied.at[slot], s.freed.at[slot]
                plgpu.tcgen05_mma(sums, patches, weight, freed, accumulate=k > 0, **pair)
            plgpu.tcgen05_commit_arrive(s.multiplied.at[lax.rem(number, ACCUMULATORS)], **pair)

    def store(self, storer) -> None:
        """Stores half of every tile's columns. `terms[step]` are rows of the table or offsets."""
        steps = range(self.config.tile_n // STORERS // self.step_tile.columns)
        columns = [self.weight_row + self.step_column(storer, step) for step in steps]
        load, scale, table = self.step_tile.load_columns, self.operands.scale, self.operands.table
        scales = [load(scale, column) for column in columns]
        offsets = [] if self.problem.has_table else [load(table, column) for column in columns]

        def begin_segment(table_row):
            if offsets:
                return [self.step_tile.broadcast(offset) for offset in offsets]
            return [self.load_table(storer, table_row, step) for step in steps]

        def store_tile(number, tile_index, terms):
            row = tile_index * self.config.tile_m
            with jax.named_scope("wait for products"):
                plgpu.barrier_wait(self.scratch.multiplied.at[lax.rem(number, ACCUMULATORS)])
            with jax.named_scope("scale, add and store"):
                for step in steps:
                    self.store_step(storer, number, row, step, scales[step], terms[step])

        self.for_each_tile(store_tile, begin_segment)
        plgpu.wait_smem_to_gmem(0)

    def step_column(self, storer, step: int):
        """Returns a step's first column in the accumulator."""
        return storer * (self.config.tile_n // STORERS) + step * self.step_tile.columns

    def load_table(self, storer, table_row, step: int):
        """Loads the table's rows for a step; all steps share the registers for addresses."""
        row, column = table_row + self.rank * ROWS, self.column + self.step_column(storer, 0)
        skip, period = step * self.step_tile.columns, self.problem.table_period
        return self.step_tile.load_rows(self.operands.table, row, column, skip, period)

    def store_step(self, storer, number, row, step: int, scale, term) -> None:
        """Loads the sums of a step, scales and adds in float32, rounds, and stores the result."""
        s, width, first = self.scratch, self.step_tile.columns, self.step_column(storer, step)
        step_count = self.config.tile_n // STORERS // width
        y = self.step_tile.load_sums(self.accumulator(number, first, width))
        plgpu.wait_load_tmem()
        if step == step_count - 1:
            plgpu.barrier_arrive(s.read.at[lax.rem(number, ACCUMULATORS)])

        def load_row_scale():
            row_scale = self.operands.row_scale
            return self.step_tile.load_row_values(row_scale, row + self.rank * ROWS)

        def load_residual():
            residual, period = self.operands.residual, self.problem.rows
            place = row + self.rank * ROWS, self.column + first
            return self.step_tile.load_rows(residual, *place, 0, period)

        def load_factor():  # ptxas spills if factors stay in registers, as scales do.
            factor = self.step_tile.load_columns(self.operands.factor, self.weight_row + first)
            return self.step_tile.broadcast(factor)

        load = dict(row_scale=load_row_scale, residual=load_residual, factor=load_factor)
        y = self.result(y, self.step_tile.broadcast(scale), term, load)
        buffers = self.config.buffers
        buffer = s.staged.at[storer * buffers + ((number * step_count + step) & (buffers - 1))]
        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
        buffer[...] = y.astype(self.problem.out_dtype)
        plgpu.commit_smem()
        rows = pl.ds(row + self.rank * ROWS, ROWS)
        result, column = self.result_place
        for i, y in enumerate(self.operands.y):
            place = y.at[rows, pl.ds(column + first, width)]
            store = functools.partial(plgpu.copy_smem_to_gmem, buffer, place)
            if len(self.operands.y) == 1:
                store()
            else:
                pl.when(result == i)(store)
