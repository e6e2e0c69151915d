"""Streaming, low-memory upload of one large object to an object store, resumable after a crash.

TensorStore writes an object from one value in memory. An exported model may be larger than the
memory, so:

1. `open_upload` starts an upload at the service, or resumes one (`UploadState`, kept by the
   caller). Writing begins at `resume_at`.
2. `write` fills a buffer of one part. When one more byte comes, a thread sends the part, and the
   next buffer is filled meanwhile. When all buffers are full, `write` waits. The last part is not
   sent yet, so that nothing becomes visible.
3. `finish` waits for all parts, sends the last one and publishes: the object becomes visible
   completely or not at all.
4. `abort` ends the upload and removes its parts; `close` leaves the upload open, to be resumed.

Bytes that the service has confirmed (`durable`) survive this process. The only memory is `buffers`
times the part size.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardckpt.errors import BudgetError
from shardckpt.io.buckets import cloud
from shardckpt.io.buffers import BufferPool, Lease
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import byte_view
from shardckpt.io.threads import PoolCall
from shardckpt.text import Message, file_size, mebibytes_above, named_size

if TYPE_CHECKING:
    from types import TracebackType

    from shardckpt.io.buckets.upload_session import Session, UploadState
    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

MiB = 1 << 20
BUFFERS = 4
"""Parts in memory: three that are being sent to S3, and one that is filled. Cloud Storage accepts
one at a time; two are enough there."""
SMALLEST = 8 * MiB
"""Least bytes of a part. S3 requires at least 5 MiB."""
LARGEST = 64 * MiB
"""Most bytes of a part, unless the object's size requires larger parts. At most this much is sent
again after a kill."""
MOST_PARTS = 10_000
"""Most parts of an object on S3
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""
_SESSIONS = {
    "gs": ("shardckpt.io.buckets.upload_gcs", "GcsSession"),
    "s3": ("shardckpt.io.buckets.upload_s3", "S3Session"),
}


