"""Reading of regular files, and writing of files that appear only when they are complete."""

import contextlib
import errno
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pallas_patch_embed.base import ending


def open_regular(path: str, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
      path: path of the file.
      follow: whether the file may be a link.

    Raises:
      OSError: there is no such file, or it is not a regular one; a FIFO is not waited for.
    """

    def at_once(name: str, flags: int) -> int:
        flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
        return os.open(name, flags)

    try:
        file = open(path, "rb", opener=at_once)
    except OSError as error:
        if not follow and os.path.islink(path):
            raise OSError("it is a link") from None
        raise error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def check_place(path: Path, what: str, is_own: Callable[[Path], bool] = lambda _: True) -> None:
    """Checks that a file can be written at `path`, before any work is done that could be lost.

    Args:
      path: path of the file, or of a link to it.
      what: the beginning of the error message, which names the path.
      is_own: function that returns whether the command wrote this file, and may replace it.

    Raises:
      ValueError: no file can be written there.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{what}: there is no such folder. Make it, or choose another one.")
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir() or real.is_symlink():
        raise ValueError(f"{what}: it is a dangling link. Choose another path, or remove it.")
    if real.exists() and not real.is_file():
        raise ValueError(f"{what}: it exists and is not a regular file. Choose another path.")
    if real.exists() and not is_own(real):
        raise ValueError(
            f"{what}: it exists, but this command did not write it. Choose another path, or remove "
            "it."
        )
    try:
        tempfile.TemporaryFile(dir=real.parent).close()
    except OSError as error:
        raise ValueError(
            f"{what}: nothing can be written there ({error.strerror}). Choose another folder."
        ) from None


def new_partial() -> str:
    """Returns a new hidden name for a file that is not complete yet."""
    return f".{uuid.uuid4().hex}.partial"


def is_partial(name: str) -> bool:
    """Returns whether `new_partial` made this name."""
    return re.fullmatch(r"\.[0-9a-f]{32}\.partial", name) is not None


@contextlib.contextmanager
def written_atomically(
    path: str | os.PathLike[str], outcome: str = "the file was written", *, new: bool = False
) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path` when the block ends without an exception.

    A file that already exists at `path` stays unchanged until then. The new file gets the
    permissions of the old one.

    Args:
      path: path of the file, or of a link to it.
      outcome: result that the command reports if a signal ends it afterwards.
      new: whether nothing may exist at `path`, not even a link. Otherwise FileExistsError is raised
        in the end.
    """
    path = os.fsdecode(path) if new else os.path.realpath(os.fsdecode(path))
    partial = os.path.join(os.path.dirname(path), new_partial())
    mode = None if new or not os.path.exists(path) else stat.S_IMODE(os.stat(path).st_mode)

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    try:
        with ending.deferred():
            file = open(partial, "xb", opener=create)
            ending.state.unfinished.add(partial)
        with file:
            if mode is not None:
                # `open` removed the permissions in the umask. Some file systems have no modes.
                with contextlib.suppress(OSError):
                    os.chmod(partial, mode)
            yield file
        with ending.deferred():
            (rename_new if new else os.replace)(partial, path)
            ending.state.outcome = outcome
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
        ending.state.unfinished.discard(partial)


def rename_new(old: str, new: str) -> None:
    """Renames a file; raises FileExistsError if there is anything at the new path."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # The file system has no hard links.
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
        os.rename(old, new)
    else:
        os.unlink(old)
