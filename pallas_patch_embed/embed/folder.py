"""A folder of parquet shards, which a later run can resume."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pallas_patch_embed.base import ending, json_objects
from pallas_patch_embed.base.files import is_partial
from pallas_patch_embed.base.messages import printable, quoted
from pallas_patch_embed.embed.exclusive import Lease, Lock
from pallas_patch_embed.embed.ledger import Ledger, State, key
from pallas_patch_embed.embed.moved import Moved, check_places
from pallas_patch_embed.embed.options import Options, is_of_patches
from pallas_patch_embed.embed.output import IS_CHANGED, SAME_ID, UnfinishedError
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.place import FILE, FOLDER, Local, Place, Remote, place_of
from pallas_patch_embed.embed.provenance import ABSENT, NULLABLE, Provenance, differences
from pallas_patch_embed.embed.tables import (
    ABOUT,
    ORIGIN,
    check_schema,
    embeddings_table,
    entries_of,
    errors_table,
    kept_bytes,
    parquet_bytes,
    with_entries,
)
from pallas_patch_embed.embed.units import Entry, is_url

# A shard is written when it has this number of rows, when its first row has this age in seconds, or
# when its embeddings and the columns that are kept have this number of bytes. Rows that are not yet
# in a shard are lost if a run is killed.
SHARD_ROWS, SHARD_SECONDS, SHARD_BYTES = 4096, 60.0, 2**26

# Names that begin with "_", or with "__" for folders, are skipped by programs that read all parquet
# files of a folder, such as pyarrow.dataset and Hugging Face's datasets.
EMBEDDINGS, ERRORS = PARTS = ("embeddings", "__errors")
REASON = {EMBEDDINGS: (), ERRORS: ("reason",)}
MANIFEST, MOVED, LOCK, LEASE = "_manifest.json", "_moved.json", ".lock", ".lease.json"
FORMAT = "pallas_patch_embed.embed.2"

# The names and the format of an earlier version, whose folders are converted.
OLD_MANIFEST, OLD_ERRORS, OLD_FORMAT = "manifest.json", "errors", "pallas_patch_embed.embed.1"

# The batch of a run whose manifest does not record it, unless the user chose another one.
OLD_BATCH = 64

# Largest batch that a manifest may record.
MOST_BATCH = 2**16

# The types of the manifest's fields, and its largest size in bytes.
FIELDS: dict[str, type] = {"format": str, "settings": dict, "width": int, "versions": dict}
MOST_BYTES = 2**20

# The names of shards: a number with at least six digits.
SHARD = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})\.parquet")


class Shard(NamedTuple):
    """A shard, whose numbers are in the order in which shards were written."""

    number: int
    part: str

    @property
    def name(self) -> str:
        return f"{self.part}/{self.number:06d}.parquet"


class Folder:
    """A folder of parquet shards, on this machine or at a URL.

      _manifest.json              settings, options and versions, written before all other files
      _moved.json                 moves that are not yet applied to all shards
      embeddings/000000.parquet   columns of `tables.embeddings_table`
      __errors/000001.parquet     columns of `tables.errors_table`

    A shard appears only when it is complete. A run with the same settings resumes the work:
    pictures that are in shards are not read again. Only one run at a time may write, which is
    ensured by a lock or, at a URL, by a lease that the run renews.

    If a picture is embedded again, its new row is in a new shard. Rows that it replaces are removed
    when the run has finished, or when the next one begins: then the other rows of their shard are
    copied to a new one. So of two rows for one picture that of the later shard is valid.

    Args:
      url: URL or path of the folder.
      provenance: the settings and options of the run.
      width: D, the width of an embedding.
      kept: types of the columns that are kept, by their names, if there are no shards yet.
      say: function that shows a line to the user.
    """

    def __init__(
        self,
        url: str,
        provenance: Provenance,
        width: int,
        kept: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.url, self._provenance, self._width = url, provenance, width
        self.kept, self._say_line = dict(kept or {}), say
        self.about = provenance.as_json()
        options = provenance.options
        self._place = place_of(url)
        self.ledger = Ledger(
            unique_ids=not options.repeated_ids,
            retry=options.retry_errors,
            embeds_changed=options.changed == "embed",
        )
        self._rows: list[tuple[Entry, np.ndarray]] = []
        self._errors: list[tuple[Entry, str]] = []
        # A full shard is encoded in another thread, because this takes 50 us for an embedding.
        self._encoder = ThreadPoolExecutor(1)
        self._encoding: tuple[list[Entry], Future[bytes]] | None = None
        # The ledger knows shards by their place in this list.
        self._shards: list[Shard] = []
        self._since, self._bytes = 0.0, 0
        check_folder(url)
        if not options.overwrite:
            self._check_settings()
        check_places(options.moved)
        if options.moved and (options.overwrite or manifest_name(self._place) is None):
            raise ValueError(
                f"--out is {printable(url)}: --moved needs the shards of earlier runs, but there "
                "are none, or --overwrite removes them. Leave out --moved."
            )
        with self._usable(""):
            self._place.make_folder()
        self._hold = _hold_of(self._place, url)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._hold)
        try:
            self._open(options)
            self._stack.enter_context(ending.written_at_end(self.flush))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, options: Options) -> None:
        """Reads or writes the manifest, and reads what is in shards, while no other run does."""
        check_folder(self.url)  # Another run may have begun since the first check.
        if options.overwrite and manifest_name(self._place):
            # The manifest is removed last, because `embed` refuses a folder of files without one.
            for part in self._parts():
                self._remove([*(s.name for s in self.shards(part)), *self._partials(part)])
            manifests = [OLD_MANIFEST] if _is_old(self._place) else []
            for name in (*manifests, MOVED, MANIFEST):
                self._remove([name] if self._place.kind(name) else [])
        is_old = _is_old(self._place)
        if not is_old and not self._place.kind(MANIFEST):
            self._write_manifest(self.about | {"width": self._width})
        self._check_settings()
        self._say_rounding()
        parts = self._parts()
        shards = sorted((shard for part in parts for shard in self.shards(part)), reverse=True)
        self._next = 1 + max((shard.number for shard in shards), default=-1)
        unfinished = self._unfinished_moves()
        if unfinished and options.moved and unfinished != list(options.moved):
            raise ValueError(
                f"--out is {printable(self.url)}: an earlier run with --moved was interrupted. "
                "Run the command without --moved, which completes it, and then give the new move."
            )
        moved = Moved(unfinished or options.moved)
        for shard in shards:
            self._read(shard, moved)
        moved.check()
        if options.ray is not None and options.repeated_ids and self.ledger.only_ids:
            raise ValueError(
                f"--out is {printable(self.url)}: an earlier version wrote it, whose shards do not "
                "say where pictures come from. So --ray could mistake pictures with --repeated-ids "
                "for others. Resume it without --ray."
            )
        # From here on the folder is changed.
        if is_old and not self._place.kind(MANIFEST):
            self._write_manifest(read_manifest(self._place))
        for part in PARTS:
            with self._usable(part):
                self._place.make_folder(part)
        self.remove_partials()
        if options.moved and not self._place.kind(MOVED):
            self._write(MOVED, json.dumps(options.moved).encode())
        self._remove_replaced(moved)
        self._remove([MOVED] if self._place.kind(MOVED) else [])
        if is_old:
            self._remove([OLD_MANIFEST])
        self._say()

    def _write_manifest(self, about: Mapping[str, Any]) -> None:
        self._write(MANIFEST, json.dumps({**about, "format": FORMAT}, indent=1).encode())

    def _unfinished_moves(self) -> list[tuple[str, str]]:
        """Returns the moves that a run was told of, and that ended before it had applied them."""
        if not self._place.kind(MOVED):
            return []
        with self._usable(MOVED), self._place.open(MOVED) as file:
            return [(str(old), str(new)) for old, new in json_objects.parse(file.read(MOST_BYTES))]

    def _parts(self) -> tuple[str, ...]:
        """Returns the folders of shards; the first one is that of the embeddings."""
        return (*PARTS, OLD_ERRORS) if _is_old(self._place) else PARTS

    def _read(self, shard: Shard, moved: Moved) -> None:
        """Records the pictures of a shard. Later shards must have been recorded before."""
        import pyarrow.parquet

        number, failed = len(self._shards), shard.part != EMBEDDINGS
        self._shards.append(shard)
        with (
            self._usable(shard.name),
            self._place.open(shard.name) as file,
            pyarrow.parquet.ParquetFile(file) as table,
        ):
            schema = table.schema_arrow
            check_schema(shard.part, schema, is_of_patches(self._provenance.settings.output))
            if not failed:
                self.kept = {name: schema.field(name).type for name in self.kept}
            columns = [name for name in ("id", *ORIGIN) if name in schema.names]
            if len(columns) <= len(ORIGIN) or shard.part not in PARTS:
                self.ledger.stale.add(number)
            for batch in table.iter_batches(columns=columns):
                if batch["id"].null_count:
                    raise ValueError("an id is missing")
                entries = entries_of(batch)
                now = list(map(moved, entries))
                if now != entries:
                    self.ledger.stale.add(number)
                # Later errors say that these pictures have the ids of others: those of shards
                # without origins, and those that were not yet known to have been moved.
                over_failed = not failed and (now != entries or len(columns) <= len(ORIGIN))
                self.ledger.record(now, number, failed=failed, over_failed=over_failed)

    @ending.deferred()
    def _remove_replaced(self, moved: Moved) -> None:
        """Copies the valid rows of stale shards to new shards, and removes the stale ones."""
        import pyarrow.parquet

        stale = self.ledger.stale
        if stale:
            self._say_line(f"Rewriting {len(stale)} shards.")
        for number in sorted(stale):
            old = self._shards[number]
            with self._usable(old.name), self._place.open(old.name) as file:
                table = pyarrow.parquet.read_table(file)
                about = json.loads((table.schema.metadata or {}).get(ABOUT, b"null"))
            seen: set[bytes] = set()
            entries = list(map(moved, entries_of(table)))
            valid = []
            for entry in entries:
                valid.append(self.ledger.shard_of(entry) == number and key(entry) not in seen)
                seen.add(key(entry))
            if any(valid):
                new = with_entries(table, entries).filter(valid)
                left = list(itertools.compress(entries, valid))
                new_part = EMBEDDINGS if old.part == EMBEDDINGS else ERRORS
                content = parquet_bytes(new, about or self._earlier_about())
                self._write_shard(new_part, content, left)
            self._remove([old.name])
        stale.clear()

    def _earlier_about(self) -> dict[str, Any]:
        """Returns what the manifest says about shards without metadata."""
        manifest = read_manifest(self._place)
        return {name: manifest[name] for name in ("settings", "versions")}

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
        name = manifest_name(self._place)
        if name is None:
            return
        where = f"--out is {printable(self.url)}"
        otherwise = "Choose another folder, or replace its contents with --overwrite."
        settings = self._provenance.settings
        wanted = dataclasses.asdict(settings) | {"width": self._width}
        try:
            manifest = json_objects.expect(read_manifest(self._place), FIELDS, name, others=True)
            found = manifest["settings"] | {"width": manifest["width"]}
            types: dict[str, Any] = {
                name: type(value) for name, value in wanted.items() if name in found
            }
            types |= {name: (kind, type(None)) for name, kind in NULLABLE.items() if name in found}
            json_objects.expect(found, types, "settings", others=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where}: its {name} is damaged ({printable(reason(error))}). Restore it. "
                f"{otherwise}"
            ) from None
        # Earlier versions did not record the column of the pictures, so it is not compared.
        found = ABSENT | {"image_column": settings.image_column} | found
        if self._provenance.recognizes(str(found.get("checkpoint_sha256"))):
            found["checkpoint_sha256"] = settings.checkpoint_sha256
        if changes := differences(found, wanted):
            raise ValueError(
                f"{where}: it was written with other settings ({changes}). {otherwise}"
            )

    def _say_rounding(self) -> None:
        """Says if the embeddings of this run may be rounded differently than those of the first."""
        sizes = {"batch": OLD_BATCH, "packed_row": None}
        first, now = (
            about["versions"] | {name: about.get(name, old) for name, old in sizes.items()}
            for about in (read_manifest(self._place), self.about)
        )
        # A package that is not used any more is one that has changed.
        if changes := differences(first, dict.fromkeys(first) | now):
            self._say_line(
                f"Embeddings of this run may be rounded differently, because {changes}. The "
                "metadata of each shard say what wrote it."
            )

    def shards(self, part: str) -> list[Shard]:
        """Returns the complete shards of a part, in their order."""
        return [Shard(number, part) for number in sorted(self._numbers(part))]

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

    @ending.deferred()
    def add(self, entries: Sequence[Entry], embeddings: Iterable[np.ndarray]) -> None:
        if self._encoding is not None and self._encoding[1].done():
            self._write_encoded()
        for entry, embedding in zip(entries, embeddings):
            if self._bytes >= SHARD_BYTES:
                self._encode()
            self._begin()
            row = embedding.astype(self.embedding_dtype)
            self._rows.append((entry, row))
            self._bytes += row.nbytes + (kept_bytes(entry) if self.kept else 0)
        self._write_if_due()

    @ending.deferred()
    def fail(self, entry: Entry, reason: str) -> None:
        self._begin()
        self._errors.append((entry, reason))
        self._write_if_due()

    @property
    def embedding_dtype(self) -> str:
        """The dtype of the embeddings in shards."""
        return self._provenance.settings.embedding_dtype

    def _begin(self) -> None:
        if not self._rows and not self._errors:
            self._since = time.monotonic()

    def _write_if_due(self) -> None:
        if len(self._rows) >= SHARD_ROWS or self._bytes >= SHARD_BYTES:
            self._encode()
        elif len(self._errors) >= SHARD_ROWS or time.monotonic() - self._since > SHARD_SECONDS:
            self.flush()

    def _encode(self) -> None:
        """Starts to encode a shard, which is written when the next rows are added."""
        self._write_encoded()
        entries, rows = map(list, zip(*self._rows))
        encoded = self._encoder.submit(_encoded, entries, rows, self.kept, self.about)
        self._encoding = entries, encoded
        self._rows, self._bytes = [], 0

    def _write_encoded(self) -> None:
        """Writes the shard that is being encoded, if there is one."""
        if self._encoding is not None:
            entries, encoded = self._encoding
            self._write_shard(EMBEDDINGS, encoded.result(), entries)
            self._encoding = None
            self._say()

    @ending.deferred()
    def flush(self) -> None:
        """Writes everything that is not yet in a shard."""
        self._write_encoded()
        if self._rows:
            self._encode()
            self._write_encoded()
        if self._errors:
            entries = [entry for entry, _ in self._errors]
            content = parquet_bytes(errors_table(self._errors), self.about)
            self._write_shard(ERRORS, content, entries)
            self._errors.clear()
        self._say()

    def _write_shard(self, part: str, content: bytes, entries: Sequence[Entry]) -> None:
        shard = Shard(self._next, part)
        self._write(shard.name, content)
        self._written(shard, entries)

    def _written(self, shard: Shard, entries: Sequence[Entry]) -> None:
        """Records the pictures of a new shard."""
        self._next += 1
        self.ledger.written(entries, len(self._shards), failed=shard.part != EMBEDDINGS)
        self._shards.append(shard)

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

    @ending.deferred()
    def commit(self, part: str, partial: str) -> list[tuple[Entry, str]]:
        """Turns a complete file that another process wrote into a shard.

        Rows of pictures that are already in shards are left out, and those whose ids other pictures
        have are recorded as errors.

        Returns:
          The picture and the reason of each row in the new shard, and of each row that is not in
          it, with the reason IS_CHANGED or SAME_ID.
        """
        import pyarrow.parquet

        self._hold.check()
        with self._place.open(partial) as file:
            table = pyarrow.parquet.read_table(file, columns=["id", *ORIGIN, *REASON[part]])
        found = entries_of(table)
        reasons = table["reason"].to_pylist() if REASON[part] else [""] * len(found)
        written: list[Entry] = []
        places: list[int] = []
        refused: list[tuple[Entry, str]] = []
        met: set[bytes] = set()
        for i, (entry, why) in enumerate(zip(found, reasons)):
            if key(entry) in met:
                continue  # It was named twice.
            met.add(key(entry))
            state = self.ledger.state(entry)
            if why == IS_CHANGED:
                refused.append((entry, why))
            elif state is State.DONE or (state is State.FAILED and part == ERRORS):
                continue  # It was named twice.
            elif (admitted := self.ledger.admitted(entry, state)) is None:
                refused.append((entry, self._refusal(entry)))
            else:
                written.append(admitted)
                places.append(i)
        if written == found:
            shard = Shard(self._next, part)
            with self._writing():
                self._place.rename(partial, shard.name)
            self._written(shard, written)
        else:
            if written:
                with self._place.open(partial) as file:
                    whole = pyarrow.parquet.read_table(file).take(places)
                whole = with_entries(whole, written)
                self._write_shard(part, parquet_bytes(whole, self.about), written)
            self._remove([partial])
        self._say()
        return [(entry, reasons[i]) for entry, i in zip(written, places)] + refused

    def _refusal(self, entry: Entry) -> str:
        """Returns the reason why a picture may not have its id, and records it as an error."""
        if self.ledger.waits_for_change(entry):
            return IS_CHANGED
        self.fail(entry, SAME_ID)
        return SAME_ID

    def remove_partials(self) -> None:
        """Removes the files that killed processes left behind."""
        for folder in ("", *self._parts()):
            self._remove(self._partials(folder))

    def _partials(self, folder: str) -> list[str]:
        with self._usable(folder):
            names = filter(is_partial, self._place.names(folder))
            return [f"{folder}/{name}".lstrip("/") for name in names]

    def _say(self) -> None:
        """Sets the last line that the command prints if a signal ends it."""
        lost = ""
        if self._provenance.options.ray is not None:
            lost = ", and embeds what the nodes have not yet written again"
        ending.state.outcome = (
            f"the shards in {printable(self.url)} are kept; the same command resumes the work{lost}"
        )

    def finish(self) -> str:
        self.flush()
        self._remove_replaced(Moved())
        return printable(self.url)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._stack:
            if error is not None:
                with contextlib.suppress(UnfinishedError):
                    self.flush()


def _encoded(
    entries: Sequence[Entry],
    rows: Sequence[np.ndarray],
    kept: Mapping[str, Any],
    about: Mapping[str, Any],
) -> bytes:
    return parquet_bytes(embeddings_table(entries, rows, kept), about)


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
    name = manifest_name(place)
    if name is None:
        # A run may have been killed before it wrote its manifest, or after it removed the shards
        # and the manifest of earlier runs.
        others = [x for x in place.names() if x not in (LOCK, LEASE) and not is_partial(x)]
        parts = (*PARTS, OLD_ERRORS)
        others = [x for x in others if x not in parts or place.kind(x) != FOLDER or place.names(x)]
        if others:
            raise ValueError(
                f"{where}: it has files that `embed` did not write, such as "
                f"{printable(others[0])}. Choose an empty or a new folder."
            )
        return
    try:
        written, why = read_manifest(place), "its format is another one"
    except (OSError, ValueError) as error:
        written, why = None, reason(error)
    wanted = FORMAT if name == MANIFEST else OLD_FORMAT
    if not isinstance(written, dict) or written.get("format") != wanted:
        raise ValueError(
            f"{where}: this version of `embed` did not write its {name} ({printable(why)}). "
            "Restore the file, or choose another folder."
        )


def recorded_batch(url: str) -> int | None:
    """Returns the batch of the first run into a folder; None if there was no run.

    Raises:
      ValueError: it is not a positive integer.
    """
    place = place_of(url)
    name = manifest_name(place)
    if name is None:
        return None
    batch = read_manifest(place).get("batch", OLD_BATCH)
    if type(batch) is not int or not 0 < batch <= MOST_BATCH:
        raise ValueError(
            f"--out is {printable(url)}: its {name} is damaged (batch is {quoted(batch)}). Restore "
            "it. Choose another folder, or replace its contents with --overwrite."
        )
    return batch


def manifest_name(place: Place) -> str | None:
    """Returns the name of the folder's manifest, or None if it has none."""
    return next((name for name in (MANIFEST, OLD_MANIFEST) if place.kind(name)), None)


def _is_old(place: Place) -> bool:
    """Returns whether an earlier version wrote the folder, and it is not yet converted."""
    if place.kind(OLD_MANIFEST) != FILE:
        return False
    try:
        written = read_manifest(place, OLD_MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(written, dict) and written.get("format") == OLD_FORMAT


def read_manifest(place: Place, name: str | None = None) -> Any:
    """Returns the JSON value in the manifest.

    Raises:
      OSError, ValueError: the manifest cannot be read; the message says why.
    """
    with place.open(name or manifest_name(place) or MANIFEST) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return json_objects.parse(content)
