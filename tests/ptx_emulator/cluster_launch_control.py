"""clusterlaunchcontrol: a running cluster cancels one that has not started, and does its work."""

import numpy as np

from tests.ptx_emulator.barriers import barrier_at
from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.isa import (
    BLACKWELL,
    SINCE_BLACKWELL,
    WARP_SIZE,
    Task,
    active_lanes,
    defines,
    shared_cluster_address,
    split_shared_address,
)
from tests.ptx_emulator.memory import POISON, units_in_range, words_in_range
from tests.ptx_emulator.parser import Register, Vector
from tests.ptx_emulator.scalar import modifiers

SYNC = "9.7.13 synchronisation"


@defines(
    SYNC,
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
)
def fence_one_way(binder, instruction):
    """Does nothing: the vector clocks order ordinary loads before writes of the asynchronous proxy.

    Ordinary stores still need a fence.proxy.async.
    """
    return lambda warp, mask: None


# The response has 16 bytes (9.7.13.17), whose layout the ISA leaves open. The emulator stores
# %ctaid of the first block of the cancelled cluster, and a word that says whether a cluster was
# cancelled.
RESPONSE_BYTES = 16
CANCELED, FAILED = 0x600D, 0xBAD


@defines(
    SYNC,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128",
    targets=SINCE_BLACKWELL,
)
@defines(
    SYNC,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    ".multicast::cluster::all.b128",
    targets=BLACKWELL,
)
def try_cancel(binder, instruction):
    target, signal = map(binder.address_reader, instruction.operands)
    multicast = "multicast::cluster::all" in modifiers(instruction)

    def execute(warp, mask):
        machine, cluster = warp.machine, warp.block.cluster
        for lane in active_lanes(mask):
            if cluster.cancellation_failed:
                raise EmulatorError(
                    "there is a clusterlaunchcontrol.try_cancel after one that failed"
                )
            (rank, offset), (signal_rank, signal_offset) = (
                split_shared_address(int(read(warp)[lane])) for read in (target, signal)
            )
            if rank != warp.block.rank or signal_rank != rank or offset % RESPONSE_BYTES:
                raise EmulatorError(
                    f"a response goes to offset {offset} of block {rank}, signalled to block "
                    f"{signal_rank}; expected 16-byte aligned, and both in the warp's own block"
                )
            blocks = cluster.blocks if multicast else [warp.block]
            description = f"the try_cancel of line {instruction.line}"
            barriers = []
            for block in blocks:
                address = shared_cluster_address(block.rank, signal_offset)
                barrier = barrier_at(warp, address, cluster=True)
                barrier.check_use(warp, by_async_proxy=True)
                barriers.append(barrier)
                shared = block.shared
                shared.check_bounds(offset, RESPONSE_BYTES, description)
                shared.check_async_proxy_access(
                    units_in_range(offset, RESPONSE_BYTES), warp, int(lane), description
                )
                words = words_in_range(offset, RESPONSE_BYTES)
                shared.record_write(
                    barrier.agent, barrier.phase + 1, words, warp.clock, description
                )
                shared.bytes[offset : offset + RESPONSE_BYTES] = POISON

            def run(blocks=blocks, barriers=barriers, offset=offset):
                ctaid = machine.cancel_cluster()
                cluster.cancellation_failed = ctaid is None
                response = [*(ctaid or (0, 0, 0)), FAILED if ctaid is None else CANCELED]
                content = np.array(response, np.uint32).view(np.uint8)
                for block, barrier in zip(blocks, barriers):
                    block.shared.bytes[offset : offset + RESPONSE_BYTES] = content
                    barrier.complete_tx(RESPONSE_BYTES)

            machine.submit(Task("cancel", run, description, cluster, ("cancel", cluster)))

    return execute


def _bind_response(binder, operand):
    """Returns response(warp, mask): the four words of a response, [4, 32 lanes]."""
    if not isinstance(operand, Register) or operand.type != "b128":
        raise UnsupportedError(f"{operand} is not a register of 128 bits")

    def response(warp, mask):
        words = warp.registers[operand.number].view(np.uint32).T
        if not np.isin(words[3][active_lanes(mask)], (CANCELED, FAILED)).all():
            raise EmulatorError("the handle is not a clusterlaunchcontrol.try_cancel response")
        return words

    return response


@defines(SYNC, "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", targets=SINCE_BLACKWELL)
def is_canceled(binder, instruction):
    destination, source = instruction.operands
    write, response = binder.writer(destination, "pred"), _bind_response(binder, source)

    def execute(warp, mask):
        write(warp, response(warp, mask)[3] == CANCELED, mask)

    return execute


@defines(
    SYNC,
    "clusterlaunchcontrol.query_cancel.get_first_ctaid{.v4,::x,::y,::z}.b32.b128",
    targets=SINCE_BLACKWELL,
)
def get_first_ctaid(binder, instruction):
    destination, source = instruction.operands
    part = modifiers(instruction)[1].removeprefix("get_first_ctaid").removeprefix("::")
    if part:
        items, first = (destination,), "xyz".index(part)
    else:
        if not isinstance(destination, Vector) or len(destination.items) != 4:
            raise UnsupportedError("get_first_ctaid.v4 is used without a vector of 4 registers")
        items, first = destination.items, 0
    writes = [binder.writer(item, "b32") for item in items]
    response = _bind_response(binder, source)

    def execute(warp, mask):
        words = response(warp, mask)
        if (words[3][active_lanes(mask)] != CANCELED).any():
            raise EmulatorError("get_first_ctaid reads a response without a cancelled cluster")
        # The ISA does not specify the fourth element.
        for write, values in zip(writes, [*words[:3], np.full(WARP_SIZE, 0xFFFFFFFF)][first:]):
            write(warp, np.ascontiguousarray(values, np.uint32), mask)

    return execute
