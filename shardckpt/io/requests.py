"""Requests to an object store on other threads: an upload, and several small requests at once.

Each of these would otherwise wait for a round trip. An upload can be given up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shardckpt.io.buckets.retry import Retry, Signal
from shardckpt.io.failures import storage_errors
from shardckpt.io.threads import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

R = TypeVar("R")

_MOMENT = 1.0
"""Seconds that a given-up request may go on before nobody waits for it any more."""


class _Call(Generic[R]):
    """A call on a thread of its own.

    The thread is a daemon: one that hangs in the network keeps nobody waiting.
    """

    def __init__(self, work: Callable[[], R], *, background: bool) -> None:
        """Begin; unless it is for the `background`, the call is made here and now."""
        self.ended = Signal()
        self._results: list[R] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            run = partial(self._run, work)
            self._thread = threading.Thread(target=run, name="shardckpt-request", daemon=True)
            self._thread.start()
        else:
            self._run(work)

    def result(self) -> R:
        """Wait for the end, and return or raise what the call did."""
        if not self.ended.is_set:
            self.ended.wait()
        try:
            if self._error is not None:
                raise self._error
            return self._results[0]
        finally:
            del self  # a reference cycle would keep an error, and its frames' memory

    def join(self, seconds: float) -> None:
        """Wait for the thread, if there is one."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], R]) -> None:
        try:
            self._results.append(work())
        except BaseException as e:  # noqa: BLE001  (`result` raises it)
            self._error = e
        finally:
            self.ended.set()
            del self  # as above


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
        self._let_go_at = 0.0
        self._call = _Call(partial(write, self._retry), background=background)

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
            self._let_go_at = time.monotonic() + _MOMENT
            self._retry.give_up()
            self._call.ended.set()

    def let_go(self) -> None:
        """After `abandon`: until a moment after that, wait for a request in progress.

        The object that the request makes can then be deleted. Give up several uploads before you
        let go the first: then they have the same moment.
        """
        self._call.join(max(0.0, self._let_go_at - time.monotonic()))


class ObjectWriter(Protocol):
    """Writes small objects: a store, or `Uploads` to one."""

    def write(self, key: str, data: Any) -> None:
        """Write an object, or begin to, and overwrite any object there."""
        ...


class Uploads:
    """Writes small objects, some at a time; a context.

    At its end all objects are durable. An error gives up what is left.
    """

    def __init__(self, begin: Callable[[str, Any], Upload]) -> None:
        """`begin` begins to write an object, given its key and its bytes."""
        self._begin = begin
        self._under_way: deque[Upload] = deque()

    def write(self, key: str, data: Any) -> None:
        """Begin to write an object, and overwrite any object there.

        The buffer must stay as it is until the context ends.

        Raises:
            StorageError: an earlier one could not be written.
        """
        while len(self._under_way) >= AT_ONCE:
            self._settle_one()
        self._under_way.append(self._begin(key, data))

    def _settle_one(self) -> None:
        self._under_way[0].wait()  # after Ctrl-C here, it is given up, too
        self._under_way.popleft()

    def __enter__(self) -> Self:
        """These uploads."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all, or give all up."""
        try:
            while error is None and self._under_way:
                self._settle_one()
        finally:
            for upload in self._under_way:
                upload.abandon()
            for upload in self._under_way:
                upload.let_go()


def read_together(reads: Sequence[Callable[[], R]]) -> list[R]:
    """The results of small independent reads, in order; some are made at a time.

    The first error, and Ctrl-C, are raised while other reads may go on; so none may write into
    memory of the caller.
    """
    if len(reads) < 2:
        return [read() for read in reads]
    results: list[R] = []
    under_way: deque[_Call[R]] = deque()
    try:
        for read in reads:
            if len(under_way) == AT_ONCE:
                results.append(under_way.popleft().result())
            try:
                under_way.append(_Call(read, background=True))
            except RuntimeError:  # no thread can be started: this process has too many
                results += [under_way.popleft().result() for _ in range(len(under_way))]
                results.append(read())
        while under_way:
            results.append(under_way.popleft().result())
        return results
    finally:
        under_way.clear()  # a reference cycle would keep an error, and its frames' memory
