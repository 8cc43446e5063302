"""The package's decisions are those of the results in benchmarks/."""

import json

import pytest

from benchmarks import decisions
from pallas_patch_embed.backends import stored
from pallas_patch_embed.base.chips import H100, H200, Target
from pallas_patch_embed.commands.tune import command


@pytest.mark.parametrize("chip", [H100, H200], ids=lambda chip: chip.name)
def test_the_package_has_the_decisions_of_the_results(chip, tmp_path):
    measured = stored.read(decisions.results_of(chip))
    stored.write_decisions(tmp_path / "decisions.json", measured)
    shipped = stored.path_of(chip)
    assert (tmp_path / "decisions.json").read_bytes() == shipped.read_bytes()
    assert len(shipped.read_bytes()) < 2**16
    found = stored.read(shipped)
    assert len(found.decisions) == len(measured.results) > 600 and not found.results
    compared = 0
    for _, task in command.list_tasks():
        decision = measured.decision(task.backend, task.problem)
        # The package has no times, so its files do not rank the backends.
        kept = decision and decision._replace(times={})
        assert found.decision(task.backend, task.problem) == kept
        compared += decision is not None
    assert compared > 600


def test_a_decision_says_where_a_config_comes_from():
    files = stored.applicable(Target("cuda", H200))
    origins = {
        stored.find(task.backend, task.problem, files).origin for _, task in command.list_tasks()
    }
    assert any(origin.startswith("from the heuristic, tuned on 2026") for origin in origins)
    assert any(origin.startswith("tuned on 2026") for origin in origins)


DAMAGED = {
    "no configs": lambda content: content.pop("configs"),
    "configs that are no objects": lambda content: content.update(configs=[3] * 99),
    "an index beyond the configs": lambda content: content["decisions"][0].__setitem__(-1, 999),
    "no date": lambda content: content["decisions"][0].__setitem__(-2, None),
    "an empty row": lambda content: content["decisions"].append([]),
    "a row that is no list": lambda content: content["decisions"].append(7),
    "an object in a row": lambda content: content["decisions"][0].__setitem__(3, {}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_decisions_are_refused(case, tmp_path):
    content = json.loads(stored.path_of(H200).read_text())
    DAMAGED[case](content)
    path = tmp_path / "decisions.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not a valid file of measured configs"):
        stored.read(path)
