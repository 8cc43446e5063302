"""Reads tars from beginning to end, whatever their headers say.

Every number in a header is checked before it is used, and a reader only moves forwards, so reading
ends after a time that is proportional to the size of the tar. Memory is bounded too: only headers,
which are limited, and contents that are asked for are kept. tarfile guarantees neither: before
Python 3.14 a negative size makes it loop, its readers of streams take quadratic time, and its
headers may have any size.
"""

import bz2
import gzip
import io
import lzma
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

BLOCK = 512

# Ends of the names of tars, in lower case.
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

# Largest size in bytes of everything that describes a member: long names, pax records and maps of
# holes. Tools write a few KB.
MOST_HEADER = 2**20

# Number of bytes that are decompressed at a time.
PIECE = 2**16

# A compressed tar may expand to EXPANDED bytes and RATIO times its size. gzip never exceeds this
# ratio, but 1 MB of bzip2 could expand to 1 TB.
EXPANDED, RATIO = 2**32, 1100

# Memory that decompressing xz may use. `xz -9` needs 65 MiB.
XZ_MEMORY = 2**28

# Kinds of members.
FILE, SPARSE, LINKS = b"0", b"S", (b"1", b"2")
_FILES = (FILE, b"\0", b"7", SPARSE)
_WITHOUT_DATA = (*LINKS, b"3", b"4", b"5", b"6")

_DAMAGED = "a header is damaged"
_CUT = "its end is missing"


class Blocks(Protocol):
    """The bytes of a tar, which are read once and in order.

    Attributes:
      position: number of bytes that were read or skipped.
    """

    position: int

    def read(self, size: int) -> bytes:
        """Reads exactly `size` bytes; raises EOFError if there are fewer."""

    def skip(self, size: int) -> None:
        """Skips exactly `size` bytes; raises EOFError if there are fewer."""


class Plain:
    """A tar without compression on this machine."""

    def __init__(self, file: BinaryIO):
        self.position = 0
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def read(self, size: int) -> bytes:
        self._advance(size)
        content = self._file.read(size)
        if len(content) < size:
            raise EOFError(_CUT)
        return content

    def skip(self, size: int) -> None:
        self._advance(size)
        self._file.seek(self.position)

    def _advance(self, size: int) -> None:
        if size > self._size - self.position:
            raise EOFError(_CUT)
        self.position += size


class Streamed:
    """A tar that can only be read forwards: it is compressed or remote."""

    def __init__(self, file: BinaryIO):
        self.position = 0
        self._pieces, self._piece = _pieces(file), memoryview(b"")
        self._failure: Exception | None = None

    def read(self, size: int) -> bytes:
        # Grows with what arrives, so a damaged size alone takes no memory.
        content = io.BytesIO()
        for piece in self._next(size):
            content.write(piece)
        return content.getvalue()

    def skip(self, size: int) -> None:
        for _ in self._next(size):
            pass

    def _next(self, size: int) -> Iterator[memoryview]:
        """Yields the next `size` bytes."""
        while size > 0:
            if not self._piece:
                self._piece = memoryview(self._following_piece())
            piece, self._piece = self._piece[:size], self._piece[size:]
            self.position += len(piece)
            size -= len(piece)
            yield piece

    def _following_piece(self) -> bytes:
        if self._failure is None:
            try:
                return next(self._pieces)
            except StopIteration:
                self._failure = EOFError(_CUT)
            except Exception as error:  # Each package for URLs has its own kinds of errors.
                self._failure = error
        raise self._failure


class _Counted:
    """A file whose first bytes were read already; it counts the bytes that are read."""

    def __init__(self, beginning: bytes, file: BinaryIO):
        self._beginning, self._file, self.count = beginning, file, 0

    def read(self, size: int) -> bytes:
        content, self._beginning = self._beginning[:size], self._beginning[size:]
        content = content or self._file.read(size)
        self.count += len(content)
        return content


def is_compressed(beginning: bytes) -> bool:
    """Returns whether a file with these first 10 bytes is compressed."""
    return _decompressor(beginning) is not None


