"""The scrub: every chunk of every checkpoint is read and verified once per period.

One checkpoint at a time is verified, in a process like that of a job, within a rate limit. A
checkpoint is due if its attempt was not verified within the period; those never verified come
first. A verification that was interrupted goes on where it was. Damage is written down at once;
when the checkpoint is done, damage is logged, and a notice for the webhook is durable.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from typing import TYPE_CHECKING, Any

from shardckpt.serve.access.identity import may_read
from shardckpt.serve.jobs.background import BackgroundWork
from shardckpt.serve.jobs.runner import JobProcess
from shardckpt.serve.jobs.verification import VerificationNotes

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.jobs.tally import Tally
    from shardckpt.serve.roots import Roots

_log = logging.getLogger("shardckpt.serve.scrub")
_POLL, _LONGEST_POLL = 1.0, 30.0
_AGAIN_SECONDS = 600.0
"""Seconds before an interrupted verification is tried again."""
_FUTURE = dt.timedelta(hours=1)


class Scrubber(BackgroundWork):
    """Verifies checkpoints in the background."""

    def __init__(
        self,
        journal: Journal,
        tally: Tally,
        directory: Path,
        roots: Roots,
        *,
        period: float,
        rate: int,
        vanished: Collection[str] = (),
    ) -> None:
        """Nothing is read before `start`.

        Args:
            journal: where verifications are written down.
            tally: knows which checkpoints are due.
            directory: for the file by which processes lock a scrub.
            roots: where the checkpoints lie.
            period: seconds within which each checkpoint is verified once.
            rate: most bytes per second.
            vanished: names of roots that have vanished, of which nothing is read.
        """
        super().__init__("scrub", _log, "the scrub failed", first=_POLL, again=_LONGEST_POLL)
        self._journal, self._tally, self._directory, self._roots = journal, tally, directory, roots
        self.period, self.rate, self._vanished = period, rate, vanished
        self._not_before: dict[str, float] = {}
        self._pause = _POLL
        self.at_work: str | None = None
        """Id of the checkpoint that is being verified."""
        self._process: JobProcess | None = None

    def stop(self) -> None:
        """End; the verification at work goes on when the service is started again."""
        self._stopped.set()
        if self._process is not None:
            self._process.end()
        super().stop()

    def status(self) -> dict[str, Any]:
        """Progress of the period: `period` and `rate`.

        `checkpoints`, `bytes`, `due` and `due_bytes` of them; `at_work`, `keeps_up`.
        """
        counts, at_work = self._tally.get(), self.at_work
        return {
            "period": self.period,
            "rate": self.rate,
            "checkpoints": counts.checkpoints,
            "bytes": counts.stored_bytes,
            "due": counts.due,
            "due_bytes": counts.due_bytes,
            "at_work": at_work if at_work is not None and may_read(at_work) else None,
            "keeps_up": counts.stored_bytes <= self.rate * self.period,
        }

    def look(self) -> float:
        """Verify the checkpoint that is due first. Raises StorageError."""
        try:
            self._tally.get()
            due = next(filter(self._may, self._tally.due), None)
            if due is not None:
                self._verify(due)
                self._tally.drop(due)
            self._pause = _POLL if due is not None else min(2 * self._pause, _LONGEST_POLL)
            return self._pause
        finally:
            self.at_work = None

    def _may(self, ident: str) -> bool:
        return ident.partition("/")[
            0
        ] not in self._vanished and time.monotonic() >= self._not_before.get(ident, 0.0)

    def _verify(self, ident: str) -> None:
        self.at_work = ident
        notes = VerificationNotes(self._journal, self._roots, ident, None)
        begun = None if notes.last is None else dt.datetime.fromisoformat(notes.last.begun)
        if begun is not None and not -_FUTURE < dt.datetime.now(dt.UTC) - begun < dt.timedelta(
            seconds=self.period
        ):
            notes.end({"code": "late", "message": "it took longer than the period"})
        options = {"rate": self.rate}
        self._process = JobProcess(self._directory, self._roots, options)
        if self._stopped.is_set():
            return
        request = {
            "operation": "verify",
            "arguments": {"checkpoint": ident},
            "job": None,
            "who": "scrub",
            "again": False,
        }
        end = self._process.run(
            "scrub", {**request, "resume": notes.resume}, progress=lambda *_: None, note=notes.note
        )
        if self._stopped.is_set():
            return
        if end.error is not None:
            self._not_before[ident] = time.monotonic() + _AGAIN_SECONDS
            if not end.again:
                notes.end(end.error)
            level = (
                logging.INFO if end.error["code"] in ("replaced", "not-found") else logging.WARNING
            )
            _log.log(level, "not verified", extra={"fields": {"checkpoint": ident, **end.error}})
        elif notes.last is not None and notes.last.damaged:
            _log.error(
                "damaged",
                extra={
                    "fields": {
                        "checkpoint": ident,
                        "damaged": notes.last.damaged,
                        "first": notes.last.damage[:1],
                    }
                },
            )
