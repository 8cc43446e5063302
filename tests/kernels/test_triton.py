"""The Triton backend without a GPU: it is interpreted, compiled for several chips, and lowered."""

import dataclasses
import functools
import importlib.util
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from benchmarks import audited_kernels
from pallas_patch_embed.backends import ranked, xla
from pallas_patch_embed.backends import triton as backend
from pallas_patch_embed.backends.triton import AMPERE, HOPPER, TritonConfig
from pallas_patch_embed.base import chips, lowering
from pallas_patch_embed.base.chips import CHIPS, Target, chip_of
from pallas_patch_embed.base.problem import NAMED_SHAPES, PatchGeometry, Problem, padded
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows
from tests.kernels.interpreter import draw_operands
from tests.operator.bounds import assert_bit_equal, draw_params
from tests.operator.planned import compute, few, refusal
from tests.short_suite import every_second

if importlib.util.find_spec("triton"):
    from pallas_patch_embed.backends.triton import interpreted as triton_interpreter

needs_triton = pytest.mark.usefixtures("triton_package")

A100, RTX_3090, RTX_4090, H200, B300, THOR, RTX_5090, SPARK = (
    Target("cuda", chip_of(capability))
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (11, 0), (12, 0), (12, 1))
)
TARGETS = pytest.mark.parametrize(
    "target", [few(target.chip, 2) for target in (A100, RTX_4090)], ids=str
)
DTYPES = ("int8", "bfloat16", "float8_e4m3fn")
SMALL = TritonConfig(32, 32, 64, warps=4, stages=2, programs=1)


@pytest.fixture
def interpreted(monkeypatch):
    """Makes Triton's interpreter execute the backend's calls."""
    monkeypatch.setattr(backend, "_call", lambda: triton_interpreter.call)


@needs_triton
@TARGETS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "patches, N, table, out_dtype",
    [
        ((3, 7, 128), 40, "shared", "bfloat16"),
        ((9, 49, 256), 32, "shared", "float32"),
        ((2, 2, 33, 128), 96, "none", "bfloat16"),
        ((5, 47, 128), 64, "per image", "bfloat16"),
        ((1, 1, 128), 1, "shared", "float32"),
        ((64, 128), 64, "shared", "bfloat16"),
    ],
    ids=str,
)
def test_the_interpreted_kernel_is_exact(interpreted, target, dtype, patches, N, table, out_dtype):
    operands = draw_operands(0, patches, N, dtype, table)
    y = compute(backend, *operands, out_dtype=out_dtype, target=target, config=SMALL)
    assert_bit_equal(y, xla.run(*operands, out_dtype=out_dtype))


@needs_triton
def test_widened_float8_numbers_are_exact(interpreted):
    """Every byte is multiplied by every byte, including NaN; products and results are exact."""
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    one_at_a_time = jnp.zeros((256, 128), every.dtype).at[:, 0].set(every)
    scale, table = jnp.ones(256), jnp.zeros(256)
    operands = (one_at_a_time, one_at_a_time, scale, table)
    y = compute(backend, *operands, out_dtype="float32", target=few(A100.chip, 2), config=SMALL)
    numbers = np.asarray(every.astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(y), np.outer(numbers, numbers))


def drawn_images(shape, patch_size, N, dtype, table="shared"):
    """Draws images and the three other operands."""
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)
    K = 3 * patch_size**2
    S = (shape[-3] // patch_size) * (shape[-2] // patch_size)
    _, weight, *rest = draw_operands(0, (*shape[:-3], S, padded(K)), N, dtype, table)
    return images, weight.at[:, K:].set(0), *rest


@needs_triton
@TARGETS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, patch_size, N, table",
    [
        ((5, 32, 48, 3), 16, 40, "shared"),
        ((40, 30, 43, 3), 14, 32, "none"),
        ((3, 2, 13, 17, 3), 4, 32, "per image"),
        ((33, 33, 3), 32, 64, "shared"),
        ((4, 9, 5, 3), 1, 32, "shared"),
    ],
    ids=str,
)
def test_the_interpreted_kernel_cuts_images(
    interpreted, target, dtype, shape, patch_size, N, table
):
    images, *rest = drawn_images(shape, patch_size, N, dtype, table)
    how = dict(geometry=PatchGeometry(patch_size), out_dtype="float32", target=target, config=SMALL)
    y = compute(backend, images, *rest, **how)
    patches = cut_into_rows(images, PatchGeometry(patch_size), Encoding(dtype))
    expected = np.asarray(xla.run(patches, *rest, out_dtype="float32"))
    if dtype == "int8":
        np.testing.assert_array_equal(np.asarray(y), expected)
        return
    # float32 sums are computed in two orders. Each errs by less than K * 2^-24 times the sum of
    # magnitudes.
    magnitude = jnp.abs(patches.astype(jnp.float32)) @ jnp.abs(rest[0].astype(jnp.float32)).T
    bound = 2 * (patches.shape[-1] + 3) * 2.0**-24 * (magnitude * rest[1])
    bound += 2.0**-22 * np.abs(expected)
    assert (np.abs(np.asarray(y) - expected) <= np.asarray(bound)).all()


