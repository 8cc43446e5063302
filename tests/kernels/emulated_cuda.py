"""The hand-written kernels whose PTX is executed, and how: compiled by nvcc, run on a CPU."""

import dataclasses
import functools
import math

import emulated
import jax.numpy as jnp
import numpy as np
from knobs import instance
from ptx_emulator import cuda
from ptx_emulator.machine import Machine
from ptx_emulator.memory import POISON, GlobalMemory
from ptx_emulator.tma import TensorMap

from benchmarks import cuda_launch
from pallas_patch_embed.backends import cuda as cuda_backend
from pallas_patch_embed.backends import schedule, tiles
from pallas_patch_embed.backends.cuda import SPELLED
from pallas_patch_embed.problem import Problem

# Blocks of a launch: so few that there are more tiles than workers.
MULTIPROCESSORS = {90: 2, 100: emulated.MULTIPROCESSORS}
THREADS = 384

BF16, FP8, INT8 = "bfloat16", "float8_e4m3fn", "int8"


@dataclasses.dataclass(frozen=True)
class Case:
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
    blocks: int = 1
    # Of a kernel that is not built: the members of `Tuning` that differ.
    tuning: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def config(self) -> cuda_backend.Config:
        """Of a kernel that is built."""
        return cuda_backend.Config(
            *(self.name, self.capability, SPELLED[self.dtype], SPELLED[self.out_dtype]),
            *(self.table != "none", self.tile_m, self.tile_n, self.rows, self.blocks),
            *(self.slots, self.stream_weight, True),
        )

    @property
    def source(self) -> str:
        """Of a kernel with another tuning."""
        return instance(
            *(SPELLED[self.dtype], SPELLED[self.out_dtype]),
            "offset" if self.table == "none" else "table",
            *(self.tile_n, self.blocks, self.slots),
            "streamed" if self.stream_weight else "stationary",
            **self.tuning,
        )

    @property
    def buffers(self) -> int:
        """Of a storing warp of the Blackwell kernel."""
        return self.tuning.get("kStagingBuffers", 2)

    @property
    def name(self) -> str:
        """Of the kernel."""
        if self.tuning:
            return "chosen"
        columns = "offset" if self.table == "none" else "table"
        weight = "streamed" if self.stream_weight else "stationary"
        return (
            f"patch_embed_sm{self.capability}_{SPELLED[self.dtype]}_{SPELLED[self.out_dtype]}_{columns}_"
            f"{self.tile_n}x{self.rows}_b{self.blocks}_s{self.slots}_{weight}"
        )

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return (2 if self.capability == 90 else self.blocks) * self.rows

    @property
    def store_n(self) -> int:
        """Columns of a TMA store of the Blackwell kernel: rows of 128 bytes, or of 64."""
        itemsize = jnp.dtype(self.out_dtype).itemsize
        return (64 if self.tile_n // 2 * itemsize % 128 else 128) // itemsize


streamed = functools.partial(Case, rows=128, stream_weight=True)

CASES = {
    "float8": Case((5, 73, 256), 192, FP8, "shared", 192, 10),
    "int8": Case((5, 73, 256), 192, INT8, "shared", 192, 10),
    "float8, two slices": Case((9, 97, 256), 256, FP8, "shared", 128, 8),
    "float8, more chunks than slots": Case((3, 97, 1152), 64, FP8, "shared", 64, 8),
    "bfloat16, many slots": Case((47, 1, 256), 64, BF16, "none", 64, 16),
    "few rows": Case((1, 47, 256), 64, INT8, "shared", 64, 8),
    "a phase change in a run": Case((16, 97, 128), 64, INT8, "shared", 64, 8),
    "tables of their own": Case((5, 75, 128), 64, FP8, "per image", 64, 8),
    "float32": Case((5, 73, 256), 128, INT8, "shared", 128, 8, out_dtype="float32"),
    "float32, no table": Case((5, 73, 256), 192, FP8, "none", 192, 10, out_dtype="float32"),
    "bfloat16, streamed": streamed((9, 73, 192), 192, BF16, "shared", 192, 5),
    "int8, streamed": streamed((9, 73, 256), 128, INT8, "shared", 128, 6),
    "float8, streamed, held": streamed((5, 73, 1792), 64, FP8, "shared", 64, 8),
    "int8, streamed, K = 2304": streamed((5, 73, 2304), 192, INT8, "shared", 192, 5),
    "streamed, tables of their own, float32": streamed(
        (5, 131, 384), 192, INT8, "per image", 192, 5, out_dtype="float32"
    ),
    "bfloat16, streamed, held": Case((9, 73, 576), 192, BF16, "shared", 192, 7, stream_weight=True),
    "bfloat16, streamed, nine slots": Case(
        (3, 73, 704), 128, BF16, "shared", 128, 9, stream_weight=True
    ),
    "streamed, no table": streamed((5, 131, 128), 192, BF16, "none", 192, 5),
}


# The slots of the Blackwell kernels that are built: of two blocks, and of one, for bytes and for
# bfloat16. For one block there are slices of 64 columns alone.
STATIONARY = {256: (4, None), 192: (5, None), 128: (7, 4), 64: (8, 7)}, {64: (7, 4)}
STREAMED = {256: (5, 5), 192: (5, 5), 128: (6, 6), 64: (8, 8)}, {64: (6, 6)}


def blackwell(case: emulated.Case) -> Case:
    """The operands of a case of the Pallas kernel, and the kernel here that is most like it."""
    config = case.chosen
    single = not config.collective
    tile_n = 64 if single else config.tile_n
    slots = (STREAMED if config.stream_weight else STATIONARY)[single][tile_n][case.dtype == BF16]
    return Case(
        case.patches,
        # Two slices show what six do.
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
    if case.backend == "mosaic_sm100"
}
CASES["Blackwell, two blocks, streamed weight, slots and accumulators used again"] = Case(
    *((20, 97, 384), 128, FP8, "none", 128, 6),
    rows=128,
    stream_weight=True,
    out_dtype="float32",
    capability=100,
    blocks=2,
)


def compiled(case: Case, *options: str) -> str:
    """The PTX of a kernel that is built."""
    return cuda_launch.compiled(case.config, f"sm_{case.capability}a", "-ptx", *options).decode()


def tensor_maps(case, M, K, patches, weight, y):
    """The maps of patches, weight and y at these addresses (patch_embed_sm90.h and 100)."""
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

    first = matrix("patches", patches, itemsize, M, K, (inner, case.rows))
    if case.capability == 100:
        return (
            first,
            matrix("weight", weight, itemsize, case.N, K, (inner, case.tile_n // case.blocks)),
            matrix("y", y, out_itemsize, M, case.N, (case.store_n, 32)),
        )
    vector = 16 // out_itemsize
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
    # The Hopper kernel does not read the third one.
    return first, second, first


def shared_bytes(case, chunks):
    """What `Shared::bytes` says."""
    ring = case.slots * case.rows * tiles.ROW_BYTES
    weight_slots = case.slots
    if case.capability == 90:
        room = 227 * 1024 - ring - 2048
        weight_slots = room // (case.tile_n * tiles.ROW_BYTES)
        barriers = 2 * case.slots + 3 + (weight_slots if case.stream_weight else 0)
        rest = 2 * 4 * case.tile_n + 8 * barriers
    else:
        staged = case.rows * case.store_n * jnp.dtype(case.out_dtype).itemsize
        rest = 2 * case.buffers * staged + 1024
    parts = weight_slots if case.stream_weight else chunks
    return -(-(ring + rest) // 1024) * 1024 + parts * case.tile_n // case.blocks * tiles.ROW_BYTES


def run(ptx: str, case: Case, operands, stamps=None, **options) -> tuple[np.ndarray, Machine]:
    """The operator by a kernel on the emulator, and the machine that ran it.

    Fills the `stamps` of a timeline build.
    """
    problem = Problem.of(*operands, out_dtype=case.out_dtype)
    M, K = math.prod(case.patches[:-1]), case.patches[-1]
    slices, period = case.N // case.tile_n, problem.table_period
    most = MULTIPROCESSORS[case.capability] // case.blocks // slices
    workers = max(1, min(most, -(-M // case.tile_m)))
    runs = schedule.segments(M, period, case.tile_m, workers)
    memory = GlobalMemory()
    patches, weight, scale, table, run_table = (
        memory.allocate(np.asarray(x), name)
        for x, name in zip((*operands, runs), ("patches", "weight", "scale", "table", "runs"))
    )
    result = (M, case.N), jnp.dtype(case.out_dtype)
    out = memory.allocate(np.full(math.prod(result[0]) * result[1].itemsize, POISON, np.uint8), "y")
    chunks = tiles.chunks(problem)
    traced = [] if stamps is None else [np.uint64(memory.allocate(stamps, "stamps"))]
    machine = cuda.prepare(
        ptx,
        case.name,
        [*tensor_maps(case, M, K, patches, weight, out)]
        + [*map(np.uint64, (scale, table, out, run_table))]
        + [np.int32(x) for x in (M, case.N, chunks, period, runs.shape[1])]
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
