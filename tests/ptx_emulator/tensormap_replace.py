"""Tensor maps that a kernel makes: tensormap.replace, tensormap.cp_fenceproxy and their fence.

A kernel sets the fields of a tensor map in shared memory and copies it to global memory, where TMA
may use it after a fence.proxy.tensormap. The ISA leaves the layout of its 128 bytes open; the
emulator uses LAYOUT.
"""

import dataclasses

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.isa import (
    BLACKWELL,
    HOPPER,
    active_lanes,
    defines,
    require_all_lanes,
    split_shared_address,
)
from tests.ptx_emulator.memory import SHARED_BASE, SHARED_WINDOW, units_in_range, words_in_range
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.tma import SWIZZLE_BYTES, TENSOR_MAP_BYTES, TensorMap
from tests.ptx_emulator.vector_clocks import MEMORY

REPLACE, SYNC = "9.7.9.28 tensormap.replace", "9.7.13 synchronisation"

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

# Bytes of an element, indexed by the value of .elemtype (9.7.9.28): u8, u16, u32, s32, u64, s64,
# f16, f32, f32.ftz, f64, bf16, tf32, tf32.ftz.
ITEMSIZES = dict(enumerate((1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)))


@dataclasses.dataclass
class DeviceTensorMap:
    """A tensor map in global memory, described by its bytes there.

    Attributes:
      fences: cluster, agent and time of each fence.proxy.tensormap that acquired the tensor map.
    """

    fences: list[tuple] = dataclasses.field(default_factory=list)


def decode(content: bytes) -> TensorMap:
    """Decodes the tensor map that these bytes describe."""
    (record,) = np.frombuffer(content, LAYOUT)
    rank = int(record["rank"]) + 1
    element, swizzle = int(record["elemtype"]), int(record["swizzle_mode"])
    fields = [int(record[name]) for name in ("interleave_layout", "fill_mode", "swizzle_atomicity")]
    if (
        element not in ITEMSIZES
        or swizzle not in SWIZZLE_BYTES
        or any(fields)
        or record["reserved"]
    ):
        raise UnsupportedError(f"a tensor map with {record} is not supported")
    if rank > 5 or not (record["element_stride"][:rank] == 1).all():
        raise UnsupportedError(f"a tensor map with {record} is not supported")
    return TensorMap(
        base=int(record["global_address"]),
        itemsize=ITEMSIZES[element],
        dimensions=tuple(record["global_dim"][:rank].tolist()),
        strides=(ITEMSIZES[element], *record["global_stride"][: rank - 1].tolist()),
        box=tuple(record["box_dim"][:rank].tolist()),
        swizzle=SWIZZLE_BYTES[swizzle],
        name="the tensor of a map that the kernel made",
    )


def find_tensor_map(warp, address: int) -> TensorMap:
    """Returns the tensor map at a generic address; if the kernel made it, a fence must precede."""
    machine = warp.machine
    if address in machine.tensor_maps:
        return machine.tensor_maps[address]
    if address not in machine.device_tensor_maps:
        known = ", ".join(hex(a) for a in (*machine.tensor_maps, *machine.device_tensor_maps))
        raise EmulatorError(
            f"there is no tensor map at {address:#x}; known tensor maps are at {known}"
        )
    if not any(
        cluster is warp.block.cluster and warp.clock[MEMORY][agent] >= time
        for cluster, agent, time in machine.device_tensor_maps[address].fences
    ):
        raise RaceError(
            f"the tensor map at {address:#x} is used, and no fence.proxy.tensormap that acquires "
            "it is ordered before the use"
        )
    begin = machine.memory.offset_of(address, TENSOR_MAP_BYTES)
    return decode(machine.memory.bytes[begin : begin + TENSOR_MAP_BYTES].tobytes())


