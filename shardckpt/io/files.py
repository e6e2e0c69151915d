"""Small files on this machine's file systems: read, and replaced as one and durably.

A writer locks `<name>.__lock`, writes the bytes into it, and renames it to `<name>`. TensorStore's
file driver follows the same protocol, so both may write the same file. If a writer is killed, the
kernel releases its lock, and `<name>.__lock` keeps the bytes written so far; the next writer here
truncates them. TensorStore 0.1.86 does not: a shorter new file then ends in the old bytes. So call
`clear` before TensorStore writes a file.

TensorStore syncs each file and its directory, but not the parent directories that it creates.
`DurableDirectories` creates those, and syncs the parent of each, so that after a power failure a
file is complete and can be found.

The *generation* of a file, the condition of a replacement or removal, is the SHA-256 of its bytes,
as inode numbers and times change by themselves on some file systems. So a file's former bytes give
its former generation, as on S3.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from shardckpt.errors import FormatError
from shardckpt.io.locks import GONE, HIDDEN, LEAST_PAUSE, MOST_PAUSE, is_at, lock_file
from shardckpt.io.status import is_directory

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

LOCK_SUFFIX = ".__lock"
"""Suffix of the name of a file while it is written."""
LARGEST_WHOLE = 1 << 30
"""Most bytes of a file that is read completely: a record, table or index. A sparse file can have
any size."""
_LOCK_SECONDS = 60.0
"""Seconds that a writer waits for another writer of the same file. A write takes milliseconds."""
_MOST_LOOKS = 100
"""Most times in a row that another file than the locked one may be at the name of a lock."""
_MOST_KEPT = 12
"""Most files that are open until they are synced together."""
_ABSENT = b"absent"
"""The generation of a missing file."""
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems that cannot sync a directory."""
_MARK_BYTES = 16
_log = logging.getLogger("shardckpt")


