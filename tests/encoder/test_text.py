"""Text encoders reproduce transformers, for every layout, and refuse what they cannot encode."""

import dataclasses
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import pallas_patch_embed as ppe
from pallas_patch_embed.encoders import hugging_face
from tests.encoder.text_goldens import (
    TEXT,
    TOWERS,
    WHOLE,
    expected,
    sentences,
    unpacked,
)
from tests.repository import DATA
from tests.short_suite import keep

NAMES = (*WHOLE, *TOWERS)

# The largest relative error, as a Frobenius norm.
FLOAT32 = 1e-5

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


def lengths(name):
    return [int(key.removeprefix("ids_")) for key in expected(name) if key.startswith("ids_")]


def load(name, **arguments):
    return ppe.load_text_encoder(TEXT / name, **({"dtype": "float32"} | arguments))


def error(found, wanted):
    found = np.asarray(found, np.float32)
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def changed(tmp_path, name, fields=None, text=None, arrays=None):
    """Copies a folder, with other fields in its config or in its text_config, or other arrays."""
    path = shutil.copytree(TEXT / name, tmp_path / name)
    config = json.loads((path / "config.json").read_text()) | (fields or {})
    if text:
        config["text_config"] |= text
    (path / "config.json").write_text(json.dumps(config))
    if arrays is not None:
        save_file(arrays(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path


# Values


@pytest.mark.parametrize(
    "name, length",
    keep(
        [(name, length) for name in NAMES for length in lengths(name)],
        lambda case: case == ("clip_text", 200),
        "compiles an encoder for each length; the short suite has every checkpoint once",
    ),
)
def test_float32_reproduces_transformers_for_texts_of_all_lengths(name, length):
    data = expected(name)
    output = load(name)(data[f"ids_{length}"].astype(np.int32))
    assert error(output.text_embeds, data[f"text_embeds_{length}"]) <= FLOAT32


@pytest.mark.parametrize(
    "name",
    keep(NAMES, lambda name: name in ("siglip", "clip"), "compiles an encoder for each case"),
)
def test_every_output_reproduces_transformers(name):
    data = expected(name)
    output = load(name)(data["ids_7"].astype(np.int32), layers=-2)
    assert error(output.text_embeds, data["text_embeds_7"]) <= FLOAT32
    assert error(output.last_hidden_state, data["last_hidden_state"]) <= FLOAT32
    assert error(output.pooler_output, data["pooler_output"]) <= FLOAT32
    assert error(output.hidden_states[0], data["hidden_state_-2"]) <= FLOAT32


@pytest.mark.parametrize(
    "name", keep(NAMES, lambda name: name == "siglip", "compiles an encoder for each case")
)
def test_bfloat16_stays_near_transformers(name):
    data = expected(name)
    output = load(name, dtype="bfloat16")(data["ids_7"].astype(np.int32))
    assert output.text_embeds.dtype == "bfloat16"
    # 3 blocks of 2 residuals, with operands and results of 8 bits: about 2^-8 each.
    assert error(output.text_embeds, data["text_embeds_7"]) <= 6 * 2**-8


# Layouts


def in_big_vision(arrays, heads=2, stacked=False):
    """Renames a SigLIP's arrays as big_vision does, without the image tower."""
    blocks = "text_model.encoder.layers."
    stored = {
        "params/txt/Embed_0/embedding": arrays["text_model.embeddings.token_embedding.weight"],
        "params/txt/pos_embedding": arrays["text_model.embeddings.position_embedding.weight"][None],
        "params/txt/Encoder_0/encoder_norm/scale": arrays["text_model.final_layer_norm.weight"],
        "params/txt/Encoder_0/encoder_norm/bias": arrays["text_model.final_layer_norm.bias"],
        "params/txt/head/kernel": arrays["text_model.head.weight"].T,
        "params/txt/head/bias": arrays["text_model.head.bias"],
        "params/t": arrays["logit_scale"],
        "params/b": arrays["logit_bias"],
        "opt/0/mu/txt/Embed_0/embedding": np.zeros(3, np.float32),
        "opt/0/mu/t": np.zeros(1, np.float32),
    }
    depth = len([name for name in arrays if re.fullmatch(rf"{blocks}\d+\.mlp\.fc1\.bias", name)])

    def block(i):
        def dense(name):
            return arrays[f"{blocks}{i}.{name}.weight"].T, arrays[f"{blocks}{i}.{name}.bias"]

        found = {}
        for n in range(2):
            norm = f"{blocks}{i}.layer_norm{n + 1}"
            found[f"LayerNorm_{n}/scale"] = arrays[f"{norm}.weight"]
            found[f"LayerNorm_{n}/bias"] = arrays[f"{norm}.bias"]
            kernel, bias = dense(f"mlp.fc{n + 1}")
            found |= {f"MlpBlock_0/Dense_{n}/kernel": kernel, f"MlpBlock_0/Dense_{n}/bias": bias}
        attention = "MultiHeadDotProductAttention_0"
        for name, long in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel, bias = dense(f"self_attn.{name}_proj")
            found[f"{attention}/{long}/kernel"] = kernel.reshape(len(kernel), heads, -1)
            found[f"{attention}/{long}/bias"] = bias.reshape(heads, -1)
        kernel, bias = dense("self_attn.out_proj")
        found[f"{attention}/out/kernel"] = kernel.reshape(heads, -1, len(bias))
        return found | {f"{attention}/out/bias": bias}

    start = "params/txt/Encoder_0/encoderblock"
    every = [block(i) for i in range(depth)]
    if stacked:
        return stored | {f"{start}/{name}": np.stack([b[name] for b in every]) for name in every[0]}
    return stored | {f"{start}_{i}/{k}": x for i, b in enumerate(every) for k, x in b.items()}


def npz(tmp_path, arrays):
    np.savez(tmp_path / "params.npz", **arrays)
    return tmp_path / "params.npz"


def siglip_arrays(name="siglip"):
    return load_file(TEXT / name / "model.safetensors")


def assert_same(encoder, wanted):
    assert jax.tree.structure(encoder) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, encoder, wanted)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["siglip", "siglip2"])
