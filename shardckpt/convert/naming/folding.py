"""Folding: tensors whose heads have a separate dimension, written without it.

JAX's models have projections of shape (width, heads, head width); torch's have (heads · head width, width). In row-major order
a dimension of `count · n` has the same elements as two of `count` and `n`. But a box of one is a box of the other only within one
index of `count`. So a view across several of these indices becomes one view for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.convert.streaming.outputs import OutputTensor, View
from shardckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.structure import TensorRecord

__all__ = ["Unfold"]


@dataclass(frozen=True, slots=True)
class Unfold:
    """Dimension `axis` as two dimensions: `count`, and the remaining factor."""

    axis: int
    """Dimension of the folded tensor, from the end if negative; unfolded, it becomes this dimension and the next."""
    count: int

    def _at(self, rank: int) -> int | None:
        """`axis` as a non-negative index in a folded tensor of that rank; None if out of range."""
        return self.axis % rank if -rank <= self.axis < rank else None

    def folded(self, tensor: TensorRecord) -> TensorRecord | None:
        """A tensor with the two dimensions folded into one; None if it does not have them."""
        shape = tensor.shape
        at = self._at(len(shape) - 1)
        if at is None or shape[at] != self.count:
            return None
        return replace(tensor, shape=(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))

    def output(self, folded: OutputTensor) -> OutputTensor | None:
        """An output with the dimension unfolded into two; None if it is not divisible."""
        at = self._at(len(folded.shape))
        if at is None or folded.shape[at] % self.count:
            return None
        width = folded.shape[at] // self.count
        views = []
        for view in folded.sources:
            source = view.permutation[at]
            if source is None:  # `stack`
                return None
            for start, stop in _within(view.start[at], view.start[at] + view.shape[at], width):
                moved = start - view.start[at] + view.box.start[source]
                box = _replaced(view.box, source, moved, moved + stop - start)
                permutation = (*view.permutation[:at], None, *view.permutation[at:])
                place = (*view.start[:at], start // width, start % width, *view.start[at + 1 :])
                views.append(View(view.tensor, box, permutation, place))
        return replace(folded, shape=(*folded.shape[:at], self.count, width, *folded.shape[at + 1 :]), sources=tuple(views))

    def reading(self, output: OutputTensor, tensor: TensorRecord) -> OutputTensor:
        """An output that reads an unfolded tensor, from the output that would read the folded one."""
        at = self._at(len(tensor.shape) - 1)
        assert at is not None, "`folded` has been asked before"
        width = tensor.shape[at + 1]
        views = []
        for view in output.sources:
            out = view.permutation.index(at)
            for start, stop in _within(view.box.start[at], view.box.stop[at], width):
                head, first = divmod(start, width)
                box = Box(
                    (*view.box.start[:at], head, first, *view.box.start[at + 1 :]),
                    (*view.box.stop[:at], head + 1, first + stop - start, *view.box.stop[at + 1 :]),
                )
                permutation = tuple([d if d is None or d < at else d + 1 for d in view.permutation])
                place = (*view.start[:out], view.start[out] + start - view.box.start[at], *view.start[out + 1 :])
                views.append(View(view.tensor, box, permutation, place))
        return replace(output, sources=tuple(views))


def _within(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """A range, split at the multiples of a width."""
    while start < stop:
        end = min(stop, (start // width + 1) * width)
        yield start, end
        start = end


def _replaced(box: Box, d: int, start: int, stop: int) -> Box:
    return Box((*box.start[:d], start, *box.start[d + 1 :]), (*box.stop[:d], stop, *box.stop[d + 1 :]))
