"""Embedding on a Ray cluster: tasks read, decode and write on CPUs, an `Embedder` runs on each GPU.

Any process may be killed. A task writes its result to a file that readers ignore. The driver gets
each result once, and turns the file into a shard. If Ray repeats a task, the task writes another
file, and the driver uses only one of the two. If the driver is killed, the same command starts a
new driver, which resumes the work by the ids in the shards.
"""

import collections
import importlib.util
import logging
import math
import pickle
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallas_patch_embed.base.child import safe_paths
from pallas_patch_embed.base.files import new_partial
from pallas_patch_embed.embed.changes import Changes
from pallas_patch_embed.embed.embedder import (
    BATCH,
    BATCH_ON_CPU,
    Embedder,
    column,
    why_not_written,
)
from pallas_patch_embed.embed.folder import EMBEDDINGS, ERRORS, SHARD_BYTES, SHARD_ROWS, Folder
from pallas_patch_embed.embed.ledger import Snapshot, State
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.output import IS_CHANGED
from pallas_patch_embed.embed.parquet import pictures_of
from pallas_patch_embed.embed.pictures import quiet, reason
from pallas_patch_embed.embed.place import place_of
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.sources import Unit
from pallas_patch_embed.embed.tables import embeddings_table, errors_table, parquet_bytes, with_kept
from pallas_patch_embed.embed.units import (
    Content,
    Entry,
    Files,
    Picture,
    SourceEndsError,
    described,
    unreadable,
)

# Number of pictures in a block, unless the user chose the batch of an actor, and number of bytes of
# its encoded pictures. It is the batch of a GPU. A batch of a CPU is too small for a block: every
# block is a task.
BLOCK, BLOCK_BYTES = BATCH, 2**27

# Beginning of the reason in a row that is no picture, but has numbers of pictures.
COUNTED = "\0"

# Type of a picture that was read, as in the columns of `Read`.
type Row = tuple[bytes, bytes, tuple[int, ...], str, str]


class Read:
    """Reads units of pictures, and leaves out the pictures that earlier runs have written.

    It maps a batch {"unit": pickled units} to batches {"entry", "content", "shape", "failed",
    "notes"}. `entry` is a pickled `Entry`. The contents of a batch have a limited size: when it is
    reached, pictures are decoded here. `shape` is (height, width) if `content` is a decoded
    picture, otherwise (0, 0). `notes` are those of `Decoded`, in lines.

    Args:
      done: reference to a `Snapshot` of the pictures that earlier runs have written.
      changes: what happens with pictures that have changed since.
      kept: types of the columns that are kept.
      rows: number of pictures in a batch that it yields.
      preprocessing: the conversion of pictures to images.
    """

    def __init__(
        self,
        done: Any,
        changes: Changes,
        kept: dict[str, Any],
        rows: int,
        preprocessing: Preprocessing,
    ):
        self._done, self._changes, self._kept = done, changes, kept
        self._rows, self._preprocessing = rows, preprocessing

    def __call__(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        import ray

        done = ray.get(self._done)
        for pickled in batch["unit"]:
            unit: Unit = ray.cloudpickle.loads(pickled)
            counted: collections.Counter[State] = collections.Counter()
            new = self._new_pictures(pictures_of(unit), done, counted)
            while block := self._block(new):
                yield _columns(block)
            # A row tells the driver how many pictures of the unit earlier runs had written.
            counts = f"{COUNTED}{counted[State.DONE]} {counted[State.FAILED]}"
            yield _columns([(pickle.dumps(Entry("")), b"", (0, 0), counts, "")])

    def _new_pictures(
        self, pictures: Iterator[Picture], done: Snapshot, counted: collections.Counter[State]
    ) -> Iterator[Picture]:
        for picture in self._changes.looked_up(pictures):
            state = done.state(picture.entry)
            counted[state] += 1
            if state is State.CHANGED and not self._changes.embedded:
                yield unreadable(picture.id, IS_CHANGED, picture.origin)
            elif state in (State.NEW, State.CHANGED):
                yield with_kept(picture, self._kept) if self._kept else picture

    def _block(self, pictures: Iterator[Picture]) -> list[Row]:
        """Reads pictures, and decodes those for which there is no room in a block."""
        rows: list[Row] = []
        room = BLOCK_BYTES
        for picture in pictures:
            content, shape, failure, entry = b"", (0, 0), "", picture.entry
            notes: tuple[str, ...] = ()
            try:
                with picture.open(math.inf) as file:
                    content = file.read()
                    entry = described(entry, getattr(file, "origin", None))
                if len(content) > room:
                    with quiet():
                        decoded = self._preprocessing.decode(Content(content))
                    image, notes = decoded.image, decoded.notes
                    content, shape = image.tobytes(), image.shape[:2]
            except SourceEndsError:
                continue
            except Exception as error:
                content, failure = b"", reason(error)
            room -= len(content)
            rows.append((pickle.dumps(entry), content, shape, failure, "\n".join(notes)))
            if len(rows) == self._rows:
                break
        return rows


def _columns(rows: list[Row]) -> dict[str, Any]:
    entries, contents, shapes, failures, notes = zip(*rows)
    return {
        "entry": np.array(entries, object),
        "content": np.array(contents, object),
        "shape": np.array(shapes),
        "failed": np.array(failures, object),
        "notes": np.array(notes, object),
    }


class Decode:
    """Decodes pictures that `Read` has read.

    It maps its batches to {"entry", "image", "reason", "notes"}.
    """

    def __init__(self, preprocessing: Preprocessing):
        self._preprocessing = preprocessing

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"entry": batch["entry"], "image": [], "reason": [], "notes": []}
        for content, shape, failure, noted in zip(
            batch["content"], batch["shape"], batch["failed"], batch["notes"]
        ):
            image, why, notes = self._preprocessing.black(), str(failure), str(noted)
            if any(shape):
                image = np.frombuffer(content, np.uint8).reshape(*shape, 3)
            elif not why:
                try:
                    with quiet():
                        decoded = self._preprocessing.decode(Content(content))
                    image, notes = decoded.image, "\n".join(decoded.notes)
                except Exception as error:  # Pillow raises many kinds of errors.
                    why = reason(error)
            result["image"].append(image)
            result["reason"].append(why)
            result["notes"].append(notes)
        result["image"] = column(result["image"])
        return result


