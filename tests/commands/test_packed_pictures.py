"""`embed` packs the patches of NaFlex pictures: what a step holds, bits, order, and resuming."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from PIL import Image

from pallas_patch_embed.embed import Decoder, Embedder, command, decoders, embedder
from pallas_patch_embed.embed.options import Options
from tests.commands.shard_folders import assert_same, by_id, shards
from tests.encoder.goldens import checkpoint

MODEL = checkpoint("hf_siglip2_naflex_p16")
SIDE, MOST, BATCH = 128, 64, 16  # Pixels of a side of the largest square, and its patches.
TOKENS, PLACES = 1024, 17
GRIDS = [(8, 8), (1, 9), (5, 3), (2, 2), (7, 9), (3, 20), (1, 1), (64, 1), (4, 4), (2, 11)]


def draw(grids, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (16 * h, 16 * w, 3), np.uint8) for h, w in grids]


@pytest.fixture(scope="module")
def embed():
    return Embedder(MODEL, size=SIDE, patch_dtype="int8", batch=BATCH)


def test_a_pictures_bits_are_the_same_alone_and_among_any_neighbours(embed):
    pictures = draw(GRIDS * 2)
    alone = np.concatenate([embed.start([picture])() for picture in pictures])
    assert len(np.unique(alone, axis=0)) == len(pictures)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(pictures))[: rng.integers(1, len(pictures) + 1)]
        chosen = [pictures[i] for i in order]
        number = embed.fitting(chosen)
        assert number == min(len(chosen), PLACES)
        np.testing.assert_array_equal(embed.start(chosen[:number])(), alone[order[:number]])
    together = embed({"id": list(range(20)), "image": pictures})["embedding"]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    "grids, fitting",
    [
        ([(8, 8)] * 20, BATCH),
        ([(4, 14)] * 20, PLACES),  # 18 of them have 1008 tokens.
        ([(1, 1)] * 40, PLACES),
        ([(3, 20), (8, 8)] * 9, BATCH),  # Starts at multiples of 8: 60 patches take 64 tokens.
        ([(8, 8)] * 3, 3),
        ([], 0),
    ],
)
def test_a_step_has_room_for_a_fixed_number_of_tokens_and_of_pictures(embed, grids, fitting):
    assert embed.row == (TOKENS, PLACES) and embed.rows == BATCH
    assert embed.fitting(draw(grids)) == fitting


def test_what_does_not_fit_is_refused(embed):
    large = draw([(1, 1), (5, 13)])
    assert embed.fitting(large) == 2
    with pytest.raises(ValueError, match=r"image 1 .* has 65 patches, expected at most"):
        embed.start(large)
    with pytest.raises(ValueError, match=r"start: 17 images, expected at most 16"):
        embed.start(draw([(8, 8)] * 17))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("output", ["pooled", "patches"])
def test_each_device_has_a_row_of_its_own(monkeypatch, output):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    options = dict(size=SIDE, output=output, batch=2)
    wanted = Embedder(MODEL, **options)
    monkeypatch.setattr(embedder, "batch_on_devices", lambda batch: (mesh, batch))
    found = Embedder(MODEL, **options)
    pictures = draw([(8, 8), (7, 9), (2, 2), (1, 64)])
    assert found.fitting(pictures * 2) == 4 == found.rows
    for n in (1, 3, 4):  # With one picture the second device has none.
        embeddings = found.start(pictures[:n])()
        assert len(embeddings) == n
        for embedding, picture in zip(embeddings, pictures):
            np.testing.assert_array_equal(embedding, wanted.start([picture])()[0])


@pytest.fixture
def photographs(tmp_path):
    """Panoramas, of which 17 fit into a step, and one that cannot be read."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(80):
        pixels = rng.integers(0, 256, (10, 35, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    (folder / "20.png").write_text("no picture")
    return sorted(folder.iterdir())


def run(pictures, out, **options):
    options = dict(size=SIDE, batch=BATCH, workers=2) | options
    return command.run(MODEL, pictures, out, (), Options(**options))


def test_steps_are_filled_and_embeddings_are_in_the_order_of_the_pictures(
    tmp_path, photographs, monkeypatch
):
    steps, start = [], Embedder.start

    def counted(self, images, whole=()):
        steps.append(len(images))
        return start(self, images, whole)

    monkeypatch.setattr(Embedder, "start", counted)
    # Decoder processes use the memory of images again.
    monkeypatch.setattr(decoders, "DECODED_HERE", 0)
    assert run(photographs, tmp_path / "out") == 1
    assert steps == [*[PLACES] * 4, 79 - 4 * PLACES]
    found = by_id(tmp_path / "out")
    good = [path for path in photographs if path.name != "20.png"]
    assert list(found) == list(map(str, good))
    assert shards(tmp_path / "out", "__errors")["id"] == [str(photographs[20])]
    embed = Embedder(MODEL, size=SIDE, batch=BATCH)
    decode = Decoder.of(MODEL, SIDE)
    for path in good:
        (alone,) = embed.start([decode.decode(lambda path=path: path.open("rb"))])()
        np.testing.assert_array_equal(found[str(path)], alone)


def test_a_resumed_run_has_the_same_bits(tmp_path, photographs):
    assert run(photographs, tmp_path / "whole") == 1
    for pictures in (photographs[7:9], photographs[1::3], photographs):
        run(pictures, tmp_path / "resumed", batch=None if pictures is photographs else BATCH)
    assert_same(by_id(tmp_path / "resumed"), by_id(tmp_path / "whole"))


def test_a_folder_of_padded_pictures_is_not_continued(tmp_path, photographs, capsys):
    few, out = photographs[:2], tmp_path / "out"
    assert run(few, out) == 0
    path = out / "_manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["settings"].pop("packed") is True
    assert manifest.pop("packed_row") == {"tokens": TOKENS, "places": PLACES}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="packs NaFlex pictures, and does not mix"):
        run(few, out)
    assert json.loads(path.read_text()) == manifest
    assert run(few, out, overwrite=True) == 0
    # Another row may round differently, as another batch does.
    manifest = json.loads(path.read_text())
    manifest["packed_row"]["places"] = 99
    path.write_text(json.dumps(manifest))
    capsys.readouterr()
    assert run(few, out) == 0
    said = capsys.readouterr().err
    assert "may be rounded differently, because packed_row was" in said and "'places': 99" in said
