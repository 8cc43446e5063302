"""Calibration, and encoders whose dense layers compute in 8 bits."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import pallas_patch_embed as ppe
from benchmarks import checkpoints
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import H200, Target
from pallas_patch_embed.base.levels import to_levels
from pallas_patch_embed.encoders import calibration as calibrating
from pallas_patch_embed.encoders import layouts
from pallas_patch_embed.encoders.calibration import FILE, Calibration, cosine_distances, vectors
from pallas_patch_embed.encoders.eight_bits import (
    Statistics,
    _above_most_units,
    prepare,
    round_with_covariance,
    rounded,
)
from pallas_patch_embed.encoders.encoder import LAYERS, dtype_in_8_bits
from pallas_patch_embed.layers import attention, attention_sm90
from pallas_patch_embed.patch_embedding.weight_rounding import round_to_nearest
from tests.encoder.goldens import DATA, arrays, checkpoint, expected, images
from tests.encoder.test_siglip2 import COLLECTIVE
from tests.kernels.gpu import gpu
from tests.short_suite import every_second, keep

FAMILIES = DATA / "families"
NAFLEX = "hf_siglip2_naflex_p16"

# A CLIP with a norm in front and a projection; rotary positions and a gated MLP; a gated MLP whose
# width is no multiple of 128, and LayerScale; an attention pooling head.
NAMES = ["clip", "dinov3_gated", "dinov2_swiglu", "timm_siglip"]
SOME = keep(NAMES, {"clip"}.__contains__, "each family compiles for seconds")

# The largest magnitude of a level.
LARGEST = {"int8": 127, "float8_e4m3fn": 448}

# The largest relative error of float32, as a Frobenius norm.
FLOAT32 = 1e-5

several = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def pictures(name):
    """Returns the golden's images, which are two, and noise of the same size."""
    given = np.load(FAMILIES / name / "expected.npz")["images"]
    noise = np.random.default_rng(0).integers(0, 256, (6, *given.shape[1:]), np.uint8)
    return np.concatenate([given, noise])


@functools.cache
def load(name, **arguments):
    return ppe.load_encoder(FAMILIES / name, patch_dtype="int8", **arguments)


@functools.cache
def calibrated(name, dtype="int8"):
    return ppe.calibrate(load(name, dtype="float32"), pictures(name), dtype=dtype)


def load_in_8_bits(name, dtype="int8", **arguments):
    given = dict(dtype=dtype, calibration=calibrated(name, dtype))
    return ppe.load_encoder(FAMILIES / name, patch_dtype="int8", **(given | arguments))


def encode(encoder, images):
    return np.asarray(vectors(encoder, encoder(images)), np.float32)


def error(found, wanted):
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def blocks_of(encoder):
    return jax.device_get(encoder.blocks)


# As kernels do it, XLA computes levels only on a CPU here: for a GPU a compiler may be wrong.
@pytest.mark.parametrize("in_kernel", [False, True])
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("size", [1, 3, 64, 2401])
def test_levels_are_the_nearest_ones(size, dtype, in_kernel):
    y = np.random.default_rng(size).permutation(np.arange(-1200, 1201, dtype=np.float32) / 2)[:size]
    wanted = np.clip(y, -LARGEST[dtype], LARGEST[dtype])
    wanted = np.rint(wanted) if dtype == "int8" else wanted.astype(dtype).astype(np.float32)
    function = jax.jit(functools.partial(to_levels, dtype=dtype, in_kernel=in_kernel))
    devices = [jax.devices("cpu")[0], None if in_kernel else gpu()]
    for device in filter(None, devices):
        found = function(jax.device_put(y, device))
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), wanted)


@pytest.mark.parametrize("name", ["clip", "dinov2_swiglu"])
def test_XLA_reads_no_levels_from_the_bits_of_a_sum(name):
    """Compilers up to CUDA 13.0 get the last step wrong, see `to_levels`."""
    lowered = jax.jit(lambda encoder, x: encoder(x)).lower(load_in_8_bits(name), pictures(name))
    text = lowered.as_text()
    assert "xi8>" in text and "stablehlo.bitcast_convert" not in text


@pytest.mark.parametrize("name", SOME)
def test_statistics_are_those_of_the_layers_inputs(name):
    encoder, given = load(name, dtype="float32"), pictures(name)
    states = np.asarray(encoder(given, layers=0).hidden_states[0], np.float64)
    norm = {key: x[0].astype(np.float64) for key, x in blocks_of(encoder)["norm1"].items()}
    x = states - states.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + encoder.config.eps)
    x = (x * norm["scale"] + norm["bias"]).reshape(-1, encoder.config.width)
    found = calibrating.measured(encoder, given)["qkv"]
    wanted = x.min(0), x.max(0), x.mean(0), x.T @ x / len(x)
    for part, exact in zip(found, wanted):
        assert np.abs(part[0] - exact).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("name", SOME)
