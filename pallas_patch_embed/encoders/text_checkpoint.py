"""Loads text encoders, and the scale and bias of similarities, from the files of `load_encoder`."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders import big_vision, hugging_face
from pallas_patch_embed.encoders.arrays import (
    Tower,
    check_plain,
    is_npz,
    open_npz,
    open_safetensors,
)
from pallas_patch_embed.encoders.calibration import Calibration, calibrate
from pallas_patch_embed.encoders.checkpoint import (
    TITLES,
    calibration_in,
    cast,
    check_layers_dtype,
    given_config,
    in_eight_bits,
    json_beside,
    placed,
)
from pallas_patch_embed.encoders.config import TextConfig
from pallas_patch_embed.encoders.hub import find_checkpoint
from pallas_patch_embed.encoders.names import read_text_encoder
from pallas_patch_embed.encoders.sentences import SENTENCES
from pallas_patch_embed.encoders.text_encoder import TextEncoder
from pallas_patch_embed.encoders.tokenizer import load_tokenizer

# A config as the user may give it.
type GivenConfig = TextConfig | Mapping[str, Any] | str | os.PathLike[str]


def load_text_encoder(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    config: GivenConfig | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_cosine: float | None = None,
) -> TextEncoder:
    """Loads the text encoder of a SigLIP, SigLIP2 or CLIP checkpoint.

    It is the counterpart of `load_encoder`: both read their towers from the same file. The layouts
    are Hugging Face's and, for SigLIP, big_vision's .npz files.

    Args:
      source: the folder, file or name on the Hugging Face hub, as for `load_encoder`.
      dtype: dtype of all layers: "bfloat16", "float32", "int8" or "float8_e4m3fn". With the last
        two the dense layers of the blocks compute in 8 bits, and all others, the table of tokens
        and results are bfloat16, as for `load_encoder` (docs/eight_bits.md).
      config: replacement for the config.json: a TextConfig, the contents of a config.json, or its
        path. Big_vision's arrays need none.
      calibration: for 8 bits: from `calibrate` of this text encoder, or the path of its file. None
        for text_calibration.safetensors in the checkpoint's folder; without it the encoder is
        calibrated on 96 sentences of this package with the checkpoint's tokenizer, with a warning.
      min_cosine: for 8 bits: as for `load_encoder`, over the calibration's texts.

    Returns:
      TextEncoder.

    Raises:
      FileNotFoundError, OSError, TypeError, ValueError: as for `load_encoder`.
      ImportError: there is no calibration, and the library that reads the tokenizer is missing.
    """
    return _load(source, dtype, config, calibration, min_cosine, None)


def load_siglip_text(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    config: GivenConfig | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_cosine: float | None = None,
) -> TextEncoder:
    """Loads the text encoder of a SigLIP or SigLIP2 checkpoint, and refuses others.

    Otherwise it is `pallas_patch_embed.load_text_encoder`, with the same arguments and exceptions.
    """
    return _load(source, dtype, config, calibration, min_cosine, "siglip")


def _load(
    source: str | os.PathLike[str],
    dtype: DTypeLike,
    config: GivenConfig | None,
    calibration: Calibration | str | os.PathLike[str] | None,
    min_cosine: float | None,
    family: str | None,
) -> TextEncoder:
    given = check_layers_dtype(dtype, calibration, min_cosine, "text")
    path = find_checkpoint(os.fspath(source))
    try:
        weights, found = _read(path, given_config(config, TextConfig), family)
        if given["dtype"] not in EIGHT_BITS:
            return _assemble(weights, found, given["dtype"])
        if given["calibration"] is None:
            given["calibration"] = calibration_in(path, "text") or _on_sentences(
                path, _assemble(weights, found, "float32"), given["dtype"]
            )
        others = _assemble(weights | {"blocks": {}}, found, "bfloat16")
        blocks = in_eight_bits(weights["blocks"], found, **given)
        return dataclasses.replace(others, blocks=blocks)
    except ValueError as error:
        raise ValueError(f"load_text_encoder: {str(path)!r}: {error}") from error


def _assemble(weights: dict[str, Any], config: TextConfig, dtype: str) -> TextEncoder:
    parts: dict[str, Any] = {
        name: None if part is None else cast(part, "float32" if name == "positions" else dtype)
        for name, part in weights.items()
        if name != "blocks"
    }
    blocks = placed(weights["blocks"], config, dtype)
    return TextEncoder(config=config, dtype=dtype, blocks=blocks, **parts)


def _on_sentences(path: Path, exact: TextEncoder, dtype: str) -> Calibration:
    """Calibrates on the sentences of this package, which the checkpoint's tokenizer reads."""
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        raise ValueError(
            f"dtype is {dtype!r}, but there is no calibration, and no tokenizer with which to "
            f"make one on this package's sentences: {error} Pass calibration=."
        ) from error
    warnings.warn(
        f"load_text_encoder: calibrated on {len(SENTENCES)} sentences of this package. Pass a few "
        "hundred texts like your own: "
        "calibration=calibrate(load_text_encoder(source, dtype='float32'), tokenizer(texts)).",
        stacklevel=4,
    )
    found = calibrate(exact, tokenizer(SENTENCES), dtype=dtype)
    return dataclasses.replace(found, source="this package's sentences")


def _read(
    path: Path, given: TextConfig | Mapping[str, Any] | None, family: str | None
) -> tuple[dict[str, Any], TextConfig]:
    """Reads the arrays of a text encoder in float32, and its config."""
    if is_npz(path):
        stated = hugging_face.text_config_of(given) if isinstance(given, Mapping) else given
        with open_npz(path) as arrays:
            return big_vision.read_text(arrays, stated)
    with open_safetensors(path) as arrays:
        if isinstance(given, TextConfig):
            config = given
        else:
            config = _config_of(json_beside(path) if given is None else given)
        if family not in (None, config.family):
            raise ValueError(
                f"it is a {TITLES[config.family]} text tower, expected {TITLES[family]}. Load it "
                "with pallas_patch_embed.load_text_encoder."
            )
        names = hugging_face.TEXT_NAMES[config.family]
        prefixes = names.prefixes(arrays.names)
        if len(prefixes) != 1:
            check_plain(arrays.names)
            raise ValueError(
                f"it has {len(prefixes)} arrays named {quoted(names.patch + 'weight')}, expected "
                f"one, of a {TITLES[config.family]} text tower in Hugging Face's layout."
            )
        tower = Tower(arrays, prefixes.pop())
        check_plain(tower.prefix + name for name in tower.names)
        return read_text_encoder(tower, names, config), config


def _config_of(described: Mapping[str, Any]) -> TextConfig:
    if {"architecture", "model_cfg"} & set(described):
        raise ValueError(
            "its layout is that of timm or open_clip, whose text towers are not supported. Use the "
            "same model in Hugging Face's layout."
        )
    return hugging_face.text_config_of(described)
