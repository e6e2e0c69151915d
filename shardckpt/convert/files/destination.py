"""The interface of a place that exported files are written to.

Nobody sees a file before it is complete.

A `Destination` receives bytes batch by batch. `begin` returns how much of the same plan an earlier
call has written. No file has its final name before `publish`. `local_files` is one implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardckpt.errors import AlreadyExistsError
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    BlockRuns = tuple[str, int, Sequence[tuple[int, int]]]
    """A block: tensor name (for messages), file, and offset and length of each of its byte runs."""

MODELS = ("model.safetensors", "model.safetensors.index.json")
"""Last file of a model of one file, and of several. A directory holds one of them, so exports of
both share the record of their progress."""


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
    blocks: Callable[[], Iterator[BlockRuns]]
    """All blocks in the order of writing. Headers are in no block."""


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
            Number of blocks, the first ones of the plan, that an earlier, interrupted call has made
            durable. Headers are written again; a destination that must be written in order skips
            the bytes that it has.

        Raises:
            AlreadyExistsError: a file exists, and may not be replaced.
            StorageError: the place cannot be written to, has no room, or another process is writing
                the same files.
        """
        ...

    def write(self, writes: Sequence[FileWrite], checks: Sequence[int]) -> None:
        """Write some bytes, in the order of the blocks.

        Args:
            writes: the bytes.
            checks: crc32c of each block that ends in `writes`, in order.

        Raises:
            StorageError: the write failed, or earlier writes could not be made durable.
        """
        ...

    def publish(self, *, verify: bool) -> None:
        """Make everything durable, and give the files their names, in order.

        The last file appears last.

        Args:
            verify: whether to read the bytes back first.

        Raises:
            AlreadyExistsError: another process has put a file there meanwhile.
            CorruptionError: the bytes read back differ from the bytes written.
            StorageError: it failed.
        """
        ...

    def abort(self, *, keep: bool) -> None:
        """Stop; `keep` leaves the written files so that a later call can continue."""
        ...


OVERWRITE = named("overwrite", True)


def already_exists(place: object) -> AlreadyExistsError:
    """The error for a file or directory that may not be replaced."""
    return AlreadyExistsError(
        Message(
            f"{place} is there already; choose another place, or replace it with ", OVERWRITE, "."
        )
    )
