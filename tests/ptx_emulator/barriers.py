"""mbarriers, named and cluster barriers, and fences."""

import numpy as np

from ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from ptx_emulator.isa import LANES, Blocked, Task, block_of, instruction, lane_bits, lanes
from ptx_emulator.memory import SHARED_BEGIN, SHARED_WINDOW, WORD
from ptx_emulator.parser import Sink
from ptx_emulator.scalar import modifiers
from ptx_emulator.vector_clocks import MEMORY, learn

SYNC = "9.7.13 synchronisation"


class Mbarrier:
    """An mbarrier (9.7.13.15): pending arrivals, pending bytes, phases, and what it orders."""

    MOST = 2**20 - 1

    def __init__(self, block, offset: int, count: int, warp):
        if not 1 <= count <= self.MOST:
            raise EmulatorError(f"mbarrier.init with a count of {count}")
        cluster, machine = block.cluster, block.machine
        self.block, self.offset, self.count = block, offset, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.agent = machine.agents.barrier(cluster.barriers_made)
        cluster.barriers_made += 1
        self.gathered = machine.agents.clock()
        # What was known when the last phase was completed.
        self.completed = machine.agents.clock()
        # The last phase to which TMA or the tensor cores have contributed.
        self.asynchronous = 0
        self.maker, self.made = warp.agent, warp.time
        # When its maker let others than the own block's ordinary accesses use it; whether by
        # fence.mbarrier_init, and with which phase of the cluster's barrier a relaxed arrival says
        # so.
        self.fenced: int | None = None
        self.initialised = False
        self.announced: int | None = None

    def __str__(self) -> str:
        return (
            f"mbarrier at {self.block.shared.place(self.offset)}: phase {self.phase}, "
            f"{self.pending} of {self.count} arrivals and {self.bytes} bytes are missing"
        )

    @property
    def in_progress(self) -> bool:
        """Whether a part of its arrivals has come."""
        return self.pending != self.count or self.bytes != 0

    def arrive(self, count: int = 1, *, completes: bool = True) -> None:
        """So many arrivals."""
        self._check_alive()
        if not 1 <= count <= self.MOST:
            raise EmulatorError(f"{count} arrivals: {self}")
        if count > self.pending:
            raise EmulatorError(f"{count} arrivals at a barrier that does not expect them: {self}")
        self.pending -= count
        if not completes and self.pending == 0:
            raise EmulatorError(f"an arrival that may not complete the phase does so: {self}")
        self._advance()

    def signal(self) -> None:
        """An arrival by the tensor cores."""
        self.asynchronous = self.phase + 1
        self.arrive()

    def expect(self, count: int) -> None:
        """So many bytes are still to come."""
        self._check_alive()
        self.bytes += count
        if self.bytes > self.MOST:
            raise EmulatorError(f"more bytes than an mbarrier can count: {self}")

    def receive(self, count: int) -> None:
        """So many bytes have come; they may come before they are expected."""
        self._check_alive()
        self.asynchronous = self.phase + 1
        self.bytes -= count
        if self.bytes < -self.MOST:
            raise EmulatorError(f"more bytes than an mbarrier can count: {self}")
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.gathered[MEMORY][self.agent] = self.phase
            self.completed = self.gathered.copy()
            self.block.machine.event()

    def _check_alive(self) -> None:
        if not self.block.alive:
            raise EmulatorError(f"a signal to a block that has exited: {self}")

    def check_use(self, warp, *, asynchronous: bool) -> None:
        """The use is ordered after the initialisation, and the right proxy sees it."""
        known = warp.clock[MEMORY]
        announced = (
            self.announced is not None
            and known[warp.machine.agents.cluster_barrier] >= self.announced
        )
        if known[self.maker] < self.made and self.maker != warp.agent and not announced:
            raise RaceError(
                f"{warp} uses a barrier whose mbarrier.init nothing orders before: {self}"
            )
        seen = announced or (self.fenced is not None and known[self.maker] >= self.fenced)
        if (asynchronous or self.block is not warp.block) and not seen:
            where = "the asynchronous proxy" if asynchronous else "another block"
            warp.machine.warn(
                "unfenced mbarrier.init",
                f"{where} uses a barrier, and no fence.mbarrier_init or fence.proxy.async followed "
                f"its mbarrier.init: {self}",
            )

    def check_end(self) -> None:
        """What has to be so when its cluster exits."""
        if self.bytes:
            raise EmulatorError(f"the cluster exits and bytes are missing: {self}")
        known = max(warp.clock[MEMORY][self.agent] for warp in self.block.warps)
        if known < self.asynchronous <= self.phase:
            self.block.machine.warn(
                "signal that nobody waits for",
                "the cluster exits, and no warp of the block has waited for the last phase of what "
                f"TMA or the tensor cores signal: {self}",
            )


