"""Leases of readers: while one lasts, the steps that it names are neither pruned nor collected.

A lease is a small object below the root, `leases/<id>.json`, with the steps. It lasts for `SECONDS`
after it was written. A follower writes one before it reads the steps, and again and again while it
reads. So the lease of a reader that dies ends by itself.

Rules of retention and collections ask for leases before they delete. A deletion on request
(`shardckpt rm`) and a save over a step do not.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.commit.markers import read_sealed
from shardckpt.commit.publish import RECORD
from shardckpt.errors import FormatError, NotFoundError, ShardckptError, StorageError
from shardckpt.format.documents import seal
from shardckpt.io.ages import idle_seconds, last_written
from shardckpt.io.threads import map_on_threads
from shardckpt.runs.announcing import VARIABLE, ask
from shardckpt.runs.steps import step_numbers
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardckpt.io.store import Store

LEASES = "leases/"
"""The folder of the leases, relative to the root."""
SECONDS = 600.0
"""Time that a lease lasts after it was written, by the storage's clock."""
LEASED = "a reader holds a lease on it"
"""Reason for which a step with a lease stays."""
_FRESH = 5.0
"""Seconds for which a deletion of many steps does not read the leases again."""
_LONG_AGO = 24 * 3600.0
"""Seconds after which a lease is removed."""
_MOST_STEPS, _LONGEST_NAME, _MOST_LEASES = 1000, 255, 1000
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_log = logging.getLogger("shardckpt")


