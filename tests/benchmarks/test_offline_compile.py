"""Registers, spills, memory and opcodes of the Pallas kernels, compiled without a GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.offline_compile import operands
from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic import SM90, SM100, sm90
from pallas_patch_embed.base.chips import B200, B300, H200
from pallas_patch_embed.base.problem import NAMED_SHAPES, VIT_SHAPES, Problem, named_shape
from tests.repository import ROOT

needs_compilers = pytest.mark.usefixtures("compilers")


def compile_offline(target, backend, shapes, dtype, out_dtype, table, images):
    """Runs `python -m benchmarks.offline_compile` for one target and returns its output."""
    arguments = [
        *("--target", target, "--backend", backend, "--shapes", *shapes, "--dtype", dtype),
        *("--out-dtype", out_dtype, "--table", table, "--images", str(images)),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.offline_compile", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def problem_of(name, dtype, out_dtype, table, images):
    return Problem.of(*operands(named_shape(name), images, dtype, table=table), out_dtype=out_dtype)


@needs_compilers
@pytest.mark.parametrize(
    "shape, images, dtype, out_dtype, table",
    [
        ("B/16 224", 4736, "float8_e4m3fn", "bfloat16", "shared"),
        ("B/16 224", 4736, "int8", "bfloat16", "shared"),
        ("B/16 224", 512, "float8_e4m3fn", "float32", "shared"),
        ("B/16 224", 4736, "bfloat16", "bfloat16", "shared"),
        ("B/16 224", 1, "bfloat16", "bfloat16", "shared"),
        ("B/16 224", 8, "bfloat16", "bfloat16", "shared"),
        ("L/16 256", 512, "float8_e4m3fn", "bfloat16", "none"),
        ("So400m/14 384", 512, "bfloat16", "float32", "shared"),
        ("g-opt/16 256", 512, "int8", "bfloat16", "shared"),
        ("B/32 256", 512, "float8_e4m3fn", "float32", "shared"),
        ("NaFlex So400m/16 256", 67, "float8_e4m3fn", "bfloat16", "per image"),
        ("CLIP L/14 336", 67, "int8", "bfloat16", "shared"),
        ("DINOv2 S/14 518", 67, "int8", "bfloat16", "shared"),
        ("Qwen2-VL/14 448", 67, "int8", "bfloat16", "none"),
        ("Qwen3-VL 8B/16 512", 67, "int8", "bfloat16", "shared"),
    ],
)
def test_the_Hopper_kernel_compiles_to_what_its_config_says(shape, images, dtype, out_dtype, table):
    problem = problem_of(shape, dtype, out_dtype, table, images)
    config = SM90.choose_config(problem, H200)
    found = compile_offline("h200", "mosaic_sm90", [shape], dtype, out_dtype, table, images)
    kernel = the_whole_program(found[shape], config.shared_memory_bytes(problem))
    loop = kernel["tile_loop"]
    K_bytes = problem.patches[-1] * (2 if dtype == "bfloat16" else 1)
    instruction = {"bfloat16": "HGMMA", "int8": "IGMMA", "float8_e4m3fn": "QGMMA"}[dtype]
    # A row of 128 bytes of K has four products of 32 bytes for 64 rows. If K has many of them, the
    # first and the last, a turn of a loop and what is left over are written out.
    chunks = K_bytes // 128
    most, in_turn = sm90.unrolled(problem)
    if chunks > most:
        chunks = 2 + in_turn + (chunks - 2) % in_turn
    products = 4 * chunks * config.rows // 64
    assert loop[instruction] == kernel["instructions"][instruction] == products
    # A thread writes 16 bytes at once. The loop has no other access to global (LD, LDG), shared
    # (LDS, LDSM) or local memory if table, scales and offsets fit into registers.
    tile_bytes = config.rows * config.tile_n * (4 if out_dtype == "float32" else 2)
    assert loop["STG"] == tile_bytes // 128 // 16
    loaded = {"LDG", "LDS"} if not config.keeps_columns(problem) else set()
    assert {"LD", "LDG", "LDS", "LDSM", "LDL", "STL", "ST", "UTMASTG"} & set(loop) == loaded


# Instructions per warp in the loop that stores a tile, by output dtype, whether the accumulators
# are integers, and width of a slice. With one staging buffer there is one more. An increase must be
# explained in docs/experiments.
STORE_LOOP = {
    ("bfloat16", False, 64): 77,
    ("bfloat16", False, 192): 189,
    ("bfloat16", False, 256): 201,
    ("bfloat16", True, 192): 284,
    ("bfloat16", True, 256): 329,
    ("float32", True, 192): 366,
    ("float32", True, 256): 471,
}


# Between the two loads of tensor memory of a step ptxas puts at most this many instructions, by
# output dtype, whether the accumulators are integers, and width of a slice, as in the CUDA kernel
# (docs/experiments/blackwell.md). In all other kernels they are back to back.
LATE_LOADS = {
    ("bfloat16", False, 256): 31,
    ("bfloat16", True, 256): 62,
}


def blackwell_cases():
    """Yields (shapes, dtype, out_dtype, table, images) for each process that compiles.

    B/16 224 has every dtype, and each other named shape at least one.
    """
    fixed = [shape.name for shape in NAMED_SHAPES if not shape.name.startswith("NaFlex")]
    naflex = [shape.name for shape in NAMED_SHAPES if shape.name.startswith("NaFlex")]
    for i, dtype in enumerate(tiles.DTYPES):
        some = fixed[i :: len(tiles.DTYPES)]
        yield sorted({"B/16 224", *some}), dtype, "bfloat16", "shared", 4096
        yield [naflex[i % len(naflex)]], dtype, "bfloat16", "per image", 67
    yield [shape.name for shape in VIT_SHAPES], "int8", "bfloat16", "shared", 512
    yield ["B/16 224", "B/32 256"], "int8", "float32", "shared", 512
    # 48843 rows are not a multiple of 8.
    yield ["So400m/14 384"], "int8", "float32", "shared", 67
    yield ["B/16 224", "L/16 256"], "float8_e4m3fn", "bfloat16", "none", 1


@needs_compilers
@pytest.mark.parametrize(
    "shapes, dtype, out_dtype, table, images",
    list(blackwell_cases()),
    ids=lambda x: f"{len(x)}-shapes" if isinstance(x, list) else str(x).replace(" ", "-"),
)
def test_the_Blackwell_kernel_compiles_to_what_its_config_says(
    shapes, dtype, out_dtype, table, images
):
    found = compile_offline("b200", "mosaic_sm100", shapes, dtype, out_dtype, table, images)
    for shape in shapes:
        problem = problem_of(shape, dtype, out_dtype, table, images)
        config = SM100.choose_config(problem, B200)
        kernel = the_whole_program(found[shape], config.shared_memory_bytes(problem))
        K_bytes = problem.patches[-1] * (2 if dtype == "bfloat16" else 1)
        instruction = {"bfloat16": "UTCHMMA", "int8": "UTCIMMA", "float8_e4m3fn": "UTCQMMA"}[dtype]
        # Each product multiplies 32 bytes of K. A cluster of two has its own instruction, ".2CTA".
        assert kernel["tile_loop"][instruction] == K_bytes // 32
        instruction += ".2CTA" * config.collective
        assert kernel["multiplications"] == {instruction: K_bytes // 32}
        # Tensor memory is allocated in powers of two.
        columns = kernel["tensor_memory_columns"]
        assert 1 << (columns - 1).bit_length() == config.tensor_memory_columns()
        loop = kernel["store_loop"]
        # Table, scales and offsets are in registers, TMA stores the results, and nothing is called.
        assert not {"LD", "LDG", "LDL", "LDS", "STL", "STG", "ST", "CALL"} & set(loop)
        assert loop["UTMASTG"] == config.tile_n // 2 // config.store_n(problem)
        key = out_dtype, dtype == "int8", config.tile_n
        assert sum(loop.values()) <= STORE_LOOP[key] + (config.buffers == 1), shape
        waiting_together = kernel["load_gaps"][::2]
        assert waiting_together and max(waiting_together) <= LATE_LOADS.get(key, 0), shape


@needs_compilers
def test_the_Blackwell_kernel_compiles_for_B300():
    name, dtype = "B/16 224", "float8_e4m3fn"
    found = compile_offline("b300", "mosaic_sm100", [name], dtype, "bfloat16", "shared", 4096)
    problem = problem_of(name, dtype, "bfloat16", "shared", 4096)
    config = SM100.choose_config(problem, B300)
    kernel = the_whole_program(found[name], config.shared_memory_bytes(problem))
    assert kernel["multiplications"] == {"UTCQMMA.2CTA": 768 // 32}


def the_whole_program(found, shared_memory_bytes):
    """Returns a program's kernel; asserts its resources, and that it is the only operation."""
    assert list(found["other_operations"]) == ["custom-call"]
    assert len(found["other_operations"]["custom-call"]) == 1
    kernel = found["kernel"]
    assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0
    # A multiprocessor has 65536 registers for 384 threads.
    assert kernel["registers"] == 168
    assert kernel["shared_memory_bytes"] == shared_memory_bytes
    return kernel
