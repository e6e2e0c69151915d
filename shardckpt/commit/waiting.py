"""Wait for the records of all hosts of an attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardckpt.commit.assemble import finished_hosts
from shardckpt.errors import CommitError
from shardckpt.frameworks.coordination import ALL_MUST_CALL, WaitNotice
from shardckpt.text import numbered

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.store import Store

_LEAST_PAUSE, _MOST_PAUSE = 0.02, 2.0
"""Seconds between two checks for the hosts' records: least and most. Between these limits an eighth
of the time waited so far."""


def pause(waited: float, least: float = _LEAST_PAUSE, most: float = _MOST_PAUSE) -> float:
    """Seconds until the next check for other processes' progress, after `waited` seconds.

    The defaults are for host records.
    """
    return min(max(least, waited / 8), most)


def wait_for_hosts(
    place: Store, hosts: int, timeout: float, failed: Callable[[], str | None] = lambda: None
) -> list[int]:
    """Wait until all hosts have written their record; return all that have.

    Args:
        place: the attempt.
        hosts: number of hosts.
        timeout: seconds.
        failed: called from time to time; returns why a host will never finish, if that is known.

    Raises:
        CommitError: some hosts have not finished in time; the message names them.
    """
    began, notice = time.monotonic(), WaitNotice(str(place))
    while True:
        finished = finished_hosts(place)
        missing = sorted(set(range(hosts)) - set(finished))
        if not missing:
            return finished
        reason = failed()
        if reason is not None:
            raise CommitError(f"{place}: {reason} Nothing was published.")
        notice.look(lambda: numbered("host", missing))  # noqa: B023  (called at once)
        waited = time.monotonic() - began
        if waited >= timeout:
            raise CommitError(
                f"{place}: {numbered('host', missing)} (of {hosts}) did not finish within "
                f"{timeout:g} s; nothing was published. {ALL_MUST_CALL} If the missing ones "
                "finish later, `shardckpt commit` publishes the save; otherwise `shardckpt gc` "
                "removes it."
            )
        time.sleep(min(pause(waited), timeout - waited))