@defines(
    REPLACE,
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64",
    "tensormap.replace.tile{.rank,.elemtype,.interleave_layout,.swizzle_mode,.fill_mode}"
    ".shared::cta.b1024.b32",
    "tensormap.replace.tile{.box_dim,.global_dim,.element_stride}.shared::cta.b1024.b32",
    "tensormap.replace.tile.global_stride.shared::cta.b1024.b64",
    targets=HOPPER + BLACKWELL,
)
def replace(binder, instruction):
    field, ptx_type = modifiers(instruction)[2], modifiers(instruction)[-1]
    base, *ordinal, value = instruction.operands
    dtype, field_offset = LAYOUT.fields[field][:2]
    count = dtype.shape[0] if dtype.shape else 1
    if len(ordinal) != bool(dtype.shape):
        raise ValueError(
            f"there are {len(ordinal)} ordinals for {field}, expected {int(bool(dtype.shape))}"
        )
    dimension = binder.immediate(ordinal[0]) if ordinal else 0
    if not 0 <= dimension < count:
        raise EmulatorError(f"it sets {field} of dimension {dimension}, expected 0 to {count - 1}")
    # Some fields must be set to constants (9.7.9.28).
    if ptx_type == "b32" and not dtype.shape and field != "rank":
        binder.immediate(value)
    address, read = binder.address_reader(base), binder.reader(value, ptx_type)
    size = int(ptx_type[1:]) // 8

    def execute(warp, mask):
        shared = warp.block.shared
        for lane in map(int, active_lanes(mask)):
            offset = _own_offset(warp, int(address(warp)[lane]), instruction.opcode)
            # The instruction is a weak access to the whole tensor map (9.7.9.28).
            words = words_in_range(offset, TENSOR_MAP_BYTES)
            units = units_in_range(offset, TENSOR_MAP_BYTES)
            shared.record_read(warp.agent, warp.time, words, warp.clock, instruction.opcode)
            shared.record_write(warp.agent, warp.time, words, warp.clock, instruction.opcode)
            shared.record_generic_store(warp.agent, warp.time, units, 1 << lane)
            content = int(read(warp)[lane]).to_bytes(size, "little")
            begin = offset + field_offset + dimension * size
            shared.bytes[begin : begin + size] = np.frombuffer(content, np.uint8)
        warp.machine.event()

    return execute


def _own_offset(warp, address: int, description: str) -> int:
    """Returns the offset of a tensor map in the shared memory of the warp's block."""
    address -= SHARED_WINDOW if address >= SHARED_WINDOW else 0
    rank, offset = split_shared_address(address)
    if rank != warp.block.rank or offset % TENSOR_MAP_BYTES:
        raise EmulatorError(
            f"{description}: there is a tensor map in block {rank} at {offset - SHARED_BASE}, "
            f"expected in the warp's own block at a multiple of {TENSOR_MAP_BYTES}"
        )
    warp.block.shared.check_bounds(offset, TENSOR_MAP_BYTES, description)
    return offset


def _check_size(binder, operand) -> None:
    """Checks that the size operand of a copy or fence is that of a tensor map."""
    if binder.immediate(operand) != TENSOR_MAP_BYTES:
        raise UnsupportedError(
            f"it is for a tensor map of {operand} bytes, expected {TENSOR_MAP_BYTES}"
        )


@defines(
    SYNC,
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release{.cta,.cluster,.gpu,.sys}"
    ".sync.aligned",
)
def cp_fenceproxy(binder, instruction):
    target, source, size = instruction.operands
    _check_size(binder, size)
    target, source = binder.address_reader(target), binder.address_reader(source)

    def execute(warp, mask):
        require_all_lanes(mask, instruction.opcode)
        targets, sources = target(warp), source(warp)
        if (targets != targets[0]).any() or (sources != sources[0]).any():
            raise EmulatorError(
                f"{instruction.opcode} is executed with addresses that differ between lanes"
            )
        address = int(targets[0])
        offset = _own_offset(warp, int(sources[0]), instruction.opcode)
        if address % TENSOR_MAP_BYTES:
            raise EmulatorError(
                f"a tensor map is copied to {address:#x}, which is not a multiple of "
                f"{TENSOR_MAP_BYTES}"
            )
        shared, memory = warp.block.shared, warp.machine.memory
        words = words_in_range(offset, TENSOR_MAP_BYTES)
        shared.record_read(warp.agent, warp.time, words, warp.clock, instruction.opcode)
        begin = memory.offset_of(address, TENSOR_MAP_BYTES)
        content = shared.bytes[offset : offset + TENSOR_MAP_BYTES]
        memory.bytes[begin : begin + TENSOR_MAP_BYTES] = content
        warp.machine.device_tensor_maps[address] = DeviceTensorMap()
        warp.machine.event()

    return execute


@defines(SYNC, "fence.proxy.tensormap::generic.acquire{.cta,.cluster,.gpu,.sys}")
def fence_tensormap(binder, instruction):
    address, size = instruction.operands
    _check_size(binder, size)
    address = binder.address_reader(address)

    def execute(warp, mask):
        for at in {int(address(warp)[lane]) for lane in active_lanes(mask)}:
            if at not in warp.machine.device_tensor_maps:
                raise EmulatorError(f"no tensor map has been copied to {at:#x}")
            tensor_map = warp.machine.device_tensor_maps[at]
            tensor_map.fences.append((warp.block.cluster, warp.agent, warp.time))

    return execute
