"""Embedding on a Ray cluster: tasks read, decode and write on CPUs, an `Embedder` runs on each GPU.

Any process may be killed. A task writes its result to a file that readers ignore. The driver gets
each result once, and turns the file into a shard. If Ray repeats a task, the task writes another
file, and the driver uses only one of the two. If the driver is killed, the same command starts a
new driver, which resumes the work by the ids in the shards.
"""

import base64
import hashlib
import importlib.util
import logging
import math
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallas_patch_embed.child import safe_paths
from pallas_patch_embed.embed.embedder import Embedder
from pallas_patch_embed.embed.folder import SHARD_ROWS, Folder
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.place import place_of
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.sources import Unit
from pallas_patch_embed.embed.tables import embeddings_table, errors_table, parquet_bytes
from pallas_patch_embed.embed.units import Content, Files, Picture, SourceEndsError
from pallas_patch_embed.files import new_partial

# Number of bytes of the encoded pictures in a block.
BLOCK_BYTES = 2**27

# Type of a picture that was read: id, content, shape and failure, as in the columns of `Read`.
type Row = tuple[str, bytes, tuple[int, ...], str]


def digests(ids: Iterable[str]) -> np.ndarray:
    """Returns 16 characters for each id, 96 bits of BLAKE2, which are unique in practice."""
    return np.array(
        [base64.b64encode(hashlib.blake2b(id.encode(), digest_size=12).digest()) for id in ids],
        "S16",
    )


class Read:
    """Reads units of pictures, and leaves out the pictures that earlier runs have written.

    It maps a batch {"unit": pickled units} to batches {"id", "content", "shape", "failed"}. The
    contents of a batch have a limited size: when it is reached, pictures are decoded here. `shape`
    is (height, width) if `content` is a decoded picture, otherwise (0, 0).

    Args:
      done: reference to the sorted digests of the ids that earlier runs have written.
      rows: number of pictures in a batch that it yields.
      preprocessing: the conversion of pictures to images.
    """

    def __init__(self, done: Any, rows: int, preprocessing: Preprocessing):
        self._done, self._rows, self._preprocessing = done, rows, preprocessing

    def __call__(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        import ray

        done = ray.get(self._done)
        for pickled in batch["unit"]:
            unit: Unit = ray.cloudpickle.loads(pickled)
            new = (picture for picture in unit.pictures() if not _is_in(done, picture.id))
            while block := self._block(new):
                yield _columns(block)

    def _block(self, pictures: Iterator[Picture]) -> list[Row]:
        """Reads pictures, and decodes those for which there is no room in a block."""
        rows: list[Row] = []
        room = BLOCK_BYTES
        for picture in pictures:
            content, shape, failure = b"", (0, 0), ""
            try:
                with picture.open(math.inf) as file:
                    content = file.read()
                if len(content) > room:
                    image = self._preprocessing.image(Content(content))
                    content, shape = image.tobytes(), image.shape[:2]
            except SourceEndsError:
                continue
            except Exception as error:
                content, failure = b"", reason(error)
            room -= len(content)
            rows.append((picture.id, content, shape, failure))
            if len(rows) == self._rows:
                break
        return rows


def _columns(rows: list[Row]) -> dict[str, Any]:
    ids, contents, shapes, failures = zip(*rows)
    return {
        "id": np.array(ids, object),
        "content": np.array(contents, object),
        "shape": np.array(shapes),
        "failed": np.array(failures, object),
    }


def _is_in(done: np.ndarray, id: str) -> bool:
    digest = digests([id])[0]
    i = np.searchsorted(done, digest)
    return bool(i < len(done) and done[i] == digest)


class Decode:
    """Decodes pictures that `Read` has read: maps its batches to {"id", "image", "reason"}."""

    def __init__(self, preprocessing: Preprocessing):
        self._preprocessing = preprocessing

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"id": batch["id"], "image": [], "reason": []}
        for content, shape, failure in zip(batch["content"], batch["shape"], batch["failed"]):
            image, why = self._preprocessing.black(), str(failure)
            if any(shape):
                image = np.frombuffer(content, np.uint8).reshape(*shape, 3)
            elif not why:
                try:
                    image = self._preprocessing.image(Content(content))
                except Exception as error:  # Pillow raises many kinds of errors.
                    why = reason(error)
            result["image"].append(image)
            result["reason"].append(why)
        result["image"] = _column(result["image"])
        return result


