"""Generates the folders beside this file: small random encoders, and what their libraries compute.

Every folder is written by its library, loaded by it again, and run. It needs the versions that
../README.md names. `make.py NAME ...` generates only those folders.
Without names it also writes inner_names.json and timm.json.
"""

import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import open_clip
import timm
import torch
import transformers
from open_clip.push_to_hf_hub import save_for_hf as save_open_clip
from safetensors.torch import load_file
from timm.models import save_for_hf as save_timm
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

FOLDER = Path(__file__).parent
CLIP = OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
HALF = (0.5,) * 3, (0.5,) * 3

# Height and width of the images in patches. The other ones have positions enlarged along one axis
# and reduced along the other, because antialiasing matters most when they are reduced.
TRAINED_GRID = 4, 4
OTHER_GRID = 6, 3

# timm's MLPs that this package has: with one activation, or SwiGLU.
MLPS = timm.layers.Mlp, timm.layers.GluMlp

# Names of parameters that are added to tokens or are tokens.
TOKENS = ("token", "class_embedding", "position", "pos_embed", "probe", "latent")


@dataclass
class Golden:
    """One folder.

    Attributes:
      make: returns the model, with any weights.
      save: writes the model into a folder.
      load: reads the model from that folder, for an image size (height, width), or None for the
        trained one.
      run: returns the outputs for pixels [B, C, H, W], as a dictionary.
      patch: side of a patch in pixels.
      normalisation: (mean, standard deviation) of the pixels.
      weak_class_token: whether the class token and its position are small. Their variance is then
        close to epsilon, so that a wrong epsilon of the first norm changes the output.
    """

    make: Callable[[], torch.nn.Module]
    save: Callable[[torch.nn.Module, Path], None]
    load: Callable[[Path, tuple[int, int] | None], torch.nn.Module]
    run: Callable[[torch.nn.Module, torch.Tensor], dict[str, torch.Tensor]]
    patch: int
    normalisation: tuple[tuple[float, ...], tuple[float, ...]]
    weak_class_token: bool = field(default=False, kw_only=True)


@torch.no_grad()
def draw(model, generator, weak_class_token):
    """Draws all parameters at random, except the scale and bias of a contrastive loss."""
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator)
        uniform = torch.rand(parameter.shape, generator=generator)
        last = name.rsplit(".", 1)[-1]
        if parameter.numel() == 1:
            continue
        if last in ("lambda1", "gamma"):
            value = torch.where(normal < 0, -1, 1) * (0.3 + 1.2 * uniform)
        elif last.endswith("bias"):
            value = 0.2 * normal
        elif any(word in name for word in TOKENS):
            value = 0.5 * normal
            if weak_class_token and last in ("cls_token", "class_embedding"):
                value *= 0.004
            elif weak_class_token and "pos" in name:
                value.view(-1, value.shape[-1])[0] *= 0.004
        elif parameter.ndim == 1:
            value = 1 + 0.2 * normal
        else:
            # open_clip multiplies by its projections from the right.
            right = last in ("proj", "text_projection")
            fan_in = parameter.shape[0] if right else parameter[0].numel()
            value = normal / fan_in**0.5
        parameter.copy_(value)


def draw_images(rng, height, width):
    """Returns two uint8 images [2, height, width, 3]: smooth random pictures with noise."""
    coarse = torch.from_numpy(rng.uniform(0, 255, (2, 3, 4, 4)))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    images = smooth.permute(0, 2, 3, 1).numpy() + rng.normal(0, 10, (2, height, width, 3))
    return np.uint8(np.clip(np.round(images), 0, 255))


def pixels_of(images, normalisation):
    """Returns normalised pixels in float64, with channels first."""
    mean, deviation = np.array(normalisation)
    return torch.from_numpy(np.moveaxis((images / 255 - mean) / deviation, -1, 1))


