"""The scanner: a thread that keeps the catalogue like the roots.

A cycle goes through the directories below each root, level by level, and reads the commit records that are new or have changed. On a
disk a record is read again when its time, or that of its directory, has changed. On an object store a committed checkpoint is looked at
again after `_AGAIN` seconds, and a directory without checkpoints after `_EMPTY` seconds; announced ones at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from shardckpt.commit.attempts import places
from shardckpt.commit.publish import RECORD
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.io.status import is_link
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.reading.catalog import entries_at
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.reading.catalog import CatalogEntry
    from shardckpt.serve.catalogue import Catalogue
    from shardckpt.serve.roots import Roots

_log = logging.getLogger("shardckpt.serve")
_DEPTH = 6
"""Most levels of directories below a root."""
_LEAST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_SHARE = 0.1
"""Largest share of the time that cycles take, up to the longest pause."""
_AGAIN, _EMPTY = 600.0, 60.0
_BATCH = 512
_STEP_OF_TIMES = 2_000_000_000
"""Nanoseconds."""


@dataclass(slots=True)
class _Seen:
    """State of a directory at its last scan."""

    children: dict[str, Store] = field(default_factory=dict)
    """Directories below it that may hold checkpoints, by id."""
    entry: CatalogEntry | None = None
    version: tuple[int, ...] | None = None
    due: float = 0.0
    """Time of the next scan, by the monotonic clock."""


class Scanner:
    """Scans the roots in the background."""

    def __init__(self, roots: Roots, catalogue: Catalogue, on_scan: Callable[[float, int], object] = lambda *_: None) -> None:
        """Nothing is scanned before `start` or `scan`.

        Args:
            roots: what to scan.
            catalogue: where to put what is found.
            on_scan: called after each cycle with its seconds and the number of roots that could not be listed.
        """
        self.problems: dict[str, str] = {}
        """Error of listing a root, by the root's name."""
        self.complete = threading.Event()
        """Set after the first cycle."""
        self._roots, self._catalogue, self._on_scan = roots, catalogue, on_scan
        self._seen: dict[str, _Seen] = {}
        self._announced: set[str] = set()
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="shardckpt-scanner", daemon=True)

    def start(self) -> None:
        """Begin to scan, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End after the batch that is being read."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def announce(self, ident: str) -> None:
        """Look at a place, and those above it, now."""
        if len(self._announced) < _BATCH:
            self._announced.add(ident)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            begun = time.monotonic()
            try:
                self.scan()
            except Exception:  # noqa: BLE001  (a bug must not end the thread: the next cycle may pass it)
                _log.exception("the roots could not be scanned")
            took = time.monotonic() - begun
            self._on_scan(took, len(self.problems))
            self._wake.wait(min(max(_LEAST_PAUSE, took / _SHARE), _LONGEST_PAUSE))
            self._wake.clear()

    def scan(self) -> None:
        """One cycle. Errors of the storage are noted by root; what was known of it stays."""
        if self._catalogue.renewed():
            self._seen.clear()
        announced, self._announced = self._announced, set()
        for ident in announced:
            parts = ident.split("/")
            for above in ("/".join(parts[:n]) for n in range(1, len(parts) + 1)):
                if above in self._seen:
                    self._seen[above].due, self._seen[above].version = 0.0, None
        for name, root in self._roots.places.items():
            try:
                self._scan_root(name, Store.open(root))
                self.problems.pop(name, None)
            except ShardckptError as e:
                if self.problems.get(name) != str(e):
                    _log.warning("root %s: %s", name, e)
                self.problems[name] = str(e)
        if not (self.complete.is_set() or self.problems or self._stopped):  # rows of an earlier process
            self._catalogue.replace({}, self._catalogue.idents() - {ident for ident, seen in self._seen.items() if seen.entry is not None})
        self.complete.set()

    def _scan_root(self, name: str, root: Store) -> None:
        level = [(name, root)]
        for _ in range(_DEPTH):
            below: list[tuple[str, Store]] = []
            for first in range(0, len(level), _BATCH):
                if self._stopped:
                    return
                batch = level[first : first + _BATCH]
                due = [one for one in batch if self._is_due(*one)]
                looked = map_on_threads(lambda one: self._look(*one), due)
                self._note(dict(zip((ident for ident, _ in due), looked, strict=True)))
                for ident, _ in batch:
                    below += self._seen[ident].children.items()
            level = below

    def _is_due(self, ident: str, store: Store) -> bool:
        seen = self._seen.get(ident)
        if seen is None or time.monotonic() >= seen.due:
            return True
        return store.location.local is not None and seen.version != _version(store)

    def _look(self, ident: str, store: Store) -> _Seen:
        """List a directory, and read its record if there is one."""
        version = _version(store)
        listed = store.list_children()
        children = {f"{ident}/{child}": place for child, place in places(store, listed) if child != "."}
        for child in [child for child, place in children.items() if not self._is_inside(child, place)]:
            del children[child]
        entry = self._entry(ident, store, listed)
        now = time.monotonic()
        if store.location.local is not None and entry is not None and entry.state != "uncommitted" and _is_settled(version):
            due = inf  # or when its version changes
        elif store.location.local is None and (entry is not None or not children):
            due = now + (_AGAIN if entry is not None and entry.state == "committed" else 0 if entry is not None else _EMPTY)
        else:
            due = now
        return _Seen(children, entry, version, due)

    def _entry(self, ident: str, store: Store, listed: list[str]) -> CatalogEntry | None:
        """The checkpoint at a place; otherwise its last unfinished attempt."""
        if all(child != RECORD and "-" not in child for child in listed):
            return None
        name = ident.rpartition("/")[2]
        try:
            for everything in (False, True):
                found = entries_at(store, name, listed, everything=everything)
                if found:
                    return found[0] if not everything else max(found, key=lambda one: natural_key(one.attempt or ""))
        except StorageError:
            if ident in self._seen:
                return self._seen[ident].entry
            raise
        return None

    def _is_inside(self, ident: str, place: Store) -> bool:
        """Whether a directory on a disk is not a link out of its root."""
        if place.location.local is None or not is_link(place.location.local):
            return True
        return place.location.is_within(self._roots.places[ident.partition("/")[0]])

    def _note(self, looked: dict[str, _Seen]) -> None:
        """Put what was found into the catalogue, and forget what is gone."""
        changed: dict[str, tuple[str, CatalogEntry]] = {}
        gone: list[str] = []
        for ident, seen in looked.items():
            before = self._seen.get(ident, _Seen())
            for top in before.children.keys() - seen.children.keys():
                gone += [one for one in self._seen if one == top or one.startswith(f"{top}/")]
            if seen.entry is None and before.entry is not None:
                gone.append(ident)
            elif seen.entry is not None and before.entry != seen.entry:
                changed[ident] = (ident.rpartition("/")[0] or ident, seen.entry)
        if changed or gone:
            self._catalogue.replace(changed, gone)
        self._seen |= looked
        for ident in gone:
            if ident not in looked:
                self._seen.pop(ident, None)


def _is_settled(version: tuple[int, ...] | None) -> bool:
    """Whether a change now would have another time than the last one: file systems keep times in steps of up to some seconds."""
    return version is None or abs(time.time_ns() - max(version)) > _STEP_OF_TIMES


def _version(store: Store) -> tuple[int, ...] | None:
    """On a disk: times that change when the record or the names in the directory change."""
    path = store.location.local
    if path is None:
        return None
    times = []
    for one in (path, path / RECORD):
        try:
            times.append(one.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)
