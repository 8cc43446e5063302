"""Marks the emulator's own tests slow, because only tests that compile for a GPU need it."""

import pathlib

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    folder = pathlib.Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.slow("only tests that compile for a GPU use the emulator"))
