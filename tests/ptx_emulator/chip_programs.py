"""Small kernels that both a Hopper GPU and the emulator run, each for one family of instructions.

A program is PTX with random operands. Its results are the same on every chip: no value depends on
timing, and products of floats are exact. `record_chip_results.py` runs the programs on a GPU,
`test_chip_results.py` in the emulator.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.matrix_operands import ELEMENTS
from tests.ptx_emulator.memory import GlobalMemory
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.scalar_cases import CASES, operands, stored
from tests.ptx_emulator.tma import TensorMap

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Map:
    """A tensor map of one of a program's arrays, with the fields of `TensorMap`."""

    array: int
    itemsize: int
    dimensions: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel and its operands.

    Attributes:
      name: the name of the program.
      body: PTX statements; %array0, %array1, ... are the addresses of the arrays, %map0, ... those
        of the tensor maps, %thread is the thread's number in its block, %block the block's number.
      arrays: arrays of bytes in global memory.
      maps: tensor maps.
      grid, cluster, block: numbers of blocks, of blocks in a cluster, of threads in a block.
    """

    name: str
    body: str
    arrays: tuple[np.ndarray, ...]
    maps: tuple[Map, ...] = ()
    grid: int = 1
    cluster: int = 1
    block: int = 32

    @property
    def ptx(self) -> str:
        """Returns the module, whose kernel is `program`."""
        pointers = [f".param .u64 array{i}" for i in range(len(self.arrays))]
        maps = [f".param .align 64 .b8 map{i}[128]" for i in range(len(self.maps))]
        loads = [f"ld.param.u64 %array{i}, [array{i}];" for i in range(len(self.arrays))]
        loads += [f"mov.b64 %map{i}, map{i};" for i in range(len(self.maps))]
        loads += [f"cvta.param.u64 %map{i}, %map{i};" for i in range(len(self.maps))]
        return "\n".join(
            [
                ".version 8.6",
                ".target sm_90a",
                ".address_size 64",
                f".visible .entry program({', '.join(pointers + maps)})",
                f".maxntid {self.block}, 1, 1",
                "{",
                ".reg .b32 %thread, %block, %word; .reg .b64 %at, %long; .reg .b16 %short;",
                f".reg .b64 %array<{len(self.arrays) + 1}>, %map<{len(self.maps) + 1}>;",
                "mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x;",
                *loads,
                self.body,
                "ret;",
                "}",
                "",
            ]
        )

    @property
    def question(self) -> str:
        """Returns a digest of the program."""
        shape = (self.maps, self.grid, self.cluster, self.block)
        return digest(self.ptx.encode(), repr(shape).encode(), *self.arrays)


def digest(*parts) -> str:
    """Returns a short digest of bytes and arrays."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else part)
    return found.hexdigest()


def emulated(program: Program, *, seed: int = 0) -> list[np.ndarray]:
    """Executes a program in the emulator and returns its arrays."""
    memory = GlobalMemory()
    places = [memory.allocate(x, f"array {i}") for i, x in enumerate(program.arrays)]
    shape = dict(grid=(program.grid, 1, 1), cluster=(program.cluster, 1, 1))
    kernel = parse(program.ptx)
    machine = Machine(kernel, **shape, memory=memory, schedule="random", seed=seed)
    for i, place in enumerate(places):
        machine.set_parameter(i, place)
    for i, (m, number) in enumerate(zip(program.maps, itertools.count(len(places)))):
        fields = (m.itemsize, m.dimensions, m.strides, m.box, m.swizzle)
        tensor = TensorMap(places[m.array], *fields, name=f"map {i}")
        machine.tensor_maps[machine.parameter_address(number)] = tensor
    machine.launch()
    return [memory.read(p, x.shape, x.dtype) for p, x in zip(places, program.arrays)]


def drawn(generator: random.Random, size: int) -> np.ndarray:
    """Draws random bytes."""
    return np.frombuffer(generator.randbytes(size), np.uint8)


def zeros(size: int) -> np.ndarray:
    """Returns an array of zeros for results, which are never all zeros."""
    return np.zeros(size, np.uint8)


