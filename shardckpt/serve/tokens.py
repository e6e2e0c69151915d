"""Bearer tokens and sessions: who may do what.

A token is 256 random bits. The token file has a line for each, `NAME SCOPE DIGEST`, with the SHA-256 of the token; for random tokens a slow
hash adds nothing. The file is read again when it changes, so deleting a line revokes a token. A session of the page belongs to a token and
ends with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, StorageError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    from pathlib import Path

SCOPES = ("read", "operate", "admin")
"""Each includes those before it."""
_PREFIX = "shardckpt_"
_LINE = re.compile(r"([A-Za-z0-9._@-]{1,64})\s+(read|operate|admin)\s+([0-9a-f]{64})", re.ASCII)
_SESSION_SECONDS = 12 * 3600.0
_MOST_SESSIONS = 10_000
_GUESSES, _GUESS_SECONDS, _MOST_ADDRESSES = 10, 60.0, 10_000


@dataclass(frozen=True, slots=True)
class Identity:
    """User of a request."""

    name: str
    scope: str

    def may(self, scope: str) -> bool:
        """Whether the scope is included."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


ANYBODY = Identity("-", "read")
"""Everybody on this machine, if there are no tokens."""


class Tokens:
    """The tokens of a file, and the sessions that began with them."""

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            OptionError: a line is not a token's, or others may write to the file. StorageError: it cannot be read.
        """
        self._file = file
        self._text: bytes | None = None
        self._known: dict[str, Identity] = {}
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Digest of a session → digest of its token, and when it ends by the monotonic clock."""
        self._lock = threading.Lock()
        self._refresh()

    def identity(self, token: str) -> Identity | None:
        """Owner of a token; None: nobody.

        Raises:
            OptionError, StorageError: the file has changed and cannot be read any more.
        """
        self._refresh()
        return self._known.get(_digest(token))

    def begin_session(self, token: str) -> str:
        """A secret for a cookie, in place of a valid token."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[_digest(secret)] = _digest(token), time.monotonic() + _SESSION_SECONDS
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return secret

    def in_session(self, secret: str) -> Identity | None:
        """User who began a session; None: it has ended, or its token was revoked."""
        self._refresh()
        with self._lock:
            token, end = self._sessions.get(_digest(secret), ("", 0.0))
        return self._known.get(token) if time.monotonic() < end else None

    def end_session(self, secret: str) -> None:
        """Forget a session."""
        with self._lock:
            self._sessions.pop(_digest(secret), None)

    def _refresh(self) -> None:
        try:
            data = self._file.read_bytes()  # its time and inode number do not tell on every file system that it has changed
            if data == self._text:
                return
            stat, text = self._file.stat(), data.decode()
        except (OSError, UnicodeDecodeError) as e:
            raise StorageError(f"the token file {self._file} cannot be read ({e}).") from e
        if stat.st_mode & 0o022:
            raise OptionError(f"the token file {self._file} can be written by others; run `chmod 600` on it.")
        known = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise OptionError(f"{self._file}, line {number}: write NAME SCOPE DIGEST, as `shardckpt token` does.")
            known[found[3]] = Identity(found[1], found[2])
        self._known, self._text = known, data


def add_token(file: Path, name: str, scope: str) -> str:
    """Make a token, append its digest to a file, and return it. It cannot be read back.

    Raises:
        OptionError: the name or scope is invalid. StorageError: the file cannot be written.
    """
    token = _PREFIX + secrets.token_urlsafe(32)
    line = f"{name} {scope} {_digest(token)}"
    if not _LINE.fullmatch(line):
        raise OptionError(
            f"name {excerpt(name)}, scope {excerpt(scope)}: names have letters, digits, dots and dashes; scopes are {', '.join(SCOPES)}."
        )
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a", encoding="utf-8") as out:
            out.write(f"{line}\n")
    except OSError as e:
        raise StorageError(f"the token file {file} cannot be written ({e.strerror}).") from e
    return token


class Guesses:
    """Counts wrong tokens by the address that they came from."""

    def __init__(self) -> None:
        """Start with none."""
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait(self, address: str) -> int:
        """Seconds for which no token from an address is looked at; 0: none."""
        count, until = self._counts.get(_network(address), (0, 0.0))
        left = until - time.monotonic()
        return 0 if count < _GUESSES or left <= 0 else int(left) + 1

    def add(self, address: str) -> None:
        """Count a wrong token."""
        key, now = _network(address), time.monotonic()
        count, until = self._counts.pop(key, (0, 0.0))
        self._counts[key] = (1 if now > until else count + 1), now + _GUESS_SECONDS
        while len(self._counts) > _MOST_ADDRESSES:
            self._counts.popitem(last=False)


def _network(address: str) -> str:
    """An address; of IPv6 the network of one customer."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return str(int(parsed) >> 64) if isinstance(parsed, IPv6Address) else address


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