class Write:
    """Writes files that are not yet shards.

    It maps a batch {"entry", "embedding", "reason", "notes"} to {"part", "name", "notes"} of the
    files. If the part is "", the others are the numbers of pictures that earlier runs had embedded
    and had not been able to embed.

    Args:
      url: URL or path of the output.
      dtype: dtype of the embeddings.
      kept: types of the columns that are kept.
      about: what the metadata of the files say about the run.
    """

    def __init__(self, url: str, dtype: str, kept: dict[str, Any], about: dict[str, Any]):
        self._url, self._dtype, self._kept, self._about = url, dtype, kept, about

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        place = place_of(self._url)
        reasons = [
            str(why) or why_not_written(np.asarray(embedding), self._dtype)
            for why, embedding in zip(batch["reason"], batch["embedding"])
        ]
        good = [i for i, why in enumerate(reasons) if not why]
        bad = [i for i, why in enumerate(reasons) if why and not why.startswith(COUNTED)]
        counts = [why.removeprefix(COUNTED).split() for why in reasons if why.startswith(COUNTED)]
        entries: list[Entry] = [pickle.loads(entry) for entry in batch["entry"]]
        result: dict[str, list[str]] = {
            "part": [""] * len(counts),
            "name": [done for done, _ in counts],
            "notes": [failed for _, failed in counts],
        }

        def write(part: str, table: Any, notes: str) -> None:
            name = new_partial()
            place.write(name, parquet_bytes(table, self._about))
            for values, value in zip(result.values(), (part, name, notes)):
                values.append(value)

        if good:
            rows = [np.asarray(batch["embedding"][i]).astype(self._dtype) for i in good]
            table = embeddings_table([entries[i] for i in good], rows, self._kept)
            write(EMBEDDINGS, table, "\n".join(str(batch["notes"][i]) for i in good))
        if bad:
            write(ERRORS, errors_table([(entries[i], reasons[i]) for i in bad]), "")
        return result


