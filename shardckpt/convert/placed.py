"""Open checkpoints of other formats: a known place for each piece of each tensor.

A format that is imported makes a state whose tensors have their places, and `place_tensors` makes a
`Foreign` of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardckpt.convert.foreign import ForeignPart, ForeignTensor, structure_and_tensors
from shardckpt.convert.span import StoredRun
from shardckpt.convert.strided import read_box, run_of, strided_chunks
from shardckpt.errors import CorruptionError, DtypeError, FormatError, extend
from shardckpt.format.documents import LARGEST_DIMENSION
from shardckpt.io.threads import collector_paused
from shardckpt.layout.box import Box
from shardckpt.layout.dtypes import by_name, of_numpy
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.files.file_version import FileVersion
    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.formats.torch.objects import PickledTensor
    from shardckpt.convert.span import Span
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.foreign_arrays import ForeignArray
    from shardckpt.io.url import Location
    from shardckpt.layout.dtypes import DType
    from shardckpt.plan.pieces import Piece


class Place(Protocol):
    """The place of a part of a tensor. Safe to use from several threads."""

    def run(self, dtype: DType) -> StoredRun | None:
        """The stored run of the part, if its bytes are one run in row-major order.

        Raises the errors of `read`.
        """
        ...

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        """The elements of a box, in the part's own indices, of dtype `dtype.storage`.

        Raises:
            CorruptionError, FormatError, MissingDataError, StorageError: the elements cannot be
                read; the message names the file.
        """
        ...


@dataclass(slots=True, eq=False)
class PlacedTensor(ForeignTensor):
    """A tensor with the places of its parts."""

    places: tuple[Place, ...] = ()
    """One place for each part."""


@dataclass(slots=True, eq=False)
class RowMajor:
    """The place of a part whose elements are one run of bytes, in row-major order."""

    span: Span
    shape: tuple[int, ...]
    """Shape of the part."""

    def run(self, dtype: DType) -> StoredRun | None:
        """All its bytes; see `Place`."""
        del dtype
        return StoredRun(self.span, None)

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        """The elements of a box of complete rows or planes, which is one run of bytes, too."""
        first = 0
        for i, n in zip(box.start, self.shape, strict=True):
            first = first * n + i
        begin, size = first * dtype.itemsize, box.size * dtype.itemsize
        return np.frombuffer(self.span.read(begin, begin + size), dtype.storage).reshape(box.shape)


@dataclass(frozen=True, slots=True, eq=False)
class VersionedArray:
    """The place of an encoded array, as long as a file that is written with it stays the same.

    TensorStore opens chunks by itself, and does not notice that they are of another array.
    """

    array: ForeignArray
    file: FileVersion
    """A file that every writer of the array replaces."""

    def run(self, dtype: DType) -> StoredRun | None:
        """None: chunks of zarr arrays are encoded."""
        del dtype
        return None

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        """See `Place`; ReplacedError if the file has changed."""
        try:
            return self.array.read(box).view(dtype.storage)
        finally:
            self.file.read(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """A checkpoint of another format. Safe to use from several threads."""

    format: str
    """Name of the format, as `--from` expects it: "safetensors"."""
    location: Location
    structure: Structure
    """The tree, small leaves and tensors of the checkpoint."""
    identity: str
    """A digest over names, sizes, times or checksums of the files.

    It changes when any of the files does."""
    notes: tuple[str, ...]
    """Messages about the files found and the parts left behind, a line each."""
    metadata: Mapping[str, Any]
    """Further small JSON of the checkpoint, which becomes metadata of the new one."""
    identify: Callable[[], str] | None
    """Computes the identity anew; None: each file is checked when it is opened."""
    _places: Mapping[tuple[str, tuple[int, ...]], Place]
    """By the tensor's name and the start of the piece."""

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
        with naming(tensor.name):
            return self._places[tensor.name, piece.start].run(tensor.dtype)

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
        inside = Box(_less(box.start, piece.start), _less(box.stop, piece.start))
        with naming(tensor.name):
            return self._places[tensor.name, piece.start].read(inside, tensor.dtype)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the name of a tensor or leaf to errors."""
    try:
        yield
    except (CorruptionError, FormatError, DtypeError) as e:
        extend(e, before=f"{shown(name)}: ")
        raise


@collector_paused()
def place_tensors(
    state: object,
    format: str,  # noqa: A002
    location: Location,
    identity: str,
    notes: Sequence[str],
    metadata: Mapping[str, Any] | None = None,
    identify: Callable[[], str] | None = None,
) -> Foreign:
    """A checkpoint of a state of plain containers, small leaves, and `PlacedTensor`s.

    Raises:
        LeafError: a leaf cannot be stored.
        FormatError: the parts of a tensor do not cover it.
    """
    structure, tensors = structure_and_tensors(state, str(location))
    places = {
        (name, part.start): place
        for name, tensor in tensors.items()
        if isinstance(tensor, PlacedTensor)
        for part, place in zip(tensor.parts, tensor.places, strict=True)
    }
    return Foreign(
        format, location, structure, identity, tuple(notes), metadata or {}, identify, places
    )


def place_array(array: NDArray[Any]) -> PlacedTensor:
    """A tensor for a small array in memory.

    Raises:
        DtypeError: the array's dtype cannot be stored.
    """
    dtype = of_numpy(array.dtype)
    array = np.ascontiguousarray(array, dtype.numpy).reshape(array.shape)
    return PlacedTensor(
        array.shape, dtype, (ForeignPart.whole(array.shape),), places=(_Held(array),)
    )


def place_pickled(file: TorchFile, tensor: PickledTensor) -> PlacedTensor:
    """A tensor in a file of `torch.save`.

    Raises:
        DtypeError: the tensor's dtype cannot be stored.
        FormatError: it is too large to be addressed.
        CorruptionError: it has more elements than its storage in the file.
    """
    dtype = by_name(tensor.dtype.name)
    file.check_count(tensor.storage, 1 if tensor.storage.dtype is None else dtype.itemsize)
    if prod(max(n, 1) for n in tensor.shape) * dtype.itemsize > LARGEST_DIMENSION:
        raise FormatError(f"has a shape {tensor.shape} of more bytes than can be addressed")
    chunks = strided_chunks(tensor.shape, tensor.strides, dtype.itemsize)
    tied = (str(file.span), tensor) if 0 not in tensor.shape else None
    return PlacedTensor(
        tensor.shape,
        dtype,
        (ForeignPart.whole(tensor.shape, chunks),),
        identity=tied,
        places=(_Stored(file, tensor),),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    array: NDArray[Any]

    def run(self, dtype: DType) -> StoredRun | None:
        del dtype
        return None

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        return self.array[box.slices].view(dtype.storage)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    file: TorchFile
    tensor: PickledTensor

    def run(self, dtype: DType) -> StoredRun | None:
        return run_of(self.file.storage(self.tensor.storage), self.tensor, dtype.itemsize)

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        return read_box(self.file.storage(self.tensor.storage), self.tensor, dtype.storage, box)


def _less(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))
