"""The wildcards in the patterns of a mapping, and the names that are built from their matches.

A pattern matches names and builds names: the captures of its wildcards in one name are inserted
into another.

    *         one part of a name: any characters but "." and "/"
    **        any characters at all, including none
    {layer}   one part of a name, too, which is identified by this word in all patterns of a rule

`*` and `**` are identified by their order: the first in one pattern is the first in all others. The
first wildcard captures as much as it can, then the second, and so on. A match takes at most (length
of the pattern x length of the name) steps; only a word that occurs twice in a pattern takes more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Captures = dict[str, str]
"""Wildcard → the text that it captured. The key is the wildcard's number among `*` and `**`, as
text, or its word."""

_WILDCARD = re.compile(r"(?P<all>\*\*+)|(?P<one>\*)|\{(?P<word>[^{}]*)\}")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of names.

    >>> pattern = NamePattern("layers.{layer}.*.weight")
    >>> pattern.match("layers.3.q_proj.weight")
    {'layer': '3', '0': 'q_proj'}
    >>> NamePattern("h.{layer}.*").fill({"layer": "3", "0": "q_proj"})
    'h.3.q_proj'

    Raises:
        OptionError: the text is not a valid pattern.
    """

    text: str
    keys: tuple[str, ...] = field(init=False, compare=False)
    """Keys of its wildcards, in order, each once."""
    _literals: tuple[str, ...] = field(init=False, compare=False, repr=False)
    _between: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Key of the wildcard after each literal except the last."""
    _any: tuple[bool, ...] = field(init=False, compare=False, repr=False)
    """Whether that wildcard is `**`."""

    def __post_init__(self) -> None:
        """Refuse a pattern that is not text, and braces without a word."""
        if not isinstance(self.text, str) or not self.text:
            raise OptionError(
                f"{shorten(self.text)} is not a pattern of names; give text such as "
                "'layers.*.weight'."
            )
        literals: list[str] = []
        keys: list[str] = []
        anything: list[bool] = []
        at = 0
        for match in _WILDCARD.finditer(self.text):
            key = (
                match["word"]
                if match["word"] is not None
                else str(sum(k.isdecimal() for k in keys))
            )
            if match["word"] is not None and not match["word"].isidentifier():
                raise OptionError(
                    f"{shorten(self.text)}: {shorten(match[0])} is not a wildcard; write "
                    "{word}, * or **."
                )
            literals.append(self.text[at : match.start()])
            anything.append(match["all"] is not None)
            keys.append(key)
            at = match.end()
        literals.append(self.text[at:])
        object.__setattr__(self, "_literals", tuple(literals))
        object.__setattr__(self, "_between", tuple(keys))
        object.__setattr__(self, "keys", tuple(dict.fromkeys(keys)))
        object.__setattr__(self, "_any", tuple(anything))

    def match(self, name: str) -> Captures | None:
        """The captures of the wildcards in a name; None: the pattern does not match."""
        if not (name.startswith(self._literals[0]) and name.endswith(self._literals[-1])):
            return None  # a quick test: a pattern matches few names
        ends = self._ends(name, self._starts(name))
        if ends is None:
            return None
        spans = zip([0, *ends], self._literals, ends, strict=False)
        return dict(
            zip(
                self._between,
                (name[at + len(literal) : end] for at, literal, end in spans),
                strict=True,
            )
        )

    def _starts(self, name: str) -> list[set[int]]:
        """For each literal, the places in a name from which the rest of the pattern matches.

        Repeated words are not compared here.
        """
        starts = [{len(name) - len(self._literals[-1])}]
        for literal, anything in zip(
            reversed(self._literals[:-1]), reversed(self._any), strict=True
        ):
            after, fitting, end = starts[-1], set(), False
            # `end`: whether a wildcard that begins here can end at a place of `after`.
            for at in range(len(name), -1, -1):
                end = end and (anything or (at < len(name) and name[at] not in "./"))
                end = end or (anything and at in after)
                begin = at - len(literal)
                if end and begin >= 0 and name.startswith(literal, begin):
                    fitting.add(begin)
                end = end or at in after
            starts.append(fitting)
        return starts[::-1]

    def _ends(self, name: str, starts: list[set[int]]) -> list[int] | None:
        """The end of each wildcard's capture; None: the pattern does not match.

        Only repeated words make it try again.
        """
        if 0 not in starts[0]:
            return None
        ends: list[int] = []
        options: list[Iterator[int]] = []
        while len(ends) < len(self._between):
            if len(options) == len(ends):
                options.append(self._options(name, starts, ends))
            end = next(options[-1], None)
            if end is not None:
                ends.append(end)
            elif not ends:
                return None
            else:
                options.pop()
                ends.pop()
        return ends

    def _options(self, name: str, starts: list[set[int]], ends: list[int]) -> Iterator[int]:
        """Yield the possible ends of the next capture, the longest first."""
        number = len(ends)
        begins = [
            at + len(literal) for at, literal in zip([0, *ends], self._literals, strict=False)
        ]
        begin, after = begins[number], starts[number + 1]
        first = self._between.index(self._between[number])
        if first < number:
            end = begin + ends[first] - begins[first]
            if end in after and name[begin:end] == name[begins[first] : ends[first]]:
                yield end
            return
        limit = len(name)
        if not self._any[number]:
            limit = next((at for at in range(begin, len(name)) if name[at] in "./"), len(name))
        yield from (end for end in range(limit, begin - self._any[number], -1) if end in after)

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name with the captures in place of the wildcards."""
        filled = (
            literal + captures[key]
            for literal, key in zip(self._literals, self._between, strict=False)
        )
        return "".join(filled) + self._literals[-1]

    def __str__(self) -> str:
        """The text of the pattern."""
        return self.text
