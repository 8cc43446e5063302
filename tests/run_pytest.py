"""Runs pytest on the given files: the main program of BUILD's rules."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
