"""Plans are pure functions of problem and target, made once for each lowering."""

import collections
import dataclasses
import itertools
import re
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import cuda, explain, tiles, triton
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base import chips, lowering
from pallas_patch_embed.base.chips import A100, B200, CHIPS, H200, Chip, Target, chip_of
from pallas_patch_embed.base.problem import NAMED_SHAPES, named_shape
from tests.kernels.interpreter import problem_of
from tests.operator.bounds import draw_params
from tests.operator.planned import refusal
from tests.repository import ROOT

# An H100 PCIe has fewer multiprocessors than an H200.
H100 = dataclasses.replace(H200, multiprocessors=114)


def test_a_chip_of_fewer_multiprocessors_gets_its_own_grid():
    problem = problem_of(named_shape("B/16 224"), "int8", 4736)
    config = SM90.choose_config(problem, H200)
    assert config == SM90.choose_config(problem, H100)
    full, fewer = config.tiling(problem, H200), config.tiling(problem, H100)
    # 192 columns are a quarter of N. So a slice has 33 workers on 132 multiprocessors, and 28 on
    # 114.
    assert (full.slices, full.workers, full.thread_blocks) == (4, 33, 132)
    assert (fewer.slices, fewer.workers, fewer.thread_blocks) == (4, 28, 112)
    assert len(fewer.schedule(196)) == 28


def test_the_name_of_an_unknown_shape_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"The shape is 'B/17', expected one of B/16 224, .*L/14"):
        named_shape("B/17")


def test_the_name_and_the_multiprocessors_are_those_of_the_device():
    device = mock.Mock(platform="gpu", compute_capability="9.0", core_count=114)
    device.device_kind = "NVIDIA H100 PCIe"
    assert Target.of(device).chip == dataclasses.replace(H100, name="NVIDIA H100 PCIe")


@pytest.mark.parametrize("listed", CHIPS, ids=lambda chip: chip.name)
def test_a_listed_capability_gets_its_own_facts(listed):
    found = chip_of(listed.capability, 48)
    assert found == dataclasses.replace(listed, multiprocessors=48) and found.is_listed


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (8, 8), (12, 2), (13, 0)], ids=str)
def test_an_unlisted_chip_inherits_nothing(monkeypatch, capability):
    """It runs on Triton, if it is not too old, or on XLA, and no time is predicted."""
    chip = chip_of(capability, 16, "NVIDIA Orin")
    facts = (chip.clock, chip.bandwidth, chip.memory, chip.l2, chip.tensor_memory, chip.rates)
    assert facts == (0, 0, 0, 0, 0, ()) and not chip.is_listed
    assert chip.shared_memory == 99 * 1024 and chip.multiprocessors == 16
    monkeypatch.setattr(triton, "missing", lambda: None)
    for dtype, images in itertools.product(tiles.DTYPES, (1, 4736)):
        problem = problem_of(named_shape("B/16 224"), dtype, images)
        found = explain(problem, Target("cuda", chip))
        assert found.chosen == ("xla" if capability < (8, 0) else "triton")
        assert "predicted" not in str(found) and found.notes == ()
    assert triton.configs(chip) == (triton.RTX if capability[0] == 12 else triton.AMPERE)