def copied(size: int, array: int, *, back: bool = False, at: str = "0", threads: int = 32) -> str:
    """Returns PTX with which all threads copy `size` bytes to shared memory, or `back`.

    The bytes begin at byte `at` of the array.
    """
    name, unit = f"copy{'_back' * back}", 16
    words = f"{{{', '.join(f'%w{i}' for i in range(4))}}}"
    move = f"ld.global.v4.b32 {words}, [%at]; st.shared.v4.b32 [%here], {words};"
    if back:
        move = f"ld.shared.v4.b32 {words}, [%here]; st.global.v4.b32 [%at], {words};"
    return f"""{{ .reg .pred %more; .reg .b32 %offset, %here, %w<4>;
        cvt.u64.u32 %at, {at}; add.u64 %at, %at, %array{array};
        mul.lo.u32 %offset, %thread, {unit}; cvt.u64.u32 %long, %offset; add.u64 %at, %at, %long;
        mov.u32 %here, memory; add.u32 %here, %here, %offset;
        {name}: {move}
        add.u64 %at, %at, {unit * threads}; add.u32 %here, %here, {unit * threads};
        add.u32 %offset, %offset, {unit * threads}; setp.lt.u32 %more, %offset, {size};
        @%more bra {name}; }}
        bar.sync 0;"""


def with_registers(name, body, inputs, results, **options) -> Program:
    """Makes a program in which each thread has its own operands %a0, ... and results %d0, ...

    Args:
      name, body: name and body of the program.
      inputs: (bits of the register, values of all threads) for each operand.
      results: bits of the register for each result; 1 is a predicate.
      options: other fields of the program; its arrays follow those of operands and results.
    """
    threads = options.get("grid", 1) * options.get("block", 32)
    arrays = [np.array(values, f"u{max(bits, 8) // 8}") for bits, values in inputs]
    arrays += [np.zeros(threads, f"u{max(bits, 8) // 8}") for bits in results]
    text = [f"mad.lo.u32 %word, %block, {options.get('block', 32)}, %thread;"]
    text += [".reg .b32 %number; mov.u32 %number, %word;"]

    def declare(name, bits):
        text.append(f".reg .{'pred' if bits == 1 else f'b{bits}'} {name};")

    def place(i, bits):
        text.append(f"mad.wide.u32 %at, %number, {max(bits, 8) // 8}, %array{i};")

    for i, (bits, _) in enumerate(inputs):
        declare(f"%a{i}", bits)
        place(i, bits)
        if bits == 1:
            text.append(f"ld.global.u8 %short, [%at]; setp.ne.u16 %a{i}, %short, 0;")
        else:
            text.append(f"ld.global.b{bits} %a{i}, [%at];")
    for i, bits in enumerate(results):
        declare(f"%d{i}", bits)
    text.append(body)
    for i, bits in enumerate(results, len(inputs)):
        place(i, bits)
        register = f"%d{i - len(inputs)}"
        if bits == 1:
            text.append(f"selp.u16 %short, 1, 0, {register}; st.global.u8 [%at], %short;")
        else:
            text.append(f"st.global.b{bits} [%at], {register};")
    arrays += options.pop("arrays", [])
    return Program(name, "\n".join(text), tuple(arrays), **options)


# Arithmetic, logic, comparison and conversion.

BLOCKS = 8

# Instructions on two floats at once exist only on Blackwell. An approximation has an error bound
# instead of one result: `scalar.py` rounds it to nearest, a GPU does not.
NOT_COMPARED = ("f32x2", ".approx.")


def scalar() -> Iterator[Program]:
    """Yields programs of every scalar instruction, with edge cases and random operands."""
    for case in CASES:
        if any(part in case.opcode for part in NOT_COMPARED):
            continue
        rows = operands(case.kinds, case.wide, 32 * BLOCKS)
        if case.opcode.startswith(("div.", "rem.")):
            # The results of division by zero and of overflow are unspecified (9.7.1.8).
            rows = [(a, b or 1) for a, b in rows]

        def size(kind, case=case):
            return 64 if case.wide else 1 if kind == "pred" else stored(kind)

        columns = [(size(kind), values) for kind, values in zip(case.kinds, zip(*rows))]
        results = [size(kind) for kind in case.results]
        left = "|".join(f"%d{i}" for i in range(len(results)))
        right = ", ".join(f"%a{i}" for i in range(len(columns)))
        body = f"{case.opcode} {left}, {right};"
        yield with_registers(str(case), body, columns, results, grid=BLOCKS)


