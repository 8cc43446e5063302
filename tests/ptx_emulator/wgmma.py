"""wgmma: the tensor cores of Hopper."""

import functools
import re

import numpy as np

from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.isa import HOPPER, LANE_IDS, WAIT_FOR_WGMMA, Blocked, defines
from tests.ptx_emulator.matrix_operands import ELEMENTS, SharedOperand, accumulate, exact_product
from tests.ptx_emulator.parser import Vector
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.vector_clocks import MEMORY

defines_wgmma = functools.partial(defines, "9.7.15 wgmma", targets=HOPPER)


@defines_wgmma("wgmma.fence.sync.aligned")
def wgmma_fence(binder, instruction):
    """Records the registers at a fence; registers are always in program order in the emulator.

    A missing first fence is an error, and so are operands in registers written after the fence.
    """

    def execute(warp, mask):
        warp.wgmma_groups.fenced_registers = list(warp.registers)

    return execute


@defines_wgmma("wgmma.commit_group.sync.aligned")
def wgmma_commit(binder, instruction):
    def execute(warp, mask):
        warp.wgmma_groups.group_ends.append(warp.wgmma_groups.issued)

    return execute


@defines_wgmma("wgmma.wait_group.sync.aligned")
def wgmma_wait(binder, instruction):
    pending = binder.immediate(instruction.operands[0])
    if pending < 0:
        raise ValueError(f"a wait for all groups but the last {pending} is not possible")

    def execute(warp, mask):
        group_ends = warp.wgmma_groups.group_ends
        last = group_ends[-1 - pending] if len(group_ends) > pending else 0
        first = warp.number // 4 * 4
        warpgroup = warp.block.warps[first : first + 4]

        def issued():
            return all(other.wgmma_groups.issued >= last for other in warpgroup)

        if not issued():
            return Blocked(issued, lambda: "wgmma of the other warps of the warpgroup")
        for other in warpgroup:
            _write_accumulators(other, last)
        agent = warp.machine.agents.wgmma(warp.agent)
        warp.clock[MEMORY][agent] = max(warp.clock[MEMORY][agent], last)
        return None

    return execute


def _write_accumulators(warp, last: int) -> None:
    """Writes the accumulators of a warp's products up to number `last`."""
    in_flight = warp.wgmma_groups.in_flight
    while in_flight and in_flight[0][0] <= last:
        in_flight.pop(0)[1]()
    unfinished = {number for _, _, numbers in in_flight for number in numbers}
    warp.pending = {
        number: wait
        for number, wait in warp.pending.items()
        if wait != WAIT_FOR_WGMMA or number in unfinished
    }


# The values of N; integer products have fewer (9.7.15.2).
WIDTHS = ",".join(f"n{n}" for n in range(8, 264, 8))
INTEGER_WIDTHS = ",".join(f"n{n}" for n in (8, 24, *range(16, 272, 16)))


def _rows_of_registers(registers: list[np.ndarray], dtype) -> np.ndarray:
    """Returns a warp's 16 rows of an operand in registers, 32 bytes each (9.7.15.5.1.1).

    Lane 4 r + c holds bytes 4 c to 4 c + 3 of each half of rows r and r + 8.
    """
    words = np.stack(registers).reshape(2, 2, 8, 4)
    rows = np.ascontiguousarray(words.transpose(1, 2, 0, 3))
    return rows.reshape(16, 8).view(dtype)


