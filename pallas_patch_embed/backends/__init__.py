"""The list of backends, and the one choice among them: backend, source and config together.

Every backend may compute a call from patches, which XLA cuts from images first, or from the images
themselves. `ranked` lists these options, fastest first, and the first one is taken. An option's
time is the one in the user's file of measured configs, or else predicted (time_model.py).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from pallas_patch_embed.backends import cuda, stored, time_model, triton, xla
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.plan import Backend, Plan
from pallas_patch_embed.backends.stored import Stored
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import PatchGeometry, Problem

# The backends by name. Among equally fast ones the first is taken.
BACKENDS: dict[str, Backend] = {
    "mosaic_sm100": SM100,
    "mosaic_sm90": SM90,
    "cuda": cuda,
    "triton": triton,
    "xla": xla,
}


def backend_names() -> tuple[str, ...]:
    """Returns the names of the backends."""
    return tuple(BACKENDS)


class Row(NamedTuple):
    """One backend's answer: whether it serves, and why it cannot or why another is faster."""

    backend: str
    serves: bool
    reason: str


class LayerProgram(NamedTuple):
    """How an encoder computes one of its other layers.

    Attributes:
      layer: the layer and its shape, such as "attention [512, 196, 12, 64] bfloat16".
      program: the name of the program.
      text: the program's config, or why no faster program computes the layer.
    """

    layer: str
    program: str
    text: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.program}, {self.text}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of every backend to a problem on a target, the fastest first.

    Iterating over it yields its rows; `str` makes a table.

    Attributes:
      problem: the shapes and dtypes.
      target: where the program would run.
      rows: (backend, serves, reason) of each backend. The reason of a backend that serves is empty,
        unless another one is faster.
      configs: the config of each backend that serves (its tile sizes and pipeline depths), where
        the config comes from, and the time by which the backend is ranked; an empty string for a
        backend that does not serve.
      notes: files of measured configs that are ignored, and why; and what to pack instead, if the
        chip is slow in this dtype.
      cut: as in the call.
      layers: of an encoder, how its other layers are computed that this package has kernels for.
    """

    problem: Problem
    target: Target
    rows: tuple[Row, ...]
    configs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cut: str | None = None
    layers: tuple[LayerProgram, ...] = ()

    @property
    def chosen(self) -> str:
        """The backend that runs if the call names none; "none" if no backend serves."""
        return next((row.backend for row in self.rows if row.serves and not row.reason), "none")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        p = self.problem
        source = "" if p.geometry is None else _named(p.geometry)
        source += f" with cut={self.cut!r}" if self.cut else ""
        what = f"patches {list(p.patches)} {p.dtype}{source}, N = {p.N}, to {p.out_dtype}"
        width = max(len(row.backend) for row in self.rows)
        lines = []
        for row, config in zip(self.rows, self.configs):
            mark = "->" if row.backend == self.chosen else "  "
            serves = "serves" if row.serves else "no    "
            text = ", ".join(filter(None, (config, row.reason)))
            lines.append(f"{mark} {row.backend:{width}}  {serves}  {text}".rstrip())
        header = f"{what} on {self.target}"
        return "\n".join([header, *lines, *self.notes, *map(str, self.layers)])


def _named(geometry: PatchGeometry) -> str:
    """Describes the images from which patches are cut, and the rows in front of the patches."""
    what = "images" if geometry.frames is None else f"videos, {geometry.frames} frames per patch"
    return f" of uint8 {what}" + (f", {geometry.prefix} rows of prefix" if geometry.prefix else "")


class Option(NamedTuple):
    """A way to compute a call.

    Attributes:
      backend: name of the backend.
      problem: the problem that the kernel is given: images that it cuts itself, or patches.
      plan: the backend's plan for it.
      origin: description of where the plan's config comes from; empty without a config.
      microseconds: the time by which the option is ranked; None if there is nothing to rank.
      measured: whether the time was measured. Otherwise it is predicted.
    """

    backend: str
    problem: Problem
    plan: Plan
    origin: str
    microseconds: float | None
    measured: bool

    @property
    def config(self) -> str:
        """The description of the plan's config."""
        return self.plan.config

    @property
    def cuts_images(self) -> bool:
        """Whether the kernel cuts the images itself."""
        return self.problem.images is not None

    @property
    def time(self) -> str:
        """The time in words; empty if there is none."""
        if self.microseconds is None:
            return ""
        time = self.microseconds
        text = f"{time:.0f}" if time >= 1000 else f"{time:.3g}"
        return f"{text} us {'measured' if self.measured else 'predicted'}"

    def __str__(self) -> str:
        cuts = "cuts images itself" if self.cuts_images else ""
        return ", ".join(filter(None, (self.config, cuts, self.origin, self.time)))


