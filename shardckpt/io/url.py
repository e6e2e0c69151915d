"""Locations: a user's path or url, and TensorStore's form of it.

A location is a scheme and a path. Users write a path (`ckpt/100`, a `pathlib.Path`),
`file:///data/ckpt`, `gs://bucket/ckpt`, `s3://bucket/ckpt`, `az://container/ckpt`,
`abfs://container@account.dfs.core.windows.net/ckpt`, `memory://name/ckpt`, or `https://host/ckpt`,
to read only. TensorStore always gets a JSON spec, `{"driver": …, "path": …}`, never a url string,
so a space, `%`, `?`, `#` or a non-ASCII letter in a name has no special meaning.

1. `parse` distinguishes a path from a url, decodes a url's percent signs, and makes a path absolute
   (`~` is home).
2. `Location` refuses names that TensorStore would silently change (a backslash becomes a slash) or
   refuse with a message about keys (`.__lock` is the suffix of its lock files), and invalid bucket
   names.
3. `Location.kvstore` is the only place where a scheme becomes a TensorStore key-value store; the
   other settings of a cloud storage are in `cloud`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from shardckpt.errors import StorageError, UrlError
from shardckpt.format.documents import unfit
from shardckpt.io.buckets import cloud
from shardckpt.text import shorten

SCHEMES = {
    "file": ("shardckpt.io.stores.disk", "DiskStore"),
    "gs": ("shardckpt.io.stores.bucket", "BucketStore"),
    "s3": ("shardckpt.io.stores.bucket", "BucketStore"),
    "az": ("shardckpt.io.stores.azure", "AzureStore"),
    "abfs": ("shardckpt.io.stores.azure", "AzureStore"),
    "memory": ("shardckpt.io.stores.memory", "MemoryStore"),
    "http": ("shardckpt.io.stores.bucket", "WebStore"),
    "https": ("shardckpt.io.stores.bucket", "WebStore"),
}
"""Scheme → module and name of the class of its stores, a `Store`. The paths of a scheme that is
added are slash-separated names."""
_FSSPEC = re.compile(r"fsspec\+([a-z0-9][a-z0-9.-]*)")
"""Schemes of places that fsspec reaches."""
FSSPEC_WRITTEN = ("gs", "gcs", "s3")
"""Protocols of fsspec that are written to: `tests/io/test_fsspec.py` proves that their clients
create conditionally."""
NOT_BY_FSSPEC = {
    "file": "give a path on a disk as it is, without fsspec+",
    "local": "give a path on a disk as it is, without fsspec+",
    "memory": "fsspec's memory is of one process; write memory://",
    "shardckpt": "its files are made from a checkpoint; give the url of that checkpoint",
}
"""Protocol of fsspec that is refused → advice."""
_ALIASES = {"abfss": "abfs"}
"""Schemes with another name for the same places."""
_DRIVERS = ("file", "memory", "gs", "s3", "http", "https")
"""Schemes for which TensorStore has a driver."""
_LABEL = r"[a-z0-9](?:[a-z0-9{}]{{0,61}}[a-z0-9])?"
_CONTAINER = r"(?=.{3,63}(?:@|\Z))[a-z0-9](?:-?[a-z0-9])*"
_ACCOUNT = r"@[a-z0-9]{3,24}\.dfs(?:\.[a-z0-9-]+)+"
_BUCKETS = {
    "gs": (
        re.compile(r"(?=.{3,222}\Z)LABEL(?:\.LABEL)*\Z".replace("LABEL", _LABEL.format("_-"))),
        "dots, dashes and underscores",
        "bucket",
    ),
    "s3": (
        re.compile(r"(?=.{3,63}\Z)LABEL(?:\.LABEL)*\Z".replace("LABEL", _LABEL.format("-"))),
        "dots and dashes",
        "bucket",
    ),
    "az": (re.compile(rf"{_CONTAINER}\Z"), "single dashes", "container"),
    "abfs": (
        re.compile(rf"{_CONTAINER}{_ACCOUNT}\Z"),
        "single dashes",
        "container@account.dfs.core.windows.net",
    ),
}
"""Scheme → pattern of a bucket's name (on Azure: a container's), the characters that it may have
besides letters and digits, and how a url gives it.

