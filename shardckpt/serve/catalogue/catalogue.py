"""The catalogue: what a scan of the roots has found, in a SQLite database.

The database can be deleted at any time.

1. One process writes to a state directory, which it holds by a lock. One thread of it writes, and
   any thread reads.
2. Where the database is deleted, damaged, or made by another version, it is made anew, and the next
   scan fills it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError, StorageError
from shardckpt.io.failures import storage_errors
from shardckpt.io.locks import lock_whole, seems_at
from shardckpt.serve.access.identity import may_read, readable
from shardckpt.serve.catalogue.query import NO_STEP, cursor_of, has_encoding, like, position_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardckpt.runs.catalog import CatalogEntry
    from shardckpt.serve.catalogue.query import CheckpointQuery

_VERSION = 2
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS checkpoints (
  id TEXT PRIMARY KEY, run TEXT NOT NULL, step INTEGER NOT NULL, state TEXT NOT NULL, created TEXT,
  bytes INTEGER, stored_bytes INTEGER, pinned INTEGER NOT NULL, superseded INTEGER NOT NULL,
  entry TEXT NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS in_order ON checkpoints (run, step, id);
CREATE TABLE IF NOT EXISTS metrics (
  id TEXT NOT NULL REFERENCES checkpoints ON DELETE CASCADE, name TEXT NOT NULL,
  value REAL NOT NULL, PRIMARY KEY (id, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_value ON metrics (name, value);
CREATE TABLE IF NOT EXISTS tags (
  tag TEXT NOT NULL, id TEXT NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
  PRIMARY KEY (tag, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tags_of ON tags (id);
PRAGMA user_version = {_VERSION};
"""
_MOST_IDLE = 8
_STORED = "CAST(total(stored_bytes) AS INTEGER)"
_UNFINISHED = "CAST(total(iif(state = 'uncommitted', stored_bytes, 0)) AS INTEGER)"
MOST_ROWS = 1000
"""Most rows of a page."""