def test_before_rounding_the_prepared_blocks_compute_the_same(name, dtype):
    encoder, given = load(name, dtype="float32"), pictures(name)
    statistics = calibrating.measured(encoder, given)
    prepared = prepare(blocks_of(encoder), statistics, encoder.config, dtype)
    changed = dataclasses.replace(encoder, blocks=prepared.blocks)
    assert prepared.blocks["fc2"]["kernel"].shape[1] % 128 == 0
    assert error(encode(changed, given), encode(encoder, given)) <= FLOAT32


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("name", SOME)
def test_an_encoder_in_8_bits_is_as_exact_as_the_calibration_says(name, dtype):
    encoder, given = load_in_8_bits(name, dtype, min_cosine=0), pictures(name)
    (run,) = encoder.blocks
    assert all(run[layer]["weight"].dtype == dtype for layer in LAYERS)
    assert f", blocks in {dtype}, " in repr(encoder)
    exact = encode(load(name, dtype="float32"), given)
    found = cosine_distances(encode(encoder, given), exact).mean()
    said = calibrated(name, dtype)
    # The measurement rounds the same numbers, but adds float32 instead of bfloat16.
    assert 0.5 * said.losses.sum() <= found <= 2 * (said.losses.sum() + said.bfloat16)


def test_by_default_all_layers_are_in_8_bits():
    encoder = load_in_8_bits("clip")
    (run,) = encoder.blocks
    assert {run[layer]["weight"].dtype for layer in LAYERS} == {np.dtype("int8")}
    assert "blocks in int8, " in repr(encoder)
    np.testing.assert_array_equal(
        encode(encoder, pictures("clip")),
        encode(load_in_8_bits("clip", min_cosine=0), pictures("clip")),
    )


@pytest.mark.parametrize("dtype, largest", LARGEST.items())
def test_the_weights_errors_cancel_for_the_inputs_of_the_calibration(dtype, largest):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 8)) @ rng.normal(size=(8, 64)) + 0.1 * rng.normal(size=(1000, 64))
    weight = rng.uniform(-largest, largest, (32, 64)).astype(np.float32)
    covariance = x.T @ x / len(x)
    nearest = np.asarray(round_to_nearest(weight, dtype))

    def square(rounded):
        error = rounded.astype(np.float64) - weight
        return np.einsum("nk,kj,nj", error, covariance, error)

    rounded = round_with_covariance(weight, covariance, dtype)
    assert rounded.dtype == dtype and square(rounded) < 0.2 * square(nearest)
    alone = round_with_covariance(weight, np.eye(64), dtype)
    np.testing.assert_array_equal(alone, nearest)


def test_large_hidden_units_are_divided_as_far_as_their_weights_allow():
    rng = np.random.default_rng(0)
    hidden = np.abs(rng.normal(size=(3, 2000, 256))).astype(np.float32)
    hidden[:2, :, 5] *= 10
    kernel = rng.normal(size=(3, 256, 64)).astype(np.float32)
    kernel[0, 5] /= 10
    kernel[1, 5] *= 10
    moment = np.einsum("btj,btk->bjk", hidden, hidden) / 2000
    statistics = Statistics(hidden.min(1), hidden.max(1), hidden.mean(1), moment)
    by = _above_most_units(statistics, kernel, 127)
    # The weights of the unit are small in the first block, and decide the steps in the second.
    assert by[0, 5] > 4 and by[1, 5] == 1 and (by[2] <= 1.5).all()
    assert (by >= 1).all() and ((by > 1).sum(1) <= 3).all()


