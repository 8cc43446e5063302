"""The emulator's results of every program equal those of a Hopper GPU in every bit."""

import itertools
import json

import pytest

from tests.ptx_emulator import chip_programs
from tests.short_suite import keep

ANSWERS = json.loads(chip_programs.ANSWERS.read_text())
# (first program, step): the short suite runs every 20th program, CI half of all programs.
PARTS = [(0, 20), *((part, 4) for part in range(4))]


@pytest.mark.parametrize(
    "first, step",
    keep(
        PARTS,
        lambda part: part == PARTS[0],
        "the four parts run all 2000 programs",
        lambda part: part[0] % 2 == 0,
    ),
)
@pytest.mark.parametrize("family", chip_programs.FAMILIES)
def test_the_emulators_results_are_those_of_the_chip(family, first, step):
    answers = ANSWERS["answers"][family]
    for program in itertools.islice(chip_programs.FAMILIES[family](), first, None, step):
        question, answer = answers[program.name]
        assert question == program.question, f"{program.name} changed: record it again"
        assert chip_programs.digest(*chip_programs.emulated(program)) == answer, program.name


def test_every_program_has_a_recorded_result():
    asked = {
        family: [program.name for program in programs()]
        for family, programs in chip_programs.FAMILIES.items()
    }
    answers = {family: list(ANSWERS["answers"][family]) for family in asked}
    assert answers == asked
    assert sum(map(len, asked.values())) >= 2000
    assert ANSWERS["compute_capability"] == "9.0"


def test_an_emulator_that_differs_is_noticed(monkeypatch):
    """The faults are a swizzle without effect, NaN with other payloads, and a wrong shuffle."""
    from tests.ptx_emulator import scalar, tma

    def wrong(family):
        answers = ANSWERS["answers"][family]
        found = (
            chip_programs.digest(*chip_programs.emulated(p)) != answers[p.name][1]
            for p in itertools.islice(chip_programs.FAMILIES[family](), 0, None, 25)
        )
        return any(found)

    assert not wrong("scalar") and not wrong("tma")
    monkeypatch.setattr(scalar, "with_canonical_nan", lambda values: values)
    assert wrong("scalar")
    monkeypatch.setitem(tma.SWIZZLES, 128, 0)
    tma.box_layout.cache_clear()
    assert wrong("tma")
    tma.box_layout.cache_clear()
