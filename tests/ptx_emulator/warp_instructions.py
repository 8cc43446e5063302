"""Shuffles, votes and elections among the lanes of a warp, and miscellaneous instructions."""

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.isa import (
    BLACKWELL,
    HOPPER,
    LANE_IDS,
    WARP_SIZE,
    Blocked,
    active_lanes,
    defines,
    lane_bitmask,
)
from tests.ptx_emulator.scalar import modifiers, pair

MOVE, VOTE = "9.7.9 data movement", "9.7.13 synchronisation"
OTHER = "9.7.19 miscellaneous"


@defines(MOVE, "shfl.sync{.idx,.up,.down,.bfly}.b32")
def shfl(binder, instruction):
    mode = modifiers(instruction)[1]
    # The operands in 9.7.9.6 are d|p, a, b, c and membermask.
    destination, *sources = instruction.operands
    first, second = pair(destination)
    write = binder.writer(first, "b32")
    write_in_range = binder.writer(second, "pred") if second else None
    a, b, c, members = sources
    reads = [binder.reader(operand, "b32") for operand in (a, b, c, members)]

    def execute(warp, mask):
        values, b, c, members = (read(warp) for read in reads)
        _check_member_mask(mask, members, "shfl")
        b, c = (b & np.uint32(31)).astype(np.int64), c.astype(np.int64)
        segment_mask, clamp = c >> 8 & 31, c & 31
        lowest = LANE_IDS & segment_mask
        limit = lowest | clamp & ~segment_mask
        chosen = {
            "up": LANE_IDS - b,
            "down": LANE_IDS + b,
            "bfly": LANE_IDS ^ b,
            "idx": lowest | b & ~segment_mask,
        }[mode]
        # The limit of .up is the lowest lane.
        in_range = chosen >= limit if mode == "up" else chosen <= limit
        source = np.where(in_range, chosen, LANE_IDS)
        inactive = np.setdiff1d(source[active_lanes(mask)], active_lanes(mask))
        if len(inactive):
            raise EmulatorError(f"shfl reads the value of lane {inactive[0]}, which is not active")
        write(warp, values[source], mask)
        if write_in_range:
            write_in_range(warp, in_range, mask)

    return execute


def _check_member_mask(mask, members, description: str) -> None:
    """Checks that the member mask names exactly the lanes that execute the instruction."""
    active, named = lane_bitmask(mask), int(members[active_lanes(mask)[0]])
    if named != active:
        raise EmulatorError(
            f"{description} names the members {named:#x}, but the lanes {active:#x} execute it"
        )


@defines(VOTE, "elect.sync")
def elect(binder, instruction):
    """Elects the lowest member; the ISA leaves the choice open (9.7.13.14)."""
    destination, members = instruction.operands
    write_leader = binder.writer(destination.first, "b32")
    write_is_leader = binder.writer(destination.second, "pred")
    read_members = binder.reader(members, "b32")

    def execute(warp, mask):
        _check_member_mask(mask, read_members(warp), "elect")
        leader = int(active_lanes(mask)[0])
        write_leader(warp, np.full(WARP_SIZE, leader, np.uint32), mask)
        write_is_leader(warp, LANE_IDS == leader, mask)

    return execute


@defines(VOTE, "vote.sync{.any,.all,.uni}.pred", "vote.sync.ballot.b32")
def vote(binder, instruction):
    mode, ptx_type = modifiers(instruction)[1:]
    destination, source, members = instruction.operands
    write, read = binder.writer(destination, ptx_type), binder.reader(source, "pred")
    read_members = binder.reader(members, "b32")

    def execute(warp, mask):
        _check_member_mask(mask, read_members(warp), "vote")
        active = active_lanes(mask)
        votes = read(warp)[active]
        if mode == "ballot":
            ballot = np.zeros(WARP_SIZE, bool)
            ballot[active] = votes
            write(warp, np.full(WARP_SIZE, lane_bitmask(ballot), np.uint32), mask)
        else:
            uniform = votes.all() or not votes.any()
            result = {"any": votes.any(), "all": votes.all(), "uni": uniform}[mode]
            write(warp, np.full(WARP_SIZE, result), mask)

    return execute


@defines(VOTE, "activemask.b32")
def activemask(binder, instruction):
    write = binder.writer(instruction.operands[0], "b32")

    def execute(warp, mask):
        write(warp, np.full(WARP_SIZE, lane_bitmask(mask), np.uint32), mask)

    return execute


@defines(OTHER, "setmaxnreg{.inc,.dec}.sync.aligned.u32", targets=HOPPER + BLACKWELL)
def setmaxnreg(binder, instruction):
    """Releases registers to the warp's block, or takes some and waits until enough are free."""
    count, increases = binder.immediate(instruction.operands[0]), "inc" in modifiers(instruction)
    # A thread has 24 to 256 registers, in steps of 8 (9.7.19.5). For 256 an H200 reports an illegal
    # instruction; Triton's kernels for Blackwell ask for them.
    target = binder.kernel.target
    if count % 8 or not 24 <= count <= (248 if target in HOPPER else 256):
        raise UnsupportedError(f"setmaxnreg of {count} registers is not possible for {target}")

    def execute(warp, mask):
        block, change = warp.block, WARP_SIZE * (count - warp.registers_per_thread)
        if (change < 0) if increases else (change > 0):
            raise EmulatorError(
                f"{instruction.opcode} cannot change {warp.registers_per_thread} registers to "
                f"{count}"
            )
        if change > block.free_registers:
            return Blocked(
                lambda: change <= block.free_registers,
                lambda: f"{change} registers; its block has {block.free_registers} that are free",
            )
        block.free_registers -= change
        warp.registers_per_thread = count
        warp.machine.event()
        return None

    return execute


@defines(OTHER, "nanosleep.u32")
def nanosleep(binder, instruction):
    binder.reader(instruction.operands[0], "u32")
    return lambda warp, mask: None


@defines(OTHER, "trap")
def trap(binder, instruction):
    def execute(warp, mask):
        raise EmulatorError("the kernel executes a trap")

    return execute


@defines(VOTE, "griddepcontrol{.wait,.launch_dependents}")
def griddepcontrol(binder, instruction):
    """Does nothing, because only one kernel runs."""
    return lambda warp, mask: None
