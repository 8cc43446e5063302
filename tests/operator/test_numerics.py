"""The operator's whole output is compared with exact references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_patch_embed as ppe
from pallas_patch_embed.base.problem import NAMED_SHAPES
from tests.encoder.goldens import FIXED, GOLDENS, expected, images, patch_embedding
from tests.operator.bounds import DTYPES, assert_agrees, assert_bit_equal, draw_images, draw_params
from tests.short_suite import keep


def one_dtype(shape):
    """Assigns a dtype to each shape, in turn.

    The largest shape, the last one, gets int8, and the longest rows, those of B/32, do not get
    float8: without XLA's optimizations its product then takes a minute.
    """
    if shape.name == "B/32 256":
        return "bfloat16"
    return DTYPES[(NAMED_SHAPES.index(shape) - len(NAMED_SHAPES)) % len(DTYPES)]


@pytest.mark.parametrize(
    "shape, dtype, batches",
    keep(
        [(shape, dtype, (2,)) for shape in NAMED_SHAPES for dtype in DTYPES]
        + [(shape, one_dtype(shape), (5, 1, 2, 3)) for shape in NAMED_SHAPES],
        lambda case: (
            len(case[2]) == 1 and (case[0].name == "B/16 224" or case[1] == one_dtype(case[0]))
        ),
        "large products; the short suite has every shape in one dtype, and one shape in all dtypes",
        lambda case: case[0].name in ("B/32 256", "So400m/14 224", "NaFlex B/16 256"),
    ),
    ids=lambda x: x if isinstance(x, str) else getattr(x, "name", str(x)).replace(" ", "-"),
)
def test_every_named_shape_agrees_for_every_batch(shape, dtype, batches):
    most, *others = batches
    rng = np.random.default_rng([shape.S, shape.N, shape.K, DTYPES.index(dtype)])
    per_image = shape.name.startswith("NaFlex")
    params = draw_params(
        rng,
        patch_size=shape.patch,
        grid=shape.grid,
        N=shape.N,
        dtype=dtype,
        positions=not per_image,
    )
    images = draw_images(rng, most, shape.image, shape.image, 3)
    # The patches are a numpy array, because slicing a JAX array compiles a program.
    patches = np.asarray(jax.jit(ppe.patchify)(images, params))
    positions = table = None
    if per_image:
        positions = rng.normal(0, 1, (most, shape.S, shape.N)).astype(np.float32)
        table = (np.asarray(params.offset) + positions).astype(params.table_dtype)
    embed = jax.jit(lambda x, params, e: ppe.patch_embed(x, params, position_embedding=e))
    y = np.asarray(embed(patches, params, positions))
    assert_agrees(y, patches, params, table)
    for B in others:
        part = np.asarray(embed(patches[:B], params, None if positions is None else positions[:B]))
        # Results that equal those of the larger batch were already compared with the reference.
        if part.shape != y[:B].shape or (part != y[:B]).any():
            assert_agrees(part, patches[:B], params, None if table is None else table[:B])


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_that_cancels_the_product_leaves_only_its_rounding(dtype, out_dtype):
    rng = np.random.default_rng(7)
    params = draw_params(rng, patch_size=4, grid=(6, 6), N=40, dtype=dtype)
    patches = ppe.patchify(draw_images(rng, 24, 24, 3), params)
    product = ppe.patch_embed(
        patches, dataclasses.replace(params, table=None, offset=0 * params.offset)
    )
    params = dataclasses.replace(params, table=-product.astype(params.table_dtype))
    y = ppe.patch_embed(patches, params, out_dtype=out_dtype)
    # A cancelled int8 product leaves only the rounding that a fused multiply-add omits.
    assert_agrees(y, patches, params, moved=1)


def test_int8_is_bit_equal_to_the_exact_result_when_scales_are_powers_of_two():
    rng = np.random.default_rng(8)
    params = draw_params(rng, patch_size=16, grid=(8, 8), N=96, dtype="int8")
    params = dataclasses.replace(params, scale=jnp.exp2(jnp.round(jnp.log2(params.scale))))
    patches = ppe.patchify(draw_images(rng, 3, 128, 128, 3), params)
    product = np.asarray(patches, np.int64) @ np.asarray(params.weight, np.int64).T
    wanted = product.astype(np.float32) * np.asarray(params.scale)
    wanted = (wanted + np.asarray(params.table, np.float32)).astype(jnp.bfloat16)
    assert_bit_equal(ppe.patch_embed(patches, params), wanted)


def test_the_bounds_notice_one_wrong_element():
    rng = np.random.default_rng(9)
    for dtype in DTYPES:
        params = draw_params(rng, patch_size=4, grid=(2, 2), N=8, dtype=dtype)
        patches = ppe.patchify(draw_images(rng, 1, 8, 8, 3), params)
        y = np.asarray(ppe.patch_embed(patches, params), np.float32).copy()
        y[0, 1, 3] = y[0, 1, 3] * 1.02 + 0.001
        with pytest.raises(AssertionError):
            assert_agrees(y.astype(jnp.bfloat16), patches, params)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(["bfloat16", "float32"]),
    patch=st.integers(1, 20),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    remainder=st.tuples(st.integers(0, 19), st.integers(0, 19)),
    leading=st.lists(st.integers(0, 3), max_size=3),
    N=st.integers(1, 70),
    positions=st.sampled_from(["stored", "none", "given", "per image"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_agree(dtype, out_dtype, patch, grid, remainder, leading, N, positions, seed):
    rng = np.random.default_rng(seed)
    params = draw_params(
        rng, patch_size=patch, grid=grid, N=N, dtype=dtype, positions=positions == "stored"
    )
    H, W = (side * patch + rest % patch for side, rest in zip(grid, remainder))
    images = draw_images(rng, *leading, H, W, 3)
    e = table = None
    if positions in ("given", "per image"):
        shape = (*(leading if positions == "per image" else ()), grid[0] * grid[1], N)
        e = rng.normal(0, 1, shape).astype(np.float32)
        table = (np.asarray(params.offset) + e).astype(params.table_dtype)
    # Both steps are compiled as one program.
    both = jax.jit(
        lambda images, params, e: (
            ppe.embed_images(images, params, position_embedding=e, out_dtype=out_dtype),
            ppe.patchify(images, params),
        )
    )
    assert_agrees(*both(images, params, e), params=params, table=table)


def golden(name, dtype):
    """Returns pairs of our embeddings and the original implementation's, one for each image."""
    patch_size, layout = GOLDENS[name]
    kernel, bias, positions = patch_embedding(name)
    wanted = expected(name)["patch_embeddings"]
    pack = dict(patch_size=patch_size, layout=layout, dtype=dtype)
    if name in FIXED:
        params = ppe.pack(kernel, bias, positions, **pack)
        ours = ppe.embed_images(images(name), params, out_dtype="float32")
        return list(zip(np.asarray(ours), wanted))
    params = ppe.pack(kernel, bias, None, **pack)
    N = params.N
    pairs = []
    for image, embeddings in zip(images(name), wanted):
        h, w = image.shape[0] // patch_size, image.shape[1] // patch_size
        resized = jax.image.resize(
            positions.reshape(16, 16, N), (h, w, N), "bilinear", antialias=True
        )
        ours = ppe.embed_images(
            image, params, position_embedding=resized.reshape(h * w, N), out_dtype="float32"
        )
        pairs.append((np.asarray(ours), embeddings[: h * w]))
    return pairs


