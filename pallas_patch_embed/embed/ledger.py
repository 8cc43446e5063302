"""What the shards of a folder contain: which pictures, and whether they were changed since.

Pictures, ids and times are kept as hashes of 128, 128 and 63 bits, which are unique in practice.
"""

import dataclasses
import enum
import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pallas_patch_embed.embed.ids import room, temporary_database
from pallas_patch_embed.embed.units import Entry, Origin, is_url, text
from pallas_patch_embed.messages import printable

# Values of a version that is not known.
NO_SIZE, NO_TIME = -1, 0

# The records of a ledger as an array.
RECORD = np.dtype([("key", "S16"), ("size", "i8"), ("modified", "i8"), ("failed", "?")])


class State(enum.Enum):
    """What earlier runs have written about a picture."""

    NEW = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    CHANGED = enum.auto()


class Version(NamedTuple):
    """Tells whether a file was changed: its size, and a hash of the time of its last change."""

    size: int
    modified: int

    @classmethod
    def of(cls, origin: Origin) -> "Version":
        size = NO_SIZE if origin.size is None else origin.size
        modified = NO_TIME
        if origin.modified:
            modified = int.from_bytes(_hash(origin.modified.encode(), 8)) >> 1
        return cls(size, modified)

    def may_be(self, other: "Version") -> bool:
        """Returns whether nothing that is known of both versions differs."""
        return all(a == b or unknown in (a, b) for a, b, unknown in zip(self, other, UNKNOWN))


UNKNOWN = Version(NO_SIZE, NO_TIME)


