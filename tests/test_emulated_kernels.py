"""The compiled PTX of the kernels, executed: results equal XLA's, whatever the schedule.

PTX_LONG=1 adds production's sizes, in 20 schedules each (5 minutes on one core).
"""

import json
import os

import chip_programs
import numpy as np
import pytest
from bounds import assert_bit_equal
from emulated import (
    ALLOWED,
    CASES,
    HOPPER,
    LONG,
    MULTIPROCESSORS,
    SCHEDULES,
    compiled,
    emulated,
)
from interpreter import draw_operands

from benchmarks.machine_code import cuda_root
from pallas_patch_embed.backends import xla

pytestmark = pytest.mark.skipif(cuda_root() is None, reason="the extra codegen is missing")

# What is late while all else is random.
LATE = ("load", "multiply", "signal", "arrival", "store", "write")
LONG_SCHEDULES = (
    ("eager", 0),
    ("late", 1),
    *(({kind: "late"}, seed) for seed, kind in enumerate(LATE, 2)),
    *(("random", seed) for seed in range(8, 20)),
)


def assert_equals_xla(monkeypatch, folder, name, case, schedules):
    """The compiled kernel gives what XLA does, in every schedule; what it gave last."""
    monkeypatch.setattr(case.module, "MULTIPROCESSORS", MULTIPROCESSORS)
    stem = compiled(name, folder)
    operands = draw_operands(len(name), case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    for schedule, seed in schedules:
        y, machine = emulated(stem, case, operands, schedule=schedule, seed=seed, allowed=ALLOWED)
        assert_bit_equal(y, expected)
        assert machine.events
    return y


# What an H200 gave for the Hopper kernels, for the same operands.
CHIP_ANSWERS = json.loads(chip_programs.ANSWERS.read_text())["answers"]["kernels"]


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla_whatever_the_schedule(monkeypatch, tmp_path, name):
    # Hopper's kernels run on a GPU, too.
    schedules = SCHEDULES[:3] if name in HOPPER else SCHEDULES
    y = assert_equals_xla(monkeypatch, tmp_path, name, CASES[name], schedules)
    if name in HOPPER:
        assert chip_programs.digest(np.asarray(y)) == CHIP_ANSWERS[name]


@pytest.mark.skipif(not os.environ.get("PTX_LONG"), reason="PTX_LONG=1 asks for it")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", LONG)
def test_productions_sizes_equal_xla_in_20_schedules(monkeypatch, tmp_path, name, part):
    assert_equals_xla(monkeypatch, tmp_path, name, LONG[name], LONG_SCHEDULES[part::4])
