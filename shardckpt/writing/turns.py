"""The common attempt of all processes' calls that save to one place, call by call.

Processes do not meet before a save: each counts its calls, and the n-th calls of all processes make
one attempt. If a process misses a call, its counter is behind for ever. So the processes begin to
count anew after a failed save:

1. Process 0 announces that it has given up an attempt. This closes the *series* of attempts that
   were counted together.
2. In its next call, each process of that attempt meets the others (`Coordinator.meet`). This gives
   them the name of a new series, which has no attempt of any earlier call. From then on they count
   again. A process whose own part has failed may begin that call before process 0 has heard of the
   failure. It waits until process 0 has given up the attempt, or has published it without that
   part.
3. A process that finds its series closed, although its own last call did not fail, has missed a
   call or is late. Its data may belong to an attempt that the others have left behind, so its call
   fails. It announces this; then process 0 gives up the call in which it waits, and names that
   process. All of them meet in the call after that. If the process was only late, it comes to the
   meeting of the present call within seconds, and this call succeeds.
4. Process 0 itself may have missed a call. Then the calls of the others that begin before its own
   call fails, fail because that call fails. A call that begins later waits for the next call of
   process 0: whether process 0 has missed a call, or was only late, nobody can see.

A failed save costs this one meeting at its place. All other saves have none.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from shardckpt.commit.waiting import pause
from shardckpt.errors import CommitError, CoordinationError, ShardckptError
from shardckpt.frameworks.coordination import ALL_MUST_CALL, WaitNotice

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store

_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two checks whether process 0 has ended an attempt: least and most."""
_GRACE = 10.0
"""Seconds that process 0 waits, in a meeting, for a process that is out of step: one that was only
late comes within them."""
LEADER = 0
"""The process that closes series and leads meetings."""


@dataclass(slots=True)
class CallCounts:
    """One process's calls to all places of a job.

    A place without a failed save costs one number.
    """

    calls: dict[str, count[int]] = field(default_factory=dict)
    """The numbers of the next calls in a place's series. C code counts, so that a signal handler
    that saves, too, gets another number."""
    in_use: WeakValueDictionary[str, Turns] = field(default_factory=WeakValueDictionary)
    """The places with a save in flight."""
    failed: dict[str, Turns] = field(default_factory=dict)
    """The places at which a save has failed."""


