"""Embeds picture files with the encoder of a checkpoint, into one .npz file."""

import functools
import itertools
import math
import os
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from pallas_patch_embed import ending
from pallas_patch_embed.files import written_whole
from pallas_patch_embed.pictures import Budget, Reading, find_pictures, printable, read_ahead
from pallas_patch_embed.preprocessing import Preprocessing
from pallas_patch_embed.siglip2.checkpoint import load_encoder_for_side
from pallas_patch_embed.siglip2.encoder import Encoder
from pallas_patch_embed.siglip2.naflex import batch_naflex

MOST_WORKERS = 32


def default_workers() -> int:
    """One thread a CPU that this process may use, up to 32."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return min(os.cpu_count() or 1, MOST_WORKERS)


def is_embeddings(path: Path) -> bool:
    """Whether the file is one that `run` wrote: its arrays' names, dtypes and shapes say so.

    Only the headers are read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist() != ["embeddings.npy", "paths.npy"]:
                return False
            (n, _), embeddings = _header(archive, "embeddings.npy")
            (paths,), names = _header(archive, "paths.npy")
    except Exception:  # zipfile and numpy raise many kinds about other files.
        return False
    return embeddings == np.float32 and names.kind == "U" and paths == n


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of an array, from its header; a ValueError if it is shorter or longer."""
    with archive.open(name) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("np.savez writes this version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if archive.getinfo(name).file_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError("it has another length than its header says")
    return shape, dtype


def check_out(out: Path, inputs: Iterable[Path]) -> None:
    """Refuses an output file that cannot be written, or would replace more than earlier output.

    Args:
      out: the file, or a link to it; there may be none yet.
      inputs: files that are read.

    Raises:
      ValueError: its folder does not exist; it is one of the inputs, maybe by another name; it is a
        file that this command has not written, or a link that leads nowhere.
      OSError: its folder cannot be written.
    """
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out is {printable(out)}: there is no such folder.")
    real = Path(os.path.realpath(out))
    if not real.parent.is_dir() or real.is_symlink():
        raise ValueError(f"--out is {printable(out)}: it is a link that leads nowhere.")
    tempfile.TemporaryFile(dir=real.parent).close()
    if not real.exists():
        return
    status = real.stat()
    for path in inputs:
        if os.path.samestat(path.stat(), status):
            raise ValueError(
                f"--out is {printable(out)}: it is the input {printable(path)}. Choose another "
                "name."
            )
    if not is_embeddings(real):
        raise ValueError(
            f"--out is {printable(out)}: it exists, and `embed` has not written it. Choose another "
            "name, or remove it."
        )


def _checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint that may be read."""
    if not checkpoint.is_dir():
        return [checkpoint] if checkpoint.exists() else []
    kinds = ("*.json", "*.safetensors")
    return [path for kind in kinds for path in checkpoint.glob(kind) if path.exists()]


def _embed(encoder: Encoder, images: list[np.ndarray], batch: int, L: int) -> np.ndarray:
    """The pooled output [n, D] float32 of n <= batch images, always computed as a whole batch."""
    n = len(images)
    images = images + [images[0]] * (batch - n)
    if encoder.config.naflex:
        patches, spatial_shapes, mask = batch_naflex(images, encoder.config, L)
        output = encoder(patches, spatial_shapes=spatial_shapes, mask=mask)
    else:
        output = encoder(np.stack(images))
    assert output.pooler_output is not None  # `run` refuses encoders without a pooling head.
    return np.asarray(output.pooler_output[:n], np.float32)


def _embed_batch(
    encoder: Encoder,
    part: Reading,
    batch: int,
    L: int,
    left_out: Callable[[str, Path, object], None],
) -> tuple[list[Path], np.ndarray]:
    """The pictures of a batch that could be embedded, and their embeddings [n, D] float32.

    The others are handed to `left_out`: what could not be done, the path, and the reason.
    """
    paths, images = [], []
    for path, image in part:
        if (error := image.exception()) is None:
            paths.append(path)
            images.append(image.result())
        else:
            left_out("Cannot read", path, str(error) or type(error).__name__)
    if not images:
        return [], np.zeros((0, encoder.config.width), np.float32)
    result = _embed(encoder, images, batch, L)
    finite = np.isfinite(result).all(1)
    for path in itertools.compress(paths, ~finite):
        left_out("Cannot embed", path, "its embedding is not finite")
    return list(itertools.compress(paths, finite)), result[finite]