def test_big_vision_files_load_as_the_same_encoder(tmp_path, name, stacked):
    path = npz(tmp_path, in_big_vision(siglip_arrays(name), stacked=stacked))
    wanted = load(name)
    for given in (None, wanted.config, TEXT / name / "config.json"):
        assert_same(ppe.load_text_encoder(path, dtype="float32", config=given), wanted)
    assert_same(ppe.siglip2.load_text_encoder(path), load(name, dtype="bfloat16"))
    similarity, same = ppe.load_similarity(path), ppe.load_similarity(TEXT / name)
    assert (similarity.scale, similarity.bias) == (same.scale, same.bias)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_a_Hugging_Face_checkpoint_loads_as_the_same_encoder(tmp_path, name, inside):
    """transformers saves text towers alone and as parts of models, with and without a prefix."""

    def rename(arrays):
        projection = {k: x for k, x in arrays.items() if k.startswith("text_projection.")}
        tower = {
            k[k.find("embeddings.") if "embeddings." in k else 0 :].removeprefix("text_model."): x
            for k, x in arrays.items()
            if k not in projection and not k.startswith(("vision_model.", "visual_", "logit_"))
        }
        prefix = "larger.text_model." if inside else "" if not projection else "text_model."
        outer = "larger." if inside else ""
        return {prefix + k: x for k, x in tower.items()} | {
            outer + k: x for k, x in projection.items()
        }

    path = changed(tmp_path, name, arrays=rename)
    assert_same(ppe.load_text_encoder(path, dtype="float32"), load(name))
    file = path / "model.safetensors"
    assert_same(ppe.load_text_encoder(file, config=load(name).config, dtype="float32"), load(name))


@pytest.mark.slow("compiles an encoder")
def test_a_CLIP_without_a_projection_has_no_text_embeds(tmp_path):
    def without(arrays):
        return {k: x for k, x in arrays.items() if not k.startswith("text_projection")}

    path = changed(tmp_path, "clip_text", arrays=without)
    output = ppe.load_text_encoder(path, dtype="float32")(expected("clip_text")["ids_7"])
    assert output.text_embeds is None
    assert error(output.pooler_output, expected("clip_text")["pooler_output"]) <= FLOAT32


