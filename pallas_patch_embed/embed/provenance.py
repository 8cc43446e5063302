"""What decides the bits of embeddings, for the records of an output."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pallas_patch_embed
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.base.problem import LEVELS
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.encoders.calibration import FILES, AnyEncoder
from pallas_patch_embed.encoders.encoder import dtype_in_8_bits

# The version of the arithmetic of each patch dtype. A change of the bits of the embeddings, other
# than by the rounding of another compiler or device, gets a new number. Embeddings with different
# numbers are not mixed in one folder. 2: int8 and float8 weights are rounded with error feedback.
ARITHMETIC = {"float32": 1, "bfloat16": 1, "float8_e4m3fn": 2, "int8": 2}

# The same for the dense layers of encoders in 8 bits. It is part of the hash of their scales.
ARITHMETIC_IN_8_BITS = 1

# The files in the folder of a checkpoint that decide the embeddings, besides the weights.
DECIDING = (
    "config.json",
    "open_clip_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)

# Those that decide the embeddings of texts.
DECIDING_TEXTS = (
    "config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
)

# Largest number of other JSON files that may have been added since an earlier version computed its
# hash, which depended on all JSON files.
MOST_OTHERS = 12


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that decide what shards contain. All runs into one folder have the same ones.

    Attributes:
      checkpoint_sha256: hash of the checkpoint's files.
      preprocessing: description of the size and the resampling of pictures.
      patch_dtype: dtype of the patch embedding.
      normalize: whether the vectors of embeddings are divided by their norms.
      embedding_dtype: dtype of the embeddings that are written, "float32" or "float16".
      image_column: column of parquet files with the pictures; None for the only one.
      keep: names of the columns that are carried into the shards.
      arithmetic: version of the arithmetic, from ARITHMETIC.
      output: what an embedding is, as for `Embedder`.
      tower: "vision" for embeddings of pictures, or "text".
      text_column: column of parquet files with the texts; None for the only one.
      packed: whether the patches of pictures are packed, as those of NaFlex encoders are.
      dtype: dtype of the encoder's dense layers.
      calibration_sha256: hash of the file of the calibration; None if no layer is in 8 bits.
      min_cosine: the mean cosine to float32 for which layers stay in bfloat16; None for the layers
        that stay by default.
      scales_sha256: hash of the scales, from `scales_sha256`; None if no layer is in 8 bits.
    """

    checkpoint_sha256: str
    preprocessing: str
    patch_dtype: str
    normalize: bool
    embedding_dtype: str
    image_column: str | None = None
    keep: list[str] = dataclasses.field(default_factory=list)
    arithmetic: int = 1
    output: str = "pooled"
    tower: str = "vision"
    text_column: str | None = None
    packed: bool = False
    dtype: str = "bfloat16"
    calibration_sha256: str | None = None
    min_cosine: float | None = None
    scales_sha256: str | None = None


# The settings that may be null, with their other types.
NULLABLE: dict[str, type] = {
    "image_column": str,
    "text_column": str,
    "calibration_sha256": str,
    "min_cosine": float,
    "scales_sha256": str,
}

# Settings that manifests of an earlier version lack, with the values that they had then.
ABSENT: dict[str, Any] = {
    "keep": [],
    "arithmetic": 1,
    "output": "pooled",
    "tower": "vision",
    "text_column": None,
    "packed": False,
    "dtype": "bfloat16",
    "calibration_sha256": None,
    "min_cosine": None,
    "scales_sha256": None,
}


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scales_sha256(encoder: AnyEncoder) -> str | None:
    """Returns a hash of what an encoder in 8 bits rounds with; None for other encoders.

    It is that of the smoothed norms, and of the scales and levels of the layers that are in 8 bits,
    with their names. They follow from checkpoint, calibration and `min_cosine` by operations whose
    results are the same on every machine. The weights are left out: they are in the calibration's
    file, whose hash is recorded, too.
    """
    if not isinstance(encoder.blocks, tuple):
        return None
    whole = hashlib.sha256(f"{ARITHMETIC_IN_8_BITS}\n".encode())
    for run in encoder.blocks:
        for layer, p in sorted(run.items()):
            if "weight" in p and not dtype_in_8_bits(p):
                continue
            for name in sorted({"scale", *LEVELS} & p.keys()):
                whole.update(f"{layer} {name} {p[name].shape}\n".encode())
                whole.update(np.asarray(p[name], np.float32).tobytes())
    return whole.hexdigest()


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describes how the settings in a manifest differ from the wanted ones; "" if they do not."""
    changes = []
    for name, value in wanted.items():
        if (was := found.get(name)) == value:
            continue
        if name == "arithmetic":
            changes.append(
                "this version of the package computes other embeddings with weights in "
                f"{wanted['patch_dtype']}, which it does not mix with earlier ones"
            )
        elif name == "packed" and value:
            changes.append(
                "this version of the package packs NaFlex pictures, and does not mix their "
                "embeddings with those of pictures that were padded, which may be rounded "
                "differently"
            )
        else:
            changes.append(f"{name} was {quoted(was)} and is now {quoted(value)}")
    return "; ".join(changes)


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect embeddings.

    They are those of the imported modules, which need no metadata of an installation. Pillow may be
    Pillow-SIMD's.
    """
    import jax
    import jaxlib
    import PIL

    modules = {"jax": jax, "jaxlib": jaxlib, "numpy": np, "pillow": PIL}
    found = {name: str(module.__version__) for name, module in modules.items()}
    return {"pallas_patch_embed": pallas_patch_embed.__version__} | found


