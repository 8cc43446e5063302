"""Which backend is preferred to another one that also serves, and the measurement that says so.

Without a preference the first backend of `backends.BACKENDS` that serves is chosen. All times were
measured on an H200 (docs/experiments).
"""

import dataclasses
from collections.abc import Callable

from pallas_patch_embed.backends.tiles import chunks
from pallas_patch_embed.chips import H200, Target
from pallas_patch_embed.problem import Problem


@dataclasses.dataclass(frozen=True)
class Preference:
    """A backend that is faster than others for some problems.

    Attributes:
      over: the slower backends.
      backend: the faster backend.
      applies: whether it is faster for a problem.
      reason: shown by `explain`; a template with the fields `rows`, `K` and `dtype`.
    """

    over: tuple[str, ...]
    backend: str
    applies: Callable[[Problem], bool]
    reason: str


def _few_rows_per_chunk(problem: Problem, min_chunks: int, max_rows: int) -> bool:
    """Whether K has many chunks of 128 bytes, and there are few rows for each of them."""
    return chunks(problem) >= min_chunks and problem.rows <= max_rows * chunks(problem)


PREFERENCES = (
    # bfloat16 with K = 3072 and 2048, 4096 and 8192 rows: xla is faster than triton by 5 to 17%.
    Preference(
        over=("triton",),
        backend="xla",
        applies=lambda problem: _few_rows_per_chunk(problem, 48, 256),
        reason="{rows} rows are few for {dtype} with K = {K}: xla is faster.",
    ),
    # XLA splits K among multiprocessors. B/32: it is faster up to 512 rows at one byte an element,
    # up to 1024 rows at two.
    Preference(
        over=("mosaic_sm90", "cuda", "triton"),
        backend="xla",
        applies=lambda problem: _few_rows_per_chunk(problem, 24, 22),
        reason="{rows} rows are few for K = {K}: xla splits K and is faster.",
    ),
    Preference(
        over=("mosaic_sm90",),
        backend="cuda",
        applies=lambda problem: problem.layout is not None,
        reason="behind XLA's patchify cuda is 1 to 19% faster on an H200.",
    ),
)


def preferred_alternative(backend: str, problem: Problem) -> tuple[str, str] | None:
    """The backend that is faster than this one for the problem, and why; None if none is known."""
    for preference in PREFERENCES:
        if backend in preference.over and preference.applies(problem):
            fields = dict(rows=problem.rows, K=problem.K, dtype=problem.dtype)
            return preference.backend, preference.reason.format(**fields)
    return None


def preferred_cut(backend: str, problem: Problem, target: Target) -> str | None:
    """Who cuts uint8 images into patches if the user does not say: "xla", "kernel" or None.

    None is no preference: the backend's plan says whether its kernel does it.
    """
    if target.chip is None or target.chip.capability != H200.capability:
        return None
    # On an H200 images take 7 to 29% longer in a burst if the kernel cuts them (1 to 4736 images, N
    # of 768 and 1000).
    if backend == "triton" and problem.dtype == "float8_e4m3fn":
        return "xla"
    # On an H200 the kernel is 1.07 to 1.9 times as fast as behind XLA's patchify (B/16, L/16 and
    # So400m/16 at 224 to 512 pixels, 1 to 512 images; 4736 images of B/16). Where the grid's width
    # is odd, images are loaded in shorter rows: 1.2 to 1.3 times (B/16 at 240 and 336 pixels). A
    # program for chips that are not known must run on all that the backend serves: XLA cuts there.
    if backend == "cuda" and problem.dtype == "int8" and problem.images and target.known:
        return "kernel"
    return None
