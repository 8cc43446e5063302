"""The PTX of the hand-written kernels, executed: results equal XLA's, whatever the schedule."""

import dataclasses
import functools
import math
import re
import shutil
import subprocess
from pathlib import Path

import emulated as emulated_kernels
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_bit_equal
from interpreter import draw_operands
from knobs import instance
from ptx_emulator import cuda
from ptx_emulator.errors import EmulatorError
from ptx_emulator.memory import POISON, GlobalMemory
from ptx_emulator.tma import TensorMap

from benchmarks import cuda_launch
from benchmarks.timeline import EVENTS, read_stamps
from pallas_patch_embed.backends import cuda_ffi, schedule, tiling, xla
from pallas_patch_embed.problem import Problem

FFI = Path(__file__).parent.parent / "ffi"
OPTIONS = ("-std=c++17", "-O3", "-ptx")

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")

# Blocks of a launch: so few that there are more tiles than workers.
MULTIPROCESSORS = {90: 2, 100: emulated_kernels.MULTIPROCESSORS}
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
    capability: int = 90
    blocks: int = 1
    # Of a kernel that is not built: the template's arguments behind those of a config.
    knobs: tuple = ()

    @property
    def source(self) -> str:
        """Of a kernel with knobs."""
        return instance(
            *(SHORT[self.dtype], SHORT[self.out_dtype]),
            "offset" if self.table == "none" else "table",
            *(self.tile_n, self.blocks, self.slots),
            "streamed" if self.stream_weight else "stationary",
            *self.knobs,
        )

    @property
    def buffers(self) -> int:
        """Of a storing warp of the Blackwell kernel."""
        return self.knobs[2] if len(self.knobs) > 2 else 2

    @property
    def name(self) -> str:
        """Of the kernel."""
        if self.knobs:
            return "chosen"
        columns = "offset" if self.table == "none" else "table"
        weight = "streamed" if self.stream_weight else "stationary"
        return (
            f"patch_embed_sm{self.capability}_{SHORT[self.dtype]}_{SHORT[self.out_dtype]}_{columns}_"
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


# The slots of the Blackwell kernels that are built: of two blocks, and of one, for bytes and for
# bfloat16. For one block there are slices of 64 columns alone.
STATIONARY = {256: (4, None), 192: (5, None), 128: (7, 4), 64: (8, 7)}, {64: (7, 4)}
STREAMED = {256: (5, 5), 192: (5, 5), 128: (6, 6), 64: (8, 8)}, {64: (6, 6)}


def blackwell(case: emulated_kernels.Case) -> Case:
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
    for name, case in emulated_kernels.CASES.items()
    if case.backend == "mosaic_sm100"
}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """(capability, dtype) -> the PTX of its kernels."""

    @functools.cache
    def ptx(capability, dtype):
        path = tmp_path_factory.mktemp(f"{dtype}-{capability}") / "kernels.ptx"
        options = [*OPTIONS, f"-arch=sm_{capability}a", f"-DPATCH_EMBED_DTYPE={TYPE[dtype]}"]
        source = FFI / f"patch_embed_sm{capability}.cu"
        subprocess.run(["nvcc", *options, source, "-o", path], check=True)
        return path.read_text()

    return ptx


