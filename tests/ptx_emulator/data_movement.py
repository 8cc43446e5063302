"""Loads and stores, ldmatrix and stmatrix, and conversions of addresses."""

import numpy as np

from tests.ptx_emulator.barriers import barrier_at
from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.isa import (
    FULL_MASK,
    LANE_IDS,
    SINCE_BLACKWELL,
    WARP_SIZE,
    Task,
    active_lanes,
    defines,
    dtype_of,
    require_all_lanes,
)
from tests.ptx_emulator.memory import (
    BLOCK_SHIFT,
    PARAMETER_WINDOW,
    POISON,
    SHARED_WINDOW,
    UNIT_BYTES,
    WINDOW_BYTES,
    WORD_BYTES,
)
from tests.ptx_emulator.parser import Register, Vector, bits
from tests.ptx_emulator.scalar import elementwise, modifiers
from tests.ptx_emulator.vector_clocks import join

MOVE, MATRIX = "9.7.9 data movement", "9.7.14 matrices"


class Access:
    """A load or store of `size` contiguous bytes by each active lane, in one state space.

    Checks alignment and bounds.

    Attributes:
      active: numbers of the active lanes.
      space: "shared", "global" or "param"; a generic address has been resolved.
      block: block that owns the shared memory; None for other state spaces.
      offsets: offset in `bytes` of each active lane's first byte.
      bytes: all bytes of the memory.
    """

    def __init__(self, warp, space: str, addresses, mask, size: int, description: str):
        self.warp, self.size, self.description = warp, size, description
        self.active = active_lanes(mask)
        addresses = addresses[self.active].astype(np.uint64)
        misaligned = addresses[addresses % np.uint64(size) != 0]
        if len(misaligned):
            raise EmulatorError(
                f"{description} of {size} bytes at {int(misaligned[0]):#x} is not aligned"
            )
        self.space, addresses = _resolve_space(space, addresses)
        self.block = None
        if self.space == "shared":
            ranks = addresses >> np.uint64(BLOCK_SHIFT)
            offsets = addresses & np.uint64(2**BLOCK_SHIFT - 1)
            block = self.block = self._find_block(ranks, space)
            self.offsets = offsets.astype(np.int64)
            for offset in (self.offsets.min(), self.offsets.max()):
                block.shared.check_bounds(int(offset), size, description)
            self.bytes = block.shared.bytes
        elif self.space == "global":
            memory = warp.machine.memory
            self.offsets = memory.offsets_of(addresses, size)
            self.bytes = memory.bytes
        else:
            self.offsets, self.bytes = addresses.astype(np.int64), warp.machine.parameters
            if self.offsets.min() < 0 or self.offsets.max() + size > len(self.bytes):
                raise EmulatorError(
                    f"{description} of {size} bytes is beyond the kernel's parameters"
                )

    def _find_block(self, ranks, space: str):
        rank = int(ranks[0])
        blocks = self.warp.block.cluster.blocks
        if (ranks != rank).any():
            raise UnsupportedError("lanes access shared memory of different blocks")
        if rank >= len(blocks):
            raise EmulatorError(f"{self.description}: the cluster has no block {rank}")
        if space in ("shared", "shared::cta") and rank != self.warp.block.rank:
            raise EmulatorError(
                f"{self.description} has an address in block {rank}, expected the warp's own block"
            )
        block = blocks[rank]
        if not block.alive:
            raise EmulatorError(f"{self.description}: block {rank} of the cluster has exited")
        return block

    @property
    def index(self):
        """Returns the positions of the accessed bytes in `bytes`, [active lanes, size]."""
        return self.offsets[:, None] + np.arange(self.size)

    def load(self) -> np.ndarray:
        """Loads the bytes, [32, size]; those of inactive lanes are zero."""
        warp = self.warp
        if self.block:
            words = np.unique(self.index // WORD_BYTES)
            self.block.shared.record_read(
                warp.agent, warp.time, words, warp.clock, self.description
            )
        content = np.zeros((WARP_SIZE, self.size), np.uint8)
        content[self.active] = self.bytes[self.index]
        return content

    def store(self, values: np.ndarray, *, fenced: bool = False, lanes: int | None = None) -> None:
        """Stores the active lanes' bytes.

        Args:
          values: bytes, [32, size].
          fenced: whether the asynchronous proxy sees the store without a fence.
          lanes: the lanes whose data each active lane stores, as bits; by default its own.
        """
        warp = self.warp
        if self.space == "param":
            raise EmulatorError("there is a store to a kernel parameter")
        values = values[self.active]
        self._check_equal_values(values)
        unchanged = (self.bytes[self.index] == values).all()
        self.bytes[self.index] = values
        if self.block:
            words = np.unique(self.index // WORD_BYTES)
            try:
                self.block.shared.record_write(
                    warp.agent, warp.time, words, warp.clock, self.description
                )
            except RaceError:
                if not (unchanged and warp.machine.allows("same value stored")):
                    raise
            if not fenced:
                units, lanes = self._touched_units(lanes)
                self.block.shared.record_generic_store(warp.agent, warp.time, units, lanes)
        warp.machine.event()

    def _touched_units(self, lanes: int | None) -> tuple[np.ndarray, np.ndarray | int]:
        """Returns the accessed units of 16 bytes, and the lanes that access each, as bits."""
        # An access is aligned to its size, so each part of 16 bytes is in one unit.
        units = (self.offsets[:, None] + np.arange(0, self.size, UNIT_BYTES)) // UNIT_BYTES
        if lanes is not None:
            return np.unique(units), lanes
        distinct, inverse = np.unique(units, return_inverse=True)
        lanes_of_unit = np.zeros(len(distinct), np.uint32)
        lane_bits = np.uint32(1) << self.active.astype(np.uint32)
        np.bitwise_or.at(lanes_of_unit, inverse.reshape(units.shape), lane_bits[:, None])
        return distinct, lanes_of_unit

    def _check_equal_values(self, values: np.ndarray) -> None:
        """Checks that lanes store equal values to one address.

        The ISA leaves open which lane's value remains.
        """
        if len(set(self.offsets.tolist())) == len(self.offsets):
            return
        _, first, inverse = np.unique(self.offsets, return_index=True, return_inverse=True)
        differs = (values != values[first[inverse]]).any(1)
        if differs.any():
            i = int(np.nonzero(differs)[0][0])
            one, other = self.active[first[inverse[i]]], self.active[i]
            raise RaceError(
                f"{self.description}: lanes {one} and {other} write different values to one "
                f"address in {self.space} memory"
            )


def _resolve_space(space: str, addresses):
    """Returns the state space of addresses, and the addresses in it.

    The first generic address determines the state space. Generic addresses of shared memory become
    shared::cluster addresses.
    """
    if space.startswith("shared"):
        return "shared", addresses
    if space.startswith("param"):
        return "param", addresses
    if space == "global" or not len(addresses):
        return "global", addresses
    first = int(addresses[0])
    for name, begin in (("shared", SHARED_WINDOW), ("param", PARAMETER_WINDOW)):
        if begin <= first < begin + WINDOW_BYTES:
            return name, addresses - np.uint64(begin)
    return "global", addresses


def state_space(instruction) -> str:
    """Returns the state space in an opcode; "generic" if the opcode names none."""
    spaces = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry")
    return next((part for part in modifiers(instruction) if part in spaces), "generic")


# The vectors and types of loads and stores: with elements of up to 32 bits, with elements of 64
# bits, and with 32 bytes, which exist only on Blackwell and for global memory (9.7.9.8).
FORMS = "{,.v2,.v4}{.b8,.b16,.b32,.u8,.u16,.u32,.s8,.s16,.s32,.f32}"
FORMS_64, FORMS_256 = "{,.v2}{.b64,.u64,.s64}", ".v4{.b64,.u64,.s64}"


def _vector_items(operand, count: int) -> tuple:
    """Returns the registers of a vector operand; raises an error unless there are `count`."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise UnsupportedError(f"the vector has {len(items)} registers instead of {count}")
    return items


def _vector_length(instruction) -> int:
    """Returns the number of elements of .v2, .v4 and so on; 1 without a vector."""
    return next((int(part[1:]) for part in modifiers(instruction) if part in ("v2", "v4")), 1)


@defines(
    MOVE,
    f"ld{{,.shared,.shared::cta,.shared::cluster,.param,.param::entry}}{FORMS}",
    f"ld{{,.shared,.shared::cta,.shared::cluster,.param,.param::entry}}{FORMS_64}",
    *(f"ld.global{{,.nc}}{form}" for form in (FORMS, FORMS_64)),
)
@defines(MOVE, f"ld.global{{,.nc}}{FORMS_256}", targets=SINCE_BLACKWELL)
def ld(binder, instruction):
    ptx_type, space = modifiers(instruction)[-1], state_space(instruction)
    destination, source = instruction.operands
    items = _vector_items(destination, _vector_length(instruction))
    address = binder.address_reader(source)
    writes = [binder.writer(item, ptx_type, wider=ptx_type != "f32") for item in items]
    size = bits(ptx_type) // 8

    def execute(warp, mask):
        found = Access(warp, space, address(warp), mask, size * len(items), "ld").load()
        for i, write in enumerate(writes):
            part = np.ascontiguousarray(found[:, i * size : (i + 1) * size])
            write(warp, part.view(dtype_of(ptx_type))[:, 0], mask)

    return execute


@defines(MOVE, "ld.shared{,::cta}.b128")
def ld_b128(binder, instruction):
    """Loads 16 bytes to one register (ld.b128)."""
    destination, source = instruction.operands
    if not isinstance(destination, Register) or destination.type != "b128":
        raise UnsupportedError(f"{destination} is not a register of 128 bits")
    address = binder.address_reader(source)

    def execute(warp, mask):
        access = Access(warp, "shared", address(warp), mask, 16, "ld")
        values = warp.registers[destination.number].copy()
        values[access.active] = access.load()[access.active].view(np.uint64)
        warp.registers[destination.number] = values

    return execute


@defines(
    MOVE,
    *(f"st{{,.global,.shared,.shared::cta,.shared::cluster}}{form}" for form in (FORMS, FORMS_64)),
)
@defines(MOVE, f"st.global{FORMS_256}", targets=SINCE_BLACKWELL)
def st(binder, instruction):
    ptx_type, space = modifiers(instruction)[-1], state_space(instruction)
    target, source = instruction.operands
    items = _vector_items(source, _vector_length(instruction))
    address = binder.address_reader(target)
    reads = [binder.reader(item, ptx_type, wider=ptx_type != "f32") for item in items]
    size = bits(ptx_type) // 8

    def execute(warp, mask):
        parts = [np.ascontiguousarray(read(warp)).view(np.uint8) for read in reads]
        values = np.concatenate([part.reshape(WARP_SIZE, size) for part in parts], 1)
        Access(warp, space, address(warp), mask, size * len(items), "st").store(values)

    return execute


@defines(MOVE, "st.async{,.weak}.shared::cluster.mbarrier::complete_tx::bytes{,.v2,.v4}.b32")
def st_async(binder, instruction):
    """Stores to shared memory of a block of the cluster, and signals an mbarrier of that block.

    The signal releases what the issuing warp has done before (9.7.9.12).
    """
    target, source, mbarrier = instruction.operands
    items = _vector_items(source, _vector_length(instruction))
    address, signalled = binder.address_reader(target), binder.address_reader(mbarrier)
    reads = [binder.reader(item, "b32") for item in items]

    def execute(warp, mask):
        access = Access(warp, "shared::cluster", address(warp), mask, 4 * len(items), "st.async")
        values = np.stack([read(warp).view(np.uint32) for read in reads], 1)[access.active]
        values = np.ascontiguousarray(values).view(np.uint8)
        (at,) = {int(x) for x in signalled(warp)[access.active]}
        barrier = barrier_at(warp, at, cluster=True)
        barrier.check_use(warp, by_async_proxy=False)
        if barrier.block is not access.block:
            raise EmulatorError("the data and the mbarrier of a st.async are in different blocks")
        phase, released = barrier.phase, warp.machine.agents.clock()
        warp.release(released)
        words = np.unique(access.index // WORD_BYTES)
        access.block.shared.record_write(
            barrier.agent, phase + 1, words, warp.clock, access.description
        )
        access.bytes[access.index] = POISON

        def run():
            if barrier.phase != phase:
                raise EmulatorError(f"a st.async signals a later phase than expected: {barrier}")
            if not barrier.block.alive:
                raise EmulatorError(f"there is a st.async to a block that has exited: {barrier}")
            access.bytes[access.index] = values
            join(barrier.arriving_clock, released)
            barrier.complete_tx(values.size)

        description = f"line {instruction.line}: the st.async of {warp} to {barrier}"
        warp.machine.submit(Task("arrival", run, description, warp.block.cluster, (warp,)))
        warp.machine.event()

    return execute


def _matrix_form(instruction) -> tuple[int, bool]:
    """Returns the number of matrices, and whether they are transposed."""
    count = next(int(part[1:]) for part in modifiers(instruction) if part in ("x1", "x2", "x4"))
    return count, "trans" in modifiers(instruction)


@defines(MATRIX, "ldmatrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared{,::cta}.b16")
def ldmatrix(binder, instruction):
    count, transposed = _matrix_form(instruction)
    destination, source = instruction.operands
    items = _vector_items(destination, count)
    address, writes = binder.address_reader(source), [binder.writer(item, "b32") for item in items]

    def execute(warp, mask):
        require_all_lanes(mask, "ldmatrix")
        rows = None if count == 4 else LANE_IDS < 8 * count
        found = Access(warp, "shared", address(warp), rows, 16, "ldmatrix").load()
        matrices = found.view(np.uint16).reshape(4, 8, 8)
        for matrix, write in zip(matrices, writes):
            matrix = matrix.T if transposed else matrix
            write(warp, np.ascontiguousarray(matrix).reshape(-1).view(np.uint32), None)

    return execute


@defines(MATRIX, "stmatrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared{,::cta}.b16")
def stmatrix(binder, instruction):
    count, transposed = _matrix_form(instruction)
    target, source = instruction.operands
    items = _vector_items(source, count)
    address, reads = binder.address_reader(target), [binder.reader(item, "b32") for item in items]

    def execute(warp, mask):
        require_all_lanes(mask, "stmatrix")
        matrices = np.zeros((4, 8, 8), np.uint16)
        for i, read in enumerate(reads):
            matrix = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8)
            matrices[i] = matrix.T if transposed else matrix
        rows = None if count == 4 else LANE_IDS < 8 * count
        values = matrices.reshape(WARP_SIZE, 8).view(np.uint8)
        # Each address is that of a row, whose elements come from four different lanes.
        access = Access(warp, "shared", address(warp), rows, 16, "stmatrix")
        access.store(values, lanes=FULL_MASK)

    return execute


WINDOW_OF_SPACE = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "param": PARAMETER_WINDOW}


@defines(MOVE, "cvta{,.to}{.global,.shared,.shared::cta,.param}.u64")
def cvta(binder, instruction):
    window = np.uint64(
        WINDOW_OF_SPACE.get(
            next(p for p in modifiers(instruction) if p in (*WINDOW_OF_SPACE, "global")), 0
        )
    )
    if "to" in modifiers(instruction):
        return elementwise(binder, instruction, lambda address: address - window)
    return elementwise(binder, instruction, lambda address: address + window)


@defines(MOVE, "mapa.shared::cluster{.u32,.u64}")
def mapa(binder, instruction):
    ptx_type = modifiers(instruction)[-1]

    def function(address, rank):
        offset = address & address.dtype.type(2**BLOCK_SHIFT - 1)
        return offset | rank.astype(address.dtype) << address.dtype.type(BLOCK_SHIFT)

    return elementwise(binder, instruction, function, [ptx_type, "u32"], ptx_type)


@defines(MOVE, "prefetch.tensormap", "prefetch{.global,}{.L1,.L2}")
def prefetch(binder, instruction):
    """Does nothing but check that prefetch.tensormap has the address of a tensor map."""
    address = binder.address_reader(instruction.operands[0])
    tensor = instruction.opcode.endswith("tensormap")

    def execute(warp, mask):
        if tensor:
            for lane in active_lanes(mask):
                warp.tensor_map(int(address(warp)[lane]))

    return execute
