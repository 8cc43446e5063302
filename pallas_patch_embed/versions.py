"""Versions of what a result depends on: packages, and NVIDIA's driver."""

import importlib.metadata
import shutil
import subprocess
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


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    found = {package: version(package) for package in packages}
    return {package: text for package, text in found.items() if text != MISSING}


def driver() -> str:
    """The version of NVIDIA's driver; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else ""
