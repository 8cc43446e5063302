"""The launch of a kernel: its clusters and blocks, and the scheduling of warps and tasks.

The warps take turns. Within a warp, the group of lanes with the lowest program counter that is not
blocked runs. An asynchronous operation becomes a task, except for tcgen05.ld, tcgen05.st and wgmma,
which happen at their wait instruction. A schedule determines when tasks are executed:

  eager    as soon as the order of their queue allows it
  late     when no warp can continue, the newest first
  random   at any time in between

A schedule is one of these words, or a dict with a word for each kind of task ("random" for kinds
that are not in the dict). A seed determines the order of warps and all random choices. The kinds of
tasks are:

  load        a copy to shared memory: TMA, bulk copies and cp.async
  multiply    tcgen05.mma and tcgen05.commit
  signal      the arrival of a tcgen05.commit at an mbarrier
  arrival     an arrival at an mbarrier of another block
  store       the first half of a TMA store: the read of shared memory
  write       the second half of a TMA store: the write of global memory
  cancel      clusterlaunchcontrol.try_cancel: the cluster that it cancels, and its response
  collective  not a task: whether tcgen05.dealloc and tcgen05.relinquish_alloc_permit of a cluster
              of two wait for the peer (late) or not (eager)
"""

import math
import random
from typing import Any

import numpy as np

from tests.ptx_emulator import (
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
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, UnsupportedError
from tests.ptx_emulator.isa import WARP_SIZE, Task
from tests.ptx_emulator.memory import (
    BLOCK_SHIFT,
    PARAMETER_WINDOW,
    GlobalMemory,
    SharedMemory,
)
from tests.ptx_emulator.parser import Kernel
from tests.ptx_emulator.tensor_memory import TensorMemory
from tests.ptx_emulator.vector_clocks import Agents
from tests.ptx_emulator.warp import Warp

# Limits of compute capability 9.0 and 10.0 (CUDA C++ Programming Guide): bytes of shared memory per
# block, registers per multiprocessor, and registers per thread, which are allocated in units of 8,
# so that 255 registers take 256.
MAX_SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM, MAX_REGISTERS_PER_THREAD, REGISTER_GRANULARITY = 65536, 256, 8

# Number of instructions that a warp executes in a turn: enough to make the overhead of a turn
# small, and few enough for warps to interleave.
INSTRUCTIONS_PER_TURN = 400

# Number of instructions without an event (a barrier, a task, a store) after which the kernel counts
# as livelocked.
LIVELOCK_INSTRUCTIONS = 2_000_000

# The modules that register instructions.
INSTRUCTION_MODULES = (
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
    """A thread block with its memories, barriers and warps.

    Attributes:
      rank: %cluster_ctarank.
      ctaid: %ctaid.
    """

    def __init__(self, cluster: "Cluster", rank: int, ctaid: tuple[int, int, int]):
        machine = cluster.machine
        self.cluster, self.rank, self.ctaid, self.machine = cluster, rank, ctaid, machine
        self.shared_base = rank << BLOCK_SHIFT
        warps = machine.warps_per_block
        self.shared = SharedMemory(rank, machine.shared_bytes, machine.agents, warps)
        self.tensor_memory = TensorMemory(rank, machine.agents, warps, machine.allows)
        # mbarriers by offset, named barriers by number.
        self.mbarriers: dict[int, Any] = {}
        self.named_barriers: dict[int, Any] = {}
        # Registers that setmaxnreg.dec has released and no setmaxnreg.inc has taken yet.
        self.free_registers = 0
        self.warps = [Warp(self, number) for number in range(warps)]

    @property
    def alive(self) -> bool:
        """Returns whether some warps of the block have not exited."""
        return any(warp.alive for warp in self.warps)


class Cluster:
    """A cluster of thread blocks."""

    def __init__(self, machine: "Machine", number: int, first_ctaid: tuple[int, int, int]):
        self.machine, self.number = machine, number
        # For each phase of the cluster's barrier, the vector clock of its arrivals.
        self.barrier_clocks: dict[int, np.ndarray] = {}
        # Numbers of tcgen05.mma that were issued, and of mbarriers that were initialised.
        self.mma_issued = self.mbarriers_initialised = 0
        # Whether a clusterlaunchcontrol.try_cancel has failed.
        self.cancellation_failed = False
        shape = machine.cluster
        self.blocks = []
        for rank in range(math.prod(shape)):
            x, y, z = rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1])
            ctaid = (first_ctaid[0] + x, first_ctaid[1] + y, first_ctaid[2] + z)
            self.blocks.append(Block(self, rank, ctaid))

    @property
    def warps(self):
        """Lists the warps of all blocks."""
        return [warp for block in self.blocks for warp in block.warps]


