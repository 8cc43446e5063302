"""The model of a call's time: its page, and what its errors depend on."""

import pytest
from repository import ROOT

from benchmarks import time_model
from pallas_patch_embed.backends import cuda
from pallas_patch_embed.chips import B200, H200
from pallas_patch_embed.problem import named_shape

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason="the library is not built")


def test_the_page_is_what_the_command_prints():
    assert (ROOT / "docs/predictions.md").read_text() == time_model.page()


def test_another_record_has_another_error():
    found = time_model.records()
    before = time_model.errors(found)
    found[0] = found[0] | {"milliseconds": 2 * found[0]["milliseconds"]}
    assert time_model.errors(found)[0] < before[0] - 0.2


@pytest.mark.parametrize("backend, chip", [("mosaic_sm90", H200), ("mosaic_sm100", B200)])
def test_more_images_take_more_cycles(backend, chip):
    problems = (
        time_model.problem_of(named_shape("B/16 224"), n, "int8") for n in (64, 512, 1024, 4736)
    )
    cycles = [time_model.worker(problem, backend, chip)[0] for problem in problems]
    assert cycles == sorted(set(cycles))
