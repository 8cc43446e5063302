"""PTX text -> instructions with operands that are bound to registers.

Covers what LLVM, Triton and nvcc emit for one kernel: scopes, labels, register ranges, inline
assembly, branch tables, shared variables. What it does not know is an error with the line.
"""

import dataclasses
import functools
import re

from ptx_emulator.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Register:
    """A register of a warp: its number, and its type without the dot."""

    number: int
    type: str


@dataclasses.dataclass(frozen=True)
class Immediate:
    """A constant; of floats the bits."""

    value: int
    real: bool = False


@dataclasses.dataclass(frozen=True)
class Special:
    """%tid.x and the like."""

    name: str


@dataclasses.dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter, plus bytes."""

    name: str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    """[base + offset], or [base, {coordinates}] of a tensor."""

    base: object
    offset: int = 0
    coordinates: "Vector | None" = None


@dataclasses.dataclass(frozen=True)
class Vector:
    """{a, b, ...}."""

    items: tuple


@dataclasses.dataclass(frozen=True)
class Pair:
    """a|b."""

    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Negated:
    """!p."""

    register: Register


@dataclasses.dataclass(frozen=True)
class Sink:
    """_, which nobody reads."""


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
      opcode: with all modifiers, as it stands in the text.
      operands: bound to registers.
      predicate, negated: it is executed by lanes where the predicate is true (false).
      targets: indices of the instructions to which a branch goes.
      registers: numbers of all registers that it names.
      line, text: where it stands, and what there is without the spaces.
      span: where it begins and ends in the whole text, with its semicolon.
    """

    opcode: str
    operands: tuple
    predicate: Register | None
    negated: bool
    targets: tuple[int, ...]
    registers: frozenset[int]
    line: int
    text: str
    span: tuple[int, int]

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it begins and how many bytes it has."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One .entry of a PTX module.

    Attributes:
      name, target: as written.
      parameters: in order, with their offsets in the parameter space.
      block, cluster: .maxntid or .reqntid, and .reqnctapercluster; None where they are not given.
      most_registers, blocks_at_once: .maxnreg, or None, and .minnctapersm, or 1.
      registers: the type of each.
      shared: offsets of the shared variables; `dynamic` names the one that the launch sizes.
      shared_bytes: of all but that one.
      code: the instructions.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, ...] | None
    cluster: tuple[int, ...] | None
    most_registers: int | None
    blocks_at_once: int
    registers: tuple[str, ...]
    shared: dict[str, int]
    shared_bytes: int
    code: tuple[Instruction, ...]


# 4.5.1: hexadecimal, binary, octal, decimal.
INTEGER = re.compile(r"(-?)(?:(0[xX][0-9a-fA-F]+)|(0[bB][01]+)|(0[0-7]*)|([1-9]\d*))U?")
TYPE_BITS = re.compile(r"[busf](\d+)|bf16")
IDENTIFIER = r"[A-Za-z_$%][\w$]*"
SHARED = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    r"(\[\d*\])?"
)
STATEMENT = re.compile(rf"(?:@(!?)\s*({IDENTIFIER})\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)


@functools.cache
def bits(type_name: str) -> int:
    """Bits of a register of this type."""
    special = {"pred": 1, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "bf16": 16}
    return special.get(type_name) or int(TYPE_BITS.fullmatch(type_name)[1])


def integer(text: str) -> int | None:
    """The value of an integer constant; None if it is none."""
    match = INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, *digits = match.groups()
    value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10)) if d)
    return -value if sign else value


