"""mbarriers, the named barriers of a block, the barrier of a cluster, and fences."""

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.isa import (
    WARP_SIZE,
    Blocked,
    Task,
    active_lanes,
    defines,
    lane_bitmask,
    split_shared_address,
)
from tests.ptx_emulator.memory import SHARED_BASE, SHARED_WINDOW, words_in_range
from tests.ptx_emulator.parser import Sink
from tests.ptx_emulator.scalar import modifiers
from tests.ptx_emulator.vector_clocks import MEMORY, join

SYNC = "9.7.13 synchronisation"

# Size and alignment of an mbarrier (9.7.13.15.1).
MBARRIER_BYTES = 8


class Mbarrier:
    """An mbarrier (9.7.13.15): its pending arrivals, tx-count and phase, and its vector clocks."""

    # The largest count of arrivals or bytes (9.7.13.15.1).
    MAX_COUNT = 2**20 - 1

    def __init__(self, block, offset: int, count: int, warp):
        if not 1 <= count <= self.MAX_COUNT:
            raise EmulatorError(
                f"mbarrier.init has a count of {count}, expected 1 to {self.MAX_COUNT}"
            )
        cluster, machine = block.cluster, block.machine
        self.block, self.offset, self.count = block, offset, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.agent = machine.agents.mbarrier(cluster.mbarriers_initialised)
        cluster.mbarriers_initialised += 1
        self.arriving_clock = machine.agents.clock()
        # `arriving_clock` is released by all arrivals so far, `completed_clock` only by those of
        # completed phases.
        self.completed_clock = machine.agents.clock()
        # The last phase to which TMA or the tensor cores have contributed.
        self.last_async_phase = 0
        self.init_agent, self.init_time = warp.agent, warp.time
        # The time of the initialising warp's fence after which the asynchronous proxy and other
        # blocks may use the mbarrier; whether it was a fence.mbarrier_init; and the phase of the
        # cluster's barrier in which the warp made a relaxed arrival after the fence.
        self.fence_time: int | None = None
        self.fenced_for_cluster = False
        self.announced_at: int | None = None

    def __str__(self) -> str:
        return (
            f"mbarrier at {self.block.shared.describe(self.offset)}: phase {self.phase}, "
            f"{self.pending} of {self.count} arrivals and {self.bytes} bytes are missing"
        )

    @property
    def in_progress(self) -> bool:
        """Returns whether some arrivals or bytes of the current phase have come."""
        return self.pending != self.count or self.bytes != 0

    def arrive(self, count: int = 1, *, may_complete: bool = True) -> None:
        """Counts `count` arrivals. Those of .noComplete may not complete the phase."""
        self._check_alive()
        if not 1 <= count <= self.MAX_COUNT:
            raise EmulatorError(f"an arrival counts as {count} arrivals: {self}")
        if count > self.pending:
            raise EmulatorError(
                f"there are {count} arrivals at a barrier that does not expect them: {self}"
            )
        self.pending -= count
        if not may_complete and self.pending == 0:
            raise EmulatorError(f"an arrival that may not complete the phase completes it: {self}")
        self._advance()

    def signal(self) -> None:
        """Counts an arrival of a tcgen05.commit."""
        self.last_async_phase = self.phase + 1
        self.arrive()

    def expect_tx(self, count: int) -> None:
        """Expects `count` more bytes in the current phase."""
        self._check_alive()
        self.bytes += count
        if self.bytes > self.MAX_COUNT:
            raise EmulatorError(f"there are more bytes than an mbarrier can count: {self}")

    def complete_tx(self, count: int) -> None:
        """Counts `count` bytes, which may arrive before they are expected."""
        self._check_alive()
        self.last_async_phase = self.phase + 1
        self.bytes -= count
        if self.bytes < -self.MAX_COUNT:
            raise EmulatorError(f"there are more bytes than an mbarrier can count: {self}")
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.arriving_clock[MEMORY][self.agent] = self.phase
            self.completed_clock = self.arriving_clock.copy()
            self.block.machine.event()

    def _check_alive(self) -> None:
        if not self.block.alive:
            raise EmulatorError(f"there is a signal to a block that has exited: {self}")

    def check_use(self, warp, *, by_async_proxy: bool) -> None:
        """Checks that a use is ordered after mbarrier.init, and after the fence that it needs.

        The asynchronous proxy and other blocks see the initialisation only after a fence.
        """
        known = warp.clock[MEMORY]
        announced = (
            self.announced_at is not None
            and known[warp.machine.agents.cluster_barrier] >= self.announced_at
        )
        if (
            known[self.init_agent] < self.init_time
            and self.init_agent != warp.agent
            and not announced
        ):
            raise RaceError(
                f"{warp} uses an mbarrier, and nothing orders its mbarrier.init before: {self}"
            )
        fenced = announced or (
            self.fence_time is not None and known[self.init_agent] >= self.fence_time
        )
        if (by_async_proxy or self.block is not warp.block) and not fenced:
            user = "the asynchronous proxy" if by_async_proxy else "another block"
            warp.machine.warn(
                "unfenced mbarrier.init",
                f"{user} uses an mbarrier, and no fence.mbarrier_init or fence.proxy.async "
                f"followed its mbarrier.init: {self}",
            )

    def check_end(self) -> None:
        """Checks the mbarrier when its cluster exits."""
        if self.bytes:
            raise EmulatorError(f"the cluster exits while bytes are missing: {self}")
        known = max(warp.clock[MEMORY][self.agent] for warp in self.block.warps)
        if known < self.last_async_phase <= self.phase:
            self.block.machine.warn(
                "signal that nobody waits for",
                "the cluster exits, and no warp of the block has waited for the last phase that "
                f"TMA or the tensor cores signalled: {self}",
            )