class ReaderLease:
    """A reader's lease, which lasts until `close`.

    Between its reads it holds no steps, and says that the reader is there.
    """

    def __init__(self, root: Store, service: str | None = None) -> None:
        """Write nothing yet.

        Args:
            root: the place of all steps.
            service: url of a service that is asked to write the lease, where this process cannot;
                None: there is none.
        """
        self._root = root
        self._service = service
        self._id = secrets.token_hex(8)
        self._document: dict[str, Any] = {
            "steps": [],
            "holder": socket.gethostname(),
            "version": None,
        }
        self._writes = root.writable
        """Whether this process writes it, and not the service."""
        self._writing = threading.Lock()
        """Held while it is written: a slow renewal would undo what was written meanwhile."""
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None

    @contextmanager
    def holding(self, steps: Collection[int], version: int | None = None) -> Iterator[bool]:
        """Hold steps while the block lasts; yield whether the lease could be written.

        Args:
            steps: the steps.
            version: the step that the reader will have after the block.
        """
        self._document = self._document | {"steps": sorted(steps)}
        held = self._began()
        if not held:
            yield False
            return
        before = self._document["version"]
        try:
            yield True
            before = version
        finally:
            self._document = self._document | {"steps": [], "version": before}
            with suppress(ShardckptError):  # the steps are held for some minutes more
                self._write()

    def close(self) -> None:
        """Remove the lease."""
        if self._renewing is not None:
            self._over.set()
            self._renewing.join()
            self._renewing = None
            self._remove()

    def _began(self) -> bool:
        """Write the lease; return whether that was possible."""
        try:
            try:
                self._write()
            except ShardckptError:
                if not self._writes or self._service is None:
                    raise
                self._writes = False
                self._write()
            self._start_renewing()
        except ShardckptError as e:
            if str(self._root) not in _refused:
                _refused.add(str(self._root))
                _log.warning(
                    "%s: no lease can be written there, so what this process reads may be pruned "
                    "while it reads: %s",
                    self._root.location,
                    e,
                )
            return False
        return True

    def _start_renewing(self) -> None:
        if self._renewing is not None:
            return
        thread = threading.Thread(target=self._renew, name="shardckpt-lease", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:  # the interpreter is shutting down, or there are too many threads
            self._remove()
            raise StorageError(f"Python starts no thread that would renew it ({e}).") from e
        self._renewing = thread

    def _write(self) -> None:
        with self._writing:
            if self._writes:
                self._root.write(f"{LEASES}{self._id}.json", seal(self._document))
            elif self._service is None:
                raise StorageError(
                    f"{self._root.location} is read only, and {VARIABLE} names no service that "
                    "could write a lease."
                )
            else:
                self._ask(self._document)

    def _remove(self) -> None:
        with suppress(ShardckptError):  # it ends by itself
            if self._writes:
                self._root.delete(f"{LEASES}{self._id}.json")
            else:
                self._ask(None)

    def _ask(self, document: dict[str, Any] | None) -> None:
        """Have the service write the lease; or remove it."""
        assert self._service is not None
        ask(
            self._service,
            "/v1/leases",
            {"url": str(self._root.location), "id": self._id, "lease": document},
        )

    def _renew(self) -> None:
        while not self._over.wait(SECONDS / 3):
            with suppress(ShardckptError):  # the lease still lasts, and is written again
                self._write()


@contextmanager
def leased(root: Store, steps: Collection[int]) -> Iterator[bool]:
    """Hold a lease on steps while the block lasts; yield whether it could be written."""
    lease = ReaderLease(root)
    try:
        with lease.holding(steps) as held:
            yield held
    finally:
        lease.close()


class HeldLease(NamedTuple):
    """A lease that lasts."""

    holder: str
    """Name of the reader's host."""
    version: int | None
    """The step that the reader has; None: it has none yet."""
    steps: tuple[int, ...]
    """The steps that it reads."""


_refused: set[str] = set()
"""Places where a lease was refused; each is named in the log once."""


def leased_steps(root: Store) -> frozenset[int]:
    """The steps on which a lease lasts; leases that ended long ago are removed.

    Raises:
        StorageError: the storage failed.
    """
    keys = _keys(root)
    idle = idle_seconds(root, keys) if keys else {}
    for key, seconds in idle.items():
        if seconds is not None and seconds > _LONG_AGO:
            with suppress(ShardckptError):  # another user's: it holds nothing
                root.delete(key)
    return frozenset(step for lease in _lasting(root, idle) for step in lease.steps)


class LeasedSteps:
    """The steps on which a lease lasts, read again once that is some seconds old.

    Nothing is read before it is asked for a step. Safe to use from several threads.
    """

    def __init__(self, root: Store) -> None:
        self._root = root
        self._steps = frozenset[int]()
        self._read_at = -math.inf
        self._reading = threading.Lock()

    def __contains__(self, step: int | None) -> bool:
        """Whether a lease lasts on a step. Raises StorageError."""
        with self._reading:
            if time.monotonic() >= self._read_at + _FRESH:
                self._steps = leased_steps(self._root)
                self._read_at = time.monotonic()
            return step in self._steps


def held_leases(root: Store) -> list[HeldLease]:
    """The leases that last by this machine's clock, to show them; nothing is written.

    Raises:
        StorageError: the storage failed.
    """
    now, written = time.time(), {key: last_written(root, key) for key in _keys(root)}
    return _lasting(
        root, {key: None if then is None else now - then for key, then in written.items()}
    )


def _keys(root: Store) -> list[str]:
    return [f"{LEASES}{name}" for name in root.list_children(LEASES) if name.endswith(".json")]


def _lasting(root: Store, idle: Mapping[str, float | None]) -> list[HeldLease]:
    lasting = [key for key, seconds in idle.items() if seconds is None or seconds < SECONDS]
    return [lease for lease in map_on_threads(partial(_read, root), lasting) if lease is not None]


def write_lease(root: Store, ident: str, document: object) -> None:
    """Write a lease for a reader that cannot, or remove it (None).

    Raises:
        FormatError: the id or the document is not that of a lease.
        NotFoundError: a step that it names is not there, or no checkpoint is.
        StorageError: it cannot be written, or there are too many.
    """
    if not _ID.fullmatch(ident):
        raise FormatError(
            f"{shorten(ident)} is not the id of a lease; it has 16 hexadecimal digits."
        )
    key = f"{LEASES}{ident}.json"
    if document is None:
        root.delete(key)
        return
    lease: dict[str, Any] = document if isinstance(document, dict) else {}
    steps, holder, version = lease.get("steps"), lease.get("holder"), lease.get("version")
    whole = (
        isinstance(steps, list)
        and len(steps) <= _MOST_STEPS
        and all(type(step) is int for step in steps)
    )
    if not (
        whole
        and isinstance(holder, str)
        and len(holder) <= _LONGEST_NAME
        and (version is None or type(version) is int)
    ):
        raise FormatError(
            'a lease is {"steps": […], "holder": "host", "version": 7}, with at most '
            f"{_MOST_STEPS} steps."
        )
    assert isinstance(steps, list)
    there = step_numbers(root)
    if not {*steps} <= {*there} or not any(
        root.exists(f"{step}/{RECORD}") for step in steps or reversed(there)
    ):
        raise NotFoundError(
            f"{root.location} does not have the steps that the lease names; give the url of a "
            "run, and steps of it."
        )
    if key not in (held := _keys(root)) and len(held) >= _MOST_LEASES:
        raise StorageError(
            f"{root.location} has {_MOST_LEASES:,} leases; they end ten minutes after their "
            "readers."
        )
    root.write(key, seal({"steps": steps, "holder": holder, "version": version}))


def _read(root: Store, key: str) -> HeldLease | None:
    try:
        lease = read_sealed(root, key)
        if lease is None:
            return None
        steps = tuple(step for step in lease.sequence("steps") if type(step) is int)
        holder, version = lease.doc.get("holder"), lease.doc.get("version")
        return HeldLease(str(holder or ""), version if type(version) is int else None, steps)
    except FormatError:
        return None  # no lease of ours
