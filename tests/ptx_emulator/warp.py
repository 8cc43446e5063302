"""A warp: groups of lanes with their program counters, registers, and operations in flight."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tests.ptx_emulator import cp_async, isa, tensormap_replace, tma
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.isa import WAIT_FOR_LOADS, WARP_SIZE, Blocked
from tests.ptx_emulator.parser import bits
from tests.ptx_emulator.vector_clocks import MEMORY, TENSOR, join


class LaneGroup:
    """Lanes of a warp that share a program counter; a mask of None stands for all lanes."""

    def __init__(self, pc: int, mask: np.ndarray | None):
        self.pc, self.mask = pc, mask
        self.blocked: Blocked | None = None


@functools.cache
def zero_register(width: int) -> np.ndarray:
    """Returns the value of a register of `width` bits before it is written."""
    if width > 64:
        return np.zeros((WARP_SIZE, 2), np.uint64)
    return np.zeros(WARP_SIZE, isa.UNSIGNED[width])


class Warp:
    """32 lanes with their registers, their vector clock and their operations in flight."""

    def __init__(self, block, number: int):
        self.block, self.number, self.machine = block, number, block.machine
        machine = self.machine
        self.agent = block.rank * machine.warps_per_block + number
        self.registers = [zero_register(bits(ptx_type)) for ptx_type in machine.kernel.registers]
        self.threads = np.arange(WARP_SIZE, dtype=np.uint32) + WARP_SIZE * number
        self.groups = [LaneGroup(0, None)]
        self.instruction = None
        self.executed = 0
        self.clock = machine.agents.clock()
        self.clock[MEMORY][self.agent] = 1
        # Two TENSOR rows: the order on which tcgen05 instructions may rely after the warp's next
        # fence::after_thread_sync, and the order that its last fence::before_thread_sync releases.
        self.tensor_acquired = np.zeros(machine.agents.count, np.int32)
        self.tensor_released = np.zeros(machine.agents.count, np.int32)
        # The warp's clock when it issued its last tcgen05.mma.
        self.clock_at_last_mma = machine.agents.clock()
        # Registers that an asynchronous load or product will write -> the instruction that waits
        # for this operation.
        self.pending: dict[int, str] = {}
        # For each tcgen05.ld in flight, a function that records its access again at the wait, and
        # one that then writes its registers. For each tcgen05.st in flight, a function that writes
        # tensor memory.
        self.tensor_loads: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.tensor_stores: list[Callable[[], None]] = []
        self.bulk_stores = BulkStores()
        self.bulk_stores_issued = 0
        self.wgmma_groups = WgmmaGroups()
        self.cp_async_groups = cp_async.CopyGroups()
        # The number of arrivals at the cluster's barrier, the number of waits for it, and whether
        # the last arrival was relaxed.
        self.cluster_arrivals = self.cluster_waits = 0
        self.cluster_relaxed = False
        # Number of barriers that have ordered each lane's earlier actions before all other lanes'
        # later actions.
        self.lane_syncs = 0
        # Number of registers per thread, which setmaxnreg changes.
        self.registers_per_thread = machine.registers_at_launch

    def __str__(self) -> str:
        block = self.block
        return f"cluster {block.cluster.number}, block {block.rank}, warp {self.number}"

    @property
    def alive(self) -> bool:
        """Returns whether some lanes of the warp have not exited."""
        return bool(self.groups)

    @property
    def time(self) -> int:
        """Returns the number of the warp's current action in its own clock."""
        return int(self.clock[MEMORY][self.agent])

    def tensor_map(self, address: int) -> tma.TensorMap:
        """Returns the tensor map at a generic address."""
        return tensormap_replace.find_tensor_map(self, address)

    def release(self, clock: np.ndarray) -> None:
        """Orders all past actions of the warp before any agent that acquires this clock."""
        join(clock[:TENSOR], self.clock[:TENSOR])
        self.release_tensor_memory(clock)
        self.clock[MEMORY][self.agent] += 1

    def acquire(self, clock: np.ndarray) -> None:
        """Orders the actions that were released into this clock before the warp's later actions."""
        join(self.clock[:TENSOR], clock[:TENSOR])
        join(self.tensor_acquired, clock[TENSOR])

    def release_tensor_memory(self, clock: np.ndarray) -> None:
        """Releases only the row of tensor memory.

        A relaxed arrival at a barrier does this: it orders execution, but no memory.
        """
        join(clock[TENSOR], self.tensor_released)
        join(clock[TENSOR], self.tensor_acquired)

    def sync_lanes(self) -> None:
        """Orders each lane's past actions before the later actions of the other lanes."""
        self.lane_syncs += 1

    def tcgen05_fence_before(self) -> None:
        """Executes tcgen05.fence::before_thread_sync."""
        join(self.tensor_released, self.clock[TENSOR])
        join(self.tensor_released, self.tensor_acquired)
        self.tensor_released[self.agent] = self.time

    def tcgen05_fence_after(self) -> None:
        """Executes tcgen05.fence::after_thread_sync."""
        join(self.clock[TENSOR], self.tensor_acquired)

    def run(self, max_instructions: int) -> int:
        """Executes up to `max_instructions` instructions, until the warp is blocked.

        Returns the number of executed instructions.
        """
        before = self.executed
        while self.groups and self.executed - before < max_instructions:
            group = self._next_group()
            if group is None:
                break
            self._run_group(group, before + max_instructions)
        return self.executed - before

    def _next_group(self) -> LaneGroup | None:
        """Returns the group with the lowest program counter that is not blocked."""
        if len(self.groups) > 1:
            self._merge()
        for group in sorted(self.groups, key=lambda group: group.pc):
            if group.blocked is None:
                return group
            if group.blocked.ready():
                group.pc += group.blocked.done
                group.blocked = None
                return group
        return None

    def _run_group(self, group: LaneGroup, end: int) -> None:
        """Runs a group until it is blocked, reaches another group, splits or exits.

        The run also ends when another group that can run has a lower program counter, and when the
        warp has executed `end` instructions.
        """
        code, others = self.machine.code, {g.pc for g in self.groups if g is not group}
        runnable = [g.pc for g in self.groups if g is not group and g.blocked is None]
        while self.executed < end:
            step = code[group.pc]
            self.instruction = step.instruction
            mask = self._active_mask(step.instruction, group.mask)
            if step.execute is None:
                self.executed += 1
                if self._jump(step.instruction, group, mask):
                    return
            elif mask is not None and not mask.any():
                self.executed += 1
                group.pc += 1
            else:
                if self.pending and not step.instruction.registers.isdisjoint(self.pending):
                    blocked = self._execute_with_pending_registers(step, mask)
                else:
                    blocked = step.execute(self, mask)
                if blocked is not None:
                    group.blocked = blocked
                    return
                self.executed += 1
                group.pc += 1
            if group.pc in others or (runnable and group.pc > min(runnable)):
                return

    def _active_mask(self, instruction, mask: np.ndarray | None) -> np.ndarray | None:
        """Returns the lanes of a mask that an instruction's predicate selects; None means all."""
        if instruction.predicate is None:
            return mask
        values = self.registers[instruction.predicate.number]
        values = ~values if instruction.negated else values
        values = values if mask is None else values & mask
        return None if values.all() else values.copy()

    def _execute_with_pending_registers(self, step, mask) -> Blocked | None:
        """Executes an instruction that names registers which are still to be written."""
        named = step.instruction.registers & self.pending.keys()
        waits = {self.pending[number] for number in named}
        if waits <= set(step.may_use_pending):
            return step.execute(self, mask)
        if waits == {WAIT_FOR_LOADS} and self._load_before_wait():
            return step.execute(self, mask)
        if (
            waits != {WAIT_FOR_LOADS}
            or not step.instruction.opcode.startswith("mov.")
            or mask is not None
        ):
            raise EmulatorError(
                f"a register is used before {', '.join(waits)}, on which it depends"
            )
        self.machine.warn(
            "moved before wait::ld",
            f"a register of tcgen05.ld is moved before {WAIT_FOR_LOADS}",
        )
        # The move is executed together with the load.
        self.tensor_loads.append((lambda: None, functools.partial(step.execute, self, None)))
        self.pending |= dict.fromkeys(step.instruction.registers, WAIT_FOR_LOADS)
        return None

    def _load_before_wait(self) -> bool:
        """Executes all tcgen05.ld in flight if their registers may be used before the wait.

        Returns whether the registers may be used. Tensor memory counts as being read until the
        wait.
        """
        if not self.machine.allows("used before wait::ld"):
            return False
        for _, load in self.tensor_loads:
            load()
        self.tensor_loads = [(record, lambda: None) for record, _ in self.tensor_loads]
        self.pending = {n: wait for n, wait in self.pending.items() if wait != WAIT_FOR_LOADS}
        return True

    def _jump(self, instruction, group: LaneGroup, mask: np.ndarray | None) -> bool:
        """Executes a branch or an exit of the lanes in `mask`; returns whether groups changed."""
        all_lanes = np.ones(WARP_SIZE, bool)
        lanes = all_lanes if group.mask is None else group.mask
        taken = lanes if mask is None else mask
        staying = lanes & ~taken
        name = instruction.opcode.split(".")[0]
        if name == "bra" and (not staying.any() or not taken.any()):
            group.pc = instruction.targets[0] if taken.any() else group.pc + 1
            return False
        self.groups.remove(group)
        if staying.any():
            self.groups.append(LaneGroup(group.pc + 1, staying))
        if name == "bra":
            self.groups.append(LaneGroup(instruction.targets[0], taken))
        elif name == "brx":
            index = self.registers[instruction.operands[0].number]
            for value in np.unique(index[taken]):
                if value >= len(instruction.targets):
                    raise EmulatorError(
                        f"branch {value} does not exist among {len(instruction.targets)} targets"
                    )
                target, branching = instruction.targets[value], taken & (index == value)
                self.groups.append(LaneGroup(target, branching))
        elif not self.groups:
            self._exit()
        self._merge()
        return True

    def _merge(self) -> None:
        """Merges groups with equal program counters."""
        groups_by_pc: dict[int, list[LaneGroup]] = {}
        for group in self.groups:
            groups_by_pc.setdefault(group.pc, []).append(group)
        if len(groups_by_pc) == len(self.groups):
            return
        self.groups = []
        for pc, groups in groups_by_pc.items():
            mask = np.logical_or.reduce([group.mask for group in groups])
            self.groups.append(
                groups[0] if len(groups) == 1 else LaneGroup(pc, None if mask.all() else mask)
            )

    def is_converged(self) -> bool:
        """Returns whether all lanes that have not exited have the same program counter."""
        return len(self.groups) == 1

    def is_part(self, mask: np.ndarray | None) -> bool:
        """Returns whether a mask lacks some lanes of the converged warp."""
        return mask is not None and not np.array_equal(mask, self.groups[0].mask)

    def _exit(self) -> None:
        """Ends the warp; checks that no write of registers or tensor memory is pending."""
        if self.pending:
            raise EmulatorError(f"the warp exits before {next(iter(self.pending.values()))}")
        if self.tensor_stores:
            raise EmulatorError("the warp exits before tcgen05.wait::st")
        self.machine.event()

    def describe_groups(self) -> str:
        """Describes the instruction of each group of lanes, and what the group waits for."""
        parts = []
        for group in self.groups:
            lanes = WARP_SIZE if group.mask is None else int(group.mask.sum())
            wait = f", waits for {group.blocked.reason()}" if group.blocked else ""
            parts.append(f"{lanes} lanes at {self.machine.code[group.pc].instruction}{wait}")
        return "; ".join(parts)


@dataclasses.dataclass
class BulkStores:
    """The TMA stores of each lane of a warp, since its last commit and in committed groups.

    A store is (the task that reads shared memory, the task that writes global memory, its number
    among the warp's stores).
    """

    uncommitted: dict[int, list] = dataclasses.field(default_factory=dict)
    committed: dict[int, list[list]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class WgmmaGroups:
    """The wgmma.mma_async instructions of a warp.

    Attributes:
      issued: number of products that the warp has issued.
      fenced_registers: values of the registers at the last wgmma.fence; None before the first.
      in_flight: (number, function that writes the registers, registers) of products not waited for.
      group_ends: number of issued products at the end of each committed group.
    """

    issued: int = 0
    fenced_registers: list | None = None
    in_flight: list = dataclasses.field(default_factory=list)
    group_ends: list[int] = dataclasses.field(default_factory=list)
