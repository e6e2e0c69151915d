"""A stored tensor that is read where it is indexed."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.dtypes import DType

    ReadBoxes = Callable[[Sequence[Box], Sequence["NDArray[Any]"]], object]
    """Fills memory with the elements of boxes."""

MOST_BOXES = 1 << 16
"""Most boxes of one read. An index with steps that selects more is read together with what lies
between."""


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

    def __getitem__(self, index: Any) -> Any:
        """Read a part, selected by integers, slices (with steps) and an ellipsis, as in numpy.

        Raises:
            IndexError: the index lies outside the array, or has too many entries or others than
                these.
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged, gone, or
                cannot be read.
        """
        chosen = [
            _choose(entry, n, self.name)
            for entry, n in zip(self._entries(index), self.shape, strict=True)
        ]
        out = np.empty([len(indices) for indices, _ in chosen], self.dtype)
        runs = [_runs(indices) for indices, _ in chosen]
        if (
            out.size
            and np.prod([len(runs_of_dimension) for runs_of_dimension in runs], dtype=float)
            <= MOST_BOXES
        ):
            boxes, places = [], []
            for run in product(*runs):
                boxes.append(
                    Box(tuple(first for first, _, _ in run), tuple(last for _, last, _ in run))
                )
                inside: Any = (*(where for _, _, where in run), ...)
                places.append(out[inside])
            self._read(boxes, places)
        elif out.size:
            start = tuple(min(indices) for indices, _ in chosen)
            box = Box(start, tuple(max(indices) + 1 for indices, _ in chosen))
            whole = np.empty(box.shape, self.dtype)
            self._read([box], [whole])
            out = whole[
                np.ix_(
                    *(np.array(indices) - a for (indices, _), a in zip(chosen, start, strict=True))
                )
            ]
        return out[tuple(0 if scalar else slice(None) for _, scalar in chosen)]

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
        return self[...].__dlpack__(**options)

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

    def _entries(self, index: Any) -> list[Any]:
        """One entry per dimension."""
        entries = list(index) if isinstance(index, tuple) else [index]
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


def _runs(indices: range) -> list[tuple[int, int, slice]]:
    """Adjacent selected indices: the first, one past the last, and their places in the result."""
    if len(indices) < 2 or indices.step == 1:
        return [(indices.start, indices.start + len(indices), slice(None))]
    if indices.step == -1:
        return [(indices[-1], indices[0] + 1, slice(None, None, -1))]
    return [(i, i + 1, slice(at, at + 1)) for at, i in enumerate(indices)]
