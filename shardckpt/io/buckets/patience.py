"""Retries: how often, and for how long, a request to an object store is sent again.

TensorStore repeats its own requests. This repeats ours (uploads, listings, copies) by the same rule (`cloud.pauses`): one that
fails in passing is made again, after pauses that grow, until those of `SHARDCKPT_RETRY_SECONDS` are used up. Each pause is cut
short by up to half, at random, so that requests which failed together do not come back together.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, TypeVar

from shardckpt.io.buckets import cloud

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Patience"]

T = TypeVar("T")


class Patience:
    """Makes requests until they succeed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Make no request again from now on, and end the pauses of those that wait."""
        self._given_up.set()

    def ask(self, once: Callable[[], T], passing: Callable[[Exception], bool]) -> T:
        """The result of a request.

        Args:
            once: makes it.
            passing: whether an error may be over the next time.

        Raises:
            OSError: it failed in passing, and no more tries are left.
            Exception: what `once` raised and is not passing.
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
                    raise OSError(f"it was given up after {type(e).__name__}: {e}") from e
        raise AssertionError("unreachable: the last try returns or raises")
