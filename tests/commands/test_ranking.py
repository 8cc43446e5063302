"""The ranking of `search` is that of exact cosines, whatever program wrote the parquet files."""

import threading
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pallas_patch_embed.embed import npz, parquet_pages, place, ranking, written
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.provenance import Provenance, Settings
from pallas_patch_embed.embed.units import Entry, Origin
from tests.commands.shard_folders import opened
from tests.short_suite import keep

# Of float16 two pages have 684 rows, and in float32 pages end within rows.
D, ROWS = 768, 800

# Parquet files of other programs: options of `write_table`, and the type of an embedding.
OTHERS = {
    "snappy": (dict(compression="snappy"), None),
    "version 2": (dict(compression="none", data_page_version="2.0"), None),
    "dictionary": (dict(use_dictionary=True), None),
    "groups": (dict(compression="zstd", row_group_size=100), None),
    "split": (dict(compression="zstd", use_byte_stream_split=["embedding.list.element"]), None),
    "lists": ({}, pyarrow.list_(pyarrow.float32())),
    "float64": ({}, pyarrow.large_list(pyarrow.float64())),
}


def embeddings(dtype, rows=ROWS):
    return np.random.default_rng(0).normal(size=(rows, D)).astype(dtype)


def write(out, vectors, *, dtype="float16", parts=1):
    """Writes a folder with an embedding in each row, and returns its parts."""
    settings = Settings("", "", "", False, dtype)
    folder = opened(out, width=D, embedding_dtype=dtype)
    folder._provenance = Provenance("m", settings, Options(), 4, "cpu", lambda _: False)
    with folder:
        for part in np.array_split(np.arange(len(vectors)), parts):
            folder.add([entry(i) for i in part], vectors[part])
            folder.flush()
    return parts_of(out)


def parts_of(out):
    return written.Written.open(str(out)).parts


def entry(i):
    return Entry(f"{i}.png", Origin(f"/photos/{i}.png", "", 1, "now"))


def cosines(vectors, query):
    x, q = vectors.astype(np.float64), query.astype(np.float64)
    with np.errstate(all="ignore"):
        return (x @ q) / np.linalg.norm(x, axis=1) / np.linalg.norm(q)


def check(parts, vectors, top=7):
    """Checks the ranking for a vector; returns it."""
    query = np.random.default_rng(1).normal(size=D)
    found = ranking.nearest(parts, query, top)
    wanted = cosines(vectors, query)
    order = np.argsort(-wanted, kind="stable")[:top]
    entries = [one for f in found.found for one in parts[f["part"]].entries([int(f["row"])])]
    assert [(one.id, one.origin.source) for one in entries] == [
        (entry(i).id, entry(i).origin.source) for i in order
    ]
    # Each of D products and D sums in float32, twice, errs by 2^-24 of the sum of absolute values,
    # which is at most the product of the lengths.
    np.testing.assert_allclose(found.found["cosine"], wanted[order], rtol=0, atol=2 * D * 2**-24)
    assert found.searched == len(vectors)
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_cosines_of_all_shards_are_found(tmp_path, monkeypatch, dtype):
    vectors = embeddings(dtype)
    parts = write(tmp_path, vectors, dtype=dtype, parts=3)
    assert len(parts) == 3
    monkeypatch.setattr(written, "_vectors", pytest.fail)  # What `embed` writes needs no pyarrow.
    assert check(parts, vectors).directionless == 0
    whole = write(tmp_path / "whole", vectors, dtype=dtype)
    (read,) = whole[0].vectors()
    np.testing.assert_array_equal(read, vectors)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_only_vectors_in_float16_are_not_compressed(tmp_path, dtype):
    write(tmp_path, embeddings(dtype, 4), dtype=dtype)
    (path,) = (tmp_path / "embeddings").iterdir()
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    columns = map(group.column, range(group.num_columns))
    found = {column.path_in_schema: column.compression for column in columns}
    vectors = "UNCOMPRESSED" if dtype == "float16" else "ZSTD"
    assert found.pop("embedding.list.element") == vectors
    assert list(found.values()) == ["ZSTD"] * 5


@pytest.mark.parametrize("name", keep(OTHERS, ("snappy", "lists").__contains__, "other layouts"))
def test_shards_that_other_programs_wrote_are_read(tmp_path, name):
    options, kind = OTHERS[name]
    vectors = embeddings("float16")
    parts = write(tmp_path, vectors)
    (path,) = (tmp_path / "embeddings").iterdir()
    table = pyarrow.parquet.read_table(path)
    if kind is not None:
        values = pyarrow.array(vectors.astype(kind.value_type.to_pandas_dtype()).tolist(), kind)
        table = table.set_column(table.schema.get_field_index("embedding"), "embedding", values)
    pyarrow.parquet.write_table(table, path, **dict(use_dictionary=False) | options)
    check(parts, vectors)


def test_a_large_file_is_read_in_pieces(tmp_path, monkeypatch):
    vectors = embeddings("float16")
    parts = write(tmp_path, vectors)
    monkeypatch.setattr(written, "WHOLE", 1000)
    monkeypatch.setattr(written, "ROWS", 100)
    assert [len(piece) for piece in parts[0].vectors()] == [100] * 8
    check(parts, vectors)


