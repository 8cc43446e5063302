"""Every kernel that `pallas-patch-embed tune` may try compiles without spills."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys

import jax
import pytest

from benchmarks import audited_kernels
from benchmarks.offline_compile import operands
from pallas_patch_embed.backends import BACKENDS, cuda, cuda_tuning, tiles, triton
from pallas_patch_embed.base.chips import A100, B200, B300, H200, RTX_4090, Target
from pallas_patch_embed.base.problem import NAMED_SHAPES, named_shape
from pallas_patch_embed.commands.check.memory import operand_types
from pallas_patch_embed.commands.tune import command
from tests.kernels.interpreter import problem_of
from tests.repository import ROOT

CHIPS = {"h200": H200, "b200": B200, "b300": B300}
MOSAIC = {"h200": "mosaic_sm90", "b200": "mosaic_sm100", "b300": "mosaic_sm100"}
TARGETS = [(t, d) for t in MOSAIC for d in tiles.DTYPES if d in CHIPS[t].tensor_dtypes]
DTYPES = pytest.mark.parametrize("dtype", tiles.DTYPES)

everything = pytest.mark.exhaustive("compiles for an hour on one core")


def pallas_kernels(target, dtype, shapes, *options):
    """Compiles the candidates of shapes in a separate process; returns them by shape and config."""
    command = [sys.executable, "-m", "benchmarks.offline_compile", "--candidates", *options]
    command += ["--target", target, "--backend", MOSAIC[target], "--dtype", dtype]
    done = subprocess.run(
        [*command, "--images", "64", "--shapes", *shapes], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_clean(programs):
    """Asserts that each program is a single kernel that neither spills nor uses stack."""
    for name, program in programs.items():
        assert list(program["other_operations"]) == ["custom-call"], name
        kernel = program["kernel"]
        assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0, name
        assert kernel["registers"] == 168, name


@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("target, dtype", [("h200", "int8"), ("b200", "bfloat16")])
def test_some_candidates_of_the_Pallas_kernels_compile(target, dtype):
    programs = pallas_kernels(target, dtype, ["B/16 224"], "--most", "2")
    assert len(programs) == 2
    assert_clean(programs)


@everything
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("target, dtype", TARGETS)
def test_every_candidate_of_the_Pallas_kernels_compiles(target, dtype):
    names = [shape.name for shape in NAMED_SHAPES]
    naflex = [name for name in names if name.startswith("NaFlex")]
    programs = pallas_kernels(target, dtype, [name for name in names if name not in naflex])
    programs |= pallas_kernels(target, dtype, naflex, "--table", "per image")
    problems = [problem_of(shape, dtype, 64) for shape in NAMED_SHAPES]
    where = Target("cuda", CHIPS[target])
    assert len(programs) == sum(
        len(BACKENDS[MOSAIC[target]].candidates(problem, where)) for problem in problems
    )
    assert_clean(programs)


SOURCES = pytest.mark.parametrize("source", command.SOURCES)


@everything
@pytest.mark.usefixtures("triton_package")
@pytest.mark.parametrize("chip", [A100, RTX_4090, H200, B200, B300], ids=lambda chip: chip.name)
@DTYPES
@SOURCES
def test_every_candidate_of_the_Triton_kernel_compiles(chip, dtype, source, tmp_path):
    for name, task in command.list_tasks(
        images=[64], dtypes=[dtype], sources=[source], backends=["triton"]
    ):
        for config in triton.candidates(task.problem, Target("cuda", chip)):
            plan = triton.plan(task.problem, Target("cuda", chip), config=config)
            program = audited_kernels.compile_triton(
                audited_kernels.triton_call(plan, *operand_types(task.problem))
            )
            assert audited_kernels.stack_bytes(program, tmp_path) == 0, (name, config)


def compiled_by_a_search(chip, backends=None):
    """Lists the kernels that a search of all named shapes compiles.

    A kernel is (backend, whether it cuts images, dtype, config). Kernels of the CUDA library are
    not listed, because they are already compiled.
    """
    found = {}
    for _, task in command.list_tasks(images=(*command.IMAGES, 4736), backends=backends):
        cuts = task.problem.images is not None
        if cuts and task.backend not in ("cuda", "triton"):
            continue
        with contextlib.suppress(NotImplementedError):
            for config in BACKENDS[task.backend].candidates(task.problem, Target("cuda", chip)):
                if task.backend != "cuda" or config.tuning is not None:
                    found[task.backend, cuts, task.problem.dtype, config] = None
    return list(found)


@pytest.mark.usefixtures("cuda_library", "nvcc")
@pytest.mark.parametrize("chip", [A100, H200, B200, B300], ids=lambda chip: chip.name)
def test_a_search_compiles_at_most_64_kernels_on_a_chip(chip, monkeypatch):
    monkeypatch.setattr(triton, "missing", lambda: None)
    kernels = compiled_by_a_search(chip)
    assert len(kernels) <= 64
    assert {(backend, cuts) for backend, cuts, *_ in kernels} >= {
        ("triton", False),
        ("triton", True),
    }


def tunings(chip):
    """Lists the kernels with a tuning among the candidates of all named shapes."""
    return [config for *_, config in compiled_by_a_search(chip, ["cuda"])]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Makes an empty cache folder for compiled kernels."""
    monkeypatch.setenv("PATCH_EMBED_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cuda_library", "nvcc")
