"""The kernel for Hopper GPUs of `attention.formula`: many short sequences, without a mask.

It is written in Pallas Mosaic GPU, and reads q, k and v [B, S, H, D] where the projections left
them. A worker is a thread block that loops over units: one head of one image, and some of its
queries.

  feed      one warp: loads queries, keys and values by TMA, ahead of the products.
  attend    two or three warpgroups, the consumers, with 64 queries each: multiply queries and keys,
            take the softmax in registers, and multiply by the values. While one takes a softmax,
            the tensor cores multiply for another.

If one tile has all keys of a head, a unit is the whole head, and its keys and values are loaded
once for several passes over queries. Otherwise a unit has one pass, and the tiles of keys and
values go through a ring; the softmax is then rescaled when a larger score appears.

A turn is one pass of one consumer, an entry is one use of a slot of the ring. Both are numbered
through all units of a worker.

  barrier                      arrivals of a phase   its phase completes when      who waits
  queries_arrived[buffer, c]   1 copy a part         consumer c's next queries     consumer c
                                                     are in the buffer
  queries_read[buffer, c]      consumer c            they are multiplied by all    feed
                                                     keys
  keys_arrived[slot]           1 copy a part         the next keys are in the slot all consumers
  keys_read[slot]              all consumers         they are multiplied           feed
  values_arrived[slot]         1 copy a part         the next values are there     all consumers
  values_read[slot]            all consumers         they are multiplied           feed

No phase of a barrier may be left without a wait, so feed waits for the last ones before it returns.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.base.chips import Chip

# Queries of a pass of a consumer: wgmma has 64 rows.
ROWS = 64

# A consumer's queries are loaded while it multiplies the previous ones.
BUFFERS = 2

# Registers of a thread of feed's warpgroup and of a consumer, by the number of consumers.
REGISTERS = {2: (40, 232), 3: (32, 160)}

# Rows of 128 bytes are the widest that TMA and wgmma swizzle.
WIDEST = 64

# Shared memory that is reserved for barriers, in bytes.
BARRIER_BYTES = 1024

ONE_A_ROW = plgpu.Layout.WGMMA.reduce(1)


class Shape(NamedTuple):
    """The shape of queries, keys and values."""

    B: int
    S: int
    H: int
    D: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The (first column, width) of the parts of a head.

        wgmma and TMA take 16, 32 or 64 columns. The last part may exceed the head: TMA loads zeros
        there and stores nothing, because the head is an axis of its own.
        """
        whole, rest = divmod(self.D, WIDEST)
        found = [(i * WIDEST, WIDEST) for i in range(whole)]
        if rest:
            found.append((whole * WIDEST, next(w for w in (16, 32, 64) if w >= rest)))
        return found

    @property
    def columns(self) -> int:
        """Columns of a head in shared memory."""
        return sum(width for _, width in self.parts)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes of the kernel.

    Attributes:
      consumers: warpgroups that multiply, 2 or 3.
      keys: keys of a tile, a multiple of 64.
      slots: slots of the ring of keys and values.
    """

    consumers: int
    keys: int
    slots: int

    def check(self, shape: Shape, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `shape`."""
        if self.consumers not in REGISTERS:
            raise NotImplementedError(f"consumers is {self.consumers}, expected 2 or 3.")
        if self.keys % 64 or not 64 <= self.keys <= 256:
            raise NotImplementedError(
                f"keys is {self.keys}, expected a multiple of 64 from 64 to 256."
            )
        if not 2 <= self.slots <= 8:
            raise NotImplementedError(f"slots is {self.slots}, expected 2 to 8.")
        needed, available = self.shared_memory_bytes(shape), chip.shared_memory - BARRIER_BYTES
        if needed > available:
            raise NotImplementedError(
                f"{self} needs {needed} bytes of shared memory, but only {available} are available."
            )

    def shared_memory_bytes(self, shape: Shape) -> int:
        """Returns the shared memory of a thread block in bytes, without the barriers."""
        rows = self.consumers * ROWS * (BUFFERS + 1) + 2 * self.slots * self.keys
        return 2 * shape.columns * rows

    def tiles(self, shape: Shape) -> int:
        """Returns the number of tiles of keys of a head."""
        return pl.cdiv(shape.S, self.keys)

    def passes(self, shape: Shape) -> int:
        """Returns the number of passes over queries of a unit."""
        return 1 if self.tiles(shape) > 1 else pl.cdiv(shape.S, self.consumers * ROWS)

    def units(self, shape: Shape) -> int:
        """Returns the number of units of a head."""
        return pl.cdiv(shape.S, self.passes(shape) * self.consumers * ROWS)


