"""A storage in a bucket of an object store; and one on a web server, which is read only."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import tensorstore as ts

from shardckpt.errors import StorageError
from shardckpt.format.documents import check_key
from shardckpt.io.buckets import cloud, listing
from shardckpt.io.buckets.bucket import Bucket, open_bucket
from shardckpt.io.buckets.object_copies import can_copy, copy_objects
from shardckpt.io.buckets.rate_limit import ALONE, RequestShare
from shardckpt.io.deletion import delete_objects
from shardckpt.io.failures import begin_use, storage_errors
from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.io.buckets.retry import Retry
    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

T = TypeVar("T")
_contexts = count()


class BucketStore(Store):
    """Objects whose names have a prefix."""

    __slots__ = ("_share",)
    has_driver = True
    uploads_in_parts = True
    uploads_on_threads = True

    def __init__(self, location: Location, share: RequestShare = ALONE) -> None:
        """Keys are relative to `location`; `share` is this process's share of the request rate."""
        super().__init__(location)
        self._share = share

    @classmethod
    def at(cls, location: Location) -> BucketStore:
        """See `Store`."""
        cloud.prepare(location.scheme)
        store = cls(location)
        store.kvstore()  # for its errors: indexes are written last
        return store

    def context(self) -> ts.Context:
        """One for all buckets; other settings, or keys that were rotated, make a new one."""
        return _context(cloud.context_stamp())

    def with_new_keys(self, operation: Callable[[], T]) -> T:
        """See `Store`."""
        # Not that of the newest context, which another thread may have made meanwhile.
        before = cloud.context_stamp()
        try:
            return operation()
        except StorageError:
            if cloud.context_stamp() == before:
                raise
            return operation()

    def _moved(self, location: Location) -> BucketStore:
        return type(self)(location, self._share)

    def among(self, process: int, processes: int) -> BucketStore:
        """See `Store`."""
        return type(self)(self.location, RequestShare(process, processes))

    @property
    def _bucket(self) -> Bucket:
        """Requests about the objects of the location's bucket."""
        begin_use(self.location)
        return open_bucket(self.location)

    def _name(self, key: str) -> str:
        """An object's name in its bucket."""
        return self.location.object_prefix + key

    def create_anew(self, key: str, make: Callable[[], bytes], generation: bytes) -> bool:
        """See `Store`. Where a generation is a digest, each try has bytes of its own."""
        check_key(key, self)
        with storage_errors("write", self.path_of(key)):
            created = self._bucket.create_anew(self._name(key), make)
        return super().create_anew(key, make, generation) if created is None else created

    def copies_from(self, source: Store) -> bool:
        """See `Store`. Both are in buckets of one service."""
        return can_copy(source, self)

    def copy_from(self, source: Store, keys: Iterable[tuple[str, str]]) -> None:
        """See `Store`."""
        copy_objects(source, self, keys)

    def _read(
        self, key: str, start: int | None, stop: int | None, *, versioned: bool
    ) -> tuple[bytes | None, bytes]:
        del versioned
        return self._bucket.read(self._name(key), start or 0, stop, self._share)

    def _read_into(self, key: str, start: int, into: Sequence[memoryview]) -> bytes:
        return self._bucket.read_into(self._name(key), start, into, self._share)

    def _size(self, key: str) -> int | None:
        return self._bucket.stat(self._name(key), self._share)[0]

    def _change_token(self, key: str) -> object:
        return self._bucket.stat(self._name(key), self._share)[1]

    def _write(self, key: str, data: Data, generation: bytes | None) -> bool:
        return bool(
            self._bucket.write(
                self._name(key), byte_view(data), generation=generation, share=self._share
            )
        )

    def _upload(self, key: str, data: Data, crc: int | None, retry: Retry) -> None:
        self._bucket.write(
            self._name(key), byte_view(data), crc=crc, share=self._share, retry=retry
        )

    def _delete(self, key: str) -> None:
        self._bucket.delete(self._name(key), self._share)

    def _remove(self, key: str, generation: bytes) -> bool:
        return self._bucket.delete_if(self._name(key), generation)

    def _delete_below(self, prefix: str) -> None:
        delete_objects(listing.keys(self.location, prefix), self._delete)

    def _list(self, prefix: str) -> Iterable[str]:
        return filter(listing.is_key, listing.keys(self.location, prefix))

    def _times(self, prefix: str) -> Iterator[tuple[str, float]]:
        for page in listing.pages(self.location, prefix):
            yield from ((one.name, one.time) for one in page.objects if listing.is_key(one.name))

    def _list_children(self, prefix: str) -> list[str]:
        return listing.children(self.location, prefix)

    def _sizes(self, prefix: str) -> dict[str, int]:
        return {
            one.name: one.nbytes
            for page in listing.pages(self.location, prefix)
            for one in page.objects
            if listing.is_key(one.name)
        }


@lru_cache(maxsize=4)
def _context(_stamp: object) -> ts.Context:
    return ts.Context(cloud.context(next(_contexts)))


class WebStore(BucketStore):
    """Files of a web server: they are read only, and never listed."""

    __slots__ = ()
    writable = False
    lists = False
    uploads_in_parts = False

    def _list_children(self, prefix: str) -> list[str]:
        del prefix
        return []

    def _sizes(self, prefix: str) -> dict[str, int]:
        nbytes = self._size(prefix)
        return {} if nbytes is None else {prefix: nbytes}
