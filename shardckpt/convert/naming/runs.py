"""The elements of a fused dimension that belong to each of its parts.

A *run* is a range of elements that is contiguous in both. Concatenated parts have one run each. Interleaved parts have one run per
group. Rows of heads that are reordered for the other kind of rotary embedding have one run per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ElementRun", "Rotary", "runs_in_turn"]


class ElementRun(NamedTuple):
    """Elements that are contiguous in a part and in the whole."""

    part: int
    start: int
    """First element in the part."""
    place: int
    """First element in the whole."""
    length: int


def runs_in_turn(sizes: Sequence[int], groups: int) -> Iterator[ElementRun]:
    """The runs of interleaved parts.

    Args:
        sizes: elements of each part, multiples of `groups`.
        groups: number of groups; 1: the parts are concatenated.

    >>> [tuple(run) for run in runs_in_turn([4, 2], groups=2)]
    [(0, 0, 0, 2), (1, 0, 2, 1), (0, 2, 3, 2), (1, 1, 5, 1)]
    """
    place = 0
    for group in range(groups):
        for part, size in enumerate(sizes):
            length = size // groups
            yield ElementRun(part, group * length, place, length)
            place += length


@dataclass(frozen=True, slots=True)
class Rotary:
    """Reordering of the rows of each head for the other kind of rotary embedding.

    Rotary embeddings rotate two of a head's `d` rows together: `i` and `i + d/2` ("halves": transformers, Megatron), or `2i` and `2i + 1`
    ("pairs": Meta's Llama, GPT-J). A conversion between the two reorders the rows of the query and key projections.
    """

    heads: int
    pairs_in_whole: bool
    """Whether the whole has pairs and the part has halves; otherwise the reverse."""

    def __post_init__(self) -> None:
        """Refuse an invalid number of heads."""
        if not isinstance(self.heads, int) or isinstance(self.heads, bool) or self.heads < 1:
            raise OptionError(f"rotary: {excerpt(self.heads)} is no number of heads.")

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
                yield ElementRun(0, halves, pairs, 1) if self.pairs_in_whole else ElementRun(0, pairs, halves, 1)
