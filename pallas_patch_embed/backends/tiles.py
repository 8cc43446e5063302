"""Code that all tiled kernels share: checks of operands, and the tiling: tiles and workers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.backends import schedule
from pallas_patch_embed.base.chips import Chip, Target
from pallas_patch_embed.base.messages import printable, quoted
from pallas_patch_embed.base.problem import NO_EPILOGUE, Problem

DTYPES = ("float8_e4m3fn", "bfloat16", "int8")

# Bytes of K in a chunk: one row of the 128-byte swizzle. A chunk of each row of a tile fills one
# slot of a ring.
ROW_BYTES = 128

# Estimated overhead of a tile, besides its multiplications, in units of the time to multiply one
# row by one column. With this value the estimate chooses the fastest of the configs that were
# measured on an H200 (docs/experiments/hopper.md).
TILE_OVERHEAD = 128 * 64


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of a problem, and the number of workers that share them.

    A worker is one thread block, or one cluster of blocks. It computes tiles of one slice of N.

    Attributes:
      rows: number of rows of patches, M.
      tile_m: number of rows of a tile.
      slices: number of slices of N, each as wide as a tile.
      workers: number of workers of one slice.
      blocks: number of thread blocks of one worker.
    """

    rows: int
    tile_m: int
    slices: int
    workers: int
    blocks: int

    @classmethod
    def of(
        cls,
        problem: Problem,
        chip: Chip,
        tile_m: int,
        tile_n: int,
        *,
        blocks: int = 1,
        resident: int = 1,
    ) -> "Tiling":
        """Makes a tiling with as many workers as run at the same time, but at most one per tile.

        Args:
          problem: shapes and dtypes.
          chip: the GPU.
          tile_m: rows of a tile.
          tile_n: columns of a tile.
          blocks: thread blocks of a worker.
          resident: number of thread blocks that run on one multiprocessor at the same time.
        """
        slices = -(-problem.N // tile_n)
        most = chip.multiprocessors * resident // blocks // max(slices, 1)
        workers = max(1, min(most, -(-problem.rows // tile_m)))
        return cls(problem.rows, tile_m, slices, workers, blocks)

    @property
    def tiles(self) -> int:
        """Number of tiles of one slice."""
        return -(-self.rows // self.tile_m)

    @property
    def tiles_per_worker(self) -> int:
        """Largest number of tiles of a worker."""
        return -(-self.tiles // self.workers)

    @property
    def thread_blocks(self) -> int:
        """Number of thread blocks of the launch."""
        return self.slices * self.workers * self.blocks

    def schedule(self, period: int) -> np.ndarray:
        """Computes the workers' schedules for a table that repeats after `period` rows."""
        return schedule.segments(self.rows, period, self.tile_m, self.workers)


# Kernels number the rows of all tiles with int32, and the last tile may extend beyond the rows of
# the problem.
MAX_ROWS = 2**31 - 256


def check_operands(problem: Problem, *, epilogues: bool = False) -> None:
    """Raises NotImplementedError with the reason if a tiled kernel cannot take these operands.

    `epilogues` says whether the kernel computes those of dense layers.
    """
    K_bytes = problem.K * np.dtype(problem.dtype).itemsize
    if problem.dtype not in DTYPES:
        reason = f"it multiplies {', '.join(DTYPES)}, not {problem.dtype}."
    elif len(problem.weight) > 2 or len(problem.scale) > 1:
        reason = "it multiplies by one weight [N, K], but this call has several weights or scales."
    elif problem.rows > MAX_ROWS:
        reason = f"the call has {problem.rows} rows, expected at most {MAX_ROWS}."
    elif K_bytes == 0 or K_bytes % ROW_BYTES:
        reason = f"K is {problem.K}, expected a multiple of {ROW_BYTES} bytes (K_padded)."
    elif problem.table_dtype != ("bfloat16" if problem.has_table else "float32"):
        reason = (
            f"the table is {problem.table_dtype}, but it adds a bfloat16 table or a float32 offset."
        )
    elif problem.epilogue != NO_EPILOGUE and not epilogues:
        reason = "it computes no activation, no scales of rows and no residual."
    elif problem.table_period is None:
        reason = (
            f"the table has shape {problem.table}, expected [S, N], or [..., S, N] with the last "
            f"leading axes of the patches, which have shape {problem.patches}."
        )
    else:
        return
    raise NotImplementedError(reason)


def check_dtype(problem: Problem, chip: Chip) -> None:
    """Raises NotImplementedError if the chip's tensor cores do not multiply this dtype."""
    if problem.dtype in DTYPES and problem.dtype not in chip.tensor_dtypes:
        major, minor = chip.capability
        raise NotImplementedError(
            f"compute capability {major}.{minor} has no {problem.dtype} tensor cores."
        )


def chunks(problem: Problem) -> int:
    """Returns the number of chunks of ROW_BYTES in a row of patches, one ring slot each."""
    return problem.K * np.dtype(problem.dtype).itemsize // ROW_BYTES


def chip_for(target: Target, chips: tuple[Chip, ...]) -> Chip | None:
    """Returns the chip for which a kernel is planned.

    Args:
      target: where the program runs.
      chips: the chips that the kernel supports, one for each compute capability.

    Returns:
      The target's chip if the kernel supports it; otherwise the first of `chips` if the target is
      not known, and None if it is known.
    """
    capabilities = [chip.capability for chip in chips]
    if target.chip is not None and target.chip.capability in capabilities:
        return target.chip
    return None if target.known else chips[0]


class Checked(Protocol):
    """A config that has a method `check`."""

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if the config cannot serve the problem."""


def first_that_fits[C: Checked](problem: Problem, chip: Chip, configs: Iterable[C]) -> C | None:
    """Returns the first config whose check passes; None if no check passes."""
    for config in configs:
        try:
            config.check(problem, chip)
        except NotImplementedError:
            continue
        return config
    return None


def config_of[C](kind: type[C], fields: Mapping[str, Any]) -> C:
    """Returns the config of this class with these fields.

    Fields that have a default may be missing: an earlier version did not know them.

    Raises:
      ValueError: a field is missing or unknown, or has another type; the message says which.
    """
    known = dataclasses.fields(kind)  # type: ignore[arg-type]
    wanted = {field.name: field.type for field in known}
    needed = {field.name for field in known if field.default is dataclasses.MISSING}
    if not needed <= fields.keys() <= wanted.keys():
        found = printable(", ".join(fields) or "empty")
        raise ValueError(
            f"the fields of a {kind.__name__} are {found}, expected {', '.join(wanted)}."
        )
    for name, value in fields.items():
        found = f"{name} of a {kind.__name__} is {quoted(value)}, expected"
        if type(value) is not wanted[name]:
            raise ValueError(f"{found} {wanted[name]}.")
        if abs(value) >= 2**31:
            raise ValueError(f"{found} less than 2^31.")
    return kind(**fields)


def flatten_leading_axes(
    problem: Problem, operands: tuple[jax.Array, ...], compute: Callable[..., Any]
) -> Any:
    """Calls a kernel whose result has a single axis of rows, for operands with leading axes.

    Args:
      problem: the problem of the operands, which `check_operands` has accepted.
      operands: patches (or images), weight, scale, table, and those of the epilogue.
      compute: function of the same operands, with table [period, N] or [N], row_scale [M] and
        residual [M, N], which returns y [M, N]. It is not called if there are no rows.

    Returns:
      [..., S, N]; a tuple of them if the epilogue has several parts.
    """
    source, weight, scale, table, *others = operands
    shape = (*problem.patches[:-1], problem.columns)
    if problem.rows == 0:
        empty = jnp.zeros(shape, problem.out_dtype)
        return empty if problem.outputs == 1 else (empty,) * problem.outputs
    if problem.has_table:
        table = table.reshape(problem.table_period, problem.N)
    M, N = problem.rows, problem.N
    flat = {"row_scale": (M,), "residual": (M, N)}
    rest = (
        value.reshape(flat.get(name, value.shape))
        for name, value in zip(problem.epilogue.operands, others, strict=True)
    )
    found = compute(source, weight, scale, table, *rest)
    return jax.tree.map(lambda y: y.reshape(shape), found)
