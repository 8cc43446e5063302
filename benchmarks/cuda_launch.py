"""Compiles one kernel of ffi/ with options that differ from the library's, and launches it.

The timeline build, which records times inside a kernel, and the tests use it.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.backends import cuda, cuda_build
from pallas_patch_embed.backends.cuda import CudaConfig
from pallas_patch_embed.base.chips import Chip, Target
from pallas_patch_embed.base.problem import Problem

# Number of stamps that a warp can record; kStamps in ffi/timeline.cuh.
STAMPS = 8192

# Size and alignment of a CUtensorMap, and the driver's enumerators of types and swizzles.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAP_TYPES = {"e4m3": 0, "i8": 0, "u8": 0, "u16": 1, "u64": 4, "f32": 7, "bf16": 9}
MAP_SWIZZLES = {0: 0, 64: 2, 128: 3}
L2_PROMOTION_256 = 3

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAX_DYNAMIC_SHARED = 8

# CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
CLUSTER_DIMENSION = 4

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
COMPUTE_CAPABILITY = (75, 76)


def source(config: CudaConfig) -> str:
    """Returns CUDA C++ that instantiates only this kernel."""
    sharing = "cooperative" if config.cooperative else f"b{config.blocks}"
    arguments = [
        *(config.dtype, config.out_dtype, "table" if config.has_table else "offset"),
        *(config.tile_n, config.rows, "split" if config.splits > 1 else sharing, config.slots),
        "streamed" if config.stream_weight else "stationary",
    ]
    return f"""
#define PATCH_EMBED_DTYPE kOne
#define PATCH_EMBED_SM{config.capability}_kOne(X) X({", ".join(map(str, arguments))})
#include "patch_embed_sm{config.capability}.cu"
"""


def compiled(config: CudaConfig, architecture: str, *options: str) -> bytes:
    """Compiles only this kernel with nvcc.

    Args:
      config: the kernel's config.
      architecture: "sm_90a" and so on.
      options: further options of nvcc: "-ptx" for PTX, "-cubin" for machine code.

    Raises:
      FileNotFoundError: no nvcc works; the message says which ones were tried.
    """
    nvcc, reason = cuda_build.find_nvcc()
    if nvcc is None:
        raise FileNotFoundError(reason)
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "kernel.cu"), Path(folder, "kernel")
        path.write_text(source(config))
        options = ["-std=c++17", "-O3", f"-arch={architecture}", f"-I{cuda_build.FFI}", *options]
        subprocess.run([nvcc, *options, path, "-o", out], check=True)
        return out.read_bytes()


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((f"{name}_{axis}", ctypes.c_uint) for name in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class Driver:
    """Calls libcuda's functions in JAX's context on the first device."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)
        version = [ctypes.c_int() for _ in COMPUTE_CAPABILITY]
        for number, attribute in zip(version, COMPUTE_CAPABILITY):
            self("cuDeviceGetAttribute", ctypes.byref(number), attribute, 0)
        self.architecture = "sm_{}{}a".format(*(number.value for number in version))

    def __call__(self, name: str, *arguments) -> None:
        if status := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status}, {text.value!r}")

    def tensor_map(self, plan: dict | None, address: int) -> bytes:
        """Returns a CUtensorMap; all zeros if the kernel has no such map.

        A plan with a "corner" describes an im2col map. The corner says, for each dimension between
        the first and the last, how far before the end of the tensor the bounding box of pixels
        ends. The box of an im2col map is given as channels and pixels.
        """
        if plan is None:
            return bytes(MAP_BYTES)
        room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        place = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        rank = len(plan["shape"])
        if corner := plan.get("corner"):
            name, corners = "cuTensorMapEncodeIm2col", ctypes.c_int * len(corner)
            box = [corners(), corners(*corner), *map(ctypes.c_uint32, plan["box"])]
        else:
            name, box = "cuTensorMapEncodeTiled", [(ctypes.c_uint32 * rank)(*plan["box"])]
        self(
            name,
            ctypes.c_void_p(place),
            MAP_TYPES[plan["type"]],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*plan["shape"]),
            (ctypes.c_uint64 * (rank - 1))(*plan["strides"]),
            *box,
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            MAP_SWIZZLES[plan["swizzle"]],
            L2_PROMOTION_256,
            0,
        )
        return ctypes.string_at(place, MAP_BYTES)


