"""Sources of pictures: files, folders, lists, WebDataset tars and parquet files, local or remote.

`find` turns the arguments of the command into units, which can be pickled: `Files`, `Tar` and
`Parquet`. A unit's `pictures()` yields its pictures. The processes or Ray tasks that decode the
pictures open their contents. The memory that this module uses does not grow with the number of
pictures, and a file of a stranger cannot make it grow: every content is limited to `most` bytes,
and is read only when it is asked for.
"""

import contextlib
import dataclasses
import functools
import glob
import io
import itertools
import math
import os
import posixpath
import re
import stat
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pallas_patch_embed.embed import braces, tars
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.parquet_pages import largest_pages
from pallas_patch_embed.embed.pictures import (
    MOST_BYTES,
    LargerError,
    Open,
    check_room,
    check_size,
    extensions,
    reason,
)
from pallas_patch_embed.files import open_regular
from pallas_patch_embed.messages import printable

# Number of files in a unit. It is large enough that the overhead of a unit does not matter, and
# small enough that a run has many units.
FILES_PER_UNIT = 256

# Largest number of characters of an argument, and of an id. Paths on Linux have at most 4096 bytes,
# and keys are much shorter.
LONGEST = 2**14

# Largest number of arguments that a message names.
MOST_NAMED = 5

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

# Largest size in bytes, and largest number, of the rows of a table that are read at a time.
ROWS_BYTES, ROWS = 2**27, 64

# A table may have MOST_ROWS rows and ROWS_A_BYTE for each of its bytes. Rows that are equal or
# empty need hardly any space in a file: 1 KB could have a billion of them.
MOST_ROWS, ROWS_A_BYTE = 2**20, 100


class SourceEndsError(Exception):
    """A source cannot be read beyond this content. Its `pictures()` says why."""


class Picture(NamedTuple):
    """An encoded picture.

    Attributes:
      id: the picture's path, URL, key in a WebDataset, or id in a table.
      open: function that opens the picture for reading, or raises the reason why it cannot be read.
      size: None if `open` is picklable and works at any time. Otherwise `open` reads this number of
        bytes, and works only until the next picture is requested.
    """

    id: str
    open: Open
    size: int | None = None

    def kept(self) -> Open:
        """Returns a picklable function that opens the picture at any time.

        If `size` is not None, this reads the content, and the function keeps it in memory.

        Raises:
          SourceEndsError: the content cannot be read to its end.
        """
        return self.open if self.size is None else Content(self.open(self.size).read())


@dataclasses.dataclass(frozen=True)
class Content:
    """Opens content that is in memory."""

    content: bytes

    def __call__(self, reserved: float = math.inf) -> BinaryIO:
        return io.BytesIO(self.content)


