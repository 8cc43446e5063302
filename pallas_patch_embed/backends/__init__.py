"""The list of backends, and the choice of a backend and a plan for a call."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from pallas_patch_embed.backends import cuda, stored, triton, xla
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.plan import Backend, Plan, Refusal
from pallas_patch_embed.backends.preferences import preferred_alternatives, preferred_cut
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import PatchLayout, Problem

# The backends by name, in the order in which they are tried.
BACKENDS: dict[str, Backend] = {
    "mosaic_sm100": SM100,
    "mosaic_sm90": SM90,
    "cuda": cuda,
    "triton": triton,
    "xla": xla,
}


def backend_names() -> tuple[str, ...]:
    """Returns the names of the backends, in the order in which they are tried."""
    return tuple(BACKENDS)


class Row(NamedTuple):
    """One backend's answer: whether it serves, and why it cannot or why another is faster."""

    backend: str
    serves: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of every backend to a problem on a target, in the order in which they are tried.

    Iterating over it yields its rows; `str` makes a table.

    Attributes:
      problem: the shapes and dtypes.
      target: where the program would run.
      rows: (backend, serves, reason) of each backend. The reason of a backend that serves is empty,
        unless another one is faster.
      configs: the config of each backend that serves (its tile sizes and pipeline depths), and
        where the config comes from; an empty string for a backend that does not serve.
      notes: files of measured configs that are ignored, and why.
    """

    problem: Problem
    target: Target
    rows: tuple[Row, ...]
    configs: tuple[str, ...]
    notes: tuple[str, ...] = ()

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
        source = "" if p.layout is None else _named(p.layout)
        source += f" with cut={p.cut!r}" if p.cut else ""
        what = f"patches {list(p.patches)} {p.dtype}{source}, N = {p.N}, to {p.out_dtype}"
        width = max(len(row.backend) for row in self.rows)
        lines = []
        for row, config in zip(self.rows, self.configs):
            mark = "->" if row.backend == self.chosen else "  "
            serves = "serves" if row.serves else "no    "
            lines.append(f"{mark} {row.backend:{width}}  {serves}  {row.reason or config}".rstrip())
        return "\n".join([f"{what} on {self.target}", *lines, *self.notes])


def _named(layout: PatchLayout) -> str:
    """Describes the images from which patches are cut, and the rows in front of the patches."""
    what = "images" if layout.frames is None else f"videos, {layout.frames} frames per patch"
    return f" of uint8 {what}" + (f", {layout.prefix} rows of prefix" if layout.prefix else "")


def plan_with(
    name: str,
    problem: Problem,
    target: Target,
    *,
    asked: bool = False,
    tuned: str | None = None,
) -> Plan | Refusal:
    """Returns the plan of one backend for a problem on a target, or the reason why it has none.

    Args:
      name: name of the backend.
      problem: shapes and dtypes on one device.
      target: where the program runs.
      asked: whether the user chose this backend by name. Then the backend cuts images itself if it
        can, even if it would be faster after XLA's patchify.
      tuned: path of the user's file of measured configs; None for the file that the environment
        variable names, if any.

    Raises:
      ValueError: a file of measured configs is damaged, or the user's file is missing.
    """
    if name != "xla" and problem.is_symbolic:
        return Refusal("its kernels need known sizes, but this program has symbolic dimensions.")
    if problem.layout is not None:
        images, layout = problem.images, problem.layout
        assert images is not None  # They belong to the layout.
        only_xla = layout.frames is not None or layout.prefix > 0 or images[-1] != 3
        if problem.cut == "kernel" and only_xla:
            return Refusal(
                "a kernel cuts only images of 3 channels itself, no videos, and adds no prefix."
            )
        faster = None if problem.cut else preferred_cut(name, problem, target)
        if only_xla or (faster == "xla" and not asked):
            problem = problem.of_patches
        elif faster == "kernel":
            cut = dataclasses.replace(problem, cut="kernel")
            answer = plan_with(name, cut, target, asked=asked, tuned=tuned)
            if isinstance(answer, Plan):
                return answer
    try:
        plan = _plan(name, problem, target, tuned)
    except NotImplementedError as error:
        return Refusal(str(error))
    if problem.cut == "kernel" and not plan.takes_images:
        return Refusal("it does not cut images itself, which cut='kernel' requires.")
    return plan


def _plan(name: str, problem: Problem, target: Target, tuned: str | None) -> Plan:
    """Returns a backend's plan with the measured config, or else with the heuristic's config."""
    backend, measured = BACKENDS[name], problem
    by_heuristic = functools.cache(lambda: backend.plan(problem, target))
    if problem.images is not None:
        # A kernel that cuts images itself was measured with images, any other with patches.
        cuts = by_heuristic().takes_images
        measured = dataclasses.replace(problem, cut="kernel") if cuts else problem.of_patches
    found = stored.find(name, measured, target, tuned)
    origin = found.origin
    if found.config is not None and found.path is not None:
        try:
            config = backend.config_of(found.config)
            plan = backend.plan(problem, target, config=config)
            return dataclasses.replace(plan, origin=origin)
        except ValueError as error:
            raise ValueError(stored.damaged(found.path, str(error))) from None
        except NotImplementedError as error:
            # For example, the config is a tuning that must be compiled, and nvcc is missing.
            path = printable(found.path)
            origin = f"{stored.HEURISTIC}, because the config of {path} is refused: {error}"
    plan = by_heuristic()
    return dataclasses.replace(plan, origin=origin) if plan.config else plan


def _verdicts(
    problem: Problem, target: Target, tuned: str | None
) -> Iterator[tuple[str, Plan | Refusal, str]]:
    """Yields each backend's name, its answer, and why another one is preferred ("" if none is)."""
    answer_of = functools.cache(lambda name: plan_with(name, problem, target, tuned=tuned))
    for name in BACKENDS:
        answer, reason = answer_of(name), ""
        if isinstance(answer, Plan):
            faster = preferred_alternatives(name, problem)
            reason = next((why for x, why in faster if isinstance(answer_of(x), Plan)), "")
        yield name, answer, reason


