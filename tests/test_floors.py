"""The floors of the package: code imports only from its own floor and from those below it."""

import ast

import pytest

from tests.repository import ROOT

PACKAGE = ROOT / "pallas_patch_embed"

# From the top to the bottom. Folders in one line do not import from each other.
FLOORS = (
    ("commands",),
    ("embed", "frameworks"),
    ("encoders",),
    ("layers", "patch_embedding"),
    ("backends",),
    ("base",),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}


def imports(path):
    """Yields the modules of this package that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "pallas_patch_embed":
                yield from (f"pallas_patch_embed.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def upward(source, imported):
    """Returns whether a file in the folder `source` must not import this module."""
    parts = imported.split(".")
    if parts[0] != "pallas_patch_embed" or parts[1:] in ([], ["__version__"]):
        return False  # The version is a fact of the package itself.
    target = parts[1]
    if target not in FLOOR:
        return True  # The root holds names for users.
    return target != source and FLOOR[target] <= FLOOR[source]


def test_every_folder_is_on_a_floor():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FLOOR)
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "siglip2.py",
    }


@pytest.mark.parametrize("folder", FLOOR)
def test_no_import_leads_to_a_floor_above(folder):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    found = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in files
        for module in imports(path)
        if upward(folder, module)
    ]
    assert files and not found


def test_an_upward_import_is_noticed(tmp_path):
    code = "def f():\n    from pallas_patch_embed.commands import cli\n"
    file = tmp_path / "lazy.py"
    file.write_text(code)
    assert [module for module in imports(file) if upward("base", module)] == [
        "pallas_patch_embed.commands"
    ]
    assert upward("base", "pallas_patch_embed.siglip2")
    assert upward("layers", "pallas_patch_embed.patch_embedding.api")
    assert not upward("commands", "pallas_patch_embed.base.files")
