"""The Hopper kernel, in Pallas Mosaic GPU: wgmma with a stationary weight and a stationary table.

A worker is a thread block of three warpgroups. It owns `tile_n` columns of N for its whole life and
walks the runs of tiles of 128 rows that `schedule.py` gives it:

  feed       one warp of the third warpgroup: TMA of patches into one ring of slots, in the order in
             which they are multiplied.
  multiply   two warpgroups, 64 rows of every tile each, which take turns: while one multiplies, the
             other scales its accumulators, adds the table, which it holds in registers, and stores.

The weight stays in shared memory. Where it does not fit, it comes through the ring with the patches;
then both warpgroups multiply each slot, one a few slots ahead of the other.
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
from pallas_patch_embed.backends.fragment import ROWS, Fragment
from pallas_patch_embed.problem import Problem, Target

COMPUTE_CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
DTYPES = ("float8_e4m3fn", "bfloat16", "int8")

# What one thread block may have on Hopper, less 1 KiB for barriers. Mosaic aligns what it holds.
SHARED_MEMORY = 227 * 1024 - 1024
ALIGNMENT = 1024

# The warpgroups that multiply, and the rows of their tile.
CONSUMERS = 2
TILE_M = CONSUMERS * ROWS

# Registers that setmaxnreg gives a thread of the feeding and of the two multiplying warpgroups, of
# the 168 that each has at launch: 128 * (40 + 2 * 232) = 128 * (24 + 2 * 240) = 3 * 128 * 168.
REGISTER_SPLITS = ((40, 232), (24, 240))

# What a multiplying thread needs beside accumulators, scales and table, read from ptxas.
OTHER_REGISTERS = 48


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of the Hopper kernel.

    Attributes:
      tile_n: columns of N of a worker, a multiple of 64.
      slots: depth of the ring.
      chunk_bytes: of a row of patches in a slot, 64 or 128.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
        Then a slot has the patches of both warpgroups.
      lead: streaming, how many slots the first warpgroup is ahead of the second.
    """

    tile_n: int
    slots: int
    chunk_bytes: int = 128
    stream_weight: bool = False
    lead: int = 1

    def slices(self, problem: Problem) -> int:
        """Into how many slices N is cut."""
        return problem.N // self.tile_n

    def workers(self, problem: Problem) -> int:
        """Thread blocks a slice of N: as many as run at the same time, or as there are tiles."""
        tiles = -(-math.prod(problem.patches[:-1]) // TILE_M)
        return max(1, min(MULTIPROCESSORS // self.slices(problem), tiles))

    def chunks(self, problem: Problem) -> int:
        """Slots that a warpgroup multiplies for a tile."""
        return problem.patches[-1] * jnp.dtype(problem.dtype).itemsize // self.chunk_bytes

    @property
    def slot_rows(self) -> int:
        """Rows of patches in a slot."""
        return TILE_M if self.stream_weight else ROWS

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory without the barriers."""
        weight_chunks = self.slots if self.stream_weight else self.chunks(problem)
        weight = weight_chunks * self.tile_n * self.chunk_bytes
        patches = self.slots * self.slot_rows * self.chunk_bytes
        columns = 2 * -(-4 * self.tile_n // ALIGNMENT) * ALIGNMENT
        return weight + patches + columns

    def registers(self, problem: Problem) -> int:
        """Registers of a multiplying thread.

        Accumulators [64, tile_n], scales [tile_n], and the packed table [64, tile_n] or offsets
        [tile_n], over 128 threads of which 8 hold the same columns; and the rest.
        """
        accumulators, columns = ROWS * self.tile_n // 128, self.tile_n // 4
        table = accumulators // 2 if len(problem.table) > 1 else columns
        return accumulators + columns + table + OTHER_REGISTERS

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
        if self.chunk_bytes not in (64, 128):
            raise NotImplementedError(f"{self} has chunks of neither 64 nor 128 bytes.")
        if self.slots < (least := max(2, self.lead)):
            raise NotImplementedError(f"{self} has {self.slots} slots, expected {least} or more.")
        if not 1 <= self.lead <= self.chunks(problem):
            raise NotImplementedError(
                f"{self} has a lead of {self.lead} slots, a tile has {self.chunks(problem)}."
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
    candidates = [Config(tile_n, slots) for tile_n in widths for slots in range(12, 3, -1)] + [
        Config(tile_n, slots, chunk_bytes=64, stream_weight=True, lead=4)
        for tile_n in widths
        for slots in range(12, 6, -1)
    ]
    for config in candidates:
        # Narrower slices read the patches more often than streaming reads the weight.
        if not config.stream_weight and problem.dtype == "bfloat16":
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
    runs = schedule.runs(M, period, TILE_M, config.workers(problem))
    kernel = _kernel(config, problem, M, interpret)
    y = kernel(patches.reshape(M, K), weight, scale, table, jnp.asarray(runs))
    return y.reshape(*leading, problem.N)


def _kernel(config: Config, problem: Problem, M: int, interpret):
    """The kernel for these shapes: (patches [M, K], weight, scale, table, runs) -> y [M, N]."""
    dtype, out_dtype = jnp.dtype(problem.dtype), jnp.dtype(problem.out_dtype)
    slots, tile_n, streaming = config.slots, config.tile_n, config.stream_weight
    tile_k = config.chunk_bytes // dtype.itemsize
    chunks, slices = config.chunks(problem), config.slices(problem)
    # Behind which chunk of one warpgroup the other's turn begins.
    turn_ends = (config.lead if streaming else chunks) - 1
    # A streaming slot belongs to both warpgroups.
    sharers = CONSUMERS if streaming else 1
    has_table, period = len(problem.table) > 1, _period(problem)
    feed_registers, multiply_registers = config.register_split(problem)
    tile = Fragment(out_dtype, tile_n, bool(interpret))

    def body(patches, weight, scale, table, runs, out, ring, weights, **scratch):
        s = types.SimpleNamespace(**scratch)
        s.patches_in, s.patches = ring
        s.weight_in, s.weight = weights
        if interpret:
            s.patches_in, s.weight_in = s.patches, s.weight
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        column = lax.rem(block, slices) * tile_n
        worker = lax.div(block, slices)

        def for_each_run(visit):
            """Calls visit(run's fields, tiles before it) in order, and returns the tiles of all."""

            def step(i, tiles):
                first, count, stride, row = (runs[worker, i, field] for field in range(4))
                visit((first, count, stride, row), tiles)
                return tiles + count

            return lax.fori_loop(0, runs.shape[1], step, jnp.int32(0))

        def entry_of(tile_number, member):
            """The ring entry of a tile's first chunk for one warpgroup."""
            return (tile_number if streaming else tile_number * CONSUMERS + member) * chunks

        def slot_of(entry):
            return lax.rem(entry, slots)

        def filled(entry, member):
            """The barrier for one warpgroup: it counts the phases for which that warpgroup waits."""
            return s.filled.at[slot_of(entry) + (0 if streaming else member * slots)]

        def weight_chunk(k, target):
            inner = pl.ds(k * tile_k, tile_k)
            return tile.copies_of_weight(weight, column, inner, target)

        def load_columns():
            columns = pl.ds(column, tile_n)
            plgpu.copy_gmem_to_smem(scale.at[columns], s.scale_columns, s.columns_arrived)
            if not has_table:
                plgpu.copy_gmem_to_smem(table.at[columns], s.offset_columns, s.columns_arrived)
            if not streaming:

                @pl.loop(0, chunks)
                def load_weight(k):
                    for source, target in weight_chunk(k, s.weight_in.at[k]):
                        plgpu.copy_gmem_to_smem(source, target, s.columns_arrived)

        def feed():
            def feed_chunk(entry, row, k, member):
                slot = slot_of(entry)

                @pl.when(entry >= slots)
                def wait():
                    plgpu.barrier_wait(s.freed.at[slot])

                part = patches.at[pl.ds(row, config.slot_rows), pl.ds(k * tile_k, tile_k)]
                copies = [(part, s.patches_in.at[slot])]
                if streaming:
                    copies += weight_chunk(k, s.weight_in.at[slot])
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target, filled(entry, member))

            def feed_run(run, tiles):
                first, count, stride, _ = run

                def feed_tile(j, _):
                    row = (first + j * stride) * TILE_M
                    for member in range(1 if streaming else CONSUMERS):
                        entry = entry_of(tiles + j, member)

                        @pl.loop(0, chunks)
                        def feed_member(k, entry=entry, member=member):
                            feed_chunk(entry + k, row + member * ROWS, k, member)

                lax.fori_loop(0, count, feed_tile, None)

            entries = entry_of(for_each_run(feed_run), 0)
            left = lax.min(entries, slots)

            @pl.loop(0, left)
            def drain(i):
                plgpu.barrier_wait(s.freed.at[slot_of(entries - left + i)])

        def multiply_and_store():
            member = warpgroup
            other = CONSUMERS - 1 - member
            # Which rows of a slot are multiplied here.
            mine = (pl.ds(member * ROWS, ROWS),) if streaming else ()
            plgpu.barrier_wait(s.columns_arrived)

            @pl.when(member == CONSUMERS - 1)
            def first_turn():
                plgpu.barrier_arrive(s.turn.at[0])

            def free(entry):
                plgpu.barrier_arrive(s.freed.at[slot_of(entry)])

            def multiply(first):
                def accumulate(accumulator):
                    plgpu.barrier_wait(s.turn.at[member])
                    for k in range(chunks):
                        slot = slot_of(first + k)
                        plgpu.barrier_wait(filled(first + k, member))
                        plgpu.wgmma(
                            accumulator,
                            s.patches.at[(slot, *mine)],
                            s.weight.at[slot if streaming else k].T,
                        )
                        if k == turn_ends:
                            plgpu.barrier_arrive(s.turn.at[other])
                        if k > 0:
                            plgpu.wgmma_wait(1)
                            free(first + k - 1)
                    plgpu.wgmma_wait(0)
                    free(first + chunks - 1)
                    return accumulator[...]

                kind = jnp.int32 if dtype == jnp.int8 else jnp.float32
                return pl.run_scoped(accumulate, plgpu.ACC((ROWS, tile_n), kind))

            scales = tile.load_columns(s.scale_columns)
            offsets = None if has_table else tile.load_columns(s.offset_columns)

            def store(accumulator, held, row):
                for g, y in enumerate(tile.regroup(accumulator)):
                    y = y.astype(jnp.float32) * lax.broadcast_in_dim(scales[g], y.shape, (1,))
                    if has_table:
                        y += tile.pinned(held[g]).astype(jnp.float32)
                    else:
                        y += lax.broadcast_in_dim(offsets[g], y.shape, (1,))
                    tile.store_rows(out, row, column, y.astype(out_dtype), g, M)

            def visit(run, tiles):
                first, count, stride, table_row = run

                @pl.when(count > 0)
                def walk():
                    held = has_table and tile.load_rows(
                        table, table_row + member * ROWS, column, period
                    )

                    def visit_tile(j, _):
                        accumulator = multiply(entry_of(tiles + j, member))
                        store(accumulator, held, (first + j * stride) * TILE_M + member * ROWS)

                    lax.fori_loop(0, count, visit_tile, None)

            for_each_run(visit)

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

    def swizzled(*shape, tiled=False):
        tiling = (plgpu.TilingTransform((8, shape[-1])),) if tiled else ()
        return plgpu.SMEM(
            shape, dtype, transforms=(*tiling, plgpu.SwizzleTransform(config.chunk_bytes))
        )

    # TMA writes patches untiled, so that any number of rows will do, and the weight in the order of
    # `fragment.py`; wgmma reads both tiled. The interpreter has no memory with two views.
    two_views = (lambda *views: views) if interpret else plgpu.RefUnion
    kept = slots if streaming else chunks
    columns = plgpu.SMEM((tile_n,), jnp.float32)
    weight_arrivals = tile.weight_copies
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, problem.N), out_dtype),
        grid=(config.workers(problem) * slices,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=dict(
            ring=two_views(
                swizzled(slots, config.slot_rows, tile_k),
                swizzled(slots, config.slot_rows, tile_k, tiled=True),
            ),
            weights=two_views(
                swizzled(kept, *tile.weight_shape(tile_k)),
                swizzled(kept, tile_n, tile_k, tiled=True),
            ),
            scale_columns=columns,
            offset_columns=columns,
            columns_arrived=plgpu.Barrier(
                num_arrivals=1 + (not has_table) + (0 if streaming else chunks * weight_arrivals)
            ),
            filled=plgpu.Barrier(
                num_arrivals=1 + (weight_arrivals if streaming else 0),
                num_barriers=slots if streaming else CONSUMERS * slots,
            ),
            freed=plgpu.Barrier(num_arrivals=sharers, num_barriers=slots),
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        ),
    )
    return lambda patches, weight, *rest: kernel(patches, tile.view_weight(weight), *rest)
