"""`embed` into a folder of shards: output, resumed runs, and inputs."""

import gzip
import importlib.metadata
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any, ClassVar

import fsspec
import numpy as np
import PIL
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import pallas_patch_embed as ppe
from pallas_patch_embed.base import ending
from pallas_patch_embed.base.files import new_partial, written_atomically
from pallas_patch_embed.embed import (
    Embedder,
    embedder,
    exclusive,
    folder,
    ids,
    npz,
    output,
    parquet,
    place,
    provenance,
    sources,
    tars,
    units,
)
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.units import Entry
from tests.commands.shard_folders import (
    COMMAND,
    MODEL,
    assert_same,
    by_id,
    encoded,
    expected,
    is_done,
    opened,
    run,
    shards,
    write_tar,
)
from tests.encoder.goldens import checkpoint


@pytest.fixture
def pictures(tmp_path):
    """Makes a folder of 23 pictures and one file that is not a picture."""
    photographs = tmp_path / "pictures"
    photographs.mkdir()
    for i in range(23):
        (photographs / f"{i:02}.png").write_bytes(encoded(i))
    (photographs / "bad.png").write_text("no picture")
    return photographs


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(folder, "SHARD_ROWS", 8)
    monkeypatch.setattr(ending.state, "outcome", ending.state.outcome)


def test_a_folder_has_whole_shards_of_embeddings_and_of_errors(tmp_path, pictures):
    out = tmp_path / "out"
    assert run([pictures], out) == 1
    files = [(str(pictures / f"{i:02}.png"), encoded(i)) for i in range(23)]
    assert_same(by_id(out), expected(files))
    # Shards of both kinds are numbered in the order in which they are written.
    names = sorted(path.name for path in out.glob("*/*"))
    assert names == [f"{number:06}.parquet" for number in range(4)]
    assert len(list((out / "embeddings").iterdir())) == 3
    errors = shards(out, "__errors")
    assert errors["id"] == [str(pictures / "bad.png")] and "not a picture" in errors["reason"][0]
    schema = pyarrow.parquet.read_schema(out / "embeddings" / "000000.parquet")
    assert schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 96)
    manifest = json.loads((out / "_manifest.json").read_text())
    assert manifest["width"] == 96 and manifest["settings"]["patch_dtype"] == "bfloat16"


def test_a_run_goes_on_with_what_is_not_in_shards(tmp_path, pictures, monkeypatch):
    out, embed = tmp_path / "out", Embedder.start
    assert run([pictures], out) == 1
    wanted = by_id(out)
    (out / "embeddings" / "000001.parquet").unlink()
    computed = []

    def counting(self, images, whole):
        computed.append(len(images))
        return embed(self, images, whole)

    monkeypatch.setattr(embedder.Embedder, "start", counting)
    assert run([pictures], out) == 1  # The bad picture is in a shard of errors.
    assert sum(computed) == 8
    assert_same(by_id(out), wanted)
    assert run([pictures], out) == 1 and sum(computed) == 8


