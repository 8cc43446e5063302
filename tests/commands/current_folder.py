"""Runs commands in a folder with modules that must not be imported."""

import os
import subprocess
import sys
import sysconfig

import pytest

# Packages that processes import besides the modules of the standard library.
PACKAGES = ("absl", "jax", "jaxlib", "numpy", "pallas_patch_embed", "PIL", "safetensors", "ray")

# A module that notes that it was imported, and then cannot be imported.
MODULE = r"""
import os
with open(os.path.join(os.path.dirname(__file__), "imported.txt"), "a") as file:
    file.write(__name__ + "\n")
raise ImportError("it is from the current folder")
"""


def fill(folder):
    """Writes a module for every module of the standard library, and for some packages."""
    for name in {*sys.stdlib_module_names, *PACKAGES, "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(MODULE)


def ran(folder, *command, **variables):
    """Runs a command in the folder; returns it after it has ended, and the modules it imported."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
    )
    imported = folder / "imported.txt"
    return done, imported.read_text().split() if imported.exists() else []


def installed(name):
    """Returns the path of an installed command, which does not itself import from this folder."""
    path = os.path.join(sysconfig.get_path("scripts"), name)
    if not os.path.exists(path):
        pytest.skip(f"{name} is not installed")
    return path
