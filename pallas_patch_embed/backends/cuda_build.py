"""Finds an nvcc for the CUDA kernels, and hashes the sources of the kernels.

CMake runs this file as a script; the package, the tests and the benchmarks import it. It needs only
the standard library.
"""

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The folder of the kernels' sources: inside an installed package, beside it in a clone.
PACKAGE = Path(__file__).parents[1]
FFI = next(filter(Path.is_dir, (PACKAGE / "ffi", PACKAGE.parent / "ffi")), PACKAGE / "ffi")
SOURCES = ("*.cc", "*.cu", "*.cuh", "*.h", "CMakeLists.txt")

# The folder into which CUDA's own installer puts the toolkit.
SYSTEM_CUDA = Path("/usr/local/cuda")

ARCHITECTURES = ("90a", "100a", "103a")
PROBE = """
#include <cuda.h>
#include <cuda_bf16.h>
__global__ void probe() {}
"""


def source_hash() -> str | None:
    """Returns the SHA-256 of the names and contents of the sources; None if there are none."""
    files = sorted(path for pattern in SOURCES for path in FFI.rglob(pattern))
    if not files:
        return None
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(FFI).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _environments() -> Iterator[Path]:
    """Yields the Python environments into which the package may be about to be installed.

    An isolated build runs in an environment of its own. pip runs it with the Python of the target
    environment, so that `sys.prefix` is the target. uv and `build` do not. Then the target is on
    PATH if it is activated; otherwise it may be the folder `.venv` in the project or in the folder
    where the command was typed (PWD).
    """
    yield Path(sys.prefix)
    yield from (Path(os.environ[x]) for x in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(x))
    for folder in map(Path, os.get_exec_path()):
        if Path(folder, "..", "pyvenv.cfg").exists():
            yield folder.parent
    here = Path.cwd()
    for folder in (here, Path(os.environ.get("PWD", here)), FFI.parent):
        yield folder / ".venv"


def candidates() -> tuple[Path, ...]:
    """Returns the paths at which nvcc may be, in order of preference.

    1. CUDACXX, then bin/nvcc in CUDA_HOME and in CUDA_PATH, whether they exist or not;
    2. every nvcc on PATH;
    3. /usr/local/cuda;
    4. the nvcc of pip's package nvidia-cuda-nvcc and of conda, in the folders of `_environments`.
    """
    named = []
    if compiler := os.environ.get("CUDACXX"):
        named.append(Path(shutil.which(compiler) or compiler))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            named.append(Path(os.environ[variable], "bin", "nvcc"))
    found = [Path(folder, "nvcc") for folder in os.get_exec_path()]
    found.append(SYSTEM_CUDA / "bin" / "nvcc")
    folders = [Path(x) for x in (*sys.path, *map(sysconfig.get_path, ("purelib", "platlib")))]
    for environment in _environments():
        found.append(environment / "bin" / "nvcc")
        folders += environment.glob("lib/python3*/site-packages")
    for folder in folders:
        found += folder.glob("nvidia/cu[0-9]*/bin/nvcc")
    # A dangling link stays in the list, so that the reason for the failure can name it.
    return tuple(dict.fromkeys([*named, *filter(os.path.lexists, found)]))


def _failure(nvcc: Path, host_compiler: str) -> str | None:
    """Returns why this nvcc cannot compile the kernels; None if it can."""
    if not nvcc.exists():
        return "a dangling link" if nvcc.is_symlink() else "no such file"
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "probe.cu"), Path(folder, "probe.fatbin")
        source.write_text(PROBE)
        command: list[str | Path] = [nvcc, "-std=c++17", "-fatbin", source, "-o", output]
        command += [f"-gencode=arch=compute_{x},code=sm_{x}" for x in ARCHITECTURES]
        command += ["-ccbin", host_compiler] if host_compiler else []
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
            )
        except OSError as error:
            return str(error.strerror)
        if done.returncode == 0 and output.exists():
            return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    lines = [line for line in lines if re.search("error|fatal|not found", line)] or lines
    return f"exit code {done.returncode}, {lines[0] if lines else 'no output'}"


@functools.cache
def find_nvcc(host_compiler: str = "") -> tuple[Path | None, str]:
    """Finds the first candidate that compiles the CUDA headers for all architectures.

    Args:
      host_compiler: the C++ compiler that nvcc calls; "" for nvcc's default.

    Returns:
      (nvcc, ""), or (None, reason), where the reason lists each candidate and why it failed.
    """
    tried = []
    for nvcc in candidates():
        failure = _failure(nvcc, host_compiler)
        if failure is None:
            return nvcc, ""
        tried.append(f"{nvcc} ({failure})")
    if not tried:
        return None, "no nvcc was found"
    return None, (
        "no nvcc compiles for sm_90a, sm_100a and sm_103a, for which version 12.9 or newer is "
        "needed; tried: " + "; ".join(tried)
    )


def _knows_architectures(nvcc: Path) -> bool:
    """Returns whether this nvcc starts and lists the architectures; takes a few milliseconds."""
    try:
        done = subprocess.run(
            [nvcc, "--list-gpu-code"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            errors="replace",
        )
    except OSError:
        return False
    return {f"sm_{x.removesuffix('a')}" for x in ARCHITECTURES} <= set(done.stdout.split())


@functools.cache
def how_to_build(build_failure: str) -> str:
    """Returns a sentence that says how to build the kernels on this machine.

    Args:
      build_failure: why the kernels were not built. An nvcc that this names is not proposed again.
    """
    if sys.platform != "linux":
        return "The kernels are for Linux only."
    untried = (nvcc for nvcc in candidates() if f"{nvcc} (" not in build_failure)
    here = next(filter(_knows_architectures, untried), None)
    if here:
        command, begin = f"CUDACXX={shlex.quote(str(here))} ", "With the nvcc of this machine, "
    else:
        command, begin = "", "After `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, "
    return (
        f"{begin}`{command}make ffi` builds it in place, and `{command}pip install .` in the "
        "folder of the sources builds and installs it with the package."
    )


if __name__ == "__main__":
    # ffi/CMakeLists.txt passes its C++ compiler, and reads three lines: the hash, the path of nvcc,
    # and the reason if there is no nvcc.
    print(source_hash(), *(x or "" for x in find_nvcc(*sys.argv[1:])), sep="\n")
