"""The comparison of two versions of the repository, which take turns."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import two_trees
from benchmarks.two_trees import Comparison, Row

ROW = Row("patches", "xla", "int8", "B/16 224", 2)


def comparison(before, after):
    return Comparison(ROW, "burst", {"before": before, "after": after}, True)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.0, 1.0], [1.009, 1.009, 1.009], "same"),
        ([1.0, 1.0, 1.0], [1.02, 1.02, 1.02], "slower"),
        ([1.0, 1.0, 1.0], [0.97, 0.97, 0.97], "faster"),
        ([1.0, 1.03, 1.0], [1.02, 1.02, 1.02], "same"),
        ([1.0, 1.0, 1.0], [1.05, 1.0, 1.03], "same"),
    ],
)
def test_a_row_differs_by_more_than_a_hundredth_and_the_spread(before, after, verdict):
    found = comparison(before, after)
    assert found.verdict == verdict
    assert verdict in str(found)
    assert json.loads(json.dumps(found.record()))["verdict"] == verdict


def test_every_row_of_the_tables_is_planned_once():
    plan = two_trees.plan(4736, [1, 64], {"B/16 224": 512})
    assert len(plan) == len(set(plan))
    for what in ("patches", "images"):
        for regime in ("burst", "sustained"):
            assert (Row(what, "cuda", "int8", "B/16 224", 4736), regime) in plan
    assert (Row("patches", "cuda", "float8_e4m3fn", "B/16 224", 64), "cold") in plan
    assert (Row("encoder", "cuda", "bfloat16", "B/16 224", 512), "sustained") in plan


def test_rows_of_an_earlier_run_are_recognised(tmp_path):
    path = tmp_path / "two_trees.jsonl"
    records = [comparison([1.0], [1.0]).record(), {"kind": "note", "text": "compiled"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert two_trees.recorded(path) == {(ROW, "burst")}


def test_a_folder_without_the_package_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["two_trees", str(tmp_path)])
    with pytest.raises(SystemExit):
        two_trees.main()
    assert f"{tmp_path} does not contain pallas_patch_embed" in capsys.readouterr().err


@pytest.mark.slow("two processes that import JAX")
def test_both_versions_are_measured_and_what_fails_is_told(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    tree = Path(__file__).resolve().parents[2]
    refused = Row("patches", "mosaic_sm90", "int8", "B/16 224", 2)
    plan = [(ROW, "burst"), (refused, "burst"), (ROW, "cold"), (ROW, "call")]
    monkeypatch.setattr(two_trees, "OUT_OF_CACHE", 2**20)
    every = list(two_trees.compare((tree, tree), plan, rounds=2, rest=0, seconds=0.01))
    found = [c for c in every if isinstance(c, Comparison)]
    assert [(c.row, c.regime) for c in found] == [(ROW, r) for r in ("burst", "cold", "call")]
    assert all(c.same_bits for c in found)
    assert all(len(t) == 2 and min(t) > 0 for c in found for t in c.turns.values())
    (told,) = (text for text in every if isinstance(text, str) and "without" in text)
    assert str(refused) in told and "NotImplementedError" in told
