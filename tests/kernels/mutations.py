"""Single edits that make a kernel wrong, in its PTX at one site or in a tensor map.

Sites are found by their opcodes, so the PTX of any compiler can be edited.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

from tests.ptx_emulator.parser import Register, parse, parts_of, split

WAIT = r"mbarrier\.(try|test)_wait"
LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared"
STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
MULTIPLY = r"tcgen05\.mma"
READ = r"tcgen05\.ld"
# Operations that a wait for a barrier protects.
GUARDED = rf"{LOAD}|{STORE}|{MULTIPLY}|{READ}"
TO_SHARED = r"stmatrix|st\.shared"
FROM_GLOBAL = r"ld(\.global)?(\.nc)?(\.v[24])?\.[busf]\d"
ARITHMETIC = r"(add|sub|mul|mad|and|or|xor|shl|shr|bfe|min|max|rem|div)(\.\w+)*\.[bus](16|32|64)$"

# Bits 16 to 29 of a matrix descriptor: an offset that swizzled K-major operands do not use
# (9.7.16.4.1).
UNUSED_OFFSET = (1 << 30) - (1 << 16)

# Class of an edit -> opcodes of the instructions that it removes.
DROPPED = {
    "wait dropped": r"tcgen05\.wait|cp\.async\.bulk\.wait_group|bar\.sync|barrier\.sync",
    "fence dropped": r"fence|tcgen05\.fence",
    "commit dropped": r"tcgen05\.commit|cp\.async\.bulk\.commit_group",
    "arrival dropped": r"mbarrier\.(arrive|expect_tx)",
    "initialisation dropped": r"mbarrier\.init|tcgen05\.alloc",
    "copy or product dropped": rf"{GUARDED}|{TO_SHARED}|{FROM_GLOBAL}",
    "end of the kernel": r"tcgen05\.dealloc",
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit.

    Attributes:
      kind: class of the edit.
      what: description of the change and its site.
      index: the instruction that the edit changes; None for an edit of a tensor map.
      edits: (begin, end, new text) of each change of the PTX.
      change: function that changes the machine before its launch.
    """

    kind: str
    what: str
    index: int | None = None
    edits: tuple[tuple[int, int, str], ...] = ()
    change: Callable = lambda machine: None

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"

    def apply(self, ptx: str) -> str:
        """Returns the edited PTX."""
        for begin, end, new in sorted(self.edits, reverse=True):
            ptx = ptx[:begin] + new + ptx[end:]
        return ptx


