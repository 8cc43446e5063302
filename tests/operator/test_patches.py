"""The order of K, padding, and the encoding of pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from tests.operator.bounds import DTYPES, assert_bit_equal, draw_images, draw_params


def make(dtype, patch_size=4):
    return draw_params(
        np.random.default_rng(0), patch_size=patch_size, grid=(2, 3), N=4, dtype=dtype
    )


# All pixel values, and the usual formulas for (2u - 255) / 255 in float32.
LEVELS = np.arange(256, dtype=np.uint8)
NORMALISED = {
    "u / 255 * 2 - 1": LEVELS / np.float32(255) * np.float32(2) - np.float32(1),
    "(u / 255 - 0.5) / 0.5": (LEVELS / np.float32(255) - np.float32(0.5)) / np.float32(0.5),
    "u / 127.5 - 1": LEVELS / np.float32(127.5) - np.float32(1),
    "u * (1 / 255) * 2 - 1": LEVELS * np.float32(1 / 255) * np.float32(2) - np.float32(1),
    "float64": ((2.0 * LEVELS - 255) / 255),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", NORMALISED)
def test_uint8_and_the_equal_float_image_give_identical_patches(dtype, formula):
    params = make(dtype)
    images = np.repeat(LEVELS.reshape(1, 16, 16, 1), 3, axis=-1)
    floats = np.repeat(NORMALISED[formula].reshape(1, 16, 16, 1), 3, axis=-1)
    wanted = ppe.patchify(images, params)
    for patchify in (ppe.patchify, jax.jit(ppe.patchify)):
        assert_bit_equal(patchify(floats, params), wanted)
        assert_bit_equal(patchify(images, params), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_are_the_encoded_pixels_in_order_then_zeros(dtype):
    params = make(dtype)
    images = draw_images(np.random.default_rng(1), 2, 5, 11, 14, 3)
    cut = images[..., :8, :12, :].reshape(2, 5, 2, 4, 3, 4, 3).swapaxes(-4, -3)
    pixels = cut.reshape(2, 5, 6, 48).astype(np.float64)
    encoded = pixels - 128 if dtype == "int8" else (2 * pixels - 255) / 255
    patches = np.asarray(ppe.patchify(images, params))
    assert patches.shape == (2, 5, 6, 128) and patches.dtype == jnp.dtype(dtype)
    if dtype == "float32":
        np.testing.assert_allclose(patches[..., :48], encoded, rtol=2**-23)
    else:
        assert_bit_equal(patches[..., :48], encoded.astype(np.float32).astype(jnp.dtype(dtype)))
    assert not patches[..., 48:].astype(np.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_rounded_to_the_encoding_and_clipped_on_request(dtype):
    params = make(dtype)
    images = np.random.default_rng(2).uniform(-1.3, 1.3, (8, 12, 3)).astype(np.float32)
    clipped = np.clip(images.astype(np.float64), -1, 1)
    patches = np.asarray(ppe.patchify(images, params, clip=True)).astype(np.float64)[:, :48]
    wanted = clipped.reshape(2, 4, 3, 4, 3).swapaxes(1, 2).reshape(6, 48)
    half_step = {
        "float32": 2.0**-21,
        "bfloat16": np.maximum(np.abs(wanted) * 2.0**-8, 2.0**-21),
        "float8_e4m3fn": np.maximum(np.abs(wanted) * 2.0**-4, 2.0**-10),
        "int8": 1 / 255 + 1e-6,
    }[dtype]
    decoded = (2 * patches + 1) / 255 if dtype == "int8" else patches
    assert (np.abs(decoded - wanted) <= half_step).all()


def test_nan_stays_nan_if_the_encoding_has_one():
    images = np.zeros((8, 12, 3), np.float32)
    images[3, 5, 1] = np.nan
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        patches = np.asarray(ppe.patchify(images, make(dtype), clip=True), np.float32)
        assert np.isnan(patches).sum() == 1


def test_the_zeros_that_pad_K_are_part_of_the_patchify_fusion():
    params = make("bfloat16", patch_size=14)
    images = jax.ShapeDtypeStruct((4, 28, 42, 3), jnp.uint8)
    hlo = jax.jit(lambda images: ppe.patchify(images, params)).lower(images).compile().as_text()
    entry = hlo[hlo.index("ENTRY") :]
    written = [line for line in entry.splitlines() if " = bf16[" in line]
    assert len(written) == 1, entry
