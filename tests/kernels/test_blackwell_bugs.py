"""Deliberate bugs in the Pallas kernel for Blackwell are caught, each by the expected check.

The kernel's source is not changed. Its module gets an altered `plgpu`, whose functions omit an
action, or perform it elsewhere or later. The altered functions recognise a barrier by its shape.
"""

import functools
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_patch_embed.backends import schedule, xla
from pallas_patch_embed.backends.mosaic import SM100, launch, layouts, sm100
from pallas_patch_embed.backends.mosaic import interpreted as memory
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base.chips import B200
from tests.kernels import two_blocks
from tests.kernels.interpreter import draw_operands, interpreted
from tests.operator.bounds import assert_bit_equal
from tests.operator.planned import few
from tests.short_suite import every_second

pytestmark = [
    pytest.mark.skipif(not two_blocks.KNOWN, reason=two_blocks.UNKNOWN),
    pytest.mark.slow("each case takes seconds in the interpreter"),
]

# There are 2160 rows and a table of 72 rows. So the 2 workers of a slice have 9 or 17 tiles, each
# with a different phase of the table, and the last one is partial. A tile has 3 chunks, and the
# ring has 4 slots. A case takes 3 seconds.
PATCHES, N, SLOTS = (30, 72, 384), 256, 4
MODES = {
    "two blocks": BlackwellConfig(256, SLOTS),
    "one block, streamed weight": BlackwellConfig(128, SLOTS, collective=False, stream_weight=True),
}


class Altered:
    """The module `plgpu` with some functions replaced."""

    def __init__(self, **functions):
        vars(self).update(functions)

    def __getattr__(self, name):
        return getattr(plgpu, name)


def purpose(barrier):
    """Returns the kernel's name for a barrier."""
    aval = getattr(barrier, "ref", barrier).aval
    kind = aval.inner_aval.dtype
    if aval.shape == ():
        return "weight_arrived"
    if aval.shape == (SLOTS,):
        return "freed" if kind.orders_tensor_core else "filled"
    return "read" if kind.num_arrivals == sm100.STORERS else "multiplied"


