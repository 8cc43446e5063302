"""Settings and fixtures of all tests.

The tests run on eight virtual CPU devices; those marked `gpu` run on a GPU if JAX can use one. The
short suite leaves out tests marked `slow`, `codegen`, `cluster`, `search`, `weights`, `frameworks`
or `exhaustive`. `make test-all` leaves out only the exhaustive ones, and `pytest -m ""` leaves out
none. JAX_PLATFORMS=cuda runs all tests on the GPU.
"""

import dataclasses
import gc
import importlib.util
import os
import shutil

import pytest

FLAG = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
GPU = shutil.which("nvidia-smi") and any(map(importlib.util.find_spec, PLUGINS))
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if GPU else "cpu")

# JAX reads the variables above when it is imported.
from pallas_patch_embed.commands.tune.command import share_memory  # noqa: E402

# Test processes share the GPU. Each reserves its part as one block, as tests of guards need. If
# there were more of them, each would get less. A quarter of the memory is left for processes that
# tests start.
GPU_PROCESSES = 6
share_memory(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), default=0.75)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Returns the number of processes for `-n auto`; None leaves the choice to xdist."""
    is_chosen = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    if not GPU or is_chosen or os.environ["JAX_PLATFORMS"] == "cpu":
        return None
    return min(GPU_PROCESSES, len(os.sched_getaffinity(0)))


@pytest.fixture
def command_line(capsys):
    """Returns a function that runs a command line in this process.

    The function returns the exit code and the text on standard error.
    """

    def run(*arguments):
        from pallas_patch_embed.commands import cli

        try:
            code = cli.main(cli.parse(["pallas-patch-embed", *map(str, arguments)]))
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return run


# Compilers for GPUs and their output. A test that uses one of these fixtures is marked `codegen`,
# and is skipped if the compiler or its output is missing.


@pytest.fixture(scope="session")
def nvcc():
    """Returns the path of the nvcc that compiles the kernels of ffi/."""
    from pallas_patch_embed.backends import cuda_build

    path, reason = cuda_build.find_nvcc()
    if path is None:
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def compilers():
    """Requires the compilers of XLA and NVIDIA, from pip's packages."""
    from benchmarks.machine_code import cuda_root

    if cuda_root() is None:
        pytest.skip("the extra codegen is missing")


@pytest.fixture(scope="session")
def cuda_library():
    """Requires the built library of ffi/."""
    from pallas_patch_embed.backends import cuda

    if reason := cuda.missing():
        pytest.skip(f"cuda: {reason}")


@pytest.fixture
def all_built(cuda_library, monkeypatch):
    """Marks the kernels of both chips as built, so that choices do not depend on the build."""
    from pallas_patch_embed.backends import cuda

    every = tuple(dataclasses.replace(config, built=True) for config in cuda.configs())
    monkeypatch.setattr(cuda, "configs", lambda: every)


@pytest.fixture(scope="session")
def triton_package():
    """Requires Triton, which the extra codegen installs."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is missing: the extra codegen installs it")


CODEGEN = {"nvcc", "compilers", "cuda_library", "triton_package"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests of code generation; refuses a marker for long tests that has no reason."""
    for item in items:
        if CODEGEN & set(item.fixturenames):
            item.add_marker("codegen")
        for mark in (*item.iter_markers("slow"), *item.iter_markers("exhaustive")):
            if not (mark.args and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f"{item.nodeid}: pytest.mark.{mark.name} needs a reason")


def pytest_collection_finish(session):
    """Makes garbage collection cheaper and rarer, because the emulator allocates many objects."""
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_terminal_summary(terminalreporter, config):
    """Prints how the tests were selected, because the default leaves many out."""
    if selection := config.option.markexpr:
        terminalreporter.write_line(
            f"Tests were selected with -m '{selection}'; `make test-all` runs more of them."
        )
