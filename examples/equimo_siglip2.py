"""Replaces the convolution of equimo's SigLIP2 tower (equinox) by the operator.

python examples/equimo_siglip2.py
"""

import equinox as eqx
import jax
import numpy as np
from equimo.vision.models.vit import siglip2_vitb16_224

from pallas_patch_embed.frameworks import equinox as drop_in


@eqx.filter_jit
def embed(model, images):
    """Returns the features [B, 196, 768] of images [B, 3, 224, 224]."""
    return jax.vmap(lambda image: model.features(image, inference=True))(images)


tower = siglip2_vitb16_224(pretrained=False)  # pretrained=True downloads the weights
replaced = drop_in.replace(tower)

pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 224, 224), np.uint8)
images = np.float32(pixels) / 255 * 2 - 1
expected, found = embed(tower, images), embed(replaced, pixels)
difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
print(f"relative difference {difference:.4f}")
assert difference < 0.01
