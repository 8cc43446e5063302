"""The compiled PTX of the kernels, executed: results equal XLA's, whatever the schedule."""

import json

import chip_programs
import numpy as np
import pytest
from bounds import assert_bit_equal
from emulated import ALLOWED, CASES, HOPPER, MULTIPROCESSORS, compiled, emulated
from interpreter import draw_operands

from benchmarks.offline_compile import cuda_root
from pallas_patch_embed.backends import xla

pytestmark = pytest.mark.skipif(cuda_root() is None, reason="the extra codegen is missing")

SCHEDULES = (
    ("eager", 0),
    ("late", 1),
    ("random", 2),
    ("random", 3),
    ({"load": "eager", "multiply": "late", "store": "late", "write": "late"}, 4),
)

# What an H200 gave for the Hopper kernels, for the same operands.
CHIP_ANSWERS = json.loads(chip_programs.ANSWERS.read_text())["answers"]["kernels"]


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla_whatever_the_schedule(monkeypatch, tmp_path, name):
    case = CASES[name]
    monkeypatch.setattr(case.module, "MULTIPROCESSORS", MULTIPROCESSORS)
    stem = compiled(name, tmp_path)
    operands = draw_operands(len(name), case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    for schedule, seed in SCHEDULES:
        y, machine = emulated(stem, case, operands, schedule=schedule, seed=seed, allowed=ALLOWED)
        assert_bit_equal(y, expected)
        assert machine.events
    if name in HOPPER:
        assert chip_programs.digest(np.asarray(y)) == CHIP_ANSWERS[name]
