"""The search for the fastest config of a backend for one problem.

All candidates are checked before they are timed. Then all are timed interleaved in bursts. If a
call is long enough, the heuristic's config and those that may be faster are also timed sustained.
The fastest config is kept if it is faster than the heuristic's by more than the spread.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from pallas_patch_embed.backends import BACKENDS, stored
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.stored import SearchResult
from pallas_patch_embed.base import versions
from pallas_patch_embed.base.child import Send
from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.problem import Problem
from pallas_patch_embed.commands.check import memory
from pallas_patch_embed.commands.check.compare import Turn, draw, wrong_elements
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.commands.tune.timing import Contender, Timing

# Runs of a check, each with new operands.
RUNS = 3

# Number of candidates that are timed sustained, besides the heuristic's.
FINALISTS = 2

# Calls of fewer milliseconds than this are not timed sustained. JAX takes up to 0.08 ms to submit a
# call, and the GPU would wait for it (64 images of B/16 take 0.013 ms in a burst, 0.08 sustained).
SHORT = 0.25

# The name that `search` yields before all candidates are timed interleaved.
IN_TURNS = "timing of all configs"

# The name for the search before it has yielded the first one.
BEGINNING = "start of the search"

# The reason of a `Failure` whose operands and results do not fit.
TOO_LARGE = "it needs more GPU memory than a process has (--jobs processes share it equally)."

# The message of a process that waits for its turn on the GPU.
WAITING = "wait for the GPU"

# The calls of a contender cycle through copies of the patches, so that no call finds its patches in
# the L2 cache: total size of the copies as a multiple of the cache, and largest number of copies.
BEYOND_CACHE, MOST_COPIES = 2, 32

# How long contenders are timed: arguments of `timing.burst` and `timing.sustained`.
BURST: dict[str, Any] = dict(rounds=5, calls=5, rest=0.03)
SUSTAINED: dict[str, Any] = dict(rounds=2, calls=20, seconds=1.0)


@dataclasses.dataclass(frozen=True)
class Task:
    """A backend and a problem, for which the fastest config is searched."""

    backend: str
    problem: Problem

    @property
    def key(self) -> str:
        """The key of this task's result in a file."""
        return stored.key_of(self.backend, stored.describe_problem(self.problem))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why a backend does not serve a problem, or has no configs for it."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why no config was found, although the backend serves the problem.

    It is not stored, so the next command searches the problem again.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine on which the search runs.

    Attributes:
      device: JAX's name of the device.
      head: the head of a file with results that are measured on the machine.
    """

    device: str
    head: dict[str, Any]


def answer(
    send: Send, task: Task | None, refused: Mapping[str, str], *, lock: str | None = None
) -> None:
    """Answers a request in the child: searches a task, or sends the `Machine` if there is none.

    `lock` is the path of the file that `alone` locks; None if no other process searches. Before a
    turn the child sends `WAITING`, and when the turn begins it repeats the message before that.
    """
    check_devices()
    target = Target.of(default_device())
    if task is not None:
        last: Any = BEGINNING

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            send(WAITING)
            with contextlib.nullcontext() if lock is None else alone(lock):
                send(last)
                yield

        for last in search(task, target, refused, turn):
            send(last)
        return
    driver = versions.driver() if target.chip is not None else ""
    head = stored.new_head(target.chip, driver, versions.installed(versions.PACKAGES))
    send(Machine(default_device().device_kind, head))


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """Waits until no other process is in such a block with the same file.

    The operating system releases the lock when the process ends, whatever ends it.
    """
    import fcntl  # Windows does not have it.

    with open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def search(
    task: Task,
    target: Target,
    refused: Mapping[str, str],
    turn: Turn = contextlib.nullcontext,
) -> Iterator[str | SearchResult | Refusal | Failure]:
    """Searches for the fastest config.

    Args:
      task: backend and problem.
      target: the chip.
      refused: how the child ended in earlier searches of this task, by the name that the search
        had yielded last. Candidates among these names are not tried again.
      turn: function that returns a context in which no other search uses the GPU. Kernels are
        compiled outside of it.

    Yields:
      The name of each candidate before it is tried, and `IN_TURNS` before all are timed; then a
      SearchResult, a Refusal if the backend does not serve the problem or has no configs, or a
      Failure if the process has too little memory.
    """
    try:
        configs = {str(x): x for x in BACKENDS[task.backend].candidates(task.problem, target)}
    except NotImplementedError as error:
        yield Refusal(str(error))
        return
    if not configs:
        yield Refusal("it has no configs.")
        return
    heuristic, *_ = configs
    reasons = {name: refused[name] for name in configs if name in refused}
    contenders: dict[str, Contender] = {}
    operands: list[Any] = []
    for name, config in configs.items():
        if name in reasons:
            continue
        yield name
        try:
            run = plan(task, target, config).run
            jitted = jax.jit(run)
            jitted.lower(*memory.operand_types(task.problem)).compile()
        except Exception as error:  # Compilers raise many kinds of errors.
            reasons[name] = _first_line(error)
            continue
        try:
            seed = len(contenders)
            if wrong := wrong_elements(run, task.problem, runs=RUNS, seed=seed, turn=turn):
                reasons[name] = f"{wrong} elements of its results are wrong"
                continue
            with turn():
                operands = operands or _operands(task.problem, target)
                contender = Contender(jitted, operands[0], tuple(operands[1:]))
                jax.block_until_ready(contender())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise  # After a CUDA error no kernel runs in this process any more.
            yield Failure(TOO_LARGE)
            return
        contenders[name] = contender
    if not contenders:
        yield _result(task, None, {}, reasons)
        return
    yield IN_TURNS
    with turn():
        times = timed(contenders, heuristic)
    best = fastest(times, heuristic)
    kept = None if best == heuristic else dataclasses.asdict(configs[best])
    yield _result(task, kept, times, reasons)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def plan(task: Task, target: Target, config: Any) -> Plan:
    """Returns the plan with a candidate."""
    return BACKENDS[task.backend].plan(task.problem, target, config=config)


def _operands(problem: Problem, target: Target) -> list[Any]:
    """Draws random operands for several calls, which differ in their patches."""
    first = draw(jax.random.key(0, impl="rbg"), problem)
    assert target.chip is not None
    copies = MOST_COPIES
    if target.chip.is_listed:
        needed = math.ceil(BEYOND_CACHE * target.chip.l2 / max(1, first[0].nbytes))
        copies = min(needed, MOST_COPIES)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), copies)
    return [first, *((draw(key, problem)[0], *first[1:]) for key in keys[1:])]


def timed(contenders: Mapping[str, Contender], heuristic: str) -> dict[str, dict[str, Timing]]:
    """Times all contenders in bursts, and the finalists also sustained.

    Args:
      contenders: the contenders by name.
      heuristic: name of the heuristic's config, which is always a finalist.

    Returns:
      The times by name and by "burst" or "sustained".
    """
    in_burst = timing.burst(dict(contenders), **BURST)
    times = {name: {"burst": found} for name, found in in_burst.items()}
    order = sorted(in_burst, key=lambda name: in_burst[name].milliseconds)
    if in_burst[order[0]].milliseconds < SHORT:
        return times
    own = in_burst.get(heuristic)
    # A config that is slower in bursts is not kept, whatever its sustained time is.
    others = [x for x in order if x != heuristic and not (own and is_faster(own, in_burst[x]))]
    if own and not others:
        return times
    names = [x for x in (heuristic, *others[:FINALISTS]) if x in contenders]
    of_finalists = timing.sustained({name: contenders[name] for name in names}, **SUSTAINED)
    for name, found in of_finalists.items():
        times[name]["sustained"] = found
    return times


def finalists(times: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the names of the configs that were timed sustained, or all names if none was."""
    return [name for name in times if "sustained" in times[name]] or list(times)


