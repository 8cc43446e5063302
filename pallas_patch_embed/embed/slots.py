"""Memory that processes share.

A process that decodes pictures finds their contents in a `Mailbox`, where its parent wrote them,
and writes their images into `Slots`, which its parent reads. All of this memory is anonymous: the
system frees it when the last process that uses it has ended, even if that process was killed.
"""

import io
import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any, BinaryIO, Self

import numpy as np

# Memory in bytes that an empty mailbox keeps, so that small contents need no new memory.
KEPT = 2**22


def _anonymous_file(name: str) -> int:
    """Returns the descriptor of a file in memory that has no name in any folder."""
    if hasattr(os, "memfd_create"):
        # A memfd may be larger than a file in /dev/shm, which containers limit to 64 MB.
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Mailbox:
    """Memory in which a process puts contents for one process that it starts.

    It can be pickled only as an argument of the process that is being started.
    """

    def __init__(self) -> None:
        self._file = _anonymous_file("contents")
        self._end = 0

    @classmethod
    def _inherited(cls, file: Any) -> Self:
        mailbox = cls.__new__(cls)
        mailbox._file = file.detach()
        return mailbox

    def __reduce__(self) -> tuple[Any, ...]:
        return self._inherited, (reduction.DupFd(self._file),)

    def close(self) -> None:
        """Releases the memory."""
        os.close(self._file)

    def put(self, content: bytes) -> tuple[int, int]:
        """Adds a content; returns the arguments with which the other process calls `read`."""
        rest, at = memoryview(content), self._end
        while rest:
            written = os.pwrite(self._file, rest, self._end)
            rest, self._end = rest[written:], self._end + written
        return at, len(content)

    def empty(self) -> None:
        """Forgets all contents. Only a small part of their memory is kept for the next ones."""
        if self._end > KEPT:
            os.ftruncate(self._file, 0)
        self._end = 0

    def read(self, at: int, size: int) -> BinaryIO:
        """Opens a content."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(at)
            return io.BytesIO(file.read(size))


class Slots:
    """Slots of memory that this process shares with the processes it starts.

    Each image has a slot, but a process that writes several images may write them one after another
    into the memory of their slots. The system allocates no memory for slots that were never
    written. Slots can be pickled only as an argument of a process that is being started.

    Args:
      number: number of slots.
      size: size of a slot in bytes.
    """

    def __init__(self, number: int, size: int):
        self._file = _anonymous_file("images")
        os.ftruncate(self._file, number * size)
        self._map(number, size)

    def _map(self, number: int, size: int) -> None:
        self._shape = number, size
        memory = mmap.mmap(self._file, number * size)
        self._bytes = np.frombuffer(memory, np.uint8)

    @classmethod
    def _inherited(cls, file: Any, number: int, size: int) -> Self:
        slots = cls.__new__(cls)
        slots._file = file.detach()
        slots._map(number, size)
        return slots

    def __reduce__(self) -> tuple[Any, ...]:
        return self._inherited, (reduction.DupFd(self._file), *self._shape)

    def close(self) -> None:
        """Releases the memory, which is freed when the last image in it is no longer used."""
        os.close(self._file)
        del self._bytes

    @property
    def size(self) -> int:
        """Size of a slot in bytes."""
        return self._shape[1]

    def put(self, begin: int, image: np.ndarray) -> None:
        """Copies an image [H, W, 3] uint8 to the byte `begin` of all slots.

        Raises:
          ValueError: the image is larger than a slot.
        """
        height, width, _ = image.shape
        if image.nbytes > self.size:
            raise ValueError(f"its image has {image.nbytes} bytes, expected at most {self.size}")
        self.image(begin, height, width)[:] = image

    def image(self, begin: int, height: int, width: int) -> np.ndarray:
        """Returns the image [H, W, 3] at a byte of all slots, a view of the shared memory."""
        return self._bytes[begin : begin + height * width * 3].reshape(height, width, 3)
