"""Pictures of unusual kinds become the same pixels as by the image processors of the libraries."""

import functools
import hashlib
import importlib
import importlib.util
import io
import json
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pallas_patch_embed.embed import Decoder, Preprocessing
from pallas_patch_embed.encoders.config import Config
from tests.encoder.goldens import DATA, checkpoint

# Hashes of pixels by kind and checkpoint, and the versions of the packages that computed them.
HASHES = json.loads((DATA / "pixels.json").read_text())
# Their image processors are SiglipImageProcessorPil and Siglip2ImageProcessorPil by default.
CHECKPOINTS = ("hf_siglip_p14_224", "hf_siglip2_naflex_p16")

NORMALISATION = {"mean": [0.2, 0.4, 0.6], "std": [0.5, 0.5, 0.5]}


def bit(short_side, height, width):
    """Returns a preprocessor_config.json of BitImageProcessor."""
    size = {"shortest_edge": short_side}
    crop = {"height": height, "width": width}
    return {"image_processor_type": "BitImageProcessor", "size": size, "crop_size": crop}


def timm(crop_mode, crop_pct, height=224, width=224):
    """Returns timm's config.json. Mean and deviation give "border" its colour."""
    fields = {"input_size": [3, height, width], "interpolation": "bicubic", "crop_mode": crop_mode}
    return {
        "architecture": "vit_base_patch16_224",
        "pretrained_cfg": fields | NORMALISATION | {"crop_pct": crop_pct},
    }


def open_clip(resize_mode, **fields):
    """Returns an open_clip_config.json."""
    return {"model_cfg": {}, "preprocess_cfg": {"resize_mode": resize_mode} | fields}


# Files of image processors by what is tested, each with the (height, width) of its images.
PROCESSORS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "CLIP": ({"image_processor_type": "CLIPImageProcessor"}, (224, 224)),
    "Bit": (bit(256, 224, 224), (224, 224)),
    "Bit, odd margins": (bit(223, 172, 198), (172, 198)),
    "Bit, padded": (bit(101, 224, 224), (224, 224)),
    "Bit, padded on two sides": (bit(201, 224, 224), (224, 224)),
    "ViT": ({"image_processor_type": "ViTImageProcessor"}, (224, 224)),
    "DeiT": ({"image_processor_type": "DeiTImageProcessor"}, (224, 224)),
    "DeiT, odd margins": (
        {"image_processor_type": "DeiTImageProcessor", "size": {"height": 101, "width": 259}},
        (224, 224),
    ),
    "timm, center": (timm("center", 0.9), (224, 224)),
    "timm, odd margins": (timm("center", 0.95, 223, 223), (223, 223)),
    "timm, padded": (timm("center", 1.1), (224, 224)),
    "timm, squash": (timm("squash", 0.95, 198, 172), (198, 172)),
    "timm, border": (timm("border", 0.9, 198, 172), (198, 172)),
    "open_clip, shortest": (open_clip("shortest"), (223, 223)),
    "open_clip, squash": (open_clip("squash", interpolation="bilinear"), (198, 172)),
    "open_clip, longest": (open_clip("longest", fill_color=127), (198, 173)),
}


def photograph(name):
    with Image.open(resources.files("pallas_patch_embed") / "photos" / f"{name}.png") as picture:
        return picture.convert("RGB")


def alpha(picture):
    """Returns an alpha channel that differs from pixel to pixel."""
    levels = np.add.outer(np.arange(picture.height), np.arange(picture.width)) % 256
    return Image.fromarray(levels.astype(np.uint8))


def with_alpha(picture):
    picture.putalpha(alpha(picture))
    return picture


def with_palette(picture):
    """Converts a picture to a palette of 216 colours, six levels of each channel."""
    levels = np.asarray(picture) // 43
    indices = Image.fromarray((levels @ np.array([36, 6, 1])).astype(np.uint8), "L")
    indices.putpalette((np.indices((6, 6, 6)).reshape(3, -1).T * 51).astype(np.uint8).tobytes())
    return indices


def saved(picture, format="PNG", **options):
    """Encodes a picture, by default losslessly, because JPEG decoders differ in the last bit."""
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(photograph("chelsea"), exif=exif)


def sixteen_bits():
    """Encodes a grey picture of 16 bits."""
    grey = np.asarray(photograph("coffee").convert("L")).astype(np.uint16)
    return saved(Image.fromarray(grey * 256 + np.arange(grey.shape[1], dtype=np.uint16) % 256))


