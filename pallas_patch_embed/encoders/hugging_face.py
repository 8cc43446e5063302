"""Configs and names of arrays of the families of encoders in Hugging Face transformers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pallas_patch_embed.encoders.arrays import Tower
from pallas_patch_embed.encoders.config import (
    Config,
    TextConfig,
    check_config,
    check_ratio,
    check_size,
    read_sides,
    short,
)
from pallas_patch_embed.encoders.names import Names

# Whether a SigLIP model is NaFlex, by its model_type. SigLIP2 checkpoints with a fixed resolution
# are published with the model_type of SigLIP.
NAFLEX = {
    "siglip": False,
    "siglip_vision_model": False,
    "siglip2": True,
    "siglip2_vision_model": True,
}

# The family of each model_type.
FAMILIES = dict.fromkeys(NAFLEX, "siglip") | {
    "clip": "clip",
    "clip_vision_model": "clip",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2_with_registers",
    "dinov3_vit": "dinov3_vit",
    "vit": "vit",
    "deit": "deit",
}

# The model_type of the vision tower of larger models whose vision_config does not state it. Source:
# the default configs of transformers 5.24.
TOWERS = dict.fromkeys(
    (
        *("clip", "granite4_vision", "llava", "llava_next", "llava_next_video", "video_llava"),
        "vipllava",
    ),
    "clip_vision_model",
)
TOWERS |= dict.fromkeys(
    (
        *("aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "gemma3"),
        *("llava_onevision", "modernvbert", "paligemma", "shieldgemma2", "siglip"),
    ),
    "siglip_vision_model",
)
TOWERS |= dict.fromkeys(("lfm2_vl", "siglip2"), "siglip2_vision_model")

# The fields of a larger model that are the config of its vision tower.
VISION = {"vision_config", "vision_config_dict"}

# Defaults of fields that every family has, from transformers 5.24; below those that differ.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "image_size": 224,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "siglip": {"intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh", "num_patches": 256},
    "clip": {
        "intermediate_size": 3072,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "dinov2": {"mlp_ratio": 4, "patch_size": 14, "use_swiglu_ffn": False},
    "dinov2_with_registers": {
        "mlp_ratio": 4,
        "use_swiglu_ffn": False,
        "num_register_tokens": 4,
    },
    "dinov3_vit": {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
        "use_gated_mlp": False,
        "num_register_tokens": 0,
    },
    "vit": {"intermediate_size": 3072, "layer_norm_eps": 1e-12},
    "deit": {"intermediate_size": 3072, "layer_norm_eps": 1e-12},
}

# The family of a text tower, by its model_type or that of the model that contains it.
TEXT_FAMILIES = {
    "siglip": "siglip",
    "siglip_text_model": "siglip",
    "siglip2": "siglip",
    "siglip2_text_model": "siglip",
    "clip": "clip",
    "clip_text_model": "clip",
}

# Defaults of a text tower's fields, from transformers 5.24.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "clip": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "eos_token_id": 49407,
    },
}

# The eos_token_id in the configs of older CLIPs, such as OpenAI's. It is not that of the end token,
# so transformers pools their texts at the largest id.
WRONG_END = 2

# The classes whose models have the pooler of ViT and DeiT: a dense layer and tanh.
WITH_POOLER = ("ViTModel", "DeiTModel")

_SIGLIP = Names(
    patch="embeddings.patch_embedding.",
    positions="embeddings.position_embedding.weight",
    block="encoder.layers.{}.",
    norm1="layer_norm1.",
    qkv=("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    out="self_attn.out_proj.",
    norm2="layer_norm2.",
    fc1=("mlp.fc1.",),
    fc2="mlp.fc2.",
    norm="post_layernorm.",
    query="head.probe",
    head_qkv=("head.attention.in_proj_",),
    head_out="head.attention.out_proj.",
    head_norm="head.layernorm.",
    head_mlp=("head.mlp.fc1.", "head.mlp.fc2."),
    unused=("embeddings.position_ids",),
)
_VIT = Names(
    patch="embeddings.patch_embeddings.projection.",
    positions="embeddings.position_embeddings",
    class_tokens=("embeddings.cls_token", "embeddings.distillation_token"),
    block="encoder.layer.{}.",
    norm1="layernorm_before.",
    qkv=("attention.attention.query.", "attention.attention.key.", "attention.attention.value."),
    out="attention.output.dense.",
    norm2="layernorm_after.",
    fc1=("intermediate.dense.",),
    fc2="output.dense.",
    norm="layernorm.",
    pooler="pooler.dense.",
    unused=("embeddings.mask_token",),
)
_DINOV2 = dataclasses.replace(
    _VIT,
    registers="embeddings.register_tokens",
    norm1="norm1.",
    scale1="layer_scale1.lambda1",
    norm2="norm2.",
    fc1=("mlp.fc1.",),
    fc2="mlp.fc2.",
    gated_fc1=("mlp.weights_in.",),
    gated_fc2="mlp.weights_out.",
    scale2="layer_scale2.lambda1",
)
_PROJECTIONS: dict[str, Any] = {
    "qkv": ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    "out": "attention.o_proj.",
}
_GATED: dict[str, Any] = {
    "gated_fc1": ("mlp.gate_proj.", "mlp.up_proj."),
    "gated_fc2": "mlp.down_proj.",
}
NAMES = {
    "siglip": _SIGLIP,
    "clip": dataclasses.replace(
        _SIGLIP,
        class_tokens=("embeddings.class_embedding",),
        first_norm="pre_layrnorm.",
        projection="visual_projection.weight",
        parent="vision_model.",
    ),
    "dinov2": _DINOV2,
    "dinov2_with_registers": dataclasses.replace(_DINOV2, interpolation="bicubic-antialiased"),
    "dinov3_vit": dataclasses.replace(
        _DINOV2,
        patch="embeddings.patch_embeddings.",
        block="layer.{}.",
        fc1=("mlp.up_proj.",),
        fc2="mlp.down_proj.",
        norm="norm.",
        **_PROJECTIONS,
        **_GATED,
    ),
    "vit": _VIT,
    "deit": _VIT,
}

_SIGLIP_TEXT = dataclasses.replace(
    _SIGLIP,
    patch="embeddings.token_embedding.",
    norm="final_layer_norm.",
    pooler="head.",
)
TEXT_NAMES = {
    "siglip": _SIGLIP_TEXT,
    "clip": dataclasses.replace(
        _SIGLIP_TEXT, pooler="", projection="text_projection.weight", parent="text_model."
    ),
}

# The names inside of transformers 5, which `save_pretrained(..., save_original_format=False)`
# writes, where they differ from the published ones.
_INNER_VIT = _PROJECTIONS | {"block": "layers.{}.", "fc1": ("mlp.fc1.",), "fc2": "mlp.fc2."}
INNER: dict[str, dict[str, Any]] = {
    "vit": _INNER_VIT,
    "deit": _INNER_VIT,
    "dinov2": _PROJECTIONS | _GATED,
    "dinov2_with_registers": _PROJECTIONS | _GATED,
    "dinov3_vit": {"block": "model.layer.{}."},
}


def names_in(tower: Tower, family: str) -> Names:
    """Returns the names of a family's arrays in this tower."""
    names = NAMES[family]
    inner = dataclasses.replace(names, **INNER.get(family, {}))
    return inner if tower.has(inner.block.format(0) + inner.out) else names


