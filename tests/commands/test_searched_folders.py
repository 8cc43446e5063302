"""Folders of tars and parquet files, on this machine and at URLs, and files that are left out."""

import collections
import itertools

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from pallas_patch_embed.embed import parquet, sources, units
from tests.commands.shard_folders import encoded, write_tar


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "in") if request.param == "local" else f"memory://{tmp_path.name}/in"


def write(root, tmp_path, *names):
    tar = tmp_path / "made.tar"
    write_tar(tar, {"0.png": encoded(0)})
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"x"]}), tmp_path / "made.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"file_name": ["x"]}), tmp_path / "text.parquet")
    for name in names:
        made = "text.parquet" if "text" in name else f"made{name[name.rfind('.') :]}"
        content = (tmp_path / made).read_bytes() if made.endswith((".tar", ".parquet")) else b""
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(content)


def find(root, *arguments, left_out=None, columns=None):
    found = sources.find(arguments, columns or sources.Columns(), pytest.fail, left_out=left_out)
    paths = []
    for unit in found:
        files = unit.files if isinstance(unit, units.Files) else [unit]
        for file in files:
            kind = type(file).__name__
            path = file.path.replace("memory:///", "memory://").removeprefix(f"{root}/")
            paths.append((kind, path))
    return paths


def test_a_folder_is_searched_for_tars_and_parquet_files(root, tmp_path):
    names = ["a.tar", "b/c.parquet", "b/d.png", "e.TGZ", ".f.tar", ".g/h.parquet"]
    left = ["_metadata.parquet", "_delta_log/i.parquet", "b/text.parquet", "_SUCCESS", "n.TXT"]
    write(root, tmp_path, *names, *left, "_b/j.tar", "_b/k.png", "x.doc")
    left_out = collections.Counter()
    assert sorted(find(root, root, left_out=left_out)) == [
        ("File", "_b/k.png"),
        ("File", "b/d.png"),
        ("Parquet", "b/c.parquet"),
        ("Tar", "_b/j.tar"),
        ("Tar", "a.tar"),
        ("Tar", "e.TGZ"),
    ]
    assert left_out == {".parquet": 3, "no extension": 1, ".txt": 1, ".doc": 1}


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("name", ["x.parquet", "x.tar"])
def test_a_folder_may_have_the_name_of_a_file(root, tmp_path, name, slash):
    """Spark and Ray write such folders."""
    write(root, tmp_path, f"{name}/_SUCCESS", f"{name}/part-0.snappy.parquet", f"{name}/1.tar")
    assert find(root, f"{root}/{name}{slash}") == [
        ("Tar", f"{name}/1.tar"),
        ("Parquet", f"{name}/part-0.snappy.parquet"),
    ]
    assert find(root, root) == find(root, f"{root}/{name}")


def test_a_parquet_file_that_is_named_is_used_whatever_its_name_and_columns(root, tmp_path):
    write(root, tmp_path, "_text.parquet")
    ((kind, _),) = find(root, f"{root}/_text.parquet")
    assert kind == "Parquet"


def test_every_tar_and_parquet_file_is_used_once(tmp_path):
    root = str(tmp_path / "in")
    write(root, tmp_path, "a.tar", "b.parquet")
    (tmp_path / "link").symlink_to(root)
    names = [root, f"{root}/a.tar", f"{tmp_path}/link/b.parquet", f"{root}/../in/a.tar"]
    assert find(root, *names) == [("Tar", "a.tar"), ("Parquet", "b.parquet")]


def test_columns_are_kept_in_units_and_refused_for_picture_files(root, tmp_path):
    write(root, tmp_path, "a.tar", "b.parquet", "c.png")
    columns = sources.Columns(keep=("caption", "txt"))
    for unit in itertools.islice(sources.find([root], columns, pytest.fail), 2):
        assert isinstance(unit, units.Tar | parquet.Parquet)
        assert unit.keep == ("caption", "txt")
    with pytest.raises(ValueError, match=r"c\.png is a picture file.* --keep names caption, txt"):
        find(root, root, columns=columns)
    (absent,) = sources.find(["absent.png"], columns, pytest.fail)
    assert absent.files[0].reason


# Lists.


def arguments_of(tmp_path, *lines):
    (tmp_path / "list.txt").write_text("\n".join(lines))
    return list(itertools.islice(sources.read_list(str(tmp_path / "list.txt")), 100))


def test_a_list_expands_braces_and_wildcards(root, tmp_path):
    write(root, tmp_path, "a0.png", "a1.png")
    found = [
        name.replace("memory:///", "memory://") for name in arguments_of(tmp_path, f"{root}/a*.png")
    ]
    assert found == [f"{root}/a0.png", f"{root}/a1.png"]
    assert arguments_of(tmp_path, f"{root}/b*.png", f"{root}/{{7..8}}.tar") == [
        f"{root}/b*.png",
        f"{root}/7.tar",
        f"{root}/8.tar",
    ]
    assert arguments_of(tmp_path, "https://h/a.png?b=[1]*") == ["https://h/a.png?b=[1]*"]


def test_a_line_is_taken_as_it_is_if_it_exists_or_is_not_balanced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{a,b}.png").write_bytes(b"")
    (tmp_path / "[x].png").write_bytes(b"")
    lines = ["{a,b}.png", "[x].png", "{a.png", "a}.png", "{" * 5000]
    assert arguments_of(tmp_path, *lines) == lines


def test_braces_of_a_list_are_expanded_only_as_far_as_needed(tmp_path):
    assert arguments_of(tmp_path, "{0..1" + "0" * 30 + "}.png")[-1] == "99.png"
