"""Embedding picture files from the command line."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
import zipfile
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import pallas_patch_embed as ppe
from pallas_patch_embed.base import files
from pallas_patch_embed.embed import command, decoders, embedder, npz, pipeline, preprocessing
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.pictures import Budget, upright_rgb
from pallas_patch_embed.encoders import checkpoint as loader
from tests.encoder.goldens import DATA, arrays, checkpoint
from tests.short_suite import keep

PHOTOS = resources.files("pallas_patch_embed") / "photos"
FIXED, BIG_VISION, NAFLEX = "hf_siglip_p14_224", "bv_vit_p16_224", "bv_naflex_p16"
COMMAND = [sys.executable, "-m", "pallas_patch_embed", "embed"]


# Two ulps of bfloat16 for embeddings up to 4. Programs for different batch sizes may round
# differently by as much.
BFLOAT16 = 2.0**-5


@pytest.fixture
def pictures(tmp_path):
    """Makes a folder with pictures of many formats and modes, and files that are not pictures."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    coffee = Image.open(PHOTOS / "coffee.png").convert("RGB").crop((0, 0, 300, 200))
    coffee.save(folder / "a.png")
    coffee.save(folder / "b.JPG", "JPEG", quality=95)
    coffee.convert("RGBA").save(folder / "c.webp", lossless=True)
    coffee.convert("P").save(folder / "more" / "d.gif")
    coffee.convert("CMYK").save(folder / "more" / "e.tiff")
    coffee.convert("L").save(folder / "more" / "f.bmp")
    grey = np.asarray(coffee.convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(folder / "more" / "g.png")
    upright = coffee.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # Viewers rotate the picture by 90 degrees clockwise.
    upright.save(folder / "more" / "h.png", exif=exif)
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_text("no picture")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.png").write_text("no picture")
    for name in ("document.pdf", "film.mpg", "drawing.eps", "data.h5"):
        (folder / name).write_text("known to Pillow, but no picture that it reads itself")
    return folder


NAMES = [
    "a.png",
    "b.JPG",
    "c.webp",
    *(f"more/{n}" for n in ("d.gif", "e.tiff", "f.bmp", "g.png", "h.png")),
]


def run(tmp_path, *arguments, name=BIG_VISION, **options):
    options = dict(size=None, batch=3, patch_dtype="float32", normalize=False) | options
    unreadable = command.run(
        checkpoint(name), arguments, tmp_path / "out.npz", options=Options(**options)
    )
    with np.load(tmp_path / "out.npz") as file:
        return unreadable, file["embeddings"], list(file["paths"])


def coffee(reserved):
    return open(str(PHOTOS / "coffee.png"), "rb")


def earlier_output(path, n=3):
    with open(path, "wb") as file:
        np.savez(file, embeddings=np.ones((n, 4), np.float32), paths=np.array(["old"] * n))


def resized(path, H, W, resample=Image.Resampling.BILINEAR):
    return np.asarray(Image.open(path).convert("RGB").resize((W, H), resample))


def test_a_folder_may_have_pictures_of_all_formats(tmp_path, pictures):
    unreadable, embeddings, paths = run(tmp_path, pictures)
    assert unreadable == 0 and paths == [str(pictures / name) for name in NAMES]
    assert embeddings.dtype == np.float32
    encoder = ppe.siglip2.load_encoder(checkpoint(BIG_VISION), patch_dtype="float32")
    names = NAMES[:6]
    images = np.stack([resized(pictures / name, 224, 224) for name in names])
    wanted = np.asarray(encoder(images).pooler_output, np.float32)
    np.testing.assert_allclose(embeddings[:6], wanted, atol=BFLOAT16)
    # The picture of 16 bits equals that of 8 bits. The EXIF tag turns the rotated picture upright.
    np.testing.assert_array_equal(embeddings[6], embeddings[5])
    np.testing.assert_array_equal(embeddings[7], embeddings[0])


@pytest.mark.parametrize(
    "name, batch",
    keep(
        itertools.product((BIG_VISION, NAFLEX), (1, 5, 64)),
        lambda case: case[1] == 5,
        "compiles an encoder twice for each case",
    ),
)
def test_the_batch_size_does_not_change_the_embeddings(tmp_path, pictures, name, batch):
    _, embeddings, paths = run(tmp_path, pictures, name=name)
    _, others, same = run(tmp_path, pictures, name=name, batch=batch)
    assert same == paths
    # The embeddings of a coloured and a grey picture, a.png and f.bmp, differ by more.
    assert np.abs(embeddings[0] - embeddings[5]).max() > 2 * BFLOAT16
    np.testing.assert_allclose(others, embeddings, atol=BFLOAT16)


def test_NaFlex_keeps_the_aspect_ratio(tmp_path, pictures):
    _, embeddings, _ = run(tmp_path, pictures / "a.png", name=NAFLEX, size=128)
    encoder = ppe.siglip2.load_encoder(checkpoint(NAFLEX), patch_dtype="float32")
    # 200 x 300 pixels become 6 x 9 patches: at most 64 are allowed, and 7 x 10 would be more.
    image = resized(pictures / "a.png", 6 * 16, 9 * 16)
    x, shapes, mask = ppe.siglip2.batch_naflex([image], encoder.config, 64)
    wanted = encoder(x, spatial_shapes=shapes, mask=mask).pooler_output
    np.testing.assert_array_equal(embeddings, np.asarray(wanted, np.float32))


def test_size_resizes_the_positions(tmp_path, pictures):
    _, embeddings, _ = run(tmp_path, pictures / "a.png", size=280)
    encoder = ppe.siglip2.load_encoder(
        checkpoint(BIG_VISION), patch_dtype="float32", image_size=280
    )
    wanted = encoder(resized(pictures / "a.png", 280, 280)[None]).pooler_output
    np.testing.assert_array_equal(embeddings, np.asarray(wanted, np.float32))


def test_normalize_gives_unit_vectors(tmp_path, pictures):
    _, embeddings, _ = run(tmp_path, pictures, normalize=True)
    _, plain, _ = run(tmp_path, pictures)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        embeddings, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-6
    )


