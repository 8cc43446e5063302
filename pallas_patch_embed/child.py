"""A process that does what may hang or crash, and can be ended without ending this one.

A kernel that hangs cannot be ended from within its process, and after an error of CUDA no kernel
runs there any more. This module does not import JAX: the parent needs no GPU.
"""

import contextlib
import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Literal

from pallas_patch_embed.ending import WORDS

# Sent after the last message of an answer.
DONE = "done"

# Seconds in which a process ends that has closed its connection, and in which a killed one ends.
CLOSING, ENDING = 1.0, 60.0

# Linux's prctl: the signal that a process gets when the thread that started it ends.
PR_SET_PDEATHSIG = 1

type Send = Callable[[Any], None]
# (connection, seconds, last message) -> whether there is something to receive.
type Wait = Callable[[Connection, float, Any], bool]


class ChildEndedError(Exception):
    """The child crashed, or was ended; the message says how, such as "ended its process, ..."."""

    def __init__(self, outcome: Literal["hung", "crashed"], text: str):
        super().__init__(text)
        self.outcome = outcome


class UnkillableError(OSError):
    """The process still runs after it was killed."""


def poll(connection: Connection, seconds: float, last: Any) -> bool:
    """Whether the child says something, or ends, within `seconds`."""
    del last
    return connection.poll(seconds)


class Child:
    """Answers requests in a process of its own, which begins with the first one.

    Args:
      answer: what the process does: a function of a module, of a function that sends a message, and
        of the arguments of a request. It and the messages can be pickled.
      patience: the seconds after a message, or None at the beginning of an answer, in which the
        next one must come.
      wait: waits for a message.
    """

    def __init__(
        self, answer: Callable[..., None], patience: Callable[[Any], float], wait: Wait = poll
    ):
        self._answer, self._patience, self._wait = answer, patience, wait
        self._process: multiprocessing.process.BaseProcess | None = None
        self._answering = False

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, *arguments: Any) -> Iterator[Any]:
        """Yields the messages of an answer.

        A process whose answer is not read to its end is ended by the next request, which would
        receive the rest.

        Raises:
          ChildEndedError: the process crashed, or was ended because it said nothing for too long.
          UnkillableError: it could not be ended.
        """
        if self._answering:
            self.end()
        if self._process is None:
            self._begin()
        self._answering = True
        with contextlib.suppress(BrokenPipeError):  # It has ended: there is nothing to receive.
            self._connection.send(arguments)
        message = None
        while True:
            seconds = self._patience(message)
            if not self._wait(self._connection, seconds, message):
                self.end()
                raise ChildEndedError("hung", f"took more than {seconds:g} s and was ended")
            try:
                kind, message = self._connection.recv()
            except (EOFError, OSError):  # Also in the middle of a message.
                how = _words(self.end())
                raise ChildEndedError("crashed", f"ended its process, {how}") from None
            if kind == DONE:
                self._answering = False
                return
            yield message

    def end(self) -> int | None:
        """Ends the process, if there is one; returns its exit code."""
        process, self._process, self._answering = self._process, None, False
        if process is None:
            return None
        self._connection.close()
        # One that has crashed has a code of its own by then.
        process.join(CLOSING)
        process.kill()
        process.join(ENDING)
        if process.is_alive():
            raise UnkillableError(
                f"process {process.pid} hangs and cannot be killed. The GPU may need a reset."
            )
        return process.exitcode

    def _begin(self) -> None:
        # A fork would share the threads and locks of JAX.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._answer), daemon=True)
        with _without_interrupts():
            self._process.start()
        theirs.close()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """During the block the keyboard's signal waits; a process that begins in it never gets it.

    A terminal sends it to both processes. The child would end with a traceback while it imports.
    """
    if sys.platform == "win32":
        yield
        return
    # `Process.start` would start it, and let the signal through afterwards.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _words(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _serve(connection: Connection, answer: Callable[..., None]) -> None:
    """The child's main function."""
    # The parent decides what a signal to both of them means.
    for name in WORDS:
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer(lambda message: connection.send(("message", message)), *connection.recv())
            connection.send((DONE, None))
