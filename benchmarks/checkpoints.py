"""Writes random checkpoints in Hugging Face's layout, as large as the published ones.

python -m benchmarks.checkpoints "B/16 224" FOLDER
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks import encoder
from pallas_patch_embed.encoders import hugging_face
from pallas_patch_embed.encoders.config import Config

# SigLIP's encoders, and those of two other families with the layers of B/16.
ENCODERS = encoder.ENCODERS | {
    "CLIP B/16 224": Config.from_hugging_face(
        {"model_type": "clip_vision_model", "patch_size": 16}
    ),
    "DINOv2 B/16 224": Config.from_hugging_face({"model_type": "dinov2", "patch_size": 16}),
}

# Width of CLIP B/16's projection, also the default of transformers' CLIPVisionConfig.
PROJECTION = 512


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a class of transformers stores a family's arrays, whose names `hugging_face.NAMES` has.

    Attributes:
      architecture: the class.
      model_type: the model_type of its config.
      processor: the class of its image processor.
      prefix: what precedes the names of the tower's arrays.
      batched: whether class token and positions have an axis for the batch, of size 1.
    """

    architecture: str
    model_type: str
    processor: str
    prefix: str = ""
    batched: bool = False


LAYOUTS = {
    "siglip": Layout(
        "SiglipVisionModel", "siglip_vision_model", "SiglipImageProcessor", "vision_model."
    ),
    "clip": Layout(
        "CLIPVisionModelWithProjection", "clip_vision_model", "CLIPImageProcessor", "vision_model."
    ),
    "dinov2": Layout("Dinov2Model", "dinov2", "BitImageProcessor", batched=True),
}


def shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every array of the family's class, of LAYOUTS."""
    names, layout = hugging_face.NAMES[config.family], LAYOUTS[config.family]
    D, M, p = config.width, config.mlp, config.patch
    S = config.class_tokens + config.grid[0] * config.grid[1]

    def dense(name, outputs, inputs):
        yield f"{name}weight", (outputs, inputs)
        yield f"{name}bias", (outputs,)

    def norm(name):
        yield f"{name}weight", (D,)
        yield f"{name}bias", (D,)

    def block(start):
        yield from norm(start + names.norm1)
        for name in (*names.qkv, names.out):
            yield from dense(start + name, D, D)
        yield from norm(start + names.norm2)
        yield from dense(start + names.fc1[0], M, D)
        yield from dense(start + names.fc2, D, M)
        if config.layer_scale:
            yield start + names.scale1, (D,)
            yield start + names.scale2, (D,)

    def head():
        yield names.query, (1, 1, D)
        yield from dense(names.head_qkv[0], 3 * D, D)
        yield from dense(names.head_out, D, D)
        yield from norm(names.head_norm)
        fc1, fc2 = names.head_mlp
        yield from dense(fc1, M, D)
        yield from dense(fc2, D, M)

    def tower():
        yield f"{names.patch}weight", (D, config.channels, p, p)
        if "patch" not in config.without_bias:
            yield f"{names.patch}bias", (D,)
        for name in names.class_tokens[: config.class_tokens]:
            yield name, (1, 1, D) if layout.batched else (D,)
        yield names.positions, (1, S, D) if layout.batched else (S, D)
        if config.first_norm:
            yield from norm(names.first_norm)
        for i in range(config.depth):
            yield from block(names.block.format(i))
        yield from norm(names.norm)
        if config.pooling in (None, "attention"):
            yield from head()

    for name, shape in tower():
        yield layout.prefix + name, shape
    if names.projection:
        yield names.projection, (PROJECTION, D)


def draw(config: Config) -> dict[str, np.ndarray]:
    """Draws random arrays: kernels preserve their input's variance, norms are near identity."""
    rng = np.random.default_rng(0)

    def array(name, shape):
        if len(shape) == 1:
            scale = ("norm" in name and name.endswith("weight")) or "layer_scale" in name
            return (scale + 0.02 * rng.standard_normal(shape, np.float32)).astype(np.float32)
        inputs = int(np.prod(shape[1:]))
        deviation = 0.02 if "position" in name else inputs**-0.5
        return np.float32(deviation) * rng.standard_normal(shape, np.float32)

    return {name: array(name, shape) for name, shape in shapes(config)}


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the folder of `kept`."""
    described = "folder in which checkpoints and calibrations are kept for further runs"
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help=described)


def kept(name: str, folder: Path) -> Path:
    """Returns the folder of an encoder's random checkpoint in `folder`, written if it is not there.

    Calibrations are kept there, too (`encoder.in_8_bits`), because they take minutes.
    """
    own = folder / name.replace("/", "-")
    if not own.exists():
        partial = own.with_name(f"{own.name}.partial")
        write(ENCODERS[name], partial)
        partial.rename(own)
    return own


def write(config: Config, folder: Path) -> None:
    """Writes a random checkpoint: config.json, preprocessor_config.json, model.safetensors.

    Args:
      config: an encoder of a family of LAYOUTS, for square images.
      folder: where to write it.
    """
    assert config.image_size is not None  # `shapes` lists a fixed-resolution model.
    height, width = config.image_size
    layout = LAYOUTS[config.family]
    folder.mkdir(parents=True, exist_ok=True)
    # Each class reads its own fields and ignores those of the others.
    written = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "mlp_ratio": config.mlp // config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_channels": config.channels,
        "image_size": height,
        "patch_size": config.patch,
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
        "attention_dropout": 0.0,
        "vision_use_head": True,
        "projection_dim": PROJECTION,
        "use_mask_token": False,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    preprocessing = {
        "image_processor_type": layout.processor,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": config.image_mean,
        "image_std": config.image_std,
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=1))
    save_file(draw(config), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Writes the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=ENCODERS)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    write(ENCODERS[chosen.name], chosen.folder)


if __name__ == "__main__":
    main()
