"""JAX's strict settings change no result."""

import functools

import jax
import numpy as np
import pytest

import pallas_patch_embed as ppe
from tests.encoder.goldens import checkpoint
from tests.operator.bounds import DTYPES, assert_bit_equal, draw_images
from tests.operator.strict import strict_settings
from tests.short_suite import keep

RNG = np.random.default_rng(0)
IMAGES = draw_images(RNG, 2, 224, 224, 3)
FLOATS = np.float32(IMAGES / 127.5 - 1)
KERNEL, BIAS, POSITIONS = (RNG.normal(size=s) for s in ((16, 16, 3, 64), (64,), (196, 64)))
PICTURES = [IMAGES[0, :160, :96], IMAGES[1, :112, :144]]


def on_device(*arrays):
    """Transfers arrays to the device before the settings are active."""
    return jax.device_put(arrays)


def embedding(dtype):
    pack = functools.partial(ppe.pack, KERNEL, BIAS, patch_size=16, dtype=dtype)
    params, bare = pack(POSITIONS), pack(None)
    pixels, floats, positions = on_device(IMAGES, FLOATS, np.float32(POSITIONS))
    patches = ppe.patchify(pixels, params)
    return lambda: (
        ppe.embed_images(pixels, params),
        ppe.embed_images(floats, params, out_dtype="float32"),
        ppe.embed_images(pixels, bare, position_embedding=positions),
        ppe.patch_embed(patches, params),
        ppe.patchify(floats, params),
        jax.jit(ppe.embed_images)(pixels, params),
    )


def fixed():
    encoder = ppe.siglip2.load_encoder(checkpoint("hf_siglip_p16_224"), patch_dtype="int8")
    (images,) = on_device(IMAGES)
    return lambda: (*encoder(images), *jax.jit(lambda encoder, x: encoder(x))(encoder, images))


def naflex():
    encoder = ppe.siglip2.load_encoder(checkpoint("hf_siglip2_naflex_p16"), dtype="float32")
    batch = ppe.siglip2.batch_naflex(PICTURES, encoder.config, 64)
    patches, shapes, mask = on_device(*batch)
    return lambda: (
        *encoder(patches, spatial_shapes=shapes, mask=mask),
        *encoder(patches, spatial_shapes=shapes),
    )


def loading():
    config = ppe.siglip2.load_encoder(checkpoint("bv_naflex_p16")).config
    return lambda: (
        *jax.tree.leaves(ppe.siglip2.load_encoder(checkpoint("bv_vit_p16_224"), image_size=160)),
        *jax.tree.leaves(ppe.siglip2.load_encoder(checkpoint("bv_naflex_p16"))),
        *jax.tree.leaves(ppe.pack(KERNEL, BIAS, POSITIONS, patch_size=16, dtype="int8")),
        *ppe.siglip2.batch_naflex(PICTURES, config, 64),
    )


CALLS = {dtype: functools.partial(embedding, dtype) for dtype in DTYPES}
CALLS |= {"fixed": fixed, "NaFlex": naflex, "loading": loading}


@pytest.mark.parametrize(
    "name",
    keep(CALLS, lambda name: name in ("int8", "NaFlex", "loading"), "compiles every program twice"),
)
def test_strict_settings_change_no_bit(name):
    call = CALLS[name]()
    wanted = call()
    # Cached programs would not be traced under the settings.
    jax.clear_caches()
    with strict_settings():
        found = call()
    for one, other in zip(found, wanted, strict=True):
        assert_bit_equal(one, other)
