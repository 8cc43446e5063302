"""Decoding of pictures, with a bound on the memory."""

import contextlib
import ctypes
import functools
import importlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pallas_patch_embed.embed import headers, jpeg

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

# Default of the largest number of pixels of a picture, Pillow's limit.
MOST_PIXELS = 178956970

# Notes about a picture that was decoded, as the end of a sentence that begins with their number.
DAMAGED_METADATA, TRUNCATED = "had damaged metadata", "were truncated"

# Extensions of the formats that Pillow reads with a plugin, and the plugins' modules.
PLUGINS = dict.fromkeys((".heic", ".heif", ".hif"), "pillow_heif") | {".jxl": "pillow_jxl"}

# Beginning of the message with which Pillow says that the end of a picture is missing.
PILLOW_TRUNCATED = "image file is truncated"

# Largest height in pixels of a row of a JPEG's blocks, and of what libjpeg smooths below it.
BLOCKS_HEIGHT = 32 + 16

# EXIF tag of the orientation, and the transpositions (PIL.Image.Transpose) that undo each one.
ORIENTATION = 0x0112
UNDO = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def reason(error: BaseException) -> str:
    """Returns the beginning of an exception's message, or its type if it has no message."""
    text = str(error)[:1000]
    if isinstance(error, FileNotFoundError) and text and " " not in text:
        return f"{text} is not found"  # Packages for URLs give only the name.
    return text or type(error).__name__


@functools.cache
def _register_plugins() -> None:
    """Registers Pillow's plugins that are installed, after the formats that it reads by itself."""
    from PIL import Image

    Image.init()
    for name in sorted(set(PLUGINS.values())):
        # A plugin that is damaged, or not made for this Pillow, raises any kind of error.
        with contextlib.suppress(Exception):
            plugin = importlib.import_module(name)
            # Several pictures are decoded at a time, each with one thread.
            if name == "pillow_heif":
                plugin.register_heif_opener(decode_threads=1)
            else:
                plugin.JpegXLImagePlugin.DECODE_THREADS = 0


@functools.cache
def extensions() -> set[str]:
    """Returns the extensions, in lower case, of the formats that Pillow and its plugins read."""
    from PIL import Image

    _register_plugins()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    return {e for e, name in Image.registered_extensions().items() if name in readable}