@functools.cache
def kinds():
    """Returns the encoded pictures by kind."""
    coffee, cat, face = (photograph(name) for name in ("coffee", "chelsea", "astronaut"))
    palette = with_palette(coffee)
    found = {
        "RGB": saved(coffee),
        "CMYK": saved(coffee.convert("CMYK"), "TIFF"),
        "grey": saved(cat.convert("L")),
        "black and white": saved(cat.convert("1")),
        "palette": saved(palette),
        "palette of a GIF": saved(with_palette(face), "GIF"),
        "palette with a transparent colour": saved(palette, transparency=7),
        "palette with transparencies": saved(palette, transparency=bytes(range(216))),
        "alpha": saved(with_alpha(cat.copy())),
        "alpha of a WebP": saved(with_alpha(face.copy()), "WEBP", lossless=True, exact=True),
        "grey and alpha": saved(with_alpha(cat.convert("L"))),
        "YCbCr": saved(coffee.convert("YCbCr"), "TIFF"),
        "one pixel": saved(coffee.crop((9, 9, 10, 10))),
        "one row": saved(coffee.crop((0, 9, 600, 10))),
        "wide": saved(coffee.crop((0, 0, 333, 101))),
        "tall": saved(face.crop((0, 0, 101, 332))),
    }
    return found | {f"EXIF orientation {i}": turned(i) for i in range(1, 9)}


def hashed(images):
    """Returns the SHA-256 of the shape and the pixels [H, W, 3]."""
    assert images.dtype == np.uint8
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()


def decoded(name, content):
    result = Decoder.of(checkpoint(name))({"id": ["a"], "content": [content]})
    assert result["reason"] == [""]
    return result["image"][0]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kind", kinds())
def test_the_pixels_have_the_hash_of_those_of_transformers(name, kind):
    assert hashed(decoded(name, kinds()[kind])) == HASHES[name][kind]


def cropped(name, folder):
    """Returns the pixels of every kind, or None, by an image processor of PROCESSORS."""
    fields, (height, width) = PROCESSORS[name]
    file = {"architecture": "config.json", "model_cfg": "open_clip_config.json"}
    Path(folder, file.get(next(iter(fields)), "preprocessor_config.json")).write_text(
        json.dumps(fields)
    )
    config = Config(width=8, depth=1, heads=1, mlp=8, patch=1, grid=(height, width))
    decoder = Decoder(Preprocessing.of(Path(folder), config, None))
    result = decoder({"id": [*kinds()], "content": [*kinds().values()]})
    found = zip(kinds(), result["image"], result["reason"], strict=True)
    return {kind: None if reason else image for kind, image, reason in found}


@pytest.mark.parametrize("name", PROCESSORS)
def test_resized_and_cropped_pixels_have_the_hashes_of_those_of_the_library(name, tmp_path):
    images = cropped(name, tmp_path)
    assert {
        kind: None if image is None else hashed(image) for kind, image in images.items()
    } == HASHES[name]


def of_library(name, path):
    """Returns the uint8 pixels that transformers, timm or open_clip makes of the file at `path`."""
    from transformers import image_utils

    fields, size = PROCESSORS[name]
    picture = image_utils.load_image(str(path))  # Upright and in RGB.
    if "pretrained_cfg" in fields:
        from timm.data import create_transform

        return np.moveaxis(
            create_transform(**fields["pretrained_cfg"], normalize=False)(picture).numpy(), 0, -1
        )
    if "preprocess_cfg" in fields:
        from open_clip.transform import image_transform

        transform = image_transform(size, is_train=False, **fields["preprocess_cfg"])
        for step in transform.transforms[:-2]:  # The last steps are floats and normalisation.
            picture = step(picture)
        return np.asarray(picture)
    family = fields["image_processor_type"].removesuffix("ImageProcessor")
    home = f"transformers.models.{family.lower()}.image_processing_pil_{family.lower()}"
    processor = getattr(importlib.import_module(home), f"{family}ImageProcessorPil")(
        **{field: value for field, value in fields.items() if field != "image_processor_type"},
        do_rescale=False,
        do_normalize=False,
    )
    return processor(picture, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)


# Largest difference between Pillow's bilinear resizing and DINOv3ViTImageProcessor, in levels of 0
# to 255. Pillow rounds the rows and the columns, by at most 0.5 each. Its weights have 22 bits: the
# sum over the 41 of 600 pixels that make one of 30 errs by at most 41 * 255 / 2^23, twice. The
# reference is rounded to 1/256.
DINOV3_TOLERANCE = 1 + 2 * 41 * 255 / 2**23 + 1 / 512
DINOV3 = DATA / "pixels_dinov3.npz"
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee")


