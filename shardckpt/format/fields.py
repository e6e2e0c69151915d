"""Typed access to JSON that somebody else wrote: every member is checked before it is used."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.errors import FormatError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["COMPRESSIONS", "DEEPEST_METADATA", "LARGEST_DIMENSION", "LAYOUTS", "MOST_DIMENSIONS", "Fields", "is_deeper"]

_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
LAYOUTS = ("packed", "zarr")
COMPRESSIONS = (None, "zstd")

MOST_DIMENSIONS = 32
"""Of a tensor."""
LARGEST_DIMENSION = 1 << 62
"""Elements or bytes: beyond it, sizes do not fit 64-bit arithmetic."""
DEEPEST_METADATA = 200
"""Objects and lists of a user's metadata, one within the other, as for states: more is a mistake."""
DEEPEST_READ = 500
"""The same of what is read: earlier versions stored whatever Python's stack had room for, which was less than this."""


def is_deeper(value: object, most: int) -> bool:
    """Whether more than `most` dicts and lists lie one within the other, or one within itself; takes no stack.

    >>> is_deeper([[], {"a": [1]}], 3), is_deeper([[], {"a": [1]}], 2)
    (False, True)
    """
    level = _containers([value])
    for _ in range(most):
        if not level:
            break
        level = _containers(child for one in level for child in (one.values() if isinstance(one, dict) else one))
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    """The dicts, lists and tuples among values, each once."""
    return [*{id(value): value for value in values if isinstance(value, (dict, list, tuple))}.values()]


def _unfit(name: str) -> bool:
    """Whether no directory of ours has a member of that name; `.__lock` is TensorStore's own."""
    return name in ("", ".", "..") or name.endswith(".__lock")


class Fields:
    """Typed access to a JSON object that somebody else wrote."""

    def __init__(self, doc: Any, where: str) -> None:
        """Take `doc`, which must be an object; `where` is its file, for messages."""
        self.where = where
        if not isinstance(doc, dict):
            self.fail(f"a {type(doc).__name__} stands where an object is expected")
        self.doc: dict[str, Any] = doc

    def fail(self, why: str) -> NoReturn:
        """Raise FormatError, naming the file."""
        raise FormatError(f"{self.where}: {why}; the record was not written by shardckpt, or by a broken one.")

    def value(self, key: str) -> Any:
        """Any member; FormatError where there is none, as for all below."""
        if key not in self.doc:
            self.fail(f"{key!r} is missing")
        return self.doc[key]

    def _typed(self, key: str, kind: type, what: str) -> Any:
        value = self.value(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{key!r} is a {type(value).__name__}, {what} is expected")
        return value

    def string(self, key: str) -> str:
        """A string."""
        return str(self._typed(key, str, "a string"))

    def integer(self, key: str) -> int:
        """A whole number from 0 to 2**62."""
        value = int(self._typed(key, int, "a whole number"))
        if not 0 <= value <= LARGEST_DIMENSION:
            self.fail(f"{key!r} is {excerpt(value)}, which is out of range")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object."""
        return dict(self._typed(key, dict, "an object"))

    def metadata(self) -> dict[str, Any]:
        """What the user gave to `SaveOptions(metadata=…)`."""
        found = self.mapping("metadata")
        if is_deeper(found, DEEPEST_READ):
            self.fail(f"its metadata has more than {DEEPEST_READ} objects and lists, one within the other")
        return found

    def sequence(self, key: str) -> list[Any]:
        """A list."""
        return list(self._typed(key, list, "a list"))

    def one_of(self, key: str, allowed: Sequence[str | None]) -> Any:
        """One of a few values."""
        value = self.value(key)
        if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
            self.fail(f"{key!r} is {excerpt(value)}, one of {allowed} is expected")
        return value

    def pick(self, key: str, choices: Sequence[Any]) -> Any:
        """The entry of a list that a member refers to by position."""
        i = self.integer(key)
        if i >= len(choices):
            self.fail(f"{key!r} refers to entry {i} of {len(choices)}")
        return choices[i]

    def dimensions(self, key: str, *, least: int) -> tuple[int, ...]:
        """Sizes or indices of a tensor, each at least `least`, together addressable."""
        values = self.sequence(key)
        if len(values) > MOST_DIMENSIONS or not all(type(n) is int and least <= n <= LARGEST_DIMENSION for n in values):
            self.fail(f"{key!r} is {excerpt(values)}, at most {MOST_DIMENSIONS} whole numbers >= {least} are expected")
        if prod(max(n, 1) for n in values) > LARGEST_DIMENSION:
            self.fail(f"{key!r} is {excerpt(values)}, more elements than can be addressed")
        return tuple(values)

    def keys(self, key: str) -> list[str]:
        """A list of paths below the attempt."""
        values = self.sequence(key)
        for v in values:
            self.inside(key, v)
        return values

    def attempt(self) -> str:
        """The member `attempt`: the name of one."""
        attempt = self.string("attempt")
        if not _ATTEMPT.fullmatch(attempt) or attempt.endswith(".__lock"):
            self.fail(f"the attempt {excerpt(attempt)} is not a plain directory name")
        return attempt

    def inside(self, key: str, path: Any) -> str:
        """`path`, if it names something below the attempt."""
        if not isinstance(path, str) or not path.isprintable() or "\\" in path or any(map(_unfit, path.split("/"))):
            self.fail(f"{key!r} names {excerpt(path)}, which lies outside the attempt")
        return str(path)
