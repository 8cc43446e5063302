"""The command `embed`, which embeds pictures or texts into an .npz file or a folder of shards."""

import collections
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import jpeg, pipeline, sources
from pallas_patch_embed.embed.embedder import Embedder
from pallas_patch_embed.embed.folder import Folder, check_folder, recorded_batch
from pallas_patch_embed.embed.lines import Lines
from pallas_patch_embed.embed.npz import Npz, check_npz
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.output import Output, UnfinishedError
from pallas_patch_embed.embed.parquet import pictures_of
from pallas_patch_embed.embed.pictures import missing_plugin
from pallas_patch_embed.embed.progress import Progress
from pallas_patch_embed.embed.provenance import (
    ARITHMETIC,
    DECIDING,
    DECIDING_TEXTS,
    CheckpointHash,
    Provenance,
    Settings,
    checkpoint_files,
    file_sha256,
    scales_sha256,
)
from pallas_patch_embed.embed.tables import RESERVED
from pallas_patch_embed.embed.text_embedder import FILES, AnyEmbedder, TextEmbedder
from pallas_patch_embed.embed.units import Files, Picture, is_url
from pallas_patch_embed.encoders.calibration import calibration_file
from pallas_patch_embed.encoders.checkpoint import calibration_beside
from pallas_patch_embed.encoders.hub import find_checkpoint

# Options that need the shards of a folder, with the values that they have if they are not given.
FOLDER_ONLY: dict[str, Any] = {
    "keep": (),
    "changed": None,
    "moved": (),
    "retry_errors": False,
    "ray": None,
}

# Options that are for pictures alone, with the same values.
PICTURES_ONLY: dict[str, Any] = {
    "size": None,
    "patch_dtype": None,
    "output": "pooled",
    "image_column": None,
    "allow_truncated": False,
    "resize": "auto",
    "ray": None,
}

# Number of extensions that the summary names.
MOST_EXTENSIONS = 8