def connect(address: str) -> None:
    """Connects this process to a Ray cluster. The address "local" starts one on this machine.

    Raises:
      ValueError: Ray is not installed, or there is no cluster at the address.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "--ray needs Ray, which is not installed. Install it with: pip install "
            "'pallas_patch_embed[ray]'."
        )
    import ray

    if ray.is_initialized():
        return
    if place := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address):
        # Ray itself would try to connect for minutes.
        try:
            socket.create_connection((place[1], int(place[2])), timeout=10).close()
        except OSError as error:
            raise ValueError(
                f"--ray is {address}: nothing answers there ({error.strerror or error}). Start a "
                "cluster with `ray start --head`, or leave out the address to use this machine."
            ) from None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with safe_paths():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.WARNING,
                job_config=_job_config(),
            )
    except ConnectionError as error:
        raise ValueError(f"--ray is {address}: {error}") from error
    for number, handler in handlers.items():
        # Ray has installed its own handlers. They are replaced by the handlers of the command,
        # which say how to resume the work.
        signal.signal(number, handler)


def _job_config() -> Any:
    """Returns a configuration with which workers import nothing from the current folder.

    Otherwise Ray puts the driver's current folder in front of the workers' module search path. It
    does so unless the job has a working directory of its own.
    """
    from ray.job_config import JobConfig

    config = JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return config


def run(
    units: list[Unit],
    checkpoint: str,
    encoder_options: dict[str, Any],
    embedder_for: Callable[[str, dict[str, Any]], Embedder],
    output_for: Callable[[Embedder], Folder],
    progress: Progress,
    options: Options,
) -> str:
    """Embeds the pictures of all units on a cluster.

    Args:
      units: units of pictures. They and the checkpoint must have the same paths on all nodes.
      checkpoint: as for `Embedder`.
      encoder_options: further arguments of `Embedder`.
      embedder_for: function that makes the embedder for a checkpoint and such arguments.
      output_for: function that makes the output for an embedder.
      progress: the progress that every shard updates.
      options: the options of the run, with the address of the cluster.

    Returns:
      A description of where the shards are.

    Raises:
      ValueError: there is no such cluster.
    """
    assert options.ray is not None
    connect(options.ray)
    if encoder_options["batch"] is None:  # The output records it, so all runs have the same one.
        encoder_options = encoder_options | {"batch": BATCH if _gpus() else BATCH_ON_CPU}
    # The driver uses this embedder only for its attributes, and leaves the GPUs to the actors.
    jax.config.update("jax_platforms", "cpu")
    embedder = embedder_for(checkpoint, encoder_options)
    block = options.batch or BLOCK
    # A task has the embeddings of a shard in memory.
    rows = min(SHARD_ROWS, max(1, SHARD_BYTES // embedder.most_bytes))
    with output_for(embedder) as output:
        arguments = (checkpoint, encoder_options, embedder.preprocessing, block, rows)
        _fill(output, units, *arguments, Changes.of(options), progress)
        return output.finish()


def _gpus() -> int:
    """Returns the number of GPUs of the cluster. If there are any, each has an actor."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _fill(
    output: Folder,
    units: list[Unit],
    checkpoint: str,
    encoder_options: dict[str, Any],
    preprocessing: Preprocessing,
    block: int,
    rows: int,
    changes: Changes,
    progress: Progress,
) -> None:
    """Runs the pipeline on the cluster and turns its results into shards.

    Args:
      preprocessing: the embedder's.
      block: number of pictures in a block.
      rows: largest number of pictures in a shard.

    The other arguments are those of `run`.
    """
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    done = output.ledger.snapshot()
    if all(isinstance(unit, Files) for unit in units):
        progress.total = sum(len(unit.files) for unit in units if isinstance(unit, Files))
    gpus = _gpus()
    cpus = int(ray.cluster_resources().get("CPU", 1))
    output_files = Write(output.url, output.embedding_dtype, output.kept, output.about)
    written = (
        # Every unit is a block, and every batch of pictures is a block. By default Ray would make a
        # single block of a small input, which one task reads and one actor embeds. `repartition`
        # also prevents Ray from fusing steps, by which the actors on GPUs would decode pictures.
        ray.data.from_items(
            [{"unit": ray.cloudpickle.dumps(unit)} for unit in units],
            override_num_blocks=len(units),
        )
        .map_batches(
            Read(ray.put(done), changes, output.kept, block, preprocessing),
            batch_size=1,
            num_cpus=1,
        )
        .repartition(target_num_rows_per_block=block)
        .map_batches(Decode(preprocessing), batch_size=block, num_cpus=1)
        .repartition(target_num_rows_per_block=block)
        .map_batches(
            Embedder,
            fn_constructor_args=[checkpoint],
            fn_constructor_kwargs=encoder_options,
            batch_size=block,
            num_gpus=1 if gpus else 0,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=gpus or max(1, cpus // 4)),
        )
        .map_batches(output_files, batch_size=rows, num_cpus=0.1)
    )
    for row in written.iter_rows():
        if not row["part"]:
            progress.before += int(row["name"])
            progress.failed_before += int(row["notes"])
            continue
        progress.notes.update(filter(None, row["notes"].split("\n")))
        for entry, why in output.commit(row["part"], row["name"]):
            if why == IS_CHANGED:
                progress.has_changed(entry.id)
            elif why:
                progress.failed(entry.id, why)
            else:
                progress.embedded(1)
    output.remove_partials()