class Machine:
    """A kernel with its launch parameters, its memory and its clusters.

    Args:
      kernel: the kernel to launch.
      grid: blocks in each dimension.
      block, cluster: threads and blocks in each dimension; by default as declared by the kernel.
      dynamic_shared: bytes of dynamic shared memory.
      memory: global memory with the kernel's arrays; by default an empty one.
      schedule, seed: schedule of asynchronous operations, as described at the top of this module.
      resident: number of clusters that run at the same time.
      allowed: names of the warnings that are allowed; all others are errors.
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
        if threads % WARP_SIZE:
            raise UnsupportedError(
                f"a block has {threads} threads, expected a multiple of {WARP_SIZE}"
            )
        if any(g % c for g, c in zip(self.grid, self.cluster)):
            raise EmulatorError(f"grid {self.grid} is not a multiple of clusters {self.cluster}")
        self.warps_per_block = threads // WARP_SIZE
        self.agents = Agents(self.warps_per_block * math.prod(self.cluster))
        self.shared_bytes = kernel.shared_bytes + dynamic_shared
        if self.shared_bytes > MAX_SHARED_BYTES:
            raise EmulatorError(
                f"a block has {self.shared_bytes} bytes of shared memory, expected at most "
                f"{MAX_SHARED_BYTES}"
            )
        available = REGISTERS_PER_SM // (threads * kernel.min_blocks_per_sm)
        self.registers_at_launch = kernel.max_registers or min(
            available // REGISTER_GRANULARITY * REGISTER_GRANULARITY, MAX_REGISTERS_PER_THREAD
        )
        self.memory = GlobalMemory() if memory is None else memory
        last = kernel.parameters[-1] if kernel.parameters else None
        self.parameters = np.zeros(last.offset + last.size if last else 0, np.uint8)
        # Tensor maps by address, encoded by the host or made by the kernel.
        self.tensor_maps: dict[int, Any] = {}
        self.device_tensor_maps: dict[int, tensormap_replace.DeviceTensorMap] = {}
        policies = [schedule] if isinstance(schedule, str) else schedule.values()
        if not set(policies) <= set(SCHEDULES):
            raise ValueError(f"schedule is {schedule}, expected words among {SCHEDULES}")
        self.schedule, self.random, self.resident = schedule, random.Random(seed), resident
        # Chooses the columns of tensor memory, so that it does not change the order of execution.
        self.placing = random.Random(f"{schedule} {seed}")
        self.allowed, self.warnings = allowed, {}
        self.tasks: list[Task] = []
        self.events = self.tasks_issued = 0
        self.running_clusters: list[Cluster] = []
        # For each cluster that has not started, %ctaid of its first block.
        self.pending_clusters: list[tuple[int, int, int]] = []
        self.code = isa.build_steps(self)

    def set_parameter(self, index: int, value: int | bytes) -> None:
        """Sets a kernel parameter to a number, or to all bytes of an aggregate."""
        parameter = self.kernel.parameters[index]
        content = value if isinstance(value, bytes) else value.to_bytes(parameter.size, "little")
        if len(content) != parameter.size:
            raise EmulatorError(f"{parameter} is set to {len(content)} bytes")
        end = parameter.offset + parameter.size
        self.parameters[parameter.offset : end] = np.frombuffer(content, np.uint8)

    def parameter_address(self, index: int) -> int:
        """Returns the generic address of a kernel parameter."""
        return PARAMETER_WINDOW + self.kernel.parameters[index].offset

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Cancels a cluster that has not started; returns %ctaid of its first block, or None.

        The next cluster to start is cancelled; with the random policy, any cluster.
        """
        pending = self.pending_clusters
        if not pending:
            return None
        is_random = self.policy("cancel") == "random"
        return pending.pop(self.random.randrange(len(pending)) if is_random else 0)

    def event(self) -> None:
        """Counts an event for which a warp may wait."""
        self.events += 1

    def warn(self, name: str, message: str) -> None:
        """Raises an error, or counts the warning if warnings of this name are allowed."""
        if not self.allows(name):
            raise EmulatorError(f"{name}: {message}")

    def allows(self, name: str) -> bool:
        """Returns whether warnings of this name are allowed, and counts one if they are."""
        if name in self.allowed:
            self.warnings[name] = self.warnings.get(name, 0) + 1
        return name in self.allowed

    def policy(self, kind: str) -> str:
        """Returns the policy for tasks of this kind: eager, late or random."""
        policy = self.schedule if isinstance(self.schedule, str) else self.schedule.get(kind)
        return policy or "random"

    def waits_for_peer(self) -> bool:
        """Returns whether a block waits for its peer where the ISA leaves it open."""
        policy = self.policy("collective")
        return policy == "late" or (policy == "random" and self.random.random() < 0.5)

    def place(self, starts: set[int]) -> int:
        """Chooses the first column of an allocation of tensor memory, if possible not 0.

        Args:
          starts: the possible first columns.
        """
        return self.placing.choice(sorted(starts - {0}) or [0])

    def submit(self, task: Task) -> None:
        """Executes a task now if the schedule says so, else keeps it for later."""
        self.tasks_issued += 1
        task.sequence = task.sequence or self.tasks_issued
        is_next = task.queue is None or not any(t.queue == task.queue for t in self.tasks)
        if self.policy(task.kind) == "eager" and is_next:
            task.run()
            task.done = True
            self.event()
        else:
            self.tasks.append(task)

    @np.errstate(all="ignore")
    def launch(self) -> None:
        """Runs the kernel until it ends."""
        self.pending_clusters = pending = [
            (x, y, z)
            for z in range(0, self.grid[2], self.cluster[2])
            for y in range(0, self.grid[1], self.cluster[1])
            for x in range(0, self.grid[0], self.cluster[0])
        ]
        running = self.running_clusters
        started, without_event, events = 0, 0, -1
        while pending or running:
            while pending and len(running) < self.resident:
                running.append(Cluster(self, started, pending.pop(0)))
                started += 1
            executed, tasks = self._round()
            ended = [cluster for cluster in running if not any(w.alive for w in cluster.warps)]
            for cluster in ended:
                self._finish(cluster)
                running.remove(cluster)
            if not (executed or tasks or ended):
                raise DeadlockError(self.report())
            is_event = self.events != events or tasks or ended
            without_event = 0 if is_event else without_event + executed
            events = self.events
            if without_event > LIVELOCK_INSTRUCTIONS:
                raise DeadlockError(
                    "livelock: instructions are executed, but no event occurs\n" + self.report()
                )

    def _round(self) -> tuple[int, int]:
        """Gives every warp one turn; returns the numbers of executed instructions and tasks."""
        warps = [warp for cluster in self.running_clusters for warp in cluster.warps if warp.alive]
        if not isinstance(self.schedule, str) or self.schedule == "random":
            self.random.shuffle(warps)
        executed = tasks = 0
        for warp in warps:
            try:
                executed += warp.run(INSTRUCTIONS_PER_TURN)
                tasks += self._perform_some()
            except EmulatorError as error:
                error.add_note(f"at {warp}: {warp.describe_groups() or warp.instruction}")
                raise
        if not executed and not tasks:
            tasks += self._perform_one()
        return executed, tasks

    def _next_tasks(self) -> list[Task]:
        """Returns the first task of each queue."""
        queues, next_tasks = set(), []
        for task in self.tasks:
            if task.queue is None or task.queue not in queues:
                next_tasks.append(task)
                queues.add(task.queue)
        return next_tasks

    def _perform(self, task: Task) -> None:
        self.tasks.remove(task)
        try:
            task.run()
        except EmulatorError as error:
            error.add_note(f"in {task.description}, of cluster {task.cluster.number}")
            raise
        task.done = True
        self.event()

    def perform(self, tasks) -> None:
        """Executes these tasks now."""
        for task in list(tasks):
            self._perform(task)

    def _perform_some(self) -> int:
        """Executes tasks between the turns of warps; returns their number."""
        if self.schedule == "late":  # All tasks wait until no warp can continue.
            return 0
        # With a probability of 0.15, a random task waits for seven turns of warps on average.
        probability = {"eager": 1.0, "random": 0.15, "late": 0.0}
        chosen = [
            task
            for task in self._next_tasks()
            if self.random.random() < probability[self.policy(task.kind)]
        ]
        for task in chosen:
            self._perform(task)
        return len(chosen)

    def _perform_one(self) -> int:
        """Executes one task if there is any; called when no warp can continue.

        Returns the number of executed tasks, 0 or 1. A late task is chosen only if there are no
        other tasks.
        """
        tasks = self._next_tasks()
        if not tasks:
            return 0
        not_late = [task for task in tasks if self.policy(task.kind) != "late"]
        newest = max(tasks, key=lambda task: task.sequence)
        self._perform(self.random.choice(not_late) if not_late else newest)
        return 1

    def _finish(self, cluster: Cluster) -> None:
        """Checks that a cluster's operations are complete when it exits, and completes the rest."""
        for block in cluster.blocks:
            if block.tensor_memory.allocated:
                raise EmulatorError(
                    f"cluster {cluster.number}, block {block.rank} exits with tensor memory "
                    f"{block.tensor_memory.allocated} still allocated"
                )
        while tasks := [task for task in self._next_tasks() if task.cluster is cluster]:
            task = tasks[0]
            message = f"cluster {cluster.number} exits before {task.description}"
            if task.kind == "signal":
                self.warn("signal that nobody waits for", message)
                self.tasks.remove(task)
                continue
            if task.kind == "store":
                self.warn("exit before a store's read", message)
            elif task.kind != "write":
                raise EmulatorError(message)
            self._perform(task)
        for block in cluster.blocks:
            for barrier in block.mbarriers.values():
                barrier.check_end()

    def report(self) -> str:
        """Describes all warps, with what they wait for, and all mbarriers in progress."""
        lines = ["deadlock: no warp can continue"]
        for cluster in self.running_clusters:
            lines += [f"  {warp}: {warp.describe_groups()}" for warp in cluster.warps if warp.alive]
            for block in cluster.blocks:
                lines += [f"  {b}" for b in block.mbarriers.values() if b.in_progress]
        return "\n".join(lines)