@needs_triton
@TARGETS
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pixel_is_encoded_as_by_patchify(interpreted, target, dtype):
    """Each row of the weight has a single 1, so that each result is an encoded pixel."""
    levels = np.zeros((256, 1, 1, 3), np.uint8)
    levels[:, 0, 0, 0] = np.arange(256)
    weight = jnp.zeros((32, 128), dtype).at[:, 0].set(1)
    operands = (weight, jnp.ones(32), jnp.zeros(32))
    how = dict(geometry=PatchGeometry(1), out_dtype="float32", target=target, config=SMALL)
    y = compute(backend, jnp.asarray(levels), *operands, **how)
    encoded = cut_into_rows(jnp.asarray(levels), PatchGeometry(1), Encoding(dtype))
    encoded = encoded[..., :1].astype(jnp.float32)
    assert_bit_equal(y, jnp.broadcast_to(encoded, y.shape))


@needs_triton
def test_the_chosen_tiles_are_exact(interpreted):
    operands = draw_operands(0, (3, 97, 256), 160, "int8", "shared")
    expected = xla.run(*operands, out_dtype="bfloat16")
    for target, configs in ((few(A100.chip, 2), AMPERE), (few(H200.chip, 2), HOPPER)):
        for config in configs:
            y = compute(backend, *operands, out_dtype="bfloat16", target=target, config=config)
            assert_bit_equal(y, expected)


@needs_triton
def test_without_patches_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(backend, "_call", lambda: pytest.fail("launched"))
    operands = draw_operands(0, (0, 7, 128), 32, "int8", "shared")
    assert compute(backend, *operands, out_dtype="bfloat16", target=A100).shape == (0, 7, 32)


# The compiled code.


def innermost_loop(ttir):
    """Returns the lines of Triton's IR that are executed for each step of K."""
    lines = ttir.splitlines()
    (dot,) = (i for i, line in enumerate(lines) if "tt.dot" in line)
    begin = max(i for i in range(dot) if "scf.for" in lines[i])
    end = lines[begin].split("%")[0] + "}"
    return lines[begin : next(i for i in range(dot, len(lines)) if lines[i].startswith(end))]


