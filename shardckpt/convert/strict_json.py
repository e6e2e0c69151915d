"""JSON from other programs: a parser that refuses ambiguity, and what a record can hold.

Duplicate keys, NaN and lone surrogates are ambiguous.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from shardckpt.format.documents import DEEPEST_METADATA, is_deeper
from shardckpt.text import shorten


def parse_json(raw: bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it cannot be parsed; the message says why.
    """
    try:
        return json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (RecursionError, MemoryError) as e:
        raise ValueError("it is too deep or too large") from e


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shorten(twice)} comes twice")
    for text in (*document, *(value for value in document.values() if isinstance(value, str))):
        text.encode()  # raises UnicodeEncodeError for a lone surrogate
    return document


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def is_json(value: object) -> bool:
    """Whether a record can hold a value.

    A metric may be NaN, and Python's reader makes an infinity of `1e999`.
    """
    try:
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return not is_deeper(value, DEEPEST_METADATA - 1)
