"""Memory that processes share.

A process that decodes pictures writes their images, which its parent reads. Before that the slots
may contain the encoded pictures, which the parent wrote.
"""

import itertools
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from typing import Any, Self

import numpy as np


class Slots:
    """Slots for one image each, in memory that this process shares with the processes it starts.

    The memory is anonymous. The system frees it when the last process that uses it has ended, even
    if that process was killed, and allocates no memory for slots that were never written. Slots can
    be pickled only as an argument of a process that is being started.

    Args:
      number: number of slots.
      size: size of a slot in bytes.
    """

    def __init__(self, number: int, size: int):
        if hasattr(os, "memfd_create"):
            # A memfd may be larger than a file in /dev/shm, which containers limit to 64 MB.
            self._file = os.memfd_create("images")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.ftruncate(self._file, number * size)
        self._map(number, size)

    def _map(self, number: int, size: int) -> None:
        self._shape = number, size
        memory = mmap.mmap(self._file, number * size)
        self._bytes = np.frombuffer(memory, np.uint8).reshape(number, size)

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

    def dump(self, slot: int, number: int, thing: Any) -> tuple[bytes, list[int]]:
        """Pickles an object, and writes its buffers into `number` slots if they fit there.

        Returns:
          The pickle, and the size in bytes of each buffer in the slots: arguments of `load`.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(thing, 5, buffer_callback=buffers.append)
        contents = [buffer.raw() for buffer in buffers]
        sizes = list(map(len, contents))
        if sum(sizes) > number * self._shape[1]:
            return pickle.dumps(thing, 5), []
        for content, place in zip(contents, self._places(slot, sizes)):
            place[:] = content
        return pickled, sizes

    def load(self, slot: int, pickled: bytes, sizes: Sequence[int]) -> Any:
        """Returns the object that `dump` pickled. The slots may be used again afterwards."""
        return pickle.loads(pickled, buffers=map(bytes, self._places(slot, sizes)))

    def _places(self, slot: int, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields memory of these sizes, one after another, from the beginning of a slot."""
        memory = self._bytes[slot:].reshape(-1)
        for size, end in zip(sizes, itertools.accumulate(sizes)):
            yield memory[end - size : end]

    def put(self, slot: int, image: np.ndarray) -> tuple[int, int]:
        """Copies an image [H, W, 3] uint8 into a slot; returns (H, W).

        Raises:
          ValueError: the image is larger than a slot.
        """
        height, width, _ = image.shape
        if image.nbytes > self._shape[1]:
            raise ValueError(
                f"its image has {image.nbytes} bytes, expected at most {self._shape[1]}"
            )
        self.image(slot, height, width)[:] = image
        return height, width

    def image(self, slot: int, height: int, width: int) -> np.ndarray:
        """Returns the image [H, W, 3] in a slot, a view of the shared memory."""
        return self._bytes[slot, : height * width * 3].reshape(height, width, 3)
