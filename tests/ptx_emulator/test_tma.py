"""Tests tensor maps and asynchronous copies against the PTX ISA (9.0), 9.7.9.25 and 5.5.

The reference copies a box element by element. Each case that must be refused has a valid
counterpart, which is also run.
"""

import itertools
import random

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import EmulatorError, RaceError, UnsupportedError
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run
from tests.ptx_emulator.references import swizzled_address
from tests.ptx_emulator.tma import TensorMap

SECTION = "9.7.9.25 asynchronous copy"

RANKS = range(1, 6)
SWIZZLES = (0, 32, 64, 128)
ARRIVAL = "mbarrier::complete_tx::bytes"
LOADS = [
    f"cp.async.bulk.tensor.{rank}d.{to}.global{tile}.{ARRIVAL}{group}"
    for rank, to, tile, group in itertools.product(
        RANKS,
        ("shared::cta", "shared::cluster"),
        ("", ".tile"),
        ("", ".cta_group::1", ".cta_group::2"),
    )
]
MULTICASTS = [
    f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{tile}.{ARRIVAL}.multicast::cluster{group}"
    for rank, tile, group in itertools.product(
        RANKS, ("", ".tile"), ("", ".cta_group::1", ".cta_group::2")
    )
]
STORES = [
    f"cp.async.bulk.tensor.{rank}d.global.shared::cta{tile}.bulk_group"
    for rank, tile in itertools.product(RANKS, ("", ".tile"))
]

BASE = 1024  # Offset in shared memory at which a block's variables begin.
ROOM = 4096


