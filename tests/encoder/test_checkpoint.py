"""Checkpoints of every supported form are loaded, and damaged ones are refused."""

import dataclasses
import io
import json
import math
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import pallas_patch_embed
from pallas_patch_embed import resize_positions
from pallas_patch_embed.patch_embedding.positions import INTERPOLATIONS
from pallas_patch_embed.siglip2 import Config, batch_naflex, load_encoder
from tests.encoder.goldens import DATA, arrays, checkpoint, encode, expected

HF = "hf_siglip_p14_224"
NAFLEX = "hf_siglip2_naflex_p16"
BV = "bv_vit_p16_224"


def config_of(name):
    return json.loads((DATA / name / "config.json").read_text())


def folder(tmp_path, tensors, config):
    """Writes a folder in Hugging Face's layout."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def renamed(prefix):
    return {prefix + name: tensor for name, tensor in arrays(HF).items()}


def text_tower():
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.normal(size=shape))  # noqa: E731
    return {
        "text_model.embeddings.token_embedding.weight": draw(50, 96),
        "text_model.embeddings.position_embedding.weight": draw(64, 96),
        "text_model.encoder.layers.0.layer_norm1.weight": draw(96),
        "text_model.head.weight": draw(96, 96),
        "logit_scale": draw(1),
        "logit_bias": draw(1),
    }


def assert_same(encoder, wanted):
    assert jax.tree.structure(encoder) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, encoder, wanted)


FORMS = {}


def form(function):
    FORMS[function.__name__.replace("_", " ")] = function
    return function


@form
def with_prefix(tmp_path):
    return folder(tmp_path, renamed("vision_model."), config_of(HF)), {}


@form
def inside_a_full_model(tmp_path):
    config = {"model_type": "siglip", "vision_config": config_of(HF), "text_config": {}}
    return folder(tmp_path, renamed("vision_model.") | text_tower(), config), {}


@form
def inside_a_language_model(tmp_path):
    vision = {k: v for k, v in config_of(HF).items() if k != "model_type"}
    tensors = renamed("model.vision_tower.vision_model.")
    tensors["model.language_model.embed_tokens.weight"] = np.zeros((4, 4), np.float32)
    return folder(tmp_path, tensors, {"model_type": "gemma3", "vision_config": vision}), {}


@form
def with_omitted_fields(tmp_path):
    vision = config_of(HF)
    for field in ("num_channels", "image_size", "hidden_act", "layer_norm_eps"):
        del vision[field]
    del vision["vision_use_head"], vision["model_type"]
    return folder(tmp_path, arrays(HF), vision | {"num_channels": None}), {}


@form
def sharded(tmp_path):
    tensors = renamed("vision_model.") | text_tower()
    path = folder(tmp_path, {}, config_of(HF))
    (path / "model.safetensors").unlink()
    shard_of = {}
    for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        shard_of |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path, {}


@form
def a_file_next_to_its_config(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF)) / "model.safetensors", {}


@form
def a_file_with_a_Config(tmp_path):
    save_file(arrays(HF), tmp_path / "weights.safetensors")
    config = Config(width=96, depth=2, heads=2, mlp=176, patch=14, grid=(16, 16))
    return tmp_path / "weights.safetensors", {"config": config}


@form
def a_file_with_the_contents_of_a_config(tmp_path):
    save_file(arrays(HF), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", {"config": config_of(HF)}


@form
def a_file_with_the_path_of_a_config(tmp_path):
    save_file(arrays(HF), tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors"), {"config": DATA / HF / "config.json"}


@form
def a_variant(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    (path / "model.safetensors").rename(path / "model.fp16.safetensors")
    return path, {}


@form
def shards_of_a_variant(tmp_path):
    path, _ = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    index.rename(path / "model.safetensors.index.fp16.json")
    return path, {}


@form
def a_variant_with_a_hyphen(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    (path / "model.safetensors").rename(path / "model.non-ema.safetensors")
    return path, {}


@form
def shards_of_a_variant_as_diffusers_names_them(tmp_path):
    path, _ = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    index.rename(path / "model.fp16.safetensors.index.json")
    return path, {}


@form
def a_tower_inside_of_a_composite_config(tmp_path):
    tower = config_of(HF) | {"model_type": "siglip_vision_model"}
    return folder(tmp_path, arrays(HF), {"model_type": "a_robot", "image_config": tower}), {}


@form
def below_two_vision_configs(tmp_path):
    tower = {"vision_config": {"model_type": "projected", "vision_config": config_of(HF)}}
    return folder(tmp_path, arrays(HF), {"model_type": "a_robot", "vlm_config": tower}), {}


@form
def below_a_composite_config(tmp_path):
    part = {"model_type": "siglip", "vision_config": config_of(HF), "text_config": {}}
    config = {"model_type": "a_robot", "vlm_config": part, "action_config": {"width": 3}}
    return folder(tmp_path, renamed("vlm.vision_tower.vision_model."), config), {}


@form
def beside_a_quantised_language_model(tmp_path):
    tensors = renamed("model.vision_tower.vision_model.")
    tensors["model.language_model.layers.0.mlp.up_proj.qweight"] = np.zeros((4, 4), np.int32)
    tensors["model.language_model.layers.1.mlp.up_proj.lora_A.weight"] = np.zeros((4, 4), "f")
    config = {"model_type": "llava", "vision_config": config_of(HF)}
    return folder(tmp_path, tensors, config), {}


@form
def with_a_grid_that_the_config_states(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF)), {"grid": (16, 16)}


@form
def float64(tmp_path):
    tensors = {name: tensor.astype(np.float64) for name, tensor in arrays(HF).items()}
    return folder(tmp_path, tensors, config_of(HF)), {}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_Hugging_Face_checkpoint_loads_to_the_same_encoder(tmp_path, name):
    path, arguments = FORMS[name](tmp_path)
    dtypes = dict(patch_dtype="int8", dtype="float32")
    encoder = load_encoder(path, **dtypes, **arguments)
    assert_same(encoder, load_encoder(checkpoint(HF), **dtypes))


def scanned(tensors):
    """Stacks the blocks, as flax's scan stores them."""
    stacked = {k: v for k, v in tensors.items() if "encoderblock_" not in k}
    for name in tensors:
        if "encoderblock_0" in name:
            layers = [tensors[name.replace("block_0", f"block_{i}")] for i in range(2)]
            stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    return stacked


