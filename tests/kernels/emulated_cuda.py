"""The CUDA kernels whose PTX, compiled by nvcc, the emulator executes."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from benchmarks import cuda_launch
from pallas_patch_embed.backends import cuda as cuda_backend
from pallas_patch_embed.backends import schedule, tiles
from pallas_patch_embed.backends.cuda import SPELLED
from pallas_patch_embed.base.problem import Problem
from tests.kernels import emulated
from tests.kernels.knobs import instance
from tests.ptx_emulator import cuda
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.memory import POISON, GlobalMemory
from tests.ptx_emulator.tma import Im2colMap, TensorMap

# Number of multiprocessors of the emulated GPU, small enough for more tiles than workers, by
# compute capability; and number of threads of a block.
MULTIPROCESSORS = {90: 2, 100: emulated.MULTIPROCESSORS}
THREADS = 384

BF16, FP8, INT8 = "bfloat16", "float8_e4m3fn", "int8"


class Config(cuda_backend.CudaConfig):
    """A config that does not need the library, which may have been built from other sources."""

    @property
    def splits(self) -> int:
        return self.blocks if self.capability == 90 or "_split" in self.name else 1


@dataclasses.dataclass(frozen=True)
class CudaCase:
    """A kernel for small operands."""

    patches: tuple[int, ...]
    N: int
    dtype: str
    table: str
    tile_n: int
    slots: int
    rows: int = 64
    stream_weight: bool = False
    out_dtype: str = BF16
    capability: int = 90
    cooperative: bool = False
    blocks: int = 1
    # Number of blocks that split K; the others share the rows of a tile.
    splits: int = 1
    # Height and width of the images that the kernel cuts into patches.
    image: tuple[int, int] | None = None
    # Members of `Tuning` whose values differ from the built kernels.
    tuning: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def config(self) -> Config:
        """Returns the config, which is that of a built kernel if `tuning` is empty."""
        return Config(
            *(self.name, self.capability, self.source_dtype, SPELLED[self.out_dtype]),
            *(self.table != "none", self.tile_m, self.tile_n, self.rows),
            *(self.cooperative, self.blocks, self.slots, self.stream_weight, True),
        )

    @property
    def source(self) -> str:
        """Returns CUDA C++ of the kernel with this tuning."""
        return instance(
            *(self.source_dtype, SPELLED[self.out_dtype]),
            "offset" if self.table == "none" else "table",
            *(self.tile_n, self.sharing, self.slots),
            "streamed" if self.stream_weight else "stationary",
            **self.tuning,
        )

    @property
    def source_dtype(self) -> str:
        """Returns the dtype of patches or images, as a kernel's name spells it."""
        return cuda_backend.IMAGES if self.image else SPELLED[self.dtype]

    @property
    def buffers(self) -> int:
        """Returns the number of staging buffers of a storing warp of the Blackwell kernel."""
        of_library = 1 if self.tile_n == 256 and self.slots > 4 else 2
        return self.tuning.get("kStagingBuffers", of_library)

    @property
    def name(self) -> str:
        """Returns the kernel's name in the PTX."""
        if self.tuning:
            return "chosen"
        columns = "offset" if self.table == "none" else "table"
        weight = "streamed" if self.stream_weight else "stationary"
        return (
            f"patch_embed_sm{self.capability}_{self.source_dtype}_{SPELLED[self.out_dtype]}_"
            f"{columns}_{self.tile_n}x{self.rows}_{self.sharing}_s{self.slots}_{weight}"
        )

    @property
    def sharing(self) -> str:
        """Returns how the kernel's name says how blocks and warpgroups share a tile."""
        if self.cooperative:
            return "cooperative"
        return f"{'split' if self.capability == 100 and self.splits > 1 else 'b'}{self.blocks}"

    @property
    def tile_m(self) -> int:
        """Returns the number of rows of a tile."""
        return (2 if self.capability == 90 else self.blocks // self.splits) * self.rows

    @property
    def slot_rows(self) -> int:
        """Returns the number of rows of patches in a slot."""
        return (2 if self.cooperative else 1) * self.rows

    @property
    def weight_rows(self) -> int:
        """Returns the rows of the weight that a block of the Blackwell kernel loads."""
        return self.tile_n * self.splits // self.blocks

    @property
    def slot_row_bytes(self) -> int:
        """Returns the bytes of a row of patches in a slot: of K, or of lines of 48 bytes."""
        if not self.image:
            return tiles.ROW_BYTES
        # Two lines on Hopper; on Blackwell one line and a gap.
        return 64 if self.capability == 100 else 96

    @property
    def weight_row_bytes(self) -> int:
        """Returns the bytes of a row of the weight in one of its chunks."""
        return 64 if self.image and self.capability == 100 else tiles.ROW_BYTES

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of the weight. For images on Blackwell they are lines."""
        if self.image and self.capability == 100:
            return 16
        return self.patches[-1] * jnp.dtype(self.dtype).itemsize // tiles.ROW_BYTES

    @property
    def store_n(self) -> int:
        """Returns the columns of a TMA store of the Blackwell kernel: 128 or 64 bytes of a row."""
        itemsize = jnp.dtype(self.out_dtype).itemsize
        return (64 if self.tile_n // 2 * itemsize % 128 else 128) // itemsize


streamed = functools.partial(CudaCase, rows=128, stream_weight=True)


def split(
    patches: tuple[int, ...], N: int, dtype: str, table: str, blocks: int, **more
) -> CudaCase:
    """Makes a case of the Hopper kernel that splits K among the blocks of a cluster."""
    return CudaCase(patches, N, dtype, table, 64, 8, blocks=blocks, splits=blocks, **more)


def cooperative(patches: tuple[int, ...], N: int, dtype: str, table: str, tile_n: int, **more):
    """Makes a case of a Hopper kernel with cooperative warpgroups."""
    slots = 5 if dtype == BF16 and tile_n == 96 else 8
    return CudaCase(patches, N, dtype, table, tile_n, slots, cooperative=True, **more)


CASES = {
    "float8": CudaCase((5, 73, 256), 192, FP8, "shared", 192, 10),
    "int8": CudaCase((5, 73, 256), 192, INT8, "shared", 192, 10),
    "float8, two slices": CudaCase((9, 97, 256), 256, FP8, "shared", 128, 8),
    "float8, more chunks than slots": CudaCase((3, 97, 1152), 64, FP8, "shared", 64, 8),
    "bfloat16, many slots": CudaCase((47, 1, 256), 64, BF16, "none", 64, 16),
    "197 rows an image, as CLIP has": CudaCase((2, 197, 256), 192, INT8, "shared", 192, 10),
    "K = 1280, as Qwen2-VL has": CudaCase((2, 73, 1280), 64, INT8, "none", 64, 10),
    "few rows": CudaCase((1, 47, 256), 64, INT8, "shared", 64, 8),
    "a phase change in a worker": CudaCase((16, 97, 128), 64, INT8, "shared", 64, 8),
    "per-image positions": CudaCase((5, 75, 128), 64, FP8, "per image", 64, 8),
    "float32": CudaCase((5, 73, 256), 128, INT8, "shared", 128, 8, out_dtype="float32"),
    "float32, no table": CudaCase((5, 73, 256), 192, FP8, "none", 192, 10, out_dtype="float32"),
    "bfloat16, streamed": streamed((9, 73, 192), 192, BF16, "shared", 192, 5),
    "int8, streamed": streamed((9, 73, 256), 128, INT8, "shared", 128, 6),
    "float8, streamed, some chunks stay": streamed((5, 73, 1792), 64, FP8, "shared", 64, 8),
    "int8, streamed, K = 2304": streamed((5, 73, 2304), 192, INT8, "shared", 192, 5),
    "streamed, per-image positions, float32": streamed(
        (5, 131, 384), 192, INT8, "per image", 192, 5, out_dtype="float32"
    ),
    "bfloat16, streamed, some chunks stay": CudaCase(
        (9, 73, 576), 192, BF16, "shared", 192, 7, stream_weight=True
    ),
    "bfloat16, streamed, nine slots": CudaCase(
        (3, 73, 704), 128, BF16, "shared", 128, 9, stream_weight=True
    ),
    "streamed, no table": streamed((5, 131, 128), 192, BF16, "none", 192, 5),
    "cooperative": cooperative((1, 100, 256), 64, BF16, "shared", 64),
    "cooperative, six tiles": cooperative((6, 128, 640), 192, BF16, "shared", 96),
    "cooperative, more chunks than slots": cooperative((3, 73, 1280), 64, FP8, "none", 64),
    "cooperative, float32": cooperative(
        (3, 73, 256), 192, INT8, "per image", 96, out_dtype="float32"
    ),
    "split by 2": split((1, 64, 256), 64, BF16, "shared", 2),
    "split by 2, a chunk more in one block": split((3, 73, 640), 64, INT8, "shared", 2),
    "split by 4, two slices": split((1, 100, 640), 128, FP8, "none", 4),
    "split by 4, ten chunks": split((2, 73, 640), 64, BF16, "per image", 4),
    "split by 8": split((1, 64, 512), 64, BF16, "shared", 8),
    "split by 8, float32": split((1, 130, 1152), 64, INT8, "shared", 8, out_dtype="float32"),
    "split by 2, float32, no table": split((5, 100, 512), 64, FP8, "none", 2, out_dtype="float32"),
    "split by 4, few rows": split((1, 5, 384), 64, BF16, "none", 4, out_dtype="float32"),
    "split by 2, six tiles": split((6, 128, 128), 64, BF16, "shared", 2),
}


def of_images(
    images: int,
    grid: tuple[int, int],
    N: int,
    table: str,
    tile_n: int,
    out_dtype: str = BF16,
    **more,
) -> CudaCase:
    """Makes a case of the kernel that cuts images of `grid` patches itself."""
    more = dict(slots=13 if tile_n == 192 else 16) | more
    return CudaCase(
        *((images, math.prod(grid), 768), N, INT8, table, tile_n),
        out_dtype=out_dtype,
        image=(16 * grid[0], 16 * grid[1]),
        **more,
    )


# Cases with sides and widths of models (B/16, L/16, So400m/16, g-opt), combined pairwise with
# tables, outputs and odd numbers of images. In grids with an odd width, a row of a TMA box is a
# line of one patch instead of two. Further cases are images that are not square, and images of one
# patch, of two patches, or of fewer patches than a tile has rows.
IMAGES = {
    "224, 768, 192": of_images(3, (14, 14), 192, "shared", 192),
    "224, 768, two slices": of_images(1, (14, 14), 384, "none", 192, "float32"),
    "224, a table for each image": of_images(3, (14, 14), 192, "per image", 192, "float32"),
    "256, 1024, 128": of_images(1, (16, 16), 256, "shared", 128),
    "256, no table": of_images(2, (16, 16), 192, "none", 192),
    "256, 1152": of_images(1, (16, 16), 192, "per image", 192),
    "256, 64 columns": of_images(1, (16, 16), 64, "shared", 64, "float32"),
    "384, 768": of_images(1, (24, 24), 192, "shared", 192, "float32"),
    "384, 1024": of_images(1, (24, 24), 128, "none", 128),
    "384, 1536": of_images(1, (24, 24), 64, "per image", 64),
    "512, 1152": of_images(1, (32, 32), 192, "none", 192, "float32"),
    "512, 1024": of_images(1, (32, 32), 128, "shared", 128, "float32"),
    "240": of_images(1, (15, 15), 192, "shared", 192),
    "240, a table for each image": of_images(2, (15, 15), 128, "per image", 128, "float32"),
    "336, no table": of_images(1, (21, 21), 64, "none", 64),
    "432, 1152": of_images(1, (27, 27), 192, "none", 192, "float32"),
    "one patch": of_images(131, (1, 1), 192, "shared", 192),
    "one patch next to nothing": of_images(40, (5, 1), 64, "per image", 64),
    "not square": of_images(5, (7, 6), 192, "shared", 192),
    "two patches": of_images(9, (1, 2), 128, "shared", 128),
    "fewer patches than a warpgroup has": of_images(1, (5, 2), 64, "none", 64),
}
CASES |= {f"images, {name}": case for name, case in IMAGES.items()}


# Slots of the built Blackwell kernels, first for clusters of two blocks, then for single blocks,
# whose slices all have 64 columns: width of a slice -> (slots for one-byte dtypes, for bfloat16).
# With a bfloat16 result 192 columns have seven slots.
STATIONARY = {256: (6, None), 192: (5, None), 128: (7, 4), 64: (8, 7)}, {64: (7, 4)}
STREAMED = {256: (5, 5), 192: (5, 5), 128: (6, 6), 64: (8, 8)}, {64: (6, 6)}


def blackwell(case: emulated.PallasCase) -> CudaCase:
    """Returns the CUDA kernel that is most similar to a Pallas kernel, for the same operands."""
    config = case.chosen
    single = not config.collective
    tile_n = 64 if single else config.tile_n
    slots = (STREAMED if config.stream_weight else STATIONARY)[single][tile_n][case.dtype == BF16]
    if tile_n == 192 and not config.stream_weight and case.out_dtype == BF16:
        slots = 7
    return CudaCase(
        case.patches,
        # Two slices are enough, because all slices are computed in the same way.
        min(case.N, 2 * tile_n),
        case.dtype,
        case.table,
        tile_n,
        slots,
        rows=128,
        stream_weight=config.stream_weight,
        out_dtype=case.out_dtype,
        capability=100,
        blocks=config.blocks,
    )


CASES |= {
    f"Blackwell, {name}": blackwell(case)
    for name, case in emulated.CASES.items()
    if case.backend == "mosaic_sm100" and not case.epilogue
}
CASES["Blackwell, two blocks, streamed weight, slots and accumulators used again"] = CudaCase(
    *((20, 97, 384), 128, FP8, "none", 128, 6),
    rows=128,
    stream_weight=True,
    out_dtype="float32",
    capability=100,
    blocks=2,
)


# Two chunks of the weight stay, and four are streamed.
SOME_STAY = CudaCase(
    *((5, 200, 768), 256, INT8, "shared", 256, 5),
    rows=128,
    stream_weight=True,
    capability=100,
    blocks=2,
)
CASES["Blackwell, two blocks, some chunks of a streamed weight stay"] = SOME_STAY
CASES["Blackwell, two blocks, four slots and two buffers"] = CudaCase(
    *((5, 97, 256), 256, INT8, "shared", 256, 4), rows=128, capability=100, blocks=2
)


def blackwell_split(
    patches: tuple[int, ...], N: int, dtype: str, table: str, blocks: int, **more
) -> CudaCase:
    """Makes a case of the Blackwell kernel that splits K among the blocks of a cluster."""
    more |= dict(rows=128, capability=100, blocks=blocks, splits=blocks)
    return CudaCase(patches, N, dtype, table, 64, 4, **more)


CASES |= {
    f"Blackwell, split by {name}": case
    for name, case in {
        "2": blackwell_split((1, 64, 256), 64, BF16, "shared", 2),
        "2, a chunk more in one block": blackwell_split((3, 73, 640), 64, INT8, "shared", 2),
        "2, more chunks than slots": blackwell_split((2, 97, 1536), 64, INT8, "none", 2),
        "4, two slices": blackwell_split((1, 100, 640), 128, FP8, "none", 4),
        "4, ten chunks": blackwell_split((2, 73, 640), 64, BF16, "per image", 4),
        "8": blackwell_split((1, 64, 512), 64, BF16, "shared", 8),
        "8, float32": blackwell_split((1, 130, 1152), 64, INT8, "shared", 8, out_dtype="float32"),
        "2, float32, no table": blackwell_split(
            (5, 100, 512), 64, FP8, "none", 2, out_dtype="float32"
        ),
        "4, few rows": blackwell_split((1, 5, 384), 64, BF16, "none", 4, out_dtype="float32"),
        "2, slots and accumulators used again": blackwell_split(
            (8, 128, 256), 64, BF16, "shared", 2
        ),
    }.items()
}


def blackwell_images(*described, blocks: int = 2, **more) -> CudaCase:
    """Makes a case of the Blackwell kernel; `described` are the arguments of `of_images`."""
    tile_n, out_dtype = (*described[4:], BF16)[:2]
    slots = {256: 8, 192: 12 if out_dtype == BF16 else 8, 128: 12, 64: 16 if blocks == 2 else 12}
    more = dict(slots=slots[tile_n], rows=128, capability=100, blocks=blocks) | more
    return of_images(*described, **more)


# As for Hopper: sides and widths of models, with tables, outputs, numbers of images, images that
# are not square or have fewer patches than a tile has rows; and tiles that are ragged or have no
# rows for one block of a pair.
CASES |= {
    f"Blackwell, images, {name}": case
    for name, case in {
        "224, 256 columns": blackwell_images(3, (14, 14), 256, "shared", 256),
        "224, two slices": blackwell_images(1, (14, 14), 384, "none", 192, "float32"),
        "224, a table for each image": blackwell_images(
            3, (14, 14), 256, "per image", 256, "float32"
        ),
        "224, 192 columns": blackwell_images(2, (14, 14), 192, "shared", 192),
        "256, no table": blackwell_images(2, (16, 16), 256, "none", 256),
        "384": blackwell_images(1, (24, 24), 128, "shared", 128, "float32"),
        "512": blackwell_images(1, (32, 32), 64, "none", 64),
        "240": blackwell_images(2, (15, 15), 128, "per image", 128),
        "432, one block": blackwell_images(1, (27, 27), 64, "shared", 64, blocks=1),
        # With fewer slots than the built kernel has, the last slot is not that of the last line.
        "slots and accumulators used again": blackwell_images(
            11, (8, 16), 64, "shared", 64, slots=12
        ),
        "one image, one block, two slices": blackwell_images(
            1, (14, 14), 128, "shared", 64, "float32", blocks=1
        ),
        "one patch": blackwell_images(300, (1, 1), 64, "shared", 64),
        "one patch next to nothing": blackwell_images(40, (5, 1), 64, "per image", 64),
        "not square": blackwell_images(7, (7, 6), 192, "shared", 192),
        "two patches": blackwell_images(9, (1, 2), 128, "none", 128, "float32"),
        "fewer patches than a block has rows": blackwell_images(1, (5, 2), 64, "none", 64),
    }.items()
}


def compiled(case: CudaCase, *options: str) -> str:
    """Compiles a built kernel to PTX."""
    return cuda_launch.compiled(case.config, f"sm_{case.capability}a", "-ptx", *options).decode()


def tensor_maps(case, M, K, patches, weight, y):
    """Makes the tensor maps of patches, weight and y (patch_embed_sm90.h, patch_embed_sm100.h)."""
    itemsize, out_itemsize = (jnp.dtype(x).itemsize for x in (case.dtype, case.out_dtype))
    inner, row = tiles.ROW_BYTES // itemsize, K * itemsize

    def matrix(name, base, size, rows, columns, box):
        return TensorMap(
            base=base,
            itemsize=size,
            dimensions=(columns, rows),
            strides=(size, columns * size),
            box=box,
            swizzle=box[0] * size,
            name=name,
        )

    blackwell = case.capability == 100
    if case.image:
        _, width = case.image
        pair = 1 if blackwell else cut_sizes(case)[1]
        first = Im2colMap(
            base=patches,
            itemsize=1,
            dimensions=(48 * pair, width // 16 // pair, 16, M * 16 // width),
            strides=(1, 48 * pair, 3 * width, 16 * 3 * width),
            box=(48 * pair, case.rows // pair),
            swizzle=64 if blackwell else 0,
            name="images",
            lower=(0, 0),
            upper=(0, -15),
        )
    else:
        first = matrix("patches", patches, itemsize, M, K, (inner, case.slot_rows))
    if blackwell:
        second = matrix("weight", weight, itemsize, case.N, K, (inner, case.weight_rows))
        if case.image:
            # The last 16 bytes of a box's rows are outside of the tensor, and therefore zero.
            second = TensorMap(
                base=weight,
                itemsize=1,
                dimensions=(48, case.N, 16),
                strides=(1, K, 48),
                box=(64, case.weight_rows, 1),
                swizzle=64,
                name="weight",
            )
        return (
            first,
            second,
            # Kernels that split K do not read this map.
            matrix("y", y, out_itemsize, M, case.N, (case.store_n, 32)),
        )
    vector = 4 if case.splits > 1 else 16 // out_itemsize
    group = 4 * vector
    second = TensorMap(
        base=weight,
        itemsize=itemsize,
        dimensions=(K, 2, 4, case.N // group, vector // 2),
        strides=(itemsize, row, vector * row, group * row, 2 * row),
        box=(inner, 2, 4, case.tile_n // group, vector // 2),
        swizzle=tiles.ROW_BYTES,
        name="weight",
    )
    # The Hopper kernel does not read its third map.
    return first, second, first


def shared_bytes(case, chunks):
    """Returns the bytes of dynamic shared memory of a block, as `Shared::bytes` computes them."""
    ring = case.slots * case.slot_rows * case.slot_row_bytes
    splits, weight_slots = case.splits, case.slots
    # Two buffers for the sums of a tile, each with a barrier for each of 8 warps.
    sums = 2 * (4 * case.tile_m * case.tile_n + 8 * 8) if splits > 1 else 0
    if case.capability == 90:
        room = 227 * 1024 - ring - 2048
        weight_slots = room // (case.tile_n * tiles.ROW_BYTES)
        barriers = 2 * case.slots + 3 + (weight_slots if case.stream_weight else 0)
        rest = 2 * 4 * case.tile_n + 8 * barriers + sums
    elif splits > 1:
        # Nothing is staged. The last member is the address of tensor memory.
        rest = sums + 8 * (2 * case.slots + 4) + 4
    else:
        staged = case.rows * case.store_n * jnp.dtype(case.out_dtype).itemsize
        # The barriers and, with images, the corrections precede the address of tensor memory.
        barriers = 8 * (2 * case.slots + 4) + 4
        rest = 2 * case.buffers * staged + barriers + (4 * case.tile_n if case.image else 0)
    # If K is split, each block has a share of its chunks. The blocks of a pair share the columns.
    parts = weight_slots if case.stream_weight else -(-chunks // splits)
    part = case.tile_n * splits // case.blocks * case.weight_row_bytes
    used = -(-(ring + rest) // 1024) * 1024 + parts * part
    if case.capability == 100 and case.stream_weight:
        # The first chunks of a streamed weight stay in what is left of 227 KiB.
        used += min(chunks, (227 * 1024 - used) // part) * part
    return used


def cut_sizes(case: CudaCase) -> tuple[int, int]:
    """Returns the number of patches in a row of an image's grid, and in a row of a TMA box."""
    width = case.image[1] // 16 if case.image else 0
    return width, 1 if width % 2 else 2


def uncut(patches: np.ndarray, image: tuple[int, int]) -> np.ndarray:
    """Assembles uint8 images [B, H, W, 3] from int8 patches [B, S, 768]."""
    height, width = image
    levels = (patches.astype(np.int16) + 128).astype(np.uint8)
    cut = levels.reshape(-1, height // 16, width // 16, 16, 16, 3)
    return np.ascontiguousarray(cut.swapaxes(2, 3).reshape(-1, height, width, 3))


def run(ptx: str, case: CudaCase, operands, stamps=None, **options) -> tuple[np.ndarray, Machine]:
    """Runs a kernel on the emulator; returns y and the machine.

    A timeline build fills `stamps`.
    """
    problem = Problem.of(*operands, out_dtype=case.out_dtype)
    M, K = math.prod(case.patches[:-1]), case.patches[-1]
    slices, period = case.N // case.tile_n, problem.table_period
    most = MULTIPROCESSORS[case.capability] // case.blocks // slices
    workers = max(1, min(most, -(-M // case.tile_m)))
    segments = schedule.segments(M, period, case.tile_m, workers)
    memory = GlobalMemory()
    first, *rest = map(np.asarray, operands)
    if case.image:
        first = uncut(first, case.image)
    patches, weight, scale, table, at_segments = (
        memory.allocate(x, name)
        for x, name in zip(
            (first, *rest, segments), ("patches", "weight", "scale", "table", "segments")
        )
    )
    result = (M, case.N), jnp.dtype(case.out_dtype)
    out = memory.allocate(np.full(math.prod(result[0]) * result[1].itemsize, POISON, np.uint8), "y")
    chunks = case.chunks
    traced = [] if stamps is None else [np.uint64(memory.allocate(stamps, "stamps"))]
    machine = cuda.prepare(
        ptx,
        case.config.symbol,
        [*tensor_maps(case, M, K, patches, weight, out)]
        + [*map(np.uint64, (scale, table, out, at_segments))]
        + [np.int32(x) for x in (M, case.N, chunks, period, segments.shape[1])]
        + [np.int32(x) for x in cut_sizes(case)]
        + traced,
        grid=(workers * slices * case.blocks, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(case.blocks, 1, 1),
        dynamic_shared=shared_bytes(case, chunks),
        memory=memory,
        **options,
    )
    machine.launch()
    for address in traced:
        stamps[:] = memory.read(int(address), stamps.shape, stamps.dtype)
    return memory.read(out, *result).reshape(*case.patches[:-1], case.N), machine
