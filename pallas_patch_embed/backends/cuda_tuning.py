"""Compiles Blackwell kernels of ffi/ on demand, with another `Tuning` than those in the library.

Each kernel with a tuning becomes a library of its own, in a cache folder: `PATCH_EMBED_CACHE`, or
pallas_patch_embed in the user's cache. The name of a library contains a hash of everything from
which it is built.
"""

import dataclasses
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from pallas_patch_embed.backends import cuda_build
from pallas_patch_embed.base.versions import version

# The architecture whose kernels have a tuning, the number after `sm` in their names.
CAPABILITY = 100

# Registers of a thread in a storing warp, as set by the kernel's setmaxnreg, and how many of them
# hold values other than sums, scale and table, by output dtype (ffi/patch_embed_sm100.cu).
STORE_REGISTERS = 232
OTHER_REGISTERS = {"bf16": 8, "f32": 16}

# Number of storing warps of a thread block, and rows of y that one warp stores at once.
STORING_WARPS, WARP_ROWS = 8, 32

# Enumerator of each dtype in ffi/, by the dtype's spelling in the names of kernels.
TYPES = {
    "e4m3": "kFloat8E4M3FN",
    "i8": "kInt8",
    "u8": "kUInt8",
    "bf16": "kBFloat16",
    "f32": "kFloat32",
}
ITEMSIZE = {"bf16": 2, "f32": 4}


# Limit in seconds for each of the two steps of a compilation, which take half a minute together. It
# is less than the time after which `tune` ends its child.
COMPILE_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Parameters of the storing warps, `Tuning` in ffi/patch_embed_sm100.h.

    They do not change the result.

    Attributes:
      step_columns: columns of an accumulator that a warp loads before it waits for them.
      load_columns: columns of one load: 16, 32 or 64.
      staging_buffers: number of buffers of a warp in shared memory, each for one TMA store.
      stores_per_group: number of stores that share a fence.
      stored_first: whether a warp releases an accumulator only after it has issued the tile's
        stores (True), or as soon as the sums are in registers (False).
      stagger_cycles: cycles by which the second storing warpgroup starts each tile later than the
        first.
      keep_table: whether a warp keeps its part of the table in registers during a segment.
    """

    step_columns: int
    load_columns: int
    staging_buffers: int = 2
    stores_per_group: int = 1
    stored_first: bool = False
    stagger_cycles: int = 0
    keep_table: bool = True

    @classmethod
    def of_library(cls, out_dtype: str, tile_n: int, slots: int) -> "Tuning":
        """Returns the tuning of the library's kernels with this width and number of slots."""
        step = tile_n // 2 if tile_n < 256 else 32 if out_dtype == "f32" else 64
        buffers = 1 if tile_n == 256 and slots > 4 else 2
        return cls(step, 32 if step % 64 else 64, staging_buffers=buffers)

    def variants(self) -> list["Tuning"]:
        """Returns the tunings that are worth measuring; each differs from this one in one member.

        Some of them may not pass `check`. The width of loads is not varied, because the published
        measurements of another kernel for this operator on a B200 show that loads of 32 columns or
        more are equally fast.
        """
        changes: list[dict[str, Any]] = [
            dict(staging_buffers=2 * self.staging_buffers),
            dict(stored_first=True),
            # A sixth of the time to multiply a tile of 256 columns with K = 768.
            dict(stagger_cycles=500),
        ]
        return [dataclasses.replace(self, **change) for change in changes]

    def check(self, out_dtype: str, tile_n: int, has_table: bool) -> None:
        """Raises NotImplementedError with the reason if such a kernel is impossible or spills."""
        columns, store = tile_n // 2, store_bytes(out_dtype, tile_n) // ITEMSIZE[out_dtype]
        step, kept = self.step_columns, columns if self.keep_table else self.step_columns
        registers = step + columns // 4 + kept // 4 * (4 if has_table else 1)
        registers += OTHER_REGISTERS[out_dtype]
        for possible, expected in (
            (self.load_columns in (16, 32, 64), "loads of 16, 32 or 64 columns"),
            (step % self.load_columns == 0, "step_columns to be a multiple of load_columns"),
            (columns % step == 0, f"step_columns to divide the {columns} columns of a warp"),
            (step % store == 0, f"step_columns to be a multiple of a store's {store} columns"),
            (
                step // store % self.stores_per_group == 0,
                "stores_per_group to divide the stores of a step",
            ),
            (self.staging_buffers in (1, 2, 4, 8), "1, 2, 4 or 8 staging_buffers"),
            (
                self.staging_buffers % self.stores_per_group == 0,
                "stores_per_group to divide staging_buffers",
            ),
            (self.stagger_cycles >= 0, "stagger_cycles of 0 or more"),
            (registers <= STORE_REGISTERS, f"at most {STORE_REGISTERS} registers, not {registers}"),
        ):
            if not possible:
                raise NotImplementedError(
                    f"{self} for a tile of {tile_n} columns: expected {expected}."
                )

    def more_shared_memory(self, out_dtype: str, tile_n: int, slots: int) -> int:
        """Returns the shared memory of a block in bytes, minus that of the library's kernel."""
        of_library = self.of_library(out_dtype, tile_n, slots)
        more = self.staging_buffers - of_library.staging_buffers
        return more * STORING_WARPS * WARP_ROWS * store_bytes(out_dtype, tile_n)

    def header(self, kernel: str) -> str:
        """Returns a C++ header that selects one kernel and its tuning.

        It is included before the sources in ffi/.

        Args:
          kernel: name of the kernel.
        """
        _, _, _, dtype, out_dtype, columns, tile, blocks, slots, weight = kernel.split("_")
        tile_n, rows = tile.split("x")
        arguments = (dtype, out_dtype, columns, tile_n, rows, blocks, slots[1:], weight)
        macro = f"PATCH_EMBED_SM100_{TYPES[dtype]}"
        values = dict(
            kStepColumns=self.step_columns,
            kLoadColumns=self.load_columns,
            kStagingBuffers=self.staging_buffers,
            kStoresPerGroup=self.stores_per_group,
            kStaggerCycles=self.stagger_cycles,
            kKeepTable=str(self.keep_table).lower(),
            kRelease=f"Release::{'kStored' if self.stored_first else 'kLoaded'}",
        )
        members = "".join(f"  static constexpr auto {k} = {v};\n" for k, v in values.items())
        return f"""\
#include "patch_embed_sm100.h"
#undef {macro}
#define {macro}(X) X({", ".join(arguments)})
#define PATCH_EMBED_FATBINS(X) X(100, {TYPES[dtype]})
namespace patch_embed::sm100 {{
template <>
struct Tuning<Type::{TYPES[out_dtype]}, {tile_n}, {slots[1:]}> {{
{members}}};
}}  // namespace patch_embed::sm100
"""


