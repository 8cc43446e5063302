"""Versions of the packages and of NVIDIA's driver, on which a result may depend."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-triton",
    "triton",
    "numpy",
    "safetensors",
)
MISSING = "not installed"

# nvidia-smi takes up to a few seconds if no other process uses the GPU.
NVIDIA_SMI_SECONDS = 30.0


def version(package: str) -> str:
    """Returns the version of a package, or `MISSING`.

    Without the metadata of an installation it is that of the imported module.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package.replace("-", "_"))
        return str(getattr(module, "__version__", MISSING))


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the given packages, without those that are not installed."""
    found = {package: version(package) for package in packages}
    return {package: text for package, text in found.items() if text != MISSING}


def driver() -> str:
    """Returns the version of NVIDIA's driver; an empty string if there is no driver."""
    gpus = nvidia_smi("driver_version")
    return gpus[0]["driver_version"] if gpus else ""


def nvidia_smi(*properties: str) -> list[dict[str, str]]:
    """Asks nvidia-smi for properties of each GPU; returns nothing if it is missing or fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = [program, f"--query-gpu={','.join(properties)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = ([value.strip() for value in line.split(",")] for line in done.stdout.splitlines())
    return [dict(zip(properties, row)) for row in rows if len(row) == len(properties)]
