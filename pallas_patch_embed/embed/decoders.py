"""Decodes pictures in several processes.

Threads that decode used only 4 of 16 cores, probably because Pillow takes Python's global lock
several times for each picture (docs/embed.md). With many decoders this process becomes the
bottleneck. So it does little work for each picture: one request contains several pictures, and
images are returned in memory that it shares with the processes. The processes do not need JAX, so
this module does not import it.
"""

import collections
import contextlib
import functools
import itertools
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from pallas_patch_embed.child import Child, ChildEndedError, Send
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.pictures import Budget, reason
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.slots import Slots
from pallas_patch_embed.embed.sources import Picture

# Number of pictures that threads of this process decode before processes are started. Starting a
# process takes as long as decoding 100 pictures.
DECODED_HERE = 512

# Number of pictures in a request to a decoder.
ASKED = 8

# Smallest number of batches that are decoded ahead, and of requests ahead for each decoder.
BATCHES_AHEAD, REQUESTS_AHEAD = 2, 2

type Open = Callable[[], BinaryIO]

# Type of a process's answer for a picture: (height, width) of the image in its slot; the reason why
# there is none; or the picture's number of pixels, if more than were reserved for it.
type Answer = tuple[int, int] | str | int

type Decoding = list[Future[list[np.ndarray | str]]]


