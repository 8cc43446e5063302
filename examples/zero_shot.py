"""Classifies photographs by the names of classes, with templates of sentences.

python examples/zero_shot.py [CHECKPOINT]

The checkpoint is a SigLIP, SigLIP2 (of fixed resolution) or CLIP with its tokenizer, such as
google/siglip2-base-patch16-224. The default one is tiny and random, so its answers mean nothing.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import pallas_patch_embed as ppe

CLASSES = ("astronaut", "cat", "cup of coffee", "red car")
TEMPLATES = ("a photo of a {}.", "a close-up photo of the {}.", "a cropped photo of my {}.")

checkpoint = sys.argv[1] if len(sys.argv) > 1 else "tests/data/text/clip"
encoder = ppe.load_encoder(checkpoint)
text = ppe.load_text_encoder(checkpoint)
tokenizer = ppe.load_tokenizer(checkpoint)
similarity = ppe.load_similarity(checkpoint)

# `embed` prepares pictures exactly as the image processor of a checkpoint does; this is simpler.
height, width = encoder.config.image_size
files = sorted(Path("pallas_patch_embed/photos").glob("*.png"))
pictures = [Image.open(file).convert("RGB").resize((width, height)) for file in files]
output = encoder(np.stack([np.asarray(picture) for picture in pictures]))
images = output.pooler_output if output.image_embeds is None else output.image_embeds

# The vector of a class is the mean of its sentences' vectors, each of length 1.
sentences = [template.format(name) for name in CLASSES for template in TEMPLATES]
vectors = np.asarray(text(tokenizer(sentences)).text_embeds, np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
classes = vectors.reshape(len(CLASSES), len(TEMPLATES), -1).mean(1)

probabilities = np.asarray(similarity.probabilities(images, classes))
for file, row in zip(files, probabilities):
    ranked = ", ".join(f"{CLASSES[i]} {row[i]:.1%}" for i in np.argsort(-row))
    print(f"{file.stem}: {ranked}")
