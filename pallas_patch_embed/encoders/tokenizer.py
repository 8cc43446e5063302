"""Tokenizers, which turn texts into the ids that a text encoder was trained with."""

import dataclasses
import importlib
import operator
import os
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders.arrays import check_regular, folder_of, read_json
from pallas_patch_embed.encoders.config import TextConfig, check_config
from pallas_patch_embed.encoders.hub import find_checkpoint
from pallas_patch_embed.encoders.hugging_face import text_config_of

# Files of a checkpoint that a tokenizer is read from.
FILES = ("*.json", "spiece.model")

# What marks the beginning of a word in SentencePiece's vocabularies.
MARK = "\N{LOWER ONE EIGHTH BLOCK}"

SURROGATE = re.compile("[\ud800-\udfff]")

PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How the texts of a family are prepared.

    Attributes:
      file: the file of the vocabulary.
      end, padding: the tokens behind a text.
      length: number of tokens.
      lower, remove_punctuation: as in `load_tokenizer`.
      start: the token in front of a text.
    """

    file: str
    end: str
    padding: str
    length: int = 64
    lower: bool = True
    remove_punctuation: bool = False
    start: str | None = None


# Sources: the configs of big_vision (`tokenize(max_len=64, eos="sticky", pad_value=1)` for SigLIP,
# `lower|tok(length=64, bos="no", eos="sticky")` for SigLIP2) and transformers 5.24. CLIP's file
# lowers letters itself.
SIGLIP = _Kind("spiece.model", "</s>", "</s>", remove_punctuation=True)
SIGLIP2 = _Kind("tokenizer.json", "<eos>", "<pad>")
CLIP = _Kind("tokenizer.json", "<|endoftext|>", "<|endoftext|>", 77, False, start="<|startoftext|>")

# By the tokenizer_class of a tokenizer_config.json.
KINDS = {
    "SiglipTokenizer": SIGLIP,
    "Siglip2Tokenizer": SIGLIP2,
    "GemmaTokenizer": SIGLIP2,
    "CLIPTokenizer": CLIP,
}
# These classes are of every model, so the model decides.
ANY_MODEL = ("PreTrainedTokenizer", "TokenizersBackend")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Turns texts into ids, as `load_tokenizer` describes it.

    Attributes:
      encode: function from a list of texts to their ids without start, end and padding.
      length: number of ids of a text, L.
      end: id of the end token, which stays when a text is cut.
      padding: id that fills up a text.
      start: id of the token in front of a text, or None.
      padding_side: "right" or "left".
      ends_once: whether a text that already ends with an end token gets no other one, as in
        transformers' SiglipTokenizer.
    """

    encode: Callable[[list[str]], Iterable[list[int]]] = dataclasses.field(repr=False)
    length: int
    end: int
    padding: int
    start: int | None = None
    padding_side: str = "right"
    ends_once: bool = False

    def __call__(self, texts: str | Sequence[str]) -> npt.NDArray[np.int32]:
        """Tokenizes texts.

        Args:
          texts: B texts, or one.

        Returns:
          ids [B, length] for a `TextEncoder`: start, the text's first tokens, end, padding.

        Raises:
          TypeError: something is not a str.
          ValueError: a text is not Unicode.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        for i, text in enumerate(given):
            _check_text(i, text)
        front = [] if self.start is None else [self.start]
        ids = np.full((len(given), self.length), self.padding, np.int32)
        for row, found in zip(ids, self.encode(given)):
            cut = found[: self.length - len(front) - 1]
            if self.ends_once and cut[-1:] == [self.end]:
                cut = cut[:-1]
            kept = [*front, *cut, self.end]
            row[slice(len(kept)) if self.padding_side == "right" else slice(-len(kept), None)] = (
                kept
            )
        return ids


def _check_text(i: int, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"tokenizer: text {i} is {type(text).__name__}, expected str. Leave out missing texts, "
            "and convert columns of pyarrow with to_pylist()."
        )
    if SURROGATE.search(text):
        raise ValueError(
            f"tokenizer: text {i}, {quoted(text)}, has a surrogate without its pair, which is not "
            "Unicode. Decode the text's bytes with errors='replace'."
        )


def load_tokenizer(
    source: str | os.PathLike[str],
    *,
    length: int | None = None,
    lower: bool | None = None,
    remove_punctuation: bool | None = None,
) -> Tokenizer:
    """Loads the tokenizer of a SigLIP, SigLIP2 or CLIP checkpoint.

    A text becomes the ids that transformers' processor makes with the settings with which the model
    was trained: cut to `length` with its end token kept, and padded to `length` with the padding
    token. It needs the extra `text`: the library tokenizers reads tokenizer.json of SigLIP2 and
    CLIP, and sentencepiece reads spiece.model of SigLIP.

    Args:
      source: a folder in Hugging Face's layout, its tokenizer.json or spiece.model, or the name of
        a model on the Hugging Face hub. Beside them the tokenizer_config.json names the class and
        the special tokens, and the config.json the number of positions.
      length: number of ids of a text. None for the number of the model's positions, with which
        SigLIP was trained; of a CLIP a smaller number is faster and gives the same text_embeds for
        texts that it does not cut.
      lower: whether texts are put into lower case first. None as the model was trained: always for
        SigLIP and SigLIP2, also if the files of a SigLIP2 do not say so. CLIP's files lower letters
        themselves, whatever this argument is.
      remove_punctuation: whether ASCII punctuation is removed, and whitespace made single spaces
        between words. None as in transformers: True for SigLIP alone. big_vision does so when it
        evaluates names of classes, but not in training.

    Returns:
      Tokenizer.

    Raises:
      FileNotFoundError: there is no such folder, file or model.
      ImportError: tokenizers or sentencepiece is not installed.
      ValueError: a file is missing or damaged, the tokenizer is of another class, or length is not
        possible.
    """
    path = find_checkpoint(os.fspath(source), FILES)
    if not path.exists():
        raise FileNotFoundError(f"load_tokenizer: there is no file or folder {str(path)!r}.")
    try:
        return _load(path, length, lower, remove_punctuation)
    except ValueError as error:
        raise ValueError(f"load_tokenizer: {str(path)!r}: {error}") from error


def _load(
    path: Path, length: int | None, lower: bool | None, remove_punctuation: bool | None
) -> Tokenizer:
    folder = folder_of(path)
    fields = _fields(folder, "special_tokens_map.json") | _fields(folder, "tokenizer_config.json")
    described = _fields(folder, "config.json")
    config = text_config_of(described) if described else None
    kind = _kind(path, fields, config)
    file = folder / kind.file
    if not file.exists():
        raise ValueError(
            f"there is no {kind.file}, which contains the vocabulary. Copy it from the model's "
            "repository. big_vision's models have the tokenizers of the same models in Hugging "
            "Face's layout."
        )
    check_regular(file)
    if lower is None:
        lower = fields.get("do_lower_case", True) is not False if kind is SIGLIP else kind.lower
    if remove_punctuation is None:
        remove_punctuation = kind.remove_punctuation
    prepare = _Preparation(lower, remove_punctuation)
    end = _token(fields, "eos_token", kind.end)
    padding = _token(fields, "pad_token", kind.padding)
    encode: _SentencePiece | _Json
    if kind is SIGLIP:
        unknown = _token(fields, "unk_token", "<unk>")
        encode = _SentencePiece.load(file, prepare, unknown, {end, padding, unknown})
        _check_added(folder, fields, encode.model.get_piece_size())
    else:
        encode = _Json.load(file, prepare)
    start = None if kind.start is None else encode.id(_token(fields, "bos_token", kind.start))
    return Tokenizer(
        encode,
        _length(length, kind, fields, config),
        encode.id(end),
        encode.id(padding),
        start,
        "left" if fields.get("padding_side") == "left" else "right",
        ends_once=kind is SIGLIP,
    )


def _fields(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file of the folder, if there is one."""
    return dict(check_config(read_json(folder / name))) if (folder / name).exists() else {}


