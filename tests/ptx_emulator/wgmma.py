"""The tensor cores of Hopper: wgmma."""

import functools
import re

import numpy as np

from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.isa import (
    HOPPER,
    LANE,
    WAIT_FOR_PRODUCTS,
    Blocked,
    instruction,
)
from ptx_emulator.matrix_operands import ELEMENTS, Matrix, accumulated, product
from ptx_emulator.parser import Vector
from ptx_emulator.scalar import modifiers
from ptx_emulator.vector_clocks import MEMORY

hopper = functools.partial(instruction, "9.7.15 wgmma", targets=HOPPER)


@hopper("wgmma.fence.sync.aligned")
def wgmma_fence(build, line):
    """Registers are ordered by the program here: only whether there is one is looked at."""

    def execute(warp, mask):
        warp.products.fenced = True

    return execute


@hopper("wgmma.commit_group.sync.aligned")
def wgmma_commit(build, line):
    def execute(warp, mask):
        warp.products.ends.append(warp.products.issued)

    return execute


@hopper("wgmma.wait_group.sync.aligned")
def wgmma_wait(build, line):
    left = build.immediate(line.operands[0])
    if left < 0:
        raise ValueError(f"all but {left} groups")

    def execute(warp, mask):
        ends = warp.products.ends
        upto = ends[-1 - left] if len(ends) > left else 0
        first = warp.number // 4 * 4
        warpgroup = warp.block.warps[first : first + 4]

        def issued():
            return all(other.products.issued >= upto for other in warpgroup)

        if not issued():
            return Blocked(issued, lambda: "wgmma of the other warps of the warpgroup")
        for other in warpgroup:
            _perform(other, upto)
        agent = warp.machine.agents.wgmma(warp.agent)
        warp.clock[MEMORY][agent] = max(warp.clock[MEMORY][agent], upto)
        return None

    return execute


def _perform(warp, upto: int) -> None:
    """Writes the accumulators of a warp's products up to this one."""
    products = warp.products
    while products.waiting and products.waiting[0][0] <= upto:
        products.waiting.pop(0)[1]()
    still = {number for _, _, numbers in products.waiting for number in numbers}
    warp.pending = {
        n: why for n, why in warp.pending.items() if why != WAIT_FOR_PRODUCTS or n in still
    }


# Integers have fewer widths (9.7.15.2).
WIDTHS = ",".join(f"n{n}" for n in range(8, 264, 8))
INTEGER_WIDTHS = ",".join(f"n{n}" for n in (8, 24, *range(16, 272, 16)))


@hopper(
    f"wgmma.mma_async.sync.aligned.m64{{{WIDTHS}}}k16.f32{{.bf16.bf16,.f16.f16}}",
    f"wgmma.mma_async.sync.aligned.m64{{{WIDTHS}}}k32.f32"
    "{.e4m3.e4m3,.e4m3.e5m2,.e5m2.e4m3,.e5m2.e5m2}",
    f"wgmma.mma_async.sync.aligned.m64{{{INTEGER_WIDTHS}}}k32.s32{{.s8.s8,.u8.u8,.s8.u8,.u8.s8}}",
)
def wgmma(build, line):
    *_, shape, result, a_type, b_type = modifiers(line)
    columns, depth = map(int, re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())
    target, a, b, accumulate, *flags = line.operands
    if not isinstance(target, Vector) or len(set(target.items)) != columns // 2:
        raise ValueError(f"{columns // 2} accumulators are expected")
    for item in target.items:
        build.read(item, "b32")
    if isinstance(a, Vector):
        raise UnsupportedError("the first operand in registers")
    types = ELEMENTS[a_type], ELEMENTS[b_type]
    # Signs for floats; elements of 16 bits may be transposed.
    allowed = [(1, -1)] * (2 * (result == "f32")) + [(0, 1)] * (2 * (depth == 16))
    flags = [build.immediate(flag) for flag in flags]
    if len(flags) != len(allowed) or any(f not in some for f, some in zip(flags, allowed)):
        raise ValueError(f"the signs and transpositions {flags}")
    signs, turned = flags[:2] or [1, 1], flags[2:] or [0, 0]
    descriptors = [build.read(operand, "b64") for operand in (a, b)]
    accumulate = build.read(accumulate, "pred")
    numbers = [item.number for item in target.items]
    # The fragment of an accumulator (9.7.15.5.1.1.3).
    i = np.arange(len(numbers))[:, None]
    rows, places = LANE // 4 + 8 * (i // 2 % 2), i // 4 * 8 + LANE % 4 * 2 + i % 2

    def execute(warp, mask):
        block, machine, quarter = warp.block, warp.machine, warp.number % 4
        if not warp.products.fenced:
            raise EmulatorError("wgmma.mma_async without a wgmma.fence before it")
        matrices = [
            Matrix.of_hopper(int(read(warp)[0]), transposed=bool(transposed))
            for read, transposed in zip(descriptors, turned)
        ]
        agent, products = machine.agents.wgmma(warp.agent), warp.products
        what = f"wgmma of line {line.line}"
        for matrix, side, dtype in zip(matrices, (64, columns), types):
            matrix.note(block, side, depth, dtype, agent, products.issued + 1, warp, None, what)
        adds = bool(accumulate(warp)[0])

        def run():
            a, b = (
                matrix.read(block, side, depth, dtype)
                for matrix, side, dtype in zip(matrices, (64, columns), types)
            )
            # A sum of nothing is +0, whatever the signs.
            values = signs[0] * signs[1] * product(a[16 * quarter : 16 * quarter + 16], b) + 0.0
            fragment = values[rows, places]
            for number, added in zip(numbers, fragment):
                old = warp.registers[number] if adds else None
                warp.registers[number] = accumulated(old, added, result)

        products.issued += 1
        products.waiting.append((products.issued, run, numbers))
        warp.pending |= dict.fromkeys(numbers, WAIT_FOR_PRODUCTS)
        machine.event()

    execute.completes = (WAIT_FOR_PRODUCTS,)
    return execute
