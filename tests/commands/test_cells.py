"""Cells of parquet files as Hugging Face and others write them, and columns that are kept."""

import uuid
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from pallas_patch_embed.embed import parquet, parquet_pages
from tests.commands.shard_folders import encoded, run, shards

pytestmark = pytest.mark.usefixtures("time_limit")

BINARY = pyarrow.binary()
STRUCT = pyarrow.struct({"bytes": BINARY, "path": pyarrow.string()})


def of_dictionary(kind):
    return pyarrow.dictionary(pyarrow.int32(), kind)


def write(path, columns, **options):
    with fsspec.open(str(path), "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return str(path)


def read(path, *arguments, **options):
    """Returns content or reason of each picture by the end of its id and by its row."""
    found: dict[tuple[str, Any], bytes | str] = {}
    for picture in parquet.Parquet(path, *arguments, **options).pictures():
        key = picture.id.removeprefix(path), picture.origin.row
        assert key not in found
        try:
            found[key] = picture.open(float("inf")).read()
        except (OSError, ValueError) as error:
            found[key] = str(error)
    return found


KINDS = [
    BINARY,
    pyarrow.large_binary(),
    pyarrow.binary(len(encoded(0))),
    of_dictionary(BINARY),
    pyarrow.struct({"bytes": BINARY}),
    pyarrow.struct({"path": pyarrow.string(), "bytes": pyarrow.large_binary()}),
    pyarrow.struct({"bytes": pyarrow.binary(len(encoded(0)))}),
    pyarrow.struct({"bytes": of_dictionary(BINARY)}),
]
if hasattr(pyarrow, "binary_view"):
    KINDS += [pyarrow.binary_view(), pyarrow.struct({"bytes": pyarrow.binary_view()})]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pictures_are_binary_of_any_type_or_structs(tmp_path, kind):
    contents = [encoded(0), encoded(1), None, encoded(0)]
    nested = pyarrow.types.is_struct(kind)
    cells = [c and {"bytes": c} for c in contents] if nested else contents
    try:
        path = write(tmp_path / "t.parquet", {"image": pyarrow.array(cells, kind)})
    except pyarrow.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow does not write this type")
    wanted = {(f"#{i}", str(i)): c or "its cell is empty" for i, c in enumerate(contents)}
    assert read(path) == wanted


LISTS = {
    "list of structs": pyarrow.list_(STRUCT),
    "list of binary": pyarrow.list_(BINARY),
    "large list": pyarrow.large_list(pyarrow.large_binary()),
    "large list of structs": pyarrow.large_list(STRUCT),
    "list of dictionaries": pyarrow.list_(of_dictionary(BINARY)),
    "fixed-size list": pyarrow.list_(BINARY, 2),
    "fixed-size list of structs": pyarrow.list_(STRUCT, 2),
}


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}], ids=["dictionary", "plain"])
@pytest.mark.parametrize("kind", LISTS)
def test_pictures_in_a_list_are_numbered_after_the_id_of_their_row(tmp_path, kind, options):
    rows = [[encoded(0), encoded(1)], [encoded(2), None]]
    wanted = {
        ("a/0", "0/0"): encoded(0),
        ("a/1", "0/1"): encoded(1),
        ("b/0", "1/0"): encoded(2),
        ("b/1", "1/1"): "its cell is empty",
    }
    if "fixed" not in kind:
        rows += [[], None, [encoded(3)]]
        wanted |= {("c", "2"): "its list is empty", ("d", "3"): "its cell is empty"}
        wanted |= {("e/0", "4/0"): encoded(3)}
    if "structs" in kind:
        rows = [row and [c and {"bytes": c} for c in row] for row in rows]
    columns = {"images": pyarrow.array(rows, LISTS[kind]), "id": list("abcde"[: len(rows)])}
    assert read(write(tmp_path / "t.parquet", columns, **options)) == wanted
    del columns["id"]
    assert read(write(tmp_path / "t.parquet", columns, row_group_size=2, **options)) == {
        (f"#{'abcde'.index(id[0])}{id[1:]}", row): content for (id, row), content in wanted.items()
    }


