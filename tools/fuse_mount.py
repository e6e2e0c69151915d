"""A directory shown through FUSE with the habits of network file systems.

`make fuse` runs tests on it.

`python tools/fuse_mount.py COMMAND…` runs a command in whose words `{mount}` is the directory.
`mounted` is for tests.

An open file that is deleted keeps a hidden name in its directory until it is closed (libfuse does
that, as NFS does). Each look at a file that is not open gives it another inode number. There are no
hard links, modes cannot be changed, times have whole seconds, and the flags of a rename are
ignored. More habits:

- `renumbered`: each look gives an open file another inode number, too;
- `unkept`: an open file that is deleted or replaced keeps no name, so that asking for its status
  fails;
- `outrun`: another process removes each lock after it was found and before it is opened;
- `unsynced`: a directory cannot be synced (EINVAL);
- `unrenamed`: nothing can be renamed, as in a bucket that is mounted.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICK = 10**9
_DETACH = 2
_LOCKS = (".__lock", "/notes")
"""Ends of the names of files that two processes create and remove."""
_START_SECONDS = 30.0


@contextmanager
def mounted(directory: Path, *habits: str) -> Iterator[Path]:
    """Show an empty directory through FUSE at another one, both of them made below `directory`.

    The process of the mount ends when its standard input does: with this process, however that
    ends.
    """
    source, mount = directory / "source", directory / "mount"
    source.mkdir()
    mount.mkdir()
    command = [sys.executable, __file__, "--serve", str(source), str(mount), *habits]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not mount.is_mount():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"FUSE cannot be mounted at {mount}")
                time.sleep(0.01)
            yield mount
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


class Passthrough:
    """Operations on the files below a directory."""

    use_ns = True

    def __init__(self, source: str, habits: frozenset[str]) -> None:
        self._source = source
        self._habits = habits
        self._numbers = itertools.count(1 << 20)
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        """Real inode of an open file: how often it is open, and its number."""
        self._lock = threading.Lock()

    def _real(self, path: str) -> str:
        return self._source + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        attributes = {
            name: getattr(status, name)
            for name in ("st_mode", "st_nlink", "st_size", "st_blocks", "st_uid", "st_gid")
        }
        for name in ("st_atime", "st_mtime", "st_ctime"):
            attributes[name] = getattr(status, f"{name}_ns") // _TICK * _TICK
        attributes["st_ino"] = self._number(status)
        return attributes

    def _number(self, status: os.stat_result) -> int:
        if stat.S_ISDIR(status.st_mode):
            return status.st_ino
        with self._lock:
            number = next(self._numbers)
            return (
                number
                if "renumbered" in self._habits
                else self._open.get((status.st_dev, status.st_ino), (0, number))[1]
            )

    def _opened(self, fd: int) -> int:
        status = os.fstat(fd)
        with self._lock:
            times, number = self._open.get((status.st_dev, status.st_ino), (0, next(self._numbers)))
            self._open[status.st_dev, status.st_ino] = times + 1, number
        return fd

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        with os.scandir(self._real(path)) as entries:
            statuses = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        dots = [(name, {"st_mode": stat.S_IFDIR, "st_ino": 1}, 0) for name in (".", "..")]
        return dots + [
            (name, {"st_mode": status.st_mode, "st_ino": self._number(status)}, 0)
            for name, status in statuses
        ]

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path))
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        if "unrenamed" in self._habits:
            raise OSError(errno.ENOSYS, "")
        os.rename(self._real(old), self._real(new))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._real(target))
        return 0

    def link(self, target: str, source: str) -> int:
        raise OSError(errno.EPERM, "")

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times)
        return 0

    def create(self, path: str, mode: int, fi: int | None = None) -> int:
        return self._opened(
            os.open(
                self._real(path),
                os.O_RDWR | os.O_CREAT | ((fi or 0) & (os.O_EXCL | os.O_TRUNC)),
                0o666,
            )
        )

    def open(self, path: str, flags: int) -> int:
        if "outrun" in self._habits and path.endswith(_LOCKS):
            self.unlink(path)
        return self._opened(os.open(self._real(path), flags & ~(os.O_APPEND | os.O_NOFOLLOW)))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._real(path) if fh is None else fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        if "unsynced" in self._habits:
            raise OSError(errno.EINVAL, "")
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        status = os.fstat(fh)
        with self._lock:
            times, number = self._open.pop((status.st_dev, status.st_ino))
            if times > 1:
                self._open[status.st_dev, status.st_ino] = times - 1, number
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._source)
        return {
            name: getattr(status, name)
            for name in dir(status)
            if name.startswith("f_") and name != "f_fsid"
        }


def _end_with_the_input(mount: str) -> None:
    sys.stdin.buffer.read()
    if ctypes.CDLL(None).umount2(os.fsencode(mount), _DETACH) and os.path.ismount(mount):
        subprocess.run(["fusermount3", "-u", "-z", mount], check=False)
    os._exit(0)


def serve(source: str, mount: str, *habits: str) -> None:
    """Serve a mount until the standard input ends."""
    # Libfuse 2 has other options.
    os.environ.setdefault("FUSE_LIBRARY_PATH", find_library("fuse3") or "libfuse3.so.3")
    from mfusepy import FUSE, Operations

    class Mount(Passthrough, Operations):  # type: ignore[misc]
        pass

    threading.Thread(target=_end_with_the_input, args=(mount,), daemon=True).start()
    options = {"hard_remove": True} if "unkept" in habits else {}
    FUSE(
        Mount(source, frozenset(habits)),
        mount,
        foreground=True,
        use_ino=True,
        attr_timeout=0,
        entry_timeout=0,
        **options,
    )


def main(words: list[str]) -> int:
    """Run a command on a mount; its exit status."""
    if words[0] == "--serve":
        serve(*words[1:])
        return 0
    with tempfile.TemporaryDirectory() as directory, mounted(Path(directory)) as mount:
        return subprocess.call([word.replace("{mount}", str(mount)) for word in words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
