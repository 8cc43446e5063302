"""The parser, and branches."""

import numpy as np
import pytest

from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.parser import Immediate, parse
from tests.ptx_emulator.ptx_runner import array_addresses, launch, module_text, run
from tests.ptx_emulator.scalar_cases import (
    LANES,
    width,
)

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"
SYNC, MATRIX, MISC = "9.7.13 synchronisation", "9.7.14 matrices", "9.7.19 miscellaneous"


def test_scopes_have_their_own_registers_and_labels():
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


def test_register_ranges_vectors_and_a_register_that_is_read_and_written():
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
def test_immediates_have_their_values(kind, text, value):
    assert run(f"mov.{kind} %d0, {text};", results=[width(kind)]).results == [[value] * 32]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_address_may_have_an_offset(sign):
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


def test_comments_and_directives_are_skipped_and_lines_are_counted():
    text = module_text(
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
    text = module_text("ret;") + second
    assert parse(text).name == "kernel"
    assert parse(text, "second").block == (64, 1, 1)
    with pytest.raises(UnsupportedError, match="no kernel third"):
        parse(text, "third")


def test_parameters_and_shared_variables_are_aligned():
    parameters = [".param .u8 a", ".param .u64 .ptr .global .align 16 b", ".param .u16 c"]
    parameters += [".param .align 64 .b8 d[65]", ".param .f32 e"]
    prelude = """.shared .align 4 .b8 first[5];
        .extern .shared .align 128 .b8 dynamic[];"""
    kernel = parse(module_text(".shared .b64 second[3]; ret;", parameters, prelude))
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


def test_a_branch_table_sends_each_lane_to_its_label():
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
    with pytest.raises(EmulatorError, match="branch 1 does not exist among 1 targets"):
        run(body)


def test_a_loop_that_lanes_leave_one_by_one():
    body = """.reg .pred p, q; .reg .b32 i; mov.u32 i, 0; mov.u32 %d0, 0; mov.u32 %d1, 0;
        again: setp.ge.u32 p, i, %lane; @p bra done;
        add.u32 i, i, 1; add.u32 %d0, %d0, i; bra.uni again;
        done: setp.eq.u32 q, %lane, 7; @!q add.u32 %d1, %d1, 1; @ q add.u32 %d1, %d1, 2;"""
    found = run(body, results=[32, 32]).results
    assert found[0] == [lane * (lane + 1) // 2 for lane in LANES]
    assert found[1] == [2 if lane == 7 else 1 for lane in LANES]


@pytest.mark.parametrize("negation", ["", "!"])
def test_sides_of_a_branch_write_their_own_lanes(negation):
    """Lanes write registers and memory; after the branch all lanes have converged again."""
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
    machine = launch(body, [".param .u64 out"], [np.zeros(32, np.uint32)])
    found = machine.memory.read(array_addresses(machine)[0], (32,), np.uint32)
    assert found.tolist() == [2**20 - 1] * 20 + [1] * 12
