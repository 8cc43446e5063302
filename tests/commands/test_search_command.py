"""The command `search`: its results, its sheet, and what it refuses."""

import json
import re
import shutil

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from pallas_patch_embed.commands import cli, search, sheet
from pallas_patch_embed.embed import command, sources, written
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.written import Written
from tests.commands.shard_folders import by_id, write_tar
from tests.encoder.test_families import FAMILIES

MODEL = FAMILIES / "clip_whole"
NAMES = [f"{i}.png" for i in range(6)]


def picture(seed):
    """Returns a picture of random pixels, whose embedding differs from those of others."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 48, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a folder with a checkpoint, pictures of all kinds of sources, and two outputs."""
    root = tmp_path_factory.mktemp("searched")
    shutil.copytree(MODEL, root / "model")
    (root / "photos").mkdir()
    for i, name in enumerate(NAMES):
        picture(i).save(root / "photos" / name)
    encoded = [(root / "photos" / name).read_bytes() for name in NAMES]
    write_tar(root / "some.tar", {"a.png": encoded[0], "b.png": encoded[1]})
    table = pyarrow.table({"text": ["c", "d"], "image": encoded[2:4]})
    pyarrow.parquet.write_table(table, root / "some.parquet")
    embed(root, "out", embedding_dtype="float16")
    embed(root, "out.npz")
    return root


def embed(root, out, **options):
    pictures = [root / "photos", root / "some.tar", root / "some.parquet"]
    options = Options(batch=1, workers=1, quiet=True, **options)
    assert command.run(root / "model", pictures, root / out, options=options) == 0


# Embeddings of pictures in this process, because loading and compiling an encoder takes 2 s.
computed = {}


@pytest.fixture
def searched(made, capsys, monkeypatch):
    """Returns a function that runs the command; it returns exit code, output and errors."""
    monkeypatch.chdir(made)
    of_image = search._of_image

    def of_image_once(written, checkpoint, image):
        key = checkpoint, image, written.settings["output"]
        if key not in computed:
            computed[key] = of_image(written, checkpoint, image)
        return computed[key]

    monkeypatch.setattr(search, "_of_image", of_image_once)

    def run(*arguments):
        capsys.readouterr()
        try:
            line = ["pallas-patch-embed", "search", *map(str, arguments)]
            code = cli.main(cli.parse(line))
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def nearest(made, name, vectors):
    """Returns the ids and cosines for a picture, the largest cosines first."""
    unit = {id: x / np.linalg.norm(x) for id, x in vectors.items()}
    (query,) = (unit[id] for id in unit if id.endswith(f"photos/{name}"))
    found = {id: float(query @ unit[id]) for id in unit}
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("out", ["out", "out.npz"])
def test_the_pictures_nearest_to_a_picture_are_printed(made, searched, out):
    vectors = by_id(made / "out")
    assert len(vectors) == 10
    wanted = nearest(made, "1.png", vectors)
    command = ["--checkpoint", "model", out, "--image", "photos/1.png"]
    code, text, errors = searched(*command, "--top", 4)
    assert (code, errors) == (0, "")
    head, *lines = text.splitlines()
    assert head.split() == ["cosine", "id"] and len(lines) == 4
    assert {lines[0].split()[1], lines[1].split()[1]} == {wanted[0][0], wanted[1][0]}
    code, text, _ = searched(*command, "--top", 100, "--json")
    found = json.loads(text)
    assert code == 0 and len(found) == 10
    # The shards have float16, whose rounding changes a cosine by less than 2^-9.
    for each, (_, cosine) in zip(found, wanted):
        assert each["cosine"] == pytest.approx(cosine, abs=2**-9)
        assert each["cosine"] == pytest.approx(dict(wanted)[each["id"]], abs=2**-9)
    sources = {(each["id"], each["source"], each["row"]) for each in found}
    assert ("a", str(made / "some.tar"), "a.png") in sources
    assert (f"{made}/some.parquet#1", str(made / "some.parquet"), "1") in sources
    assert (f"{made}/photos/0.png", str(made / "photos/0.png"), None) in sources


def test_an_output_at_a_url_is_searched(made, searched):
    url = f"memory://{made.name}"
    fsspec.filesystem("memory").put(str(made / "out"), f"{url}/out", recursive=True)
    fsspec.filesystem("memory").put(str(made / "out.npz"), f"{url}/out.npz")
    command = ["--checkpoint", "model", "--image", "photos/1.png", "--json"]
    for out in ("out", "out.npz"):
        assert searched(*command, f"{url}/{out}") == searched(*command, out)