BIG_VISION_FORMS = {
    "two towers": lambda t: (
        t
        | {
            "params/txt/Embed_0/embedding": np.zeros((9, 4), np.float32),
            "params/txt/pos_embedding": np.zeros((1, 3, 4), np.float32),
            "params/t": np.zeros(1, np.float32),
            "opt/0/mu/img/embedding/kernel": np.zeros(3, np.float32),
        }
    ),
    "scanned": scanned,
    "PaliGemma": lambda t: (
        t
        | {
            "params/img/head/kernel": np.zeros((t["params/img/embedding/bias"].size, 9), "f"),
            "params/img/head/bias": np.zeros(9, np.float32),
            "params/llm/embedder/input_embedding": np.zeros((9, 4), np.float32),
            "params/llm/layers/mlp/gating_einsum": np.zeros((2, 2, 4, 4), np.float32),
        }
    ),
    "openpi": lambda t: (
        {k.replace("params/", "params/PaliGemma/"): v for k, v in scanned(t).items()}
        | {
            "params/PaliGemma/llm/embedder/input_embedding": np.zeros((9, 4), np.float32),
            "params/action_in_proj/kernel": np.zeros((3, 4), np.float32),
        }
    ),
    "beside other layers of these names": lambda t: (
        t
        | {
            "params/llm/embedding/kernel": np.zeros((4, 4), np.float32),
            "params/llm/pos_embedding": np.zeros((1, 4, 4), np.float32),
            "params/txt/Transformer/encoderblock_0/LayerNorm_0/scale": np.zeros(4, np.float32),
        }
        | {k.replace("params/", "opt_state/"): v for k, v in t.items()}
    ),
    "without params": lambda t: (
        {k.replace("params/", "PaliGemma/"): v for k, v in t.items()}
        | {"PaliGemma/img/pre_logits/kernel": np.zeros((4, 4), np.float32)}
    ),
    "LiT": lambda t: (
        t
        | {
            "params/txt/Encoder_0/encoderblock_0/LayerNorm_0/scale": np.zeros(4, np.float32),
            "params/txt/Encoder_0/encoder_norm/scale": np.zeros(4, np.float32),
            "params/txt/head/kernel": np.zeros((4, 4), np.float32),
        }
    ),
    "bare": lambda t: {k.removeprefix("params/img/"): v for k, v in t.items()},
    "bare below params": lambda t: {k.replace("/img", ""): v for k, v in t.items()},
    "bare and scanned": lambda t: {k.removeprefix("params/img/"): v for k, v in scanned(t).items()},
}


@pytest.mark.parametrize("name", ["bv_vit_p16_224", "bv_naflex_p16"])
@pytest.mark.parametrize("form", BIG_VISION_FORMS)
def test_every_form_of_a_big_vision_checkpoint_loads_to_the_same_encoder(tmp_path, name, form):
    # Half of the files are compressed.
    save = np.savez_compressed if name == "bv_naflex_p16" else np.savez
    save(tmp_path / "params.npz", **BIG_VISION_FORMS[form](arrays(name)))
    dtypes = dict(patch_dtype="float8_e4m3fn", dtype="bfloat16")
    encoder = load_encoder(tmp_path / "params.npz", **dtypes)
    assert_same(encoder, load_encoder(checkpoint(name), **dtypes))


@pytest.mark.parametrize("name", [HF, BV, NAFLEX])
@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_checkpoints_load(tmp_path, name, stored):
    tensors = {k: v.astype(stored) for k, v in arrays(name).items()}
    if name == BV:
        path = tmp_path / "params.npz"
        np.savez(path, **tensors)
        if stored is ml_dtypes.bfloat16:
            assert np.load(path)["params/img/embedding/bias"].dtype == np.dtype("V2")
    else:
        path = folder(tmp_path, tensors, config_of(name))
    encoder = load_encoder(path, patch_dtype="float32", dtype="float32")
    output, _ = encode(encoder, name)
    wanted = expected(name)["pooler_output"]
    assert np.linalg.norm(output.pooler_output - wanted) <= 0.01 * np.linalg.norm(wanted)
    widened = {k: v.astype(np.float32) for k, v in tensors.items()}
    np.testing.assert_array_equal(
        encoder.norm["bias"],
        widened[
            "params/img/Transformer/encoder_norm/bias" if name == BV else "post_layernorm.bias"
        ],
    )


@pytest.mark.parametrize("use_head", [False, None])
@pytest.mark.parametrize("kept", [False, True])
def test_a_tower_without_a_pooling_head_returns_no_pooler_output(tmp_path, use_head, kept):
    tensors = {k: v for k, v in arrays(HF).items() if kept or not k.startswith("head.")}
    path = folder(tmp_path, tensors, config_of(HF) | {"vision_use_head": use_head})
    encoder = load_encoder(path, patch_dtype="float32", dtype="float32")
    output, _ = encode(encoder, HF)
    has_head = use_head is None and kept
    assert encoder.config.pooling == ("attention" if has_head else "none")
    assert has_head == (output.pooler_output is not None)
    wanted = expected(HF)["last_hidden_state"]
    assert np.abs(np.asarray(output.last_hidden_state) - wanted).max() <= 1e-4


