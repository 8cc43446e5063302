"""Wheels with and without the kernels, their content, and the requirements to build them."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

from pallas_patch_embed.backends import cuda_build, cuda_tuning
from tests.repository import ROOT, environment

pytestmark = pytest.mark.slow("builds packages, or asks a package index")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
BACKENDS = "pallas_patch_embed/backends"
STALE = b"of an earlier build"

# Prints the folder of the kernels' sources, their hash, and the reason why `tune` cannot compile
# them.
SOURCES = """
from pallas_patch_embed.backends import cuda_build, cuda_tuning
print(cuda_build.FFI, cuda_build.source_hash(), cuda_tuning.cannot_compile(), sep="\\n")
"""


@pytest.fixture(scope="session")
def backend(tmp_path_factory):
    """Installs scikit-build-core into a folder."""
    folder = tmp_path_factory.mktemp("backend")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
    requires = PROJECT["build-system"]["requires"]
    done = subprocess.run([*command, *requires], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {requires}: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture
def tree(tmp_path):
    """Copies the sources, and adds the files that an editable build leaves."""
    folder = tmp_path / "tree"
    for name in ("ffi", "pallas_patch_embed"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("libpatch_embed.so", "libpatch_embed.txt"):
        (folder / BACKENDS / name).write_bytes(STALE)
    return folder


@pytest.fixture
def call(backend, tree, tmp_path):
    """Returns call(hook, cuda), which runs a hook of the build; it returns result and output."""

    def called(hook, cuda, **env):
        arguments = "" if hook.startswith("get_requires") else repr(str(tmp_path))
        code = f"import scikit_build_core.build as b; print('\\n', b.{hook}({arguments}))"
        env = {**os.environ, "PYTHONPATH": str(backend), "PATCH_EMBED_CUDA": cuda, **env}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        said = done.stdout + done.stderr
        return (done.stdout.splitlines()[-1].strip() if done.returncode == 0 else None), said

    return called


def contents(archive):
    """Reads the files in a wheel, by name."""
    with zipfile.ZipFile(archive) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def test_a_wheel_without_kernels_is_for_every_platform_and_says_why(call, tmp_path):
    name, said = call("build_wheel", "OFF")
    assert name and name.endswith("-py3-none-any.whl"), said
    files = contents(tmp_path / name)
    assert f"{BACKENDS}/libpatch_embed.so" not in files
    assert b"PATCH_EMBED_CUDA=OFF" in files[f"{BACKENDS}/libpatch_embed.txt"]
    # `pallas-patch-embed tune` compiles some of these sources.
    sources = [path for pattern in cuda_build.SOURCES for path in cuda_build.FFI.rglob(pattern)]
    for path in sources:
        name = f"pallas_patch_embed/ffi/{path.relative_to(cuda_build.FFI).as_posix()}"
        assert files[name] == path.read_bytes()
    licenses = [name for name in files if ".dist-info/licenses/" in name]
    assert any(name.endswith("photos/LICENSES.md") for name in licenses) and len(licenses) == 2


def test_check_and_tune_run_from_a_wheel(call, tmp_path):
    """The environment has this one's dependencies, but not the package in this tree."""
    name, said = call("build_wheel", "OFF")
    assert name, said
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(tmp_path / name).extractall(packages)
    (packages / "others.pth").write_text(str(Path(jax.__file__).parents[1]))

    def output(*arguments, code=0):
        command = [tmp_path / "venv" / "bin" / "python", *arguments]
        env = environment(JAX_PLATFORMS="cpu", PYTHONPATH="")
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run = functools.partial(output, "-m", "pallas_patch_embed")
    only = "xla: B/32 256, 1 images"
    assert f"right     {only}" in run("check", "--backend", "xla", "--only", only, "--runs", "1")
    assert "tune: JAX's device is cpu" in run("tune", "--out", "tuned.json", code=2)
    assert output("-c", SOURCES).split("\n", 2) == [
        str(packages / "pallas_patch_embed" / "ffi"),
        str(cuda_build.source_hash()),
        f"{cuda_tuning.cannot_compile()}\n",
    ]


# .ci/run runs this test.
@pytest.mark.exhaustive("compiles all CUDA kernels again")
def test_a_wheel_has_the_library_of_its_sources(nvcc, call, tmp_path):
    name, said = call("build_wheel", "ON")
    assert name and "-py3-none-linux" in name, said
    files = contents(tmp_path / name)
    assert cuda_build.source_hash().encode() in files[f"{BACKENDS}/libpatch_embed.so"]
    assert f"{BACKENDS}/libpatch_embed.txt" not in files


def test_the_archive_of_the_sources_has_nothing_that_was_built(call, tmp_path):
    name, said = call("build_sdist", "OFF")
    assert name, said
    with tarfile.open(tmp_path / name) as archive:
        names = archive.getnames()
    assert any(name.endswith("ffi/ptx/tma.cuh") for name in names)
    assert not any("libpatch_embed" in name for name in names)


def test_an_editable_install_without_kernels_removes_the_library_and_says_why(call, tree):
    name, said = call("build_editable", "OFF")
    assert name, said
    assert not (tree / BACKENDS / "libpatch_embed.so").exists()
    assert "PATCH_EMBED_CUDA=OFF" in (tree / BACKENDS / "libpatch_embed.txt").read_text()


@pytest.mark.parametrize(
    "cuda, reason",
    [
        ("", "Without CUDA kernels: no C++ compiler was found"),
        ("ON", "The CUDA kernels cannot be built (PATCH_EMBED_CUDA=ON): no C++ compiler was found"),
        ("off", "PATCH_EMBED_CUDA is off, expected ON, OFF or nothing"),
    ],
)
def test_kernels_that_are_asked_for_and_cannot_be_built_are_an_error(call, tree, cuda, reason):
    name, said = call("build_editable", cuda, CXX="/no/such/compiler")
    assert (name is None) == bool(cuda)
    assert reason in " ".join(said.split())
    # An error changes nothing.
    left = [path.read_bytes() for path in (tree / BACKENDS).glob("libpatch_embed.*")]
    assert left == ([STALE, STALE] if cuda else [b"no C++ compiler was found"])


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_only_the_kernels_need_a_jaxlib_to_be_built(call, hook):
    for cuda in ("OFF", ""):
        requires, said = call(f"get_requires_for_build_{hook}", cuda)
        assert requires, said
        assert ("jaxlib" in requires) == (cuda == "")


@functools.cache
def versions(name, python):
    """Lists the versions of a package that have a wheel for a Python version."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:"]
    done = subprocess.run([*command, "--python-version", python], capture_output=True, text=True)
    found = re.search("Available versions: (.*)", done.stdout)
    return found[1].split(", ") if found else []


@pytest.mark.parametrize("python", PYTHONS)
def test_what_is_required_has_wheels_for_every_Python_that_is_named(python):
    if not versions("scikit-build-core", "{}.{}".format(*sys.version_info)):
        pytest.skip("pip finds no index of packages")
    build = PROJECT["tool"]["scikit-build"]["build"]["requires"]
    required = [*PROJECT["build-system"]["requires"], *build, *PROJECT["project"]["dependencies"]]
    chosen = []
    for requirement in map(Requirement, required):
        environment = dict(python_version=python, sys_platform="linux")
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found = versions(requirement.name, python)
            assert any(map(requirement.specifier.contains, found)), f"{requirement}: {found}"
            chosen.append(requirement.name)
    # jaxlib is required once for the build and once by the package.
    assert chosen.count("jaxlib") == 2