def barrier_at(warp, address: int, *, cluster: bool) -> Mbarrier:
    """Returns the mbarrier at a generic or shared::cluster address.

    Unless `cluster` is set, it has to be in the warp's own block.
    """
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    rank, offset = split_shared_address(address)
    blocks = warp.block.cluster.blocks
    if not cluster and rank != warp.block.rank:
        raise EmulatorError(
            f"the mbarrier has an address in block {rank}, expected the warp's own block"
        )
    if rank >= len(blocks):
        raise EmulatorError(f"the cluster has no block {rank}")
    if offset not in blocks[rank].mbarriers:
        raise EmulatorError(f"there is no mbarrier at {blocks[rank].shared.describe(offset)}")
    return blocks[rank].mbarriers[offset]


@defines(SYNC, "mbarrier.init.shared{,::cta}.b64")
def mbarrier_init(binder, instruction):
    address, count = (
        binder.address_reader(instruction.operands[0]),
        binder.reader(instruction.operands[1], "u32"),
    )

    def execute(warp, mask):
        for lane in active_lanes(mask):
            rank, offset = split_shared_address(int(address(warp)[lane]))
            if rank != warp.block.rank or offset % MBARRIER_BYTES:
                place = f"block {rank}, offset {offset - SHARED_BASE}"
                raise EmulatorError(
                    f"mbarrier.init at {place} is not 8-byte aligned in the warp's own block"
                )
            shared, words = warp.block.shared, words_in_range(offset, MBARRIER_BYTES)
            shared.check_bounds(offset, MBARRIER_BYTES, "mbarrier.init")
            shared.record_write(warp.agent, warp.time, words, warp.clock, "mbarrier.init")
            shared.is_mbarrier[words] = True
            warp.block.mbarriers[offset] = Mbarrier(
                warp.block, offset, int(count(warp)[lane]), warp
            )
        warp.machine.event()

    return execute


@defines(SYNC, "mbarrier.inval.shared{,::cta}.b64")
def mbarrier_inval(binder, instruction):
    address = binder.address_reader(instruction.operands[0])

    def execute(warp, mask):
        for lane in active_lanes(mask):
            barrier = barrier_at(warp, int(address(warp)[lane]), cluster=False)
            barrier.check_use(warp, by_async_proxy=False)
            del warp.block.mbarriers[barrier.offset]
            warp.block.shared.is_mbarrier[words_in_range(barrier.offset, MBARRIER_BYTES)] = False

    return execute