@pytest.mark.parametrize("load", [pallas_patch_embed.load_encoder, load_encoder])
def test_the_patch_embedding_of_a_float32_encoder_is_float32(load):
    for dtype, given, wanted in (
        ("bfloat16", None, "bfloat16"),
        (np.float32, None, "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ):
        assert load(checkpoint(HF), dtype=dtype, patch_dtype=given).patch_embed.dtype == wanted


def test_a_big_vision_tower_without_a_pooling_head_returns_no_pooler_output(tmp_path):
    tensors = {k: v for k, v in arrays(BV).items() if "MAPHead" not in k}
    np.savez(tmp_path / "params.npz", **tensors)
    output, _ = encode(load_encoder(tmp_path / "params.npz", dtype="float32"), BV)
    assert output.pooler_output is None


def test_the_config_of_an_encoder_has_its_architecture():
    for name, wanted in (
        (HF, Config(96, 2, 2, 176, 14, (16, 16), pooling="attention")),
        (NAFLEX, Config(128, 2, 2, 256, 16, (16, 16), naflex=True, pooling="attention")),
        (BV, Config(128, 2, 2, 256, 16, (14, 14), pooling="attention")),
        ("bv_naflex_p16", Config(96, 2, 2, 176, 16, (16, 16), naflex=True, pooling="attention")),
    ):
        assert load_encoder(checkpoint(name)).config == wanted


def test_omitted_fields_have_the_defaults_of_the_transformers_classes():
    base = Config(768, 12, 12, 3072, 16, (14, 14), eps=1e-6, image_size=(224, 224))
    naflex = Config(768, 12, 12, 3072, 16, (16, 16), eps=1e-6, naflex=True)
    for config, wanted in (
        ({}, base),
        ({"model_type": "siglip_vision_model"}, base),
        ({"model_type": "siglip", "text_config": {}}, base),
        ({"model_type": "siglip", "vision_config": None}, base),
        ({"model_type": "siglip2_vision_model"}, naflex),
        ({"model_type": "siglip2", "vision_config": {}}, naflex),
        ({"num_patches": 256}, naflex),
        ({"num_patches": None}, base),
        (
            {"image_size": 384, "patch_size": 14},
            Config(768, 12, 12, 3072, 14, (27, 27), image_size=(384, 384)),
        ),
    ):
        assert Config.from_hugging_face(config) == wanted


def test_a_remainder_of_the_image_is_dropped(tmp_path):
    # 230 / 14 = 16.4, so the grid is the same as for 224 pixels.
    path = folder(tmp_path, arrays(HF), config_of(HF) | {"image_size": 230})
    encoder = load_encoder(path, patch_dtype="float32", dtype="float32")
    assert encoder.config.image_size == (230, 230)
    image = np.zeros((1, 230, 230, 3), np.uint8)
    image[:, :224, :224] = expected(HF)["images_u8"]
    wanted = expected(HF)["pooler_output"]
    assert np.abs(np.asarray(encoder(image).pooler_output) - wanted).max() <= 1e-4


def four_channels(name):
    """Adds a channel of zeros to the patch embedding of a Hugging Face checkpoint."""
    tensors, key = arrays(name), "embeddings.patch_embedding.weight"
    D = len(tensors[key])
    kernel = tensors[key]
    if kernel.ndim == 2:  # NaFlex
        kernel = np.pad(kernel.reshape(D, -1, 3), [(0, 0), (0, 0), (0, 1)]).reshape(D, -1)
    else:
        kernel = np.pad(kernel, [(0, 0), (0, 1), (0, 0), (0, 0)])
    return tensors | {key: kernel}


def test_images_of_four_channels_are_encoded(tmp_path):
    rng = np.random.default_rng(0)
    path = folder(tmp_path, four_channels(HF), config_of(HF) | {"num_channels": 4})
    encoder = load_encoder(path, dtype="float32", patch_dtype="float32")
    assert encoder.config.channels == encoder.patch_embed.channels == 4
    images = rng.integers(0, 256, (2, 224, 224, 4), np.uint8)
    three = load_encoder(checkpoint(HF), dtype="float32", patch_dtype="float32")
    wanted = three(images[..., :3]).pooler_output
    np.testing.assert_allclose(encoder(images).pooler_output, wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected \[\.\.\., H, W, 4\]"):
        encoder(images[..., :3])


def test_NaFlex_images_of_four_channels_are_encoded(tmp_path):
    rng = np.random.default_rng(0)
    path = folder(tmp_path, four_channels(NAFLEX), config_of(NAFLEX) | {"num_channels": 4})
    encoder = load_encoder(path, dtype="float32", patch_dtype="float32")
    images = [rng.integers(0, 256, (*side, 4), np.uint8) for side in ((48, 64), (96, 32))]
    three = load_encoder(checkpoint(NAFLEX), dtype="float32", patch_dtype="float32")
    found, wanted = (
        each(patches, spatial_shapes=shapes, mask=mask).pooler_output
        for each, (patches, shapes, mask) in (
            (encoder, batch_naflex(images, encoder.config, 12)),
            (three, batch_naflex([image[..., :3] for image in images], three.config, 12)),
        )
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected \[H, W, 4\]"):
        batch_naflex([images[0][..., :3]], encoder.config, 12)


def test_one_channel_in_an_npz_is_read_from_its_shape(tmp_path):
    tensors, key = arrays(BV), "params/img/embedding/kernel"
    np.savez(tmp_path / "params.npz", **(tensors | {key: tensors[key].sum(2, keepdims=True)}))
    encoder = load_encoder(tmp_path / "params.npz", dtype="float32", patch_dtype="float32")
    assert encoder.config.channels == 1
    grey = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 1), np.uint8)
    three = load_encoder(checkpoint(BV), dtype="float32", patch_dtype="float32")
    wanted = three(np.repeat(grey, 3, -1)).pooler_output
    np.testing.assert_allclose(encoder(grey).pooler_output, wanted, atol=1e-4)


@pytest.mark.parametrize("name", [HF, BV])
def test_positions_of_another_grid_load_if_it_is_named(tmp_path, name):
    tensors = arrays(name)
    side = load_encoder(checkpoint(name)).config.grid[0]
    grid = side // 2, side * 2
    if name == BV:
        path = tmp_path / "params.npz"
        np.savez(path, **tensors)
        square = load_encoder(path).config
    else:
        path = folder(tmp_path, tensors, config_of(name))
        square = load_encoder(path).config
    by_config = dataclasses.replace(square, grid=grid, image_size=None)
    ways = [load_encoder(path, grid=grid), load_encoder(path, config=by_config)]
    for encoder in ways:
        assert encoder.config.grid == encoder.patch_embed.grid == grid
        p = encoder.config.patch
        images = np.zeros((1, grid[0] * p, grid[1] * p, 3), np.uint8)
        assert encoder(images).pooler_output.shape == (1, encoder.config.width)
    assert_same(*ways)
    # The rows of the table do not depend on the grid; what is resized from them does.
    np.testing.assert_array_equal(ways[0].patch_embed.table, load_encoder(path).patch_embed.table)
    size = 6 * square.patch, 4 * square.patch
    resized = load_encoder(path, grid=grid, image_size=size, patch_dtype="float32").patch_embed
    stored = load_encoder(path, grid=grid, patch_dtype="float32").patch_embed
    positions = np.asarray(stored.table - stored.offset).reshape(*grid, -1)
    wanted = resize_positions(positions, (6, 4)).reshape(24, -1)
    np.testing.assert_allclose(resized.table - resized.offset, wanted, atol=1e-5)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_the_interpolation_of_positions_can_be_chosen(interpolation):
    p = 14
    arguments = dict(patch_dtype="float32", dtype="float32")
    stored = load_encoder(checkpoint(HF), **arguments).patch_embed
    resized = load_encoder(
        checkpoint(HF), image_size=(9 * p, 20 * p), interpolation=interpolation, **arguments
    ).patch_embed
    positions = np.asarray(stored.table - stored.offset).reshape(16, 16, -1)
    wanted = resize_positions(positions, (9, 20), interpolation=interpolation).reshape(180, -1)
    np.testing.assert_allclose(resized.table - resized.offset, wanted, atol=1e-5)


def test_gelu_new_is_the_tanh_GELU(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF) | {"hidden_act": "gelu_new"})
    output, _ = encode(load_encoder(path, dtype="float32", patch_dtype="float32"), HF)
    assert np.abs(output.pooler_output - expected(HF)["pooler_output"]).max() <= 1e-4


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


DAMAGED: dict[str, tuple[Callable, type[Exception], str, Any]] = {}


def damaged(text, error=ValueError, **arguments):
    def register(function):
        name = function.__name__.replace("_", " ")
        DAMAGED[name] = (function, error, text, arguments)
        return function

    return register


def without(tensors, name):
    return {k: v for k, v in tensors.items() if k != name}


def written(path, content):
    path.write_bytes(content)
    return path


@damaged("there is no", FileNotFoundError)
def nothing(tmp_path):
    return tmp_path / "absent"


@damaged("neither model.safetensors nor model.safetensors.index.json")
def an_empty_folder(tmp_path):
    return tmp_path


@damaged("config.json.*pass config=")
def a_folder_without_a_config(tmp_path):
    save_file(arrays(HF), tmp_path / "model.safetensors")
    return tmp_path


@damaged("picture.png is damaged or has another format.*Expected a folder of Hugging Face")
def a_picture(tmp_path):
    return written(tmp_path / "picture.png", b"\x89PNG\r\n\x1a\n" + bytes(1000))


@damaged("neither model.safetensors nor model.safetensors.index.json.*Pickles are never")
def a_folder_with_a_pickle_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    return tmp_path


@damaged("config.json.*pass config=")
def a_file_without_a_config(tmp_path):
    save_file(arrays(HF), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@damaged("model.safetensors.*damaged")
def a_truncated_file(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    return path


@damaged("model.safetensors.*damaged")
def a_wrong_header(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"\xff" * 8 + content[8:])
    return path


@damaged("model.safetensors.*damaged")
def an_empty_file(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    (path / "model.safetensors").write_bytes(b"")
    return path


@damaged("'encoder.layers.1.mlp.fc2.bias' is missing")
def a_missing_key(tmp_path):
    return folder(tmp_path, without(arrays(HF), "encoder.layers.1.mlp.fc2.bias"), config_of(HF))


@damaged("'embeddings.patch_embedding.weight' is missing")
def a_missing_kernel(tmp_path):
    return folder(tmp_path, without(arrays(HF), "embeddings.patch_embedding.weight"), config_of(HF))


@damaged("'head.attention.in_proj_weight' is missing")
def a_head_that_the_config_promises(tmp_path):
    tensors = {k: v for k, v in arrays(HF).items() if not k.startswith("head.")}
    return folder(tmp_path, tensors, config_of(HF))


@damaged("'head.mlp.fc1.bias' is missing")
def half_a_head(tmp_path):
    config = config_of(HF)
    del config["vision_use_head"]
    return folder(tmp_path, without(arrays(HF), "head.mlp.fc1.bias"), config)


@damaged(r"has shape \[96, 3, 14, 14\], but .* \[128, 3, 14, 14\]")
def another_width(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"hidden_size": 128})


@damaged(r"\[96, 3, 14, 14\], but .* \[96, 3, 16, 16\]")
def another_patch_size(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"patch_size": 16})


@damaged("position_embedding.weight' has shape")
def another_image_size(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"image_size": 448})


@damaged("16 arrays, such as .*encoder.layers.1.* are not part of")
def fewer_layers(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"num_hidden_layers": 1})


