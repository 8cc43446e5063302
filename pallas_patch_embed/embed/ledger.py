"""What the shards of a folder contain: which pictures, and whether they were changed since.

Pictures, sources, ids and times are compared by hashes of 128 and 63 bits, which are unique in
practice.
"""

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_patch_embed.embed.ids import TOGETHER, Filter, room, temporary_database
from pallas_patch_embed.embed.units import Entry, Origin

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
            modified = int.from_bytes(_hash_of_many(origin.modified)[:8]) >> 1
        return cls(size, modified)

    def may_be(self, other: "Version") -> bool:
        """Returns whether nothing that is known of both versions differs."""
        return all(
            a == b or unknown in (a, b) for a, b, unknown in zip(self, other, UNKNOWN_VERSION)
        )


UNKNOWN_VERSION = Version(NO_SIZE, NO_TIME)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@functools.lru_cache(256)
def _hash_of_many(text: str) -> bytes:
    """Returns the hash of a text that many pictures of a tar or a table share."""
    return _hash(text)


def key(entry: Entry) -> bytes:
    """Returns a key of 16 bytes for the picture's origin, or for its id if there is no origin."""
    source, row = entry.origin[:2]
    return _hash(f"{source}\0{row}") if source else _id_key(entry.id)


def _id_key(id: str) -> bytes:
    return _hash(f"\0{id}")


def state(entry: Entry, known: Version, *, failed: bool) -> State:
    """Compares a picture's version with the one that a shard records.

    A picture that has no embedding and was changed is new. So is one that did not exist before.
    """
    version = Version.of(entry.origin)
    if not failed:
        return State.DONE if version.may_be(known) else State.CHANGED
    appeared = bool(entry.origin.source) and known == UNKNOWN_VERSION != version
    return State.FAILED if version.may_be(known) and not appeared else State.NEW


