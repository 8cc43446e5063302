"""Text encoders in 8 bits: the images' calibration and rounding, on ids instead of pictures."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from pallas_patch_embed.encoders.calibration import (
    FILE,
    FILES,
    cosine_distances,
    encode,
    measured,
)
from pallas_patch_embed.encoders.eight_bits import prepare
from pallas_patch_embed.encoders.encoder import LAYERS
from pallas_patch_embed.encoders.sentences import SENTENCES
from pallas_patch_embed.encoders.text_encoder import ends_of
from tests.encoder.test_eight_bits import FAMILIES, LARGEST, blocks_of, error
from tests.encoder.test_text import COLLECTIVE, FLOAT32, NAMES, in_big_vision, siglip_arrays
from tests.encoder.text_goldens import TEXT, WHOLE, edit, expected, unpacked
from tests.short_suite import keep

# SigLIP, whose tokens attend to padding, and CLIP, which is causal and pooled at the end token.
SOME = keep(NAMES, {"siglip", "clip"}.__contains__, "each checkpoint compiles for seconds")

# Those with each dtype; the short suite has int8 for both families, and float8 once.
EACH = keep(
    [(name, dtype) for name in NAMES for dtype in LARGEST],
    {("siglip", "int8"), ("clip", "int8"), ("clip", "float8_e4m3fn")}.__contains__,
    "each checkpoint compiles for seconds",
)


def ids_of(name):
    """Returns the ids of some sentences, or where no tokenizer belongs to the golden, random ones.

    Sentences of a CLIP have tokens behind their first end token, and random ones do, too.
    """
    data = expected(name)
    return (data["ids"][:40:2] if name in WHOLE else data["ids_64"]).astype(np.int32)


@functools.cache
def load(name, **arguments):
    return ppe.load_text_encoder(TEXT / name, **arguments)


@functools.cache
def calibrated(name, dtype="int8"):
    return ppe.calibrate(load(name, dtype="float32"), ids_of(name), dtype=dtype)


def load_in_8_bits(name, dtype="int8", **arguments):
    given = dict(dtype=dtype, calibration=calibrated(name, dtype))
    return ppe.load_text_encoder(TEXT / name, **(given | arguments))


def deciding(encoder, ids):
    """Returns the mask [N, L] of the tokens that change the vectors of texts."""
    if not encoder.config.causal:
        return np.ones(ids.shape, bool)
    return np.arange(ids.shape[1]) <= np.asarray(ends_of(ids, encoder.config))[:, None]


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


# Values


@pytest.mark.parametrize("name", SOME)
def test_statistics_are_those_of_the_tokens_that_decide(name):
    encoder, ids = load(name, dtype="float32"), ids_of(name)
    inside = deciding(encoder, ids)
    assert inside.all() == (not encoder.config.causal)
    states = np.asarray(encoder(ids, layers=0).hidden_states[0], np.float64)[inside]
    norm = {key: x[0].astype(np.float64) for key, x in blocks_of(encoder)["norm1"].items()}
    x = states - states.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + encoder.config.eps)
    x = x * norm["scale"] + norm["bias"]
    found = measured(encoder, ids)["qkv"]
    # Least and largest are also those of zeros, which stand for tokens that are left out.
    zero = 0 if encoder.config.causal else x
    least, largest = np.minimum(x, zero).min(0), np.maximum(x, zero).max(0)
    for part, exact in zip(found, (least, largest, x.mean(0), x.T @ x / len(x))):
        assert np.abs(part[0] - exact).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("name, dtype", EACH)
def test_before_rounding_the_prepared_blocks_compute_the_same(name, dtype):
    encoder, ids = load(name, dtype="float32"), ids_of(name)
    prepared = prepare(blocks_of(encoder), measured(encoder, ids), encoder.config, dtype)
    changed, wanted = dataclasses.replace(encoder, blocks=prepared.blocks)(ids), encoder(ids)
    assert error(changed.text_embeds, wanted.text_embeds) <= FLOAT32
    assert error(changed.last_hidden_state, wanted.last_hidden_state) <= FLOAT32


# The relative error that rounding an operand causes, and how many operands each text passes: inputs
# and weights of 4 layers in 3 blocks. A row of 16 numbers, the width of these checkpoints, has a
# largest number of about 2 standard deviations, so a step of int8 is 2 / 127 of one, and the error
# step / sqrt(12). A number of float8 with 3 bits behind the first errs by at most 2^-4 of itself,
# and on average by 2^-4 / sqrt(3) * 0.7. Layers add to a residual, so not all of it arrives.
OPERAND = {"int8": 2 / 127 / 12**0.5, "float8_e4m3fn": 2**-4 / 3**0.5 * 0.7}
OPERANDS = 2 * 4 * 3


@pytest.mark.parametrize("name, dtype", EACH)
def test_an_encoder_in_8_bits_is_as_exact_as_its_operands_and_its_calibration(name, dtype):
    encoder, ids = load_in_8_bits(name, dtype, min_cosine=0), ids_of(name)
    (run,) = encoder.blocks
    assert all(run[layer]["weight"].dtype == dtype for layer in LAYERS)
    assert repr(encoder).startswith(f"TextEncoder(bfloat16, blocks in {dtype}, ")
    assert encoder.embedding.dtype == "bfloat16" and encoder.positions.dtype == "float32"
    found, exact = encoder(ids), load(name, dtype="float32")(ids)
    # bfloat16 errs by about 2^-8 in 6 residuals, whatever the dtype of the layers.
    bound = OPERAND[dtype] * OPERANDS**0.5 + 6**0.5 * 2**-8
    assert error(found.text_embeds, exact.text_embeds) <= bound
    # Nothing that was calibrated is behind the end token of a CLIP.
    inside = deciding(encoder, ids)
    states = [np.asarray(y.last_hidden_state)[inside] for y in (found, exact)]
    assert error(*states) <= bound
    # Every element, in units of the states' deviation: 5 times what one has on average.
    difference = np.abs(states[0].astype(np.float32) - states[1])
    assert difference.max() <= 5 * bound * states[1].std()
    distances = cosine_distances(
        *(np.asarray(y.text_embeds, np.float32) for y in (found, exact))
    ).mean()
    said = calibrated(name, dtype)
    # The measurement rounds the same numbers, but adds float32 instead of bfloat16, and takes 16
    # of the texts.
    assert 0.5 * said.losses.sum() <= distances <= 2.5 * (said.losses.sum() + said.bfloat16)


# Loading


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_saved_calibration_gives_the_same_encoder(tmp_path, dtype):
    calibrated("clip", dtype).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILES["text"]]
    assert ppe.Calibration.load(tmp_path, "text").tower == "text"
    found = ppe.Calibration.load(tmp_path / FILES["text"])
    assert repr(found) == "Calibration(20 texts, given by the user)"
    for given in (tmp_path, tmp_path / FILES["text"]):
        same(load_in_8_bits("clip", dtype, calibration=given), load_in_8_bits("clip", dtype))


def test_the_calibrations_of_both_towers_are_found_beside_the_checkpoint(tmp_path):
    path = shutil.copytree(TEXT / "clip", tmp_path / "clip")
    said = calibrated("clip")
    said.save(path)
    dataclasses.replace(said, tower="vision").save(path)
    assert {FILE, FILES["text"]} <= {file.name for file in path.iterdir()}
    same(ppe.load_text_encoder(path, dtype="int8"), load_in_8_bits("clip"))
    # The vision encoder finds the other file, which is not of its weights.
    with pytest.raises(ValueError, match=r"20 pictures, .* is of an encoder with other weights"):
        ppe.load_encoder(path, dtype="int8")
    with pytest.raises(ValueError, match=r"20 texts, .* is of a text encoder, but this is"):
        ppe.load_encoder(path, dtype="int8", calibration=said)


@pytest.mark.parametrize("stacked", [False, True])
def test_big_vision_files_load_as_the_same_encoder(tmp_path, stacked):
    path = tmp_path / "params.npz"
    np.savez(path, **in_big_vision(siglip_arrays(), stacked=stacked))
    said = calibrated("siglip")
    found = ppe.siglip2.load_text_encoder(path, dtype="int8", calibration=said)
    same(found, load_in_8_bits("siglip"))
    with pytest.raises(ValueError, match=r"there is no calibration, and no tokenizer .*Pass cal"):
        ppe.load_text_encoder(path, dtype="int8")


def test_layers_that_hurt_stay_in_bfloat16_until_the_cosine_is_reached():
    said, ids = calibrated("siglip"), ids_of("siglip")
    exact = encode(load("siglip", dtype="float32"), ids)
    half = 1 - said.bfloat16 - said.losses.sum() / 2
    encoder = load_in_8_bits("siglip", min_cosine=half)
    kept = said.kept(half, blocks_of(load("siglip", dtype="float32")))
    assert 0 < len(kept) < said.losses.size
    for block, layer in kept:
        assert f"{layer} of block {block}" in repr(encoder)
    some, every = (
        cosine_distances(encode(e, ids), exact).mean() for e in (encoder, load_in_8_bits("siglip"))
    )
    assert some < every
    assert "no layer in 8 bits, " in repr(load_in_8_bits("siglip", min_cosine=1 - said.bfloat16))
    with pytest.raises(ValueError, match=r"min_cosine is 0\.9999999, but bfloat16 has a mean"):
        load_in_8_bits("siglip", min_cosine=0.9999999)


def test_without_a_calibration_the_packages_sentences_are_used_with_a_warning(tmp_path):
    path = unpacked("clip", tmp_path)
    with pytest.warns(UserWarning, match="calibrated on 96 sentences of this package") as record:
        found = ppe.load_text_encoder(path, dtype="int8")
    assert record[0].filename == __file__
    ids = ppe.load_tokenizer(path)(SENTENCES)
    assert len(set(SENTENCES)) == len(ids) == 96
    said = ppe.calibrate(load("clip", dtype="float32"), ids)
    same(found, load_in_8_bits("clip", calibration=said))
    edit(path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    with pytest.raises(ValueError, match=r"no tokenizer .*'LlamaTokenizer'.* Pass calibration="):
        ppe.load_text_encoder(path, dtype="int8")


# Calls


@pytest.mark.slow("compiles an encoder several times")
@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_it_works_under_vmap_and_export(name):
    encoder, ids = load_in_8_bits(name), ids_of(name)[:4]
    wanted = encoder(ids).text_embeds
    of_one = jax.vmap(lambda x: encoder(x[None]).text_embeds[0])(ids)
    exported = jax.export.export(jax.jit(lambda e, x: (e(x).text_embeds, e)))(encoder, ids)
    found, again = jax.export.deserialize(exported.serialize()).call(encoder, ids)
    same(again, encoder)
    for y in (of_one, found):
        np.testing.assert_array_equal(y, wanted)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.slow("compiles an encoder for four devices")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_a_sharded_batch_needs_no_collective(name, axis_type):
    encoder, ids = load_in_8_bits(name, min_cosine=0), ids_of(name)[:8]
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(axis_type,))
    call = jax.jit(lambda encoder, x: encoder(x).text_embeds)
    with jax.set_mesh(mesh):
        arguments = jax.device_put(
            (encoder, ids), (NamedSharding(mesh, P()), NamedSharding(mesh, P("batch")))
        )
        program = call.lower(*arguments).compile()
        found = program(*arguments)
    assert not COLLECTIVE.search(program.as_text())
    # XLA fuses this program differently, so other intermediate results are rounded to bfloat16.
    assert error(found, encoder(ids).text_embeds) <= 2**-7


# Refusals


def test_faults_are_named():
    exact = load("clip", dtype="float32")
    with pytest.raises(TypeError, match=r"calibrate\(encoder, load_tokenizer\(source\)\(texts\)\)"):
        ppe.calibrate(exact)
    with pytest.raises(TypeError, match="text encoder: ids is list"):
        ppe.calibrate(exact, ["a cat"])
    with pytest.raises(TypeError, match="ids have dtype float32"):
        ppe.calibrate(exact, ids_of("clip").astype(np.float32))
    with pytest.raises(ValueError, match="there are no images or texts"):
        ppe.calibrate(exact, ids_of("clip")[:0])
    with pytest.raises(TypeError, match="or such a TextEncoder from load_text"):
        ppe.calibrate(load_in_8_bits("clip"), ids_of("clip"))
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but calibration and min_cosine"):
        ppe.load_text_encoder(TEXT / "clip", calibration=calibrated("clip"))
    with pytest.raises(ValueError, match="dtype is 'float8_e5m2', expected one of bfloat16"):
        ppe.load_text_encoder(TEXT / "clip", dtype="float8_e5m2")
    with pytest.raises(ValueError, match=r"for int8, not float8.*load_text_encoder\(.*, ids, dty"):
        load_in_8_bits("clip", "float8_e4m3fn", calibration=calibrated("clip"))
    with pytest.raises(ValueError, match=r"other weights.*load_text_encoder\(source, .*, ids\)"):
        load_in_8_bits("siglip", calibration=calibrated("clip"))
    with pytest.raises(ValueError, match="is not a calibration"):
        load_in_8_bits("clip", calibration=FAMILIES / "clip" / "model.safetensors")
    with pytest.raises(ValueError, match="min_cosine is 1"):
        load_in_8_bits("clip", min_cosine=1)