def _kind(path: Path, fields: Mapping[str, Any], config: TextConfig | None) -> _Kind:
    """Returns how texts are prepared, which the class or else the model decides."""
    named = fields.get("tokenizer_class")
    name = str(named).removesuffix("Fast")
    if name in KINDS:
        return KINDS[name]
    if named is not None and name not in ANY_MODEL:
        raise ValueError(
            f"tokenizer_class is {quoted(named)}, which is not supported, expected one of "
            f"{', '.join(KINDS)}."
        )
    if path.name == SIGLIP.file:
        return SIGLIP
    if config is None:
        raise ValueError(
            "neither a tokenizer_config.json nor a config.json tells to which model the tokenizer "
            "belongs. Put those of the model beside it."
        )
    if config.family == "clip":
        return CLIP
    return SIGLIP2 if (folder_of(path) / SIGLIP2.file).exists() else SIGLIP


def _token(fields: Mapping[str, Any], name: str, default: str) -> str:
    """Returns a special token, which is a string or an object with its content."""
    token = fields.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return default
    if not isinstance(content, str) or not content or SURROGATE.search(content):
        raise ValueError(f"{name} is {quoted(token)}, expected a string.")
    return content


def _check_added(folder: Path, fields: Mapping[str, Any], pieces: int) -> None:
    """Refuses tokens that were added to the vocabulary, because spiece.model does not have them."""
    listed = fields.get("added_tokens_decoder")
    numbers = list(listed) if isinstance(listed, dict) else []
    numbers += _fields(folder, "added_tokens.json").values()
    if any(str(n).isdecimal() and int(n) >= pieces for n in numbers):
        raise ValueError(
            f"tokens were added to the {pieces} of {SIGLIP.file}, which is not supported. Use the "
            "tokenizer's files from the model's repository."
        )


