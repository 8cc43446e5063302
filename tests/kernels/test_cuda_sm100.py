"""The CUDA kernel for Blackwell without a GPU: descriptors, tuning and machine code."""

import ctypes
import re
import subprocess

import pytest

from benchmarks.machine_code import INSTRUCTION, count, cuda_root, gaps, innermost_loop, read_cubin
from pallas_patch_embed.backends.cuda_tuning import Tuning
from tests.kernels.knobs import instance
from tests.repository import ROOT

FFI = ROOT / "ffi"
DTYPES = {"e4m3": "kFloat8E4M3FN", "i8": "kInt8", "bf16": "kBFloat16", "u8": "kUInt8"}

HOST = """
#include "ptx/instruction_descriptor.h"
#include "ptx/matrix_descriptor.h"
using namespace patch_embed;
extern "C" uint64_t made(uint32_t address, uint32_t swizzle) {
  return ptx::tcgen05_matrix_descriptor(address, swizzle);
}
extern "C" uint64_t moved(uint32_t address, uint32_t swizzle, uint32_t bytes) {
  return ptx::advance(ptx::tcgen05_matrix_descriptor(address, swizzle), bytes);
}
extern "C" uint32_t e4m3(int rows, int columns) {
  return ptx::instruction_descriptor(Type::kFloat8E4M3FN, rows, columns);
}
extern "C" uint32_t bf16(int rows, int columns) {
  return ptx::instruction_descriptor(Type::kBFloat16, rows, columns);
}
extern "C" uint32_t i8(int rows, int columns) {
  return ptx::instruction_descriptor(Type::kInt8, rows, columns);
}
extern "C" uint32_t u8(int rows, int columns) {
  return ptx::instruction_descriptor(Type::kUInt8, rows, columns);
}
static_assert(ptx::tcgen05_matrix_descriptor(0, 128) == 0x4000404000010000);
static_assert(ptx::tcgen05_matrix_descriptor(0, 64) == 0x8000402000010000);
static_assert(ptx::instruction_descriptor(Type::kInt8, 256, 256) == 0x104004A0);
static_assert(ptx::instruction_descriptor(Type::kUInt8, 256, 256) == 0x10400420);
"""


@pytest.fixture(scope="module")
def host(nvcc, tmp_path_factory):
    """Compiles the functions above to a library for this machine's CPU."""
    folder = tmp_path_factory.mktemp("host")
    source = folder / "descriptors.cc"
    source.write_text(HOST)
    command = [nvcc, "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-Wall,-Werror"]
    subprocess.run([*command, f"-I{FFI}", source, "-o", folder / "host.so"], check=True)
    library = ctypes.CDLL(folder / "host.so")
    library.made.restype = library.moved.restype = ctypes.c_uint64
    for dtype in DTYPES:
        getattr(library, dtype).restype = ctypes.c_uint32
    return library


def fields(descriptor, places):
    """Extracts a descriptor's fields at places (bit, size), and the bits outside all fields."""
    found = {name: descriptor >> at & (1 << size) - 1 for name, (at, size) in places.items()}
    named = sum(found[name] << at for name, (at, _) in places.items())
    return found | {"rest": descriptor ^ named}


# The fields of the descriptors in PTX ISA 9.7.16.4.1 and 9.7.16.4.2.
MATRIX = {
    "start": (0, 14),
    "leading": (16, 14),
    "stride": (32, 14),
    "version": (46, 3),
    "base offset": (49, 3),
    "leading dimension mode": (52, 1),
    "swizzle": (61, 3),
}
INSTRUCTION_FIELDS = {
    "sparsity": (0, 3),
    "saturate": (3, 1),
    "sums": (4, 2),
    "a": (7, 3),
    "b": (10, 3),
    "negated": (13, 2),
    "transposed": (15, 2),
    "columns": (17, 6),
    "rows": (24, 5),
    "shift": (30, 2),
}


