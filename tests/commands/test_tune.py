"""`pallas-patch-embed tune` with stand-ins for kernels and clock, and one real small search."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import (
    BACKENDS,
    choose,
    cuda,
    explain,
    ranked,
    stored,
    tiles,
    triton,
    xla,
)
from pallas_patch_embed.backends.cuda_tuning import Tuning
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.stored import SearchResult
from pallas_patch_embed.base.child import Child, ChildEndedError
from pallas_patch_embed.base.chips import A100, B200, H200, Target, chip_of
from pallas_patch_embed.base.problem import NAMED_SHAPES, NamedShape, Problem, named_shape
from pallas_patch_embed.commands.check.compare import wrong_elements
from pallas_patch_embed.commands.tune import command, search, timing
from pallas_patch_embed.commands.tune.search import Failure, Machine, Refusal, Task
from pallas_patch_embed.commands.tune.timing import Contender, Timing
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows
from tests.clock import Clock
from tests.commands import interrupted, tune_answers
from tests.kernels.interpreter import problem_of
from tests.operator.bounds import assert_bit_equal, draw_images, draw_params
from tests.repository import environment

HOPPER = Target("cuda", H200)
# A problem for which mosaic_sm90 is the default on Hopper.
ON_PALLAS = problem_of(named_shape("L/16 256"), "int8", 64)
SMALL = Problem((1, 64, 128), (64, 128), (64,), (64, 64), "int8", "bfloat16", "bfloat16")
VERSIONS = {"jax": "0.12"}


# The package's files.
FOLDER = stored.FOLDER

# The variables for the part of a GPU's memory that JAX reserves, the second one deprecated.
MEMORY, OLD_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """Removes files of measured configs from the environment and the package."""
    monkeypatch.delenv(stored.VARIABLE, raising=False)
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "stored")
    monkeypatch.setattr(triton, "missing", lambda: None)
    monkeypatch.setattr(command.ending.state, "outcome", "")


# Candidates.


@pytest.mark.parametrize("shape", NAMED_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    "name, chip", [("mosaic_sm90", H200), ("mosaic_sm100", B200), ("triton", A100)]
)
def test_candidates_are_the_heuristics_config_and_others_that_serve(name, chip, shape):
    backend, target = BACKENDS[name], Target("cuda", chip)
    for dtype in tiles.DTYPES:
        problem = problem_of(shape, dtype, 64)
        found = backend.candidates(problem, target)
        assert str(found[0]) == backend.plan(problem, target).config
        assert 1 < len(found) == len(set(found))
        for config in found:
            assert backend.plan(problem, target, config=config).config == str(config)
            fields = json.loads(json.dumps(dataclasses.asdict(config)))
            assert backend.config_of(fields) == config


def test_a_backend_that_cannot_serve_has_no_candidates():
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9\.0"):
        BACKENDS["mosaic_sm90"].candidates(ON_PALLAS, Target("cuda", B200))
    assert xla.candidates(ON_PALLAS, HOPPER) == ()
    with pytest.raises(ValueError, match="but xla has no configs"):
        xla.config_of({"tile_n": 128})


@pytest.mark.parametrize("field, value", [("tile_m", -64), ("stages", 2**30), ("warps", 0)])
def test_a_config_that_the_Triton_kernel_does_not_have_is_refused(field, value):
    fields = dataclasses.asdict(triton.HOPPER[0]) | {field: value}
    with pytest.raises(ValueError, match=f"the kernel has no config TritonConfig.*{field}={value}"):
        triton.config_of(fields)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slots="10"), "slots of a HopperConfig is '10', expected"),
        (dict(slots=2**70), "slots of a HopperConfig is 1180591620717411303424, expected less"),
        (dict(slots="x" * 10**6), "slots of a HopperConfig is 'x{96}[.]{3}x{99}', expected"),
        (dict(stream_weight=0), "stream_weight of a HopperConfig is 0, expected"),
        (dict(depth=3), "consumers, depth, expected tile_n, slots, rows, stream_weight, consumers"),
    ],
    ids=str,
)
def test_fields_that_are_no_config_are_refused(change, message):
    fields = dataclasses.asdict(HopperConfig(tile_n=192, slots=10)) | change
    with pytest.raises(ValueError, match=message):
        BACKENDS["mosaic_sm90"].config_of(fields)


@pytest.mark.parametrize("tuning", [5, [], "none"])
def test_a_tuning_that_is_none_is_refused(monkeypatch, tuning):
    numbers = dict.fromkeys(("tile_m", "tile_n", "rows", "blocks", "slots"), 2)
    flags = dict(has_table=True, cooperative=False, stream_weight=False, built=True)
    kernel = cuda.CudaConfig("sm100", 100, "s8", "bf16", **flags, **numbers)
    monkeypatch.setattr(cuda, "configs", lambda: (kernel,))
    fields = dataclasses.asdict(kernel)
    assert cuda.config_of(fields) == kernel
    with pytest.raises(ValueError, match="the library has no kernel"):
        cuda.config_of(fields | {"tuning": tuning})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(load_columns=8), "loads of 16, 32 or 64 columns"),
        (dict(load_columns=64, step_columns=32), "step_columns to be a multiple of load_columns"),
        (dict(step_columns=48, load_columns=16), "step_columns to divide the 128 columns"),
        (
            dict(step_columns=32, load_columns=32),
            "step_columns to be a multiple of a store's 64 columns",
        ),
        (dict(stores_per_group=2), "stores_per_group to divide the stores of a step"),
        (dict(staging_buffers=3), "1, 2, 4 or 8 staging_buffers"),
        (dict(stagger_cycles=-1), "stagger_cycles of 0 or more"),
        (dict(step_columns=128), "at most 232 registers, not 296"),
    ],
    ids=str,
)
def test_an_impossible_tuning_is_refused_before_it_is_compiled(change, message):
    library = Tuning.of_library("bf16", 256, 4)
    library.check("bf16", 256, True)
    with pytest.raises(NotImplementedError, match=message):
        dataclasses.replace(library, **change).check("bf16", 256, True)


# Files.


def head(chip=H200, **changes):
    return stored.new_head(chip, "580", VERSIONS) | changes


def result(config, problem=ON_PALLAS, backend="mosaic_sm90"):
    fields = config and dataclasses.asdict(config)
    described = stored.describe_problem(problem)
    return SearchResult(backend, described, fields, "2026-11-25", {"a config": {}}, {})


OTHER = HopperConfig(tile_n=64, slots=9)


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a file of results and returns its path."""

    def write(*results, name="tuned.json", **changes):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        stored.write(path, head(**changes), results)
        return str(path)

    return write