@damaged("'encoder.layers.2.*is missing")
def more_layers(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"num_hidden_layers": 3})


@damaged("expected a multiple of the number of heads")
def heads_that_do_not_divide(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"num_attention_heads": 5})


@damaged(r"\[96, 3, 14, 14\], but .* \[96, 588\]")
def a_fixed_tower_said_to_be_NaFlex(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"model_type": "siglip2_vision_model"})


@damaged(r"\[128, 768\], but .* \[128, 3, 16, 16\]")
def a_NaFlex_tower_said_to_be_fixed(tmp_path):
    return folder(tmp_path, arrays(NAFLEX), config_of(NAFLEX) | {"model_type": "siglip"})


@damaged("'fc1.lora_A'|lora")
def arrays_that_nothing_reads(tmp_path):
    extra = {"encoder.layers.0.mlp.fc1.lora_A": np.zeros((4, 4), np.float32)}
    return folder(tmp_path, arrays(HF) | extra, config_of(HF))


@damaged("0 arrays named 'embeddings.patch_embedding.weight'")
def a_text_tower_alone(tmp_path):
    return folder(tmp_path, text_tower(), config_of(HF))


@damaged("model_type is 'siglip_text_model'")
def the_config_of_a_text_tower(tmp_path):
    return folder(tmp_path, text_tower(), {"model_type": "siglip_text_model"})


