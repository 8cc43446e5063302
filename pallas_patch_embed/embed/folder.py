"""A folder of parquet shards, which a later run can resume."""

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_patch_embed import ending
from pallas_patch_embed.embed.exclusive import Lease, Lock
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.output import SAME_ID, Settings, UnfinishedError, versions
from pallas_patch_embed.embed.pictures import printable
from pallas_patch_embed.embed.sources import is_url
from pallas_patch_embed.embed.tables import embeddings_table, errors_table, parquet_bytes
from pallas_patch_embed.files import is_partial, written_atomically

# A shard is written when it has this number of rows, or when its first row has this age in seconds.
# Rows that are not yet in a shard are lost if a run is killed.
SHARD_ROWS, SHARD_SECONDS = 4096, 60.0

FORMAT = "pallas_patch_embed.embed.1"


class Folder:
    """A folder of parquet shards, on this machine or at a URL.

      manifest.json              settings and versions, written before all other files
      embeddings/000000.parquet  columns `id` and `embedding`, a fixed-size list
      errors/000000.parquet      columns `id` and `reason`

    A shard appears only when it is complete. A run with the same settings resumes the work:
    pictures that are in shards are not read again. Only one run at a time may write, which is
    ensured by a lock or, at a URL, by a lease that the run renews.

    Args:
      url: URL or path of the folder.
      settings: settings of the run.
      width: D, the width of an embedding.
      overwrite: whether the files of earlier runs are removed first.
      retry: whether pictures in the error shards are retried.
    """

    RESUMABLE = True

    def __init__(
        self, url: str, settings: Settings, width: int, *, overwrite: bool, retry: bool
    ) -> None:
        import fsspec

        self.url, self._settings, self._width = url, settings, width
        self._fs, self._root = fsspec.url_to_fs(url)
        self._local = not is_url(url) or url.startswith("file://")
        self._done = Ids()
        self._rows: list[tuple[list[str], np.ndarray]] = []
        self._errors: list[tuple[str, str]] = []
        self._since = 0.0
        check_folder(url)
        if not overwrite:
            self._check_settings()
        self._fs.makedirs(self._root, exist_ok=True)
        self._hold: Lock | Lease = Lock(self._path(".lock"), url)
        if not self._local:
            self._hold = Lease(self._fs, self._path(".lease.json"), url)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._hold)
        try:
            self._open(overwrite, retry)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, overwrite: bool, retry: bool) -> None:
        """Reads or writes the manifest, and reads the ids in shards, while no other run does."""
        manifest = self._manifest()
        if manifest is not None and overwrite:
            # The manifest is removed last, because `embed` refuses a folder of files without one.
            for name in ("embeddings", "errors", "manifest.json"):
                if self._fs.exists(self._path(name)):
                    self._fs.rm(self._path(name), recursive=True)
            manifest = None
        if manifest is not None:
            self._check_settings()  # Another run may have begun since the first check.
        if manifest is None:
            about = {
                "format": FORMAT,
                "settings": dataclasses.asdict(self._settings),
                "width": self._width,
                "versions": versions(),
            }
            self._write("manifest.json", json.dumps(about, indent=1).encode())
        elif retry and self._fs.exists(self._path("errors")):
            self._fs.rm(self._path("errors"), recursive=True)
        for part in ("embeddings", "errors"):
            self._fs.makedirs(self._path(part), exist_ok=True)
        self.remove_partials()
        self._next = {part: self._first_free(part) for part in ("embeddings", "errors")}
        for part in ("embeddings", "errors"):
            for shard in self.shards(part):
                self._done.update(id.encode() for id in self._ids_of(shard))
        self._say()

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _manifest(self) -> dict[str, Any] | None:
        if not self._fs.exists(self._path("manifest.json")):
            return None
        return json.loads(self._fs.cat_file(self._path("manifest.json")))

    def _check_settings(self) -> None:
        """Refuses a folder that was written with other settings."""
        manifest = self._manifest() if self._fs.exists(self._root) else None
        if manifest is None:
            return
        wanted, found = dataclasses.asdict(self._settings), manifest["settings"]
        differing = [name for name in wanted if wanted[name] != found.get(name)]
        if differing:
            changes = "; ".join(
                f"{n} was {found.get(n)!r} and is now {wanted[n]!r}" for n in differing
            )
            raise ValueError(
                f"--out is {printable(self.url)}: it was written with other settings ({changes}). "
                "Choose another folder, or replace its contents with --overwrite."
            )

    def shards(self, part: str) -> list[str]:
        """Returns the paths of the complete shards of "embeddings" or "errors", sorted."""
        names = sorted(path for path in self._list(part) if path.endswith(".parquet"))
        return [path for path in names if not os.path.basename(path).startswith(".")]

    def _list(self, name: str) -> list[str]:
        """Returns the paths in a subfolder, or in the folder itself if `name` is empty."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):  # Object stores have no empty folders.
            return self._fs.ls(self._path(name), detail=False)
        return []

    def _ids_of(self, shard: str) -> Iterator[str]:
        import pyarrow.parquet

        with self._fs.open(shard, "rb") as file, pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(columns=["id"]):
                yield from batch["id"].to_pylist()

    def _first_free(self, part: str) -> int:
        shards = self.shards(part)
        return 1 + int(os.path.basename(shards[-1]).split(".")[0]) if shards else 0

    def is_done(self, id: str) -> bool:
        return id.encode() in self._done

    def done_ids(self) -> Iterator[str]:
        """Yields the ids that earlier runs have written."""
        for part in ("embeddings", "errors"):
            for shard in self.shards(part):
                yield from self._ids_of(shard)

    @property
    def embedding_dtype(self) -> str:
        """The dtype of the embeddings in shards."""
        return self._settings.embedding_dtype

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        self._begin()
        self._rows.append((list(ids), embeddings.astype(self._settings.embedding_dtype)))
        self._write_if_due()

    def fail(self, id: str, reason: str) -> None:
        self._begin()
        self._errors.append((id, reason))
        self._write_if_due()

    def _begin(self) -> None:
        if not self._rows and not self._errors:
            self._since = time.monotonic()

    def _write_if_due(self) -> None:
        rows = max(sum(len(ids) for ids, _ in self._rows), len(self._errors))
        if rows >= SHARD_ROWS or time.monotonic() - self._since > SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes everything that is not yet in a shard."""
        if self._rows:
            ids = list(itertools.chain.from_iterable(ids for ids, _ in self._rows))
            embeddings = np.concatenate([rows for _, rows in self._rows])
            self._write_shard("embeddings", embeddings_table(ids, embeddings))
            self._rows.clear()
        if self._errors:
            self._write_shard("errors", errors_table(self._errors))
            self._errors.clear()
        self._say()

    def _write_shard(self, part: str, table: Any) -> None:
        self._write(f"{part}/{self._next[part]:06d}.parquet", parquet_bytes(table))
        self._next[part] += 1

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file that appears only when it is complete."""
        self._hold.check()
        try:
            if self._local:
                with written_atomically(self._path(name)) as file:
                    file.write(content)
            else:
                self._fs.pipe_file(self._path(name), content)  # A single PUT is atomic.
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            if self._local and not isinstance(error, OSError):
                raise
            why = (isinstance(error, OSError) and error.strerror) or error
            raise UnfinishedError(
                f"{printable(self.url)} cannot be written ({why}). The shards in it are kept. Make "
                "room, and run the same command again to resume the work."
            ) from error

    def commit(self, part: str, partial: str) -> list[tuple[str, str]]:
        """Turns a complete file that another process wrote into a shard.

        Rows whose ids are already in shards are left out, and recorded as errors.

        Returns:
          The id and reason of each row in the new shard.
        """
        import pyarrow.parquet

        self._hold.check()
        self._fs.invalidate_cache()  # A cached listing would not contain the file.
        with self._fs.open(partial, "rb") as file:
            columns = [name for name in ("id", "reason") if part == "errors" or name == "id"]
            table = pyarrow.parquet.read_table(file, columns=columns)
        ids = table["id"].to_pylist()
        new = [self._done.add(id.encode()) for id in ids]
        shard = f"{part}/{self._next[part]:06d}.parquet"
        if all(new):
            self._fs.mv(partial, self._path(shard))
        else:
            for id in itertools.compress(ids, (not is_new for is_new in new)):
                self.fail(id, SAME_ID)
            with self._fs.open(partial, "rb") as file:
                whole = pyarrow.parquet.read_table(file)
            self._write(shard, parquet_bytes(whole.filter(new)))
            self._fs.rm(partial)
        self._next[part] += 1
        self._say()
        reasons = table["reason"].to_pylist() if part == "errors" else [""] * len(ids)
        return list(itertools.compress(zip(ids, reasons), new))

    def remove_partials(self) -> None:
        """Removes the files that killed processes left behind."""
        for name in ("", "embeddings", "errors"):
            for path in self._list(name):
                if is_partial(os.path.basename(path)):
                    self._fs.rm(path)

    def _say(self) -> None:
        """Sets the last line that the command prints if a signal ends it."""
        ending.state.outcome = (
            f"the shards in {printable(self.url)} are kept; the same command resumes the work"
        )

    def finish(self) -> str:
        self.flush()
        return printable(self.url)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._stack:
            if error is not None:
                with contextlib.suppress(UnfinishedError):
                    self.flush()


def check_folder(url: str) -> None:
    """Refuses an output folder that is a file, or that `embed` did not write.

    Raises:
      ValueError: the folder is refused; the message is the reason.
    """
    import fsspec

    fs, root = fsspec.url_to_fs(url)
    where = f"--out is {printable(url)}"
    if not fs.exists(root):
        if not is_url(url) and os.path.islink(root):
            raise ValueError(f"{where}: it is a dangling link. Choose another folder.")
        return
    if not fs.isdir(root):
        raise ValueError(
            f"{where}: it is a file, expected a folder, or a name that ends in .npz. Choose "
            "another name."
        )
    manifest = f"{root.rstrip('/')}/manifest.json"
    if not fs.exists(manifest):
        names = [os.path.basename(path.rstrip("/")) for path in fs.ls(root, detail=False)]
        others = [name for name in names if name and not name.startswith(".")]
        if others:
            raise ValueError(
                f"{where}: it has files that `embed` did not write, such as "
                f"{printable(others[0])}. Choose an empty or a new folder."
            )
        return
    try:
        written = json.loads(fs.cat_file(manifest)).get("format")
    except ValueError:
        written = None
    if written != FORMAT:
        raise ValueError(
            f"{where}: this version of `embed` did not write its manifest.json. Choose another "
            "folder."
        )
