"""Fits the constants of the predicted times by which backends are ranked, and prints the errors.

  python -m benchmarks.time_model               prints docs/predictions.md
  python -m benchmarks.time_model --fit         prints constants for backends/time_model.py
  python -m benchmarks.time_model --left-out    prints what the choice loses for shapes left out

No GPU is needed. The fit minimises what the choice of the smallest prediction loses on the recorded
times (benchmarks/recorded.py), and the error of the predictions. It begins with the constants that
the package has, and may be repeated. For problems without a record it prefers the options of
`earlier`, which a list of rules chose before times were predicted.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]

from benchmarks import recorded
from benchmarks.recorded import Compared, Option, problem_of
from pallas_patch_embed.backends import (
    BACKENDS,
    choose,
    cuda,
    ranked,
    stored,
    tiles,
    time_model,
    triton,
    xla,
)
from pallas_patch_embed.backends.time_model import Constants, Work
from pallas_patch_embed.base.chips import B200, B300, CHIPS, Chip, Target
from pallas_patch_embed.base.problem import NAMED_SHAPES, VIT_SHAPES, Problem
from pallas_patch_embed.commands.tune.command import has_images

MODELS = {
    "cuda": time_model.CUDA_SM90,
    "mosaic_sm90": time_model.MOSAIC_SM90,
    "triton": time_model.TRITON,
    "xla": time_model.XLA,
}
CONSTANTS = [field.name for field in dataclasses.fields(Constants)]
TERMS = [field.name for field in dataclasses.fields(Work)]
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")

# Constants that are not fitted: `loads` and `pixels` are rates that were measured by themselves
# (docs/experiments/cuda.md), and `store` comes from a trace (docs/experiments/hopper.md).
PHYSICAL = {*((name, "loads") for name in MODELS), ("cuda", "pixels")}
PHYSICAL |= {("cuda", "store"), ("mosaic_sm90", "store")}
START = np.array([[getattr(model, name) for name in CONSTANTS] for model in MODELS.values()])
FREE = np.array(
    [
        [
            value not in (0, 1) and (model, name) not in PHYSICAL
            for name, value in zip(CONSTANTS, values)
        ]
        for model, values in zip(MODELS, START)
    ]
)
PATCHIFY = np.array([time_model.PATCHIFY_LAUNCH, time_model.PATCHIFY_MEMORY])

OPTIONS: tuple[Option, ...] = (
    *((name, False) for name in MODELS),
    ("cuda", True),
    ("triton", True),
)
MODEL_OF = np.array([list(MODELS).index(name) for name, _ in OPTIONS])

# What the search minimises is the mean loss, plus LARGE times what losses exceed ACCEPTED by, plus
# ERROR times the mean error, plus CHANGED times the part of the problems without a record for which
# another option than the earlier one is chosen.
ACCEPTED, LARGE, ERROR, CHANGED = 0.03, 0.5, 0.1, 0.05
STEPS = 6000
IMAGES = (1, 8, 64, 512, 4736)


class Data(NamedTuple):
    """The problems of a fit.

    Attributes:
      work: [problems, options, terms], the work of the options.
      cuts: [problems, options, 2], factors of the two constants of XLA's patchify.
      microseconds: [problems, options], the times; NaN for options that were not measured.
      serves: [problems, options], whether the option can compute the problem.
      loss: [problems, options], what the choice of an option loses, as a part of the least time;
        NaN if it is not known. For a problem without a record it is 1 for an option that is not the
        earlier one.
      dtype: [problems], index of the dtype.
    """

    work: np.ndarray
    cuts: np.ndarray
    microseconds: np.ndarray
    serves: np.ndarray
    loss: np.ndarray
    dtype: np.ndarray

    def only(self, chosen: np.ndarray) -> "Data":
        return Data(*(x[chosen] for x in self))


def work_of(name: str, problem: Problem, chip: Chip) -> Work:
    """Returns the work of a backend's plan.

    Raises:
      NotImplementedError: the backend does not serve the problem.
    """
    target = Target("cuda", chip)
    if name == "xla":
        return xla.work(problem, chip)
    found = stored.find(name, problem, stored.applicable(target))
    if found.config is not None:
        return BACKENDS[name].config_of(found.config).work(problem, chip)
    config, *_ = BACKENDS[name].candidates(problem, target)
    return config.work(problem, chip)


def measured(found: Sequence[Compared]) -> Data:
    """Returns the data of recorded comparisons."""
    times = np.array([[c.microseconds.get(x, np.nan) for x in OPTIONS] for c in found])
    loss = times / np.nanmin(times, axis=1, keepdims=True) - 1
    serves = np.ones(times.shape, bool)
    work, cuts = _work([(c.problem, c.chip) for c in found], serves)
    dtype = np.array([DTYPES.index(c.problem.dtype) for c in found])
    return Data(work, cuts, times, serves, loss, dtype)


def unmeasured(known: Sequence[Compared]) -> Data:
    """Returns the data of named problems that were never measured."""
    seen = {(c.chip.capability, c.problem) for c in known}
    asked, kept = [], []
    every = itertools.product(CHIPS, (*NAMED_SHAPES, *VIT_SHAPES), IMAGES, DTYPES)
    for (chip, shape, images, dtype), source in itertools.product(every, ("patches", "images")):
        if chip.capability[0] == 10 or (source == "images" and not has_images(shape)):
            continue
        problem = problem_of(shape.name, images, dtype, source)
        if (chip.capability, problem) not in seen:
            asked.append((problem, chip))
            kept.append(earlier(problem, chip))
    serves = np.ones((len(asked), len(OPTIONS)), bool)
    work, cuts = _work(asked, serves)
    loss = np.array([[float(option != own) for option in OPTIONS] for own in kept])
    dtype = np.array([DTYPES.index(problem.dtype) for problem, _ in asked])
    return Data(work, cuts, np.full(loss.shape, np.nan), serves, loss, dtype)


def _work(
    asked: Sequence[tuple[Problem, Chip]], serves: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `Data.work` and `Data.cuts`; clears `serves` for an option that does not serve."""
    work = np.zeros((*serves.shape, len(TERMS)))
    cuts = np.zeros((*serves.shape, 2))
    for (i, (problem, chip)), (j, (name, cutting)) in itertools.product(
        enumerate(asked), enumerate(OPTIONS)
    ):
        if not serves[i, j]:
            continue
        try:
            if cutting and problem.images is None:
                raise NotImplementedError("There are no images.")
            found = work_of(name, problem if cutting else problem.of_patches, chip)
        except NotImplementedError:
            serves[i, j] = False
            continue
        work[i, j] = dataclasses.astuple(found)
        if problem.images is not None and not cutting:
            moved = time_model.patchify(problem, chip) - PATCHIFY[0]
            cuts[i, j] = 1, moved / PATCHIFY[1]
    return work, cuts