def test_errors_are_tried_again_if_asked_for(tmp_path, pictures):
    out = tmp_path / "out"
    assert run([pictures], out) == 1
    good = encoded(99)
    (pictures / "bad.png").write_bytes(b"bad".ljust(len(good)))
    assert run([pictures], out) == 1  # It has changed, so it is tried again.
    status = (pictures / "bad.png").stat()
    (pictures / "bad.png").write_bytes(good)
    os.utime(pictures / "bad.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run([pictures], out) == 1 and len(by_id(out)) == 23
    assert run([pictures], out, retry_errors=True) == 0 and len(by_id(out)) == 24
    assert shards(out, "__errors") == {}


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(normalize=True), "normalize was False and is now True"),
        (dict(patch_dtype="int8"), "patch_dtype was 'bfloat16' and is now 'int8'"),
        (dict(embedding_dtype="float16"), "embedding_dtype"),
        (dict(size=112), "preprocessing was '224 x 224"),
    ],
)
def test_other_settings_are_refused_before_anything_is_written(tmp_path, pictures, change, text):
    out = tmp_path / "out"
    run([pictures], out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*") if path.is_file()}
    with pytest.raises(ValueError, match=text):
        run([pictures], out, **change)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.*") if path.is_file()}
    assert before == after
    assert run([pictures], out, overwrite=True, **change) == 1
    assert len(by_id(out)) == 23


def test_two_runs_at_once_into_one_folder_are_refused(tmp_path, pictures):
    out = tmp_path / "out"
    first = opened(out)
    with pytest.raises(ValueError, match="another run is writing there"):
        opened(out)
    with first:
        pass
    with opened(out):
        pass


@pytest.fixture
def quick_leases(monkeypatch):
    """Makes leases void after a fifth of a second."""
    monkeypatch.setattr(exclusive, "VOID", 0.2)
    monkeypatch.setattr(exclusive, "RENEWED", 0.05)


class WithoutCreate(MemoryFileSystem):
    """A file system without exclusive creation: writing a file replaces an existing one."""

    protocol = "overwriting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def pipe_file(self, path, value):
        super().pipe_file(path, value)


@pytest.mark.parametrize("protocol", ["memory", "overwriting"])
def test_a_lease_is_for_one_run_and_ends_with_it(quick_leases, protocol):
    fsspec.register_implementation("overwriting", WithoutCreate, clobber=True)
    url = f"{protocol}://lease"
    with opened(url):
        with pytest.raises(exclusive.BusyError, match="another run is writing there"):
            opened(url)
    fs, root = fsspec.url_to_fs(url)
    for ago in (0, 10**6):
        left = {"run": "killed", "host": "elsewhere", "time": time.time() - ago}
        fs.pipe_file(f"{root}/.lease.json", json.dumps(left).encode())
        with opened(url):
            pass
    fs.pipe_file(f"{root}/.lease.json", b"no JSON")
    with opened(url):
        pass
    assert not fs.exists(f"{root}/.lease.json")


def test_a_run_whose_lease_was_taken_writes_nothing_more(quick_leases):
    fs, root = fsspec.url_to_fs("memory://taken")
    with opened("memory://taken") as first:
        first.add([Entry("a")], np.ones((1, 4), np.float32))
        first.flush()
        other = json.dumps({"run": "other", "host": "elsewhere", "time": time.time()})
        fs.pipe_file(f"{root}/.lease.json", other.encode())
        first._hold._thread.join()  # The thread ends when it finds the name of the other run.
        first.add([Entry("b")], np.ones((1, 4), np.float32))
        with pytest.raises(
            output.UnfinishedError, match=r"another run \(on elsewhere\) has taken over"
        ):
            first.flush()
    assert shards("memory://taken")["id"] == ["a"]
    assert fs.cat_file(f"{root}/.lease.json") == other.encode()


def test_a_paused_run_looks_at_its_lease_before_it_writes(monkeypatch):
    """SIGSTOP or a suspended machine pauses a run, so that the thread does not renew the lease."""
    fs, root = fsspec.url_to_fs("memory://paused")
    with opened("memory://paused") as first:
        other = json.dumps({"run": "other", "host": "elsewhere", "time": time.time()})
        fs.pipe_file(f"{root}/.lease.json", other.encode())
        first._hold._renewed -= exclusive.VOID
        with pytest.raises(output.UnfinishedError, match="has taken over"):
            first.commit("embeddings", "absent")


@pytest.mark.parametrize("url", ["{tmp}/out", "memory://unfinished"])
def test_what_a_killed_run_was_writing_is_removed(tmp_path, url):
    url = url.format(tmp=tmp_path)
    fs, root = fsspec.url_to_fs(url)
    with opened(url) as first:
        first.add([Entry("a")], np.ones((1, 4), np.float32))
        first.flush()
    left = [f"{root}/{part}{new_partial()}" for part in ("", "embeddings/", "__errors/")]
    others = [f"{root}/.partial", f"{root}/embeddings/.{'0' * 31}.partial"]
    for path in left + others:
        fs.pipe_file(path, b"PAR1")
    with opened(url) as second:
        assert is_done(second, "a")
    assert [fs.exists(path) for path in left + others] == 3 * [False] + 2 * [True]


@pytest.mark.parametrize("removals", [1, 2, 3])
def test_overwriting_that_is_killed_can_be_run_again(tmp_path, pictures, monkeypatch, removals):
    run([pictures], tmp_path / "out")
    remove, removed = place.Local.remove, []

    def killed(self, names):
        remove(self, names)
        removed.append(names)
        if len(removed) == removals:
            raise KeyboardInterrupt

    monkeypatch.setattr(place.Local, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        run([pictures], tmp_path / "out", overwrite=True, normalize=True)
    monkeypatch.undo()
    run([pictures], tmp_path / "out", overwrite=True, normalize=True)
    assert len(by_id(tmp_path / "out")) == 23


@pytest.mark.parametrize("name", ["notes.txt", "_manifest.json"])
def test_a_folder_of_something_else_is_refused(tmp_path, pictures, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(ValueError, match=r"did not write"):
        run([pictures], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_disk_that_is_full_says_how_to_go_on(tmp_path, pictures, monkeypatch):
    out, written = tmp_path / "out", []

    def full(path, **options):
        written.append(path)
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        return written_atomically(path, **options)

    monkeypatch.setattr(place, "written_atomically", full)
    with pytest.raises(output.UnfinishedError, match=r"No space left.*run the same command again"):
        run([pictures], out)
    monkeypatch.undo()
    rows = len(by_id(out))
    assert 0 < rows < 23
    run([pictures], out)
    assert len(by_id(out)) == 23


def full_in(folders, monkeypatch):
    """Makes writing fail for every .npz file whose path contains one of `folders`."""

    def written(path):
        if any(folder in str(path) for folder in folders):
            raise OSError(28, "No space left on device")
        return written_atomically(path)

    monkeypatch.setattr(npz, "written_atomically", written)


def test_an_npz_has_the_failures_and_the_settings(tmp_path, pictures):
    out = tmp_path / "out.npz"
    assert run([pictures], out, embedding_dtype="float16", patch_dtype="int8") == 1
    with np.load(out) as file:
        assert file["embeddings"].dtype == np.float16 and file["embeddings"].shape == (23, 96)
        assert list(file["paths"]) == [str(pictures / f"{i:02}.png") for i in range(23)]
        assert list(file["failed"]) == [str(pictures / "bad.png")]
        assert list(file["reasons"]) == ["it is not a picture in a format that Pillow reads"]
        about = json.loads(str(file["about"]))
    versions = about.pop("versions")
    assert versions["pallas_patch_embed"] == ppe.__version__ and versions["jax"]
    assert about["model"] == str(checkpoint(MODEL)) and about["options"]["patch_dtype"] == "int8"
    assert about["settings"] == {
        "checkpoint_sha256": provenance.CheckpointHash(checkpoint(MODEL)).sha256,
        "preprocessing": "224 x 224 pixels, bicubic",
        "patch_dtype": "int8",
        "normalize": False,
        "embedding_dtype": "float16",
        "image_column": None,
        "keep": [],
        "arithmetic": provenance.ARITHMETIC["int8"],
        "output": "pooled",
        "tower": "vision",
        "text_column": None,
        "packed": False,
        "dtype": "bfloat16",
        "calibration_sha256": None,
        "min_cosine": None,
        "scales_sha256": None,
    }


def test_the_version_of_pillow_is_that_of_the_imported_module(monkeypatch):
    # Pillow-SIMD installs the same module from a package with another name.
    def version(name):
        if name == "pillow":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(PIL, "__version__", "12.1.1.post0")
    assert provenance.versions()["pillow"] == "12.1.1.post0"


@pytest.mark.parametrize("full", [["out.npz"], ["out.npz", "temporary"]])
def test_an_npz_that_cannot_be_written_goes_elsewhere(tmp_path, pictures, monkeypatch, full):
    for name in ("temporary", "current"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    full_in([f"{tmp_path}/{name}" for name in full], monkeypatch)
    with pytest.raises(output.WrittenElsewhereError, match=r"No space left") as raised:
        run([pictures], tmp_path / "out.npz")
    where = tmp_path / ("current" if "temporary" in full else "temporary")
    (elsewhere,) = where.glob("*/out.npz")
    assert f"The embeddings are in {elsewhere} instead. Move" in str(raised.value)
    with np.load(elsewhere) as file:
        assert len(file["embeddings"]) == 23 and len(file["failed"]) == len(file["reasons"]) == 1


def test_an_npz_that_can_be_written_nowhere_leaves_nothing(tmp_path, pictures, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "home"))
    full_in([str(tmp_path)], monkeypatch)
    with pytest.raises(output.WrittenElsewhereError, match=r"nothing was written"):
        run([pictures], tmp_path / "out.npz")
    assert not any((tmp_path / "home").iterdir())


def test_no_room_for_the_ids_ends_a_run_that_can_go_on(tmp_path, pictures, monkeypatch):
    add, added = Ids.add, []

    def full(self, id):
        added.append(id)
        if len(added) == 40:  # The walk over the folder adds ids, too.
            self._database.execute("PRAGMA max_page_count = 1")
        return add(self, id + bytes(9000 * (len(added) >= 40)))

    monkeypatch.setattr(Ids, "add", full)
    monkeypatch.setattr(ids, "TOGETHER", 1)
    with pytest.raises(output.UnfinishedError, match=r"is full.*SQLITE_TMPDIR"):
        run(
            [pictures], tmp_path / "out", quiet=True
        )  # Without --quiet another thread would count the pictures.
    monkeypatch.undo()
    assert run([pictures], tmp_path / "out") == 1
    assert len(by_id(tmp_path / "out")) == 23


@pytest.mark.slow("starts a process for each signal")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_in_shards_is_lost_whatever_ends_a_run(tmp_path, number):
    photographs, out = tmp_path / "pictures", tmp_path / "out"
    photographs.mkdir()
    for i in range(500):
        (photographs / f"{i:04}.png").write_bytes(encoded(i))
    line = [*COMMAND, "--checkpoint", checkpoint(MODEL), photographs, "--out", out, "--batch", "16"]
    settings = dict(env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)
    # The process stops itself before it writes its fifth file, which is a shard. Then it gets the
    # signal.
    script = """
import os, signal, sys
from pallas_patch_embed import __main__
from pallas_patch_embed.embed import folder, place

def written_atomically(path, whole=place.written_atomically, **options):
    paths.append(path)
    if len(paths) == 5 and "STOP" in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)
    return whole(path, **options)

paths = []
folder.SHARD_ROWS, place.written_atomically = 32, written_atomically
sys.argv = sys.argv[1:]
__main__.run()
"""
    line = [sys.executable, "-c", script, *line[2:]]
    stopping = settings | dict(env=settings["env"] | {"STOP": "1"})
    for kills in range(3):
        process = subprocess.Popen(line, **stopping)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        error = process.communicate()[1]
        assert process.returncode in (-number, 128 + number), error
        assert number == signal.SIGKILL or "the same command resumes" in error
        found = by_id(out)
        assert 32 * 3 * (kills + 1) <= len(found) < 500
    assert subprocess.run(line, **settings).returncode == 0
    files = [(str(path), path.read_bytes()) for path in sorted(photographs.iterdir())]
    assert_same(by_id(out), expected(files, batch=16))


# Tars, parquet files and lists are read.


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_WebDatasets_ids_are_its_keys_whatever_the_order(tmp_path, name):
    members = {"x/01.json": b"{}", "x/00.png": encoded(0), "x/01.png": encoded(1)}
    members |= {
        "x/00.mask.png": encoded(3),
        "x/00.txt": b"a",
        "x/.hidden.png": b"",
        "02.jpeg": encoded(2, "JPEG"),
    }
    write_tar(tmp_path / name, members)
    run([tmp_path / name], tmp_path / "out")
    wanted = [("x/00", encoded(0)), ("x/01", encoded(1)), ("02", encoded(2, "JPEG"))]
    wanted += [("x/00.mask", encoded(3))]
    assert_same(by_id(tmp_path / "out"), expected(wanted))


def test_a_damaged_tar_is_an_error_and_its_first_pictures_are_embedded(tmp_path):
    write_tar(tmp_path / "a.tar", {f"{i}.png": encoded(i) for i in range(9)})
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 3])
    assert run([tmp_path / "a.tar"], tmp_path / "out") == 1
    errors = shards(tmp_path / "out", "__errors")
    assert errors["id"] == [str(tmp_path / "a.tar")] and "to its end" in errors["reason"][0]
    assert 0 < len(by_id(tmp_path / "out")) < 9


def read_tar(path):
    """Returns the ids and contents of the pictures in a tar; of an unreadable one the id alone."""
    found = []
    for picture in units.Tar(str(path)).pictures():
        try:
            with pickle.loads(pickle.dumps(picture.in_memory()))() as file:
                found.append((picture.id, file.read()))
        except OSError:
            found.append(picture.id)
        except units.SourceEndsError:
            pass  # The tar itself is an error, too.
    return found


def test_a_tar_gives_the_same_pictures_whether_members_are_read_from_it_or_streamed(
    tmp_path, monkeypatch
):
    """However much of the tar there is; a member of which a part is missing is no picture."""
    wanted = [(f"{i}", bytes([i]) * size) for i, size in enumerate((0, 1, 511, 512, 513, 1500))]
    write_tar(tmp_path / "whole.tar", {f"./{id}.png": content for id, content in wanted})
    content = (tmp_path / "whole.tar").read_bytes()
    ends, position = [], 0
    for _, picture in wanted:
        ends.append(position + 512 + len(picture))
        position = -(-ends[-1] // 512) * 512
    path = tmp_path / "part.tar"
    for length in range(0, len(content) + 1, 128):
        path.write_bytes(content[:length])
        found = read_tar(path)
        # A tar ends with a block of zeros.
        errors = [] if length >= position + 512 else [str(path)]
        assert found == wanted[: sum(end <= length for end in ends)] + errors
        with monkeypatch.context() as streamed:
            streamed.setattr(tars, "is_compressed", lambda _: True)
            assert read_tar(path) == found


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path, name):
    write_tar(tmp_path / "whole.tar", {f"{i}.png": bytes([i]) for i in range(4)})
    content = bytearray((tmp_path / "whole.tar").read_bytes())
    content[2048] ^= 1  # A character of the third member's name, which its checksum includes.
    compress = gzip.compress if name.endswith("gz") else bytes
    (tmp_path / name).write_bytes(compress(content))
    assert read_tar(tmp_path / name) == [("0", b"\0"), ("1", b"\1"), str(tmp_path / name)]


def test_no_picture_gets_the_id_of_another_one_if_its_tar_is_replaced(tmp_path):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    write_tar(path, {"0.png": encoded(0)})
    write_tar(other, {"1.png": encoded(1)})
    os.utime(other, (0, 0))
    (picture,) = units.Tar(str(path)).pictures()
    other.replace(path)
    with pytest.raises(OSError, match="its tar was changed while it was read"):
        picture.open(float("inf"))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_picture_that_is_a_link_in_a_tar_is_an_error(tmp_path, name):
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as tar:
        for link, kind in (("0.png", tarfile.SYMTYPE), ("1.png", tarfile.LNKTYPE), ("2.txt", b"1")):
            member = tarfile.TarInfo(link)
            member.type, member.linkname = kind, "3.png"
            tar.addfile(member)
    errors = {}
    for picture in units.Tar(str(tmp_path / name)).pictures():
        with pytest.raises(OSError) as error:
            picture.open(float("inf"))
        errors[picture.id] = str(error.value)
    assert errors == dict.fromkeys(("0", "1"), "it is a link to 3.png in a tar")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_tar_is_what_it_contains_whatever_its_name_says(tmp_path, name):
    write_tar(tmp_path / "compressed.tar.gz", {"0.png": encoded(0)})
    write_tar(tmp_path / "plain.tar", {"0.png": encoded(0)})
    for written in ("compressed.tar.gz", "plain.tar"):
        (tmp_path / written).rename(tmp_path / name)
        assert read_tar(tmp_path / name) == [("0", encoded(0))]


def test_a_member_with_a_hole_is_read_as_a_whole(tmp_path):
    """GNU tar --sparse stores only the data on both sides of the hole."""
    before, hole, after = b"before", bytes(1000), b"after"
    member = tarfile.TarInfo("0.png")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, len(before + after)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for i, (offset, size) in enumerate(((0, len(before)), (len(before + hole), len(after)))):
        header[386 + 24 * i : 410 + 24 * i] = b"%011o\0%011o\0" % (offset, size)
    header[483:495] = b"%011o\0" % len(before + hole + after)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data = (before + after).ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(header + data + bytes(1024))
    assert read_tar(tmp_path / "a.tar") == [("0", before + hole + after)]


def test_the_name_of_a_parquet_file_need_not_be_UTF_8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    with open(name, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"image": [b"content"]}), file)
    (picture,) = parquet.Parquet(name).pictures()
    assert picture.id == f"{tmp_path}/\\xff.parquet#0"
    assert picture.open(float("inf")).read() == b"content"


