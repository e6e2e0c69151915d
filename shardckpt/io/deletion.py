"""Deletion of everything below a place: of a directory on disk, or of the objects below a prefix."""

from __future__ import annotations

import shutil
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_DELETIONS = 64
"""Deletions under way at a time."""


def remove_tree(path: Path) -> None:
    """Remove a directory and all below it; a link is removed, what it points to stays."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # Gone already; or somebody else is deleting it, too, and then what is left goes in a second round.
        shutil.rmtree(path, ignore_errors=True)


def delete_objects(keys: Iterable[str], begin: Callable[[str], Any]) -> None:
    """Delete objects, a few at a time; an object that is added meanwhile may stay.

    Args:
        keys: of the objects.
        begin: begins a deletion, and returns its future.
    """
    under_way: deque[Any] = deque()
    for key in keys:
        if len(under_way) >= MOST_DELETIONS:
            under_way.popleft().result()
        under_way.append(begin(key))
    for deletion in under_way:
        deletion.result()