def config_line(explanation, backend="mosaic_sm90"):
    """Returns a backend's config and its origin, without the time."""
    (line,) = (c for row, c in zip(explanation, explanation.configs) if row.backend == backend)
    return line.rsplit(", ", 1)[0]


def test_without_a_file_the_config_is_the_heuristics():
    chosen = SM90.choose_config(ON_PALLAS, H200)
    assert config_line(explain(ON_PALLAS, HOPPER)) == f"{chosen}, from the heuristic"
    assert choose(ON_PALLAS, HOPPER, "mosaic_sm90").origin == "from the heuristic"
    # XLA has no config, so there is no origin.
    assert choose(ON_PALLAS, HOPPER, "xla").origin == ""


@pytest.mark.parametrize("how", ["argument", "environment", "package"])
def test_a_measured_config_is_taken_before_the_heuristics(write, monkeypatch, how):
    name = "stored/nvidia_h200.json" if how == "package" else "tuned.json"
    path = write(result(OTHER), name=name)
    if how == "environment":
        monkeypatch.setenv(stored.VARIABLE, path)
    tuned = path if how == "argument" else None
    explanation = explain(ON_PALLAS, HOPPER, tuned)
    line = f"{OTHER}, tuned on 2026-11-25 ({os.path.basename(path)})"
    assert config_line(explanation) == line and line in str(explanation)
    plan = choose(ON_PALLAS, HOPPER, "mosaic_sm90", tuned)
    assert (plan.config, plan.origin) == (
        str(OTHER),
        "tuned on 2026-11-25 (tuned.json)".replace("tuned.json", os.path.basename(path)),
    )
    # The measured config holds only for this problem, with any leading axes.
    flat = dataclasses.replace(ON_PALLAS, patches=(8, 8, *ON_PALLAS.patches[1:]))
    assert choose(flat, HOPPER, "mosaic_sm90", tuned).config == str(OTHER)
    more = problem_of(named_shape("L/16 256"), "int8", 65)
    assert choose(more, HOPPER, "mosaic_sm90", tuned).origin == "from the heuristic"
    # A program that is lowered without a known chip may run on a different one.
    assert choose(
        ON_PALLAS, dataclasses.replace(HOPPER, known=False), "mosaic_sm90", tuned
    ).origin == ("from the heuristic")


def test_the_users_file_is_asked_before_the_packages(write):
    write(result(OTHER), name="stored/nvidia_h200.json")
    mine = write(result(None))
    plan = choose(ON_PALLAS, HOPPER, "mosaic_sm90", mine)
    assert plan.config == BACKENDS["mosaic_sm90"].plan(ON_PALLAS, HOPPER).config
    assert plan.origin == "from the heuristic, tuned on 2026-11-25 (tuned.json)"
    assert choose(ON_PALLAS, HOPPER, "mosaic_sm90", write(name="empty.json")).config == str(OTHER)


