"""The table of opcodes, and the binding of an instruction's operands to functions of a warp.

The modules of instructions register each opcode with all the modifiers that they accept, as
templates ("add{.u32,.s32}"), and with the section of the PTX ISA (version 9.0) that defines it. An
opcode that is not in the table is an error.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.memory import BLOCK_SHIFT, SHARED_BASE
from tests.ptx_emulator.parser import (
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

WARP_SIZE = 32
LANE_IDS = np.arange(WARP_SIZE)
# All lanes of a warp, one bit each.
FULL_MASK = (1 << WARP_SIZE) - 1

# The numpy types of integers, by their width in bits, and of floats, by their PTX type.
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

# Instructions that wait until an asynchronous operation has written its registers.
WAIT_FOR_LOADS, WAIT_FOR_WGMMA = "tcgen05.wait::ld", "wgmma.wait_group"

# Parts of opcodes that all lanes of a warp execute together; lanes that come first wait.
CONVERGENT = (".sync", ".aligned", "bar.", "barrier.cluster.")

# Parts of opcodes that no active lane may skip. `bar` is short for barrier.aligned (9.7.13.1). The
# ISA does not require this of barrier.cluster without .aligned, but the emulator does.
ALIGNED = (".aligned", "bar.sync", "bar.arrive", "bar.cta.", "barrier.cluster.")

# The known values of .target, and those with the architecture-specific features of a chip.
TARGETS = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f")
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_100f")
SINCE_BLACKWELL = ("sm_100", *BLACKWELL)

# Only these instructions read special registers (section 10), at the register's width, which is 64
# bits for WIDE_SPECIAL_REGISTERS and 32 bits for all other registers.
READS_SPECIAL_REGISTERS = ("mov", "cvt")
WIDE_SPECIAL_REGISTERS = ("%clock64", "%globaltimer")


@dataclasses.dataclass(frozen=True)
class Blocked:
    """The state of an instruction that has to wait.

    Attributes:
      ready: function that returns whether the wait is over.
      reason: function that describes, for error messages, what the lanes wait for.
      done: whether the instruction has been executed and only its lanes wait. Otherwise it is
        executed again once the wait is over.
    """

    ready: Callable[[], bool]
    reason: Callable[[], str]
    done: bool = False


@dataclasses.dataclass
class Task:
    """An asynchronous operation. Tasks of one queue are executed in the order of their issue.

    Attributes:
      kind: one of the kinds of tasks that `machine.py` lists.
      run: function that executes the operation.
      description: the operation, as error messages name it.
      cluster: the cluster that issued it.
      queue: key of the queue that the task waits in, or None.
      sequence: position in the order of issue. A task that another task issues inherits it.
      done: whether the operation has been executed.
    """

    kind: str
    run: Callable[[], None]
    description: str
    cluster: Any
    queue: tuple | None = None
    sequence: int = 0
    done: bool = False


@dataclasses.dataclass(frozen=True)
class Definition:
    """The meaning of an opcode.

    Attributes:
      make: function make(binder, instruction) that returns the function execute(warp, mask).
      section: section of the PTX ISA.
      targets: values of .target that have the opcode.
    """

    make: Callable
    section: str
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction with the function that executes it.

    Attributes:
      instruction: the parsed instruction.
      execute: function of (warp, mask); None for branches and exits, which the warp executes
      itself.
      may_use_pending: wait instructions; this instruction may name registers that are pending until
        one of them.
    """

    instruction: Instruction
    execute: Callable | None
    may_use_pending: tuple[str, ...] = ()


OPCODES: dict[str, Definition] = {}
CTA_GROUP = re.compile(r"cta_group::\d")
CONTROL_FLOW = ("bra", "bra.uni", "brx.idx", "brx.idx.uni", "ret", "exit")


def expand(template: str) -> list[str]:
    """Lists the opcodes of a template; "ld{.a,.b}{,.c}" has four."""
    parts = [part.split(",") for part in re.split(r"\{(.*?)\}", template)[1::2]]
    fixed = re.split(r"\{.*?\}", template)
    return [
        "".join(itertools.chain(*itertools.zip_longest(fixed, chosen, fillvalue="")))
        for chosen in itertools.product(*parts)
    ]


