"""Pictures to pixels, of which a bounded number is in memory."""

import contextlib
import functools
import os
import stat
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Pixels that are decoded at a time. Pillow takes 4 bytes for one, and up to 16 while it decodes,
# turns or converts a picture.
PIXELS_IN_FLIGHT = 2**27


def printable(text: object) -> str:
    """The text with control characters, line ends and surrogates escaped, on one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def reason(error: BaseException) -> str:
    """What an exception says, or what it is."""
    return str(error) or type(error).__name__


@functools.cache
def extensions() -> set[str]:
    """The extensions of the formats that Pillow reads itself, in lower case."""
    from PIL import Image

    Image.init()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    return {e for e, name in Image.registered_extensions().items() if name in readable}


class Budget:
    """Bounds the pixels that are decoded at a time.

    Attributes:
      limit: number of pixels. A picture of more is decoded while there is no other.
      reserved: number of pixels that are being decoded.
    """

    def __init__(self, limit: int = PIXELS_IN_FLIGHT):
        self.limit, self.reserved = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for `pixels` pixels, and reserves it during the block."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self.reserved or self.reserved + pixels <= self.limit
            )
            self.reserved += pixels
        try:
            yield
        finally:
            with self._changed:
                self.reserved -= pixels
                self._changed.notify_all()


def open_regular(path: str) -> BinaryIO:
    """Opens a regular file for reading; an OSError, without waiting, if it is a FIFO or device."""

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    file = open(path, "rb", opener=at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def open_picture(file: BinaryIO) -> "Image.Image":
    """The picture in this file, of which only the header is read.

    Raises:
      Exception: whatever Pillow raises about a file that is no readable picture.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except UnidentifiedImageError:
        raise ValueError("it is no picture of a format that Pillow reads") from None


def upright_rgb(picture: "Image.Image") -> "Image.Image":
    """Decodes the picture, turns it as its EXIF data say, and converts it to RGB.

    Transparency is dropped; grey levels of 16 bits are rounded to 8. There are at most two copies
    of the pixels at a time. `picture` may be changed.

    Raises:
      Exception: whatever Pillow raises about a damaged picture.
      ValueError: the pixels have another range than 8 or 16 bits.
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith(("I", "F")):
        # Pillow's conversion to RGB would clip these.
        grey = np.asarray(picture)
        if picture.mode == "F" or not 0 <= grey.min() <= grey.max() < 2**16:
            raise ValueError("its pixels have another range than 8 or 16 bits")
        levels = np.empty(grey.shape, np.uint8)
        for row, level in zip(grey, levels):
            level[:] = (row / 257).round()
        picture = Image.fromarray(levels)
    if picture.has_transparency_data and picture.mode != "RGBA":
        picture = picture.convert("RGBA")
    return picture if picture.mode == "RGB" else picture.convert("RGB")
