"""What Python no longer does while it ends: once what `atexit` has is run, it starts no threads for anybody."""

from __future__ import annotations

from contextlib import contextmanager
from threading import main_thread
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_ending", "reading_takes_threads"]


def is_ending() -> bool:
    """Whether it is so."""
    return not main_thread().is_alive()


@contextmanager
def reading_takes_threads(place: object) -> Iterator[None]:
    """Goes around what reads from a place; little may be read without threads.

    Raises:
        StorageError: in place of the RuntimeError of a thread that cannot be started any more.
    """
    try:
        yield
    except RuntimeError as e:
        if isinstance(e, ShardckptError) or not is_ending():
            raise
        raise StorageError(
            f"cannot read {place}: Python is ending and starts no threads any more ({e}). "
            f"Read before the program ends, not in a function that `atexit` calls."
        ) from e
