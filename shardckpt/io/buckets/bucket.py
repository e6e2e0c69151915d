"""Requests about a bucket's objects: reads, conditional writes, deletions, listings and copies.

Reads fill memory that the caller gives.

`open_bucket` returns the client of the bucket's service. Each of its methods waits for the rate
limit, makes one request, and repeats it by the rule of `Retry`. Bytes go from the caller's buffers
to the connection and back, without a copy of the object. (TensorStore copies each value that it
writes or reads.) Requests run on the thread that calls; many threads may call.

A *generation* is the version of an object: a number on Cloud Storage, an ETag on S3 and Azure, and
`ABSENT` where there is no object.
"""

from __future__ import annotations

import base64
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeVar

from crc32c import crc32c

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.rate_limit import ALONE, RequestShare
from shardckpt.io.buckets.retry import PassingError, Retry
from shardckpt.io.files import LARGEST_WHOLE, check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.io.url import Location

    T = TypeVar("T")

ABSENT = b"0"
"""The generation of an object that does not exist."""
PIECE = 1 << 20
"""Bytes that are handed to a connection, or taken from it, at a time; the timeout restarts with
each piece. Smaller pieces cost more processor time, because threads wait for the interpreter lock
after each; urllib3 copies what it takes, so larger ones need memory."""
_LONGEST = 1024
"""Most bytes of an object's name, on both services."""
_CONTROL = re.compile(r"[\r\n]")
_CLIENTS = {
    "gs": ("shardckpt.io.buckets.gcs", "GcsBucket"),
    "s3": ("shardckpt.io.buckets.s3_client", "S3Bucket"),
    "az": ("shardckpt.io.stores.azure", "AzureContainer"),
    "abfs": ("shardckpt.io.stores.azure", "AzureContainer"),
    "http": ("shardckpt.io.buckets.web", "HttpServer"),
    "https": ("shardckpt.io.buckets.web", "HttpsServer"),
}


def open_bucket(location: Location) -> Bucket:
    """The client for a location's bucket; no request is made.

    Raises:
        MissingExtraError: a package that the object store needs is not installed.
    """
    assert location.bucket is not None
    module, name = _CLIENTS[location.scheme]
    bucket: Bucket = getattr(import_module(module), name)(location.bucket)
    return bucket


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of a listing."""

    name: str
    """Name of the object in the bucket."""
    time: float
    """Time of its last write, in POSIX seconds."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """One response to a listing."""

    objects: list[Listed]
    prefixes: list[str]
    """Names up to the delimiter, if the request has one."""
    token: str | None
    """The service's token for the next page; None: this is the last one."""


@dataclass(frozen=True, slots=True)
class Body:
    """The response to a read, before its bytes are read."""

    readinto: Callable[[memoryview], int]
    """Fills the beginning of a buffer; returns the number of bytes, 0 at the end."""
    close: Callable[[], None]
    """Gives the connection back if all bytes were read, and ends it otherwise."""
    nbytes: int
    """Bytes of the response."""
    size: int
    """Bytes of the object."""
    generation: bytes


@dataclass(slots=True)
class Content:
    """The bytes of an object to write."""

    data: memoryview
    crc: int | None = None
    """Their crc32c; None: not computed yet."""

    @property
    def crc32c(self) -> str:
        """Their crc32c as Cloud Storage and S3 spell it."""
        if self.crc is None:
            self.crc = crc32c(self.data)
        return spell_crc32c(self.crc)


def spell_crc32c(crc: int) -> str:
    """A crc32c as Cloud Storage and S3 spell it."""
    return base64.b64encode(crc.to_bytes(4)).decode()