def _hash(content: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


def key(entry: Entry) -> bytes:
    """Returns a key of 16 bytes for the picture's origin, or for its id if there is no origin."""
    source, row = entry.origin[:2]
    return _hash(f"{source}\0{row}".encode()) if source else _id_key(entry.id)


def _id_key(id: str) -> bytes:
    return _hash(b"\0" + id.encode())


def state(version: Version, known: Version, failed: bool) -> State:
    """Compares a picture's version with the one that a shard records.

    A picture that has no embedding and was changed is new.
    """
    if version.may_be(known):
        return State.FAILED if failed else State.DONE
    return State.NEW if failed else State.CHANGED


class Ledger:
    """A table of the pictures in shards, in a temporary file; a few MB of it are in memory.

    Args:
      unique_ids: whether different pictures must have different ids.
    """

    def __init__(self, *, unique_ids: bool = True):
        key = "key BLOB PRIMARY KEY"
        columns = f"{key}, shard INTEGER, failed INTEGER, size INTEGER, modified INTEGER"
        self._database = temporary_database(f"pictures ({columns})", f"ids ({key})")
        self._unique_ids = unique_ids
        # Whether there are pictures of earlier runs, and some of which only the ids are known.
        self._has_earlier = self._only_ids = False

    def record(self, entries: Sequence[Entry], shard: int, *, failed: bool) -> int:
        """Records pictures in a shard.

        Returns:
          The number of pictures that were already recorded, in another shard, and still are.
        """
        self._has_earlier |= len(entries) > 0
        self._only_ids |= not all(entry.origin.source for entry in entries)
        rows = [(key(e), shard, failed, *Version.of(e.origin)) for e in entries]
        before = self._database.total_changes
        with room():
            self._database.executemany("INSERT OR IGNORE INTO pictures VALUES (?,?,?,?,?)", rows)
            repeated = len(rows) - (self._database.total_changes - before)
            if self._unique_ids and not failed:
                ids = [(_id_key(entry.id),) for entry in entries]
                self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?)", ids)
        return repeated

    def replace(self, entries: Sequence[Entry], shard: int, *, failed: bool) -> set[int]:
        """Records pictures in a new shard; returns the shards that had some of them before."""
        before = {self.shard_of(entry) for entry in entries} if self._has_earlier else set()
        rows = [(key(e), shard, failed, *Version.of(e.origin)) for e in entries]
        with room():
            self._database.executemany("INSERT OR REPLACE INTO pictures VALUES (?,?,?,?,?)", rows)
        return {shard for shard in before if shard is not None}

    def take_id(self, id: str) -> bool:
        """Returns whether a new picture may have this id; from now on no other one may."""
        if not self._unique_ids:
            return True
        with room():
            added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (_id_key(id),))
        return added.rowcount == 1

    def shard_of(self, entry: Entry) -> int | None:
        """Returns the shard that has the picture, or None."""
        found = self._find("shard", key(entry))
        return None if found is None else found[0]

    def state(self, entry: Entry) -> State:
        """Returns what earlier runs have written about a picture."""
        found = self._find("failed, size, modified", key(entry))
        if found is None and self._only_ids:
            found = self._find("failed, size, modified", _id_key(entry.id))
        if found is None:
            return State.NEW
        failed, *known = found
        return state(Version.of(entry.origin), Version(*known), bool(failed))

    def _find(self, columns: str, key: bytes) -> tuple[int, ...] | None:
        found = self._database.execute(f"SELECT {columns} FROM pictures WHERE key = ?", (key,))
        return found.fetchone()

    def count_failed(self) -> int:
        """Returns the number of pictures without an embedding."""
        (count,) = self._database.execute("SELECT COUNT(*) FROM pictures WHERE failed").fetchone()
        return count

    def snapshot(self) -> "Snapshot":
        """Returns the pictures as an array, 33 bytes for each one."""
        rows = self._database.execute(
            "SELECT key, size, modified, failed FROM pictures ORDER BY key"
        )
        return Snapshot(np.fromiter(rows, RECORD), self._only_ids)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The pictures in a ledger, for other processes.

    Attributes:
      records: sorted records.
      only_ids: whether there are pictures of which only the ids are known.
    """

    records: np.ndarray
    only_ids: bool

    def __len__(self) -> int:
        return len(self.records)

    def state(self, entry: Entry) -> State:
        """Returns what earlier runs have written about a picture."""
        for each in (key(entry), _id_key(entry.id))[: 1 + self.only_ids]:
            # numpy removes zeros at the end of both.
            i = np.searchsorted(self.records["key"], np.bytes_(each))
            if i < len(self.records) and self.records["key"][i] == np.bytes_(each):
                _, size, modified, failed = self.records[i].item()
                return state(Version.of(entry.origin), Version(size, modified), failed)
        return State.NEW


class Moved:
    """Maps pictures of folders or files that were moved to their present place.

    Args:
      pairs: pairs of an earlier and a present path or URL.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]] = ()):
        self._pairs = [(old, _place(old), new, _place(new)) for old, new in pairs]
        self._found: set[str] = set()

    def __call__(self, entry: Entry) -> Entry:
        """Returns the picture with its present origin, whose time of change is not known."""
        source = entry.origin.source
        for old, old_place, _, place in self._pairs:
            # Of pictures that an earlier version embedded, only the ids are known.
            rest = _below(source, old_place) if source else _below(entry.id, old.rstrip("/"))
            if rest is not None:
                self._found.add(old)
                return entry._replace(
                    origin=entry.origin._replace(source=place + rest, modified="")
                )
            if _below(source, place) is not None:
                self._found.add(old)  # An earlier run was told of the move.
        return entry

    def check(self) -> None:
        """Raises ValueError if there was no picture of a folder or file that was moved."""
        for old, _, new, _ in self._pairs:
            if old not in self._found:
                raise ValueError(
                    f"--moved {printable(old)} {printable(new)}: the output has no picture of "
                    "either. Give the folder's earlier path, as it is in the column source."
                )


def _place(path: str) -> str:
    return text(path.rstrip("/") if is_url(path) else os.path.realpath(path))


def _below(path: str, folder: str) -> str | None:
    """Returns the rest of a path in a folder, with its slash; None if it is not in the folder."""
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(f"{folder}/") else None
