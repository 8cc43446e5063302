"""`pallas-patch-embed check`: its comparisons, and how it continues after a hang or a crash."""

import argparse
import ctypes
import functools
import itertools
import json
import multiprocessing
import signal
import subprocess
import sys
import tomllib
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_patch_embed.backends import triton, xla
from pallas_patch_embed.base import ending
from pallas_patch_embed.base.dtypes import DTYPES, OUT_DTYPES
from pallas_patch_embed.base.problem import Problem
from pallas_patch_embed.commands import cli
from pallas_patch_embed.commands.check import command, memory, work
from pallas_patch_embed.commands.check.cases import (
    FEW_SHAPES,
    SHAPES,
    SOURCES,
    TABLES,
    CheckCase,
    cases_of,
    pairwise,
)
from pallas_patch_embed.commands.check.compare import LAUNCHES, Counts, compared, wrong_elements
from pallas_patch_embed.commands.check.process import (
    Ended,
    Launches,
    Listed,
    NoCaseError,
    Prepares,
    supervised,
)
from tests.commands import stand_in_checks
from tests.repository import ROOT, environment

SMALL = Problem((2, 5, 128), (64, 128), (64,), (5, 64), "int8", "bfloat16", "bfloat16")
right = functools.partial(xla.run, out_dtype="bfloat16")


def found_in(run, runs=2, **options):
    """Sums the counts of `compared` over some launches for SMALL."""
    options = {"seed": 1, "devices": jax.devices()[:1], **options}
    return functools.reduce(Counts.plus, itertools.islice(compared(run, SMALL, **options), runs))


def with_bits(y, change):
    """Returns y with its bits changed by `change`."""
    bits = lax.bitcast_convert_type(y, jnp.uint16)
    return lax.bitcast_convert_type(change(bits), y.dtype)


def test_every_launch_is_compared_and_has_new_operands():
    drawn = set()

    def run(*operands):
        jax.debug.callback(lambda table: drawn.add(table.tobytes()), operands[3])
        return right(*operands)

    found = found_in(run, runs=3)
    jax.effects_barrier()
    assert (found.launches, found.elements, found.wrong) == (3, 3 * 2 * 5 * 64, 0)
    assert len(drawn) == 3 and found.all_wrong == 0


def test_programs_of_two_launches_run_on_two_devices_at_the_same_time():
    seen = []

    def wrong(*operands):
        y = right(*operands).at[0, 0, 0].set(jnp.nan)
        jax.debug.callback(lambda table: seen.append(table.tobytes()), operands[3])
        return y

    found = found_in(wrong, runs=1, devices=jax.devices()[:2], how="in a command buffer")
    jax.effects_barrier()
    assert (found.launches, found.wrong, len(set(seen))) == (4, 4, 4)


def test_a_wrong_element_is_found_in_every_run():
    def wrong(*operands):
        return right(*operands).at[1, 4, 63].multiply(1.02)

    assert wrong_elements(wrong, SMALL, runs=2, seed=1) == 2


def test_a_missing_element_is_wrong():
    assert found_in(lambda *operands: right(*operands).at[0, 0, 0].set(jnp.nan)).wrong == 2


@pytest.mark.parametrize("column, wrong, moved", [(2, 2, 0), (3, 0, 2)])
def test_a_fused_multiply_add_may_only_move_columns_whose_scale_is_no_power_of_two(
    column, wrong, moved
):
    def off_by_one(*operands):
        return with_bits(right(*operands), lambda bits: bits.at[1, 4, column].add(1))

    # The number of elements that XLA moves by fusing the multiply-add is subtracted.
    own = found_in(right).moved
    found = found_in(off_by_one)
    assert found.wrong == wrong and abs(found.moved - own - moved) <= 1


def test_more_than_a_few_moved_elements_are_wrong():
    assert Counts(elements=10**6, moved=108).all_wrong == 0
    assert Counts(elements=10**6, moved=109).all_wrong == 109
    assert Counts(changed=1).all_wrong == 1


