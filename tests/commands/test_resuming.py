"""What `embed` recognizes when it resumes a folder: pictures, changes, moves, earlier versions."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from pallas_patch_embed.commands import cli
from pallas_patch_embed.embed import command, folder, ledger, provenance, sources
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.provenance import CheckpointHash
from pallas_patch_embed.embed.tables import ABOUT
from pallas_patch_embed.embed.units import Entry, Origin, remote_origin
from tests.commands.shard_folders import (
    MODEL,
    assert_same,
    by_id,
    encoded,
    expected,
    opened,
    run,
    shards,
    write_tar,
)
from tests.encoder.goldens import checkpoint


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Makes a folder of three pictures in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("few").mkdir()
    for i in range(3):
        Path("few", f"{i}.png").write_bytes(encoded(i))
    return tmp_path / "few"


def replace(path, i):
    """Replaces a picture by another one of the same size, at a later time."""
    status = os.stat(path)
    Path(path).write_bytes(encoded(i).ljust(status.st_size, b"\0"))
    assert os.stat(path).st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def about(out):
    """Returns what the metadata of each shard of embeddings say, by name."""
    return {
        path.name: json.loads(pyarrow.parquet.read_schema(path).metadata[ABOUT])
        for path in sorted((out / "embeddings").iterdir())
    }


def test_a_picture_is_embedded_once_however_it_is_spelled(few, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(["few"], out) == 0
    (tmp_path / "link").symlink_to("few")
    (tmp_path / "other").mkdir()
    assert run([few, "link", "./few/0.png"], out) == 0
    monkeypatch.chdir(tmp_path / "other")
    assert run(["../few", few], out) == 0
    columns = shards(out)
    assert columns["id"] == [f"few/{i}.png" for i in range(3)]
    assert columns["source"] == [str(few / f"{i}.png") for i in range(3)]
    assert columns["row"] == [""] * 3
    assert columns["size"] == [os.stat(path).st_size for path in columns["source"]]


def test_a_picture_that_changed_is_reported_or_embedded_again(few, tmp_path, capsys):
    out = tmp_path / "out"
    assert run([few], out) == 0
    before = by_id(out)
    replace(few / "1.png", 77)
    assert run([few], out) == 1
    printed = capsys.readouterr()
    assert f"{few / '1.png'} has changed since it was embedded." in printed.err
    assert "1 have changed since they were embedded; --changed embed embeds" in printed.out
    assert_same(by_id(out), before)
    assert run([few], out, changed="embed") == 0
    wanted = before | expected([(str(few / "1.png"), encoded(77))])
    assert_same(by_id(out), wanted)
    assert run([few], out) == 0
    # It is an error if the new contents are no picture, and the old embedding is gone.
    (few / "1.png").write_text("no picture")
    assert run([few], out, changed="embed") == 1
    del wanted[str(few / "1.png")]
    assert_same(by_id(out), wanted)
    assert shards(out, "__errors")["id"] == [str(few / "1.png")]
    (few / "1.png").write_bytes(encoded(5))  # No option is needed, because it has no embedding.
    assert run([few], out) == 0
    assert_same(by_id(out), wanted | expected([(str(few / "1.png"), encoded(5))]))
    assert shards(out, "__errors") == {}


def test_rows_that_a_killed_run_has_replaced_are_removed_by_the_next(few, tmp_path):
    """The run may be killed after any of its writes."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    assert run([few], out) == 0
    replace(few / "1.png", 77)
    shutil.copytree(out, kept)
    assert run([few], out, changed="embed") == 0
    wanted = by_id(out)
    (written,) = {p.name for p in (out / "embeddings").iterdir()} - {"000001.parquet"}
    assert written == "000002.parquet"  # Shard 0 was copied to shard 2, without its second row.
    for names in (["000001"], ["000001", "000002"]):
        again = tmp_path / "again"
        shutil.copytree(kept, again)
        for name in names:
            shutil.copy(out / "embeddings" / f"{name}.parquet", again / "embeddings")
        assert len(shards(again)["id"]) > 3
        assert run([few], again) == 0
        assert_same(by_id(again), wanted)
        shutil.rmtree(again)