def batches_ahead(workers: int, rows: int) -> int:
    """Returns the number of batches of `rows` pictures that are decoded ahead."""
    pictures = REQUESTS_AHEAD * workers * min(ASKED, rows)
    return max(BATCHES_AHEAD, -(-pictures // rows))


class Decoders:
    """Decodes several pictures at a time.

    Each decoder is a thread of this process. After `DECODED_HERE` pictures each thread starts a
    process, which decodes for it. If a process crashes, its picture has no embedding.

    Args:
      preprocessing: the conversion of pictures to images.
      workers: number of decoders. A single decoder needs no process.
      budget: the bound on the pixels of all pictures that are decoded at a time.
      rows: largest number of pictures in a batch.
    """

    def __init__(self, preprocessing: Preprocessing, workers: int, budget: Budget, rows: int):
        self._preprocessing, self._budget, self._rows = preprocessing, budget, rows
        # Number of pixels that are reserved for a first request to a process. Only larger pictures
        # need a second request.
        self._share = budget.limit // workers
        self._here = DECODED_HERE if workers > 1 else math.inf
        # Number of batches in memory: the one that is used, and those that are decoded ahead.
        self._batches = 1 + batches_ahead(workers, rows)
        self._slots = Slots(self._batches * rows, preprocessing.most_bytes)
        self._threads = ThreadPoolExecutor(workers)
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
        self._slots.close()

    def decode[Batch: Sequence[Picture]](
        self, batches: Iterable[Batch]
    ) -> Iterator[tuple[Batch, list[np.ndarray | str]]]:
        """Yields each batch of pictures with its images, in order, and decodes later ones ahead.

        A picture becomes an image [H, W, 3] uint8, or the reason why there is none. The memory of
        images is reused, so they are valid only until the next batch is requested.

        Args:
          batches: batches of at most `rows` pictures each.
        """
        ahead: collections.deque[tuple[Batch, Decoding]] = collections.deque()
        for number, batch in enumerate(batches):
            ahead.append((batch, self._start(batch, number % self._batches * self._rows)))
            if len(ahead) == self._batches:
                yield _finished(*ahead.popleft())
        while ahead:
            yield _finished(*ahead.popleft())

    def _start(self, batch: Sequence[Picture], slot: int) -> Decoding:
        """Starts to decode a batch into the slots that begin at `slot`."""
        decoding = []
        for pictures in itertools.batched(batch, ASKED):
            opens = [picture.open for picture in pictures]
            if self._here > 0:
                images = self._threads.submit(self._decode, opens)
            else:
                images = self._threads.submit(self._ask, slot, opens, self._share)
            decoding.append(images)
            self._here -= len(opens)
            slot += len(opens)
        return decoding

    def _decode(self, opens: Sequence[Open]) -> list[np.ndarray | str]:
        """Decodes pictures in this thread."""
        images: list[np.ndarray | str] = []
        for open_ in opens:
            try:
                images.append(self._preprocessing.image(open_(), self._budget))
            except Exception as error:  # Pillow raises many kinds of errors.
                images.append(reason(error))
        return images

    def _ask(self, slot: int, opens: Sequence[Open], pixels: int) -> list[np.ndarray | str]:
        """Decodes pictures in this thread's process, which may use `pixels` pixels for each."""
        child = self._child()
        request = self._slots.dump(slot, len(opens), opens)
        try:
            with self._budget.reserve(pixels):
                answers = _answers(child, slot, *request, pixels)
        except ChildEndedError as error:
            _check_that_it_runs(child)
            # One of several pictures is the cause, so each is requested again in its own request.
            answers = [f"decoding it {error}"] if len(opens) == 1 else [pixels] * len(opens)
        images: list[np.ndarray | str] = []
        for i, answer in enumerate(answers):
            if isinstance(answer, str):
                images.append(answer)
            elif isinstance(answer, int):
                images += self._ask(slot + i, opens[i : i + 1], answer)
            else:
                images.append(self._slots.image(slot + i, *answer))
        return images

    def _child(self) -> Child:
        """Returns the process of this thread."""
        if not hasattr(self._own, "child"):
            answer = functools.partial(_answer, self._preprocessing, self._slots)
            # The time for a picture is not known, so there is no timeout. If the process ends, its
            # connection is closed.
            self._own.child = Child(answer, lambda _: float("inf"), lambda *_: True)
            self._children.append(self._own.child)
        return self._own.child


def _finished[Batch](batch: Batch, decoding: Decoding) -> tuple[Batch, list[np.ndarray | str]]:
    return batch, list(itertools.chain.from_iterable(future.result() for future in decoding))


def _check_that_it_runs(child: Child) -> None:
    """Raises UnfinishedError if a new process cannot be started."""
    try:
        _answers(child, 0, pickle.dumps([]), [], 0)
    except ChildEndedError as error:
        raise _unfinished(str(error)) from None


def _answers(child: Child, *request: Any) -> Sequence[Answer]:
    """Sends a request to a process; the arguments are the last ones of `_answer`."""
    try:
        (answers,) = child.ask(*request)
    except OSError as error:
        raise _unfinished(f"could not be started ({error})") from None
    return answers


def _unfinished(why: str) -> UnfinishedError:
    return UnfinishedError(
        f"A process for decoding {why}, before it decoded a picture. Remove the cause, or run the "
        "same command with --workers 1, which needs no process, to resume the work."
    )


class _LargerError(Exception):
    """The picture has more pixels than were reserved for it."""

    def __init__(self, pixels: int):
        super().__init__(pixels)
        self.pixels = pixels


class _Reserved(Budget):
    """A budget of pixels that the parent has already reserved."""

    @contextlib.contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        if pixels > self.limit:
            raise _LargerError(pixels)
        yield


def _answer(
    preprocessing: Preprocessing,
    slots: Slots,
    send: Send,
    slot: int,
    pickled: bytes,
    sizes: list[int],
    pixels: int,
) -> None:
    """Decodes a request's pictures into the slots that begin at `slot`, and sends their answers.

    Args:
      pickled, sizes: the functions that open the pictures, as `Slots.dump` returned them.
      pixels: number of pixels that are reserved for each picture.
    """
    from PIL import Image

    def answer(slot: int, open_: Open) -> Answer:
        try:
            return slots.put(slot, preprocessing.image(open_(), _Reserved(pixels)))
        except _LargerError as error:
            return error.pixels
        except Exception as error:  # Pillow raises many kinds of errors.
            return reason(error)

    opens = slots.load(slot, pickled, sizes)
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        send(list(map(answer, itertools.count(slot), opens)))
