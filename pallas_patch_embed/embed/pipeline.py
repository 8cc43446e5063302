"""The pipeline on one machine, which decodes pictures ahead, embeds them and writes the output."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pallas_patch_embed.embed.changes import Changes
from pallas_patch_embed.embed.decoders import Decoders
from pallas_patch_embed.embed.embedder import NOT_FINITE, Embedder
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.ledger import State, key
from pallas_patch_embed.embed.options import Options, default_workers
from pallas_patch_embed.embed.output import SAME_ID, Output
from pallas_patch_embed.embed.pictures import Budget
from pallas_patch_embed.embed.preprocessing import Decoded
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.tables import with_kept
from pallas_patch_embed.embed.units import Entry, Picture, described

# Number of batches on the devices at a time: while one is computed, the next is copied.
COMPUTED_AHEAD = 2

type Embedding = tuple[list[Entry], Callable[[], np.ndarray]]


def run(
    pictures: Iterable[Picture],
    embedder: Embedder,
    output: Output,
    progress: Progress,
    options: Options,
) -> None:
    """Embeds the pictures that earlier runs have not embedded.

    Args:
      pictures: the pictures.
      embedder: maps images to embeddings.
      output: output to which embeddings, and reasons for missing embeddings, are written.
      progress: the progress that every picture updates.
      options: the options of the run.
    """
    embedding: collections.deque[Embedding] = collections.deque()

    def fail(entry: Entry, why: str) -> None:
        output.fail(entry, why)
        progress.failed(entry.id, why)

    def start(batch: Sequence[Entry], results: Sequence[Decoded | str]) -> None:
        entries, images = [], []
        for entry, result in zip(batch, results):
            if isinstance(result, str):
                fail(entry, result)
                continue
            progress.notes.update(result.notes)
            entries.append(described(entry, result.origin))
            images.append(result.image)
        if images:
            embedding.append((entries, embedder.start(images)))

    def finish_oldest() -> None:
        entries, finish = embedding.popleft()
        result = finish()
        finite = np.isfinite(result).all(1)
        output.add(list(itertools.compress(entries, finite)), result[finite])
        for entry in itertools.compress(entries, ~finite):
            fail(entry, NOT_FINITE)
        progress.embedded(int(finite.sum()))

    new = _new_pictures(pictures, output, progress, fail, Changes.of(options))
    workers = options.workers or default_workers()
    with Decoders(embedder.preprocessing, workers, Budget(), embedder.rows) as decoders:
        for batch, results in decoders.decode(new):
            start(batch, results)
            if len(embedding) > COMPUTED_AHEAD:
                finish_oldest()
    while embedding:
        finish_oldest()


def _new_pictures(
    pictures: Iterable[Picture],
    output: Output,
    progress: Progress,
    fail: Callable[[Entry, str], None],
    changes: Changes,
) -> Iterator[Picture]:
    """Yields the pictures that are to be embedded, each one once."""
    ledger, met = output.ledger, Ids()
    for picture in changes.looked_up(pictures):
        entry = picture.entry
        if not met.add(key(entry)):
            continue  # It was named twice.
        state = ledger.state(entry)
        if state is State.CHANGED and not changes.embedded:
            progress.has_changed(entry.id)
        elif state in (State.DONE, State.FAILED):
            progress.skipped(failed=state is State.FAILED)
        elif (admitted := ledger.admitted(entry, state)) is None:
            if ledger.waits_for_change(entry):
                progress.has_changed(entry.id)
            else:
                fail(entry, SAME_ID)
        else:
            picture = picture._replace(id=admitted.id)
            yield with_kept(picture, output.kept) if output.kept else picture
