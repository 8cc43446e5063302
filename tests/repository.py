"""Folders of the repository, and the environment of processes that tests start."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = TESTS / "data"


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a process that imports the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