@pytest.mark.parametrize("address", [0x400, 0x400 + 16384, 0x400 + 5 * 4096, 227 * 1024])
@pytest.mark.parametrize("swizzle", [128, 64])
@pytest.mark.parametrize("step", [None, 0, 32, 64, 96])
def test_a_matrix_is_rows_of_swizzled_bytes(host, address, swizzle, step):
    found = host.made(address, swizzle)
    if step is not None:
        found = host.moved(address, swizzle, step)
    assert fields(found, MATRIX) == {
        "start": (address + (step or 0)) % 2**18 // 16,
        "leading": 1,
        "stride": 8 * swizzle // 16,
        "version": 0b001,
        "base offset": 0,
        "leading dimension mode": 0,
        "swizzle": {128: 2, 64: 4}[swizzle],
        "rest": 0,
    }


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("columns", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "dtype, sums, a, b", [("e4m3", 1, 0, 0), ("bf16", 1, 1, 1), ("i8", 2, 1, 1), ("u8", 2, 0, 1)]
)
def test_an_instruction_has_the_types_and_the_shape(host, dtype, sums, a, b, rows, columns):
    found = fields(getattr(host, dtype)(rows, columns), INSTRUCTION_FIELDS)
    expected = dict.fromkeys(found, 0) | dict(sums=sums, a=a, b=b)
    assert found == expected | dict(rows=rows // 16, columns=columns // 8)


FINE = ("i8", "bf16", "table", 256, "b2", 4, "stationary")


@pytest.mark.parametrize(
    "arguments, tuning, message",
    [
        (
            ("i8", "bf16", "table", 256, "cooperative", 4, "stationary"),
            {},
            "storing warps, which always cooperate",
        ),
        (("i8", "bf16", "table", 96, "b2", 4, "stationary"), {}, "a multiple of 64 columns"),
        (("i8", "bf16", "offset", 512, "b2", 2, "stationary"), {}, "do not fit into tensor memory"),
        (
            ("i8", "bf16", "table", 64, "b2", 1, "stationary"),
            {},
            "at least 2 slots are needed",
        ),
        (("i8", "bf16", "table", 256, "b2", 9, "streamed"), {}, "do not fit into shared memory"),
        (("i8", "bf16", "table", 64, "split", 4, "streamed"), {}, "a split of K needs a weight"),
        (("u8", "bf16", "table", 64, "b2", 8, "streamed"), {}, "images need a weight that stays"),
        (FINE, dict(kLoadColumns=128, kStepColumns=128), "a load must have 16, 32 or 64 columns"),
        (
            FINE,
            dict(kStepColumns=96),
            "loads must divide a step, and steps must divide",
        ),
        (FINE, dict(kLoadColumns=32, kStepColumns=32), "stores must divide a step"),
        (FINE, dict(kStepColumns=128), "need too many registers"),
        (FINE, dict(kStoresPerGroup=2), "groups of stores must divide the stores of a step"),
        (
            ("i8", "bf16", "offset", 256, "b2", 2, "stationary"),
            dict(kStepColumns=128, kStagingBuffers=1, kStoresPerGroup=2),
            "must divide the buffers",
        ),
        (FINE, dict(kStagingBuffers=3), "the number of buffers must be a power of two"),
        (FINE, dict(kStaggerCycles=-1), "must not be negative"),
    ],
    ids=str,
)
def test_an_impossible_tuning_does_not_compile_and_says_why(
    nvcc, tmp_path, arguments, tuning, message
):
    source = tmp_path / "kernel.cu"
    source.write_text(instance(*arguments, **tuning))
    command = [nvcc, "-std=c++17", "-ptx", "-arch=sm_100a", f"-I{FFI}", source]
    done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True)
    assert done.returncode and message in done.stderr


# Machine code.


