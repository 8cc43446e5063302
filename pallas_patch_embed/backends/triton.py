"""A Triton kernel, called through jax-triton: NVIDIA GPUs from compute capability 8.0 on.

Below the other kernels on Hopper and Blackwell, and the one for Ampere and Ada. It also takes
images as they are, and cuts them into patches while it loads them. The kernel itself is in
`triton_kernel.py`, which is imported at first use, because Triton is an extra.
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

from pallas_patch_embed.backends import schedule, tiling
from pallas_patch_embed.patchify import rows_shape
from pallas_patch_embed.problem import Problem, Target, default_device

EVIDENCE = (
    "executed by Triton's interpreter, and compiled for sm_80, sm_86, sm_89, sm_90, sm_103 and "
    "sm_120, in the tests; every element of its results compared on an H200; not on another GPU."
)

# What a program is compiled for if nobody knows the chip.
OLDEST = (8, 0)

# Multiprocessors of an A100, an RTX 3090, an RTX 4090 and an H200, where there is none to ask.
MULTIPROCESSORS = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132}

# The first compute capability with float8 tensor cores; Triton refuses the type before.
FLOAT8 = (8, 9)

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

# On an H200 XLA is faster where K takes so many chunks of 128 bytes or more, and there are so many
# rows a chunk or fewer: bfloat16 with K = 3072 and 2048, 4096 and 8192 rows, by 5 to 17%.
LONG_CHUNKS, LONG_ROWS = 48, 256

# Bytes that a thread loads at once; and more than it ever does, as `least` of a Config.
MOST_VECTOR, PATCHES_ONLY = 16, 32


def _multiprocessors(capability: tuple[int, int]) -> int:
    return tiling.multiprocessors(MULTIPROCESSORS.get(capability, 108))


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

    def slices(self, problem: Problem) -> int:
        """Into how many slices N is cut."""
        return -(-problem.N // self.tile_n)

    def tiles(self, problem: Problem) -> int:
        """Tiles of a slice of N."""
        return -(-math.prod(problem.patches[:-1]) // self.tile_m)

    def workers(self, problem: Problem, capability: tuple[int, int]) -> int:
        """Programs a slice of N: as many as run at the same time, or as there are tiles."""
        most = self.programs * _multiprocessors(capability) // self.slices(problem)
        return max(1, min(most, self.tiles(problem)))

    def time(self, problem: Problem, capability: tuple[int, int], uncut: bool) -> float:
        """Cycles of the worker with the most tiles, about; `uncut` if it encodes pixels."""
        workers, m, n = self.workers(problem, capability), self.tile_m, self.tile_n
        together = -(-workers * self.slices(problem) // _multiprocessors(capability))
        large = capability[0] in LARGE
        products = m * n * self.step_bytes / (2 * PRODUCTS if large else PRODUCTS)
        loads = (m + n) * self.step_bytes / LOADED
        if together > 1:
            step = together * max(SHARED * products, loads)
        else:
            wait = ALONE_INT8 if problem.dtype == "int8" else ALONE
            step = max(products, loads) + (wait if large else 0)
        K = problem.patches[-1]
        steps = K * jnp.dtype(problem.dtype).itemsize / self.step_bytes
        others = m * n / STORED + (m * K / ENCODED if uncut else 0)
        a_tile = steps * step + together * others + TILE_OVERHEAD
        return -(-self.tiles(problem) // workers) * a_tile


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


def widens(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether float8 numbers are multiplied as float16 ones."""
    return dtype == "float8_e4m3fn" and capability < FLOAT8


def configs(capability: tuple[int, int]) -> tuple[Config, ...]:
    """Those for a compute capability, the largest first."""
    return HOPPER if capability[0] in LARGE else AMPERE


