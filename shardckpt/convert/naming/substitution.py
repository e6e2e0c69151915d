r"""The `s/regex/replacement/` of a rename: a substitution in a name, as sed makes it in a line.

s/^model\.//            the character after the s is the delimiter; with a backslash before it, it is part of the text
s/\.w([13])\./.ff\1./   the regex is Python's (`re`); \1 … \9 in the replacement are its groups, & is the complete match
s/layer/block/gi        g: replace all matches, not only the first; i: ignore case
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt

__all__ = ["Substitution"]

LONGEST = 1000
"""Most characters of a substitution, and of a name that it is applied to: some expressions need time exponential in them."""
_FLAGS = {"g": 0, "i": re.IGNORECASE}
_REPLACED = re.compile(r"\\(\d)|\\(.)|(&)|([^\\&]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Substitution:
    r"""A parsed substitution.

    >>> Substitution(r"s/^layers\.(\d+)/h.\1/").of("layers.3.w")
    'h.3.w'

    Raises:
        OptionError: the text is not a valid substitution.
    """

    text: str
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _replacement: tuple[int | str, ...] = field(init=False, repr=False, compare=False)
    """Group numbers and texts of the replacement, in order."""
    _count: int = field(init=False, repr=False, compare=False)
    """Most replacements in a name; 0: all."""

    def __post_init__(self) -> None:
        """Parse the text."""
        text = self.text
        if not isinstance(text, str) or len(text) < 2 or text[0] != "s" or text[1].isalnum() or text[1] in "\\\n ":
            raise OptionError(f"rename={excerpt(text)}: write it as sed does, s/regex/replacement/.")
        if len(text) > LONGEST:
            raise OptionError(f"rename={excerpt(text)}: it has {len(text)} characters, and at most {LONGEST} are read; use several.")
        parts = _parts(text[2:], text[1])
        if len(parts) != 3:
            raise OptionError(f"rename={excerpt(text)}: {text[1]!r} has to stand three times, as in s{text[1]}regex{text[1]}new{text[1]}.")
        regex, replacement, flags = parts
        odd = [flag for flag in flags if flag not in _FLAGS or flags.count(flag) > 1]
        if odd:
            raise OptionError(f"rename={excerpt(text)}: {odd[0]!r} is no flag, or there twice; there are g (everywhere) and i (any case).")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about syntax that may change in a later Python
                compiled = re.compile(regex, sum(_FLAGS[flag] for flag in flags))
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(f"rename={excerpt(text)}: {excerpt(regex)} is no regular expression: {error}.") from error
        tokens = tuple(_token(found) for found in _REPLACED.finditer(replacement))
        group = max((token for token in tokens if isinstance(token, int)), default=0)
        if group > compiled.groups:
            raise OptionError(f"rename={excerpt(text)}: \\{group} is no group of {excerpt(regex)}, which has {compiled.groups}.")
        object.__setattr__(self, "_regex", compiled)
        object.__setattr__(self, "_replacement", tokens)
        object.__setattr__(self, "_count", 0 if "g" in flags else 1)

    def of(self, name: str) -> str | None:
        """The renamed name; None if the regex does not match.

        Raises:
            OptionError: the name is too long to be safe.
        """
        if len(name) > LONGEST:
            raise OptionError(f"rename={excerpt(self.text)}: a name of {len(name)} characters is too long for it: {excerpt(name)}.")
        renamed, times = self._regex.subn(self._replaced, name, count=self._count)
        return renamed if times else None

    def _replaced(self, found: re.Match[str]) -> str:
        return "".join(token if isinstance(token, str) else found[token] or "" for token in self._replacement)

    def __str__(self) -> str:
        """The text of the substitution."""
        return self.text


def _parts(text: str, delimiter: str) -> list[str]:
    """The parts of a text between delimiters; a delimiter after a backslash does not count."""
    parts, escaped = [""], False
    for character in text:
        if character == delimiter and not escaped:
            parts.append("")
            continue
        # A backslash before the delimiter is removed; any other belongs to the regex or the replacement.
        parts[-1] = parts[-1][:-1] + character if escaped and character == delimiter else parts[-1] + character
        escaped = character == "\\" and not escaped
    return parts


def _token(found: re.Match[str]) -> int | str:
    digit, escaped, ampersand, text = found.groups()
    if digit or ampersand:
        return int(digit or 0)
    return str(escaped or text)
