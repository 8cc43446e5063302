"""Pictures with damaged metadata, truncated and large pictures, HEIC and JPEG XL."""

import concurrent.futures
import functools
import io
import struct
import sys
import types
import warnings
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin
from PIL.TiffImagePlugin import IFDRational

from pallas_patch_embed.embed import decoders, headers, pictures
from pallas_patch_embed.embed.pictures import (
    DAMAGED_METADATA,
    MOST_PIXELS,
    PIXEL,
    TRUNCATED,
    Budget,
    LargerError,
    LimitError,
    TruncatedError,
)
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.units import Content, Origin, Picture
from tests.commands import opened_pictures

# A square picture keeps its size when it is turned.
SIDE = 32
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 4, 3))
PIXELS = np.kron(COLOURS, np.ones((8, 8, 1))).astype(np.uint8)

OPTIONS = {"JPEG": dict(quality=95), "WEBP": dict(lossless=True), "AVIF": dict(quality=90)}

# Transpositions that undo the orientations 1 to 8.
UNDO = (None, 0, 3, 1, 5, 4, 6, 2)


def saved(format, pixels=PIXELS, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **OPTIONS.get(format, {}) | options)
    return file.getvalue()


def preprocessing(**fields):
    """Returns a preprocessing that changes no pixel of a picture of this size."""
    return Preprocessing(Image.Resampling.NEAREST, (SIDE, SIDE), 16, 4, **fields)


def decode(content, **fields):
    with pictures.quiet():
        return preprocessing(**fields).decode(Content(content))


