"""With cut="kernel", a kernel cuts uint8 images itself, or the call is refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, choose, explain, xla
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.base.chips import A100, B200, B300, H200, Target
from pallas_patch_embed.base.problem import PatchGeometry, Problem
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows
from tests.kernels.cuda_kernels import built
from tests.operator.bounds import assert_bit_equal, draw_images, draw_params

HOPPER, BLACKWELL, ULTRA = (Target("cuda", chip) for chip in (H200, B200, B300))
CUTTING = pytest.mark.parametrize("target, number", [(HOPPER, 90), (BLACKWELL, 100)], ids=str)
PARAMS = draw_params(np.random.default_rng(0), patch_size=16, grid=(14, 14), N=768, dtype="int8")
IMAGES = jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.uint8)


def problem(images=IMAGES.shape, params=PARAMS, dtype="int8"):
    """Returns the problem of images of this shape, with the positions of `params`."""
    source = jax.ShapeDtypeStruct(images, jnp.uint8)
    weight = jax.ShapeDtypeStruct(params.weight.shape, dtype)
    operands = (source, weight, params.scale, params.table)
    return Problem.of(*operands, out_dtype="bfloat16", geometry=params.geometry)


def reasons(problem, target):
    """Maps each backend to the reason why it cuts no images, or to None if it does."""
    found = explain(problem, target, cut="kernel")
    return {row.backend: None if row.serves else row.reason for row in found}


@built
@CUTTING
def test_the_CUDA_kernel_serves(target, number):
    found = explain(problem(), target, cut="kernel")
    text = str(found)
    assert "of uint8 images with cut='kernel', N = 768" in text
    assert re.search(
        rf"-> cuda .* patch_embed_sm{number}_u8_bf16_table_\w+_stationary, cuts images itself", text
    )
    assert found.chosen == "cuda"
    others = reasons(problem(), target)
    assert others[f"mosaic_sm{number}"] == others["xla"] == "it does not cut images itself."


@built
@pytest.mark.parametrize("name", [None, "cuda"])
@pytest.mark.parametrize("width", [224, 240])
@CUTTING
def test_the_kernel_cuts_int8_images_without_being_asked(name, width, target, number):
    asked = problem(images=(8, 224, width, 3))
    asked = dataclasses.replace(asked, table=(asked.patches[-2], asked.N))
    found = explain(asked, target)
    assert found.chosen == "cuda" and f"sm{number}_u8_bf16_" in str(found)
    option = choose(asked, target, name)
    assert option.cuts_images and "cuts images itself" in str(option)


@built
@pytest.mark.parametrize("name", [None, "cuda"])
@pytest.mark.parametrize(
    "change, target",
    [
        (dict(images=(8, 224, 248, 3)), HOPPER),
        (dict(images=(8, 230, 224, 3)), HOPPER),
        (dict(dtype="bfloat16"), HOPPER),
        (dict(images=(8, 224, 248, 3)), BLACKWELL),
        (dict(images=(8, 230, 224, 3)), BLACKWELL),
        (dict(dtype="bfloat16"), BLACKWELL),
        (dict(dtype="bfloat16"), ULTRA),
        (dict(), Target("cuda", H200, known=False)),
    ],
    ids=str,
)
def test_without_being_asked_other_images_are_cut_by_patchify(name, change, target):
    asked = problem(**change)
    asked = dataclasses.replace(asked, table=(asked.patches[-2], asked.N))
    option = choose(asked, target, name)
    assert not option.cuts_images and "_u8_" not in option.config


@built
@pytest.mark.parametrize(
    "change, target, reason",
    [
        (dict(dtype="bfloat16"), HOPPER, "only in int8, on sm_90 and sm_100, but this is bfloat16"),
        (dict(dtype="bfloat16"), ULTRA, "but this is bfloat16 on sm_100."),
        (dict(), ULTRA, "10.3 has no int8 tensor cores"),
        (dict(), Target("cuda", A100), "it needs compute capability 9.0, 10.0 or 10.3"),
        (dict(images=(8, 224, 248, 3)), HOPPER, "expected multiples of 16"),
        (dict(images=(8, 230, 224, 3)), HOPPER, "expected multiples of 16"),
        (dict(images=(8, 230, 224, 3)), BLACKWELL, "expected multiples of 16"),
        (dict(params=dataclasses.replace(PARAMS, patch_size=14)), BLACKWELL, "of 16 x 16"),
        (dict(params=dataclasses.replace(PARAMS, patch_size=32)), BLACKWELL, "of 16 x 16"),
        (dict(params=dataclasses.replace(PARAMS, patch_size=14)), HOPPER, "patches of 16 x 16"),
        (dict(params=dataclasses.replace(PARAMS, patch_size=32)), HOPPER, "patches of 16 x 16"),
    ],
    ids=str,
)
def test_images_that_the_CUDA_kernel_cannot_cut_are_refused_with_the_reason(change, target, reason):
    params = change.get("params", PARAMS)
    images = change.get("images", IMAGES.shape)
    asked = problem(**change)
    # In these cases positions and weight fit the grid and the patch size.
    (_, S, K), N = asked.patches, asked.N
    asked = dataclasses.replace(asked, table=(S, N), weight=(N, K), geometry=params.geometry)
    assert asked.images == images
    assert reason in reasons(asked, target)["cuda"]
    with pytest.raises(NotImplementedError, match=r"cannot serve this call: .*cut=None"):
        choose(asked, target, "cuda", cut="kernel")


@built
def test_another_backend_is_refused_by_name():
    for name in ("mosaic_sm90", "mosaic_sm100", "xla"):
        message = f"'{name}' cannot serve this call: .* Leave cut=None"
        with pytest.raises(NotImplementedError, match=message):
            ppe.embed_images(jnp.zeros(IMAGES.shape, jnp.uint8), PARAMS, backend=name, cut="kernel")


def test_without_a_kernel_the_call_is_refused():
    images = jnp.zeros(IMAGES.shape, jnp.uint8)
    with pytest.raises(NotImplementedError, match=r"cut='kernel'.*Leave cut=None"):
        jax.jit(ppe.embed_images, static_argnames="cut")(images, PARAMS, cut="kernel")
    asked = problem()
    with pytest.raises(NotImplementedError, match=r"cut='kernel' on cpu\. .*xla: it does not cut"):
        choose(asked, Target("cpu"), None, cut="kernel")
    found = explain(asked, Target("cpu"), cut="kernel")
    assert found.chosen == "none" and "->" not in str(found)


@pytest.mark.parametrize("given", ["xla", "", True, 1, "Kernel"])
def test_another_cut_is_refused(given):
    for call in (ppe.embed_images, ppe.explain):
        with pytest.raises(ValueError, match=f"cut is {given!r}, expected None, or 'kernel'"):
            call(np.zeros(IMAGES.shape, np.uint8), PARAMS, cut=given)


def test_only_uint8_images_are_cut_by_a_kernel():
    images = np.zeros(IMAGES.shape, np.float32)
    with pytest.raises(ValueError, match=r"needs uint8 images .* float32\[8, 224, 224, 3\]"):
        ppe.embed_images(images, PARAMS, cut="kernel")
    with pytest.raises(ValueError, match=r"needs uint8 images .* int8\[8, 196, 768\]"):
        ppe.explain((8, 196, 768), PARAMS, cut="kernel")


@pytest.fixture
def cuts(monkeypatch):
    """Makes the CUDA backend cut images itself on any machine."""

    def plan(problem, target):
        assert problem.images is not None

        def run(images, weight, scale, table):
            patches = cut_into_rows(images, problem.geometry, Encoding(weight.dtype.name))
            return xla.run(patches, weight, scale, table, out_dtype=problem.out_dtype)

        return Plan(run)

    monkeypatch.setattr(BACKENDS["cuda"], "plan", plan)
    yield
    jax.clear_caches()


def test_it_goes_through_jit_vmap_and_batches(cuts):
    params = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 2), N=8, dtype="int8")
    images = draw_images(np.random.default_rng(1), 2, 3, 8, 8, 3)
    images = jnp.asarray(np.asarray(images).astype(np.uint8))
    expected = ppe.embed_images(images, params, backend="xla")

    def embed(x):
        return ppe.embed_images(x, params, backend="cuda", cut="kernel")

    for way in (embed, jax.jit(embed), jax.vmap(embed), jax.jit(jax.vmap(embed, 1, 1))):
        assert_bit_equal(way(images), expected)
    assert "images/4,bfloat16,cuda,cut=kernel" in str(jax.make_jaxpr(embed)(images))


@built
def test_a_program_for_any_chip_calls_the_kernels_with_the_images():
    def embed(images):
        operands = (images, PARAMS.weight, PARAMS.scale, PARAMS.table)
        static = dict(
            backend="cuda", out_dtype="bfloat16", geometry=PatchGeometry(16), cut="kernel"
        )
        return primitive.patch_embed(*map(jnp.asarray, operands), **static)

    text = jax.jit(embed).trace(IMAGES).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @pallas_patch_embed_cuda" in line)
    assert re.search(r'kernels = "patch_embed_sm90_u8_\w+,patch_embed_sm100_u8_\w+"', call)
    assert "(tensor<8x224x224x3xui8>, tensor<768x768xi8>" in call
    # No other operation cuts or encodes the images.
    assert "transpose" not in text and "convert" not in text