def test_a_list_that_repeats_a_value_of_a_dictionary_takes_little_memory(tmp_path):
    """4 GB of pictures in a file of less than 1 MB."""
    content = encoded(0).ljust(10**5)
    column = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 4 * 10**4], pyarrow.int32()),
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4 * 10**4, "int32"), [content]),
    )
    # With the types of Arrow in the file, pyarrow would not decode the dictionary in any case.
    path = write(tmp_path / "t.parquet", {"image": column}, store_schema=False)
    before, most = pyarrow.total_allocated_bytes(), 0
    for number, picture in enumerate(parquet.Parquet(path).pictures()):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        assert number % 10**4 or picture.open(float("inf")).read() == content
    assert number == 4 * 10**4 - 1 and most < 10**7


def test_lists_of_a_row_group_that_expand_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_pages, "MOST_PAGE", 2**20)
    column = pyarrow.array([[b"a"] * 10**5, [b"b"]], pyarrow.list_(BINARY))
    path = write(tmp_path / "t.parquet", {"image": column})
    ((why),) = read(path, most=2**20).values()
    assert "the lists of a row group in column 'image' have 3" in why
    assert f"bytes, more than --max-bytes {2**20}" in why


PLACES = ["{tmp}/below/t.parquet", "memory://cells/below/t.parquet"]


@pytest.mark.parametrize("nested", [False, True], ids=["struct", "list"])
@pytest.mark.parametrize("place", PLACES)
def test_a_cell_with_a_path_alone_is_the_file_beside_the_table(tmp_path, place, nested):
    place = place.format(tmp=tmp_path)
    fsspec.open(place, "wb", auto_mkdir=True).open().close()
    folder = place.removesuffix("/t.parquet")
    files = {f"{folder}/a.png": 0, f"{folder}/x/b c.png": 1, f"{folder[:-6]}/up.png": 2}
    files |= {f"{tmp_path}/absolute.png": 3, "memory://cells/elsewhere.png": 4}
    for name, i in files.items():
        with fsspec.open(name, "wb", auto_mkdir=True) as file:
            file.write(encoded(i))
    paths = ["a.png", "x/b c.png", "../up.png", f"{tmp_path}/absolute.png"]
    paths += ["memory://cells/elsewhere.png", "absent.png", None, "", "a\0b", "a.png"]
    cells = [{"bytes": None, "path": path} for path in paths]
    cells[9]["bytes"] = encoded(9)
    column = pyarrow.array(
        [[c] for c in cells] if nested else cells, pyarrow.list_(STRUCT) if nested else STRUCT
    )
    found = list(read(write(place, {"image": column}), most=1000).values())
    assert found[:5] == [encoded(i) for i in range(5)] and found[9] == encoded(9)
    assert found[6] == found[7] == "its cell is empty"
    for i, path in ((5, "absent.png"), (8, "a\\x00b")):
        assert (
            found[i].startswith("its cell names ") and f"{path}, which cannot be read" in found[i]
        )


def test_a_file_that_a_cell_names_is_regular_and_limited(tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(1001))
    cells = [{"bytes": None, "path": path} for path in ("large.png", "/dev/zero")]
    column = pyarrow.array(
        cells, pyarrow.struct({"bytes": pyarrow.null(), "path": pyarrow.string()})
    )
    large, device = read(write(tmp_path / "t.parquet", {"image": column}), most=1000).values()
    assert "it has 1001 bytes, more than --max-bytes 1000" in large
    assert device == "its cell names /dev/zero, which cannot be read: it is not a regular file"


