"""Files on a local disk that appear complete or not at all, and that continue after a writer was killed.

    <directory>/.<last name>.partial/
        notes      log of the progress (`notes`)
        0 1 …      the files

1. `begin`: if the notes belong to the same plan, writing continues where they end; files of other plans are removed. The disk must
   have the room.
2. `write`: adjacent bytes are written in one call. After every `_NOTE_BYTES` another thread makes the written bytes durable and
   records them, while writing continues. So a killed writer loses little more than `_NOTE_BYTES`.
3. `publish`: everything is made durable, and compared with its checksums. Each file gets its name by a hard link, which fails if the
   name exists, or by a rename if it may replace a file; the last name comes last. Then the directory of partial files is removed. A
   later call can also continue an interrupted `publish`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import crc32c

from shardckpt.convert.files.destination import already_exists
from shardckpt.convert.files.draft import check_export_space, link_or_rename, link_over
from shardckpt.convert.files.notes import Notes
from shardckpt.convert.files.read_back import WrittenBlock, read_back
from shardckpt.errors import AlreadyExistsError, StorageError
from shardckpt.io.buffers import gather_write
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import DurableDirectories, sync_directory
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.convert.files.destination import FileWrite, WritePlan

_NOTE_BYTES = 256 << 20
"""Bytes after which written data is made durable and recorded."""


class LocalFiles:
    """Files of one directory; see `Destination`."""

    in_order = False
    memory = 0

    def __init__(self, directory: Path, names: Sequence[str], *, overwrite: bool, obsolete: Sequence[str] = ()) -> None:
        """Prepare to write files of these names; the last one appears last. `obsolete`: files that are removed when the new ones appear."""
        self._directory = directory
        self._paths = [directory / name for name in names]
        self._partial = directory / f".{names[-1]}.partial"
        self._drafts = [self._partial / str(number) for number in range(len(names))]
        self._overwrite = overwrite
        self._obsolete = [directory / name for name in obsolete]
        self._notes: Notes | None = None
        self._checks: list[int] = []
        self._noted = 0
        """Number of blocks whose checksums were handed to the notes."""
        self._unnoted = 0
        """Bytes written after the last of these blocks."""
        self._named = False
        """Whether the files have their final names, and only partial files are left to remove."""
        self._file = self._fd = -1

    def begin(self, plan: WritePlan) -> int:
        """See `Destination`."""
        self._plan = plan
        if not self._partial.is_dir():
            self._refuse_to_replace()
        with storage_errors("create", self._partial):
            DurableDirectories(self._directory).make(self._directory)
            self._partial.mkdir(exist_ok=True)
        self._notes = Notes(self._partial / "notes")
        self._checks, named = self._notes.read(plan.identity) or ([], False)
        self._noted = len(self._checks)
        sizes = list(plan.sizes)
        self._named = named and [*map(_size, self._paths)] == sizes
        if not self._named:
            self._refuse_to_replace()
            if not self._checks or [*map(_size, self._drafts)] != sizes:
                self._start_anew(self._notes)
            with storage_errors("look at", self._partial):
                held = sum(512 * draft.stat().st_blocks for draft in self._drafts)
            check_export_space(Store.open(self._partial), self._directory, sum(sizes) - held)
        return self._noted

    def _start_anew(self, notes: Notes) -> None:
        """Remove files of another plan, and create files of the final sizes."""
        self._checks, self._noted = [], 0
        self._remove(all_but="notes")
        self._refuse_to_replace()  # a file that an earlier plan has named no longer counts as work in progress
        for draft, nbytes in zip(self._drafts, self._plan.sizes, strict=True):
            with storage_errors("create", draft), draft.open("xb") as file:
                file.truncate(nbytes)
        notes.begin(self._plan.identity)

    def write(self, writes: Sequence[FileWrite], checks: Sequence[int]) -> None:
        """See `Destination`."""
        if not self._named:
            run: list[FileWrite] = []
            for write in writes:
                if run and (write.file, write.offset) != (run[-1].file, run[-1].offset + run[-1].data.nbytes):
                    self._write_run(run)
                    run = []
                run.append(write)
            if run:
                self._write_run(run)
        self._checks += checks
        if self._unnoted >= _NOTE_BYTES:  # of the current file: earlier ones became durable when the file changed
            assert self._notes is not None
            self._notes.add_later(self._checks[self._noted :], self._drafts[self._file], self._fd)
            self._noted, self._unnoted = len(self._checks), 0

    def publish(self, *, verify: bool) -> None:
        """See `Destination`."""
        assert self._notes is not None
        self._close_file()
        if self._noted < len(self._checks):
            self._notes.add(self._checks[self._noted :])
            self._noted = len(self._checks)
        if not self._named:
            if verify:
                read_back(
                    (
                        WrittenBlock(name, self._drafts[file], runs, check)
                        for (name, file, runs), check in zip(self._plan.blocks(), self._checks, strict=True)
                    ),
                    crc32c.crc32c,
                    self._directory,
                )
            self._refuse_to_replace()
            with storage_errors("name", self._partial):
                sync_directory(self._partial)
            self._name_all()
            self._notes.add([])
        self._remove()
        self._notes.close()

    def abort(self, *, keep: bool) -> None:
        """See `Destination`."""
        if self._notes is None:
            return
        with suppress(StorageError):  # the caller reports the error that made it abort
            self._notes.wait()
        if not (keep and self._noted):
            with suppress(StorageError):
                self._remove()
        self._notes.close()
        self._close_file(durable=False)  # no thread uses it any more

    def _has_name(self, number: int) -> bool:
        """Whether a file has its final name."""
        try:
            return self._drafts[number].samefile(self._paths[number])
        except FileNotFoundError:
            return False

    def _refuse_to_replace(self) -> None:
        there = next((path for i, path in enumerate(self._paths) if os.path.lexists(path) and not self._has_name(i)), None)
        if there is not None and there.is_dir():
            raise AlreadyExistsError(f"{there} is a directory; choose another name for the file.")
        if there is not None and not self._overwrite:
            raise already_exists(there)

    def _write_run(self, run: Sequence[FileWrite]) -> None:
        """Write adjacent bytes of a file."""
        draft = self._drafts[run[0].file]
        if run[0].file != self._file:
            self._close_file()
            with storage_errors("open", draft):
                self._fd = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
            self._file = run[0].file
        with storage_errors("write", draft):
            gather_write(self._fd, run[0].offset, [write.data for write in run])
        self._unnoted += sum(write.data.nbytes for write in run)

    def _close_file(self, *, durable: bool = True) -> None:
        """Close the current file."""
        if durable and self._notes is not None:
            self._notes.wait()
        fd, file, self._fd, self._file = self._fd, self._file, -1, -1
        if fd >= 0:
            try:
                with storage_errors("write", self._drafts[file]):
                    if durable:
                        os.fsync(fd)
            finally:
                os.close(fd)

    def _name_all(self) -> None:
        """Give all files their names, except those that have them."""
        last = len(self._paths) - 1
        changing = [self._paths[last]] if self._overwrite and last and not self._has_name(last) else []  # the last file names the others
        for path in (*changing, *self._obsolete):
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)
        for number, (draft, path) in enumerate(zip(self._drafts, self._paths, strict=True)):
            with storage_errors("name", path):
                if not self._has_name(number) and self._overwrite:
                    link_over(draft, path)
                elif not self._has_name(number):
                    link_or_rename(draft, path)
                if number >= last - 1:  # all before the last are durable when it comes
                    sync_directory(self._directory)

    def _remove(self, all_but: str | None = None) -> None:
        """Remove the partial files."""
        with storage_errors("remove", self._partial):
            for path in sorted(self._partial.iterdir(), key=lambda path: path.name == "notes"):
                if path.name != all_but:
                    path.unlink()
            if all_but is None:
                self._partial.rmdir()


def _size(path: Path) -> int | None:
    """Size of a file in bytes; None if it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