@pytest.mark.parametrize("buffer", range(11), ids=lambda i: "guard" if i % 2 == 0 else "buffer")
def test_bytes_that_a_kernel_writes_outside_of_its_result_are_counted(buffer):
    addresses = []

    def allocate(kind, device):
        array = memory.allocate(kind, device)
        addresses.append(array.unsafe_buffer_pointer())
        return array

    def write(y):
        # The byte is changed: as a part of a guard or of an operand it is never 0x3C.
        ctypes.memset(addresses[buffer] + 2, 0x3C, 1)
        return y

    def spills(*operands):
        y = right(*operands)
        return jax.pure_callback(write, y, y)

    found = found_in(spills, allocate=allocate)
    assert len(addresses) == 11
    # Buffer 9 is the result, which is written after the callback.
    assert found.changed == (0 if buffer == 9 else 2) and found.wrong == 0


class BestFit:
    """A stand-in for XLA's allocator, which takes the smallest free block that is large enough.

    It allocates the whole block if the remainder would be small.
    """

    def __init__(self, *free):
        self.free = [list(block) for block in free]

    def __call__(self, kind, device):
        nbytes = -(-kind.size * kind.dtype.itemsize // memory.UNIT) * memory.UNIT
        block = min((b for b in self.free if b[1] >= nbytes), key=lambda b: b[1])
        address, size = block
        taken = nbytes if size >= 2 * nbytes or size - nbytes >= 2**27 else size
        block[:] = address + taken, size - taken

        def delete():
            block[:] = address, size

        return types.SimpleNamespace(
            nbytes=kind.size * kind.dtype.itemsize,
            unsafe_buffer_pointer=lambda: address,
            delete=delete,
        )


KINDS = [jax.ShapeDtypeStruct((size,), jnp.uint8) for size in (256, 100, 256, 400_000, 256)]
GPU = types.SimpleNamespace(platform="gpu")


def test_buffers_follow_each_other_although_the_allocator_prefers_small_blocks():
    # The block of 400,000 bytes has room for more small arrays than `place` tries.
    needed = 256 * 4 + 400_128 + 2**27
    blocks = ((0, 300), (2**14, 9000), (2**19, 400_000), (2**20, 2**20), (2**30, needed))
    allocate = BestFit(*blocks, (2**31, 2**30))
    placed = memory.allocate_adjacent(KINDS, GPU, allocate)
    assert [x.nbytes for x in placed] == [kind.size for kind in KINDS]
    assert memory.are_adjacent(placed)
    assert placed[0].unsafe_buffer_pointer() == 2**30


def test_placing_ends_if_the_allocator_leaves_spaces():
    addresses = itertools.count(0, 2**20)

    def allocate(kind, device):
        address = next(addresses)
        return types.SimpleNamespace(
            nbytes=kind.size, unsafe_buffer_pointer=lambda: address, delete=lambda: None
        )

    placed = memory.allocate_adjacent(KINDS, GPU, allocate)
    assert len(placed) == len(KINDS) and not memory.are_adjacent(placed)


def pairs(combinations):
    return {pair for values in combinations for pair in itertools.combinations(values.items(), 2)}


def test_every_pair_that_is_allowed_occurs_in_few_combinations():
    parameters = {"a": range(5), "b": range(4), "c": "xyz", "d": (False, True)}

    def allowed(values):
        return not (values["a"] == 0 and values["c"] == "x") and values["b"] != 3

    every = [dict(zip(parameters, values)) for values in itertools.product(*parameters.values())]
    found = list(pairwise(parameters, allowed))
    assert all(map(allowed, found))
    assert pairs(found) == pairs(filter(allowed, every))
    assert len(found) <= 20


@pytest.mark.parametrize("shapes, most", [("few", 45), ("all", 80)])
def test_the_cases_of_a_backend_are_a_pairwise_cover_of_what_it_serves(shapes, most):
    def serves(case):
        return case.dtype != "float8_e4m3fn" or case.out_dtype == "float32"

    found = cases_of("cuda", serves, shapes=SHAPES[shapes], dtypes=DTYPES[1:], devices=2, many=4736)
    assert len(found) <= most and all(map(serves, found))
    seen = {(c.shape, c.dtype) for c in found}
    assert seen >= set(itertools.product(SHAPES[shapes], DTYPES[1:]))
    assert {(c.dtype, c.out_dtype) for c in found} == set(
        itertools.product(DTYPES[1:], OUT_DTYPES)
    ) - {("float8_e4m3fn", "bfloat16")}
    assert {(c.launch, c.on_every_device) for c in found} == {
        (launch, every)
        for launch in ("alone", "on slices", "in a command buffer", "on two streams")
        for every in (False, True)
    }
    assert max(case.B for case in found) == 4736
    for case in found:
        naflex = case.shape.name.startswith("NaFlex")
        assert case.problem.table_period and (not naflex or case.table == TABLES[1])


def test_a_case_says_what_is_launched():
    case = CheckCase("cuda", FEW_SHAPES[0], "int8", "bfloat16", 3, source="cut by the kernel")
    assert str(case) == (
        "cuda: B/16 224, 3 images cut by the kernel, int8 to bfloat16, positions, alone"
    )
    assert case.cut == "kernel" and case.problem.images == (3, 224, 224, 3)


# The child process, with stand-ins for its work and for the clock.


def wait(connection, seconds, last):
    """Waits without a clock; only the second launch of case 1 times out."""
    return last != Launches(1, 2) and connection.poll(None)


def test_after_a_hang_and_a_crash_the_other_cases_go_on():
    work = stand_in_checks.work("right", "hangs", "crashes", "right")
    messages = list(supervised(work, timeout=7.5, wait=wait))
    assert sum(isinstance(message, Listed) for message in messages) == 1
    assert [message for message in messages if isinstance(message, Ended)] == [
        Ended(0, "ended"),
        Ended(1, "hung", "launch 2 took more than 7.5 s and was ended"),
        Ended(2, "crashed", "launch 2 ended its process, by SIGKILL"),
        Ended(3, "ended"),
    ]


def test_a_child_that_begins_nothing_is_not_started_for_ever():
    with pytest.raises(NoCaseError, match="did not begin any case: it ended"):
        list(supervised(stand_in_checks.ends_at_once, timeout=1, wait=wait))


KILLED_PARENT = """
import os, signal
from pallas_patch_embed.commands.check.process import Launches, supervised
from tests.commands import stand_in_checks

def wait(connection, seconds, last):
    return connection.poll(None)

for message in supervised(stand_in_checks.work("hangs"), timeout=1, wait=wait):
    if message == Launches(0, 2):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_hangs_ends_with_its_parent():
    # Parent and child share standard output, so this returns when both have ended.
    command = [sys.executable, "-c", KILLED_PARENT]
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), timeout=300)
    assert result.returncode == -signal.SIGKILL


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["check", *map(str, arguments)])


def test_the_report_has_every_case_and_the_exit_code_says_whether_all_are_right(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = parsed("--report", path, "--runs", 2)
    child = stand_in_checks.work("wrong", "hangs", "right")
    assert command.run(arguments, child=child, wait=wait) == 1
    report = json.loads(path.read_text())
    assert report["complete"] and not report["all_right"] and report["options"]["runs"] == 2
    assert report["about"] == stand_in_checks.ABOUT
    assert isinstance(report["gpus_before"], list) and isinstance(report["gpus_after"], list)
    counts = dict(elements=20, moved=0, changed=0, poisoned=2, guarded=2)
    wrong, hangs, good = report["cases"]
    expected = {"case": "stand-in: wrong", "verdict": "wrong", "reason": "", **counts}
    assert wrong == {**expected, "launches": 2, "wrong": 2}
    assert hangs["verdict"] == "hung" and "launch 2" in hangs["reason"] and hangs["launches"] == 1
    assert good == {**expected, "case": "stand-in: right", "verdict": "right"} | dict(
        launches=2, wrong=0
    )
    printed = capsys.readouterr().out
    assert "not checked: absent, int8: it is not here." in printed
    assert "wrong     stand-in: wrong: 2 of 20 elements wrong" in printed
    assert "hung      stand-in: hangs: launch 2 took more than 60 s and was ended" in printed
    (row,) = (line for line in printed.splitlines() if line.startswith("stand-in  "))
    assert row.split() == "stand-in 3 5 50 2 0 5 5 1 1 0 0".split()
    assert command.run(parsed(), child=stand_in_checks.work("right"), wait=wait) == 0


def test_an_interrupted_check_leaves_what_it_found(tmp_path):
    path, outcomes = tmp_path / "report.json", []
    path.write_text('{"complete": true, "all_right": true, "options": {}, "cases": []}')

    def interrupts(connection, seconds, last):
        if isinstance(last, Prepares):
            outcomes.append(ending.state.outcome)
        if last == Launches(1, 2):
            raise KeyboardInterrupt
        return connection.poll(None)

    child = stand_in_checks.work("right", "hangs")
    with pytest.raises(KeyboardInterrupt):
        command.run(parsed("--report", path), child=child, wait=interrupts)
    assert outcomes == [f"{number} of 2 cases are in {path}" for number in (0, 1)]
    report = json.loads(path.read_text())
    assert [case["verdict"] for case in report["cases"]] == ["right", "not begun"]
    assert not report["complete"] and not report["all_right"]


def test_a_check_that_cannot_go_on_is_not_right(tmp_path, capsys):
    path = tmp_path / "report.json"
    child = stand_in_checks.ends_at_once
    assert command.run(parsed("--report", path), child=child, wait=wait) == 1
    assert "did not begin any case" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert not report["complete"] and "did not begin any case" in report["failure"]


def test_a_process_that_cannot_be_killed_ends_the_check(monkeypatch, capsys):
    does_nothing = dict.fromkeys(("start", "join", "kill"), lambda *_: None)
    process = types.SimpleNamespace(**does_nothing, is_alive=lambda: True, pid=7)
    context = types.SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **_: process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    hangs = stand_in_checks.work("hangs")
    assert command.run(parsed(), child=hangs, wait=lambda *_: False) == 1
    assert "process 7 hangs and cannot be killed. The GPU may need" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--runs", "0"], "0 is not a positive number"),
        (["--runs", "two"], "invalid positive int value: 'two'"),
        (["--seconds", "-1"], "-1 is not a positive number"),
        (["--timeout", "inf"], "inf is not a positive number"),
        (["--runs", "1", "--seconds", "1"], "not allowed with argument --runs"),
        (["--backend", "cublas"], "invalid choice: 'cublas'"),
        (["--shapes", "some"], "invalid choice: 'some'"),
        (["--seed", "-1"], "--seed is -1, expected 0 to 2^31 - 1"),
        (["--report", "no/such/folder/report.json"], "there is no such folder"),
        (["--report", "."], "--report is .: it exists and is not a regular file"),
        (["--report", "/dev/null"], "it exists and is not a regular file"),
        (["--report", "/proc/report.json"], "nothing can be written there (No such"),
    ],
)
def test_bad_arguments_are_refused(command_line, arguments, message):
    code, error = command_line("check", *arguments)
    assert code == 2 and message in error


def test_a_missing_file_of_measured_configs_is_refused(command_line, monkeypatch):
    monkeypatch.setenv("PATCH_EMBED_TUNED", "none.json")
    code, error = command_line("check")
    assert code == 2 and error.startswith("none.json: the file of measured configs cannot be read")


@pytest.mark.parametrize(
    "name, run, package",
    [
        ("check", "commands.check.command.run", "pallas_patch_embed"),
        ("demo", "commands.demo.run", "pallas_patch_embed[demo]"),
    ],
)
def test_a_missing_package_is_reported_with_what_installs_it(
    command_line, monkeypatch, tmp_path, name, run, package
):
    def needs_more(*_):
        raise ImportError("No module named 'more'")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"pallas_patch_embed.{run}", needs_more)
    code, error = command_line(name)
    assert code == 2 and "No module named 'more'" in error
    assert error.endswith(f"pip install '{package}'.\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra for extras in cli.EXTRAS.values() for extra in extras.split(",")}
    assert extras <= set(project["optional-dependencies"])


def test_a_text_that_no_case_has_is_refused():
    with pytest.raises(
        ValueError, match="--only is 'B/17': no case has a description that contains this"
    ):
        command.run(parsed("--only", "B/17"), child=stand_in_checks.work(), wait=wait)
    with pytest.raises(
        ValueError, match=r"none of the backends serves on this machine.*it is not here"
    ):
        command.run(parsed(), child=stand_in_checks.work(), wait=wait)


# The child's work, run in this process on the CPU.


def sent(**options):
    """Collects the messages of the child's work."""
    messages = []
    work.run(work.Options(**options), messages.append, frozenset())
    return messages


def test_the_seconds_of_a_case_begin_after_its_first_launch(monkeypatch):
    now = 0.0

    def launches(*_, **__):
        nonlocal now
        for launch in itertools.count():
            now += 1 if launch else 100  # The first one compiles.
            yield Counts(launch)

    options = work.Options(backends=("xla",), seconds=3.0)
    (case, *_), _ = work.listed(options, jax.devices())
    monkeypatch.setattr(work, "compared", launches)
    monkeypatch.setattr(work, "time", types.SimpleNamespace(monotonic=lambda: now))
    found = work.launched(case, 0, options, jax.devices(), print)
    assert list(found) == [Counts(launch) for launch in range(4)]


def test_xla_is_right_and_other_backends_say_why_they_are_not_checked():
    cases, _ = work.listed(work.Options(backends=("xla",)), jax.devices())
    case = next(c for c in cases if c.shape.N < 1152 and c.source == SOURCES[1])
    listed, *messages = sent(backends=("cuda", "xla"), only=str(case), runs=1)
    assert [type(message).__name__ for message in messages] == [
        *("Prepares", "Launches", "Found", "Ended")
    ]
    elements = case.B * case.shape.S * case.shape.N
    assert messages[2].counts | {"moved": 0, "poisoned": 0} == Counts(1, elements)._asdict()
    assert messages[3] == Ended(0, "ended")
    assert listed.about["refused"]["cuda"].keys() == {"bfloat16", "float8_e4m3fn", "int8"}
    assert not listed.about["interpreted"] and listed.about["packages"]["jax"]


@pytest.mark.slow("plans every case")
@pytest.mark.parametrize("capability, kernel", [("8.0", "triton"), ("10.3", "mosaic_sm100")])
def test_every_chip_has_the_cases_of_the_kernels_that_serve_it(capability, kernel, monkeypatch):
    monkeypatch.setattr(triton, "missing", lambda: None)
    gpu = types.SimpleNamespace(
        platform="gpu", compute_capability=capability, core_count=100, device_kind="a GPU"
    )
    kernels = ("mosaic_sm90", "mosaic_sm100", "triton")
    cases, refused = work.listed(work.Options(backends=kernels), [gpu])
    assert {case.backend for case in cases} == {kernel, "triton"}
    dtypes = {case.dtype for case in cases if case.backend == kernel}
    assert dtypes == set(DTYPES[1:]) - refused[kernel].keys()
    assert list(refused[kernel]) == (["int8"] if capability == "10.3" else [])
    assert {case.launch for case in cases} == set(LAUNCHES)


@pytest.mark.parametrize("error, ended", [("RESOURCE_EXHAUSTED: no memory", "left out"), ("", "")])
def test_after_an_error_of_the_device_the_process_ends(monkeypatch, error, ended):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError(error or "INTERNAL: an illegal instruction")
        yield

    monkeypatch.setattr(work, "compared", fails)
    endings = [m for m in sent(backends=("xla",), only="B/32") if isinstance(m, Ended)]
    if ended:
        assert len(endings) > 1 and {m.outcome for m in endings} == {"left out"}
        return
    assert endings == [Ended(0, "crashed", "INTERNAL: an illegal instruction")]


@pytest.mark.slow("each starts a process and compiles")
@pytest.mark.parametrize("backend", ["mosaic_sm100", "xla"])
def test_the_command_checks_this_machine(tmp_path, backend):
    report = tmp_path / "report.json"
    options = ["--backend", backend, "--only", "int8 to float32", "--runs", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "pallas_patch_embed", "check", *options, "--report", report],
        capture_output=True,
        text=True,
        env=environment(JAX_PLATFORMS="cpu"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(report.read_text())
    assert content["complete"] and content["all_right"]
    assert {case["verdict"] for case in content["cases"]} == {"right"}
    interpreted = ["mosaic_sm100"] if backend == "mosaic_sm100" else []
    assert content["about"]["interpreted"] == interpreted
    assert ("Interpreters execute" in result.stdout) == bool(interpreted)
