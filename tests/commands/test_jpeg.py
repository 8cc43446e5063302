"""JPEG pictures that are handed over whole have the pixels and the notes that Pillow gives."""

import io
import sys

import numpy as np
import pytest
from PIL import Image, ImageCms

from pallas_patch_embed.embed import Preprocessing, jpeg
from pallas_patch_embed.embed.pictures import (
    DAMAGED_METADATA,
    TruncatedError,
    decode,
    decode_upright,
)
from pallas_patch_embed.embed.preprocessing import Whole
from pallas_patch_embed.embed.units import Content
from tests.commands.test_pixels import photograph

simplejpeg = pytest.importorskip("simplejpeg")

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
SIZES = ((500, 375), (17, 33), (8, 8), (1, 1), (3, 100), (101, 3))


def saved(picture, **options):
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def encoded(picture, subsampling):
    """Encodes a picture with a subsampling that Pillow cannot write."""
    pixels = np.ascontiguousarray(picture)
    return simplejpeg.encode_jpeg(pixels, 90, "RGB", colorsubsampling=subsampling)


def variants(picture):
    """Yields the usual kinds of JPEG pictures, with their names."""
    for subsampling in SUBSAMPLINGS:
        for progressive in (False, True):
            options = dict(subsampling=subsampling, progressive=progressive, quality=95)
            yield f"{subsampling} progressive={progressive}", saved(picture, **options)
    for subsampling in ("440", "411"):
        yield subsampling, encoded(picture, subsampling)
    yield "coarse", saved(picture, quality=20)
    yield "grey", saved(picture.convert("L"))
    yield "grey, progressive", saved(picture.convert("L"), progressive=True)
    yield "restart markers", saved(picture, restart_marker_blocks=3)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "profile", saved(picture, icc_profile=profile)
    exif = Image.Exif()
    exif[0x0112] = 1
    yield "upright", saved(picture, exif=exif)
    yield "followed by something", saved(picture) + b"something"


def exif_turned(picture):
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture, exif=exif)


def unusual(picture):
    """Yields pictures that Pillow decodes alone, with their names."""
    yield "CMYK", saved(picture.convert("CMYK"))
    yield "RGB without conversion", saved(picture, keep_rgb=True)
    yield "turned", exif_turned(picture)
    content = saved(picture)
    yield "damaged", content[:-200] + bytes(100) + content[-100:]
    # The orientation is a text, "AB".
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02AB\0\0\0\0\0\0"
    yield "damaged metadata", saved(picture, exif=exif)


def without_limit(*_):
    pass


def decoded(content, whole):
    """Decodes a picture, as an array if `whole` allows it."""
    found, notes = decode(io.BytesIO(content), without_limit, False, lambda *_: whole)
    assert isinstance(found, Image.Image) or whole
    return found, notes


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_usual_pictures_have_the_pixels_of_pillow(size):
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(64, 192, (*size[::-1], 3), np.uint8))
    for picture in (photograph("coffee").resize(size), noise):
        for name, content in variants(picture):
            found, notes = decoded(content, whole=True)
            assert isinstance(found, np.ndarray), name
            wanted, wanted_notes = decoded(content, whole=False)
            assert np.array_equal(found, np.asarray(wanted)) and notes == wanted_notes, name


def test_unusual_pictures_are_decoded_by_pillow():
    for name, content in unusual(photograph("chelsea")):
        found, notes = decoded(content, whole=True)
        assert isinstance(found, Image.Image), name
        wanted, wanted_notes = decoded(content, whole=False)
        assert np.array_equal(np.asarray(found), np.asarray(wanted)), name
        assert notes == wanted_notes == ((DAMAGED_METADATA,) if "metadata" in name else ())


@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_picture_is_an_error_or_has_the_pixels_of_pillow(progressive):
    content = saved(photograph("coffee"), progressive=progressive)[:-3000]
    how = dict(resample=3, size=(32, 32), patch=8, max_num_patches=16, whole=Whole(10**7, 2048))
    with pytest.raises(TruncatedError):
        Preprocessing(**how).decode(Content(content))
    found = Preprocessing(**how, allow_truncated=True).decode(Content(content))
    wanted, notes = decode_upright(io.BytesIO(content), without_limit, allow_truncated=True)
    np.testing.assert_array_equal(found.image, np.asarray(wanted))
    assert found.whole and found.notes == notes != ()


def test_a_picture_of_another_size_than_in_its_header_is_left_to_pillow():
    content = saved(photograph("coffee"))
    assert jpeg.pixels(content, (400, 600)) is not None
    assert jpeg.pixels(content, (600, 400)) is None


def test_a_picture_whose_chroma_simplejpeg_does_not_know_is_left_to_pillow():
    content = bytearray(encoded(photograph("coffee").resize((64, 64)), "440"))
    sampling = content.find(b"\xff\xc0") + 11
    assert content[sampling] == 0x12
    content[sampling] = 0x14  # 4:4:1: four rows of luma for one of chroma.
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(bytes(content))
    found, notes = decoded(bytes(content), whole=True)
    wanted, said = decoded(bytes(content), whole=False)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert notes == said


def test_damaged_metadata_are_noted_whoever_decodes():
    content = saved(photograph("coffee"), dpi=(72, 72))
    content = content[:2] + b"\xff\xe1\0\x0aExif\0\0MM" + content[2:]
    for whole in (True, False):
        _, notes = decoded(content, whole=whole)
        assert notes == (DAMAGED_METADATA,)


def test_a_broken_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "simplejpeg.py").write_text("raise ValueError('another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "simplejpeg")
    jpeg._package.cache_clear()
    with pytest.raises(ValueError, match=r"simplejpeg cannot be imported \(another numpy\)"):
        jpeg.version()


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", b"no picture"])
def test_what_is_no_picture_is_left_to_pillow(content):
    assert jpeg.pixels(content, (1, 1)) is None


def test_without_the_package_pillow_decodes(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg._package.cache_clear()
    try:
        assert jpeg.version() is None
        found, _ = decoded(saved(photograph("coffee")), whole=True)
        assert isinstance(found, Image.Image)
    finally:
        jpeg._package.cache_clear()
    monkeypatch.undo()
    assert jpeg.version() == simplejpeg.__version__