def prepared(config: CudaConfig, problem: Problem, chip: Chip) -> tuple[np.ndarray, dict]:
    """Returns the schedule of a kernel's workers, and the fields of its launch (`cuda.launch`)."""
    tiling = config.tiling(problem, chip)
    segments = tiling.schedule(problem.table_period)
    shapes = dict(M=problem.rows, N=problem.N, K=problem.K, period=problem.table_period)
    launched = dict(workers=tiling.workers, segments=segments.shape[1])
    return segments, cuda.launch(config, **shapes, **launched, pixels=cuda.pixels(problem))


def launch(config: CudaConfig, problem: Problem, chip: Chip, addresses: dict[str, int]) -> None:
    """Compiles a kernel, launches it once, and waits.

    Args:
      config: the kernel's config.
      problem: shapes and dtypes of the call.
      chip: the GPU.
      addresses: addresses in the GPU's memory of "patches", "weight", "scale", "table", "y" and
        "segments". If "stamps" has an address, the timeline build is launched, which writes them.
    """
    segments, plan = prepared(config, problem, chip)
    call = Driver()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    options = ["-cubin", *(["-DPATCH_EMBED_TIMELINE"] if "stamps" in addresses else [])]
    cubin = compiled(config, call.architecture, *options)
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, config.symbol.encode())
    call("cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED, plan["shared_memory"])
    # The fields of struct `Arguments` in ffi/kernel.h, in order.
    maps = [call.tensor_map(plan[name], addresses[name]) for name in ("patches", "weight", "y")]
    pointers = [addresses[name] for name in ("scale", "table", "y", "segments")]
    shapes = [problem.rows, problem.N, plan["chunks"]]
    width = cuda.pixels(problem)[1] // (problem.geometry.patch_size if problem.geometry else 1)
    row_patches = 1 if width % 2 else 2  # As row_patches() in ffi/kernel.h.
    numbers = [*shapes, problem.table_period, segments.shape[1], width, row_patches]
    content = b"".join(maps) + np.array(pointers, np.uint64).tobytes()
    content += np.array(numbers, np.int32).tobytes()
    content += bytes(-len(content) % 8) + np.uint64(addresses.get("stamps", 0)).tobytes()
    content += bytes(-len(content) % MAP_ALIGNMENT)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuFuncGetParamInfo", kernel, 0, ctypes.byref(offset), ctypes.byref(size))
    if size.value > len(content):
        raise RuntimeError(
            f"struct Arguments has {size.value} bytes, {len(content)} are packed here."
        )
    parameter = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p))
    # A CUlaunchAttribute has its number, 4 bytes of padding and a value of 64 bytes.
    cluster = np.zeros(18, np.uint32)
    cluster[[0, 2, 3, 4]] = CLUSTER_DIMENSION, plan["cluster"], 1, 1
    attributes = cluster.ctypes.data, plan["cluster"] > 1
    grid, block = (plan["thread_blocks"], 1, 1), (plan["threads"], 1, 1)
    how = LaunchConfig(*grid, *block, plan["shared_memory"], None, *attributes)
    call("cuLaunchKernelEx", ctypes.byref(how), kernel, parameter, None)
    call("cuCtxSynchronize")
    call("cuModuleUnload", module)


def stamped(operands, *, out_dtype: str) -> tuple[jax.Array, np.ndarray]:
    """Launches the timeline build of the kernel that backend "cuda" chooses for these operands.

    Args:
      operands: patches, weight, scale and table, on the first GPU.
      out_dtype: "bfloat16" or "float32".

    Returns:
      The result, and the stamps [blocks, warps, STAMPS] uint32 (ffi/timeline.cuh).
    """
    problem = Problem.of(*operands, out_dtype=out_dtype)
    device = operands[0].device
    chip = Target.of(device).chip
    if chip is None:
        raise NotImplementedError(f"{device} is not an NVIDIA GPU.")
    config = cuda.candidates(problem, Target.of(device))[0]
    segments, plan = prepared(config, problem, chip)
    arrays = dict(zip(("patches", "weight", "scale", "table"), operands))
    arrays["segments"] = jax.device_put(segments, device)
    arrays["y"] = jnp.full((*problem.patches[:-1], problem.N), jnp.nan, out_dtype, device=device)
    shape = (plan["thread_blocks"], plan["threads"] // 32, STAMPS)
    arrays["stamps"] = jnp.zeros(shape, jnp.uint32, device=device)
    jax.block_until_ready(arrays)
    launch(config, problem, chip, {name: x.unsafe_buffer_pointer() for name, x in arrays.items()})
    return arrays["y"], np.asarray(arrays["stamps"])