class Code:
    """A kernel's instructions, with their positions in the text for edits."""

    def __init__(self, ptx: str):
        self.ptx, self.kernel = ptx, parse(ptx)
        self.code = self.kernel.code
        self.groups = self._groups()
        targets = {target for line in self.code for target in line.targets}
        starts = (i in targets or (i and self.code[i - 1].targets) for i in range(len(self.code)))
        self.sections = list(itertools.accumulate(map(bool, starts)))

    def _groups(self) -> list[tuple[int, int]]:
        """Lists the span of each instruction, with the innermost braces around it, if any."""
        found, opened, open_of, at = [], [], [], self.code[0].span[0]
        ends = {}
        for line in self.code:
            begin, end = line.span
            for match in re.finditer(r"[{}]", self._gap(at, begin)):
                if match[0] == "{":
                    opened.append(at + match.start())
                elif opened:
                    ends[opened.pop()] = at + match.end()
            open_of.append(opened[-1] if opened else None)
            at = end
        for match in re.finditer(r"\}", self._gap(at, len(self.ptx))):
            if opened:
                ends[opened.pop()] = at + match.end()
        for line, begin in zip(self.code, open_of):
            found.append(line.span if begin is None else (begin, ends[begin]))
        return found

    def _gap(self, begin: int, end: int) -> str:
        text = self.ptx[begin:end]
        return re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: " " * len(m[0]), text, flags=re.S)

    def find(self, opcodes: str) -> list[int]:
        """Lists the instructions whose opcode starts with a match of this pattern."""
        return [i for i, line in enumerate(self.code) if re.match(opcodes, line.opcode)]

    def next(self, i: int, opcodes: str, *, step: int = 1) -> int | None:
        """Finds the nearest instruction with such an opcode in the same basic block.

        The search goes forwards, or backwards if `step` is -1.
        """
        j = i + step
        while 0 <= j < len(self.code) and self.sections[j] == self.sections[i]:
            if re.match(opcodes, self.code[j].opcode):
                return j
            j += step
        return None

    def reached(self, i: int, opcodes: str, stop: str) -> int | None:
        """Finds the nearest instruction with such an opcode on a path from i without `stop`."""
        seen, edge = {i}, [i]
        while edge:
            following = []
            for j in edge:
                line = self.code[j]
                name = line.opcode.split(".")[0]
                after = list(line.targets)
                if line.predicate or name not in ("bra", "brx", "ret", "exit"):
                    after.append(j + 1)
                following += [k for k in after if k not in seen and k < len(self.code)]
                seen.update(following)
            for j in following:
                if re.match(opcodes, self.code[j].opcode):
                    return j
            edge = [j for j in following if not re.match(stop, self.code[j].opcode)]
        return None

    def guard(self, i: int) -> str:
        """Returns the text of an instruction's predicate."""
        return re.match(r"(@!?\s*\S+\s+)?", self.code[i].text)[0]

    def operands(self, i: int) -> list[str]:
        """Returns the text of an instruction's operands."""
        return split(self.code[i].text.split(self.code[i].opcode, 1)[1].strip())

    def mutation(self, kind: str, i: int, note: str, *edits) -> Mutation:
        """Makes an edit at this instruction."""
        text = f"{self.code[i]}"
        return Mutation(kind, f"{text[:110]}{'; ' * bool(note)}{note}", i, edits)

    def dropped(self, i: int) -> tuple[int, int, str]:
        """Removes the instruction."""
        return (*self.code[i].span, ";")

    def passed(self, i: int) -> tuple[int, int, str]:
        """Makes a wait for a barrier return at once, as if its phase had completed."""
        return (*self.code[i].span, f"{self.guard(i)}setp.eq.u32 {self.operands(i)[0]}, 0, 0;")

    def moved(self, i: int, to: int) -> tuple[tuple[int, int, str], ...]:
        """Moves the instruction, with the braces around it, past another instruction."""
        begin, end = self.groups[i]
        first, last = self.groups[to]
        place = last if to > i else first
        return (begin, end, " "), (place, place, f" {self.ptx[begin:end]} ")

    def replaced(self, i: int, operands: list[str], first: str = "") -> tuple[int, int, str]:
        """Replaces the instruction's operands; the code in `first` may compute them."""
        line = f"{self.guard(i)}{self.code[i].opcode} {', '.join(operands)};"
        return (*self.code[i].span, f"{{ {first} {line} }}")

    def computed(self, i: int, number: int, operation: str, by: int, kind: str):
        """Replaces an operand by its `add` or `xor` with a number."""
        operands = self.operands(i)
        old, operands[number] = operands[number], "edited"
        type_ = kind if operation == "add" else f"b{kind[1:]}"
        first = f".reg .b{kind[1:]} edited; {operation}.{type_} edited, {old}, {by};"
        return self.replaced(i, operands, first)

    def shifted(self, i: int, number: int, by: int) -> tuple[int, int, str]:
        """Changes the offset of an address."""
        operands = self.operands(i)
        address = r"\[\s*([\w$%.]+)\s*(?:\+\s*(-?\w+))?\s*(,.*)?\]"
        base, offset, more = re.fullmatch(address, operands[number], re.S).groups()
        operands[number] = f"[{base}+{int(offset or '0', 0) + by}{more or ''}]"
        return self.replaced(i, operands)

    def moved_coordinate(self, i: int, number: int, which: int) -> tuple[int, int, str]:
        """Increases a coordinate of a copy by one."""
        operands = self.operands(i)
        base, coordinates = re.fullmatch(r"\[([^,]+),\s*\{(.*)\}\s*\]", operands[number]).groups()
        items = split(coordinates)
        old, items[which] = items[which], "edited"
        operands[number] = f"[{base}, {{{', '.join(items)}}}]"
        return self.replaced(i, operands, f".reg .b32 edited; add.s32 edited, {old}, 1;")