def barrier_at(warp, address: int, *, cluster: bool) -> Mbarrier:
    """The mbarrier at an address of shared memory."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    rank, offset = block_of(address)
    blocks = warp.block.cluster.blocks
    if not cluster and rank != warp.block.rank:
        raise EmulatorError(f"an address of block {rank} as one of the own block")
    if rank >= len(blocks):
        raise EmulatorError(f"the cluster has no block {rank}")
    if offset not in blocks[rank].barriers:
        raise EmulatorError(f"no mbarrier at {blocks[rank].shared.place(offset)}")
    return blocks[rank].barriers[offset]


def words_at(offset: int) -> np.ndarray:
    """The words of an mbarrier."""
    return np.arange(offset // WORD, offset // WORD + 2)


@instruction(SYNC, "mbarrier.init.shared{,::cta}.b64")
def mbarrier_init(build, line):
    address, count = build.address(line.operands[0]), build.read(line.operands[1], "u32")

    def execute(warp, mask):
        for lane in lanes(mask):
            rank, offset = block_of(int(address(warp)[lane]))
            if rank != warp.block.rank or offset % 8:
                raise EmulatorError(f"mbarrier.init at block {rank}, {offset - SHARED_BEGIN}")
            shared, words = warp.block.shared, words_at(offset)
            shared.check(offset, 8, "mbarrier.init")
            shared.writes(warp.agent, warp.time, words, warp.clock, "mbarrier.init")
            shared.barriers[words] = True
            warp.block.barriers[offset] = Mbarrier(warp.block, offset, int(count(warp)[lane]), warp)
        warp.machine.event()

    return execute


@instruction(SYNC, "mbarrier.inval.shared{,::cta}.b64")
def mbarrier_inval(build, line):
    address = build.address(line.operands[0])

    def execute(warp, mask):
        for lane in lanes(mask):
            barrier = barrier_at(warp, int(address(warp)[lane]), cluster=False)
            barrier.check_use(warp, asynchronous=False)
            del warp.block.barriers[barrier.offset]
            warp.block.shared.barriers[words_at(barrier.offset)] = False

    return execute


@instruction(
    SYNC,
    "mbarrier.arrive{,.expect_tx}{,.release.cta,.release.cluster}"
    "{.shared,.shared::cta,.shared::cluster}.b64",
    "mbarrier.arrive.noComplete{,.release.cta}{.shared,.shared::cta}.b64",
    "mbarrier.expect_tx{,.relaxed.cta,.relaxed.cluster}{.shared,.shared::cta,.shared::cluster}.b64",
)
def mbarrier_arrive(build, line):
    parts = modifiers(line)
    cluster, expects = "shared::cluster" in parts, "expect_tx" in parts
    only = parts[0] == "expect_tx"
    state, target, *more = [Sink(), *line.operands] if only else line.operands
    if cluster and not isinstance(state, Sink):
        raise UnsupportedError("the state of a barrier of the cluster (9.7.13.15.13)")
    if not (expects or "noComplete" in parts) <= len(more) <= 1:
        raise UnsupportedError(f"{len(more)} counts")
    address = build.address(target)
    count = build.read(more[0], "u32") if more else None
    # The state of the phase is only for mbarrier.test_wait without .parity, which is unknown here.
    write = build.write(state, "b64")

    def execute(warp, mask):
        for lane in lanes(mask):
            barrier = barrier_at(warp, int(address(warp)[lane]), cluster=cluster)
            barrier.check_use(warp, asynchronous=False)
            number = int(count(warp)[lane]) if count else 1
            if expects:
                barrier.expect(number)
            arrivals = 0 if only else 1 if expects else number
            if barrier.block is not warp.block and not expects:
                _arrive_elsewhere(warp, barrier, arrivals, line)
            elif not only:
                warp.release(barrier.gathered)
                barrier.arrive(arrivals, completes="noComplete" not in parts)
        write(warp, np.zeros(LANES, np.uint64), mask)
        warp.machine.event()

    return execute


def _arrive_elsewhere(warp, barrier: Mbarrier, count: int, line) -> None:
    """An arrival at a barrier of another block, which takes its time."""
    known = warp.machine.agents.clock()
    warp.release(known)

    def run():
        learn(barrier.gathered, known)
        barrier.arrive(count)

    what = f"line {line.line}: the arrival of {warp} at {barrier}"
    warp.machine.submit(Task("arrival", run, what, warp.block.cluster, (warp,)))


@instruction(
    SYNC,
    "mbarrier{.try_wait,.test_wait}.parity{,.acquire.cta,.acquire.cluster}.shared{,::cta}.b64",
)
def mbarrier_wait(build, line):
    destination, source, parity, *hint = line.operands
    write, address = build.write(destination, "pred"), build.address(source)
    read_parity = build.read(parity, "u32")
    test = modifiers(line)[0] == "test_wait"
    if len(hint) > (not test):
        raise UnsupportedError(f"{len(hint)} operands more")
    for time in hint:
        build.read(time, "u32")

    def execute(warp, mask):
        places, parities = address(warp), read_parity(warp)
        found = np.zeros(LANES, bool)
        waiting = set()
        for place, wanted in {(int(places[i]), int(parities[i])) for i in lanes(mask)}:
            if wanted not in (0, 1):
                raise EmulatorError(f"the parity {wanted} of a phase")
            barrier = barrier_at(warp, place, cluster=False)
            barrier.check_use(warp, asynchronous=False)
            if barrier.phase & 1 != wanted:
                warp.acquire(barrier.completed)
                found |= (places == place) & (parities == wanted)
            else:
                waiting.add((barrier, barrier.phase))
        if test or found[lanes(mask)].any():
            write(warp, found, mask)
            return None
        # try_wait may return false at any time (9.7.13.15.16). Here it waits if no lane can go on.
        return Blocked(
            lambda: any(barrier.phase != before for barrier, before in waiting),
            lambda: ", ".join(str(barrier) for barrier, _ in waiting),
        )

    return execute


class NamedBarrier:
    """One of the 16 barriers of a block (9.7.13.1)."""

    def __init__(self, machine):
        self.clock, self.completed = machine.agents.clock(), machine.agents.clock()
        self.generation, self.arrived, self.threads = 0, [], None

    def complete(self) -> None:
        """Lets everybody go on."""
        self.completed, self.generation, self.arrived = self.clock.copy(), self.generation + 1, []


@instruction(SYNC, "bar{,.cta}.sync", "bar{,.cta}.arrive", "barrier{,.cta}.sync{,.aligned}")
def bar(build, line):
    reads = [build.read(operand, "u32") for operand in line.operands]
    number, count = (*reads, None, None)[:2]
    arrives = "arrive" in modifiers(line)
    if not 1 + arrives <= len(reads) <= 2:
        raise UnsupportedError(f"{len(reads)} operands")

    def execute(warp, mask):
        here = lanes(mask)
        if any(len(np.unique(read(warp)[here])) > 1 for read in reads):
            raise EmulatorError("lanes of a warp name different barriers or numbers of threads")
        index = int(number(warp)[here[0]])
        if not 0 <= index < 16:
            raise EmulatorError(f"the named barrier {index}")
        block = warp.block
        barrier = block.named.setdefault(index, NamedBarrier(warp.machine))
        threads = int(count(warp)[here[0]]) if count else None
        if threads is not None and (threads % LANES or not threads):
            raise EmulatorError(f"a barrier for {threads} threads")
        if barrier.arrived and barrier.threads != threads:
            raise EmulatorError(f"barrier {index} for {threads} threads, before {barrier.threads}")
        if warp.number in barrier.arrived:
            raise EmulatorError(f"a warp arrives twice at barrier {index}")
        barrier.threads = threads
        barrier.arrived.append(warp.number)
        warp.release(barrier.clock)
        warp.machine.event()

        def expected():
            return threads // LANES if threads else sum(other.alive for other in block.warps)

        def go_on():
            warp.acquire(barrier.completed)
            warp.meet()

        complete = len(barrier.arrived) >= expected()
        if complete:
            barrier.complete()
        if arrives:
            # It does not wait, so it knows nothing of the others (9.7.13.1).
            return None
        if complete:
            go_on()
            return None
        generation = barrier.generation

        def ready():
            if barrier.generation == generation and len(barrier.arrived) >= expected():
                barrier.complete()
            if barrier.generation == generation:
                return False
            go_on()
            return True

        return Blocked(
            ready,
            lambda: f"named barrier {index}: {barrier.arrived} of {expected()} warps are there",
            done=True,
        )

    return execute


@instruction(SYNC, "bar.warp.sync")
def bar_warp(build, line):
    """Orders what the lanes do, if all that have not exited take part."""
    members = build.read(line.operands[0], "b32")

    def execute(warp, mask):
        active = lane_bits(mask)
        if active & ~int(members(warp)[lanes(mask)[0]]):
            raise EmulatorError(f"lanes {lanes(mask).tolist()} are not all members of {line}")
        if not warp.parted(mask):
            warp.meet()

    return execute


@instruction(SYNC, "barrier.cluster.arrive{,.relaxed,.release}{,.aligned}")
def cluster_arrive(build, line):
    """A relaxed arrival orders no memory but the initialisation of barriers, if fence.mbarrier_init
    came before (9.7.13.4), and tensor memory, whose fences need an order of execution alone. Any
    other one comes behind the block's arrivals at barriers of other blocks."""
    relaxed = "relaxed" in modifiers(line)

    def execute(warp, mask):
        if warp.cluster_arrivals > warp.cluster_waits:
            raise EmulatorError("a second arrival at the cluster's barrier without a wait")
        if not relaxed:
            warp.machine.perform(
                task
                for task in warp.machine.tasks
                if task.kind == "arrival" and task.queue[0].block is warp.block
            )
        warp.cluster_arrivals += 1
        warp.cluster_relaxed = relaxed
        clocks, turn = warp.block.cluster.clocks, warp.cluster_arrivals
        clock = clocks.setdefault(turn, warp.machine.agents.clock())
        if relaxed:
            warp.release_tensor_memory(clock)
            for barrier in warp.block.barriers.values():
                if barrier.maker == warp.agent and barrier.initialised:
                    barrier.announced = barrier.announced or turn
        else:
            warp.release(clock)
        warp.machine.event()

    return execute


