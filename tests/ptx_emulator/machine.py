"""Clusters, blocks, warps, and the order in which they and their asynchronous work happen.

A warp is groups of lanes with a program counter each, of which the lowest that is not blocked goes
on. TMA, the products of tcgen05, its commits' signals and arrivals at other blocks' barriers become
tasks; tcgen05.ld and wgmma happen at their wait. The schedule says when tasks happen:

  eager    at once, where their order allows it
  late     when no warp can go on, the newest first
  random   at any time in between

A schedule is one of these words, or a dict of words by kind of task, and a seed for the order of
warps and of whatever is random. The kinds of tasks:

  load        TMA to shared memory
  multiply    tcgen05.mma and tcgen05.commit
  signal      of a commit to an mbarrier
  arrival     at an mbarrier of another block
  store       of a TMA store: the read of shared memory
  write       of a TMA store: the write of global memory
  cancel      which cluster clusterlaunchcontrol.try_cancel cancels
  collective  no task: whether tcgen05.dealloc and relinquish_alloc_permit of a pair wait for the
              peer (late), or not (eager)
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable

import numpy as np

from ptx_emulator import (
    barriers,
    copies,
    data,
    isa,
    launch_control,
    scalar,
    tensor,
    tensor_maps,
    tma,
)
from ptx_emulator.clocks import MEMORY, TENSOR, Agents, learn
from ptx_emulator.errors import DeadlockError, EmulatorError, UnsupportedError
from ptx_emulator.isa import LANES, WAIT_FOR_LOADS, Blocked, Task
from ptx_emulator.memory import (
    BLOCK_SHIFT,
    PARAMETER_WINDOW,
    GlobalMemory,
    SharedMemory,
    TensorMemory,
)
from ptx_emulator.parser import Kernel, bits

# Shared memory that a block may have; registers of a multiprocessor, how many of them a thread has
# at most, and in which multiples; instructions of a warp before another one's turn.
MOST_SHARED = 227 * 1024
REGISTERS, MOST_OF_A_THREAD, STEP_OF_REGISTERS = 65536, 256, 8
TURN = 400

# So many instructions without an event (a barrier, a task, a store) are a livelock.
PATIENCE = 2_000_000

# The modules whose instructions make the table.
INSTRUCTIONS = (barriers, copies, data, launch_control, scalar, tensor, tensor_maps, tma)

SCHEDULES = ("eager", "late", "random")
EAGER = dict.fromkeys(
    ("load", "multiply", "signal", "arrival", "store", "write", "cancel", "collective"), "eager"
)


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

    def __init__(self, block: "Block", number: int):
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
        self.copies = copies.Copies()
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
        return tensor_maps.found(self, address)

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


class Block:
    """A thread block: its memories, barriers and warps."""

    def __init__(self, cluster: "Cluster", rank: int, place: tuple[int, int, int]):
        machine = cluster.machine
        self.cluster, self.rank, self.place, self.machine = cluster, rank, place, machine
        self.shared_base = rank << BLOCK_SHIFT
        warps = machine.warps_of_a_block
        self.shared = SharedMemory(rank, machine.shared_bytes, machine.agents, warps)
        self.tensor = TensorMemory(rank, machine.agents, warps, machine.excused)
        # mbarriers by offset, named barriers by number.
        self.barriers: dict[int, object] = {}
        self.named: dict[int, object] = {}
        # Registers that setmaxnreg.dec has given back and no setmaxnreg.inc has taken.
        self.free_registers = 0
        self.warps = [Warp(self, number) for number in range(warps)]

    @property
    def alive(self) -> bool:
        """Whether it has warps that have not exited."""
        return any(warp.alive for warp in self.warps)


class Cluster:
    """The blocks of a cluster."""

    def __init__(self, machine: "Machine", number: int, first: tuple[int, int, int]):
        self.machine, self.number = machine, number
        # What arrived with the barrier's phases.
        self.clocks: dict[int, np.ndarray] = {}
        # How many tcgen05.mma were issued, and mbarriers made.
        self.multiplied = self.barriers_made = 0
        # Whether a clusterlaunchcontrol.try_cancel has failed.
        self.is_last = False
        shape = machine.cluster
        self.blocks = []
        for rank in range(math.prod(shape)):
            x, y, z = rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1])
            place = (first[0] + x, first[1] + y, first[2] + z)
            self.blocks.append(Block(self, rank, place))

    @property
    def warps(self):
        """The warps of all blocks."""
        return [warp for block in self.blocks for warp in block.warps]


class Machine:
    """A kernel with its launch: memory, and the clusters that run.

    Args:
      kernel: what runs.
      grid, block, cluster: dimensions; those of the kernel where it has them.
      dynamic_shared: bytes of the dynamic shared memory.
      memory: global memory in which arrays are already; an empty one without it.
      schedule, seed: see above.
      resident: clusters that run at the same time.
      allowed: names of the warnings that are none of the kernel's fault; others are errors.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int] | None = None,
        cluster: tuple[int, int, int] | None = None,
        *,
        dynamic_shared: int = 0,
        memory: GlobalMemory | None = None,
        schedule: str | dict[str, str] = "random",
        seed: int = 0,
        resident: int = 2,
        allowed: frozenset[str] = frozenset(),
    ):
        self.kernel, self.grid = kernel, tuple(grid)
        self.block_shape = tuple(block or kernel.block)
        self.cluster = tuple(cluster or kernel.cluster or (1, 1, 1))
        threads = math.prod(self.block_shape)
        if threads % LANES:
            raise UnsupportedError(f"a block of {threads} threads, no multiple of {LANES}")
        if any(g % c for g, c in zip(self.grid, self.cluster)):
            raise EmulatorError(f"grid {self.grid} is no multiple of clusters {self.cluster}")
        self.warps_of_a_block = threads // LANES
        self.agents = Agents(self.warps_of_a_block * math.prod(self.cluster))
        self.shared_bytes = kernel.shared_bytes + dynamic_shared
        if self.shared_bytes > MOST_SHARED:
            raise EmulatorError(
                f"{self.shared_bytes} bytes of shared memory, {MOST_SHARED} are there"
            )
        shared_out = REGISTERS // (threads * kernel.blocks_at_once)
        self.registers_at_launch = kernel.most_registers or min(
            shared_out // STEP_OF_REGISTERS * STEP_OF_REGISTERS, MOST_OF_A_THREAD
        )
        self.memory = GlobalMemory() if memory is None else memory
        last = kernel.parameters[-1] if kernel.parameters else None
        self.parameters = np.zeros(last.offset + last.size if last else 0, np.uint8)
        # Tensor maps by address: those of the host, and those that the kernel makes.
        self.tensor_maps: dict[int, object] = {}
        self.made_maps: dict[int, tensor_maps.Made] = {}
        words = [schedule] if isinstance(schedule, str) else schedule.values()
        if not set(words) <= set(SCHEDULES):
            raise ValueError(f"the schedule {schedule}, expected words among {SCHEDULES}")
        self.schedule, self.random, self.resident = schedule, random.Random(seed), resident
        self.allowed, self.warnings = allowed, {}
        self.tasks: list[Task] = []
        self.events = self.submitted = 0
        self.running: list[Cluster] = []
        # The first blocks of the clusters that have not started.
        self.waiting: list[tuple[int, int, int]] = []
        self.code = isa.build(self)

    def set_parameter(self, index: int, value: int | bytes) -> None:
        """Sets a kernel parameter: a number, or all bytes of an aggregate."""
        parameter = self.kernel.parameters[index]
        content = value if isinstance(value, bytes) else value.to_bytes(parameter.size, "little")
        if len(content) != parameter.size:
            raise EmulatorError(f"{parameter} gets {len(content)} bytes")
        end = parameter.offset + parameter.size
        self.parameters[parameter.offset : end] = np.frombuffer(content, np.uint8)

    def parameter_address(self, index: int) -> int:
        """The generic address of a kernel parameter."""
        return PARAMETER_WINDOW + self.kernel.parameters[index].offset

    def cancel(self) -> tuple[int, int, int] | None:
        """The first block of a cluster that has not started, and now never will."""
        if not self.waiting:
            return None
        any_of_them = self.policy("cancel") == "random"
        return self.waiting.pop(self.random.randrange(len(self.waiting)) if any_of_them else 0)

    def event(self) -> None:
        """Something happened for which somebody may wait."""
        self.events += 1

    def warn(self, name: str, message: str) -> None:
        """An error, unless warnings of this name are allowed; those are counted."""
        if not self.excused(name):
            raise EmulatorError(f"{name}: {message}")

    def excused(self, name: str) -> bool:
        """Whether warnings of this name are allowed; those are counted."""
        if name in self.allowed:
            self.warnings[name] = self.warnings.get(name, 0) + 1
        return name in self.allowed

    def policy(self, kind: str) -> str:
        """When tasks of this kind happen."""
        chosen = self.schedule if isinstance(self.schedule, str) else self.schedule.get(kind)
        return chosen or "random"

    def waits_for_peer(self) -> bool:
        """Whether a block waits at a collective instruction where it need not."""
        policy = self.policy("collective")
        return policy == "late" or (policy == "random" and self.random.random() < 0.5)

    def submit(self, task: Task) -> None:
        """Hands over asynchronous work."""
        self.submitted += 1
        task.issued = task.issued or self.submitted
        first = task.queue is None or not any(t.queue == task.queue for t in self.tasks)
        if self.policy(task.kind) == "eager" and first:
            task.run()
            task.done = True
            self.event()
        else:
            self.tasks.append(task)

    @np.errstate(all="ignore")
    def launch(self) -> None:
        """Runs the kernel to its end."""
        self.waiting = waiting = [
            (x, y, z)
            for z in range(0, self.grid[2], self.cluster[2])
            for y in range(0, self.grid[1], self.cluster[1])
            for x in range(0, self.grid[0], self.cluster[0])
        ]
        started, idle, events = 0, 0, -1
        while waiting or self.running:
            while waiting and len(self.running) < self.resident:
                self.running.append(Cluster(self, started, waiting.pop(0)))
                started += 1
            executed, tasks = self._round()
            ended = [cluster for cluster in self.running if not any(w.alive for w in cluster.warps)]
            for cluster in ended:
                self._finish(cluster)
                self.running.remove(cluster)
            if not (executed or tasks or ended):
                raise DeadlockError(self.report())
            idle = 0 if self.events != events or tasks or ended else idle + executed
            events = self.events
            if idle > PATIENCE:
                raise DeadlockError(
                    "instructions are executed, but nothing happens\n" + self.report()
                )

    def _round(self) -> tuple[int, int]:
        """One turn of every warp; the numbers of executed instructions and finished tasks."""
        warps = [warp for cluster in self.running for warp in cluster.warps if warp.alive]
        if not isinstance(self.schedule, str) or self.schedule == "random":
            self.random.shuffle(warps)
        executed = tasks = 0
        for warp in warps:
            try:
                executed += warp.run(TURN)
                tasks += self._some_tasks()
            except EmulatorError as error:
                error.add_note(f"at {warp}: {warp.where() or warp.instruction}")
                raise
        if not executed and not tasks:
            tasks += self._one_task()
        return executed, tasks

    def _ready(self) -> list[Task]:
        """The first task of each queue."""
        queues, found = set(), []
        for task in self.tasks:
            if task.queue is None or task.queue not in queues:
                found.append(task)
                queues.add(task.queue)
        return found

    def _perform(self, task: Task) -> None:
        self.tasks.remove(task)
        try:
            task.run()
        except EmulatorError as error:
            error.add_note(f"in {task.what}, of cluster {task.cluster.number}")
            raise
        task.done = True
        self.event()

    def perform(self, tasks) -> None:
        """These tasks happen now."""
        for task in list(tasks):
            self._perform(task)

    def _some_tasks(self) -> int:
        """Tasks that happen while warps run."""
        chance = {"eager": 1.0, "random": 0.15, "late": 0.0}
        chosen = [t for t in self._ready() if self.random.random() < chance[self.policy(t.kind)]]
        for task in chosen:
            self._perform(task)
        return len(chosen)

    def _one_task(self) -> int:
        """A task that happens because no warp can go on: a late one last."""
        ready = self._ready()
        if not ready:
            return 0
        soon = [task for task in ready if self.policy(task.kind) != "late"]
        newest = max(ready, key=lambda task: task.issued)
        self._perform(self.random.choice(soon) if soon else newest)
        return 1

    def _finish(self, cluster: Cluster) -> None:
        """What has to be so when a cluster has exited."""
        for block in cluster.blocks:
            if block.tensor.allocated:
                raise EmulatorError(
                    f"cluster {cluster.number}, block {block.rank} exits with tensor memory "
                    f"{block.tensor.allocated}"
                )
        while mine := [task for task in self._ready() if task.cluster is cluster]:
            message = f"cluster {cluster.number} exits before {mine[0].what}"
            if mine[0].kind == "signal":
                self.warn("signal that nobody waits for", message)
                self.tasks.remove(mine[0])
                continue
            if mine[0].kind == "store":
                self.warn("exit before a store's read", message)
            elif mine[0].kind != "write":
                raise EmulatorError(message)
            self._perform(mine[0])
        for block in cluster.blocks:
            for barrier in block.barriers.values():
                barrier.check_end()

    def report(self) -> str:
        """Who waits for what."""
        lines = ["nothing can go on"]
        for cluster in self.running:
            lines += [f"  {warp}: {warp.where()}" for warp in cluster.warps if warp.alive]
            for block in cluster.blocks:
                lines += [f"  {b}" for b in block.barriers.values() if b.in_progress]
        return "\n".join(lines)
