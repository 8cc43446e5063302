"""Tests cp.async, cluster launch control and tensor maps of kernels against the PTX ISA (9.0).

Each case that must be refused has a valid counterpart, which is also run.
"""

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run
from tests.ptx_emulator.tma import TensorMap

COPY, SYNC, REPLACE = (
    "9.7.9.25 asynchronous copy",
    "9.7.13 synchronisation",
    "9.7.9.28 tensormap.replace",
)
CONTENT = np.random.default_rng(0).integers(1, 256, 4096).astype(np.uint8).tobytes()
FIRST = "@%first"

DECLARED = """.reg .b32 %bar, %memory, %to, %x, %y, %z; .reg .b64 %address, %map;
    .reg .pred %p, %first;
    .shared .align 1024 .b8 memory[4096]; .shared .align 8 .b64 bar[2];
    mov.u32 %bar, bar; mov.u32 %memory, memory; setp.eq.u32 %first, %thread, 0;
"""
WAITED = "wait: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0; @!%p bra wait;"

# The sizes of cp.async, and the numbers of copied bytes.

COPIES = {
    f"cp.async.{level}.shared{space}.global": sizes
    for level, sizes in (("ca", (4, 8, 16)), ("cg", (16,)))
    for space in ("", "::cta")
}
DONE = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("opcode", COPIES)
def test_copies_fill_with_zeros(opcode, schedule):
    """Lane i copies i modulo (size + 1) bytes, or all bytes without an operand (9.7.9.25.3)."""
    for name in (opcode, "cp.async.commit_group", "cp.async.wait_group"):
        assert isa.OPCODES[name].section == COPY
    for size in COPIES[opcode]:
        for given in ("", ", %x"):
            loads = f"ld.shared.b{min(size, 8) * 8} %d0, [%to];"
            loads += "ld.shared.b64 %d1, [%to+8];" if size == 16 else "mov.b64 %d1, 0;"
            body = f"""{DECLARED}
                mad.lo.u32 %to, %thread, {size}, %memory; rem.u32 %x, %thread, {size + 1};
                mad.wide.u32 %address, %thread, {size}, %m0;
                {opcode} [%to], [%address], {size}{given}; {DONE} {loads}"""
            found = run(body, results=[min(size, 8) * 8, 64], arrays=[CONTENT], schedule=schedule)
            for lane, (low, high) in enumerate(zip(*found.results)):
                copied = lane % (size + 1) if given else size
                wanted = CONTENT[size * lane : size * lane + copied].ljust(size, b"\0")
                assert (low | high << 64).to_bytes(size, "little") == wanted


CG = "cp.async.cg.shared.global"


def test_groups_are_waited_for_in_order():
    """All but the last n groups are complete; those n may not be read (9.7.9.25.3.3)."""
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; mad.wide.u32 %address, %thread, 16, %m0;
        {CG} [%to], [%address], 16; cp.async.commit_group;
        {CG} [%to+512], [%address+512], 16; cp.async.commit_group; cp.async.wait_group 1;
        ld.shared.u32 %x, [%to+FIRST];{HERE} cp.async.wait_group 0;
        ld.shared.u32 %y, [%to+512]; """
    words = np.frombuffer(CONTENT, np.uint32)
    for schedule in ("eager", "late", "random"):
        read = body.replace("FIRST", "0") + "mov.b32 %d0, %x; mov.b32 %d1, %y;"
        found = run(read, results=[32, 32], arrays=[CONTENT], schedule=schedule).results
        assert found == [words[:128:4].tolist(), words[128:256:4].tolist()]
        message = "reads what was written to .*nothing orders it after the cp.async of block 0"
        assert_fails(
            RaceError, message, body.replace("FIRST", "512"), arrays=[CONTENT], schedule=schedule
        )


def test_other_warps_may_read_a_copy_after_a_wait_and_a_barrier():
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; mad.wide.u32 %address, %thread, 16, %m0;
        {CG} [%to], [%address], 16; cp.async.commit_group; WAIT bar.sync 0; xor.b32 %x, %thread, 32;
        mad.lo.u32 %to, %x, 16, %memory; ld.shared.u32 %x, [%to];{HERE}"""
    wait = "cp.async.wait_group 0;"
    read = body.replace("WAIT", wait) + "mov.b32 %d0, %x;"
    found = run(read, results=[32], arrays=[CONTENT], threads=64).results[0]
    words = np.frombuffer(CONTENT, np.uint32)[:256:4].tolist()
    assert found == words[32:] + words[:32]
    assert_fails(
        RaceError, "the cp.async of", body.replace("WAIT", ""), arrays=[CONTENT], threads=64
    )