@damaged("it is a CLIP tower, expected SigLIP. Load it with pallas_patch_embed.load_encoder")
def the_config_of_another_model(tmp_path):
    return folder(tmp_path, arrays(HF), config_of(HF) | {"model_type": "clip_vision_model"})


@damaged("2 arrays named")
def two_towers(tmp_path):
    return folder(tmp_path, renamed("a.") | renamed("b."), config_of(HF))


@damaged("has values that are NaN")
def a_NaN(tmp_path):
    tensors = arrays(HF)
    tensors["encoder.layers.0.mlp.fc1.weight"][3, 4] = np.nan
    return folder(tmp_path, tensors, config_of(HF))


@damaged("the query of its pooling head.*beyond bfloat16")
def finite_weights_whose_product_is_not(tmp_path):
    tensors = arrays(HF)
    tensors["head.attention.in_proj_weight"][:] = 3e38
    tensors["head.probe"][:] = 3e38
    return folder(tmp_path, tensors, config_of(HF))


@damaged("dtype I8")
def integers(tmp_path):
    tensors = arrays(HF)
    tensors["post_layernorm.bias"] = tensors["post_layernorm.bias"].astype(np.int8)
    return folder(tmp_path, tensors, config_of(HF))


for number, (content, text) in enumerate(
    {
        "[1, 2]": "expected an object",
        "null": "expected an object",
        '"siglip"': "expected an object",
        "{": "config.json is damaged",
        "": "config.json is damaged",
        "[" * 100000: "config.json is damaged",
        '{"vision_config": [1]}': r"vision_config is \[1\], expected",
        '{"vision_config": {"model_type": ["siglip"]}}': "model_type is",
        '{"hidden_size": "96"}': "hidden_size is '96', expected a positive integer",
        '{"hidden_size": -1}': "hidden_size is -1",
        '{"hidden_size": true}': "hidden_size is True",
        '{"hidden_size": 96.0}': "hidden_size is 96.0",
        '{"patch_size": [16, 14]}': "patch_size is",
        '{"patch_size": 1000}': "expected at least patch_size",
        '{"num_channels": 0}': "num_channels is 0",
        '{"hidden_act": "swish"}': "activation is 'swish'",
        '{"hidden_act": ["gelu"]}': "activation is",
        '{"model_type": ["siglip"], "vision_config": {}}': "has shape|is missing",
        '{"hidden_act": "' + "x" * 100000 + '"}': "activation is",
        '{"hidden_size": 1' + "0" * 4000 + "}": "hidden_size is too large",
        '{"layer_norm_eps": "small"}': "epsilon",
        '{"layer_norm_eps": 0}': "epsilon",
        '{"vision_use_head": "yes"}': "vision_use_head is 'yes'",
        '{"model_type": "siglip2", "vision_config": {"num_patches": 250}}': "expected a square",
    }.items()
):

    def bad_config(tmp_path, content=content):
        return folder(tmp_path, arrays(HF), content)

    DAMAGED[f"config {number} {content[:40]}"] = (bad_config, ValueError, text, {})


def index(tmp_path, content):
    path = folder(tmp_path, {}, config_of(HF))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    return path


@damaged("no weight_map")
def an_index_without_a_map(tmp_path):
    return index(tmp_path, {"metadata": {}})


@damaged("no weight_map")
def an_index_that_is_no_object(tmp_path):
    return index(tmp_path, [1])


