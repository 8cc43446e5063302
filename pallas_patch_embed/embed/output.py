"""Where embeddings go: what every kind of output has, and the settings that it records."""

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

SAME_ID = "another picture has this id"


class Output(Protocol):
    """What a run writes to.

    Attributes:
      CONTINUED: whether a later run may go on with it.
    """

    CONTINUED: bool

    def is_done(self, id: str) -> bool:
        """Whether an earlier run has written this picture."""

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Takes embeddings [n, D]."""

    def fail(self, id: str, reason: str) -> None:
        """Takes the reason why a picture has no embedding."""

    def finish(self) -> str:
        """Writes what is not written yet; returns where everything is, in words."""

    def __enter__(self) -> "Output": ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Keeps what can be kept after an error, and lets other runs write."""


def versions() -> dict[str, str]:
    """The versions of the packages that decide what embeddings are."""
    import PIL

    packages = ("pallas_patch_embed", "jax", "jaxlib", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    # Of Pillow what is imported, which may be Pillow-SIMD: a package with another name.
    return found | {"pillow": PIL.__version__}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run: two runs into one folder need the same.

    Attributes:
      checkpoint_sha256: of the checkpoint's files.
      preprocessing: size and resampling of pictures, in words.
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
    """The embeddings are not where they were asked for; the message says where they are."""


class UnfinishedError(Exception):
    """A folder could not be written to its end; the message says how to go on."""
