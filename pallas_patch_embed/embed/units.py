"""Units of pictures: files and tars, local or remote. `parquet` has the third kind, tables.

Units can be pickled. A unit's `pictures()` yields its pictures, and the processes or Ray tasks that
decode the pictures open their contents. The memory that this module uses does not grow with the
number of pictures, and a file of a stranger cannot make it grow: every content is limited to `most`
bytes, and is read only when it is asked for.
"""

import contextlib
import dataclasses
import datetime
import functools
import io
import math
import os
import posixpath
import re
import time
import urllib.parse
from collections.abc import Generator, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pallas_patch_embed.base.files import open_regular
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import tars
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.pictures import (
    MOST_BYTES,
    LargerError,
    Open,
    check_room,
    check_size,
    extensions,
    missing_plugin,
    reason,
)

# Largest number of characters of an argument, and of an id. Paths on Linux have at most 4096 bytes,
# and keys are much shorter.
LONGEST = 2**14

# Largest size in bytes of a text that is kept from a member of a tar, and of the memory that a
# sample of a tar may need until all of its members are read.
MOST_TEXT, MOST_SAMPLE = 2**20, 2**27

# Parameters in the query of a URL that sign it for a limited time, in lower case: those that are
# always removed, and those that are if there is a parameter with the name in front of them.
SIGNING = re.compile(r"x-(amz|goog)-.*")
SIGNED = {
    "signature": re.compile("signature|expires|awsaccesskeyid|googleaccessid|key-pair-id|policy"),
    "sig": re.compile("sig|se|sp|sr|st|sv|spr|skoid|sktid|skt|ske|sks|skv"),
}

# Fields with which file systems of fsspec tell that a file was changed, the best ones first.
CHANGES = (
    *("ETag", "etag", "e_tag", "Content-MD5", "LastModified", "Last-Modified", "last_modified"),
    *("mtime", "modified", "updated", "created"),
)


class SourceEndsError(Exception):
    """A source cannot be read beyond this content. Its `pictures()` says why."""


class Origin(NamedTuple):
    """Where a picture comes from. `source` and `row` identify it, the rest tells if it was changed.

    Attributes:
      source: absolute path of its file with all links resolved, or URL without a signature.
      row: "" for a picture file; the name of the member of a tar, with "#" and its number if an
        earlier member has this name; the number of the row in a table, such as "17", or "17/0" for
        the first picture in a list.
      size: size of the file in bytes; None if it is not known.
      modified: time of the file's last change in ISO 8601; at a URL its ETag, if it has one. "" if
        it is not known.
    """

    source: str = ""
    row: str = ""
    size: int | None = None
    modified: str = ""


UNKNOWN = Origin()


class Entry(NamedTuple):
    """What an output records about a picture, next to its embedding.

    Attributes:
      id: the picture's path, URL, key in a WebDataset, or id in a table, as in `Picture`.
      origin: where the picture comes from.
      kept: values of the columns that are kept, in their order.
    """

    id: str
    origin: Origin = UNKNOWN
    kept: tuple[Any, ...] = ()


class Picture(NamedTuple):
    """An encoded picture.

    Attributes:
      id: the picture's path, URL, key in a WebDataset, or id in a table.
      open: function that opens the picture for reading, or raises the reason why it cannot be read.
      size: None if `open` is picklable and works at any time. Otherwise `open` reads this number of
        bytes, and works only until the next picture is requested.
      origin, kept: as in `Entry`.
    """

    id: str
    open: Open
    size: int | None = None
    origin: Origin = UNKNOWN
    kept: tuple[Any, ...] = ()

    @property
    def entry(self) -> Entry:
        return Entry(self.id, self.origin, self.kept)

    def in_memory(self) -> Open:
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
    name = os.fspath(path)
    if name.isascii():
        return name
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def readable(picture: Picture) -> Picture:
    """Returns the picture, or one that cannot be opened if its id is too long for an output."""
    if len(picture.id) <= LONGEST:
        return picture
    why = f"its id has {len(picture.id)} characters, expected at most {LONGEST}"
    open_ = functools.partial(_fail, why)
    return picture._replace(id=f"{picture.id[:200]}...", open=open_, size=None)


