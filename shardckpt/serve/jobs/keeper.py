"""The keeper: applies the rules of retention to runs that an operator has marked as ended.

A dry run comes first, as a job that anybody can see. What it lists is deleted a day later at the
earliest, by another job, if nobody has pinned, tagged or saved anything since. After a jump of the
machine's clock, or a reboot, nothing is deleted for 24 hours.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError, ShardckptError
from shardckpt.io.store import Store
from shardckpt.runs.ended import ended
from shardckpt.serve.jobs.background import BackgroundWork
from shardckpt.serve.jobs.operations import OPERATIONS

if TYPE_CHECKING:
    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.jobs.retention import RetentionRules
    from shardckpt.serve.jobs.rows import JobRow
    from shardckpt.serve.roots import Roots

_log = logging.getLogger("shardckpt.serve.retention")
WHO = "rules"
"""Stands for a token's name in the jobs that the keeper starts."""
DELAY = 24 * 3600.0
"""Seconds between a dry run and the deletion of what it lists, and between two dry runs."""
_POLL = 600.0
_JUMP = 300.0


class Keeper(BackgroundWork):
    """Starts jobs of retention in the background."""

    def __init__(
        self, journal: Journal, catalogue: Catalogue, roots: Roots, rules: RetentionRules
    ) -> None:
        """Nothing is started before `start`."""
        super().__init__("keeper", _log, "the rules could not be applied", first=_POLL, again=_POLL)
        self._journal, self._catalogue, self._roots, self.rules = journal, catalogue, roots, rules
        self._offset = _offset()
        before = journal.clock(self._offset)
        known = before is not None and abs(before - self._offset) <= _JUMP
        self._not_before = time.monotonic() + (0 if known else DELAY)

    def look(self) -> float:
        """Start the jobs that are due.

        Raises:
            StorageError: the catalogue or the journal cannot be used.
        """
        self._watch_the_clock()
        for run in self._catalogue.all_runs():
            if self._stopped.is_set():
                break
            try:
                if self.rules.rule_for(run) is None:
                    continue
                self._roots.only_ident(run)
                mark = ended(Store.open(self._roots.locate(run)))
                if mark is not None:
                    self._next(run, mark.when)
            except ShardckptError as e:
                _log.warning("retention", extra={"fields": {"run": run, "reason": str(e)}})
        return _POLL

    def _next(self, run: str, marked: str) -> None:
        """Start a dry run, or the deletion of what the last one lists.

        A dry run from before the run was marked as ended, at the time `marked`, does not count, nor
        do those of users; but while one runs or waits, nothing is started.
        """
        jobs = self._journal.jobs
        for state in ("queued", "running"):
            if jobs(operation="retain", subject=run, state=state, limit=1):
                return
        mine = jobs(operation="retain", subject=run, who=WHO, limit=1)
        recent = jobs(operation="retain", subject=run)
        deletions = [job for job in recent if job.arguments.get("apply") is not None]
        last = max([*mine, *deletions], key=lambda job: job.number, default=None)
        result = {} if last is None else last.result or {}
        if last is None or (last.state == "done" and result.get("ended") != marked):
            self._start(run, None)
        elif last.is_over and self._is_old(last):
            self._start(run, last if result.get("dry") and result["steps"] else None)

    def _is_old(self, job: JobRow) -> bool:
        assert job.ended is not None
        age = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(job.ended)).total_seconds()
        return age >= DELAY and time.monotonic() >= self._not_before

    def _start(self, run: str, dry: JobRow | None) -> None:
        asked = OPERATIONS["retain"].arguments(
            {"run": run} | ({} if dry is None else {"apply": dry.number})
        )
        arguments = asked | {"expected": None if dry is None else expected(dry, run)}
        job, _ = self._journal.add(
            "retain", asked, arguments, subject=run, destination=None, who=WHO, key=None
        )
        _log.info(
            "retention", extra={"fields": {"run": run, "job": job.number, "dry": dry is None}}
        )

    def _watch_the_clock(self) -> None:
        offset = _offset()
        if abs(offset - self._offset) > _JUMP:
            self._not_before = time.monotonic() + DELAY
            _log.warning(
                "the clock has jumped", extra={"fields": {"seconds": round(offset - self._offset)}}
            )
            self._journal.clock(offset)
        self._offset = offset


def expected(dry: JobRow, run: str) -> dict[str, str]:
    """The steps that a dry run has listed for a run, by name: their attempts.

    Raises:
        OptionError: the job is not a finished dry run for this run.
    """
    result: dict[str, Any] = dry.result or {}
    if (
        dry.operation != "retain"
        or dry.subject != run
        or dry.state != "done"
        or not result.get("dry")
    ):
        raise OptionError(
            f"apply={dry.number}: give the number of a finished `retain` job of {run} that was "
            "started without `apply`."
        )
    return {one["name"]: one["attempt"] for one in result["steps"]}


def _offset() -> float:
    """The clock of the machine relative to one that does not jump."""
    return time.time() - time.monotonic()
