"""tcgen05: the tensor cores of Blackwell, and tensor memory."""

import dataclasses
import functools
import re

import numpy as np

from tests.ptx_emulator.barriers import barrier_at
from tests.ptx_emulator.data_movement import Access
from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.isa import (
    BLACKWELL,
    LANE_IDS,
    WAIT_FOR_LOADS,
    WARP_SIZE,
    Blocked,
    Task,
    active_lanes,
    defines,
    require_all_lanes,
    shared_cluster_address,
    split_shared_address,
)
from tests.ptx_emulator.matrix_operands import ELEMENTS, SharedOperand, accumulate, exact_product
from tests.ptx_emulator.parser import Address, Vector
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.tensor_memory import TensorMemory
from tests.ptx_emulator.vector_clocks import MEMORY, TENSOR, join

defines_tcgen05 = functools.partial(defines, "9.7.16 tcgen05", targets=BLACKWELL)

CTA_GROUPS = "{.cta_group::1,.cta_group::2}"

# Name of the warning that a warp frees tensor memory that another warp has allocated. The ISA only
# asks for one warp, but NVIDIA's libraries use the same one.
OTHER_WARP = "dealloc by another warp"

# Value of words of tensor memory and of registers that are not written yet.
POISON_WORD = 0xFFFFFFFF


def _is_pair(instruction) -> bool:
    """Returns whether the instruction is for two blocks."""
    return "cta_group::2" in modifiers(instruction)


def _cta_group(warp, is_pair: bool) -> list:
    """Returns the warp's block, or the two blocks of its pair."""
    if not is_pair:
        return [warp.block]
    first = warp.block.rank & ~1
    blocks = warp.block.cluster.blocks[first : first + 2]
    if len(blocks) < 2:
        raise EmulatorError("there is cta_group::2 in a cluster of one block")
    return blocks


# Allocation.


@defines_tcgen05(f"tcgen05.alloc{CTA_GROUPS}.sync.aligned.shared::cta.b32")
def alloc(binder, instruction):
    target, count = instruction.operands
    target, count = binder.address_reader(target), binder.reader(count, "u32")
    group_size = 1 + _is_pair(instruction)

    def execute(warp, mask):
        columns, tensor_memory = int(count(warp)[0]), warp.block.tensor_memory
        if columns not in (32, 64, 128, 256, 512):
            raise EmulatorError(
                f"an allocation of {columns} columns of tensor memory is not possible"
            )
        if tensor_memory.relinquished:
            raise EmulatorError("there is an allocation after tcgen05.relinquish_alloc_permit")
        starts = functools.partial(_possible_starts, warp, columns, group_size == 2)
        if not starts():
            return Blocked(
                lambda: bool(starts()),
                lambda: (
                    f"{columns} columns of tensor memory; allocated are {tensor_memory.allocated}"
                ),
            )
        peer_is_launched = warp.clock[MEMORY][warp.machine.agents.cluster_barrier]
        if group_size == 2 and not peer_is_launched:
            raise EmulatorError(
                "tcgen05.alloc is executed for two blocks, and nothing says that the peer has been "
                "launched: no barrier of the cluster comes before it"
            )
        first = warp.machine.place(starts())
        if group_size == 2:
            _starts_of_pair(warp)[_allocations(warp)] = first
        tensor_memory.allocated[first] = (columns, group_size)
        tensor_memory.allocations[first] = warp.agent, warp.time, warp.cluster_arrivals
        tensor_memory.words[:, first : first + columns] = POISON_WORD
        # The address is written to shared memory, where lane 0 points.
        values = np.full(WARP_SIZE, first, np.uint32).view(np.uint8).reshape(WARP_SIZE, 4)
        access = Access(warp, "shared", target(warp), LANE_IDS == 0, 4, "tcgen05.alloc")
        # TMA may overwrite the address without a fence: the ISA names no proxy, and Triton's
        # kernels have no fence.
        access.store(values, fenced=True)
        return _wait_for_peer(warp, instruction) if group_size == 2 else None

    return execute


def _allocations(warp) -> int:
    """Returns the number of the block's earlier allocations with its peer."""
    return warp.block.tensor_memory.collective_counts.get("tcgen05.alloc", 0)


def _starts_of_pair(warp) -> dict[int, int]:
    """Returns the first columns of the allocations that a block and its peer share, by number."""
    return _cta_group(warp, True)[0].tensor_memory.shared_starts


