"""The Hopper kernel, in Pallas Mosaic GPU: wgmma with a stationary weight and a stationary table.

A worker is a thread block of three warpgroups. It owns `tile_n` columns of N for its whole life and
walks the runs of row tiles that `schedule.py` gives it:

  feed       one warp of the third warpgroup: TMA of patches, and of the table where a run begins,
             into one ring of slots, in the order in which they are consumed.
  multiply   two warpgroups, which take turns: while one multiplies its tile, the other scales, adds
             the table, which it holds in registers, and stores its tile by TMA from the slots
             whose patches it has multiplied.

Where the weight does not fit into shared memory it comes through the ring with the patches, and
both warpgroups multiply each slot, 64 rows each.
"""

import dataclasses
import math
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import schedule
from pallas_patch_embed.problem import Problem, Target

COMPUTE_CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
DTYPES = ("float8_e4m3fn", "bfloat16", "int8")

# What one thread block may have on Hopper, less 1 KiB for barriers. Mosaic aligns what it holds.
SHARED_MEMORY = 227 * 1024 - 1024
ALIGNMENT = 1024

# Rows of a warpgroup's wgmma, and the bytes of a swizzled row of shared memory.
WGMMA_M = 64
ROW_BYTES = 128
CONSUMERS = 2

# Registers that setmaxnreg gives a thread of the feeding and of the two multiplying warpgroups, of
# the 168 that each has at launch: 128 * (40 + 2 * 232) = 128 * (24 + 2 * 240) = 3 * 128 * 168.
REGISTER_SPLITS = ((40, 232), (24, 240))

# What a multiplying thread needs beside these, read from ptxas: less than this and it spills.
OTHER_REGISTERS = {"bfloat16": 48, "float32": 64}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of the Hopper kernel.

    Attributes:
      tile_n: columns of N of a worker, a multiple of 64.
      slots: depth of the ring; a slot holds 128 bytes of K of a tile's rows.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory;
        then a tile has 128 rows, else 64.
    """

    tile_n: int
    slots: int
    stream_weight: bool = False

    @property
    def sharers(self) -> int:
        """How many warpgroups multiply one tile."""
        return CONSUMERS if self.stream_weight else 1

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return WGMMA_M * self.sharers

    def slices(self, problem: Problem) -> int:
        """Into how many slices N is cut."""
        return problem.N // self.tile_n

    def workers(self, problem: Problem) -> int:
        """Thread blocks a slice of N: as many as run at the same time, or as there are tiles."""
        tiles = -(-math.prod(problem.patches[:-1]) // self.tile_m)
        return max(1, min(MULTIPROCESSORS // self.slices(problem), tiles))

    def chunks(self, problem: Problem) -> int:
        """Slots that a tile's patches take."""
        return problem.patches[-1] * jnp.dtype(problem.dtype).itemsize // ROW_BYTES

    def stores(self, problem: Problem) -> int:
        """TMA stores of 64 rows and 128 bytes that a warpgroup's tile takes."""
        return self.tile_n * jnp.dtype(problem.out_dtype).itemsize // ROW_BYTES

    def staging(self, problem: Problem) -> int:
        """How many of a tile's slots are kept until the tile has been stored from them."""
        return min(self.stores(problem), self.chunks(problem))

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory without the barriers."""
        weight_chunks = self.slots if self.stream_weight else self.chunks(problem)
        weight = weight_chunks * self.tile_n * ROW_BYTES
        patches = self.slots * self.tile_m * ROW_BYTES
        columns = 2 * -(-4 * self.tile_n // ALIGNMENT) * ALIGNMENT
        return weight + patches + columns

    def registers(self, problem: Problem) -> int:
        """Registers of a multiplying thread.

        Accumulators [64, tile_n], scales [tile_n], and the packed table [64, tile_n] or offsets
        [tile_n], over 128 threads of which 8 hold the same columns; and the rest.
        """
        accumulators, columns = WGMMA_M * self.tile_n // 128, self.tile_n // 4
        table = accumulators // 2 if len(problem.table) > 1 else columns
        return accumulators + columns + table + OTHER_REGISTERS[problem.out_dtype]

    def register_split(self, problem: Problem) -> tuple[int, int] | None:
        """The first of REGISTER_SPLITS with enough for a multiplying thread, None if none has."""
        needed = self.registers(problem)
        return next((split for split in REGISTER_SPLITS if split[1] >= needed), None)

    def check(self, problem: Problem) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `problem`."""
        if self.tile_n % 64 or problem.N % self.tile_n:
            raise NotImplementedError(
                f"N = {problem.N} is not cut into slices of tile_n = {self.tile_n} columns, "
                "multiples of 64."
            )
        if self.slots < (least := max(2, self.staging(problem))):
            raise NotImplementedError(
                f"{self} has {self.slots} slots, but {least} are in use at the same time."
            )
        if (size := self.shared_memory_bytes(problem)) > SHARED_MEMORY:
            raise NotImplementedError(
                f"{self} needs {size} bytes of shared memory, there are {SHARED_MEMORY}."
            )
        if self.register_split(problem) is None:
            raise NotImplementedError(
                f"{self} needs {self.registers(problem)} registers a thread, there are "
                f"{REGISTER_SPLITS[-1][1]}."
            )


