"""`embed --output`: pooled vectors, means, class tokens, and the patches of hidden states."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import pallas_patch_embed as ppe
from pallas_patch_embed.embed import Decoder, Embedder, command, embedder, folder, npz
from pallas_patch_embed.embed.options import Options
from tests.commands.shard_folders import encoded, shards
from tests.encoder.goldens import checkpoint, images
from tests.encoder.test_families import FAMILIES, expected
from tests.short_suite import keep

NAFLEX = "hf_siglip2_naflex_p16"
OUTPUTS = ("pooled", "mean", "class", "patches", "layer:-2", "layer:0", "layer:1", "layer:-1")
# A CLIP with a projection and without, registers, rotary positions, two class tokens, a norm of the
# mean alone, no class token, and no pooling.
NAMES = ("clip_whole", "timm_clip", "dinov2_with_registers", "dinov3", "deit", "timm_gap")
NAMES += ("open_clip_siglip", "siglip_headless")
LACKING = {("open_clip_siglip", "class"), ("siglip_headless", "class")}
LACKING |= {("siglip_headless", "pooled")}
CASES = [(name, output) for name in NAMES for output in OUTPUTS if (name, output) not in LACKING]
SHORT = ("clip_whole", "dinov2_with_registers")
SMALL = FAMILIES / "siglip_headless"  # Images of 32 x 32 pixels, 4 x 4 patches, and D = 32.


def number_of(output):
    return int(output.removeprefix("layer:")) if output.startswith("layer:") else None


def mean(tokens):
    """Computes the mean of bfloat16 tokens [S, D] in float64, rounded to bfloat16."""
    return np.asarray(jnp.asarray(np.asarray(tokens, np.float64).mean(0), "bfloat16"), np.float32)


def assert_equal(found, wanted, output):
    """Means may be rounded to the neighbour in bfloat16, because the encoder sums in float32."""
    assert found.dtype == np.float32 and found.shape == wanted.shape
    ulp = 2.0**-7 if output == "mean" else 0
    np.testing.assert_allclose(found, wanted, rtol=ulp, atol=ulp * 2.0**-10)


@pytest.mark.parametrize(
    "name, output",
    keep(
        CASES,
        lambda case: case[0] in SHORT,
        "compiles two programs for each",
        lambda case: case[1] in ("pooled", "layer:-2"),
    ),
)
def test_an_embedding_is_a_part_of_what_the_whole_encoder_computes(name, output):
    found = Embedder(FAMILIES / name, patch_dtype="float32", output=output, batch=2)
    x = expected(name)["images"]
    whole = ppe.load_encoder(FAMILIES / name, patch_dtype="float32")
    config, layer = whole.config, number_of(output)
    result = whole(x, layers=() if layer is None else layer)
    tokens = np.asarray((*result.hidden_states, result.last_hidden_state)[0], np.float32)
    patches = tokens[:, config.prefix :].reshape(2, *config.grid, config.width)
    if output == "pooled":
        pooled = result.pooler_output if result.image_embeds is None else result.image_embeds
        wanted = np.asarray(pooled, np.float32)
    elif output == "mean":
        wanted = np.stack([mean(tokens[i, config.prefix :]) for i in range(2)])
    else:
        wanted = tokens[:, 0] if output == "class" else patches
    assert_equal(found.start(x)(), wanted, output)
    assert found.shape == wanted.shape[1:] and found.width == wanted.shape[-1]
    assert found.most_bytes == wanted[0].nbytes
    blocks = config.depth if layer is None else max(layer % (config.depth + 1), 1)
    assert found.encoder.config.depth == len(found.encoder.blocks["fc1"]["bias"]) == blocks


@pytest.mark.parametrize("output", ["pooled", "mean", "patches", "layer:-2"])
def test_padding_of_a_NaFlex_picture_is_no_part_of_its_embedding(output):
    found = Embedder(checkpoint(NAFLEX), patch_dtype="float32", output=output, batch=4)
    x = images(NAFLEX)
    whole = ppe.load_encoder(checkpoint(NAFLEX), patch_dtype="float32")
    padded = [*x, *x[:1] * (4 - len(x))]
    patches, grids, mask = ppe.siglip2.batch_naflex(padded, whole.config, 256)
    layer = number_of(output)
    result = whole(patches, spatial_shapes=grids, mask=mask, layers=layer or ())
    tokens = (*result.hidden_states, result.last_hidden_state)[0]
    embeddings = found.start(x)()
    assert len(embeddings) == len(x) < 4 and len({image.shape for image in x}) > 1
    for i, (embedding, (h, w)) in enumerate(zip(embeddings, grids)):
        true = np.asarray(tokens[i, : h * w], np.float32)
        wanted = true.reshape(h, w, -1)
        if output == "pooled":
            wanted = np.asarray(result.pooler_output[i], np.float32)
        elif output == "mean":
            wanted = mean(true)
        assert_equal(embedding, wanted, output)


def test_every_vector_of_patches_is_normalized():
    x = images(NAFLEX)
    plain, unit = (
        Embedder(checkpoint(NAFLEX), output="patches", normalize=normalize).start(x)()
        for normalize in (False, True)
    )
    for a, b in zip(plain, unit):
        wanted = a / np.linalg.norm(a.astype(np.float64), axis=-1, keepdims=True)
        np.testing.assert_allclose(b, wanted, rtol=2.0**-23)


def test_a_batch_has_embeddings_of_different_shapes_also_for_pictures_that_failed():
    embed = Embedder(checkpoint(NAFLEX), output="layer:1", batch=2)
    rng = np.random.default_rng(0)
    sizes = [(48, 32), (48, 64), (16, 16), (32, 48)]
    x = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    reasons = ["", "", "it is not a picture", ""]
    result = embed({"id": list("abcd"), "image": x, "reason": reasons})
    assert result["reason"] == reasons and set(result) == {"id", "embedding", "reason"}
    for i, (H, W) in enumerate(sizes):
        found = result["embedding"][i]
        wanted = np.zeros((1, 1, 128), np.float32) if i == 2 else embed.start([x[i]])()[0]
        assert found.shape == (H // 16, W // 16, 128)
        np.testing.assert_array_equal(found, wanted)
    same_height = embed({"id": list("ab"), "image": x[:2]})["embedding"]
    assert [found.shape for found in same_height] == [(3, 2, 128), (3, 4, 128)]
    for found, wanted in zip(same_height, result["embedding"]):
        np.testing.assert_array_equal(found, wanted)
    empty = Embedder(SMALL, output="patches")({"id": [], "image": []})["embedding"]
    assert empty.shape == (0, 4, 4, 32) and empty.dtype == np.float32


@pytest.fixture
def pictures(tmp_path):
    """Makes a folder of 9 pictures, and one file that is not a picture."""
    photographs = tmp_path / "pictures"
    photographs.mkdir()
    rng = np.random.default_rng(0)
    for i in range(9):
        pixels = rng.integers(0, 256, (16 * (i % 4 + 1), 48, 3), np.uint8)
        Image.fromarray(pixels).save(photographs / f"{i}.png")
    (photographs / "bad.png").write_text("no picture")
    return photographs


def run(model, pictures, out, output, **options):
    return command.run(model, [pictures], out, options=Options(output=output, batch=4, **options))


def computed(model, pictures, output):
    """Maps the pictures' ids to the embeddings of the two public classes."""
    embed = Embedder(model, output=output, batch=4)
    paths = sorted(pictures.glob("[0-9].png"))
    result = Decoder(embed.preprocessing)(
        {"id": list(map(str, paths)), "content": [path.read_bytes() for path in paths]}
    )
    assert not any(result["reason"])
    return dict(zip(result["id"], embed(result)["embedding"]))


