"""Files on a local disk that appear complete or not at all, and that continue after a writer was killed.

    <directory>/.<last name>.partial/
        notes      log of the progress (`notes`)
        0 1 …      the files

1. `begin`: if the notes belong to the same plan, writing continues where they end; files of other plans are removed. The disk must
   have the room.
2. `write`: adjacent bytes are written in one call. After every `_NOTE_BYTES` another thread makes the written bytes durable and
   records them, while writing continues. So a killed writer loses little more than `_NOTE_BYTES`.
3. `finish`: everything is made durable, and compared with its checksums.
4. `publish`: each file gets its name by a hard link, which fails if the name exists, or by a rename if it may replace a file; the
   last name comes last. Then the directory of partial files is removed. A later call can also continue an interrupted `publish`.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from threading import local
from typing import TYPE_CHECKING

import crc32c

from shardckpt.convert.files.notes import Notes
from shardckpt.errors import AlreadyExistsError, CorruptionError, StorageError
from shardckpt.excerpt import file_size
from shardckpt.io.buffers import MOST_VECTORS, after
from shardckpt.io.datafile import free_bytes
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import Store, sync_directory
from shardckpt.reshard.memory import READERS
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardckpt.convert.files.destination import FileWrite, WritePlan

__all__ = ["LocalFiles"]

_NOTE_BYTES = 256 << 20
"""Bytes after which written data is made durable and recorded."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links. There, a file that another process creates between the check and the rename may be
replaced."""
_READ_BYTES = 256 << 10
"""Bytes that each thread reads back at a time: they are still in the CPU's cache when the checksum is computed."""
_CHECKED_AT_ONCE = 4096
"""Blocks that are planned and verified at a time."""


