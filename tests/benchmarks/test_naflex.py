"""The benchmark of packed NaFlex pictures: its mixes, and a small run on the CPU."""

import json
import math
import sys

import pytest

import pallas_patch_embed as ppe
from benchmarks import naflex
from tests.encoder.goldens import checkpoint

# The smallest part of the tokens of rows that may be patches, on a folder of mixed sizes.
LEAST_FILL = 0.94


@pytest.mark.parametrize("most", naflex.PATCHES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_folder_of_each_mix_fills_the_rows(most, kept):
    for mix in naflex.MIXES:
        drawn = naflex.grids(mix, naflex.FOLDER, most, kept)
        assert max(map(math.prod, drawn)) <= most
        batch, rows = naflex.fills(drawn, most)
        assert LEAST_FILL <= rows <= 1 and batch <= rows


def test_only_pictures_that_are_not_enlarged_leave_a_batch_half_empty():
    for most in naflex.PATCHES:
        enlarged, kept = (
            naflex.fills(naflex.grids("panoramas and icons", naflex.FOLDER, most, kept), most)[0]
            for kept in (False, True)
        )
        assert enlarged > 0.97 and kept < 0.7


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Makes the benchmark measure a tiny encoder."""
    encoder = ppe.siglip2.load_encoder(checkpoint("hf_siglip2_naflex_p16"), dtype="bfloat16")
    monkeypatch.setattr(naflex, "draw", lambda dtype: encoder)
    options = ["--patches", "16", "--tokens", "160", "--rest", "0", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["naflex", *options, "--out", str(tmp_path)])
    return tmp_path / "naflex.jsonl"


@pytest.mark.slow("compiles ten programs")
def test_packed_and_padded_pictures_are_compared_and_timed(tiny, capsys):
    naflex.main()
    environment, *records = map(json.loads, tiny.read_text().splitlines())
    assert environment["kind"] == "environment"
    rates = [record for record in records if record["kind"] == "rates"]
    assert [(r["mix"], r["kept"]) for r in rates] == [
        ("photographs", False),
        ("photographs", True),
        ("panoramas and icons", False),
        ("panoramas and icons", True),
        ("all equal", False),
    ]
    assert len(records) == 2 * len(rates) == len(capsys.readouterr().out.splitlines()) - 1
    for record in rates:
        assert record["pictures"] == 10 and record["rows"] == [2, 128]
        for regime in ("burst", "sustained"):
            found = record[regime]
            assert found["packed / padded"] == found["packed"] / found["padded"] > 0
    assert rates[-1]["wanted"] == 0.97 and rates[-1]["fill of the batch"] == 1
    assert rates[-1]["fill of the rows"] == 160 / 256


def test_other_outputs_of_packed_pictures_end_the_benchmark(tiny, monkeypatch):
    pack = naflex.pack_naflex
    monkeypatch.setattr(naflex, "pack_naflex", lambda pictures, *rest: pack(pictures[::-1], *rest))
    with pytest.raises(RuntimeError, match="packed and padded pictures differ by"):
        naflex.main()
