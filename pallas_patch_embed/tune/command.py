"""`pallas-patch-embed tune`: the search for many problems, which goes on where it was ended."""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_patch_embed import ending
from pallas_patch_embed.backends import BACKENDS, stored, tiles
from pallas_patch_embed.backends.plan import Refusal
from pallas_patch_embed.backends.stored import Result
from pallas_patch_embed.check.cases import Case
from pallas_patch_embed.child import Child, ChildEndedError
from pallas_patch_embed.embed.pictures import printable
from pallas_patch_embed.files import check_place
from pallas_patch_embed.problem import NAMED_SHAPES, VIT_SHAPES, NamedShape, Problem
from pallas_patch_embed.tune import search
from pallas_patch_embed.tune.search import Machine, Task

IMAGES = (1, 64, 512)

# What kernels read, and what `Case` calls it.
SOURCES = {"patches": "given as patches", "images": "cut by the kernel"}

# Without a GPU kernels are interpreted: one small problem shows that the search works.
SMALL = dict(
    shapes=["B/32 256"],
    dtypes=["int8"],
    images=[1],
    sources=["patches"],
    backends=["mosaic_sm90", "xla"],
)

# Seconds without a word of the child after which it hangs. nvcc takes half a minute for a kernel,
# and the reference of a large problem as long.
PATIENCE = 300.0


def add_parser(commands: Any) -> None:
    """Adds the command to those of the command line."""
    shapes = [shape.name for shape in (*NAMED_SHAPES, *VIT_SHAPES)]
    parser = commands.add_parser(
        "tune",
        help="search the fastest config of each backend on this machine's GPU",
        description="Checks every config that a backend lists, times those whose results are "
        "right, in turns, in a burst and sustained, and writes the fastest to a file after every "
        "problem. The same command goes on where it was ended. PATCH_EMBED_TUNED=FILE makes "
        "patch_embed use the configs in it.",
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes, metavar="NAME", help="names that `info` lists"
    )
    parser.add_argument("--dtypes", nargs="+", choices=tiles.DTYPES, help="(default: all)")
    parser.add_argument(
        "--images",
        nargs="+",
        type=int,
        metavar="N",
        help=f"images of a call (default: {' '.join(map(str, IMAGES))})",
    )
    parser.add_argument(
        "--sources",
        nargs="+",
        choices=SOURCES,
        help="what kernels read: patches, or images that they cut themselves (default: both)",
    )
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), help="(default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .json file")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="after these no new problem is begun"
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
    with Child(search.answer, lambda _: PATIENCE) as child:
        machine = where(child)
        results = begin(out, machine)
        chosen = {name: getattr(arguments, name) for name in SMALL}
        if not machine.head["chip"]:
            print(
                f"No NVIDIA GPU: this is {machine.device}. Kernels are interpreted. Their times "
                "say nothing about a GPU, and no GPU's config is chosen by them."
            )
            chosen = {name: given or SMALL[name] for name, given in chosen.items()}
        tasks = list(list_tasks(**chosen))
        tune(tasks, child, out, machine, results, seconds=arguments.seconds)
    return 0


def list_tasks(
    *,
    shapes: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    images: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
) -> Iterator[tuple[str, Task]]:
    """The tasks, each with its name; None stands for all."""
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
    """Whether kernels may cut its images: no videos, no rows in front, and not NaFlex's patches."""
    return not (is_naflex(shape) or shape.prefix or shape.frames)


def problem_of(shape: NamedShape, images: int, dtype: str, source: str) -> Problem:
    """The problem of a named shape; NaFlex has a table for every image."""
    table = "positions of each image" if is_naflex(shape) else "positions"
    source = SOURCES[source]
    return Case("", shape, dtype, "bfloat16", images, table=table, source=source).problem


def where(child: Child) -> Machine:
    """The machine that the child runs on."""
    try:
        (machine,) = child.ask(None, {})
    except ChildEndedError as error:
        raise ValueError(f"tune: JAX finds no device that works: it {error}.") from None
    assert isinstance(machine, Machine)
    return machine


def begin(out: Path, machine: Machine) -> dict[str, Result]:
    """The results that are in the file already.

    Raises:
      ValueError: it is damaged, or was measured elsewhere or with other versions.
    """
    if not out.exists():
        return {}
    found = stored.read(out)
    if found.head != machine.head:
        differ = [name for name in found.head if found.head[name] != machine.head[name]]
        pairs = (f"{name} {found.head[name]} there, {machine.head[name]} here" for name in differ)
        raise ValueError(
            f"--out is {printable(out)}: it was measured elsewhere ({'; '.join(pairs)}). Choose "
            "another file."
        )
    return dict(found.results)


def tune(
    tasks: Sequence[tuple[str, Task]],
    child: Child,
    out: Path,
    machine: Machine,
    results: dict[str, Result],
    *,
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Searches what is not in `results` yet, and writes the file after every problem.

    Args:
      tasks: names and tasks.
      child: the process that searches.
      out: the file.
      machine: where the child runs.
      results: those that are in the file, by their keys; new ones are added.
      seconds: no task begins later than this; None for no limit.
      now: the clock.
    """
    end = None if seconds is None else now() + seconds
    ending.state.outcome = _outcome(results, out)
    left = [(name, task) for name, task in tasks if _key(task) not in results]
    if len(left) < len(tasks):
        print(f"{len(tasks) - len(left)} of {len(tasks)} problems are in {printable(out)} already.")
    said: set[tuple[str, str]] = set()
    for number, (name, task) in enumerate(left):
        if end is not None and now() >= end:
            print(f"{seconds:g} s are over; {len(left) - number} problems are left. {GOES_ON}")
            return
        found = one(task, child)
        if isinstance(found, Refusal):
            if (task.backend, found.reason) not in said:
                print(f"{name}: {found.reason}", flush=True)
            said.add((task.backend, found.reason))
            continue
        # Another search may have written the same file meanwhile.
        results |= begin(out, machine) | {found.key: found}
        stored.write(out, machine.head, results.values(), _outcome(results, out))
        print(f"{name}: {describe(found)}", flush=True)
    if results:
        print(f"{len(results)} results are in {printable(out)}.")


GOES_ON = "The same command goes on."


def _outcome(results: Mapping[str, Result], out: Path) -> str:
    """What the last line says if a signal ends the command."""
    return f"{len(results)} results are in {printable(out)}. {GOES_ON[:-1]}"


def _key(task: Task) -> str:
    return stored.key_of(task.backend, stored.describe_problem(task.problem))


def one(task: Task, child: Child) -> Result | Refusal:
    """What the child finds. Candidates that end it are refused; its beginning may end it once."""
    refused: dict[str, str] = {}
    while True:
        tried = search.BEGINNING
        try:
            *_, found = (tried := message for message in child.ask(task, refused))
            return found
        except ChildEndedError as error:
            if tried in refused:
                return Refusal(f"it {error}.")
            refused[tried] = f"it {error}"


def describe(result: Result) -> str:
    """Lines about a result."""
    refused = "".join(f"\n  refused: {name}: {why}." for name, why in result.refused.items())
    if not result.times:
        return f"nothing could be timed.{refused}"
    lines = []
    for name in search.finalists(result.times):
        times = result.times[name]
        numbers = (f"{times[regime]['milliseconds']:.4f} ms {regime}" for regime in times)
        lines.append(f"\n  {', '.join(numbers)}: {name}")
    what = "nothing is faster than the heuristic's" if result.config is None else "a faster config"
    if len(result.times) + len(result.refused) == 1:
        return f"it has one config{''.join(lines)}"
    return f"{what}, of {len(result.times)}{''.join(lines)}{refused}"
