"""Tokenizers make the ids of transformers' processors, with the settings of the training."""

import json
import pickle
import re
import string
import sys
import types

import numpy as np
import pytest

import pallas_patch_embed as ppe
from tests.encoder.test_fuzz import EXTREME
from tests.encoder.text_goldens import WHOLE, edit, expected, sentences, unpacked

LONG = "a photo of a red car " * 50


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders of the models, by name, which tests must not change."""
    folder = tmp_path_factory.mktemp("models")
    return {name: unpacked(name, folder) for name in WHOLE}


def differences(found, wanted, texts):
    assert found.shape == wanted.shape
    return [texts[i] for i in np.flatnonzero((found != wanted).any(1))]


@pytest.mark.parametrize("name", WHOLE)
def test_ids_are_those_of_transformers(models, name):
    texts = sentences()
    assert len(texts) >= 1000 and max(map(len, texts)) >= 10_000
    ids = ppe.load_tokenizer(models[name])(texts)
    assert ids.dtype == np.int32
    assert not differences(ids, expected(name)["ids"], texts)


def test_published_files_of_SigLIP2_do_not_lower_letters_but_its_training_did(tmp_path):
    path = unpacked("siglip2", tmp_path)
    edit(path / "tokenizer_config.json", tokenizer_class="GemmaTokenizerFast")
    normalizer = json.loads((path / "tokenizer.json").read_text())["normalizer"]
    lower, *others = normalizer["normalizers"]
    assert lower == {"type": "Lowercase"} and len(others) == 1
    edit(path / "tokenizer.json", normalizer=others[0])
    texts = sentences()
    assert not differences(ppe.load_tokenizer(path)(texts), expected("siglip2")["ids"], texts)
    assert differences(
        ppe.load_tokenizer(path, lower=False)(texts), expected("siglip2")["ids"], texts
    )


def test_texts_are_padded_on_the_right_unless_the_files_say_left(tmp_path):
    path = unpacked("siglip2", tmp_path)
    settings = path / "tokenizer_config.json"
    wanted = expected("siglip2")["ids"]
    # What a tokenizer leaves in this file after a call, and the default of transformers' class.
    padding = {"strategy": {"Fixed": 20}, "direction": "Left", "pad_id": 0, "pad_type_id": 0}
    padding |= {"pad_to_multiple_of": None, "pad_token": "<pad>"}
    truncation = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    edit(path / "tokenizer.json", padding=padding, truncation=truncation)
    edit(settings, padding_side=None)
    np.testing.assert_array_equal(ppe.load_tokenizer(path)(sentences()), wanted)
    edit(settings, padding_side="left")
    for found, row in zip(ppe.load_tokenizer(path)(sentences()), wanted):
        number = 1 + int(np.flatnonzero(row == 1)[-1])
        np.testing.assert_array_equal(found, np.roll(row, 64 - number))


@pytest.mark.parametrize("name", WHOLE)
def test_the_end_token_stays_when_a_text_is_cut(models, name):
    tokenizer = ppe.load_tokenizer(models[name], length=6)
    whole = ppe.load_tokenizer(models[name])([LONG])
    ids = tokenizer([LONG, ""])
    np.testing.assert_array_equal(ids[0], [*whole[0, :5], tokenizer.end])
    assert whole[0, -1] == tokenizer.end
    front = [] if tokenizer.start is None else [tokenizer.start]
    empty = [*front, tokenizer.end, *[tokenizer.padding] * 6][:6]
    np.testing.assert_array_equal(ids[1], empty)


def test_one_text_is_a_batch_and_no_text_is_an_empty_one(models):
    tokenizer = ppe.load_tokenizer(models["siglip"])
    np.testing.assert_array_equal(tokenizer("a red car"), tokenizer(["a red car"]))
    assert tokenizer([]).shape == (0, 64)
    np.testing.assert_array_equal(tokenizer(np.array(["a red car"])), tokenizer("a red car"))


@pytest.mark.parametrize("name", WHOLE)
def test_a_tokenizer_can_be_sent_to_another_process(models, name):
    tokenizer = ppe.load_tokenizer(models[name])
    texts = sentences()[:50]
    copy = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(copy(texts), tokenizer(texts))


def test_punctuation_is_removed_or_kept_as_asked(models):
    texts = [x for x in sentences() if not re.search("<.*>", x)]
    plain = str.maketrans("", "", string.punctuation)
    cleaned = [" ".join(x.translate(plain).split()) for x in texts]
    kept = {name: ppe.load_tokenizer(models[name], remove_punctuation=False) for name in WHOLE}
    for name in WHOLE:
        removing = ppe.load_tokenizer(models[name], remove_punctuation=True)
        np.testing.assert_array_equal(removing(texts), kept[name](cleaned))
        assert differences(kept[name](texts), kept[name](cleaned), texts)
    np.testing.assert_array_equal(ppe.load_tokenizer(models["clip"])(texts), kept["clip"](texts))


def test_SigLIP_lowers_letters_unless_told_otherwise(tmp_path, models):
    texts = ["A RED CAR", "ΟΔΥΣΣΕΥΣ", "İI"]
    lowered = [x.lower() for x in texts]
    tokenizer = ppe.load_tokenizer(models["siglip"])
    np.testing.assert_array_equal(tokenizer(texts), tokenizer(lowered))
    cased = ppe.load_tokenizer(models["siglip"], lower=False)
    assert len(differences(cased(texts), tokenizer(texts), texts)) == 3
    path = unpacked("siglip", tmp_path)
    edit(path / "tokenizer_config.json", do_lower_case=False)
    np.testing.assert_array_equal(ppe.load_tokenizer(path)(texts), cased(texts))
    np.testing.assert_array_equal(ppe.load_tokenizer(path, lower=True)(texts), tokenizer(texts))


def test_a_text_that_begins_with_a_special_token_has_no_mark_in_front_of_it(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = unpacked("siglip", tmp_path)
    with (path / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a red car", "a cat"] * 9),
            model_writer=file,
            vocab_size=32,
            hard_vocab_limit=False,
            remove_extra_whitespaces=False,  # Otherwise sentencepiece removes the mark itself.
            **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
        )
    tokenizer = ppe.load_tokenizer(path, length=4)
    for text in ("</s></s>", " </s>", ".</s>!"):
        np.testing.assert_array_equal(tokenizer(text), [[1, 1, 1, 1]])


def test_a_SigLIP_text_that_ends_with_the_end_token_gets_no_other_one(tmp_path):
    path = unpacked("siglip", tmp_path)
    edit(path / "tokenizer_config.json", padding_side="left")
    tokenizer = ppe.load_tokenizer(path, length=8)
    ended = tokenizer("a red car</s>")
    np.testing.assert_array_equal(ended, tokenizer("a red car"))
    try:
        from transformers import SiglipTokenizer
    except ImportError:
        return
    theirs = SiglipTokenizer.from_pretrained(path, padding_side="left")
    for text in ("a red car</s>", "a</s></s>", "</s>", "a red car, a red car, a red car</s>"):
        ids = theirs(text, padding="max_length", max_length=8, truncation=True)["input_ids"]
        np.testing.assert_array_equal(tokenizer(text), [ids], err_msg=text)


@pytest.mark.parametrize("listed", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_were_added_to_a_spiece_model_are_refused(tmp_path, listed):
    path = unpacked("siglip", tmp_path)
    number = json.loads((path / "config.json").read_text())["text_config"]["vocab_size"]
    if listed == "added_tokens.json":
        (path / listed).write_text(json.dumps({"<a>": number}))
    else:
        known = json.loads((path / listed).read_text())["added_tokens_decoder"]
        assert ppe.load_tokenizer(path).length == 64  # `known` are in spiece.model.
        edit(path / listed, added_tokens_decoder=known | {str(number): {"content": "<a>"}})
    with pytest.raises(ValueError, match=rf"tokens were added to the {number} of spiece\.model"):
        ppe.load_tokenizer(path)


@pytest.mark.parametrize("name", WHOLE)
def test_the_length_is_the_number_of_positions(tmp_path, name):
    path = unpacked(name, tmp_path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit(path / "config.json", text_config=text | {"max_position_embeddings": 16})
    assert ppe.load_tokenizer(path).length == 16
    assert ppe.load_tokenizer(path, length=5).length == 5
    for length in (17, 0, -1, True, 2.5, "8"):
        with pytest.raises(ValueError, match=r"load_tokenizer: .*length is .* to 16"):
            ppe.load_tokenizer(path, length=length)
    (path / "config.json").unlink()
    stated = {"siglip": 64, "siglip2": 64, "clip": 77}[name]
    assert ppe.load_tokenizer(path).length == stated
    edit(path / "tokenizer_config.json", model_max_length=10**30)
    assert ppe.load_tokenizer(path).length == stated
    edit(path / "tokenizer_config.json", model_max_length=32)
    assert ppe.load_tokenizer(path).length == 32


@pytest.mark.parametrize("name", WHOLE)
def test_the_model_decides_if_no_class_is_named(tmp_path, name):
    path = unpacked(name, tmp_path)
    wanted = ppe.load_tokenizer(path)(sentences())
    for stated in (None, "PreTrainedTokenizerFast", "TokenizersBackend"):
        edit(path / "tokenizer_config.json", tokenizer_class=stated)
        np.testing.assert_array_equal(ppe.load_tokenizer(path)(sentences()), wanted)
    file = path / ("spiece.model" if name == "siglip" else "tokenizer.json")
    np.testing.assert_array_equal(ppe.load_tokenizer(file)(sentences()), wanted)
    for other in ("config.json", "tokenizer_config.json"):
        (path / other).unlink()
    if name == "siglip":
        np.testing.assert_array_equal(ppe.load_tokenizer(file)(sentences()), wanted)
    with pytest.raises(ValueError, match=r"neither a tokenizer_config\.json nor a config\.json"):
        ppe.load_tokenizer(path)


def test_special_tokens_may_be_objects_in_their_own_file(tmp_path):
    path = unpacked("clip", tmp_path)
    edit(path / "tokenizer_config.json", pad_token=None)
    special = {"pad_token": {"content": "!", "lstrip": False}}
    (path / "special_tokens_map.json").write_text(json.dumps(special))
    ids = ppe.load_tokenizer(path)(["a red car"])
    assert ids[0, -1] == 0  # The first piece of CLIP's vocabulary.
    edit(path / "special_tokens_map.json", pad_token="<absent>")
    with pytest.raises(ValueError, match="no token '<absent>'"):
        ppe.load_tokenizer(path)
    edit(path / "special_tokens_map.json", pad_token=7)
    with pytest.raises(ValueError, match="pad_token is 7, expected a string"):
        ppe.load_tokenizer(path)


def test_tokenizers_that_cannot_be_read_are_refused(tmp_path, models):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        ppe.load_tokenizer(tmp_path / "absent")
    path = unpacked("siglip2", tmp_path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        ppe.load_tokenizer(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"there is no tokenizer\.json"):
        ppe.load_tokenizer(path)
    edit(path / "tokenizer_config.json", tokenizer_class="T5TokenizerFast")
    with pytest.raises(ValueError, match=r"tokenizer_class is 'T5TokenizerFast'.*expected one"):
        ppe.load_tokenizer(path)
    edit(path / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    (path / "spiece.model").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"spiece\.model is damaged"):
        ppe.load_tokenizer(path)


@pytest.mark.slow("loads a tokenizer for each value of each field")
@pytest.mark.parametrize("name", WHOLE)
def test_wrong_values_in_the_files_are_refused_in_words_or_do_not_matter(tmp_path, name):
    path = unpacked(name, tmp_path)
    loaded = 0
    for file in ("tokenizer_config.json", "config.json"):
        original = (path / file).read_text()
        for field in json.loads(original):
            for value in EXTREME:
                (path / file).write_text(json.dumps(json.loads(original) | {field: value}))
                try:
                    assert ppe.load_tokenizer(path)(["a red car"]).shape[0] == 1
                    loaded += 1
                except ValueError as error:
                    assert f"load_tokenizer: {str(path)!r}: " in str(error)
                    assert len(str(error)) < 1500 and "\n" not in str(error)
        (path / file).write_text(original)
    assert loaded > 0


@pytest.mark.parametrize("name, library", [("siglip", "sentencepiece"), ("clip", "tokenizers")])
def test_a_missing_library_is_named_with_the_extra(models, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"needs {library} to read .*pip install 'pallas_patch_embed\[text\]'"
    with pytest.raises(ImportError, match=message):
        ppe.load_tokenizer(models[name])


@pytest.mark.parametrize(
    "texts, error, message",
    [
        (["a", None], TypeError, "text 1 is NoneType, expected str"),
        ([b"a"], TypeError, "text 0 is bytes"),
        ([["a"]], TypeError, "text 0 is list"),
        (["a", "\ud800b"], ValueError, r"text 1, '\\ud800b', has a surrogate"),
    ],
)
def test_what_is_no_text_is_refused(models, texts, error, message):
    for name in ("siglip", "clip"):
        with pytest.raises(error, match=message):
            ppe.load_tokenizer(models[name])(texts)


def test_a_name_on_the_hub_downloads_only_the_files_of_tokenizers(models, monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(models["siglip"])

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert ppe.load_tokenizer("google/siglip").length == 64
    assert asked == [("google/siglip", ["*.json", "spiece.model"])]