def config_of(config: Mapping[str, Any]) -> Config:
    """Reads the contents of a config.json, as `Config.from_hugging_face`."""
    whole, vision = _vision_config(check_config(config))
    family, naflex = _family(whole, vision)
    fields: dict[str, Any] = {
        name: default if vision.get(name) is None else vision[name]
        for name, default in (DEFAULTS | OF_FAMILY[family]).items()
    }
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_channels"):
        check_size(name, fields[name])
    patch = _square(fields["patch_size"])
    if naflex:
        S = fields["num_patches"]
        check_size("num_patches", S)
        grid, image_size = (math.isqrt(S),) * 2, None
        if math.prod(grid) != S:
            raise ValueError(
                f"num_patches is {S}, expected a square number, because positions form a grid."
            )
    else:
        image_size = read_sides("image_size", fields["image_size"])
        grid = (image_size[0] // patch, image_size[1] // patch)
        if 0 in grid:
            shown = " x ".join(map(str, dict.fromkeys(image_size)))
            raise ValueError(f"image_size is {shown}, expected at least patch_size, {patch}.")
    rotary = family == "dinov3_vit"
    gated = _flag(fields, "use_gated_mlp") or _flag(fields, "use_swiglu_ffn")
    return Config(
        width=fields["hidden_size"],
        depth=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        mlp=_mlp(fields),
        patch=patch,
        grid=grid,
        eps=fields["layer_norm_eps"],
        naflex=naflex,
        image_size=image_size,
        # DINOv2's gated MLPs are SwiGLU, whatever hidden_act says.
        activation="silu" if _flag(fields, "use_swiglu_ffn") else fields["hidden_act"],
        pooling=_pooling(family, whole, vision),
        channels=fields["num_channels"],
        family=family,
        class_tokens={"siglip": 0, "deit": 2}.get(family, 1),
        registers=fields.get("num_register_tokens", 0),
        first_norm=family == "clip",
        norm_after_pooling=family == "clip",
        gated=gated,
        rope_theta=_rope_theta(vision, fields) if rotary else None,
        layer_scale=family.startswith("dino"),
        without_bias=_without_bias(family, fields),
    )


def text_config_of(config: Mapping[str, Any]) -> TextConfig:
    """Reads the config of a text tower, or of a model with a `text_config`.

    Missing fields get the defaults of transformers' class.

    Raises:
      ValueError: `config` is not such a config, or a value has a wrong type.
    """
    text = whole = check_config(config)
    if {"text_config", "text_config_dict", "vision_config"}.intersection(whole):
        # As in transformers, the older field goes first.
        text = check_config(whole.get("text_config_dict") or whole.get("text_config") or {})
    model_type = text.get("model_type") or whole.get("model_type") or "siglip"
    if not isinstance(model_type, str) or model_type not in TEXT_FAMILIES:
        raise ValueError(
            f"its model_type is {short(model_type)}, which has no text tower that is supported, "
            f"expected one of {', '.join(TEXT_FAMILIES)}."
        )
    family = TEXT_FAMILIES[model_type]
    fields = {
        name: default if text.get(name) is None else text[name]
        for name, default in TEXT_DEFAULTS[family].items()
    }
    end = fields.get("eos_token_id")
    pooling = "last" if end is None else "largest" if end == WRONG_END else "end"
    return TextConfig(
        width=fields["hidden_size"],
        depth=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        mlp=fields["intermediate_size"],
        vocabulary=fields["vocab_size"],
        length=fields["max_position_embeddings"],
        eps=fields["layer_norm_eps"],
        activation=fields["hidden_act"],
        causal=family == "clip",
        pooling=pooling,
        end_token=end if pooling == "end" else None,
        family=family,
    )


def _vision_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Finds the config of the vision tower; returns the config that contains it, and it.

    The tower's config is the config itself, its innermost field vision_config, or the same of one
    of its fields whose names end in _config, such as vlm_config.
    """
    owners, unread = [], [config]
    while unread:
        part = unread.pop()
        if VISION.intersection(part) or (part is config and "text_config" in part):
            vision = _vision_of(part)
            if isinstance(vision, Mapping) and "vision_config" in vision:
                unread.append(vision)
            else:
                owners.append(part)
        elif part is not config and str(part.get("model_type")) in FAMILIES:
            owners.append({"vision_config": part})
        else:
            unread += [
                value
                for name, value in part.items()
                if str(name).endswith("_config") and isinstance(value, Mapping)
            ]
    if len(owners) > 1:
        raise ValueError(
            f"the config contains {len(owners)} fields named vision_config, expected one. Pass "
            "that of the vision tower as config=."
        )
    if not owners:
        return config, config
    vision = _vision_of(owners[0])
    if not isinstance(vision, Mapping):
        raise ValueError(f"vision_config is {short(vision)}, expected an object of fields.")
    return owners[0], vision


def _vision_of(config: Mapping[str, Any]) -> Any:
    """Returns the config of the vision tower. As in transformers, the older field goes first."""
    vision = config.get("vision_config_dict") or config.get("vision_config")
    return {} if vision is None else vision


def _family(config: Mapping[str, Any], vision: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the vision tower's family and whether it is NaFlex.

    The tower's own model_type decides, or else the whole model's. Without either it is a SigLIP.
    """
    model_type = vision.get("model_type")
    whole = config.get("model_type")
    if model_type is None and isinstance(whole, str):
        model_type = TOWERS.get(whole, whole)
    if model_type is None:
        return "siglip", vision.get("num_patches") is not None
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type is {short(model_type)}, which is not supported, expected one of "
            f"{', '.join(FAMILIES)}. Pass the config of such a vision tower."
        )
    return FAMILIES[model_type], NAFLEX.get(model_type, False)


