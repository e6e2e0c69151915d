"""The audit log: a JSON object a line for every write, sign-in and refusal.

Without it nothing is written, and reads go on.

A write has a line before it is begun, with the result `asked` or `started`, and one after it. The
file is opened again after SIGHUP, and when another file is there.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from shardckpt.errors import StorageError
from shardckpt.format.documents import utc_now
from shardckpt.io.locks import seems_at

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("shardckpt.serve")


class AuditLog:
    """A file of lines. Safe to use from several threads."""

    def __init__(self, path: Path | None) -> None:
        """Open the file; None: nothing is kept.

        A line that a full disk has cut stays; the next one begins after it.

        Raises:
            StorageError: it cannot be written.
        """
        self._path, self._fd = path, -1
        self._stale, self._cut = False, False
        self._lock = threading.Lock()
        if path is not None:
            try:
                self._open(path)
            except OSError as e:
                raise _failure(path, e.strerror) from e

    def reopen(self) -> None:
        """Open the file again before the next line; may be called by a signal."""
        self._stale = True

    def write(self, **fields: Any) -> None:
        """Write a line.

        Raises:
            StorageError: it cannot be written.
        """
        if self._path is None:
            return
        line = json.dumps({"time": utc_now(), **fields}, default=str).encode() + b"\n"
        with self._lock:
            try:
                if self._stale or self._fd < 0 or not self._is_there():
                    self._stale = False
                    self._close()
                    self._open(self._path)
                line = b"\n" + line if self._cut else line
                written = os.write(self._fd, line)
            except OSError as e:
                raise _failure(self._path, e.strerror) from e
            self._cut = line[:written][-1:] != b"\n"
        if written != len(line):
            raise _failure(self._path, "its disk is full")

    def note(self, **fields: Any) -> None:
        """Write a line about what has happened; log if that fails."""
        try:
            self.write(**fields)
        except StorageError as e:
            _log.error("audit", extra={"fields": {"reason": str(e), **fields}})

    def require(self, **fields: Any) -> None:
        """Write a line about what is about to be done.

        Raises:
            HTTPException: it cannot be written.
        """
        try:
            self.write(**fields)
        except StorageError as e:
            _log.error("audit", extra={"fields": {"reason": str(e)}})
            raise HTTPException(
                503,
                "the audit log cannot be written, so nothing was changed.",
                {"Retry-After": "60"},
            ) from e

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _is_there(self) -> bool:
        assert self._path is not None
        try:
            return seems_at(self._fd, self._path)
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._cut = False
        with suppress(OSError), path.open("rb") as file:  # one that cannot be read or is empty
            file.seek(-1, os.SEEK_END)
            self._cut = file.read() != b"\n"


def _failure(path: Path, reason: str | None) -> StorageError:
    return StorageError(f"the audit log {path} cannot be written ({reason}).")
