"""The tests run on eight virtual CPU devices, those marked `gpu` on a GPU if JAX can use one.

JAX_PLATFORMS=cuda runs all of them on the GPU.
"""

import gc
import importlib.util
import os
import shutil

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
GPU = shutil.which("nvidia-smi") and any(map(importlib.util.find_spec, PLUGINS))
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if GPU else "cpu")
# Several processes share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_finish(session):
    """Garbage is looked for more rarely, and not in what was imported: the emulator makes a lot."""
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_terminal_summary(terminalreporter):
    """Says how many tests ran on a GPU."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    ran = [r for r in reports if r.when == "call" and "gpu" in r.keywords]
    terminalreporter.write_line(f"{len(ran)} tests ran on a GPU.")