class Catalogue:
    """Runs and checkpoints by id."""

    def __init__(self, directory: Path) -> None:
        """Open or make the database of a state directory.

        Raises:
            OptionError: another process serves with it.
            StorageError: nothing can be written there.
        """
        self._path = directory / "catalogue.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise StorageError(
                f"cannot write to the state directory {directory} ({e.strerror}); give --state "
                "another one."
            ) from e
        try:
            lock_whole(self._lock, directory / "lock")
        except BlockingIOError:
            os.close(self._lock)
            raise OptionError(
                f"another server uses the state directory {directory}; give --state another one."
            ) from None
        except OSError as e:
            os.close(self._lock)
            raise StorageError(
                f"cannot lock the state directory {directory} ({e.strerror}); give --state one on "
                "another file system."
            ) from e
        self._idle: list[sqlite3.Connection] = []
        """Connections for reading that no thread uses; another list for each database."""
        self._damaged = False
        self._fd = -1
        self._writer = self._make()

    def close(self) -> None:
        """Close the database and let the directory go."""
        for db in (*self._idle, self._writer):  # the last one cleans up, and must be able to write
            db.close()
        self._close_file()
        os.close(self._lock)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- writing, by one thread

    def renewed(self) -> bool:
        """Whether the database was deleted or damaged, and is now made anew and empty."""
        try:
            if seems_at(self._fd, self._path) and not self._damaged:
                return False
        except OSError:
            pass  # it was deleted
        with suppress(sqlite3.Error):
            self._writer.close()
        self._close_file()
        old = self._idle
        self._writer = self._make()
        with suppress(IndexError):
            while True:
                old.pop().close()
        return True

    def replace(self, entries: Mapping[str, tuple[str, CatalogEntry]], gone: Iterable[str]) -> None:
        """Put entries by id, each with its run, and remove those with the ids in `gone`.

        Raises:
            StorageError: the database cannot be written.
        """
        try:
            with self._writer as db:
                db.executemany(
                    "DELETE FROM checkpoints WHERE id = ?",
                    [(ident,) for ident in (*gone, *entries)],
                )
                db.executemany(
                    "INSERT INTO checkpoints VALUES (?,?,?,?,?,?,?,?,?,?)",
                    [_row(*one) for one in entries.items()],
                )
                db.executemany(
                    "INSERT INTO metrics VALUES (?,?,?)",
                    [
                        (ident, name, float(value))
                        for ident, (_, entry) in entries.items()
                        for name, value in entry.metrics.items()
                        if value != "nan" and has_encoding(name)  # no query has the other names
                    ],
                )
                tags = [(tag, ident) for ident, (_, entry) in entries.items() for tag in entry.tags]
                db.executemany("INSERT INTO tags VALUES (?,?)", tags)
        except sqlite3.Error as e:
            self._damaged = not isinstance(e, sqlite3.OperationalError)
            raise StorageError(
                f"the catalogue {self._path} cannot be written ({e}); the next scan tries again."
            ) from e

    def _make(self) -> sqlite3.Connection:
        """Open the database for writing.

        One that is damaged, or of another version, is deleted first.
        """
        for last in (False, True):
            try:
                db = sqlite3.connect(self._path, check_same_thread=False)
                db.execute("PRAGMA foreign_keys = ON")
                current = db.execute("PRAGMA user_version").fetchone()[0] in (0, _VERSION)
                # Fails like a damaged one.
                db.executescript(_SCHEMA if current else "SELECT * FROM no_such_table")
                db.execute("SELECT count(*) FROM checkpoints").fetchone()
            except sqlite3.DatabaseError as e:
                if last:
                    raise StorageError(
                        f"the catalogue {self._path} cannot be made ({e}); give --state another "
                        "directory."
                    ) from e
                for suffix in ("", "-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            else:
                break
        with storage_errors("open", self._path):
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._damaged = False
        self._idle = []
        return db

    # --- reading, by any thread

    def sums(self, run: str | None = None, *, text: str | None = None) -> dict[str, int]:
        """Sums over a run, over runs whose id contains a text, or over all.

        Returns:
            `runs`, `checkpoints`, `stored_bytes`, `unfinished_bytes`, `pinned`, and `today`, the
            commits of the last 24 hours.

        Raises:
            StorageError: the database cannot be read.
        """
        mine, names = readable("id")
        yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
        rows = self._read(
            f"SELECT count(DISTINCT run), count(*), {_STORED}, {_UNFINISHED}, total(pinned), "  # noqa: S608
            "total(created > ?) FROM checkpoints "
            f"WHERE run LIKE ? ESCAPE '\\' AND run = coalesce(?, run) AND {mine}",
            (yesterday.isoformat(timespec="seconds"), like(text), run, *names),
        )
        return {
            name: int(n)
            for name, n in zip(
                ("runs", "checkpoints", "stored_bytes", "unfinished_bytes", "pinned", "today"),
                rows[0],
                strict=True,
            )
        }

    def runs(
        self,
        text: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
        *,
        sort: str = "run",
        descending: bool = False,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Runs in order, and the cursor of the next page (None: there is none).

        Args:
            text: a part of the id.
            limit: most runs.
            cursor: end of the last page.
            sort: "run", "created" (of the last commit) or "size".
            descending: the other order.

        Raises:
            OptionError: the cursor is invalid. StorageError: the database cannot be read.
        """
        mine, names = readable("id")
        key = {"run": "''", "created": "coalesce(created, '')", "size": "stored"}[sort]
        after = position_of(cursor, (int if sort == "size" else str, str))
        sign, order = ("<", "DESC") if descending else (">", "ASC")
        rows = self._read(
            f"SELECT *, {key} FROM ("  # noqa: S608
            "SELECT run, count(*), sum(state = 'committed'), sum(state = 'uncommitted'), "
            "sum(state = 'unreadable'), min(nullif(step, -1)), max(nullif(step, -1)), "
            f"CAST(total(bytes) AS INTEGER), {_STORED} AS stored, {_UNFINISHED}, sum(pinned), "
            "max(created) AS created "
            f"FROM checkpoints WHERE run LIKE ? ESCAPE '\\' AND {mine} GROUP BY run) "
            f"{f'WHERE ({key}, run) {sign} (?, ?) ' if after else ''}"
            f"ORDER BY {key} {order}, run {order} LIMIT ?",
            (like(text), *names, *(after or ()), limit + 1),
        )
        keys = (
            *(
                "run",
                "checkpoints",
                "committed",
                "uncommitted",
                "unreadable",
                "first_step",
                "last_step",
            ),
            *("bytes", "stored_bytes", "unfinished_bytes", "pinned", "created"),
        )
        page = [dict(zip(keys, row[:-1], strict=True)) for row in rows[:limit]]
        return page, cursor_of([rows[limit - 1][-1], page[-1]["run"]]) if len(
            rows
        ) > limit else None

    def all_runs(self) -> list[str]:
        """The ids of all runs. Raises StorageError."""
        mine, names = readable("id")
        sql = f"SELECT DISTINCT run FROM checkpoints WHERE {mine} ORDER BY run"  # noqa: S608
        return [run for (run,) in self._read(sql, names)]

    def recent(self, run: str, most: int) -> list[dict[str, Any]]:
        """The last committed steps of a run that are not superseded, in order.

        Each has `id`, `step`, `created` and `metrics`.

        Raises:
            StorageError: the database cannot be read.
        """
        mine, names = readable("id")
        rows = self._read(
            "SELECT id, nullif(step, -1), created, json_extract(entry, '$.metrics') FROM "  # noqa: S608
            f"checkpoints WHERE run = ? AND state = 'committed' AND NOT superseded AND {mine} "
            "ORDER BY step DESC, id DESC LIMIT ?",
            (run, *names, most),
        )
        keys = ("id", "step", "created", "metrics")
        return [
            dict(zip(keys, (*row[:3], json.loads(row[3])), strict=True)) for row in reversed(rows)
        ]

    def checkpoints(self, query: CheckpointQuery) -> tuple[list[dict[str, Any]], str | None]:
        """Checkpoints in order of run and step, and the cursor of the next page.

        The cursor is None if there is no next page.

        Raises:
            OptionError: the cursor is invalid. StorageError: the database cannot be read.
        """
        rows = self._read(*query.sql())
        page = [{"id": row[-1], "run": row[0], **json.loads(row[1])} for row in rows[: query.limit]]
        return page, cursor_of(rows[query.limit - 1][2:]) if len(rows) > query.limit else None

    def find(self, idents: Sequence[str]) -> list[dict[str, Any]]:
        """The checkpoints among some ids, the longest id first.

        Raises:
            StorageError: the database cannot be read.
        """
        idents = [one for one in idents if may_read(one)]
        marks = ",".join("?" * len(idents))
        rows = self._read(
            f"SELECT run, id, entry FROM checkpoints WHERE id IN ({marks}) ORDER BY length(id) "  # noqa: S608
            "DESC",
            tuple(idents),
        )
        return [{"id": row[1], "run": row[0], **json.loads(row[2])} for row in rows]

    def longest(self, idents: Sequence[str]) -> str | None:
        """The longest of some ids that has a checkpoint which is not deleted; None: none has.

        Raises:
            StorageError: the database cannot be read.
        """
        idents = [one for one in idents if may_read(one)]
        marks = ",".join("?" * len(idents))
        rows = self._read(
            f"SELECT id FROM checkpoints WHERE id IN ({marks}) AND state != 'deleted' "  # noqa: S608
            "ORDER BY length(id) DESC LIMIT 1",
            tuple(idents),
        )
        return rows[0][0] if rows else None

    def idents(self, root: str, most: int = -1) -> set[str]:
        """The ids of all checkpoints of a root, or of some, if there are more than `most`.

        Raises:
            StorageError: the database cannot be read.
        """
        return {
            row[0]
            for row in self._read(
                "SELECT id FROM checkpoints WHERE id = ? UNION ALL "
                "SELECT id FROM checkpoints WHERE id >= ? AND id < ? LIMIT ?",
                (root, f"{root}/", f"{root}0", most),
            )
        }

    def committed(self) -> list[dict[str, Any]]:
        """`id`, `attempt`, `created` and `stored_bytes` of all checkpoints.

        The attempt of an unreadable one is empty.

        Raises:
            StorageError: the database cannot be read.
        """
        rows = self._read(
            "SELECT id, coalesce(json_extract(entry, '$.attempt'), ''), created, stored_bytes "
            "FROM checkpoints WHERE state IN ('committed', 'unreadable')",
            (),
        )
        return [
            dict(zip(("id", "attempt", "created", "stored_bytes"), row, strict=True))
            for row in rows
        ]

    def totals(self) -> dict[str, int]:
        """Number of checkpoints by state.

        Raises:
            StorageError: the database cannot be read.
        """
        mine, names = readable("id")
        return dict(
            self._read(
                f"SELECT state, count(*) FROM checkpoints WHERE {mine} GROUP BY state",  # noqa: S608
                names,
            )
        )

    def _read(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        for last in (False, True):
            db, idle = None, self._idle
            try:
                db = self._connection(idle)
                rows = list(db.execute(sql, values))
            except sqlite3.Error as e:
                if db is not None:
                    db.close()
                self._damaged |= not isinstance(e, sqlite3.OperationalError)
                if last:
                    raise StorageError(
                        f"the catalogue cannot be read now ({e}); the next scan makes it anew."
                    ) from e
                continue
            if idle is self._idle and len(idle) < _MOST_IDLE:
                idle.append(db)
            else:
                db.close()
            return rows
        raise AssertionError

    def _connection(self, idle: list[sqlite3.Connection]) -> sqlite3.Connection:
        with suppress(IndexError):
            return idle.pop()
        return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, check_same_thread=False)


def _row(ident: str, checkpoint: tuple[str, CatalogEntry]) -> tuple[Any, ...]:
    run, entry = checkpoint
    step = NO_STEP if entry.step is None or entry.step >= 1 << 63 else entry.step
    document = json.dumps(entry.to_json())
    return (
        ident,
        run,
        step,
        entry.state,
        entry.created,
        entry.nbytes,
        entry.stored_bytes,
        entry.pinned,
        entry.superseded,
        document,
    )