def _length(length: Any, kind: _Kind, fields: Mapping[str, Any], config: TextConfig | None) -> int:
    most = fields.get("model_max_length")
    if config is not None:
        most = config.length
    elif not isinstance(most, int) or not 0 < most < 2**20:  # transformers writes 10^30 for none.
        most = kind.length
    if length is None:
        return most
    try:
        number = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        number = 0
    least = 1 if kind.start is None else 2
    if not least <= number <= most:
        raise ValueError(
            f"length is {length!r}, expected a number of tokens from {least} to {most}, which the "
            "model has positions for."
        )
    return number


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """What happens to a text before its tokens are found, as `load_tokenizer` describes it."""

    lower: bool
    remove_punctuation: bool

    def __call__(self, text: str) -> str:
        if self.lower:
            text = text.lower()
        if self.remove_punctuation:
            text = re.sub(r"\s+", " ", text.translate(PUNCTUATION)).strip()
        return text


@dataclasses.dataclass(frozen=True)
class _SentencePiece:
    """Finds the tokens of a spiece.model as transformers' SiglipTokenizer does.

    Special tokens in a text become their ids. Each part between them is prepared, and is encoded
    behind the unknown token, whose pieces are then removed. sentencepiece alone would begin a word
    with every part, but a word begins only with the first, to which a mark is added. If that part
    has nothing else, it has no tokens.
    """

    model: Any
    prepare: _Preparation
    unknown: str
    special: Mapping[str, int]

    @classmethod
    def load(
        cls, file: Path, prepare: _Preparation, unknown: str, special: Iterable[str]
    ) -> "_SentencePiece":
        sentencepiece = _library("sentencepiece", file)
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{file.name} is damaged: {error}") from error
        ids = _SentencePiece(model, prepare, unknown, {})
        return dataclasses.replace(ids, special={token: ids.id(token) for token in special})

    def id(self, token: str) -> int:
        number = self.model.piece_to_id(token)
        if self.model.id_to_piece(number) != token:
            raise ValueError(f"its vocabulary has no token {quoted(token)}.")
        return number

    def __call__(self, texts: list[str]) -> Iterable[list[int]]:
        any_special = re.compile(f"({'|'.join(map(re.escape, self.special))})")
        # The odd parts are special tokens.
        parts = [any_special.split(MARK + text.replace(MARK, " ")) for text in texts]
        for of in parts:
            if len(of) > 1 and self.prepare(of[0]) == MARK:
                of[0] = ""
        plain = [self.unknown + self.prepare(part) for of in parts for part in of[::2]]
        front = len(self.model.encode(self.unknown))
        encoded = iter(self.model.encode(plain))
        for of in parts:
            ids: list[int] = []
            for i, part in enumerate(of):
                ids += [self.special[part]] if i % 2 else next(encoded)[front:]
            yield ids


@dataclasses.dataclass(frozen=True)
class _Json:
    """Finds the tokens of a tokenizer.json, special tokens in a text included."""

    model: Any
    prepare: _Preparation

    @classmethod
    def load(cls, file: Path, prepare: _Preparation) -> "_Json":
        tokenizers = _library("tokenizers", file)
        try:
            model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises Exception itself.
            raise ValueError(f"{file.name} is damaged: {error}") from error
        model.no_truncation()
        model.no_padding()
        if prepare.lower:
            # Behind the search for special tokens. A second time changes nothing.
            steps = [tokenizers.normalizers.Lowercase()]
            steps += [] if model.normalizer is None else [model.normalizer]
            model.normalizer = tokenizers.normalizers.Sequence(steps)
        return cls(model, dataclasses.replace(prepare, lower=False))

    def id(self, token: str) -> int:
        number = self.model.token_to_id(token)
        if number is None:
            raise ValueError(f"its vocabulary has no token {quoted(token)}.")
        return number

    def __call__(self, texts: list[str]) -> Iterable[list[int]]:
        found = self.model.encode_batch([*map(self.prepare, texts)], add_special_tokens=False)
        return [encoding.ids for encoding in found]


def _library(name: str, file: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"load_tokenizer needs {name} to read {file.name}, which is not installed. Install it "
            "with: pip install 'pallas_patch_embed[text]'."
        ) from error
