"""Tests the emulator's barriers and fences against the PTX ISA (9.0), section 9.7.13.

Each case that must be refused has a valid counterpart, which is also run.
"""

import itertools

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run
from tests.ptx_emulator.tma import TensorMap

SECTION = "9.7.13 synchronisation"

# Predicates for the first thread of the first warp, and of the second warp.
FIRST = "@%first"
SECOND = "@%second"

DECLARED = """.reg .b32 %bar, %memory, %word, %x, %y, %rank; .reg .b64 %state, %address;
    .reg .pred %p,
    %first, %second, %done; .shared .align 1024 .b8 memory[1024]; .shared .align 8 .b64 bar[4];
    mov.u32 %bar, bar; mov.u32 %memory, memory; mov.u32 %rank, %cluster_ctarank;
    setp.eq.u32 %first, %thread, 0; setp.eq.u32 %second, %thread, 32;
    mad.lo.u32 %word, %thread, 4, %memory;
"""


def init(count, fence="fence.mbarrier_init.release.cluster;"):
    """Lets one thread initialise the barrier, and orders all other threads after it."""
    return f"""{DECLARED} {FIRST} mbarrier.init.shared::cta.b64 [%bar], {count}; {fence}
        bar.sync 0;
    """


def wait(parity=0, opcode="mbarrier.try_wait.parity.shared::cta.b64"):
    """Waits until the phase with this parity completes."""
    return f"""{{ .reg .pred %over; again: {opcode} %over, [%bar], {parity};
        @%over bra go; bra again; go: }}
    """


# Statements that take more instructions than a warp executes in a turn.
SLOW = "add.u32 %x, %x, 1;" * 500
ANY_RACE = "(reads what was written to|overwrites what is read from)"

RELAXED = (".relaxed.cta", ".relaxed.cluster")
KINDS = ("", ".release.cta", ".release.cluster", *RELAXED)
OWN = ("shared", "shared::cta")
SPACES = (*OWN, "shared::cluster")
ARRIVALS = [
    f"mbarrier.arrive{expects}{order}.{space}.b64"
    for expects, order, space in itertools.product(("", ".expect_tx"), KINDS, SPACES)
]
INCOMPLETE = [
    f"mbarrier.arrive.noComplete{order}.{space}.b64"
    for order, space in itertools.product(("", ".release.cta"), OWN)
]
EXPECTING = [
    f"mbarrier.expect_tx{order}.{space}.b64"
    for order, space in itertools.product(("", *RELAXED), SPACES)
]
WAITS = [
    f"mbarrier.{name}.parity{order}.{space}.b64"
    for name, order, space in itertools.product(
        ("try_wait", "test_wait"), ("", ".acquire.cta", ".acquire.cluster"), OWN
    )
]
INITS = [f"mbarrier.init.{space}.b64" for space in OWN]
INVALS = [f"mbarrier.inval.{space}.b64" for space in OWN]