def explain(problem: Problem, target: Target, tuned: str | None = None) -> Explanation:
    """Collects the answer of every backend; the arguments are those of `plan_with`."""
    rows, configs = [], []
    for name, answer, reason in _verdicts(problem, target, tuned):
        if isinstance(answer, Refusal):
            rows.append(Row(name, False, answer.reason))
            configs.append("")
        else:
            rows.append(Row(name, True, reason))
            configs.append(", ".join(filter(None, (answer.config, answer.origin))))
    notes = stored.ignored(target, tuned)
    return Explanation(problem, target, tuple(rows), tuple(configs), notes)


def check_name(name: str | None) -> None:
    """Raises ValueError if `name` is neither the name of a backend nor None."""
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"patch_embed: backend is {name!r}, expected one of {', '.join(BACKENDS)}, or None for "
            "the best backend that serves the call."
        )


def choose(problem: Problem, target: Target, name: str | None, tuned: str | None = None) -> Plan:
    """Chooses the plan by which a call is computed.

    Args:
      problem: shapes and dtypes on one device.
      target: where the program runs. If it is not known, XLA is chosen, because only XLA runs
        everywhere. A backend that the user chose by name is used nevertheless.
      name: the user's choice, or None for the best backend that serves.
      tuned: as for `plan_with`.

    Raises:
      NotImplementedError: the backend that the user chose cannot serve; the message says why.
      ValueError: a file of measured configs is damaged, or the user's file is missing.
    """
    answer: Plan | Refusal
    if name is None and target.known:
        refusals = []
        for backend, answer, reason in _verdicts(problem, target, tuned):
            if isinstance(answer, Plan) and not reason:
                return answer
            refusals += [f"{backend}: {answer.reason}"] if isinstance(answer, Refusal) else []
        raise NotImplementedError(
            f"patch_embed: no backend serves this call with cut={problem.cut!r} on {target}. "
            f"{' '.join(refusals)} Leave cut=None to let XLA cut the images."
        )
    name = name or "xla"
    answer = plan_with(name, problem, target, asked=True, tuned=tuned)
    if isinstance(answer, Plan):
        return answer
    raise NotImplementedError(
        f"patch_embed: backend {name!r} cannot serve this call: {answer.reason} "
        + (
            "Leave backend=None to use the best backend that serves."
            if problem.cut is None
            else "Leave cut=None to let XLA cut the images."
        )
    )