@defines_wgmma(
    f"wgmma.mma_async.sync.aligned.m64{{{WIDTHS}}}k16.f32{{.bf16.bf16,.f16.f16}}",
    f"wgmma.mma_async.sync.aligned.m64{{{WIDTHS}}}k32.f32"
    "{.e4m3.e4m3,.e4m3.e5m2,.e5m2.e4m3,.e5m2.e5m2}",
    f"wgmma.mma_async.sync.aligned.m64{{{INTEGER_WIDTHS}}}k32.s32{{.s8.s8,.u8.u8,.s8.u8,.u8.s8}}",
)
def wgmma(binder, instruction):
    *_, shape, result_type, a_type, b_type = modifiers(instruction)
    columns, depth = map(int, re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())
    target, a, b, scale_d, *flags = instruction.operands
    if not isinstance(target, Vector) or len(set(target.items)) != columns // 2:
        raise ValueError(f"a vector of {columns // 2} different accumulators is expected")
    for item in target.items:
        binder.reader(item, "b32")
    a_registers = a.items if isinstance(a, Vector) else ()
    if a_registers and len(set(a_registers)) != 4:
        raise ValueError("a vector of 4 different registers is expected for the first operand")
    for item in a_registers:
        binder.reader(item, "b32")
    dtypes = ELEMENTS[a_type], ELEMENTS[b_type]
    # Floats have imm-scale-a and -b (signs), and elements of 16 bits have imm-trans-a and -b. An
    # operand in registers cannot be transposed.
    turns = (1 if a_registers else 2) * (depth == 16)
    allowed = [(1, -1)] * (2 * (result_type == "f32")) + [(0, 1)] * turns
    flags = [binder.immediate(flag) for flag in flags]
    if len(flags) != len(allowed) or any(f not in some for f, some in zip(flags, allowed)):
        raise ValueError(
            f"the signs and transpositions are {flags}, expected one value from each of {allowed}"
        )
    signs, transposed = flags[:2] or [1, 1], flags[2:] or [0, 0]
    in_shared = ((b, columns, dtypes[1]),)
    if not a_registers:
        in_shared = ((a, 64, dtypes[0]), *in_shared)
    descriptors = [binder.reader(operand, "b64") for operand, _, _ in in_shared]
    sizes = [size for _, *size in in_shared]
    read_accumulates = binder.reader(scale_d, "pred")
    numbers = [item.number for item in target.items]
    a_numbers = [item.number for item in a_registers]
    # Row, among the warp's 16 rows, and column of each accumulator register of each lane
    # (9.7.15.5.1.1.3).
    i = np.arange(len(numbers))[:, None]
    fragment_rows = LANE_IDS // 4 + 8 * (i // 2 % 2)
    fragment_columns = i // 4 * 8 + LANE_IDS % 4 * 2 + i % 2

    def execute(warp, mask):
        block, machine, quarter = warp.block, warp.machine, warp.number % 4
        groups = warp.wgmma_groups
        if groups.fenced_registers is None:
            raise EmulatorError("there is a wgmma.mma_async without a wgmma.fence before it")
        if any(groups.fenced_registers[n] is not warp.registers[n] for n in a_numbers):
            raise EmulatorError(
                "an operand of wgmma.mma_async was written without a wgmma.fence behind it"
            )
        operands = [
            SharedOperand.from_wgmma_descriptor(int(read(warp)[0]), transposed=bool(is_transposed))
            for read, is_transposed in zip(descriptors, transposed[-len(descriptors) :])
        ]
        agent, number = machine.agents.wgmma(warp.agent), groups.issued + 1
        description = f"wgmma of line {instruction.line}"
        for operand, (rows, dtype) in zip(operands, sizes):
            operand.record_read(block, rows, depth, dtype, agent, number, warp, None, description)
        accumulates = bool(read_accumulates(warp)[0])

        def run():
            *a, b = (
                operand.read(block, rows, depth, dtype)
                for operand, (rows, dtype) in zip(operands, sizes)
            )
            if a_registers:
                own = _rows_of_registers([warp.registers[n] for n in a_numbers], dtypes[0])
            else:
                own = a[0][16 * quarter : 16 * quarter + 16]
            product = exact_product(own, b)
            # Adding 0.0 turns -0 into +0: an H200 returns +0 for a sum of zeros with any signs.
            fragment = (signs[0] * signs[1] * product + 0.0)[fragment_rows, fragment_columns]
            for register, added in zip(numbers, fragment):
                old = warp.registers[register] if accumulates else None
                warp.registers[register] = accumulate(old, added, result_type)

        groups.issued = number
        groups.in_flight.append((number, run, numbers + a_numbers))
        warp.pending |= dict.fromkeys(numbers + a_numbers, WAIT_FOR_WGMMA)
        machine.event()

    execute.may_use_pending = (WAIT_FOR_WGMMA,)  # type: ignore[attr-defined]
    return execute
