"""Bulk copies without a tensor map (PTX ISA 9.7.9.25.4.1): bytes, barrier and errors."""

import numpy as np
import pytest

from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.memory import GlobalMemory
from tests.ptx_emulator.parser import parse

SIZE = 512

KERNEL = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 source, .param .u64 result)
.maxntid 32, 1, 1
{
.shared .align 128 .b8 target[512];
.shared .align 8 .b64 arrived;
.reg .b64 %source, %result, %offset;
.reg .b32 %lane, %at, %word;
.reg .pred %first, %there;
ld.param.u64 %source, [source]; ld.param.u64 %result, [result];
mov.u32 %lane, %tid.x;
mov.u32 %at, target;
setp.eq.u32 %first, %lane, 0;
@!%first bra wait;
mbarrier.init.shared::cta.b64 [arrived], 1;
INITIALISED
BEFORE
mbarrier.arrive.expect_tx.shared::cta.b64 _, [arrived], EXPECTED;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%at + TO], [%source + FROM], BYTES, [arrived];
wait:
bar.warp.sync 0xffffffff;
WAIT
mad.lo.u32 %at, %lane, 16, %at;
mad.wide.u32 %result, %lane, 16, %result;
.reg .b32 %x<4>;
ld.shared.v4.u32 {%x0, %x1, %x2, %x3}, [%at];
st.global.v4.u32 [%result], {%x0, %x1, %x2, %x3};
ret;
}
"""

WAIT = """
again: mbarrier.try_wait.parity.shared::cta.b64 %there, [arrived], 0;
@!%there bra again;
"""

WHOLE = {
    "INITIALISED": "fence.mbarrier_init.release.cluster;",
    "BEFORE": "",
    "TO": 0,
    "FROM": 0,
    "BYTES": SIZE,
    "EXPECTED": SIZE,
    "WAIT": WAIT,
}


def copied(schedule="random", **parts):
    """Runs a copy; returns the target as the kernel reads it, and the expected bytes."""
    text = KERNEL
    for name, part in (WHOLE | parts).items():
        text = text.replace(name, str(part))
    source = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    memory = GlobalMemory()
    addresses = memory.allocate(source), memory.allocate(np.zeros_like(source))
    machine = Machine(parse(text), (1, 1, 1), memory=memory, schedule=schedule)
    for i, address in enumerate(addresses):
        machine.set_parameter(i, address)
    machine.launch()
    return memory.read(addresses[1], source.shape, source.dtype), source


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_all_bytes_have_arrived_when_the_phase_completes(schedule):
    found, source = copied(schedule)
    np.testing.assert_array_equal(found, source)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"WAIT": ""}, "reads what was written to"),
        ({"INITIALISED": ""}, "unfenced mbarrier.init"),
        ({"TO": 8}, "not multiples of 16"),
        ({"FROM": 8, "BYTES": 256}, "not multiples of 16"),
        ({"BYTES": 24}, "not multiples of 16"),
        ({"BYTES": 0}, "not multiples of 16"),
        ({"FROM": 16}, "outside of all arrays"),
        ({"TO": 64}, "outside of its"),
        ({"TO": 1 << 24}, "expected the warp's own block"),
        ({"BEFORE": "st.shared.u32 [%at], %lane;"}, "without a fence.proxy.async"),
        ({"EXPECTED": 2 * SIZE}, "no warp can continue"),
    ],
)
def test_an_invalid_copy_is_refused(parts, message):
    with pytest.raises(EmulatorError, match=message):
        copied("late", **parts)


def test_two_copies_in_flight_to_one_target_are_a_race():
    other = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    with pytest.raises(EmulatorError, match="overwrites what was written to"):
        copied("late", BEFORE=f"{other} [%at], [%source], 16, [arrived];")


def test_a_copy_may_overwrite_bytes_whose_reads_are_ordered_before():
    found, source = copied(BEFORE=".reg .b32 %old; ld.shared.u32 %old, [%at];")
    np.testing.assert_array_equal(found, source)