class Ranking(NamedTuple):
    """The options that serve a call, fastest first, and why the other backends do not serve."""

    options: tuple[Option, ...]
    refusals: dict[str, str]


def ranked(
    problem: Problem,
    target: Target,
    *,
    backend: str | None = None,
    cut: str | None = None,
    tuned: str | None = None,
) -> Ranking:
    """Ranks the ways to compute a call.

    Args:
      problem: shapes and dtypes on one device.
      target: where the program runs.
      backend: the only backend to ask; None for all of them.
      cut: "kernel" if a kernel must cut the images; None if XLA may cut them.
      tuned: path of the user's file of measured configs; None for the file that the environment
        variable names, if any.

    Raises:
      ValueError: a file of measured configs is damaged, or the user's file is missing.
    """
    options, refusals = [], {}
    files = stored.applicable(target, tuned)
    for name in BACKENDS if backend is None else (backend,):
        found: list[Option] = []
        reasons: list[str] = []
        for given in _sources(problem, target, cut):
            try:
                found.append(_option(name, given, problem, target, files))
            except NotImplementedError as error:
                reasons.append(str(error))
        options += found
        if not found:
            refusals[name] = reasons[0] if reasons else ONLY_XLA_CUTS
    # The sort is stable: options without a time come last, in the order of BACKENDS.
    options.sort(key=lambda x: math.inf if x.microseconds is None else x.microseconds)
    return Ranking(tuple(options), refusals)


ONLY_XLA_CUTS = "a kernel cuts only images of 3 channels itself, no videos, and adds no prefix."


def _sources(problem: Problem, target: Target, cut: str | None) -> Iterator[Problem]:
    """Yields what a kernel may be given for a call: patches that XLA has cut, or whole images.

    If the chip is not known, XLA cuts the images unless the user asks for a kernel, because not
    every kernel that may run can cut them.
    """
    if problem.images is None:
        yield problem
        return
    if cut is None:
        yield problem.of_patches
    assert problem.geometry is not None  # Images have a geometry.
    _, frames, prefix = problem.geometry
    plain = frames is None and prefix == 0 and problem.images[-1] == 3
    if plain and (cut == "kernel" or target.known):
        yield problem


def _option(
    name: str, given: Problem, problem: Problem, target: Target, files: tuple[Stored, ...]
) -> Option:
    """Returns a backend's option for what its kernel is given, which is part of a problem.

    Raises:
      NotImplementedError: the backend cannot compute it; the message is the reason.
    """
    if name != "xla" and problem.is_symbolic:
        raise NotImplementedError(
            "its kernels need known sizes, but this program has symbolic dimensions."
        )
    plan, origin, measured = _plan(name, given, target, files)
    time = plan.microseconds if measured is None else measured
    if time is not None and target.chip is not None and given != problem:
        known = target.chip.is_listed
        time = time + time_model.patchify(problem, target.chip) if known else None
    return Option(name, given, plan, origin, time, measured is not None)


