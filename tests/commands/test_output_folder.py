"""Folders of shards that are damaged, or into which someone else has put something."""

import json
import os
import socket
import stat
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pallas_patch_embed.base import files
from pallas_patch_embed.base.files import new_partial
from pallas_patch_embed.embed import exclusive, folder, place
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.tables import embeddings_table, errors_table
from pallas_patch_embed.embed.units import Entry
from tests.commands.shard_folders import by_id, is_done, opened, shards

WIDTH = 4

# The numbers of damaged manifests and shards that are tried, for docs/verification.md.
MANIFESTS, SHARDS = 162, {"embeddings": 56, "__errors": 55}

PRECIOUS = b"precious"


def write(url, *ids):
    """Writes a shard with these ids, and a shard with an error."""
    with opened(url) as out:
        out.add([Entry(id) for id in ids], np.ones((len(ids), WIDTH), np.float32))
        out.fail(Entry(f"{ids[0]} is bad"), "it is damaged")
        out.flush()


@pytest.fixture
def out(tmp_path):
    """Returns the path of a folder with one shard of each kind; precious files are beside it."""
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_bytes(PRECIOUS)
    write(tmp_path / "out", "a")
    return tmp_path / "out"


def contents(path):
    """Returns what is in a folder, without following links."""
    found = {}
    for each in sorted(path.rglob("*")):
        mode = each.lstat().st_mode
        is_file = stat.S_ISREG(mode)
        found[str(each.relative_to(path))] = mode, each.read_bytes() if is_file else None
    return found


def bound_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # The path of a socket may have only 108 bytes.
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


