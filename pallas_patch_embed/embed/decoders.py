"""Decodes pictures in several processes.

Threads that decode used only 4 of 16 cores, probably because Pillow takes Python's global lock
several times for each picture (docs/experiments/embed.md). With many decoders this process becomes
the bottleneck. So it does little work for each picture: one request contains several pictures,
images are returned in memory that it shares with the processes, and the thread that needs the
images also sends the requests, so that no other thread of this process competes for the lock. The
processes do not need JAX, so this module does not import it.
"""

import collections
import dataclasses
import functools
import itertools
import math
import selectors
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType
from typing import BinaryIO, NamedTuple

from pallas_patch_embed.base.child import Child, ChildEndedError, Send, pickled
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

# Number of requests that a process has at a time: it decodes one while the next waits in its pipe.
# The next one has a limited size in bytes, so that it fits into every system's pipe. A larger one
# would wait until the process reads it, and the process may wait until its answer is read.
SENT, SMALL = 2, 2**12

# One of so many parts of a decoder's memory is for the contents of another request that it has.
PARTS_FOR_ANOTHER = 8

# What a thread sends when it has an answer.
DONE = b"."

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


def batches_in_memory(workers: int, rows: int, held: int) -> int:
    """Returns the number of batches of `rows` pictures in the memory that decoders share.

    They are those that are decoded ahead, the one that was yielded last, and `held` before it.
    """
    pictures = REQUESTS_AHEAD * workers * min(ASKED, rows)
    return max(BATCHES_AHEAD, -(-pictures // rows)) + 1 + held


class _Batch:
    """Pictures that are yielded together.

    Attributes:
      entries: their entries.
      results: their images, or the reasons why they have none; "" if they are not decoded yet.
      missing: how many are not decoded yet.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.results: list[Decoded | str] = []
        self.missing = 0


@dataclasses.dataclass
class _Request:
    """Pictures of a batch that one worker decodes.

    Attributes:
      batch: the batch.
      first: number of the first picture in the batch.
      slot: slot of its image.
      opens: functions that open the pictures.
      sizes: for each picture the number of bytes that were read ahead.
      reserved: number of bytes that are reserved for each picture, and for all contents.
      spare: how many of these bytes the contents of another request may take.
    """

    batch: _Batch
    first: int
    slot: int
    opens: list[Open]
    sizes: list[int]
    reserved: int
    spare: int = 0

    @property
    def in_memory(self) -> int:
        """Number of bytes of the contents that are in memory."""
        return _in_memory(self.opens)

    def part(self, i: int, reserved: int) -> "_Request":
        """Returns a request for picture i of this one alone."""
        opens, sizes = self.opens[i : i + 1], self.sizes[i : i + 1]
        return _Request(self.batch, self.first + i, self.slot + i, opens, sizes, reserved)


class _Thread:
    """A worker that decodes in a thread of this process.

    Attributes:
      connection: has something to read when the worker has an answer.
      requests: the requests that it has.
      most: largest number of requests that it may have.
      reserved: number of bytes that are reserved for it.
    """

    most = 1

    def __init__(self, preprocessing: Preprocessing, threads: ThreadPoolExecutor):
        self._preprocessing, self._threads = preprocessing, threads
        self._done: socket.socket | None = None
        self.requests: collections.deque[_Request] = collections.deque()
        self.reserved = 0
        self._answers: Future[list[Answer]]

    def send(self, request: _Request) -> bool:
        """Starts to decode; returns True."""
        if self._done is None:
            self.connection, self._done = socket.socketpair()
        done = self._done
        self.requests.append(request)
        self._answers = self._threads.submit(self._decode, request.opens, request.reserved)
        self._answers.add_done_callback(lambda _: done.send(DONE))
        return True

    def _decode(self, opens: list[Open], reserved: int) -> list[Answer]:
        return [_decoded(self._preprocessing, open_, reserved) for open_ in opens]

    def receive(self) -> list[Answer]:
        """Returns the answers to the oldest request, which is no longer in `requests`."""
        self.connection.recv(len(DONE))
        self.requests.popleft()
        answers = self._answers
        del self._answers  # It would keep the images.
        return answers.result()

    def close(self) -> None:
        """Releases the connection, when the threads have ended."""
        if self._done is not None:
            self.connection.close()
            self._done.close()


class _Process:
    """A worker that decodes in a process of its own; its attributes are those of `_Thread`."""

    most = SENT

    def __init__(self, preprocessing: Preprocessing, slots: Slots):
        self._slots = slots
        # Requests use the mailboxes in turn.
        self._mailboxes = [Mailbox() for _ in range(SENT)]
        self._sent = 0
        self.child = Child(functools.partial(_answer, preprocessing, slots, self._mailboxes))
        self.requests: collections.deque[_Request] = collections.deque()
        self.reserved = 0

    @property
    def connection(self) -> Connection:
        return self.child.connection

    def send(self, request: _Request) -> bool:
        """Sends a request; returns False if it must wait until the others are answered."""
        number = self._sent % SENT
        mailbox = self._mailboxes[number]
        opens = [
            (number, *mailbox.put(open_.content)) if isinstance(open_, Content) else open_
            for open_ in request.opens
        ]
        limit = request.reserved - request.in_memory - request.spare
        message = pickled(request.slot, opens, limit)
        if self.requests and len(message) > SMALL:
            mailbox.empty()
            return False
        self._send(message)
        self.requests.append(request)
        self._sent += 1
        return True

    def _send(self, request: memoryview) -> None:
        """Sends a request with the last arguments of `_answer`."""
        try:
            self.child.send(request)
        except OSError as error:
            raise _unfinished(f"could not be started ({error})") from None

    def receive(self) -> list[Answer]:
        """Returns the answers to the oldest request, which is no longer in `requests`.

        If the process has ended, a new one gets the other requests.
        """
        request = self.requests.popleft()
        try:
            sent: Sequence[Sent] = self.child.receive()
        except ChildEndedError as error:
            self._check_that_it_runs()
            for mailbox in self._mailboxes:
                mailbox.empty()
            others, self.requests = self.requests, collections.deque()
            for other in others:
                self.send(other)
            # One of several pictures is the cause, so each is requested again in its own request.
            alone = len(request.opens) == 1
            return [f"decoding it {error}"] if alone else [request.reserved] * len(request.opens)
        self._mailboxes[(self._sent - len(self.requests) - 1) % SENT].empty()
        return [
            self._decoded(answer, open_) for answer, open_ in zip(sent, request.opens, strict=True)
        ]

    def _decoded(self, answer: Sent, open_: Open) -> Answer:
        if isinstance(answer, Written):
            image = self._slots.image(answer.begin, *answer.size)
            return Decoded(image, answer.notes, answer.origin, answer.whole)
        return answer + _in_memory([open_]) if isinstance(answer, int) else answer

    def _check_that_it_runs(self) -> None:
        """Raises UnfinishedError if a new process cannot be started."""
        self._send(pickled(0, [], 0))
        try:
            self.child.receive()
        except ChildEndedError as error:
            raise _unfinished(str(error)) from None

    def close(self) -> None:
        """Ends the process."""
        self.child.end()
        for mailbox in self._mailboxes:
            mailbox.close()


type _Worker = _Thread | _Process


class Decoders:
    """Decodes several pictures at a time.

    Each decoder is a thread of this process. After `DECODED_HERE` pictures each one is a process
    instead. If a process crashes, its picture has no embedding.

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
        self._executor = ThreadPoolExecutor(workers)
        self._threads = [_Thread(preprocessing, self._executor) for _ in range(workers)]
        self._processes: list[_Process] = []
        # Requests that no decoder has yet, and what tells which decoder has an answer.
        self._waiting: collections.deque[_Request] = collections.deque()
        self._answers = selectors.DefaultSelector()
        self._quiet = quiet()

    def __enter__(self) -> "Decoders":
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._answers.close()
            self._executor.shutdown(cancel_futures=True)
            workers: list[_Worker] = [*self._threads, *self._processes]
            for worker in workers:
                worker.close()
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
        ahead: collections.deque[_Batch] = collections.deque()
        for first_slot in itertools.cycle(range(0, self._batches * self._rows, self._rows)):
            batch = self._start(rest, first_slot)
            if not batch.entries:
                break
            ahead.append(batch)
            if len(ahead) == self._ahead:
                yield self._finished(ahead.popleft())
        while ahead:
            yield self._finished(ahead.popleft())

    def _start(self, pictures: Iterator[Picture], slot: int) -> _Batch:
        """Starts to decode the next batch into the slots that begin at `slot`."""
        batch = _Batch()
        opens: list[Open] = []
        sizes: list[int] = []

        def submit() -> None:
            nonlocal opens, sizes
            first = len(batch.results)
            reserved = max(self._share, _in_memory(opens))
            spare = self._share // PARTS_FOR_ANOTHER
            request = _Request(batch, first, slot + first, opens, sizes, reserved, spare)
            self._waiting.append(request)
            batch.results += [""] * len(opens)
            batch.missing += len(opens)
            opens, sizes = [], []
            self._continue(wait=False)

        for picture in pictures:
            size = picture.size or 0
            # Memory is freed only for contents that were submitted.
            if opens and (len(opens) == ASKED or not self._budget.has_room_ahead(size)):
                submit()
            while not self._budget.has_room_ahead(size):
                self._continue()
            self._budget.read_ahead(size)
            try:
                opens.append(picture.in_memory())
            except SourceEndsError:
                self._budget.forget(size)
                continue
            sizes.append(size)
            batch.entries.append(picture.entry)
            if len(batch.entries) == self._rows:
                break
        if opens:
            submit()
        return batch

    def _finished(self, batch: _Batch) -> tuple[list[Entry], list[Decoded | str]]:
        """Waits until all pictures of the batch are decoded."""
        while batch.missing:
            self._continue()
        return batch.entries, batch.results

    def _continue(self, wait: bool = True) -> None:
        """Takes the answers that there are, or waits for one, and sends further requests."""
        for key, _ in self._answers.select(None if wait else 0):
            worker: _Worker = key.data
            request = worker.requests[0]
            answers = worker.receive()
            # A process that was started again has another connection.
            same = worker.connection is key.fileobj
            if not (worker.requests and same):
                self._answers.unregister(key.fd)
            if worker.requests and not same:
                self._answers.register(worker.connection, selectors.EVENT_READ, worker)
            if not worker.requests:
                self._budget.free(worker.reserved)
            self._take(request, answers)
        while self._waiting:
            request = self._waiting[0]
            found = self._worker_for(request)
            if found is None or not found.send(request):
                break
            self._waiting.popleft()
            if len(found.requests) == 1:
                found.reserved = request.reserved
                self._answers.register(found.connection, selectors.EVENT_READ, found)
            self._here -= len(request.opens)

    def _take(self, request: _Request, answers: Sequence[Answer]) -> None:
        """Puts answers into their batch, or requests again what needs more memory."""
        batch, larger = request.batch, []
        for i, answer in enumerate(answers):
            if isinstance(answer, int):
                larger.append(request.part(i, answer))
                continue
            batch.results[request.first + i] = answer
            batch.missing -= 1
            self._budget.forget(request.sizes[i])
        self._waiting.extendleft(reversed(larger))

    def _worker_for(self, request: _Request) -> _Worker | None:
        """Returns the decoder that can take the request now, with its memory; None if none can."""
        workers: Sequence[_Worker] = self._threads if self._here > 0 else self._started()
        worker = min(workers, key=lambda worker: len(worker.requests))
        if not worker.requests:
            return worker if self._budget.reserve(request.reserved) else None
        if len(worker.requests) == worker.most or worker.reserved != request.reserved:
            return None
        # A decoder decodes one request after another, in the same memory beside both contents.
        both = (*worker.requests, request)
        fits = max(each.in_memory for each in both) <= min(each.spare for each in both)
        return worker if fits else None

    def _started(self) -> list[_Process]:
        """Returns the processes. Each one is started by its first request."""
        while len(self._processes) < len(self._threads):
            self._processes.append(_Process(self._preprocessing, self._slots))
        return self._processes


def _in_memory(opens: Iterable[Open]) -> int:
    """Returns the number of bytes of the contents that are in memory."""
    return sum(len(open_.content) for open_ in opens if isinstance(open_, Content))


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
    mailboxes: Sequence[Mailbox],
    _: Send,
    slot: int,
    opens: Sequence[Open | tuple[int, int, int]],
    size: int,
) -> list[Sent]:
    """Decodes a request's pictures into the slots that begin at `slot`; returns their answers.

    The images follow each other, so that they can be copied to a device together.

    Args:
      opens: for each picture the function that opens it, or the number of the mailbox with its
        content, and where it is there.
      size: number of bytes that are reserved for each picture.
    """

    end = slot * slots.size

    def answer(slot: int, open_: Open | tuple[int, int, int]) -> Sent:
        nonlocal end
        if isinstance(open_, tuple):
            number, begin, length = open_

            def open_(reserved: float) -> BinaryIO:
                check_room(length, reserved)
                return mailboxes[number].read(begin, length)

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