def missing_plugin(extension: str) -> str | None:
    """Returns what to do to read pictures with this extension, or None if no plugin is missing."""
    if extension.lower() in PLUGINS.keys() - extensions():
        return "install a plugin of Pillow: pip install 'pallas_patch_embed[formats]'"
    return None


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

    def share(self, decoders: int) -> int:
        """Returns the number of bytes that each of several decoders can reserve at any time."""
        return (self.limit - self.limit // PARTS) // decoders

    def reserve(self, size: int) -> bool:
        """Reserves `size` bytes for a decoder, if they are available; returns whether they are."""
        if self.reserved and self.ahead + self.reserved + size > self.limit:
            return False
        self.reserved += size
        return True

    def free(self, size: int) -> None:
        """Frees `size` bytes that a decoder has reserved."""
        self.reserved -= size

    def has_room_ahead(self, size: int) -> bool:
        """Returns whether there is memory for an encoded picture of `size` bytes."""
        return not self.ahead or (
            self.ahead + size <= self.limit // PARTS
            and self.ahead + self.reserved + size <= self.limit
        )

    def read_ahead(self, size: int) -> None:
        """Reserves memory for an encoded picture of `size` bytes, for which there is room."""
        self.ahead += size

    def forget(self, size: int) -> None:
        """Frees `size` bytes that `read_ahead` has reserved."""
        self.ahead -= size


def check_size(size: int, most: int) -> None:
    """Raises ValueError if an encoded picture has more than `most` bytes."""
    if size > most:
        raise ValueError(f"it has {size} bytes, more than --max-bytes {most}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Prevents Pillow, its plugins and libtiff from writing to standard error, in all threads.

    They would write about each damaged picture, some for each of its rows.
    """
    from PIL import _imaging

    logger = logging.getLogger("PIL")
    level = logger.level
    before = None
    try:
        # Symbols of the libraries that Pillow uses are found too, except on some platforms.
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
    except (AttributeError, OSError):
        set_handler = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif|pillow_jxl)(\.|$)")
        try:
            logger.setLevel(logging.CRITICAL + 1)
            if set_handler is not None:
                before = set_handler(None)
            yield
        finally:
            logger.setLevel(level)
            if set_handler is not None:
                set_handler(before)


class LimitError(ValueError):
    """A picture is larger than a limit that the user can change."""


class TruncatedError(OSError):
    """The end of a picture is missing."""


class _Tolerance(threading.local):
    """Value of Pillow's LOAD_TRUNCATED_IMAGES that each thread sets for itself."""

    on = False

    def __bool__(self) -> bool:
        return self.on


_tolerance, _settings = _Tolerance(), threading.Lock()


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    """Makes Pillow decode what there is of a truncated picture, in this thread."""
    from PIL import ImageFile

    ImageFile.LOAD_TRUNCATED_IMAGES = _tolerance  # type: ignore[assignment]
    _tolerance.on = True
    try:
        yield
    finally:
        _tolerance.on = False


def lift_limit(pixels: int) -> None:
    """Makes Pillow open pictures of so many pixels, unless it does already."""
    from PIL import Image

    with _settings:
        if pixels > MOST_PIXELS and Image.MAX_IMAGE_PIXELS is not None:
            # Pillow refuses pictures of more than twice this number.
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, -(-pixels // 2))


# Function that raises an error if a picture needs too much. Its arguments are the number of pixels,
# and the number of copies of the encoded picture that are in memory.
type Check = Callable[[int, int], None]


def decode_upright(
    file: BinaryIO, check: Check, allow_truncated: bool = False
) -> tuple["Image.Image", tuple[str, ...]]:
    """Decodes the picture in this file as `decode` does, always to one of Pillow's."""
    picture, notes = decode(file, check, allow_truncated, lambda *_: False)
    assert not isinstance(picture, np.ndarray)
    return picture, notes


def decode(
    file: BinaryIO, check: Check, allow_truncated: bool, as_array: Callable[[int, int], bool]
) -> tuple["Image.Image | np.ndarray", tuple[str, ...]]:
    """Decodes the picture in this file, upright and in RGB, whatever its metadata are.

    Transparency is dropped, and grey levels of 16 bits are rounded to 8 bits. At most two copies of
    the pixels exist at a time.

    Args:
      file: the file.
      check: function that is called before pixels are decoded.
      allow_truncated: whether a picture whose end is missing is decoded. Missing pixels are grey
        or black.
      as_array: function of the (width, height) that tells whether the caller needs only the pixels.

    Returns:
      The picture, or its pixels [H, W, 3] uint8 where `as_array` allows them and they take less
      time; and notes about it, `DAMAGED_METADATA` and `TRUNCATED`.

    Raises:
      Exception: any exception of `check`, or that Pillow raises for a file that is not a readable
        picture.
      TruncatedError: the end is missing, or everything but the header.
    """
    source, copies, exif, tolerance = file, 1, b"", False
    while True:
        # An exception keeps the pixels of a failed attempt; they are freed where its block ends.
        try:
            with _tolerant() if tolerance else contextlib.nullcontext():
                picture, damaged = _decoded(source, check, copies, exif, as_array)
            break
        except (LargerError, LimitError):
            raise
        except TruncatedError as error:
            if not allow_truncated:
                raise TruncatedError(f"{error}; --allow-truncated embeds what there is") from None
            if tolerance:
                raise
            tolerance = True
            continue
        except Exception:
            file.seek(0)
            if copies == 2 or not headers.has_metadata(file.read(12)):
                raise
        copies = 2
        check(0, copies)
        file.seek(0)
        source, exif = headers.without_metadata(file.read())
    notes = ((DAMAGED_METADATA, damaged or copies == 2), (TRUNCATED, tolerance))
    return picture, tuple(note for note, holds in notes if holds)


def _open(file: BinaryIO, check: Check, copies: int) -> "Image.Image":
    """Opens the picture in this file and checks the number of pixels in its header."""
    from PIL import Image, UnidentifiedImageError

    file.seek(0)
    head = file.read(12)
    if headers.is_jpeg_xl(head):
        check(headers.jpeg_xl_pixels(file), copies)
    try:
        try:
            picture = Image.open(file)
        except UnidentifiedImageError:
            _register_plugins()
            picture = Image.open(file)
        check(picture.width * picture.height, copies)
        return picture
    except Image.DecompressionBombError as error:
        if found := re.search(r"\d+", str(error)):
            check(int(found[0]), copies)
        raise LimitError(str(error)) from None
    except UnidentifiedImageError:
        heic = head[4:12] in (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftyphevx")
        kind = ".jxl" if headers.is_jpeg_xl(head) else ".heic" if heic else ""
        advice = missing_plugin(kind)
        hint = f"; to read {kind} pictures, {advice}" if advice else ""
        raise ValueError(f"it is not a picture in a format that Pillow reads{hint}") from None


def _decoded(
    file: BinaryIO, check: Check, copies: int, exif: bytes, as_array: Callable[[int, int], bool]
) -> tuple["Image.Image | np.ndarray", bool]:
    """Decodes a picture as `upright_rgb` does, or a usual JPEG to an array if that is allowed."""
    picture = _open(file, check, copies)
    usual = picture.format == "JPEG" and not exif and as_array(*picture.size)
    damaged = False
    if usual:
        orientation, damaged = _orientation(picture)
        if orientation == 1 and not damaged:
            file.seek(0)
            pixels = jpeg.pixels(file.read(), (picture.height, picture.width))
            if pixels is not None:
                return pixels, False
    image, still_damaged = upright_rgb(picture, exif)
    # Pillow complains only when it reads the EXIF data for the first time.
    return image, damaged or still_damaged


def upright_rgb(picture: "Image.Image", exif: bytes = b"") -> tuple["Image.Image", bool]:
    """Decodes a picture; returns also whether its EXIF data are damaged.

    Args:
      picture: the picture. It may be changed.
      exif: EXIF data that were removed from its file.
    """
    from PIL import Image

    try:
        picture.load()
    except OSError as error:
        if str(error).startswith(PILLOW_TRUNCATED):
            raise TruncatedError(str(error)) from None
        raise
    if _tolerance.on and _is_blank(picture):
        raise TruncatedError(f"{PILLOW_TRUNCATED}, and none of its rows could be decoded")
    if exif and "exif" not in picture.info:
        picture.info["exif"] = exif
    orientation, damaged = _orientation(picture)
    vars(picture).pop("_data", None)  # The plugin for JPEG XL would keep a copy of the pixels.
    if orientation in UNDO:
        picture = picture.transpose(Image.Transpose(UNDO[orientation]))
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
    return (picture if picture.mode == "RGB" else picture.convert("RGB")), damaged


def _is_blank(picture: "Image.Image") -> bool:
    """Returns whether not one row of a truncated picture was decoded."""

    def levels(part: "Image.Image") -> np.ndarray:
        return np.reshape(part.getextrema(), (-1, 2))

    if picture.format not in ("JPEG", "MPO"):
        return bool((np.ptp(levels(picture), 1) == 0).all())
    # libjpeg makes missing blocks grey, except the first one, which is arbitrary. If that one is in
    # the first row of blocks, the end of this row is grey, and so are all other rows.
    width, height = picture.size
    parts = [picture.crop((width - 1, 0, width, height))]
    if height > BLOCKS_HEIGHT:
        parts.append(picture.crop((0, BLOCKS_HEIGHT, width, height)))
    return all((abs(levels(part) - 128) <= 1).all() for part in parts)


def _orientation(picture: "Image.Image") -> tuple[int, bool]:
    """Returns the EXIF orientation of a decoded picture, and whether its EXIF data are damaged."""
    if picture.format == "HEIF" or (picture.format == "JXL" and not getattr(picture, "jpeg", None)):
        return 1, False  # Decoders of these formats have applied the orientation.
    damaged, orientation = False, 1
    try:
        exif = picture.getexif()
        orientation = exif.get(ORIENTATION, 1)
        if "exif" in picture.info:
            # Nested directories would take 0.2 ms more, a tenth of the time for a small picture.
            exif.hide_offsets()
            exif.tobytes()  # Reads all values and checks their types.
    except Exception:
        damaged = True
        with contextlib.suppress(Exception):
            # This time Pillow returns what it has read.
            orientation = picture.getexif().get(ORIENTATION, 1)
    return orientation, damaged
