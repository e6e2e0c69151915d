"""Files on a local disk that appear complete or not at all.

The files can be continued after a writer was killed.

    <directory>/.<last name>.partial/
        notes      log of the progress (`notes`)
        0 1 …      the files

1. `begin`: if the notes belong to the same plan, writing continues where they end; files of other
   plans are removed. The disk must have the room.
2. `write`: adjacent bytes are written in one call. After every `_NOTE_BYTES` another thread makes
   the written bytes durable and records them, while writing continues. So a killed writer loses
   little more than `_NOTE_BYTES`.
3. `publish`: everything is made durable, and compared with its checksums. Each file gets its name
   by a hard link, which fails if the name exists, or by a rename if it may replace a file; the last
   name comes last. Then the directory of partial files is removed. A later call can also continue
   an interrupted `publish`. Nothing is removed while it is open: NFS and FUSE would keep it in the
   directory, under another name.
"""

from __future__ import annotations

import filecmp
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import crc32c

from shardckpt.convert.files.destination import MODELS, already_exists
from shardckpt.convert.files.draft import check_export_space, link_or_rename, link_over
from shardckpt.convert.files.notes import Notes, begun_files
from shardckpt.convert.files.read_back import WrittenBlock, read_back
from shardckpt.errors import AlreadyExistsError, StorageError
from shardckpt.io.buffers import gather_write
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import DurableDirectories, OpenFile, sync_directory
from shardckpt.io.locks import HIDDEN, remove_directory
from shardckpt.io.status import exists, is_directory, status
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardckpt.convert.files.destination import FileWrite, WritePlan

_LOG = "notes"
_NOTE_BYTES = 256 << 20
"""Bytes after which written data is made durable and recorded."""