def _dropped(code: Code) -> Iterator[Mutation]:
    for kind, opcodes in DROPPED.items():
        for i in code.find(opcodes):
            # If an instruction is repeated, removing either copy is the same edit.
            if not (i and code.code[i].text == code.code[i - 1].text):
                yield code.mutation(kind, i, "", code.dropped(i))
    for i in code.find(WAIT):
        yield code.mutation("wait dropped", i, "", code.passed(i))


def _moved(code: Code) -> Iterator[Mutation]:
    # Class, opcode that is moved, opcode to which it is moved, and 1 for behind or -1 for before
    # it.
    moves = (
        ("wait moved", r"tcgen05\.wait::ld", r"mbarrier\.arrive", 1),
        ("wait moved", r"cp\.async\.bulk\.wait_group\.read", TO_SHARED, 1),
        ("wait moved", r"bar\.sync|barrier\.sync", r"mbarrier\.arrive", 1),
        ("fence moved", r"tcgen05\.fence::before", r"mbarrier\.arrive", 1),
        ("fence moved", r"fence\.proxy\.async", TO_SHARED, -1),
        ("fence moved", r"fence\.mbarrier_init", r"barrier\.cluster\.arrive", 1),
        ("commit moved", r"cp\.async\.bulk\.commit_group", STORE, -1),
    )
    for kind, opcodes, target, step in moves:
        for i in code.find(opcodes):
            to = code.next(i, target, step=step)
            # An instruction is not moved past another one with its opcode, which would replace it.
            if to is not None and code.next(i, opcodes, step=step) not in range(i, to):
                note = f"{'behind' if step > 0 else 'before'} {code.code[to]}"[:70]
                yield code.mutation(kind, i, note, *code.moved(i, to))
    for i in code.find(WAIT):
        begin, end = code.groups[i]
        to = code.reached(i, GUARDED, r"bar")
        if to is not None and re.search(r"\bbra\b", code.ptx[begin:end]):
            note = f"behind {code.code[to]}"[:70]
            place = code.groups[to][1]
            put = (place, place, f" {code.ptx[begin:end]} ")
            yield code.mutation("wait moved", i, note, (begin, end, ";"), put)
    for i in code.find(r"tcgen05\.commit"):
        products = [j for j in code.find(MULTIPLY) if j < i]
        if products:
            edits = code.moved(products[-1], i)
            yield code.mutation("commit moved", i, "before the last product", *edits)


def _barriers(code: Code) -> Iterator[Mutation]:
    for i in code.find(WAIT):
        yield code.mutation("parity flipped", i, "", code.computed(i, 2, "xor", 1, "b32"))
    # Opcode -> number of the operand with the address of a barrier; None if the opcode's first
    # operand may be a result.
    places = {WAIT: 1, r"tcgen05\.commit": 0, LOAD: 2, r"mbarrier\.(arrive|expect_tx)": None}
    for opcodes, number in places.items():
        for i in code.find(opcodes):
            operands = code.operands(i)
            at = int(not operands[0].startswith("[")) if number is None else number
            for by in (8, -8):
                yield code.mutation("wrong barrier", i, f"{by:+}", code.shifted(i, at, by))
    for i in code.find(r"mapa"):
        operands = code.operands(i)
        for block in sorted({"0", "1"} - {operands[2]}):
            edit = code.replaced(i, [*operands[:2], block])
            yield code.mutation("wrong block", i, f"block {block}", edit)
    for i in code.find(r"tcgen05\.commit.*multicast"):
        for block in (0, 1):
            edit = code.computed(i, 1, "xor", 1 << block, "b16")
            yield code.mutation("wrong block", i, f"not to block {block}", edit)
    for i in code.find(r"mbarrier\.init"):
        for by in (1, -1):
            edit = code.computed(i, 1, "add", by, "s32")
            yield code.mutation("count of arrivals or bytes", i, f"{by:+}", edit)
    for i in code.find(r"mbarrier\.(arrive\.)?expect_tx"):
        for by in (16, -16):
            edit = code.computed(i, len(code.operands(i)) - 1, "add", by, "s32")
            yield code.mutation("count of arrivals or bytes", i, f"{by:+}", edit)


