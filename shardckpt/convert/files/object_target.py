"""A file on an object store that is written in order; an interrupted one continues.

A file on an object store can be written only from its beginning to its end, and exists only when it
is finished. So an `ObjectTarget` accepts bytes in order. During the upload an object beside it,
`.<name>.upload.json`, records the state that another process needs:

1. `open` looks for this object. If it records the same bytes (`digest`), that upload continues from
   `resume_at`; if it records others, that upload is aborted. A new upload is recorded before any
   byte is sent.
2. After every 256 MiB the progress is recorded, where the service does not keep it itself.
3. `finish` publishes the file and deletes the object; `abort` deletes it, too. If a process is
   killed between these two steps, the next one finds the target finished. `close` leaves the
   upload, so that it can continue.

Two processes that write the same bytes to one place at the same time share the upload, and either
may finish it. A process with other bytes aborts the upload of the first, which then reports this.

The service compares the received bytes with its own checksums, part by part, so nothing is read
back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    FormatError,
    ShardckptError,
    StorageError,
)
from shardckpt.format.documents import Fields, open_envelope, seal
from shardckpt.io.buckets.upload_session import UploadState
from shardckpt.io.buckets.uploading import StreamingUpload, abandon_upload, open_upload, part_size
from shardckpt.io.store import Store, byte_view

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from shardckpt.io.store import Data
    from shardckpt.io.url import Location

T = TypeVar("T")
SAVE_EVERY = 256 << 20
"""Bytes after which an upload's progress is recorded."""


def upload_note(name: str) -> str:
    """Name of the object beside a target that records its upload.

    No tool mistakes it for a part of a model.
    """
    return f".{name}.upload.json"


def read_note(store: Store, key: str, parse: Callable[[Fields], T]) -> tuple[T | None, bytes]:
    """A small object that records progress, and the generation to pass to `replace`.

    The object is None if there is none that can be read.
    """
    content, generation = store.read_versioned(key)
    where = store.path_of(key)
    with suppress(FormatError):
        if content is not None:
            return parse(Fields(open_envelope(content, where), where)), generation
    return None, generation


@dataclass(frozen=True, slots=True)
class _UploadNote:
    """The contents of the object that records an upload."""

    digest: str
    """Digest of the bytes that are written."""
    state: UploadState

    def seal(self) -> bytes:
        """Serialize the note for `parse`."""
        return seal({"digest": self.digest, **self.state.to_json()})

    @classmethod
    def parse(cls, doc: Fields) -> Self:
        """The note of a document; FormatError if it is none."""
        return cls(doc.string("digest"), UploadState.from_json(doc))


def abandon(place: Location) -> None:
    """Abort the upload of a file, if there is one, and remove the bytes that were sent.

    Raises:
        MissingExtraError: a package that the object store needs is not installed.
        StorageError: the storage failed.
    """
    above = place.parent
    assert above is not None, f"{place} is a bucket"
    store, key = Store.open(above), upload_note(place.name)
    note, _ = read_note(store, key, _UploadNote.parse)
    if note is not None:
        abandon_upload(place, note.state)
        store.delete(key)


