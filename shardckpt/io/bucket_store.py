"""A storage in a bucket of an object store, or on a web server, which is read only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.io.buckets import cloud, listing
from shardckpt.io.buckets.bucket import Bucket, open_bucket
from shardckpt.io.buckets.rate_limit import ALONE, RequestShare
from shardckpt.io.deletion import delete_objects
from shardckpt.io.failures import begin_use
from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.io.buckets.retry import Retry
    from shardckpt.io.store import Data
    from shardckpt.io.url import Location


class BucketStore(Store):
    """Objects whose names have a prefix."""

    __slots__ = ("_share",)
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

    def _moved(self, location: Location) -> BucketStore:
        return BucketStore(location, self._share)

    def among(self, process: int, processes: int) -> BucketStore:
        """See `Store`."""
        return BucketStore(self.location, RequestShare(process, processes))

    @property
    def _bucket(self) -> Bucket:
        """Requests about the objects of the location's bucket."""
        begin_use(self.location)
        return open_bucket(self.location)

    def _name(self, key: str) -> str:
        """An object's name in its bucket."""
        return self.location.object_prefix + key

    def _read(self, key: str, start: int | None, stop: int | None, *, versioned: bool) -> tuple[bytes | None, bytes]:
        del versioned
        return self._bucket.read(self._name(key), start or 0, stop, self._share)

    def _read_into(self, key: str, start: int, into: Sequence[memoryview]) -> bytes:
        return self._bucket.read_into(self._name(key), start, into, self._share)

    def _size(self, key: str) -> int | None:
        return self._bucket.stat(self._name(key), self._share)[0]

    def _exists(self, key: str) -> bool:
        return self._size(key) is not None

    def _change_token(self, key: str) -> object:
        return self._bucket.stat(self._name(key), self._share)[1]

    def _write(self, key: str, data: Data, generation: bytes | None, retry: Retry | None = None) -> bool:
        return bool(self._bucket.write(self._name(key), [byte_view(data)], generation=generation, share=self._share, retry=retry))

    def _delete(self, key: str) -> None:
        self._bucket.delete(self._name(key), self._share)

    def _remove(self, key: str, generation: bytes) -> bool:
        return self._bucket.delete_if(self._name(key), generation)

    def _delete_below(self, prefix: str) -> None:
        delete_objects(listing.keys(self.location, prefix), self._delete)

    def _list(self, prefix: str) -> Iterable[str]:
        return listing.keys(self.location, prefix)

    def _list_children(self, prefix: str) -> list[str]:
        return listing.children(self.location, prefix)

    def _sizes(self, prefix: str) -> dict[str, int]:
        if self.location.is_web:
            nbytes = self._size(prefix)
            return {} if nbytes is None else {prefix: nbytes}
        return {found.name: found.nbytes for page in listing.pages(self.location, prefix) for found in page.objects}
