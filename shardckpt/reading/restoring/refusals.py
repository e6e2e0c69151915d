"""Errors for leaves of another shape or dtype than the tensor's, and shared memory of leaves."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from operator import ge
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import DtypeMismatchError, ShapeMismatchError, StructureMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.io.url import Location

    Array = NDArray[np.generic]


def another_shape(
    name: str, location: Location, tensor: TensorRecord, sink: Sink
) -> ShapeMismatchError:
    """The error for a leaf of another shape than its tensor."""
    words = getattr(sink, "word_dims", 0)  # of JAX keys, whose own shape has no dimensions of words
    stored_shape, own_shape = (shape[: len(shape) - words] for shape in (tensor.shape, sink.shape))
    return ShapeMismatchError(
        f"{name}: {location} has shape {stored_shape}, the leaf to restore into has {own_shape}; "
        f"make them equal, {_fit_advice(name, tensor.shape, sink.shape, words)}or leave the "
        "tensor out with only=."
    )


def _fit_advice(name: str, stored: Sequence[int], own: Sequence[int], words: int) -> str:
    """The advice to fit a tensor of another size, where that is possible."""
    if len(stored) != len(own) or words:
        return ""
    if all(a <= b for a, b in zip(stored, own, strict=True)):
        return f"pass fit={{'{name}': 'pad'}} to fill the rest with zeros, "
    return (
        f"pass fit={{'{name}': 'slice'}} to restore its first part, "
        if all(map(ge, stored, own))
        else ""
    )


def another_dtype(
    name: str, location: Location, tensor: TensorRecord, sink: Sink, *, cast: bool
) -> DtypeMismatchError:
    """The error for a leaf of another dtype than its tensor, by whether `cast` was given."""
    if not cast:
        return DtypeMismatchError(
            f"{name}: {location} has dtype {tensor.dtype.name}, the leaf to restore into has "
            f"{sink.dtype.name}; pass cast=True to convert."
        )
    return DtypeMismatchError(
        f"{name}: {location} has dtype {tensor.dtype.name}, which cannot be converted to "
        f"{sink.dtype.name}; restore it as it is."
    )


def near_others(
    arrays: Sequence[Array], bounds: NDArray[np.int64], order: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """The bounds and the position of each array that may share memory with others.

    Args:
        arrays: the arrays.
        bounds: the first byte of each, and one past its last, in ascending order.
        order: the position in `arrays` for each of `bounds`.
    """
    reached = np.maximum.accumulate(bounds[:, 1])
    borders = [0, *(np.flatnonzero(bounds[1:, 0] >= reached[:-1]) + 1).tolist(), len(order)]
    for first, end in pairwise(borders):
        near = [(*bounds[i].tolist(), int(order[i])) for i in range(first, end)]
        if end - first > 1 and not _are_columns([(arrays[i], start) for start, _, i in near]):
            yield from near


def _are_columns(arrays: Sequence[tuple[Array, int]]) -> bool:
    """Whether arrays, each with its address, are columns of one matrix that share no element.

    Each then has the same bytes of every row.
    """
    widths, steps = zip(*(_rows(array) for array, _ in arrays), strict=True)
    row = gcd(*steps)
    if not row:
        return False
    columns = sorted((start % row, n) for (_, start), n in zip(arrays, widths, strict=True))
    ends = [*(start for start, _ in columns[1:]), columns[0][0] + row]
    return all(start + n <= end for (start, n), end in zip(columns, ends, strict=True))


def _rows(array: Array) -> tuple[int, int]:
    """The bytes of a row, and a number of which all distances of rows are multiples.

    A row is a part of the array without gaps. The number is 0 if there is one row.
    """
    width, step = array.itemsize, 0
    for stride, n in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if stride == width and not step:
            width *= n
        elif n > 1:
            step = gcd(step, stride)
    return width, step


def share_memory(a: Array, b: Array) -> bool:
    """Whether an element of one array lies in the memory of the other.

    True if that cannot be decided quickly.
    """
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]  # numpy takes any number here
    except np.exceptions.TooHardError:
        return True


def shared_memory(name: str, other: str) -> StructureMismatchError:
    """The error for two leaves that share memory, by their names."""
    return StructureMismatchError(
        f"{name}: in `like` it shares memory with {other}, so both cannot be restored in place; "
        "give each a tensor of its own. If they are one tied parameter that an imported file "
        "stored twice, import the file again with exclude= for one of the names, and restore with "
        "strict=False."
    )
