"""The ordered list of backends, and the choice among them.

A backend is a module with three functions and a text:

  why_not(problem, target) -> str | None: the reason it cannot serve, None if it can. A target of
    None asks about the problem alone.
  why_rather_not(problem) -> (name, reason) | None: of a problem that it serves, the backend that is
    the better choice, and why; None if none is known to be.
  run(patches, weight, scale, table, *, out_dtype, target) -> y: the computation, traceable by JAX,
    for a target, or for the device that JAX uses by default.
  EVIDENCE: why it may be trusted.

One that cuts uint8 images into patches by itself has two more:

  run_images(images, weight, scale, table, *, patch_size, out_dtype, target) -> y.
  cuts_faster(problem, target) -> bool: whether that is faster than `run` behind `patchify`. If not,
    it runs only where the backend was asked for by name.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import jax

from pallas_patch_embed.backends import cuda_ffi, mosaic_sm90, mosaic_sm100, triton, xla
from pallas_patch_embed.problem import Problem, Target

# In the order in which they are tried.
BACKENDS: dict[str, ModuleType] = {
    "mosaic_sm100": mosaic_sm100,
    "mosaic_sm90": mosaic_sm90,
    "cuda": cuda_ffi,
    "triton": triton,
    "xla": xla,
}


def backends() -> tuple[str, ...]:
    """The names of the backends, in the order in which they are tried."""
    return tuple(BACKENDS)


class Row(NamedTuple):
    """One backend's answer: does it serve, and why it should not or cannot."""

    backend: str
    serves: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What every backend says about a problem on a target, in the order in which they are tried.

    Iterates over its rows; `str` gives a table.

    Attributes:
      problem: the shapes and dtypes asked about.
      target: the chip asked about.
      rows: (backend, serves, reason), one a backend; one that serves has a reason if another is
        faster.
    """

    problem: Problem
    target: Target
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> str:
        """The backend that runs when none is asked for by name."""
        return next(row.backend for row in self.rows if row.serves and not row.reason)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        p = self.problem
        source = "" if p.patch_size is None else " of uint8 images"
        what = f"patches {list(p.patches)} {p.dtype}{source}, N = {p.N}, to {p.out_dtype}"
        width = max(len(row.backend) for row in self.rows)
        lines = []
        for row in self.rows:
            mark = "->" if row.backend == self.chosen else "  "
            serves = "serves" if row.serves else "no    "
            lines.append(f"{mark} {row.backend:{width}}  {serves}  {row.reason}".rstrip())
        return "\n".join([f"{what} on {self.target}", *lines])


def explain(problem: Problem, target: Target) -> Explanation:
    """Every backend's answer about `problem` on `target`."""

    def row(name: str, backend: ModuleType) -> Row:
        if reason := backend.why_not(problem, target):
            return Row(name, False, reason)
        better, reason = backend.why_rather_not(problem) or (name, "")
        return Row(name, True, "" if BACKENDS[better].why_not(problem, target) else reason)

    rows = tuple(row(name, backend) for name, backend in BACKENDS.items())
    return Explanation(problem, target, rows)


def check_name(name: str | None) -> None:
    """Refuses the name of a backend that does not exist; None stands for the one chosen."""
    if name is not None and name not in backends():
        raise ValueError(
            f"patch_embed: there is no backend {name!r}. Expected one of {', '.join(backends())}, "
            "or None for the best that serves."
        )


def choose(problem: Problem, target: Target | None, name: str | None) -> ModuleType:
    """The backend that computes `problem` on `target`.

    Args:
      problem: shapes and dtypes on one device.
      target: the chip, or None where nobody can know it: then only XLA is safe, unless a backend
        was asked for by name, which is trusted to fit.
      name: the backend asked for, or None for the best that serves.

    Raises:
      NotImplementedError: the backend asked for cannot serve; the message says why.
    """
    if name is None:
        return xla if target is None else BACKENDS[explain(problem, target).chosen]
    sizes = itertools.chain(problem.patches, problem.weight, problem.scale, problem.table)
    if name != "xla" and any(map(jax.export.is_symbolic_dim, sizes)):
        reason = "its kernels are for sizes that are known."
    else:
        reason = BACKENDS[name].why_not(problem, target)
    if reason:
        raise NotImplementedError(
            f"patch_embed: backend {name!r} cannot serve this call: {reason} "
            "Leave backend=None to use the best backend that can."
        )
    return BACKENDS[name]