def tensor_maps(case, M, K, patches, weight, y):
    """The maps of patches, weight and y at these addresses (patch_embed_sm90.h and 100)."""
    itemsize, out_itemsize = (jnp.dtype(x).itemsize for x in (case.dtype, case.out_dtype))
    inner, row = tiling.ROW_BYTES // itemsize, K * itemsize

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
        dimensions=(K, 2, vector // 2, 4, case.N // group),
        strides=(itemsize, row, 2 * row, vector * row, group * row),
        box=(inner, 2, 1, 4, case.tile_n // group),
        swizzle=tiling.ROW_BYTES,
        name="weight",
    )
    # The Hopper kernel does not read the third one.
    return first, second, first


def shared_bytes(case, chunks):
    """What `Shared::bytes` says."""
    ring = case.slots * case.rows * tiling.ROW_BYTES
    if case.capability == 90:
        rest = 8 * case.tile_n + 8 * (2 * case.slots + 3)
    else:
        staged = case.rows * case.store_n * jnp.dtype(case.out_dtype).itemsize
        rest = 2 * case.buffers * staged + 1024
    weight_rows = (case.slots if case.stream_weight else chunks) * case.tile_n // case.blocks
    return -(-(ring + rest) // 1024) * 1024 + weight_rows * tiling.ROW_BYTES


def emulated(ptx, case, operands, stamps=None, **options):
    """The operator by the kernel on the emulator; fills the `stamps` of a timeline build."""
    problem = Problem.of(*operands, out_dtype=case.out_dtype)
    M, K = math.prod(case.patches[:-1]), case.patches[-1]
    slices, period = case.N // case.tile_n, tiling.table_period(problem)
    most = MULTIPROCESSORS[case.capability] // case.blocks // slices
    workers = max(1, min(most, -(-M // case.tile_m)))
    runs = schedule.runs(M, period, case.tile_m, workers)
    memory = GlobalMemory()
    patches, weight, scale, table, run_table = (
        memory.place(np.asarray(x), name)
        for x, name in zip((*operands, runs), ("patches", "weight", "scale", "table", "runs"))
    )
    result = (M, case.N), jnp.dtype(case.out_dtype)
    out = memory.place(np.full(math.prod(result[0]) * result[1].itemsize, POISON, np.uint8), "y")
    chunks = tiling.chunks(problem)
    traced = [] if stamps is None else [np.uint64(memory.place(stamps, "stamps"))]
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
    return memory.read(out, *result).reshape(*case.patches[:-1], case.N)


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla_whatever_the_schedule(compiled, name):
    case = CASES[name]
    operands = draw_operands(len(name), case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    ptx = compiled(case.capability, case.dtype)
    for order, seed in SCHEDULES:
        y = emulated(ptx, case, operands, schedule=order, seed=seed)
        assert_bit_equal(jnp.asarray(y), expected)


# What the warps of each role stamp, by warp: Event of ffi/timeline.cuh in letters, in its order.
LETTERS = "fFtLMPlcs"
FEED, MULTIPLY = "((fF){chunks})+", "(t(LM){chunks})+"
ROLES = {
    90: dict.fromkeys(range(8), "(l(t(LM){chunks}P(l?cs)+)+)+") | {8: FEED},
    100: {0: FEED, 1: MULTIPLY} | dict.fromkeys(range(4, 12), "(P(l(fcs)+)+)+"),
}


@pytest.mark.parametrize(
    "name",
    ["float8, two slices", "bfloat16, streamed", "Blackwell, two blocks, runs of several tiles"],
)
def test_a_timeline_build_stamps_what_each_warp_does(name):
    case = CASES[name]
    config = cuda_ffi.Config(
        *(case.name, case.capability, SHORT[case.dtype], SHORT[case.out_dtype]),
        *(case.table != "none", case.tile_n, case.rows, case.blocks, case.slots),
        *(case.stream_weight, True),
    )
    options = ("-ptx", "-DPATCH_EMBED_TIMELINE")
    ptx = cuda_launch.compiled(config, f"sm_{case.capability}a", *options).decode()
    operands = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    blocks = MULTIPROCESSORS[case.capability]
    stamps = np.zeros((blocks, THREADS // 32, cuda_launch.STAMPS), np.uint32)
    y = emulated(ptx, case, operands, stamps, schedule="random", seed=0)
    assert_bit_equal(jnp.asarray(y), xla.run(*operands, out_dtype=case.out_dtype))
    chunks = tiling.chunks(Problem.of(*operands, out_dtype=case.out_dtype))
    for block, warp in np.ndindex(stamps.shape[:2]):
        said = "".join(LETTERS[stamp % 16 - 1] for stamp in stamps[block, warp] if stamp)
        pattern = ROLES[case.capability].get(warp, "").replace("chunks", str(chunks))
        # The first block multiplies for both.
        idle = ROLES[case.capability].get(warp) == MULTIPLY and block % case.blocks
        assert re.fullmatch("" if idle else pattern, said), (block, warp, said)
    # The clock counts a warp's instructions.
    spans = read_stamps(stamps)
    assert len(spans) == np.count_nonzero(stamps) - np.count_nonzero(stamps[..., 0])
    assert all(0 < span.cycles < 100_000 for span in spans)
    assert {span.role for span in spans} == set(EVENTS)


# Knobs: columns of a load and of a step, buffers, stores of a group, release, stagger, held table.
tuned = functools.partial(Case, rows=128, capability=100)

TUNED = {
    "two blocks, table for each tile": tuned(
        *((5, 97, 256), 128, INT8, "shared", 128, 3),
        blocks=2,
        out_dtype="float32",
        knobs=(16, 32, 4, 1, "Release::kStored", 40, "false"),
    ),
    "two blocks, stores together": tuned(
        *((5, 97, 128), 256, FP8, "none", 256, 2), blocks=2, knobs=(64, 128, 2, 2)
    ),
    "one block, one buffer": tuned(
        *((5, 97, 128), 64, BF16, "per image", 64, 2),
        knobs=(32, 32, 1, 1, "Release::kLoaded", 25),
    ),
}


def compile_source(source, folder, patched=None):
    """The PTX of a kernel; `patched` takes the place of patch_embed_sm100.cu."""
    (folder / "kernel.cu").write_text(source)
    if patched:
        (folder / "patch_embed_sm100.cu").write_text(patched)
    command = ["nvcc", *OPTIONS, "-arch=sm_100a", f"-I{FFI}", folder / "kernel.cu"]
    subprocess.run([*command, "-o", folder / "kernel.ptx"], check=True)
    return (folder / "kernel.ptx").read_text()


@pytest.mark.parametrize("name", TUNED)
def test_a_kernel_with_other_knobs_equals_xla(tmp_path, name):
    case = TUNED[name]
    operands = draw_operands(len(name), case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    ptx = compile_source(case.source, tmp_path)
    for order, seed in SCHEDULES:
        y = emulated(ptx, case, operands, schedule=order, seed=seed)
        assert_bit_equal(jnp.asarray(y), expected)


# Deliberate bugs in the Blackwell kernel: what is replaced by what, and what the emulator says.
SMALL = tuned((7, 256, 256), 64, INT8, "shared", 64, 3, blocks=2, knobs=(32,))

BUGS = {
    "no wait for a free slot": (
        "ptx::mbarrier_wait(shared_.freed[entry.slot], entry.parity ^ 1);\n        timeline_",
        "timeline_",
        "does not expect them",
    ),
    "no wait for patches": (
        "ptx::mbarrier_wait(shared_.filled[entry.slot], entry.parity);",
        "",
        "tcgen05.mma .* reads what was written",
    ),
    "no wait for a free accumulator": (
        "ptx::mbarrier_wait(shared_.read[accumulator.index], accumulator.parity ^ 1);",
        "",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no wait for products": (
        "ptx::mbarrier_wait(shared_.multiplied[accumulator.index], accumulator.parity);",
        "",
        "accumulator of block",
    ),
    "no wait for a load of tensor memory": (
        "    ptx::tcgen05_wait_ld();\n",
        "",
        "used before tcgen05.wait::ld",
    ),
    "no wait for a store's read": (
        "if (elected) ptx::cp_async_bulk_wait_group_read<buffers / group - 1>();",
        "",
        "stmatrix overwrites what is read",
    ),
    "no fence before a store": (
        "          ptx::fence_proxy_async();\n",
        "",
        "without a fence.proxy.async",
    ),
    "no fence before the release": (
        "bool elected) {\n    ptx::tcgen05_fence_before_thread_sync();",
        "bool elected) {",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no fence behind the release": (
        "accumulator.parity ^ 1);\n      ptx::tcgen05_fence_after_thread_sync();",
        "accumulator.parity ^ 1);",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no fence behind the products": (
        "accumulator.parity);\n      ptx::tcgen05_fence_after_thread_sync();",
        "accumulator.parity);",
        "tcgen05.ld reads an accumulator",
    ),
    "no fence of the barriers": ("    ptx::fence_mbarrier_init();\n", "", "unfenced mbarrier.init"),
    "arrivals of one block are expected": (
        "blocks * kStoringWarps",
        "kStoringWarps",
        "nothing can go on|does not expect them",
    ),
    "bytes of one block are expected": (
        "blocks * bytes",
        "bytes",
        "nothing can go on|bytes are missing",
    ),
    "the other block's half of the weight": (
        "column_ + rank_ * kWeightRows",
        "column_",
        "results differ",
    ),
    "the wrong accumulator": (
        "accumulator.index * tile_n;\n      for",
        "0;\n      for",
        "tcgen05.ld reads an accumulator",
    ),
    "the wrong rows of the table": (
        " + rank_ * kRows + first_row;",
        " + first_row;",
        "results differ",
    ),
    "tensor memory is kept": (
        "if (warp == kAllocatingWarp) ptx::tcgen05_dealloc",
        "if (false) ptx::tcgen05_dealloc",
        "exits with tensor memory",
    ),
    "blocks leave alone": (
        "__syncwarp();\n    synchronise();\n    if (warp == kA",
        "if (warp == kA",
        "are not allocated|has exited",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_deliberate_bug_is_noticed(tmp_path, name):
    right, wrong, message = BUGS[name]
    source = (FFI / "patch_embed_sm100.cu").read_text()
    assert source.count(right) == 1
    ptx = compile_source(SMALL.source, tmp_path, source.replace(right, wrong))
    operands = draw_operands(0, SMALL.patches, SMALL.N, SMALL.dtype, SMALL.table)
    expected = np.asarray(xla.run(*operands, out_dtype=SMALL.out_dtype))
    said = []
    for order, seed in SCHEDULES:
        try:
            y = emulated(ptx, SMALL, operands, schedule=order, seed=seed)
            said += ["results differ"] if (y != expected).any() else []
        except EmulatorError as error:
            said.append(str(error))
    assert said and any(re.search(message, one) for one in said), said
