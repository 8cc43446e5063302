"""Parquet files of pictures, or of texts."""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import posixpath
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO

from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.lines import Lines
from pallas_patch_embed.embed.parquet_pages import VALUE, Largest, largest_pages
from pallas_patch_embed.embed.pictures import MOST_BYTES, LargerError, check_size, reason
from pallas_patch_embed.embed.units import (
    Files,
    Origin,
    Picture,
    Tar,
    is_url,
    named_origin,
    open_source,
    opened_origin,
    opener,
    readable,
    text,
    unreadable,
    unsigned,
)

# Largest size in bytes, and largest number, of the rows of a table that are read at a time.
ROWS_BYTES, ROWS = 2**27, 64

# A table may have MOST_ROWS rows and ROWS_A_BYTE for each of its bytes. Rows that are equal or
# empty need hardly any space in a file: 1 KB could have a billion of them.
MOST_ROWS, ROWS_A_BYTE = 2**20, 100


# Largest length of fixed-size lists. Even a list that is null may need room for all of its values.
MOST_LIST = 2**16

# What a column of pictures, and one of texts, may have.
EXPECTED = "binary, structs with a field `bytes`, or lists of these"
EXPECTED_TEXTS = "text, or lists of text"


class ColumnsError(ValueError):
    """A table does not have the columns that are needed."""


