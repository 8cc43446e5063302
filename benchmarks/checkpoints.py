"""Writes random checkpoints in Hugging Face's layout, as large as the published ones.

python -m benchmarks.checkpoints "B/16 224" FOLDER
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.encoder import ENCODERS
from pallas_patch_embed.siglip2 import Config


def shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every array of a `SiglipVisionModel`."""
    D, M, p = config.width, config.mlp, config.patch

    def dense(name, outputs, inputs):
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)

    def norm(name):
        yield f"{name}.weight", (D,)
        yield f"{name}.bias", (D,)

    def mlp(name):
        yield from dense(f"{name}.fc1", M, D)
        yield from dense(f"{name}.fc2", D, M)

    yield "embeddings.patch_embedding.weight", (D, 3, p, p)
    yield "embeddings.patch_embedding.bias", (D,)
    yield "embeddings.position_embedding.weight", (config.grid[0] * config.grid[1], D)
    for i in range(config.depth):
        layer = f"encoder.layers.{i}"
        yield from norm(f"{layer}.layer_norm1")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from dense(f"{layer}.self_attn.{name}", D, D)
        yield from norm(f"{layer}.layer_norm2")
        yield from mlp(f"{layer}.mlp")
    yield from norm("post_layernorm")
    yield "head.probe", (1, 1, D)
    yield "head.attention.in_proj_weight", (3 * D, D)
    yield "head.attention.in_proj_bias", (3 * D,)
    yield from dense("head.attention.out_proj", D, D)
    yield from norm("head.layernorm")
    yield from mlp("head.mlp")


def draw(config: Config) -> dict[str, np.ndarray]:
    """Draws random arrays: kernels preserve their input's variance, norms are near identity."""
    rng = np.random.default_rng(0)

    def array(name, shape):
        if len(shape) == 1:
            near = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            return (near + 0.02 * rng.standard_normal(shape, np.float32)).astype(np.float32)
        inputs = int(np.prod(shape[1:]))
        deviation = 0.02 if "position" in name else inputs**-0.5
        return np.float32(deviation) * rng.standard_normal(shape, np.float32)

    return {name: array(name, shape) for name, shape in shapes(config)}


def write(config: Config, folder: Path) -> None:
    """Writes a random checkpoint: config.json, preprocessor_config.json, model.safetensors."""
    assert config.image_size is not None  # `shapes` lists a fixed-resolution model.
    height, width = config.image_size
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "model_type": "siglip_vision_model",
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_channels": 3,
        "image_size": height,
        "patch_size": config.patch,
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
        "attention_dropout": 0.0,
        "vision_use_head": True,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    preprocessing = {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
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
