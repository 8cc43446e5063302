"""The model of a call's time: its page, its errors and its predictions."""

import re

import numpy as np
import pytest
from repository import ROOT

from benchmarks import time_model
from pallas_patch_embed.backends import cuda
from pallas_patch_embed.chips import B200, H200
from pallas_patch_embed.problem import named_shape

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason="the CUDA library is not built")


def test_the_page_is_what_the_command_prints():
    assert (ROOT / "docs/predictions.md").read_text() == time_model.page()


def test_another_record_has_another_error():
    found = time_model.records()
    before = time_model.errors(found)
    found[0] = found[0] | {"milliseconds": 2 * found[0]["milliseconds"]}
    assert time_model.errors(found)[0] < before[0] - 0.2


def test_a_shape_left_out_is_predicted_without_its_records():
    found = time_model.records()
    before = time_model.errors(found, True)
    twice = [r | {"milliseconds": 2 * r["milliseconds"]} for r in found if r["shape"] == "B/16 512"]
    others = [r for r in found if r["shape"] != "B/16 512"]
    expected = [e for r, e in zip(found, before) if r["shape"] == "B/16 512"]
    after = time_model.errors(twice + others, True)[: len(twice)]
    np.testing.assert_allclose(after, [(1 + e) / 2 - 1 for e in expected], rtol=1e-9)


@pytest.mark.parametrize("backend, chip", [("mosaic_sm90", H200), ("mosaic_sm100", B200)])
def test_more_images_take_more_cycles(backend, chip):
    problems = (
        time_model.problem_of(named_shape("B/16 224"), n, "int8") for n in (64, 512, 1024, 4736)
    )
    cycles = [time_model.worker(problem, backend, chip)["cycles"] for problem in problems]
    assert cycles == sorted(set(cycles))


def test_no_prediction_is_below_the_floor():
    cells = re.findall(r"\| ([\d.]+) to ([\d.]+) \(([\d.]+)\)", time_model.page())
    assert len(cells) > 400
    # Numbers are rounded to three digits.
    assert [c for c in cells if float(c[0]) < 0.99 * float(c[2])] == []
