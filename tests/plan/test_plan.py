"""Every element of every box is found in exactly one chunk."""

import numpy as np
import pytest
from chunk_oracle import chunks_inside
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import (
    Piece,
    chunk_boxes,
    chunk_runs,
    count_chunks,
    coverage_gap,
    overlaps,
    touched,
    touching,
)


@st.composite
def grids(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    chunks = tuple(draw(st.integers(1, 5)) for _ in shape)
    start = tuple(draw(st.integers(0, 4)) for _ in shape)
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        ends = [
            sorted((draw(st.integers(0, a + n + 3)), draw(st.integers(0, a + n + 3))))
            for a, n in zip(start, shape, strict=True)
        ]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    return Piece("w", start, shape, chunks), boxes


@given(grids())
@settings(max_examples=300, deadline=None)
def test_runs_of_chunks_are_the_chunks_that_overlap(grid):
    piece, boxes = grid
    starts, stops = chunk_runs(piece, BoxArray.of(boxes, len(piece.shape)))
    together = {
        chunk
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        for chunk in range(start, stop)
    }
    assert together == set(overlaps(piece, BoxArray.of(boxes, len(piece.shape))).chunk.tolist())
    assert (starts < stops).all()


def test_a_box_of_whole_rows_is_one_run():
    piece = Piece("w", (0, 0, 0), (1 << 20, 1 << 20, 8), (1, 1, 8))
    starts, stops = chunk_runs(piece, BoxArray.of([Box((7, 0, 0), (1 << 19, 1 << 20, 8))], 3))
    assert (starts.tolist(), stops.tolist()) == ([7 << 20], [1 << 39])


@given(grids())
@settings(max_examples=300, deadline=None)
def test_copying_the_overlaps_fills_each_box_with_its_own_elements_once(grid):
    piece, boxes = grid
    tensor_shape = tuple(a + n + 4 for a, n in zip(piece.start, piece.shape, strict=True))
    tensor = np.arange(np.prod(tensor_shape, dtype=int)).reshape(tensor_shape)
    held = np.zeros(tensor_shape, bool)
    held[piece.box.slices] = True

    pairs = overlaps(piece, BoxArray.of(boxes, len(piece.shape)))
    assert (np.diff(pairs.chunk) >= 0).all()
    copies = [np.full(b.shape, -1) for b in boxes]
    times = [np.zeros(b.shape, int) for b in boxes]
    origins = chunk_boxes(piece, pairs.chunk)
    for i in range(len(pairs.chunk)):
        chunk = tensor[origins[i].slices]
        b = int(pairs.box[i])
        copies[b][(*pairs.in_box[i].slices, ...)] = chunk[(*pairs.in_chunk[i].slices, ...)]
        times[b][(*pairs.in_box[i].slices, ...)] += 1
    for box, values, count in zip(boxes, copies, times, strict=True):
        np.testing.assert_array_equal(count, held[box.slices])
        np.testing.assert_array_equal(values, np.where(held[box.slices], tensor[box.slices], -1))


@given(grids())
@settings(max_examples=100, deadline=None)
def test_chunks_of_a_piece_tile_it(grid):
    piece, _ = grid
    count = np.zeros(piece.box.stop, int)
    boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
    for i in range(len(boxes)):
        count[boxes[i].slices] += 1
    assert (count[piece.box.slices] == 1).all()
    assert count.sum() == piece.box.size


@given(grids(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_run_of_the_chunks_inside_of_a_box_is_that_run_of_all_of_them(grid, data):
    piece, boxes = grid
    for box in boxes:
        pairs = overlaps(piece, BoxArray.of([box], box.ndim))
        assert count_chunks(piece, box) == len(pairs.chunk)
        touched = chunk_boxes(piece, pairs.chunk)
        if not all(box.contains(touched[i]) for i in range(len(touched))):
            with pytest.raises(FormatError, match="cross the border"):
                chunks_inside(piece, box)
            continue
        first = data.draw(st.integers(0, len(touched)))
        run = range(first, data.draw(st.integers(first, len(touched))))
        positions, elements = chunks_inside(piece, box, run)
        assert positions.tolist() == pairs.chunk[run.start : run.stop].tolist()
        assert [elements[i] for i in range(len(elements))] == [touched[i] for i in run]
        assert chunks_inside(piece, box)[0].tolist() == pairs.chunk.tolist()


@given(st.lists(grids(), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_pieces_are_touched_by_boxes_with_which_their_chunks_overlap(grids_drawn, random):
    ndim = len(grids_drawn[0][0].shape)
    pieces = [piece for piece, _ in grids_drawn if len(piece.shape) == ndim]
    boxes = BoxArray.of(
        [
            box
            for _, boxes_of_piece in grids_drawn
            for box in boxes_of_piece
            if box.ndim == ndim and random.random() < 0.5
        ],
        ndim,
    )
    expected = [piece for piece in pieces if len(overlaps(piece, boxes).chunk)]
    assert [
        piece for piece in touched(pieces, boxes) if len(overlaps(piece, boxes).chunk)
    ] == expected
    assert len(pieces) == 1 or touched(pieces, boxes) == expected


@pytest.mark.long
@given(st.lists(st.tuples(*[st.integers(0, 20)] * 4), max_size=20), st.randoms())
def test_each_box_is_paired_with_the_pieces_of_a_grid_that_it_overlaps(corners, random):
    pieces = [
        Piece(f"w{row}.{column}", (row, column), (3, 5), (2, 2))
        for row in range(0, 18, 3)
        for column in range(0, 20, 5)
    ]
    random.shuffle(pieces)
    boxes = BoxArray.of([Box(c[:2], tuple(map(max, c[:2], c[2:]))) for c in corners], 2)
    which, of_box = touching(pieces, boxes)
    assert [*zip(of_box.tolist(), which.tolist(), strict=True)] == [
        (b, k)
        for b in range(len(boxes))
        for k, piece in enumerate(pieces)
        if len(overlaps(piece, BoxArray.of([boxes[b]], 2)).chunk)
    ]


def test_a_chunk_with_two_writers_is_refused():
    piece = Piece("w", (0,), (10,), (4,))
    assert chunks_inside(piece, Box((4,), (10,)))[0].tolist() == [1, 2]
    with pytest.raises(
        FormatError, match=r"w: chunks of \(4,\) cross the border of the shard \[0:6\]"
    ):
        chunks_inside(piece, Box((0,), (6,)))


def _piece(start, shape):
    return Piece("w", start, shape, (1,) * len(shape))


def test_pieces_must_cover_a_tensor_exactly_once():
    assert coverage_gap((4, 4), [_piece((0, 0), (2, 4)), _piece((2, 0), (2, 4))]) is None
    assert coverage_gap((), [_piece((), ())]) is None
    assert "hold 8 elements of 16" in coverage_gap((4, 4), [_piece((0, 0), (2, 4))])
    assert "same elements" in coverage_gap((4, 4), [_piece((0, 0), (2, 4)), _piece((1, 0), (2, 4))])
    assert "outside" in coverage_gap((4, 4), [_piece((3, 0), (2, 4))])