@pytest.mark.parametrize("nested", [False, True], ids=["bytes", "Hugging Face's struct"])
def test_parquet_has_ids_or_gets_them(tmp_path, nested):
    contents = [encoded(i) for i in range(5)] + [None]
    column = [c and {"bytes": c, "path": "x"} for c in contents] if nested else contents
    table = pyarrow.table({"image": column, "id": list("abcdef"), "label": range(6)})
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(table, path)
    assert run([path], tmp_path / "out") == 1
    assert_same(by_id(tmp_path / "out"), expected(list(zip("abcde", contents[:5]))))
    errors = shards(tmp_path / "out", "__errors")
    assert (errors["id"], errors["reason"]) == (["f"], ["its cell is empty"])
    pyarrow.parquet.write_table(table.drop_columns("id"), path)
    assert run([path], tmp_path / "other") == 1
    assert sorted(by_id(tmp_path / "other")) == [f"{path}#{i}" for i in range(5)]


def test_parquet_whose_columns_are_unclear_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [b"x"], "b": [b"y"]}), path)
    with pytest.raises(ValueError, match=r"2 columns of encoded pictures.*--image-column"):
        run([path], tmp_path / "out")
    with pytest.raises(ValueError, match="no column 'c'"):
        run([path], tmp_path / "out", image_column="a", id_column="c")


