"""Small independent requests made at once, where each would otherwise wait for a round trip."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from shardckpt.io.requests import BackgroundCall
from shardckpt.io.threads import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from shardckpt.io.requests import Upload
    from shardckpt.io.store import Data, Store

R = TypeVar("R")


class Uploads:
    """Writes small objects, some at a time where uploads go on by themselves; a context.

    At its end all objects are durable, as after `Store.write`. An error gives up what is left.
    """

    def __init__(self, place: Store) -> None:
        """Keys are relative to `place`."""
        self._place = place
        self._under_way: deque[Upload] = deque()

    def write(self, key: str, data: Data) -> None:
        """Begin to write an object, and overwrite any object there.

        The buffer must stay as it is until the context ends.

        Raises:
            StorageError: it could not be written, or an earlier one.
        """
        if not self._place.uploads_on_threads:
            self._place.write(key, data)
            return
        while len(self._under_way) >= AT_ONCE:
            self._settle_one()
        self._under_way.append(self._place.upload(key, data))

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


def read_together(place: Store, reads: Sequence[Callable[[], R]]) -> list[R]:
    """The results of a few independent reads, in order; made at once where requests are slow.

    The first error, and Ctrl-C, are raised while other reads may go on; so none may write into
    memory of the caller.
    """
    if place.near:
        return [read() for read in reads]
    calls = [BackgroundCall(read, background=True) for read in reads[1:]]
    return [*(read() for read in reads[:1]), *(call.result() for call in calls)]
