"""Where are the elements of a tensor that its checkpoint does not hold itself?

A save may leave tensors out that are frozen and lie in another checkpoint, its *base*. The record then names, for each of
them, the base and the tensor's name there. A base is told by its url *and* by the attempt that its own record named at
the time: no attempt's name is ever given twice, so what takes the base's place is never mistaken for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from shardckpt.format.fields import COMPRESSIONS, LAYOUTS, Fields

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BESIDE", "Base", "InBase", "bases_of", "names_beside"]

BESIDE = "../"
"""How a relative url begins: at the directory that the checkpoint lies in, and never above it."""
_URL = re.compile(r"(?:\.\./|[a-z0-9]+://)[!-~]{1,8192}")


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that holds tensors of another one."""

    attempt: str
    """That its commit record named; equal for one base, by whatever url it is reached."""
    layout: str
    """"packed" or "zarr", as in its commit record."""
    compression: str | None
    """Of its chunks, likewise."""
    url: str = field(compare=False)
    """Percent-encoded: relative to the checkpoint where it lies below the same directory (`../0`), else with a scheme."""

    @classmethod
    def from_fields(cls, read: Fields) -> Base:
        """Inverse of `to_json`."""
        url = read.string("url")
        if not _URL.fullmatch(url):
            read.fail("'url' is neither ../ and a path nor the url of a storage")
        return cls(read.attempt(), read.one_of("layout", LAYOUTS), read.one_of("compression", COMPRESSIONS), url)

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"url": self.url, "attempt": self.attempt, "layout": self.layout, "compression": self.compression}


@dataclass(frozen=True, slots=True)
class InBase:
    """Where a tensor is that lies in a base."""

    base: Base
    name: str
    """The name that it is stored by there."""


def bases_of(record: dict[str, Any], where: str) -> list[Base]:
    """The bases of a commit record in its JSON form, without a look at its tensors; `where` is its file, for messages."""
    entries = Fields(record, where).sequence("bases") if "bases" in record else []
    return [Base.from_fields(Fields(entry, f"{where}: base {i}")) for i, entry in enumerate(entries)]


def names_beside(bases: Iterable[Base]) -> frozenset[str]:
    """Of bases those that lie directly beside the checkpoint that names them: their names."""
    below = (unquote(base.url.removeprefix(BESIDE)) for base in bases if base.url.startswith(BESIDE))
    return frozenset(name for name in below if "/" not in name)
