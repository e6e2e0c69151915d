"""A host's chunks, made of blocks of elements and written by one thread or by several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.commit.table_reading import read_table
from shardckpt.errors import CommitError
from shardckpt.format.record import Contents
from shardckpt.format.stored_chunks import close, encode, lay_out, lay_out_all
from shardckpt.format.structure import Structure
from shardckpt.format.zarr_arrays import room_for
from shardckpt.io import extension
from shardckpt.io.datafile import create_data_file
from shardckpt.io.store import Store
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import Piece, chunk_boxes
from shardckpt.reading.fetch import CODECS, ReadableChunks
from shardckpt.reading.locate import Request
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import ChunkReader
from shardckpt.writing.host import HostWriter

if TYPE_CHECKING:
    from pathlib import Path

CONTENTS = Contents(Structure({}, {}), {}, {})
sides = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=3)


@given(sides, st.sampled_from(["u1", "f2", "f4", "c16"]), st.sampled_from([None, "zstd"]))
@settings(max_examples=80, deadline=None)
def test_the_chunks_of_a_block_are_the_same_bytes_as_each_of_them_alone(grid, dtype, compression):
    shape, chunks = tuple(n for n, _ in grid), tuple(c for _, c in grid)
    # The block is a part of a larger array: its elements are not side by side in memory.
    elements = (
        np.random.default_rng(0)
        .random([n + 1 for n in shape])
        .astype(dtype)[(*map(slice, shape), ...)]
    )
    piece = Piece("w", (0,) * len(shape), shape, chunks)
    rows = np.full((piece.num_chunks, room_for(chunks, elements.itemsize)), 255, np.uint8)
    lay_out(elements, chunks, rows)
    data, lengths, crcs = close(rows, compression)
    boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
    alone = [
        encode(elements[(*boxes[i].slices, ...)], chunks, compression)
        for i in range(piece.num_chunks)
    ]
    assert data.tobytes() == b"".join(stored.tobytes() for stored, _ in alone)
    assert (lengths, crcs) == ([len(stored) for stored, _ in alone], [crc for _, crc in alone])


def arrays(rows):
    """Pieces of rows of 16 KiB, one row a chunk, with their elements."""
    pieces = [
        (
            Piece(f"t{i}", (0, 0), (n, 4096), (1, 4096)),
            np.random.default_rng(i).random((n, 4096), np.float32),
        )
        for i, n in enumerate(rows)
    ]
    return [(piece, piece.box, values) for piece, values in pieces]


def writer(place: Path, threads, layout="packed", compression=None) -> HostWriter:
    return HostWriter(
        Store.open(place),
        "a",
        0,
        layout=layout,
        compression=compression,
        memory_limit=1 << 26,
        threads=threads,
    )


def append(host, blocks, at_a_time):
    host.append(host.portions(blocks, at_a_time, sum(elements.nbytes for _, _, elements in blocks)))


def read_back(place, record, piece):
    store = Store.open(place)
    table = read_table(store, record.files.table)
    out = np.empty(piece.shape, np.float32)
    request = Request(piece.path, out.dtype, [piece], BoxArray.of([piece.box], 2), [out])
    ChunkReader(ReadableChunks(store, WholeTable(table), CODECS[record.compression])).read(
        [request]
    )
    return out


@given(
    st.lists(st.integers(1, 60), max_size=5),
    st.integers(1, 3),
    st.sampled_from([None, "zstd"]),
    st.sampled_from([1, 1 << 20]),
)
@settings(max_examples=12, deadline=None)
def test_what_several_threads_have_written_is_read_back(
    tmp_path_factory, rows, threads, compression, at_a_time
):
    place = tmp_path_factory.mktemp("host")
    host, blocks = writer(place, threads, compression=compression), arrays(rows)
    append(host, blocks, at_a_time)
    record, table = host.complete(CONTENTS, hosts=1, prior=None)
    assert record.chunks == len(table.rows) == sum(rows)
    assert len(record.files.lanes) <= threads
    for piece, _, values in blocks:
        assert (read_back(place, record, piece) == values).all()


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Bytes of each write of chunks that Python has laid out."""
    monkeypatch.setattr(extension, "moving", None)
    made = []
    kind = type(create_data_file(Store.open(tmp_path), "x"))
    to_file = kind.append
    monkeypatch.setattr(
        kind, "append", lambda self, data: made.append(len(data)) or to_file(self, data)
    )
    return made


@pytest.mark.skipif(extension.moving is None, reason="the extension is off, or was not built")
def test_the_extension_gets_all_blocks_that_are_cut_alike_as_far_as_a_call_may_last(
    tmp_path, monkeypatch
):
    made = []
    kind = type(create_data_file(Store.open(tmp_path), "x"))
    to_file = kind.append
    monkeypatch.setattr(
        kind, "append", lambda self, blocks: made.append(blocks.nbytes) or to_file(self, blocks)
    )
    host, blocks = writer(tmp_path, 1), arrays([3, 1, 3, 1, 3, 9])
    append(host, blocks, 10 * ROW)
    host.abort()
    assert made == [n * (ROW + 4) for n in (3 + 3 + 3, 1 + 1, 9)], "one for each shape"
    made.clear()
    host = writer(tmp_path / "other", 1)
    append(host, arrays([2000, 2000]), ROW)
    host.abort()
    assert made == [2000 * (ROW + 4)] * 2, "a call has at most 32 MiB"


ROW = 4096 * 4
"""Bytes of a row's elements; as a chunk it has four more."""


