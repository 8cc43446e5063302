"""Ends a command on signal N: writes what is finished, prints one line, exits with 128 + N.

Python calls a signal handler in the main thread, between two bytecodes. While that thread compiles
a program or waits for a device, that may take minutes. So a thread ends the process. It reads the
signals from a pipe, to which Python's C code writes them at once (`signal.set_wakeup_fd`).

The thread ends the process itself. A KeyboardInterrupt would pass through the code of other
packages. Python also drops an exception that is raised in a callback of its garbage collector (JAX
has such a callback) or of its import system.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from pallas_patch_embed.base.messages import printable

# The signals that end a command, and the word for each in the command's last line.
WORDS = {"SIGINT": "Interrupted", "SIGTERM": "Terminated", "SIGHUP": "Hung up"}

# Seconds in which everything that is finished must be written, and seconds in which the last line
# must be printed. Either may hang: a network may be down, and nobody may read a pipe. Clouds that
# take a machine back leave 30 s.
WRITING, PRINTING = 8.0, 1.0

# Seconds for which the main thread stops after a signal, so that nothing else happens while the
# process ends. Then it goes on, because it may hold a lock that the writing needs.
PAUSE = 2.0


class _State:
    """The state that the thread reads.

    Attributes:
      writers: functions that write what is finished.
      unfinished: paths of files that are removed.
      outcome: result of the command, for its last line.
      line_open: whether the last line on standard error is a progress bar, without a newline.
      lock: lock of `deferred`.
      pipe: descriptor to which signals are written, or None before `install`.
    """

    def __init__(self) -> None:
        self.writers: list[Callable[[], None]] = []
        self.unfinished: set[str] = set()
        self.outcome = "nothing was written"
        self.line_open = False
        self.lock = threading.RLock()
        self.pipe: int | None = None


class _Own(threading.local):
    """The state of each thread.

    Attributes:
      deferring: number of blocks of `deferred` that the thread is in or waits for.
      signalled: whether it got a signal in such a block.
    """

    deferring = 0
    signalled = False


state = _State()
_own = _Own()


def install() -> None:
    """Installs the handler, except for signals that were ignored when the process was started."""
    if state.pipe is None:
        reader, state.pipe = os.pipe()
        os.set_blocking(state.pipe, False)
        signal.set_wakeup_fd(state.pipe, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=[reader], daemon=True).start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_uninstall)
    for number in _numbers():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def _uninstall() -> None:
    """Lets signals end a forked process, which shares the pipe with its parent, in their own way.

    Otherwise a signal to the forked process would end its parent.
    """
    signal.set_wakeup_fd(-1)
    for number in _numbers():
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in WORDS if hasattr(signal, name)]


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers the effect of a signal that arrives inside the block to the end of the block.

    The threads of a process enter such blocks one at a time.
    """
    _own.deferring += 1
    try:
        with state.lock:
            yield
    finally:
        _own.deferring -= 1
        if _own.signalled and not _own.deferring:
            _own.signalled = False
            time.sleep(PAUSE)


@contextlib.contextmanager
def written_at_end(write: Callable[[], None]) -> Iterator[None]:
    """Calls `write` if a signal ends the process during the block.

    `write` is called in another thread, when no thread is in a block of `deferred`. No thread
    enters one afterwards.
    """
    state.writers.append(write)
    try:
        yield
    finally:
        with deferred():
            state.writers.remove(write)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Marks the last line on standard error as a progress bar during the block."""
    state.line_open = True
    try:
        yield
    finally:
        state.line_open = False


def _handle(number: int, _: FrameType | None) -> None:
    """Python's handler, which the main thread calls when it can."""
    assert state.pipe is not None
    with contextlib.suppress(OSError):  # The pipe may be full of signals.
        # Another package may have replaced the descriptor of `set_wakeup_fd`.
        os.write(state.pipe, bytes([number]))
    if _own.deferring:
        _own.signalled = True
    else:
        time.sleep(PAUSE)


def _watch(reader: int) -> None:
    while True:
        # Python writes every signal to the pipe that has a handler, and another package may have
        # replaced the handler of this module.
        (number,) = os.read(reader, 1)
        if signal.getsignal(number) is _handle:
            _end(number)


def _end(number: int) -> None:
    """Ends the process; later signals have no effect."""
    problems = [f"this takes more than {WRITING:g} s"]

    def write() -> None:
        state.lock.acquire()  # It is not released: from now on nothing else is written.
        try:
            for function in list(state.writers):
                function()
            problems.clear()
        except Exception as error:
            problems[:] = [printable(error)]
        for file in list(state.unfinished):  # Other threads may change the set meanwhile.
            with contextlib.suppress(OSError):
                os.unlink(file)

    def say() -> None:
        lines = [f"{WORDS[signal.Signals(number).name]}; {state.outcome}."]
        if problems and state.writers:
            lines.insert(0, f"The latest results were not written: {problems[0]}.")
        text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            os.write(2, (b"\n" if state.line_open else b"") + text)

    try:
        _within(WRITING, write)
        _within(PRINTING, say)
    finally:
        os._exit(128 + number)


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Calls a function in a thread, and waits at most `seconds` for its end."""
    thread = threading.Thread(target=function, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The process has as many threads as it may have.
        function()
    else:
        thread.join(seconds)
