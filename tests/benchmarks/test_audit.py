"""The audit of the kernels' machine code: spills, counts of instructions, the budget."""

import dataclasses
import subprocess

import pytest

from benchmarks import audit, audited_kernels, cycle_budget
from benchmarks.cycle_budget import Kernel, Loop, Tile
from benchmarks.machine_code import Code, class_of, cuda_root, read_cubin
from pallas_patch_embed.backends import cuda, tiles
from pallas_patch_embed.base.problem import NamedShape, named_shape
from tests.pages import prose

HEADLINE = (named_shape("B/16 224"), 4736)

needs_compilers = pytest.mark.usefixtures("compilers")
needs_library = pytest.mark.usefixtures("cuda_library")
needs_triton = pytest.mark.usefixtures("triton_package")


def checked(kernel):
    """Returns the cycles of a kernel's budget; asserts no spills and only known opcodes."""
    assert audit.spilling([kernel.code]) == []
    for loop in kernel.loops:
        assert {x for x in loop.executed if class_of(x) in ("other", "local")} == set()
    return {name: share.cycles for name, share in cycle_budget.budget(kernel).items()}


def times(loop, name):
    """Counts how often a warp executes an opcode for a tile."""
    return sum(n for opcode, n in loop.executed.items() if opcode.split(".")[0] == name)


@needs_compilers
def test_the_Hopper_kernel_has_the_budget_of_its_tile():
    kernel = audited_kernels.pallas_kernel("sm_90", *HEADLINE, "float8_e4m3fn")
    found = checked(kernel)
    (loop,) = kernel.loops
    assert (times(loop, "QGMMA"), times(loop, "STG")) == (24, 12)
    assert found["tensor"] == 128 * 192 * 768 / 4096
    # Each of 4 slices accounts for a quarter of the rows' bytes, and for its part of y. 132 blocks
    # share 4.8 TB/s at 1.98 GHz.
    assert found["DRAM"] == pytest.approx((128 * 768 / 4 + 128 * 192 * 2) * 132 * 1.98 / 4800)
    assert found["L2"] == 128 * 768 / 64
    # A product of 64 x 192 x 32 bytes reads 8 KiB, and threads store y
    # (docs/experiments/hopper.md).
    assert found["shared"] == (2 * 24 * 8192 + 128 * 192 * 2) / 128
    assert found["issue"] == 2 * sum(loop.executed.values())
    assert cycle_budget.ring(kernel) == ()


@needs_compilers
def test_the_Blackwell_kernel_has_the_budget_of_the_design():
    kernel = audited_kernels.pallas_kernel("sm_100", *HEADLINE, "float8_e4m3fn")
    found, (multiply, store) = checked(kernel), kernel.loops
    # The design expects 3072 cycles of products and 3450 of DRAM. 72 of 74 clusters of two share
    # 8 TB/s at 1.965 GHz.
    assert found["tensor"] == 3072
    assert found["DRAM"] == pytest.approx((256 * 768 / 3 + 256 * 256 * 2) * 72 * 1.965 / 8000)
    assert found["DRAM"] == pytest.approx(3450, rel=0.01)
    assert cycle_budget.binding(cycle_budget.budget(kernel)) == "DRAM"
    # The two warps of a scheduler issue 402 instructions (docs/experiments/blackwell.md).
    assert sum(store.issue_slots().values()) <= 410
    assert (times(multiply, "UTCQMMA"), times(store, "LDTM")) == (24, 4)
    # Each block reads 128 rows of either operand. It writes its half of y to shared memory, from
    # which TMA reads it, and TMA writes its patches.
    assert store.bytes_of("STSM") == 128 * 256 * 2
    assert found["shared"] == (24 * 32 * (128 + 128) + 2 * 128 * 256 * 2 + 128 * 768) / 128 == 3328
    # Each of 6 chunks keeps one of 6 slots for the latency, its 512 cycles of products, and 200.
    assert cycle_budget.ring(kernel) == (2212, 2652, 3112)


