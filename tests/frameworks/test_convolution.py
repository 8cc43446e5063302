"""The code that the frameworks' modules share, tested without the frameworks."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.frameworks import convolution

GOOD = dict(
    kernel_size=(16, 16),
    strides=(16, 16),
    padding="VALID",
    dilations=(1, 1),
    groups=1,
    channels=3,
    others={"mask": None},
)


@pytest.mark.parametrize("padding", ["VALID", "valid", "SAME", 0, (0, 0), ((0, 0), (0, 0))])
def test_a_patch_embedding_has_its_patch_size(padding):
    assert convolution.patch_size("stem", **GOOD | dict(padding=padding)) == 16


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(kernel_size=(16,), strides=(16,)), r"kernel_size is \(16,\)"),
        (dict(kernel_size=(2, 16, 16), strides=(2, 16, 16)), r"kernel_size is \(2, 16, 16\)"),
        (dict(strides=(16, 8)), r"strides are \(16, 8\)"),
        (dict(padding=((0, 0), (0, 1))), r"padding is \(\(0, 0\), \(0, 1\)\)"),
        (dict(padding="SAME_LOWER"), "padding is 'SAME_LOWER'"),
        (dict(dilations=(1, 2)), "it is dilated"),
        (dict(groups=3), "it has 3 groups"),
        (dict(channels=1), "it has 1 input channels"),
        (dict(others={"activation": "relu"}), "activation is 'relu'"),
    ],
)
def test_a_convolution_that_is_no_patch_embedding_is_refused_by_name(change, text):
    with pytest.raises(
        ValueError, match=f"stem is not a patch embedding: {text}. Expected a square"
    ):
        convolution.patch_size("stem", **GOOD | change)


def test_every_fault_is_named():
    with pytest.raises(ValueError, match="it is dilated, it has 2 groups, it has 4 input channels"):
        convolution.patch_size("stem", **GOOD | dict(dilations=(2, 2), groups=2, channels=4))


@pytest.mark.parametrize("rounding", ["nearest", "feedback"])
def test_the_result_is_that_of_pack_and_embed_images(rounding):
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(0, 0.03, (16, 16, 3, 32)), rng.normal(size=32)
    positions = rng.normal(size=(1, 6, 32)).astype(np.float32)
    images = rng.integers(0, 256, (2, 32, 48, 3), np.uint8)
    packing = convolution.Packing.checked("int8", rounding, None, None)
    arguments = dict(patch_size=16, layout="HWIO", packing=packing)
    kernel, bias = jnp.float32(kernel), jnp.float32(bias)
    found = convolution.embed(images, kernel, bias, positions, dtype="bfloat16", **arguments)
    params = ppe.pack(kernel, bias, positions, patch_size=16, grid=(2, 3), rounding=rounding)
    np.testing.assert_array_equal(found, ppe.embed_images(images, params).reshape(2, 2, 3, 32))
    # By default the result has the dtype of the parameters, as that of a convolution does.
    assert convolution.embed(images, kernel, bias, None, dtype=None, **arguments).dtype == "float32"
    half = [jnp.bfloat16(x) for x in (kernel, bias)]
    assert convolution.embed(images, *half, None, dtype=None, **arguments).dtype == "bfloat16"
