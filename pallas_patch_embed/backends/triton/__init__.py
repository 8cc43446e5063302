"""The Triton backend, for NVIDIA GPUs of compute capability 8.0 or newer.

It also accepts uint8 images, which it cuts into patches while it loads them. The kernel is called
through jax-triton. Triton is an extra, so the kernel's module `kernel.py` is imported at first use.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Tiling
from pallas_patch_embed.backends.time_model import TRITON, Work, microseconds, work_of
from pallas_patch_embed.base.chips import A100, B200, H200, Chip, Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.lowering import call_kernel
from pallas_patch_embed.base.problem import Problem

OLDEST_CHIP = A100

# Constants of the model in `TritonConfig.cycles`. All but MULTIPLIED are fitted to an H200: of the
# tiles that were measured there (docs/experiments/triton.md) the model chooses the fastest, or one
# that is 1% slower. The first four are the throughput of a multiprocessor per cycle:
#   MULTIPLIED     bytes of K that are multiplied, counted for each row and column: the rate in the
#                  data sheets, which is at least twice as high on large chips
#   LOADED         bytes that are loaded from the L2 cache
#   ENCODED        pixels that are encoded
#   STORED         elements that are stored
#   WAIT_INT8      cycles of a step in which an int8 program waits for wgmma, if it is alone on its
#                  multiprocessor
#   WAIT           the same in other dtypes
#   SHARING        factor by which products take longer if programs share a multiprocessor
#   TILE_OVERHEAD  further cycles of each tile
MULTIPLIED, LOADED, ENCODED, STORED = 2048, 72, 32, 5
WAIT_INT8, WAIT, SHARING, TILE_OVERHEAD = 350, 80, 1.1, 800

# Triton's name of each dtype.
TYPES = {row.name: row.triton for row in TABLE.values()} | dict(uint8="u8", int32="i32")

# Largest number of bytes that one thread loads at once.
MAX_VECTOR = 16


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and pipeline depth of the Triton kernel.

    Attributes:
      tile_m: rows of a tile.
      tile_n: columns of a tile. A program computes the same columns in all its tiles.
      step_bytes: bytes of K that are loaded in one step for each row and column. It divides 128, so
        K_padded is a whole number of steps in every dtype.
      warps: number of warps of a program.
      stages: number of stages of the pipeline of loads.
      programs: number of programs that share a multiprocessor.
      parts: number of parts in which the columns of a tile are stored, to save registers; a power
        of two.
      min_vector: smallest number of bytes that a thread may load at once. Smaller loads need more
        registers than there are.
      encodes_pixels: whether there are enough registers to cut and encode images.
    """

    tile_m: int
    tile_n: int
    step_bytes: int
    warps: int
    stages: int
    programs: int
    parts: int = 1
    min_vector: int = 1
    encodes_pixels: bool = True

    def tiling(self, problem: Problem, chip: Chip) -> Tiling:
        """Returns the tiles and workers for a problem."""
        return Tiling.of(problem, chip, self.tile_m, self.tile_n, resident=self.programs)

    def work(self, problem: Problem, chip: Chip) -> Work:
        """Returns the work of a launch, from which its time is predicted."""
        encoded = 0 if problem.images is None else self.tile_m * problem.K / ENCODED
        return work_of(
            problem,
            chip,
            self.tiling(problem, chip),
            tile_n=self.tile_n,
            slots=self.stages,
            rows=self.tile_m,
            columns=self.tile_n,
            streamed=1.0,
            encoded=encoded,
        )

    def cycles(self, problem: Problem, chip: Chip, from_images: bool) -> float:
        """Estimates the time of the worker with the most tiles, in cycles.

        Args:
          problem: shapes and dtypes.
          chip: the GPU.
          from_images: whether the kernel encodes pixels.
        """
        tiling, m, n = self.tiling(problem, chip), self.tile_m, self.tile_n
        resident = -(-tiling.thread_blocks // chip.multiprocessors)
        large = is_large(chip)
        products = m * n * self.step_bytes / (2 * MULTIPLIED if large else MULTIPLIED)
        loads = (m + n) * self.step_bytes / LOADED
        if resident > 1:
            step = resident * max(SHARING * products, loads)
        else:
            wait = WAIT_INT8 if problem.dtype == "int8" else WAIT
            step = max(products, loads) + (wait if large else 0)
        steps = problem.K * jnp.dtype(problem.dtype).itemsize / self.step_bytes
        others = m * n / STORED + (m * problem.K / ENCODED if from_images else 0)
        a_tile = steps * step + resident * others + TILE_OVERHEAD
        return tiling.tiles_per_worker * a_tile


# Configs, the largest tile first. Those of AMPERE and RTX need at most 99 KiB of shared memory; RTX
# is for compute capability 12, where its configs compile without spills. docs/experiments/triton.md
# has the times of HOPPER and of other configs, and the few problems that spill. No time of RTX has
# been measured.
AMPERE = (
    TritonConfig(128, 128, 64, warps=8, stages=4, programs=1, min_vector=4),
    TritonConfig(64, 128, 64, warps=8, stages=3, programs=1, parts=4),
    TritonConfig(32, 64, 64, warps=4, stages=3, programs=3),
)
RTX = (
    TritonConfig(128, 256, 64, warps=8, stages=4, programs=1, parts=4, min_vector=2),
    TritonConfig(128, 128, 128, warps=8, stages=3, programs=1, min_vector=4),
    *AMPERE,
)
HOPPER = (
    TritonConfig(128, 256, 128, warps=8, stages=4, programs=1, parts=4, min_vector=2),
    TritonConfig(
        128, 128, 128, warps=4, stages=3, programs=2, parts=4, min_vector=16, encodes_pixels=False
    ),
    TritonConfig(64, 128, 128, warps=4, stages=4, programs=2),
    TritonConfig(64, 64, 128, warps=4, stages=4, programs=3),
)

# Number of contiguous columns, or contiguous bytes of pixels, for which the compiler computes a
# single address. If fewer are contiguous, the additional addresses and masks take registers.
ADDRESS_GROUP = 4


def widens(dtype: str, chip: Chip) -> bool:
    """Returns whether float8 numbers are converted to float16 before they are multiplied."""
    return dtype == "float8_e4m3fn" and dtype not in chip.tensor_dtypes


def is_large(chip: Chip) -> bool:
    """Returns whether a chip has Hopper's shared memory, and at least its rate of products.

    These are Hopper, the Blackwell of data centres, and Thor. All others have at least 99 KiB.
    """
    return chip.shared_memory >= H200.shared_memory


def configs(chip: Chip) -> tuple[TritonConfig, ...]:
    """Returns the configs for a chip, the largest tile first."""
    if is_large(chip):
        return HOPPER
    return RTX if chip.capability[0] == 12 else AMPERE


def fitting_configs(problem: Problem, chip: Chip, vector: int | None = None) -> list[TritonConfig]:
    """Returns the configs that have enough registers; arguments as for `choose_config`."""
    from_images = vector is not None
    available = vector or MAX_VECTOR
    major, dtype = chip.capability[0], problem.dtype
    # Whether every byte of pixels needs an address of its own.
    scattered = available < ADDRESS_GROUP
    # Whether other values of a kernel that encodes pixels take many registers: float8 pixels that
    # are widened, float32 results, int8 sums without wgmma, and int8 pixels with tcgen05.
    crowded = widens(dtype, chip) or problem.out_dtype == "float32"
    crowded |= scattered and dtype == ("float8_e4m3fn" if major == 9 else "int8")
    crowded |= dtype == "int8" and chip.capability == B200.capability
    # On 10.0 and 10.3 this config spills if every byte of bfloat16 pixels needs its own address.
    spilling = HOPPER[2] if scattered and major == 10 and dtype == "bfloat16" else None
    if problem.N % ADDRESS_GROUP or (from_images and crowded):
        available = 1
    return [
        config
        for config in configs(chip)
        if config.min_vector <= available
        and (config.encodes_pixels or not from_images)
        and config != spilling
    ]


def choose_config(problem: Problem, chip: Chip, vector: int | None = None) -> TritonConfig:
    """Chooses the config with the smallest estimated time.

    Args:
      problem: shapes and dtypes.
      chip: the GPU.
      vector: number of bytes of pixels that a thread loads at once; None for patches.
    """
    found = fitting_configs(problem, chip, vector)
    return min(found, key=lambda config: config.cycles(problem, chip, vector is not None))


@functools.cache
def is_installed(name: str) -> bool:
    """Returns whether a package is installed. To find that out takes 0.1 ms."""
    return importlib.util.find_spec(name) is not None


def missing() -> str | None:
    """Says which of Triton and jax-triton is not installed; returns None if both are."""
    absent = [name for name in ("triton", "jax_triton") if not is_installed(name)]
    if not absent:
        return None
    names = " and ".join(name.replace("_", "-") for name in absent)
    verb = "is" if len(absent) == 1 else "are"
    return f"{names} {verb} not installed: pip install 'pallas_patch_embed[triton]'."


def plan(problem: Problem, target: Target, *, config: TritonConfig | None = None) -> Plan:
    """Plans a problem with this kernel. N may be any number.

    The kernel cuts the problem's images itself, if it has any. If the chip is not known, the
    program is compiled for the GPU of this process, or for the oldest GPU that the kernel serves if
    this process has none.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: tile sizes; None for those of `choose_config`.

    Raises:
      NotImplementedError: the kernel cannot serve; the message is the reason.
    """
    chip = _checked(problem, target)
    layout = None if problem.images is None else image_layout(problem)
    config = config or choose_config(problem, chip, layout and layout.VECTOR)
    run = functools.partial(_launch, problem, chip, config, layout)
    time = None
    if target.is_timed:
        time = microseconds(config.work(problem, chip), TRITON, problem.dtype)
    return Plan(run, config=str(config), microseconds=time)


def candidates(problem: Problem, target: Target) -> list[TritonConfig]:
    """Returns the configs that have enough registers, in order of their estimated times."""
    chip = _checked(problem, target)
    vector = None if problem.images is None else image_layout(problem).VECTOR
    found = fitting_configs(problem, chip, vector)
    return sorted(found, key=lambda config: config.cycles(problem, chip, vector is not None))


def config_of(fields: Mapping[str, Any]) -> TritonConfig:
    """Returns the config with these fields.

    Raises:
      ValueError: it is not one of AMPERE, RTX and HOPPER, which compile without spills.
    """
    config = tiles.config_of(TritonConfig, fields)
    if config not in AMPERE + RTX + HOPPER:
        raise ValueError(f"the kernel has no config {config}.")
    return config


def _checked(problem: Problem, target: Target) -> Chip:
    """Makes all checks that need no config; returns the chip for which the kernel is compiled."""
    chip = target.chip or (None if target.known else OLDEST_CHIP)
    if chip is None or chip.capability < OLDEST_CHIP.capability:
        raise NotImplementedError(
            f"it needs compute capability 8.0 or newer; the target is {target}."
        )
    tiles.check_operands(problem)
    if reason := missing():
        raise NotImplementedError(reason)
    return chip


class ImageLayout(NamedTuple):
    """Position of patches in images, as arguments of the kernel; kernel.py describes them."""

    PATCHES: int
    PATCHES_PER_LINE: int
    PATCH_LINES: int
    PATCH_LINE_BYTES: int
    LINE_BYTES: int
    IMAGE_BYTES: int
    VECTOR: int


# Values of these arguments for patches. The kernel does not read them, but each needs a value.
NO_IMAGES = ImageLayout(*[1] * 7)


def image_layout(problem: Problem) -> ImageLayout:
    """Computes the layout of the problem's images."""
    patch_size, (H, W, channels) = problem.geometry.patch_size, problem.images[-3:]
    line_bytes, patch_line_bytes = W * channels, patch_size * channels
    return ImageLayout(
        PATCHES=problem.patches[-2],
        PATCHES_PER_LINE=W // patch_size,
        PATCH_LINES=patch_size,
        PATCH_LINE_BYTES=patch_line_bytes,
        LINE_BYTES=line_bytes,
        IMAGE_BYTES=H * line_bytes,
        VECTOR=math.gcd(MAX_VECTOR, patch_line_bytes, line_bytes),
    )


def _launch(
    problem: Problem,
    chip: Chip,
    config: TritonConfig,
    layout: ImageLayout | None,
    *operands: jax.Array,
) -> jax.Array:
    """Calls the kernel for a problem.

    Args:
      problem: shapes and dtypes, already checked.
      chip: the GPU for which the kernel is compiled.
      config: tile sizes and pipeline depth.
      layout: `image_layout` of the problem; None for patches.
      operands: patches or images, weight, scale, table.
    """
    widen = widens(problem.dtype, chip)
    tiling = config.tiling(problem, chip)
    if widen:
        operands = tuple(
            lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == problem.dtype else x
            for x in operands
        )
    K_PADDED, period = problem.K, problem.table_period
    K = K_PADDED if layout is None else layout.PATCH_LINES * layout.PATCH_LINE_BYTES

    def compute(source, weight, scale, table):
        # With images, all tiles of a segment must begin with the same patch of an image, even if
        # all patches add the same row.
        segments = tiling.schedule(period if period > 1 or layout is None else layout.PATCHES)
        major, minor = chip.capability
        call = functools.partial(
            _call(),
            out=jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype),
            grid=tiling.thread_blocks,
            num_warps=config.warps,
            num_stages=config.stages,
            compute_capability=10 * major + minor,
            M=problem.rows,
            N=problem.N,
            K=K,
            K_PADDED=K_PADDED,
            PERIOD=period,
            SEGMENTS=segments.shape[1],
            DTYPE=problem.dtype,
            WIDEN=widen,
            HAS_TABLE=problem.has_table,
            IMAGES=layout is not None,
            **(layout or NO_IMAGES)._asdict(),
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            TILE_K=config.step_bytes // jnp.dtype(problem.dtype).itemsize,
            PARTS=config.parts,
            STAGES=config.stages,
        )
        rows = source.reshape(problem.rows, K) if layout is None else source.reshape(-1)
        table = table.reshape(-1, problem.N)
        return call_kernel(call, rows, weight, scale, table, jnp.asarray(segments))

    return tiles.flatten_leading_axes(problem, operands, compute)


@functools.cache
def _call():
    """Returns a function that calls the kernel with jax-triton 0.3 or 0.4.

    The two versions have different names for the argument that gives the output's shape.
    """
    jax_triton = importlib.import_module("jax_triton")
    kernel = importlib.import_module(f"{__name__}.kernel").patch_embed
    parameters = inspect.signature(jax_triton.triton_call).parameters
    out_name = "out_type" if "out_type" in parameters else "out_shape"

    def call(*operands, out, **options):
        return jax_triton.triton_call(*operands, kernel=kernel, **{out_name: out}, **options)

    return call
