"""Decodes pictures in several processes.

Threads that decode used only 4 of 16 cores, probably because Pillow takes Python's global lock
several times for each picture (docs/experiments/embed.md). With many decoders this process becomes
the bottleneck. So it does little work for each picture: one request contains several pictures, and
images are returned in memory that it shares with the processes. The processes do not need JAX, so
this module does not import it.
"""

import collections
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from pallas_patch_embed.base.child import Child, ChildEndedError, Send
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.pictures import Budget, LargerError, Open, check_room, quiet, reason
from pallas_patch_embed.embed.preprocessing import Decoded, Preprocessing
from pallas_patch_embed.embed.slots import Mailbox, Slots
from pallas_patch_embed.embed.units import Content, Entry, Origin, Picture, SourceEndsError

# Number of pictures that threads of this process decode before processes are started. Starting a
# process takes as long as decoding 100 pictures.
DECODED_HERE = 512

# Number of pictures in a request to a decoder.
ASKED = 16

# Smallest number of batches that are decoded ahead, and of requests ahead for each decoder.
BATCHES_AHEAD, REQUESTS_AHEAD = 2, 2


class Written(NamedTuple):
    """A `Decoded` whose image a process has written into slots.

    Attributes:
      begin: the byte of the slots where the image begins.
      size: (height, width).
      notes, origin, whole: as in `Decoded`.
    """

    begin: int
    size: tuple[int, int]
    notes: tuple[str, ...]
    origin: Origin | None
    whole: bool


# Type of the answer for a picture: what was decoded; the reason why there is no image; or the
# number of bytes that it needs, if more than were reserved for it.
type Answer = Decoded | str | int
type Sent = Written | str | int

type Decoding = list[Future[list[Decoded | str]]]


