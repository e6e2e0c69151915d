"""Matching of patterns with tensor names, or with the name of what a tensor belongs to.

Patterns are those of `only=` (`names.matches`): `*` within a component, `**` across components;
they match complete names. A pattern also applies to names *directly below* the names that it
matches, by "/" or by ".": the optimizer state below its parameter
(`optimizer/state/layers.0.w1.weight/exp_avg`), the weights below a module (`layers.0.w1` and its
`.weight`).

Most patterns match few names. The longest literal text in a pattern excludes nearly all names
(`literal`): the pattern runs only on names that contain this text.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache

from shardckpt.state.glob import compile_glob

_NOT_LITERAL = re.compile(r"/|\*+|\?|\[!?\]?[^\]]*\]")
"""The end of a literal text. A slash ends it too: DCP's "state." may follow the slash in a name,
but not in the name above it."""

_STATE = "state."


class Match(enum.Enum):
    """The match of a pattern with a name: the name itself, or the name above it."""

    WHOLE = "its name"
    """The pattern matches the name."""
    BELOW = "the name above it"
    """The pattern matches the name without its last part."""


def match(pattern: str, name: str) -> Match | None:
    """Match a pattern with a name; None: there is no match.

    Raises:
        OptionError: the pattern is invalid.

    >>> match("**/w1", "model/w1"), match("**/w1", "model/w1/a/b")
    (<Match.WHOLE: 'its name'>, None)
    >>> match("**/*.w1", "model/layers.0.w1.weight")
    <Match.BELOW: 'the name above it'>
    """
    if literal(pattern) not in name:
        return None
    glob = compile_glob(pattern)
    if glob.fullmatch(name):
        return Match.WHOLE
    return Match.BELOW if any(map(glob.fullmatch, owners(name))) else None


@lru_cache(maxsize=4096)
def owners(name: str) -> tuple[str, ...]:
    """The names directly above a name.

    They are the name without its last component, and without the last part of that component.

    DCP flattens optimizer state into `state.<parameter>.<state>`; the parameter counts as a name
    above it, too, because the name does not say whether `state` is a module.

    >>> owners("model/w.0/exp_avg"), owners("optim/state.w.exp_avg")
    (('model/w.0',), ('optim/state.w', 'optim/w', 'optim'))
    """
    directory, slash, last = name.rpartition("/")
    stem = last.rpartition(".")[0]
    stems = dict.fromkeys((stem, stem.removeprefix(_STATE)))
    return (*(directory + slash + one for one in stems if one), *((directory,) if slash else ()))


@lru_cache(maxsize=4096)
def literal(pattern: str) -> str:
    """The longest text, within one component, that every name with a match contains.

    >>> literal("**/layers.[0-3].*w1")
    'layers.'
    """
    return max(_NOT_LITERAL.split(pattern), key=len)
