"""The tensor cores of Blackwell: tcgen05 and tensor memory."""

import dataclasses
import functools
import re

import numpy as np

from ptx_emulator.barriers import barrier_at
from ptx_emulator.data_movement import Access
from ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from ptx_emulator.isa import (
    BLACKWELL,
    LANE,
    LANES,
    WAIT_FOR_LOADS,
    Blocked,
    Task,
    block_of,
    instruction,
    lanes,
)
from ptx_emulator.matrix_operands import ELEMENTS, Matrix, accumulated, product
from ptx_emulator.parser import Address, Vector
from ptx_emulator.scalar import modifiers
from ptx_emulator.tensor_memory import TensorMemory
from ptx_emulator.vector_clocks import MEMORY, TENSOR, learn

tcgen05 = functools.partial(instruction, "9.7.16 tcgen05", targets=BLACKWELL)


def _blocks(warp, pair: bool) -> list:
    """The blocks of a cta_group."""
    if not pair:
        return [warp.block]
    first = warp.block.rank & ~1
    blocks = warp.block.cluster.blocks[first : first + 2]
    if len(blocks) < 2:
        raise EmulatorError("cta_group::2 in a cluster of one block")
    return blocks


def _is_pair(line) -> bool:
    return "cta_group::2" in modifiers(line)


GROUPS = "{.cta_group::1,.cta_group::2}"


@tcgen05(f"tcgen05.alloc{GROUPS}.sync.aligned.shared::cta.b32")
def alloc(build, line):
    address, count = build.address(line.operands[0]), build.read(line.operands[1], "u32")
    group = 1 + _is_pair(line)

    def execute(warp, mask):
        columns, tensor = int(count(warp)[0]), warp.block.tensor
        if columns not in (32, 64, 128, 256, 512):
            raise EmulatorError(f"an allocation of {columns} columns of tensor memory")
        if tensor.relinquished:
            raise EmulatorError("an allocation after tcgen05.relinquish_alloc_permit")
        first = tensor.free(columns)
        if first is None:
            return Blocked(
                lambda: tensor.free(columns) is not None,
                lambda: f"{columns} columns of tensor memory beside {tensor.allocated}",
            )
        launched = warp.clock[MEMORY][warp.machine.agents.cluster_barrier]
        if group == 2 and not launched:
            raise EmulatorError(
                "tcgen05.alloc for two blocks, and nothing says that the peer has been launched: "
                "no barrier of the cluster comes before it"
            )
        tensor.allocated[first] = (columns, group)
        tensor.allocations[first] = warp.agent, warp.time, warp.cluster_arrivals
        tensor.words[:, first : first + columns] = 0xFFFFFFFF
        # The address is written to shared memory, for which one lane's address counts.
        values = np.full(LANES, first, np.uint32).view(np.uint8).reshape(LANES, 4)
        one = LANE == 0
        access = Access(warp, "shared", address(warp), one, 4, "tcgen05.alloc")
        # TMA may overwrite it without a fence: the ISA names no proxy, and Triton relies on it.
        access.store(values, fenced=True)
        return _wait_for_peer(warp, line) if group == 2 else None

    return execute


def _wait_for_peer(warp, line) -> Blocked | None:
    """Notes that a block has executed a collective instruction of its pair, and waits for its peer.

    The first one may wait for the second (9.7.16.5): tcgen05.alloc always does here.
    """
    first, second = (block.tensor.collective for block in _blocks(warp, True))
    mine, peer = (first, second) if warp.block.rank % 2 == 0 else (second, first)
    name = ".".join(line.opcode.split(".")[:2])
    mine[name] = turn = mine.get(name, 0) + 1
    warp.machine.event()
    if name != "tcgen05.alloc" and not warp.machine.waits_for_peer():
        return None

    def ready():
        return peer.get(name, 0) >= turn

    return None if ready() else Blocked(ready, lambda: f"the peer's {name}", done=True)


