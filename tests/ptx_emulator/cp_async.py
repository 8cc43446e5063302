"""cp.async: copies from global to shared memory that a warp waits for in groups."""

import dataclasses

import numpy as np

from ptx_emulator.data_movement import Access
from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.isa import ALL_LANES, Blocked, Task, instruction, lanes
from ptx_emulator.memory import POISON, UNIT, WORD
from ptx_emulator.scalar import modifiers
from ptx_emulator.vector_clocks import MEMORY

COPY = "9.7.9.25 asynchronous copy"


@dataclasses.dataclass
class Copies:
    """The cp.async of a warp: (task, number) of those issued since the last group, and of groups.

    Groups belong to threads; here all threads of a warp have to commit and to wait together.
    """

    issued: int = 0
    open: list = dataclasses.field(default_factory=list)
    groups: list[list] = dataclasses.field(default_factory=list)


@instruction(COPY, "cp.async{.ca,.cg}.shared{,::cta}.global")
def copy(build, line):
    target, source, size, *given = line.operands
    target, source, size = build.address(target), build.address(source), build.immediate(size)
    if size not in ((16,) if "cg" in modifiers(line) else (4, 8, 16)):
        raise UnsupportedError(f"a copy of {size} bytes")
    if len(given) > 1:
        raise UnsupportedError("a cache policy")
    # How many bytes are copied; the rest is filled with zeros.
    read_given = build.read(given[0], "u32") if given else lambda warp: np.full(32, size)

    def execute(warp, mask):
        what = f"the cp.async of line {line.line}"
        shared, memory = warp.block.shared, warp.machine.memory
        to = Access(warp, "shared::cta", target(warp), mask, size, what)
        copied = read_given(warp)
        if (copied[to.active] > size).any():
            raise EmulatorError(f"{what} copies {copied.max()} of {size} bytes")
        begins = []
        for lane in map(int, to.active):
            if int(source(warp)[lane]) % size:
                raise EmulatorError(f"{what}: its source is not aligned to {size} bytes")
            bytes_of_it = int(copied[lane])
            begin = memory.offset(int(source(warp)[lane]), bytes_of_it) if bytes_of_it else 0
            begins.append((begin, bytes_of_it))
        warp.copies.issued += 1
        number, engine = warp.copies.issued, warp.machine.agents.copy_engine(warp.agent)
        index = to.index
        shared.writes(engine, number, np.unique(index // WORD), warp.clock, what)
        # It is of the generic proxy (9.7.9.25.2).
        shared.stored(engine, number, np.unique(index // UNIT), ALL_LANES)
        shared.bytes[index] = POISON

        def run():
            found = np.zeros((len(begins), size), np.uint8)
            for row, (begin, count) in zip(found, begins):
                row[:count] = memory.bytes[begin : begin + count]
            shared.bytes[index] = found

        task = Task("load", run, what, warp.block.cluster)
        warp.copies.open.append((task, number))
        warp.machine.submit(task)

    return execute


def _together(mask, line) -> None:
    if mask is not None:
        raise UnsupportedError(f"{line.opcode} by {len(lanes(mask))} lanes")


@instruction(COPY, "cp.async.commit_group")
def commit_group(build, line):
    def execute(warp, mask):
        _together(mask, line)
        warp.copies.groups.append(warp.copies.open)
        warp.copies.open = []

    return execute


@instruction(COPY, "cp.async.wait_group")
def wait_group(build, line):
    left = build.immediate(line.operands[0])

    def execute(warp, mask):
        _together(mask, line)
        groups = warp.copies.groups
        waited = [copy for group in groups[: max(0, len(groups) - left)] for copy in group]

        def ready():
            return all(task.done for task, _ in waited)

        if not ready():
            return Blocked(ready, lambda: f"cp.async, all but {left} groups")
        del groups[: max(0, len(groups) - left)]
        engine = warp.machine.agents.copy_engine(warp.agent)
        known = warp.clock[MEMORY]
        known[engine] = max([known[engine], *(number for _, number in waited)])
        return None

    return execute
