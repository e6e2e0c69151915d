"""What writes a state as another format: it says in which blocks it wants the tensors, and is given them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from shardckpt.box import Box
    from shardckpt.convert.outputs import OutputTensor
    from shardckpt.planning.plan import Piece

__all__ = ["StateWriter"]


class StateWriter(ABC):
    """A state being written. As a context it is published at the end, or removed after an error. For one thread."""

    notes: list[str]
    """What is not there, or not as it was, in a line each."""
    memory: int = 0
    """Bytes of buffers that it keeps."""

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
    def finish(self) -> None:
        """Complete it and publish it.

        Raises:
            MissingDataError: blocks are missing.
            AlreadyExistsError, StorageError: it cannot be published.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what is written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise
