"""Edits that make a compiled Blackwell kernel wrong are detected when its PTX is executed.

By default a sample of the edits is tried. All edits are tried, in parts, with

  PTX_MUTATIONS=all pytest tests/kernels/test_ptx_mutations.py -n 2 --junitxml=FILE

and FILE then says which check detected each edit.
"""

import collections
import contextlib
import dataclasses
import os
import re
from functools import partial
from unittest import mock

import numpy as np
import pytest

from pallas_patch_embed.backends import xla
from tests.kernels import emulated_cuda
from tests.kernels.emulated import ALLOWED, CASES, compiled, emulated
from tests.kernels.interpreter import draw_operands
from tests.kernels.mutations import (
    GUARDED,
    MULTIPLY,
    QUIET,
    WAIT,
    Code,
    Mutation,
    harmless,
    mutations,
)
from tests.ptx_emulator import cuda, machine, mosaic
from tests.ptx_emulator.barriers import barrier_at
from tests.ptx_emulator.errors import DeadlockError, EmulatorError, RaceError
from tests.ptx_emulator.isa import active_lanes
from tests.ptx_emulator.machine import EAGER, Machine
from tests.ptx_emulator.matrix_operands import SharedOperand, byte_offsets
from tests.ptx_emulator.parser import parse

pytestmark = pytest.mark.usefixtures("compilers")

# Pallas kernels that together cover two blocks and one, a stationary and a streamed weight,
# segments of several tiles, one and two stores per tile, slices of N, and kernels with and without
# a table.
NAMES = (
    "two blocks, segments of several tiles",
    "two blocks, streamed weight, two stores a tile",
    "one block, segments of several tiles, two slices",
)
# CUDA kernels that cover the same features, a split of K, and images.
CUDA_NAMES = (
    "Blackwell, two blocks, segments of several tiles",
    "Blackwell, two blocks, streamed weight, slots and accumulators used again",
    "Blackwell, one block, segments of several tiles, two slices",
    "Blackwell, split by 2, slots and accumulators used again",
    "Blackwell, images, slots and accumulators used again",
)
EVERY = os.environ.get("PTX_MUTATIONS") == "all"
PARTS = 8 if EVERY else 1
STEP = 1 if EVERY else 307
SCHEDULES = (
    ("random", 2),
    ("late", 1),
    (EAGER | {"arrival": "late"}, 0),
    (EAGER | {"store": "late", "write": "late"}, 0),
)
NONE = Mutation("none", "unedited")


