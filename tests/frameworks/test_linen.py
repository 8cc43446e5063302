"""Tests of pallas_patch_embed.frameworks.linen: its module, `intercept`, and two towers."""

import functools

import pytest

pytest.importorskip("flax", reason="flax is missing: `make test-frameworks` installs it")

import flax.linen as nn
import jax
import numpy as np

from pallas_patch_embed.frameworks import linen
from tests.frameworks.checks import (
    BOUNDS,
    NORMALISATION,
    TowerTests,
    check_normalisation,
    check_rounding,
    check_sharding,
    relative,
)
from tests.frameworks.towers import PATCH, SIDE, WIDTH, BigVisionViT, Tower, randomised

pytestmark = pytest.mark.frameworks


def initialised(model, images):
    return randomised(jax.jit(model.init)(jax.random.key(0), images))


def interception(model):
    """Returns a function of the patch dtype that returns the intercepted model."""

    def apply(patch_dtype):
        def intercepted(variables, images):
            with linen.intercept(patch_dtype=patch_dtype):
                return model.apply(variables, images)

        return intercepted

    return apply


def big_vision(edited):
    model = BigVisionViT()
    variables = initialised(model, np.zeros((1, SIDE, SIDE, 3), np.float32))

    def edit(patch_dtype):
        module = functools.partial(linen.PatchEmbed, patch_dtype=patch_dtype)
        return BigVisionViT(module).apply

    return Tower(
        variables,
        model.apply,
        edit if edited else interception(model),
        kernel="['params']['embedding']['kernel']",
        bias="['params']['embedding']['bias']",
        positions="['params']['pos_embedding']",
    )


def gemma():
    """Makes a small SigLIP tower of Gemma 3."""
    from tests.frameworks.gemma_vision import vision

    model = vision.ViTModel(
        patch_size=(PATCH, PATCH), width=WIDTH, depth=2, mlp_dim=128, num_heads=4
    )
    variables = initialised(model, np.zeros((1, SIDE, SIDE, 3), np.float32))
    return Tower(
        variables,
        model.apply,
        interception(model),
        kernel="['params']['embedding']['kernel']",
        bias="['params']['embedding']['bias']",
        positions="['params']['pos_embedding']",
        takes_uint8=False,
    )


TOWERS = {
    "big_vision, edited": lambda: big_vision(edited=True),
    "big_vision, intercepted": lambda: big_vision(edited=False),
    "gemma, intercepted": gemma,
}


@pytest.fixture(scope="module", params=TOWERS)
def tower(request):
    return TOWERS[request.param]()


class TestTower(TowerTests):
    """Tests the towers above, with the operator in them."""


IMAGES = np.float32(np.random.default_rng(0).uniform(-1, 1, (2, 48, 32, 3)))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_the_module_has_the_convolutions_parameters_shape_and_dtype(use_bias, dtype):
    arguments = dict(use_bias=use_bias, dtype=dtype)
    before = nn.Conv(WIDTH, (16, 16), (16, 16), padding="VALID", **arguments)
    after = linen.PatchEmbed(WIDTH, (16, 16), **arguments)
    variables = before.init(jax.random.key(0), IMAGES)
    own = after.init(jax.random.key(0), IMAGES)
    jax.tree.map(np.testing.assert_array_equal, own, variables)
    found, wanted = after.apply(variables, IMAGES), before.apply(variables, IMAGES)
    assert found.dtype == wanted.dtype
    assert relative(found, wanted) <= BOUNDS["int8"]


@pytest.mark.parametrize("shape", [(6, WIDTH), (1, 6, WIDTH), (3, 2, WIDTH), (2, 6, WIDTH)])
def test_positions_of_every_shape_are_added(shape):
    module = linen.PatchEmbed(WIDTH, (16, 16), patch_dtype="float32")
    variables = module.init(jax.random.key(0), IMAGES)
    positions = np.float32(np.random.default_rng(1).normal(size=shape))
    found = module.apply(variables, IMAGES, positions)
    per_image = positions.reshape(-1, 3, 2, WIDTH)
    np.testing.assert_allclose(found, module.apply(variables, IMAGES) + per_image, atol=1e-5)


@pytest.mark.parametrize("edited", [True, False])
def test_images_are_normalised_as_the_module_is_told(edited):
    before = nn.Conv(WIDTH, (16, 16), (16, 16), padding="VALID")
    after = linen.PatchEmbed(WIDTH, (16, 16), patch_dtype="float32", **NORMALISATION)
    variables = randomised(before.init(jax.random.key(0), IMAGES))

    def changed(images):
        if edited:
            return after.apply(variables, images)
        with linen.intercept(patch_dtype="float32", **NORMALISATION):
            return before.apply(variables, images)

    check_normalisation(lambda images: before.apply(variables, images), changed)


@pytest.mark.parametrize("edited", [True, False])
def test_the_kernel_is_rounded_as_the_module_is_told(edited):
    before = nn.Conv(WIDTH, (16, 16), (16, 16), padding="VALID")
    variables = randomised(before.init(jax.random.key(0), IMAGES))

    def embed(**rounding):
        if edited:
            return linen.PatchEmbed(WIDTH, (16, 16), **rounding).apply(variables, IMAGES)
        with linen.intercept(**rounding):
            return before.apply(variables, IMAGES)

    kernel, bias = (variables["params"][name] for name in ("kernel", "bias"))
    check_rounding(embed, kernel, bias, IMAGES)


