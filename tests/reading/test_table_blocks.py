"""Of a chunk table that is read which is needed, each block is verified by itself, and what is lost
is made up for."""

from __future__ import annotations

import threading
import uuid

import crc32c
import numpy as np
import pytest

import shardckpt
from shardckpt import Box, errors
from shardckpt.commit.index import write_table
from shardckpt.format import table as table_format
from shardckpt.format.documents import seal
from shardckpt.format.record import CheckpointRecord
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.format.table import ROW, ArrayChunks, Table
from shardckpt.io.store import Store
from shardckpt.layout import dtypes
from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import Piece
from shardckpt.reading import table_blocks
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import ReadStats
from shardckpt.reading.table_blocks import TableBlocks

TENSORS, CHUNKS = 250, 4000
TABLE_BYTES = TENSORS * CHUNKS * ROW.itemsize
FILE = "hosts/00000/0/d/00000"
ATTEMPT = "20300101T000000-00000000"


def of_a_million_chunks(url):
    """A checkpoint of tensors of one-byte chunks, by its record, its table and its data file
    alone."""
    root = Store.open(url)
    place = root.sub(ATTEMPT)
    elements = np.arange(CHUNKS) % 251
    crcs = np.array([crc32c.crc32c(bytes([i])) for i in range(256)], "<u4")
    stored = np.zeros(CHUNKS, [("element", "u1"), ("crc", "<u4")])
    stored["element"], stored["crc"] = elements, crcs[elements]
    place.write(FILE, stored.tobytes() * TENSORS)
    position, arrays, tensors = np.arange(CHUNKS), {}, {}
    for i in range(TENSORS):
        path = f"w{i}"
        arrays[path] = ArrayChunks(
            position,
            np.zeros(CHUNKS),
            (i * CHUNKS + position) * 5,
            np.full(CHUNKS, 5),
            crcs[elements],
        )
        tensors[path] = TensorRecord(
            path, (CHUNKS,), dtypes.by_name("uint8"), None, (Piece(path, (0,), (CHUNKS,), (1,)),)
        )
    totals = {
        "tensors": TENSORS,
        "bytes": TENSORS * CHUNKS,
        "stored_bytes": 5 * TENSORS * CHUNKS,
        "chunks": TENSORS * CHUNKS,
    }
    record = CheckpointRecord(
        ATTEMPT,
        "2030-01-01T00:00:00+00:00",
        "tests",
        "packed",
        None,
        (),
        Structure(dict.fromkeys(tensors, "$tensor"), tensors),
        {},
        totals,
        write_table(place, "table", Table.of([FILE], arrays)),
    )
    root.write("checkpoint.json", seal(record.to_json()))
    return elements.astype(np.uint8)


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """Two equal checkpoints, one on a disk and one in an object store: their places, and the
    elements of every tensor."""
    places = {
        "disk": str(tmp_path_factory.mktemp("million") / "c"),
        "objects": f"memory://{uuid.uuid4().hex}/c",
    }
    elements, _ = map(of_a_million_chunks, places.values())
    return places, elements


