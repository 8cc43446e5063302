"""Single edits of a compiled Blackwell kernel, each of which makes it wrong: what has to be noticed.

An edit changes the PTX at one site, or a tensor map.
"""

import dataclasses
import random
import re
from collections.abc import Callable

# Random arithmetic edits that are tried.
ARITHMETIC = 48


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit.

    Attributes:
      kind: its class.
      place: the line of PTX, or what is changed.
      edit: changes the PTX.
      change: changes the machine before the launch.
    """

    kind: str
    place: str
    edit: Callable[[str], str] = lambda ptx: ptx
    change: Callable = lambda machine: None

    def __str__(self) -> str:
        return f"{self.kind}: {self.place}"


def at(kind: str, ptx: str, pattern: str, replacement) -> list[Mutation]:
    """An edit at each place where the pattern is."""
    found = []
    for match in re.finditer(pattern, ptx, re.M):
        new = replacement(match) if callable(replacement) else match.expand(replacement)
        if new == match[0]:
            continue
        begin, end = match.span()
        line = ptx.count("\n", 0, begin + len(match[0]) - len(match[0].lstrip())) + 1
        place = f"line {line}: {' '.join(match[0].split())[:100]}"
        found.append(Mutation(kind, place, lambda p, b=begin, e=end, n=new: p[:b] + n + p[e:]))
    return found


def statement(opcode: str) -> str:
    """The pattern of a statement."""
    return rf"(?:@!?%\w+\s+)?\b{opcode}[^;\n]*;"


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 (P1), \[(%r\d+)\], (%r\d+), (%r\d+);"

DROPPED = {
    "wait of tcgen05.ld dropped": r"tcgen05\.wait::ld",
    "wait for stores dropped": r"cp\.async\.bulk\.wait_group(?:\.read)?",
    "commit of stores dropped": r"cp\.async\.bulk\.commit_group",
    "fence between the proxies dropped": r"fence\.proxy\.async",
    "fence of the barriers' initialisation dropped": r"fence\.mbarrier_init",
    "fence before a barrier dropped": r"tcgen05\.fence::before_thread_sync",
    "fence after a barrier dropped": r"tcgen05\.fence::after_thread_sync",
    "commit of products dropped": r"tcgen05\.commit",
    "arrival dropped": r"mbarrier\.arrive[\w.:]*",
    "initialisation dropped": r"mbarrier\.init",
    "named barrier dropped": r"bar\.sync",
    "copy dropped": r"cp\.async\.bulk\.tensor",
    "product dropped": r"tcgen05\.mma",
    "tensor memory not given back": r"tcgen05\.dealloc",
    "load of tensor memory dropped": r"tcgen05\.ld",
    "store to shared memory dropped": r"stmatrix",
    "load of the table dropped": r"ld\.global",
}


def dropped(ptx: str):
    """Statements that are left out, and waits that do not wait."""
    for kind, opcode in DROPPED.items():
        # The address of a remote barrier stands in the same statement list as its arrival.
        yield from at(kind, ptx, statement(opcode), "")
    yield from at("wait dropped", ptx, WAIT, r"setp.eq.b32 \1, 0, 0;")
    both = r"barrier\.cluster\.arrive[^;]*;(?:.|\n)*?barrier\.cluster\.wait[^;]*;"
    yield from at("cluster barrier dropped", ptx, both, "")


def moved(ptx: str):
    """What happens too early or too late."""
    # A release of tensor memory or of a slot before what it releases.
    commit = statement(r"tcgen05\.commit")
    for match in re.finditer(rf"(?P<before>(?:.*\n){{40}})(?P<commit>.*{commit})", ptx):
        del match
    yield from at(
        "wait of tcgen05.ld after its first use",
        ptx,
        r"(tcgen05\.wait::ld\.sync\.aligned;)((?:[^;]*;){12})",
        r"\2 \1",
    )
    yield from at(
        "fence between the proxies before the last store",
        ptx,
        rf"({statement('stmatrix')})([^;]*?)({statement('fence.proxy.async')})",
        r"\3 \2 \1",
    )


def barriers(ptx: str):
    """Wrong parities, slots and blocks."""
    flipped = r".reg .b32 flipped; xor.b32 flipped, \3, 1; "
    wait = r"mbarrier.try_wait.parity.shared.b64 \1, "
    yield from at("parity flipped", ptx, WAIT, flipped + wait + r"[\2], flipped, \4;")
    yield from at("wait on the next barrier", ptx, WAIT, wait + r"[\2+8], \3, \4;")
    yield from at(
        "arrival at the next barrier",
        ptx,
        r"(mbarrier\.arrive[\w.:]* (?:%rd\d+|_), \[\w+|mbarrier\.arrive[\w.:]* (?:%rd\d+|_), \[%r\w+)\]",
        r"\1+8]",
    )
    yield from at(
        "commit to the next barrier",
        ptx,
        r"(tcgen05\.commit[\w.:]* \[[\w%+]*?)(\+\d+)?\]",
        lambda m: f"{m[1]}+{int(m[2] or 0) + 8}]",
    )
    yield from at(
        "barrier of the wrong block",
        ptx,
        r"mapa\.shared::cluster\.u32 (\w+), (%r\d+), (%?\w+);",
        r".reg .b32 other; xor.b32 other, \3, 1; mapa.shared::cluster.u32 \1, \2, other;"
        if "%r" in ptx
        else "",
    )
    yield from at("commit to one block", ptx, r"mov\.b16 \t(%rs\d+), 3;", "mov.b16 \t\\1, 1;")
    yield from at(
        "count of a barrier",
        ptx,
        r"mov\.b32 \t(%r\d+), (\d+);(?=(?:.|\n){0,200}mbarrier\.init[\w.:]* \[%r\d+\], \1;)",
        lambda m: f"mov.b32 \t{m[1]}, {int(m[2]) + 1};",
    )
    yield from at(
        "bytes that are expected",
        ptx,
        r"mov\.b32 \t(%r\d+), (\d+);(?=(?:.|\n){0,400}mbarrier\.arrive\.expect_tx[\w.:]* %rd\d+, \[%\w+\], \1;)",
        lambda m: f"mov.b32 \t{m[1]}, {int(m[2]) // 2};",
    )


def descriptors(ptx: str):
    """Bits of the descriptors of the products."""
    number = re.search(r"\], a_desc, b_desc, (%r\d+), %p\d+;", ptx)[1]
    bits = re.search(rf"mov\.b32 \t{number}, (\d+);", ptx)[1]
    for bit in range(32):
        new = str(int(bits) ^ 1 << bit)
        yield Mutation(
            "instruction descriptor",
            f"bit {bit}",
            lambda p, n=new: p.replace(f", {bits};", f", {n};"),
        )
    high = re.search(r"mov\.b64 a_desc, \{a_desc_low, (\d+)\}", ptx)[1]
    for side in "ab":
        for bit in range(32):
            old = f"{{{side}_desc_low, {high}}}"
            new = f"{{{side}_desc_low, {int(high) ^ 1 << bit}}}"
            yield Mutation(
                "matrix descriptor",
                f"{side}, bit {32 + bit}",
                lambda p, old=old, new=new: p.replace(old, new),
            )
    yield from at(
        "advance along K",
        ptx,
        r"add\.s32 ([ab]_desc_low), (%r\d+), ([246]);",
        lambda m: f"add.s32 {m[1]}, {m[2]}, {int(m[3]) - 2};",
    )
    yield from at(
        "accumulation",
        ptx,
        r"mov\.pred \t(%p\d+), (0|-1);",
        lambda m: f"mov.pred \t{m[1]}, {-1 if m[2] == '0' else 0};",
    )


def tensor_maps(count: int):
    """Fields of the tensor maps."""

    def changed(index, field, alter):
        def change(machine):
            address = sorted(machine.tensor_maps)[index]
            tensor = machine.tensor_maps[address]
            value = alter(getattr(tensor, field))
            machine.tensor_maps[address] = dataclasses.replace(tensor, **{field: value})

        return change

    alterations = {
        "swizzle": [lambda s: 64, lambda s: 0, lambda s: 32],
        "box": [lambda b: (*b[:-1], b[-1] // 2), lambda b: (*b[:-1], b[-1] + 1)],
        "dimensions": [lambda d: (*d[:-1], d[-1] - 1)],
        "strides": [lambda s: (*s[:-1], s[-1] - 16), lambda s: (*s[:-1], s[-1] + 16)],
        "base": [lambda b: b + 16],
    }
    for index in range(count):
        for field, alters in alterations.items():
            for i, alter in enumerate(alters):
                place = f"map {index}, {field}, {i}"
                yield Mutation("tensor map", place, change=changed(index, field, alter))


def arithmetic(ptx: str):
    """A constant that is off, or another operation, at random places."""
    pattern = r"^\t(add|sub|and|or|xor|shl|shr|mul|mad|bfe|selp|min)\.[\w.]+ [^;{]*;"
    sites = list(re.finditer(pattern, ptx, re.M))
    for match in sorted(random.Random(0).sample(sites, ARITHMETIC), key=lambda m: m.start()):
        text, operation = match[0], match[1]
        numbers = list(re.finditer(r", (-?\d+)(?=[,;])", text))
        if numbers:
            last = numbers[-1]
            new = f"{text[: last.start(1)]}{int(last[1]) + 1}{text[last.end(1) :]}"
        elif operation == "add":
            new = text.replace("add.", "sub.", 1)
        elif operation == "sub":
            new = text.replace("sub.", "add.", 1)
        elif operation in ("and", "or", "xor"):
            other = {"and": "or", "or": "xor", "xor": "and"}[operation]
            new = text.replace(f"{operation}.", f"{other}.", 1)
        else:
            continue
        line = ptx.count("\n", 0, match.start()) + 1
        begin, end = match.span()
        place = f"line {line}: {' '.join(text.split())}"
        yield Mutation("arithmetic", place, lambda p, b=begin, e=end, n=new: p[:b] + n + p[e:])


def mutations(ptx: str, maps: int) -> list[Mutation]:
    """All edits of a kernel."""
    return [
        *dropped(ptx),
        *moved(ptx),
        *barriers(ptx),
        *descriptors(ptx),
        *tensor_maps(maps),
        *arithmetic(ptx),
    ]