@tcgen05(f"tcgen05.dealloc{GROUPS}.sync.aligned.b32")
def dealloc(build, line):
    address, count = (build.read(operand, "b32") for operand in line.operands)
    group = 1 + _is_pair(line)

    def execute(warp, mask):
        first, columns = int(address(warp)[0]), int(count(warp)[0])
        tensor, machine = warp.block.tensor, warp.machine
        if tensor.allocated.get(first) != (columns, group):
            raise EmulatorError(
                f"tcgen05.dealloc of {columns} columns from {first} on, for {group} blocks; "
                f"allocated are {tensor.allocated}"
            )
        for block in _blocks(warp, group == 2):
            if block is not warp.block and not block.tensor.is_known(first, warp.clock):
                raise RaceError(
                    f"tcgen05.dealloc in block {warp.block.rank}, and nothing orders it after the "
                    f"tcgen05.alloc of block {block.rank}"
                )
        busy = [task for task in machine.tasks if warp.block in (task.queue or ())]
        if busy:
            raise EmulatorError(f"tensor memory is given back before {busy[0].what}")
        tensor.frees(slice(first, first + columns), warp.clock)
        del tensor.allocated[first]
        machine.event()
        return _wait_for_peer(warp, line) if group == 2 else None

    return execute


@tcgen05(f"tcgen05.relinquish_alloc_permit{GROUPS}.sync.aligned")
def relinquish(build, line):
    pair = _is_pair(line)

    def execute(warp, mask):
        warp.block.tensor.relinquished = True
        return _wait_for_peer(warp, line) if pair else None

    return execute


@tcgen05("tcgen05.fence{::before_thread_sync,::after_thread_sync}")
def tensor_fence(build, line):
    before = line.opcode.endswith("before_thread_sync")
    return lambda warp, mask: warp.fence_before() if before else warp.fence_after()