def unreadable(
    id: str, reason: str, origin: Origin = UNKNOWN, kept: tuple[Any, ...] = ()
) -> Picture:
    """Makes a picture that cannot be opened, for this reason."""
    return readable(Picture(id, functools.partial(_fail, reason), None, origin, kept))


def _fail(reason: str, reserved: float = math.inf) -> BinaryIO:
    raise OSError(reason)


def described(entry: Entry, opened: Origin | None) -> Entry:
    """Adds what a server said about a picture when it sent the picture."""
    # The version of a picture that a cell of a table names is that of the table.
    if opened is None or entry.origin.row:
        return entry
    return entry._replace(origin=entry.origin._replace(size=opened.size, modified=opened.modified))


def is_url(path: str) -> bool:
    """Returns whether `path` is a URL. Otherwise it is a path on this machine."""
    return "://" in path and re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


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


def time_text(nanoseconds: int) -> str:
    """Returns a time since 1970 in ISO 8601."""
    seconds, rest = divmod(nanoseconds, 10**9)
    try:
        return f"{_time_of_second(seconds)}.{rest:09}Z"
    except (OverflowError, ValueError, OSError):  # A year that the system does not know.
        return str(nanoseconds)


@functools.lru_cache
def _time_of_second(seconds: int) -> str:
    """Returns the beginning of `time_text`. Many files are often written in the same second."""
    year, month, day, hour, minute, second = time.gmtime(seconds)[:6]
    # `strftime` takes 3.2 us instead of 2.1.
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}"


def local_origin(real: str, status: os.stat_result | None) -> Origin:
    """Returns the origin of a file on this machine, whose links are resolved."""
    if status is None:
        return Origin(text(real))
    return Origin(text(real), "", status.st_size, time_text(status.st_mtime_ns))


def remote_origin(url: str, info: Mapping[str, Any] | None = None) -> Origin:
    """Returns the origin of a file at a URL, with what fsspec says about the file."""
    if match := re.match("(file|local)://", url):
        real = os.path.realpath(url[match.end() :])
        return local_origin(real, os.stat(real) if os.path.exists(real) else None)
    info = info or {}
    url = re.sub(":///+", "://", url, count=1)  # fsspec's names in its own memory begin with "/".
    changed = next((info[name] for name in CHANGES if info.get(name)), "")
    if isinstance(changed, datetime.datetime):
        changed = changed.timestamp()
    if isinstance(changed, int | float):
        changed = time_text(round(changed * 10**6) * 1000)  # A float has microseconds.
    size = info.get("size")
    size = size if isinstance(size, int) and 0 <= size < 2**63 else None
    return Origin(text(unsigned(url)), "", size, text(str(changed))[:LONGEST])


def path_in(url: str) -> str:
    """Returns the path in the URL of a web server, which may have a query; others as they are."""
    return urllib.parse.urlsplit(url).path if url.startswith("http") else url


def unsigned(url: str) -> str:
    """Removes the parameters of a URL that sign it, because they differ each time."""
    if not url.startswith("http") or "?" not in url:
        return url
    parts = urllib.parse.urlsplit(url)
    parameters = parts.query.split("&")
    names = [parameter.split("=", 1)[0].lower() for parameter in parameters]
    signing = [SIGNING, *(found for name, found in SIGNED.items() if name in names)]
    kept = [
        parameter
        for parameter, name in zip(parameters, names)
        if not any(each.fullmatch(name) for each in signing)
    ]
    return urllib.parse.urlunsplit(parts._replace(query="&".join(kept), fragment=""))


def named_origin(path: str) -> Origin:
    """Returns the origin of a file or a URL that was not opened."""
    return remote_origin(path) if is_url(path) else local_origin(os.path.realpath(path), None)


