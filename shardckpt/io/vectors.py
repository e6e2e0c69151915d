"""Many pieces of memory in one call of the system: how many it takes, and what is left when it did less than was asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_VECTORS", "after", "scatter_read"]

MOST_VECTORS = 1000
"""Pieces per call, below the kernel's IOV_MAX of 1024."""


def after(vectors: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of some memory after so many bytes.

    >>> [bytes(rest) for rest in after([memoryview(b"abc"), memoryview(b"de")], 2)]
    [b'c', b'de']
    """
    for i, vector in enumerate(vectors):
        if nbytes < len(vector):
            return [vector[nbytes:], *vectors[i + 1 :]]
        nbytes -= len(vector)
    return []


def scatter_read(fd: int, offset: int, length: int, vectors: Sequence[memoryview]) -> None:
    """Fill all vectors from one place of a file; EOFError where it ends before."""
    while length:
        got = os.preadv(fd, vectors[:MOST_VECTORS], offset)
        if got == 0:
            raise EOFError
        offset, length = offset + got, length - got
        if length:
            vectors = after(vectors, got)
