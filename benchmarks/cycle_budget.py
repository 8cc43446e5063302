"""The cycles that a tile of a kernel needs of each resource of a multiprocessor, as an estimate."""

import collections
import dataclasses
import re
import typing

from benchmarks.machine_code import CLASSES, MATRIX, Code, access_bytes, class_of
from pallas_patch_embed.base.chips import A100, B200, H200, RTX_3090, RTX_4090

OUT_DTYPE, OUT_BYTES = "bfloat16", 2

# The chip that represents each architecture.
CHIP_OF = {
    "sm_80": A100,
    "sm_86": RTX_3090,
    "sm_89": RTX_4090,
    "sm_90": H200,
    "sm_100": B200,
}

# Dense multiply-adds per cycle of a multiprocessor's tensor cores, accumulated in float32 or int32.
# They are the peak rates of NVIDIA's white papers and of the data sheets of H200 and B200, divided
# by the number of multiprocessors and by the clock of that peak (1.41, 1.695, 2.52, 1.83 and
# 1.86 GHz), and rounded to a power of two, which changes them by less than 1%. On compute
# capability 8.0 and 8.6 float8 is multiplied as float16.
MULTIPLY_ADDS = {
    "sm_80": dict(float8_e4m3fn=1024, bfloat16=1024, int8=2048),
    "sm_86": dict(float8_e4m3fn=256, bfloat16=256, int8=1024),
    "sm_89": dict(float8_e4m3fn=512, bfloat16=256, int8=1024),
    "sm_90": dict(float8_e4m3fn=4096, bfloat16=2048, int8=4096),
    "sm_100": dict(float8_e4m3fn=8192, bfloat16=4096, int8=8192),
}

# L2_BYTES: bytes per cycle that a multiprocessor exchanges with L2 (an assumption: NVIDIA does not
# publish it for these chips). SHARED_BYTES: bytes per cycle through a multiprocessor's memory for
# L1 and shared memory. SCHEDULERS: schedulers of a multiprocessor, which issue one instruction per
# cycle each.
L2_BYTES, SHARED_BYTES, SCHEDULERS = 64, 128, 4

# Bytes along K that one wgmma or tcgen05.mma multiplies.
PRODUCT_BYTES = 32

# LOAD_LATENCIES: cycles of a B200 from the issue of a TMA load until its bytes have arrived, as a
# range. NVIDIA does not publish them; the published log of another kernel for this operator
# estimates 1940. HANDOVER: cycles from the last product of a slot until its next load is issued (an
# assumption).
LOAD_LATENCIES, HANDOVER = (1500, 1940, 2400), 200

