"""The search for the fastest config of a backend for one problem.

All candidates are checked before they are timed. They are timed in turns, first in a burst; then,
if a call is long enough, those that came closest, and the heuristic's, also sustained. The fastest
is kept if it is faster than the heuristic's by more than the spread.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from pallas_patch_embed import versions
from pallas_patch_embed.backends import BACKENDS, stored
from pallas_patch_embed.backends.mosaic import MosaicBackend
from pallas_patch_embed.backends.plan import Plan, Refusal
from pallas_patch_embed.backends.stored import Result
from pallas_patch_embed.check.compare import draw, wrong_elements
from pallas_patch_embed.child import Send
from pallas_patch_embed.chips import Target, default_device
from pallas_patch_embed.problem import Problem
from pallas_patch_embed.tune import timing
from pallas_patch_embed.tune.timing import Contender, Timing

# Runs of a check, each with new operands; in an interpreter, which takes seconds for each.
RUNS, INTERPRETED_RUNS = 3, 1

# Candidates that are timed sustained, besides the heuristic's.
FINALISTS = 2

# Milliseconds of a call below which there are no sustained times: JAX takes up to 0.08 ms to submit
# one, and the GPU would wait for that (64 images of B/16: 0.013 ms in a burst, 0.08 sustained).
SHORT = 0.25

# What is tried while candidates are timed in turns.
IN_TURNS = "all in turns"

# What is tried before the first candidate is named.
BEGINNING = "the beginning"

# Bytes of patches that the calls of a contender cycle through, as multiples of the L2 cache, so
# that none finds its patches there; and the largest number of copies.
BEYOND_CACHE, MOST_COPIES = 2, 32

# How long contenders are timed on a GPU, and in an interpreter: there a single call.
GPU = dict(
    burst=dict(rounds=5, calls=5, rest=0.2),
    sustained=dict(rounds=2, calls=20, seconds=1.0),
)
INTERPRETER = dict(
    burst=dict(rounds=1, calls=1, rest=0.0),
    sustained=dict(rounds=1, calls=1, seconds=1e-6),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem for which a backend's fastest config is searched."""

    backend: str
    problem: Problem


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the search runs.

    Attributes:
      device: what JAX calls the device.
      head: the head of a file of what is measured there.
    """

    device: str
    head: dict[str, Any]


def answer(send: Send, task: Task | None, refused: Mapping[str, str]) -> None:
    """What the child process does: `search`, or, without a task, it says where it runs."""
    target = Target.of(default_device())
    if task is not None:
        for message in search(task, target, refused):
            send(message)
        return
    driver = versions.driver() if target.chip is not None else ""
    head = stored.new_head(target.chip, driver, versions.installed(versions.PACKAGES))
    send(Machine(default_device().device_kind, head))


def search(
    task: Task, target: Target, refused: Mapping[str, str]
) -> Iterator[str | Result | Refusal]:
    """Searches; yields the name of each candidate before it is tried, then what was found.

    Args:
      task: backend and problem.
      target: the chip; without one kernels are interpreted, if there is an interpreter.
      refused: candidates that ended a process before, and how.

    Yields:
      Names of candidates, and `IN_TURNS`; then a Result, or a Refusal if the backend does not serve
      the problem, or has no configs.
    """
    try:
        configs = candidates(task, target)
    except NotImplementedError as error:
        yield Refusal(str(error))
        return
    if not configs:
        yield Refusal("it has no configs.")
        return
    heuristic, *_ = configs
    if task.problem.images and not plan(task, target, configs[heuristic]).takes_images:
        yield Refusal("it does not cut images itself.")
        return
    reasons = dict(refused)
    contenders: dict[str, Contender] = {}
    operands: list[Any] = []
    for name, config in configs.items():
        if name in reasons:
            continue
        yield name
        try:
            run = plan(task, target, config).run
            runs = RUNS if target.chip is not None else INTERPRETED_RUNS
            if wrong := wrong_elements(run, task.problem, runs=runs, seed=len(contenders)):
                reasons[name] = f"{wrong} elements of its results are wrong"
                continue
            operands = operands or _operands(task.problem, target)
            contender = Contender(jax.jit(run), operands[0], tuple(operands[1:]))
            jax.block_until_ready(contender())
        except Exception as error:  # Whatever kind of error its compiler has.
            reasons[name] = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        contenders[name] = contender
    if IN_TURNS in reasons or not contenders:
        yield _result(task, None, {}, reasons)
        return
    yield IN_TURNS
    times = timed(contenders, heuristic, GPU if target.chip is not None else INTERPRETER)
    best = fastest(times, heuristic)
    kept = None if best == heuristic else dataclasses.asdict(configs[best])
    yield _result(task, kept, times, reasons)


def candidates(task: Task, target: Target) -> dict[str, Any]:
    """The candidates by their names, the heuristic's first."""
    backend = BACKENDS[task.backend]
    if target.chip is None and isinstance(backend, MosaicBackend):
        target = interpreted(backend)
    return {str(config): config for config in backend.candidates(task.problem, target)}