def test_a_copy_belongs_to_the_generic_proxy():
    """TMA may read the copied bytes after a fence (9.7.9.25.2)."""
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; mad.wide.u32 %address, %thread, 16, %m0;
        {CG} [%to], [%address], 16; {DONE} FENCE bar.sync 0;
        {FIRST} cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%t0, {{0}}], [%memory];{HERE}
        {FIRST} cp.async.bulk.commit_group; {FIRST} cp.async.bulk.wait_group 0;"""
    launch = dict(arrays=[CONTENT, bytes(512)], maps=[lambda _, to: words_at(to)])
    found = run(body.replace("FENCE", "fence.proxy.async.shared::cta;"), **launch)
    assert found.arrays[1] == CONTENT[:512]
    assert_fails(
        RaceError, "cp.async of .* without a fence.proxy", body.replace("FENCE", ""), **launch
    )


def words_at(address):
    """Returns the map of a tensor of 128 words, which is one box."""
    return TensorMap(address, 4, (128,), (4,), (128,), 0)


@pytest.mark.parametrize(
    "statement, error, message",
    [
        ("cp.async.cg.shared.global [%to], [%address], 8;", UnsupportedError, "a copy of 8 bytes"),
        ("cp.async.ca.shared.global [%to], [%address], 2;", UnsupportedError, "a copy of 2 bytes"),
        (f"{CG} [%to], [%address], 16, %first;", UnsupportedError, "a register of 1 bits"),
        (f"{CG} [%to], [%address], 16, 16, %map;", UnsupportedError, "a cache policy"),
        (f"{CG} [%to], [%address], 16, 17;", EmulatorError, "copies 17 of 16 bytes"),
        (f"{CG} [%to+8], [%address], 16;", EmulatorError, "is not aligned"),
        (f"{CG} [%to], [%address+8], 16;", EmulatorError, "its source is not aligned"),
        (f"{CG} [%to], [%address+4096], 16;", EmulatorError, "outside of all arrays"),
        (f"{CG} [%to+4096], [%address], 16;", EmulatorError, "outside of its"),
        (f"{CG}.L2::128B [%to], [%address], 16;", UnsupportedError, "not among the known"),
        ("@%first cp.async.commit_group;", UnsupportedError, "by 1 lanes"),
        ("@%first cp.async.wait_group 0;", UnsupportedError, "by 1 lanes"),
        ("cp.async.wait_group %x;", UnsupportedError, "is not an integer constant"),
        ("cp.async.wait_all;", UnsupportedError, "not among the known"),
    ],
)
def test_copies_that_are_refused(statement, error, message):
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; mad.wide.u32 %address, %thread, 16, %m0;
        {{}}{HERE} {DONE}"""
    run(body.replace("{}", f"{CG} [%to], [%address], 16, 8;"), arrays=[CONTENT])
    assert_fails(error, message, body.replace("{}", statement), arrays=[CONTENT])


# Cluster launch control.

CANCELS = [
    f"clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{many}.b128"
    for many in ("", ".multicast::cluster::all")
]
QUERY = "clusterlaunchcontrol.query_cancel"
CANCELED = f"{QUERY}.is_canceled.pred.b128"
FIRSTS = [f"{QUERY}.get_first_ctaid{part}.b32.b128" for part in (".v4", "::x", "::y", "::z")]
FENCES = [
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
]


