"""The directories of versions: which are complete, their notes, and the writing process's lock.

Each directory has a note, `shardckpt-version.json`, which receivers ignore. It names the step, the
contents, and the sizes of all other files of a difference. The note of version 0 is written before
its files: a killed export continues by it.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import unfolded
from shardckpt.convert.files.notes import Notes
from shardckpt.convert.files.replacement import exchange
from shardckpt.convert.formats.safetensors.hf_index import INDEX
from shardckpt.convert.formats.safetensors.source import open_foreign
from shardckpt.convert.strict_json import parse_json
from shardckpt.errors import CorruptionError, FormatError, MissingDataError
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import sync_directory
from shardckpt.io.status import exists
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardckpt.io.store import Store
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.outputs import OutputTensor

NOTE = "shardckpt-version.json"
"""The file of a version's directory that names its step and contents; receivers ignore it."""
ELSEWHERE = "; write to another directory."
_BACK = "; put it back from a backup, or write to another directory."
_VERSION = re.compile(r"weight_v(\d{6})/")
_LOCK = ".shardckpt-export.lock"
_BESIDE = ".weight_v000000.partial"
"""Name of a new version 0 until the old versions are deleted; only on a disk."""


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_attempts(value: object) -> bool:
    return isinstance(value, dict) and all(
        step.isascii() and step.isdigit() and _is_text(one) for step, one in value.items()
    )


def _are_sizes(value: object) -> bool:
    return isinstance(value, dict) and INDEX in value and all(map(_is_step, value.values()))


_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "step": _is_step,
    "attempt": _is_text,
    "contents": _is_text,
}
_FIRST: Mapping[str, Callable[[object], bool]] = {"forms": _is_text, "before": _are_attempts}


def contents_of(checkpoint: Checkpoint) -> str:
    """Identifies the elements of a version; folding does not change it."""
    fingerprint = checkpoint.record.fingerprint
    return unfolded(checkpoint.record.attempt) if fingerprint is None else fingerprint.sha256


def forms_of(outputs: Iterable[OutputTensor], *, views: bool = True) -> str:
    """A digest of names, dtypes, shapes, and views.

    The notes of older directories have one without views, and only for version 0.
    """
    forms = sorted(
        (
            *(one.name, one.dtype.name, one.shape),
            *(
                [v.tensor, v.box.start, v.box.stop, v.permutation, v.start]
                for v in one.sources
                if views
            ),
        )
        for one in outputs
    )
    return sha256(json.dumps(forms, default=int).encode()).hexdigest()


def note_of(checkpoint: Checkpoint, step: int, outputs: Iterable[OutputTensor]) -> dict[str, Any]:
    """Fields of the notes of all versions."""
    return {
        "step": step,
        "attempt": unfolded(checkpoint.record.attempt),
        "contents": contents_of(checkpoint),
        "source": str(checkpoint.location),
        "forms": forms_of(outputs),
    }


