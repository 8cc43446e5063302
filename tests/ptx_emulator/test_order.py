"""Errors in the order of operations: missing waits, and signals that arrive late."""

import numpy as np
import pytest

from tests.ptx_emulator.errors import DeadlockError, EmulatorError, RaceError
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.matrix_operands import SharedOperand
from tests.ptx_emulator.memory import GlobalMemory
from tests.ptx_emulator.parser import parse

DECLARED = """.shared .align 16 .b8 memory[64]; .reg .pred %first, %p; .reg .b32 %t, %w, %a, %b, %m;
    .reg .b32 %r<8>; .reg .b64 %q, %s; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;
    setp.eq.u32 %first, %t, 0; mov.u32 %m, memory; add.u32 %a, %m, 16; add.u32 %b, %m, 24;"""


def run(body, *, warps=2, blocks=1, schedule="late", seed=0):
    """Runs a kernel of one cluster."""
    text = f"""
.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel()
.maxntid {32 * warps}, 1, 1
{{
{DECLARED}
{body}
ret;
}}
"""
    cluster = (blocks, 1, 1)
    Machine(parse(text), cluster, cluster=cluster, schedule=schedule, seed=seed).launch()


# The first warp allocates 32 columns of tensor memory; their address is %r0.
ALLOCATED = """setp.eq.u32 %p, %w, 0; @!%p bra made;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%m], 32;
    made: bar.sync 0; ld.shared.b32 %r0, [%m];"""
FREED = """@!%p bra end; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 32; end:"""
LOADED = """tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r0]; tcgen05.wait::ld.sync.aligned;"""


def test_tensor_memory_is_deallocated_after_all_loads():
    run(f"{ALLOCATED} {LOADED} bar.sync 0; {FREED}")
    with pytest.raises(RaceError, match=r"dealloc.* after the tcgen05.ld of warp 1"):
        # The first warp is delayed until the second one has loaded, but nothing orders the two.
        run(f"{ALLOCATED} @%p nanosleep.u32 1; {LOADED} {FREED}", schedule="eager")


# In a cluster of two (9.7.16.5, 9.7.16.7) the first warp of each block, in which %p is true,
# allocates 32 columns of tensor memory.
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
RELAXED = MEET.replace("arrive", "arrive.relaxed")
LEADS = "mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %first, %r7, 0; setp.eq.u32 %p, %w, 0;"
ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%m], 32;"
DEALLOC = "ld.shared.b32 %r0, [%m]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r0, 32;"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"


def each(first, second):
    """Combines the statements of the two blocks; %first is true in the first block."""
    return f"{{ @!%first bra second; {first} bra done; second: {second} done: }}"


def of_first_warps(statements):
    return f"{{ @!%p bra over; {statements} over: }}"


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_a_pair_allocates_after_its_peer_has_been_launched(schedule):
    allocated = of_first_warps(ALLOC + RELINQUISH)
    freed = of_first_warps(DEALLOC)
    options = dict(blocks=2, schedule=schedule)
    for before, behind in ((MEET, MEET), (RELAXED, RELAXED), (RELAXED, MEET)):
        run(f"{LEADS} {before} {allocated} {behind} {freed}", **options)
    # Another warp of the block may wait for the peer instead.
    known = "{ setp.eq.u32 %p, %w, 1; bar.sync 0; setp.eq.u32 %p, %w, 0; }"
    run(f"{LEADS} {RELAXED} {known} {allocated} {MEET} {freed}", **options)
    for before in ("", "bar.sync 0;", "barrier.cluster.arrive.aligned;"):
        behind = "barrier.cluster.wait.aligned;" if "cluster" in before else MEET
        with pytest.raises(EmulatorError, match="nothing says that the peer has been launched"):
            run(f"{LEADS} {before} {allocated} {behind} {freed}", **options)


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_an_allocation_of_a_pair_waits_until_both_blocks_execute_it(schedule):
    later = each(f"{of_first_warps(ALLOC)} {MEET}", f"{MEET} {of_first_warps(ALLOC)}")
    with pytest.raises(DeadlockError, match=r"waits for the peer's tcgen05.alloc"):
        run(f"{LEADS} {MEET} {later} {MEET} {of_first_warps(DEALLOC)}", blocks=2, schedule=schedule)
    alone = each(of_first_warps(ALLOC), "")
    with pytest.raises(DeadlockError, match=r"waits for the peer's tcgen05.alloc"):
        run(f"{LEADS} {MEET} {alone} {MEET}", blocks=2, schedule=schedule)


