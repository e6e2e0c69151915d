"""Cuts: every element once, in the order asked for, within the room, and at borders of chunks where
these are within reach."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.layout.box import Box
from shardckpt.plan.cut import Order, cut, cut_run
from shardckpt.plan.grids import block_shape, cut_into_grids
from shardckpt.plan.pieces import Piece, chunk_boxes


def numbered(shape):
    return np.arange(prod(shape)).reshape(shape)


def elements(numbers, box):
    return numbers[(*box.slices, ...)].reshape(-1).tolist()


def chunks_of(piece, part):
    """Positions of the chunks that a part needs."""
    spans = []
    for a, b, o, n, side in zip(
        part.start, part.stop, piece.start, piece.shape, piece.chunks, strict=True
    ):
        low, high = max(a, o) - o, min(b, o + n) - o
        spans.append(range(low // side, -(-high // side)) if low < high else range(0))
    return list(product(*spans))


# --- a run of cells


@st.composite
def runs(draw):
    sides = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), max_size=4))
    borders = [np.cumsum([0, *each]).tolist() for each in sides]
    cells = prod(len(each) for each in sides)
    start = draw(st.integers(0, cells))
    return borders, range(start, draw(st.integers(start, cells))), draw(st.integers(1, 400))


@given(runs())
@settings(max_examples=300, deadline=None)
def test_a_run_of_cells_is_cut_into_boxes_with_the_same_cells_in_the_same_order(case):
    borders, run, room = case
    numbers = numbered(tuple(len(ends) - 1 for ends in borders))
    at = [{end: i for i, end in enumerate(ends)} for ends in borders]
    boxes = list(cut_run(borders, run, room))
    cells = [
        Box(
            tuple(index[a] for index, a in zip(at, box.start, strict=True)),
            tuple(index[b] for index, b in zip(at, box.stop, strict=True)),
        )
        for box in boxes
    ]
    assert [cell for box in cells for cell in elements(numbers, box)] == list(run)
    assert all(
        box.size <= room or inside.size == 1 for box, inside in zip(boxes, cells, strict=True)
    )
    if room >= prod(ends[-1] for ends in borders):
        assert len(boxes) <= 2 * max(1, len(borders)) - 1


@given(runs())
@settings(max_examples=200, deadline=None)
def test_boxes_of_a_grid_of_units_are_the_largest_that_begin_where_the_last_one_ended(case):
    borders, run, room = case
    grid = tuple(len(ends) - 1 for ends in borders)
    boxes = list(cut_run([range(n + 1) for n in grid], run, room))
    assert [(box.start, box.stop) for box in boxes] == list(largest_boxes(grid, run, room))


def largest_boxes(grid, run, most):
    """The oracle: at each position, the largest of all boxes of complete rows that begin there."""
    at = run.start
    while at < run.stop:
        corner = [int(i) for i in np.unravel_index(at, grid)] if grid else []
        fitting = [tuple(c + 1 for c in corner)]
        for d in range(len(grid)):
            if not any(corner[d + 1 :]):
                ends = range(corner[d] + 1, grid[d] + 1)
                fitting.extend((*(c + 1 for c in corner[:d]), end, *grid[d + 1 :]) for end in ends)
        sizes = [prod(b - a for a, b in zip(corner, stop, strict=True)) for stop in fitting]
        size, stop = max(
            (s, stop)
            for s, stop in zip(sizes, fitting, strict=True)
            if s == 1 or s <= min(most, run.stop - at)
        )
        yield tuple(corner), stop
        at += size


# --- rows


@st.composite
def grids(draw, shape):
    """The arrays of a tensor: one, or two along the first dimension, each with chunks of any
    size."""
    cuts = [0, draw(st.integers(0, shape[0])), shape[0]] if shape else [0, 1]
    pieces = []
    for begin, end in pairwise(cuts):
        if begin < end:
            start, size = (begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:])
            sides = tuple(draw(st.integers(1, 6)) for _ in shape)
            pieces.append(Piece(f"p{begin}", start if shape else (), size if shape else (), sides))
    return pieces


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    sides = tuple(draw(st.integers(1, n)) for n in shape)
    target = draw(st.sampled_from([[], [Piece("t", (0,) * len(shape), shape, sides)]]))
    room = draw(st.integers(1, 300))
    return shape, target, draw(grids(shape)), room, draw(st.integers(0, room))


@pytest.mark.long
@given(cases())
@settings(max_examples=400, deadline=None)
def test_rows_come_in_row_major_order_once_and_within_the_room(case):
    shape, target, sources, room, joined = case
    parts = [
        step.box
        for step in cut(Box.full(shape), target, room, Order.ROWS, sources=sources, joined=joined)
    ]
    grid = target[0].grid if target else shape
    sides = target[0].chunks if target else (1,) * len(shape)
    cells = [
        Box(
            tuple(a // n for a, n in zip(part.start, sides, strict=True)),
            tuple(-(-b // n) for b, n in zip(part.stop, sides, strict=True)),
        )
        for part in parts
    ]
    assert [cell for box in cells for cell in elements(numbered(grid), box)] == list(
        range(prod(grid))
    )
    covered = np.zeros(shape, int)
    for part in parts:
        covered[(*part.slices, ...)] += 1
    assert (covered == 1).all()
    assert all(part.size <= room or cell.size == 1 for part, cell in zip(parts, cells, strict=True))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_rows_end_where_no_source_chunk_is_divided_if_that_is_within_reach(case):
    shape, target, sources, room, joined = case
    for step in cut(Box.full(shape), target, room, Order.ROWS, sources=sources, joined=joined):
        box = step.box
        ways = [
            d
            for d in range(len(shape))
            if all(b - a == 1 for a, b in zip(box.start[:d], box.stop[:d], strict=True))
        ]
        for d in ways:
            rest = all(
                (a, b) == (0, n)
                for a, b, n in zip(
                    box.start[d + 1 :], box.stop[d + 1 :], shape[d + 1 :], strict=True
                )
            )
            if rest and not target and not divides_none(sources, d, box.stop[d], shape):
                within = room // prod(shape[d + 1 :])
                assert not [
                    end
                    for end in range(box.start[d] + 1, min(shape[d], box.start[d] + within) + 1)
                    if divides_none(sources, d, end, shape)
                ]


def divides_none(pieces, d, border, shape):
    """Whether no chunk is on both sides of a border."""
    return border in (0, shape[d]) or all(
        border <= p.start[d]
        or border >= p.start[d] + p.shape[d]
        or (border - p.start[d]) % p.chunks[d] == 0
        for p in pieces
    )


def test_rows_are_joined_up_to_a_size_and_a_tall_chunk_stays_whole():
    stored = [Piece("s", (0, 0), (100, 10), (7, 10))]
    one = [
        step.box.shape[0] for step in cut(Box.full((100, 10)), (), 1000, Order.ROWS, sources=stored)
    ]
    assert one == [7] * 14 + [2]
    joined = [
        step.box.shape[0]
        for step in cut(Box.full((100, 10)), (), 1000, Order.ROWS, sources=stored, joined=250)
    ]
    assert joined == [21] * 4 + [16]
    short = [
        step.box.shape[0] for step in cut(Box.full((14, 10)), (), 50, Order.ROWS, sources=stored)
    ]
    assert short == [5, 2, 5, 2]


# --- halves


@st.composite
def stored(draw):
    """Pieces of a tensor that cover it, and a box of it."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    pieces = draw(grids(shape))
    start = [draw(st.integers(0, n - 1)) for n in shape]
    stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
    return pieces, Box(tuple(start), tuple(stop))


