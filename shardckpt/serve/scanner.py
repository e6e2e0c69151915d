"""The scanner: a thread that keeps the catalogue like the roots.

A cycle goes through the directories below each root, level by level, and reads the commit records
that are new or have changed. On a disk a record is read again when its time, or that of its
directory, has changed. On an object store a committed checkpoint is looked at again after `_AGAIN`
seconds, and a directory without checkpoints after `_EMPTY` seconds; announced ones at once. A
record there is read again only if its generation has changed.

A directory that cannot be read is passed over, and what was known of it stays. So do all rows of a
root that has vanished.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import places
from shardckpt.commit.publish import RECORD
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.io.status import is_link
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.runs.catalog import entries_at, with_markers
from shardckpt.runs.ended import ENDED
from shardckpt.serve.jobs.background import BackgroundWork
from shardckpt.serve.roots import DEPTH
from shardckpt.serve.vanished import RootWatch
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.runs.catalog import CatalogEntry
    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.roots import Roots

_log = logging.getLogger("shardckpt.serve")
_LEAST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_SHARE = 0.1
"""Largest share of the time that cycles take, up to the longest pause."""
_AGAIN, _EMPTY = 600.0, 60.0
_BATCH, _MOST_ANNOUNCED = 512, 16_384
_MOST_MEASURED = 100
"""Most directories of an unfinished save whose files are measured."""
_STEP_OF_TIMES = 2_000_000_000
"""Nanoseconds."""


@dataclass(slots=True)
class _Seen:
    """State of a directory at its last scan."""

    children: dict[str, Store] = field(default_factory=dict)
    """Directories below it that may hold checkpoints, by id."""
    entry: CatalogEntry | None = None
    version: tuple[int, ...] | None = None
    token: object = None
    """On an object store, from the second look on: token of the record (`Store.change_token`)."""
    due: float = 0.0
    """Time of the next scan, by the monotonic clock."""


class Scanner(BackgroundWork):
    """Scans the roots in the background."""

    def __init__(
        self,
        roots: Roots,
        catalogue: Catalogue,
        on_scan: Callable[[float], object] = lambda _: None,
    ) -> None:
        """Nothing is scanned before `start` or `scan`.

        Args:
            roots: what to scan.
            catalogue: where to put what is found.
            on_scan: called after each cycle with its seconds.
        """
        super().__init__("scanner", _log, "the roots could not be scanned", again=_LEAST_PAUSE)
        self.problems: dict[str, str] = {}
        """Error of listing a root, or the reason for which it has vanished, by the root's name."""
        self.passed_over: dict[str, str] = {}
        """Error of reading a directory, by its id."""
        self.ended: set[str] = set()
        """Ids of runs that are marked as ended."""
        self.watch = RootWatch(roots, catalogue)
        self.complete = threading.Event()
        """Set after the first cycle."""
        self._roots, self._catalogue, self._on_scan = roots, catalogue, on_scan
        self.root_names = tuple(roots.places)
        self._fresh = set(roots.places)
        """Roots of which the catalogue may have rows of an earlier process, or of before they
        vanished."""
        self._seen: dict[str, _Seen] = {}
        self._announced: set[str] = set()

    def announce(self, ident: str) -> None:
        """Look at a place, and those above it, now."""
        if len(self._announced) < _MOST_ANNOUNCED:
            self._announced.add(ident)
        self._wake.set()

    def look(self) -> float:
        """One cycle, and how long to wait after it."""
        begun = time.monotonic()
        self.scan()
        took = time.monotonic() - begun
        self._on_scan(took)
        return min(max(_LEAST_PAUSE, took / _SHARE), _LONGEST_PAUSE)

    def scan(self) -> None:
        """One cycle. Errors of the storage are noted by root; what was known of it stays."""
        if self._catalogue.renewed():
            self._seen.clear()
        while self._announced:  # others add to it meanwhile
            for above in _upto(self._announced.pop()):
                if above in self._seen:
                    self._seen[above].due, self._seen[above].version = 0.0, None
        for name, root in self._roots.places.items():
            try:
                lost = self.watch.lost_marker(name)
                gone = set() if lost else self._scan_root(name, Store.open(root))
                if not self._stopped.is_set():
                    self._settle(name, gone, lost=lost)
            except ShardckptError as e:
                if self.problems.get(name) != str(e):
                    _log.warning("root %s: %s", name, e)
                self.problems[name] = str(e)
                self._fresh.add(name)  # what this cycle has found to be gone may still have rows
        self.complete.set()

    def _settle(self, name: str, gone: set[str], *, lost: bool) -> None:
        """Remove the rows of what is gone from a root, unless all of the root has vanished."""
        present = {
            one
            for one, seen in self._seen.items()
            if seen.entry is not None and _is_below(one, name)
        }
        over = [one for one in self.passed_over if _is_below(one, name)]
        if not present and over and not lost:  # nothing is known
            return
        reason = self.watch.judge(name, present=bool(present))
        if reason is not None:
            self.problems[name] = reason
            self._seen = {one: seen for one, seen in self._seen.items() if not _is_below(one, name)}
            self._fresh.add(name)
            return
        if name in self._fresh:
            gone |= {
                one
                for one in self._catalogue.idents(name)
                if not any(_is_below(one, above) for above in over)
            }
        if gone - present:
            self._catalogue.replace({}, gone - present)
        self._fresh.discard(name)
        self.problems.pop(name, None)

    def _scan_root(self, name: str, root: Store) -> set[str]:
        """Put what is new in a root into the catalogue; return the ids of what is gone."""
        gone: set[str] = set()
        level = [(name, root)]
        for _ in range(DEPTH):
            below: list[tuple[str, Store]] = []
            for first in range(0, len(level), _BATCH):
                if self._stopped.is_set():
                    return set()
                batch = level[first : first + _BATCH]
                due = [one for one in batch if self._is_due(*one)]
                looked = map_on_threads(lambda one: self._look_or_pass(*one), due)
                gone |= self._note(dict(zip((ident for ident, _ in due), looked, strict=True)))
                for ident, _ in batch:
                    below += self._seen[ident].children.items()
            level = below
        return gone

    def _look_or_pass(self, ident: str, store: Store) -> _Seen:
        """Look at a directory; if it cannot be read, keep what is known of it.

        Raises StorageError for a root.
        """
        try:
            seen = self._look(ident, store)
        except (ShardckptError, OSError, ValueError, RecursionError) as e:
            if "/" not in ident:
                raise (
                    StorageError(f"{store}: it cannot be listed ({e}).")
                    if not isinstance(e, ShardckptError)
                    else e
                ) from e
            self._pass_over(ident, str(e))
            before = self._seen.get(ident, _Seen())
            due = time.monotonic() + _LONGEST_PAUSE
            return _Seen(before.children, before.entry, due=due)
        self.passed_over.pop(ident, None)
        return seen

    def _pass_over(self, ident: str, reason: str) -> None:
        if ident not in self.passed_over:
            _log.warning("passed over", extra={"fields": {"id": ident, "reason": reason}})
        self.passed_over[ident] = reason

    def _is_due(self, ident: str, store: Store) -> bool:
        seen = self._seen.get(ident)
        if seen is None or time.monotonic() >= seen.due:
            return True
        return seen.version != _version(store)

    def _look(self, ident: str, store: Store) -> _Seen:
        """List a directory, and read its record if there is one."""
        version = _version(store)
        listed = store.list_children()
        (self.ended.add if ENDED in listed else self.ended.discard)(ident)
        children = {
            f"{ident}/{child}": place for child, place in places(store, listed) if child != "."
        }
        for child in [
            child for child, place in children.items() if not self._is_inside(child, place)
        ]:
            del children[child]
        before, token = self._seen.get(ident, _Seen()), None
        entry = before.entry
        if version is None and entry is not None and entry.state == "committed":
            token = store.change_token(RECORD)
        if entry is not None and token is not None and token == before.token:
            entry = with_markers(entry, store, listed)
        else:
            entry = self._entry(ident, store, listed)
        now = time.monotonic()
        if (
            version is not None
            and entry is not None
            and entry.state != "uncommitted"
            and _is_settled(version)
        ):
            due = inf  # or when its version changes
        elif version is None and (entry is not None or not children):
            due = now + (
                _AGAIN
                if entry is not None and entry.state == "committed"
                else 0
                if entry is not None
                else _EMPTY
            )
        else:
            due = now
        return _Seen(children, entry, version, token, due)

    def _entry(self, ident: str, store: Store, listed: list[str]) -> CatalogEntry | None:
        """The checkpoint at a place; otherwise its last unfinished attempt."""
        if all(child != RECORD and "-" not in child for child in listed):
            return None
        name = ident.rpartition("/")[2]
        for everything in (False, True):
            entries = entries_at(store, name, listed, everything=everything)
            if entries:
                last = (
                    entries[0]
                    if not everything
                    else max(entries, key=lambda one: natural_key(one.attempt or ""))
                )
                return last if last.state != "uncommitted" else self._measure(ident, store, last)
        return None

    def _measure(self, ident: str, store: Store, last: CatalogEntry) -> CatalogEntry:
        """An unfinished save with the bytes that it holds.

        In an object store, where that takes requests, once it is idle.
        """
        before = self._seen.get(ident, _Seen()).entry
        known = None if before is None or before.attempt != last.attempt else before.stored_bytes
        if store.near or (known is None and (last.idle or 0) > _AGAIN):
            known = _bytes_below(store, f"{last.attempt}/", [_MOST_MEASURED])
        return replace(last, stored_bytes=known)

    def _is_inside(self, ident: str, place: Store) -> bool:
        """Whether a directory on a disk is not a link out of its root."""
        if not is_link(place.local_path("")):
            return True
        return place.location.is_within(self._roots.places[ident.partition("/")[0]])

    def _note(self, looked: dict[str, _Seen]) -> set[str]:
        """Put what was found into the catalogue.

        Forget what is gone, and return the ids of that.
        """
        changed: dict[str, tuple[str, CatalogEntry]] = {}
        gone: list[str] = []
        removed: set[str] = set()
        for ident, seen in looked.items():
            before = self._seen.get(ident, _Seen())
            removed |= before.children.keys() - seen.children.keys()
            if seen.entry is None and before.entry is not None:
                gone.append(ident)
            elif seen.entry is not None and before.entry != seen.entry:
                changed[ident] = (ident.rpartition("/")[0] or ident, seen.entry)
        stack = [*removed]
        while stack:  # the removed ones that were seen, and what was seen below them
            ident = stack.pop()
            if ident in self._seen:
                gone.append(ident)
                stack += self._seen[ident].children
        if changed:
            for ident in self._put(changed):
                looked[ident].entry = None
        self._seen |= looked
        for ident in gone:
            if ident not in looked:
                self._seen.pop(ident, None)
                self.passed_over.pop(ident, None)
        return set(gone)

    def _put(self, changed: dict[str, tuple[str, CatalogEntry]]) -> list[str]:
        """Put entries into the catalogue.

        Return the ids of those that no row can hold, which are passed over.
        """
        try:
            self._catalogue.replace(changed, ())
        except (ValueError, OverflowError, TypeError) as e:
            if len(changed) > 1:
                return [odd for ident, one in changed.items() for odd in self._put({ident: one})]
            self._pass_over(
                next(iter(changed)), f"its record has values that no list can hold ({e})"
            )
            return list(changed)
        return []


def _upto(ident: str) -> list[str]:
    """The ids above an id, and the id."""
    parts = ident.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _is_below(ident: str, above: str) -> bool:
    """Whether an id is another one, or below it."""
    return ident == above or ident.startswith(f"{above}/")


def _bytes_below(store: Store, prefix: str, left: list[int]) -> int:
    """Bytes of the files below a directory, as far as so many directories have them."""
    left[0] -= 1
    inside = [f"{prefix}{child}" for child in store.list_children(prefix) if child.endswith("/")]
    return sum(store.sizes(prefix).values()) + sum(
        _bytes_below(store, child, left) for child in inside if left[0] > 0
    )


def _is_settled(version: tuple[int, ...]) -> bool:
    """Whether a change now would have another time than the last one.

    File systems keep times in steps of up to some seconds.
    """
    return abs(time.time_ns() - max(version)) > _STEP_OF_TIMES


def _version(store: Store) -> tuple[int, ...] | None:
    """On a disk: times that change when the record or the names in the directory change."""
    path = store.local_path("")
    if path is None:
        return None
    times = []
    for one in (path, path / RECORD):
        try:
            times.append(one.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)