def text(path: str | os.PathLike[str]) -> str:
    """Returns a path as valid Unicode, which parquet needs, with invalid bytes escaped."""
    return os.fspath(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


def readable(id: str, open_: Open, size: int | None = None) -> Picture:
    """Makes a picture, or one that cannot be opened if its id is too long for an output."""
    if len(id) > LONGEST:
        why = f"its id has {len(id)} characters, expected at most {LONGEST}"
        return Picture(f"{id[:200]}...", functools.partial(_fail, why))
    return Picture(id, open_, size)


def unreadable(id: str, reason: str) -> Picture:
    """Makes a picture that cannot be opened, for this reason."""
    return readable(id, functools.partial(_fail, reason))


def _fail(reason: str, reserved: float = math.inf) -> BinaryIO:
    raise OSError(reason)


def is_url(path: str) -> bool:
    """Returns whether `path` is a URL. Otherwise it is a path on this machine."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Converts the exceptions of packages for URLs to an OSError that names the URL."""
    try:
        yield
    except ImportError:
        raise  # It says what to install.
    except Exception as error:
        why = printable(reason(error))
        raise OSError(f"{printable(url)} cannot be reached: {why}") from error


def open_source(path: str) -> BinaryIO:
    """Opens a file on this machine or at a URL."""
    if not is_url(path):
        return open_regular(path)
    import fsspec

    return fsspec.open(path, "rb").open()


@dataclasses.dataclass(frozen=True)
class Files:
    """Picture files.

    Attributes:
      paths: paths on this machine, or URLs.
      reasons: for each path the reason why it cannot be read, or "".
      most: largest size of a picture in bytes.
    """

    paths: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    most: int = MOST_BYTES

    def pictures(self) -> Iterator[Picture]:
        for path, why in itertools.zip_longest(self.paths, self.reasons, fillvalue=""):
            if why:
                yield unreadable(text(path), why)
            elif is_url(path):
                yield Picture(text(path), functools.partial(_fetch, path, self.most))
            else:
                yield Picture(text(path), functools.partial(_open_file, path, self.most))


def _open_file(path: str, most: int, reserved: float = math.inf) -> BinaryIO:
    file = open_regular(path)
    try:
        check_size(os.fstat(file.fileno()).st_size, most)
    except ValueError:
        file.close()
        raise
    return file


def _fetch(url: str, most: int, reserved: float = math.inf) -> BinaryIO:
    """Reads the content at a URL, but no more than is reserved for it."""
    import fsspec

    fs, path = fsspec.url_to_fs(url)
    web = url.startswith("http")
    size = None if web else fs.size(path)
    if size is not None:
        check_size(size, most)
        check_room(size, reserved)
        return io.BytesIO(fs.cat_file(path, start=0, end=size) if size else b"")
    # A web server may send more than it announces, and more than the part that is requested. These
    # options avoid a request for the size.
    with fs.open(path, **(dict(block_size=0, size=1) if web else {})) as file:
        content = _read(file, int(min(reserved, most)) + 1)
    check_size(len(content), most)
    if len(content) > reserved:
        raise LargerError(min(2 * len(content), most))
    return io.BytesIO(content)


def _read(file: Any, size: int) -> bytes:
    """Reads up to `size` bytes of a stream, whose `read` may return fewer."""
    content = io.BytesIO()
    while (rest := size - content.tell()) and (piece := file.read(rest)):
        content.write(piece)
    return content.getvalue()


class _Version(NamedTuple):
    """The size of a file and the time of its last change, which tell whether it was changed."""

    size: int
    changed_ns: int


def _version(file: BinaryIO) -> _Version:
    status = os.fstat(file.fileno())
    return _Version(status.st_size, status.st_mtime_ns)


@dataclasses.dataclass(frozen=True)
class Tar:
    """A tar of pictures, for example a shard of a WebDataset.

    The id of a member is its key, its name without the extension. Hidden members, and members
    without the extension of a picture, are skipped: they are other columns of the dataset. The
    order of the members does not matter.

    Attributes:
      path: path on this machine, or a URL.
      most: largest size of a picture in bytes.
    """

    path: str
    most: int = MOST_BYTES

    def pictures(self) -> Iterator[Picture]:
        wanted = extensions()
        try:
            with open_source(self.path) as file:
                blocks, version = self._blocks(file)
                for member in tars.members(blocks):
                    # PurePosixPath removes "./" and repeated slashes.
                    key, extension = posixpath.splitext(PurePosixPath(member.name))
                    if extension.lower() not in wanted or posixpath.basename(key).startswith("."):
                        continue
                    id = text(key)
                    if member.kind in tars.LINKS:
                        link = text(member.link)[:200]
                        yield unreadable(id, f"it is a link to {link} in a tar")
                    elif member.kind == tars.FILE:
                        yield self._member(id, blocks, member, version)
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield unreadable(text(self.path), f"the tar cannot be read to its end: {reason(error)}")

    def _blocks(self, file: BinaryIO) -> tuple[tars.Blocks, _Version | None]:
        """Returns the bytes of the tar, and its version if they can be read in any order."""
        if is_url(self.path):
            return tars.Streamed(file), None
        compressed = tars.is_compressed(file.read(10))
        file.seek(0)
        return (tars.Streamed(file), None) if compressed else (tars.Plain(file), _version(file))

    def _member(
        self, id: str, blocks: tars.Blocks, member: tars.Member, version: _Version | None
    ) -> Picture:
        """Makes the picture in a member.

        The contents of a plain tar, which has a version, are read only when they are decoded.
        """
        try:
            check_size(member.size, self.most)
        except ValueError as error:
            return unreadable(id, str(error))
        if version is None or member.parts is not None:
            return readable(id, functools.partial(_content, blocks, member), member.size)
        if member.position + member.stored > version.size:
            raise EOFError("its end is missing")
        part = functools.partial(_part, self.path, version, member.position, member.size)
        return readable(id, part)


def _content(blocks: tars.Blocks, member: tars.Member, reserved: float = math.inf) -> BinaryIO:
    """Reads the content of the member that was yielded last."""
    try:
        return io.BytesIO(tars.content(blocks, member))
    except Exception as error:  # Each package for URLs has its own kinds of errors.
        raise SourceEndsError(reason(error)) from error


def _part(
    path: str, version: _Version, offset: int, size: int, reserved: float = math.inf
) -> BinaryIO:
    """Reads a part of a file on this machine."""
    check_room(size, reserved)
    with open(path, "rb") as file:
        if _version(file) != version:
            raise OSError("its tar was changed while it was read")
        file.seek(offset)
        return io.BytesIO(file.read(size))


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

        row = 0
        try:
            with contextlib.ExitStack() as stack:
                opened: Any = stack.enter_context(open_source(self.path))
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
                            yield self._picture(content, key, as_text, row)
                            row += 1
        except ColumnsError:
            raise
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield unreadable(
                text(self.path), f"the table cannot be read beyond row {row}: {reason(error)}"
            )

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

    def _picture(self, content: Any, key: Any, as_text: Callable[[Any], str], row: int) -> Picture:
        id = f"{text(self.path)}#{row}"
        try:
            id = text(as_text(key)) if key is not None else id
        except UnicodeDecodeError:
            return unreadable(id, "its id is neither text nor UTF-8 bytes")
        if hasattr(content, "keys"):  # A struct.
            content = content["bytes"] if content.is_valid else content
        if not content.is_valid:
            return unreadable(id, "its cell is empty")
        buffer = content.as_buffer()
        try:
            check_size(buffer.size, self.most)
        except ValueError as error:
            return unreadable(id, str(error))
        return readable(id, functools.partial(_cell, buffer), buffer.size)


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


type Unit = Files | Tar | Parquet


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of parquet files that are read, as in `Parquet`."""

    image: str | None = None
    id: str | None = None


def find(
    arguments: Iterable[str],
    columns: Columns,
    skipped: Callable[[str, str], None],
    most: int = MOST_BYTES,
) -> Iterator[Unit]:
    """Yields the units of the arguments, and searches only as far as units are requested.

    Folders are searched for files with the extension of a picture, in sorted order. Links are
    followed. Every file and folder on this machine is used once, under the first name by which it
    is found. Hidden files and folders are left out.

    Args:
      arguments: paths or URLs of pictures, folders, tars and parquet files.
      columns: columns of parquet files.
      skipped: function that is called with path and reason for each path that is skipped, because
        it cannot be accessed (such as a dangling link), or because it has the extension of a
        picture but is not a regular file.
      most: largest size of a picture in bytes.
    """
    seen = Ids()
    loose: list[tuple[str, str]] = []

    def files() -> Files:
        paths, reasons = zip(*loose)
        loose.clear()
        return Files(paths, reasons, most)

    for argument in arguments:
        for found in _of_argument(argument, columns, seen, skipped, most):
            if isinstance(found, tuple):
                loose.append(found)
                if len(loose) == FILES_PER_UNIT:
                    yield files()
                continue
            if loose:
                yield files()
            yield found
    if loose:
        yield files()


def _of_argument(
    argument: str, columns: Columns, seen: Ids, skipped: Callable[[str, str], None], most: int
) -> Iterator[Unit | tuple[str, str]]:
    """Yields units, and (path, reason why it cannot be read or "") of single files."""
    if "\0" in argument:
        yield argument, "no path contains the character NUL"
    elif len(argument) > LONGEST:
        yield argument[:LONGEST], f"it is longer than {LONGEST} characters"
    elif _name(argument).endswith(TAR_ENDINGS):
        yield Tar(argument, most)
    elif _name(argument).endswith(".parquet"):
        yield Parquet(argument, columns.image, columns.id, most)
    elif is_url(argument):
        try:
            yield from ((url, "") for url in _remote(argument))
        except ImportError:
            raise  # It says what to install.
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield argument, reason(error)
    else:
        yield from _walk(argument, seen, skipped)


def _name(argument: str) -> str:
    """Returns an argument in lower case; a URL of a web server without its query."""
    name = urllib.parse.urlsplit(argument).path if argument.startswith("http") else argument
    return name.lower()


class Expanded:
    """Arguments with braces ("{000..099}") and wildcards expanded.

    An argument that is the path of an existing file or folder is not expanded. It can be iterated
    repeatedly. Each time braces are expanded again, because they may stand for any number of
    arguments; but each wildcard is looked up only once.

    Raises:
      FileNotFoundError: no file matches a wildcard.
      ValueError: braces are not balanced.
    """

    def __init__(self, arguments: Iterable[str]):
        self._arguments = tuple(arguments)
        self._found: dict[str, list[str]] = {}

    def __iter__(self) -> Iterator[str]:
        for argument in self._arguments:
            if "{" not in argument or (not is_url(argument) and os.path.lexists(argument)):
                yield from self._matching(argument)
                continue
            try:
                for one in braces.expand(argument):
                    yield from self._matching(one)
            except ValueError as error:
                raise ValueError(f"{printable(argument)} cannot be expanded: {error}.") from None

    def _matching(self, argument: str) -> list[str]:
        # Wildcards of http URLs are not expanded, because "?" begins a query there.
        if not re.search(r"[*?\[]", argument) or argument.startswith("http"):
            return [argument]
        if not is_url(argument) and os.path.lexists(argument):
            return [argument]
        if argument not in self._found:
            if is_url(argument):
                import fsspec

                with reaching(argument):
                    fs, pattern = fsspec.url_to_fs(argument)
                    self._found[argument] = list(map(fs.unstrip_protocol, sorted(fs.glob(pattern))))
            else:
                self._found[argument] = sorted(glob.glob(argument, recursive=True))
            if not self._found[argument]:
                raise FileNotFoundError(f"No file matches {printable(argument)}.")
        return self._found[argument]


def some(arguments: Iterable[str]) -> str:
    """Names the first arguments for a message."""
    first = list(itertools.islice(arguments, MOST_NAMED + 1))
    named = ", ".join(map(printable, first[:MOST_NAMED]))
    return f"{named} and others" if len(first) > MOST_NAMED else named


def check(arguments: Iterable[str], wanted: str = "a picture") -> None:
    """Refuses arguments that do not exist, or are neither regular files nor folders.

    Args:
      arguments: paths and URLs.
      wanted: description of an argument, for the error message.

    Raises:
      FileNotFoundError: arguments do not exist.
      ValueError: an argument is a FIFO, a socket or a device.
    """
    absent = some(argument for argument in arguments if not _exists(argument))
    if absent:
        raise FileNotFoundError(f"These files or folders do not exist: {absent}.")
    for argument in arguments:
        path = Path(argument)
        if not is_url(argument) and path.exists() and not path.is_dir() and not path.is_file():
            raise ValueError(f"{printable(argument)} is not a regular file, expected {wanted}.")


def _exists(argument: str) -> bool:
    if not is_url(argument):
        return os.path.lexists(argument)
    import fsspec

    with reaching(argument):
        fs, path = fsspec.url_to_fs(argument)
        return bool(fs.exists(path))


def _remote(url: str) -> Iterator[str]:
    """Yields the file at a URL, or the pictures of the folder at the URL."""
    import fsspec

    fs, root = fsspec.url_to_fs(url)
    wanted = extensions()
    # A URL with the extension of a picture is assumed to be a picture, to save a request.
    if PurePosixPath(root).suffix.lower() in wanted or not fs.isdir(root):
        yield url
        return
    for folder, folders, names in fs.walk(root):
        folders.sort() if isinstance(folders, list) else None
        for name in sorted(names):
            if PurePosixPath(name).suffix.lower() in wanted and not name.startswith("."):
                yield fs.unstrip_protocol(f"{folder.rstrip('/')}/{name}")


def _walk(
    argument: str, seen: Ids, skipped: Callable[[str, str], None]
) -> Iterator[tuple[str, str]]:
    """Yields (path, reason why it cannot be read or "") of files below a path on this machine."""
    wanted = extensions()
    argument = str(Path(argument))
    try:
        real = os.path.realpath(argument)
    except (OSError, ValueError) as error:  # For example, it is a loop of links.
        yield argument, reason(error)
        return
    # Iterators over the folders that are being searched, with each path and its real path, in which
    # only a link in the last component is not resolved. Only the names in these folders are in
    # memory.
    below = [iter([(argument, real)])]
    while below:
        path, real = next(below[-1], (None, ""))
        if path is None:
            below.pop()
            continue
        meant = path == argument or os.path.splitext(path)[1].lower() in wanted
        mode = 0
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                real = os.path.realpath(path)
                mode = os.stat(path).st_mode
        except OSError as error:
            dangling = stat.S_ISLNK(mode) and isinstance(error, FileNotFoundError)
            why = "it is a dangling link" if dangling else _reason(error)
            if meant:
                yield path, why
            else:
                skipped(path, why)
            continue
        if not (stat.S_ISDIR(mode) or meant) or not seen.add(os.fsencode(real)):
            continue
        if stat.S_ISDIR(mode):
            try:
                names = sorted(name for name in os.listdir(path) if not name.startswith("."))
            except OSError as error:
                yield path, _reason(error)
            else:
                folder = "" if path == "." else path
                below.append(_within(folder, real, names))
        elif stat.S_ISREG(mode):
            yield path, ""
        else:
            skipped(path, "it is not a regular file")


def _within(folder: str, real: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the path of each name in a folder, and the path with the folder's links resolved."""
    return ((os.path.join(folder, name), os.path.join(real, name)) for name in names)


def _reason(error: OSError) -> str:
    """Returns the message of an error without the name of the file."""
    return error.strerror or str(error)


def read_list(path: str) -> Iterator[str]:
    """Yields the arguments in a file, or in standard input if the path is "-", one on each line."""
    if path == "-":
        # The encoding of sys.stdin would refuse names that are not valid in it.
        opened: BinaryIO = open(0, "rb", closefd=False)
    else:
        opened = open_source(path)
    with io.TextIOWrapper(opened, errors="surrogateescape") as lines:
        while line := lines.readline(LONGEST + 2):
            argument = line.rstrip("\r\n")
            while not line.endswith("\n") and (line := lines.readline(LONGEST)):
                pass  # The rest of a line that is too long.
            if argument := argument.removeprefix("\ufeff"):  # The byte-order mark of some editors.
                yield argument
