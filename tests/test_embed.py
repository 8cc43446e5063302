"""Embedding picture files from the command line."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from goldens import DATA, checkpoint
from PIL import Image
from short_suite import keep

import pallas_patch_embed as ppe
from pallas_patch_embed import embed

PHOTOS = resources.files("pallas_patch_embed") / "photos"
FIXED, BIG_VISION, NAFLEX = "hf_siglip_p14_224", "bv_vit_p16_224", "bv_naflex_p16"
COMMAND = [sys.executable, "-m", "pallas_patch_embed", "embed"]


# Two ulps of embeddings up to 4, which a program for another batch size may round differently.
BFLOAT16 = 2.0**-5


@pytest.fixture
def pictures(tmp_path):
    """A folder with pictures of many formats and modes, and files that are none."""
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
    exif[0x0112] = 6  # to be shown rotated by 90 degrees clockwise
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
    unreadable = embed.run(checkpoint(name), arguments, tmp_path / "out.npz", **options)
    with np.load(tmp_path / "out.npz") as file:
        return unreadable, file["embeddings"], list(file["paths"])


def resized(path, H, W, resample=Image.Resampling.BILINEAR):
    return np.asarray(Image.open(path).convert("RGB").resize((W, H), resample))


def test_a_folder_of_all_formats(tmp_path, pictures):
    unreadable, embeddings, paths = run(tmp_path, pictures)
    assert unreadable == 0 and paths == [str(pictures / name) for name in NAMES]
    assert embeddings.dtype == np.float32
    encoder = ppe.siglip2.load_encoder(checkpoint(BIG_VISION), patch_dtype="float32")
    names = NAMES[:6]
    images = np.stack([resized(pictures / name, 224, 224) for name in names])
    wanted = np.asarray(encoder(images).pooler_output, np.float32)
    np.testing.assert_allclose(embeddings[:6], wanted, atol=BFLOAT16)
    # 16 bits are the same picture as 8; a rotated picture with its EXIF tag is upright.
    np.testing.assert_array_equal(embeddings[6], embeddings[5])
    np.testing.assert_array_equal(embeddings[7], embeddings[0])


@pytest.mark.parametrize(
    "name, batch",
    keep(
        itertools.product((BIG_VISION, NAFLEX), (1, 5, 64)),
        lambda case: case[1] == 5,
        "two programs of an encoder each",
    ),
)
def test_the_batch_size_does_not_change_the_embeddings(tmp_path, pictures, name, batch):
    _, embeddings, paths = run(tmp_path, pictures, name=name)
    _, others, same = run(tmp_path, pictures, name=name, batch=batch)
    assert same == paths
    # Grey and coloured pictures, a.png and f.bmp, are farther apart than that.
    assert np.abs(embeddings[0] - embeddings[5]).max() > 2 * BFLOAT16
    np.testing.assert_allclose(others, embeddings, atol=BFLOAT16)


def test_NaFlex_keeps_the_aspect_ratio(tmp_path, pictures):
    _, embeddings, _ = run(tmp_path, pictures / "a.png", name=NAFLEX, size=128)
    encoder = ppe.siglip2.load_encoder(checkpoint(NAFLEX), patch_dtype="float32")
    # 200 x 300 pixels: 6 x 9 of at most 64 patches; 7 x 10 would be too many.
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
    Image.fromarray(np.zeros((4, 4), np.float32)).save(pictures / "float.tiff")
    Image.fromarray(np.full((4, 4), 300000, np.int32)).save(pictures / "wide.tiff")
    unreadable, embeddings, paths = run(tmp_path, pictures, tmp_path / "absent.png")
    assert unreadable == 5 and len(embeddings) == len(NAMES)
    assert sorted(paths) == sorted(str(pictures / name) for name in NAMES)
    error = capsys.readouterr().err
    for name in ("aa.jpg", "truncated.png", "float.tiff", "wide.tiff", "absent.png"):
        assert f"{name}: " in error
    assert "5 could not be read" in error


def test_nothing_readable_gives_an_empty_result(tmp_path):
    (tmp_path / "bad.png").write_text("no picture")
    unreadable, embeddings, paths = run(tmp_path, tmp_path / "bad.png")
    assert unreadable == 1 and embeddings.shape == (0, 128) and paths == []


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
        ({"image_processor_type": "Siglip2ImageProcessor"}, "BILINEAR"),
        ({"resample": 0, "size": 230}, "NEAREST"),
    ],
)
def test_pictures_are_resized_as_the_preprocessor_config_says(tmp_path, given, resample):
    path = with_preprocessor(tmp_path, RELEASED | given)
    config = ppe.siglip2.load_encoder(path).config
    preprocessing = embed.Preprocessing.of(path, config, None)
    side = given.get("size", 224)
    found = preprocessing.image(Path(str(PHOTOS / "coffee.png")))
    wanted = resized(PHOTOS / "coffee.png", side, side, Image.Resampling[resample])
    np.testing.assert_array_equal(found, wanted)


def test_the_preprocessor_config_says_how_many_patches(tmp_path):
    name = "hf_siglip2_naflex_p16"
    path = with_preprocessor(tmp_path, {"max_num_patches": 40, "patch_size": 16}, name)
    config = ppe.siglip2.load_encoder(path).config
    image = embed.Preprocessing.of(path, config, None).image(Path(str(PHOTOS / "coffee.png")))
    assert image.shape == (5 * 16, 8 * 16, 3)  # of 400 x 600 pixels; 6 x 8 were too many


@pytest.mark.parametrize(
    "config, text",
    [
        ("{", "damaged"),
        ("[]", "no object"),
        (RELEASED | {"image_mean": [0.48, 0.45, 0.4]}, "image_mean"),
        (RELEASED | {"image_std": ["a"]}, "image_std"),
        (RELEASED | {"image_std": []}, "image_std"),
        (RELEASED | {"max_num_patches": True}, "max_num_patches"),
        (RELEASED | {"size": True}, "height or width"),
        (RELEASED | {"do_resize": False}, "do_resize"),
        (RELEASED | {"rescale_factor": 1}, "rescale_factor"),
        (RELEASED | {"size": {"shortest_edge": 224}}, "height or width"),
        (RELEASED | {"size": "224"}, "height or width"),
        (RELEASED | {"size": 256}, "--size"),
        (RELEASED | {"resample": 17}, "resample"),
        (RELEASED | {"resample": "bicubic"}, "resample"),
    ],
)
def test_a_preprocessor_config_that_asks_for_something_else_is_refused(tmp_path, config, text):
    path = with_preprocessor(tmp_path, config)
    encoder = ppe.siglip2.load_encoder(path)
    with pytest.raises(ValueError, match=text):
        embed.Preprocessing.of(path, encoder.config, None)


def test_the_command_writes_what_it_says_and_says_how_it_went(tmp_path, pictures):
    out = tmp_path / "out.npz"
    arguments = ["--checkpoint", checkpoint(FIXED), pictures, "--out", out]
    result = subprocess.run([*COMMAND, *arguments, "--batch", "4"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "pictures/s" in result.stderr and f"8 of 8 pictures into {out}" in result.stdout
    with np.load(out) as file:
        assert file["embeddings"].shape == (8, 96) and len(file["paths"]) == 8
    (pictures / "bad.png").write_text("no picture")
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert result.returncode == 3 and "8 of 9" in result.stdout and "bad.png" in result.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--checkpoint", "absent", ".", "--out", "out.npz"], "there is no 'absent'"),
        (["--checkpoint", str(DATA / FIXED), "empty", "--out", "out.npz"], "no pictures in empty"),
        (["--checkpoint", "absent", ".", "--out", "no/folder/out.npz"], "no such folder"),
        (["--checkpoint", "absent", ".", "--out", "empty"], "is no file"),
        (
            ["--checkpoint", str(DATA / FIXED), ".", "--out", "o.npz", "--size", "9"],
            "a patch of 14",
        ),
        (["--checkpoint", "absent", ".", "--out", "out.npz", "--batch", "0"], "not positive"),
        (
            ["--checkpoint", "absent", ".", "--out", "o.npz", "--patch-dtype", "int4"],
            "invalid choice",
        ),
        (["--checkpoint", "absent", "--out", "out.npz"], "required"),
    ],
    ids=["checkpoint", "empty", "folder", "out", "size", "batch", "dtype", "pictures"],
)
def test_a_command_that_cannot_work_is_refused(
    tmp_path, monkeypatch, command_line, arguments, text
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes((PHOTOS / "coffee.png").read_bytes())
    monkeypatch.chdir(tmp_path)
    code, error = command_line("embed", *arguments)
    assert code == 2 and text in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "empty"]


def test_an_interrupt_leaves_no_file(tmp_path, pictures):
    out = tmp_path / "out" / "out.npz"
    out.parent.mkdir()
    arguments = ["--checkpoint", checkpoint(FIXED), *[pictures] * 500, "--out", out, "--batch", "2"]
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        seen = ""
        while not any(f" {n}/4000" in seen for n in range(2, 40, 2)):
            character = process.stderr.read(1)
            assert character, seen
            seen += character
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130 and "nothing was written" in error
    assert "Traceback" not in error and " 4000/4000" not in error
    assert list(out.parent.iterdir()) == []


def test_an_interrupt_that_Python_dropped_is_noticed(tmp_path, pictures):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, pictures, interrupted=lambda: True)
    assert {path.name for path in tmp_path.iterdir()} == {"pictures"}


def test_a_link_is_written_through(tmp_path, pictures):
    (tmp_path / "folder").mkdir()
    (tmp_path / "out.npz").symlink_to(tmp_path / "folder" / "real.npz")
    run(tmp_path, pictures / "a.png")
    assert (tmp_path / "out.npz").is_symlink() and (tmp_path / "folder" / "real.npz").is_file()


def test_a_failed_write_leaves_the_old_file(tmp_path, pictures, monkeypatch):
    (tmp_path / "out.npz").write_text("old")

    def savez(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(embed.np, "savez", savez)
    with pytest.raises(OSError, match="disk full"):
        run(tmp_path, pictures / "a.png")
    assert (tmp_path / "out.npz").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz", "pictures"}