class Phases:
    """A reference of an mbarrier's pending arrivals, bytes and phases (9.7.13.15.3 and 4)."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def change(self, arrivals=0, expected=0, come=0):
        self.bytes += expected - come
        self.pending -= arrivals
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def tests(self):
        """Returns the results of test_wait.parity 0 and 1, which are 1 for a completed phase."""
        return [int(self.phase % 2 != parity) for parity in (0, 1)]


def steps(opcode):
    """Lists statements with their effect on the barrier, as (text, arguments of Phases.change)."""
    state = "_, " if "arrive" in opcode else ""
    if "expect_tx" in opcode:
        arrives = "arrive" in opcode
        load = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
        come = [(f"{load} [%memory+{at}], [%t0, {{0}}], [%bar];", dict(come=16)) for at in (0, 128)]
        arrival = ("mbarrier.arrive.shared.b64 _, [%bar];", dict(arrivals=1))
        expect = (f"{opcode} {state}[%bar], 32;", dict(arrivals=int(arrives), expected=32))
        none = (f"{opcode} {state}[%bar], 0;", dict(arrivals=int(arrives)))
        more = [arrival] * (1 - arrives)
        once = [expect, *more, arrival, come[0], arrival, come[1]]
        return [*once, none, *more, arrival, arrival, *once]
    if "noComplete" in opcode:
        part = (f"{opcode} _, [%bar], 2;", dict(arrivals=2))
        last = ("mbarrier.arrive.shared.b64 _, [%bar];", dict(arrivals=1))
        return [part, last, part, last]
    one = (f"{opcode} _, [%bar];", dict(arrivals=1))
    two = (f"{opcode} _, [%bar], 2;", dict(arrivals=2))
    three = (f"{opcode} _, [%bar], %x;", dict(arrivals=3))
    return [one, two, two, one, three, one, one, one, three]


def words(address):
    """Returns the map of a tensor of 64 words, in boxes of 16 bytes."""
    return TensorMap(address, 4, (64,), (4,), (4,), 0)


@pytest.mark.parametrize("opcode", ARRIVALS + INCOMPLETE + EXPECTING)
def test_arrivals_and_bytes_complete_phases(opcode):
    """The completed phases are compared after every step (9.7.13.15.13)."""
    assert isa.OPCODES[opcode].section == SECTION
    phases, text, wanted = Phases(3), "", []
    for i, (statement, change) in enumerate(steps(opcode)):
        text += f"{FIRST} {statement}\n"
        phases.change(**change)
        for parity, over in enumerate(phases.tests()):
            text += f"""mbarrier.test_wait.parity.shared.b64 %p, [%bar], {parity};
                selp.b32 %d{2 * i + parity}, 1, 0, %p;"""
            wanted.append(over)
    found = run(
        f"{init(3)} mov.u32 %x, 3; {text}",
        results=[32] * len(wanted),
        arrays=[bytes(256)],
        maps=[words],
        schedule="eager",
    )
    assert [values for values in found.results] == [[over] * 32 for over in wanted]
    assert phases.phase >= 2


@pytest.mark.parametrize("opcode", [x for x in ARRIVALS + INCOMPLETE if "::cluster" not in x])
def test_an_arrival_orders_what_came_before(opcode):
    """The first warp passes values to the second; without the wait this is a race."""
    count = ", 31" if "noComplete" in opcode else ", 0" if "expect_tx" in opcode else ""
    arrival = f"{opcode} %state, [%bar]{count};"
    if "noComplete" in opcode:
        arrival = (
            f"{FIRST} {arrival} bar.warp.sync -1; {FIRST} mbarrier.arrive.shared.b64 _, [%bar];"
        )

    def body(waiting):
        return f"""{init(32)} setp.ge.u32 %p, %thread, 32; @%p bra second;
            mul.lo.u32 %x, %thread, 5; st.shared.u32 [%word], %x; {arrival} bra end;
            second: {waiting} ld.shared.u32 %d0, [%word+-128];{HERE}
            end:"""

    failing = body(SLOW).replace("%d0", "%x")
    message = "reads what was written to .*block 0, warp 0"
    assert_fails(RaceError, message, failing, threads=64, schedule="eager")
    if "relaxed" in opcode:
        assert_fails(RaceError, message, body(wait()).replace("%d0", "%x"), threads=64)
        return
    for schedule in ("eager", "late", "random"):
        found = run(body(wait()), results=[32], threads=64, schedule=schedule).results
        assert found[0][32:] == [5 * lane for lane in range(32)]


@pytest.mark.parametrize("order", KINDS)
def test_an_arrival_at_another_block_orders_memory_only_with_the_scope_of_the_cluster(order):
    """The second block reads what the first one wrote into its shared memory (9.7.13.15.13)."""
    body = f"""{init(1)} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.eq.u32 %p, %rank, 1; @%p bra second; mapa.shared::cluster.u32 %y, %bar, 1;
        mapa.shared::cluster.u32 %x, %memory, 1; {FIRST} st.shared::cluster.u32 [%x], 7;
        {FIRST} mbarrier.arrive{order}.shared::cluster.b64 _, [%y]; bra end;
        second: {wait(opcode="mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")}
        {FIRST} ld.shared.u32 %x, [%memory];{HERE}
        end: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    if order == ".release.cluster":
        run(body, grid=2, cluster=2)
    else:
        message = "reads what was written to .*block 0, warp 0"
        assert_fails(RaceError, message, body, grid=2, cluster=2)


