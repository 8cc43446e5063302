"""The Markdown pages: their programs run, their links have targets, and their names exist."""

import ast
import inspect

import pytest
from pages import PAGES, anchors, blocks, broken_links, inline_code, lines, long_lines, programs
from repository import ROOT

import pallas_patch_embed as ppe


def name(page):
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)

PROGRAMS = [
    pytest.param(page, program, id=f"{name(page)}:{program[0].line}")
    for page in PAGES
    for program in programs(page.read_text())
    if program
]


@pytest.mark.parametrize("page, program", PROGRAMS)
def test_the_programs_of_a_page_run(page, program, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {}
    for block in program:
        # Empty lines are put in front, so that a traceback has the page's line number.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(page), "exec"), namespace)
    # The comments of the README's programs show their output.
    assert page.name != "README.md" or capsys.readouterr().out


@every_page
def test_programs_that_are_not_run_compile(page):
    for block in blocks(page.read_text()):
        if block.not_run:
            compile("\n" * (block.line - 1) + block.code, str(page), "exec")


def unknown_in(code):
    """Lists the names in a piece of Python that the package does not have."""
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        return ["it is no expression"]
    unknown = []
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else node
        if not isinstance(function, ast.Attribute):
            continue
        path = ast.unparse(function)
        if not path.startswith("ppe."):
            continue
        found = ppe
        for part in path.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            unknown.append(path)
        elif isinstance(node, ast.Call):
            accepted = inspect.signature(found).parameters
            names = {keyword.arg for keyword in node.keywords if keyword.arg}
            unknown += sorted(names - set(accepted))
    return unknown


@every_page
def test_the_names_in_a_line_of_text_are_in_the_package(page):
    for code in inline_code(page.read_text()):
        if "ppe." in code:
            assert unknown_in(code) == [], code


@pytest.mark.parametrize(
    "code, unknown",
    [
        ("ppe.embed_images(images, params, backend=...)", []),
        ("ppe.siglip2.load_encoder(path)", []),
        ("jax.lax.stop_gradient(ppe.embed_image(x))", ["ppe.embed_image"]),
        ("ppe.pack(kernel, bias, None, patch=16)", ["patch"]),
        ("ppe.pack(kernel", ["it is no expression"]),
    ],
    ids=["call", "nested module", "name", "argument", "syntax"],
)
def test_a_wrong_name_in_a_line_of_text_is_noticed(code, unknown):
    # An attribute is checked twice, as a function that is called and as a name.
    assert list(dict.fromkeys(unknown_in(code))) == unknown


@every_page
def test_links_lead_to_files_and_headings(page):
    assert broken_links(page, page.read_text()) == []


@every_page
def test_no_line_of_a_page_is_too_long(page):
    assert long_lines(page.read_text()) == []


def test_the_README_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_api_page_has_every_public_name_once():
    text = (ROOT / "docs/api.md").read_text()
    documented = [line.split(":: ")[1] for line in text.splitlines() if line.startswith(".. ")]
    public = [f"pallas_patch_embed.{name}" for name in ppe.__all__ if name != "siglip2"]
    public += [
        f"pallas_patch_embed.siglip2.{name}"
        for name, value in vars(ppe.siglip2).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    # These modules are read as text, because their frameworks may be missing.
    for name in ("linen", "nnx", "equinox", "keras"):
        tree = ast.parse((ROOT / f"pallas_patch_embed/frameworks/{name}.py").read_text())
        names = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        home = f"pallas_patch_embed.frameworks.{name}"
        public += [f"{home}.{own}" for own in names if not own.startswith("_")]
    assert sorted(documented) == sorted(public)


# The checks above find faults in pages.


@pytest.mark.parametrize(
    "link, leads_somewhere",
    [
        ("[a](docs/usage.md)", True),
        ("[a](docs/usage.md#which-dtype)", True),
        ("[a](#here-it-is-1)", True),
        ("![a](benchmarks/audit.png)", True),
        ("[![a](benchmarks/audit.png)](docs/usage.md)", True),
        ("[a](ffi/)", True),
        ("[a](https://example.com/page#part)", True),
        ("`[a](docs/nothing.md)`", True),
        ("```\n[a](docs/nothing.md)\n```", True),
        ("[a](docs/nothing.md)", False),
        ("[a b\nc](docs/nothing.md)", False),
        ("[a](docs/usage.md#which-type)", False),
        ("[a](#here-it-is-2)", False),
        ("[a](ffi/plan.h#L10)", False),
        ("![a](benchmarks/nothing.png)", False),
        ("[![a](benchmarks/nothing.png)](docs/usage.md)", False),
        ("[a]\n\n[a]: docs/nothing.md", False),
        ('<img src="benchmarks/nothing.png">', False),
        ("[a](../outside.md)", False),
        ("[a](/docs/usage.md)", False),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(link, leads_somewhere):
    page = f"# Here it `is`\n\n## Here it is!\n\n{link}\n"
    assert (broken_links(ROOT / "page.md", page) == []) == leads_somewhere


def test_anchors_are_those_of_GitHub():
    page = "# `pack`: a_b & c\n\n## What - really?\n\n## [Link](x.md) here\n\n```\n# code\n```\n"
    assert anchors(page) == {"pack-a_b--c", "what---really", "link-here"}


@pytest.mark.parametrize(
    "text, too_long",
    [
        ("a " * 50, False),
        ("a " * 51, True),
        ("- " + "a " * 50, True),
        ("| " + "a " * 60, False),
        ("```\n" + "a " * 60 + "\n```", False),
        ("    " + "a " * 60, False),
        ("text\n    " + "a " * 60, True),
        ("- item\n\n    " + "a " * 60, True),
        ("- [a long title](" + "a" * 100 + ")", False),
        ("see [a title](" + "a" * 100 + ")", True),
    ],
)
def test_a_long_line_is_noticed(text, too_long):
    assert bool(long_lines(f"# Title\n\n{text}\n")) == too_long


def test_the_blocks_of_a_page_are_found():
    page = (
        "```python\na = 1\n```\n<!-- continues -->\n```python\nb = a\n```\n\n"
        "<!-- not run: needs a GPU -->\n```python\nc\n```\n```sh\nd\n```\n"
        "- item\n  ```python\n  e = 2\n  ```\n````md\n```python\nf\n```\n````\n"
    )
    found = blocks(page)
    assert [(b.code, b.not_run, b.continues) for b in found] == [
        ("a = 1", "", False),
        ("b = a", "", True),
        ("c", "needs a GPU", False),
        ("e = 2", "", False),
    ]
    assert [[b.line for b in program] for program in programs(page)] == [[2, 6], [], [18]]
    assert [line.number for line in lines(page) if line.language is None] == [4, 8, 9, 16]


@pytest.mark.parametrize(
    "page",
    [
        "<!-- not run -->\n```python\n```\n",
        "<!-- not run: -->\n```python\n```\n",
        "<!-- not run:  -->\n```python\n```\n",
        "<!-- continues: a -->\n```python\n```\n",
        "<!-- continues -->\n```python\n```\n",
        "```python\na = 1\n",
    ],
    ids=["no reason", "empty reason", "spaces", "unknown", "nothing to continue", "no end"],
)
def test_a_wrong_comment_before_a_block_is_refused(page):
    with pytest.raises(ValueError):
        blocks(page)