def test_missing_fields_have_the_defaults_of_transformers():
    of = hugging_face.text_config_of
    siglip = ppe.TextConfig(768, 12, 12, 3072, 32000, 64)
    for config in ({"model_type": "siglip_text_model"}, {"vision_config": {}}, {"text_config": {}}):
        assert of(config) == siglip
    for model_type in ("siglip", "siglip2", "siglip2_text_model"):
        assert of({"model_type": model_type, "text_config": None}) == siglip
    clip = ppe.TextConfig(
        *(512, 12, 8, 2048, 49408, 77, 1e-5, "quick_gelu"),
        causal=True,
        pooling="end",
        end_token=49407,
        family="clip",
    )
    assert of({"model_type": "clip", "text_config": {}}) == clip
    # The older field goes first.
    older = {"model_type": "clip", "text_config": {"vocab_size": 9}, "text_config_dict": {"a": 1}}
    assert of(older) == clip
    old = of({"model_type": "clip_text_model", "eos_token_id": 2})
    assert old == dataclasses.replace(clip, pooling="largest", end_token=None)


# Calls


@pytest.mark.slow("compiles an encoder three times")
def test_it_works_under_jit_vmap_and_export():
    encoder, data = load("clip"), expected("clip")
    ids, wanted = data["ids_7"].astype(np.int32), data["text_embeds_7"]
    vmapped = jax.vmap(lambda x: encoder(x[None]).text_embeds[0])(ids)
    exported = jax.export.export(jax.jit(lambda e, x: (e(x), e)))(encoder, ids)
    output, same = jax.export.deserialize(exported.serialize()).call(encoder, ids)
    assert_same(same, encoder)
    for found in (vmapped, output.text_embeds):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    "name, axis_type",
    keep(
        itertools.product(("siglip", "clip"), (AxisType.Auto, AxisType.Explicit)),
        lambda case: case == ("clip", AxisType.Explicit),
        "compiles an encoder twice for each case",
    ),
)
def test_a_sharded_batch_needs_no_collective(name, axis_type):
    encoder, ids = load(name), np.tile(expected(name)["ids_7"].astype(np.int32), (4, 1))
    wanted = np.tile(expected(name)["text_embeds_7"], (4, 1))
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(axis_type,))
    call = jax.jit(lambda encoder, x: encoder(x).text_embeds)
    with jax.set_mesh(mesh):
        replicated = jax.device_put(encoder, NamedSharding(mesh, P()))
        sharded = jax.device_put(ids, NamedSharding(mesh, P("batch")))
        program = call.lower(replicated, sharded).compile()
        found = program(replicated, sharded)
    assert not COLLECTIVE.search(program.as_text())
    assert found.sharding.spec[0] == "batch"
    assert error(found, wanted) <= FLOAT32


@pytest.mark.slow("compiles an encoder twice")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_users_may_forbid_implicit_promotion(dtype):
    ids = expected("clip")["ids_7"].astype(np.int32)
    similarity = ppe.load_similarity(TEXT / "clip")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        vectors = load("clip", dtype=dtype)(ids).text_embeds
        similarity.probabilities(np.ones((2, 20), np.float16), vectors)


def test_ids_that_do_not_exist_are_refused_or_give_NaN():
    encoder = load("siglip_text")
    ids = expected("siglip_text")["ids_7"].astype(np.int32)
    for wrong in (90, -1):
        ids[1, 3] = wrong
        with pytest.raises(ValueError, match=rf"text 1 has ids from .*{wrong}.*has 90 tokens"):
            encoder(ids)
        found = np.isnan(jax.jit(lambda x: encoder(x).text_embeds)(ids))
        np.testing.assert_array_equal(found.all(1), [False, True, False])
        assert not found[[0, 2]].any()


def test_what_is_no_batch_of_texts_is_refused():
    encoder, ids = load("siglip_text"), np.zeros((2, 4), np.int32)
    for wrong in (ids[0], ids[:, :0], ids[None]):
        with pytest.raises(ValueError, match=r"ids have shape .*expected \[B, L\]"):
            encoder(wrong)
    with pytest.raises(TypeError, match="ids have dtype float32"):
        encoder(ids.astype(np.float32))
    with pytest.raises(ValueError, match=r"texts have 201 tokens, but .* positions for 200"):
        encoder(np.zeros((1, 201), np.int32))
    with pytest.raises(ValueError, match="layers is 4"):
        encoder(ids, layers=4)