@pytest.mark.parametrize(
    "changes, why",
    [
        (
            dict(chip=B200),
            r"measured on NVIDIA B200 \(.*10.0, 148 .*but this is NVIDIA H200 \(.* 132 ",
        ),
        (dict(chip=dataclasses.replace(H200, multiprocessors=114)), "114 multiprocessors"),
        (dict(chip=dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")), "H100 80GB HBM3"),
        (dict(chip=None), r"measured on no NVIDIA GPU, but this is NVIDIA H200"),
        (
            dict(package="0.0.9"),
            "version 0.0.9 of this package, but this is version " + ppe.__version__,
        ),
    ],
    ids=["chip", "multiprocessors", "name", "no GPU", "version"],
)
def test_a_file_of_another_chip_or_version_is_ignored_with_the_reason(write, changes, why):
    path = write(result(OTHER), **changes)
    explanation = explain(ON_PALLAS, HOPPER, path)
    assert config_line(explanation).endswith("from the heuristic")
    (note,) = explanation.notes
    assert note.startswith(f"{path} is ignored: it was ") and note in str(explanation)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(note)


DAMAGED = {
    "nothing": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[]",
    "an older format": lambda text: text.replace('"format": 1', '"format": 0'),
    "brackets without end": lambda text: "[" * 100_000,
    "no chip": lambda text: text.replace('"chip"', '"ship"'),
    "a chip without a name": lambda text: text.replace('"name"', '"brand"'),
    "a chip without a capability": lambda text: re.sub(r"\[\s*9,\s*0\s*\]", "[]", text),
    "a result that is none": lambda text: text.replace('"date": "2026-11-25"', '"date": 25'),
    "a config that is none": lambda text: text.replace('"slots": 9', '"slots": "9"'),
    "the same problem twice": lambda text: json.dumps(
        (content := json.loads(text)) | {"results": content["results"] * 2}
    ),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_with_what_was_found(write, damage):
    path = write(result(OTHER))
    Path(path).write_text(damage(Path(path).read_text()))
    message = "is not a valid file of measured configs: .+ Remove it, restore it"
    with pytest.raises(ValueError, match=message) as error:
        choose(ON_PALLAS, HOPPER, "mosaic_sm90", path)
    assert str(error.value).startswith(path)
    with pytest.raises(ValueError, match=message):
        explain(ON_PALLAS, HOPPER, path)


def test_a_missing_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(
        ValueError,
        match=r"none\.json: the file .* cannot be read .* Correct its path in PATCH_EMBED_TUNED",
    ):
        explain(ON_PALLAS, HOPPER)
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"is not a regular file, expected a file that .* Correct its path in PATCH_EMBED",
    ):
        explain(ON_PALLAS, HOPPER)


def test_results_of_images_are_those_of_a_kernel_that_cuts_them(write):
    of_images = command.problem_of(named_shape("L/16 256"), 64, "int8", "images")
    *_, last = triton.candidates(of_images, HOPPER)
    images = write(result(last, of_images, "triton"), name="images.json")
    patches = write(result(last, of_images.of_patches, "triton"), name="patches.json")

    def configs(tuned):
        options = ranked(of_images, HOPPER, backend="triton", tuned=tuned).options
        return {x.cuts_images: (x.config == str(last), x.origin) for x in options}

    tuned = "tuned on 2026-11-25"
    assert configs(images)[True] == (True, f"{tuned} (images.json)")
    assert configs(images)[False][1] == "from the heuristic"
    assert configs(patches)[False] == (True, f"{tuned} (patches.json)")
    assert configs(patches)[True][1] == "from the heuristic"


def test_backends_are_ranked_by_the_times_in_a_users_file(write):
    """Without times in a file, mosaic_sm90 is predicted to be faster."""
    timed = dict(milliseconds=1e-3, low=1e-3, high=1e-3, calls=1, clock=None, power=None)
    heuristic = choose(ON_PALLAS, HOPPER, "triton").config
    fast = dataclasses.replace(result(None, backend="triton"), times={heuristic: {"burst": timed}})
    before, after = (choose(ON_PALLAS, HOPPER, None, x) for x in (None, write(fast)))
    assert before.backend == "mosaic_sm90" and not before.measured
    assert (after.backend, after.microseconds, after.measured) == ("triton", 1.0, True)
    assert "1 us measured" in str(explain(ON_PALLAS, HOPPER, write(fast)))
    for time in (0, -5, 10**400, float("nan"), True, "0.002", None):
        wrong = dataclasses.replace(fast, times={heuristic: {"burst": {"milliseconds": time}}})
        with pytest.raises(ValueError, match=r"milliseconds of a burst are .* positive number"):
            choose(ON_PALLAS, HOPPER, None, write(wrong))


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_configs_in_the_packages_files_serve(monkeypatch, path):
    monkeypatch.setattr(stored, "FOLDER", FOLDER)
    head, results = stored.read(path).head, stored.read(path).results
    measured = head["chip"]
    chip = chip_of(tuple(measured["capability"]), measured["multiprocessors"], measured["name"])
    target = Target("cuda", chip)
    problems = {task.key: task.problem for _, task in command.list_tasks()}
    assert results.keys() <= problems.keys()
    for key, result in results.items():
        assert result.times
        # Without the CUDA library its kernels are not known.
        if result.backend != "cuda" or not cuda.missing():
            plan = choose(problems[key], target, result.backend)
            where = "" if result.config else "from the heuristic, "
            assert plan.origin == f"{where}tuned on {result.date} ({path.name})"


def test_a_file_that_was_written_again_is_read_again(write):
    path = write(result(OTHER))
    assert choose(ON_PALLAS, HOPPER, "mosaic_sm90", path).config == str(OTHER)
    newer = HopperConfig(tile_n=64, slots=10)
    os.utime(write(result(newer)), ns=(0, 0))
    assert choose(ON_PALLAS, HOPPER, "mosaic_sm90", path).config == str(newer)


def test_a_problem_of_which_nothing_was_timed_is_not_tuned(write):
    nothing = dataclasses.replace(result(None), times={}, refused={"a config": "it hung"})
    assert choose(ON_PALLAS, HOPPER, "mosaic_sm90", write(nothing)).origin == "from the heuristic"


@pytest.mark.parametrize("tile_n", [-64, 0])
def test_a_slice_without_columns_gives_way_to_the_heuristics(write, tile_n):
    path = write(result(HopperConfig(tile_n=tile_n, slots=9)))
    plan = choose(ON_PALLAS, HOPPER, "mosaic_sm90", path)
    assert plan.config == choose(ON_PALLAS, HOPPER, "mosaic_sm90").config
    assert f"is refused: tile_n is {tile_n}, expected a multiple of 64" in plan.origin


def test_a_measured_config_that_cannot_serve_gives_way_to_the_heuristics(write):
    path = write(result(HopperConfig(tile_n=256, slots=16)))
    plan = choose(ON_PALLAS, HOPPER, "mosaic_sm90", path)
    assert plan.config == choose(ON_PALLAS, HOPPER, "mosaic_sm90").config
    assert plan.origin.startswith(f"from the heuristic, because the config of {path} is refused: ")
    assert "bytes of shared memory" in plan.origin


def test_a_lowering_checks_nothing_but_the_measured_config(write, monkeypatch):
    path, counts, known = write(result(OTHER)), collections.Counter(), HopperConfig.check

    def check(self, problem, chip):
        counts[self] += 1
        known(self, problem, chip)

    monkeypatch.setattr(HopperConfig, "check", check)
    choose(ON_PALLAS, HOPPER, "mosaic_sm90", path)
    assert counts == {OTHER: 1}


PARAMS = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 2), N=8, dtype="int8")
PATCHES = ppe.patchify(draw_images(np.random.default_rng(1), 3, 8, 8, 3), PARAMS)


