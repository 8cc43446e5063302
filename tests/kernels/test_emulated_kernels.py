"""The emulator executes the PTX of the Pallas kernels; results equal XLA's in several schedules."""

import json
import re

import jax
import numpy as np
import pytest

from pallas_patch_embed.backends import xla
from pallas_patch_embed.base.problem import Epilogue
from tests.kernels.emulated import (
    ALLOWED,
    CASES,
    HOPPER,
    LONG,
    ONE_OR_ALL,
    SCHEDULES,
    compiled,
    emulated,
)
from tests.operator.bounds import assert_bit_equal
from tests.ptx_emulator import chip_programs, mosaic
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.parser import parse

pytestmark = pytest.mark.usefixtures("compilers")

# The kinds of asynchronous work. In some long schedules one kind is late and the rest is random.
LATE = ("load", "multiply", "signal", "arrival", "store", "write")
LONG_SCHEDULES = (
    ("eager", 0),
    ("late", 1),
    *(({kind: "late"}, seed) for seed, kind in enumerate(LATE, 2)),
    *(("random", seed) for seed in range(8, 20)),
)


def assert_equals_xla(monkeypatch, name, case, schedules):
    """Asserts that the kernel's result equals XLA's in these schedules; returns the last result."""
    stem = compiled(name)
    operands = case.draw(len(name))
    expected = xla.run(*operands, out_dtype=case.out_dtype, epilogue=Epilogue(*case.epilogue))
    for schedule, seed in schedules:
        y, machine = emulated(stem, case, operands, schedule=schedule, seed=seed, allowed=ALLOWED)
        jax.tree.map(assert_bit_equal, y, expected)
        assert machine.events
    return y


# Digests of the results that an H200 computed with the Hopper kernels for the same operands.
CHIP_ANSWERS = json.loads(chip_programs.ANSWERS.read_text())["answers"]["kernels"]


@ONE_OR_ALL
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla(monkeypatch, name, schedules_of):
    schedules = schedules_of(list(CASES).index(name))
    y = assert_equals_xla(monkeypatch, name, CASES[name], schedules)
    if name in HOPPER:
        assert chip_programs.digest(np.asarray(y)) == CHIP_ANSWERS[name]


# Bugs in the protocol of two blocks, made by editing the PTX: a pattern, its replacement, and a
# pattern of the emulator's message. `test_ptx_mutations.py` makes further edits.
ONLY_BLOCK_1 = """{ .reg .pred first, over; .reg .b32 rank; mov.u32 rank, %cluster_ctarank;
    setp.eq.u32 first, rank, 0; @first bra go;
    again: mbarrier.try_wait.parity.shared::cta.b64 over, [BARRIER], 0; @!over bra again; go: }"""
ALLOCATION = r"tcgen05\.alloc\S+ \[(%r\d+)\], (%r\d+);"
BUGS = {
    "a pair allocates before its peer is there": (
        r"barrier\.cluster\.arrive\S+;(.*?)barrier\.cluster\.wait\S+;",
        r"\1",
        "nothing says that the peer has been launched",
    ),
    "the second block allocates after the first one's products": (
        rf"(mbarrier\.init\S+ \[(%r\d+)\].*?)({ALLOCATION})",
        lambda found: found[1] + ONLY_BLOCK_1.replace("BARRIER", found[2]) + found[3],
        "waits for the peer's tcgen05.alloc",
    ),
    "a block frees before its peer has allocated": (
        rf"({ALLOCATION})",
        r"\1 { .reg .b32 at; ld.shared.b32 at, [\2]; "
        r"tcgen05.dealloc.cta_group::2.sync.aligned.b32 at, \3; }",
        "dealloc.* nothing orders it after the tcgen05.alloc",
    ),
    "more registers than there are": (
        r"setmaxnreg\.inc\.sync\.aligned\.u32 232;",
        "setmaxnreg.inc.sync.aligned.u32 240;",
        "registers; its block has .* that are free",
    ),
    "lanes do not meet before a store": (
        r"(fence\.proxy\.async\S+;\s*)(// begin inline asm\s*)?bar\.sync [^;]+;",
        r"\1",
        "no barrier orders that before",
    ),
    "one lane fences for all": (
        r"(fence\.proxy\.async\S+;)",
        r"{ .reg .pred one; elect.sync _|one, -1; @one \1 }",
        "without a fence.proxy.async of the lanes",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_protocol_is_noticed(monkeypatch, bug):
    name = "two blocks, a phase change in a worker"
    case, (pattern, wrong, message) = CASES[name], BUGS[bug]
    stem = compiled(name)
    edited, count = re.subn(
        pattern, wrong, stem.with_suffix(".ptx").read_text(), count=1, flags=re.S
    )
    assert count == 1
    monkeypatch.setattr(mosaic, "parse", lambda _, *entry: parse(edited, *entry))
    operands = case.draw(0)
    for schedule, seed in SCHEDULES[:4]:
        with pytest.raises(EmulatorError, match=message):
            emulated(stem, case, operands, schedule=schedule, seed=seed, allowed=ALLOWED)


@pytest.mark.exhaustive("it takes five minutes on one core")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", LONG)
def test_sizes_of_production_equal_xla_in_20_schedules(monkeypatch, name, part):
    assert_equals_xla(monkeypatch, name, LONG[name], LONG_SCHEDULES[part::4])