def checkpoint_files(checkpoint: Path, deciding: Sequence[str] = DECIDING) -> list[Path]:
    """Returns the weights, the JSON files and the deciding files of a checkpoint, sorted.

    A calibration in its folder is none of them, because it does not change other encoders.
    Of a checkpoint that is a file they are this file, and those in its folder that decide.
    """
    if not checkpoint.is_dir():
        beside = (checkpoint.parent / name for name in deciding)
        return sorted(path for path in {checkpoint, *beside} if path.is_file())
    kinds = ("*.json", "*.safetensors", *deciding)
    found = {path for kind in kinds for path in checkpoint.glob(kind)}
    return sorted(path for path in found if path.is_file() and path.name not in FILES.values())


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where the embeddings of a run come from, for the records of an output.

    Attributes:
      model: name of the checkpoint, as the user gave it.
      settings: the settings of the run.
      options: all options of the run.
      batch: number of pictures that a device computes at a time, which affects rounding.
      device: kind of the device; None if it is not known.
      recognizes: function that tells whether a hash in a manifest is that of this checkpoint.
      packed_row: the tokens and places of a device's row of NaFlex pictures, which affect rounding,
        too; None for other encoders.
      simplejpeg: version of simplejpeg, which decodes JPEG pictures that the device resizes; None
        if it is not used.
    """

    model: str
    settings: Settings
    options: Options
    batch: int
    device: str | None
    recognizes: Callable[[str], bool]
    packed_row: dict[str, int] | None = None
    simplejpeg: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that is recorded."""
        decoder = {} if self.simplejpeg is None else {"simplejpeg": self.simplejpeg}
        return {
            "model": self.model,
            "settings": dataclasses.asdict(self.settings),
            "options": dataclasses.asdict(self.options),
            "batch": self.batch,
            "packed_row": self.packed_row,
            "device": self.device,
            "versions": versions() | decoder,
        }


class CheckpointHash:
    """The SHA-256 of the names and contents of a checkpoint's files.

    Only files that decide the embeddings count: for pictures a tokenizer beside them does not.

    Args:
      checkpoint: path of the checkpoint.
      deciding: the files that decide, besides the weights: DECIDING or DECIDING_TEXTS.

    Attributes:
      sha256: the hash in hexadecimal digits.
    """

    def __init__(self, checkpoint: Path, deciding: Sequence[str] = DECIDING):
        self._digests = {}
        for path in checkpoint_files(checkpoint, deciding):
            self._digests[path.name] = file_sha256(path)
        others = [name for name in self._digests if name.endswith(".json")]
        self._in_file = None if checkpoint.is_dir() else self._without(others)
        self._others = [name for name in others if name not in deciding]
        self.sha256 = self._without(self._others)

    def _without(self, others: Any) -> str:
        whole = hashlib.sha256()
        for name, digest in self._digests.items():
            if name not in others:
                whole.update(f"{name} {digest}\n".encode())
        return whole.hexdigest()

    def is_that_of(self, sha256: str) -> bool:
        """Returns whether this or an earlier version computed the hash from the same checkpoint.

        Earlier versions hashed all JSON files in a folder, to which some may have been added since,
        and of a checkpoint that is a file no JSON file.
        """
        return sha256 in (self.sha256, self._in_file) or sha256 in self._earlier()

    def _earlier(self) -> Iterator[str]:
        if len(self._others) <= MOST_OTHERS:
            for n in range(len(self._others)):
                yield from map(self._without, itertools.combinations(self._others, n))
