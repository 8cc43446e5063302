"""The operator in CUTLASS: a GEMM with a fused epilogue, compiled if nvcc and CUTLASS are found.

The kernels, in benchmarks/cutlass.cu, are for Hopper. CUTLASS's headers come from the folder in the
environment variable CUTLASS_PATH, or from pip's nvidia-cutlass (4.2).
"""

import concurrent.futures
import ctypes
import functools
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from pallas_patch_embed.backends.cuda_build import find_nvcc

SOURCE = Path(__file__).with_name("cutlass.cu")

DTYPES = ("float8_e4m3fn", "bfloat16", "int8")
SCHEDULES = ("pingpong", "cooperative")
KERNELS = tuple(itertools.product(DTYPES, SCHEDULES))

# Alignment of rows that TMA requires, in bytes.
ALIGNMENT = 16

# Without NDEBUG the kernels contain calls for failed assertions, and ptxas then makes each product
# wait for the previous one.
OPTIONS = (
    "-std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr "
    "--Werror all-warnings -Xptxas=-warn-spills -Xcompiler=-fPIC,-fvisibility=hidden"
).split()


def headers() -> Path | None:
    """Finds the folder with cutlass/cutlass.h; None if there is none."""
    path = os.environ.get("CUTLASS_PATH")
    folders = [Path(path, "include"), Path(path)] if path else []
    spec = importlib.util.find_spec("cutlass_library")
    for place in (spec and spec.submodule_search_locations) or ():
        folders.append(Path(place, "source", "include"))
    return next((x for x in folders if (x / "cutlass" / "cutlass.h").exists()), None)


def missing() -> str | None:
    """Names the tool that is missing; None if all tools are installed."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++)."
    nvcc, reason = find_nvcc(compiler)
    if nvcc is None:
        return f"{reason}."
    if headers() is None:
        return (
            "CUTLASS's headers are missing: pip install nvidia-cutlass==4.2.0, or set CUTLASS_PATH."
        )
    return None


def _target(dtype: str, schedule: str) -> str:
    """Returns the name of the custom call and of the library's function."""
    return f"patch_embed_cutlass_{dtype}_{schedule}"


def build(folder: Path | None = None) -> Path:
    """Compiles each kernel in its own process, and links the library.

    Args:
      folder: folder for the library; if None, a new temporary one.

    Returns:
      The path of the library, which can be loaded without a GPU.

    Raises:
      RuntimeError: a tool is missing, or nvcc fails; the message has the reason.
    """
    if reason := missing():
        raise RuntimeError(f"benchmarks.cutlass: {reason}")
    folder = Path(folder or tempfile.mkdtemp(prefix="cutlass"))
    library = folder / "libpatch_embed_cutlass.so"
    compiler = shutil.which("g++")
    nvcc, _ = find_nvcc(compiler)

    def run(*arguments: str | Path) -> None:
        command = [nvcc, "-ccbin", compiler, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"benchmarks.cutlass: nvcc fails.\n{done.stdout[-4000:]}")

    def compiled(kernel: tuple[str, str]) -> Path:
        places = [f"-isystem={path}" for path in (headers(), jax.ffi.include_dir())]
        defined = [f"-DPATCH_EMBED_{x}={y}" for x, y in zip(("DTYPE", "SCHEDULE"), kernel)]
        out = folder / f"{_target(*kernel)}.o"
        run(*OPTIONS, *places, *defined, "-c", SOURCE, "-o", out)
        return out

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        run("-shared", *pool.map(compiled, KERNELS), "-o", library)
    return library


@functools.cache
def _registered() -> str | None:
    """Builds and loads the library and registers its kernels once; returns the error, or None."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = ctypes.CDLL(str(build(Path(folder))))
        for kernel in KERNELS:
            handler = jax.ffi.pycapsule(getattr(library, _target(*kernel)))
            jax.ffi.register_ffi_target(_target(*kernel), handler, platform="CUDA")
    except RuntimeError as error:
        return str(error)
    return None


def register() -> None:
    """Registers the kernels with XLA.

    Raises:
      RuntimeError: the kernels cannot be built.
    """
    if reason := _registered():
        raise RuntimeError(reason)


def fused(
    patches: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str = "bfloat16",
    schedule: str = "pingpong",
) -> jax.Array:
    """Computes y[b, s, n] = bf16((sum_k patches[b, s, k] * weight[n, k]) * scale[n] + table[s, n]).

    Args:
      patches: [B, S, K] float8_e4m3fn, bfloat16 or int8; a row is a multiple of 16 bytes.
      weight: [N, K] of the same dtype; N is a multiple of 8.
      scale: [N] float32.
      table: [S, N] bfloat16, or repeated for G images, [G, S, N], where G divides B. The launch has
        B / G GEMMs that share the table.
      out_dtype: "bfloat16".
      schedule: "pingpong" for tiles of 128 x 128, "cooperative" for tiles of 128 x 256.

    Returns:
      [B, S, N] bfloat16, rounded once.

    Raises:
      NotImplementedError: these kernels cannot serve the operands.
      RuntimeError: the kernels cannot be built.
    """
    given = [f"{x.dtype}{list(x.shape)}" for x in (patches, weight, scale, table)]
    dtype = patches.dtype.name
    served = dtype in DTYPES and out_dtype == "bfloat16" and schedule in SCHEDULES
    if not served or patches.ndim != 3:
        raise NotImplementedError(f"benchmarks.cutlass: {given} to {out_dtype}, {schedule}.")
    (B, S, K), N = patches.shape, len(weight)
    G = len(table) if table.ndim == 3 else 1
    wanted = [f"{dtype}{[B, S, K]}", f"{dtype}{[N, K]}", f"float32{[N]}"]
    if given[:3] != wanted or given[3] not in (f"bfloat16{[S, N]}", f"bfloat16{[G, S, N]}"):
        raise NotImplementedError(f"benchmarks.cutlass: {given}, expected {wanted} and a table.")
    if G == 0 or B % G:
        raise NotImplementedError(
            f"benchmarks.cutlass: a table for {G} images does not fit {B} images."
        )
    if K * patches.dtype.itemsize % ALIGNMENT or N * table.dtype.itemsize % ALIGNMENT:
        raise NotImplementedError(
            f"benchmarks.cutlass: {given}: rows are not multiples of 16 bytes."
        )
    register()
    result = jax.ShapeDtypeStruct((B, S, N), out_dtype)
    return jax.ffi.ffi_call(_target(dtype, schedule), result)(
        patches, weight, scale, table.reshape(G, S, N)
    )
