"""Pages of a parquet file: their sizes, and the numbers in those of embeddings.

pyarrow reads a page as a whole, however small a part of it is needed, and a compressed page may be
thousands of times as large as in the file. Only the pages' headers tell these sizes, in Thrift's
compact protocol. The footer, which says where the pages are, is read here too, because pyarrow ends
the process if it asks for a column whose metadata are damaged.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

# Largest size of the footer and of the header of a page in bytes, and the number of bytes that are
# read for a header at first. Headers with statistics can be long.
MOST_HEADER, HEADER = 2**24, 2**9

# Size in bytes that a page may have in any case. A larger page may be RATIO times as large as in
# the file, because encoded pictures hardly get smaller.
MOST_PAGE, RATIO = 2**30, 16

# Number of bytes that a value in a list needs in memory besides its content: an offset, an index,
# its validity, or a number.
VALUE = 32

# Function (columns, lists, most) -> the number of bytes that a row of a row group may need, when it
# is decompressed. `columns` are names, of structs too; `lists` are the paths of the columns that
# are in lists, such as "images.list.element.bytes"; `most` is the largest size of a picture.
type Largest = Callable[[Collection[str], Collection[str], int], int]

# Function (position, size) -> up to `size` bytes.
type Read = Callable[[int, int], bytes]

_DAMAGED = "its metadata are damaged"


def largest_pages(read: Read, size: int) -> Iterator[Largest]:
    """Yields a function for each row group of a file of `size` bytes.

    The function returns the size of the largest page. A single list may have all pages of its row
    group, so together they are limited like a page; its size is assumed to be the mean. The
    function raises ValueError if a page is too large or its header is damaged.

    Raises:
      ValueError: the footer is too large or damaged.
    """
    end = read(size - 8, 8) if size > 12 else b""
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > size - 12:
        raise ValueError(_DAMAGED)
    if length > MOST_HEADER:
        raise ValueError(f"its metadata have {length} bytes, expected at most {MOST_HEADER}")
    footer, _ = _struct(read(size - 8 - length, length), 0)
    for group in _list(footer, 4):
        chunks = [_chunk(column) for column in _list(group, 1)]

        rows = group.get(3)

        def largest(
            columns: Collection[str],
            lists: Collection[str],
            most: int,
            chunks: Any = chunks,
            rows: int = rows if isinstance(rows, int) and rows > 0 else 1,
        ) -> int:
            found = 1
            for path, begin, end in chunks:
                if path[0] not in columns and ".".join(path) not in columns:
                    continue
                pages = _pages(read, begin, end)
                if is_list := ".".join(path) in lists:
                    pages = iter([_sum(pages)])
                for page, compressed, _ in pages:
                    if page > max(most, MOST_PAGE, RATIO * compressed):
                        what = "the lists of a row group in" if is_list else "a page of"
                        raise ValueError(
                            f"{what} column {path[0]!r} {'have' if is_list else 'has'} {page} "
                            f"bytes, more than --max-bytes {max(most, MOST_PAGE)}"
                        )
                    found = max(found, page // rows if is_list else page)
            return found

        yield largest


def plain_values(
    content: memoryview, decompress: Callable[[memoryview, int], Any], values: np.ndarray
) -> bool:
    """Copies the numbers in the pages of a column of lists, which have equal lengths.

    If a list or a number is missing, the column has fewer numbers than it counts.

    Args:
      content: the pages.
      decompress: function (page, size) that decompresses a page to `size` bytes.
      values: array [n] for all numbers of the column.

    Returns:
      Whether these are n numbers, none of them missing, in pages of version 1 and in the encoding
      PLAIN. Otherwise `values` is undefined.

    Raises:
      ValueError: a header is damaged.
    """

    def read(position: int, size: int) -> bytes:
        return bytes(content[position : position + size])

    at = position = 0
    while position < len(content):
        fields, length = _header(read, position)
        begin, head = position + length, fields.get(5)
        size, position = fields.get(2), begin + fields.get(3, 0)
        if not (isinstance(head, dict) and head.get(2) == 0 and isinstance(size, int)):
            return False
        page = memoryview(decompress(content[begin:position], size))
        for _ in range(2):  # The lengths of lists, and which numbers are missing.
            page = page[4 + int.from_bytes(page[:4], "little") :]
        end = at + head.get(1, 0)
        if end > len(values) or page.nbytes != (end - at) * values.itemsize:
            return False
        values[at:end] = np.frombuffer(page, values.dtype)
        at = end
    return at == len(values)


def _chunk(column: Any) -> tuple[list[str], int, int]:
    """Returns the path of a column, and where its pages begin and end in the file."""
    metadata = column.get(3) if isinstance(column, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError(_DAMAGED)
    path = [name.decode(errors="replace") for name in _list(metadata, 3) if isinstance(name, bytes)]
    first, size = metadata.get(9), metadata.get(7)
    if not (path and isinstance(first, int) and isinstance(size, int)):
        raise ValueError(_DAMAGED)
    dictionary = metadata.get(11)
    # A column without rows may have a dictionary, but no other page.
    if isinstance(dictionary, int) and 0 < dictionary and (dictionary < first or not first):
        first = dictionary
    return path, first, first + size


def _list(fields: Any, field: int) -> list[Any]:
    found = fields.get(field) if isinstance(fields, dict) else None
    if not isinstance(found, list):
        raise ValueError(_DAMAGED)
    return found


def _sum(pages: Iterator[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Returns the sums for the pages of a column in lists, whose values need additional memory."""
    size, compressed, values = map(sum, zip((0, 0, 0), *pages))
    return size + VALUE * values, compressed, values


