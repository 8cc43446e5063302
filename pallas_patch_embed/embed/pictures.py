"""Picture files: which there are, and their pixels, of which a bounded number is in memory."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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


@dataclasses.dataclass(frozen=True)
class Found:
    """What `find_pictures` found.

    Attributes:
      pictures: files, each once.
      unreadable: dangling links with the name of a picture or given as arguments, and folders that
        cannot be listed, each with the reason.
      skipped: other dangling links, and FIFOs, sockets and devices with the name of a picture, each
        with the reason.
    """

    pictures: list[Path] = dataclasses.field(default_factory=list)
    unreadable: list[tuple[Path, str]] = dataclasses.field(default_factory=list)
    skipped: list[tuple[Path, str]] = dataclasses.field(default_factory=list)


def find_pictures(arguments: Sequence[Path]) -> Found:
    """The files given, and of folders all files below with the extension of a picture, sorted.

    Links are followed. Every file and folder is taken once, under the first of its names. Hidden
    files and folders are left out, and what Pillow knows by name alone or would hand to another
    program.

    Args:
      arguments: files and folders.

    Raises:
      FileNotFoundError: an argument does not exist.
      ValueError: an argument is a FIFO, a socket or a device.
    """
    absent = [path for path in arguments if not os.path.lexists(path)]
    if absent:
        raise FileNotFoundError(f"There is no {', '.join(map(printable, absent))}.")
    for path in arguments:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise ValueError(f"{printable(path)} is no regular file, so it is no picture.")
    extensions = _extensions()
    found = Found()
    seen: set[str] = set()
    for argument in arguments:
        waiting = [argument]
        while waiting:
            path = waiting.pop()
            meant = path == argument or path.suffix.lower() in extensions
            real = os.path.realpath(path)
            if real in seen:
                continue
            try:
                mode = os.stat(path).st_mode
            except OSError as error:
                dangling = path.is_symlink() and isinstance(error, FileNotFoundError)
                reason = "it is a link to nothing" if dangling else _reason(error)
                (found.unreadable if meant else found.skipped).append((path, reason))
                continue
            if stat.S_ISDIR(mode):
                seen.add(real)
                try:
                    names = sorted(os.listdir(path), reverse=True)
                except OSError as error:
                    found.unreadable.append((path, _reason(error)))
                else:
                    waiting += [path / name for name in names if not name.startswith(".")]
            elif stat.S_ISREG(mode) and meant:
                seen.add(real)
                found.pictures.append(path)
            elif meant:
                found.skipped.append((path, "it is no regular file"))
    return found


def _reason(error: OSError) -> str:
    """What went wrong, without the name of the file."""
    return error.strerror or str(error)


def _extensions() -> set[str]:
    """The extensions of the formats that Pillow reads itself, in lower case."""
    from PIL import Image

    Image.init()
    readable = set(Image.OPEN) - {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    return {e for e, name in Image.registered_extensions().items() if name in readable}


class Budget:
    """Bounds the pixels that threads decode at a time.

    Attributes:
      limit: number of pixels. A picture of more is decoded while there is no other.
      held: number of pixels that are being decoded.
    """

    def __init__(self, limit: int = PIXELS_IN_FLIGHT):
        self.limit, self.held = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for so many pixels, and occupies it during the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + pixels <= self.limit)
            self.held += pixels
        try:
            yield
        finally:
            with self._changed:
                self.held -= pixels
                self._changed.notify_all()


def open_regular(path: Path) -> BinaryIO:
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


type Reading = list[tuple[Path, concurrent.futures.Future[np.ndarray]]]


def read_ahead(
    read: Callable[[Path], np.ndarray], paths: Sequence[Path], batch: int, workers: int
) -> Iterator[Reading]:
    """Batches of paths with their images, of which the next one is read in the meantime.

    Args:
      read: gives the image in a file; called by `workers` threads.
      paths: of the files.
      batch: images a batch.
      workers: number of threads.

    Yields:
      Pairs of a path and the future image or exception.
    """
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        ahead: collections.deque[Reading] = collections.deque()
        for part in itertools.batched(paths, batch):
            ahead.append([(path, pool.submit(read, path)) for path in part])
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead
    finally:
        pool.shutdown(cancel_futures=True)
