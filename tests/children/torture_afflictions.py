"""Afflictions of one process of a job that its neighbours do not have: a full disk, no right to
write, a wrong clock.

A full or read-only disk is a real one: the process gets a mount namespace of its own (unshare(2))
and mounts a small tmpfs over what it writes to, or the place itself once more, read-only. That
takes root's rights. A limit of file sizes takes none.
"""

import ctypes
import datetime as dt
import os
import resource
import time
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def checked(status):
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(source, target, kind, flags, data=None):
    encoded = (None if text is None else str(text).encode() for text in (source, target, kind))
    checked(libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()))


@contextmanager
def mounts_of_its_own():
    """From here on what this process mounts is seen by it alone. It has one thread yet; those to
    come see the same."""
    checked(libc.unshare(CLONE_NEWNS))
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mounted = []
    yield mounted
    for target in mounted:
        checked(libc.umount2(str(target).encode(), MNT_DETACH))


@contextmanager
def full_disk(coordinator, url, affliction):
    """`bytes` are left where this process writes its chunks."""
    attempt = Path(
        url, f"{coordinator.run_id}-{sha256(Path(url).name.encode()).hexdigest()[:12]}-1"
    )
    place = attempt / (
        "zarr" if affliction["layout"] == "zarr" else f"hosts/{coordinator.world.process:05d}"
    )
    place.mkdir(parents=True, exist_ok=True)
    with mounts_of_its_own() as mounted:
        mount("tmpfs", place, "tmpfs", 0, f"size={affliction['bytes']}")
        mounted.append(place)
        yield


@contextmanager
def read_only(coordinator, url, affliction):
    """The checkpoint's directory is mounted read-only."""
    with mounts_of_its_own() as mounted:
        Path(url).mkdir(parents=True, exist_ok=True)
        mount(url, url, None, MS_BIND)
        mount("none", url, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
        mounted.append(url)
        yield


@contextmanager
def small_files(coordinator, url, affliction):
    """No file may grow beyond `bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (affliction["bytes"], hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


AFFLICTIONS = {"full disk": full_disk, "read-only": read_only, "small files": small_files}


@contextmanager
def wrong_clock(ahead):
    """All that asks what time it is gets another answer; files' times, which the kernel gives, stay
    right."""
    right, now, gmtime, nanoseconds = dt.datetime, time.time, time.gmtime, time.time_ns

    class Wrong(right):
        @classmethod
        def now(cls, tz=None):
            return right.now(tz) + dt.timedelta(seconds=ahead)

    dt.datetime = Wrong
    time.time = lambda: now() + ahead
    time.time_ns = lambda: nanoseconds() + ahead * 10**9
    time.gmtime = lambda seconds=None: gmtime(now() + ahead if seconds is None else seconds)
    try:
        yield
    finally:
        dt.datetime, time.time, time.gmtime, time.time_ns = right, now, gmtime, nanoseconds
