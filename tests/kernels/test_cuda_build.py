"""The choice of nvcc, the reasons against every other nvcc, and the hash of the sources."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_patch_embed.backends import cuda_build

# Name -> (script of an nvcc that fails on the probe, reported reason).
BROKEN = {
    "exit": ("exit 1", "exit code 1, no output"),
    "old": (
        "echo; echo \"nvcc fatal   : Unsupported gpu architecture 'compute_103a'\" >&2; exit 1",
        "exit code 1, nvcc fatal   : Unsupported gpu architecture 'compute_103a'",
    ),
    "headers": (
        "echo In file included from probe.cu:; echo fatal error: nv/target: none; exit 2",
        "exit code 2, fatal error: nv/target: none",
    ),
    "idle": ("exit 0", "exit code 0, no output"),
}
# Name -> script of an nvcc that does not end.
ENDLESS = {
    "sleeps": "sleep 1000",
    "sleeps in a child": "sleep 1000 & wait",
    "prints": "yes",
    "prints one line": "cat /dev/zero",
    "prints to standard error": "yes >&2",
    "ignores signals": "trap '' HUP INT TERM; while true; do :; done",
    "closes its output": "exec >&- 2>&-; sleep 1000",
    "waits for its terminal": "cat <> /dev/ptmx",
    "starts itself": 'exec "$0"',
}
# The folder of nvcc in pip's package, relative to an environment.
PIPS = "lib/python3.12/site-packages/nvidia/cu13/bin"
# A script of an nvcc that writes the file after -o.
GOOD = 'while [ "$1" != -o ]; do shift; done; echo > "$2"'


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Returns place(folder, script), which creates an nvcc there; no other nvcc can be found."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PWD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda_build, "SYSTEM_CUDA", tmp_path / "system")
    sources = tmp_path / "sources" / "ffi"
    sources.mkdir(parents=True)
    shutil.copy(cuda_build.FFI / "architectures.h", sources)
    monkeypatch.setattr(cuda_build, "FFI", sources)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(cuda_build.sysconfig, "get_path", lambda name: str(tmp_path / name))
    cuda_build.find_nvcc.cache_clear()
    cuda_build.how_to_build.cache_clear()

    def placed(folder, script=GOOD):
        nvcc = tmp_path / folder / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(f"#!/bin/sh\n{script}\n")
        nvcc.chmod(0o755)
        return nvcc

    yield placed
    cuda_build.find_nvcc.cache_clear()
    cuda_build.how_to_build.cache_clear()


def running(folder):
    """Returns the command lines of processes that contain this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended.
            found.append((process / "cmdline").read_bytes())
    return [line for line in found if str(folder).encode() in line]


@pytest.mark.parametrize("script", ENDLESS.values(), ids=ENDLESS)
def test_a_compiler_that_does_not_end_is_ended_and_named(place, monkeypatch, tmp_path, script):
    monkeypatch.setenv("PATH", f"{tmp_path}/path{os.pathsep}{os.defpath}")
    monkeypatch.setattr(cuda_build, "PROBE_SECONDS", 0.3)
    nvcc = place("path", script)
    path, reason = cuda_build.find_nvcc()
    assert path is None and f"{nvcc} (it took more than 0.3 s and was ended)" in reason
    assert not running(tmp_path)


def test_an_nvcc_behind_one_that_hangs_is_found(place, monkeypatch):
    place("path", ENDLESS["ignores signals"])
    nvcc = place("system/bin")
    monkeypatch.setattr(cuda_build, "PROBE_SECONDS", 2.0)
    assert cuda_build.find_nvcc() == (nvcc, "")


@pytest.mark.parametrize("command", ["sleep 1000", "yes done"])
def test_a_process_that_a_compiler_leaves_in_the_background_is_not_waited_for(place, command):
    nvcc = place("path", f"PATH={os.defpath}; echo done; {command} & exit 0")
    code, printed = cuda_build.run([nvcc], 1000)
    assert code == 0 and printed.startswith("done\n")


def test_only_the_beginning_of_a_compilers_output_is_kept(place, monkeypatch):
    monkeypatch.setattr(cuda_build, "MOST_OUTPUT", 1000)
    line = f"error: {'x' * 500}"
    nvcc = place("path", f"for i in 1 2 3 4; do echo '{line}'; done; exit 1")
    assert cuda_build.run([nvcc], 1000) == (1, f"{line}\n{line}\n"[:1000])
    _, reason = cuda_build.find_nvcc()
    assert f"(exit code 1, {line[:200]})" in reason