def test_the_operator_takes_a_file_as_a_static_argument(write, tmp_path):
    path, lowered = Path(write(result(OTHER))), []
    expected = ppe.patch_embed(PATCHES, PARAMS)

    @jax.jit
    def embed(patches):
        lowered.append(1)
        return ppe.patch_embed(patches, PARAMS, tuned=path)

    assert_bit_equal(embed(PATCHES), expected)
    assert_bit_equal(embed(PATCHES), expected)
    assert len(lowered) == 1
    images = draw_images(np.random.default_rng(1), 3, 8, 8, 3)
    assert_bit_equal(ppe.embed_images(images, PARAMS, tuned=path), expected)
    assert str(path) in str(ppe.explain(PATCHES, PARAMS, tuned=path))
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a valid file of measured configs"):
        ppe.patch_embed(PATCHES[:2], PARAMS, tuned=path)
    with pytest.raises(TypeError, match="tuned is 3, expected the path of a file"):
        ppe.patch_embed(PATCHES, PARAMS, tuned=3)


# A search of one problem, with stand-ins for kernels and their times.


def times(burst, sustained=None, spread=0.0):
    """Returns the times of a candidate, in milliseconds."""
    of = {"burst": burst, "sustained": burst if sustained is None else sustained}
    return {name: Timing(x, x - spread, x + spread, 5) for name, x in of.items()}


@pytest.mark.parametrize(
    "others, kept",
    [
        ([times(0.9)], "0"),
        ([times(1.1)], "heuristic"),
        ([times(1.0)], "heuristic"),
        ([times(0.96, spread=0.03), times(0.98)], "0"),
        ([times(0.96, spread=0.05)], "heuristic"),
        ([times(0.9, 1.1)], "heuristic"),
        ([times(1.1, 0.9)], "heuristic"),
        ([times(0.9, 1.0)], "0"),
        ([times(0.9), times(0.8), times(0.85)], "1"),
        ([times(0.7, 1.1), times(0.95)], "1"),
        (
            [{"burst": times(0.9)["burst"], "sustained": times(1.2, spread=0.3)["burst"]}],
            "heuristic",
        ),
        ([{"burst": times(0.5)["burst"]}], "heuristic"),
    ],
    ids=str,
)
def test_the_fastest_is_kept_if_it_is_faster_by_more_than_the_spread(others, kept):
    found = {"heuristic": times(1.0)} | {str(i): other for i, other in enumerate(others)}
    assert search.fastest(found, "heuristic") == kept


def test_without_the_heuristics_config_the_fastest_is_kept():
    assert search.fastest({"a": times(1.0), "b": times(0.9, spread=0.5)}, "heuristic") == "b"


@dataclasses.dataclass(frozen=True)
class Config:
    """A stand-in for a config, with the duration of its kernel and a fault."""

    seconds: float
    fault: str = ""


@pytest.fixture
def device(monkeypatch):
    """Installs a fake clock and the backend "stand-in" with `device.configs`; records the turns."""
    device = types.SimpleNamespace(clock=Clock(), configs=[], turns=[])
    fake = types.SimpleNamespace(perf_counter=device.clock.perf_counter, sleep=device.clock.sleep)
    monkeypatch.setattr(timing, "time", fake)
    monkeypatch.setattr(timing, "on_gpu", lambda: False)

    def plan(problem, target, *, config=None):
        def run(source, *operands):
            if config.fault == "does not compile":
                raise RuntimeError("the compiler says no\nand more")
            if problem.images is not None:
                source = cut_into_rows(source, problem.geometry, Encoding(problem.dtype))
            y = xla.run(source, *operands, out_dtype=problem.out_dtype)
            return y.at[0, 3, 5].multiply(-2) if config.fault == "wrong" else y

        return Plan(run, str(config))

    class Timed(Contender):
        """A contender whose call takes the time of its config."""

        def __call__(self):
            config: Any = self.function
            device.turns.append(config.seconds)
            device.clock.sleep(config.seconds)
            return jnp.zeros(())

    backend = types.SimpleNamespace(plan=plan, candidates=lambda *_: device.configs)
    monkeypatch.setitem(BACKENDS, "stand-in", backend)
    planned = {}

    def remember(task, target, config, known=search.plan):
        found = known(task, target, config)
        planned[found.run] = config
        return found

    def contender(jitted, *operands):
        return Timed(planned[jitted.__wrapped__], *operands)

    monkeypatch.setattr(search, "plan", remember)
    monkeypatch.setattr(search, "Contender", contender)
    return device


TASK = Task("stand-in", SMALL)


def found(device, *configs, refused=(), task=TASK):
    """Runs a search; returns the names of the tried candidates, and the result."""
    device.configs = list(configs)
    *tried, last = search.search(task, HOPPER, dict(refused))
    return tried, last


