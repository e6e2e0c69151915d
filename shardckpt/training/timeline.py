"""The steps that will be saved, as process 0 decides and announces them.

A timeline is decided up to and including one step, `until`. It consists of windows, each of which says of its steps

- `save`: save at the first of them that is asked about, or where none is, at the next one that is;
- `busy`: what is due by step numbers alone is skipped, because a save will still be under way. Where steps are skipped at
  all, only the first that is due in a window is saved: nobody knows yet how long that takes.

A process asks about ascending steps, the same ones as all others. For a step beyond `until` there is no answer yet, and
it waits for a longer timeline: so whatever clocks and delays do, processes that answer give the same answer.

Pure: nothing here knows of processes, clocks or keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = ["Notice", "Timeline", "Window"]

_REMEMBERED = 64
"""Windows that are announced. Each save takes two and ends only when all processes have begun it, so a slow one is few behind."""


class Window(NamedTuple):
    """Some consecutive steps."""

    start: int
    """The first."""
    until: int
    """The last."""
    save: bool
    busy: bool


class Notice(NamedTuple):
    """Of preemption."""

    step: int
    """From which on all processes know."""
    source: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is decided."""

    since: int = 0
    """The first step of which it is known."""
    windows: tuple[Window, ...] = ()
    """Ascending, without gaps."""
    notice: Notice | None = None

    @property
    def until(self) -> int:
        """The last step that is decided."""
        return self.windows[-1].until if self.windows else self.since - 1

    def extended(self, until: int, *, save: bool = False, busy: bool = False, apart: bool = False) -> Timeline:
        """One more window, up to `until`; unless it is to be told `apart`, one with the last where both say the same."""
        assert until > self.until
        start, before = self.until + 1, self.windows
        if before and not save and not apart and before[-1].busy == busy:
            return replace(self, windows=(*before[:-1], before[-1]._replace(until=until)))
        kept = (*before, Window(start, until, save, busy))[-_REMEMBERED:]
        return replace(self, since=kept[0].start, windows=kept)

    def noticed(self, source: str) -> Timeline:
        """All processes know of a notice of preemption from the first undecided step on."""
        return replace(self, notice=Notice(self.until + 1, source))

    def wanted(self, step: int, previous: int) -> bool:
        """Whether the leader wants a save at a step.

        Args:
            step: decided.
            previous: the step that was asked about before; one before the first, at first.
        """
        return any(w.save and previous < w.start <= step for w in self.windows)

    def window(self, step: int) -> Window:
        """The window of a step that is decided."""
        return next(w for w in self.windows if step <= w.until)

    def to_json(self) -> dict[str, Any]:
        """What is announced."""
        return {"since": self.since, "windows": self.windows, "notice": self.notice}

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Timeline:
        """Inverse of `to_json`."""
        notice = doc["notice"]
        return cls(doc["since"], tuple(Window(*w) for w in doc["windows"]), None if notice is None else Notice(*notice))