def run(
    checkpoint: str | os.PathLike[str],
    arguments: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    lists: Sequence[str] = (),
    options: Options | None = None,
) -> int:
    """Embeds pictures, or texts, into one .npz file, or into a folder of parquet shards.

    Args:
      checkpoint: as for `load_encoder`, or the name of a model on the Hugging Face hub.
      arguments: pictures, folders, tars and parquet files, as for `sources.find`; braces and
        wildcards are expanded. If there is a text file, or `options.text_column` is given, texts
        are embedded instead.
      out: path of an .npz file, which may replace only an earlier output; or path or URL of a
        folder, which a run with the same settings resumes.
      lists: files with one argument on each line; "-" for standard input.
      options: how pictures are embedded; None for the defaults.

    Returns:
      The number of pictures that have no embedding: those that could not be embedded now or
      earlier, those that have changed since they were embedded, and those in folders that need a
      plugin.

    Raises:
      OSError, ValueError: an argument does not exist; `out` cannot be written or is not an earlier
        output; the checkpoint cannot be loaded or has no such `options.output`; an option does
        not fit the output; or there are no pictures.
      output.WrittenElsewhereError: the .npz file was written to another place.
      output.UnfinishedError: the output could not be finished.
    """
    options = options or Options()
    named, out = os.fspath(checkpoint), os.fspath(out)
    given = [os.fspath(argument) for argument in arguments]
    texts = options.text_column is not None or any(map(sources.is_text_file, given))
    what, deciding = ("texts", DECIDING_TEXTS) if texts else ("pictures", DECIDING)
    checkpoint = find_checkpoint(named, FILES) if texts else find_checkpoint(named)
    names = sources.Expanded(given)
    sources.check(names)
    sources.check([path for path in lists if path != "-"], "a list of pictures")
    to_npz = out.endswith(".npz")
    for option, absent in FOLDER_ONLY.items():
        if to_npz and getattr(options, option) != absent:
            raise ValueError(
                f"--out is {printable(out)}, expected a folder: --{option.replace('_', '-')} needs "
                "shards."
            )
    for option, absent in PICTURES_ONLY.items():
        if texts and getattr(options, option) != absent:
            raise ValueError(
                f"--{option.replace('_', '-')} is for pictures, but texts are embedded, because "
                "there is a --text-column or a text file. Leave it out."
            )
    if reserved := [name for name in options.keep if name in RESERVED]:
        raise ValueError(
            f"--keep {reserved[0]}: every shard has a column of this name with other contents. "
            "Rename the column in the input."
        )
    if options.ray is not None and options.resize == "device":
        raise ValueError(
            "--resize is device, but with --ray the nodes that decode pictures also resize them. "
            "Use --resize host."
        )
    if options.dtype in EIGHT_BITS:
        calibration = os.fspath(_calibration(named, checkpoint, options, texts))
        options = dataclasses.replace(options, calibration=calibration)
    column = options.text_column if texts else options.image_column
    columns = sources.Columns(column, options.id_column, options.keep, texts)
    if to_npz:
        inputs = _local_files(names, columns)
        check_npz(Path(out), itertools.chain(inputs, checkpoint_files(checkpoint, deciding)))
    else:
        check_folder(out)
    left_out: collections.Counter[str] = collections.Counter()
    with Progress(quiet=options.quiet, what=what) as progress:

        def skipped(path: str, why: str) -> None:
            progress.say(f"Skipped {printable(path)}: {printable(why)}.")

        units = sources.find(
            _with_lists(names, lists), columns, skipped, options.max_bytes, left_out
        )
        kept: dict[str, Any] = {}
        if options.keep:
            kept, units = _kept_types(units, options.keep)
        if options.ray is not None:
            every_unit = list(units)  # The cluster gets all units at once.
            units = iter(every_unit)
        first, pictures = _begun(_pictures(units))
        if not first:
            _say_left_out(left_out, progress.say)
            searched = sources.some(itertools.chain(names, lists))
            raise ValueError("\n".join([f"There are no {what} in {searched}.", *_advice(left_out)]))
        # A run that is resumed keeps its batch, so that results are rounded equally.
        batch = options.batch or (None if to_npz or options.overwrite else recorded_batch(out))
        text_options: dict[str, Any] = dict(
            dtype=options.dtype,
            calibration=options.calibration,
            min_cosine=options.min_cosine,
            normalize=options.normalize,
            batch=batch,
        )
        encoder_options = text_options | dict(
            size=options.size,
            patch_dtype=options.patch_dtype,
            output=options.output,
            # On a cluster the nodes that decode also resize.
            resize=options.resize if options.ray is None else "host",
        )

        def provenance_for(embedder: AnyEmbedder) -> Provenance:
            decoder = row = None
            if isinstance(embedder, TextEmbedder):
                # Texts have no patches; their manifests say bfloat16.
                preprocessing, patch_dtype = embedder.preprocessing, "bfloat16"
            else:
                preprocessing = str(embedder.preprocessing)
                patch_dtype = embedder.encoder.patch_embed.dtype
                if (default := embedder.preprocessing.defaults_of) is not None:
                    progress.say(
                        "There is no preprocessor_config.json beside the checkpoint. Pictures are "
                        f"resized with the defaults of {default}: {preprocessing}."
                    )
                if embedder.not_resized:
                    progress.say(f"Pictures are resized on the host: {embedder.not_resized}.")
                if embedder.resizer is not None:
                    decoder = jpeg.version()
                if embedder.row is not None:
                    row = embedder.row._asdict()
            hashed = CheckpointHash(checkpoint, deciding)
            settings = Settings(
                checkpoint_sha256=hashed.sha256,
                preprocessing=preprocessing,
                patch_dtype=patch_dtype,
                normalize=options.normalize,
                embedding_dtype=options.embedding_dtype,
                image_column=options.image_column,
                keep=list(options.keep),
                arithmetic=ARITHMETIC[patch_dtype],
                output=options.output,
                tower="text" if texts else "vision",
                text_column=options.text_column,
                packed=row is not None,
                dtype=options.dtype,
                calibration_sha256=options.calibration and file_sha256(Path(options.calibration)),
                min_cosine=None if options.min_cosine is None else float(options.min_cosine),
                scales_sha256=scales_sha256(embedder.encoder),
            )
            # On a cluster the driver does not know the devices.
            device = embedder.device_kind if options.ray is None else None
            return Provenance(
                named,
                settings,
                options,
                embedder.batch,
                device,
                hashed.is_that_of,
                row,
                decoder,
            )

        def folder_for(embedder: AnyEmbedder) -> Folder:
            return Folder(out, provenance_for(embedder), embedder.width, kept, progress.say)

        def embedder_for(checkpoint: str | Path, encoder_options: dict[str, Any]) -> Embedder:
            embedder = Embedder(checkpoint, **encoder_options)
            if to_npz and None in embedder.shape:
                raise ValueError(
                    f"--out is {printable(out)}: with a NaFlex encoder and --output "
                    f"{options.output} pictures have different numbers of patches, which are not "
                    "an array. Expected a folder."
                )
            embedder.preprocessing = dataclasses.replace(
                embedder.preprocessing,
                max_pixels=options.max_pixels,
                allow_truncated=options.allow_truncated,
            )
            return embedder

        if options.ray is None:
            check_devices()
            embedder: AnyEmbedder
            if texts:
                embedder = TextEmbedder(checkpoint, **text_options)
            else:
                embedder = embedder_for(checkpoint, encoder_options)
            output: Output
            if to_npz:
                output = Npz(Path(out), provenance_for(embedder))
            else:
                output = folder_for(embedder)
            with output:
                if "-" not in lists and not options.quiet:
                    _count(lambda: _with_lists(names, lists), columns, progress)
                pipeline.run(pictures, embedder, output, progress, options)
                where = output.finish()
        else:
            from pallas_patch_embed.embed import on_ray

            # Other nodes download a model from the hub by its name.
            everywhere = str(checkpoint.resolve()) if os.path.exists(named) else named
            where = on_ray.run(
                every_unit, everywhere, encoder_options, embedder_for, folder_for, progress, options
            )
        for note, count in progress.notes.items():
            progress.say(f"{count} {what} {note}.")
        _say_left_out(left_out, progress.say)
    _say(_outcome(progress, where))
    if progress.errors:
        print(f"{progress.errors} {what} could not be read or embedded.", file=sys.stderr)
    for line in _advice(left_out):
        print(line, file=sys.stderr)
    return progress.missing + sum(left_out[e] for e in left_out if missing_plugin(e))


