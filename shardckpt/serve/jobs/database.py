"""The SQLite database of the journal: its tables, how it is opened, read and written."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors
from shardckpt.io.locks import seems_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_EPOCH = 1_767_225_600
"""Start of 2026. Numbers of rows are hundredths of a second since then."""
_VERSION = 1
_LATER = {"roots": "TEXT", "kills": "INTEGER NOT NULL DEFAULT 0"}
"""Columns of jobs that a journal of an earlier version lacks. `kills`: how often in a row the
service was killed while the job ran."""
_MOST_KILLS = 10
DEADLY = {
    "code": "internal",
    "message": f"the service was killed while it ran, {_MOST_KILLS} times in a row; it may need "
    "more memory than there is. Start it anew if that is not so.",
}
"""Error of a queued job that is not started again; the runner ends it, and tells of it."""
COMPLETE = "ended IS NOT NULL AND (error IS NULL OR damaged > 0)"
"""Verifications that have read everything, or found damage before they could not go on."""
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, operation TEXT NOT NULL, asked TEXT NOT NULL,
  arguments TEXT NOT NULL, subject TEXT NOT NULL, destination TEXT, who TEXT NOT NULL, key TEXT,
  state TEXT NOT NULL, cancelling INTEGER NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0,
  done INTEGER, total INTEGER, created TEXT NOT NULL, started TEXT, ended TEXT, result TEXT,
  error TEXT, roots TEXT, kills INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON jobs (who, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_state ON jobs (state, number);
CREATE INDEX IF NOT EXISTS by_subject ON jobs (subject, number);
CREATE TABLE IF NOT EXISTS verifications (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, attempt TEXT NOT NULL,
  begun TEXT NOT NULL, ended TEXT, job INTEGER, chunks INTEGER NOT NULL DEFAULT 0, total INTEGER,
  bytes INTEGER NOT NULL DEFAULT 0, damaged INTEGER NOT NULL DEFAULT 0,
  damage TEXT NOT NULL DEFAULT '[]', error TEXT
);
CREATE INDEX IF NOT EXISTS by_checkpoint ON verifications (id, number);
CREATE INDEX IF NOT EXISTS by_damage ON verifications (id, number) WHERE damaged > 0;
CREATE INDEX IF NOT EXISTS complete ON verifications (id, number) WHERE {COMPLETE};
CREATE TABLE IF NOT EXISTS clock (offset REAL NOT NULL);
CREATE TABLE IF NOT EXISTS roots (place TEXT PRIMARY KEY, marked INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS saving (run TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS notices (number INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL);
PRAGMA user_version = {_VERSION};
"""


class JournalDatabase:
    """The database of a journal. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Open or make it; jobs that ran when the service ended are queued again.

        The runner ends those among them that were being cancelled.

        Raises:
            StorageError: it is damaged, of another version, or cannot be written.
        """
        self._path = directory / "journal.sqlite"
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(self._path, check_same_thread=False)
            self._db.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
            if self._db.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
                raise StorageError(
                    f"the journal {self._path} was made by another version of shardckpt; use that "
                    "one, or move it away."
                )
            self._db.executescript(_SCHEMA)
            columns = {row[1] for row in self._db.execute("PRAGMA table_info(jobs)")}
            for name, kind in _LATER.items():
                if name not in columns:
                    self._db.execute(f"ALTER TABLE jobs ADD COLUMN {name} {kind}")
            if self._db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("its pages are malformed")
            with self._db as db:
                db.execute("UPDATE jobs SET kills = kills + 1 WHERE state = 'running'")
                deadly = "UPDATE jobs SET error = ? WHERE state = 'running' AND kills >= ?"
                db.execute(deadly, (json.dumps(DEADLY), _MOST_KILLS))
                db.execute("UPDATE jobs SET state = 'queued' WHERE state = 'running'")
            with storage_errors("open", self._path):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                """The file in use. Closing it before the database would end SQLite's locks."""
        except sqlite3.Error as e:
            raise StorageError(
                f"the journal {self._path} cannot be used ({e}). Jobs and the history of "
                "verifications are in it; checkpoints are not: make room, or move it away to "
                "begin a new one."
            ) from e

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _all(self, sql: str, values: Sequence[Any]) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as e:
            raise StorageError(f"the journal {self._path.name} cannot be read now ({e}).") from e

    def _write(self, sql: str, values: Sequence[Any], *others: tuple[str, Sequence[Any]]) -> int:
        """Write in one transaction; return the number of the first row."""
        try:
            if not seems_at(self._fd, self._path):
                raise FileNotFoundError("another file is there")
            with self._lock, self._db as db:
                number = db.execute(sql, values).lastrowid or 0
                for other, given in others:
                    db.execute(other, given)
                return number
        except OSError as e:
            raise StorageError(
                f"the journal was deleted or moved while it was used ({e.strerror or e}); start "
                "the service again."
            ) from e
        except sqlite3.Error as e:
            raise StorageError(
                f"the journal {self._path.name} cannot be written ({e}); nothing was changed. Is "
                "the disk full?"
            ) from e

    def _next(self, table: str) -> int:
        """Number of a new row: that of the time, or the next one after the last."""
        last = self._all("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
        return max(int((time.time() - _EPOCH) * 100), last[0][0] + 1 if last else 1)
