"""The command `pallas-patch-embed tune`, which searches for many problems and can be resumed."""

import argparse
import collections
import contextlib
import functools
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pallas_patch_embed.backends import BACKENDS, stored, tiles
from pallas_patch_embed.backends.stored import SearchResult
from pallas_patch_embed.base import ending
from pallas_patch_embed.base.child import Child, ChildEndedError
from pallas_patch_embed.base.devices import MEMORY_FRACTIONS, memory_fraction
from pallas_patch_embed.base.files import check_place
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import NAMED_SHAPES, VIT_SHAPES, NamedShape, Problem
from pallas_patch_embed.commands.check.cases import CheckCase
from pallas_patch_embed.commands.tune import search
from pallas_patch_embed.commands.tune.search import Failure, Machine, Refusal, Task

IMAGES = (1, 64, 512)

# The value of `Case.source` for each value of --sources, which says what kernels read.
SOURCES = {"patches": "given as patches", "images": "cut by the kernel"}

# Seconds without a message after which the child counts as hung. nvcc takes half a minute for a
# kernel, and the reference of a large problem takes as long.
PATIENCE = 300.0

# The part of the GPU's memory that several processes share, unless the user chose another one.
MEMORY = 0.9


def add_parser(commands: Any) -> None:
    """Adds the command `tune` and its arguments to the command line."""
    shapes = [shape.name for shape in (*NAMED_SHAPES, *VIT_SHAPES)]
    parser = commands.add_parser(
        "tune",
        help="search for the fastest config of each backend on this machine's GPU",
        description="Checks every config that a backend lists; times the configs whose results "
        "are right, interleaved, in bursts and sustained; and writes the fastest to a file after "
        "every problem. If the command ended early, the same command resumes the search. "
        "PATCH_EMBED_TUNED=FILE makes patch_embed use the configs in FILE.",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=shapes,
        metavar="NAME",
        help="shapes to search, by the names that `info` lists (default: SigLIP, SigLIP2, Gemma 3)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=tiles.DTYPES, help="dtypes to search (default: all)"
    )
    parser.add_argument(
        "--images",
        nargs="+",
        type=int,
        metavar="N",
        help=f"numbers of images in a call (default: {' '.join(map(str, IMAGES))})",
    )
    parser.add_argument(
        "--sources",
        nargs="+",
        choices=SOURCES,
        help="inputs of the kernels: patches, or images that they cut themselves (default: both)",
    )
    parser.add_argument(
        "--backends", nargs="+", choices=list(BACKENDS), help="backends to search (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the .json file to write"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="start no new problem after this many seconds"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes that search at the same time: they compile in parallel and take turns on "
        "the GPU, whose memory they share (default: %(default)s)",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    out = arguments.out
    check_place(out, f"--out is {printable(out)}")
    if min(arguments.images or [1]) < 1:
        raise ValueError(f"--images is {min(arguments.images)}, expected 1 or more.")
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise ValueError(f"--seconds is {arguments.seconds:g}, expected more than 0.")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs is {arguments.jobs}, expected 1 or more.")
    with children(arguments.jobs) as searching:
        machine = machine_of(searching[0])
        if not machine.head["chip"]:
            raise ValueError(
                f"tune: JAX's device is {machine.device}, expected an NVIDIA GPU. Configs are "
                "compared by their times on a GPU."
            )
        results = stored_results(out, machine)
        chosen = ("shapes", "dtypes", "images", "sources", "backends")
        tasks = list(list_tasks(**{name: getattr(arguments, name) for name in chosen}))
        tune(tasks, searching, out, machine, results, seconds=arguments.seconds)
    return 0


@contextlib.contextmanager
def children(jobs: int) -> Iterator[list[Child]]:
    """Makes the processes that search; they start with their first task."""
    with contextlib.ExitStack() as stack:
        answer = search.answer
        if jobs > 1:
            share_memory(jobs)
            lock = stack.enter_context(tempfile.NamedTemporaryFile(prefix="pallas_patch_embed_"))
            ending.state.unfinished.add(lock.name)
            stack.callback(ending.state.unfinished.discard, lock.name)
            answer = functools.partial(search.answer, lock=lock.name)
        seconds = functools.partial(patience, jobs)
        yield [stack.enter_context(Child(answer, seconds)) for _ in range(jobs)]


def share_memory(jobs: int, default: float = MEMORY) -> None:
    """Lets JAX reserve an equal part of the GPU's memory for each process.

    Args:
      jobs: the number of processes.
      default: the part of the memory for all of them, unless the user chose another one.
    """
    whole = memory_fraction() or default
    current, deprecated = MEMORY_FRACTIONS
    # JAX refuses to start if both the current and the deprecated variable are set.
    os.environ.pop(deprecated, None)
    os.environ[current] = f"{whole / jobs:g}"


def patience(jobs: int, last: Any) -> float:
    """Returns the seconds in which a process must send the next message after `last`.

    While it waits for its turn, each of the others may hang until it is ended.
    """
    return PATIENCE * (jobs if last == search.WAITING else 1)


def list_tasks(
    *,
    shapes: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    images: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
) -> Iterator[tuple[str, Task]]:
    """Yields the tasks, each with a description. An argument of None means all values."""
    known = {shape.name: shape for shape in (*NAMED_SHAPES, *VIT_SHAPES)}
    chosen = [known[name] for name in shapes] if shapes else NAMED_SHAPES
    every = itertools.product(
        chosen, images or IMAGES, dtypes or tiles.DTYPES, sources or SOURCES, backends or BACKENDS
    )
    for shape, count, dtype, source, backend in every:
        if source == "images" and not has_images(shape):
            continue
        what = f"{backend}, {dtype}, {shape.name}, {count} images {SOURCES[source]}"
        yield what, Task(backend, problem_of(shape, count, dtype, source))


def is_naflex(shape: NamedShape) -> bool:
    return shape.name.startswith("NaFlex")


def has_images(shape: NamedShape) -> bool:
    """Returns whether a kernel may cut the images of a shape.

    No kernel cuts videos or adds a prefix, and NaFlex models are given patches.
    """
    return not (is_naflex(shape) or shape.prefix or shape.frames)


def problem_of(shape: NamedShape, images: int, dtype: str, source: str) -> Problem:
    """Returns the problem of a named shape. NaFlex models have a table for every image."""
    table = "positions of each image" if is_naflex(shape) else "positions"
    source = SOURCES[source]
    return CheckCase("", shape, dtype, "bfloat16", images, table=table, source=source).problem


def machine_of(child: Child) -> Machine:
    """Asks the child for the machine on which it runs."""
    try:
        (machine,) = child.ask(None, {})
    except ChildEndedError as error:
        raise ValueError(f"tune: JAX found no device that works: it {error}.") from None
    assert isinstance(machine, Machine)
    return machine


def stored_results(out: Path, machine: Machine) -> dict[str, SearchResult]:
    """Returns the results that are already in the file, by their keys.

    Raises:
      ValueError: the file is damaged, or was measured on another machine or with other versions.
    """
    if not out.exists():
        return {}
    found = stored.read(out)
    if found.head != machine.head:
        differ = [name for name in found.head if found.head[name] != machine.head[name]]
        pairs = (
            f"{name} {printable(found.head[name])} in the file, {machine.head[name]} here"
            for name in differ
        )
        raise ValueError(
            f"--out is {printable(out)}: it was measured in another environment "
            f"({'; '.join(pairs)}). Choose another file."
        )
    return dict(found.results)


def tune(
    tasks: Sequence[tuple[str, Task]],
    searching: Sequence[Child],
    out: Path,
    machine: Machine,
    results: dict[str, SearchResult],
    *,
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Searches the tasks that are not yet in `results`, and writes the file after every task.

    Args:
      tasks: descriptions and tasks.
      searching: the processes; each searches a different task.
      out: path of the file.
      machine: the machine on which the processes run.
      results: the results that are already in the file, by their keys; new results are added.
      seconds: time after which no new task starts; None for no limit.
      now: the clock.
    """
    end = None if seconds is None else now() + seconds
    ending.state.outcome = _outcome(results, out)
    left = collections.deque(item for item in tasks if item[1].key not in results)
    if len(left) < len(tasks):
        print(f"{len(tasks) - len(left)} of {len(tasks)} problems are already in {printable(out)}.")
    said: set[tuple[str, str]] = set()
    failed: list[str] = []
    recording = threading.Lock()

    def search_all(child: Child) -> None:
        try:
            while end is None or now() < end:
                with recording:
                    if not left:
                        return
                    name, task = left.popleft()
                found = search_one(task, child)
                with recording:
                    record(name, task, found)
        except BaseException:
            left.clear()  # The other threads end when their current tasks are done.
            raise

    def record(name: str, task: Task, found: SearchResult | Refusal | Failure) -> None:
        if isinstance(found, Failure):
            failed.append(name)
            print(f"{name}: {found.reason}", flush=True)
            return
        if isinstance(found, Refusal):
            if (task.backend, found.reason) not in said:
                print(f"{name}: {found.reason}", flush=True)
            said.add((task.backend, found.reason))
            return
        # Another search may have written to the same file in the meantime.
        results.update(stored_results(out, machine) | {found.key: found})
        stored.write(out, machine.head, results.values(), _outcome(results, out))
        print(f"{name}: {describe(found)}", flush=True)

    with ThreadPoolExecutor(len(searching)) as pool:
        for thread in [pool.submit(search_all, child) for child in searching]:
            thread.result()
    if failed:
        print(f"{len(failed)} problems failed. A later command tries them again.")
    if left:
        print(f"{seconds:g} s are over; {len(left)} problems are left. {RESUMES}")
    elif results:
        print(f"{len(results)} results are in {printable(out)}.")


RESUMES = "The same command resumes the search."


def _outcome(results: Mapping[str, SearchResult], out: Path) -> str:
    """Returns the result that the last line reports if a signal ends the command."""
    return f"{len(results)} results are in {printable(out)}. {RESUMES[:-1]}"


def search_one(task: Task, child: Child) -> SearchResult | Refusal | Failure:
    """Searches one task in the child, and returns what the child found.

    If the child ends while it tries a candidate, that candidate is refused, and the search is
    repeated without it. If the child ends twice at another step, the search has failed. One end is
    not enough, because CUPTI, which times the kernels, fails now and then.
    """
    ended: dict[str, str] = {}
    while True:
        step: Any = search.BEGINNING
        try:
            for message in child.ask(task, ended):
                if message != search.WAITING:
                    step = message
            return step
        except ChildEndedError as error:
            if step in ended:
                return Failure(f"it {error}, twice, during the {step}.")
            ended[step] = f"it {error}"


def describe(result: SearchResult) -> str:
    """Describes a result in one or several lines."""
    refused = "".join(f"\n  refused: {name}: {why}." for name, why in result.refused.items())
    if not result.times:
        return f"no config could be timed.{refused}"
    lines = []
    for name in search.finalists(result.times):
        times = result.times[name]
        numbers = (f"{times[regime]['milliseconds']:.4f} ms {regime}" for regime in times)
        lines.append(f"\n  {', '.join(numbers)}: {name}")
    none, one = "no config is faster than the heuristic's", "one config is faster"
    what = none if result.config is None else one
    if len(result.times) + len(result.refused) == 1:
        return f"the backend has a single config{''.join(lines)}"
    return f"{what} ({len(result.times)} were timed){''.join(lines)}{refused}"
