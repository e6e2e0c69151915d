"""A stored tensor that is read where it is indexed."""

from __future__ import annotations

from itertools import product
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import BudgetError
from shardckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.dtypes import DType

    ReadBoxes = Callable[[Sequence[Box], Sequence["NDArray[Any]"]], object]
    """Fills memory with the elements of boxes."""

MOST_BOXES = 1 << 16
"""Most boxes of one read. An index with steps that selects more is read together with what lies
between."""
BYTES_BETWEEN = 64 << 10
"""So many bytes for each box are read together with what lies between: a box takes longer."""
_MOST_BETWEEN = 256 << 20
"""Most bytes that are read together for this reason."""


class LazyArray:
    """A tensor of which indexing reads the selected part, as a numpy array.

    Read-only, and safe to use from several threads.

    >>> import shardckpt, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = shardckpt.save(f"{folder}/1", {"w": np.arange(12).reshape(3, 4)})
    ...     shardckpt.open(f"{folder}/1")["w"][1, ::2]
    array([4, 6])
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        sharding: StoredLayout | None,
        read: ReadBoxes,
        chunks: tuple[int, ...],
    ) -> None:
        """See `Checkpoint.__getitem__`.

        `read` gets memory with the dtype's numpy type, `chunks` is the shape of a chunk.
        """
        self.name = name
        self.shape = shape
        self.sharding = sharding
        """Layout when it was saved; None: plain."""
        self.chunks = chunks
        """Shape of a stored chunk."""
        self._dtype = dtype
        self._read = read

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what indexing returns; ml_dtypes has bfloat16 and fp8."""
        return self._dtype.numpy

    @property
    def dtype_name(self) -> str:
        """Name of the stored dtype, "bfloat16" for instance."""
        return self._dtype.name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return Box.full(self.shape).size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._dtype.itemsize

    def __len__(self) -> int:
        """Length of the first dimension."""
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Read one index of the first dimension after another."""
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> Any:
        """Compare each element with an array or a number, as numpy does; all elements are read.

        Raises:
            ValueError: the array has another shape; nothing is read.
        """
        operand = self._operand(other)
        return operand if operand is NotImplemented else np.asarray(self) == operand

    def __ne__(self, other: object) -> Any:
        """See `__eq__`."""
        operand = self._operand(other)
        return operand if operand is NotImplemented else np.asarray(self) != operand

    __hash__ = None  # type: ignore[assignment]  # like numpy's arrays

    def __bool__(self) -> bool:
        """The truth of the only element."""
        return bool(self._only_element())

    def __int__(self) -> int:
        """The only element."""
        return int(self._only_element())

    def __float__(self) -> float:
        """The only element."""
        return float(self._only_element())

    def __getitem__(self, index: Any) -> Any:
        """Read a part, selected by integers, slices (with steps) and an ellipsis, as in numpy.

        Raises:
            IndexError: the index lies outside the array, or has too many entries or others than
                these.
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged, gone, or
                cannot be read.
            BudgetError: there is no memory for the part.
        """
        key = index if isinstance(index, tuple) else (index,)
        dots = [entry for entry in key if entry is Ellipsis]
        chosen = [
            _choose(entry, n, self.name)
            for entry, n in zip(self._entries(key), self.shape, strict=True)
        ]
        ranges = [indices for indices, _ in chosen]
        out = self._cut(ranges) if self._reads_between(ranges) else self._read_separately(ranges)
        # With an ellipsis, numpy returns an array, also without dimensions.
        return out[(*(0 if scalar else slice(None) for _, scalar in chosen), *dots)]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """All elements."""
        if copy is False:
            raise ValueError(
                f"{self.name}: its elements are in a storage, so numpy must copy them; leave out "
                "copy=False"
            )
        elements: NDArray[Any] = np.asarray(self[...])
        return elements if dtype is None else elements.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """All elements, for `from_dlpack` of any framework."""
        return np.asarray(self).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""
        device: tuple[int, int] = np.empty(0).__dlpack_device__()
        return device

    def __repr__(self) -> str:
        """Name, shape and dtype."""
        return f"<LazyArray {self.name}: {self._dtype} {self.shape}>"

    def _repr_html_(self) -> str:
        """A drawing of the devices that held the parts, for notebooks."""
        from shardckpt.reading.inspection.display import tensor_html

        return tensor_html(self.name, self.shape, self._dtype.name, self.sharding, self.chunks)

    def _operand(self, other: Any) -> Any:
        """An array or number that elements are compared with; NotImplemented: it is neither."""
        if isinstance(other, Number):
            return other
        if not (hasattr(other, "__array__") or isinstance(other, list | tuple)):
            return NotImplemented
        np.broadcast_shapes(self.shape, np.shape(other))
        return np.asarray(other)

    def _only_element(self) -> Any:
        if self.size != 1:
            raise TypeError(
                f"{self.name}: an array of shape {self.shape} is not one number; read an element "
                "of it"
            )
        return self[(0,) * self.ndim]

    def _reads_between(self, ranges: Sequence[range]) -> bool:
        """Whether the selected elements are read together with what lies between."""
        boxes = _boxes(ranges)
        if not 1 < boxes <= MOST_BOXES:
            return boxes > MOST_BOXES
        nbytes = _around(ranges).size * self._dtype.itemsize
        return nbytes <= min(boxes * BYTES_BETWEEN, _MOST_BETWEEN)

    def _read_separately(self, ranges: Sequence[range]) -> NDArray[Any]:
        """Read the selected elements alone: one box for each combination of runs."""
        out = empty(self.name, tuple(map(len, ranges)), self.dtype)
        boxes, places = [], []
        for run in product(*map(_runs, ranges)) if out.size else ():
            boxes.append(
                Box(tuple(first for first, _, _ in run), tuple(last for _, last, _ in run))
            )
            inside: Any = (*(where for _, _, where in run), ...)
            places.append(out[inside])
        if boxes:
            self._read(boxes, places)
        return out

    def _cut(self, ranges: Sequence[range]) -> NDArray[Any]:
        """Read the box around the selected elements, and copy them out of it."""
        box = _around(ranges)
        around = empty(self.name, box.shape, self.dtype)
        self._read([box], [around])
        steps = zip(ranges, box.start, strict=True)
        cut = around[tuple(_slice(indices, first) for indices, first in steps)]
        out = empty(self.name, cut.shape, self.dtype)
        out[...] = cut
        return out

    def _entries(self, entries: tuple[Any, ...]) -> list[Any]:
        """One entry per dimension."""
        dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
        if len(dots) > 1 or len(entries) - len(dots) > self.ndim:
            raise IndexError(f"{self.name}: too many indices for the shape {self.shape}")
        at = dots[0] if dots else len(entries)
        return [
            *entries[:at],
            *[slice(None)] * (self.ndim - len(entries) + len(dots)),
            *entries[at + len(dots) :],
        ]


def _choose(entry: Any, n: int, name: str) -> tuple[range, bool]:
    """The indices that an entry selects in a dimension, and whether the dimension is dropped.

    The dimension has length `n`.
    """
    if isinstance(entry, slice):
        return range(*entry.indices(n)), False
    if isinstance(entry, int | np.integer) and not isinstance(entry, bool | np.bool_):
        if not -n <= entry < n:
            raise IndexError(
                f"{name}: index {entry} is out of bounds for a dimension of length {n}"
            )
        at = int(entry) % n
        return range(at, at + 1), True
    raise IndexError(f"{name}: index with integers, slices and ..., or read a part and index that")


def _boxes(ranges: Sequence[range]) -> int:
    """Boxes that have the selected elements alone."""
    return prod(
        len(indices) if abs(indices.step) > 1 else min(len(indices), 1) for indices in ranges
    )


def _around(ranges: Sequence[range]) -> Box:
    """The box around the selected elements; there is at least one."""
    return Box(
        tuple(min(indices[0], indices[-1]) for indices in ranges),
        tuple(max(indices[0], indices[-1]) + 1 for indices in ranges),
    )


def _slice(indices: range, first: int) -> slice:
    """The slice that selects some indices, not none, in a part that begins at `first`."""
    end = indices[-1] - first + (1 if indices.step > 0 else -1)
    return slice(indices.start - first, None if end < 0 else end, indices.step)


def _runs(indices: range) -> list[tuple[int, int, slice]]:
    """Adjacent selected indices: the first, one past the last, and their places in the result."""
    if len(indices) < 2 or indices.step == 1:
        return [(indices.start, indices.start + len(indices), slice(None))]
    if indices.step == -1:
        return [(indices[-1], indices[0] + 1, slice(None, None, -1))]
    return [(i, i + 1, slice(at, at + 1)) for at, i in enumerate(indices)]


def empty(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    advice: str = "read a smaller part of it",
) -> NDArray[Any]:
    """Allocate memory for a tensor; `advice` ends the message of the error.

    Raises:
        BudgetError: this machine has not enough memory, or the shape is larger than any memory.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as e:
        raise BudgetError(
            f"{name}: there is no memory for an array of {shape} ({e}); {advice}."
        ) from e