@given(stored(), st.integers(1, 60), st.booleans())
@settings(max_examples=300)
def test_halves_make_up_the_box_and_share_no_chunk(case, most, measured):
    pieces, box = case
    sizes = {"size": lambda part: 2 * part.size, "room": 2 * most} if measured else {"room": most}
    parts = [step.box for step in cut(box, pieces, order=Order.HALVES, **sizes)]
    counted = np.zeros(
        tuple(max(piece.box.stop[d] for piece in pieces) for d in range(box.ndim)), int
    )
    for part in parts:
        counted[(*part.slices, ...)] += 1
    whole = np.zeros_like(counted)
    whole[(*box.slices, ...)] = 1
    assert (counted == whole).all()
    chunks = [
        (piece.path, tuple(at))
        for part in parts
        for piece in pieces
        for at in chunks_of(piece, part)
    ]
    assert len(chunks) == len(set(chunks))
    if len(pieces) == 1:  # any border between two chunks divides none
        assert all(part.size <= most or len(chunks_of(pieces[0], part)) == 1 for part in parts)


# --- grids


@pytest.mark.long
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_grids_hold_every_element_once_within_the_room_and_rows_are_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), max_size=3)))
    sources, order = data.draw(grids(shape)), data.draw(st.sampled_from([Order.ROWS, Order.OPEN]))
    room = data.draw(st.integers(4, 4000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardckpt.plan.grids.LEAST_RUN", 4)
        patch.setattr("shardckpt.plan.grids._LEAST_PART", 16)
        pieces = cut_into_grids("w", shape, sources, 4, room, order)
    blocks = [box for piece in pieces for box in chunk_boxes(piece, np.arange(piece.num_chunks))]
    listed = [at for box in blocks for at in elements(numbered(shape), box)]
    assert sorted(listed) == list(range(prod(shape)))
    if order is Order.ROWS:
        assert listed == sorted(listed)
    assert all(4 * box.size <= max(4, room) for box in blocks)
    assert len({piece.path for piece in pieces}) == len(pieces)


@given(shape=st.lists(st.integers(0, 3000), max_size=3).map(tuple), room=st.integers(4, 1 << 22))
def test_a_block_has_a_side_in_each_dimension_and_leaves_room_for_several(shape, room):
    sides = block_shape(shape, None, 4, room)
    assert all(1 <= side <= max(1, n) for side, n in zip(sides, shape, strict=True))
    assert 4 * prod(sides) <= max(4, room // 4)
