"""The protocol of an output for embeddings."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from pallas_patch_embed.embed.ledger import Ledger
    from pallas_patch_embed.embed.units import Entry

SAME_ID = (
    "another picture has this id; with --repeated-ids both are embedded, and the columns source "
    "and row tell them apart"
)

# The reason for which a picture that was changed is reported instead of embedded again.
IS_CHANGED = "it has changed since it was embedded"


class Output(Protocol):
    """An output to which a run writes.

    Attributes:
      ledger: what earlier runs have written.
      kept: types of the columns that are kept, by their names.
    """

    ledger: "Ledger"
    kept: dict[str, Any]

    def add(self, entries: "Sequence[Entry]", embeddings: Iterable[np.ndarray]) -> None:
        """Adds an embedding [D] or [h, w, D] for each picture."""

    def fail(self, entry: "Entry", reason: str) -> None:
        """Adds the reason why a picture has no embedding."""

    def finish(self) -> str:
        """Writes everything that is not yet written; returns a description of where it is."""

    def __enter__(self) -> "Output": ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Writes as much as possible after an error, and lets other runs write to the output."""


class WrittenElsewhereError(Exception):
    """The embeddings could not be written to --out; the message says where they are."""


class UnfinishedError(Exception):
    """A run could not finish its output; the message says how to resume it."""
