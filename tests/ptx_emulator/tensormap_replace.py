"""Tensor maps that a kernel makes: tensormap.replace, cp_fenceproxy and their fence.

A map in shared memory is 128 bytes whose layout the ISA leaves open: here LAYOUT. It is copied to
global memory, and TMA may use it there after fence.proxy.tensormap.
"""

import dataclasses

import numpy as np

from ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from ptx_emulator.isa import BLACKWELL, HOPPER, block_of, instruction, lanes
from ptx_emulator.memory import SHARED_BEGIN, SHARED_WINDOW
from ptx_emulator.scalar import modifiers
from ptx_emulator.tma import TensorMap, units_of, words_of
from ptx_emulator.vector_clocks import MEMORY

REPLACE, SYNC = "9.7.9.28 tensormap.replace", "9.7.13 synchronisation"

MAP_BYTES = 128
LAYOUT = np.dtype(
    [
        ("global_address", "<u8"),
        ("rank", "<u4"),
        ("elemtype", "<u4"),
        ("interleave_layout", "<u4"),
        ("swizzle_mode", "<u4"),
        ("fill_mode", "<u4"),
        ("swizzle_atomicity", "<u4"),
        ("box_dim", "<u4", 5),
        ("global_dim", "<u4", 5),
        ("element_stride", "<u4", 5),
        ("reserved", "<u4"),
        ("global_stride", "<u8", 4),
    ]
)

# Bytes of .elemtype: u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16, tf32, tf32.ftz.
ITEMSIZE = dict(enumerate((1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)))
SWIZZLE = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclasses.dataclass
class Made:
    """A map in global memory, and (cluster, agent, time) of the fences that make it usable."""

    fences: list[tuple] = dataclasses.field(default_factory=list)


def decoded(content: bytes) -> TensorMap:
    """The map in these bytes."""
    (record,) = np.frombuffer(content, LAYOUT)
    rank = int(record["rank"]) + 1
    kind, swizzle = int(record["elemtype"]), int(record["swizzle_mode"])
    fields = [int(record[name]) for name in ("interleave_layout", "fill_mode", "swizzle_atomicity")]
    if kind not in ITEMSIZE or swizzle not in SWIZZLE or any(fields) or record["reserved"]:
        raise UnsupportedError(f"a tensor map with {record}")
    if rank > 5 or not (record["element_stride"][:rank] == 1).all():
        raise UnsupportedError(f"a tensor map with {record}")
    return TensorMap(
        base=int(record["global_address"]),
        itemsize=ITEMSIZE[kind],
        dimensions=tuple(record["global_dim"][:rank].tolist()),
        strides=(ITEMSIZE[kind], *record["global_stride"][: rank - 1].tolist()),
        box=tuple(record["box_dim"][:rank].tolist()),
        swizzle=SWIZZLE[swizzle],
        name="a tensor of the kernel",
    )


def found(warp, address: int) -> TensorMap:
    """The map at a generic address."""
    machine = warp.machine
    if address in machine.tensor_maps:
        return machine.tensor_maps[address]
    if address not in machine.made_maps:
        known = ", ".join(hex(a) for a in (*machine.tensor_maps, *machine.made_maps))
        raise EmulatorError(f"no tensor map at {address:#x}; there are some at {known}")
    if not any(
        cluster is warp.block.cluster and warp.clock[MEMORY][agent] >= time
        for cluster, agent, time in machine.made_maps[address].fences
    ):
        raise RaceError(
            f"the tensor map at {address:#x} is used, and no fence.proxy.tensormap that acquires "
            "it is ordered before"
        )
    begin = machine.memory.offset(address, MAP_BYTES)
    return decoded(machine.memory.bytes[begin : begin + MAP_BYTES].tobytes())


