"""The boxes that the parts of a merged tensor share with the whole.

They show which elements of the merged tensor belong to which of its parts.

A *run* is a range of elements along one dimension that is contiguous in a part and in the whole.
Concatenated parts have one run each, interleaved parts one per group, and rows that are reordered
for the other kind of rotary embedding one per row.

Dimension numbers refer to the whole before `unfold` splits one of its dimensions. JAX's models have
projections of shape (width, heads, head width); torch's have (heads · head width, width). In
row-major order a dimension of `count · n` has the same elements as two of `count` and `n`, but a
box of one is a box of the other only within one index of `count`. So boxes are cut there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.layout.box import Box, with_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ElementRun(NamedTuple):
    """Elements that are contiguous in a part and in the whole."""

    part: int
    start: int
    """First element in the part."""
    place: int
    """First element in the whole."""
    length: int


def interleaved_runs(sizes: Sequence[int], groups: int) -> Iterator[ElementRun]:
    """The runs of interleaved parts.

    Args:
        sizes: elements of each part, multiples of `groups`.
        groups: number of groups; 1: the parts are concatenated.

    >>> [tuple(run) for run in interleaved_runs([4, 2], groups=2)]
    [(0, 0, 0, 2), (1, 0, 2, 1), (0, 2, 3, 2), (1, 1, 5, 1)]
    """
    place = 0
    for group in range(groups):
        for part, size in enumerate(sizes):
            length = size // groups
            yield ElementRun(part, group * length, place, length)
            place += length


class Rotary(NamedTuple):
    """Reordering of the rows of each head for the other kind of rotary embedding.

    Rotary embeddings rotate two of a head's `d` rows together: `i` and `i + d/2` ("halves":
    transformers, Megatron), or `2i` and `2i + 1` ("pairs": Meta's Llama, GPT-J). A conversion
    between the two reorders the rows of the query and key projections.
    """

    heads: int
    pairs_in_whole: bool
    """Whether the whole has pairs and the part has halves; otherwise the reverse."""

    def runs(self, size: int) -> Iterator[ElementRun]:
        """One run per row; `size`, the number of rows, is a multiple of 2 · `heads`.

        >>> [(run.start, run.place) for run in Rotary(1, pairs_in_whole=True).runs(4)]
        [(0, 0), (1, 2), (2, 1), (3, 3)]
        """
        half = size // self.heads // 2
        for head in range(self.heads):
            first = head * 2 * half
            for i in range(2 * half):
                halves, pairs = first + i, first + 2 * (i % half) + i // half
                yield (
                    ElementRun(0, halves, pairs, 1)
                    if self.pairs_in_whole
                    else ElementRun(0, pairs, halves, 1)
                )


@dataclass(frozen=True, slots=True)
class Unfold:
    """Dimension `axis` as two dimensions: `count`, and the remaining factor."""

    axis: int
    """From the end if negative; unfolded, it becomes this dimension and the next."""
    count: int


class SharedBox(NamedTuple):
    """Elements that are a box of a part, and a box of the whole."""

    row: int
    """Stacked index of the part."""
    part: int
    in_part: Box
    in_whole: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """The places of parts in a whole."""

    shape: tuple[int, ...]
    """Shape of the whole, not unfolded."""
    permutation: tuple[int | None, ...]
    """For each dimension of the whole, the part's dimension; None for `stack`."""
    stack: int | None
    """The dimension that counts the stacked indices; each is a row of parts."""
    axis: int | None
    """The dimension along which `runs` lie."""
    runs: Sequence[ElementRun]
    """The runs of one stacked index. Without `axis`: one run, of which only the number of the part
    is used."""
    unfold: Unfold | None
    """The dimension that is two in the whole; its `axis` is not negative here."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole, unfolded."""
        if self.unfold is None:
            return self.shape
        at, count = self.unfold.axis, self.unfold.count
        return (*self.shape[:at], count, self.shape[at] // count, *self.shape[at + 1 :])

    @property
    def to_whole(self) -> tuple[int | None, ...]:
        """For each dimension of the unfolded whole, the part's dimension, or None."""
        if self.unfold is None:
            return self.permutation
        return (*self.permutation[: self.unfold.axis], None, *self.permutation[self.unfold.axis :])

    @property
    def to_part(self) -> tuple[int, ...]:
        """For each dimension of a part, the dimension of the unfolded whole."""
        return _inverse(self.to_whole)

    def part_shape(self, size: int | None) -> tuple[int, ...]:
        """The shape of a part that has `size` elements along `axis`."""
        shape = [
            size if d == self.axis and size is not None else n for d, n in enumerate(self.shape)
        ]
        return tuple([shape[d] for d in _inverse(self.permutation)])

    def shared_boxes(self) -> Iterator[SharedBox]:
        """The boxes of all parts and their places in the whole.

        They come in the order of the stacked indices and the runs.
        """
        dimensions = _inverse(self.permutation)
        for row in range(1 if self.stack is None else self.shape[self.stack]):
            layer = (
                Box.full(self.shape)
                if self.stack is None
                else with_range(Box.full(self.shape), self.stack, row, row + 1)
            )
            for run in self.runs:
                in_run = (
                    layer
                    if self.axis is None
                    else with_range(layer, self.axis, run.place, run.place + run.length)
                )
                shifts = [run.start - run.place if d == self.axis else 0 for d in dimensions]
                for box in self._within_unfolded(in_run):
                    start = tuple(
                        [box.start[d] + by for d, by in zip(dimensions, shifts, strict=True)]
                    )
                    stop = tuple(
                        [box.stop[d] + by for d, by in zip(dimensions, shifts, strict=True)]
                    )
                    yield SharedBox(row, run.part, Box(start, stop), self._unfold(box))

    def _within_unfolded(self, box: Box) -> Iterator[Box]:
        """A box of the whole, not unfolded, cut so that each part is a box once unfolded.

        The cuts are at the indices of the dimension that `unfold` makes the first of two.
        """
        if self.unfold is None:
            yield box
            return
        at, width = self.unfold.axis, self.shape[self.unfold.axis] // self.unfold.count
        first, last = box.start[at], box.stop[at]
        while first < last:
            end = min(last, (first // width + 1) * width)
            yield with_range(box, at, first, end)
            first = end

    def _unfold(self, box: Box) -> Box:
        """A box of the unfolded whole, from one that `_within_unfolded` cut."""
        if self.unfold is None:
            return box
        at, width = self.unfold.axis, self.shape[self.unfold.axis] // self.unfold.count
        index, first = divmod(box.start[at], width)
        last = first + box.stop[at] - box.start[at]
        return Box(
            (*box.start[:at], index, first, *box.start[at + 1 :]),
            (*box.stop[:at], index + 1, last, *box.stop[at + 1 :]),
        )


def _inverse(permutation: Sequence[int | None]) -> tuple[int, ...]:
    """The index of each number in a permutation, in order."""
    return tuple([permutation.index(d) for d in range(sum(d is not None for d in permutation))])
