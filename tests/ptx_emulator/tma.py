"""TMA: tensor maps, and bulk copies between global and shared memory."""

import dataclasses
import functools
import math
import re

import numpy as np

from tests.ptx_emulator.barriers import barrier_at
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.isa import (
    BLACKWELL,
    Blocked,
    Task,
    active_lanes,
    defines,
    shared_cluster_address,
    split_shared_address,
)
from tests.ptx_emulator.memory import POISON, UNIT_BYTES, WORD_BYTES, units_in_range, words_in_range
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.vector_clocks import MEMORY

COPY = "9.7.9.25 asynchronous copy"

# Bytes of a swizzle -> mask of address bits, counted from bit 7, which are XORed into the bits from
# bit 4 on (5.5.7).
SWIZZLES = {0: 0, 32: 1, 64: 3, 128: 7}

# Values of CUtensorMapSwizzle, and of .swizzle_mode of tensormap.replace -> bytes.
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}

# Size of a CUtensorMap in bytes.
TENSOR_MAP_BYTES = 128


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor map of cuTensorMapEncodeTiled, with the innermost dimension first.

    Attributes:
      base: address in global memory.
      itemsize: bytes of an element.
      dimensions: elements in each dimension.
      strides: bytes from one element to the next in each dimension; the first stride is `itemsize`.
      box: elements of a box in each dimension.
      swizzle: 0, 32, 64 or 128 bytes.
      name: name in error messages.
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
        faults = {
            "the base is not a multiple of 16": self.base % 16,
            "the rank is not 1 to 5": not 1 <= len(self.dimensions) <= 5,
            "a dimension is not 1 to 2^32": not all(1 <= d <= 2**32 for d in self.dimensions),
            "a side of the box is not 1 to 256": not all(1 <= b <= 256 for b in self.box),
            "a stride is not a multiple of 16 below 2^40": any(
                s % 16 or not 0 < s < 2**40 for s in self.strides[1:]
            ),
            "the first stride is not the itemsize": self.strides[0] != self.itemsize,
            "the inner side of the box is not a multiple of 16 bytes": inner % 16,
            "the swizzle does not exist": self.swizzle not in SWIZZLES,
            "the inner side of the box is wider than the swizzle": self.swizzle
            and inner > self.swizzle,
        }
        present = [fault for fault, is_present in faults.items() if is_present]
        if present:
            raise EmulatorError(f"a tensor map is invalid, because {', '.join(present)}: {self}")

    @property
    def bytes(self) -> int:
        """Returns the bytes of a box."""
        return math.prod(self.box) * self.itemsize

    def box_layout(self, begin: int):
        """Returns the `box_layout` of a box of this tensor at an offset in shared memory."""
        return box_layout(begin, math.prod(self.box[1:]), self.box[0] * self.itemsize, self.swizzle)

    def view(self, memory) -> np.ndarray:
        """Returns the tensor as a view of global memory, [..., dimension 0, itemsize]."""
        steps = zip(self.dimensions, self.strides)
        extent = sum((d - 1) * s for d, s in steps) + self.itemsize
        begin = memory.offset_of(self.base, extent)
        shape = (*reversed(self.dimensions), self.itemsize)
        strides = (*reversed(self.strides), 1)
        flat = memory.bytes[begin : begin + extent]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def overlap(self, coordinates: tuple[int, ...]):
        """Returns the overlapping slices of the tensor and of a box there; None without overlap."""
        tensor, box = [], []
        for size, side, begin in reversed(list(zip(self.dimensions, self.box, coordinates))):
            low, high = max(begin, 0), min(begin + side, size)
            if low >= high:
                return None
            tensor.append(slice(low, high))
            box.append(slice(low - begin, high - begin))
        return tuple(tensor), tuple(box)

    def load(self, memory, coordinates: tuple[int, ...]) -> np.ndarray:
        """Returns the bytes of a box, which are zero outside of the tensor."""
        content = np.zeros((*reversed(self.box), self.itemsize), np.uint8)
        if slices := self.overlap(coordinates):
            content[slices[1]] = self.view(memory)[slices[0]]
        return content.reshape(-1)

    def store(self, memory, coordinates: tuple[int, ...], content: np.ndarray) -> None:
        """Writes the part of a box that is inside of the tensor.

        An H200 writes whole units of 16 bytes, so that it also writes past the end of a row that
        does not fill its last unit.
        """
        unit = UNIT_BYTES // self.itemsize
        columns, *rest = self.dimensions
        padded = dataclasses.replace(self, dimensions=(-(-columns // unit) * unit, *rest))
        if slices := padded.overlap(coordinates):
            box = content.reshape(*reversed(self.box), self.itemsize)
            padded.view(memory)[slices[0]] = box[slices[1]]


@dataclasses.dataclass(frozen=True)
class Im2colMap(TensorMap):
    """A tensor map of cuTensorMapEncodeIm2col, with dimensions C, W, H, (D,) N (5.5.4).

    A load copies the pixels of a column. Starting at a first pixel, it counts them along W, H and D
    inside the bounding box, then along N. It reads each pixel at its position plus the offsets.

    Attributes:
      box: number of channels of a pixel, and of pixels of a column.
      lower, upper: corners of the bounding box in W, H, (D): its first pixel, and its last pixel
        relative to the tensor's last pixel.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    def __post_init__(self):
        # The rules of cuTensorMapEncodeIm2col (CUDA driver API).
        rank, inner = len(self.dimensions), self.box[0] * self.itemsize
        far = {3: 2**15, 4: 2**7, 5: 2**4}.get(rank, 0)
        faults = {
            "the base is not a multiple of 16": self.base % 16,
            "the rank is not 3 to 5": rank not in (3, 4, 5),
            "a dimension is not 1 to 2^32": not all(1 <= d <= 2**32 for d in self.dimensions),
            "a stride is not a multiple of 16 below 2^40": any(
                s % 16 or not 0 < s < 2**40 for s in self.strides[1:]
            ),
            "the first stride is not the itemsize": self.strides[0] != self.itemsize,
            "the number of channels is not 1 to 256": not 1 <= self.box[0] <= 256,
            "the number of pixels is not 1 to 1024": not 1 <= self.box[1] <= 1024,
            "the corners are out of range": not all(
                len(corner) == rank - 2 and all(-far <= c < far for c in corner)
                for corner in (self.lower, self.upper)
            ),
            "the bounding box is empty": any(size <= 0 for size in self.sides),
            "the channels are not a multiple of 16 bytes": inner % 16,
            "the swizzle does not exist": self.swizzle not in SWIZZLES,
            "the channels are wider than the swizzle": self.swizzle and inner > self.swizzle,
        }
        present = [fault for fault, is_present in faults.items() if is_present]
        if present:
            raise EmulatorError(f"a tensor map is invalid, because {', '.join(present)}: {self}")

    @property
    def sides(self) -> list[int]:
        """Returns the numbers of pixels of the bounding box in W, H, (D)."""
        corners = zip(self.dimensions[1:-1], self.lower, self.upper)
        return [size - low + high for size, low, high in corners]

    def check_coordinates(self, coordinates: tuple[int, ...]) -> None:
        """Raises an error unless the first pixel is in the bounding box."""
        _, *begin, _ = coordinates
        corners = zip(begin, self.lower, self.sides)
        if not all(low <= b < low + side for b, low, side in corners):
            raise EmulatorError(
                f"{self.name} {coordinates}: the first pixel is not in the bounding box"
            )

    def load(self, memory, place: tuple[int, ...]) -> np.ndarray:
        """Returns the bytes of a column; `place` has the coordinates and then the offsets.

        Pixels outside of the tensor are zero (5.5.4.3).
        """
        rank, (channels, pixels) = len(self.dimensions), self.box
        (first, *begin, image), offsets = place[:rank], place[rank:]
        view = self.view(memory)
        content = np.zeros((pixels, channels, self.itemsize), np.uint8)
        columns = slice(max(first, 0), min(first + channels, self.dimensions[0]))
        at = [*begin, image]
        for pixel in content:
            moved = [a + o for a, o in zip(at, (*offsets, 0))]
            if all(0 <= m < d for m, d in zip(moved, self.dimensions[1:])):
                found = view[(*reversed(moved), columns)]
                pixel[columns.start - first :][: len(found)] = found
            for i, (low, side) in enumerate(zip(self.lower, self.sides)):
                at[i] += 1
                if at[i] < low + side:
                    break
                at[i] = low
            else:
                at[-1] += 1
        return content.reshape(-1)


@functools.lru_cache(1024)
def box_layout(begin: int, rows: int, row_bytes: int, swizzle: int):
    """Returns the offsets of a box's bytes in shared memory, and the words and units they occupy.

    A row that is narrower than its swizzle takes as many bytes as the swizzle; TMA does not access
    the bytes behind it.
    """
    row = np.arange(rows)[:, None] * (swizzle or row_bytes)
    offsets = (begin + row + np.arange(row_bytes)).reshape(-1)
    offsets = offsets ^ (offsets >> 7 & SWIZZLES[swizzle]) << 4
    return offsets, np.unique(offsets // WORD_BYTES), np.unique(offsets // UNIT_BYTES)


def to_signed(value: int) -> int:
    """Converts the bits of a coordinate to a signed 32-bit integer."""
    return value - (value >> 31 << 32)


class TensorOperand:
    """The operand [tensor map, {coordinates}]."""

    def __init__(self, binder, operand, rank: int):
        self.address = binder.reader(operand.base, "b64")
        self.coordinates = [binder.reader(item, "b32") for item in operand.coordinates.items]
        if len(self.coordinates) != rank:
            raise ValueError(f"there are {len(self.coordinates)} coordinates for {rank} dimensions")
        self.rank = rank

    def read(self, warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        """Returns the tensor map and the coordinates of a lane."""
        tensor = warp.tensor_map(int(self.address(warp)[lane]))
        if len(tensor.dimensions) != self.rank:
            raise EmulatorError(f"a copy of {self.rank} dimensions is executed with {tensor}")
        coordinates = tuple(to_signed(int(read(warp)[lane])) for read in self.coordinates)
        # An H200 traps.
        if coordinates[0] * tensor.itemsize % UNIT_BYTES:
            raise EmulatorError(
                f"{tensor.name} {coordinates}: a box does not begin at a multiple of 16 bytes"
            )
        return tensor, coordinates


def _rank(instruction) -> int:
    return next(int(part[0]) for part in modifiers(instruction) if re.fullmatch(r"\dd", part))


RANKS = "{.1d,.2d,.3d,.4d,.5d}"
COMPLETION = "mbarrier::complete_tx::bytes"


def _check_box(tensor: TensorMap, block, offset: int, description: str) -> None:
    """Checks that a box in shared memory is in bounds and aligned."""
    offsets, _, _ = tensor.box_layout(offset)
    block.shared.check_bounds(offset, int(offsets.max()) + 1 - offset, description)
    # A box is aligned to 128 bytes, or with a swizzle to the 8 rows of its pattern (9.7.9.25.5,
    # 5.5.7).
    alignment = max(128, 8 * tensor.swizzle)
    if offset % alignment:
        raise EmulatorError(
            f"{description}: {block.shared.describe(offset)} is not aligned to {alignment} bytes"
        )


LOADS = tuple(
    f"cp.async.bulk.tensor{form}.{COMPLETION}{more}"
    for form, more in (
        (f"{RANKS}.shared::cta.global{{,.tile}}", ""),
        (f"{RANKS}.shared::cluster.global{{,.tile}}", "{,.multicast::cluster}"),
        ("{.3d,.4d,.5d}.shared::cta.global.im2col", ""),
        ("{.3d,.4d,.5d}.shared::cluster.global.im2col", "{,.multicast::cluster}"),
    )
)


@defines(COPY, *LOADS)
@defines(COPY, *(f"{form}{{.cta_group::1,.cta_group::2}}" for form in LOADS), targets=BLACKWELL)
def load(binder, instruction):
    parts = modifiers(instruction)
    target, source, mbarrier, *masks = instruction.operands
    im2col, offsets = "im2col" in parts, []
    if im2col:
        # The offsets in W, H, (D) are unsigned (9.7.9.25.5.2).
        vector, *masks = masks
        offsets = [binder.reader(item, "b16") for item in vector.items]
        if len(offsets) != _rank(instruction) - 2:
            raise ValueError(
                f"there are {len(offsets)} offsets for {_rank(instruction)} dimensions"
            )
    is_pair, multicast = "cta_group::2" in parts, "multicast::cluster" in parts
    own_block_only = "shared::cta" in parts
    tensor_operand = TensorOperand(binder, source, _rank(instruction))
    target, mbarrier = binder.address_reader(target), binder.address_reader(mbarrier)
    members = binder.reader(masks[0], "b16") if multicast else None
    if len(masks) != multicast:
        raise ValueError(
            "a CTA mask is required for a multicast load, and not allowed for other loads"
        )

    def ranks(warp, rank: int, signal_rank: int, lane: int) -> list[tuple[int, int]]:
        """Returns the blocks that receive the box, each with the block of its mbarrier."""
        if multicast:
            cta_mask = int(members(warp)[lane])
            receivers = [rank for rank in range(16) if cta_mask >> rank & 1]
            # With cta_group::2 the signal goes to the block of the receiver's pair whose rank has
            # the parity of the mbarrier's block (9.7.9.25.5.2).
            return [(r, r & ~1 | signal_rank & 1 if is_pair else r) for r in receivers]
        if is_pair and rank >> 1 != signal_rank >> 1:
            raise EmulatorError("the load signals an mbarrier outside of the pair")
        if not is_pair and rank != signal_rank:
            raise EmulatorError("the data and the mbarrier are in different blocks")
        return [(rank, signal_rank)]

    def execute(warp, mask):
        blocks = warp.block.cluster.blocks
        for lane in active_lanes(mask):
            tensor, place = tensor_operand.read(warp, lane)
            if isinstance(tensor, Im2colMap) != im2col:
                raise EmulatorError(f"{instruction.opcode} is executed with {tensor}")
            if isinstance(tensor, Im2colMap):
                tensor.check_coordinates(place)
            place = (*place, *(int(read(warp)[lane]) for read in offsets))
            rank, offset = split_shared_address(int(target(warp)[lane]))
            signal_rank, mbarrier_offset = split_shared_address(int(mbarrier(warp)[lane]))
            if own_block_only and rank != warp.block.rank:
                raise EmulatorError(
                    f"there is a shared::cta copy to block {rank}, expected the warp's own block"
                )
            for receiver, signalled in ranks(warp, rank, signal_rank, lane):
                if max(receiver, signalled) >= len(blocks):
                    raise EmulatorError(f"the cluster has no block {max(receiver, signalled)}")
                address = shared_cluster_address(signalled, mbarrier_offset)
                barrier = barrier_at(warp, address, cluster=True)
                _load_box(warp, int(lane), blocks[receiver], offset, tensor, place, barrier)

    return execute


def _load_box(warp, lane: int, block, offset: int, tensor: TensorMap, place, barrier) -> None:
    """Issues the load of a box to one block; `place` is the argument of the map's `load`."""
    description = f"a TMA load of {tensor.name} {place}"
    _check_box(tensor, block, offset, description)
    barrier.check_use(warp, by_async_proxy=True)
    index, words, units = tensor.box_layout(offset)
    block.shared.check_async_proxy_access(units, warp, lane, description)
    block.shared.record_write(barrier.agent, barrier.phase + 1, words, warp.clock, description)
    block.shared.bytes[index] = POISON

    def run():
        block.shared.bytes[index] = tensor.load(warp.machine.memory, place)
        barrier.complete_tx(tensor.bytes)

    warp.machine.submit(Task("load", run, description, warp.block.cluster))


@defines(COPY, f"cp.async.bulk.tensor{RANKS}.global.shared::cta{{,.tile}}.bulk_group")
def store(binder, instruction):
    target, source = instruction.operands
    tensor_operand = TensorOperand(binder, target, _rank(instruction))
    source = binder.address_reader(source)

    def execute(warp, mask):
        for lane in active_lanes(mask):
            tensor, coordinates = tensor_operand.read(warp, lane)
            if isinstance(tensor, Im2colMap):
                raise EmulatorError(f"{instruction.opcode} is executed with {tensor}")
            # An H200 traps.
            if min(coordinates) < 0:
                raise EmulatorError(
                    f"a store to {tensor.name} {coordinates} begins outside of the tensor"
                )
            rank, offset = split_shared_address(int(source(warp)[lane]))
            if rank != warp.block.rank:
                raise EmulatorError(
                    f"there is a shared::cta copy from block {rank}, expected the warp's own block"
                )
            _store_box(warp, int(lane), offset, tensor, coordinates)

    return execute


def _store_box(warp, lane: int, offset: int, tensor: TensorMap, coordinates) -> None:
    """Issues the store of a box: one task reads shared memory, and another writes the tensor."""
    description = f"a TMA store of {tensor.name} {coordinates}"
    block, machine = warp.block, warp.machine
    _check_box(tensor, block, offset, description)
    index, words, units = tensor.box_layout(offset)
    block.shared.check_async_proxy_access(units, warp, lane, description)
    warp.bulk_stores_issued += 1
    number = warp.bulk_stores_issued
    engine = machine.agents.store_engine(warp.agent)
    block.shared.record_read(engine, number, words, warp.clock, description)
    content = []

    def read():
        content.append(block.shared.bytes[index].copy())

    def write():
        tensor.store(machine.memory, coordinates, content[0])

    queue = ("store", warp, lane, number)
    tasks = (
        Task("store", read, f"{description}: its read of shared memory", block.cluster, queue),
        Task("write", write, f"{description}: its write", block.cluster, queue),
    )
    warp.bulk_stores.uncommitted.setdefault(lane, []).append((*tasks, number))
    for task in tasks:
        machine.submit(task)


@defines(COPY, "cp.async.bulk.commit_group")
def commit_group(binder, instruction):
    def execute(warp, mask):
        for lane in map(int, active_lanes(mask)):
            group = warp.bulk_stores.uncommitted.pop(lane, [])
            warp.bulk_stores.committed.setdefault(lane, []).append(group)

    return execute


@defines(COPY, "cp.async.bulk.wait_group{,.read}")
def wait_group(binder, instruction):
    pending = binder.immediate(instruction.operands[0])
    if pending < 0:
        raise ValueError(f"a wait for all groups but the last {pending} is not possible")
    waits_for_reads = "read" in modifiers(instruction)

    def execute(warp, mask):
        active = list(map(int, active_lanes(mask)))
        engine = warp.machine.agents.store_engine(warp.agent)

        def stores():
            for lane in active:
                groups = warp.bulk_stores.committed.get(lane, [])
                for group in groups[: max(0, len(groups) - pending)]:
                    yield from group

        def ready():
            return all((read if waits_for_reads else write).done for read, write, _ in stores())

        if not ready():
            return Blocked(ready, lambda: f"all groups of TMA stores but the last {pending}")
        for _, _, number in stores():
            warp.clock[MEMORY][engine] = max(warp.clock[MEMORY][engine], number)
        return None

    return execute


@defines(COPY, f"cp.async.bulk{{.shared::cta,.shared::cluster}}.global.{COMPLETION}")
def load_bytes(binder, instruction):
    """Copies contiguous bytes to the warp's block, without a tensor map (9.7.9.25.4.1)."""
    target, source, size, mbarrier = instruction.operands
    target, source, mbarrier = map(binder.address_reader, (target, source, mbarrier))
    size = binder.reader(size, "u32")

    def execute(warp, mask):
        for lane in active_lanes(mask):
            operands = (int(read(warp)[lane]) for read in (target, source, size, mbarrier))
            _load_bytes(warp, int(lane), *operands)

    return execute


def _load_bytes(warp, lane: int, target: int, source: int, size: int, mbarrier: int) -> None:
    """Issues a bulk copy to shared memory."""
    block, memory = warp.block, warp.machine.memory
    rank, offset = split_shared_address(target)
    description = f"a bulk copy of {size} bytes from {source:#x}"
    if rank != block.rank:
        raise EmulatorError(f"{description} goes to block {rank}, expected the warp's own block")
    if size == 0 or any(x % 16 for x in (offset, source, size)):
        raise EmulatorError(
            f"{description} to {block.shared.describe(offset)} has values that are "
            "not multiples of 16"
        )
    block.shared.check_bounds(offset, size, description)
    begin = memory.offset_of(source, size)
    barrier = barrier_at(warp, mbarrier, cluster=False)
    barrier.check_use(warp, by_async_proxy=True)
    units, words = units_in_range(offset, size), words_in_range(offset, size)
    block.shared.check_async_proxy_access(units, warp, lane, description)
    block.shared.record_write(barrier.agent, barrier.phase + 1, words, warp.clock, description)
    block.shared.bytes[offset : offset + size] = POISON

    def run():
        block.shared.bytes[offset : offset + size] = memory.bytes[begin : begin + size]
        barrier.complete_tx(size)

    warp.machine.submit(Task("load", run, description, block.cluster))
