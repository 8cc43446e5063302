"""Files that appear whole or not at all."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path` when the block ends without an exception."""
    path = os.path.realpath(os.fsdecode(path))
    partial = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
