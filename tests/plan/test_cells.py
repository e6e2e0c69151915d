"""Cells and steps: every element once, chunks of the target whole, within the room, and hardly a
stored byte twice."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan import cells
from shardckpt.plan.cells import plan_cells, read_bytes
from shardckpt.plan.cut import Order, cut
from shardckpt.plan.pieces import Piece, overlaps


@st.composite
def grids(draw, shape):
    """The arrays of a tensor: one, or several along some dimensions, each with chunks of any
    size."""
    cuts = []
    for n in shape:
        inner = draw(st.lists(st.integers(1, n - 1), max_size=2, unique=True)) if n > 1 else []
        cuts.append([0, *sorted(inner), n])
    pieces = []
    for index in np.ndindex(*(len(c) - 1 for c in cuts)):
        start = tuple(c[i] for c, i in zip(cuts, index, strict=True))
        extent = tuple(c[i + 1] - c[i] for c, i in zip(cuts, index, strict=True))
        pieces.append(
            Piece(f"p{len(pieces)}", start, extent, tuple(draw(st.integers(1, n)) for n in extent))
        )
    return tuple(pieces)


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 24), max_size=3)))
    return shape, draw(grids(shape)), draw(grids(shape))


@pytest.mark.long
@given(
    pair=pairs(),
    room=st.integers(1, 4000),
    joined=st.sampled_from([1, 64, 8 << 20]),
    largest=st.sampled_from([200, 4 << 30]),
)
@settings(max_examples=300)
def test_steps_read_every_element_once_and_fill_whole_chunks_within_the_room(
    pair, room, joined, largest
):
    shape, targets, sources = pair
    room = max(room, *(prod(p.chunks) for p in targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "LARGEST_CELL", largest)
        grid = plan_cells(targets, sources, 1, joined)
    seen = np.zeros(shape, int)
    written = {}
    for box in grid.boxes(range(len(grid.sizes())), room):
        begun = {}
        for step in cut(box, targets, room, Order.OPEN, sources=sources):
            assert (seen[step.box.slices] == 0).all()
            seen[step.box.slices] += 1
            now, begun = begun, {}
            reached = 0
            for piece in targets:
                crossed = overlaps(piece, BoxArray.of([step.box], len(shape)))
                for position, start, stop in zip(
                    crossed.chunk.tolist(),
                    crossed.in_chunk.start,
                    crossed.in_chunk.stop,
                    strict=True,
                ):
                    reached += prod(piece.chunks)
                    filled = now.pop((piece.path, position), 0) + prod((stop - start).tolist())
                    whole = (
                        prod(
                            (
                                np.minimum(
                                    (np.array(np.unravel_index(position, piece.grid)) + 1)
                                    * piece.chunks,
                                    piece.shape,
                                )
                                - np.array(np.unravel_index(position, piece.grid)) * piece.chunks
                            ).tolist()
                        )
                        if shape
                        else 1
                    )
                    if filled == whole:
                        assert (piece.path, position) not in written
                        written[piece.path, position] = True
                    else:
                        begun[piece.path, position] = filled
            assert not now, "a chunk that was begun is not reached by the next step"
            assert reached <= room or step.box == box or len(targets) > 1
        assert not begun, "a box ends with a chunk unfinished"
    assert (seen == 1).all()
    assert len(written) == sum(p.num_chunks for p in targets)


@given(pair=pairs())
def test_where_it_fits_whole_cells_read_every_stored_byte_once(pair):
    _, targets, sources = pair
    grid = plan_cells(targets, sources, 1)
    read = sum(read_bytes(box, sources, 1, 4) for box in grid.boxes(range(len(grid.sizes())), 1))
    assert read == sum(p.num_chunks * (prod(p.chunks) + 4) for p in sources)


def test_grids_without_a_common_border_are_walked_through_and_nothing_is_read_twice():
    target = [Piece("t", (0, 0), (7000, 6000), (128, 120))]
    source = [Piece("s", (0, 0), (7000, 6000), (81, 77))]
    grid = plan_cells(target, source, 4)
    assert grid.grid == (1, 1)
    whole = Box((0, 0), (7000, 6000))
    steps = list(cut(whole, target, 4 << 20, Order.OPEN, sources=source))
    assert len(steps) > 5
    assert sum(read_bytes(s.box, source, 4, 4) for s in steps) == read_bytes(whole, source, 4, 4)


def test_a_cell_too_large_for_one_task_is_cut_where_that_reads_little_twice():
    n = 1 << 17
    target, source = (
        [Piece("t", (0, 0), (n, n), (512, 512))],
        [Piece("s", (0, 0), (n, n), (729, 343))],
    )
    grid = plan_cells(target, source, 2)
    assert max(grid.sizes()) * 2 <= cells.LARGEST_CELL
    assert len(grid.sizes()) <= 32
    read = sum(read_bytes(box, source, 2, 4) for box in grid.boxes(range(len(grid.sizes())), 1))
    assert read <= 1.03 * read_bytes(Box((0, 0), (n, n)), source, 2, 4)