def store_bytes(out_dtype: str, tile_n: int) -> int:
    """Returns the bytes of one row of a TMA store."""
    return 64 if tile_n // 2 * ITEMSIZE[out_dtype] % 128 else 128


def cache_folder() -> Path:
    """Returns the folder of the compiled libraries."""
    if named := os.environ.get("PATCH_EMBED_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pallas_patch_embed")


def library_path(kernel: str, tuning: Tuning) -> Path:
    """Returns the path of the library of a kernel with this tuning, whether it exists or not."""
    parts = (cuda_build.source_hash(), version("jaxlib"), kernel, tuning)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"{kernel}_{key}.so"


@functools.cache
def cannot_compile() -> str | None:
    """Returns why kernels cannot be compiled on this machine; None if they can."""
    if sys.platform != "linux":
        return "the kernels are for Linux only"
    if cuda_build.source_hash() is None:
        return "the sources of the kernels are missing"
    if shutil.which("c++") is None:
        return "no C++ compiler was found"
    nvcc, reason = cuda_build.find_nvcc()
    return None if nvcc else reason


def check_available(kernel: str, tuning: Tuning) -> None:
    """Raises NotImplementedError if the library does not exist and cannot be compiled here."""
    if not library_path(kernel, tuning).exists() and (reason := cannot_compile()):
        raise NotImplementedError(f"{kernel} with {tuning} cannot be compiled here: {reason}.")


def build(kernel: str, tuning: Tuning) -> Path:
    """Returns the library of a kernel with this tuning, and compiles it if it does not exist.

    The compilation takes half a minute.

    Raises:
      NotImplementedError: the kernel does not compile, or it spills; the message says why.
    """
    path = library_path(kernel, tuning)
    check_available(kernel, tuning)
    if path.exists():
        return path
    nvcc, _ = cuda_build.find_nvcc()
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = TYPES[kernel.split("_")[3]]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        Path(folder, "tuned.h").write_text(tuning.header(kernel))
        common = [str(nvcc), "-std=c++17", f"-I{cuda_build.FFI}", "-I.", "-include", "tuned.h"]
        _compile(
            *(*common, "-O3", "--Werror", "all-warnings", f"-DPATCH_EMBED_DTYPE={dtype}"),
            "-Xptxas=-warn-spills,-warn-lmem-usage,--warning-as-error",
            *(
                f"-gencode=arch=compute_{x},code=sm_{x}"
                for x in cuda_build.rows()[CAPABILITY, dtype]
            ),
            *(
                "-fatbin",
                str(cuda_build.FFI / "patch_embed_sm100.cu"),
                "-o",
                f"sm100_{dtype}.fatbin",
            ),
            folder=folder,
        )
        _compile(
            *(*common, "-O2", "-shared", "-cudart=none", "-x", "c++"),
            *("-Xcompiler", "-fPIC,-fvisibility=hidden", "-isystem", jax.ffi.include_dir()),
            f'-DPATCH_EMBED_SOURCES="{cuda_build.source_hash()}"',
            *(str(cuda_build.FFI / "binding.cc"), "-o", "library.so", "-ldl"),
            folder=folder,
        )
        os.replace(Path(folder, "library.so"), path)
    return path


def _compile(*command: str, folder: str) -> None:
    """Runs a compiler in a folder; raises NotImplementedError with its first error."""
    try:
        code, printed = cuda_build.run(command, COMPILE_SECONDS, folder)
    except OSError as error:
        raise NotImplementedError(f"its compiler cannot be used: {error}") from None
    if code:
        first = cuda_build.first_error(printed, "error|spill")
        raise NotImplementedError(f"it does not compile: {first}")