def _decompressor(beginning: bytes) -> Callable[[Any], Iterator[bytes]] | None:
    if beginning.startswith(b"\x1f\x8b"):
        return _gzip
    if re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", beginning):
        return lambda file: _decompressed(file, bz2.BZ2Decompressor)
    if beginning.startswith((b"\xfd7zXZ\0", b"\x5d\0\0\x80")):
        return lambda file: _decompressed(file, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY))
    return None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yields the content of a file, decompressed, in pieces that are not empty."""
    beginning = b""
    while len(beginning) < 10 and (more := file.read(10 - len(beginning))):
        beginning += more
    counted = _Counted(beginning, file)
    decompress = _decompressor(beginning)
    if decompress is None:
        yield from iter(lambda: counted.read(PIECE), b"")
        return
    expanded = 0
    for piece in decompress(counted):
        expanded += len(piece)
        if expanded > EXPANDED + RATIO * counted.count:
            raise ValueError(f"it expands to more than {RATIO} times its size")
        yield piece


def _gzip(file: Any) -> Iterator[bytes]:
    # `read1` returns what was decompressed before an error, and `read` would lose it.
    with gzip.GzipFile(fileobj=file) as whole:
        yield from iter(lambda: whole.read1(PIECE), b"")


def _decompressed(file: Any, new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompresses streams that follow each other, as parallel compressors write them."""
    content = file.read(PIECE)
    while content:
        decompressor = new()
        while not decompressor.eof:
            if decompressor.needs_input and not content and not (content := file.read(PIECE)):
                raise EOFError(_CUT)
            piece = decompressor.decompress(content, PIECE)
            content = b""
            if piece:
                yield piece
        content = decompressor.unused_data or file.read(PIECE)


class Member(NamedTuple):
    """A member of a tar.

    Attributes:
      name: its name.
      kind: b"0" for a file; otherwise the type flag in its header.
      link: the target of a link.
      size: size of its content in bytes.
      position: position of its data in the tar.
      stored: size of its data in bytes.
      parts: (offset, size) of the parts of the content that are stored; the rest is zero. None if
        everything is stored.
    """

    name: str
    kind: bytes
    link: str
    size: int
    position: int
    stored: int
    parts: list[tuple[int, int]] | None


def members(blocks: Blocks) -> Iterator[Member]:
    """Yields the members up to the end of the tar, a block of zeros.

    Raises:
      EOFError: the end is missing.
      ValueError: a header is damaged or too long.
    """
    shared: dict[bytes, bytes] = {}
    while (member := _next_member(blocks, shared)) is not None:
        end = blocks.position + _padded(member.stored)
        yield member
        blocks.skip(end - blocks.position)


def content(blocks: Blocks, member: Member) -> bytes:
    """Reads the content of the member that `members` has yielded last."""
    if member.parts is None:
        return blocks.read(member.stored)
    whole = io.BytesIO()
    for offset, size in member.parts:
        whole.seek(offset)
        whole.write(blocks.read(size))
    # Writing beyond the end fills the gap with zeros.
    whole.seek(0, os.SEEK_END)
    if whole.tell() < member.size:
        whole.seek(member.size - 1)
        whole.write(b"\0")
    return whole.getvalue()


