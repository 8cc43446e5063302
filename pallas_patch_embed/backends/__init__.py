"""The backends in the order in which they are tried, and the plan of a call."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax

from pallas_patch_embed.backends import cuda, stored, triton, xla
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.plan import Backend, Plan, Refusal
from pallas_patch_embed.backends.preferences import preferred_alternative, preferred_cut
from pallas_patch_embed.chips import Target
from pallas_patch_embed.problem import PatchLayout, Problem

# In the order in which they are tried.
BACKENDS: dict[str, Backend] = {
    "mosaic_sm100": SM100,
    "mosaic_sm90": SM90,
    "cuda": cuda,
    "triton": triton,
    "xla": xla,
}


def backend_names() -> tuple[str, ...]:
    """The names of the backends, in the order in which they are tried."""
    return tuple(BACKENDS)


class Row(NamedTuple):
    """One backend's answer: whether it serves, and why it should not or cannot."""

    backend: str
    serves: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What every backend says about a problem on a target, in the order in which they are tried.

    Iterating yields its rows; `str` is a table.

    Attributes:
      problem: the shapes and dtypes asked about.
      target: the chip asked about.
      rows: (backend, serves, reason), one for each backend; one that serves has a reason if another
        is faster.
      configs: tile sizes and so on of each backend that serves, and where they come from; empty for
        the others.
      notes: files of measured configs that are ignored, and why.
    """

    problem: Problem
    target: Target
    rows: tuple[Row, ...]
    configs: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> str:
        """The backend that runs when none is asked for by name; "none" if no one serves."""
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
    """What patches are cut of, and the rows in front of them."""
    what = "images" if layout.frames is None else f"videos, frames a patch: {layout.frames}"
    return f" of uint8 {what}" + (f", rows in front: {layout.prefix}" if layout.prefix else "")


def plan_with(
    name: str,
    problem: Problem,
    target: Target,
    *,
    asked: bool = False,
    tuned: str | None = None,
) -> Plan | Refusal:
    """How one backend computes a problem on a target, or why it cannot.

    Args:
      name: name of the backend.
      problem: shapes and dtypes on one device.
      target: where the program runs.
      asked: whether the user chose this backend by name. Then it cuts images itself if it can, even
        if it would be faster after XLA's patchify.
      tuned: path of the user's file of measured configs; None for the one that the environment
        names, if any.

    Raises:
      ValueError: a file of measured configs is damaged, or the user's is missing.
    """
    if problem.layout is not None:
        only_xla = problem.layout.frames is not None or problem.layout.prefix > 0
        if problem.cut == "kernel" and only_xla:
            return Refusal("no kernel cuts videos itself, or puts rows in front of the patches.")
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
        return Refusal("it does not cut images itself, which cut='kernel' asks for.")
    return plan


def _plan(name: str, problem: Problem, target: Target, tuned: str | None) -> Plan:
    """A backend's plan with the measured config, or with its heuristic's if there is none."""
    backend, measured = BACKENDS[name], problem
    by_heuristic = functools.cache(lambda: backend.plan(problem, target))
    if problem.images is not None:
        # The kernel that cuts images itself is measured with them, another one with patches.
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
            # Such as a tuning for which no nvcc is here.
            origin = f"{stored.HEURISTIC}, because the config of {found.path} is refused: {error}"
    plan = by_heuristic()
    return dataclasses.replace(plan, origin=origin) if plan.config else plan


def _verdicts(
    problem: Problem, target: Target, tuned: str | None
) -> Iterator[tuple[str, Plan | Refusal, str]]:
    """Each backend's name and answer, and why another one is preferred; "" if none is."""
    answer_of = functools.cache(lambda name: plan_with(name, problem, target, tuned=tuned))
    for name in BACKENDS:
        answer = answer_of(name)
        faster, reason = preferred_alternative(name, problem) or (name, "")
        served = isinstance(answer, Plan) and isinstance(answer_of(faster), Plan)
        yield name, answer, reason if served else ""


def explain(problem: Problem, target: Target, tuned: str | None = None) -> Explanation:
    """Every backend's answer about `problem` on `target`; `tuned` as for `plan_with`."""
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
    """Refuses the name of a backend that does not exist; None stands for the one chosen."""
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"patch_embed: there is no backend {name!r}. Expected one of {', '.join(BACKENDS)}, "
            "or None for the best that serves."
        )


def choose(problem: Problem, target: Target, name: str | None, tuned: str | None = None) -> Plan:
    """The plan by which a call is computed.

    Args:
      problem: shapes and dtypes on one device.
      target: where the program runs. If it is not known, only XLA is safe; a backend that the user
        chose by name is trusted to fit.
      name: the user's choice, or None for the best backend that serves.
      tuned: as for `plan_with`.

    Raises:
      NotImplementedError: the backend asked for cannot serve; the message says why.
      ValueError: a file of measured configs is damaged, or the user's is missing.
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
            f"{' '.join(refusals)} Leave cut=None: then XLA may cut the images."
        )
    name = name or "xla"
    sizes = itertools.chain(problem.patches, problem.weight, problem.scale, problem.table)
    if name != "xla" and any(map(jax.export.is_symbolic_dim, sizes)):
        answer = Refusal("its kernels are for sizes that are known.")
    else:
        answer = plan_with(name, problem, target, asked=True, tuned=tuned)
    if isinstance(answer, Plan):
        return answer
    raise NotImplementedError(
        f"patch_embed: backend {name!r} cannot serve this call: {answer.reason} "
        + (
            "Leave backend=None to use the best backend that can."
            if problem.cut is None
            else "Leave cut=None: then XLA may cut the images."
        )
    )
