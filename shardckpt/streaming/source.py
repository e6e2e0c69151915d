"""The interface of a checkpoint that can be resharded: a shardckpt checkpoint, or a foreign one.

`shardckpt.Checkpoint` implements it, and its URL names it. A `SourceSpec` names any foreign
checkpoint; workers receive the spec and open it themselves. An import is a reshard of a foreign
checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.url import Location
    from shardckpt.reading.reader import ChunkReader, ReadStats


class OpenSource(Protocol):
    """A checkpoint that is open for reading."""

    @property
    def location(self) -> Location:
        """Place of the checkpoint."""

    @property
    def native(self) -> bool:
        """Whether it is a shardckpt checkpoint; a foreign one has foreign chunk shapes."""

    @property
    def record(self) -> CheckpointRecord:
        """Record of the contents. Its `attempt` differs whenever anything stored there differs."""

    @property
    def reader(self) -> ChunkReader:
        """Reader of the elements. Safe to use from several threads."""

    @property
    def stats(self) -> ReadStats:
        """Statistics of the reads so far."""

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """Limit the resources of reading; called before the first chunk is read.

        Args:
            threads: number of reader threads; None: as many as memory allows.
            memory: bytes of reads in progress; a smaller value means smaller reads, and fewer
                concurrent requests to an object store.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Context manager around all reads.

        It distinguishes a checkpoint that was replaced or deleted from a damaged one.

        Raises:
            ReplacedError: an error inside was caused by a replacement or deletion.
        """

    def check_unchanged(self) -> None:
        """Check that everything that was read is of one version of the source.

        Raises:
            ReplacedError: the source has changed since it was opened.
        """

    def process_values(self, process: int) -> dict[str, Any]:
        """A process's own values from the save (`PerProcess`), by name, not decoded."""


class SourceSpec(Protocol):
    """The name of a checkpoint; small, can be pickled, and equal specs mean the same checkpoint."""

    @property
    def url(self) -> str:
        """URL of the checkpoint."""

    def open(self) -> OpenSource:
        """Open the checkpoint.

        Raises:
            NotFoundError, FormatError: there is no checkpoint, or it cannot be read.
        """


def open_source(source: str | SourceSpec) -> OpenSource:
    """Open a checkpoint: a shardckpt checkpoint by its URL, a foreign one by its spec."""
    return Checkpoint(source) if isinstance(source, str) else source.open()


def place_of(source: str | SourceSpec) -> Location:
    """Place of a source."""
    return parse(source if isinstance(source, str) else source.url)