def test_pictures_are_found_anywhere_in_a_file_of_many_rows(tmp_path):
    number = 3 * 2**16  # pyarrow reads 2^16 rows at a time.
    vectors = pyarrow.FixedSizeListArray.from_arrays(np.zeros(number, np.float16), 1)
    table = pyarrow.table({"id": np.arange(number).astype(str), "embedding": vectors})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    shard = written.Shard(str(tmp_path), place.place_of(str(tmp_path)), "a.parquet", 1)
    for rows in ([0], [number - 1], [5, 2**16 - 1, 2**16, number - 2]):
        assert [found.id for found in shard.entries(rows)] == list(map(str, rows))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_npz_file_is_read_in_pieces(tmp_path, monkeypatch, dtype):
    vectors = embeddings(dtype)
    provenance = Provenance(
        "m", Settings("", "", "", False, dtype), Options(), 4, "cpu", lambda _: False
    )
    with npz.Npz(tmp_path / "out.npz", provenance) as out:
        out.add([entry(i) for i in range(ROWS)], vectors)
        out.finish()
    monkeypatch.setattr(written, "ROWS", 300)
    parts = parts_of(tmp_path / "out.npz")
    assert [len(piece) for piece in parts[0].vectors()] == [300, 300, 200]
    check(parts, vectors)
    assert [each.id for each in parts[0].entries([3, 700])] == ["3.png", "700.png"]


def test_an_npz_file_in_another_order_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", embeddings=np.asfortranarray(embeddings("float32", 3)))
    with pytest.raises(ValueError, match="in Fortran's order"):
        list(written._Npz(str(tmp_path / "a.npz")).vectors())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_without_a_direction_are_left_out(tmp_path, dtype):
    vectors = embeddings(dtype, 20)
    vectors[[0, 7]], vectors[3, 5], vectors[4, 0], vectors[5] = 0, np.nan, np.inf, -np.inf
    found = check(write(tmp_path, vectors, dtype=dtype), vectors, top=15)
    assert found.directionless == 5 and len(found.found) == 15
    assert not {0, 3, 4, 5, 7} & set(found.found["row"].tolist())
    everything = ranking.nearest(parts_of(tmp_path), np.ones(D), 100)
    assert len(everything.found) == 15


def test_lengths_do_not_matter(tmp_path):
    vectors = embeddings("float32", 20)
    vectors *= np.float32(10.0) ** np.arange(-30, 30, 3)[:, None]
    check(write(tmp_path, vectors, dtype="float32"), vectors)


def test_ties_are_in_the_order_of_their_rows(tmp_path):
    vectors = np.repeat(embeddings("float16", 4), 5, axis=0)[[0, 5, 10, 15, *range(16)]]
    parts = write(tmp_path, vectors, parts=3)
    order = check(parts, vectors, top=20).found
    for equal in np.split(order, np.flatnonzero(np.diff(order["cosine"])) + 1):
        places = equal[["part", "row"]].tolist()
        assert places == sorted(places)


def test_few_files_are_read_at_a_time():
    """So the memory does not grow with the number of embeddings."""
    lock, active, most = threading.Lock(), 0, 0

    class Slow:
        def vectors(self):
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            time.sleep(0.005)
            yield np.ones((1, D), np.float16)
            with lock:
                active -= 1

    assert ranking.nearest([Slow()] * 40, np.ones(D), 3).searched == 40
    assert most <= ranking.THREADS


def test_damage_is_reported_with_the_name_of_the_file(tmp_path):
    parts = write(tmp_path, embeddings("float16"))
    (path,) = (tmp_path / "embeddings").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"embeddings/000000\.parquet cannot be read"):
        ranking.nearest(parts, np.ones(D), 3)


@pytest.mark.parametrize("lists", [[[1.0] * D, [1.0] * 3], [[1.0] * D, None]])
def test_embeddings_of_other_widths_are_refused(tmp_path, lists):
    parts = write(tmp_path, embeddings("float16", 2))
    (path,) = (tmp_path / "embeddings").iterdir()
    values = pyarrow.array(lists, pyarrow.list_(pyarrow.float32()))
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a", "b"], "embedding": values}), path)
    with pytest.raises(ValueError, match="do not have 768 elements"):
        ranking.nearest(parts, np.ones(D), 3)


def test_missing_numbers_are_not_a_number(tmp_path):
    vectors = embeddings("float16", 5)
    parts = write(tmp_path, vectors)
    (path,) = (tmp_path / "embeddings").iterdir()
    table = pyarrow.parquet.read_table(path)
    lists = vectors.tolist()
    lists[3][7] = None
    values = pyarrow.array(lists, pyarrow.list_(pyarrow.float16(), D))
    pyarrow.parquet.write_table(table.set_column(5, "embedding", values), path, compression="zstd")
    vectors[3, 7] = np.nan
    assert check(parts, vectors, top=4).directionless == 1


def test_pages_that_do_not_fit_are_left_to_pyarrow(tmp_path):
    values = np.empty(ROWS * D, np.float16)
    table = pyarrow.table({"x": pyarrow.array(np.arange(100, dtype=np.float16))})
    pyarrow.parquet.write_table(table, tmp_path / "x", use_dictionary=False, compression="none")
    content = (tmp_path / "x").read_bytes()
    column = pyarrow.parquet.ParquetFile(tmp_path / "x").metadata.row_group(0).column(0)
    begin, size = column.data_page_offset, column.total_compressed_size
    pages = memoryview(content)[begin : begin + size]
    assert not parquet_pages.plain_values(pages, lambda page, _: page, values)
