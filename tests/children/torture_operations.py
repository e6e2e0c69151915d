"""The operations by which a process changes the storage, counted; at one of them it dies or falls
asleep.

An operation is making, writing, syncing, renaming or removing a file or directory, the whole write
of a file under a lock (`io/files.py`; its own steps do not count, because who sleeps there keeps
others waiting), and every write, copy and commit of TensorStore's. Of a write there are two: before
it, and in the middle, when half of the bytes are there. A whole write goes to another name
(`….__lock`) and is renamed, so half of its bytes are there under that name; of TensorStore's
commits the middle is wherever it is a moment after it began. What the processes tell each other
counts, too: it is a renamed file here.
"""

import contextlib
import fcntl
import functools
import os
import struct
import threading

import tensorstore as ts
from below_python import lead_through_os

from shardckpt.io import files

FILES = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
)
TENSORSTORE = ("write", "delete_range", "experimental_copy_range_to")


class Operations:
    """Counts them, and calls `act(name)` at the chosen one."""

    def __init__(self, act, *, at=None, before=None, after=None):
        """Choose an operation: by its number, or as the one before or after that writes an object
        whose path ends so."""
        self.names = []
        self._act, self._at, self._before, self._after = act, at, before, after
        self._lock = threading.RLock()
        self._armed = False
        self._inside = threading.local()
        """Of each thread, whether it is in a whole write."""

    def arm(self):
        self._armed = True
        lead_through_os()
        for name in FILES:
            setattr(os, name, self._file_operation(name, getattr(os, name)))
        files.replace = self._whole_write(files.replace)
        for name in TENSORSTORE:
            setattr(ts.KvStore, name, self._tensorstore_operation(name, getattr(ts.KvStore, name)))
        ts.Transaction.__exit__ = self._commit(ts.Transaction.__exit__)

    def disarm(self):
        """Stop counting the operations of this process."""
        self._armed = False

    def _count(self, name, *, half=lambda: None, chosen=False):
        """One more operation; `half` is what is done of the one before, if this is its middle.
        Whether it was the chosen one."""
        with self._lock:
            if not self._armed or getattr(self._inside, "whole", False):
                return False
            number = len(self.names)
            self.names.append(name)
            if not chosen and number != self._at:
                return False
            half()
            self._act(name)
            return True

    def _file_operation(self, name, function):
        @functools.wraps(function)
        def wrapped(*arguments, **options):
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_TRUNC):
                return function(*arguments, **options)
            self._count(name)
            if name in ("write", "pwrite"):
                file, data, *offset = arguments
                half = len(data) // 2
                if self._count(
                    f"the second half of a {name}",
                    half=lambda: function(file, data[:half], *offset),
                ):
                    # It has only slept.
                    return half + function(file, data[half:], *(at + half for at in offset))
            return function(*arguments, **options)

        return wrapped

    def _whole_write(self, function):
        @functools.wraps(function)
        def wrapped(path, data, *arguments):
            self._count("a whole write", chosen=_ends(str(path), self._before))
            self._count(
                "the second half of a whole write", half=lambda: _write_half(path, bytes(data))
            )
            self._inside.whole = True
            try:
                written = function(path, data, *arguments)
            finally:
                self._inside.whole = False
            if _ends(str(path), self._after):
                self._count("after a whole write", chosen=True)
            return written

        return wrapped

    def _tensorstore_operation(self, name, function):
        @functools.wraps(function)
        def wrapped(store, *arguments, **options):
            self._count(f"tensorstore {name}")
            if (
                name == "write"
                and arguments[1] is not None
                and store.spec().to_json()["driver"] == "file"
            ):
                path, value = store.path + _text(arguments[0]), bytes(arguments[1])
                self._count(
                    "the second half of a tensorstore write", half=lambda: _write_half(path, value)
                )
            return function(store, *arguments, **options)

        return wrapped

    def _commit(self, function):
        @functools.wraps(function)
        def wrapped(transaction, *error):
            self._count("tensorstore commit")
            self._count("the middle of a tensorstore commit", half=transaction.commit_async)
            return function(transaction, *error)

        return wrapped


def _write_half(path, value):
    """As a whole write begins: under a lock, and under a name that is still the file's."""
    lock = f"{path}.__lock"
    while True:
        # Not by os.open and os.write, which are counted.
        with contextlib.suppress(FileNotFoundError), open(lock, "ab", buffering=0) as file:  # noqa: PTH123
            fcntl.fcntl(
                file,
                fcntl.F_OFD_SETLKW,
                struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0),
            )
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):  # noqa: PTH116  (another writer has just renamed it)
                continue
            file.truncate(0)
            file.write(value[: len(value) // 2])
        return


def _text(key):
    return key if isinstance(key, str) else key.decode()


def _ends(path, end):
    return end is not None and path.endswith(end)