def test_a_faster_config_is_kept_and_a_slower_one_is_not(device):
    slow, fast, slower = Config(0.03), Config(0.02), Config(0.04)
    tried, last = found(device, slow, fast, slower)
    assert tried == [str(slow), str(fast), str(slower), search.IN_TURNS]
    assert last.config == dataclasses.asdict(fast) and not last.refused
    assert last.problem == stored.describe_problem(SMALL)
    assert last.times[str(fast)]["burst"]["milliseconds"] == pytest.approx(20)
    _, last = found(device, fast, slow)
    assert last.config is None and set(last.times) == {str(fast), str(slow)}


def test_a_backend_with_one_config_says_so(device):
    _, last = found(device, Config(1e-4))
    assert command.describe(last).startswith("the backend has a single config\n  0.1000 ms burst: ")


def test_contenders_take_turns(device):
    configs = [Config(0.03), Config(0.02), Config(0.04)]
    found(device, *configs)
    turns = device.turns
    # Each contender runs once when it is checked, and once before the first turn.
    burst = search.BURST
    one_round = [c.seconds for c in configs for _ in range(burst["calls"])]
    begin = 2 * len(configs)
    assert turns[begin : begin + burst["rounds"] * len(one_round)] == one_round * burst["rounds"]
    # The config that is slower in bursts is not timed sustained.
    sustained = turns[begin + burst["rounds"] * len(one_round) + 2 :]
    changes = [a for a, b in zip(sustained, [*sustained[1:], None]) if a != b]
    assert changes == [0.03, 0.02] * search.SUSTAINED["rounds"]


def test_if_no_config_can_be_kept_none_is_timed_sustained(device):
    _, last = found(device, Config(0.03), Config(0.04), Config(0.05))
    assert last.config is None
    assert [list(of_it) for of_it in last.times.values()] == [["burst"]] * 3


def test_only_the_heuristics_and_the_closest_are_timed_sustained(device):
    configs = [Config(0.05), *(Config(0.01 * i) for i in (1, 2, 3, 4))]
    _, last = found(device, *configs)
    sustained = {name for name, of_it in last.times.items() if "sustained" in of_it}
    assert sustained == {str(c) for c in configs[:3]} and len(last.times) == 5


def test_calls_that_take_less_than_their_dispatch_are_not_timed_sustained(device):
    short = [Config(1e-4), Config(0.9e-4), Config(1.1e-4)]
    _, last = found(device, *short)
    assert [list(of_it) for of_it in last.times.values()] == [["burst"]] * 3
    assert last.config == dataclasses.asdict(short[1])
    assert all(f"{ms} ms burst: " in command.describe(last) for ms in ("0.1000", "0.0900"))


def test_a_kernel_that_is_wrong_is_refused_and_not_timed(device):
    right, wrong = Config(0.03), Config(0.01, "wrong")
    _, last = found(device, right, wrong)
    assert last.config is None and set(last.times) == {str(right)}
    assert last.refused == {str(wrong): f"{search.RUNS} elements of its results are wrong"}


def test_kernels_that_cut_images_are_checked_and_timed(device):
    shape = NamedShape("small", 4, 16, 64)
    of_images = command.problem_of(shape, 2, "int8", "images")
    faster, wrong = Config(0.02), Config(0.01, "wrong")
    _, last = found(device, Config(0.03), faster, wrong, task=Task("stand-in", of_images))
    assert last.config == dataclasses.asdict(faster) and last.refused.keys() == {str(wrong)}
    assert (last.problem["images"], last.problem["cut"]) == ([16, 16, 3], "kernel")


def test_a_kernel_that_does_not_compile_is_refused(device):
    broken, right = Config(0.01, "does not compile"), Config(0.03)
    _, last = found(device, broken, right)
    assert last.refused == {str(broken): "the compiler says no"}
    # The refused config is that of the heuristic.
    assert last.config == dataclasses.asdict(right)


def test_a_search_fails_if_the_process_has_too_little_memory(device, monkeypatch):
    checks = search.wrong_elements
    errors = ["RESOURCE_EXHAUSTED: 9 GB", "CUDA_ERROR_ILLEGAL_ADDRESS"]

    def fails_once(*arguments, seed, **options):
        if errors and seed == 1:
            raise jax.errors.JaxRuntimeError(errors.pop(0))
        return checks(*arguments, seed=seed, **options)

    monkeypatch.setattr(search, "wrong_elements", fails_once)
    _, last = found(device, Config(0.01), Config(0.03))
    assert last == Failure(search.TOO_LARGE)
    # After another error of a launch, CUDA would refuse all launches of the process.
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        found(device, Config(0.01), Config(0.03))


def test_a_candidate_that_was_refused_before_is_not_tried_again(device):
    hung, right = Config(0.01), Config(0.03)
    tried, last = found(device, hung, right, refused={str(hung): "it hung"})
    assert str(hung) not in tried and last.refused == {str(hung): "it hung"}


def test_a_backend_without_configs_is_left_out():
    (answer,) = search.search(Task("xla", SMALL), Target("cpu"), {})
    assert answer == Refusal("it has no configs.")
    of_images = command.problem_of(named_shape("B/16 224"), 1, "int8", "images")
    (answer,) = search.search(Task("mosaic_sm90", of_images), HOPPER, {})
    assert answer == Refusal("it does not cut images itself.")
    (answer,) = search.search(Task("mosaic_sm100", SMALL), HOPPER, {})
    assert isinstance(answer, Refusal) and "needs compute capability" in answer.reason


