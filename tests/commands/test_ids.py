"""Ids of pictures in parquet files, for every type of column."""

import uuid

import pyarrow
import pyarrow.parquet
import pytest

from pallas_patch_embed.embed import parquet, units
from tests.commands.shard_folders import encoded

UUIDS = [uuid.UUID(int=i << 100 | 7) for i in range(3)]
TEXTS = ["a", "b/c", "\u00e9"]
BYTES = [text.encode() for text in TEXTS]

# The values of a column, its type, and the ids.
COLUMNS = [
    (TEXTS, pyarrow.string(), TEXTS),
    (TEXTS, pyarrow.large_string(), TEXTS),
    (TEXTS, pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), TEXTS),
    (BYTES, pyarrow.binary(), TEXTS),
    (BYTES, pyarrow.large_binary(), TEXTS),
    (BYTES, pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()), TEXTS),
    ([u.bytes for u in UUIDS], pyarrow.binary(16), list(map(str, UUIDS))),
    ([-1, 0, 2**62], pyarrow.int64(), ["-1", "0", str(2**62)]),
    ([1, 2, 255], pyarrow.uint8(), ["1", "2", "255"]),
]
if hasattr(pyarrow, "uuid"):
    COLUMNS.append(([u.bytes for u in UUIDS], pyarrow.uuid(), list(map(str, UUIDS))))


def write(path, values, kind):
    # The image column is large, so that it cannot be taken for a column of ids.
    images = pyarrow.array([encoded(i) for i in range(len(values))], pyarrow.binary())
    ids = pyarrow.array(values, kind)
    pyarrow.parquet.write_table(pyarrow.table({"key": ids, "image": images}), path)
    return parquet.Parquet(str(path), "image", "key")


@pytest.mark.parametrize("values, kind, ids", COLUMNS, ids=lambda x: str(x).replace(" ", ""))
def test_ids_are_text(tmp_path, values, kind, ids):
    pictures = list(write(tmp_path / "t.parquet", values, kind).pictures())
    assert [picture.id for picture in pictures] == list(map(units.text, ids))
    assert [picture.open().read() for picture in pictures] == [encoded(i) for i in range(3)]


@pytest.mark.parametrize(
    "values, kind",
    [
        ([1.0, 2.0], pyarrow.float64()),
        ([True, False], pyarrow.bool_()),
        ([[1], [2]], pyarrow.list_(pyarrow.int64())),
        ([{"a": 1}, {"a": 2}], pyarrow.struct({"a": pyarrow.int64()})),
        ([b"12345678", b"12345679"], pyarrow.binary(8)),
        ([1, 2], pyarrow.timestamp("s")),
        ([1, 2], pyarrow.decimal128(5)),
    ],
    ids=str,
)
def test_columns_of_other_types_are_refused_by_name_and_type(tmp_path, values, kind):
    message = r"has ids of type .* in the column 'key', expected text, UTF-8 bytes, integers"
    with pytest.raises(parquet.ColumnsError, match=message) as error:
        list(write(tmp_path / "t.parquet", values, kind).pictures())
    name = str(kind).split("(")[0].split("<")[0].split("[")[0]
    assert name in str(error.value)


def test_an_id_of_other_bytes_is_an_error_of_its_picture(tmp_path):
    values = [b"a", b"\xff", None]
    first, second, third = write(tmp_path / "t.parquet", values, pyarrow.binary()).pictures()
    assert first.id == "a" and first.open().read() == encoded(0)
    assert second.id == third.id.replace("#2", "#1") == f"{tmp_path}/t.parquet#1"
    with pytest.raises(Exception, match="its id is neither text nor UTF-8 bytes"):
        second.open()
    assert third.open().read() == encoded(2)
