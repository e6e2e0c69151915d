"""Does a pattern mean a tensor, and by its own name or by that of what it belongs to?

Patterns are those of `only=` (`names.matches`): `*` within a component, `**` across, whole names. A pattern also means
what lies *directly below* the names that it matches, by "/" or by ".": the state of an optimizer below its parameter
(`optimizer/state/layers.0.w1.weight/exp_avg`), the weights below a module (`layers.0.w1` and its `.weight`).

Most patterns mean few names, and nearly all are told apart by the longest literal text in the pattern, which must be in
the name (`literal`): only where it is does the regular expression run.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache

from shardckpt.state.names import pattern_regex

__all__ = ["Match", "literal", "match", "owners"]

_NOT_LITERAL = re.compile(r"/|\*+|\?|\[!?\]?[^\]]*\]")
"""What ends a text: a slash, too, for DCP's "state." may stand behind it in a name and not in what that lies below."""

_STATE = "state."


class Match(enum.Enum):
    """How a pattern means a name."""

    WHOLE = "its name"
    """The pattern matches the name."""
    BELOW = "what it lies below"
    """The pattern matches the name without its last part."""


def match(pattern: str, name: str) -> Match | None:
    """How the pattern means the name, if it does.

    Raises:
        OptionError: the pattern is none.

    >>> match("**/w1", "model/w1"), match("**/*.w1", "model/layers.0.w1.weight"), match("**/w1", "model/w1/a/b")
    (<Match.WHOLE: 'its name'>, <Match.BELOW: 'what it lies below'>, None)
    """
    if literal(pattern) not in name:
        return None
    regex = pattern_regex(pattern)
    if regex.fullmatch(name):
        return Match.WHOLE
    return Match.BELOW if any(map(regex.fullmatch, owners(name))) else None


@lru_cache(maxsize=4096)
def owners(name: str) -> tuple[str, ...]:
    """What a name lies directly below: without its last component, and without the last part of that.

    DCP flattens the state of an optimizer into `state.<parameter>.<state>`; that lies below the parameter.

    >>> owners("model/w.0/exp_avg"), owners("optim/state.layers.0.w.exp_avg")
    (('model/w.0',), ('optim/layers.0.w', 'optim'))
    """
    directory, slash, last = name.rpartition("/")
    stem = last.rpartition(".")[0].removeprefix(_STATE)
    return (*((directory + slash + stem,) if stem else ()), *((directory,) if slash else ()))


@lru_cache(maxsize=4096)
def literal(pattern: str) -> str:
    """The longest text, within one component, that is in every name that the pattern means.

    >>> literal("**/layers.[0-3].*w1")
    'layers.'
    """
    return max(_NOT_LITERAL.split(pattern), key=len)
