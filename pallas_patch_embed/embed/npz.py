"""A single .npz file of embeddings, as the output of a run."""

import contextlib
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from pallas_patch_embed.base import ending
from pallas_patch_embed.base.files import check_place, written_atomically
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.ledger import Ledger
from pallas_patch_embed.embed.options import is_of_patches
from pallas_patch_embed.embed.output import WrittenElsewhereError
from pallas_patch_embed.embed.provenance import Provenance
from pallas_patch_embed.embed.units import Entry

NPZ_ARRAYS = ("embeddings", "paths", "sources", "rows", "failed", "reasons", "about")

# The arrays of earlier versions.
EARLIER_ARRAYS = (("embeddings", "paths", "failed", "reasons", "about"), ("embeddings", "paths"))

# Largest size in bytes of the embeddings of patches, all of which are in memory.
MOST_PATCHES = 2**32


class Npz:
    """A file of embeddings, which appears only when it is complete.

    It has the arrays `embeddings` [n, D], or of patches [n, S, D] with at most MOST_PATCHES bytes;
    `paths` [n]; `sources` [n] and `rows` [n], as in `units.Origin`; `failed` and `reasons` for
    pictures without an embedding; and `about`, a JSON object with the settings, options and
    versions. The patches of a picture are in rows, from the top left.
    """

    def __init__(self, path: Path, provenance: Provenance):
        self._path, self._provenance = path, provenance
        self._entries: list[Entry] = []
        self._embeddings: list[np.ndarray] = []
        self._bytes = 0
        self._failed: list[tuple[str, str]] = []
        self.ledger = Ledger(unique_ids=not provenance.options.repeated_ids)
        self.kept: dict[str, Any] = {}

    def __enter__(self) -> "Npz":
        ending.state.outcome = (
            "nothing was written, because an .npz file is written only at the end; if --out is a "
            "folder, the same command resumes the work"
        )
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pass

    def add(self, entries: Sequence[Entry], embeddings: Iterable[np.ndarray]) -> None:
        """Adds embeddings.

        Raises:
          ValueError: embeddings of patches exceed MOST_PATCHES.
        """
        self._entries += entries
        settings = self._provenance.settings
        rows = [each.astype(settings.embedding_dtype) for each in embeddings]
        self._embeddings += rows
        self._bytes += sum(each.nbytes for each in rows)
        if is_of_patches(settings.output) and self._bytes > MOST_PATCHES:
            raise ValueError(
                f"--out is {printable(self._path)}: with --output {settings.output} the embeddings "
                f"of {len(self._entries)} pictures have {self._bytes} bytes, expected at most "
                f"{MOST_PATCHES} in an .npz file. Choose a folder, which has no limit."
            )

    def fail(self, entry: Entry, reason: str) -> None:
        self._failed.append((entry.id, reason))

    def finish(self) -> str:
        """Writes the file. If that fails, writes it to a new temporary folder.

        Raises:
          ValueError: there are no embeddings.
          WrittenElsewhereError: the file is in another place, or could not be written anywhere.
        """
        if not self._entries:
            raise ValueError(
                f"None of the {len(self._failed)} pictures could be embedded; nothing was written."
            )
        failed, reasons = zip(*self._failed) if self._failed else ((), ())
        about = self._provenance.as_json()
        first = self._embeddings[0]
        shape = (-1, first.shape[-1]) if first.ndim == 3 else first.shape
        arrays: dict[str, Any] = {
            "embeddings": np.stack(self._embeddings).reshape(len(self._entries), *shape),
            "paths": np.array([entry.id for entry in self._entries], str),
            "sources": np.array([entry.origin.source for entry in self._entries], str),
            "rows": np.array([entry.origin.row for entry in self._entries], str),
            "failed": np.array(failed, str),
            "reasons": np.array(reasons, str),
            "about": np.array(json.dumps(about)),
        }
        try:
            with written_atomically(self._path) as file:
                np.savez(file, **arrays)
        except OSError as error:
            why = f"{printable(self._path)} could not be written ({error.strerror or error})."
            elsewhere = _write_elsewhere(self._path.name, arrays)
            raise WrittenElsewhereError(
                f"{why} The embeddings are in {printable(elsewhere, most=4096)} instead. Move this "
                "file to where you want it."
                if elsewhere is not None
                else f"{why} A temporary folder, the current folder and the home folder could not "
                "be written either, so nothing was written. Make room and run the command again."
            ) from error
        return printable(self._path)


def _write_elsewhere(name: str, arrays: dict[str, Any]) -> Path | None:
    """Writes the file to a new folder in the first place with room; returns its path, or None."""
    for place in (None, os.curdir, os.path.expanduser("~")):
        try:
            folder = tempfile.mkdtemp(prefix="embeddings-", dir=place)
        except OSError:
            continue
        elsewhere = Path(folder, name).absolute()
        try:
            with written_atomically(elsewhere) as file:
                np.savez(file, **arrays)
        except OSError:
            os.rmdir(folder)
        else:
            return elsewhere
    return None


def check_npz(out: Path, inputs: Iterable[Path]) -> None:
    """Refuses a file that cannot be written, or that would replace anything but earlier output.

    Args:
      out: path of the file, or of a link to it. The file need not exist.
      inputs: files that the run will read.

    Raises:
      ValueError: no file can be written there; or the file is one of the inputs (possibly under
        another name), or was not written by this command.
    """
    what = f"--out is {printable(out)}"
    if out.exists():
        status = out.stat()
        for path in inputs:
            if os.path.samestat(path.stat(), status):
                raise ValueError(f"{what}: it is the input {printable(path)}. Choose another name.")
    check_place(out, what, is_embeddings)


def is_embeddings(path: Path) -> bool:
    """Returns whether `embed` wrote the file, by the names, dtypes and shapes of its arrays.

    It is an `Npz`, or has the arrays of an earlier version. Only the headers of the arrays are
    read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    possible = [[f"{name}.npy" for name in names] for names in (NPZ_ARRAYS, *EARLIER_ARRAYS)]
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist() not in possible:
                return False
            with open_array(archive, "embeddings") as (_, (n, *shape), embeddings):
                pass
            with open_array(archive, "paths") as (_, (paths,), ids):
                pass
    except Exception:  # zipfile and numpy raise many kinds of errors for other files.
        return False
    is_written = embeddings in (np.float32, np.float16) and len(shape) in (1, 2)
    return is_written and ids.kind == "U" and paths == n


@contextlib.contextmanager
def open_array(
    archive: zipfile.ZipFile, name: str
) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
    """Opens an array of an .npz file behind its header; returns its shape and dtype, too.

    Raises:
      ValueError: its length does not fit them.
    """
    with archive.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("the version of its format is not 1.0, which np.savez writes")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if by_columns and len(shape) > 1:
            raise ValueError("its array is in Fortran's order, expected C's")
        length = archive.getinfo(f"{name}.npy").file_size - file.tell()
        if length != math.prod(shape) * dtype.itemsize:
            raise ValueError("its length differs from the length in its header")
        yield file, shape, dtype