def _plan(
    name: str, problem: Problem, target: Target, files: tuple[Stored, ...]
) -> tuple[Plan, str, float | None]:
    """Returns a plan with the measured config, or else the heuristic's; its origin; its time.

    The time is in microseconds, and None if the user's file has none for this config.
    """
    backend, found = BACKENDS[name], stored.find(name, problem, files)
    origin = found.origin
    if found.config is not None and found.path is not None:
        try:
            config = backend.config_of(found.config)
            plan = backend.plan(problem, target, config=config)
            return plan, origin, found.times.get(plan.config)
        except ValueError as error:
            raise ValueError(stored.damaged(found.path, str(error))) from None
        except NotImplementedError as error:
            # For example, the config is a tuning that must be compiled, and nvcc is missing.
            path = printable(found.path)
            origin = f"{stored.HEURISTIC}, because the config of {path} is refused: {error}"
    plan = backend.plan(problem, target)
    return plan, origin if plan.config else "", found.times.get(plan.config)


def explain(
    problem: Problem, target: Target, tuned: str | None = None, cut: str | None = None
) -> Explanation:
    """Collects the answer of every backend; the arguments are those of `ranked`."""
    ranking = ranked(problem, target, cut=cut, tuned=tuned)
    best: dict[str, Option] = {}
    for option in ranking.options:
        best.setdefault(option.backend, option)
    first = next(iter(best.values()), None)
    rows = [
        Row(name, True, "" if option is first or first is None else f"{first.backend} is faster.")
        for name, option in best.items()
    ]
    rows += [Row(name, False, reason) for name, reason in ranking.refusals.items()]
    configs = [*map(str, best.values()), *[""] * len(ranking.refusals)]
    notes = filter(None, (*stored.ignored(target, tuned), slow_dtype(problem, target)))
    return Explanation(problem, target, tuple(rows), tuple(configs), tuple(notes), cut)


def slow_dtype(problem: Problem, target: Target) -> str:
    """Says what to pack instead, if the target is slow in this dtype; returns "" if it is not."""
    chip = target.chip
    if chip is None or not target.known or not chip.is_slow(problem.dtype):
        return ""
    slow, fast = chip.rate(problem.dtype), chip.rate("bfloat16")
    return (
        f"{problem.dtype} is slow on {target}: a multiprocessor adds up {slow} products per cycle, "
        f"and {fast} in bfloat16. Use bfloat16, which is nearly as exact, or float8_e4m3fn, which "
        "is less exact: dtype= of `pack`, or patch_dtype= of `load_encoder`."
    )


def check_name(name: str | None) -> None:
    """Raises ValueError if `name` is neither the name of a backend nor None."""
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"patch_embed: backend is {name!r}, expected one of {', '.join(BACKENDS)}, or None for "
            "the best backend that serves the call."
        )


def choose(
    problem: Problem,
    target: Target,
    name: str | None,
    tuned: str | None = None,
    cut: str | None = None,
) -> Option:
    """Chooses how a call is computed: the fastest option.

    Args:
      problem: shapes and dtypes on one device.
      target: where the program runs. If it is not known, XLA is chosen, because only XLA runs
        everywhere. A backend that the user chose by name is used nevertheless.
      name: the user's choice, or None for the fastest backend that serves.
      tuned, cut: as for `ranked`.

    Raises:
      NotImplementedError: the backend that the user chose cannot serve, or none can; the message
        says why.
      ValueError: a file of measured configs is damaged, or the user's file is missing.
    """
    if name is None and not target.known:
        name = "xla"
    options, refusals = ranked(problem, target, backend=name, cut=cut, tuned=tuned)
    if options:
        return options[0]
    advice = "Leave cut=None to let XLA cut the images."
    if name is None:
        reasons = " ".join(f"{backend}: {reason}" for backend, reason in refusals.items())
        raise NotImplementedError(
            f"patch_embed: no backend serves this call with cut={cut!r} on {target}. {reasons} "
            f"{advice}"
        )
    if cut is None:
        advice = "Leave backend=None to use the best backend that serves."
    raise NotImplementedError(
        f"patch_embed: backend {name!r} cannot serve this call: {refusals[name]} {advice}"
    )