@pytest.mark.parametrize(
    "columns, arguments, why",
    [
        ({"a": [1]}, (), r"no column of encoded pictures, expected binary, .* are a \(int64\)\.$"),
        ({"a": [{"bytes": {"bytes": b"x"}}]}, (), "no column of encoded pictures"),
        ({"a": [[[b"x"]]]}, (), "no column of encoded pictures"),
        ({"a": [b"x"], "b": [b"x"]}, (), "2 columns .* Choose one with --image-column"),
        ({"a": [b"x"], "b": ["x"]}, ("b",), "a column 'b' of type string, expected encoded pict"),
        ({"a": [b"x"]}, ("c",), r"no column 'c'; its columns are a \(binary\)\.$"),
        ({"a": [b"x"]}, ("a", "k"), r"no column 'k'; its columns are a \(binary\)\.$"),
        ({"a": [b"x"]}, ("a", None, 99, ("k",)), r"no column 'k'; its columns are a \(binary\)\.$"),
        ({"a": [b"x"], "id": [0.5], "b": ["y"]}, (), r"with --id-column: \['b'\]\.$"),
        ({"a": [b"x"], "id": [0.5]}, (), r"It has no other column of ids"),
    ],
)
def test_a_hint_can_be_followed(tmp_path, columns, arguments, why):
    path = write(tmp_path / "t.parquet", columns)
    with pytest.raises(parquet.ColumnsError, match=why):
        list(parquet.Parquet(path, *arguments).pictures())


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([[b"x"], [b"y"]], ["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    for name in (None, "a"):
        with pytest.raises(parquet.ColumnsError, match="2 columns"):
            list(parquet.Parquet(str(tmp_path / "t.parquet"), name).pictures())


def test_the_column_of_ids_and_of_UUIDs_is_not_taken_for_pictures(tmp_path):
    columns = {"key": [b"k"], "image": [encoded(0)]}
    columns["uuid"] = pyarrow.array([uuid.UUID(int=7).bytes], pyarrow.binary(16))
    path = write(tmp_path / "t.parquet", columns)
    assert read(path, None, "key") == {("k", "0"): encoded(0)}


# Columns that are kept.

WORDS = pyarrow.array(["x", None, "z"], of_dictionary(pyarrow.string()))
KEPT = {
    "caption": (["a", None, "c"], pyarrow.string()),
    "label": ([1, None, 3], pyarrow.int64()),
    "words": (WORDS, pyarrow.string()),
    "tags": ([["a", "b"], None, []], pyarrow.list_(pyarrow.string())),
    "record": ([{"x": "y", "n": 1}, None, {"x": None, "n": 2}], None),
    "vector": ([[1.0], [2.0], None], pyarrow.list_(pyarrow.float32())),
}


@pytest.mark.parametrize("place", ["{tmp}/t.parquet", "memory://kept/t.parquet"])
def test_values_of_columns_are_kept_with_their_types(tmp_path, place):
    arrays = {
        name: pyarrow.array(values, None if name == "words" else kind)
        for name, (values, kind) in KEPT.items()
    }
    path = write(
        place.format(tmp=tmp_path),
        {"image": [encoded(i) for i in range(3)]} | arrays,
        row_group_size=2,
    )
    unit = parquet.Parquet(path, keep=tuple(KEPT))
    kinds = unit.kept_types()
    assert list(kinds) == list(KEPT)
    for name, (_, kind) in KEPT.items():
        assert kinds[name] == (arrays[name].type if kind is None else kind)
    pictures = list(unit.pictures())
    for column, name in zip(zip(*(picture.kept for picture in pictures)), KEPT):
        assert pyarrow.array(column, kinds[name]).to_pylist() == arrays[name].to_pylist()
        assert all(value is None or value.is_valid for value in column)
    assert [p.entry.kept for p in pictures] == [p.kept for p in pictures]


def test_an_extension_is_kept_by_its_storage(tmp_path):
    if not hasattr(pyarrow, "uuid"):
        pytest.skip("this version of pyarrow has no UUIDs")
    value = uuid.UUID(int=7)
    columns = {"image": [b"x"], "key": pyarrow.array([value.bytes], pyarrow.uuid())}
    unit = parquet.Parquet(write(tmp_path / "t.parquet", columns), keep=("key",))
    assert unit.kept_types() == {"key": pyarrow.binary(16)}
    ((kept,),) = (picture.kept for picture in unit.pictures())
    assert kept.as_py() == value.bytes


def test_values_are_kept_for_each_picture_of_a_list_and_for_errors(tmp_path):
    columns = {"image": pyarrow.array([[b"a", None], []], pyarrow.list_(BINARY)), "n": [1, 2]}
    unit = parquet.Parquet(write(tmp_path / "t.parquet", columns), keep=("n",))
    assert [(p.origin.row, p.kept[0].as_py()) for p in unit.pictures()] == [
        ("0/0", 1),
        ("0/1", 1),
        ("1", 2),
    ]
    (tmp_path / "t.parquet").write_bytes(b"damaged")
    (picture,) = unit.pictures()
    assert picture.kept == (None,)
    with pytest.raises(OSError, match=r"t\.parquet cannot be read: its metadata are damaged"):
        unit.kept_types()


def test_the_pages_of_kept_columns_bound_the_rows_that_are_read_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_BYTES", 4 * 10**5)
    sizes, iterate = [], pyarrow.parquet.ParquetFile.iter_batches

    def recording(self, *arguments, **options):
        for batch in iterate(self, *arguments, **options):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", recording)
    columns = {"image": [b"x"] * 64, "text": ["y" * 10**5] * 64}
    path = write(tmp_path / "t.parquet", columns)
    list(parquet.Parquet(path).pictures())
    assert sizes == [64]
    sizes.clear()
    assert len(list(parquet.Parquet(path, keep=("text",)).pictures())) == 64
    assert max(sizes) == 3


def test_a_kept_list_that_repeats_a_value_of_a_dictionary_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_BYTES", 10**6)
    columns = {"image": [b"x"] * 2, "words": [["a" * 10**4] * n for n in (1, 1000)]}
    path = write(tmp_path / "t.parquet", columns)
    assert list(read(path, keep=("words",)).values())[-1].endswith(
        "kept lists have 10010000 bytes, expected at most 1000000"
    )


def test_memory_that_is_not_there_names_what_is_too_large(tmp_path, monkeypatch):
    def none(*arguments, **options):
        raise pyarrow.ArrowMemoryError("malloc failed")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", none)
    (why,) = read(write(tmp_path / "t.parquet", {"image": [bytes(1000)]})).values()
    assert "malloc failed. Write it with smaller row groups: a page or a list has 1004 bytes" in why


# Kept columns of all types.

WITH_NULLS = {
    "list": ([["x"], None, [], ["y", None]], None),
    "large": ([["x"], None, [], ["y", None]], pyarrow.large_list(pyarrow.string())),
    "fixed": ([["x", "y"], None, ["z", None], ["a", "b"]], pyarrow.list_(pyarrow.string(), 2)),
    "map": ([[("k", 1)], None, [], [("l", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "struct": ([{"a": 1}, None, {"a": None}, {"a": 2}], None),
    "time": ([1, None, 3, 4], pyarrow.timestamp("ns")),
    "nothing": ([None] * 4, None),
    "integer": ([1, None, 3, 4], None),
    "float": ([1.5, None, float("inf"), 0.1], pyarrow.float32()),
}


@pytest.mark.parametrize("kind", WITH_NULLS)
def test_columns_of_all_types_are_kept_with_missing_values(tmp_path, kind):
    values, type = WITH_NULLS[kind]
    column = pyarrow.array(values, type)
    table = pyarrow.table({"id": list("abcd"), "image": list(map(encoded, range(4))), "k": column})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert run([tmp_path / "t.parquet"], tmp_path / "out", keep=("k",)) == 0
    written = pyarrow.parquet.read_table(tmp_path / "out" / "embeddings")
    assert written["id"].to_pylist() == list("abcd")
    wanted = column.cast(pyarrow.string()) if kind == "nothing" else column
    assert written["k"].combine_chunks().equals(wanted)


def test_kept_values_of_another_type_are_converted_without_loss_or_refused(tmp_path):
    for name, column in (
        ("a", pyarrow.array([0.5, 1.0], pyarrow.float32())),
        ("b", pyarrow.array([0.25, 0.1], pyarrow.float64())),
        ("c", pyarrow.array([1, 2**60 + 1])),
    ):
        images = list(map(encoded, range(2)))
        table = pyarrow.table(
            {"id": [f"{name}{i}" for i in range(2)], "image": images, "k": column}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert run([tmp_path], tmp_path / "out", keep=("k",)) == 2
    columns = shards(tmp_path / "out")
    assert columns["id"] == ["a0", "a1", "b0", "c0"] and columns["k"] == [0.5, 1.0, 0.25, 1.0]
    errors = shards(tmp_path / "out", "__errors")
    assert errors["id"] == ["b1", "c1"]
    assert all("its column k cannot be converted to float" in why for why in errors["reason"])


def test_a_kept_value_has_a_limited_size(tmp_path):
    large = ["x" * 2**21, "y"]
    table = pyarrow.table({"id": ["a", "b"], "image": [encoded(0), encoded(1)], "k": large})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert run([tmp_path / "t.parquet"], tmp_path / "out", keep=("k",)) == 1
    assert shards(tmp_path / "out")["k"] == ["y"]


def test_a_later_file_without_the_columns_is_an_error_of_its_own(tmp_path):
    for name, column in (("a", "k"), ("b", "other"), ("c", "k")):
        table = pyarrow.table({"id": [name], "image": [encoded(ord(name))], column: ["x"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    assert run(paths, tmp_path / "out", keep=("k",)) == 1
    assert shards(tmp_path / "out")["id"] == ["a", "c"]
    (why,) = shards(tmp_path / "out", "__errors")["reason"]
    assert "has no column 'k'" in why
    with pytest.raises(parquet.ColumnsError, match="has no column 'k'"):
        run(paths[1:], tmp_path / "new", keep=("k",))