@pytest.mark.slow("the Pallas interpreter runs a kernel")
def test_a_search_without_stand_ins_runs_in_an_interpreter(monkeypatch, tmp_path):
    """Only the heuristic's config of the Hopper kernel is tried, because a config takes long."""
    hopper = dataclasses.replace(SM90, list_configs=lambda *_: [])
    how = plgpu.InterpretGPUParams()
    interpreted = types.SimpleNamespace(
        candidates=hopper.candidates, plan=functools.partial(hopper.plan, interpret=how)
    )
    monkeypatch.setitem(BACKENDS, "mosaic_sm90", interpreted)
    monkeypatch.setattr(search, "RUNS", 1)
    for effort in ("BURST", "SUSTAINED"):
        monkeypatch.setitem(getattr(search, effort), "rounds", 1)
        monkeypatch.setitem(getattr(search, effort), "calls", 1)
    target = Target("cuda", dataclasses.replace(H200, multiprocessors=8, l2=1))
    name, in_turns, last = search.search(Task("mosaic_sm90", SMALL), target, {})
    assert name == str(hopper.choose_config(SMALL, H200)) and in_turns == search.IN_TURNS
    assert not last.refused and list(last.times) == [name]
    assert last.times[name].keys() == {"burst"}
    path = tmp_path / "out.json"
    stored.write(path, head(), [last])
    assert stored.read(path).results == {last.key: last}


# The child process and its supervision.


def wait(connection, seconds, last):
    """Waits without a clock; only the candidate "hangs" times out."""
    return last != "hangs" and connection.poll(None)


def child_of(answer):
    return Child(answer, lambda _: 60, wait)


def test_a_child_answers_in_a_process_of_its_own():
    with child_of(tune_answers.echoes) as child:
        first = list(child.ask("a", {"b": 1}))
        assert first[:2] == ["a", {"b": 1}] and first[2] != os.getpid()
        # The second question is answered by the same process.
        assert list(child.ask()) == first[2:]


def test_signals_leave_a_child_alone_that_still_imports():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    # Where tests run in parallel SIGINT is ignored, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with child_of(interrupted.goes_on) as child:
            assert list(child.ask()) == ["still running"]
    finally:
        signal.signal(signal.SIGINT, handler)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_each_task_gets_its_own_answer():
    with child_of(tune_answers.echoes) as child:
        for task in "abc":
            assert command.search_one(task, child) == command.search_one(task, child)
            first, refused, _ = child.ask(task, {})
            assert (first, refused) == (task, {})
        # An answer that is not read to its end does not affect the next answer.
        assert next(child.ask("d", {})) == "d"
        assert list(child.ask("e", {}))[:2] == ["e", {}]


def test_one_that_hangs_or_crashes_is_ended_and_the_search_goes_on():
    with child_of(tune_answers.hangs_or_crashes) as child:
        found: Any = command.search_one("task", child)
        assert found == (
            "task",
            {
                "hangs": "it took more than 60 s and was ended",
                "crashes": "it ended its process, by SIGSEGV",
                "exits": "it ended its process, with exit code 7",
            },
        )


