"""A storage in the memory of this process, for tests and trials: TensorStore's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorstore as ts

from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from shardckpt.io.store import Data
    from shardckpt.io.url import Location


class MemoryStore(Store):
    """Keys of a key-value store."""

    __slots__ = ()
    keeps_times = False
    shared = False
    has_driver = True
    sharing_advice = "memory:// is the memory of one process; save to a disk or a bucket."

    @classmethod
    def at(cls, location: Location) -> MemoryStore:
        """See `Store`."""
        return cls(location)

    def _moved(self, location: Location) -> MemoryStore:
        return MemoryStore(location)

    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        del versioned
        span = None if start is None and stop is None else slice(start or 0, stop)
        result = self.kvstore().read(key, byte_range=span).result()
        return result.value if result.state == "value" else None, result.stamp.generation

    def _size(self, key: str) -> int | None:
        data, _ = self._read(key, None, None, versioned=False)
        return None if data is None else len(data)

    def _exists(self, key: str) -> bool:
        return bool(
            self.kvstore().list(ts.KvStore.KeyRange(key.encode(), key.encode() + b"\0")).result()
        )

    def _change_token(self, key: str) -> object:
        return self._read(key, None, None, versioned=True)[1]

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        value = data if isinstance(data, (bytes, bytearray)) else bytes(byte_view(data))
        return bool(self.kvstore().write(key, value, if_equal=generation).result().generation)

    def _delete(self, key: str) -> None:
        self.kvstore().write(key, None).result()

    def _remove(self, key: str, generation: bytes) -> bool:
        return bool(self.kvstore().write(key, None, if_equal=generation).result().generation)

    def _delete_below(self, prefix: str) -> None:
        self.kvstore().delete_range(_starting_with(prefix)).result()

    def _list(self, prefix: str) -> list[str]:
        return [key.decode() for key in self.kvstore().list(_starting_with(prefix)).result()]


def _starting_with(prefix: str) -> Any:
    """The range of keys that start with `prefix`; "" means all keys."""
    first = prefix.encode()
    return ts.KvStore.KeyRange(first, first[:-1] + bytes([first[-1] + 1]) if first else b"")
