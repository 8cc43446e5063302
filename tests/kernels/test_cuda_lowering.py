"""The library of CUDA kernels is found and registered; programs are lowered and exported."""

import functools
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import cuda, cuda_build, explain, schedule, tiles
from pallas_patch_embed.base.chips import B200, H200, Target
from pallas_patch_embed.base.problem import named_shape
from tests.kernels.cuda_kernels import built, configs, register_on_the_cpu
from tests.kernels.interpreter import problem_of
from tests.operator.bounds import draw_params
from tests.operator.planned import compute, refusal
from tests.repository import ROOT, environment

HOPPER = Target("cuda", H200)


# Finding and checking the library.


@pytest.fixture
def fresh():
    """Clears what the backend remembers of the library, before, after and whenever it is called."""
    remembered = (
        cuda.library,
        cuda.configs,
        cuda.architectures,
        cuda.register_cuda_kernels,
        cuda._is_stale,
    )

    def clear():
        for function in remembered:
            function.cache_clear()

    clear()
    yield clear
    clear()


def reason_of_the_library():
    return refusal(cuda, problem_of(named_shape("B/16 224"), "int8"), HOPPER)


@pytest.mark.parametrize("text", [None, "no nvcc was found"])
def test_a_missing_library_is_a_reason_that_says_how_to_build_it(
    fresh, monkeypatch, tmp_path, text
):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libpatch_embed.so")
    monkeypatch.setattr(cuda, "BUILD_FAILURE", tmp_path / "libpatch_embed.txt")
    if text:
        cuda.BUILD_FAILURE.write_text(text)
    reason = reason_of_the_library()
    assert reason.startswith(f"its library is missing: {text or 'it was not built'}.")
    assert "make ffi" in reason and "pip install" in reason
    with pytest.raises(NotImplementedError, match="its library is missing"):
        cuda.register_cuda_kernels()
    params = draw_params(np.random.default_rng(0), patch_size=8, grid=(4, 4), N=64, dtype="int8")
    with pytest.raises(NotImplementedError, match="'cuda' cannot serve this call: its library is"):
        ppe.patch_embed(jnp.zeros((1, 16, 256), jnp.int8), params, backend="cuda")


