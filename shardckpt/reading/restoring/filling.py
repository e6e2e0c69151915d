"""A restore without a `like`: tensors, or boxes of them, into given places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.options import DEFAULT_MEMORY_LIMIT
from shardckpt.reading.landing import restore_jobs
from shardckpt.reading.restore import read_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.frameworks.base import Sink
    from shardckpt.reading.checkpoint import Checkpoint


def fill(checkpoint: Checkpoint, places: Mapping[str, Sequence[tuple[str, Sink]]]) -> None:
    """Read tensors, or boxes of them, into given places, without a `like`.

    Args:
        checkpoint: the source.
        places: stored name → (name for messages, sink) of every destination of the tensor.
            Destinations differ in their tie keys.

    Raises:
        MismatchError: a sink has another shape or dtype than its tensor, or two different sinks
            share memory; nothing was read.
        ReplacedError, CorruptionError: as in `restore`.
    """
    read_all(
        checkpoint,
        DEFAULT_MEMORY_LIMIT,
        restore_jobs(
            checkpoint,
            ((checkpoint.tensor(stored), sinks) for stored, sinks in places.items()),
            cast=False,
        ),
        beside=(),
    )
