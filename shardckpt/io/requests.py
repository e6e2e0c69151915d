"""An upload in progress: a request to an object store on another thread.

The request can be given up.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardckpt.io.buckets.retry import Retry, Signal
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable


_MOMENT = 1.0
"""Seconds that a given-up request may go on before nobody waits for it any more."""


class Upload:
    """An upload on a thread of its own.

    The thread is a daemon: one that is given up, and hangs in the network, keeps nobody waiting.
    """

    def __init__(self, place: str, write: Callable[[Retry], object], *, background: bool) -> None:
        """Begin.

        Args:
            place: the object, for messages.
            write: writes it; stops as soon as the `Retry` is given up.
            background: whether the thread is needed; otherwise the write is made here and now.
        """
        self._place = place
        self._write = write
        self._retry = Retry()
        self._ended = Signal()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="shardckpt-upload", daemon=True)
            self._thread.start()
        else:
            self._run()

    def wait(self) -> None:
        """Wait until the object is durable.

        Raises:
            StorageError: it could not be written, or the upload was given up.
        """
        if not self._ended.is_set:
            self._ended.wait()
        with storage_errors("write", self._place):
            if self._retry.given_up:
                raise OSError("the upload was given up")
            if self._error is not None:
                raise self._error

    def abandon(self) -> None:
        """Give up the upload if it has not ended; the object may or may not exist afterwards."""
        if not self._ended.is_set:
            self._retry.give_up()
            self._ended.set()

    def let_go(self) -> None:
        """After `abandon`: wait a moment for a request in progress.

        The object that the request makes can then be deleted.
        """
        if self._thread is not None:
            self._thread.join(_MOMENT)

    def _run(self) -> None:
        try:
            self._write(self._retry)
        except BaseException as e:  # noqa: BLE001  (`wait` raises it)
            self._error = e
        finally:
            self._ended.set()