def test_pictures_at_urls_are_compared_too(tmp_path):
    fs = fsspec.filesystem("memory")
    for i in range(2):
        fs.pipe_file(f"/changing/{i}.png", encoded(i))
    named, out = [f"memory://changing/{i}.png" for i in range(2)], tmp_path / "out"
    assert run(named, out) == 0
    fs.pipe_file("/changing/1.png", encoded(78))
    # Without the option no server is asked about pictures that are named one by one.
    assert run(named, out) == 0
    assert run(named, out, changed="report") == 1
    assert run(["memory://changing"], out) == 1
    assert run(named, out, changed="embed") == 0
    assert_same(by_id(out), expected([(named[0], encoded(0)), (named[1], encoded(78))]))
    assert run(["memory://changing"], out) == 0


def test_a_signed_url_is_the_same_picture_with_another_signature():
    signed = "https://host/a.png?v=1&X-Amz-Signature={}&X-Amz-Date=2"
    assert {remote_origin(signed.format(i)) for i in range(2)} == {Origin("https://host/a.png?v=1")}
    azure = "https://host/a.png?v=1&sv=2&sig={}"
    assert remote_origin(azure.format(3)).source == "https://host/a.png?v=1"
    # Parameters with these names do not sign a URL by themselves.
    assert remote_origin("https://host/a?st=1").source == "https://host/a?st=1"


def test_members_of_a_tar_that_changed_are_reported(tmp_path):
    out = tmp_path / "out"
    write_tar(tmp_path / "t.tar", {f"{i}.png": encoded(i) for i in range(3)})
    assert run([tmp_path / "t.tar"], out) == 0
    columns = shards(out)
    assert columns["source"] == [str(tmp_path / "t.tar")] * 3
    assert columns["row"] == ["0.png", "1.png", "2.png"]
    os.utime(tmp_path / "t.tar", ns=(0, 0))
    assert run([tmp_path / "t.tar"], out) == 3


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_pictures_may_be_added_to_and_removed_from_a_file(tmp_path, kind):
    path, out = tmp_path / f"x.{kind}", tmp_path / "out"

    def write(ids, time):
        pictures = {id: encoded(ord(id)) for id in ids}
        if kind == "tar":
            write_tar(path, {f"{id}.png": content for id, content in pictures.items()})
        else:
            table = pyarrow.table({"id": list(pictures), "image": list(pictures.values())})
            pyarrow.parquet.write_table(table, path)
        os.utime(path, ns=(time, time))
        return expected(list(pictures.items()))

    write("ab", 1)
    assert run([path], out) == 0
    wanted = write("xab", 2)
    assert run([path], out, changed="embed") == 0
    assert_same(by_id(out), wanted)
    wanted = write("b", 3)
    assert run([path], out, changed="embed") == 0
    np.testing.assert_array_equal(by_id(out)["b"], wanted["b"])
    assert run([path], out) == 0


def test_touching_a_tar_loses_no_embedding(tmp_path):
    """Two pictures have the same id, and the second one is an error."""
    path, out = tmp_path / "t.tar", tmp_path / "out"
    write_tar(path, {"0.jpg": encoded(1, "JPEG"), "0.png": encoded(2)})
    assert run([path], out) == 1
    wanted = by_id(out)
    for time in (1, 2):
        os.utime(path, ns=(time, time))
        assert run([path], out) == 2
        assert_same(by_id(out), wanted)
    assert run([path], out, changed="embed") == 1
    assert_same(by_id(out), wanted)
    assert shards(out, "__errors")["row"] == ["0.png"]


