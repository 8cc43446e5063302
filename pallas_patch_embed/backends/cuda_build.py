"""Finds and runs an nvcc for the CUDA kernels, and hashes the sources of the kernels.

CMake runs this file as a script; the package, the tests and the benchmarks import it. It needs only
the standard library.
"""

import contextlib
import functools
import hashlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# The folder of the kernels' sources: inside an installed package, beside it in a clone.
PACKAGE = Path(__file__).parents[1]
FFI = next(filter(Path.is_dir, (PACKAGE / "ffi", PACKAGE.parent / "ffi")), PACKAGE / "ffi")
SOURCES = ("*.cc", "*.cu", "*.cuh", "*.h", "CMakeLists.txt")

# The folder into which CUDA's own installer puts the toolkit.
SYSTEM_CUDA = Path("/usr/local/cuda")

# Limits in seconds: for the test program, which takes one to three seconds, and for each step of a
# build, which takes up to a minute on two cores.
PROBE_SECONDS, BUILD_SECONDS = 60.0, 1800.0

# Number of bytes that are kept of a compiler's output, and of characters that a reason quotes.
MOST_OUTPUT, MOST_QUOTED = 2**20, 200

PROBE = """
#include <cuda.h>
#include <cuda_bf16.h>
__global__ void probe() {}
"""


def rows() -> dict[tuple[int, str], tuple[str, ...]]:
    """Reads the list in ffi/architectures.h.

    Returns:
      The GPUs for which nvcc compiles, such as "90a", by architecture and dtype.
    """
    text = (FFI / "architectures.h").read_text()
    found = re.findall(r"^  X\((\d+), (k\w+), ([\d, ]+)\)", text, re.M)
    return {
        (int(number), dtype): tuple(f"{gpu}a" for gpu in gpus.split(", "))
        for number, dtype, gpus in found
    }


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


def run(
    command: Sequence[str | Path], seconds: float, folder: str | Path | None = None
) -> tuple[int, str]:
    """Runs a program that may hang, or print without end.

    Args:
      command: the program and its arguments.
      seconds: time after which the program, and all processes that it has started, are ended.
      folder: the folder in which it runs; None for the current folder.

    Returns:
      The exit code, and the beginning of what the program printed.

    Raises:
      OSError: the program could not be started, or took too long.
    """
    end = time.monotonic() + seconds
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output, pipe = bytearray(), select.poll()
    pipe.register(process.stdout)
    try:
        while (left := end - time.monotonic()) > 0:
            # After the end of the program only what is already in the pipe is read, because a
            # process in the background may keep the pipe open.
            code = process.poll()
            is_ready = bool(pipe.poll(min(1e3 * left, 100) if code is None else 0))
            chunk = os.read(process.stdout.fileno(), 2**16) if is_ready else b""
            output += chunk[: MOST_OUTPUT - len(output)]
            if code is not None and (not chunk or len(output) == MOST_OUTPUT):
                return code, output.decode(errors="replace")
            if is_ready and not chunk:
                time.sleep(0.01)  # The program has closed its output, but has not ended.
        raise TimeoutError(f"it took more than {seconds:g} s and was ended")
    finally:
        with contextlib.suppress(OSError):  # The group is empty.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _environments(in_build: bool) -> Iterator[Path]:
    """Yields the Python environments in which an nvcc may be installed.

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
    if in_build:
        here = Path.cwd()
        for folder in (here, Path(os.environ.get("PWD", here)), FFI.parent):
            yield folder / ".venv"


def candidates(*, in_build: bool = False) -> tuple[Path, ...]:
    """Returns the paths at which nvcc may be, in order of preference.

    1. CUDACXX, then bin/nvcc in CUDA_HOME and in CUDA_PATH, whether they exist or not;
    2. every nvcc on PATH;
    3. /usr/local/cuda;
    4. the nvcc of pip's package nvidia-cuda-nvcc and of conda, in the folders of `_environments`.

    Args:
      in_build: whether a person asked for a build. Only then the current folder is searched:
        otherwise a program would run code of any folder in which it is started.
    """
    named = []
    if compiler := os.environ.get("CUDACXX"):
        named.append(Path(shutil.which(compiler) or compiler))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            named.append(Path(os.environ[variable], "bin", "nvcc"))
    found = [Path(folder, "nvcc") for folder in os.get_exec_path()]
    found.append(SYSTEM_CUDA / "bin" / "nvcc")
    imported = [x for x in sys.path if in_build or not _is_current_folder(x)]
    folders = [Path(x) for x in (*imported, *map(sysconfig.get_path, ("purelib", "platlib")))]
    for environment in _environments(in_build):
        found.append(environment / "bin" / "nvcc")
        folders += environment.glob("lib/python3*/site-packages")
    for folder in folders:
        found += folder.glob("nvidia/cu[0-9]*/bin/nvcc")
    # A dangling link stays in the list, so that the reason for the failure can name it.
    every = dict.fromkeys([*named, *filter(os.path.lexists, found)])
    return tuple(path.absolute() for path in every if in_build or path.is_absolute())


def _is_current_folder(path: str) -> bool:
    return not path or (os.path.isdir(path) and os.path.samefile(path, os.curdir))


def _gpus() -> list[str]:
    return sorted({gpu for gpus in rows().values() for gpu in gpus}, key=lambda gpu: int(gpu[:-1]))


def _failure(nvcc: Path, host_compiler: str) -> str | None:
    """Returns why this nvcc cannot compile the kernels; None if it can."""
    if not nvcc.exists():
        return "a dangling link" if nvcc.is_symlink() else "no such file"
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "probe.cu"), Path(folder, "probe.fatbin")
        source.write_text(PROBE)
        command: list[str | Path] = [nvcc, "-std=c++17", "-fatbin", source, "-o", output]
        command += [f"-gencode=arch=compute_{x},code=sm_{x}" for x in _gpus()]
        command += ["-ccbin", host_compiler] if host_compiler else []
        try:
            code, printed = run(command, PROBE_SECONDS, folder)
        except OSError as error:
            return error.strerror or str(error)
        if code == 0 and output.exists():
            return None
    return f"exit code {code}, {first_error(printed, 'error|fatal|not found')}"


def first_error(printed: str, pattern: str) -> str:
    """Returns the first line of a compiler's output that matches, or the first line of all."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    lines = [line for line in lines if re.search(pattern, line)] or lines
    return lines[0][:MOST_QUOTED] if lines else "no output"