@pytest.mark.parametrize("name", GOLDENS)
def test_float32_reproduces_the_original_implementations(name):
    for ours, wanted in golden(name, "float32"):
        assert np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max()


def frobenius(pairs):
    """Returns the relative Frobenius error over all images of a golden."""
    error = sum(np.linalg.norm(ours - wanted) ** 2 for ours, wanted in pairs)
    return (error / sum(np.linalg.norm(wanted) ** 2 for _, wanted in pairs)) ** 0.5


# The NaFlex goldens have a larger error in float8_e4m3fn even with ideal rounding
# (docs/numerics.md).
@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_embeddings_stay_near_the_original_implementations(name, dtype):
    largest = {"int8": 0.0016, "float8_e4m3fn": 0.024 if "naflex" in name else 0.02}[dtype]
    assert frobenius(golden(name, dtype)) <= largest


def test_positions_given_equal_positions_stored():
    rng = np.random.default_rng(3)
    kernel, bias = rng.normal(size=(16, 16, 3, 33)), rng.normal(size=33)
    positions = rng.normal(size=(6, 33))
    images = draw_images(rng, 4, 32, 48, 3)
    for dtype in DTYPES:
        pack = dict(patch_size=16, grid=(2, 3), dtype=dtype)
        stored = ppe.embed_images(images, ppe.pack(kernel, bias, positions, **pack))
        bare = ppe.pack(kernel, bias, None, **pack)
        for e in (positions, np.broadcast_to(positions, (4, 6, 33))):
            for embed in (ppe.embed_images, jax.jit(ppe.embed_images)):
                assert_bit_equal(embed(images, bare, position_embedding=e), stored)


def test_no_images_give_an_empty_result():
    rng = np.random.default_rng(4)
    for dtype in DTYPES:
        params = draw_params(rng, patch_size=8, grid=(2, 2), N=16, dtype=dtype)
        images = draw_images(rng, 0, 16, 16, 3)
        for embed in (ppe.embed_images, jax.jit(ppe.embed_images)):
            y = embed(images, params)
            assert y.shape == (0, 4, 16) and y.dtype == jnp.bfloat16
