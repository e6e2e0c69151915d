"""The interface of a place that exported files are written to; nobody sees a file before it is complete.

A `Destination` is given what to write, batch by batch. `begin` says how far an earlier call came, if it did the same; nothing is under
its final name before `publish`. `local_files` is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Destination", "FileWrite", "WritePlan"]


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Bytes that lie side by side in a file."""

    file: int
    """Its number."""
    offset: int
    """Of the first of them."""
    data: memoryview
    """Good until the call that they are given to returns."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What will be written."""

    identity: bytes
    """32 bytes that differ if anything does: source, files, blocks and their order."""
    sizes: Sequence[int]
    """Bytes of each file."""
    blocks: Callable[[], Iterator[Sequence[tuple[str, int, int, int]]]]
    """All blocks in the order in which they are written, each with its runs of bytes: what it holds (for messages), file, offset and
    length. Headers are in no block."""


class Destination(Protocol):
    """Where some files are written. For one thread."""

    @property
    def in_order(self) -> bool:
        """Whether the bytes of a file must come from front to back, and one file after another."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of buffers that it keeps."""
        ...

    def begin(self, plan: WritePlan) -> int:
        """Take up the work.

        Returns:
            How many blocks an earlier call that was interrupted has written, and are durable: the first ones of the plan. Headers
            are written anew; one that must be in order leaves out what it has.

        Raises:
            AlreadyExistsError: a file is there, and is not to be replaced.
            StorageError: it cannot be written to, there is no room, or somebody else is writing the same.
        """
        ...

    def write(self, writes: Sequence[FileWrite]) -> None:
        """Write some bytes, in the order of the blocks.

        Raises:
            StorageError: it failed.
        """
        ...

    def wrote(self, checks: Sequence[int]) -> None:
        """Take note of the blocks that are written since the last call.

        Args:
            checks: crc32c of each.

        Raises:
            StorageError: what was written before could not be made durable.
        """
        ...

    def finish(self, *, verify: bool) -> None:
        """Make everything durable, and read it back if that is wanted.

        Raises:
            CorruptionError: it does not read back as it was written.
            StorageError: it failed.
        """
        ...

    def publish(self) -> None:
        """Give the files their names, the last of them last.

        Raises:
            AlreadyExistsError: somebody else has put a file there meanwhile.
            StorageError: it failed.
        """
        ...

    def abort(self, *, keep: bool) -> None:
        """Give up; `keep` leaves what a later call can go on with, if there is anything."""
        ...