def test_layers_that_hurt_stay_in_bfloat16_until_the_cosine_is_reached():
    name = "clip"
    said, given = calibrated(name), pictures(name)
    exact = encode(load(name, dtype="float32"), given)
    half = 1 - said.bfloat16 - said.losses.sum() / 2
    encoder = load_in_8_bits(name, min_cosine=half)
    kept = said.kept(half, blocks_of(load(name, dtype="float32")))
    assert 0 < len(kept) < said.losses.size
    for block, layer in kept:
        whole = all((i, layer) in kept for i in range(encoder.config.depth))
        assert f"{layer} of {'every block' if whole else f'block {block}'}" in repr(encoder)
    in_bfloat16 = sum(
        (not dtype_in_8_bits(run[layer])) * len(run["norm1"]["scale"])
        for run in encoder.blocks
        for layer in LAYERS
    )
    assert in_bfloat16 == len(kept)
    distances = [
        cosine_distances(encode(e, given), exact).mean()
        for e in (load_in_8_bits(name, min_cosine=0), encoder)
    ]
    assert distances[1] < distances[0]
    assert "no layer in 8 bits, " in repr(load_in_8_bits(name, min_cosine=1 - said.bfloat16))
    with pytest.raises(ValueError, match=r"min_cosine is 0\.99999999, but bfloat16 has a mean"):
        load_in_8_bits(name, min_cosine=0.99999999)


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_saved_calibration_gives_the_same_encoder(tmp_path, dtype):
    wanted = load_in_8_bits("clip", dtype)
    calibrated("clip", dtype).save(tmp_path)
    assert Calibration.load(tmp_path).dtype == dtype
    found = load_in_8_bits("clip", dtype, calibration=tmp_path / FILE)
    assert repr(Calibration.load(tmp_path)) == "Calibration(8 pictures, given by the user)"
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_calibration_beside_the_checkpoint_is_found(tmp_path):
    for file in (FAMILIES / "clip").iterdir():
        (tmp_path / file.name).symlink_to(file)
    calibrated("clip").save(tmp_path)
    found = ppe.load_encoder(tmp_path, dtype="int8", patch_dtype="int8")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(load_in_8_bits("clip")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_encoder_has_the_weights_of_its_calibration():
    """Nothing is rounded again, so they are the same on every machine."""
    said = calibrated("dinov2_swiglu")
    (run,) = load_in_8_bits("dinov2_swiglu", min_cosine=0).blocks
    for layer, p in said.layers.items():
        for name, x in p.items():
            np.testing.assert_array_equal(np.reshape(run[layer][name], x.shape), x)


@pytest.mark.parametrize("name", SOME)
def test_a_calibration_of_an_encoder_in_bfloat16_fits_its_checkpoint(name):
    said = ppe.calibrate(load(name, dtype="bfloat16"), pictures(name))
    np.testing.assert_array_equal(said.weights, calibrated(name).weights)
    given, exact = pictures(name), load(name, dtype="float32")
    wanted = encode(exact, given)
    found = cosine_distances(encode(load_in_8_bits(name, calibration=said), given), wanted)
    of_float32 = cosine_distances(encode(load_in_8_bits(name), given), wanted)
    assert found.mean() <= 2 * of_float32.mean()


def test_a_checkpoint_with_other_weights_is_refused(tmp_path):
    """The weights come from the calibration, so all of them must be those of the checkpoint."""
    for file in (FAMILIES / "clip").iterdir():
        shutil.copy(file, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (name, *_) = (name for name in stored if "layers.1." in name and "fc1.weight" in name)
    stored[name] = stored[name].copy()
    stored[name][3, 5] *= 1.5
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is of an encoder with other weights"):
        ppe.load_encoder(tmp_path, dtype="int8", calibration=calibrated("clip"))


def without(name):
    return lambda arrays: arrays.pop(name)


def changed(name, change):
    return lambda arrays: arrays.update({name: change(arrays[name].copy())})


def with_number(x, value):
    x.flat[0] = value
    return x


@pytest.mark.parametrize(
    "damage, message",
    [
        (without("qkv.scale"), "qkv has bias, weight and a weight"),
        (without("fc2.factor"), "fc2 has bias, scale, shift, weight and a weight"),
        (without("out.weight"), "weight"),
        (without("out.divisor"), "divisor"),
        (changed("qkv.divisor", lambda x: x[:, :1]), r"qkv\.divisor is float32\[3, 1\], expected"),
        (changed("fc1.bias", lambda x: x[:2]), r"fc1\.bias is float32\[2, "),
        (changed("fc1.weight", lambda x: x[:2]), "fc1 has bias, scale, weight and a weight"),
        (changed("qkv.weight", lambda x: x.astype(np.float32)), r"qkv\.divisor is float32"),
        (changed("losses", lambda x: x[:1]), r"losses is float64\[1, 4\]"),
        (changed("losses", lambda x: with_number(x, np.nan)), "losses has a number that is not f"),
        (changed("losses", lambda x: with_number(x, -0.1)), "losses has a negative number, -0.1"),
        (changed("fc1.bias", lambda x: x.astype(np.float16)), r"fc1\.bias is float16\["),
        (changed("out.weight", lambda x: with_number(x, 128)), "a byte that is no level of int8"),
        (
            changed("out.divisor", lambda x: with_number(x, 0)),
            "a number that is not positive and f",
        ),
        (changed("fc2.scale", lambda x: with_number(x, np.inf)), r"fc2\.scale has a number"),
        (lambda arrays: arrays.update(qkv=np.zeros(1)), "qkv has , bias, scale, weight and"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path, damage, message):
    calibrated("clip").save(tmp_path)
    with safetensors.safe_open(tmp_path / FILE, "numpy") as stored:
        metadata = stored.metadata()
    arrays = load_file(tmp_path / FILE)
    damage(arrays)
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    save_file(arrays, tmp_path / FILE, metadata)
    with pytest.raises(ValueError, match=f"is not a calibration: .*{message}"):
        Calibration.load(tmp_path)


def save_with(folder, **changes):
    """Saves a calibration that says something else of itself."""
    calibrated("clip").save(folder)
    with safetensors.safe_open(folder / FILE, "numpy") as stored:
        metadata = stored.metadata()
    metadata["calibration"] = json.dumps(json.loads(metadata["calibration"]) | changes)
    save_file(load_file(folder / FILE), folder / FILE, metadata)


@pytest.mark.parametrize(
    "name, value",
    [
        ("bfloat16", "x"),
        ("bfloat16", -0.1),
        ("pictures", True),
        ("pictures", 0),
        ("source", 1),
        ("tower", "moon"),
    ],
)
def test_a_calibration_that_says_something_else_of_itself_is_refused(tmp_path, name, value):
    save_with(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=f"is not a calibration: {name} is {value!r}"):
        Calibration.load(tmp_path)


def test_levels_of_int8_are_no_float8(tmp_path):
    save_with(tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="a byte that is no level of float8_e4m3fn"):
        Calibration.load(tmp_path)


@pytest.mark.parametrize("noise", [-1e-16, 0, 1e-17])
def test_where_8_bits_change_nothing_the_losses_are_0(monkeypatch, noise):
    """The cosine distance of equal vectors may be negative."""
    monkeypatch.setattr(calibrating, "cosine_distances", lambda a, b: np.full(len(a), noise))
    found = ppe.calibrate(load("clip", dtype="float32"), pictures("clip"))
    assert (found.losses >= 0).all() and found.bfloat16 >= 0
    np.testing.assert_allclose(found.losses, max(noise, 0) / found.losses.size)
    blocks = blocks_of(load("clip", dtype="float32"))
    for min_cosine in (None, 0.9999):
        assert found.kept(min_cosine, blocks) == set()


def test_layers_that_cause_much_of_the_distance_stay_in_bfloat16_by_default():
    losses = np.full((4, 4), 0.01)
    few = dataclasses.replace(calibrated("clip"), losses=losses)
    assert few.kept(None, {}) == set()
    losses[1, 3], losses[2, 1] = 1, 0.5  # 0.61 of all, and then 0.78 of what is left.
    assert few.kept(None, {}) == {(1, "fc2"), (2, "out")}
    assert dataclasses.replace(few, losses=np.zeros((4, 4))).kept(None, {}) == set()
    assert (
        len(dataclasses.replace(few, losses=2.0 ** np.arange(16).reshape(4, 4)).kept(None, {})) == 4
    )


def test_fewer_blocks_have_the_first_blocks_calibration():
    given = pictures("clip")
    part = load_in_8_bits("clip", layers=2)(given).last_hidden_state
    whole = load_in_8_bits("clip")(given, layers=2).hidden_states[0]
    np.testing.assert_array_equal(part, whole)


@pytest.mark.slow("compiles several programs")
def test_without_pictures_the_packages_photographs_are_used_with_a_warning():
    with pytest.warns(UserWarning, match="calibrated on the repository's photographs"):
        said = ppe.calibrate(load("clip", dtype="bfloat16"))
    assert "repository's photographs" in repr(said)
    photographs = calibrating.photographs(load("clip", dtype="bfloat16").config)
    assert said.pictures == len(photographs) > 20
    assert len({photograph.tobytes() for photograph in photographs}) == len(photographs)


def test_only_what_follows_the_blocks_has_a_derivative():
    """Levels have a derivative of zero, which would be silently wrong."""
    given = pictures("clip")

    def by(name, dtype="int8"):
        encoder = load_in_8_bits("clip") if dtype == "int8" else load("clip", dtype=dtype)

        def loss(part):
            y = vectors(changed := dataclasses.replace(encoder, **{name: part}), changed(given))
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(getattr(encoder, name))

    with pytest.raises(TypeError, match="blocks of an encoder in 8 bits have no derivative"):
        by("first_norm")
    found, wanted = (jax.tree.leaves(by("norm", dtype)) for dtype in ("int8", "float32"))
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) <= 0.1 and np.any(np.asarray(b))


@pytest.mark.parametrize("name", ["dinov2_swiglu", "clip"])
def test_the_levels_of_the_hidden_layer_have_no_derivative_whatever_computes_them(name):
    losses = np.full((3, 4), 1e-6)
    losses[:, LAYERS.index("fc1")] = 100, 10, 1  # So fc1 stays in bfloat16 in each block.
    calibration = dataclasses.replace(calibrated(name), losses=losses)
    encoder, given = load_in_8_bits(name, calibration=calibration), pictures(name)
    assert "blocks in int8 except fc1 of every block" in repr(encoder)
    (run,) = encoder.blocks

    def loss(levels):
        blocks = (run | {"fc2": run["fc2"] | levels},)
        changed = dataclasses.replace(encoder, blocks=blocks)
        return vectors(changed, changed(given)).sum().astype(jnp.float32)

    for part in ("factor", "shift"):
        with pytest.raises(TypeError, match="blocks of an encoder in 8 bits have no derivative"):
            jax.grad(loss)({part: run["fc2"][part]})


def test_an_encoder_whose_leaves_are_no_arrays_is_printed():
    encoder = load_in_8_bits("clip")
    for leaf in (encoder.patch_embed.weight.sharding, None):
        said = repr(jax.tree.map(lambda _, leaf=leaf: leaf, encoder))
        assert said.startswith("Encoder(bfloat16, 0 parameters, Config(")


@several
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_split_batch_calibrates_as_a_whole_one(kind):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    split = jax.device_put(pictures("clip"), NamedSharding(mesh, P("batch")))
    found = ppe.calibrate(load("clip", dtype="float32"), split)
    np.testing.assert_array_equal(found.losses, calibrated("clip").losses)


def test_faults_are_named(tmp_path):
    with pytest.raises(ValueError, match="is of an encoder with other weights"):
        load_in_8_bits(
            "clip", calibration=dataclasses.replace(calibrated("clip"), weights=np.zeros(3))
        )
    part = ppe.calibrate(load("clip", dtype="float32", layers=2), pictures("clip"))
    with pytest.raises(ValueError, match=r"is of 2 blocks, but this encoder has 3\. Calibrate"):
        load_in_8_bits("clip", calibration=part)
    with pytest.raises(ValueError, match="are for 'float8_e4m3fn' or 'int8'"):
        ppe.load_encoder(FAMILIES / "clip", calibration=calibrated("clip"))
    with pytest.raises(ValueError, match="expected one of bfloat16, float32, float8_e4m3fn, int8"):
        ppe.load_encoder(FAMILIES / "clip", dtype="float8_e5m2")
    with pytest.raises(ValueError, match="dtype is 'float8_e5m2', expected one of float8_e4m3fn"):
        ppe.calibrate(load("clip", dtype="float32"), pictures("clip"), dtype="float8_e5m2")
    with pytest.raises(ValueError, match=r"is for int8, not float8_e4m3fn\. Calibrate for"):
        load_in_8_bits("clip", "float8_e4m3fn", calibration=calibrated("clip"))
    with pytest.raises(TypeError, match="expected an Encoder from load_encoder with"):
        ppe.calibrate(load_in_8_bits("clip"), pictures("clip"))
    with pytest.raises(ValueError, match="calibrate: images have values that represent pixels"):
        ppe.calibrate(load("clip", dtype="float32"), pictures("clip").astype(np.float32))
    with pytest.raises(ValueError, match="there are no images"):
        ppe.calibrate(load("clip", dtype="float32"), pictures("clip")[:0])
    with pytest.raises(ValueError, match="is of a text encoder, but this is a vision encoder"):
        load_in_8_bits("clip", calibration=dataclasses.replace(calibrated("clip"), tower="text"))
    layers = dict(calibrated("clip").layers)
    layers["out"] = {key: x[:, :16] for key, x in layers["out"].items()}
    with pytest.raises(ValueError, match=r"has weights \[16, 32\] of out, expected \[32, 32\]"):
        load_in_8_bits("clip", calibration=dataclasses.replace(calibrated("clip"), layers=layers))
    for wrong in (iter(pictures("clip")), {"images": pictures("clip")}, 3):
        with pytest.raises(TypeError, match=f"inputs are a {type(wrong).__name__}, expected im"):
            ppe.calibrate(load("clip", dtype="float32"), wrong)
    naflex = ppe.load_encoder(checkpoint(NAFLEX), dtype="float32")
    with pytest.raises(ValueError, match=r"picture 1 has the shape \[32, 32\], expected \[H, W"):
        ppe.calibrate(naflex, [np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)])
    other = FAMILIES / "clip" / "model.safetensors"
    with pytest.raises(ValueError, match="is not a calibration"):
        Calibration.load(other)


@pytest.mark.slow("compiles several programs")
def test_a_naflex_encoder_in_8_bits_leaves_out_the_padding():
    path, given = checkpoint(NAFLEX), images(NAFLEX)[:2]
    exact = ppe.siglip2.load_encoder(path, dtype="float32", patch_dtype="int8")
    said = ppe.calibrate(exact, given)
    alone = [calibrating.measured(exact, [image])["fc2"] for image in given]
    tokens = [image.size for image in given]
    mean = np.average([s.mean for s in alone], axis=0, weights=tokens)
    assert error(calibrating.measured(exact, given)["fc2"].mean, mean) <= FLOAT32
    encoder = ppe.load_encoder(path, dtype="int8", patch_dtype="int8", calibration=said)
    L = expected(NAFLEX)["last_hidden_state"].shape[1]
    patches, shapes, _ = ppe.siglip2.batch_naflex(given, encoder.config, L)
    wanted = exact(patches, spatial_shapes=shapes).pooler_output
    padded = encoder(patches, spatial_shapes=shapes).pooler_output
    packed = encoder.packed(ppe.siglip2.pack_naflex(given, encoder.config, L)).pooler_output
    for found in (padded, packed):
        distances = cosine_distances(np.asarray(found, np.float32), np.asarray(wanted))
        assert distances.mean() <= 2 * (said.losses.sum() + said.bfloat16)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("batch", "width"), axis_types=(kind,) * 2)


def split_by_width(encoder, mesh, axis):
    """Splits the weights of the blocks' dense layers along their outputs or their inputs."""
    ends = {"kernel": ("inputs", "outputs"), "weight": ("outputs", "inputs")}

    def sharding(path, leaf):
        name = getattr(path[-1], "key", None)
        if path[0].name != "blocks" or name not in ends:
            return NamedSharding(mesh, P())
        last = ("width" if end == axis else None for end in ends[name])
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 2), *last))

    return jax.device_put(encoder, jax.tree_util.tree_map_with_path(sharding, encoder))