def _shape(line, further: int | None):
    """Rows and columns [registers, lanes] of a load or store (9.7.16.2.3).

    And the ranges of columns (first, count), and rows, in all.
    """
    parts = modifiers(line)
    shape = next(part for part in parts if re.fullmatch(r"\d+x\d+b(x2)?", part))
    if (shape == "16x32bx2") != (further is not None):
        raise ValueError("operands")
    count = next(int(part[1:]) for part in parts if re.fullmatch(r"x\d+", part))
    if shape == "16x32bx2":
        # Two accesses of 16 lanes, the second one so many columns further, by the upper lanes.
        rows, columns = np.stack([LANE % 16] * count), LANE // 16 * further
        columns = np.stack([columns + i for i in range(count)])
        return rows, columns, ((0, count), (further, count)), 16
    if shape == "32x32b":
        rows, columns, width = [LANE], [0 * LANE], 1
    elif shape == "16x128b":
        rows, columns, width = [LANE // 4, LANE // 4 + 8], [LANE % 4] * 2, 4
    else:
        rows = [LANE // 4, LANE // 4, LANE // 4 + 8, LANE // 4 + 8]
        columns, width = [LANE % 4 * 2, LANE % 4 * 2 + 1] * 2, 8
    rows = np.stack(rows * count)
    columns = np.stack([column + width * i for i in range(count) for column in columns])
    return rows, columns, ((0, width * count),), 32 if shape == "32x32b" else 16


# At most 128 registers.
SHAPES = [
    f"{{{','.join(f'.{shape}.x{2**i}' for i in range(8 - log))}}}.b32"
    for log, shape in enumerate(("32x32b", "16x128b", "16x256b"))
]
SHAPES.append(SHAPES[0].replace("32x32b", "16x32bx2"))


def _first_lane(warp, address: int, rows: int) -> int:
    """Where a warp's lanes of tensor memory begin: a warp has a quarter of them (9.7.16.2.3)."""
    lane, quarter = address >> 16, warp.number % 4
    if lane // 32 not in (0, quarter) or lane % 32 not in range(0, 33 - rows, rows):
        raise EmulatorError(
            f"lanes {lane} to {lane + rows - 1} of tensor memory are not in the quarter {quarter} "
            f"of {warp}"
        )
    return quarter * 32 + lane % 32


class _TensorAccess:
    """What tcgen05.ld and st have in common: registers, and where they are in tensor memory."""

    def __init__(self, build, line, registers, address, offset):
        further = build.immediate(offset[0]) if offset else None
        self.rows, self.columns, self.ranges, self.height = _shape(line, further)
        self.name = ".".join(line.opcode.split(".")[:2])
        self.items = registers.items if isinstance(registers, Vector) else ()
        # A load may not name a register twice.
        count = len(set(self.items) if self.name.endswith("ld") else self.items)
        if count != len(self.rows) or len(offset) > 1:
            raise ValueError(f"{count} registers in a vector, expected {len(self.rows)}")
        self.address = build.address(address)

    def at(self, warp):
        """Indices of the words [registers, lanes], and the ranges of columns, checked."""
        places = self.address(warp)
        if (places != places[0]).any():
            raise EmulatorError(f"{self.name} with addresses that differ between lanes")
        place = int(places[0])
        first, column = _first_lane(warp, place, self.height), place & 0xFFFF
        for begin, count in self.ranges:
            warp.block.tensor.check(column + begin, count, self.name)
        parts = [slice(column + begin, column + begin + count) for begin, count in self.ranges]
        return (first + self.rows, column + self.columns), parts


@tcgen05(*(f"tcgen05.ld.sync.aligned{shape}" for shape in SHAPES))
def tensor_load(build, line):
    destination, source, *offset = line.operands
    access = _TensorAccess(build, line, destination, source, offset)
    writes = [build.write(item, "b32") for item in access.items]
    numbers = [item.number for item in access.items]
    poison = np.full(LANES, 0xFFFFFFFF, np.uint32)

    def execute(warp, mask):
        tensor = warp.block.tensor
        index, parts = access.at(warp)
        for write in writes:
            write(warp, poison, None)

        def note():
            for part in parts:
                tensor.loads(warp.agent, warp.time, part, warp.clock, "tcgen05.ld")

        def run():
            for write, value in zip(writes, tensor.words[index]):
                write(warp, value, None)

        note()
        # The latest moment is the wait; the load is noted again there.
        warp.tensor_loads.append((note, run))
        warp.pending |= dict.fromkeys(numbers, WAIT_FOR_LOADS)

    return execute


@tcgen05("tcgen05.wait::ld.sync.aligned")
def wait_for_loads(build, line):
    def execute(warp, mask):
        loads, warp.tensor_loads = warp.tensor_loads, []
        for note, load in loads:
            note()
            load()
        warp.block.tensor.loaded(warp.agent)
        warp.pending = {n: why for n, why in warp.pending.items() if why != WAIT_FOR_LOADS}

    return execute


@tcgen05(*(f"tcgen05.st.sync.aligned{shape}" for shape in SHAPES))
def tensor_store(build, line):
    target, *offset, source = line.operands
    access = _TensorAccess(build, line, source, target, offset)
    reads = [build.read(item, "b32") for item in access.items]

    def execute(warp, mask):
        if mask is not None:
            raise EmulatorError("tcgen05.st without all lanes")
        tensor = warp.block.tensor
        index, parts = access.at(warp)
        for part in parts:
            tensor.stores(warp.agent, part, warp.clock, "tcgen05.st")
        values = np.stack([read(warp) for read in reads])
        tensor.words[index] = 0xFFFFFFFF

        def run():
            tensor.words[index] = values

        # The latest moment is the wait.
        warp.tensor_stores.append(run)

    return execute


@tcgen05("tcgen05.wait::st.sync.aligned")
def wait_for_stores(build, line):
    def execute(warp, mask):
        stores, warp.tensor_stores = warp.tensor_stores, []
        for store in stores:
            store()
        warp.block.tensor.stored(warp.agent, warp.time)

    return execute


@tcgen05(
    f"tcgen05.commit{GROUPS}.mbarrier::arrive::one.shared::cluster{{,.multicast::cluster}}.b64",
)
def commit(build, line):
    pair, multicast = _is_pair(line), "multicast::cluster" in modifiers(line)
    address = build.address(line.operands[0])
    members = build.read(line.operands[1], "b16") if multicast else None

    def execute(warp, mask):
        cluster, machine = warp.block.cluster, warp.machine
        for lane in lanes(mask):
            rank, offset = block_of(int(address(warp)[lane]))
            named = int(members(warp)[lane]) if multicast else 1 << rank
            targets = [r for r in range(16) if named >> r & 1]
            barriers = [barrier_at(warp, (r << 24) + offset, cluster=True) for r in targets]
            for barrier in barriers:
                barrier.check_use(warp, asynchronous=True)
            # It includes a fence::before_thread_sync of the products (9.7.16.6.4). Who knows that
            # they are done knows what was known when they were issued.
            known = warp.multiplied_knowing.copy()
            known[[MEMORY, TENSOR], machine.agents.tensor_core] = cluster.multiplied

            what = f"a tcgen05.commit to {barriers[0]}"

            def signal(barrier, known):
                learn(barrier.gathered, known)
                barrier.signal()

            task = Task("multiply", None, what, cluster, ("products", *_blocks(warp, pair)))

            # The signals come when they come: nothing orders those of two commits.
            def run(barriers=barriers, known=known, task=task):
                for barrier in barriers:
                    one = functools.partial(signal, barrier, known)
                    what = f"the signal of {task.what}"
                    machine.submit(Task("signal", one, what, cluster, issued=task.issued))

            task.run = run
            machine.submit(task)

    return execute


@dataclasses.dataclass(frozen=True)
class Product:
    """What the 32-bit instruction descriptor of tcgen05.mma says (9.7.16.4.2)."""

    result: str
    a: str
    b: str
    negate: tuple[bool, bool]
    transpose: tuple[bool, bool]
    rows: int
    columns: int

    @classmethod
    def of(cls, kind: str, descriptor: int) -> "Product":
        """Decodes it; bits that are reserved, or mean what is not modelled, are an error."""
        elements = {
            "f16": {0: "f16", 1: "bf16"},
            "tf32": {2: "tf32"},
            "f8f6f4": {0: "e4m3", 1: "e5m2"},
            "i8": {0: "u8", 1: "s8"},
        }[kind]
        result = {2: "s32"} if kind == "i8" else {1: "f32"}
        types = (
            result.get(descriptor >> 4 & 3),
            *(elements.get(descriptor >> shift & 7) for shift in (7, 10)),
        )
        # Sparsity, saturation, reserved bits, and the shift of .ws.
        if None in types or descriptor & 0b1111 or descriptor & (1 << 6 | 1 << 23 | 7 << 29):
            raise EmulatorError(f"the instruction descriptor {descriptor:#x} for kind::{kind}")
        flags = [bool(descriptor >> bit & 1) for bit in (13, 14, 15, 16)]
        if kind == "i8" and any(flags[:2]):
            raise EmulatorError(f"integers are not negated: {descriptor:#x}")
        return cls(
            *types,
            negate=tuple(flags[:2]),
            transpose=tuple(flags[2:]),
            columns=(descriptor >> 17 & 0x3F) << 3,
            rows=(descriptor >> 24 & 0x1F) << 4,
        )

    def check(self, blocks: int) -> None:
        """The shapes that exist (9.7.16.2.1)."""
        if blocks == 2:
            fits = self.rows in (128, 256) and self.columns % 32 == 0 and 32 <= self.columns <= 256
        else:
            step = {64: 8, 128: 16}.get(self.rows)
            fits = step and self.columns % step == 0 and step <= self.columns <= 256
        if not fits:
            raise EmulatorError(f"no product has {self.rows} x {self.columns} for {blocks} blocks")
        if self.rows // blocks != 128 and blocks == 2:
            raise UnsupportedError(f"{self.rows // blocks} rows of a block")


@dataclasses.dataclass(frozen=True)
class TensorOperand:
    """A first operand in tensor memory: rows are lanes, K is packed into columns (9.7.16.10.5)."""

    column: int

    def read(self, block, rows: int, columns: int, dtype) -> np.ndarray:
        """The elements, [rows, columns]."""
        words = block.tensor.words[:rows, self.part(columns, dtype)]
        return np.ascontiguousarray(words).view(dtype)

    def part(self, columns: int, dtype) -> slice:
        """The columns of tensor memory."""
        return slice(self.column, self.column + columns * np.dtype(dtype).itemsize // 4)

    def note(
        self, block, rows, columns, dtype, agent: int, time: int, warp, lane: int, what: str
    ) -> None:
        """Checks a read that is issued now: bounds and order."""
        if rows != TensorMemory.LANES:
            raise UnsupportedError(f"a first operand of {rows} rows in tensor memory")
        part = self.part(columns, dtype)
        block.tensor.check(part.start, part.stop - part.start, what)
        block.tensor.multiplied_by(time, part, warp.clock, what)


@tcgen05(f"tcgen05.mma{GROUPS}{{.kind::f16,.kind::f8f6f4}}", "tcgen05.mma.cta_group::1.kind::tf32")
@tcgen05(f"tcgen05.mma{GROUPS}.kind::i8", targets=("sm_100a",))
def mma(build, line):
    kind = next(part for part in modifiers(line) if part.startswith("kind::"))[6:]
    pair = _is_pair(line)
    target, a, b, descriptor, accumulate = line.operands
    target = build.address(target)
    in_tensor_memory = isinstance(a, Address)
    read_a = build.address(a) if in_tensor_memory else build.read(a, "b64")
    read_b, read_descriptor = build.read(b, "b64"), build.read(descriptor, "b32")
    accumulate = build.read(accumulate, "pred")

    def execute(warp, mask):
        active = lanes(mask)
        if len(active) != 1:
            raise EmulatorError(f"tcgen05.mma by {len(active)} lanes")
        lane = active[0]
        if pair and warp.block.rank & 1:
            raise EmulatorError("tcgen05.mma for two blocks by the second one")
        found = Product.of(kind, int(read_descriptor(warp)[lane]))
        blocks = _blocks(warp, pair)
        found.check(len(blocks))
        place, first = int(target(warp)[lane]), int(read_a(warp)[lane])
        if place >> 16:
            raise EmulatorError(f"an accumulator that begins with lane {place >> 16}")
        if not in_tensor_memory:
            a = Matrix.of_blackwell(first, warp.machine, transposed=found.transpose[0])
        elif first >> 16 or found.transpose[0]:
            raise UnsupportedError(f"a first operand at {first:#x}, or a transposed one")
        else:
            a = TensorOperand(first)
        b = Matrix.of_blackwell(
            int(read_b(warp)[lane]), warp.machine, transposed=found.transpose[1]
        )
        adds = bool(accumulate(warp)[lane])
        _multiply(warp, int(lane), blocks, found, place, (a, b), adds, line)

    return execute


def _multiply(
    warp, lane: int, blocks, found: Product, column: int, matrices, accumulates: bool, line
) -> None:
    """Issues a product of 32 bytes of K."""
    cluster, machine = warp.block.cluster, warp.machine
    cluster.multiplied += 1
    learn(warp.multiplied_knowing, warp.clock)
    types = ELEMENTS[found.a], ELEMENTS[found.b]
    depth = 32 // np.dtype(types[0]).itemsize
    sides = found.rows // len(blocks), found.columns // len(blocks)
    part = slice(column, column + found.columns)
    what = f"tcgen05.mma of line {line.line}"
    # 64 rows are in 16 lanes of each quarter (9.7.16.10.5, layout F).
    row = np.arange(sides[0])
    rows = row if sides[0] == 128 else row // 16 * 32 + row % 16
    for block in blocks:
        block.tensor.check(column, found.columns, what)
        block.tensor.multiplies(cluster.multiplied, part, warp.clock, what)
        for matrix, side, dtype in zip(matrices, sides, types):
            agent = machine.agents.tensor_core
            matrix.note(block, side, depth, dtype, agent, cluster.multiplied, warp, lane, what)

    def run():
        a, b = (
            np.concatenate([matrix.read(block, side, depth, dtype) for block in blocks])
            for matrix, side, dtype in zip(matrices, sides, types)
        )
        sign = -1 if found.negate[0] != found.negate[1] else 1
        values = sign * product(a, b)
        for i, block in enumerate(blocks):
            words = block.tensor.words
            old = np.ascontiguousarray(words[rows, part]) if accumulates else None
            added = values[i * sides[0] : (i + 1) * sides[0]]
            words[rows, part] = accumulated(old, added, found.result)

    machine.submit(Task("multiply", run, what, cluster, ("products", *blocks)))