def earlier(problem: Problem, chip: Chip) -> Option:
    """Returns the option that was chosen by rules, before times were predicted."""
    chunks, rows, size = tiles.chunks(problem), problem.rows, 1 + (problem.dtype == "bfloat16")
    from_images = problem.images is not None
    xla_splits = (chunks >= 24 and rows <= 6 * chunks * size) or (
        chunks >= 48 and rows <= 11 * chunks * size
    )
    if chip.capability[0] != 9:
        few = chunks >= 48 and rows <= 128 * chunks * size
        return ("xla", False) if xla_splits or few else ("triton", from_images)
    if from_images and problem.dtype == "int8":
        try:
            work_of("cuda", problem, chip)
            return "cuda", True
        except NotImplementedError:
            pass
    if rows <= 256 and 24 <= chunks <= 96 and problem.N <= 1024:
        return "cuda", False
    if xla_splits:
        return "xla", False
    if chunks >= 24 and rows <= 1024:
        return ("mosaic_sm90" if from_images else "triton"), False
    narrow = size == 1 and problem.N % 192 and rows > 8192
    return ("cuda" if from_images or (chunks < 24 and not narrow) else "mosaic_sm90"), False


def predictions(values: jax.Array, data: Data) -> jax.Array:
    """Returns the predicted microseconds [problems, options]; `values` are those of `fit`."""
    table = jnp.array(START).at[FREE].set(jnp.exp(values[:-2]))
    c = {name: table[:, i][MODEL_OF] for i, name in enumerate(CONSTANTS)}
    of = {name: data.work[:, :, i] for i, name in enumerate(TERMS)}
    products = jnp.stack([c["bfloat16"], c["int8"], c["float8"]])[data.dtype]
    longest = [
        c["memory"] * of["moved"],
        products * (1 + (c["streamed"] - 1) * of["streamed"]) * of["products"],
        c["loads"] * of["loads"],
        c["pixels"] * of["pixels"],
    ]
    sums = ("start", "start"), ("tile", "tiles"), ("wait", "waits"), ("store", "stored")
    total = sum(
        c[name] * of[term]
        for name, term in (*sums, ("exchange", "exchanges"), ("encode", "encoded"))
    )
    patchify = data.cuts @ jnp.exp(values[-2:])
    return c["launch"] + total + jnp.max(jnp.stack(longest), axis=0) + patchify


