"""Bearer tokens and sessions: who may do what.

A token is 256 random bits. The token file has a line for each, `NAME RIGHTS DIGEST [EXPIRES]`, with
the SHA-256 of the token; for random tokens a slow hash adds nothing. Lines `group:NAME RIGHTS` and
`user:NAME RIGHTS` are for users whom a proxy has signed in. The file is read again when it changes,
so deleting a line revokes a token. A bad line is told and the others hold; so do all while the file
cannot be read. A session of the page belongs to a token and ends with it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import math
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardckptError, StorageError
from shardckpt.io.status import exists
from shardckpt.options import parse_duration
from shardckpt.serve.access.identity import Identity, parse_rights
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_log = logging.getLogger("shardckpt.serve.tokens")
_PREFIX = "shardckpt_"
_LINE = re.compile(
    r"([A-Za-z0-9._@-]{1,64})\s+(\S{1,4000})\s+([0-9a-f]{64})(?:\s+(\S{1,40}))?", re.ASCII
)
_MEMBER = re.compile(r"((?:group|user):[^\s,]{1,200})\s+(\S{1,4000})")
_SESSION_SECONDS = 12 * 3600.0
_MOST_SESSIONS = 10_000
_GUESSES, _GUESS_SECONDS, _MOST_ADDRESSES = 10, 60.0, 10_000


class Tokens:
    """The tokens of a file, and the sessions that began with them."""

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            OptionError: no line is a token's, or others may write to the file. StorageError: it
                cannot be read.
        """
        self._file = file
        self._text: bytes | None = None
        self._reported = ""
        self.bad_lines = 0
        """Number of lines of the file that are none of a token."""
        self._known: dict[str, tuple[Identity, float]] = {}
        """Owner of a token by its digest, and when the token expires."""
        self._members: dict[str, dict[str, str]] = {}
        """Rights of groups and users that a proxy names."""
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Digest of a session → digest of its token, and when it ends by the monotonic clock."""
        self._lock = threading.Lock()
        self._refresh()

    def identity(self, token: str) -> Identity | None:
        """Owner of a token; None: nobody, or the token has expired."""
        self._refresh()
        return self._valid(_digest(token))

    def has_expired(self, token: str) -> bool:
        """Whether a token was valid once."""
        return _digest(token) in self._known and self.identity(token) is None

    def member(self, name: str, groups: Sequence[str]) -> Identity:
        """User whom a proxy has signed in, with the rights of the user and all groups."""
        self._refresh()
        members = [f"user:{name}", *(f"group:{group}" for group in groups)]
        rights = [
            f"{root}={scope}"
            for one in members
            for root, scope in self._members.get(one, {}).items()
        ]
        return Identity(name, parse_rights(rights), by_proxy=True)

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
        return self._valid(token) if time.monotonic() < end else None

    def end_session(self, secret: str) -> None:
        """Forget a session."""
        with self._lock:
            self._sessions.pop(_digest(secret), None)

    def _valid(self, digest: str) -> Identity | None:
        who, expires = self._known.get(digest, (None, 0.0))
        return who if time.time() < expires else None

    def _refresh(self) -> None:
        """Read the file again if it has changed.

        The known tokens hold while it cannot be read or trusted.
        """
        try:
            # Its time and inode number do not tell on every file system that it has changed.
            data = self._file.read_bytes()
            if data == self._text:
                return
            others_write = self._file.stat().st_mode & 0o022
        except OSError as e:
            self._refuse(StorageError(f"the token file {self._file} cannot be read ({e})."))
            return
        if others_write:
            self._refuse(
                OptionError(
                    f"the token file {self._file} can be written by others; run `chmod 644` on it."
                )
            )
            return
        known, members, bad = _parse(data.decode("utf-8", "replace"))
        if bad and not known and self._text is None:
            raise OptionError(
                f"{self._file}, line {bad[0]}: write NAME RIGHTS DIGEST [EXPIRES], as `shardckpt "
                "token` does."
            )
        self.bad_lines = len(bad)
        if self._text is not None or bad:
            _log.log(
                logging.ERROR if bad else logging.INFO,
                "tokens",
                extra={"fields": {"known": len(known), "bad_lines": bad[:10]}},
            )
        self._known, self._members, self._text, self._reported = known, members, data, ""

    def _refuse(self, error: ShardckptError) -> None:
        """Raise an error at the first reading; later, tell it once."""
        if self._text is None:
            raise error
        if str(error) != self._reported:
            _log.error("tokens", extra={"fields": {"reason": str(error)}})
        self._reported = str(error)


def _parse(
    content: str,
) -> tuple[dict[str, tuple[Identity, float]], dict[str, dict[str, str]], list[int]]:
    """Owners of tokens with their ends, rights of groups and users, and numbers of bad lines."""
    known: dict[str, tuple[Identity, float]] = {}
    members: dict[str, dict[str, str]] = {}
    bad = []
    for number, line in enumerate(content.splitlines(), 1):
        text = line.strip()
        try:
            if match := _LINE.fullmatch(text):
                known[match[3]] = (
                    Identity(match[1], parse_rights(match[2].split(","))),
                    _time(match[4]),
                )
            elif match := _MEMBER.fullmatch(text):
                members[match[1]] = parse_rights(match[2].split(","))
            elif text and not text.startswith("#"):
                bad.append(number)
        except (OptionError, ValueError, OverflowError):
            bad.append(number)
    return known, members, bad


def add_token(file: Path, name: str, *rights: str, expires: str | None = None) -> str:
    """Make a token, append its digest to a file, and return it. It cannot be read back.

    Args:
        file: the token file.
        name: name of the user.
        rights: see `parse_rights`; default: "read".
        expires: a duration such as "90d", or a date or time in ISO 8601; None: never.

    Raises:
        OptionError: the name, a right or the end is invalid. StorageError: the file cannot be read
            and written.
    """
    token = _PREFIX + secrets.token_urlsafe(32)
    given = parse_rights([*rights] or ["read"])
    text = (
        given["*"]
        if [*given] == ["*"]
        else ",".join(f"{root}={scope}" for root, scope in given.items())
    )
    line = f"{name} {text} {_digest(token)}"
    if expires is not None:
        end = dt.datetime.fromtimestamp(_end(expires), dt.UTC)
        if end <= dt.datetime.now(dt.UTC):
            raise OptionError(f"--expires {expires!r}: that time is over; give one to come.")
        line += f" {end.isoformat(timespec='seconds')}"
    if not _LINE.fullmatch(line):
        raise OptionError(f"name {shorten(name)}: names have letters, digits, dots and dashes.")
    try:
        new = not exists(file)
        with os.fdopen(
            os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), "rb+"
        ) as out:
            if new:
                # A service that runs as another user reads it; digests are not secret.
                os.fchmod(out.fileno(), 0o644)
            complete = out.read()[-1:] in (b"", b"\n")
            out.write((b"" if complete else b"\n") + f"{line}\n".encode())
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


def _time(text: str | None) -> float:
    """Seconds since 1970 of a date or time, which is UTC if it has no zone. Raises ValueError."""
    if text is None:
        return math.inf
    moment = dt.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()


def _end(text: str) -> float:
    """Seconds since 1970 of a date or time, or of the end of a duration that begins now.

    Raises OptionError.
    """
    with suppress(ValueError, OverflowError):
        return _time(text)
    with suppress(OptionError, OverflowError, ValueError):
        return (
            dt.datetime.now(dt.UTC) + dt.timedelta(seconds=parse_duration(text, "--expires"))
        ).timestamp()
    raise OptionError(
        f'--expires {text!r}: give a number and a unit (s, min, h, d), such as "90d", or a date, '
        'such as "2026-12-31".'
    )


def _network(address: str) -> str:
    """An address; of IPv6 the network of one customer."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return str(int(parsed) >> 64) if isinstance(parsed, IPv6Address) else address


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
