"""`embed` writes the embeddings of texts, and `search` compares them with pictures."""

import json
import re
import shutil

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.commands import cli
from pallas_patch_embed.embed import Decoder, Embedder, command, lines
from pallas_patch_embed.embed.options import Options
from tests.commands.shard_folders import by_id, encoded, shards
from tests.encoder.text_goldens import unpacked
from tests.short_suite import keep

TEXTS = ["a red car", "a cat", "", "  ", "An astronaut\tin space!", "\N{CAT FACE}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return unpacked("clip", tmp_path_factory.mktemp("model"))


def run(model, arguments, out, **options):
    options = Options(**dict(batch=2, workers=1, quiet=True) | options)
    return command.run(model, arguments, out, options=options)


def wanted(model, texts, batch=2):
    """Embeds texts with the public functions, in batches of the same size."""
    encoder, tokenizer = ppe.load_text_encoder(model), ppe.load_tokenizer(model)
    embeds = [encoder(tokenizer([text] * batch)).text_embeds[0] for text in texts]
    return np.stack([np.asarray(each, np.float32) for each in embeds])


def check(found, model, texts):
    """Compares embeddings by id with those of texts by id."""
    assert found.keys() == texts.keys()
    for id, embedding in zip(texts, wanted(model, texts.values())):
        np.testing.assert_array_equal(found[id], embedding)


def write(url, content):
    with fsspec.open(str(url), "wb", auto_mkdir=True) as file:
        file.write(content)


@pytest.mark.parametrize(
    "kind", keep(["local", "memory"], "local".__eq__, "compiles the encoder again")
)
def test_the_lines_of_a_text_file_are_embedded(model, tmp_path, kind):
    root = str(tmp_path) if kind == "local" else f"memory://{tmp_path.name}"
    path = f"{root}/captions.txt"
    content = "\ufeff" + "\r\n".join(TEXTS)
    write(path, content.encode() + b"\nna\xefve\n" + b"x" * (2**20 + 1) + b"\nlast")
    assert run(model, [path], f"{root}/out") == 2
    rows = {0: TEXTS[0], 1: TEXTS[1], 4: TEXTS[4], 5: TEXTS[5], 8: "last"}
    check(by_id(f"{root}/out"), model, {f"{path}#{row}": text for row, text in rows.items()})
    found = shards(f"{root}/out")
    assert found["row"] == list(map(str, rows))
    assert {source.replace("memory:///", "memory://") for source in found["source"]} == {path}
    errors = shards(f"{root}/out", "__errors")
    assert dict(zip(errors["row"], errors["reason"])) == {
        "6": "it is not UTF-8",
        "7": "it has more than 1048576 characters",
    }


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_an_error(tmp_path, encoding):
    path = tmp_path / "captions.txt"
    path.write_bytes("\ufeffa red car\ntwo cats\n".encode(encoding))
    (found,) = lines.Lines(str(path)).pictures()
    with pytest.raises(OSError, match="cannot be read beyond line 0: it is UTF-16, expected UTF-8"):
        found.open(1)


@pytest.mark.slow("compiles the encoder again")
def test_a_column_of_texts_is_embedded(model, tmp_path):
    path = tmp_path / "captions.parquet"
    table = {"id": list("abcdef"), "caption": [*TEXTS[:2], None, *TEXTS[3:]], "other": ["x"] * 6}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    options = dict(text_column="caption", keep=("other",))
    assert run(model, [path], tmp_path / "out", **options) == 1
    texts = dict(zip(table["id"], table["caption"]))
    del texts["c"]
    check(by_id(tmp_path / "out"), model, texts)
    assert shards(tmp_path / "out")["other"] == ["x"] * 5
    errors = shards(tmp_path / "out", "__errors")
    assert (errors["id"], errors["reason"]) == (["c"], ["its cell is empty"])
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert manifest["settings"]["tower"] == "text"
    assert manifest["settings"]["text_column"] == "caption"


@pytest.mark.slow("compiles the encoder again")
def test_texts_in_lists_and_without_ids_are_embedded_into_an_npz_file(model, tmp_path):
    path = tmp_path / "captions.parquet"
    kind = pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), pyarrow.large_string()))
    column = pyarrow.array([["a", "b"], [], ["c"]], pyarrow.list_(pyarrow.large_string()))
    table = pyarrow.table({"captions": column.cast(kind)})
    pyarrow.parquet.write_table(table, path)
    assert run(model, [tmp_path], tmp_path / "out.npz", text_column="captions") == 1
    with np.load(tmp_path / "out.npz") as file:
        found = dict(zip(file["paths"].tolist(), file["embeddings"]))
        assert file["rows"].tolist() == ["0/0", "0/1", "2/0"]
    check(found, model, dict(zip([f"{path}#0/0", f"{path}#0/1", f"{path}#2/0"], "abc")))