def _together(code: Code) -> Iterator[Mutation]:
    """Edits the synchronisation between lanes, warps or blocks."""
    for i in code.find(r"fence\.proxy\.async"):
        one = f"{{ .reg .pred one; elect.sync _|one, -1; @one {code.code[i].text}; }}"
        yield code.mutation("fence by one lane", i, "", (*code.code[i].span, one))
        if (j := code.next(i, r"bar\.warp")) is not None:
            yield code.mutation("wait dropped", j, "behind a fence", code.dropped(j))
    for i in code.find(r"barrier\.cluster\.arrive(?!\.relaxed)"):
        edit = (*code.code[i].span, "barrier.cluster.arrive.relaxed.aligned;")
        yield code.mutation("relaxed arrival", i, "", edit)
    for i in code.find(r"setmaxnreg\.inc"):
        more = [str(int(code.operands(i)[0]) + 8)]
        yield code.mutation("too many registers", i, "", code.replaced(i, more))


def _descriptors(code: Code) -> Iterator[Mutation]:
    products = code.find(MULTIPLY)
    # Bit 46 is not edited: the ISA says 1, but kernels that run on hardware have 0 there.
    matrix = [bit for bit in range(64) if not UNUSED_OFFSET >> bit & 1 and bit != 46]
    for kind, number, bits in (
        ("matrix descriptor", 1, matrix),
        ("matrix descriptor", 2, matrix),
        ("instruction descriptor", 3, range(32)),
    ):
        # The bits are distributed among the sites, so that each bit and each site has an edit.
        for turn in range(max(len(bits), len(products)) if products else 0):
            i, bit = products[turn % len(products)], bits[turn % len(bits)]
            width = 32 if bits == range(32) else 64
            edit = code.computed(i, number, "xor", 1 << bit, f"b{width}")
            note = f"operand {'dabi'[number]}, bit {bit}"
            yield code.mutation(kind, i, note, edit)
    for i in products:
        operands = code.operands(i)
        operands[4] = operands[4][1:] if operands[4][0] == "!" else f"!{operands[4]}"
        yield code.mutation("accumulation", i, "", code.replaced(i, operands))


