"""A child process for work that may hang or crash; it can be ended without ending this process.

A kernel that hangs cannot be ended from within its process, and after a CUDA error no kernel runs
in that process any more. The parent needs no GPU, so this module does not import JAX.
"""

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Literal

from pallas_patch_embed.base.devices import NoDeviceError
from pallas_patch_embed.base.ending import WORDS

# The child sends one of these with the last message of an answer, or after it.
DONE, NO_DEVICE = "done", "no device"

# Seconds to wait for the end of a process: after its connection was closed, after it was killed.
CLOSING, ENDING = 1.0, 60.0

# Linux's prctl option for the signal that a process gets when the thread that started it ends.
PR_SET_PDEATHSIG = 1

type Send = Callable[[Any], None]
# Function (connection, seconds, last message) that waits for a message. It returns whether there is
# something to receive.
type Wait = Callable[[Connection, float, Any], bool]


class ChildEndedError(Exception):
    """The child crashed, or hung and was ended; the message begins with a verb, as "ended ..."."""

    def __init__(self, outcome: Literal["hung", "crashed"], text: str):
        super().__init__(text)
        self.outcome = outcome


class UnkillableError(OSError):
    """A process is still running after it was killed."""


def pickled(*arguments: Any) -> memoryview:
    """Returns a request for `Child.send`."""
    return reduction.ForkingPickler.dumps(arguments)


def poll(connection: Connection, seconds: float, last: Any) -> bool:
    """Waits up to `seconds`; returns whether the child sent a message or ended in that time."""
    del last
    return connection.poll(None if seconds == math.inf else seconds)


class Child:
    """Answers requests in a child process, which starts with the first request.

    Args:
      answer: function that the child calls for each request, with a function that sends a message
        and with the arguments of the request. What it returns is the last message, unless it is
        None. It must be a function of a module, because it is pickled; messages must be picklable
        too.
      patience: function from the last message (None at the beginning of an answer) to the seconds
        in which the next message must come.
      wait: function that waits for a message.

    Attributes:
      connection: the connection to the child, when it has been started.
    """

    def __init__(
        self,
        answer: Callable[..., Any],
        patience: Callable[[Any], float] = lambda _: math.inf,
        wait: Wait = poll,
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

        If the previous answer was not read to its end, the child is ended first, because the rest
        of that answer would be mixed up with this one.

        Raises:
          ChildEndedError: the child crashed, or was ended because it sent nothing for too long.
          NoDeviceError: the child found no device.
          UnkillableError: the child could not be ended.
          OSError: the child could not be started, for example because too many files are open.
        """
        if self._answering:
            self.end()
        self._answering = True
        self.send(pickled(*arguments))
        message = None
        while True:
            seconds = self._patience(message)
            if not self._wait(self.connection, seconds, message):
                self.end()
                raise ChildEndedError("hung", f"took more than {seconds:g} s and was ended")
            kind, message = self._received()
            if kind in (DONE, NO_DEVICE):
                self._answering = False
                if kind == NO_DEVICE:
                    raise NoDeviceError(message)
                if message is not None:
                    yield message
                return
            yield message

    def send(self, request: memoryview) -> None:
        """Sends a request that was `pickled`, whose answer is only its last message.

        `receive` waits for the answer, and `connection` has something to read when there is one.
        Several requests may be sent, which are answered one after another. If another one is
        unanswered, the child may wait until its answer is received, before it reads a request that
        is larger than a pipe.

        Raises:
          OSError: the child could not be started.
        """
        if self._process is None:
            self._begin()
        with contextlib.suppress(BrokenPipeError):  # The child has ended: to receive raises.
            self.connection.send_bytes(request)

    def receive(self) -> Any:
        """Waits for the answer to the oldest request of `send`.

        Raises:
          ChildEndedError: the child crashed. It has no requests any more.
          UnkillableError: the child could not be ended.
        """
        return self._received()[1]

    def _received(self) -> tuple[str, Any]:
        """Waits for a message; returns its kind and the message."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # OSError if the child ended in the middle of a message.
            how = _words(self.end())
            raise ChildEndedError("crashed", f"ended its process, {how}") from None

    def end(self) -> int | None:
        """Ends the child, if there is one; returns its exit code."""
        process, self._process, self._answering = self._process, None, False
        if process is None:
            return None
        self.connection.close()
        # The wait lets a child that has crashed exit with its own code before it is killed.
        process.join(CLOSING)
        process.kill()
        process.join(ENDING)
        if process.is_alive():
            raise UnkillableError(
                f"process {process.pid} hangs and cannot be killed. The GPU may need a reset."
            )
        return process.exitcode

    def _begin(self) -> None:
        # A forked child would inherit JAX's locks, but not the threads that hold them.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._answer), daemon=True)
        with theirs, safe_paths(), _without_signals():
            process.start()
        self._process = process


_environment = threading.Lock()


@contextlib.contextmanager
def safe_paths() -> Iterator[None]:
    """Makes Python processes that are started in a `with` block import nothing from this folder.

    Python puts the current folder in front of the module search path of a process that it starts
    with `-c`, as multiprocessing does. A file pickle.py in that folder would be executed. The
    processes, and all that they start in turn, inherit the variable that prevents this.
    """
    with _environment:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Blocks the signals that end a command, also in a process that is started in this block.

    A terminal sends SIGINT and SIGHUP to parent and child, and a batch system may send SIGTERM to
    both. Without this, a child would end if it got the signal while it imports modules.
    """
    if sys.platform == "win32":
        yield
        return
    # The tracker is started here because its start unblocks signals. Otherwise `Process.start`
    # would start it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in WORDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _words(code: int | None) -> str:
    """Describes an exit code in words."""
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _serve(connection: Connection, answer: Callable[..., Any]) -> None:
    """The child's main function."""
    # A terminal sends signals to both processes, and the parent decides what to do.
    for name in WORDS:
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                last = answer(lambda m: connection.send(("message", m)), *connection.recv())
            except NoDeviceError as error:
                connection.send((NO_DEVICE, str(error)))
            else:
                connection.send((DONE, last))