def plan(task: Task, target: Target, config: Any) -> Plan:
    """The plan with a candidate; an interpreter's if there is no GPU."""
    backend = BACKENDS[task.backend]
    if target.chip is None and isinstance(backend, MosaicBackend):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        how = plgpu.InterpretGPUParams()
        return backend.plan(task.problem, interpreted(backend), config=config, interpret=how)
    return backend.plan(task.problem, target, config=config)


def interpreted(backend: MosaicBackend) -> Target:
    """The chip whose kernels are interpreted: with few multiprocessors, so that it is not long."""
    return Target("cuda", dataclasses.replace(backend.chips[0], multiprocessors=8))


def _operands(problem: Problem, target: Target) -> list[Any]:
    """Random operands of several calls."""
    first = draw(jax.random.key(0, impl="rbg"), problem)
    if target.chip is None:
        return [first]
    copies = math.ceil(BEYOND_CACHE * target.chip.l2 / max(1, first[0].nbytes))
    keys = jax.random.split(jax.random.key(1, impl="rbg"), min(copies, MOST_COPIES))
    return [first, *((draw(key, problem)[0], *first[1:]) for key in keys[1:])]


def timed(
    contenders: Mapping[str, Contender], heuristic: str, effort: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Timing]]:
    """The times of contenders by name and regime: of all in a burst, of finalists sustained.

    Args:
      contenders: the contenders by name.
      heuristic: the name of the heuristic's config, which is a finalist.
      effort: arguments of `timing.burst` and `timing.sustained`.
    """
    in_burst = timing.burst(dict(contenders), **effort["burst"])
    times = {name: {"burst": found} for name, found in in_burst.items()}
    order = sorted(in_burst, key=lambda name: in_burst[name].milliseconds)
    if in_burst[order[0]].milliseconds < SHORT:
        return times
    others = [name for name in order if name != heuristic][:FINALISTS]
    names = [heuristic, *others] if heuristic in contenders else others
    of_finalists = timing.sustained(
        {name: contenders[name] for name in names}, **effort["sustained"]
    )
    for name, found in of_finalists.items():
        times[name]["sustained"] = found
    return times


def finalists(times: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of those that were timed sustained, or of all if none was."""
    return [name for name in times if "sustained" in times[name]] or list(times)


def fastest(times: Mapping[str, Mapping[str, Timing]], heuristic: str) -> str:
    """The name of the config that is kept.

    It is faster than the heuristic's by more than the spread in a burst or sustained, and not
    slower by more than the spread in the other. Of several such ones it has the smallest product of
    both times. The heuristic's is compared too, unless it was refused.
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
        compared = faster or {heuristic: old}

    def product(name: str) -> float:
        return math.prod(timing.milliseconds for timing in compared[name].values())

    return min(compared, key=product)


def is_faster(new: Timing, old: Timing) -> bool:
    """Whether a median is smaller than another by more than the spread of either.

    The spread is half of the distance between the 10th and the 90th percentile.
    """
    spread = max(new.high - new.low, old.high - old.low) / 2
    return old.milliseconds - new.milliseconds > spread


def _result(
    task: Task,
    config: dict[str, Any] | None,
    times: Mapping[str, Mapping[str, Timing]],
    refused: dict[str, str],
) -> Result:
    return Result(
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
