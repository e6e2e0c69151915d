"""A box, a half-open n-dimensional index range, and operations on many boxes at once.

One box is a `Box`, two tuples of ints. Many boxes are two int64 arrays of shape (n, ndim), `start`
and `stop`, because planning code never loops over devices or chunks in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from operator import index, sub

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import OptionError
from shardckpt.text import shorten

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open n-dimensional index range: `start[d] <= i[d] < stop[d]` in every dimension d.

    Raises:
        OptionError: an index is not an integer, `start` and `stop` differ in length, or
            0 <= start <= stop does not hold.

    Examples:
        >>> Box((0, 4), (2, 8)).shape
        (2, 4)
        >>> Box((0, 4), (2, 8)).overlap(Box((1, 0), (3, 6)))
        Box(start=(1, 4), stop=(2, 6))
    """

    start: tuple[int, ...]
    """First index, per dimension."""
    stop: tuple[int, ...]
    """End of the range, per dimension; not part of the box."""

    def __post_init__(self) -> None:
        """Refuse ranks that differ, negative starts and stops before starts."""
        try:
            object.__setattr__(self, "start", tuple(map(index, self.start)))
            object.__setattr__(self, "stop", tuple(map(index, self.stop)))
        except TypeError as e:
            raise OptionError(
                f"Box: start {shorten(self.start)} and stop {shorten(self.stop)} must be tuples of "
                "integers."
            ) from e
        if len(self.start) != len(self.stop):
            raise OptionError(
                f"Box: start has {len(self.start)} dimensions and stop has {len(self.stop)}; give "
                "both the same rank."
            )
        for d, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= a <= b:
                raise OptionError(
                    f"Box: 0 <= start <= stop must hold. Dimension {d}: start {a}, stop {b}."
                )

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """The box of a complete tensor with this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the range, per dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index for numpy arrays: one slice per dimension."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The common part of two boxes; None if they share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def contains(self, other: Box) -> bool:
        """Whether every index of `other` is in this box."""
        return other.size == 0 or all(
            a <= c and d <= b
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def __str__(self) -> str:
        """The box in numpy's notation, such as `[0:2, 4:8]`."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def with_range(box: Box, d: int, first: int, last: int) -> Box:
    """A box with another range of dimension d.

    >>> str(with_range(Box((0, 0), (4, 4)), 1, 2, 3))
    '[0:4, 2:3]'
    """
    return Box(
        (*box.start[:d], first, *box.start[d + 1 :]), (*box.stop[:d], last, *box.stop[d + 1 :])
    )


@dataclass(frozen=True, slots=True)
class BoxArray:
    """n boxes of one rank."""

    start: Index
    """(n, ndim) int64."""
    stop: Index
    """(n, ndim) int64."""
    _elements: int = field(default=-1, init=False, repr=False, compare=False)
    """Elements of all boxes; -1: not counted yet."""

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.start)

    def __getitem__(self, i: int) -> Box:
        """Box i."""
        return Box(tuple(self.start[i].tolist()), tuple(self.stop[i].tolist()))

    @classmethod
    def of(cls, boxes: list[Box], ndim: int) -> BoxArray:
        """Collect boxes of `ndim` dimensions."""
        start = np.array([b.start for b in boxes], np.int64).reshape(len(boxes), ndim)
        stop = np.array([b.stop for b in boxes], np.int64).reshape(len(boxes), ndim)
        return cls(start, stop)

    @classmethod
    def concatenate(cls, parts: list[BoxArray]) -> BoxArray:
        """The boxes of all parts, in order; at least one part."""
        return (
            parts[0]
            if len(parts) == 1
            else cls(
                np.concatenate([b.start for b in parts]), np.concatenate([b.stop for b in parts])
            )
        )

    def sizes(self) -> Index:
        """(n,) elements per box."""
        sizes: Index = np.prod(self.stop - self.start, axis=1, dtype=np.int64)
        return sizes

    @property
    def elements(self) -> int:
        """Elements of all boxes.

        They are counted once: all unsharded tensors of one shape share their box.
        """
        if self._elements < 0:
            object.__setattr__(self, "_elements", int(self.sizes().sum()))
        return self._elements

    def overlapping(self, box: Box) -> Index:
        """Indices of the boxes that share elements with `box`, ascending."""
        return np.flatnonzero(
            (np.maximum(self.start, box.start) < np.minimum(self.stop, box.stop)).all(axis=1)
        )


def distinct_boxes(boxes: BoxArray) -> tuple[BoxArray, Index]:
    """The distinct non-empty boxes, and the position of each input box among them.

    Returns the distinct non-empty boxes in order of their start, and an (n,) array with the
    position of each input box among them, -1 for an empty one.
    """
    keep = (boxes.stop > boxes.start).all(axis=1)
    rows = np.concatenate([boxes.start[keep], boxes.stop[keep]], axis=1)
    where = np.full(len(boxes), -1, np.int64)
    if boxes.start.shape[1] == 0:
        where[keep] = 0
        first = BoxArray(boxes.start[:1], boxes.stop[:1])
        return first, where
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    where[keep] = inverse.reshape(-1)
    ndim = boxes.start.shape[1]
    return BoxArray(unique[:, :ndim].copy(), unique[:, ndim:].copy()), where
