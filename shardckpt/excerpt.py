"""As much of a value as an error message can take, whatever the value is.

What a checkpoint or a caller hands us may be long, deep or a number of a million digits; the message that
refuses it must still be short, and making it must not raise.
"""

from __future__ import annotations

from reprlib import Repr

__all__ = ["excerpt", "shortened"]

_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = _SHORT.maxset = 8
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def excerpt(value: object, limit: int = 120) -> str:
    """The value's repr, at most `limit` characters of it.

    >>> excerpt(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, ...]'
    """
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # Python does not print integers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return shortened(text, limit)


def shortened(text: str, limit: int = 120) -> str:
    """The text, cut off where it has more than `limit` characters.

    >>> shortened("a long story", 7)
    'a long…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"
