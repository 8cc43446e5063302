"""Tests the emulator's wgmma against the PTX ISA (9.0), 9.7.15."""

import functools
import itertools

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.operand_layouts import (
    LAYOUTS,
    PART,
    SIZES,
    Layout,
    declared,
    descriptor,
    drawn,
    flags,
    layout_name,
    padded,
    registers,
    uploaded,
)
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run

WGMMA, TCGEN05 = "9.7.15 wgmma", "9.7.16 tcgen05"

FLOATS = [(16, x, x) for x in ("bf16", "f16")]
FLOATS += [(32, *pair) for pair in itertools.product(("e4m3", "e5m2"), repeat=2)]
INTEGERS = [(32, *pair) for pair in itertools.product(("s8", "u8"), repeat=2)]
INTEGER_WIDTHS = [8, 16, 24, *range(32, 257, 16)]


def types_of(columns):
    return FLOATS + INTEGERS * (columns in INTEGER_WIDTHS)


def opcode_of(columns, depth, a, b):
    result = "s32" if a in ("s8", "u8") else "f32"
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{result}.{a}.{b}"


PRODUCTS = {opcode_of(n, *types): (n, *types) for n in range(8, 257, 8) for types in types_of(n)}
FENCE, COMMIT, WAIT = (f"wgmma.{x}.sync.aligned" for x in ("fence", "commit_group", "wait_group"))


def fragments(array, part, count):
    """Returns PTX that stores %c0, %c1, ... of every thread to this part of an array."""
    text = f"mad.lo.u32 %x, %thread, {4 * count}, {part * 512 * count};"
    text += f"cvt.u64.u32 %address, %x; add.u64 %address, %address, %m{array};"
    for i in range(0, count, 4):
        text += (
            f"st.global.v4.b32 [%address+{4 * i}], {{%c{i}, %c{i + 1}, %c{i + 2}, %c{i + 3}}};\n"
        )
    return text


