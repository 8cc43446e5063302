"""Decoding of pictures, with a bound on the pixels in memory."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Largest number of pixels that are decoded at a time. Pillow needs 4 bytes for a pixel, and up to
# 16 bytes while it decodes, rotates or converts a picture.
PIXELS_IN_FLIGHT = 2**27


def reason(error: BaseException) -> str:
    """Returns the message of an exception, or its type if it has no message."""
    return str(error) or type(error).__name__


@functools.cache
def extensions() -> set[str]:
    """Returns the extensions, in lower case, of the formats that Pillow reads by itself."""
    from PIL import Image

    Image.init()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    return {e for e, name in Image.registered_extensions().items() if name in readable}


class Budget:
    """Bounds the number of pixels that are decoded at a time.

    Attributes:
      limit: largest number of pixels. A larger picture is decoded while no other one is.
      reserved: number of pixels that are being decoded.
    """

    def __init__(self, limit: int = PIXELS_IN_FLIGHT):
        self.limit, self.reserved = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until `pixels` pixels are available, and reserves them during the block."""
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


def open_picture(file: BinaryIO) -> "Image.Image":
    """Opens the picture in this file and reads its header.

    Raises:
      Exception: any exception that Pillow raises for a file that is not a readable picture.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except UnidentifiedImageError:
        raise ValueError("it is not a picture in a format that Pillow reads") from None


def upright_rgb(picture: "Image.Image") -> "Image.Image":
    """Decodes the picture, rotates it according to its EXIF data, and converts it to RGB.

    Transparency is dropped, and grey levels of 16 bits are rounded to 8 bits. At most two copies of
    the pixels exist at a time. `picture` may be changed.

    Raises:
      Exception: any exception that Pillow raises for a damaged picture.
      ValueError: the range of the pixels is neither 8 nor 16 bits.
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith(("I", "F")):
        # Pillow's conversion to RGB would clip the pixels of these modes.
        grey = np.asarray(picture)
        if picture.mode == "F" or not 0 <= grey.min() <= grey.max() < 2**16:
            raise ValueError("the range of its pixels is neither 8 nor 16 bits")
        levels = np.empty(grey.shape, np.uint8)
        for row, level in zip(grey, levels):
            level[:] = (row / 257).round()
        picture = Image.fromarray(levels)
    if picture.has_transparency_data and picture.mode != "RGBA":
        picture = picture.convert("RGBA")
    return picture if picture.mode == "RGB" else picture.convert("RGB")
