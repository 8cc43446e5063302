"""The protocol of an output for embeddings, and the settings that it records."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

import pallas_patch_embed

SAME_ID = "another picture has this id"


class Output(Protocol):
    """An output to which a run writes.

    Attributes:
      RESUMABLE: whether a later run can resume it.
    """

    RESUMABLE: bool

    def is_done(self, id: str) -> bool:
        """Returns whether an earlier run has written this picture."""

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Adds embeddings [n, D]."""

    def fail(self, id: str, reason: str) -> None:
        """Adds the reason why a picture has no embedding."""

    def finish(self) -> str:
        """Writes everything that is not yet written; returns a description of where it is."""

    def __enter__(self) -> "Output": ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Writes as much as possible after an error, and lets other runs write to the output."""


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


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that affect embeddings. All runs into one folder must have the same settings.

    Attributes:
      checkpoint_sha256: hash of the checkpoint's files.
      preprocessing: description of the size and the resampling of pictures.
      patch_dtype: dtype of the patch embedding.
      normalize: whether embeddings are divided by their norm.
      embedding_dtype: dtype of the embeddings that are written, "float32" or "float16".
    """

    checkpoint_sha256: str
    preprocessing: str
    patch_dtype: str
    normalize: bool
    embedding_dtype: str


class WrittenElsewhereError(Exception):
    """The embeddings could not be written to --out; the message says where they are."""


class UnfinishedError(Exception):
    """A run could not finish its output; the message says how to resume it."""