def test_unreadable_files_are_reported_skipped_and_counted(tmp_path, pictures, capsys):
    content = (PHOTOS / "coffee.png").read_bytes()
    (pictures / "aa.jpg").write_text("no picture")
    (pictures / "truncated.png").write_bytes(content[: len(content) // 2])
    (pictures / "dangling.png").symlink_to("absent.png")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(pictures / "float.tiff")
    Image.fromarray(np.full((4, 4), 300000, np.int32)).save(pictures / "wide.tiff")
    unreadable, embeddings, paths = run(tmp_path, pictures)
    assert unreadable == 5 and len(embeddings) == len(NAMES)
    assert sorted(paths) == sorted(str(pictures / name) for name in NAMES)
    error = capsys.readouterr().err
    for name in ("aa.jpg", "truncated.png", "dangling.png", "float.tiff", "wide.tiff"):
        assert f"No embedding of {pictures / name}: " in error
    assert "5 pictures could not be read or embedded" in error


def test_a_picture_whose_embedding_is_not_finite_is_left_out(
    tmp_path, pictures, monkeypatch, capsys
):
    _, wanted, _ = run(tmp_path, pictures)
    start = embedder.Embedder.start

    def one_is_infinite(self, images, whole):
        finish = start(self, images, whole)

        def finished():
            result = finish().copy()
            result[1, 3] = np.inf
            return result

        return finished

    monkeypatch.setattr(embedder.Embedder, "start", one_is_infinite)
    unreadable, embeddings, paths = run(tmp_path, pictures, batch=5, normalize=True)
    assert unreadable == 2
    kept = [i for i in range(8) if i not in (1, 6)]
    assert paths == [str(pictures / NAMES[i]) for i in kept]
    lengths = np.linalg.norm(wanted[kept], axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings, wanted[kept] / lengths, atol=BFLOAT16)
    error = capsys.readouterr().err
    assert f"No embedding of {pictures / 'b.JPG'}: its embedding is not finite" in error


def test_the_norm_of_large_embeddings_does_not_overflow():
    rows = np.array([[3e38, -3e38], [1e-30, 0], [0, 0]], np.float32)
    wanted = [[0.5**0.5, -(0.5**0.5)], [1, 0], [0, 0]]
    np.testing.assert_allclose(embedder.normalized(rows), wanted, rtol=1e-6)


def test_no_more_pixels_are_decoded_at_a_time_than_the_budget_has(tmp_path, pictures, monkeypatch):
    # Every picture has 60000 pixels, so a second picture has to wait for the budget. The first one
    # is decoded only when another one waits, or is decoded too.
    met, lock, inside = threading.Event(), threading.Lock(), []

    class Signalling(Budget):
        def reserve(self, size):
            reserved = super().reserve(size)
            if not reserved:
                met.set()
            return reserved

    budget = Signalling(1_000_000)
    most = []

    def decoding(picture, exif):
        with lock:
            inside.append(picture.width * picture.height)
            most.append(sum(inside))
            if len(inside) > 1:
                met.set()
        met.wait()
        result = upright_rgb(picture, exif)
        with lock:
            inside.pop()
        return result

    monkeypatch.setattr(pipeline, "Budget", lambda: budget)
    monkeypatch.setattr("pallas_patch_embed.embed.pictures.upright_rgb", decoding)
    # Resizing to a small size needs no more memory than decoding.
    unreadable, *_ = run(tmp_path, pictures, workers=4, size=128)
    assert unreadable == 0 and most == [60_000] * 8 and budget.reserved == 0


def test_a_picture_of_more_pixels_than_the_budget_is_decoded_alone(tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(pipeline, "Budget", lambda: Budget(1))
    assert run(tmp_path, pictures, workers=4)[0] == 0
    budget = Budget(10)
    assert budget.reserve(1000) and not budget.reserve(1)
    budget.free(1000)
    assert budget.reserve(1) and budget.reserved == 1


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_the_pixels_of_a_picture_are_freed_before_others_are_decoded(tmp_path, monkeypatch, mode):
    pictures = []

    class Checking(Budget):
        def free(self, size):
            super().free(size)
            assert pictures and all(picture() is None for picture in pictures)

    def decoding(picture, exif):
        result = upright_rgb(picture, exif)
        pictures.extend((weakref.ref(picture), weakref.ref(result[0])))
        return result

    monkeypatch.setattr("pallas_patch_embed.embed.pictures.upright_rgb", decoding)
    monkeypatch.setattr(pipeline, "Budget", Checking)
    Image.new(mode, (40, 30)).save(tmp_path / "a.png")
    assert run(tmp_path, tmp_path / "a.png", workers=1)[0] == 0


def test_images_are_freed_once_their_batch_is_embedded(tmp_path, pictures, monkeypatch):
    """Memory holds at most the batches decoded and computed ahead, and one more of each."""
    images, most, decode = [], [], preprocessing.Preprocessing.decode
    for i in range(30):
        Image.new("RGB", (9, 9), (i, 0, 0)).save(pictures / f"z{i:02}.png")

    def decoding(self, open_, reserved):
        result = decode(self, open_, reserved)
        images.append(weakref.ref(result.image))
        most.append(sum(image() is not None for image in images))
        return result

    monkeypatch.setattr(preprocessing.Preprocessing, "decode", decoding)
    run(tmp_path, pictures, batch=2, workers=1)
    assert len(images) == 38
    ahead = decoders.batches_in_memory(1, 2, 0) - 1 + pipeline.COMPUTED_AHEAD
    assert max(most) <= 2 * (ahead + 2) < 38


def test_size_reads_the_checkpoint_once(tmp_path, pictures, monkeypatch):
    reads = []
    for name in ("open_npz", "open_safetensors"):
        opened = getattr(loader, name)
        monkeypatch.setattr(
            loader, name, lambda path, opened=opened: reads.append(path) or opened(path)
        )
    # Programs for these sizes were already compiled by the tests above.
    run(tmp_path, pictures / "a.png", size=280)
    run(tmp_path, pictures / "a.png", size=280, name=FIXED)
    run(tmp_path, pictures / "a.png", size=128, name=NAFLEX)
    assert reads == [checkpoint(BIG_VISION), checkpoint(FIXED), checkpoint(NAFLEX)]


def with_preprocessor(tmp_path, config, name=FIXED):
    shutil.copytree(DATA / name, tmp_path / "model")
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "model" / "preprocessor_config.json").write_text(text)
    return tmp_path / "model"


RELEASED = {
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_resize": True,
    "do_convert_rgb": None,
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 224, "width": 224},
}


@pytest.mark.parametrize(
    "given, resample",
    [
        ({"resample": 2}, "BILINEAR"),
        ({"resample": 3}, "BICUBIC"),
        ({"resample": 1}, "LANCZOS"),
        ({}, "BICUBIC"),
        ({"image_processor_type": "SiglipImageProcessorFast"}, "BICUBIC"),
        ({"resample": 0, "size": {"height": 230, "width": 230}}, "NEAREST"),
        # transformers' fast image processors also write these keys.
        (
            {"data_format": "channels_first", "default_to_square": False, "device": None}
            | {"do_center_crop": False, "crop_size": {"height": 9, "width": 9}, "do_pad": None},
            "BICUBIC",
        ),
    ],
)
def test_pictures_are_resized_as_the_preprocessor_config_says(tmp_path, given, resample):
    path = with_preprocessor(tmp_path, RELEASED | given)
    config = ppe.siglip2.load_encoder(path).config
    how = preprocessing.Preprocessing.of(path, config, None)
    side = given.get("size", RELEASED["size"])["height"]
    found = how.image(coffee)
    assert how.defaults_of is None
    wanted = resized(PHOTOS / "coffee.png", side, side, Image.Resampling[resample])
    np.testing.assert_array_equal(found, wanted)


def test_an_encoder_of_four_channels_is_refused(tmp_path):
    model, key = tmp_path / "model", "embeddings.patch_embedding.weight"
    shutil.copytree(checkpoint(FIXED), model)
    tensors = arrays(FIXED)
    tensors[key] = np.pad(tensors[key], [(0, 0), (0, 1), (0, 0), (0, 0)])
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"num_channels": 4}
    (model / "config.json").write_text(json.dumps(config))
    shutil.copy(PHOTOS / "coffee.png", tmp_path)
    with pytest.raises(ValueError, match="images of 4 channels, but pictures are decoded to RGB"):
        command.run(model, [tmp_path / "coffee.png"], tmp_path / "out", options=Options())
    assert not (tmp_path / "out").exists()


