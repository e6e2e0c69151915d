"""JSON that somebody else wrote, and that two readers would understand alike: no key twice in an object, no NaN, no half characters."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from shardckpt.excerpt import excerpt

__all__ = ["parse_json"]


def parse_json(raw: bytes) -> Any:
    """What a JSON document says.

    Raises:
        ValueError: it is none that can be read; says why.
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
        text.encode()  # half of a surrogate pair stands for no character
    return found


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")