def batches_in_memory(workers: int, rows: int, held: int) -> int:
    """Returns the number of batches of `rows` pictures in the memory that decoders share.

    They are those that are decoded ahead, the one that was yielded last, and `held` before it.
    """
    pictures = REQUESTS_AHEAD * workers * min(ASKED, rows)
    return max(BATCHES_AHEAD, -(-pictures // rows)) + 1 + held


class Decoders:
    """Decodes several pictures at a time.

    Each decoder is a thread of this process. After `DECODED_HERE` pictures each thread starts a
    process, which decodes for it. If a process crashes, its picture has no embedding.

    Args:
      preprocessing: the conversion of pictures to images.
      workers: number of decoders. A single decoder needs no process.
      budget: the bound on the memory for encoded pictures and for their pixels.
      rows: largest number of pictures in a batch.
      held: number of batches whose images stay valid when the batch after them is requested.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        workers: int,
        budget: Budget,
        rows: int,
        held: int = 0,
    ):
        self._preprocessing, self._budget, self._rows = preprocessing, budget, rows
        # Number of bytes that are reserved for a first request. Only larger pictures need a second
        # request.
        self._share = budget.share(workers)
        self._here = DECODED_HERE if workers > 1 else math.inf
        self._batches = batches_in_memory(workers, rows, held)
        # A batch is yielded when so many have been started and not been yielded.
        self._ahead = self._batches - held
        self._slots = Slots(self._batches * rows, preprocessing.most_bytes)
        self._threads = ThreadPoolExecutor(workers)
        self._own = threading.local()
        self._children: list[tuple[Child, Mailbox]] = []
        self._quiet = quiet()

    def __enter__(self) -> "Decoders":
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._threads.shutdown(cancel_futures=True)
            for child, mailbox in self._children:
                child.end()
                mailbox.close()
            self._slots.close()
        finally:
            self._quiet.__exit__(None, None, None)

    def decode(
        self, pictures: Iterable[Picture]
    ) -> Iterator[tuple[list[Entry], list[Decoded | str]]]:
        """Yields batches of entries with their images, in order, and decodes later batches ahead.

        A picture becomes a `Decoded`, or the reason why it has no image. The memory of images is
        reused, so they are valid only until the next batch is requested, or `held` batches later.
        """
        rest = iter(pictures)
        ahead: collections.deque[tuple[list[Entry], Decoding]] = collections.deque()
        for first_slot in itertools.cycle(range(0, self._batches * self._rows, self._rows)):
            entries, decoding = self._start(rest, first_slot)
            if not entries:
                break
            ahead.append((entries, decoding))
            if len(ahead) == self._ahead:
                yield _finished(*ahead.popleft())
        while ahead:
            yield _finished(*ahead.popleft())

    def _start(self, pictures: Iterator[Picture], slot: int) -> tuple[list[Entry], Decoding]:
        """Starts to decode the next batch into the slots that begin at `slot`."""
        entries: list[Entry] = []
        decoding: Decoding = []
        opens: list[Open] = []
        held = 0

        def submit() -> None:
            nonlocal opens, held
            answer = self._answer_here if self._here > 0 else self._ask
            self._here -= len(opens)
            first = slot + len(entries) - len(opens)
            decoding.append(self._threads.submit(self._decode, answer, first, opens, held))
            opens, held = [], 0

        for picture in pictures:
            size = picture.size or 0
            # Memory is freed only for contents that were submitted.
            if opens and (len(opens) == ASKED or not self._budget.has_room_ahead(size)):
                submit()
            self._budget.read_ahead(size)
            try:
                opens.append(picture.in_memory())
            except SourceEndsError:
                self._budget.forget(size)
                continue
            held += size
            entries.append(picture.entry)
            if len(entries) == self._rows:
                break
        if opens:
            submit()
        return entries, decoding

    def _decode(
        self, answer: Callable[..., list[Answer]], slot: int, opens: list[Open], held: int
    ) -> list[Decoded | str]:
        """Decodes pictures whose contents, of `held` bytes in all, were read ahead."""
        try:
            return self._results(answer, slot, opens, max(self._share, _in_memory(opens)))
        finally:
            opens.clear()
            self._budget.forget(held)

    def _results(
        self, answer: Callable[..., list[Answer]], slot: int, opens: list[Open], size: int
    ) -> list[Decoded | str]:
        """Decodes pictures within `size` bytes each, and then those that need more."""
        with self._budget.reserve(size):
            answers = answer(slot, opens, size)
        results: list[Decoded | str] = []
        for i, result in enumerate(answers):
            if isinstance(result, int):
                results += self._results(answer, slot + i, opens[i : i + 1], result)
            else:
                results.append(result)
        return results

    def _answer_here(self, slot: int, opens: list[Open], size: int) -> list[Answer]:
        """Decodes pictures in this thread."""
        del slot
        return [_decoded(self._preprocessing, open_, size) for open_ in opens]

    def _ask(self, slot: int, opens: list[Open], size: int) -> list[Answer]:
        """Decodes pictures in this thread's process. `size` includes the mailbox's contents."""
        child, mailbox = self._child()
        mailbox.empty()
        request = [mailbox.put(o.content) if isinstance(o, Content) else o for o in opens]
        try:
            sent = _answers(child, slot, request, size - _in_memory(opens))
        except ChildEndedError as error:
            _check_that_it_runs(child)
            # One of several pictures is the cause, so each is requested again in its own request.
            return [f"decoding it {error}"] if len(opens) == 1 else [size] * len(opens)
        finally:
            mailbox.empty()
        answers: list[Answer] = []
        for answer, open_ in zip(sent, opens):
            if isinstance(answer, Written):
                image = self._slots.image(answer.begin, *answer.size)
                answers.append(Decoded(image, answer.notes, answer.origin, answer.whole))
            else:
                answers.append(answer + _in_memory([open_]) if isinstance(answer, int) else answer)
        return answers

    def _child(self) -> tuple[Child, Mailbox]:
        """Returns the process of this thread, and its mailbox."""
        if not hasattr(self._own, "child"):
            mailbox = Mailbox()
            answer = functools.partial(_answer, self._preprocessing, self._slots, mailbox)
            # The time for a picture is not known, so there is no timeout. If the process ends, its
            # connection is closed.
            child = Child(answer, lambda _: float("inf"), lambda *_: True)
            self._own.child = child, mailbox
            self._children.append(self._own.child)
        return self._own.child


def _in_memory(opens: Iterable[Open]) -> int:
    """Returns the number of bytes of the contents that are in memory."""
    return sum(len(open_.content) for open_ in opens if isinstance(open_, Content))


def _finished(entries: list[Entry], decoding: Decoding) -> tuple[list[Entry], list[Decoded | str]]:
    return entries, list(itertools.chain.from_iterable(future.result() for future in decoding))


def _check_that_it_runs(child: Child) -> None:
    """Raises UnfinishedError if a new process cannot be started."""
    try:
        _answers(child, 0, [], 0)
    except ChildEndedError as error:
        raise _unfinished(str(error)) from None


def _answers(child: Child, *request: Any) -> Sequence[Sent]:
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


def _decoded(preprocessing: Preprocessing, open_: Open, size: int) -> Answer:
    """Decodes a picture within `size` bytes."""
    try:
        return preprocessing.decode(open_, size)
    except LargerError as error:
        return error.needed
    except Exception as error:  # Pillow raises many kinds of errors.
        return reason(error)


def _answer(
    preprocessing: Preprocessing,
    slots: Slots,
    mailbox: Mailbox,
    _: Send,
    slot: int,
    opens: Sequence[Open | tuple[int, int]],
    size: int,
) -> list[Sent]:
    """Decodes a request's pictures into the slots that begin at `slot`; returns their answers.

    The images follow each other, so that they can be copied to a device together.

    Args:
      opens: for each picture the function that opens it, or where its content is in the mailbox.
      size: number of bytes that are reserved for each picture.
    """

    end = slot * slots.size

    def answer(slot: int, open_: Open | tuple[int, int]) -> Sent:
        nonlocal end
        if isinstance(open_, tuple):
            place = open_

            def open_(reserved: float) -> BinaryIO:
                check_room(place[1], reserved)
                return mailbox.read(*place)

        result = _decoded(preprocessing, open_, size)
        if isinstance(result, int):  # It is requested again, into its own slot.
            end = (slot + 1) * slots.size
        if not isinstance(result, Decoded):
            return result
        try:
            slots.put(end, result.image)
        except ValueError as error:
            return reason(error)
        begin, end = end, end + result.image.nbytes
        return Written(begin, result.image.shape[:2], *result[1:])

    with quiet():
        return list(map(answer, itertools.count(slot), opens))