def _next_member(blocks: Blocks, shared: dict[bytes, bytes]) -> Member | None:
    """Reads the headers of the next member; `shared` has the pax records of all members."""
    own: list[tuple[bytes, bytes]] = []
    room = MOST_HEADER

    def more(size: int) -> bytes:
        nonlocal room
        if size > room:
            raise ValueError(f"a header has more than {MOST_HEADER} bytes")
        room -= size
        return blocks.read(size)

    while True:
        header = more(BLOCK)
        if not any(header):
            if own:
                raise EOFError(_CUT)
            return None
        unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        signed = unsigned - 256 * sum(c > 127 for c in header[:148] + header[156:])
        if _number(header[148:156]) not in (unsigned, signed):
            raise ValueError(_DAMAGED)
        kind, size = header[156:157], _number(header[124:136])
        if kind not in (b"x", b"X", b"g", b"L", b"K"):
            break
        data = more(_padded(size))[:size]
        if kind == b"g":
            shared |= {k: v for k, v in _pax_records(data) if k in (b"path", b"linkpath", b"size")}
        elif kind == b"L":
            own.append((b"path", data))
        elif kind == b"K":
            own.append((b"linkpath", data))
        else:
            own += _pax_records(data)
    fields = shared | dict(own)
    if kind not in _WITHOUT_DATA and b"size" in fields:
        size = _decimal(fields[b"size"])
    name, prefix = _string(header[:100]), _string(header[345:500])
    if kind == b"\0" and name.endswith("/"):
        kind = b"5"
    if prefix and kind != SPARSE:
        name = f"{prefix}/{name}"
    name = _string(fields[b"path"]) if b"path" in fields else name
    name = _string(fields[b"GNU.sparse.name"]) if b"GNU.sparse.name" in fields else name
    link = _string(fields.get(b"linkpath", header[157:257]))
    stored = 0 if kind in _WITHOUT_DATA else size
    parts = None
    if kind == SPARSE:
        size, parts = _old_parts(header, more)
    elif kind in _FILES and (b"GNU.sparse.realsize" in fields or b"GNU.sparse.size" in fields):
        size = _decimal(fields.get(b"GNU.sparse.realsize", fields.get(b"GNU.sparse.size", b"")))
        if fields.get(b"GNU.sparse.major") == b"1":
            before = room
            parts = _parts_in_data(lambda: more(BLOCK) if before - room < stored else None)
            stored -= before - room
        else:
            parts = _pairs(_sparse_numbers(own))
    if parts is not None:
        _check_parts(parts, size, stored)
    kind = FILE if kind in _FILES else kind
    return Member(name, kind, link, size, blocks.position, stored, parts)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _string(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Reads a number of a header: octal digits, or base 256. It may not be negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.split(b"\0", 1)[0].strip()
    if not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(_DAMAGED)
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,19}", digits):
        raise ValueError(_DAMAGED)
    return int(digits)


def _pax_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """Reads records "size key=value\\n", whose size counts all of these characters."""
    records, position = [], 0
    while position < len(data) and data[position]:
        match = re.compile(rb"([0-9]{1,7}) ([^=]+)=").match(data, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1] != ord("\n"):
            raise ValueError(_DAMAGED)
        records.append((match[2], data[match.end() : end - 1]))
        position = end
    return records


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    if len(numbers) % 2:
        raise ValueError(_DAMAGED)
    return list(zip(numbers[::2], numbers[1::2]))


def _old_parts(header: bytes, more: Callable[[int], bytes]) -> tuple[int, list[tuple[int, int]]]:
    """Reads the size and the parts of a sparse member in the old format of GNU tar."""
    numbers = [_number(header[i : i + 12]) for i in range(386, 482, 12)]
    size, extended = _number(header[483:495]), header[482]
    while extended:
        block = more(BLOCK)
        numbers += [_number(block[i : i + 12]) for i in range(0, 504, 12)]
        extended = block[504]
    return size, _pairs(numbers)


def _sparse_numbers(records: list[tuple[bytes, bytes]]) -> list[int]:
    """Reads the numbers of the pax formats 0.0 (a record each) and 0.1 (one record)."""
    wanted = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
    found = [_decimal(value) for key, value in records if key in wanted]
    maps = [value for key, value in records if key == b"GNU.sparse.map"]
    return [_decimal(n) for n in maps[-1].split(b",") if n] if maps else found


def _parts_in_data(block: Callable[[], bytes | None]) -> list[tuple[int, int]]:
    """Reads the map of the pax format 1.0: lines in front of the data, the first their number."""
    read: list[bytes] = []
    found, wanted = 0, 1
    while found < wanted:
        if (more := block()) is None:
            raise ValueError(_DAMAGED)
        read.append(more)
        if found == 0 and b"\n" in more:
            wanted += 2 * _decimal(b"".join(read).split(b"\n", 1)[0])
        found += more.count(b"\n")
    return _pairs([_decimal(line) for line in b"".join(read).split(b"\n")[1:wanted]])


def _check_parts(parts: list[tuple[int, int]], size: int, stored: int) -> None:
    """Refuses parts that overlap, are not in order, or are larger than the content or the data."""
    position = 0
    for offset, length in parts:
        if (length and offset < position) or offset + length > size:
            raise ValueError(_DAMAGED)
        position = max(position, offset + length)
    if sum(length for _, length in parts) > stored:
        raise ValueError(_DAMAGED)
