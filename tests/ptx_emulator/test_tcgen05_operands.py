"""Tests tcgen05.st, operands in tensor memory, 64 rows and TF32 against the PTX ISA (9.0), 9.7.16.

Each case that must be refused has a valid counterpart, which is also run.
"""

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import EmulatorError, RaceError
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run

SECTION = "9.7.16 tcgen05"

# For each shape (9.7.16.2.3), the row and column of register r of lane l. The second half of
# 16x32bx2 is FURTHER columns to the right.
FURTHER = 128
SHAPES = {
    "32x32b": (1, lambda l, r: (l, r)),
    "16x128b": (2, lambda l, r: (l // 4 + 8 * (r % 2), l % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda l, r: (l // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r // 4))),
    "16x32bx2": (1, lambda l, r: (l % 16, l // 16 * FURTHER + r)),
}
FORMS = [
    (f"{shape}.x{count}", registers * count, place)
    for shape, (registers, place) in SHAPES.items()
    for count in (2**i for i in range(8))
    if registers * count <= 128
]

ALLOCATED = """.reg .b32 %bar, %memory, %tmem, %x, %y; .reg .b64 %a_desc, %b_desc, %address;
    .reg .pred %p, %first;
    .shared .align 1024 .b8 memory[8192]; .shared .align 8 .b64 bar[1]; .shared .b32 tmem;
    mov.u32 %bar, bar; mov.u32 %memory, memory; setp.eq.u32 %first, %thread, 0;
    setp.ge.u32 %p, %thread, 32; @%p bra allocated;
    mov.u32 %tmem, tmem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%tmem], 512;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
    allocated: bar.sync 0; ld.shared.u32 %tmem, [tmem];
"""
FREED = """bar.sync 0; setp.ge.u32 %p, %thread, 32; @%p bra freed;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 512; freed:
"""


def registers(name, count, first=0):
    """Returns a vector operand of `count` registers."""
    return "{" + ", ".join(f"%{name}{first + i}" for i in range(count)) + "}"


def lanes_of(registers):
    """Converts the results of `run` to [lane, register]."""
    return np.array(registers, np.uint32).T


@pytest.mark.parametrize("form, count, place", FORMS, ids=[form for form, *_ in FORMS])
def test_store_puts_registers_where_the_isa_says(form, count, place):
    """The words are read back with 32x32b; all other words are unchanged (9.7.16.8.4)."""
    opcode = f"tcgen05.st.sync.aligned.{form}.b32"
    assert (
        isa.OPCODES[opcode].section
        == isa.OPCODES["tcgen05.wait::st.sync.aligned"].section
        == SECTION
    )
    further = f", {FURTHER}" if "x2." in form else ""
    values = "".join(f"mad.lo.u32 %v{i}, %lane, 1000, {i};" for i in range(count))
    body = f"""{ALLOCATED} .reg .b32 %v<{count}>; {values}
        {opcode} [%tmem]{further}, {registers("v", count)};
        tcgen05.wait::st.sync.aligned; add.u32 %x, %tmem, 128;
        tcgen05.ld.sync.aligned.32x32b.x128.b32 {registers("d", 128)}, [%tmem];
        tcgen05.ld.sync.aligned.32x32b.x128.b32 {registers("d", 128, 128)}, [%x];
        tcgen05.wait::ld.sync.aligned; {FREED}"""
    found = lanes_of(run(body, results=[32] * 256).results)
    expected = np.full((32, 256), 0xFFFFFFFF, np.uint32)
    for lane in range(32):
        for register in range(count):
            expected[place(lane, register)] = 1000 * lane + register
    assert (found == expected).all()


LOADS = [(form, count, place) for form, count, place in FORMS if form.startswith("16x32bx2")]


@pytest.mark.parametrize("form, count, place", LOADS, ids=[form for form, *_ in LOADS])
def test_load_of_two_halves(form, count, place):
    """The value of every word encodes its row and column (9.7.16.8.3)."""
    opcode = f"tcgen05.ld.sync.aligned.{form}.b32"
    assert isa.OPCODES[opcode].section == SECTION
    values = "".join(f"mad.lo.u32 %v{i}, %lane, 1000, {i};" for i in range(128))
    more = "".join(f"add.u32 %v{i}, %v{i}, 128;" for i in range(128))
    body = f"""{ALLOCATED} .reg .b32 %v<128>; {values} add.u32 %x, %tmem, 128;
        tcgen05.st.sync.aligned.32x32b.x128.b32 [%tmem], {registers("v", 128)}; {more}
        tcgen05.st.sync.aligned.32x32b.x128.b32 [%x], {registers("v", 128)};
        tcgen05.wait::st.sync.aligned;
        {opcode} {registers("d", count)}, [%tmem], {FURTHER};
        tcgen05.wait::ld.sync.aligned; {FREED}"""
    found = lanes_of(run(body, results=[32] * count).results)
    for lane in range(32):
        places = [place(lane, register) for register in range(count)]
        assert found[lane].tolist() == [1000 * row + column for row, column in places]


KINDS = {
    "f16": ("f16", np.float16, 0, 1),
    "bf16": ("f16", ml_dtypes.bfloat16, 1, 1),
    "tf32": ("tf32", np.float32, 2, 1),
    "e4m3": ("f8f6f4", ml_dtypes.float8_e4m3fn, 0, 1),
    "e5m2": ("f8f6f4", ml_dtypes.float8_e5m2, 1, 1),
    "s8": ("i8", np.int8, 1, 2),
}
N = 16


def core_matrices(matrix):
    """Reorders rows of 32 bytes to core matrices of 8 rows and 16 bytes, K first (9.7.16.4.1)."""
    raw = np.ascontiguousarray(matrix).view(np.uint8)
    return raw.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).tobytes()


def multiply(name, rows, *, in_tensor_memory, fence="fence.proxy.async.shared::cta;", **changes):
    """Returns body, arrays and result of a product of `rows` rows, 16 columns, 32 bytes of K."""
    kind, dtype, code, result = KINDS[name]
    generator, depth = np.random.default_rng(rows), 32 // np.dtype(dtype).itemsize
    a, b = (generator.integers(-8, 9, (side, depth)) for side in (rows, N))
    descriptor = result << 4 | code << 7 | code << 10 | N >> 3 << 17 | rows >> 4 << 24
    # Core matrices are 128 bytes apart along K, and 256 along rows. The version is 1.
    layout = 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46
    change = {
        "store": f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%x], {registers('v', 8)};",
        "wait": "tcgen05.wait::st.sync.aligned;",
        "before": "tcgen05.fence::before_thread_sync;",
        "after": "tcgen05.fence::after_thread_sync;",
    } | changes
    product = f"tcgen05.mma.cta_group::1.kind::{kind} [%tmem], "
    product += f"{'[%x]' if in_tensor_memory else '%a_desc'}, %b_desc, {descriptor}, %p;"
    words = "".join(f"ld.global.u32 %v{i}, [%address+{4 * i}];" for i in range(8))
    copies = "".join(f"st.shared.u32 [%y+{4 * i}], %v{i};" for i in range(8))
    body = f"""{ALLOCATED} .reg .b32 %v<8>; .reg .b64 %two;
        mad.wide.u32 %address, %thread, 32, %m1; {words}
        shr.u32 %y, %thread, 3; mad.lo.u32 %y, %thread, 32, %memory; setp.ge.u32 %p, %thread, {N};
        @%p bra stored; {copies} stored:
        mad.wide.u32 %address, %thread, 32, %m0; {words}
        mad.lo.u32 %y, %thread, 32, %memory; add.u32 %y, %y, 1024; setp.ge.u32 %p, %thread, {rows};
        @%p bra copied; {copies} copied: {fence}
        shl.b32 %x, %warp, 21; add.u32 %x, %x, %tmem; add.u32 %x, %x, 64;
        {change["store"] if in_tensor_memory else ""} {change["wait"] if in_tensor_memory else ""}
        {change["before"]} bar.sync 0; {change["after"]}
        shr.u32 %y, %memory, 4; cvt.u64.u32 %b_desc, %y; or.b64 %b_desc, %b_desc, {layout};
        add.u64 %a_desc, %b_desc, {1024 >> 4}; add.u32 %x, %tmem, 64; setp.ne.u32 %p, 0, 0;
        @%first {product}{HERE}
        @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
        wait: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0; @!%p bra wait;
        tcgen05.fence::after_thread_sync; shl.b32 %x, %warp, 21; add.u32 %x, %x, %tmem;
        tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {registers("d", N)}, [%x];
        tcgen05.wait::ld.sync.aligned; {FREED}"""
    first = a.astype(dtype)
    array = np.zeros((128, depth), dtype)
    array[:rows] = first
    arrays = [array.tobytes() if in_tensor_memory else core_matrices(array)]
    arrays.append(core_matrices(np.concatenate([b, np.zeros((128 - N, depth), int)]).astype(dtype)))
    return body, arrays, a @ b.T


def multiplied(name, rows, **options):
    """Runs a product; returns the accumulator [128 lanes, 16] and the exact product."""
    launch = {x: options.pop(x) for x in ("schedule", "allowed") if x in options}
    body, arrays, expected = multiply(name, rows, **options)
    found = lanes_of(run(body, results=[32] * N, arrays=arrays, threads=128, **launch).results)
    return found.view(np.int32 if name == "s8" else np.float32), expected


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("name", KINDS)
def test_the_first_operand_may_be_in_tensor_memory(name, schedule):
    """Rows are lanes, and K is packed into columns (9.7.16.10.5)."""
    assert isa.OPCODES[f"tcgen05.mma.cta_group::1.kind::{KINDS[name][0]}"].section == SECTION
    found, expected = multiplied(name, 128, in_tensor_memory=True, schedule=schedule)
    assert (found == expected).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_product_of_128_rows_is_exact(name):
    """Both operands are in shared memory."""
    found, expected = multiplied(name, 128, in_tensor_memory=False)
    assert (found == expected).all()


@pytest.mark.parametrize("name", KINDS)
def test_product_of_64_rows_is_in_16_lanes_of_each_quarter(name):
    """The result has layout F of 9.7.16.10.5."""
    found, expected = multiplied(name, 64, in_tensor_memory=False)
    quarters = found.reshape(4, 32, N)[:, :16].reshape(64, N)
    assert (quarters == expected).all()
    raw = found.view(np.uint32).reshape(4, 32, N)[:, 16:]
    assert (raw == 0xFFFFFFFF).all()


def test_TF32_ignores_the_last_13_bits_of_a_float32():
    """TF32 has 10 bits of fraction (9.7.16.2.2)."""
    body, arrays, expected = multiply("tf32", 128, in_tensor_memory=False)
    noisy = [(np.frombuffer(x, np.uint32) | 0x1FFF).tobytes() for x in arrays]
    found = run(body, results=[32] * N, arrays=noisy, threads=128).results
    # Elements that were 0 are now tiny numbers, which are 0 in TF32.
    assert (lanes_of(found).view(np.float32) == expected).all()


def test_what_orders_a_store_and_a_product():
    """A wait for the store, and fences before and after the barrier, are needed."""
    options = dict(in_tensor_memory=True)
    for change, message in (
        (
            dict(wait=""),
            "nothing orders it after the tcgen05.st of warp 0; it needs tcgen05.wait::st",
        ),
        (dict(before=""), "nothing orders it after the tcgen05.st of warp 0"),
        (dict(after=""), "nothing orders it after the tcgen05.st of warp 0"),
    ):
        body, arrays, _ = multiply("f16", 128, **options, **change)
        assert_fails(
            RaceError,
            message,
            body.replace("%d", "%e").replace(
                ".reg .b64 %two;", f".reg .b64 %two; .reg .b32 %e<{N}>;"
            ),
            arrays=arrays,
            threads=128,
        )
    # If the warning is allowed, the barrier is enough. Without the wait nothing orders the two.
    allowed = frozenset({"no tcgen05.fence"})
    found, expected = multiplied("f16", 128, **options, before="", after="", allowed=allowed)
    assert (found == expected).all()
    with pytest.raises(RaceError, match=r"nothing orders it after the tcgen05\.st of warp 0"):
        multiplied("f16", 128, **options, wait="", allowed=allowed)


def test_stores_that_are_not_waited_for():
    """A wait is missing before or after a load of the same columns, or at the kernel's end."""
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem], {%x};"
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%y}, [%tmem];"
    stored, loaded = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
    body = f"{ALLOCATED} mov.u32 %x, 7; {{}} {FREED}"
    run(body.replace("{}", store + stored + load + loaded + store + stored))
    for text, error, message in (
        (f"{store} {load}{HERE} {stored} {loaded}", RaceError, "without a tcgen05.wait::st"),
        (f"{load} {store}{HERE} {stored} {loaded}", RaceError, "without a tcgen05.wait::ld"),
        (store, EmulatorError, "exits before tcgen05.wait::st"),
    ):
        assert_fails(error, message, body.replace("{}", text))