def test_lists_braces_and_ids_that_come_twice(tmp_path, pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    (tmp_path / "list.txt").write_text("00.png\n\n01.png\nabsent.png\n00.png\n")
    write_tar(tmp_path / "t0.tar", {"k.png": encoded(50)})
    write_tar(tmp_path / "t1.tar", {"k.png": encoded(51)})
    arguments = [f"{tmp_path}/t{{0..1}}.tar"]
    assert run(arguments, tmp_path / "out", lists=[str(tmp_path / "list.txt")]) == 2
    assert sorted(by_id(tmp_path / "out")) == ["00.png", "01.png", "k"]
    errors = shards(tmp_path / "out", "__errors")
    assert dict(zip(errors["id"], errors["reason"])) == {
        "k": output.SAME_ID,
        "absent.png": "No such file or directory",
    }


def test_a_list_is_read_from_standard_input(tmp_path, pictures):
    command = [
        *COMMAND,
        "--checkpoint",
        checkpoint(MODEL),
        "--list",
        "-",
        "--out",
        tmp_path / "out",
    ]
    names = "".join(f"{pictures}/{i:02}.png\n" for i in range(5))
    subprocess.run([*command, "--batch", "4"], input=names, text=True, check=True)
    files = [(f"{pictures}/{i:02}.png", encoded(i)) for i in range(5)]
    assert_same(by_id(tmp_path / "out"), expected(files))


def test_a_list_that_is_absent_is_refused_before_anything_is_written(tmp_path, pictures):
    with pytest.raises(FileNotFoundError, match=r"do not exist: .*absent\.txt"):
        run([pictures], tmp_path / "out", lists=[str(tmp_path / "absent.txt")])
    with pytest.raises(ValueError, match="is not a regular file, expected a list of pictures"):
        run([pictures], tmp_path / "out", lists=["/dev/null"])
    assert not (tmp_path / "out").exists()


def test_a_question_mark_in_a_web_address_is_no_wildcard():
    address = "https://example.org/a.png?size=[1,2]*"
    assert list(sources.Expanded([address])) == [address]


def test_pictures_and_shards_may_be_at_URLs():
    fs = fsspec.filesystem("memory")
    for i in range(5):
        fs.pipe_file(f"/bucket/photos/{i}.png", encoded(i))
    fs.pipe_file("/bucket/photos/notes.txt", b"none")
    assert run(["memory://bucket/photos"], "memory://bucket/out") == 0
    wanted = [(f"memory:///bucket/photos/{i}.png", encoded(i)) for i in range(5)]
    found = {id.replace("///", "//"): e for id, e in by_id("memory://bucket/out").items()}
    assert_same(found, {id.replace("///", "//"): e for id, e in expected(wanted).items()})
    assert run(["memory://bucket/photos/[34].png"], "memory://bucket/out") == 0
    with pytest.raises(FileNotFoundError, match="No file matches"):
        run(["memory://bucket/photos/*.gif"], "memory://bucket/out")


class Unreachable(MemoryFileSystem):
    """A store whose operations in `fails` raise an exception of the store's own type."""

    protocol = "unreachable"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("unreachable://", "memory://"))

    def exists(self, path, **options):
        if "exists" in self.fails:
            raise RuntimeError("no credentials")
        return super().exists(path, **options)

    def pipe_file(self, path, *arguments, **options):
        if "pipe_file" in self.fails and "embeddings" in path:
            raise RuntimeError("no network")
        super().pipe_file(path, *arguments, **options)

    def open(self, path, *arguments, **options):
        if "open" in self.fails:
            raise RuntimeError("no network")
        return super().open(path, *arguments, **options)