def opened_origin(path: str, file: Any) -> Origin:
    """Returns the origin of a file that `open_source` has opened."""
    if not is_url(path):
        return local_origin(os.path.realpath(path), os.fstat(file.fileno()))
    info = getattr(file, "details", None)
    return remote_origin(path, info if isinstance(info, dict) else None)


class File(NamedTuple):
    """A picture file.

    Attributes:
      path: path on this machine, or URL.
      origin: its origin, as far as it is known without opening the file.
      reason: the reason why it cannot be read, or "".
    """

    path: str
    origin: Origin
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Files:
    """Picture files.

    Attributes:
      files: the files.
      most: largest size of a picture in bytes.
    """

    files: tuple[File, ...]
    most: int = MOST_BYTES

    def pictures(self) -> Iterator[Picture]:
        for path, origin, why in self.files:
            name = text(path)
            if why:
                yield unreadable(name, why, origin)
            else:
                yield Picture(name, opener(path, self.most), None, origin)


def opener(path: str, most: int) -> Open:
    """Returns a picklable function that opens a picture of at most `most` bytes."""
    return functools.partial(_fetch if is_url(path) else _open_file, path, most)


def _open_file(path: str, most: int, reserved: float = math.inf) -> BinaryIO:
    file = open_regular(path)
    try:
        check_size(os.fstat(file.fileno()).st_size, most)
    except ValueError:
        file.close()
        raise
    return file


class Fetched(io.BytesIO):
    """The content at a URL, and its origin as the server described it."""

    def __init__(self, content: bytes, origin: Origin):
        super().__init__(content)
        self.origin = origin


def _fetch(url: str, most: int, reserved: float = math.inf) -> BinaryIO:
    """Reads the content at a URL, but no more than is reserved for it."""
    import fsspec

    fs, path = fsspec.url_to_fs(url)
    web = url.startswith("http")
    info = {} if web else fs.info(path)
    size = info.get("size")
    if size is not None:
        check_size(size, most)
        check_room(size, reserved)
        content = fs.cat_file(path, start=0, end=size) if size else b""
        return Fetched(content, remote_origin(url, info))
    # A web server may send more than it announces, and more than the part that is requested. These
    # options avoid a request for the size.
    with fs.open(path, **(dict(block_size=0, size=1) if web else {})) as file:
        content = _read(file, int(min(reserved, most)) + 1)
        if web:
            info = {name: file.r.headers.get(name) for name in CHANGES}
    check_size(len(content), most)
    if len(content) > reserved:
        raise LargerError(min(2 * len(content), most))
    return Fetched(content, remote_origin(url, info | {"size": len(content)}))


def _read(file: Any, size: int) -> bytes:
    """Reads up to `size` bytes of a stream, whose `read` may return fewer."""
    content = io.BytesIO()
    while (rest := size - content.tell()) and (piece := file.read(rest)):
        content.write(piece)
    return content.getvalue()