# Name -> function that puts something at a path.
THINGS = {
    "link to a file": lambda path: path.symlink_to(_root(path) / "precious"),
    "relative link": lambda path: path.symlink_to(os.path.relpath(_root(path) / "precious", path)),
    "hard link": lambda path: os.link(_root(path) / "precious", path),
    "link to a folder": lambda path: path.symlink_to(_root(path) / "folder"),
    "dangling link": lambda path: path.symlink_to(_root(path) / "absent"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a FIFO": lambda path: (os.mkfifo(_root(path) / "fifo"), path.symlink_to("../fifo")),
    "FIFO": os.mkfifo,
    "socket": bound_socket,
    "folder": lambda path: (path.mkdir(), (path / "precious").write_bytes(PRECIOUS)),
    "file": lambda path: path.write_bytes(PRECIOUS),
    "file that nobody may read": lambda path: (path.write_bytes(PRECIOUS), path.chmod(0)),
}


def _root(path):
    return next(parent.parent for parent in path.parents if parent.name == "out")


# The names that `embed` gives to what it makes in the folder.
NAMES = [
    ".lock",
    "_manifest.json",
    "embeddings",
    "__errors",
    "embeddings/000000.parquet",
    "__errors/000000.parquet",
    "embeddings/000001.parquet",
    "__errors/000001.parquet",
    *(f"{part}{new_partial()}" for part in ("", "embeddings/", "__errors/")),
]


def put(out, name, thing):
    path = out / name
    if path.is_dir():
        path.rename(out.parent / "moved")
    path.unlink(missing_ok=True)
    thing(path)


@pytest.mark.parametrize("overwrite", [False, True], ids=["resumed", "overwritten"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(name[-40:-8], "N"))
@pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS)
def test_nothing_outside_of_the_folder_changes_whatever_is_in_it(out, name, thing, overwrite):
    put(out, name, thing)
    before = contents(out.parent)
    try:
        with opened(out, overwrite=overwrite) as again:
            again.add([Entry("b")], np.ones((1, WIDTH), np.float32))
    except (ValueError, OSError) as error:
        if str(out) in str(error):
            assert Path(name).name in str(error) or "embed` did not write" in str(error)
        assert len(str(error)) < 1000
    except UnfinishedError as error:
        assert "cannot be written" in str(error) and len(str(error)) < 1000
    after = contents(out.parent)
    outside = {key: value for key, value in before.items() if not key.startswith("out/")}
    assert outside.items() <= after.items()
    assert all(key in before for key in after if not key.startswith("out/"))
    # Inside of the folder only unfinished files are removed, and with --overwrite shards.
    for key, (_, content) in before.items():
        if content == PRECIOUS and "/precious" in key:
            assert after[key] == before[key]


@pytest.mark.parametrize("thing", [x for x in THINGS if "file" not in x and x != "hard link"])
@pytest.mark.parametrize("name", NAMES[:8])
def test_a_damaged_folder_is_refused_with_the_name_and_what_to_do(out, name, thing):
    if name in ("embeddings", "__errors") and thing == "folder":
        pytest.skip("such a folder has no shards, but is not damaged")
    put(out, name, THINGS[thing])
    with pytest.raises((ValueError, UnfinishedError)) as raised:
        write(out, "b", "c")
    message = str(raised.value)
    assert str(out) in message and name in message
    assert any(word in message for word in ("Restore", "remove it", "move it away"))


def test_a_file_that_appears_during_a_run_is_not_overwritten(out):
    with opened(out) as again:
        for name in ("embeddings/000002.parquet", "__errors/000002.parquet"):
            (out / name).symlink_to(out.parent / "precious")
        again.add([Entry("b")], np.ones((1, WIDTH), np.float32))
        with pytest.raises(UnfinishedError, match=r"File exists.*run the same command again"):
            again.flush()
        again._rows.clear()
        again.fail(Entry("c"), "it is damaged")
        with pytest.raises(UnfinishedError, match="File exists"):
            again.flush()
        again._errors.clear()
        partial = new_partial()
        again._place.write(
            partial, folder.parquet_bytes(errors_table([(Entry("d"), "damaged")]), {})
        )
        with pytest.raises(UnfinishedError, match="File exists"):
            again.commit("__errors", partial)
    assert (out.parent / "precious").read_bytes() == PRECIOUS


def test_files_are_not_overwritten_without_hard_links_either(tmp_path, monkeypatch):
    def no_links(old, new):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    write(tmp_path / "out", "a")
    assert list(by_id(tmp_path / "out")) == ["a"]
    for name in ("file", "link"):
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "file").write_bytes(PRECIOUS)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("absent")
        with pytest.raises(FileExistsError):
            files.rename_new(str(tmp_path / "new"), str(tmp_path / name))
    assert (tmp_path / "file").read_bytes() == PRECIOUS


def test_what_a_person_names_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for id in ("a", "b"):
        write(tmp_path / "out", id)
    assert sorted(by_id(tmp_path / "disk")) == ["a", "b"]


HIDDEN = (".git", ".ssh", ".bashrc", ".DS_Store", ".lock2", ".lock.parquet", ".partial", ".lease")


@pytest.mark.parametrize("name", [*HIDDEN, f".{'0' * 31}.partial", f".{'G' * 32}.partial"])
@pytest.mark.parametrize("url", ["{tmp}/out", "memory://hidden-{unique}"])
def test_a_folder_with_hidden_files_of_others_is_not_empty(tmp_path, url, name):
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(root)
    fs.pipe_file(f"{root}/{name}", PRECIOUS)
    with pytest.raises(ValueError, match=r"files that `embed` did not write, such as \.") as raised:
        write(url, "a")
    assert name in str(raised.value)
    assert [path.rpartition("/")[2] for path in fs.ls(root, detail=False)] == [name]


@pytest.mark.parametrize("url", ["{tmp}/out", "memory://killed-{unique}"])
def test_a_run_that_was_killed_before_its_manifest_goes_on(tmp_path, monkeypatch, url):
    monkeypatch.setattr(exclusive, "VOID", 0.2)
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(root)
    for name in (".lock", ".lease.json", new_partial(), new_partial()):
        fs.pipe_file(f"{root}/{name}", b"")
    write(url, "a")
    assert list(by_id(url)) == ["a"]