def test_CMake_runs_compilers_with_the_same_limits(place, monkeypatch, capsys):
    nvcc = place("path", 'echo "$@"; exit 3')
    assert cuda_build.main(["run", str(nvcc), "--dryrun", "a b"]) == 3
    assert capsys.readouterr().out == "--dryrun a b\n"
    monkeypatch.setattr(cuda_build, "BUILD_SECONDS", 0.3)
    place("path", ENDLESS["ignores signals"])
    assert cuda_build.main(["run", str(nvcc)]) == 1
    assert capsys.readouterr().out == f"{nvcc}: it took more than 0.3 s and was ended\n"
    assert cuda_build.main(["run", "/absent/nvcc"]) == 1
    assert "/absent/nvcc: " in capsys.readouterr().out
    cmake = (Path(__file__).parents[2] / "ffi" / "CMakeLists.txt").read_text()
    assert cmake.count('"${NVCC}"') == cmake.count('${CUDA_BUILD} run "${NVCC}"') == 2


@pytest.mark.parametrize(
    "variable, value",
    [
        ("PATH", ""),
        ("PATH", "."),
        ("PATH", "bin:"),
        ("CUDACXX", "./nvcc"),
        ("CUDACXX", "nvcc"),
        ("CUDA_HOME", "."),
        ("CUDA_PATH", "./"),
        ("VIRTUAL_ENV", ".venv"),
        ("CONDA_PREFIX", "."),
        ("PWD", "{here}"),
        ("sys.path", ""),
        ("sys.path", "."),
        ("sys.path", "{here}"),
        ("sys.path", "{here}/"),
    ],
)
def test_only_a_build_looks_for_nvcc_in_the_current_folder(
    place, monkeypatch, tmp_path, variable, value
):
    here = tmp_path / "here"
    for folder in (".", "bin", ".venv/bin", "nvidia/cu13/bin", PIPS, f".venv/{PIPS}"):
        place(f"here/{folder}", "echo > executed; exit 1")
    monkeypatch.chdir(here)
    value = value.format(here=here)
    if variable == "sys.path":
        monkeypatch.setattr(sys, "path", [value])
    else:
        monkeypatch.setenv(variable, value)
    assert cuda_build.find_nvcc() == (None, "no nvcc was found")
    assert "`pip install nvidia-cuda-nvcc" in cuda_build.how_to_build("no nvcc was found")
    assert cuda_build.find_nvcc(in_build=True)[1].count(f"{here}/") >= 2
    assert not list(here.rglob("executed"))  # A compiler runs in a temporary folder.


def test_a_missing_nvcc_is_reported(place):
    assert cuda_build.find_nvcc() == (None, "no nvcc was found")


@pytest.mark.parametrize("script, said", BROKEN.values(), ids=BROKEN)
def test_a_broken_nvcc_on_PATH_is_named_with_the_reason(place, script, said):
    nvcc = place("path", script)
    path, reason = cuda_build.find_nvcc()
    assert path is None and f"tried: {nvcc} ({said})" in reason and "12.9" in reason


def test_files_that_cannot_be_executed_are_named_with_the_reason(place, monkeypatch, tmp_path):
    place("path").chmod(0o644)
    link = place("system/bin")
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    path, reason = cuda_build.find_nvcc()
    assert path is None
    assert f"tried: {tmp_path}/home/bin/nvcc (no such file); {tmp_path}/path/nvcc (" in reason
    assert "Permission denied" in reason and f"{link} (a dangling link)" in reason


def test_the_first_nvcc_that_compiles_is_used(place, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}/path:{tmp_path}/second")
    place("path", BROKEN["old"][0])
    assert cuda_build.find_nvcc()[0] is None
    for folder in (
        "site/nvidia/cu13/bin",
        "system/bin",
        "second",
        "cuda_path/bin",
        "cuda_home/bin",
        "cudacxx",
    ):
        nvcc = place(folder)
        for name in ("cuda_path", "cuda_home"):
            monkeypatch.setenv(name.upper(), str(tmp_path / name))
        if folder == "cudacxx":
            monkeypatch.setenv("CUDACXX", str(nvcc))
        cuda_build.find_nvcc.cache_clear()
        assert cuda_build.find_nvcc() == (nvcc, "")


