"""Configs and names of arrays of open_clip's vision towers."""

from collections.abc import Mapping
from typing import Any

from pallas_patch_embed.encoders import timm
from pallas_patch_embed.encoders.arrays import Tower
from pallas_patch_embed.encoders.config import (
    Config,
    check_config,
    check_ratio,
    check_size,
    read_sides,
    short,
)
from pallas_patch_embed.encoders.names import Names

# Fields of a vision_cfg, with open_clip's defaults. Source: CLIPVisionCfg of open_clip 3.3.
DEFAULTS: dict[str, Any] = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
    "ls_init_value": None,
    "no_ln_pre": False,
    "final_ln_after_pool": False,
    "pool_type": "tok",
    "act_kwargs": None,
    "norm_kwargs": None,
}
# Fields that change nothing in inference, or how the weights were first drawn.
HARMLESS = {"patch_dropout", "output_tokens", "pos_embed_type", "timm_model_pretrained"}
HARMLESS |= {"timm_drop", "timm_drop_path", "timm_proj_bias"}
# Fields that are not supported, with the values that switch them off.
OFF: dict[str, Any] = {
    "attentional_pool": False,
    "block_type": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
}

NAMES = Names(
    patch="conv1.",
    positions="positional_embedding",
    class_tokens=("class_embedding",),
    first_norm="ln_pre.",
    block="transformer.resblocks.{}.",
    norm1="ln_1.",
    qkv=("attn.in_proj_",),
    out="attn.out_proj.",
    scale1="ls_1.gamma",
    norm2="ln_2.",
    fc1=("mlp.c_fc.",),
    fc2="mlp.c_proj.",
    scale2="ls_2.gamma",
    norm="ln_post.",
    projection="proj",
    transposed_projection=True,
    interpolation="bicubic-antialiased",
)


def trunk_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns timm's config of the vision tower, or None if open_clip's own transformer is it.

    Raises:
      ValueError: what follows the trunk is not supported.
    """
    vision = _vision(config)
    if (name := vision.get("timm_model_name")) is None:
        return None
    if vision.get("timm_proj", "linear") != "none":
        raise ValueError(
            f"timm_proj is {short(vision.get('timm_proj', 'linear'))}, which is not supported, "
            "expected 'none'. Load the model with open_clip."
        )
    size = vision.get("image_size", DEFAULTS["image_size"])
    return {
        "architecture": name,
        "model_args": {"img_size": size, "global_pool": vision.get("timm_pool", "avg")},
    }


def config_of(config: Mapping[str, Any], tower: Tower) -> Config:
    """Reads the contents of an open_clip_config.json.

    Raises:
      ValueError: a field is wrong, or states something that is not supported.
    """
    if (trunk := trunk_of(config)) is not None:
        return timm.config_of(trunk, tower)
    vision = _vision(config)
    for name, value in vision.items():
        supported = (
            name in DEFAULTS or name in HARMLESS or name.startswith(("timm_", "attn_pooler"))
        )
        if not supported and (name not in OFF or value != OFF[name]):
            raise ValueError(
                f"vision_cfg has {name} = {short(value)}, which is not supported. Load the model "
                "with open_clip."
            )
    fields = DEFAULTS | dict(vision)
    for name in ("layers", "width", "head_width", "patch_size"):
        check_size(name, fields[name])
    height, width = read_sides("image_size", fields["image_size"])
    pooling = {"tok": "class", "avg": "mean", "none": "none"}.get(str(fields["pool_type"]))
    if pooling is None:
        raise ValueError(f"pool_type is {short(fields['pool_type'])}, expected 'tok' or 'avg'.")
    p, ratio = fields["patch_size"], fields["mlp_ratio"]
    check_ratio(ratio)
    return Config(
        width=fields["width"],
        depth=fields["layers"],
        heads=fields["width"] // fields["head_width"],
        mlp=int(fields["width"] * ratio),
        patch=p,
        grid=(height // p, width // p),
        eps=check_config(fields["norm_kwargs"] or {}).get("eps", 1e-5),
        image_size=(height, width),
        activation=_activation(check_config(config["model_cfg"]), fields),
        pooling=pooling,
        family="clip",
        class_tokens=1,
        first_norm=not fields["no_ln_pre"],
        # The norm of a single token is the same before and after pooling.
        norm_after_pooling=pooling == "class" or bool(fields["final_ln_after_pool"]),
        layer_scale=fields["ls_init_value"] is not None,
        without_bias=("patch",),
    )


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model = check_config(check_config(config).get("model_cfg"))
    return check_config(model.get("vision_cfg"))


def _activation(model: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    quick, arguments = model.get("quick_gelu", False), fields["act_kwargs"]
    if not isinstance(quick, bool):
        raise ValueError(f"quick_gelu is {short(quick)}, expected true or false.")
    if arguments not in (None, {}, {"approximate": "tanh"}) or (quick and arguments):
        raise ValueError(f"act_kwargs is {short(arguments)}, which is not supported.")
    if quick:
        return "quick_gelu"
    return "gelu_pytorch_tanh" if arguments else "gelu"
