"""Rules for the faults that requests meet.

1. A `Rule` says what goes wrong (`fault`), with which requests (`kinds`, `objects`), and when:
   after the first `skip` of them, `times` times, each with `probability`.
2. A `RuleBook` asks its rules in order, once for each request. The first that fires and breaks
   something decides what becomes of the request; delays and bandwidth limits add to that.

A rule without `times` holds until it is removed: that is an outage.
"""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

from fault_requests import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_requests import Operation

__all__ = ["FAULTS", "Fate", "Link", "Rule", "RuleBook"]

FAULTS = {
    "status": "answer with the code `status`; the storage is not asked",
    "reset": (
        "reset the connection after `after_bytes` of the request's body (None: all of it); the "
        "storage is not asked"
    ),
    "lost-answer": (
        "the storage does what it was asked to; then the connection is reset instead of the answer"
    ),
    "late": "reset the connection after the request; the storage gets it when the proxy is told to "
    "let it land",
    "rate": (
        "answer 429 to what would change an object within `seconds` of its last change, as Cloud "
        "Storage does within one"
    ),
    "truncate": "close the connection after `after_bytes` of the answer's body (None: half of it)",
    "shorten": "send `after_bytes` of the answer's body (None: half of it) as if that were all",
    "latency": "wait `seconds` before anything is done",
    "together": (
        "wait until `requests` of one object have come, before anything is done with the first "
        "of them"
    ),
    "bandwidth": (
        "let bodies through, up and down and of all requests together, at `bytes_per_second`"
    ),
}
"""Fault → its effect, in words."""
_BREAKING = FAULTS.keys() - {"latency", "together", "bandwidth"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault, the requests that may meet it, and how many of them do."""

    fault: str
    """One of `FAULTS`."""
    status: int = 503
    after_bytes: int | None = None
    seconds: float = 0.0
    requests: int = 2
    bytes_per_second: float = 0.0
    kinds: tuple[Kind, ...] = ()
    """Kinds of requests that it is about; () is all."""
    objects: str = "*"
    """Shell pattern of `bucket/object` (of a listing, `bucket/prefix`); `*` matches slashes,
    too."""
    skip: int = 0
    """Matching requests that it lets pass first: k - 1 for the k-th."""
    times: int | None = 1
    """Number of times that it fires; None: until it is removed."""
    probability: float = 1.0
    """Of firing, for each matching request after the skipped ones."""
    seed: int = 0
    """Of the coin that is tossed."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        object.__setattr__(self, "kinds", tuple(self.kinds))  # JSON has lists
        strange = [kind for kind in self.kinds if kind not in get_args(Kind)]
        if self.fault not in FAULTS or strange:
            raise ValueError(
                f"{strange or self.fault!r}: kinds are {', '.join(get_args(Kind))}; faults are "
                f"{', '.join(FAULTS)}."
            )
        if self.fault == "status" and not 400 <= self.status <= 599:
            raise ValueError(f"status {self.status} is no failure; give 400 to 599.")
        if self.fault == "bandwidth" and self.bytes_per_second <= 0:
            raise ValueError("bandwidth needs bytes_per_second above 0.")

    @classmethod
    def from_json(cls, doc: Any) -> Rule:
        """The rule that a JSON object with this class's fields describes.

        Raises:
            ValueError: it has others, or lacks `fault`, or a value means nothing.
        """
        known = {f.name for f in fields(cls)}
        if not isinstance(doc, dict) or not doc.keys() <= known or "fault" not in doc:
            raise ValueError(
                f"{doc!r}: a rule is an object with `fault` and some of {', '.join(sorted(known))}."
            )
        try:
            return cls(**doc)
        except TypeError as e:
            raise ValueError(str(e)) from e

    def matches(self, operation: Operation) -> bool:
        """Whether it is about such requests."""
        return (not self.kinds or operation.kind in self.kinds) and fnmatchcase(
            operation.object, self.objects
        )


class Link:
    """A line that all requests share: bytes go through one after another."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def reserve(self, nbytes: int, now: float) -> float:
        """Seconds to wait until that many bytes are through."""
        self._free_at = max(self._free_at, now) + nbytes / self._rate
        return self._free_at - now


@dataclass(frozen=True, slots=True)
class Fate:
    """The fault that breaks one request, its delays, and the lines of its bodies."""

    rule: Rule | None = None
    """The rule that breaks it."""
    delay: float = 0.0
    """Seconds before anything is done."""
    requests: int = 0
    """Of the same object, for which it waits."""
    links: tuple[Link, ...] = ()
    """Lines that its bodies go through."""


class _Entry:
    """A rule in a book, and how far it is."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.matched = 0
        self.fired = 0
        self.link = Link(rule.bytes_per_second) if rule.fault == "bandwidth" else None
        self._coin = random.Random(rule.seed)
        self._changed: dict[str, float] = {}
        """Object → when it was changed last; for `rate`."""

    def fires(self, operation: Operation) -> bool:
        rule = self.rule
        if not rule.matches(operation) or (rule.times is not None and self.fired >= rule.times):
            return False
        self.matched += 1
        if self.matched <= rule.skip or (
            rule.probability < 1 and self._coin.random() >= rule.probability
        ):
            return False
        if rule.fault == "rate" and not self._too_soon(operation):
            return False
        self.fired += 1
        return True

    def _too_soon(self, operation: Operation) -> bool:
        """Whether an object would be changed again; if not, it is changed now."""
        if not operation.mutates:
            return False
        now = time.monotonic()
        if now < self._changed.get(operation.object, -math.inf) + self.rule.seconds:
            return True
        self._changed[operation.object] = now
        return False


class RuleBook:
    """The rules in force; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()

    def add(self, *rules: Rule) -> None:
        """Add rules after those in force."""
        with self._lock:
            self._entries += map(_Entry, rules)

    def clear(self) -> None:
        """Remove all: the outage is over."""
        with self._lock:
            self._entries.clear()

    @contextmanager
    def during(self, *rules: Rule) -> Iterator[None]:
        """These rules, for as long as the block runs."""
        entries = [_Entry(rule) for rule in rules]
        with self._lock:
            self._entries += entries
        try:
            yield
        finally:
            with self._lock:
                self._entries = [entry for entry in self._entries if entry not in entries]

    def fired(self) -> list[tuple[Rule, int]]:
        """The rules in force, and how often each has fired."""
        with self._lock:
            return [(entry.rule, entry.fired) for entry in self._entries]

    def decide(self, operation: Operation) -> Fate:
        """The fate of a request; to be asked for once per request."""
        broken_by: Rule | None = None
        delay, requests = 0.0, 0
        links: list[Link] = []
        with self._lock:
            for entry in self._entries:
                if (entry.rule.fault in _BREAKING and broken_by is not None) or not entry.fires(
                    operation
                ):
                    continue
                if entry.link is not None:
                    links.append(entry.link)
                elif entry.rule.fault == "latency":
                    delay += entry.rule.seconds
                elif entry.rule.fault == "together":
                    requests = entry.rule.requests
                else:
                    broken_by = entry.rule
        return Fate(broken_by, delay, requests, tuple(links))
