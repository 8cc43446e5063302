"""Tests of pallas_patch_embed.frameworks.keras: its layer, `replace`, and keras-hub's tower."""

import pytest

pytest.importorskip("keras", reason="keras is missing: `make test-frameworks` installs it")

import jax
import keras
import numpy as np

from pallas_patch_embed.frameworks import keras as drop_in
from tests.frameworks.checks import (
    BOUNDS,
    NORMALISATION,
    TowerTests,
    check_normalisation,
    check_rounding,
    check_sharding,
    primitives,
    relative,
)
from tests.frameworks.towers import PATCH, SIDE, WIDTH, Tower, randomised

pytestmark = pytest.mark.frameworks

IMAGES = np.float32(np.random.default_rng(0).uniform(-1, 1, (2, 48, 32, 3)))


def siglip():
    """Makes a small SigLIP tower of keras-hub."""
    models = pytest.importorskip(
        "keras_hub.models", reason="keras-hub is missing: `make test-frameworks` installs it"
    )
    keras.utils.set_random_seed(0)
    return models.SigLIPVisionEncoder(
        patch_size=PATCH,
        hidden_dim=WIDTH,
        num_layers=2,
        num_heads=4,
        intermediate_dim=128,
        image_shape=(SIDE, SIDE, 3),
    )


def applied(model):
    """Returns the model as a function of values for its trainable variables, and of images."""

    def apply(parameters, images):
        others = [v.value for v in model.non_trainable_variables]
        return model.stateless_call(parameters, others, images)[0]

    return apply


@pytest.fixture(scope="module")
def tower():
    unchanged = siglip()
    paths = [v.path for v in unchanged.trainable_variables]
    changed = {}

    def change(patch_dtype):
        if patch_dtype not in changed:
            changed[patch_dtype] = siglip()
            drop_in.replace(changed[patch_dtype], patch_dtype=patch_dtype)
        return applied(changed[patch_dtype])

    return Tower(
        randomised([v.value for v in unchanged.trainable_variables]),
        applied(unchanged),
        change,
        kernel=f"[{paths.index('embedding/patch_embedding/kernel')}]",
        bias=f"[{paths.index('embedding/patch_embedding/bias')}]",
        positions=f"[{paths.index('embedding/position_embedding/embeddings')}]",
        takes_uint8=False,
    )


class TestTower(TowerTests):
    """Tests the tower above, with the operator in it."""


def siglip_embedding():
    return siglip().embedding


def gemma3_embedding():
    keras_hub = pytest.importorskip(
        "keras_hub.src.models.gemma3.gemma3_vision_encoder",
        reason="keras-hub is missing: `make test-frameworks` installs it",
    )
    layer = keras_hub.Gemma3VisionEmbedding(SIDE, PATCH, WIDTH)
    layer.build((None, SIDE, SIDE, 3))
    return layer


@pytest.mark.parametrize("layer", [siglip_embedding, gemma3_embedding])
def test_the_positions_of_keras_hubs_embedding_are_part_of_the_operator(layer):
    layer = layer()
    images = np.float32(np.random.default_rng(0).uniform(-1, 1, (2, SIDE, SIDE, 3)))
    wanted = layer(images)
    drop_in.replace(layer, patch_dtype="float32")
    assert relative(layer(images), wanted) <= BOUNDS["float32"]
    after = list(primitives(jax.make_jaxpr(layer.call)(images).jaxpr))
    assert "add" not in after[after.index("patch_embed") :]


def test_what_keras_compiled_before_the_swap_is_compiled_again(tmp_path):
    model = siglip()
    images = np.float32(np.random.default_rng(0).uniform(-1, 1, (2, SIDE, SIDE, 3)))
    before = model.predict(images, verbose=0)
    assert drop_in.replace(model) == ["embedding/patch_embedding"]
    after = model.predict(images, verbose=0)
    assert 1e-5 < relative(after, before) <= BOUNDS["int8"]
    # A saved file contains no trace of the replacement.
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored.predict(images, verbose=0), before)
    model.save_weights(tmp_path / "own.weights.h5")
    restored.load_weights(tmp_path / "own.weights.h5")
    restored.save_weights(tmp_path / "other.weights.h5")
    model.load_weights(tmp_path / "other.weights.h5")
    np.testing.assert_array_equal(model.predict(images, verbose=0), after)


def test_training_is_refused():
    model = siglip()
    drop_in.replace(model)
    model.compile(optimizer="sgd", loss="mse")
    images = np.zeros((2, SIDE, SIDE, 3), np.float32)
    with pytest.raises(TypeError, match="derivative"):
        model.fit(images, np.zeros((2, WIDTH), np.float32), verbose=0)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16", "float16"])
def test_the_layer_has_the_convolutions_weights_shape_and_dtype(use_bias, dtype):
    before = keras.layers.Conv2D(WIDTH, 16, 16, use_bias=use_bias, dtype=dtype)
    after = drop_in.PatchEmbed(WIDTH, 16, use_bias=use_bias, dtype=dtype)
    wanted = before(IMAGES)
    after.build(IMAGES.shape)
    assert [(v.name, v.shape) for v in after.weights] == [(v.name, v.shape) for v in before.weights]
    after.set_weights(before.get_weights())
    found = after(IMAGES)
    assert found.dtype == wanted.dtype
    assert relative(found, wanted) <= BOUNDS["int8"]


@pytest.mark.parametrize("shape", [(6, WIDTH), (1, 6, WIDTH), (3, 2, WIDTH), (2, 6, WIDTH)])
def test_positions_of_every_shape_are_added(shape):
    layer = drop_in.PatchEmbed(WIDTH, 16, patch_dtype="float32")
    positions = np.float32(np.random.default_rng(1).normal(size=shape))
    wanted = layer(IMAGES) + positions.reshape(-1, 3, 2, WIDTH)
    np.testing.assert_allclose(layer(IMAGES, positions), wanted, atol=1e-5)