def test_warps_of_one_quarter_share_lanes():
    """The fifth warp accesses the same lanes as the first."""
    body = f"""{ALLOCATED} mov.u32 %x, %thread; setp.ge.u32 %p, %thread, 32; @%p bra first;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem], {{%x}}; tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync; first: BARRIER
        tcgen05.fence::after_thread_sync; setp.lt.u32 %p, %thread, 128; @%p bra end;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%y}}, [%tmem];{HERE}
        tcgen05.wait::ld.sync.aligned; end: {FREED}"""
    found = run(
        body.replace("BARRIER", "bar.sync 1; mov.u32 %y, 0;") + "mov.u32 %d0, %y;",
        results=[32],
        threads=160,
    ).results
    assert found[0][128:] == list(range(32))
    slow = "add.u32 %y, %y, 1;" * 500
    message = "nothing orders it after the tcgen05.st of warp 0"
    assert_fails(RaceError, message, body.replace("BARRIER", slow), threads=160, schedule="eager")


def test_a_loaded_register_is_used_before_the_wait():
    """This is an error unless the warning is allowed; then tensor memory is read until the wait."""
    body = f"""{ALLOCATED} mov.u32 %x, %thread;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem], {{%x}}; tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%y}}, [%tmem];
        add.u32 %x, %y, 1;{HERE} {{}} tcgen05.wait::ld.sync.aligned; {FREED}"""
    allowed = frozenset({"used before wait::ld"})
    assert_fails(
        EmulatorError, "a register is used before tcgen05.wait::ld", body.replace("{}", "")
    )
    found = run(body.replace("{}", "") + "mov.u32 %d0, %x;", results=[32], allowed=allowed)
    assert found.results == [list(range(1, 33))]
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem], {%x};"
    later = body.replace(HERE, "").replace("{}", store)
    assert_fails(RaceError, "without a tcgen05.wait::ld", later, allowed=allowed)


# Forms that are tested in this file and not in test_tcgen05.py.
TESTED = {
    *(f"tcgen05.st.sync.aligned.{form}.b32" for form, *_ in FORMS),
    *(f"tcgen05.ld.sync.aligned.{form}.b32" for form, *_ in LOADS),
    *("tcgen05.wait::st.sync.aligned", "tcgen05.mma.cta_group::1.kind::tf32"),
}


def test_every_form_of_a_store_has_a_test():
    assert {x for x in isa.OPCODES if x.startswith("tcgen05.st.")} <= TESTED
