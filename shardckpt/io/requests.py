"""Requests to an object store: an object on its way, and answers that are asked for again."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_UP = 0.2
"""Seconds after which a thread that waits for an upload looks whether it was given up."""
_PAUSES = (0.1, 1.0)
"""Seconds before an answer that was broken is asked for again."""
_BROKEN = ("CURL error", "Failed to parse")
"""In messages about answers that make no sense, from a proxy on the way, say."""
_GAVE_UP = "retry attempts failed"
"""In the message of an error after TensorStore's own retries."""


class Upload:
    """An object on its way."""

    def __init__(self, place: str, future: Any) -> None:
        self._place = place
        self._future = future
        self._abandoned = False

    def wait(self) -> None:
        """Wait until it is durable.

        Raises:
            StorageError: it could not be written, or was given up.
        """
        with storage_errors("write", self._place):
            # TensorStore 0.1.86 does not always wake a thread that waits when another one cancels: it looks up by itself.
            while not self._abandoned and not self._future.done():
                with suppress(TimeoutError, asyncio.CancelledError):
                    self._future.result(timeout=_LOOK_UP)
            try:
                self._future.result(timeout=0)
            except (TimeoutError, asyncio.CancelledError) as e:
                raise OSError("the upload was given up" if self._abandoned else str(e)) from e

    def abandon(self) -> None:
        """Give it up, if it has not ended; it may or may not come to be there."""
        self._abandoned = True
        self._future.cancel()


def repeat_broken(begin: Callable[[], Any]) -> Any:
    """The result of a request that may be repeated: it is, where its answer was broken in a way that TensorStore takes for final."""
    for pause in _PAUSES:
        try:
            return begin().result()
        except ValueError as e:
            if _GAVE_UP in str(e) or not any(part in str(e) for part in _BROKEN):
                raise
        time.sleep(pause)
    return begin().result()