@pytest.mark.parametrize(
    "capability, name, expected",
    [
        ((9, 0), "NVIDIA H100 80GB HBM3", chips.H100),
        ((9, 0), "NVIDIA H100 PCIe", H200),
        ((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", chips.RTX_PRO_6000),
        ((12, 0), "NVIDIA GeForce RTX 5080", chips.RTX_5090),
        ((12, 1), "NVIDIA GB10", chips.SPARK),
    ],
)
def test_a_name_selects_the_facts_of_a_chip(capability, name, expected):
    assert chip_of(capability, 7, name) == dataclasses.replace(
        expected, name=name, multiprocessors=7
    )


def test_each_chip_is_listed_once_oldest_first():
    capabilities = [chip.capability for chip in CHIPS]
    assert capabilities == sorted(set(capabilities))


@pytest.fixture
def checks(monkeypatch):
    """Counts how often each config is checked."""
    counts = collections.Counter()
    for config_type in (HopperConfig, BlackwellConfig):

        def check(self, problem, chip, known=config_type.check):
            counts[self] += 1
            known(self, problem, chip)

        monkeypatch.setattr(config_type, "check", check)
    return counts


def hide_the_cuda_library(monkeypatch):
    """Makes the library missing, also in a process that has loaded it."""

    def architectures():
        raise NotImplementedError("its library is missing.")

    monkeypatch.setattr(cuda, "architectures", architectures)


@pytest.mark.parametrize("chip, backend", [(H200, "mosaic_sm90"), (B200, "mosaic_sm100")])
@pytest.mark.parametrize("name", [None, "named"])
def test_a_lowering_checks_every_config_once(monkeypatch, checks, chip, backend, name):
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(2, 2), N=1024, dtype="int8")
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", chip))
    patches = jax.ShapeDtypeStruct((4096, 4, 768), "int8")
    asked = backend if name else None
    if asked is None:
        hide_the_cuda_library(monkeypatch)
    traced = jax.jit(lambda x: ppe.patch_embed(x, params, backend=asked)).trace(patches)
    checks.clear()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert checks and set(checks.values()) == {1}


def test_planning_does_not_look_up_devices(monkeypatch):
    monkeypatch.setattr(triton, "missing", lambda: None)
    problems = [problem_of(shape, "int8") for shape in NAMED_SHAPES]
    with mock.patch.object(jax, "devices", side_effect=AssertionError("a device was looked up")):
        for problem in problems:
            assert refusal(SM90, problem, Target("cuda", H100)) is None
            assert refusal(SM100, problem, Target("cuda", B200)) is None
            assert refusal(triton, problem, Target("cuda", A100)) is None


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("tile_m, tile_n, blocks, resident", [(256, 192, 2, 1), (64, 128, 1, 3)])
def test_a_grid_covers_every_tile_with_at_most_the_resident_blocks(
    chip: Chip, tile_m, tile_n, blocks, resident
):
    for shape in NAMED_SHAPES:
        for images in (0, 1, 67, 4736):
            problem = problem_of(shape, "int8", images)
            tiling = tiles.Tiling.of(
                problem, chip, tile_m, tile_n, blocks=blocks, resident=resident
            )
            assert tiling.slices * tile_n >= problem.N > (tiling.slices - 1) * tile_n
            assert tiling.tiles * tile_m >= problem.rows > (tiling.tiles - 1) * tile_m
            assert tiling.tiles_per_worker * tiling.workers >= tiling.tiles
            most = chip.multiprocessors * resident
            assert tiling.workers == 1 or tiling.thread_blocks <= most


@pytest.mark.parametrize("kernel", ["pallas_patch_embed_cuda", "mosaic_gpu"])
def test_a_lowering_visits_the_files_that_the_documentation_names(monkeypatch, kernel):
    monkeypatch.setattr(Target, "of", lambda device: Target("cuda", H200))
    if kernel == "mosaic_gpu":
        hide_the_cuda_library(monkeypatch)
        monkeypatch.setattr(triton, "missing", lambda: "it is not installed.")
    elif reason := cuda.missing():
        pytest.skip(f"cuda: {reason}")
    page = (ROOT / "docs" / "kernels.md").read_text()
    page = page.split("## From the API to the kernel")[1].split("\n## ")[0]
    names = r"((?:backends/|mosaic/)*\w+\.py)"
    diagram = re.findall(rf"^ +{names} ", page, re.MULTILINE)
    named = set(re.findall(names, page))
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(2, 2), N=768, dtype="int8")
    package = Path(ppe.__file__).parent
    visited = set()

    def lower(B):
        images = jax.ShapeDtypeStruct((B, 32, 32, 3), "uint8")
        traced = jax.jit(lambda images: ppe.embed_images(images, params)).trace(images)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    lower(4)  # The first lowering also reads the stored results, and loads the library.
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def visit(code, offset):
        path = Path(code.co_filename)
        if path.is_relative_to(package):
            visited.add(path.relative_to(package).as_posix())
        # Further calls of the same function are not recorded.
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "visited files")
    monitoring.register_callback(tool, monitoring.events.PY_START, visit)
    monitoring.restart_events()
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        text = lower(8)
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)
    assert kernel in text

    def called(name):
        return {path for path in visited if path == name or path.endswith(f"/{name}")}

    # The diagram is for the CUDA library; without it the Pallas kernel is called.
    assert len(diagram) == 8 and all(map(called, diagram))
    assert visited <= set().union(*map(called, named))
