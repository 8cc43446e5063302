"""Loads text encoders, and the scale and bias of similarities, from the files of `load_encoder`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_patch_embed.base.dtypes import OUT_DTYPES
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders import big_vision, hugging_face
from pallas_patch_embed.encoders.arrays import (
    Tower,
    check_plain,
    is_npz,
    open_npz,
    open_safetensors,
)
from pallas_patch_embed.encoders.checkpoint import TITLES, cast, given_config, json_beside
from pallas_patch_embed.encoders.config import TextConfig
from pallas_patch_embed.encoders.hub import find_checkpoint
from pallas_patch_embed.encoders.names import read_text_encoder
from pallas_patch_embed.encoders.text_encoder import TextEncoder
from pallas_patch_embed.patch_embedding.params import check_dtype

# A config as the user may give it.
type GivenConfig = TextConfig | Mapping[str, Any] | str | os.PathLike[str]


def load_text_encoder(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    config: GivenConfig | None = None,
) -> TextEncoder:
    """Loads the text encoder of a SigLIP, SigLIP2 or CLIP checkpoint.

    It is the counterpart of `load_encoder`: both read their towers from the same file. The layouts
    are Hugging Face's and, for SigLIP, big_vision's .npz files.

    Args:
      source: the folder, file or name on the Hugging Face hub, as for `load_encoder`.
      dtype: dtype of all layers: "bfloat16" or "float32".
      config: replacement for the config.json: a TextConfig, the contents of a config.json, or its
        path. Big_vision's arrays need none.

    Returns:
      TextEncoder.

    Raises:
      FileNotFoundError, OSError, TypeError, ValueError: as for `load_encoder`.
    """
    return _load(source, dtype, config, None)


def load_siglip_text(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    config: GivenConfig | None = None,
) -> TextEncoder:
    """Loads the text encoder of a SigLIP or SigLIP2 checkpoint, and refuses others.

    Otherwise it is `pallas_patch_embed.load_text_encoder`, with the same arguments and exceptions.
    """
    return _load(source, dtype, config, "siglip")


def _load(
    source: str | os.PathLike[str],
    dtype: DTypeLike,
    config: GivenConfig | None,
    family: str | None,
) -> TextEncoder:
    dtype = check_dtype(dtype, "dtype", OUT_DTYPES)
    path = find_checkpoint(os.fspath(source))
    try:
        weights, found = _read(path, given_config(config, TextConfig), family)
    except ValueError as error:
        raise ValueError(f"load_text_encoder: {str(path)!r}: {error}") from error
    positions = jax.device_put(weights.pop("positions"))
    parts: dict[str, Any] = {
        name: None if part is None else cast(part, dtype) for name, part in weights.items()
    }
    return TextEncoder(positions=positions, config=found, dtype=dtype, **parts)


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
