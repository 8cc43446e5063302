"""The benchmark of operands that are parts of larger arrays."""

import json
import sys

import pytest

from benchmarks import slices


@pytest.mark.slow("the operator runs in XLA for every contender")
def test_every_contender_is_compared_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "BACKENDS", ("xla",))
    options = ["--images", "1", "--dtypes", "bfloat16", "--seconds", "0.02", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["slices", *options, "--out", str(tmp_path)])
    slices.main()
    environment, *records = map(json.loads, (tmp_path / "slices.jsonl").read_text().splitlines())
    assert environment["kind"] == "environment"
    assert [record["what"] for record in records] == [
        "whole arrays",
        "scale at element 1",
        "part of a batch",
        "patches at element 256",
        "patches at element 1",
        "lax.map over 4 parts",
    ]
    assert all(record["us"] > 0 for record in records)
