"""A child process that launches kernels, and the parent that outlives a hang or a crash of it.

A kernel that hangs cannot be ended from within its process, and after a CUDA error no kernel runs
there any more. So the child says what it is about to launch. When a launch takes too long, or the
child ends, the parent notes this case and starts another child for the rest.

This module does not import JAX: the parent needs no GPU.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

# Seconds in which a child has to import, compile, draw and compare: only a broken one takes longer.
PREPARATION = 900.0
# Seconds in which a killed process has to end.
ENDING = 60.0


@dataclasses.dataclass(frozen=True)
class Listed:
    """What the child is going to do; sent first.

    Attributes:
      about: the machine, and which backends serve there.
      cases: each in words.
    """

    about: dict[str, Any]
    cases: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Prepares:
    """The child compiles a case, or draws its operands, or compares its results."""

    case: int


@dataclasses.dataclass(frozen=True)
class Launches:
    """The child launches a case now, for the `launch`th time."""

    case: int
    launch: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What a launch gave: numbers by name."""

    case: int
    counts: dict[str, int]


type Outcome = Literal["ended", "hung", "crashed", "left out"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A case is done.

    Attributes:
      case: its index.
      outcome: "ended" if everything was launched and compared.
      reason: why not, otherwise.
    """

    case: int
    outcome: Outcome
    reason: str = ""


type Message = Listed | Prepares | Launches | Found | Ended
type Send = Callable[[Message], None]
# Sends what it does, first `Listed`, and leaves out the cases that are given.
type Work = Callable[[frozenset[int], Send], None]
# Whether a message arrives within so many seconds, after the last one.
type Watch = Callable[[Connection, float, Message | None], bool]


class ChildError(RuntimeError):
    """The child ends or hangs before its first case."""


def poll(connection: Connection, seconds: float, last: Message | None) -> bool:
    """The watch of a real clock."""
    del last
    return connection.poll(seconds)


def supervised(work: Work, *, timeout: float, watch: Watch = poll) -> Iterator[Message]:
    """Runs the work in child processes, and yields what they send.

    A case that hangs or crashes also gets an `Ended`. `Listed` is yielded once.

    Args:
      work: a picklable function.
      timeout: seconds that one launch may take.
      watch: waits for a message.

    Raises:
      ChildError: a child did not begin any case, or could not be killed.
    """
    context = multiprocessing.get_context("spawn")
    done: set[int] = set()
    listed, left = False, True
    while left:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(work, frozenset(done), sender), daemon=True)
        child.start()
        sender.close()
        before = len(done)
        last: Message | None = None
        try:
            while True:
                seconds = timeout if isinstance(last, Launches) else PREPARATION
                if not watch(receiver, seconds, last):
                    _kill(child)
                    outcome, reason = _hung(last, seconds)
                    break
                try:
                    message = receiver.recv()
                except EOFError:
                    child.join()
                    outcome, reason = "crashed", _crashed(last, child.exitcode)
                    break
                last = message
                if isinstance(message, Ended):
                    done.add(message.case)
                if not isinstance(message, Listed):
                    yield message
                elif not listed:
                    listed, count = True, len(message.cases)
                    yield message
        finally:
            if child.is_alive():
                _kill(child)
            receiver.close()
        if isinstance(last, Prepares | Launches | Found):
            done.add(last.case)
            yield Ended(last.case, outcome, reason)
        elif len(done) == before and not (listed and len(done) == count):
            raise ChildError(f"check: the child process began no case: {reason}.")
        left = not listed or len(done) < count


def _hung(last: Message | None, seconds: float) -> tuple[Outcome, str]:
    if isinstance(last, Launches):
        return "hung", f"launch {last.launch} did not end within {seconds:g} s"
    return "hung", f"compiling, drawing or comparing did not end within {seconds:g} s"


def _crashed(last: Message | None, code: int | None) -> str:
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = signal.Signals(-code).name
    if isinstance(last, Launches):
        return f"the process ended with {how} in launch {last.launch}"
    return f"the process ended with {how} outside of a launch"


def _kill(child: multiprocessing.process.BaseProcess) -> None:
    child.kill()
    child.join(ENDING)
    if child.is_alive():
        raise ChildError(
            f"check: process {child.pid} hangs and cannot be killed. The GPU may need a reset."
        )


def _run(work: Work, done: frozenset[int], sender: Connection) -> None:
    """The child."""
    # The parent decides what a signal from the terminal ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(done, sender.send)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
