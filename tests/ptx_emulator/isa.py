"""The table of instructions, and what all of them need: operands as functions of a warp.

An instruction is registered with every form of its opcode that it accepts, written as a template
("add{.u32,.s32}"), and the section of the PTX ISA (9.0) that defines it. An opcode that is not in
the table is an error.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.memory import BLOCK_SHIFT, SHARED_BEGIN
from ptx_emulator.parser import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Register,
    Sink,
    Special,
    Symbol,
    bits,
    parts_of,
)

LANES = 32
LANE = np.arange(LANES)
# As bits.
ALL_LANES = (1 << LANES) - 1

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}

# Why a register is pending: what has to be waited for.
WAIT_FOR_LOADS, WAIT_FOR_PRODUCTS = "tcgen05.wait::ld", "wgmma.wait_group"

# Instructions that are all the lanes' at once: those that have not arrived are waited for.
TOGETHER = (".sync", ".aligned", "bar.", "barrier.cluster.")

# Among them those that no lane may leave out; `bar` is short for barrier.aligned (9.7.13.1). Of the
# cluster's barrier that is more than the ISA asks for.
ALIGNED = (".aligned", "bar.sync", "bar.arrive", "bar.cta.", "barrier.cluster.")

# The targets that are known, and those that have what is specific to an architecture.
TARGETS = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f")
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_100f")
SINCE_BLACKWELL = ("sm_100", *BLACKWELL)

# Special registers are read by these alone (10), at their width: 64 bits of these, 32 of others.
READ_SPECIAL = ("mov", "cvt")
WIDE_SPECIAL = ("%clock64", "%globaltimer")


@dataclasses.dataclass(frozen=True)
class Blocked:
    """What an instruction returns that cannot go on: it is tried again when `ready()`."""

    ready: Callable[[], bool]
    reason: Callable[[], str]
    # The instruction is done, only the lanes wait: it is not tried again.
    done: bool = False


@dataclasses.dataclass
class Task:
    """Asynchronous work. Tasks of one queue happen in the order in which they were issued.

    `issued` is a number in that order; what a task leads to has the task's.
    """

    kind: str
    run: Callable[[], None]
    what: str
    cluster: object
    queue: tuple | None = None
    issued: int = 0
    done: bool = False


@dataclasses.dataclass(frozen=True)
class Definition:
    """What an opcode means: make(build, instruction) gives execute(warp, mask)."""

    make: Callable
    section: str
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction of a program that can be executed; branches and exits have no `execute`."""

    instruction: Instruction
    execute: Callable | None
    # Of registers that are pending for one of these reasons it may name some.
    completes: tuple[str, ...] = ()


TABLE: dict[str, Definition] = {}
GROUP = re.compile(r"cta_group::\d")
JUMPS = ("bra", "bra.uni", "brx.idx", "brx.idx.uni", "ret", "exit")


def forms(template: str) -> list[str]:
    """Every opcode of a template: "ld{.a,.b}{,.c}" has four."""
    parts = [part.split(",") for part in re.split(r"\{(.*?)\}", template)[1::2]]
    fixed = re.split(r"\{.*?\}", template)
    return [
        "".join(itertools.chain(*itertools.zip_longest(fixed, chosen, fillvalue="")))
        for chosen in itertools.product(*parts)
    ]


def instruction(section: str, *templates: str, targets: tuple[str, ...] = TARGETS):
    """Registers a maker for all forms of these opcodes, which these targets have."""

    def register(make):
        for opcode in itertools.chain(*map(forms, templates)):
            if opcode in TABLE:
                raise ValueError(f"{opcode} is registered twice")
            TABLE[opcode] = Definition(make, section, targets)
        return make

    return register


def numpy_type(name: str):
    """The numpy type of a PTX type."""
    if name in FLOATS:
        return FLOATS[name]
    if name == "pred":
        return np.bool_
    return (SIGNED if name[0] == "s" else UNSIGNED)[bits(name)]


def lanes(mask: np.ndarray | None) -> np.ndarray:
    """The numbers of the active lanes."""
    return LANE if mask is None else np.nonzero(mask)[0]