class OpenFile:
    """An open file or directory, closed with this object at the latest: Ctrl-C cannot leak it.

    Python may raise KeyboardInterrupt between the call of `os.open` and the statement that keeps
    its result. Nobody can close the file then, and a lock on it lasts as long as the process.
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, path: str | Path, flags: int, directory: int | None = None) -> None:
        """Open as `os.open` does, a relative path from the open directory, if one is given.

        A new file gets the mode 0o666, and started processes do not inherit the descriptor.
        """
        self._held: list[int] = []
        opening = partial(os.open, dir_fd=directory)
        # NFS and FUSE open the file that they found, and others may have removed it meanwhile.
        tries = 12 if flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT else 1
        while not self._held:
            tries -= 1
            with suppress(FileNotFoundError) if tries else nullcontext():
                # C code alone, which no signal interrupts.
                self._held.extend(map(opening, (path,), (flags | os.O_CLOEXEC,), (0o666,)))

    def fileno(self) -> int:
        """The descriptor; -1 if the file is closed."""
        return self._held[0] if self._held else -1

    def close(self) -> None:
        """Close the file, unless it is closed."""
        held = self._held
        # C code alone, as above.
        held[:] = filter(None, map(os.close, map(list.pop, (held,) * len(held))))

    def __enter__(self) -> int:
        return self._held[0]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):  # not if Ctrl-C came before the first line of __init__
            self.close()


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes | None:
    """Bytes `start` to `stop` of a file (fewer at its end); None: no such file.

    Raises:
        FormatError: no `stop` is given, and the file has more than `LARGEST_WHOLE` bytes.
        OSError: it cannot be read, or is a directory, pipe or device.
    """
    looks = 0
    while True:
        try:
            # Without O_NONBLOCK it might wait for the writer of a pipe.
            file = OpenFile(path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _read_open(file, path, start, stop)
        except OSError as e:  # replaced meanwhile: the next file of that name is as good
            looks += 1
            if e.errno not in GONE or looks > _MOST_LOOKS:
                raise


def _read_open(file: OpenFile, path: Path, start: int, stop: int | None) -> bytes:
    with file as fd:
        status = _regular(fd, path)
        if stop is None:
            check_whole(status.st_size - start, path)
        length = max(0, (status.st_size if stop is None else min(stop, status.st_size)) - start)
        data = os.pread(fd, length, start)
        while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
            data += more
        return data


def check_whole(nbytes: int, place: object) -> None:
    """Raise FormatError if a file that is read completely has more than `LARGEST_WHOLE` bytes."""
    if nbytes > LARGEST_WHOLE:
        raise FormatError(
            f"{place} has {nbytes} bytes, at most {LARGEST_WHOLE} are expected; it was not written "
            "by shardckpt."
        )


def generation_of(data: bytes | None) -> bytes:
    """The generation of a file with these bytes; `data=None` stands for a missing file."""
    return _ABSENT if data is None else hashlib.sha256(data).hexdigest().encode()


def replace(
    path: Path,
    data: bytes | bytearray | memoryview,
    generation: bytes | None,
    directories: DurableDirectories | None = None,
) -> bool:
    """Write a file, or replace it, in an existing directory.

    It is durable when this returns, or, if `directories` puts that off, when they are synced.

    Args:
        path: the file.
        data: its bytes.
        generation: write only if the file still has this generation; None: write always.
        directories: what makes the file's name durable, and the bytes of a file that is written
            always, at once or later; None: all is made durable at once.

    Returns:
        Whether it was written; False if the file has another generation.

    Raises:
        OSError: it cannot be written; TimeoutError: another writer held its lock for too long.
    """
    try:
        lock = open_locked(path)
        renamed = False
        try:
            if generation not in (None, generation_now(path)):
                return False
            os.ftruncate(lock.fd, 0)
            os.lseek(lock.fd, 0, os.SEEK_SET)
            write_all(lock.fd, data)
            # Others rely on a record once it is named. Where inode numbers change, nothing waits.
            at_once = generation is not None or lock.mark is not None
            if directories is None or at_once or not directories.keep(path, lock.path):
                os.fsync(lock.fd)
            if not is_at(lock.fd, lock.path) and read(lock.path) != data:
                raise FileNotFoundError(
                    errno.ENOENT, "its directory was removed while it was written", str(path)
                )
            lock.path.rename(path)
            renamed = True
            if directories is None:
                sync_directory(path.parent)
            else:
                directories.sync(path.parent)
            return True
        finally:
            release(lock, delete=not renamed)
    except FileNotFoundError:  # the directory was removed, or everything in it
        if generation in (None, _ABSENT):
            raise
        return False


def is_transient(name: str) -> bool:
    """Whether a file so named exists only while another is written or a deleted one is open."""
    return name.endswith(LOCK_SUFFIX) or HIDDEN.fullmatch(name) is not None


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable, where the file system can do that."""
    with OpenFile(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        sync_open_directory(fd, path)


def sync_open_directory(fd: int, path: Path) -> None:
    """Make the entries of an open directory durable.

    A file system that cannot do that is named in the log, once.
    """
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_SYNC:
            raise
        device = os.fstat(fd).st_dev
        if device not in _unsynced:
            _unsynced.add(device)
            _log.warning(
                "the file system of %s cannot make directories durable (%s): a crash of its server "
                "might undo the last operations there, also a commit that has been reported",
                path,
                e.strerror,
            )


_unsynced: set[int] = set()
"""Devices of file systems that cannot sync a directory."""


class DurableDirectories:
    """Creates directories durably, and remembers which are durable.

    Many new files can be made durable together: those of `later` sync a directory once, when
    `sync_all` is called, however many files and directories are created in it. A file system with a
    journal then writes it once, and not once per file.
    """

    def __init__(self, top: Path) -> None:
        """Begin at `top`; directories from there down are synced even if they exist.

        Another process may just have created them.
        """
        self._top = top
        self._synced: set[Path] = set()
        self._made: set[Path] = set()
        """Directories whose names are not synced yet."""
        self._later: dict[Path, bool] | None = None
        """Directories to sync in `sync_all`, and whether this process may lack the right to do it;
        None: they are synced at once."""
        self._kept: list[tuple[Path, OpenFile]] = []
        """Files whose bytes are not synced yet. They are open: a file that is opened later may miss
        an error of writing them."""

    def later(self) -> DurableDirectories:
        """The same directories, where syncing is put off until `sync_all`."""
        later = DurableDirectories(self._top)
        later._synced, later._later, later._kept = self._synced, {}, self._kept
        return later

    def keep(self, path: Path, name: Path) -> bool:
        """Note a written file, which has a `name` for now; False: it must be synced at once."""
        if self._later is None or len(self._kept) >= _MOST_KEPT:
            return False
        self._kept.append((path, OpenFile(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)))
        return True

    def take_kept(self) -> list[tuple[Path, OpenFile]]:
        """The files whose syncing was put off; the caller syncs them before `sync_all`."""
        kept = self._kept[:]
        self._kept.clear()
        return kept

    def sync_all(self) -> None:
        """Make all names durable whose syncing was put off.

        From now on, files are made durable at once.
        """
        for directory, may_fail in [*(self._later or {}).items()]:
            self._sync(directory, may_fail=may_fail)
        self._synced |= self._made
        self._later = None

    def sync(self, directory: Path, *, may_fail: bool = False) -> None:
        """Make the names in a directory durable, or note it for `sync_all`.

        `may_fail` if this process may lack the right to do it.
        """
        if self._later is None:
            self._sync(directory, may_fail=may_fail)
        else:
            self._later[directory] = may_fail and self._later.get(directory, True)

    def _sync(self, directory: Path, *, may_fail: bool) -> None:
        try:
            sync_directory(directory)
        except PermissionError:
            if not may_fail:
                raise

    def forget(self, top: Path) -> None:
        """Forget a directory that is removed, and everything below it."""
        self._kept[:] = [one for one in self._kept if not one[0].is_relative_to(top)]
        later = self._later or {}
        for directory in [one for one in later if one.is_relative_to(top)]:
            del later[directory]

    def make(self, path: Path) -> None:
        """Create a directory and its parents, if they are missing."""
        if (path in self._synced or path in self._made) and is_directory(path):
            return
        if not path.is_relative_to(self._top) and is_directory(path):
            return
        if path.parent != path:
            self.make(path.parent)
        existed = is_directory(path)
        path.mkdir(exist_ok=True)
        # Above `top` at once: writers at other places below such a directory take it for durable.
        at_once = self._later is None or not path.is_relative_to(self._top)
        sync = self._sync if at_once else self.sync
        # A directory that only others may list, above one of our own.
        sync(path.parent, may_fail=existed)
        (self._synced if at_once else self._made).add(path)


def _regular(fd: int, path: Path) -> os.stat_result:
    """The status of an open file; raises OSError for a special file, whose read may never end."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status


def _links(fd: int, path: Path) -> int:
    """Number of names of an open file, 0 if it was removed; raises OSError as `_regular` does."""
    try:
        return _regular(fd, path).st_nlink
    except OSError as e:
        if e.errno not in GONE:
            raise
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class LockedFile:
    """A lock file that this process has locked."""

    path: Path
    file: OpenFile
    mark: bytes | None = None
    """Its bytes, by which it was recognised; None: its inode number was enough."""

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self.file.fileno()


_held: WeakSet[OpenFile] = WeakSet()
"""Locked files. A fork has them, too, and would hold the locks as long as it lives."""


def _close_held() -> None:
    for file in [*_held]:
        file.close()


os.register_at_fork(after_in_child=_close_held)


def open_locked(target: Path) -> LockedFile:
    """Open and lock the lock file of a file; `release` ends that.

    Raises:
        TimeoutError: another writer did not release it within `_LOCK_SECONDS`.
        OSError: it cannot be created or locked, or is not a regular file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = target.with_name(f"{target.name}{LOCK_SUFFIX}")
    deadline, pause, looks = time.monotonic() + _LOCK_SECONDS, LEAST_PAUSE, 0
    while True:
        file, keep = OpenFile(lock, flags), False
        fd = file.fileno()
        try:
            lock_file(fd, target)
            links = _links(fd, lock)
            here, mark = bool(links) and is_at(fd, lock), None
            if here is None:
                mark = _mark(fd, lock, target)
            if links > 1 and here is not False:
                # A copy of the directory by hard links: writing here would change the other file.
                lock.unlink(missing_ok=True)
            elif here or mark:  # otherwise the writer before has just renamed or removed it
                keep = True
                _held.add(file)
                return LockedFile(lock, file, mark)
            looks += 1
            if looks > _MOST_LOOKS:
                raise OSError(
                    f"{lock} was another file at each of {looks} looks: this file system has no "
                    "locks that hold, or other processes write the same file without a pause"
                )
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                # Not from an error that says that this user has no permission.
                raise TimeoutError(
                    f"waited {_LOCK_SECONDS:g} s for the lock on {lock}, which another process "
                    "holds; if that process is stopped, continue or end it"
                ) from None
            looks = 0
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)
        finally:
            if not keep:
                file.close()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes at a file's position."""
    rest = memoryview(data)
    while rest:
        rest = rest[check_written(os.write(fd, rest)) :]