@dataclass(slots=True, weakref_slot=True)
class Turns:
    """One process's calls to one place."""

    coordinator: Coordinator
    key: str
    """Names the place: the first hex digits of the digest of its name."""
    places: CallCounts
    """The calls to all places."""
    series: str = ""
    failed: str | None = None
    """Name of the attempt in which this process's last call failed; None if it did not fail."""
    closed_before: bool = False
    """Whether process 0 had closed this process's series when this process began its call after a
    failed one."""
    closings: int = 0
    """Number of announcements by process 0 that it has given up an attempt here."""
    lock: RLock = field(default_factory=RLock)
    """Held while the series changes. A signal handler may save, too."""

    def next_name(self) -> str | None:
        """Name of the next attempt; None if the process may have to meet the others first."""
        with self.lock:
            if self.failed is None:
                return self._next_name()
        self.closed_before = self.why_closed() is not None
        return None

    def _next_name(self) -> str:
        return self._name(next(self.places.calls.setdefault(self.key, count(1))))

    def _name(self, call: int) -> str:
        series = f"{self.series}." if self.series else ""
        return f"{self.coordinator.run_id}-{self.key}-{series}{call}"

    def fail(self, attempt: str) -> None:
        """Note that this process's call has failed in an attempt."""
        self.failed = attempt
        self.places.failed[self.key] = self

    def close(self, why: str, *, late: bool) -> None:
        """Announce, as process 0, that it has given up an attempt.

        `late`: the others had given it up before process 0 began it.
        """
        self.closings += 1
        self.places.failed[self.key] = self
        self._announce(
            "closed", {"series": self.series, "closings": self.closings, "why": why, "late": late}
        )

    def report(self, why: str) -> None:
        """Announce, as a process other than 0, that its own call fails.

        The call fails before process 0 could know its attempt.
        """
        closed = self._peek("closed") or {}
        report = {
            "series": self.series,
            "closings": closed.get("closings", 0),
            "process": self.coordinator.world.process,
            "why": why,
        }
        self._announce("out of step", report)

    def why_closed(self) -> str | None:
        """The reason for which process 0 has closed this process's series; None if it has not."""
        closed = self._closed()
        return None if closed is None else str(closed["why"])

    def _closed(self) -> dict[str, Any] | None:
        closed = self._peek("closed")
        return closed if closed is not None and closed["series"] == self.series else None

    def out_of_step(self) -> str | None:
        """The report of a process that is out of step with process 0; None if there is none."""
        heard = self._peek("out of step")
        if heard is None or (heard["series"], heard["closings"]) != (self.series, self.closings):
            return None
        return f"process {heard['process']} is out of step with process {LEADER}: {heard['why']}"

    def meet(
        self,
        where: str,
        timeout: float,
        stopped: Callable[[], str | None],
        goes_on: Callable[[str], bool],
    ) -> str:
        """Meet the other processes after a failed call, and return the name of the next attempt.

        Args:
            where: the place, for messages.
            timeout: seconds to wait for the others.
            stopped: returns the reason for which this process stops waiting; None if it does not.
            goes_on: returns whether process 0 continues to count after an attempt, by its name.

        Raises:
            CommitError: the others do not come, or one of them is out of step.
        """
        leads = self.coordinator.world.process == LEADER
        # The call failed on this process alone.
        if not leads and not self._await_close(where, timeout, stopped, goes_on):
            with self.lock:
                self.failed = None
                return self._next_name()
        seen, heard_at, grace = self._closings(), 0.0, min(_GRACE, timeout / 4)

        def out_of_step() -> str | None:
            nonlocal heard_at
            if (reason := self.out_of_step()) is not None:
                heard_at = heard_at or time.monotonic()
            return reason if reason is not None and time.monotonic() - heard_at >= grace else None

        def check() -> None:
            reason = stopped() or (out_of_step() if leads else self._given_up_since(seen))
            if reason is not None:
                raise CommitError(f"{where}: {reason} Nothing was published.")

        try:
            series = self.coordinator.meet(f"turns/{self.key}", timeout=timeout, check=check)
        except CoordinationError as e:
            raise CommitError(
                f"{where}: the save before this one failed, so all processes meet in this one. {e}"
            ) from e
        with self.lock:
            self.places.calls[self.key] = count(1)
            self.series, self.failed = series, None
            return self._next_name()

    def _await_close(
        self,
        where: str,
        timeout: float,
        stopped: Callable[[], str | None],
        goes_on: Callable[[str], bool],
    ) -> bool:
        """Wait until process 0 has ended the attempt in which this process failed.

        Return whether process 0 has given that attempt up.

        Raises:
            CommitError: process 0 has not ended it in time, or has missed a call and gives up the
                present one.
        """
        began, notice = time.monotonic(), WaitNotice(where)
        while (closed := self._closed()) is None:
            waited = time.monotonic() - began
            if (reason := stopped()) is not None:
                raise CommitError(f"{where}: {reason} Nothing was published.")
            if self.failed and goes_on(self.failed):
                return False
            if waited > timeout:
                raise CommitError(
                    f"{where}: the save before this one failed on this process, and process "
                    f"{LEADER} has not ended that save within {timeout:g} s. {ALL_MUST_CALL} "
                    "Nothing was published."
                )
            notice.look(lambda: f"process {LEADER} to end the save before this one")
            time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))
        if closed.get("late") and not self.closed_before:
            raise CommitError(
                f"{where}: process {LEADER} gave up this save: {closed['why']} Nothing was "
                "published."
            )
        return True

    def _closings(self) -> int:
        return int((self._peek("closed") or {}).get("closings", 0))

    def _given_up_since(self, seen: int) -> str | None:
        closed = self._peek("closed")
        if closed is None or closed["closings"] == seen:
            return None
        return f"process {LEADER} gave up this save: {closed['why']}"

    def _announce(self, what: str, value: dict[str, Any]) -> None:
        with suppress(ShardckptError):  # the store is gone; nobody waits at it any more
            self.coordinator.announce(f"{what}/{self.key}", value)

    def _peek(self, what: str) -> dict[str, Any] | None:
        with suppress(CoordinationError):
            announcement: dict[str, Any] | None = self.coordinator.peek(f"{what}/{self.key}")
            return announcement
        return None


_lock = RLock()  # a signal handler may save, too


def turns_at(coordinator: Coordinator, store: Store) -> Turns:
    """This process's calls to a place.

    They go by the place's name, because processes may reach one directory by different paths or
    links. The name is a part of the attempt's name, so no other checkpoint of the job has an
    attempt of the same name. Bases are identified by it (`format.structure`).
    """
    # On a disk this resolves links in the path, and reads nothing else.
    name = store.location.resolved.name
    key = sha256(name.encode()).hexdigest()[:12]
    with _lock:
        places: CallCounts = coordinator.notes.setdefault("places", CallCounts())
        turns = places.failed.get(key) or places.in_use.get(key)
        if turns is None:
            turns = places.in_use[key] = Turns(coordinator, key, places)
        return turns