def test_the_preprocessor_config_says_how_many_patches(tmp_path):
    name = "hf_siglip2_naflex_p16"
    path = with_preprocessor(tmp_path, {"max_num_patches": 40, "patch_size": 16}, name)
    config = ppe.siglip2.load_encoder(path).config
    how = preprocessing.Preprocessing.of(path, config, None)
    image = how.image(coffee)
    # 400 x 600 pixels become 5 x 8 patches, because 6 x 8 are more than 40.
    assert image.shape == (5 * 16, 8 * 16, 3)


def test_a_processor_config_with_an_image_processor_goes_first(tmp_path):
    path = with_preprocessor(tmp_path, RELEASED | {"resample": 2})
    config = ppe.siglip2.load_encoder(path).config
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "A"}))
    assert preprocessing.Preprocessing.of(path, config, None).resample == 2
    nested = {"image_processor": RELEASED | {"resample": 1}}
    (path / "processor_config.json").write_text(json.dumps(nested))
    assert preprocessing.Preprocessing.of(path, config, None).resample == 1


@pytest.mark.parametrize(
    "name, resample, text",
    [
        (FIXED, "BICUBIC", "defaults of transformers' SiglipImageProcessor: 224 x 224 pixels"),
        (BIG_VISION, "BILINEAR", "defaults of big_vision: 224 x 224 pixels, bilinear"),
        (NAFLEX, "BILINEAR", "at most 256 patches of 16 x 16 pixels, bilinear"),
        ("hf_siglip2_naflex_p16", "BILINEAR", "defaults of transformers' Siglip2ImageProcessor"),
    ],
)
def test_without_a_preprocessor_config_the_defaults_of_the_class_are_taken_and_said(
    tmp_path, pictures, capsys, name, resample, text
):
    config = ppe.siglip2.load_encoder(checkpoint(name)).config
    how = preprocessing.Preprocessing.of(checkpoint(name), config, None)
    assert how.resample == Image.Resampling[resample]
    run(tmp_path, pictures / "a.png", name=name)
    error = capsys.readouterr().err
    assert "There is no preprocessor_config.json" in error and text in error


