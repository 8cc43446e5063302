"""The pipeline on one machine, which decodes pictures ahead, embeds them and writes the output."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pallas_patch_embed.embed.changes import Changes
from pallas_patch_embed.embed.decoders import Decoders, batches_in_memory
from pallas_patch_embed.embed.embedder import Embedder, why_not_written
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.ledger import State, key
from pallas_patch_embed.embed.options import Options, default_workers
from pallas_patch_embed.embed.output import SAME_ID, Output
from pallas_patch_embed.embed.pictures import Budget
from pallas_patch_embed.embed.preprocessing import Decoded
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.resizing import HELD, largest_whole
from pallas_patch_embed.embed.tables import with_kept
from pallas_patch_embed.embed.text_embedder import AnyEmbedder, TextEmbedder, Tokenizing
from pallas_patch_embed.embed.units import Entry, Picture, described

# Number of batches on the devices at a time: while one is computed, the next is copied.
COMPUTED_AHEAD = 2

type Embedding = tuple[list[Entry], Callable[[], np.ndarray]]


def run(
    pictures: Iterable[Picture],
    embedder: AnyEmbedder,
    output: Output,
    progress: Progress,
    options: Options,
) -> None:
    """Embeds the pictures that earlier runs have not embedded.

    Args:
      pictures: the pictures, or texts.
      embedder: maps images or tokenized texts to embeddings.
      output: output to which embeddings, and reasons for missing embeddings, are written.
      progress: the progress that every picture updates.
      options: the options of the run.
    """
    embedding: collections.deque[Embedding] = collections.deque()
    waiting: list[tuple[Entry, Decoded]] = []
    # Pictures whose sizes decide how many of them a step embeds are collected until it is full.
    packing = None
    if isinstance(embedder, Embedder) and embedder.row is not None:
        packing = embedder

    def fail(entry: Entry, why: str) -> None:
        output.fail(entry, why)
        progress.failed(entry.id, why)

    def receive(batch: Sequence[Entry], results: Sequence[Decoded | str]) -> None:
        for entry, result in zip(batch, results):
            if isinstance(result, str):
                fail(entry, result)
                continue
            progress.notes.update(result.notes)
            if packing is not None:  # It may wait for the next batch, whose images replace it.
                result = result._replace(image=result.image.copy())
            waiting.append((described(entry, result.origin), result))

    def start(last: bool) -> None:
        """Starts to embed the pictures that wait, except for less than a step before the last."""
        while waiting:
            images = [decoded.image for _, decoded in waiting]
            number = len(images) if packing is None else packing.fitting(images)
            if packing is not None and number == len(images) and not last:
                return
            entries = [entry for entry, _ in waiting[:number]]
            if isinstance(embedder, TextEmbedder):
                finish = embedder.start(images)
            else:
                whole = [decoded.whole for _, decoded in waiting[:number]]
                finish = embedder.start(images[:number], whole)
            embedding.append((entries, finish))
            del waiting[:number]

    def finish_oldest() -> None:
        entries, finish = embedding.popleft()
        result = finish()
        reasons = [""] * len(entries)
        if result.dtype == object or why_not_written(result, options.embedding_dtype):
            reasons = [why_not_written(each, options.embedding_dtype) for each in result]
        good = [not why for why in reasons]
        output.add(list(itertools.compress(entries, good)), list(itertools.compress(result, good)))
        for entry, why in zip(entries, reasons):
            if why:
                fail(entry, why)
        progress.embedded(sum(good))

    new = _new_pictures(pictures, output, progress, fail, Changes.of(options))
    decoding: Decoders | Tokenizing
    resizer = None
    if isinstance(embedder, TextEmbedder):
        decoding = Tokenizing(embedder.tokenizer, embedder.rows)
    else:
        workers, preprocessing = options.workers or default_workers(), embedder.preprocessing
        held = 0
        resizer = embedder.resizer
        if resizer is not None:
            held = HELD
            batches = batches_in_memory(workers, embedder.rows, held)
            preprocessing = dataclasses.replace(
                preprocessing, whole=largest_whole(batches * embedder.batch)
            )
        decoding = Decoders(preprocessing, workers, Budget(), embedder.rows, held)
    with decoding as decoders:
        for batch, results in decoders.decode(new):
            receive(batch, results)
            start(last=False)
            if resizer is not None:
                resizer.copied()
            while len(embedding) > COMPUTED_AHEAD:
                finish_oldest()
    start(last=True)
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
        # Pictures that this run has written were met before.
        state = ledger.state(entry) if ledger.has_earlier else State.NEW
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
            if admitted.id != picture.id:
                picture = picture._replace(id=admitted.id)
            yield with_kept(picture, output.kept) if output.kept else picture
