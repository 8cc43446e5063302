"""The patch embeddings of other ViTs: normalisation by colour, prefix tokens, frames."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS
from pallas_patch_embed.base.chips import B200, H200, RTX_4090, Target
from pallas_patch_embed.base.problem import VIT_SHAPES, PatchGeometry, padded
from tests.operator.bounds import DTYPES, assert_agrees, assert_bit_equal, draw_images
from tests.operator.strict import strict_settings
from tests.repository import DATA, environment
from tests.short_suite import keep

# Bounds on the relative Frobenius norm of the difference from transformers' result in float64.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 1e-2, "float8_e4m3fn": 1e-1, "int8": 1e-2}
RNG = np.random.default_rng(0)


def load(name):
    return dict(np.load(DATA / "vits" / f"{name}.npz"))


def pack(name, dtype, grid=None):
    """Packs the params of a model, as its users would."""
    x = load(name)
    mean, std = x["normalisation"]
    how = dict(dtype=dtype, image_mean=mean, image_std=std)
    match name:
        case "clip":
            kernel, positions = x["patch_embedding.weight"], x["position_embedding.weight"]
            token = x["class_embedding"][None]
            return ppe.pack(
                kernel, None, positions, patch_size=7, layout="OIHW", prefix=token, **how
            )
        case "vit" | "dinov2":
            kernel, bias = (x[f"patch_embeddings.projection.{part}"] for part in ("weight", "bias"))
            positions = x["interpolated"] if grid else x["position_embeddings"]
            how |= dict(prefix=x["cls_token"], grid=grid)
            return ppe.pack(kernel, bias, positions, patch_size=7, layout="OIHW", **how)
        case "qwen2_vl" | "qwen3_vl":
            kernel, bias = x["proj.weight"], x.get("proj.bias")
            size = kernel.shape[-1]
            return ppe.pack(kernel, bias, None, patch_size=size, layout="OITHW", **how)


def normalised(images, params):
    mean, std = params.image_mean or (0.5,) * 3, params.image_std or (0.5,) * 3
    return np.float32((images / 255 - np.float64(mean)) / np.float64(std))


def assert_near(y, expected, dtype):
    assert y.shape == expected.shape
    error = np.linalg.norm(np.float64(y) - expected) / np.linalg.norm(expected)
    assert error <= LARGEST_ERROR[dtype]


MODELS = ("clip", "vit", "dinov2", "qwen2_vl", "qwen3_vl")


# The short suite has every model with int8, with or without jit, and one model with all dtypes,
# with and without jit.
@pytest.mark.parametrize(
    "name, dtype, jit",
    keep(
        itertools.product(MODELS, DTYPES, (False, True)),
        lambda case: case[0] == "dinov2" or case[1:] == ("int8", MODELS.index(case[0]) % 2 == 0),
        "compiles a dozen programs for each case",
    ),
    ids=lambda x: x if isinstance(x, str) else "jit" * x,
)
def test_models_embeddings_are_those_of_transformers(name, dtype, jit):
    x, grid = load(name), (3, 4) if name == "dinov2" else None
    params = pack(name, dtype, grid)
    embed = functools.partial(ppe.embed_images, out_dtype="float32")
    embed = jax.jit(embed) if jit else embed
    for images in (x["images"], normalised(x["images"], params)):
        assert_near(embed(images, params), x["expected"], dtype)
        patches = ppe.patchify(images, params)
        assert_agrees(embed(images, params), patches, params, *table_of(params, patches))


def table_of(params, patches):
    """Returns the table of params that have a prefix but no positions."""
    if params.table is None or params.has_positions:
        return ()
    rows = patches.shape[-2] - params.prefix
    return (np.concatenate([params.table, np.broadcast_to(params.offset, (rows, params.N))]),)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dinov2_is_right_at_the_size_of_its_positions(dtype):
    x = load("dinov2")
    y = ppe.embed_images(x["images"][:, :, :21], pack("dinov2", dtype), out_dtype="float32")
    assert_near(y, x["square"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dinov2s_positions_come_with_the_call_and_its_mask_afterwards(dtype):
    x = load("dinov2")
    params, positions = pack("dinov2", dtype), x["interpolated"][:, 1:]
    y = ppe.embed_images(x["images"], params, position_embedding=positions[0], out_dtype="float32")
    assert_near(y, x["expected"], dtype)
    masked = np.pad(x["mask"], ((0, 0), (1, 0)))[..., None]
    y = jnp.where(masked, x["mask_token"] + x["interpolated"], y)
    assert_near(y, x["masked"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_qwens_processor_go_in_as_they_are(dtype):
    x, params = load("qwen2_vl"), pack("qwen2_vl", dtype)
    patches = ppe.encode_patches(x["rows"], params)
    y = ppe.patch_embed(patches, params, out_dtype="float32")
    assert_near(y, x["of_rows"], dtype)


# The tests from here on use params with features that SigLIP's do not have.
NORMALISATION = dict(image_mean=(0.48, 0.46, 0.41), image_std=(0.27, 0.26, 0.28))


def draw(kind, dtype, rng=RNG, N=8):
    """Draws params and images of a kind."""
    kernel, bias = rng.normal(size=(4, 4, 3, N)), rng.normal(size=N)
    positions, prefix = rng.normal(size=(2, 3, N)), rng.normal(size=(2, N))
    how, images = dict(patch_size=4, dtype=dtype), draw_images(rng, 2, 8, 12, 3)
    match kind:
        case "normalised":
            return ppe.pack(kernel, bias, positions, **how, **NORMALISATION), images
        case "prefix":
            return ppe.pack(kernel, bias, positions, **how, prefix=prefix), images
        case "prefix alone":
            return ppe.pack(kernel, bias, None, **how, prefix=prefix), images
        case "frames":
            kernel = rng.normal(size=(N, 3, 2, 4, 4))
            positions = rng.normal(size=(12, N))
            how |= dict(layout="OITHW", grid=(2, 2, 3))
            return ppe.pack(kernel, bias, positions, **how), draw_images(rng, 2, 4, 8, 12, 3)
        case "all":
            kernel = rng.normal(size=(N, 3, 2, 4, 4))
            positions = rng.normal(size=(1, 14, N))
            how |= dict(layout="OITHW", grid=(2, 2, 3), prefix=prefix[None], **NORMALISATION)
            return ppe.pack(kernel, bias, positions, **how), draw_images(rng, 2, 4, 8, 12, 3)


KINDS = ("normalised", "prefix", "prefix alone", "frames", "all")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_kind_and_dtype = pytest.mark.parametrize(
    "kind, dtype",
    keep(
        itertools.product(KINDS, DTYPES),
        lambda case: case[0] == "all" or case[1] == "int8",
        "compiles several programs; the short suite has every kind in int8, `all` in all dtypes",
    ),
)


@each_kind_and_dtype
def test_uint8_and_the_equal_normalised_images_give_identical_patches(kind, dtype):
    params, images = draw(kind, dtype)
    wanted = ppe.patchify(images, params)
    assert_bit_equal(ppe.patchify(normalised(images, params), params), wanted)
    assert_bit_equal(jax.jit(ppe.patchify)(normalised(images, params), params), wanted)
    assert not np.float32(wanted[..., : params.prefix, :]).any()
    assert_bit_equal(
        ppe.embed_images(images, params, out_dtype="float32"),
        ppe.patch_embed(wanted, params, out_dtype="float32"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_of_videos_are_in_the_order_channel_frame_height_width(dtype):
    params, videos = draw("frames", dtype)
    # axes: video, time, frame, row, y, column, x, colour
    cut = videos.reshape(2, 2, 2, 2, 4, 3, 4, 3)
    rows = cut.transpose(0, 1, 3, 5, 7, 2, 4, 6).reshape(2, 12, 96)
    assert_bit_equal(ppe.patchify(videos, params), ppe.encode_patches(rows, params))


@each_kind_and_dtype
def test_traced_packing_gives_the_same_bits(kind, dtype):
    for seed in range(3):
        wanted, _ = draw(kind, dtype, np.random.default_rng(seed))
        traced = jax.jit(lambda seed=seed: draw(kind, dtype, np.random.default_rng(seed))[0])()
        assert jax.tree.structure(traced) == jax.tree.structure(wanted)
        jax.tree.map(assert_bit_equal, traced, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_constant_of_the_normalisation_is_exact_to_rounding(dtype):
    params, _ = draw("normalised", dtype, np.random.default_rng(5))
    rng = np.random.default_rng(5)
    _, bias = rng.normal(size=(4, 4, 3, 8)), np.float32(rng.normal(size=8))
    weight = np.float64(params.weight)[:, :48] * np.float64(params.scale)[:, None]
    mean = np.float64(NORMALISATION["image_mean"])
    if dtype == "int8":
        weight = weight * 127.5
    shift = 1 - 2 * mean + (1 / 255 if dtype == "int8" else 0)
    wanted = bias + weight.reshape(8, 16, 3).sum(1) @ shift
    magnitude = np.abs(bias) + np.abs(weight).reshape(8, 16, 3).sum(1) @ np.abs(shift)
    # Each of the three constants is rounded twice, and added once.
    assert (np.abs(params.offset - wanted) <= 9 * 2.0**-24 * magnitude).all()


@each_kind
def test_saved_params_load_unchanged(kind, tmp_path):
    params, _ = draw(kind, "int8")
    params.save(tmp_path / "params")
    loaded = ppe.PatchEmbedParams.load(tmp_path / "params")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(assert_bit_equal, loaded, params)


@pytest.mark.parametrize("version", ["1", "2"])
def test_files_of_earlier_versions_load_with_three_channels(tmp_path, version):
    more = dict(image_mean=None, image_std=None, prefix=1, frames=None) if version == "2" else {}
    params = ppe.pack(
        RNG.normal(size=(4, 4, 3, 8)),
        None,
        RNG.normal(size=(6, 8)),
        patch_size=4,
        grid=(2, 3),
        prefix=RNG.normal(size=(1, 8)) if more else None,
    )
    params.save(tmp_path / "new")
    tensors = safetensors.numpy.load_file(tmp_path / "new")
    static = dict(patch_size=4, grid=[2, 3], dtype="int8", K=48) | more
    metadata = {
        "format": f"pallas_patch_embed.PatchEmbedParams.{version}",
        "static": json.dumps(static),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "old", metadata)
    loaded = ppe.PatchEmbedParams.load(tmp_path / "old")
    assert loaded.channels == 3
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(assert_bit_equal, loaded, params)


@each_kind
def test_export_keeps_what_params_say(kind):
    params, images = draw(kind, "int8")
    exported = jax.export.export(jax.jit(ppe.embed_images))(images, params)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.in_tree == exported.in_tree
    assert_bit_equal(restored.call(images, params), ppe.embed_images(images, params))


def test_programs_exported_before_take_the_defaults():
    from pallas_patch_embed.patch_embedding.params import _with_defaults

    static = _with_defaults([16, [2, 3], "int8", 768])
    assert static == (16, (2, 3), "int8", 768, None, None, 0, None, 3)


@each_kind
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
def test_sharded_batches_and_widths_need_no_communication(kind, explicit):
    kind_of_axis = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind_of_axis,) * 2)
    params, images = draw(kind, "int8")
    wanted = ppe.embed_images(images, params)
    along_n = dict(weight=P("model"), scale=P("model"), offset=P("model"), table=P(None, "model"))
    if params.table is None:
        del along_n["table"]
    leaves = {
        name: jax.device_put(getattr(params, name), NamedSharding(mesh, spec))
        for name, spec in along_n.items()
    }
    sharded = dataclasses.replace(params, **leaves)
    placed = jax.device_put(images, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        embed = jax.jit(ppe.embed_images)
        y = embed(placed, sharded)
        text = embed.lower(placed, sharded).compile().as_text()
    assert_bit_equal(y, wanted)
    assert y.sharding.spec == P("data", None, "model")
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [name for name in collectives if name in text]


@each_kind
def test_vmap_maps_over_images(kind):
    params, images = draw(kind, "int8")
    embed = functools.partial(ppe.embed_images, params=params)
    assert_bit_equal(jax.vmap(embed)(images), embed(images))
    assert_bit_equal(embed(images[0]), embed(images)[0])


def test_positions_for_each_image_leave_the_prefix_its_own():
    params, images = draw("prefix", "float32")
    positions = np.float32(RNG.normal(size=(2, 6, 8)))
    y = ppe.embed_images(images, params, position_embedding=positions, out_dtype="float32")
    bare = dataclasses.replace(params, table=params.table[:2])
    table = np.concatenate(
        [np.broadcast_to(params.table[:2], (2, 2, 8)), np.asarray(params.offset) + positions], 1
    )
    assert_agrees(y, ppe.patchify(images, params), params, table)
    assert_bit_equal(
        ppe.embed_images(images, bare, position_embedding=positions, out_dtype="float32"), y
    )


@pytest.mark.parametrize("spec", [P("data"), P("data", None, "model"), P(None, "data")], ids=str)
def test_positions_behind_a_prefix_may_be_sharded_explicitly(spec):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    params, images = draw("prefix", "int8")
    positions = np.float32(RNG.normal(size=(2, 6, 8)))
    wanted = ppe.embed_images(images, params, position_embedding=positions)
    with jax.set_mesh(mesh):
        placed = jax.device_put(positions, NamedSharding(mesh, spec))
        for embed in (ppe.embed_images, jax.jit(ppe.embed_images)):
            assert_bit_equal(embed(images, params, position_embedding=placed), wanted)


def test_packed_positions_behind_a_prefix_may_be_sharded_explicitly():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,))
    kernel, positions, prefix = (
        np.float32(RNG.normal(size=size)) for size in ((4, 4, 3, 8), (6, 8), (1, 8))
    )
    pack = functools.partial(ppe.pack, patch_size=4, grid=(2, 3), prefix=prefix)
    with jax.set_mesh(mesh):
        packed = pack(kernel, None, jax.device_put(positions, NamedSharding(mesh, P("data"))))
    assert_bit_equal(packed.table, pack(kernel, None, positions).table)


@pytest.mark.parametrize(
    "kind",
    keep(
        KINDS,
        lambda kind: kind in ("prefix alone", "all"),
        "compiles five programs twice; only a prefix without positions is missing in `all`",
    ),
)
def test_strict_settings_change_no_bit(kind):
    params, images = draw(kind, "float32")
    rows = ppe.patchify(images, params)[:, params.prefix :, : params.K]
    positions = np.float32(RNG.normal(size=(rows.shape[1], 8)))
    pixels = np.float32(
        (rows - params.encoding.undo(params.K)[1]) / params.encoding.undo(params.K)[0]
    )
    floats, pixels, positions = jax.device_put((normalised(images, params), pixels, positions))

    def call():
        one = functools.partial(ppe.embed_images, params=params)
        return (
            one(floats),
            one(floats, position_embedding=positions),
            jax.vmap(one)(floats),
            jax.jit(one)(floats),
            ppe.encode_patches(pixels, params),
        )

    wanted = call()
    jax.clear_caches()
    with strict_settings():
        found = call()
    jax.tree.map(assert_bit_equal, found, wanted)


def test_explain_names_what_is_cut():
    params, images = draw("all", "int8")
    text = str(ppe.explain(images, params))
    assert "patches [2, 14, 128] int8 of uint8 videos, 2 frames per patch, 2 rows of prefix" in text
    assert "14 rows" not in text
    with pytest.raises(
        NotImplementedError, match="a kernel cuts only images of 3 channels itself, no videos"
    ):
        ppe.embed_images(images, params, cut="kernel", backend="triton")
    assert "frames 2" in repr(params) and "prefix 2" in repr(params)
    assert "mean (0.48, 0.46, 0.41)" in repr(params)


@pytest.mark.parametrize("target", [Target("cuda", H200), Target("cuda", B200)], ids=str)
@pytest.mark.parametrize("geometry", [PatchGeometry(16, None, 5), PatchGeometry(16, 2)], ids=str)
def test_kernels_serve_what_xla_has_cut(target, geometry):
    from pallas_patch_embed.backends import explain
    from pallas_patch_embed.base.problem import Problem

    shape = (8, 224, 224, 3) if geometry.frames is None else (8, 2, 224, 224, 3)
    patches = geometry.patches_shape(shape)
    operands = [
        jax.ShapeDtypeStruct(x, d)
        for x, d in (
            (shape, "uint8"),
            ((768, patches[-1]), "int8"),
            ((768,), "float32"),
            ((patches[-2], 768), "bfloat16"),
        )
    ]
    problem = Problem.of(*operands, out_dtype="bfloat16", geometry=geometry)
    given = explain(problem.of_patches, target)
    assert {(r.backend, r.serves) for r in explain(problem, target)} == {
        (r.backend, r.serves) for r in given
    }
    # If the CUDA library is built, its kernel for images on Hopper differs from that for patches.
    assert {explain(problem, target).chosen, given.chosen} <= set(BACKENDS) - {"xla"}


BAD_PACK = {
    "mean of two": (
        dict(image_mean=(0.5, 0.5)),
        "image_mean is .*three numbers in .* red, green and blue",
    ),
    "std of zero": (dict(image_std=(0.5, 0, 0.5)), "image_std is .*all positive"),
    "mean of text": (dict(image_mean="abc"), "image_mean is 'abc'"),
    "mean of NaN": (dict(image_mean=(np.nan, 0, 0)), "image_mean is"),
    "mean of 255": (dict(image_mean=(123.7, 116.3, 103.5)), "image_mean is .*divide them by 255"),
    "std of 255": (
        dict(image_mean=(0,) * 3, image_std=(255,) * 3),
        "image_std is .*divide them by",
    ),
    "overflow": (
        dict(image_std=(0.5, 0.25, 0.5), kernel=np.full((4, 4, 3, 8), 2e38), dtype="float32"),
        "kernel has 384 values that are NaN, infinite or beyond 1.7e.38, .* that image_std allows",
    ),
    "prefix' N": (dict(prefix=np.zeros((2, 7))), r"prefix has shape \[2, 7\], expected \[R, 8\]"),
    "prefix' rank": (dict(prefix=np.zeros(8)), r"prefix\[None\]"),
    "prefix of two": (dict(prefix=np.zeros((2, 1, 8))), r"\[1, R, 8\]"),
    "NaN prefix": (dict(prefix=np.full((2, 8), np.nan)), "prefix has 16 values"),
    "ambiguous": (
        dict(prefix=np.zeros((3, 8)), position_embedding=np.zeros((4, 8))),
        "a prefix of 3 rows, and both 4 and 1 positions form a square",
    ),
    "no square": (
        dict(prefix=np.zeros((1, 8)), position_embedding=np.zeros((7, 8))),
        "a prefix of 1 rows, and neither 7 nor 6 positions form a square",
    ),
    "grid": (
        dict(prefix=np.zeros((1, 8)), position_embedding=np.zeros((9, 8)), grid=(2, 3)),
        "6 patches and the prefix has 1 rows",
    ),
    "kernel of images": (dict(layout="OITHW"), r"expected \[N, C, T, p, p\]"),
}


@pytest.mark.parametrize("case", BAD_PACK)
def test_bad_arguments_of_pack_are_refused(case):
    how, message = BAD_PACK[case]
    how = dict(position_embedding=None, bias=None, kernel=RNG.normal(size=(4, 4, 3, 8))) | how
    with pytest.raises(ValueError, match=message):
        ppe.pack(patch_size=4, **how)


@pytest.mark.parametrize("change", [dict(frames=2), dict(patch_size=5), dict(K=40)], ids=str)
def test_params_whose_K_is_not_that_of_their_patches_are_refused(change):
    params = ppe.pack(RNG.normal(size=(4, 4, 3, 8)), None, None, patch_size=4)
    with pytest.raises(ValueError, match="params have K = "):
        ppe.patchify(draw_images(RNG, 2, 10, 10, 3), dataclasses.replace(params, **change))


def test_bad_images_and_patches_are_refused():
    params, videos = draw("frames", "int8")
    with pytest.raises(ValueError, match="F is a multiple of 2 frames"):
        ppe.embed_images(videos[:, :3], params)
    with pytest.raises(ValueError, match="F is a multiple of 2 frames"):
        ppe.patchify(videos[0, 0], params)
    with pytest.raises(ValueError, match=r"1 x 2 x 3 grid .* positions for a 2 x 2 x 3 grid"):
        ppe.embed_images(videos[:, :2], params)
    with pytest.raises(ValueError, match=r"expected \[..., S, 96\].* and 2 frames"):
        ppe.encode_patches(np.zeros((12, 48), np.uint8), params)
    params, images = draw("prefix", "int8")
    with pytest.raises(ValueError, match=r"expected \[6, 8\] .*2 rows of prefix"):
        ppe.embed_images(images, params, position_embedding=np.zeros((8, 8), np.float32))
    with pytest.raises(
        ValueError, match="2 rows, but the params have a prefix, which needs 2 rows"
    ):
        ppe.patch_embed(np.zeros((2, 128), np.int8), params)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_the_range_check_knows_the_normalisation(place):
    params, images = draw("all", "int8")
    good = normalised(images, params)
    assert np.abs(good).max() > 1.2
    ppe.embed_images(place(good), params)
    rows = ppe.patchify(images, params)[:, 2:, :96]
    pixels = np.float32((2 * np.float32(rows) + 1) / 255)
    colours = np.repeat(np.float64(list(NORMALISATION.values())), 32, axis=-1)
    ppe.encode_patches(place(np.float32(((pixels + 1) / 2 - colours[0]) / colours[1])), params)
    for bad in (good * 1.1, images.astype(np.float32), np.where(good == good.max(), np.nan, good)):
        bad = place(np.float32(bad))
        with pytest.raises(ValueError, match=r"after image_mean=.*are undone"):
            ppe.embed_images(bad, params)
        ppe.embed_images(bad, params, clip=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_images_normalised_in_their_own_dtype_are_in_range(dtype):
    imagenet = dict(image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225))
    params = ppe.pack(RNG.normal(size=(4, 4, 3, 8)), None, None, patch_size=4, **imagenet)
    mean, std = (jnp.asarray(x, dtype) for x in imagenet.values())
    ends = jnp.asarray(np.array([0, 255]).repeat(48).reshape(2, 4, 4, 3), dtype)
    images = (ends / jnp.asarray(255, dtype) - mean) / std
    wanted = ppe.patchify(np.uint8(ends), params)
    assert_bit_equal(ppe.patchify(images, params), ppe.patchify(images, params, clip=True))
    assert np.abs(np.int32(ppe.patchify(images, params)) - np.int32(wanted)).max() <= 1


PASSES = """
import re
from benchmarks.offline_compile import compiler, optimized_hlo