@instruction(
    REPLACE,
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64",
    "tensormap.replace.tile{.rank,.elemtype,.interleave_layout,.swizzle_mode,.fill_mode}"
    ".shared::cta.b1024.b32",
    "tensormap.replace.tile{.box_dim,.global_dim,.element_stride}.shared::cta.b1024.b32",
    "tensormap.replace.tile.global_stride.shared::cta.b1024.b64",
    targets=HOPPER + BLACKWELL,
)
def replace(build, line):
    field, kind = modifiers(line)[2], modifiers(line)[-1]
    base, *ordinal, value = line.operands
    dtype, at = LAYOUT.fields[field][:2]
    count = dtype.shape[0] if dtype.shape else 1
    if len(ordinal) != bool(dtype.shape):
        raise ValueError("operands")
    place = build.immediate(ordinal[0]) if ordinal else 0
    if not 0 <= place < count:
        raise EmulatorError(f"{field} of dimension {place}")
    if kind == "b32" and not dtype.shape and field != "rank":
        build.immediate(value)
    address, read = build.address(base), build.read(value, kind)
    size = int(kind[1:]) // 8

    def execute(warp, mask):
        shared = warp.block.shared
        for lane in map(int, lanes(mask)):
            offset = _own(warp, int(address(warp)[lane]), line.opcode)
            # A weak access of all of the map (9.7.9.28).
            words = words_of(offset, MAP_BYTES)
            shared.reads(warp.agent, warp.time, words, warp.clock, line.opcode)
            shared.writes(warp.agent, warp.time, words, warp.clock, line.opcode)
            shared.stored(warp.agent, warp.time, units_of(offset, MAP_BYTES), 1 << lane)
            content = int(read(warp)[lane]).to_bytes(size, "little")
            begin = offset + at + place * size
            shared.bytes[begin : begin + size] = np.frombuffer(content, np.uint8)
        warp.machine.event()

    return execute


def _own(warp, address: int, what: str) -> int:
    """The offset of a map in the block's shared memory."""
    address -= SHARED_WINDOW if address >= SHARED_WINDOW else 0
    rank, offset = block_of(address)
    if rank != warp.block.rank or offset % MAP_BYTES:
        raise EmulatorError(f"{what}: a map in block {rank} at {offset - SHARED_BEGIN}")
    warp.block.shared.check(offset, MAP_BYTES, what)
    return offset


def _bytes(build, operand) -> None:
    if build.immediate(operand) != MAP_BYTES:
        raise UnsupportedError(f"a map of {operand} bytes")


@instruction(
    SYNC,
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release{.cta,.cluster,.gpu,.sys}"
    ".sync.aligned",
)
def cp_fenceproxy(build, line):
    target, source, size = line.operands
    _bytes(build, size)
    target, source = build.address(target), build.address(source)

    def execute(warp, mask):
        if mask is not None:
            raise EmulatorError(f"{line.opcode} without all lanes")
        to, of = target(warp), source(warp)
        if (to != to[0]).any() or (of != of[0]).any():
            raise EmulatorError(f"{line.opcode} with addresses that differ between lanes")
        address, offset = int(to[0]), _own(warp, int(of[0]), line.opcode)
        if address % MAP_BYTES:
            raise EmulatorError(f"a map at {address:#x}")
        shared, memory = warp.block.shared, warp.machine.memory
        words = words_of(offset, MAP_BYTES)
        shared.reads(warp.agent, warp.time, words, warp.clock, line.opcode)
        begin = memory.offset(address, MAP_BYTES)
        memory.bytes[begin : begin + MAP_BYTES] = shared.bytes[offset : offset + MAP_BYTES]
        warp.machine.made_maps[address] = Made()
        warp.machine.event()

    return execute


@instruction(SYNC, "fence.proxy.tensormap::generic.acquire{.cta,.cluster,.gpu,.sys}")
def fence_tensormap(build, line):
    address, size = line.operands
    _bytes(build, size)
    address = build.address(address)

    def execute(warp, mask):
        for place in {int(address(warp)[lane]) for lane in lanes(mask)}:
            if place not in warp.machine.made_maps:
                raise EmulatorError(f"no map has been copied to {place:#x}")
            made = warp.machine.made_maps[place]
            made.fences.append((warp.block.cluster, warp.agent, warp.time))

    return execute