def test_a_kernel_with_a_tuning_is_a_library_of_its_own(cache, monkeypatch):
    config, other, *_ = tunings(B200)
    path = cuda_tuning.build(config.name, config.tuning)
    assert path.parent == cache and list(cache.iterdir()) == [path]
    library = cuda._load(path)
    kernels = cuda._call_json(library.patch_embed_kernels)
    assert [kernel["name"] for kernel in kernels if kernel["built"]] == [config.name]
    # A compiled kernel is not compiled again, so no compiler is needed.
    monkeypatch.setattr(cuda_tuning, "cannot_compile", lambda: "no nvcc was found")
    assert cuda_tuning.build(config.name, config.tuning) == path
    with pytest.raises(NotImplementedError, match="cannot be compiled here: no nvcc was found"):
        cuda_tuning.build(other.name, other.tuning)
    # A program refers to the library by the name of its custom call.
    monkeypatch.setattr(cuda, "_check_driver", lambda: None)
    problem = problem_of(named_shape("B/16 224"), "float8_e4m3fn", 64)
    plan = cuda.plan(problem, Target("cuda", B200), config=config)
    arguments = operands(named_shape("B/16 224"), 64, "float8_e4m3fn")
    text = jax.jit(plan.run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{cuda.TARGET}_{path.stem}(" in text


@everything
@pytest.mark.usefixtures("cuda_library", "nvcc", "cache")
def test_every_kernel_with_a_tuning_compiles():
    found = tunings(B200)
    assert len(found) == 15 and set(tunings(B300)) <= set(found)
    for config in found:
        cuda_tuning.build(config.name, config.tuning)


@pytest.mark.usefixtures("cuda_library")
def test_the_kernels_of_the_library_are_candidates():
    shape = named_shape("B/16 224")
    of_images = H200, command.problem_of(shape, 64, "int8", "images")
    of_patches = itertools.product((H200, B200), (problem_of(shape, d, 64) for d in tiles.DTYPES))
    for chip, problem in (of_images, *of_patches):
        target = Target("cuda", chip)
        found = cuda.candidates(problem, target)
        assert found[0] == cuda.choose_config(problem, 10 * chip.capability[0], chip)
        for config in found:
            fields = json.loads(json.dumps(dataclasses.asdict(config)))
            assert cuda.config_of(fields) == config
        with pytest.raises(ValueError, match="the library has no kernel"):
            cuda.config_of(fields | {"slots": 1})