@dataclasses.dataclass(frozen=True)
class Tar:
    """A tar of pictures, for example a shard of a WebDataset.

    The id of a member is its key, its name without the extension. Hidden members, and members
    without the extension of a picture, are skipped: they are other columns of the dataset. The
    order of the members does not matter.

    With `keep`, the pictures of a sample are yielded when all of its members are read. As in the
    package webdataset, a sample is a run of members whose names are equal up to the first dot after
    the folder, and their extensions are what follows this dot.

    Attributes:
      path: path on this machine, or a URL.
      most: largest size of a picture in bytes.
      keep: extensions of the members of a sample whose text is kept for its pictures.
    """

    path: str
    most: int = MOST_BYTES
    keep: tuple[str, ...] = ()

    def kept_types(self) -> dict[str, Any]:
        """Returns the types of the kept values in Arrow, by name."""
        import pyarrow

        return dict.fromkeys(self.keep, pyarrow.string())

    def pictures(self) -> Iterator[Picture]:
        origin = named_origin(self.path)
        nothing = (None,) * len(self.keep)
        try:
            with open_source(self.path) as file:
                origin = opened_origin(self.path, file)
                blocks, in_order = self._blocks(file)
                seen = Ids()
                found = (
                    (member, self._picture(blocks, member, origin, in_order, seen, number))
                    for number, member in enumerate(tars.members(blocks))
                )
                if self.keep:
                    absent = yield from self._with_texts(blocks, found)
                    if absent:
                        names = ", ".join(f".{printable(name)}" for name in sorted(absent))
                        why = f"no sample has a member {names}, which --keep names"
                        yield unreadable(text(self.path), why, origin, nothing)
                else:
                    yield from (picture for _, picture in found if picture is not None)
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            why = f"the tar cannot be read to its end: {reason(error)}"
            yield unreadable(text(self.path), why, origin, nothing)

    def _blocks(self, file: BinaryIO) -> tuple[tars.Blocks, bool]:
        """Returns the bytes of the tar, and whether they can only be read in order."""
        if is_url(self.path):
            return tars.Streamed(file), True
        compressed = tars.is_compressed(file.read(10))
        file.seek(0)
        return (tars.Streamed(file), True) if compressed else (tars.Plain(file), False)

    def _picture(
        self,
        blocks: tars.Blocks,
        member: tars.Member,
        origin: Origin,
        in_order: bool,
        seen: Ids,
        number: int,
    ) -> Picture | None:
        """Makes the picture of a member; None if the member is skipped."""
        name = str(PurePosixPath(member.name))  # It removes "./" and repeated slashes.
        picture = self._picture_named(name, blocks, member, origin, in_order)
        if picture is None:
            return None
        row = text(name) if seen.add(os.fsencode(name)) else f"{text(name)}#{number}"
        return picture._replace(origin=origin._replace(row=row))

    def _picture_named(
        self, name: str, blocks: tars.Blocks, member: tars.Member, origin: Origin, in_order: bool
    ) -> Picture | None:
        key, extension = posixpath.splitext(name)
        if posixpath.basename(key).startswith("."):
            return None
        if name.lower().endswith(tars.ENDINGS) and member.kind == tars.FILE:
            return unreadable(text(name), "it is a tar in a tar, which is not read", origin)
        advice = None
        if extension.lower() not in extensions():
            advice = missing_plugin(extension.lower())
            if advice is None:
                return None
        if member.kind in tars.LINKS:
            link = text(member.link)[:200]
            return unreadable(text(key), f"it is a link to {link} in a tar", origin)
        if member.kind != tars.FILE:
            return None
        if advice is not None:
            return unreadable(text(key), f"to read {extension.lower()} pictures, {advice}", origin)
        return self._member(text(key), blocks, member, origin, in_order)

    def _with_texts(
        self, blocks: tars.Blocks, found: Iterator[tuple[tars.Member, Picture | None]]
    ) -> Generator[Picture, None, set[str]]:
        """Yields the pictures of each sample with the texts of its other members.

        Returns:
          The extensions that are to be kept and that no member has, if there are pictures.
        """
        sample, absent = _Sample("", self.keep), set(map(_extension, self.keep))
        has_pictures = False
        try:
            for member, picture in found:
                folder, name = posixpath.split(PurePosixPath(member.name))
                base, _, extension = name.partition(".")
                if not (base and extension and member.kind in (tars.FILE, *tars.LINKS)):
                    continue
                if (key := posixpath.join(folder, base)) != sample.key:
                    yield from sample.pictures()
                    sample = _Sample(key, self.keep)
                sample.add(blocks, member, extension.lower(), picture)
                absent.discard(extension.lower())
                has_pictures |= picture is not None
                if sample.failure:
                    yield from sample.pictures()
        except Exception:
            sample.failure = "the tar cannot be read to the end of its sample"
            yield from sample.pictures()
            raise
        yield from sample.pictures()
        return absent if has_pictures else set()

    def _member(
        self, id: str, blocks: tars.Blocks, member: tars.Member, origin: Origin, in_order: bool
    ) -> Picture:
        """Makes the picture in a member.

        The contents of a plain tar are read only when they are decoded.
        """
        try:
            check_size(member.size, self.most)
        except ValueError as error:
            return unreadable(id, str(error), origin)
        if in_order or member.parts is not None:
            open_ = functools.partial(_content, blocks, member)
            return readable(Picture(id, open_, member.size, origin))
        if origin.size is not None and member.position + member.stored > origin.size:
            raise EOFError("its end is missing")
        part = functools.partial(_part, self.path, origin, member.position, member.size)
        return readable(Picture(id, part, None, origin))