def compile_to_cubin(nvcc, source, options, path):
    """Compiles for a Blackwell chip; returns the compilers' output."""
    warnings = ["--Werror", "all-warnings", "-Xptxas=-v,-warn-spills,-warn-lmem-usage"]
    command = [nvcc, "-std=c++17", "-O3", "-cubin", *warnings, f"-I{FFI}", *options, source]
    done = subprocess.run([*command, "-o", path], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def assert_clean(said):
    """Asserts that every kernel has no spills, no stack, no warning, and 168 registers."""
    kernels = said.count("Compiling entry function")
    assert kernels > 0
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == kernels
    # 384 threads share 64 Ki registers, which setmaxnreg redistributes. All shared memory is
    # dynamic.
    assert said.count("Used 168 registers") == kernels
    assert not re.search(r"warning|smem", said), said


# Between two loads of tensor memory that wait together, ptxas puts at most this many instructions,
# by dtype of the result, columns and terms. They use the results of the first load, so the second
# one starts late (docs/experiments/blackwell.md). In all other kernels they are back to back.
LATE_LOADS = {
    ("bf16", 256, "table"): 51,
    ("bf16", 192, "table"): 42,
    ("bf16", 192, "offset"): 33,
    ("f32", 192, "offset"): 20,
    ("f32", 128, "table"): 10,
    ("f32", 128, "offset"): 10,
}
# Only int8 has late loads in these.
LATE_IN_INT8 = {key for key in LATE_LOADS if key[1] == 128}


def storing_loop(name, sass):
    """Returns the lines of the loop that stores a tile."""
    return innermost_loop(sass, re.compile("LDTM" if "_split_" in name else "UTMASTG"))


def assert_loads_are_back_to_back(codes):
    """Asserts that loads of tensor memory overlap, except in the kernels of LATE_LOADS."""
    for name, sass in codes.items():
        _, _, _, dtype, out_dtype, terms, tile, _, slots, _ = name.split("_")
        columns = int(tile.split("x")[0])
        tuning = Tuning.of_library(out_dtype, columns, int(slots[1:]))
        loads = re.compile("LDTM")
        per_step = 2 * tuning.step_columns // tuning.load_columns
        found = gaps(storing_loop(name, sass), loads)
        waiting_together = [gap for i, gap in enumerate(found, 1) if i % per_step]
        key = (out_dtype, columns, terms)
        most = 0 if key in LATE_IN_INT8 and dtype != "i8" else LATE_LOADS.get(key, 0)
        # With images a storing thread has 240 registers instead of 232.
        most = 0 if dtype == "u8" else most
        assert waiting_together and max(waiting_together) <= most, (name, waiting_together)


PRODUCT = {"e4m3": "UTCQMMA", "i8": "UTCIMMA", "bf16": "UTCHMMA", "u8": "UTCIMMA"}
SLOTS = {"bf16": "s5_streamed", "u8": "s8_stationary"}
MEMORY = {"LD", "ST", "LDG", "STG", "LDL", "STL", "LDS", "ATOM", "RED"}


@pytest.mark.parametrize("dtype, chip", [*((dtype, "100a") for dtype in DTYPES), ("e4m3", "103a")])
def test_no_kernel_spills_and_a_tile_touches_no_global_memory(nvcc, dtype, chip, tmp_path):
    cubin = tmp_path / "kernels.cubin"
    options = [f"-arch=sm_{chip}", f"-DPATCH_EMBED_DTYPE={DTYPES[dtype]}"]
    assert_clean(compile_to_cubin(nvcc, FFI / "patch_embed_sm100.cu", options, cubin))
    if cuda_root() is None:
        return
    weight = SLOTS.get(dtype, "s6_stationary")
    name = f"patch_embed_sm100_{dtype}_{{}}_table_256x128_b2_{weight}"
    codes = {code.name: code.sass for code in read_cubin(cubin.read_bytes())}
    assert_loads_are_back_to_back(codes)
    code = codes[name.format("bf16")]
    opcodes = [match[1] for match in INSTRUCTION.finditer(code)]
    # With images these are two products of a line, and two of its corrections.
    assert [x for x in opcodes if "MMA" in x] == [f"{PRODUCT[dtype]}.2CTA"] * 4
    loads = ["2D", "2D"] if dtype != "u8" else ["4D.IM2COL", "3D"]
    assert [x for x in opcodes if "UTMALDG" in x] == [f"UTMALDG.{x}.2CTA" for x in loads]
    assert opcodes.count("USETMAXREG.DEALLOC.CTAPOOL") == 1
    assert opcodes.count("USETMAXREG.TRY_ALLOC.CTAPOOL") == 1

    found = count(storing_loop(name, code))
    # A thread has 4 groups of 32 columns of its row. It needs one multiply-add for two columns,
    # which give one word of y, and one matrix store for four words. After a fence, one TMA store
    # writes 64 columns of a warp.
    expected = dict(LDTM=4, FFMA2=64, F2FP=64, STSM=16, MEMBAR=2, FENCE=2, UTMASTG=2, SYNCS=2)
    expected |= dict(I2FP=128) if dtype in ("i8", "u8") else {}
    # With images each of 32 corrections of a thread is loaded once, two at a time.
    corrections = 16 if dtype == "u8" else 0
    expected |= dict(LDS=corrections)
    assert {opcode: found.get(opcode, 0) for opcode in expected} == expected
    assert not ({*MEMORY, "STS", "BAR", "ERRBAR", "CCTL"} - {"LDS"}) & set(found)
    assert sum(found.values()) <= {"i8": 365, "u8": 515}.get(dtype, 240)

    found = count(storing_loop(name, codes[name.format("f32")]))
    expected = dict(LDTM=8, FFMA2=64, STS=64, MEMBAR=4, FENCE=4, UTMASTG=4, SYNCS=2)
    expected |= dict(LDS=corrections)
    assert {opcode: found.get(opcode, 0) for opcode in expected} == expected
    assert not ({*MEMORY, "BAR", "ERRBAR", "CCTL"} - {"LDS"}) & set(found)

    if dtype == "u8":
        return
    code = codes[f"patch_embed_sm100_{dtype}_bf16_table_64x128_split_s4_stationary"]
    found = count(code.splitlines())
    # A thread sends 8 vectors to other blocks, from 15 places, because each block begins with the
    # vectors of the next one. It adds up those of 8 blocks, and stores the two words of a vector.
    expected = dict(LDTM=2, STAS=15, STG=16, UTMASTG=0, STSM=0, UCGABAR_ARV=1, UCGABAR_WAIT=2)
    assert {opcode: found.get(opcode, 0) for opcode in expected} == expected
    assert found["LDS"] >= 64 and not {"LDL", "STL", "ST"} & set(found)