def test_overwriting_removes_only_what_embed_wrote(out):
    others = ["notes.txt", "embeddings/notes.txt", "embeddings/.hidden.parquet", "__errors/more/a"]
    for name in others:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(PRECIOUS)
    write(out, "b")
    with opened(out, overwrite=True) as again:
        assert not is_done(again, "a") and not is_done(again, "b")
    assert all((out / name).read_bytes() == PRECIOUS for name in others)
    assert not list(out.glob("*/0*.parquet"))


# Manifests.

DEEP = 100_000


def manifests():
    """Yields contents of a manifest that are not those of a run with SETTINGS."""
    good: dict[str, Any] = {
        "format": folder.FORMAT,
        "settings": {
            "checkpoint_sha256": "",
            "preprocessing": "",
            "patch_dtype": "",
            "normalize": False,
            "embedding_dtype": "float32",
        },
        "width": WIDTH,
        "versions": {},
    }
    wrong = [None, True, 0, 1.5, 10**4000, 1e999, "", "x" * 10**5, "\0\x1b[2J\ud800"]
    wrong += [[], [good], [[]] * 10**4, {}, {"x" * 10**5: 1}]
    yield from wrong
    for field in good:
        yield {name: value for name, value in good.items() if name != field}
        for value in wrong:
            if value != good[field] and not (field == "versions" and isinstance(value, dict)):
                yield good | {field: value}
    for field in good["settings"]:
        settings = (good["settings"] | {field: value} for value in wrong)
        yield from (good | {"settings": x} for x in settings if x != good["settings"])
    text = json.dumps(good).encode()
    yield from (b"", b"{", text[:-1], text + b"x", b"\xff\xfe" + text, b"\0" * 1000, b"PAR1")
    yield from (b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP)
    for depth in (500, 900, 990, 1000, 5000, 10000):
        nested = b"[" * depth + b"]" * depth
        yield text.replace(b'"versions": {}', b'"versions": ' + nested)
        yield text.replace(b'"preprocessing": ""', b'"preprocessing": ' + nested)
    yield text + b" " * folder.MOST_BYTES
    yield b" " * 10**8


@pytest.mark.parametrize("url", ["{tmp}/out", "memory://manifests-{unique}"])
def test_a_damaged_manifest_is_refused_in_words(tmp_path, url):
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    fs, root = fsspec.url_to_fs(url)
    tried = 0
    for manifest in manifests():
        content = manifest
        if not isinstance(manifest, bytes):
            content = json.dumps(manifest).replace("1" + "0" * 4000, "1" + "0" * 4400).encode()
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/_manifest.json", content)
        with pytest.raises(ValueError) as raised:
            opened(url)
        message = str(raised.value)
        assert message.startswith(f"--out is {url}: ") and message.isprintable(), message
        assert "_manifest.json" in message or "other settings" in message
        assert "hoose another folder" in message and len(message) < 1000
        assert fs.cat_file(f"{root}/_manifest.json") == content
        tried += 1
    assert tried == MANIFESTS


# Shards.


def parquet(**columns):
    return folder.parquet_bytes(pyarrow.table(columns), {})