def part_size(nbytes: int, memory_limit: int) -> int:
    """Bytes per part for an object of `nbytes`.

    There are few enough parts for S3, and `BUFFERS` parts (at least two) fit within the memory
    limit.

    Raises:
        BudgetError: two parts do not fit.

    >>> part_size(140 * 10**9, 128 << 20) >> 20, part_size(5 << 40, 2 << 30) >> 20
    (32, 525)
    """
    needed = max(SMALLEST, -(-nbytes // MOST_PARTS // MiB) * MiB)
    if 2 * needed > memory_limit:
        reason = (
            f"An upload of {file_size(nbytes)} holds two parts of at least {file_size(needed)} in "
            "memory, which is more than "
        )
        raise BudgetError(
            Message(
                reason,
                named_size("memory_limit", memory_limit),
                f"; raise it to {mebibytes_above(2 * needed)}.",
            )
        )
    return max(needed, min(LARGEST, memory_limit // BUFFERS // MiB * MiB))


def open_upload(
    place: Location,
    *,
    part_bytes: int,
    buffers: int = BUFFERS,
    if_absent: bool = True,
    resume: UploadState | None = None,
) -> StreamingUpload:
    """Begin to write an object, or resume.

    Args:
        place: the object's location, on an object store.
        part_bytes: bytes of each part except the last, see `part_size`. A multiple of 256 KiB.
        buffers: most parts in memory, at least two.
        if_absent: publish only if the object does not exist.
        resume: an upload of the same bytes to the same place. If the service no longer knows it, a
            new upload begins, and `resume_at` is 0. The same happens if it has another part size or
            another `if_absent`; the old upload is then ended.

    Raises:
        AlreadyExistsError: the object exists, and `if_absent` is set.
        MissingExtraError: a package that the object store needs is not installed.
        StorageError: the storage failed or refused.
    """
    service = _service(place)
    with storage_errors("upload", place):
        session: Session | None = (
            None if resume is None else service.resume(place, resume, if_absent=if_absent)
        )
        if (
            session is not None
            and (part_bytes, if_absent) != (session.state.part_bytes, session.state.if_absent)
            and not session.published
        ):
            session.abort()
            session = None
        return StreamingUpload(
            place, session or service.begin(place, part_bytes, if_absent=if_absent), buffers
        )


def abandon_upload(place: Location, state: UploadState) -> None:
    """End an upload that any process began, and remove its parts, unless it is published.

    Raises:
        MissingExtraError: a package that the object store needs is not installed.
        StorageError: the storage failed or refused.
    """
    service = _service(place)
    with storage_errors("end the upload of", place):
        service(place, state).abort()


def _service(place: Location) -> Any:
    """The session class of the location's service."""
    cloud.prepare(place.scheme)
    module, name = _SESSIONS[place.scheme]
    return getattr(import_module(module), name)


class StreamingUpload:
    """An upload in progress, for one thread to write. A context manager that closes it."""

    def __init__(self, place: Location, session: Session, buffers: int) -> None:
        assert buffers >= 2, "one part is filled while another one is sent"
        self._place = place
        self._session = session
        self._part_bytes = session.state.part_bytes
        self.resume_at = session.resume_at
        """The offset of the first byte to write."""
        self._offset = self.resume_at
        """Offset of the part that is being filled."""
        threads = min(session.parallel, buffers - 1)
        self.pool = BufferPool((threads + 1) * self._part_bytes)
        """The memory of the parts in progress."""
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="shardckpt-upload")
        self._sending: deque[PoolCall[None]] = deque()
        self._lease: Lease | None = None
        self._part = memoryview(b"")
        self._filled = 0
        self._closed = False

    @property
    def published(self) -> bool:
        """Whether the object is visible already.

        A resumed upload may be complete, and then needs no further writes.
        """
        return self._session.published

    @property
    def durable(self) -> int:
        """Bytes from the beginning that the service has confirmed; they survive this process."""
        return self._session.durable

    @property
    def state(self) -> UploadState:
        """The state that another process needs to resume from here."""
        return self._session.state

    def write(self, data: Data) -> None:
        """Write the bytes that follow; the caller may reuse the buffer when this returns.

        Raises:
            StorageError: the storage failed, perhaps for bytes of an earlier call.
        """
        view = byte_view(data)
        while len(view) and not self.published:
            if self._filled == self._part_bytes:
                self._send()
            if self._lease is None:
                self._check_open()
                self._lease = self.pool.take(self._part_bytes)
                self._part = byte_view(self._lease.array((self._part_bytes,), np.uint8))  # type: ignore[arg-type]
            copied = min(len(view), self._part_bytes - self._filled)
            self._part[self._filled : self._filled + copied] = view[:copied]
            self._filled += copied
            view = view[copied:]

    def finish(self) -> None:
        """Publish the object; it is complete and visible when this returns.

        Raises:
            AlreadyExistsError: `if_absent` is set, and the object exists.
            CorruptionError: the received bytes differ from the written ones; the object was deleted
                again.
            StorageError: the storage failed. Nothing is visible; or, if the response was lost, the
                complete object may be visible.
        """
        if not self.published:
            self._check_open()
            self._settle(len(self._sending))
            with storage_errors("upload", self._place):
                self._session.publish(self._offset, self._part[: self._filled])
        self.close()

    def abort(self) -> None:
        """End the upload and remove its parts, unless it is published.

        Raises:
            StorageError: the storage failed.
        """
        self.close()
        with storage_errors("end the upload of", self._place):
            if not self.published:
                self._session.abort()

    def close(self) -> None:
        """Stop sending, and leave the upload open.

        Waits for the requests in progress, which time out.
        """
        self._session.give_up()
        self._workers.shutdown(cancel_futures=True)
        self._closed = True
        self._part, self._filled = memoryview(b""), 0
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None
        self.pool.clear()

    def __enter__(self) -> Self:
        """The upload itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _send(self) -> None:
        """Hand the full part to a thread."""
        self._settle(0)
        assert self._lease is not None
        self._sending.append(
            PoolCall(self._workers, self._send_part, self._lease, self._offset, self._part)
        )
        self._offset += self._filled
        self._lease, self._part, self._filled = None, memoryview(b""), 0

    def _send_part(self, lease: Lease, offset: int, data: memoryview) -> None:
        with lease:
            self._session.send(offset, data)

    def _settle(self, parts: int) -> None:
        """Wait for `parts` parts, and raise the errors of parts that have ended.

        The first error is raised again each time.
        """
        with storage_errors("upload", self._place):
            while self._sending and (parts > 0 or self._sending[0].done()):
                self._sending[0].result()
                self._sending.popleft()
                parts -= 1

    def _check_open(self) -> None:
        """Raise StorageError if the upload was closed, because bytes in memory are lost."""
        with storage_errors("upload", self._place):
            if self._closed:
                raise OSError("this upload was closed; continue it from its saved state")