def _normalized(embeddings: np.ndarray) -> np.ndarray:
    """Each row divided by its Euclidean norm, which float32 may be too small for."""
    length = np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    return (embeddings / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)


def _say(line: str) -> None:
    """Prints a line to standard output; to standard error if nobody can read it there."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"{line} (Standard output cannot be written: {error}.)", file=sys.stderr)


def run(
    checkpoint: Path,
    arguments: Sequence[Path],
    out: Path,
    *,
    size: int | None,
    batch: int,
    patch_dtype: str,
    normalize: bool,
    workers: int | None = None,
) -> int:
    """Embeds the pictures and writes `embeddings` [n, D] float32 and `paths` [n] to `out`.

    A picture that cannot be read, or whose embedding is not finite, is reported on standard error
    and left out.

    Args:
      checkpoint: as `load_encoder` takes it.
      arguments: picture files, and folders of them, as `find_pictures` takes them.
      out: the .npz file, which appears whole or not at all. It replaces none but an earlier output.
      size: pixels, the side of the square images; NaFlex images have as many patches as such an
        image. None for what the checkpoint says.
      batch: images a step.
      patch_dtype: as `load_encoder` takes it.
      normalize: whether every embedding is divided by its Euclidean norm.
      workers: threads that read pictures; None for `default_workers()`.

    Returns:
      The number of pictures that were left out.

    Raises:
      OSError, ValueError: an argument does not exist; `out` is another file, or cannot be written;
        the checkpoint cannot be loaded or has no pooling head; no picture could be embedded.
        Nothing was written then.
    """
    from tqdm import tqdm

    found = find_pictures(arguments)
    check_out(out, itertools.chain(found.pictures, _checkpoint_files(checkpoint)))
    for path, reason in found.skipped:
        print(f"Skipped {printable(path)}: {printable(reason)}.", file=sys.stderr)
    for path, reason in found.unreadable:
        print(f"Cannot read {printable(path)}: {printable(reason)}.", file=sys.stderr)
    if not found.pictures:
        raise ValueError(f"There are no pictures in {', '.join(map(printable, arguments))}.")
    encoder = load_encoder_for_side(checkpoint, size, patch_dtype)
    if encoder.head is None:
        raise ValueError(
            f"{printable(checkpoint)} has no pooling head, so it gives no embedding of a picture."
        )
    preprocessing = Preprocessing.of(checkpoint, encoder.config, size)
    if preprocessing.defaults_of is not None:
        print(
            "There is no preprocessor_config.json beside the checkpoint. Pictures are resized as "
            f"{preprocessing.defaults_of} does by default: {preprocessing}.",
            file=sys.stderr,
        )
    batch = min(batch, len(found.pictures))
    read = functools.partial(preprocessing.image, budget=Budget())
    embeddings: list[np.ndarray] = []
    embedded: list[str] = []
    with (
        ending.progress_shown(),
        tqdm(total=len(found.pictures), unit=" pictures", disable=sys.stderr is None) as bar,
    ):

        def left_out(what: str, path: Path, reason: object) -> None:
            bar.write(f"{what} {printable(path)}: {printable(reason)}.", file=sys.stderr)

        L = preprocessing.max_num_patches
        for part in read_ahead(read, found.pictures, batch, workers or default_workers()):
            paths, result = _embed_batch(encoder, part, batch, L, left_out)
            embedded += map(str, paths)
            embeddings.append(_normalized(result) if normalize else result)
            bar.update(len(part))
            part.clear()  # Otherwise its images stay while the next batch is waited for.
    total = len(found.pictures) + len(found.unreadable)
    if not embedded:
        raise ValueError(f"None of the {total} pictures could be embedded; nothing was written.")
    with written_whole(out) as file:
        np.savez(file, embeddings=np.concatenate(embeddings), paths=np.array(embedded, str))
    unreadable = total - len(embedded)
    _say(f"Embedded {len(embedded)} of {total} pictures into {printable(out)}.")
    if unreadable:
        print(f"{unreadable} could not be read or embedded.", file=sys.stderr)
    return unreadable