def test_a_store_that_cannot_be_reached_is_said(tmp_path, pictures, monkeypatch):
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    monkeypatch.setattr(Unreachable, "fails", {"exists"})
    for arguments in (["unreachable://a.png"], "out"), ([pictures], "unreachable://out"):
        with pytest.raises(OSError, match=r"unreachable://.* cannot be reached: no credentials"):
            run(*arguments)
    monkeypatch.setattr(Unreachable, "fails", {"pipe_file"})
    with pytest.raises(output.UnfinishedError, match=r"\(no network\).*run the same command again"):
        run([pictures], "unreachable://out")
    fs, _ = fsspec.url_to_fs("unreachable://")
    for name in ("a.tar", "a.parquet"):
        fs.pipe_file(f"/{name}", b"x")
    monkeypatch.setattr(Unreachable, "fails", {"open"})
    for name in ("a.tar", "a.parquet"):
        assert run([f"unreachable://{name}"], tmp_path / name) == 1
        (reason,) = shards(tmp_path / name, "__errors")["reason"]
        assert "no network" in reason


def test_float16_is_what_float32_rounds_to(tmp_path, pictures):
    run([pictures], tmp_path / "a")
    run([pictures], tmp_path / "b", embedding_dtype="float16")
    kind = pyarrow.parquet.read_schema(tmp_path / "b" / "embeddings" / "000000.parquet")
    assert kind.field("embedding").type.value_type == pyarrow.float16()
    found, wanted = by_id(tmp_path / "b"), by_id(tmp_path / "a")
    assert_same(found, {id: e.astype(np.float16).astype(np.float32) for id, e in wanted.items()})


def test_units_can_be_pickled_and_have_few_files_each(tmp_path, pictures):
    units = list(sources.find([str(pictures)], sources.Columns(), lambda *_: None))
    again = pickle.loads(pickle.dumps(units))
    names = [picture.id for unit in again for picture in unit.pictures()]
    assert len(names) == 24 and names[0].endswith("00.png")
