"""The wildcards in the patterns of a mapping, and the names that are built from their matches.

A pattern matches names and builds names: the captures of its wildcards in one name are inserted into another.

    *         one part of a name: any characters but "." and "/"
    **        any characters at all, including none
    {layer}   one part of a name, too, which is identified by this word in all patterns of a rule

`*` and `**` are identified by their order: the first in one pattern is the first in all others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

Captures = dict[str, str]
"""Wildcard → the text that it captured. The key is the wildcard's number among `*` and `**`, as text, or its word."""

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
    _regex: re.Pattern[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a pattern that is not text, and braces without a word."""
        if not isinstance(self.text, str) or not self.text:
            raise OptionError(f"{excerpt(self.text)} is no pattern of names; give text such as 'layers.*.weight'.")
        literals: list[str] = []
        keys: list[str] = []
        regex, at = "", 0
        for found in _WILDCARD.finditer(self.text):
            key = found["word"] if found["word"] is not None else str(sum(k.isdecimal() for k in keys))
            if found["word"] is not None and not found["word"].isidentifier():
                raise OptionError(f"{excerpt(self.text)}: {excerpt(found[0])} is no wildcard; write {{word}}, * or **.")
            literals.append(self.text[at : found.start()])
            regex += re.escape(literals[-1])
            group = f"c{keys.index(key)}" if key in keys else f"c{len(keys)}"
            regex += f"(?P={group})" if key in keys else f"(?P<{group}>{'.*' if found['all'] else '[^./]+'})"
            keys.append(key)
            at = found.end()
        literals.append(self.text[at:])
        object.__setattr__(self, "_literals", tuple(literals))
        object.__setattr__(self, "_between", tuple(keys))
        object.__setattr__(self, "keys", tuple(dict.fromkeys(keys)))
        object.__setattr__(self, "_regex", re.compile(regex + re.escape(literals[-1]), re.DOTALL))

    def match(self, name: str) -> Captures | None:
        """The captures of the wildcards in a name; None: the pattern does not match."""
        if not (name.startswith(self._literals[0]) and name.endswith(self._literals[-1])):
            return None  # a quick test: a pattern matches few names
        found = self._regex.fullmatch(name)
        return None if found is None else dict(zip(self.keys, found.groups(), strict=True))

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name with the captures in place of the wildcards."""
        filled = (literal + captures[key] for literal, key in zip(self._literals, self._between, strict=False))
        return "".join(filled) + self._literals[-1]

    def __str__(self) -> str:
        """The text of the pattern."""
        return self.text
