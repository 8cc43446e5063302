"""The emulator executes the PTX of the CUDA kernels; results equal XLA's in several schedules."""

import dataclasses
import functools
import re
import subprocess
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cuda_launch
from benchmarks.timeline import EVENTS, read_stamps
from pallas_patch_embed.backends import cuda_build, tiles, xla
from pallas_patch_embed.backends.cuda_build import FFI
from pallas_patch_embed.base.problem import Problem
from tests.kernels import emulated_cuda
from tests.kernels.emulated import ONE_OR_ALL, SCHEDULES
from tests.kernels.emulated_cuda import (
    BF16,
    CASES,
    FP8,
    INT8,
    MULTIPROCESSORS,
    SOME_STAY,
    THREADS,
    CudaCase,
    blackwell_images,
    blackwell_split,
    compiled,
    cooperative,
    of_images,
    run,
    split,
)
from tests.kernels.interpreter import draw_operands
from tests.operator.bounds import assert_bit_equal
from tests.ptx_emulator.errors import EmulatorError
from tests.short_suite import every_second

OPTIONS = ("-std=c++17", "-O3", "-ptx")

pytestmark = pytest.mark.usefixtures("nvcc")


def assert_equals_xla(ptx, case, schedules):
    """Asserts that the kernel's result equals XLA's in these schedules."""
    operands = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    expected = xla.run(*operands, out_dtype=case.out_dtype)
    for order, seed in schedules:
        y, _ = run(ptx, case, operands, schedule=order, seed=seed)
        assert_bit_equal(jnp.asarray(y), expected)


@ONE_OR_ALL
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_equals_xla(name, schedules_of):
    case = CASES[name]
    assert_equals_xla(compiled(case), case, schedules_of(list(CASES).index(name)))


# The expected stamps of each warp, as a regular expression. Each Event of ffi/timeline.cuh has a
# letter, in the order of the enumeration.
LETTERS = "fFtLMPlcsT"
FEED, MULTIPLY = "((fF){fed}T)+", "(t(LM){chunks}T)+"
ROLES = {
    90: dict.fromkeys(range(8), "(l?(t(LM){chunks}P(l?cs)+T)+)+") | {8: FEED},
    100: {0: FEED, 1: MULTIPLY} | dict.fromkeys(range(4, 12), "(P(l(fcs)+)+T)+"),
}