def choose_config(problem: Problem) -> Config:
    """The config for a problem: a pure function of its shapes and dtypes.

    Raises:
      NotImplementedError: no config serves the problem.
    """
    widths = [n for n in (192, 128, 64) if problem.N % n == 0]
    if not widths:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")
    candidates = [
        Config(tile_n, slots, stream_weight)
        for stream_weight in (False, True)
        for tile_n in widths
        for slots in range(12, 3, -1)
    ]
    for config in candidates:
        # Narrower slices read the patches more often than streaming reads the weight.
        if not config.stream_weight and config.tile_n < 128 and problem.dtype == "bfloat16":
            continue
        try:
            config.check(problem)
        except NotImplementedError:
            continue
        return config
    raise NotImplementedError(f"no config of this kernel fits {problem}.")


def why_not(problem: Problem, target: Target | None) -> str | None:
    """The reason why this kernel cannot serve; None if it can."""
    if target is not None and target.compute_capability != COMPUTE_CAPABILITY:
        return f"it needs compute capability 9.0 (H100, H200); this is {target}."
    if problem.dtype not in DTYPES:
        return f"it multiplies {', '.join(DTYPES)}, not {problem.dtype}."
    if len(problem.weight) > 2 or len(problem.scale) > 1:
        return "its weight is one matrix [N, K]; this call has several."
    if problem.table_dtype != ("float32" if len(problem.table) == 1 else "bfloat16"):
        return f"it adds a bfloat16 table, not {problem.table_dtype}."
    if len(problem.table) > 1 and _period(problem) is None:
        return (
            f"its table [..., S, N] repeats along leading axes or has them all; {problem.table} "
            f"does not for patches {problem.patches}."
        )
    try:
        choose_config(problem)
    except NotImplementedError as error:
        return str(error)
    return None


def _period(problem: Problem) -> int | None:
    """Rows after which the table repeats along the rows of patches; None if it does not repeat."""
    if len(problem.table) == 1:
        return 1
    *leading, S, _ = problem.table
    while leading and leading[0] == 1:
        leading = leading[1:]
    batch = problem.patches[:-2]
    if S != problem.patches[-2] or tuple(leading) != batch[len(batch) - len(leading) :]:
        return None
    return S * math.prod(leading)