class LocalFiles:
    """Files of one directory; see `Destination`."""

    in_order = False
    memory = 0

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        *,
        overwrite: bool,
        obsolete: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Prepare to write files of these names; the last one appears last.

        `obsolete`: lists the files to remove when the new ones appear, or refuses them.
        """
        self._directory = directory
        self._paths = [directory / name for name in names]
        self._partial = _partial(directory, names[-1])
        self._drafts = [self._partial / str(number) for number in range(len(names))]
        self._overwrite = overwrite
        self._obsolete = obsolete
        self._notes: Notes | None = None
        self._checks: list[int] = []
        self._noted = 0
        """Number of blocks whose checksums were handed to the notes."""
        self._unnoted = 0
        """Bytes written after the last of these blocks."""
        self._complete = False
        """Whether all blocks are noted, so that files may have their final names."""
        self._named = False
        """Whether the files have their final names, and only partial files are left to remove."""
        self._renamed: set[int] = set()
        """Files that an earlier call has renamed, as the file system has no links."""
        self._file = -1
        self._open: OpenFile | None = None

    def begin(self, plan: WritePlan) -> int:
        """See `Destination`."""
        self._plan = plan
        if not is_directory(self._partial):
            self._refuse_to_replace()
        self._remove_older()
        with storage_errors("create", self._partial):
            DurableDirectories(self._directory).make(self._directory)
            self._partial.mkdir(exist_ok=True)
        try:
            self._notes = Notes(self._partial / _LOG)
        except StorageError:
            with suppress(OSError):
                remove_directory(self._partial)  # if this call made it
            raise
        self._checks, named = self._notes.read(plan.identity) or ([], False)
        self._noted = len(self._checks)
        sizes = list(plan.sizes)
        self._named = named and [*map(_size, self._paths)] == sizes
        if not self._named:
            self._complete = bool(self._checks) and len(self._checks) == sum(
                1 for _ in plan.blocks()
            )
            self._refuse_to_replace()
            self._renamed = {
                i
                for i, draft in enumerate(self._drafts)
                if _size(draft) is None and self._has_name(i)
            }
            if not self._checks or any(
                _size(draft) != sizes[i]
                for i, draft in enumerate(self._drafts)
                if i not in self._renamed
            ):
                self._start_anew(self._notes)
            with storage_errors("look at", self._partial):
                held = sum(512 * self._written_file(i).stat().st_blocks for i in range(len(sizes)))
            check_export_space(Store.open(self._partial), self._directory, sum(sizes) - held)
        return self._noted

    def _start_anew(self, notes: Notes) -> None:
        """Remove files of another plan, and create files of the final sizes."""
        self._checks, self._noted, self._complete, self._renamed = [], 0, False, set()
        # A file that an earlier plan has named no longer counts as work in progress.
        self._refuse_to_replace()
        # First: the blocks of an earlier plan must not be taken for those of empty drafts.
        notes.begin(self._plan.identity, [path.name for path in self._paths])
        _remove_drafts(self._partial)
        for draft, nbytes in zip(self._drafts, self._plan.sizes, strict=True):
            with storage_errors("create", draft), draft.open("xb") as file:
                file.truncate(nbytes)

    def write(self, writes: Sequence[FileWrite], checks: Sequence[int]) -> None:
        """See `Destination`."""
        if not self._named:
            run: list[FileWrite] = []
            for write in writes:
                if write.file in self._renamed:  # a header; it is there already
                    continue
                if run and (write.file, write.offset) != (
                    run[-1].file,
                    run[-1].offset + run[-1].data.nbytes,
                ):
                    self._write_run(run)
                    run = []
                run.append(write)
            if run:
                self._write_run(run)
        self._checks += checks
        # Of the current file: earlier ones became durable when the file changed.
        # A note without blocks would say that all files have their names.
        if self._unnoted >= _NOTE_BYTES and self._noted < len(self._checks):
            assert self._notes is not None
            assert self._open is not None
            self._notes.add_later(
                self._checks[self._noted :], self._drafts[self._file], self._open.fileno()
            )
            self._noted, self._unnoted = len(self._checks), 0

    def publish(self, *, verify: bool) -> None:
        """See `Destination`."""
        assert self._notes is not None
        self._close_file()
        if self._noted < len(self._checks):
            self._notes.add(self._checks[self._noted :])
            self._noted = len(self._checks)
        self._complete = True
        if not self._named:
            if verify:
                read_back(
                    (
                        WrittenBlock(name, self._written_file(file), runs, check)
                        for (name, file, runs), check in zip(
                            self._plan.blocks(), self._checks, strict=True
                        )
                    ),
                    crc32c.crc32c,
                    self._directory,
                )
            self._refuse_to_replace()
            with storage_errors("name", self._partial):
                sync_directory(self._partial)
            self._name_all(self._obsolete())
            self._notes.add([])
        _remove(self._partial, self._notes)

    def abort(self, *, keep: bool) -> None:
        """See `Destination`."""
        if self._notes is None:
            return
        with suppress(StorageError):  # the caller reports the error that made it abort
            self._notes.wait()
        self._close_file(durable=False)  # no thread uses it any more
        with suppress(StorageError):
            # They may be those of another interrupted export, which stay if this one is refused.
            if not (keep and self._notes.has_blocks()):
                _remove(self._partial, self._notes)
        self._notes.close()

    def _has_name(self, number: int) -> bool:
        """Whether a file has its final name, perhaps by an earlier call."""
        draft, path = self._drafts[number], self._paths[number]
        if not self._complete or _size(path) != self._plan.sizes[number]:
            return False
        written, named = status(draft), status(path)
        if written is None or named is None:  # the draft was renamed
            return True
        # Two links may have different inode numbers; naming a file twice does no harm where it may
        # replace another one.
        with storage_errors("compare with its draft", path):
            return os.path.samestat(written, named) or (
                not self._overwrite and filecmp.cmp(draft, path, shallow=False)
            )

    def _written_file(self, number: int) -> Path:
        """The file that has the written bytes."""
        return (self._paths if number in self._renamed else self._drafts)[number]

    def _refuse_to_replace(self) -> None:
        there = next(
            (
                path
                for i, path in enumerate(self._paths)
                if exists(path, follow=False) and not self._has_name(i)
            ),
            None,
        )
        if there is not None and is_directory(there):
            raise AlreadyExistsError(f"{there} is a directory; choose another name for the file.")
        if there is not None and not self._overwrite:
            raise already_exists(there)

    def _write_run(self, run: Sequence[FileWrite]) -> None:
        """Write adjacent bytes of a file."""
        draft = self._drafts[run[0].file]
        if run[0].file != self._file:
            self._close_file()
            with storage_errors("open", draft):
                self._open = OpenFile(draft, os.O_WRONLY)
            self._file = run[0].file
        assert self._open is not None
        with storage_errors("write", draft):
            gather_write(self._open.fileno(), run[0].offset, [write.data for write in run])
        self._unnoted += sum(write.data.nbytes for write in run)

    def _close_file(self, *, durable: bool = True) -> None:
        """Close the current file."""
        if durable and self._notes is not None:
            self._notes.wait()
        opened, file, self._open, self._file = self._open, self._file, None, -1
        if opened is not None:
            with opened as fd, storage_errors("write", self._drafts[file]):
                if durable:
                    os.fsync(fd)

    def _name_all(self, obsolete: Sequence[str]) -> None:
        """Give all files their names, except those that have them, and remove obsolete files."""
        last = len(self._paths) - 1
        # The last file names the others.
        changing = (
            [self._paths[last]] if self._overwrite and last and not self._has_name(last) else []
        )
        for path in (*changing, *(self._directory / name for name in obsolete)):
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

    def _remove_older(self) -> None:
        """Remove what an older release left, which had another directory for several files.

        Raises:
            StorageError: such a release is writing there.
        """
        older = self._directory / f".{MODELS[1]}.partial"
        if self._partial == _partial(self._directory, MODELS[1]) and is_directory(older):
            _remove(older, Notes(older / _LOG))


def _remove_drafts(partial: Path) -> None:
    """Remove the partial files, except the log."""
    with storage_errors("remove", partial):
        for path in partial.iterdir():
            if path.name != _LOG and not HIDDEN.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _remove(partial: Path, notes: Notes) -> None:
    """Remove the partial files, the log as the last one, and their directory.

    The directory stays if another export has begun there.
    """
    _remove_drafts(partial)
    notes.close(remove=True)
    with storage_errors("remove", partial):
        remove_directory(partial)


def begun_here(directory: Path, last: str) -> list[str]:
    """Files that an interrupted export was writing there.

    `last` is the file that would complete it.
    """
    return begun_files(_partial(directory, last) / _LOG)


def _partial(directory: Path, last: str) -> Path:
    """The directory of partial files; one for a model, be it of one file or of several."""
    return directory / f".{MODELS[0] if last in MODELS else last}.partial"


def _size(path: Path) -> int | None:
    """Size of a file in bytes; None if it does not exist."""
    entry = status(path)
    return None if entry is None else entry.st_size
