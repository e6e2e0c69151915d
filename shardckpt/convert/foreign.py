"""The interface that a format implements to be imported.

A `Foreign` is an open checkpoint of another format. Its `structure` has the contents of a
checkpoint's record: the tree, the small leaves, and each tensor's dtype, shape and pieces. A piece
is a box that is stored in one grid of chunks. A chunk is the unit of reading, so that each stored
byte is read once: a chunk of the file, or, if a tensor is one run of bytes, some of its rows.
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
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.span import StoredRun
    from shardckpt.format.structure import StoredLayout
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType

ROWS_BYTES = 1 << 20
"""Bytes to which rows are joined for one read."""


class Foreign(Protocol):
    """A checkpoint of another format. Safe to use from several threads."""

    @property
    def format(self) -> str:
        """Name of the format, as `--from` expects it: "safetensors"."""
        ...

    @property
    def location(self) -> Location:
        """Location of the checkpoint."""
        ...

    @property
    def structure(self) -> Structure:
        """The tree, small leaves and tensors of the checkpoint."""
        ...

    @property
    def identity(self) -> str:
        """A digest over names, sizes, times or checksums of the files.

        It changes when any of the files does.
        """
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Further small JSON of the checkpoint, which becomes metadata of the new one."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Messages about the files found and the parts left behind, a line each."""
        ...

    @property
    def identify(self) -> Callable[[], str] | None:
        """Computes the identity anew; None: each file is checked when it is opened."""
        ...

    def run(self, tensor: TensorRecord, piece: Piece) -> StoredRun | None:
        """The stored run of a piece, if its elements are one run of bytes in row-major order.

        None: only `read` can read them.

        Args:
            tensor: one of `structure.tensors`.
            piece: one of its pieces.

        Raises:
            MissingDataError, CorruptionError, StorageError: stored bytes are missing; the message
                names the tensor and the file.
        """
        ...

    def read(self, tensor: TensorRecord, piece: Piece, box: Box) -> NDArray[Any]:
        """Read the elements of one chunk, of dtype `tensor.dtype.storage` and the box's shape.

        The caller must not write to them.

        Args:
            tensor: one of `structure.tensors`.
            piece: one of its pieces.
            box: one of the piece's chunks, clipped to the piece, in the tensor's indices.

        Raises:
            MissingDataError, CorruptionError, StorageError: stored bytes are missing; the message
                names the tensor and the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A box of a tensor that is stored in one grid of chunks."""

    start: tuple[int, ...]
    """Index of its first element in the tensor."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of a chunk, the unit of reading."""

    @classmethod
    def whole(cls, shape: tuple[int, ...], chunks: tuple[int, ...] | None = None) -> ForeignPart:
        """A complete tensor; in one chunk, unless `chunks` is given."""
        return cls((0,) * len(shape), shape, tuple(max(1, n) for n in chunks or shape))


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTensor:
    """A tensor leaf in the state that `structure_of` receives."""

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[ForeignPart, ...]
    """Parts that cover each element of the tensor once."""
    layout: StoredLayout | None = None
    """Layout over devices, if the format records it."""
    identity: Hashable = None
    """Equal for leaves that share their memory: they are stored once. None: the leaf is never
    shared."""
    meaning: str | None = None
    """Meaning of its elements to a framework, e.g. `jax.key:threefry2x32`; None: plain numbers."""


def row_chunks(shape: Sequence[int], itemsize: int, nbytes: int = ROWS_BYTES) -> tuple[int, ...]:
    """Chunk shape for a tensor that is one row-major run of bytes.

    A chunk is a power of two of complete rows, or planes, and has at most `nbytes`.

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
        LeafError: a leaf cannot be stored; the message names it.
        FormatError: the parts of a tensor do not cover it.
    """
    flat = _flat(state)
    return Structure(
        flat.tree, {name: _record(name, tensor, where) for name, tensor in flat.tensors.items()}
    )


def tensors_of(state: object) -> dict[str, ForeignTensor]:
    """The tensors of such a state by name, as `structure_of` records them: shared tensors once.

    Raises:
        LeafError: as in `structure_of`.
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
        Piece(
            array_path(name) if whole else piece_path(name, tensor.shape, part.start),
            part.start,
            part.shape,
            part.chunks,
        )
        for part in tensor.parts
    )
    gap = coverage_gap(tensor.shape, pieces)
    if gap is not None:
        raise FormatError(
            f"{where}: {shown(name)}: its stored parts do not form the tensor of shape "
            f"{tensor.shape}: {gap}."
        )
    return TensorRecord(name, tensor.shape, tensor.dtype, tensor.layout, pieces)