with compiler():
    import jax
    import pallas_patch_embed as ppe
    from pallas_patch_embed.base import chips

    for frames in (None, 2):
        def embed(images, kernel, bias, positions, prefix):
            layout = "OIHW" if frames is None else "OITHW"
            how = dict(patch_size=16, layout=layout, grid=(14, 14))
            return ppe.pack(kernel, bias, positions, prefix=prefix, **how)

        kernel = (768, 3, 16, 16) if frames is None else (768, 3, frames, 16, 16)
        images = (8, 224, 224, 3) if frames is None else (8, frames, 224, 224, 3)
        shapes = (kernel, (768,), (197, 768), (1, 768))
        f32 = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        images = jax.ShapeDtypeStruct(images, "uint8")
        params = jax.eval_shape(lambda *x: embed(None, *x), *f32)
        run = lambda images, params: ppe.embed_images(images, params, backend="mosaic_sm90")
        hlo = optimized_hlo(run, (images, params), chips.H200)
        entry = hlo[hlo.index("ENTRY") :].splitlines()
        kinds = "fusion|copy|transpose|reduce|pad|concatenate|slice|custom-call"
        print(*re.findall(rf" = .* ({kinds})[(]", chr(10).join(entry)))
"""


@pytest.mark.usefixtures("compilers")
def test_a_prefix_or_frames_add_no_pass():
    result = subprocess.run(
        [sys.executable, "-c", PASSES], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["fusion custom-call"] * 2


@pytest.mark.parametrize("chip", [RTX_4090, H200, B200], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_every_kernel_serves_the_named_shapes_or_says_why_not(chip, dtype):
    from pallas_patch_embed.backends import explain
    from pallas_patch_embed.base.problem import Problem

    for shape in VIT_SHAPES:
        problem = Problem(
            patches=(8, shape.S, padded(shape.K)),
            weight=(shape.N, padded(shape.K)),
            scale=(shape.N,),
            table=(shape.S, shape.N),
            dtype=dtype,
            table_dtype="bfloat16",
            out_dtype="bfloat16",
        )
        rows = {row.backend: row for row in explain(problem, Target("cuda", chip))}
        assert all(row.serves or row.reason for row in rows.values())
        pallas = {(9, 0): "mosaic_sm90", (10, 0): "mosaic_sm100"}.get(chip.capability)
        assert pallas is None or rows[pallas].serves, rows[pallas]