@torch.no_grad()
def generate(name, golden):
    """Writes one folder."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    seed = zlib.crc32(name.encode())
    model = golden.make().eval()
    draw(model, torch.Generator().manual_seed(seed), golden.weak_class_token)
    golden.save(model, folder)
    drawn = model.state_dict()

    rng = np.random.default_rng(seed)
    arrays = {"normalisation": np.array(golden.normalisation)}
    for prefix, grid in ("", TRAINED_GRID), ("other_", OTHER_GRID):
        size = grid[0] * golden.patch, grid[1] * golden.patch
        images = draw_images(rng, *size)
        model = golden.load(folder, size if prefix else None).eval()
        if not prefix:
            loaded = model.state_dict()
            assert drawn.keys() == loaded.keys(), drawn.keys() ^ loaded.keys()
            for key, value in drawn.items():
                assert torch.equal(value, loaded[key]), f"{name}: {key} differs after loading"
        outputs = golden.run(model.double(), pixels_of(images, golden.normalisation))
        arrays[prefix + "images"] = images
        for key, value in outputs.items():
            assert value.dtype == torch.float64 and value.isfinite().all()
            if not (prefix and key.startswith("hidden_state_")):
                arrays[prefix + key] = value.float().numpy()
    np.savez_compressed(folder / "expected.npz", **arrays)
    shapes = {key: value.shape for key, value in arrays.items()}
    print(name, sum(file.stat().st_size for file in folder.iterdir()), shapes, flush=True)


# Hugging Face


def transformers_golden(
    model_class, config, normalisation, *, tower="", pooling="model", load=None, **options
):
    """Returns a golden of transformers.

    Args:
      model_class: class of the model, whose `save_pretrained` writes the folder.
      config: the model's configuration.
      normalisation: (mean, standard deviation).
      tower: the attribute that is the vision tower, "" if the model is one.
      pooling: "model" for the tower's own pooled output, "class" for the class token, "none".
      load: arguments that the class needs besides its configuration.
      options: those of Golden.
    """
    vision = getattr(config, "vision_config", config)
    load = load or {}
    # The position embeddings of these are resized for any image.
    interpolates = vision.model_type.startswith("dinov")

    def run(model, pixels):
        encoder = getattr(model, tower) if tower else model
        resize = {} if interpolates else {"interpolate_pos_encoding": True}
        output = encoder(pixels, output_hidden_states=True, **resize)
        assert len(output.hidden_states) == vision.num_hidden_layers + 1
        outputs = {
            "last_hidden_state": output.last_hidden_state,
            "hidden_state_0": output.hidden_states[0],
            "hidden_state_-2": output.hidden_states[-2],
        }
        if pooling == "model":
            outputs["pooler_output"] = output.pooler_output
        if pooling == "class":
            outputs["pooler_output"] = output.last_hidden_state[:, 0]
        if pooling != "model":
            assert output.pooler_output is None
        if hasattr(model, "visual_projection"):
            outputs["image_embeds"] = model.visual_projection(output.pooler_output)
        return outputs

    def make():
        return model_class(config, **load)

    def save(model, folder):
        model.save_pretrained(folder)

    def from_folder(folder, size):
        return model_class.from_pretrained(folder, **load)

    return Golden(make, save, from_folder, run, vision.patch_size, normalisation, **options)


def sizes(**changes):
    """Returns fields that most configurations of transformers share."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    } | changes


def dinov2_sizes(**changes):
    """Returns fields of DINOv2, whose MLP has `mlp_ratio` times the width."""
    fields = sizes(image_size=28, patch_size=7, mlp_ratio=2) | changes
    return {key: value for key, value in fields.items() if key != "intermediate_size"}