@pytest.mark.slow("compiles the encoders again")
def test_a_run_of_texts_is_resumed(model, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\nsame")
    out = tmp_path / "out"
    assert run(model, [tmp_path / "a.txt"], out) == 0
    first = by_id(out)
    assert run(model, [tmp_path / "a.txt", tmp_path / "b.txt"], out) == 0
    line = "Embedded 2 of 4 texts into .*out. Earlier runs had embedded 2."
    assert re.search(line, capsys.readouterr().out)
    second = by_id(out)
    assert len(second) == 4 and all((second[id] == first[id]).all() for id in first)
    (tmp_path / "a.txt").write_text("a\nnew")
    assert run(model, [tmp_path / "a.txt"], out) == 2
    assert run(model, [tmp_path / "a.txt"], out, changed="embed") == 0
    check(
        {id.rpartition("/")[2]: x for id, x in by_id(out).items()},
        model,
        {"a.txt#0": "a", "a.txt#1": "new", "b.txt#0": "b", "b.txt#1": "same"},
    )


@pytest.mark.slow("compiles the encoders again")
def test_normalized_texts_have_length_1(model, tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    assert run(model, [tmp_path / "a.txt"], tmp_path / "out", normalize=True) == 0
    for vector in by_id(tmp_path / "out").values():
        # The sum of squares of 20 numbers that were rounded to float32.
        assert abs(np.linalg.norm(vector.astype(np.float64)) - 1) < 2**-22


# What is refused.


@pytest.mark.slow("compiles the encoders again")
def test_texts_and_pictures_never_mix(model, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.png").write_bytes(encoded(0))
    assert run(model, [tmp_path / "a.txt"], tmp_path / "texts") == 0
    with pytest.raises(ValueError, match="tower was 'text' and is now 'vision'"):
        run(model, [tmp_path / "a.png"], tmp_path / "texts")
    assert run(model, [tmp_path / "a.png"], tmp_path / "pictures") == 0
    with pytest.raises(ValueError, match="tower was 'vision' and is now 'text'"):
        run(model, [tmp_path / "a.txt"], tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"a\.png is neither a \.txt nor a parquet file"):
        run(model, [tmp_path / "a.txt", tmp_path / "a.png"], tmp_path / "texts")
    # Text files in folders of pictures are left out, and pictures in folders of texts.
    assert sorted(by_id(tmp_path / "pictures")) == [str(tmp_path / "a.png")]
    with pytest.raises(ValueError, match="There are no texts in"):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/b.png").write_bytes(encoded(0))
        run(model, [tmp_path / "folder"], tmp_path / "other", text_column="caption")


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(size=64), "--size is for pictures"),
        (dict(output="mean"), "--output is for pictures"),
        (dict(ray="local"), "--ray is for pictures"),
        (dict(keep=("x",)), "a.txt is a text file, which has no columns"),
    ],
)
def test_options_for_pictures_are_refused(model, tmp_path, options, why):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=why):
        run(model, [tmp_path / "a.txt"], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_columns_that_are_no_texts_are_refused(model, tmp_path):
    path = tmp_path / "p.parquet"
    table = pyarrow.table({"a": ["x"], "b": ["y"], "n": [1]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=r"column 'n' of type int64, expected texts: text, or"):
        run(model, [path], tmp_path / "out", text_column="n")
    with pytest.raises(ValueError, match=r"no column 'x'; its columns are a \(string\)"):
        run(model, [path], tmp_path / "out", text_column="x")


@pytest.mark.slow("compiles the encoder again")
def test_a_file_with_several_columns_of_texts_is_an_error(model, tmp_path):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), path)
    (tmp_path / "a.txt").write_text("a")
    assert run(model, [tmp_path / "a.txt", path], tmp_path / "out") == 1
    (why,) = shards(tmp_path / "out", "__errors")["reason"]
    assert "2 columns of texts" in why and "--text-column" in why


