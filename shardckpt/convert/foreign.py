"""Tensors of checkpoints of other formats, and the structure that they form.

A structure has the contents of a checkpoint's record: the tree, the small leaves, and each tensor's
dtype, shape and pieces. A piece is a box that is stored in one grid of chunks. A chunk is the unit
of reading, so that each stored byte is read once: a chunk of the file, or, if a tensor is one run
of bytes, some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout.records import record
from shardckpt.plan.pieces import Piece, coverage_gap
from shardckpt.state import flatten
from shardckpt.state.names import array_path, piece_path, shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.dtypes import DType

ROWS_BYTES = 1 << 20
"""Bytes to which rows are joined for one read."""


@record
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


@dataclass(slots=True, eq=False)
class ForeignTensor:
    """A tensor leaf in the state that `structure_and_tensors` receives.

    It is not frozen, because that triples the time to make one.
    """

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


def structure_and_tensors(state: object, where: str) -> tuple[Structure, dict[str, ForeignTensor]]:
    """The structure of a state, and its tensors by name: shared tensors once.

    Args:
        state: nested dicts, lists and tuples of small leaves and `ForeignTensor`s.
        where: the file, for messages.

    Raises:
        LeafError: a leaf cannot be stored; the message names it.
        FormatError: the parts of a tensor do not cover it.
    """
    flat = flatten(state, lambda value: isinstance(value, ForeignTensor), _identity, _meaning)
    records = {name: _record(name, tensor, where) for name, tensor in flat.tensors.items()}
    return Structure(flat.tree, records), flat.tensors


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
