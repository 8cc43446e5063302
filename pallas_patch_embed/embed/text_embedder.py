"""Embeds texts with the text encoder of a checkpoint."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_patch_embed.base.chips import cuda_is_installed
from pallas_patch_embed.embed.embedder import Embedder, batch_on_devices, normalized
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.preprocessing import Decoded
from pallas_patch_embed.embed.units import Entry, Picture, SourceEndsError
from pallas_patch_embed.encoders.calibration import Calibration
from pallas_patch_embed.encoders.program import BY_CUBLAS
from pallas_patch_embed.encoders.text_checkpoint import load_text_encoder
from pallas_patch_embed.encoders.text_encoder import TextEncoder
from pallas_patch_embed.encoders.tokenizer import Tokenizer, load_tokenizer

# Patterns of the files of a model on the Hugging Face hub that embed texts.
FILES = ("*.json", "*.safetensors", "spiece.model")

type AnyEmbedder = Embedder | TextEmbedder


class TextEmbedder:
    """Maps tokenized texts to the vectors that are compared with those of pictures.

    Args:
      checkpoint: path of the checkpoint, with its tokenizer.
      dtype, calibration, min_cosine: as for `load_text_encoder`.
      normalize: whether each vector is divided by its Euclidean norm.
      batch: number of texts that one device computes at a time, as for `Embedder`.

    Attributes:
      encoder: the encoder, replicated on all devices of this process.
      tokenizer: the tokenizer.
      preprocessing: a description of the tokenizer.
      width: D, the width of an embedding.
      batch, rows, device_kind: as for `Embedder`.

    Raises:
      OSError, ValueError: the checkpoint cannot be loaded, or its texts are not projected.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: str = "bfloat16",
        calibration: Calibration | str | os.PathLike[str] | None = None,
        min_cosine: float | None = None,
        normalize: bool = False,
        batch: int | None = None,
    ):
        encoder = load_text_encoder(
            checkpoint, dtype=dtype, calibration=calibration, min_cosine=min_cosine
        )
        self.tokenizer = load_tokenizer(checkpoint)
        self.preprocessing = f"{self.tokenizer.length} tokens"
        if encoder.projection is None:
            raise ValueError(
                f"{str(checkpoint)!r} has no projection of texts, so they cannot be compared with "
                "pictures. Use a checkpoint of the whole model, with both towers."
            )
        self.width = encoder.projection["kernel"].shape[1]
        self._normalize = normalize
        mesh, self.batch = batch_on_devices(batch)
        self.rows = self.batch * mesh.size
        self.device_kind = mesh.devices.flat[0].device_kind
        split, everywhere = PartitionSpec("batch"), PartitionSpec()
        self._split = NamedSharding(mesh, split)
        self.encoder: TextEncoder = jax.device_put(encoder, NamedSharding(mesh, everywhere))
        self._compute = jax.jit(
            jax.shard_map(_embeds, mesh=mesh, in_specs=(everywhere, split), out_specs=split),
            compiler_options=BY_CUBLAS if cuda_is_installed() else None,
        )

    def start(self, ids: Sequence[np.ndarray] | np.ndarray) -> Callable[[], np.ndarray]:
        """Starts to embed n <= `rows` texts, each [L] from the tokenizer.

        Returns:
          A function that waits for the embeddings and returns them, [n, D] float32.
        """
        padded = np.stack([*ids, *[ids[0]] * (self.rows - len(ids))])
        computed = self._compute(self.encoder, jax.device_put(padded, self._split))

        def finish() -> np.ndarray:
            result = np.asarray(computed[: len(ids)], np.float32)
            return normalized(result) if self._normalize else result

        return finish


def _embeds(encoder: TextEncoder, ids: jax.Array) -> jax.Array:
    embeds = encoder(ids).text_embeds
    assert embeds is not None  # TextEmbedder refuses encoders without a projection.
    return embeds


class Tokenizing:
    """Reads and tokenizes texts, in the place of `Decoders`.

    Args:
      tokenizer: the tokenizer.
      rows: largest number of texts in a batch.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int):
        self._tokenizer, self._rows = tokenizer, rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def decode(self, texts: Iterable[Picture]) -> Iterator[tuple[list[Entry], list[Decoded | str]]]:
        """Yields batches of entries with their ids [L], or the reasons why there are none."""
        entries: list[Entry] = []
        contents: list[bytes | str] = []
        for text in texts:
            try:
                with text.open(math.inf) as file:
                    contents.append(file.read())
            except SourceEndsError:
                continue
            except Exception as error:  # Each package for URLs has its own kinds of errors.
                contents.append(reason(error))
            entries.append(text.entry)
            if len(entries) == self._rows:
                yield entries, self._tokenized(contents)
                entries, contents = [], []
        if entries:
            yield entries, self._tokenized(contents)

    def _tokenized(self, contents: Sequence[bytes | str]) -> list[Decoded | str]:
        """Tokenizes UTF-8; what is no bytes is the reason why there is no text."""
        found: list[Decoded | str] = []
        for content in contents:
            if isinstance(content, str):
                found.append(content)
                continue
            try:
                (ids,) = self._tokenizer([content.decode()])
            except UnicodeDecodeError:
                found.append("it is not UTF-8")
            else:
                found.append(Decoded(ids))
        return found
