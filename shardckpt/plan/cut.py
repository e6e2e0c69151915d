"""Cuts of a box into parts that each fit the memory, so that few chunks are needed for two parts.

`cut` takes the arrays whose chunks a part must not divide (`pieces`), those whose chunks it should
not divide (`sources`), and the order of the parts:

- *Rows*: in row-major order. A part is a row of chunks, or several rows, or a stretch of one. It
  ends where no source chunk is divided, if such a border is within reach.
- *Halves*: halves of halves. A size other than the number of elements can decide which part is
  small enough.
- *Open*: parts may also end inside chunks of `pieces`, along one dimension, where no source chunk
  is divided. The next part finishes the chunk, which stays in memory until then, so nothing is read
  twice. Where the cross-section is too large for that, the box is halved.

Pure: shapes in, boxes out. Cost is proportional to the borders per dimension and to the parts,
never to chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box, BoxArray, with_range
from shardckpt.plan.pieces import count_chunks, touched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.plan.pieces import Piece

    Ints = NDArray[np.int64]


class Order(Enum):
    """The order of the parts of a cut, and their shapes."""

    ROWS = "rows"
    HALVES = "halves"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a tensor that is read in one go."""

    box: Box
    """The part, in the tensor's indices."""
    along: int = 0
    """The dimension of the traversal: a later step finishes the chunks that extend beyond the box
    along it. In all other dimensions the box consists of complete chunks. 0 for a box of complete
    chunks, where it makes no difference."""


def cut(
    box: Box,
    pieces: Sequence[Piece],
    room: int,
    order: Order,
    *,
    sources: Sequence[Piece] = (),
    joined: int = 0,
    size: Callable[[Box], int] | None = None,
) -> Iterator[Step]:
    """Cut a box.

    Args:
        box: a part of a tensor, in the tensor's indices. For `OPEN`, it consists of complete chunks
            of the pieces.
        pieces: arrays whose chunks are not divided; empty: a part may end at any index.
        room: most elements of a part; for `OPEN`, of all chunks that the part overlaps, with their
            padding. A part that is a single chunk may have more.
        order: the order of the parts.
        sources: arrays whose chunks are divided only where the room does not suffice otherwise.
        joined: elements up to which parts are joined, in row-major order; a larger part ends at the
            first border of sources.
        size: what is compared with the room in place of the number of elements; for `HALVES`.
    """
    if order is Order.ROWS:
        for part in _rows_of(box, pieces, room, sources, joined):
            yield Step(part)
    else:
        yield from _halves(box, pieces, room, sources, size, opens=order is Order.OPEN)


def cut_run(borders: Sequence[Sequence[int]], run: range, room: int) -> Iterator[Box]:
    """Cut a run of the cells of a grid into consecutive boxes.

    From the current position, choose the largest box of complete rows (of cells, of rows of cells,
    …) that begins there, fits in the rest of the run, and is not too large; continue after it. At
    most two boxes per dimension are smaller than the room allows.

    Args:
        borders: ends of the cells per dimension, ascending.
        run: cells, counted in row-major order.
        room: most elements of a box, unless a single cell has more.

    >>> [(box.start, box.stop) for box in cut_run([range(4), range(5)], range(2, 12), 100)]
    [((0, 2), (1, 4)), ((1, 0), (3, 4))]
    """
    return _rows(borders, run, room, None, room)


def unbroken(pieces: Sequence[Piece], d: int) -> Ints:
    """The borders along dimension d at which chunks end and that no chunk straddles."""
    axes = {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}
    borders = [
        np.append(np.arange(start, start + length, side, dtype=np.int64), start + length)
        for start, length, side in axes
    ]
    return undivided(
        borders[0] if len(borders) == 1 else np.unique(np.concatenate(borders)), d, pieces
    )


def undivided(borders: Ints, d: int, pieces: Sequence[Piece]) -> Ints:
    """The borders that no chunk of some arrays straddles in dimension d.

    The first and the last are always included.
    """
    straddled = np.zeros(len(borders), bool)
    for start, length, side in {(p.start[d], p.shape[d], p.chunks[d]) for p in pieces}:
        straddled |= (
            (borders > start) & (borders < start + length) & ((borders - start) % side != 0)
        )
    straddled[[0, -1]] = False
    return borders[~straddled]


def pieces_at(pieces: Sequence[Piece], box: Box) -> Sequence[Piece]:
    """The arrays that hold elements of a box."""
    return pieces if len(pieces) <= 1 else touched(pieces, BoxArray.of([box], box.ndim))


def longest_side(pieces: Sequence[Piece], d: int) -> int:
    """The longest side of any chunk of some arrays along dimension d."""
    return max(p.chunks[d] for p in pieces)


def walk(borders: Sequence[int] | Ints, reach: int) -> Iterator[int]:
    """Yield the ends of steps of at most `reach` elements, at borders where some are in reach."""
    at, end = int(borders[0]), int(borders[-1])
    while at < end:
        yield at
        farthest = int(borders[bisect_right(borders, at + reach) - 1])
        at = farthest if farthest > at else at + reach
    yield end


