"""The pipeline on one machine, which decodes pictures ahead, embeds them and writes the output."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pallas_patch_embed.embed.decoders import Decoders
from pallas_patch_embed.embed.embedder import NOT_FINITE, Embedder
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.output import SAME_ID, Output
from pallas_patch_embed.embed.pictures import Budget
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.sources import Unit
from pallas_patch_embed.embed.units import Picture

# Number of batches on the devices at a time: while one is computed, the next is copied.
COMPUTED_AHEAD = 2

type Embedding = tuple[list[str], Callable[[], np.ndarray]]


def run(
    units: Iterable[Unit],
    embedder: Embedder,
    output: Output,
    progress: Progress,
    workers: int,
) -> None:
    """Embeds the pictures of all units that earlier runs have not embedded.

    Args:
      units: units of pictures.
      embedder: maps images to embeddings.
      output: output to which embeddings, and reasons for missing embeddings, are written.
      progress: the progress that every picture updates.
      workers: number of pictures that are decoded at a time.
    """
    embedding: collections.deque[Embedding] = collections.deque()

    def fail(id: str, why: str) -> None:
        output.fail(id, why)
        progress.failed(id, why)

    def start(batch: Sequence[str], decoded: Sequence[np.ndarray | str]) -> None:
        ids, images = [], []
        for id, image in zip(batch, decoded):
            if isinstance(image, str):
                fail(id, image)
            else:
                ids.append(id)
                images.append(image)
        if images:
            embedding.append((ids, embedder.start(images)))

    def finish_oldest() -> None:
        ids, finish = embedding.popleft()
        result = finish()
        finite = np.isfinite(result).all(1)
        output.add(list(itertools.compress(ids, finite)), result[finite])
        for id in itertools.compress(ids, ~finite):
            fail(id, NOT_FINITE)
        progress.embedded(int(finite.sum()))

    pictures = _new_pictures(units, output, progress, fail)
    with Decoders(embedder.preprocessing, workers, Budget(), embedder.rows) as decoders:
        for number, (batch, decoded) in enumerate(decoders.decode(pictures)):
            if number == 0 and not output.RESUMABLE:
                # If there are few pictures, a smaller program suffices. But a run that resumes an
                # output must use the program of the earlier run, so that results are rounded
                # equally.
                embedder.expect(len(batch))
            start([entry.id for entry in batch], decoded)
            if len(embedding) > COMPUTED_AHEAD:
                finish_oldest()
    while embedding:
        finish_oldest()


def _new_pictures(
    units: Iterable[Unit], output: Output, progress: Progress, fail: Callable[[str, str], None]
) -> Iterator[Picture]:
    """Yields the pictures that earlier runs have not written, each id once."""
    seen = Ids()
    for unit in units:
        for picture in unit.pictures():
            if output.is_done(picture.id):
                progress.skipped()
            elif seen.add(picture.id.encode()):
                yield picture
            else:
                fail(picture.id, SAME_ID)