def test_the_host_compiler_is_passed_on(place):
    place("path", f'case "$*" in *"-ccbin /usr/bin/c++"*) ;; *) exit 1;; esac; {GOOD}')
    assert cuda_build.find_nvcc()[0] is None
    assert cuda_build.find_nvcc("/usr/bin/c++")[0] is not None


@pytest.mark.parametrize(
    "variable, value, environment",
    [
        (None, "", "purelib"),
        (None, "", "prefix"),
        ("VIRTUAL_ENV", "active", "active"),
        ("CONDA_PREFIX", "conda", "conda"),
        ("PATH", "activated/bin", "activated"),
        ("PWD", "typed", "typed/.venv"),
        (None, "", ".venv"),
        (None, "", "sources/.venv"),
    ],
)
def test_pips_nvcc_is_found_in_the_environment_of_the_build(
    place, monkeypatch, tmp_path, variable, value, environment
):
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    nvcc = place(f"{environment}/{'nvidia/cu13/bin' if environment == 'purelib' else PIPS}")
    if variable == "PATH":
        assert cuda_build.find_nvcc(in_build=True)[0] is None
        cuda_build.find_nvcc.cache_clear()
        (tmp_path / environment / "pyvenv.cfg").touch()
        (tmp_path / value).mkdir()
    assert cuda_build.find_nvcc(in_build=True) == (nvcc, "")


def test_the_command_that_builds_the_library_names_an_nvcc_without_running_it(
    place, monkeypatch, tmp_path
):
    def how(reason="no nvcc was found"):
        cuda_build.how_to_build.cache_clear()
        return cuda_build.how_to_build(reason)

    assert "After `pip install nvidia-cuda-nvcc" in how()
    nvcc = place("path", f"touch {tmp_path}/executed")
    assert f"If {nvcc} is 12.9 or newer, `CUDACXX={nvcc} make ffi` builds it" in how()
    nvcc.chmod(0o644)
    assert "`pip install nvidia-cuda-nvcc" in how()
    nvcc.unlink()
    nvcc.mkdir()
    assert "`pip install nvidia-cuda-nvcc" in how()
    assert not (tmp_path / "executed").exists()
    nvcc = place("system/bin", "exit 1")
    assert str(nvcc) in how()
    _, tried = cuda_build.find_nvcc()
    assert str(nvcc) not in how(tried)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux only" in how()


def test_the_real_nvcc_compiles_and_finds_the_headers(nvcc):
    """The module is run as by CMake, which expects three lines."""
    command = [sys.executable, "-P", cuda_build.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [cuda_build.source_hash(), str(nvcc), "", ""]


def test_the_list_of_architectures_says_for_what_nvcc_compiles():
    every = ("kFloat8E4M3FN", "kInt8", "kBFloat16")
    images = {(90, "kUInt8"): ("90a",), (100, "kUInt8"): ("100a",)}
    hopper = {(90, dtype): ("90a",) for dtype in every}
    blackwell = {(100, dtype): ("100a", "103a") for dtype in every} | {(100, "kInt8"): ("100a",)}
    assert cuda_build.rows() == hopper | images | blackwell
    sources = {int(path.stem.split("sm")[1]) for path in cuda_build.FFI.glob("patch_embed_sm*.cu")}
    assert sources == {number for number, _ in cuda_build.rows()}


def test_the_hash_is_of_names_and_contents_of_all_sources(monkeypatch, tmp_path):
    ffi = tmp_path / "ffi"
    shutil.copytree(cuda_build.FFI, ffi)
    expected = cuda_build.source_hash()
    monkeypatch.setattr(cuda_build, "FFI", ffi)
    assert cuda_build.source_hash() == expected
    (ffi / "notes.txt").write_text("not a source")
    os.utime(ffi / "binding.cc")
    assert cuda_build.source_hash() == expected
    for name in [path.relative_to(ffi) for path in ffi.rglob("*.*") if path.name != "notes.txt"]:
        content = (ffi / name).read_bytes()
        (ffi / name).write_bytes(content + b"\n")
        assert cuda_build.source_hash() != expected, name
        (ffi / name).write_bytes(content)
        assert cuda_build.source_hash() == expected
    (ffi / "launch.h").rename(ffi / "launches.h")
    assert cuda_build.source_hash() != expected
    monkeypatch.setattr(cuda_build, "FFI", Path("nowhere"))
    assert cuda_build.source_hash() is None
