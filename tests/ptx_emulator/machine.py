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

import math
import random

import numpy as np

from ptx_emulator import (
    barriers,
    cluster_launch_control,
    cp_async,
    data_movement,
    isa,
    scalar,
    tcgen05,
    tensormap_replace,
    tma,
    warp_instructions,
    wgmma,
)
from ptx_emulator.errors import DeadlockError, EmulatorError, UnsupportedError
from ptx_emulator.isa import LANES, Task
from ptx_emulator.memory import (
    BLOCK_SHIFT,
    PARAMETER_WINDOW,
    GlobalMemory,
    SharedMemory,
)
from ptx_emulator.parser import Kernel
from ptx_emulator.tensor_memory import TensorMemory
from ptx_emulator.vector_clocks import Agents
from ptx_emulator.warp import Warp

# Shared memory that a block may have; registers of a multiprocessor, how many of them a thread has
# at most, and in which multiples; instructions of a warp before another one's turn.
MOST_SHARED = 227 * 1024
REGISTERS, MOST_OF_A_THREAD, STEP_OF_REGISTERS = 65536, 256, 8
TURN = 400

# So many instructions without an event (a barrier, a task, a store) are a livelock.
PATIENCE = 2_000_000

# The modules whose instructions make the table.
INSTRUCTIONS = (
    barriers,
    cluster_launch_control,
    cp_async,
    data_movement,
    scalar,
    tcgen05,
    tensormap_replace,
    tma,
    warp_instructions,
    wgmma,
)

SCHEDULES = ("eager", "late", "random")
EAGER = dict.fromkeys(
    ("load", "multiply", "signal", "arrival", "store", "write", "cancel", "collective"), "eager"
)


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
        self.made_maps: dict[int, tensormap_replace.Made] = {}
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
