"""Replaces the convolution and the positions of keras-hub's SigLIP tower by the operator.

python examples/keras_hub_siglip.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras_hub
import numpy as np

from pallas_patch_embed.frameworks import keras as drop_in

# This tower has random weights. For a pretrained tower use the `vision_encoder` of
# keras_hub.models.SigLIPBackbone.from_preset("siglip2_base_patch16_224").
tower = keras_hub.models.SigLIPVisionEncoder(
    patch_size=16,
    hidden_dim=256,
    num_layers=2,
    num_heads=4,
    intermediate_dim=512,
    image_shape=(224, 224, 3),
)
images = np.random.default_rng(0).uniform(-1, 1, (4, 224, 224, 3)).astype(np.float32)
expected = tower.predict({"images": images}, verbose=0)

print("replaced:", drop_in.replace(tower))
found = tower.predict({"images": images}, verbose=0)
difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
print(f"relative difference {difference:.4f}")
assert difference < 0.01