@defines(
    SYNC,
    "mbarrier.arrive{,.expect_tx}{,.release.cta,.release.cluster,.relaxed.cta,.relaxed.cluster}"
    "{.shared,.shared::cta,.shared::cluster}.b64",
    "mbarrier.arrive.noComplete{,.release.cta}{.shared,.shared::cta}.b64",
    "mbarrier.expect_tx{,.relaxed.cta,.relaxed.cluster}{.shared,.shared::cta,.shared::cluster}.b64",
)
def mbarrier_arrive(binder, instruction):
    """Arrives at an mbarrier.

    A relaxed arrival orders execution, and with it the accesses to tensor memory that are fenced,
    but no memory. So does an arrival at another block's mbarrier whose scope is one block, which is
    the default.
    """
    parts = modifiers(instruction)
    releases_cta = "relaxed" not in parts
    releases_cluster = releases_cta and "cluster" in parts
    cluster, expects = "shared::cluster" in parts, "expect_tx" in parts
    only_expects = parts[0] == "expect_tx"
    operands = [Sink(), *instruction.operands] if only_expects else instruction.operands
    state, target, *counts = operands
    if cluster and not isinstance(state, Sink):
        raise UnsupportedError("an mbarrier of shared::cluster has no state operand (9.7.13.15.13)")
    if not (expects or "noComplete" in parts) <= len(counts) <= 1:
        raise UnsupportedError(f"the instruction has {len(counts)} counts")
    address = binder.address_reader(target)
    count = binder.reader(counts[0], "u32") if counts else None
    # Only mbarrier.test_wait without .parity uses the state, and it is not supported.
    write = binder.writer(state, "b64")

    def execute(warp, mask):
        for lane in active_lanes(mask):
            barrier = barrier_at(warp, int(address(warp)[lane]), cluster=cluster)
            barrier.check_use(warp, by_async_proxy=False)
            number = int(count(warp)[lane]) if count else 1
            if expects:
                barrier.expect_tx(number)
            arrivals = 0 if only_expects else 1 if expects else number
            is_own = barrier.block is warp.block
            release = warp.release_tensor_memory
            if releases_cta if is_own else releases_cluster:
                release = warp.release
            if not is_own and not expects:
                _arrive_at_other_block(warp, barrier, arrivals, instruction, release)
            elif not only_expects:
                release(barrier.arriving_clock)
                barrier.arrive(arrivals, may_complete="noComplete" not in parts)
        write(warp, np.zeros(WARP_SIZE, np.uint64), mask)
        warp.machine.event()

    return execute


def _arrive_at_other_block(warp, barrier: Mbarrier, count: int, instruction, release) -> None:
    """Submits an arrival at an mbarrier of another block as a task.

    `release` is the method of the warp that orders its past actions before the arrival.
    """
    released = warp.machine.agents.clock()
    release(released)

    def run():
        join(barrier.arriving_clock, released)
        barrier.arrive(count)

    description = f"line {instruction.line}: the arrival of {warp} at {barrier}"
    warp.machine.submit(Task("arrival", run, description, warp.block.cluster, (warp,)))


@defines(
    SYNC,
    "mbarrier{.try_wait,.test_wait}.parity{,.acquire.cta,.acquire.cluster}.shared{,::cta}.b64",
)
def mbarrier_wait(binder, instruction):
    destination, source, parity, *hint = instruction.operands
    write, address = binder.writer(destination, "pred"), binder.address_reader(source)
    read_parity = binder.reader(parity, "u32")
    is_test = modifiers(instruction)[0] == "test_wait"
    if len(hint) > (not is_test):
        raise UnsupportedError(f"the instruction has {len(hint)} operands too many")
    for time in hint:
        binder.reader(time, "u32")

    def execute(warp, mask):
        addresses, parities = address(warp), read_parity(warp)
        completed = np.zeros(WARP_SIZE, bool)
        incomplete = set()
        for at, parity_of_phase in {
            (int(addresses[i]), int(parities[i])) for i in active_lanes(mask)
        }:
            if parity_of_phase not in (0, 1):
                raise EmulatorError(f"the parity of a phase is {parity_of_phase}, expected 0 or 1")
            barrier = barrier_at(warp, at, cluster=False)
            barrier.check_use(warp, by_async_proxy=False)
            if barrier.phase & 1 != parity_of_phase:
                warp.acquire(barrier.completed_clock)
                completed |= (addresses == at) & (parities == parity_of_phase)
            else:
                incomplete.add((barrier, barrier.phase))
        if is_test or completed[active_lanes(mask)].any():
            write(warp, completed, mask)
            return None
        # try_wait may return false at any time (9.7.13.15.16). The emulator lets it wait until it
        # can return true for some lane.
        return Blocked(
            lambda: any(barrier.phase != phase for barrier, phase in incomplete),
            lambda: ", ".join(str(barrier) for barrier, _ in incomplete),
        )

    return execute