def fitting_configs(
    problem: Problem, capability: tuple[int, int], vector: int | None = None
) -> list[Config]:
    """Those of `configs` with registers for a problem; arguments as for `choose_config`."""
    least = PATCHES_ONLY if vector is None else vector
    # What takes registers, too: float8 pixels that are widened; float32 results of pixels; int8
    # sums where there is no wgmma, beside short groups of pixels.
    crowded = widens(problem.dtype, capability) or problem.out_dtype == "float32"
    crowded |= problem.dtype == "int8" and capability[0] != 9 and least < LEAST_GROUP
    if problem.N % LEAST_GROUP or (vector is not None and crowded):
        least = 1
    return [config for config in configs(capability) if config.least <= least]


def choose_config(
    problem: Problem, capability: tuple[int, int], vector: int | None = None
) -> Config:
    """The config for a problem: a function of shapes, dtypes, and the GPU's multiprocessors.

    Args:
      problem: shapes and dtypes.
      capability: of the GPU.
      vector: bytes of pixels that a thread loads at once; None for patches.
    """
    found = fitting_configs(problem, capability, vector)
    return min(found, key=lambda config: config.time(problem, capability, vector is not None))


def missing() -> str | None:
    """What of Triton and jax-triton is not installed; None if both are."""
    absent = [name for name in ("triton", "jax_triton") if not importlib.util.find_spec(name)]
    if not absent:
        return None
    names = " and ".join(name.replace("_", "-") for name in absent)
    return f"{names} not installed: pip install 'pallas_patch_embed[triton]'."


def why_not(problem: Problem, target: Target | None) -> str | None:
    """The reason why this kernel cannot serve; None if it can."""
    if target is not None and (target.compute_capability or (0, 0)) < OLDEST:
        return f"it needs compute capability 8.0 or newer; this is {target}."
    if reason := missing():
        return reason
    return tiling.why_not(problem, _check_rows)


def _check_rows(problem: Problem) -> None:
    """Raises NotImplementedError if rows cannot be counted in 32 bits."""
    M = math.prod(problem.patches[:-1])
    if M > MOST_ROWS:
        raise NotImplementedError(f"there are {M} patches, expected at most {MOST_ROWS}.")


def why_rather_not(problem: Problem) -> tuple[str, str] | None:
    """The backend that is faster, and why; None if none is known to be."""
    rows, chunks = math.prod(problem.patches[:-1]), tiling.chunks(problem)
    if chunks >= LONG_CHUNKS and rows <= LONG_ROWS * chunks:
        what = f"{problem.dtype} with K = {problem.patches[-1]}"
        return "xla", f"{rows} rows are few for {what}: xla is faster."
    return tiling.why_rather_not(problem)


def cuts_faster(problem: Problem, target: Target) -> bool:
    """Whether `run_images` is faster than `run` behind XLA's patchify: not for float8 on Hopper."""
    # On an H200 it takes 7 to 29% longer in a burst: 1 to 4736 images, N of 768 and 1000.
    hopper = (target.compute_capability or OLDEST)[0] == 9
    return not (hopper and problem.dtype == "float8_e4m3fn")


