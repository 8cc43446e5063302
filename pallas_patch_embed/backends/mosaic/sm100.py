"""The Blackwell kernel, in Pallas Mosaic GPU: tcgen05 with a stationary weight and table.

A worker is a cluster of two thread blocks, or one, of three warpgroups each. It owns `tile_n`
columns of N for its whole life and walks the runs of row tiles that `schedule.py` gives it, with
128 rows of every tile for each block:

  feed       one warp: TMA of patches into a ring of slots.
  multiply   one warp, of the first block: tcgen05 for both blocks, into one of two accumulators in
             tensor memory.
  store      two warpgroups, half of the columns each: load the other accumulator, scale it, add the
             table, which they hold in registers, and store it by TMA.

The weight stays in shared memory; where it does not fit, it comes through the ring with the
patches.
"""

import dataclasses
import functools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic import launch
from pallas_patch_embed.backends.mosaic.launch import ALIGNMENT
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import ROW_BYTES, Grid
from pallas_patch_embed.chips import B200, B300, Chip, Target
from pallas_patch_embed.problem import Problem

CHIPS = (B200, B300)

EVIDENCE = (
    "interpreted with race detection, compiled for sm_100a, and its PTX executed by an emulator in "
    "the tests; not yet run on a Blackwell GPU."
)

# Rows of a block's accumulator, how many accumulators there are, the warpgroups that store, and the
# buffers that each has for that, a power of two.
ROWS = 128
ACCUMULATORS = 2
STORERS = 2
STAGES = 2

# Registers that setmaxnreg gives a thread of the first and of the storing warpgroups, of the 168
# that each has at launch: 40 + 2 * 232 = 3 * 168. With more than there are it would wait for ever.
REGISTER_SPLIT = (40, 232)

# What a storing thread needs beside accumulators, scales and table; addresses are in uniform
# registers.
OTHER_REGISTERS = 8

