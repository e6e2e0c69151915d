"""Locations: a user's path or url, and TensorStore's form of it.

A location is a scheme and a path. Users write a path (`ckpt/100`, a `pathlib.Path`), `file:///data/ckpt`,
`gs://bucket/ckpt`, `s3://bucket/ckpt`, `memory://name/ckpt`, or `https://host/ckpt`, to read only. TensorStore always gets a JSON spec,
`{"driver": …, "path": …}`, never a url string, so a space, `%`, `?`, `#` or a non-ASCII letter in a
name has no special meaning.

1. `parse` distinguishes a path from a url, decodes a url's percent signs, and makes a path absolute (`~` is home).
2. `Location` refuses names that TensorStore would silently change (a backslash becomes a slash) or
   refuse with a message about keys (`.__lock` is the suffix of its lock files), and invalid bucket names.
3. `Location.kvstore` is the only place where a scheme becomes a TensorStore key-value store; the other settings of a cloud
   storage are in `cloud`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from shardckpt.errors import UrlError
from shardckpt.format.documents import unfit
from shardckpt.io.buckets import cloud

_SCHEMES = ("file", "gs", "s3", "memory", "http", "https")
_LABEL = r"[a-z0-9](?:[a-z0-9{}]{{0,61}}[a-z0-9])?"
_BUCKETS = {
    "gs": (re.compile(r"(?=.{3,222}\Z)LABEL(?:\.LABEL)*\Z".replace("LABEL", _LABEL.format("_-"))), "dots, dashes and underscores"),
    "s3": (re.compile(r"(?=.{3,63}\Z)LABEL(?:\.LABEL)*\Z".replace("LABEL", _LABEL.format("-"))), "dots and dashes"),
}
"""Scheme → pattern of a bucket's name, and the characters that it may have besides letters and digits.