@pytest.mark.parametrize("before, after", [("ab", "xab"), ("abc", "c"), ("abcd", "dbac")])
@pytest.mark.parametrize("written", [1, 2])
def test_a_table_that_is_embedded_again_may_be_interrupted(
    tmp_path, monkeypatch, before, after, written
):
    path, out = tmp_path / "t.parquet", tmp_path / "out"

    def write(ids, time):
        table = pyarrow.table({"id": list(ids), "image": [encoded(ord(id)) for id in ids]})
        pyarrow.parquet.write_table(table, path)
        os.utime(path, ns=(time, time))

    write(before, 1)
    assert run([path], out) == 0
    write(after, 2)
    shard, shards_written = folder.Folder._write_shard, []

    def killed(self, *arguments):
        if len(shards_written) == written:
            raise KeyboardInterrupt
        shards_written.append(shard(self, *arguments))

    monkeypatch.setattr(folder, "SHARD_ROWS", 1)
    monkeypatch.setattr(folder.Folder, "_write_shard", killed)
    with contextlib.suppress(KeyboardInterrupt):
        run([path], out, batch=1, changed="embed")
    monkeypatch.undo()
    assert run([path], out, changed="embed", workers=1) == 0
    wanted = expected([(id, encoded(ord(id))) for id in after])
    found = by_id(out)
    assert_same({id: found[id] for id in after}, wanted)


def test_new_rows_of_a_changed_table_are_reported_with_it(tmp_path):
    path, out = tmp_path / "t.parquet", tmp_path / "out"
    for time, ids in ((1, "ab"), (2, "xab")):
        table = pyarrow.table({"id": list(ids), "image": [encoded(ord(id)) for id in ids]})
        pyarrow.parquet.write_table(table, path)
        os.utime(path, ns=(time, time))
        assert run([path], out) == (0 if time == 1 else 3)
    assert sorted(by_id(out)) == ["a", "b"] and shards(out, "__errors") == {}
    assert run([path], out, changed="embed") == 0 and sorted(by_id(out)) == ["a", "b", "x"]


