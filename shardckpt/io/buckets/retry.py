"""Retries: how often, and for how long, a request to an object store is sent again.

A request with a temporary failure is sent again, after growing pauses (`cloud.pauses`), until the
pauses add up to `SHARDCKPT_RETRY_SECONDS`, or so much time (but at least `cloud.LEAST_STALLED`) has
passed since the first attempt began. Each pause is shortened at random by up to half, so that
requests that failed together do not return together. TensorStore retries its own few requests by a
similar rule.

A service that has never answered this process is probably misspelt, or the machine is offline: if
its name does not resolve, or it refuses connections, the request fails after `_FIRST_SECONDS`. Once
a service has answered, such failures are retried like all others, because resolvers fail for a
while and proxies restart. A bucket that the service does not know is an error at once, unless that
bucket has answered this process before. If a retry begins more than `_SAY_SECONDS` after the first
attempt, the log says so, once until the service answers again.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import tensorstore as ts

from shardckpt.io.buckets import cloud
from shardckpt.io.failures import causes

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("shardckpt")
T = TypeVar("T")
_COUNTS = ("/tensorstore/kvstore/gcs/retries", "/tensorstore/kvstore/s3/retries")
"""TensorStore's own counts of its retries, one for each kind of storage."""
_counting = threading.Lock()
_retries = 0
"""Retries of this process's requests, TensorStore's not among them."""
_FIRST_SECONDS = 5.0
"""Seconds for which a service that has never answered is tried again."""
_SAY_SECONDS = 3.0
_answered: set[str] = set()
"""Services and buckets that have answered this process."""
_failing: set[str] = set()
"""Services whose failure is in the log, and that have not answered since."""


class PassingError(OSError):
    """A temporary failure of a request; a retry may succeed."""


class NoBucketError(OSError):
    """The service knows no bucket of that name."""

    def __init__(self, bucket: str, text: object) -> None:
        super().__init__(f"there is no such bucket ({text})")
        self.bucket = bucket


def note_answer(service: str) -> None:
    """Note that a service, or a bucket, has answered this process."""
    _answered.add(service)
    _failing.discard(service)


def has_answered(service: str) -> bool:
    """Whether a service, or a bucket, has answered this process."""
    return service in _answered


class Signal:
    """A flag that threads wait for. An Event would stay locked by Ctrl-C amid `set`."""

    def __init__(self) -> None:
        self.is_set = False
        self._word: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set the flag, and wake all that wait for it."""
        self.is_set = True
        self._word.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is set, at most for some seconds."""
        with suppress(Empty):
            self._word.get(timeout=seconds)
            self._word.put(None)  # for other threads


class Retry:
    """Makes requests until they succeed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._given_up = Signal()

    @property
    def given_up(self) -> bool:
        """Whether no request is sent again."""
        return self._given_up.is_set

    def give_up(self) -> None:
        """Do not retry from now on, and end the pauses of waiting threads."""
        self._given_up.set()

    def pause(self, seconds: float) -> None:
        """Wait, at most until no request is sent again."""
        self._given_up.wait(seconds)

    def call(self, once: Callable[[], T], passing: Callable[[Exception], bool], service: str) -> T:
        """The result of a request, with retries.

        Args:
            once: makes the request once.
            passing: whether an error is temporary.
            service: the service, for messages; `note_answer` knows it by this name.

        Raises:
            OSError: it failed with a temporary error, and no attempts or no time are left.
            Exception: an error of `once` that is not temporary.
        """
        global _retries  # noqa: PLW0603  (of this process)
        pauses, longest = cloud.pauses(), max(cloud.retry_seconds(), cloud.LEAST_STALLED)
        began = time.monotonic()
        for made, pause in enumerate(chain(pauses, (None,))):
            try:
                return once()
            except Exception as e:
                unknown = isinstance(e, NoBucketError) and e.bucket in _answered
                if not (unknown or passing(e)):
                    raise
                seconds, why = time.monotonic() - began, _reason(e)
                if pause is None or seconds >= longest:
                    raise OSError(f"{made + 1} attempts failed, the last one because {why}") from e
                new = service not in _answered and _unreachable(e) is not None
                if new and seconds + pause > _FIRST_SECONDS:
                    raise OSError(
                        f"{why}, and nothing there has answered this process before"
                    ) from e
                if seconds + pause > _SAY_SECONDS and service not in _failing:
                    _failing.add(service)
                    log.warning(
                        "%s: %s; retrying for up to %.0f s",
                        service,
                        why,
                        _FIRST_SECONDS if new else longest,
                    )
                self.pause(pause * random.uniform(0.5, 1))  # noqa: S311  (to spread, not to hide)
                if self.given_up:
                    raise OSError(f"retries were given up because {why}") from e
                with _counting:
                    _retries += 1
        raise AssertionError("unreachable: the last try returns or raises")


def _reason(error: Exception) -> str:
    """The reason of a failure, in a user's words."""
    return _unreachable(error) or (
        str(error) if isinstance(error, PassingError) else f"{type(error).__name__}: {error}"
    )


def _unreachable(error: BaseException) -> str | None:
    """The reason, if the error says that a name does not resolve or that connections are refused.

    None: it says neither.

    A resolver's temporary failure (EAI_AGAIN) does not count.
    """
    for cause in causes(error, implicit=True):
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return f"the name does not resolve ({cause.strerror})"
        if isinstance(cause, ConnectionRefusedError):
            return "connections are refused"
    return None


def storage_retries() -> int:
    """Number of retries of all object stores since this process began, TensorStore's included."""
    metrics = (
        metric for name in _COUNTS for metric in ts.experimental_collect_matching_metrics(name)
    )
    return _retries + sum(int(metric["values"][0]["value"]) for metric in metrics)