def inside(function):
    """Returns whether the kernel's function of this name is being traced."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def next_one(barrier):
    """Returns the next barrier of the same array."""
    (index,) = barrier.transforms[-1].indices
    return barrier.ref.at[(index + 1) % barrier.ref.shape[0]]


def wait_missing(which):
    def wait(barrier):
        if purpose(barrier) != which or inside("drain"):
            plgpu.barrier_wait(barrier)

    return Altered(barrier_wait=wait)


def wait_on_the_wrong_slot(which):
    def wait(barrier):
        wrong = purpose(barrier) == which and not inside("drain")
        plgpu.barrier_wait(next_one(barrier) if wrong else barrier)

    return Altered(barrier_wait=wait)


def drain_missing(which):
    def wait(barrier):
        if purpose(barrier) != which or not inside("drain"):
            plgpu.barrier_wait(barrier)

    return Altered(barrier_wait=wait)


def arrive_missing(which):
    def arrive(barrier):
        if purpose(barrier) != which:
            plgpu.barrier_arrive(barrier)

    def commit(barrier, **named):
        if which != "multiplied":
            plgpu.tcgen05_commit_arrive(barrier, **named)

    def mma(accumulator, a, b, barrier, **named):
        plgpu.tcgen05_mma(accumulator, a, b, None if which == "freed" else barrier, **named)

    return Altered(barrier_arrive=arrive, tcgen05_commit_arrive=commit, tcgen05_mma=mma)


def copy_arrives_elsewhere():
    def copy(source, target, barrier, **named):
        wrong = purpose(barrier) == "filled"
        plgpu.copy_gmem_to_smem(source, target, next_one(barrier) if wrong else barrier, **named)

    return Altered(copy_gmem_to_smem=copy)


def copy_missing(which):
    """Omits the copies of the patches (filled) or of the weight that arrive at a barrier."""

    def copy(source, target, barrier, **named):
        if purpose(barrier) != which or inside("load_weight") != (which == "weight_arrived"):
            plgpu.copy_gmem_to_smem(source, target, barrier, **named)

    return Altered(copy_gmem_to_smem=copy)


def early_arrival():
    """Signals that tensor memory has been read, although its last part is not loaded yet."""

    class Late:
        def __init__(self, part, layout):
            self.load = functools.partial(plgpu.async_load_tmem, part, layout=layout)

        def astype(self, dtype):
            y = self.load()
            plgpu.wait_load_tmem()
            return y.astype(dtype)

    return Altered(
        async_load_tmem=lambda part, *, layout: Late(part, layout), wait_load_tmem=lambda: None
    )


def load_wait_missing():
    return Altered(wait_load_tmem=lambda: None)


def commit_missing():
    return Altered(commit_smem=lambda: None)


def store_wait_missing():
    def wait(left, **named):
        if left == 0:
            plgpu.wait_smem_to_gmem(left, **named)

    return Altered(wait_smem_to_gmem=wait)


def store_drain_missing():
    def wait(left, **named):
        if left > 0:
            plgpu.wait_smem_to_gmem(left, **named)

    return Altered(wait_smem_to_gmem=wait)


def wrong_scale_column():
    def load(*arguments, **named):
        return jnp.roll(plgpu.load(*arguments, **named), 1)

    return Altered(load=load)


def unordered(which):
    """Makes this barrier without orders_tensor_core."""

    def make(kind, **named):
        arrivals, barriers = named["num_arrivals"], named.get("num_barriers")
        purposes = {
            (1, SLOTS): "freed",
            (1, sm100.ACCUMULATORS): "multiplied",
            (sm100.STORERS, sm100.ACCUMULATORS): "read",
        }
        if purposes.get((arrivals, barriers)) == which and named.get("orders_tensor_core"):
            named["orders_tensor_core"] = False
        return kind(**named)

    return Altered(
        Barrier=functools.partial(make, plgpu.Barrier),
        ClusterBarrier=functools.partial(make, plgpu.ClusterBarrier),
    )


def wrong_table_rows(monkeypatch):
    load_rows = memory.load_rows

    def shifted(source, row, *arguments, **named):
        return load_rows(source, row + 1, *arguments, **named)

    monkeypatch.setattr(memory, "load_rows", shifted)


def altered_schedule(change):
    def alter(monkeypatch):
        segments = schedule.segments

        def altered(*arguments):
            found = segments(*arguments).copy()
            change(found)
            return found

        monkeypatch.setattr(schedule, "segments", altered)

    return alter


@altered_schedule
def wrong_phase(segments):
    segments[0, 1, schedule.TABLE_ROW] += 8


@altered_schedule
def a_tile_twice(segments):
    segments[1, 0, schedule.FIRST_TILE] = segments[0, 0, schedule.FIRST_TILE]


@altered_schedule
def a_tile_skipped(segments):
    segments[1, -1, schedule.TILES] = 0


RACE = "RACE DETECTED"
VALUES = "Arrays are not equal"
DEADLOCK = "deadlock"
UNSEEN = (
    "no threads observed|missed observing|observed barrier up to|awaiting phase|for the first time"
)
UNORDERED = "does not order it|must have orders_tensor_core"
LEFT = "operations completed before"

# (kind of bug, object that it affects): (alteration of the kernel, message of the expected check)
BUGS = {
    ("wait missing", "weight_arrived"): (wait_missing("weight_arrived"), f"{RACE}|{UNSEEN}"),
    ("wait missing", "filled"): (wait_missing("filled"), f"{RACE}|{UNSEEN}"),
    ("wait missing", "freed"): (wait_missing("freed"), f"{RACE}|{UNSEEN}"),
    ("wait missing", "multiplied"): (wait_missing("multiplied"), f"{RACE}|{UNSEEN}"),
    ("wait missing", "read"): (wait_missing("read"), f"{RACE}|{UNSEEN}"),
    ("wait missing", "load of tensor memory"): (load_wait_missing(), RACE),
    ("wait on the wrong slot", "filled"): (
        wait_on_the_wrong_slot("filled"),
        f"{RACE}|{UNSEEN}|{DEADLOCK}",
    ),
    ("wait on the wrong slot", "freed"): (
        wait_on_the_wrong_slot("freed"),
        f"{RACE}|{UNSEEN}|{DEADLOCK}",
    ),
    ("wait on the wrong slot", "multiplied"): (
        wait_on_the_wrong_slot("multiplied"),
        f"{RACE}|{UNSEEN}|{DEADLOCK}",
    ),
    ("wait on the wrong slot", "read"): (
        wait_on_the_wrong_slot("read"),
        f"{RACE}|{UNSEEN}|{DEADLOCK}",
    ),
    ("arrive missing", "freed"): (arrive_missing("freed"), DEADLOCK),
    ("arrive missing", "multiplied"): (arrive_missing("multiplied"), DEADLOCK),
    ("arrive missing", "read"): (arrive_missing("read"), DEADLOCK),
    ("arrive missing", "filled"): (copy_missing("filled"), DEADLOCK),
    ("arrive missing", "weight_arrived"): (copy_missing("weight_arrived"), DEADLOCK),
    ("arrival at the wrong slot", "filled"): (
        copy_arrives_elsewhere(),
        f"{RACE}|{UNSEEN}|{DEADLOCK}",
    ),
    ("early arrival", "read"): (early_arrival(), RACE),
    ("commit missing", "staged tile"): (commit_missing(), RACE),
    ("wait for a store missing", "staged tile"): (store_wait_missing(), RACE),
    ("drain missing", "freed"): (drain_missing("freed"), UNSEEN),
    ("drain missing", "read"): (drain_missing("read"), UNSEEN),
    ("drain missing", "stores"): (store_drain_missing(), f"{LEFT}|{RACE}"),
    ("wrong table phase", "rows"): (wrong_table_rows, VALUES),
    ("wrong table phase", "segments"): (wrong_phase, VALUES),
    ("wrong scale column", "scale"): (wrong_scale_column(), VALUES),
    ("tile twice", "segments"): (a_tile_twice, f"{VALUES}|{RACE}"),
    ("tile skipped", "segments"): (a_tile_skipped, VALUES),
    ("orders_tensor_core missing", "freed"): (unordered("freed"), UNORDERED),
    ("orders_tensor_core missing", "multiplied"): (unordered("multiplied"), UNORDERED),
    ("orders_tensor_core missing", "read"): (unordered("read"), UNORDERED),
}


# Bugs that cannot be caught with one block. A streamed weight has no separate barrier, and the
# interpreter has usually finished the stores before their memory is reused.
NOT_WITH_ONE_BLOCK = ["weight_arrived", "staged tile"]
# Bugs that only the interpreter of jax 0.11 detects.
ONLY_IN_0_11 = [("drain missing", "freed"), ("drain missing", "read")]


def outcome(alteration, monkeypatch, mode):
    """Runs the altered kernel, and compares its whole output with XLA's."""
    two_blocks.install(monkeypatch)
    if isinstance(alteration, Altered):
        for module in (sm100, layouts, launch):
            monkeypatch.setattr(module, "plgpu", alteration)
    else:
        alteration(monkeypatch)
    operands = draw_operands(1, PATCHES, N, "int8", "shared")
    y = interpreted(SM100, operands, "bfloat16", few(B200, 4), MODES[mode])
    assert_bit_equal(y, xla.run(*operands, out_dtype="bfloat16"))


@pytest.mark.parametrize("mode", MODES)
def test_without_a_bug_nothing_is_noticed(monkeypatch, mode):
    outcome(Altered(), monkeypatch, mode)


@pytest.mark.parametrize(
    "bug, mode",
    every_second(
        [
            (bug, mode)
            for bug in BUGS
            for mode, config in MODES.items()
            if bug[1] not in NOT_WITH_ONE_BLOCK or config.collective
        ],
        "each bug takes seconds in the interpreter",
    ),
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_a_bug_is_noticed(monkeypatch, bug, mode):
    alteration, noticed_by = BUGS[bug]
    if bug in ONLY_IN_0_11 and not jax.__version__.startswith("0.11"):
        pytest.skip("this interpreter lets a thread leave before the last phases of its barriers")
    with pytest.raises(Exception, match=noticed_by):
        outcome(alteration, monkeypatch, mode)