def test_a_text_without_end_token_is_refused_where_the_end_decides():
    encoder, ids = load("clip"), expected("clip")["ids_7"].astype(np.int32)
    ids[2][ids[2] == encoder.config.end_token] = 0
    with pytest.raises(ValueError, match="text 2 lacks the end token, 1113"):
        encoder(ids)


# Refusals


def test_other_towers_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"load_text_encoder: .*is a CLIP text tower, expected Sig"
    ):
        ppe.siglip2.load_text_encoder(TEXT / "clip")
    with pytest.raises(
        ValueError, match=r"has 0 arrays named 'embeddings\.token_embedding\.weight'"
    ):
        ppe.load_text_encoder(DATA / "hf_siglip_p14_224", config=load("siglip").config)
    with pytest.raises(
        ValueError, match="model_type is 'siglip_vision_model', which has no text tower"
    ):
        ppe.load_text_encoder(DATA / "hf_siglip_p14_224")
    with pytest.raises(ValueError, match="layout is that of timm or open_clip"):
        ppe.load_text_encoder(DATA / "families/open_clip_clip")
    with pytest.raises(ValueError, match="it has 0 text towers"):
        ppe.load_text_encoder(DATA / "bv_vit_p16_224/params.npz")
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        ppe.load_text_encoder(tmp_path / "absent")
    with pytest.raises(TypeError, match="config is int, expected a TextConfig"):
        ppe.load_text_encoder(TEXT / "clip", config=1)


@pytest.mark.parametrize(
    "text, message",
    [
        ({"hidden_size": 20}, r"head\.weight' has shape"),
        ({"num_hidden_layers": 2}, r"layers\.2\..* are not part of a tower"),
        ({"num_hidden_layers": 4}, r"layers\.3\..* is missing"),
        ({"num_attention_heads": 3}, "width is 16, expected a multiple of the number of heads, 3"),
        ({"max_position_embeddings": 63}, r"position_embedding\.weight' has shape"),
        ({"vocab_size": 0}, "vocabulary is 0, expected a positive integer"),
        ({"hidden_act": "swish"}, "the activation is 'swish'"),
        ({"layer_norm_eps": 0}, "the epsilon of layer norms is 0"),
        ({"model_type": "llama"}, "model_type is 'llama', which has no text tower"),
        ({"model_type": "clip", "eos_token_id": [1]}, r"end_token is \[1\]"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, text, message):
    path = changed(tmp_path, "siglip", text=text)
    with pytest.raises(ValueError, match=rf"load_text_encoder: .*{message}"):
        ppe.load_text_encoder(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"params/txt/Encoder_0/pos_embedding": np.zeros(3, "f4")}, "arrays, such as .*pos_emb"),
        ({"params/more/Embed_0/embedding": np.zeros((3, 4), "f4")}, "it has 2 text towers"),
        ({"params/txt/head/bias": None}, "'params/txt/head/bias' is missing"),
        ({"params/txt/pos_embedding": np.full((1, 64, 16), np.nan, "f4")}, "NaN"),
    ],
)
def test_a_damaged_big_vision_file_is_refused(tmp_path, changes, message):
    arrays = in_big_vision(siglip_arrays()) | changes
    path = npz(tmp_path, {name: x for name, x in arrays.items() if x is not None})
    with pytest.raises(ValueError, match=rf"load_text_encoder: .*{message}"):
        ppe.load_text_encoder(path)


