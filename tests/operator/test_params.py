"""Weights are packed, saved and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pallas_patch_embed as ppe
from tests.operator.bounds import DTYPES, assert_bit_equal, draw_params


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_layouts_pack_to_the_same_params(dtype):
    rng = np.random.default_rng(0)
    hwio = rng.normal(size=(14, 14, 3, 24)).astype(np.float32)
    same = {
        "HWIO": hwio,
        "OIHW": hwio.transpose(3, 2, 0, 1),
        "KN": hwio.reshape(588, 24),
        "NK": hwio.reshape(588, 24).T,
    }
    packed = [
        ppe.pack(kernel, None, None, patch_size=14, layout=layout, dtype=dtype)
        for layout, kernel in same.items()
    ]
    for params in packed:
        jax.tree.map(assert_bit_equal, params, packed[0])
    assert packed[0].weight.shape == (24, 640) and packed[0].K == 588
    assert not np.asarray(packed[0].weight[:, 588:], np.float32).any()


@pytest.mark.parametrize("dtype, largest", [("float8_e4m3fn", 448.0), ("int8", 127.0)])
def test_weights_are_scaled_clipped_and_rounded_half_to_even(dtype, largest):
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(12, 9)).astype(np.float32)
    kernel[:, 0] = 0
    kernel[:, 1] = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3, 4, 5, 6, 7])
    kernel[:, 2] = 1e-44
    kernel[:, 3] = 3e38
    kernel[:, 4] *= 1e-37
    params = ppe.pack(
        kernel, None, None, patch_size=2, layout="KN", dtype=dtype, rounding="nearest"
    )
    absmax = np.abs(kernel).max(0).astype(np.float64)
    # A channel of denormal numbers is packed like one of zeros, because a GPU may flush them.
    scale = np.where(absmax < 2.0**-126, 1, np.maximum(absmax / largest, 2.0**-119))
    factor = 2 / 255 if dtype == "int8" else 1
    # The scale has two roundings, of a constant and of a product.
    np.testing.assert_allclose(params.scale, scale * factor, rtol=2 * 2.0**-23)
    # The weight is within half a step of the kernel, or at the end of the range. The roundings of
    # the scale, of its reciprocal and of the product move it by 4 units in the last place.
    stored = np.asarray(params.weight[:, :12]).astype(np.float64).T
    wanted = np.clip(kernel / scale, -largest, largest)
    step = 1 if dtype == "int8" else 2.0 ** (np.maximum(np.frexp(wanted)[1] - 1, -6) - 3)
    assert (np.abs(stored - wanted) <= step / 2 + np.abs(wanted) * 4 * 2.0**-23).all()
    assert not stored[:, [0, 2]].any()
    if dtype == "int8":
        np.testing.assert_array_equal(stored[:, 1], [127, 0, 2, 2, 0, -2, -126, 3, 4, 5, 6, 7])


def test_int8_offset_includes_the_constant_of_the_encoding():
    rng = np.random.default_rng(2)
    kernel, bias = rng.normal(size=(12, 5)), rng.normal(size=5).astype(np.float32)
    params = ppe.pack(kernel, bias, None, patch_size=2, layout="KN", dtype="int8")
    dequantised = np.asarray(params.weight, np.float64) * np.asarray(params.scale)[:, None]
    np.testing.assert_allclose(params.offset, bias + dequantised.sum(1) / 2, rtol=1e-6, atol=1e-7)


def test_positions_are_accepted_in_three_shapes_and_with_a_grid():
    rng = np.random.default_rng(3)
    kernel, flat = rng.normal(size=(12, 5)), rng.normal(size=(12, 5)).astype(np.float32)
    pack = dict(patch_size=2, layout="KN", dtype="float32")
    for positions, grid in (
        (flat, (3, 4)),
        (flat[None], (3, 4)),
        (flat.reshape(3, 4, 5), None),
        (flat.reshape(3, 4, 5), (3, 4)),
    ):
        params = ppe.pack(kernel, None, positions, grid=grid, **pack)
        assert params.grid == (3, 4)
        np.testing.assert_array_equal(params.table, flat)
    assert ppe.pack(kernel, None, flat[:9], **pack).grid == (3, 3)
    bare = ppe.pack(kernel, np.ones(5), None, **pack)
    assert bare.table is None and bare.grid is None


def test_params_are_frozen_and_their_repr_describes_them():
    params = draw_params(
        np.random.default_rng(4), patch_size=14, grid=(2, 3), N=8, dtype="float8_e4m3fn"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.dtype = "int8"
    assert repr(params) == (
        "PatchEmbedParams(float8_e4m3fn, patch 14, grid 2x3, K 588: weight float8_e4m3fn[8, 640], "
        "scale float32[8], offset float32[8], table bfloat16[6, 8])"
    )
    assert params.nbytes == 8 * 640 + 8 * 4 * 2 + 6 * 8 * 2
    assert len(jax.tree.leaves(params)) == 4
    assert "table None" in repr(dataclasses.replace(params, table=None))
    assert repr(jax.tree.map(lambda _: "leaf", params))


@pytest.mark.parametrize("missing", ["image_mean", "image_std"])
def test_params_with_a_mean_or_a_standard_deviation_alone_are_refused(missing, tmp_path):
    options = dict(image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.3, 0.3), patch_size=2)
    params = ppe.pack(np.ones((2, 2, 3, 8), np.float32), None, None, **options)
    half = dataclasses.replace(params, **{missing: None})
    images = np.zeros((4, 4, 3), np.uint8)
    for use in (ppe.embed_images, ppe.patchify):
        with pytest.raises(ValueError, match=f"{missing} None.*expected both or neither.*Pack"):
            use(images, half)
    with pytest.raises(ValueError, match="expected both or neither"):
        half.save(tmp_path / "params.safetensors")


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_params_load_unchanged(dtype, positions, tmp_path):
    params = draw_params(
        np.random.default_rng(5),
        patch_size=14,
        grid=(2, 3),
        N=8,
        dtype=dtype,
        positions=positions,
    )
    params.save(tmp_path / "params.safetensors")
    loaded = ppe.PatchEmbedParams.load(tmp_path / "params.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(assert_bit_equal, loaded, params)
    assert [file.name for file in tmp_path.iterdir()] == ["params.safetensors"]


def damage(path, how):
    content, tensors = path.read_bytes(), safetensors.numpy.load_file(path)
    metadata = {
        "format": "pallas_patch_embed.PatchEmbedParams.1",
        "static": '{"patch_size": 2, "grid": [2, 2], "dtype": "int8", "K": 12}',
    }
    match how:
        case "truncated":
            return content[:-3]
        case "header":
            return b"\xff" * 8 + content[8:]
        case "empty":
            return b""
        case "foreign":
            return b"\x89PNG\r\n\x1a\n" + bytes(100)
        case "another safetensors":
            return safetensors.numpy.save(tensors)
        case "missing tensor":
            del tensors["scale"]
        case "another tensor":
            tensors["extra"] = tensors["scale"]
        case "shape":
            tensors["table"] = tensors["table"][:, :-1].copy()
        case "dtype":
            tensors["weight"] = tensors["weight"].astype(np.float32)
        case "nan":
            tensors["offset"][1] = np.nan
        case "static":
            metadata["static"] = "[1, 2"
        case "grid":
            metadata["static"] = metadata["static"].replace("[2, 2]", "[2, 3]")
        case "K":
            metadata["static"] = metadata["static"].replace("12", "13")
        case "grid true":
            metadata["static"] = metadata["static"].replace("[2, 2]", "[true, 4]")
        case "deep":
            metadata["static"] = "[" * 200_000
        case "scale":
            tensors["scale"][2] = 0
        case "padding":
            tensors["weight"][0, 12] = 1
        case "unknown dtype":
            metadata["static"] = metadata["static"].replace("int8", "int4")
    return safetensors.numpy.save(tensors, metadata)


DAMAGE = (
    "truncated, header, empty, foreign, another safetensors, missing tensor, another tensor, "
    "shape, dtype, nan, static, grid, K, grid true, deep, scale, padding, unknown dtype"
).split(", ")


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_and_foreign_files_are_refused(how, tmp_path):
    params = draw_params(np.random.default_rng(6), patch_size=2, grid=(2, 2), N=6, dtype="int8")
    path = tmp_path / "params.safetensors"
    params.save(path)
    path.write_bytes(damage(path, how))
    with pytest.raises(
        ValueError, match=r"PatchEmbedParams\.load: .*params\.safetensors.*Expected"
    ):
        ppe.PatchEmbedParams.load(path)


def test_the_same_file_without_damage_loads(tmp_path):
    params = draw_params(np.random.default_rng(6), patch_size=2, grid=(2, 2), N=6, dtype="int8")
    path = tmp_path / "params.safetensors"
    params.save(path)
    path.write_bytes(damage(path, "nothing"))
    assert ppe.PatchEmbedParams.load(path).table.dtype == jnp.bfloat16


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ppe.PatchEmbedParams.load(tmp_path / "none.safetensors")
