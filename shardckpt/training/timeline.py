"""The timeline of saves, as process 0 decides and announces it.

A timeline is decided up to and including one step, `until`. It consists of windows. Each window has
two flags for its steps:

- `save`: save at the first of its steps that is asked about, or else at the next step that is;
- `busy`: skip steps that are due by their numbers alone, because a save will still be in flight.
  Where steps may be skipped at all, only the first due step of a window is saved, because nobody
  knows yet how long that save takes.

All processes ask about the same steps, in ascending order. For a step beyond `until` there is no
answer yet, and a process waits for a longer timeline: so all processes that answer give the same
answer, whatever their clocks and delays.

The module is pure: it knows no processes, clocks or keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

_REMEMBERED = 64
"""Number of announced windows. Each save takes two and ends only when all processes have begun it,
so a slow process is few behind."""


class Window(NamedTuple):
    """A range of consecutive steps."""

    start: int
    """The first step."""
    until: int
    """The last step."""
    save: bool
    busy: bool


class Notice(NamedTuple):
    """A notice of preemption."""

    step: int
    """The first step at which all processes know of it."""
    source: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The decided windows of steps."""

    since: int = 0
    """The first step that the timeline covers."""
    windows: tuple[Window, ...] = ()
    """The windows, ascending and without gaps."""
    notice: Notice | None = None

    @property
    def until(self) -> int:
        """The last decided step."""
        return self.windows[-1].until if self.windows else self.since - 1

    def extended(
        self, until: int, *, save: bool = False, busy: bool = False, apart: bool = False
    ) -> Timeline:
        """The timeline with one more window, up to `until`.

        It is merged with the last window where both say the same, unless `apart`.
        """
        assert until > self.until
        start, before = self.until + 1, self.windows
        if before and not save and not apart and before[-1].busy == busy:
            return replace(self, windows=(*before[:-1], before[-1]._replace(until=until)))
        kept = (*before, Window(start, until, save, busy))[-_REMEMBERED:]
        return replace(self, since=kept[0].start, windows=kept)

    def noticed(self, source: str) -> Timeline:
        """The timeline with a notice of preemption.

        All processes know the notice from the first undecided step on.
        """
        return replace(self, notice=Notice(self.until + 1, source))

    def wants_save(self, step: int, previous: int) -> bool:
        """Whether the leader wants a save at a step.

        Args:
            step: a decided step.
            previous: the last step that was asked about; at first, a step before the first one.
        """
        return any(w.save and previous < w.start <= step for w in self.windows)

    def window(self, step: int) -> Window:
        """The window of a decided step."""
        return next(w for w in self.windows if step <= w.until)

    def to_json(self) -> dict[str, Any]:
        """The announced form, as JSON."""
        return {"since": self.since, "windows": self.windows, "notice": self.notice}

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Timeline:
        """Inverse of `to_json`."""
        notice = doc["notice"]
        return cls(
            doc["since"],
            tuple(Window(*w) for w in doc["windows"]),
            None if notice is None else Notice(*notice),
        )
