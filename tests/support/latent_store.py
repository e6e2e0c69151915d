"""A kind of storage that is not one of shardckpt's: objects in a dict, which each request finds a
moment later, and no paths.

It stands for the storage that somebody adds. It states its capabilities and implements what `Store`
leaves open; TensorStore knows nothing of it. The fixture `latent` makes its scheme known.
"""

from __future__ import annotations

import itertools
import time
from threading import Lock
from typing import TYPE_CHECKING

from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

LATENCY = 0.0005
"""Seconds of a request."""
_ABSENT = b"absent"
_objects: dict[str, tuple[bytes, bytes, float]] = {}
"""Path → bytes, generation and time of the last write."""
_generations = itertools.count()
_changing = Lock()


class LatentStore(Store):
    """Objects in a dict of this process."""

    __slots__ = ()
    shared = False
    sharing_advice = "latent:// is the memory of one process."
    uploads_on_threads = True

    @classmethod
    def at(cls, location: Location) -> LatentStore:
        """See `Store`."""
        return cls(location)

    def _moved(self, location: Location) -> LatentStore:
        return type(self)(location)

    def _path(self, key: str) -> str:
        """Make a request about an object."""
        time.sleep(LATENCY)
        return f"{self.location.path}/{key}"

    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        del versioned
        data, generation, _ = _objects.get(self._path(key), (None, _ABSENT, 0.0))
        if data is not None and len(data) < max(start or 0, stop or 0):
            raise EOFError(f"it has only {len(data)} bytes")
        return None if data is None else data[start:stop], generation

    def _size(self, key: str) -> int | None:
        entry = _objects.get(self._path(key))
        return None if entry is None else len(entry[0])

    def _change_token(self, key: str) -> object:
        return _objects.get(self._path(key), (b"", _ABSENT, 0.0))[1]

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        path, copy = self._path(key), bytes(byte_view(data))
        with _changing:
            if generation not in (None, _objects.get(path, (b"", _ABSENT, 0.0))[1]):
                return False
            _objects[path] = copy, b"%d" % next(_generations), time.time()
            return True

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with _changing:
            _objects.pop(path, None)

    def _remove(self, key: str, generation: bytes) -> bool:
        path = self._path(key)
        with _changing:
            if path not in _objects or _objects[path][1] != generation:
                return False
            del _objects[path]
            return True

    def _list(self, prefix: str) -> list[str]:
        return [key for key, _ in self._times(prefix)]

    def _times(self, prefix: str) -> Iterator[tuple[str, float]]:
        top = self._path("")
        with _changing:
            times = [
                (path.removeprefix(top), kept[2])
                for path, kept in _objects.items()
                if path.startswith(top + prefix)
            ]
        yield from times
