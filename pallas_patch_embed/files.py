"""Writing of files that appear only when they are complete."""

import contextlib
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pallas_patch_embed import ending


def check_place(path: Path, what: str) -> None:
    """Checks that a file can be written at `path`, before any work is done that could be lost.

    Args:
      path: path of the file.
      what: the beginning of the error message, which names the path.

    Raises:
      ValueError: no file can be written there.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{what}: there is no such folder. Make it, or choose another one.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{what}: it exists and is not a regular file. Choose another path.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
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
    path: str | os.PathLike[str], outcome: str = "the file was written"
) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path` when the block ends without an exception.

    A file that already exists at `path` stays unchanged until then. The new file gets the
    permissions of the old one.

    Args:
      path: path of the file.
      outcome: result that the command reports if a signal ends it afterwards.
    """
    path = os.path.realpath(os.fsdecode(path))
    partial = os.path.join(os.path.dirname(path), new_partial())
    mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else None

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
            os.replace(partial, path)
            ending.state.outcome = outcome
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
        ending.state.unfinished.discard(partial)
