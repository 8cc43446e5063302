"""What the lanes of a warp exchange, and miscellaneous instructions."""

import numpy as np

from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.isa import (
    BLACKWELL,
    HOPPER,
    LANE,
    LANES,
    Blocked,
    instruction,
    lanes,
)
from ptx_emulator.scalar import modifiers, pair

MOVE, MATRIX, VOTE = "9.7.9 data movement", "9.7.14 matrices", "9.7.13 synchronisation"
OTHER = "9.7.19 miscellaneous"


@instruction(MOVE, "shfl.sync{.idx,.up,.down,.bfly}.b32")
def shfl(build, line):
    mode = modifiers(line)[1]
    destination, source, distance, clamp, members = line.operands
    first, second = pair(destination)
    write = build.write(first, "b32")
    write_inside = build.write(second, "pred") if second else None
    reads = [build.read(x, "b32") for x in (source, distance, clamp, members)]

    def execute(warp, mask):
        values, b, c, wanted = (read(warp) for read in reads)
        _members(mask, wanted, "shfl")
        b, c = (b & np.uint32(31)).astype(np.int64), c.astype(np.int64)
        segment, last = c >> 8 & 31, c & 31
        highest, lowest = LANE & segment | last & ~segment, LANE & segment
        chosen = {
            "up": LANE - b,
            "down": LANE + b,
            "bfly": LANE ^ b,
            "idx": lowest | b & ~segment,
        }[mode]
        # "up" has its bound below: the clamp is 0 there.
        inside = chosen >= highest if mode == "up" else chosen <= highest
        source = np.where(inside, chosen, LANE)
        absent = np.setdiff1d(source[lanes(mask)], lanes(mask))
        if len(absent):
            raise EmulatorError(f"shfl: the value of lane {absent[0]}, which is not here")
        write(warp, values[source], mask)
        if write_inside:
            write_inside(warp, inside, mask)

    return execute


def _members(mask, wanted, what: str) -> None:
    """The lanes of a member mask have to be those that are here."""
    here, named = bits_of(lanes(mask)), int(wanted[lanes(mask)[0]])
    if named != here:
        raise EmulatorError(f"{what}: lanes {here:#x} execute it for members {named:#x}")


def bits_of(chosen) -> int:
    """A mask of lanes as a number."""
    return sum(1 << int(lane) for lane in chosen)


@instruction(VOTE, "elect.sync")
def elect(build, line):
    """The lane that is elected is any of the members (9.7.13.14): here the lowest."""
    destination, members = line.operands
    write_lane = build.write(destination.first, "b32")
    write = build.write(destination.second, "pred")
    read = build.read(members, "b32")

    def execute(warp, mask):
        wanted = read(warp)
        _members(mask, wanted, "elect")
        leader = int(lanes(mask)[0])
        write_lane(warp, np.full(LANES, leader, np.uint32), mask)
        write(warp, LANE == leader, mask)

    return execute


@instruction(VOTE, "vote.sync{.any,.all,.uni}.pred", "vote.sync.ballot.b32")
def vote(build, line):
    mode, kind = modifiers(line)[1:]
    destination, source, members = line.operands
    write, read = build.write(destination, kind), build.read(source, "pred")
    read_members = build.read(members, "b32")

    def execute(warp, mask):
        _members(mask, read_members(warp), "vote")
        active = lanes(mask)
        values = read(warp)[active]
        if mode == "ballot":
            write(warp, np.full(LANES, bits_of(active[values]), np.uint32), mask)
        else:
            same = values.all() or not values.any()
            found = {"any": values.any(), "all": values.all(), "uni": same}[mode]
            write(warp, np.full(LANES, found), mask)

    return execute


@instruction(VOTE, "activemask.b32")
def activemask(build, line):
    write = build.write(line.operands[0], "b32")

    def execute(warp, mask):
        write(warp, np.full(LANES, bits_of(lanes(mask)), np.uint32), mask)

    return execute


@instruction(OTHER, "setmaxnreg{.inc,.dec}.sync.aligned.u32", targets=HOPPER + BLACKWELL)
def setmaxnreg(build, line):
    """Registers go from a warp to its block and back; who wants more than are left waits."""
    count, more = build.immediate(line.operands[0]), "inc" in modifiers(line)
    if count % 8 or not 24 <= count <= 256:
        raise UnsupportedError(f"setmaxnreg of {count} registers")

    def execute(warp, mask):
        block, change = warp.block, LANES * (count - warp.registers_held)
        if (change < 0) if more else (change > 0):
            raise EmulatorError(f"{line.opcode} to {count} from {warp.registers_held} registers")
        if change > block.free_registers:
            return Blocked(
                lambda: change <= block.free_registers,
                lambda: f"{change} registers; its block has {block.free_registers} that are free",
            )
        block.free_registers -= change
        warp.registers_held = count
        warp.machine.event()
        return None

    return execute


@instruction(OTHER, "nanosleep.u32")
def nanosleep(build, line):
    build.read(line.operands[0], "u32")
    return lambda warp, mask: None


@instruction(OTHER, "trap")
def trap(build, line):
    def execute(warp, mask):
        raise EmulatorError("a trap")

    return execute


@instruction(VOTE, "griddepcontrol{.wait,.launch_dependents}")
def griddepcontrol(build, line):
    """There is one kernel: it waits for nobody."""
    return lambda warp, mask: None