@pytest.mark.parametrize("opcode", [x for x in ARRIVALS + EXPECTING if "::cluster" in x])
def test_a_thread_arrives_at_the_barrier_of_another_block(opcode):
    """The first threads of both blocks arrive at block 0's barrier, and not at block 1's."""
    state = "_, " if "arrive" in opcode else ""
    count = ", 0" if "expect_tx" in opcode else ""
    extra = "" if state else f"{FIRST} mbarrier.arrive.shared::cluster.b64 _, [%y];"
    body = f"""{init(2)} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mapa.shared::cluster.u32 %y, %bar, 0; {FIRST} {opcode} {state}[%y]{count}; {extra}
        setp.ne.u32 %p, %rank, 0; mov.u32 %d0, 0; @%p bra end;
        {wait()} mov.u32 %d0, 1;
        end: mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %d1, 1, 0, %p;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    found = run(body, results=[32, 32], grid=2, cluster=2).results
    assert found == [[1] * 32 + [0] * 32] * 2
    if state:
        statement = body.replace(f"{opcode} _,", f"{opcode} %state,")
        assert_fails(
            UnsupportedError, "an mbarrier of shared::cluster has no state operand", f"{statement}"
        )


@pytest.mark.parametrize("opcode", WAITS)
def test_waits_end_with_the_phase(opcode):
    """Five phases have two arrivals each (9.7.13.15.16); a time limit as a hint has no effect."""
    assert isa.OPCODES[opcode].section == SECTION
    hint = ", 1000" if "try_wait" in opcode else ""
    turns = range(5)
    body = f"{init(2)} setp.ge.u32 %p, %thread, 32; mov.u32 %x, 0;"
    for turn in turns:
        loop = wait(turn % 2, opcode).replace(f", {turn % 2};", f", {turn % 2}{hint};")
        body += f"""@%p bra other{turn};
            st.shared.u32 [%word], {turn}; bar.warp.sync -1;
            {FIRST} mbarrier.arrive.shared.b64 _, [%bar], 2; bar.sync 1; bra next{turn};
            other{turn}: {loop} ld.shared.u32 %d{turn}, [%word+-128]; bar.sync 1;
            next{turn}:"""
    found = run(body, results=[32] * 5, threads=64).results
    assert [values[32:] for values in found] == [[turn] * 32 for turn in turns]
    if not hint:
        assert_fails(
            UnsupportedError, "1 operands too many", f"{init(1)} {opcode} %p, [%bar], 0, 1000;"
        )


def test_lanes_may_wait_for_different_barriers():
    """Each lane gets the result for its own barrier and parity."""
    body = f"""{DECLARED} and.b32 %x, %lane, 3; mad.lo.u32 %y, %x, 8, %bar;
        setp.lt.u32 %p, %lane, 4; @%p mbarrier.init.shared.b64 [%y], 1;
        setp.lt.u32 %p, %lane, 2; @%p mbarrier.arrive.shared.b64 _, [%y];
        bar.warp.sync -1; shr.u32 %x, %lane, 4;
        mbarrier.test_wait.parity.shared.b64 %p, [%y], %x; selp.u32 %d0, 1, 0, %p;
        mbarrier.try_wait.parity.shared.b64 %p, [%y], %x; selp.u32 %d1, 1, 0, %p;"""
    found = run(body, results=[32, 32]).results
    over = [lane % 4 < 2 for lane in range(32)]
    assert found == [[int(over[i] != (i >= 16)) for i in range(32)]] * 2


@pytest.mark.parametrize("opcode", INITS + INVALS)
def test_memory_is_a_barrier_from_init_to_inval(opcode):
    """The memory is ordinary before mbarrier.init and after mbarrier.inval (9.7.13.15.9 and 10)."""
    assert isa.OPCODES[opcode].section == SECTION
    made = "mbarrier.init.shared.b64" if opcode in INVALS else opcode
    gone = "mbarrier.inval.shared.b64" if opcode in INITS else opcode
    body = f"""{DECLARED} {FIRST} st.shared.u32 [%bar], 5; {FIRST} {made} [%bar], 1;
        {{}}
        {FIRST} mbarrier.arrive.shared.b64 _, [%bar]; {FIRST} {gone} [%bar];
        {FIRST} st.shared.u32 [%bar+4], 6; {FIRST} {made} [%bar], 1;
        mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %x, 1, 0, %p;
        {FIRST} {gone} [%bar]; {FIRST} st.shared.u32 [%bar], %x;"""
    found = run(body.replace("{}", "") + "ld.shared.u32 %d0, [%bar];", results=[32]).results
    assert found == [[0] * 32]
    for statement, message in {
        f"st.shared.u32 [%bar+4], 1;{HERE}": "st touches the mbarrier in .*1028",
        f"ld.shared.u32 %x, [%bar];{HERE}": "ld touches the mbarrier in .*1024",
        f"{made} [%bar], 1;{HERE}": "mbarrier.init touches the mbarrier",
        f"{gone} [%bar]; mbarrier.arrive.shared.b64 _, [%bar];{HERE}": "no mbarrier at",
        f"{gone} [%bar]; {gone} [%bar];{HERE}": "no mbarrier at",
    }.items():
        predicated = f"{FIRST} {statement}".replace("; ", f"; {FIRST} ", 1)
        assert_fails(EmulatorError, message, body.replace("{}", predicated))


@pytest.mark.parametrize(
    "statement, message",
    {
        "overflow": ("mbarrier.arrive.shared.b64 _, [%bar], 4;", "4 arrivals at a barrier"),
        "no arrival": ("mov.u32 %x, 0; @%first mbarrier.arrive.shared.b64 _, [%bar], %x;", "0 arr"),
        "too many": ("mbarrier.arrive.shared.b64 _, [%bar], 1048576;", "1048576 arrivals"),
        "noComplete": ("mbarrier.arrive.noComplete.shared.b64 _, [%bar], 3;", "may not complete"),
        "too many bytes": (
            "mbarrier.expect_tx.shared.b64 [%bar], 1048575;"
            "@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1;",
            "more bytes than an mbarrier can count",
        ),
        "bytes at the end": ("mbarrier.expect_tx.shared.b64 [%bar], 16;", "bytes are missing"),
        "elsewhere": ("mbarrier.arrive.shared.b64 _, [%bar+8];", "no mbarrier at .* 1032"),
        "parity": ("mov.u32 %x, 2; mbarrier.test_wait.parity.shared.b64 %p, [%bar], %x;", "parity"),
        "other block": (
            "add.u32 %x, %bar, 0x1000000; @%first mbarrier.arrive.shared.b64 _, [%x];",
            "an address in block 1, expected the warp's own block",
        ),
        "no block": (
            "add.u32 %x, %bar, 0x1000000; @%first mbarrier.arrive.shared::cluster.b64 _, [%x];",
            "no block 1",
        ),
        "count": ("mbarrier.init.shared.b64 [%bar+8], 0;", "a count of 0"),
        "large count": ("mbarrier.init.shared.b64 [%bar+8], 1048576;", "a count of 1048576"),
        "alignment": (
            "mbarrier.init.shared.b64 [%bar+12], 1;",
            "mbarrier.init at block 0, offset 1036",
        ),
        "bounds": ("mbarrier.init.shared.b64 [%bar+32], 1;", "outside of its"),
    }.values(),
    ids=lambda value: value if value.isalnum() else None,
)
def test_invalid_uses_of_an_mbarrier_are_refused(statement, message):
    where = "" if "missing" in message else HERE
    assert_fails(EmulatorError, message, f"{init(3)} {FIRST} {statement}{where}")


def test_the_largest_counts_of_an_mbarrier():
    body = f"""{init(1048575)} {FIRST} mbarrier.arrive.shared.b64 _, [%bar], 1048574;
        mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %d0, 1, 0, %p;
        {FIRST} mbarrier.arrive.shared.b64 _, [%bar];
        mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %d1, 1, 0, %p;"""
    assert run(body, results=[32, 32]).results == [[0] * 32, [1] * 32]


@pytest.mark.parametrize(
    "statement, message",
    {
        "mbarrier.arrive.shared.b64 [%bar];": "cannot be written|not enough values",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%bar];": "0 counts",
        "mbarrier.arrive.noComplete.shared.b64 _, [%bar];": "0 counts",
        "mbarrier.arrive.shared.b64 _, [%bar], 1, 1;": "2 counts",
        "mbarrier.expect_tx.shared.b64 _, [%bar], 16;": "2 counts",
        "mbarrier.arrive.noComplete.shared::cluster.b64 _, [%bar], 1;": "not among the known",
        "mbarrier.arrive.noComplete.release.cluster.shared.b64 _, [%bar], 1;": "not among",
        "mbarrier.arrive.relaxed.shared.b64 _, [%bar];": "not among the known",
        "mbarrier.arrive_drop.shared.b64 _, [%bar];": "not among the known",
        "mbarrier.test_wait.shared.b64 %p, [%bar], %state;": "not among the known",
        "mbarrier.try_wait.parity.shared::cluster.b64 %p, [%bar], 0;": "not among the known",
        "mbarrier.try_wait.parity.shared.b64 %p, [%bar], 0, %state;": "64 bits where u32",
        "mbarrier.init.b64 [%bar], 1;": "not among the known",
        "mbarrier.init.shared.b64 [%bar], %state;": "64 bits where u32",
        "bar.sync;": "0 operands",
        "bar.sync 1, 64, 64;": "3 operands",
        "bar.arrive 1;": "1 operands",
        "bar.sync.aligned 1;": "not among the known",
        "bar.red.popc.u32 %x, 1, %p;": "not among the known",
        "barrier.cluster.wait.release;": "not among the known",
        "fence.proxy.alias;": "not among the known",
        "fence.acq_rel;": "not among the known",
    }.items(),
)
def test_unknown_forms_of_barriers_are_refused(statement, message):
    assert_fails(UnsupportedError, message, f"{init(1)} {statement}{HERE}")


# Uses of a barrier that are not ordered after its initialisation, or come after its block's exit.


def test_a_barrier_is_used_after_its_initialisation():
    """If another warp of the block uses the barrier, bar.sync is needed."""
    use = f"{DECLARED} {FIRST} mbarrier.init.shared.b64 [%bar], 1; {{}} {SECOND} mbarrier.arrive"
    use += f".shared.b64 _, [%bar];{HERE}"
    run(use.replace("{}", "bar.sync 0;"), threads=64)
    slow = "bar.arrive 0, 64; setp.ge.u32 %p, %thread, 32; @!%p bra end; " + SLOW
    message = "nothing orders its mbarrier.init before"
    assert_fails(RaceError, message, use.replace("{}", slow) + "end:", threads=64, schedule="eager")


@pytest.mark.parametrize(
    "fence", ["", "fence.mbarrier_init.release.cluster;", "fence.proxy.async;"]
)
def test_another_block_sees_a_barrier_after_a_fence(fence):
    """The cluster's barrier without a fence is not enough (9.7.13.4)."""
    body = f"""{init(1, fence)} barrier.cluster.arrive.aligned;
        barrier.cluster.wait.acquire.aligned; setp.eq.u32 %p, %rank, 0; @%p bra wait;
        mapa.shared::cluster.u32 %y, %bar, 0;
        {FIRST} mbarrier.arrive.shared::cluster.b64 _, [%y];{HERE}
        bra end; wait: {wait()} end:"""
    if fence:
        run(body, grid=2, cluster=2)
    else:
        assert_fails(
            EmulatorError, "unfenced mbarrier.init: another block", body, grid=2, cluster=2
        )
        run(body, grid=2, cluster=2, allowed=frozenset({"unfenced mbarrier.init"}))
    relaxed = body.replace(".arrive.aligned", ".arrive.relaxed.aligned")
    if "mbarrier_init" in fence:
        run(relaxed, grid=2, cluster=2)
    else:
        message = "nothing orders its mbarrier.init before"
        assert_fails(RaceError, message, relaxed, grid=2, cluster=2)


