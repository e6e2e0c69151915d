"""The rhythm of a run: how often it saves, and whether it has stopped."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMITS = 10
"""Number of the last commits that count."""
_LEAST_COMMITS = 3
_SILENT = 3.0
"""Intervals without a commit after which a run counts as silent."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Seconds between the commits of a run, and since the last one."""

    every: float | None
    """Median; None: there are too few commits."""
    since: float

    @property
    def silent(self) -> bool:
        """Whether the run has not saved for three times its usual interval."""
        return self.every is not None and self.since > _SILENT * self.every


def rhythm_of(times: Iterable[str | None], now: dt.datetime | None = None) -> Rhythm | None:
    """The rhythm of a run with commits at these times, in ISO 8601; None: no time is known.

    >>> times = [f"2026-01-01T00:0{minute}:00+00:00" for minute in (0, 4, 8, 9)]
    >>> rhythm_of(times, dt.datetime(2026, 1, 1, 0, 22, tzinfo=dt.UTC))
    Rhythm(every=240.0, since=780.0)
    """
    now = dt.datetime.now(dt.UTC) if now is None else now
    known = sorted(time for text in times if (time := time_of(text)) is not None)[-COMMITS:]
    if not known:
        return None
    intervals = [(b - a).total_seconds() for a, b in pairwise(known)]
    every = median(intervals) if len(known) >= _LEAST_COMMITS else None
    return Rhythm(every, max(0.0, (now - known[-1]).total_seconds()))


def time_of(text: str | None) -> dt.datetime | None:
    """A time with a zone, as records have it; None: the text is not one."""
    try:
        time = dt.datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo is not None else None