LAYOUT = plgpu.Layout.TCGEN05


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of the Blackwell kernel.

    Attributes:
      tile_n: columns of N of a worker, a multiple of 64.
      slots: depth of the ring; a slot holds 128 bytes of K of a block's rows.
      collective: whether two blocks multiply together, each with half of the weight.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
    """

    tile_n: int
    slots: int
    collective: bool = True
    stream_weight: bool = False

    @property
    def blocks(self) -> int:
        """Thread blocks of a worker."""
        return 2 if self.collective else 1

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks

    def grid(self, problem: Problem, chip: Chip) -> Grid:
        """The workers, and which tiles they share."""
        return Grid.of(problem, chip, self.tile_m, self.tile_n, blocks=self.blocks)

    def store_n(self, problem: Problem) -> int:
        """Columns of one TMA store: rows of 128 bytes, or of 64 where those do not divide."""
        itemsize, columns = jnp.dtype(problem.out_dtype).itemsize, self.tile_n // STORERS
        return next(n for b in (128, 64) if columns % (n := b // itemsize) == 0)

    def tensor_memory_columns(self) -> int:
        """Columns of tensor memory, which is given in powers of two."""
        return 1 << (ACCUMULATORS * self.tile_n - 1).bit_length()

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory of a block without the barriers."""
        weight_chunks = self.slots if self.stream_weight else tiles.chunks(problem)
        weight = weight_chunks * self.tile_n // self.blocks * ROW_BYTES
        patches = self.slots * ROWS * ROW_BYTES
        store_bytes = ROWS * self.store_n(problem) * jnp.dtype(problem.out_dtype).itemsize
        sizes = (weight, patches, STORERS * STAGES * store_bytes)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def registers(self, problem: Problem) -> int:
        """Registers of a storing thread.

        A step's accumulators [128, store_n], and for [128, tile_n / 2] scales and the table or
        offsets in float32, over 128 threads of which every fourth has the same columns; and the
        rest.
        """
        columns = self.tile_n // STORERS
        terms = columns if problem.has_table else columns // 4
        return self.store_n(problem) + columns // 4 + terms + OTHER_REGISTERS

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `problem`."""
        if self.tile_n % 64 or problem.N % self.tile_n:
            raise NotImplementedError(
                f"N = {problem.N} is not cut into slices of tile_n = {self.tile_n} columns, "
                "multiples of 64."
            )
        if not 2 <= self.slots <= 32:
            raise NotImplementedError(f"{self} has not 2 to 32 slots.")
        if (columns := self.tensor_memory_columns()) > chip.tensor_memory:
            raise NotImplementedError(
                f"{self} needs {columns} columns of tensor memory, there are {chip.tensor_memory}."
            )
        launch.check_shared_memory(self.shared_memory_bytes(problem), chip, self)
        if (needed := self.registers(problem)) > REGISTER_SPLIT[1]:
            raise NotImplementedError(
                f"{self} needs {needed} registers a thread, there are {REGISTER_SPLIT[1]}."
            )


def choose_config(problem: Problem, chip: Chip) -> Config:
    """The config for a problem on a chip.

    Raises:
      NotImplementedError: no config serves the problem.
    """
    widths = [n for n in (256, 192, 128, 64) if problem.N % n == 0]
    if not widths:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")

    def deepest(**choices):
        """The config with the most slots that fits, of 4 to 8; None if none does."""
        depths = range(8, 3, -1)
        return tiles.first_that_fits(problem, chip, (Config(slots=s, **choices) for s in depths))

    # Slices of fewer than 192 columns read the patches more often than streaming in wider ones
    # reads the weight.
    stationary = [deepest(tile_n=n) for n in widths if n >= min(192, widths[0])]
    streaming = [deepest(tile_n=n, stream_weight=True) for n in widths]
    config = next(filter(None, stationary + streaming))
    grid = config.grid(problem, chip)
    if grid.tiles * grid.slices * grid.blocks >= chip.multiprocessors:
        return config
    # A small problem is spread over more multiprocessors.
    narrow = [
        deepest(tile_n=widths[-1], collective=False, stream_weight=stream)
        for stream in (False, True)
    ]
    return next(filter(None, narrow))


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
            f"it needs compute capability 10.0 or 10.3 (B200, B300); this is {target}."
        )
    tiles.check_dtype(problem, chip)
    tiles.check_operands(problem)
    if config is None:
        config = choose_config(problem, chip)
    else:
        config.check(problem, chip)
    if trace:
        needed = config.shared_memory_bytes(problem) + launch.trace_bytes(trace, 1 + STORERS)
        launch.check_shared_memory(needed, chip, config)
    grid = config.grid(problem, chip)
    kernel = functools.partial(_kernel, config, grid, problem, interpret, trace)
    return launch.plan(problem, config, grid, kernel)


def _kernel(config: Config, grid: Grid, problem: Problem, interpret, trace: str):
    """The kernel: (patches [M, K], weight, scale, table, segments) -> y [M, N]."""
    dtype, out_dtype = jnp.dtype(problem.dtype), jnp.dtype(problem.out_dtype)
    slots, tile_m, tile_n = config.slots, config.tile_m, config.tile_n
    blocks, streaming = config.blocks, config.stream_weight
    tile_k = ROW_BYTES // dtype.itemsize
    chunks, slices = tiles.chunks(problem), grid.slices
    has_table, period = problem.has_table, problem.table_period
    store_n = config.store_n(problem)
    steps = tile_n // STORERS // store_n
    first_registers, store_registers = REGISTER_SPLIT
    # Each block loads its part, the bytes of all count on the first one's barrier.
    partitioned, together = {}, {}
    if config.collective:
        part = plgpu.CopyPartition.PARTITIONED(0)
        partitioned = dict(collective_axes="peer", leader_tracked=part)
        together = dict(collective_axis="peer")

    def body(patches, weight, scale, table, runs, out, ring, **scratch):
        s = types.SimpleNamespace(**scratch)
        s.patches_in, s.patches = ring
        if interpret:
            s.patches_in = s.patches
        warpgroup, peer = lax.axis_index("warpgroup"), lax.axis_index("peer")
        cluster = lax.axis_index("cluster")
        column = lax.rem(cluster, slices) * tile_n
        worker = lax.div(cluster, slices)

        def for_each_tile(visit, begin_run=lambda row: None):
            """Calls visit(number, first row, what begin_run(table row) gave) for each tile."""

            def visit_run(run, tiles):
                first, count, stride, table_row = run

                @pl.when(count > 0)
                def walk():
                    begun = begin_run(table_row)

                    def step(j, _):
                        visit(tiles + j, (first + j * stride) * tile_m, begun)

                    lax.fori_loop(0, count, step, None)

            return launch.for_each_segment(runs, worker, visit_run)

        def drain(barriers, count, uses):
            """Waits for the last use of each barrier, for which nobody has waited."""

            @pl.loop(0, lax.min(uses, count))
            def wait(i):
                plgpu.barrier_wait(barriers.at[i])

        def load_weight(k, target, arrived):
            part = weight.at[pl.ds(column, tile_n), pl.ds(k * tile_k, tile_k)]
            plgpu.copy_gmem_to_smem(part, target, arrived, **partitioned)

        def feed():
            if not streaming:

                @pl.loop(0, chunks)
                def load(k):
                    load_weight(k, s.weight_tiles.at[k], s.weight_arrived)

            @jax.named_scope("feed a tile")
            def feed_tile(number, row, _):
                @pl.loop(0, chunks)
                def feed_chunk(k):
                    entry = number * chunks + k
                    slot = lax.rem(entry, slots)

                    @pl.when(entry >= slots)
                    def wait():
                        plgpu.barrier_wait(s.freed.at[slot])

                    part = patches.at[pl.ds(row, tile_m), pl.ds(k * tile_k, tile_k)]
                    arrived = s.filled.at[slot]
                    plgpu.copy_gmem_to_smem(part, s.patches_in.at[slot], arrived, **partitioned)
                    if streaming:
                        load_weight(k, s.weight_tiles.at[slot], arrived)

            tiles = for_each_tile(feed_tile)
            drain(s.freed, slots, tiles * chunks)

        def accumulator_of(number):
            return lax.rem(number, ACCUMULATORS)

        def columns_of(number, first, width):
            """These columns of a tile's accumulator."""
            begin = accumulator_of(number) * tile_n + first
            return s.accumulators.at[:, pl.ds(begin, width)]

        def multiply():
            leads = peer == 0
            if not streaming:

                @pl.when(leads)
                def weight_arrives():
                    plgpu.barrier_wait(s.weight_arrived)

            def multiply_tile(number, row, _):
                @pl.when(number >= ACCUMULATORS)
                @jax.named_scope("wait for an accumulator")
                def wait():
                    plgpu.barrier_wait(s.read.at[accumulator_of(number)])

                @pl.when(leads)
                @jax.named_scope("multiply")
                def issue():
                    for k in range(chunks):
                        slot = lax.rem(number * chunks + k, slots)
                        plgpu.barrier_wait(s.filled.at[slot])
                        plgpu.tcgen05_mma(
                            columns_of(number, 0, tile_n),
                            s.patches.at[slot],
                            s.weight_tiles.at[slot if streaming else k].T,
                            s.freed.at[slot],
                            accumulate=k > 0,
                            **together,
                        )
                    done = s.multiplied.at[accumulator_of(number)]
                    plgpu.tcgen05_commit_arrive(done, **together)

            tiles = for_each_tile(multiply_tile)
            drain(s.read, ACCUMULATORS, tiles)

        def store():
            member = warpgroup - 1
            # The first of this warpgroup's columns in the accumulator, and in N.
            begin = member * (tile_n // STORERS)
            first_column = column + begin

            def load_columns(values, e):
                part = values.at[pl.ds(first_column + e * store_n, store_n)]
                return plgpu.load(part, layout=LAYOUT.reduce(0), optimized=False)

            def hold_table(table_row):
                kind = plgpu.ShapeDtypeStruct((ROWS, store_n), jnp.bfloat16, layout=LAYOUT)
                return [
                    launch.load_rows(
                        table,
                        table_row + peer * ROWS,
                        first_column,
                        kind,
                        period=period,
                        skip=e * store_n,
                        interpret=bool(interpret),
                    ).astype(jnp.float32)
                    for e in range(steps if has_table else 0)
                ]

            scales = [load_columns(scale, e) for e in range(steps)]
            offsets = [load_columns(table, e) for e in range(0 if has_table else steps)]

            def terms(held, e):
                """What is added in step e."""
                if has_table:
                    return held[e]
                return lax.broadcast_in_dim(offsets[e], (ROWS, store_n), (1,))

            def store_accumulator(number, row, held):
                for e in range(steps):
                    part = columns_of(number, begin + e * store_n, store_n)
                    y = plgpu.async_load_tmem(part, layout=LAYOUT)
                    plgpu.wait_load_tmem()
                    if e == steps - 1:
                        plgpu.barrier_arrive(s.read.at[accumulator_of(number)])
                    factors = lax.broadcast_in_dim(scales[e], (ROWS, store_n), (1,))
                    y = (y.astype(jnp.float32) * factors + terms(held, e)).astype(out_dtype)
                    stage = (number * steps + e) & (STAGES - 1)
                    staged = s.staged.at[member * STAGES + stage]
                    plgpu.wait_smem_to_gmem(STAGES - 1, wait_read_only=True)
                    staged[...] = y
                    plgpu.commit_smem()
                    rows = pl.ds(row + peer * ROWS, ROWS)
                    columns = pl.ds(first_column + e * store_n, store_n)
                    plgpu.copy_smem_to_gmem(staged, out.at[rows, columns])

            def store_tile(number, row, held):
                with jax.named_scope("wait for products"):
                    plgpu.barrier_wait(s.multiplied.at[accumulator_of(number)])
                with jax.named_scope("scale, add and store"):
                    store_accumulator(number, row, held)

            for_each_tile(store_tile, hold_table)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 0)
        def feed_and_multiply():
            plgpu.set_max_registers(first_registers, action="decrease")

            @plgpu.warp_map
            def roles(warp):
                pl.when(warp == 0)(feed)
                pl.when(warp == 1)(multiply)

        @pl.when(warpgroup > 0)
        def store_results():
            plgpu.set_max_registers(store_registers, action="increase")
            store()

    # TMA writes patches untiled, so that any number of rows will do.
    ring = (slots, ROWS, tile_k)
    kept = slots if streaming else chunks
    tensor_cores = dict(orders_tensor_core=True)
    read = dict(num_arrivals=STORERS, num_barriers=ACCUMULATORS, **tensor_cores)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.rows, problem.N), out_dtype),
        grid=(grid.workers * slices,),
        grid_names=("cluster",),
        cluster=(blocks,),
        cluster_names=("peer",),
        num_threads=1 + STORERS,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=launch.compiler_params(trace),
        scratch_types=dict(
            ring=launch.two_views(dtype, ring, ring, interpret=interpret),
            weight_tiles=launch.swizzled(dtype, kept, tile_n // blocks, tile_k, tiled=True),
            staged=launch.swizzled(out_dtype, STORERS * STAGES, ROWS, store_n, tiled=False),
            accumulators=plgpu.TMEM(
                (ROWS, ACCUMULATORS * tile_n),
                jnp.int32 if dtype == jnp.int8 else jnp.float32,
                collective=config.collective,
            ),
            weight_arrived=plgpu.Barrier(num_arrivals=chunks),
            filled=plgpu.Barrier(num_arrivals=2 if streaming else 1, num_barriers=slots),
            freed=plgpu.Barrier(num_arrivals=1, num_barriers=slots, **tensor_cores),
            multiplied=plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, **tensor_cores),
            read=(
                plgpu.ClusterBarrier(collective_axes=("peer",), **read)
                if config.collective
                else plgpu.Barrier(**read)
            ),
        ),
    )