def fit(data: Data, others: Data) -> np.ndarray:
    """Returns the logarithms of the fitted constants, and then of the two of XLA's patchify.

    The least error is found by its gradient. Then random steps reduce what the choice loses.

    Args:
      data: problems with records.
      others: problems without a record.
    """
    start = np.log(np.concatenate([START[FREE], PATCHIFY]))
    timed = ~np.isnan(data.microseconds)
    times = np.log(np.where(timed, data.microseconds, 1))

    def error(values: jax.Array, predicted: jax.Array) -> jax.Array:
        off = jnp.where(timed, jnp.log(predicted) - times, 0)
        return (jnp.sqrt(off**2 + 0.05**2) - 0.05).sum() / timed.sum()

    gradient = jax.jit(jax.value_and_grad(lambda x: error(x, predictions(x, data))))
    values = minimize(
        lambda x: tuple(map(np.asarray, gradient(x))),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(x - 0.5, x + 0.5) for x in start],
    ).x
    both = jax.jit(lambda x: (predictions(x, data), predictions(x, others)))

    def loss(values: np.ndarray) -> float:
        predicted, of_others = map(np.asarray, both(values))
        lost = chosen_loss(predicted, data, timed)
        changed = chosen_loss(of_others, others, others.serves)
        large = np.maximum(lost - ACCEPTED, 0)
        off = float(error(values, predicted))
        return lost.mean() + LARGE * large.mean() + ERROR * off + CHANGED * changed.mean()

    generator = np.random.default_rng(0)
    least = loss(values)
    for _ in range(STEPS):
        step = np.zeros(len(values))
        moved = generator.choice(len(values), generator.integers(1, 4), replace=False)
        step[moved] = generator.normal(0, generator.choice([0.02, 0.06, 0.15]), len(moved))
        if (found := loss(values + step)) < least:
            values, least = values + step, found
    return values


def chosen_loss(predicted: np.ndarray, data: Data, among: np.ndarray) -> np.ndarray:
    """Returns what the choice of the smallest prediction loses, for each problem.

    `among` are the options [problems, options] that can be chosen. The result is NaN if the time of
    the chosen one is not known.
    """
    choice = np.where(among, predicted, np.inf).argmin(1)
    return data.loss[np.arange(len(choice)), choice]


