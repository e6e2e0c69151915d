"""The interface of a writer of a state: it chooses the blocks of each tensor, and receives them."""

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
    from shardckpt.convert.files.read_back import WrittenBlock
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.naming.outputs import OutputTensor


class StateWriter(ABC):
    """A state that is being written.

    As a context manager it removes the state unless it was finished. For one thread.
    """

    notes: list[str]
    """Parts of the state that are left out or changed, a line each."""
    memory: int = 0
    """Bytes of buffers that the writer keeps."""
    checksum: Callable[[memoryview, int], int] = staticmethod(crc32c.crc32c)
    """Computes a checksum of bytes, given the checksum of the bytes before them."""
    _draft: Draft
    """The file or directory in progress."""
    _published: bool = False

    @abstractmethod
    def blocks(self, output: OutputTensor, stored: Sequence[Piece], room: int) -> Sequence[Piece]:
        """The blocks of a tensor, see `streaming.stream.Blocks`.

        Called for each tensor with elements, before any `put`.
        """

    @abstractmethod
    def put(self, output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
        """Write one block.

        Args:
            output: the tensor of the block.
            box: the block, in the tensor's indices.
            array: its elements, C-contiguous, in the dtype's storage type; the caller may reuse the
                array when this returns.

        Raises:
            StorageError: the block cannot be written.
        """

    @abstractmethod
    def complete(self) -> Iterable[WrittenBlock]:
        """Write everything that is left, and make it durable.

        Returns:
            The blocks of the files that hold elements of tensors, with checksums by `checksum`.

        Raises:
            MissingDataError: blocks are missing.
            StorageError: the files cannot be written.
        """

    def finish(self, *, verify: bool = True) -> None:
        """Complete the state and publish it.

        Args:
            verify: whether to read back the written bytes before publishing.

        Raises:
            MissingDataError: blocks are missing.
            CorruptionError, StructureMismatchError: the bytes or the tree read back differ from
                those written.
            AlreadyExistsError, StorageError: the state cannot be published.
        """
        blocks = self.complete()
        if verify:
            read_back(blocks, self.checksum, self._draft.final)
            self.check_tree()
        self._draft.publish()
        self._published = True

    def check_tree(self) -> None:  # noqa: B027  # torch.save itself describes the state
        """Read back the state's tree, if this package wrote it.

        Raises:
            StructureMismatchError: a tensor is not at its place.
        """

    def abort(self) -> None:
        """Remove the written files."""
        self._draft.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._published:
            self.abort()
