"""The journal of the service, in a SQLite database that must not be deleted.

It has the jobs of the service and what verifications have found.

A row of a job is durable before the job starts, and its outcome is durable before a client can see
it. A job that is `running` when the service starts was interrupted, and is queued again. The order
of jobs is that of their numbers; no decision depends on their times. A number comes from the clock,
so it does not tell a user how many jobs others have started.
"""

from __future__ import annotations

import json
import threading
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.format.documents import utc_now
from shardckpt.serve.access.identity import WHO, readable
from shardckpt.serve.jobs.database import COMPLETE, JournalDatabase
from shardckpt.serve.jobs.rows import JobRow, Verification, job_of, verification_of

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from pathlib import Path

    from shardckpt.serve.jobs.rows import JobState

MOST_QUEUED = 1000
"""Most jobs that wait."""
_MOST_JOBS, _MOST_VERIFICATIONS = 20_000, 20
"""Most ended jobs, and most verifications of a checkpoint, that are kept; older ones are
deleted."""
_PRUNE = (
    "DELETE FROM jobs WHERE state IN ('done', 'failed', 'cancelled') "
    "AND number <= (SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET ?)"
)
_PRUNE_EVERY, _MOST_NOTICES, _BATCH = 100, 1000, 500
_JOB, _VERIFICATION = (
    ", ".join(one.name for one in fields(kind)) for kind in (JobRow, Verification)
)


