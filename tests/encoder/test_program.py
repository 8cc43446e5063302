"""Calls of an encoder outside of any transformation have compiler options of their own."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from pallas_patch_embed.encoders import encoder as encoders
from pallas_patch_embed.encoders import program, text_encoder

PATH = "tests/data/families/clip"


@pytest.fixture(scope="module")
def encoder():
    return ppe.load_encoder(PATH, patch_dtype="float32", dtype="float32")


@pytest.fixture(scope="module")
def images(encoder):
    shape = (2, *encoder.config.image_size, 3)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls with options, as on a machine with CUDA, and however few rows there are."""
    counted = []
    monkeypatch.setattr(program, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(program, "FEWEST_ROWS", 1)
    for owner in (encoders._encode_images, text_encoder._encode):

        def call(*operands, compute=owner._alone, **static):
            counted.append(operands)
            return compute(*operands, **static)

        monkeypatch.setattr(owner, "_alone", call)
    return counted


def under_shard_map(f, x):
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))(x)


def symbolic(x):
    """Describes any number of such images."""
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, ...", like=x.shape), x.dtype)


# How a function of images is called under transformations.
TRANSFORMED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "jit of constants": lambda f, x: jax.jit(lambda: f(x))(),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "vmap": lambda f, x: jax.vmap(lambda x: f(x[None])[0])(x),
    "shard_map": under_shard_map,
    "export": lambda f, x: jax.export.export(jax.jit(f))(symbolic(x)).call(x),
    "ahead of time": lambda f, x: jax.jit(f).lower(x).compile()(x),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_transformed_call_computes_the_same_without_options(encoder, images, calls, how):
    wanted = np.asarray(encoder(images).pooler_output)
    assert len(calls) == 1
    x = jax.device_put(images)
    found = TRANSFORMED[how](lambda x: encoder(x).pooler_output, x)
    assert len(calls) == 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def test_a_derivative_by_the_weights_is_traced_without_options(encoder, images, calls):
    x = jax.device_put(images)

    def pooled(norm):
        return dataclasses.replace(encoder, norm=norm)(x).pooler_output

    _, tangent = jax.jvp(pooled, (encoder.norm,), (encoder.norm,))
    assert not calls
    step = 1 / 64
    low, high = (
        np.asarray(pooled({k: v * by for k, v in encoder.norm.items()}), np.float64)
        for by in (1 - step, 1 + step)
    )
    slope = (high - low) / (2 * step)
    # The pooled token's norm is linear in these weights, so only rounding to float32 differs.
    np.testing.assert_allclose(tangent, slope, rtol=0, atol=64 * 2e-6 * np.abs(slope).max())
    assert len(calls) == 2


def test_few_rows_and_machines_without_CUDA_get_no_options(encoder, images, calls, monkeypatch):
    rows = len(images) * (encoder.config.prefix + np.prod(encoder.config.grid))
    monkeypatch.setattr(program, "FEWEST_ROWS", rows + 1)
    encoder(images)
    assert not calls
    monkeypatch.setattr(program, "FEWEST_ROWS", rows)
    encoder(images)
    assert len(calls) == 1
    monkeypatch.setattr(program, "cuda_is_installed", lambda: False)
    encoder(images)
    assert len(calls) == 1


def test_texts_get_the_options(calls):
    texts = ppe.load_text_encoder("tests/data/families/clip_whole", dtype="float32")
    ids = np.full((3, texts.config.length), texts.config.end_token)
    plain = jax.jit(lambda ids: texts(ids).pooler_output)(ids)
    assert not calls
    found = texts(ids).pooler_output
    assert len(calls) == 1
    np.testing.assert_allclose(found, plain, rtol=0, atol=2e-6 * np.abs(plain).max())


def test_XLA_gets_the_options(monkeypatch, calls):
    monkeypatch.setattr(program, "BY_CUBLAS", {"xla_no_such_option": True})
    compute = program.Program(lambda encoder, x, kept: encoder * x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compute(2.0, 3.0, kept=(), rows=1)
    assert jax.jit(lambda x: compute(2.0, x, kept=(), rows=1))(3.0) == 6


def test_what_was_checked_once_is_accepted_and_all_else_is_still_checked(encoder, images):
    on_device = jax.numpy.asarray(images)
    wanted = encoder(images).pooler_output
    for _ in range(2):
        np.testing.assert_array_equal(encoder(on_device).pooler_output, wanted)
    assert encoder._accepted == {(images.shape, np.dtype("uint8"))}
    (hidden,) = encoder(on_device, layers=-1).hidden_states
    np.testing.assert_array_equal(hidden, encoder(images, layers=-1).hidden_states[0])
    for other, error in (
        (np.ma.masked_array(images, images > 9), TypeError),
        (on_device[0], ValueError),
        (on_device[:, 1:, :-1], ValueError),
        (on_device.astype("int16"), TypeError),
        (on_device.astype("float32"), ValueError),
        (images.tolist(), TypeError),
    ):
        with pytest.raises(error):
            encoder(other)
    with pytest.raises(TypeError):
        encoder(on_device, mask=np.ones((2, 4)))
    wrong = dataclasses.replace(encoder, patch_embed=dataclasses.replace(encoder.patch_embed, K=3))
    with pytest.raises(ValueError):
        wrong(on_device)
