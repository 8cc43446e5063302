"""Statements that the emulator refuses."""

import numpy as np
import pytest

from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.ptx_runner import full_message, launch, module_text

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"
SYNC, MATRIX, MISC = "9.7.13 synchronisation", "9.7.14 matrices", "9.7.19 miscellaneous"

DECLARED = """.reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %q<4>; .reg .pred %p<4>;
    .shared .align 16 .b8 memory[64];
    mov.u32 %r0, memory; ld.param.u64 %q0, [out]; mov.u32 %r1, %tid.x;"""


def refused(statement, error, message, **options):
    """Asserts that the statement is an error whose message names its line."""
    body = f"{DECLARED}\n{statement}\nret;"
    line = module_text(body, [".param .u64 out"]).split(statement)[0].count("\n") + 1
    with pytest.raises(error, match=f"(?s){message}") as caught:
        launch(body, [".param .u64 out"], [np.zeros(16, np.uint32)], **options)
    assert f"line {line}: " in full_message(caught.value), full_message(caught.value)


@pytest.mark.parametrize("index", ["%h0", "%q0", "1"])
def test_a_branch_index_that_is_not_a_register_of_32_bits(index):
    statement = f"table: .branchtargets here; brx.idx {index}, table;\nhere:"
    refused(statement, UnsupportedError, "is not a register of 32 bits")


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
        "is not an address": ("ld.global.u32 %r1, %q0;", "is not an address"),
        "a special register": ("mov.u32 %r1, %nosuch;", "special register %nosuch"),
        "a constant of 33 bits": ("mov.u32 %r1, 4294967296;", "4294967296 is out of range for u32"),
        "a constant below": ("mov.s32 %r1, -2147483649;", "-2147483649 is out of range for s32"),
        "a constant of 17 bits": ("add.u16 %h0, %h0, 65536;", "65536 is out of range for u16"),
        "a negative one": ("mov.u16 %h0, -32769;", "-32769 is out of range for u16"),
        "a byte": ("st.global.u8 [%q0], 256;", "256 is out of range for u8"),
        "a predicate of 2": ("mov.pred %p0, 2;", "2 is out of range for pred"),
        "a constant of 65 bits": ("mov.u64 %q0, 18446744073709551616;", "is out of range for u64"),
        "an integer for a float": ("add.f32 %r1, %r0, 1;", "0x1 where f32"),
        "an integer for a half": ("add.f16 %h1, %h0, 0x3C00;", "0x3c00 where f16"),
        "a float for an integer": ("add.u32 %r1, %r0, 0f3F800000;", "0x3f800000 where u32"),
        "a decimal digit of octal": ("mov.u32 %r1, 08;", "no variable 08"),
        "a binary digit": ("mov.u32 %r1, 0b12;", "no variable 0b12"),
        "a small suffix": ("mov.u32 %r1, 12u;", "no variable 12u"),
        "an offset": ("ld.global.u32 %r1, [%q0+08];", "the offset 08"),
        "a narrow special": ("mov.u16 %h0, %laneid;", "%laneid has 32 bits, not u16"),
        "a wide special": ("mov.u64 %q0, %tid.x;", "%tid.x has 32 bits, not u64"),
        "half a clock": ("mov.u32 %r1, %clock64;", "%clock64 has 64 bits, not u32"),
        "a special float": ("mov.f32 %r1, %tid.x;", "%tid.x has 32 bits, not f32"),
        "a special operand": ("add.u32 %r1, %r0, %tid.x;", "%tid.x is read only by mov and cvt"),
        "a special address": (
            "ld.global.u32 %r1, [%clock64];",
            "%clock64 is read only by mov and cvt",
        ),
        "a special that is stored": (
            "st.global.u32 [%q0], %laneid;",
            "%laneid is read only by mov",
        ),
        "a name twice": (".reg .b32 %r1;", "%r1 is declared twice"),
        "a label twice": ("here: mov.u32 %r1, 0; here:", "here is declared twice"),
        "a register that is not declared": ("add.u32 %r1, %r0, %r99;", "register %r99"),
        "a target that is not declared": ("add.u32 other, %r0, %r0;", "other.* cannot be written"),
        "a variable": ("mov.u32 %r1, nosuch;", "no variable nosuch"),
        "a variable's address": ("ld.shared.u32 %r1, [nosuch+4];", "no variable nosuch"),
        "a constant as target": ("mov.u32 5, %r0;", "cannot be written"),
        "a double for a float": ("add.f32 %r1, %r0, 0d3FF0000000000000;", "no variable 0d3FF"),
        "a label": ("bra nowhere;", "a label among .*nowhere.* is not declared"),
        "a label of an inner scope": (
            "bra inside; { inside: }",
            "a label among .*inside.* is not declared",
        ),
        "a branch table": ("brx.idx %r1, nowhere;", "nowhere"),
        "a predicate": ("@nosuch ret;", "no predicate nosuch"),
        "registers beyond the limit": ("setmaxnreg.inc.sync.aligned.u32 264;", "264"),
        "registers not in eights": ("setmaxnreg.dec.sync.aligned.u32 100;", "100"),
    }.values(),
    ids=lambda value: value.split(";")[0],
)
def test_unknown_statements_are_refused(statement, message):
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
            "not executed by all lanes",
        ),
    }.values(),
    ids=lambda value: value.split(";")[0],
)
def test_invalid_accesses_and_masks_are_refused(statement, message):
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
def test_lanes_must_write_the_same_value_to_one_address(statement):
    """It is undefined which value remains, so different values are refused (9.7.9.12)."""
    wrong = statement.format("%r1")
    refused(wrong, RaceError, "lanes 0 and (1|8|16) write different values to one address")
    launch(f"{DECLARED} {statement.format(5)} ret;", [".param .u64 out"], [np.zeros(16, "u4")])


@pytest.mark.parametrize("space", ["shared", "shared::cta"])
@pytest.mark.parametrize("opcode", ["ld.{}.u32 %r3, [%r2];", "st.{}.u32 [%r2], 1;"])
def test_an_address_of_another_block_is_not_one_of_the_own_block(space, opcode):
    statement = ".reg .b32 %x; mov.u32 %x, %cluster_ctarank; xor.b32 %x, %x, 1;"
    statement += f"mapa.shared::cluster.u32 %r2, %r0, %x; {opcode.format(space)}"
    message = r"an address in block \d, expected the warp.s own block"
    refused(statement, EmulatorError, message, grid=2, cluster=2)
