"""Parser of JSON from other programs that refuses ambiguity: no duplicate key in an object, no NaN, no lone surrogates."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from shardckpt.excerpt import excerpt

__all__ = ["parse_json"]


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
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {excerpt(twice)} comes twice")
    for text in (*found, *(value for value in found.values() if isinstance(value, str))):
        text.encode()  # raises UnicodeEncodeError for a lone surrogate
    return found


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")
