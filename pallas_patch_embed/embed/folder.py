"""A folder of parquet shards, which a later run can resume."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_patch_embed import ending, json_objects
from pallas_patch_embed.embed.exclusive import Lease, Lock
from pallas_patch_embed.embed.ids import Ids
from pallas_patch_embed.embed.output import SAME_ID, Settings, UnfinishedError, versions
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.place import FOLDER, Local, Place, Remote, place_of
from pallas_patch_embed.embed.tables import (
    check_schema,
    embeddings_table,
    errors_table,
    parquet_bytes,
)
from pallas_patch_embed.embed.units import is_url
from pallas_patch_embed.files import is_partial
from pallas_patch_embed.messages import printable, quoted

# A shard is written when it has this number of rows, or when its first row has this age in seconds.
# Rows that are not yet in a shard are lost if a run is killed.
SHARD_ROWS, SHARD_SECONDS = 4096, 60.0

PARTS = ("embeddings", "errors")
MANIFEST, LOCK, LEASE = "manifest.json", ".lock", ".lease.json"

FORMAT = "pallas_patch_embed.embed.1"

# The types of the manifest's fields, and its largest size in bytes.
FIELDS: dict[str, type] = {"format": str, "settings": dict, "width": int, "versions": dict}
MOST_BYTES = 2**20

# The names of shards: a number with at least six digits.
SHARD = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})\.parquet")


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
        self.url, self._settings, self._width = url, settings, width
        self._place = place_of(url)
        self._done = Ids()
        self._rows: list[tuple[list[str], np.ndarray]] = []
        self._errors: list[tuple[str, str]] = []
        self._since = 0.0
        check_folder(url)
        if not overwrite:
            self._check_settings()
        with self._usable(""):
            self._place.make_folder()
        self._hold = _hold_of(self._place, url)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._hold)
        try:
            self._open(overwrite, retry)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, overwrite: bool, retry: bool) -> None:
        """Reads or writes the manifest, and reads the ids in shards, while no other run does."""
        check_folder(self.url)  # Another run may have begun since the first check.
        if overwrite and self._place.kind(MANIFEST):
            # The manifest is removed last, because `embed` refuses a folder of files without one.
            for part in PARTS:
                self._remove(self.shards(part) + self._partials(part))
            self._remove([MANIFEST])
        if not self._place.kind(MANIFEST):
            about = {
                "format": FORMAT,
                "settings": dataclasses.asdict(self._settings),
                "width": self._width,
                "versions": versions(),
            }
            self._write(MANIFEST, json.dumps(about, indent=1).encode())
        self._check_settings()
        if retry:
            self._remove(self.shards("errors"))
        for part in PARTS:
            with self._usable(part):
                self._place.make_folder(part)
        self.remove_partials()
        self._next = {part: 1 + max(self._numbers(part), default=-1) for part in PARTS}
        for part in PARTS:
            for shard in self.shards(part):
                self._done.update(id.encode() for id in self._ids_of(shard))
        self._say()

    @contextlib.contextmanager
    def _usable(self, name: str) -> Iterator[None]:
        """Converts exceptions that are raised by something in the folder.

        Its name is that of the exception if `name` is empty.
        """
        try:
            yield
        except Exception as error:  # pyarrow and packages for URLs have their own kinds of errors.
            why = (isinstance(error, OSError) and error.strerror) or reason(error)
            name = name or getattr(error, "filename", None) or "it"
            raise ValueError(
                f"--out is {printable(self.url)}: {printable(name)} cannot be used "
                f"({printable(why)}). Restore it, move it away, or choose another folder. The "
                "pictures of a shard that is moved away are embedded again."
            ) from error

    def _remove(self, names: Sequence[str]) -> None:
        with self._usable(""):
            self._place.remove(names)

    def _check_settings(self) -> None:
        """Refuses a folder that was written with other settings."""
        if not self._place.kind(MANIFEST):
            return
        where = f"--out is {printable(self.url)}"
        otherwise = "Choose another folder, or replace its contents with --overwrite."
        wanted = dataclasses.asdict(self._settings) | {"width": self._width}
        try:
            manifest = json_objects.expect(_manifest(self._place), FIELDS, MANIFEST, others=True)
            found = manifest["settings"] | {"width": manifest["width"]}
            types = {name: type(value) for name, value in wanted.items() if name in found}
            json_objects.expect(found, types, "settings", others=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where}: its {MANIFEST} is damaged ({printable(reason(error))}). Restore it. "
                f"{otherwise}"
            ) from None
        differing = [name for name in wanted if wanted[name] != found.get(name)]
        if differing:
            changes = "; ".join(
                f"{n} was {quoted(found.get(n))} and is now {wanted[n]!r}" for n in differing
            )
            raise ValueError(
                f"{where}: it was written with other settings ({changes}). {otherwise}"
            )

    def shards(self, part: str) -> list[str]:
        """Returns the names of the complete shards of "embeddings" or "errors", in their order."""
        return [f"{part}/{number:06d}.parquet" for number in sorted(self._numbers(part))]

    def _numbers(self, part: str) -> list[int]:
        """Returns the numbers of the complete shards.

        Raises:
          ValueError: there are other parquet files.
        """
        numbers = []
        with self._usable(part):
            names = self._place.names(part)
        for name in names:
            if found := SHARD.fullmatch(name):
                numbers.append(int(found[1]))
            elif name.endswith(".parquet") and not name.startswith("."):
                with self._usable(f"{part}/{name}"):
                    raise ValueError("`embed` gives other names to its shards")
        return numbers

    def _ids_of(self, shard: str) -> Iterator[str]:
        import pyarrow.parquet

        with (
            self._usable(shard),
            self._place.open(shard) as file,
            pyarrow.parquet.ParquetFile(file) as table,
        ):
            check_schema(os.path.dirname(shard), table.schema_arrow)
            for batch in table.iter_batches(columns=["id"]):
                if batch["id"].null_count:
                    raise ValueError("an id is missing")
                yield from batch["id"].to_pylist()

    def is_done(self, id: str) -> bool:
        return id.encode() in self._done

    def done_ids(self) -> Iterator[str]:
        """Yields the ids that earlier runs have written."""
        for part in PARTS:
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
        with self._writing():
            self._place.write(name, content)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._hold.check()
        try:
            yield
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            if isinstance(self._place, Local) and not isinstance(error, OSError):
                raise
            why = (isinstance(error, OSError) and error.strerror) or reason(error)
            raise UnfinishedError(
                f"{printable(self.url)} cannot be written ({printable(why)}). The shards in it are "
                "kept. Make room, and run the same command again to resume the work."
            ) from error

    def commit(self, part: str, partial: str) -> list[tuple[str, str]]:
        """Turns a complete file that another process wrote into a shard.

        Rows whose ids are already in shards are left out, and recorded as errors.

        Returns:
          The id and reason of each row in the new shard.
        """
        import pyarrow.parquet

        self._hold.check()
        with self._place.open(partial) as file:
            columns = [name for name in ("id", "reason") if part == "errors" or name == "id"]
            table = pyarrow.parquet.read_table(file, columns=columns)
        ids = table["id"].to_pylist()
        new = [self._done.add(id.encode()) for id in ids]
        shard = f"{part}/{self._next[part]:06d}.parquet"
        if all(new):
            with self._writing():
                self._place.rename(partial, shard)
        else:
            for id in itertools.compress(ids, (not is_new for is_new in new)):
                self.fail(id, SAME_ID)
            with self._place.open(partial) as file:
                whole = pyarrow.parquet.read_table(file)
            self._write(shard, parquet_bytes(whole.filter(new)))
            self._remove([partial])
        self._next[part] += 1
        self._say()
        reasons = table["reason"].to_pylist() if part == "errors" else [""] * len(ids)
        return list(itertools.compress(zip(ids, reasons), new))

    def remove_partials(self) -> None:
        """Removes the files that killed processes left behind."""
        for folder in ("", *PARTS):
            self._remove(self._partials(folder))

    def _partials(self, folder: str) -> list[str]:
        with self._usable(folder):
            names = filter(is_partial, self._place.names(folder))
            return [f"{folder}/{name}".lstrip("/") for name in names]

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


def _hold_of(place: Place, url: str) -> Lock | Lease:
    if isinstance(place, Remote):
        return Lease(place.fs, place.path(LEASE), url)
    assert isinstance(place, Local)
    return Lock(place.path(LOCK), url)


def check_folder(url: str) -> None:
    """Refuses an output folder that is a file, or that `embed` did not write.

    Raises:
      OSError: the folder cannot be reached.
      ValueError: the folder is refused; the message is the reason.
    """
    place, where = place_of(url), f"--out is {printable(url)}"
    kind = place.kind()
    if kind is None:
        if not is_url(url) and os.path.islink(url):
            raise ValueError(f"{where}: it is a dangling link. Choose another folder.")
        return
    if kind != FOLDER:
        raise ValueError(
            f"{where}: it is {kind}, expected a folder, or a name that ends in .npz. Choose "
            "another name."
        )
    if not place.kind(MANIFEST):
        # A run may have been killed before it wrote its manifest, or after it removed the shards
        # and the manifest of earlier runs.
        others = [x for x in place.names() if x not in (LOCK, LEASE) and not is_partial(x)]
        others = [x for x in others if x not in PARTS or place.kind(x) != FOLDER or place.names(x)]
        if others:
            raise ValueError(
                f"{where}: it has files that `embed` did not write, such as "
                f"{printable(others[0])}. Choose an empty or a new folder."
            )
        return
    try:
        written, why = _manifest(place), "its format is another one"
    except (OSError, ValueError) as error:
        written, why = None, reason(error)
    if not isinstance(written, dict) or written.get("format") != FORMAT:
        raise ValueError(
            f"{where}: this version of `embed` did not write its {MANIFEST} ({printable(why)}). "
            "Restore the file, or choose another folder."
        )


def _manifest(place: Place) -> Any:
    """Returns the JSON value in the manifest.

    Raises:
      OSError, ValueError: the manifest cannot be read; the message says why.
    """
    with place.open(MANIFEST) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return json_objects.parse(content)
