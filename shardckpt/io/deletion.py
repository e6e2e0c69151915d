"""Deletion of everything below a location: of a directory on disk, or of the objects below a prefix."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from shardckpt.io.status import is_link
from shardckpt.io.threads import run_on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_DELETIONS = 32
"""Deletions in progress at a time."""


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; a link is removed, and its target stays."""
    if is_link(path):
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # It is gone already; or another process is deleting it too, and a second pass removes the rest.
        shutil.rmtree(path, ignore_errors=True)


def delete_objects(keys: Iterable[str], delete: Callable[[str], object]) -> None:
    """Delete objects, a few at a time; an object that is created meanwhile may stay.

    Args:
        keys: keys of the objects.
        delete: deletes one.
    """
    run_on_threads(keys, [delete] * MOST_DELETIONS, "shardckpt-delete")
