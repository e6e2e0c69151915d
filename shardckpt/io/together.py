"""Several small reads at once: on an object store each takes a round trip."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["AT_ONCE", "together"]

AT_ONCE = 16
"""Reads under way at a time."""

A = TypeVar("A")
B = TypeVar("B")


def together(read: Callable[[A], B], what: Iterable[A]) -> list[B]:
    """`read` of each, in order; the first error is raised when all that had begun have ended."""
    listed = list(what)
    if len(listed) < 2:
        return [read(one) for one in listed]
    with ThreadPoolExecutor(min(AT_ONCE, len(listed)), "shardckpt-together") as pool:
        return list(pool.map(read, listed))