@needs_compilers
@needs_library
def test_no_kernel_of_the_library_spills():
    assert audit.spilling(audited_kernels.library_kernels().values()) == []
    names = {c.symbol for c in cuda.configs()}
    assert {name for _, name in audited_kernels.library_kernels()} == names
    number = len(audited_kernels.library_kernels())
    assert f"The CUDA library has {number} kernels" in prose("docs/performance.md")
    hopper, blackwell = (
        sum(c == chip for c, _ in audited_kernels.library_kernels()) for chip in (90, 100)
    )
    assert f"It has {hopper} Hopper and {blackwell} Blackwell" in prose("docs/backends.md")
    kernel = audited_kernels.cuda_kernel("sm_90", *HEADLINE, "bfloat16")
    found, (loop,) = checked(kernel), kernel.loops
    # There are 12 chunks of 4 products for each of two blocks of rows; the loop over chunks
    # contains 8 products.
    assert times(loop, "HGMMA") == 12 * 4 * 2
    # Both halves of a tile load 12 - 3 chunks of the weight again, and the whole table.
    L2_bytes = 256 * 1536 + 2 * 9 * 192 * 128 + 256 * 192 * 2
    assert found["L2"] == L2_bytes / 64
    # According to ncu, products take 6144 wavefronts for each half (docs/performance.md).
    assert cycle_budget.operand_bytes(loop, kernel.tile) == 2 * 6144 * 128
    checked(audited_kernels.cuda_kernel("sm_100", *HEADLINE, "int8"))


@needs_compilers
@needs_library
def test_the_kernel_that_cuts_images_has_the_budget_of_the_one_from_patches():
    """The only difference: threads, not the tensor cores, read pixels from shared memory."""
    patches = audited_kernels.cuda_kernel("sm_90", *HEADLINE, "int8")
    images = audited_kernels.cuda_kernel("sm_90", *HEADLINE, "int8", uncut=True)
    found, before, (loop,) = checked(images), checked(patches), images.loops
    for name in ("tensor", "DRAM", "L2"):
        assert found[name] == before[name]
    assert [times(loop, x) for x in ("IGMMA", "LDSM", "STG", "LDG")] == [24, 24, 12, 0]
    # ldmatrix reads every byte of the tile's pixels once.
    assert loop.bytes_of("LDSM") == 128 * 768
    assert cycle_budget.operand_bytes(loop, images.tile) == 2 * 24 * 32 * 192
    # From images a row is one of 16 lines of one of 64 pairs of patches. From patches it is one of
    # 6 chunks of one of 128 patches.
    assert (images.tile.tma_rows, patches.tile.tma_rows) == (16 * 64, 6 * 128)
    # An image of 240 pixels has an odd number of patches, 15, in a row. So TMA loads the lines of
    # single patches instead of pairs.
    odd = audited_kernels.cuda_kernel(
        "sm_90", NamedShape("odd", 16, 240, 768), 4736, "int8", uncut=True
    )
    assert odd.tile.tma_rows == 16 * 128
    assert checked(odd).keys() == found.keys()
    # The two warps of a scheduler issue fewer instructions than the products take cycles.
    assert found["issue"] < 2000 < found["tensor"]
    with pytest.raises(NotImplementedError, match="only in int8"):
        audited_kernels.cuda_kernel("sm_90", *HEADLINE, "bfloat16", uncut=True)


@needs_compilers
@needs_library
def test_the_Blackwell_kernel_that_cuts_images_multiplies_64_bytes_of_each_line():
    kernel = audited_kernels.cuda_kernel("sm_100", *HEADLINE, "int8", uncut=True)
    found, (multiply, store) = checked(kernel), kernel.loops
    assert found["tensor"] == 256 * 256 * 1024 / 2 / 8192 == 4096
    assert (times(multiply, "UTCIMMA"), times(store, "LDTM"), times(store, "LDS")) == (32, 4, 16)
    # Each block reads 128 rows of either operand, 16 lines of 64 bytes. It writes its half of y to
    # shared memory, from which TMA reads it, TMA writes its pixels, and each of 8 warps reads its
    # corrections.
    corrections = store.bytes_of("LDS")
    shared = 16 * 64 * (128 + 128) + 2 * 128 * 256 * 2 + 128 * 768 + corrections
    assert found["shared"] == shared / 128
    assert kernel.tile.tma_rows == 256 * 16
    # Each of 16 lines keeps one of 8 slots for the latency, its 256 cycles of products, and 200.
    assert cycle_budget.ring(kernel) == (3912, 4792, 5712)
    # DRAM is that of patches: 48 bytes of each line are loaded.
    patches = cycle_budget.budget(audited_kernels.cuda_kernel("sm_100", *HEADLINE, "int8"))
    assert found["DRAM"] == patches["DRAM"].cycles


