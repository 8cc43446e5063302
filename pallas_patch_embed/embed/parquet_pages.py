"""Sizes of the pages of a parquet file.

pyarrow reads a page as a whole, however small a part of it is needed, and a compressed page may be
thousands of times as large as in the file. Only the pages' headers tell these sizes, in Thrift's
compact protocol.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Number of bytes that are read for a header at first, and at most. Headers with statistics can be
# long.
HEADER, MOST_HEADER = 2**9, 2**24

# A page of more than `most` bytes may be this many times as large as in the file. Encoded pictures
# hardly get smaller.
RATIO = 16

# Function (position, size) -> up to `size` bytes.
type Read = Callable[[int, int], bytes]

# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def largest_page(read: Read, group: Any, columns: Sequence[str], most: int) -> int:
    """Returns the size of the largest page in some columns of a row group, when decompressed.

    Args:
      read: function that reads a part of the file.
      group: a pyarrow.parquet.RowGroupMetaData.
      columns: names of columns, which may be structs.
      most: number of bytes above which a page must not be much larger than in the file.

    Raises:
      ValueError: a page is too large.
      EOFError: a header is damaged.
    """
    largest = 1
    for i in range(group.num_columns):
        column = group.column(i)
        path = column.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            for size, compressed in _pages(read, column):
                if size > max(most, RATIO * compressed):
                    raise ValueError(
                        f"a page of column {path!r} has {size} bytes, more than --max-bytes {most}"
                    )
                largest = max(largest, size)
    return largest


def _pages(read: Read, column: Any) -> Iterator[tuple[int, int]]:
    """Yields the size of each page of a column, decompressed and in the file."""
    position = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        position = min(position, column.dictionary_page_offset)
    end = position + column.total_compressed_size
    while position < end:
        fields, length = _header(read, position)
        size, compressed = fields.get(2, -1), fields.get(3, -1)
        if size < 0 or compressed < 0:
            raise EOFError("the header of a page is damaged")
        yield size, compressed
        position += length + compressed


def _header(read: Read, position: int) -> tuple[dict[int, int], int]:
    """Reads the integers of the header at this position, and its length."""
    room = HEADER
    while True:
        content = read(position, room)
        try:
            return _struct(content, 0)
        except IndexError:
            if len(content) < room or room >= MOST_HEADER:
                raise EOFError("the header of a page is damaged") from None
            room *= 32


def _struct(content: bytes, at: int) -> tuple[dict[int, int], int]:
    """Reads a struct; returns its integers by field, and the position of its end."""
    fields: dict[int, int] = {}
    field = 0
    while kind := content[at]:
        at += 1
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _integer(content, at)
        value, at = _value(content, at, kind & 15)
        fields[field] = value
    return fields, at + 1


def _value(content: bytes, at: int, kind: int) -> tuple[int, int]:
    """Reads a value that follows a field's type; returns it if it is an integer, otherwise 0."""
    if kind in (_TRUE, _FALSE):
        return 0, at
    if kind in (_I16, _I32, _I64):
        return _integer(content, at)
    if kind in (_BYTE, _DOUBLE):
        return 0, at + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        size, at = _varint(content, at)
        return 0, at + size
    if kind == _STRUCT:
        return 0, _struct(content, at)[1]
    # A header of a page has no list, set or map.
    raise EOFError("the header of a page is damaged")


def _integer(content: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(content, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while content[at] & 128:
        if shift > 63:
            raise EOFError("the header of a page is damaged")
        number |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return number | content[at] << shift, at + 1
