"""Messages of the child process that checks, and the parent, which survives a hang or a crash.

The child announces each launch. If a launch takes too long or the child ends, the parent records
the outcome of this case, and starts another child for the remaining cases.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pallas_patch_embed.base.child import Child, ChildEndedError, Send, Wait, poll

# Seconds after which a child that imports, compiles, draws or compares counts as hung.
PREPARATION = 900.0


@dataclasses.dataclass(frozen=True)
class Listed:
    """The first message: the machine and the cases.

    Attributes:
      about: facts about the machine, and the reasons why backends do not serve there.
      cases: descriptions of the cases.
    """

    about: dict[str, Any]
    cases: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Prepares:
    """The child compiles a case, draws its operands, or compares its results."""

    case: int


@dataclasses.dataclass(frozen=True)
class Launches:
    """The child is about to launch a case for the `launch`-th time."""

    case: int
    launch: int


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a launch: the fields of `compare.Counts` by name."""

    case: int
    counts: dict[str, int]


type Outcome = Literal["ended", "hung", "crashed", "left out"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A case is done.

    Attributes:
      case: index of the case.
      outcome: "ended" if everything was launched and compared.
      reason: the reason for another outcome.
    """

    case: int
    outcome: Outcome
    reason: str = ""


type Message = Listed | Prepares | Launches | Found | Ended
# Function of the child. It sends messages, first `Listed`, and skips the cases with these indices.
type Work = Callable[[Send, frozenset[int]], None]


class NoCaseError(RuntimeError):
    """A child ended or hung before its first case."""


def supervised(work: Work, *, timeout: float, wait: Wait = poll) -> Iterator[Message]:
    """Runs the work in child processes, and yields their messages.

    `Listed` is yielded once. For a case that hangs or crashes, this function adds an `Ended`.

    Args:
      work: a picklable function.
      timeout: seconds that one launch may take.
      wait: function that waits for a message.

    Raises:
      NoCaseError: a child did not begin any case.
    """

    def patience(last: Message | None) -> float:
        return timeout if isinstance(last, Launches) else PREPARATION

    done: set[int] = set()
    count: int | None = None
    while count is None or len(done) < count:
        before, reason = len(done), "it ended"
        last: Message | None = None
        try:
            # Each round has a new child, because after a CUDA error no kernel may run in the old
            # one.
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
            raise NoCaseError(f"check: the child process did not begin any case: {reason}.")
