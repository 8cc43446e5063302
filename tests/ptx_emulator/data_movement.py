"""Loads, stores, and what the lanes of a warp exchange."""

import numpy as np

from ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from ptx_emulator.isa import (
    ALL_LANES,
    LANE,
    LANES,
    SINCE_BLACKWELL,
    instruction,
    lanes,
    numpy_type,
)
from ptx_emulator.memory import (
    BLOCK_SHIFT,
    PARAMETER_WINDOW,
    SHARED_WINDOW,
    UNIT,
    WINDOW,
    WORD,
)
from ptx_emulator.parser import Register, Vector, bits
from ptx_emulator.scalar import elementwise, modifiers

MOVE, MATRIX, VOTE = "9.7.9 data movement", "9.7.14 matrices", "9.7.13 synchronisation"
OTHER = "9.7.19 miscellaneous"


class Access:
    """Active lanes' accesses of `size` neighbouring bytes in one state space."""

    def __init__(self, warp, space: str, addresses, mask, size: int, what: str):
        self.warp, self.size, self.what = warp, size, what
        self.active = lanes(mask)
        found = addresses[self.active].astype(np.uint64)
        wrong = found[found % np.uint64(size) != 0]
        if len(wrong):
            raise EmulatorError(f"{what} of {size} bytes at {int(wrong[0]):#x} is not aligned")
        self.space, found = _space_of(space, found)
        self.block = None
        if self.space == "shared":
            ranks, offsets = found >> np.uint64(BLOCK_SHIFT), found & np.uint64(2**BLOCK_SHIFT - 1)
            self._choose_block(ranks, space)
            self.offsets = offsets.astype(np.int64)
            for offset in (self.offsets.min(), self.offsets.max()):
                self.block.shared.check(int(offset), size, what)
            self.bytes = self.block.shared.bytes
        elif self.space == "global":
            memory = warp.machine.memory
            self.offsets = memory.offsets(found, size)
            self.bytes = memory.bytes
        else:
            self.offsets, self.bytes = found.astype(np.int64), warp.machine.parameters
            if self.offsets.min() < 0 or self.offsets.max() + size > len(self.bytes):
                raise EmulatorError(f"{what} of {size} bytes beyond the kernel's parameters")

    def _choose_block(self, ranks, space: str) -> None:
        rank = int(ranks[0])
        blocks = self.warp.block.cluster.blocks
        if (ranks != rank).any():
            raise UnsupportedError("one access of shared memory of several blocks")
        if rank >= len(blocks):
            raise EmulatorError(f"{self.what}: the cluster has no block {rank}")
        if space in ("shared", "shared::cta") and rank != self.warp.block.rank:
            raise EmulatorError(f"{self.what}: an address of block {rank} as one of the own block")
        self.block = blocks[rank]
        if not self.block.alive:
            raise EmulatorError(f"{self.what}: block {rank} of the cluster has exited")

    @property
    def index(self):
        """Indices of the bytes, [active lanes, size]."""
        return self.offsets[:, None] + np.arange(self.size)

    def load(self) -> np.ndarray:
        """The bytes, [32, size]; of inactive lanes zero."""
        warp = self.warp
        if self.block:
            words = np.unique(self.index // WORD)
            self.block.shared.reads(warp.agent, warp.time, words, warp.clock, self.what)
        found = np.zeros((LANES, self.size), np.uint8)
        found[self.active] = self.bytes[self.index]
        return found

    def store(self, values: np.ndarray, *, fenced: bool = False, lanes: int | None = None) -> None:
        """Writes the active lanes' bytes of values [32, size].

        Args:
          values: what is written.
          fenced: whether the asynchronous proxy sees it.
          lanes: whose data it is, as bits; each lane's own without it.
        """
        warp = self.warp
        if self.space == "param":
            raise EmulatorError("a store to a kernel parameter")
        values = values[self.active]
        self._check_agreement(values)
        same = (self.bytes[self.index] == values).all()
        self.bytes[self.index] = values
        if self.block:
            words = np.unique(self.index // WORD)
            try:
                self.block.shared.writes(warp.agent, warp.time, words, warp.clock, self.what)
            except RaceError:
                if not (same and warp.machine.excused("same value stored")):
                    raise
            if not fenced:
                units, bits_of_lanes = self._units(lanes)
                self.block.shared.stored(warp.agent, warp.time, units, bits_of_lanes)
        warp.machine.event()

    def _units(self, lanes: int | None) -> tuple[np.ndarray, np.ndarray | int]:
        """The units that are touched, and the lanes that touch them, as bits."""
        # An access is aligned to its size.
        units = (self.offsets[:, None] + np.arange(0, self.size, UNIT)) // UNIT
        if lanes is not None:
            return np.unique(units), lanes
        found, inverse = np.unique(units, return_inverse=True)
        by_unit = np.zeros(len(found), np.uint32)
        each = np.uint32(1) << self.active.astype(np.uint32)
        np.bitwise_or.at(by_unit, inverse.reshape(units.shape), each[:, None])
        return found, by_unit

    def _check_agreement(self, values: np.ndarray) -> None:
        """Which lane's value stays is not defined where several lanes write to one address."""
        if len(set(self.offsets.tolist())) == len(self.offsets):
            return
        _, first, inverse = np.unique(self.offsets, return_index=True, return_inverse=True)
        other = (values != values[first[inverse]]).any(1)
        if other.any():
            i = int(np.nonzero(other)[0][0])
            lanes_ = self.active[first[inverse[i]]], self.active[i]
            raise RaceError(
                f"{self.what}: lanes {lanes_[0]} and {lanes_[1]} write different values to one "
                f"address in {self.space} memory"
            )


def _space_of(space: str, addresses):
    """Resolves a generic address; shared addresses are those of the cluster's window."""
    if space.startswith("shared"):
        return "shared", addresses
    if space.startswith("param"):
        return "param", addresses
    if space == "global" or not len(addresses):
        return "global", addresses
    first = int(addresses[0])
    for name, begin in (("shared", SHARED_WINDOW), ("param", PARAMETER_WINDOW)):
        if begin <= first < begin + WINDOW:
            return name, addresses - np.uint64(begin)
    return "global", addresses


def space_of(line) -> str:
    """The state space in an opcode; "generic" if there is none."""
    spaces = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry")
    return next((part for part in modifiers(line) if part in spaces), "generic")


SHORT = "{,.v2,.v4}{.b8,.b16,.b32,.u8,.u16,.u32,.s8,.s16,.s32,.f32}"
LONG, LONGEST = "{,.v2}{.b64,.u64,.s64}", ".v4{.b64,.u64,.s64}"


def _items(operand, count: int) -> tuple:
    """The registers of a vector, as many as the opcode says."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} registers instead of {count}")
    return items


def _elements(line) -> int:
    """How many elements a load or store has."""
    return next((int(part[1:]) for part in modifiers(line) if part in ("v2", "v4")), 1)


@instruction(
    MOVE,
    f"ld{{,.shared,.shared::cta,.shared::cluster,.param,.param::entry}}{SHORT}",
    f"ld{{,.shared,.shared::cta,.shared::cluster,.param,.param::entry}}{LONG}",
    *(f"ld.global{{,.nc}}{form}" for form in (SHORT, LONG)),
)
@instruction(MOVE, f"ld.global{{,.nc}}{LONGEST}", targets=SINCE_BLACKWELL)
def ld(build, line):
    kind, space = modifiers(line)[-1], space_of(line)
    destination, source = line.operands
    items = _items(destination, _elements(line))
    address = build.address(source)
    writes = [build.write(item, kind, wider=kind != "f32") for item in items]
    size = bits(kind) // 8

    def execute(warp, mask):
        found = Access(warp, space, address(warp), mask, size * len(items), "ld").load()
        for i, write in enumerate(writes):
            part = np.ascontiguousarray(found[:, i * size : (i + 1) * size])
            write(warp, part.view(numpy_type(kind))[:, 0], mask)

    return execute


@instruction(MOVE, "ld.shared{,::cta}.b128")
def ld_whole(build, line):
    """128 bits to one register."""
    destination, source = line.operands
    if not isinstance(destination, Register) or destination.type != "b128":
        raise UnsupportedError(f"{destination} is no register of 128 bits")
    address = build.address(source)

    def execute(warp, mask):
        access = Access(warp, "shared", address(warp), mask, 16, "ld")
        values = warp.registers[destination.number].copy()
        values[access.active] = access.load()[access.active].view(np.uint64)
        warp.registers[destination.number] = values

    return execute


@instruction(
    MOVE,
    *(f"st{{,.global,.shared,.shared::cta,.shared::cluster}}{form}" for form in (SHORT, LONG)),
)
@instruction(MOVE, f"st.global{LONGEST}", targets=SINCE_BLACKWELL)
def st(build, line):
    kind, space = modifiers(line)[-1], space_of(line)
    target, source = line.operands
    items = _items(source, _elements(line))
    address = build.address(target)
    reads = [build.read(item, kind, wider=kind != "f32") for item in items]
    size = bits(kind) // 8

    def execute(warp, mask):
        parts = [np.ascontiguousarray(read(warp)).view(np.uint8) for read in reads]
        values = np.concatenate([part.reshape(LANES, size) for part in parts], 1)
        Access(warp, space, address(warp), mask, size * len(items), "st").store(values)

    return execute


def _matrices(line) -> tuple[int, bool]:
    count = next(int(part[1:]) for part in modifiers(line) if part in ("x1", "x2", "x4"))
    return count, "trans" in modifiers(line)


def _whole_warp(mask, what: str) -> None:
    if mask is not None:
        raise EmulatorError(f"{what} without all lanes")


@instruction(MATRIX, "ldmatrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared{,::cta}.b16")
def ldmatrix(build, line):
    count, transposed = _matrices(line)
    destination, source = line.operands
    items = _items(destination, count)
    address, writes = build.address(source), [build.write(item, "b32") for item in items]

    def execute(warp, mask):
        _whole_warp(mask, "ldmatrix")
        rows = None if count == 4 else LANE < 8 * count
        found = Access(warp, "shared", address(warp), rows, 16, "ldmatrix").load()
        matrices = found.view(np.uint16).reshape(4, 8, 8)
        for matrix, write in zip(matrices, writes):
            matrix = matrix.T if transposed else matrix
            write(warp, np.ascontiguousarray(matrix).reshape(-1).view(np.uint32), None)

    return execute


@instruction(MATRIX, "stmatrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared{,::cta}.b16")
def stmatrix(build, line):
    count, transposed = _matrices(line)
    target, source = line.operands
    items = _items(source, count)
    address, reads = build.address(target), [build.read(item, "b32") for item in items]

    def execute(warp, mask):
        _whole_warp(mask, "stmatrix")
        matrices = np.zeros((4, 8, 8), np.uint16)
        for i, read in enumerate(reads):
            matrix = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8)
            matrices[i] = matrix.T if transposed else matrix
        rows = None if count == 4 else LANE < 8 * count
        values = matrices.reshape(LANES, 8).view(np.uint8)
        # A row has four lanes' elements.
        access = Access(warp, "shared", address(warp), rows, 16, "stmatrix")
        access.store(values, lanes=ALL_LANES)

    return execute


WINDOWS = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "param": PARAMETER_WINDOW}


@instruction(MOVE, "cvta{,.to}{.global,.shared,.shared::cta,.param}.u64")
def cvta(build, line):
    window = np.uint64(
        WINDOWS.get(next(p for p in modifiers(line) if p in (*WINDOWS, "global")), 0)
    )
    if "to" in modifiers(line):
        return elementwise(build, line, lambda address: address - window)
    return elementwise(build, line, lambda address: address + window)


@instruction(MOVE, "mapa.shared::cluster{.u32,.u64}")
def mapa(build, line):
    kind = modifiers(line)[-1]

    def function(address, rank):
        offset = address & address.dtype.type(2**BLOCK_SHIFT - 1)
        return offset | rank.astype(address.dtype) << address.dtype.type(BLOCK_SHIFT)

    return elementwise(build, line, function, [kind, "u32"], kind)


@instruction(MOVE, "prefetch.tensormap", "prefetch{.global,}{.L1,.L2}")
def prefetch(build, line):
    """It moves nothing that can be seen; a tensor map has to be where it points."""
    address = build.address(line.operands[0])
    tensor = line.opcode.endswith("tensormap")

    def execute(warp, mask):
        if tensor:
            for lane in lanes(mask):
                warp.tensor_map(int(address(warp)[lane]))

    return execute