def _pooling(family: str, whole: Mapping[str, Any], vision: Mapping[str, Any]) -> str | None:
    """Returns how transformers pools the tokens in the class that the config names."""
    if family == "siglip":
        head = vision.get("vision_use_head")
        if not isinstance(head, bool | None):
            raise ValueError(f"vision_use_head is {short(head)}, expected true or false.")
        return {None: None, True: "attention", False: "none"}[head]
    if family in ("vit", "deit") and vision is not whole:
        return None  # The tower of a larger model has no class of its own.
    named = whole.get("architectures")
    if family not in ("vit", "deit") or not isinstance(named, list) or len(named) != 1:
        return "class"
    if named[0] not in WITH_POOLER:
        return "class"
    activation = vision.get("pooler_act")
    if activation not in (None, "tanh"):
        raise ValueError(f"pooler_act is {short(activation)}, expected 'tanh'.")
    return "dense"


def _mlp(fields: Mapping[str, Any]) -> int:
    if "mlp_ratio" not in fields:
        return fields["intermediate_size"]
    ratio = fields["mlp_ratio"]
    check_ratio(ratio)
    width = int(fields["hidden_size"] * ratio)
    if not _flag(fields, "use_swiglu_ffn"):
        return width
    # Two thirds of the width, as a multiple of 8, so that three products cost as much as two.
    return (int(width * 2 / 3) + 7) // 8 * 8


def _without_bias(family: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    if family == "clip":
        return ("patch",)
    has = {name: _flag(fields, "qkv_bias") for name in ("query", "key", "value")}
    if family == "dinov3_vit":
        has = {name: _flag(fields, f"{name}_bias") for name in has}
        has |= {"out": _flag(fields, "proj_bias"), "mlp": _flag(fields, "mlp_bias")}
    return tuple(name for name, present in has.items() if not present)


def _rope_theta(vision: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    parameters = vision.get("rope_parameters")
    if parameters is not None:
        raise ValueError(
            f"rope_parameters is {short(parameters)}, which is not supported, expected rope_theta."
        )
    return fields["rope_theta"]


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {short(value)}, expected true or false.")
    return value


def _square(value: Any) -> int:
    """Reads the side of a patch, which is an integer or two equal ones."""
    height, width = read_sides("patch_size", value)
    if height != width:
        raise ValueError(f"patch_size is {short(value)}, expected square patches.")
    return height