@pytest.mark.parametrize("stays", [True, False])
def test_a_signal_to_a_block_that_has_exited_is_refused(stays):
    wait_for_all = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = f"""{init(1)} {wait_for_all} setp.eq.u32 %p, %rank, 0; @%p bra end;
        mapa.shared::cluster.u32 %y, %bar, 0; {SLOW} {SLOW}
        {FIRST} mbarrier.arrive.shared::cluster.b64 _, [%y];{HERE}
        end: {wait_for_all if stays else ""}"""
    if stays:
        run(body, grid=2, cluster=2)
    else:
        assert_fails(EmulatorError, "a signal to a block that has exited", body, grid=2, cluster=2)


@pytest.mark.parametrize("parity", [0, 1])
def test_a_wait_for_a_phase_that_does_not_end_is_reported(parity):
    """The phase before the first, with parity 1, is complete. The report names warp and line."""
    body = f"""{init(2)} {FIRST} mbarrier.arrive.shared.b64 _, [%bar];
        {wait(parity).replace(f"{parity};", f"{parity};{HERE}")}"""
    if parity == 1:
        run(body)
    else:
        message = (
            "no warp can continue\n *cluster 0, block 0, warp 0: 32 lanes at line .*try_wait.*"
            r"waits for mbarrier at shared memory of block 0 \+ 1024: phase 0, 1 of 2 arrivals"
        )
        assert_fails(DeadlockError, message, body)