class Answers:
    """A stand-in for a child; `answers` returns what it yields, or an exception that it raises."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def ask(self, task, refused):
        self.asked.append((task, dict(refused)))
        answer = self.answers(task, refused)
        if isinstance(answer, BaseException):
            raise answer
        yield from answer


def test_a_candidate_that_ends_the_child_is_refused_and_the_task_tried_again():
    def ask(task, refused):
        yield "a"
        yield "b"
        if "b" not in refused:
            raise ChildEndedError("hung", "took too long")
        yield dataclasses.replace(result(None), refused=dict(refused))

    child = types.SimpleNamespace(ask=ask)
    found = command.search_one(Task("mosaic_sm90", ON_PALLAS), child)
    assert found.refused == {"b": "it took too long"}


@pytest.mark.parametrize("step", [search.BEGINNING, search.IN_TURNS])
def test_a_child_that_ends_outside_of_a_candidate_searches_once_more(device, step):
    def ask(task, refused):
        for message in [search.BEGINNING, *search.search(task, HOPPER, refused)]:
            yield message
            if message == step and not refused:
                raise ChildEndedError("crashed", "ended its process, by SIGKILL")

    device.configs = [Config(1e-3), Config(5e-4)]
    answer = command.search_one(TASK, types.SimpleNamespace(ask=ask))
    assert answer.config == dataclasses.asdict(device.configs[1])
    assert len(answer.times) == 2 and not answer.refused


@pytest.mark.parametrize("step", [search.BEGINNING, search.IN_TURNS])
def test_a_child_that_always_ends_is_given_up(step):
    def ask(task, refused):
        yield from ["a"] * (step != search.BEGINNING)
        yield step
        raise ChildEndedError("crashed", "ended its process, by SIGSEGV")

    answer = command.search_one(TASK, types.SimpleNamespace(ask=ask))
    assert answer == Failure(f"it ended its process, by SIGSEGV, twice, during the {step}.")


# The command line.

MACHINE = Machine("a stand-in", stored.new_head(H200, "580", VERSIONS))
TASKS = [
    (f"{images} images", Task("mosaic_sm90", problem_of(named_shape("B/16 224"), "int8", images)))
    for images in (1, 2, 3)
]


def find(task, refused):
    return [result(None, task.problem)]


def images_of(path):
    return [r.problem["rows"] // 196 for r in stored.read(path).results.values()]


def test_an_interrupted_search_goes_on_where_it_was(tmp_path, capsys):
    out = tmp_path / "out.json"
    ends = Answers(
        lambda task, _: KeyboardInterrupt() if task.problem.rows == 392 else find(task, _)
    )
    with pytest.raises(KeyboardInterrupt):
        command.tune(TASKS, [ends], out, MACHINE, command.stored_results(out, MACHINE))
    assert images_of(out) == [1] and "1 results are in" in command.ending.state.outcome
    goes_on = Answers(find)
    command.tune(TASKS, [goes_on], out, MACHINE, command.stored_results(out, MACHINE))
    assert [task for task, _ in goes_on.asked] == [task for _, task in TASKS[1:]]
    assert images_of(out) == [1, 2, 3]
    assert "1 of 3 problems are already in" in capsys.readouterr().out
    nothing = Answers(find)
    command.tune(TASKS, [nothing], out, MACHINE, command.stored_results(out, MACHINE))
    assert not nothing.asked


def test_two_searches_fill_one_file(tmp_path):
    out = tmp_path / "out.json"

    def meanwhile(task, refused):
        if task is TASKS[0][1]:
            command.tune(TASKS[2:], [Answers(find)], out, MACHINE, {})
        return find(task, refused)

    command.tune(TASKS[:2], [Answers(meanwhile)], out, MACHINE, {})
    assert sorted(images_of(out)) == [1, 2, 3]


def test_several_processes_share_the_tasks(tmp_path):
    """Each of two processes gets its first task while the other one searches."""
    out, both = tmp_path / "out.json", threading.Barrier(2)

    def searches(task, refused):
        if len(first.asked) + len(second.asked) <= 2:
            both.wait(60)
        return find(task, refused)

    first, second = Answers(searches), Answers(searches)
    command.tune(TASKS, [first, second], out, MACHINE, {})
    asked = [task for task, _ in (*first.asked, *second.asked)]
    assert len(asked) == 3 and {id(task) for task in asked} == {id(task) for _, task in TASKS}
    assert sorted(images_of(out)) == [1, 2, 3]


def test_an_error_of_one_process_ends_the_search_and_keeps_what_others_found(tmp_path):
    out, both = tmp_path / "out.json", threading.Barrier(2)

    def fails(task, refused):
        both.wait(60)
        return OSError("no more processes can be started")

    def works(task, refused):
        if len(working.asked) == 1:
            both.wait(60)
        return find(task, refused)

    failing, working = Answers(fails), Answers(works)
    with pytest.raises(OSError, match="no more processes"):
        command.tune(TASKS, [failing, working], out, MACHINE, {})
    assert len(failing.asked) == 1
    assert images_of(out) == [task.problem.rows // 196 for task, _ in working.asked]


def test_only_one_process_at_a_time_uses_the_GPU(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    inside = []

    def other():
        with search.alone(str(lock)):
            inside.append("other")

    with concurrent.futures.ThreadPoolExecutor() as pool, search.alone(str(lock)):
        waiting = pool.submit(other)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        inside.append("this")
    assert inside == ["this", "other"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_child_says_when_it_waits_for_its_turn(device, monkeypatch, tmp_path, jobs):
    monkeypatch.setattr(search.Target, "of", lambda _: HOPPER)
    lock = tmp_path / "lock"
    lock.touch()
    device.configs = [Config(0.02), Config(0.01)]
    messages = []
    search.answer(messages.append, TASK, {}, lock=str(lock) if jobs > 1 else None)
    *names, in_turns = [*map(str, device.configs), search.IN_TURNS]
    checked = [[name, *[search.WAITING, name] * 2] for name in names]
    assert messages[:-1] == [*itertools.chain(*checked), in_turns, search.WAITING, in_turns]
    assert messages[-1].config == dataclasses.asdict(device.configs[1])


def test_a_child_that_ends_while_it_waits_for_its_turn_is_asked_without_its_candidate():
    def ask(task, refused):
        yield from ("a", search.WAITING)
        if "a" not in refused:
            raise ChildEndedError("crashed", "ended its process, by SIGKILL")
        yield dataclasses.replace(result(None), refused=dict(refused))

    found = command.search_one(TASK, types.SimpleNamespace(ask=ask))
    assert found.refused == {"a": "it ended its process, by SIGKILL"}


@pytest.mark.parametrize("given", [{}, {MEMORY: "0.8"}, {OLD_MEMORY: "0.8"}], ids=str)
def test_processes_share_the_memory_of_the_GPU(monkeypatch, given):
    # JAX refuses to start if both variables are set.
    others = {k: v for k, v in os.environ.items() if k not in (MEMORY, OLD_MEMORY)}
    monkeypatch.setattr(os, "environ", others | given)
    with command.children(4):
        assert os.environ == others | {MEMORY: "0.2" if given else "0.225"}


def test_a_process_may_wait_until_all_others_that_hang_are_ended():
    assert command.patience(1, search.WAITING) == command.patience(8, "a") == command.PATIENCE
    assert command.patience(8, search.WAITING) == 8 * command.PATIENCE


def test_nothing_is_compiled_while_other_processes_wait_for_the_GPU():
    run = functools.partial(xla.run, out_dtype="bfloat16")
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(inside)

    @contextlib.contextmanager
    def turn():
        nonlocal inside
        inside = True
        yield
        inside = False

    # The first check in a process also compiles programs that do not depend on the problem.
    assert wrong_elements(run, SMALL, runs=1, seed=0) == 0
    inside = False
    other = dataclasses.replace(SMALL, patches=(1, 64, 256), weight=(64, 256))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert wrong_elements(run, other, runs=2, seed=0, turn=turn) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled and not any(compiled)


def test_a_budget_ends_the_search_between_two_problems(tmp_path, capsys):
    out, clock = tmp_path / "out.json", Clock()

    def takes_ten_seconds(task, refused):
        clock.sleep(10)
        return find(task, refused)

    ask = Answers(takes_ten_seconds)
    command.tune(TASKS, [ask], out, MACHINE, {}, seconds=15, now=clock.perf_counter)
    assert images_of(out) == [1, 2]
    assert "15 s are over; 1 problems are left. The same command resumes" in capsys.readouterr().out


def test_what_a_backend_cannot_serve_is_said_once_and_left_out(tmp_path, capsys):
    out = tmp_path / "out.json"
    command.tune(TASKS, [Answers(lambda *_: [Refusal("no.")])], out, MACHINE, {})
    assert not out.exists() and capsys.readouterr().out.count(": no.") == 1


def test_a_failed_search_is_reported_and_repeated_by_a_later_command(tmp_path, capsys):
    out = tmp_path / "out.json"
    command.tune(TASKS, [Answers(lambda *_: [Failure("no.")])], out, MACHINE, {})
    printed = capsys.readouterr().out
    assert not out.exists() and printed.count(": no.") == len(TASKS)
    assert f"{len(TASKS)} problems failed. A later command tries them again." in printed
    command.tune(TASKS, [Answers(find)], out, MACHINE, {})
    assert images_of(out) == [1, 2, 3]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(driver="550"), "driver 550 in the file, 580 here"),
        (dict(versions={"jax": "0.11"}), "'0.11'} in the file"),
        (dict(chip=stored.describe_chip(B200)), "NVIDIA B200.* in the file"),
    ],
    ids=["driver", "versions", "chip"],
)
def test_results_of_two_machines_are_not_mixed(tmp_path, changes, message):
    out = tmp_path / "out.json"
    stored.write(out, MACHINE.head | changes, [])
    with pytest.raises(
        ValueError, match=f"measured in another environment .*{message}.* Choose another file"
    ):
        command.stored_results(out, MACHINE)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "required: --out"),
        (["--out", "no/such/folder/out.json"], "there is no such folder"),
        (["--out", "."], "--out is .: it exists and is not a regular file"),
        (["--out", "/proc/out.json"], "/proc/out.json: nothing can be written there (No such"),
        (["--out", "out.json", "--images", "0"], "--images is 0, expected 1 or more"),
        (["--out", "out.json", "--seconds", "0"], "--seconds is 0, expected more than 0"),
        (["--out", "out.json", "--jobs", "0"], "--jobs is 0, expected 1 or more"),
        (["--out", "out.json", "--shapes", "B/17"], "invalid choice: 'B/17'"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused(command_line, arguments, text):
    code, error = command_line("tune", *arguments)
    assert code == 2 and text in error


def test_all_named_shapes_are_searched_by_default():
    tasks = [task for _, task in command.list_tasks()]
    naflex = 2
    assert len(set(tasks)) == len(tasks) == (2 * len(NAMED_SHAPES) - naflex) * 9 * len(BACKENDS)
    of_images = command.problem_of(named_shape("B/16 224"), 64, "int8", "images")
    assert of_images.images == (64, 224, 224, 3)
    assert {task.problem for task in tasks} >= {ON_PALLAS, of_images}
    videos = command.list_tasks(shapes=["Qwen2-VL/14 448", "CLIP B/16 224"], sources=["images"])
    assert not list(videos)


def test_without_a_GPU_nothing_is_searched(monkeypatch, tmp_path, command_line):
    stand = Answers(lambda *_: [Machine("cpu", stored.new_head(None, "", VERSIONS))])
    monkeypatch.setattr(command, "Child", lambda *_: contextlib.nullcontext(stand))
    code, error = command_line("tune", "--out", tmp_path / "out.json")
    assert code == 2 and "tune: JAX's device is cpu, expected an NVIDIA GPU" in error
    assert stand.asked == [(None, {})] and not list(tmp_path.iterdir())


def test_the_command_searches_what_the_arguments_name(monkeypatch, tmp_path, command_line):
    out = tmp_path / "out.json"
    stand = Answers(lambda task, _: [MACHINE] if task is None else find(task, _))
    monkeypatch.setattr(command, "Child", lambda *_: contextlib.nullcontext(stand))
    named = ["--shapes", "B/16 224", "--dtypes", "int8", "--sources", "patches", "--images", "1"]
    code, _ = command_line("tune", *named, "--backends", "mosaic_sm90", "xla", "--out", out)
    assert code == 0 and stored.read(out).head == MACHINE.head
    assert [task.backend for task, _ in stand.asked[1:]] == ["mosaic_sm90", "xla"]
    assert {task.problem for task, _ in stand.asked[1:]} == {TASKS[0][1].problem}


KILLED = """
import sys
from pathlib import Path
from pallas_patch_embed.base import ending
ending.install()
from tests.commands import tune_answers
from tests.commands.test_tune import MACHINE, TASKS
from pallas_patch_embed.commands.tune import command
from pallas_patch_embed.base.child import Child
if __name__ == "__main__":
    out = Path(sys.argv[1])
    with Child(tune_answers.first_is_found, lambda _: 3600) as child:
        command.tune(TASKS, [child], out, MACHINE, command.stored_results(out, MACHINE))
"""


@pytest.mark.slow("starts processes that import JAX")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_search_that_is_ended_by_a_signal_keeps_what_it_found(tmp_path, number, code):
    script, out = tmp_path / "killed.py", tmp_path / "out.json"
    script.write_text(KILLED)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, script, out], text=True, env=environment(), **pipes)
    assert "1 images: no config could be timed" in process.stdout.readline()
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == code
    assert images_of(out) == [1]
    if number == signal.SIGTERM:
        assert error.endswith(
            f"Terminated; 1 results are in {out}. The same command resumes the search.\n"
        )
    goes_on = Answers(find)
    command.tune(TASKS, [goes_on], out, MACHINE, command.stored_results(out, MACHINE))
    assert len(goes_on.asked) == 2 and images_of(out) == [1, 2, 3]
