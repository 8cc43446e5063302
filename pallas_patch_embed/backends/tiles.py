"""What the tiled kernels share: checks of their operands, and the grid of tiles and workers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.backends import schedule
from pallas_patch_embed.chips import Chip, Target
from pallas_patch_embed.problem import Problem

DTYPES = ("float8_e4m3fn", "bfloat16", "int8")

# Bytes of K in a chunk, which fills one slot of a ring: one row of the 128-byte swizzle.
ROW_BYTES = 128

# Time of a tile that its products do not explain, counted in products of one row and one column.
# With this value the estimate chooses the fastest of the configs that were measured on an H200
# (docs/experiments/hopper.md).
TILE_OVERHEAD = 128 * 64


@dataclasses.dataclass(frozen=True)
class Grid:
    """How a kernel cuts a problem into tiles, and how many workers share them.

    A worker is one thread block, or one cluster of blocks. It owns one slice of N.

    Attributes:
      rows: rows of patches, M.
      tile_m: rows of a tile.
      slices: slices of N, each as wide as a tile.
      workers: workers of one slice.
      blocks: thread blocks of one worker.
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
    ) -> "Grid":
        """The grid with as many workers as run at the same time, and at most one for each tile.

        Args:
          problem: shapes and dtypes.
          chip: the GPU.
          tile_m: rows of a tile.
          tile_n: columns of a tile.
          blocks: thread blocks of a worker.
          resident: thread blocks that run on one multiprocessor at the same time.
        """
        slices = -(-problem.N // tile_n)
        most = chip.multiprocessors * resident // blocks // max(slices, 1)
        workers = max(1, min(most, -(-problem.rows // tile_m)))
        return cls(problem.rows, tile_m, slices, workers, blocks)

    @property
    def tiles(self) -> int:
        """Tiles of one slice."""
        return -(-self.rows // self.tile_m)

    @property
    def tiles_per_worker(self) -> int:
        """Tiles of the worker that has the most."""
        return -(-self.tiles // self.workers)

    @property
    def thread_blocks(self) -> int:
        """Thread blocks of the launch."""
        return self.slices * self.workers * self.blocks

    def schedule(self, period: int) -> np.ndarray:
        """The workers' tiles in order, for a table that repeats after `period` rows."""
        return schedule.segments(self.rows, period, self.tile_m, self.workers)


def check_operands(problem: Problem) -> None:
    """Raises NotImplementedError with the reason if no tiled kernel can take these operands."""
    K_bytes = problem.K * np.dtype(problem.dtype).itemsize
    if problem.dtype not in DTYPES:
        reason = f"it multiplies {', '.join(DTYPES)}, not {problem.dtype}."
    elif len(problem.weight) > 2 or len(problem.scale) > 1:
        reason = "its weight is one matrix [N, K]; this call has several."
    elif K_bytes == 0 or K_bytes % ROW_BYTES:
        reason = f"K is {problem.K}, expected a multiple of {ROW_BYTES} bytes (K_padded)."
    elif problem.table_dtype != ("bfloat16" if problem.has_table else "float32"):
        reason = f"it adds a bfloat16 table, not {problem.table_dtype}."
    elif problem.table_period is None:
        reason = (
            f"its table [..., S, N] repeats along leading axes or has them all; {problem.table} "
            f"does not for patches {problem.patches}."
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
    """Chunks of ROW_BYTES in a row of patches: the ring slots that one tile takes."""
    return problem.K * np.dtype(problem.dtype).itemsize // ROW_BYTES


def chip_for(target: Target, chips: tuple[Chip, ...]) -> Chip | None:
    """The chip that a kernel is planned for.

    Args:
      target: where the program runs.
      chips: the chips that the kernel supports, one for each compute capability.

    Returns:
      The target's chip if the kernel supports it; the first of `chips` if the target is not known;
      None otherwise.
    """
    capabilities = [chip.capability for chip in chips]
    if target.chip is not None and target.chip.capability in capabilities:
        return target.chip
    return None if target.known else chips[0]


class Checked(Protocol):
    """A config that checks itself."""

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if it cannot serve."""


def first_that_fits[C: Checked](problem: Problem, chip: Chip, configs: Iterable[C]) -> C | None:
    """The first of these configs whose check passes; None if none does."""
    for config in configs:
        try:
            config.check(problem, chip)
        except NotImplementedError:
            continue
        return config
    return None


def config_of[C](kind: type[C], fields: Mapping[str, Any]) -> C:
    """The config of this kind with these fields.

    Raises:
      ValueError: a field is missing, unknown, or of another type; the message says which.
    """
    wanted = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if wanted.keys() != fields.keys():
        raise ValueError(
            f"a {kind.__name__} has the fields {', '.join(wanted)}; given are "
            f"{', '.join(fields) or 'none'}."
        )
    for name, value in fields.items():
        if type(value) is not wanted[name]:
            raise ValueError(f"{name} of a {kind.__name__} is {value!r}, expected {wanted[name]}.")
    return kind(**fields)


def flatten_leading_axes(
    problem: Problem, operands: tuple[jax.Array, ...], compute: Callable[..., jax.Array]
) -> jax.Array:
    """Calls a kernel that has a single axis of rows where the operands have leading axes.

    Args:
      problem: the problem of the operands, checked.
      operands: patches (or images), weight, scale, table.
      compute: patches or images, weight, scale, table [period, N] or [N] -> y [M, N]. It is not
        called if there are no rows.

    Returns:
      [..., S, N].
    """
    source, weight, scale, table = operands
    shape = (*problem.patches[:-1], problem.N)
    if problem.rows == 0:
        return jnp.zeros(shape, problem.out_dtype)
    if problem.has_table:
        table = table.reshape(problem.table_period, problem.N)
    return compute(source, weight, scale, table).reshape(shape)