def damaged_shards(part):
    """Yields contents that are no shard of this part."""
    pictures = [Entry("x"), Entry("y")]
    good = embeddings_table(pictures, np.ones((2, WIDTH), np.float32))
    if part == "__errors":
        good = errors_table([(picture, "why") for picture in pictures])
    good = good.select(["id", good.column_names[-1]])
    whole = folder.parquet_bytes(good, {})
    yield from (b"", b"PAR1", b"PAR1PAR1", b"\0" * 1000, b"no parquet", b"\x89PNG", whole + b"\0")
    yield from (whole[: len(whole) * i // 20] for i in range(20))
    for i in range(1, 9):  # The length of the footer, and the mark at the end.
        yield whole[:-i] + bytes([whole[-i] ^ 255]) + whole[len(whole) - i + 1 :]
    id, other = good.column_names
    yield from (folder.parquet_bytes(good.select([name]), {}) for name in (id, other))
    yield folder.parquet_bytes(good.rename_columns(["ID", other]), {})
    yield folder.parquet_bytes(good.rename_columns([id, "other"]), {})
    yield folder.parquet_bytes(
        pyarrow.table([good[id], good[id], good[other]], [id, id, other]), {}
    )
    ids = [[1, 2], [1.5, 2.5], [True, False], [b"x", b"y"], ["x", None], [None, None]]
    ids += [[["x"], ["y"]], [{"x": "y"}, {"x": "z"}]]
    yield from (folder.parquet_bytes(good.set_column(0, id, [column]), {}) for column in ids)
    not_text = pyarrow.array([b"x", b"\xff"]).view(pyarrow.string())
    yield folder.parquet_bytes(good.set_column(0, id, not_text), {})
    others = [["1", "2"], [1, 2], [["1"], ["2"]], [[1], [2]], [1.5, 2.5], [b"x", b"y"]]
    others = others[1:] if part == "__errors" else others
    yield from (folder.parquet_bytes(good.set_column(1, other, [column]), {}) for column in others)
    yield folder.parquet_bytes(pyarrow.table({}), {})


@pytest.mark.parametrize("part", folder.PARTS)
@pytest.mark.parametrize("url", ["{tmp}/out", "memory://shards-{unique}"])
def test_a_damaged_shard_is_refused_with_its_name(tmp_path, url, part):
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    write(url, "a")
    fs, root = fsspec.url_to_fs(url)
    tried = 0
    for content in damaged_shards(part):
        fs.pipe_file(f"{root}/{part}/000009.parquet", content)
        with pytest.raises(ValueError) as raised:
            opened(url)
        message = str(raised.value)
        assert f"{url}: {part}/000009.parquet cannot be used (" in message
        assert "move it away" in message and len(message) < 1000 and message.isprintable()
        tried += 1
    assert tried == SHARDS[part]
    fs.rm(f"{root}/{part}/000009.parquet")
    write(url, "b")
    assert sorted(by_id(url)) == ["a", "b"]


def test_shards_that_another_program_wrote_again_are_read(out):
    path = out / "embeddings" / "000000.parquet"
    table = pyarrow.parquet.read_table(path)
    for kind in (pyarrow.list_, pyarrow.large_list):
        columns = {
            "more": pyarrow.int8(),
            "id": pyarrow.large_string(),
            "embedding": kind(pyarrow.float32()),
        }
        again = table.append_column("more", [[1]]).select(list(columns))
        pyarrow.parquet.write_table(again.cast(pyarrow.schema(columns)), path)
        with opened(out) as found:
            assert is_done(found, "a")


FOREIGN = ("abc", "1", "00000", "0000001", "-00001", "0000_1", "000000 (1)", "1e6", "x\n")
FOREIGN += ("\u0660" * 6, "x" * 240)


@pytest.mark.parametrize("part", folder.PARTS)
@pytest.mark.parametrize("url", ["{tmp}/out", "memory://foreign-{unique}"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"retry_errors": True}], ids=str)
def test_a_parquet_file_with_another_name_is_refused(tmp_path, url, part, options):
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    write(url, "a")
    fs, root = fsspec.url_to_fs(url)
    for name in FOREIGN:
        path = f"{root}/{part}/{name}.parquet"
        fs.pipe_file(path, PRECIOUS)
        with pytest.raises(ValueError, match="gives other names to its shards") as raised:
            opened(url, **options)
        assert "move it away" in str(raised.value) and str(raised.value).isprintable()
        assert fs.cat_file(path) == PRECIOUS
        fs.rm(path)
    with opened(url, **options):
        pass


@pytest.mark.parametrize("url", ["{tmp}/out", "memory://many-{unique}"])
@pytest.mark.parametrize("last", ["999998", "999999", "1000000", "9999999", "1" + "0" * 30])
def test_shards_have_a_number_whatever_its_length(tmp_path, url, last):
    url = url.format(tmp=tmp_path, unique=uuid.uuid4().hex)
    write(url, "a")
    fs, root = fsspec.url_to_fs(url)
    for number, part in enumerate(folder.PARTS):
        fs.mv(f"{root}/{part}/{number:06d}.parquet", f"{root}/{part}/{last}.parquet")
    before = {part: fs.cat_file(f"{root}/{part}/{last}.parquet") for part in folder.PARTS}
    for id in "bcd":
        write(url, id)
    assert sorted(by_id(url)) == ["a", "b", "c", "d"] and len(shards(url, "__errors")["id"]) == 4
    with opened(url) as again:
        for first, part in enumerate(folder.PARTS, 1):
            numbers = [int(last), *(int(last) + i for i in range(first, 7, 2))]
            names = [shard.name for shard in again.shards(part)]
            assert names == [f"{part}/{number:06d}.parquet" for number in numbers]
            assert fs.cat_file(f"{root}/{part}/{last}.parquet") == before[part]


# Leases and URLs.

LEASES = [
    *(b"", b"[]", b"null", b"1", b'""', b"{", b"{}", b"\xff", b"[" * DEEP, b"x" * 10**7),
    *(
        json.dumps({"run": "other", "host": "elsewhere", "time": 0.0} | change).encode()
        for change in (
            *(dict(time=x) for x in (None, "now", True, 1, [], {}, 1e999, -1e999, float("nan"))),
            *(dict(run=x) for x in (None, 1, [], {}, "x" * 10**6)),
            *(dict(host=x) for x in (None, 1, [], {}, "x" * 10**6)),
        )
    ),
]


def test_a_damaged_lease_is_void(monkeypatch):
    monkeypatch.setattr(exclusive, "VOID", 0.2)
    fs = fsspec.filesystem("memory")
    for content in LEASES:
        fs.pipe_file("/leases/.lease.json", content)
        write("memory://leases", "a")
        assert not fs.exists("/leases/.lease.json")


def test_the_name_of_another_host_is_cut(monkeypatch):
    monkeypatch.setattr(exclusive, "VOID", 0.2)
    lease = exclusive.Lease(fsspec.filesystem("memory"), "/cut/.lease.json", "memory://cut")
    other = {"run": "other", "host": "x" * 10**6, "time": 0.0}
    holders = iter([None, other])
    monkeypatch.setattr(lease, "_holder", lambda: next(holders))
    with pytest.raises(exclusive.BusyError) as raised, lease:
        pass
    assert len(str(raised.value)) < 500


URLS = [
    *("data://o", "cached://x", "unknown://x", "dir://x", "reference://x", "zip://x", "tar://x"),
    *("simplecache://x", "blockcache://x", "filecache://x", "libarchive://x", "://"),
]


@pytest.mark.parametrize("url", URLS)
def test_a_URL_that_is_no_folder_is_refused_in_words(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exclusive, "VOID", 0.2)
    try:
        write(url, "a")
    except ImportError as error:
        assert "install" in str(error).lower()
    except (ValueError, OSError) as error:
        assert url in str(error) and len(str(error)) < 500
    else:
        assert url == "://"  # It is a path.


PATHS = ("a::b", "data:x", "a*b", "[a]", "{a,b}", "s3:/x", "-")


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_a_path_whatever_fsspec_makes_of_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(name, "a")
    assert [path.name for path in tmp_path.iterdir()] == [name.split("/")[0]]
    assert isinstance(place.place_of(f"file://{tmp_path}"), place.Local)
    assert isinstance(place.place_of(f"local://{tmp_path}"), place.Local)


def test_a_path_may_begin_with_the_home_folder_or_with_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, url in enumerate(("~/out", f"file:{tmp_path}/out", f"file://{tmp_path}/out")):
        write(url, str(number))
    assert sorted(by_id(tmp_path / "out")) == ["0", "1", "2"]
