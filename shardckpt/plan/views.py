"""The position of a tensor's elements in an output that is made from it.

A `View` places a box of a tensor in an output, with its dimensions in another order and dimensions
of length 1 removed or added. A caller requests boxes of the output. `View.back` gives the boxes of
the tensor to read, and `View.part` gives the output memory for each, without a copy. `View.pieces`
describes the stored tensor in the output's indices, for planning the reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import OptionError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class View:
    """A box of a tensor and its position in an output.

    The transpose of w[:, 4, :], from row 10 on:

    >>> View("w", Box((0, 4, 0), (8, 5, 6)), (2, 0), (10, 0)).inside
    Box(start=(10, 0), stop=(16, 8))
    """

    tensor: str
    """Name of the tensor."""
    box: Box
    """The elements, as a box in the tensor's indices."""
    permutation: tuple[int | None, ...]
    """Per dimension of the output, the tensor's dimension, as in `numpy.transpose`; None for a
    dimension of length 1 that the tensor lacks. Dimensions of the tensor that are not named must
    have length 1 in the box, and are left out."""
    start: tuple[int, ...]
    """The output's index of the first element."""

    def __post_init__(self) -> None:
        """Refuse ranks that differ, and dimensions that are named twice or lost."""
        named = [d for d in self.permutation if d is not None]
        if (
            len(self.permutation) != len(self.start)
            or len(set(named)) != len(named)
            or any(not 0 <= d < self.box.ndim for d in named)
        ):
            raise OptionError(
                f"View of {self.tensor}: permutation {self.permutation} must name dimensions of "
                f"the box {self.box}, each once, and start {self.start} must have as many."
            )
        lost = [d for d, n in enumerate(self.box.shape) if d not in named and n != 1]
        if lost:
            raise OptionError(
                f"View of {self.tensor}: dimension {lost[0]} of the box {self.box} has "
                f"{self.box.shape[lost[0]]} elements and is not in permutation "
                f"{self.permutation}; only dimensions of length 1 can be left out."
            )

    @classmethod
    def whole(cls, tensor: str, shape: Sequence[int]) -> View:
        """The view of a complete, unchanged tensor."""
        return cls(tensor, Box.full(tuple(shape)), tuple(range(len(shape))), (0,) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the output."""
        return tuple(1 if d is None else self.box.shape[d] for d in self.permutation)

    @property
    def inside(self) -> Box:
        """The box of the output that the view fills."""
        return Box(self.start, tuple(a + n for a, n in zip(self.start, self.shape, strict=True)))

    @property
    def _is_in_place(self) -> bool:
        """Whether the output's indices equal the tensor's."""
        return self.start == self.box.start and self.permutation == tuple(range(self.box.ndim))

    def back(self, boxes: BoxArray) -> BoxArray:
        """Translate boxes of the output that lie in `inside` to the tensor's indices."""
        start = np.tile(np.array(self.box.start, np.int64), (len(boxes), 1))
        stop = np.tile(np.array(self.box.stop, np.int64), (len(boxes), 1))
        for out, d in enumerate(self.permutation):
            if d is not None:
                shift = self.box.start[d] - self.start[out]
                start[:, d], stop[:, d] = boxes.start[:, out] + shift, boxes.stop[:, out] + shift
        return BoxArray(start, stop)

    def part(self, elements: Array) -> Array:
        """The memory of a box of the output, with the tensor's dimensions.

        A numpy view, without a copy.
        """
        kept = [d for d in self.permutation if d is not None]
        if kept == list(range(self.box.ndim)) and len(kept) == len(self.permutation):
            return elements
        index = tuple(0 if d is None else slice(None) for d in self.permutation)
        memory = elements[(*index, ...)].transpose(np.argsort(kept, kind="stable"))
        return np.expand_dims(memory, tuple(d for d in range(self.box.ndim) if d not in kept))

    def pieces(self, stored: Sequence[Piece]) -> list[Piece]:
        """The stored arrays of the tensor inside the view, in the output's indices.

        A chunk that the view clips is shorter there; if it is the first along a dimension, it
        becomes a separate array.
        """
        if self._is_in_place and all(self.box.contains(piece.box) for piece in stored):
            return [piece for piece in stored if all(piece.shape)]
        inside = []
        for piece in stored:
            common = piece.box.overlap(self.box)
            if common is None:
                continue
            sides = []
            for out, d in enumerate(self.permutation):
                if d is None:
                    sides.append([(self.start[out], 1, 1)])
                    continue
                first, last, side = common.start[d], common.stop[d], piece.chunks[d]
                border = min(last, piece.start[d] + -(-(first - piece.start[d]) // side) * side)
                shift = self.start[out] - self.box.start[d]
                sides.append(
                    [
                        (a + shift, b - a, side)
                        for a, b in ((first, border), (border, last))
                        if a < b
                    ]
                )
            inside += [
                Piece(
                    piece.path, *(tuple(of_dimension[i] for of_dimension in part) for i in range(3))
                )
                for part in product(*sides)
            ]
        return inside


def overlapping_views(insides: BoxArray, boxes: BoxArray) -> list[int]:
    """Indices of the views that may have elements of some boxes of the output, ascending.

    A view that has none may be among them, but none that lies outside of the box around all.

    Args:
        insides: `inside` of each view.
        boxes: at least one box.
    """
    if len(insides) <= 1:
        return [*range(len(insides))]
    around = Box(tuple(boxes.start.min(axis=0).tolist()), tuple(boxes.stop.max(axis=0).tolist()))
    return [*map(int, insides.overlapping(around))]