class VersionDirectories:
    """The directories of versions below one place."""

    def __init__(self, root: Store) -> None:
        """Read nothing yet."""
        self._root = root

    def place(self, number: int) -> Store:
        """The directory of a version."""
        return self._root.sub(f"weight_v{number:06d}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """On a disk: exclude other exports to the same place while the block lasts.

        Raises:
            StorageError: another export is writing there; or a file cannot be locked.
        """
        path = self._root.local_path(_LOCK)
        if path is None:
            yield
            return
        was_there = exists(path.parent)
        self._root.make_parents(_LOCK)
        lock, beside = Notes(path), self._root.sub(_BESIDE)
        try:
            beside.delete_prefix()  # what a killed export left
            yield
        finally:
            try:
                beside.delete_prefix()
            finally:
                lock.close(remove=True)
                if not was_there:
                    self._root.remove_empty()

    def notes(self) -> list[dict[str, Any]]:
        """The notes of all complete versions, from 0 on.

        Their files have the sizes that were noted.

        Raises:
            FormatError: a version is missing, or a file of one is missing or damaged.
        """
        numbers = self._numbers()
        sizes = map_on_threads(lambda number: self.place(number).sizes(""), numbers)
        complete = {
            number: there
            for number, there in zip(numbers, sizes, strict=True)
            if _is_complete(number, there)
        }
        if [*complete] != [*range(len(complete))]:
            gap = next(i for i, number in enumerate(complete) if i != number)
            raise FormatError(
                f"{self._root}: version {gap} is missing before version {max(complete)}{ELSEWHERE}"
            )
        notes = map_on_threads(lambda number: self._check(number, complete[number]), complete)
        if len(notes) > 1:
            self._check_index(len(notes) - 1)
        return notes

    def note(self, number: int) -> dict[str, Any]:
        """Read the note of a version.

        Raises:
            FormatError: it is missing or damaged.
        """
        place = self.place(number)
        try:
            note = parse_json(place.read(NOTE))
        except MissingDataError as e:
            raise FormatError(f"{place}/{NOTE} is missing{_BACK}") from e
        except ValueError as e:
            raise FormatError(f"{place}/{NOTE} is damaged ({e}){_BACK}") from e
        fields = {**_FIELDS, **(_FIRST if number == 0 else {"files": _are_sizes})}
        wrong = [
            name
            for name, is_right in fields.items()
            if not (isinstance(note, dict) and is_right(note.get(name)))
        ]
        if wrong:
            raise FormatError(
                f'{place}/{NOTE} is damaged: "{wrong[0]}" is missing or not what was written{_BACK}'
            )
        return dict(note)

    def write_note(self, place: Store, **note: Any) -> int:
        """Write the note of a version; return its bytes."""
        data = json.dumps(note).encode()
        place.write(NOTE, data)
        return len(data)

    def prepare_first(self, *, overwrite: bool) -> Store:
        """The place to write version 0 to.

        On a disk, it is beside the versions that `finish_first` deletes.
        """
        if not self._root.has_paths:
            if overwrite:
                self._delete(self._numbers())
            return self.place(0)
        return self._root.sub(_BESIDE) if overwrite and self._numbers() else self.place(0)

    def finish_first(self, written: Store) -> None:
        """Delete all versions, the newest first, and give the new version 0 its name.

        If the new version already has its name, nothing is done.
        """
        new, final = written.local_path(""), self.place(0).local_path("")
        if new is None or final is None or new == final:
            return
        numbers = self._numbers()
        self._delete([number for number in numbers if number])
        with storage_errors("replace", final):
            if 0 not in numbers or not exchange(new, final):
                self._delete([0])
                new.rename(final)
            sync_directory(final.parent)
        written.delete_prefix()

    def _numbers(self) -> list[int]:
        return sorted(
            int(match[1])
            for name in self._root.list_children()
            if (match := _VERSION.fullmatch(name))
        )

    def _delete(self, numbers: list[int]) -> None:
        for number in reversed(numbers):
            self.place(number).delete(INDEX)  # from now on it is not complete
            self.place(number).delete_prefix()

    def _check(self, number: int, there: Mapping[str, int]) -> dict[str, Any]:
        """The note of a version whose files have these sizes."""
        note, place = self.note(number), self.place(number)
        if number == 0:
            try:
                # Compares each file with its header, and all with the index.
                open_foreign(place.location)
            except (CorruptionError, FormatError, MissingDataError) as e:
                raise FormatError(f"{str(e).rstrip('.')}{_BACK}") from e
            return note
        for name, nbytes in note["files"].items():
            if name not in there:
                raise FormatError(f"{place}/{name} is missing{_BACK}")
            if there[name] != nbytes:
                raise FormatError(
                    f"{place}/{name} is damaged: it has {there[name]} bytes, and {nbytes} were "
                    f"written{_BACK}"
                )
        return note

    def _check_index(self, number: int) -> None:
        place = self.place(number)
        try:
            index = parse_json(place.read(INDEX))
            is_right = index["metadata"]["version"] == f"{number:06d}" and isinstance(
                index["weight_map"], dict
            )
        except (ValueError, TypeError, LookupError):
            is_right = False
        if not is_right:
            raise FormatError(f"{place}/{INDEX} is damaged{_BACK}")


def _is_complete(number: int, there: Mapping[str, int]) -> bool:
    return INDEX in there or (number == 0 and "model.safetensors" in there)
