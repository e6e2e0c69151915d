"""Durations as text, parsed and formatted. Pure, and fast to import."""

from __future__ import annotations

import re

from shardckpt.errors import OptionError

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d)?\s*", re.ASCII)


def parse_duration(text: str, what: str) -> float:
    """Seconds from text such as "24h", "30min" or "1.5 d"; only 0 needs no unit.

    >>> parse_duration("24h", "--grace"), parse_duration("0", "--grace")
    (86400.0, 0.0)

    Raises:
        OptionError: the text is invalid; names the option, `what`.
    """
    match = _DURATION.fullmatch(text)
    if match is None or (match[2] is None and float(match[1])):
        raise OptionError(f'{what} {text!r}: give a number and a unit (s, min, h, d), such as "24h".')
    return float(match[1]) * _UNITS[match[2] or "s"]
