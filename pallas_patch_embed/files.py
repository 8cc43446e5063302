"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path` when the block ends without an exception."""
    path = os.fsdecode(path)
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