@instruction(SYNC, "barrier.cluster.wait{,.acquire}{,.aligned}")
def cluster_wait(build, line):
    def execute(warp, mask):
        cluster, turn = warp.block.cluster, warp.cluster_arrivals
        if warp.cluster_waits == turn:
            raise EmulatorError("a wait at the cluster's barrier without an arrival")
        missing = [w for w in cluster.warps if w.alive and w.cluster_arrivals < turn]
        if not missing:
            warp.acquire(cluster.clocks[turn])
            warp.clock[MEMORY][warp.machine.agents.cluster_barrier] = turn
            warp.cluster_waits = turn
            if not warp.cluster_relaxed:
                warp.meet()
            return None

        def ready():
            return all(w.cluster_arrivals >= turn or not w.alive for w in cluster.warps)

        return Blocked(ready, lambda: f"the cluster's barrier: {', '.join(map(str, missing))}")

    return execute


@instruction(SYNC, "fence.mbarrier_init.release.cluster")
def fence_mbarrier_init(build, line):
    return lambda warp, mask: _publish_barriers(warp, initialised=True)


def _publish_barriers(warp, *, initialised: bool = False) -> None:
    """The barriers that this warp made are visible to all."""
    for barrier in warp.block.barriers.values():
        if barrier.maker == warp.agent:
            barrier.fenced = barrier.fenced or warp.time
            barrier.initialised |= initialised


@instruction(SYNC, "fence.proxy.async{,.shared::cta,.shared::cluster,.global}")
def fence_proxy(build, line):
    """Ordinary writes become visible to TMA and the tensor cores: those of the lanes that execute
    it, and those of other warps that are known here."""
    space = modifiers(line)[-1]

    def execute(warp, mask):
        if space != "global":
            own = space == "shared::cta"
            for block in [warp.block] if own else warp.block.cluster.blocks:
                block.shared.fence(warp, lane_bits(mask))
            _publish_barriers(warp)

    return execute


@instruction(SYNC, "fence{.acq_rel,.sc}{.cta,.cluster,.gpu,.sys}", "membar{.cta,.gl,.sys}")
def fence(build, line):
    """Barriers release and acquire by themselves here; global memory's order is not looked at."""
    return lambda warp, mask: None
