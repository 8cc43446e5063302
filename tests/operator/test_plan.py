"""Plans are pure functions of problem and target, made once for each lowering."""

import collections
import dataclasses
import re
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from bounds import draw_params
from interpreter import problem_of
from planned import refusal
from repository import ROOT

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, cuda, tiles, triton
from pallas_patch_embed.backends.mosaic import SM90, SM100
from pallas_patch_embed.backends.mosaic.sm90 import HopperConfig
from pallas_patch_embed.backends.mosaic.sm100 import BlackwellConfig
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import A100, B200, CHIPS, H200, RTX_5090, Chip, Target, chip_of
from pallas_patch_embed.base.problem import NAMED_SHAPES, named_shape

# An H100 PCIe has fewer multiprocessors than an H200.
H100 = dataclasses.replace(H200, multiprocessors=114)


def test_a_chip_of_fewer_multiprocessors_gets_its_own_grid():
    problem = problem_of(named_shape("B/16 224"), "int8", 4736)
    config = SM90.choose_config(problem, H200)
    assert config == SM90.choose_config(problem, H100)
    full, fewer = config.grid(problem, H200), config.grid(problem, H100)
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


@pytest.mark.parametrize(
    "capability, listed", [((8, 0), A100), ((8, 7), CHIPS[1]), ((12, 1), RTX_5090), ((7, 5), A100)]
)
def test_an_unlisted_chip_gets_the_facts_of_the_newest_older_one(capability, listed):
    assert chip_of(capability, 48) == dataclasses.replace(
        listed, capability=capability, multiprocessors=48
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


@pytest.mark.parametrize("chip, backend", [(H200, "mosaic_sm90"), (B200, "mosaic_sm100")])
@pytest.mark.parametrize("name", [None, "named"])
def test_a_lowering_checks_every_config_once(monkeypatch, checks, chip, backend, name):
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(2, 2), N=1024, dtype="int8")
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", chip))
    patches = jax.ShapeDtypeStruct((4096, 4, 768), "int8")
    asked = backend if name else None
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
            grid = tiles.Grid.of(problem, chip, tile_m, tile_n, blocks=blocks, resident=resident)
            assert grid.slices * tile_n >= problem.N > (grid.slices - 1) * tile_n
            assert grid.tiles * tile_m >= problem.rows > (grid.tiles - 1) * tile_m
            assert grid.tiles_per_worker * grid.workers >= grid.tiles
            most = chip.multiprocessors * resident
            assert grid.workers == 1 or grid.thread_blocks <= most


def test_every_backend_states_its_evidence():
    assert all(backend.EVIDENCE for backend in BACKENDS.values())


def test_a_lowering_visits_the_files_that_the_documentation_names(monkeypatch):
    monkeypatch.setattr(Target, "of", lambda device: Target("cuda", H200))
    monkeypatch.setattr(cuda, "LIBRARY", Path("missing"))
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

    lower(4)  # The first lowering also reads the stored results.
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
    assert "mosaic_gpu" in text

    def called(name):
        return {path for path in visited if path == name or path.endswith(f"/{name}")}

    assert len(diagram) == 8 and all(map(called, diagram))
    assert visited <= set().union(*map(called, named))