def upright(content, orientation=1):
    """Decodes a picture that has no metadata with Pillow."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    undo = UNDO[orientation - 1]
    return np.asarray(picture if undo is None else picture.transpose(undo))


# Metadata.


def exif_data(orientation):
    exif = Image.Exif()
    exif.update({0x0112: orientation, 0x011A: IFDRational(72), 0x011B: IFDRational(72), 0x0128: 3})
    exif.update({0x010F: "Maker", 0x0131: "a program", 0x0132: "2020:01:01 00:00:00"})
    exif.get_ifd(0x8769).update({0x829A: IFDRational(1, 60), 0x927C: bytes(40), 0xA001: 1})
    exif.get_ifd(0x8825).update({1: "N", 2: (IFDRational(1), IFDRational(2), IFDRational(3))})
    return exif.tobytes()


def segment(marker, payload):
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def chunk(name, payload, flipped=0):
    checksum = zlib.crc32(name + payload) ^ flipped
    return struct.pack(">I4s", len(payload), name) + payload + struct.pack(">I", checksum)


def in_jpeg(*segments):
    """Returns a JPEG with these segments and no other metadata."""
    content = saved("JPEG")
    return content[:2] + b"".join(segments) + content[20:]


def in_png(*chunks):
    content = saved("PNG")
    return content[:33] + b"".join(chunks) + content[33:]


def with_exif(format, exif, damaged):
    """Returns a picture with EXIF data, a part of which was changed."""
    if format == "JPEG":
        return in_jpeg(segment(0xE1, damaged))
    if format == "PNG":
        return in_png(chunk(b"eXIf", damaged[6:]))
    content = saved(format, exif=exif)
    return content.replace(exif[6:], damaged[6:])


Image.init()
AVIF = pytest.param("AVIF", marks=pytest.mark.skipif("AVIF" not in Image.SAVE, reason="Pillow 11"))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", AVIF])
def test_damaged_EXIF_data_never_lose_a_picture(format):
    """The reference is the same picture without metadata, in any orientation."""
    rng = np.random.default_rng(54)
    plain = in_jpeg() if format == "JPEG" else saved(format)
    wanted = {upright(plain, i).tobytes() for i in range(1, 9)}
    notes = []
    for _ in range(60):
        # Pillow moves an orientation in an AVIF file to another place.
        exif = exif_data(1 if format == "AVIF" else int(rng.integers(2, 9)))
        if format == "AVIF":
            without = Image.Exif()
            without.load(exif)
            del without[0x0112]
            exif = without.tobytes()
        damaged = bytearray(exif)
        # Types and numbers of values in the first directory matter most.
        for at in 16 + 12 * rng.integers(0, 6, 2) + rng.integers(2, 8, 2):
            damaged[at] = rng.choice((0, 1, 2, 3, 5, 7, 12, 255))
        damaged[rng.integers(6, len(exif))] = rng.integers(256)
        content = with_exif(format, exif, bytes(damaged))
        assert bytes(damaged[6:]) in content
        result = decode(content)
        assert result.image.tobytes() in wanted
        notes += result.notes
    assert 0 < notes.count(DAMAGED_METADATA) == len(notes) < 60


def test_damaged_tags_never_lose_a_TIFF_file():
    rng = np.random.default_rng(54)
    content = saved("TIFF", exif=exif_data(6), icc_profile=b"profile")
    order = "<" if content.startswith(b"II") else ">"
    (at,) = struct.unpack_from(f"{order}I", content, 4)
    (number,) = struct.unpack_from(f"{order}H", content, at)
    entries = [
        i
        for i in range(at + 2, at + 2 + 12 * number, 12)
        if struct.unpack_from(f"{order}H", content, i)[0] in headers.TIFF_METADATA
    ]
    assert len(entries) > 5
    notes = []
    for _ in range(60):
        damaged = bytearray(content)
        for entry, byte in zip(rng.choice(entries, 2), rng.integers(2, 12, 2)):
            damaged[entry + byte] = rng.choice((0, 1, 2, 3, 5, 7, 12, 255))
        result = decode(bytes(damaged))
        np.testing.assert_array_equal(result.image, upright(saved("TIFF"), 6))
        notes += result.notes
    assert 0 < notes.count(DAMAGED_METADATA) == len(notes) < 60


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", AVIF, "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_good_metadata_turn_the_picture_and_are_not_counted(format, orientation):
    result = decode(saved(format, exif=exif_data(orientation)))
    np.testing.assert_array_equal(result.image, upright(saved(format), orientation))
    assert result.notes == ()


@pytest.mark.parametrize("value", [b"72 DPI\0\0", b"\xff" * 8])
def test_a_resolution_of_another_type_does_not_hide_the_orientation(value):
    exif = exif_data(8)
    resolution = struct.pack(">HHII", 0x011A, 5, 1, exif.index(struct.pack(">II", 72, 1)) - 6)
    assert exif.count(resolution) == 1
    damaged = exif.replace(resolution, resolution[:3] + b"\x02\0\0\0\x08" + resolution[8:])
    damaged = damaged.replace(struct.pack(">II", 72, 1), value)
    assert damaged != exif
    result = decode(in_jpeg(segment(0xE1, damaged)))
    np.testing.assert_array_equal(result.image, upright(in_jpeg(), 8))
    assert result.notes == (DAMAGED_METADATA,)


EXIF = segment(0xE1, exif_data(6))
BOMB = b"Comment\0\0" + zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1))
DAMAGED_JPEGS = {
    "short JFIF": segment(0xE0, b"JFIF\0\x01"),
    "short Adobe": segment(0xEE, b"Adobe\0"),
    "Photoshop": segment(0xED, b"Photoshop 3.0\x008BIM\x03\xed"),
    "colour profile": segment(0xE2, b"ICC_PROFILE\0"),
}
DAMAGED_PNGS = {
    "checksum": chunk(b"tEXt", b"Comment\0text", 1),
    "text bomb": chunk(b"zTXt", BOMB),
    "colour profile": chunk(b"iCCP", b"name\0\x07"),
    "resolution": chunk(b"pHYs", b""),
    "animation": chunk(b"fcTL", bytes(26)) * 2,
    "a text named interlace": chunk(b"tEXt", b"interlace\0yes"),
    "a text named transparency": chunk(b"tEXt", b"transparency\0yes"),
}


@pytest.mark.parametrize("kind", DAMAGED_JPEGS)
def test_a_damaged_segment_of_a_JPEG_does_not_hide_pixels_and_orientation(kind):
    result = decode(in_jpeg(b"\xff", DAMAGED_JPEGS[kind], EXIF))
    np.testing.assert_array_equal(result.image, upright(in_jpeg(), 6))
    assert result.notes == (DAMAGED_METADATA,)


@pytest.mark.parametrize("kind", DAMAGED_PNGS)
def test_a_damaged_chunk_of_a_PNG_does_not_hide_pixels_and_orientation(kind):
    result = decode(in_png(DAMAGED_PNGS[kind], chunk(b"eXIf", exif_data(6)[6:])))
    np.testing.assert_array_equal(result.image, upright(saved("PNG"), 6))
    assert result.notes == (DAMAGED_METADATA,)


@pytest.mark.parametrize("space", ["Adobe", "JFIF"])
def test_colours_of_a_JPEG_stay_without_its_metadata(space):
    """The Adobe segment says whether a picture is in RGB or CMYK."""
    picture = Image.fromarray(PIXELS)
    file = io.BytesIO()
    picture = picture.convert("CMYK") if space == "Adobe" else picture
    picture.save(file, "JPEG", quality=95, comment=b"comment")
    removed: Any = headers.without_metadata(file.getvalue())[0]
    assert len(removed.getvalue()) == len(file.getvalue()) - len(segment(0xFE, b"comment"))
    wanted = upright(file.getvalue())
    content = file.getvalue()
    content = content[:2] + DAMAGED_JPEGS["Photoshop"] + content[2:]
    np.testing.assert_array_equal(decode(content).image, wanted)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", AVIF])
def test_whatever_the_length_of_a_file_metadata_are_removed_without_an_error(format):
    content = saved(format, exif=exif_data(6))
    for length in range(4, len(content)):
        headers.without_metadata(content[:length])


# Truncated pictures.

TRUNCATABLE = {
    "JPEG": {},
    "JPEG, progressive": dict(progressive=True),
    "PNG": {},
    "GIF": {},
    "TIFF": {},
    "PPM": {},
    "BMP": {},
}


def truncatable(kind):
    """Returns a picture and a picture with only its first rows, which is also without its end."""
    noise = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    content = saved(kind.partition(",")[0], noise, **TRUNCATABLE[kind])
    return content, content[: len(content) - 100]


@pytest.mark.parametrize("kind", TRUNCATABLE)
def test_a_truncated_picture_is_an_error_that_names_the_option(kind):
    content, cut = truncatable(kind)
    assert decode(content).notes == ()
    with pytest.raises(TruncatedError, match=r"image file is truncated.*--allow-truncated"):
        decode(cut)


@pytest.mark.parametrize("kind", TRUNCATABLE)
def test_a_truncated_picture_is_decoded_and_counted_if_that_is_allowed(kind):
    content, cut = truncatable(kind)
    whole = decode(content, allow_truncated=True)
    part = decode(cut, allow_truncated=True)
    assert (whole.notes, part.notes) == ((), (TRUNCATED,))
    # A BMP file begins with the last row, and a progressive JPEG with all rows in few details.
    rows = slice(SIDE // 4, None) if kind == "BMP" else slice(SIDE // 4)
    if kind != "JPEG, progressive":
        np.testing.assert_array_equal(part.image[rows], whole.image[rows])
    assert (part.image != whole.image).any()
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_a_JPEG_that_lacks_only_its_end_has_all_pixels():
    result = decode(in_jpeg()[:-2], allow_truncated=True)
    np.testing.assert_array_equal(result.image, upright(in_jpeg()))
    assert result.notes == (TRUNCATED,)


def test_a_picture_may_be_truncated_and_have_damaged_metadata():
    content = in_jpeg(DAMAGED_JPEGS["Photoshop"], EXIF)[:-2]
    with pytest.raises(TruncatedError, match="--allow-truncated"):
        decode(content)
    result = decode(content, allow_truncated=True)
    np.testing.assert_array_equal(result.image, upright(in_jpeg(), 6))
    assert result.notes == (DAMAGED_METADATA, TRUNCATED)


@pytest.mark.parametrize("kind", ["JPEG", "JPEG, progressive", "GIF", "TIFF", "PPM", "BMP"])
def test_a_header_without_rows_stays_an_error(kind):
    noise = np.random.default_rng(1).integers(0, 256, (80, 100, 3), np.uint8)
    content = saved(kind.partition(",")[0], noise, **TRUNCATABLE[kind])
    file = io.BytesIO(content)
    picture = Image.open(file)
    end = file.tell() if kind.startswith("JPEG") else picture.tile[0].offset + 1
    for more in (0, 5, 20):
        with pytest.raises(TruncatedError, match="none of its rows could be decoded"):
            decode(content[: end + more], allow_truncated=True)
    assert decode(content[: len(content) * 3 // 4], allow_truncated=True).notes == (TRUNCATED,)


def test_broken_pixels_stay_an_error_where_truncated_pictures_are_allowed():
    content = bytearray(truncatable("PNG")[0])
    at = content.index(b"IDAT") + 4
    content[at : at + 50] = bytes(50)
    with pytest.raises(OSError, match="broken data stream"):
        decode(bytes(content), allow_truncated=True)


def test_only_the_thread_that_decodes_a_truncated_picture_is_tolerant():
    with pictures._tolerant(), concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert ImageFile.LOAD_TRUNCATED_IMAGES
        assert not thread.submit(lambda: bool(ImageFile.LOAD_TRUNCATED_IMAGES)).result()


# Limits.


def test_the_number_of_pixels_is_limited_before_pixels_are_decoded():
    """This holds for a picture whose pixels are missing too."""
    content = in_jpeg()
    assert decode(content, max_pixels=SIDE**2).image.shape == (SIDE, SIDE, 3)
    for part in (content, content[: content.index(b"\xff\xda") + 14]):
        with pytest.raises(LimitError, match=r"it has 1024 pixels, more than --max-pixels 1023$"):
            decode(part, max_pixels=SIDE**2 - 1, allow_truncated=True)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_the_limit_may_be_larger_than_that_of_Pillow(monkeypatch, format):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    content = saved(format)
    with pytest.raises(LimitError, match="1024 pixels"):
        decode(content)
    monkeypatch.setattr(pictures, "MOST_PIXELS", 200)
    with pytest.raises(LimitError, match=r"it has 1024 pixels, more than --max-pixels 1023$"):
        decode(content, max_pixels=1023)
    decode(content, max_pixels=1024)
    assert Image.MAX_IMAGE_PIXELS == 512


def test_the_default_limit_is_that_of_Pillow():
    assert MOST_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_the_limits_do_not_identify_a_run():
    assert str(preprocessing(max_pixels=1, allow_truncated=True)) == str(preprocessing())


@pytest.mark.parametrize("kind", ["damaged", "truncated"])
def test_a_second_attempt_begins_when_the_pixels_of_the_first_one_are_freed(monkeypatch, kind):
    content = in_png(DAMAGED_PNGS["a text named transparency"])
    if kind == "truncated":
        content = truncatable("PNG")[1]
    opened, open_ = [], Image.open

    def recording(file):
        assert all(picture() is None for picture in opened)
        picture = open_(file)
        opened.append(weakref.ref(picture))
        return picture

    monkeypatch.setattr(Image, "open", recording)
    decode(content, allow_truncated=True)
    assert len(opened) == 2


def test_a_picture_without_its_metadata_needs_memory_for_two_encoded_ones():
    content = in_png(DAMAGED_PNGS["checksum"])
    needed = 2 * len(content) + PIXEL * SIDE**2
    for reserved, wanted in ((2 * len(content) - 1, 2 * len(content)), (needed - 1, needed)):
        with pytest.raises(LargerError) as error:
            preprocessing().decode(Content(content), reserved)
        assert error.value.needed == wanted
    assert preprocessing().decode(Content(content), needed).notes == (DAMAGED_METADATA,)


# Decoders.


@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
def test_decoders_return_notes_and_origins(monkeypatch, here):
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    origin = Origin("http://host/a.jpg", "", 5, "tag")
    contents = [in_jpeg(), in_png(DAMAGED_PNGS["checksum"]), in_jpeg()[:-2], b"no picture"]
    opened = [functools.partial(opened_pictures.fetched, content, origin) for content in contents]
    opened += map(Content, contents)
    notes = [(), (DAMAGED_METADATA,), (TRUNCATED,), None]
    how = preprocessing(allow_truncated=True)
    with decoders.Decoders(how, 2, Budget(), 40) as pool:
        ((_, results),) = pool.decode(Picture("", open_) for open_ in opened * 4)
    for i, (result, wanted) in enumerate(zip(results, notes * 8, strict=True)):
        if wanted is None:
            assert result == "it is not a picture in a format that Pillow reads"
        else:
            assert (result.notes, result.origin) == (wanted, None if i % 8 >= 4 else origin)
            assert result.image.shape == (SIDE, SIDE, 3)


def noisy():
    """Returns pictures about which Pillow warns, or libtiff writes to standard error."""
    content = bytearray(saved("TIFF", compression="tiff_lzw"))
    content[10:60] = bytes(50)
    exif = bytearray(exif_data(6))
    exif[18:20] = b"\0\x04"
    exif[20:24] = b"\xff" * 4
    return bytes(content), in_jpeg(segment(0xE1, bytes(exif)))


def test_some_damaged_pictures_are_noisy(capfd):
    """Otherwise the next test could not fail."""
    tiff, jpeg = noisy()
    with pytest.raises(OSError, match=r"decoder error|-2"):
        preprocessing().decode(Content(tiff))
    assert sys.platform != "linux" or "LZWDecode" in capfd.readouterr().err
    with pytest.warns(UserWarning):
        preprocessing().decode(Content(jpeg))


@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
def test_damaged_pictures_write_nothing_to_standard_error(monkeypatch, capfd, here):
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with decoders.Decoders(preprocessing(), 2, Budget(), 40) as pool:
            list(pool.decode(Picture("", Content(content)) for content in noisy() * 4))
        warnings.warn("after", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["after"]
    assert capfd.readouterr().err == ""


# Plugins.


@pytest.fixture
def without_plugins(monkeypatch):
    """Makes Pillow and this package forget the plugins, which need not be installed."""
    names = ("HEIF", "JXL")
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name not in names])
    for name in names:
        monkeypatch.delitem(Image.OPEN, name, raising=False)
    for module in set(pictures.PLUGINS.values()):
        monkeypatch.setitem(sys.modules, module, None)
    caches = pictures.extensions, pictures._register_plugins
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


ADVICE = "install a plugin of Pillow: pip install 'pallas_patch_embed[formats]'"
JPEG_XL = b"\xff\x0a" + bytes(20)
HEIC = b"\0\0\0\x18ftypheic" + bytes(20)


def test_what_to_install_is_said_where_a_plugin_is_missing(without_plugins):
    for extension in (".heic", ".HEIF", ".hif", ".jxl"):
        assert pictures.missing_plugin(extension) == ADVICE
        assert extension.lower() not in pictures.extensions()
    for extension in ("", ".png", ".avif", ".txt"):
        assert pictures.missing_plugin(extension) is None
    for content, kind in ((HEIC, ".heic"), (JPEG_XL, ".jxl")):
        with pytest.raises(ValueError) as error:
            decode(content)
        assert str(error.value).endswith(f"; to read {kind} pictures, {ADVICE}")


def test_a_damaged_plugin_does_not_break_other_pictures(without_plugins, monkeypatch):
    def broken(**options):
        raise RuntimeError("not made for this Pillow")

    module = types.SimpleNamespace(register_heif_opener=broken)
    monkeypatch.setitem(sys.modules, "pillow_heif", module)
    assert pictures.missing_plugin(".heic") == ADVICE
    assert {".png", ".webp"} < pictures.extensions()
    np.testing.assert_array_equal(decode(saved("PNG")).image, PIXELS)


@pytest.mark.parametrize("here", [0, 512], ids=["processes", "threads"])
@pytest.mark.parametrize("extension", [".heic", ".heif", ".hif", ".jxl", ".avif"])
def test_formats_of_plugins_are_decoded_by_every_decoder(monkeypatch, extension, here):
    if extension in pictures.PLUGINS:
        pytest.importorskip(pictures.PLUGINS[extension])
    if extension == ".avif" and "AVIF" not in Image.SAVE:
        pytest.skip("Pillow 11")
    assert extension in pictures.extensions() and pictures.missing_plugin(extension) is None
    monkeypatch.setattr(decoders, "DECODED_HERE", here)
    format = Image.registered_extensions()[extension]
    opened = [Content(saved(format, quality=95))] * 20
    with decoders.Decoders(preprocessing(), 2, Budget(), 40) as pool:
        ((_, results),) = pool.decode(Picture("", open_) for open_ in opened)
    for result in results:
        assert np.abs(result.image.astype(int) - PIXELS).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_HEIC_is_applied_once(orientation):
    """The plugin applies the one of the container; that of EXIF data need not agree."""
    pytest.importorskip("pillow_heif")
    pictures.extensions()
    content = saved("HEIF", quality=100, chroma=444, exif=exif_data(orientation))
    wanted = upright(saved("PNG"), orientation)
    changed = content.replace(exif_data(orientation)[6:], exif_data(5)[6:])
    for picture in (content, changed):
        result = decode(picture)
        assert np.abs(result.image.astype(int) - wanted).mean() < 8
        assert result.notes == ()


def damaged_exif(format, rng):
    exif = exif_data(6)
    damaged = bytearray(exif)
    for at in rng.integers(6, len(exif), 8):
        damaged[at] = rng.integers(256)
    return saved(format, exif=exif).replace(exif[6:], bytes(damaged[6:]))


@pytest.mark.parametrize("format, module", [("HEIF", "pillow_heif"), ("JXL", "pillow_jxl")])
def test_damaged_EXIF_data_of_a_plugin_s_format_do_not_matter(format, module):
    pytest.importorskip(module)
    pictures.extensions()
    rng = np.random.default_rng(54)
    wanted = decode(saved(format, exif=exif_data(6))).image
    for _ in range(20):
        np.testing.assert_array_equal(decode(damaged_exif(format, rng)).image, wanted)


def oriented_jpeg_xl(orientation):
    """Encodes a picture whose codestream has an orientation, which the plugin cannot write.

    The header of the codestream is replaced: the size (9 bits), all_default (1 bit) and the
    default transform (1 bit) become fields with their default values, but for the orientation.
    """
    content = saved("JXL", exif=None)
    assert content.startswith(b"\xff\x0a")
    bits = "".join(f"{byte:08b}"[::-1] for byte in content[2:4])
    assert bits[9:] == "1100000"
    header = bits[:9] + "01" + f"{orientation - 1:03b}"[::-1] + "0000001001110" + "01"
    header += "0" * (-len(header) % 8)
    packed = bytes(int(header[i : i + 8][::-1], 2) for i in range(0, len(header), 8))
    return content[:2] + packed + content[4:]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_JPEG_XL_is_that_of_its_codestream(orientation):
    pytest.importorskip("pillow_jxl")
    pictures.extensions()
    content = oriented_jpeg_xl(orientation)
    wanted = upright(saved("PNG"), orientation)
    assert np.abs(decode(content).image.astype(int) - wanted).mean() < 8

    # In the container of the format, EXIF data may repeat the orientation.
    def box(name, payload):
        return struct.pack(">I4s", len(payload) + 8, name) + payload

    signature = box(b"JXL ", b"\r\n\x87\n") + box(b"ftyp", b"jxl \0\0\0\0jxl ")
    exif = box(b"Exif", bytes(4) + exif_data(orientation)[6:])
    result = decode(signature + exif + box(b"jxlc", content))
    assert np.abs(result.image.astype(int) - wanted).mean() < 8
    assert result.notes == ()


def jpeg_xl_header(height, width=None, ratio=0):
    """Returns the header of a JPEG XL picture whose sides have 30 bits."""
    bits, at = 0, 1  # The first bit tells that the sides are not small.
    for value, number in ((3, 2), (height - 1, 30), (ratio, 3)):
        bits |= value << at
        at += number
    if not ratio:
        bits |= (3 | (width - 1) << 2) << at
    return b"\xff\x0a" + bits.to_bytes(14, "little")


def test_the_size_of_a_JPEG_XL_picture_is_read_before_it_is_decoded():
    """The plugin decodes a picture when it is opened."""
    for content, pixels in (
        (jpeg_xl_header(2**30, 2**30), 2**60),
        (jpeg_xl_header(1000, 7), 7000),
        (jpeg_xl_header(900, ratio=5), 900 * 1600),
    ):
        large = struct.pack(">I4sQ", 1, b"free", 30) + bytes(14)
        boxes = b"\0\0\0\x0cJXL \r\n\x87\n" + large + b"\0\0\0\x1cjxlp\0\0\0\0" + content
        for file in (content, boxes):
            assert headers.jpeg_xl_pixels(io.BytesIO(file)) == pixels
            with pytest.raises(LimitError if pixels > 10**6 else LargerError):
                preprocessing(max_pixels=10**6).decode(Content(file), 1000)


@pytest.mark.parametrize(
    "boxes",
    [b"", b"\0" * 16, b"\0\0\0\x08free" * 2000, b"\0\0\0\x20jxlc" + bytes(30), b"\0\0\0\x01free"],
)
def test_damaged_boxes_of_a_JPEG_XL_picture_are_an_error(boxes):
    with pytest.raises(ValueError, match="its header is damaged"):
        decode(b"\0\0\0\x0cJXL \r\n\x87\n" + boxes)


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (1000, 3), (257, 255), (1920, 1080), (600, 500)])
def test_the_size_of_a_JPEG_XL_picture_is_that_of_its_encoder(size):
    pytest.importorskip("pillow_jxl")
    pictures.extensions()
    for container in (False, True):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, "JXL", use_container=container)
        assert headers.jpeg_xl_pixels(file) == size[0] * size[1]