class NamedBarrier:
    """One of the 16 named barriers of a block (9.7.13.1).

    Attributes:
      clock: vector clock that all arrivals so far have released into.
      completed_clock: value of `clock` when the barrier was last complete.
      generation: number of times that the barrier was complete.
      arrived: warps that have arrived since then.
      threads: number of threads that the first of these warps named, or None.
    """

    def __init__(self, machine):
        self.clock, self.completed_clock = machine.agents.clock(), machine.agents.clock()
        self.generation, self.arrived, self.threads = 0, [], None

    def complete(self) -> None:
        """Releases all warps that wait."""
        self.completed_clock, self.generation, self.arrived = (
            self.clock.copy(),
            self.generation + 1,
            [],
        )


@defines(SYNC, "bar{,.cta}.sync", "bar{,.cta}.arrive", "barrier{,.cta}.sync{,.aligned}")
def named_barrier(binder, instruction):
    reads = [binder.reader(operand, "u32") for operand in instruction.operands]
    number, count = (*reads, None, None)[:2]
    arrives = "arrive" in modifiers(instruction)
    if not 1 + arrives <= len(reads) <= 2:
        raise UnsupportedError(f"the instruction has {len(reads)} operands")

    def execute(warp, mask):
        lanes = active_lanes(mask)
        if any(len(np.unique(read(warp)[lanes])) > 1 for read in reads):
            raise EmulatorError("lanes of a warp name different barriers or numbers of threads")
        index = int(number(warp)[lanes[0]])
        if not 0 <= index < 16:
            raise EmulatorError(f"the named barrier {index} does not exist, expected 0 to 15")
        block = warp.block
        barrier = block.named_barriers.setdefault(index, NamedBarrier(warp.machine))
        threads = int(count(warp)[lanes[0]]) if count else None
        if threads is not None and (threads % WARP_SIZE or not threads):
            raise EmulatorError(f"it is a barrier for {threads} threads, expected a multiple of 32")
        if barrier.arrived and barrier.threads != threads:
            raise EmulatorError(
                f"barrier {index} is for {threads} threads, but earlier warps named "
                f"{barrier.threads}"
            )
        if warp.number in barrier.arrived:
            raise EmulatorError(f"a warp arrives twice at barrier {index}")
        barrier.threads = threads
        barrier.arrived.append(warp.number)
        warp.release(barrier.clock)
        warp.machine.event()

        def expected():
            return threads // WARP_SIZE if threads else sum(other.alive for other in block.warps)

        def acquire_phase():
            warp.acquire(barrier.completed_clock)
            warp.sync_lanes()

        complete = len(barrier.arrived) >= expected()
        if complete:
            barrier.complete()
        if arrives:
            # bar.arrive does not wait, so it acquires nothing (9.7.13.1).
            return None
        if complete:
            acquire_phase()
            return None
        generation = barrier.generation

        def ready():
            if barrier.generation == generation and len(barrier.arrived) >= expected():
                barrier.complete()
            if barrier.generation == generation:
                return False
            acquire_phase()
            return True

        return Blocked(
            ready,
            lambda: f"named barrier {index}: warps {barrier.arrived} of {expected()} have arrived",
            done=True,
        )

    return execute


@defines(SYNC, "bar.warp.sync")
def bar_warp_sync(binder, instruction):
    """Orders the lanes' actions if all lanes that have not exited take part."""
    members = binder.reader(instruction.operands[0], "b32")

    def execute(warp, mask):
        active = lane_bitmask(mask)
        if active & ~int(members(warp)[active_lanes(mask)[0]]):
            raise EmulatorError(
                f"lanes {active_lanes(mask).tolist()} are not all members of {instruction}"
            )
        if not warp.is_part(mask):
            warp.sync_lanes()

    return execute


