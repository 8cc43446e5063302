"""Sources of pictures: the arguments and lists of the command `embed`.

`find` turns them into units of pictures. The memory that this module uses does not grow with the
number of pictures.
"""

import collections
import dataclasses
import glob
import io
import itertools
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import braces, tars
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.lines import Lines
from pallas_patch_embed.embed.parquet import Parquet
from pallas_patch_embed.embed.pictures import MOST_BYTES, extensions, reason
from pallas_patch_embed.embed.units import (
    LONGEST,
    MOST_TEXT,
    File,
    Files,
    Origin,
    Tar,
    is_url,
    local_origin,
    open_source,
    path_in,
    reaching,
    remote_origin,
)

# Number of files in a unit. It is large enough that the overhead of a unit does not matter, and
# small enough that a run has many units.
FILES_PER_UNIT = 256

# Largest number of arguments that a message names.
MOST_NAMED = 5

# The extension of text files.
TEXT = ".txt"

type Source = Tar | Parquet | Lines
type Unit = Files | Source


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns that are read, as in `Parquet` and `Tar`, and whether they are of texts."""

    image: str | None = None
    id: str | None = None
    keep: tuple[str, ...] = ()
    texts: bool = False


def find(
    arguments: Iterable[str],
    columns: Columns,
    skipped: Callable[[str, str], None],
    most: int = MOST_BYTES,
    left_out: collections.Counter[str] | None = None,
) -> Iterator[Unit]:
    """Yields the units of the arguments, and searches only as far as units are requested.

    Folders are searched for pictures, tars and parquet files by their extensions, in sorted order.
    Links are followed. Every file and folder on this machine is used once, under the first name by
    which it is found. Hidden files and folders are left out. So are parquet files without pictures,
    and those below a name that begins with "_", with which other programs mark their own files.

    If the columns are of texts, only text files and parquet files are used.

    Args:
      arguments: paths or URLs of pictures, folders, tars, parquet files and text files.
      columns: columns of parquet files.
      skipped: function that is called with path and reason for each path that is skipped, because
        it cannot be accessed (such as a dangling link), or because it has the extension of a
        picture but is not a regular file.
      most: largest size of a picture in bytes.
      left_out: counter of the other files in the folders that are searched, which are not hidden,
        by their extensions in lower case.

    Raises:
      ValueError: columns are kept, and there is a picture or a text file; or the columns are of
        texts, and there is a file of another kind.
    """
    search = _Search(
        columns, skipped, most, collections.Counter() if left_out is None else left_out
    )
    loose: list[File] = []

    def files() -> Files:
        found = tuple(loose)
        loose.clear()
        return Files(found, most)

    for argument in arguments:
        for found in search.of_argument(argument):
            if isinstance(found, File):
                if columns.texts and not found.reason:
                    raise ValueError(
                        f"{printable(found.path)} is neither a {TEXT} nor a parquet file, but "
                        "texts are embedded. Pictures and texts need outputs of their own."
                    )
                if columns.keep and not found.reason:
                    raise ValueError(
                        f"{printable(found.path)} is a picture file, which has no columns, but "
                        f"--keep names {printable(', '.join(columns.keep))}. Leave out --keep, or "
                        "embed picture files in a run of their own."
                    )
                loose.append(found)
                if len(loose) == FILES_PER_UNIT:
                    yield files()
                continue
            if loose:
                yield files()
            if columns.keep and isinstance(found, Lines):
                raise ValueError(
                    f"{printable(found.path)} is a text file, which has no columns, but --keep "
                    f"names {printable(', '.join(columns.keep))}. Leave out --keep."
                )
            yield found
    if loose:
        yield files()


def is_text_file(argument: str) -> bool:
    """Returns whether a path, URL or pattern names text files."""
    return path_in(argument).lower().endswith(TEXT)


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
        if not _has_wildcards(argument):
            return [argument]
        if argument not in self._found:
            self._found[argument] = _matches(argument)
            if not self._found[argument]:
                raise FileNotFoundError(f"No file matches {printable(argument)}.")
        return self._found[argument]


def _has_wildcards(argument: str) -> bool:
    # Wildcards of http URLs are not expanded, because "?" begins a query there.
    if not re.search(r"[*?\[]", argument) or argument.startswith("http"):
        return False
    return is_url(argument) or not os.path.lexists(argument)


def _matches(pattern: str) -> list[str]:
    """Returns the paths or URLs that match a pattern with wildcards."""
    if not is_url(pattern):
        return sorted(glob.glob(pattern, recursive=True))
    import fsspec

    with reaching(pattern):
        fs, path = fsspec.url_to_fs(pattern)
        return list(map(fs.unstrip_protocol, sorted(fs.glob(path))))


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


class _Search:
    """A search for units and single files; the arguments are those of `find`."""

    def __init__(
        self,
        columns: Columns,
        skipped: Callable[[str, str], None],
        most: int,
        left_out: collections.Counter[str],
    ):
        self._columns, self._skipped, self._most = columns, skipped, most
        self._left_out, self._seen = left_out, Ids()

    def of_argument(self, argument: str) -> Iterator[Unit | File]:
        if "\0" in argument:
            yield File(argument, Origin(), "no path contains the character NUL")
        elif len(argument) > LONGEST:
            yield File(argument[:LONGEST], Origin(), f"it is longer than {LONGEST} characters")
        elif not is_url(argument):
            yield from self._local(argument)
        else:
            for found in self._at_url(argument):
                path = found.path.encode(errors="surrogateescape")
                if self._seen.add(path):
                    yield found

    def _at_url(self, argument: str) -> Iterator[Source | File]:
        if (unit := self._unit(argument)) is not None and not _is_remote_folder(argument):
            yield unit
        else:
            try:
                yield from self._remote(argument)
            except ImportError:
                raise  # It says what to install.
            except Exception as error:  # Each package for URLs has its own kinds of errors.
                yield File(argument, remote_origin(argument), reason(error))

    def _unit(self, path: str) -> Source | None:
        """Returns the unit at this path or URL; None for names of pictures and of other files."""
        columns, name = self._columns, path_in(path).lower()
        if name.endswith(TEXT) and columns.texts:
            return Lines(path)
        if name.endswith(tars.ENDINGS) and not columns.texts:
            return Tar(path, self._most, columns.keep)
        if name.endswith(".parquet"):
            most = min(self._most, MOST_TEXT) if columns.texts else self._most
            return Parquet(path, columns.image, columns.id, most, columns.keep, columns.texts)
        return None

    def _is_used(self, unit: Source, below: str) -> bool:
        """Returns whether a unit in a folder is used, whose path in the folder is `below`."""
        if not isinstance(unit, Parquet):
            return True
        return "/_" not in f"/{below}" and unit.has_pictures()

    def _extensions(self) -> Collection[str]:
        """Returns the extensions of pictures that are used."""
        return () if self._columns.texts else extensions()

    def _leave_out(self, path: str) -> None:
        self._left_out[PurePosixPath(path).suffix.lower() or "no extension"] += 1

    def _remote(self, url: str) -> Iterator[Source | File]:
        """Yields the file at a URL, or what is found in the folder at the URL."""
        import fsspec

        fs, root = fsspec.url_to_fs(url)
        wanted = self._extensions()
        # A URL with the extension of a picture is assumed to be a picture, to save a request.
        if PurePosixPath(root).suffix.lower() in wanted or not fs.isdir(root):
            yield File(url, remote_origin(url))
            return
        # With `detail` the names are the keys of dictionaries.
        for folder, folders, infos in fs.walk(root, detail=True):
            for name in sorted(folders):
                info = folders.pop(name)
                if not name.startswith("."):
                    folders[name] = info  # The walk goes on in this order.
            for name in sorted(infos):
                path = f"{folder.rstrip('/')}/{name}"
                found = fs.unstrip_protocol(path)
                unit = self._unit(found)
                if name.startswith("."):
                    continue
                elif PurePosixPath(name).suffix.lower() in wanted:
                    yield File(found, remote_origin(found, infos[name]))
                elif unit is not None and self._is_used(unit, path[len(root) :].lstrip("/")):
                    yield unit
                else:
                    self._leave_out(name)

    def _local(self, argument: str) -> Iterator[Unit | File]:
        """Yields what is found at a path on this machine."""
        wanted = self._extensions()
        argument = str(Path(argument))
        try:
            real = os.path.realpath(argument)
        except (OSError, ValueError) as error:  # For example, it is a loop of links.
            yield File(argument, local_origin(os.path.abspath(argument), None), reason(error))
            return
        # Iterators over the folders that are being searched, with each path and its real path, in
        # which only a link in the last component is not resolved. Only the names in these folders
        # are in memory.
        below = [iter([(argument, real)])]
        while below:
            path, real = next(below[-1], (None, ""))
            if path is None:
                below.pop()
                continue
            is_picture = os.path.splitext(path)[1].lower() in wanted
            unit = None if is_picture else self._unit(path)
            meant = is_picture or path == argument or unit is not None
            mode = 0
            try:
                status = os.lstat(path)
                mode = status.st_mode
                if stat.S_ISLNK(mode):
                    real = os.path.realpath(path)
                    status = os.stat(path)
                    mode = status.st_mode
            except OSError as error:
                dangling = stat.S_ISLNK(mode) and isinstance(error, FileNotFoundError)
                why = "it is a dangling link" if dangling else _reason(error)
                if meant:
                    yield unit or File(path, local_origin(real, None), why)
                else:
                    self._skipped(path, why)
                continue
            if not (stat.S_ISDIR(mode) or meant):
                if stat.S_ISREG(mode):
                    self._leave_out(path)
                continue
            if not self._seen.add(os.fsencode(real)):
                continue
            if stat.S_ISDIR(mode):
                try:
                    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
                except OSError as error:
                    yield File(path, local_origin(real, None), _reason(error))
                else:
                    folder = "" if path == "." else path
                    below.append(_within(folder, real, names))
            elif not stat.S_ISREG(mode):
                self._skipped(path, "it is not a regular file")
            elif unit is None:
                yield File(path, local_origin(real, status))
            elif path == argument or self._is_used(unit, os.path.relpath(path, argument)):
                yield unit
            else:
                self._leave_out(path)


def _is_remote_folder(url: str) -> bool:
    """Returns whether there is a folder at a URL with the name of a file, as Spark writes it."""
    # A web server has no folders, and fsspec would read the whole file to look for links.
    if url.startswith("http"):
        return False
    import fsspec

    try:
        fs, path = fsspec.url_to_fs(url)
        return bool(fs.isdir(path))
    except Exception:  # Reading the file gives the same error.
        return False


def _within(folder: str, real: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the path of each name in a folder, and the path with the folder's links resolved."""
    # Names contain no separators, so this is `os.path.join` in less time.
    shown, resolved = os.path.join(folder, ""), os.path.join(real, "")
    return ((shown + name, resolved + name) for name in names)


def _reason(error: OSError) -> str:
    """Returns the message of an error without the name of the file."""
    return error.strerror or str(error)


def read_list(path: str) -> Iterator[str]:
    """Yields the arguments in a file, or in standard input if the path is "-", one on each line.

    Braces and wildcards are expanded, one name at a time for braces. A line is an argument itself
    if there is such a file on this machine, if its braces are not balanced, or if no file matches
    its wildcards.
    """
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
                yield from _of_line(argument)


def _of_line(line: str) -> Iterator[str]:
    """Yields the arguments that a line of a list stands for."""
    if "\0" in line or len(line) > LONGEST or (not is_url(line) and os.path.lexists(line)):
        yield line
        return
    names = braces.expand(line) if "{" in line else iter([line])
    while True:
        try:
            name = next(names, None)
        except ValueError:
            name, names = line, iter([])
        if name is None:
            break
        try:
            yield from (_matches(name) if _has_wildcards(name) else []) or [name]
        except OSError:  # Reading the name gives the same error.
            yield name
