"""Finds the Python blocks and the tables of the repository's Markdown pages."""

import dataclasses
import re

from tests.repository import ROOT

FOLDERS = (".github", "benchmarks", "docs", "pallas_patch_embed", "tests")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<not_run>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python.

    Attributes:
      line: number of the block's first line, counted from 1.
      code: text of the block.
      not_run: reason why the block is only compiled; "" if it runs.
    """

    line: int
    code: str
    not_run: str


def blocks(markdown: str) -> list[Block]:
    """Lists the ```python blocks of a page, each with the comment directly before it."""
    found = ((markdown.count("\n", 0, m.start("code")) + 1, m) for m in BLOCK.finditer(markdown))
    return [Block(line, match["code"], match["not_run"] or "") for line, match in found]


def section(page: str, heading: str) -> str:
    """Returns the text of a section of a page, up to the next heading of its rank or a higher one.

    Raises:
      ValueError: the page has no such heading, or several.
    """
    parts = re.split(
        rf"^(#+) {re.escape(heading)}\n", (ROOT / page).read_text(), flags=re.MULTILINE
    )
    _, rank, text = parts
    return re.split(rf"^#{{1,{len(rank)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the tables in a section of a page, as a list of rows."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def prose(page: str) -> str:
    """Returns the text of a page in one line."""
    return " ".join((ROOT / page).read_text().split())
