"""Tests of pallas_patch_embed.frameworks.nnx: its module, `replace`, and jimm's tower."""

import functools

import pytest

pytest.importorskip("flax", reason="flax is missing: `make test-frameworks` installs it")

import jax
import numpy as np
from flax import nnx

from pallas_patch_embed.frameworks import nnx as drop_in
from tests.frameworks.checks import (
    BOUNDS,
    NORMALISATION,
    TowerTests,
    check_normalisation,
    check_rounding,
    check_sharding,
    relative,
)
from tests.frameworks.towers import SIDE, WIDTH, JimmViT, Tower, randomised

pytestmark = pytest.mark.frameworks

IMAGES = np.float32(np.random.default_rng(0).uniform(-1, 1, (2, 48, 32, 3)))


def edited(patch_dtype):
    module = functools.partial(drop_in.PatchEmbed, patch_dtype=patch_dtype)
    return JimmViT(nnx.Rngs(0), module, fused=True)


def replaced(patch_dtype):
    model = JimmViT(nnx.Rngs(0))
    assert drop_in.replace(model, patch_dtype=patch_dtype) == ["patch_embeddings"]
    return model


def applied(model):
    """Returns the model as a function of parameters, which replace its own, and of images."""
    graph, _, others = nnx.split(model, nnx.Param, ...)
    return lambda parameters, images: nnx.merge(graph, parameters, others)(images)


@pytest.fixture(scope="module", params=[edited, replaced])
def tower(request):
    unchanged = JimmViT(nnx.Rngs(0))
    return Tower(
        randomised(nnx.state(unchanged, nnx.Param)),
        applied(unchanged),
        lambda patch_dtype: applied(request.param(patch_dtype)),
        kernel="['patch_embeddings']['kernel'].value",
        bias="['patch_embeddings']['bias'].value",
        positions="['position_embeddings'].value",
    )


class TestTower(TowerTests):
    """Tests the towers above, with the operator in them."""


def test_a_model_keeps_its_parameters_and_follows_their_updates():
    model = JimmViT(nnx.Rngs(0))
    before = nnx.state(model)
    traces = []

    @nnx.jit
    def apply(model, images):
        traces.append(images.shape)
        return model(images)

    images = np.float32(np.random.default_rng(0).uniform(-1, 1, (1, SIDE, SIDE, 3)))
    first = apply(model, images)
    kernel = model.patch_embeddings.kernel
    drop_in.replace(model)
    assert model.patch_embeddings.kernel is kernel
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert 1e-5 < relative(apply(model, images), first) <= BOUNDS["int8"]
    kernel[...] = -kernel[...]
    assert relative(apply(model, images), first) > 0.1
    assert len(traces) == 2


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_the_module_has_the_convolutions_parameters_shape_and_dtype(use_bias, dtype):
    arguments = dict(use_bias=use_bias, dtype=dtype)
    before = nnx.Conv(3, WIDTH, (16, 16), (16, 16), padding="VALID", rngs=nnx.Rngs(0), **arguments)
    after = drop_in.PatchEmbed(3, WIDTH, (16, 16), rngs=nnx.Rngs(0), **arguments)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(after), nnx.state(before))
    found, wanted = after(IMAGES), before(IMAGES)
    assert found.dtype == wanted.dtype
    assert relative(found, wanted) <= BOUNDS["int8"]


@pytest.mark.parametrize("shape", [(6, WIDTH), (1, 6, WIDTH), (3, 2, WIDTH), (2, 6, WIDTH)])
def test_positions_of_every_shape_are_added(shape):
    module = drop_in.PatchEmbed(3, WIDTH, (16, 16), patch_dtype="float32", rngs=nnx.Rngs(0))
    positions = np.float32(np.random.default_rng(1).normal(size=shape))
    wanted = module(IMAGES) + positions.reshape(-1, 3, 2, WIDTH)
    np.testing.assert_allclose(module(IMAGES, positions), wanted, atol=1e-5)
    np.testing.assert_allclose(module(IMAGES, nnx.Param(positions)), wanted, atol=1e-5)