def image_shapes(patch_size, dtype, B, *, image=224, N=768):
    """Returns the shapes of images and of the three other operands."""
    S, K = (image // patch_size) ** 2, padded(3 * patch_size**2)
    shape = jax.ShapeDtypeStruct
    rest = shape((N, K), dtype), shape((N,), jnp.float32), shape((S, N), jnp.bfloat16)
    return shape((B, image, image, 3), jnp.uint8), *rest


def problem_of(S, N, K, dtype="int8", B=2, out_dtype="bfloat16"):
    return Problem((B, S, K), (N, K), (N,), (S, N), dtype, "bfloat16", out_dtype)


def compiled_cases():
    """Yields (target, config, dtype, patch size of images or None, N).

    Targets 8.0 and 9.0 have every config.
    """
    for target in (A100, RTX_3090, RTX_4090, H200, B300, THOR, RTX_5090, SPARK):
        for number, config in enumerate(backend.configs(target.chip)):
            for dtype, patch_size in itertools.product(DTYPES, (None, 16, 14)):
                N = (1152, 1000, 768, 1001, 576)[number]
                vector = {None: None, 16: 16, 14: 2}[patch_size]
                problem = problem_of(196, N, 768, dtype)
                if config not in backend.fitting_configs(problem, target.chip, vector):
                    continue
                # 8.6 differs from 8.0 only in memory, and so does 8.9, except for float8. On 10.3
                # this is the kernel for int8. 12.0 and 12.1 have the same instructions.
                alike = target in (RTX_3090, THOR, RTX_5090, SPARK) or (
                    target == RTX_4090 and dtype != DTYPES[2]
                )
                alike |= target == B300 and dtype != "int8"
                compiled = {(0, 16), (1, 14)} | (
                    {(0, None), (0, 14)} if target == RTX_5090 else set()
                )
                if not alike or (number, patch_size) in compiled:
                    yield target, config, dtype, patch_size, N


@needs_triton
@pytest.mark.parametrize(
    "target, config, dtype, patch_size, N",
    every_second(compiled_cases(), "each case compiles for a second"),
    ids=str,
)
def test_the_kernels_resources_loads_and_arithmetic(tmp_path, target, config, dtype, patch_size, N):
    shapes = image_shapes(patch_size or 16, jnp.dtype(dtype), 67, N=N)
    if not patch_size:
        patches = (67, shapes[-1].shape[0], shapes[1].shape[1])
        shapes = (jax.ShapeDtypeStruct(patches, jnp.dtype(dtype)), *shapes[1:])
    geometry = patch_size and PatchGeometry(patch_size)
    problem = Problem.of(*shapes, out_dtype="bfloat16", geometry=geometry)
    call = audited_kernels.triton_call(backend.plan(problem, target, config=config), *shapes)
    kernel = audited_kernels.compile_triton(call)
    assert audited_kernels.stack_bytes(kernel, tmp_path) == 0
    most = 227 if target in (H200, B300, THOR) else 99
    assert kernel.metadata.shared <= most * 1024
    loop = innermost_loop(kernel.asm["ttir"])
    assert not re.findall(r"arith\.(?:div|rem)\w+", "\n".join(loop))
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (0x\w+)", kernel.asm["ptx"])
    # A thread copies 16 bytes of patches or pixels, except from rows of 42 bytes, which are not
    # aligned.
    assert "0x10" in copies or patch_size == 14
    # On Thor products use tcgen05, except those of int8.
    assert ("tcgen05.mma" in kernel.asm["ptx"]) == (target in (B300, THOR) and dtype != "int8")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (11, 0), (12, 0)], ids=str)
def test_many_images_get_a_large_tile_and_as_many_programs_as_are_resident(capability):
    chip = chip_of(capability)
    for shape in NAMED_SHAPES:
        for B in (1, 64, 4736):
            problem = problem_of(shape.S, shape.N, padded(shape.K), B=B)
            config = backend.choose_config(problem, chip)
            assert config.tile_m == 128 or B < 4736
            programs = config.tiling(problem, chip).thread_blocks
            assert programs <= config.programs * chip.multiprocessors
    small = problem_of(49, 768, 768, B=1)
    assert backend.choose_config(small, chip) == backend.configs(chip)[-1]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_configs_that_need_too_many_registers_are_left_out(capability, dtype):
    chip = chip_of(capability)

    def largest(N=768, vector=None, **how):
        """Returns the largest `min_vector` of the configs that fit."""
        problem = problem_of(196, N, 768, dtype, B=4736, **how)
        chosen = backend.choose_config(problem, chip, vector)
        fitting = backend.fitting_configs(problem, chip, vector)
        assert chosen in fitting
        assert vector is None or all(config.encodes_pixels for config in fitting)
        return max(config.min_vector for config in fitting)

    every = max(config.min_vector for config in backend.configs(chip))
    encoding = [config for config in backend.configs(chip) if config.encodes_pixels]
    of_pixels = max(config.min_vector for config in encoding)
    widened = dtype == "float8_e4m3fn" and capability < (8, 9)
    assert largest() == largest(out_dtype="float32") == every
    assert largest(vector=16) == (1 if widened else of_pixels)
    assert largest(vector=2) <= (1 if widened else 2)
    assert largest(N=1001) == largest(N=1001, vector=16) == 1
    assert largest(vector=16, out_dtype="float32") == 1


@pytest.mark.parametrize("found, expected", [("9.0", 90), (None, 80)])
def test_an_export_is_for_the_chip_at_hand(monkeypatch, found, expected):
    kind, platform = ("NVIDIA H200", "gpu") if found else ("cpu", "cpu")
    device = types.SimpleNamespace(platform=platform, compute_capability=found, device_kind=kind)
    monkeypatch.setattr(chips, "default_device", lambda: device)
    monkeypatch.setattr(backend, "missing", lambda: None)
    shapes = image_shapes(16, jnp.int8, 2)
    problem = Problem.of(*shapes, out_dtype="bfloat16", geometry=PatchGeometry(16))
    for target, capability in ((Target.unknown(), expected), (RTX_4090, 89)):
        call = audited_kernels.triton_call(backend.plan(problem, target), *shapes)
        assert call["compute_capability"] == capability


