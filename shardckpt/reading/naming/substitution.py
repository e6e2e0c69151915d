r"""Substitutions in names: the `s/regex/replacement/` of a rename, and prefixes that are removed.

A substitution is written as sed's:

s/^model\.//           the character after the s is the delimiter; with a backslash before it, it is
                       part of the text
s/\.w([13])\./.ff\1./  the regex is Python's (`re`); \1 … \9 in the replacement are its groups, & is
                       the complete match; a backslash before another letter is an error
s/layer/block/gi       g: replace all matches, not only the first; i: ignore case
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.state.names import shown
from shardckpt.text import Message, named, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.text import NamedOption

LONGEST = 1000
"""Most characters of a substitution, and of a name that it is applied to: some expressions need
time exponential in them."""
_FLAGS = {"g": 0, "i": re.IGNORECASE}
_REPLACED = re.compile(r"\\(\d)|\\(.)|(&)|([^\\&]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Substitution:
    r"""A substitution in names.

    >>> parse_substitution(r"s/^layers\.(\d+)/h.\1/").of("layers.3.w")
    'h.3.w'
    >>> without_prefix("model/", named("prefix", "model/")).of("model.norm")
    'norm'
    """

    origin: NamedOption
    """The option that it was made of, for messages."""
    regex: re.Pattern[str]
    replacement: tuple[int | str, ...] = ()
    """Group numbers and texts, in order."""
    count: int = 1
    """Most replacements in a name; 0: all."""
    longest: float = math.inf
    """Most characters of a name."""

    def of(self, name: str) -> str | None:
        """The renamed name; None if the regex does not match.

        Raises:
            OptionError: the name is too long to be safe.
        """
        if len(name) > self.longest:
            raise OptionError(
                Message(
                    self.origin,
                    f": a name of {len(name)} characters is too long for it: {shorten(name)}.",
                )
            )
        renamed, times = self.regex.subn(self._text, name, count=self.count)
        return renamed if times else None

    def changes(self, present: Mapping[str, str]) -> dict[str, str | None]:
        """The names that change.

        Args:
            present: name in the source → present name.

        Returns:
            Name in the source → new name.

        Raises:
            OptionError: no name changes.
        """
        renamed = {old: self.of(name) for old, name in present.items()}
        changed = {old: name for old, name in renamed.items() if name is not None}
        if not changed:
            first = shown(next(iter(present.values()), ""))
            raise OptionError(
                Message(
                    self.origin,
                    f": it matches none of {len(present)} names, such as {first}; correct it.",
                )
            )
        return {**changed}

    def _text(self, match: re.Match[str]) -> str:
        return "".join(
            token if isinstance(token, str) else match[token] or "" for token in self.replacement
        )


def without_prefix(prefix: str, origin: NamedOption) -> Substitution:
    """The substitution that removes a prefix such as "model/", or "model.", which is the same."""
    return Substitution(
        origin, re.compile(rf"\A(?:{re.escape(prefix)}|{re.escape(prefix.replace('/', '.'))})")
    )


def parse_substitutions(rename: object) -> tuple[Substitution, ...]:
    """Parse the option `rename`: one substitution, or several in order.

    Raises:
        OptionError: it is anything else.
    """
    texts = (rename,) if isinstance(rename, str) else rename
    if not isinstance(texts, list | tuple):
        raise OptionError(
            Message(named("rename", rename), ": give s/regex/replacement/, or a list of them.")
        )
    return tuple(map(parse_substitution, texts))


def parse_substitution(text: object) -> Substitution:
    """Parse `s/regex/replacement/`.

    Raises:
        OptionError: the text is not a valid substitution.
    """
    origin = named("rename", text)
    if (
        not isinstance(text, str)
        or len(text) < 2
        or text[0] != "s"
        or text[1].isalnum()
        or text[1] in "\\\n "
    ):
        raise OptionError(Message(origin, ": write it as sed does, s/regex/replacement/."))
    if len(text) > LONGEST:
        raise OptionError(
            Message(
                origin,
                f": it has {len(text)} characters, and at most {LONGEST} are read; use several.",
            )
        )
    parts = _parts(text[2:], text[1])
    if len(parts) != 3:
        example = f"s{text[1]}regex{text[1]}new{text[1]}"
        raise OptionError(
            Message(origin, f": the separator {text[1]!r} must occur three times, as in {example}.")
        )
    regex, replacement, flags = parts
    odd = [flag for flag in flags if flag not in _FLAGS or flags.count(flag) > 1]
    if odd:
        raise OptionError(
            Message(
                origin,
                f": {odd[0]!r} is not a flag, or is repeated; the flags are g (everywhere) and i "
                "(any case).",
            )
        )
    try:
        with warnings.catch_warnings():
            # About syntax that may change in a later Python.
            warnings.simplefilter("ignore", FutureWarning)
            compiled = re.compile(regex, sum(_FLAGS[flag] for flag in flags))
    except (re.error, RecursionError, OverflowError) as error:
        raise OptionError(
            Message(origin, f": {shorten(regex)} is not a regular expression: {error}.")
        ) from error
    matched = [*_REPLACED.finditer(replacement)]
    unknown = next((match[0] for match in matched if (match[2] or "").isalpha()), None)
    if unknown is not None:
        raise OptionError(
            Message(
                origin,
                f": {unknown} has no meaning in a replacement; \\1 to \\9 are groups, and & is the "
                "match.",
            )
        )
    tokens = tuple(map(_token, matched))
    group = max((token for token in tokens if isinstance(token, int)), default=0)
    if group > compiled.groups:
        raise OptionError(
            Message(
                origin, f": there is no group \\{group}: {shorten(regex)} has {compiled.groups}."
            )
        )
    return Substitution(origin, compiled, tokens, 0 if "g" in flags else 1, LONGEST)


def _parts(text: str, delimiter: str) -> list[str]:
    """The parts of a text between delimiters; a delimiter after a backslash does not count."""
    parts, escaped = [""], False
    for character in text:
        if character == delimiter and not escaped:
            parts.append("")
            continue
        # A backslash before the delimiter is removed; any other belongs to the regex or the
        # replacement.
        parts[-1] = (
            parts[-1][:-1] + character
            if escaped and character == delimiter
            else parts[-1] + character
        )
        escaped = character == "\\" and not escaped
    return parts


def _token(match: re.Match[str]) -> int | str:
    digit, escaped, ampersand, text = match.groups()
    if digit or ampersand:
        return int(digit or 0)
    return str(escaped or text)