def test_a_host_with_a_64th_of_every_tensor_reads_a_sixteenth_of_the_table(million):
    places, elements = million
    checkpoint = shardckpt.open(places["disk"])
    begin = 17 * CHUNKS // 64
    box = Box((begin,), (begin + CHUNKS // 64,))
    for name in checkpoint.names():
        assert np.array_equal(checkpoint.read(name, box), elements[box.slices])
    assert checkpoint.stats.bytes_read == TENSORS * 5 * (CHUNKS // 64)
    assert checkpoint.stats.index_bytes < TABLE_BYTES // 16
    assert checkpoint.stats.index_reads == 1 + TENSORS


@pytest.mark.parametrize("place", ["disk", "objects"])
def test_restoring_a_few_tensors_reads_a_fortieth_of_the_table(million, place):
    places, elements = million
    checkpoint = shardckpt.open(places[place])
    restored = shardckpt.restore(checkpoint, only="w7")
    assert np.array_equal(restored["w7"], elements)
    assert checkpoint.stats.index_bytes < TABLE_BYTES // 40
    assert checkpoint.stats.index_reads == 2  # the header, and the tensor's rows
    assert checkpoint.stats.bytes_read == 5 * CHUNKS  # the table is counted apart


def test_nothing_of_the_table_is_read_for_looking_at_the_record(million):
    checkpoint = shardckpt.open(million[0]["disk"])
    assert checkpoint.info("w9").num_chunks == CHUNKS
    assert (
        checkpoint.reader.stats.index_bytes == checkpoint.record.table.header < TABLE_BYTES // 100
    )


def find(table, path, chunks):
    """Chunks of one array."""
    return table.find([path], np.zeros(len(chunks), np.int64), chunks)


def lookup(checkpoint):
    """The table alone: reading a million chunks takes longer than finding them."""
    return checkpoint.reader._own.table


@pytest.mark.parametrize(
    ("place", "requests"),
    [("disk", TABLE_BYTES // (4 << 20)), ("objects", TABLE_BYTES // (256 << 10))],
)
def test_restoring_everything_reads_the_table_once_and_in_few_requests(million, place, requests):
    checkpoint = shardckpt.open(million[0][place])
    pieces = [
        piece for tensor in checkpoint.record.structure.tensors.values() for piece in tensor.pieces
    ]
    everything = BoxArray.of([Box((0,), (CHUNKS,))], 1)
    for group in (pieces[:100], pieces[100:]):
        lookup(checkpoint).prepare((piece, everything) for piece in group)
        for piece in group:
            assert len(find(lookup(checkpoint), piece.path, np.arange(CHUNKS))[1]) == CHUNKS
    assert checkpoint.stats.index_bytes == checkpoint.record.table.size
    assert checkpoint.stats.index_reads <= requests + 3


def test_an_object_store_is_asked_at_most_once_per_256_kib_of_the_table(million):
    """Small gaps between needed rows are read along with them."""
    checkpoint = shardckpt.open(million[0]["objects"])
    for name in checkpoint.names():
        find(lookup(checkpoint), name, np.array([5]))
    assert checkpoint.stats.index_reads <= 1 + -(-TABLE_BYTES // (256 << 10))


def test_many_threads_read_every_block_once(million):
    checkpoint = shardckpt.open(million[0]["disk"])
    names = checkpoint.names()[:24]
    wrong = []

    def look_up(names):
        for name in names:
            rows = find(lookup(checkpoint), name, np.arange(CHUNKS))[1]
            wrong.extend(
                [name]
                * int((rows.offset != (int(name[1:]) * CHUNKS + np.arange(CHUNKS)) * 5).any())
            )

    threads = [
        threading.Thread(target=look_up, args=(names[i:] + names[:i],)) for i in range(0, 24, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    rows = -(-24 * CHUNKS // table_format.BLOCK_ROWS) * table_format.BLOCK_ROWS
    assert checkpoint.stats.index_bytes == checkpoint.record.table.header + rows * ROW.itemsize


# --- small tables, in blocks of a few rows --------------------------------------------------------


@pytest.fixture
def blocks_of_four(monkeypatch):
    """However small a table, it is read block by block."""
    monkeypatch.setattr(table_format, "BLOCK_ROWS", 4)
    monkeypatch.setattr(table_blocks, "LEAST_REQUEST", 0)


def complete(**counts):
    rows = {path: [(i, i % 2, 7 * i, 9, n + i) for i in range(n)] for path, n in counts.items()}
    return Table.of(
        ["x", "y"],
        {
            path: ArrayChunks.of_rows(of_array) if of_array else ArrayChunks.none()
            for path, of_array in rows.items()
        },
    )


def opened(place, table, spare=None):
    """A table that is read by blocks, and what that takes."""
    stats = ReadStats()
    return TableBlocks(place, write_table(place, "table", table), stats.count_index, spare), stats


def spoil(place, at):
    data = bytearray(place.read("table"))
    data[at] ^= 1
    place.write("table", bytes(data))


def spare_table():
    return WholeTable.of(["z"], {"a": ArrayChunks.of_rows([(i, 0, i, 5, i) for i in range(6)])})


def test_every_chunk_is_found_wherever_blocks_and_arrays_begin(store, blocks_of_four):
    table = complete(a=3, none=0, b=1, c=17, d=4)
    blocks, _ = opened(store, table)
    for path, expected in table.arrays().items():
        for chunks in (np.arange(len(expected)), np.arange(len(expected))[::3], np.arange(0)):
            files, rows = find(blocks, path, chunks)
            assert list(files) == ["x", "y"]
            for column in ("chunk", "file", "offset", "length", "crc"):
                np.testing.assert_array_equal(
                    getattr(rows, column), getattr(expected, column)[chunks]
                )
        assert blocks.first_missing(path, len(expected)) is None
        assert blocks.first_missing(path, len(expected) + 5) == len(expected)
        with pytest.raises(KeyError):
            find(blocks, path, np.array([len(expected)]))
    assert (blocks.first_missing("e", 0), blocks.first_missing("e", 1 << 60)) == (None, 0)
    assert blocks.whole().files == ["x", "y"]


def test_blocks_side_by_side_are_one_read(tmp_path, blocks_of_four):
    blocks, stats = opened(Store.open(tmp_path), complete(a=400))
    find(blocks, "a", np.array([0, 5, 9, 200, 201, 399]))
    assert stats.index_reads == 1 + 3
    find(blocks, "a", np.arange(12))
    assert stats.index_reads == 1 + 3


def test_a_small_table_is_read_at_once(tmp_path):
    blocks, stats = opened(Store.open(tmp_path), complete(a=3, b=9000))
    find(blocks, "b", np.arange(9000))
    assert (stats.index_reads, stats.index_bytes) == (1, (tmp_path / "table").stat().st_size)


def test_rows_that_were_asked_for_long_ago_are_not_kept(tmp_path, blocks_of_four, monkeypatch):
    monkeypatch.setattr(table_blocks, "KEPT_BYTES", 3 * 4 * ROW.itemsize)
    blocks, stats = opened(Store.open(tmp_path), complete(a=400))
    for i in (0, 4, 8, 12, 4, 8, 12):
        find(blocks, "a", np.array([i]))
    assert stats.index_reads == 1 + 4
    find(blocks, "a", np.array([0]))
    assert stats.index_reads == 1 + 5
    find(blocks, "a", np.arange(400))  # all of what one call wants is there at once
    assert len(blocks._units) == 100
    find(blocks, "a", np.array([0]))
    assert len(blocks._units) == 3


def test_damage_to_a_block_that_nobody_needs_does_no_harm(tmp_path, blocks_of_four):
    place = Store.open(tmp_path)
    blocks, _ = opened(place, complete(a=400))
    spoil(place, -1)
    assert len(find(blocks, "a", np.arange(396))[1]) == 396
    with pytest.raises(errors.FormatError, match=r"table: block 99 of the chunk table is damaged"):
        find(blocks, "a", np.arange(400))


def in_memory():
    return Store.open(f"memory://{uuid.uuid4().hex}")


def test_a_scan_of_a_table_in_an_object_store_only_reads_forward(blocks_of_four):
    table = complete(a=400)
    blocks, stats = opened(in_memory(), table)
    for i in range(0, 400, 4):
        assert (
            find(blocks, "a", np.arange(i, i + 4))[1].offset.tolist()
            == table.arrays()["a"].offset[i : i + 4].tolist()
        )
    assert stats.index_reads == 1 + 7  # 1, 2, 4, … blocks of 100
    assert stats.index_bytes == len(table.encode())


def test_scattered_small_reads_read_no_more_of_the_table_than_they_need(
    blocks_of_four, monkeypatch
):
    monkeypatch.setattr(table_blocks, "NEAR_BYTES", 3 * 4 * ROW.itemsize)
    table = complete(a=400)
    blocks, stats = opened(in_memory(), table)
    for i in (0, 40, 80, 44, 160, 120):
        find(blocks, "a", np.array([i]))
    assert (stats.index_reads, stats.index_bytes) == (
        1 + 6,
        len(table.encode()) - table.body_bytes + 6 * 4 * ROW.itemsize,
    )


def test_damage_to_what_is_only_read_along_does_no_harm(blocks_of_four):
    place = in_memory()
    blocks, _ = opened(place, complete(a=16))
    spoil(place, -1)
    for i in range(0, 12, 4):  # with the third block the fourth would be read
        assert len(find(blocks, "a", np.arange(i, i + 4))[1]) == 4
    with pytest.raises(errors.FormatError, match=r"table: block 3 of the chunk table is damaged"):
        find(blocks, "a", np.array([12]))


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "gone"])
def test_a_damaged_table_is_given_up_for_what_others_say(store, blocks_of_four, damage):
    blocks, _ = opened(store, complete(a=6), spare_table)
    data = store.read("table")
    if damage == "a flipped bit":
        spoil(store, -1)
    elif damage == "cut off":
        store.write("table", data[:-1])
    else:
        store.delete("table")
    files, rows = find(blocks, "a", np.array([0, 5]))
    assert (files, rows.length.tolist()) == (["z"], [5, 5])
    store.write("table", data)
    assert find(blocks, "a", np.array([0]))[0] == ["z"]
    assert blocks.first_missing("a", 7) == 6
    with pytest.raises(KeyError):
        find(blocks, "a", np.array([6]))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 0, 9, 1), (2, 0, 9, 9, 1)],  # one is missing
        [(0, 0, 0, 9, 1), (0, 0, 9, 9, 1)],
        [(1, 0, 0, 9, 1), (0, 0, 9, 9, 1)],
        [(0, 2, 0, 9, 1), (1, 0, 9, 9, 1)],  # a file without a name
        [(0, 0, 2**63, 9, 1), (1, 0, 9, 9, 1)],
    ],
)
def test_rows_that_cannot_be_are_refused_though_their_digests_agree(store, blocks_of_four, rows):
    blocks, _ = opened(store, Table.of(["x", "y"], {"a": ArrayChunks.of_rows(rows)}))
    with pytest.raises(errors.FormatError, match=r"table: the (chunk )?table"):
        find(blocks, "a", np.array([1]))
