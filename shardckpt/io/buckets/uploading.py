"""One large object, written from beginning to end to an object store, with little memory, and gone on with after a crash.

TensorStore writes an object from one value in memory. An exported model is larger than that may be, so:

1. `open_upload` asks the service for an upload, or goes on with one (`UploadState`, kept by the caller). Writing begins at `resume_at`.
2. `write` fills a buffer of one part's size. When a byte more comes, the part goes to a thread that sends it, and the next buffer
   is filled meanwhile; when all buffers are full, `write` waits. The last part stays here, so that nothing becomes visible yet.
3. `finish` waits for all parts, sends the last one and publishes: the object is there as a whole or not at all.
4. `abort` ends the upload and leaves nothing; `close` leaves it as it is, to be gone on with.

What the service has confirmed (`durable`) survives this process. Buffers are all the memory there is, `buffers` times a part.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardckpt.errors import BudgetError
from shardckpt.excerpt import file_size, mebibytes_above
from shardckpt.io.buckets import cloud
from shardckpt.io.buffers import BufferPool, Lease
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import byte_view

if TYPE_CHECKING:
    from types import TracebackType

    from shardckpt.io.buckets.upload_session import Session, UploadState
    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

__all__ = ["StreamingUpload", "abandon_upload", "open_upload", "part_size"]

MiB = 1 << 20
BUFFERS = 4
"""Parts in memory: three on their way to S3, and one that is filled. Cloud Storage takes one at a time, and two are enough."""
SMALLEST = 8 * MiB
"""Bytes of a part. S3 takes no less than 5 MiB."""
LARGEST = 64 * MiB
"""Bytes of a part, unless an object of its size needs larger ones: what is sent again at most when a process was killed."""
MOST_PARTS = 10_000
"""Of an object on S3 (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""
_SESSIONS = {"gs": ("shardckpt.io.buckets.upload_gcs", "GcsSession"), "s3": ("shardckpt.io.buckets.upload_s3", "S3Session")}


def part_size(nbytes: int, memory_limit: int) -> int:
    """Bytes per part for an object of `nbytes`, so that its parts are few enough and `BUFFERS` of them fit the limit, or at least two.

    Raises:
        BudgetError: two do not.

    >>> part_size(140 * 10**9, 128 << 20) >> 20, part_size(5 << 40, 2 << 30) >> 20
    (32, 525)
    """
    needed = max(SMALLEST, -(-nbytes // MOST_PARTS // MiB) * MiB)
    if 2 * needed > memory_limit:
        raise BudgetError(
            f"An upload of {file_size(nbytes)} has parts of at least {file_size(needed)}, and two of them in memory, which "
            f"memory_limit={file_size(memory_limit)} does not allow; raise it to {mebibytes_above(2 * needed)}."
        )
    return max(needed, min(LARGEST, memory_limit // BUFFERS // MiB * MiB))


def open_upload(
    place: Location, *, part_bytes: int, buffers: int = BUFFERS, if_absent: bool = True, resume: UploadState | None = None
) -> StreamingUpload:
    """Begin to write an object, or go on.

    Args:
        place: of the object, on an object store.
        part_bytes: of each part but the last: see `part_size`. A multiple of 256 KiB.
        buffers: how many parts may be in memory, at least two.
        if_absent: publish only where there is no object.
        resume: an upload of the same bytes to the same place. If the service knows it no more, another one is begun, and `resume_at`
            is 0; so, too, if it was begun with another size of parts or another `if_absent`, and it is then ended.

    Raises:
        AlreadyExistsError: there is an object, and `if_absent`.
        MissingExtraError: what the object store needs is not installed.
        StorageError: the storage failed or refused.
    """
    service = _service(place)
    with storage_errors("upload", place):
        session: Session | None = None if resume is None else service.resume(place, resume)
        if session is not None and (part_bytes, if_absent) != (session.state.part_bytes, session.state.if_absent) and not session.published:
            session.abort()
            session = None
        return StreamingUpload(place, session or service.begin(place, part_bytes, if_absent=if_absent), buffers)


def abandon_upload(place: Location, state: UploadState) -> None:
    """End an upload of any process, and remove what was sent, if it is not published.

    Raises:
        MissingExtraError: what the object store needs is not installed.
        StorageError: the storage failed or refused.
    """
    service = _service(place)
    with storage_errors("end the upload of", place):
        service(place, state).abort()


def _service(place: Location) -> Any:
    """The class of sessions."""
    cloud.prepare(place.scheme)
    module, name = _SESSIONS[place.scheme]
    return getattr(import_module(module), name)


class StreamingUpload:
    """An object on its way, for one thread to write. A context manager that closes it."""

    def __init__(self, place: Location, session: Session, buffers: int) -> None:
        assert buffers >= 2, "one part is filled while another one is sent"
        self._place = place
        self._session = session
        self._part_bytes = session.state.part_bytes
        self.resume_at = session.resume_at
        """The offset of the first byte to write."""
        self._offset = self.resume_at
        """Of the part that is being filled."""
        threads = min(session.parallel, buffers - 1)
        self._pool = BufferPool((threads + 1) * self._part_bytes)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="shardckpt-upload")
        self._sending: deque[Future[None]] = deque()
        self._lease: Lease | None = None
        self._part = memoryview(b"")
        self._filled = 0
        self._closed = False

    @property
    def published(self) -> bool:
        """Whether the object is visible already: of an upload that had ended when it was gone on with, nothing need be written."""
        return self._session.published

    @property
    def durable(self) -> int:
        """Bytes from the beginning that the service has confirmed, and that survive this process."""
        return self._session.durable

    @property
    def state(self) -> UploadState:
        """What another process needs in order to go on from here."""
        return self._session.state

    @property
    def memory(self) -> int:
        """Bytes of buffers, at most."""
        return self._pool.limit

    @property
    def most_memory(self) -> int:
        """Bytes of buffers that there were at once until now."""
        return self._pool.high_water

    def write(self, data: Data) -> None:
        """Write the bytes that follow; the buffer is the caller's again when this returns.

        Raises:
            StorageError: the storage failed, perhaps with bytes that were written earlier.
        """
        view = byte_view(data)
        while len(view) and not self.published:
            if self._filled == self._part_bytes:
                self._send()
            if self._lease is None:
                self._check_open()
                self._lease = self._pool.take(self._part_bytes)
                self._part = byte_view(self._lease.array((self._part_bytes,), np.uint8))  # type: ignore[arg-type]
            taken = min(len(view), self._part_bytes - self._filled)
            self._part[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]

    def finish(self) -> None:
        """Publish the object; it is there as a whole when this returns.

        Raises:
            AlreadyExistsError: it was to be published only where no object is, and there is one.
            CorruptionError: what has arrived is not what was written; it was deleted again.
            StorageError: the storage failed. Nothing is visible, or, where no answer came, all of it may be.
        """
        if not self.published:
            self._check_open()
            self._settle(len(self._sending))
            with storage_errors("upload", self._place):
                self._session.publish(self._offset, self._part[: self._filled])
        self.close()

    def abort(self) -> None:
        """End the upload and remove what was sent, if it is not published.

        Raises:
            StorageError: the storage failed.
        """
        self.close()
        with storage_errors("end the upload of", self._place):
            if not self.published:
                self._session.abort()

    def close(self) -> None:
        """Stop sending, and leave the upload as it is. Takes as long as the requests under way, which time out."""
        self._session.give_up()
        self._workers.shutdown(cancel_futures=True)
        self._closed = True
        self._part, self._filled = memoryview(b""), 0
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None
        self._pool.clear()

    def __enter__(self) -> Self:
        """The upload itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _send(self) -> None:
        """Hand the part that is full to a thread."""
        self._settle(0)
        assert self._lease is not None
        self._sending.append(self._workers.submit(self._send_part, self._lease, self._offset, self._part))
        self._offset += self._filled
        self._lease, self._part, self._filled = None, memoryview(b""), 0

    def _send_part(self, lease: Lease, offset: int, data: memoryview) -> None:
        with lease:
            self._session.send(offset, data)

    def _settle(self, parts: int) -> None:
        """Wait for so many parts, and raise what has become of those that have ended; the first failure is raised each time."""
        with storage_errors("upload", self._place):
            while self._sending and (parts > 0 or self._sending[0].done()):
                self._sending[0].result()
                self._sending.popleft()
                parts -= 1

    def _check_open(self) -> None:
        """Raise StorageError if it was closed: what was in memory is lost."""
        with storage_errors("upload", self._place):
            if self._closed:
                raise OSError("this upload was closed; go on with it from its state")