def _possible_starts(warp, columns: int, is_pair: bool) -> set[int]:
    """Returns the columns from which an allocation may begin.

    The ISA promises no column, so a kernel must read the address. In a pair both blocks get the
    same column, whichever of them executes its part of the allocation first.
    """
    if is_pair and _allocations(warp) in _starts_of_pair(warp):
        return {_starts_of_pair(warp)[_allocations(warp)]}
    blocks = _cta_group(warp, is_pair)
    return set.intersection(*(block.tensor_memory.free_starts(columns) for block in blocks))


def _wait_for_peer(warp, instruction) -> Blocked | None:
    """Counts a collective instruction of a pair of blocks, and waits until the peer executes it.

    The first block may wait for the second (9.7.16.5). In the emulator tcgen05.alloc always waits;
    for the other instructions the schedule decides.
    """
    first, second = (block.tensor_memory.collective_counts for block in _cta_group(warp, True))
    own, peer = (first, second) if warp.block.rank % 2 == 0 else (second, first)
    name = ".".join(instruction.opcode.split(".")[:2])
    own[name] = count = own.get(name, 0) + 1
    warp.machine.event()
    if name != "tcgen05.alloc" and not warp.machine.waits_for_peer():
        return None

    def ready():
        return peer.get(name, 0) >= count

    return None if ready() else Blocked(ready, lambda: f"the peer's {name}", done=True)


@defines_tcgen05(f"tcgen05.dealloc{CTA_GROUPS}.sync.aligned.b32")
def dealloc(binder, instruction):
    address, count = (binder.reader(operand, "b32") for operand in instruction.operands)
    group_size = 1 + _is_pair(instruction)

    def execute(warp, mask):
        first, columns = int(address(warp)[0]), int(count(warp)[0])
        tensor_memory, machine = warp.block.tensor_memory, warp.machine
        if tensor_memory.allocated.get(first) != (columns, group_size):
            raise EmulatorError(
                f"there is a tcgen05.dealloc of {columns} columns from {first} on, for "
                f"{group_size} blocks; allocated are {tensor_memory.allocated}"
            )
        for block in _cta_group(warp, group_size == 2):
            if block is warp.block:
                continue
            if not block.tensor_memory.is_allocation_known(first, warp.clock):
                raise RaceError(
                    f"block {warp.block.rank} executes tcgen05.dealloc, and nothing orders it "
                    f"after the tcgen05.alloc of block {block.rank}"
                )
        unfinished = [task for task in machine.tasks if warp.block in (task.queue or ())]
        if unfinished:
            raise EmulatorError(f"tensor memory is freed before {unfinished[0].description}")
        allocating = tensor_memory.allocations[first][0]
        if allocating != warp.agent:
            machine.warn(
                OTHER_WARP, f"{warp} executes tcgen05.dealloc, but warp {allocating} has allocated"
            )
        tensor_memory.check_deallocation(slice(first, first + columns), warp.clock)
        del tensor_memory.allocated[first]
        machine.event()
        return _wait_for_peer(warp, instruction) if group_size == 2 else None

    return execute


@defines_tcgen05(f"tcgen05.relinquish_alloc_permit{CTA_GROUPS}.sync.aligned")
def relinquish_alloc_permit(binder, instruction):
    is_pair = _is_pair(instruction)

    def execute(warp, mask):
        warp.block.tensor_memory.relinquished = True
        return _wait_for_peer(warp, instruction) if is_pair else None

    return execute


@defines_tcgen05("tcgen05.fence{::before_thread_sync,::after_thread_sync}")
def tcgen05_fence(binder, instruction):
    before = instruction.opcode.endswith("before_thread_sync")
    return lambda warp, mask: warp.tcgen05_fence_before() if before else warp.tcgen05_fence_after()


# Loads and stores.

# All shapes and repetitions with at most 128 registers per lane.
SHAPES = [
    f"{{{','.join(f'.{shape}.x{2**i}' for i in range(8 - log_registers))}}}.b32"
    for log_registers, shape in enumerate(("32x32b", "16x128b", "16x256b"))
]
SHAPES.append(SHAPES[0].replace("32x32b", "16x32bx2"))