def test_whoever_has_no_gpu_needs_no_library(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libpatch_embed.so")
    rows = explain(problem_of(named_shape("B/16 224"), "int8"), Target("cpu"))
    (row,) = (row for row in rows if row.backend == "cuda")
    assert row.reason == "it needs an NVIDIA GPU; the target is cpu."


@pytest.mark.parametrize("content", ["", "no library"])
def test_a_broken_library_is_a_reason(fresh, monkeypatch, tmp_path, content):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libpatch_embed.so")
    cuda.LIBRARY.write_text(content)
    assert "its library was built from sources other than" in reason_of_the_library()
    fresh()
    cuda.LIBRARY.write_text(content + cuda_build.source_hash())
    assert "its library cannot be loaded" in reason_of_the_library()


@built
def test_a_library_of_other_sources_is_refused(fresh, monkeypatch, tmp_path):
    shutil.copytree(cuda_build.FFI, tmp_path / "ffi")
    monkeypatch.setattr(cuda_build, "FFI", tmp_path / "ffi")
    assert reason_of_the_library() is None
    edited = tmp_path / "ffi" / "ptx" / "tma.cuh"
    edited.write_text(edited.read_text() + "//")
    fresh()
    assert re.search(r"built from sources other than .* `make ffi`", reason_of_the_library())
    assert_not_registered(monkeypatch)


@built
def test_an_installed_wheel_has_no_sources_to_compare_with(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_build, "FFI", tmp_path / "ffi")
    assert reason_of_the_library() is None


@built
def test_a_library_with_another_interface_is_not_registered(fresh, monkeypatch):
    monkeypatch.setattr(cuda, "INTERFACE", 0)
    assert re.search(
        r"has interface \d+, but this package expects 0\. .*make ffi", reason_of_the_library()
    )
    assert_not_registered(monkeypatch)


@built
@pytest.mark.parametrize("here", [(0, 0), (1, 9)])
def test_a_library_for_another_FFI_version_is_not_registered(fresh, monkeypatch, here):
    monkeypatch.setattr(cuda, "ffi_version", lambda: here)
    expected = (
        rf"built for version 0\.\d of XLA's FFI, but this jaxlib has version {here[0]}\.{here[1]}\."
    )
    assert re.search(expected, reason_of_the_library())
    assert_not_registered(monkeypatch)


@built
def test_an_unknown_version_of_the_FFI_is_a_reason(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert "the version of XLA's FFI in this jaxlib is unknown" in reason_of_the_library()
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("// nothing")
    assert "the version of XLA's FFI in this jaxlib is unknown" in reason_of_the_library()


def assert_not_registered(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **_: calls.append(args))
    with pytest.raises(NotImplementedError):
        cuda.register_cuda_kernels()
    assert not calls


@built
def test_the_library_is_built_for_the_oldest_FFI_that_jaxlib_accepts():
    """XLA checks the version when it registers the library, and reports no error."""
    library = cuda.library()
    oldest = (0, 1) if sys.version_info < (3, 15) else (0, 4)
    assert (library.patch_embed_ffi_major(), library.patch_embed_ffi_minor()) == oldest
    register_on_the_cpu()


@built
def test_registering_twice_is_no_error(fresh):
    cuda.register_cuda_kernels()
    cuda.register_cuda_kernels.cache_clear()
    cuda.register_cuda_kernels()


LAZY = """
import jax, jax.numpy as jnp, numpy as np, pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, cuda
def loaded():
    return "libpatch_embed" in open("/proc/self/maps").read()
kernel = np.ones((8, 8, 3, 64))
params = ppe.pack(kernel, np.zeros(64), np.zeros((16, 64)), patch_size=8, dtype="int8")
patches = jnp.zeros((1, 16, 256), jnp.int8)
ppe.patch_embed(patches, params)
ppe.explain(patches, params)
assert not loaded()
f = jax.jit(lambda x: ppe.patch_embed(x, params, backend="cuda"))
f.trace(patches)
assert cuda.register_cuda_kernels.cache_info().currsize == 0
f.trace(patches).lower(lowering_platforms=("cuda",))
assert loaded() and cuda.register_cuda_kernels.cache_info().currsize == 1
"""


@built
def test_the_library_is_loaded_at_first_use_and_registered_when_lowered():
    result = subprocess.run(
        [sys.executable, "-c", LAZY],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr


@built
def test_a_process_that_lowers_nothing_can_register_the_kernels():
    code = "import pallas_patch_embed as ppe; ppe.register_cuda_kernels()"
    command = [sys.executable, "-c", code + "; print(open('/proc/self/maps').read())"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "libpatch_embed" in result.stdout


# Lowering and export.


def small(dtype="int8", positions=True, out_dtype="bfloat16"):
    """Returns params, and a function that embeds patches [3, 16, K] with them."""
    params = draw_params(
        np.random.default_rng(0), patch_size=8, grid=(4, 4), N=64, dtype=dtype, positions=positions
    )
    patches = jax.ShapeDtypeStruct((3, 16, params.K_padded), dtype)
    embed = functools.partial(ppe.patch_embed, params=params, backend="cuda", out_dtype=out_dtype)
    return params, patches, embed


@built
@pytest.mark.parametrize("dtype", tiles.DTYPES)
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_it_is_lowered_to_one_custom_call(dtype, positions, out_dtype):
    _, patches, embed = small(dtype, positions, out_dtype)
    lowered = jax.jit(embed).trace(patches).lower(lowering_platforms=("cuda",))
    (call,) = re.findall(rf"custom_call @{cuda.TARGET}.*", lowered.as_text())
    kind = "table" if positions else "offset"
    spelled = f"{cuda.SPELLED[dtype]}_{cuda.SPELLED[out_dtype]}_{kind}"
    assert re.search(rf'kernels = "patch_embed_sm90_{spelled}_\w+,patch_embed_sm100_', call)


ONE_OPERATION = """
import functools
from benchmarks.offline_compile import compile_offline, compiler, operands

with compiler():
    from pallas_patch_embed.base import chips
    from pallas_patch_embed.patch_embedding.primitive import patch_embed
    from pallas_patch_embed.base.problem import named_shape

    call = functools.partial(patch_embed, backend="cuda", out_dtype="bfloat16", geometry=None)
    arguments = operands(named_shape("B/16 224"), 1, "int8")
    print(list(compile_offline(call, arguments, chips.H200).other_operations))
"""


def test_nothing_but_the_kernel_runs_on_the_GPU(cuda_library, compilers):
    process = subprocess.run(
        [sys.executable, "-c", ONE_OPERATION], capture_output=True, text=True, env=environment()
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "['custom-call']"


@built
def test_it_is_exported_without_a_GPU():
    _, patches, embed = small()
    exported = jax.export.export(
        jax.jit(embed),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)],
    )(patches)
    again = jax.export.deserialize(exported.serialize())
    assert again.out_avals[0].shape == (3, 16, 64)
    assert again.mlir_module().count(f"custom_call @{cuda.TARGET}") == 1


@built
def test_a_program_has_a_kernel_and_segments_for_each_architecture(all_built):
    _, patches, embed = small()
    text = jax.jit(embed).trace(patches).lower(lowering_platforms=("cuda",)).as_text()
    (names,) = re.findall(r'kernels = "([\w,]+)"', text)
    chips = [name.split("_")[2] for name in names.split(",")]
    assert chips == [f"sm{number}" for number in cuda.architectures()] == ["sm90", "sm100"]
    (types,) = re.findall(rf"custom_call @{cuda.TARGET}.*: \(([^)]*)\)", text)
    assert types.count("xi32>") == 2


@built
def test_a_program_for_a_known_chip_has_one_kernel(all_built):
    problem = problem_of(named_shape("B/16 224"), "int8")
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            (problem.patches, problem.dtype),
            (problem.weight, problem.dtype),
            (problem.scale, "float32"),
            (problem.table, problem.table_dtype),
        )
    ]
    for chip, number in ((H200, 90), (B200, 100)):
        run = jax.jit(cuda.plan(problem, Target("cuda", chip)).run)
        text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        (names,) = re.findall(r'kernels = "([\w,]+)"', text)
        assert names.startswith(f"patch_embed_sm{number}_") and "," not in names


@built
def test_the_custom_call_has_the_operands_of_the_problem(monkeypatch):
    """The cases have positions for each image, a given config, and M = 0."""
    calls = []

    def ffi_call(target, result):
        def call(*operands, **attributes):
            calls.append((target, operands, attributes))
            return jnp.zeros(result.shape, result.dtype)

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    config = configs(
        capability=90, dtype="bf16", out_dtype="f32", has_table=True, tile_n=64, rows=128
    )[0]
    shapes = ((2, 3, 70, 128), "bfloat16"), ((128, 128), "bfloat16"), ((128,), "float32")
    operands = [jnp.zeros(*x) for x in (*shapes, ((2, 3, 70, 128), "bfloat16"))]
    y = compute(cuda, *operands, out_dtype="float32", config=config)
    assert y.shape == (2, 3, 70, 128) and y.dtype == jnp.float32
    ((target, given, attributes),) = calls
    assert target == cuda.TARGET
    assert attributes == dict(kernels=config.name)
    assert len(given) == 5
    assert [x.shape for x in given[:4]] == [(420, 128), (128, 128), (128,), (420, 128)]
    np.testing.assert_array_equal(given[4], schedule.segments(420, 420, 256, 2))
    empty = [operands[0][:0], *operands[1:3], operands[3][:0]]
    assert compute(cuda, *empty, out_dtype="float32").shape == (0, 3, 70, 128)
    assert len(calls) == 1
