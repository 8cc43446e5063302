"""Whatever tars, tables and pictures contain, reading ends, in little memory, and in words."""

import bz2
import functools
import gzip
import io
import itertools
import lzma
import pickle
import random
import signal
import tarfile

import numpy as np
import pytest

from pallas_patch_embed.embed import (
    tars,
    units,
)

pytestmark = pytest.mark.usefixtures("time_limit")


# Tars are made by hand, because tarfile refuses to write most of these.


def octal(number):
    return b"%011o\0" % number


def binary(number):
    """Encodes a number in base 256, as GNU tar does for large and for negative numbers."""
    return (b"\xff" if number < 0 else b"\x80") + (number % 256**11).to_bytes(11)


def header(name, size=0, kind=b"0", magic=b"ustar\00000", change=None):
    block = bytearray(512)
    block[: len(name)] = name
    block[100:124] = b"0000644\0" + 2 * b"0000000\0"
    block[124:136] = size if isinstance(size, bytes) else octal(size)
    block[136:148] = octal(0)
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    if change is not None:
        change(block)
    return with_checksum(block)


def with_checksum(block):
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name, content=b"", kind=b"0", **options):
    return header(name, len(content), kind, **options) + content + bytes(-len(content) % 512)


def record(key, value):
    """Makes a pax record, whose length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    length = next(n for n in itertools.count(len(rest)) if n == len(b"%d" % n) + len(rest))
    return b"%d" % length + rest


def pax(*records, kind=b"x"):
    return member(b"pax", b"".join(itertools.starmap(record, records)), kind)


def sparse(name, parts, size, stored, extended=(), more=b"\0", number=octal):
    """Makes the headers of a member in the old format for files with holes."""

    def change(block):
        for i, part in enumerate(parts):
            block[386 + 24 * i : 410 + 24 * i] = b"".join(map(number, part))
        block[482:483] = b"\1" if extended else b"\0"
        block[483:495] = number(size)

    blocks = [header(name, number(stored), b"S", b"ustar  \0", change)]
    for i, group in enumerate(extended):
        block = b"".join(number(n) for part in group for n in part).ljust(504, b"\0")
        last = i + 1 == len(extended)
        blocks.append((block + (more if last else b"\1")).ljust(512, b"\0"))
    return b"".join(blocks)


def sparse_pax(records, name=b"GNUSparseFile.0/h.png"):
    return pax(*records) + header(name, 512)


A, B = member(b"a.png", b"first"), member(b"b.png", b"last")
END = bytes(1024)
BIG = 2**62
HUGE_NAME = b"n" * 5000 + b".png"
AT = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")

# For each tar: what is between the pictures a and b; what is found there; and a part of the reason
# why the tar cannot be read further, or None if b is found.
DAMAGED, CUT, LONG = "a header is damaged", "its end is missing", "a header has more than"
TARS = {
    # Sizes that are negative, no numbers, or larger than the file.
    "a negative size of a picture": (header(b"x.png", binary(-512)), [], DAMAGED),
    "a negative size of a text": (header(b"x.txt", binary(-512)), [], DAMAGED),
    "a size of -1": (header(b"x.png", binary(-1)), [], DAMAGED),
    "the smallest size": (header(b"x.png", b"\xff" + bytes(11)), [], DAMAGED),
    "the largest size": (header(b"x.txt", b"\x80" + b"\xff" * 11), [], CUT),
    "the largest size of a picture": (header(b"x.png", b"\x80" + b"\xff" * 11), ["x"], CUT),
    "a size of 2 ** 63": (header(b"x.txt", binary(2**63)), [], CUT),
    "a size of 2 ** 64 - 512": (header(b"x.txt", binary(2**64 - 512)), [], CUT),
    "another first byte of base 256": (header(b"x.png", b"\xc0" + bytes(11)), [], DAMAGED),
    "octal garbage": (header(b"x.png", b"0000000089\0\0"), [], DAMAGED),
    "a negative octal size": (header(b"x.png", b"-0000001000\0"), [], DAMAGED),
    "an octal size with a prefix": (header(b"x.png", b"0o000001000\0"), [], DAMAGED),
    "an octal size with an underscore": (header(b"x.png", b"000000_1000\0"), [], DAMAGED),
    "text as a size": (header(b"x.png", b"size of text"), [], DAMAGED),
    "the largest octal size": (header(b"x.txt", b"777777777777"), [], CUT),
    "a size of spaces": (header(b"x.txt", b" " * 12), [], None),
    "a negative size of a folder": (header(b"x", binary(-512), b"5"), [], DAMAGED),
    "a large size of a folder": (header(b"x", octal(10**9), b"5"), [], None),
    "a large size of a hard link": (header(b"x.png", octal(10**9), b"1"), ["x"], None),
    "a large size of a symbolic link": (header(b"x.png", octal(10**9), b"2"), ["x"], None),
    "a large size of a device": (header(b"x.png", octal(10**9), b"3"), [], None),
    "an unknown kind": (member(b"x.png", b"data", b"Z"), [], None),
    "an unknown kind that is too large": (header(b"x.png", BIG.to_bytes(8), b"Z"), [], DAMAGED),
    "no checksum": (bytes(148) + b" " * 8 + b"0" * 356, [], DAMAGED),
    "a checksum of text": (b"x" * 512, [], DAMAGED),
    "a block of text": (b"<html>".ljust(512), [], DAMAGED),
    # Pax records.
    "a negative pax size": (pax((b"size", b"-512")) + header(b"x.png", 512), [], DAMAGED),
    "a pax size of text": (pax((b"size", b"1e3")) + header(b"x.png", 512), [], DAMAGED),
    "an empty pax size": (pax((b"size", b"")) + header(b"x.png", 512), [], DAMAGED),
    "a pax size of 5000 digits": (pax((b"size", b"9" * 5000)) + header(b"x.png"), [], DAMAGED),
    "a large pax size": (pax((b"size", b"%d" % BIG)) + header(b"x.txt"), [], CUT),
    "a global negative size": (pax((b"size", b"-1"), kind=b"g") + A, [], DAMAGED),
    "a pax record of no length": (member(b"p", b"0 path=x.png\n", b"x") + A, [], DAMAGED),
    "a pax record that is too short": (member(b"p", b"3 path=x.png\n", b"x") + A, [], DAMAGED),
    "a pax record that is too long": (member(b"p", b"99 path=x.png\n", b"x") + A, [], DAMAGED),
    "a pax record of negative length": (member(b"p", b"-9 path=x\n", b"x") + A, [], DAMAGED),
    "a pax record of huge length": (member(b"p", b"9" * 400 + b" a=b\n", b"x") + A, [], DAMAGED),
    "a pax record without a value": (member(b"p", b"7 path\n", b"x") + A, [], DAMAGED),
    "a pax record without an end": (member(b"p", b"13 path=x.png", b"x") + A, [], DAMAGED),
    "pax records of zeros": (member(b"p", bytes(600), b"x") + member(b"c.png"), ["c"], None),
    "a pax header of a negative size": (header(b"p", binary(-512), b"x") + A, [], DAMAGED),
    "a pax header that is too large": (header(b"p", binary(BIG), b"x") + A, [], LONG),
    "a long name of a negative size": (header(b"p", binary(-512), b"L") + A, [], DAMAGED),
    "a long name that is too large": (header(b"p", binary(BIG), b"L") + A, [], LONG),
    "a long link that is too large": (header(b"p", binary(BIG), b"K") + A, [], LONG),
    "a global header that is too large": (header(b"p", binary(BIG), b"g") + A, [], LONG),
    "a chain of pax headers": (3000 * pax((b"a", b"b")) + A, [], LONG),
    "a chain of global headers": (3000 * pax((b"a", b"b"), kind=b"g") + A, [], LONG),
    "a chain of long names": (3000 * member(b"l", b"x", b"L") + A, [], LONG),
    "a chain of empty long names": (3000 * member(b"l", b"", b"L") + A, [], LONG),
    "a short chain": (
        500 * (member(b"l", b"x", b"K") + pax((b"path", b"c.png"))) + A,
        ["c"],
        None,
    ),
    "a pax header at the end": (pax((b"path", b"x.png")) + END, [], CUT),
    # Names.
    "a long name": (member(b"l", HUGE_NAME + b"\0", b"L") + A, [HUGE_NAME[:-4].decode()], None),
    "a name that is too long": (
        member(b"l", b"n" * 20000 + b".png\0", b"L") + A,
        ["n" * 200 + "..."],
        None,
    ),
    "a link to a name that is too long": (
        member(b"l", b"n" * 20000, b"K") + header(b"x.png", kind=b"2"),
        ["x"],
        None,
    ),
    "a name with NUL": (member(b"c.png\0.txt"), ["c"], None),
    "a pax name with NUL": (pax((b"path", b"c.png\0.txt")) + A, ["c"], None),
    "an empty name": (member(b""), [], None),
    "an empty pax name": (pax((b"path", b"")) + A, [], None),
    "a name of slashes": (member(b"////"), [], None),
    "a name that is not UTF-8": (member(b"\xff.png"), ["\\xff"], None),
    "a name of an escape sequence": (member(b"\x1b[31m.png"), ["\x1b[31m"], None),
    "a name outside of the folder": (member(b"../../c.png"), ["../../c"], None),
    # Files with holes in the formats of GNU tar: old, and 0.0, 0.1 and 1.0 of pax.
    "a hole of 20 GB": (
        sparse(b"h.png", [(2 * 10**10, 0)], 2 * 10**10, 0, number=binary),
        ["h"],
        None,
    ),
    "holes of 2 ** 62 bytes": (
        sparse(b"h.png", [(BIG, 0)], BIG, 0, number=binary),
        ["h"],
        None,
    ),
    "a negative offset": (sparse(b"h.png", [(-512, 512)], 512, 0, number=binary), [], DAMAGED),
    "a negative length": (sparse(b"h.png", [(0, -512)], 512, 0, number=binary), [], DAMAGED),
    "a negative size of a whole": (sparse(b"h.png", [], -512, 0, number=binary), [], DAMAGED),
    "parts that overlap": (
        sparse(b"h.png", [(0, 300), (200, 200)], 400, 512) + bytes(512),
        [],
        DAMAGED,
    ),
    "parts in the wrong order": (
        sparse(b"h.png", [(512, 9), (0, 9)], 1024, 512) + bytes(512),
        [],
        DAMAGED,
    ),
    "a part beyond the end": (sparse(b"h.png", [(0, 512)], 9, 512) + bytes(512), [], DAMAGED),
    "more parts than data": (sparse(b"h.png", [(0, 9)], 9, 0), [], DAMAGED),
    "a map that does not end": (
        sparse(b"h.png", [], 9, 0, [[(0, 0)]] * 2100, more=b"\1"),
        [],
        LONG,
    ),
    "many parts": (
        sparse(b"h.png", [], 90, 0, [[(i, 0)] for i in range(90)]),
        ["h"],
        None,
    ),
    "a map with an odd number of numbers": (
        sparse_pax([(b"GNU.sparse.map", b"0,1,2"), (b"GNU.sparse.size", b"9")]),
        [],
        DAMAGED,
    ),
    "a map of text": (
        sparse_pax([(b"GNU.sparse.map", b"a,b"), (b"GNU.sparse.size", b"9")]),
        [],
        DAMAGED,
    ),
    "a map of negative numbers": (
        sparse_pax([(AT[0], b"-1"), (AT[1], b"2"), (b"GNU.sparse.size", b"9")]),
        [],
        DAMAGED,
    ),
    "a negative size of a pax sparse file": (
        sparse_pax([(b"GNU.sparse.size", b"-9")]),
        [],
        DAMAGED,
    ),
    "a huge size of a pax sparse file": (
        sparse_pax([(b"GNU.sparse.size", b"%d" % BIG)]) + bytes(512),
        ["GNUSparseFile.0/h"],
        None,
    ),
    "a map in the data that does not end": (
        sparse_pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9")]) + b"9" * 512,
        [],
        DAMAGED,
    ),
    "a map in the data with a huge number of parts": (
        sparse_pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9")])
        + b"9999999999\n".ljust(512, b"0"),
        [],
        DAMAGED,
    ),
    "a map in the data with a negative number of parts": (
        sparse_pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9")])
        + b"-1\n".ljust(512, b"0"),
        [],
        DAMAGED,
    ),
    "a map in the data that is larger than the data": (
        pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9"))
        + header(b"h.png", 3)
        + b"0\n".ljust(512, b"\0"),
        [],
        DAMAGED,
    ),
}

# Content of a whole, its parts, and what is stored.
HOLES = b"before" + bytes(1000) + b"after" + bytes(7)
STORED = b"beforeafter"
PARTS_OF_HOLES = [(0, 6), (1006, 5), (1018, 0)]
NUMBERS = [str(n).encode() for part in PARTS_OF_HOLES for n in part]
SPARSE_TARS = {
    "old": sparse(b"h.png", PARTS_OF_HOLES, 1018, 11) + STORED.ljust(512, b"\0"),
    "old, with a second block": sparse(b"h.png", PARTS_OF_HOLES[:1], 1018, 11, [PARTS_OF_HOLES[1:]])
    + STORED.ljust(512, b"\0"),
    "0.0": pax(
        (b"GNU.sparse.size", b"1018"),
        *zip(itertools.cycle(AT), NUMBERS),
        (b"GNU.sparse.name", b"h.png"),
    )
    + member(b"x", STORED),
    "0.1": pax(
        (b"GNU.sparse.size", b"1018"),
        (b"GNU.sparse.map", b",".join(NUMBERS)),
        (b"GNU.sparse.name", b"h.png"),
    )
    + member(b"x", STORED),
    "1.0": pax(
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"h.png"),
        (b"GNU.sparse.realsize", b"1018"),
    )
    + member(b"x", b"".join(n + b"\n" for n in [b"3", *NUMBERS]).ljust(512, b"\0") + STORED),
}


def read(source):
    """Returns contents or reasons by id, in order; a content that ends early is left out."""
    found = {}
    for picture in itertools.islice(source.pictures(), 1000):
        assert picture.id not in found
        try:
            with pickle.loads(pickle.dumps(picture.in_memory()))(float("inf")) as file:
                found[picture.id] = file.read()
        except units.SourceEndsError:
            continue
        except (OSError, ValueError) as error:
            found[picture.id] = str(error)
    return found


def compressed_in(format, content):
    compress = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    return compress[format](content)


class Moving:
    """Asserts that the position in a tar never decreases, and that all members end."""

    def __init__(self, blocks):
        self._blocks, self.position = blocks, 0

    def read(self, size):
        return self._then(self._blocks.read, size)

    def skip(self, size):
        return self._then(self._blocks.skip, size)

    def _then(self, do, size):
        assert size >= 0
        try:
            return do(size)
        finally:
            assert self._blocks.position >= self.position
            self.position = self._blocks.position


@pytest.fixture
def moving(monkeypatch):
    blocks = units.Tar._blocks

    def watched(self, file):
        found, version = blocks(self, file)
        return Moving(found), version

    monkeypatch.setattr(units.Tar, "_blocks", watched)


@pytest.mark.parametrize("format", ["plain", "gz"])
@pytest.mark.parametrize("name", TARS)
def test_a_tar_is_read_to_its_end_or_to_a_wrong_header(tmp_path, moving, name, format):
    """What was found before a wrong header is kept."""
    between, wanted, why = TARS[name]
    path = tmp_path / "t.tar"
    path.write_bytes(compressed_in(format, A + between + B + END))
    found = read(units.Tar(str(path)))
    assert found.pop("a") == b"first"
    if why is None:
        assert found.pop("b") == b"last"
    else:
        assert found.pop(str(path)).startswith(f"the tar cannot be read to its end: {why}")
    assert list(found) == wanted


@pytest.mark.parametrize("format", ["plain", "gz", "bz2", "xz"])
@pytest.mark.parametrize("name", SPARSE_TARS)
def test_a_member_with_holes_is_read_in_all_formats_of_GNU_tar(tmp_path, moving, name, format):
    path = tmp_path / "t.tar"
    path.write_bytes(compressed_in(format, A + SPARSE_TARS[name] + B + END))
    wanted = {"a": b"first", "h": HOLES, "b": b"last"}
    assert read(units.Tar(str(path))) == wanted
    with tarfile.open(path) as tar:
        assert tar.extractfile("h.png").read() == HOLES


def names():
    """Yields names of every kind and length that formats of tars treat differently."""
    for length in (1, 50, 95, 96, 97, 99, 100, 101, 150, 154, 155, 156, 250, 255, 256, 257, 4000):
        yield "n" * length + ".png"
        yield "/".join(itertools.repeat("d" * 40, -(-length // 41))) + ".png"
    yield from ("ü" * 60 + ".png", "写真.png", "./c.png", "a//b.png", "\udcff.png", "x=y.png")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path, moving, format):
    path, written = tmp_path / "t.tar", 0
    random.seed(0)
    with tarfile.open(path, "w", format=format) as tar:
        for name in names():
            content = random.randbytes(random.choice((0, 1, 511, 512, 513, 3000)))
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid = len(content), random.choice((1, 1.5, -3)), 1000
            info.linkname = random.choice(("", name))
            info.type = tarfile.SYMTYPE if info.linkname else random.choice((b"0", b"\0", b"7"))
            info.size = 0 if info.linkname else info.size
            if format != tarfile.PAX_FORMAT:
                info.mtime = abs(int(info.mtime))
            try:
                tar.addfile(info, io.BytesIO(content))
            except ValueError:  # The name is too long for this format.
                continue
            written += 1
    assert written >= 12
    with tarfile.open(path) as tar, open(path, "rb") as file:
        blocks = tars.Plain(file)
        for wanted, found in zip(tar, tars.members(blocks), strict=True):
            assert (wanted.name, wanted.size) == (found.name, found.size)
            assert (found.kind in tars.LINKS) == wanted.issym()
            assert found.link == wanted.linkname
            if wanted.isreg():
                assert tars.content(blocks, found) == tar.extractfile(wanted).read()


MUTATED = {
    "a file": member(b"c.png", b"content"),
    "a long name": member(b"l", HUGE_NAME, b"L") + member(b"c", b"content"),
    "pax records": pax((b"path", b"c.png"), (b"size", b"7"), (b"linkpath", b"l"))
    + member(b"d.png", b"content"),
    "old sparse": SPARSE_TARS["old, with a second block"],
    "sparse 0.0": SPARSE_TARS["0.0"],
    "sparse 1.0": SPARSE_TARS["1.0"],
}


@pytest.mark.parametrize("name", MUTATED)
def test_whatever_byte_of_a_header_is_changed_reading_ends(tmp_path, moving, name):
    """Checksums are right, as in a tar that somebody made for this purpose."""
    whole = A + MUTATED[name] + B + END
    rng = np.random.default_rng(0)
    blocks = [
        at
        for at in range(len(A), len(whole) - len(B + END), 512)
        if whole[at + 257 : at + 262] == b"ustar" or name == "sparse 1.0" or "pax" in name
    ]
    path = tmp_path / "t.tar"
    for at, i in itertools.product(blocks, range(512)):
        if i % 3 and not 100 <= i < 160 and not 380 < i < 500:
            continue
        changed = bytearray(whole)
        changed[at + i] = int(rng.choice((0, 0x20, 0x30, 0x37, 0x80, 0xFF, rng.integers(256))))
        if whole[at + 257 : at + 262] == b"ustar":
            changed[at : at + 512] = with_checksum(changed[at : at + 512])
        path.write_bytes(changed)
        found = read(units.Tar(str(path)))
        assert found["a"] == b"first" and len(found) <= 4


# Compressed tars.

TAR = A + B + END
WHOLE = {"a": b"first", "b": b"last"}


@pytest.mark.parametrize("format", ["gz", "bz2", "xz"])
def test_a_compressed_tar_may_have_several_streams(tmp_path, moving, format):
    """Parallel compressors write them, and `cat` makes them."""
    path = tmp_path / "t.tar"
    path.write_bytes(
        b"".join(compressed_in(format, TAR[i : i + 300]) for i in range(0, len(TAR), 300))
    )
    assert read(units.Tar(str(path))) == WHOLE


@pytest.mark.parametrize("format", ["gz", "bz2", "xz"])
def test_what_follows_the_end_of_a_tar_does_not_matter(tmp_path, moving, format):
    path = tmp_path / "t.tar"
    for rest in (b"garbage", bytes(10**5), gzip.compress(TAR), TAR, b"\x1f\x8b\xff"):
        path.write_bytes(compressed_in(format, TAR) + rest)
        assert read(units.Tar(str(path))) == WHOLE
        path.write_bytes(compressed_in(format, TAR + rest))
        assert read(units.Tar(str(path))) == WHOLE


@pytest.mark.parametrize("format", ["gz", "bz2", "xz"])
def test_a_compressed_tar_that_ends_early_is_an_error(tmp_path, moving, format):
    random.seed(1)
    first, second = random.randbytes(300), random.randbytes(300)
    tar = member(b"a.png", first) + member(b"b.png", second) + END
    whole = compressed_in(format, tar)
    path, most = tmp_path / "t.tar", 0
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        found = read(units.Tar(str(path)))
        assert found.pop("a", first) == first and found.pop("b", second) == second
        most += not found
        assert not found or found[str(path)].startswith("the tar cannot be read to its end: ")
    assert most <= 16  # Only the checksum after the tar's end may be missing.


@pytest.mark.parametrize("format", ["gz", "bz2", "xz"])
def test_whatever_byte_of_a_compressed_tar_is_changed_reading_ends(tmp_path, moving, format):
    whole = compressed_in(format, TAR)
    path = tmp_path / "t.tar"
    for i in range(len(whole)):
        for change in (1, 0x80, 0xFF):
            changed = bytearray(whole)
            changed[i] ^= change
            path.write_bytes(changed)
            assert set(read(units.Tar(str(path)))) <= {"a", "b", str(path)}


def test_a_compressed_tar_in_a_compressed_file_is_no_tar(tmp_path):
    path = tmp_path / "t.tar.gz"
    path.write_bytes(gzip.compress(gzip.compress(TAR)))
    (why,) = read(units.Tar(str(path))).values()
    assert DAMAGED in why or CUT in why


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0", bytes(100), b"x"])
def test_the_beginning_of_a_tar_alone_is_an_error(tmp_path, content):
    path = tmp_path / "t.tar"
    path.write_bytes(content)
    (why,) = read(units.Tar(str(path))).values()
    assert why.startswith("the tar cannot be read to its end: ")


@functools.cache
def repeated(size):
    """Returns a gzip stream of `size` zeros."""
    return gzip.compress(bytes(size))


def zeros(size):
    """Returns gzip streams of many zeros, without compressing all of them."""
    assert size % 2**24 == 0
    return repeated(2**24) * (size // 2**24)


def test_a_text_of_1_GB_that_is_skipped_takes_linear_time(tmp_path):
    """The standard library's reader of streams needs more than a minute for it."""
    path = tmp_path / "t.tar.gz"
    begin = gzip.compress(A + header(b"x.txt", 2**30))
    path.write_bytes(begin + zeros(2**30) + gzip.compress(B + END))
    signal.alarm(40)
    assert read(units.Tar(str(path))) == WHOLE


@pytest.mark.parametrize("format", ["bz2", "xz"])
def test_a_tar_that_expands_a_thousandfold_is_an_error(tmp_path, monkeypatch, format):
    """1 MB of bzip2 may expand to 1 TB; 3 MB stand for 4 GB here."""
    monkeypatch.setattr(tars, "EXPANDED", 3 * 2**20)
    path = tmp_path / "t.tar"
    for size, wanted in ((2**21, WHOLE), (2**25, {"a": b"first"})):
        text = header(b"x.txt", size) + bytes(size)
        path.write_bytes(compressed_in(format, A + text + B + END))
        found = read(units.Tar(str(path)))
        if wanted != WHOLE:
            assert "it expands to more than 1100 times its size" in found.pop(str(path))
        assert found == wanted


def test_xz_that_needs_much_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.tar"
    path.write_bytes(lzma.compress(TAR, preset=6))
    assert read(units.Tar(str(path))) == WHOLE
    monkeypatch.setattr(tars, "XZ_MEMORY", 2**20)
    (why,) = read(units.Tar(str(path))).values()
    assert "Memory usage limit exceeded" in why