@needs_compilers
@needs_triton
def test_the_Triton_kernel_executes_its_products_for_each_step_and_its_stores_once():
    kernel = audited_kernels.triton_kernel("sm_80", *HEADLINE, "int8")
    found, (loop,) = checked(kernel), kernel.loops
    assert found["tensor"] == 128 * 128 * 768 / 2048
    # 8 warps execute products of 16 x 8 x 32. A thread stores 16 bytes at once.
    assert times(loop, "IMMA") == 128 * 128 * 768 // (16 * 8 * 32) // 8
    assert loop.bytes_of("STG") == 128 * 128 * 2
    assert loop.bytes_of("LDGSTS") == 2 * 128 * 768


@needs_compilers
def test_a_kernel_that_uses_stack_is_found(tmp_path):
    """The kernel's local array is indexed at run time, so it is on the stack."""
    source = tmp_path / "kernel.ptx"
    source.write_text("""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out) {
  .local .align 4 .b8 place[128];
  .reg .b64 %a<4>;
  .reg .b32 %r<2>;
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %a0, %r0, 4;
  mov.u64 %a1, place;
  add.u64 %a1, %a1, %a0;
  st.local.u32 [%a1], %r0;
  ld.local.u32 %r1, [place+64];
  ld.param.u64 %a2, [out];
  st.global.u32 [%a2], %r1;
  ret;
}
""")
    cubin = tmp_path / "kernel.cubin"
    ptxas = cuda_root() / "bin" / "ptxas"
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", cubin], check=True)
    (code,) = read_cubin(cubin.read_bytes())
    assert (code.name, code.stack_bytes, code.spill_bytes) == ("kernel", 128, 8)
    assert audit.spilling([code]) == ["kernel"]


CODE = Code("kernel", 168, 0, 0, "")


def test_spills_and_stack_are_each_found():
    assert audit.spilling([CODE]) == []
    for name in ("spill_bytes", "stack_bytes"):
        assert audit.spilling([CODE, dataclasses.replace(CODE, **{name: 8})]) == ["kernel"]


def test_an_opcode_without_a_class_is_shown(tmp_path):
    tile = Tile(128, 192, 768, 1, 4, 132, 98304, 98304, 768)
    loop = Loop("multiply and store", 8, {"FFMA": 3, "XYZZY.64": 2})
    kernel = Kernel("CUDA", "sm_90", "int8", "", CODE, 0, 0, tile, (loop,))
    assert audit.mix_table([kernel]).endswith("other: XYZZY")
    pytest.importorskip("matplotlib")
    audit.draw([kernel], "title", tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 10_000


# Dense peak rates in 1e12 operations per second, and the clock in GHz at which they are stated.
PEAKS: dict[str, tuple[float, dict[str, float]]] = {
    "sm_80": (1.41, dict(bfloat16=312, int8=624)),
    "sm_86": (1.695, dict(bfloat16=71, int8=284)),
    "sm_89": (2.52, dict(float8_e4m3fn=330.3, bfloat16=165.2, int8=660.6)),
    "sm_90": (1.83, dict(float8_e4m3fn=1979, bfloat16=989.5, int8=1979)),
    "sm_100": (1.86, dict(float8_e4m3fn=4500, bfloat16=2250, int8=4500)),
}


@pytest.mark.parametrize("architecture", PEAKS)
def test_the_rates_are_those_of_the_data_sheets(architecture):
    clock, peaks = PEAKS[architecture]
    for dtype, peak in peaks.items():
        rate = 2 * cycle_budget.MULTIPLY_ADDS[architecture][dtype]
        found = rate * cycle_budget.CHIP_OF[architecture].multiprocessors * clock / 1e3
        assert found == pytest.approx(peak, rel=0.01)


def test_what_cannot_be_compiled_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(audited_kernels, "cuda_root", lambda: None)
    monkeypatch.setattr(audited_kernels.cuda, "missing", lambda: "its library is missing")
    monkeypatch.setattr(audited_kernels.importlib.util, "find_spec", lambda name: None)
    audited_kernels.library_kernels.cache_clear()
    kernels, missing = audited_kernels.every_kernel(*HEADLINE, tiles.DTYPES)
    families = ("Pallas", "CUDA", "CUDA images", "Triton", "Triton images")
    assert kernels == [] and len(missing) == len(families)
    for family, line in zip(families, missing):
        assert line.startswith(f"Left out: {family}: ") and "missing" in line