def _column(images: list[np.ndarray]) -> np.ndarray:
    """Returns images as one array, or as an array of arrays if their sizes differ."""
    if len({image.shape for image in images}) == 1:
        return np.stack(images)
    column = np.empty(len(images), object)
    column[:] = images
    return column


class Write:
    """Writes files that are not yet shards.

    It maps a batch {"id", "embedding", "reason"} to {"part", "name"} of the files.
    """

    def __init__(self, url: str, dtype: str):
        self._url, self._dtype = url, dtype

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        place = place_of(self._url)
        reasons = [str(why) for why in batch["reason"]]
        good = [i for i, why in enumerate(reasons) if not why]
        bad = [i for i, why in enumerate(reasons) if why]
        ids = [str(id) for id in batch["id"]]
        parts, names = [], []

        def write(part: str, table: Any) -> None:
            name = new_partial()
            place.write(name, parquet_bytes(table))
            parts.append(part)
            names.append(name)

        if good:
            embeddings = np.stack([np.asarray(batch["embedding"][i]) for i in good])
            write(
                "embeddings",
                embeddings_table([ids[i] for i in good], embeddings.astype(self._dtype)),
            )
        if bad:
            write("errors", errors_table([(ids[i], reasons[i]) for i in bad]))
        return {"part": parts, "name": names}


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
                address=None if address == "local" else address,
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
    units: Iterable[Unit],
    checkpoint: str,
    encoder_options: dict[str, Any],
    output_for: Callable[[Preprocessing, int], Folder],
    progress: Progress,
    address: str,
) -> str:
    """Embeds the pictures of all units on a cluster.

    Args:
      units: units of pictures. They and the checkpoint must have the same paths on all nodes.
      checkpoint: as for `Embedder`.
      encoder_options: further arguments of `Embedder`.
      output_for: function (preprocessing, width) -> the output.
      progress: the progress that every shard updates.
      address: address of the cluster; "local" to start one on this machine.

    Returns:
      A description of where the shards are.

    Raises:
      ValueError: there is no such cluster.
    """
    connect(address)
    # The driver uses this embedder only for its attributes, and leaves the GPUs to the actors.
    jax.config.update("jax_platforms", "cpu")
    embedder = Embedder(checkpoint, **encoder_options)
    preprocessing, width, batch = embedder.preprocessing, embedder.width, embedder.rows
    with output_for(preprocessing, width) as output:
        arguments = (checkpoint, encoder_options, preprocessing, batch)
        _fill(output, list(units), *arguments, progress)
        return output.finish()


def _fill(
    output: Folder,
    units: list[Unit],
    checkpoint: str,
    encoder_options: dict[str, Any],
    preprocessing: Preprocessing,
    batch: int,
    progress: Progress,
) -> None:
    """Runs the pipeline on the cluster and turns its results into shards.

    The arguments are those of `run` and attributes of the embedder.
    """
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    done = np.sort(digests(output.done_ids()))
    progress.before = len(done)
    if all(isinstance(unit, Files) for unit in units):
        progress.total = sum(len(unit.files) for unit in units if isinstance(unit, Files))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    cpus = int(ray.cluster_resources().get("CPU", 1))
    written = (
        # Every unit is a block, and every batch of pictures is a block. By default Ray would make a
        # single block of a small input, which one task reads and one actor embeds. `repartition`
        # also prevents Ray from fusing steps, by which the actors on GPUs would decode pictures.
        ray.data.from_items(
            [{"unit": ray.cloudpickle.dumps(unit)} for unit in units],
            override_num_blocks=len(units),
        )
        .map_batches(Read(ray.put(done), batch, preprocessing), batch_size=1, num_cpus=1)
        .repartition(target_num_rows_per_block=batch)
        .map_batches(Decode(preprocessing), batch_size=batch, num_cpus=1)
        .repartition(target_num_rows_per_block=batch)
        .map_batches(
            Embedder,
            fn_constructor_args=[checkpoint],
            fn_constructor_kwargs=encoder_options,
            batch_size=batch,
            num_gpus=1 if gpus else 0,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=gpus or max(1, cpus // 4)),
        )
        .map_batches(Write(output.url, output.embedding_dtype), batch_size=SHARD_ROWS, num_cpus=0.1)
    )
    for row in written.iter_rows():
        committed = output.commit(row["part"], row["name"])
        if row["part"] == "embeddings":
            progress.embedded(len(committed))
        else:
            for id, why in committed:
                progress.failed(id, why)
    output.remove_partials()