def hugging_face():
    """Returns the goldens of transformers."""
    Dinov2, Dinov3 = transformers.Dinov2Model, transformers.DINOv3ViTModel
    Dinov2Config, Dinov3Config = transformers.Dinov2Config, transformers.DINOv3ViTConfig
    ViTConfig, DeiTConfig = transformers.ViTConfig, transformers.DeiTConfig
    wide = {"hidden_size": 48, "num_attention_heads": 2}
    clip_whole = transformers.CLIPConfig(
        text_config={
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 8,
            "bos_token_id": 38,
            "eos_token_id": 39,
        },
        vision_config=sizes(hidden_act="gelu", layer_norm_eps=0.01),
        projection_dim=20,
    )
    return {
        "dinov2": transformers_golden(
            Dinov2, Dinov2Config(**dinov2_sizes()), IMAGENET, weak_class_token=True
        ),
        "dinov2_swiglu": transformers_golden(
            Dinov2, Dinov2Config(**dinov2_sizes(**wide, use_swiglu_ffn=True)), IMAGENET
        ),
        "dinov2_with_registers": transformers_golden(
            transformers.Dinov2WithRegistersModel,
            transformers.Dinov2WithRegistersConfig(**dinov2_sizes(num_register_tokens=3)),
            IMAGENET,
        ),
        "dinov3": transformers_golden(
            Dinov3,
            Dinov3Config(**sizes(num_attention_heads=2, num_register_tokens=4)),
            IMAGENET,
            weak_class_token=True,
        ),
        "dinov3_gated": transformers_golden(
            Dinov3,
            Dinov3Config(
                **sizes(**wide),
                use_gated_mlp=True,
                hidden_act="silu",
                num_register_tokens=2,
                query_bias=False,
                key_bias=False,
                value_bias=True,
                proj_bias=False,
                mlp_bias=False,
                rope_theta=50.0,
                layer_norm_eps=0.01,
            ),
            IMAGENET,
        ),
        "clip": transformers_golden(
            transformers.CLIPVisionModelWithProjection,
            transformers.CLIPVisionConfig(**sizes(num_attention_heads=2), projection_dim=24),
            CLIP,
            tower="vision_model",
            weak_class_token=True,
        ),
        "clip_whole": transformers_golden(
            transformers.CLIPModel, clip_whole, CLIP, tower="vision_model"
        ),
        "vit": transformers_golden(
            transformers.ViTModel, ViTConfig(**sizes()), HALF, weak_class_token=True
        ),
        "vit_classifier": transformers_golden(
            transformers.ViTForImageClassification,
            ViTConfig(**sizes(num_attention_heads=2), num_labels=5),
            HALF,
            tower="vit",
            pooling="class",
        ),
        "vit_no_bias": transformers_golden(
            transformers.ViTModel,
            ViTConfig(**sizes(), qkv_bias=False, hidden_act="relu", layer_norm_eps=0.01),
            HALF,
            load={"use_mask_token": True},
        ),
        "deit": transformers_golden(
            transformers.DeiTModel,
            DeiTConfig(**sizes()),
            IMAGENET,
            load={"use_mask_token": True},
        ),
        "deit_teacher": transformers_golden(
            transformers.DeiTForImageClassificationWithTeacher,
            DeiTConfig(**sizes(num_attention_heads=2), layer_norm_eps=0.01, num_labels=5),
            IMAGENET,
            tower="deit",
            pooling="class",
        ),
        "siglip_headless": transformers_golden(
            transformers.SiglipVisionModel,
            transformers.SiglipVisionConfig(**sizes(), vision_use_head=False),
            HALF,
            pooling="none",
        ),
    }


def write_inner_names():
    """Writes the names of arrays inside of transformers, by the published ones, where they differ.

    `save_pretrained` writes the published names unless `save_original_format` is False. A published
    array that is two inside, with a space between their names, is one after the other.
    """
    goldens, found = hugging_face(), {}
    for name in ("clip", "deit", "dinov2", "dinov2_swiglu", "dinov3", "dinov3_gated", "vit"):
        model = goldens[name].make()
        draw(model, torch.Generator().manual_seed(0), False)
        stored = {}
        for original in True, False:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder, save_original_format=original)
                stored[original] = load_file(Path(folder, "model.safetensors"))
        inner = {value.numpy().tobytes(): key for key, value in stored[False].items()}
        for first, second in itertools.permutations(stored[False].items(), 2):
            if first[1].shape == second[1].shape:
                both = torch.cat([first[1], second[1]]).numpy().tobytes()
                inner.setdefault(both, f"{first[0]} {second[0]}")
        renamed = {key: inner[value.numpy().tobytes()] for key, value in stored[True].items()}
        found[name] = {key: new for key, new in renamed.items() if key != new}
    (FOLDER / "inner_names.json").write_text(json.dumps(found, indent=1) + "\n")


