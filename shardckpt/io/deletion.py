"""Deletion of everything below a location: of a directory on disk, or of the objects below a prefix."""

from __future__ import annotations

import shutil
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_DELETIONS = 64
"""Deletions in progress at a time."""


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; a link is removed, and its target stays."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # It is gone already; or another process is deleting it too, and a second pass removes the rest.
        shutil.rmtree(path, ignore_errors=True)


def delete_objects(keys: Iterable[str], begin: Callable[[str], Any]) -> None:
    """Delete objects, a few at a time; an object that is created meanwhile may stay.

    Args:
        keys: keys of the objects.
        begin: begins a deletion, and returns its future.
    """
    under_way: deque[Any] = deque()
    for key in keys:
        if len(under_way) >= MOST_DELETIONS:
            under_way.popleft().result()
        under_way.append(begin(key))
    for deletion in under_way:
        deletion.result()