def asking(opcode, first):
    """Lets every block mark the blocks whose work it does, until no request succeeds."""
    reads = {
        "v4": f"{FIRSTS[0]} {{%x, %y, %z, _}}, handle;",
        "x": f"{FIRSTS[1]} %x, handle; {FIRSTS[2]} %y, handle; {FIRSTS[3]} %z, handle;",
    }[first]
    return f"""{DECLARED} .reg .b128 handle; .reg .b32 %phase, %seen, %rank;
        {FIRST} mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mov.u32 %phase, 0; mov.u32 %seen, %ctaid.x; mov.u32 %rank, %cluster_ctarank;
        setp.eq.and.u32 %first, %rank, 0, %first;
        again: mad.wide.u32 %address, %seen, 4, %m0; st.global.u32 [%address], 1;
        setp.eq.u32 %p, %thread, 0; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        {FENCES[1]}; {FIRST} {opcode} [%memory], [%bar];
        wait: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %phase; @!%p bra wait;
        ld.shared.b128 handle, [%memory]; {FENCES[0]};
        {CANCELED} %p, handle; @!%p bra end; {reads}
        add.u32 %seen, %x, %rank; or.b32 %y, %y, %z; setp.ne.u32 %p, %y, 0; @%p trap;
        xor.b32 %phase, %phase, 1; bar.sync 0; bra again;
        end: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("first", ["v4", "x"])
@pytest.mark.parametrize("opcode, cluster", [(CANCELS[0], 1), (CANCELS[1], 1), (CANCELS[1], 2)])
def test_the_work_of_every_block_is_done_once(opcode, cluster, first, schedule):
    """Blocks take over the work of blocks that have not started (9.7.13.17 and 9.7.13.18)."""
    for name in (opcode, CANCELED, *FIRSTS, *FENCES):
        assert isa.OPCODES[name].section == SYNC
    launch = dict(arrays=[bytes(32)], grid=8, cluster=cluster, schedule=schedule)
    for resident in (1, 2):
        found = run(asking(opcode, first), resident=resident, **launch)
        assert np.frombuffer(found.arrays[0], np.uint32).tolist() == [1] * 8


def test_asking_again_after_a_failure_is_refused():
    """Another request after a failure is undefined (9.7.13.17)."""
    body = asking(CANCELS[0], "v4").replace("@!%p bra end; ", "@!%p bra once; ")
    body += f"bra over; once: xor.b32 %phase, %phase, 1; bar.sync 0;{HERE} bra again; over:"
    assert_fails(
        EmulatorError,
        "a clusterlaunchcontrol.try_cancel after one that failed",
        body.replace(HERE, ""),
        arrays=[bytes(32)],
        grid=2,
    )


def test_invalid_responses_are_refused():
    """The invalid handles are one that was never written, and that of a failed request."""
    body = f"""{DECLARED} .reg .b128 handle; st.shared.v2.u64 [%memory], {{7, 7}}; bar.sync 0;
        ld.shared.b128 handle, [%memory]; {CANCELED} %p, handle;{HERE}"""
    assert_fails(
        EmulatorError, "the handle is not a clusterlaunchcontrol.try_cancel response", body
    )
    body = asking(CANCELS[0], "v4").replace("@!%p bra end; ", "")
    message = "get_first_ctaid reads a response without a cancelled cluster"
    assert_fails(EmulatorError, message, body, arrays=[bytes(32)], grid=1)


def test_an_answer_that_is_still_being_read_is_not_overwritten():
    """The second warp still reads a response when the first warp requests the next one."""
    body = f"""{DECLARED} {FIRST} mbarrier.init.shared::cta.b64 [%bar], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0; setp.ge.u32 %p, %thread, 32;
        @%p ld.shared.u32 %x, [%memory]; ORDER {"add.u32 %y, %y, 1;" * 500}
        {FIRST} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
        {FIRST} {CANCELS[0]} [%memory], [%bar];{HERE} {WAITED}"""
    run(body.replace("ORDER", "bar.sync 0;"), threads=64)
    message = "the try_cancel of line .* overwrites what is read from"
    assert_fails(RaceError, message, body.replace("ORDER", ""), threads=64, schedule="eager")


@pytest.mark.parametrize("opcode", FENCES)
def test_one_way_fences_do_not_publish_ordinary_stores(opcode):
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; st.shared.u32 [%to], %thread;
        FENCE; bar.sync 0;
        {FIRST} cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%t0, {{0}}], [%memory];{HERE}
        {FIRST} cp.async.bulk.commit_group; {FIRST} cp.async.bulk.wait_group 0;"""
    launch = dict(arrays=[bytes(512)], maps=[words_at])
    run(body.replace("FENCE", "fence.proxy.async.shared::cta"), **launch)
    assert_fails(RaceError, "without a fence.proxy.async", body.replace("FENCE", opcode), **launch)