# timm


def write_timm():
    """Writes heads, activation, epsilon and pooling of timm's vision transformers, by name.

    An architecture with other blocks, norms or MLPs is null. The names are those of ViT, DeiT and
    EVA, without the suffixes that only change the size of the images.
    """
    found: dict[str, list | None] = {}
    for name in timm.list_models(["vit_*", "deit*", "eva*", "naflexvit_*"]):
        with torch.device("meta"):
            model = timm.create_model(name)
        found[name] = None
        if type(model) is not timm.models.VisionTransformer:
            continue
        block = model.blocks[0]
        if type(block) is not timm.models.vision_transformer.Block:
            continue
        kinds = type(block.norm1), type(block.mlp), type(block.attn.q_norm)
        norms = timm.layers.LayerNorm, torch.nn.Identity
        if kinds[0] is norms[0] and kinds[2] is norms[1] and kinds[1] in MLPS:
            activation = repr(block.mlp.act)
            found[name] = [block.attn.num_heads, activation, block.norm1.eps, model.global_pool]
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    (FOLDER / "timm.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run_timm(model, pixels):
    """Returns the outputs of timm's VisionTransformer.

    `last_hidden_state` has had the last norm, except for CLIP, as in transformers, and where timm
    normalises only the pooled output.
    """
    inputs = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.blocks.register_forward_hook(lambda *args: inputs.append(args[-1]))
    features = model.forward_features(pixels)
    pooled = model.forward_head(features, pre_logits=True)
    is_clip = model.global_pool == "token" and not isinstance(model.norm_pre, torch.nn.Identity)
    return {
        "last_hidden_state": inputs[-1] if is_clip else features,
        "pooler_output": pooled,
        "hidden_state_0": inputs[0],
        "hidden_state_-2": inputs[-2],
    }


def timm_golden(architecture, *, weak_class_token=False, **model_args):
    """Returns a golden of timm: `architecture` with `model_args`, as a user passes them."""
    model_args = {
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "img_size": 32,
        "patch_size": 8,
    } | model_args
    if model_args["patch_size"] is None:
        del model_args["patch_size"]

    def make():
        return timm.create_model(architecture, **model_args)

    def save(model, folder):
        save_timm(model, folder, safe_serialization=True)

    def load(folder, size):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        if size is not None:
            model.set_input_size(size)
        return model

    config = make().pretrained_cfg
    patch = model_args["img_size"] // 4
    normalisation = config["mean"], config["std"]
    options = {"weak_class_token": weak_class_token}
    return Golden(make, save, load, run_timm, patch, normalisation, **options)


def pytorch_image_models():
    """Returns the goldens of timm."""
    seven = {"img_size": 28, "patch_size": 7}
    return {
        "timm_vit": timm_golden("vit_tiny_patch16_224", num_classes=5, weak_class_token=True),
        "timm_dinov2": timm_golden(
            "vit_small_patch14_dinov2",
            img_size=56,
            patch_size=None,
            num_heads=2,
            weak_class_token=True,
        ),
        "timm_dinov2_reg4": timm_golden("vit_small_patch14_reg4_dinov2", **seven),
        "timm_dinov2_giant": timm_golden(
            "vit_giant_patch14_dinov2", **seven, num_heads=2, mlp_ratio=3.0
        ),
        "timm_clip_quickgelu": timm_golden(
            "vit_base_patch16_clip_quickgelu_224", num_heads=2, num_classes=0
        ),
        "timm_clip": timm_golden(
            "vit_base_patch16_clip_224", num_heads=2, num_classes=0, weak_class_token=True
        ),
        "timm_siglip": timm_golden("vit_base_patch16_siglip_224", num_classes=0),
        "timm_siglip2": timm_golden(
            "vit_so400m_patch16_siglip_256",
            embed_dim=48,
            num_heads=2,
            mlp_ratio=1.5,
            num_classes=0,
        ),
        "timm_siglip_gap": timm_golden("vit_base_patch16_siglip_gap_224", num_classes=0),
        "timm_siglip_registers": timm_golden(
            "vit_base_patch16_siglip_224", reg_tokens=2, num_classes=0
        ),
        "timm_clip_avg": timm_golden(
            "vit_base_patch16_clip_224", num_classes=0, global_pool="avg", fc_norm=False
        ),
        "timm_gap": timm_golden("vit_tiny_patch16_224", global_pool="avg", num_classes=0),
    }


# open_clip


class NoTokenizer:
    """Takes the place of a tokenizer, which no golden needs."""

    def save_pretrained(self, folder):
        pass


def create_timm_trunk(*args, **keywords):
    """Creates a small trunk. open_clip passes timm nothing but a name."""
    small = {"embed_dim": 48, "depth": 3, "mlp_ratio": 1.5, "img_size": 32, "patch_size": 8}
    return create_timm_model(*args, **small, **keywords)


create_timm_model = timm.create_model


def create_open_clip(name, **options):
    """Calls open_clip.create_model, with a small trunk if it is one of timm."""
    with mock.patch.object(timm, "create_model", create_timm_trunk):
        return open_clip.create_model(name, **options)


def run_open_clip(model, pixels):
    """Returns the outputs of open_clip's image tower."""
    visual = model.visual
    if hasattr(visual, "trunk"):
        outputs = run_timm(visual.trunk, pixels)
        assert torch.equal(outputs["pooler_output"], model.encode_image(pixels))
        return outputs
    inputs = []
    for block in visual.transformer.resblocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    visual.transformer.register_forward_hook(lambda *args: inputs.append(args[-1]))
    embeds = model.encode_image(pixels)
    pooled = visual.ln_post(inputs[-1])[:, 0]
    assert torch.allclose(pooled @ visual.proj, embeds, rtol=1e-12, atol=1e-12)
    return {
        "last_hidden_state": inputs[-1],
        "pooler_output": pooled,
        "image_embeds": embeds,
        "hidden_state_0": inputs[0],
        "hidden_state_-2": inputs[-2],
    }


def open_clip_golden(model_config, preprocessing, **options):
    """Returns a golden of open_clip.

    Args:
      model_config: contents of a file in open_clip's model_configs.
      preprocessing: fields of its preprocess_cfg.
      options: those of Golden.
    """

    def make():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "small.json")
            file.write_text(json.dumps(model_config))
            open_clip.add_model_config(file)
            return create_open_clip("small", force_preprocess_cfg=preprocessing)

    def save(model, folder):
        save_open_clip(model, NoTokenizer(), model_config, folder, safe_serialization=True)

    def load(folder, size):
        return create_open_clip(f"local-dir:{folder}", force_image_size=size)

    patch = model_config["vision_cfg"]["image_size"] // TRAINED_GRID[0]
    normalisation = preprocessing["mean"], preprocessing["std"]
    return Golden(make, save, load, run_open_clip, patch, normalisation, **options)


