"""Loads, stores, addresses, matrices, and data exchange between lanes."""

import functools
import itertools
import random
import re

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, UnsupportedError
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.parser import parse
from tests.ptx_emulator.ptx_runner import assert_fails, launch, module_text, run
from tests.ptx_emulator.scalar_cases import (
    LANES,
    drawn,
    stored,
    width,
)
from tests.ptx_emulator.test_barriers import ASYNC_STORES

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"
SYNC, MATRIX, MISC = "9.7.13 synchronisation", "9.7.14 matrices", "9.7.19 miscellaneous"

ELEMENTS = ("b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32")


def forms(name):
    """Lists the forms of an opcode; only global memory has accesses of 32 bytes (9.7.9.8)."""
    every = itertools.product(("", ".v2", ".v4"), ELEMENTS)
    return [x for x in every if x[0] != ".v4" or width(x[1]) < 64 or ".global" in name]


def all_forms(names):
    return [(name, form) for name in names for form in forms(name)]


def form_name(value):
    return value if isinstance(value, str) else ".".join(value)


def items(vector):
    """Returns the number of elements in a vector."""
    return int(vector[2:] or 1)


def list_of(names):
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def copied(size, *, back=False):
    """Returns PTX that copies %m0 to the shared variable `memory`, or back."""
    text = ["{.reg .b64 from, to; .reg .b32 x<4>, here; mov.u32 here, memory;"]
    text.append("mad.lo.u32 here, %lane, 16, here; mad.wide.u32 from, %lane, 16, %m0;")
    words = "{x0, x1, x2, x3}"
    for at in range(0, size, 512):
        shared, array = f"[here+{at}]", f"[from+{at}]"
        target, source = (array, shared) if back else (shared, array)
        to, of = ("global", "shared") if back else ("shared", "global")
        text.append(f"ld.{of}.v4.b32 {words}, {source}; st.{to}.v4.b32 {target}, {words};")
    return "\n".join([*text, "}"])