def lane_bits(mask: np.ndarray | None) -> int:
    """The active lanes as bits."""
    if mask is None:
        return ALL_LANES
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def build(machine) -> list[Step]:
    """The kernel's instructions as functions of a warp."""
    builder = Builder(machine)
    target, steps, group = machine.kernel.target, [], None
    if target not in TARGETS:
        raise UnsupportedError(f"the target {target} is not among {', '.join(TARGETS)}")
    for line in machine.kernel.code:
        if line.opcode in JUMPS:
            if line.opcode.startswith("brx"):
                (index,) = line.operands
                if not isinstance(index, Register) or bits(index.type) != 32:
                    raise UnsupportedError(f"{line}: {index} is no register of 32 bits")
            steps.append(Step(line, None))
            continue
        definition = TABLE.get(line.opcode)
        if definition is None:
            raise UnsupportedError(f"{line}: {line.opcode} is not among the known instructions")
        if target not in definition.targets:
            raise UnsupportedError(
                f"{line}: {line.opcode} needs a target among {', '.join(definition.targets)}, "
                f"not {target}"
            )
        if line.opcode.startswith("tcgen05.") and (found := GROUP.search(line.opcode)):
            group = group or found[0]
            if found[0] != group:
                raise UnsupportedError(f"{line}: {found[0]} in a kernel with {group} (9.7.16.5)")
        try:
            _check_special(line)
            execute = definition.make(builder, line)
        except (
            UnsupportedError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
        ) as error:
            raise UnsupportedError(f"{line}: {error}") from error
        completes = getattr(execute, "completes", ())
        if any(modifier in line.opcode for modifier in TOGETHER):
            aligned = any(modifier in line.opcode for modifier in ALIGNED)
            execute = _with_all_lanes(execute, line.opcode if aligned else None)
        steps.append(Step(line, execute, completes))
    return steps


def _check_special(line: Instruction) -> None:
    special = next((x for operand in line.operands for x in parts_of(operand, Special)), None)
    if special and line.opcode.split(".")[0] not in READ_SPECIAL:
        raise UnsupportedError(f"the special register {special.name} is read by mov and cvt alone")


def _with_all_lanes(execute, aligned: str | None):
    """Waits until the lanes that have not exited are here; an aligned opcode needs all of them."""

    @functools.wraps(execute)
    def waiting(warp, mask):
        if not warp.together():
            return Blocked(warp.together, lambda: "the other lanes of the warp")
        if aligned and warp.parted(mask):
            raise EmulatorError(f"{aligned} without all lanes: {lanes(mask).tolist()} alone")
        return execute(warp, mask)

    return waiting


