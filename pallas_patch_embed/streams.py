"""Standard streams that are closed, full, or read by nobody any more."""

import contextlib
import os
from typing import Any, TextIO


def open_missing() -> None:
    """Opens /dev/null as those of file descriptors 0 to 2 that are closed.

    Otherwise the next file that is opened gets such a number, and what C++ code writes to standard
    error goes into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the smallest number that is free.


def discard(stream: TextIO) -> None:
    """Sends what the stream still holds, and what comes, to /dev/null.

    Python writes the buffers at its end, and exits with 120 if it cannot.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Forgiving:
    """A text stream that says nothing more once it cannot be written, instead of raising."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
