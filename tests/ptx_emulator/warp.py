"""Warps: groups of lanes with a program counter each, registers, and what is in flight."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ptx_emulator import (
    cp_async,
    isa,
    tensormap_replace,
    tma,
)
from ptx_emulator.errors import EmulatorError
from ptx_emulator.isa import LANES, WAIT_FOR_LOADS, Blocked
from ptx_emulator.parser import bits
from ptx_emulator.vector_clocks import MEMORY, TENSOR, learn


class Group:
    """Lanes of a warp with one program counter; a mask of None is all of them."""

    def __init__(self, at: int, mask: np.ndarray | None):
        self.at, self.mask = at, mask
        self.blocked: Blocked | None = None


@functools.cache
def zeros(width: int) -> np.ndarray:
    """A register of so many bits, before anything is written to it."""
    return np.zeros((LANES, 2), np.uint64) if width > 64 else np.zeros(LANES, isa.UNSIGNED[width])


class Warp:
    """32 lanes: their registers, what they know, and what they have in flight."""

    def __init__(self, block, number: int):
        self.block, self.number, self.machine = block, number, block.machine
        machine = self.machine
        self.agent = block.rank * machine.warps_of_a_block + number
        self.registers = [zeros(bits(kind)) for kind in machine.kernel.registers]
        self.threads = np.arange(LANES, dtype=np.uint32) + LANES * number
        self.groups = [Group(0, None)]
        self.instruction = None
        self.executed = 0
        self.clock = machine.agents.clock()
        self.clock[MEMORY][self.agent] = 1
        # What tcgen05 may rely on after the next fence::after_thread_sync, and what the last
        # fence::before_thread_sync lets others rely on.
        self.tensor_seen = np.zeros(machine.agents.count, np.int32)
        self.tensor_released = np.zeros(machine.agents.count, np.int32)
        # What it knew when it issued its last tcgen05.mma.
        self.multiplied_knowing = machine.agents.clock()
        # Registers that an asynchronous load or product will write, and what has to be waited for.
        self.pending: dict[int, str] = {}
        # What tcgen05.ld reads, noted again at its wait, and what writes the registers then.
        self.tensor_loads: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.tensor_stores: list[Callable[[], None]] = []
        self.stores = _StoreGroups()
        self.stores_issued = 0
        self.products = _Products()
        self.copies = cp_async.Copies()
        # Arrivals at the cluster's barrier, how many of them were waited for, and whether the last
        # one was relaxed.
        self.cluster_arrivals = self.cluster_waits = 0
        self.cluster_relaxed = False
        # How often a barrier has ordered what one lane did before what another one does.
        self.meetings = 0
        # Registers of a thread (setmaxnreg).
        self.registers_held = machine.registers_at_launch

    def __str__(self) -> str:
        block = self.block
        return f"cluster {block.cluster.number}, block {block.rank}, warp {self.number}"

    @property
    def alive(self) -> bool:
        """Whether it has lanes that have not exited."""
        return bool(self.groups)

    @property
    def time(self) -> int:
        """The number of what it does now."""
        return int(self.clock[MEMORY][self.agent])

    def tensor_map(self, address: int) -> tma.TensorMap:
        """The tensor map at a generic address."""
        return tensormap_replace.found(self, address)

    def release(self, clock: np.ndarray) -> None:
        """Lets those who acquire this clock know of what was done so far."""
        learn(clock[:TENSOR], self.clock[:TENSOR])
        self.release_tensor_memory(clock)
        self.clock[MEMORY][self.agent] += 1

    def acquire(self, clock: np.ndarray) -> None:
        """Knows of what was released into this clock."""
        learn(self.clock[:TENSOR], clock[:TENSOR])
        learn(self.tensor_seen, clock[TENSOR])

    def release_tensor_memory(self, clock: np.ndarray) -> None:
        """Lets those who acquire this clock know what was done to tensor memory, and no more.

        For an arrival that orders execution, but no other memory.
        """
        learn(clock[TENSOR], self.tensor_released)
        learn(clock[TENSOR], self.tensor_seen)

    def meet(self) -> None:
        """All lanes have passed a barrier: each knows what the others did."""
        self.meetings += 1

    def fence_before(self) -> None:
        """tcgen05.fence::before_thread_sync."""
        learn(self.tensor_released, self.clock[TENSOR])
        learn(self.tensor_released, self.tensor_seen)
        self.tensor_released[self.agent] = self.time

    def fence_after(self) -> None:
        """tcgen05.fence::after_thread_sync."""
        learn(self.clock[TENSOR], self.tensor_seen)

    def run(self, turn: int) -> int:
        """Goes on until it is blocked or its turn is over; how many instructions it executed."""
        before = self.executed
        while self.groups and self.executed - before < turn:
            group = self._next_group()
            if group is None:
                break
            self._run_group(group, before + turn)
        return self.executed - before

    def _next_group(self) -> Group | None:
        if len(self.groups) > 1:
            self._merge()
        for group in sorted(self.groups, key=lambda group: group.at):
            if group.blocked is None:
                return group
            if group.blocked.ready():
                group.at += group.blocked.done
                group.blocked = None
                return group
        return None

    def _run_group(self, group: Group, end: int) -> None:
        """Runs these lanes until they are blocked, meet others, part, exit, or the turn is over."""
        code, others = self.machine.code, {g.at for g in self.groups if g is not group}
        free = [g.at for g in self.groups if g is not group and g.blocked is None]
        while self.executed < end:
            step = code[group.at]
            self.instruction = step.instruction
            mask = self._active(step.instruction, group.mask)
            if step.execute is None:
                self.executed += 1
                if self._jump(step.instruction, group, mask):
                    return
            elif mask is not None and not mask.any():
                self.executed += 1
                group.at += 1
            else:
                if self.pending and not step.instruction.registers.isdisjoint(self.pending):
                    blocked = self._with_pending_registers(step, mask)
                else:
                    blocked = step.execute(self, mask)
                if blocked is not None:
                    group.blocked = blocked
                    return
                self.executed += 1
                group.at += 1
            if group.at in others or (free and group.at > min(free)):
                return

    def _active(self, instruction, mask: np.ndarray | None) -> np.ndarray | None:
        """The lanes that execute an instruction; None is all of them."""
        if instruction.predicate is None:
            return mask
        values = self.registers[instruction.predicate.number]
        values = ~values if instruction.negated else values
        values = values if mask is None else values & mask
        return None if values.all() else values.copy()

    def _with_pending_registers(self, step, mask) -> Blocked | None:
        """Executes what names registers that something asynchronous will still write."""
        named = step.instruction.registers & self.pending.keys()
        reasons = {self.pending[number] for number in named}
        if reasons <= set(step.completes):
            return step.execute(self, mask)
        if reasons == {WAIT_FOR_LOADS} and self._excused_use(step):
            return step.execute(self, mask)
        if (
            reasons != {WAIT_FOR_LOADS}
            or not step.instruction.opcode.startswith("mov.")
            or mask is not None
        ):
            raise EmulatorError(f"a register is used before {', '.join(reasons)}, which it needs")
        self.machine.warn(
            "moved before wait::ld",
            f"a register of tcgen05.ld is moved before {WAIT_FOR_LOADS}",
        )
        # The move happens with the load.
        self.tensor_loads.append((lambda: None, functools.partial(step.execute, self, None)))
        self.pending |= dict.fromkeys(step.instruction.registers, WAIT_FOR_LOADS)
        return None

    def _excused_use(self, step) -> bool:
        """Whether what tcgen05.ld loaded may be used before the wait: then the loads happen now.

        Tensor memory is still being read until the wait.
        """
        if not self.machine.excused("used before wait::ld"):
            return False
        for _, load in self.tensor_loads:
            load()
        self.tensor_loads = [(note, lambda: None) for note, _ in self.tensor_loads]
        self.pending = {n: why for n, why in self.pending.items() if why != WAIT_FOR_LOADS}
        return True

    def _jump(self, instruction, group: Group, mask: np.ndarray | None) -> bool:
        """A branch or an exit, by the lanes of `mask`. Whether the groups have changed."""
        every = np.ones(LANES, bool)
        whole = every if group.mask is None else group.mask
        taken = whole if mask is None else mask
        staying = whole & ~taken
        name = instruction.opcode.split(".")[0]
        if name == "bra" and (not staying.any() or not taken.any()):
            group.at = instruction.targets[0] if taken.any() else group.at + 1
            return False
        self.groups.remove(group)
        if staying.any():
            self.groups.append(Group(group.at + 1, staying))
        if name == "bra":
            self.groups.append(Group(instruction.targets[0], taken))
        elif name == "brx":
            index = self.registers[instruction.operands[0].number]
            for value in np.unique(index[taken]):
                if value >= len(instruction.targets):
                    raise EmulatorError(f"branch {value} of {len(instruction.targets)} targets")
                lanes = taken & (index == value)
                self.groups.append(Group(instruction.targets[value], lanes))
        elif not self.groups:
            self._exit()
        self._merge()
        return True

    def _merge(self) -> None:
        """Groups that meet at one instruction are one group."""
        by_place: dict[int, list[Group]] = {}
        for group in self.groups:
            by_place.setdefault(group.at, []).append(group)
        if len(by_place) == len(self.groups):
            return
        self.groups = []
        for at, groups in by_place.items():
            mask = np.logical_or.reduce([group.mask for group in groups])
            self.groups.append(
                groups[0] if len(groups) == 1 else Group(at, None if mask.all() else mask)
            )

    def together(self) -> bool:
        """Whether all lanes that have not exited are at one place."""
        return len(self.groups) == 1

    def parted(self, mask: np.ndarray | None) -> bool:
        """Whether these are not all lanes of the one group that there is."""
        return mask is not None and not np.array_equal(mask, self.groups[0].mask)

    def _exit(self) -> None:
        if self.pending:
            raise EmulatorError(f"exits before {next(iter(self.pending.values()))}")
        if self.tensor_stores:
            raise EmulatorError("exits before tcgen05.wait::st")
        self.machine.event()

    def where(self) -> str:
        """Place and reason of waiting of all groups of lanes."""
        parts = []
        for group in self.groups:
            lanes = LANES if group.mask is None else int(group.mask.sum())
            waits = f", waits for {group.blocked.reason()}" if group.blocked else ""
            parts.append(f"{lanes} lanes at {self.machine.code[group.at].instruction}{waits}")
        return "; ".join(parts)


@dataclasses.dataclass
class _StoreGroups:
    """TMA stores of a warp's lanes: those issued, and the groups that were committed.

    A store is (its read of shared memory, its write, its number among the warp's stores).
    """

    open: dict[int, list] = dataclasses.field(default_factory=dict)
    committed: dict[int, list[list]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Products:
    """wgmma of a warp: (number, what writes the registers) issued, and ends of groups.

    `fenced` says whether a wgmma.fence came before the first.
    """

    issued: int = 0
    fenced: bool = False
    waiting: list = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