@dataclasses.dataclass(frozen=True)
class Parquet:
    """A parquet file with a column of encoded pictures.

    A picture is a cell of binary, or of structs with the fields `bytes` and perhaps `path`, as in
    Hugging Face's datasets. If `bytes` is null, the picture is the file at `path`, which is
    relative to the folder of the parquet file. A cell may also be a list of these. The pictures in
    a list have the ids `id/0`, `id/1` and so on, where `id` is the id of the row.

    Attributes:
      path: path on this machine, or a URL.
      image_column: name of the column of pictures; None for the only column of such a type. Columns
        of lists, and then columns of fixed-size binary, are used only if there is no other one.
      id_column: name of the column of ids; None for the column `id`. Without that column the ids
        are `path#row`.
      most: largest size of a picture in bytes.
      keep: names of the columns whose values are kept.
      texts: whether the file has texts in UTF-8 instead of pictures. Then `image_column` is the
        name of their column.
    """

    path: str
    image_column: str | None = None
    id_column: str | None = None
    most: int = MOST_BYTES
    keep: tuple[str, ...] = ()
    texts: bool = False

    def pictures(self) -> Iterator[Picture]:
        row, origin = 0, named_origin(self.path)
        largest = 0
        try:
            with contextlib.ExitStack() as stack:
                opened = stack.enter_context(open_source(self.path))
                origin = opened_origin(self.path, opened)
                file, groups, size = self._file(stack, opened)
                image, id = self.columns(file.schema_arrow)
                columns = list(dict.fromkeys([image, *([] if id is None else [id]), *self.keep]))
                lists = self._lists(file.schema, columns)
                as_text = str if id is None else _id_as_text(file.schema_arrow.field(id).type)
                assert as_text is not None  # `columns` has checked it.
                for group, largest_of in enumerate(groups):
                    # No cell is larger than its page, except lists.
                    largest = largest_of(columns, lists, self.most)
                    rows = max(1, min(ROWS, ROWS_BYTES // largest))
                    for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                        if row > MOST_ROWS + ROWS_A_BYTE * size:
                            raise ValueError(f"it has more than {ROWS_A_BYTE} rows in each byte")
                        ids = batch[id].to_pylist() if id is not None else itertools.repeat(None)
                        kept = [_kept_values(batch[name]) for name in self.keep]
                        for cell, key, *values in zip(batch[image], ids, *kept):
                            of_row = origin._replace(row=str(row))
                            of_kept = tuple(value if value.is_valid else None for value in values)
                            yield from self._row(cell, key, as_text, of_row, of_kept)
                            row += 1
        except ColumnsError:
            raise
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            why = f"the table cannot be read beyond row {row}: {reason(error)}"
            if isinstance(error, MemoryError):
                why += f". Write it with smaller row groups: a page or a list has {largest} bytes"
            yield unreadable(text(self.path), why, origin, (None,) * len(self.keep))

    def kept_types(self) -> dict[str, Any]:
        """Returns the types of the kept columns in Arrow, by name.

        Raises:
          ColumnsError: as for `columns`.
          OSError: the file cannot be read.
        """
        schema = self._schema()
        self.columns(schema)
        return {name: _kept_type(schema.field(name).type) for name in self.keep}

    def has_pictures(self) -> bool:
        """Returns whether the file has a column of pictures, or cannot be read."""
        try:
            found = self._candidates(self._schema())
        except OSError:
            return True
        return bool(found)

    def columns(self, schema: Any) -> tuple[str, str | None]:
        """Returns the names of the columns of pictures and of ids (None for no column of ids).

        Raises:
          ColumnsError: a column is missing or has a type that is not expected, two columns have the
            same name, or there are several columns of pictures.
        """
        path, names = printable(self.path), schema.names
        what, expected, option = "encoded pictures", EXPECTED, "--image-column"
        if self.texts:
            what, expected, option = "texts", EXPECTED_TEXTS, "--text-column"
        found = self._candidates(schema)
        image = self.image_column
        if image is None and len(found) != 1:
            if found:
                raise ColumnsError(
                    f"{path} has {len(found)} columns of {what}, {printable(found)}, expected one. "
                    f"Choose one with {option}."
                )
            raise ColumnsError(
                f"{path} has no column of {what}, expected {expected}; its columns are "
                f"{_described(schema)}."
            )
        image = found[0] if image is None else image
        id = self.id_column or ("id" if "id" in names else None)
        for name in (image, id, *self.keep):
            if name is not None and name not in names:
                raise ColumnsError(
                    f"{path} has no column {name!r}; its columns are {_described(schema)}."
                )
            if names.count(name) > 1:
                raise ColumnsError(
                    f"{path} has {names.count(name)} columns {name!r}, expected different names."
                )
        if not self._is_of(schema.field(image).type):
            raise ColumnsError(
                f"{path} has a column {image!r} of type {printable(schema.field(image).type)}, "
                f"expected {what}: {expected}; its columns of {what} are {printable(found)}."
            )
        if id is not None and _id_as_text(kind := schema.field(id).type) is None:
            others = [
                field.name
                for field in schema
                if _id_as_text(field.type) is not None and not _is_of_pictures(field.type)
            ]
            raise ColumnsError(
                f"{path} has ids of type {printable(kind)} in the column {id!r}, expected text, "
                "UTF-8 bytes, integers or UUIDs. "
                + (
                    f"Choose another column with --id-column: {printable(others)}."
                    if others
                    else "It has no other column of ids; without a column id the rows are counted."
                )
            )
        return image, id

    def _candidates(self, schema: Any) -> list[str]:
        """Returns the names of the columns that may be the column of pictures."""
        import pyarrow.types as types

        found: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for field in schema:
            is_id = field.name == (self.id_column or "id") and field.name != self.image_column
            if self._is_of(field.type) and not is_id:
                fixed = types.is_fixed_size_binary(field.type)
                found[2 if fixed else 1 if _is_list(field.type) else 0].append(field.name)
        if self.image_column is not None:
            return list(itertools.chain(*found.values()))
        return next(filter(None, found.values()), [])

    def _is_of(self, kind: Any) -> bool:
        return _is_of_texts(kind) if self.texts else _is_of_pictures(kind)

    def _schema(self) -> Any:
        try:
            with contextlib.ExitStack() as stack:
                opened = stack.enter_context(open_source(self.path))
                return self._file(stack, opened)[0].schema_arrow
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            raise OSError(f"{printable(self.path)} cannot be read: {reason(error)}") from error

    def _file(self, stack: contextlib.ExitStack, opened: Any) -> tuple[Any, list[Largest], int]:
        """Returns pyarrow's reader of an opened file, its row groups, and its size."""
        import pyarrow.parquet

        size = opened.seek(0, os.SEEK_END)
        groups = list(largest_pages(_reader(self.path, opened, size), size))
        if not is_url(self.path):
            # pyarrow itself reads files on this machine, so they are not copied to Python.
            # The name is passed as bytes, because it need not be UTF-8.
            opened = stack.enter_context(pyarrow.OSFile(os.fsencode(self.path)))
        # Without pre-buffering and with a buffer, pyarrow does not read all pictures of a row group
        # at once (apache/arrow#39808).
        options: dict[str, Any] = dict(buffer_size=2**20, pre_buffer=False)
        file = stack.enter_context(pyarrow.parquet.ParquetFile(opened, **options))
        # A list may repeat a value of a dictionary any number of times, so it is not decoded.
        lists = [c.path for c in _in_lists(file.schema) if c.physical_type == "BYTE_ARRAY"]
        if lists:
            options |= dict(read_dictionary=lists, metadata=file.metadata)
            file = stack.enter_context(pyarrow.parquet.ParquetFile(opened, **options))
        return file, groups, size

    def _lists(self, schema: Any, columns: Collection[str]) -> set[str]:
        """Returns the paths of the columns of parquet that are in lists."""
        found = set()
        for column in _in_lists(schema):
            name = column.path.split(".")[0]
            # Values of a fixed size are decoded, so a list may repeat one any number of times.
            is_fixed = column.physical_type == "FIXED_LEN_BYTE_ARRAY"
            if is_fixed and column.length > VALUE and name in columns:
                raise ColumnsError(
                    f"{printable(self.path)} has lists of fixed-size values of {column.length} "
                    f"bytes in the column {name!r}, expected at most {VALUE} bytes."
                )
            found.add(column.path)
        return found

    def _row(
        self,
        cell: Any,
        key: Any,
        as_text: Callable[[Any], str],
        origin: Origin,
        kept: tuple[Any, ...],
    ) -> Iterator[Picture]:
        """Yields the picture of a row, or those of its list."""
        import pyarrow

        id = f"{text(unsigned(self.path))}#{origin.row}"
        try:
            id = text(as_text(key)) if key is not None else id
        except UnicodeDecodeError:
            yield unreadable(id, "its id is neither text nor UTF-8 bytes", origin, kept)
            return
        if not isinstance(cell, pyarrow.ListScalar):
            yield self._picture(cell, id, origin, kept)
        elif not cell.is_valid:
            yield unreadable(id, "its cell is empty", origin, kept)
        elif not len(cell.values):
            yield unreadable(id, "its list is empty", origin, kept)
        else:
            for i, one in enumerate(cell.values):
                of_one = origin._replace(row=f"{origin.row}/{i}")
                yield self._picture(one, f"{id}/{i}", of_one, kept)

    def _picture(self, cell: Any, id: str, origin: Origin, kept: tuple[Any, ...]) -> Picture:
        path = None
        if cell.is_valid and hasattr(cell, "keys"):  # A struct.
            path = cell["path"].as_py() if "path" in cell else None
            cell = cell["bytes"]
        if cell.is_valid and hasattr(cell, "dictionary"):
            cell = cell.value
        if not cell.is_valid:
            if not (path and isinstance(path, str)):
                return unreadable(id, "its cell is empty", origin, kept)
            open_ = functools.partial(_open_beside, self.path, path, self.most)
            return readable(Picture(id, open_, None, origin, kept))
        buffer = cell.as_buffer()
        try:
            check_size(buffer.size, self.most)
        except ValueError as error:
            return unreadable(id, str(error), origin, kept)
        return readable(Picture(id, functools.partial(_cell, buffer), buffer.size, origin, kept))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _is_of_pictures(kind: Any) -> bool:
    """Returns whether a type of Arrow is one of pictures in `Parquet`."""
    import pyarrow.types as types

    if _is_list(kind):
        one = kind.value_type
        return (
            not (_is_list(one) or types.is_fixed_size_binary(one))
            and not (types.is_fixed_size_list(kind) and kind.list_size > MOST_LIST)
            and _is_of_pictures(one)
        )
    if types.is_struct(kind):
        # The index is -1 if there is no such field, or several.
        content, path = map(kind.get_field_index, ("bytes", "path"))
        if content < 0:
            return False
        kind = kind.field(content).type
        if types.is_null(kind):
            return path >= 0
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _is_of_texts(kind: Any) -> bool:
    """Returns whether a type of Arrow is one of texts in `Parquet`."""
    import pyarrow.types as types

    if _is_list(kind):
        return not _is_list(kind.value_type) and _is_of_texts(kind.value_type)
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _in_lists(schema: Any) -> list[Any]:
    """Returns the columns of parquet that are in lists, from a schema of parquet."""
    columns = map(schema.column, range(len(schema)))
    return [column for column in columns if column.max_repetition_level]


def _kept_type(kind: Any) -> Any:
    """Returns a type of Arrow without dictionaries and extensions."""
    import pyarrow
    import pyarrow.types as types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _kept_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _kept_type(kind.value_type)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_kept_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_kept_type(kind.key_type), _kept_type(kind.item_type))
    if _is_list(kind):
        field = kind.value_field.with_type(_kept_type(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pyarrow.list_(field, kind.list_size)
        large = types.is_large_list(kind) or types.is_large_list_view(kind)
        return pyarrow.large_list(field) if large else pyarrow.list_(field)
    # A column without values may get any in the next file.
    return pyarrow.string() if types.is_null(kind) else kind


def _kept_values(column: Any) -> Any:
    """Returns the values of a column without dictionaries and extensions."""
    kind = _kept_type(column.type)
    if kind == column.type:
        return column
    if (size := _decoded_size(column)) > ROWS_BYTES:
        raise ValueError(f"kept lists have {size} bytes, expected at most {ROWS_BYTES}")
    return column.cast(kind)


def _decoded_size(column: Any) -> int:
    """Returns the number of bytes of the values of a column whose dictionaries are decoded."""
    import pyarrow.compute as compute
    import pyarrow.types as types

    if types.is_dictionary(column.type):
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return compute.sum(lengths.cast("int64")).as_py() or 0
    if types.is_struct(column.type):
        return sum(map(_decoded_size, column.flatten()))
    return _decoded_size(column.flatten()) if _is_list(column.type) else column.nbytes


def pictures_of(unit: Files | Tar | Parquet | Lines) -> Iterator[Picture]:
    """Yields the pictures of a unit.

    A picture that cannot be opened stands for a table without the columns that are needed.
    """
    try:
        yield from unit.pictures()
    except ColumnsError as error:
        assert isinstance(unit, Parquet)
        yield unreadable(text(unit.path), str(error), named_origin(unit.path))


def _described(schema: Any) -> str:
    return printable(", ".join(f"{field.name} ({field.type})" for field in schema))


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

        def read_remote(position: int, size: int) -> bytes:
            size = min(size, end - position)
            content = fs.cat_file(name, start=position, end=position + size)
            if len(content) > size:
                raise OSError("its server does not send parts of files; download the file")
            return content

        return read_remote

    def read(position: int, size: int) -> bytes:
        file.seek(position)
        return file.read(size)

    return read


def _open_beside(table: str, path: str, most: int, reserved: float = math.inf) -> BinaryIO:
    """Opens the file that a cell of a table names."""
    if not (is_url(path) or os.path.isabs(path)):
        if table.startswith("http"):
            path = urllib.parse.urljoin(table, urllib.parse.quote(path))
        elif is_url(table):
            # What follows "::" is the place of the file system that contains the table.
            first, *rest = table.split("::")
            scheme, _, place = first.partition("://")
            place = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
            path = "::".join([f"{scheme}://{place}", *rest])
        else:
            path = os.path.join(os.path.dirname(table), path)
    try:
        return opener(path, most)(reserved)
    except LargerError:
        raise
    except Exception as error:  # Each package for URLs has its own kinds of errors.
        why = reason(error)
        raise OSError(f"its cell names {printable(path)}, which cannot be read: {why}") from error


def _cell(buffer: Any, reserved: float = math.inf) -> BinaryIO:
    return io.BytesIO(buffer.to_pybytes())
