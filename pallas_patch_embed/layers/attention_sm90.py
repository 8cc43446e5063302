"""The kernel for Hopper GPUs of `attention.formula`: many short sequences, without a mask.

It is written in Pallas Mosaic GPU, and reads q, k and v [B, S, H, D] where the projections left
them. A worker is a thread block that loops over units: one head of one image, and some of its
queries.

  feed_queries, feed_keys, feed_values
            a warp each: load by TMA, ahead of the products.
  attend    two or three warpgroups, the consumers, with 64 queries each: multiply queries and keys,
            take the softmax in registers, and multiply by the values. They do so in turn: while
            one takes a softmax, the tensor cores multiply for another. A result is stored while
            the next scores are multiplied.

If one tile has all keys of a head, a unit is the whole head, and its keys and values are loaded
once for several passes over queries. Otherwise a unit has one pass, and the tiles of keys and
values go through a ring; the softmax is then rescaled when a larger score appears.

A round is one pass of one consumer, an entry is one use of a slot of the ring. Both are numbered
through all units of a worker.

  barrier                      arrivals of a phase   its phase completes when      who waits
  queries_arrived[buffer, c]   1 copy a part         consumer c's next queries     consumer c
                                                     are in the buffer
  queries_read[buffer, c]      consumer c            they are multiplied by all    feed_queries
                                                     keys
  keys_arrived[slot]           1 copy a part         the next keys are in the slot all consumers
  keys_read[slot]              all consumers         they are multiplied           feed_keys
  values_arrived[slot]         1 copy a part         the next values are there     all consumers
  values_read[slot]            all consumers         they are multiplied           feed_values
  turn[c]                      the consumer before   its next scores are being     consumer c
                                                     multiplied

Results in bfloat16 go through shared memory and TMA. Those in 8 bits are stored from registers,
because TMA stores no head of 72 bytes: the distances in its arrays are multiples of 16 bytes.

A consumer has the turn from its product with a tile of values until its next scores are being
multiplied; then it passes it to the next consumer. The first consumer begins, and the others wait
for their first turn. All have the same number of tiles. In the end each passes its last turn on,
except for the last one.

No phase of a barrier may be left without a wait, so each feed waits for the last ones before it
returns.
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

from pallas_patch_embed.backends.mosaic.layouts import store_levels
from pallas_patch_embed.base.chips import Chip
from pallas_patch_embed.base.levels import to_levels

# Queries of a pass of a consumer: wgmma has 64 rows.
ROWS = 64

# A consumer's queries are loaded while it multiplies the previous ones.
BUFFERS = 2

# Registers of a thread of the feeds' warpgroup and of a consumer, by the number of consumers.
REGISTERS = {2: (40, 232), 3: (32, 160)}

# Rows of 128 bytes are the widest that TMA and wgmma swizzle.
WIDEST = 64

# Rows that are stored at a time if rows hold several images. Each image begins at a multiple of it,
# because a part of swizzled memory begins at a multiple of 8 rows.
PACKED_ROWS = 8

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

    def check(self, shape: Shape, chip: Chip, *, lengths: bool = False) -> None:
        """Raises NotImplementedError with the reason if this config cannot serve `shape`.

        `lengths` says whether the images have their own numbers of tokens.
        """
        if self.consumers not in REGISTERS:
            raise NotImplementedError(f"consumers is {self.consumers}, expected 2 or 3.")
        if self.keys % 64 or not 64 <= self.keys <= 256:
            raise NotImplementedError(
                f"keys is {self.keys}, expected a multiple of 64 from 64 to 256."
            )
        if not 2 <= self.slots <= 8:
            raise NotImplementedError(f"slots is {self.slots}, expected 2 to 8.")
        available = chip.shared_memory - BARRIER_BYTES
        needed = self.shared_memory_bytes(shape, lengths)
        if needed > available:
            raise NotImplementedError(
                f"{self} needs {needed} bytes of shared memory, but only {available} are available."
            )

    def fits(self, shape: Shape, chip: Chip, *, lengths: bool = False) -> bool:
        """Returns whether `check` passes."""
        try:
            self.check(shape, chip, lengths=lengths)
        except NotImplementedError:
            return False
        return True

    def shared_memory_bytes(self, shape: Shape, lengths: bool) -> int:
        """Returns the shared memory of a thread block in bytes, without the barriers."""
        # Buffers of queries, the results, and zeros for padding.
        copies = BUFFERS + 1 + lengths
        rows = self.consumers * ROWS * copies + 2 * self.slots * self.keys
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


# Times of a query tile times a key tile of one head, by the number of columns in shared memory.
# Only their ratios matter. Those for 64 and 80 columns are from 98 images of 1024 tokens on an
# H200, with an earlier version of this kernel; those for 128 columns are estimates.
TIMES = {
    64: {
        Config(2, 256, 2): 17.1,
        Config(3, 128, 3): 12.2,
        Config(2, 128, 3): 9.3,
        Config(2, 64, 4): 5.6,
    },
    80: {
        Config(2, 256, 2): 20.0,
        Config(3, 128, 2): 14.5,
        Config(2, 128, 2): 11.0,
        Config(2, 64, 4): 6.7,
    },
    128: {Config(2, 128, 2): 20.0, Config(2, 64, 3): 12.0},
}


def choose(shape: Shape, chip: Chip, *, lengths: bool) -> Config:
    """Returns the config with the smallest predicted time.

    Images with their own numbers of tokens get at most two consumers and 128 keys, because smaller
    tiles follow the lengths more closely.

    Raises:
      NotImplementedError: no config serves this shape.
    """

    def time(config: Config) -> float:
        tiles_of_queries = pl.cdiv(shape.S, config.consumers * ROWS)
        return times[config] * tiles_of_queries * config.tiles(shape)

    def suits(config: Config) -> bool:
        small = config.consumers == 2 and config.keys <= 128
        return (small or not lengths) and config.fits(shape, chip, lengths=lengths)

    times = next((times for columns, times in TIMES.items() if columns >= shape.columns), {})
    found = [config for config in times if suits(config)]
    if not found:
        raise NotImplementedError(f"no config fits heads of {shape.D} channels on {chip.name}.")
    return min(found, key=time)


def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array | None = None,
    order: jax.Array | None = None,
    first: jax.Array | None = None,
    *,
    longest: int | None = None,
    levels: str = "",
    config: Config,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:
    """Computes `attention.formula` of bfloat16 on a Hopper GPU.

    Args:
      q, k, v: [B, S, H, D] bfloat16.
      lengths: [B] int32, the number of tokens of each image; None if all have S.
      order: the result of `order_of`, with lengths.
      first: [N] int32, if the B rows hold N images, whose `lengths` are [N] then: the index of each
        image's first token among the B * S tokens, a multiple of 8 (PACKED_ROWS).
      longest: with `first`, the largest number of tokens of an image.
      levels: dtype of the result if it is in 8 bits, one of `EIGHT_BITS`: the sums in float32 are
        divided by their totals and rounded once.
      config: tile sizes.
      chip: the GPU.
      interpret: as in `plgpu.kernel`.

    Returns:
      [B, S, H, D] bfloat16, or `levels`. A row of padding is zero if its pass has only padding;
      otherwise it is the attention of what q has there. With `first`, rows that no image has are
      those of q, or zero in 8 bits; rows in bfloat16 are stored PACKED_ROWS at a time, so up to
      PACKED_ROWS - 1 rows behind an image are the attention of what q has there.

    Raises:
      NotImplementedError: the config cannot serve this shape.
    """
    shape, result = Shape(*q.shape), jax.ShapeDtypeStruct(q.shape, q.dtype)
    if levels:
        result = jax.ShapeDtypeStruct((shape.B * shape.S, shape.H * shape.D), levels)
    if first is not None:
        assert longest is not None
        rows = (1, shape.B * shape.S, *q.shape[2:])
        q, k, v = (x.reshape(rows) for x in (q, k, v))
        shape = Shape(len(first), longest, *q.shape[2:])
    config.check(shape, chip, lengths=lengths is not None)
    workers = min(chip.multiprocessors, shape.B * shape.H * config.units(shape))
    make = Interpreted if interpret else Worker

    padding = lengths is not None and first is None
    buffers = 0 if levels else 1 + padding
    scratch_types: Any = dict(scratch=Scratch.types(config, shape, make.memory, buffers))
    # Results of segments take the place of their queries, which only they need.
    in_place = first is not None and not levels
    given = [x for x in (None if in_place else q, k, v, lengths, order, first) if x is not None]

    def attention(*operands, scratch):
        *read, y = operands
        read = [y, *read] if in_place else read
        worker = make(config, shape, Operands(y, *read), scratch, workers, levels)
        worker.run(lax.axis_index("warpgroup"))

    call = plgpu.kernel(
        attention,
        out_type=() if first is not None else result,
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
    if first is None:
        return call(*given).reshape(q.shape)
    # No thread block stores rows that no image has. Their values must be finite, because other
    # images multiply them by zero.
    y = jax.new_ref(q if in_place else jnp.zeros(result.shape, result.dtype))
    call(*given, y)
    return jax.freeze(y).reshape(q.shape)


def order_of(lengths: jax.Array, config: Config, shape: Shape) -> jax.Array:
    """Returns the order in which tiles of queries are computed [2, B * units].

    The thread blocks take units in turn. So those with the most tiles of keys come first, and those
    of padding last, and all thread blocks have about the same work. The tiles of queries of an
    image stay together, because they read the same keys.

    The first row has the numbers of the tiles among those of all images, the second the lengths of
    their images.
    """
    units = config.units(shape)
    begin = lax.broadcasted_iota(jnp.int32, (shape.B, units), 1)
    begin = begin * (config.passes(shape) * config.consumers * ROWS)
    lengths = jnp.broadcast_to(lengths[:, None], begin.shape)
    tiles = jnp.where(begin < lengths, pl.cdiv(lengths, config.keys), 0)
    # One sort of numbers is faster than one of pairs: the number of a tile is the rest of its key.
    numbers = shape.B * units
    keys = (config.tiles(shape) - tiles.ravel()) * numbers + jnp.arange(numbers, dtype=jnp.int32)
    order = lax.sort(keys, is_stable=False) % numbers
    return jnp.stack([order, lengths.ravel()[order]])


def with_order(
    config: Config, q: Any, k: Any, v: Any, *more: Any, longest: int | None = None
) -> tuple[Any, ...]:
    """Returns the operands of `kernel` for those of `attention.formula`.

    They are the same, but with lengths the order follows them.
    """
    if not more:
        return q, k, v
    lengths, *first = more
    shape = Shape(len(lengths), longest or q.shape[1], *q.shape[2:])
    return q, k, v, lengths, order_of(lengths, config, shape), *first


class Operands(NamedTuple):
    """The arrays in global memory, as the arguments of `kernel`, y, and the result of `order_of`.

    y is [B, S, H, D], or [B * S, H * D] in 8 bits.
    """

    y: Any
    q: Any
    k: Any
    v: Any
    lengths: Any = None
    order: Any = None
    first: Any = None


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
    results: Any  # [consumers, ROWS, width], if they are bfloat16
    zeros: Any  # [consumers, ROWS, width], if they are, and rows of padding are stored
    queries_arrived: Any
    queries_read: Any
    keys_arrived: Any
    keys_read: Any
    values_arrived: Any
    values_read: Any
    turn: Any

    @classmethod
    def types(cls, config: Config, shape: Shape, memory: Callable, stored: int) -> "Scratch":
        """Returns the types of all members.

        `stored` is the number of arrays from which TMA stores: of results, and of zeros.
        """
        consumers, slots, copies = config.consumers, config.slots, len(shape.parts)

        def parts(*leading):
            return [memory((*leading, width)) for _, width in shape.parts]

        buffers = BUFFERS * consumers
        return cls(
            queries=parts(buffers, ROWS),
            keys=parts(slots, config.keys),
            values=parts(slots, config.keys),
            results=parts(consumers, ROWS) if stored > 0 else [],
            zeros=parts(consumers, ROWS) if stored > 1 else [],
            queries_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=buffers),
            queries_read=plgpu.Barrier(num_arrivals=1, num_barriers=buffers),
            keys_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            keys_read=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
            values_arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            values_read=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=consumers),
        )


class Unit(NamedTuple):
    """A part of the work of a thread block.

    Attributes:
      index: number of the unit among those of all thread blocks.
      length: number of keys and queries of the image.
      tiles: number of tiles of keys.
      passes: number of passes over queries; 0 if all queries are padding.
      entry, round: numbers of the unit's first entry and first round.
    """

    index: Any
    length: Any
    tiles: Any
    passes: Any
    entry: Any
    round: Any


class Place(NamedTuple):
    """A row of queries, keys, values or results of a head of an image."""

    image: Any
    head: Any
    row: Any


class State(NamedTuple):
    """Sums over the tiles so far, with a list item for each part of a head.

    Attributes:
      sums: sum_t 2^(score[t] - largest) v[t], [ROWS, width].
      largest: the largest score of a row, [ROWS].
      total: sum_t 2^(score[t] - largest), [ROWS].
    """

    sums: list[jax.Array]
    largest: jax.Array
    total: jax.Array


class Result(NamedTuple):
    """Sums over all tiles for the queries of a consumer in one pass of a unit."""

    sums: list[jax.Array]
    total: jax.Array
    index: Any
    number: Any


@dataclasses.dataclass(frozen=True)
class Worker:
    """A thread block, with a method for each role."""

    config: Config
    shape: Shape
    operands: Operands
    s: Scratch
    workers: int
    levels: str

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
                pl.when(warp == 0)(self.feed_queries)
                pl.when(warp == 1)(self.feed_keys)
                pl.when(warp == 2)(self.feed_values)

        @pl.when(warpgroup < self.config.consumers)
        def consume():
            plgpu.set_max_registers(attend_registers, action="increase")
            self.attend(warpgroup)

    @property
    def step(self) -> int:
        """Queries of a pass of all consumers."""
        return self.config.consumers * ROWS

    def for_each_unit(
        self, visit: Callable[[Unit, Any], Any], carry: Any = None
    ) -> tuple[Any, Any, Any]:
        """Calls carry = visit(unit, carry) for each unit of this worker.

        Returns the numbers of entries and of rounds, and the last carry.
        """
        config, shape = self.config, self.shape
        units, first = shape.B * shape.H * config.units(shape), lax.axis_index("worker")

        def index_of(i):
            return lax.min(first + i * self.workers, units - 1)

        def ordered(i):
            """Returns the index and the length of the i-th unit, if images have lengths."""
            if self.operands.order is None:
                return []
            index = index_of(i)
            tile, length = (self.operands.order[row, lax.div(index, shape.H)] for row in (0, 1))
            return [tile * shape.H + lax.rem(index, shape.H), length]

        def visit_unit(i, state):
            entry, round, carry, *unit = state
            # The length of the next unit arrives while this one is computed.
            following = ordered(i + 1)
            tiles: Any = config.tiles(shape)
            passes: Any = config.passes(shape)
            index, tokens = unit or (index_of(i), shape.S)
            if unit:
                left = tokens - self.place(index).row
                passes = jnp.clip(pl.cdiv(left, self.step), 0, passes)
                tiles = jnp.where(passes > 0, pl.cdiv(tokens, config.keys), 0)
            carry = visit(Unit(index, tokens, tiles, passes, entry, round), carry)
            return entry + tiles, round + passes, carry, *following

        count = lax.div(units - 1 - first, self.workers) + 1
        start = (jnp.int32(0), jnp.int32(0), carry, *ordered(0))
        return lax.fori_loop(0, count, visit_unit, start)[:3]

    def place(self, index: Any) -> Place:
        """Returns the first query of a unit."""
        H, per_head = self.shape.H, self.config.units(self.shape)
        image, number = lax.div(index, H * per_head), lax.rem(lax.div(index, H), per_head)
        row = number * (self.config.passes(self.shape) * self.step)
        return Place(image, lax.rem(index, H), row)

    def rows(self, place: Place, number: Any, consumer: Any) -> Place:
        """Returns the first query of a consumer in a pass of a unit that begins at `place`."""
        return place._replace(row=place.row + number * self.step + consumer * ROWS)

    def slot(self, entry: Any) -> Any:
        return lax.rem(entry, self.config.slots)

    def buffer(self, round: Any, consumer: Any) -> Any:
        return lax.rem(round, BUFFERS) * self.config.consumers + consumer

    def part(self, array: Any, place: Place, rows: int, i: int) -> Any:
        """Returns the i-th part of rows in global memory, from a place on."""
        image, row = place.image, place.row
        if self.operands.first is not None:
            image, row = 0, row + self.operands.first[image]
        first: Any = self.shape.parts[i][0]
        width = self.shape.parts[i][1]
        if first + width > self.shape.D:
            # Pallas refuses a constant slice that is out of bounds.
            first += lax.axis_index("worker") * 0
        return array.at[image, pl.ds(row, rows), place.head, pl.ds(first, width)]

    def load(self, array: Any, place: Place, rows: int, memory: Any, at: Any, arrived: Any) -> None:
        """Loads rows from a place on to `memory[at]`. Rows beyond S are zero."""
        for i, part in enumerate(memory):
            source = self.part(array, place, rows, i)
            plgpu.copy_gmem_to_smem(source, self.views(part).copied.at[at], arrived.at[at])

    def feed_queries(self) -> None:
        s, consumers = self.s, range(self.config.consumers)

        def feed_unit(unit, _):
            place = self.place(unit.index)

            @pl.loop(0, unit.passes)
            def feed_pass(number):
                for consumer in consumers:
                    buffer = self.buffer(unit.round + number, consumer)
                    await_reuse(s.queries_read.at[buffer], unit.round + number, BUFFERS)
                    rows = self.rows(place, number, consumer)
                    self.load(self.operands.q, rows, ROWS, s.queries, buffer, s.queries_arrived)

        _, rounds, _ = self.for_each_unit(feed_unit)

        @for_the_last(BUFFERS, rounds)
        def drain(round):
            for consumer in consumers:
                plgpu.barrier_wait(s.queries_read.at[self.buffer(round, consumer)])

    def feed_keys(self) -> None:
        self.feed_ring(self.operands.k, self.s.keys, self.s.keys_arrived, self.s.keys_read)

    def feed_values(self) -> None:
        self.feed_ring(self.operands.v, self.s.values, self.s.values_arrived, self.s.values_read)

    def feed_ring(self, array: Any, memory: Any, arrived: Any, read: Any) -> None:
        """Loads the tiles of keys or of values of all units."""
        slots, keys = self.config.slots, self.config.keys

        def feed_unit(unit, _):
            place = self.place(unit.index)

            @pl.loop(0, unit.tiles)
            def feed_tile(t):
                entry = unit.entry + t
                slot = self.slot(entry)
                await_reuse(read.at[slot], entry, slots)
                self.load(array, place._replace(row=t * keys), keys, memory, slot, arrived)

        entries, _, _ = self.for_each_unit(feed_unit)

        @for_the_last(slots, entries)
        def drain(entry):
            plgpu.barrier_wait(read.at[self.slot(entry)])

    def attend(self, consumer: Any) -> None:
        s, config = self.s, self.config
        has_padding = self.operands.lengths is not None and self.operands.first is None
        if s.zeros:
            self.write(self.zeros(), s.zeros, consumer)

        def attend_unit(unit, previous):
            if has_padding:

                @pl.loop(unit.passes, config.passes(self.shape))
                def clear(number):
                    if self.levels:
                        self.store_levels(self.zeros(), consumer, unit.index, number)
                    else:
                        self.store(s.zeros, consumer, unit.index, number)

            def attend_pass(number, previous):
                return self.attend_rows(unit, number, consumer, previous)

            return lax.fori_loop(0, unit.passes, attend_pass, previous)

        nothing = Result(self.zeros(), one_a_row(1), jnp.int32(0), jnp.int32(0))
        pl.when(consumer > 0)(lambda: plgpu.barrier_wait(s.turn.at[consumer]))
        _, rounds, last = self.for_each_unit(attend_unit, nothing)
        pl.when(consumer < config.consumers - 1)(lambda: self.pass_turn(consumer))
        pl.when(rounds > 0)(lambda: self.finish(last, consumer))
        plgpu.wait_smem_to_gmem(0)

    def pass_turn(self, consumer: Any) -> None:
        plgpu.barrier_arrive(self.s.turn.at[lax.rem(consumer + 1, self.config.consumers)])

    def zeros(self) -> list[jax.Array]:
        """Returns zeros [ROWS, width] for each part of a head."""
        kinds = (jnp.zeros((ROWS, width), jnp.float32) for _, width in self.shape.parts)
        return [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for zeros in kinds]

    def attend_rows(self, unit: Unit, number: Any, consumer: Any, previous: Result) -> Result:
        """Computes the attention of one pass, and stores the previous result meanwhile."""
        s, config = self.s, self.config
        buffer = self.buffer(unit.round + number, consumer)
        is_first, is_last = number == 0, number == unit.passes - 1
        factor = math.log2(math.e) / math.sqrt(self.shape.D)

        def multiply(t, meanwhile=lambda: None):
            """Computes the scores of tile t, and passes the turn on."""
            slot = self.slot(unit.entry + t)
            pl.when(is_first)(lambda: plgpu.barrier_wait(s.keys_arrived.at[slot]))

            def accumulate(accumulator):
                for q, k in zip(s.queries, s.keys):
                    q, k = self.views(q).multiplied.at[buffer], self.views(k).multiplied.at[slot]
                    plgpu.wgmma(accumulator, q, k.T)
                self.pass_turn(consumer)
                meanwhile()
                plgpu.wgmma_wait(0)
                return accumulator[...]

            scores = pl.run_scoped(accumulate, plgpu.ACC((ROWS, config.keys), jnp.float32))
            pl.when(is_last)(lambda: plgpu.barrier_arrive(s.keys_read.at[slot]))
            return scores

        def add(t, scores, state):
            """Adds the values of tile t to the sums, after it has awaited the turn."""
            slot = self.slot(unit.entry + t)
            # The scores of a row are multiplied by log2(e) / sqrt(D), because exp2 is one
            # instruction.
            largest = jnp.maximum(state.largest, scores.max(axis=1) * factor)
            shrink = jnp.exp2(state.largest - largest)
            p = jnp.exp2(scores * factor - of_rows(largest, scores))
            total, p = state.total * shrink + p.sum(axis=1), p.astype(jnp.bfloat16)
            # The softmax is complete before the turn is awaited.
            p, shrink, largest, total = lax.optimization_barrier((p, shrink, largest, total))
            pl.when(is_first)(lambda: plgpu.barrier_wait(s.values_arrived.at[slot]))
            plgpu.barrier_wait(s.turn.at[consumer])
            sums = self.weigh(p, slot)
            pl.when(is_last)(lambda: plgpu.barrier_arrive(s.values_read.at[slot]))
            if self.config.tiles(self.shape) > 1:
                sums = [x * of_rows(shrink, x) + y for x, y in zip(state.sums, sums)]
            return State(sums, largest, total)

        def step(t, carry):
            scores, state = carry
            state = add(t, scores, state)
            return multiply(t + 1), state

        def store_previous():
            pl.when(unit.round + number > 0)(lambda: self.finish(previous, consumer))

        plgpu.barrier_wait(s.queries_arrived.at[buffer])
        carry = multiply(0, store_previous), State(self.zeros(), one_a_row(-jnp.inf), one_a_row(0))
        if config.tiles(self.shape) > 1:
            carry = lax.fori_loop(0, unit.tiles - 1, step, carry)
        plgpu.barrier_arrive(s.queries_read.at[buffer])
        scores, state = carry
        final = unit.tiles - 1
        scores = self.without_padding(scores, unit.length - final * config.keys)
        state = add(final, scores, state)
        return Result(state.sums, state.total, unit.index, number)

    def finish(self, result: Result, consumer: Any) -> None:
        """Divides sums by their totals and stores them."""
        inverse = 1 / result.total
        y = [x * of_rows(inverse, x) for x in result.sums]
        if self.levels:
            self.store_levels(y, consumer, result.index, result.number)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.write(y, self.s.results, consumer)
        self.store(self.s.results, consumer, result.index, result.number)

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

    def write(self, y: list[jax.Array], memory: Any, consumer: Any) -> None:
        """Rounds the parts of rows to `memory[consumer]`."""
        for part, rows in zip(y, memory):
            self.views(rows).multiplied.at[consumer][...] = part.astype(jnp.bfloat16)
        plgpu.commit_smem()

    def store(self, memory: Any, consumer: Any, index: Any, number: Any) -> None:
        """Stores `memory[consumer]` as the rows of a pass.

        TMA leaves out the rows beyond S. Rows of the next image are left out PACKED_ROWS at a time.
        """
        place = self.rows(self.place(index), number, consumer)

        def copy(begin: int, rows: int) -> None:
            for i, part in enumerate(memory):
                source = self.views(part).copied.at[consumer, pl.ds(begin, rows)]
                target = place._replace(row=place.row + begin)
                plgpu.copy_smem_to_gmem(source, self.part(self.operands.y, target, rows, i))

        if self.operands.first is None:
            copy(0, ROWS)
            return
        left = self.operands.lengths[place.image] - place.row
        pl.when(left >= ROWS)(lambda: copy(0, ROWS))

        @pl.when(left < ROWS)
        def copy_some():
            for begin in range(0, ROWS, PACKED_ROWS):
                pl.when(begin < left)(functools.partial(copy, begin, PACKED_ROWS))

    def store_levels(self, y: list[jax.Array], consumer: Any, index: Any, number: Any) -> None:
        """Rounds the parts of the rows of a pass to 8 bits and stores those of the image."""
        place = self.rows(self.place(index), number, consumer)
        row, left = place.image * self.shape.S + place.row, self.shape.S - place.row
        if self.operands.first is not None:
            row = self.operands.first[place.image] + place.row
            left = self.operands.lengths[place.image] - place.row
        for (first, width), part in zip(self.shape.parts, y):
            columns = min(width, self.shape.D - first)
            column = place.head * self.shape.D + first
            self.put(row, column, left, to_levels(part, self.levels, in_kernel=True), columns)

    def put(self, row: Any, column: Any, left: Any, part: jax.Array, columns: int) -> None:
        """Stores the first `left` rows and `columns` columns of a part."""
        store_levels(self.operands.y, row, column, left, part, columns)


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

    def put(self, row: Any, column: Any, left: Any, part: jax.Array, columns: int) -> None:
        @pl.loop(0, jnp.clip(left, 0, ROWS))
        def store(i):
            one = lax.dynamic_slice(part, (i, 0), (1, columns))
            self.operands.y[pl.ds(row + i, 1), pl.ds(column, columns)] = one


def of_rows(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one number a row to an array [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, (0,))


def one_a_row(value: float) -> jax.Array:
    """Returns [ROWS] numbers of equal value."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ONE_A_ROW)


def await_reuse(read: Any, number: Any, copies: int) -> None:
    """Waits until the previous contents of one of `copies` memories are read, if there are any."""
    pl.when(number >= copies)(lambda: plgpu.barrier_wait(read))


def for_the_last(most: int, number: Any) -> Callable:
    """Returns a decorator that calls a function for the last of `number` uses, `most` at most."""
    left = lax.min(jnp.int32(number), most)
    return lambda visit: pl.loop(0, left)(lambda i: visit(number - left + i))
