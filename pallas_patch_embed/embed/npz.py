"""One .npz file of embeddings."""

import dataclasses
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_patch_embed.embed.output import Settings, WrittenElsewhereError, versions
from pallas_patch_embed.embed.pictures import printable
from pallas_patch_embed.files import written_whole

NPZ_ARRAYS = ("embeddings", "paths", "failed", "reasons", "about")


class Npz:
    """A file with `embeddings` [n, D], `paths` [n], `failed` and `reasons` of pictures without one,
    and `about`, a JSON object with the settings and versions. It appears whole or not at all."""

    CONTINUED = False

    def __init__(self, path: Path, settings: Settings):
        self._path, self._settings = path, settings
        self._ids: list[str] = []
        self._embeddings: list[np.ndarray] = []
        self._failed: list[tuple[str, str]] = []

    def __enter__(self) -> "Npz":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pass

    def is_done(self, id: str) -> bool:
        return False

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        self._ids += ids
        self._embeddings.append(embeddings.astype(self._settings.embedding_dtype))

    def fail(self, id: str, reason: str) -> None:
        self._failed.append((id, reason))

    def finish(self) -> str:
        """Writes the file; into a temporary folder if it cannot be written where it was asked for.

        Raises:
          ValueError: there are no embeddings.
          WrittenElsewhereError: it is in another place, or could be written nowhere.
        """
        if not self._ids:
            raise ValueError(
                f"None of the {len(self._failed)} pictures could be embedded; nothing was written."
            )
        failed, reasons = zip(*self._failed) if self._failed else ((), ())
        about = {**dataclasses.asdict(self._settings), "versions": versions()}
        arrays: dict[str, Any] = {
            "embeddings": np.concatenate(self._embeddings),
            "paths": np.array(self._ids, str),
            "failed": np.array(failed, str),
            "reasons": np.array(reasons, str),
            "about": np.array(json.dumps(about)),
        }
        try:
            with written_whole(self._path) as file:
                np.savez(file, **arrays)
        except OSError as error:
            why = f"{printable(self._path)} could not be written ({error.strerror or error})."
            elsewhere = _write_elsewhere(self._path.name, arrays)
            raise WrittenElsewhereError(
                f"{why} The embeddings are in {printable(elsewhere)}: move them to where you want "
                "them."
                if elsewhere is not None
                else f"{why} Nor could they be in a temporary folder, in the current one or at "
                "home: nothing was written."
            ) from error
        return printable(self._path)


def _write_elsewhere(name: str, arrays: dict[str, Any]) -> Path | None:
    """Writes the file where there is room, in a new folder; returns its path, or None."""
    for place in (None, os.curdir, os.path.expanduser("~")):
        try:
            folder = tempfile.mkdtemp(prefix="embeddings-", dir=place)
        except OSError:
            continue
        elsewhere = Path(folder, name).absolute()
        try:
            with written_whole(elsewhere) as file:
                np.savez(file, **arrays)
        except OSError:
            os.rmdir(folder)
        else:
            return elsewhere
    return None


def check_npz(out: Path, inputs: Iterable[Path]) -> None:
    """Refuses a file that cannot be written, or would replace more than earlier output.

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


def is_embeddings(path: Path) -> bool:
    """Whether the file is an `Npz`, or has `embeddings` and `paths` alone, as before 0.1.

    Its arrays' names, dtypes and shapes say so; only the headers are read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    names = [f"{name}.npy" for name in NPZ_ARRAYS]
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist() not in (names, names[:2]):
                return False
            (n, _), embeddings = _header(archive, "embeddings.npy")
            (paths,), ids = _header(archive, "paths.npy")
    except Exception:  # zipfile and numpy raise many kinds about other files.
        return False
    return embeddings in (np.float32, np.float16) and ids.kind == "U" and paths == n


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of an array, from its header; a ValueError if it is shorter or longer."""
    with archive.open(name) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("np.savez writes this version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if archive.getinfo(name).file_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError("it has another length than its header says")
    return shape, dtype
