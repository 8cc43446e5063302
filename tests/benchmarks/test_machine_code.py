"""Reading machine code: loops and their execution counts, bytes, and classes of opcodes."""

import re

from benchmarks.machine_code import CLASSES, MATRIX, access_bytes, count, executed, innermost_loop

LOOP = """
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   IMMA.16832.S8.S8 R24, R4, R6, R24 ;
        /*0028*/                   IMMA.16832.S8.S8 R28, R4, R8, R28 ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/                   STG.E.128 [R2.64], R24 ;
.L_x_2:
        /*0050*/               @P0 BRA `(.L_x_1) ;
"""
NESTED = """
.L_x_1:
        /*0010*/                   MOV R1, R2 ;
.L_x_2:
        /*0020*/                   HGMMA.64x192x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0028*/                   HGMMA.64x192x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/                   STG.E.128 [R2.64], R24 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
"""


def test_repeated_instructions_are_counted_as_often_as_executed():
    found = executed(LOOP, "STG|[HIQ]G?MMA", 12)
    assert found == {"LDSM.16.M88.4": 12, "IMMA.16832.S8.S8": 24, "STG.E.128": 1, "BRA": 24}
    found = executed(NESTED, "STG|[HIQ]G?MMA", 12)
    shape = "HGMMA.64x192x16.F32.BF16"
    assert found == {"MOV": 1, f"{shape} RS": 12, shape: 12, "BRA": 13, "STG.E.128": 1}


def test_the_bytes_of_loads_and_stores_follow_from_their_modifiers():
    opcodes = ["LDG.E.128.CONSTANT", "STS.64", "LDS", "LDG.E.U16", "STS.U8", "STSM.16.M88.4"]
    assert [access_bytes(opcode) for opcode in opcodes] == [16, 8, 4, 2, 1, 16]


def test_the_innermost_loop_with_all_products_is_found():
    sass = """
.L_x_1:
        /*0010*/                   LDG.E R4, [R2] ;
.L_x_2:
        /*0020*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0030*/                   LDS.64 R4, [R2] ;
.L_x_3:
        /*0040*/              @P1 IADD3 R1, R1, 0x1, RZ ;
        /*0050*/              @P1 BRA `(.L_x_3) ;
        /*0060*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0070*/             @!P0 BRA `(.L_x_2) ;
        /*0080*/             @!P0 BRA `(.L_x_1) ;
"""
    assert count(innermost_loop(sass, MATRIX)) == {"HGMMA": 2, "LDS": 1, "IADD3": 1, "BRA": 2}
    assert innermost_loop("no loop", MATRIX) == []


def test_the_innermost_loop_contains_all_matches_or_there_is_none():
    inner = innermost_loop(NESTED, re.compile("HGMMA"))
    assert "L_x_2" in inner[0] and "`(.L_x_2)" in inner[-1]
    assert len(innermost_loop(NESTED, re.compile("HGMMA|STG"))) == len(NESTED.strip().splitlines())
    straight = "/*0010*/  MOV R1, R2 ;\n/*0020*/  STG.E [R2.64], R24 ;"
    assert innermost_loop(straight, re.compile("STG")) == []


def test_each_opcode_has_one_class():
    names = [name for opcodes in CLASSES.values() for name in opcodes]
    assert len(names) == len(set(names))
