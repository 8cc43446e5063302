"""Every fact about a dtype of patches and weight is in one table."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import explain
from pallas_patch_embed.base import dtypes
from pallas_patch_embed.base.chips import H200, Target
from pallas_patch_embed.frameworks import convolution
from tests.encoder.goldens import checkpoint
from tests.operator.bounds import assert_agrees, draw_images

RNG = np.random.default_rng(0)
KERNEL = np.float32(RNG.normal(size=(4, 4, 3, 16)))
EXPECTED = "is 'int3', expected one of float32, bfloat16, float8_e4m3fn, int8"


def convolved():
    packing = convolution.Packing.checked("int3", "nearest", None, None)
    images = np.zeros((1, 8, 8, 3), np.uint8)
    arguments = dict(patch_size=4, layout="HWIO", packing=packing, dtype=None)
    return convolution.embed(images, jnp.asarray(KERNEL), None, None, **arguments)


REFUSING = {
    "pack": lambda: ppe.pack(KERNEL, None, None, patch_size=4, dtype="int3"),
    "load_encoder": lambda: ppe.siglip2.load_encoder(
        checkpoint("hf_siglip_p14_224"), patch_dtype="int3"
    ),
    "modules": convolved,
}


@pytest.mark.parametrize("place", REFUSING)
def test_an_invented_dtype_is_refused_with_one_message(place):
    with pytest.raises(ValueError, match=EXPECTED):
        REFUSING[place]()


def test_an_invented_dtype_in_a_file_is_refused_with_the_same_message(tmp_path):
    ppe.pack(KERNEL, None, None, patch_size=4, dtype="int8").save(tmp_path / "params")
    content = (tmp_path / "params").read_bytes()
    (tmp_path / "params").write_bytes(content.replace(b'\\"int8\\"', b'\\"int3\\"'))
    with pytest.raises(ValueError, match=EXPECTED):
        ppe.PatchEmbedParams.load(tmp_path / "params")


def test_a_row_in_the_table_is_all_that_xla_needs(monkeypatch, tmp_path):
    row = dtypes.PatchDtype("float8_e5m2", True, "float32", "bfloat16", "uint8", "e5m2", "fp8e5")
    monkeypatch.setitem(dtypes.TABLE, row.name, row)
    assert row.largest == 57344 and not row.holds_levels
    images = draw_images(RNG, 2, 8, 12, 3)
    for rounding in ("nearest", "feedback"):
        arguments = dict(patch_size=4, dtype="float8_e5m2", rounding=rounding)
        params = ppe.pack(KERNEL, None, None, **arguments)
        weight = np.asarray(params.weight).astype(np.float64)[:, :48]
        absmax = np.abs(KERNEL).max((0, 1, 2))
        np.testing.assert_allclose(params.scale, absmax / 57344, rtol=1e-6)
        exact = KERNEL.reshape(48, 16).T / np.asarray(params.scale, np.float64)[:, None]
        # Two fraction bits: a step is at most a quarter of the number. Feedback adds a few steps.
        steps = np.abs(weight - exact) / np.maximum(np.abs(exact) / 4, 2.0**-16)
        assert steps.max() <= 0.51 if rounding == "nearest" else np.median(steps) <= 1
        params.save(tmp_path / rounding)
        loaded = ppe.PatchEmbedParams.load(tmp_path / rounding)
        assert loaded.dtype == "float8_e5m2" and loaded.weight.dtype == jnp.float8_e5m2
        assert_agrees(ppe.embed_images(images, loaded), ppe.patchify(images, loaded), loaded)
    found = explain(ppe.explain(images, params).problem, Target("cuda", H200), None)
    reasons = {row.backend: row.reason for row in found if not row.serves}
    assert reasons.keys() == {"mosaic_sm100", "mosaic_sm90", "cuda", "triton"}
    assert any("not float8_e5m2" in reason for reason in reasons.values())