# Opcode -> statements that make %where an address, and the memory of that address.
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
    """Runs loads in all forms; maps (form, whether registers are wider) to the loaded values."""
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
def test_ld_loads_what_is_in_memory(name, form):
    vector, kind = form
    assert isa.OPCODES[f"{name.split()[0]}{vector}.{kind}"].section == MOVE
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
    """Maps (form, whether registers are wider) to (begin, stride) of stores that leave gaps."""
    begin = 0
    for (vector, kind), wide in itertools.product(forms("st.global"), (False, True)):
        stride = 2 * items(vector) * width(kind) // 8
        yield (vector, kind, wide), begin, stride
        begin += -(-32 * stride // 32) * 32


REGIONS = {key: (begin, stride) for key, begin, stride in regions()}
STORED_BYTES = -(-max(begin + 32 * stride for begin, stride in REGIONS.values()) // 512) * 512
BEFORE = random.Random(2).randbytes(STORED_BYTES)
# There are four registers of each width.
SOURCES = {bits: [drawn(bits, i) for i in range(4)] for bits in (16, 32, 64)}


@functools.cache
def stores(name):
    """Runs stores in all forms, each to its region; returns the memory."""
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
def test_st_stores_what_is_in_registers(name, form):
    vector, kind = form
    assert isa.OPCODES[f"{name.split()[0]}{vector}.{kind}"].section == MOVE
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
def test_ldmatrix_and_stmatrix_distribute_rows_over_lanes(opcode):
    """Lane 4 r + c has elements 2 c and 2 c + 1 of row or column r (9.7.14.5.15 and 16)."""
    assert isa.OPCODES[opcode].section == MATRIX
    count, transposed = int(re.search(r"\.x(\d)", opcode)[1]), "trans" in opcode
    generator = random.Random(opcode)
    content, rows = generator.randbytes(2048), generator.sample(range(128), 8 * count)
    # The addresses of the other lanes are not used, so they are unaligned and out of bounds.
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
def test_cvta_converts_addresses_there_and_back(space):
    assert isa.OPCODES[f"cvta.{space}.u64"].section == MOVE
    assert isa.OPCODES[f"cvta.to.{space}.u64"].section == MOVE
    body = f""".shared .align 32 .b8 memory[1024]; .reg .b64 %where, %generic, %back;
        {copied(1024)} {CONVERTED[space]} mad.wide.u32 %where, %lane, 4, %where;
        cvta.{space}.u64 %generic, %where; cvta.to.{space}.u64 %back, %generic;
        ld.u32 %d0, [%generic]; ld.{space}.u32 %d1, [%back];
        setp.eq.u64 %d2, %where, %back;"""
    found = run(body, results=[32, 32, 1], arrays=[CONTENT], constants=CONTENT).results
    words = np.frombuffer(CONTENT, np.uint32)[:32].tolist()
    assert found == [words, words, [1] * 32]


@pytest.mark.parametrize("bits", [32, 64])
def test_mapa_returns_the_address_in_the_block_of_this_rank(bits):
    """Section 9.7.9.23 describes mapa."""
    assert isa.OPCODES[f"mapa.shared::cluster.u{bits}"].section == MOVE
    body = f""".shared .align 16 .b8 before[48]; .shared .align 16 .b8 memory[64];
        .reg .b{bits} %own; mov.u{bits} %own, memory;
        add.u{bits} %own, %own, 20;
        mapa.shared::cluster.u{bits} %d0, %own, 0; mapa.shared::cluster.u{bits} %d1, %own, 1;
        mapa.shared::cluster.u{bits} %d2, %d1, %block; mov.b{bits} %d3, %own;"""
    zero, one, back, own = run(body, results=[bits] * 4, grid=2, cluster=2).results
    assert own[0] != own[32] and own == back
    assert zero == own[:32] * 2 and one == own[32:] * 2


# Data exchange between lanes.


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
def test_shfl_moves_values_between_lanes(mode):
    """b and c have five bits each; the upper part of c is the mask of segments (9.7.9.6)."""
    opcode = f"shfl.sync.{mode}.b32"
    assert isa.OPCODES[opcode].section == MOVE
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
    """Only even lanes execute (9.7.9.6, 9.7.13.9 and 14); registers of odd lanes do not change."""
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
def test_the_whole_warp_votes(mode):
    opcode = f"vote.sync.{mode}.{'b32' if mode == 'ballot' else 'pred'}"
    assert isa.OPCODES[opcode].section == SYNC
    votes = [[0] * 32, [1] * 32, [int(i == 31) for i in LANES], [int(i > 0) for i in LANES]]
    body = "\n".join(f"{opcode} %d{i}, %a{i}, 0xFFFFFFFF;" for i in range(4))
    bits = 32 if mode == "ballot" else 1
    found = run(body, [(1, vote) for vote in votes], [bits] * 4).results
    for vote, values in zip(votes, found):
        ballot = sum(x << lane for lane, x in enumerate(vote))
        wanted = {"any": any(vote), "all": all(vote), "uni": len(set(vote)) == 1, "ballot": ballot}
        assert values == [wanted[mode]] * 32


def test_elect_chooses_one_lane_and_all_lanes_get_its_number():
    assert isa.OPCODES["elect.sync"].section == SYNC
    body = "elect.sync %d0|%d1, 0xFFFFFFFF; elect.sync _|%d2, -1;"
    leader, chosen, again = run(body, results=[32, 1, 1]).results
    assert sum(chosen) == sum(again) == 1
    assert leader == [chosen.index(1)] * 32


def test_activemask_has_the_lanes_that_execute_it():
    assert isa.OPCODES["activemask.b32"].section == SYNC
    body = """.reg .pred p; setp.lt.u32 p, %lane, 5; activemask.b32 %d0;
        @p bra few; activemask.b32 %d1; bra all;
        few: activemask.b32 %d1;
        all: vote.sync.any.pred p, p, -1; activemask.b32 %d2;"""
    before, apart, after = run(body, results=[32] * 3).results
    assert before == after == [2**32 - 1] * 32
    assert apart == [31] * 5 + [2**32 - 32] * 27


# Instructions without a visible effect.

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
def test_instructions_that_change_no_register_and_no_memory(opcode):
    section, operand = WITHOUT_EFFECT[opcode]
    assert isa.OPCODES[opcode].section == section
    body = f"mov.b32 %d0, %a0; {opcode} {operand}; mov.b32 %d1, %a0; mov.b64 %d2, %m0;"
    found = run(body, [(32, list(LANES))], [32, 32, 64], arrays=[CONTENT])
    assert found.results[:2] == [list(LANES)] * 2 and len(set(found.results[2])) == 1
    assert found.arrays == [CONTENT]


def warpgroups(first, second, third):
    """Lets three warpgroups, with 168 registers per thread, execute one statement each."""
    return f""".reg .pred p; setp.lt.u32 p, %warp, 8; @p bra lower; {third} bra end;
        lower: setp.lt.u32 p, %warp, 4; @p bra lowest; {second} bra end; lowest: {first} end:"""


def test_setmaxnreg_waits_for_registers_that_others_release():
    """384 threads get 168 of a multiprocessor's 65536 registers each, a multiple of 8."""
    less, more = (f"setmaxnreg.{x}.sync.aligned.u32" for x in ("dec", "inc"))
    assert isa.OPCODES[less].section == isa.OPCODES[more].section == MISC
    for schedule in ("eager", "late", "random"):
        options = dict(threads=384, schedule=schedule)
        run(warpgroups(f"{less} 40;", f"{more} 232;", f"{more} 232;"), **options)
        # Registers may be released again, and then be taken by another warpgroup.
        run(warpgroups(f"{less} 24;", f"{more} 248; {less} 24;", f"{more} 248;"), **options)
        for counts in ((40, 240, 232), (48, 232, 232), (24, 248, 248)):
            first, second, third = counts
            body = warpgroups(f"{less} {first};", f"{more} {second};", f"{more} {third};")
            assert_fails(
                DeadlockError, "registers; its block has .* that are free", body, **options
            )
    for statement, count in ((more, 160), (less, 176)):
        message = f"{statement} cannot change 168 registers to {count}"
        assert_fails(EmulatorError, message, f"{statement} {count};", threads=384)


def test_setmaxnreg_starts_from_the_kernels_directives():
    """The directives are .maxnreg, or .minnctapersm blocks that share the registers."""
    text = module_text(
        "setmaxnreg.dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 COUNT; ret;"
    )
    for directive, count in ((".maxnreg 128", 128), (".minnctapersm 16", 128), ("", 248)):
        kernel_text = text.replace(".maxntid 32, 1, 1", f".maxntid 32, 1, 1\n{directive}")
        Machine(parse(kernel_text.replace("COUNT", str(count))), (1, 1, 1)).launch()
        if directive:
            machine = Machine(parse(kernel_text.replace("COUNT", str(count + 8))), (1, 1, 1))
            with pytest.raises(DeadlockError, match="2304 registers; its block has"):
                machine.launch()


def test_setmaxnreg_of_256_registers_is_refused_for_hopper_alone():
    statement = "setmaxnreg.inc.sync.aligned.u32 256;"
    run(statement, target="sm_100a")
    message = "setmaxnreg of 256 registers is not possible for sm_90a"
    assert_fails(UnsupportedError, message, statement, target="sm_90a")


@pytest.mark.parametrize("space", ["shared", "shared::cta"])
def test_ld_loads_128_bits_to_one_register(space):
    """clusterlaunchcontrol reads the register (test_copies_and_launch_control.py)."""
    opcode = f"ld.{space}.b128"
    assert isa.OPCODES[opcode].section == MOVE
    query = "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, handle;"
    body = f""".reg .b128 handle; .reg .pred %p; .reg .b32 %x; .shared .align 16 .b8 memory[512];
        mov.u32 %x, memory; mad.lo.u32 %x, %lane, 16, %x;
        st.shared.v4.u32 [%x], {{{{0, 0, 0, {{}}}}}};
        {opcode} handle, [%x]; {query} selp.b32 %d0, 1, 0, %p;"""
    assert run(body.format("0x600D"), results=[32]).results == [[1] * 32]
    assert run(body.format("0xBAD"), results=[32]).results == [[0] * 32]
    with pytest.raises(UnsupportedError, match="is not a register of 128 bits"):
        run(f".reg .b64 %x; {opcode} %x, [%x];")


def test_prefetch_of_a_tensor_map_refuses_other_addresses():
    assert isa.OPCODES["prefetch.tensormap"].section == MOVE
    body = """.reg .b64 map; mov.u64 map, tensor; cvta.param.u64 map, map;
        prefetch.tensormap [map]; ret;"""
    kernel = parse(module_text(body, [".param .align 64 .b8 tensor[128]"]))
    machine = Machine(kernel, (1, 1, 1))
    with pytest.raises(EmulatorError, match=r"no tensor map at .*\n.*line \d+"):
        machine.launch()
    machine = Machine(kernel, (1, 1, 1))
    machine.tensor_maps[machine.parameter_address(0)] = object()
    machine.launch()


def test_a_trap_is_reported_with_its_line():
    assert isa.OPCODES["trap"].section == MISC
    with pytest.raises(EmulatorError, match=r"a trap\n.*warp 0.*line \d+: trap"):
        launch("trap;\nret;")


OTHERS = {
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
    *ASYNC_STORES,
}


def test_every_form_has_a_test():
    modules = ("tests.ptx_emulator.data_movement", "tests.ptx_emulator.warp_instructions")
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ in modules
    }
    assert registered == OTHERS