# The largest relative error of a program that XLA fuses differently, so that other intermediate
# results are rounded to bfloat16. Products and their sums are exact.
ROUNDING = 2**-7


@several
@pytest.mark.slow("compiles programs for several devices")
def test_a_users_sharding_changes_no_calibration():
    encoder, mesh = load("clip", dtype="float32"), mesh_of(AxisType.Auto)
    split = jax.device_put(pictures("clip"), NamedSharding(mesh, P("batch")))
    found = calibrating.measured(split_by_width(encoder, mesh, "outputs"), split)
    wanted = calibrating.measured(encoder, pictures("clip"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= FLOAT32 * np.abs(b).max()


@several
@pytest.mark.slow("compiles programs for several devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_split_weights_calibrate_as_whole_ones(kind):
    """In bfloat16 the hidden layer is padded to 128 units, which calibrate removes."""
    encoder, mesh = load("clip", dtype="bfloat16"), mesh_of(kind)
    assert encoder.config.mlp % layouts.MULTIPLE
    wanted = ppe.calibrate(encoder, pictures("clip"))
    split = jax.device_put(pictures("clip"), NamedSharding(mesh, P("batch")))
    found = ppe.calibrate(split_by_width(encoder, mesh, "inputs"), split)
    # A loss is half of the square of the distance of two unit vectors. Rounding changes a distance
    # by at most FLOAT32.
    most = FLOAT32 * np.sqrt(2 * wanted.losses) + FLOAT32**2
    assert np.all(abs(found.losses - wanted.losses) <= most) and np.all(wanted.losses > 10 * most)


# (family, dtype, kind of the mesh's axes, what is split besides the batch). As in bfloat16, a mesh
# with explicit axes splits no outputs: jax refuses the scan over the blocks.
SPLITS = keep(
    [
        *(("clip", "int8", AxisType.Auto, axis) for axis in ("nothing", "outputs", "inputs")),
        *(("clip", "int8", AxisType.Explicit, axis) for axis in ("nothing", "inputs")),
        *(("dinov2_swiglu", "int8", AxisType.Auto, axis) for axis in ("outputs", "inputs")),
        *(("clip", "float8_e4m3fn", AxisType.Auto, axis) for axis in ("nothing", "outputs")),
    ],
    lambda case: case == ("clip", "int8", AxisType.Auto, "outputs"),
    "compiles programs for several devices",
)


@several
@pytest.mark.parametrize("name, dtype, kind, axis", SPLITS)
def test_a_users_sharding_changes_only_the_rounding(name, dtype, kind, axis):
    # Layers in bfloat16 would add other roundings.
    encoder, given = load_in_8_bits(name, dtype, min_cosine=0), pictures(name)
    mesh = mesh_of(kind)
    wanted = encode(encoder, given)
    split = jax.device_put(given, NamedSharding(mesh, P("batch")))
    call = jax.jit(lambda encoder, images: vectors(encoder, encoder(images)))
    arguments = split_by_width(encoder, mesh, axis), split
    compiled = call.lower(*arguments).compile()
    assert bool(COLLECTIVE.search(compiled.as_text())) == (axis != "nothing")
    assert error(compiled(*arguments), wanted) <= ROUNDING


@pytest.mark.parametrize(
    "dtype", keep(LARGEST, {"int8"}.__contains__, "compiles the same programs for float8")
)
def test_it_works_under_vmap_and_export(dtype):
    encoder, given = load_in_8_bits("clip", dtype), pictures("clip")
    wanted = encode(encoder, given)

    def call(encoder, images):
        return vectors(encoder, encoder(images))

    of_one = jax.vmap(lambda image: call(encoder, image[None])[0])(given)
    # A second encoder with other scales and weights.
    other = jax.tree.map(lambda x: np.flip(x, -1) if x.ndim == 2 else x, encoder)
    stacked = jax.tree.map(lambda *x: np.stack(x), encoder, other)
    of_both = jax.vmap(call, (0, None))(stacked, given)
    sizes = jax.export.symbolic_shape(", ".join(["n", *map(str, given.shape[1:])]))
    exports = [
        jax.export.export(jax.jit(call), platforms=("cpu", "cuda"))(encoder, images)
        for images in (given, jax.ShapeDtypeStruct(sizes, np.uint8))
    ]
    found = [jax.export.deserialize(e.serialize()).call(encoder, given) for e in exports]
    for y in (of_one, of_both[0], *found):
        np.testing.assert_array_equal(np.asarray(y, np.float32), wanted)
    np.testing.assert_array_equal(of_both[1], call(other, given))
    assert error(of_both[1], wanted) > 0.1


@several
@pytest.mark.slow("calibrates a NaFlex encoder, and compiles a program for several devices")
def test_a_naflex_batch_may_be_split():
    path, given = checkpoint(NAFLEX), images(NAFLEX)[:2]
    exact = ppe.siglip2.load_encoder(path, dtype="float32", patch_dtype="int8")
    said = ppe.calibrate(exact, given)
    encoder = ppe.load_encoder(path, dtype="int8", patch_dtype="int8", calibration=said)
    L = expected(NAFLEX)["last_hidden_state"].shape[1]
    patches, shapes, _ = ppe.siglip2.batch_naflex(given, encoder.config, L)
    wanted = encoder(patches, spatial_shapes=shapes).pooler_output
    mesh = mesh_of(AxisType.Auto)
    split = jax.device_put((patches, shapes), NamedSharding(mesh, P("batch")))
    found = split_by_width(encoder, mesh, "outputs")(split[0], spatial_shapes=split[1])
    assert error(found.pooler_output, wanted) <= ROUNDING


# SigLIPs with random weights, and the block in which massive activations are planted. The golden's
# results of blocks are multiplied by 20, because they hardly change the residual.
SIGLIP = "hf_siglip_p16_224"
BLOCKS = {"the golden": 0, "four blocks": 2}
FOUR_BLOCKS = dict(width=192, depth=4, heads=3, mlp=768)

SIGLIPS = every_second(
    [
        ("four blocks", "int8"),
        ("the golden", "int8"),
        ("the golden", "float8_e4m3fn"),
        ("four blocks", "float8_e4m3fn"),
    ],
    "calibrates two encoders",
)


def siglip(name, folder, change=lambda tensors, tower: None):
    """Writes a SigLIP with other arrays, which `change` makes in place; returns the folder."""
    tower = "vision_model."
    if name == "the golden":
        tower, tensors = "", {key: array.copy() for key, array in arrays(SIGLIP).items()}
        for key, array in tensors.items():
            if key.startswith("encoder.") and key.endswith(("out_proj.weight", "fc2.weight")):
                array *= 20
        folder.mkdir()
        shutil.copy(checkpoint(SIGLIP) / "config.json", folder)
    else:
        config = dataclasses.replace(checkpoints.ENCODERS["B/16 224"], **FOUR_BLOCKS)
        checkpoints.write(config, folder)
        tensors = load_file(folder / "model.safetensors")
    change(tensors, tower)
    save_file(tensors, folder / "model.safetensors")
    return folder


def some_images():
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (6, 28, 28, 3), np.uint8)
    return np.concatenate([images(SIGLIP), coarse.repeat(8, 1).repeat(8, 2)])


def compared(path, dtype):
    """Returns the calibration of a checkpoint, and its pooled vectors in float32 and in 8 bits."""
    exact = ppe.load_encoder(path, dtype="float32", patch_dtype="int8")
    said = ppe.calibrate(exact, some_images(), dtype=dtype)
    encoder = ppe.load_encoder(path, dtype=dtype, patch_dtype="int8", calibration=said)
    return said, encode(exact, some_images()), encode(encoder, some_images())


@pytest.mark.slow("calibrates two encoders")
@pytest.mark.parametrize("name, dtype", SIGLIPS)
def test_planted_outliers_do_not_increase_the_error(tmp_path, name, dtype):
    def plant(tensors, tower):
        """Makes two channels of each norm 30 times as large, and divides the next weights."""
        for key, array in tensors.items():
            layer, end = key.rsplit(".", 1)
            if not layer.startswith(f"{tower}encoder."):
                continue
            if layer.endswith(("layer_norm1", "layer_norm2")):
                array[[3, 7]] *= 30
            elif layer.endswith(("q_proj", "k_proj", "v_proj", "fc1")) and end == "weight":
                array[:, [3, 7]] /= 30

    usual, wanted, found = compared(siglip(name, tmp_path / "usual"), dtype)
    said, planted_wanted, planted = compared(siglip(name, tmp_path / "planted", plant), dtype)
    assert error(planted_wanted, wanted) <= FLOAT32
    assert error(planted, planted_wanted) <= 2 * error(found, wanted)
    # The rounding of bfloat16 hides most of these errors, but not in the calibration's distances,
    # which are squares. Without smoothing those of q, k and v are 170 times as large.
    assert (said.losses.sum(0) <= 2**2 * usual.losses.sum(0)).all()


def with_massive_activations(name, usual_path, folder, blocks):
    """Writes a SigLIP in which two channels of the residual reach 300 for few tokens.

    In each of these blocks they are those farthest along one direction.
    """
    exact = ppe.load_encoder(usual_path, dtype="float32", patch_dtype="int8")

    def observe(layer, x, _):
        return x, x if layer == "fc1" else None

    inputs = calibrating._observed(exact, (exact.checked(some_images()),), observe)[1]["fc1"]

    def plant(tensors, tower):
        for block in blocks:
            direction = np.random.default_rng(block).normal(size=exact.config.width)
            along = np.sort((np.asarray(inputs[block]) @ direction).ravel())
            threshold, largest = along[-20], along[-1]
            layer, gain = f"{tower}encoder.layers.{block}.mlp.", 20 / (largest - threshold)
            tensors[f"{layer}fc1.weight"][5] = gain * direction
            tensors[f"{layer}fc1.bias"][5] = -gain * threshold
            tensors[f"{layer}fc2.weight"][:, 5] = 0
            tensors[f"{layer}fc2.weight"][[3, 7], 5] = 300 / 20

    return siglip(name, folder, plant)


@pytest.mark.slow("calibrates two encoders")
@pytest.mark.parametrize("blocks", [(1, 2), (0, 1, 2), (1, 2, 3)])
def test_massive_activations_in_several_blocks_have_their_layers_in_bfloat16(tmp_path, blocks):
    """Several layers stay, also if none of them alone causes most of the distance."""
    name = "four blocks"
    usual_path = siglip(name, tmp_path / "usual")
    path = with_massive_activations(name, usual_path, tmp_path / "massive", blocks)
    _, wanted, found = compared(usual_path, "int8")
    said, massive_wanted, massive_found = compared(path, "int8")
    ratio = error(massive_found, massive_wanted) / error(found, wanted)
    print(f"{name}, massive activations in {blocks}: {ratio:.2f} times the error")
    assert ratio <= 3
    assert len(said.kept(None, {})) <= 4


@pytest.mark.slow("calibrates two encoders")
@pytest.mark.parametrize("name, dtype", SIGLIPS)
def test_massive_activations_increase_the_error_and_their_layer_is_named(tmp_path, name, dtype):
    block, usual_path = BLOCKS[name], siglip(name, tmp_path / "usual")
    path = with_massive_activations(name, usual_path, tmp_path / "massive", [block])
    _, wanted, found = compared(usual_path, dtype)
    said, massive_wanted, massive_found = compared(path, dtype)
    massive = ppe.load_encoder(path, dtype="float32", patch_dtype="int8")
    state = np.asarray(massive(some_images(), layers=block + 1).hidden_states[0])
    assert 270 <= np.abs(state).max() <= 400
    ratio = error(massive_found, massive_wanted) / error(found, wanted)
    print(f"{name} in {dtype}: {ratio:.2f} times the error")
    assert ratio <= 1.5
    if dtype == "float8_e4m3fn":  # Its steps grow with the numbers.
        return
    assert said.losses[block, LAYERS.index("fc2")] == said.losses.max()
    # Of the other layers, those that hurt more for their size are kept, too.
    rest = said.losses.sum() - said.losses.max()
    encoder = ppe.load_encoder(
        path,
        dtype=dtype,
        patch_dtype="int8",
        calibration=said,
        min_cosine=1 - said.bfloat16 - 1.0001 * rest,
    )
    assert f"blocks in int8 except fc2 of block {block}, " in repr(encoder)
    assert error(encode(encoder, some_images()), massive_wanted) <= 1.5 * error(found, wanted)


def test_on_a_Hopper_GPU_the_attention_gives_levels_to_the_layer_behind_it(monkeypatch):
    exact = ppe.siglip2.load_encoder(checkpoint(SIGLIP), dtype="float32")
    blocks, config = blocks_of(exact), exact.config
    L, D = config.depth, config.width

    def statistics(K):
        rows, moment = np.ones((L, K), np.float32), np.eye(K, dtype=np.float32)
        return Statistics(-rows, rows, 0 * rows, np.tile(moment, (L, 1, 1)))

    widths = zip(LAYERS, (D, D, D, config.mlp))
    prepared = prepare(blocks, {layer: statistics(K) for layer, K in widths}, config, "int8")
    said = Calibration(
        rounded(prepared),
        prepared.divisors,
        losses=np.zeros((L, len(LAYERS))),
        bfloat16=0.0,
        weights=calibrating._hash(blocks),
        pictures=1,
        source="made by a test",
    )
    encoder = ppe.load_encoder(checkpoint(SIGLIP), dtype="int8", calibration=said, min_cosine=0)
    shape = attention_sm90.Shape(4, 196, config.heads, D // config.heads)
    monkeypatch.setattr(attention, "SERVED", {"whole": {shape.D: range(196, 197)}})
    monkeypatch.setattr(attention, "FEWEST_UNITS", {"whole": 0})
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", H200))
    given = jax.ShapeDtypeStruct((shape.B, 224, 224, 3), "uint8")
    traced = jax.jit(lambda e, x: e(x).last_hidden_state).trace(encoder, given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    results = re.findall(r"custom_call @mosaic_gpu_v2\((.*?)\).*-> (?:\()?tensor<([^>]*)>", text)
    of_attention = [result for operands, result in results if operands.count(",") == 2]
    assert of_attention == [f"{shape.B * shape.S}x{D}xi8"]
