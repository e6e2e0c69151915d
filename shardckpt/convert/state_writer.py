"""The interface of a format that a state is written as: it names the blocks it wants, and is given them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import crc32c

from shardckpt.convert.files.read_back import read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from shardckpt.convert.files.draft import Draft
    from shardckpt.convert.files.read_back import WrittenRun
    from shardckpt.convert.streaming.outputs import OutputTensor
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece

__all__ = ["StateWriter"]


class StateWriter(ABC):
    """A state being written. As a context it is removed unless it was finished. For one thread."""

    notes: list[str]
    """What is not there, or not as it was, in a line each."""
    memory: int = 0
    """Bytes of buffers that it keeps."""
    checksum: Callable[[bytes, int], int] = staticmethod(crc32c.crc32c)
    """Of bytes, given that of the bytes before them."""
    _draft: Draft
    """What is being written."""
    _published: bool = False

    @abstractmethod
    def blocks(self, output: OutputTensor, stored: Sequence[Piece], room: int) -> Sequence[Piece]:
        """In which blocks it wants a tensor; see `streaming.Blocks`. Asked once for each that has elements, before any is put."""

    @abstractmethod
    def put(self, output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
        """Write one block.

        Args:
            output: whose it is, by name.
            box: a block of it.
            array: its elements, C-contiguous, in the dtype's storage type; the caller's again when this returns.

        Raises:
            StorageError: it cannot be written.
        """

    @abstractmethod
    def complete(self) -> Iterable[WrittenRun]:
        """Write what is still to be written, and make everything durable.

        Returns:
            The parts of the files that hold elements of tensors, with checksums by `checksum`.

        Raises:
            MissingDataError: blocks are missing.
            StorageError: it cannot be written.
        """

    def finish(self, *, verify: bool = True) -> None:
        """Complete it and publish it.

        Args:
            verify: whether to read back what was written before that.

        Raises:
            MissingDataError: blocks are missing.
            CorruptionError, StructureMismatchError: it does not read back as it was written.
            AlreadyExistsError, StorageError: it cannot be published.
        """
        parts = self.complete()
        if verify:
            read_back(parts, self.checksum)
            self.check_tree()
        self._draft.publish()
        self._published = True

    def check_tree(self) -> None:  # noqa: B027  # torch.save itself describes the state
        """Read the state's tree back, where it was written by us.

        Raises:
            StructureMismatchError: a tensor is not where it was.
        """

    def abort(self) -> None:
        """Remove what is written."""
        self._draft.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._published:
            self.abort()