@pytest.mark.parametrize("edited", [True, False])
def test_the_kernel_is_rounded_as_the_module_is_told(edited):
    before = nnx.Conv(3, WIDTH, (16, 16), (16, 16), padding="VALID", rngs=nnx.Rngs(0))

    def embed(**rounding):
        if edited:
            module = drop_in.PatchEmbed(3, WIDTH, (16, 16), rngs=nnx.Rngs(0), **rounding)
        else:
            module = nnx.clone(before)
            drop_in.replace(module, **rounding)
        return module(IMAGES)

    check_rounding(embed, before.kernel[...], before.bias[...], IMAGES)


@pytest.mark.parametrize("edited", [True, False])
def test_images_are_normalised_as_the_module_is_told(edited):
    arguments = dict(kernel_size=(16, 16), strides=(16, 16), padding="VALID")
    before = nnx.Conv(3, WIDTH, rngs=nnx.Rngs(0), **arguments)
    if edited:
        options = NORMALISATION | dict(patch_dtype="float32")
        after = drop_in.PatchEmbed(3, WIDTH, rngs=nnx.Rngs(0), **arguments, **options)
    else:
        after = nnx.clone(before)
        drop_in.replace(after, patch_dtype="float32", **NORMALISATION)
    check_normalisation(before, nnx.jit(after))


def test_a_wrong_normalisation_is_refused_before_anything_is_changed():
    model = nnx.Conv(3, WIDTH, (16, 16), (16, 16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"image_std is 0\.5, expected three numbers in"):
        drop_in.replace(model, image_std=0.5)
    assert type(model) is nnx.Conv


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(strides=(8, 8)), r"strides are \(8, 8\)"),
        (dict(kernel_size=(16, 8), strides=(16, 8)), r"kernel_size is \(16, 8\)"),
        (dict(padding=((1, 1), (0, 0))), "padding is"),
        (dict(padding="REFLECT"), "padding is 'REFLECT'"),
        (dict(kernel_dilation=2), "it is dilated"),
        (dict(feature_group_count=3, out_features=63), "it has 3 groups"),
        (dict(mask=np.ones((16, 16, 3, WIDTH))), "mask is True"),
        (dict(in_features=4), "it has 4 input channels"),
    ],
)
def test_a_convolution_that_is_no_patch_embedding_is_refused_by_name(arguments, text):
    arguments = dict(out_features=WIDTH, kernel_size=(16, 16), strides=(16, 16)) | arguments
    arguments = dict(in_features=3, padding="VALID", rngs=nnx.Rngs(0)) | arguments
    with pytest.raises(ValueError, match=text):
        drop_in.PatchEmbed(**arguments)
    good = nnx.Conv(3, WIDTH, (16, 16), (16, 16), rngs=nnx.Rngs(0))
    model = nnx.Sequential(good, nnx.Conv(**arguments))
    path = "layers.1" if arguments["in_features"] == 4 else None
    with pytest.raises(ValueError, match=f"layers.1 is not a patch embedding.*{text}"):
        drop_in.replace(model, path=path)
    assert type(good) is nnx.Conv


def test_a_model_without_a_convolution_of_images_is_refused():
    model = nnx.Sequential(nnx.Conv(4, 8, (2, 2), (2, 2), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"three input channels.*'layers.0' \(4\)"):
        drop_in.replace(model)
    with pytest.raises(ValueError, match=r"no convolution at 'layers.1'"):
        drop_in.replace(model, path="layers.1")
    model = JimmViT(nnx.Rngs(0))
    drop_in.replace(model)
    with pytest.raises(ValueError, match="that has not been replaced yet"):
        drop_in.replace(model)


def test_images_that_padding_same_would_pad_are_refused():
    model = nnx.Conv(3, WIDTH, (16, 16), (16, 16), padding="SAME", rngs=nnx.Rngs(0))
    wanted = model(IMAGES)
    drop_in.replace(model, patch_dtype="float32")
    assert relative(model(IMAGES), wanted) <= BOUNDS["float32"]
    with pytest.raises(ValueError, match="would pad images of 40 x 32"):
        model(IMAGES[:, :40])


def test_a_kernel_sharded_along_N_stays_so():
    module = drop_in.PatchEmbed(3, WIDTH, (16, 16), rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    images = np.zeros((2, SIDE, SIDE, 3), np.uint8)

    def call(kernel):
        state["kernel"] = state["kernel"].replace(kernel)
        return nnx.merge(graph, state)(images)

    check_sharding(call, module.kernel[...], axis=3, out_axis=3)