https://cloud.google.com/storage/docs/buckets#naming, https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
"""
_WEB = ("http", "https")
_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?\Z")
"""The host of a web server: a name or an address, and a port."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
UNQUOTED = "/:@!$&'()*+,;=-._~"
"""Characters that are not percent-encoded in the path of a url (RFC 3986, pchar and the slash)."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place that can hold a checkpoint, or a part of one.

    >>> str(parse("memory://runs/7").join("attempt", "zarr"))
    'memory://runs/7/attempt/zarr'
    """

    scheme: str
    """`file`, `gs`, `s3`, `memory`, `http` or `https`."""
    path: str
    """`file`: an absolute, normalised path. `gs` and `s3`: the bucket (`http`: the host), and names below it after slashes. `memory`:
    slash-separated names. It has no slash at the end."""
    local: Path | None = field(init=False, repr=False, compare=False)
    """The path on this machine's file system; None on other storages."""

    def __post_init__(self) -> None:
        """Refuse unknown schemes, and names that the storage could not keep unchanged."""
        if self.scheme not in _SCHEMES:
            raise UrlError(_unknown(self.scheme, f"{self.scheme}://{self.path}"))
        if self.is_web:
            if not _HOST.match(self.path.partition("/")[0]):
                raise UrlError(
                    f"{self.scheme}://{self.path}: it names no host; write {self.scheme}://host/path, without user and password."
                )
        elif self.bucket is not None:
            names, besides = _BUCKETS[self.scheme]
            if not names.match(self.bucket):
                raise UrlError(
                    f"{self.scheme}://{self.path}: {self.bucket!r} is not a bucket name; those are at least 3 lower-case letters and "
                    f"digits, with {besides} between them. Write {self.scheme}://bucket/path."
                )
            if _CONTROL.search(self.path):
                raise UrlError(
                    f"{self.path!r} cannot be stored to: object stores have no control characters in names. Choose another name."
                )
        if self.scheme == "file" and not self.path.startswith("/"):
            raise UrlError(f"{self.path!r}: a location on disk is an absolute path; go through parse().")
        why = unfit(self.path.removeprefix("/") if self.scheme == "file" else self.path)
        if why and self.path != "/":
            raise UrlError(f"{self.path!r} cannot be stored to: {why}. Choose another name.")
        object.__setattr__(self, "local", Path(self.path) if self.scheme == "file" else None)

    def join(self, *parts: str) -> Location:
        """The location below this one; each part is one or more names separated by slashes.

        Raises:
            UrlError: a part is empty, absolute, or goes up with `..`.
        """
        for part in parts:
            why = unfit(part)
            if why:
                raise UrlError(f"{part!r} is no place below {self}: {why}.")
        return Location(self.scheme, "/".join([self.path.rstrip("/"), *parts]))

    @property
    def parent(self) -> Location | None:
        """The location that contains this one; None for a bucket, the root of a disk, and the first name of a memory."""
        above = self.path.rpartition("/")[0] or ("/" if self.scheme == "file" and self.path != "/" else "")
        return Location(self.scheme, above) if above else None

    @property
    def resolved(self) -> Location:
        """The location with symbolic links resolved on disk; unchanged elsewhere."""
        return self if self.scheme != "file" else Location("file", "/" + os.path.realpath(self.path).lstrip("/"))

    def is_within(self, other: Location) -> bool:
        """Whether it equals another location, or lies below it."""
        own, its = self.resolved, other.resolved
        return own.scheme == its.scheme and f"{own.path}/".startswith(f"{its.path.rstrip('/')}/")

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition("/")[2]

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, where nothing can be written or listed."""
        return self.scheme in _WEB

    @property
    def bucket(self) -> str | None:
        """The bucket on an object store, or the host of a web server; None elsewhere."""
        return self.path.partition("/")[0] if self.scheme in _BUCKETS or self.is_web else None

    @property
    def object_prefix(self) -> str:
        """On an object store: prefix of the names of all objects at this location, "" or ending in a slash."""
        below = self.path.partition("/")[2]
        return f"{below}/" if below else ""

    @property
    def url(self) -> str:
        """The percent-encoded url, as TensorStore and browsers read it."""
        return f"{self.scheme}://{quote(self.path, safe=UNQUOTED)}"

    def kvstore(self) -> dict[str, Any]:
        """TensorStore's spec of the key-value store with keys relative to this location.

        Raises:
            OptionError: an environment variable that it depends on has an invalid value.
        """
        if self.bucket is not None:
            return cloud.kvstore(self.scheme, self.bucket, self.object_prefix)
        return {"driver": self.scheme, "path": self.path.rstrip("/") + "/"}

    def __str__(self) -> str:
        """The form that a user knows and can paste: the path on disk, otherwise the url."""
        return self.path if self.scheme == "file" else self.url


def parse(url: str | os.PathLike[str]) -> Location:
    """Parse a user's path or url.

    Args:
        url: a path, absolute, relative to the working directory or below a home (`~/…`; a directory of that name is
            `./~`), or a `file://`, `gs://`, `s3://` or `memory://` url. A url is percent-decoded, a path is not. A path
            object that stands for a url (`etils.epath.Path("gs://…")`) is this url.

    Raises:
        UrlError: empty, not text, an unknown scheme, an invalid name, or relative to a working directory that is gone.

    >>> parse("file:///data/a%20b").path
    '/data/a b'
    """
    text = _text_of(url)
    if not isinstance(text, str):
        raise UrlError(f"{url!r} is no url; give a str or a pathlib.Path.")
    if not text:
        raise UrlError("The url is empty; give a path, or gs://bucket/…, s3://bucket/… or file:///….")
    if "\0" in text:
        raise UrlError(f"{text!r} has a NUL in it; no file system and no object store has such names.")
    match = _URL.fullmatch(text)
    if match:
        return _of_url(match[1].lower(), match[2], text)
    scheme = text.partition(":")[0].lower()
    if ":" in text and scheme in _SCHEMES:
        found = f"{text!r}: a {scheme} url starts with {scheme}://"
        if isinstance(url, str):
            raise UrlError(f"{found}; for a file of that name write ./{text}.")
        raise UrlError(f"{found}, and pathlib joins its slashes; give the url as text. For a directory of that name give an absolute path.")
    path = os.path.expanduser(text)  # noqa: PTH111  (Path.expanduser raises where it knows no such home)
    if path.partition("/")[0] == "~":
        raise UrlError(f"{text!r}: this user has no home directory; set HOME, or give an absolute path (./~ is a directory of that name).")
    return Location("file", _absolute(path))


def _text_of(url: object) -> object:
    """The text of a path or url. A path object that shows itself as a url is this url, even if `os.fspath` gives another path."""
    if not isinstance(url, os.PathLike):
        return url
    shown = str(url)
    return shown if _URL.fullmatch(shown) else os.fspath(url)


def _of_url(scheme: str, rest: str, text: str) -> Location:
    """The location of `scheme://rest`."""
    if scheme not in _SCHEMES:
        raise UrlError(_unknown(scheme, text))
    if "?" in rest or "#" in rest:
        raise UrlError(f"{text!r}: ? and # end the path of a url; write %3F and %23, or give a plain path.")
    if _PERCENT.search(rest):
        raise UrlError(f"{text!r}: a % in a url is followed by two hexadecimal digits; write %25, or give a plain path.")
    try:
        path = unquote(rest, errors="strict")
    except UnicodeDecodeError as e:
        raise UrlError(f"{text!r} does not decode to UTF-8 ({e}).") from e
    if "\0" in path:
        raise UrlError(f"{text!r} has a NUL in it; no file system and no object store has such names.")
    if scheme != "file":
        return Location(scheme, path.rstrip("/"))
    path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    if not path.startswith("/"):
        raise UrlError(f"{text!r}: a file url has three slashes, file:///absolute/path; for a relative path leave file:// out.")
    return Location("file", _absolute(path))


def _absolute(path: str) -> str:
    """Make a path absolute and remove `.`, `..` and double slashes; symbolic links stay unresolved."""
    try:
        absolute = os.path.abspath(path)  # noqa: PTH100  (Path.resolve would follow links)
    except FileNotFoundError as e:
        raise UrlError(
            f"{path!r} is relative to the working directory, which was removed; change to another one, or give an absolute path."
        ) from e
    return "/" + absolute.lstrip("/")


def _unknown(scheme: str, text: str) -> str:
    known = ", ".join(f"{s}://" for s in _SCHEMES)
    return f"{text!r}: unknown scheme {scheme}://; known are {known} and plain paths."