class Subject:
    """A compiled kernel with its operands and the expected result.

    Args:
      case: an `emulated.Case`, or an `emulated_cuda.CudaCase`.
      ptx: the kernel's PTX.
      launcher: the module of `ptx_emulator` that parses the PTX.
      execute: function of (operands, **options of Machine) that returns the result and the machine.
    """

    def __init__(self, case, ptx: str, launcher, execute):
        self.case, self.ptx, self.launcher, self.execute = case, ptx, launcher, execute
        self.operands = draw_operands(1, case.patches, case.N, case.dtype, case.table)
        self.expected = np.asarray(xla.run(*self.operands, out_dtype=case.out_dtype))

    @classmethod
    def of(cls, name: str) -> "Subject":
        """Compiles the kernel of this name."""
        if name in CUDA_NAMES:
            case = emulated_cuda.CASES[name]
            ptx = emulated_cuda.compiled(case)
            return cls(case, ptx, cuda, partial(emulated_cuda.run, ptx, case))
        case, stem = CASES[name], compiled(name)
        execute = partial(emulated, stem, case, allowed=ALLOWED)
        return cls(case, stem.with_suffix(".ptx").read_text(), mosaic, execute)

    def run(self, mutation: Mutation, schedule, seed: int, watch=None) -> tuple[bool, Machine]:
        """Runs the edited kernel; returns whether its result is right, and the machine.

        `watch(machine)` is called before the launch.
        """
        launch = Machine.launch

        def launched(machine):
            mutation.change(machine)
            if watch:
                watch(machine)
            launch(machine)

        with contextlib.ExitStack() as patched:
            edited = lambda ptx, *name: parse(mutation.apply(ptx), *name)  # noqa: E731
            patched.enter_context(mock.patch.object(self.launcher, "parse", edited))
            patched.enter_context(mock.patch.object(Machine, "launch", launched))
            y, ran = self.execute(self.operands, schedule=schedule, seed=seed)
        return np.array_equal(y, self.expected), ran

    def noticed(self, mutation: Mutation) -> str | None:
        """Names the check that detects an edit in one of the schedules; None if none does."""
        for schedule, seed in SCHEDULES:
            try:
                right, _ = self.run(mutation, schedule, seed)
            except DeadlockError:
                return "deadlock"
            except RaceError:
                return "race"
            except EmulatorError:
                return "protocol"
            if not right:
                return "values"
        return None

    def traces(self) -> tuple[dict, set[int]]:
        """Traces the unedited kernel.

        Returns:
          (cluster, warp) -> the instructions that the warp executes, in order; and the instructions
          that initialise an mbarrier which is never used.
        """
        found, made = collections.defaultdict(list), []

        def note(i, warp, mask):
            found[warp.block.cluster.number, warp.agent].append(i)
            line = warp.machine.kernel.code[i]
            if line.opcode.startswith("mbarrier.init"):
                place = int(warp.registers[line.operands[0].base.number][active_lanes(mask)[0]])
                made.append((i, barrier_at(warp, place, cluster=False)))

        assert self.run(NONE, *SCHEDULES[0], lambda machine: watch(machine, note))[0]
        used = {i for i, barrier in made if barrier.phase}
        return found, {i for i, _ in made} - used

    def only_waits_longer(self, mutation: Mutation) -> bool:
        """Returns whether an edit can only make waits last longer.

        This holds if all instructions that access memory, barriers or tensor cores, except waits,
        have the same registers as in the unedited kernel. In addition, if a wait ends before the
        phase that the unedited kernel waits for, no operation that it could protect may follow.
        """
        unedited, waits, _ = self.accesses(NONE, *SCHEDULES[0])
        edited, *_ = self.accesses(mutation, *SCHEDULES[0])
        return edited == unedited and not any(
            self.accesses(mutation, *schedule, right=waits)[2] for schedule in SCHEDULES
        )

    def only_unused_rows_differ(self, mutation: Mutation) -> bool:
        """Returns whether an edit changes only rows of a product whose sums are not used.

        This holds if the first row of the product's first operand has the same place, and all other
        instructions that access memory, barriers or tensor cores have the same registers as in the
        unedited kernel. So it holds for the constant row of the kernel that cuts images.
        """
        edited_line = parse(self.ptx).code[mutation.index].line
        first_rows: dict[Mutation, list] = {NONE: [], mutation: []}
        others = []

        def note(edit, i, warp, mask):
            line = warp.machine.kernel.code[i]
            if line.line != edited_line or not re.match(MULTIPLY, line.opcode):
                return
            (lane,) = active_lanes(mask)
            descriptor = int(warp.registers[line.operands[1].number][lane])
            operand = SharedOperand.from_tcgen05_descriptor(
                descriptor, warp.machine, transposed=False
            )
            first_rows[edit].append(byte_offsets(operand, 1, 32, 1).tolist())

        for edit in first_rows:
            self.run(
                edit, *SCHEDULES[0], lambda machine, edit=edit: watch(machine, partial(note, edit))
            )
            found, *_ = self.accesses(edit, *SCHEDULES[0])
            others.append(
                {name: [x for x in all_ if x[0] != edited_line] for name, all_ in found.items()}
            )
        return first_rows[NONE] == first_rows[mutation] and others[0] == others[1]

    def accesses(self, mutation: Mutation, schedule, seed: int, right=None):
        """Records the accesses of an edited kernel, by lane.

        Returns:
          The registers of all instructions not in QUIET; the barriers of the waits; and the
          protected instructions after a wait that ends before the phase of the `right` barrier.
        """
        found, waits = collections.defaultdict(list), collections.defaultdict(list)
        early, unguarded = set(), []

        def note(i, warp, mask):
            line = warp.machine.kernel.code[i]
            if re.match(QUIET, line.opcode):
                return
            for lane in active_lanes(mask):
                name = warp.block.cluster.number, warp.agent, lane
                if name in early and re.match(rf"{GUARDED}|mbarrier\.arrive", line.opcode):
                    unguarded.append(line)
                if not re.match(WAIT, line.opcode):
                    values = [warp.registers[number][lane].tobytes() for number in line.registers]
                    found[name].append((line.line, *values))
                    continue
                done, address, parity, *_ = line.operands
                if not warp.registers[done.number][lane]:
                    continue
                place, wanted = (
                    int(warp.registers[operand.number][lane]) for operand in (address.base, parity)
                )
                waits[name].append((place + address.offset, wanted))
                if right and len(waits[name]) <= len(right[name]):
                    place, wanted = right[name][len(waits[name]) - 1]
                    if barrier_at(warp, place, cluster=False).phase & 1 == wanted:
                        early.add(name)

        self.run(mutation, schedule, seed, lambda machine: watch(machine, note))
        return found, waits, unguarded


def watch(machine: Machine, note) -> None:
    """Calls note(number, warp, mask of lanes) after each executed instruction."""

    def noted(i, step):
        def execute(warp, mask):
            blocked = step.execute(warp, mask)
            if blocked is None or blocked.done:
                note(i, warp, mask)
            return blocked

        return dataclasses.replace(step, execute=execute) if step.execute else step

    machine.code = [noted(i, step) for i, step in enumerate(machine.code)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", NAMES + CUDA_NAMES)
def test_edits_are_noticed(request, monkeypatch, record_property, name, part):
    if name in CUDA_NAMES:
        request.getfixturevalue("nvcc")
    # These kernels execute fewer instructions, so an edited kernel that reaches this number loops.
    monkeypatch.setattr(machine, "LIVELOCK_INSTRUCTIONS", 60_000)
    subject = Subject.of(name)
    traces, unused = subject.traces()
    executed = set().union(*traces.values())
    _, ran = subject.run(NONE, *SCHEDULES[1])
    code = Code(subject.ptx)
    every = mutations(code, ran.tensor_maps, 2 * subject.case.N)
    assert len(every) > 500
    chosen = every[part::PARTS][::STEP]
    unexplained, caught = [], 0
    for mutation in chosen:
        if how := subject.noticed(mutation):
            caught += 1
        elif mutation.index is not None and mutation.index not in executed:
            how = "not executed"
        elif reason := harmless(mutation, code, traces, unused):
            how = f"harmless: {reason}"
        elif mutation.index is not None and subject.only_waits_longer(mutation):
            how = "harmless: the only difference is waits that last longer or protect nothing"
        elif mutation.kind == "matrix descriptor" and subject.only_unused_rows_differ(mutation):
            how = "harmless: only rows of a product differ whose sums are not used"
        else:
            unexplained.append(str(mutation))
        record_property(str(mutation), how)
    assert not unexplained
    # 95% of all edits are detected. The share of a part may be lower, and a sample is too small for
    # a bound.
    assert not EVERY or caught >= 0.85 * len(chosen)
