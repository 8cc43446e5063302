"""cp.async: copies from global to shared memory without TMA, and waits for groups of copies."""

import dataclasses

import numpy as np

from tests.ptx_emulator.data_movement import Access
from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.isa import FULL_MASK, Blocked, Task, active_lanes, defines
from tests.ptx_emulator.memory import POISON, UNIT_BYTES, WORD_BYTES
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.vector_clocks import MEMORY

COPY = "9.7.9.25 asynchronous copy"


@dataclasses.dataclass
class CopyGroups:
    """The cp.async copies of a warp, each as (task, number).

    In the ISA every thread has its own groups. In the emulator all lanes of a warp must commit and
    wait together, so that groups of the warp are enough.

    Attributes:
      issued: number of copies that the warp has issued.
      uncommitted: copies since the last commit.
      groups: copies of each committed group.
    """

    issued: int = 0
    uncommitted: list = dataclasses.field(default_factory=list)
    groups: list[list] = dataclasses.field(default_factory=list)


@defines(COPY, "cp.async{.ca,.cg}.shared{,::cta}.global")
def copy(binder, instruction):
    target, source, size, *copied_size = instruction.operands
    target, source, size = (
        binder.address_reader(target),
        binder.address_reader(source),
        binder.immediate(size),
    )
    if size not in ((16,) if "cg" in modifiers(instruction) else (4, 8, 16)):
        raise UnsupportedError(f"a copy of {size} bytes is not supported")
    if len(copied_size) > 1:
        raise UnsupportedError("a cache policy is not supported")
    # The operand src-size is the number of copied bytes; the remaining bytes become zero.
    read_copied_bytes = (
        binder.reader(copied_size[0], "u32") if copied_size else lambda warp: np.full(32, size)
    )

    def execute(warp, mask):
        description = f"the cp.async of line {instruction.line}"
        shared, memory = warp.block.shared, warp.machine.memory
        to = Access(warp, "shared::cta", target(warp), mask, size, description)
        copied = read_copied_bytes(warp)
        if (copied[to.active] > size).any():
            raise EmulatorError(f"{description} copies {copied.max()} of {size} bytes")
        sources = []
        for lane in map(int, to.active):
            address, count = int(source(warp)[lane]), int(copied[lane])
            if address % size:
                raise EmulatorError(f"{description}: its source is not aligned to {size} bytes")
            sources.append((memory.offset_of(address, count) if count else 0, count))
        warp.cp_async_groups.issued += 1
        number, engine = warp.cp_async_groups.issued, warp.machine.agents.copy_engine(warp.agent)
        index = to.index
        shared.record_write(engine, number, np.unique(index // WORD_BYTES), warp.clock, description)
        # cp.async belongs to the generic proxy (9.7.9.25.2).
        shared.record_generic_store(engine, number, np.unique(index // UNIT_BYTES), FULL_MASK)
        shared.bytes[index] = POISON

        def run():
            content = np.zeros((len(sources), size), np.uint8)
            for row, (begin, count) in zip(content, sources):
                row[:count] = memory.bytes[begin : begin + count]
            shared.bytes[index] = content

        task = Task("load", run, description, warp.block.cluster)
        warp.cp_async_groups.uncommitted.append((task, number))
        warp.machine.submit(task)

    return execute


def _check_all_lanes(mask, instruction) -> None:
    """Refuses execution by only some lanes, because the emulator counts groups for whole warps."""
    if mask is not None:
        raise UnsupportedError(
            f"{instruction.opcode} by {len(active_lanes(mask))} lanes is not supported"
        )


@defines(COPY, "cp.async.commit_group")
def commit_group(binder, instruction):
    def execute(warp, mask):
        _check_all_lanes(mask, instruction)
        warp.cp_async_groups.groups.append(warp.cp_async_groups.uncommitted)
        warp.cp_async_groups.uncommitted = []

    return execute


@defines(COPY, "cp.async.wait_group")
def wait_group(binder, instruction):
    remaining = binder.immediate(instruction.operands[0])

    def execute(warp, mask):
        _check_all_lanes(mask, instruction)
        groups = warp.cp_async_groups.groups
        waited = [copy for group in groups[: max(0, len(groups) - remaining)] for copy in group]

        def ready():
            return all(task.done for task, _ in waited)

        if not ready():
            return Blocked(ready, lambda: f"all groups of cp.async but the last {remaining}")
        del groups[: max(0, len(groups) - remaining)]
        engine = warp.machine.agents.copy_engine(warp.agent)
        known = warp.clock[MEMORY]
        known[engine] = max([known[engine], *(number for _, number in waited)])
        return None

    return execute