def encodings(path):
    """Returns the encodings of the numbers in a shard's embeddings."""
    group = pyarrow.parquet.read_metadata(path).row_group(0)
    columns = map(group.column, range(group.num_columns))
    (found,) = [c.encodings for c in columns if c.path_in_schema.startswith("embedding.")]
    return found


def assert_written(out, wanted):
    """Checks all rows in the shards of a folder, and the types of their columns."""
    columns = shards(out)
    assert sorted(columns["id"]) == sorted(wanted)
    for i, id in enumerate(columns["id"]):
        found = np.array(columns["embedding"][i], np.float32)
        if wanted[id].ndim == 3:
            found = found.reshape(*columns["spatial_shape"][i], -1)
        np.testing.assert_array_equal(found, wanted[id])
    width = wanted[columns["id"][0]].shape[-1]
    for path in (out / "embeddings").iterdir():
        schema = pyarrow.parquet.read_schema(path)
        vector = pyarrow.list_(pyarrow.float32(), width)
        of_patches = "spatial_shape" in columns
        assert schema.field("embedding").type == (pyarrow.list_(vector) if of_patches else vector)
        if of_patches:
            assert schema.field("spatial_shape").type == pyarrow.list_(pyarrow.int32(), 2)
        assert ("BYTE_STREAM_SPLIT" in encodings(path)) == of_patches