def test_a_config_that_contradicts_the_arrays_of_big_vision_is_refused(tmp_path):
    path = npz(tmp_path, in_big_vision(siglip_arrays()))
    for change in ({"depth": 2}, {"vocabulary": 9}, {"causal": True}, {"heads": 4}):
        config = dataclasses.replace(load("siglip").config, **change)
        (name,) = change
        with pytest.raises(ValueError, match=f"the config has {name} = "):
            ppe.load_text_encoder(path, config=config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pooling": "first"}, "pooling is 'first', expected one of last, end, largest"),
        ({"pooling": "end"}, "end_token is None and pooling is 'end'"),
        ({"end_token": 1}, "end_token is 1 and pooling is 'last'"),
        ({"pooling": "end", "end_token": -1}, "end_token is -1"),
        ({"causal": 1}, "causal is 1, expected True or False"),
        ({"family": "vit"}, "family is 'vit', expected one of siglip, clip"),
        ({"depth": 4096}, "depth is 4096"),
    ],
)
def test_a_TextConfig_checks_itself(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(load("siglip").config, **change)


# Both towers


def image_vectors(path, name):
    """Returns the vectors of a golden's images."""
    encoder = ppe.load_encoder(path, dtype="float32", patch_dtype="float32")
    images, more = expected(name)["images"], {}
    if encoder.config.naflex:
        images, shapes, mask = ppe.siglip2.batch_naflex(list(images), encoder.config, 16)
        more = dict(spatial_shapes=shapes, mask=mask)
    output = encoder(images, **more)
    return output.pooler_output if name.startswith("siglip") else output.image_embeds


@pytest.mark.parametrize(
    "name", keep(WHOLE, lambda name: name == "siglip", "compiles two encoders for each model")
)
def test_similarities_of_images_and_texts_are_those_of_transformers(name, tmp_path):
    wanted = expected(name)["logits_per_image"]
    path = unpacked(name, tmp_path)
    images = image_vectors(path, name)
    ids = ppe.load_tokenizer(path)(sentences()[: wanted.shape[1]])
    texts = ppe.load_text_encoder(path, dtype="float32")(ids).text_embeds
    similarity = ppe.load_similarity(path)
    logits = similarity.logits(images, texts)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
    found = np.asarray(similarity.probabilities(images, texts), np.float64)
    if name == "clip":
        assert similarity.bias is None
        exact = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True, dtype=np.float64)
    else:
        exact = 1 / (1 + np.exp(-wanted.astype(np.float64)))
    # An error of 1e-4 of a logit changes a probability by less than this.
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)
    scaled = similarity.logits(np.float16(7) * np.asarray(images), 0.5 * texts)
    np.testing.assert_allclose(scaled, logits, rtol=0, atol=1e-5)


def test_a_similarity_is_a_pytree_that_can_be_exported():
    similarity = ppe.load_similarity(TEXT / "siglip")
    images, texts = np.eye(3, 24, dtype=np.float32), np.ones((2, 24), np.float32)
    wanted = similarity.probabilities(images, texts)
    exported = jax.export.export(jax.jit(lambda s, x, y: (s, s.probabilities(x, y))))
    restored = jax.export.deserialize(exported(similarity, images, texts).serialize())
    same, found = restored.call(similarity, images, texts)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(same.bias, np.float32(-3.25))
    np.testing.assert_allclose(same.scale, np.exp(2.5), rtol=1e-6)


def test_vectors_that_cannot_be_compared_are_refused():
    similarity = ppe.load_similarity(TEXT / "clip")
    vectors = np.ones((2, 20), np.float32)
    with pytest.raises(ValueError, match=r"images have 20 elements, those of texts 16"):
        similarity.logits(vectors, vectors[:, :16])
    for wrong in (vectors[0], vectors.astype(int)):
        with pytest.raises(ValueError, match=r"similarity: texts are .*expected floating-point"):
            similarity.probabilities(vectors, wrong)
    with pytest.raises(TypeError, match="similarity: images is list"):
        similarity.logits([[1.0]], vectors)


def test_a_checkpoint_without_one_scale_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"load_similarity: .*has no logit_scale"):
        ppe.load_similarity(TEXT / "siglip_text")
    number = np.zeros(1, np.float32)
    for i, arrays in enumerate(
        ({"a.logit_scale": number, "b.logit_scale": number}, {"logit_scale": np.zeros(2, "f4")})
    ):
        save_file(arrays, tmp_path / f"{i}.safetensors")
        with pytest.raises(ValueError, match="should be one number"):
            ppe.load_similarity(tmp_path / f"{i}.safetensors")
