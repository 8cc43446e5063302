"""The benchmark of `embed`: the pictures that it writes, and the throughput that it computes."""

import argparse
import io
import itertools
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import embed_runs, embedding, embedding_memory, picture_files, searching
from pallas_patch_embed.siglip2 import Config

pyarrow_parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(picture_files, "GROUP", 3)


def test_every_form_has_the_same_pictures(tmp_path):
    facts = picture_files.write(7, 4, tmp_path, embedding.FORMS)
    made = [picture_files.picture(i % 4) for i in range(7)]
    assert len(set(made)) == 4 and facts["distinct"] == 4
    assert Image.open(io.BytesIO(made[0])).size == (500, 375)
    names = [f"{i:07d}" for i in range(7)]
    files = {path.stem: path.read_bytes() for path in (tmp_path / "jpeg").iterdir()}
    assert files == dict(zip(names, made))
    members = {}
    for path in (tmp_path / "tar").iterdir():
        with tarfile.open(path) as tar:
            members |= {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    assert members == {f"{name}.jpg": content for name, content in zip(names, made)}
    rows = {}
    for path in (tmp_path / "parquet").iterdir():
        table = pyarrow_parquet.read_table(path)
        rows |= dict(zip(table["id"].to_pylist(), table["image"].to_pylist()))
    assert rows == dict(zip(names, made))


@pytest.mark.parametrize("form", ["jpeg", "tar", "parquet"])
def test_processes_share_all_pictures(form, tmp_path):
    picture_files.write(7, 4, tmp_path, [form])
    (whole,) = picture_files.inputs(tmp_path, form, 1)
    parts = picture_files.inputs(tmp_path, form, 2)
    if form == "jpeg":
        assert whole == [str(tmp_path / "jpeg")]
        files = [Path(path).read_text().split() for _, path in parts]
        assert sorted(itertools.chain(*files)) == sorted(map(str, (tmp_path / "jpeg").iterdir()))
    else:
        assert sorted(itertools.chain(*parts)) == whole and all(parts)


def test_the_rate_is_that_between_the_first_and_the_last_whole_shard():
    assert embed_runs.steady([(10.0, 4096), (12.0, 4096), (14.0, 4096), (14.1, 100)]) == (
        10.0,
        14.0,
        2048.0,
    )
    assert embed_runs.steady([(10.0, 4096), (11.0, 4096)]) == (10.0, 11.0, 4096.0)
    assert embed_runs.steady([(10.0, 4096), (10.5, 100)]) is None
    assert embed_runs.steady([]) is None


def test_the_time_of_this_process_grows():
    before = embed_runs.cpu_seconds(os.getpid())
    while embed_runs.cpu_seconds(os.getpid()) < before + 0.02:
        sum(range(10000))


def test_an_id_that_is_there_twice_is_an_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.array([[1.0, 2.0]], pyarrow.list_(pyarrow.float32(), 2))
    (tmp_path / "embeddings").mkdir()
    for name in "ab":
        table = pyarrow.table({"id": ["x"], "embedding": rows})
        pyarrow_parquet.write_table(table, tmp_path / "embeddings" / f"{name}.parquet")
        if name == "a":
            np.testing.assert_array_equal(embed_runs.embeddings([tmp_path])["x"], [1, 2])
    with pytest.raises(RuntimeError, match="x occurs twice"):
        embed_runs.embeddings([tmp_path])


@pytest.mark.slow("runs the command six times")
def test_all_forms_are_embedded_and_a_killed_run_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny = {"tiny": Config(32, 1, 2, 64, 8, (4, 4), image_size=(32, 32))}
    chosen = argparse.Namespace(
        encoders=["tiny"],
        pictures=[20],
        distinct=5,
        forms=list(embedding.FORMS),
        gpus=["one"],
        seconds=0.05,
    )
    found = list(embedding.measure(chosen, tiny, tmp_path))
    runs = [r for r in found if isinstance(r, embed_runs.EmbedRun)]
    assert [r.form for r in runs] == ["jpeg", "tar", "parquet"]
    assert all(r.pictures == 20 and r.rate > 0 and r.busy is None for r in runs)
    records = {r["kind"]: r for r in found if isinstance(r, dict)}
    assert records["resumed"]["equal"] == 20
    assert records["arrays"]["rate"] > 0 and records["decoder"]["rate"] > 0


@pytest.mark.exhaustive("runs the command seven times")
def test_the_peak_of_memory_is_measured_for_every_source(tmp_path, capsys):
    tiny = Config(32, 1, 2, 64, 8, (4, 4), image_size=(32, 32))
    chosen = argparse.Namespace(pictures=2, workers=[1])
    embedding_memory.measure(chosen, tiny, tmp_path)
    _, _, *lines = capsys.readouterr().out.splitlines()
    peaks = {line.split(" | ")[0].strip("| "): float(line.split()[-2]) for line in lines}
    assert list(peaks) == ["small pictures alone", *embedding_memory.SOURCES]
    assert all(peak > 100 for peak in peaks.values())


def test_the_time_of_a_search_is_measured(tmp_path, capsys):
    chosen = argparse.Namespace(rows=5000, width=8, dtypes=["float16", "float32"], searches=2)
    searching.measure(chosen, tmp_path)
    _, _, *lines, _, peak = capsys.readouterr().out.splitlines()
    found = {line.split()[1]: list(map(float, line.split()[3:8:2])) for line in lines}
    assert list(found) == chosen.dtypes
    assert all(number > 0 for row in found.values() for number in row)
    assert float(peak.split()[-2]) > 0.1
