"""Patterns of names, matched in one pass over a name.

A pattern becomes a nondeterministic automaton with one state for each of its tokens. A set of
states is an integer with one bit for each state. So each character of a name costs a few operations
on integers that have as many bits as the pattern has tokens. Matching takes at most (length of the
pattern x length of the name) steps, with any wildcards. A regular expression with several wildcards
needs time exponential in their number. Computed transitions are kept (`_Row`): names resemble each
other, and most characters then cost one look-up.
"""

from __future__ import annotations

import re
from functools import lru_cache

from shardckpt.errors import OptionError

_TOKEN = re.compile(
    r"""(?P<components> (?:(?:(?<=/)|^)\*\*/)+ )  # complete components, in any number
      | (?P<all> \*\*+ ) | (?P<star> \* ) | (?P<one> \? )
      | (?P<set> \[ (?P<negated> !? ) (?P<members> \][^\]]* | [^\]]+ ) \] )
      | (?P<text> . )""",
    re.VERBOSE | re.DOTALL,
)
_WILDCARD = re.compile(r"[*?]|\[!?(?:\][^\]]*|[^\]]+)\]")
_RANGE_OR_ONE = re.compile(r"(.)-(.)|(.)", re.DOTALL)
"""The parts of a set of characters."""
_MOST_TRANSITIONS = 1024
"""Transitions that a pattern keeps; then it begins anew."""


class Glob:
    """A compiled pattern of names; `shardckpt.state.select.matches` describes the language.

    >>> Glob("model/layers.*.weight").fullmatch("model/layers.0.weight")
    True
    >>> Glob("a/**/b").fullmatch("a/b")
    True

    Raises:
        OptionError: the pattern has an invalid set of characters.
    """

    def __init__(self, pattern: str) -> None:
        """Compile a pattern."""
        literals = _WILDCARD.split(pattern)
        self._prefix, self._suffix = literals[0], literals[-1].lstrip("/")
        self._texts: dict[str, int] = {}
        self._sets: list[tuple[int, re.Pattern[str]]] = []
        self._one = self._star = self._all = self._skip = 0
        self._outside = self._inside = 0
        """The states of `**/`: at the beginning of a component, and inside one."""
        bit = 1
        for token in _TOKEN.finditer(pattern):
            if token["components"]:
                self._outside |= bit
                bit <<= 1
                self._inside |= bit
            elif token["all"]:
                self._all |= bit
            elif token["star"]:
                self._star |= bit
            elif token["one"]:
                self._one |= bit
            elif token["set"]:
                self._sets.append((bit, _characters(pattern, token)))
            else:
                self._texts[token["text"]] = self._texts.get(token["text"], 0) | bit
            bit <<= 1
        self._final = bit
        self._skip = self._all | self._star
        self._begin_anew()

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the complete name."""
        if not (name.startswith(self._prefix) and name.endswith(self._suffix)):
            return False  # a quick test: a pattern matches few names
        row = self._start
        for character in name:
            row = row[character]
        return bool(row.states & self._final)

    def _begin_anew(self) -> None:
        self.transitions = 0
        self._start = _Row(self, self._skip_wildcards(1), {})

    def _next(self, states: int, character: str) -> int:
        """The states after a character."""
        if character == "/":
            moved = states & (self._all | self._outside) | (states & self._inside) >> 1
        else:
            moved = states & (self._all | self._star | self._inside) | (states & self._outside) << 1
        return self._skip_wildcards(moved | (states & self._consumers(character)) << 1)

    def _consumers(self, character: str) -> int:
        """The states that one character leaves for the next state."""
        if character == "/":
            return self._texts.get(character, 0)
        fitting = self._one | self._texts.get(character, 0)
        for bit, characters in self._sets:
            if characters.match(character):
                fitting |= bit
        return fitting

    def _skip_wildcards(self, states: int) -> int:
        """The states, and those behind wildcards that may match nothing."""
        while True:
            more = states | (states & self._skip) << 1 | (states & self._outside) << 2
            if more == states:
                return states
            states = more


class _Row(dict[str, "_Row"]):
    """The transitions from one set of states; a missing one is computed."""

    __slots__ = ("_glob", "_rows", "states")

    def __init__(self, glob: Glob, states: int, rows: dict[int, _Row]) -> None:
        self._glob, self.states, self._rows = glob, states, rows

    def __missing__(self, character: str) -> _Row:
        glob = self._glob
        if glob.transitions >= _MOST_TRANSITIONS:
            glob._begin_anew()  # noqa: SLF001 - one object in two classes
            self._rows = {}
        states = glob._next(self.states, character)  # noqa: SLF001
        row = self._rows.get(states)
        if row is None:
            row = self._rows.setdefault(states, _Row(glob, states, self._rows))
        glob.transitions += 1
        self[character] = row
        return row


def is_glob(pattern: str) -> bool:
    """Whether a pattern has wildcards; without any, it matches itself alone."""
    return _WILDCARD.search(pattern) is not None


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> Glob:
    """A compiled pattern, from a cache.

    Raises:
        OptionError: the pattern has an invalid set of characters.
    """
    return Glob(pattern)


def _characters(pattern: str, token: re.Match[str]) -> re.Pattern[str]:
    members = _RANGE_OR_ONE.sub(
        lambda match: "-".join(re.escape(one) for one in match.groups() if one is not None),
        token["members"],
    )
    try:
        return re.compile(f"[{'^' if token['negated'] else ''}{members}]")
    except re.error as error:
        raise OptionError(
            f"{pattern!r} is not a pattern of names: {error.msg}. Write a bracket that stands for "
            "itself as '[[]'."
        ) from None
