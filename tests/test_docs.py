"""The Markdown pages: their programs run, and the names that they use exist."""

import ast
import re

import pytest

import pallas_patch_embed as ppe
from tests.pages import PAGES, blocks
from tests.repository import ROOT


def name(page):
    return str(page.relative_to(ROOT))


BLOCKS = [
    pytest.param(page, block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text())
]


@pytest.mark.parametrize("page, block", BLOCKS)
def test_the_programs_of_a_page_run(page, block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    # Empty lines are put in front, so that a traceback has the page's line number.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    if block.not_run:
        return
    exec(code, {})
    # The comments of the README's programs show their output.
    assert page.name != "README.md" or capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_names_in_a_page_are_in_the_package(page):
    for path in set(re.findall(r"\bppe((?:\.\w+)+)", page.read_text())):
        found = ppe
        for part in path[1:].split("."):
            found = getattr(found, part)


def test_the_api_page_has_every_public_name_once():
    text = (ROOT / "docs/api.md").read_text()
    documented = [line.split(":: ")[1] for line in text.splitlines() if line.startswith(".. ")]
    public = [f"pallas_patch_embed.{name}" for name in ppe.__all__ if name != "siglip2"]
    public += [
        f"pallas_patch_embed.siglip2.{name}"
        for name in ppe.siglip2.__all__
        if getattr(ppe.siglip2, name) is not getattr(ppe, name, None)
    ]
    # These modules are read as text, because their frameworks may be missing.
    for name in ("linen", "nnx", "equinox", "keras"):
        tree = ast.parse((ROOT / f"pallas_patch_embed/frameworks/{name}.py").read_text())
        names = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        home = f"pallas_patch_embed.frameworks.{name}"
        public += [f"{home}.{own}" for own in names if not own.startswith("_")]
    assert sorted(documented) == sorted(public)
