"""The demo, `info`, and command lines that are refused."""

import subprocess
import sys

import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.commands import demo


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pallas_patch_embed", *arguments], capture_output=True, text=True
    )


@pytest.mark.slow("runs everything that `make demo` runs")
def test_the_demo_prints_a_table_and_writes_a_picture(tmp_path):
    from PIL import Image

    result = command("demo", "--out", str(tmp_path / "demo.png"), "--seed", "3")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    errors = {row[0]: float(row[3].rstrip("%")) for row in rows if len(row) == 8}
    assert list(errors) == ["float32", "bfloat16", "float8_e4m3fn", "int8"]
    # Rounding the result to bfloat16 contributes at most 2^-9 = 0.2%.
    for dtype, largest in dict(float32=0.2, bfloat16=0.5, int8=1.0, float8_e4m3fn=4.0).items():
        assert 0.1 < errors[dtype] < largest
    with Image.open(tmp_path / "demo.png") as picture:
        assert min(picture.size) > 500
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 500


def test_the_demo_notices_wrong_embeddings(monkeypatch):
    monkeypatch.setattr(demo, "embed_images", lambda x, params: ppe.embed_images(x[::-1], params))
    names, images = demo.photographs()
    assert names == ["astronaut", "chelsea", "coffee"]
    weights = demo.draw_weights(np.random.default_rng(0))
    monkeypatch.setattr(demo, "_milliseconds", lambda *_: 0.0)
    wanted = demo.reference(images, weights, 16)
    results = demo.measure(images, weights, wanted, 16)
    assert len(results) == 4 and all(result.relative_error > 0.5 for result in results)


def test_the_demos_neighbours_are_similar_patches():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 32, 32, 3), np.uint8)
    # The last patches of both images are equal.
    images[1, 16:, 16:] = images[0, 16:, 16:]
    embeddings = demo.cut(images, 16).reshape(8, -1).astype(np.float32) / 255 * 2 - 1
    found, cosines = demo.nearest(embeddings, np.array([3, 7, 0]), 2)
    assert found[0, 0] == 7 and found[1, 0] == 3 and 0 not in found[2]
    np.testing.assert_allclose(cosines[:2, 0], 1, rtol=1e-6)
    assert (cosines[:, 0] >= cosines[:, 1]).all()


def test_the_demos_map_has_the_error_of_each_patch():
    wanted = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    found = wanted + np.array([[0.0, 0.5], [0.0, 0.0], [0.2, 0.0]])
    np.testing.assert_allclose(demo.patch_errors(found, wanted), [0.1, 0.0, 0.2])


def test_the_demo_marks_patches_with_contrast_in_both_halves():
    images = np.zeros((1, 64, 64, 3), np.uint8)
    # Columns 0 and 3 of the grid have patches with more and more contrast from top to bottom.
    for row in range(4):
        images[0, 16 * row : 16 * row + 16, [0, 63]] = 50 * (row + 1)
    assert demo.patches_with_contrast(images, 16) == [(0, 2, 0), (0, 2, 3)]


def test_info_prints_the_backends_and_shapes():
    result = command("info")
    assert result.returncode == 0, result.stderr
    for text in ("jax ", "device 0", "B/16 224", "Gemma 3/14 896", "xla"):
        assert text in result.stdout


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "required"),
        (["train"], "invalid choice"),
        (["demo", "--seed", "-3"], "expected 0 or more"),
        (["demo", "--out", "no/such/folder/demo.png"], "no such folder"),
    ],
    ids=["none", "unknown", "seed", "folder"],
)
def test_a_bad_command_line_is_refused(command_line, arguments, text):
    code, error = command_line(*arguments)
    assert code == 2
    assert text in error