def _pages(read: Read, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the size of each page of a column, decompressed and in the file, and its values."""
    while 0 <= position < end:
        fields, length = _header(read, position)
        size, compressed = fields.get(2), fields.get(3)
        if not (isinstance(size, int) and isinstance(compressed, int)) or min(size, compressed) < 0:
            raise ValueError(_DAMAGED)
        # A page of data, of a dictionary, or of data in version 2.
        heads = [fields[i] for i in (5, 7, 8) if isinstance(fields.get(i), dict)]
        values = heads[0].get(1) if heads else None
        yield size, compressed, values if isinstance(values, int) and values > 0 else 0
        position += length + compressed


def _header(read: Read, position: int) -> tuple[dict[int, Any], int]:
    """Reads the header at this position; returns its fields and its length."""
    room = HEADER
    while True:
        content = read(position, room)
        try:
            return _struct(content, 0)
        except ValueError:
            if len(content) < room or room >= MOST_HEADER:
                raise
            room *= 32


def _struct(content: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Reads a struct; returns its fields by their numbers, and the position of its end."""
    fields: dict[int, Any] = {}
    field = 0
    while kind := _byte(content, at):
        at += 1
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _integer(content, at)
        # A Boolean field has no value, because its type says it.
        if kind & 15 > 2:
            fields[field], at = _value(content, at, kind & 15, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Reads a value of a type that is no Boolean: an int, bytes, a list, or a dict for a struct."""
    if depth > 20:
        raise ValueError(_DAMAGED)
    if kind in (4, 5, 6):
        return _integer(content, at)
    if kind == 8:
        size, at = _varint(content, at)
        if size > len(content) - at:
            raise ValueError(_DAMAGED)
        return content[at : at + size], at + size
    if kind in (9, 10):
        size, kind = _byte(content, at) >> 4, content[at] & 15
        at += 1
        if size == 15:
            size, at = _varint(content, at)
        if size > len(content) - at:  # An element has at least a byte.
            raise ValueError(_DAMAGED)
        values = []
        for _ in range(size):
            value, at = _value(content, at, 3 if kind < 3 else kind, depth + 1)
            values.append(value)
        return values, at
    if kind == 12:
        return _struct(content, at, depth + 1)
    if kind in (3, 7):
        return None, at + (1 if kind == 3 else 8)
    raise ValueError(_DAMAGED)  # Parquet has no maps.


def _byte(content: bytes, at: int) -> int:
    if at >= len(content):
        raise ValueError(_DAMAGED)
    return content[at]


def _integer(content: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(content, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = _byte(content, at)
        number, at = number | (byte & 127) << shift, at + 1
        if byte < 128:
            return number, at
    raise ValueError(_DAMAGED)