def defines(section: str, *templates: str, targets: tuple[str, ...] = TARGETS):
    """Returns a decorator for a function that makes `execute` for all opcodes of the templates."""

    def register(make):
        for opcode in itertools.chain(*map(expand, templates)):
            if opcode in OPCODES:
                raise ValueError(f"{opcode} is registered twice")
            OPCODES[opcode] = Definition(make, section, targets)
        return make

    return register


def dtype_of(name: str):
    """Returns the numpy type of the values of a PTX type."""
    if name in FLOATS:
        return FLOATS[name]
    if name == "pred":
        return np.bool_
    return (SIGNED if name[0] == "s" else UNSIGNED)[bits(name)]


def active_lanes(mask: np.ndarray | None) -> np.ndarray:
    """Returns the numbers of the lanes in a mask; None stands for all lanes."""
    return LANE_IDS if mask is None else np.nonzero(mask)[0]


def lane_bitmask(mask: np.ndarray | None) -> int:
    """Returns the lanes in a mask as bits of an integer; None stands for all lanes."""
    if mask is None:
        return FULL_MASK
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def require_all_lanes(mask: np.ndarray | None, description: str) -> None:
    """Raises an error unless all 32 lanes execute an instruction."""
    if mask is not None:
        raise EmulatorError(f"{description} is not executed by all lanes")


def build_steps(machine) -> list[Step]:
    """Binds every instruction of the machine's kernel to the function that executes it."""
    binder = OperandBinder(machine)
    target, steps, cta_group = machine.kernel.target, [], None
    if target not in TARGETS:
        raise UnsupportedError(f"the target {target} is not among {', '.join(TARGETS)}")
    for instruction in machine.kernel.code:
        opcode = instruction.opcode
        if opcode in CONTROL_FLOW:
            if opcode.startswith("brx"):
                (index,) = instruction.operands
                if not isinstance(index, Register) or bits(index.type) != 32:
                    raise UnsupportedError(f"{instruction}: {index} is not a register of 32 bits")
            steps.append(Step(instruction, None))
            continue
        definition = OPCODES.get(opcode)
        if definition is None:
            raise UnsupportedError(f"{instruction}: {opcode} is not among the known instructions")
        if target not in definition.targets:
            raise UnsupportedError(
                f"{instruction}: {opcode} needs a target among {', '.join(definition.targets)}, "
                f"not {target}"
            )
        if opcode.startswith("tcgen05.") and (found := CTA_GROUP.search(opcode)):
            # All tcgen05 instructions of a kernel must have the same .cta_group (9.7.16.5).
            cta_group = cta_group or found[0]
            if found[0] != cta_group:
                raise UnsupportedError(
                    f"{instruction}: there is {found[0]} in a kernel with {cta_group} (9.7.16.5)"
                )
        try:
            _check_special_registers(instruction)
            execute = definition.make(binder, instruction)
        except (
            UnsupportedError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
        ) as error:
            raise UnsupportedError(f"{instruction}: {error}") from error
        may_use_pending = getattr(execute, "may_use_pending", ())
        if any(part in opcode for part in CONVERGENT):
            aligned = any(part in opcode for part in ALIGNED)
            execute = _wait_for_all_lanes(execute, opcode if aligned else None)
        steps.append(Step(instruction, execute, may_use_pending))
    return steps


def _check_special_registers(instruction: Instruction) -> None:
    special = next(
        (x for operand in instruction.operands for x in parts_of(operand, Special)), None
    )
    if special and instruction.opcode.split(".")[0] not in READS_SPECIAL_REGISTERS:
        raise UnsupportedError(f"the special register {special.name} is read only by mov and cvt")