def _tensor_maps(maps: dict) -> Iterator[Mutation]:
    def changed(index, field, value):
        def change(machine):
            address = sorted(machine.tensor_maps)[index]
            tensor = machine.tensor_maps[address]
            machine.tensor_maps[address] = dataclasses.replace(tensor, **{field: value})

        return change

    def others(tensor):
        for swizzle in sorted({0, 32, 64, 128} - {tensor.swizzle}):
            yield "swizzle", swizzle
        yield "base", tensor.base + 16
        for i in range(len(tensor.box)):
            # An H200's TMA always stores whole units of 16 bytes at the end of a row.
            less = 1 if i else 16 // tensor.itemsize
            for field, values in (
                ("box", {tensor.box[i] // 2, tensor.box[i] + 1} - {0}),
                ("dimensions", {tensor.dimensions[i] - less} - {0}),
                ("strides", {tensor.strides[i] - 16, tensor.strides[i] + 16} if i else ()),
            ):
                old = getattr(tensor, field)
                for value in sorted(values):
                    yield field, (*old[:i], value, *old[i + 1 :])

    for index, address in enumerate(sorted(maps)):
        tensor = maps[address]
        for field, value in others(tensor):
            what = f"{tensor.name}, {field} {getattr(tensor, field)} -> {value}"
            yield Mutation("tensor map", what, change=changed(index, field, value))


def _places(code: Code, row_bytes: int) -> Iterator[Mutation]:
    """Edits rows, columns and addresses."""
    for kind, opcodes, number in (
        ("store to a wrong row or column", STORE, 0),
        ("load from a wrong row or column", LOAD, 1),
    ):
        for i in code.find(opcodes):
            rank = int(re.search(r"\.(\d)d\.", code.code[i].opcode)[1])
            for which in range(rank):
                edit = code.moved_coordinate(i, number, which)
                yield code.mutation(kind, i, f"coordinate {which} + 1", edit)
    for i in code.find(rf"{LOAD}.*im2col"):
        for which in (0, 1):
            offsets = split(code.operands(i)[3].strip("{}"))
            old, offsets[which] = offsets[which], "edited"
            operands = [*code.operands(i)[:3], f"{{{', '.join(offsets)}}}"]
            edit = code.replaced(i, operands, f".reg .b16 edited; add.s16 edited, {old}, 1;")
            yield code.mutation("load from a wrong row or column", i, f"offset {which} + 1", edit)
    for i in code.find(FROM_GLOBAL):
        *_, count, width = re.search(r"(?:\.v([24]))?\.[busf](\d+)$", code.code[i].opcode).groups()
        size = int(count or 1) * int(width) // 8
        for by in (size, row_bytes):
            yield code.mutation("wrong row of a table", i, f"{by:+}", code.shifted(i, 1, by))
    # The addresses are those of buffers in shared memory, and of columns of tensor memory.
    offsets = (
        (STORE, 1, 1024),
        (LOAD, 0, 1024),
        (TO_SHARED, 0, 16),
        (MULTIPLY, 0, 32),
        (READ, 1, 8),
    )
    for opcodes, number, by in offsets:
        for i in code.find(opcodes):
            yield code.mutation("wrong buffer", i, f"{by:+}", code.shifted(i, number, by))
    for i in code.find(ARITHMETIC):
        yield _other_arithmetic(code, i)


def _other_arithmetic(code: Code, i: int) -> Mutation:
    """Flips the lowest bit of a constant; if there is none, increases the result by one."""
    line, operands = code.code[i], code.operands(i)
    name, *_, kind = line.opcode.split(".")
    at = 2 if name == "bfe" else len(operands) - 1
    is_sign = name == "shr" and operands[-1] == "31"
    if re.fullmatch(r"-?\d+", operands[at]) and ".hi." not in line.opcode and not is_sign:
        old = int(operands[at])
        bits = old & ~UNUSED_OFFSET if kind.endswith("64") else old
        operands[at] = str(old + (bits & -bits or 1))
        return code.mutation("address arithmetic", i, operands[at], code.replaced(i, operands))
    width = 2 * int(kind[1:]) if ".wide." in line.opcode else int(kind[1:])
    more = f"{code.guard(i)}add.u{width} {operands[0]}, {operands[0]}, 1;"
    edit = (*line.span, f"{line.text}; {more}")
    return code.mutation("address arithmetic", i, "result + 1", edit)


def _end(code: Code) -> Iterator[Mutation]:
    """Lets a block exit while its peer may still signal it."""
    kind = "end of the kernel"
    arrivals = code.find(r"barrier\.cluster\.arrive")
    waits = code.find(r"barrier\.cluster\.wait")
    for arrival, wait in zip(arrivals, waits):
        both = code.dropped(arrival), code.dropped(wait)
        kind = "end of the kernel" if wait == waits[-1] else "wait dropped"
        yield code.mutation(kind, wait, "and the arrival", *both)
        yield code.mutation(kind, wait, "", code.dropped(wait))
        yield code.mutation(kind, arrival, "", code.dropped(arrival))
    if len(waits) < 2:
        return
    both = code.dropped(arrivals[-1]), code.dropped(waits[-1])
    for i in code.find(WAIT):
        # This wait is part of a drain, because no operation that it could protect follows.
        if code.reached(i, rf"{GUARDED}|mbarrier\.arrive", r"bar") is None:
            edits = (*both, code.passed(i))
            yield code.mutation(kind, i, "dropped, and the last cluster barrier", *edits)
    place = code.code[arrivals[-1]].span[0]
    for block in (0, 1):
        leave = (
            "{ .reg .pred gone; .reg .b32 rank; mov.u32 rank, %cluster_ctarank; "
            f"setp.eq.u32 gone, rank, {block}; @gone exit; }} "
        )
        note = f"block {block} exits before"
        yield code.mutation(kind, arrivals[-1], note, (place, place, leave))


# Instructions that access only registers, or that have finished when a warp arrives at a barrier.
QUIET = (
    r"(?!ld(?!\.param)|st|red|atom|cp(?!\.async\.bulk\.wait)|tcgen05\.(?!fence|wait)|wgmma|"
    r"mbarrier|bar)"
)
TENSOR = r"tcgen05\.(mma|ld|st|cp|shift)"


def harmless(mutation: Mutation, code: Code, traces: dict, unused: set[int]) -> str | None:
    """Returns the reason why an undetected edit is harmless; None if no reason is known.

    `traces` lists the instructions that each warp of the unedited kernel executes. `unused` are the
    instructions that initialise an mbarrier which is never used.
    """
    i = mutation.index
    if i is None:
        return None
    opcode = code.code[i].opcode

    def around(step: int):
        """Yields the nearest instruction not in QUIET, or None, at each execution.

        It is a later instruction if `step` is 1, and an earlier one if `step` is -1.
        """
        for trace in traces.values():
            for at in (k for k, j in enumerate(trace) if j == i):
                rest = trace[at + 1 :] if step > 0 else reversed(trace[:at])
                yield next((j for j in rest if not re.match(QUIET, code.code[j].opcode)), None)

    def as_wide(j: int | None) -> bool:
        """Returns whether instruction j is a barrier of at least the same warps."""
        if j is None:
            return False
        same = code.operands(j) == code.operands(i) or len(code.operands(j)) == 1
        name = code.code[j].opcode
        return bool((name.startswith("bar.sync") and same) or name.startswith("barrier.cluster"))

    def behind():
        """Yields the opcodes of the following instructions, for each execution of the edit."""
        for trace in traces.values():
            for at in (k for k, j in enumerate(trace) if j == i):
                yield [code.code[j].opcode for j in trace[at + 1 :]]

    if i in unused:
        return "this mbarrier is never used"
    if opcode.startswith("bar.sync"):
        if all(map(as_wide, around(1))) or all(map(as_wide, around(-1))):
            return "another barrier of these warps is next to it, with no memory access in between"
        if not any(re.match(rf"{GUARDED}|ld|st|mbarrier", o) for rest in behind() for o in rest):
            return "only tcgen05.dealloc follows, and the drains come before it"
    if opcode.startswith("barrier.cluster.wait"):
        if not any(re.match(rf"{GUARDED}|ld|st|mbarrier", o) for rest in behind() for o in rest):
            return "its warp accesses no memory afterwards"
    if opcode.startswith("tcgen05.fence::after"):
        covered = (
            itertools.takewhile(lambda o: not o.startswith("tcgen05.fence::after"), rest)
            for rest in behind()
        )
        if not any(re.match(TENSOR, o) for rest in covered for o in rest):
            return "its warp issues no tensor core operation that the fence could order"
    alone = math.prod(code.kernel.cluster or (1,)) == 1
    if alone and re.match(WAIT, opcode) and mutation.kind != "wait moved":
        if not any(re.match(rf"{GUARDED}|mbarrier\.arrive", o) for rest in behind() for o in rest):
            return "it only drains arrivals of the block's own warps"
    if opcode.startswith("barrier.cluster") and mutation.kind == "end of the kernel":
        return "the drains come before it, so no block signals this one any more"
    if mutation.kind == "address arithmetic":
        number = code.code[i].operands[0].number
        users = [
            line.opcode
            for line in code.code
            if any(r.number == number for x in line.operands[1:] for r in parts_of(x, Register))
            or (number in line.registers and not line.opcode.startswith("add"))
        ]
        if all(opcode.startswith("bar.sync") for opcode in users):
            return "only the number of a named barrier changes"
    return None


def mutations(code: Code, maps: dict, row_bytes: int) -> list[Mutation]:
    """Lists all edits of a kernel.

    Args:
      code: the kernel's code.
      maps: the kernel's tensor maps, by address.
      row_bytes: bytes of a row of the table in global memory.
    """
    return [
        *_dropped(code),
        *_moved(code),
        *_barriers(code),
        *_together(code),
        *_descriptors(code),
        *_tensor_maps(maps),
        *_places(code, row_bytes),
        *_end(code),
    ]