def test_a_text_may_stand_behind_options():
    def parse(*line):
        return cli.parse(["pallas-patch-embed", "search", "out", *line])

    options = ("--checkpoint", "model", "--top", "3")
    for line in ((*options, "a red car"), ("a red car", *options)):
        assert parse(*line).text == "a red car"
    assert parse(*options, "--", "-5").text == "-5"
    assert parse(*options, "--image", "a.png").text is None
    for line in (["a", "b"], ["a", *options, "b"], [*options, "--tpo"], [*options, "a", "--tpo"]):
        with pytest.raises(SystemExit):
            parse(*options, *line)


def test_an_npz_file_at_a_signed_url_is_opened(made, monkeypatch):
    server = "https://example.org/"

    def local(url):
        return (made / url.removeprefix(server).partition("?")[0]).open("rb")

    monkeypatch.setattr(written, "open_source", local)
    (signed,) = Written.open(f"{server}out.npz?X-Amz-Signature=abc").parts
    (part,) = Written.open(str(made / "out.npz")).parts
    assert signed.entries([0, 1]) == part.entries([0, 1])


@pytest.mark.slow("compiles another encoder")
def test_means_can_be_searched_with_a_picture(made, searched):
    embed(made, "means", output="mean")
    wanted = nearest(made, "5.png", by_id(made / "means"))
    code, text, _ = searched("--checkpoint", "model", "means", "--image", "photos/5.png", "--json")
    assert code == 0
    found = [each["cosine"] for each in json.loads(text)]
    np.testing.assert_allclose(found, [cosine for _, cosine in wanted], rtol=0, atol=2**-18)


# The sheet.


def cells(path, n):
    """Cuts the pictures out of a sheet."""
    with Image.open(path) as drawn:
        drawn.load()
    across = (drawn.width - sheet.MARGIN) // (sheet.SIDE + sheet.MARGIN)
    height = sheet.SIDE + 2 * sheet.LINE + sheet.MARGIN
    found = []
    for i in range(n):
        x = i % across * (sheet.SIDE + sheet.MARGIN) + sheet.MARGIN
        y = i // across * height + sheet.MARGIN
        found.append(drawn.crop((x, y, x + sheet.SIDE, y + sheet.SIDE)))
    return found


def is_in(picture, cell):
    """Returns whether a picture that is smaller than a cell is in its middle."""
    left, top = (cell.width - picture.width) // 2, (cell.height - picture.height) // 2
    part = cell.crop((left, top, left + picture.width, top + picture.height))
    return np.array_equal(np.asarray(part), np.asarray(picture))


def test_a_sheet_has_the_pictures_of_all_kinds_of_sources(made, searched, tmp_path):
    path = tmp_path / "sheet.png"
    command = ["--checkpoint", "model", "out", "--image", "photos/1.png", "--json"]
    code, text, errors = searched(*command, "--sheet", path)
    assert (code, errors) == (0, "")
    found = json.loads(text)
    numbers = {"a": 0, "b": 1, f"{made}/some.parquet#0": 2, f"{made}/some.parquet#1": 3}
    for each, cell in zip(found, cells(path, len(found)), strict=True):
        id = each["id"]
        assert is_in(picture(numbers[id] if id in numbers else int(id[-5])), cell)
    assert searched(*command, "--sheet", path)[0] == 0  # It replaces its own sheet.


def test_pictures_that_are_not_found_any_more_are_said(made):
    written = Written.open(str(made / "out"))
    entries = [one for part in written.parts for one in part.entries(range(10))]
    lost = [each._replace(origin=each.origin._replace(source="/lost.tar")) for each in entries[6:7]]
    lost += [entries[0]._replace(origin=entries[0].origin._replace(source="/lost.png"))]
    lost += [entries[6]._replace(origin=entries[6].origin._replace(row="c.png"))]
    found = sheet._thumbnails([*lost, entries[1]], sources.Columns())
    assert found[0].startswith("the tar cannot be read") and "No such file" in found[0]
    assert "No such file" in found[1]
    assert found[2] == "its source does not have it any more"
    assert is_in(picture(1), found[3])


