"""Configs and names of arrays of timm's vision transformers.

A timm checkpoint's config.json names an architecture of timm. The name decides the number of heads,
the activation and the epsilon; the arrays decide all sizes. A bare file of weights states none of
the three, so it needs a config.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from pallas_patch_embed.encoders.arrays import Tower
from pallas_patch_embed.encoders.config import (
    Config,
    check_config,
    check_size,
    read_sides,
    short,
)
from pallas_patch_embed.encoders.names import Names

# Heads by the size in an architecture's name. Source: timm 1.0.31, models/vision_transformer.py and
# models/deit.py.
HEADS = {
    "tiny": 3,
    "xsmall": 4,
    "wee": 4,
    "little": 5,
    "small": 6,
    "medium": 8,
    "mediumd": 8,
    "betwixt": 10,
    "base": 12,
    "large": 16,
    "huge": 16,
    "giant": 16,
    "giantopt": 16,
    "gigantic": 16,
    "so400m": 16,
}
ARCHITECTURE = re.compile(
    rf"(vit|deit|deit3)_({'|'.join(HEADS)})_patch\d+"
    r"(?:_(clip|clip_quickgelu|siglip|siglip_gap|dinov2|reg4_dinov2|gap|reg\d_gap))?(?:_\d+)?"
)

# Heads of architectures that differ from others of their size.
OTHER_HEADS = {
    "vit_base_patch16_gap_224": 16,
    "vit_giant_patch14_dinov2": 24,
    "vit_giant_patch14_reg4_dinov2": 24,
}

# SigLIP architectures with the tanh GELU. The others have the erf GELU, although SigLIP was trained
# with the tanh GELU.
TANH = re.compile(
    r"vit_(base_patch32|giantopt_patch16|so400m_patch16|large_patch16(?=.*_512))_siglip.*"
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}

POOLINGS = {"token": "class", "avg": "mean", "map": "attention", "": "none"}

# Arguments of an architecture that the arrays show, or that change nothing in inference.
SHOWN_BY_ARRAYS = {
    "class_token",
    "depth",
    "drop_path_rate",
    "drop_rate",
    "dynamic_img_size",
    "embed_dim",
    "fc_norm",
    "in_chans",
    "init_values",
    "mlp_ratio",
    "no_embed_class",
    "num_classes",
    "patch_drop_rate",
    "patch_size",
    "pre_norm",
    "qkv_bias",
    "reg_tokens",
    "strict_img_size",
}
READ = {"act_layer", "global_pool", "img_size", "num_heads"}

NAMES = Names(
    patch="patch_embed.proj.",
    positions="pos_embed",
    class_tokens=("cls_token",),
    registers="reg_token",
    first_norm="norm_pre.",
    block="blocks.{}.",
    norm1="norm1.",
    qkv=("attn.qkv.",),
    out="attn.proj.",
    scale1="ls1.gamma",
    norm2="norm2.",
    fc1=("mlp.fc1.",),
    fc2="mlp.fc2.",
    gated_fc1=("mlp.fc1.",),
    gated_fc2="mlp.fc2.",
    scale2="ls2.gamma",
    norm="norm.",
    query="attn_pool.latent",
    head_qkv=("attn_pool.q.", "attn_pool.kv."),
    head_out="attn_pool.proj.",
    head_norm="attn_pool.norm.",
    head_mlp=("attn_pool.mlp.fc1.", "attn_pool.mlp.fc2."),
    # The classifier, also of a CLIP that was fine-tuned.
    unused=("head.",),
    interpolation="bicubic-antialiased",
)


def names_in(tower: Tower) -> Names:
    """Returns the names of a tower's arrays: the last norm is fc_norm if it follows the pooling."""
    return dataclasses.replace(NAMES, norm="fc_norm.") if tower.has("fc_norm.") else NAMES