def test_a_loop_of_tests_that_never_ends_is_reported(monkeypatch):
    monkeypatch.setattr("tests.ptx_emulator.machine.LIVELOCK_INSTRUCTIONS", 2000)
    body = init(1) + wait(opcode="mbarrier.test_wait.parity.shared.b64")
    assert_fails(DeadlockError, "instructions are executed, but no event occurs", body)


# Named barriers.

NAMED = [
    *("bar.sync", "bar.cta.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned"),
    *("barrier.sync", "barrier.cta.sync"),
    *("bar.arrive", "bar.cta.arrive"),
]


@pytest.mark.parametrize("opcode", [x for x in NAMED if "sync" in x])
@pytest.mark.parametrize("operands", ["%x", "3", "3, 96", "%x, %y"])
def test_after_a_barrier_of_all_warps_each_sees_what_all_did(opcode, operands):
    """Every warp sees all warps' earlier stores (9.7.13.1); without the barrier this is a race."""
    assert isa.OPCODES[opcode].section == SECTION
    body = f"""{DECLARED} mov.u32 %x, 3; mov.u32 %y, 96;
        mad.lo.u32 %d0, %thread, 7, 1; st.shared.u32 [%word], %d0; {{}}
        add.u32 %d0, %thread, 32; rem.u32 %d0, %d0, 96; mad.lo.u32 %d0, %d0, 4, %memory;
        ld.shared.u32 %d0, [%d0];{HERE} {{}} st.shared.u32 [%word], 0;"""
    statement = f"{opcode} {operands};"
    found = run(body.replace("{}", statement), results=[32], threads=96).results[0]
    assert found == [(i + 32) % 96 * 7 + 1 for i in range(96)]
    failing = body.replace("{}", "").replace("%d0", "%rank").replace(HERE, "")
    assert_fails(RaceError, ANY_RACE, failing, threads=96, schedule="eager")
    failing = body.replace("{}", statement, 1).replace("{}", "").replace("%d0", "%rank")
    failing = failing.replace(HERE, "")
    assert_fails(RaceError, "overwrites what is read from", failing, threads=96, schedule="eager")


