"""Pictures are decoded to the images that the encoders of all families expect."""

import json
import shutil
from importlib import resources

import numpy as np
import pytest
from PIL import Image

import pallas_patch_embed as ppe
from pallas_patch_embed.embed import Decoder, Embedder
from tests.encoder.test_families import FAMILIES, NAMES

CHELSEA = resources.files("pallas_patch_embed") / "photos" / "chelsea.png"


def copied(tmp_path, name):
    """Copies a golden and puts the image processor of a published checkpoint beside it."""
    path = tmp_path / name
    shutil.copytree(FAMILIES / name, path)
    side = ppe.load_encoder(path).config.image_size[0]
    fields = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 2 * side},
        "crop_size": {"height": side, "width": side},
        "image_mean": [0.25, 0.5, 0.75],
        "image_std": [0.5, 0.25, 0.125],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(fields))
    return path


def cropped(side):
    """Returns the centre of the photograph, whose short side of 300 pixels becomes 2 * side."""
    with Image.open(CHELSEA) as picture:
        width = int(2 * side * picture.width / picture.height)
        pixels = np.asarray(picture.convert("RGB").resize((width, 2 * side), 3))
    left = (width - side) // 2
    return pixels[side // 2 :][:side, left:][:, :side]


@pytest.mark.parametrize("name", NAMES)
def test_a_decoded_picture_is_an_image_for_the_encoder(tmp_path, name):
    path = copied(tmp_path, name)
    encoder = ppe.load_encoder(path)
    result = Decoder.of(path)({"id": ["a"], "content": [CHELSEA.read_bytes()]})
    assert result["reason"] == [""]
    (image,) = result["image"]
    assert image.shape == (*encoder.config.image_size, 3)
    assert np.isfinite(np.asarray(encoder(image[None]).last_hidden_state, np.float32)).all()
    if not name.startswith(("timm", "open_clip")):  # They have processors of their own.
        np.testing.assert_array_equal(image, cropped(len(image)))
        assert encoder.config.image_mean == (0.25, 0.5, 0.75)


@pytest.mark.parametrize("name", ["clip", "deit", "timm_vit", "open_clip_siglip"])
def test_a_chosen_size_is_that_of_the_encoder(tmp_path, name):
    path = copied(tmp_path, name)
    patch = ppe.load_encoder(path).config.patch
    side = 9 * patch
    (image,) = Decoder.of(path, side)({"id": ["a"], "content": [CHELSEA.read_bytes()]})["image"]
    encoder = ppe.load_encoder(path, image_size=side)
    tokens = encoder(image[None]).last_hidden_state
    assert tokens.shape == (1, encoder.config.prefix + 81, encoder.config.width)
    if name in ("clip", "deit"):
        np.testing.assert_array_equal(image, cropped(side))


@pytest.mark.parametrize("name", ["timm_siglip", "timm_siglip2", "open_clip_siglip"])
def test_an_embedder_gets_the_images_of_its_decoder(name):
    path = FAMILIES / name
    decoder, embedder = Decoder.of(path), Embedder(path, batch=1)
    assert embedder.preprocessing == decoder.preprocessing
    decoded = decoder({"id": ["a"], "content": [CHELSEA.read_bytes()]})
    wanted = ppe.load_encoder(path)(decoded["image"][0][None]).pooler_output
    np.testing.assert_allclose(embedder(decoded)["embedding"], wanted, rtol=2**-7, atol=2**-7)