def check_architecture(config: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Returns the name of the architecture, and its model, size and kind.

    Raises:
      ValueError: the architecture is not supported.
    """
    name = check_config(config).get("architecture")
    found = ARCHITECTURE.fullmatch(name) if isinstance(name, str) else None
    if not isinstance(name, str) or found is None:
        raise ValueError(
            f"timm's architecture is {short(name)}, which is not supported, expected a ViT, DeiT, "
            "CLIP, SigLIP or DINOv2, such as vit_base_patch16_224. Load it with timm."
        )
    model, size, kind = found.groups("")
    return name, model, size, kind


def config_of(config: Mapping[str, Any], tower: Tower) -> Config:
    """Reads the contents of timm's config.json; the arrays decide the sizes.

    Raises:
      ValueError: the architecture or an argument of it is not supported, or a field is wrong.
    """
    name, model, size, kind = check_architecture(config)
    arguments = check_config(config.get("model_args") or {})
    for argument, value in arguments.items():
        if argument not in SHOWN_BY_ARRAYS | READ:
            raise ValueError(
                f"model_args has {argument} = {short(value)}, which is not supported. Load the "
                "model with timm."
            )
    D, C, p, _ = tower.shape("patch_embed.proj.weight", 4)
    check_size("the side of a patch", p)
    gated = kind.endswith("dinov2") and size == "giant"
    siglip, clip = kind.startswith("siglip"), kind.startswith("clip")
    registers = tower.shape("reg_token", 3)[1] if tower.has("reg_token") else 0
    family = "siglip" if siglip else "clip" if clip else "vit"
    if kind.endswith("dinov2"):
        family = "dinov2_with_registers" if registers else "dinov2"
    if model != "vit":
        family = "deit"
    activation = "gelu"
    if kind == "clip_quickgelu":
        activation = "quick_gelu"
    elif TANH.fullmatch(name):
        activation = "gelu_pytorch_tanh"
    elif gated:
        activation = "silu"
    if (given := arguments.get("act_layer")) is not None:
        if not isinstance(given, str) or given not in ACTIVATIONS:
            raise ValueError(
                f"act_layer is {short(given)}, expected one of {', '.join(ACTIVATIONS)}."
            )
        activation = ACTIVATIONS[given]
    heads = arguments.get("num_heads", OTHER_HEADS.get(name, HEADS[size]))
    height, width = _image_size(config, arguments)
    pooling = _pooling(arguments, kind)
    first_norm = tower.has("norm_pre.")
    without_bias: tuple[str, ...] = ("patch",) if first_norm else ()
    if not tower.has("blocks.0.attn.qkv.bias"):
        without_bias += ("query", "key", "value")
    return Config(
        width=D,
        depth=tower.blocks(NAMES.block),
        heads=heads,
        mlp=tower.shape("blocks.0.mlp.fc2.weight", 2)[1],
        patch=p,
        grid=(height // p, width // p),
        eps=1e-5 if clip else 1e-6,
        image_size=(height, width),
        activation=activation,
        pooling=pooling,
        channels=C,
        family=family,
        class_tokens=int(tower.has("cls_token")),
        registers=registers,
        first_norm=first_norm,
        # The norm of a single token may precede or follow the pooling. It follows in a CLIP, as in
        # transformers.
        norm_after_pooling=(clip and pooling == "class") or tower.has("fc_norm."),
        gated=gated,
        layer_scale=tower.has("blocks.0.ls1."),
        without_bias=without_bias,
    )


def _pooling(arguments: Mapping[str, Any], kind: str) -> str:
    of_kind = "avg" if kind.endswith("gap") else "map" if kind == "siglip" else "token"
    given = arguments.get("global_pool", of_kind)
    if not isinstance(given, str) or given not in POOLINGS:
        raise ValueError(f"global_pool is {short(given)}, expected one of token, avg or map.")
    return POOLINGS[given]


def _image_size(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the (height, width) of the images for which there are positions."""
    size: Any = arguments.get("img_size")
    if size is None:
        # Files of earlier versions have the fields of pretrained_cfg beside the architecture.
        pretrained = check_config(config.get("pretrained_cfg") or config)
        size = pretrained.get("input_size")
        size = size[1:] if isinstance(size, list) and len(size) == 3 else size
    return read_sides("img_size of model_args, or input_size of pretrained_cfg,", size)
