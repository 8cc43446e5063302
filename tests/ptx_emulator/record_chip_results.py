"""Runs the programs of `chip_programs.py` on a Hopper GPU, and records the results.

    python -m tests.ptx_emulator.record_chip_results

The driver compiles the PTX. The results of this project's Hopper kernels in `emulated.py` are also
recorded.
"""

import argparse
import concurrent.futures
import ctypes
import json
from pathlib import Path

import numpy as np

from tests.kernels import emulated
from tests.ptx_emulator import chip_programs

# Constants of the CUDA driver API (cuda.h).
COMPUTE_CAPABILITY = (75, 76)
CLUSTER_DIMENSION = 4
TENSOR_TYPES = {1: 0, 2: 1, 4: 2}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class Attribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Chip:
    """Runs programs on the first GPU through the driver."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)

    def call(self, name: str, *arguments) -> None:
        """Calls a function of the driver, which must succeed."""
        if code := getattr(self.driver, name)(*arguments):
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")

    def describe(self) -> dict:
        """Returns the GPU's name and compute capability, and the driver's version."""
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        numbers = []
        for attribute in COMPUTE_CAPABILITY:
            number = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(number), attribute, self.device)
            numbers.append(number.value)
        return {
            "device": name.value.decode(),
            "compute_capability": ".".join(map(str, numbers)),
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        }

    def run(self, program: chip_programs.Program) -> list[np.ndarray]:
        """Executes a program on the GPU and returns its arrays."""
        self.call("cuCtxSetCurrent", self.context)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), program.ptx.encode())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"program")
        pointers = []
        for array in program.arrays:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
            source = np.ascontiguousarray(array)
            size = ctypes.c_size_t(array.nbytes)
            self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(source.ctypes.data), size)
            pointers.append(pointer)
        maps = [self._tensor_map(m, pointers[m.array]) for m in program.maps]
        arguments = [*pointers, *maps]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        cluster = Attribute(id=CLUSTER_DIMENSION, value=(program.cluster, 1, 1))
        config = LaunchConfig(
            grid=(program.grid, 1, 1),
            block=(program.block, 1, 1),
            attributes=ctypes.pointer(cluster),
            count=1,
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)
        self.call("cuCtxSynchronize")
        found = []
        for array, pointer in zip(program.arrays, pointers):
            result = np.empty_like(array)
            size = ctypes.c_size_t(array.nbytes)
            self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(result.ctypes.data), pointer, size)
            self.call("cuMemFree_v2", pointer)
            found.append(result)
        self.call("cuModuleUnload", module)
        return found

    def _tensor_map(self, m: chip_programs.Map, pointer):
        room = ctypes.create_string_buffer(128 + 64)
        begin = -ctypes.addressof(room) % 64
        made = (ctypes.c_char * 128).from_buffer(room, begin)
        rank = len(m.box)
        self.call(
            "cuTensorMapEncodeTiled",
            made,
            TENSOR_TYPES[m.itemsize],
            rank,
            pointer,
            (ctypes.c_uint64 * rank)(*m.dimensions),
            (ctypes.c_uint64 * max(1, rank - 1))(*m.strides[1:]),
            (ctypes.c_uint32 * rank)(*m.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            SWIZZLES[m.swizzle],
            0,
            0,
        )
        return made


def main() -> None:
    """Runs all programs and writes the digests of the programs and of their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=chip_programs.ANSWERS)
    parser.add_argument(
        "--compare", action="store_true", help="also compares the results with the emulator's"
    )
    arguments = parser.parse_args()
    chip, answers, wrong = Chip(), {}, 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, family in chip_programs.FAMILIES.items():
            programs = list(family())
            answers[name] = {}
            for program, found in zip(programs, pool.map(chip.run, programs)):
                answers[name][program.name] = [program.question, chip_programs.digest(*found)]
                if arguments.compare:
                    wrong += _differs(program, found)
            print(f"{name}: {len(programs)} programs", flush=True)
    answers["kernels"] = {name: kernel_answer(name) for name in emulated.HOPPER}
    content = {**chip.describe(), "answers": answers}
    arguments.out.write_text(json.dumps(content, indent=0) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} programs differ from the emulator")


def kernel_answer(name: str) -> str:
    """Runs a kernel of `emulated.CASES` on this machine's GPU; returns a digest of its result."""
    case = emulated.CASES[name]
    operands = case.draw(len(name))
    return chip_programs.digest(np.asarray(case.function()(*operands)))


def _differs(program, found) -> bool:
    """Returns whether the emulator's results differ, and prints the differences."""
    expected = chip_programs.emulated(program)
    for i, (here, there) in enumerate(zip(expected, found)):
        if not np.array_equal(here, there):
            at = np.flatnonzero(here.reshape(-1) != there.reshape(-1))
            few = [(int(j), hex(here.reshape(-1)[j]), hex(there.reshape(-1)[j])) for j in at[:6]]
            print(
                f"{program.name}: array {i} has {len(at)} differences (emulator, chip): {few}",
                flush=True,
            )
            return True
    return False


if __name__ == "__main__":
    main()