def _extension(name: str) -> str:
    return name.lower().removeprefix(".")


class _Sample:
    """A sample of a WebDataset while its members are read.

    Attributes:
      key: the beginning that the names of its members share.
      failure: the reason why its pictures cannot be embedded, or "".
    """

    def __init__(self, key: str, keep: tuple[str, ...]):
        self.key, self.failure = key, ""
        self._keep = tuple(map(_extension, keep))
        self._texts: dict[str, str] = {}
        self._pictures: list[Picture] = []
        self._room = MOST_SAMPLE

    def add(
        self, blocks: tars.Blocks, member: tars.Member, extension: str, picture: Picture | None
    ) -> None:
        """Adds the member that was read last; reads it if it is kept or cannot be read later."""
        if self.failure:
            pass
        elif extension in self._keep:
            self._add_text(blocks, member, extension, picture)
        elif picture is not None:
            # A picture without its content needs less than 2 KiB, and its id and origin.
            self._room -= (picture.size or 0) + 2**11 + 4 * len(picture.id)
            if self._room < 0:
                self.failure = (
                    f"its sample needs more than {MOST_SAMPLE} bytes of memory, where --keep holds "
                    "its pictures until the sample ends"
                )
            elif picture.size is not None:
                content = Content(picture.open(picture.size).read())
                picture = picture._replace(open=content)
        if picture is not None:
            self._pictures.append(picture)

    def _add_text(
        self, blocks: tars.Blocks, member: tars.Member, extension: str, picture: Picture | None
    ) -> None:
        named = f"{printable(text(member.name))}, which --keep names,"
        if picture is not None:
            self.failure = f"{named} is a picture, expected text"
        elif member.kind in tars.LINKS:
            self.failure = f"{named} is a link in a tar"
        elif extension in self._texts:
            self.failure = f"its sample has several members .{extension}, which --keep names"
        elif member.size > MOST_TEXT:
            self.failure = f"{named} has {member.size} bytes, expected at most {MOST_TEXT}"
        else:
            try:
                self._texts[extension] = tars.content(blocks, member).decode()
            except UnicodeDecodeError:
                self.failure = f"{named} is not UTF-8"

    def pictures(self) -> Iterator[Picture]:
        """Yields the pictures that were added since the last call."""
        pictures, self._pictures = self._pictures, []
        kept = tuple(map(self._texts.get, self._keep))
        for picture in pictures:
            if self.failure:
                yield unreadable(picture.id, self.failure, picture.origin, kept)
            else:
                yield picture._replace(kept=kept)


def _content(blocks: tars.Blocks, member: tars.Member, reserved: float = math.inf) -> BinaryIO:
    """Reads the content of the member that was yielded last."""
    try:
        return io.BytesIO(tars.content(blocks, member))
    except Exception as error:  # Each package for URLs has its own kinds of errors.
        raise SourceEndsError(reason(error)) from error


def _part(
    path: str, origin: Origin, offset: int, size: int, reserved: float = math.inf
) -> BinaryIO:
    """Reads a part of a file on this machine."""
    check_room(size, reserved)
    with open(path, "rb") as file:
        if local_origin("", os.fstat(file.fileno()))[2:] != origin[2:]:
            raise OSError("its tar was changed while it was read")
        file.seek(offset)
        return io.BytesIO(file.read(size))
