"""The model of a call's time: its page, its errors and its predictions."""

import re

import numpy as np
import pytest
from repository import ROOT

from benchmarks import decisions, results, time_model
from pallas_patch_embed.backends import cuda, stored
from pallas_patch_embed.base.chips import B200, H200
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.tune import command

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


def recorded_kernels():
    """Returns the recorded microseconds of every kernel, by problem (shape, images, dtype).

    Problems that were measured before there were cooperative kernels are left out, except those of
    B/32, whose K is too long for these kernels, if the kernels that split K were measured.
    """
    found, is_complete = {}, False
    for record in results.read(ROOT / "benchmarks/h100/configs.jsonl"):
        if record["kind"] == "run":
            is_complete = "; every kernel for" in record["versions"]
        elif is_complete:
            times = {name: time for name, (time, *_) in record["microseconds"].items()}
            key = record["shape"], record["images"], record["dtype"]
            found[key] = found.get(key, {}) | times
    return {
        key: times
        for key, times in found.items()
        if ("_b8_" if key[0] == "B/32 256" else "_cooperative_") in " ".join(times)
    }


def geometric_mean(ratios):
    return np.exp(np.log(ratios).mean())


def test_the_estimate_chooses_kernels_that_were_measured_to_be_fast():
    """docs/experiments/cuda.md says by how much."""
    from_fastest, from_before = {}, []
    for key, times in recorded_kernels().items():
        shape, images, dtype = key
        problem = time_model.problem_of(named_shape(shape), images, dtype)
        prefix = "patch_embed_sm90_"
        chosen = times[cuda.choose_config(problem, 90, H200).name.removeprefix(prefix)]
        before = times[time_model.cuda_config(problem, H200, None).name.removeprefix(prefix)]
        own = [t for name, t in times.items() if name != "jnp.dot + positions"]
        from_fastest[key] = chosen / min(own)
        if images <= 16:
            from_before.append(chosen / before)
    few, many = (
        [x for (_, images, _), x in from_fastest.items() if (images > 32) == is_many]
        for is_many in (False, True)
    )
    assert (len(few), len(many), len(from_before)) == (122, 18, 122)
    assert geometric_mean(few) == pytest.approx(1.010, abs=5e-4)
    assert max([*few, *many]) == from_fastest["Gemma 3/14 896", 64, "bfloat16"]
    assert geometric_mean(from_before) == pytest.approx(0.885, abs=5e-4)
    assert sum(x > 1.01 for x in from_before) == 13 and max(from_before) < 1.125


def test_the_estimate_chooses_kernels_that_are_fast_on_an_H200():
    """Its constants were fitted on an H100 to earlier kernels, so this is not part of the fit."""
    measured = stored.read(decisions.results_of(H200)).results
    ratios = []
    for _, task in command.list_tasks(backends=["cuda"]):
        if result := measured.get(task.key):
            times = {name: time["burst"]["milliseconds"] for name, time in result.times.items()}
            chosen = cuda.choose_config(task.problem, 90, H200).name
            ratios.append(times[chosen] / min(times.values()))
    assert len(ratios) == 186
    assert geometric_mean(ratios) == pytest.approx(1.007, abs=5e-4)
    assert max(ratios) == pytest.approx(1.130, abs=5e-4)


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
