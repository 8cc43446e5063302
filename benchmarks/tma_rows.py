"""Measures the rate at which TMA alone loads rows of patches to shared memory on a Hopper GPU.

  python -m benchmarks.tma_rows [--images 65 4736] [--phases 2000] [--json tma_rows.jsonl]

A kernel that cuts uint8 images while it loads them uses shorter rows than one that reads patches.
This measures the cost of a row in cycles of a multiprocessor: on one multiprocessor and on all of
them, with images that fit in the L2 cache and with images that do not. If a cluster of thread
blocks shares the loads (multicast), a row counts once for every block that receives it.

A load covers one line of 64 patches of 16 pixels; longer rows also contain pixels of neighbouring
patches. `im2col 16` to `im2col 336` have rows of 16 to 336 bytes: a third of a patch's line, the
lines of one, two and four patches, and a third and a half of an image's line. `lines` loads whole
lines of images as tiles. `tiled 128` loads a chunk of K of 64 patches, as kernels do from patches.

Before anything is timed, every loaded byte is compared with the image.
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

# The same values as in tma_rows.cu.
LOADS, MOST_SLOTS, THREADS = 4, 16, 128
CLUSTERS = (1, 2, 4)

# Number of patches in a tile, and bytes of shared memory for the ring.
TILE, RING_BYTES = 64, 200 * 1024

# CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT and _CLOCK_RATE
MULTIPROCESSOR_COUNT, CLOCK_RATE = 16, 13

# Sides of a patch and of an image in pixels; `Rows.side` may override that of the image.
PATCH, SIDE = 16, 224


@dataclasses.dataclass(frozen=True)
class Rows:
    """A layout of loads.

    Attributes:
      name: name in tables.
      mode: kIm2col, kMatrix or kLines of tma_rows.cu.
      row_bytes, box_rows: bytes of a row, and number of rows, of one load.
      span: bytes from one row of the tensor to the next.
      parts, step: number of pieces in which a row of the tensor is loaded, and elements from one
        piece to the next.
      lines: number of lines in a tile.
      tile_bytes: bytes from one tile to the next along the rows.
      side: side of an image in pixels.
      swizzle: width of the swizzle in bytes.
      element: type of the tensor's elements, and its size in bytes.
    """

    name: str
    mode: str
    row_bytes: int
    box_rows: int
    span: int
    parts: int = 1
    step: int = 0
    lines: int = PATCH
    tile_bytes: int = 3 * PATCH * TILE
    side: int = SIDE
    swizzle: int = 0
    element: tuple[str, int] = ("u8", 1)

    @property
    def kernel(self) -> str:
        """Returns the kernel's name in the CUDA source, without the size of the cluster."""
        return self.name.replace(" ", "_")

    @property
    def width(self) -> int:
        """Returns the size of the tensor's second-to-last dimension, in rows."""
        return 3 * self.side // self.span if self.mode == "kIm2col" else 1

    @property
    def loads(self) -> int:
        """Returns the number of loads of a tile."""
        return self.lines * self.parts

    @property
    def source(self) -> str:
        """Returns the layout's entry in the CUDA source."""
        numbers = (self.loads, self.parts, self.step, self.tile_bytes, self.span, self.width)
        return f"X({self.kernel}, {self.mode}, {', '.join(map(str, numbers))})"

    @property
    def bytes(self) -> int:
        """Returns the bytes of a load."""
        return self.row_bytes * self.box_rows

    @property
    def stride(self) -> int:
        """Returns the bytes of a load's place in a slot, a multiple of the swizzle's period."""
        return -(-(self.swizzle or self.row_bytes) * self.box_rows // 1024) * 1024

    @property
    def slots(self) -> int:
        """Returns the number of slots of the ring."""
        return min(MOST_SLOTS, RING_BYTES // (LOADS * self.stride))

    def images(self, of_224: int) -> int:
        """Returns the number of images with as many bytes as `of_224` images of 224 pixels."""
        return of_224 * SIDE**2 // self.side**2

    def tiles(self, images: int) -> int:
        """Returns the number of tiles of some images; the last tile may have fewer patches."""
        return -(-images * (self.side // PATCH) ** 2 // TILE)

    def phases(self, images: int) -> int:
        """Returns the number of phases of all tiles of some images."""
        return self.tiles(images) * self.loads // LOADS

    def plan(self, images: int) -> dict:
        """Describes the tensor map of some images in the form of `cuda.launch`."""
        line, rows = 3 * self.side, images * self.side // PATCH
        kind, size = self.element
        common = dict(type=kind, swizzle=self.swizzle)
        if self.mode == "kMatrix":
            K = 3 * PATCH**2
            M = rows * self.side // PATCH
            return dict(shape=[K, M], strides=[K], box=[self.row_bytes, TILE], **common)
        strides = [line, PATCH * line]
        if self.mode == "kLines":
            box = [line // size, 1, self.box_rows]
            return dict(shape=[line // size, PATCH, rows], strides=strides, box=box, **common)
        return dict(
            shape=[self.span // size, self.width, PATCH, rows],
            strides=[self.span, *strides],
            corner=[0, 1 - PATCH],
            box=[self.row_bytes // size, self.box_rows],
            **common,
        )

    def expected(self, images: np.ndarray, load: int) -> np.ndarray:
        """Returns the bytes of a load, [box_rows, row_bytes], in the order of shared memory."""
        tile, u = divmod(load, self.loads)
        line, part = divmod(u, self.parts)
        if self.mode == "kMatrix":
            # The map interprets the bytes of an image as those of patches.
            rows = images.reshape(-1, 3 * PATCH**2)
        else:
            rows = images.reshape(-1, PATCH, 3 * self.side)[:, line].reshape(-1, self.span)
        begin = tile * self.tile_bytes // self.span
        rows = rows[begin : begin + self.box_rows, part * self.step :][:, : self.row_bytes]
        return np.pad(rows, [(0, self.box_rows - len(rows)), (0, 0)])

    def unswizzled(self, place: np.ndarray) -> np.ndarray:
        """Unswizzles a load in shared memory, [..., stride], to [..., box_rows, row_bytes]."""
        pitch = self.swizzle or self.row_bytes
        rows = place[..., : pitch * self.box_rows].reshape(*place.shape[:-1], self.box_rows, pitch)
        if self.swizzle:
            # The 128-byte swizzle permutes units of 16 bytes.
            row, unit = np.indices((self.box_rows, pitch // 16))
            units = rows.reshape(*rows.shape[:-1], pitch // 16, 16)
            rows = units[..., row, unit ^ row % 8, :].reshape(rows.shape)
        return rows[..., : self.row_bytes]


def im2col(row_bytes: int, box_rows: int, **more) -> Rows:
    """Returns a layout with rows of `row_bytes` bytes in im2col mode."""
    more = dict(name=f"im2col {row_bytes}", span=row_bytes) | more
    return Rows(mode="kIm2col", row_bytes=row_bytes, box_rows=box_rows, **more)


# The layouts that are measured. A tile may begin inside a row that is not a whole number of
# patches, and then needs one row more.
ROWS = (
    im2col(16, 64, span=48, parts=3, step=16),
    im2col(48, 64),
    im2col(96, 32),
    im2col(96, 32, name="im2col 96 swizzled", swizzle=128),
    im2col(192, 16, side=256),
    im2col(224, 15),
    im2col(336, 10, element=("u16", 2)),
    Rows(
        *("tiled 128", "kMatrix", 128, TILE, 1),
        parts=6,
        step=128,
        lines=1,
        tile_bytes=TILE,
        swizzle=128,
    ),
    # 64 patches that begin at an even one lie in at most 6 lines of 14 patches.
    Rows("lines", "kLines", 3 * SIDE, 6, 3 * SIDE, element=("u64", 8)),
)


def compiled() -> bytes:
    """Compiles tma_rows.cu to machine code.

    Raises:
      FileNotFoundError: no nvcc works; the message says which ones were tried.
    """
    nvcc, reason = cuda_build.find_nvcc()
    if nvcc is None:
        raise FileNotFoundError(reason)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "tma_rows.cu"), Path(folder, "tma_rows.cubin")
        listed = " ".join(rows.source for rows in ROWS)
        source.write_text(f'#define TMA_ROWS(X) {listed}\n#include "{SOURCE}"\n')
        options = ["-std=c++17", "-O3", "-arch=sm_90a", "-cubin", f"-I{cuda_build.FFI}"]
        subprocess.run([nvcc, *options, source, "-o", out], check=True)
        return out.read_bytes()


class Gpu:
    """Launches the kernels on the first GPU."""

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
        """Returns an attribute of the device."""
        value = ctypes.c_int()
        self.driver("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        """Yields the address of `size` bytes, which are freed when the context ends."""
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
        """Copies memory of the GPU to an array."""
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
        numbers = [phases, rows.phases(images), rows.bytes, rows.stride, rows.slots]
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


def check(gpu: Gpu, rows: Rows, cluster: int, images: np.ndarray, address: int) -> None:
    """Compares every byte of every load with the images.

    Raises:
      RuntimeError: some bytes differ.
    """
    phases = rows.phases(len(images))
    seen = np.zeros((phases, cluster, LOADS, rows.stride), np.uint8)
    with gpu.memory(seen.nbytes) as place:
        gpu.launch(rows, cluster, phases * cluster, 1, len(images), address, place)
        gpu.download(place, seen)
    wrong = []
    for phase, j in np.ndindex(phases, LOADS):
        expected = rows.expected(images, phase * LOADS + j)
        if (rows.unswizzled(seen[phase, :, j]) != expected).any():
            wrong.append(phase * LOADS + j)
    if wrong:
        raise RuntimeError(
            f"benchmarks.tma_rows: {rows.name}, clusters of {cluster}: {len(wrong)} of "
            f"{phases * LOADS} loads are wrong, the first is {wrong[0]}."
        )


def measure(gpu: Gpu, rows: Rows, cluster: int, images: int, address: int, phases: int) -> dict:
    """Measures cycles per load, row and tile, on one cluster and on all multiprocessors."""
    found = dict(rows=rows.name, row_bytes=rows.row_bytes, cluster=cluster, images=images)
    loads = phases * LOADS
    everything = gpu.multiprocessors // cluster * cluster
    for where, blocks in (("one", cluster), ("all", everything)):
        cycles = min(
            float(np.median(gpu.launch(rows, cluster, blocks, phases, images, address)))
            for _ in range(5)
        )
        found |= {
            f"cycles_a_load_{where}": cycles / loads,
            f"cycles_a_row_{where}": cycles / (loads * rows.box_rows),
            f"bytes_a_cycle_{where}": loads * rows.bytes / cycles,
            # A tile has 64 patches and the whole of K.
            f"cycles_a_tile_{where}": cycles / loads * rows.loads,
        }
    return found


def main() -> None:
    """Checks and measures the layouts, and prints a line of JSON for each number of images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[65, 4736])
    parser.add_argument(
        "--phases", type=int, default=2000, help="phases per block; each has four loads"
    )
    parser.add_argument("--json", type=Path, help="file to which the lines are also written")
    chosen = parser.parse_args()
    gpu, lines = Gpu(), []
    print(f"{gpu.multiprocessors} multiprocessors, at most {gpu.clock_mhz:.0f} MHz")
    # With an odd number of images the last tile is partly empty.
    few = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    with gpu.memory(few.nbytes) as address:
        gpu.upload(address, few)
        for rows, cluster in itertools.product(ROWS, CLUSTERS):
            count, side = rows.images(len(few)), rows.side
            images = few.reshape(-1)[: count * 3 * side**2].reshape(count, side, side, 3)
            check(gpu, rows, cluster, images, address)
    print("every byte of every load is correct")
    many = np.random.default_rng(1).integers(0, 256, (64, SIDE, SIDE, 3), np.uint8)
    for count in chosen.images:
        size = many[0].nbytes
        with gpu.memory(count * size) as address:
            for begin in range(0, count, len(many)):
                gpu.upload(address + begin * size, many[: min(len(many), count - begin)])
            for rows, cluster in itertools.product(ROWS, CLUSTERS):
                of_side = rows.images(count)
                measured = measure(gpu, rows, cluster, of_side, address, chosen.phases)
                line = json.dumps(measured)
                print(line, flush=True)
                lines.append(line + "\n")
    if chosen.json:
        chosen.json.write_text("".join(lines))


if __name__ == "__main__":
    main()
