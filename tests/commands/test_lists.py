"""Braces, lists of pictures, and the length of messages."""

import io
import itertools
import json
import os
import subprocess
import tarfile
import time
import tracemalloc

import pytest
from hypothesis import given, strategies

from pallas_patch_embed.backends import stored, tiles
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.base.messages import MOST, printable, quoted
from pallas_patch_embed.embed import braces, parquet, sources, units
from tests.commands.shard_folders import COMMAND, MODEL, by_id, encoded, run, shards
from tests.encoder.goldens import checkpoint

# From the documentation of braceexpand and from bash.
BRACES = {
    "": [""],
    "a": ["a"],
    "item{1..3}": ["item1", "item2", "item3"],
    "{a..c}": ["a", "b", "c"],
    "{Y..b}": ["Y", "Z", "a", "b"],
    "{c..a}x": ["cx", "bx", "ax"],
    "index.html{,.backup}": ["index.html", "index.html.backup"],
    "python{2.{5..7},3.{2,3}}": ["python2.5", "python2.6", "python2.7", "python3.2", "python3.3"],
    "{07..10}": ["07", "08", "09", "10"],
    "{-02..1}": ["-02", "-01", "000", "001"],
    "{0..-0}": ["0"],
    "{a..g..2}": ["a", "c", "e", "g"],
    "{4..1}": ["4", "3", "2", "1"],
    "{2..-1}": ["2", "1", "0", "-1"],
    "{1..9..-4}{3..3}": ["13", "53", "93"],
    "{1..3..0}": ["1", "2", "3"],
    "{a,b}{1,2}": ["a1", "a2", "b1", "b2"],
    "{}": ["{}"],
    "{a}": ["{a}"],
    "{a{1,2}}": ["{a1}", "{a2}"],
    "{1..a}": ["{1..a}"],
    "{1..}": ["{1..}"],
    "{,}": ["", ""],
    "a,b": ["a,b"],
    r"{1\{2,3}": ["1{2", "3"],
    r"\{a,b\}": ["{a,b}"],
    r"{a\,b,c}": ["a,b", "c"],
    "a\\": ["a\\"],
    r"a\\b": ["a\\b"],
    "\u0660{\u0660..\u0663}": ["\u0660{\u0660..\u0663}"],
    "{x\ny,\0}": ["x\ny", "\0"],
}


@pytest.mark.parametrize("pattern", BRACES)
def test_braces_stand_for_what_they_do_in_bash(pattern):
    assert list(braces.expand(pattern)) == BRACES[pattern]


@given(strategies.lists(strategies.sampled_from(["{", "}", ",", "..", "1", "03", "b", "\\"])))
def test_any_pattern_is_expanded_or_refused(parts):
    pattern = "".join(parts)
    try:
        found = list(itertools.islice(braces.expand(pattern), 1000))
    except ValueError as error:
        assert pattern.count("{") or pattern.count("}")
        assert "without" in str(error)
    else:
        assert found and all(isinstance(one, str) for one in found)


@pytest.mark.parametrize(
    "pattern, why",
    [
        ("{a", "has a { without a }"),
        ("{a,b}}", "has a } without a {"),
        ("{" * 10**5, "nested too deeply"),
        ("{" * 10**5 + "}" * 10**5, "nested too deeply"),
        ("{0..1" + "0" * 5000 + "}", "4300"),
    ],
)
def test_braces_that_are_not_balanced_are_refused(tmp_path, pattern, why):
    with pytest.raises(ValueError, match="cannot be expanded") as raised:
        run([pattern + "x"], tmp_path / "out")
    assert why in str(raised.value) and len(str(raised.value)) < 500


ENDLESS = ("{0..1000000}.png", "{0..100000000}.png", "{0..1" + "0" * 30 + "}", "{0,1}" * 100)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_braces_are_expanded_only_as_far_as_needed(tmp_path, pattern):
    begin = time.process_time()
    tracemalloc.start()
    with pytest.raises(FileNotFoundError, match=r"do not exist: .*, .* and others") as raised:
        run([f"{tmp_path}/{pattern}"], tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(raised.value)) < 1500
    assert peak < 10**7 and time.process_time() - begin < 20  # It takes 0.01 s and 0.1 MB.


