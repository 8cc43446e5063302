"""Samples of WebDatasets whose texts are kept, and members that are not pictures."""

import io
import tarfile

import fsspec
import pyarrow
import pytest

from pallas_patch_embed.embed import units
from tests.commands.shard_folders import encoded, write_tar

pytestmark = pytest.mark.usefixtures("time_limit")


def read(unit):
    """Returns content or reason, and kept values, for each id, in order."""
    found = {}
    for picture in unit.pictures():
        try:
            content = picture.in_memory()(float("inf")).read()
        except OSError as error:
            content = str(error)
        assert picture.id not in found
        found[picture.id] = (content, *picture.kept)
    return found


@pytest.fixture(params=["t.tar", "t.tar.gz", "memory"])
def place(request, tmp_path):
    """Returns a function that writes a tar and returns its path or URL."""

    def write(members):
        path = tmp_path / ("t.tar" if request.param == "memory" else request.param)
        write_tar(path, members)
        if request.param != "memory":
            return str(path)
        fsspec.filesystem("memory").pipe_file("/samples/t.tar", path.read_bytes())
        return "memory://samples/t.tar"

    return write


def test_a_sample_is_a_run_of_names_that_are_equal_up_to_the_first_dot(place):
    path = place(
        {
            "x/1.txt": "é".encode(),
            "x/1.png": encoded(1),
            "x/1.mask.png": encoded(2),
            "x/._1.txt": b"\xff",
            "x/README": b"\xff",
            "x/1.JSON": b"{}",
            "y/1.png": encoded(3),
            "y/1.mask.json": b"not of this extension",
            "x.z/1.png": encoded(4),
            "x.z/1.txt": b"last",
            "x/1.cls": b"of another sample",
        }
    )
    keep = ("txt", "json", "cls")
    unit = units.Tar(path, keep=keep)
    assert unit.kept_types() == dict.fromkeys(keep, pyarrow.string())
    assert read(unit) == {
        "x/1": (encoded(1), "é", "{}", None),
        "x/1.mask": (encoded(2), "é", "{}", None),
        "y/1": (encoded(3), None, None, None),
        "x.z/1": (encoded(4), "last", None, None),
    }
    assert [content for content, *_ in read(units.Tar(path)).values()] == [
        encoded(i) for i in range(1, 5)
    ]


@pytest.mark.parametrize(
    "text, why",
    [
        ({"1.txt": b"\xff"}, "1.txt, which --keep names, is not UTF-8"),
        ({"1.txt": bytes(2**20 + 1)}, "has 1048577 bytes, expected at most 1048576"),
        ({"1.txt": b"a", "1.TXT": b"b"}, "several members .txt"),
    ],
)
def test_a_text_that_cannot_be_kept_is_an_error_of_its_sample(place, text, why):
    members = {"0.png": encoded(0), "1.a.png": encoded(1)} | text | {"1.b.png": encoded(2)}
    found = read(units.Tar(place(members | {"2.png": encoded(3)}), keep=("txt",)))
    assert why in found["1.a"][0] and why in found["1.b"][0]
    assert found["0"] == (encoded(0), None) and found["2"] == (encoded(3), None)


def test_a_picture_is_no_text(place):
    found = read(units.Tar(place({"0.png": encoded(0), "1.ppm": b"P3 1 1 9 1 2 3"}), keep=("ppm",)))
    assert found["0"] == (encoded(0), None)
    assert found["1"] == ("1.ppm, which --keep names, is a picture, expected text", None)


def test_pictures_that_wait_for_the_end_of_their_sample_take_limited_memory(place, monkeypatch):
    monkeypatch.setattr(units, "MOST_SAMPLE", 3 * 10**4)
    members = {f"{i // 4}.{i}.png": encoded(i).ljust(10**4) for i in range(8)} | {"1.txt": b"a"}
    members |= {f"2.{i}.png": encoded(i) for i in range(8, 30)}
    members |= {"3.png": encoded(99), "3.txt": b"text"}
    path = place(members)
    found = read(units.Tar(path, keep=("txt",)))
    assert len(found) == 31 and found["3"] == (encoded(99), "text")
    why = "its sample needs more than 30000 bytes of memory, where --keep holds"
    assert all(why in found[f"2.{i}"][0] for i in range(8, 30))
    # Members of a plain tar on this machine can be read later.
    is_read_later = path.endswith("t.tar") and not path.startswith("memory")
    assert (why in str(found["0.0"][0])) is not is_read_later


def test_a_sample_whose_end_is_missing_is_an_error(place):
    path = place({"0.png": encoded(0), "0.txt": b"a", "1.png": encoded(1), "1.txt": b"b" * 9000})
    with fsspec.open(path, "rb", compression="infer") as file:
        content = file.read()
    with fsspec.open(path, "wb", compression="infer") as file:
        file.write(content[: content.index(b"b" * 9000) + 1000])
    found = read(units.Tar(path, keep=("txt",)))
    assert found.pop("0") == (encoded(0), "a")
    assert found.pop("1") == ("the tar cannot be read to the end of its sample", None)
    ((why, kept),) = found.values()
    assert "the tar cannot be read to its end" in why and kept is None


@pytest.mark.parametrize("keep", [(), ("txt",)])
def test_a_tar_in_a_tar_is_an_error_and_not_a_secret(place, keep):
    members = {"a.tar": b"x", "a.png": encoded(0), "a.txt": b"", "b.tgz": b""}
    found = read(units.Tar(place(members), keep=keep))
    why = "it is a tar in a tar, which is not read"
    assert [content for content, *_ in found.values()] == [why, encoded(0), why]
    assert list(found) == ["a.tar", "a", "b.tgz"]


def test_a_picture_whose_plugin_is_missing_is_an_error_with_advice(place, monkeypatch):
    advice = {".heic": "install it"}
    monkeypatch.setattr(units, "missing_plugin", advice.get)
    monkeypatch.setattr(units, "extensions", lambda: {".png"})
    found = read(units.Tar(place({"a.HEIC": b"x", "b.png": encoded(0), "c.xyz": b""})))
    assert found == {"a": ("to read .heic pictures, install it",), "b": (encoded(0),)}


def test_a_name_that_no_sample_has_is_an_error(place):
    path = place({"a.png": encoded(0), "a.txt": b"a"})
    *others, last = units.Tar(path, keep=(".txt", "json")).pictures()
    assert [picture.kept for picture in others] == [("a", None)]
    with pytest.raises(OSError, match=r"no sample has a member \.json, which --keep names"):
        last.open(float("inf"))


def test_a_link_to_a_text_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        member = tarfile.TarInfo("0.png")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("0.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "1.txt"
        tar.addfile(link)
    found = read(units.Tar(str(tmp_path / "t.tar"), keep=("txt",)))
    assert found == {"0": ("0.txt, which --keep names, is a link in a tar", None)}
