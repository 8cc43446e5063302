"""A set of ids that does not grow in memory."""

import sqlite3
from collections.abc import Iterable


class Ids:
    """A set of ids on disk: SQLite's temporary database, which keeps a few MB in memory.

    The file has no name, and goes with the process.
    """

    def __init__(self) -> None:
        # Autocommit, no journal: nobody reads it after a crash.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, id: bytes) -> bool:
        """Adds an id; returns whether it is new."""
        return self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (id,)).rowcount == 1

    def update(self, ids: Iterable[bytes]) -> None:
        """Adds ids."""
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?)", ((id,) for id in ids))
        self._database.execute("COMMIT")

    def __contains__(self, id: bytes) -> bool:
        found = self._database.execute("SELECT 1 FROM ids WHERE id = ?", (id,))
        return found.fetchone() is not None
