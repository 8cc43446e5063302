"""Decodes pictures in processes of their own.

Threads that decoded kept 4 of 16 cores busy, probably because Pillow takes Python's global lock
several times for each picture (docs/embed.md). This module does not import JAX: the processes do
not need it.
"""

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

import numpy as np

from pallas_patch_embed.child import Child, ChildEndedError, Send
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.pictures import Budget, reason
from pallas_patch_embed.embed.preprocessing import Preprocessing

# Pictures that threads of this process decode before others are started: starting one takes as
# long as decoding 100 pictures.
DECODED_HERE = 512

type Open = Callable[[], BinaryIO]


class Decoders:
    """Decodes pictures, a number of them at a time.

    Each decoder is a thread of this process. After `DECODED_HERE` pictures each also has a process
    of its own, which decodes for it. If that crashes, the picture has no embedding.

    Args:
      preprocessing: how pictures become images.
      workers: number of decoders. A single one needs no process.
      budget: for the pixels of all pictures that are decoded at a time.
    """

    def __init__(self, preprocessing: Preprocessing, workers: int, budget: Budget):
        self._preprocessing, self._budget = preprocessing, budget
        # Reserved before a process is asked. Only larger pictures need a second request.
        self._share = budget.limit // workers
        self._threads = ThreadPoolExecutor(workers)
        self._here = iter(range(DECODED_HERE)) if workers > 1 else itertools.count()
        self._own = threading.local()
        self._children: list[Child] = []

    def __enter__(self) -> "Decoders":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.end()

    def submit(self, open_: Open) -> Future[np.ndarray | str]:
        """Starts to decode; the result is an image [H, W, 3] uint8, or why there is none.

        Args:
          open_: opens the file; it can be pickled.
        """
        return self._threads.submit(self._decode, open_)

    def _decode(self, open_: Open) -> np.ndarray | str:
        if next(self._here, None) is None:
            return self._in_process(open_)
        try:
            return self._preprocessing.image(open_(), self._budget)
        except Exception as error:  # Pillow raises many kinds.
            return reason(error)

    def _in_process(self, open_: Open) -> np.ndarray | str:
        if not hasattr(self._own, "child"):
            answer = functools.partial(_answer, self._preprocessing)
            # Nobody knows how long a picture takes. A process that ends closes its connection.
            self._own.child = Child(answer, lambda _: float("inf"), lambda *_: True)
            self._children.append(self._own.child)
        child: Child = self._own.child
        pixels = self._share
        try:
            while True:
                with self._budget.reserve(pixels):
                    (answered,) = child.ask(open_, pixels)
                if not isinstance(answered, int):
                    return answered
                pixels = answered
        except ChildEndedError as error:
            _check_that_it_runs(child)
            return f"decoding it {error}"


def _check_that_it_runs(child: Child) -> None:
    """Raises an UnfinishedError unless a new process can be started."""
    try:
        list(child.ask(_nothing, 0))
    except ChildEndedError as error:
        raise UnfinishedError(
            f"A process for decoding {error}, before it decoded anything. Find out why, or run the "
            "same command again with --workers 1, which needs none: it goes on with the rest."
        ) from None


def _nothing() -> BinaryIO:
    raise OSError("it is no picture")


class _LargerError(Exception):
    """The picture has more pixels than were reserved for it."""

    def __init__(self, pixels: int):
        super().__init__(pixels)
        self.pixels = pixels


class _Reserved(Budget):
    """Pixels that the parent has reserved."""

    @contextlib.contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        if pixels > self.limit:
            raise _LargerError(pixels)
        yield


def _answer(preprocessing: Preprocessing, send: Send, open_: Open, pixels: int) -> None:
    """What a process does: sends the image, why there is none, or how many pixels it needs."""
    from PIL import Image

    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        try:
            send(preprocessing.image(open_(), _Reserved(pixels)))
        except _LargerError as error:
            send(error.pixels)
        except Exception as error:  # Pillow raises many kinds.
            send(reason(error))