def split(text: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[(") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def parse(ptx: str, name: str | None = None) -> Kernel:
    """The kernel of this name, or the first one, of a PTX module."""
    source = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), ptx, flags=re.S)
    wanted = re.escape(name) if name else r"[\w$.]+"
    entry = re.search(rf"\.entry\s+({wanted})\s*\((.*?)\)(.*?)\{{", source, re.S)
    if entry is None:
        raise UnsupportedError(f"the module has no kernel {name or ''}")
    layout = _SharedLayout()
    for declaration in re.finditer(rf"^\s*{SHARED.pattern}", source[: entry.start()], re.M):
        layout.declare(declaration)
    body = _Body(source, entry.end(), layout)
    directives = entry[3]
    return Kernel(
        name=entry[1],
        target=re.search(r"^\.target\s+(\w+)", source, re.M)[1],
        parameters=tuple(_parameters(entry[2])),
        block=_dimensions(directives, r"\.(?:maxntid|reqntid)"),
        cluster=_dimensions(directives, r"\.reqnctapercluster"),
        most_registers=next(iter(_dimensions(directives, r"\.maxnreg") or ()), None),
        blocks_at_once=(_dimensions(directives, r"\.minnctapersm") or (1,))[0],
        registers=tuple(register.type for register in body.all_registers),
        shared=layout.finish(),
        shared_bytes=layout.bytes,
        code=tuple(body.instructions()),
    )


def _parameters(text: str):
    offset = 0
    for declaration in split(text):
        match = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
            r"([\w$]+)(?:\[(\d+)\])?",
            declaration,
        )
        if match is None:
            raise UnsupportedError(f"parameter {declaration!r}")
        align, kind, name, count = match.groups()
        item = bits(kind) // 8
        alignment = int(align or item)
        offset = -(-offset // alignment) * alignment
        size = item * int(count or 1)
        yield Parameter(name, offset, size)
        offset += size


def _dimensions(directives: str, directive: str) -> tuple[int, ...] | None:
    match = re.search(directive + r"\s+([\d, ]+)", directives)
    if match is None:
        return None
    found = tuple(int(x) for x in re.findall(r"\d+", match[1]))
    return found + (1,) * (3 - len(found))


class _SharedLayout:
    """Where shared variables are: in the order of their declaration, the dynamic one last."""

    def __init__(self):
        self.offsets, self.bytes, self.dynamic = {}, 0, {}

    def declare(self, match: re.Match) -> None:
        align, kind, name, extent = match.groups()
        item, alignment = bits(kind) // 8, int(align or 16)
        # LLVM declares the dynamic memory as one byte or as an array without an extent.
        if extent == "[]" or (extent is None and item == 1):
            self.dynamic[name] = alignment
            return
        self.bytes = -(-self.bytes // alignment) * alignment
        self.offsets[name] = self.bytes
        self.bytes += item * int(extent[1:-1] if extent else 1)

    def finish(self) -> dict[str, int]:
        for name, alignment in self.dynamic.items():
            self.bytes = -(-self.bytes // alignment) * alignment
            self.offsets[name] = self.bytes
        return self.offsets


class _Body:
    """The statements of a kernel, with the scopes in which names are declared."""

    def __init__(self, source: str, begin: int, layout: _SharedLayout):
        self.layout = layout
        self.parents = {0: None}
        self.labels, self.tables, self.named = {}, {}, {}
        self.all_registers: list[Register] = []
        # (scope, predicate, negated, opcode, operands, line, text, span)
        self.statements = []
        self._read(source, begin)

    def _read(self, source: str, at: int) -> None:
        line = source.count("\n", 0, at) + 1
        scopes = [0]
        label = re.compile(rf"({IDENTIFIER})\s*:(?!:)")
        last_label = None
        while scopes:
            character = source[at]
            if character.isspace() or character == ";":
                line += character == "\n"
                at += 1
            elif character == "{":
                self.parents[len(self.parents)] = scopes[-1]
                scopes.append(len(self.parents) - 1)
                at += 1
            elif character == "}":
                scopes.pop()
                at += 1
            elif match := label.match(source, at):
                last_label = match[1]
                if (scopes[-1], last_label) in self.labels:
                    raise UnsupportedError(f"line {line}: {last_label} is declared twice")
                self.labels[scopes[-1], last_label] = len(self.statements)
                line += match[0].count("\n")
                at = match.end()
            elif source.startswith((".loc", ".file"), at):
                at = source.index("\n", at)
            else:
                end = source.index(";", at)
                text = " ".join(source[at:end].split())
                self._statement(scopes[-1], text, line, last_label, (at, end + 1))
                line += source.count("\n", at, end)
                at = end + 1

    def _statement(
        self, scope: int, text: str, line: int, last_label: str | None, span: tuple[int, int]
    ) -> None:
        if text.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
            for name in split(names):
                ranged = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
                numbers = range(int(ranged[2])) if ranged else [""]
                for number in numbers:
                    full = f"{ranged[1] if ranged else name}{number}"
                    if (scope, full) in self.named:
                        raise UnsupportedError(f"line {line}: {full} is declared twice")
                    register = Register(len(self.all_registers), kind)
                    self.all_registers.append(register)
                    self.named[scope, full] = register
        elif match := SHARED.fullmatch(text):
            self.layout.declare(match)
        elif text.startswith(".branchtargets"):
            self.tables[scope, last_label] = split(text.removeprefix(".branchtargets"))
        elif text.startswith(".pragma"):
            pass
        elif match := STATEMENT.fullmatch(text):
            negated, predicate, opcode, operands = match.groups()
            self.statements.append(
                (scope, predicate, bool(negated), opcode, split(operands), line, text, span)
            )
        else:
            raise UnsupportedError(f"line {line}: {text}")

    def _find(self, table: dict, scope: int | None, name: str):
        while scope is not None:
            if (scope, name) in table:
                return table[scope, name]
            scope = self.parents[scope]
        return None

    def instructions(self):
        for scope, predicate, negated, opcode, operands, *place in self.statements:
            line, text, _ = place
            targets = ()
            if opcode.split(".")[0] == "bra":
                targets, operands = self._targets(scope, operands, line), []
            elif opcode.split(".")[0] == "brx":
                table = self._find(self.tables, scope, operands[1])
                if table is None:
                    raise UnsupportedError(f"line {line}: no branch table {operands[1]}")
                targets, operands = self._targets(scope, table, line), operands[:1]
            guard = self._find(self.named, scope, predicate) if predicate else None
            if predicate and guard is None:
                raise UnsupportedError(f"line {line}: no predicate {predicate}")
            try:
                bound = tuple(self._operand(scope, operand) for operand in operands)
            except UnsupportedError as error:
                raise UnsupportedError(f"line {line}: {text}: {error}") from error
            used = {guard.number} if guard else set()
            for operand in bound:
                used |= {register.number for register in parts_of(operand, Register)}
            yield Instruction(opcode, bound, guard, negated, targets, frozenset(used), *place)

    def _targets(self, scope: int, names: list[str], line: int) -> tuple[int, ...]:
        found = tuple(self._find(self.labels, scope, name) for name in names)
        if None in found:
            raise UnsupportedError(f"line {line}: no label among {names}")
        return found

    def _operand(self, scope: int, text: str):
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(self._operand(scope, item) for item in split(text[1:-1])))
        if text.startswith("["):
            base, *coordinates = split(text[1 : text.rindex("]")])
            tensor = self._operand(scope, coordinates[0]) if coordinates else None
            offset = 0
            if match := re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", base):
                base, offset = match[1], self._offset(match[2])
            return Address(self._operand(scope, base), offset, tensor)
        if text.startswith("!"):
            return Negated(self._operand(scope, text[1:].strip()))
        if "|" in text:
            return Pair(*(self._operand(scope, part.strip()) for part in text.split("|")))
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return Immediate(int(match[1], 16), real=True)
        if (value := integer(text)) is not None:
            return Immediate(value)
        if register := self._find(self.named, scope, text):
            return register
        if text.startswith("%"):
            return Special(text)
        name, _, offset = text.partition("+")
        return Symbol(name.strip(), self._offset(offset.strip() or "0"))

    def _offset(self, text: str) -> int:
        value = integer(text)
        if value is None:
            raise UnsupportedError(f"the offset {text}")
        return value


def parts_of(operand, kind):
    """All registers, or whatever else is of this kind, in an operand."""
    if isinstance(operand, kind):
        yield operand
    elif dataclasses.is_dataclass(operand):
        for field in dataclasses.fields(operand):
            value = getattr(operand, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                yield from parts_of(item, kind)
