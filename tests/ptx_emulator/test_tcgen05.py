"""Tests the emulator's tensor cores and tensor memory against the PTX ISA (9.0), 9.7.15 and 9.7.16.

Products have sums that float32 represents exactly. Each case that must be refused has a valid
counterpart, which is also run.
"""

import functools
import itertools

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.operand_layouts import (
    DENSE,
    LAYOUTS,
    PART,
    SIZES,
    Layout,
    declared,
    descriptor,
    drawn,
    layout_name,
    registers,
    uploaded,
)
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run
from tests.ptx_emulator.test_tcgen05_operands import TESTED

WGMMA, TCGEN05 = "9.7.15 wgmma", "9.7.16 tcgen05"

GROUPS = ("cta_group::1", "cta_group::2")
ALLOC, DEALLOC, RELINQUISH, SINGLE, MULTI = (
    [text.replace("GROUP", group) for group in GROUPS]
    for text in (
        "tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32",
        "tcgen05.dealloc.GROUP.sync.aligned.b32",
        "tcgen05.relinquish_alloc_permit.GROUP.sync.aligned",
        "tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.b64",
        "tcgen05.commit.GROUP.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    )
)
MMA = {
    (kind, group): f"tcgen05.mma.{group}.kind::{kind}"
    for kind, group in itertools.product(("f16", "f8f6f4", "i8"), GROUPS)
}
BEFORE, AFTER = (f"tcgen05.fence::{x}_thread_sync" for x in ("before", "after"))
LOADED = "tcgen05.wait::ld.sync.aligned"
PER_REPETITION = {"32x32b": 1, "16x128b": 2, "16x256b": 4}
LOADS = {
    f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32": (shape, count)
    for shape, each in PER_REPETITION.items()
    for count in (1, 2, 4, 8, 16, 32, 64, 128)
    if each * count <= 128
}

CODES = {"f16": ("f16", "bf16"), "f8f6f4": ("e4m3", "e5m2"), "i8": ("u8", "s8")}


def instruction_descriptor(kind, a, b, rows, columns, negate=(0, 0), turned=(0, 0)):
    """Encodes an instruction descriptor according to table 42 of 9.7.16.4.2."""
    fields = [(2 if kind == "i8" else 1, 4), (CODES[kind].index(a), 7), (CODES[kind].index(b), 10)]
    fields += [(negate[0], 13), (negate[1], 14), (turned[0], 15), (turned[1], 16)]
    fields += [(columns >> 3, 17), (rows >> 4, 24)]
    return sum(value << bit for value, bit in fields)


WAITING = """{ again: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %over, [%bar], PARITY;
    @!%over bra again; }"""


def waiting(parity=0):
    return WAITING.replace("PARITY", str(parity))


def blackwell(pair, products, loads, *, size=2 * PART, columns=512, layouts=DENSE):
    """Returns a kernel that allocates tensor memory, multiplies, stores the sums and deallocates.

    Args:
      pair: whether two blocks multiply together.
      products: statements of one thread, without a predicate, that read %a_desc, %b_desc and %tmem.
      loads: statements of all threads; %tmem is the address of the lanes of each thread's warp.
    """
    group = int(pair)
    all_ = (
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if pair else "bar.sync 0;"
    )
    text = f"""{declared(size)} {all_} @%first_warp {ALLOC[group]} [slot], {columns};
        @%first_warp {RELINQUISH[group]}; bar.sync 0; ld.shared.b32 %tmem, [slot];
        {f"mad.wide.u32 %address, %rank, {size}, %m0;" if pair else "mov.b64 %address, %m0;"}
        .reg .b64 %own; mov.b64 %own, %address;
        {uploaded(size).replace("%m0", "%own")} {all_}"""
    for name, layout, begin in zip(("%a_desc", "%b_desc"), layouts, (0, PART)):
        text += descriptor(name, begin + layout.begin, layout.bits("Blackwell"))
    issuer = "setp.eq.and.u32 %p, %rank, 0, %first; @!%p bra issued;"
    text += f"""{issuer} {products} issued: {waiting()} {AFTER};
        and.b32 %y, %warp, 3; shl.b32 %y, %y, 21; add.u32 %tmem, %tmem, %y; {loads}
        {BEFORE}; {all_} ld.shared.b32 %tmem, [slot];
        @%first_warp {DEALLOC[group]} %tmem, {columns};"""
    return text


def commit(pair, form=None):
    """Commits to the barriers of all blocks of the group."""
    if not pair:
        return f"{SINGLE[0]} [%bar];" if form != "multicast" else f"{MULTI[0]} [%bar], 1;"
    if form == "single":
        other = "mapa.shared::cluster.u32 %x, %bar, 1;"
        return f"{SINGLE[1]} [%bar]; {other} {SINGLE[1]} [%x];"
    return f"{MULTI[1]} [%bar], 3;"


def load_columns(count, array=1):
    """Stores all columns of each thread's lane of tensor memory, eight at a time."""
    text = f"""mad.lo.u32 %y, %block, 128, %thread; mul.lo.u32 %y, %y, {4 * count};
        cvt.u64.u32 %address, %y; add.u64 %address, %address, %m{array}; .reg .b32 %c<8>;"""
    for at in range(0, count, 8):
        text += f"""tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [%tmem+{at}];
            {LOADED}; st.global.v4.b32 [%address+{4 * at}], {{%c0, %c1, %c2, %c3}};
            st.global.v4.b32 [%address+{4 * at + 16}], {{%c4, %c5, %c6, %c7}};"""
    return text


def tcgen05(
    kind,
    a,
    b,
    columns,
    *,
    pair=False,
    layouts=DENSE,
    negate=(0, 0),
    form=None,
    issue=None,
    **options,
):
    """Runs a product; returns the accumulators, and the expected product of a and b."""
    blocks, depth = 1 + pair, 32 // SIZES[a]
    (raw_a, values_a), (raw_b, values_b) = (
        drawn(x, (rows, depth), i) for i, (x, rows) in enumerate(((a, 128 * blocks), (b, columns)))
    )
    images = []
    for block in range(blocks):
        image = np.zeros(2 * PART, np.uint8)
        sides = (128, columns // blocks)
        for i, (layout, raw, x) in enumerate(zip(layouts, (raw_a, raw_b), (a, b))):
            part = np.zeros(PART, np.uint8)
            layout.put(part, raw[block * sides[i] : (block + 1) * sides[i]], SIZES[x])
            image[i * PART : (i + 1) * PART] = part
        images.append(image.tobytes())
    turned = [int(layout.major == "MN") for layout in layouts]
    code = instruction_descriptor(kind, a, b, 128 * blocks, columns, negate, turned)
    mma = f"{MMA[kind, GROUPS[pair]]} [%tmem], %a_desc, %b_desc, {code:#x}, "
    issue = issue or "MMA %no;"
    products = issue.replace("MMA ", mma) + commit(pair, form)
    arrays = [b"".join(images), bytes(512 * columns * blocks)]
    text = blackwell(pair, products, load_columns(columns), layouts=layouts)
    left = run(text, arrays=arrays, threads=128, grid=blocks, cluster=blocks, **options).arrays[1]
    found = np.frombuffer(left, np.int32 if kind == "i8" else np.float32)
    return found.reshape(128 * blocks, columns), values_a @ values_b.T


@pytest.mark.parametrize("opcode", [*MMA.values()])
@pytest.mark.parametrize("which", range(4))
def test_mma_multiplies_every_kind_and_type(opcode, which):
    assert isa.OPCODES[opcode].section == TCGEN05
    (kind, group) = next(key for key, value in MMA.items() if value == opcode)
    a, b = list(itertools.product(CODES[kind], repeat=2))[which]
    columns = (32, 64, 160, 256)[which] if group == GROUPS[1] else (16, 48, 144, 256)[which]
    found, wanted = tcgen05(kind, a, b, columns, pair=group == GROUPS[1])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("columns", [16, 32, 80, 96, 208, 224])
@pytest.mark.parametrize("pair", [False, True])
def test_mma_multiplies_every_width(columns, pair):
    """With two blocks, N is a multiple of 32."""
    if pair and columns % 32:
        with pytest.raises(EmulatorError, match=f"cta_group::2 cannot multiply 256 x {columns}"):
            tcgen05("i8", "s8", "s8", columns, pair=True)
    else:
        np.testing.assert_array_equal(*tcgen05("i8", "s8", "s8", columns, pair=pair))


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("kind, element", [("f16", "bf16"), ("f8f6f4", "e4m3"), ("i8", "s8")])
def test_tcgen05_multiplies_operands_of_every_layout(layout, kind, element):
    for layouts in ((layout, LAYOUTS[3]), (LAYOUTS[3], layout)):
        found, wanted = tcgen05(kind, element, element, 48, layouts=layouts)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS[2:8:2], ids=layout_name)
def test_a_pair_multiplies_operands_of_every_layout(layout):
    found, wanted = tcgen05("f16", "f16", "f16", 96, pair=True, layouts=(layout, layout))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("negate", [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind, element", [("f16", "f16"), ("f8f6f4", "e5m2")])
def test_operands_may_be_negated(kind, element, negate):
    found, wanted = tcgen05(kind, element, element, 32, negate=negate)
    np.testing.assert_array_equal(found, wanted * (-1) ** sum(negate))


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_products_accumulate(schedule):
    issue = "MMA %yes; MMA %no; MMA %yes; MMA 1;"
    found, wanted = tcgen05("i8", "u8", "s8", 32, issue=issue, schedule=schedule)
    np.testing.assert_array_equal(found, 3 * wanted)


@pytest.mark.parametrize("opcode", [*SINGLE, *MULTI])
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_a_commit_arrives_once_its_products_are_done(opcode, schedule):
    """A commit arrives once at each barrier, after all earlier products are done."""
    assert isa.OPCODES[opcode].section == TCGEN05
    form = "multicast" if opcode in MULTI else "single"
    pair = opcode in (SINGLE[1], MULTI[1])
    issue = "MMA %no; MMA %yes; MMA %yes;"
    options = dict(pair=pair, form=form, issue=issue, schedule=schedule)
    found, wanted = tcgen05("i8", "u8", "u8", 64, **options)
    np.testing.assert_array_equal(found, 3 * wanted)


@functools.cache
def numbered():
    """Returns operands whose product is 256 * row + column, to test the layouts of 9.7.16.2.3."""
    image = np.zeros(2 * PART, np.uint8)
    for begin, rows in ((0, 128), (PART, 256)):
        raw = np.zeros((rows, 32), np.uint8)
        raw[:, :3] = 1
        if begin:
            raw[:, 0], raw[:, 2] = 255, np.arange(256)
        else:
            raw[:, 0] = raw[:, 1] = np.arange(128)
        part = np.zeros(PART, np.uint8)
        Layout().put(part, raw, 1)
        image[begin : begin + PART] = part
    return image.tobytes()


NUMBERED = f"""{MMA["i8", GROUPS[0]]} [%tmem], %a_desc, %b_desc,
    {instruction_descriptor("i8", "u8", "u8", 128, 256):#x}, %no; {commit(False)}"""


def place(shape, lane, i):
    """Returns row and column of a lane's register, from the figures of 9.7.16.2.3.1."""
    if shape == "32x32b":
        return lane, i
    if shape == "16x128b":
        return lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)
    return lane // 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


@pytest.mark.parametrize("opcode", LOADS)
def test_shapes_of_loads(opcode):
    """Loads begin at several columns, and in the upper and the lower half of a warp's lanes."""
    assert isa.OPCODES[opcode].section == TCGEN05
    shape, repetitions = LOADS[opcode]
    count = repetitions * PER_REPETITION[shape]
    wide = repetitions * {"32x32b": 1, "16x128b": 4, "16x256b": 8}[shape]
    cases = [(0, 0), (256 - wide, 0), (min(3, 256 - wide), 0)]
    cases += [(0, 16)] * (shape != "32x32b")
    text = f".reg .b32 %c<{count}>;"
    for part, (column, lane) in enumerate(cases):
        text += f"""{opcode} {registers(count)}, [%tmem+{column + (lane << 16)}]; {LOADED};
            mad.lo.u32 %x, %thread, {4 * count}, {part * 512 * count}; cvt.u64.u32 %address, %x;
            add.u64 %address, %address, %m1;"""
        for i in range(count):
            text += f"st.global.b32 [%address+{4 * i}], %c{i};"
    arrays = [numbered(), bytes(512 * count * len(cases))]
    left = run(blackwell(False, NUMBERED, text), arrays=arrays, threads=128).arrays[1]
    found = np.frombuffer(left, np.uint32).reshape(len(cases), 4, 32, count)
    for part, (column, first) in enumerate(cases):
        for warp, lane, i in np.ndindex(4, 32, count):
            row, offset = place(shape, lane, i)
            wanted = 256 * (32 * warp + first + row) + column + offset
            assert found[part, warp, lane, i] == wanted, (part, warp, lane, i)


FIRST_LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32"


def one_load(address="[%tmem]", registers_="{%v0}", opcode=FIRST_LOAD):
    return f"{opcode} {registers_}, {address};"


ONE_LOAD = f"{one_load()} {LOADED};"


def kernel(loads=ONE_LOAD, products=NUMBERED, **options):
    return blackwell(False, products, loads, **options)


OPTIONS = dict(arrays=[numbered()], threads=128)


def test_the_kernel_of_the_hazard_tests_is_correct():
    for schedule in ("eager", "late", "random"):
        run(kernel(), schedule=schedule, **OPTIONS)


IDESC = instruction_descriptor("i8", "u8", "u8", 128, 256)


@pytest.mark.parametrize(
    "code, message",
    [
        *(
            (IDESC | 1 << bit, "the instruction descriptor")
            for bit in (0, 1, 2, 3, 6, 23, 29, 30, 31)
        ),
        *((IDESC | 1 << bit, "integers cannot be negated") for bit in (13, 14)),
        *((IDESC & ~(7 << shift) | 2 << shift, "the instruction descriptor") for shift in (7, 10)),
        (IDESC & ~(3 << 4) | 1 << 4, "the instruction descriptor"),
        (instruction_descriptor("i8", "u8", "u8", 128, 24), "cannot multiply 128 x 24"),
        (instruction_descriptor("i8", "u8", "u8", 128, 8), "cannot multiply 128 x 8"),
        (instruction_descriptor("i8", "u8", "u8", 128, 264), "cannot multiply 128 x 264"),
        (instruction_descriptor("i8", "u8", "u8", 256, 64), "cannot multiply 256 x 64"),
        (instruction_descriptor("i8", "u8", "u8", 32, 64), "cannot multiply 32 x 64"),
    ],
)
def test_unknown_bits_of_the_instruction_descriptor_are_refused(code, message):
    text = kernel(products=NUMBERED.replace(f"{IDESC:#x}", f"{code:#x}") + HERE)
    assert_fails(EmulatorError, message, text.replace(HERE, ""), **OPTIONS)


@pytest.mark.parametrize(
    "bits, message",
    [
        *((1 << i, "swizzle, or reserved bits") for i in (14, 15, 30, 31, *range(52, 62))),
        *((i << 61, "swizzle, or reserved bits") for i in (1, 3, 5, 7)),
        *((1 << i, "the base offset") for i in (49, 50, 51)),
        *((1 << i, "bits 46 to 48 of the descriptor") for i in (47, 48)),
    ],
)
def test_unknown_bits_of_a_descriptor_of_tcgen05_are_refused(bits, message):
    products = f"or.b64 %a_desc, %a_desc, {bits:#x};" + NUMBERED
    assert_fails(EmulatorError, message, kernel(products=products), **OPTIONS)


def test_a_descriptor_without_its_version_is_a_warning():
    text = kernel(products=f"xor.b64 %a_desc, %a_desc, {1 << 46:#x};" + NUMBERED)
    run(text, allowed=frozenset({"descriptor version"}), **OPTIONS)
    assert_fails(EmulatorError, "descriptor version: bits 46 to 48", text, **OPTIONS)


LOAD32 = one_load(registers_="{%v0, %v1}", opcode="tcgen05.ld.sync.aligned.32x32b.x2.b32")


@pytest.mark.parametrize(
    "loads, error, message",
    {
        "not allocated": (
            one_load("[%tmem+512]") + HERE,
            EmulatorError,
            "columns 512 to 512 .*not",
        ),
        "across the end": (
            LOAD32.replace("[%tmem]", "[%tmem+511]") + HERE,
            EmulatorError,
            "columns 511 to 512 of the tensor memory of block 0 are not allocated",
        ),
        "another quarter": (
            f"xor.b32 %tmem, %tmem, {1 << 21}; {one_load()}{HERE}",
            EmulatorError,
            r"lanes \d+ to \d+ of tensor memory are not in the quarter",
        ),
        "lanes": (one_load(f"[%tmem+{1 << 16}]") + HERE, EmulatorError, "are not in the quarter"),
        "addresses": (
            f"add.u32 %tmem, %tmem, %lane; {one_load()}{HERE}",
            EmulatorError,
            "addresses that differ between lanes",
        ),
        "used too early": (
            f"{one_load()} add.u32 %x, %v0, 1;{HERE} {LOADED};",
            EmulatorError,
            "a register is used before tcgen05.wait::ld",
        ),
        "overwritten too early": (
            f"{one_load()} mov.u32 %v0, 1;{HERE} {LOADED};",
            EmulatorError,
            "moved before wait::ld",
        ),
        "never waited for": (one_load(), EmulatorError, "exits before tcgen05.wait::ld"),
        "some lanes": (f"@!%first {one_load()}{HERE}", EmulatorError, "not executed by all lanes"),
        "registers": (LOAD32.replace(", %v1", "") + HERE, UnsupportedError, "1 registers in a vec"),
        "the same register": (LOAD32.replace("%v1", "%v0") + HERE, UnsupportedError, "1 registers"),
        "no vector": (one_load(registers_="%v0") + HERE, UnsupportedError, "0 registers"),
        "too many": (
            one_load(opcode="tcgen05.ld.sync.aligned.16x256b.x64.b32") + HERE,
            UnsupportedError,
            "not among the known",
        ),
        "packed": (
            one_load(opcode="tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32") + HERE,
            UnsupportedError,
            "not among the known",
        ),
    }.values(),
)
def test_hazards_of_loads(loads, error, message):
    assert_fails(error, message, kernel(loads), **OPTIONS)


def test_moves_before_the_wait_are_a_warning():
    moves = f"{LOAD32} mov.b64 %address, {{%v0, %v1}}; {LOADED}; cvt.u32.u64 %d0, %address;"
    found = run(
        kernel(moves), results=[32], allowed=frozenset({"moved before wait::ld"}), **OPTIONS
    )
    assert found.results[0] == [256 * i for i in range(128)]
    wrong = moves.replace("cvt.u32.u64 %d0, %address;", "").replace("};", f"}};{HERE}", 2)
    assert_fails(
        EmulatorError, "moved before wait::ld", kernel(wrong.replace(HERE, "", 1)), **OPTIONS
    )


@pytest.mark.parametrize(
    "old, new, error, message",
    {
        "a wait": (waiting(), "", RaceError, "nothing orders it after the tcgen05"),
        "a fence after": (f"{waiting()} {AFTER};", waiting(), RaceError, "tcgen05.fence::after"),
        "a commit": (commit(False), "", DeadlockError, "0 bytes are missing"),
        "tensor memory given back": (
            f"@%first_warp {DEALLOC[0]} %tmem, 512;",
            "",
            EmulatorError,
            r"exits with tensor memory \{0: \(512, 1\)\}",
        ),
        "all of it": (
            f"{DEALLOC[0]} %tmem, 512;",
            f"{DEALLOC[0]} %tmem, 256;{HERE}",
            EmulatorError,
            "dealloc of 256 columns from 0",
        ),
        "its beginning": (
            f"{DEALLOC[0]} %tmem, 512;",
            f"add.u32 %tmem, %tmem, 32; @%first_warp {DEALLOC[0]} %tmem, 512;{HERE}",
            EmulatorError,
            "dealloc of 512 columns from 32",
        ),
        "once": (
            f"@%first_warp {DEALLOC[0]} %tmem, 512;",
            f"@%first_warp {DEALLOC[0]} %tmem, 512; @%first_warp {DEALLOC[0]} %tmem, 512;{HERE}",
            EmulatorError,
            r"dealloc of 512 columns from 0 on, for 1 blocks; allocated are \{\}",
        ),
        "an allocation before relinquishing": (
            f"@%first_warp {RELINQUISH[0]};",
            f"@%first_warp {RELINQUISH[0]}; @%first_warp {ALLOC[0]} [slot], 32;{HERE}",
            EmulatorError,
            "an allocation after tcgen05.relinquish_alloc_permit",
        ),
        "a number of columns": (
            f"{ALLOC[0]} [slot], 512;",
            f"{ALLOC[0]} [slot], 96;{HERE}",
            EmulatorError,
            "an allocation of 96 columns",
        ),
        "room": (
            f"@%first_warp {RELINQUISH[0]};",
            f"@%first_warp {ALLOC[0]} [slot], 32;{HERE}",
            DeadlockError,
            r"waits for 32 columns of tensor memory; allocated are \{0: \(512, 1\)\}",
        ),
        "a fence of the proxies": (
            "fence.proxy.async.shared::cta;",
            "",
            RaceError,
            "wrote without a fence.proxy.async",
        ),
        "one cta_group": (
            f"@%first_warp {RELINQUISH[0]};",
            f"@%first_warp {RELINQUISH[1]};{HERE}",
            UnsupportedError,
            "cta_group::2 in a kernel with cta_group::1",
        ),
        "one thread": (
            "@!%p bra issued;",
            "@!%first_warp bra issued;",
            EmulatorError,
            "tcgen05.mma is executed by 32 lanes",
        ),
        "lane 0": (
            f"{MMA['i8', GROUPS[0]]} [%tmem]",
            f"{MMA['i8', GROUPS[0]]} [%tmem+{1 << 16}]",
            EmulatorError,
            "the accumulator begins with lane 1",
        ),
        "columns": (
            f"{MMA['i8', GROUPS[0]]} [%tmem]",
            f"{MMA['i8', GROUPS[0]]} [%tmem+272]",
            EmulatorError,
            "columns 272 to 527 .* are not allocated",
        ),
        "bounds": (
            f"{MMA['i8', GROUPS[0]]} [%tmem]",
            f"add.u64 %b_desc, %b_desc, {PART // 16}; {MMA['i8', GROUPS[0]]} [%tmem]",
            EmulatorError,
            "tcgen05.mma of line .* are outside of its",
        ),
    }.values(),
)
def test_hazards_of_tcgen05_are_found(old, new, error, message):
    text = kernel()
    assert old in text
    assert_fails(error, message, text.replace(old, new), **OPTIONS)


def test_allocations_wait_for_free_columns_and_return_their_address():
    """All 512 columns begin at 0, which the first warp's columns must be free for (9.7.16.7)."""
    assert {isa.OPCODES[x].section for x in (*ALLOC, *DEALLOC, *RELINQUISH)} == {TCGEN05}
    text = declared(64) + "mov.u32 %y, slot; @!%first_warp bra second;"
    for i, count in enumerate((256, 32, 128, 64)):
        text += f"{ALLOC[0]} [%y], {count}; ld.shared.b32 %d{i}, [%y]; add.u32 %tmem, %d{i}, 0;"
    text += f"""bar.sync 1; {DEALLOC[0]} %d0, 256; {DEALLOC[0]} %d2, 128; {DEALLOC[0]} %d3, 64;
        {DEALLOC[0]} %d1, 32; bra end;
        second: bar.sync 1; {ALLOC[0]} [%y+4], 512; ld.shared.b32 %d0, [%y+4];
        mov.u32 %d1, 0; mov.u32 %d2, 0; mov.u32 %d3, 0; {DEALLOC[0]} %d0, 512; end:"""
    text = text.replace("slot[1]", "slot[2]")
    found = run(text, results=[32] * 4, threads=64).results
    taken = [(values[0], count) for values, count in zip(found, (256, 32, 128, 64))]
    cells = [cell for first, count in taken for cell in range(first, first + count)]
    assert len(set(cells)) == 480 and max(cells) < 512
    assert found[0][32:] == [0] * 32


def test_smaller_allocations_begin_elsewhere_in_each_schedule():
    """A kernel that ignores the address is noticed, and both blocks of a pair get the same one."""

    def starts(columns, pair, schedule, seed):
        meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        text = f"""{declared(64)} {meet} @%first_warp {ALLOC[pair]} [slot], {columns}; {meet}
            ld.shared.b32 %d0, [slot]; {meet} @%first_warp {DEALLOC[pair]} %d0, {columns};"""
        blocks = 1 + pair
        options = dict(grid=blocks, cluster=blocks, schedule=schedule, seed=seed)
        return {*run(text, results=[32], threads=64, **options).results[0]}

    for pair in (0, 1):
        found = set()
        for schedule, seed in itertools.product(("eager", "late", "random"), range(3)):
            (start,) = starts(64, pair, schedule, seed)
            found.add(start)
            assert starts(512, pair, schedule, seed) == {0}
            assert starts(256, pair, schedule, seed) == {256}
        assert len(found) > 2 and 0 not in found and found < {*range(0, 512, 64)}


def test_the_warp_that_allocated_deallocates():
    text = f"""{declared(64)} @%first_warp {ALLOC[0]} [slot], 64; bar.sync 0;
        ld.shared.b32 %tmem, [slot]; bar.sync 0; @{{}}%first_warp {DEALLOC[0]} %tmem, 64;"""
    run(text.format(""), threads=64)
    other = text.format("!").replace(f"{DEALLOC[0]} %tmem, 64;", f"{DEALLOC[0]} %tmem, 64;{HERE}")
    assert_fails(EmulatorError, "dealloc by another warp", other, threads=64)
    run(text.format("!"), threads=64, allowed=frozenset({"dealloc by another warp"}))


def test_a_pair_deallocates_what_it_allocated_as_a_pair():
    meet = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    text = f"""{declared(64)} {meet} @%first_warp {ALLOC[1]} [slot], 64; bar.sync 0;
        ld.shared.b32 %tmem, [slot]; {meet} @%first_warp {DEALLOC[1]} %tmem, 64;"""
    run(text, threads=64, grid=2, cluster=2)


TWICE = f"""{BEFORE}; bar.sync 0; {AFTER}; @!%p bra again2; PRODUCT again2: {waiting(1)} {AFTER};
    {one_load()} {LOADED};"""


@pytest.mark.parametrize("missing", ["", f"{BEFORE};", "bar.sync 0;", f"{AFTER};", f"{LOADED};"])
def test_an_accumulator_is_overwritten_only_after_its_loads(missing):
    """The order is: loads, fence::before, a barrier, fence::after, products (9.7.16.6.4)."""
    loads = f"{one_load()} {LOADED}; " + TWICE.replace("PRODUCT", NUMBERED).replace("bra", "bra", 1)
    text = kernel(loads.replace(missing, "", 1) if missing else loads)
    assert {isa.OPCODES[x].section for x in (BEFORE, AFTER, LOADED)} == {TCGEN05}
    if not missing:
        for schedule in ("eager", "late", "random"):
            run(text, schedule=schedule, **OPTIONS)
    elif missing == f"{LOADED};":
        # The load is executed at the next wait.
        with pytest.raises(EmulatorError):
            run(text, schedule="eager", **OPTIONS)
    else:
        message = "writes an accumulator .*nothing orders it after the tcgen05.ld of warp"
        assert_fails(RaceError, message, text, schedule="eager", **OPTIONS)


def test_operands_may_not_change_before_the_products_are_done():
    early = NUMBERED + f"st.shared.u32 [%memory], 0;{HERE}"
    message = "overwrites what is read from .* the tensor core"
    assert_fails(RaceError, message, kernel(products=early), **OPTIONS)
    late = f"{one_load()} {LOADED}; @%first st.shared.u32 [%memory], 0;"
    run(kernel(late), **OPTIONS)


def test_the_first_block_multiplies_for_the_pair():
    """Each block holds half of each operand."""
    with pytest.raises(EmulatorError, match="no block 1"):
        run(kernel(products=NUMBERED.replace(commit(False), f"{MULTI[0]} [%bar], 2;")), **OPTIONS)
    options = dict(arrays=[numbered() * 2], threads=128, grid=2, cluster=2)
    code = instruction_descriptor("i8", "u8", "u8", 256, 256)
    products = f"{MMA['i8', GROUPS[1]]} [%tmem], %a_desc, %b_desc, {code:#x}, %no;{commit(True)}"
    text = blackwell(True, products, "")
    run(text, **options)
    wrong = text.replace("setp.eq.and.u32 %p, %rank, 0", "setp.eq.and.u32 %p, %rank, 1")
    assert_fails(EmulatorError, "the second block executes tcgen05.mma", wrong, **options)


def test_every_form_has_a_test():
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ == "tests.ptx_emulator.tcgen05"
    }
    tested = {*MMA.values(), *LOADS, BEFORE, AFTER, LOADED}
    tested |= TESTED
    assert registered == tested | {*ALLOC, *DEALLOC, *RELINQUISH, *SINGLE, *MULTI}