def _rows_of(
    box: Box, pieces: Sequence[Piece], room: int, sources: Sequence[Piece], joined: int
) -> Iterator[Box]:
    """Parts in row-major order."""
    if box.size <= joined or not box.ndim:
        yield box
        return
    into, of = pieces_at(pieces, box), pieces_at(sources, box)
    borders: list[Sequence[int]] = []
    wished: list[Sequence[int]] = []
    for d in range(box.ndim):
        ends = _borders(into, box, d)
        borders.append(ends)
        if into and of:
            wished.append(undivided(np.array(ends, np.int64), d, of).tolist())
        else:
            wished.append(_borders(of, box, d) if of else ends)
    yield from _rows(borders, range(prod(len(b) - 1 for b in borders)), room, wished, joined)


def _rows(
    borders: Sequence[Sequence[int]],
    run: range,
    room: int,
    wished: Sequence[Sequence[int]] | None,
    joined: int,
) -> Iterator[Box]:
    """Boxes of complete rows of a grid, one after another.

    Args:
        borders: as in `cut_run`.
        run: as in `cut_run`; all cells where some borders are wished.
        room: as in `cut_run`.
        wished: some of the borders, at which boxes end where the room allows it; None: all.
        joined: elements up to which a box is enlarged beyond the first wished border.
    """
    grid = [len(ends) - 1 for ends in borders]
    cells = [prod(grid[d + 1 :]) for d in range(len(grid))]
    lengths = [ends[-1] - ends[0] for ends in borders]
    elements = [prod(lengths[d + 1 :]) for d in range(len(grid))]
    at, end, last = run.start, run.stop, len(grid) - 1
    while at < end:
        corner, rest = [], at
        for count in cells:
            corner.append(rest // count)
            rest %= count
        d, stop, deep = last, corner[-1] + 1 if corner else 0, 1
        for along, count in enumerate(cells):
            first, ends, slab = corner[along], borders[along], deep * elements[along]
            deep *= ends[first + 1] - ends[first]
            if at % count or count > end - at:
                continue
            # One cell along a dimension is a part only if it need not be cut further.
            most = room if grid[along] > 1 or along == last else joined
            reached = (
                bisect_right(
                    ends,
                    ends[first] + most // slab,
                    first,
                    min(grid[along], first + (end - at) // count) + 1,
                )
                - 1
            )
            if reached > first:
                d, stop = (
                    along,
                    reached
                    if wished is None
                    else _best_border(ends, first, reached, wished[along], joined // slab),
                )
                break
        yield Box(
            tuple(borders[k][i if k <= d else 0] for k, i in enumerate(corner)),
            tuple(
                borders[k][i + 1 if k < d else stop if k == d else -1] for k, i in enumerate(corner)
            ),
        )
        at += (stop - corner[d]) * cells[d] if corner else 1


def _best_border(
    ends: Sequence[int], first: int, reached: int, wished: Sequence[int], joined: int
) -> int:
    """The border at which a part ends that begins at border `first` and can reach `reached`."""
    begin = ends[first]
    near = bisect_right(wished, begin + joined) - 1
    if wished[near] <= begin:
        near += 1
    return (
        bisect_left(ends, min(wished[near], ends[reached]))
        if wished[near] <= ends[reached]
        else reached
    )


def _halves(
    box: Box,
    pieces: Sequence[Piece],
    room: int,
    sources: Sequence[Piece],
    size: Callable[[Box], int] | None,
    *,
    opens: bool,
) -> Iterator[Step]:
    """Halves of halves; with `opens`, the parts of a traversal where there is room for one."""
    into, of = pieces_at(pieces, box), pieces_at(sources, box)
    elements = (
        sum(count_chunks(p, box) * prod(p.chunks) for p in into)
        if opens
        else box.size
        if size is None
        else size(box)
    )
    if elements <= room:
        yield Step(box)
        return
    if opens:
        # Elements that a step may advance: up to one chunk at each end of the step is overlapped
        # only partly.
        reaches = [
            room // -(-elements // n) - 2 * longest_side(into, d) for d, n in enumerate(box.shape)
        ]
        along = max(range(box.ndim), key=lambda d: reaches[d] / longest_side(of, d))
        if reaches[along] >= longest_side(of, along):
            for first, last in pairwise(walk(_borders(of, box, along), reaches[along])):
                yield Step(with_range(box, along, first, last), along)
            return
    borders = [_borders(into, box, d) for d in range(box.ndim)]
    able = [d for d in range(box.ndim) if len(borders[d]) > 2]
    if not able:
        yield Step(box)
        return
    # The first dimension, so that a part is contiguous; but the one in which a cut divides the
    # smallest share of the sources.
    longest = max(able, key=lambda d: box.shape[d] / longest_side(of, d)) if of else able[0]
    middle = borders[longest][len(borders[longest]) // 2]
    for first, last in pairwise((box.start[longest], middle, box.stop[longest])):
        yield from _halves(with_range(box, longest, first, last), into, room, of, size, opens=opens)


def _borders(pieces: Sequence[Piece], box: Box, d: int) -> Sequence[int]:
    """The ends of a box along dimension d, and the borders between that no chunk straddles.

    Only chunks of the given arrays count. Without arrays, all borders are returned.
    """
    first, last = box.start[d], box.stop[d]
    if not pieces:
        return range(first, last + 1)
    borders = unbroken(pieces, d)
    return [first, *borders[(borders > first) & (borders < last)].tolist(), last]
