"""Pictures of unusual kinds are decoded to the same pixels as by transformers' image processors."""

import functools
import hashlib
import importlib.util
import io
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from goldens import DATA, checkpoint
from PIL import Image

from pallas_patch_embed.embed import Decoder

# Hashes of pixels by kind and checkpoint, and the versions of the packages that computed them.
HASHES = json.loads((DATA / "pixels.json").read_text())
# Their image processors are SiglipImageProcessorPil and Siglip2ImageProcessorPil by default.
CHECKPOINTS = ("hf_siglip_p14_224", "hf_siglip2_naflex_p16")


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


def hashes_of_transformers(folder):
    """Computes the content of tests/data/pixels.json with the installed transformers."""
    from importlib.metadata import version

    found = {package: version(package) for package in ("transformers", "pillow")}
    for name in CHECKPOINTS:
        found[name] = {}
        for kind, content in kinds().items():
            path = Path(folder, "picture")
            path.write_bytes(content)
            found[name][kind] = hashed(of_transformers(name, path))
    return found


@pytest.mark.cluster
def test_the_hashes_are_those_of_transformers(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("the extra test-cluster is missing")
    found = hashes_of_transformers(tmp_path)
    for name in CHECKPOINTS:
        assert found[name] == HASHES[name]


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