def test_what_cannot_be_served_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(backend, "missing", lambda: None)
    fine = problem_of(196, 100, 768)
    TURING = dataclasses.replace(CHIPS[0], capability=(7, 5))
    assert refusal(backend, fine, A100) is None and refusal(backend, fine) is None
    for target in (Target("cpu"), Target("cuda", TURING), Target("rocm")):
        assert refusal(backend, fine, target).endswith(f"8.0 or newer; the target is {target}.")
    assert "not float32" in refusal(backend, problem_of(196, 100, 768, "float32"), A100)
    assert "2147483648 rows" in refusal(backend, problem_of(2**16, 100, 768, B=2**15), A100)


def test_without_triton_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backend, "is_installed", lambda name: False)
    reason = refusal(backend, problem_of(196, 768, 768), A100)
    what = "triton and jax-triton are not installed"
    assert reason == f"{what}: pip install 'pallas_patch_embed[triton]'."


# Calls of the public functions that reach the kernel.

PARAMS = ppe.pack(
    np.random.default_rng(0).normal(size=(4, 4, 3, 32)).astype(np.float32),
    None,
    np.zeros((6, 32), np.float32),
    patch_size=4,
    grid=(2, 3),
    dtype="int8",
)
IMAGES = np.random.default_rng(1).integers(0, 256, (5, 8, 12, 3)).astype(np.uint8)


@pytest.fixture
def on_this_cpu(interpreted, monkeypatch):
    """Makes the backend serve on any device; the interpreter executes the kernel."""

    def call(*operands, out, **options):
        function = functools.partial(triton_interpreter.call, out=out, **options)
        return jax.pure_callback(function, out, *operands, vmap_method="sequential")

    monkeypatch.setattr(backend, "_call", lambda: call)
    small, known = few(A100.chip, 2), backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda problem, target: known(problem, target if target.chip else small)
    )
    monkeypatch.setattr(backend, "configs", lambda *_: (SMALL,))


@needs_triton
def test_images_reach_the_kernel_uncut(on_this_cpu):
    embed = functools.partial(ppe.embed_images, backend="triton", cut="kernel")
    expected = ppe.embed_images(IMAGES, PARAMS, backend="xla")
    assert_bit_equal(jax.jit(embed)(IMAGES, PARAMS), expected)
    text = jax.jit(embed).lower(IMAGES, PARAMS).as_text()
    assert "stablehlo.transpose" not in text
    assert "tensor<5x8x12x3xui8>" in text


@needs_triton
@pytest.mark.parametrize("name", [None, "triton"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_by_default_images_are_cut_in_the_faster_way(on_this_cpu, monkeypatch, dtype, name):
    """XLA cuts the images if its patchify is predicted to be faster, also if Triton was named."""
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: H200)
    params = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 3), N=32, dtype=dtype)
    embed = jax.jit(functools.partial(ppe.embed_images, backend=name))
    text = embed.lower(IMAGES, params).as_text()
    assert "callback" in text
    cuts = [x.cuts_images for x in ranked(ppe.explain(IMAGES, params).problem, H200).options]
    assert {True, False} == set(cuts)
    assert ("stablehlo.transpose" not in text) == cuts[0]
    embed = jax.jit(functools.partial(ppe.embed_images, backend=name, cut="kernel"))
    assert "stablehlo.transpose" not in embed.lower(IMAGES, params).as_text()


@needs_triton
def test_images_work_under_vmap_and_with_leading_axes(on_this_cpu):
    embed = functools.partial(ppe.embed_images, backend="triton")
    expected = ppe.embed_images(IMAGES, PARAMS, backend="xla")
    assert_bit_equal(jax.jit(jax.vmap(embed, (0, None)))(IMAGES, PARAMS), expected)
    moved = jax.vmap(embed, (2, None))(np.moveaxis(IMAGES, 0, 2), PARAMS)
    assert_bit_equal(moved, expected)


@needs_triton
def test_jax_triton_lowers_it_where_there_is_no_gpu():
    pytest.importorskip("jax_triton")
    pytest.importorskip("jax_cuda13_plugin")
    patches = ppe.patchify(IMAGES, PARAMS)
    for function, x in ((ppe.embed_images, IMAGES), (ppe.patch_embed, patches)):
        embed = jax.jit(functools.partial(function, backend="triton"))
        lowered = embed.trace(x, PARAMS).lower(lowering_platforms=("cuda",))
        assert "triton_kernel_call" in lowered.as_text()
