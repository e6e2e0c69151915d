"""Parser of the text of an XLA OpSharding.

It is safe for hostile input: it counts before it allocates.

```
sharding ::= '{' 'replicated' | 'manual' | 'unknown' | 'unreduced' '}'
           | '{' 'maximal' 'device=' int '}'
           | '{' 'devices=' '[' ints ']' (ints | iota) subgroups? '}'
iota     ::= '<=' '[' ints ']' ('T' '(' ints ')')?
subgroups ::= 'last_tile_dim_replicate' | 'last_tile_dims=' '{' (type (',' type)*)? '}'
type     ::= 'replicated' | 'manual' | 'unreduced'
```

after `HloParserImpl::ParseSingleSharding` in XLA's `hlo_parser.cc`. Whitespace may stand between
any two words. Other constructs of XLA are refused by name: tuples, named meshes, `metadata=`,
`shard_as` and `shard_like` (the last three say nothing about where data is).

Every token is one match of a possessive regular expression, so that reading is linear in the text;
texts are limited to `MAX_TEXT` characters, integers to 18 digits, and devices to `MAX_DEVICES`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardckpt.errors import ShardingError
from shardckpt.layout.tile_assignment import MAX_DIMS, Iota, TileAssignment
from shardckpt.text import clip

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TEXT = 1 << 24
"""Characters: enough to list a million devices."""

_WORD = re.compile(r"\s*+([A-Za-z_][A-Za-z0-9_]*+)", re.ASCII)
_INTS = re.compile(r"\s*+([0-9]{1,18}+(?:\s*+,\s*+[0-9]{1,18}+)*+)(?![0-9])", re.ASCII)
_SPACE = re.compile(r"\s*+", re.ASCII)


class Kind(StrEnum):
    """The types of XLA's OpSharding, in the words of its text."""

    REPLICATED = "replicated"
    """Every device holds everything."""
    MAXIMAL = "maximal"
    """One device holds everything."""
    TILED = "tiled"
    """Devices hold tiles; XLA's OTHER. With subgroups, several devices hold the same tile."""
    MANUAL = "manual"
    """Inside a manually partitioned region: only the program knows."""
    UNREDUCED = "unreduced"
    """Partial sums that are still to be added up."""
    UNKNOWN = "unknown"
    """Not decided yet."""


class HloSharding(NamedTuple):
    """A parsed text."""

    kind: Kind
    tiles: TileAssignment | None
    subgroups: tuple[Kind, ...]


_WITHOUT_DEVICES = {Kind.REPLICATED, Kind.MANUAL, Kind.UNKNOWN, Kind.UNREDUCED}
_SUBGROUPS = {Kind.REPLICATED, Kind.MANUAL, Kind.UNREDUCED}
_BEYOND = {
    "metadata": "it says where the op came from, not where its data is: remove it",
    "shard_as": "a constraint between ops says nothing about where data is: remove it",
    "shard_like": "a constraint between ops says nothing about where data is: remove it",
    "mesh": "the named form of newer XLA is not read: give the mesh and the partition spec instead",
}


def parse_hlo(text: str) -> HloSharding:
    """Read one sharding.

    Raises:
        ShardingError: The text is not a sharding, or not a supported one; the message gives reason
            and place.
    """
    if not isinstance(text, str):
        raise ShardingError(
            f"OpSharding: expected text such as '{{replicated}}', found {type(text).__name__}."
        )
    if len(text) > MAX_TEXT:
        raise ShardingError(
            f"OpSharding: a text of {len(text)} characters; at most {MAX_TEXT} are read."
        )
    return _Reader(text).sharding()


class _Reader:
    """A position in a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def sharding(self) -> HloSharding:
        self.expect("{")
        if self.accept("{") or self.accept("}"):
            raise self.error("this is a tuple of shardings: give the sharding of one tensor")
        word = self.word()
        if word in _WITHOUT_DEVICES:
            sharding = HloSharding(Kind(word), None, ())
        elif word == Kind.MAXIMAL:
            sharding = HloSharding(Kind.MAXIMAL, self.maximal(), ())
        elif word == "devices":
            sharding = HloSharding(Kind.TILED, self.tiles(), self.subgroups())
        else:
            raise self.unknown(word, "replicated, maximal, manual, unknown, unreduced or devices=")
        if not self.accept("}"):
            raise self.unknown(self.word(), "'}'")
        if _SPACE.fullmatch(self.text, self.at) is None:
            raise self.error("nothing may follow the closing brace")
        return sharding

    def maximal(self) -> TileAssignment:
        if (word := self.word()) != "device":
            raise self.unknown(word, "device=")
        self.expect("=")
        devices = self.ints()
        if len(devices) != 1:
            raise self.error(f"maximal has one device, found {len(devices)}")
        return TileAssignment((1,), devices)

    def tiles(self) -> TileAssignment:
        self.expect("=")
        dims = self.bracketed("[", "]")
        if not self.accept("<="):
            return TileAssignment(dims, self.ints())
        sizes = self.bracketed("[", "]")
        if self.accept("T"):
            perm = self.bracketed("(", ")")
        elif len(sizes) == 1:
            perm = [0]
        else:
            raise self.error(f"an iota of {len(sizes)} dimensions needs its order, T(…)")
        return TileAssignment(dims, Iota(tuple(sizes), tuple(perm)))

    def subgroups(self) -> tuple[Kind, ...]:
        start = self.at
        match _WORD.match(self.text, self.at):
            case None:
                return ()
            case suffix:
                self.at = suffix.end()
        if suffix[1] == "last_tile_dim_replicate":
            return (Kind.REPLICATED,)
        if suffix[1] != "last_tile_dims":
            self.at = start
            raise self.unknown(self.word(), "last_tile_dim_replicate, last_tile_dims= or '}'")
        self.expect("=")
        self.expect("{")
        kinds: list[Kind] = []
        while not self.accept("}"):
            if kinds:
                self.expect(",")
            if (word := self.word()) not in _SUBGROUPS:
                raise self.unknown(word, "replicated, manual or unreduced")
            kinds.append(Kind(word))
        return tuple(kinds)

    def bracketed(self, opening: str, closing: str) -> list[int]:
        self.expect(opening)
        ints = self.ints()
        self.expect(closing)
        if len(ints) > MAX_DIMS:
            raise self.error(f"{len(ints)} dimensions, at most {MAX_DIMS} can be")
        dims: list[int] = ints.tolist()
        return dims

    def ints(self) -> NDArray[np.int64]:
        match = _INTS.match(self.text, self.at)
        if match is None:
            raise self.error("expected integers of at most 18 digits, from 0")
        self.at = match.end()
        # The expression has checked that this is digits and commas: no warning, no overflow.
        return np.fromstring(match[1], dtype=np.int64, sep=",")

    def word(self) -> str:
        match = _WORD.match(self.text, self.at)
        if match is None:
            raise self.error("expected a word")
        self.at = match.end()
        return match[1]

    def accept(self, token: str) -> bool:
        space = _SPACE.match(self.text, self.at)
        assert space is not None
        if not self.text.startswith(token, space.end()):
            return False
        self.at = space.end() + len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(f"expected {token!r}")

    def unknown(self, word: str, expected: str) -> ShardingError:
        if word in _BEYOND:
            return self.error(f"{word!r}: {_BEYOND[word]}")
        return self.error(f"found {word[:40]!r} where {expected} was expected")

    def error(self, what: str) -> ShardingError:
        return ShardingError(
            f"OpSharding text {clip(self.text)!r}: {what}, at character {self.at}."
        )