def _wait_for_all_lanes(execute, aligned: str | None):
    """Makes an instruction wait until all lanes that have not exited have reached it.

    `aligned` is the opcode if the ISA requires that all these lanes execute it, else None.
    """

    @functools.wraps(execute)
    def waiting(warp, mask):
        if not warp.is_converged():
            return Blocked(warp.is_converged, lambda: "the other lanes of the warp")
        if aligned and warp.is_part(mask):
            lanes = active_lanes(mask).tolist()
            raise EmulatorError(f"{aligned} is not executed by all lanes, but only by {lanes}")
        return execute(warp, mask)

    return waiting


class OperandBinder:
    """Makes functions that read and write an instruction's operands in a warp."""

    def __init__(self, machine):
        self.machine, self.kernel = machine, machine.kernel

    def reader(self, operand, ptx_type: str, *, wider: bool = False) -> Callable:
        """Returns read(warp): the operand's value in each of the 32 lanes, as unsigned integers.

        Args:
          operand: the operand to read.
          ptx_type: the operand's type, which gives the integers' width.
          wider: whether a register may be wider than the type; its upper bits are ignored (9.4.1).
        """
        width = bits(ptx_type)
        dtype = UNSIGNED[width]
        if isinstance(operand, Register):
            number, register_width = operand.number, bits(operand.type)
            if register_width == width:
                return lambda warp: warp.registers[number]
            if register_width > width and wider:
                return lambda warp: warp.registers[number].astype(dtype)
            raise UnsupportedError(
                f"there is a register of {register_width} bits where {ptx_type} is expected"
            )
        if isinstance(operand, Immediate):
            constant = np.full(WARP_SIZE, self._constant(operand, ptx_type), dtype)
            return lambda warp: constant
        if isinstance(operand, Negated):
            positive = self.reader(operand.register, "pred")
            return lambda warp: ~positive(warp)
        if isinstance(operand, Special):
            register_width = 64 if operand.name in WIDE_SPECIAL_REGISTERS else 32
            fits = register_width == width or (register_width > width and wider)
            if ptx_type in FLOATS or not fits:
                raise UnsupportedError(f"{operand.name} has {register_width} bits, not {ptx_type}")
            return self._special(operand.name, dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        raise UnsupportedError(f"{operand} cannot be read")

    def _constant(self, operand: Immediate, ptx_type: str) -> int:
        """Returns the bits of a constant, which must be representable in this type (4.5)."""
        value, width = operand.value, bits(ptx_type)
        if ptx_type not in ("f32", "b32") if operand.real else ptx_type in FLOATS:
            raise UnsupportedError(f"there is the constant {value:#x} where {ptx_type} is expected")
        if not -(1 << width - 1) <= value < 1 << width:
            raise UnsupportedError(f"the constant {value} is out of range for {ptx_type}")
        return bool(value) if width == 1 else value & ((1 << width) - 1)

    def writer(self, operand, ptx_type: str, *, wider: bool = False) -> Callable:
        """Returns write(warp, values, mask): sets a register in the lanes of the mask.

        The values have the type's width. If the register may be `wider` and is, they are
        sign-extended for a signed type and zero-extended for others (9.4.1).
        """
        if isinstance(operand, Sink):
            return lambda warp, values, mask: None
        if not isinstance(operand, Register):
            raise UnsupportedError(f"{operand} cannot be written")
        number, register_width, width = operand.number, bits(operand.type), bits(ptx_type)
        if register_width != width and not (wider and register_width > width):
            raise UnsupportedError(
                f"there is a register of {register_width} bits where {ptx_type} is expected"
            )
        dtypes = SIGNED if ptx_type[0] == "s" else UNSIGNED
        narrow, wide, raw = dtypes[width], dtypes.get(register_width), UNSIGNED[register_width]

        # The array of a register is replaced, never modified, so registers may share one.
        def write(warp, values, mask):
            values = np.ascontiguousarray(values)
            if register_width != width:
                values = values.view(narrow).astype(wide)
            values = values.view(raw)
            if mask is None:
                warp.registers[number] = values
            else:
                warp.registers[number] = np.where(mask, values, warp.registers[number])

        return write

    def immediate(self, operand) -> int:
        """Returns the value of an operand, which must be an integer constant."""
        if not isinstance(operand, Immediate) or operand.real:
            raise UnsupportedError(f"{operand} is not an integer constant")
        return operand.value

    def address_reader(self, operand: Address) -> Callable:
        """Returns read(warp): the address [base + offset] in each lane, as 64-bit integers."""
        if not isinstance(operand, Address):
            raise UnsupportedError(f"{operand} is not an address")
        base, offset = operand.base, np.uint64(operand.offset % 2**64)
        ptx_type = f"b{bits(base.type)}" if isinstance(base, Register) else "b64"
        read = self.reader(base, ptx_type)
        if ptx_type == "b32":
            short = np.uint32(operand.offset % 2**32)
            return lambda warp: (read(warp) + short).astype(np.uint64)
        return lambda warp: read(warp) + offset

    def _symbol(self, symbol: Symbol, dtype) -> Callable:
        if symbol.name in self.kernel.shared:
            offset = SHARED_BASE + self.kernel.shared[symbol.name] + symbol.offset
            return lambda warp: np.full(WARP_SIZE, warp.block.shared_base + offset, dtype)
        for parameter in self.kernel.parameters:
            if parameter.name == symbol.name:
                constant = np.full(WARP_SIZE, parameter.offset + symbol.offset, dtype)
                return lambda warp: constant
        raise UnsupportedError(f"no variable {symbol.name} is declared")

    def _special(self, name: str, dtype) -> Callable:
        machine = self.machine
        block_shape, grid, cluster = machine.block_shape, machine.grid, machine.cluster
        values = {
            "%laneid": lambda warp: LANE_IDS,
            "%cluster_ctarank": lambda warp: warp.block.rank,
            "%cluster_nctarank": lambda warp: len(warp.block.cluster.blocks),
            "%lanemask_lt": lambda warp: (1 << LANE_IDS) - 1,
            "%lanemask_eq": lambda warp: 1 << LANE_IDS,
            "%dynamic_smem_size": lambda warp: machine.shared_bytes - machine.kernel.shared_bytes,
            # The clocks count the warp's instructions, so they never go back.
            "%clock": lambda warp: warp.executed,
            "%clock64": lambda warp: warp.executed,
            "%globaltimer": lambda warp: warp.executed,
            "%globaltimer_lo": lambda warp: warp.executed,
            "%smid": lambda warp: 0,
        }
        for i, axis in enumerate("xyz"):
            # The strides are the numbers of threads and blocks between neighbours along this axis.
            thread_stride, rank_stride = int(np.prod(block_shape[:i])), int(np.prod(cluster[:i]))

            def thread(warp, stride=thread_stride, i=i):
                return warp.threads // stride % block_shape[i]

            def rank(warp, stride=rank_stride, i=i):
                return warp.block.rank // stride % cluster[i]

            values |= {
                f"%tid.{axis}": thread,
                f"%ntid.{axis}": lambda warp, i=i: block_shape[i],
                f"%ctaid.{axis}": lambda warp, i=i: warp.block.ctaid[i],
                f"%nctaid.{axis}": lambda warp, i=i: grid[i],
                f"%cluster_ctaid.{axis}": rank,
                f"%cluster_nctaid.{axis}": lambda warp, i=i: cluster[i],
                f"%clusterid.{axis}": lambda warp, i=i: warp.block.ctaid[i] // cluster[i],
                f"%nclusterid.{axis}": lambda warp, i=i: grid[i] // cluster[i],
            }
        if name not in values:
            raise UnsupportedError(f"the special register {name} is not known")
        value = values[name]
        return lambda warp: np.broadcast_to(np.asarray(value(warp), dtype), WARP_SIZE)


def split_shared_address(address: int) -> tuple[int, int]:
    """Splits a shared::cluster address into the block's rank and the offset in its memory."""
    return address >> BLOCK_SHIFT, address & ((1 << BLOCK_SHIFT) - 1)


def shared_cluster_address(rank: int, offset: int) -> int:
    """Returns the shared::cluster address of an offset in the shared memory of a block."""
    return (rank << BLOCK_SHIFT) + offset
