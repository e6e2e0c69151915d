"""A request to an object store on another thread, such as an upload, which can be given up."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from shardckpt.io.buckets.retry import Retry, Signal
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

_MOMENT = 1.0
"""Seconds that a given-up request may go on before nobody waits for it any more."""


class BackgroundCall(Generic[R]):
    """A call on a thread of its own.

    The thread is a daemon: one that hangs in the network keeps nobody waiting.
    """

    def __init__(self, work: Callable[[], R], *, background: bool) -> None:
        """Begin; unless it is for the `background`, the call is made here and now."""
        self.ended = Signal()
        self._work = work
        self._results: list[R] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="shardckpt-request", daemon=True)
            self._thread.start()
        else:
            self._run()

    def result(self) -> R:
        """Wait for the end, and return or raise what the call did."""
        if not self.ended.is_set:
            self.ended.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def join(self, seconds: float) -> None:
        """Wait for the thread, if there is one."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as e:  # noqa: BLE001  (`result` raises it)
            self._error = e
        finally:
            self.ended.set()


class Upload:
    """An upload on a thread of its own."""

    def __init__(self, place: str, write: Callable[[Retry], object], *, background: bool) -> None:
        """Begin.

        Args:
            place: the object, for messages.
            write: writes it; stops as soon as the `Retry` is given up.
            background: whether the thread is needed; otherwise the write is made here and now.
        """
        self._place = place
        self._retry = Retry()
        self._call = BackgroundCall(partial(write, self._retry), background=background)

    def wait(self) -> None:
        """Wait until the object is durable.

        Raises:
            StorageError: it could not be written, or the upload was given up.
        """
        with storage_errors("write", self._place):
            if not self._call.ended.is_set:
                self._call.ended.wait()
            if self._retry.given_up:
                raise OSError("the upload was given up")
            self._call.result()

    def abandon(self) -> None:
        """Give up the upload if it has not ended; the object may or may not exist afterwards."""
        if not self._call.ended.is_set:
            self._retry.give_up()
            self._call.ended.set()

    def let_go(self) -> None:
        """After `abandon`: wait a moment for a request in progress.

        The object that the request makes can then be deleted.
        """
        self._call.join(_MOMENT)
