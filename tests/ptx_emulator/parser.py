"""Parses a kernel of a PTX module into instructions whose operands refer to numbered registers.

It supports the PTX that LLVM, Triton and nvcc emit: scopes, labels, ranges of registers, inline
assembly, branch tables and shared variables. Any other syntax is an error that names the line.
"""

import dataclasses
import functools
import re

from tests.ptx_emulator.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Register:
    """A register: its number in the kernel, and its type without the dot."""

    number: int
    type: str


@dataclasses.dataclass(frozen=True)
class Immediate:
    """A constant. The value of a float, which is `real`, is given by its bits."""

    value: int
    real: bool = False


@dataclasses.dataclass(frozen=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclasses.dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter, plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    """An address [base + offset], or [base, {coordinates}] for a tensor map."""

    base: object
    offset: int = 0
    coordinates: "Vector | None" = None


@dataclasses.dataclass(frozen=True)
class Vector:
    """A vector of operands, {a, b, ...}."""

    items: tuple


@dataclasses.dataclass(frozen=True)
class Pair:
    """The operand a|b."""

    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Negated:
    """The negated predicate !p."""

    register: Register


@dataclasses.dataclass(frozen=True)
class Sink:
    """The destination _, which is discarded."""


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
      opcode: the name with all modifiers, as in the text.
      operands: the operands, with registers instead of names.
      predicate: the guard register, or None. Lanes in which it is true execute the instruction.
      negated: whether lanes in which the guard is false execute the instruction instead.
      targets: indices of the instructions that a branch may go to.
      registers: numbers of all registers that the instruction names.
      line: line number of the instruction in the module.
      text: text of the instruction, with single spaces.
      span: offsets of the instruction's beginning and end in the module, including the semicolon.
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
    """A kernel parameter: its offset and size in bytes."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One .entry of a PTX module.

    Attributes:
      name: the kernel's name.
      target: the module's .target.
      parameters: the parameters in order, with their offsets in the parameter space.
      block: .maxntid or .reqntid, or None.
      cluster: .reqnctapercluster, or None.
      max_registers: .maxnreg, or None.
      min_blocks_per_sm: .minnctapersm, or 1.
      registers: the type of each register, by its number.
      shared: the offset of each shared variable; the dynamic ones come last.
      shared_bytes: bytes of all shared variables except for the dynamic ones.
      code: the instructions.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, ...] | None
    cluster: tuple[int, ...] | None
    max_registers: int | None
    min_blocks_per_sm: int
    registers: tuple[str, ...]
    shared: dict[str, int]
    shared_bytes: int
    code: tuple[Instruction, ...]


# Integer constants (4.5.1): hexadecimal, binary, octal, decimal.
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
    """Returns the width of a type in bits."""
    irregular = {"pred": 1, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "bf16": 16}
    return irregular.get(type_name) or int(TYPE_BITS.fullmatch(type_name)[1])


def integer(text: str) -> int | None:
    """Returns the value of an integer constant; None if the text is not one."""
    match = INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, *digits = match.groups()
    value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10)) if d)
    return -value if sign else value


def split(text: str) -> list[str]:
    """Splits a list at the commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[(") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def parse(ptx: str, name: str | None = None) -> Kernel:
    """Parses the kernel with this name in a PTX module; by default the first kernel."""
    source = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), ptx, flags=re.S)
    name_pattern = re.escape(name) if name else r"[\w$.]+"
    entry = re.search(rf"\.entry\s+({name_pattern})\s*\((.*?)\)(.*?)\{{", source, re.S)
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
        block=_directive_dimensions(directives, r"\.(?:maxntid|reqntid)"),
        cluster=_directive_dimensions(directives, r"\.reqnctapercluster"),
        max_registers=next(iter(_directive_dimensions(directives, r"\.maxnreg") or ()), None),
        min_blocks_per_sm=(_directive_dimensions(directives, r"\.minnctapersm") or (1,))[0],
        registers=tuple(register.type for register in body.all_registers),
        shared=layout.finish(),
        shared_bytes=layout.bytes,
        code=tuple(body.instructions()),
    )


