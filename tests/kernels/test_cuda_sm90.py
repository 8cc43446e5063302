"""The CUDA kernel for Hopper without a GPU: matrix descriptors and machine code."""

import ctypes
import functools
import re
import shutil
import subprocess

import pytest

from benchmarks.machine_code import INSTRUCTION, count, cuda_root, innermost_loop, read_cubin
from tests.repository import ROOT

FFI = ROOT / "ffi"
DTYPES = {"e4m3": "kFloat8E4M3FN", "i8": "kInt8", "bf16": "kBFloat16", "u8": "kUInt8"}

HOST = """
#include "ptx/matrix_descriptor.h"
using namespace patch_embed::ptx;
extern "C" uint64_t made(uint32_t address) { return matrix_descriptor(address); }
extern "C" uint64_t moved(uint32_t address, uint32_t bytes) {
  return advance(matrix_descriptor(address), bytes);
}
static_assert(matrix_descriptor(0) == 0x4000004000010000);
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Compiles the functions above to a library for this machine's CPU."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("host") / "descriptor.so"
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-x", "c++", "-"]
    subprocess.run([*command, f"-I{FFI}", "-o", path], input=HOST, text=True, check=True)
    library = ctypes.CDLL(path)
    library.made.restype = library.moved.restype = ctypes.c_uint64
    return library


def fields(descriptor):
    """Extracts the fields of PTX ISA 9.7.15.5.1, and the bits outside all fields."""
    places = {
        "start": (0, 14),
        "leading": (16, 14),
        "stride": (32, 14),
        "base offset": (49, 3),
        "swizzle": (62, 2),
    }
    found = {name: descriptor >> at & (1 << size) - 1 for name, (at, size) in places.items()}
    named = sum(found[name] << at for name, (at, _) in places.items())
    return found | {"rest": descriptor ^ named}


@pytest.mark.parametrize("address", [0x400, 0x400 + 8192, 0x400 + 13 * 24576, 227 * 1024])
@pytest.mark.parametrize("step", [None, 0, 32, 64, 96, 64 * 128 + 96])
def test_a_descriptor_describes_rows_of_128_swizzled_bytes(host, address, step):
    address %= 1 << 18
    found = host.made(address) if step is None else host.moved(address, step)
    expected = dict(start=(address + (step or 0)) // 16, leading=1, stride=1024 // 16, swizzle=1)
    assert fields(found) == expected | {"base offset": 0, "rest": 0}


@pytest.fixture(scope="module")
def compiled(nvcc, tmp_path_factory):
    """Returns a function that compiles a dtype's kernels; it returns the cubin and the output."""

    @functools.cache
    def cubin(dtype):
        path = tmp_path_factory.mktemp(dtype) / "kernels.cubin"
        options = ["-std=c++17", "-O3", "-cubin", "-arch=sm_90a", "-Xptxas", "-v"]
        options.append(f"-DPATCH_EMBED_DTYPE={DTYPES[dtype]}")
        command = [nvcc, *options, FFI / "patch_embed_sm90.cu", "-o", path]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return path, done.stdout + done.stderr

    return cubin


def tile_loop(cubin, name):
    """Returns the machine code of the loop over a kernel's tiles."""
    (sass,) = (code.sass for code in read_cubin(cubin.read_bytes()) if code.name == name)
    return innermost_loop(sass, re.compile(r"STG\.E\.128"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_kernel_spills_and_no_product_waits_for_another(compiled, dtype):
    cubin, said = compiled(dtype)
    kernels = said.count("Compiling entry function")
    assert kernels > 0
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == kernels
    assert not re.search("warning|serialized", said), said
    if cuda_root() is None:
        return
    # The loop over chunks of K is unrolled only for images, where a tile has eight chunks of two
    # lines with three products each.
    multiply, tile_n, rows, stays = {
        "e4m3": ("QGMMA", 192, 64, True),
        "i8": ("IGMMA", 192, 64, True),
        "bf16": ("HGMMA", 192, 128, False),
        "u8": ("IGMMA", 192, 64, True),
    }[dtype]
    weight = "s10_stationary" if stays else "s5_streamed"
    weight = "s13_stationary" if dtype == "u8" else weight
    name = f"patch_embed_sm90_{dtype}_bf16_table_{tile_n}x{rows}_b1_{weight}"
    found = count(tile_loop(cubin, name))
    # A thread has rows / 32 rows of tile_n / 32 vectors. The table is either kept in registers or
    # read in the loop.
    assert found["STG"] == rows // 32 * tile_n // 32
    assert found.get("LDG", 0) == (0 if stays else found["STG"])
    assert found[multiply] == (24 if dtype == "u8" else 4 * rows // 64)
    assert found.get("LDSM", 0) == (24 if dtype == "u8" else 0)
    assert not {"LDL", "STL", "LD", "ST"} & set(found)


def test_pixels_stay_in_their_registers_until_their_products_are_done(compiled):
    """No register of pixels is written between a product that reads it and the product's wait."""
    if cuda_root() is None:
        pytest.skip("nvdisasm is missing: pip install '.[codegen]'")
    cubin, _ = compiled("u8")
    codes = read_cubin(cubin.read_bytes())
    assert len(codes) == 12
    for code in codes:
        lines = innermost_loop(code.sass, re.compile(r"STG\.E\.128"))
        groups, issued, waits = [], [], 0
        for match in filter(None, map(INSTRUCTION.search, lines)):
            text = "".join(match.groups())
            if product := re.match(r"IGMMA\.\S+ R\d+, R(\d+), gdesc", text):
                first = int(product[1])
                issued.append(range(first, first + 4))
                if "gsb0" in text:
                    groups.append(issued)
                    issued = []
                continue
            if wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
                pending = int(wait[1])
                groups = groups[-pending:] if pending else []
                waits += 1
            read = {r for group in (*groups, issued) for four in group for r in four}
            if written := re.match(r"(\S+)(?:\s|\.reuse)+R(\d+),", text):
                size = 4 if written[1].startswith(("LDSM", "LDS.128")) else 1
                first = int(written[2])
                stores = written[1].startswith(("ST", "SYNCS", "UTMA", "R2UR"))
                assert stores or not read & {*range(first, first + size)}, (code.name, text)
        # There is a wait for each of eight chunks while the next one is multiplied, and one wait
        # for the last products.
        assert waits == 9 and not groups and not issued, code.name


def test_slots_of_pixels_are_freed_behind_the_products_that_read_them(compiled):
    """An arrival does not wait for a preceding ldmatrix; on an H200 such slots were overwritten.

    The products read the registers that ldmatrix writes, so an arrival behind them is late enough.
    """
    if cuda_root() is None:
        pytest.skip("nvdisasm is missing: pip install '.[codegen]'")
    cubin, _ = compiled("u8")
    for code in read_cubin(cubin.read_bytes()):
        lines = innermost_loop(code.sass, re.compile(r"STG\.E\.128"))
        found = ["".join(m.groups()) for m in filter(None, map(INSTRUCTION.search, lines))]
        events = [
            "G" if "gsb0" in text else "A"
            for text in found
            if re.match(r"IGMMA.*gsb0|SYNCS\.ARRIVE", text)
        ]
        # Each of 8 chunks has products and then an arrival; two chunks also hand over to the other
        # warpgroup.
        assert re.fullmatch("(GAA?){8}", "".join(events)) and len(events) == 18, code.name
