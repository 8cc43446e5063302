"""`embed`, `search` and `Embedder` with encoders of pictures and of texts in 8 bits."""

import functools
import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

import pallas_patch_embed as ppe
from pallas_patch_embed.commands import cli
from pallas_patch_embed.embed import Decoder, Embedder, command, provenance
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.provenance import file_sha256, scales_sha256
from pallas_patch_embed.encoders.calibration import FILE, FILES
from tests.commands.shard_folders import by_id
from tests.encoder.test_families import FAMILIES
from tests.encoder.text_goldens import unpacked

MODEL = FAMILIES / "clip_whole"


@functools.cache
def exact():
    return ppe.load_encoder(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a folder with a checkpoint, pictures and two calibrations."""
    root = tmp_path_factory.mktemp("eight_bits")
    shutil.copytree(MODEL, root / "model")
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(root / "photos" / f"{i}.png")
    (root / "texts.txt").write_text("a cat\n")
    decoder = Decoder.of(MODEL)
    images = [
        decoder.decode(functools.partial(open, path, "rb"))
        for path in sorted((root / "photos").iterdir())
    ]
    ppe.calibrate(exact(), np.stack(images)).save(root / "first.safetensors")
    ppe.calibrate(exact(), 255 - np.stack(images)).save(root / "second.safetensors")
    return root


def embed(root, out, *, model="model", inputs=("photos",), **options):
    options = Options(batch=2, workers=1, quiet=True, **options)
    return command.run(root / model, [root / path for path in inputs], out, options=options)


def settings_of(out):
    return json.loads((out / "_manifest.json").read_text())["settings"]


def of_embedder(root, **options):
    """Maps ids to the embeddings that the public classes compute."""
    embedder = Embedder(root / "model", batch=2, **options)
    paths = sorted(map(str, (root / "photos").iterdir()))
    contents = [open(path, "rb").read() for path in paths]
    found = embedder(Decoder(embedder.preprocessing)({"id": paths, "content": contents}))
    return dict(zip(found["id"], found["embedding"])), embedder.encoder


def test_the_manifest_records_dtype_calibration_and_scales(root, tmp_path):
    given = dict(dtype="int8", calibration=str(root / "first.safetensors"))
    assert embed(root, tmp_path / "out", **given) == 0
    wanted, encoder = of_embedder(root, **given)
    found = by_id(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for id, embedding in wanted.items():
        np.testing.assert_array_equal(found[id], embedding)
    in_bfloat16, _ = of_embedder(root)
    assert any((found[id] != in_bfloat16[id]).any() for id in found)
    settings = settings_of(tmp_path / "out")
    assert settings["dtype"] == "int8" and settings["min_cosine"] is None
    assert settings["calibration_sha256"] == file_sha256(root / "first.safetensors")
    assert settings["scales_sha256"] == scales_sha256(encoder)
    shard = tmp_path / "out" / "embeddings" / "000000.parquet"
    about = json.loads(pyarrow.parquet.read_schema(shard).metadata[b"pallas_patch_embed"])
    assert about["settings"] == settings
    assert about["options"]["calibration"] == str(root / "first.safetensors")
    # The calibration is also found in the checkpoint's folder, and is the same.
    shutil.copytree(root / "model", tmp_path / "model")
    shutil.copy(root / "first.safetensors", tmp_path / "model" / FILE)
    assert embed(root, tmp_path / "out", model=tmp_path / "model", dtype="int8") == 0
    assert len(list((tmp_path / "out" / "embeddings").iterdir())) == 1


def test_an_integer_is_recorded_as_the_number_that_it_is(root, tmp_path):
    given = dict(dtype="int8", calibration=str(root / "first.safetensors"), min_cosine=0)
    assert [embed(root, tmp_path / "out", **given) for _ in range(2)] == [0, 0]
    assert isinstance(settings_of(tmp_path / "out")["min_cosine"], float)


def test_float32_is_also_the_dtype_of_the_patches(root, tmp_path):
    assert embed(root, tmp_path / "out", dtype="float32") == 0
    assert settings_of(tmp_path / "out")["patch_dtype"] == "float32"
    wanted, encoder = of_embedder(root, dtype="float32", patch_dtype="float32")
    assert encoder.patch_embed.dtype == "float32"
    for id, embedding in by_id(tmp_path / "out").items():
        np.testing.assert_array_equal(embedding, wanted[id])


@pytest.mark.parametrize(
    "first, then, text",
    [
        ({}, dict(dtype="int8", calibration="first"), "dtype was 'bfloat16' and is now 'int8'"),
        (
            dict(dtype="int8", calibration="first"),
            {},
            "dtype was 'int8' and is now 'bfloat16'; calibration_sha256 was",
        ),
        (
            dict(dtype="int8", calibration="first"),
            dict(dtype="int8", calibration="second"),
            r"\(calibration_sha256 was '\w{64}' and is now '\w{64}'; scales_sha256 was",
        ),
        (
            dict(dtype="int8", calibration="first"),
            dict(dtype="int8", calibration="first", min_cosine=0.5),
            r"\(min_cosine was None and is now 0.5",
        ),
    ],
    ids=["to int8", "from int8", "another calibration", "another min_cosine"],
)
def test_precisions_and_calibrations_are_not_mixed(root, tmp_path, first, then, text):
    def with_path(options):
        named = options.get("calibration")
        return options | ({"calibration": str(root / f"{named}.safetensors")} if named else {})

    out = tmp_path / "out"
    assert embed(root, out, **with_path(first)) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=text):
        embed(root, out, **with_path(then))
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_scales_of_another_arithmetic_are_not_mixed(root, tmp_path, monkeypatch):
    given = dict(dtype="int8", calibration=str(root / "first.safetensors"))
    assert embed(root, tmp_path / "out", **given) == 0
    monkeypatch.setattr(provenance, "ARITHMETIC_IN_8_BITS", 2)
    with pytest.raises(ValueError, match=r"\(scales_sha256 was '\w{64}' and is now"):
        embed(root, tmp_path / "out", **given)


def test_the_hash_is_of_scales_and_of_the_layers_in_8_bits(root):
    load = functools.partial(ppe.load_encoder, MODEL, dtype="int8")
    hashes = {
        scales_sha256(load(calibration=root / f"{name}.safetensors", min_cosine=cosine))
        for name, cosine in (("first", None), ("first", 0), ("first", 0.5), ("second", None))
    }
    assert len(hashes) == 2  # All layers are in 8 bits in each of them.
    said = ppe.Calibration.load(root / "first.safetensors")
    half = 1 - said.bfloat16 - said.losses.sum() / 2
    assert scales_sha256(load(calibration=said, min_cosine=half)) not in hashes
    assert scales_sha256(exact()) is None


def test_a_calibration_beside_the_checkpoint_changes_no_other_output(root, tmp_path):
    shutil.copytree(root / "model", tmp_path / "model")
    assert embed(root, tmp_path / "out", model=tmp_path / "model") == 0
    shutil.copy(root / "first.safetensors", tmp_path / "model" / FILE)
    assert embed(root, tmp_path / "out", model=tmp_path / "model") == 0


@pytest.mark.parametrize(
    "options, inputs, text",
    [
        (dict(dtype="int8"), ["photos"], "--dtype is int8, but there is no file .*accuracy"),
        (dict(dtype="int8", calibration="nowhere"), ["photos"], "--calibration is nowhere, but"),
        (dict(calibration="nowhere"), ["photos"], "calibration and min_cosine are for"),
        (dict(min_cosine=0.9), ["photos"], "calibration and min_cosine are for"),
        (dict(dtype="float8_e4m3fn", calibration="first"), ["photos"], "is for int8, not float8"),
        (
            dict(dtype="int8"),
            ["texts.txt"],
            r"text_calibration.safetensors'?\. .*load_text_encoder",
        ),
        (dict(min_cosine=0.9), ["texts.txt"], "calibration and min_cosine are for"),
    ],
)
def test_what_has_no_path_in_8_bits_is_refused(root, tmp_path, options, inputs, text):
    if options.get("calibration") == "first":
        options = options | {"calibration": str(root / "first.safetensors")}
    with pytest.raises((OSError, ValueError), match=text):
        embed(root, tmp_path / "out", inputs=inputs, **options)
    assert not (tmp_path / "out").exists()


def best_of(search, capsys):
    """Runs a search with --json; returns the first result."""
    capsys.readouterr()
    assert cli.main(search) == 0
    return json.loads(capsys.readouterr().out)[0]


def test_a_picture_is_searched_with_the_same_scales(root, tmp_path, capsys):
    calibration = tmp_path / "calibration.safetensors"
    shutil.copy(root / "first.safetensors", calibration)
    out = tmp_path / "out"
    assert embed(root, out, dtype="int8", calibration=str(calibration)) == 0
    given = ["--checkpoint", str(root / "model"), str(out), "--image", f"{root}/photos/1.png"]
    search = cli.parse(["pallas-patch-embed", "search", *given, "--json"])
    best = best_of(search, capsys)
    assert best["id"].endswith("1.png") and best["cosine"] > 1 - 1e-5
    calibration.unlink()
    assert cli.main(search) == 2
    assert "its calibration is missing or has changed" in capsys.readouterr().err


# Texts.

TEXTS = ["a red car", "a cat", "An astronaut in space!", "two dogs"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Returns a folder with a checkpoint of both towers, texts, and a calibration of each tower."""
    root = tmp_path_factory.mktemp("texts")
    model = unpacked("clip", root).rename(root / "model")
    (root / "texts.txt").write_text("\n".join(TEXTS))
    exact = ppe.load_text_encoder(model, dtype="float32")
    ppe.calibrate(exact, ppe.load_tokenizer(model)(TEXTS)).save(root / "texts.safetensors")
    return root


def embedded_texts(root, **options):
    """Returns the embeddings that the public functions compute, in batches of the same size."""
    encoder = ppe.load_text_encoder(root / "model", **options)
    ids = ppe.load_tokenizer(root / "model")(TEXTS)
    found = [encoder(ids[i : i + 2]).text_embeds for i in range(0, len(ids), 2)]
    return np.concatenate([np.asarray(x, np.float32) for x in found])


def test_texts_are_embedded_in_8_bits_and_searched_in_the_precision_of_the_output(
    texts, tmp_path, capsys
):
    calibration = tmp_path / "texts.safetensors"
    shutil.copy(texts / "texts.safetensors", calibration)
    given = dict(dtype="int8", calibration=str(calibration))
    out = tmp_path / "out"
    assert embed(texts, out, inputs=["texts.txt"], **given) == 0
    found, wanted = by_id(out), embedded_texts(texts, **given)
    for i, vector in enumerate(wanted):
        np.testing.assert_array_equal(found[f"{texts}/texts.txt#{i}"], vector)
    in_bfloat16 = embedded_texts(texts)
    assert (wanted != in_bfloat16).any()
    settings = settings_of(out)
    assert (settings["tower"], settings["dtype"]) == ("text", "int8")
    assert settings["calibration_sha256"] == file_sha256(calibration)
    encoder = ppe.load_text_encoder(texts / "model", **given)
    assert settings["scales_sha256"] == scales_sha256(encoder)
    # A text that is in the output is found with a cosine of 1.
    search = cli.parse(["x", "search", "--checkpoint", f"{texts}/model", str(out), "a cat"])
    search.json = True
    best = best_of(search, capsys)
    assert best["id"].endswith("texts.txt#1") and best["cosine"] > 1 - 1e-5
    calibration.unlink()
    assert cli.main(search) == 2
    assert "Restore this file, or search with a picture." in capsys.readouterr().err


@pytest.mark.slow("compiles the encoders again")
def test_texts_in_8_bits_are_resumed_and_precisions_are_not_mixed(texts, tmp_path):
    model = shutil.copytree(texts / "model", tmp_path / "model")
    assert embed(texts, tmp_path / "plain", model=model, inputs=["texts.txt"]) == 0
    out, inputs = tmp_path / "out", ["texts.txt"]
    given = dict(dtype="int8", calibration=str(texts / "texts.safetensors"))
    assert embed(texts, out, model=model, inputs=inputs, **given) == 0
    with pytest.raises(ValueError, match="dtype was 'int8' and is now 'bfloat16'"):
        embed(texts, out, model=model, inputs=inputs)
    # The calibration is also found beside the checkpoint, and changes no other output.
    shutil.copy(texts / "texts.safetensors", model / FILES["text"])
    assert embed(texts, out, model=model, inputs=inputs, dtype="int8") == 0
    assert embed(texts, tmp_path / "plain", model=model, inputs=inputs) == 0
    assert len(by_id(out)) == len(by_id(tmp_path / "plain")) == len(TEXTS)


@pytest.mark.slow("compiles the encoders again")
def test_a_query_of_the_other_tower_is_in_bfloat16(texts, tmp_path, capsys):
    """Neither needs the calibration of the other tower."""
    (texts / "photos").mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(texts / "photos" / f"{i}.png")
    vision = ppe.calibrate(ppe.load_encoder(texts / "model", dtype="float32"), pixels)
    vision.save(tmp_path / "vision.safetensors")
    given = dict(dtype="int8", calibration=str(tmp_path / "vision.safetensors"))
    assert embed(texts, tmp_path / "pictures", **given) == 0
    given["calibration"] = str(texts / "texts.safetensors")
    assert embed(texts, tmp_path / "texts", inputs=["texts.txt"], **given) == 0
    (picture,) = ppe.load_encoder(texts / "model")(pixels[:1]).image_embeds
    for out, query, vector in (
        ("pictures", ["a red car"], embedded_texts(texts)[0]),
        ("texts", ["--image", f"{texts}/photos/0.png"], np.asarray(picture, np.float32)),
    ):
        line = ["x", "search", "--checkpoint", f"{texts}/model", str(tmp_path / out), *query]
        capsys.readouterr()
        assert cli.main(cli.parse([*line, "--json"])) == 0
        stored = by_id(tmp_path / out)
        for each in json.loads(capsys.readouterr().out):
            other = stored[each["id"]]
            cosine = other @ vector / np.linalg.norm(other) / np.linalg.norm(vector)
            # 20 products and sums in float32, three times.
            assert each["cosine"] == pytest.approx(float(cosine), abs=2**-18)