def run(
    patches: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str,
    target: Target | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The operator as `mosaic.launch` has it, by the Triton kernel; N may be any number.

    Args:
      patches: [..., S, K] float8_e4m3fn, bfloat16 or int8.
      weight: [N, K] of the same dtype.
      scale: [N] float32.
      table: [S, N] bfloat16, with leading axes if images have tables of their own, or [N] float32.
      out_dtype: "bfloat16" or "float32".
      target: the chip; that of the device which JAX uses by default if None.
      config: tile sizes; None for those of `choose_config`.

    Returns:
      [..., S, N] of out_dtype.
    """
    problem = Problem.of(patches, weight, scale, table, out_dtype=out_dtype)
    return _launch(problem, (patches, weight, scale, table), {}, target, config)


def run_images(
    images: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *,
    patch_size: int,
    out_dtype: str,
    target: Target | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The operator for patches that the kernel cuts from images: `run(patchify.rows(images))`.

    Args:
      images: [..., H, W, 3] uint8.
      weight, scale, table, out_dtype, target, config: as for `run`.
      patch_size: side of a patch in pixels.

    Returns:
      [..., S, N] of out_dtype, S = (H // patch_size) * (W // patch_size).
    """
    H, W, channels = images.shape[-3:]
    shape = rows_shape(images.shape, patch_size)
    patches = jax.ShapeDtypeStruct(shape, weight.dtype)
    problem = Problem.of(patches, weight, scale, table, out_dtype=out_dtype)
    line, patch_line = W * channels, patch_size * channels
    images_as = dict(
        IMAGES=True,
        K=patch_size * patch_line,
        GRID_W=W // patch_size,
        GRID=shape[-2],
        PATCH=patch_size,
        PATCH_LINE=patch_line,
        LINE=line,
        IMAGE=H * line,
        VECTOR=math.gcd(MOST_VECTOR, patch_line, line),
    )
    return _launch(problem, (images, weight, scale, table), images_as, target, config)


def _launch(problem: Problem, operands, images_as: dict, target, config) -> jax.Array:
    """Calls the kernel for a problem.

    Args:
      problem: of patches, also where there are images.
      operands: patches or images, weight, scale, table.
      images_as: the kernel's arguments that say how patches lie in images; empty for patches.
      target: as in `run`, as is config.
    """
    tiling.check_operands(problem)
    _check_rows(problem)
    # An export holds code for one compute capability: this process's, if it has a GPU.
    targets = (target, Target.of(default_device()))
    capability = next((t.compute_capability for t in targets if t and t.compute_capability), OLDEST)
    widen = widens(problem.dtype, capability)
    config = config or choose_config(problem, capability, images_as.get("VECTOR"))
    if widen:
        operands = tuple(
            lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == problem.dtype else x
            for x in operands
        )
    K, period = problem.patches[-1], tiling.table_period(problem)
    workers = config.workers(problem, capability)
    names = ("GRID_W", "GRID", "PATCH", "PATCH_LINE", "LINE", "IMAGE", "VECTOR")
    arguments = dict.fromkeys(names, 1) | dict(IMAGES=False, K=K) | images_as

    def compute(M, first, weight, scale, table):
        # Tiles of a run lie alike in their images, also where they have no rows of a table.
        repeats = period if period > 1 else arguments["GRID"]
        runs = schedule.runs(M, repeats, config.tile_m, workers)
        return _call()(
            first.reshape(-1) if images_as else first.reshape(M, K),
            *(weight, scale, table.reshape(-1, problem.N), jnp.asarray(runs)),
            out=jax.ShapeDtypeStruct((M, problem.N), problem.out_dtype),
            grid=workers * config.slices(problem),
            num_warps=config.warps,
            num_stages=config.stages,
            compute_capability=10 * capability[0] + capability[1],
            **arguments,
            M=M,
            N=problem.N,
            K_PADDED=K,
            PERIOD=period,
            RUNS=runs.shape[1],
            DTYPE=problem.dtype,
            WIDEN=widen,
            HAS_TABLE=table.ndim > 1,
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            TILE_K=config.step_bytes // jnp.dtype(problem.dtype).itemsize,
            PARTS=config.parts,
            STAGES=config.stages,
        )

    return tiling.in_rows(problem, operands, compute)


@functools.cache
def _call():
    """jax-triton's call of the kernel, whatever it names what comes out."""
    jax_triton = importlib.import_module("jax_triton")
    kernel = importlib.import_module(f"{__package__}.triton_kernel").patch_embed
    named = inspect.signature(jax_triton.triton_call).parameters
    out_name = "out_type" if "out_type" in named else "out_shape"

    def call(*operands, out, **options):
        return jax_triton.triton_call(*operands, kernel=kernel, **{out_name: out}, **options)

    return call
