"""BUILD and the README agree with the package."""

import re

import pallas_patch_embed as ppe
from tests.repository import ROOT


def test_the_globs_of_BUILD_cover_the_package():
    patterns = re.findall(r'"([^"]*\.py)"', (ROOT / "BUILD").read_text())
    covered = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert set((ROOT / "pallas_patch_embed").rglob("*.py")) <= covered


def test_the_README_lists_all_backends():
    section = (ROOT / "README.md").read_text().split("## Where it runs")[1].split("##")[0]
    assert tuple(re.findall(r"^\| (\w+) \|", section, re.MULTILINE)[1:]) == ppe.backend_names()