class Journal(JournalDatabase):
    """Jobs and verifications. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Open or make the journal of a state directory, which the catalogue has locked.

        Raises:
            StorageError: it is damaged, of another version, or cannot be written.
        """
        super().__init__(directory)
        self.changed = threading.Condition(self._lock)
        """Notified when a job has changed."""
        self.keeps_notices = False
        """Whether somebody reads notices."""
        self._progress: dict[int, tuple[int, int]] = {}
        self._added = 0

    # --- jobs

    def find(self, who: str, key: str, operation: str, asked: Mapping[str, Any]) -> JobRow | None:
        """The job that somebody has started with an idempotency key.

        Raises:
            OptionError: the key belongs to a job with other arguments. StorageError: the journal
                cannot be read.
        """
        jobs = self._jobs("who = ? AND key = ?", (who, key))
        if not jobs:
            return None
        job = jobs[0]
        text = self._all("SELECT asked FROM jobs WHERE number = ?", (job.number,))
        if (job.operation, text) != (operation, [(_sorted_text(asked),)]):
            raise OptionError(
                f"the idempotency key belongs to job {job.number}, a different request; give each "
                "request a key of its own."
            )
        return job

    def add(
        self,
        operation: str,
        asked: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        subject: str,
        destination: str | None,
        who: str,
        key: str | None,
    ) -> tuple[JobRow, bool]:
        """Queue a job; return it, and whether it is new.

        Args:
            operation: its operation.
            asked: what was asked for, as JSON: what `find` compares.
            arguments: the arguments of the operation, as JSON.
            subject: see `JobRow`.
            destination: see `JobRow`.
            who: see `JobRow`.
            key: an idempotency key of `who`: the second call with it returns the job of the first.

        Raises:
            OptionError: too many jobs wait, or as for `find`.
            StorageError: the journal cannot be written.
        """
        with self.changed:
            earlier = None if key is None else self.find(who, key, operation, asked)
            if earlier is not None:
                return earlier, False
            if (
                self._all("SELECT count(*) FROM jobs WHERE state = 'queued'", ())[0][0]
                >= MOST_QUEUED
            ):
                raise OptionError(
                    f"{MOST_QUEUED:,} jobs wait already; wait for some, or cancel some."
                )
            number, roots = self._next("jobs"), _text(WHO.get().roots)
            self._write(
                "INSERT INTO jobs (number, operation, asked, arguments, subject, destination, "
                "who, key, state, created, roots) VALUES (?,?,?,?,?,?,?,?,'queued',?,?)",
                (
                    number,
                    operation,
                    _sorted_text(asked),
                    json.dumps(arguments),
                    subject,
                    destination,
                    who,
                    key,
                    utc_now(),
                    roots,
                ),
            )
            self._added += 1
            if self._added % _PRUNE_EVERY == 0:
                self._write(_PRUNE, (_MOST_JOBS,))
            self.changed.notify_all()
            return self.job(number), True

    def job(self, number: int) -> JobRow:
        """A job by its number.

        Raises:
            NotFoundError: there is none. StorageError: the journal cannot be read.
        """
        mine, names = _readable()
        jobs = self._jobs(f"number = ? AND {mine}", (number, *names))
        if not jobs:
            raise NotFoundError(f"there is no job {number}; GET /v1/jobs lists them.")
        return jobs[0]

    def jobs(
        self,
        *,
        state: str | None = None,
        operation: str | None = None,
        subject: str | None = None,
        who: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[JobRow]:
        """Jobs, the latest first.

        Args:
            state: only those in this state.
            operation: only those of this operation.
            subject: only those about this id, or that write to it.
            who: only those of this user.
            before: only those with smaller numbers.
            limit: most jobs.

        Raises:
            StorageError: the journal cannot be read.
        """
        mine, names = _readable()
        terms, values = [mine, "number < ?"], [*names, before if before is not None else (1 << 62)]
        equal = (("state = ?", state), ("operation = ?", operation), ("who = ?", who))
        for term, value in equal:
            if value is not None:
                terms.append(term)
                values.append(value)
        if subject is not None:
            terms.append("(subject = ? OR destination = ?)")
            values += [subject, subject]
        return self._jobs(f"{' AND '.join(terms)} ORDER BY number DESC LIMIT ?", (*values, limit))

    def queued(self) -> list[JobRow]:
        """The jobs that wait, the first one first."""
        return self._jobs("state = 'queued' ORDER BY number")

    def begin(self, number: int) -> bool:
        """Note that a job starts; return whether it still waited. Raises StorageError."""
        with self.changed:
            if self.job(number).state != "queued":
                return False
            started = (
                "UPDATE jobs SET state = 'running', tries = tries + 1, started = "
                "coalesce(started, ?) WHERE number = ?"
            )
            self._write(started, (utc_now(), number))
            self.changed.notify_all()
            return True

    def note_progress(self, number: int, done: int, total: int) -> None:
        """Set a job's progress, which is kept in memory until the job is not running any more."""
        with self._lock:
            self._progress[number] = done, total

    def end(
        self,
        number: int,
        state: JobState,
        *,
        result: Any = None,
        error: Mapping[str, str] | None = None,
        notice: Mapping[str, Any] | None = None,
    ) -> None:
        """Note that a job has ended, or that it waits again, and a notice about it.

        Raises StorageError.
        """
        with self.changed:
            done, total = self._progress.get(number, (None, None))
            over = None if state == "queued" else utc_now()
            sql = (
                "UPDATE jobs SET state = ?, ended = ?, result = ?, error = ?, kills = 0, "
                "done = coalesce(?, done), total = coalesce(?, total) WHERE number = ?"
            )
            self._write_with(
                notice, sql, (state, over, _text(result), _text(error), done, total, number)
            )
            self._progress.pop(number, None)
            self.changed.notify_all()

    def cancel(self, number: int) -> JobRow:
        """Cancel a job: one that was never started ends at once.

        Others are marked, and end when their process has ended: that of an earlier service may
        still run a queued one.

        Raises:
            NotFoundError: there is none. OptionError: it has ended. StorageError: the journal
                cannot be written.
        """
        with self.changed:
            job = self.job(number)
            if job.is_over:
                raise OptionError(
                    f"job {number} is {job.state}; only one that waits or runs can be cancelled."
                )
            ends = not job.tries
            self._write(
                "UPDATE jobs SET cancelling = 1, state = ?, ended = ? WHERE number = ?",
                ("cancelled" if ends else job.state, utc_now() if ends else None, number),
            )
            self.changed.notify_all()
            return self.job(number)

    def counts(self) -> dict[str, int]:
        """Number of jobs by state. Raises StorageError."""
        mine, names = _readable()
        return dict(
            self._all(f"SELECT state, count(*) FROM jobs WHERE {mine} GROUP BY state", names)  # noqa: S608
        )

    # --- verifications

    def begin_verification(self, ident: str, attempt: str, job: int | None) -> Verification:
        """Begin a verification of an attempt, by a scrub or a job. Raises StorageError."""
        with self._lock:
            number = self._next("verifications")
            begin = "INSERT INTO verifications (number, id, attempt, begun, job) VALUES (?,?,?,?,?)"
            self._write(begin, (number, ident, attempt, utc_now(), job))
            kept = "SELECT number FROM verifications WHERE id = ? ORDER BY number DESC LIMIT ?"
            last = f"SELECT max(number) FROM verifications WHERE id = ? AND {COMPLETE}"  # noqa: S608
            self._write(
                f"DELETE FROM verifications WHERE id = ? AND number NOT IN ({kept}) AND number "  # noqa: S608
                f"IS NOT ({last})",
                (ident, ident, _MOST_VERIFICATIONS, ident),
            )
            return self._verifications("WHERE number = ?", (number,))[0]

    def unfinished_verification(self, ident: str, job: int | None) -> Verification | None:
        """The verification that a scrub, or a job, has begun and not ended. Raises StorageError."""
        unfinished = self._verifications(
            "WHERE id = ? AND job IS ? AND ended IS NULL ORDER BY number DESC LIMIT 1", (ident, job)
        )
        return unfinished[0] if unfinished else None

    def update_verification(
        self, one: Verification, *, over: bool = False, notice: Mapping[str, Any] | None = None
    ) -> Verification:
        """Write the progress of a verification, or its end and a notice about the end.

        The notice is durable together with the end. Raises StorageError.
        """
        one = replace(one, ended=utc_now()) if over else one
        values = (
            one.ended,
            one.chunks,
            one.total,
            one.bytes,
            one.damaged,
            json.dumps(one.damage),
            one.error,
            one.number,
        )
        sql = (
            "UPDATE verifications SET ended=?, chunks=?, total=?, bytes=?, damaged=?, damage=?, "
            "error=? WHERE number = ?"
        )
        self._write_with(notice, sql, values)
        return one

    def verifications(self, ident: str | None = None, *, limit: int = 100) -> list[Verification]:
        """Verifications of a checkpoint, or of all, the latest first. Raises StorageError."""
        mine, names = readable("id")
        where, values = (
            (f"{mine} AND id = ?", (*names, ident)) if ident is not None else (mine, (*names,))
        )
        return self._verifications(f"WHERE {where} ORDER BY number DESC LIMIT ?", (*values, limit))

    def latest_verifications(self, idents: Sequence[str] | None = None) -> dict[str, Verification]:
        """By id, the latest verification that has read everything, or found damage.

        Raises StorageError.
        """
        where = "" if idents is None else f"AND id IN ({','.join('?' * len(idents))})"
        last = f"SELECT max(number) FROM verifications WHERE {COMPLETE} {where} GROUP BY id"  # noqa: S608
        return {
            one.id: one
            for one in self._verifications(f"WHERE number IN ({last})", tuple(idents or ()))
        }

    def verified(self, known: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Attempt and end of the latest verification, by id of known checkpoints.

        The end is given only if the verification has read everything. Raises StorageError.

        Other calls go on meanwhile: a journal may have a million verifications.
        """
        attempts: dict[str, tuple[str, str]] = {}
        for first in range(0, len(known), _BATCH):
            batch = known[first : first + _BATCH]
            last = (
                f"SELECT max(number) FROM verifications WHERE {COMPLETE} AND id IN "  # noqa: S608
                f"({','.join('?' * len(batch))}) GROUP BY id"
            )
            sql = (
                "SELECT id, attempt, iif(error IS NULL, ended, '') "  # noqa: S608
                f"FROM verifications WHERE number IN ({last})"
            )
            attempts |= {ident: (attempt, ended) for ident, attempt, ended in self._all(sql, batch)}
        return attempts

    def verified_besides(self, known: Container[str], most: int, roots: Container[str]) -> set[str]:
        """Ids of other checkpoints than the known ones that verifications are of, at most so many.

        Only those of some roots, by name. Raises StorageError.
        """
        others: set[str] = set()
        sql = "SELECT DISTINCT id FROM verifications WHERE id > ? ORDER BY id LIMIT ?"
        ids = [""]
        while ids and len(others) < most:
            ids = [ident for (ident,) in self._all(sql, (ids[-1], _BATCH))]
            mine = (ident for ident in ids if ident.partition("/")[0] in roots)
            others.update(
                islice((ident for ident in mine if ident not in known), most - len(others))
            )
        return others

    def forget_verifications(self, idents: Sequence[str]) -> None:
        """Forget all verifications of some checkpoints. Raises StorageError."""
        self._write(
            f"DELETE FROM verifications WHERE id IN ({','.join('?' * len(idents))})",  # noqa: S608
            idents,
        )

    def damaged_verifications(self) -> dict[str, Verification]:
        """The latest ended verifications that found damage, by id. Raises StorageError."""
        later = f"SELECT max(number) FROM verifications WHERE {COMPLETE} AND id = one.id"  # noqa: S608
        verifications = self._verifications(
            "AS one INDEXED BY by_damage WHERE damaged > 0 AND ended IS NOT NULL AND number = "
            f"({later})"
        )
        return {one.id: one for one in verifications}

    # --- notices for the webhook

    def _write_with(
        self, notice: Mapping[str, Any] | None, sql: str, values: Sequence[Any]
    ) -> None:
        """Write, and queue a notice if there is a webhook, in one transaction."""
        if notice is not None and self.keeps_notices:
            self.add_notice(notice, (sql, values))
        else:
            self._write(sql, values)

    def add_notice(self, body: Mapping[str, Any], *others: tuple[str, Sequence[Any]]) -> None:
        """Queue a notice, in one transaction with other writes.

        The oldest are dropped when there are too many. Raises StorageError.
        """
        with self._lock:
            number = self._write(
                "INSERT INTO notices (body) VALUES (?)", (json.dumps(body),), *others
            )
            self._write("DELETE FROM notices WHERE number <= ?", (number - _MOST_NOTICES,))

    def notices(self, after: int = 0, limit: int = 10) -> list[tuple[int, str]]:
        """Number and body of the oldest notices, those after one first. Raises StorageError."""
        oldest = "SELECT number, body FROM notices ORDER BY number <= ?, number LIMIT ?"
        return self._all(oldest, (after, limit))

    def drop_notice(self, number: int) -> None:
        """Forget a notice. Raises StorageError."""
        self._write("DELETE FROM notices WHERE number = ?", (number,))

    # --- roots that had checkpoints or a marker

    def remembered_roots(self) -> dict[str, bool]:
        """Whether a root had a marker, by its place. Raises StorageError."""
        return {
            place: bool(marked)
            for place, marked in self._all("SELECT place, marked FROM roots", ())
        }

    def remember_root(self, place: str, *, marked: bool) -> None:
        """Remember a root. Raises StorageError."""
        self._write("INSERT OR REPLACE INTO roots VALUES (?, ?)", (place, marked))

    # --- runs that were seen saving

    def saving(self) -> set[str]:
        """Ids of the runs that were saving at the last look. Raises StorageError."""
        return {run for (run,) in self._all("SELECT run FROM saving", ())}

    def set_saving(
        self, run: str, *, saving: bool, notice: Mapping[str, Any] | None = None
    ) -> None:
        """Remember whether a run saves, and queue a notice. Raises StorageError."""
        sql = (
            "INSERT OR IGNORE INTO saving VALUES (?)"
            if saving
            else "DELETE FROM saving WHERE run = ?"
        )
        self._write_with(notice, sql, (run,))

    # ---

    def _jobs(self, where: str, values: Sequence[Any] = ()) -> list[JobRow]:
        """Jobs, with the progress of those that run."""
        with self._lock:
            rows = map(job_of, self._all(f"SELECT {_JOB} FROM jobs WHERE {where}", values))  # noqa: S608
            known = [(one, self._progress.get(one.number, (one.done, one.total))) for one in rows]
        return [replace(one, done=done, total=total) for one, (done, total) in known]

    def _verifications(self, where: str, values: Sequence[Any] = ()) -> list[Verification]:
        return [
            *map(
                verification_of,
                self._all(f"SELECT {_VERIFICATION} FROM verifications {where}", values),  # noqa: S608
            )
        ]

    def clock(self, offset: float) -> float | None:
        """Write down how far the machine's clock is from one that does not jump.

        Return what was written before. Raises StorageError.
        """
        with self._lock:
            before = self._all("SELECT offset FROM clock", ())
            self._write("DELETE FROM clock", (), ("INSERT INTO clock VALUES (?)", (offset,)))
        return float(before[0][0]) if before else None


def _readable() -> tuple[str, list[str]]:
    """SQL that selects jobs between roots that the user may read, and its values."""
    (subject, names), (destination, others) = (
        readable("subject"),
        readable("coalesce(destination, subject)"),
    )
    return f"{subject} AND {destination}", [*names, *others]


def _sorted_text(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, sort_keys=True)


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