@functools.cache
def find_nvcc(host_compiler: str = "", *, in_build: bool = False) -> tuple[Path | None, str]:
    """Finds the first candidate that compiles the CUDA headers for all architectures.

    Args:
      host_compiler: the C++ compiler that nvcc calls; "" for nvcc's default.
      in_build: as for `candidates`.

    Returns:
      (nvcc, ""), or (None, reason), where the reason lists each candidate and why it failed.
    """
    tried = []
    for nvcc in candidates(in_build=in_build):
        failure = _failure(nvcc, host_compiler)
        if failure is None:
            return nvcc, ""
        tried.append(f"{nvcc} ({failure})")
    if not tried:
        return None, "no nvcc was found"
    return None, (
        f"no nvcc compiles for {', '.join(f'sm_{gpu}' for gpu in _gpus())}, for which version 12.9 "
        "or newer is needed; tried: " + "; ".join(tried)
    )


@functools.cache
def how_to_build(build_failure: str) -> str:
    """Returns a sentence that says how to build the kernels on this machine.

    It starts no process, so it does not know the version of an nvcc.

    Args:
      build_failure: why the kernels were not built. An nvcc that this names is not proposed again.
    """
    if sys.platform != "linux":
        return "The kernels are for Linux only."
    untried = (nvcc for nvcc in candidates() if f"{nvcc} (" not in build_failure)
    here = next((nvcc for nvcc in untried if nvcc.is_file() and os.access(nvcc, os.X_OK)), None)
    if here:
        command, begin = f"CUDACXX={shlex.quote(str(here))} ", f"If {here} is 12.9 or newer, "
    else:
        command, begin = "", "After `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, "
    return (
        f"{begin}`{command}make ffi` builds it in place, and `{command}pip install .` in the "
        "folder of the sources builds and installs it with the package."
    )


def main(arguments: Sequence[str]) -> int:
    """Answers ffi/CMakeLists.txt; returns the exit code.

    After `run` come a compiler and its arguments. Otherwise the argument is the C++ compiler, and
    the answer has three lines: the hash, the path of nvcc, and the reason if there is no nvcc.
    """
    if arguments[:1] == ["run"]:
        try:
            code, printed = run(arguments[1:], BUILD_SECONDS)
        except OSError as error:
            code, printed = 1, f"{arguments[1]}: {error}\n"
        sys.stdout.write(printed)
        return code
    print(source_hash(), *(x or "" for x in find_nvcc(*arguments, in_build=True)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
