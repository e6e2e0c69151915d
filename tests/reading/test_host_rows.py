"""Readers of few rows of every tensor ask the hosts that wrote them, few times; the table of all
hosts has the rest."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardckpt import Box
from shardckpt.commit.index import write_table
from shardckpt.commit.table_reading import merge_tables
from shardckpt.errors import StorageError
from shardckpt.format import table as table_format
from shardckpt.format.documents import FileReference, seal
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.io.store import Store
from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import Piece
from shardckpt.reading import host_rows, table_blocks
from shardckpt.reading.host_rows import HostRows
from shardckpt.reading.reader import ReadStats
from shardckpt.reading.table_blocks import TableBlocks

HOSTS, TENSORS, EACH = 6, 40, 5
"""Each host writes so many chunks of every tensor, one after another."""
CHUNKS = HOSTS * EACH
PIECES = [Piece(f"w{i}", (0,), (CHUNKS,), (1,)) for i in range(TENSORS)]
CONTENTS = FileReference("contents/0.json", 1, "0" * 64)
ATTEMPT = "20300101T000000-00000000"


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch):
    """However small a table, it is read block by block."""
    monkeypatch.setattr(table_format, "BLOCK_ROWS", 4)
    monkeypatch.setattr(table_blocks, "LEAST_REQUEST", 0)


def of_host(host, file):
    at = np.arange(host * EACH, (host + 1) * EACH)
    arrays = {
        f"w{i}": ArrayChunks.of_columns(at, at * 0 + file, at * 7 + i, at * 0 + 9, at * 100 + i)
        for i in range(TENSORS)
    }
    return Table.of([f"hosts/{host:05d}/0/d/00000", f"hosts/{host:05d}-ab/0/d/00001"], arrays)


class Saved:
    """Tables of hosts in an object store."""

    def __init__(self, *, file=1, of_host=of_host):
        self.place = Store.open(f"memory://{uuid.uuid4().hex}/{ATTEMPT}")
        self.tables = [of_host(host, file) for host in range(HOSTS)]
        self.table = merge_tables(self.tables)
        self.reference = write_table(self.place, "table", self.table)
        self.records = [self.record(host, table) for host, table in enumerate(self.tables)]

    def record(self, host, table):
        reference = write_table(self.place, f"hosts/{host:05d}/table", table)
        files = HostFiles(reference, (), CONTENTS, None)
        data = seal(
            HostRecord(
                ATTEMPT, host, HOSTS, None, "packed", None, files, len(table.rows), 1
            ).to_json()
        )
        self.place.write(f"records/{host:05d}.json", data)
        return FileReference.of(f"records/{host:05d}.json", data)

    def opened(self):
        stats = ReadStats()
        return TableBlocks(self.place, self.reference, stats.count_index, None, self.records), stats

    def check(self, blocks, start, stop, pieces=PIECES):
        """Prepare a part of tensors, and find what the table of all says."""
        box = BoxArray.of([Box((start,), (stop,))], 1)
        blocks.prepare((piece, box) for piece in pieces)
        array, chunks = (
            np.repeat(np.arange(len(pieces)), stop - start),
            np.tile(np.arange(start, stop), len(pieces)),
        )
        files, rows = blocks.find([piece.path for piece in pieces], array, chunks)
        assert list(files) == self.table.files
        expected = self.table.rows.take(
            np.array([int(p.path[1:]) for p in pieces])[array] * CHUNKS + chunks
        )
        for column in ("chunk", "file", "offset", "length", "crc"):
            np.testing.assert_array_equal(getattr(rows, column), getattr(expected, column))


def test_a_host_that_restores_what_it_saved_reads_the_header_a_unit_its_record_and_its_table():
    saved = Saved()
    for host in range(HOSTS):
        blocks, stats = saved.opened()
        saved.check(blocks, host * EACH, (host + 1) * EACH)
        assert stats.index_reads == 4
        saved.check(blocks, host * EACH + 1, host * EACH + 3, PIECES[::2])
        assert stats.index_reads == 4


def test_other_hosts_are_asked_when_something_of_theirs_is_wanted():
    saved = Saved()
    blocks, stats = saved.opened()
    saved.check(blocks, 2 * EACH, 4 * EACH)
    assert stats.index_reads == 1 + 2 * (1 + 2)  # for each a unit that says so
    saved.check(blocks, 2 * EACH, 5 * EACH)
    assert stats.index_reads == 1 + 3 * (1 + 2)


def test_reading_a_few_whole_tensors_reads_their_part_of_the_common_table():
    blocks, stats = (saved := Saved()).opened()
    saved.check(blocks, 0, CHUNKS, PIECES[:2])
    assert stats.index_reads == 2  # units side by side


def test_if_each_unit_is_of_another_host_at_most_one_host_is_asked_in_vain(monkeypatch):
    monkeypatch.setattr(table_blocks, "LARGEST_REQUEST", 4 * 28)
    blocks, stats = (saved := Saved()).opened()
    saved.check(blocks, 0, CHUNKS, PIECES[:2])
    assert stats.index_reads <= 1 + 2 * CHUNKS // 4 + 2


def test_a_table_that_is_larger_than_what_it_saves_is_not_read(monkeypatch):
    monkeypatch.setattr(host_rows, "REQUEST_BYTES", 10)
    saved = Saved()
    blocks, stats = saved.opened()
    saved.check(blocks, 0, 1, PIECES[:12])
    assert stats.index_reads <= 1 + 12


@pytest.mark.parametrize("what", ["records/00002.json", "hosts/00002/table"])
@pytest.mark.parametrize("damage", ["a flipped bit", "gone", "refused"])
def test_a_host_whose_record_or_table_is_lost_damaged_or_refused_is_done_without(
    what, damage, monkeypatch
):
    saved = Saved()
    if damage == "gone":
        saved.place.delete(what)
    elif damage == "refused":
        read = Store.read

        def refusing(self, key, start=None, stop=None):
            if key == what:
                raise StorageError(f"cannot read {self.path_of(key)}: PERMISSION_DENIED: 403")
            return read(self, key, start, stop)

        monkeypatch.setattr(Store, "read", refusing)
    else:
        data = bytearray(saved.place.read(what))
        data[-20] ^= 1
        saved.place.write(what, data)
    blocks, stats = saved.opened()
    saved.check(blocks, EACH, 4 * EACH)
    saved.check(blocks, 2 * EACH, 3 * EACH)
    assert stats.index_reads < 3 * TENSORS


@pytest.mark.parametrize(
    "wrong",
    [
        "a tensor that is none",
        "a chunk beyond the grid",
        "a file of nobody",
        "objects of their own",
    ],
)
def test_a_host_whose_table_contradicts_the_one_of_all_is_done_without(wrong):
    saved = Saved()
    table = saved.tables[2]
    arrays = dict(table.arrays())
    if wrong == "a tensor that is none":
        table = Table.of(table.files, {"x": arrays.pop("w0"), **arrays})
    elif wrong == "a chunk beyond the grid":
        table = Table.of(table.files, arrays | {"w3": ArrayChunks.of_rows([(CHUNKS, 0, 0, 9, 1)])})
    elif wrong == "a file of nobody":
        table = Table.of(["hosts/00002/0/d/00009", *table.files[1:]], arrays)
    else:
        table = Table.of(
            table.files, arrays | {"w3": ArrayChunks.of_rows([(0, OWN_OBJECT, 0, 9, 1)])}
        )
    saved.records[2] = saved.record(2, table)
    saved.check(saved.opened()[0], 2 * EACH, 3 * EACH)


def test_rows_kept_of_hosts_stay_within_their_limit(monkeypatch):
    saved = Saved()
    monkeypatch.setattr(host_rows, "MOST_BYTES", 2 * len(saved.tables[0].encode()))
    blocks, _ = saved.opened()
    for host in (0, 1, 2, 3, 0):
        saved.check(blocks, host * EACH, (host + 1) * EACH)
        assert len(blocks._hosts._known[0]) <= 2 * TENSORS * EACH
    assert len(blocks._hosts._known[0])


def test_rows_read_for_a_call_are_kept_until_it_has_used_them(monkeypatch):
    saved = Saved()
    monkeypatch.setattr(host_rows, "MOST_BYTES", 2 * len(saved.tables[0].encode()))
    monkeypatch.setattr(table_blocks, "KEPT_BYTES", 0)
    blocks, stats = saved.opened()
    box = BoxArray.of([Box((0,), (4 * EACH,))], 1)
    blocks.prepare((piece, box) for piece in PIECES)
    known = len(blocks._hosts._known[0])
    # Of the first ones that were asked; there is no room for more.
    assert known == 2 * TENSORS * EACH
    before = stats.index_reads
    saved.check(blocks, 0, 4 * EACH)
    assert len(blocks._hosts._known[0]) == known
    # Those of the other two, which lie side by side.
    assert stats.index_reads - before <= 1 + TENSORS


def test_rows_that_two_threads_read_at_once_are_all_kept():
    saved = Saved()
    blocks, _ = saved.opened()
    hosts, barrier, known = blocks._hosts, Barrier(2), [blocks._hosts._known]

    class Meeting(HostRows):
        """Two threads that may look at what is known at once look at the same."""

        @property
        def _known(self):
            value = known[0]
            with suppress(BrokenBarrierError):  # the other one has to wait, as it should
                barrier.wait(timeout=0.2)
            return value

        @_known.setter
        def _known(self, now):
            known[0] = now

    hosts.__class__ = Meeting
    with ThreadPoolExecutor(2) as pool:
        none = np.empty(0, np.int64)
        list(pool.map(lambda host: hosts.read([host], 100.0, none), (1, 4)))
    assert len(known[0][0]) == 2 * TENSORS * EACH


def test_a_table_on_a_disk_is_read_by_itself(tmp_path):
    saved = Saved()
    place = Store.open(tmp_path / ATTEMPT)
    reference, stats = write_table(place, "table", saved.table), ReadStats()
    saved.check(TableBlocks(place, reference, stats.count_index, None, saved.records), 0, EACH)
    assert stats.index_reads <= 1 + TENSORS


@given(
    st.lists(
        st.tuples(st.integers(0, CHUNKS - 1), st.integers(1, CHUNKS), st.integers(1, 20)),
        min_size=1,
        max_size=5,
    )
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_rows_read_in_any_order_are_those_of_the_common_table(reads):
    saved = Saved()
    blocks, stats = saved.opened()
    for start, count, step in reads:
        saved.check(blocks, start, min(start + count, CHUNKS), PIECES[::step])
    assert stats.index_reads <= 1 + -(-len(saved.table.rows) // 4) + 2 * HOSTS


def test_where_chunks_are_objects_of_their_own_no_host_is_looked_for():
    def objects(host, _):
        at = np.arange(host * EACH, (host + 1) * EACH)
        row = ArrayChunks.of_columns(at, at * 0 + OWN_OBJECT, at * 0, at * 0 + 9, at)
        return Table.of([], {f"w{i}": row for i in range(TENSORS)})

    blocks, stats = (saved := Saved(of_host=objects)).opened()
    saved.check(blocks, 0, EACH)
    assert stats.index_reads == 1 + TENSORS
