"""The command `accuracy`."""

import numpy as np
import pytest
from PIL import Image

from pallas_patch_embed.commands import accuracy
from pallas_patch_embed.commands.accuracy import Accuracy
from pallas_patch_embed.encoders.calibration import Calibration
from tests.encoder.goldens import DATA
from tests.encoder.test_eight_bits import calibrated

CHECKPOINT = DATA / "families" / "clip"


def test_neighbours_and_cosines_are_those_of_the_vectors():
    exact = np.array([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]])
    found = np.array([[1.0, 0], [1, 0.1], [0, 1], [1, 0]])
    assert accuracy.nearest(exact).tolist() == [1, 0, 3, 2]
    assert accuracy.nearest(found).tolist() == [3, 0, 1, 0]
    result = Accuracy.of("int8", found, exact)
    assert result.same == 0.25
    np.testing.assert_allclose(result.cosines, [1, 1, 1, 0.1 / np.sqrt(1.01)], atol=1e-12)
    least = f"{0.1 / np.sqrt(1.01):.5f}"
    assert result.cells()[0::3] == ("int8", least) and result.cells()[4] == "25.0%"


@pytest.mark.slow("calibrates an encoder")
def test_the_command_prints_a_table_and_writes_a_picture(tmp_path, command_line, capsys):
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(8):
        pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
        # Between two dollars matplotlib would read mathematics.
        Image.fromarray(pixels).save(folder / f"{i} $5_{{ or $6.png")
    whole = (folder / "0 $5_{ or $6.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "damaged.png").write_bytes(b"no picture")
    out = tmp_path / "found.png"
    saved = tmp_path / "saved.safetensors"
    calibrated("clip").save(tmp_path / "calibration.safetensors")
    given = ["--calibration", tmp_path / "calibration.safetensors"]
    for arguments, pictures in (
        (["--save-calibration", saved], 4),
        (given, 8),
        ([*given, "--allow-truncated"], 9),
    ):
        command = ("accuracy", "--checkpoint", CHECKPOINT, "--out", out, *arguments, folder)
        said = command_line_output(command, capsys)
        assert f"{pictures} pictures, compared with float32" in said.out
        assert "blocks in int8." in said.out
        assert "damaged.png: " in said.err
        assert ("truncated.png: " in said.err) == (pictures < 9)
        rows = [line.split() for line in said.out.splitlines()]
        cosines = {row[0]: list(map(float, row[1:4])) for row in rows if len(row) == 5}
        assert list(cosines) == ["bfloat16", "int8"]
        for mean, first, least in cosines.values():
            assert 0.998 < least <= first <= mean <= 1
        with Image.open(out) as picture:
            assert min(picture.size) > 500
    assert repr(Calibration.load(saved)) == (
        "Calibration(4 pictures, every second picture given to `accuracy`)"
    )
    for arguments, text in (
        (
            ["--save-calibration", folder / "0 $5_{ or $6.png"],
            "exists, but this command did not write it",
        ),
        (["--save-calibration", saved, *given], "nothing is calibrated. Leave one of them out"),
    ):
        code, why = command_line(
            *("accuracy", "--checkpoint", CHECKPOINT, "--out", out, *arguments, folder)
        )
        assert code == 2 and text in why
    one = [folder / "0 $5_{ or $6.png"]
    unsaved = tmp_path / "unsaved.safetensors"
    for arguments, compared in ((given, 1), (["--save-calibration", unsaved], 0)):
        few = ("accuracy", "--checkpoint", CHECKPOINT, "--out", out, *arguments, *one)
        code, why = command_line(*few)
        text = f"{compared} of the pictures can be compared, expected at least 3"
        assert code == 2 and text in why and not unsaved.exists()


def command_line_output(arguments, capsys):
    """Runs a command that succeeds; returns what it printed."""
    from pallas_patch_embed.commands import cli

    assert cli.main(cli.parse(["pallas-patch-embed", *map(str, arguments)])) == 0
    return capsys.readouterr()
