"""The SigLIP2 encoder agrees with the original implementations, and works in transformations."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.embed.embedder import embedding_on
from pallas_patch_embed.encoders.encoder import _static_fields
from pallas_patch_embed.patch_embedding.positions import resize_to_each
from tests.encoder.goldens import FIXED, GOLDENS, NAFLEX, checkpoint, encode, expected, images
from tests.operator.bounds import DTYPES, draw_images
from tests.short_suite import keep

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


def load(name, **arguments):
    return ppe.siglip2.load_encoder(checkpoint(name), **arguments)


def float32(name, **arguments):
    return load(name, patch_dtype="float32", dtype="float32", **arguments)


def relative_error(found, wanted):
    return np.linalg.norm(np.asarray(found, np.float32) - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("name", GOLDENS)
def test_float32_reproduces_the_original_implementations(name):
    output, mask = encode(float32(name), name)
    wanted = expected(name)
    assert output.last_hidden_state.dtype == output.pooler_output.dtype == jnp.float32
    for found, reference in (
        (output.last_hidden_state[mask], wanted["last_hidden_state"][mask]),
        (output.pooler_output, wanted["pooler_output"]),
    ):
        assert np.abs(np.asarray(found) - reference).max() <= 1e-4


# The errors of docs/encoder.md, rounded up.
LARGEST = {
    ("bfloat16", "float32"): 0.002,
    ("int8", "float32"): 0.001,
    ("float8_e4m3fn", "float32"): 0.008,
    ("bfloat16", "bfloat16"): 0.009,
    ("int8", "bfloat16"): 0.009,
    ("float8_e4m3fn", "bfloat16"): 0.01,
}


# Cases of the short suite: every checkpoint and every pair of dtypes occurs.
ROUNDED = {
    "hf_siglip_p16_224": [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float32")],
    "hf_siglip_p14_224": [("bfloat16", "float32")],
    "bv_vit_p16_224": [("int8", "float32")],
    "hf_siglip2_naflex_p16": [("int8", "bfloat16")],
    "bv_naflex_p16": [("float8_e4m3fn", "bfloat16")],
}


@pytest.mark.parametrize(
    "name, patch_dtype, dtype",
    keep(
        [(name, *dtypes) for name in GOLDENS for dtypes in LARGEST],
        lambda case: case[1:] in ROUNDED[case[0]],
        "compiles an encoder for each case",
        lambda case: case[1] == "int8",
    ),
)
def test_rounded_encoders_stay_near_the_original_implementations(name, patch_dtype, dtype):
    output, _ = encode(load(name, patch_dtype=patch_dtype, dtype=dtype), name)
    assert output.pooler_output.dtype == output.last_hidden_state.dtype == jnp.dtype(dtype)
    error = relative_error(output.pooler_output, expected(name)["pooler_output"])
    assert error <= LARGEST[patch_dtype, dtype]


@pytest.mark.parametrize("name", NAFLEX)
def test_batch_naflex_makes_the_batches_of_the_original_implementations(name):
    data = expected(name)
    encoder = float32(name)
    patches, spatial_shapes, mask = ppe.siglip2.batch_naflex(images(name), encoder.config, 64)
    if "pixel_attention_mask" in data:
        np.testing.assert_array_equal(mask, data["pixel_attention_mask"])
        np.testing.assert_array_equal(spatial_shapes, data["spatial_shapes"])
    else:
        np.testing.assert_array_equal(mask, data["patch_type"] == 1)
        shapes = np.stack([data["yabs"].max(1), data["xabs"].max(1)], 1) + 1
        np.testing.assert_array_equal(spatial_shapes, shapes)
    assert patches.dtype == np.float32 and not patches[~mask].any()
    for i, image in enumerate(images(name)):
        h, w = spatial_shapes[i]
        back = patches[i, : h * w].reshape(h, w, 16, 16, 3).swapaxes(1, 2).reshape(image.shape)
        np.testing.assert_allclose(back, image / 255 * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(
    "name, patch_dtype",
    keep(
        itertools.product(NAFLEX, DTYPES),
        lambda case: case == (NAFLEX[0], "int8"),
        "compiles an encoder twice for each case",
    ),
)
def test_padding_has_no_influence(name, patch_dtype):
    encoder = load(name, patch_dtype=patch_dtype, dtype="float32")
    patches, spatial_shapes, mask = ppe.siglip2.batch_naflex(images(name), encoder.config, 70)
    output = encoder(patches, spatial_shapes=spatial_shapes, mask=mask)
    noise = np.random.default_rng(0).uniform(-1, 1, patches.shape).astype(np.float32)
    noisy = np.where(mask[..., None], patches, noise)
    for other in (
        encoder(noisy, spatial_shapes=spatial_shapes, mask=mask.astype(np.int32)),
        encoder(noisy, spatial_shapes=spatial_shapes.astype(np.int64)),
    ):
        np.testing.assert_array_equal(other.pooler_output, output.pooler_output)
        np.testing.assert_array_equal(other.last_hidden_state[mask], output.last_hidden_state[mask])


@pytest.mark.parametrize(
    "source",
    [pytest.param((16, 16), marks=pytest.mark.slow("compiles a program for each shape")), (7, 5)],
)
def test_positions_are_resized_as_jax_resizes_images(source):
    rng = np.random.default_rng(1)
    positions = rng.normal(size=(*source, 6)).astype(np.float32)
    shapes = np.array([(16, 16), (1, 1), (1, 90), (3, 29), (10, 9), (40, 2), (7, 5)])
    found = resize_to_each(jnp.asarray(positions), jnp.asarray(shapes), 256)
    for (h, w), y in zip(shapes, np.asarray(found)):
        wanted = jax.image.resize(positions, (h, w, 6), "bilinear", antialias=True)
        np.testing.assert_allclose(y[: h * w], np.asarray(wanted).reshape(-1, 6), atol=2e-6)
    assert np.isfinite(found).all()


SIZES = (160, (288, 96), (16, 64))


@pytest.mark.parametrize(
    "name, size",
    keep(
        itertools.product(FIXED, SIZES),
        lambda case: FIXED.index(case[0]) == SIZES.index(case[1]),
        "compiles two encoders for each case; the short suite has every checkpoint and size once",
    ),
)
def test_another_image_size_resizes_the_positions(name, size):
    encoder = float32(name, image_size=size)
    H, W = size if isinstance(size, tuple) else (size, size)
    stored, p = float32(name), encoder.config.patch
    grid = (H // p, W // p)
    assert encoder.config.grid == grid and encoder.config.image_size == (H, W)
    positions = (stored.patch_embed.table - stored.patch_embed.offset).reshape(
        *stored.config.grid, -1
    )
    D = encoder.config.width
    wanted = jax.image.resize(positions, (*grid, D), "bilinear", antialias=True).reshape(-1, D)
    np.testing.assert_allclose(
        encoder.patch_embed.table - encoder.patch_embed.offset, wanted, atol=1e-5
    )
    x = draw_images(np.random.default_rng(2), 2, H, W, 3)
    output = encoder(x)
    replaced = dataclasses.replace(
        encoder,
        patch_embed=dataclasses.replace(
            encoder.patch_embed, table=wanted + encoder.patch_embed.offset
        ),
    )
    assert relative_error(output.pooler_output, np.asarray(replaced(x).pooler_output)) < 1e-4
    same = float32(name, image_size=stored.config.image_size)
    np.testing.assert_array_equal(same.patch_embed.table, stored.patch_embed.table)


@pytest.mark.parametrize("name", ["hf_siglip_p14_224", "bv_naflex_p16"])
def test_the_program_does_not_grow_with_the_depth(name):
    encoder = float32(name)

    def program(depth):
        layers = jax.tree.map(lambda x: jnp.concatenate([x] * (depth // 2)), encoder.blocks)
        config = dataclasses.replace(encoder.config, depth=depth)
        deep = dataclasses.replace(encoder, blocks=layers, config=config)
        if config.naflex:
            arguments = ppe.siglip2.batch_naflex(images(name), config, 64)
            lowered = jax.jit(lambda e, x, s, m: e(x, spatial_shapes=s, mask=m)).lower(
                deep, *arguments
            )
        else:
            lowered = jax.jit(lambda e, x: e(x)).lower(deep, images(name))
        return len(lowered.as_text().splitlines())

    assert program(2) == program(48)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    "name, axis_type",
    keep(
        itertools.product(
            ("hf_siglip_p16_224", "hf_siglip2_naflex_p16"), (AxisType.Auto, AxisType.Explicit)
        ),
        lambda case: (case[0] in FIXED) == (case[1] == AxisType.Auto),
        "compiles two encoders for each case; the short suite has every kind of encoder and axis",
    ),
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_a_sharded_batch_needs_no_collective(name, axis_type):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(axis_type,))
    encoder = load(name, patch_dtype="int8")
    if name in FIXED:
        arguments = (np.concatenate([images(name)] * 2),)
        call = jax.jit(lambda encoder, x: encoder(x))
    else:
        arguments = ppe.siglip2.batch_naflex((images(name) * 2)[:4], encoder.config, 64)
        call = jax.jit(lambda encoder, x, s, m: encoder(x, spatial_shapes=s, mask=m))
    wanted = call(encoder, *arguments)
    with jax.set_mesh(mesh):
        replicated = jax.device_put(encoder, NamedSharding(mesh, P()))
        sharded = jax.device_put(arguments, NamedSharding(mesh, P("batch")))
        assert not COLLECTIVE.search(call.lower(replicated, *sharded).compile().as_text())
        found = call(replicated, *sharded)
    for y, reference in zip(found[:2], wanted):
        assert y.sharding.spec[0] == "batch" and set(y.sharding.spec[1:]) <= {None}
        np.testing.assert_allclose(
            np.asarray(y, np.float32), np.asarray(reference, np.float32), atol=0.05
        )
    assert relative_error(found.pooler_output, np.asarray(wanted.pooler_output, np.float32)) < 1e-2


def test_it_works_under_shard_map_vmap_and_export():
    encoder = load("hf_siglip_p14_224", patch_dtype="int8", dtype="float32")
    x = draw_images(np.random.default_rng(3), 4, 224, 224, 3)
    wanted = np.asarray(encoder(x).pooler_output)
    devices = min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,))
    specs = dict(mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    shard_map = jax.jit(jax.shard_map(lambda x: encoder(x).pooler_output, **specs))
    vmapped = jax.vmap(lambda x: encoder(x[None]).pooler_output[0])
    exported = jax.export.export(jax.jit(lambda e, x: e(x)))(encoder, x)
    restored = jax.export.deserialize(exported.serialize())
    for y in (shard_map(x), vmapped(x), restored.call(encoder, x).pooler_output):
        np.testing.assert_allclose(y, wanted, atol=1e-5)


def test_an_encoder_fits_programs_that_were_exported_before_other_families():
    """Their pytrees have five children, and their configs say `pooling_head`."""
    encoder = float32("hf_siglip_p14_224")
    children, static = jax.tree_util.default_registry.flatten_one_level(encoder)
    assert len(tuple(children)) == 5 and static == (encoder.config, "float32")
    earlier = dataclasses.asdict(encoder.config)
    names = ("width", "depth", "heads", "mlp", "patch", "grid", "eps", "naflex", "image_size")
    earlier = {name: earlier[name] for name in (*names, "activation", "channels")}
    found = _static_fields(json.loads(json.dumps(earlier | {"pooling_head": True})), "float32")
    assert found == static


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", ["hf_siglip_p14_224", "hf_siglip2_naflex_p16"])
def test_embed_divides_a_batch_among_the_devices(name):
    encoder = load(name)
    if name in FIXED:
        x = np.concatenate([images(name)] * 2)
        wanted = encoder(x).pooler_output
    else:
        packs = [
            ppe.siglip2.pack_naflex(part, encoder.config, 64, rows=1, number=3)
            for part in (images(name)[:1], images(name)[1:])
        ]
        x = jax.tree.map(lambda *parts: np.concatenate(parts), *packs)
        wanted = np.concatenate([encoder.packed(pack).pooler_output for pack in packs])
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    replicated = jax.device_put(encoder, NamedSharding(mesh, P()))
    divided = jax.device_put(x, NamedSharding(mesh, P("batch")))
    compiled = jax.jit(embedding_on(mesh)).lower(replicated, divided).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    assert relative_error(compiled(replicated, divided), np.asarray(wanted, np.float32)) < 1e-2


def test_a_call_donates_nothing_and_leaves_no_array_behind():
    encoder = load("hf_siglip_p14_224")
    x = jnp.asarray(images("hf_siglip_p14_224"))
    first, second = encoder(x), encoder(x)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert not any(leaf.is_deleted() for leaf in [x, *jax.tree.leaves(encoder)])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(encoder))


def test_float_images_and_equal_uint8_images_have_the_same_result():
    encoder = load("hf_siglip_p16_224", patch_dtype="int8")
    x = images("hf_siglip_p16_224")
    floats = encoder((x / 255 * 2 - 1).astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, floats, encoder(x))


def test_layer_norms_stay_float32_in_a_bfloat16_encoder():
    encoder = load("hf_siglip_p16_224")
    assert encoder.norm["scale"].dtype == encoder.blocks["norm1"]["bias"].dtype == jnp.float32
    assert encoder.blocks["qkv"]["weight"].dtype == encoder.head["query"].dtype == jnp.bfloat16


def test_a_mask_excludes_the_padding_that_follows():
    # The same image is padded to its own number of patches, and to one more.
    encoder = float32("hf_siglip2_naflex_p16")
    image = images("hf_siglip2_naflex_p16")[0]
    one = ppe.siglip2.batch_naflex([image], encoder.config, 60)
    more = ppe.siglip2.batch_naflex([image], encoder.config, 61)
    a, b = (encoder(x, spatial_shapes=s, mask=m).pooler_output for x, s, m in (one, more))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "H, W, L, grid",
    [
        (480, 640, 256, (14, 18)),
        (640, 480, 256, (18, 14)),
        (400, 600, 40, (5, 8)),
        (1, 5000, 256, (1, 256)),
        (16, 16, 1, (1, 1)),
        (1, 1, 256, (7, 7)),
        (18181, 19392, 256, (15, 16)),
    ],
)
def test_the_grid_is_the_largest_at_an_aspect_ratio(H, W, L, grid):
    # The scale is at most 100, which limits the image of one pixel. In the last case transformers
    # chooses (15, 16) because its bisection is inexact.
    assert largest_grid(H, W, 16, L) == grid


@pytest.mark.parametrize("name", [FIXED[0], NAFLEX[0]])
def test_params_that_were_cast_are_refused(name):
    """Their scales would be rounded."""
    encoder = float32(name)
    scale = encoder.patch_embed.scale.astype(jnp.bfloat16)
    own = encoder.patch_embed.scale
    params = jax.tree.map(lambda x: scale if x is own else x, encoder)
    given, arguments = np.zeros((1, 224, 224, 3), np.uint8), {}
    if name in NAFLEX:
        small = [given[0, :48, :48]]
        given, spatial_shapes, mask = ppe.siglip2.batch_naflex(small, encoder.config, 9)
        arguments = dict(spatial_shapes=spatial_shapes, mask=mask)
    with pytest.raises(TypeError, match=r"params.scale is bfloat16\[\d+\], expected float32"):
        params(given, **arguments)


@pytest.mark.parametrize("name", ["hf_siglip_p14_224", "hf_siglip2_naflex_p16"])
def test_no_images_give_an_empty_result(name):
    encoder = float32(name)
    if name in FIXED:
        output = encoder(np.zeros((0, 224, 224, 3), np.uint8))
    else:
        patches, spatial_shapes, mask = ppe.siglip2.batch_naflex([], encoder.config, 9)
        output = encoder(patches, spatial_shapes=spatial_shapes, mask=mask)
    assert output.pooler_output.shape == (0, encoder.config.width)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_an_explicit_mesh_need_not_be_set():
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Explicit,))
    encoder = float32("hf_siglip_p14_224")
    x = draw_images(np.random.default_rng(5), 4, 224, 224, 3)
    found, wanted = (
        encoder(x, layers=(0, -1)) for x in (jax.device_put(x, NamedSharding(mesh, P("batch"))), x)
    )
    assert found.pooler_output.sharding.spec[0] == "batch"
    np.testing.assert_allclose(found.pooler_output, wanted.pooler_output, atol=1e-5)
    for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert a.sharding.spec[0] == "batch"
        np.testing.assert_allclose(a, b, atol=1e-5)


BAD_CALLS = {
    "patches to a fixed encoder": (
        "hf_siglip_p14_224",
        lambda e: e(images("hf_siglip_p14_224"), spatial_shapes=np.ones((1, 2), int)),
        TypeError,
        "for NaFlex encoders",
    ),
    "an image without a batch": (
        "hf_siglip_p14_224",
        lambda e: e(images("hf_siglip_p14_224")[0]),
        ValueError,
        r"expected \[B, H, W, 3\]",
    ),
    "images of another size": (
        "hf_siglip_p14_224",
        lambda e: e(np.zeros((1, 280, 280, 3), np.uint8)),
        ValueError,
        r"280 x 280 pixels.*load_encoder\(\.\.\., image_size=\(280, 280\)\)",
    ),
    "images to a NaFlex encoder": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 64, 64, 3), np.uint8)),
        TypeError,
        "batch_naflex",
    ),
    "patches of another length": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 588), np.float32), spatial_shapes=np.ones((1, 2), int)),
        ValueError,
        r"expected \[B, L, 768\]",
    ),
    "uint8 patches": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.uint8), spatial_shapes=np.ones((1, 2), int)),
        TypeError,
        "floating-point",
    ),
    "more patches than there are": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.float32), spatial_shapes=np.array([[2, 3]])),
        ValueError,
        "at most 4",
    ),
    "more patches than there are, on the device": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.float32), spatial_shapes=jnp.array([[9, 9]])),
        ValueError,
        "at most 4",
    ),
    "more patches than an integer holds": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.float32), spatial_shapes=np.array([[2**32, 2**32]])),
        ValueError,
        "at most 4",
    ),
    "something else than an array": (
        "hf_siglip_p14_224",
        lambda e: e("cat.png"),
        TypeError,
        "expected a JAX or numpy array",
    ),
    "big-endian images": (
        "hf_siglip_p14_224",
        lambda e: e(np.zeros((1, 224, 224, 3), ">f4")),
        TypeError,
        "big-endian dtype >f4",
    ),
    "big-endian shapes": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.float32), spatial_shapes=np.ones((1, 2), ">i4")),
        TypeError,
        "big-endian dtype >i4",
    ),
    "shapes of another batch": (
        "hf_siglip2_naflex_p16",
        lambda e: e(np.zeros((1, 4, 768), np.float32), spatial_shapes=np.ones((2, 2), int)),
        ValueError,
        r"integers \[1, 2\]",
    ),
    "a mask of another shape": (
        "hf_siglip2_naflex_p16",
        lambda e: e(
            np.zeros((1, 4, 768), np.float32),
            spatial_shapes=np.ones((1, 2), int),
            mask=np.ones((1, 5), bool),
        ),
        ValueError,
        r"booleans \[1, 4\]",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused(case):
    name, call, error, text = BAD_CALLS[case]
    with pytest.raises(error, match=text):
        call(load(name))


@pytest.mark.parametrize(
    "image, L, error, text",
    [
        (np.zeros((40, 64, 3), np.uint8), 64, ValueError, "nearest size is 32 x 64"),
        (np.zeros((5, 64, 3), np.uint8), 64, ValueError, "nearest size is 16 x 64"),
        (np.zeros((64, 64, 3), np.float32), 64, TypeError, "expected a uint8 array"),
        (np.zeros((64, 64), np.uint8), 64, ValueError, r"expected \[H, W, 3\]"),
        (np.zeros((64, 128, 3), np.uint8), 8, ValueError, "Resize it to 32 x 64"),
        (np.zeros((64, 64, 3), np.uint8), 0, ValueError, "positive integer"),
        ([[1]], 4, TypeError, "image 0 is list, expected a JAX or numpy array"),
    ],
    ids=["remainder", "small", "float", "grey", "many", "L", "list"],
)
def test_batch_naflex_refuses_anything_but_images(image, L, error, text):
    config = ppe.siglip2.Config(
        width=8, depth=1, heads=1, mlp=8, patch=16, grid=(2, 2), naflex=True
    )
    with pytest.raises(error, match=text):
        ppe.siglip2.batch_naflex([image], config, L)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs cuDNN")
@pytest.mark.parametrize("name", ["hf_siglip_p16_224", "hf_siglip2_naflex_p16"])
def test_attention_is_fused_on_a_gpu(name):
    encoder = load(name)
    if name in FIXED:
        lowered = jax.jit(lambda e, x: e(x)).lower(encoder, images(name))
    else:
        arguments = ppe.siglip2.batch_naflex(images(name), encoder.config, 64)
        lowered = jax.jit(lambda e, x, s, m: e(x, spatial_shapes=s, mask=m)).lower(
            encoder, *arguments
        )
    assert "cudnn$fmha" in lowered.compile().as_text()