def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array | None = None,
    *,
    config: Config,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:
    """Computes `attention.formula` of bfloat16 on a Hopper GPU.

    Args:
      q, k, v: [B, S, H, D] bfloat16.
      lengths: [B] int32, the number of tokens of each image; None if all have S.
      config: tile sizes.
      chip: the GPU.
      interpret: as in `plgpu.kernel`.

    Returns:
      [B, S, H, D] bfloat16. A row of padding is zero if its pass has only padding; otherwise it is
      the attention of what q has there.

    Raises:
      NotImplementedError: the config cannot serve this shape.
    """
    shape = Shape(*q.shape)
    config.check(shape, chip)
    workers = min(chip.multiprocessors, shape.B * shape.H * config.units(shape))
    make = Interpreted if interpret else Worker

    scratch_types: Any = dict(scratch=Scratch.types(config, shape, make.memory))

    def attention(*operands, scratch):
        operands = operands if lengths is not None else (*operands[:3], None, *operands[3:])
        worker = make(config, shape, Operands(*operands), scratch, workers)
        worker.run(lax.axis_index("warpgroup"))

    call = plgpu.kernel(
        attention,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return call(q, k, v, *(() if lengths is None else (lengths,)))


class Operands(NamedTuple):
    """The arrays in global memory: q, k, v and y [B, S, H, D], and lengths [B] or None."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    y: Any


class Views(NamedTuple):
    """Two references to the same shared memory.

    Attributes:
      copied: the view of TMA, which copies any number of rows only to and from untiled memory.
      multiplied: the tiled view of the tensor cores.
    """

    copied: Any
    multiplied: Any


def swizzled(shape: tuple[int, ...], *, tiled: bool) -> Any:
    """Declares swizzled shared memory, with rows of 32, 64 or 128 bytes."""
    width = shape[-1]
    # jax leaves an abstract method of these transforms undefined.
    tiling = (plgpu.TilingTransform((8, width)),) if tiled else ()  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(2 * width)  # type: ignore[abstract]
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(*tiling, swizzle))


def two_views(shape: tuple[int, ...]) -> Any:
    """Declares memory for `Views`."""
    return plgpu.RefUnion(swizzled(shape, tiled=False), swizzled(shape, tiled=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory, with an array for each part of a head, and barriers of a thread block."""

    queries: Any  # [BUFFERS * consumers, ROWS, width]
    keys: Any  # [slots, keys, width]
    values: Any  # [slots, keys, width]
    results: Any  # [consumers, ROWS, width]
    queries_arrived: Any
    queries_read: Any
    keys_arrived: Any
    keys_read: Any
    values_arrived: Any
    values_read: Any

    @classmethod
    def types(cls, config: Config, shape: Shape, memory: Callable) -> "Scratch":
        """Returns the types of all members."""
        consumers, slots, copies = config.consumers, config.slots, len(shape.parts)

        def parts(*leading):
            return [memory((*leading, width)) for _, width in shape.parts]

        buffers = BUFFERS * consumers
        return cls(
            queries=parts(buffers, ROWS),
            keys=parts(slots, config.keys),
            values=parts(slots, config.keys),
            results=parts(consumers, ROWS),
            queries_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=buffers),
            queries_read=plgpu.Barrier(num_arrivals=1, num_barriers=buffers),
            keys_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            keys_read=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
            values_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            values_read=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        )