def _parameters(text: str):
    """Parses the parameters of a kernel's parameter list."""
    offset = 0
    for declaration in split(text):
        match = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
            r"([\w$]+)(?:\[(\d+)\])?",
            declaration,
        )
        if match is None:
            raise UnsupportedError(f"parameter {declaration!r} is not supported")
        align, ptx_type, name, count = match.groups()
        itemsize = bits(ptx_type) // 8
        alignment = int(align or itemsize)
        offset = -(-offset // alignment) * alignment
        size = itemsize * int(count or 1)
        yield Parameter(name, offset, size)
        offset += size


def _directive_dimensions(directives: str, directive: str) -> tuple[int, ...] | None:
    """Returns the three dimensions of a directive, padded with 1; None without the directive."""
    match = re.search(directive + r"\s+([\d, ]+)", directives)
    if match is None:
        return None
    sizes = tuple(int(x) for x in re.findall(r"\d+", match[1]))
    return sizes + (1,) * (3 - len(sizes))


class _SharedLayout:
    """The offsets of shared variables, in the order of declaration, with dynamic ones last."""

    def __init__(self):
        self.offsets, self.bytes, self.dynamic = {}, 0, {}

    def declare(self, match: re.Match) -> None:
        """Adds the variable of a declaration."""
        align, ptx_type, name, extent = match.groups()
        itemsize, alignment = bits(ptx_type) // 8, int(align or 16)
        # LLVM declares dynamic shared memory as one byte, or as an array without an extent.
        if extent == "[]" or (extent is None and itemsize == 1):
            self.dynamic[name] = alignment
            return
        self.bytes = -(-self.bytes // alignment) * alignment
        self.offsets[name] = self.bytes
        self.bytes += itemsize * int(extent[1:-1] if extent else 1)

    def finish(self) -> dict[str, int]:
        """Places the dynamic variables behind all other variables; returns all offsets."""
        for name, alignment in self.dynamic.items():
            self.bytes = -(-self.bytes // alignment) * alignment
            self.offsets[name] = self.bytes
        return self.offsets


class _Body:
    """The statements of a kernel, and the scopes in which names are declared.

    Scope 0 is the kernel's body. Names are found in the innermost scope that declares them.
    """

    def __init__(self, source: str, begin: int, layout: _SharedLayout):
        self.layout = layout
        self.parents: dict[int, int | None] = {0: None}
        # (scope, name) -> index of the labelled instruction, labels of a branch table, or register.
        self.labels, self.branch_tables, self.registers = {}, {}, {}
        self.all_registers: list[Register] = []
        # For each instruction: (scope, predicate, negated, opcode, operands, line, text, span)
        self.statements = []
        self._read(source, begin)

    def _read(self, source: str, position: int) -> None:
        """Reads statements up to the brace that closes the kernel's body."""
        line = source.count("\n", 0, position) + 1
        scopes = [0]
        label = re.compile(rf"({IDENTIFIER})\s*:(?!:)")
        last_label = None
        while scopes:
            character = source[position]
            if character.isspace() or character == ";":
                line += character == "\n"
                position += 1
            elif character == "{":
                self.parents[len(self.parents)] = scopes[-1]
                scopes.append(len(self.parents) - 1)
                position += 1
            elif character == "}":
                scopes.pop()
                position += 1
            elif match := label.match(source, position):
                last_label = match[1]
                if (scopes[-1], last_label) in self.labels:
                    raise UnsupportedError(f"line {line}: {last_label} is declared twice")
                self.labels[scopes[-1], last_label] = len(self.statements)
                line += match[0].count("\n")
                position = match.end()
            elif source.startswith((".loc", ".file"), position):
                position = source.index("\n", position)
            else:
                end = source.index(";", position)
                text = " ".join(source[position:end].split())
                self._statement(scopes[-1], text, line, last_label, (position, end + 1))
                line += source.count("\n", position, end)
                position = end + 1

    def _statement(
        self, scope: int, text: str, line: int, last_label: str | None, span: tuple[int, int]
    ) -> None:
        """Reads a declaration, a directive or an instruction."""
        if text.startswith(".reg"):
            ptx_type, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
            for name in split(names):
                # %r<3> declares %r0, %r1 and %r2.
                range_match = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
                numbers = range(int(range_match[2])) if range_match else [""]
                for number in numbers:
                    full_name = f"{range_match[1] if range_match else name}{number}"
                    if (scope, full_name) in self.registers:
                        raise UnsupportedError(f"line {line}: {full_name} is declared twice")
                    register = Register(len(self.all_registers), ptx_type)
                    self.all_registers.append(register)
                    self.registers[scope, full_name] = register
        elif match := SHARED.fullmatch(text):
            self.layout.declare(match)
        elif text.startswith(".branchtargets"):
            self.branch_tables[scope, last_label] = split(text.removeprefix(".branchtargets"))
        elif text.startswith(".pragma"):
            pass
        elif match := STATEMENT.fullmatch(text):
            negated, predicate, opcode, operands = match.groups()
            self.statements.append(
                (scope, predicate, bool(negated), opcode, split(operands), line, text, span)
            )
        else:
            raise UnsupportedError(f"line {line}: {text} is not supported")

    def _find(self, table: dict, scope: int | None, name: str):
        """Looks up a name in a scope, or in the innermost enclosing scope that declares it."""
        while scope is not None:
            if (scope, name) in table:
                return table[scope, name]
            scope = self.parents[scope]
        return None

    def instructions(self):
        """Returns the instructions, with operands bound to registers and branches to targets."""
        for scope, predicate, negated, opcode, operands, *location in self.statements:
            line, text, _ = location
            targets = ()
            if opcode.split(".")[0] == "bra":
                targets, operands = self._targets(scope, operands, line), []
            elif opcode.split(".")[0] == "brx":
                table = self._find(self.branch_tables, scope, operands[1])
                if table is None:
                    raise UnsupportedError(
                        f"line {line}: no branch table {operands[1]} is declared"
                    )
                targets, operands = self._targets(scope, table, line), operands[:1]
            guard = self._find(self.registers, scope, predicate) if predicate else None
            if predicate and guard is None:
                raise UnsupportedError(f"line {line}: no predicate {predicate} is declared")
            try:
                bound = tuple(self._operand(scope, operand) for operand in operands)
            except UnsupportedError as error:
                raise UnsupportedError(f"line {line}: {text}: {error}") from error
            used = {guard.number} if guard else set()
            for operand in bound:
                used |= {register.number for register in parts_of(operand, Register)}
            yield Instruction(opcode, bound, guard, negated, targets, frozenset(used), *location)

    def _targets(self, scope: int, names: list[str], line: int) -> tuple[int, ...]:
        """Returns the indices of the instructions with these labels."""
        targets = tuple(self._find(self.labels, scope, name) for name in names)
        if None in targets:
            raise UnsupportedError(f"line {line}: a label among {names} is not declared")
        return targets

    def _operand(self, scope: int, text: str):
        """Parses an operand."""
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
        if register := self._find(self.registers, scope, text):
            return register
        if text.startswith("%"):
            return Special(text)
        name, _, offset = text.partition("+")
        return Symbol(name.strip(), self._offset(offset.strip() or "0"))

    def _offset(self, text: str) -> int:
        """Parses the offset of an address."""
        value = integer(text)
        if value is None:
            raise UnsupportedError(f"the offset {text} is not an integer")
        return value


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields; nothing for another type."""
    is_dataclass = dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind)) if is_dataclass else ()


def parts_of(operand, part_type):
    """Lists all parts of an operand that are instances of a class, such as `Register`."""
    if isinstance(operand, part_type):
        yield operand
    elif names := _fields(type(operand)):
        for name in names:
            value = getattr(operand, name)
            for item in value if isinstance(value, tuple) else (value,):
                yield from parts_of(item, part_type)