def matrix(words, columns, result):
    """Assembles the 64 rows of an accumulator (9.7.15.5.1.1.3) that `fragments` stored."""
    found = np.frombuffer(words, np.int32 if result == "s32" else np.float32)
    found = found.reshape(-1, 128, columns // 2)
    left = np.full((len(found), 64, columns), np.nan)
    thread, i = np.indices((128, columns // 2))
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    left[:, row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = found
    return left


KINDS = tuple(SIZES)


@functools.cache
def products(columns):
    """Runs products of this width and all types, which share their operands."""
    image, values = np.zeros(6 * 2048 + 6 * 8192, np.uint8), {}
    begin = {}
    for i, kind in enumerate(KINDS):
        depth = 32 // SIZES[kind]
        begin[kind] = (2048 * i, 12288 + 8192 * i)
        for at, rows in zip(begin[kind], (64, columns)):
            raw, values[kind, at] = drawn(kind, (rows, depth), i)
            part = np.zeros(8192, np.uint8)
            Layout().put(part, raw, SIZES[kind])
            image[at : at + 32 * rows] = part[: 32 * rows]
    count = columns // 2
    text = declared(len(image)) + f".reg .b32 %c<{count}>; {uploaded(len(image))} {FENCE};"
    for part, (depth, a, b) in enumerate(types_of(columns)):
        text += descriptor("%a_desc", begin[a][0], Layout().bits("Hopper"))
        text += descriptor("%b_desc", begin[b][1], Layout().bits("Hopper"))
        text += f"""{opcode_of(columns, depth, a, b)} {registers(count)}, %a_desc, %b_desc, %no
            {flags(depth, a)}; {COMMIT}; {WAIT} 0; {fragments(1, part, count)}"""
    room = bytes(512 * count * len(types_of(columns)))
    arrays = [padded(image), room]
    left = run(text, arrays=arrays, threads=128, target="sm_90a").arrays[1]
    found = {}
    for part, (depth, a, b) in enumerate(types_of(columns)):
        words = left[part * 512 * count : (part + 1) * 512 * count]
        result = "s32" if a in ("s8", "u8") else "f32"
        wanted = values[a, begin[a][0]] @ values[b, begin[b][1]].T
        found[depth, a, b] = matrix(words, columns, result)[0], wanted
    return found


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_wgmma_multiplies_every_width_and_type(opcode):
    assert isa.OPCODES[opcode].section == WGMMA
    columns, *types = PRODUCTS[opcode]
    found, wanted = products(columns)[tuple(types)]
    np.testing.assert_array_equal(found, wanted)


def multiplied(opcode, layouts, images, statements, *, more="", **options):
    """Executes statements that multiply %a_desc and %b_desc; returns the accumulators."""
    columns, _, a, b = PRODUCTS[opcode]
    image, count = np.zeros(2 * PART, np.uint8), columns // 2
    for layout, raw, begin, kind in zip(layouts, images, (0, PART), (a, b)):
        part = np.zeros(PART, np.uint8)
        layout.put(part, raw, SIZES[kind])
        image[begin : begin + PART] = part
    text = declared(len(image)) + f".reg .b32 %c<{count}>; {uploaded(len(image))} {FENCE};"
    for name, layout, begin in zip(("%a_desc", "%b_desc"), layouts, (0, PART)):
        text += descriptor(name, begin + layout.begin, layout.bits("Hopper"))
    text += f"{statements} {COMMIT}; {WAIT} 0; {fragments(1, 0, count)}"
    arrays = [padded(image), bytes(512 * count)]
    left = run(text, arrays=arrays, threads=128, target="sm_90a", **options).arrays[1]
    return matrix(left, columns, "s32" if a in ("s8", "u8") else "f32")[0]


@pytest.mark.parametrize("second", [LAYOUTS[i] for i in (0, 2, 4, 7)], ids=layout_name)
@pytest.mark.parametrize("first", LAYOUTS, ids=layout_name)
def test_wgmma_multiplies_operands_of_every_layout(first, second):
    """The layouts are K-major and MN-major, with all swizzles and with various strides."""
    opcode = opcode_of(72, 16, "bf16", "bf16")
    (raw_a, a), (raw_b, b) = (drawn("bf16", (rows, 16), i) for i, rows in enumerate((64, 72)))
    turned = f"{int(first.major == 'MN')}, {int(second.major == 'MN')}"
    statement = f"{opcode} {registers(36)}, %a_desc, %b_desc, %no, 1, 1, {turned};"
    found = multiplied(opcode, (first, second), (raw_a, raw_b), statement)
    np.testing.assert_array_equal(found, a @ b.T)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("kind", ["e4m3", "s8"])
def test_bytes_are_multiplied_in_every_layout(kind, swizzle):
    opcode = opcode_of(48, 32, kind, kind)
    (raw_a, a), (raw_b, b) = (drawn(kind, (rows, 32), i) for i, rows in enumerate((64, 48)))
    statement = f"{opcode} {registers(24)}, %a_desc, %b_desc, %no {flags(32, kind)};"
    layouts = Layout("K", swizzle), Layout("K", swizzle, stride=16 * swizzle)
    np.testing.assert_array_equal(multiplied(opcode, layouts, (raw_a, raw_b), statement), a @ b.T)


@pytest.mark.parametrize("kind, depth", [("f16", 16), ("e5m2", 32), ("u8", 32)])
def test_wgmma_accumulates_with_signs(kind, depth):
    """Integers cannot be negated, and their sums wrap around."""
    opcode = opcode_of(16, depth, kind, kind)
    (raw_a, a), (raw_b, b) = (drawn(kind, (rows, depth), i) for i, rows in enumerate((64, 16)))
    signs = [(1, 1), (-1, 1), (-1, -1), (1, 1), (1, -1), (1, 1)]
    statements, total = "", 0
    for i, (one, two) in enumerate(signs):
        predicate = "%no" if i in (0, 2) else "%yes" if i % 2 else "1"
        statements += f"{opcode} {registers(8)}, %a_desc, %b_desc, {predicate}"
        statements += f"{flags(depth, kind, f'{one}, {two}')};"
        total = (0 if i in (0, 2) else total) + (1 if kind == "u8" else one * two)
    found = multiplied(opcode, (Layout(), Layout()), (raw_a, raw_b), statements)
    np.testing.assert_array_equal(found, total * (a @ b.T))


@pytest.mark.parametrize("depth, a, b", FLOATS + INTEGERS)
def test_the_first_operand_may_be_in_registers(depth, a, b):
    """Each thread holds the rows and bytes of K of 9.7.15.5.1.1.1 and 9.7.15.5.1.1.2."""
    opcode = opcode_of(24, depth, a, b)
    (raw_a, first), (raw_b, second) = (
        drawn(kind, (rows, depth), i) for i, (kind, rows) in enumerate(((a, 64), (b, 24)))
    )
    held = np.zeros((128, 4), np.uint32)
    words = np.ascontiguousarray(raw_a.astype(f"<u{SIZES[a]}")).view(np.uint32)
    for thread, i in np.ndindex(held.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 2)
        held[thread, i] = words[row, 4 * (i // 2) + thread % 4]
    image = np.zeros(2048, np.uint8)
    Layout().put(image, raw_b, SIZES[b])
    turned = ", 0" * (depth == 16)
    signs = ", 1, -1" * (a not in ("s8", "u8"))
    text = f"""{declared(2048)} .reg .b32 %c<12>, %e<4>; {uploaded(2048)}
        {descriptor("%b_desc", 0, Layout().bits("Hopper"))}
        mad.wide.u32 %address, %thread, 16, %m2;
        ld.global.v4.b32 {registers(4, "%e")}, [%address];
        {FENCE}; {opcode} {registers(12)}, {registers(4, "%e")}, %b_desc, %no{signs}{turned};
        {COMMIT}; {WAIT} 0; {fragments(1, 0, 12)}"""
    arrays = [padded(image), bytes(512 * 12), held.tobytes()]
    left = run(text, arrays=arrays, threads=128, target="sm_90a").arrays[1]
    found = matrix(left, 24, "s32" if a in ("s8", "u8") else "f32")[0]
    np.testing.assert_array_equal(found, (-1 if signs else 1) * first @ second.T)


SMALL = opcode_of(8, 32, "s8", "s8")


def hopper(statements, fence="fence.proxy.async;", size=4096, fenced=True):
    """Returns a kernel that multiplies 64 by 8 rows of ones, so that every sum is 32."""
    return f"""{declared(size)} .reg .b32 %c<4>, %e<4>; {uploaded(4096, fence=fence)}
        {descriptor("%a_desc", 0, Layout().bits("Hopper"))}
        {descriptor("%b_desc", 2048, Layout().bits("Hopper"))}
        {f"{FENCE};" * fenced} {statements}"""


ONE = f"{SMALL} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no;"
TWO = ONE.replace("%c", "%e")
ONES = dict(arrays=[b"\1" * 4096], threads=128, target="sm_90a")


def test_wait_group_does_not_wait_for_the_last_groups():
    """The registers of the last n groups stay in use after wait_group n (9.7.15.7)."""
    assert {isa.OPCODES[x].section for x in (FENCE, COMMIT, WAIT)} == {WGMMA}
    text = hopper(f"{ONE} {COMMIT}; {TWO} {COMMIT}; {WAIT} 1; {{}}")
    first, second = (f"mov.u32 %x, {x};{HERE}" for x in ("%c2", "%e2"))
    right = text.replace("{}", f"{first} mov.u32 %d0, %x; {WAIT} 0; mov.u32 %d1, %e3;")
    assert run(right, results=[32, 32], **ONES).results == [[32] * 128] * 2
    message = "a register is used before wgmma.wait_group"
    assert_fails(EmulatorError, message, text.replace("{}", f"{second} {WAIT} 0;"), **ONES)
    assert_fails(EmulatorError, message, text.replace("{}", f"mov.u32 %e1, 0;{HERE}"), **ONES)
    # Products that are not committed are in no group.
    text = hopper(f"{ONE} {WAIT} 0; {{}} {COMMIT}; {WAIT} 0;")
    run(text.replace("{}", ""), **ONES)
    assert_fails(EmulatorError, message, text.replace("{}", first), **ONES)


def test_an_operand_in_registers_stays_until_the_products_are_done():
    """It is written before a fence, and not accessed before a wait (9.7.15.7.1, 9.7.15.7.3)."""
    held = ONE.replace("%a_desc", "{%e0, %e1, %e2, %e3}")
    ones = "".join(f"mov.u32 %e{i}, 0x01010101;" for i in range(4))
    text = hopper(f"{ones} {FENCE}; {held} {COMMIT}; {{}} {WAIT} 0; mov.u32 %d0, %c3;")
    right = text.replace("{}", "")
    assert run(right, results=[32], **ONES).results == [[32] * 128]
    after = right.replace("mov.u32 %d0", "mov.u32 %e1, 5; mov.u32 %d0")
    assert run(after, results=[32], **ONES).results == [[32] * 128]
    message = "a register is used before wgmma.wait_group"
    for touched in (f"mov.u32 %e1, 0;{HERE}", f"mov.u32 %x, %e3;{HERE}"):
        wrong = text.replace("{}", touched).replace("%d0", "%x")
        assert_fails(EmulatorError, message, wrong, **ONES)
    late = hopper(f"{FENCE}; {ones} {held}{HERE} {COMMIT}; {WAIT} 0;")
    assert_fails(EmulatorError, "was written without a wgmma.fence behind it", late, **ONES)


def test_products_to_the_same_accumulators_need_no_wait_between_them():
    text = hopper(f"{ONE} {ONE.replace('%no', '%yes')} {COMMIT}; {WAIT} 0; mov.u32 %d0, %c0;")
    assert run(text, results=[32], **ONES).results == [[64] * 128]


@pytest.mark.parametrize(
    "wrong, right, error, message",
    {
        "no fence of wgmma": (
            hopper(ONE + HERE, fenced=False),
            hopper(f"{ONE} {COMMIT}; {WAIT} 0;"),
            EmulatorError,
            "without a wgmma.fence",
        ),
        "no fence of proxies": (
            hopper(ONE + HERE, fence=""),
            hopper(f"{ONE} {COMMIT}; {WAIT} 0;", fence="fence.proxy.async.shared::cta;"),
            RaceError,
            "wrote without a fence.proxy.async",
        ),
        "operands that change": (
            hopper(f"{ONE} {COMMIT}; st.shared.u32 [%memory], 0;{HERE} {WAIT} 0;"),
            hopper(f"{ONE} {COMMIT}; {WAIT} 0; bar.sync 0; @%first st.shared.u32 [%memory], 0;"),
            RaceError,
            "overwrites what is read from .*wgmma of block 0, warp 0 and the 3 warps after it"
            "|different values",
        ),
        "an exit": (
            hopper(f"{ONE} {COMMIT};"),
            hopper(f"{ONE} {COMMIT}; {WAIT} 0;"),
            EmulatorError,
            "exits before wgmma.wait_group",
        ),
        "a part of the warpgroup": (
            hopper(f"@%first_warp bra end; {ONE} end: {COMMIT}; {WAIT} 0;{HERE}"),
            hopper(f"bra end; end: {ONE} {COMMIT}; {WAIT} 0;"),
            DeadlockError,
            "waits for wgmma of the other warps of the warpgroup",
        ),
        "a part of a warp": (
            hopper(f"@!%first {ONE}{HERE} {COMMIT}; {WAIT} 0;"),
            hopper(f"@%yes {ONE} {COMMIT}; {WAIT} 0;"),
            EmulatorError,
            "not executed by all lanes",
        ),
        "bounds": (
            hopper(f"add.u64 %b_desc, %b_desc, {4096 // 16}; {ONE}{HERE}"),
            hopper(f"add.u64 %b_desc, %b_desc, {1792 // 16}; {ONE} {COMMIT}; {WAIT} 0;"),
            EmulatorError,
            "outside of its",
        ),
    }.values(),
)
def test_hazards_of_wgmma_are_found(wrong, right, error, message):
    run(right, **ONES)
    assert_fails(error, message, wrong, **ONES)


@pytest.mark.parametrize(
    "bits, message",
    [
        *((1 << i, "reserved bits") for i in (14, 15, 30, 31, 46, 47, 48, *range(52, 62))),
        *((1 << i, "the base offset") for i in (49, 50, 51)),
    ],
)
def test_unknown_bits_of_a_descriptor_of_wgmma_are_refused(bits, message):
    assert_fails(
        EmulatorError, message, hopper(f"or.b64 %a_desc, %a_desc, {bits:#x}; {ONE}{HERE}"), **ONES
    )


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_swizzled_operand_begins_in_the_first_row_of_its_pattern(swizzle):
    """Otherwise the descriptor needs a base offset, which the emulator does not support."""
    code = {128: 1, 64: 2, 32: 3}[swizzle] << 62 | (8 * swizzle >> 4) << 32
    text = hopper(
        f"{descriptor('%b_desc', 0, code)} {descriptor('%a_desc', 8192, code)} "
        f"{{}} {ONE}{HERE} {COMMIT};"
        f"{WAIT} 0;",
        size=16384 + 1024,
    )
    run(text.replace("{}", f"add.u64 %b_desc, %b_desc, {8 * swizzle // 16};"), **ONES)
    wrong = text.replace("{}", f"add.u64 %b_desc, %b_desc, {swizzle // 16};")
    assert_fails(UnsupportedError, "not in the first row", wrong, **ONES)
    if swizzle < 128:
        half = text.replace("{}", f"add.u64 %b_desc, %b_desc, {(swizzle - 16) // 16};")
        assert_fails(EmulatorError, "columns of K leave the swizzled row", half, **ONES)


F32 = opcode_of(8, 32, "e4m3", "e4m3")
BF16 = opcode_of(8, 16, "bf16", "bf16")


@pytest.mark.parametrize(
    "statement, message",
    {
        f"{F32} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no, 0, 1;": "signs and transpositions",
        f"{F32} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no;": "signs and transpositions",
        f"{F32} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no, 1, 1, 0, 0;": (
            "signs and transpositions"
        ),
        f"{BF16} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no, 1, 1;": "signs and transpositions",
        f"{BF16} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no, 1, 1, 2, 0;": (
            "signs and transpositions"
        ),
        f"{SMALL} {{%c0, %c1, %c2, %c3}}, %a_desc, %b_desc, %no, 1, 1;": "signs and transpositions",
        f"{SMALL} {{%c0, %c1, %c2}}, %a_desc, %b_desc, %no;": "4 different accumulators",
        f"{SMALL} {{%c0, %c1, %c2, %c2}}, %a_desc, %b_desc, %no;": "4 different accumulators",
        f"{SMALL} {{%c0, %c1, %c2, %address}}, %a_desc, %b_desc, %no;": "64 bits where b32",
        f"{SMALL} {{%c0, %c1, %c2, %c3}}, {{%e0, %e1, %e2}}, %b_desc, %no;": (
            "4 different registers"
        ),
        f"{SMALL} {{%c0, %c1, %c2, %c3}}, {{%e0, %e1, %e2, %e2}}, %b_desc, %no;": (
            "4 different registers"
        ),
        f"{BF16} {{%c0, %c1, %c2, %c3}}, {{%e0, %e1, %e2, %e3}}, %b_desc, %no, 1, 1, 0, 0;": (
            "signs and transpositions"
        ),
        f"{SMALL} {{%c0, %c1, %c2, %c3}}, %x, %b_desc, %no;": "32 bits where b64",
        f"{SMALL.replace('n8', 'n40')} {{%c0}}, %a_desc, %b_desc, %no;": "not among the known",
        f"{SMALL.replace('s32', 's32.satfinite')} {{%c0}}, %a_desc, %b_desc, %no;": (
            "not among the known"
        ),
        f"{BF16.replace('f32', 'f16')} {{%c0}}, %a_desc, %b_desc, %no, 1, 1, 0, 0;": (
            "not among the known"
        ),
        f"{WAIT} -1;": "all groups but the last -1",
        f"{WAIT} %x;": "not an integer constant",
    }.items(),
)
def test_unknown_forms_of_wgmma_are_refused(statement, message):
    assert_fails(UnsupportedError, message, hopper(statement + HERE), **ONES)


def test_every_form_has_a_test():
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ == "tests.ptx_emulator.wgmma"
    }
    assert registered == {*PRODUCTS, FENCE, COMMIT, WAIT}