def _calibration(named: str, checkpoint: Path, options: Options, texts: bool) -> Path:
    """Returns the path of the calibration for an encoder in 8 bits.

    It is a file, so that a run that is resumed has the same scales: on another device or with
    another version of jax a calibration is rounded differently.
    """
    tower = "text" if texts else "vision"
    path = calibration_beside(checkpoint, tower)
    if options.calibration is not None:
        path = calibration_file(options.calibration, tower)
    if not path.is_file():
        given = f"--dtype is {options.dtype}"
        if options.calibration is not None:
            given += f" and --calibration is {printable(options.calibration)}"
        how = (
            f"pictures with: pallas-patch-embed accuracy --checkpoint {printable(named)} --dtype "
            f"{options.dtype} --save-calibration FILE photos/"
        )
        if texts:
            how = (
                "texts in Python: calibrate(load_text_encoder(checkpoint, dtype='float32'), "
                f"load_tokenizer(checkpoint)(texts), dtype='{options.dtype}').save(FILE)"
            )
        raise ValueError(
            f"{given}, but there is no file {printable(os.fspath(path))}. Make a calibration of "
            f"some of your {how}. Then pass --calibration FILE."
        )
    return path.resolve()


def _begun[T](elements: Iterable[T]) -> tuple[list[T], Iterator[T]]:
    """Returns the first element, if there is one, and an iterator of all elements."""
    rest = iter(elements)
    first = list(itertools.islice(rest, 1))
    return first, itertools.chain(first, rest)


def _kept_types(
    units: Iterator[sources.Unit], names: Sequence[str]
) -> tuple[dict[str, Any], Iterator[sources.Unit]]:
    """Returns the types of the columns in the first tar or table, and an iterator of all units.

    If none of them can be read, the columns have texts.
    """
    import pyarrow

    begun: list[sources.Unit] = []
    for unit in units:
        begun.append(unit)
        if isinstance(unit, Files | Lines):
            continue  # Its files cannot be read, or it has no columns.
        try:
            return unit.kept_types(), itertools.chain(begun, units)
        except OSError:
            continue  # Its pictures say why.
    return dict.fromkeys(names, pyarrow.string()), iter(begun)


def _pictures(units: Iterable[sources.Unit]) -> Iterator[Picture]:
    """Yields the pictures of all units.

    Raises:
      parquet.ColumnsError: the first unit lacks a column that is needed.
    """
    for number, unit in enumerate(units):
        yield from unit.pictures() if number == 0 else pictures_of(unit)


def _outcome(progress: Progress, where: str) -> str:
    """Returns the last line of the command."""
    line = f"Embedded {progress.done} of {progress.met} {progress.what} into {where}."
    if progress.before:
        line += f" Earlier runs had embedded {progress.before}."
    if progress.failed_before:
        line += (
            f" Earlier runs could not embed {progress.failed_before}; --retry-errors tries them "
            "again."
        )
    if progress.changed:
        line += (
            f" {progress.changed} have changed since they were embedded; --changed embed embeds "
            "them again."
        )
    return line


def _say_left_out(left_out: collections.Counter[str], say: Callable[[str], None]) -> None:
    """Says how many files in folders were left out."""
    if not left_out:
        return
    most = left_out.most_common(MOST_EXTENSIONS)
    rest = left_out.total() - sum(count for _, count in most)
    kinds = [f"{count} {printable(extension)}" for extension, count in most]
    kinds += [f"{rest} others"] if rest else []
    say(f"Left out {left_out.total()} files with other extensions: {', '.join(kinds)}.")


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


def _advice(left_out: collections.Counter[str]) -> Iterator[str]:
    """Yields what to do to read the files that were left out for lack of a plugin."""
    for extension in sorted(left_out):
        if advice := missing_plugin(extension):
            yield f"To read {left_out[extension]} {extension} pictures, {advice}."


def _say(line: str) -> None:
    """Prints a line to standard output, or to standard error if that fails."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"{line} (Standard output cannot be written: {error}.)", file=sys.stderr)
