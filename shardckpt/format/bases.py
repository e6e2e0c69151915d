"""Other checkpoints that a checkpoint needs: its bases, and the chain of its differences.

The bases hold some of its tensors. The checkpoint's chunks are differences from the chain.

A save may leave out frozen tensors that lie in another checkpoint, its *base*. The record then has,
for each of them, the base and the tensor's name there. A base is identified by its url *and* by the
attempt that its own record named at that time. Attempt names are never reused, so a checkpoint that
replaces the base is never mistaken for it.

A checkpoint whose chunks are differences (`format.differences`) names the *chain* of checkpoints
that its elements follow from: first the one that its chunks differ from, then that one's own, up to
one that has all of its elements. Each is identified by its url and its contents, the digest of its
fingerprint: it may be written anew with the same contents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from shardckpt.format.documents import COMPRESSIONS, LAYOUTS, Fields

if TYPE_CHECKING:
    from collections.abc import Iterable

BESIDE = "../"
"""Prefix of a relative url, which begins at the checkpoint's parent directory and never goes above
it."""
_URL = re.compile(r"(?:\.\./|[a-z0-9]+://)[!-~]{1,8192}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that holds tensors of another one, or that its chunks differ from."""

    attempt: str
    """The attempt that its commit record named; it identifies the base, whichever url is used. "":
    its contents identify it."""
    layout: str
    """"packed" or "zarr", as in its commit record."""
    compression: str | None
    """Compression of its chunks, as in its commit record."""
    url: str = field(compare=False)
    """Percent-encoded: relative to the checkpoint if it lies below the same directory (`../0`),
    otherwise with a scheme."""
    contents: str = ""
    """SHA-256 of its fingerprint's file, for a checkpoint of the chain; else ""."""

    @classmethod
    def from_fields(cls, read: Fields) -> Base:
        """Inverse of `to_json`."""
        url = read.string("url")
        if not _URL.fullmatch(url):
            read.fail("'url' is neither ../ and a path nor the url of a storage")
        attempt, contents = "", read.string("contents") if "contents" in read.doc else ""
        if not contents:
            attempt = read.attempt()
        elif not _DIGEST.fullmatch(contents):
            read.fail("'contents' is not a SHA-256 in hexadecimal")
        return cls(
            attempt,
            read.one_of("layout", LAYOUTS),
            read.one_of("compression", COMPRESSIONS),
            url,
            contents,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        identity = {"contents": self.contents} if self.contents else {"attempt": self.attempt}
        return {"url": self.url, **identity, "layout": self.layout, "compression": self.compression}


@dataclass(frozen=True, slots=True)
class InBase:
    """The place of a tensor that lies in a base."""

    base: Base
    name: str
    """The tensor's name in the base."""


def bases_of(record: dict[str, Any], where: str) -> list[Base]:
    """The bases of a commit record in its JSON form, without parsing its tensors.

    `where` is its file, for messages.
    """
    entries = Fields(record, where).sequence("bases") if "bases" in record else []
    return [
        Base.from_fields(Fields(entry, f"{where}: base {i}")) for i, entry in enumerate(entries)
    ]


def names_beside(urls: Iterable[str]) -> frozenset[str]:
    """Names of the bases that lie directly beside the checkpoint that names their urls.

    >>> sorted(names_beside(["../3", "../a%20b", "../other/4", "../other%2F5", "/run/6"]))
    ['3', 'a b']
    """
    below = (unquote(url.removeprefix(BESIDE)) for url in urls if url.startswith(BESIDE))
    return frozenset(name for name in below if "/" not in name)