@pytest.mark.parametrize("edited", [True, False])
def test_images_are_normalised_as_the_layer_is_told(edited):
    before = keras.layers.Conv2D(WIDTH, 16, 16)
    before.build(IMAGES.shape)
    options = NORMALISATION | dict(patch_dtype="float32")
    if edited:
        after = drop_in.PatchEmbed(WIDTH, 16, **options)
        after.build(IMAGES.shape)
    else:
        after = keras.layers.Conv2D(WIDTH, 16, 16)
        after.build(IMAGES.shape)
        drop_in.replace(after, **options)
    after.set_weights(before.get_weights())
    # By default a layer casts uint8 to float32 before its `call`.
    check_normalisation(before, after.call)


@pytest.mark.parametrize("edited", [True, False])
def test_the_kernel_is_rounded_as_the_layer_is_told(edited):
    before = keras.layers.Conv2D(WIDTH, 16, 16)
    before.build(IMAGES.shape)

    def embed(**rounding):
        after = (drop_in.PatchEmbed if edited else keras.layers.Conv2D)(
            WIDTH, 16, 16, **(rounding if edited else {})
        )
        after.build(IMAGES.shape)
        after.set_weights(before.get_weights())
        if not edited:
            drop_in.replace(after, **rounding)
        return after.call(IMAGES)

    check_rounding(embed, *before.get_weights(), images=IMAGES)


def test_a_wrong_normalisation_is_refused_before_anything_is_changed():
    layer = keras.layers.Conv2D(WIDTH, 16, 16)
    layer.build(IMAGES.shape)
    with pytest.raises(ValueError, match=r"image_std is 0\.5, expected three numbers in"):
        drop_in.replace(layer, image_std=0.5)
    assert "call" not in vars(layer)


def test_a_saved_layer_keeps_its_normalisation(tmp_path):
    images = keras.Input((48, 32, 3), dtype="uint8")
    model = keras.Model(images, drop_in.PatchEmbed(WIDTH, 16, **NORMALISATION)(images))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 32, 3), np.uint8)
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    assert restored.layers[-1].image_mean == NORMALISATION["image_mean"]
    assert restored.layers[-1].image_std == NORMALISATION["image_std"]
    np.testing.assert_array_equal(restored.predict(pixels), model.predict(pixels))


def test_the_layer_in_a_functional_model_is_saved_and_loaded(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 32, 3), np.uint8)
    images = keras.Input((48, 32, 3), dtype="uint8")
    positions = keras.Input((6, WIDTH))
    out = drop_in.PatchEmbed(WIDTH, 16, patch_dtype="bfloat16")(images, positions)
    assert out.shape == (None, 3, 2, WIDTH)
    model = keras.Model([images, positions], out)
    given = [pixels, np.float32(np.random.default_rng(1).normal(size=(2, 6, WIDTH)))]
    wanted = model.predict(given, verbose=0)
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored.predict(given, verbose=0), wanted)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(strides=8), r"strides are \(8, 8\)"),
        (dict(kernel_size=(16, 8), strides=(16, 8)), r"kernel_size is \(16, 8\)"),
        (dict(strides=1, dilation_rate=2), "it is dilated"),
        (dict(groups=3, filters=63), "it has 3 groups"),
        (dict(activation="relu"), "activation is"),
        (dict(data_format="channels_first"), "data_format is 'channels_first'"),
    ],
)
def test_a_convolution_that_is_no_patch_embedding_is_refused_by_name(arguments, text):
    arguments = dict(filters=WIDTH, kernel_size=16, strides=16, name="stem") | arguments
    with pytest.raises(ValueError, match=f"stem is not a patch embedding.*{text}"):
        drop_in.PatchEmbed(**arguments)
    shape = (3, 48, 32) if "data_format" in arguments else (48, 32, 3)
    layer = keras.layers.Conv2D(**arguments)
    layer.build((None, *shape))
    with pytest.raises(ValueError, match=f"stem is not a patch embedding.*{text}"):
        drop_in.replace(layer)
    assert "call" not in vars(layer)


def test_other_models_and_images_are_refused():
    four = keras.layers.Conv2D(8, 2, 2, name="four")
    four.build((None, 32, 32, 4))
    with pytest.raises(ValueError, match=r"three input channels.*'four' \(4\)"):
        drop_in.replace(four)
    with pytest.raises(ValueError, match="four is not a patch embedding: it has 4 input channels"):
        drop_in.replace(four, path="four")
    same = keras.layers.Conv2D(8, 16, 16, padding="same")
    same.build((None, 48, 32, 3))
    drop_in.replace(same)
    assert same(IMAGES).shape == (2, 3, 2, 8)
    with pytest.raises(ValueError, match="would pad images of 40 x 32"):
        same(IMAGES[:, :40])


def test_another_backend_of_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    for use in (lambda: drop_in.PatchEmbed(8, 16), lambda: drop_in.replace(None)):
        with pytest.raises(RuntimeError, match=r"runs on torch, expected jax. Set .*KERAS_BACKEND"):
            use()


def test_a_kernel_sharded_along_N_stays_so():
    layer = drop_in.PatchEmbed(WIDTH, 16)
    images = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    layer.build(images.shape)

    def call(kernel):
        return layer.stateless_call([kernel, layer.bias.value], [], images)[0]

    check_sharding(call, layer.kernel.value, axis=3, out_axis=3)