@pytest.mark.parametrize(
    "config, text",
    [
        ("{", "damaged"),
        ("[]", "not a JSON object"),
        (RELEASED | {"max_num_patches": True}, "max_num_patches"),
        (RELEASED | {"size": {"height": True, "width": 224}}, "height or width"),
        (RELEASED | {"do_resize": False}, "do_resize"),
        (RELEASED | {"rescale_factor": 1}, "rescale_factor"),
        (RELEASED | {"rescale_factor": 10**399}, "rescale_factor is too large"),
        (RELEASED | {"do_rescale": False}, "do_rescale"),
        (RELEASED | {"size": {"shortest_edge": 224}}, "size is"),
        (RELEASED | {"size": {"shortest_edge": 224, "longest_edge": 300}}, "size is"),
        (RELEASED | {"size": "224"}, "size is"),
        (RELEASED | {"size": 224}, "size is 224"),
        (RELEASED | {"size": {"height": 256, "width": 256}}, "--size"),
        (RELEASED | {"do_center_crop": True}, "crop_size is None"),
        (RELEASED | {"do_center_crop": 1}, "do_center_crop is 1"),
        (RELEASED | {"do_pad": True}, "do_pad"),
        (RELEASED | {"max_num_patches": 256}, "max_num_patches"),
        (RELEASED | {"do_sharpen": 0.5}, "do_sharpen is 0.5"),
        (RELEASED | {"image_processor_type": "BlipImageProcessor"}, "image_processor_type"),
        (RELEASED | {"image_processor_type": 5}, "image_processor_type is 5"),
        (RELEASED | {"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type"),
        (RELEASED | {"resample": True}, "resample"),
        (RELEASED | {"resample": 17}, "resample"),
        (RELEASED | {"resample": "bicubic"}, "resample"),
    ],
)
def test_a_preprocessor_config_that_asks_for_something_else_is_refused(tmp_path, config, text):
    encoder = ppe.siglip2.load_encoder(checkpoint(FIXED))
    path = with_preprocessor(tmp_path, config)
    with pytest.raises(ValueError, match=text):
        preprocessing.Preprocessing.of(path, encoder.config, None)


def test_an_image_processor_with_patches_of_another_size_is_refused(tmp_path):
    path = with_preprocessor(tmp_path, {"patch_size": 14}, "hf_siglip2_naflex_p16")
    config = ppe.siglip2.load_encoder(path).config
    with pytest.raises(ValueError, match="patch_size is 14, expected 16"):
        preprocessing.Preprocessing.of(path, config, None)


def test_the_command_writes_what_it_says_and_says_how_it_went(tmp_path, pictures):
    out = tmp_path / "out.npz"
    command = [*COMMAND, "--checkpoint", checkpoint(FIXED), pictures, "--out", out]
    result = subprocess.run([*command, "--batch", "4"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "pictures/s" in result.stderr and f"8 of 8 pictures into {out}" in result.stdout
    with np.load(out) as file:
        assert file["embeddings"].shape == (8, 96) and len(file["paths"]) == 8


@pytest.mark.slow("another process; test_progress.py has such a run")
def test_the_command_says_which_picture_is_bad(tmp_path, pictures):
    command = [*COMMAND, "--checkpoint", checkpoint(FIXED), pictures, "--out", tmp_path / "out.npz"]
    (pictures / "bad.png").write_text("no picture")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 3 and "8 of 9" in result.stdout and "bad.png" in result.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            ["--checkpoint", "absent", ".", "--out", "out.npz"],
            "there is no file or folder 'absent'",
        ),
        (
            ["--checkpoint", "absent", ".", "p.jpg", "x", "--out", "o.npz"],
            "do not exist: p.jpg, x.",
        ),
        (["--checkpoint", "absent", "p*.jpg", "--out", "o.npz"], "No file matches p*.jpg"),
        (["--checkpoint", str(DATA / FIXED), "bad", "--out", "o.npz"], "None of the 1 pictures"),
        (["--checkpoint", "absent", "fifo", "--out", "o.npz"], "fifo is not a regular file"),
        (["--checkpoint", "absent", ".", "--out", "o.npz", "--workers", "0"], "not a positive"),
        (["--checkpoint", str(DATA / FIXED), "empty", "--out", "out.npz"], "no pictures in empty"),
        (["--checkpoint", "absent", ".", "--out", "no/folder/out.npz"], "no such folder"),
        (["--checkpoint", "absent", ".", "--out", "a.png"], "it is a file, expected"),
        (
            ["--checkpoint", str(DATA / FIXED), ".", "--out", "o.npz", "--size", "9"],
            "the side of a patch, 14",
        ),
        (["--checkpoint", "absent", ".", "--out", "out.npz", "--batch", "0"], "not a positive"),
        (
            ["--checkpoint", "absent", ".", "--out", "o.npz", "--patch-dtype", "int4"],
            "invalid choice",
        ),
        (["--checkpoint", "absent", "--out", "out.npz"], "no pictures are given"),
        (
            ["--checkpoint", "a", "--out", "o", "--ray", "a.png"],
            "'a.png' was read as the address of --ray",
        ),
        (["--checkpoint", "a", "a.png", "--out", "o.npz", "--ray"], "--ray needs shards"),
    ],
    ids=[
        *("checkpoint", "absent", "no match", "unreadable", "FIFO", "workers", "empty"),
        *("folder", "out"),
        *("size", "batch", "dtype", "pictures", "Ray took it", "Ray"),
    ],
)
def test_a_command_that_cannot_work_is_refused(
    tmp_path, monkeypatch, command_line, arguments, text
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes((PHOTOS / "coffee.png").read_bytes())
    (tmp_path / "bad").write_text("no picture")
    os.mkfifo(tmp_path / "fifo")
    earlier_output(tmp_path / "o.npz")
    old = (tmp_path / "o.npz").read_bytes()
    monkeypatch.chdir(tmp_path)
    code, error = command_line("embed", *arguments)
    assert code == 2 and text in error
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.png", "bad", "empty", "fifo", "o.npz"]
    assert (tmp_path / "o.npz").read_bytes() == old


def test_the_file_that_a_link_names_is_written(tmp_path, pictures):
    (tmp_path / "folder").mkdir()
    (tmp_path / "out.npz").symlink_to(tmp_path / "folder" / "real.npz")
    run(tmp_path, pictures / "a.png")
    assert (tmp_path / "out.npz").is_symlink() and (tmp_path / "folder" / "real.npz").is_file()


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_replaces_another_keeps_its_mode(tmp_path, pictures, mode, umask):
    earlier_output(tmp_path / "out.npz")
    (tmp_path / "out.npz").chmod(mode)
    before = os.umask(umask)
    try:
        with files.written_atomically(tmp_path / "out.npz") as file:
            (partial,) = tmp_path.glob(".*")
            assert partial.stat().st_mode & 0o777 == mode
            file.write(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "out.npz").stat().st_mode & 0o777 == mode
    assert (tmp_path / "out.npz").read_bytes() == b"new"


def test_a_file_without_chmod_is_readable_by_nobody_else(tmp_path, monkeypatch):
    earlier_output(tmp_path / "out.npz")
    (tmp_path / "out.npz").chmod(0o600)

    def refuse(*_):
        raise PermissionError("no modes here")

    monkeypatch.setattr(os, "chmod", refuse)
    with files.written_atomically(tmp_path / "out.npz") as file:
        file.write(b"new")
    assert (tmp_path / "out.npz").stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_the_old_file(tmp_path, pictures, monkeypatch):
    earlier_output(tmp_path / "out.npz")
    old = (tmp_path / "out.npz").read_bytes()

    def savez(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(npz.np, "savez", savez)
    with pytest.raises(npz.WrittenElsewhereError, match=r"disk full.*nothing was written"):
        run(tmp_path, pictures / "a.png")
    assert (tmp_path / "out.npz").read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz", "pictures"}


def other_file(kind, folder, pictures, model):
    """Makes a file that `embed` must not replace, and returns its path."""
    out = folder / "out.npz"
    stored = dict(embeddings=np.ones((3, 4), np.float32), paths=np.array(["a"] * 3))
    if kind == "photograph":
        return pictures / "a.png"
    if kind == "link to a photograph":
        out.symlink_to(pictures / "a.png")
    elif kind == "hard link to an input":
        earlier_output(pictures / "z.png")
        os.link(pictures / "z.png", out)
    elif kind == "checkpoint":
        shutil.copy(checkpoint(BIG_VISION), out)
    elif kind == "file of the checkpoint":
        return model / "config.json"
    elif kind == "link to the weights":
        out.symlink_to(model / "model.safetensors")
    elif kind == "empty":
        out.touch()
    elif kind == "FIFO":
        os.mkfifo(out)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(out))
    elif kind == "device":
        return Path("/dev/null")
    elif kind == "folder":
        out.mkdir()
    elif kind == "loop":
        out.symlink_to(out)
    elif kind == "link to nowhere":
        out.symlink_to(folder / "absent" / "out.npz")
    elif kind == "more arrays":
        np.savez(out, **stored, other=np.ones(3))
    elif kind == "other arrays":
        np.savez(out, a=np.ones((3, 4), np.float32), b=np.ones(3))
    elif kind == "other dtype":
        np.savez(out, **stored | dict(embeddings=np.ones((3, 4))))
    elif kind == "other paths":
        np.savez(out, **stored | dict(paths=np.ones(3)))
    elif kind == "other numbers":
        np.savez(out, **stored | dict(paths=np.array(["a"] * 4)))
    elif kind == "text":
        out.write_text("PK\3\4 is how a zip archive begins")
    return out


@pytest.mark.parametrize(
    "kind",
    [
        *("photograph", "link to a photograph", "hard link to an input", "checkpoint"),
        *("file of the checkpoint", "link to the weights", "empty", "FIFO", "socket", "device"),
        *("folder", "loop", "link to nowhere", "more arrays", "other arrays", "other dtype"),
        *("other paths", "other numbers", "text"),
    ],
)
def test_no_file_is_replaced_but_an_earlier_output(
    tmp_path, pictures, monkeypatch, command_line, kind
):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(DATA / FIXED, model)
    out = other_file(kind, tmp_path, pictures, model)
    monkeypatch.setattr(embedder, "load_encoder_for_side", lambda *_: pytest.fail("loaded"))
    before = out.lstat()
    content = out.read_bytes() if out.is_file() else None
    code, error = command_line("embed", "--checkpoint", model, pictures, "--out", out)
    assert code == 2 and f"--out is {out}: it " in error, error
    after = out.lstat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert content is None or out.read_bytes() == content


def test_an_earlier_output_is_recognised_by_its_headers(tmp_path, pictures):
    run(tmp_path, pictures / "a.png")
    assert npz.is_embeddings(tmp_path / "out.npz")
    _, embeddings, paths = run(tmp_path, pictures)
    assert len(embeddings) == len(paths) == 8
    # The headers announce 8 GiB that are not there; only the headers are read.
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as archive:
        for name, dtype in (("embeddings.npy", "<f4"), ("paths.npy", "<U9")):
            header = {
                "descr": dtype,
                "fortran_order": False,
                "shape": (2**20, 2048)[: 1 + (name[0] == "e")],
            }
            with archive.open(name, "w") as file:
                np.lib.format.write_array_header_1_0(file, header)
    assert not npz.is_embeddings(tmp_path / "short.npz")
