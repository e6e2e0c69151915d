"""Counts over all checkpoints and verifications.

The verifications of checkpoints that are gone are forgotten here.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from dataclasses import astuple, dataclass, fields
from operator import add
from typing import TYPE_CHECKING

from shardckpt.serve.access.identity import as_service, only_readable
from shardckpt.serve.jobs.background import BackgroundWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.scanner import Scanner

_log = logging.getLogger("shardckpt.serve")
_FUTURE = dt.timedelta(hours=1)
_SHARE, _QUICK = 0.05, 0.1
"""Largest share of the time that slow counting takes, and seconds within which it is quick."""
_FORGET_SECONDS = 600.0
_FORGET, _MOST_GONE = 500, 50_000


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers over all checkpoints that can be verified."""

    checkpoints: int = 0
    stored_bytes: int = 0
    never_verified: int = 0
    due: int = 0
    """Number of those that were not verified within the period."""
    due_bytes: int = 0


class Tally(BackgroundWork):
    """Counts for each request if that is quick, and otherwise from time to time.

    In the second case, counting takes a twentieth of the time, and requests get counts that are
    some seconds old.
    """

    def __init__(
        self, journal: Journal, catalogue: Catalogue, scanner: Scanner, period: float | None
    ) -> None:
        """Count nothing yet; `period` is that of the scrub, in seconds."""
        super().__init__(
            "tally", _log, "the checkpoints could not be counted", again=_FORGET_SECONDS
        )
        self._journal, self._catalogue, self._scanner, self._period = (
            journal,
            catalogue,
            scanner,
            period,
        )
        self._counts: dict[str, Counts] | None = None
        """By root."""
        self.due: Sequence[str] = ()
        """Ids of those that were not verified within the period, in the order of their
        verification."""
        self._counted, self._took = 0.0, 0.0
        self._complete = False
        """Whether the first scan was over when it counted."""
        self._counting = threading.Lock()
        self._dropped: list[str] = []
        self._dropping = threading.Lock()
        self._forget = 0.0
        self._gone: set[str] = set()
        """Ids of checkpoints that were gone at the last look."""

    def get(self) -> Counts:
        """The counts over the roots that the user may read. Raises StorageError."""
        counts = self._counts
        if counts is None or not self._complete or self._took < _QUICK:
            with self._counting, as_service():
                counts = self.count()
        elif time.monotonic() > self._counted + self._took / _SHARE:
            self._wake.set()
        mine = [astuple(one) for one in only_readable(counts).values()]
        return Counts(*map(sum, zip(*mine, strict=True)))

    def count(self) -> dict[str, Counts]:
        """Count now, by root. Raises StorageError."""
        begun, complete = time.monotonic(), self._scanner.complete.is_set()
        dropped = len(self._dropped)
        entries = self._catalogue.committed()
        verified = self._journal.verified([one["id"] for one in entries])
        counted = self._due(entries, verified)
        with self._dropping:
            late = set(self._dropped[dropped:])
            self.due = [one for one in counted if one not in late]
            del self._dropped[:dropped]
        due, none = set(counted) - late, [0] * len(fields(Counts))
        counts: dict[str, list[int]] = {}
        for one in entries:
            ident, stored = one["id"], one["stored_bytes"] or 0
            never = ident not in verified or verified[ident][0] != one["attempt"]
            numbers = (1, stored, never, ident in due, stored if ident in due else 0)
            root = ident.partition("/")[0]
            counts[root] = list(map(add, counts.get(root, none), numbers))
        self._counts = {name: Counts(*numbers) for name, numbers in counts.items()}
        self._counted, self._complete = time.monotonic(), complete
        self._took = self._counted - begun
        return self._counts

    def drop(self, ident: str) -> None:
        """Count a checkpoint that was verified now as not due before the next count."""
        with self._dropping:
            self._dropped.append(ident)
            self.due = [one for one in self.due if one != ident]

    def forget_gone(self) -> None:
        """Forget verifications of checkpoints that are gone now and were gone at the last call.

        Those of roots that are not served now stay. Raises StorageError.
        """
        if (
            not self._scanner.complete.is_set()
            or self._scanner.problems
            or self._scanner.passed_over
        ):
            return
        there = {
            ident for root in self._scanner.root_names for ident in self._catalogue.idents(root)
        }
        gone = self._journal.verified_besides(there, _MOST_GONE, self._scanner.root_names)
        forgotten = sorted(gone & self._gone)
        for first in range(0, len(forgotten), _FORGET):
            if self._stopped.is_set():
                return
            self._journal.forget_verifications(forgotten[first : first + _FORGET])
        self._gone = gone - self._gone

    def look(self) -> float:
        """Count, and from time to time forget what is gone. Raises StorageError."""
        with self._counting:
            self.count()
        if time.monotonic() >= self._forget:
            self._forget = time.monotonic() + _FORGET_SECONDS
            self.forget_gone()
        return _FORGET_SECONDS

    def _due(
        self, entries: Sequence[Mapping[str, Any]], verified: Mapping[str, tuple[str, str]]
    ) -> list[str]:
        """Ids of the checkpoints to verify, in order."""
        if self._period is None:
            return []
        now = dt.datetime.now(dt.UTC)
        since, until = (
            (now - dt.timedelta(seconds=self._period)).isoformat(timespec="seconds"),
            (now + _FUTURE).isoformat(timespec="seconds"),
        )

        def last(one: Mapping[str, Any]) -> str:
            attempt, ended = verified.get(one["id"], ("", ""))
            if attempt != one["attempt"] or not ended:
                return ""
            # Ignore a time in the future: the clock was set back.
            return ended if since < ended < until else "0"

        order = sorted((last(one), one["created"] or "", one["id"]) for one in entries)
        return [ident for when, _, ident in order if len(when) <= 1]
