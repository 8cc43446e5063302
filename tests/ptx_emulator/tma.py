"""Tensor maps, and the copies between global and shared memory that they describe."""

import dataclasses
import functools
import math
import re

import numpy as np

from ptx_emulator.barriers import barrier_at
from ptx_emulator.errors import EmulatorError
from ptx_emulator.isa import BLACKWELL, Blocked, Task, block_of, instruction, lanes
from ptx_emulator.memory import POISON, UNIT, WORD
from ptx_emulator.scalar import modifiers
from ptx_emulator.vector_clocks import MEMORY

COPY = "9.7.9.25 asynchronous copy"

# What a swizzle of so many bytes exchanges: these bits of the address, from bit 4 on, change by
# those from bit 7 on (5.5.7).
SWIZZLES = {0: 0, 32: 1, 64: 3, 128: 7}


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled makes, innermost dimension first.

    Attributes:
      base: address in global memory.
      itemsize: bytes of an element.
      dimensions, strides, box: elements, bytes, elements; the first stride is `itemsize`.
      swizzle: 0, 32, 64 or 128 bytes.
      name: for messages.
    """

    base: int
    itemsize: int
    dimensions: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    name: str = "tensor"

    def __post_init__(self):
        # The rules of cuTensorMapEncodeTiled (CUDA driver API).
        inner = self.box[0] * self.itemsize
        rules = {
            "base not a multiple of 16": self.base % 16,
            "rank": not 1 <= len(self.dimensions) <= 5,
            "a dimension": not all(1 <= d <= 2**32 for d in self.dimensions),
            "a side of the box": not all(1 <= b <= 256 for b in self.box),
            "a stride": any(s % 16 or not 0 < s < 2**40 for s in self.strides[1:]),
            "the first stride": self.strides[0] != self.itemsize,
            "inner side of the box not a multiple of 16 bytes": inner % 16,
            "swizzle": self.swizzle not in SWIZZLES,
            "inner side of the box wider than the swizzle": self.swizzle and inner > self.swizzle,
        }
        broken = [rule for rule, is_broken in rules.items() if is_broken]
        if broken:
            raise EmulatorError(f"a tensor map breaks the rules for {', '.join(broken)}: {self}")

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return math.prod(self.box) * self.itemsize

    def places(self, begin: int):
        """`places_of` a box of this tensor."""
        return places_of(begin, math.prod(self.box[1:]), self.box[0] * self.itemsize, self.swizzle)

    def view(self, memory) -> np.ndarray:
        """The tensor as bytes [..., dimension 0, itemsize]."""
        steps = zip(self.dimensions, self.strides)
        extent = sum((d - 1) * s for d, s in steps) + self.itemsize
        begin = memory.offset(self.base, extent)
        shape = (*reversed(self.dimensions), self.itemsize)
        strides = (*reversed(self.strides), 1)
        flat = memory.bytes[begin : begin + extent]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def inside(self, place: tuple[int, ...]):
        """Slices of the tensor and of the box at this place where they meet; None if nowhere."""
        tensor, box = [], []
        for size, side, begin in reversed(list(zip(self.dimensions, self.box, place))):
            low, high = max(begin, 0), min(begin + side, size)
            if low >= high:
                return None
            tensor.append(slice(low, high))
            box.append(slice(low - begin, high - begin))
        return tuple(tensor), tuple(box)

    def load(self, memory, place: tuple[int, ...]) -> np.ndarray:
        """The bytes of a box; zeros beyond the tensor."""
        found = np.zeros((*reversed(self.box), self.itemsize), np.uint8)
        if parts := self.inside(place):
            found[parts[1]] = self.view(memory)[parts[0]]
        return found.reshape(-1)

    def store(self, memory, place: tuple[int, ...], values: np.ndarray) -> None:
        """Writes a box as far as it is inside of the tensor, whose rows take whole units.

        An H200 writes 16 bytes at a time, beyond the end of a row if it does not fill them.
        """
        unit = UNIT // self.itemsize
        columns, *rest = self.dimensions
        whole = dataclasses.replace(self, dimensions=(-(-columns // unit) * unit, *rest))
        if parts := whole.inside(place):
            box = values.reshape(*reversed(self.box), self.itemsize)
            whole.view(memory)[parts[0]] = box[parts[1]]


@functools.lru_cache(1024)
def places_of(begin: int, rows: int, inner: int, swizzle: int):
    """Where a box that begins there is in shared memory: its bytes, words, and units of 16 bytes.

    Swizzled rows take the swizzle's bytes even if they are narrower; the rest is left as it is.
    """
    row = np.arange(rows)[:, None] * (swizzle or inner)
    offsets = (begin + row + np.arange(inner)).reshape(-1)
    offsets = offsets ^ (offsets >> 7 & SWIZZLES[swizzle]) << 4
    return offsets, np.unique(offsets // WORD), np.unique(offsets // UNIT)


def words_of(begin: int, size: int) -> np.ndarray:
    """The words of a range of shared memory."""
    return np.arange(begin // WORD, -(-(begin + size) // WORD))


def units_of(begin: int, size: int) -> np.ndarray:
    """The units of 16 bytes of a range of shared memory."""
    return np.arange(begin // UNIT, -(-(begin + size) // UNIT))


def signed(value: int) -> int:
    """A coordinate."""
    return value - (value >> 31 << 32)


class TensorOperand:
    """[map, {coordinates}]."""

    def __init__(self, build, operand, rank: int):
        self.address = build.read(operand.base, "b64")
        self.coordinates = [build.read(item, "b32") for item in operand.coordinates.items]
        if len(self.coordinates) != rank:
            raise ValueError(f"{len(self.coordinates)} coordinates of {rank} dimensions")
        self.rank = rank

    def at(self, warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        """The map, and the place of the box, of a lane."""
        tensor = warp.tensor_map(int(self.address(warp)[lane]))
        if len(tensor.dimensions) != self.rank:
            raise EmulatorError(f"a copy of {self.rank} dimensions with {tensor}")
        place = tuple(signed(int(read(warp)[lane])) for read in self.coordinates)
        # An H200 traps.
        if place[0] * tensor.itemsize % UNIT:
            raise EmulatorError(f"{tensor.name} {place}: a box does not begin at 16 bytes")
        return tensor, place


def _rank(line) -> int:
    return next(int(part[0]) for part in modifiers(line) if re.fullmatch(r"\dd", part))


RANKS = "{.1d,.2d,.3d,.4d,.5d}"
ARRIVAL = "mbarrier::complete_tx::bytes"


def _checked(tensor: TensorMap, block, offset: int, what: str) -> None:
    places, _, _ = tensor.places(offset)
    block.shared.check(offset, int(places.max()) + 1 - offset, what)
    # 128 bytes, and the span of eight swizzled rows (9.7.9.25.5, 5.5.7).
    needed = max(128, 8 * tensor.swizzle)
    if offset % needed:
        raise EmulatorError(
            f"{what}: {block.shared.place(offset)} is not aligned to {needed} bytes"
        )


LOADS = (
    f"cp.async.bulk.tensor{RANKS}.shared::cta.global{{,.tile}}.{ARRIVAL}",
    f"cp.async.bulk.tensor{RANKS}.shared::cluster.global{{,.tile}}.{ARRIVAL}{{,.multicast::cluster}}",
)


@instruction(COPY, *LOADS)
@instruction(COPY, *(f"{form}{{.cta_group::1,.cta_group::2}}" for form in LOADS), targets=BLACKWELL)
def load(build, line):
    parts = modifiers(line)
    target, source, signal, *more = line.operands
    pair, multicast = "cta_group::2" in parts, "multicast::cluster" in parts
    own = "shared::cta" in parts
    tensor_at = TensorOperand(build, source, _rank(line))
    target, signal = build.address(target), build.address(signal)
    members = build.read(more[0], "b16") if multicast else None
    if len(more) != multicast:
        raise ValueError("operands")

    def places(warp, rank: int, signal_rank: int, lane: int) -> list[tuple[int, int]]:
        """(block that gets the data, block that is signalled)."""
        if multicast:
            named = int(members(warp)[lane])
            found = [r for r in range(16) if named >> r & 1]
            # For a pair the signal goes to the block that has the parity of the barrier's
            # (9.7.9.25.5.2).
            return [(r, r & ~1 | signal_rank & 1 if pair else r) for r in found]
        if pair and rank >> 1 != signal_rank >> 1:
            raise EmulatorError("a barrier outside of the pair")
        if not pair and rank != signal_rank:
            raise EmulatorError("data for one block, the barrier in another one")
        return [(rank, signal_rank)]

    def execute(warp, mask):
        blocks = warp.block.cluster.blocks
        for lane in lanes(mask):
            tensor, place = tensor_at.at(warp, lane)
            rank, offset = block_of(int(target(warp)[lane]))
            signal_rank, signal_offset = block_of(int(signal(warp)[lane]))
            if own and rank != warp.block.rank:
                raise EmulatorError(f"a copy to block {rank} as if to the own one")
            for to, to_signal in places(warp, rank, signal_rank, lane):
                if max(to, to_signal) >= len(blocks):
                    raise EmulatorError(f"the cluster has no block {max(to, to_signal)}")
                address = (to_signal << 24) + signal_offset
                barrier = barrier_at(warp, address, cluster=True)
                _load(warp, int(lane), blocks[to], offset, tensor, place, barrier)

    return execute


def _load(warp, lane: int, block, offset: int, tensor: TensorMap, place, barrier) -> None:
    """One box to one block."""
    what = f"a TMA load of {tensor.name} {place}"
    _checked(tensor, block, offset, what)
    barrier.check_use(warp, asynchronous=True)
    index, words, units = tensor.places(offset)
    block.shared.asynchronous(units, warp, lane, what)
    block.shared.writes(barrier.agent, barrier.phase + 1, words, warp.clock, what)
    block.shared.bytes[index] = POISON

    def run():
        block.shared.bytes[index] = tensor.load(warp.machine.memory, place)
        barrier.receive(tensor.bytes)

    warp.machine.submit(Task("load", run, what, warp.block.cluster))


@instruction(COPY, f"cp.async.bulk.tensor{RANKS}.global.shared::cta{{,.tile}}.bulk_group")
def store(build, line):
    target, source = line.operands
    tensor_at, source = TensorOperand(build, target, _rank(line)), build.address(source)

    def execute(warp, mask):
        for lane in lanes(mask):
            tensor, place = tensor_at.at(warp, lane)
            # An H200 traps.
            if min(place) < 0:
                raise EmulatorError(f"a store to {tensor.name} {place}: before its begin")
            rank, offset = block_of(int(source(warp)[lane]))
            if rank != warp.block.rank:
                raise EmulatorError(f"a copy from block {rank} as if from the own one")
            _store(warp, int(lane), offset, tensor, place)

    return execute


def _store(warp, lane: int, offset: int, tensor: TensorMap, place) -> None:
    what = f"a TMA store of {tensor.name} {place}"
    block, machine = warp.block, warp.machine
    _checked(tensor, block, offset, what)
    index, words, units = tensor.places(offset)
    block.shared.asynchronous(units, warp, lane, what)
    warp.stores_issued += 1
    engine = machine.agents.store_engine(warp.agent)
    block.shared.reads(engine, warp.stores_issued, words, warp.clock, what)
    held = []

    def read():
        held.append(block.shared.bytes[index].copy())

    def write():
        tensor.store(machine.memory, place, held[0])

    queue = ("store", warp, lane, warp.stores_issued)
    tasks = (
        Task("store", read, f"{what}: its read of shared memory", block.cluster, queue),
        Task("write", write, f"{what}: its write", block.cluster, queue),
    )
    warp.stores.open.setdefault(lane, []).append((*tasks, warp.stores_issued))
    for task in tasks:
        machine.submit(task)


@instruction(COPY, "cp.async.bulk.commit_group")
def commit_group(build, line):
    def execute(warp, mask):
        for lane in map(int, lanes(mask)):
            group = warp.stores.open.pop(lane, [])
            warp.stores.committed.setdefault(lane, []).append(group)

    return execute


@instruction(COPY, "cp.async.bulk.wait_group{,.read}")
def wait_group(build, line):
    left = build.immediate(line.operands[0])
    if left < 0:
        raise ValueError(f"all but {left} groups")
    reads = "read" in modifiers(line)

    def execute(warp, mask):
        active = list(map(int, lanes(mask)))
        engine = warp.machine.agents.store_engine(warp.agent)

        def waited():
            for lane in active:
                groups = warp.stores.committed.get(lane, [])
                for group in groups[: max(0, len(groups) - left)]:
                    yield from group

        def ready():
            return all((read if reads else write).done for read, write, _ in waited())

        if not ready():
            return Blocked(ready, lambda: f"TMA stores, all but {left} groups")
        for _, _, number in waited():
            warp.clock[MEMORY][engine] = max(warp.clock[MEMORY][engine], number)
        return None

    return execute


@instruction(COPY, f"cp.async.bulk{{.shared::cta,.shared::cluster}}.global.{ARRIVAL}")
def load_bytes(build, line):
    """Neighbouring bytes, to the own block (9.7.9.25.4.1)."""
    target, source, size, signal = line.operands
    target, source, signal = map(build.address, (target, source, signal))
    size = build.read(size, "u32")

    def execute(warp, mask):
        for lane in lanes(mask):
            of = (int(read(warp)[lane]) for read in (target, source, size, signal))
            _load_bytes(warp, int(lane), *of)

    return execute


def _load_bytes(warp, lane: int, target: int, source: int, size: int, signal: int) -> None:
    block, memory = warp.block, warp.machine.memory
    rank, offset = block_of(target)
    what = f"a bulk copy of {size} bytes from {source:#x}"
    if rank != block.rank:
        raise EmulatorError(f"{what} to block {rank} instead of the own one")
    if size == 0 or any(x % 16 for x in (offset, source, size)):
        raise EmulatorError(f"{what} to {block.shared.place(offset)}: not multiples of 16")
    block.shared.check(offset, size, what)
    begin = memory.offset(source, size)
    barrier = barrier_at(warp, signal, cluster=False)
    barrier.check_use(warp, asynchronous=True)
    block.shared.asynchronous(units_of(offset, size), warp, lane, what)
    words = words_of(offset, size)
    block.shared.writes(barrier.agent, barrier.phase + 1, words, warp.clock, what)
    block.shared.bytes[offset : offset + size] = POISON

    def run():
        block.shared.bytes[offset : offset + size] = memory.bytes[begin : begin + size]
        barrier.receive(size)

    warp.machine.submit(Task("load", run, what, block.cluster))