def test_a_block_is_written_by_one_call_however_many_chunks_it_has(tmp_path, calls):
    host = writer(tmp_path, 1)
    append(host, arrays([200]), ROW)
    assert calls == [200 * (ROW + 4)]
    host.abort()


def test_blocks_that_are_cut_alike_are_written_by_one_call_as_far_as_there_is_memory(
    tmp_path, calls
):
    host, blocks = writer(tmp_path, 1), arrays([3, 1, 3, 1, 3, 9])
    append(host, blocks, 10 * ROW)
    record, _ = host.complete(CONTENTS, hosts=1, prior=None)
    assert calls == [n * (ROW + 4) for n in (3 + 3, 1 + 1, 3, 9)], (
        "of the first four those of one shape; then one; then a large one"
    )
    for piece, _, values in blocks:
        assert (read_back(tmp_path, record, piece) == values).all()


def test_edges_that_are_mostly_padding_count_as_they_are_laid_out(tmp_path, calls):
    edges = [
        (
            Piece(f"t{i}", (0, 0), (65, 64), (64, 64)),
            Box((64, 0), (65, 64)),
            np.ones((1, 64), np.float32),
        )
        for i in range(8)
    ]
    host = writer(tmp_path, 1)
    append(host, edges, 4 * ROW)
    assert calls == [4 * (ROW + 4)] * 2
    host.abort()


def test_blocks_of_more_dimensions_than_the_extension_moves_are_laid_out_few_at_a_time(tmp_path):
    """numpy lays them out, in memory of their own."""

    def blocks_in_portions(dimensions):
        shape = (*(1,) * (dimensions - 1), 4096)
        block = (
            Piece("w", (0,) * dimensions, shape, shape),
            Box((0,) * dimensions, shape),
            np.ones(shape, np.float32),
        )
        portions = writer(tmp_path, 1).portions([block] * 20, 4 * ROW, 20 * ROW)
        return [len(portion.blocks) for portion in portions]

    most = extension.MOST_DIMS
    assert blocks_in_portions(most) == ([4] * 5 if extension.moving is None else [20])
    assert blocks_in_portions(most + 1) == [4] * 5


def test_however_small_blocks_are_only_so_many_are_taken_at_a_time(tmp_path):
    scalar = Piece("w", (), (), ()), Box((), ()), np.ones((), np.uint8)
    portions = writer(tmp_path, 1).portions([scalar] * 20, 8 << 10, 20)
    assert [len(portion.blocks) for portion in portions] == [8, 8, 4]


def test_shards_of_a_tensor_lie_side_by_side_in_the_file(tmp_path, calls):
    whole = arrays([4, 4, 4])
    halves = [Box((0, 0), (2, 4096)), Box((2, 0), (4, 4096))]
    host = writer(tmp_path, 1)
    append(
        host,
        [(piece, half, values[half.slices]) for piece, _, values in whole for half in halves],
        1 << 20,
    )
    record, table = host.complete(CONTENTS, hosts=1, prior=None)
    assert calls == [12 * (ROW + 4)]
    assert table.rows.offset.tolist() == [*range(0, 12 * (ROW + 4), ROW + 4)], (
        "by array, and in grid order"
    )
    for piece, _, values in whole:
        assert (read_back(tmp_path, record, piece) == values).all()


@given(sides, st.integers(1, 5), st.sampled_from(["u1", "f2", "f4", "c16"]))
@settings(max_examples=40, deadline=None)
def test_blocks_that_are_laid_out_together_are_the_same_bytes_as_each_of_them_alone(
    grid, count, dtype
):
    shape, chunks = tuple(n for n, _ in grid), tuple(c for _, c in grid)
    blocks = [np.random.default_rng(i).random(shape[::-1]).astype(dtype).T for i in range(count)]
    rows = np.full(
        (
            count,
            Piece("w", (0,) * len(shape), shape, chunks).num_chunks,
            room_for(chunks, blocks[0].itemsize),
        ),
        255,
        np.uint8,
    )
    alone = rows.copy()
    lay_out_all(blocks, chunks, rows.reshape(-1, rows.shape[-1]))
    for block, place in zip(blocks, alone, strict=True):
        lay_out(block, chunks, place)
    assert (rows == alone).all()


def test_a_block_of_as_many_dimensions_as_can_be_stored_is_laid_out():
    flat = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = np.empty((2, 2, room_for((2, 2), 4)), np.uint8)
    lay_out(flat, (2, 2), rows[0])
    lay_out(flat.reshape(*(1,) * 29, 3, 1, 2), (*(1,) * 29, 2, 1, 2), rows[1])
    assert (rows[0, :, :-4] == rows[1, :, :-4]).all()


def test_a_chunk_that_two_threads_were_given_is_refused(tmp_path):
    ((piece, box, values),) = arrays([2])
    host = writer(tmp_path, 2)
    host._encoders[0].append([(piece, box, values)])
    host._encoders[1].append([(piece, Box((1, 0), (2, 4096)), values[1:])])
    with pytest.raises(CommitError, match="chunk t0/c/1/0 was put twice"):
        host.complete(CONTENTS, hosts=1, prior=None)
    host.abort()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_ends_all_and_is_the_callers_and_nothing_is_left(tmp_path, threads):
    blocks, host = arrays([1] * 300), writer(tmp_path, threads)

    def given():
        yield from blocks
        raise CommitError("this one cannot be read")

    with pytest.raises(CommitError, match="this one cannot be read"):
        host.append(host.portions(given(), 1 << 16, 300 * ROW))
    host.abort()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