@pytest.mark.slow("compiles the encoders again")
def test_another_tokenizer_is_another_setting(model, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    other = shutil.copytree(model, tmp_path / "other")
    assert run(model, [tmp_path / "a.txt"], tmp_path / "out") == 0
    fields = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(fields | {"unused": 1}))
    with pytest.raises(ValueError, match="checkpoint_sha256 was"):
        run(other, [tmp_path / "a.txt"], tmp_path / "out")


def test_a_file_that_ends_early_says_so(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    monkeypatch.setattr(lines, "opened_origin", lambda *_: 1 / 0)
    (found,) = lines.Lines(str(tmp_path / "a.txt")).pictures()
    with pytest.raises(OSError, match="cannot be read beyond line 0: division by zero"):
        found.open(1)


# The command `search`.


@pytest.fixture(scope="module")
def outputs(model, tmp_path_factory):
    """Returns a folder with outputs of 4 pictures and of 3 texts."""
    root = tmp_path_factory.mktemp("outputs")
    (root / "photos").mkdir()
    for i in range(4):
        (root / f"photos/{i}.png").write_bytes(encoded(50 * i))
    (root / "captions.txt").write_text("\n".join(TEXTS[:2] + TEXTS[4:5]))
    assert run(model, [root / "photos"], root / "pictures", batch=1) == 0
    assert run(model, [root / "captions.txt"], root / "texts", batch=1) == 0
    return root


@pytest.fixture
def searched(capsys, monkeypatch, outputs):
    """Returns a function that runs `search` in the folder of the outputs."""
    monkeypatch.chdir(outputs)

    def run(*arguments):
        code = cli.main(cli.parse(["pallas-patch-embed", "search", *map(str, arguments)]))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(
    "out", keep(["pictures", "texts"], "pictures".__eq__, "compiles the encoder again")
)
def test_a_text_finds_the_pictures_and_the_texts_with_the_largest_cosines(
    model, outputs, searched, out
):
    (query,) = wanted(model, ["a cat"], batch=1)
    code, text, errors = searched("--checkpoint", model, out, "a cat", "--json")
    assert (code, errors) == (0, "")
    found = {each["id"]: each["cosine"] for each in json.loads(text)}
    expected = {id: cosine(query, vector) for id, vector in by_id(outputs / out).items()}
    assert found.keys() == expected.keys()
    for id, value in found.items():
        # 20 products and sums in float32, three times.
        assert value == pytest.approx(expected[id], abs=2**-18)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    if out == "texts":
        assert next(iter(found)).endswith("captions.txt#1")


@pytest.mark.slow("compiles the encoders again")
def test_a_picture_finds_texts(model, outputs, searched):
    path = outputs / "photos/1.png"
    decoded = Decoder.of(model)({"id": ["a"], "content": [path.read_bytes()]})
    (query,) = Embedder(model, batch=1)(decoded)["embedding"]
    code, text, _ = searched("--checkpoint", model, "texts", "--image", path, "--json")
    assert code == 0
    expected = sorted((cosine(query, x) for x in by_id(outputs / "texts").values()), reverse=True)
    found = [each["cosine"] for each in json.loads(text)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-18)


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["pictures"], "expected a text or an --image, but neither is given"),
        (["pictures", "a", "--image", "photos/1.png"], "but both are given"),
        (["pictures", ""], "but it is empty"),
        (["means", "a"], "--output mean, which cannot be compared with a text"),
        (["texts", "a", "--sheet", "sheet.png"], "--sheet draws pictures, but texts has texts"),
    ],
)
def test_what_a_text_cannot_be_compared_with_is_refused(model, outputs, searched, arguments, why):
    shutil.copytree(outputs / "pictures", outputs / "means", dirs_exist_ok=True)
    manifest = json.loads((outputs / "means/_manifest.json").read_text())
    manifest["settings"]["output"] = "mean"
    (outputs / "means/_manifest.json").write_text(json.dumps(manifest))
    code, text, errors = searched("--checkpoint", model, *arguments)
    assert (code, text) == (2, "") and why in errors


def test_a_tokenizer_that_is_missing_is_said(model, outputs, searched, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    code, text, errors = searched("--checkpoint", other, "pictures", "a cat")
    assert (code, text) == (2, "") and "there is no tokenizer.json" in errors


def test_texts_of_another_tokenizer_are_refused(model, outputs, searched, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "special_tokens_map.json").write_text("{}")
    assert searched("--checkpoint", other, "pictures", "a cat")[0] == 0
    code, _, errors = searched("--checkpoint", other, "texts", "a cat")
    assert code == 2 and "texts was written with the checkpoint" in errors