@pytest.mark.parametrize("opcode", [x for x in NAMED if "arrive" in x])
def test_a_warp_that_arrives_does_not_wait(opcode):
    """The first warp produces twice and the second consumes; the third does not take part."""
    assert isa.OPCODES[opcode].section == SECTION
    produce = "".join(
        f"add.u32 %x, %x, 5; st.shared.u32 [%word], %x; {opcode} {i}, 64; bar.sync 2, 64;"
        for i in (0, 1)
    )
    consume = "".join(
        f"bar.sync {i}, 64; ld.shared.u32 %d{i}, [%word+-128]; bar.sync 2, 64;" for i in (0, 1)
    )
    body = f"""{DECLARED} mov.u32 %x, %thread; setp.lt.u32 %p, %thread, 32; @%p bra produce;
        setp.ge.u32 %p, %thread, 64; @%p bra end; {consume} bra end; produce: {produce} end:"""
    found = run(body, results=[32, 32], threads=96).results
    for i in (0, 1):
        assert found[i][32:64] == [lane + 5 * (i + 1) for lane in range(32)]
    # A warp that only arrives is not ordered after the other warps, even if it arrives last.
    body = f"""{DECLARED} setp.lt.u32 %p, %thread, 32; @%p bra first;
        st.shared.u32 [%word], 1; {{}} bra end;
        first: {SLOW} {SLOW} {{}} ld.shared.u32 %x, [%word+128];{HERE} end:"""
    run(body.replace("{}", "bar.sync 1, 64;"), threads=64, schedule="eager")
    late = body.replace("{}", "bar.sync 1, 64;", 1).replace("{}", f"{opcode} 1, 64;")
    assert_fails(RaceError, "reads what was written to", late, threads=64, schedule="eager")


@pytest.mark.parametrize(
    "statement, error, message",
    {
        "number": ("mov.u32 %x, 16; bar.sync %x;", EmulatorError, "the named barrier 16"),
        "threads": ("bar.sync 1, 33;", EmulatorError, "a barrier for 33 threads"),
        "no threads": ("bar.sync 1, 0;", EmulatorError, "a barrier for 0 threads"),
        "different": (
            "setp.lt.u32 %p, %thread, 32; selp.u32 %x, 64, 96, %p; bar.sync 1, %x;",
            EmulatorError,
            "for (64|96) threads, but earlier warps named (64|96)",
        ),
        "twice": ("bar.arrive 1, 96; bar.arrive 1, 96;", EmulatorError, "arrives twice"),
        "some lanes": (
            "setp.lt.u32 %p, %lane, 3; @%p bar.sync 1;",
            EmulatorError,
            r"bar.sync is not executed by all lanes, but only by \[0, 1, 2\]",
        ),
        "barriers of lanes": (
            "and.b32 %x, %lane, 1; bar.sync %x;",
            EmulatorError,
            "lanes of a warp name different barriers",
        ),
        "nobody else": (
            "bar.sync 4, 96;",
            DeadlockError,
            r"warp [01]: 32 lanes at line \d+: bar.sync .*"
            r"named barrier 4: warps \[.*\] of 3 have arrived",
        ),
    }.values(),
)
def test_invalid_uses_of_a_named_barrier_are_refused(statement, error, message):
    assert_fails(error, message, f"{DECLARED} {statement}{HERE}", threads=64)


def test_divergent_lanes_meet_at_a_barrier():
    """Both sides of a branch reach one bar.sync, which does not wait for lanes that exited."""
    body = f"""{DECLARED} setp.lt.u32 %p, %lane, 7; mov.u32 %d0, 1; @%p bra here;
        add.u32 %d0, %d0, 1; here: bar.sync 0; mov.u32 %x, %thread;"""
    found = run(body, results=[32], threads=64).results[0]
    assert found == [1 if i % 32 < 7 else 2 for i in range(64)]
    run(f"{DECLARED} setp.lt.u32 %p, %lane, 7; @%p exit; bar.sync 0; bar.sync 1, 64;", threads=64)


# Stores to other blocks that signal an mbarrier.

ASYNC_STORES = [
    f"st.async{order}.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32"
    for order, vector in itertools.product(("", ".weak"), ("", ".v2", ".v4"))
]


