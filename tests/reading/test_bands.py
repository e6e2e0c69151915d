"""Chunks wherever they lie, read to wherever they are wanted: the elements are those of the array,
and nothing else is touched."""

from __future__ import annotations

from itertools import product
from math import prod

import crc32c
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt.reading.fetch
from shardckpt.format.table import ArrayChunks
from shardckpt.io import extension
from shardckpt.io.store import Store
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import Piece
from shardckpt.reading.fetch import ReadableChunks, scatter_read
from shardckpt.reading.locate import Request
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import ChunkReader

DTYPES = ("bool", "uint8", "float16", ml_dtypes.bfloat16, "float64", "complex128")


def stored(store, array, chunks, order, files):
    """An array's chunks, in that order, each in one of the files; its piece, and its rows in the
    chunk table."""
    piece = Piece("w", (0,) * array.ndim, array.shape, chunks)
    coords = list(product(*map(range, piece.grid)))
    data, rows = [bytearray() for _ in range(max(files) + 1)], []
    for at, position in enumerate(order):
        chunk = np.zeros(chunks, array.dtype)
        part = array[
            (
                *(
                    slice(c * side, (c + 1) * side)
                    for c, side in zip(coords[position], chunks, strict=True)
                ),
                ...,
            )
        ]
        chunk[(*map(slice, part.shape), ...)] = part
        raw, file = chunk.tobytes(), files[at % len(files)]
        crc = crc32c.crc32c(raw)
        rows.append((position, file, len(data[file]), len(raw) + 4, crc))
        data[file] += raw + crc.to_bytes(4, "little")
    for i, held in enumerate(data):
        store.write(str(i), bytes(held))
    return piece, WholeTable.of(
        [str(i) for i in range(len(data))], {"w": ArrayChunks.of_rows(sorted(rows))}
    )


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_boxes_are_read_out_of_chunks_in_any_order_into_memory_of_any_strides(
    tmp_path_factory, data
):
    grid = data.draw(st.lists(st.sampled_from((2, 3, 1)), max_size=3))
    chunks = tuple(data.draw(st.integers(1, 3)) for _ in grid)
    cut = data.draw(st.sampled_from((0, 0, 1)))
    shape = tuple(n * side - min(cut, side - 1) for n, side in zip(grid, chunks, strict=True))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    in_order = list(range(prod(grid)))
    order = data.draw(st.one_of(st.just(in_order), st.just(in_order), st.permutations(in_order)))
    store = Store.open(tmp_path_factory.mktemp("bands"))
    piece, table = stored(
        store, array, chunks, order, data.draw(st.sampled_from(((0,), (0,), (0, 0, 1))))
    )
    boxes, buffers, bases = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from((0, 0, 1)))
        start = tuple(data.draw(st.integers(0, (n - 1) * part)) for n in shape)
        boxes.append(
            Box(
                start,
                tuple(
                    n - data.draw(st.integers(0, (n - a - 1) * part))
                    for a, n in zip(start, shape, strict=True)
                ),
            )
        )
        steps = [data.draw(st.sampled_from((1, 1, 2, -1))) for _ in shape]
        axes = data.draw(st.permutations(range(len(shape))))
        room = [
            n * abs(step) + data.draw(st.integers(0, 1))
            for n, step in zip(boxes[-1].shape, steps, strict=True)
        ]
        bases.append(np.zeros([room[axis] for axis in axes], dtype))
        buffers.append(
            bases[-1].transpose(np.argsort(axes))[
                (*(slice(None, None, step) for step in steps), ...)
            ]
        )

    ChunkReader(ReadableChunks(store, table), threads=2).read(
        [Request("w", dtype, [piece], BoxArray.of(boxes, len(shape)), buffers)]
    )

    for box, buffer, base in zip(boxes, buffers, bases, strict=True):
        inside = buffer[(*map(slice, box.shape), ...)]
        assert np.array_equal(inside, array[(*box.slices, ...)])
        inside[...] = 0
        assert not base.any(), "elements of nobody's"


def test_chunks_that_are_read_into_place_take_room_beside_it_for_their_checksums_alone(
    tmp_path, monkeypatch
):
    array = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    store = Store.open(tmp_path)
    piece, table = stored(store, array, (8, 8), [7, 6, 5, 4, 0, 1, 2, 3], (0,))
    into = np.zeros_like(array)
    beside = []

    def noted(fd, offset, length, vectors):
        for vector in map(np.asarray, vectors):
            if not np.shares_memory(vector, into):
                beside.append(vector.ctypes.data)
                assert vector.nbytes == 4
        scatter_read(fd, offset, length, vectors)

    monkeypatch.setattr(shardckpt.reading.fetch, "scatter_read", noted)
    monkeypatch.setattr(extension, "moving", None)  # which has no such memory
    ChunkReader(ReadableChunks(store, table), threads=2).read(
        [Request("w", array.dtype, [piece], BoxArray.of([Box((0, 0), (64, 8))], 2), [into])]
    )

    assert np.array_equal(into, array)
    assert len(beside) == 8
    assert max(beside) - min(beside) == 7 * 4