def test_pixels_for_dinov3_differ_by_the_rounding_of_pillow(tmp_path):
    size = {"height": 48, "width": 30}
    fields = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": size}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    config = Config(32, 1, 4, 8, patch=2, grid=(24, 15), family="dinov3_vit", rope_theta=100.0)
    decoder = Decoder(Preprocessing.of(tmp_path, config, None))
    with np.load(DINOV3) as wanted:
        for name in PHOTOGRAPHS:
            image = decoder.decode(lambda name=name: io.BytesIO(saved(photograph(name))))
            difference = np.abs(image - wanted[name] / 256)
            assert difference.max() <= DINOV3_TOLERANCE, name
            # Two roundings with a variance of 1/12 each: sqrt(2 / 12) * sqrt(2 / pi) = 0.33, and
            # less where the second one averages the first.
            assert 0.2 < difference.mean() < 0.35


def of_dinov3():
    """Returns what DINOv3ViTImageProcessor makes of the photographs, in 1/256 of a level."""
    from transformers.models.dinov3_vit import image_processing_dinov3_vit as module

    size = {"height": 48, "width": 30}
    processor = module.DINOv3ViTImageProcessor(size=size, do_normalize=False)
    found = {}
    for name in PHOTOGRAPHS:
        pixels = processor(photograph(name), return_tensors="np")["pixel_values"][0]
        found[name] = (pixels.transpose(1, 2, 0) * 255 * 256).round().astype(np.uint16)
    return found


@pytest.mark.cluster
def test_the_pixels_for_dinov3_are_those_of_transformers():
    for package in ("transformers", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing")
    with np.load(DINOV3) as stored:
        for name, pixels in of_dinov3().items():
            # Vector units of processors sum in different orders.
            assert np.abs(pixels.astype(int) - stored[name]).max() <= 1


def of_transformers(name, path):
    """Returns the uint8 pixels that transformers decodes from the file at `path`."""
    if name == CHECKPOINTS[0]:
        from transformers.models.siglip import image_processing_pil_siglip as module

        processor = module.SiglipImageProcessorPil()
    else:
        from transformers.models.siglip2 import image_processing_pil_siglip2 as module

        processor = module.Siglip2ImageProcessorPil()
    result = processor(processor.fetch_images(str(path)), return_tensors="np")
    pixels = result["pixel_values"][0]
    if name == CHECKPOINTS[0]:
        pixels = pixels.transpose(1, 2, 0)
    else:
        h, w = result["spatial_shapes"][0]
        pixels = pixels[: h * w].reshape(h, w, 16, 16, 3).swapaxes(1, 2).reshape(h * 16, w * 16, 3)
    levels = pixels * 127.5 + 127.5
    assert np.abs(levels - levels.round()).max() < 1e-3
    return levels.round().astype(np.uint8)


# The packages that compute the hashes.
VERSIONS = ("transformers", "timm", "open_clip_torch", "torchvision", "pillow")


def hashes_of_library(name, folder):
    """Computes the hashes of every kind with the installed library; None where it fails."""
    compute = of_transformers if name in CHECKPOINTS else of_library
    found: dict[str, str | None] = {}
    for kind, content in kinds().items():
        path = Path(folder, "picture")
        path.write_bytes(content)
        try:
            found[kind] = hashed(compute(name, path))
        except ValueError as error:
            # The short side of one row is rounded to 0.
            assert str(error) == "height and width must be > 0"
            found[kind] = None
    return found


def write_hashes(folder):
    """Writes tests/data/pixels.json and pixels_dinov3.npz with the installed libraries."""
    content: dict[str, Any] = {package: version(package) for package in VERSIONS}
    content |= {name: hashes_of_library(name, folder) for name in (*CHECKPOINTS, *PROCESSORS)}
    (DATA / "pixels.json").write_text(json.dumps(content, indent=1) + "\n")
    np.savez_compressed(DINOV3, **of_dinov3())


@pytest.mark.cluster
@pytest.mark.parametrize("name", [*CHECKPOINTS, *PROCESSORS])
def test_the_hashes_are_those_of_the_library(name, tmp_path):
    of_torchvision = ("torchvision",) if name.startswith(("timm", "open_clip")) else ()
    for package in ("transformers", *of_torchvision):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing")
    assert hashes_of_library(name, tmp_path) == HASHES[name]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_transparent_colour_of_an_RGB_picture_stays(name):
    """All transparent pixels keep their colours; SiglipImageProcessorPil makes this kind white."""
    face = photograph("astronaut")
    wanted = decoded(name, saved(face))
    found = decoded(name, saved(face, transparency=face.getpixel((9, 9))))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sixteen_bits_are_rounded_to_eight(name):
    """Pillow's conversion, which transformers uses, would make all levels above 255 white."""
    grey = np.asarray(Image.open(io.BytesIO(sixteen_bits())))
    assert grey.max() > 2**15
    rounded = np.asarray(np.rint(grey / 257), np.uint8)
    wanted = decoded(name, saved(Image.fromarray(rounded)))
    np.testing.assert_array_equal(decoded(name, sixteen_bits()), wanted)
    assert len(np.unique(wanted)) > 100