def left_out(found: Sequence[Compared]) -> np.ndarray:
    """Returns what the choice loses with constants fitted without the records of a shape."""
    data, others = measured(found), unmeasured(found)
    shapes = [c.shape for c in found]
    answers = np.empty(len(found))
    for shape in set(shapes):
        own = np.array([x == shape for x in shapes])
        own_data = data.only(own)
        values = fit(data.only(~own), others)
        predicted = np.asarray(predictions(values, own_data))
        answers[own] = chosen_loss(predicted, own_data, own_data.serves)
    return answers


def bursts() -> list[Compared]:
    """Returns the recorded bursts on all chips, to which the constants are fitted."""
    every = itertools.chain(*map(recorded.times_on, recorded.CHIPS.values()))
    return [c for c in every if c.regime == "burst"]


def fitted() -> str:
    """Returns the fitted constants as Python."""
    found = bursts()
    values = np.exp(fit(measured(found), unmeasured(found)))
    table = START.copy()
    table[FREE] = values[:-2]
    lines = []
    for name, row in zip(MODELS, table):
        fields = ", ".join(f"{c}={float(f'{x:.3g}')}" for c, x in zip(CONSTANTS, row) if x)
        lines.append(f"{name}: Constants({fields})")
    patchify = ", ".join(f"{x:.3g}" for x in values[-2:])
    return "\n".join([*lines, f"PATCHIFY_LAUNCH, PATCHIFY_MEMORY = {patchify}"])


def losses(found: Sequence[Compared], lost: np.ndarray) -> list[str]:
    """Returns a row of a table for each chip, of problems for which several options were timed."""
    rows = []
    for chip in recorded.CHIPS.values():
        own = np.array([c.chip == chip and len(c.microseconds) > 1 for c in found])
        x = lost[own & ~np.isnan(lost)]
        part = f"{100 * np.mean(x <= ACCEPTED):.1f}%"
        rows.append(row_of(chip.name, len(x), f"{1 + x.mean():.4f}", f"{1 + x.max():.3f}", part))
    return rows


def number(microseconds: float) -> str:
    """Formats microseconds with three digits."""
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def row_of(*cells: Any) -> str:
    """Formats a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    """Formats the first two lines of a Markdown table."""
    return [row_of(*cells), row_of(*["---"] * len(cells))]


def page() -> str:
    """Returns the text of docs/predictions.md."""
    found = bursts()
    data = measured(found)
    values = np.log(np.concatenate([START[FREE], PATCHIFY]))
    predicted = np.asarray(predictions(values, data))
    lines = [INTRODUCTION, *head("constant", *MODELS)]
    for name, row in zip(CONSTANTS, START.T):
        lines.append(row_of(name, *(f"{x:g}" if x else "" for x in row)))
    lines += ["", PATCHIFY_TEXT.format(*PATCHIFY), "", ERRORS, ""]
    lines += head("GPU", "option", "times", "mean error", "largest")
    off = predicted / data.microseconds - 1
    for chip, (j, (name, cuts)) in itertools.product(recorded.CHIPS.values(), enumerate(OPTIONS)):
        own = np.array([c.chip == chip for c in found]) & ~np.isnan(off[:, j])
        size = np.abs(off[own, j])
        what = f"{name}, images" if cuts else name
        errors = (f"{100 * size.mean():.1f}%", f"{100 * size.max():.1f}%")
        lines.append(row_of(chip.name, what, len(size), *errors))
    lines += ["", LOSSES, "", *head("GPU", "problems", "mean", "largest", "at most 1.03 in")]
    lines += losses(found, chosen_loss(predicted, data, data.serves))
    with mock.patch.object(triton, "missing", lambda: None):
        with mock.patch.object(cuda, "_check_driver", lambda: None):
            lines += ["", CHOICES, "", *choices()]
            lines += ["", BLACKWELL, "", *head("shape", "chip", "dtype", *map(str, COUNTS))]
            for shape, chip in itertools.product(NAMED_SHAPES, (B200, B300)):
                for dtype in tiles.DTYPES:
                    problems = (problem_of(shape.name, n, dtype, "patches") for n in COUNTS)
                    cells = (cell(problem, chip) for problem in problems)
                    lines.append(row_of(shape.name, chip.name[7:], dtype, *cells))
    return "\n".join(lines) + "\n"


def cell(problem: Problem, chip: Chip) -> str:
    """Formats the fastest option by its prediction, and the next one."""
    first, second, *_ = ranked(problem, Target("cuda", chip)).options
    names = (f"{x.backend} {number(x.microseconds or 0)}" for x in (first, second))
    return ", ".join(names)


def chosen_runs(shape: str, dtype: str, chip: Chip) -> str:
    """Names the backends that are chosen, each with the first and last count of images."""
    found: list[tuple[str, list[int]]] = []
    for count in CHOSEN_COUNTS:
        problem = problem_of(shape, count, dtype, "patches")
        name = choose(problem, Target("cuda", chip), None).backend
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].append(count)
    runs = (f"{name} {'-'.join(map(str, sorted({n[0], n[-1]})))}" for name, n in found)
    return ", ".join(runs)


def choices() -> list[str]:
    """Returns a table of the backends that are chosen on a B200 and a B300."""
    lines = head("chip", "dtype", "shapes", "backend, by images")
    for chip, dtype in itertools.product((B200, B300), tiles.DTYPES):
        shapes_of: dict[str, list[str]] = {}
        for shape in NAMED_SHAPES:
            text = chosen_runs(shape.name, dtype, chip)
            shapes_of.setdefault(text, []).append(shape.name)
        most = max(shapes_of.values(), key=len)
        for text, names in shapes_of.items():
            shapes = "all others" if names == most else ", ".join(names)
            lines.append(row_of(chip.name[7:], dtype, shapes, text))
    return lines


COUNTS = (1, 8, 64, 512, 4736)
CHOSEN_COUNTS = (*(2**i for i in range(13)), 4736)

INTRODUCTION = """\
# Predictions

