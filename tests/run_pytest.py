"""Runs pytest on the given files; this is the main program of BUILD's tests."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