def open_clip_goldens():
    """Returns the goldens of open_clip."""
    clip = {
        "embed_dim": 24,
        "quick_gelu": True,
        "vision_cfg": {
            "image_size": 32,
            "layers": 3,
            "width": 48,
            "head_width": 24,
            "mlp_ratio": 1.5,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": 8,
            "vocab_size": 40,
            "width": 16,
            "heads": 2,
            "layers": 1,
        },
    }
    siglip = {
        "embed_dim": 48,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 32,
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            "context_length": 8,
            "vocab_size": 40,
            "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "width": 48,
            "heads": 2,
            "layers": 1,
            "mlp_ratio": 1.5,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
        },
    }
    of_clip = {
        "mean": CLIP[0],
        "std": CLIP[1],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    of_siglip = {
        "mean": HALF[0],
        "std": HALF[1],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    }
    return {
        "open_clip_clip": open_clip_golden(clip, of_clip, weak_class_token=True),
        "open_clip_siglip": open_clip_golden(siglip, of_siglip),
    }


def main():
    goldens = hugging_face() | pytorch_image_models() | open_clip_goldens()
    for name in sys.argv[1:] or goldens:
        generate(name, goldens[name])
    if not sys.argv[1:]:
        write_inner_names()
        write_timm()


if __name__ == "__main__":
    main()
