"""Picture files are found once each, and their names are printed on one line."""

import os
import socket
from pathlib import Path

import pytest

from pallas_patch_embed.base.files import open_regular
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import sources


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes an empty folder the current folder, so that names are short."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    return Path(".")


def make(*names):
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class Found:
    """The result of `sources.find`: pictures, unreadable files with reasons, and skipped files."""

    def __init__(self, *arguments):
        sources.check(list(map(str, arguments)))
        self.pictures, self.unreadable, self.skipped = [], {}, {}
        units = sources.find(map(str, arguments), sources.Columns(), self.skipped.__setitem__)
        for unit in units:
            for path, _, reason in unit.files:
                if reason:
                    self.unreadable[path] = reason
                else:
                    self.pictures.append(path)


def found(*arguments):
    """Lists the names of the pictures; asserts that no file is unreadable or skipped."""
    result = Found(*arguments)
    assert not result.unreadable and not result.skipped
    return result.pictures


def test_pictures_are_sorted_folder_by_folder(folder):
    make("b.png", "a.JPG", "ab/c.png", "ab.png", "a/z.webp", "a/b/c.gif", "a.b/c.png")
    make("notes.txt", ".hidden.png", ".hidden/a.png", "x.pdf", "x.eps", "x.mpg", "x.h5")
    wanted = ["a/b/c.gif", "a/z.webp", "a.JPG", "a.b/c.png", "ab/c.png", "ab.png", "b.png"]
    assert found(".") == wanted == list(map(str, sorted(map(Path, wanted))))


def test_a_file_that_is_given_needs_no_extension_and_may_be_hidden(folder):
    make("photo", ".a.png", "a/b.png")
    assert found("photo", ".a.png", "a") == ["photo", ".a.png", "a/b.png"]


def test_overlapping_arguments_give_a_picture_once_by_the_first_name(folder):
    make("a/b/c.png", "a/d.png", "e.txt")
    absolute = Path("a/b").absolute()
    assert found("a/d.png", absolute, "a", ".", "a/b/c.png") == ["a/d.png", f"{absolute}/c.png"]
    assert found(".", "e.txt") == ["a/b/c.png", "a/d.png", "e.txt"]
    assert found("e.txt", "e.txt") == ["e.txt"]


def test_links_are_followed_once_each_loops_included(folder, tmp_path):
    make("real/a.png", "../elsewhere/b.png", "z.png")
    Path("real/up").symlink_to("..")
    Path("real/self").symlink_to(".")
    Path("link").symlink_to("real")
    Path("outside").symlink_to(tmp_path / "elsewhere")
    Path("y.png").symlink_to("z.png")
    # In sorted order `link` precedes `real`, and y.png precedes z.png.
    assert found(".") == ["link/a.png", "outside/b.png", "y.png"]
    assert found("real", ".") == ["real/a.png", "real/up/outside/b.png", "real/up/y.png"]


def test_hard_links_are_two_pictures(folder):
    make("a.png")
    os.link("a.png", "b.png")
    assert found(".") == ["a.png", "b.png"]


def test_links_to_nothing_are_named(folder):
    make("a.png")
    Path("gone.png").symlink_to("absent.png")
    Path("loop.png").symlink_to("loop.png")
    Path("folder").symlink_to("absent")
    result = Found(folder, Path("folder"))
    assert result.pictures == ["a.png"]
    assert result.unreadable.keys() == {"gone.png", "loop.png", "folder"}
    nothing = "it is a dangling link"
    assert result.unreadable["gone.png"] == result.unreadable["folder"] == nothing
    assert list(result.skipped) == ["folder"]


def test_FIFOs_and_sockets_are_skipped_in_folders_and_refused_as_arguments(folder):
    make("a.png")
    os.mkfifo("b.png")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("c.png")
    result = Found(folder)
    assert result.pictures == ["a.png"] and not result.unreadable
    assert result.skipped == dict.fromkeys(("b.png", "c.png"), "it is not a regular file")
    for special in ("b.png", "c.png", "pipe", "/dev/null"):
        with pytest.raises(ValueError, match=f"{special} is not a regular file"):
            Found(folder, Path(special))


def test_a_FIFO_is_not_waited_for(folder):
    os.mkfifo("a.png")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular("a.png")


def test_arguments_that_do_not_exist_are_all_named(folder):
    make("a.png")
    with pytest.raises(FileNotFoundError, match=r"do not exist: \*\.jpg, phtos/b\.png\.$"):
        Found("*.jpg", "a.png", "phtos/b.png")


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    make("a.png", "b/c.png")
    listdir = os.listdir

    def refuse(path):
        if str(path) == "b":
            raise PermissionError(13, "Permission denied", "b")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert Found(folder).unreadable == {"b": "Permission denied"}


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("Bücher und 写真.png", "Bücher und 写真.png"),
        ("a\nb.png", r"a\nb.png"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        (os.fsdecode(b"latin-\xe4.png"), r"latin-\udce4.png"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\x9b2J", r"\x9b2J"),
    ],
)
def test_names_are_printed_on_one_line_without_escape_sequences(name, wanted):
    assert printable(Path(name)) == wanted
