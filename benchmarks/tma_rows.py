"""How fast TMA brings rows of patches to shared memory, alone, on a Hopper GPU.

  python -m benchmarks.tma_rows [--images 65 4736] [--phases 2000] [--json tma_rows.jsonl]

A kernel that cuts uint8 images while it loads them takes shorter rows than one that reads patches.
This measures what a row costs: in cycles of a multiprocessor, for one and for all of them, with
images that stay in the L2 cache and with more than fit. Where a cluster of thread blocks shares the
loads (multicast), a row counts for every block that receives it.

  im2col 16, 48, 96  a line of 64 patches of 16 pixels (of 32: 96 bytes), or a third of it
  tiled 128          a chunk of K of 64 patches, with the 128-byte swizzle, as the kernels load them
  lines              whole lines of the images: those of all patches that 64 patches may touch

Before anything is timed, every byte that each load brings is compared with the image.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.cuda_launch import MAX_DYNAMIC_SHARED, Driver
from pallas_patch_embed.backends import cuda_build

SOURCE = Path(__file__).with_suffix(".cu")

# As tma_rows.cu has them.
LOADS, MOST_SLOTS, THREADS = 4, 16, 128
CLUSTERS = (1, 2, 4)

# Side of an image in pixels; patches of a tile; shared memory for the ring, in bytes.
SIDE, TILE, RING_BYTES = 224, 64, 200 * 1024

# CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT and _CLOCK_RATE
MULTIPROCESSOR_COUNT, CLOCK_RATE = 16, 13


@dataclasses.dataclass(frozen=True)
class Rows:
    """One way to load: fields are those of `Arguments` in tma_rows.cu.

    Attributes:
      name: what tables call it.
      kernel: of the three in tma_rows.cu.
      row_bytes, box_rows: of one load.
      parts, step: loads of a line, and elements from one to the next.
      lines: of a tile.
      tile_rows: rows that a tile advances by.
      width: rows of the last dimension but one.
      patch: side of a patch in pixels.
    """

    name: str
    kernel: str
    row_bytes: int
    box_rows: int = TILE
    parts: int = 1
    step: int = 0
    lines: int = 16
    tile_rows: int = TILE
    width: int = SIDE // 16
    patch: int = 16

    @property
    def bytes(self) -> int:
        """Of a load."""
        return self.row_bytes * self.box_rows

    @property
    def stride(self) -> int:
        """Bytes of a load's place in a slot: the 128-byte swizzle repeats after 1024."""
        return -(-self.bytes // 1024) * 1024

    @property
    def slots(self) -> int:
        """Of the ring."""
        return min(MOST_SLOTS, RING_BYTES // (LOADS * self.stride))

    def plan(self, images: int) -> dict:
        """The tensor map of so many images, as `cuda.launch` describes one."""
        p, grid = self.patch, SIDE // self.patch
        line, rows = 3 * SIDE, images * grid
        if self.kernel == "im2col":
            return dict(
                type="u8",
                shape=[3 * p, grid, p, rows],
                strides=[3 * p, line, p * line],
                corner=[0, 1 - p],
                box=[self.row_bytes, self.box_rows],
                swizzle=0,
            )
        if self.kernel == "matrix":
            K, M = 3 * p * p, rows * grid
            return dict(type="u8", shape=[K, M], strides=[K], box=[128, TILE], swizzle=128)
        # A side of a box has at most 256 elements.
        box = [line // 8, 1, self.box_rows]
        return dict(
            type="u64", shape=[line // 8, p, rows], strides=[line, p * line], box=box, swizzle=0
        )

    def expected(self, images: np.ndarray, load: int) -> np.ndarray:
        """What a load brings, [box_rows, row_bytes]."""
        p, grid = self.patch, SIDE // self.patch
        tile, u = divmod(load, self.lines * self.parts)
        line, part = divmod(u, self.parts)
        begin = tile * self.tile_rows
        cut = images.reshape(len(images), grid, p, grid, 3 * p)
        if self.kernel == "im2col":
            found = cut[:, :, line].reshape(-1, 3 * p)[:, part * self.step :][:, : self.row_bytes]
        elif self.kernel == "matrix":
            # The map takes the bytes of an image for those of its patches.
            found = images.reshape(-1, 3 * p * p)[:, part * self.step :][:, : self.row_bytes]
        else:
            found = cut[:, :, line].reshape(-1, 3 * SIDE)
            begin //= self.width
        found = found[begin : begin + self.box_rows]
        missing = self.box_rows - len(found)
        found = np.pad(found, [(0, missing), (0, 0)])
        if self.kernel == "matrix":
            # The 128-byte swizzle exchanges units of 16 bytes.
            row, unit = np.indices((self.box_rows, 8))
            found = found.reshape(self.box_rows, 8, 16)[row, unit ^ row % 8]
        return found.reshape(self.box_rows, self.row_bytes)


ROWS = (
    Rows("im2col 16", "im2col", 16, parts=3, step=16),
    Rows("im2col 48", "im2col", 48),
    Rows("im2col 96", "im2col", 96, lines=32, width=SIDE // 32, patch=32),
    Rows("tiled 128", "matrix", 128, parts=6, step=128, lines=1, width=1),
    # 64 patches from an even one on touch at most 6 lines of 14.
    Rows("lines", "lines", 3 * SIDE, box_rows=6),
)


def compiled() -> bytes:
    """The machine code of tma_rows.cu.

    Raises:
      FileNotFoundError: no nvcc compiles it; it says what was tried.
    """
    nvcc, reason = cuda_build.find_nvcc()
    if nvcc is None:
        raise FileNotFoundError(reason)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tma_rows.cubin")
        options = ["-std=c++17", "-O3", "-arch=sm_90a", "-cubin", f"-I{cuda_build.FFI}"]
        subprocess.run([nvcc, *options, SOURCE, "-o", out], check=True)
        return out.read_bytes()


class Gpu:
    """The kernels on the first GPU, and their launch."""

    def __init__(self):
        self.driver = Driver()
        if self.driver.architecture != "sm_90a":
            raise NotImplementedError(
                f"benchmarks.tma_rows: this GPU is {self.driver.architecture}, expected sm_90a."
            )
        self.module = ctypes.c_void_p()
        self.driver("cuModuleLoadData", ctypes.byref(self.module), compiled())
        self.multiprocessors = self.attribute(MULTIPROCESSOR_COUNT)
        self.clock_mhz = self.attribute(CLOCK_RATE) / 1000

    def attribute(self, number: int) -> int:
        """An attribute of the device."""
        value = ctypes.c_int()
        self.driver("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        """The address of so many bytes, until the context ends."""
        address = ctypes.c_uint64()
        self.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        try:
            yield address.value
        finally:
            self.driver("cuMemFree_v2", address)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copies an array to the GPU."""
        source = ctypes.c_void_p(array.ctypes.data)
        size = ctypes.c_size_t(array.nbytes)
        self.driver("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, size)

    def download(self, address: int, array: np.ndarray) -> None:
        """Fills an array from the GPU."""
        target = ctypes.c_void_p(array.ctypes.data)
        size = ctypes.c_size_t(array.nbytes)
        self.driver("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), size)

    def launch(
        self, rows: Rows, cluster: int, blocks: int, phases: int, images: int, address: int, seen=0
    ) -> np.ndarray:
        """Runs a kernel once and returns the cycles of each block."""
        kernel = ctypes.c_void_p()
        name = f"{rows.kernel}_{cluster}".encode()
        self.driver("cuModuleGetFunction", ctypes.byref(kernel), self.module, name)
        shared = rows.slots * LOADS * rows.stride
        self.driver("cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED, shared)
        loads = rows.lines * rows.parts
        numbers = [phases, all_phases(rows, images), loads, rows.parts, rows.step]
        numbers += [rows.tile_rows, rows.width, rows.bytes, rows.stride, rows.slots]
        with self.memory(8 * blocks) as cycles:
            content = self.driver.tensor_map(rows.plan(images), address)
            content += np.array([cycles, seen], np.uint64).tobytes()
            content += np.array(numbers, np.int32).tobytes()
            content += bytes(-len(content) % 64)
            pointer = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p)
            parameter = (ctypes.c_void_p * 1)(pointer)
            grid, block = (blocks, 1, 1), (THREADS, 1, 1)
            self.driver("cuLaunchKernel", kernel, *grid, *block, shared, None, parameter, None)
            self.driver("cuCtxSynchronize")
            found = np.zeros(blocks, np.int64)
            self.download(cycles, found)
        return found


def all_phases(rows: Rows, images: int) -> int:
    """Phases of whole tiles of these images; the last tile may lack patches."""
    tiles = -(-images * (SIDE // rows.patch) ** 2 // TILE)
    return tiles * rows.lines * rows.parts // LOADS


def check(gpu: Gpu, rows: Rows, cluster: int, images: np.ndarray, address: int) -> None:
    """Compares every byte of every load with the images.

    Raises:
      RuntimeError: some differ.
    """
    phases = all_phases(rows, len(images))
    seen = np.zeros((phases, cluster, LOADS, rows.stride), np.uint8)
    with gpu.memory(seen.nbytes) as place:
        gpu.launch(rows, cluster, phases * cluster, 1, len(images), address, place)
        gpu.download(place, seen)
    wrong = []
    for phase, j in np.ndindex(phases, LOADS):
        expected = rows.expected(images, phase * LOADS + j).reshape(-1)
        if (seen[phase, :, j, : rows.bytes] != expected).any():
            wrong.append(phase * LOADS + j)
    if wrong:
        raise RuntimeError(
            f"benchmarks.tma_rows: {rows.name}, clusters of {cluster}: {len(wrong)} of "
            f"{phases * LOADS} loads are wrong, the first is {wrong[0]}."
        )


def measure(gpu: Gpu, rows: Rows, cluster: int, images: int, address: int, phases: int) -> dict:
    """Cycles of a row and bytes of a cycle, for one cluster and for all multiprocessors."""
    found = dict(rows=rows.name, row_bytes=rows.row_bytes, cluster=cluster, images=images)
    loaded = phases * LOADS * rows.box_rows
    everything = gpu.multiprocessors // cluster * cluster
    for where, blocks in (("one", cluster), ("all", everything)):
        cycles = min(
            float(np.median(gpu.launch(rows, cluster, blocks, phases, images, address)))
            for _ in range(5)
        )
        found |= {
            f"cycles_a_row_{where}": cycles / loaded,
            f"bytes_a_cycle_{where}": loaded * rows.row_bytes / cycles,
            # Where rows of different lengths are compared: of 48 bytes, one patch's line.
            f"cycles_for_48_bytes_{where}": 48 * cycles / (loaded * rows.row_bytes),
        }
    return found


def main() -> None:
    """Checks, measures, and prints a line of JSON for each way and number of images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[65, 4736])
    parser.add_argument("--phases", type=int, default=2000, help="of four loads, a block")
    parser.add_argument("--json", type=Path, help="file for the lines, too")
    chosen = parser.parse_args()
    gpu, lines = Gpu(), []
    print(f"{gpu.multiprocessors} multiprocessors, {gpu.clock_mhz:.0f} MHz at most")
    # An odd number of images, so that the last tile lacks patches.
    few = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    with gpu.memory(few.nbytes) as address:
        gpu.upload(address, few)
        for rows, cluster in itertools.product(ROWS, CLUSTERS):
            check(gpu, rows, cluster, few, address)
    print("every byte of every load is right")
    many = np.random.default_rng(1).integers(0, 256, (64, SIDE, SIDE, 3), np.uint8)
    for count in chosen.images:
        size = many[0].nbytes
        with gpu.memory(count * size) as address:
            for begin in range(0, count, len(many)):
                gpu.upload(address + begin * size, many[: min(len(many), count - begin)])
            for rows, cluster in itertools.product(ROWS, CLUSTERS):
                line = json.dumps(measure(gpu, rows, cluster, count, address, chosen.phases))
                print(line, flush=True)
                lines.append(line + "\n")
    if chosen.json:
        chosen.json.write_text("".join(lines))


if __name__ == "__main__":
    main()
