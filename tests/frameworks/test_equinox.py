"""Tests of pallas_patch_embed.frameworks.equinox: its module, `replace`, and equimo's tower."""

import pytest

pytest.importorskip("equinox", reason="equinox is missing: `make test-frameworks` installs it")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.frameworks import equinox as drop_in
from tests.frameworks.checks import (
    BOUNDS,
    NORMALISATION,
    TowerTests,
    check_normalisation,
    check_rounding,
    check_sharding,
    relative,
)
from tests.frameworks.towers import PATCH, SIDE, WIDTH, Tower, randomised

pytestmark = pytest.mark.frameworks

IMAGE = np.random.default_rng(0).uniform(-1, 1, (3, 48, 32)).astype(np.float32)


def equimo():
    """Makes a small SigLIP2 tower of equimo."""
    vit = pytest.importorskip(
        "equimo.vision.models.vit", reason="equimo is missing: `make test-frameworks` installs it"
    )
    config = vit._SIGLIP2_BASE_CFG | dict(img_size=SIDE, patch_size=PATCH)
    return vit.VisionTransformer(
        **config, dim=WIDTH, num_heads=4, depths=[2], key=jax.random.key(0)
    )


def applied(model):
    """Returns the model as a function of its arrays and of a batch of images."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(arrays, images):
        features = eqx.combine(arrays, static).features
        return jax.vmap(lambda image: features(image, inference=True))(images)

    return apply


@pytest.fixture(scope="module")
def tower():
    model = equimo()
    arrays, _ = eqx.partition(model, eqx.is_inexact_array)
    arrays = randomised(arrays)
    changed = {}

    def change(patch_dtype):
        if patch_dtype not in changed:
            changed[patch_dtype] = drop_in.replace(model, patch_dtype=patch_dtype)
        # The arrays of the unchanged model are put into the tree of the changed one.
        structure = jax.tree.structure(eqx.filter(changed[patch_dtype], eqx.is_inexact_array))
        apply = applied(changed[patch_dtype])
        return lambda arrays, x: apply(jax.tree.unflatten(structure, jax.tree.leaves(arrays)), x)

    return Tower(
        arrays,
        applied(model),
        change,
        kernel=".patch_embed.proj.weight",
        bias=".patch_embed.proj.bias",
        positions=".global_pos_embed.weight",
        channels_first=True,
    )


class TestTower(TowerTests):
    """Tests the tower above, with the operator in it."""


def test_files_of_either_model_load_into_the_other(tmp_path):
    def model(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        convolution = eqx.nn.Conv2d(3, WIDTH, 16, 16, key=keys[0])
        return {"patch": convolution, "head": eqx.nn.Linear(WIDTH, 4, key=keys[1])}

    before = model(0)
    after = drop_in.replace(before)
    assert type(before["patch"]) is eqx.nn.Conv2d
    assert after["patch"].weight is before["patch"].weight
    eqx.tree_serialise_leaves(tmp_path / "before.eqx", before)
    eqx.tree_serialise_leaves(tmp_path / "after.eqx", after)
    assert (tmp_path / "before.eqx").read_bytes() == (tmp_path / "after.eqx").read_bytes()
    loaded = eqx.tree_deserialise_leaves(tmp_path / "before.eqx", drop_in.replace(model(1)))
    np.testing.assert_array_equal(loaded["patch"](IMAGE), after["patch"](IMAGE))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_module_has_the_convolutions_parameters_shape_and_dtype(use_bias, dtype):
    arguments = dict(use_bias=use_bias, dtype=jnp.dtype(dtype), key=jax.random.key(0))
    before = eqx.nn.Conv2d(3, WIDTH, 16, 16, **arguments)
    after = drop_in.PatchEmbed(3, WIDTH, 16, **arguments)
    for found, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, wanted)
    image = jnp.asarray(IMAGE, dtype)
    found, wanted = after(image), before(image)
    assert found.dtype == wanted.dtype
    assert relative(found, wanted) <= BOUNDS["int8"]


@pytest.mark.parametrize("shape", [(6, WIDTH), (1, 6, WIDTH), (3, 2, WIDTH)])
def test_positions_of_every_shape_are_added(shape):
    module = drop_in.PatchEmbed(3, WIDTH, 16, patch_dtype="float32", key=jax.random.key(0))
    positions = np.float32(np.random.default_rng(1).normal(size=shape))
    wanted = module(IMAGE) + np.moveaxis(positions.reshape(3, 2, WIDTH), -1, 0)
    np.testing.assert_allclose(module(IMAGE, positions), wanted, atol=1e-5)


@pytest.mark.parametrize("edited", [True, False])
def test_images_are_normalised_as_the_module_is_told(edited):
    key, options = jax.random.key(0), NORMALISATION | dict(patch_dtype="float32")
    before = eqx.nn.Conv2d(3, WIDTH, 16, 16, key=key)
    if edited:
        after = drop_in.PatchEmbed(3, WIDTH, 16, key=key, **options)
    else:
        after = drop_in.replace(before, **options)
    check_normalisation(before, eqx.filter_jit(after), channels_first=True)


@pytest.mark.parametrize("edited", [True, False])
def test_the_kernel_is_rounded_as_the_module_is_told(edited):
    before = eqx.nn.Conv2d(3, WIDTH, 16, 16, key=jax.random.key(0))

    def embed(**rounding):
        if edited:
            after = drop_in.PatchEmbed(3, WIDTH, 16, key=jax.random.key(0), **rounding)
        else:
            after = drop_in.replace(before, **rounding)
        return jnp.moveaxis(after(IMAGE), 0, -1)[None]

    kernel = jnp.transpose(before.weight, (2, 3, 1, 0))
    check_rounding(embed, kernel, before.bias[:, 0, 0], np.moveaxis(IMAGE, 0, -1)[None])


def test_a_wrong_normalisation_is_refused():
    model = eqx.nn.Conv2d(3, WIDTH, 16, 16, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"image_std is 0\.5, expected three numbers in"):
        drop_in.replace(model, image_std=0.5)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(stride=8), r"strides are \(8, 8\)"),
        (dict(kernel_size=(16, 8), stride=(16, 8)), r"kernel_size is \(16, 8\)"),
        (dict(padding=1), r"padding is \(\(1, 1\), \(1, 1\)\)"),
        (dict(dilation=2), "it is dilated"),
        (dict(groups=3, out_channels=63), "it has 3 groups"),
        (dict(in_channels=4), "it has 4 input channels"),
    ],
)
def test_a_convolution_that_is_no_patch_embedding_is_refused_by_name(arguments, text):
    arguments = dict(in_channels=3, out_channels=WIDTH, kernel_size=16, stride=16) | arguments
    arguments["key"] = jax.random.key(0)
    with pytest.raises(ValueError, match=text):
        drop_in.PatchEmbed(**arguments)
    model = {"images": eqx.nn.Conv2d(**arguments)}
    path = "images" if arguments["in_channels"] == 4 else None
    with pytest.raises(ValueError, match=f"images is not a patch embedding.*{text}"):
        drop_in.replace(model, path=path)


def test_other_models_and_images_are_refused():
    key = jax.random.key(0)
    model = {"layers": [eqx.nn.Conv2d(4, 8, 2, 2, key=key), eqx.nn.Conv2d(3, 8, 16, 16, key=key)]}
    with pytest.raises(ValueError, match=r"no convolution at 'x'.*'layers.0' \(4\)"):
        drop_in.replace(model, path="x")
    changed = drop_in.replace(model, path="layers.1")
    assert type(changed["layers"][0]) is eqx.nn.Conv2d
    with pytest.raises(ValueError, match="that has not been replaced yet"):
        drop_in.replace(changed)
    with pytest.raises(ValueError, match=r"expected \[3, H, W\]. Map a batch"):
        changed["layers"][1](IMAGE[None])
    same = drop_in.replace(eqx.nn.Conv2d(3, 8, 16, 16, padding="SAME", key=key))
    assert same(IMAGE).shape == (8, 3, 2)
    with pytest.raises(ValueError, match="would pad images of 40 x 32"):
        same(IMAGE[:, :40])


def test_a_kernel_sharded_along_N_stays_so():
    module = drop_in.PatchEmbed(3, WIDTH, 16, key=jax.random.key(0))
    image = np.zeros((3, SIDE, SIDE), np.uint8)

    def call(weight):
        return eqx.tree_at(lambda m: m.weight, module, weight)(image)

    check_sharding(call, module.weight, axis=0, out_axis=0)
