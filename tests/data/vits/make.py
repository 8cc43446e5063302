"""Generates the files in this folder: embeddings of small random models from transformers.

It needs the versions of transformers and torch that ../README.md names.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import CLIPVisionConfig, Dinov2Config, ViTConfig
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from transformers.models.clip.modeling_clip import CLIPVisionEmbeddings
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchEmbed
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed
from transformers.models.vit.modeling_vit import ViTEmbeddings

FOLDER = Path(__file__).parent
RNG = np.random.default_rng(0)
CLIP = OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
HALF = (0.5,) * 3, (0.5,) * 3


def drawn(module):
    """Draws a module's weights at random."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module.eval()


def normalised(images, mean, std):
    """Returns normalised pixels in float64, with channels first."""
    pixels = (images / 255 - np.float64(mean)) / np.float64(std)
    return torch.from_numpy(np.moveaxis(pixels, -1, -3))


def save(name, module, images, mean, std, **arrays):
    """Writes weights and results as float32; the results were computed in float64."""
    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    arrays = {name: value.detach().numpy() for name, value in arrays.items()}
    arrays = {
        name: np.float32(value) if value.dtype == np.float64 else value
        for name, value in (weights | arrays).items()
    }
    normalisation = np.float64([mean, std])
    np.savez_compressed(
        FOLDER / f"{name}.npz", images=images, normalisation=normalisation, **arrays
    )


def exact(module):
    """Returns the module in float64, with weights that are exact in float32."""
    return drawn(module).double()


@torch.no_grad()
def main():
    torch.manual_seed(0)
    images = RNG.integers(0, 256, (2, 21, 28, 3), np.uint8)
    square = images[:, :21, :21]

    clip = CLIPVisionEmbeddings(CLIPVisionConfig(hidden_size=24, image_size=21, patch_size=7))
    clip = exact(clip)
    pixels = normalised(square, *CLIP)
    save("clip", clip, square, *CLIP, expected=clip(pixels))

    vit = exact(ViTEmbeddings(ViTConfig(hidden_size=24, image_size=21, patch_size=7)))
    pixels = normalised(square, *HALF)
    save("vit", vit, square, *HALF, expected=vit(pixels))

    config = Dinov2Config(hidden_size=24, image_size=21, patch_size=7, use_mask_token=True)
    dinov2 = exact(Dinov2Embeddings(config))
    pixels = normalised(images, *IMAGENET)
    mask = torch.from_numpy(RNG.random((2, 12)) < 0.3)
    embedded = torch.zeros(2, 13, 24, dtype=torch.float64)
    save(
        "dinov2",
        dinov2,
        images,
        *IMAGENET,
        mask=mask,
        square=dinov2(pixels[..., :21]),
        interpolated=dinov2.interpolate_pos_encoding(embedded, 21, 28),
        expected=dinov2(pixels),
        masked=dinov2(pixels, mask),
    )

    qwen2 = exact(PatchEmbed(patch_size=7, temporal_patch_size=2, embed_dim=24))
    processor = Qwen2VLImageProcessorPil(
        do_resize=False, patch_size=7, temporal_patch_size=2, merge_size=1
    )
    rows = torch.from_numpy(processor(images=list(images), return_tensors="np").pixel_values)
    videos = RNG.integers(0, 256, (2, 6, 21, 28, 3), np.uint8)
    pixels = normalised(videos, *CLIP).movedim(-3, -4)
    expected = qwen2.proj(pixels).flatten(2).transpose(1, 2)
    arrays = dict(rows=rows, of_rows=qwen2(rows), expected=expected)
    save("qwen2_vl", qwen2, videos, *CLIP, **arrays)

    config = Qwen3VLVisionConfig(hidden_size=24, patch_size=8, temporal_patch_size=2)
    qwen3 = exact(Qwen3VLVisionPatchEmbed(config))
    videos = RNG.integers(0, 256, (2, 4, 16, 24, 3), np.uint8)
    pixels = normalised(videos, *HALF).movedim(-3, -4)
    expected = qwen3.proj(pixels).flatten(2).transpose(1, 2)
    save("qwen3_vl", qwen3, videos, *HALF, expected=expected)


if __name__ == "__main__":
    main()
