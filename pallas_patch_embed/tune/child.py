"""A process that does what may hang or crash, and can be ended without ending this one."""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Sent after the last message of an answer.
DONE = "done"

# Seconds in which a killed process has to end.
ENDING = 60.0

# Linux's prctl: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1


class ChildEndedError(Exception):
    """The child ended, or was ended; the message says how, without a full stop."""


def _wait(connection: multiprocessing.connection.Connection, seconds: float) -> bool:
    """Whether the child says something, or ends, within so many seconds."""
    return connection.poll(seconds)


class Child:
    """Answers requests in a process of its own, which begins with the first one.

    Args:
      answer: what the process does: a function of a module, of the arguments of a request, that
        yields messages. It and the messages can be pickled.
      patience: seconds without a message after which the process is ended.
      wait: (connection, seconds) -> whether there is something to receive.
    """

    def __init__(
        self,
        answer: Callable[..., Iterator[Any]],
        patience: float,
        wait: Callable[[multiprocessing.connection.Connection, float], bool] = _wait,
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
        """
        if self._answering:
            self.end()
        if self._process is None:
            self._begin()
        self._answering = True
        with contextlib.suppress(BrokenPipeError):  # It has ended: there is nothing to receive.
            self._connection.send(arguments)
        while True:
            if not self._wait(self._connection, self._patience):
                self.end()
                raise ChildEndedError(f"it hung, and was ended after {self._patience:g} s")
            try:
                kind, message = self._connection.recv()
            except (EOFError, ConnectionResetError):
                code = self.end()
                raise ChildEndedError(f"it ended its process, {_words(code)}") from None
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
        process.join(1)
        process.kill()
        process.join(ENDING)
        if process.is_alive():
            raise OSError(
                f"process {process.pid} hangs and cannot be killed. The GPU may need a reset."
            )
        return process.exitcode

    def _begin(self) -> None:
        # A fork would share the threads and locks of JAX.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._answer), daemon=True)
        self._process.start()
        theirs.close()


def _words(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _serve(
    connection: multiprocessing.connection.Connection, answer: Callable[..., Iterator[Any]]
) -> None:
    """The child's main function."""
    # The parent decides what a signal to both of them means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            for message in answer(*connection.recv()):
                connection.send(("message", message))
            connection.send((DONE, None))