class Unit(NamedTuple):
    """A part of the work of a thread block.

    Attributes:
      image, head: whose attention is computed.
      row: the first query.
      length: number of keys and queries of the image.
      tiles: number of tiles of keys.
      passes: number of passes over queries; 0 if all queries are padding.
      entry, turn: numbers of the unit's first entry and first turn.
    """

    image: Any
    head: Any
    row: Any
    length: Any
    tiles: Any
    passes: Any
    entry: Any
    turn: Any


@dataclasses.dataclass(frozen=True)
class Worker:
    """A thread block, with a method for each role."""

    config: Config
    shape: Shape
    operands: Operands
    s: Scratch
    workers: int

    memory = staticmethod(two_views)

    @staticmethod
    def views(part: Any) -> Views:
        """Returns the two views of memory that `memory` declared."""
        return Views(*part)

    def run(self, warpgroup: Any) -> None:
        """Assigns each warpgroup its registers and its role."""
        feed_registers, attend_registers = REGISTERS[self.config.consumers]

        @pl.when(warpgroup == self.config.consumers)
        def load():
            plgpu.set_max_registers(feed_registers, action="decrease")

            @plgpu.warp_map
            def roles(warp):
                pl.when(warp == 0)(self.feed)

        @pl.when(warpgroup < self.config.consumers)
        def consume():
            plgpu.set_max_registers(attend_registers, action="increase")
            self.attend(warpgroup)

    @property
    def step(self) -> int:
        """Queries of a pass of all consumers."""
        return self.config.consumers * ROWS

    def for_each_unit(self, visit: Callable[[Unit], None]) -> tuple[Any, Any]:
        """Calls `visit` for each unit of this worker; returns the numbers of entries and turns."""
        config, shape = self.config, self.shape
        passes, per_head = config.passes(shape), config.units(shape)
        units, first = shape.B * shape.H * per_head, lax.axis_index("worker")

        def indices(i):
            """Returns the image and the head of the i-th unit, and its number in the head."""
            index = lax.min(first + i * self.workers, units - 1)
            image, head = lax.div(index, shape.H * per_head), lax.div(index, per_head)
            return image, lax.rem(head, shape.H), lax.rem(index, per_head)

        def length_of(i):
            return self.operands.lengths[indices(i)[0]]

        def visit_unit(i, carry):
            entry, turn, *length = carry
            # The length of the next unit arrives while this one is computed.
            following = [length_of(i + 1)] if length else []
            image, head, number = indices(i)
            row = number * passes * self.step
            tiles: Any = config.tiles(shape)
            needed: Any = passes
            if length:
                needed = jnp.clip(pl.cdiv(length[0] - row, self.step), 0, passes)
                tiles = jnp.where(needed > 0, pl.cdiv(length[0], config.keys), 0)
            (tokens,) = length or (shape.S,)
            visit(Unit(image, head, row, tokens, tiles, needed, entry, turn))
            return entry + tiles, turn + needed, *following

        count = lax.div(units - 1 - first, self.workers) + 1
        lengths = [] if self.operands.lengths is None else [length_of(0)]
        start = (jnp.int32(0), jnp.int32(0), *lengths)
        entries, turns, *_ = lax.fori_loop(0, count, visit_unit, start)
        return entries, turns

    def slot(self, entry: Any) -> Any:
        return lax.rem(entry, self.config.slots)

    def buffer(self, turn: Any, consumer: Any) -> Any:
        return lax.rem(turn, BUFFERS) * self.config.consumers + consumer

    def part(self, array: Any, unit: Unit, row: Any, rows: int, i: int) -> Any:
        """Returns the i-th part of rows of a head in global memory."""
        first: Any = self.shape.parts[i][0]
        width = self.shape.parts[i][1]
        if first + width > self.shape.D:
            # Pallas refuses a constant slice that is out of bounds.
            first += lax.axis_index("worker") * 0
        return array.at[unit.image, pl.ds(row, rows), unit.head, pl.ds(first, width)]

    def load(
        self, array: Any, unit: Unit, row: Any, rows: int, memory: Any, at: Any, arrived: Any
    ) -> None:
        """Loads rows of a head to `memory[at]`. Rows beyond S are zero."""
        for i, part in enumerate(memory):
            source = self.part(array, unit, row, rows, i)
            plgpu.copy_gmem_to_smem(source, self.views(part).copied.at[at], arrived.at[at])

    def feed(self) -> None:
        s, config = self.s, self.config

        def load_queries(unit, number):
            for consumer in range(config.consumers):
                buffer = self.buffer(unit.turn + number, consumer)
                await_reuse(s.queries_read.at[buffer], unit.turn + number, BUFFERS)
                row = unit.row + number * self.step + consumer * ROWS
                self.load(self.operands.q, unit, row, ROWS, s.queries, buffer, s.queries_arrived)

        def load_tile(unit, t):
            slot, entry, row = self.slot(unit.entry + t), unit.entry + t, t * config.keys
            for array, memory, arrived, read in (
                (self.operands.k, s.keys, s.keys_arrived, s.keys_read),
                (self.operands.v, s.values, s.values_arrived, s.values_read),
            ):
                await_reuse(read.at[slot], entry, config.slots)
                self.load(array, unit, row, config.keys, memory, slot, arrived)

        def feed_unit(unit):
            @pl.loop(0, unit.passes)
            def feed_pass(number):
                load_queries(unit, number)

                @pl.when(number == 0)
                def load_keys_and_values():
                    pl.loop(0, unit.tiles)(functools.partial(load_tile, unit))

        entries, turns = self.for_each_unit(feed_unit)

        @for_the_last(config.slots, entries)
        def drain_ring(entry):
            plgpu.barrier_wait(s.keys_read.at[self.slot(entry)])
            plgpu.barrier_wait(s.values_read.at[self.slot(entry)])

        @for_the_last(BUFFERS, turns)
        def drain_queries(turn):
            for consumer in range(config.consumers):
                plgpu.barrier_wait(s.queries_read.at[self.buffer(turn, consumer)])

    def attend(self, consumer: Any) -> None:
        def attend_unit(unit):
            row = unit.row + consumer * ROWS

            @pl.loop(0, unit.passes)
            def attend_pass(number):
                buffer = self.buffer(unit.turn + number, consumer)
                plgpu.barrier_wait(self.s.queries_arrived.at[buffer])
                y = self.attend_rows(unit, number, buffer)
                self.store(y, consumer, unit, row + number * self.step)

            if self.operands.lengths is not None:

                @pl.loop(unit.passes, self.config.passes(self.shape))
                def clear(number):
                    self.store(self.zeros(), consumer, unit, row + number * self.step)

        self.for_each_unit(attend_unit)
        plgpu.wait_smem_to_gmem(0)

    def zeros(self) -> list[jax.Array]:
        """Returns zeros [ROWS, width] for each part of a head."""
        kinds = (jnp.zeros((ROWS, width), jnp.float32) for _, width in self.shape.parts)
        return [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for zeros in kinds]

    def attend_rows(self, unit: Unit, number: Any, buffer: Any) -> list[jax.Array]:
        """Computes the attention of the queries in a buffer, in float32."""
        s, tile = self.s, self.config.keys
        is_first, is_last = number == 0, number == unit.passes - 1
        factor = math.log2(math.e) / math.sqrt(self.shape.D)

        def attend_tile(t, carry, *, final):
            sums, largest, total = carry
            slot = self.slot(unit.entry + t)
            pl.when(is_first)(lambda: plgpu.barrier_wait(s.keys_arrived.at[slot]))
            scores = self.multiply(buffer, slot)
            pl.when(is_last)(lambda: plgpu.barrier_arrive(s.keys_read.at[slot]))
            if final:
                plgpu.barrier_arrive(s.queries_read.at[buffer])
                scores = self.without_padding(scores, unit.length - t * tile)
            # The scores of a row are multiplied by log2(e) / sqrt(D), because exp2 is one
            # instruction.
            larger = jnp.maximum(largest, scores.max(axis=1) * factor)
            shrink = jnp.exp2(largest - larger)
            p = jnp.exp2(scores * factor - of_rows(larger, scores))
            total = total * shrink + p.sum(axis=1)
            pl.when(is_first)(lambda: plgpu.barrier_wait(s.values_arrived.at[slot]))
            added = self.weigh(p.astype(jnp.bfloat16), slot)
            pl.when(is_last)(lambda: plgpu.barrier_arrive(s.values_read.at[slot]))
            sums = [x * of_rows(shrink, x) + y for x, y in zip(sums, added)]
            return sums, larger, total

        def one_a_row(value):
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ONE_A_ROW)

        carry = self.zeros(), one_a_row(-jnp.inf), one_a_row(0)
        if self.config.tiles(self.shape) > 1:
            step = functools.partial(attend_tile, final=False)
            carry = lax.fori_loop(0, unit.tiles - 1, step, carry)
        sums, _, total = attend_tile(unit.tiles - 1, carry, final=True)
        inverse = 1 / total
        return [x * of_rows(inverse, x) for x in sums]

    def multiply(self, buffer: Any, slot: Any) -> jax.Array:
        """Computes the scores [ROWS, keys] of the queries in a buffer and the keys in a slot."""

        def accumulate(accumulator):
            for q, k in zip(self.s.queries, self.s.keys):
                q, k = self.views(q).multiplied.at[buffer], self.views(k).multiplied.at[slot]
                plgpu.wgmma(accumulator, q, k.T)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        return pl.run_scoped(accumulate, plgpu.ACC((ROWS, self.config.keys), jnp.float32))

    def without_padding(self, scores: jax.Array, inside: Any) -> jax.Array:
        """Replaces the scores of keys from `inside` on by -infinity."""
        if self.operands.lengths is None and self.shape.S % self.config.keys == 0:
            return scores
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(key < inside, scores, -jnp.inf)

    def weigh(self, p: jax.Array, slot: Any) -> list[jax.Array]:
        """Computes the products of p [ROWS, keys] and the parts of the values in a slot."""

        def accumulate(*accumulators):
            for accumulator, part in zip(accumulators, self.s.values):
                plgpu.wgmma(accumulator, p, self.views(part).multiplied.at[slot])
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        kinds = [plgpu.ACC((ROWS, width), jnp.float32) for _, width in self.shape.parts]
        return pl.run_scoped(accumulate, *kinds)

    def store(self, y: list[jax.Array], consumer: Any, unit: Unit, row: Any) -> None:
        """Rounds and stores rows of a head. TMA leaves out the rows beyond S."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part, memory in zip(y, self.s.results):
            self.views(memory).multiplied.at[consumer][...] = part.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for i, memory in enumerate(self.s.results):
            target = self.part(self.operands.y, unit, row, ROWS, i)
            plgpu.copy_smem_to_gmem(self.views(memory).copied.at[consumer], target)


class Interpreted(Worker):
    """A worker for Pallas' interpreter, which has neither `RefUnion` nor wgmma of registers."""

    @staticmethod
    def memory(shape: tuple[int, ...]) -> Any:
        return swizzled(shape, tiled=True)

    @staticmethod
    def views(part: Any) -> Views:
        return Views(part, part)

    def weigh(self, p: jax.Array, slot: Any) -> list[jax.Array]:
        values = [part.at[slot][...] for part in self.s.values]
        plgpu.commit_smem()  # TMA must not overwrite what is read here.
        return [jnp.dot(p, part, preferred_element_type=jnp.float32) for part in values]


def of_rows(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one number a row to an array [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, (0,))


def await_reuse(read: Any, number: Any, copies: int) -> None:
    """Waits until the previous contents of one of `copies` memories are read, if there are any."""
    pl.when(number >= copies)(lambda: plgpu.barrier_wait(read))


def for_the_last(most: int, number: Any) -> Callable:
    """Returns a decorator that calls a function for the last of `number` uses, `most` at most."""
    left = lax.min(jnp.int32(number), most)
    return lambda visit: pl.loop(0, left)(lambda i: visit(number - left + i))