def test_collective_instructions_of_a_pair_may_wait_for_the_peer():
    """9.7.16.5 allows both behaviours, so a kernel that relies on either fails in some schedule."""
    freed = of_first_warps(DEALLOC)
    body = f"{LEADS} {MEET} {of_first_warps(ALLOC)} {MEET} {each(freed + MEET, MEET + freed)}"
    run(body, blocks=2, schedule="eager")
    with pytest.raises(DeadlockError, match=r"waits for the peer's tcgen05.dealloc"):
        run(body, blocks=2, schedule="late")
    outcomes = set()
    for seed in range(10):
        try:
            run(body, blocks=2, schedule="random", seed=seed)
            outcomes.add("done")
        except DeadlockError:
            outcomes.add("deadlock")
    assert outcomes == {"done", "deadlock"}


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_a_pair_deallocates_after_both_blocks_have_allocated(schedule):
    """Otherwise a launch fails on a B300, whichever block is first (CUTLASS issue 3435)."""
    both = of_first_warps(ALLOC + RELINQUISH)
    for meet in (MEET, RELAXED):
        run(f"{LEADS} {MEET} {both} {meet} {of_first_warps(DEALLOC)}", blocks=2, schedule=schedule)
    with pytest.raises(RaceError, match=r"dealloc.* after the tcgen05.alloc of block"):
        run(f"{LEADS} {MEET} {both} {of_first_warps(DEALLOC)}", blocks=2, schedule=schedule)


def test_a_relaxed_arrival_publishes_no_address_of_tensor_memory():
    """A relaxed arrival does not order shared memory (9.7.13.3)."""
    used = "ld.shared.b32 %r0, [%m];"
    body = f"{LEADS} {MEET} {of_first_warps(ALLOC)} {{}} {used} {MEET} {of_first_warps(DEALLOC)}"
    run(body.replace("{}", MEET), blocks=2)
    run(body.replace("{}", f"{RELAXED} bar.sync 0;"), blocks=2)
    with pytest.raises(RaceError, match="ld reads what was written to"):
        run(body.replace("{}", RELAXED), blocks=2)


INIT = "@%first mbarrier.init.shared.b64 [%a], 1; @%first mbarrier.init.shared.b64 [%b], 1;"
FENCE = "fence.mbarrier_init.release.cluster;"
ARRIVE, WAIT = "barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.aligned;"
# Each block's first thread arrives at the other block's barrier %a.
SIGNAL = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1;
    mapa.shared::cluster.u32 %r2, %a, %r1;
    @%first mbarrier.arrive.shared::cluster.b64 _, [%r2];"""


def waiting(barrier, number):
    return f"""again{number}: mbarrier.try_wait.parity.shared.b64 %p, [{barrier}], 0, 1;
        @!%p bra again{number};"""


def test_mbarriers_are_fenced_before_other_blocks_use_them():
    run(f"{INIT} {FENCE} {ARRIVE} {WAIT} {SIGNAL} {waiting('%a', 0)}", blocks=2, warps=1)
    with pytest.raises(RaceError, match=r"nothing orders its mbarrier.init before"):
        body = f"{INIT} {ARRIVE} {FENCE} {WAIT} {SIGNAL} {waiting('%a', 0)}"
        run(body, blocks=2, warps=1)


def test_a_block_waits_for_the_arrivals_of_others_before_it_exits():
    begin = f"{INIT} {FENCE} {ARRIVE} {WAIT} {SIGNAL}"
    with pytest.raises(EmulatorError, match=r"exits before line \d+: the arrival of"):
        run(f"{begin} {ARRIVE} {WAIT}", blocks=2, warps=1)
    # This arrival happens after the earlier arrivals of its block.
    run(f"{begin} barrier.cluster.arrive.release.aligned; {WAIT}", blocks=2, warps=1)


def test_the_signals_of_two_commits_arrive_in_any_order():
    commits = "".join(
        f"@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{at}];"
        for at in ("%q", "%s")
    )
    begin = f"{INIT} {FENCE} cvt.u64.u32 %q, %a; cvt.u64.u32 %s, %b; {commits}"
    run(f"{begin} {waiting('%b', 0)} {waiting('%a', 1)}", warps=1)
    with pytest.raises(EmulatorError, match=r"exits before the signal of a tcgen05.commit"):
        run(f"{begin} {waiting('%b', 0)}", warps=1)
    with pytest.raises(EmulatorError, match="no warp of the block has waited for the last phase"):
        run(f"{begin} {waiting('%b', 0)}", warps=1, schedule="eager")


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 52, 60])
def test_reserved_bits_of_a_matrix_descriptor_are_refused(bit):
    with pytest.raises(EmulatorError, match="reserved bits"):
        SharedOperand.from_tcgen05_descriptor(1 << 46 | 1 << bit, None, transposed=False)


def test_an_address_beyond_an_array_is_not_in_another_one():
    memory = GlobalMemory()
    first, second = (memory.allocate(np.full(4, i, np.uint8)) for i in (1, 2))
    assert memory.read(second, (4,), np.uint8).tolist() == [2] * 4
    for distance in (4, 2**20, 2**31):
        with pytest.raises(EmulatorError, match="outside of all arrays"):
            memory.offset_of(first + distance, 1)