class Ledger:
    """A table of the pictures in shards, in a temporary file; about 10 MB are in memory.

    Args:
      unique_ids: whether different pictures must have different ids.
      retry: whether pictures that earlier runs could not embed are new.
      embeds_changed: whether pictures that have changed are embedded again.

    Attributes:
      has_earlier: whether earlier runs have written pictures.
      only_ids: whether there are pictures of which only the ids are known, because an earlier
        version recorded no origins.
      stale: shards with rows that are not valid any more.
    """

    def __init__(
        self, *, unique_ids: bool = True, retry: bool = False, embeds_changed: bool = False
    ):
        picture = "key BLOB PRIMARY KEY, shard INTEGER, failed INTEGER, size INTEGER, "
        picture += "modified INTEGER, source BLOB, id TEXT"
        self._database = temporary_database(
            f"pictures ({picture})",
            # The last column says whether a picture of this run has the id.
            "ids (key BLOB PRIMARY KEY, picture BLOB, now INTEGER)",
            "claims (key BLOB PRIMARY KEY, picture BLOB)",
        )
        # All ids in the table of ids, and those of this run that are not in it yet.
        self._filter = Filter()
        self._taken: list[tuple[bytes, bytes]] = []
        self._unique_ids, self._retry = unique_ids, retry
        self._embeds_changed = embeds_changed
        self.has_earlier = False
        self.only_ids = False
        self.stale: set[int] = set()

    def record(
        self, entries: Sequence[Entry], shard: int, *, failed: bool, over_failed: bool = False
    ) -> None:
        """Records the pictures in a shard of an earlier run, except those in later shards.

        Args:
          entries: the pictures.
          shard: number of the shard.
          failed: whether they have no embedding.
          over_failed: whether they are valid even if a later shard says that they failed.
        """
        self.has_earlier |= len(entries) > 0
        self.only_ids |= not all(entry.origin.source for entry in entries)
        if over_failed:
            self._forget_failed(map(key, entries))
        before = self._database.total_changes
        with room():
            self._database.executemany(
                "INSERT OR IGNORE INTO pictures VALUES (?,?,?,?,?,?,?)",
                [self._row(entry, shard, failed) for entry in entries],
            )
        if self._database.total_changes - before < len(entries):
            self.stale.add(shard)
            entries = [entry for entry in entries if self.shard_of(entry) == shard]
        if self._unique_ids and not failed:
            self._register_ids(entries)

    def _register_ids(self, entries: Sequence[Entry]) -> None:
        """Registers the ids of valid rows of an earlier run.

        A row is not valid if a later shard has its id for a newer version of its source: the source
        has it in another row now.
        """
        rows = [(_id_key(entry.id), key(entry)) for entry in entries]
        for id_key, _ in rows:
            self._filter.add(id_key)
        before = self._database.total_changes
        with room():
            self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?,?,0)", rows)
        if self._database.total_changes - before == len(entries):
            return
        for entry in entries:
            holder = self._holder(entry)
            if holder is not None and self._is_older(holder, entry):
                self._forget(key(entry))

    def written(self, entries: Sequence[Entry], shard: int, *, failed: bool) -> None:
        """Records the pictures in a new shard, instead of the shards that had them before."""
        if self.has_earlier:
            before = map(self.shard_of, entries)
            self.stale.update(earlier for earlier in before if earlier is not None)
        if self.only_ids and not failed:
            self._forget_failed(_id_key(entry.id) for entry in entries)
        with room():
            self._database.executemany(
                "INSERT OR REPLACE INTO pictures VALUES (?,?,?,?,?,?,?)",
                [self._row(entry, shard, failed) for entry in entries],
            )

    def _row(self, entry: Entry, shard: int, failed: bool) -> tuple[object, ...]:
        version, source = Version.of(entry.origin), _hash_of_many(entry.origin.source)
        return key(entry), shard, failed, *version, source, entry.id

    def _forget(self, key: bytes) -> None:
        """Makes the row of a picture stale, if there is one."""
        if (found := self._find("shard", key)) is not None:
            self.stale.add(found[0])
            self._database.execute("DELETE FROM pictures WHERE key = ?", (key,))

    def _forget_failed(self, keys: Iterable[bytes]) -> None:
        """Makes the rows of pictures that have no embedding stale."""
        for key in keys:
            found = self._find("failed", key)
            if found is not None and found[0]:
                self._forget(key)

    def take_id(self, entry: Entry) -> bool:
        """Returns whether a picture may have its id; from now on no other one may.

        If changed pictures are embedded, a picture may take the id of a row of an earlier run that
        belongs to another version of its source. That row is not valid any more.
        """
        if not self._unique_ids:
            return True
        row = (_id_key(entry.id), key(entry))
        if self._filter.add(row[0]):
            self._taken.append(row)
            if len(self._taken) == TOGETHER:
                self._write_taken()
            return True
        holder = self._holder(entry)
        if holder is not None:
            if not (self._embeds_changed and self._is_older(holder, entry)):
                return False
            self._forget(holder)
        with room():
            self._database.execute("INSERT OR REPLACE INTO ids VALUES (?,?,1)", row)
        return True

    def _write_taken(self) -> None:
        """Writes the ids that are not in the database yet."""
        with room():
            self._database.executemany("INSERT INTO ids VALUES (?,?,1)", sorted(self._taken))
        self._taken.clear()

    def waits_for_change(self, entry: Entry) -> bool:
        """Returns whether a new picture could have its id if changed pictures were embedded."""
        holder = self._holder(entry)
        return holder is not None and not self._embeds_changed and self._is_older(holder, entry)

    def _holder(self, entry: Entry) -> bytes | None:
        """Returns the key of another picture that has the id of this one."""
        self._write_taken()
        found = self._database.execute(
            "SELECT picture FROM ids WHERE key = ?", (_id_key(entry.id),)
        ).fetchone()
        return None if found is None or found[0] == key(entry) else found[0]

    def _is_older(self, holder: bytes, entry: Entry) -> bool:
        """Returns whether an earlier run wrote this row, for another version of a file."""
        now = self._database.execute(
            "SELECT now FROM ids WHERE key = ?", (_id_key(entry.id),)
        ).fetchone()
        row = self._find("source, size, modified", holder)
        return (
            bool(entry.origin.source)
            and row is not None
            and not (now is not None and now[0])
            and row[0] == _hash_of_many(entry.origin.source)
            and not Version.of(entry.origin).may_be(Version(*row[1:]))
        )

    def admitted(self, entry: Entry, state: State) -> Entry | None:
        """Returns a new or changed picture as it is to be written; None if its id is taken.

        The id of a picture file stays as it was typed first. Other ids are those of the tar or the
        table, and may have changed.
        """
        if state is State.CHANGED:
            found = self._find("id", key(entry))
            assert found is not None  # Otherwise it would be new.
            (old,) = found
            if not entry.origin.row:
                return entry._replace(id=old)
            self._write_taken()
            self._database.execute(
                "DELETE FROM ids WHERE key = ? AND picture = ?", (_id_key(old), key(entry))
            )
        return entry if self.take_id(entry) else None

    def shard_of(self, entry: Entry) -> int | None:
        """Returns the shard with the valid row of a picture, or None."""
        found = self._find("shard", key(entry))
        return None if found is None else found[0]

    def state(self, entry: Entry) -> State:
        """Returns what earlier runs have written about a picture."""
        found = self._find("failed, size, modified", key(entry))
        if found is None and self.only_ids and self._claims(entry):
            entry = Entry(entry.id)
            found = self._find("failed, size, modified", key(entry))
        if found is None or (found[0] and self._retry):
            return State.NEW
        return state(entry, Version(*found[1:]), failed=bool(found[0]))

    def _claims(self, entry: Entry) -> bool:
        """Returns whether this is the first picture with the id of a row that has no origin."""
        claim = (_id_key(entry.id), key(entry))
        with room():
            self._database.execute("INSERT OR IGNORE INTO claims VALUES (?,?)", claim)
        found = self._database.execute("SELECT picture FROM claims WHERE key = ?", claim[:1])
        return found.fetchone()[0] == claim[1]

    def _find(self, columns: str, key: bytes) -> tuple[Any, ...] | None:
        found = self._database.execute(f"SELECT {columns} FROM pictures WHERE key = ?", (key,))
        return found.fetchone()

    def snapshot(self) -> "Snapshot":
        """Returns the pictures as an array, 33 bytes for each one."""
        rows = self._database.execute(
            "SELECT key, size, modified, failed FROM pictures WHERE NOT failed OR ? ORDER BY key",
            (not self._retry,),
        )
        return Snapshot(np.fromiter(rows, RECORD), self.only_ids)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The pictures in a ledger, for other processes.

    Attributes:
      records: sorted records.
      only_ids: whether there are pictures of which only the ids are known.
    """

    records: np.ndarray
    only_ids: bool

    def state(self, entry: Entry) -> State:
        """Returns what earlier runs have written about a picture."""
        for each in (entry, Entry(entry.id))[: 1 + self.only_ids]:
            wanted = key(each).rstrip(b"\0")  # numpy removes zeros at the end of what it stores.
            i = np.searchsorted(self.records["key"], wanted)
            if i < len(self.records) and bytes(self.records["key"][i]) == wanted:
                _, size, modified, failed = self.records[i].item()
                return state(each, Version(size, modified), failed=failed)
        return State.NEW
