"""The recorded times of this package's backends, by problem, and what the choice among them loses.

  python -m benchmarks.recorded

It prints, for each chip, the time of the chosen option over that of the fastest recorded one.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import decisions, results
from pallas_patch_embed.backends import BACKENDS, cuda, ranked, stored, triton
from pallas_patch_embed.base.chips import H100, H200, Chip, Target
from pallas_patch_embed.base.problem import PatchGeometry, Problem, named_shape
from pallas_patch_embed.commands.check.cases import CheckCase
from pallas_patch_embed.commands.tune.command import is_naflex

FOLDER = Path(__file__).parent
CHIPS = {"h100": H100, "h200": H200}
FILES = (
    "results",
    "results_2026-11-23",
    "small",
    "small_2026-11-23",
    "photographs_2026-11-23",
    "images",
    "image_shapes",
    "few_images",
    "options",
)

# An option: name of the backend, and whether its kernel cuts the images.
type Option = tuple[str, bool]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The times of several options for one problem, measured in one run.

    Attributes:
      chip: the GPU.
      file: name of the file of records.
      regime: one of `results.REGIMES`.
      problem: shapes and dtypes.
      microseconds: the times of the options.
    """

    chip: Chip
    file: str
    regime: str
    problem: Problem
    microseconds: dict[Option, float]

    @property
    def shape(self) -> tuple[int, int, int | None]:
        """K, N and the positions of an image, or None for a table with a row for every patch."""
        problem = self.problem
        own = problem.table_period == problem.rows and len(problem.table) > 2
        return problem.K, problem.N, None if own else problem.table_period


def option_of(contender: str, source: str, beside: Container[str]) -> Option | None:
    """Returns the option that a contender of the benchmarks is; None for a peer.

    Args:
      contender, source: the contender, and whether it starts from patches or from images.
      beside: the contenders of the same case.
    """
    name = contender.removeprefix("patchify + ").removesuffix(", cut by the kernel")
    if name not in BACKENDS:
        return None
    if source == "patches" or name != contender:
        return name, contender.endswith(", cut by the kernel")
    # A backend's name alone means the way that it chose. If its other way was measured too, that
    # one's name says which it is. Without another way triton cut the images, and others did not.
    if f"{name}, cut by the kernel" in beside:
        return name, False
    return name, name == "triton" or f"patchify + {name}" in beside


def problem_of(shape: str, images: int, dtype: str, source: str) -> Problem:
    """Returns the problem of a record."""
    named = named_shape(shape)
    case = CheckCase("", named, dtype, "bfloat16", images)
    if is_naflex(named):
        case = dataclasses.replace(case, table="positions of each image")
    if source == "images":
        case = dataclasses.replace(case, source="given whole")
    return case.problem


def of_files(chip: Chip, folder: Path) -> Iterator[Compared]:
    """Yields the comparisons in the files of records for a chip, the newest run of each problem."""
    for name in FILES:
        path = folder / f"{name}.jsonl"
        found: dict[tuple[Any, ...], dict[str, float]] = {}
        number, superseded = 0, False
        for record in results.read(path) if path.exists() else ():
            if record["kind"] == "run":
                number, superseded = number + 1, "superseded" in record
            if record["kind"] != "time" or superseded:
                continue
            fields = (record[x] for x in ("regime", "source", "shape", "images", "dtype"))
            key = (*fields, record.get("pixels"), number)
            found.setdefault(key, {})[record["contender"]] = 1e3 * record["milliseconds"]
        newest = {key[:-1]: (key, times) for key, times in found.items()}
        for (regime, source, *problem, _, _), times in newest.values():
            shape, images, dtype = problem
            options = {
                option: time
                for contender, time in times.items()
                if (option := option_of(contender, source, times))
            }
            if options:
                own = problem_of(shape, images, dtype, source)
                yield Compared(chip, name, regime, own, options)


def of_searches(chip: Chip) -> Iterator[Compared]:
    """Yields the comparisons among results of `tune` of one day, with the config that was kept."""
    found: dict[str, tuple[Problem, str, dict[Option, float]]] = {}
    for result in stored.read(decisions.results_of(chip)).results.values():
        own = result.problem
        geometry, images, rows = None, None, own["rows"]
        period = own["period"]
        # NaFlex models have 256 patches an image, and a table for each image.
        S = 256 if own["images"] is None and period == rows > 4096 else period
        if own["images"]:
            side = next(x for x in (14, 16, 32) if (own["images"][0] // x) ** 2 == period)
            geometry, images = PatchGeometry(side), (rows // S, *own["images"])
        problem = Problem(
            patches=(rows // S, S, own["K"]),
            weight=(own["N"], own["K"]),
            scale=(own["N"],),
            table=(rows // S, S, own["N"]) if period == rows > S else (S, own["N"]),
            dtype=own["dtype"],
            table_dtype="bfloat16",
            out_dtype=own["out_dtype"],
            geometry=geometry,
            images=images,
        )
        backend = BACKENDS[result.backend]
        option = (result.backend, images is not None)
        kept = None if result.config is None else str(backend.config_of(result.config))
        for regime in ("burst", "sustained"):
            times = {name: x[regime] for name, x in result.times.items() if regime in x}
            if time := times.get(kept or next(iter(result.times), "")):
                key = json.dumps([regime, result.date, own], sort_keys=True)
                _, _, options = found.setdefault(key, (problem, regime, {}))
                options[option] = 1e3 * time["milliseconds"]
    for problem, regime, options in found.values():
        yield Compared(chip, "tuned", regime, problem, options)


@functools.cache
def times_on(chip: Chip) -> tuple[Compared, ...]:
    """Returns all recorded times on a chip, also of problems with the time of one option."""
    folder = next(FOLDER / name for name, known in CHIPS.items() if known == chip)
    return (*of_files(chip, folder), *of_searches(chip))


def comparisons(chip: Chip) -> list[Compared]:
    """Returns the problems for which several options were timed on a chip."""
    return [found for found in times_on(chip) if len(found.microseconds) > 1]


def chosen(compared: Compared) -> Option:
    """Returns the option that is chosen on the chip, if all packages are installed."""
    with mock.patch.object(triton, "missing", lambda: None):
        with mock.patch.object(cuda, "_check_driver", lambda: None):
            best = ranked(compared.problem, Target("cuda", compared.chip)).options[0]
    return best.backend, best.cuts_images


def regret(
    found: Iterable[Compared], choice: Callable[[Compared], Option] = chosen
) -> list[tuple[Compared, float]]:
    """Returns the chosen option's time over that of the fastest, where the option was timed."""
    lost = []
    for compared in found:
        times = compared.microseconds
        if (option := choice(compared)) in times:
            lost.append((compared, times[option] / min(times.values())))
    return lost


def main() -> None:
    for name, chip in CHIPS.items():
        found = comparisons(chip)
        lost = sorted(regret(found), key=lambda x: -x[1])
        values = np.array([value for _, value in lost])
        print(
            f"{name}: {len(values)} of {len(found)} problems, mean {values.mean():.4f}, largest "
            f"{values.max():.3f}, at most 1.03 in {100 * np.mean(values <= 1.03):.1f}%"
        )
        for compared, value in lost[:10]:
            p = compared.problem
            times = {
                f"{backend}{' cuts' * cuts}": round(time, 2)
                for (backend, cuts), time in compared.microseconds.items()
            }
            what = f"{p.dtype}, {p.rows} x {p.K} x {p.N}"
            print(f"  {value:.3f} {compared.file}, {compared.regime}, {what}: {times}")


if __name__ == "__main__":
    main()
