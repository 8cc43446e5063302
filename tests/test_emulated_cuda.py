"""The PTX of the hand-written kernels, executed: results equal XLA's, whatever the schedule."""

import dataclasses
import functools
import math
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_bit_equal
from interpreter import draw_operands
from ptx_emulator import cuda
from ptx_emulator.memory import POISON, GlobalMemory
from ptx_emulator.tma import TensorMap

from pallas_patch_embed.backends import schedule, tiling, xla
from pallas_patch_embed.problem import Problem

KERNELS = Path(__file__).parent.parent / "ffi" / "patch_embed_sm90.cu"
OPTIONS = ("-std=c++17", "-O3", "-ptx", "-arch=sm_90a")

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")

# Blocks of a launch: so few that there are more tiles than workers.
MULTIPROCESSORS = 2
THREADS = 384

# As the kernels' names and the compiler have the types.
SHORT = {"float8_e4m3fn": "e4m3", "int8": "i8", "bfloat16": "bf16", "float32": "f32"}
TYPE = {"float8_e4m3fn": "kFloat8E4M3FN", "int8": "kInt8", "bfloat16": "kBFloat16"}

SCHEDULES = (("eager", 0), ("late", 1), ("random", 2))

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

    @property
    def name(self) -> str:
        """Of the kernel."""
        columns = "offset" if self.table == "none" else "table"
        weight = "streamed" if self.stream_weight else "stationary"
        return (
            f"patch_embed_sm90_{SHORT[self.dtype]}_{SHORT[self.out_dtype]}_{columns}_"
            f"{self.tile_n}x{self.rows}_b1_s{self.slots}_{weight}"
        )


streamed = functools.partial(Case, rows=128, stream_weight=True)

CASES = {
    "float8": Case((5, 73, 256), 192, FP8, "shared", 192, 10),
    "int8": Case((5, 73, 256), 192, INT8, "shared", 192, 10),
    "float8, two slices": Case((9, 97, 256), 256, FP8, "shared", 128, 8),
    "float8, more chunks than slots": Case((3, 97, 1152), 64, FP8, "shared", 64, 8),
    "bfloat16, few slots": Case((3, 97, 384), 128, BF16, "shared", 128, 4),
    "bfloat16, many slots": Case((47, 1, 256), 64, BF16, "none", 64, 16),
    "few rows": Case((1, 47, 256), 64, INT8, "shared", 64, 8),
    "a phase change in a run": Case((16, 97, 128), 64, INT8, "shared", 64, 8),
    "tables of their own": Case((5, 75, 128), 64, FP8, "per image", 64, 8),
    "float32": Case((5, 73, 256), 128, INT8, "shared", 128, 8, out_dtype="float32"),
    "float32, no table": Case((5, 73, 256), 192, FP8, "none", 192, 10, out_dtype="float32"),
    "bfloat16, streamed": streamed((9, 73, 192), 192, BF16, "shared", 192, 5),
    "int8, streamed": streamed((9, 73, 256), 128, INT8, "shared", 128, 7),
    "float8, streamed, held": streamed((9, 73, 256), 64, FP8, "shared", 64, 9),
    "streamed, tables of their own, float32": streamed(
        (5, 131, 128), 192, INT8, "per image", 192, 5, out_dtype="float32"
    ),
    "streamed, no table": streamed((5, 131, 128), 192, BF16, "none", 192, 5),
}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """dtype -> the PTX of its kernels."""

    @functools.cache
    def ptx(dtype):
        path = tmp_path_factory.mktemp(dtype) / "kernels.ptx"
        subprocess.run(
            ["nvcc", *OPTIONS, f"-DPATCH_EMBED_DTYPE={TYPE[dtype]}", KERNELS, "-o", path],
            check=True,
        )
        return path.read_text()

    return ptx


def tensor_maps(case, M, K, patches, weight):
    """The maps of patches and weight at these addresses (patch_embed_sm90.h)."""
    itemsize = jnp.dtype(case.dtype).itemsize
    inner, row = tiling.ROW_BYTES // itemsize, K * itemsize
    vector = 16 // jnp.dtype(case.out_dtype).itemsize
    group = 4 * vector
    make = functools.partial(TensorMap, itemsize=itemsize, swizzle=tiling.ROW_BYTES)
    return (
        make(
            base=patches,
            dimensions=(K, M),
            strides=(itemsize, row),
            box=(inner, case.rows),
            name="patches",
        ),
        make(
            base=weight,
            dimensions=(K, 2, vector // 2, 4, case.N // group),
            strides=(itemsize, row, 2 * row, vector * row, group * row),
            box=(inner, 2, 1, 4, case.tile_n // group),
            name="weight",
        ),
    )


def shared_bytes(case, chunks):
    """What `Shared::bytes` says."""
    fixed = case.slots * case.rows * tiling.ROW_BYTES + 8 * case.tile_n + 8 * (2 * case.slots + 3)
    weight = (case.slots if case.stream_weight else chunks) * case.tile_n * tiling.ROW_BYTES
    return -(-fixed // 1024) * 1024 + weight


def emulated(ptx, case, operands, **options):
    """The operator by the kernel on the emulator."""
    problem = Problem.of(*operands, out_dtype=case.out_dtype)
    M, K = math.prod(case.patches[:-1]), case.patches[-1]
    slices, period = case.N // case.tile_n, tiling.table_period(problem)
    workers = max(1, min(MULTIPROCESSORS // slices, -(-M // (2 * case.rows))))
    runs = schedule.runs(M, period, 2 * case.rows, workers)
    memory = GlobalMemory()
    patches, weight, scale, table, run_table = (
        memory.place(np.asarray(x), name)
        for x, name in zip((*operands, runs), ("patches", "weight", "scale", "table", "runs"))
    )
    result = (M, case.N), jnp.dtype(case.out_dtype)
    out = memory.place(np.full(math.prod(result[0]) * result[1].itemsize, POISON, np.uint8), "y")
    patches, weight = tensor_maps(case, M, K, patches, weight)
    chunks = tiling.chunks(problem)
    machine = cuda.prepare(
        ptx,
        case.name,
        [patches, weight, patches, *map(np.uint64, (scale, table, out, run_table))]
        + [np.int32(x) for x in (M, case.N, chunks, period, runs.shape[1])],
        grid=(workers * slices, 1, 1),
        block=(THREADS, 1, 1),
        dynamic_shared=shared_bytes(case, chunks),
        memory=memory,
        **options,
    )
    machine.launch()
    return memory.read(out, *result).reshape(*case.patches[:-1], case.N)


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla_whatever_the_schedule(compiled, name):
    case = CASES[name]
    operands = draw_operands(len(name), case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    ptx = compiled(case.dtype)
    for order, seed in SCHEDULES:
        y = emulated(ptx, case, operands, schedule=order, seed=seed)
        assert_bit_equal(jnp.asarray(y), expected)
