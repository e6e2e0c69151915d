"""Exported files on an object store, written one after another, that continue after a writer was killed.

Each file is an `ObjectTarget`: it is written from front to back, becomes visible when it is finished, and continues from the bytes that
the service has.

1. A single file becomes visible when it is published. Of several files, each data file becomes visible when the next one begins; the
   file that names them all comes last, and without it readers find no model. If a model is replaced, that file is deleted first.
2. A small object, `.<last name>.export.json`, lists the files that an export has begun. Replaced files are deleted before the export
   begins, so the listed files that exist belong to it: the same export continues after them, another export removes them. The object
   is deleted at the end.

The service compares the received bytes with its own checksums, part by part, so nothing is read back.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from shardckpt.convert.files.object_target import ObjectTarget, abandon
from shardckpt.errors import AlreadyExistsError, FormatError, ShardckptError
from shardckpt.format.documents import Fields, open_envelope, seal
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.files.destination import FileWrite, WritePlan
    from shardckpt.io.url import Location

__all__ = ["ObjectFiles", "begun"]


class ObjectFiles:
    """Files below one location; see `Destination`."""

    in_order = True

    def __init__(self, directory: Location, names: Sequence[str], *, overwrite: bool, memory: int, obsolete: Sequence[str] = ()) -> None:
        """Prepare to write files of these names; the last one appears last.

        Args:
            directory: the destination.
            names: names of the files.
            overwrite: whether they may replace existing files.
            memory: bytes for buffers.
            obsolete: files to delete before the last file appears.
        """
        self.memory = memory
        self._directory = directory
        self._names = names
        self._overwrite = overwrite
        self._obsolete = obsolete
        self._store = Store.open(directory)
        self._note = _note_of(names[-1])
        self._finished = 0
        """Number of files that are visible."""
        self._target: ObjectTarget | None = None

    def begin(self, plan: WritePlan) -> int:
        """See `Destination`."""
        self._plan = plan
        if len(self._names) > 1:
            self._take_up()
        at = (self._finished, self._opened(self._finished).resume_at if self._finished < len(self._names) else 0)
        durable = 0
        for runs in plan.blocks():
            if any((file, offset + length) > at for _, file, offset, length in runs):
                break
            durable += 1
        return durable

    def write(self, writes: Sequence[FileWrite]) -> None:
        """See `Destination`."""
        for write in writes:
            if write.file < self._finished:
                continue
            target = self._opened(write.file)
            there = max(0, target.resume_at - write.offset)
            if there < write.data.nbytes:
                target.write_at(write.offset + there, write.data[there:])

    def wrote(self, checks: Sequence[int]) -> None:
        """See `Destination`. The service knows the progress of each file."""

    def finish(self, *, verify: bool) -> None:
        """See `Destination`. The service verified every part on arrival."""

    def publish(self) -> None:
        """See `Destination`."""
        if self._finished < len(self._names):
            self._opened(len(self._names) - 1)
            for name in self._obsolete:
                self._store.delete(name)
            self._finish_one()
        if len(self._names) > 1:
            self._store.delete(self._note)

    def abort(self, *, keep: bool) -> None:
        """See `Destination`."""
        target, self._target = self._target, None
        with suppress(ShardckptError):  # the caller reports the error that made it abort
            if keep and target is not None:
                target.close()
            elif target is not None:
                target.abort()
        if not keep and len(self._names) > 1:
            with suppress(ShardckptError):
                for name in [*self._names[: self._finished], self._note]:
                    self._store.delete(name)

    def _opened(self, number: int) -> ObjectTarget:
        """Open the file of this number, after finishing those before it."""
        while self._finished < number:
            if self._target is None:
                self._target = self._open(self._finished)
            self._finish_one()
        if self._target is None:
            self._target = self._open(number)
        return self._target

    def _open(self, number: int) -> ObjectTarget:
        if len(self._names) > 1:
            named = list(self._names[: number + 1])
            self._store.write(self._note, seal({"digest": self._digest(0), "named": named}))
        return ObjectTarget.open(
            self._directory.join(self._names[number]),
            nbytes=self._plan.sizes[number],
            digest=self._digest(number),
            overwrite=self._overwrite,
            memory_limit=self.memory,
        )

    def _finish_one(self) -> None:
        assert self._target is not None
        with self._target as target:
            self._target = None
            target.finish()
        self._finished += 1

    def _digest(self, number: int) -> str:
        return sha256(self._plan.identity + number.to_bytes(4, "little")).hexdigest()

    def _take_up(self) -> None:
        """Continue after the files that an earlier call has finished, or remove the files of another one."""
        digest, named = _noted(self._store, self._note)
        if digest == self._digest(0):
            for name, size in zip(named, self._plan.sizes, strict=False):
                if not self._store.is_longer(name, size - 1) or self._store.is_longer(name, size):
                    break
                self._finished += 1
            return
        if named and self._store.exists(self._names[-1]):
            named = []  # that export was complete
        for name in [] if self._overwrite else self._names:
            if name not in named and self._store.exists(name):
                raise AlreadyExistsError(
                    f"{self._store.path_of(name)} is there already; choose another place, or replace it with overwrite=True."
                )
        for name in dict.fromkeys([self._names[-1], *named, *(self._names if self._overwrite else ())]):
            abandon(self._directory.join(name))
            self._store.delete(name)


def begun(directory: Location, last: str) -> list[str]:
    """Files that an incomplete export has begun there; `last` is the file that would complete it."""
    store = Store.open(directory)
    _, named = _noted(store, _note_of(last))
    return named if named and not store.exists(last) else []


def _note_of(last: str) -> str:
    """Name of the object that records an export's progress."""
    return f".{last}.export.json"


def _noted(store: Store, key: str) -> tuple[str, list[str]]:
    """Digest of the export that wrote the note, and the files that it has begun; both empty if there is no note."""
    found, _ = store.read_versioned(key)
    if found is not None:
        with suppress(FormatError):
            note = Fields(open_envelope(found, store.path_of(key)), store.path_of(key))
            return note.string("digest"), note.keys("named")
    return "", []
