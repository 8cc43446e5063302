"""Sources of pictures: files, folders, lists, WebDataset tars and parquet files, local or remote.

`find` turns the arguments of the command into units, which can be pickled: `Files`, `Tar` and
`Parquet`. A unit's `pictures()` yields its pictures. The processes or Ray tasks that decode the
pictures open their contents. The memory that this module uses does not grow with the number of
pictures.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pickle
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pallas_patch_embed.embed import braces
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.pictures import extensions, reason
from pallas_patch_embed.files import open_regular
from pallas_patch_embed.messages import printable

# Number of files in a unit. It is large enough that the overhead of a unit does not matter, and
# small enough that a run has many units.
FILES_PER_UNIT = 256

# Largest number of characters of an argument. Paths on Linux have at most 4096 bytes.
LONGEST = 2**16

# Largest number of arguments that a message names.
MOST_NAMED = 5

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")


class Picture(NamedTuple):
    """An encoded picture.

    Attributes:
      id: the picture's path, URL, key in a WebDataset, or id in a table.
      open: picklable function that opens the picture for reading, or raises the reason why it
        cannot be read.
    """

    id: str
    open: Callable[[], BinaryIO]


class Content:
    """Opens content that is in memory.

    Protocol 5 of pickle can transfer the content outside of the pickle.
    """

    def __init__(self, content: bytes):
        self._content = content

    def __call__(self) -> BinaryIO:
        return io.BytesIO(self._content)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Content, (pickle.PickleBuffer(self._content) if protocol >= 5 else self._content,)


def text(path: str | os.PathLike[str]) -> str:
    """Returns a path as valid Unicode, which parquet needs, with invalid bytes escaped."""
    return os.fspath(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


def unreadable(id: str, reason: str) -> Picture:
    """Makes a picture that cannot be opened, for this reason."""
    return Picture(id, functools.partial(_fail, reason))


def _fail(reason: str) -> BinaryIO:
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
        return open(path, "rb")
    import fsspec

    return fsspec.open(path, "rb").open()


@dataclasses.dataclass(frozen=True)
class Files:
    """Picture files.

    Attributes:
      paths: paths on this machine, or URLs.
      reasons: for each path the reason why it cannot be read, or "".
    """

    paths: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    def pictures(self) -> Iterator[Picture]:
        for path, why in itertools.zip_longest(self.paths, self.reasons, fillvalue=""):
            if why:
                yield unreadable(text(path), why)
            elif is_url(path):
                yield Picture(text(path), functools.partial(_fetch, path))
            else:
                yield Picture(text(path), functools.partial(open_regular, path))


def _fetch(url: str) -> BinaryIO:
    """Reads the contents at a URL with one request."""
    import fsspec

    fs, path = fsspec.url_to_fs(url)
    return io.BytesIO(fs.cat_file(path))


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
    """

    path: str

    def pictures(self) -> Iterator[Picture]:
        wanted = extensions()
        try:
            mode: Any = "r:" if _is_plain_tar(self.path) else "r|*"
            with (
                open_source(self.path) as file,
                tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as tar,
            ):
                version = _version(file) if mode == "r:" else None
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # Frees memory.
                    # PurePosixPath removes "./" and repeated slashes.
                    key, extension = posixpath.splitext(PurePosixPath(member.name))
                    if extension.lower() not in wanted or posixpath.basename(key).startswith("."):
                        continue
                    id = text(key)
                    if member.isfile():
                        yield Picture(id, self._content(tar, member, version))
                    elif member.islnk() or member.issym():
                        yield unreadable(id, f"it is a link to {text(member.linkname)} in a tar")
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield unreadable(text(self.path), f"the tar cannot be read to its end: {error}")

    def _content(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, version: _Version | None
    ) -> Callable[[], BinaryIO]:
        """Returns a function that opens the contents of a member.

        The contents of a plain tar, which has a version, are read only when they are decoded.
        """
        if version is not None and not member.issparse():
            if member.offset_data + member.size > version.size:
                raise EOFError("its end is missing")
            return functools.partial(_part, self.path, version, member.offset_data, member.size)
        content = tar.extractfile(member)
        assert content is not None  # The member is a file.
        return Content(content.read())