class Builder:
    """Makes functions of a warp from operands."""

    def __init__(self, machine):
        self.machine, self.kernel = machine, machine.kernel

    def read(self, operand, kind: str, *, wider: bool = False) -> Callable:
        """read(warp): the operand's 32 values, as unsigned integers of the type's width.

        Args:
          operand: what is read.
          kind: type of the instruction's operand.
          wider: whether a register may be wider; its upper bits are ignored (9.4.1).
        """
        width = bits(kind)
        dtype = UNSIGNED[width]
        if isinstance(operand, Register):
            number, found = operand.number, bits(operand.type)
            if found == width:
                return lambda warp: warp.registers[number]
            if found > width and wider:
                return lambda warp: warp.registers[number].astype(dtype)
            raise UnsupportedError(f"a register of {found} bits where {kind} is expected")
        if isinstance(operand, Immediate):
            constant = np.full(LANES, self._constant(operand, kind), dtype)
            return lambda warp: constant
        if isinstance(operand, Negated):
            positive = self.read(operand.register, "pred")
            return lambda warp: ~positive(warp)
        if isinstance(operand, Special):
            found = 64 if operand.name in WIDE_SPECIAL else 32
            if kind in FLOATS or not (found == width or (found > width and wider)):
                raise UnsupportedError(f"{operand.name} has {found} bits, not {kind}")
            return self._special(operand.name, dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        raise UnsupportedError(f"{operand} cannot be read")

    def _constant(self, operand: Immediate, kind: str) -> int:
        """The bits of a constant, which has to be one of this type (4.5)."""
        value, width = operand.value, bits(kind)
        if kind not in ("f32", "b32") if operand.real else kind in FLOATS:
            raise UnsupportedError(f"the constant {value:#x} as {kind}")
        if not -(1 << width - 1) <= value < 1 << width:
            raise UnsupportedError(f"the constant {value} is beyond {kind}")
        return bool(value) if width == 1 else value & ((1 << width) - 1)

    def write(self, operand, kind: str, *, wider: bool = False) -> Callable:
        """write(warp, values, mask): sets a register; values have the type's width.

        A wider register gets them extended, by sign if the type has one (9.4.1).
        """
        if isinstance(operand, Sink):
            return lambda warp, values, mask: None
        if not isinstance(operand, Register):
            raise UnsupportedError(f"{operand} cannot be written")
        number, found, width = operand.number, bits(operand.type), bits(kind)
        if found != width and not (wider and found > width):
            raise UnsupportedError(f"a register of {found} bits where {kind} is expected")
        narrow = SIGNED[width] if kind[0] == "s" else UNSIGNED[width]
        wide, raw = (SIGNED if kind[0] == "s" else UNSIGNED).get(found), UNSIGNED[found]

        # The array of a register is never changed, so registers may share one.
        def write(warp, values, mask):
            values = np.ascontiguousarray(values)
            if found != width:
                values = values.view(narrow).astype(wide)
            values = values.view(raw)
            if mask is None:
                warp.registers[number] = values
            else:
                warp.registers[number] = np.where(mask, values, warp.registers[number])

        return write

    def immediate(self, operand) -> int:
        """A constant that is an integer."""
        if not isinstance(operand, Immediate) or operand.real:
            raise UnsupportedError(f"{operand} is no integer constant")
        return operand.value

    def address(self, operand: Address) -> Callable:
        """address(warp): [base + offset], 32 values of 64 bits."""
        if not isinstance(operand, Address):
            raise UnsupportedError(f"{operand} is no address")
        base, offset = operand.base, np.uint64(operand.offset % 2**64)
        kind = f"b{bits(base.type)}" if isinstance(base, Register) else "b64"
        read = self.read(base, kind)
        if kind == "b32":
            short = np.uint32(operand.offset % 2**32)
            return lambda warp: (read(warp) + short).astype(np.uint64)
        return lambda warp: read(warp) + offset

    def _symbol(self, symbol: Symbol, dtype) -> Callable:
        if symbol.name in self.kernel.shared:
            offset = SHARED_BEGIN + self.kernel.shared[symbol.name] + symbol.offset
            return lambda warp: np.full(LANES, warp.block.shared_base + offset, dtype)
        for parameter in self.kernel.parameters:
            if parameter.name == symbol.name:
                constant = np.full(LANES, parameter.offset + symbol.offset, dtype)
                return lambda warp: constant
        raise UnsupportedError(f"no variable {symbol.name}")

    def _special(self, name: str, dtype) -> Callable:
        machine = self.machine
        block_shape, grid, cluster = machine.block_shape, machine.grid, machine.cluster
        values = {
            "%laneid": lambda warp: LANE,
            "%cluster_ctarank": lambda warp: warp.block.rank,
            "%cluster_nctarank": lambda warp: len(warp.block.cluster.blocks),
            "%lanemask_lt": lambda warp: (1 << LANE) - 1,
            "%lanemask_eq": lambda warp: 1 << LANE,
            "%dynamic_smem_size": lambda warp: machine.shared_bytes - machine.kernel.shared_bytes,
            # A clock that never stands still; nothing else of it can be relied on.
            "%clock": lambda warp: warp.executed,
            "%clock64": lambda warp: warp.executed,
            "%globaltimer": lambda warp: warp.executed,
            "%globaltimer_lo": lambda warp: warp.executed,
            "%smid": lambda warp: 0,
        }
        for i, axis in enumerate("xyz"):
            below, ranks = int(np.prod(block_shape[:i])), int(np.prod(cluster[:i]))

            def thread(warp, below=below, i=i):
                return warp.threads // below % block_shape[i]

            def rank(warp, ranks=ranks, i=i):
                return warp.block.rank // ranks % cluster[i]

            values |= {
                f"%tid.{axis}": thread,
                f"%ntid.{axis}": lambda warp, i=i: block_shape[i],
                f"%ctaid.{axis}": lambda warp, i=i: warp.block.place[i],
                f"%nctaid.{axis}": lambda warp, i=i: grid[i],
                f"%cluster_ctaid.{axis}": rank,
                f"%cluster_nctaid.{axis}": lambda warp, i=i: cluster[i],
                f"%clusterid.{axis}": lambda warp, i=i: warp.block.place[i] // cluster[i],
                f"%nclusterid.{axis}": lambda warp, i=i: grid[i] // cluster[i],
            }
        if name not in values:
            raise UnsupportedError(f"the special register {name}")
        value = values[name]
        return lambda warp: np.broadcast_to(np.asarray(value(warp), dtype), LANES)


def block_of(address: int) -> tuple[int, int]:
    """Rank of the block and offset in its shared memory, of an address of shared::cluster."""
    return address >> BLOCK_SHIFT, address & ((1 << BLOCK_SHIFT) - 1)