def test_each_pattern_of_a_URL_is_looked_up_once(monkeypatch):
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    fs = fsspec.filesystem("memory")
    for name in ("a0.png", "a1.png", "b0.png"):
        fs.pipe_file(f"/globs/{name}", b"")
    looked_up, glob = [], MemoryFileSystem.glob
    monkeypatch.setattr(
        MemoryFileSystem, "glob", lambda self, path: looked_up.append(path) or glob(self, path)
    )
    names = sources.Expanded(["memory://globs/{a,b}*.png"])
    assert list(names) == list(names) and len(list(names)) == 3
    assert looked_up == ["/globs/a*.png", "/globs/b*.png"]


def test_wildcards_of_paths_are_expanded_unless_a_file_has_this_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.png", "a.png", "[x].png", "x.png", "below/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for pattern, found in (
        ("?.png", ["a.png", "b.png", "x.png"]),
        ("{b,a}*.png", ["b.png", "a.png"]),
        ("[x].png", ["[x].png"]),
        ("**/c.*", ["below/c.png"]),
    ):
        assert list(sources.Expanded([pattern])) == found
    with pytest.raises(FileNotFoundError, match=r"No file matches z\*\.png\."):
        list(sources.Expanded(["z*.png"]))


def test_the_kind_of_an_argument_is_in_its_name_without_the_query_of_a_URL():
    def kind(argument):
        (unit,) = sources.find([argument], sources.Columns(), lambda *_: None)
        return type(unit)

    for ending in (".tar", ".tar.gz", ".TGZ", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"):
        assert kind(f"a{ending}") is units.Tar
        assert kind(f"https://host/a{ending}?X-Amz-Date=1&b=c.png") is units.Tar
    assert kind("https://host/a.parquet?token=a/b.tar") is parquet.Parquet
    assert kind("s3://bucket/a.parquet") is parquet.Parquet


@pytest.mark.parametrize("mode", ["w:bz2", "w:xz"])
def test_pictures_of_a_tar_that_bzip2_or_xz_compressed_are_read(tmp_path, mode):
    path = tmp_path / f"a.tar.{mode[2:]}"
    with tarfile.open(path, mode) as tar:
        for i in range(3):
            member = tarfile.TarInfo(f"{i}.png")
            member.size = len(encoded(i))
            tar.addfile(member, io.BytesIO(encoded(i)))
    found = {
        picture.id: picture.open(float("inf")).read() for picture in units.Tar(str(path)).pictures()
    }
    assert found == {str(i): encoded(i) for i in range(3)}


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\nb.png\n")
    assert list(sources.read_list(str(tmp_path / "list.txt"))) == ["a.png", "b.png"]


# Lines of a list, and the reason why each cannot be read.
LINES = {
    b"a\0b.png": "NUL",
    b"\0": "NUL",
    b"b.tar\0": "NUL",
    b"pictures/00.png\0.parquet": "NUL",
    b"memory://a\0.png": "NUL",
    b"x" * 5000 + b".png": "File name too long",
    b"x" * 10**6: "longer than 16384",
    b"memory://" + b"x" * 10**6 + b".parquet": "longer than 16384",
    b"\xff\xfe.png": "No such file",
    b"\x1b[2J\x07.png": "No such file",
    b"{0..3}}.png": "No such file",
    b"*.gif": "No such file",
    b"memory://absent/*.png": "absent/*.png",
    b"unknown://*.png": "Protocol not known",
    b"unknown://a.png": "Protocol not known",
    b"cached://a": "target_protocol",
    b"data://a.png": "",
    b"dir://a": "",
    b"memory://absent/a.png": "absent/a.png",
    b"link/a.png": "",
    b"fifo": "",
    b"/dev/zero": "",
    b"-": "No such file",
    b"~": "No such file",
    b"--out": "No such file",
    b"absent.tar": "cannot be read",
    b"absent.parquet": "cannot be read",
}


def test_a_bad_line_of_a_list_is_an_error_of_one_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        (tmp_path / "pictures" / f"{i:02}.png").write_bytes(encoded(i))
    (tmp_path / "link").symlink_to("link")
    os.mkfifo(tmp_path / "fifo")
    lines = [b"pictures/00.png", *LINES, b"pictures/01.png", b"pictures/02.png"]
    (tmp_path / "list.txt").write_bytes(b"\r\n".join(lines))
    failed = run([], "out", lists=["list.txt"])
    assert sorted(by_id("out")) == [f"pictures/{i:02}.png" for i in range(3)]
    errors = shards("out", "__errors")
    skipped = {b"fifo", b"/dev/zero"}  # They are no pictures by their names.
    assert failed == len(errors["id"]) == len(LINES) - len(skipped)
    reasons = dict(zip(errors["id"], errors["reason"]))
    for line, why in LINES.items():
        reason = reasons.get(units.text(os.fsdecode(line))[: units.LONGEST], "")
        assert why in reason, (line[:100], reason)
    printed = capsys.readouterr().err
    assert printed.replace("\n", "").isprintable()
    assert max(map(len, printed.splitlines())) < 2 * MOST + 100


def test_a_line_of_any_length_takes_little_memory(tmp_path):
    with open(tmp_path / "list.txt", "wb") as file:
        file.seek(10**8)  # A hole reads as characters NUL.
        file.write(b"\nlast.png\n")
    tracemalloc.start()
    arguments = list(sources.read_list(str(tmp_path / "list.txt")))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(arguments) == 2 and len(arguments[0]) > units.LONGEST
    assert arguments[1] == "last.png" and peak < 10**7


def test_a_list_from_standard_input_need_not_be_UTF_8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    with open(name, "wb") as file:
        file.write(encoded(1))
    command = [*COMMAND, "--checkpoint", checkpoint(MODEL), "--list", "-", "--out", tmp_path / "o"]
    lines = os.fsencode(name) + b"\na\0b.png\n\xff\xfe"
    done = subprocess.run(
        [*command, "--batch", "4"],
        input=lines,
        capture_output=True,
        env=os.environ | {"LC_ALL": "C.UTF-8", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 3, done.stderr
    assert list(by_id(tmp_path / "o")) == [f"{tmp_path}/\\xff.png"]


# Messages.

TEXTS = ["x" * 10**6, "\0" * 10**6, "\x1b[2J\r\n", "\ud800" * 300, "\U0001f600\u202e", "é" * 201]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_message_quotes_one_line_of_at_most_200_characters(text):
    for shown in (printable(text), quoted(text), printable([text]), printable(text, 50)):
        assert shown.isprintable() and len(shown) <= MOST == 200
        shown.encode()
    assert printable("x" * MOST) == "x" * MOST
    assert printable("a" * 150 + "b" * 150) == "a" * 97 + "..." + "b" * 100


def test_a_message_cuts_what_a_file_of_measured_configs_says(tmp_path):
    long = "x" * 10**5
    with pytest.raises(ValueError) as raised:
        tiles.config_of(HopperConfig, dict.fromkeys(("tile_n", "slots", long)))
    assert len(str(raised.value)) < 500
    for head in ({long: 1}, {"format": long}, [long], {"format": 1, "chip": {long: long}}):
        (tmp_path / "tuned.json").write_text(json.dumps(head))
        with pytest.raises(ValueError, match="is not a valid file of measured configs") as raised:
            stored.read(tmp_path / "tuned.json")
        assert len(str(raised.value)) < 1000
    other = stored.Stored(tmp_path, {"chip": {}, "package": long}, {})
    assert len(other.mismatch(None)) < 500
    chip = dict(name=long, capability=[9, 0], multiprocessors=1)
    assert len(stored.Stored(tmp_path, {"chip": chip}, {}).mismatch(None)) < 500
