"""Versions of the packages and of NVIDIA's driver, on which a result may depend."""

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
    """Returns the installed version of a package, or `MISSING`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the given packages, without those that are not installed."""
    found = {package: version(package) for package in packages}
    return {package: text for package, text in found.items() if text != MISSING}


def driver() -> str:
    """Returns the version of NVIDIA's driver; an empty string if there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else ""