class Tensor:
    """A tensor of this rank in an array of random bytes, and a box of 16 rows (1 row in rank 1)."""

    def __init__(self, rank, swizzle, itemsize=2):
        generator = random.Random(f"{rank} {swizzle}")
        inner = (swizzle or 48) // itemsize
        self.rank, self.swizzle, self.itemsize = rank, swizzle, itemsize
        self.box = (inner, *((16,), (4, 4), (4, 2, 2), (2, 2, 2, 2))[rank - 2])[:rank]
        if rank == 1:
            self.box = (inner,)
        # No size is a multiple of the box's, and there are gaps between rows.
        self.dimensions = tuple(side + 3 for side in self.box)
        strides = [itemsize]
        extent = self.dimensions[0] * itemsize
        for side in self.dimensions[1:]:
            strides.append(-(-extent // 16) * 16 + 16)
            extent = strides[-1] * side
        self.strides = tuple(strides)
        self.content = generator.randbytes(-(-extent // 16) * 16)
        self.bytes = int(np.prod(self.box)) * itemsize

    def map(self, address, *_):
        return TensorMap(
            address, self.itemsize, self.dimensions, self.strides, self.box, self.swizzle
        )

    def places(self, *, stores=False):
        """Yields coordinates inside the tensor, across its ends and outside of it.

        Loads may also begin before the tensor. Every place is a multiple of 16 bytes into its row.
        """
        unit = 16 // self.itemsize
        found = [
            range(1, self.rank + 1),
            [d - s // 2 for d, s in zip(self.dimensions, self.box)],
            (self.dimensions[0] + unit, *(0,) * (self.rank - 1)),
        ]
        if not stores:
            found += [[-(s // 2) for s in self.box], (-2, *(1,) * (self.rank - 1))]
        for first, *rest in found:
            yield (-(-first // unit) * unit if first > 0 else first // unit * unit, *rest)

    def elements(self, place, begin=BASE, *, unit=1):
        """Yields (byte of the array, byte of shared memory) of each element of a box.

        The byte of the array is None beyond the tensor, whose rows are extended to whole units of
        `unit` elements.
        """
        columns, *rest = self.dimensions
        dimensions = (-(-columns // unit) * unit, *rest)
        for i, index in enumerate(np.ndindex(*self.box[::-1])):
            at = [p + k for p, k in zip(place, index[::-1])]
            inside = all(0 <= a < d for a, d in zip(at, dimensions))
            source = sum(a * s for a, s in zip(at, self.strides)) if inside else None
            yield source, swizzled_address(begin + i * self.itemsize, self.swizzle)

    def loaded(self, place):
        """Returns the shared memory from BASE on after a load; unwritten bytes are 0xFF."""
        memory = bytearray(b"\xff" * ROOM)
        size = self.itemsize
        for source, target in self.elements(place):
            found = bytes(size) if source is None else self.content[source : source + size]
            memory[target - BASE : target - BASE + size] = found
        return bytes(memory)

    def stored(self, place, memory):
        """Returns the array after a store, which writes units of 16 bytes like an H200."""
        left, size = bytearray(self.content), self.itemsize
        for target, source in self.elements(place, unit=16 // size):
            if target is not None:
                left[target : target + size] = memory[source - BASE : source - BASE + size]
        return bytes(left)


def test_the_pattern_of_128_bytes_is_that_of_the_figure():
    """The expected rows of 16-byte units are from the figures of 5.5.7."""
    found = [
        [swizzled_address(128 * r + 16 * c, 128) // 16 % 8 for c in range(8)] for r in range(8)
    ]
    assert found[:3] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
    ]
    assert found[7] == [7, 6, 5, 4, 3, 2, 1, 0]
    found = [[swizzled_address(64 * r + 16 * c, 64) // 16 % 4 for c in range(4)] for r in range(8)]
    assert found == [[c ^ r // 2 for c in range(4)] for r in range(8)]
    found = [[swizzled_address(32 * r + 16 * c, 32) // 16 % 2 for c in range(2)] for r in range(8)]
    assert found == [[c ^ r // 4 for c in range(2)] for r in range(8)]


DECLARED = f""".shared .align 1024 .b8 memory[{ROOM}]; .shared .align 8 .b64 bar[2];
    .reg .b32 %memory, %bar, %word, %rank, %to, %signal, %bytes, %x; .reg .b16 %mask;
    .reg .b64 %place; .reg .pred %first, %p, %over, %issuer;
    mov.u32 %memory, memory; mov.u32 %bar, bar; mov.u32 %rank, %cluster_ctarank;
    setp.eq.u32 %first, %thread, 0; mad.lo.u32 %word, %thread, 4, %memory; mov.u32 %to, %memory;
    @%first mbarrier.init.shared.b64 [%bar], 1; @%first fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
WAIT = """{ again: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %over, [%bar], 0;
    @!%over bra again; }
"""


def dump(array=1):
    """Returns PTX that copies each block's memory to its part of an array."""
    text = (
        f"mad.wide.u32 %place, %block, {ROOM}, %m{array}; mad.wide.u32 %place, %thread, 4, %place;"
    )
    for at in range(0, ROOM, 128):
        text += f"ld.shared.u32 %x, [%word+{at}]; st.global.u32 [%place+{at}], %x;\n"
    return text


def coordinates(place):
    return f"{{{', '.join(map(str, place))}}}"


def expect(bytes_):
    return f"@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {bytes_};"


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("rank", RANKS)
def test_boxes_of_every_rank_and_swizzle_are_loaded_and_stored(rank, swizzle):
    """Loads and stores are at all coordinates; loads from outside of the tensor return zeros."""
    for i, itemsize in enumerate((1, 2, 4, 8, 2)):
        tensor = Tensor(rank, swizzle, itemsize)
        place = list(tensor.places())[i]
        at = coordinates(place)
        load = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.{ARRIVAL}"
        body = f"""{DECLARED} {expect(tensor.bytes)}
            @%first {load} [%memory], [%t0, {at}], [%bar]; {WAIT} {dump()}"""
        found = run(body, arrays=[tensor.content, bytes(ROOM)], maps=[tensor.map]).arrays
        assert found == [tensor.content, tensor.loaded(place)]
        place = list(tensor.places(stores=True))[i % 3]
        at = coordinates(place)
        store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
        memory = random.Random(rank).randbytes(ROOM)
        body = f"""{DECLARED} {filled()} @%first {store} [%t0, {at}], [%memory];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
        found = run(body, arrays=[tensor.content, memory], maps=[tensor.map]).arrays
        assert found == [tensor.stored(place, memory), memory]


def filled(fence="fence.proxy.async.shared::cta;", array=1):
    """Returns PTX that copies an array to the block's memory."""
    text = f"mad.wide.u32 %place, %thread, 4, %m{array};"
    for at in range(0, ROOM, 128):
        text += f"ld.global.u32 %x, [%place+{at}]; st.shared.u32 [%word+{at}], %x;\n"
    return text + fence + "bar.sync 0;"


def in_cluster(statement, signals, issuers, blocks=4):
    """Returns the text and the options of a kernel in which some blocks execute a load.

    Args:
      signals: bytes that arrive at each block's barrier.
      issuers: ranks of the blocks that load.
    """
    issues = "setp.ne.u32 %issuer, %thread, %thread;"
    for rank in issuers:
        issues += f"setp.eq.or.u32 %issuer, %rank, {rank}, %issuer;"
    text = f"{DECLARED} {CLUSTER} {issues} and.pred %issuer, %issuer, %first; mov.u32 %bytes, 0;"
    for rank, bytes_ in enumerate(signals):
        text += f"setp.eq.u32 %p, %rank, {rank}; @%p mov.u32 %bytes, {bytes_};"
    text += f"""{expect("%bytes")} {statement} {WAIT} {CLUSTER} {dump()}"""
    return text, dict(grid=blocks, cluster=blocks)


def memories(text, options, tensor):
    arrays = [tensor.content, bytes(ROOM * options["grid"])]
    left = run(text, arrays=arrays, maps=[tensor.map], **options).arrays[1]
    return [left[i : i + ROOM] for i in range(0, len(left), ROOM)]


NOTHING = b"\xff" * ROOM


@pytest.mark.parametrize("opcode", LOADS)
def test_a_load_of_one_block(opcode):
    """With cta_group::2 the barrier may be in the other block of the pair."""
    assert isa.OPCODES[opcode].section == SECTION
    rank = int(opcode[len("cp.async.bulk.tensor.")])
    tensor = Tensor(rank, 128)
    place = next(tensor.places())
    pair = "cta_group::2" in opcode
    signal = "and.b32 %x, %rank, 2; mapa.shared::cluster.u32 %signal, %bar, %x;"
    statement = f"""mov.u32 %signal, %bar; {signal if pair else ""}
        @%issuer {opcode} [%memory], [%t0, {coordinates(place)}], [%signal];{HERE}"""
    size = tensor.bytes
    signals = [2 * size, 0, size, 0] if pair else [size, size, 0, size]
    issuers = (0, 1, 3)
    text, options = in_cluster(statement, signals, issuers)
    found = memories(text, options, tensor)
    assert found == [tensor.loaded(place) if i in issuers else NOTHING for i in range(4)]
    arrays = [tensor.content, bytes(4 * ROOM)]
    if pair:
        wrong = text.replace("and.b32 %x, %rank, 2", "mov.u32 %x, 2")
        message = "an mbarrier outside of the pair"
    else:
        wrong = text.replace("mov.u32 %signal, %bar;", signal)
        message = "the data and the mbarrier are in different blocks"
    assert_fails(EmulatorError, message, wrong, arrays=arrays, maps=[tensor.map], **options)


@pytest.mark.parametrize("opcode", [x for x in LOADS if "shared::cta" in x])
def test_shared_cta_is_the_own_block(opcode):
    tensor = Tensor(int(opcode[len("cp.async.bulk.tensor.")]), 128)
    at = coordinates(next(tensor.places()))
    statement = f"""mapa.shared::cluster.u32 %to, %memory, 1;
        mapa.shared::cluster.u32 %signal, %bar, 1;
        @%issuer {opcode} [%to], [%t0, {at}], [%signal];{HERE}"""
    text, options = in_cluster(statement, [0, tensor.bytes], [0], 2)
    options |= dict(arrays=[tensor.content, bytes(2 * ROOM)], maps=[tensor.map])
    assert_fails(
        EmulatorError,
        "a shared::cta copy to block 1, expected the warp's own block",
        text,
        **options,
    )
    found = run(text.replace("shared::cta.global", "shared::cluster.global"), **options).arrays[1]
    assert found == NOTHING + tensor.loaded(next(tensor.places()))


@pytest.mark.parametrize(
    "opcode, mask",
    [(x, mask) for x in MULTICASTS for mask in ((2, 15, 9) if ".2d." in x else (11,))],
)
def test_a_load_arrives_in_several_blocks(opcode, mask):
    """Data and barrier have the same offsets in every block.

    With cta_group::2 the signal goes, in each receiving pair, to the block whose rank has the
    parity of the given barrier's block (9.7.9.25.5.2).
    """
    assert isa.OPCODES[opcode].section == SECTION
    tensor = Tensor(int(opcode[len("cp.async.bulk.tensor.")]), 128)
    place = next(tensor.places())
    statement = f"""mov.b16 %mask, {mask}; mapa.shared::cluster.u32 %signal, %bar, 1;
        @%issuer {opcode} [%memory], [%t0, {coordinates(place)}], [%signal], %mask;{HERE}"""
    signals = [0] * 4
    for block in range(4):
        if mask >> block & 1:
            signals[block | 1 if "cta_group::2" in opcode else block] += tensor.bytes
    text, options = in_cluster(statement, signals, [2])
    wanted = [tensor.loaded(place) if mask >> i & 1 else NOTHING for i in range(4)]
    assert memories(text, options, tensor) == wanted
    text, options = in_cluster(statement.replace(str(mask), "16", 1), [0] * 4, [2])
    arrays = [tensor.content, bytes(4 * ROOM)]
    message = "the cluster has no block [45]"
    assert_fails(EmulatorError, message, text, arrays=arrays, maps=[tensor.map], **options)


@pytest.mark.parametrize("opcode", STORES)
def test_a_store(opcode):
    assert isa.OPCODES[opcode].section == SECTION
    tensor = Tensor(int(opcode[len("cp.async.bulk.tensor.")]), 64)
    memory = random.Random(3).randbytes(ROOM)
    for place in tensor.places(stores=True):
        body = f"""{DECLARED} {filled()} @%first {opcode} [%t0, {coordinates(place)}], [%memory];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"""
        found = run(body, arrays=[tensor.content, memory], maps=[tensor.map], schedule="late")
        assert found.arrays == [tensor.stored(place, memory), memory]
    statement = f"""mapa.shared::cluster.u32 %to, %memory, 1;
        @%issuer {opcode} [%t0, {coordinates(place)}], [%to];{HERE}"""
    text, options = in_cluster(statement, [0, 0], [0], 2)
    options |= dict(arrays=[tensor.content, bytes(2 * ROOM)], maps=[tensor.map])
    assert_fails(
        EmulatorError,
        "a shared::cta copy from block 1, expected the warp's own block",
        text,
        **options,
    )


def test_a_box_begins_at_16_bytes():
    """An H200 traps if a box begins elsewhere."""
    tensor = Tensor(2, 64)
    load = f"cp.async.bulk.tensor.2d.shared::cta.global.{ARRIVAL}"
    body = f"{DECLARED} {expect(tensor.bytes)} @%first {load} [%memory], [%t0, {{4, 0}}], [%bar];"
    options = dict(arrays=[tensor.content], maps=[tensor.map])
    assert_fails(
        EmulatorError,
        r"\(4, 0\): a box does not begin at a multiple of 16 bytes",
        body + HERE,
        **options,
    )


@pytest.mark.parametrize("place", ["-8, 0", "0, -1"])
def test_a_store_does_not_begin_before_the_tensor(place):
    """An H200 traps at such a store."""
    tensor = Tensor(2, 64)
    store = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    body = f"{DECLARED} {filled()} @%first {store} [%t0, {{{place}}}], [%memory];{HERE}"
    options = dict(arrays=[tensor.content, bytes(ROOM)], maps=[tensor.map])
    assert_fails(EmulatorError, "begins outside of the tensor", body, **options)


def test_narrow_swizzled_rows_take_the_swizzles_bytes():
    """Like an H200, the emulator does not change the bytes between the rows."""
    content = random.Random(5).randbytes(256)
    narrow = lambda at, *_: TensorMap(at, 1, (64, 4), (1, 64), (32, 4), 128)  # noqa: E731
    load = f"cp.async.bulk.tensor.2d.shared::cta.global.{ARRIVAL}"
    body = f"""{DECLARED} {expect(128)}
        @%first {load} [%memory], [%t0, {{16, 0}}], [%bar]; {WAIT} {dump()}"""
    found = run(body, arrays=[content, bytes(ROOM)], maps=[narrow]).arrays[1]
    wanted = bytearray(b"\xff" * ROOM)
    for row, i in itertools.product(range(4), range(32)):
        wanted[swizzled_address(BASE + 128 * row + i, 128) - BASE] = content[64 * row + 16 + i]
    assert found == bytes(wanted)


# Each store writes four words.


def words(address, *_):
    """Returns the map of a tensor of 64 words, in boxes of 16 bytes."""
    return TensorMap(address, 4, (64,), (4,), (4,), 0)


STORE = "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group"
LOAD = f"cp.async.bulk.tensor.1d.shared::cta.global.{ARRIVAL}"
COMMIT, READ, ALL = (
    f"cp.async.bulk.{x}" for x in ("commit_group", "wait_group.read", "wait_group")
)


def three_stores(wait, *commits):
    """Lets one thread store three times, and sums the words that reached global memory in %d0."""
    text = DECLARED + "mov.u32 %x, 1; st.shared.u32 [%word], %x; st.shared.u32 [%word+128], %x;"
    text += "st.shared.u32 [%word+256], %x; fence.proxy.async; bar.sync 0;"
    for i, commit in enumerate(commits):
        text += f"@%first {STORE} [%t0, {{{4 * i}}}], [%memory+{128 * i}];"
        text += f"@%first {COMMIT};" * commit
    text += f"@%first {wait};"
    for i in range(3):
        text += f"ld.global.u32 %d{i}, [%m0+{16 * i}];"
    return f"{text} @%first {COMMIT}; @%first {READ} 0;"


@pytest.mark.parametrize(
    "wait, commits, done",
    [
        (f"{ALL} 0", (1, 1, 1), (1, 1, 1)),
        (f"{ALL} 1", (1, 1, 1), (1, 1, 0)),
        (f"{ALL} 2", (1, 1, 1), (1, 0, 0)),
        (f"{ALL} 3", (1, 1, 1), (0, 0, 0)),
        (f"{ALL} 0", (0, 1, 0), (1, 1, 0)),
        (f"{ALL} 1", (1, 0, 2), (1, 1, 1)),
        (f"{ALL} 0", (0, 0, 0), (0, 0, 0)),
        (f"{READ} 0", (1, 1, 1), (0, 0, 0)),
    ],
)
def test_groups_of_stores(wait, commits, done):
    """A wait is for all stores of all groups except the last n (9.7.9.25.3).

    A store that is not committed is in no group. Stores without a wait complete at any time.
    """
    for opcode in (COMMIT, READ, ALL):
        assert isa.OPCODES[opcode].section == SECTION
    found = []
    for seed in range(24):
        left = run(
            three_stores(wait, *commits),
            results=[32] * 3,
            arrays=[bytes(256)],
            maps=[words],
            schedule="random" if seed else "late",
            seed=seed,
        )
        assert np.frombuffer(left.arrays[0], np.uint32).tolist() == [1] * 12 + [0] * 52
        found.append([values[0] for values in left.results])
    assert np.min(found, 0).tolist() == list(done)


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("wait", [f"{READ} 0", f"{ALL} 0", f"{READ} 1", f"{ALL} 1", ""])
def test_the_source_of_a_store_may_change_only_after_its_read(wait, schedule):
    """This also holds if another warp writes the source, which must be ordered after the wait."""
    text = f"""{DECLARED} st.shared.u32 [%word], %thread; fence.proxy.async; bar.sync 0;
        @%first {STORE} [%t0, {{0}}], [%memory]; @%first {COMMIT}; {wait and f"@%first {wait};"}
        bar.sync 0; xor.b32 %word, %word, 128; st.shared.u32 [%word], 99;{HERE}"""
    options = dict(arrays=[bytes(256)], maps=[words], threads=64, schedule=schedule)
    if wait.endswith("0"):
        left = np.frombuffer(run(text, **options).arrays[0], np.uint32)
        assert left.tolist() == [0, 1, 2, 3] + [0] * 60
    else:
        message = "overwrites what is read from .* the TMA stores of block 0, warp 0"
        assert_fails(RaceError, message, text, **options)


# Each lane stores a word, or a row of a matrix with data of several lanes.
STORED = {
    "words": "st.shared.u32 [%word], %thread;",
    "rows": """mad.lo.u32 %x, %thread, 16, %memory;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%x], {%thread};""",
}
PROXY, LANES_MEET = "fence.proxy.async.shared::cta;", "bar.warp.sync -1;"
NOT_ALL, NO_BARRIER = "without a fence.proxy.async of the lanes", "no barrier orders that before"


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    "between, message",
    [
        (f"{PROXY} {LANES_MEET}", None),
        (f"{PROXY} bar.sync 0;", None),
        (f"{PROXY} bar.sync 1, 32;", None),
        (f"{PROXY} {CLUSTER}", None),
        (f"{LANES_MEET} {PROXY} {LANES_MEET}", None),
        (PROXY, NO_BARRIER),
        (f"{LANES_MEET} {PROXY}", NO_BARRIER),
        (f"{PROXY} {CLUSTER.replace('arrive', 'arrive.relaxed')}", NO_BARRIER),
        (
            f"{PROXY} {{ .reg .pred p; elect.sync _|p, -1; vote.sync.any.pred p, p, -1; }}",
            NO_BARRIER,
        ),
        (f"@%first {PROXY} {LANES_MEET}", NOT_ALL),
        (f"{LANES_MEET} @%first {PROXY}", NOT_ALL),
        (f"bar.sync 0; @%first {PROXY} bar.sync 0;", NOT_ALL),
        (LANES_MEET, r"without a fence.proxy.async\n"),
    ],
)
def test_each_lane_fences_its_stores_before_a_barrier_and_a_tma_store(stored, between, message):
    """Another lane's fence does not order a lane's store, nor does a fence alone (9.7.13.4)."""
    text = f"""{DECLARED} {STORED[stored]} {between}
        @%first {STORE} [%t0, {{0}}], [%memory];{HERE} @%first {COMMIT}; @%first {ALL} 0;"""
    options = dict(arrays=[bytes(256)], maps=[words])
    if message:
        assert_fails(RaceError, f"which block 0, warp 0 wrote .*{message}", text, **options)
        return
    left = np.frombuffer(run(text, **options).arrays[0], np.uint32)
    assert left.tolist() == [0, 1, 2, 3] + [0] * 60


def test_a_lane_that_stores_fences_and_issues_needs_no_barrier():
    text = f"""{DECLARED}
        @%first st.shared.v4.u32 [%memory], {{%thread, %thread, %thread, %thread}};
        @%first {PROXY} @%first {STORE} [%t0, {{0}}], [%memory];
        @%first {COMMIT}; @%first {ALL} 0;"""
    run(text, arrays=[bytes(256)], maps=[words])
    other = text.replace(f"@%first {STORE}", f"setp.eq.u32 %p, %thread, 1; @%p {STORE}")
    other = other.replace(f"@%first {COMMIT}", f"@%p {COMMIT}").replace(
        f"@%first {ALL}", f"@%p {ALL}"
    )
    assert_fails(RaceError, NO_BARRIER, other, arrays=[bytes(256)], maps=[words])


@pytest.mark.parametrize(
    "between, right",
    [
        (f"{PROXY} bar.sync 0;", True),
        # A warp that is ordered after another warp's store may fence it.
        (f"bar.sync 0; {PROXY} bar.sync 0;", True),
        (f"bar.sync 0; @%first {PROXY}", True),
        (f"bar.sync 0; @!%issuer {PROXY}", False),
        (f"@%issuer {PROXY} bar.sync 0;", False),
    ],
)
def test_a_fence_of_another_warps_store_is_ordered_too(between, right):
    """The second warp stores, and the first thread of the first warp issues the TMA store."""
    text = f"""{DECLARED} setp.lt.u32 %issuer, %thread, 32; add.u32 %word, %word, -128;
        @!%issuer st.shared.u32 [%word], 7; {between}
        @%first {STORE} [%t0, {{0}}], [%memory];{HERE} @%first {COMMIT}; @%first {ALL} 0;"""
    for schedule in ("eager", "late", "random"):
        options = dict(arrays=[bytes(256)], maps=[words], threads=64, schedule=schedule)
        if right:
            run(text, **options)
        else:
            assert_fails(RaceError, "which block 0, warp 1 wrote", text, **options)


# The order of loads and other accesses.


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_load_has_written_its_target_after_the_wait(schedule):
    content = np.arange(64, dtype=np.uint32)
    text = f"""{DECLARED} {expect(16)} @%first {LOAD} [%memory], [%t0, {{8}}], [%bar];
        {{}} and.b32 %x, %thread, 3; mad.lo.u32 %x, %x, 4, %memory; ld.shared.u32 %rank, [%x];{HERE}
        mov.u32 %d0, %rank;"""
    options = dict(arrays=[content.tobytes()], maps=[words], threads=64, schedule=schedule)
    found = run(text.replace("{}", WAIT), results=[32], **options).results[0]
    assert found == [8 + i % 4 for i in range(64)]
    early = text.replace("{}", "bar.sync 0;").replace("%d0", "%x")
    assert_fails(
        RaceError, "an asynchronous copy whose mbarrier was not waited for", early, **options
    )


@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_bytes_may_arrive_before_they_are_expected(schedule):
    """The phase still lacks an arrival, so it does not complete."""
    text = f"""{DECLARED} @%first {LOAD} [%memory], [%t0, {{8}}], [%bar];
        {"add.u32 %x, %x, 1;" * 500} {expect(16)} {WAIT} ld.shared.u32 %d0, [%memory];"""
    content = np.arange(64, dtype=np.uint32)
    options = dict(arrays=[content.tobytes()], maps=[words], schedule=schedule)
    assert run(text, results=[32], **options).results == [[8] * 32]


@pytest.mark.parametrize("read", [False, True])
def test_a_load_may_overwrite_memory_after_its_reads(read):
    """A barrier orders another warp's reads before the load; no fence is needed."""
    text = f"""{DECLARED} {expect(16)} @%first {LOAD} [%memory], [%t0, {{8}}], [%bar]; {WAIT}
        {"" if read else "bar.sync 0;"} @!%first ld.shared.u32 %x, [%memory];
        {"bar.sync 0;" if read else ""} @%first {LOAD} [%memory], [%t0, {{16}}], [%bar];{HERE}
        {expect(16)} {WAIT.replace("], 0", "], 1")}"""
    options = dict(arrays=[bytes(256)], maps=[words], threads=64)
    if read:
        run(text, **options)
    else:
        message = (
            "overwrites what is read from .* block 0, warp 1|an asynchronous copy whose mbarrier"
        )
        assert_fails(RaceError, message, text.replace(HERE, ""), **options)


def test_a_load_over_what_was_stored_needs_a_fence_of_the_proxies():
    text = f"""{DECLARED} st.shared.u32 [%word], 1; {{}} bar.sync 0; {expect(16)}
        @%first {LOAD} [%memory], [%t0, {{8}}], [%bar];{HERE} {WAIT}"""
    options = dict(arrays=[bytes(256)], maps=[words])
    run(text.replace("{}", "fence.proxy.async;"), **options)
    assert_fails(RaceError, "wrote without a fence.proxy.async", text.replace("{}", ""), **options)


LOAD_2D = f"cp.async.bulk.tensor.2d.shared::cta.global.{ARRIVAL}"


@pytest.mark.parametrize(
    "statement, error, message",
    {
        "alignment": (f"{LOAD} [%memory+64], [%t0, {{0}}], [%bar];", EmulatorError, "to 128 bytes"),
        "bounds": (
            f"{LOAD} [%memory+8192], [%t0, {{0}}], [%bar];",
            EmulatorError,
            "outside of its",
        ),
        "no map": (f"{LOAD} [%memory], [%m0, {{0}}], [%bar];", EmulatorError, "no tensor map at"),
        "rank": (
            f"{LOAD_2D} [%memory], [%t0, {{0, 0}}], [%bar];",
            EmulatorError,
            "a copy of 2 dimensions is executed with TensorMap",
        ),
        "coordinates": (
            f"{LOAD_2D} [%memory], [%t0, {{0}}], [%bar];",
            UnsupportedError,
            "1 coordinates for 2 dimensions",
        ),
        "a mask": (
            f"{LOAD} [%memory], [%t0, {{0}}], [%bar], %mask;",
            UnsupportedError,
            "a CTA mask",
        ),
        "no mask": (
            f"{LOAD.replace('cta', 'cluster')}.multicast::cluster [%memory], [%t0, {{0}}], [%bar];",
            UnsupportedError,
            "pop from|index|operands|range",
        ),
        "no barrier": (
            f"{LOAD} [%memory], [%t0, {{0}}], [%bar+8];",
            EmulatorError,
            "no mbarrier at",
        ),
        "multicast in a block": (
            f"{LOAD}.multicast::cluster [%memory], [%t0, {{0}}], [%bar], %mask;",
            UnsupportedError,
            "not among the known",
        ),
        "im2col": (
            f"{LOAD.replace('.global', '.global.im2col')} [%memory], [%t0, {{0}}], [%bar];",
            UnsupportedError,
            "not among the known",
        ),
        "a bulk copy": (
            "cp.async.bulk.global.shared::cta.bulk_group [%m0], [%memory], 16;",
            UnsupportedError,
            "not among the known",
        ),
        "a reduction": (
            "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%t0, {0}], "
            "[%memory];",
            UnsupportedError,
            "not among the known",
        ),
        "a hint": (
            f"{LOAD}.L2::cache_hint [%memory], [%t0, {{0}}], [%bar], %place;",
            UnsupportedError,
            "not among the known",
        ),
        "a store's alignment": (
            f"{STORE} [%t0, {{0}}], [%memory+16];",
            EmulatorError,
            "to 128 bytes",
        ),
        "a store's bounds": (f"{STORE} [%t0, {{0}}], [%memory+-128];", EmulatorError, "outside of"),
        "a negative group": (f"{ALL} -1;", UnsupportedError, "all groups but the last -1"),
        "groups in a register": (f"{ALL} %x;", UnsupportedError, "not an integer constant"),
    }.values(),
)
def test_invalid_copies_are_refused(statement, error, message):
    assert_fails(
        error, message, f"{DECLARED} @%first {statement}{HERE}", arrays=[bytes(256)], maps=[words]
    )


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_box_begins_where_its_pattern_does(swizzle):
    tensor = Tensor(2, swizzle)
    for at in (8 * swizzle, 4 * swizzle):
        text = f"""{DECLARED} {expect(tensor.bytes)}
            @%first {LOAD_2D} [%memory+{at}], [%t0, {{0, 0}}], [%bar];{HERE} {WAIT}"""
        options = dict(arrays=[tensor.content], maps=[tensor.map])
        if at == 8 * swizzle:
            run(text, **options)
        else:
            assert_fails(EmulatorError, f"not aligned to {8 * swizzle} bytes", text, **options)


@pytest.mark.parametrize("schedule", ["late", "random", "eager"])
def test_a_block_does_not_exit_before_its_loads(schedule):
    text = f"{DECLARED} {expect(16)} @%first {LOAD} [%memory], [%t0, {{8}}], [%bar]; {{}}"
    options = dict(arrays=[bytes(256)], maps=[words], schedule=schedule)
    run(text.replace("{}", WAIT), **options)
    if schedule == "late":
        message = r"cluster 0 exits before a TMA load of tensor \(8,\)"
        assert_fails(EmulatorError, message, text.replace("{}", ""), **options)


def test_a_block_does_not_exit_before_its_stores_have_read():
    """The writes of a store may come after the block's exit."""
    text = f"{DECLARED} @%first {STORE} [%t0, {{8}}], [%memory]; @%first {COMMIT}; {{}}"
    options = dict(arrays=[bytes(256)], maps=[words], schedule="late")
    run(text.replace("{}", f"@%first {READ} 0;"), **options)
    message = "exits before a TMA store .* its read of shared memory"
    assert_fails(EmulatorError, message, text.replace("{}", ""), **options)


def test_more_bytes_than_expected_are_missing_at_the_end():
    text = f"{DECLARED} {{}} @%first {LOAD} [%memory], [%t0, {{8}}], [%bar]; {WAIT}"
    options = dict(arrays=[bytes(256)], maps=[words], schedule="eager")
    run(text.replace("{}", expect(16)), **options)
    assert_fails(
        EmulatorError, "no warp can continue.*16 bytes", text.replace("{}", expect(32)), **options
    )
    assert_fails(
        EmulatorError, "no warp can continue.*-8 bytes", text.replace("{}", expect(8)), **options
    )


# Tensor maps follow the rules of cuTensorMapEncodeTiled.

GOOD = dict(base=0, itemsize=2, dimensions=(64, 8), strides=(2, 128), box=(64, 8), swizzle=128)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(base=8), "the base is not a multiple of 16"),
        (dict(dimensions=(1,) * 6, strides=(2,) + (16,) * 5, box=(8,) + (1,) * 5), "rank"),
        (dict(dimensions=(64, 0)), "a dimension"),
        (dict(dimensions=(64, 2**32 + 1)), "a dimension"),
        (dict(box=(64, 0)), "a side of the box"),
        (dict(box=(64, 257)), "a side of the box"),
        (dict(strides=(2, 136)), "a stride"),
        (dict(strides=(2, 2**40)), "a stride"),
        (dict(strides=(2, 0)), "a stride"),
        (dict(strides=(4, 128)), "the first stride"),
        (dict(box=(12, 8)), "inner side of the box is not a multiple of 16 bytes"),
        (dict(box=(72, 8)), "inner side of the box is wider than the swizzle"),
        (dict(swizzle=64), "inner side of the box is wider than the swizzle"),
        (dict(swizzle=96), "swizzle"),
    ],
)
def test_a_tensor_map_that_breaks_a_rule_is_refused(change, message):
    TensorMap(**GOOD)
    with pytest.raises(EmulatorError, match=f"is invalid, because .*{message}"):
        TensorMap(**GOOD | change)


def test_a_tensor_has_to_be_in_one_array():
    def beyond(address, *_):
        return TensorMap(address, 4, (65,), (4,), (4,), 0)

    text = f"{DECLARED} {expect(16)} @%first {LOAD} [%memory], [%t0, {{0}}], [%bar]; {WAIT}"
    run(text, arrays=[bytes(256)], maps=[words])
    assert_fails(EmulatorError, "outside of all arrays", text, arrays=[bytes(256)], maps=[beyond])


def test_every_form_has_a_test():
    registered = {
        opcode
        for opcode, definition in isa.OPCODES.items()
        if definition.make.__module__ == "tests.ptx_emulator.tma" and ".im2col." not in opcode
    }
    # test_bulk_copy.py tests these forms, and test_im2col.py those in im2col mode.
    bulk = {f"cp.async.bulk.{to}.global.{ARRIVAL}" for to in ("shared::cta", "shared::cluster")}
    assert registered == {*LOADS, *MULTICASTS, *STORES, COMMIT, READ, ALL, *bulk}
