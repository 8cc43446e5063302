"""A Triton kernel, called through jax-triton: NVIDIA GPUs from compute capability 8.0 on.

Below the other kernels on Hopper and Blackwell, and the one for Ampere and Ada. It also takes
images as they are, and cuts them into patches while it loads them. The kernel itself is in
`kernel.py`, which is imported at first use, because Triton is an extra.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Grid
from pallas_patch_embed.chips import A100, Chip, Target
from pallas_patch_embed.problem import Problem

EVIDENCE = (
    "executed by Triton's interpreter, and compiled for sm_80, sm_86, sm_89, sm_90, sm_103 and "
    "sm_120, in the tests; every element of its results compared on an H200; not on another GPU."
)

# The oldest chip that the kernel serves.
OLDEST = A100

# Of patches, so that those of whole tiles are less than 2^31.
MOST_ROWS = 2**31 - 256

# Data centre chips of these compute capabilities have 227 KiB of shared memory for a block; the
# others, also newer ones, 99 KiB or more.
LARGE = (9, 10)

# What a multiprocessor does in a cycle, about: products of bytes of K (twice as many if LARGE),
# bytes that it gets from the L2 cache, pixels that it encodes, and elements that it stores.
PRODUCTS, LOADED, ENCODED, STORED = 2048, 72, 32, 5

# Cycles that a program alone on its multiprocessor waits for wgmma at each step, with int8 and with
# others; how much longer products take where programs share one; cycles beside all that, of a tile.
# Fitted to an H200: of tiles measured there (NOTES.md) the fastest is chosen, or one 1% slower.
ALONE_INT8, ALONE, SHARED, TILE_OVERHEAD = 350, 80, 1.1, 800

# Bytes that a thread loads at once; and more than it ever does, as `least` of a Config.
MOST_VECTOR, PATCHES_ONLY = 16, 32


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of the Triton kernel.

    Attributes:
      tile_m: rows of a tile.
      tile_n: columns of a tile, of which a program keeps its own.
      step_bytes: of K, loaded at once for each row and column; 128 divides K_padded in every dtype.
      warps: of a program.
      stages: of the pipeline of loads.
      programs: at the same time on a multiprocessor.
      parts: a power of two, in which the columns of a tile are stored, so that registers suffice.
      least: bytes of pixels that a thread has to load at once, so that registers suffice; above 1
        they do so only if LEAST_GROUP divides N. PATCHES_ONLY: it does not encode pixels.
    """

    tile_m: int
    tile_n: int
    step_bytes: int
    warps: int
    stages: int
    programs: int
    parts: int = 1
    least: int = 1

    def grid(self, problem: Problem, chip: Chip) -> Grid:
        """The workers, and which tiles they share."""
        return Grid.of(problem, chip, self.tile_m, self.tile_n, resident=self.programs)

    def time(self, problem: Problem, chip: Chip, uncut: bool) -> float:
        """Cycles of the worker with the most tiles, about; `uncut` if it encodes pixels."""
        grid, m, n = self.grid(problem, chip), self.tile_m, self.tile_n
        together = -(-grid.thread_blocks // chip.multiprocessors)
        large = chip.capability[0] in LARGE
        products = m * n * self.step_bytes / (2 * PRODUCTS if large else PRODUCTS)
        loads = (m + n) * self.step_bytes / LOADED
        if together > 1:
            step = together * max(SHARED * products, loads)
        else:
            wait = ALONE_INT8 if problem.dtype == "int8" else ALONE
            step = max(products, loads) + (wait if large else 0)
        steps = problem.K * jnp.dtype(problem.dtype).itemsize / self.step_bytes
        others = m * n / STORED + (m * problem.K / ENCODED if uncut else 0)
        a_tile = steps * step + together * others + TILE_OVERHEAD
        return grid.tiles_per_worker * a_tile


# Of AMPERE none needs more than 99 KiB of shared memory. NOTES.md has the times of those for Hopper
# and of others, by dtype, and the few problems for which one spills some bytes.
AMPERE = (
    Config(128, 128, 64, warps=8, stages=4, programs=1, least=4),
    Config(64, 128, 64, warps=8, stages=3, programs=1, parts=4),
    Config(32, 64, 64, warps=4, stages=3, programs=3),
)
HOPPER = (
    Config(128, 256, 128, warps=8, stages=4, programs=1, parts=4, least=2),
    Config(128, 128, 128, warps=4, stages=3, programs=2, parts=4, least=PATCHES_ONLY),
    Config(64, 128, 128, warps=4, stages=4, programs=2),
    Config(64, 64, 128, warps=4, stages=4, programs=3),
)

# Of columns, or of bytes of pixels: a group that has one address.
LEAST_GROUP = 4


def widens(dtype: str, chip: Chip) -> bool:
    """Whether float8 numbers are multiplied as float16 ones."""
    return dtype == "float8_e4m3fn" and dtype not in chip.tensor_dtypes


def configs(chip: Chip) -> tuple[Config, ...]:
    """Those for a chip, the largest first."""
    return HOPPER if chip.capability[0] in LARGE else AMPERE


def fitting_configs(problem: Problem, chip: Chip, vector: int | None = None) -> list[Config]:
    """Those of `configs` with registers for a problem; arguments as for `choose_config`."""
    least = PATCHES_ONLY if vector is None else vector
    # What takes registers, too: float8 pixels that are widened; float32 results of pixels; int8
    # sums where there is no wgmma, beside short groups of pixels.
    crowded = widens(problem.dtype, chip) or problem.out_dtype == "float32"
    crowded |= problem.dtype == "int8" and chip.capability[0] != 9 and least < LEAST_GROUP
    if problem.N % LEAST_GROUP or (vector is not None and crowded):
        least = 1
    return [config for config in configs(chip) if config.least <= least]


def choose_config(problem: Problem, chip: Chip, vector: int | None = None) -> Config:
    """The config for a problem on a chip.

    Args:
      problem: shapes and dtypes.
      chip: the GPU.
      vector: bytes of pixels that a thread loads at once; None for patches.
    """
    found = fitting_configs(problem, chip, vector)
    return min(found, key=lambda config: config.time(problem, chip, vector is not None))


def missing() -> str | None:
    """What of Triton and jax-triton is not installed; None if both are."""
    absent = [name for name in ("triton", "jax_triton") if not importlib.util.find_spec(name)]
    if not absent:
        return None
    names = " and ".join(name.replace("_", "-") for name in absent)
    return f"{names} not installed: pip install 'pallas_patch_embed[triton]'."


def plan(problem: Problem, target: Target, *, config: Config | None = None) -> Plan:
    """How this kernel computes a problem; N may be any number.

    It cuts uint8 images into patches itself, if the problem has `patch_size`. A program that may
    run anywhere is compiled for the GPU of this process, or for the oldest that the kernel serves.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: tile sizes; None for those of `choose_config`.

    Raises:
      NotImplementedError: the kernel cannot serve; the message is the reason.
    """
    chip = target.chip or (None if target.known else OLDEST)
    if chip is None or chip.capability < OLDEST.capability:
        raise NotImplementedError(f"it needs compute capability 8.0 or newer; this is {target}.")
    if reason := missing():
        raise NotImplementedError(reason)
    tiles.check_operands(problem)
    if problem.rows > MOST_ROWS:
        raise NotImplementedError(
            f"there are {problem.rows} patches, expected at most {MOST_ROWS}."
        )
    cut = None if problem.images is None else _cut(problem)
    config = config or choose_config(problem, chip, cut["VECTOR"] if cut else None)
    run = functools.partial(_launch, problem, chip, config, cut)
    return Plan(run, config=str(config), takes_images=cut is not None)


def _cut(problem: Problem) -> dict[str, int]:
    """The kernel's arguments that say how patches lie in images."""
    assert problem.images is not None and problem.patch_size is not None
    patch_size, (H, W, channels) = problem.patch_size, problem.images[-3:]
    line, patch_line = W * channels, patch_size * channels
    return dict(
        IMAGES=True,
        K=patch_size * patch_line,
        GRID_W=W // patch_size,
        GRID=problem.patches[-2],
        PATCH=patch_size,
        PATCH_LINE=patch_line,
        LINE=line,
        IMAGE=H * line,
        VECTOR=math.gcd(MOST_VECTOR, patch_line, line),
    )


def _launch(
    problem: Problem, chip: Chip, config: Config, cut: dict[str, int] | None, *operands: jax.Array
) -> jax.Array:
    """Calls the kernel for a problem.

    Args:
      problem: checked; of patches, also where there are images.
      chip: the GPU that the kernel is compiled for.
      config: tile sizes and pipeline depth.
      cut: how patches lie in images; None for patches.
      operands: patches or images, weight, scale, table.
    """
    widen = widens(problem.dtype, chip)
    grid = config.grid(problem, chip)
    if widen:
        operands = tuple(
            lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == problem.dtype else x
            for x in operands
        )
    K, period = problem.K, problem.table_period
    names = ("GRID_W", "GRID", "PATCH", "PATCH_LINE", "LINE", "IMAGE", "VECTOR")
    arguments = dict.fromkeys(names, 1) | dict(IMAGES=False, K=K) | (cut or {})

    def compute(first, weight, scale, table):
        # Tiles of a segment lie alike in their images, also where they have no rows of a table.
        segments = grid.schedule(period if period > 1 else arguments["GRID"])
        major, minor = chip.capability
        return _call()(
            first.reshape(-1) if cut else first.reshape(problem.rows, K),
            *(weight, scale, table.reshape(-1, problem.N), jnp.asarray(segments)),
            out=jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype),
            grid=grid.thread_blocks,
            num_warps=config.warps,
            num_stages=config.stages,
            compute_capability=10 * major + minor,
            **arguments,
            M=problem.rows,
            N=problem.N,
            K_PADDED=K,
            PERIOD=period,
            RUNS=segments.shape[1],
            DTYPE=problem.dtype,
            WIDEN=widen,
            HAS_TABLE=problem.has_table,
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            TILE_K=config.step_bytes // jnp.dtype(problem.dtype).itemsize,
            PARTS=config.parts,
            STAGES=config.stages,
        )

    return tiles.flatten_leading_axes(problem, operands, compute)


@functools.cache
def _call():
    """jax-triton's call of the kernel, whatever it names what comes out."""
    jax_triton = importlib.import_module("jax_triton")
    kernel = importlib.import_module(f"{__name__}.kernel").patch_embed
    named = inspect.signature(jax_triton.triton_call).parameters
    out_name = "out_type" if "out_type" in named else "out_shape"

    def call(*operands, out, **options):
        return jax_triton.triton_call(*operands, kernel=kernel, **{out_name: out}, **options)

    return call
