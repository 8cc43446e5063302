"""Expansion of braces as in bash, one string at a time.

{a,b} stands for a and b; {1..3} for 1, 2 and 3; {01..10} for numbers of two digits; {a..e} for
letters; {0..10..5} for 0, 5 and 10. Braces may be nested. A backslash in front of a character takes
its meaning away. Other braces stand for themselves.
"""

import itertools
import re
import string
from collections.abc import Callable, Iterator, Sequence

LETTERS = string.ascii_uppercase + string.ascii_lowercase
RANGE = re.compile(r"(-?[0-9]+|[A-Za-z])\.\.(-?[0-9]+|[A-Za-z])(?:\.\.-?([0-9]+))?")
TOKEN = re.compile(r"[{},]|(?:\\.|[^{},\\]|\\\Z)+", re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)

# A text; or a pair of braces, as the sequences of nodes between their commas.
type Node = str | list[list[Node]]


def expand(pattern: str) -> Iterator[str]:
    """Yields the strings that a pattern stands for. Their number may be arbitrarily large.

    Raises:
      ValueError: an opening or a closing brace is missing, or braces are nested too deeply.
    """
    try:
        (nodes,) = _parse(iter(TOKEN.findall(pattern)), inside=False)
        yield from _strings(nodes)
    except RecursionError:
        raise ValueError("its braces are nested too deeply") from None


def _parse(tokens: Iterator[str], *, inside: bool) -> list[list[Node]]:
    """Parses up to a closing brace; outside of braces, up to the end of the pattern."""
    sequences: list[list[Node]] = [[]]
    for token in tokens:
        if token == "{":
            sequences[-1].append(_parse(tokens, inside=True))
        elif token == "}":
            if not inside:
                raise ValueError("it has a } without a {")
            return sequences
        elif token == "," and inside:
            sequences.append([])
        else:
            sequences[-1].append(token)
    if inside:
        raise ValueError("it has a { without a }")
    return sequences


def _strings(nodes: Sequence[Node]) -> Iterator[str]:
    """Yields the strings of a sequence of nodes, whose last node changes first."""
    if not nodes:
        yield ""
        return
    for begin in _choices(nodes[0]):
        for end in _strings(nodes[1:]):
            yield begin + end


def _choices(node: Node) -> Iterator[str]:
    if isinstance(node, str):
        yield ESCAPED.sub(r"\1", node)
    elif len(node) > 1:
        yield from itertools.chain.from_iterable(map(_strings, node))
    elif (found := _range(node[0])) is not None:
        yield from found
    else:
        yield from (f"{{{inner}}}" for inner in _strings(node[0]))


def _range(nodes: Sequence[Node]) -> Iterator[str] | None:
    """Returns the numbers or letters of a range; None if the nodes are no range."""
    text = nodes[0] if len(nodes) == 1 else None
    found = RANGE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    first, last, step = found.groups()
    if first.isalpha() != last.isalpha():
        return None
    if first.isalpha():
        begin, end = map(LETTERS.index, (first, last))
        names: Callable[[int], str] = LETTERS.__getitem__
    else:
        begin, end = int(first), int(last)
        is_padded = any(re.match("-?0[0-9]", x) for x in (first, last))
        names = f"{{:0{max(len(first), len(last)) if is_padded else 0}d}}".format
    direction = 1 if begin <= end else -1
    return map(names, range(begin, end + direction, direction * (int(step or 1) or 1)))
