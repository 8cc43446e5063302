"""Reads the repository's Markdown pages: their Python blocks, links, anchors and lines."""

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

FOLDERS = (".github", "benchmarks", "docs", "pallas_patch_embed", "tests")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]

COLUMNS = 100

FENCE = re.compile(r"( *)(`{3,}|~{3,}) *(\S*)")
LIST_ITEM = re.compile(r" *([-*+]|\d+\.) ")
LINK = re.compile(r"\[(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*\]\(<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\)")
DEFINITION = re.compile(r" {0,3}\[[^\]]+\]: *(\S+)")
ATTRIBUTE = re.compile(r"<[^>]*(?:src|href)=\"([^\"]+)\"")
LINK_ALONE = re.compile(r"\s*(?:(?:[-*+]|\d+\.) )?\(?(?:!?\[.*\]\(\S+\)|<?https?://\S+)\S{0,3}")
COMMENT = re.compile(r"<!-- *(not run|continues)")
NOT_RUN = re.compile(r"<!-- not run: (.*\S.*) -->")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a page.

    Attributes:
      number: number of the line, counted from 1.
      text: text of the line, without the newline.
      language: language of the code block that contains the line, "" if the block names none; None
        outside a block.
      is_fence: whether the line begins or ends a block.
    """

    number: int
    text: str
    language: str | None = None
    is_fence: bool = False


def lines(markdown: str) -> list[Line]:
    """Splits a page into lines."""
    found: list[Line] = []
    end, language = "", ""
    after_blank, in_list, indented = True, False, False
    for number, text in enumerate(markdown.splitlines(), 1):
        if end:
            ends = text.strip().startswith(end) and not text.strip(f"{end[0]} ")
            found.append(Line(number, text, language, ends))
            end = "" if ends else end
        elif fence := FENCE.match(text):
            end, language, indented = fence[2], fence[3], False
            found.append(Line(number, text, language, True))
        else:
            if text.strip():
                # Four spaces begin a block of code, but in a list they continue an item.
                in_list = in_list and text.startswith(" ")
                indented = text.startswith("    ") and not in_list and (after_blank or indented)
                in_list = in_list or bool(LIST_ITEM.match(text) and not indented)
            found.append(Line(number, text, "" if indented else None))
        after_blank = not text.strip()
    if end:
        raise ValueError(f"a block of code that begins with {end} has no end")
    return found


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python.

    Attributes:
      line: number of the block's first line, counted from 1.
      code: text of the block.
      not_run: reason why the block is only compiled; "" if it runs.
      continues: whether the block uses names of the previous one.
    """

    line: int
    code: str
    not_run: str
    continues: bool


def blocks(markdown: str) -> list[Block]:
    """Lists the ```python blocks of a page, each with the comment directly before it."""
    found: list[Block] = []
    page = lines(markdown)
    fences = [i for i, line in enumerate(page) if line.is_fence]
    for start, end in zip(fences[::2], fences[1::2]):
        if page[start].language != "python":
            continue
        comment = page[start - 1].text.strip() if start else ""
        not_run, continues = NOT_RUN.fullmatch(comment), comment == "<!-- continues -->"
        if COMMENT.match(comment) and not not_run and not continues:
            raise ValueError(
                f"line {start}: {comment}, expected <!-- not run: REASON --> or <!-- continues -->"
            )
        if continues and not found:
            raise ValueError(f"line {start}: there is no earlier block to continue")
        code = textwrap.dedent("\n".join(line.text for line in page[start + 1 : end]))
        reason = not_run[1].strip() if not_run else ""
        found.append(Block(page[start].number + 1, code, reason, continues))
    return found


def programs(markdown: str) -> list[list[Block]]:
    """Lists the programs of a page: a block that runs, with the blocks that continue it."""
    found: list[list[Block]] = []
    for block in blocks(markdown):
        if block.continues:
            found[-1].append(block)
        else:
            found.append([block])
    return [[b for b in program if not b.not_run] for program in found]


def prose(markdown: str) -> Iterator[Line]:
    """Yields the lines outside of code blocks."""
    return (line for line in lines(markdown) if line.language is None)


def inline_code(markdown: str) -> list[str]:
    """Lists the code between backticks in a page's prose."""
    text = "\n".join(line.text for line in prose(markdown))
    return [code.replace("\n", " ") for _, code in re.findall(r"(`+)(.+?)\1", text, re.DOTALL)]


def links(markdown: str) -> list[str]:
    """Lists the targets of the links and pictures of a page."""
    text = "\n".join(line.text for line in prose(markdown))
    text = re.sub(r"(`+)(.+?)\1", "", text, flags=re.DOTALL)
    found = [*LINK.findall(text), *ATTRIBUTE.findall(text)]
    # The text of a link that is a picture also contains a target.
    found += re.findall(r"\[!\[[^\]]*\]\(([^)\s]+)\)\]", text)
    return found + [m[1] for line in text.splitlines() if (m := DEFINITION.match(line))]


def anchors(markdown: str) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    found, seen = set(), Counter()
    for line in prose(markdown):
        if heading := re.match(r"#{1,6} +(.*?)[ #]*$", line.text):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken_links(page: Path, markdown: str) -> list[str]:
    """Lists the links of a page to missing files or headings; links to other hosts are skipped."""
    broken = []
    for target in links(markdown):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        exists = path == page or (path.is_relative_to(ROOT) and path.exists())
        if exists and anchor:
            text = markdown if path == page else path.read_text() if path.suffix == ".md" else ""
            exists = anchor in anchors(text)
        if not exists:
            broken.append(target)
    return broken


def long_lines(markdown: str) -> list[str]:
    """Lists lines of more than 100 columns, except code, rows of tables and single links."""
    return [
        f"line {line.number}: {len(line.text)} columns"
        for line in prose(markdown)
        if len(line.text) > COLUMNS
        and not line.text.lstrip().startswith("|")
        and not LINK_ALONE.fullmatch(line.text)
    ]
