"""The binding of the CUDA kernels, without a GPU: launches, checks, errors, lowering, export."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import draw_params
from interpreter import problem_of
from planned import compute, refusal
from repository import ROOT, TESTS, environment

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, cuda, cuda_build, explain, schedule, tiles
from pallas_patch_embed.chips import A100, B200, B300, H200, RTX_5090, Target
from pallas_patch_embed.problem import NAMED_SHAPES, named_shape

CHIPS = {90: H200, 100: B200}
HOPPER, ULTRA = Target("cuda", H200), Target("cuda", B300)
LONG = {short: dtype for dtype, short in cuda.SPELLED.items()}

built = pytest.mark.usefixtures("cuda_library")


def configs(**fields):
    """The library's configs with these fields; none without a library, where nothing is tested."""
    if cuda.missing():
        return []
    return [c for c in cuda.configs() if all(getattr(c, k) == v for k, v in fields.items())]


def itemsize(short):
    return jnp.dtype(LONG[short]).itemsize


# What is launched.


def matrix(short, rows, columns, box_rows, box_columns):
    size = itemsize(short)
    return dict(
        type=short,
        shape=[columns, rows],
        strides=[columns * size],
        box=[box_columns, box_rows],
        swizzle=box_columns * size,
    )


def expected_launch(config, M, N, K, period, workers, segments):
    """The launch as the kernels' files describe it, derived by itself."""
    size, out_size = itemsize(config.dtype), itemsize(config.out_dtype)
    chunks, inner = K * size // 128, 128 // size
    hopper = config.capability == 90
    ring = config.slots * config.rows * 128
    streamed, parts = 0, config.slots if config.stream_weight else chunks
    if hopper and config.stream_weight:
        # Of the weight as many parts as there is room for beside the patches and 2 KiB.
        streamed = parts = (227 * 1024 - ring - 2048) // (config.tile_n * 128)
    weight_bytes = parts * config.tile_n * 128 // config.blocks
    if hopper:
        # 16 bytes of a thread, four threads a row; K, 2 columns of a pair, threads, groups, pairs.
        vector = 16 // out_size
        nested = np.empty((N // (4 * vector), 4, vector // 2, 2, K), f"V{size}")
        nested = nested.transpose(2, 0, 1, 3, 4)
        weight = dict(
            type=config.dtype,
            shape=list(nested.shape[::-1]),
            strides=list(nested.strides[-2::-1]),
            box=[inner, 2, 4, config.tile_n // (4 * vector), vector // 2],
            swizzle=128,
        )
        y = None
        rest = 2 * 4 * config.tile_n + 8 * (2 * config.slots + streamed + 3)
    else:
        weight = matrix(config.dtype, N, K, config.tile_n // config.blocks, inner)
        half = config.tile_n // 2 * out_size
        store_bytes = 128 if half % 128 == 0 else 64
        # A store is a warp's.
        y = matrix(config.out_dtype, M, N, 32, store_bytes // out_size)
        rest = 2 * 2 * 128 * store_bytes + 1024
    # Chunks 0, 4 and 8 of a streamed weight stay: with 128 rows a warpgroup and at most 16 chunks.
    some = len(range(0, min(chunks, 12), 4)) if config.rows == 128 and chunks <= 16 else 0
    staying = (some if hopper else 0) if config.stream_weight else chunks
    return dict(
        grid=workers * N // config.tile_n * config.blocks,
        cluster=config.blocks,
        threads=384,
        shared_memory=-(-(ring + rest) // 1024) * 1024 + weight_bytes,
        chunks=chunks,
        patches=matrix(config.dtype, M, K, config.rows, inner),
        weight=weight,
        y=y,
        multiplying_warps=8 if hopper else 1,
        storing_warps=8,
        # Two accumulators, in a power of two of columns.
        tensor_memory_columns=0 if hopper else 1 << (2 * config.tile_n - 1).bit_length(),
        staying_chunks=staying,
    )


@built
@pytest.mark.parametrize("capability", CHIPS)
def test_a_launch_is_what_is_derived_from_the_shapes(capability):
    launched = 0
    for config in configs(capability=capability):
        for (M, period), N, K in itertools.product(
            [(1, 1), (392, 196), (3 * 729, 729), (5 * 196 + 4, 5 * 196 + 4), (928256, 196)],
            [768, 1024, 1152, 1536],
            [640, 768, 3072],
        ):
            shapes = dict(M=M, N=N, K=K, period=period, workers=7, segments=3)
            expected = expected_launch(config, **shapes)
            if N % config.tile_n or expected["shared_memory"] > 227 * 1024:
                with pytest.raises(NotImplementedError, match=r"expected a multiple|shared memory"):
                    cuda.launch(config, **shapes)
                continue
            assert cuda.launch(config, **shapes) == expected
            launched += 1
    assert launched > 20 * len(configs(capability=capability))


@built
def test_a_kernels_name_tells_its_config():
    for config in configs():
        kind = "table" if config.has_table else "offset"
        way = "streamed" if config.stream_weight else "stationary"
        assert config.name == (
            f"patch_embed_sm{config.capability}_{config.dtype}_{config.out_dtype}_{kind}_"
            f"{config.tile_n}x{config.rows}_b{config.blocks}_s{config.slots}_{way}"
        )
    assert len({config.name for config in configs()}) == len(configs()) > 0


@built
def test_all_kernels_are_built():
    assert not configs(built=False)


@built
def test_the_kernels_that_are_built_are_in_the_library():
    library = cuda.LIBRARY.read_bytes()
    # Compressed or not, a fatbin begins with this word.
    images = {(c.capability, c.dtype) for c in configs(built=True)}
    assert library.count(b"\x50\xed\x55\xba") >= len(images) > 0


@built
def test_the_library_needs_neither_driver_nor_runtime_nor_python_to_load():
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", code, cuda.LIBRARY]
    maps = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "libpatch_embed" in maps.stdout
    assert not re.search(r"libcuda|libcudart|libnv|libstdc\+\+|xla", maps.stdout)


@built
@pytest.mark.parametrize(
    "shapes, reason",
    [
        (dict(N=100), "N is 100, expected a multiple of the kernel's 64 columns"),
        (dict(N=0), "N is 0, expected a multiple"),
        (dict(K=588), "K is 588, expected a multiple of 128 bytes"),
        (dict(K=0), "K is 0, expected a multiple of 128 bytes"),
        (dict(K=6144), "K = 6144 needs .* bytes of shared memory, there are 232448"),
        (dict(M=2**31), "M = 2147483648 rows, expected fewer"),
        (dict(M=-1), "M = -1 rows, expected fewer"),
        (dict(workers=0), "0 workers with 3 runs each"),
        (dict(segments=0), "7 workers with 0 runs each"),
        (dict(period=0), "the table has 0 rows"),
        (dict(workers=2**31), "2\\^31 or more"),
        (dict(N=2**31), "2\\^31 or more"),
        (dict(N=2**27), "eight rows of y"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_launched_are_refused(shapes, reason):
    config = next(c for c in configs(capability=90, dtype="i8", tile_n=64, stream_weight=False))
    fine = dict(M=392, N=768, K=768, period=196, workers=7, segments=3)
    cuda.launch(config, **fine)
    with pytest.raises(NotImplementedError, match=reason):
        cuda.launch(config, **(fine | shapes))


@built
def test_a_kernel_that_does_not_exist_is_refused():
    config = dataclasses.replace(configs()[0], name="patch_embed_sm90")
    with pytest.raises(NotImplementedError, match="no kernel of this name"):
        cuda.launch(config, M=1, N=64, K=128, period=1, workers=1, segments=1)


# Which kernel.


@pytest.fixture
def all_built(monkeypatch):
    """As if the library had the kernels of both chips."""
    every = tuple(dataclasses.replace(c, built=True) for c in configs())
    monkeypatch.setattr(cuda, "configs", lambda: every)


@built
@pytest.mark.parametrize("capability", CHIPS)
def test_every_named_shape_has_a_kernel(all_built, capability):
    for shape, dtype, out_dtype, B in itertools.product(
        NAMED_SHAPES, tiles.DTYPES, ("bfloat16", "float32"), (1, 64, 4736)
    ):
        problem = problem_of(shape, dtype, B, out_dtype)
        chip = CHIPS[capability]
        config = cuda.choose_config(problem, capability, chip)
        config.check(problem, chip)
        assert (LONG[config.dtype], LONG[config.out_dtype]) == (dtype, out_dtype)
        grid = config.grid(problem, chip)
        assert grid.workers == 1 or grid.thread_blocks <= chip.multiprocessors
        assert refusal(cuda, problem, Target("cuda", chip)) is None


@built
@pytest.mark.parametrize(
    "name, B, dtype, capability, chosen",
    [
        ("B/16 224", 4736, "float8_e4m3fn", 90, "192x64_b1_s10_stationary"),
        ("B/16 224", 4736, "bfloat16", 90, "192x128_b1_s5_streamed"),
        ("B/16 224", 1, "int8", 90, "64x64_b1_s8_stationary"),
        ("L/16 256", 512, "int8", 90, "128x64_b1_s8_stationary"),
        ("B/32 256", 4736, "int8", 90, "192x128_b1_s5_streamed"),
        ("B/16 224", 4736, "float8_e4m3fn", 100, "256x128_b2_s4_stationary"),
        ("B/16 224", 4736, "bfloat16", 100, "256x128_b2_s5_streamed"),
        ("B/16 224", 1, "int8", 100, "64x128_b1_s7_stationary"),
        ("So400m/16 256", 4736, "int8", 100, "192x128_b2_s5_stationary"),
    ],
)
def test_the_kernel_of_least_time_is_chosen(all_built, name, B, dtype, capability, chosen):
    problem = problem_of(named_shape(name), dtype, B)
    config = cuda.choose_config(problem, capability, CHIPS[capability])
    assert config.name.endswith(chosen)


# What it says to problems.


@built
@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype="float32"), "it multiplies float8_e4m3fn, bfloat16, int8, not float32"),
        (dict(weight=(100, 768), scale=(100,), table=(196, 100)), "N is 100, expected a multiple"),
        (dict(patches=(8, 196, 588), weight=(768, 588)), "K is 588, expected a multiple of 128"),
        (dict(weight=(2, 768, 768)), "its weight is one matrix"),
        (dict(table_dtype="float32"), "it adds a bfloat16 table"),
        (dict(table=(4, 196, 768)), "repeats along leading axes or has them all"),
        (dict(patches=(2**24, 196, 768)), "expected fewer than 2^31 less a tile. Split them."),
    ],
    ids=str,
)
def test_a_problem_that_it_cannot_serve_is_refused_with_the_reason(change, reason):
    fine = problem_of(named_shape("B/16 224"), "int8")
    assert refusal(cuda, fine, HOPPER) is None
    assert refusal(cuda, fine) is None
    for target in (None, HOPPER):
        assert reason in refusal(cuda, dataclasses.replace(fine, **change), target)


@built
def test_chips_without_kernels_are_refused_with_the_reason(all_built, monkeypatch):
    int8, float8 = (problem_of(named_shape("B/16 224"), d) for d in ("int8", "float8_e4m3fn"))
    for target in (Target("cpu"), Target("cuda", A100), Target("cuda", RTX_5090), Target("cuda")):
        assert refusal(cuda, int8, target).startswith("it needs compute capability 9.0, 10.0 or")
    assert "10.3 has no int8 tensor cores" in refusal(cuda, int8, ULTRA)
    assert refusal(cuda, float8, ULTRA) is None
    hopper = tuple(c for c in cuda.configs() if c.capability == 90)
    monkeypatch.setattr(cuda, "configs", lambda: hopper)
    assert "no such kernels for sm_100" in refusal(cuda, float8, Target("cuda", B200))
    assert refusal(cuda, float8) is None


@built
def test_a_config_for_another_problem_is_refused():
    problem = problem_of(named_shape("B/16 224"), "int8")
    for other in (
        dict(dtype="bf16"),
        dict(out_dtype="f32"),
        dict(has_table=False),
        dict(built=False),
    ):
        config = cuda.choose_config(problem, 90, H200)
        with pytest.raises(NotImplementedError, match="is for other dtypes, or not built"):
            dataclasses.replace(config, **other).check(problem, H200)


@built
def test_it_is_tried_behind_the_Pallas_kernels():
    assert list(BACKENDS)[-3:] == ["cuda", "triton", "xla"]
    problem = problem_of(named_shape("B/16 224"), "int8")
    assert explain(problem, HOPPER).chosen == "mosaic_sm90"
    few = problem_of(named_shape("B/32 256"), "int8", 1)
    assert explain(few, HOPPER).chosen == "xla"


@built
def test_it_runs_where_the_Pallas_kernels_cannot(monkeypatch):
    def refuses(problem, target):
        raise NotImplementedError("not today.")

    for name in ("mosaic_sm90", "mosaic_sm100"):
        monkeypatch.setitem(BACKENDS, name, types.SimpleNamespace(plan=refuses))
    assert explain(problem_of(named_shape("B/16 224"), "int8"), HOPPER).chosen == "cuda"


# The library and its version.


@pytest.fixture
def fresh():
    """What is remembered of the library is forgotten before and after."""
    remembered = (
        cuda.library,
        cuda.configs,
        cuda.register_cuda_kernels,
        cuda._is_stale,
    )
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def reason_of_the_library():
    return refusal(cuda, problem_of(named_shape("B/16 224"), "int8"), HOPPER)


@pytest.mark.parametrize("text", [None, "no nvcc was found"])
def test_a_missing_library_is_a_reason_that_says_how_to_build_it(
    fresh, monkeypatch, tmp_path, text
):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libpatch_embed.so")
    monkeypatch.setattr(cuda, "WHY_NOT", tmp_path / "libpatch_embed.txt")
    if text:
        cuda.WHY_NOT.write_text(text)
    for target in (None, Target("cpu"), HOPPER):
        problem = problem_of(named_shape("B/16 224"), "int8")
        row = dict((r.backend, r) for r in explain(problem, target or Target("cpu")))["cuda"]
        assert not row.serves and row.reason.startswith(
            f"its library is missing: {text or 'it was not built'}."
        )
        assert "make ffi" in row.reason and "pip install" in row.reason
    with pytest.raises(NotImplementedError, match="its library is missing"):
        cuda.register_cuda_kernels()
    params = draw_params(np.random.default_rng(0), patch_size=8, grid=(4, 4), N=64, dtype="int8")
    with pytest.raises(NotImplementedError, match="'cuda' cannot serve this call: its library is"):
        ppe.patch_embed(jnp.zeros((1, 16, 256), jnp.int8), params, backend="cuda")


@pytest.mark.parametrize("content", ["", "no library"])
def test_a_broken_library_is_a_reason(fresh, monkeypatch, tmp_path, content):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libpatch_embed.so")
    cuda.LIBRARY.write_text(content)
    assert "its library was built from other sources" in reason_of_the_library()
    cuda._is_stale.cache_clear()
    cuda.LIBRARY.write_text(content + cuda_build.source_hash())
    assert "its library cannot be loaded" in reason_of_the_library()


@built
def test_a_library_of_other_sources_is_refused(fresh, monkeypatch, tmp_path):
    shutil.copytree(cuda_build.FFI, tmp_path / "ffi")
    monkeypatch.setattr(cuda_build, "FFI", tmp_path / "ffi")
    assert reason_of_the_library() is None
    edited = tmp_path / "ffi" / "ptx" / "tma.cuh"
    edited.write_text(edited.read_text() + "//")
    cuda._is_stale.cache_clear()
    assert re.search(r"built from other sources than .* `make ffi`", reason_of_the_library())
    cuda.library.cache_clear()
    assert_not_registered(monkeypatch)


@built
def test_an_installed_wheel_has_no_sources_to_compare_with(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_build, "FFI", tmp_path / "ffi")
    assert reason_of_the_library() is None


@built
def test_a_library_with_another_interface_is_not_registered(fresh, monkeypatch):
    monkeypatch.setattr(cuda, "INTERFACE", 0)
    assert re.search(r"has interface \d+, this package 0\. .*make ffi", reason_of_the_library())
    assert_not_registered(monkeypatch)


@built
@pytest.mark.parametrize("here", [(0, 0), (1, 9)])
def test_a_library_for_another_version_of_the_FFI_is_not_registered(fresh, monkeypatch, here):
    monkeypatch.setattr(cuda, "ffi_version", lambda: here)
    expected = rf"built for version 0\.\d of XLA's FFI, this jaxlib has {here[0]}\.{here[1]}\."
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
def test_the_library_is_built_for_the_oldest_FFI_that_jaxlib_takes():
    """Registering it with the XLA of this jaxlib, which checks the version, is no error."""
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
    """Params, and a function of patches [3, 16, K]."""
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
    assert re.search(rf'kernel_sm90 = "patch_embed_sm90_{spelled}_\w+"', call)


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
def test_a_program_carries_the_kernels_and_the_runs_of_both_chips(all_built):
    _, patches, embed = small()
    text = jax.jit(embed).trace(patches).lower(lowering_platforms=("cuda",)).as_text()
    names = dict(re.findall(r'kernel_(sm\d+) = "(\w+)"', text))
    assert set(names) == {"sm90", "sm100"}
    assert all(name.startswith(f"patch_embed_{chip}_") for chip, name in names.items())


@built
def test_the_custom_call_has_the_operands_of_the_problem(monkeypatch):
    """Positions for each image, a config of its own, M = 0."""
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
    assert attributes == dict(kernel_sm90=config.name, kernel_sm100="")
    assert [x.shape for x in given[:4]] == [(420, 128), (128, 128), (128,), (420, 128)]
    np.testing.assert_array_equal(given[4], schedule.segments(420, 420, 256, 2))
    empty = [operands[0][:0], *operands[1:3], operands[3][:0]]
    assert compute(cuda, *empty, out_dtype="float32").shape == (0, 3, 70, 128)
    assert len(calls) == 1


# The handler, which checks before it asks for a GPU: on a CPU the checks are all that happens.


@functools.cache
def register_on_the_cpu():
    handler = jax.ffi.pycapsule(cuda.library().patch_embed_execute)
    jax.ffi.register_ffi_target(cuda.TARGET, handler, platform="cpu")


KERNEL = "patch_embed_sm90_i8_bf16_table_64x64_b1_s8_stationary"
OFFSET = KERNEL.replace("table", "offset")
BLACKWELL = "patch_embed_sm100_i8_bf16_table_64x128_b2_s8_stationary"


def operands_of(kernel=KERNEL, M=40, N=128, K=256, period=20):
    """name -> (dtype, shape) of what the handler wants."""
    *_, dtype, out_dtype, kind = kernel.split("_")[:6]
    return dict(
        patches=(LONG[dtype], (M, K)),
        weight=(LONG[dtype], (N, K)),
        scale=("float32", (N,)),
        table=("bfloat16", (period, N)) if kind == "table" else ("float32", (N,)),
        runs_sm90=("int32", (1, 2, 4)),
        runs_sm100=("int32", (1, 2, 4)),
        y=(LONG[out_dtype], (M, N)),
    )


def call(operands, kernel_sm90=KERNEL, kernel_sm100="", **attributes):
    """The custom call on zeros, on a CPU."""
    register_on_the_cpu()
    *arguments, (out_dtype, shape) = operands.values()
    function = jax.ffi.ffi_call(cuda.TARGET, jax.ShapeDtypeStruct(shape, out_dtype))
    arrays = [jnp.zeros(shape, dtype) for dtype, shape in arguments]
    kernels = dict(kernel_sm90=kernel_sm90, kernel_sm100=kernel_sm100)
    return jax.block_until_ready(function(*arrays, **kernels, **attributes))


def error_of(*args, **named):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(*args, **named)
    return str(error.value)


@built
@pytest.mark.parametrize(
    "operand, given, message",
    [
        ("patches", ("bfloat16", (40, 256)), "patches is bfloat16[40, 256], expected int8[M, K]"),
        ("patches", ("int8", (2, 20, 256)), "patches is int8[2, 20, 256], expected int8[M, K]"),
        ("patches", ("int8", (40, 128)), "weight is int8[128, 256], expected int8[N, 128]"),
        ("patches", ("int8", (41, 256)), "y is bfloat16[40, 128], expected bfloat16[41, 128]"),
        ("weight", ("float8_e4m3fn", (128, 256)), "weight is float8_e4m3fn[128, 256], expected"),
        ("weight", ("int8", (256,)), "weight is int8[256], expected int8[N, 256]"),
        ("weight", ("int8", (64, 256)), "scale is float32[128], expected float32[64]"),
        ("scale", ("bfloat16", (128,)), "scale is bfloat16[128], expected float32[128]"),
        ("scale", ("float32", (1, 128)), "scale is float32[1, 128], expected float32[128]"),
        ("table", ("float32", (20, 128)), "table is float32[20, 128], expected bfloat16[period, 1"),
        ("table", ("bfloat16", (20, 64)), "table is bfloat16[20, 64], expected bfloat16[period, 1"),
        ("table", ("bfloat16", (128,)), "table is bfloat16[128], expected bfloat16[period, 128]"),
        ("runs_sm90", ("float32", (1, 2, 4)), "runs_sm90 is float32[1, 2, 4], expected int32[work"),
        ("runs_sm90", ("int32", (2, 4)), "runs_sm90 is int32[2, 4], expected int32[workers, runs,"),
        ("runs_sm90", ("int32", (1, 2, 3)), "runs_sm90 is int32[1, 2, 3], expected int32[workers"),
        ("y", ("float32", (40, 128)), "y is float32[40, 128], expected bfloat16[40, 128]"),
        ("y", ("bfloat16", (40, 64)), "y is bfloat16[40, 64], expected bfloat16[40, 128]"),
        ("scale", ("float16", (128,)), "scale is XLA's type 10[128], expected float32[128]"),
        ("runs_sm90", ("int32", (0, 2, 4)), "the runs are those of 0 workers"),
        ("table", ("bfloat16", (0, 128)), "the table has 0 rows"),
    ],
    ids=str,
)
def test_wrong_operands_are_refused(operand, given, message):
    error = error_of(operands_of() | {operand: given})
    assert "INVALID_ARGUMENT: patch_embed: " in error and message in error, error
    assert KERNEL in error or "Take the runs" in error


@built
def test_offsets_are_one_row_of_float32():
    operands = operands_of(OFFSET)
    message = "table is bfloat16[20, 128], expected float32[128] for kernel"
    wrong = operands | dict(table=("bfloat16", (20, 128)))
    assert message in error_of(wrong, OFFSET)
    assert "table is float32[64], expected float32[128]" in error_of(
        operands | dict(table=("float32", (64,))), OFFSET
    )


@built
def test_the_operands_of_both_chips_kernels_are_checked():
    wrong = operands_of() | dict(runs_sm100=("int32", (1, 2, 3)))
    for kernel_sm90 in ("", KERNEL):
        assert "runs_sm100 is int32[1, 2, 3], expected" in error_of(wrong, kernel_sm90, BLACKWELL)


@built
@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(N=96), "N is 96, expected a multiple of the kernel's 64 columns"),
        (dict(K=100), "K is 100, expected a multiple of 128 bytes"),
        (dict(K=0), "K is 0, expected a multiple of 128 bytes"),
        (dict(K=4096), "K = 4096 needs 328704 bytes of shared memory"),
    ],
    ids=str,
)
def test_operands_that_the_kernel_does_not_fit_are_refused(sizes, message):
    assert f"INVALID_ARGUMENT: patch_embed: {message}" in error_of(operands_of(**sizes))


@built
def test_names_of_no_kernels_are_refused():
    for names, message in (
        (("patch_embed", ""), "no kernel patch_embed for sm_90. The program was lowered with anot"),
        ((BLACKWELL, ""), f"no kernel {BLACKWELL} for sm_90"),
        (("", KERNEL), f"no kernel {KERNEL} for sm_100"),
        (("", ""), "the program names no kernel"),
    ):
        assert f"INVALID_ARGUMENT: patch_embed: {message}" in error_of(
            operands_of(), *names
        ).replace("this library has ", "")


@built
def test_a_call_of_another_form_is_refused():
    operands = operands_of()
    del operands["runs_sm100"]
    assert "INVALID_ARGUMENT: Wrong number of arguments: expected 6" in error_of(operands)
    assert "expected string but got scalar" in error_of(operands_of(), kernel_sm100=np.int32(3))


@built
def test_no_rows_are_no_launch():
    assert call(operands_of(M=0)).shape == (0, 128)


@built
def test_without_a_driver_it_is_unavailable_and_says_why():
    with contextlib.suppress(OSError):
        __import__("ctypes").CDLL("libcuda.so.1")
        pytest.skip("there is a driver")
    assert re.search(
        r"UNAVAILABLE: patch_embed: the NVIDIA driver cannot be loaded: libcuda.so.1: ",
        error_of(operands_of()),
    )


# The handlers on a driver that writes down what it is asked (fake_driver.cc).

STREAM, CODES = 3, dict(INVALID_ARGUMENT=3, FAILED_PRECONDITION=9, INTERNAL=13, UNAVAILABLE=14)
COMPILER = shutil.which("c++") or shutil.which("g++")

with_driver = pytest.mark.usefixtures("cuda_library", "handle")


@pytest.fixture(scope="session")
def handle(tmp_path_factory):
    """Calls in a process of their own -> ([error of each thread], lines) of each."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("driver")

    def compiled(*flags):
        target = folder / "-".join(["driver", *flags]) / "libcuda.so.1"
        if not target.exists():
            target.parent.mkdir()
            source = TESTS / "kernels" / "fake_driver.cc"
            command = [COMPILER, "-std=c++17", "-shared", "-fPIC", *flags, source, "-o", target]
            subprocess.run(command, check=True)
        return target.parent

    def handled(*calls, flags=()):
        defaults = dict(
            stage="execute", stream=STREAM, threads=1, capability=(9, 0), fail="", attributes={}
        )
        names = dict(kernel_sm90=KERNEL, kernel_sm100="")
        calls = [
            {**defaults, **one, "attributes": names | one.get("attributes", {})} for one in calls
        ]
        result = subprocess.run(
            [sys.executable, TESTS / "kernels" / "fake_cuda.py", cuda.LIBRARY],
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(compiled(*flags))},
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    handled.compiled = compiled
    return handled


def placed(operands):
    """The operands with addresses 4096, 8192, ..."""
    return [(*operand, 4096 * (i + 1)) for i, operand in enumerate(operands.values())]


TYPE_NUMBERS = {"e4m3": 0, "i8": 0, "bf16": 9, "f32": 7}
SWIZZLES = {64: 2, 128: 3}


def lines_of_map(description, address):
    """What encodes a map: no interleave, promotion of 256 bytes to L2, zeros beyond."""
    kind, rank = TYPE_NUMBERS[description["type"]], len(description["shape"])
    swizzle = SWIZZLES[description["swizzle"]]
    yield f"cuTensorMapEncodeTiled {kind} {rank} {address} 0 {swizzle} 3 0"
    strides = [0, *description["strides"]]
    for shape, stride, box in zip(description["shape"], strides, description["box"]):
        yield f"dimension {shape} {stride} {box} 1"


PROLOGUE = [
    f"cuStreamGetCtx {STREAM}",
    f"cuCtxPushCurrent {STREAM}",
    f"cuCtxGetDevice {STREAM}",
    "cuDeviceGetAttribute",
    "cuDeviceGetAttribute",
]
# Bytes, that a block may have.
MOST_SHARED = 227 * 1024
LOAD = f"cuLibraryLoadData {0xBA55ED50}"


@with_driver
def test_every_built_kernel_is_launched_as_planned(handle):
    shapes = dict(M=392, N=768, K=768, period=196)
    calls, expected = [], []
    for config in configs(built=True):
        if 768 % config.tile_n:
            continue
        operands = operands_of(config.name, **shapes)
        names = {
            "kernel_sm90": "",
            "kernel_sm100": "",
            f"kernel_sm{config.capability}": config.name,
        }
        capability = divmod(config.capability, 10)
        common = dict(operands=placed(operands), attributes=names, capability=capability)
        calls += [common | dict(stage=stage) for stage in ("initialize", "execute")]
        period = 196 if config.has_table else 1
        plan = cuda.launch(config, **(shapes | dict(period=period)), workers=1, segments=2)
        y = plan["y"]
        maps = [*lines_of_map(plan["patches"], 4096), *lines_of_map(plan["weight"], 8192)]
        maps += lines_of_map(y, 28672) if y else []
        runs = 20480 if config.capability == 90 else 24576
        expected += [
            [f"cuKernelSetAttribute 8 {MOST_SHARED} {STREAM}"],
            [
                *maps,
                config.name,
                f"pointers 4096 8192 {28672 if y else 0} 12288 16384 28672 {runs}",
                f"sizes 392 768 {plan['chunks']} {period} 2",
                *([f"attribute 4 {config.blocks} 1 1"] if config.blocks > 1 else []),
                f"cuLaunchKernelEx {plan['grid']} 1 1 384 1 1 {plan['shared_memory']} {STREAM} "
                f"{STREAM}",
            ],
        ]
    answers = handle(*calls)
    assert len(answers) == len(expected) > 50
    for (errors, written), lines in zip(answers, expected):
        assert errors == [None]
        written = [line for line in written if line != LOAD]
        assert written == [*PROLOGUE, "cuLibraryGetKernel", *lines, f"cuCtxPopCurrent {STREAM}"]


@with_driver
def test_an_image_is_loaded_once_whatever_the_threads_and_devices(handle):
    operands = placed(operands_of())
    calls = [
        dict(operands=operands, stage=stage, threads=threads, stream=stream)
        for stage, threads, stream in (
            ("initialize", 16, 3),
            ("execute", 16, 3),
            ("initialize", 1, 4),
        )
    ]
    answers = handle(*calls)
    assert [error for errors, _ in answers for error in errors] == [None] * 33
    assert [written.count(LOAD) for _, written in answers] == [1, 0, 0]
    assert sum(line.startswith("cuLaunchKernelEx") for line in answers[1][1]) == 16
    # The limit of shared memory is the device's own.
    assert f"cuKernelSetAttribute 8 {MOST_SHARED} 4" in answers[2][1]


@with_driver
def test_programs_with_one_kernel_and_another_K_do_not_disturb_each_other(handle):
    """XLA initialises all calls of a program before it executes the first."""
    large, small = (placed(operands_of(K=K)) for K in (768, 640))
    calls = [("initialize", large), ("initialize", small), ("execute", large), ("execute", small)]
    answers = handle(*(dict(stage=stage, operands=operands) for stage, operands in calls))
    assert [errors for errors, _ in answers] == [[None]] * 4
    launches = [line for _, lines in answers for line in lines if "cuLaunchKernelEx" in line]
    assert len(launches) == len({line.split()[7] for line in launches}) == 2


@with_driver
def test_an_image_that_was_not_loaded_is_tried_again(handle):
    once = dict(operands=placed(operands_of()), stage="initialize")
    (refused, _), (errors, written) = handle(once | dict(fail="cuLibraryLoadData"), once)
    assert refused[0] and errors == [None] and LOAD in written


FAILURES = [
    "cuStreamGetCtx",
    "cuCtxPushCurrent",
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelSetAttribute",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernelEx",
]


@with_driver
@pytest.mark.parametrize("function", FAILURES)
def test_what_the_driver_refuses_is_an_error_and_leaves_no_context(handle, function):
    stage = "initialize" if function == "cuKernelSetAttribute" else "execute"
    ((errors, written),) = handle(dict(operands=placed(operands_of()), stage=stage, fail=function))
    ((code, message),) = errors
    assert code == CODES["INTERNAL"]
    assert re.match(r"patch_embed: .*: CUDA_ERROR_UNKNOWN, unknown error\.$", message)
    versions = r"a driver for CUDA 99\.1 cannot load the kernels, compiled by CUDA 1\d\.\d:"
    assert function != "cuLibraryLoadData" or re.search(versions, message)
    pushed, popped = (
        sum(line.startswith(name) for line in written) for name in ("cuCtxPush", "cuCtxPop")
    )
    assert popped == (pushed and function != "cuCtxPushCurrent")
    assert function == "cuLaunchKernelEx" or not any("cuLaunch" in line for line in written)


@with_driver
def test_a_device_without_kernels_is_refused(handle):
    both = dict(kernel_sm90=KERNEL, kernel_sm100=BLACKWELL)
    operands = placed(operands_of())
    answers = handle(
        dict(operands=operands, capability=(8, 0), attributes=both),
        dict(operands=operands, capability=(12, 0), attributes=both),
        dict(operands=operands, capability=(10, 0)),
        dict(operands=operands, capability=(9, 0), attributes=both | dict(kernel_sm90="")),
        dict(operands=operands, capability=(10, 3), attributes=both),
    )
    messages = [errors[0][1] for errors, _ in answers]
    assert {errors[0][0] for errors, _ in answers} == {CODES["FAILED_PRECONDITION"]}
    assert (
        "has compute capability 8.0, the program's kernels are for 9.0 and for 10.0" in messages[0]
    )
    assert "has compute capability 12.0, the" in messages[1]
    assert "has compute capability 10.0, the program's kernels are for 9.0. Lower" in messages[2]
    assert "has compute capability 9.0, the program's kernels are for 10.0 and 10.3." in messages[3]
    assert "10.3 has no int8 tensor cores" in messages[4]


@with_driver
def test_a_kernel_that_was_not_built_is_refused(handle):
    missing = configs(built=False)
    if not missing:
        pytest.skip("all are built")
    config = missing[0]
    names = {"kernel_sm90": "", "kernel_sm100": "", f"kernel_sm{config.capability}": config.name}
    operands = placed(operands_of(config.name, N=768))
    capability = divmod(config.capability, 10)
    ((errors, _),) = handle(dict(operands=operands, attributes=names, capability=capability))
    assert errors == [
        [CODES["UNAVAILABLE"], f"patch_embed: this library was built without {config.name}."]
    ]


@with_driver
def test_without_a_stream_it_is_unavailable(handle):
    ((errors, written),) = handle(dict(operands=placed(operands_of()), stream=None))
    assert errors == [[CODES["UNAVAILABLE"], "patch_embed: XLA gave no stream of a GPU."]]
    assert not written


OLD = ("-DDRIVER_VERSION=11080",)
TOO_OLD = (
    r"the driver is for CUDA 11\.8; the kernels were compiled by CUDA (1[23])\.\d and need a "
    r"driver for CUDA \1\.0 or newer\. Update the driver, or, for one of CUDA 12, build"
)


@with_driver
def test_a_driver_too_old_for_the_kernels_is_refused_before_they_are_loaded(handle):
    calls = [dict(operands=placed(operands_of()), stage=x) for x in ("initialize", "execute")]
    for ((code, message),), written in handle(*calls, flags=OLD):
        assert code == CODES["UNAVAILABLE"] and re.search(TOO_OLD, message)
        assert not written


@with_driver
@pytest.mark.parametrize("flags", [OLD, ()], ids=["old", "new"])
def test_the_backend_refuses_a_chip_whose_driver_is_too_old(handle, flags):
    code = """if True:
        from interpreter import problem_of
        from planned import refusal
        from pallas_patch_embed.backends import cuda
        from pallas_patch_embed.chips import H200, Target
        from pallas_patch_embed.problem import named_shape
        problem = problem_of(named_shape("B/16 224"), "int8")
        # An export for a chip that nobody knows yet does not depend on this machine's driver.
        assert refusal(cuda, problem) is None
        print(refusal(cuda, problem, Target("cuda", H200)))
    """
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(
            LD_LIBRARY_PATH=str(handle.compiled(*flags)),
            JAX_PLATFORMS="cpu",
        ),
    )
    assert result.returncode == 0, result.stderr
    assert re.search(TOO_OLD if flags else "^None$", result.stdout)


@with_driver
def test_a_driver_that_lacks_a_function_is_unavailable_and_says_why(handle):
    # A driver of another name for what it lacks.
    flags = ["-DcuLaunchKernelEx=cuLaunchKernel"]
    ((errors, _),) = handle(dict(operands=placed(operands_of())), flags=flags)
    ((code, message),) = errors
    assert code == CODES["UNAVAILABLE"]
    assert "the driver has no cuLaunchKernelEx; 525 or newer is needed." in message


@with_driver
def test_wrong_operands_never_reach_the_driver(handle):
    wrong = operands_of() | dict(scale=("float32", (64,)))
    for stage in ("initialize", "execute"):
        ((errors, written),) = handle(dict(operands=placed(wrong), stage=stage))
        ((code, message),) = errors
        assert code == CODES["INVALID_ARGUMENT"] and "scale is float32[64]" in message
        assert not written


@with_driver
def test_no_rows_never_reach_the_driver(handle):
    operands = placed(operands_of(M=0, period=0))
    for stage in ("initialize", "execute"):
        assert handle(dict(operands=operands, stage=stage)) == [[[None], []]]
