"""The interface of a place that exported files are written to; nobody sees a file before it is complete.

A `Destination` receives bytes batch by batch. `begin` returns how much of the same plan an earlier call has written. No file has its
final name before `publish`. `local_files` is one implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Destination", "FileWrite", "WritePlan"]


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Contiguous bytes of a file."""

    file: int
    """Number of the file."""
    offset: int
    """Offset of the first byte in the file."""
    data: memoryview
    """The bytes; valid until the call that receives them returns."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The files and blocks that will be written."""

    identity: bytes
    """32 bytes that change with the source, the files, the blocks or their order."""
    sizes: Sequence[int]
    """Bytes of each file."""
    blocks: Callable[[], Iterator[Sequence[tuple[str, int, int, int]]]]
    """All blocks in the order of writing. Each block has runs of bytes: tensor name (for messages), file, offset and length. Headers are
    in no block."""


class Destination(Protocol):
    """A place where files are written. For one thread."""

    @property
    def in_order(self) -> bool:
        """Whether the bytes of a file must come from front to back, and one file after another."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of buffers that the destination keeps."""
        ...

    def begin(self, plan: WritePlan) -> int:
        """Start the plan, or continue an earlier call of the same plan.

        Returns:
            Number of blocks, the first ones of the plan, that an earlier, interrupted call has made durable. Headers are written again; a
            destination that must be written in order skips the bytes that it has.

        Raises:
            AlreadyExistsError: a file exists, and may not be replaced.
            StorageError: the place cannot be written to, has no room, or another process is writing the same files.
        """
        ...

    def write(self, writes: Sequence[FileWrite]) -> None:
        """Write some bytes, in the order of the blocks.

        Raises:
            StorageError: the write failed.
        """
        ...

    def wrote(self, checks: Sequence[int]) -> None:
        """Record the blocks that were written since the last call.

        Args:
            checks: crc32c of each block.

        Raises:
            StorageError: earlier writes could not be made durable.
        """
        ...

    def finish(self, *, verify: bool) -> None:
        """Make everything durable, and with `verify` read it back.

        Raises:
            CorruptionError: the bytes read back differ from the bytes written.
            StorageError: it failed.
        """
        ...

    def publish(self) -> None:
        """Give the files their names, in order, so that the last file appears last.

        Raises:
            AlreadyExistsError: another process has put a file there meanwhile.
            StorageError: it failed.
        """
        ...

    def abort(self, *, keep: bool) -> None:
        """Stop; `keep` leaves the written files so that a later call can continue."""
        ...