class ObjectTarget:
    """A file on an object store, written in order by one thread.

    A context manager that closes it.
    """

    def __init__(
        self, place: Location, store: Store, nbytes: int, digest: str, upload: StreamingUpload
    ) -> None:
        self._place = place
        self._store = store
        self._key = upload_note(place.name)
        self._nbytes = nbytes
        self._digest = digest
        self._upload = upload
        self._noted = upload.state.summed
        self._written = self.resume_at

    @classmethod
    def open(
        cls,
        place: Location,
        *,
        nbytes: int,
        digest: str,
        overwrite: bool,
        memory_limit: int,
        before_abort: Callable[[], object] = tuple,
    ) -> Self:
        """Begin to write a file, or continue where another process has stopped.

        Args:
            place: the file, below a bucket.
            nbytes: bytes of the complete file.
            digest: digest of the complete file; equal for equal bytes.
            overwrite: whether the finished file may replace an existing one.
            memory_limit: bytes for buffers.
            before_abort: called before an upload of other bytes is aborted; may refuse it.

        Raises:
            AlreadyExistsError: the object exists, and may not be replaced.
            BudgetError: buffers for a file of this size need more than `memory_limit`.
            MissingExtraError: a package that the object store needs is not installed.
            StorageError: the storage failed, or another process begins to write the file at the
                same moment.
        """
        part_bytes = part_size(nbytes, memory_limit)
        above = place.parent
        assert above is not None, f"{place} is a bucket"
        store, key = Store.open(above), upload_note(place.name)
        note, generation = read_note(store, key, _UploadNote.parse)
        resume = note.state if note is not None and note.digest == digest else None
        if note is not None and resume is None:
            before_abort()
            abandon_upload(place, note.state)
        if resume is not None and 2 * resume.part_bytes <= memory_limit:
            part_bytes = resume.part_bytes
        buffers = memory_limit // part_bytes
        try:
            upload = open_upload(
                place,
                part_bytes=part_bytes,
                buffers=buffers,
                if_absent=not overwrite,
                resume=resume,
            )
        except AlreadyExistsError:
            if resume is not None:
                abandon_upload(place, resume)
            if note is not None:
                store.delete(key)
            raise
        is_noted = upload.state == resume
        try:
            is_noted = is_noted or store.replace(
                key, _UploadNote(digest, upload.state).seal(), generation
            )
        finally:
            if not is_noted:
                with suppress(ShardckptError):
                    upload.abort()
        if not is_noted:
            raise StorageError(
                f"cannot upload {place}: another process started to upload there at the same "
                "moment; let only one of them do it."
            )
        return cls(place, store, nbytes, digest, upload)

    @property
    def resume_at(self) -> int:
        """Offset of the first byte to write; another process wrote the bytes before it."""
        return self._nbytes if self._upload.published else self._upload.resume_at

    @property
    def durable(self) -> int:
        """Bytes from the beginning that survive this process."""
        return self._nbytes if self._upload.published else self._upload.durable

    def write_at(self, offset: int, data: Data) -> None:
        """Write the next bytes; the caller may reuse the buffer when this returns.

        Raises:
            StorageError: the storage failed, perhaps with bytes that were written earlier, or
                another process has replaced this upload.
        """
        view = byte_view(data)
        assert offset == self._written, f"expected bytes at {self._written}, got bytes at {offset}"
        assert offset + len(view) <= self._nbytes, "more bytes than the file was to have"
        self._upload.write(view)
        self._written += len(view)
        if self._upload.state.summed >= self._noted + SAVE_EVERY:
            self._save()

    def finish(self) -> None:
        """Publish the file: it is complete and visible when this returns.

        Raises:
            AlreadyExistsError: another process has written the object meanwhile, and it may not be
                replaced. Nothing of this file is left.
            CommitError: not all bytes were written.
            CorruptionError: the bytes that arrived differ from the bytes written.
            StorageError: the storage failed.
        """
        if self._written != self._nbytes:
            raise CommitError(
                f"{self._place}: only {self._written} of {self._nbytes} bytes were written; "
                "nothing was published. Export again."
            )
        try:
            self._upload.finish()
        except AlreadyExistsError:
            self.abort()
            raise
        self._forget()

    def abort(self) -> None:
        """Remove everything that was sent.

        Raises:
            StorageError: the storage failed.
        """
        self._upload.abort()
        self._forget()

    def close(self) -> None:
        """Stop, and leave the sent bytes so that another process can continue."""
        self._upload.close()
        if self._upload.state.summed > self._noted and not self._upload.published:
            # `close` usually follows a StorageError; the last record is still valid.
            with suppress(StorageError):
                self._save()

    def __enter__(self) -> Self:
        """The target itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the target."""
        self.close()

    def _save(self) -> None:
        """Record the upload's progress."""
        state, generation = self._upload.state, self._generation()
        if generation is None or not self._store.replace(
            self._key, _UploadNote(self._digest, state).seal(), generation
        ):
            raise StorageError(
                f"cannot upload {self._place}: another process has started to upload there; let "
                "only one of them do it."
            )
        self._noted = state.summed

    def _forget(self) -> None:
        """Delete the record, unless it belongs to another process's upload."""
        if self._generation() is not None:
            self._store.delete(self._key)

    def _generation(self) -> bytes | None:
        """Generation of the record.

        None if there is none, or it belongs to another process's upload.
        """
        note, generation = read_note(self._store, self._key, _UploadNote.parse)
        return (
            generation
            if note is not None and note.state.token == self._upload.state.token
            else None
        )
