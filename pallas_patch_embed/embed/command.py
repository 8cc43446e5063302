"""The command `embed`, which embeds pictures into an .npz file or a folder of shards."""

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_patch_embed.devices import check_devices
from pallas_patch_embed.embed import pipeline, sources
from pallas_patch_embed.embed.embedder import (
    Embedder,
    checkpoint_files,
    checkpoint_hash,
    find_checkpoint,
)
from pallas_patch_embed.embed.folder import Folder, check_folder
from pallas_patch_embed.embed.npz import Npz, check_npz
from pallas_patch_embed.embed.output import Output, Settings, UnfinishedError
from pallas_patch_embed.embed.pictures import MOST_BYTES
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.units import Files, is_url
from pallas_patch_embed.messages import printable

MOST_WORKERS = 32


def default_workers() -> int:
    """Returns the number of CPUs that this process may use, but at most MOST_WORKERS."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return min(os.cpu_count() or 1, MOST_WORKERS)


def run(
    checkpoint: str | os.PathLike[str],
    arguments: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    lists: Sequence[str] = (),
    size: int | None = None,
    batch: int = 64,
    patch_dtype: str = "bfloat16",
    normalize: bool = False,
    embedding_dtype: str = "float32",
    image_column: str | None = None,
    id_column: str | None = None,
    overwrite: bool = False,
    retry_errors: bool = False,
    workers: int | None = None,
    max_bytes: int = MOST_BYTES,
    quiet: bool = False,
    ray: str | None = None,
) -> int:
    """Embeds pictures into one .npz file, or into a folder of parquet shards.

    Args:
      checkpoint: as for `load_encoder`, or the name of a model on the Hugging Face hub.
      arguments: pictures, folders, tars and parquet files, as for `sources.find`; braces and the
        wildcards of URLs are expanded.
      out: path of an .npz file, which may replace only an earlier output; or path or URL of a
        folder, which a run with the same settings resumes.
      lists: files with one argument on each line; "-" for standard input.
      size: side of the square images in pixels; NaFlex images get at most as many patches as such
        an image. None for the size in the checkpoint.
      batch: number of images that one device computes at a time.
      patch_dtype: as for `load_encoder`.
      normalize: whether every embedding is divided by its Euclidean norm.
      embedding_dtype: dtype of the embeddings that are written, "float32" or "float16".
      image_column, id_column: columns of parquet files, as in `sources.Parquet`.
      overwrite: whether the contents of the folder are removed first.
      retry_errors: whether pictures that an earlier run could not embed are retried.
      workers: number of pictures that are decoded at a time; None for `default_workers()`.
      max_bytes: largest size of an encoded picture in bytes.
      quiet: whether to show no progress.
      ray: address of a Ray cluster, or "local" for a new one on this machine; None to run without
        Ray.

    Returns:
      The number of pictures that have no embedding.

    Raises:
      OSError, ValueError: an argument does not exist; `out` cannot be written or is not an earlier
        output; the checkpoint cannot be loaded or has no pooling head; or there are no pictures.
      output.WrittenElsewhereError: the .npz file was written to another place.
      output.UnfinishedError: the output could not be finished.
    """
    named, out = os.fspath(checkpoint), os.fspath(out)
    checkpoint = find_checkpoint(named)
    names = sources.Expanded(os.fspath(argument) for argument in arguments)
    sources.check(names)
    sources.check([path for path in lists if path != "-"], "a list of pictures")
    to_npz = out.endswith(".npz")
    if to_npz and ray is not None:
        raise ValueError(
            f"--out is {printable(out)}, expected a folder: --ray writes a folder of shards."
        )
    columns = sources.Columns(image_column, id_column)
    if to_npz:
        inputs = _local_files(names, columns)
        check_npz(Path(out), itertools.chain(inputs, checkpoint_files(checkpoint)))
    else:
        check_folder(out)
    with Progress(quiet=quiet) as progress:

        def skipped(path: str, why: str) -> None:
            progress.say(f"Skipped {printable(path)}: {printable(why)}.")

        units = sources.find(_with_lists(names, lists), columns, skipped, max_bytes)
        first = next(units, None)
        if first is None:
            searched = sources.some(itertools.chain(names, lists))
            raise ValueError(f"There are no pictures in {searched}.")
        units = itertools.chain([first], units)
        encoder_options: dict[str, Any] = dict(
            size=size, patch_dtype=patch_dtype, normalize=normalize, batch=batch
        )

        def settings_for(preprocessing: Preprocessing) -> Settings:
            if preprocessing.defaults_of is not None:
                progress.say(
                    "There is no preprocessor_config.json beside the checkpoint. Pictures are "
                    f"resized with the defaults of {preprocessing.defaults_of}: {preprocessing}."
                )
            return Settings(
                checkpoint_sha256=checkpoint_hash(checkpoint),
                preprocessing=str(preprocessing),
                patch_dtype=patch_dtype,
                normalize=normalize,
                embedding_dtype=embedding_dtype,
            )

        def folder_for(preprocessing: Preprocessing, width: int) -> Folder:
            settings = settings_for(preprocessing)
            return Folder(out, settings, width, overwrite=overwrite, retry=retry_errors)

        if ray is None:
            check_devices()
            embedder = Embedder(checkpoint, **encoder_options)
            output: Output
            if to_npz:
                output = Npz(Path(out), settings_for(embedder.preprocessing))
            else:
                output = folder_for(embedder.preprocessing, embedder.width)
            with output:
                if "-" not in lists and not quiet:
                    _count(lambda: _with_lists(names, lists), columns, progress)
                pipeline.run(units, embedder, output, progress, workers or default_workers())
                where = output.finish()
        else:
            from pallas_patch_embed.embed import on_ray

            # Other nodes download a model from the hub by its name.
            everywhere = str(checkpoint.resolve()) if os.path.exists(named) else named
            where = on_ray.run(units, everywhere, encoder_options, folder_for, progress, ray)
    total = progress.done + progress.errors + progress.before
    earlier = f" Earlier runs had processed {progress.before}." if progress.before else ""
    _say(f"Embedded {progress.done} of {total} pictures into {where}.{earlier}")
    if progress.errors:
        print(f"{progress.errors} pictures could not be read or embedded.", file=sys.stderr)
    return progress.errors


def _with_lists(arguments: Iterable[str], lists: Iterable[str]) -> Iterator[str]:
    """Chains the arguments and the arguments in the lists."""
    return itertools.chain(arguments, *map(sources.read_list, lists))


def _local_files(arguments: Iterable[str], columns: sources.Columns) -> Iterator[Path]:
    """Yields the files on this machine that will be read."""
    local = (argument for argument in arguments if not is_url(argument))
    for unit in sources.find(local, columns, lambda *_: None):
        paths = [f.path for f in unit.files] if isinstance(unit, Files) else [unit.path]
        yield from (Path(path) for path in paths if os.path.exists(path))


def _count(
    arguments: Callable[[], Iterable[str]], columns: sources.Columns, progress: Progress
) -> None:
    """Counts the pictures in the background if all of them are files on this machine."""

    def count() -> int | None:
        total = 0

        def local() -> Iterator[str]:
            for argument in arguments():
                if is_url(argument):
                    raise ValueError("counting pictures at URLs would need many requests")
                yield argument

        for unit in sources.find(local(), columns, lambda *_: None):
            if not isinstance(unit, Files):
                return None  # The number of pictures in a tar is known only at its end.
            total += len(unit.files)
        return total

    def count_if_possible() -> None:
        # The run itself reports errors in the arguments.
        with contextlib.suppress(OSError, ValueError, UnfinishedError):
            progress.total = count()

    threading.Thread(target=count_if_possible, daemon=True).start()


def _say(line: str) -> None:
    """Prints a line to standard output, or to standard error if that fails."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"{line} (Standard output cannot be written: {error}.)", file=sys.stderr)
