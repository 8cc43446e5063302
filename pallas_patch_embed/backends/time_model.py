"""Predicts the time of a launch, by which the backends are ranked for a problem.

    time = launch + start * start + tile * tiles + wait * waits + store * stored
           + exchange * exchanges + encode * encoded
           + max(memory * moved, products * products, loads * loads, pixels * pixels)

`Work` has what a launch does, `Constants` what that costs. All constants but those of the Blackwell
kernels are fitted to times on an H100 and an H200 (`python -m benchmarks.time_model`, whose output
is docs/predictions.md). The fit prefers the right order of the backends to small errors, so a time
may be off by 10% on average. On other chips it is a prediction.
"""

import dataclasses

from pallas_patch_embed.backends.tiles import ROW_BYTES, Tiling, chunks
from pallas_patch_embed.base.chips import Chip
from pallas_patch_embed.base.problem import Problem

# The clock under load, as a part of the boost clock.
CLOCK = 0.92

# Bytes per cycle that a multiprocessor loads from the L2 cache. NVIDIA does not publish it.
LOADED = 72


@dataclasses.dataclass(frozen=True)
class Work:
    """What a launch does.

    Attributes that say so are for the multiprocessor with the most tiles. Times are in microseconds
    at the chip's peak rates.

    Attributes:
      moved: time to read and write all operands in the GPU's memory.
      products: time of a multiprocessor's products.
      loads: time of a multiprocessor to load patches and weights from the L2 cache.
      start: time to load the weight that stays and the patches of the first tile; XLA's time to
        read the sums of the products again.
      tiles: number of a multiprocessor's tiles.
      waits: sum over these tiles of the part of a tile for which the ring has no slots while the
        tile before is stored.
      stored: time to store the last tile, in thousands of elements.
      exchanges: number of tiles for which blocks exchange partial sums.
      pixels: time to load pixels, while products are computed.
      encoded: time to encode pixels, while nothing else happens.
      streamed: part of the weight that is loaded again for each tile.
    """

    moved: float
    products: float
    loads: float = 0.0
    start: float = 0.0
    tiles: float = 0.0
    waits: float = 0.0
    stored: float = 0.0
    exchanges: float = 0.0
    pixels: float = 0.0
    encoded: float = 0.0
    streamed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the work of a kernel costs.

    Attributes:
      launch: microseconds of a launch.
      start, loads, memory, pixels, encode: factors of the times of `Work`.
      tile, wait, exchange: microseconds of each.
      store: microseconds of a thousand elements.
      bfloat16, int8, float8: factors of the time of products.
      streamed: by what the factor of products is multiplied if all of the weight is streamed.
    """

    launch: float
    memory: float
    bfloat16: float
    int8: float
    float8: float
    start: float = 0.0
    tile: float = 0.0
    wait: float = 0.0
    store: float = 0.0
    exchange: float = 0.0
    loads: float = 0.0
    pixels: float = 0.0
    encode: float = 0.0
    streamed: float = 1.0

    def products(self, dtype: str) -> float:
        """Returns the factor of the time of products in this dtype of patches and weight."""
        return {"bfloat16": self.bfloat16, "int8": self.int8}.get(dtype, self.float8)


def microseconds(work: Work, constants: Constants, dtype: str) -> float:
    """Predicts the time of a launch."""
    c = constants
    return (
        c.launch
        + c.start * work.start
        + c.tile * work.tiles
        + c.wait * work.waits
        + c.store * work.stored
        + c.exchange * work.exchanges
        + c.encode * work.encoded
        + max(
            c.memory * work.moved,
            c.products(dtype) * (1 + (c.streamed - 1) * work.streamed) * work.products,
            c.loads * work.loads,
            c.pixels * work.pixels,
        )
    )


def moved(problem: Problem, chip: Chip) -> float:
    """Returns the microseconds to read all operands and write the result at the peak bandwidth."""
    row = chunks(problem) * ROW_BYTES
    source = problem.rows * row if problem.images is None else problem.pixels
    own_rows = problem.has_table and problem.table_period == problem.rows
    return (
        1e6
        * (source + problem.N * row + 2 * problem.rows * problem.N * (1 + own_rows))
        / (chip.bandwidth)
    )


def cycle(chip: Chip) -> float:
    """Returns the microseconds of a cycle under load."""
    return 1 / (1e3 * CLOCK * chip.clock)


def work_of(
    problem: Problem,
    chip: Chip,
    tiling: Tiling,
    *,
    tile_n: int,
    slots: int,
    rows: int,
    columns: int,
    passes: int = 1,
    splits: int = 1,
    streamed: float = 0.0,
    pixels: float = 0.0,
    encoded: float = 0.0,
) -> Work:
    """Returns the work of a tiled kernel.

    Args:
      problem: shapes and dtypes.
      chip: the GPU.
      tiling: tiles and workers.
      tile_n: columns of a tile.
      slots: slots of the ring, or stages of the pipeline.
      rows: rows of patches that a block loads for a pass over K.
      columns: rows of the weight that a block loads.
      passes: number of passes over K for a tile: two if warpgroups multiply in turns.
      splits: number of blocks among which K is split.
      streamed: part of the weight that is loaded again for each pass.
      pixels: cycles to load the pixels of one tile.
      encoded: cycles to encode them.
    """
    us = cycle(chip)
    resident = -(-tiling.thread_blocks // chip.multiprocessors)
    tiles = tiling.tiles_per_worker * resident
    K = chunks(problem) / splits
    bytes_of_tile = passes * (rows + columns * streamed) * K * ROW_BYTES
    elements = tiling.tile_m * tile_n
    return Work(
        moved=moved(problem, chip),
        products=tiles * elements * problem.K / tiling.blocks / chip.rate(problem.dtype) * us,
        loads=tiles * bytes_of_tile / LOADED * us,
        start=(rows + columns) * K * ROW_BYTES / LOADED * us,
        tiles=tiles,
        waits=tiles * max(0.0, min(1.0, (2 * K - slots) / K)),
        stored=elements / tiling.blocks / 1e3,
        exchanges=tiles * (splits > 1),
        pixels=tiles * pixels * us,
        encoded=tiles * encoded * us,
        streamed=streamed,
    )


def patchify(problem: Problem, chip: Chip) -> float:
    """Predicts the microseconds in which XLA cuts and encodes the images of a problem."""
    read, written = problem.pixels, problem.rows * chunks(problem) * ROW_BYTES
    return PATCHIFY_LAUNCH + 1e6 * PATCHIFY_MEMORY * (read + written) / chip.bandwidth


# The fitted constants.
CUDA_SM90 = Constants(
    launch=1.59,
    memory=1.164,
    bfloat16=0.8691,
    int8=1.123,
    float8=1.091,
    tile=0.3491,
    wait=0.407,
    store=0.04,
    exchange=2.007,
    loads=1.0,
    pixels=0.8,
    streamed=1.152,
)
MOSAIC_SM90 = Constants(
    launch=3.032,
    memory=1.349,
    bfloat16=1.41,
    int8=1.296,
    float8=1.282,
    start=0.1964,
    wait=0.1474,
    store=0.04,
    loads=1.0,
    streamed=0.9469,
)
TRITON = Constants(
    launch=1.373,
    memory=1.559,
    bfloat16=1.528,
    int8=1.821,
    float8=1.787,
    start=0.2575,
    tile=1.196,
    loads=1.0,
    encode=2.448,
)
XLA = Constants(launch=4.316, memory=1.925, bfloat16=2.197, int8=3.723, float8=2.918, start=0.4858)
PATCHIFY_LAUNCH, PATCHIFY_MEMORY = 1.59, 2.04

# Predictions: the constants of Hopper's kernels, but tiles wait in tensor memory to be stored, so
# that neither a tile nor its wait costs time. Pixels are assumed to be loaded as fast as on Hopper.
MOSAIC_SM100 = dataclasses.replace(MOSAIC_SM90, tile=0.0, wait=0.0, streamed=1.0)
CUDA_SM100 = dataclasses.replace(
    MOSAIC_SM100,
    launch=CUDA_SM90.launch,
    exchange=CUDA_SM90.exchange,
    pixels=CUDA_SM90.pixels,
)
