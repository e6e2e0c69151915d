"""The interface of a checkpoint that can be resharded: one of ours, or a foreign one.

One of ours does it by itself (`shardckpt.Checkpoint`), and is named by its url. Any other is named by a `SourceSpec`, which workers
are sent and open for themselves: an import is a reshard of what somebody else has stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.url import Location
    from shardckpt.reading.locate import Request
    from shardckpt.reading.reader import ReadStats

__all__ = ["OpenSource", "Reader", "SourceSpec", "open_source", "place_of"]


class Reader(Protocol):
    """Reads stored elements. Safe to use from several threads."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers; each stored chunk is read once.

        Raises:
            MissingDataError, CorruptionError, StorageError: what is needed is not there, damaged, or cannot be read.
        """
        ...

    def reads(self, groups: Sequence[Sequence[Request]]) -> Sequence[Callable[[], None]]:
        """A call for each group of requests that does what `read` does with it; buffers are written to when it is made."""
        ...


class OpenSource(Protocol):
    """A checkpoint that is open for reading."""

    @property
    def location(self) -> Location:
        """Where it lies."""
        ...

    @property
    def record(self) -> CheckpointRecord:
        """What it holds. Its `attempt` is another one whenever anything that is stored there differs."""
        ...

    @property
    def reader(self) -> Reader:
        """Reads its elements."""
        ...

    @property
    def stats(self) -> ReadStats:
        """What reading took so far."""
        ...

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """Say what reading may take, before the first chunk is read.

        Args:
            threads: how many read at once; None: as many as there is memory for.
            memory: bytes of what is being read; less of it means smaller reads, and fewer at a time from an object store.
        """
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Goes around all reading: tells a checkpoint that was replaced or deleted meanwhile from one that is damaged.

        Raises:
            ReplacedError: what was raised inside is because of that.
        """
        ...

    def process_values(self, process: int) -> dict[str, Any]:
        """What a process owned by itself when it saved (`PerProcess`), by name, not decoded."""
        ...


class SourceSpec(Protocol):
    """Which checkpoint is meant; small, can be pickled, and equal specs mean the same."""

    @property
    def url(self) -> str:
        """Where it lies."""
        ...

    def open(self) -> OpenSource:
        """Open it.

        Raises:
            NotFoundError, FormatError: there is none, or none that can be read.
        """
        ...


def open_source(source: str | SourceSpec) -> OpenSource:
    """Open a checkpoint: one of ours by its url, any other by its spec."""
    return Checkpoint(source) if isinstance(source, str) else source.open()


def place_of(source: str | SourceSpec) -> Location:
    """Where it lies."""
    return parse(source if isinstance(source, str) else source.url)
