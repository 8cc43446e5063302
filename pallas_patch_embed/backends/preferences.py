"""Exceptions to the order of the backends, with the measurements on which they are based.

Without an exception, the first backend in `backends.BACKENDS` that serves is chosen. All times were
measured on an H200 or an H100 (docs/experiments).
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from pallas_patch_embed.backends.tiles import chunks
from pallas_patch_embed.base.chips import H200, Target
from pallas_patch_embed.base.problem import Problem


@dataclasses.dataclass(frozen=True)
class Preference:
    """A backend that is faster than others for some problems.

    Attributes:
      over: names of the slower backends. If the faster one is among them, no later preference
        replaces it.
      backend: name of the faster backend.
      applies: function that says whether `backend` is faster for a problem.
      reason: text that `explain` shows, a template with the fields `rows`, `K` and `dtype`.
    """

    over: tuple[str, ...]
    backend: str
    applies: Callable[[Problem], bool]
    reason: str


def _few_rows_per_chunk(problem: Problem, min_chunks: int, max_rows: int) -> bool:
    """Returns whether K has many chunks of 128 bytes, and the problem few rows for each chunk.

    `max_rows` is the largest number of rows for each chunk and each byte of an element.
    """
    most = max_rows * chunks(problem) * np.dtype(problem.dtype).itemsize
    return chunks(problem) >= min_chunks and problem.rows <= most


def _is_long_and_few(problem: Problem) -> bool:
    """Returns whether K is as long as that of B/32 or longer, and there are at most 1024 rows."""
    return chunks(problem) >= 24 and problem.rows <= 1024


def _cuda_splits(problem: Problem) -> bool:
    """Returns whether cuda splits a long K, and so is faster than all other backends.

    A block has room for 12 chunks of the weight, and eight blocks can work on each of 16 slices of
    N.
    """
    return problem.rows <= 256 and 24 <= chunks(problem) <= 96 and problem.N <= 1024


def _cuda_is_faster(problem: Problem) -> bool:
    """Returns whether cuda is preferred to mosaic_sm90 on Hopper.

    With up to 65536 rows cuda takes 0.73 to 1.00 of the time of mosaic_sm90 in 247 of 251
    measurements on an H200 and an H100, and at most 1.07. With more rows it takes 0.80 to 1.02 in
    bfloat16, and 0.94 to 1.03 in dtypes of one byte. In these its fastest kernel for many rows has
    slices of 192 columns. If 192 does not divide N, cuda uses narrower slices and takes 0.99 to
    1.15 times as long (64 and 512 images, N = 1024).
    """
    has_narrow_slices = problem.dtype != "bfloat16" and problem.N % 192 != 0
    return chunks(problem) < 24 and not (has_narrow_slices and problem.rows > 8192)


PREFERENCES = (
    # In bfloat16 with K = 3072 and 2048, 4096 or 8192 rows, xla is 5 to 17% faster than triton.
    Preference(
        over=("triton",),
        backend="xla",
        applies=lambda problem: _few_rows_per_chunk(problem, 48, 128),
        reason="with only {rows} rows of {dtype} and K = {K}, xla is faster.",
    ),
    # With 1 to 4 images of B/32 cuda takes 0.34 to 0.70 of the time of mosaic_sm90. The backends
    # that the preferences below name are not faster.
    Preference(
        over=("mosaic_sm90", "cuda"),
        backend="cuda",
        applies=_cuda_splits,
        reason="with only {rows} rows and K = {K}, cuda splits K and is faster.",
    ),
    # XLA splits K among multiprocessors. For B/32 in bfloat16 it is the fastest with 8 images, and
    # with 16 images it is faster than mosaic_sm90 and cuda. With fewer images only cuda is faster.
    Preference(
        over=("mosaic_sm90", "cuda", "triton"),
        backend="xla",
        applies=lambda problem: (
            _few_rows_per_chunk(problem, 24, 6) or _few_rows_per_chunk(problem, 48, 11)
        ),
        reason="with only {rows} rows and K = {K}, xla splits K and is faster.",
    ),
    # From patches of B/32 triton takes 0.75 to 0.79 of the time of mosaic_sm90 with 8 images in
    # dtypes of one byte, and 0.84 with 16 images in float8.
    Preference(
        over=("mosaic_sm90", "cuda"),
        backend="triton",
        applies=lambda problem: problem.layout is None and _is_long_and_few(problem),
        reason="with only {rows} rows and K = {K}, triton is faster.",
    ),
    # With 16 images of B/32 cuda takes longer than mosaic_sm90.
    Preference(
        over=("mosaic_sm90",),
        backend="cuda",
        applies=lambda problem: problem.layout is not None and not _is_long_and_few(problem),
        reason="on patches that XLA has cut from images, cuda is 1 to 19% faster on an H200.",
    ),
    Preference(
        over=("mosaic_sm90",),
        backend="cuda",
        applies=_cuda_is_faster,
        reason="with {rows} rows of {dtype}, cuda is faster.",
    ),
)


def preferred_alternatives(backend: str, problem: Problem) -> Iterator[tuple[str, str]]:
    """Yields the backends that are faster for the problem, each with the reason, best first."""
    for preference in PREFERENCES:
        if backend in preference.over and preference.applies(problem):
            if preference.backend == backend:
                return
            fields = dict(rows=problem.rows, K=problem.K, dtype=problem.dtype)
            yield preference.backend, preference.reason.format(**fields)


def preferred_cut(backend: str, problem: Problem, target: Target) -> str | None:
    """Returns whether "xla" or the "kernel" should cut uint8 images if the user does not choose.

    None means no preference: then the backend's plan decides.
    """
    if target.chip is None or target.chip.capability != H200.capability:
        return None
    # On an H200 a burst of calls takes 7 to 29% longer if triton's kernel cuts the images (1 to
    # 4736 images, N of 768 and 1000).
    if backend == "triton" and problem.dtype == "float8_e4m3fn":
        return "xla"
    # On an H200 a call is 1.07 to 1.9 times as fast if the kernel cuts the images (B/16, L/16 and
    # So400m/16 at 224 to 512 pixels, 1 to 512 images; 4736 images of B/16). If the grid's width is
    # odd, the kernel loads shorter rows of pixels and is 1.2 to 1.3 times as fast (B/16 at 240 and
    # 336 pixels). If the chip is not known, XLA cuts the images, because the program must run on
    # every chip of the backend, and not all of its kernels can cut images.
    if backend == "cuda" and problem.dtype == "int8" and problem.images and target.known:
        return "kernel"
    return None