def exchanged(opcode=ASYNC_STORES[-1], *, to="%other", expects=True, waits=True, there="%y"):
    """Returns PTX in which the threads of two blocks send words to each other."""
    count = int(opcode.split(".v")[1][0]) if ".v" in opcode else 1
    words = "%global_thread" if count == 1 else f"{{{', '.join(['%global_thread'] * count)}}}"
    size = 4 * count
    expected = f"mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {32 * size};"
    return f"""{init(1)} .reg .b32 %other; xor.b32 %other, %rank, 1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        {FIRST} {expected if expects else "mbarrier.arrive.shared.b64 _, [%bar];"}
        mad.lo.u32 %word, %thread, {size}, %memory;
        mapa.shared::cluster.u32 %x, %word, {to}; mapa.shared::cluster.u32 %y, %bar, %other;
        {opcode} [%x], {words}, [{there}];
        {wait() if waits else ""} ld.shared.b32 %d0, [%word+{size - 4}];"""


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("opcode", ASYNC_STORES)
def test_a_st_async_stores_to_another_block_and_signals_it(opcode, schedule):
    assert isa.OPCODES[opcode].section == "9.7.9 data movement"
    (found,) = run(exchanged(opcode), results=[32], grid=2, cluster=2, schedule=schedule).results
    assert found == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(waits=False), "reads what was written to|has exited|exits"),
        (dict(expects=False), "more bytes|later phase|reads what|bytes are missing|has exited"),
        (dict(to="%rank"), "the data and the mbarrier of a st.async are in different blocks"),
        (dict(there="%bar"), "the data and the mbarrier of a st.async are in different blocks"),
        (dict(to="2"), "the cluster has no block 2"),
    ],
    ids=str,
)
def test_an_invalid_st_async_is_refused(changes, message):
    with pytest.raises(EmulatorError, match=message):
        run(exchanged(**changes), results=[32], grid=2, cluster=2, schedule="late")


# The barrier of a cluster.

ARRIVE = [
    f"barrier.cluster.arrive{order}{aligned}"
    for order, aligned in itertools.product(("", ".relaxed", ".release"), ("", ".aligned"))
]
WAIT = [
    f"barrier.cluster.wait{order}{aligned}"
    for order, aligned in itertools.product(("", ".acquire"), ("", ".aligned"))
]
REMOTE = """mov.u32 %y, 1; sub.u32 %y, %y, %rank; cvt.u64.u32 %address, %word;
    mapa.shared::cluster.u64 %address, %address, %y; cvta.shared.u64 %address, %address;"""


@pytest.mark.parametrize("arrive, wait_for", [*itertools.product(ARRIVE, WAIT)])
def test_blocks_of_a_cluster_read_each_others_memory(arrive, wait_for):
    """Without the barrier, or with a relaxed arrival, the reads are races (9.7.13.3)."""
    assert isa.OPCODES[arrive].section == isa.OPCODES[wait_for].section == SECTION
    body = f"""{DECLARED} {REMOTE} mad.lo.u32 %x, %thread, 3, %rank; st.shared.u32 [%word], %x;
        {{}} ld.u32 %x, [%address];{HERE} {arrive}; {wait_for};"""
    both = f"{arrive}; {wait_for};"
    if "relaxed" in arrive:
        message = "reads what was written to"
        assert_fails(RaceError, message, body.replace("{}", both), grid=2, cluster=2)
        return
    found = run(body.replace("{}", both) + "mov.u32 %d0, %x;", results=[32], grid=2, cluster=2)
    assert found.results[0] == [3 * i + 1 for i in range(32)] + [3 * i for i in range(32)]
    assert_fails(RaceError, "reads what was written to", body.replace("{}", ""), grid=2, cluster=2)


