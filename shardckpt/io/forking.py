"""Forks of a process that has used TensorStore: its threads are not there, and a call would hang, or end the process."""

from __future__ import annotations

import os

from shardckpt.errors import CoordinationError

__all__ = ["begin_use", "check_fork"]

_used = False
"""Whether this process, or one that it was forked from, has used TensorStore."""
_forked = False
"""Whether this process was forked from one that had."""


def _note_fork() -> None:
    global _forked  # noqa: PLW0603  (of this process)
    _forked = _used


os.register_at_fork(after_in_child=_note_fork)


def begin_use(place: object) -> None:
    """Note that TensorStore is about to be used; raises what `check_fork` raises."""
    global _used  # noqa: PLW0603  (of this process)
    check_fork(place)
    _used = True


def check_fork(place: object) -> None:
    """Refuse to work in a fork that came too late.

    Raises:
        CoordinationError: this process was forked from one that had used shardckpt.
    """
    if _forked:
        raise CoordinationError(
            f"{place}: this process was forked from one that had used shardckpt, whose threads are not here; start it with "
            f'multiprocessing.get_context("spawn"), or fork before the first checkpoint is read or written.'
        )
