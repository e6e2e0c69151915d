"""The zarr key of a chunk, and back: `model/w/c/0/1`.

The plain layout has an object for each, and a directory for each component: there `.__lock` at the end of one is written `=2E__lock`,
because TensorStore keeps that ending for its lock files. No array path has that in it otherwise. (In the packed layout keys are in an
index, and stay as they are.)
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError
from shardckpt.excerpt import excerpt
from shardckpt.format.zarr_meta import chunk_key

if TYPE_CHECKING:
    from shardckpt.plan.plan import Piece

__all__ = ["PLAIN_ROOT", "check_key", "chunk_object_key", "plain_key", "split_chunk_key", "unfit"]

PLAIN_ROOT = "zarr"
"""The zarr group of the plain layout, relative to the attempt."""
_LOCK = re.compile(r"\.__lock(?=/|\Z)")


def plain_key(key: str) -> str:
    """Where the plain layout has a chunk, a document or an array, relative to the attempt.

    >>> plain_key("model/w.__lock/c/0/1")
    'zarr/model/w=2E__lock/c/0/1'
    """
    return f"{PLAIN_ROOT}/{_LOCK.sub('=2E__lock', key) if '.__lock' in key else key}"


def chunk_object_key(piece: Piece, position: int) -> str:
    """The key of a chunk, relative to the root of the arrays.

    >>> from shardckpt.plan.plan import Piece
    >>> chunk_object_key(Piece("w", (0, 0), (4, 4), (2, 2)), 3)
    'w/c/1/1'
    """
    index = []
    for n in reversed(piece.grid):
        position, i = divmod(position, n)
        index.append(i)
    return f"{piece.path}/{chunk_key(index[::-1])}"


def split_chunk_key(key: str, pieces: dict[str, Piece]) -> tuple[Piece, int] | None:
    """The array and the position of a chunk; None where no array has such a chunk.

    >>> from shardckpt.plan.plan import Piece
    >>> w = Piece("w", (0, 0), (4, 4), (2, 2))
    >>> split_chunk_key("w/c/1/1", {"w": w})[1]
    3
    """
    # A scalar's one chunk is called "c"; a component of a name may be called so, too.
    if key.endswith("/c"):
        path, index = key[:-2], ""
    else:
        path, _, index = key.rpartition("/c/")
    piece = pieces.get(path)
    if piece is None:
        return None
    parts = index.split("/") if index else []
    if len(parts) != len(piece.grid) or not all(p.isdecimal() and p.isascii() and len(p) < 20 for p in parts):
        return None
    position = 0
    for i, n in zip(map(int, parts), piece.grid, strict=True):
        if i >= n:
            return None
        position = position * n + i
    # One key per chunk: "w/c/01" is none.
    return (piece, position) if prod(piece.grid) and chunk_object_key(piece, position) == key else None


def check_key(key: str, where: object) -> None:
    """Refuse a key that could leave the place it is relative to; a stranger's checkpoint may have given it to us.

    Raises:
        FormatError: it names nothing below `where`.
    """
    why = unfit(key)
    if why:
        raise FormatError(f"{excerpt(key)} names nothing below {where}: {why}.")


def unfit(path: str) -> str | None:
    """Why a slash-separated name cannot be kept by every store, None if it can."""
    if "\\" in path:
        return "TensorStore turns a backslash into a slash"
    if "\0" in path:
        return "it has a NUL in it"
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            return "it is not UTF-8"
    for name in path.split("/"):
        if name in ("", ".", ".."):
            return f"one of the names between its slashes is {name!r}"
        if name.endswith(".__lock"):
            return "names that end in .__lock are TensorStore's lock files"
    return None