def _is_plain_tar(path: str) -> bool:
    """Returns whether a path is an uncompressed tar on this machine, of which parts can be read."""
    if is_url(path):
        return False
    try:
        tarfile.open(path, "r:").close()
    except tarfile.ReadError:
        return False
    return True


def _part(path: str, version: _Version, offset: int, size: int) -> BinaryIO:
    """Reads a part of a file on this machine."""
    with open(path, "rb") as file:
        if _version(file) != version:
            raise OSError("its tar was changed while it was read")
        file.seek(offset)
        return io.BytesIO(file.read(size))


class _Member(tarfile.TarInfo):
    """A member of a tar whose header is not damaged. tarfile would end the archive there."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Member":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError:
            if len(buf) < tarfile.BLOCKSIZE:
                raise EOFError("its end is missing") from None
            if any(buf):
                raise ValueError("a header is damaged") from None
            raise  # A block of zeros is the end.


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
    """

    path: str
    image_column: str | None = None
    id_column: str | None = None

    def pictures(self) -> Iterator[Picture]:
        import pyarrow.parquet

        row = 0
        try:
            # pyarrow itself reads files on this machine, so they are not copied to Python. The name
            # is passed as bytes, because it need not be UTF-8.
            remote = is_url(self.path)
            opened = open_source(self.path) if remote else pyarrow.OSFile(os.fsencode(self.path))
            with opened, pyarrow.parquet.ParquetFile(opened) as file:
                image, id = self.columns(file.schema_arrow)
                columns = [image] if id is None else [image, id]
                # Only a few rows are read at a time, because pictures are large.
                for batch in file.iter_batches(64, columns=columns):
                    ids = batch[id].to_pylist() if id is not None else itertools.repeat(None)
                    for content, key in zip(batch[image], ids):
                        yield self._picture(content.as_py(), key, row)
                        row += 1
        except ColumnsError:
            raise
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield unreadable(text(self.path), f"the table cannot be read beyond row {row}: {error}")

    def columns(self, schema: Any) -> tuple[str, str | None]:
        """Returns the names of the columns of pictures and of ids (None for no column of ids).

        Raises:
          ColumnsError: a column is missing, or there are several columns of pictures.
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
        return image or found[0], id

    def _picture(self, content: Any, key: Any, row: int) -> Picture:
        id = text(str(key)) if key is not None else f"{text(self.path)}#{row}"
        if isinstance(content, dict):
            content = content["bytes"]
        if content is None:
            return unreadable(id, "its cell is empty")
        return Picture(id, Content(content))


type Unit = Files | Tar | Parquet


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of parquet files that are read, as in `Parquet`."""

    image: str | None = None
    id: str | None = None


def find(
    arguments: Iterable[str], columns: Columns, skipped: Callable[[str, str], None]
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
    """
    seen = Ids()
    loose: list[tuple[str, str]] = []

    def files() -> Files:
        paths, reasons = zip(*loose)
        loose.clear()
        return Files(paths, reasons)

    for argument in arguments:
        for found in _of_argument(argument, columns, seen, skipped):
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
    argument: str, columns: Columns, seen: Ids, skipped: Callable[[str, str], None]
) -> Iterator[Unit | tuple[str, str]]:
    """Yields units, and (path, reason why it cannot be read or "") of single files."""
    if "\0" in argument:
        yield argument, "no path contains the character NUL"
    elif len(argument) > LONGEST:
        yield argument[:LONGEST], f"it is longer than {LONGEST} characters"
    elif argument.lower().endswith(TAR_ENDINGS):
        yield Tar(argument)
    elif argument.lower().endswith(".parquet"):
        yield Parquet(argument, columns.image, columns.id)
    elif is_url(argument):
        try:
            yield from ((url, "") for url in _remote(argument))
        except ImportError:
            raise  # It says what to install.
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            yield argument, reason(error)
    else:
        yield from _walk(argument, seen, skipped)


class Expanded:
    """Arguments with braces ("{000..099}") and the wildcards of URLs expanded.

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
        has_wildcards = is_url(argument) and re.search(r"[*?\[]", argument)
        if not has_wildcards or argument.startswith("http"):
            return [argument]
        if argument not in self._found:
            import fsspec

            with reaching(argument):
                fs, pattern = fsspec.url_to_fs(argument)
                self._found[argument] = list(map(fs.unstrip_protocol, sorted(fs.glob(pattern))))
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
            if argument:
                yield argument
