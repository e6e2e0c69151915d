"""Requests to an object store: uploads in progress, and retries of broken responses."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_UP = 0.2
"""Seconds between two checks whether an upload that a thread waits for was cancelled."""
_PAUSES = (0.1, 1.0)
"""Seconds before each retry after a broken response."""
_BROKEN = ("CURL error", "Failed to parse")
"""Parts of messages about invalid responses, for example from a proxy."""
_GAVE_UP = "retry attempts failed"
"""Part of the message of an error after TensorStore's own retries."""


class Upload:
    """An upload in progress."""

    def __init__(self, place: str, future: Any) -> None:
        self._place = place
        self._future = future
        self._abandoned = False

    def wait(self) -> None:
        """Wait until the object is durable.

        Raises:
            StorageError: it could not be written, or the upload was cancelled.
        """
        with storage_errors("write", self._place):
            # TensorStore 0.1.86 does not always wake a waiting thread when another one cancels, so this thread polls.
            while not self._abandoned and not self._future.done():
                with suppress(TimeoutError, asyncio.CancelledError):
                    self._future.result(timeout=_LOOK_UP)
            try:
                self._future.result(timeout=0)
            except (TimeoutError, asyncio.CancelledError) as e:
                raise OSError("the upload was given up" if self._abandoned else str(e)) from e

    def abandon(self) -> None:
        """Cancel the upload if it has not ended; the object may or may not exist afterwards."""
        self._abandoned = True
        self._future.cancel()


def repeat_broken(begin: Callable[[], Any]) -> Any:
    """The result of a request that may be repeated; it is retried after a broken response that TensorStore treats as final."""
    for pause in _PAUSES:
        try:
            return begin().result()
        except ValueError as e:
            if _GAVE_UP in str(e) or not any(part in str(e) for part in _BROKEN):
                raise
        time.sleep(pause)
    return begin().result()
