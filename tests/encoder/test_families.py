"""Encoders of every family agree with transformers, timm and open_clip."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import pallas_patch_embed as ppe
from pallas_patch_embed.encoders.checkpoint import read_config
from pallas_patch_embed.patch_embedding.primitive import patch_embed_p
from tests.encoder.goldens import DATA, FIXED, GOLDENS, NAFLEX, checkpoint, images
from tests.encoder.goldens import expected as siglip_golden
from tests.short_suite import keep

FAMILIES = DATA / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())

# Names of arrays inside of transformers by golden, and what timm's architectures have.
INNER = json.loads((FAMILIES / "inner_names.json").read_text())
TIMM = json.loads((FAMILIES / "timm.json").read_text())
ACTIVATIONS = {
    "GELU(approximate='none')": "gelu",
    "GELUTanh()": "gelu_pytorch_tanh",
    "QuickGELU()": "quick_gelu",
    "SiLU()": "silu",
}
POOLINGS = {"token": "class", "avg": "mean", "map": "attention"}

# The largest relative error of float32, as a Frobenius norm.
FLOAT32 = 1e-5


def expected(name):
    return dict(np.load(FAMILIES / name / "expected.npz"))


def load(name, **arguments):
    exact = dict(dtype="float32", patch_dtype="float32")
    return ppe.load_encoder(FAMILIES / name, **(exact | arguments))


def error(found, wanted):
    found = np.asarray(found, np.float32)
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def errors(output, data, prefix=""):
    """Returns the relative error of every result; what the library lacks is None or more."""
    names = ("last_hidden_state", "pooler_output", "image_embeds")
    has = [name for name in names if prefix + name in data]
    assert all(getattr(output, name) is not None for name in has)
    assert output.image_embeds is None or "image_embeds" in has
    return {name: error(getattr(output, name), data[prefix + name]) for name in has}


def changed(tmp_path, name, fields=None, arrays=None):
    """Copies a golden's folder with other fields in its config, and with other arrays.

    `arrays` maps the arrays of the golden to others.
    """
    path = shutil.copytree(FAMILIES / name, tmp_path / name)
    (config,) = path.glob("*config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | (fields or {})))
    (weights,) = path.glob("*.safetensors")
    if arrays is not None:
        save_file(arrays(load_file(weights)), weights)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_float32_reproduces_the_library(name):
    data = expected(name)
    output = load(name)(data["images"], layers=(-2, 0))
    for key, found in errors(output, data).items():
        assert found <= FLOAT32, key
    for number, state in zip((-2, 0), output.hidden_states):
        assert error(state, data[f"hidden_state_{number}"]) <= FLOAT32


@pytest.mark.parametrize("name", NAMES)
def test_another_image_size_reproduces_the_library(name):
    data = expected(name)
    images = data["other_images"]
    output = load(name, image_size=images.shape[1:3])(images)
    for key, found in errors(output, data, "other_").items():
        assert found <= FLOAT32, key


# The largest relative errors of docs/families.md, rounded up.
LARGEST = {
    ("bfloat16", "float32"): 0.005,
    ("int8", "float32"): 0.005,
    ("float8_e4m3fn", "float32"): 0.03,
    ("bfloat16", "bfloat16"): 0.012,
    ("int8", "bfloat16"): 0.012,
    ("float8_e4m3fn", "bfloat16"): 0.03,
}
SHORT = ("clip", "dinov2_swiglu", "dinov3", "deit", "vit", "open_clip_siglip", "timm_gap")


@pytest.mark.parametrize(
    "name, patch_dtype, dtype",
    keep(
        # All checkpoints in bfloat16, and each in one or two of the other pairs of dtypes. CI runs
        # one pair of each checkpoint: an encoder in bfloat16, with patches of each dtype in turn.
        [
            (name, *dtypes)
            for i, name in enumerate(NAMES)
            for j, dtypes in enumerate(LARGEST)
            if dtypes == ("bfloat16", "bfloat16") or (i + j) % 3 == 0
        ],
        lambda case: case[0] in SHORT and case[1:] == ("bfloat16", "bfloat16"),
        "compiles an encoder for each case; the short suite has every family once",
        lambda case: case[1:] == tuple(LARGEST)[3 + -NAMES.index(case[0]) % 3],
    ),
)
def test_rounded_encoders_stay_near_the_library(name, patch_dtype, dtype):
    data = expected(name)
    output = load(name, patch_dtype=patch_dtype, dtype=dtype)(data["images"])
    assert output.last_hidden_state.dtype == dtype
    assert max(errors(output, data).values()) <= LARGEST[patch_dtype, dtype]


@pytest.mark.parametrize("name", FIXED)
def test_SigLIP_loads_as_with_its_own_loader(name):
    exact = dict(dtype="float32", patch_dtype="float32")
    encoder = ppe.load_encoder(checkpoint(name), **exact)
    own = ppe.siglip2.load_encoder(checkpoint(name), **exact)
    assert jax.tree.structure(encoder) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, encoder, own)
    # The families' loader resizes positions as the checkpoint's library does.
    library = "bilinear" if name.startswith("bv") else "bicubic"
    resized = ppe.load_encoder(checkpoint(name), image_size=160, **exact)
    own = ppe.siglip2.load_encoder(checkpoint(name), image_size=160, interpolation=library, **exact)
    np.testing.assert_array_equal(resized.patch_embed.table, own.patch_embed.table)


# Hidden states


@pytest.mark.parametrize("name", ["clip", "dinov3"])
def test_hidden_states_are_numbered_as_in_transformers(name):
    x = expected(name)["images"]
    encoder = load(name)
    every = encoder(x, layers=range(4))
    assert encoder(x).hidden_states == ()
    for asked in (1, [3, 0, -4], np.array([-2])):
        found = encoder(x, layers=asked).hidden_states
        numbers = np.arange(4)[np.atleast_1d(asked)]
        assert len(found) == len(numbers)
        for number, state in zip(numbers, found):
            np.testing.assert_array_equal(state, every.hidden_states[number])
    normed = encoder(x, layers=-1)
    if encoder.config.norm_after_pooling:
        np.testing.assert_array_equal(normed.hidden_states[0], normed.last_hidden_state)
    else:
        state = np.asarray(normed.hidden_states[0], np.float64)
        centred = state - state.mean(-1, keepdims=True)
        wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + encoder.config.eps)
        wanted = wanted * encoder.norm["scale"] + encoder.norm["bias"]
        assert error(normed.last_hidden_state, wanted) < 1e-6


def test_hidden_states_of_NaFlex_patches():
    encoder = ppe.load_encoder(checkpoint(NAFLEX[0]), dtype="float32", patch_dtype="float32")
    x, shapes, mask = ppe.siglip2.batch_naflex(images(NAFLEX[0]), encoder.config, 64)
    arguments = dict(spatial_shapes=shapes, mask=mask)
    output = encoder(x, layers=(0, -1), **arguments)
    first = ppe.load_encoder(
        checkpoint(NAFLEX[0]), dtype="float32", patch_dtype="float32", layers=1
    )
    embedded = first(x, layers=0, **arguments).hidden_states[0]
    np.testing.assert_array_equal(output.hidden_states[0][mask], embedded[mask])
    wanted = siglip_golden(NAFLEX[0])["patch_embeddings"]
    assert error(output.hidden_states[0][mask], wanted[mask]) <= FLOAT32


@pytest.mark.parametrize(
    "name",
    keep(
        ["dinov2", "timm_clip", *GOLDENS],
        lambda name: name in ("dinov2", "bv_vit_p16_224", "bv_naflex_p16"),
        "compiles five encoders for each case; the short suite has both layouts of blocks",
    ),
)
def test_the_first_blocks_alone_give_their_hidden_state(name):
    path = FAMILIES / name if name not in GOLDENS else checkpoint(name)
    exact = dict(dtype="float32", patch_dtype="float32")
    whole = ppe.load_encoder(path, **exact)
    depth = whole.config.depth
    if whole.config.naflex:
        x, shapes, mask = ppe.siglip2.batch_naflex(images(name), whole.config, 64)
        more = dict(spatial_shapes=shapes, mask=mask)
    else:
        x, more = images(name) if name in GOLDENS else expected(name)["images"], {}
    states = whole(x, layers=range(depth + 1), **more).hidden_states
    for layers in (1, depth, -1, -2):
        part = ppe.load_encoder(path, layers=layers, **exact)
        blocks = layers if layers > 0 else depth + 1 + layers
        assert part.config.depth == blocks == len(jax.tree.leaves(part.blocks)[0])
        assert part.norm is None and part.head is None and part.projection is None
        output = part(x, **more)
        assert output.pooler_output is None
        assert error(output.last_hidden_state, np.asarray(states[blocks])) < 1e-6


def test_a_file_without_the_last_blocks_loads_as_their_first(tmp_path):
    def without_the_last(arrays):
        return {
            name: array
            for name, array in arrays.items()
            if ".layer.2." not in name and not name.startswith(("layernorm.", "pooler."))
        }

    path = changed(tmp_path, "vit", arrays=without_the_last)
    x = expected("vit")["images"]
    found = ppe.load_encoder(path, layers=2, dtype="float32", patch_dtype="float32")(x)
    assert error(found.last_hidden_state, expected("vit")["hidden_state_-2"]) <= FLOAT32
    with pytest.raises(ValueError, match=r"layer\.2\."):
        ppe.load_encoder(path)


@pytest.mark.parametrize("layers", [0, 4, -4, True, 1.5, "1", [1]])
def test_numbers_of_blocks_that_do_not_exist_are_refused(layers):
    with pytest.raises(ValueError, match="layers is"):
        load("clip", layers=layers)


@pytest.mark.parametrize("layers", [4, -5, True, 1.5, "1", [0, 4], [[0]]])
def test_hidden_states_that_do_not_exist_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers is.*has 3 blocks"):
        load("clip")(expected("clip")["images"], layers=layers)


# Pooling


@pytest.mark.parametrize("name", ["siglip_headless", "dinov2_with_registers", "timm_siglip", "vit"])
def test_the_config_can_ask_for_the_mean_of_the_patches(name):
    x = expected(name)["images"]
    config = dataclasses.replace(load(name).config, pooling="mean")
    output = load(name, config=config)(x)
    wanted = expected(name)["last_hidden_state"][:, config.prefix :].mean(1)
    assert error(output.pooler_output, wanted) <= FLOAT32


def test_the_mean_of_NaFlex_patches_leaves_padding_out():
    name = "hf_siglip2_naflex_p16"
    exact = dict(dtype="float32", patch_dtype="float32")
    config = dataclasses.replace(read_config(checkpoint(name)), pooling="mean")
    encoder = ppe.load_encoder(checkpoint(name), config=config, **exact)
    x, shapes, mask = ppe.siglip2.batch_naflex(images(name), config, 64)
    found = encoder(x, spatial_shapes=shapes, mask=mask).pooler_output
    states = siglip_golden(name)["last_hidden_state"]
    wanted = np.stack([state[m].mean(0) for state, m in zip(states, mask)])
    assert error(found, wanted) <= FLOAT32


# Other layouts of the same models


@pytest.mark.parametrize("name, inner", [item for item in INNER.items() if item[1]])
def test_the_names_inside_of_transformers_load_too(tmp_path, name, inner):
    """As `save_pretrained(..., save_original_format=False)` writes them."""

    def renamed(arrays):
        found = {}
        for key, array in arrays.items():
            names = inner.get(key, key).split()
            parts = np.split(array, len(names))
            found |= {own: part.copy() for own, part in zip(names, parts)}
        return found

    exact = dict(dtype="float32", patch_dtype="float32")
    encoder = ppe.load_encoder(changed(tmp_path, name, arrays=renamed), **exact)
    assert jax.tree.structure(encoder) == jax.tree.structure(load(name))
    jax.tree.map(np.testing.assert_array_equal, encoder, load(name))


def test_the_tower_of_a_language_model_loads(tmp_path):
    """As in LLaVA, which reads hidden state -2 of CLIP."""
    vision = json.loads((FAMILIES / "clip/config.json").read_text())

    def nested(arrays):
        del arrays["visual_projection.weight"]
        found = {f"model.vision_tower.{name}": array for name, array in arrays.items()}
        return found | {"model.language_model.norm.weight": np.ones(4, np.float32)}

    fields = {"model_type": "llava", "vision_config": vision, "text_config": {}}
    path = changed(tmp_path, "clip", fields | {"architectures": ["LlavaModel"]}, nested)
    data = expected("clip")
    encoder = ppe.load_encoder(path, dtype="float32", patch_dtype="float32", layers=-2)
    found = encoder(data["images"])
    assert error(found.last_hidden_state, data["hidden_state_-2"]) <= FLOAT32
    whole = ppe.load_encoder(path, dtype="float32", patch_dtype="float32")(data["images"])
    assert error(whole.pooler_output, data["pooler_output"]) <= FLOAT32
    assert whole.image_embeds is None


TOWER = 240  # A width that every number of heads of these architectures divides.


def timm_file(tmp_path, name):
    """Writes a folder with the shapes of a timm model of this name, of width 240."""
    zeros = {
        "patch_embed.proj.weight": (TOWER, 3, 1, 1),
        "blocks.0.attn.qkv.bias": (3 * TOWER,),
        "blocks.0.mlp.fc2.weight": (TOWER, 4),
        "cls_token": (1, 1, TOWER),
    }
    if "siglip" in name:
        del zeros["cls_token"]
    arrays = {key: np.zeros(shape, np.float32) for key, shape in zeros.items()}
    config = {"architecture": name, "pretrained_cfg": {"input_size": [3, 2, 2]}}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_timm_architectures_have_the_heads_activation_and_pooling_of_timm(tmp_path):
    refused = set()
    for name, of_timm in TIMM.items():
        try:
            config = read_config(timm_file(tmp_path, name))
        except ValueError as fault:
            assert name in str(fault)
            refused.add(name)
            continue
        heads, activation, eps, pooling = of_timm
        assert (config.heads, config.eps) == (heads, eps), name
        assert config.activation == ACTIVATIONS[activation], name
        assert config.pooling == POOLINGS[pooling], name
    # Those that timm builds of other parts are refused, and the others if their names are unusual.
    assert {name for name, of_timm in TIMM.items() if of_timm is None} <= refused
    assert len(TIMM) - len(refused) == 118


# What is refused


def other_config(path):
    (config,) = path.glob("*config.json")
    return json.loads(config.read_text())


@pytest.mark.parametrize(
    "config, family",
    [
        ({"model_type": "llava", "vision_config": {}}, "clip"),
        ({"model_type": "paligemma", "vision_config": {}}, "siglip"),
        ({"model_type": "clip", "vision_config_dict": {"hidden_size": 768}}, "clip"),
        ({"vision_config": {}, "text_config": {}}, "siglip"),
    ],
)
def test_a_larger_model_implies_the_family_of_its_tower(config, family):
    assert ppe.Config.from_hugging_face(config).family == family


def test_the_older_field_of_a_larger_model_goes_first():
    """As in transformers, which writes both."""
    config = {"model_type": "clip", "vision_config": {"hidden_act": "relu"}}
    config["vision_config_dict"] = {"hidden_act": "gelu"}
    assert ppe.Config.from_hugging_face(config).activation == "gelu"


@pytest.mark.parametrize("name, pooling", [("vit", "dense"), ("vit_classifier", "class")])
def test_a_ViT_inside_of_a_larger_model_has_its_pooler(tmp_path, name, pooling):
    vision = json.loads((FAMILIES / name / "config.json").read_text())
    config = {"model_type": "vision-text-dual-encoder", "vision_config": vision}
    encoder = load(name, config=config)
    data = expected(name)
    assert encoder.config.pooling == pooling
    assert error(encoder(data["images"]).pooler_output, data["pooler_output"]) <= FLOAT32


def test_images_of_other_channels_need_their_own_normalisation(tmp_path):
    def of_one_channel(arrays):
        name = "vision_model.embeddings.patch_embedding.weight"
        return arrays | {name: arrays[name][:, :1].copy()}

    path = changed(tmp_path, "clip", {"num_channels": 1}, of_one_channel)
    with pytest.raises(ValueError, match=r"have 1 channels, but CLIP states .* RGB alone"):
        ppe.load_encoder(path)
    processor = {"image_processor_type": "CLIPImageProcessor"}
    processor |= {"image_mean": [0.25], "image_std": [0.5]}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    exact = dict(dtype="float32", patch_dtype="float32")
    found = ppe.load_encoder(path, **exact)
    config = dataclasses.replace(found.config, image_mean=(0.25,), image_std=(0.5,))
    wanted = ppe.load_encoder(path, config=config, **exact)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("act_layer, activation", [("gelu", "gelu"), (None, "silu")])
def test_timm_takes_another_activation_of_a_gated_MLP(tmp_path, act_layer, activation):
    name = "timm_dinov2_giant"
    arguments = other_config(FAMILIES / name)["model_args"] | {"act_layer": act_layer}
    path = changed(tmp_path, name, {"model_args": arguments})
    assert read_config(path).activation == activation


def test_timm_files_of_earlier_versions_load(tmp_path):
    """They have the fields of pretrained_cfg beside the architecture."""
    fields = other_config(FAMILIES / "timm_vit")
    arguments = {k: v for k, v in fields["model_args"].items() if k != "img_size"}
    own = fields["pretrained_cfg"] | {"pretrained_cfg": None, "model_args": arguments}
    path = changed(tmp_path, "timm_vit", own)
    assert read_config(path) == read_config(FAMILIES / "timm_vit")


@pytest.mark.parametrize(
    "name, fields, words",
    [
        ("vit", {"model_type": "blip", "vision_config": {}}, "model_type is 'blip', which is not"),
        ("vit", {"num_hidden_layers": 30_000_000}, "depth is 30000000, .* below 2\\^12"),
        ("vit", {"num_channels": 2**31 - 1}, "channels is 2147483647, .* below 2\\^12"),
        ("timm_vit", {"architecture": "mixer_s32_224"}, "architecture is 'mixer_s32_224', which"),
        ("timm_vit", {"model_args": {"act_layer": ["gelu"]}}, "act_layer is \\['gelu'\\], exp"),
        ("vit", {"model_type": "swin"}, "model_type is 'swin', which is not supported"),
        ("dinov2", {"model_type": "eva02"}, "model_type is 'eva02', which is not supported"),
        ("clip", {"model_type": "qwen2_vl"}, "model_type is 'qwen2_vl', which is not supported"),
        ("clip", {"hidden_act": "swiglu"}, "the activation is 'swiglu', expected one of"),
        ("vit", {"pooler_act": "relu"}, "pooler_act is 'relu', expected 'tanh'"),
        ("dinov3", {"rope_parameters": {"type": "x"}}, "rope_parameters is .* not supported"),
        ("dinov3", {"num_register_tokens": 3}, "5 class and register tokens, but .* implies 4"),
        ("dinov2", {"use_swiglu_ffn": 1}, "use_swiglu_ffn is 1, expected true or false"),
        ("timm_vit", {"architecture": "eva02_base_patch14_224"}, "eva02_base_patch14_224"),
        ("timm_vit", {"architecture": "vit_base_patch16_rope_224"}, "not supported"),
        ("timm_vit", {"model_args": {"qk_norm": True}}, "model_args has qk_norm = True"),
        ("timm_vit", {"model_args": {"global_pool": "max"}}, "global_pool is 'max'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, name, fields, words):
    path = changed(tmp_path, name, fields)
    with pytest.raises(ValueError, match=words):
        ppe.load_encoder(path)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"timm_proj": "linear"}, "timm_proj is 'linear', which is not supported"),
        ({"timm_model_name": "eva02_base_patch14_224"}, "eva02_base_patch14_224"),
        ({"timm_model_name": None, "mlp_ratio": [4]}, r"mlp_ratio is \[4\], expected a number"),
    ],
)
def test_open_clip_trunks_that_are_not_supported_are_refused(tmp_path, fields, words):
    model = other_config(FAMILIES / "open_clip_siglip")["model_cfg"]
    model["vision_cfg"] |= fields
    path = changed(tmp_path, "open_clip_siglip", {"model_cfg": model})
    with pytest.raises(ValueError, match=words):
        ppe.load_encoder(path)


@pytest.mark.parametrize("name", ["timm_siglip", "timm_vit", "open_clip_clip", "vit", "dinov2"])
def test_a_bare_file_is_refused_without_a_config(tmp_path, name):
    """It says neither which GELU it wants nor how many heads it has."""
    (weights,) = (FAMILIES / name).glob("*.safetensors")
    bare = shutil.copy(weights, tmp_path)
    with pytest.raises(ValueError, match="which activation they need, or how many heads"):
        ppe.load_encoder(bare)
    exact = dict(dtype="float32", patch_dtype="float32")
    wanted = load(name)
    for config in (wanted.config, other_config(FAMILIES / name)):
        found = ppe.load_encoder(bare, config=config, **exact)
        assert found.config == wanted.config
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_pooler_that_is_missing_is_refused(tmp_path):
    def without_pooler(arrays):
        return {name: array for name, array in arrays.items() if "pooler" not in name}

    path = changed(tmp_path, "vit", arrays=without_pooler)
    with pytest.raises(ValueError, match=r"with a pooler, but 'pooler\.dense\.weight' is missing"):
        ppe.load_encoder(path)
    config = dataclasses.replace(read_config(path), pooling="class")
    output = ppe.load_encoder(path, config=config, dtype="float32")(expected("vit")["images"])
    np.testing.assert_array_equal(output.pooler_output, output.last_hidden_state[:, 0])


def test_the_loader_of_SigLIP_names_the_loader_of_other_families():
    with pytest.raises(ValueError, match=r"DINOv2 tower, expected SigLIP.*d\.load_encoder"):
        ppe.siglip2.load_encoder(FAMILIES / "dinov2")


# The operator and JAX's transformations


@pytest.mark.parametrize("name", ["clip", "dinov3", "timm_dinov2_reg4", "deit", *NAFLEX])
def test_the_operator_embeds_the_patches_as_explain_says(name):
    path = checkpoint(name) if name in NAFLEX else FAMILIES / name
    encoder = ppe.load_encoder(path, patch_dtype="int8")
    if name in NAFLEX:
        x, shapes, mask = ppe.siglip2.batch_naflex(images(name), encoder.config, 64)
        more = dict(spatial_shapes=shapes, mask=mask)
    else:
        x, more = expected(name)["images"], {}
    # The last equation is the encoder's jitted program.
    *_, program = jax.make_jaxpr(lambda e, x: e(x, **more))(encoder, x).jaxpr.eqns
    equations = program.params["jaxpr"].jaxpr.eqns
    (call,) = (equation for equation in equations if equation.primitive is patch_embed_p)
    source, weight, _, table = (operand.aval for operand in call.invars)
    for given in (x, x.shape, list(x.shape)):
        problem = ppe.explain(given, encoder).problem
        assert problem.weight == weight.shape and problem.table == table.shape
        assert problem.out_dtype == call.params["call"].out_dtype == "bfloat16"
        assert problem.geometry == call.params["call"].geometry
        assert (problem.images or problem.patches) == source.shape
    with pytest.raises(TypeError, match="an encoder decides them"):
        ppe.explain(x, encoder, out_dtype="float32")


@pytest.mark.parametrize("name", ["clip", "dinov3"])
def test_encoders_work_under_transformations(name):
    encoder = load(name)
    x = np.concatenate([expected(name)["images"]] * 2)
    wanted = encoder(x, layers=-2)

    def parts(encoder, x):
        output = encoder(x, layers=-2)
        return output.pooler_output, output.hidden_states[0]

    devices = min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(parts, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch"))
    vmapped = jax.vmap(lambda x: jax.tree.map(lambda y: y[0], parts(encoder, x[None])))
    exported = jax.export.export(jax.jit(parts))(encoder, x)
    restored = jax.export.deserialize(exported.serialize())
    for found in (jax.jit(split)(encoder, x), vmapped(x), restored.call(encoder, x)):
        assert error(found[0], np.asarray(wanted.pooler_output)) < 1e-6
        assert error(found[1], np.asarray(wanted.hidden_states[0])) < 1e-6