def _shape(instruction, half_offset: int | None):
    """Returns the part of tensor memory that a load or store accesses, relative to its address.

    Args:
      instruction: a tcgen05.ld or tcgen05.st with a shape of 9.7.16.2.3.
      half_offset: columns from the first to the second half of .16x32bx2; None for other shapes.

    Returns:
      Lanes and columns of tensor memory, [registers, 32 lanes of the warp]; the accessed ranges of
      columns as (first, count); and the number of lanes.
    """
    parts = modifiers(instruction)
    shape = next(part for part in parts if re.fullmatch(r"\d+x\d+b(x2)?", part))
    if (shape == "16x32bx2") != (half_offset is not None):
        raise ValueError("a half-split offset belongs to .16x32bx2, and only to it")
    count = next(int(part[1:]) for part in parts if re.fullmatch(r"x\d+", part))
    if shape == "16x32bx2":
        # The upper 16 lanes of the warp access the second half, in the same lanes.
        rows, columns = np.stack([LANE_IDS % 16] * count), LANE_IDS // 16 * half_offset
        columns = np.stack([columns + i for i in range(count)])
        return rows, columns, ((0, count), (half_offset, count)), 16
    if shape == "32x32b":
        rows, columns, width = [LANE_IDS], [0 * LANE_IDS], 1
    elif shape == "16x128b":
        rows, columns, width = [LANE_IDS // 4, LANE_IDS // 4 + 8], [LANE_IDS % 4] * 2, 4
    else:
        rows = [LANE_IDS // 4, LANE_IDS // 4, LANE_IDS // 4 + 8, LANE_IDS // 4 + 8]
        columns, width = [LANE_IDS % 4 * 2, LANE_IDS % 4 * 2 + 1] * 2, 8
    rows = np.stack(rows * count)
    columns = np.stack([column + width * i for i in range(count) for column in columns])
    return rows, columns, ((0, width * count),), 32 if shape == "32x32b" else 16


def _first_lane(warp, address: int, height: int) -> int:
    """Returns the lane of tensor memory at which a warp's access of `height` lanes begins.

    A warp accesses only its own quarter of the lanes (9.7.16.2.3). Lane 0 stands for the first lane
    of that quarter.
    """
    lane, quarter = address >> 16, warp.number % 4
    if lane // 32 not in (0, quarter) or lane % 32 not in range(0, 33 - height, height):
        raise EmulatorError(
            f"lanes {lane} to {lane + height - 1} of tensor memory are not in the quarter "
            f"{quarter} of {warp}"
        )
    return quarter * 32 + lane % 32


class _TensorMemoryAccess:
    """The registers and the accessed words of a tcgen05.ld or tcgen05.st."""

    def __init__(self, binder, instruction, registers, address, half_offset):
        half = binder.immediate(half_offset[0]) if half_offset else None
        self.rows, self.columns, self.ranges, self.height = _shape(instruction, half)
        self.name = ".".join(instruction.opcode.split(".")[:2])
        self.items = registers.items if isinstance(registers, Vector) else ()
        # A load may not write a register twice.
        count = len(set(self.items) if self.name.endswith("ld") else self.items)
        if count != len(self.rows) or len(half_offset) > 1:
            raise ValueError(f"there are {count} registers in a vector, expected {len(self.rows)}")
        self.address = binder.address_reader(address)

    def locate(self, warp):
        """Checks and returns the words, (lanes, columns) of [registers, 32], and column ranges."""
        addresses = self.address(warp)
        if (addresses != addresses[0]).any():
            raise EmulatorError(f"{self.name} is executed with addresses that differ between lanes")
        address = int(addresses[0])
        first, column = _first_lane(warp, address, self.height), address & 0xFFFF
        for begin, count in self.ranges:
            warp.block.tensor_memory.check_allocated(column + begin, count, self.name)
        ranges = [slice(column + begin, column + begin + count) for begin, count in self.ranges]
        return (first + self.rows, column + self.columns), ranges


@defines_tcgen05(*(f"tcgen05.ld.sync.aligned{shape}" for shape in SHAPES))
def tcgen05_load(binder, instruction):
    destination, source, *half_offset = instruction.operands
    access = _TensorMemoryAccess(binder, instruction, destination, source, half_offset)
    writes = [binder.writer(item, "b32") for item in access.items]
    numbers = [item.number for item in access.items]
    poison = np.full(WARP_SIZE, POISON_WORD, np.uint32)

    def execute(warp, mask):
        tensor_memory = warp.block.tensor_memory
        words, ranges = access.locate(warp)
        for write in writes:
            write(warp, poison, None)

        def record():
            for columns in ranges:
                tensor_memory.record_load(warp.agent, warp.time, columns, warp.clock, "tcgen05.ld")

        def load():
            for write, value in zip(writes, tensor_memory.words[words]):
                write(warp, value, None)

        # The load may read at any time until the wait, so it is recorded at both ends.
        record()
        warp.tensor_loads.append((record, load))
        warp.pending |= dict.fromkeys(numbers, WAIT_FOR_LOADS)

    return execute


@defines_tcgen05("tcgen05.wait::ld.sync.aligned")
def wait_for_loads(binder, instruction):
    def execute(warp, mask):
        loads, warp.tensor_loads = warp.tensor_loads, []
        for record, load in loads:
            record()
            load()
        warp.block.tensor_memory.complete_loads(warp.agent)
        warp.pending = {n: wait for n, wait in warp.pending.items() if wait != WAIT_FOR_LOADS}

    return execute


@defines_tcgen05(*(f"tcgen05.st.sync.aligned{shape}" for shape in SHAPES))
def tcgen05_store(binder, instruction):
    target, *half_offset, source = instruction.operands
    access = _TensorMemoryAccess(binder, instruction, source, target, half_offset)
    reads = [binder.reader(item, "b32") for item in access.items]

    def execute(warp, mask):
        require_all_lanes(mask, "tcgen05.st")
        tensor_memory = warp.block.tensor_memory
        words, ranges = access.locate(warp)
        for columns in ranges:
            tensor_memory.record_store(warp.agent, columns, warp.clock, "tcgen05.st")
        values = np.stack([read(warp) for read in reads])
        tensor_memory.words[words] = POISON_WORD

        def store():
            tensor_memory.words[words] = values

        # The store may happen at any time until the wait; the emulator executes it at the wait.
        warp.tensor_stores.append(store)

    return execute


@defines_tcgen05("tcgen05.wait::st.sync.aligned")
def wait_for_stores(binder, instruction):
    def execute(warp, mask):
        stores, warp.tensor_stores = warp.tensor_stores, []
        for store in stores:
            store()
        warp.block.tensor_memory.complete_stores(warp.agent, warp.time)

    return execute


# Products.


@defines_tcgen05(
    f"tcgen05.commit{CTA_GROUPS}.mbarrier::arrive::one.shared::cluster{{,.multicast::cluster}}.b64",
)
def commit(binder, instruction):
    is_pair, multicast = _is_pair(instruction), "multicast::cluster" in modifiers(instruction)
    address = binder.address_reader(instruction.operands[0])
    members = binder.reader(instruction.operands[1], "b16") if multicast else None

    def execute(warp, mask):
        cluster, machine = warp.block.cluster, warp.machine
        for lane in active_lanes(mask):
            rank, offset = split_shared_address(int(address(warp)[lane]))
            cta_mask = int(members(warp)[lane]) if multicast else 1 << rank
            targets = [rank for rank in range(16) if cta_mask >> rank & 1]
            barriers = [
                barrier_at(warp, shared_cluster_address(rank, offset), cluster=True)
                for rank in targets
            ]
            for barrier in barriers:
                barrier.check_use(warp, by_async_proxy=True)
            # A commit implies a fence::before_thread_sync (9.7.16.6.4). It releases the products,
            # and the actions that were ordered before the last product.
            released = warp.clock_at_last_mma.copy()
            released[[MEMORY, TENSOR], machine.agents.tensor_core] = cluster.mma_issued
            description = f"a tcgen05.commit to {barriers[0]}"

            def signal(barrier, released):
                join(barrier.arriving_clock, released)
                barrier.signal()

            queue = ("products", *_cta_group(warp, is_pair))
            task = Task("multiply", None, description, cluster, queue)

            # Nothing orders the signals of two commits, so each is a task without a queue.
            def run(barriers=barriers, released=released, task=task):
                for barrier in barriers:
                    signal_one = functools.partial(signal, barrier, released)
                    description = f"the signal of {task.description}"
                    machine.submit(
                        Task("signal", signal_one, description, cluster, sequence=task.sequence)
                    )

            task.run = run
            machine.submit(task)

    return execute


@dataclasses.dataclass(frozen=True)
class InstructionDescriptor:
    """The fields of the 32-bit instruction descriptor of tcgen05.mma (9.7.16.4.2).

    Attributes:
      result_type, a_type, b_type: element types of the accumulator and the operands.
      negate: whether each operand is negated.
      transpose: whether each operand is MN-major.
      rows, columns: M and N.
    """

    result_type: str
    a_type: str
    b_type: str
    negate: tuple[bool, bool]
    transpose: tuple[bool, bool]
    rows: int
    columns: int

    @classmethod
    def decode(cls, kind: str, descriptor: int) -> "InstructionDescriptor":
        """Decodes a descriptor for this .kind. Reserved and unsupported bits are errors."""
        operand_types = {
            "f16": {0: "f16", 1: "bf16"},
            "tf32": {2: "tf32"},
            "f8f6f4": {0: "e4m3", 1: "e5m2"},
            "i8": {0: "u8", 1: "s8"},
        }[kind]
        result_types = {2: "s32"} if kind == "i8" else {1: "f32"}
        types = (
            result_types.get(descriptor >> 4 & 3),
            *(operand_types.get(descriptor >> shift & 7) for shift in (7, 10)),
        )
        # These bits must be 0: 0 to 3 (sparsity and saturation), 6, 23 and 29 (reserved), 30 and 31
        # (the shift of .ws).
        if None in types or descriptor & 0b1111 or descriptor & (1 << 6 | 1 << 23 | 7 << 29):
            raise EmulatorError(
                f"the instruction descriptor {descriptor:#x} for kind::{kind} is invalid"
            )
        flags = [bool(descriptor >> bit & 1) for bit in (13, 14, 15, 16)]
        if kind == "i8" and any(flags[:2]):
            raise EmulatorError(f"integers cannot be negated: {descriptor:#x}")
        return cls(
            *types,
            negate=tuple(flags[:2]),
            transpose=tuple(flags[2:]),
            columns=(descriptor >> 17 & 0x3F) << 3,
            rows=(descriptor >> 24 & 0x1F) << 4,
        )

    def check_shape(self, blocks: int) -> None:
        """Raises an error for shapes that do not exist (9.7.16.2.1) or are not supported."""
        if blocks == 2:
            exists = (
                self.rows in (128, 256) and self.columns % 32 == 0 and 32 <= self.columns <= 256
            )
        else:
            step = {64: 8, 128: 16}.get(self.rows)
            exists = step and self.columns % step == 0 and step <= self.columns <= 256
        if not exists:
            raise EmulatorError(f"cta_group::{blocks} cannot multiply {self.rows} x {self.columns}")
        if self.rows // blocks != 128 and blocks == 2:
            raise UnsupportedError(
                f"{self.rows // blocks} rows in each of two blocks are not supported"
            )


@dataclasses.dataclass(frozen=True)
class TensorMemoryOperand:
    """A first operand in tensor memory: rows are lanes, columns hold K packed (9.7.16.10.5)."""

    column: int

    def read(self, block, rows: int, depth: int, dtype) -> np.ndarray:
        """Reads the elements, [rows, depth]."""
        words = block.tensor_memory.words[:rows, self.columns(depth, dtype)]
        return np.ascontiguousarray(words).view(dtype)

    def columns(self, depth: int, dtype) -> slice:
        """Returns the columns of tensor memory that the operand occupies."""
        return slice(self.column, self.column + depth * np.dtype(dtype).itemsize // 4)

    def record_read(
        self, block, rows, depth, dtype, agent: int, time: int, warp, lane: int, description: str
    ) -> None:
        """Checks and records a read; the arguments are those of `SharedOperand.record_read`."""
        if rows != TensorMemory.LANES:
            raise UnsupportedError(
                f"a first operand of {rows} rows in tensor memory is not supported"
            )
        columns = self.columns(depth, dtype)
        width = columns.stop - columns.start
        block.tensor_memory.check_allocated(columns.start, width, description)
        block.tensor_memory.record_operand_read(time, columns, warp.clock, description)


@defines_tcgen05(
    f"tcgen05.mma{CTA_GROUPS}{{.kind::f16,.kind::f8f6f4}}",
    "tcgen05.mma.cta_group::1.kind::tf32",
)
@defines_tcgen05(f"tcgen05.mma{CTA_GROUPS}.kind::i8", targets=("sm_100a",))
def mma(binder, instruction):
    kind = next(part for part in modifiers(instruction) if part.startswith("kind::"))[6:]
    is_pair = _is_pair(instruction)
    target, a, b, descriptor, enable_input_d = instruction.operands
    target = binder.address_reader(target)
    in_tensor_memory = isinstance(a, Address)
    read_a = binder.address_reader(a) if in_tensor_memory else binder.reader(a, "b64")
    read_b, read_descriptor = binder.reader(b, "b64"), binder.reader(descriptor, "b32")
    read_accumulates = binder.reader(enable_input_d, "pred")

    def execute(warp, mask):
        active = active_lanes(mask)
        if len(active) != 1:
            raise EmulatorError(f"tcgen05.mma is executed by {len(active)} lanes")
        lane = active[0]
        if is_pair and warp.block.rank & 1:
            raise EmulatorError("the second block executes tcgen05.mma for two blocks")
        fields = InstructionDescriptor.decode(kind, int(read_descriptor(warp)[lane]))
        blocks = _cta_group(warp, is_pair)
        fields.check_shape(len(blocks))
        column, a = int(target(warp)[lane]), int(read_a(warp)[lane])
        if column >> 16:
            raise EmulatorError(f"the accumulator begins with lane {column >> 16}, expected 0")
        shared_operand = functools.partial(
            SharedOperand.from_tcgen05_descriptor, machine=warp.machine
        )
        if not in_tensor_memory:
            operand_a = shared_operand(a, transposed=fields.transpose[0])
        elif a >> 16 or fields.transpose[0]:
            raise UnsupportedError(
                f"the first operand in tensor memory is at {a:#x}; it must begin with lane 0 and "
                "be K-major"
            )
        else:
            operand_a = TensorMemoryOperand(a)
        operand_b = shared_operand(int(read_b(warp)[lane]), transposed=fields.transpose[1])
        accumulates = bool(read_accumulates(warp)[lane])
        operands = operand_a, operand_b
        _multiply(warp, int(lane), blocks, fields, column, operands, accumulates, instruction)

    return execute


def _multiply(
    warp,
    lane: int,
    blocks,
    fields: InstructionDescriptor,
    column: int,
    operands,
    accumulates: bool,
    instruction,
) -> None:
    """Issues a product over 32 bytes of K. Each block holds its share of the rows of A and B."""
    cluster, machine = warp.block.cluster, warp.machine
    cluster.mma_issued += 1
    join(warp.clock_at_last_mma, warp.clock)
    dtypes = ELEMENTS[fields.a_type], ELEMENTS[fields.b_type]
    depth = 32 // np.dtype(dtypes[0]).itemsize
    shares = fields.rows // len(blocks), fields.columns // len(blocks)
    columns = slice(column, column + fields.columns)
    description = f"tcgen05.mma of line {instruction.line}"
    # An accumulator of 64 rows uses 16 lanes of each quarter (9.7.16.10.5, layout F).
    row = np.arange(shares[0])
    lanes = row if shares[0] == 128 else row // 16 * 32 + row % 16
    agent, sequence = machine.agents.tensor_core, cluster.mma_issued
    for block in blocks:
        block.tensor_memory.check_allocated(column, fields.columns, description)
        block.tensor_memory.record_accumulation(sequence, columns, warp.clock, description)
        for operand, rows, dtype in zip(operands, shares, dtypes):
            operand.record_read(block, rows, depth, dtype, agent, sequence, warp, lane, description)

    def run():
        a, b = (
            np.concatenate([operand.read(block, rows, depth, dtype) for block in blocks])
            for operand, rows, dtype in zip(operands, shares, dtypes)
        )
        sign = -1 if fields.negate[0] != fields.negate[1] else 1
        values = sign * exact_product(a, b)
        for i, block in enumerate(blocks):
            words = block.tensor_memory.words
            old = np.ascontiguousarray(words[lanes, columns]) if accumulates else None
            added = values[i * shares[0] : (i + 1) * shares[0]]
            words[lanes, columns] = accumulate(old, added, fields.result_type)

    machine.submit(Task("multiply", run, description, cluster, ("products", *blocks)))