@pytest.mark.parametrize(
    "model, output",
    [
        (SMALL, "mean"),
        (SMALL, "patches"),
        (checkpoint(NAFLEX), "mean"),
        (checkpoint(NAFLEX), "layer:-2"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_shards_have_every_output(tmp_path, pictures, monkeypatch, model, output):
    wanted = computed(model, pictures, output)
    # A shard is written when its embeddings are as large as three of the largest.
    limit = 3 * max(each.nbytes for each in wanted.values())
    monkeypatch.setattr(folder, "SHARD_BYTES", limit)
    out = tmp_path / "out"
    assert run(model, pictures, out, output) == 1
    assert_written(out, wanted)
    manifest = json.loads((out / "_manifest.json").read_text())
    assert manifest["settings"]["output"] == manifest["options"]["output"] == output
    width = next(iter(wanted.values())).shape[-1]
    assert manifest["width"] == width
    paths = sorted((out / "embeddings").iterdir())
    assert len(paths) >= 2
    for path in paths:
        table = pyarrow.parquet.read_table(path)
        assert sum(wanted[id].nbytes for id in table["id"].to_pylist()[:-1]) < limit
        about = json.loads(table.schema.metadata[folder.ABOUT])
        assert about["settings"]["output"] == output
    # What is missing is embedded again, and so is what has changed.
    paths[0].unlink()
    (pictures / "8.png").write_bytes(encoded(5))
    assert run(model, pictures, out, output, changed="embed") == 1
    assert_written(out, computed(model, pictures, output))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    with pytest.raises(ValueError, match=f"output was '{output}' and is now 'layer:1'"):
        run(model, pictures, out, "layer:1")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*")} == before


def test_a_folder_without_a_record_of_the_output_is_pooled(tmp_path, pictures):
    model, out = FAMILIES / "open_clip_siglip", tmp_path / "out"
    run(model, pictures, out, "pooled")
    wanted = computed(model, pictures, "pooled")
    manifest = json.loads((out / "_manifest.json").read_text())
    del manifest["settings"]["output"], manifest["options"]["output"]
    (out / "_manifest.json").write_text(json.dumps(manifest))
    (out / "embeddings" / "000000.parquet").unlink()
    assert run(model, pictures, out, "pooled") == 1
    assert_written(out, wanted)
    with pytest.raises(ValueError, match="output was 'pooled' and is now 'mean'"):
        run(model, pictures, out, "mean")


@pytest.mark.parametrize("lacking", ["embedding", "spatial_shape"])
def test_a_shard_that_lacks_a_column_of_patches_is_refused(tmp_path, pictures, lacking):
    out = tmp_path / "out"
    run(SMALL, pictures, out, "patches")
    path = out / "embeddings" / "000000.parquet"
    table = pyarrow.parquet.read_table(path)
    vectors = pyarrow.array([[1.0]] * len(table))
    other = table.drop_columns([lacking])
    other = other.append_column("embedding", vectors) if lacking == "embedding" else other
    pyarrow.parquet.write_table(other, path)
    with pytest.raises(ValueError, match=rf"000000\.parquet cannot be used.*columns? {lacking}"):
        run(SMALL, pictures, out, "patches")


def test_an_npz_has_patches_up_to_a_limit(tmp_path, pictures, monkeypatch):
    out = tmp_path / "out.npz"
    wanted = computed(SMALL, pictures, "layer:1")
    for _ in range(2):  # The second run replaces the file of the first one.
        assert run(SMALL, pictures, out, "layer:1", embedding_dtype="float16") == 1
        with np.load(out) as file:
            assert list(file["paths"]) == list(wanted)
            rows = np.stack([each.reshape(16, 32) for each in wanted.values()])
            np.testing.assert_array_equal(file["embeddings"], rows.astype(np.float16))
            assert file["embeddings"].dtype == np.float16
            assert json.loads(str(file["about"]))["settings"]["output"] == "layer:1"
    before = out.read_bytes()
    monkeypatch.setattr(npz, "MOST_PATCHES", 2 * 16 * 32 * len(wanted))
    assert run(SMALL, pictures, tmp_path / "b.npz", "layer:1", embedding_dtype="float16") == 1
    with pytest.raises(ValueError, match="Choose a folder"):
        run(SMALL, pictures, out, "layer:1")
    assert out.read_bytes() == before


def test_an_npz_cannot_have_patches_of_NaFlex_pictures(tmp_path, pictures):
    with pytest.raises(ValueError, match=r"out\.npz: .*--output patches.*Expected a folder"):
        run(checkpoint(NAFLEX), pictures, tmp_path / "out.npz", "patches")
    assert os.listdir(tmp_path) == ["pictures"]


def test_an_embedding_beyond_float16_is_an_error(tmp_path, pictures, monkeypatch):
    start = embedder.Embedder.start

    def one_is_large(self, images, whole):
        finish = start(self, images, whole)

        def finished():
            result = finish().copy()
            result[0, 1, 2, 3] = 65520.0  # It is rounded to 2^16, which is infinite in float16.
            return result

        return finished

    wanted = computed(SMALL, pictures, "patches")
    monkeypatch.setattr(embedder.Embedder, "start", one_is_large)
    out = tmp_path / "out"
    assert run(SMALL, pictures, out, "patches", embedding_dtype="float16") == 4
    columns = shards(out)
    assert columns["id"] == [id for i, id in enumerate(wanted) if i % 4]
    for id, found in zip(columns["id"], columns["embedding"]):
        wanted_id = wanted[id].reshape(16, 32).astype(np.float16)
        np.testing.assert_array_equal(np.array(found, np.float16), wanted_id)
    # DuckDB cannot read float16 in that encoding.
    assert not any("BYTE_STREAM_SPLIT" in encodings(p) for p in (out / "embeddings").iterdir())
    reasons = sorted(shards(out, "__errors")["reason"])[1:]
    assert reasons == ["its embedding exceeds the range of float16"] * 3


@pytest.mark.parametrize(
    "output",
    ["", "cls", "Pooled", "layer", "layer:", "layer:-0", "layer:+1", "layer:1.5", "layer:01"],
)
def test_an_output_that_does_not_exist_is_refused_before_anything_is_read(command_line, output):
    arguments = ["--checkpoint", "absent", "absent.png", "--out", "absent/out"]
    code, error = command_line("embed", *arguments, "--output", output)
    assert code == 2 and f"output is {output!r}, expected pooled, mean" in error
    for make in (Options, lambda output: Embedder("absent", output=output)):
        with pytest.raises(ValueError, match=r"output is .*, expected pooled, mean"):
            make(output=output)


@pytest.mark.parametrize("output", [None, 2, b"mean", ["mean"], np.ones(2)], ids=str)
def test_an_output_that_is_no_text_is_refused(output):
    with pytest.raises(ValueError, match=r"output is .*, expected pooled, mean"):
        Options(output=output)


@pytest.mark.parametrize(
    "name, output, text",
    [
        ("siglip_headless", "pooled", "no pooling. Choose --output mean, or"),
        ("siglip_headless", "class", "no class token. Choose --output mean"),
        ("open_clip_siglip", "class", "no class token"),
        ("dinov2", "layer:4", "has 3 blocks. Expected layer:0 to layer:3, or layer:-1 to layer:-4"),
        ("dinov2", "layer:-5", "has 3 blocks"),
        ("dinov2", "layer:999999", "has 3 blocks"),
    ],
)
def test_an_output_that_an_encoder_lacks_is_refused(tmp_path, pictures, name, output, text):
    with pytest.raises(ValueError, match=text):
        run(FAMILIES / name, pictures, tmp_path / "out", output)
    assert os.listdir(tmp_path) == ["pictures"]


def test_the_first_hidden_state_has_a_negative_number_too():
    x = expected("dinov2")["images"]
    found = Embedder(FAMILIES / "dinov2", output="layer:-4", batch=2).start(x)()
    wanted = Embedder(FAMILIES / "dinov2", output="layer:0", batch=2).start(x)()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("batch", [0, -1, 2.5, True])
def test_a_batch_that_is_not_a_positive_integer_is_refused(batch):
    with pytest.raises(ValueError, match=f"batch is {batch}, expected a positive integer"):
        Embedder(checkpoint("hf_siglip_p14_224"), batch=batch)


@pytest.mark.parametrize("size", [0, 7, True, 32.0, "32"])
def test_a_decoder_refuses_a_size_below_a_patch(size):
    with pytest.raises(ValueError, match="size is "):
        Decoder.of(checkpoint("hf_siglip_p14_224"), size)