def lop3() -> Iterator[Program]:
    """Yields programs of lop3 with many of its 256 truth tables."""
    generator = random.Random("lop3")
    for table in generator.sample(range(256), 64):
        inputs = [(32, [generator.getrandbits(32) for _ in range(32)]) for _ in range(3)]
        body = f"lop3.b32 %d0, %a0, %a1, %a2, {table};"
        yield with_registers(f"lop3 {table:#x}", body, inputs, [32])


# Exchange between lanes.


def lanes() -> Iterator[Program]:
    """Yields programs of shfl, vote and elect, with member masks."""
    for mode, number in itertools.product(("idx", "up", "down", "bfly"), range(20)):
        generator = random.Random(f"shfl {mode} {number}")
        inputs = [
            (32, [generator.getrandbits(32) for _ in range(32)]),
            (32, [generator.getrandbits(6) for _ in range(32)]),
        ]
        clamp = generator.choice([31, 0, 0x1C1F, 0x181F, 0x1800, generator.getrandbits(13)])
        body = f"shfl.sync.{mode}.b32 %d0|%d1, %a0, %a1, {clamp}, -1;"
        yield with_registers(f"shfl.{mode} {number}", body, inputs, [32, 1])
    for mode, number in itertools.product(("any", "all", "uni", "ballot"), range(16)):
        generator = random.Random(f"vote {mode} {number}")
        bias, members = generator.choice([0, 1, 0.1, 0.5, 0.9]), generator.getrandbits(32) | 1
        votes = [int(generator.random() < bias) for _ in range(32)]
        bits = 32 if mode == "ballot" else 1
        empty = "mov.b32 %d0, 77;" if bits == 32 else "mov.pred %d0, 0;"
        mine = f"shr.u32 %word, {members}, %thread; and.b32 %word, %word, 1;"
        body = f""".reg .pred %member; {mine} setp.eq.u32 %member, %word, 1; {empty}
            @%member vote.sync.{mode}.{"b32" if bits == 32 else "pred"} %d0, %a0, {members};
            @%member activemask.b32 %d1; @!%member mov.b32 %d1, 0;"""
        yield with_registers(f"vote.{mode} {number}", body, [(1, votes)], [bits, 32])
    for number in range(16):
        members = random.Random(f"elect {number}").getrandbits(32) | 1
        body = f""".reg .pred %member; shr.u32 %word, {members}, %thread;
            and.b32 %word, %word, 1; setp.eq.u32 %member, %word, 1;
            mov.b32 %d0, 77; mov.pred %d1, 0; @%member elect.sync %d0|%d1, {members};"""
        yield with_registers(f"elect {number}", body, [], [32, 1])


# Loads and stores.


def matrices() -> Iterator[Program]:
    """Yields programs of ldmatrix and stmatrix, with rows at random addresses."""
    forms = itertools.product(("ld", "st"), (1, 2, 4), ("", ".trans"), range(8))
    for name, count, turned, number in forms:
        generator = random.Random(f"{name} {count} {turned} {number}")
        rows = generator.sample(range(256), 32)
        inputs = [(32, [16 * row for row in rows])]
        registers = ", ".join(
            f"%{'d' if name == 'ld' else 'a'}{i + (name == 'st')}" for i in range(count)
        )
        if name == "st":
            inputs += [(32, [generator.getrandbits(32) for _ in range(32)]) for _ in range(count)]
        access = f"{{{registers}}}, [%place]" if name == "ld" else f"[%place], {{{registers}}}"
        array = len(inputs) + count * (name == "ld")
        body = f""".shared .align 128 .b8 memory[{4 * KIB}]; {copied(4 * KIB, array)}
            .reg .b32 %place; mov.u32 %place, memory; add.u32 %place, %place, %a0;
            {name}matrix.sync.aligned.m8n8.x{count}{turned}.shared.b16 {access};
            bar.sync 0; {copied(4 * KIB, array, back=True)}"""
        results = [32] * count * (name == "ld")
        yield with_registers(
            f"{name}matrix.x{count}{turned} {number}",
            body,
            inputs,
            results,
            arrays=[drawn(generator, 4 * KIB)],
        )


