"""Generates resized.npz: positions resized by transformers, timm and PyTorch.

It needs the versions of transformers, timm and torch that ../README.md names.
"""

from pathlib import Path

import numpy as np
import torch
from timm.layers import resample_abs_pos_embed
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

GRIDS = (27, 27), (14, 14), (7, 30), (3, 2), (40, 9)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    siglip = SiglipVisionEmbeddings(
        SiglipVisionConfig(hidden_size=8, image_size=256, patch_size=16)
    )
    siglip.position_embedding.weight.normal_()
    stored = siglip.position_embedding.weight
    image = stored.reshape(1, 16, 16, 8).movedim(-1, 1)
    arrays = {"positions": stored}
    for h, w in GRIDS:
        # The first argument gives the number of tokens, to compare it with that of the positions.
        tokens = torch.empty(1, h * w, 8)
        arrays[f"bicubic {h} {w}"] = siglip.interpolate_pos_encoding(tokens, 16 * h, 16 * w)[0]
        arrays[f"bicubic-antialiased {h} {w}"] = resample_abs_pos_embed(
            stored[None], [h, w], [16, 16], num_prefix_tokens=0
        )[0]
        bilinear = torch.nn.functional.interpolate(image, (h, w), mode="bilinear", antialias=True)
        arrays[f"bilinear {h} {w}"] = bilinear[0].flatten(1).T
    arrays = {name: value.numpy() for name, value in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("resized.npz"), **arrays)


if __name__ == "__main__":
    main()