https://cloud.google.com/storage/docs/buckets#naming,
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html,
https://learn.microsoft.com/en-us/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
"""
_WEB = ("http", "https")
_HOST = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?\Z"
)
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
    """A key of `SCHEMES`, or `fsspec+PROTOCOL`."""
    path: str
    """`file`: an absolute, normalised path. `gs` and `s3`: the bucket (`http`: the host; `az`: the
    container; `abfs`: the container, @ and the account's host), and names below it after slashes.
    `memory`: slash-separated names. By fsspec: the rest of the protocol's url. It has no slash at
    the end."""
    local_path: Path | None = field(init=False, repr=False, compare=False)
    """The path on this machine's file system; None on a storage that has no paths."""

    def __post_init__(self) -> None:
        """Refuse unknown schemes, and names that the storage could not keep unchanged."""
        _, kind = store_class(self.scheme, f"{self.scheme}://{self.path}")
        if "::" in self.path and kind.startswith("Fsspec"):
            raise UrlError(
                f"{self.scheme}://{self.path}: chained urls (::) are not supported; give the url "
                "of the storage alone."
            )
        if self.is_web:
            if not _HOST.match(self.path.partition("/")[0]):
                raise UrlError(
                    f"{self.scheme}://{self.path}: it names no host; write "
                    f"{self.scheme}://host/path, without user and password."
                )
        elif self.bucket is not None:
            names, besides, form = _BUCKETS[self.scheme]
            if not names.match(self.bucket):
                noun = form.partition("@")[0]
                raise UrlError(
                    f"{self.scheme}://{self.path}: {self.bucket!r} is not a "
                    f"{form if '@' in form else f'{noun} name'}; {noun} names are at least 3 "
                    f"lower-case letters and digits, with {besides} between them. Write "
                    f"{self.scheme}://{form}/path."
                )
            if _CONTROL.search(self.path):
                raise UrlError(
                    f"{self._shown!r} cannot be used: object stores have no control characters in "
                    "names. Choose another name."
                )
        if self.scheme == "file" and not self.path.startswith("/"):
            raise UrlError(
                f"{self.path!r}: a location on disk is an absolute path; go through parse()."
            )
        if not self.path:
            raise UrlError(f"{self._shown} names no place; write {self._shown}NAME.")
        why = unfit(self.path.removeprefix("/") if self.scheme == "file" else self.path)
        if why and self.path != "/":
            raise UrlError(f"{self._shown!r} cannot be used: {why}. Choose another name.")
        object.__setattr__(self, "local_path", Path(self.path) if self.scheme == "file" else None)

    @property
    def _shown(self) -> str:
        """The place as a user writes it, without escapes."""
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.path}"

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
        """The location that contains this one.

        None for a bucket, the root of a disk, and the first name of a memory.
        """
        above = self.path.rpartition("/")[0] or (
            "/" if self.scheme == "file" and self.path != "/" else ""
        )
        return Location(self.scheme, above) if above else None

    @property
    def resolved(self) -> Location:
        """The location with symbolic links resolved on disk; unchanged elsewhere."""
        return (
            self
            if self.scheme != "file"
            else Location("file", "/" + os.path.realpath(self.path).lstrip("/"))
        )

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
        """The bucket on an object store (the container on Azure), or the host of a web server.

        None elsewhere.
        """
        return self.path.partition("/")[0] if self.scheme in _BUCKETS or self.is_web else None

    @property
    def object_prefix(self) -> str:
        """On an object store: prefix of the names of all objects at this location.

        The prefix is "" or ends in a slash.
        """
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
            StorageError: TensorStore has no driver for the scheme.
        """
        if self.scheme not in _DRIVERS:
            raise StorageError(
                f"{self}: TensorStore has no driver for {self.scheme}://; copy it to a disk, "
                "gs:// or s3://, and use it there."
            )
        if self.bucket is not None:
            return cloud.kvstore(self.scheme, self.bucket, self.object_prefix)
        return {"driver": self.scheme, "path": self.path.rstrip("/") + "/"}

    def __str__(self) -> str:
        """The form that a user knows and can paste: the path on disk, otherwise the url."""
        return self.path if self.scheme == "file" else self.url


def parse(url: str | os.PathLike[str] | Location) -> Location:
    """Parse a user's path or url.

    Args:
        url: a path, absolute, relative to the working directory or below a home (`~/…`; a directory
            of that name is `./~`), or a url with a scheme of `SCHEMES`. A url is percent-decoded, a
            path is not. A path object that stands for a url (`etils.epath.Path("gs://…")`) is this
            url. A location is returned as it is.

    Raises:
        UrlError: empty, not text, an unknown scheme, an invalid name, or relative to a working
            directory that is gone.

    >>> parse("file:///data/a%20b").path
    '/data/a b'
    """
    if isinstance(url, Location):
        return url
    text = _text_of(url)
    if not isinstance(text, str):
        raise UrlError(
            f"{shorten(url)} is not a url; give a str or a pathlib.Path, as in save(url, state)."
        )
    if not text:
        raise UrlError(
            "The url is empty; give a path, or gs://bucket/…, s3://bucket/… or file:///…."
        )
    if "\0" in text:
        raise UrlError(
            f"{text!r} has a NUL in it; no file system and no object store has such names."
        )
    match = _URL.fullmatch(text)
    if match:
        scheme = match[1].lower()
        return _of_url(_ALIASES.get(scheme, scheme), match[2], text)
    scheme = text.partition(":")[0].lower()
    if ":" in text and scheme in SCHEMES:
        problem = f"{text!r}: a {scheme} url starts with {scheme}://"
        if isinstance(url, str):
            raise UrlError(f"{problem}; for a file of that name write ./{text}.")
        raise UrlError(
            f"{problem}, and pathlib joins its slashes; give the url as text. For a directory of "
            "that name give an absolute path."
        )
    path = os.path.expanduser(text)  # noqa: PTH111  (Path.expanduser raises where it knows no such home)
    if path.partition("/")[0] == "~":
        raise UrlError(
            f"{text!r}: this user has no home directory; set HOME, or give an absolute path (./~ "
            "is a directory of that name)."
        )
    return Location("file", _absolute(path))


def _text_of(url: object) -> object:
    """The text of a path or url.

    A path object that shows itself as a url is this url, even if `os.fspath` gives another path.
    """
    if not isinstance(url, os.PathLike):
        return url
    shown = str(url)
    return shown if _URL.fullmatch(shown) else os.fspath(url)


def _of_url(scheme: str, rest: str, text: str) -> Location:
    """The location of `scheme://rest`."""
    store_class(scheme, text)
    if "?" in rest or "#" in rest:
        raise UrlError(
            f"{text!r}: ? and # end the path of a url; write %3F and %23, or give a plain path."
        )
    if _PERCENT.search(rest):
        raise UrlError(
            f"{text!r}: a % in a url is followed by two hexadecimal digits; write %25, or give a "
            "plain path."
        )
    try:
        path = unquote(rest, errors="strict")
    except UnicodeDecodeError as e:
        raise UrlError(f"{text!r} does not decode to UTF-8 ({e}).") from e
    if "\0" in path:
        raise UrlError(
            f"{text!r} has a NUL in it; no file system and no object store has such names."
        )
    if scheme != "file":
        return Location(scheme, path.rstrip("/"))
    path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    if not path.startswith("/"):
        raise UrlError(
            f"{text!r}: a file url has three slashes, file:///absolute/path; for a relative path "
            "leave file:// out."
        )
    return Location("file", _absolute(path))


def _absolute(path: str) -> str:
    """Make a path absolute and remove `.`, `..` and double slashes.

    Symbolic links stay unresolved.
    """
    try:
        absolute = os.path.abspath(path)  # noqa: PTH100  (Path.resolve would follow links)
    except FileNotFoundError as e:
        raise UrlError(
            f"{path!r} is relative to the working directory, which was removed; change to another "
            "one, or give an absolute path."
        ) from e
    return "/" + absolute.lstrip("/")


def store_class(scheme: str, text: str) -> tuple[str, str]:
    """The module and the name of the class of a scheme's stores.

    Raises:
        UrlError: there is no such scheme in the url `text`.
    """
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    match = _FSSPEC.fullmatch(scheme)
    if match is None:
        known = ", ".join(f"{s}://" for s in [*SCHEMES, "fsspec+PROTOCOL"])
        raise UrlError(f"{text!r}: unknown scheme {scheme}://; known are {known} and plain paths.")
    if match[1] in NOT_BY_FSSPEC:
        raise UrlError(f"{text}: {NOT_BY_FSSPEC[match[1]]}.")
    return "shardckpt.io.stores.fsspec", "FsspecStore" if match[
        1
    ] in FSSPEC_WRITTEN else "FsspecReader"
