"""Exported files on an object store; an interrupted export continues.

`ObjectFiles` are one or several files (`object_target`):

1. A single file becomes visible when it is published. Of several files, each data file becomes
   visible when the next one begins; the file that names them all comes last, and without it readers
   find no model. If a model is replaced, that file is deleted first.
2. A small object, `.<last name>.export.json`, lists the files that an export has begun, and has its
   token. Replaced files are deleted before the export begins, so the listed files that exist belong
   to it: the same export continues after them, another one changes the token, and removes them. An
   export whose token is gone fails, and removes nothing. The object is deleted at the end.
3. A directory holds one model, of one or several files, and all exports of one share that object. A
   single file replaces the old one when it is published, so it is not listed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex
from typing import TYPE_CHECKING, Self

from shardckpt.convert.files.destination import MODELS, already_exists
from shardckpt.convert.files.object_target import ObjectTarget, abandon, read_note
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.format.documents import seal
from shardckpt.io.buckets.uploading import part_size
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.convert.files.destination import FileWrite, WritePlan
    from shardckpt.io.url import Location


@dataclass(frozen=True, slots=True)
class _ExportNote:
    """The contents of the object that records an export."""

    digest: str
    """Digest of the export; "" while the files of an earlier one are removed."""
    token: str
    """Random text that the same export keeps when it continues; "" in notes of 0.2.0."""
    named: tuple[str, ...]
    """Names of the files that it has begun, if it has several, or that are removed."""

    @classmethod
    def read(cls, store: Store, key: str) -> tuple[Self, bytes]:
        """The note, empty if there is none that can be read, and its generation."""
        note, generation = read_note(
            store,
            key,
            lambda doc: cls(
                doc.string("digest"),
                doc.string("token") if "token" in doc.doc else "",
                tuple(doc.keys("named")),
            ),
        )
        return note or cls("", "", ()), generation

    def incomplete(self, store: Store, key: str) -> Sequence[str]:
        """The files that it names, unless the last one of that export is there."""
        is_complete = (
            self.named and _note_of(self.named[-1]) == key and store.exists(self.named[-1])
        )
        return () if is_complete else self.named


class ObjectFiles:
    """Files below one location; see `Destination`."""

    in_order = True

    def __init__(
        self,
        directory: Location,
        names: Sequence[str],
        *,
        overwrite: bool,
        memory: int,
        obsolete: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Prepare to write files of these names; the last one appears last.

        Args:
            directory: the destination.
            names: names of the files.
            overwrite: whether they may replace existing files.
            memory: bytes for buffers.
            obsolete: lists the files to delete before the last file appears, or refuses them.
        """
        self.memory = memory
        self._directory = directory
        self._names = names
        self._overwrite = overwrite
        self._obsolete = obsolete
        self._store = Store.open(directory)
        self._note = _note_of(names[-1])
        self._has_note = len(names) > 1 or names[-1] in MODELS
        self._token = token_hex()
        self._finished = 0
        """Number of files that are visible."""
        self._target: ObjectTarget | None = None

    def begin(self, plan: WritePlan) -> int:
        """See `Destination`."""
        self._plan = plan
        # A memory limit that is too low is refused before anything is written.
        part_size(max(plan.sizes), self.memory)
        if self._has_note:
            self._take_up()
        is_complete = self._finished == len(self._names)
        at = self._finished, 0 if is_complete else self._open_upload(self._finished).resume_at
        durable = 0
        for _, file, runs in plan.blocks():
            if any((file, offset + length) > at for offset, length in runs):
                break
            durable += 1
        return durable

    def write(self, writes: Sequence[FileWrite], checks: Sequence[int]) -> None:
        """See `Destination`. The service knows the progress of each file."""
        del checks
        for write in writes:
            if write.file < self._finished:
                continue
            target = self._open_upload(write.file)
            there = max(0, target.resume_at - write.offset)
            if there < write.data.nbytes:
                target.write_at(write.offset + there, write.data[there:])

    def publish(self, *, verify: bool) -> None:
        """See `Destination`. The service verified every part on arrival."""
        del verify
        if self._finished < len(self._names):
            last = self._open_upload(len(self._names) - 1)
            obsolete = self._obsolete()
            self._refuse_if_replaced()
            for name in obsolete:
                self._store.delete(name)
            self._finish_one(last)
        if self._has_note and self._is_mine():
            self._store.delete(self._note)

    def abort(self, *, keep: bool) -> None:
        """See `Destination`."""
        target, self._target = self._target, None
        with suppress(ShardckptError):  # the caller reports the error that made it abort
            if keep and target is not None:
                target.close()
            elif target is not None:
                target.abort()
        if not keep and self._has_note and self._finished < len(self._names):
            with suppress(ShardckptError):
                for name in [*self._names[: self._finished], self._note] if self._is_mine() else ():
                    self._store.delete(name)

    def _open_upload(self, number: int) -> ObjectTarget:
        """Open the file of this number, after finishing those before it."""
        while self._target is None or self._finished < number:
            if self._target is None:
                self._open(self._finished)
            else:
                self._finish_one(self._target)
        return self._target

    def _open(self, number: int) -> None:
        if self._has_note:
            note, generation = _ExportNote.read(self._store, self._note)
            if note.token != self._token:
                raise self._replaced()
            begun = self._names[: number + 1] if len(self._names) > 1 else ()
            self._write_note(self._digest(0), begun, generation)
        self._target = ObjectTarget.open(
            self._directory.join(self._names[number]),
            nbytes=self._plan.sizes[number],
            digest=self._digest(number),
            overwrite=self._overwrite,
            memory_limit=self.memory,
            before_abort=self._refuse_if_replaced,
        )
        # An export that begins after this finds the upload, and ends it.
        self._refuse_if_replaced()

    def _refuse_if_replaced(self) -> None:
        if self._has_note and not self._is_mine():
            self.abort(keep=False)
            raise self._replaced()

    def _is_mine(self) -> bool:
        """Whether no other export has begun there."""
        return _ExportNote.read(self._store, self._note)[0].token == self._token

    def _write_note(self, digest: str, named: Sequence[str], generation: bytes) -> None:
        content = seal({"digest": digest, "token": self._token, "named": list(named)})
        if not self._store.replace(self._note, content, generation):
            raise self._replaced()

    def _replaced(self) -> StorageError:
        """The error for an export whose token is gone.

        Raises:
            AlreadyExistsError: another model is there, and may not be replaced.
        """
        self._obsolete()
        return StorageError(
            f"cannot export to {self._directory}: another export has begun there, or has ended; "
            "let only one of them do it."
        )

    def _finish_one(self, target: ObjectTarget) -> None:
        self._refuse_if_replaced()
        self._target = None
        with target:
            target.finish()
        self._finished += 1

    def _digest(self, number: int) -> str:
        return sha256(self._plan.identity + number.to_bytes(4, "little")).hexdigest()

    def _take_up(self) -> None:
        """Continue after an earlier call's finished files, or remove the files of another call."""
        note, generation = _ExportNote.read(self._store, self._note)
        if note.digest == self._digest(0):
            if note.token:
                self._token = note.token
            else:
                self._write_note(note.digest, note.named, generation)
            for name, size in zip(note.named, self._plan.sizes, strict=False):
                if self._store.size(name) != size:
                    break
                self._finished += 1
            return
        named = note.incomplete(self._store, self._note)
        for name in [] if self._overwrite else self._names:
            if name not in named and self._store.exists(name):
                raise already_exists(self._store.path_of(name))
        self._write_note("", named, generation)
        removed = named
        if len(self._names) > 1:
            removed = [self._names[-1], *named, *(self._names if self._overwrite else ())]
        for name in dict.fromkeys(removed):
            abandon(self._directory.join(name))
            self._store.delete(name)


def begun(directory: Location, last: str) -> Sequence[str]:
    """Files that an incomplete export has begun there.

    `last` is the file that would complete it.
    """
    store, key = Store.open(directory), _note_of(last)
    return _ExportNote.read(store, key)[0].incomplete(store, key)


def _note_of(last: str) -> str:
    """Name of the object that records an export's progress."""
    return f".{MODELS[-1] if last in MODELS else last}.export.json"