# Tensor maps.

FIELD = "tensormap.replace.tile.{}.shared::cta.b1024.{}"
REPLACES = {
    **{FIELD.format(name, "b64"): name for name in ("global_address", "global_stride")},
    **{
        FIELD.format(name, "b32"): name
        for name in (
            *("rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"),
            *("box_dim", "global_dim", "element_stride"),
        )
    },
}
SCOPES = ("cta", "cluster", "gpu", "sys")
PUBLISHES = [
    f"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope}.sync.aligned"
    for scope in SCOPES
]
ACQUIRES = [f"fence.proxy.tensormap::generic.acquire.{scope}" for scope in SCOPES]

# A matrix of 8 rows and 64 columns of 16 bits, in boxes of 8 rows and 32 columns.
FIELDS = (
    ("rank", None, "1"),
    ("elemtype", None, "6"),
    ("interleave_layout", None, "0"),
    ("swizzle_mode", None, "2"),
    ("fill_mode", None, "0"),
    ("box_dim", 0, "32"),
    ("box_dim", 1, "8"),
    ("global_dim", 0, "64"),
    ("global_dim", 1, "8"),
    ("element_stride", 0, "1"),
    ("element_stride", 1, "1"),
)


def making(fields=FIELDS, publish=PUBLISHES[2], acquire=ACQUIRES[2], fill="st.shared.u32"):
    """Makes a map in shared memory, copies it to the second array, and loads the second box."""
    sets = "".join(
        f"{FIRST} {FIELD.format(name, 'b32')} [%map], {'' if i is None else f'{i}, '}{value};\n"
        for name, i, value in fields
    )
    return f"""{DECLARED} cvt.u64.u32 %map, %memory; add.u64 %map, %map, 2048;
        mad.lo.u32 %to, %thread, 4, %memory; {fill} [%to+2048], 0;
        {FIRST} mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
        bar.sync 0; {FIRST} {FIELD.format("global_address", "b64")} [%map], %m0;
        {FIRST} {FIELD.format("global_stride", "b64")} [%map], 0, 128;
        {sets} bar.warp.sync -1; {publish} [%m1], [%map], 128;
        {acquire} [%m1], 128; fence.proxy.async.shared::cta; bar.sync 0;
        {FIRST} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
        {FIRST} cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%memory],
            [%m1, {{32, 0}}], [%bar];
        {WAITED} mad.lo.u32 %to, %thread, 16, %memory; ld.shared.v2.u64 {{%d0, %d1}}, [%to];"""


ARRAYS = [CONTENT[:1024], bytes(128)]


@pytest.mark.parametrize("publish, acquire", list(zip(PUBLISHES, ACQUIRES)))
def test_a_tensor_map_that_the_kernel_makes(publish, acquire):
    """The map is as in 9.7.9.28 and 9.7.13.19; its swizzle permutes the 16-byte units of a row."""
    assert {isa.OPCODES[opcode].section for opcode in REPLACES} == {REPLACE}
    assert isa.OPCODES[publish].section == isa.OPCODES[acquire].section == SYNC
    found = run(making(publish=publish, acquire=acquire), results=[64, 64], arrays=ARRAYS)
    box = np.frombuffer(ARRAYS[0], np.uint8).reshape(8, 128)[:, 64:].reshape(-1, 16)
    for unit, (low, high) in enumerate(zip(*found.results)):
        source = unit ^ unit >> 3 & 3
        assert (low | high << 64).to_bytes(16, "little") == box[source].tobytes()