def check_written(nbytes: int) -> int:
    """The bytes that a system call wrote; an error if none, as it might write none for ever."""
    if not nbytes:
        raise OSError(errno.EIO, "the file system accepts no bytes")
    return nbytes


def _mark(fd: int, lock: Path, target: Path) -> bytes | None:
    """Recognise a locked file at its path by new bytes in it, where inode numbers do not help.

    None if it is not there. The writer before may have renamed it, and then it has a record's
    bytes. So first two locks are tried, which exclude each other: the file at the lock's name must
    be locked, and the one with the record's name must not.

    Raises:
        BlockingIOError: the latter is locked.
    """
    if not is_locked(lock):
        return None
    if is_locked(target):  # perhaps this file
        raise BlockingIOError
    mark = secrets.token_bytes(_MARK_BYTES)
    os.ftruncate(fd, 0)
    os.pwrite(fd, mark, 0)
    return mark if read(lock) == mark else None


def is_locked(path: Path) -> bool:
    """Whether the file that is at a path has a lock; False if there is none."""
    try:
        file = OpenFile(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        with file as fd:
            lock_file(fd, path)
    except (BlockingIOError, PermissionError):
        return True
    return False


def release(lock: LockedFile, *, delete: bool) -> None:
    """Unlock a file that `open_locked` returned; `delete` it first, if it is still at its path."""
    try:
        if delete and (
            is_at(lock.fd, lock.path) or (lock.mark is not None and read(lock.path) == lock.mark)
        ):
            with suppress(OSError):
                lock.path.unlink()
    finally:
        _held.discard(lock.file)
        lock.file.close()


def generation_now(path: Path) -> bytes:
    """The generation of a file, or of a missing one, as it is now."""
    return generation_of(read(path))