def memory() -> Iterator[Program]:
    """Yields programs of ld and st of every width, in global, shared and generic addresses."""
    kinds = ("b8", "u16", "s8", "b32", "s32", "f32", "b64", "u64", "s16")
    forms = itertools.product(("ld", "st"), ("", ".v2", ".v4"), kinds, (".global", ".shared", ""))
    for name, vector, kind, space in forms:
        count, bits = int(vector[2:] or 1), int(kind[1:])
        if count * bits > 128:
            continue
        generator = random.Random(f"{name}{vector}{kind}{space}")
        unit, register = count * bits // 8, max(bits, 16)
        places = generator.sample(range(2 * KIB // unit), 32)
        inputs = [(64, [unit * place for place in places])]
        names = [f"%{'d' if name == 'ld' else 'a'}{i + (name == 'st')}" for i in range(count)]
        if name == "st":
            values = [[generator.getrandbits(register) for _ in range(32)] for _ in names]
            inputs += [(register, column) for column in values]
        items = f"{{{', '.join(names)}}}" if vector else names[0]
        access = f"{items}, [%place]" if name == "ld" else f"[%place], {items}"
        array = len(inputs) + count * (name == "ld")
        of_shared = "mov.u64 %place, memory; cvta.shared.u64 %place, %place;"
        base = {".global": f"mov.b64 %place, %array{array};", ".shared": "mov.u64 %place, memory;"}
        base = base.get(space, of_shared)
        opcode = f"{name}{space}{vector}.{kind}"
        body = f""".shared .align 128 .b8 memory[{2 * KIB}]; .reg .b64 %place;
            {copied(2 * KIB, array)}
            {base} add.u64 %place, %place, %a0; {opcode} {access}; bar.sync 0;"""
        if space != ".global":
            body += copied(2 * KIB, array, back=True)
        results = [register] * count * (name == "ld")
        arrays = [drawn(generator, 2 * KIB)]
        yield with_registers(opcode, body, inputs, results, arrays=arrays)


# Clusters.


def clusters() -> Iterator[Program]:
    """Yields programs of ranks, mapped addresses, remote arrivals, and the cluster's barrier."""
    special = "cluster_ctarank cluster_nctarank ctaid.x nctaid.x clusterid.x nclusterid.x "
    special += "cluster_ctaid.x cluster_nctaid.x laneid ntid.x lanemask_lt lanemask_eq"
    for blocks, grid, threads in [(1, 3, 64), (2, 6, 96), (4, 8, 32), (8, 8, 64)]:
        registers = special.split()
        body = "\n".join(f"mov.u32 %d{i}, %{name};" for i, name in enumerate(registers))
        shape = dict(cluster=blocks, grid=grid, block=threads)
        name = f"ranks in clusters of {blocks}"
        yield with_registers(name, body, [], [32] * len(registers), **shape)
    for blocks, number in itertools.product((2, 4, 8), range(12)):
        generator = random.Random(f"remote {blocks} {number}")
        to, distance = generator.randrange(1, blocks), 4 * generator.randrange(64)
        values = [generator.getrandbits(32) for _ in range(32 * blocks)]
        body = f""".shared .align 16 .b8 memory[512]; .reg .b32 %rank, %there, %far;
            mad.lo.u32 %there, %thread, 4, {distance}; mov.u32 %word, memory;
            add.u32 %there, %there, %word; st.shared.b32 [%there], %a0;
            barrier.cluster.arrive; barrier.cluster.wait;
            add.u32 %rank, %block, {to}; rem.u32 %rank, %rank, {blocks};
            mapa.shared::cluster.u32 %far, %there, %rank; ld.shared::cluster.b32 %d0, [%far];
            barrier.cluster.arrive; barrier.cluster.wait;
            add.u32 %word, %d0, %rank; st.shared::cluster.b32 [%far], %word;
            barrier.cluster.arrive; barrier.cluster.wait; ld.shared.b32 %d1, [%there];"""
        name = f"block +{to} of {blocks}, {number}"
        shape = dict(cluster=blocks, grid=blocks)
        yield with_registers(name, body, [(32, values)], [32, 32], **shape)
    for blocks, number in itertools.product((2, 4, 8), range(12)):
        generator = random.Random(f"arrivals {blocks} {number}")
        count = generator.randrange(1, 5)
        target, rounds = generator.randrange(blocks), generator.randrange(1, 4)
        body = f""".shared .align 8 .b8 memory[8]; .reg .b32 %there, %parity; .reg .pred %p;
            .reg .pred %first, %mine; setp.eq.u32 %first, %thread, 0;
            setp.eq.u32 %mine, %block, {target}; mov.u32 %there, memory;
            @%first mbarrier.init.shared::cta.b64 [%there], {blocks * count};
            fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
        for i in range(rounds):
            body += f"""@%mine mbarrier.test_wait.parity.shared::cta.b64 %p, [%there], {i % 2};
                @!%mine setp.ne.u32 %p, 0, 0; selp.u32 %d{2 * i}, 1, 0, %p;
                barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
                {{ .reg .b32 %far; .reg .pred %few; setp.lt.u32 %few, %thread, {count};
                mapa.shared::cluster.u32 %far, %there, {target};
                @%few mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far]; }}
                barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
                @%mine mbarrier.test_wait.parity.shared::cta.b64 %p, [%there], {i % 2};
                @!%mine setp.ne.u32 %p, 0, 0; selp.u32 %d{2 * i + 1}, 1, 0, %p;"""
        shape = dict(cluster=blocks, grid=blocks)
        name = f"arrivals at block {target} of {blocks}, {number}"
        yield with_registers(name, body, [], [32] * 2 * rounds, **shape)


# mbarriers.

COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global{}.mbarrier::complete_tx::bytes"


def mbarriers() -> Iterator[Program]:
    """Yields programs of all kinds of arrivals, which complete phases, in random order."""
    for number in range(160):
        generator = random.Random(f"mbarrier {number}")
        count = generator.choice([1, 1, 2, 3, 5, 8])
        lines = [
            f"mbarrier.init.shared.b64 [%there], {count}; fence.mbarrier_init.release.cluster;"
        ]
        pending, phase, results, expected = count, 0, 0, 0
        while results < 24:
            choice = generator.random()
            if choice < 0.4:
                parity = generator.randrange(2)
                order = generator.choice(["", ".acquire.cta", ".acquire.cluster"])
                # A test is always possible, a wait only if the phase is complete.
                completed = phase & 1 != parity
                how = generator.choice(["test_wait", "try_wait"]) if completed else "test_wait"
                space = generator.choice([".shared", ".shared::cta"])
                lines.append(
                    f"mbarrier.{how}.parity{order}{space}.b64 %p, [%there], {parity};"
                    f" selp.u32 %d{results}, 1, 0, %p;"
                )
                results += 1
                continue
            release = generator.choice(["", ".release.cta", ".release.cluster"])
            if choice < 0.5 and pending > 1:
                n = generator.randrange(1, pending)
                # This opcode exists only with the scope of a block.
                release = release.replace("cluster", "cta")
                lines.append(
                    f"mbarrier.arrive.noComplete{release}.shared.b64 %state, [%there], {n};"
                )
            elif choice < 0.6 and not expected:
                # The phase then completes only after a load of 128 bytes has arrived.
                relaxed = generator.choice(["", ".relaxed.cta"])
                if generator.random() < 0.5:
                    n = 1
                    lines.append(
                        f"mbarrier.arrive.expect_tx{release}.shared.b64 %state, [%there], 128;"
                    )
                else:
                    n = 0
                    lines.append(f"mbarrier.expect_tx{relaxed}.shared.b64 [%there], 128;")
                expected = 1
            else:
                n = generator.randrange(1, pending + 1) if generator.random() < 0.5 else 1
                amount = f", {n}" if n > 1 or generator.random() < 0.5 else ""
                lines.append(f"mbarrier.arrive{release}.shared.b64 %state, [%there]{amount};")
            pending -= n
            if pending == 0 and expected:
                lines.append(
                    f"mbarrier.test_wait.parity.shared.b64 %p, [%there], {phase & 1};"
                    f" selp.u32 %d{results}, 1, 0, %p;"
                    f" {COPY.format(1, '')} [memory], [%map0, {{0}}], [%there];"
                    f" wait{len(lines)}:"
                    f" mbarrier.try_wait.parity.shared.b64 %p, [%there], {phase & 1};"
                    f" @!%p bra wait{len(lines)};"
                )
                results += 1
            if pending == 0:
                pending, phase, expected = count, phase + 1, 0
        if expected:
            # At the end no bytes or arrivals may be in flight or expected.
            lines.append(
                f"{COPY.format(1, '')} [memory], [%map0, {{0}}], [%there];"
                f" mbarrier.arrive.shared.b64 %state, [%there], {pending};"
                f" last: mbarrier.try_wait.parity.shared.b64 %p, [%there], {phase & 1};"
                " @!%p bra last;"
            )
        text = "\n".join(lines)
        body = f""".shared .align 128 .b8 memory[128]; .shared .align 8 .b8 barrier[8];
            .reg .b32 %there; .reg .pred %p, %others; .reg .b64 %state; mov.u32 %there, barrier;
            {"".join(f"mov.u32 %d{i}, 7;" for i in range(results))}
            setp.ne.u32 %others, %thread, 0; @%others bra done;
            {text}
            mbarrier.inval.shared.b64 [%there]; done:"""
        array = results
        source = Map(array, 4, (32,), (4,), (32,), 0)
        arrays = [drawn(generator, 128)]
        yield with_registers(
            f"mbarrier {number}", body, [], [32] * results, arrays=arrays, maps=(source,)
        )


# TMA.


def _tensor(generator: random.Random, array: int, size: int) -> Map:
    """Draws a tensor map of an array of `size` bytes, with a box of up to 8 KiB."""
    while True:
        rank, itemsize = generator.randrange(1, 6), generator.choice([1, 2, 4])
        swizzle = generator.choice([0, 0, 32, 64, 128, 128])
        inner = 16 * generator.randrange(1, swizzle // 16 + 1 if swizzle else 9)
        box = [inner // itemsize, *(generator.choice([1, 2, 3, 4, 8, 13]) for _ in range(rank - 1))]
        dimensions = [generator.randrange(1, 40) for _ in range(rank)]
        dimensions[0] = generator.randrange(1, 200 // itemsize)
        strides = [itemsize]
        for dimension in dimensions[:-1]:
            extent = -(-dimension * strides[-1] // 16) * 16
            strides.append(extent + 16 * generator.choice([0, 0, 1, 3]))
        extent = dimensions[-1] * strides[-1]
        taken = math.prod(box[1:]) * (swizzle or inner)
        if taken <= 8 * KIB and extent <= size and box[0] <= 256:
            shape = map(tuple, (dimensions, strides, box))
            return Map(array, itemsize, *shape, swizzle=swizzle)


def _coordinates(generator: random.Random, tensor: Map, *, before: bool) -> str:
    """Draws coordinates of a box, aligned to 16 bytes, that may lie outside of the tensor.

    Loads may begin before the tensor, stores may not.
    """
    found = []
    for i, (dimension, side) in enumerate(zip(tensor.dimensions, tensor.box)):
        unit = 1 if i else 16 // tensor.itemsize
        inside = generator.randrange(max(1, dimension - side + 1))
        beyond = generator.randrange(-side - 1 if before else 0, dimension + 2)
        found.append(generator.choice([0, inside, beyond]) // unit * unit)
    return "{" + ", ".join(map(str, found)) + "}"


def tma() -> Iterator[Program]:
    """Yields programs that load, multicast and store boxes."""
    size, room = 24 * KIB, 9 * KIB
    begin = f""".shared .align 1024 .b8 memory[{room}]; .shared .align 8 .b8 barrier[8];
        .reg .b32 %there, %from; .reg .pred %p, %first, %root; mov.u32 %there, barrier;
        setp.eq.u32 %first, %thread, 0;
        @%first mbarrier.init.shared::cta.b64 [%there], 1; fence.mbarrier_init.release.cluster;"""
    wait = """wait: mbarrier.try_wait.parity.shared::cta.b64 %p, [%there], 0; @!%p bra wait;"""
    for number in range(260):
        generator = random.Random(f"load {number}")
        tensor = _tensor(generator, 0, size)
        rank, place = len(tensor.box), _coordinates(generator, tensor, before=True)
        box = math.prod(tensor.box) * tensor.itemsize
        tile = generator.choice(["", ".tile"])
        body = f"""{begin} {copied(room, 1)} fence.proxy.async.shared::cta; bar.sync 0;
            @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%there], {box};
            @%first {COPY.format(rank, tile)}
                [memory], [%map0, {place}], [%there];
            {wait} {copied(room, 1, back=True)}"""
        arrays = (drawn(generator, size), drawn(generator, room))
        yield Program(f"load {number}, {rank}d, swizzle {tensor.swizzle}", body, arrays, (tensor,))
    for number in range(120):
        generator = random.Random(f"multicast {number}")
        tensor = _tensor(generator, 0, size)
        rank, place = len(tensor.box), _coordinates(generator, tensor, before=True)
        box = math.prod(tensor.box) * tensor.itemsize
        blocks = generator.choice([2, 4, 8])
        root, members = generator.randrange(blocks), generator.randrange(1, 2**blocks)
        body = f"""{begin} mul.lo.u32 %from, %block, {room};
            {copied(room, 1, at="%from")} fence.proxy.async.shared::cta; bar.sync 0;
            .reg .pred %member; shr.u32 %word, {members}, %block; and.b32 %word, %word, 1;
            setp.eq.u32 %member, %word, 1; setp.eq.and.u32 %p, %thread, 0, %member;
            @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%there], {box};
            barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
            setp.eq.and.u32 %root, %block, {root}, %first;
            mov.u16 %short, {members};
            @%root {COPY.format(rank, "")}.multicast::cluster
                [memory], [%map0, {place}], [%there], %short;
            @!%member bra others; {wait} others:
            barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
            {copied(room, 1, back=True, at="%from")}"""
        arrays = (drawn(generator, size), drawn(generator, blocks * room))
        name = f"multicast {number}, {rank}d to {members:#x} of {blocks}"
        yield Program(name, body, arrays, (tensor,), grid=blocks, cluster=blocks)
    for number in range(200):
        generator = random.Random(f"store {number}")
        tensor = _tensor(generator, 0, size)
        rank, place = len(tensor.box), _coordinates(generator, tensor, before=False)
        read = generator.choice([".read", ""])
        body = f"""{begin} {copied(room, 1)} fence.proxy.async.shared::cta; bar.sync 0;
            @%first cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group
                [%map0, {place}], [memory];
            @%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group{read} 0;"""
        arrays = (drawn(generator, size), drawn(generator, room))
        yield Program(f"store {number}, {rank}d, swizzle {tensor.swizzle}", body, arrays, (tensor,))


# wgmma.

WGMMA = [
    *((k, "f32", a, a) for k, a in ((16, "bf16"), (16, "f16"))),
    *((32, "f32", a, b) for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)),
    *((32, "s32", a, b) for a, b in itertools.product(("s8", "u8"), repeat=2)),
]


def _numbers(generator: random.Random, kind: str, size: int) -> np.ndarray:
    """Draws bytes of small numbers, so that the sum of any 64 products is exact."""
    if kind in ("s8", "u8"):
        return drawn(generator, size)
    count = size // np.dtype(ELEMENTS[kind]).itemsize
    found = np.empty(0, np.int32)
    # The chip's results were recorded for numbers from randrange(-4, 5), which takes the upper four
    # bits of a word, and skips words whose upper bits are not below 9. This code draws the same
    # numbers in a tenth to a sixth of the time.
    while missing := count - len(found):
        words = generator.getrandbits(32 * missing).to_bytes(4 * missing, "little")
        upper = (np.frombuffer(words, "<u4") >> 28).astype(np.int32)
        found = np.append(found, upper[upper < 9])
    return (found - 4).astype(np.float32).astype(ELEMENTS[kind]).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class _Side:
    """The layout of an operand in shared memory, which starts at byte `begin`."""

    begin: int
    rows: int
    swizzle: int
    transposed: bool

    def descriptor(self, generator: random.Random, inner: int) -> int:
        """Returns a random valid matrix descriptor of the operand (9.7.15.5.1).

        `inner` is the number of bytes that a product multiplies along K.
        """
        span = self.swizzle or 16
        if self.transposed:
            # A core matrix has 8 rows of K of `span` bytes of M or N.
            across, along = self.rows * 2 // span, 2
            if self.swizzle:
                leading, stride = 8 * span, 8 * span * max(1, across)
                if generator.random() < 0.5:
                    leading, stride = 8 * span * along, 8 * span
            else:
                leading, stride = 128, 128 * along
                if generator.random() < 0.5:
                    leading, stride = 128 * across, 128
            start = 0
        elif self.swizzle:
            leading, stride = 16, 8 * span
            start = inner * generator.randrange(span // inner)
        else:
            columns = inner // 16
            leading, stride = 128, 128 * columns
            if generator.random() < 0.5:
                leading, stride = 128 * (self.rows // 8), 128
            start = 128 * generator.randrange(2)
        mode = {0: 0, 128: 1, 64: 2, 32: 3}[self.swizzle]
        fields = ((self.begin + start) >> 4, leading >> 4 << 16, stride >> 4 << 32, mode << 62)
        return functools.reduce(int.__or__, fields)


def wgmma() -> Iterator[Program]:
    """Yields programs of products, of all types and layouts, accumulated once or three times."""
    # The widths of integer products are those of 9.7.15.2.
    whole = {8, 16, 24, 32, *range(48, 257, 16)}
    for (depth, result, a, b), n, number in itertools.product(WGMMA, range(8, 257, 8), range(2)):
        if result == "s32" and n not in whole:
            continue
        generator = random.Random(f"wgmma {depth} {a} {b} {n} {number}")
        turned = [a in ("bf16", "f16") and generator.random() < 0.5 for _ in range(2)]
        swizzles = [generator.choice([0, 32, 64, 128, 128]) for _ in range(2)]
        for i, rows in enumerate((64, n)):
            # In a transposed operand a core matrix is as wide as the swizzle.
            while turned[i] and swizzles[i] and rows * 2 % swizzles[i]:
                swizzles[i] = generator.choice([0, 32, 64])
                if rows * 2 < 32:
                    swizzles[i] = 0
        sides = [
            _Side(begin, rows, *layout)
            for begin, rows, *layout in zip((0, 8 * KIB), (64, n), swizzles, turned)
        ]
        inner = 32
        registers = [f"%d{i}" for i in range(n // 2)]
        signs = [generator.choice([1, 1, -1]) for _ in range(2)] if result == "f32" else []
        flags = [*signs, *(map(int, turned) if depth == 16 else ())]
        opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{result}.{a}.{b}"
        times = generator.choice([1, 3])
        products = ""
        for i in range(times):
            descriptors = [side.descriptor(generator, inner) for side in sides]
            products += f"""mov.b64 %left, {descriptors[0]}; mov.b64 %right, {descriptors[1]};
                add.u64 %left, %left, %base; add.u64 %right, %right, %base;
                setp.ne.u32 %adds, {i}, 0;
                {opcode} {{{", ".join(registers)}}}, %left, %right, %adds
                {"".join(f", {flag}" for flag in flags)};
                """
        size = (9 + n // 8) * KIB
        left = _numbers(generator, a, 8 * KIB)
        right = _numbers(generator, b, size - 8 * KIB)
        body = f""".shared .align 1024 .b8 memory[{size}]; .reg .b64 %left, %right, %base;
            .reg .pred %adds; {copied(size, n // 2, threads=128)}
            fence.proxy.async.shared::cta; bar.sync 0;
            mov.u64 %base, memory; shr.u64 %base, %base, 4;
            {"".join(f"mov.b32 {register}, 0;" for register in registers)}
            wgmma.fence.sync.aligned; {products}
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
        yield with_registers(
            f"wgmma n{n} {a} {b} {number}",
            body,
            [],
            [32] * (n // 2),
            arrays=[np.concatenate([left, right])],
            block=128,
        )


# The file with the results of a GPU.
ANSWERS = Path(__file__).with_name("chip_results.json")

FAMILIES = {
    f.__name__: f for f in (scalar, lop3, lanes, matrices, memory, clusters, mbarriers, tma, wgmma)
}
