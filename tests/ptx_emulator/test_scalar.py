"""Tests the emulator's scalar and data instructions against the PTX ISA (9.0).

The references are exact: Python integers, and fractions that are rounded once. A NaN that an
instruction computes may have any payload, because that is unspecified (9.7.3).
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.ptx_runner import module_text, run
from tests.ptx_emulator.scalar_cases import (
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
    """Executes all opcodes of these types and returns the results of each opcode."""
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
def test_an_instruction_of_a_single_lane_agrees_with_its_reference(case):
    assert isa.OPCODES[case.opcode].section == case.section
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


def test_lop3_computes_every_truth_table():
    assert isa.OPCODES["lop3.b32"].section == LOGIC
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
    """Packs and unpacks as in 9.7.9.4; mov may also name registers of 8 bits."""
    assert isa.OPCODES[f"mov.b{whole}"].section == MOVE
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
    kernel = parse(module_text(body + "ret;", [".param .u64 out"]))
    machine = Machine(kernel, (4, 2, 1), (8, 4, 2), (2, 1, 1), dynamic_shared=48)
    shape = (8, 64, len(SPECIAL))
    address = machine.memory.allocate(np.zeros(shape, np.uint32))
    machine.set_parameter(0, address)
    machine.launch()
    return machine.memory.read(address, shape, np.uint32)


def test_special_registers_are_converted_and_clocks_advance():
    """cvt extends or truncates the values of special registers (section 10)."""
    body = """.reg .b64 %c; mov.u64 %c, %clock64; mov.b64 %c, %globaltimer; mov.u32 %d0, %clock;
        cvt.u64.u32 %d1, %laneid; cvt.u16.u32 %d2, %laneid; cvt.u32.u64 %d3, %clock64;
        mov.s32 %d4, %laneid; mov.b64 {%d5, _}, %clock64;"""
    found = run(body, results=[32, 64, 16, 32, 32, 32]).results
    assert found[1] == found[2] == found[4] == list(LANES)
    assert found[0][0] < found[3][0] < found[5][0]


@pytest.mark.parametrize("name", SPECIAL)
def test_special_registers_have_their_values(name):
    found = special_registers()[:, :, list(SPECIAL).index(name)]
    for block, thread in itertools.product(range(8), range(64)):
        place = (block % 4, block // 4, 0)
        assert found[block, thread] == SPECIAL[name](Thread(place, thread))


def test_every_form_has_a_test():
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ == "tests.ptx_emulator.scalar"
    }
    assert registered == {case.opcode for case in CASES} | {"lop3.b32"}
