"""The interface that a format implements to be imported.

A `Foreign` is a checkpoint of another format, open. Its `structure` is what a checkpoint's record would say: the tree, the small
leaves, and each tensor's dtype, shape and pieces. A piece is a box that is stored in one grid of chunks; a chunk is what is read at
once, so that each stored byte is read once: what a file holds as a chunk, or, where a tensor is one run of bytes, some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardckpt.errors import FormatError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.plan.pieces import Piece, coverage_gap
from shardckpt.state import Flat, flatten
from shardckpt.state.names import array_path, piece_path, shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.span import StoredRun
    from shardckpt.format.structure import StoredLayout
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType

__all__ = ["Foreign", "ForeignPart", "ForeignTensor", "row_chunks", "structure_of", "tensors_of"]

ROWS_BYTES = 1 << 20
"""Bytes to which rows are joined to be read at once."""


class Foreign(Protocol):
    """A checkpoint of another format. Safe to use from several threads."""

    @property
    def format(self) -> str:
        """Its name, as `--from` takes it: "safetensors"."""
        ...

    @property
    def location(self) -> Location:
        """Where it lies."""
        ...

    @property
    def structure(self) -> Structure:
        """What it holds."""
        ...

    @property
    def identity(self) -> str:
        """Differs when any of its files does: a digest over names, sizes, times or checksums."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """JSON of what it says besides, to be the new checkpoint's metadata; small."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was seen, and what is left behind, in a line each."""
        ...

    def run(self, tensor: TensorRecord, piece: Piece) -> StoredRun | None:
        """Where the elements of a piece are, if they are one run of bytes in row-major order. None: only `read` reads them.

        Args:
            tensor: one of `structure.tensors`.
            piece: one of its pieces.

        Raises:
            MissingDataError, CorruptionError, StorageError: what should be there is not; names the tensor and the file.
        """
        ...

    def read(self, tensor: TensorRecord, piece: Piece, box: Box) -> NDArray[Any]:
        """The elements of one chunk, of dtype `tensor.dtype.storage`, of the box's shape; the caller does not write to them.

        Args:
            tensor: one of `structure.tensors`.
            piece: one of its pieces.
            box: one of the piece's chunks, clipped to it, in the tensor's indices.

        Raises:
            MissingDataError, CorruptionError, StorageError: what should be there is not; names the tensor and the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A box of a tensor that is stored in one grid of chunks."""

    start: tuple[int, ...]
    """The tensor's index of its first element."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of what is read at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTensor:
    """A tensor leaf in the state that `structure_of` is given."""

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[ForeignPart, ...]
    """Together they are the tensor, each element once."""
    layout: StoredLayout | None = None
    """How it was laid out over devices, where the format says it."""
    identity: Hashable = None
    """Equal for leaves that are the same memory: they are stored once. None: it is never shared."""
    meaning: str | None = None
    """What its elements are to a framework, e.g. `jax.key:threefry2x32`; None: the numbers that they are."""


def row_chunks(shape: Sequence[int], itemsize: int, nbytes: int = ROWS_BYTES) -> tuple[int, ...]:
    """Chunks for a tensor that is one run of bytes in row-major order: a power of two of whole rows, or planes, of at most so many bytes.

    >>> row_chunks((5000, 1000), 4)
    (256, 1000)
    """
    chunks, room = [1] * len(shape), max(1, nbytes // itemsize)
    for d in reversed(range(len(shape))):
        chunks[d] = max(1, shape[d])
        if shape[d] > room:
            chunks[d] = 1 << (room.bit_length() - 1)
            break
        room //= chunks[d]
    return tuple(chunks)


def structure_of(state: object, where: str) -> Structure:
    """The structure of a state of plain containers, small leaves, and `ForeignTensor`s.

    Args:
        state: nested dicts, lists and tuples.
        where: the file, for messages.

    Raises:
        LeafError: a leaf that cannot be stored; names it.
        FormatError: a tensor's parts do not make it.
    """
    flat = _flat(state)
    return Structure(flat.tree, {name: _record(name, tensor, where) for name, tensor in flat.tensors.items()})


def tensors_of(state: object) -> dict[str, ForeignTensor]:
    """The tensors of such a state by name, as `structure_of` records them: those that are stored once, once.

    Raises:
        LeafError: as there.
    """
    return _flat(state).tensors


def _flat(state: object) -> Flat:
    return flatten(state, lambda value: isinstance(value, ForeignTensor), _identity, _meaning)


def _identity(tensor: object) -> Hashable:
    assert isinstance(tensor, ForeignTensor)
    return tensor.identity


def _meaning(tensor: object) -> str | None:
    assert isinstance(tensor, ForeignTensor)
    return tensor.meaning


def _record(name: str, tensor: ForeignTensor, where: str) -> TensorRecord:
    whole = len(tensor.parts) == 1 and tensor.parts[0].shape == tensor.shape
    pieces = tuple(
        Piece(array_path(name) if whole else piece_path(name, tensor.shape, part.start), part.start, part.shape, part.chunks)
        for part in tensor.parts
    )
    gap = coverage_gap(tensor.shape, pieces)
    if gap is not None:
        raise FormatError(f"{where}: {shown(name)}: what is stored does not make the tensor of shape {tensor.shape}: {gap}.")
    return TensorRecord(name, tensor.shape, tensor.dtype, tensor.layout, pieces)