def changed(name, value):
    """Returns FIELDS with a different value of one field."""
    return [(x, i, value if x == name else old) for x, i, old in FIELDS]


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(acquire="// "), RaceError, "no fence.proxy.tensormap that acquires it"),
        (dict(publish="// "), EmulatorError, "no tensor map has been copied to"),
        (dict(fields=changed("element_stride", "2")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("elemtype", "13")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("swizzle_mode", "4")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("fill_mode", "1")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("interleave_layout", "1")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("rank", "5")), UnsupportedError, "a tensor map with"),
        (dict(fields=changed("rank", "0")), EmulatorError, "a copy of 2 dimensions"),
        (dict(fields=changed("box_dim", "257")), EmulatorError, "a side of the box"),
        (
            dict(fields=[*FIELDS, ("rank", 0, "1")]),
            UnsupportedError,
            "1 ordinals for rank, expected 0",
        ),
        (dict(fields=[*FIELDS, ("box_dim", 5, "1")]), EmulatorError, "box_dim of dimension 5"),
        (
            dict(fields=[*FIELDS, ("elemtype", None, "%x")]),
            UnsupportedError,
            "is not an integer constant",
        ),
        (dict(publish=f"{FIRST} {PUBLISHES[0]}"), EmulatorError, "not executed by all lanes"),
        (dict(fill="// "), UnsupportedError, "a tensor map with"),
    ],
)
def test_maps_that_are_refused(options, error, message):
    """Fields that are not written have poisoned values."""
    body = making(**options).replace("{%d0, %d1}", "{%address, %map}")
    assert_fails(error, message, body.replace("// ", "//"), arrays=ARRAYS)


# Warnings that may be allowed by name.


def test_two_warps_that_store_the_same_value_are_a_warning():
    body = f"""{DECLARED} shr.u32 %x, %thread, 6; st.shared.u32 [%memory], %x; bar.sync 0;
        ld.shared.u32 %y, [%memory];"""
    allowed = frozenset({"same value stored"})
    found = run(body + "mov.b32 %d0, %y;", results=[32], threads=64, allowed=allowed)
    assert found.results == [[0] * 64]
    assert_fails(RaceError, "overwrites what was written to", body, threads=64)
    other = body.replace("6;", "5;")
    assert_fails(RaceError, "overwrites what was written to", other, threads=64, allowed=allowed)


def test_an_exit_before_a_store_has_read_is_a_warning():
    body = f"""{DECLARED}
        mad.lo.u32 %to, %thread, 16, %memory; st.shared.u32 [%to], %thread;
        fence.proxy.async.shared::cta; bar.sync 0;
        {FIRST} cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%t0, {{0}}], [%memory];
        {FIRST} cp.async.bulk.commit_group;"""
    launch = dict(arrays=[bytes(512)], maps=[words_at], schedule="late")
    found = run(body, allowed=frozenset({"exit before a store's read"}), **launch)
    assert np.frombuffer(found.arrays[0], np.uint32)[::4].tolist() == list(range(32))
    assert_fails(
        EmulatorError, "exits before a TMA store .* its read of shared memory", body, **launch
    )


def test_every_form_has_a_test():
    modules = [
        f"tests.ptx_emulator.{name}"
        for name in ("cp_async", "cluster_launch_control", "tensormap_replace")
    ]
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ in modules
    }
    groups = {"cp.async.commit_group", "cp.async.wait_group"}
    asked = {*CANCELS, CANCELED, *FIRSTS, *FENCES}
    assert registered == {*COPIES, *REPLACES, *PUBLISHES, *ACQUIRES} | groups | asked