class Bucket(ABC):
    """The objects of a bucket."""

    page = 1000
    """Objects per listing request, S3's maximum."""

    def __init__(self, name: str) -> None:
        """Make requests about the objects of the bucket of that name."""
        self.name = name

    def read(
        self, name: str, start: int = 0, stop: int | None = None, share: RequestShare = ALONE
    ) -> tuple[bytes | None, bytes]:
        """Bytes `start` to `stop` of an object, or to its end.

        None if it does not exist; and its generation.

        Raises:
            EOFError: the object ends before `stop`.
            FormatError: no `stop` is given, and the object has too many bytes to read them all.
            OSError: the service failed or refused.
        """

        def once() -> tuple[bytes | None, bytes]:
            body = self._get(name, start, stop)
            if body is None:
                return None, ABSENT
            if stop is None and body.nbytes > LARGEST_WHOLE:
                body.close()
                check_whole(body.nbytes, f"{self.name}/{name}")
            data = bytearray(body.nbytes if stop is None else stop - start)
            _fill(body, [memoryview(data)], start)
            return bytes(data), body.generation

        if start == stop:
            size, generation = self.stat(name, share)
            if size is not None and size < start:
                raise EOFError(f"it has only {size} bytes")
            return None if size is None else b"", generation
        return self._call("read", once, share)

    def read_into(
        self, name: str, start: int, into: Sequence[memoryview], share: RequestShare = ALONE
    ) -> bytes:
        """Fill buffers, one after another, with the bytes of an object from `start` on.

        Returns:
            The object's generation.

        Raises:
            FileNotFoundError: the object does not exist.
            EOFError: it ends before the buffers are full.
            OSError: the service failed or refused.
        """
        stop = start + sum(map(len, into))

        def once() -> bytes:
            body = self._get(name, start, stop)
            if body is None:
                raise FileNotFoundError(f"{self.name}/{name}")
            _fill(body, into, start)
            return body.generation

        assert stop > start, "a range without bytes cannot be asked for"
        return self._call("read", once, share)

    def stat(self, name: str, share: RequestShare = ALONE) -> tuple[int | None, bytes]:
        """Bytes of an object, None if it does not exist; and its generation."""
        return self._call("read", lambda: self._stat(name), share)

    def write(
        self,
        name: str,
        data: memoryview,
        *,
        crc: int | None = None,
        generation: bytes | None = None,
        share: RequestShare = ALONE,
        retry: Retry | None = None,
    ) -> bytes:
        """Write an object; it is durable when this returns.

        Args:
            name: its name.
            data: its bytes; they are read again if the request is repeated.
            crc: their crc32c; None: it is computed.
            generation: write only if the object has this generation now; None: replace whatever is
                there.
            share: this process's share of the request rate.
            retry: another thread may give up with it.

        Returns:
            The new generation; b"" if the object has another one than `generation`, perhaps by an
            earlier try of this call.

        Raises:
            OSError: the service failed or refused, or the bucket does not exist.
        """
        if len(name.encode()) > _LONGEST or _CONTROL.search(name):
            raise OSError("invalid object name")
        content, giving_up, tries = Content(data, crc), retry or Retry(), count()

        def once() -> bytes:
            if next(tries) and content.crc not in (None, crc32c(data)):
                raise OSError("its bytes changed in memory before they were sent")
            return self._put(name, content, generation, giving_up)

        return self._call("write", once, share, giving_up)

    def create_anew(self, name: str, make: Callable[[], bytes]) -> bool | None:
        """Create an object with new contents at each try.

        So a version that was removed between two tries never comes back.

        Args:
            name: its name.
            make: makes the object's bytes; never the same twice.

        Returns:
            Whether this created it; False if an object exists, maybe from an earlier try whose
            response was lost. None, without a request, where generations never recur: `write` does
            the same there.

        Raises:
            OSError: the service failed or refused.
        """
        del name, make
        return None

    def delete(self, name: str, share: RequestShare = ALONE) -> None:
        """Delete an object, if there is one."""
        self._call("write", lambda: self._delete(name), share)

    @abstractmethod
    def delete_if(self, name: str, generation: bytes) -> bool:
        """Delete an object if it has this generation; whether this call did.

        False also where the service has no such deletion.
        """

    def pages(self, prefix: str, delimiter: str = "") -> Iterator[Page]:
        """The pages of a listing of the names that begin with `prefix`.

        There is at least one, maybe empty, if the bucket exists.
        """
        token: str | None = None
        while True:
            page = self._call("read", lambda token=token: self._list(prefix, delimiter, token))  # type: ignore[misc]
            yield page
            token = page.token
            if token is None:
                return

    def copy(self, name: str, target: Bucket, new: str) -> None:
        """Copy an object within the service, and replace any object there.

        Durable when this returns.

        Raises:
            NotImplementedError: the service cannot copy.
            OSError: the service failed or refused.
        """
        self._call("write", lambda: self._copy(name, target.name, new))

    def _call(
        self,
        kind: Literal["read", "write"],
        once: Callable[[], T],
        share: RequestShare = ALONE,
        retry: Retry | None = None,
    ) -> T:
        cloud.wait_for_rate(kind, share)
        return (retry or Retry()).call(once, self.is_passing, self.service)

    @property
    @abstractmethod
    def service(self) -> str:
        """The service that requests go to, for messages."""

    # Each makes one attempt at one request, and raises OSErrors: a `PassingError` if another
    # attempt may succeed.

    @staticmethod
    @abstractmethod
    def is_passing(error: Exception) -> bool:
        """Whether an error of an attempt is temporary."""

    @abstractmethod
    def _get(self, name: str, start: int, stop: int | None) -> Body | None:
        """Begin to read; None if there is no object. EOFError if it ends before `start`."""

    @abstractmethod
    def _stat(self, name: str) -> tuple[int | None, bytes]: ...

    @abstractmethod
    def _put(
        self, name: str, content: Content, generation: bytes | None, retry: Retry
    ) -> bytes: ...

    @abstractmethod
    def _delete(self, name: str) -> None: ...

    @abstractmethod
    def _list(self, prefix: str, delimiter: str, token: str | None) -> Page: ...

    @abstractmethod
    def _copy(self, name: str, bucket: str, new: str) -> None: ...


def range_header(start: int, stop: int | None) -> dict[str, str]:
    """The header of a request for bytes `start` to `stop`, or to the end.

    None for a complete object.
    """
    return (
        {}
        if not start and stop is None
        else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
    )


def pieces(data: memoryview, retry: Retry | None = None) -> Iterator[memoryview]:
    """Bytes, some at a time; OSError as soon as `retry` is given up."""
    for at in range(0, len(data), PIECE):
        if retry is not None and retry.given_up:
            raise OSError("the upload was given up")
        yield data[at : at + PIECE]


def _fill(body: Body, into: Sequence[memoryview], start: int) -> None:
    """Read a complete response into buffers."""
    try:
        expected = sum(map(len, into))
        if body.size < start + expected:
            raise EOFError(f"it has only {body.size} bytes")
        if body.nbytes != expected:
            raise PassingError(
                f"the service sends {body.nbytes} bytes where {expected} were asked for"
            )
        for rest in into:
            while len(rest):
                got = body.readinto(rest[:PIECE])
                if not got:
                    raise PassingError("the connection ended before the end of the object")
                rest = rest[got:]  # noqa: PLW2901  (the rest of the same buffer)
    finally:
        body.close()