def test_another_normalisation_compiles_again_and_a_wrong_one_is_refused():
    before = nn.Conv(WIDTH, (16, 16), (16, 16), padding="VALID")
    variables = before.init(jax.random.key(0), IMAGES)
    apply, results = jax.jit(before.apply), []
    for options in ({}, NORMALISATION):
        with linen.intercept(**options):
            results.append(apply(variables, np.zeros((1, 32, 32, 3), np.uint8)))
    assert relative(*results) > 0.1
    with pytest.raises(ValueError, match=r"image_std is 0\.5, expected three numbers in"):
        with linen.intercept(image_std=0.5):
            pass


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(strides=(8, 8)), r"strides are \(8, 8\)"),
        (dict(strides=None), r"strides are \(1, 1\)"),
        (dict(kernel_size=(16, 8), strides=(16, 8)), r"kernel_size is \(16, 8\)"),
        (dict(padding=1), "padding is 1"),
        (dict(padding="CIRCULAR"), "padding is 'CIRCULAR'"),
        (dict(kernel_dilation=2), "it is dilated"),
        (dict(input_dilation=(1, 2), padding=0), "it is dilated"),
        (dict(feature_group_count=3, features=63), "it has 3 groups"),
        (dict(mask=np.ones((16, 16, 3, WIDTH))), "mask is True"),
        (dict(padding="SAME"), "would pad images of 40 x 32"),
    ],
)
def test_a_convolution_that_is_no_patch_embedding_is_refused_by_name(arguments, text):
    defaults = dict(features=WIDTH, kernel_size=(16, 16), strides=(16, 16), padding="VALID")
    arguments = defaults | arguments
    images = IMAGES[:, :40]
    before = nn.Sequential([nn.Conv(**arguments)])
    variables = before.init(jax.random.key(0), images)
    with pytest.raises(ValueError, match=f"layers_0.*{text}"), linen.intercept():
        before.apply(variables, images)
    if arguments["strides"] is not None:
        with pytest.raises(ValueError, match=text):
            linen.PatchEmbed(**arguments).init(jax.random.key(0), images)


def test_padding_same_serves_whole_patches():
    before = nn.Conv(WIDTH, (16, 16), (16, 16))
    variables = before.init(jax.random.key(0), IMAGES)
    with linen.intercept(patch_dtype="float32"):
        found = before.apply(variables, IMAGES)
    assert relative(found, before.apply(variables, IMAGES)) <= BOUNDS["float32"]


def test_other_convolutions_are_left_alone():
    model = nn.Sequential([nn.Conv(8, (3, 3)), nn.Conv(3, (1, 1)), nn.Conv(8, (16, 16), (16, 16))])
    variables = model.init(jax.random.key(0), IMAGES)
    with pytest.raises(ValueError, match="layers_0"), linen.intercept():
        model.apply(variables, IMAGES)
    with linen.intercept(path="layers_1"), pytest.raises(ValueError, match="8 input channels"):
        model.apply(variables, IMAGES)
    variables = {"params": jax.tree.map(lambda x: x / 100, variables["params"])}
    wanted = model.apply(variables, IMAGES)
    with linen.intercept(path="layers_2", patch_dtype="float32"):
        found = model.apply(variables, IMAGES)
    assert 0 < relative(found, wanted) <= BOUNDS["float32"]


def test_a_model_without_the_convolution_is_warned_about():
    model = BigVisionViT()
    images = np.ones((1, SIDE, SIDE, 3), np.float32)
    variables = initialised(model, images)
    wanted = model.apply(variables, images)
    with pytest.warns(
        UserWarning, match=r"nothing was replaced.*no nn.Conv at 'stem', only Conv 'embedding'"
    ):
        with linen.intercept(path="stem"):
            np.testing.assert_array_equal(model.apply(variables, images), wanted)


def test_what_jit_compiled_outside_is_compiled_again_inside_and_only_once():
    traces = []
    model = BigVisionViT()
    variables = initialised(model, np.zeros((1, SIDE, SIDE, 3), np.float32))

    @jax.jit
    def apply(variables, images):
        traces.append(images.shape)
        return model.apply(variables, images)

    images = np.ones((1, SIDE, SIDE, 3), np.float32)
    outside = apply(variables, images)
    for _ in range(2):
        with linen.intercept():
            inside = apply(variables, images)
    assert 1e-5 < relative(inside, outside) <= BOUNDS["int8"]
    np.testing.assert_array_equal(apply(variables, images), outside)
    assert len(traces) == 2


def test_a_kernel_sharded_along_N_stays_so():
    module = linen.PatchEmbed(WIDTH, (16, 16))
    images = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    variables = module.init(jax.random.key(0), images)

    def call(kernel):
        return module.apply({"params": dict(variables["params"], kernel=kernel)}, images)

    check_sharding(call, variables["params"]["kernel"], axis=3, out_axis=3)


def test_partitioned_parameters_are_unboxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, None, "N"))
    before = nn.Conv(WIDTH, (16, 16), (16, 16), padding="VALID", kernel_init=init)
    variables = before.init(jax.random.key(0), IMAGES)
    assert isinstance(variables["params"]["kernel"], nn.Partitioned)
    wanted = before.apply(variables, IMAGES)
    with linen.intercept(patch_dtype="float32"):
        assert relative(before.apply(variables, IMAGES), wanted) <= BOUNDS["float32"]
    after = linen.PatchEmbed(WIDTH, (16, 16), kernel_init=init, patch_dtype="float32")
    assert relative(after.apply(variables, IMAGES), wanted) <= BOUNDS["float32"]
