"""Folders of the repository, and the environment of processes that tests start."""

import os
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = TESTS / "data"


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a process that can import `tests` and `benchmarks`."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
