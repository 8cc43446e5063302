"""How a command ends on a signal: without its unfinished file, with one line and code 128 + N.

The handler ends the process itself. A KeyboardInterrupt would pass through the code of other
packages, and Python drops one that is raised in a callback of its garbage collector, as JAX has
one, or of its import system.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

# The signals that end a command, by what the last line says.
WORDS = {"SIGINT": "Interrupted", "SIGTERM": "Terminated", "SIGHUP": "Hung up"}


class _State:
    """What the handler has to know.

    Attributes:
      unfinished: files that it removes.
      outcome: what the last line says of the command's file.
      line_open: whether a progress bar stands in the last line of standard error.
      deferring: whether a signal waits until `deferred` ends.
      waiting: the signal that does.
    """

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.outcome = "nothing was written"
        self.line_open = False
        self.deferring = False
        self.waiting: int | None = None


state = _State()


def install() -> None:
    """From now on the signals end this process, except those that it was started to ignore."""
    for name in WORDS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A signal that arrives inside of the block takes effect at its end."""
    state.deferring = True
    try:
        yield
    finally:
        state.deferring = False
        if state.waiting is not None:
            _end(state.waiting, None)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """During the block a progress bar stands in the last line of standard error."""
    state.line_open = True
    try:
        yield
    finally:
        state.line_open = False


def _end(number: int, _: FrameType | None) -> None:
    if state.deferring:
        state.waiting = number
        return
    state.deferring = True  # Another signal changes nothing now.
    for file in state.unfinished:
        with contextlib.suppress(OSError):
            os.unlink(file)
    line = f"{WORDS[signal.Signals(number).name]}; {state.outcome}.\n"
    with contextlib.suppress(OSError):
        os.write(2, (b"\n" if state.line_open else b"") + line.encode(errors="backslashreplace"))
    os._exit(128 + number)
