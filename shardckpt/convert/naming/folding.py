"""Folding: tensors whose heads have a dimension of their own, written without it.

JAX's models keep projections as (width, heads, width of a head) where torch's have (heads · width of a head, width). In row-major order
a dimension of `count · n` is the same elements as two of `count` and `n`; a box of one is a box of the other only within one of
`count`. So a view that lies in several of them becomes one view for each.
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
    """Dimension `axis` as two, of `count` and of what is left."""

    axis: int
    """Of the tensor with one dimension, from the end where it is negative; the two are this one and the one after it."""
    count: int

    def _at(self, rank: int) -> int | None:
        """`axis` in a tensor of that rank, with one dimension."""
        return self.axis % rank if -rank <= self.axis < rank else None

    def folded(self, tensor: TensorRecord) -> TensorRecord | None:
        """A tensor with the two dimensions as one; None where it has not these two."""
        shape = tensor.shape
        at = self._at(len(shape) - 1)
        if at is None or shape[at] != self.count:
            return None
        return replace(tensor, shape=(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))

    def output(self, folded: OutputTensor) -> OutputTensor | None:
        """An output with the two dimensions, of one that has them as one; None where that cannot be divided."""
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
        """An output of a tensor with the two dimensions, given what it would be if they were one."""
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
    """A range, cut at the multiples of a width."""
    while start < stop:
        end = min(stop, (start // width + 1) * width)
        yield start, end
        start = end


def _replaced(box: Box, d: int, start: int, stop: int) -> Box:
    return Box((*box.start[:d], start, *box.start[d + 1 :]), (*box.stop[:d], stop, *box.stop[d + 1 :]))