def fastest(times: Mapping[str, Mapping[str, Timing]], heuristic: str) -> str:
    """Returns the name of the config that is kept.

    It is the config with the smallest product of both times among the heuristic's and those that
    are faster than the heuristic's by more than the spread in bursts or sustained, and not slower
    by more than the spread in the other. If the heuristic's was refused, it is the one with the
    smallest product of all.
    """
    compared = {name: times[name] for name in finalists(times)}
    if heuristic in compared:
        old = compared[heuristic]
        faster = {
            name: found
            for name, found in compared.items()
            if any(is_faster(found[regime], old[regime]) for regime in found)
            and not any(is_faster(old[regime], found[regime]) for regime in found)
        }
        compared = {heuristic: old, **faster}

    def product(name: str) -> float:
        return math.prod(timing.milliseconds for timing in compared[name].values())

    return min(compared, key=product)


def is_faster(new: Timing, old: Timing) -> bool:
    """Returns whether the new median is smaller than the old one by more than the larger spread.

    A spread is half of the distance between the 10th and the 90th percentile.
    """
    spread = max(new.high - new.low, old.high - old.low) / 2
    return old.milliseconds - new.milliseconds > spread


def _result(
    task: Task,
    config: dict[str, Any] | None,
    times: Mapping[str, Mapping[str, Timing]],
    refused: dict[str, str],
) -> SearchResult:
    return SearchResult(
        backend=task.backend,
        problem=stored.describe_problem(task.problem),
        config=config,
        date=time.strftime("%Y-%m-%d"),
        times={
            name: {regime: dataclasses.asdict(timing) for regime, timing in found.items()}
            for name, found in times.items()
        },
        refused=refused,
    )