def test_cells_that_name_files_have_the_version_of_their_table(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/named/0.png", encoded(0))
    cells = pyarrow.array(
        [{"bytes": None, "path": "0.png"}],
        pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}),
    )
    with fs.open("/named/t.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"image": cells}), file)
    for _ in range(2):
        assert run(["memory://named/t.parquet"], tmp_path / "out") == 0


def test_a_picture_keeps_the_id_that_was_typed_first(few, tmp_path):
    assert run(["few"], tmp_path / "out") == 0
    replace(few / "1.png", 77)
    assert run([few], tmp_path / "out", changed="embed") == 0
    assert sorted(by_id(tmp_path / "out")) == [f"few/{i}.png" for i in range(3)]


def test_a_picture_that_did_not_exist_is_tried_when_it_does(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "list.txt").write_text(str(tmp_path / "a.png"))
    assert run([], out, lists=[str(tmp_path / "list.txt")]) == 1
    assert run([], out, lists=[str(tmp_path / "list.txt")]) == 1
    (tmp_path / "a.png").write_bytes(encoded(1))
    assert run([], out, lists=[str(tmp_path / "list.txt")]) == 0
    assert shards(out, "__errors") == {}


def test_a_folder_that_was_moved_is_not_embedded_again(few, tmp_path):
    out = tmp_path / "out"
    assert run(["few"], out) == 0
    wanted = by_id(out)
    few.rename(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    few.symlink_to("new")  # A link at the old place makes no difference.
    moved = [(str(few), "new")]
    with pytest.raises(ValueError, match="the output has no picture of either"):
        run(["new"], out, moved=[("absent", str(tmp_path / "empty"))])
    with pytest.raises(ValueError, match="the second path does not exist"):
        run(["new"], out, moved=[(str(few), "nowhere")])
    assert run(["new"], out, moved=moved) == 0
    for options in (dict(moved=moved), {}):
        assert run(["new"], out, **options) == 0
    assert_same(by_id(out), wanted)
    assert shards(out)["source"] == [str(tmp_path / "new" / f"{i}.png") for i in range(3)]
    # The time of the last change may differ in another place, but not the size.
    (tmp_path / "new" / "0.png").write_bytes(encoded(0) + b"\0")
    assert run(["new"], out) == 1


def test_a_move_may_be_told_after_the_pictures_were_refused(few, tmp_path, monkeypatch):
    """Without --moved the pictures at their new place seem to be others with the same ids."""
    out = tmp_path / "out"
    assert run(["few"], out) == 0
    wanted = by_id(out)
    (tmp_path / "other").mkdir()
    few.rename(tmp_path / "other" / "few")
    monkeypatch.chdir(tmp_path / "other")
    assert run(["few"], out) == 3
    assert run(["few"], out, moved=[(str(few), "few")]) == 0
    assert_same(by_id(out), wanted)
    assert shards(out, "__errors") == {}


def test_a_move_that_was_interrupted_is_completed(few, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for i in range(3):
        assert run([few / f"{i}.png"], out) == 0
    few.rename(tmp_path / "new")
    write, written = folder.Folder._write_shard, []

    def killed(self, *arguments):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(write(self, *arguments))

    monkeypatch.setattr(folder.Folder, "_write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        run(["new"], out, moved=[(str(few), "new")])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(["new"], out) == 0 and len(by_id(out)) == 3
    sources = [str(tmp_path / "new" / f"{i}.png") for i in range(3)]
    assert sorted(shards(out)["source"]) == sources
    assert not (out / "_moved.json").exists()


@pytest.mark.parametrize("options", [dict(overwrite=True), {}], ids=str)
def test_moves_need_earlier_shards(few, tmp_path, options):
    out = tmp_path / "out"
    if options:
        assert run([few], out) == 0
    with pytest.raises(ValueError, match="--moved needs the shards of earlier runs"):
        run([few], out, moved=[("absent", str(few))], **options)
    assert len(list(out.glob("*/*"))) == len(options)


def test_a_folder_may_have_been_moved_into_a_new_one_of_the_same_name(few, tmp_path):
    out = tmp_path / "out"
    assert run(["few"], out) == 0
    few.rename(tmp_path / "old")
    few.mkdir()
    (tmp_path / "old").rename(few / "inner")
    moved = [(str(few), str(few / "inner"))]
    for _ in range(2):
        assert run([few], out, moved=moved) == 0
    assert shards(out)["source"] == [str(few / "inner" / f"{i}.png") for i in range(3)]


def test_a_folder_may_have_been_moved_to_a_url(few, tmp_path):
    assert run([few], tmp_path / "out") == 0
    fs = fsspec.filesystem("memory")
    for i in range(3):
        fs.pipe_file(f"/moved/{i}.png", encoded(i))
    moved = [(str(few), "memory://moved")]
    assert run(["memory://moved"], tmp_path / "out", moved=moved) == 0
    assert len(by_id(tmp_path / "out")) == 3


@pytest.fixture
def same_keys(tmp_path):
    """Makes two tars that count from zero."""
    for i in range(2):
        members = {f"{j:06}.png": encoded(10 * i + j) for j in range(2)}
        write_tar(tmp_path / f"{i}.tar", members)
    return [tmp_path / f"{i}.tar" for i in range(2)]


def test_pictures_with_the_same_id_are_refused_or_told_apart(tmp_path, same_keys):
    out = tmp_path / "out"
    assert run(same_keys, out) == 2
    errors = shards(out, "__errors")
    assert errors["id"] == ["000000", "000001"] and len(by_id(out)) == 2
    assert all("with --repeated-ids both are embedded" in why for why in errors["reason"])
    assert run(same_keys, out) == 2
    assert run(same_keys, out, repeated_ids=True, retry_errors=True) == 0
    assert run(same_keys, out, repeated_ids=True) == 0
    columns = shards(out)
    found = dict(zip(zip(columns["source"], columns["row"]), columns["embedding"]))
    assert sorted(columns["id"]) == ["000000", "000000", "000001", "000001"]
    for i in range(2):
        for j in range(2):
            (wanted,) = expected([("", encoded(10 * i + j))]).values()
            np.testing.assert_array_equal(found[str(same_keys[i]), f"{j:06}.png"], wanted)
    assert run(same_keys, tmp_path / "out.npz", repeated_ids=True) == 0
    with np.load(tmp_path / "out.npz") as file:
        identities = list(zip(file["sources"], file["rows"]))
        np.testing.assert_array_equal(
            file["embeddings"], np.array([found[identity] for identity in identities], np.float32)
        )


def test_one_key_of_two_pictures_in_a_tar_is_told_apart(tmp_path):
    write_tar(tmp_path / "t.tar", {"0.png": encoded(1), "0.jpg": encoded(2, "JPEG")})
    assert run([tmp_path / "t.tar"], tmp_path / "out") == 1
    options = dict(repeated_ids=True, retry_errors=True)
    assert run([tmp_path / "t.tar"], tmp_path / "out", **options) == 0
    assert shards(tmp_path / "out")["row"] == ["0.png", "0.jpg"]


# Exit codes.


def test_earlier_failures_are_counted_with_the_option_that_retries_them(few, tmp_path, capsys):
    (few / "bad.png").write_bytes(encoded(1)[:40])
    out = tmp_path / "out"
    for _ in range(2):
        assert run([few], out) == 1
    assert "Earlier runs could not embed 1; --retry-errors tries them" in capsys.readouterr().out
    assert run([few / "0.png"], out) == 0  # The other picture was not asked for.


@pytest.mark.parametrize("name", ["out", "out.npz"])
def test_nothing_found_is_an_error(tmp_path, name):
    write_tar(tmp_path / "t.tar", {"notes.txt": b"no picture"})
    pyarrow.parquet.write_table(
        pyarrow.table({"image": pyarrow.array([], pyarrow.binary())}), tmp_path / "p.parquet"
    )
    (tmp_path / "empty").mkdir()
    for found in ("t.tar", "p.parquet", "empty"):
        with pytest.raises(ValueError, match="There are no pictures in"):
            run([tmp_path / found], tmp_path / name)
        assert not (tmp_path / name).exists()
    (tmp_path / "empty" / "a.png").write_bytes(encoded(1))
    # An empty source among others is no error.
    assert run([tmp_path / "t.tar", tmp_path / "empty"], tmp_path / name) == 0


@pytest.mark.parametrize(
    "option",
    [
        dict(keep=("txt",)),
        dict(changed="embed"),
        dict(moved=(("a", "b"),)),
        dict(retry_errors=True),
    ],
    ids=str,
)
def test_options_that_need_shards_are_refused_for_an_npz(few, tmp_path, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"folder: --{name.replace('_', '-')} needs shards"):
        run([few], tmp_path / "out.npz", **option)


def test_pictures_that_need_a_plugin_are_counted_and_the_plugin_is_named(
    few, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "missing_plugin", {".heic": "install it"}.get)
    monkeypatch.setattr(sources, "extensions", lambda: {".png"})
    for name in ("a.heic", "b.HEIC", "c.txt"):
        (few / name).write_bytes(b"")
    assert run([few], tmp_path / "out", quiet=True) == 2
    assert capsys.readouterr().err == "To read 2 .heic pictures, install it.\n"
    assert run([few], tmp_path / "out") == 2
    assert "Left out 3 files with other extensions: 2 .heic, 1 .txt." in capsys.readouterr().err
    for path in few.glob("*.png"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"no pictures in .*\nTo read 2 \.heic pictures, install it"
    ):
        run([few], tmp_path / "new")


def test_the_help_is_short(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.parse(["pallas-patch-embed", "embed", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 60


def test_other_kept_columns_are_refused_in_words(tmp_path):
    write_tar(tmp_path / "t.tar", {"0.png": encoded(0), "0.txt": b"a", "0.json": b"{}"})
    assert run([tmp_path / "t.tar"], tmp_path / "out", keep=("txt",)) == 0
    for keep in ((), ("json",), ("txt", "json")):
        with pytest.raises(ValueError, match=r"keep was \['txt'\] and is now \["):
            run([tmp_path / "t.tar"], tmp_path / "out", keep=keep)
    assert shards(tmp_path / "out")["txt"] == ["a"]


def test_every_picture_of_earlier_runs_is_known_on_a_cluster():
    """One of 256 keys ends in a zero byte, which numpy does not store."""
    entries = [Entry(f"{i}.png", Origin(f"/pictures/{i}.png")) for i in range(4000)]
    done = ledger.Ledger()
    done.written(entries, 1, failed=False)
    snapshot = done.snapshot()
    assert {snapshot.state(entry) for entry in entries} == {ledger.State.DONE}
    assert snapshot.state(Entry("x", Origin("/pictures/x.png"))) is ledger.State.NEW


# Earlier versions, and the records of this one.


def earlier_folder(out, few, model):
    """Writes the folder that version 1 of the format had: two pictures and an error."""
    hashed = hashlib.sha256()
    for path in sorted([*model.glob("*.json"), *model.glob("*.safetensors")]):
        hashed.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    settings = {
        "checkpoint_sha256": hashed.hexdigest(),
        "preprocessing": "224 x 224 pixels, bicubic",
        "patch_dtype": "bfloat16",
        "normalize": False,
        "embedding_dtype": "float32",
    }
    manifest = {"format": "pallas_patch_embed.embed.1", "settings": settings, "width": 96}
    manifest["versions"] = provenance.versions() | {"jax": "0.11.2"}
    for part in ("embeddings", "errors"):
        (out / part).mkdir(parents=True)
    (out / "manifest.json").write_text(json.dumps(manifest))
    ids = [str(few / f"{i}.png") for i in range(2)]
    rows = np.array(list(expected([(id, encoded(i)) for i, id in enumerate(ids)]).values()))
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.ravel()), 96)
    table = pyarrow.table({"id": ids, "embedding": lists})
    pyarrow.parquet.write_table(table, out / "embeddings" / "000000.parquet")
    bad = pyarrow.table({"id": [str(few / "bad.png")], "reason": ["it is damaged"]})
    pyarrow.parquet.write_table(bad, out / "errors" / "000000.parquet")
    return manifest


def test_a_manifest_of_somebody_else_stays(few, tmp_path):
    out = tmp_path / "out"
    for options in ({}, {}, dict(overwrite=True)):
        assert run([few], out, **options) == 0
        for content in ('{"format": "other"}', "no JSON"):
            (out / "manifest.json").write_text(content)
            (out / "errors").mkdir(exist_ok=True)
            (out / "errors" / "000000.parquet").write_text("precious")
            assert run([few], out, **options) == 0
            assert (out / "manifest.json").read_text() == content
            assert (out / "errors" / "000000.parquet").read_text() == "precious"


def run_with(model, arguments, out, **options):
    return command.run(model, arguments, out, options=Options(batch=4, workers=1, **options))


@pytest.fixture
def model(tmp_path):
    shutil.copytree(checkpoint(MODEL), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("added", [(), ("tokenizer.json", "special_tokens_map.json")], ids=len)
def test_a_folder_of_an_earlier_version_is_resumed(few, tmp_path, model, capsys, added):
    (few / "bad.png").write_text("no picture")
    out = tmp_path / "out"
    (model / "generation_config.json").write_text("{}")
    manifest = earlier_folder(out, few, model)
    for name in added:
        (model / name).write_text("{}")
    assert run_with(model, [few], out) == 1
    assert "Embedded 1 of 4 pictures" in capsys.readouterr().out
    assert_same(by_id(out), expected([(str(few / f"{i}.png"), encoded(i)) for i in range(3)]))
    assert shards(out, "__errors")["id"] == [str(few / "bad.png")]
    assert not (out / "manifest.json").exists() and not list(out.glob("errors/*"))
    versions = [each["versions"] for each in about(out).values()]
    assert manifest["versions"] in versions and provenance.versions() in versions
    assert run_with(model, [few], out) == 1
    assert pyarrow.dataset.dataset(out).count_rows() == 3
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(ValueError, match="checkpoint_sha256 was"):
        run_with(model, [few], out)


@pytest.mark.parametrize("repeated", [False, True])
def test_ids_of_an_earlier_version_stand_for_one_picture_each(tmp_path, model, same_keys, repeated):
    out = tmp_path / "out"
    earlier_folder(out, tmp_path, model)
    for part, column, value in (("embeddings", None, None), ("errors", "reason", "same id")):
        path = out / part / "000000.parquet"
        if column is None:
            table = pyarrow.parquet.read_table(path)
            table = table.set_column(0, "id", [["000000", "000001"]])
        else:
            table = pyarrow.table({"id": ["000000", "000001"], column: [value] * 2})
        pyarrow.parquet.write_table(table, path)
    before = by_id(out)
    assert run_with(model, same_keys, out, repeated_ids=repeated) == (0 if repeated else 2)
    columns = shards(out)
    found = dict(zip(columns["id"], columns["embedding"]))
    assert len(columns["id"]) == (4 if repeated else 2) and found.keys() == before.keys()
    for id, source, embedding in zip(columns["id"], columns["source"], columns["embedding"]):
        if source is None:
            np.testing.assert_array_equal(embedding, before[id])
        else:
            assert source == str(same_keys[1])
    assert run_with(model, same_keys, out, repeated_ids=repeated) == (0 if repeated else 2)
    assert len(shards(out)["id"]) == len(columns["id"])


def test_tables_of_an_earlier_version_may_have_been_moved(tmp_path, model):
    out = tmp_path / "out"
    earlier_folder(out, tmp_path, model)
    ids = [f"{tmp_path}/old/p.parquet#{i}" for i in range(2)]
    path = out / "embeddings" / "000000.parquet"
    table = pyarrow.parquet.read_table(path).set_column(0, "id", [ids])
    pyarrow.parquet.write_table(table, path)
    (tmp_path / "new").mkdir()
    images = pyarrow.table({"image": [encoded(0), encoded(1)]})
    pyarrow.parquet.write_table(images, tmp_path / "new" / "p.parquet")
    moved = [(str(tmp_path / "old"), str(tmp_path / "new"))]
    assert run_with(model, [tmp_path / "new"], out, moved=moved) == 0
    assert shards(out)["row"] == ["0", "1"]


def test_a_tokenizer_beside_the_checkpoint_changes_nothing(few, tmp_path, model):
    assert run_with(model, [few], tmp_path / "out") == 0
    (model / "tokenizer.json").write_text("{}")
    assert run_with(model, [few], tmp_path / "out") == 0
    before = CheckpointHash(model).sha256
    (model / "preprocessor_config.json").write_text("{}")
    assert CheckpointHash(model).sha256 != before


def test_the_config_beside_a_checkpoint_that_is_a_file_counts(few, tmp_path, model):
    """The hash of earlier versions, which was that of the file alone, is still recognised."""
    file, out = model / "model.safetensors", tmp_path / "out"
    assert run_with(file, [few], out) == 0
    manifest = json.loads((out / "_manifest.json").read_text())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    earlier = hashlib.sha256(f"{file.name} {digest}\n".encode()).hexdigest()
    manifest["settings"]["checkpoint_sha256"] = earlier
    (model / "tokenizer.json").write_text("{}")
    assert run_with(file, [few], out) == 0
    (model / "preprocessor_config.json").write_text('{"image_mean": 0.25}')
    with pytest.raises(ValueError, match="checkpoint_sha256 was"):
        run_with(file, [few], out)
    (out / "_manifest.json").write_text(json.dumps(manifest))
    assert run_with(file, [few], out) == 0


def test_embeddings_of_another_arithmetic_are_not_mixed(few, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run([few], out, patch_dtype="int8") == 0
    version = command.ARITHMETIC["int8"]
    monkeypatch.setitem(command.ARITHMETIC, "int8", version + 1)
    with pytest.raises(ValueError, match="computes other embeddings with weights in int8"):
        run([few], out, patch_dtype="int8")
    assert run([few], out, patch_dtype="int8", overwrite=True) == 0


@pytest.mark.parametrize("patch_dtype", ["int8", "float8_e4m3fn"])
def test_weights_that_were_rounded_to_nearest_are_not_mixed_with_those_of_today(
    few, tmp_path, model, patch_dtype
):
    out = tmp_path / "out"
    manifest = earlier_folder(out, few, model)
    manifest["settings"]["patch_dtype"] = patch_dtype
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=f"computes other embeddings with weights in {patch_dtype}"
    ):
        run_with(model, [few], out, patch_dtype=patch_dtype)
    assert json.loads((out / "manifest.json").read_text()) == manifest


def test_every_shard_says_what_wrote_it(few, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run([few / "0.png"], out) == 0
    earlier = provenance.versions()
    now = earlier | {"jax": "99.0"}
    monkeypatch.setattr(provenance, "versions", lambda: now)
    assert run([few], out, workers=1, batch=2) == 0
    assert f"jax was '{earlier['jax']}' and is now '99.0'" in capsys.readouterr().err
    first, second = about(out).values()
    assert (first["versions"], second["versions"]) == (earlier, now)
    assert first["model"] == second["model"] == str(checkpoint(MODEL))
    assert first["settings"]["checkpoint_sha256"] == CheckpointHash(checkpoint(MODEL)).sha256
    assert first["options"]["batch"] == 4 and second["options"]["batch"] == 2
    assert first["options"].keys() == {field.name for field in dataclasses.fields(Options)}
    assert json.loads((out / "_manifest.json").read_text())["options"] == first["options"]


def test_options_that_change_no_embedding_do_not_keep_a_run_from_resuming(few, tmp_path):
    out = tmp_path / "out"
    assert run([few / "0.png"], out) == 0
    harmless = dict(workers=1, quiet=True, batch=2, max_bytes=10**6, max_pixels=10**6)
    harmless |= dict(repeated_ids=True, allow_truncated=True, id_column="id", changed="report")
    assert run([few], out, **harmless) == 0 and len(by_id(out)) == 3


def test_the_folder_is_a_dataset_of_its_embeddings(few, tmp_path):
    (few / "bad.png").write_text("no picture")
    assert run([few], tmp_path / "out") == 1
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert sorted(table["id"].to_pylist()) == [str(few / f"{i}.png") for i in range(3)]


def test_ids_stay_unique_over_runs(tmp_path):
    """Two folders may have pictures with the same relative path."""
    with opened(tmp_path / "out") as out:
        assert out.ledger.take_id(Entry("a", Origin("/one/a")))
        out.add([Entry("a", Origin("/one/a"))], np.ones((1, 4), np.float32))
        out.flush()
    with opened(tmp_path / "out") as out:
        assert not out.ledger.take_id(Entry("a", Origin("/two/a")))
        assert out.ledger.take_id(Entry("b"))
    with opened(tmp_path / "out", repeated_ids=True) as out:
        assert out.ledger.take_id(Entry("a"))