def test_a_block_waits_before_it_exits_if_its_memory_is_read():
    both = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""{DECLARED} {REMOTE} st.shared.u32 [%word], 1; {both} setp.eq.u32 %p, %rank, 0;
        @%p bra end; {SLOW} {SLOW} ld.u32 %x, [%address];{HERE} end:"""
    run(body + both, grid=2, cluster=2)
    assert_fails(EmulatorError, "block 0 of the cluster has exited", body, grid=2, cluster=2)


@pytest.mark.parametrize(
    "statement, error, message",
    [
        (
            "barrier.cluster.arrive; barrier.cluster.arrive;",
            EmulatorError,
            "a second arrival at the cluster's barrier",
        ),
        ("barrier.cluster.wait;", EmulatorError, "without an arrival"),
        (
            "barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.wait;",
            EmulatorError,
            "without an arrival",
        ),
        (
            "setp.eq.u32 %p, %lane, 0; @%p barrier.cluster.arrive.aligned;",
            EmulatorError,
            "not executed by all lanes",
        ),
        (
            "setp.eq.u32 %p, %rank, 0; @%p bra other; bar.sync 1, 64; other:"
            "barrier.cluster.arrive; barrier.cluster.wait;",
            DeadlockError,
            "block 0, warp 0: .*waits for the cluster's barrier: cluster 0, block 1, warp 0",
        ),
    ],
)
def test_invalid_uses_of_the_clusters_barrier_are_refused(statement, error, message):
    assert_fails(error, message, f"{DECLARED} {statement}{HERE}", grid=2, cluster=2)


def test_the_clusters_barrier_keeps_its_phases_apart():
    """A wait for the first phase does not order a block's actions before later arrivals."""
    both = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""{DECLARED} {REMOTE} barrier.cluster.arrive; setp.eq.u32 %p, %rank, 0; @%p bra slow;
        barrier.cluster.wait; st.shared.u32 [%word], 1; barrier.cluster.arrive;
        barrier.cluster.wait; bra end;
        slow: {SLOW} {SLOW} barrier.cluster.wait; {{}} ld.u32 %x, [%address];{HERE}
        {{}} end: {both}"""
    right = body.replace("{}", "barrier.cluster.arrive; barrier.cluster.wait;", 1).replace("{}", "")
    run(right, grid=2, cluster=2, schedule="eager")
    wrong = body.replace("{}", "", 1).replace("{}", both)
    assert_fails(RaceError, "reads what was written to", wrong, grid=2, cluster=2, schedule="eager")


def test_warps_that_exit_are_not_waited_for_at_the_clusters_barrier():
    body = "setp.eq.u32 %p, %warp, 1; @%p exit; barrier.cluster.arrive; barrier.cluster.wait;"
    run(DECLARED + body, grid=2, cluster=2, threads=64)


# Fences.

PROXY = ["fence.proxy.async", *(f"fence.proxy.async.{s}" for s in (*SPACES[1:], "global"))]
STORE = "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%t0, {0}], [%memory];"


@pytest.mark.parametrize("fence", ["", *PROXY])
def test_tma_reads_stores_only_after_a_proxy_fence(fence):
    """A fence for only global memory is not enough (9.7.13.4)."""
    body = f"""{DECLARED} mad.lo.u32 %x, %thread, 9, 1; st.shared.u32 [%word], %x;
        {fence and fence + ";"} bar.warp.sync -1; {FIRST} {STORE}{HERE}
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    arrays, maps = [bytes(256)], [words]
    if fence:
        assert isa.OPCODES[fence].section == SECTION
    if fence in ("", "fence.proxy.async.global"):
        message = "block 0, warp 0 wrote without a fence.proxy.async"
        assert_fails(RaceError, message, body, arrays=arrays, maps=maps)
    else:
        left = np.frombuffer(run(body, arrays=arrays, maps=maps).arrays[0], np.uint32)
        assert left.tolist() == [1, 10, 19, 28] + [0] * 60


@pytest.mark.parametrize("fence", PROXY[:3])
def test_a_fence_covers_the_stores_that_are_ordered_before_it(fence):
    """A fence before the barrier covers the stores of its own warp, but not another warp's."""
    body = f"""{DECLARED} setp.eq.u32 %p, %warp, 1; @%p st.shared.u32 [%word+-128], %thread; {{}}
        bar.sync 0; {{}} {FIRST} {STORE}{HERE}
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    options = dict(arrays=[bytes(256)], maps=[words], threads=64)
    everybody = body.replace("{}", f"{fence};", 1).replace("{}", "")
    reader = body.replace("{}", "", 1).replace("{}", f"{fence};")
    for right in (everybody, reader):
        left = np.frombuffer(run(right, **options).arrays[0], np.uint32)
        assert left.tolist() == [32, 33, 34, 35] + [0] * 60
    wrong = body.replace("{}", f"@!%p {fence};", 1).replace("{}", "")
    assert_fails(RaceError, "block 0, warp 1 wrote without a fence.proxy.async", wrong, **options)


ORDINARY = [
    *(
        f"fence.{order}.{scope}"
        for order, scope in itertools.product(("acq_rel", "sc"), ("cta", "cluster", "gpu", "sys"))
    ),
    *(f"membar.{scope}" for scope in ("cta", "gl", "sys")),
]
OTHERS = {"fence.mbarrier_init.release.cluster": "", "bar.warp.sync": "-1"}


@pytest.mark.parametrize("opcode", [*ORDINARY, *OTHERS])
def test_a_fence_changes_nothing_and_is_no_barrier_between_warps(opcode):
    assert isa.OPCODES[opcode].section == SECTION
    statement = f"{opcode} {OTHERS.get(opcode, '')};"
    body = f"""{DECLARED} mov.u32 %x, %thread; st.shared.u32 [%word], %x; {statement}
        ld.shared.u32 %d0, [%word]; mov.u32 %d1, %x;"""
    assert run(body, results=[32, 32]).results == [list(range(32))] * 2
    body = f"""{DECLARED} st.shared.u32 [%word], 1; {statement} xor.b32 %word, %word, 128;
        ld.shared.u32 %x, [%word];"""
    assert_fails(RaceError, ANY_RACE, body, threads=64)


def test_every_form_has_a_test():
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ == "tests.ptx_emulator.barriers"
    }
    tested = {*ARRIVALS, *INCOMPLETE, *EXPECTING, *WAITS, *INITS, *INVALS, *NAMED, *ARRIVE, *WAIT}
    assert registered == tested | {*PROXY, *ORDINARY, *OTHERS}