def run(
    patches: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str,
    config: Config | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """y[..., s, n] = out_dtype((sum_k patches[..., s, k] * weight[n, k]) * scale[n] + table[s, n]).

    Args:
      patches: [..., S, K] float8_e4m3fn, bfloat16 or int8.
      weight: [N, K] of the same dtype.
      scale: [N] float32.
      table: [S, N] bfloat16, with leading axes if images have tables of their own; or [N] float32.
      out_dtype: "bfloat16" or "float32".
      config: instead of that of `choose_config`.
      interpret: runs the kernel in Pallas' interpreter, on any platform.

    Returns:
      [..., S, N] of out_dtype, rounded once. The accumulator is int32 for int8, else float32 as
      wgmma accumulates it, which for float8 has fewer bits.
    """
    problem = Problem.of(patches, weight, scale, table, out_dtype=out_dtype)
    config = config or choose_config(problem)
    config.check(problem)
    *leading, K = patches.shape
    M = math.prod(leading)
    if M == 0:
        return jnp.zeros((*leading, problem.N), out_dtype)
    period = _period(problem)
    if table.ndim > 1:
        table = table.reshape(period, problem.N)
        if period < M and period % config.tile_m:
            # Rows that wrap around follow the last one, so that every tile's rows are contiguous.
            table = jnp.concatenate([table] * (1 + -(-config.tile_m // period)))
    runs = schedule.runs(M, period, config.tile_m, config.workers(problem))
    kernel = _kernel(config, problem, M, interpret)
    y = kernel(patches.reshape(M, K), weight, scale, table, jnp.asarray(runs))
    return y.reshape(*leading, problem.N)


def _kernel(config: Config, problem: Problem, M: int, interpret):
    """The kernel for these shapes: (patches [M, K], weight, scale, table, runs) -> y [M, N]."""
    dtype, out_dtype = jnp.dtype(problem.dtype), jnp.dtype(problem.out_dtype)
    has_table = len(problem.table) > 1
    slots, sharers, tile_n, tile_m = config.slots, config.sharers, config.tile_n, config.tile_m
    teams = CONSUMERS // sharers
    tile_k, store_n, table_n = (
        ROW_BYTES // d.itemsize for d in (dtype, out_dtype, jnp.dtype("bfloat16"))
    )
    chunks, stores = config.chunks(problem), config.stores(problem)
    staging = config.staging(problem)
    table_chunks = tile_n // table_n if has_table else 0
    slices = config.slices(problem)
    feed_registers, multiply_registers = config.register_split(problem)

    def body(patches, weight, scale, table, runs, out, ring, **scratch):
        s = types.SimpleNamespace(**scratch)
        s.patches_in, s.patches, s.table, s.staged = ring
        if interpret:
            s.patches_in = s.patches
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        column = lax.rem(block, slices) * tile_n
        worker = lax.div(block, slices)
        columns = pl.ds(column, tile_n)

        def slot_of(entry):
            return lax.rem(entry, slots)

        def for_each_run(visit):
            """Calls visit(run's fields, tiles before it, ring entries before it) in order."""

            def step(i, before):
                tiles, entries = before
                first, count, stride, row = (runs[worker, i, field] for field in range(4))
                visit((first, count, stride, row), tiles, entries)
                return tiles + count, entries + entries_before(count)

            return lax.fori_loop(0, runs.shape[1], step, (jnp.int32(0), jnp.int32(0)))

        def entries_before(tile):
            """Ring entries of a run before its tile: each team's first tile brings the table."""
            return tile * chunks + lax.min(tile, teams) * table_chunks

        def load_columns():
            plgpu.copy_gmem_to_smem(scale.at[columns], s.scale_columns, s.columns_arrived)
            if not has_table:
                plgpu.copy_gmem_to_smem(table.at[columns], s.offset_columns, s.columns_arrived)
            if config.stream_weight:
                return

            @pl.loop(0, chunks)
            def load_weight(k):
                source = weight.at[columns, pl.ds(k * tile_k, tile_k)]
                plgpu.copy_gmem_to_smem(source, s.weight_tiles.at[k], s.columns_arrived)

        def feed():
            def fill(entry, team, copies):
                """Waits until the entry's slot is free, then starts the copies into it."""
                slot = slot_of(entry)

                @pl.when(entry >= slots)
                def wait():
                    plgpu.barrier_wait(s.freed.at[slot])

                for source, target in copies(slot):
                    plgpu.copy_gmem_to_smem(source, target, s.filled.at[team * slots + slot])

            def feed_run(run, tiles, entries):
                first, count, stride, row = run

                def feed_tile(j, _):
                    team = lax.rem(tiles + j, teams)
                    entry = entries + entries_before(j)

                    @pl.when(j < teams)
                    def feed_table():
                        for e in range(table_chunks):

                            def copies(slot, e=e):
                                part = pl.ds(column + e * table_n, table_n)
                                for i in range(sharers):
                                    source = table.at[pl.ds(row + i * WGMMA_M, WGMMA_M), part]
                                    yield source, s.table.at[slot, pl.ds(i * WGMMA_M, WGMMA_M)]

                            fill(entry + e, team, copies)

                    entry = entries + entries_before(j + 1) - chunks
                    rows = pl.ds((first + j * stride) * tile_m, tile_m)

                    @pl.loop(0, chunks)
                    def feed_chunk(k):
                        inner = pl.ds(k * tile_k, tile_k)

                        def copies(slot):
                            yield patches.at[rows, inner], s.patches_in.at[slot]
                            if config.stream_weight:
                                yield weight.at[columns, inner], s.weight_tiles.at[slot]

                        fill(entry + k, team, copies)

                lax.fori_loop(0, count, feed_tile, None)

            _, entries = for_each_run(feed_run)

            left = lax.min(entries, slots)

            @pl.loop(0, left)
            def drain(i):
                plgpu.barrier_wait(s.freed.at[slot_of(entries - left + i)])

        def multiply_and_store():
            team, member = lax.div(warpgroup, sharers), lax.rem(warpgroup, sharers)
            next_team = lax.rem(team + 1, teams)
            # Which 64 of a slot's rows are multiplied here.
            mine = (pl.ds(member * WGMMA_M, WGMMA_M),) if sharers > 1 else ()
            plgpu.barrier_wait(s.columns_arrived)
            if teams > 1:

                @pl.when(team == teams - 1)
                def first_turn():
                    plgpu.barrier_arrive(s.turn.at[0])

            def wait_filled(entry):
                plgpu.barrier_wait(s.filled.at[team * slots + slot_of(entry)])

            def free(entry):
                plgpu.barrier_arrive(s.freed.at[slot_of(entry)])

            def hold_table(entry):
                """The table's rows of this warpgroup, [64, tile_n] in registers, by chunks."""
                held = []
                for e in range(table_chunks):
                    wait_filled(entry + e)
                    held.append(
                        plgpu.load(
                            s.table.at[(slot_of(entry + e), *mine)],
                            layout=plgpu.Layout.WGMMA,
                            optimized=False,
                        )
                    )
                    plgpu.commit_smem()
                    free(entry + e)
                return held

            def multiply(entry):
                def accumulate(accumulator):
                    if teams > 1:
                        plgpu.barrier_wait(s.turn.at[team])
                    for k in range(chunks):
                        wait_filled(entry + k)
                        slot = slot_of(entry + k)
                        plgpu.wgmma(
                            accumulator,
                            s.patches.at[(slot, *mine)],
                            s.weight_tiles.at[slot if config.stream_weight else k].T,
                        )
                        if teams > 1 and k == chunks - 1:
                            plgpu.barrier_arrive(s.turn.at[next_team])
                        if k > 0:
                            plgpu.wgmma_wait(1)
                        if 0 < k <= chunks - staging:
                            free(entry + k - 1)
                    plgpu.wgmma_wait(0)
                    return accumulator[...]

                kind = jnp.int32 if dtype == jnp.int8 else jnp.float32
                return pl.run_scoped(accumulate, plgpu.ACC((WGMMA_M, tile_n), kind))

            def hold_columns(values):
                """Values [tile_n] of shared memory in registers, by chunks of a store's columns."""
                by_column = plgpu.Layout.WGMMA.reduce(0)
                return [
                    plgpu.load(values.at[pl.ds(c * store_n, store_n)], layout=by_column)
                    for c in range(stores)
                ]

            scales = hold_columns(s.scale_columns)
            offsets = [] if has_table else hold_columns(s.offset_columns)

            def finish(accumulator, held, c):
                """Scaled, with the table, and rounded: columns of store c."""
                n = c * store_n
                y = accumulator[:, n : n + store_n].astype(jnp.float32)
                y = y * lax.broadcast_in_dim(scales[c], y.shape, (1,))
                if not has_table:
                    return (y + lax.broadcast_in_dim(offsets[c], y.shape, (1,))).astype(out_dtype)
                chunk, start = divmod(n, table_n)
                # The barrier keeps the table packed: without it the compiler widens it once,
                # outside of the loop, and spills.
                part = lax.optimization_barrier(held[chunk])[:, start : start + store_n]
                return (y + part.astype(jnp.float32)).astype(out_dtype)

            def store(accumulator, held, row, entry):
                """Stores a tile from the slots of its last entries, then frees them."""
                last = entry + chunks - staging

                def staged(c):
                    return s.staged.at[(slot_of(last + c % staging), *mine)]

                for begin in range(0, stores, staging):
                    batch = range(begin, min(begin + staging, stores))
                    for c in batch:
                        staged(c)[...] = finish(accumulator, held, c)
                    plgpu.commit_smem()
                    for c in batch:
                        columns = pl.ds(column + c * store_n, store_n)
                        plgpu.copy_smem_to_gmem(staged(c), out.at[pl.ds(row, WGMMA_M), columns])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for c in range(staging):
                    free(last + c)

            def visit(run, tiles, entries):
                first, count, stride, _ = run
                j0 = lax.rem(team + teams - lax.rem(tiles, teams), teams)

                @pl.when(count > j0)
                def walk():
                    held = hold_table(entries + entries_before(j0))

                    def visit_tile(i, _):
                        j = j0 + i * teams
                        entry = entries + entries_before(j + 1) - chunks
                        row = (first + j * stride) * tile_m + member * WGMMA_M
                        store(multiply(entry), held, row, entry)

                    lax.fori_loop(0, lax.div(count - j0 + teams - 1, teams), visit_tile, None)

            tiles, _ = for_each_run(visit)
            if teams > 1:

                @pl.when(lax.rem(tiles, teams) == team)
                def last_turn():
                    plgpu.barrier_wait(s.turn.at[team])

            plgpu.wait_smem_to_gmem(0)

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

    def rows_of_128_bytes(lead, rows, dtype, *, tiled):
        dtype = jnp.dtype(dtype)
        minor = ROW_BYTES // dtype.itemsize
        tiling = (plgpu.TilingTransform((8, minor)),) if tiled else ()
        return plgpu.SMEM(
            (lead, rows, minor),
            dtype,
            transforms=(*tiling, plgpu.SwizzleTransform(ROW_BYTES)),
        )

    # One memory, for patches, a table or a finished tile. TMA writes and reads it untiled, so that
    # any number of rows will do, wgmma reads it tiled. The interpreter has no such memory.
    ring = (
        rows_of_128_bytes(slots, tile_m, dtype, tiled=False),
        rows_of_128_bytes(slots, tile_m, dtype, tiled=True),
        rows_of_128_bytes(slots, tile_m, jnp.bfloat16, tiled=False),
        rows_of_128_bytes(slots, tile_m, out_dtype, tiled=False),
    )
    columns = plgpu.SMEM((tile_n,), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, problem.N), out_dtype),
        grid=(config.workers(problem) * slices,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=dict(
            ring=ring if interpret else plgpu.RefUnion(*ring),
            weight_tiles=rows_of_128_bytes(
                slots if config.stream_weight else chunks, tile_n, dtype, tiled=True
            ),
            scale_columns=columns,
            offset_columns=columns,
            columns_arrived=plgpu.Barrier(
                num_arrivals=1 + (not has_table) + (0 if config.stream_weight else chunks)
            ),
            filled=plgpu.Barrier(num_arrivals=sharers, num_barriers=teams * slots),
            freed=plgpu.Barrier(num_arrivals=sharers, num_barriers=slots),
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=teams),
        ),
    )