@damaged("expected a file in the same folder")
def an_index_that_leaves_its_folder(tmp_path):
    return index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), "../weights.safetensors")})


@damaged("names the file 'xxx.*expected a file in the same folder")
def a_name_of_a_shard_that_no_file_can_have(tmp_path):
    return index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), "x" * 256)})


@damaged("model-1.safetensors.*cannot be read")
def a_missing_shard(tmp_path):
    return index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), "model-1.safetensors")})


@damaged("post_layernorm.bias' in 'model-1.safetensors'")
def a_shard_without_its_array(tmp_path):
    path = index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), "model-1.safetensors")})
    save_file(without(arrays(HF), "post_layernorm.bias"), path / "model-1.safetensors")
    return path


@damaged("Pickles are never loaded")
def a_pickle(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return written(tmp_path / "weights.pkl", pickle.dumps(Bomb(tmp_path / "ran")))


@damaged("Pickles are never loaded")
def a_pickle_named_safetensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return written(tmp_path / "model.safetensors", pickle.dumps(Bomb(tmp_path / "ran")))


@damaged("not an npz file.*Pickles are never loaded")
def a_pickle_named_npz(tmp_path):
    return written(tmp_path / "params.npz", pickle.dumps(Bomb(tmp_path / "ran")))


@damaged("Pickles are never loaded")
def a_PyTorch_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "weights.bin", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb(tmp_path / "ran")))
    return tmp_path / "weights.bin"


def npz(tmp_path, tensors):
    np.savez(tmp_path / "params.npz", **tensors)
    return tmp_path / "params.npz"


@damaged("it contains pickled objects")
def pickled_objects_in_an_npz(tmp_path):
    bomb = np.array([Bomb(tmp_path / "ran")], object)
    return npz(tmp_path, arrays(BV) | {"params/img/embedding/bias": bomb})


@damaged("'params/img/embedding/bias' is missing")
def something_else_in_an_npz(tmp_path):
    path = npz(tmp_path, without(arrays(BV), "params/img/embedding/bias"))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("params/img/embedding/bias", "text")
    return path


@damaged("damaged")
def a_truncated_npz(tmp_path):
    content = npz(tmp_path, arrays(BV)).read_bytes()
    return written(tmp_path / "params.npz", content[: len(content) // 2])


@damaged("damaged")
def flipped_bytes_in_an_npz(tmp_path):
    content = bytearray(npz(tmp_path, arrays(BV)).read_bytes())
    middle = content.index(b"params/img/embedding/kernel") + 5000
    content[middle : middle + 100] = bytes(100)
    return written(tmp_path / "params.npz", bytes(content))


@damaged("embedding/kernel is damaged.*length differs from the length in its header")
def a_shifted_array_in_an_npz(tmp_path):
    content = bytearray(npz(tmp_path, arrays(BV)).read_bytes())
    header = content.index(b"\x93NUMPY", content.index(b"params/img/embedding/kernel"))
    content[header + 8] ^= 16  # The array would be read from 16 bytes too early.
    return written(tmp_path / "params.npz", bytes(content))


@damaged("embedding/bias is damaged.*length differs from the length in its header")
def an_array_with_more_bytes_than_its_shape(tmp_path):
    path = npz(tmp_path, without(arrays(BV), "params/img/embedding/bias"))
    buffer = io.BytesIO()
    np.save(buffer, arrays(BV)["params/img/embedding/bias"])
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("params/img/embedding/bias.npy", buffer.getvalue() + bytes(16))
    return path


@damaged("embedding/kernel is damaged.*CRC")
def a_flipped_bit_in_an_npz(tmp_path):
    content = bytearray(npz(tmp_path, arrays(BV)).read_bytes())
    content[content.index(b"params/img/embedding/kernel") + 5000] ^= 1
    return written(tmp_path / "params.npz", bytes(content))


def zeros_in_an_npz(tmp_path, name, shape):
    """Writes an archive of a few kilobytes with an array of zeros that is never in memory."""
    path = npz(tmp_path, without(arrays(BV), name))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            left = 4 * math.prod(shape)
            while left:
                left -= file.write(bytes(min(left, 2**20)))
    return path


@damaged("bias' has shape .4000000., but the config or the other arrays imply")
def an_array_of_many_zeros(tmp_path):
    return zeros_in_an_npz(tmp_path, "params/img/embedding/bias", (4_000_000,))


@damaged("bytes but declares 4.* bytes of uncompressed contents")
def zeros_that_would_fill_the_memory(tmp_path):
    return zeros_in_an_npz(tmp_path, "params/img/embedding/bias", (100_000_000,))


@damaged("the version of its numpy format is not")
def an_array_of_another_version(tmp_path):
    path = npz(tmp_path, without(arrays(BV), "params/img/embedding/bias"))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("params/img/embedding/bias.npy", b"\x93NUMPY\x09\x00" + bytes(100))
    return path


@damaged("model.safetensors' is not a regular file")
def a_pipe_for_weights(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_of(HF)))
    os.mkfifo(path / "model.safetensors")
    return path


@damaged("config.json' is not a regular file|there is no .*config.json")
def a_pipe_for_a_config(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    return path


@damaged("params.npz' is not a regular file")
def a_pipe_for_an_npz(tmp_path):
    os.mkfifo(tmp_path / "params.npz")
    return tmp_path / "params.npz"


@damaged("model-1.safetensors' is not a regular file")
def a_pipe_for_a_shard(tmp_path):
    path = index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), "model-1.safetensors")})
    os.mkfifo(path / "model-1.safetensors")
    return path