class LocalFiles:
    """Files of one directory; see `Destination`."""

    in_order = False
    memory = 0

    def __init__(self, directory: Path, names: Sequence[str], *, overwrite: bool, obsolete: Sequence[str] = ()) -> None:
        """Prepare to write files of these names; the last one appears last. `obsolete`: files that are removed when the new ones appear."""
        self._directory = directory
        self._paths = [directory / name for name in names]
        self._partial = directory / f".{names[-1]}.partial"
        self._overwrite = overwrite
        self._obsolete = [directory / name for name in obsolete]
        self._notes: Notes | None = None
        self._checks: list[int] = []
        self._noted = 0
        self._unnoted = 0
        self._named = False
        """Whether the files have their final names, and only partial files are left to remove."""
        self._file = -1
        self._fd = -1
        self._noting: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "shardckpt-notes")

    def begin(self, plan: WritePlan) -> int:
        """See `Destination`."""
        self._plan = plan
        if not self._partial.is_dir():
            self._refuse_to_replace()
        with storage_errors("create", self._partial):
            self._partial.mkdir(parents=True, exist_ok=True)
        self._notes = Notes(self._partial / "notes")
        checks, named = self._notes.read(plan.identity) or ([], False)
        self._noted = len(checks)
        sizes = list(plan.sizes)
        self._named = named and [_size(path) for path in self._paths] == sizes
        if not self._named:
            self._refuse_to_replace()
            if not checks or [_size(self._at(number)) for number in range(len(sizes))] != sizes:
                self._start_anew()
                checks = []
            self._check_space()
        self._checks, self._noted = checks, len(checks)
        return self._noted

    def _start_anew(self) -> None:
        """Remove files of another plan, and create files of the final sizes."""
        assert self._notes is not None
        self._remove(all_but="notes")
        self._refuse_to_replace()  # a file that an earlier plan has named no longer counts as work in progress
        for number, nbytes in enumerate(self._plan.sizes):
            with storage_errors("create", self._at(number)), self._at(number).open("xb") as file:
                file.truncate(nbytes)
        self._notes.begin(self._plan.identity)

    def write(self, writes: Sequence[FileWrite]) -> None:
        """See `Destination`."""
        if self._named:
            return
        run: list[memoryview] = []
        file = start = stop = -1
        for write in writes:
            if write.file != file or write.offset != stop or len(run) == MOST_VECTORS:
                self._put(file, start, stop, run)
                file, start, stop, run = write.file, write.offset, write.offset, []
            run.append(write.data)
            stop += write.data.nbytes
        self._put(file, start, stop, run)

    def wrote(self, checks: Sequence[int]) -> None:
        """See `Destination`."""
        self._checks += checks
        if self._unnoted >= _NOTE_BYTES:
            self._note()

    def finish(self, *, verify: bool) -> None:
        """See `Destination`."""
        assert self._notes is not None
        self._settle()
        self._sync()
        self._close()
        if self._noted < len(self._checks):
            self._notes.add(self._checks[self._noted :])
            self._noted = len(self._checks)
        if verify and not self._named:
            self._verify()

    def publish(self) -> None:
        """See `Destination`."""
        assert self._notes is not None
        if not self._named:
            self._refuse_to_replace()
            with storage_errors("name", self._partial):
                sync_directory(self._partial)
            self._name_all()
            self._notes.add([])
        self._remove()
        self._notes.close()
        self._thread.shutdown()

    def abort(self, *, keep: bool) -> None:
        """See `Destination`."""
        with suppress(StorageError):
            self._settle()
        self._thread.shutdown()
        self._close()
        if self._notes is not None:
            if not (keep and self._noted):
                with suppress(StorageError):  # the caller reports the error that made it abort
                    self._remove()
            self._notes.close()

    def _at(self, number: int) -> Path:
        return self._partial / str(number)

    def _is_ours(self, number: int) -> bool:
        """Whether a file has its final name."""
        try:
            return self._at(number).samefile(self._paths[number])
        except FileNotFoundError:
            return False

    def _refuse_to_replace(self) -> None:
        there = next((path for i, path in enumerate(self._paths) if os.path.lexists(path) and not self._is_ours(i)), None)
        if there is not None and there.is_dir():
            raise AlreadyExistsError(f"{there} is a directory; choose another name for the file.")
        if there is not None and not self._overwrite:
            raise AlreadyExistsError(f"{there} is there already; choose another name, or replace it with overwrite=True.")

    def _check_space(self) -> None:
        """Raise StorageError if the disk has no room for the files."""
        with storage_errors("look at", self._partial):
            held = sum(512 * self._at(number).stat().st_blocks for number in range(len(self._paths)))
        free, needed = free_bytes(Store.open(self._partial)), sum(self._plan.sizes) - held
        if free is not None and free < needed:
            raise StorageError(
                f"{self._directory}: the export takes {file_size(needed)} there and the disk has {file_size(free)} free, "
                f"{file_size(needed - free)} too little; make room or choose another place."
            )

    def _put(self, file: int, offset: int, stop: int, run: Sequence[memoryview]) -> None:
        """Write adjacent buffers at an offset of a file."""
        if not run:
            return
        if file != self._file:
            self._change_to(file)
        self._unnoted += stop - offset
        with storage_errors("write", self._at(file)):
            while offset < stop:
                wrote = os.pwritev(self._fd, run, offset)
                offset += wrote
                if offset < stop:
                    run = after(run, wrote)

    def _change_to(self, file: int) -> None:
        self._settle()
        self._sync()
        self._close()
        with storage_errors("open", self._at(file)):
            self._fd = os.open(self._at(file), os.O_WRONLY | os.O_CLOEXEC)
        self._file = file

    def _sync(self) -> None:
        if self._fd >= 0:
            with storage_errors("write", self._at(self._file)):
                os.fsync(self._fd)

    def _close(self) -> None:
        fd, self._fd, self._file = self._fd, -1, -1
        if fd >= 0:
            os.close(fd)

    def _note(self) -> None:
        """Make the current file durable and record its blocks, in another thread; earlier files became durable when the file changed."""
        self._settle()
        assert self._notes is not None
        notes, fd, path, checks = self._notes, self._fd, self._at(self._file), self._checks[self._noted :]

        def note() -> None:
            with storage_errors("write", path):
                os.fdatasync(fd)
            notes.add(checks)

        self._noting = self._thread.submit(note)
        self._noted, self._unnoted = len(self._checks), 0

    def _settle(self) -> None:
        """Wait for the note that is being written."""
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.result()

    def _verify(self) -> None:
        """Compare all blocks with their checksums, on several threads."""
        fds, memory = dict[int, int](), local()

        def check(blocks: Sequence[tuple[Sequence[tuple[str, int, int, int]], int]]) -> None:
            if not hasattr(memory, "buffer"):
                memory.buffer = memoryview(bytearray(_READ_BYTES))
            for runs, expected in blocks:
                if _checksum(fds, runs, memory.buffer) != expected:
                    raise CorruptionError(
                        f"{shown(runs[0][0])} does not read back as it was written to {self._directory}; nothing was published. "
                        f"Check the disk and the memory of this machine, and export again."
                    )

        try:
            for number in range(len(self._paths)):
                with storage_errors("read", self._at(number)):
                    fds[number] = os.open(self._at(number), os.O_RDONLY | os.O_CLOEXEC)
            with ThreadPoolExecutor(READERS, "shardckpt-verify") as pool, storage_errors("read", self._partial):
                pairs = zip(self._plan.blocks(), self._checks, strict=True)
                while some := list(islice(pairs, _CHECKED_AT_ONCE)):
                    share = -(-len(some) // READERS)
                    list(pool.map(check, [some[i : i + share] for i in range(0, len(some), share)]))
        finally:
            for fd in fds.values():
                os.close(fd)

    def _name_all(self) -> None:
        """Give all files their names, except those that have them."""
        last = len(self._paths) - 1
        changing = [self._paths[last]] if self._overwrite and last and not self._is_ours(last) else []  # the last file names the others
        for path in (*changing, *self._obsolete):
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)
        for number, path in enumerate(self._paths):
            if not self._is_ours(number):
                self._name(number, path)
            if number >= last - 1:  # all before the last are durable when it comes
                with storage_errors("name", path):
                    sync_directory(self._directory)

    def _name(self, number: int, path: Path) -> None:
        """Give a file its final name; it keeps the partial one."""
        other = self._partial / f"{number}.new"
        with storage_errors("name", path):
            try:
                if self._overwrite:
                    other.unlink(missing_ok=True)
                    os.link(self._at(number), other)
                    other.replace(path)
                else:
                    os.link(self._at(number), path)
            except FileExistsError:
                raise AlreadyExistsError(f"{path}: somebody else has put a file there meanwhile; choose another name.") from None
            except OSError as e:
                if e.errno not in _NO_LINKS:
                    raise
                self._refuse_to_replace()
                self._at(number).rename(path)

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


def _checksum(fds: Mapping[int, int], runs: Sequence[tuple[str, int, int, int]], buffer: memoryview) -> int | None:
    """crc32c of some runs of bytes, read through a buffer; None: a file ends before them."""
    found = 0
    for _, file, offset, length in runs:
        at, end = offset, offset + length
        while at < end:
            got = os.preadv(fds[file], [buffer[: end - at]], at)  # a file system may return fewer bytes than requested
            if not got:
                return None
            found = crc32c.crc32c(buffer[:got], found)
            at += got
    return found
