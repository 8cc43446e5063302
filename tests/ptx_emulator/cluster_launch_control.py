"""clusterlaunchcontrol: a running cluster takes the place of one that has not started."""

import numpy as np

from ptx_emulator.barriers import barrier_at
from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.isa import BLACKWELL, LANES, SINCE_BLACKWELL, Task, block_of, instruction, lanes
from ptx_emulator.memory import POISON
from ptx_emulator.parser import Register, Vector
from ptx_emulator.scalar import modifiers
from ptx_emulator.tma import units_of, words_of

SYNC = "9.7.13 synchronisation"


@instruction(
    SYNC,
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
)
def fence_one_way(build, line):
    """Orders reads by ordinary loads before writes by the asynchronous proxy, which clocks do here:
    ordinary stores still need fence.proxy.async."""
    return lambda warp, mask: None


# The response: the first block of the cancelled cluster, and whether there is one. The ISA leaves
# open what its bits mean.
RESPONSE_BYTES = 16
CANCELED, FAILED = 0x600D, 0xBAD


@instruction(
    SYNC,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128",
    targets=SINCE_BLACKWELL,
)
@instruction(
    SYNC,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    ".multicast::cluster::all.b128",
    targets=BLACKWELL,
)
def try_cancel(build, line):
    target, signal = map(build.address, line.operands)
    multicast = "multicast::cluster::all" in modifiers(line)

    def execute(warp, mask):
        machine, cluster = warp.machine, warp.block.cluster
        for lane in lanes(mask):
            if cluster.is_last:
                raise EmulatorError("a clusterlaunchcontrol.try_cancel after one that failed")
            (rank, offset), (signal_rank, signal_offset) = (
                block_of(int(read(warp)[lane])) for read in (target, signal)
            )
            if rank != warp.block.rank or signal_rank != rank or offset % RESPONSE_BYTES:
                raise EmulatorError(f"a response to block {rank} + {offset}")
            blocks = cluster.blocks if multicast else [warp.block]
            what = f"the try_cancel of line {line.line}"
            barriers = []
            for block in blocks:
                barrier = barrier_at(warp, (block.rank << 24) + signal_offset, cluster=True)
                barrier.check_use(warp, asynchronous=True)
                barriers.append(barrier)
                shared = block.shared
                shared.check(offset, RESPONSE_BYTES, what)
                shared.asynchronous(units_of(offset, RESPONSE_BYTES), warp, int(lane), what)
                words = words_of(offset, RESPONSE_BYTES)
                shared.writes(barrier.agent, barrier.phase + 1, words, warp.clock, what)
                shared.bytes[offset : offset + RESPONSE_BYTES] = POISON

            def run(blocks=blocks, barriers=barriers, offset=offset):
                found = machine.cancel()
                cluster.is_last = found is None
                response = [*(found or (0, 0, 0)), FAILED if found is None else CANCELED]
                content = np.array(response, np.uint32).view(np.uint8)
                for block, barrier in zip(blocks, barriers):
                    block.shared.bytes[offset : offset + RESPONSE_BYTES] = content
                    barrier.receive(RESPONSE_BYTES)

            machine.submit(Task("cancel", run, what, cluster, ("cancel", cluster)))

    return execute


def _response(build, operand):
    """response(warp, mask): the four words of a handle, [4, 32]."""
    if not isinstance(operand, Register) or operand.type != "b128":
        raise UnsupportedError(f"{operand} is no register of 128 bits")

    def response(warp, mask):
        words = warp.registers[operand.number].view(np.uint32).T
        if not np.isin(words[3][lanes(mask)], (CANCELED, FAILED)).all():
            raise EmulatorError("a handle that is no response of clusterlaunchcontrol.try_cancel")
        return words

    return response


@instruction(
    SYNC, "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", targets=SINCE_BLACKWELL
)
def is_canceled(build, line):
    destination, source = line.operands
    write, response = build.write(destination, "pred"), _response(build, source)

    def execute(warp, mask):
        write(warp, response(warp, mask)[3] == CANCELED, mask)

    return execute


@instruction(
    SYNC,
    "clusterlaunchcontrol.query_cancel.get_first_ctaid{.v4,::x,::y,::z}.b32.b128",
    targets=SINCE_BLACKWELL,
)
def get_first_ctaid(build, line):
    destination, source = line.operands
    part = modifiers(line)[1].removeprefix("get_first_ctaid").removeprefix("::")
    if part:
        items, first = (destination,), "xyz".index(part)
    else:
        if not isinstance(destination, Vector) or len(destination.items) != 4:
            raise UnsupportedError("4 registers are expected")
        items, first = destination.items, 0
    writes = [build.write(item, "b32") for item in items]
    response = _response(build, source)

    def execute(warp, mask):
        words = response(warp, mask)
        if (words[3][lanes(mask)] != CANCELED).any():
            raise EmulatorError("the first block of a cluster that was not cancelled")
        # What the fourth element holds is unspecified.
        for write, values in zip(writes, [*words[:3], np.full(LANES, 0xFFFFFFFF)][first:]):
            write(warp, np.ascontiguousarray(values, np.uint32), mask)

    return execute