These are predictions, not measurements. `python -m benchmarks.time_model` prints this page. The
backends are ranked by these predictions, unless a user's file of measured configs has their times.
`pallas_patch_embed/backends/time_model.py` has the formula and says what each constant means.
"""

PATCHIFY_TEXT = """\
If XLA cuts the images first, {} us are added, and {} times the time to read the images and to
write the patches at the memory's peak bandwidth."""

ERRORS = """\
## Errors

The table has the errors on the bursts in `benchmarks/h100` and `benchmarks/h200`. An error of all
options of a problem alike does not change the choice."""

LOSSES = """\
## What the choice loses

The time of the chosen option over that of the fastest one, for problems for which the times of
several options were measured in one run. `options.jsonl` has problems that were measured because
the predictions are close to each other. If the constants are fitted without the records of each
shape (`--left-out`, 2026-11-27), the mean is 1.001 on the H200, and at most 1.065; on the H100 it
is 1.013, and at most 1.72, which is one of the problems in `options.jsonl`."""

CHOICES = """\
## Which backend runs on a B200 or B300

The choice by these predictions, from patches, for every named shape with 1, 2, 4, ..., 4096 and
4736 images. It assumes that the CUDA library and Triton are installed. Where cuda runs and its
library is missing, the next backend of the table below runs."""

BLACKWELL = """\
## B200 and B300, from patches: predicted, us

Each cell has the backend that is chosen and the next one. The kernels for Blackwell are assumed to
cost what those for Hopper cost, except that the fixed cost of a tile is hidden, because results
wait in tensor memory. Clock, bandwidth and rates are those of the data sheets. The error on these
chips is unknown. Expect at least the error on an H200."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print fitted constants")
    parser.add_argument("--left-out", action="store_true", help="fit without each shape")
    args = parser.parse_args()
    if args.fit:
        print(fitted())
    elif args.left_out:
        found = bursts()
        print("\n".join(losses(found, left_out(found))))
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
