"""Ends a command on signal N: removes unfinished files, prints one line, exits with 128 + N.

The handler ends the process itself. A KeyboardInterrupt would pass through the code of other
packages. Python also drops an exception that is raised in a callback of its garbage collector (JAX
has such a callback) or of its import system.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

# The signals that end a command, and the word for each in the command's last line.
WORDS = {"SIGINT": "Interrupted", "SIGTERM": "Terminated", "SIGHUP": "Hung up"}


class _State:
    """The state that the handler reads.

    Attributes:
      unfinished: paths of files that the handler removes.
      outcome: result of the command, for its last line.
      line_open: whether the last line on standard error is a progress bar, without a newline.
      deferring: whether signals are held back until the block of `deferred` ends.
      waiting: the signal that is held back, or None.
    """

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.outcome = "nothing was written"
        self.line_open = False
        self.deferring = False
        self.waiting: int | None = None


state = _State()


def install() -> None:
    """Installs the handler, except for signals that were ignored when the process was started."""
    for name in WORDS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers the effect of a signal that arrives inside the block to the end of the block."""
    state.deferring = True
    try:
        yield
    finally:
        state.deferring = False
        if state.waiting is not None:
            _end(state.waiting, None)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Marks the last line on standard error as a progress bar during the block."""
    state.line_open = True
    try:
        yield
    finally:
        state.line_open = False


def _end(number: int, _: FrameType | None) -> None:
    if state.deferring:
        state.waiting = number
        return
    state.deferring = True  # From now on other signals have no effect.
    for file in list(state.unfinished):  # Other threads may change the set meanwhile.
        with contextlib.suppress(OSError):
            os.unlink(file)
    line = f"{WORDS[signal.Signals(number).name]}; {state.outcome}.\n"
    with contextlib.suppress(OSError):
        os.write(2, (b"\n" if state.line_open else b"") + line.encode(errors="backslashreplace"))
    os._exit(128 + number)
