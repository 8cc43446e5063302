"""Decoding of pictures, with a bound on the memory."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Memory in bytes for encoded pictures and for the pixels of pictures that are being decoded.
MEMORY = 5 * 2**28

# One of so many parts of this memory is for encoded pictures that wait for a decoder.
PARTS = 5

# Memory for a pixel: Pillow needs 4 bytes, and at most two copies of a picture exist at a time.
PIXEL = 8

# Function that opens a picture. Its argument is the number of bytes that it may hold in memory, and
# it raises LargerError if it needs more.
type Open = Callable[[float], BinaryIO]

# Default of the largest size of an encoded picture in bytes. Pillow refuses pictures of more than
# 178956970 pixels, which have 2^30 bytes with 16 bits for each of three colours.
MOST_BYTES = 2**30


def reason(error: BaseException) -> str:
    """Returns the beginning of an exception's message, or its type if it has no message."""
    return str(error)[:1000] or type(error).__name__


@functools.cache
def extensions() -> set[str]:
    """Returns the extensions, in lower case, of the formats that Pillow reads by itself."""
    from PIL import Image

    Image.init()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    return {e for e, name in Image.registered_extensions().items() if name in readable}


class LargerError(Exception):
    """A picture needs more memory than was reserved for it; `needed` is the number of bytes."""

    def __init__(self, needed: int):
        super().__init__(f"it needs {needed} bytes of memory")
        self.needed = needed


def check_room(needed: int, reserved: float) -> None:
    """Raises LargerError if more than the reserved number of bytes is needed."""
    if needed > reserved:
        raise LargerError(needed)


class Budget:
    """Bounds the memory for encoded pictures and for the pixels of decoded ones.

    A decoder reserves everything that it needs at once, and waits for nothing else while it has
    the memory. So a decoder can always go on, and every wait ends.

    Attributes:
      limit: number of bytes. A picture that needs more is decoded while no other one is.
      reserved: number of bytes that decoders have reserved.
      ahead: number of bytes of encoded pictures that wait for a decoder or are being decoded.
    """

    def __init__(self, limit: int = MEMORY):
        self.limit, self.reserved, self.ahead = limit, 0, 0
        self._changed = threading.Condition()

    def share(self, decoders: int) -> int:
        """Returns the number of bytes that each of several decoders can reserve at any time."""
        return (self.limit - self.limit // PARTS) // decoders

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Waits until `size` bytes are available to a decoder, and reserves them for the block."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self.reserved or self.ahead + self.reserved + size <= self.limit
            )
            self.reserved += size
        try:
            yield
        finally:
            with self._changed:
                self.reserved -= size
                self._changed.notify_all()

    def has_room_ahead(self, size: int) -> bool:
        """Returns whether `read_ahead(size)` would not wait."""
        return not self.ahead or (
            self.ahead + size <= self.limit // PARTS
            and self.ahead + self.reserved + size <= self.limit
        )

    def read_ahead(self, size: int) -> None:
        """Waits until there is memory for an encoded picture of `size` bytes, and reserves it."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room_ahead(size))
            self.ahead += size

    def forget(self, size: int) -> None:
        """Frees `size` bytes that `read_ahead` has reserved."""
        with self._changed:
            self.ahead -= size
            self._changed.notify_all()


def check_size(size: int, most: int) -> None:
    """Raises ValueError if an encoded picture has more than `most` bytes."""
    if size > most:
        raise ValueError(f"it has {size} bytes, more than --max-bytes {most}")


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