@defines(SYNC, "barrier.cluster.arrive{,.relaxed,.release}{,.aligned}")
def cluster_arrive(binder, instruction):
    """Arrives at the cluster's barrier.

    A relaxed arrival orders no memory, with two exceptions: the initialisation of mbarriers after a
    fence.mbarrier_init (9.7.13.4), and tensor memory, whose fences need only an order of execution.
    An arrival that is not relaxed happens after the block's arrivals at mbarriers of other blocks.
    """
    relaxed = "relaxed" in modifiers(instruction)

    def execute(warp, mask):
        if warp.cluster_arrivals > warp.cluster_waits:
            raise EmulatorError(
                "the warp makes a second arrival at the cluster's barrier without a wait"
            )
        if not relaxed:
            warp.machine.perform(
                task
                for task in warp.machine.tasks
                if task.kind == "arrival" and task.queue[0].block is warp.block
            )
        warp.cluster_arrivals += 1
        warp.cluster_relaxed = relaxed
        clocks, phase = warp.block.cluster.barrier_clocks, warp.cluster_arrivals
        clock = clocks.setdefault(phase, warp.machine.agents.clock())
        if relaxed:
            warp.release_tensor_memory(clock)
            for barrier in warp.block.mbarriers.values():
                if barrier.init_agent == warp.agent and barrier.fenced_for_cluster:
                    barrier.announced_at = barrier.announced_at or phase
        else:
            warp.release(clock)
        warp.machine.event()

    return execute


@defines(SYNC, "barrier.cluster.wait{,.acquire}{,.aligned}")
def cluster_wait(binder, instruction):
    def execute(warp, mask):
        cluster, phase = warp.block.cluster, warp.cluster_arrivals
        if warp.cluster_waits == phase:
            raise EmulatorError("there is a wait at the cluster's barrier without an arrival")
        missing = [w for w in cluster.warps if w.alive and w.cluster_arrivals < phase]
        if not missing:
            warp.acquire(cluster.barrier_clocks[phase])
            warp.clock[MEMORY][warp.machine.agents.cluster_barrier] = phase
            warp.cluster_waits = phase
            if not warp.cluster_relaxed:
                warp.sync_lanes()
            return None

        def ready():
            return all(w.cluster_arrivals >= phase or not w.alive for w in cluster.warps)

        return Blocked(ready, lambda: f"the cluster's barrier: {', '.join(map(str, missing))}")

    return execute


@defines(SYNC, "fence.mbarrier_init.release.cluster")
def fence_mbarrier_init(binder, instruction):
    return lambda warp, mask: _publish_mbarriers(warp, fenced_for_cluster=True)


def _publish_mbarriers(warp, *, fenced_for_cluster: bool = False) -> None:
    """Makes the mbarriers that this warp initialised visible to other blocks and proxies."""
    for barrier in warp.block.mbarriers.values():
        if barrier.init_agent == warp.agent:
            barrier.fence_time = barrier.fence_time or warp.time
            barrier.fenced_for_cluster |= fenced_for_cluster


@defines(SYNC, "fence.proxy.async{,.shared::cta,.shared::cluster,.global}")
def fence_proxy(binder, instruction):
    """Makes ordinary stores visible to the asynchronous proxy.

    These are the stores of the lanes that execute the fence, and stores of other warps that are
    ordered before it.
    """
    space = modifiers(instruction)[-1]

    def execute(warp, mask):
        if space != "global":
            own = space == "shared::cta"
            for block in [warp.block] if own else warp.block.cluster.blocks:
                block.shared.fence_proxies(warp, lane_bitmask(mask))
            _publish_mbarriers(warp)

    return execute


@defines(SYNC, "fence{.acq_rel,.sc}{.cta,.cluster,.gpu,.sys}", "membar{.cta,.gl,.sys}")
def fence(binder, instruction):
    """Does nothing: barriers release and acquire without it, and global memory is not checked."""
    return lambda warp, mask: None