@pytest.mark.parametrize(
    "name",
    [
        "float8, two slices",
        "bfloat16, streamed",
        "Blackwell, two blocks, segments of several tiles",
        "images, 224, 768, 192",
        "Blackwell, images, slots and accumulators used again",
        "split by 2, six tiles",
        "Blackwell, split by 2, slots and accumulators used again",
        "cooperative, six tiles",
    ],
)
def test_a_timeline_build_stamps_the_work_of_each_warp(name):
    case = CASES[name]
    ptx = compiled(case, "-DPATCH_EMBED_TIMELINE")
    operands = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    blocks = MULTIPROCESSORS[case.capability]
    stamps = np.zeros((blocks, THREADS // 32, cuda_launch.STAMPS), np.uint32)
    y, _ = run(ptx, case, operands, stamps, schedule="random", seed=0)
    assert_bit_equal(jnp.asarray(y), xla.run(*operands, out_dtype=case.out_dtype))
    chunks = tiles.chunks(Problem.of(*operands, out_dtype=case.out_dtype)) // case.config.splits
    if case.image:
        # On Hopper a chunk has two of a patch's 16 lines.
        chunks = 16 if case.capability == 100 else 16 // 2
    for block, warp in np.ndindex(stamps.shape[:2]):
        said = "".join(LETTERS[stamp % 16 - 1] for stamp in stamps[block, warp] if stamp)
        pattern = ROLES[case.capability].get(warp, "")
        if case.image and case.capability == 100 and warp >= 4:
            # The corrections come before the first tile.
            pattern = f"Pl{pattern}"
        elif case.image and case.capability == 90:
            # Pixels are loaded before the products of the previous chunk are issued.
            pattern = pattern.replace("(LM){chunks}", f"L(LM){{{chunks - 1}}}M")
        pattern = pattern.replace("chunks", str(chunks))
        # With ping-pong each of the two consumers has its own loads of patches, and waits for its
        # turn to multiply.
        is_pingpong = case.capability == 90 and not case.cooperative
        pattern = pattern.replace("fed", str(chunks * (2 if is_pingpong else 1)))
        if case.cooperative:
            pattern = pattern.replace("(t(", "((")
        if case.capability == 100 and case.splits > 1:
            # The sums of other blocks are waited for, and y is stored from registers.
            pattern = pattern.replace("(l(fcs)+)+", "lls")
        # The first block of a cluster multiplies for both blocks.
        pair = case.blocks // case.splits
        idle = ROLES[case.capability].get(warp) == MULTIPLY and block % pair
        assert re.fullmatch("" if idle else pattern, said), (block, warp, said)
    # The emulator's clock counts a warp's instructions.
    spans = read_stamps(stamps)
    assert len(spans) == np.count_nonzero(stamps) - np.count_nonzero(stamps[..., 0])
    assert all(0 < span.cycles < 100_000 for span in spans)
    # A warp's first stamp, after the terms have been loaded, begins its first span.
    missing = {"wait: may multiply", "epilogue load"} if case.cooperative else set()
    if case.capability == 100 and case.splits > 1:
        missing = {"epilogue convert"}
    assert {span.role for span in spans} == set(EVENTS) - missing


tuned = functools.partial(CudaCase, rows=128, capability=100)

TUNED = {
    "two blocks, table for each tile": tuned(
        *((5, 97, 256), 128, INT8, "shared", 128, 3),
        blocks=2,
        out_dtype="float32",
        tuning=dict(
            kLoadColumns=16,
            kStepColumns=32,
            kStagingBuffers=4,
            kRelease="Release::kStored",
            kStaggerCycles=40,
            kKeepTable="false",
        ),
    ),
    "two blocks, stores together": tuned(
        *((5, 97, 128), 256, FP8, "none", 256, 2),
        blocks=2,
        tuning=dict(kLoadColumns=64, kStepColumns=128, kStoresPerGroup=2),
    ),
    "one block, one buffer": tuned(
        *((5, 97, 128), 64, BF16, "per image", 64, 2),
        tuning=dict(kLoadColumns=32, kStepColumns=32, kStagingBuffers=1, kStaggerCycles=25),
    ),
}


def compile_source(source, folder, capability=100, edit=None):
    """Compiles a kernel to PTX; `edit` replaces a text that its chip's files have once."""
    (folder / "kernel.cu").write_text(source)
    files = [FFI / f"patch_embed_sm{capability}.cu", FFI / "split.cuh"]
    texts = {path.name: path.read_text() for path in files}
    if edit:
        assert "".join(texts.values()).count(edit[0]) == 1
    for name, text in texts.items():
        # A quoted name is looked up first in the folder of the file that includes it.
        (folder / name).write_text(text.replace(*edit) if edit else text)
    nvcc, _ = cuda_build.find_nvcc()
    command = [nvcc, *OPTIONS, f"-arch=sm_{capability}a", f"-I{FFI}", folder / "kernel.cu"]
    command += ["-o", folder / "kernel.ptx"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return (folder / "kernel.ptx").read_text()


@pytest.mark.parametrize("name", TUNED)
def test_a_kernel_with_another_tuning_equals_xla(tmp_path, name):
    case = TUNED[name]
    assert_equals_xla(compile_source(case.source, tmp_path), case, SCHEDULES)


# Deliberate bugs in the Blackwell kernel: the text that is replaced, its replacement, and a pattern
# of the emulator's message.
SMALL = tuned((7, 256, 256), 64, INT8, "shared", 64, 3, blocks=2, tuning=dict(kLoadColumns=32))

BUGS = {
    "no wait for a free slot": (
        "wait(shared_.freed[slot.index], slot.parity ^ 1, Event::kFreed);",
        "",
        "does not expect them",
    ),
    "no wait for patches": (
        "wait(shared_.filled[slot.index], slot.parity, Event::kFilled);",
        "",
        "tcgen05.mma .* reads what was written",
    ),
    "no wait for a free accumulator": (
        "wait_for_accumulator(shared_.accumulator_freed[accumulator.index], "
        "accumulator.parity ^ 1,\n                           Event::kMayMultiply)",
        "ptx::tcgen05_fence_after_thread_sync()",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no wait for products": (
        "wait_for_accumulator(shared_.multiplied[accumulator.index], accumulator.parity,\n"
        "                           Event::kMultiplied)",
        "ptx::tcgen05_fence_after_thread_sync()",
        "accumulator of block",
    ),
    "no wait for a load of tensor memory": (
        "    ptx::tcgen05_wait_ld();\n#pragma unroll\n",
        "#pragma unroll\n",
        "used before tcgen05.wait::ld",
    ),
    "no wait for a store's read": (
        "if (elected) ptx::cp_async_bulk_wait_group_read<kBuffers / kGroup - 1>();",
        "",
        "stmatrix overwrites what is read",
    ),
    "no fence before a store": (
        "    ptx::fence_proxy_async();\n    __syncwarp();\n",
        "    __syncwarp();\n",
        "without a fence.proxy.async",
    ),
    "no fence before an accumulator is freed": (
        "bool elected) {\n    ptx::tcgen05_fence_before_thread_sync();",
        "bool elected) {",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no fence after an accumulator is freed": (
        "wait_for_accumulator(shared_.accumulator_freed",
        "wait(shared_.accumulator_freed",
        "tcgen05.mma .* writes an accumulator",
    ),
    "no fence after the products": (
        "wait_for_accumulator(shared_.multiplied[accumulator.index]",
        "wait(shared_.multiplied[accumulator.index]",
        "tcgen05.ld reads an accumulator",
    ),
    "no fence of the barriers": ("    ptx::fence_mbarrier_init();\n", "", "unfenced mbarrier.init"),
    "only the arrivals of one block are expected": (
        "kBlocks * kStoringWarps",
        "kStoringWarps",
        "no warp can continue|does not expect them",
    ),
    "only the bytes of one block are expected": (
        "kBlocks * bytes",
        "bytes",
        "no warp can continue|bytes are missing",
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
    "tensor memory is not deallocated": (
        "if (warp == kAllocatingWarp) ptx::tcgen05_dealloc",
        "if (false) ptx::tcgen05_dealloc",
        "exits with tensor memory",
    ),
    "the address of tensor memory is ignored": (
        "const uint32_t accumulators = shared_.tensor_memory;",
        "const uint32_t accumulators = 0;",
        "are not allocated",
    ),
    "another warp deallocates": (
        "if (warp == kAllocatingWarp) ptx::tcgen05_dealloc",
        "if (warp == kFeedingWarp) ptx::tcgen05_dealloc",
        "dealloc by another warp",
    ),
    "a block deallocates without synchronising": (
        "__syncwarp();\n    synchronise();\n    if (warp == kA",
        "if (warp == kA",
        "are not allocated|has exited",
    ),
    "a block does not wait for its peer at the end": (
        "__syncwarp();\n    synchronise();\n    if (warp == kA",
        "__syncthreads();\n    if (warp == kA",
        "exits before .* the arrival|has exited",
    ),
    "a pair allocates before its peer is there": (
        "    if constexpr (kBlocks == 2) await_peer();\n",
        "",
        "nothing says that the peer has been launched",
    ),
    "the second block allocates after the first one's products": (
        "    if (warp == kAllocatingWarp) {\n",
        "    if (rank_ == 1) synchronise();\n    if (warp == kAllocatingWarp) {\n",
        "waits for the peer's tcgen05.alloc",
    ),
    "a block frees before its peer has allocated": (
        "ptx::tcgen05_relinquish_alloc_permit<kBlocks>();",
        "ptx::tcgen05_dealloc<kBlocks, kTensorColumns>(shared_.tensor_memory);",
        "dealloc.* nothing orders it after the tcgen05.alloc",
    ),
    "a relaxed arrival publishes the address of tensor memory": (
        "ptx::barrier_cluster_arrive();",
        "ptx::barrier_cluster_arrive_relaxed();",
        "ld reads what was written",
    ),
    "more registers than there are": (
        "ptx::setmaxnreg_inc<kStoreRegisters>();",
        "ptx::setmaxnreg_inc<240>();",
        "registers; its block has .* that are free",
    ),
    "lanes do not meet before a store": (
        "    ptx::fence_proxy_async();\n    __syncwarp();\n",
        "    ptx::fence_proxy_async();\n",
        "no barrier orders that before",
    ),
    "one lane fences for all": (
        "    ptx::fence_proxy_async();\n    __syncwarp();\n",
        "    if (elected) ptx::fence_proxy_async();\n    __syncwarp();\n",
        "without a fence.proxy.async of the lanes",
    ),
}


# Deliberate bugs in the Blackwell kernel of which some chunks of the weight stay.
STAYING_BUGS = {
    "chunks that stay are in the ring": (
        "kFirstStaying = stream_weight ? slots : 0",
        "kFirstStaying = 0",
        "a TMA load .* overwrites|reads what was written",
    ),
    "the other chunks are loaded once": ("!stays(k) || n == 0", "n == 0", "results differ|reads"),
    "chunks that stay are not loaded": ("!stays(k) || n == 0", "!stays(k)", "results differ"),
    "one chunk more stays": (
        "|| k < kMostStaying;",
        "|| k <= kMostStaying;",
        "outside|beyond|out of bounds|exceeds",
    ),
}

# Deliberate bugs in the Hopper kernel, with more chunks than slots and a table that is read ahead.
# With 192 columns the ring of the weight is shorter than that of the patches, and with 128 columns
# it is longer. The longer ring never waits.
WIDE = CudaCase((5, 131, 896), 192, FP8, "shared", 192, 5, rows=128, stream_weight=True)
NARROW = CudaCase((5, 131, 896), 128, FP8, "shared", 128, 6, rows=128, stream_weight=True)

HOPPER_BUGS = {
    "no wait for a free slot": (
        "ptx::mbarrier_wait(shared_.freed[chunk.patches.slot], chunk.patches.parity ^ 1);",
        "",
        "a TMA load .* overwrites|does not expect them",
    ),
    "no wait for patches": (
        "wait(shared_.filled[chunk.patches.slot], chunk.patches.parity, Event::kFilled);\n"
        "      issue_products",
        "issue_products",
        "wgmma.* reads what",
    ),
    "a slot is freed before its products are done": (
        "      ptx::wgmma_wait_group<1>();\n      if (chunk.k > 0)",
        "      if (chunk.k > 0)",
        "overwrites what is read",
    ),
    "no wait for the last products": (
        "    ptx::wgmma_wait_group<0>();\n",
        "",
        "wgmma.wait_group",
    ),
    "no wait for scale": (
        "    ptx::mbarrier_wait(shared_.columns_arrived, 0);\n",
        "",
        "what was written|no warp of the block has waited",
    ),
    "no wait for a free slot of the weight": (
        "ptx::mbarrier_wait(freed[ring.slot], ring.parity ^ 1)",
        "",
        "a TMA load .* overwrites|overwrites what is read",
    ),
    "no fence of the barriers": ("    ptx::fence_mbarrier_init();\n", "", "unfenced mbarrier.init"),
    "no wait for the other warpgroup's products": (
        "wait(shared_.other_products_issued[warpgroup], parity, Event::kMayMultiply);",
        "",
        "does not expect them|results differ|reads what",
    ),
    "the other warpgroup may multiply too early": (
        "chunk.k == chunks() - 1) hand_over",
        "chunk.k == 0) hand_over",
        "does not expect them|results differ|reads what",
    ),
    "the wrong rows of the table": (
        "segment.table_row + warpgroup * rows",
        "segment.table_row",
        "results differ",
    ),
    "rows beyond the last are stored": (
        "first_row + below < args_.M",
        "true",
        "outside of all arrays",
    ),
}

# Deliberate bugs in the Hopper kernel that cuts images. Its warpgroups use each slot several times.
CUT = of_images(10, (7, 6), 192, "shared", 192)

IMAGE_BUGS = {
    "the wrong line": ("0, line + i, filled", "0, line, filled", "results differ"),
    "one line late": (
        "chunk.k * kSlotLines, row",
        "chunk.k * kSlotLines + 1, row",
        "results differ",
    ),
    "the patches beside": (
        "row % args_.grid_width >> (args_.row_patches == kMostRowPatches);",
        "row % args_.grid_width >> (args_.row_patches == kMostRowPatches) ^ 1;",
        "results differ|not in the bounding box",
    ),
    "the row of patches below": (
        "row / args_.grid_width;",
        "row / args_.grid_width + 1;",
        "results differ",
    ),
    "one pixel late": ("row + unit / kUnits", "row + 3 + unit / kUnits", "not aligned"),
    "sixteen bytes late": ("unit % kUnits * 16", "(unit + 1) % kUnits * 16", "results differ"),
    "the lines of another warp": ("% kWarpgroup / 32 * 16 * kLineBytes", "* 0", "results differ"),
    "a slot is freed before its pixels are read": (
        "        load_pixels(pixels[(k + 1) % kPixelBuffers], next);\n      }\n"
        "      issue_products(sums, pixels[k % kPixelBuffers], chunk);\n"
        "      // The products have been issued. They depend on the pixels, so ldmatrix has read "
        "the slot. An\n      // arrival alone would not wait for ldmatrix.\n"
        "      free(chunk);\n",
        "        free(next);\n        load_pixels(pixels[(k + 1) % kPixelBuffers], next);\n"
        "      }\n      issue_products(sums, pixels[k % kPixelBuffers], chunk);\n"
        "      if (k == 0) free(chunk);\n",
        "overwrites|reads what|does not expect",
    ),
    "no slot is freed": (
        "free(chunk);\n      if (k == last",
        "if (k == last",
        "no warp can continue",
    ),
    "the handover comes before the weight has arrived": (
        "(n == 0 ? 0 : kChunksAfterHandover)",
        "(kChunks - 1)",
        "wgmma.* reads what|does not expect them",
    ),
    "the pixels of another chunk": (
        "issue_products(sums, pixels[k % kPixelBuffers], chunk)",
        "issue_products(sums, pixels[(k + 1) % kPixelBuffers], chunk)",
        "results differ|without a wgmma.fence|used before",
    ),
    "the xor left out": ("word ^= 0x80808080;", "word ^= 0;", "results differ"),
    "no wait for pixels": (
        "wait(shared_.filled[chunk.patches.slot], chunk.patches.parity, Event::kFilled);\n"
        "    const uint32_t slot",
        "const uint32_t slot",
        "ldmatrix.* reads what|reads what",
    ),
    "no fence behind the pixels": (
        "ptx::wgmma_fence();\n#pragma unroll\n    for (int i = 0; i < kProducts",
        "\n#pragma unroll\n    for (int i = 0; i < kProducts",
        "without a wgmma.fence",
    ),
    "a part of the weight comes two chunks later": (
        "(k * kSlotRowBytes + kRowBytes - 1) / kRowBytes",
        "(k > 2 ? k - 2 : 0) * kSlotRowBytes / kRowBytes",
        "wgmma.* reads what|results differ",
    ),
    "the wrong part of the weight": (
        "weight_ + k / kRowBytes * kWeightBytes",
        "weight_ + (k + 32) / kRowBytes % 6 * kWeightBytes",
        "results differ|reads what",
    ),
    "the bytes of a line alone are expected": (
        "kPatchesBytes + (with_weight",
        "kPatchesBytes / 2 + (with_weight",
        "bytes|does not expect",
    ),
}


# Deliberate bugs in the same kernel, for a grid of patches with an odd width.
CUT_ODD = of_images(3, (7, 7), 64, "shared", 64)

ODD_BUGS = {
    "the lines of two patches, one by one": (
        "args_.row_patches == kMostRowPatches",
        "true",
        "results differ",
    ),
    "the next patch": (
        "row % args_.grid_width >>",
        "(row + 1) % args_.grid_width >>",
        "results differ",
    ),
    "the lines of patches in the wrong order": (
        "i * rows * kLineBytes, args_.patches",
        "(1 - i) * rows * kLineBytes, args_.patches",
        "results differ",
    ),
}

# Deliberate bugs in the Blackwell kernel that cuts images.
BLACKWELL_CUT = blackwell_images(19, (7, 6), 64, "shared", 64, slots=5)

BLACKWELL_IMAGE_BUGS = {
    "the wrong line": (
        "shared_.patches[slot.index], k, row);",
        "shared_.patches[slot.index], k ^ 1, row);",
        "results differ",
    ),
    "one line late": (
        "shared_.patches[slot.index], k, row);",
        "shared_.patches[slot.index], k + 1, row);",
        "results differ",
    ),
    "the patches beside": (
        "patch = row % args_.grid_width;",
        "patch = (row + 1) % args_.grid_width;",
        "results differ",
    ),
    "the row of patches below": (
        "grid_row = row / args_.grid_width,",
        "grid_row = row / args_.grid_width + 1,",
        "results differ",
    ),
    "another line of the weight": (
        "args_.weight, 0, column, k);",
        "args_.weight, 0, column, k ^ 1);",
        "results differ",
    ),
    "a line of the weight begins late": (
        "args_.weight, 0, column, k);",
        "args_.weight, 16, column, k);",
        "results differ",
    ),
    "the gaps are expected as bytes": (
        "kImages ? kRows * kLineBytes : kPatchesBytes",
        "kPatchesBytes",
        "no warp can continue|bytes are missing",
    ),
    "only half of a line is multiplied": (
        "for (int step = 0; step < kSlotRowBytes; step += kProductBytes) {\n"
        "      ptx::tcgen05_mma<kFactorType, kBlocks>(sums, ptx::advance(a, step)",
        "for (int step = 0; step < kProductBytes; step += kProductBytes) {\n"
        "      ptx::tcgen05_mma<kFactorType, kBlocks>(sums, ptx::advance(a, step)",
        "results differ",
    ),
    "pixels are signed": (
        "kInstruction = ptx::instruction_descriptor(dtype,",
        "kInstruction = ptx::instruction_descriptor(kFactorType,",
        "results differ",
    ),
    "the -128s are unsigned": (
        "ptx::instruction_descriptor(kFactorType, kTileRows",
        "ptx::instruction_descriptor(dtype, kTileRows",
        "results differ",
    ),
    "the swizzle of patches": (
        "ptx::shared_address(chunk), kSlotRowBytes)",
        "ptx::shared_address(chunk), kRowBytes)",
        "results differ|reads what|not in the first row|outside",
    ),
    "no corrections": (
        "correction[m] = corrections[(first + j + m) * kCore / 2];",
        "correction[m] = {};",
        "results differ",
    ),
    "the corrections of the other warpgroup's columns": (
        "&correction(storer, first / kCore)",
        "&correction(0, first / kCore)",
        "results differ",
    ),
    "the corrections of other columns": (
        "corrections[(first + j + m) * kCore / 2]",
        "corrections[(first + (j + m) / 2) * kCore / 2]",
        "results differ",
    ),
    "the -128s are not written": (
        "    if constexpr (kImages) write_constants();\n",
        "",
        "results differ|reads what",
    ),
    "some -128s are -127s": (
        "{0x80808080, 0x80808080,",
        "{0x80808080, 0x81808080,",
        "results differ",
    ),
    "no fence behind the -128s": (
        "= constants;\n    ptx::fence_proxy_async();\n",
        "= constants;\n",
        "without a fence.proxy.async",
    ),
    "no wait for the corrections": (
        "wait_for_accumulator(shared_.multiplied[0], 0, Event::kMultiplied);",
        "ptx::tcgen05_fence_after_thread_sync();",
        "accumulator of block",
    ),
    "no wait for a load of the corrections": (
        "      ptx::tcgen05_wait_ld();\n      for",
        "      for",
        "used before tcgen05.wait::ld",
    ),
    "no fence after the corrections": (
        "wait_for_accumulator(shared_.multiplied[0], 0,",
        "wait(shared_.multiplied[0], 0,",
        "tcgen05.ld reads an accumulator",
    ),
    "no commit of the corrections": (
        "      if (kImages && n == 0) ptx::tcgen05_commit<kBlocks>(shared_.multiplied[0]);\n",
        "",
        "no warp can continue",
    ),
    "the corrections are not freed": (
        "    free_accumulator(0, elected);\n",
        "",
        "no warp can continue|does not expect them",
    ),
    "the corrections are freed before they are loaded": (
        "    wait_for_accumulator(shared_.multiplied[0], 0, Event::kMultiplied);\n",
        "    wait_for_accumulator(shared_.multiplied[0], 0, Event::kMultiplied);\n"
        "    free_accumulator(0, elected);\n",
        "tcgen05.mma .* writes an accumulator|does not expect them",
    ),
    "other warps do not wait for the corrections": (
        "    ptx::bar_sync<1, kStorers * kWarpgroup>();\n",
        "",
        "reads what was written|no barrier orders",
    ),
    "corrections in every tile": (
        "if (kImages && n == 0) issue_corrections",
        "if (kImages) issue_corrections",
        "tcgen05.mma .* (writes an accumulator|reads what was written)|overwrites what is read",
    ),
    "corrections of the first chunk alone": (
        "if (kImages && n == 0) issue_corrections",
        "if (kImages && n == 0 && k == 0) issue_corrections",
        "results differ",
    ),
    "the first tile has the corrections' accumulator": (
        "kCorrections = kImages ? 1 : 0;",
        "kCorrections = 0;",
        "accumulator|results differ|no warp can continue|does not expect them",
    ),
    "no wait for pixels": BUGS["no wait for patches"],
    "no wait for a free slot": BUGS["no wait for a free slot"],
    "the other block's half of the weight": BUGS["the other block's half of the weight"],
}

# Deliberate bugs in the Hopper kernel with cooperative warpgroups, with several tiles, and more
# chunks than slots.
COOPERATIVE = cooperative((6, 128, 1280), 64, INT8, "shared", 64)

COOPERATIVE_BUGS = {
    "a slot is free when one warpgroup has read it": (
        "(kCooperative ? kConsumers : 1) * kWarpgroup / 32",
        "kWarpgroup / 32",
        "overwrites|does not expect them|no warp can continue|reads what",
    ),
    "both warpgroups multiply the same rows": (
        "kCooperative ? warpgroup * rows : 0",
        "0",
        "results differ",
    ),
    "the producer loads each tile twice": (
        "warpgroup < kTileRows / kSlotRows",
        "warpgroup < kConsumers",
        "results differ|reads what|does not expect|outside|exits|no warp can continue",
    ),
    "a tile begins at the slot of a half tile": (
        "(kCooperative ? n : half) * chunks()",
        "half * chunks()",
        "reads what|no warp can continue|does not expect|results differ",
    ),
    "no wait for patches": HOPPER_BUGS["no wait for patches"],
    "a slot is freed before its products are done": HOPPER_BUGS[
        "a slot is freed before its products are done"
    ],
}

# Deliberate bugs in the kernels that split K, with several tiles for each cluster: those in the
# code that both chips share, and those in the code of one chip.
SPLIT = split((4, 128, 640), 64, INT8, "shared", 4)
BLACKWELL_SPLIT = blackwell_split((4, 128, 640), 64, INT8, "shared", 4)

# Only here some warps have no rows, and on Blackwell one has fewer than it could have.
SPLIT_FEW = split((1, 64, 512), 64, BF16, "none", 4)
BLACKWELL_SPLIT_FEW = blackwell_split((1, 69, 512), 64, BF16, "none", 4)

ONLY_WITH_FEW_ROWS = {
    "warps without rows do not skip in one block",
    "rows beyond the last are stored",
}

COMMON_SPLIT_BUGS = {
    "the other blocks may not have started": (
        "    Blocks::wait();\n    for_each_tile",
        "    for_each_tile",
        "nothing orders its mbarrier.init|there is no mbarrier",
    ),
    "no fence of the barriers": ("    ptx::fence_mbarrier_init();\n", "", "unfenced mbarrier.init"),
    "no wait for partial sums": (
        "    wait(arrived, parity);\n",
        "",
        "reads what was written|has exited|does not expect them",
    ),
    "one buffer": (
        "return shared_.partial_sums[buffer]",
        "return shared_.partial_sums[0]",
        "overwrites what",
    ),
    "one barrier": (
        "exchanges_ % kSumBuffers, parity = exchanges_ / kSumBuffers % 2;",
        "0, parity = exchanges_ % 2;",
        "overwrites what|later phase|does not expect them",
    ),
    "a chunk of K is left out": (
        "first_chunk_of_share(rank_ + 1, splits_, chunks)",
        "first_chunk_of_share(rank_ + 1, splits_, chunks - 1)",
        "results differ",
    ),
    "a block counts its own bytes": (
        "kBytes - kBytes / splits_",
        "kBytes",
        "no warp can continue",
    ),
    "the block's own sums are left out": (
        "source == rank_ ? own : found[source].sums[i]",
        "found[source].sums[i]",
        "results differ",
    ),
    "sums go to the wrong block": (
        "v == i ? target : target - splits_",
        "v == i ? target : 0",
        "results differ|overwrites what|later phase|no warp can continue",
    ),
    "a block stores sums that it does not complete": (
        "/ kVectors == rank_;",
        "/ kVectors <= rank_;",
        "results differ|reads what was written",
    ),
}

SPLIT_BUGS = COMMON_SPLIT_BUGS | {
    "the patches of another share": (
        "(share_begin_ + chunk.k) * kChunkElements, row",
        "chunk.k * kChunkElements, row",
        "results differ",
    ),
    "the weight of another share": (
        "(share_begin_ + weight_chunk) * kChunkElements",
        "weight_chunk * kChunkElements",
        "results differ",
    ),
    "warps without rows do not skip in one block": (
        ">= args_.M) return;",
        ">= args_.M && blockIdx.x != 1) return;",
        "no warp can continue|exits|has exited",
    ),
}

BLACKWELL_SPLIT_BUGS = COMMON_SPLIT_BUGS | {
    "the patches of another share": (
        "args_.patches, x, row",
        "args_.patches, k * kTileK, row",
        "results differ",
    ),
    "the weight of another share": (
        "args_.weight, x,",
        "args_.weight, k * kTileK,",
        "results differ",
    ),
    "warps without rows do not skip in one block": (
        "if (row + first_row < args_.M) {",
        "if (row + first_row < args_.M || blockIdx.x == 1) {",
        "no warp can continue|exits|has exited",
    ),
    "an accumulator is freed before its sums are loaded": (
        "        Sums sums;\n",
        "        free_accumulator(accumulator.index, elected);\n        Sums sums;\n",
        "tcgen05.mma .* writes an accumulator|does not expect them",
    ),
    "sums of the wrong row are exchanged": (
        "j % kLoaded * 4 + r % 2 * 2 + i % 2], v, i",
        "j % kLoaded * 4 + (r + 1) % 2 * 2 + i % 2], v, i",
        "results differ",
    ),
    "a warp writes the sums of another one": (
        "threadIdx.x - first_thread",
        "threadIdx.x - first_thread / 2",
        "overwrites|there is no mbarrier|not initialised|outside|does not expect",
    ),
    "rows beyond the last are stored": (
        "|| own_row >= args_.M) continue;",
        ") continue;",
        "outside of all arrays",
    ),
    "the wrong rows of the table": (
        "scale[j], terms.rows[has_table ? r : 0][j]",
        "scale[j], terms.rows[0][j]",
        "results differ",
    ),
}


ALL_BUGS = (
    [(SMALL, name) for name in BUGS]
    + [(SOME_STAY, name) for name in STAYING_BUGS]
    + [(CUT, name) for name in IMAGE_BUGS]
    + [(CUT_ODD, name) for name in ODD_BUGS]
    + [(BLACKWELL_CUT, name) for name in BLACKWELL_IMAGE_BUGS]
    + [(NARROW if name == "no wait for a free slot" else WIDE, name) for name in HOPPER_BUGS]
    + [(COOPERATIVE, name) for name in COOPERATIVE_BUGS]
    + [(SPLIT_FEW if name in ONLY_WITH_FEW_ROWS else SPLIT, name) for name in SPLIT_BUGS]
    + [
        (BLACKWELL_SPLIT_FEW if name in ONLY_WITH_FEW_ROWS else BLACKWELL_SPLIT, name)
        for name in BLACKWELL_SPLIT_BUGS
    ]
)

# A missing wait for Hopper's other_products_issued is detected only if slots are filled late, which
# happens in some random schedules.
BUG_SCHEDULES = (*SCHEDULES, *(({"load": "random", "multiply": "eager"}, i) for i in range(5, 25)))


# The register counts in the source of each chip's kernel, and others that are too large.
REGISTERS = {
    100: ("kStoreRegisters = kImages ? 240 : 232", "kStoreRegisters = kImages ? 248 : 240"),
    90: ("kNeedsMost ? kMostRegisters : 232", "kNeedsMost ? 248 : 240"),
}


@pytest.mark.parametrize("case", [SMALL, BLACKWELL_CUT, WIDE], ids=lambda case: case.source_dtype)
def test_a_request_for_too_many_registers_does_not_compile(tmp_path, case):
    kernel = case.source if case.tuning else cuda_launch.source(case.config)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compile_source(kernel, tmp_path, case.capability, REGISTERS[case.capability])
    assert "setmaxnreg would wait forever" in caught.value.stderr


@pytest.mark.parametrize(
    "case, name",
    every_second(ALL_BUGS, "each bug is compiled, and executed until it is noticed"),
    ids=lambda x: getattr(x, "source_dtype", x),
)
def test_a_deliberate_bug_is_noticed(tmp_path, case, name):
    bugs = {SMALL: BUGS, CUT: IMAGE_BUGS, CUT_ODD: ODD_BUGS, COOPERATIVE: COOPERATIVE_BUGS}
    bugs |= {SPLIT: SPLIT_BUGS, SPLIT_FEW: SPLIT_BUGS, SOME_STAY: STAYING_BUGS}
    bugs |= dict.fromkeys((BLACKWELL_SPLIT, BLACKWELL_SPLIT_FEW), BLACKWELL_SPLIT_BUGS)
    bugs |= {BLACKWELL_CUT: BLACKWELL_IMAGE_BUGS}
    right, wrong, message = bugs.get(case, HOPPER_BUGS)[name]
    kernel = case.source if case.tuning else cuda_launch.source(case.config)
    ptx = compile_source(kernel, tmp_path, case.capability, (right, wrong))
    operands = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    expected = np.asarray(xla.run(*operands, out_dtype=case.out_dtype))
    said = []
    for order, seed in BUG_SCHEDULES:
        try:
            y, _ = run(ptx, case, operands, schedule=order, seed=seed)
            said += ["results differ"] if (y != expected).any() else []
        except EmulatorError as error:
            said.append(str(error))
        if said and re.search(message, said[-1]):
            return
    pytest.fail(f"no message matches {message!r}: {said}")


@pytest.mark.parametrize("as_integers", [True, False])
def test_sums_of_pixels_beyond_2_24_are_exact(tmp_path, as_integers):
    """The corrections must be added as integers: float32 has no odd numbers beyond 2^24."""
    wrong = (
        "to_float(loaded[first] + correction.x, loaded[first + 1] + correction.y)",
        "float2{to_float(loaded[first], 0).x + float(correction.x),"
        " to_float(loaded[first + 1], 0).x + float(correction.y)}",
    )
    case = blackwell_images(2, (5, 6), 64, "none", 64, "float32", slots=5)
    source = cuda_launch.source(case.config)
    ptx = compile_source(source, tmp_path, 100, None if as_integers else wrong)
    patches, weight, *rest = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    # Pixels of 254 and 255, and weights of 126 and 127.
    patches, weight = (jnp.where(x > 0, 127, 126).astype(jnp.int8) for x in (patches, weight))
    assert 254 * 126 * 768 > 2**24
    expected = xla.run(patches, weight, *rest, out_dtype="float32")
    y, _ = run(ptx, case, (patches, weight, *rest))
    assert bool((y == np.asarray(expected)).all()) == as_integers


MAP_BUGS: dict[str, dict[str, Any]] = {
    "the wrong corner": dict(upper=(0, 0)),
    "a corner in the width": dict(upper=(-1, -15)),
    "one patch late": dict(base=48),
    "the lines of one patch": dict(
        dimensions=(48, 6, 16, 70), strides=(1, 48, 288, 4608), box=(48, 64)
    ),
    "the wrong distance of lines": dict(strides=(1, 96, 96, 4608)),
    "rows of patches of one image": dict(dimensions=(96, 3, 16, 7)),
}


# The same for Blackwell, where a load has the lines of single patches, and bugs in the map of the
# weight, whose lines are loaded with zeros behind them.
BLACKWELL_MAP_BUGS: dict[str, dict[str, Any]] = {
    "the wrong corner": dict(upper=(0, 0)),
    "a corner in the width": dict(upper=(-1, -15)),
    "one patch late": dict(base=48),
    "the wrong distance of lines": dict(strides=(1, 48, 96, 4608)),
    "rows of patches of one image": dict(dimensions=(48, 6, 16, 7)),
    "lines without a gap": dict(swizzle=0),
    "a swizzle of 128 bytes": dict(swizzle=128),
}
WEIGHT_BUGS: dict[str, dict[str, Any]] = {
    "no zeros behind a line": dict(dimensions=(64, 64, 16)),
    "lines of 64 bytes": dict(strides=(1, 768, 64), dimensions=(48, 64, 12)),
    "a line without its zeros": dict(box=(48, 32, 1)),
    "rows of the weight are lines": dict(strides=(1, 48, 768), dimensions=(48, 16, 64)),
    "the wrong swizzle of the weight": dict(swizzle=128),
}


@pytest.fixture(scope="module")
def ptx_of():
    return functools.cache(compiled)


@pytest.mark.parametrize(
    "case, index, change",
    [
        *((CUT, 0, change) for change in MAP_BUGS.values()),
        *((BLACKWELL_CUT, 0, change) for change in BLACKWELL_MAP_BUGS.values()),
        *((BLACKWELL_CUT, 1, change) for change in WEIGHT_BUGS.values()),
    ],
    ids=[
        f"{c}-{name}"
        for c, names in ((90, MAP_BUGS), (100, BLACKWELL_MAP_BUGS | WEIGHT_BUGS))
        for name in names
    ],
)
def test_a_wrong_map_of_images_or_of_their_weight_is_noticed(
    ptx_of, monkeypatch, case, index, change
):
    """ffi/launch.h makes the map; here the emulator gets a map that differs from it."""
    right, ptx = emulated_cuda.tensor_maps, ptx_of(case)

    def wrong(*arguments):
        maps = list(right(*arguments))
        moved = change | dict(base=maps[index].base + change.get("base", 0))
        maps[index] = dataclasses.replace(maps[index], **moved)
        return maps

    operands = draw_operands(0, case.patches, case.N, case.dtype, case.table)
    expected = np.asarray(xla.run(*operands, out_dtype=case.out_dtype))
    assert (run(ptx, case, operands)[0] == expected).all()
    monkeypatch.setattr(emulated_cuda, "tensor_maps", wrong)
    try:
        y, _ = run(ptx, case, operands)
    except EmulatorError as error:
        message = "bounding box|outside of all arrays|no warp can continue|out of bounds|overwrites"
        assert re.search(message, str(error))
    else:
        assert (y != expected).any()