@pytest.mark.parametrize("name, why", [("x.jpg", "ends in .png"), ("a.png", "did not write it")])
def test_a_sheet_replaces_no_other_file(made, searched, tmp_path, name, why):
    path = tmp_path / name
    picture(0).save(path)
    before = path.read_bytes()
    code, text, errors = searched(
        *("--checkpoint", "model", "out", "--image", "photos/1.png", "--sheet", path)
    )
    assert (code, text) == (2, "") and why in errors and str(path) in errors
    assert path.read_bytes() == before


# What is refused.

REFUSED = [
    (["absent"], "absent: it cannot be read .there is no such folder"),
    (["photos/0.png"], "photos/0.png: it cannot be read .it is a file"),
    (["photos"], "photos: it cannot be read .it has no manifest"),
    (["other.npz"], "other.npz: it cannot be read .it does not say which checkpoint"),
    (["damaged"], "damaged: it cannot be read .its manifest has the fields"),
    (["patches"], "--output patches, which has a vector for each patch.* --output pooled"),
    (["empty"], "empty has no embeddings yet"),
    (["out", "--top", "0"], "0 is not a positive integer"),
    (["out", "--image", "model/config.json"], "config.json: it cannot be read .it is not a pict"),
    (["out", "--image", "absent.png"], "--image is absent.png: it cannot be read"),
    (["out", "--checkpoint", "absent"], "absent"),
    (["out", "--checkpoint", FAMILIES / "clip"], "out was written with the checkpoint '.*model'"),
]


@pytest.mark.parametrize("arguments, why", REFUSED, ids=[why[:30] for _, why in REFUSED])
def test_what_does_not_fit_is_refused_in_words(made, searched, arguments, why):
    np.savez(made / "other.npz", embeddings=np.ones((1, 20)), paths=["a"])
    manifest = json.loads((made / "out/_manifest.json").read_text())
    for name, change in {
        "damaged": dict(settings=None),
        "patches": dict(settings={**manifest["settings"], "output": "patches"}),
        "empty": {},
    }.items():
        (made / name).mkdir(exist_ok=True)
        changed = {k: v for k, v in {**manifest, **change}.items() if v is not None}
        (made / name / "_manifest.json").write_text(json.dumps(changed))
    code, text, errors = searched(
        *("--checkpoint", "model", "--image", "photos/1.png"), *map(str, arguments)
    )
    assert (code, text) == (2, "")
    assert re.search(why, errors), errors


def test_an_output_in_which_no_embedding_has_a_direction_is_refused(made, searched, tmp_path):
    with np.load(made / "out.npz") as file:
        np.savez(tmp_path / "zero.npz", **{**file, "embeddings": 0 * file["embeddings"]})
    command = ["--checkpoint", "model", tmp_path / "zero.npz", "--image", "photos/1.png"]
    code, text, errors = searched(*command, "--sheet", tmp_path / "sheet.png")
    assert (code, text) == (2, "")
    assert "10 of 10 embeddings are zero" in errors and "has no other embeddings" in errors


def test_the_same_vision_tower_in_other_files_is_recognized(made, searched, tmp_path):
    config = json.loads((made / "model/config.json").read_text())
    shutil.copytree(made / "model", tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "logit_scale_init": 1}))
    command = ["out", "--image", "photos/1.png"]
    same = searched("--checkpoint", "model", *command)
    assert searched("--checkpoint", tmp_path / "other", *command) == same
    # Another tower, of the same shape.
    config["vision_config"]["layer_norm_eps"] = 0.02
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    assert searched("--checkpoint", tmp_path / "other", *command)[0] == 2


def test_a_folder_of_an_earlier_version_is_searched(made, searched, tmp_path):
    shutil.copytree(made / "out", tmp_path / "old")
    (tmp_path / "old/_manifest.json").rename(tmp_path / "old/manifest.json")
    manifest = json.loads((tmp_path / "old/manifest.json").read_text())
    manifest["format"] = "pallas_patch_embed.embed.1"
    for name in ("keep", "arithmetic", "output"):
        del manifest["settings"][name]
    (tmp_path / "old/manifest.json").write_text(json.dumps(manifest))
    command = ["--checkpoint", "model", "--image", "photos/1.png"]
    assert searched(*command, tmp_path / "old") == searched(*command, "out")
