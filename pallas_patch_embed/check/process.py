"""What the child process says while it checks, and the parent that outlives a hang or a crash.

The child says what it is about to launch. When a launch takes too long, or the child ends, the
parent notes this case, and another child goes on with the rest.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pallas_patch_embed.child import Child, ChildEndedError, Send, Wait, poll

# Seconds in which a child has to import, compile, draw and compare: only a broken one takes longer.
PREPARATION = 900.0


@dataclasses.dataclass(frozen=True)
class Listed:
    """What the child is going to do; sent first.

    Attributes:
      about: the machine, and which backends serve there.
      cases: descriptions of the cases.
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
# Sends what it does, first `Listed`, and leaves out the cases that are given.
type Work = Callable[[Send, frozenset[int]], None]


class NoCaseError(RuntimeError):
    """The child ends or hangs before its first case."""


def supervised(work: Work, *, timeout: float, wait: Wait = poll) -> Iterator[Message]:
    """Runs the work in child processes, and yields what they send.

    A case that hangs or crashes also gets an `Ended`. `Listed` is yielded once.

    Args:
      work: a picklable function.
      timeout: seconds that one launch may take.
      wait: waits for a message.

    Raises:
      NoCaseError: a child did not begin any case.
    """

    def patience(last: Message | None) -> float:
        return timeout if isinstance(last, Launches) else PREPARATION

    done: set[int] = set()
    count: int | None = None
    while count is None or len(done) < count:
        before, reason = len(done), "it ended without one"
        last: Message | None = None
        try:
            # After an error of CUDA no kernel may run in this process.
            with Child(work, patience, wait) as child:
                for last in child.ask(frozenset(done)):
                    if isinstance(last, Ended):
                        done.add(last.case)
                    if not isinstance(last, Listed):
                        yield last
                    elif count is None:
                        count = len(last.cases)
                        yield last
        except ChildEndedError as error:
            what = "compiling, drawing or comparing"
            if isinstance(last, Launches):
                what = f"launch {last.launch}"
            reason = f"{what} {error}"
            if isinstance(last, Prepares | Launches | Found):
                done.add(last.case)
                yield Ended(last.case, error.outcome, reason)
        if len(done) == before and count != before:
            raise NoCaseError(f"check: the child process began no case: {reason}.")
