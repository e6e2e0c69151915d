"""Retries: how often, and for how long, a request to an object store is sent again.

TensorStore retries its own requests. This module retries the requests of shardckpt (uploads, listings, copies) by the same rule
(`cloud.pauses`): a request with a temporary failure is sent again, after growing pauses, until the pauses add up to
`SHARDCKPT_RETRY_SECONDS`. Each pause is shortened at random by up to half, so that requests that failed together do not return
together.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, TypeVar

import tensorstore as ts

from shardckpt.io.buckets import cloud

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_COUNTS = ("/tensorstore/kvstore/gcs/retries", "/tensorstore/kvstore/s3/retries")
"""TensorStore's own counts of its retries, one for each kind of storage."""


class Retry:
    """Makes requests until they succeed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Do not retry from now on, and end the pauses of waiting threads."""
        self._given_up.set()

    def call(self, once: Callable[[], T], passing: Callable[[Exception], bool]) -> T:
        """The result of a request, with retries.

        Args:
            once: makes the request once.
            passing: whether an error is temporary.

        Raises:
            OSError: it failed with a temporary error, and no attempts are left.
            Exception: an error of `once` that is not temporary.
        """
        pauses = cloud.pauses()
        for pause in (*pauses, None):
            try:
                return once()
            except Exception as e:
                if not passing(e):
                    raise
                if pause is None:
                    raise OSError(f"{len(pauses)} retry attempts failed, the last one with {type(e).__name__}: {e}") from e
                if self._given_up.wait(pause * random.uniform(0.5, 1)):  # noqa: S311  (to spread, not to hide)
                    raise OSError(f"retries were given up after {type(e).__name__}: {e}") from e
        raise AssertionError("unreachable: the last try returns or raises")


def storage_retries() -> int:
    """Number of TensorStore's retries since this process began, for all object stores together."""
    return sum(int(metric["values"][0]["value"]) for name in _COUNTS for metric in ts.experimental_collect_matching_metrics(name))
