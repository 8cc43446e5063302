"""The emulator's scalar and data instructions, lane by lane, against the PTX ISA (9.0).

The references are exact: Python integers, and fractions that are rounded once. Of a NaN that an
instruction computes only that it is one is compared: its payload is unspecified (9.7.3).
"""

import dataclasses
import functools
import itertools
import random
import re

import numpy as np
import pytest

from ptx_emulator import isa
from ptx_emulator.errors import DeadlockError, EmulatorError, RaceError, UnsupportedError
from ptx_emulator.machine import Machine
from ptx_emulator.parser import Immediate, parse
from ptx_emulator.ptx import addresses, fails, launched, ptx, run, told
from ptx_emulator.scalar_cases import (
    CASES,
    LANES,
    decode,
    drawn,
    encode,
    operands,
    stored,
    width,
    with_one_nan,
)

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"
SYNC, MATRIX, MISC = "9.7.13 synchronisation", "9.7.14 matrices", "9.7.19 miscellaneous"

BLOCKS = 12


@functools.cache
def outcomes(results, kinds, wide):
    """Executes all opcodes of these types; the results of each."""
    group = [c for c in CASES if (c.results, c.kinds, c.wide) == (results, kinds, wide)]
    rows = operands(kinds, wide, 32 * BLOCKS)
    sizes = [64 if wide else 1 if kind == "pred" else stored(kind) for kind in kinds]
    names = ", ".join(f"%a{i}" for i in range(len(kinds)))
    lines, registers = [], []
    for case in group:
        first = len(registers)
        registers += [64 if wide else 1 if kind == "pred" else stored(kind) for kind in results]
        destination = "|".join(f"%d{i}" for i in range(first, len(registers)))
        lines.append(f"{case.opcode} {destination}, {names};")
    found = run("\n".join(lines), list(zip(sizes, zip(*rows))), registers, grid=BLOCKS).results
    size = len(results)
    return {case.opcode: found[i * size : (i + 1) * size] for i, case in enumerate(group)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_lane_alone(case):
    assert isa.TABLE[case.opcode].section == case.section
    found = outcomes(case.results, case.kinds, case.wide)[case.opcode]
    for i, row in enumerate(operands(case.kinds, case.wide, 32 * BLOCKS)):
        raw = [x & 2 ** width(kind) - 1 for x, kind in zip(row, case.kinds)]
        wanted = case.reference(*map(decode, raw, case.kinds))
        if wanted is None:
            continue
        wanted = wanted if isinstance(wanted, list) else [wanted]
        for j, (kind, value) in enumerate(zip(case.results, wanted, strict=True)):
            bits = 64 if case.wide else 1 if kind == "pred" else stored(kind)
            expected = encode(value, kind, bits)
            actual = with_one_nan(found[j][i], kind)
            assert actual == expected, f"{[*map(hex, raw)]}: {actual:#x}, not {expected:#x}"


def test_lop3_has_every_table():
    assert isa.TABLE["lop3.b32"].section == LOGIC
    rows = list(zip(*(drawn(32, i) for i in range(3))))
    body = "\n".join(f"lop3.b32 %d{i}, %a0, %a1, %a2, {i};" for i in range(256))
    found = run(body, [(32, column) for column in zip(*rows)], [32] * 256).results
    for table in range(256):
        for lane, row in enumerate(rows):
            picked = [sum((x >> bit & 1) << 2 - i for i, x in enumerate(row)) for bit in range(32)]
            wanted = sum((table >> index & 1) << bit for bit, index in enumerate(picked))
            assert found[table][lane] == wanted, table


@pytest.mark.parametrize("whole, part", [(32, 16), (64, 32), (64, 16), (16, 8)])
def test_mov_packs_and_unpacks(whole, part):
    """9.7.9.4; registers of 8 bits are declared, which mov may name."""
    assert isa.TABLE[f"mov.b{whole}"].section == MOVE
    count = whole // part
    rows = [drawn(whole, i) for i in range(2)]
    declared = ", ".join(f"x{i}" for i in range(count))
    reverse = ", ".join(f"x{i}" for i in reversed(range(count)))
    body = f""".reg .b{part} {declared};
        mov.b{whole} {{{declared}}}, %a0;
        mov.b{whole} %d0, {{{reverse}}};
        mov.b{whole} {{x0, {", ".join("_" * (count - 1))}}}, %a1;
        mov.b{whole} %d1, {{{declared}}};"""
    found = run(body, [(whole, row) for row in rows], [whole, whole]).results
    low = 2**part - 1
    for lane, (a, b) in enumerate(zip(*rows)):
        parts = [a >> i * part & low for i in range(count)]
        assert found[0][lane] == sum(x << i * part for i, x in enumerate(reversed(parts)))
        assert found[1][lane] == a & ~low | b & low


SPECIAL = {
    "%tid.x": lambda x: x.thread % 8,
    "%tid.y": lambda x: x.thread // 8 % 4,
    "%tid.z": lambda x: x.thread // 32,
    "%ntid.x": lambda x: 8,
    "%ntid.y": lambda x: 4,
    "%ntid.z": lambda x: 2,
    "%ctaid.x": lambda x: x.place[0],
    "%ctaid.y": lambda x: x.place[1],
    "%ctaid.z": lambda x: x.place[2],
    "%nctaid.x": lambda x: 4,
    "%nctaid.y": lambda x: 2,
    "%nctaid.z": lambda x: 1,
    "%laneid": lambda x: x.thread % 32,
    "%lanemask_eq": lambda x: 1 << x.thread % 32,
    "%lanemask_lt": lambda x: (1 << x.thread % 32) - 1,
    "%cluster_ctarank": lambda x: x.place[0] % 2,
    "%cluster_nctarank": lambda x: 2,
    "%cluster_ctaid.x": lambda x: x.place[0] % 2,
    "%cluster_ctaid.y": lambda x: 0,
    "%cluster_nctaid.x": lambda x: 2,
    "%cluster_nctaid.z": lambda x: 1,
    "%clusterid.x": lambda x: x.place[0] // 2,
    "%clusterid.y": lambda x: x.place[1],
    "%nclusterid.x": lambda x: 2,
    "%dynamic_smem_size": lambda x: 48,
}


@dataclasses.dataclass
class Thread:
    """A thread of the launch of `special_registers`."""

    place: tuple[int, int, int]
    thread: int


@functools.cache
def special_registers():
    body = """.reg .b32 x, y, z, n; .reg .b64 at, base;
        mov.u32 x, %tid.x; mov.u32 y, %tid.y; mov.u32 z, %tid.z;
        mad.lo.u32 x, y, 8, x; mad.lo.u32 x, z, 32, x;
        mov.u32 y, %ctaid.x; mov.u32 z, %ctaid.y; mad.lo.u32 y, z, 4, y; mad.lo.u32 x, y, 64, x;
        ld.param.u64 base, [out];"""
    for i, name in enumerate(SPECIAL):
        body += f"""mov.u32 n, {name}; mad.lo.u32 y, x, {len(SPECIAL)}, {i};
            mad.wide.u32 at, y, 4, base; st.global.u32 [at], n;"""
    kernel = parse(ptx(body + "ret;", [".param .u64 out"]))
    machine = Machine(kernel, (4, 2, 1), (8, 4, 2), (2, 1, 1), dynamic_shared=48)
    shape = (8, 64, len(SPECIAL))
    address = machine.memory.place(np.zeros(shape, np.uint32))
    machine.set_parameter(0, address)
    machine.launch()
    return machine.memory.read(address, shape, np.uint32)


def test_clocks_and_conversions_of_special_registers():
    """cvt extends and cuts (10)."""
    body = """.reg .b64 %c; mov.u64 %c, %clock64; mov.b64 %c, %globaltimer; mov.u32 %d0, %clock;
        cvt.u64.u32 %d1, %laneid; cvt.u16.u32 %d2, %laneid; cvt.u32.u64 %d3, %clock64;
        mov.s32 %d4, %laneid; mov.b64 {%d5, _}, %clock64;"""
    found = run(body, results=[32, 64, 16, 32, 32, 32]).results
    assert found[1] == found[2] == found[4] == list(LANES)
    assert found[0][0] < found[3][0] < found[5][0]


@pytest.mark.parametrize("name", SPECIAL)
def test_special_registers(name):
    found = special_registers()[:, :, list(SPECIAL).index(name)]
    for block, thread in itertools.product(range(8), range(64)):
        place = (block % 4, block // 4, 0)
        assert found[block, thread] == SPECIAL[name](Thread(place, thread))


# Memory.

ELEMENTS = ("b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32")


def forms(name):
    """What an opcode loads or stores; only global memory has accesses of 32 bytes (9.7.9.8)."""
    every = itertools.product(("", ".v2", ".v4"), ELEMENTS)
    return [x for x in every if x[0] != ".v4" or width(x[1]) < 64 or ".global" in name]


def all_forms(names):
    return [(name, form) for name in names for form in forms(name)]


def form_name(value):
    return value if isinstance(value, str) else ".".join(value)


def items(vector):
    """Elements of a vector."""
    return int(vector[2:] or 1)


def list_of(names):
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def copied(size, *, back=False):
    """Copies %m0 to the shared variable `memory`, or back."""
    text = ["{.reg .b64 from, to; .reg .b32 x<4>, here; mov.u32 here, memory;"]
    text.append("mad.lo.u32 here, %lane, 16, here; mad.wide.u32 from, %lane, 16, %m0;")
    words = "{x0, x1, x2, x3}"
    for at in range(0, size, 512):
        shared, array = f"[here+{at}]", f"[from+{at}]"
        target, source = (array, shared) if back else (shared, array)
        to, of = ("global", "shared") if back else ("shared", "global")
        text.append(f"ld.{of}.v4.b32 {words}, {source}; st.{to}.v4.b32 {target}, {words};")
    return "\n".join([*text, "}"])


# Opcode -> how %where becomes an address, and which memory it is in.
LOADS = {
    "ld.global": "mov.u64 %where, %m0;",
    "ld.global.nc": "mov.u64 %where, %m0;",
    "ld.shared": "mov.u64 %where, memory;",
    "ld.shared::cta": "mov.u64 %where, memory;",
    "ld.shared::cluster": "mov.u64 %where, memory;",
    "ld.param": "mov.u64 %where, constants;",
    "ld.param::entry": "mov.u64 %where, constants;",
    "ld": "cvta.global.u64 %where, %m0;",
    "ld of shared": "mov.u64 %where, memory; cvta.shared.u64 %where, %where;",
    "ld of param": "mov.u64 %where, constants; cvta.param.u64 %where, %where;",
}
CONTENT = random.Random(1).randbytes(1024)


@functools.cache
def loads(name):
    """What all forms load: of each, and whether registers are wider, the items' values."""
    opcode, body, results, places = name.split()[0], [], [], {}
    for (vector, kind), wide in itertools.product(forms(name), (False, True)):
        if wide and kind == "f32":
            continue
        bits, count = 64 if wide else stored(kind), items(vector)
        first = len(results)
        names = [f"%d{first + i}" for i in range(count)]
        size = width(kind) // 8 * count
        body.append(f"mad.wide.u32 %here, %other, {size}, %where;")
        body.append(f"{opcode}{vector}.{kind} {list_of(names)}, [%here];")
        results += [bits] * count
        places[vector, kind, wide] = slice(first, first + count)
    text = f""".shared .align 32 .b8 memory[1024]; .reg .b64 %where, %here; .reg .b32 %other;
        {copied(1024)}
        mul.lo.u32 %other, %lane, 7; and.b32 %other, %other, 31; {LOADS[name]}"""
    text += "\n".join(body)
    found = run(text, results=results, arrays=[CONTENT], constants=CONTENT).results
    return {key: found[place] for key, place in places.items()}


@pytest.mark.parametrize("name, form", all_forms(LOADS), ids=form_name)
def test_ld(name, form):
    vector, kind = form
    assert isa.TABLE[f"{name.split()[0]}{vector}.{kind}"].section == MOVE
    size = width(kind) // 8
    for wide in (False, True)[: 1 + (kind != "f32")]:
        bits = 64 if wide else stored(kind)
        for i, values in enumerate(loads(name)[vector, kind, wide]):
            for lane in LANES:
                at = (lane * 7 % 32 * items(vector) + i) * size
                raw = int.from_bytes(CONTENT[at : at + size], "little", signed=kind[0] == "s")
                assert values[lane] == raw & 2**bits - 1, (lane, i, wide)


STORES = {
    "st.global": "mov.u64 %where, %m0;",
    "st.shared": "mov.u64 %where, memory;",
    "st.shared::cta": "mov.u64 %where, memory;",
    "st.shared::cluster": "mov.u64 %where, memory;",
    "st": "cvta.global.u64 %where, %m0;",
    "st of shared": "mov.u64 %where, memory; cvta.shared.u64 %where, %where;",
}


def regions():
    """Where each form stores, with room behind every lane's: (form, wide) -> (begin, stride)."""
    begin = 0
    for (vector, kind), wide in itertools.product(forms("st.global"), (False, True)):
        stride = 2 * items(vector) * width(kind) // 8
        yield (vector, kind, wide), begin, stride
        begin += -(-32 * stride // 32) * 32


REGIONS = {key: (begin, stride) for key, begin, stride in regions()}
STORED_BYTES = -(-max(begin + 32 * stride for begin, stride in REGIONS.values()) // 512) * 512
BEFORE = random.Random(2).randbytes(STORED_BYTES)
# Four registers of each width.
SOURCES = {bits: [drawn(bits, i) for i in range(4)] for bits in (16, 32, 64)}


@functools.cache
def stores(name):
    """The memory after all forms have stored to their regions."""
    opcode = name.split()[0]
    first = {bits: 4 * i for i, bits in enumerate(SOURCES)}
    text = f""".shared .align 32 .b8 memory[{STORED_BYTES}]; .reg .b64 %where, %here;
        {copied(STORED_BYTES)} {STORES[name]}"""
    for (vector, kind, wide), (begin, stride) in REGIONS.items():
        if (wide and kind == "f32") or (vector, kind) not in forms(name):
            continue
        start = first[64 if wide else stored(kind)]
        values = list_of([f"%a{start + i}" for i in range(items(vector))])
        text += f"mad.wide.u32 %here, %lane, {stride}, %where;\n"
        text += f"{opcode}{vector}.{kind} [%here+{begin}], {values};\n"
    if "shared" in name:
        text += copied(STORED_BYTES, back=True)
    inputs = [(bits, column) for bits, columns in SOURCES.items() for column in columns]
    return run(text, inputs, arrays=[BEFORE]).arrays[0]


@pytest.mark.parametrize("name, form", all_forms(STORES), ids=form_name)
def test_st(name, form):
    vector, kind = form
    assert isa.TABLE[f"{name.split()[0]}{vector}.{kind}"].section == MOVE
    size = width(kind) // 8
    for wide in (False, True)[: 1 + (kind != "f32")]:
        begin, stride = REGIONS[vector, kind, wide]
        wanted = bytearray(BEFORE[begin : begin + 32 * stride])
        for lane, i in itertools.product(LANES, range(items(vector))):
            value = SOURCES[64 if wide else stored(kind)][i][lane] & 2 ** (8 * size) - 1
            at = lane * stride + i * size
            wanted[at : at + size] = value.to_bytes(size, "little")
        assert stores(name)[begin : begin + 32 * stride] == bytes(wanted), wide


MATRICES = [
    f"{name}matrix.sync.aligned.m8n8.x{count}{trans}.{space}.b16"
    for name in ("ld", "st")
    for count in (1, 2, 4)
    for trans in ("", ".trans")
    for space in ("shared", "shared::cta")
]


@pytest.mark.parametrize("opcode", MATRICES)
def test_ldmatrix_and_stmatrix(opcode):
    """9.7.14.5.15 and 16: lane 4 r + c has elements 2 c and 2 c + 1 of row or column r."""
    assert isa.TABLE[opcode].section == MATRIX
    count, transposed = int(re.search(r"\.x(\d)", opcode)[1]), "trans" in opcode
    generator = random.Random(opcode)
    content, rows = generator.randbytes(2048), generator.sample(range(128), 8 * count)
    # The lanes beyond have no addresses: theirs are neither aligned nor inside.
    places = [16 * row for row in rows] + [2**31 + 1] * (32 - 8 * count)
    values = [drawn(32, i) for i in range(count)]
    name = "a" if opcode.startswith("st") else "d"
    names = "{" + ", ".join(f"%{name}{i + (name == 'a')}" for i in range(count)) + "}"
    access = f"{names}, [%here]" if name == "d" else f"[%here], {names}"
    body = f""".shared .align 128 .b8 memory[2048]; .reg .b32 %here;
        {copied(2048)}
        mov.u32 %here, memory; add.u32 %here, %here, %a0; {opcode} {access};
        {copied(2048, back=True)}"""
    inputs = [(32, places), *((32, column) for column in values)]
    found = run(body, inputs, [32] * count * (name == "d"), arrays=[content])

    def place(matrix, lane, i):
        row, column = lane // 4, 2 * (lane % 4) + i
        row, column = (column, row) if transposed else (row, column)
        return places[8 * matrix + row] + 2 * column

    wanted = bytearray(content)
    for matrix, lane in itertools.product(range(count), LANES):
        at = [place(matrix, lane, i) for i in range(2)]
        if name == "d":
            low, high = (int.from_bytes(content[x : x + 2], "little") for x in at)
            assert found.results[matrix][lane] == low | high << 16, (matrix, lane)
        for x, half in zip(at, (0, 16)) if name == "a" else ():
            wanted[x : x + 2] = (values[matrix][lane] >> half & 0xFFFF).to_bytes(2, "little")
    assert found.arrays[0] == bytes(wanted)


CONVERTED = {
    "global": "mov.u64 %where, %m0;",
    "shared": "mov.u64 %where, memory;",
    "shared::cta": "mov.u64 %where, memory;",
    "param": "mov.u64 %where, constants;",
}


@pytest.mark.parametrize("space", CONVERTED)
def test_cvta_there_and_back(space):
    assert isa.TABLE[f"cvta.{space}.u64"].section == MOVE
    assert isa.TABLE[f"cvta.to.{space}.u64"].section == MOVE
    body = f""".shared .align 32 .b8 memory[1024]; .reg .b64 %where, %generic, %back;
        {copied(1024)} {CONVERTED[space]} mad.wide.u32 %where, %lane, 4, %where;
        cvta.{space}.u64 %generic, %where; cvta.to.{space}.u64 %back, %generic;
        ld.u32 %d0, [%generic]; ld.{space}.u32 %d1, [%back];
        setp.eq.u64 %d2, %where, %back;"""
    found = run(body, results=[32, 32, 1], arrays=[CONTENT], constants=CONTENT).results
    words = np.frombuffer(CONTENT, np.uint32)[:32].tolist()
    assert found == [words, words, [1] * 32]


@pytest.mark.parametrize("bits", [32, 64])
def test_mapa_gives_the_address_that_the_block_of_this_rank_has(bits):
    """9.7.9.23."""
    assert isa.TABLE[f"mapa.shared::cluster.u{bits}"].section == MOVE
    body = f""".shared .align 16 .b8 before[48]; .shared .align 16 .b8 memory[64];
        .reg .b{bits} %own; mov.u{bits} %own, memory;
        add.u{bits} %own, %own, 20;
        mapa.shared::cluster.u{bits} %d0, %own, 0; mapa.shared::cluster.u{bits} %d1, %own, 1;
        mapa.shared::cluster.u{bits} %d2, %d1, %block; mov.b{bits} %d3, %own;"""
    zero, one, back, own = run(body, results=[bits] * 4, grid=2, cluster=2).results
    assert own[0] != own[32] and own == back
    assert zero == own[:32] * 2 and one == own[32:] * 2


# Lanes with each other.


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
def test_shfl(mode):
    """9.7.9.6; b and c have five bits each, c the mask of segments above."""
    opcode = f"shfl.sync.{mode}.b32"
    assert isa.TABLE[opcode].section == MOVE
    generator = random.Random(mode)
    values, sources = (drawn(bits, mode) for bits in (32, 6))
    clamps = [
        0x1F,
        0,
        0x1C1F,
        0x181F,
        0x1800,
        0x1E1F,
        0x0F0B,
        *generator.choices(range(2**13), k=9),
    ]
    body = "\n".join(
        f"{opcode} %d{2 * i}|%d{2 * i + 1}, %a0, %a1, {c}, 0xFFFFFFFF;"
        for i, c in enumerate(clamps)
    )
    body += f"{opcode} %d{2 * len(clamps)}, %a0, 3, {clamps[0]}, -1;"
    results = [32, 1] * len(clamps) + [32]
    found = run(body, [(32, values), (32, sources)], results).results

    def source(lane, b, c):
        b, segment, c = b & 31, c >> 8 & 31, c & 31
        lowest = lane & segment
        most = lowest | c & ~segment & 31
        at = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | b & ~segment}[
            mode
        ]
        inside = at >= most if mode == "up" else at <= most
        return (at if inside else lane), inside

    for lane in LANES:
        for i, c in enumerate(clamps):
            at, inside = source(lane, sources[lane], c)
            assert (found[2 * i][lane], found[2 * i + 1][lane]) == (values[at], inside), (lane, c)
        assert found[-1][lane] == values[source(lane, 3, clamps[0])[0]]


def test_lanes_of_a_member_mask():
    """Even lanes alone: 9.7.9.6, 9.7.13.9 and 14; the other lanes' registers stay."""
    even = 0x55555555
    votes = [drawn(1, 0), [1] * 32, [0] * 32, [1 - i % 2 for i in LANES]]
    body = f""".reg .pred %even; .reg .b32 %bit; and.b32 %bit, %lane, 1; setp.eq.u32 %even, %bit, 0;
        mov.u32 %d0, 99; mov.u32 %d1, 99; mov.pred %d2, 0;
        @%even shfl.sync.bfly.b32 %d0, %lane, 2, 31, {even};
        @%even elect.sync %d1|%d2, {even};"""
    for i in range(4):
        ballot, first = 3 + 4 * i, 4 + 4 * i
        body += f"mov.u32 %d{ballot}, 99;\n"
        body += f"@%even vote.sync.ballot.b32 %d{ballot}, !%a{i}, {even};\n"
        for j, mode in enumerate(("any", "all", "uni")):
            body += f"mov.pred %d{first + j}, 0;\n"
            body += f"@%even vote.sync.{mode}.pred %d{first + j}, %a{i}, {even};\n"
    found = run(body, [(1, vote) for vote in votes], [32, 32, 1] + [32, 1, 1, 1] * 4).results
    members = LANES[::2]
    assert found[0] == [99 if lane % 2 else lane ^ 2 for lane in LANES]
    leaders = [lane for lane in LANES if found[2][lane]]
    assert len(leaders) == 1 and leaders[0] in members
    assert found[1] == [99 if lane % 2 else leaders[0] for lane in LANES]
    for i, vote in enumerate(votes):
        mine = [vote[lane] for lane in members]
        ballot = sum(1 << lane for lane in members if not vote[lane])
        wanted = [any(mine), all(mine), len(set(mine)) == 1]
        assert found[3 + 4 * i] == [99 if lane % 2 else ballot for lane in LANES]
        for j, value in enumerate(wanted):
            assert found[4 + 4 * i + j] == [int(value) * (1 - lane % 2) for lane in LANES]


@pytest.mark.parametrize("mode", ["any", "all", "uni", "ballot"])
def test_vote_of_the_whole_warp(mode):
    opcode = f"vote.sync.{mode}.{'b32' if mode == 'ballot' else 'pred'}"
    assert isa.TABLE[opcode].section == SYNC
    votes = [[0] * 32, [1] * 32, [int(i == 31) for i in LANES], [int(i > 0) for i in LANES]]
    body = "\n".join(f"{opcode} %d{i}, %a{i}, 0xFFFFFFFF;" for i in range(4))
    bits = 32 if mode == "ballot" else 1
    found = run(body, [(1, vote) for vote in votes], [bits] * 4).results
    for vote, values in zip(votes, found):
        ballot = sum(x << lane for lane, x in enumerate(vote))
        wanted = {"any": any(vote), "all": all(vote), "uni": len(set(vote)) == 1, "ballot": ballot}
        assert values == [wanted[mode]] * 32


def test_elect_chooses_one_lane_and_tells_all():
    assert isa.TABLE["elect.sync"].section == SYNC
    body = "elect.sync %d0|%d1, 0xFFFFFFFF; elect.sync _|%d2, -1;"
    leader, chosen, again = run(body, results=[32, 1, 1]).results
    assert sum(chosen) == sum(again) == 1
    assert leader == [chosen.index(1)] * 32


def test_activemask_is_of_the_lanes_that_are_here():
    assert isa.TABLE["activemask.b32"].section == SYNC
    body = """.reg .pred p; setp.lt.u32 p, %lane, 5; activemask.b32 %d0;
        @p bra few; activemask.b32 %d1; bra all;
        few: activemask.b32 %d1;
        all: vote.sync.any.pred p, p, -1; activemask.b32 %d2;"""
    before, apart, after = run(body, results=[32] * 3).results
    assert before == after == [2**32 - 1] * 32
    assert apart == [31] * 5 + [2**32 - 32] * 27


# What has no effect that can be seen.

WITHOUT_EFFECT = {
    "prefetch.L1": (MOVE, "[%m0]"),
    "prefetch.L2": (MOVE, "[%m0+4]"),
    "prefetch.global.L1": (MOVE, "[%m0]"),
    "prefetch.global.L2": (MOVE, "[%m0]"),
    "nanosleep.u32": (MISC, "%a0"),
    "griddepcontrol.wait": (SYNC, ""),
    "griddepcontrol.launch_dependents": (SYNC, ""),
}


@pytest.mark.parametrize("opcode", WITHOUT_EFFECT)
def test_what_changes_no_register_and_no_memory(opcode):
    section, operand = WITHOUT_EFFECT[opcode]
    assert isa.TABLE[opcode].section == section
    body = f"mov.b32 %d0, %a0; {opcode} {operand}; mov.b32 %d1, %a0; mov.b64 %d2, %m0;"
    found = run(body, [(32, list(LANES))], [32, 32, 64], arrays=[CONTENT])
    assert found.results[:2] == [list(LANES)] * 2 and len(set(found.results[2])) == 1
    assert found.arrays == [CONTENT]


def warpgroups(first, second, third):
    """Three warpgroups, which have 168 registers a thread, execute one statement each."""
    return f""".reg .pred p; setp.lt.u32 p, %warp, 8; @p bra lower; {third} bra end;
        lower: setp.lt.u32 p, %warp, 4; @p bra lowest; {second} bra end; lowest: {first} end:"""


def test_setmaxnreg_waits_for_registers_that_others_give_back():
    """65536 registers of the multiprocessor, in eights: 384 threads have 168 each."""
    less, more = (f"setmaxnreg.{x}.sync.aligned.u32" for x in ("dec", "inc"))
    assert isa.TABLE[less].section == isa.TABLE[more].section == MISC
    for schedule in ("eager", "late", "random"):
        options = dict(threads=384, schedule=schedule)
        run(warpgroups(f"{less} 40;", f"{more} 232;", f"{more} 232;"), **options)
        # What was taken may be given back, and taken by others.
        run(warpgroups(f"{less} 24;", f"{more} 248; {less} 24;", f"{more} 256;"), **options)
        for counts in ((40, 240, 232), (48, 232, 232), (24, 248, 248)):
            first, second, third = counts
            body = warpgroups(f"{less} {first};", f"{more} {second};", f"{more} {third};")
            fails(DeadlockError, "registers; its block has .* that are free", body, **options)
    fails(EmulatorError, "setmaxnreg.inc.* to 160 from 168", f"{more} 160;", threads=384)
    fails(EmulatorError, "setmaxnreg.dec.* to 176 from 168", f"{less} 176;", threads=384)


def test_setmaxnreg_begins_with_what_the_kernel_says():
    """.maxnreg; or the registers of the multiprocessor divided by .minnctapersm blocks."""
    text = ptx("setmaxnreg.dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 COUNT; ret;")
    for directive, count in ((".maxnreg 128", 128), (".minnctapersm 16", 128), ("", 256)):
        launch = text.replace(".maxntid 32, 1, 1", f".maxntid 32, 1, 1\n{directive}")
        Machine(parse(launch.replace("COUNT", str(count))), (1, 1, 1)).launch()
        if count < 256:
            machine = Machine(parse(launch.replace("COUNT", str(count + 8))), (1, 1, 1))
            with pytest.raises(DeadlockError, match="2304 registers; its block has"):
                machine.launch()


@pytest.mark.parametrize("space", ["shared", "shared::cta"])
def test_ld_of_128_bits_to_one_register(space):
    """Compared by what clusterlaunchcontrol makes of it (test_ptx_emulator_copies.py)."""
    opcode = f"ld.{space}.b128"
    assert isa.TABLE[opcode].section == MOVE
    query = "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, handle;"
    body = f""".reg .b128 handle; .reg .pred %p; .reg .b32 %x; .shared .align 16 .b8 memory[512];
        mov.u32 %x, memory; mad.lo.u32 %x, %lane, 16, %x;
        st.shared.v4.u32 [%x], {{{{0, 0, 0, {{}}}}}};
        {opcode} handle, [%x]; {query} selp.b32 %d0, 1, 0, %p;"""
    assert run(body.format("0x600D"), results=[32]).results == [[1] * 32]
    assert run(body.format("0xBAD"), results=[32]).results == [[0] * 32]
    with pytest.raises(UnsupportedError, match="is no register of 128 bits"):
        run(f".reg .b64 %x; {opcode} %x, [%x];")


def test_prefetch_of_a_tensor_map_needs_one():
    assert isa.TABLE["prefetch.tensormap"].section == MOVE
    body = """.reg .b64 map; mov.u64 map, tensor; cvta.param.u64 map, map;
        prefetch.tensormap [map]; ret;"""
    kernel = parse(ptx(body, [".param .align 64 .b8 tensor[128]"]))
    machine = Machine(kernel, (1, 1, 1))
    with pytest.raises(EmulatorError, match=r"no tensor map at .*\n.*line \d+"):
        machine.launch()
    machine = Machine(kernel, (1, 1, 1))
    machine.tensor_maps[machine.parameter_address(0)] = object()
    machine.launch()


def test_trap_says_where():
    assert isa.TABLE["trap"].section == MISC
    with pytest.raises(EmulatorError, match=r"a trap\n.*warp 0.*line \d+: trap"):
        launched("trap;\nret;")


OTHERS = {
    "lop3.b32",
    *(f"{name.split()[0]}{'.'.join(form)}" for name, form in all_forms([*LOADS, *STORES])),
    *MATRICES,
    *(f"cvta{to}.{space}.u64" for to in ("", ".to") for space in CONVERTED),
    *("mapa.shared::cluster.u32", "mapa.shared::cluster.u64"),
    *(f"shfl.sync.{mode}.b32" for mode in ("idx", "up", "down", "bfly")),
    *(f"vote.sync.{mode}" for mode in ("any.pred", "all.pred", "uni.pred", "ballot.b32")),
    *("elect.sync", "activemask.b32", "prefetch.tensormap", "trap"),
    *("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32"),
    *("ld.shared.b128", "ld.shared::cta.b128"),
    *WITHOUT_EFFECT,
}


def test_every_form_has_a_test():
    modules = ("ptx_emulator.scalar", "ptx_emulator.data")
    registered = {
        opcode for opcode, definition in isa.TABLE.items() if definition.make.__module__ in modules
    }
    assert registered == {case.opcode for case in CASES} | OTHERS


# The parser, and branches.


def test_scopes_have_registers_and_labels_of_their_own():
    body = """.reg .b32 x; mov.u32 x, 1;
        { .reg .b32 x; mov.u32 x, 10; bra next; mov.u32 x, 11;
          next: { .reg .b32 x; mov.u32 x, 100; bra next; mov.u32 x, 101; next: mov.u32 %d2, x; }
          mov.u32 %d1, x; bra last; }
        { .reg .b64 x; mov.u64 x, 7; cvt.u32.u64 %d3, x; }
        next: mov.u32 x, 2;
        last: mov.u32 %d0, x;
        { .reg .b32 y; mov.u32 y, x; { { add.u32 %d4, y, x; } } }"""
    found = run("mov.u32 %d3, 5;" + body, results=[32] * 5).results
    assert [values[0] for values in found] == [1, 10, 100, 5, 2]


def test_ranges_of_registers_vectors_and_a_register_that_is_read_and_written():
    body = """.reg .b32 %r<4>, other; .reg .pred %p<2>;
        mov.b64 {%r0, %r3}, 0x0000000500000003;
        { .reg .b32 %r<2>; mov.u32 %r1, 77; }
        mov.u32 %r1, 9; mad.lo.u32 %r3, %r3, %r0, %r3;
        st.global.v4.b32 [ %m0 + 16 ], { %r0 , %r1 , 6 , %r3 };
        ld.global.v4.u32 {%d0, %d1, other, _}, [%m0+16];
        setp.eq.u32 %p1|_, other, 6; setp.ne.and.u32 _|%p0, other, 6, !%p1;
        selp.b32 %d2, 1, 0, %p1; selp.b32 %d3, 1, 0, %p0;"""
    found = run(body, results=[32] * 4, arrays=[bytes(64)])
    assert [values[0] for values in found.results] == [3, 9, 1, 0]
    assert np.frombuffer(found.arrays[0], np.uint32).tolist() == [0] * 4 + [3, 9, 6, 20] + [0] * 8


@pytest.mark.parametrize(
    "kind, text, value",
    [
        ("u32", "17", 17),
        ("u32", "0x1F", 31),
        ("u32", "0XfU", 15),
        ("u32", "3000000000U", 3000000000),
        ("u32", "0", 0),
        ("u32", "017", 15),
        ("u32", "0777U", 511),
        ("u32", "0b1011", 11),
        ("u32", "0B101U", 5),
        ("s32", "-010", 2**32 - 8),
        ("u16", "65535", 65535),
        ("s16", "-32768", 32768),
        ("u32", "-1", 0xFFFFFFFF),
        ("u32", "-0x10", 0xFFFFFFF0),
        ("s32", "-2147483648", 0x80000000),
        ("s64", "-2", 2**64 - 2),
        ("u64", "0xFFFFFFFFFFFFFFFF", 2**64 - 1),
        ("u16", "-1", 0xFFFF),
        ("f32", "0f3F800000", 0x3F800000),
        ("f32", "0FffC00001", 0xFFC00001),
        ("b32", "0f3F800000", 0x3F800000),
        ("pred", "1", 1),
        ("pred", "0", 0),
    ],
)
def test_immediates(kind, text, value):
    assert run(f"mov.{kind} %d0, {text};", results=[width(kind)]).results == [[value] * 32]


@pytest.mark.parametrize("sign", [1, -1])
def test_addresses_with_offsets(sign):
    words = np.arange(64, dtype=np.uint32)
    body = f""".shared .align 16 .b32 table[64]; {{ .reg .b64 at; .reg .b32 x, y, here;
        mad.wide.u32 at, %lane, 4, %m0; mov.u32 here, table; mad.lo.u32 here, %lane, 4, here;
        ld.global.u32 x, [at]; st.shared.u32 [here], x; ld.global.u32 x, [at+128];
        st.shared.u32 [here+0x80], x;
        add.u64 at, at, {64 * (1 - sign)}; ld.global.u32 %d0, [at+{sign * 64}];
        add.u32 here, here, {64 * (1 - sign)}; ld.shared.u32 %d1, [here + {sign * 64}];
        ld.shared.u32 %d2, [table+12]; mov.u64 at, table+20; ld.shared.u32 %d3, [at];
        ld.param.b32 %d4, [constants+4]; }}"""
    found = run(body, results=[32] * 5, arrays=[words.tobytes()], constants=words[:4].tobytes())
    at = [lane + 32 * (sign < 0) + (16 if sign > 0 else -16) for lane in LANES]
    assert found.results == [at, at, [3] * 32, [5] * 32, [1] * 32]


def test_comments_directives_and_line_numbers():
    text = ptx(
        """// mov.u32 x, 1; }
        .reg .b32 x; /* a comment { of
        two lines */ .loc 1 20 3
        .loc 1 21 5, function_name $info, inlined_at 1 20 3
        .pragma "nounroll";
        $here_1: mov.u32
            x, 2; // behind
        .reg .pred never; @never ret;
        /**/ret;""",
        prelude="/* .entry other() { } */",
    )
    kernel = parse(text)
    first = text[: text.index("mov.u32\n")].count("\n") + 1
    assert [(line.opcode, line.line) for line in kernel.code] == [
        ("mov.u32", first),
        ("ret", first + 2),
        ("ret", first + 3),
    ]
    assert kernel.code[0].operands[1] == Immediate(2)
    assert kernel.name == "kernel" and kernel.block == (32, 1, 1) and kernel.target == "sm_100a"


def test_a_kernel_is_found_by_its_name():
    second = ".visible .entry second(.param .u32 n) .reqntid 64 { exit; }"
    text = ptx("ret;") + second
    assert parse(text).name == "kernel"
    assert parse(text, "second").block == (64, 1, 1)
    with pytest.raises(UnsupportedError, match="no kernel third"):
        parse(text, "third")


def test_parameters_and_shared_variables_are_aligned():
    parameters = [".param .u8 a", ".param .u64 .ptr .global .align 16 b", ".param .u16 c"]
    parameters += [".param .align 64 .b8 d[65]", ".param .f32 e"]
    prelude = """.shared .align 4 .b8 first[5];
        .extern .shared .align 128 .b8 dynamic[];"""
    kernel = parse(ptx(".shared .b64 second[3]; ret;", parameters, prelude))
    assert [(x.offset, x.size) for x in kernel.parameters] == [
        (0, 1),
        (8, 8),
        (16, 2),
        (64, 65),
        (132, 4),
    ]
    shared = kernel.shared
    assert shared["second"] % 8 == 0 and shared["dynamic"] % 128 == 0
    assert 5 <= shared["second"] and shared["second"] + 24 <= shared["dynamic"]
    assert kernel.shared_bytes == shared["dynamic"]


def test_branches_by_a_table():
    body = """.reg .pred p; .reg .b32 i; and.b32 i, %lane, 3; mov.u32 %d0, 0;
        setp.lt.u32 p, %lane, 24;
        table: .branchtargets zero, one, two, one;
        @p brx.idx i, table;
        mov.u32 %d0, 50; bra after;
        zero: add.u32 %d0, %d0, 10; bra after;
        two: add.u32 %d0, %d0, 20;
        one: add.u32 %d0, %d0, 1;
        after: vote.sync.ballot.b32 %d1, 1, -1;"""
    found = run(body, results=[32, 32]).results
    assert found[0] == [(10, 1, 21, 1)[lane % 4] if lane < 24 else 50 for lane in LANES]
    assert found[1] == [2**32 - 1] * 32


def test_a_branch_beyond_its_table_is_an_error():
    body = "table: .branchtargets here; brx.idx %lane, table; here:"
    with pytest.raises(EmulatorError, match="branch 1 of 1 targets"):
        run(body)


@pytest.mark.parametrize("index", ["%h0", "%q0", "1"])
def test_a_branch_by_what_is_no_register_of_32_bits(index):
    statement = f"table: .branchtargets here; brx.idx {index}, table;\nhere:"
    refused(statement, UnsupportedError, "no register of 32 bits")


def test_a_loop_whose_lanes_leave_one_by_one():
    body = """.reg .pred p, q; .reg .b32 i; mov.u32 i, 0; mov.u32 %d0, 0; mov.u32 %d1, 0;
        again: setp.ge.u32 p, i, %lane; @p bra done;
        add.u32 i, i, 1; add.u32 %d0, %d0, i; bra.uni again;
        done: setp.eq.u32 q, %lane, 7; @!q add.u32 %d1, %d1, 1; @ q add.u32 %d1, %d1, 2;"""
    found = run(body, results=[32, 32]).results
    assert found[0] == [lane * (lane + 1) // 2 for lane in LANES]
    assert found[1] == [2 if lane == 7 else 1 for lane in LANES]


@pytest.mark.parametrize("negation", ["", "!"])
def test_sides_of_a_branch_write_their_own_lanes(negation):
    """Registers and memory; then all lanes are together again."""
    body = f""".reg .pred p; .reg .b32 x, y; .reg .b64 at; mul.lo.u32 x, %lane, 5; and.b32 y, x, 4;
        setp.ne.u32 p, y, 0; mad.wide.u32 at, %lane, 4, %m0; mov.u32 %d0, 1000; mov.u32 %d2, 1;
        @{negation}p bra other;
        mov.u32 %d0, x; st.global.u32 [at], 7; bra.uni join;
        other: add.u32 %d0, %d0, x; st.global.u32 [at], 8; mov.u32 %d2, 2;
        join: vote.sync.ballot.b32 %d1, 1, -1; shfl.sync.idx.b32 %d2, %d2, 1, 31, -1;"""
    found = run(body, results=[32] * 3, arrays=[bytes(128)])
    jumps = [bool(lane * 5 & 4) != bool(negation) for lane in LANES]
    assert found.results[0] == [1000 * jumps[lane] + 5 * lane for lane in LANES]
    assert found.results[1] == [2**32 - 1] * 32
    assert found.results[2] == [1 + jumps[1]] * 32
    assert np.frombuffer(found.arrays[0], np.uint32).tolist() == [7 + jump for jump in jumps]


def test_lanes_that_exit_are_not_waited_for():
    body = """.reg .pred p; .reg .b32 x; .reg .b64 at, base; mov.u32 x, %tid.x;
        ld.param.u64 base, [out]; mad.wide.u32 at, x, 4, base; st.global.u32 [at], 1;
        setp.ge.u32 p, x, 20; @p exit; activemask.b32 x; st.global.u32 [at], x; ret;"""
    machine = launched(body, [".param .u64 out"], [np.zeros(32, np.uint32)])
    found = machine.memory.read(addresses(machine)[0], (32,), np.uint32)
    assert found.tolist() == [2**20 - 1] * 20 + [1] * 12


# What is refused.

DECLARED = """.reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %q<4>; .reg .pred %p<4>;
    .shared .align 16 .b8 memory[64];
    mov.u32 %r0, memory; ld.param.u64 %q0, [out]; mov.u32 %r1, %tid.x;"""


def refused(statement, error, message, **launch):
    """The statement is an error whose message names its place."""
    body = f"{DECLARED}\n{statement}\nret;"
    line = ptx(body, [".param .u64 out"]).split(statement)[0].count("\n") + 1
    with pytest.raises(error, match=f"(?s){message}") as caught:
        launched(body, [".param .u64 out"], [np.zeros(16, np.uint32)], **launch)
    assert f"line {line}: " in told(caught.value), told(caught.value)


@pytest.mark.parametrize(
    "statement, message",
    {
        "an unknown opcode": ("frobnicate.u32 %r1, %r0;", "frobnicate.u32 is not among"),
        "no type": ("add %r1, %r0, %r0;", "add is not among"),
        "saturation": ("add.sat.s32 %r1, %r0, %r0;", "add.sat.s32 is not among"),
        "flush to zero": ("add.ftz.f32 %r1, %r0, %r0;", "add.ftz.f32 is not among"),
        "32 bytes of shared memory": (
            "ld.shared.v4.b64 {%q0, %q1, %q2, %q3}, [%r0];",
            "ld.shared.v4.b64 is not among",
        ),
        "volatile": ("ld.volatile.global.u32 %r1, [%q0];", "ld.volatile.global.u32 is not among"),
        "a predicate of branches": ("bra.foo there;\nthere:", "bra.foo is not among"),
        "a source too wide": ("add.u32 %r1, %r0, %q0;", "64 bits where u32"),
        "a source too narrow": ("add.u32 %r1, %r0, %h0;", "16 bits where u32"),
        "a target too wide": ("add.u32 %q0, %r0, %r1;", "64 bits where u32"),
        "a target too narrow": ("mul.wide.u32 %r1, %r0, %r1;", "32 bits where u64"),
        "a number for a predicate": ("selp.b32 %r1, %r0, %r0, %r1;", "32 bits where pred"),
        "a load to a narrow register": ("ld.global.u32 %h0, [%q0];", "16 bits where u32"),
        "a load of a float to a wide one": ("ld.global.f32 %q1, [%q0];", "64 bits where f32"),
        "a store of a float of a wide one": ("st.global.f32 [%q0], %q0;", "64 bits where f32"),
        "cvt to a narrow register": ("cvt.u32.u64 %h0, %q0;", "16 bits where u32"),
        "cvt of a narrow register": ("cvt.u64.u32 %q1, %h0;", "16 bits where u32"),
        "parts of a wrong width": ("mov.b64 {%h0, %h1}, %q0;", "16 bits where b32"),
        "nanosleep of a wrong width": ("nanosleep.u32 %q0;", "64 bits where u32"),
        "one operand too few": ("add.u32 %r1, %r0;", "1 operands instead of 2"),
        "one operand too many": ("add.u32 %r1, %r0, %r0, %r0;", "3 operands instead of 2"),
        "an operand of setp too many": (
            "setp.eq.u32 %p0, %r0, %r1, %p1;",
            "3 operands instead of 2",
        ),
        "an operand of setp too few": ("setp.eq.and.u32 %p0, %r0, %r1;", "2 operands instead of 3"),
        "a vector too short": ("ld.global.v4.u32 {%r1, %r2}, [%q0];", "2 registers instead of 4"),
        "a vector too long": (
            "st.global.v2.u32 [%q0], {%r1, %r2, %r3};",
            "3 registers instead of 2",
        ),
        "no vector": ("ld.global.v2.u32 %r1, [%q0];", "1 registers instead of 2"),
        "a vector unasked": ("ld.global.u32 {%r1, %r2}, [%q0];", "2 registers instead of 1"),
        "matrices without registers": (
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2}, [%r0];",
            "2 registers instead of 4",
        ),
        "matrices without values": (
            "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r0], {%r1};",
            "1 registers instead of 2",
        ),
        "a table beyond 8 bits": ("lop3.b32 %r1, %r0, %r0, %r0, 256;", "table 256"),
        "no address": ("ld.global.u32 %r1, %q0;", "no address"),
        "a special register": ("mov.u32 %r1, %nosuch;", "special register %nosuch"),
        "a constant of 33 bits": ("mov.u32 %r1, 4294967296;", "4294967296 is beyond u32"),
        "a constant below": ("mov.s32 %r1, -2147483649;", "-2147483649 is beyond s32"),
        "a constant of 17 bits": ("add.u16 %h0, %h0, 65536;", "65536 is beyond u16"),
        "a negative one": ("mov.u16 %h0, -32769;", "-32769 is beyond u16"),
        "a byte": ("st.global.u8 [%q0], 256;", "256 is beyond u8"),
        "a predicate of 2": ("mov.pred %p0, 2;", "2 is beyond pred"),
        "a constant of 65 bits": ("mov.u64 %q0, 18446744073709551616;", "is beyond u64"),
        "an integer for a float": ("add.f32 %r1, %r0, 1;", "0x1 as f32"),
        "an integer for a half": ("add.f16 %h1, %h0, 0x3C00;", "0x3c00 as f16"),
        "a float for an integer": ("add.u32 %r1, %r0, 0f3F800000;", "0x3f800000 as u32"),
        "a decimal digit of octal": ("mov.u32 %r1, 08;", "no variable 08"),
        "a binary digit": ("mov.u32 %r1, 0b12;", "no variable 0b12"),
        "a small suffix": ("mov.u32 %r1, 12u;", "no variable 12u"),
        "an offset": ("ld.global.u32 %r1, [%q0+08];", "the offset 08"),
        "a narrow special": ("mov.u16 %h0, %laneid;", "%laneid has 32 bits, not u16"),
        "a wide special": ("mov.u64 %q0, %tid.x;", "%tid.x has 32 bits, not u64"),
        "half a clock": ("mov.u32 %r1, %clock64;", "%clock64 has 64 bits, not u32"),
        "a special float": ("mov.f32 %r1, %tid.x;", "%tid.x has 32 bits, not f32"),
        "a special operand": ("add.u32 %r1, %r0, %tid.x;", "%tid.x is read by mov and cvt alone"),
        "a special address": ("ld.global.u32 %r1, [%clock64];", "%clock64 is read by mov and cvt"),
        "a special that is stored": ("st.global.u32 [%q0], %laneid;", "%laneid is read by mov"),
        "a name twice": (".reg .b32 %r1;", "%r1 is declared twice"),
        "a label twice": ("here: mov.u32 %r1, 0; here:", "here is declared twice"),
        "a register that is not declared": ("add.u32 %r1, %r0, %r99;", "register %r99"),
        "a target that is not declared": ("add.u32 other, %r0, %r0;", "other.* cannot be written"),
        "a variable": ("mov.u32 %r1, nosuch;", "no variable nosuch"),
        "a variable's address": ("ld.shared.u32 %r1, [nosuch+4];", "no variable nosuch"),
        "a constant as target": ("mov.u32 5, %r0;", "cannot be written"),
        "a double for a float": ("add.f32 %r1, %r0, 0d3FF0000000000000;", "no variable 0d3FF"),
        "a label": ("bra nowhere;", "no label among .*nowhere"),
        "a label of an inner scope": ("bra inside; { inside: }", "no label among .*inside"),
        "a branch table": ("brx.idx %r1, nowhere;", "nowhere"),
        "a predicate": ("@nosuch ret;", "no predicate nosuch"),
        "registers beyond the limit": ("setmaxnreg.inc.sync.aligned.u32 264;", "264"),
        "registers not in eights": ("setmaxnreg.dec.sync.aligned.u32 100;", "100"),
    }.values(),
    ids=lambda value: value.split(";")[0],
)
def test_what_is_not_known_is_refused(statement, message):
    refused(statement, UnsupportedError, message)


@pytest.mark.parametrize(
    "statement, message",
    {
        "a word": ("ld.global.u32 %r1, [%q0+2];", "not aligned"),
        "a vector": ("ld.global.v2.u32 {%r1, %r2}, [%q0+4];", "not aligned"),
        "one lane": (
            "mad.wide.u32 %q1, %r1, 4, %q0; setp.eq.u32 %p0, %r1, 3; @%p0 add.u64 %q1, %q1, 1;"
            "setp.lt.u32 %p1, %r1, 8; @%p1 st.global.u32 [%q1], 1;",
            "4 bytes at 0x[0-9a-f]+d is not aligned",
        ),
        "a matrix": ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0+8];", "not aligned"),
        "a shared word": ("st.shared.u16 [%r0+1], %h0;", "not aligned"),
        "a parameter": ("ld.param.u64 %q1, [out+4];", "not aligned"),
        "behind an array": ("ld.global.u32 %r1, [%q0+64];", "outside of all arrays"),
        "before an array": ("st.global.u32 [%q0+-4], %r1;", "outside of all arrays"),
        "across its end": ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%q0+64];", "outside"),
        "lane 16 of 32": ("mad.wide.u32 %q1, %r1, 4, %q0; st.global.u32 [%q1], 1;", "outside"),
        "null": ("mov.u64 %q1, 0; ld.global.u32 %r1, [%q1];", "outside of all arrays"),
        "generic null": ("mov.u64 %q1, 0; ld.u32 %r1, [%q1];", "outside of all arrays"),
        "behind shared memory": ("ld.shared.u32 %r1, [%r0+64];", "outside of its 64 bytes"),
        "before shared memory": ("st.shared.u32 [%r0+-4], %r1;", "outside of its 64 bytes"),
        "far before": ("st.shared.u32 [%r0+-2048], %r1;", "no block"),
        "a row of a matrix": (
            "mad.lo.u32 %r2, %r1, 16, %r0; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];",
            "outside of its 64 bytes",
        ),
        "behind the parameters": ("ld.param.u32 %r1, [out+8];", "beyond"),
        "before the parameters": ("ld.param.u32 %r1, [out+-8];", "beyond"),
        "a store to a parameter": (
            "mov.u64 %q1, out; cvta.param.u64 %q1, %q1; st.u32 [%q1], 1;",
            "a store to a kernel parameter",
        ),
        "an address of a block that is not there": (
            "mapa.shared::cluster.u32 %r2, %r0, 1; ld.shared::cta.u32 %r1, [%r2];",
            "no block 1",
        ),
        "a lane that is no member": (
            "shfl.sync.idx.b32 %r1, %r1, 0, 31, 0xFFFF;",
            "members 0xffff",
        ),
        "a member that is not here": (
            "setp.lt.u32 %p0, %r1, 16; @%p0 vote.sync.any.pred %p1, %p0, 0x1FFFF;",
            "members 0x1ffff",
        ),
        "a value of a lane that is not here": (
            "setp.lt.u32 %p0, %r1, 16; @%p0 shfl.sync.idx.b32 %r1, %r1, 20, 31, 0xFFFF;",
            "lane 20",
        ),
        "a matrix without all lanes": (
            "setp.lt.u32 %p0, %r1, 16;@%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0];",
            "without all lanes",
        ),
    }.values(),
    ids=lambda value: value.split(";")[0],
)
def test_what_a_kernel_must_not_do_is_an_error(statement, message):
    refused(statement, EmulatorError, message)


@pytest.mark.parametrize(
    "statement",
    [
        "st.global.u32 [%q0], {};",
        "st.shared.u32 [%r0], {};",
        "and.b32 %r2, %r1, 7; mad.lo.u32 %r2, %r2, 8, %r0; st.shared.v2.u32 [%r2], {{{}, 7}};",
        "and.b32 %r2, %r1, 15; mad.wide.u32 %q1, %r2, 4, %q0; st.u32 [%q1], {};",
        "mov.u32 %r2, %r0; mov.u32 %r3, %r1;"
        "{{ .reg .b32 x; mov.u32 x, {}; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {{x}}; }}",
    ],
)
def test_lanes_write_one_value_to_one_address(statement):
    """Which one stays is not defined, so different ones are refused (9.7.9.12)."""
    wrong = statement.format("%r1")
    refused(wrong, RaceError, "lanes 0 and (1|8|16) write different values to one address")
    launched(f"{DECLARED} {statement.format(5)} ret;", [".param .u64 out"], [np.zeros(16, "u4")])


@pytest.mark.parametrize("space", ["shared", "shared::cta"])
@pytest.mark.parametrize("opcode", ["ld.{}.u32 %r3, [%r2];", "st.{}.u32 [%r2], 1;"])
def test_an_address_of_another_block_is_none_of_the_own(space, opcode):
    statement = ".reg .b32 %x; mov.u32 %x, %cluster_ctarank; xor.b32 %x, %x, 1;"
    statement += f"mapa.shared::cluster.u32 %r2, %r0, %x; {opcode.format(space)}"
    message = r"an address of block \d as one of the own block"
    refused(statement, EmulatorError, message, grid=2, cluster=2)
