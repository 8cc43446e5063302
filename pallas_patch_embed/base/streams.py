"""Handling of standard streams that are closed, on a full disk, or without a reader."""

import contextlib
import os
from typing import Any, TextIO


def open_missing() -> None:
    """Opens /dev/null in place of each of the file descriptors 0 to 2 that is closed.

    Otherwise the next file that is opened gets the number of a closed descriptor, and C++ code that
    writes to standard error may write into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The system assigns the smallest free number.


def discard(stream: TextIO) -> None:
    """Redirects the stream, including text that is still in its buffer, to /dev/null.

    Otherwise Python exits with code 120 when it cannot flush the buffer at exit.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Forgiving:
    """A text stream that discards its text after the first failed write, instead of raising."""

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