ASSUMPTIONS = f"""\
This is an estimate, not a measurement. It assumes no latency, no bank conflicts and no waits, and
that everything overlaps. Each number is a lower bound on the cycles that one multiprocessor spends
on a tile (in a cluster of two: on its half of the tile); the largest number is the limit.
tensor: the multiply-adds at the dense peak rate.
DRAM: the grid reads patches once and writes y once; weight, table, scales and segments stay in L2.
  All multiprocessors with work share the bandwidth, at the clock above; at a lower clock the same
  traffic takes fewer cycles.
L2: {L2_BYTES} bytes per cycle (assumed, not published) for patches, streamed weight, and the loads
  of threads in the tile loop, such as those of a table that is not in registers. All loads count as
  misses in L1.
shared: {SHARED_BYTES} bytes per cycle for the operands of wgmma (for 32 bytes of K: 64 rows of
  patches and all columns) and of tcgen05.mma (a block's rows and its part of the columns), for the
  reads of TMA stores, and for all loads and stores of threads, because those to global memory take
  the same path. What TMA and cp.async write to shared memory ("filled") is counted on Blackwell
  only: if it were on Hopper, a bfloat16 tile of Pallas' kernel would take longer than its trace on
  an H200 shows (docs/performance.md). For Blackwell there is no trace.
ring: on Blackwell, the loads of a tile into the ring. Each of them keeps its slot for a latency of
  {LOAD_LATENCIES[0]} to {LOAD_LATENCIES[-1]} cycles (assumed), the slot's products, and {HANDOVER}
  cycles (assumed).
issue: instructions of the tile loop on {SCHEDULERS} schedulers, each with one per cycle. A wait
  loop counts once, both sides of a branch count, and warps that only copy are left out.
Results are {OUT_DTYPE}; all images share one table."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """The instructions that the warps of one role execute for a tile.

    Attributes:
      role: task of these warps.
      warps: number of these warps in a thread block.
      executed: opcode with modifiers -> how often a warp executes it. " RS" is appended to a wgmma
        whose patches are in registers.
    """

    role: str
    warps: int
    executed: dict[str, int]

    def by_class(self) -> dict[str, int]:
        """Counts a warp's instructions by class."""
        found = collections.Counter()
        for opcode, times in self.executed.items():
            found[class_of(opcode)] += times
        return dict(found)

    def issue_slots(self) -> dict[str, int]:
        """Counts, by class, the instructions of the scheduler that has the most of these warps."""
        return {name: -(-self.warps // SCHEDULERS) * n for name, n in self.by_class().items()}

    def bytes_of(self, *names: str) -> int:
        """Counts the bytes that all warps move with the loads and stores of these names."""
        found = ((x, n) for x, n in self.executed.items() if x.split(".")[0] in names)
        return 32 * self.warps * sum(access_bytes(x) * n for x, n in found)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of a kernel.

    Attributes:
      rows, columns: size of the tile in y.
      K: multiplied elements of a row, including padding.
      blocks: number of multiprocessors that share the tile.
      slices: number of slices of N.
      multiprocessors: number of multiprocessors that work at the same time.
      patch_bytes: bytes of the tile's patches, or of their pixels.
      tma_bytes: bytes that TMA loads to shared memory for the tile; 0 if threads load them.
      tma_rows: number of rows, over all TMA boxes, that hold those bytes.
      slots: number of slots of the ring, if its time is estimated; otherwise 0.
      fills: number of times that a slot is filled for the tile.
    """

    rows: int
    columns: int
    K: int
    blocks: int
    slices: int
    multiprocessors: int
    patch_bytes: int
    tma_bytes: int
    tma_rows: int
    slots: int = 0
    fills: int = 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel that a backend chooses for a problem, and the resources it uses.

    Attributes:
      family: Pallas, CUDA, Triton, or Triton for images.
      architecture: "sm_90" and so on.
      dtype: dtype of patches and weight.
      config: tile sizes and pipeline depths, as text.
      code: the machine code.
      shared_memory_bytes: shared memory of a thread block; for Pallas, excluding the barriers.
      tensor_memory_columns: allocated columns of tensor memory, of 32 bits each.
      tile: one of the kernel's tiles.
      loops: the instructions that are executed for a tile, one entry per role.
    """

    family: str
    architecture: str
    dtype: str
    config: str
    code: Code
    shared_memory_bytes: int
    tensor_memory_columns: int
    tile: Tile
    loops: tuple[Loop, ...]

    @property
    def label(self) -> str:
        """Returns the kernel's name in tables."""
        return f"{self.family} {self.architecture} {self.dtype}"


class Share(typing.NamedTuple):
    """A tile's use of one resource of a multiprocessor: bytes or operations, and cycles."""

    amount: float
    cycles: float


def budget(kernel: Kernel) -> dict[str, Share]:
    """Estimates one tile's use of each resource, under the ASSUMPTIONS."""
    tile, chip = kernel.tile, CHIP_OF[kernel.architecture]
    y_bytes = tile.rows * tile.columns * OUT_BYTES / tile.blocks
    products = tile.rows * tile.columns * tile.K / tile.blocks
    dram = tile.patch_bytes / tile.slices / tile.blocks + y_bytes
    dram_rate = chip.bandwidth / (chip.clock * 1e9) / tile.multiprocessors
    l2 = filled_bytes(kernel)
    shared = l2 if kernel.tensor_memory_columns else 0
    accesses = {*CLASSES["shared"], "LD", "LDG", "ST", "STG"}
    for loop in kernel.loops:
        l2 += loop.bytes_of("LD", "LDG")
        shared += loop.bytes_of(*accesses) + operand_bytes(loop, tile)
        shared += y_bytes if any(x.startswith("UTMASTG") for x in loop.executed) else 0
    issue = sum(sum(loop.issue_slots().values()) for loop in kernel.loops)
    return {
        "tensor": Share(products, products / MULTIPLY_ADDS[kernel.architecture][kernel.dtype]),
        "DRAM": Share(dram, dram / dram_rate),
        "L2": Share(l2, l2 / L2_BYTES),
        "shared": Share(shared, shared / SHARED_BYTES),
        "issue": Share(issue, issue),
    }


def ring(kernel: Kernel) -> tuple[float, ...]:
    """Estimates the cycles in which the ring can load a tile, for each of LOAD_LATENCIES."""
    tile = kernel.tile
    if not tile.slots:
        return ()
    products = budget(kernel)["tensor"].cycles / tile.fills
    return tuple(tile.fills * (x + products + HANDOVER) / tile.slots for x in LOAD_LATENCIES)


def filled_bytes(kernel: Kernel) -> float:
    """Counts the bytes that TMA and cp.async load to one multiprocessor's shared memory."""
    copied = sum(loop.bytes_of("LDGSTS") for loop in kernel.loops)
    return kernel.tile.tma_bytes / kernel.tile.blocks + copied


def binding(shares: dict[str, Share]) -> str:
    """Names the resource that takes the most cycles."""
    return max(shares, key=lambda name: shares[name].cycles)


def operand_bytes(loop: Loop, tile: Tile) -> int:
    """Counts the operand bytes that a multiprocessor's tensor cores read from shared memory."""
    found = 0
    for opcode, times in loop.executed.items():
        if shape := re.match(r"[HIQ]GMMA\.64x(\d+)x\d+", opcode):
            patch_rows = 0 if opcode.endswith(" RS") else 64
            found += loop.warps // 4 * times * PRODUCT_BYTES * (patch_rows + int(shape[1]))
        elif opcode.startswith("UTC") and MATRIX.match(opcode):
            found += times * PRODUCT_BYTES * (tile.rows + tile.columns) // tile.blocks
    return found
