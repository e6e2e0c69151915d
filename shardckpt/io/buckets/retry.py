"""Retries: how often, and for how long, a request to an object store is sent again.

A request with a temporary failure is sent again, after growing pauses (`cloud.pauses`), until the pauses add up to
`SHARDCKPT_RETRY_SECONDS`, or so much time (but at least `cloud.LEAST_STALLED`) has passed since the first attempt began. Each pause
is shortened at random by up to half, so that requests that failed together do not return together. TensorStore retries its own few
requests by a similar rule.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import tensorstore as ts

from shardckpt.io.buckets import cloud

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_COUNTS = ("/tensorstore/kvstore/gcs/retries", "/tensorstore/kvstore/s3/retries")
"""TensorStore's own counts of its retries, one for each kind of storage."""
_counting = threading.Lock()
_retries = 0
"""Retries of this process's requests, TensorStore's not among them."""


class PassingError(OSError):
    """A temporary failure of a request; a retry may succeed."""


class Retry:
    """Makes requests until they succeed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    @property
    def given_up(self) -> bool:
        """Whether no request is sent again."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Do not retry from now on, and end the pauses of waiting threads."""
        self._given_up.set()

    def call(self, once: Callable[[], T], passing: Callable[[Exception], bool]) -> T:
        """The result of a request, with retries.

        Args:
            once: makes the request once.
            passing: whether an error is temporary.

        Raises:
            OSError: it failed with a temporary error, and no attempts or no time are left.
            Exception: an error of `once` that is not temporary.
        """
        global _retries  # noqa: PLW0603  (of this process)
        pauses, longest = cloud.pauses(), max(cloud.retry_seconds(), cloud.LEAST_STALLED)
        began = time.monotonic()
        for made, pause in enumerate((*pauses, None)):
            try:
                return once()
            except Exception as e:
                if not passing(e):
                    raise
                if pause is None or time.monotonic() - began >= longest:
                    raise OSError(f"{made + 1} attempts failed, the last one with {type(e).__name__}: {e}") from e
                if self._given_up.wait(pause * random.uniform(0.5, 1)):  # noqa: S311  (to spread, not to hide)
                    raise OSError(f"retries were given up after {type(e).__name__}: {e}") from e
                with _counting:
                    _retries += 1
        raise AssertionError("unreachable: the last try returns or raises")


def storage_retries() -> int:
    """Number of retries since this process began, TensorStore's included, for all object stores together."""
    metrics = (metric for name in _COUNTS for metric in ts.experimental_collect_matching_metrics(name))
    return _retries + sum(int(metric["values"][0]["value"]) for metric in metrics)