def an_index_that_names(file):
    def make(tmp_path):
        return index(tmp_path, {"weight_map": dict.fromkeys(arrays(HF), file)})

    return make


for file in ("..", ".", "", "/etc/passwd", "a/b", "a\0b"):
    DAMAGED[f"an index that names {file!r}"] = (
        an_index_that_names(file),
        ValueError,
        "expected a file in the same folder",
        {},
    )


@damaged("dtype F8_E4M3.*Dequantise")
def float8(tmp_path):
    tensors = arrays(HF)
    tensors["post_layernorm.bias"] = tensors["post_layernorm.bias"].astype(ml_dtypes.float8_e4m3fn)
    return folder(tmp_path, tensors, config_of(HF))


@damaged("beyond bfloat16")
def a_weight_that_bfloat16_rounds_to_infinity(tmp_path):
    tensors = arrays(HF)
    tensors["encoder.layers.0.mlp.fc1.weight"][3, 4] = 3.4e38
    return folder(tmp_path, tensors, config_of(HF))


@damaged("not an npz file")
def an_empty_npz(tmp_path):
    return written(tmp_path / "params.npz", b"")


@damaged("not an npz file")
def a_npy_named_npz(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return written(tmp_path / "params.npz", buffer.getvalue())


@damaged("it has 0 image towers.*'params/img/embedding/kernel'")
def a_text_tower_in_an_npz(tmp_path):
    return npz(tmp_path, {"params/txt/Embed_0/embedding": np.zeros((4, 4), np.float32)})


@damaged("encoderblock_1/MlpBlock_0/Dense_0/bias' is missing")
def a_missing_key_in_an_npz(tmp_path):
    name = "params/img/Transformer/encoderblock_1/MlpBlock_0/Dense_0/bias"
    return npz(tmp_path, without(arrays(BV), name))


@damaged("'params/img/embedding/kernel' is missing")
def a_missing_kernel_in_an_npz(tmp_path):
    return npz(tmp_path, without(arrays(BV), "params/img/embedding/kernel"))


@damaged("encoderblock_0.* is missing")
def a_missing_block_in_an_npz(tmp_path):
    return npz(tmp_path, {k: v for k, v in arrays(BV).items() if "block_0" not in k})


@damaged("'params/img/pos_embedding' is missing")
def no_positions_in_an_npz(tmp_path):
    return npz(tmp_path, without(arrays(BV), "params/img/pos_embedding"))


@damaged(r"197 positions, which do not form a square.*grid=\(height, width\)")
def positions_without_a_square_in_an_npz(tmp_path):
    tensors = arrays(BV)
    positions = tensors["params/img/pos_embedding"]
    tensors["params/img/pos_embedding"] = np.concatenate([positions[:, :1], positions], 1)
    return npz(tmp_path, tensors)


@damaged("197 positions, which do not form a 2 x 98 grid", grid=(2, 98))
def another_grid_than_that_of_an_npz(tmp_path):
    return positions_without_a_square_in_an_npz(tmp_path)


@damaged("grid is .8, 32., but its positions form a 16 x 16 grid", grid=(8, 32))
def another_grid_than_that_of_a_NaFlex_npz(tmp_path):
    return checkpoint("bv_naflex_p16")


@damaged("'params/img/cls' is a class token")
def a_class_token_in_an_npz(tmp_path):
    return npz(tmp_path, arrays(BV) | {"params/img/cls": np.zeros((1, 1, 128), np.float32)})


@damaged("1 arrays, such as 'params/img/extra/kernel', are not part of")
def a_further_layer_in_an_npz(tmp_path):
    return npz(tmp_path, arrays(BV) | {"params/img/extra/kernel": np.zeros((128, 9), np.float32)})


@damaged("256 positions, which do not form the 3 x 5 grid.*grid=", grid=(3, 5))
def another_grid_than_that_of_the_weights(tmp_path):
    return checkpoint(HF)


@damaged("its patches have 256 numbers, which are not 3 [*] p [*] p for 3 channels.*config=")
def patches_of_one_channel_in_a_NaFlex_npz(tmp_path):
    tensors, key = arrays("bv_naflex_p16"), "params/img/embedding/kernel"
    return npz(tmp_path, tensors | {key: tensors[key][:256]})


@damaged("it has 2 image towers: below 'a/img/', 'b/img/'")
def two_image_towers_in_an_npz(tmp_path):
    towers = ({k.replace("params/", p): v for k, v in arrays(BV).items()} for p in ("a/", "b/"))
    return npz(tmp_path, {k: v for tower in towers for k, v in tower.items()})


@damaged("interpolation is 'bicubic', but this is a NaFlex encoder", interpolation="bicubic")
def an_interpolation_for_NaFlex(tmp_path):
    return checkpoint(NAFLEX)


@damaged("interpolation is 'cubic', expected one of bilinear", interpolation="cubic")
def an_unknown_interpolation(tmp_path):
    return checkpoint(HF)


@damaged("several variants, 'model.bf16.safetensors', 'model.fp16.safetensors'.*path of one file")
def two_variants(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    for variant in ("fp16", "bf16"):
        (path / f"model.{variant}.safetensors").write_bytes(content)
    return path


@damaged("an adapter of PEFT without its model.*merge_and_unload")
def a_folder_of_an_adapter(tmp_path):
    path = folder(tmp_path, arrays(HF), config_of(HF))
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    return path


@damaged("num_channels is 0, expected a positive integer")
def a_config_below_hundreds_of_others(tmp_path):
    config = config_of(HF) | {"num_channels": 0}
    for _ in range(400):
        config = {"vision_config": {"some_config": {"model_type": []}, "vision_config": config}}
    return folder(tmp_path, arrays(HF), config)


@damaged("contains 2 fields named vision_config")
def two_vision_configs(tmp_path):
    part = {"vision_config": config_of(HF)}
    return folder(tmp_path, arrays(HF), {"vlm_config": part, "other_config": part})


# Names with which libraries replace encoder.layers.0.self_attn.q_proj.weight.
REPLACED = {
    "AWQ": ("qweight", "AWQ or GPTQ"),
    "GPTQ": ("g_idx", "AWQ or GPTQ"),
    "compressed-tensors": ("weight_packed", "compressed-tensors"),
    "float8 with scales": ("weight_scale", "compressed-tensors"),
    "bitsandbytes in 4 bits": ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
    "bitsandbytes in 8 bits": ("SCB", "bitsandbytes"),
    "HQQ": ("W_q", "a library"),
    "quanto": ("weight._data", "a library"),
    "MXFP4": ("weight_blocks", "a library"),
    "LoHa": ("hada_w1_a.default", "an adapter of PEFT that is not merged"),
    "OFT": ("oft_r.default", "an adapter of PEFT that is not merged"),
    "a saved module": ("modules_to_save.default.weight", "an adapter of PEFT that is not merged"),
    "an adapter": ("lora_A.default.weight", "an adapter of PEFT that is not merged"),
    "a wrapped layer": ("base_layer.weight", "an adapter of PEFT that is not merged"),
}


def with_replaced(tmp_path, name):
    projection = "encoder.layers.0.self_attn.q_proj."
    tensors = {k: v for k, v in arrays(HF).items() if k != projection + "weight"}
    return folder(tmp_path, tensors | {projection + name: np.zeros((4, 4), "f")}, config_of(HF))


for library, (name, text) in REPLACED.items():
    DAMAGED[f"weights of {library}"] = (
        lambda tmp_path, name=name: with_replaced(tmp_path, name),
        ValueError,
        f"{name}' belongs to .*{text}",
        {},
    )


@damaged("lora_A.weight' belongs to an adapter of PEFT")
def a_file_of_an_adapter(tmp_path):
    tensors = {"base_model.model.encoder.layers.0.q_proj.lora_A.weight": np.zeros((4, 4), "f")}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path / "adapter_model.safetensors"


@damaged(r"encoder_norm/scale' has shape \[64\]")
def another_shape_in_an_npz(tmp_path):
    return npz(
        tmp_path, arrays(BV) | {"params/img/Transformer/encoder_norm/scale": np.zeros(64, "f")}
    )


@damaged(
    "the config has depth = 3, but the arrays imply 2",
    config={"num_hidden_layers": 3}
    | dict(hidden_size=128, num_attention_heads=2, intermediate_size=256),
)
def another_config_for_an_npz(tmp_path):
    return checkpoint(BV)


@damaged("accepts images of any size", image_size=256)
def an_image_size_for_NaFlex(tmp_path):
    return checkpoint(NAFLEX)


@damaged("expected at least the side of a patch", image_size=(224, 8))
def an_image_smaller_than_a_patch(tmp_path):
    return checkpoint(BV)


for case, (text, arguments) in enumerate(
    {
        "image_size is 0": dict(image_size=0),
        "image_size is True": dict(image_size=True),
        "image_size is 100000000000": dict(image_size=10**11),
        "image_size is 224.0": dict(image_size=224.0),
        "image_size is .1, 2, 3.": dict(image_size=(1, 2, 3)),
        "patch_dtype is 'int4'": dict(patch_dtype="int4"),
        "dtype is 'float16'": dict(dtype="float16"),
        "dtype is None": dict(dtype=None),
    }.items()
):
    DAMAGED[f"arguments {case}"] = (lambda _: checkpoint(BV), ValueError, text, arguments)

DAMAGED["a config of another type"] = (lambda _: checkpoint(BV), TypeError, "config", {"config": 3})


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_refused_with_the_reason(tmp_path, case):
    make, error, text, arguments = DAMAGED[case]
    path = make(tmp_path)
    with pytest.raises(error, match=text) as raised:
        load_encoder(path, **arguments)
    assert type(raised.value) is error and len(str(raised.value)) < 1000
    assert not (tmp_path / "ran").exists()


def test_zeros_are_refused_before_they_are_in_memory(tmp_path):
    path = zeros_in_an_npz(tmp_path, "params/img/embedding/bias", (4_000_000,))
    tracemalloc.start()
    with pytest.raises(ValueError, match="has shape"):
        load_encoder(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000 < 16 * path.stat().st_size


def test_big_endian_arrays_are_read_correctly(tmp_path):
    swapped = {name: x.astype(x.dtype.newbyteorder(">")) for name, x in arrays(BV).items()}
    assert_same(load_encoder(npz(tmp_path, swapped)), load_encoder(checkpoint(BV)))


def test_unpickling_the_bombs_of_these_tests_writes_a_file(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran"))).close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        dict(image_size=224),
        dict(image_size=(224,)),
        dict(image_size=[224, 224]),
        dict(image_size=(224.0, 224.0)),
        dict(image_size=(224, 225), grid=(14, 15)),
        dict(grid=14),
        dict(width=0),
        dict(naflex="yes"),
        dict(naflex=True, image_size=(224, 224)),
        dict(pooling="map"),
        dict(eps=True),
        dict(activation=None),
    ],
    ids=str,
)
def test_a_Config_checks_itself(arguments):
    fields = dict(width=8, depth=1, heads=1, mlp=8, patch=16, grid=(14, 14)) | arguments
    with pytest.raises(ValueError, match=r"expected|which is not a"):
        Config(**fields)
