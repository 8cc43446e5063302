"""Parquet files of pictures."""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from pallas_patch_embed.embed.parquet_pages import largest_pages
from pallas_patch_embed.embed.pictures import MOST_BYTES, check_size, reason
from pallas_patch_embed.embed.units import (
    Origin,
    Picture,
    is_url,
    open_source,
    opened_origin,
    readable,
    text,
    unreadable,
)
from pallas_patch_embed.messages import printable

# Largest size in bytes, and largest number, of the rows of a table that are read at a time.
ROWS_BYTES, ROWS = 2**27, 64

# A table may have MOST_ROWS rows and ROWS_A_BYTE for each of its bytes. Rows that are equal or
# empty need hardly any space in a file: 1 KB could have a billion of them.
MOST_ROWS, ROWS_A_BYTE = 2**20, 100


class ColumnsError(ValueError):
    """A table does not have the columns that are needed."""


@dataclasses.dataclass(frozen=True)
class Parquet:
    """A parquet file with a column of encoded pictures.

    Attributes:
      path: path on this machine, or a URL.
      image_column: name of the column of pictures: binary, or structs with a field `bytes`, as in
        Hugging Face's datasets. None for the only column of such a type.
      id_column: name of the column of ids; None for the column `id`. Without that column the ids
        are `path#row`.
      most: largest size of a picture in bytes.
    """

    path: str
    image_column: str | None = None
    id_column: str | None = None
    most: int = MOST_BYTES

    def pictures(self) -> Iterator[Picture]:
        import pyarrow.parquet

        row, origin = 0, Origin(text(self.path))
        try:
            with contextlib.ExitStack() as stack:
                opened: Any = stack.enter_context(open_source(self.path))
                origin = opened_origin(self.path, opened)
                size = opened.seek(0, os.SEEK_END)
                groups = list(largest_pages(_reader(self.path, opened, size), size))
                if not is_url(self.path):
                    # pyarrow itself reads files on this machine, so they are not copied to Python.
                    # The name is passed as bytes, because it need not be UTF-8.
                    opened = stack.enter_context(pyarrow.OSFile(os.fsencode(self.path)))
                # With a buffer, pyarrow does not read all pictures of a row group at once.
                file = stack.enter_context(pyarrow.parquet.ParquetFile(opened, buffer_size=2**20))
                image, id = self.columns(file.schema_arrow)
                columns = [image] if id is None else [image, id]
                as_text = str if id is None else _id_as_text(file.schema_arrow.field(id).type)
                assert as_text is not None  # `columns` has checked it.
                for group, largest in enumerate(groups):
                    # No cell is larger than its page.
                    rows = max(1, min(ROWS, ROWS_BYTES // largest(columns, self.most)))
                    for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                        if row > MOST_ROWS + ROWS_A_BYTE * size:
                            raise ValueError(f"it has more than {ROWS_A_BYTE} rows in each byte")
                        ids = batch[id].to_pylist() if id is not None else itertools.repeat(None)
                        for content, key in zip(batch[image], ids):
                            of_row = origin._replace(row=str(row))
                            yield self._picture(content, key, as_text, of_row)
                            row += 1
        except ColumnsError:
            raise
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            why = f"the table cannot be read beyond row {row}: {reason(error)}"
            yield unreadable(text(self.path), why, origin)

    def columns(self, schema: Any) -> tuple[str, str | None]:
        """Returns the names of the columns of pictures and of ids (None for no column of ids).

        Raises:
          ColumnsError: a column is missing, there are several columns of pictures, or the ids have
            another type than those of `_id_as_text`.
        """
        import pyarrow.types as types

        def has_bytes(kind: Any) -> bool:
            if types.is_struct(kind):
                return any(field.name == "bytes" and has_bytes(field.type) for field in kind)
            return types.is_binary(kind) or types.is_large_binary(kind)

        found = [field.name for field in schema if has_bytes(field.type)]
        image = self.image_column
        if image is None and len(found) != 1:
            raise ColumnsError(
                f"{printable(self.path)} has {len(found)} columns of encoded pictures, "
                f"{printable(found)}, expected one. Choose one with --image-column."
            )
        if image is not None and image not in found:
            raise ColumnsError(
                f"{printable(self.path)} has no column {image!r} of encoded pictures; its columns "
                f"of encoded pictures are {printable(found)}."
            )
        id = self.id_column or ("id" if "id" in schema.names else None)
        if id is not None and id not in schema.names:
            raise ColumnsError(
                f"{printable(self.path)} has no column {id!r}; its columns are "
                f"{printable(schema.names)}."
            )
        if id is not None and _id_as_text(kind := schema.field(id).type) is None:
            raise ColumnsError(
                f"{printable(self.path)} has ids of type {printable(kind)} in the column {id!r}, "
                "expected text, UTF-8 bytes, integers or UUIDs. Choose another column with "
                "--id-column."
            )
        return image or found[0], id

    def _picture(
        self, content: Any, key: Any, as_text: Callable[[Any], str], origin: Origin
    ) -> Picture:
        id = f"{text(self.path)}#{origin.row}"
        try:
            id = text(as_text(key)) if key is not None else id
        except UnicodeDecodeError:
            return unreadable(id, "its id is neither text nor UTF-8 bytes", origin)
        if hasattr(content, "keys"):  # A struct.
            content = content["bytes"] if content.is_valid else content
        if not content.is_valid:
            return unreadable(id, "its cell is empty", origin)
        buffer = content.as_buffer()
        try:
            check_size(buffer.size, self.most)
        except ValueError as error:
            return unreadable(id, str(error), origin)
        return readable(Picture(id, functools.partial(_cell, buffer), buffer.size, origin))


def _id_as_text(kind: Any) -> Callable[[Any], str] | None:
    """Returns the function that makes the text of an id; None for types that are no ids.

    Args:
      kind: the type of the column in Arrow.
    """
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind) or str(kind) == "extension<arrow.uuid>":
        return str  # A UUID is a uuid.UUID in Python.
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return str
    if types.is_fixed_size_binary(kind) and kind.byte_width == 16:
        return lambda key: str(uuid.UUID(bytes=key))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return lambda key: key.decode()
    return None


def _reader(path: str, file: BinaryIO, end: int) -> Callable[[int, int], bytes]:
    """Returns a function (position, size) that reads a small part of a file of `end` bytes.

    It reads little more, unlike files at URLs, which are read ahead.
    """
    if is_url(path):
        import fsspec

        fs, name = fsspec.url_to_fs(path)
        return lambda position, size: fs.cat_file(
            name, start=position, end=min(position + size, end)
        )

    def read(position: int, size: int) -> bytes:
        file.seek(position)
        return file.read(size)

    return read


def _cell(buffer: Any, reserved: float = math.inf) -> BinaryIO:
    return io.BytesIO(buffer.to_pybytes())
