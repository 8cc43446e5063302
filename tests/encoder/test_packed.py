"""NaFlex pictures that lie behind one another in rows are encoded as padded ones are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.encoders.naflex import ALIGNMENT, first_fit
from pallas_patch_embed.siglip2 import batch_naflex, pack_naflex
from tests.encoder.goldens import checkpoint

NAME, MOST = "hf_siglip2_naflex_p16", 64
GRIDS = [(8, 8), (1, 9), (5, 3), (2, 2), (7, 9), (3, 20), (1, 1), (64, 1), (4, 4), (2, 11)]


def load(dtype="float32", patch_dtype="float32"):
    return ppe.siglip2.load_encoder(checkpoint(NAME), dtype=dtype, patch_dtype=patch_dtype)


def draw(grids=GRIDS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (16 * h, 16 * w, 3), np.uint8) for h, w in grids]


def assert_near(found, wanted, tolerance):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "dtype, patch_dtype, tolerance",
    [("float32", "float32", 1e-5), ("bfloat16", "int8", 1e-2), ("bfloat16", "bfloat16", 1e-2)],
)
def test_packed_pictures_equal_padded_ones(dtype, patch_dtype, tolerance):
    encoder, pictures = load(dtype, patch_dtype), draw()
    patches, shapes, _ = batch_naflex(pictures, encoder.config, MOST)
    wanted = encoder(patches, spatial_shapes=shapes, layers=-2)
    packed = pack_naflex(pictures, encoder.config, MOST, tokens=136)
    found = encoder.packed(packed, layers=-2)
    assert_near(found.pooler_output, wanted.pooler_output, tolerance)
    for field in (lambda y: y.last_hidden_state, lambda y: y.hidden_states[0]):
        for i, tokens in enumerate(packed.unpack(field(found))):
            h, w = GRIDS[i]
            assert tokens.shape[:2] == (h, w)
            assert_near(tokens.reshape(h * w, -1), field(wanted)[i, : h * w], tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pictures_bits_are_the_same_in_every_packing(dtype):
    encoder, pictures = load(dtype, "int8"), draw()
    room = dict(tokens=136, rows=4, number=len(pictures))

    @jax.jit
    def encode(packed):
        output = encoder.packed(packed)
        return output.pooler_output, output.last_hidden_state

    def bits(chosen):
        packed = pack_naflex([pictures[i] for i in chosen], encoder.config, MOST, **room)
        pooled, tokens = map(np.asarray, encode(packed))
        return packed, pooled, packed.unpack(tokens)

    alone = [bits([i]) for i in range(len(pictures))]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(pictures))[: rng.integers(1, len(pictures) + 1)]
        packed, pooled, tokens = bits(chosen)
        if seed % 2:  # The places of the pictures move, too.
            moved = shuffled(packed, rng)
            pooled, of_rows = map(np.asarray, encode(moved))
            tokens = moved.unpack(of_rows)
        for place, i in enumerate(chosen):
            np.testing.assert_array_equal(pooled[place], alone[i][1][0])
            np.testing.assert_array_equal(tokens[place], alone[i][2][0])


def shuffled(packed, rng):
    """Permutes the rows, and moves what is in them by a multiple of 8 tokens if there is room."""
    rows = rng.permutation(len(packed.patches))
    patches = packed.patches[rows]
    starts = packed.starts.copy()
    starts[:, 0] = np.argsort(rows)[starts[:, 0]]
    used = np.abs(patches).sum(-1) > 0
    for row in range(len(rows)):
        room = patches.shape[1] - (np.flatnonzero(used[row]).max(initial=-1) + 1)
        shift = ALIGNMENT * int(rng.integers(0, room // ALIGNMENT + 1))
        patches[row] = np.roll(patches[row], shift, axis=0)
        starts[starts[:, 0] == row, 1] += shift
    return dataclasses.replace(packed, patches=patches, starts=starts)


def test_a_folder_of_mixed_sizes_fills_the_rows():
    rng = np.random.default_rng(0)
    tokens = 8 * 1024
    for low in (1, 100, 600):
        lengths = rng.integers(low, 1025, 300)
        places, rows = first_fit(lengths, tokens)
        assert lengths.sum() >= 0.94 * tokens * rows
        taken = np.zeros((rows, tokens), int)
        for (row, start), length in zip(places, lengths):
            assert start % ALIGNMENT == 0 and start + length <= tokens
            taken[row, start : start + length] += 1
        assert taken.max() == 1 and taken.sum() == lengths.sum()


def test_an_exported_program_takes_packed_pictures():
    encoder = load()
    packed = pack_naflex(draw(GRIDS[:3]), encoder.config, MOST, tokens=72)
    exported = jax.export.export(jax.jit(lambda e, x: e.packed(x).pooler_output))(encoder, packed)
    wanted = encoder.packed(packed).pooler_output
    restored = jax.export.deserialize(exported.serialize())
    assert_near(restored.call(encoder, packed), wanted, 1e-6)


def test_an_empty_place_has_no_influence_and_nothing_is_nan():
    encoder = load()
    some = pack_naflex(draw(GRIDS[:2]), encoder.config, MOST, rows=2, number=5)
    found = encoder.packed(some)
    assert np.isfinite(found.pooler_output).all() and np.isfinite(found.last_hidden_state).all()
    assert some.fill == 73 / (2 * 512)


BAD = [
    (dict(tokens=56), "tokens is 56, expected a multiple of 8 and at least 64"),
    (dict(tokens=100), "tokens is 100, expected a multiple of 8"),
    (dict(tokens=0), "tokens is 0, expected a positive integer"),
    (dict(rows=1, tokens=64), "rows is 1, but the images need 6 rows of 64 tokens"),
    (dict(number=3), "number is 3, but there are 10 images"),
    (dict(rows=True), "rows is True, expected a positive integer"),
]


@pytest.mark.parametrize("options, text", BAD)
def test_what_does_not_fit_is_refused(options, text):
    with pytest.raises(ValueError, match=f"pack_naflex: {text}"):
        pack_naflex(draw(), load().config, MOST, **options)


def test_a_picture_that_is_too_large_is_refused():
    with pytest.raises(
        ValueError, match=r"pack_naflex: image 1 .* has 72 patches, expected at most"
    ):
        pack_naflex(draw([(1, 1), (8, 9)]), load().config, MOST)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(patches=np.zeros((1, 256, 700), np.float32)), ValueError, r"expected \[R, T, 768\]"),
        (dict(patches=np.zeros((1, 100, 768), np.float32)), ValueError, "T is a multiple of 8"),
        (dict(patches=np.zeros((1, 256, 768), np.int32)), TypeError, "dtype int32"),
        (dict(starts=np.array([[0, 0], [0, 100]])), ValueError, "from a multiple of 8 on"),
        (dict(starts=np.zeros((2, 2), np.int32)), ValueError, "which no other image has"),
        (dict(starts=np.array([[0, 0], [0, 506]])), ValueError, "image 1 has .1, 9. patches"),
        (dict(starts=np.array([[0, 0], [1, 0]])), ValueError, "within 1 rows"),
        (dict(starts=np.array([[0, 0], [0, -8]])), ValueError, "which no other image has"),
        (dict(starts=np.zeros((2, 2))), ValueError, r"starts float64\[2, 2\], expected integers"),
        (dict(spatial_shapes=np.array([[9, 9], [1, 1]])), ValueError, "at most 64 patches"),
    ],
)
def test_hand_made_places_are_checked(change, error, text):
    encoder = load()
    packed = pack_naflex(draw(GRIDS[:2]), encoder.config, MOST)
    with pytest.raises(error, match=text):
        encoder.packed(dataclasses.replace(packed, **change))


def test_an_encoder_of_one_size_refuses_packed_pictures():
    packed = pack_naflex(draw(GRIDS[:1]), load().config, MOST)
    fixed = ppe.siglip2.load_encoder(checkpoint("hf_siglip_p14_224"))
    with pytest.raises(TypeError, match=r"encoder\.packed: this encoder accepts only"):
        fixed.packed(packed)


def test_pixels_out_of_range_are_refused_or_clipped():
    encoder = load()
    packed = pack_naflex(draw(GRIDS[:1]), encoder.config, MOST)
    wild = dataclasses.replace(packed, patches=packed.patches * 3)
    with pytest.raises(ValueError, match=r"encoder: patches"):
        encoder.packed(wild)
    clipped = dataclasses.replace(packed, patches=np.clip(wild.patches, -1, 1))
    assert_near(
        encoder.packed(wild, clip=True).pooler_output, encoder.packed(clipped).pooler_output, 1e-6
    )
    assert jnp.isfinite(encoder.packed(clipped).pooler_output).all()
