"""A set of ids on disk, whose use of memory does not grow."""

import contextlib
import sqlite3
from collections.abc import Iterator

from pallas_patch_embed.embed.output import UnfinishedError


def temporary_database(*tables: str) -> sqlite3.Connection:
    """Makes a database on disk that ends with the process and is never committed.

    Args:
      tables: names and columns of its tables.
    """
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    # A single transaction without a journal takes the least time: 2 us for a row instead of 4.
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("BEGIN")
    for table in tables:
        database.execute(f"CREATE TABLE {table} WITHOUT ROWID")
    return database


# Number of marks of a filter, a power of two, and of new ids that are written together.
MARKS, TOGETHER = 2**23, 4096


class Filter:
    """A Bloom filter of ids with two marks for each: it knows of most new ids that they are new.

    It knows this of 95% of one million ids. To look for an id in a database takes 5 us, and with
    many threads 25, because it releases Python's global lock.
    """

    def __init__(self) -> None:
        self._marks = bytearray(MARKS)

    def add(self, id: bytes) -> bool:
        """Adds an id; returns whether it is certainly new."""
        marks, number = self._marks, hash(id)
        first, second = number % MARKS, number // MARKS % MARKS
        if marks[first] and marks[second]:
            return False
        marks[first] = marks[second] = 1
        return True


class Ids:
    """A set of ids in a temporary SQLite database on disk, which keeps about 10 MB in memory.

    The file has no name, and is removed when the process ends.
    """

    def __init__(self) -> None:
        self._database = temporary_database("ids (id BLOB PRIMARY KEY)")
        self._filter = Filter()
        # Ids that are not in the database yet.
        self._new: list[bytes] = []

    def add(self, id: bytes) -> bool:
        """Adds an id; returns whether it is new."""
        if not self._filter.add(id):
            self._write()
            with room():
                added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (id,))
            return added.rowcount == 1
        self._new.append(id)
        if len(self._new) == TOGETHER:
            self._write()
        return True

    def _write(self) -> None:
        with room():
            self._database.executemany(
                "INSERT INTO ids VALUES (?)", [(id,) for id in sorted(self._new)]
            )
        self._new.clear()


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Raises UnfinishedError with advice if there is no room for the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UnfinishedError(
            f"The temporary file of ids cannot be written ({error}). Make room for it, or set the "
            "environment variable SQLITE_TMPDIR to another folder, and run the same command again. "
            "If its output is a folder of shards, it resumes the work."
        ) from error
