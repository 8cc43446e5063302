"""Headers of encoded pictures, where Pillow needs help.

Pillow cannot open some pictures whose metadata are damaged, so this module removes metadata. And
the plugin for JPEG XL decodes a picture when it is opened, so this module reads the size before.
"""

import contextlib
import io
import re
import struct
from typing import BinaryIO

# First bytes of formats; those of AVIF and HEIC follow the size of a box.
JPEG, PNG, TIFF, FTYP = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", (b"II*\0", b"MM\0*"), b"ftyp"

# The item type of EXIF data in a HEIC or AVIF file, in a box of version 2 or 3.
EXIF_ITEM = re.compile(rb"(infe\x02.{7}|infe\x03.{9})Exif", re.DOTALL)

# Tags of a TIFF file that do not matter for its pixels: texts, resolution, XMP, IPTC, Photoshop,
# EXIF, colour profile, GPS.
TIFF_METADATA = {*range(269, 273), 282, 283, 285, 296, 305, 306, 315, 316, 700, 33432, 33723}
TIFF_METADATA |= {34377, 34665, 34675, 34853, 37724}

# First bytes of JPEG XL's codestream, and the numbers of bytes before it in the boxes that hold it.
JPEG_XL, CODESTREAM = b"\xff\x0a", {b"jxlc": 0, b"jxlp": 4}

# Largest number of JPEG XL's boxes before the codestream.
MOST_BOXES = 1000

# Aspect ratios of JPEG XL's pictures, whose widths need not be stored.
RATIOS = (None, (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def has_metadata(head: bytes) -> bool:
    """Returns whether a file that begins with these 12 bytes has a format of `without_metadata`."""
    return head.startswith((JPEG, PNG, *TIFF)) or head[4:8] == FTYP


def without_metadata(content: bytes) -> tuple[BinaryIO, bytes]:
    """Removes metadata from a picture in one of the formats in which they can hide its pixels.

    Returns:
      The picture, and the removed EXIF data if they can tell the orientation.
    """
    with contextlib.suppress(struct.error):  # Otherwise more is damaged than the metadata.
        if content.startswith(JPEG):
            return _jpeg(content)
        if content.startswith(PNG):
            return _png(content)
        if content.startswith(TIFF):
            return _tiff(content), b""
    # In AVIF and HEIC the orientation is not in the EXIF data.
    return io.BytesIO(EXIF_ITEM.sub(rb"\1free", content)), b""


def _jpeg(content: bytes) -> tuple[BinaryIO, bytes]:
    """Removes application segments and comments, but not those that specify the colour space."""
    kept, exif, at = io.BytesIO(), bytearray(), 2
    kept.write(content[:at])
    while content[at : at + 1] == b"\xff":
        marker, size = struct.unpack_from(">BH", content, at + 1)
        if marker == 0xDA:
            break
        if marker == 0xFF:  # Padding.
            at += 1
            continue
        segment = content[at : at + 2 + size]
        at += 2 + size
        if marker == 0xE1 and segment[4:10] == b"Exif\0\0":
            exif += segment[10 if exif else 4 :]
        # A decoder ignores a JFIF or Adobe segment that is shorter.
        elif not (0xE0 <= marker <= 0xEF or marker == 0xFE) or (
            marker in (0xE0, 0xEE) and len(segment) >= 16
        ):
            kept.write(segment)
    kept.write(memoryview(content)[at:])
    return kept, bytes(exif)


def _png(content: bytes) -> tuple[BinaryIO, bytes]:
    """Removes all chunks but the critical ones, whose names begin with a capital letter."""
    kept, exif, at = io.BytesIO(), b"", 8
    kept.write(content[:at])
    while at + 8 <= len(content):
        size, name = struct.unpack_from(">I4s", content, at)
        if name[:1].isupper():
            kept.write(memoryview(content)[at : at + 12 + size])
        elif name == b"eXIf":
            exif = content[at + 8 : at + 8 + size]
        at += 12 + size
    return kept, exif


def _tiff(content: bytes) -> BinaryIO:
    """Removes tags from the first directory."""
    order = "<" if content.startswith(b"II") else ">"
    (at,) = struct.unpack_from(f"{order}I", content, 4)
    (number,) = struct.unpack_from(f"{order}H", content, at)
    end = at + 2 + 12 * number
    entries = [content[i : i + 12] for i in range(at + 2, end, 12)]
    kept = [e for e in entries if struct.unpack_from(f"{order}H", e)[0] not in TIFF_METADATA]
    directory = struct.pack(f"{order}H", len(kept)) + b"".join(kept) + content[end : end + 4]
    changed = io.BytesIO()
    changed.write(content)
    changed.seek(at)
    changed.write(directory.ljust(end + 4 - at, b"\0"))
    return changed


def is_jpeg_xl(head: bytes) -> bool:
    """Returns whether a file that begins with these 12 bytes is a JPEG XL picture."""
    return head.startswith(JPEG_XL) or head == b"\0\0\0\x0cJXL \r\n\x87\n"


def jpeg_xl_pixels(file: BinaryIO) -> int:
    """Reads the number of pixels of a JPEG XL picture.

    The format is specified in ISO/IEC 18181, its headers in part 1 and its boxes in part 2.

    Raises:
      ValueError: the header is damaged.
    """
    position, name = 0, b""
    for _ in range(MOST_BOXES):
        file.seek(position)
        head = file.read(16)
        if name in CODESTREAM or head[:2] == JPEG_XL or len(head) < 16:
            break
        # A size of 1 means that a larger field follows, and 0 that this is the last box.
        size, name, large = struct.unpack(">I4sQ", head)
        if name in CODESTREAM:
            position += (16 if size == 1 else 8) + CODESTREAM[name]
        else:
            position += max(large if size == 1 else size, 8)
    if head[:2] != JPEG_XL:
        raise ValueError("its header is damaged")
    bits = int.from_bytes(head[2:].ljust(14, b"\0"), "little")

    def read(number: int) -> int:
        nonlocal bits
        value = bits & ((1 << number) - 1)
        bits >>= number
        return value

    def side() -> int:
        return 8 * (1 + read(5)) if small else 1 + read((9, 13, 18, 30)[read(2)])

    small = read(1)
    height = side()
    ratio = RATIOS[read(3)]
    return height * (height * ratio[0] // ratio[1] if ratio else side())
