"""Every kernel among which `pallas-patch-embed tune` searches compiles without spills."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys

import jax
import pytest
from interpreter import problem_of
from repository import ROOT

from benchmarks import audit
from benchmarks.offline_compile import operands
from pallas_patch_embed.backends import BACKENDS, cuda, cuda_tuning, tiles, triton
from pallas_patch_embed.chips import A100, B200, B300, H200, RTX_4090, Target
from pallas_patch_embed.problem import NAMED_SHAPES, named_shape

CHIPS = {"h200": H200, "b200": B200, "b300": B300}
MOSAIC = {"h200": "mosaic_sm90", "b200": "mosaic_sm100", "b300": "mosaic_sm100"}
TARGETS = [(t, d) for t in MOSAIC for d in tiles.DTYPES if d in CHIPS[t].tensor_dtypes]
DTYPES = pytest.mark.parametrize("dtype", tiles.DTYPES)

everything = pytest.mark.exhaustive("compiles for an hour on one core")


def pallas_kernels(target, dtype, shapes, *options):
    """The compiled candidates of shapes: by shape and config, from a process of its own."""
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
        (kernel,) = program["kernels"]
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


def triton_stack(shape, dtype, chip, folder, most=None):
    """For each candidate of a shape the bytes of stack that a thread uses."""
    table = "per image" if shape.name.startswith("NaFlex") else "shared"
    arguments, target = operands(shape, 64, dtype, table=table), Target("cuda", chip)
    configs = triton.candidates(problem_of(shape, dtype, 64), target)
    return {
        config: audit.stack_bytes(
            audit.compile_triton(
                audit.triton_call(
                    triton.plan(problem_of(shape, dtype, 64), target, config=config), *arguments
                )
            ),
            folder,
        )
        for config in itertools.islice(configs, most)
    }


@everything
@pytest.mark.usefixtures("triton_package")
@pytest.mark.parametrize("chip", [A100, RTX_4090, H200, B200], ids=lambda chip: chip.name)
@DTYPES
def test_every_candidate_of_the_Triton_kernel_compiles(chip, dtype, tmp_path):
    for shape in NAMED_SHAPES:
        stacks = triton_stack(shape, dtype, chip, tmp_path)
        assert not any(stacks.values()), (shape.name, stacks)


@functools.cache
def tunings(chip):
    """The kernels with a tuning among the candidates of all named shapes."""
    found = {}
    for shape, dtype, images in itertools.product(NAMED_SHAPES, tiles.DTYPES, (1, 64, 4736)):
        if dtype in chip.tensor_dtypes:
            problem = problem_of(shape, dtype, images)
            found |= dict.fromkeys(cuda.candidates(problem, Target("cuda", chip)))
    return [config for config in found if config.tuning is not None]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder for compiled kernels."""
    monkeypatch.setenv("PATCH_EMBED_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cuda_library", "nvcc")
def test_a_kernel_with_a_tuning_is_a_library_of_its_own(cache, monkeypatch):
    config = tunings(B200)[0]
    path = cuda_tuning.build(config.name, config.tuning)
    assert path.parent == cache and list(cache.iterdir()) == [path]
    library = cuda._load(path)
    kernels = cuda._call_json(library.patch_embed_kernels)
    assert [kernel["name"] for kernel in kernels if kernel["built"]] == [config.name]
    # It is not compiled again, and needs no compiler.
    monkeypatch.setattr(cuda_tuning, "cannot_compile", lambda: "no nvcc was found")
    assert cuda_tuning.build(config.name, config.tuning) == path
    other = tunings(B200)[1]
    with pytest.raises(NotImplementedError, match="cannot be compiled here: no nvcc was found"):
        cuda_tuning.build(other.name, other.tuning)
    # A program names the library's custom call.
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
    assert len(found) == 18 and set(tunings(B300)) <= set(found)
    for config in found:
        cuda_tuning.build(config.name, config.tuning)


@pytest.mark.usefixtures("cuda_library")
def test_the_kernels_of_the_library_are_candidates():
    for chip, dtype in itertools.product((H200, B200), tiles.DTYPES):
        problem, target = problem_of(named_shape("B/16 224"), dtype, 64), Target("cuda", chip)
        found = cuda.candidates(problem, target)
        assert found[0] == cuda.choose_config(problem, 10 * chip.capability[0], chip)
        for config in found:
            fields = json.loads(json.dumps(dataclasses.asdict(config)))
            assert cuda.config_of(fields) == config
        with pytest.raises(ValueError, match="the library has no kernel"):
            cuda.config_of(fields | {"slots": 1})
