"""Reading chunks by the chunk table: which requests are made, and what they take."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid

import crc32c
import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

from shardckpt.errors import CorruptionError, MissingDataError, StorageError
from shardckpt.format.table import ArrayChunks
from shardckpt.io.store import Store
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import Piece
from shardckpt.reading.fetch import ReadableChunks
from shardckpt.reading.inspection import every_chunk
from shardckpt.reading.locate import ChunkFinder, Request, RequestedChunks
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import LOCAL_RUN, ChunkReader
from shardckpt.reading.runs import Band, RunLimits, places_of, tasks
from shardckpt.reading.verification import longer_files
from shardckpt.reading.zarr_keys import stored_chunk


def written(store, rows, gaps=(), file="hosts/00000/0/d/00000"):
    """Rows of an array as one chunk each in one data file, with some bytes of nobody before those
    of `gaps`.

    Returns the array's piece and its rows in the chunk table.
    """
    data, table = bytearray(), []
    for i, row in enumerate(rows):
        data += bytes(dict(gaps).get(i, 0))
        raw = row.tobytes()
        table.append((i, 0, len(data), len(raw) + 4, crc32c.crc32c(raw)))
        data += raw + table[-1][-1].to_bytes(4, "little")
    store.write(file, data)
    shape = (len(rows), *rows[0].shape)
    return Piece("w", (0,) * len(shape), shape, (1, *shape[1:])), ArrayChunks.of_rows(table)


def read_all(reader, piece, dtype):
    out = np.zeros(piece.shape, dtype)
    reader.read(
        [
            Request(
                "w",
                np.dtype(dtype),
                [piece],
                BoxArray.of([Box.full(piece.shape)], len(piece.shape)),
                [out],
            )
        ]
    )
    return out


FILES = ["hosts/00000/0/d/00000"]


def test_what_was_written_is_read_from_every_kind_of_store(store):
    rows = np.random.default_rng(0).integers(0, 256, (50, 1000), np.uint8)
    piece, table = written(store, rows, {7: 3, 20: 100_000})
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})))
    for _ in range(3):
        assert np.array_equal(read_all(reader, piece, np.uint8), rows)
    column = np.zeros((50, 1), np.uint8)
    reader.read(
        [
            Request(
                "w",
                np.dtype(np.uint8),
                [piece],
                BoxArray.of([Box((0, 999), (50, 1000))], 2),
                [column],
            )
        ]
    )
    assert np.array_equal(column, rows[:, 999:])
    assert stored_chunk(reader, "w", np.dtype(np.uint8), piece, 20)[:-4] == rows[20].tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_groups_that_are_planned_together_are_read_when_their_calls_are_made_and_not_before(
    store, threads
):
    rows = np.random.default_rng(0).integers(0, 256, (50, 1000), np.uint8)
    piece, table = written(store, rows, {7: 3, 20: 100_000})
    before = set(threading.enumerate())
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})), threads=threads)
    parts = [[(0, 10), (30, 50)], [(5, 31)], [], [(10, 11), (2, 3)]]
    buffers = [[np.zeros((stop - start, 1000), np.uint8) for start, stop in part] for part in parts]
    groups = [
        [
            Request(
                "w",
                np.dtype(np.uint8),
                [piece],
                BoxArray.of([Box((start, 0), (stop, 1000))], 2),
                [buffer],
            )
            for (start, stop), buffer in zip(part, group_buffers, strict=True)
        ]
        for part, group_buffers in zip(parts, buffers, strict=True)
    ]
    calls = reader.reads(groups)
    assert reader.stats.bytes_needed == reader.stats.bytes_read == 0
    done = [False] * len(parts)
    for i in (3, 0, 2, 1):
        calls[i]()
        done[i] = True
        for part, group_buffers, finished in zip(parts, buffers, done, strict=True):
            for (start, stop), buffer in zip(part, group_buffers, strict=True):
                assert np.array_equal(
                    buffer, rows[start:stop] if finished else np.zeros_like(buffer)
                )
    assert reader.stats.bytes_needed == 58 * 1000
    if threads == 1:
        assert not [
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("shardckpt-read")
        ]


@pytest.fixture
def proxied(cloud):
    """A proxy, and a store behind it in a bucket that TensorStore knows by this proxy alone."""
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        yield proxy, Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


def test_neighbours_are_one_request_and_small_gaps_are_read_along(proxied):
    proxy, store = proxied
    rows = np.random.default_rng(0).integers(0, 256, (64, 1 << 10), np.uint8)
    piece, table = written(store, rows, {10: 1000, 20: 65536, 30: 65537, 40: 1 << 20})
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})))
    proxy.traffic.reset()
    assert np.array_equal(read_all(reader, piece, np.uint8), rows)
    summary = proxy.traffic.summary()
    assert (reader.stats.reads, summary["kinds"]) == (3, {"read": 3})
    assert reader.stats.bytes_read == summary["bytes_down"] == rows.nbytes + 4 * 64 + 1000 + 65536


def test_whole_files_are_read_in_requests_of_8_mib_and_more(proxied):
    proxy, store = proxied
    rows = np.random.default_rng(0).integers(0, 1 << 62, (32, 1 << 17), np.int64)  # chunks of 1 MiB
    piece, table = written(store, rows)
    for memory, most, requests in (
        (256 << 20, 10 << 20, 4),
        (512 << 20, 16 << 20, 3),
        (1 << 20, 10 << 20, 4),
    ):
        proxy.traffic.reset()
        assert np.array_equal(
            read_all(
                ChunkReader(
                    ReadableChunks(store, WholeTable.of(FILES, {"w": table})), memory=memory
                ),
                piece,
                np.int64,
            ),
            rows,
        )
        sizes = [e.bytes_down for e in proxy.traffic.exchanges()]
        assert len(sizes) == requests
        assert max(sizes) <= most
        assert sum(size >= 8 << 20 for size in sizes) >= requests - 1


def test_many_requests_are_under_way_at_once(proxied):
    """All must have come before any is answered."""
    proxy, store = proxied
    rows = np.arange(12 * 1000).reshape(12, 1000)
    gaps = dict.fromkeys(range(1, 12), 70_000)
    piece, table = written(store, rows, gaps)
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})))
    proxy.traffic.reset()
    with proxy.rules.during(Rule("together", requests=12, times=None, kinds=("read",))):
        assert np.array_equal(read_all(reader, piece, np.int64), rows)
    assert len(proxy.traffic.exchanges()) == 12, "none was given up and sent again"


def test_a_read_that_breaks_off_is_repeated(proxied):
    proxy, store = proxied
    rows = np.random.default_rng(0).integers(0, 256, (16, 1 << 16), np.uint8)
    piece, table = written(store, rows)
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})))
    for fault in (Rule("truncate"), Rule("reset"), Rule("status", status=429)):
        with proxy.rules.during(fault):
            assert np.array_equal(read_all(reader, piece, np.uint8), rows)
            assert proxy.rules.fired()[0][1] == 1


def test_errors_name_the_tensor_the_elements_and_the_object(cloud_store):
    rows = np.random.default_rng(0).integers(0, 256, (4, 1000), np.uint8)
    piece, table = written(cloud_store, rows)
    file = f"{cloud_store}/hosts/00000/0/d/00000"
    data = cloud_store.read(FILES[0])
    reader = ChunkReader(ReadableChunks(cloud_store, WholeTable.of(FILES, {"w": table})))

    cloud_store.write(FILES[0], data[:2000])
    with pytest.raises(CorruptionError, match=rf"w\[1:2, 0:1000\].*{file}.*cut off"):
        read_all(reader, piece, np.uint8)
    cloud_store.write(FILES[0], bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CorruptionError, match=r"w\[0:1, 0:1000\] is damaged"):
        read_all(reader, piece, np.uint8)
    cloud_store.delete(FILES[0])
    with pytest.raises(MissingDataError, match=rf"w\[0:1, 0:1000\].*{file}.*missing"):
        read_all(reader, piece, np.uint8)


def test_every_damaged_chunk_is_found_and_no_other(cloud_store):
    rows = np.random.default_rng(0).integers(0, 256, (40, 1000), np.uint8)
    piece, table = written(cloud_store, rows)
    data = bytearray(cloud_store.read(FILES[0]))
    for i in (3, 17):
        data[1004 * i + 5] ^= 1
    cloud_store.write(FILES[0], data + b"more")
    reader = ChunkReader(ReadableChunks(cloud_store, WholeTable.of(FILES, {"w": table})))
    rows_damaged = []
    request = Request("w", np.dtype(np.uint8), [piece], BoxArray.of([], 2), [])
    groups = every_chunk.check(
        reader,
        [request],
        lambda name, box, file, error: rows_damaged.append(box.start[0]),
        most=9 * 1000,
    )
    assert [(done, sorted(rows_damaged)) for done in groups] == [
        (9, [3]),
        (18, [3, 17]),
        (27, [3, 17]),
        (36, [3, 17]),
        (40, [3, 17]),
    ]
    assert [file for file, _ in longer_files(reader)] == FILES


def test_threads_go_on_with_the_next_batch_of_chunks_before_all_of_one_is_read(store, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (2, 1000), np.uint8)
    piece, table = written(store, rows)
    at_work = threading.Barrier(2)

    class Waiting(ReadableChunks):
        def read_into(self, task, vectors):
            at_work.wait(60)
            super().read_into(task, vectors)

    monkeypatch.setattr("shardckpt.reading.locate.MOST_CHUNKS", 1)
    monkeypatch.setattr("shardckpt.io.extension.moving", None)
    assert np.array_equal(
        read_all(
            ChunkReader(Waiting(store, WholeTable.of(FILES, {"w": table})), threads=2),
            piece,
            np.uint8,
        ),
        rows,
    )


def test_a_codec_may_ask_for_other_chunks_too(tmp_path):
    """Chunks that are stored as the difference from the chunk before them."""
    store, rows = (
        Store.open(tmp_path),
        np.random.default_rng(0).integers(0, 256, (5, 1000), np.uint8),
    )
    piece, table = written(
        store, np.diff(rows, axis=0, prepend=np.uint8(0)), dict.fromkeys(range(5), 1)
    )

    def differences(task, read):
        for one in task.alone():
            array, band = (
                one.chunks.requested.part_of(one.begin),
                Band(one.chunks, one.begin, one.end),
            )
            up_to_it = np.arange(one.chunks.requested.position[one.begin] + 1)
            needed = ChunkFinder(task.source).located(
                RequestedChunks.of_positions([(array.request, array.piece, up_to_it)])
            )
            steps = [
                np.array(read(step, direct=False).payloads[0])
                for step in tasks(needed, RunLimits(1, gap=0, chunks=1))
            ]
            yield band, places_of([band])[0], np.sum(steps, axis=0, dtype=np.uint8)[np.newaxis]

    reader = ChunkReader(
        ReadableChunks(store, WholeTable.of(FILES, {"w": table}), differences), threads=2
    )
    assert np.array_equal(read_all(reader, piece, np.uint8), rows)


def test_no_buffer_is_written_to_after_an_error(tmp_path):
    """The first error stops the rest, and what has begun ends before it is raised."""
    store = Store.open(tmp_path)
    rows = np.random.default_rng(0).integers(1, 256, (64, 1 << 20), np.uint8)
    piece, table = written(store, rows)
    raw = bytearray((tmp_path / FILES[0]).read_bytes())
    raw[0] ^= 1
    (tmp_path / FILES[0]).write_bytes(raw)
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})), threads=4)
    out = np.zeros(piece.shape, np.uint8)
    request = Request(
        "w", np.dtype(np.uint8), [piece], BoxArray.of([Box.full(piece.shape)], 2), [out]
    )
    for _ in range(5):
        with pytest.raises(CorruptionError):
            reader.read([request])
        out[:] = 0
        assert not out.any()
    assert not out.any()


def test_the_same_threads_serve_all_reads(tmp_path):
    store = Store.open(tmp_path)
    rows = np.random.default_rng(0).integers(0, 256, (16, 1 << 20), np.uint8)
    piece, table = written(store, rows)
    reader = ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table})), threads=2)

    def threads():
        return {t for t in threading.enumerate() if t.name.startswith("shardckpt-read")}

    before = threads()
    read_all(reader, piece, np.uint8)
    ours = threads() - before
    assert 1 <= len(ours) <= 2
    for _ in range(3):
        assert np.array_equal(read_all(reader, piece, np.uint8), rows)
    assert len(threads() - before - ours) <= 2 - len(ours)


def test_a_run_of_more_chunks_than_one_system_call_takes_is_read_in_place(tmp_path):
    store = Store.open(tmp_path)
    rows = np.random.default_rng(0).integers(0, 256, (os.sysconf("SC_IOV_MAX") * 3, 8), np.uint8)
    piece, table = written(store, rows)
    assert rows.nbytes < LOCAL_RUN[0]
    assert np.array_equal(
        read_all(
            ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table}))), piece, np.uint8
        ),
        rows,
    )


@pytest.mark.long
def test_memory_stays_within_the_limit(cloud):
    """In a process of its own: 64 MiB in chunks of 1 MiB, four times, into memory that is there
    already."""
    store = Store.open(cloud.url(uuid.uuid4().hex))
    rows = np.ones((64, 1 << 20), np.uint8)
    written(store, rows)
    program = """
import sys
import numpy as np
import crc32c
from shardckpt.layout.box import Box, BoxArray
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.locate import ChunkFinder, Request, RequestedChunks
from shardckpt.reading.fetch import ReadableChunks
from shardckpt.reading.reader import ChunkReader
from shardckpt.io.store import Store
from shardckpt.format.table import ArrayChunks
from shardckpt.plan.pieces import Piece
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
store = Store.open(sys.argv[1])
n, size, file = 64, 1 << 20, "hosts/00000/0/d/00000"
crc = crc32c.crc32c(bytes([1]) * size)
table = ArrayChunks.of_rows([(i, 0, i * (size + 4), size + 4, crc) for i in range(n)])
out = np.zeros((n, size), np.uint8)
out[:] = 7
store.read(file, 0, 10)
before = peak()
reader = ChunkReader(ReadableChunks(store, WholeTable.of([file], {"w": table})), memory=60 << 20)
piece = Piece("w", (0, 0), (n, size), (1, size))
for _ in range(4):
    reader.read([Request("w", out.dtype, [piece], BoxArray.of([Box.full(out.shape)], 2), [out])])
print(peak() - before)
assert all((row == 1).all() for row in out)
"""
    command = [sys.executable, "-c", program, str(store)]
    run = subprocess.run(
        command,
        env={**os.environ, **cloud.env()},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert int(run.stdout) <= 60 + 16


def test_a_file_the_system_does_not_read_is_a_storage_error_with_the_tensor_and_what_to_do(
    tmp_path,
):
    store = Store.open(tmp_path)
    piece, table = written(store, np.ones((2, 10), np.uint8))
    file = tmp_path / FILES[0]
    file.unlink()
    file.mkdir()
    with pytest.raises(
        StorageError, match=rf"w\[0:1, 0:10\]: cannot read {file}: .*Is a directory"
    ):
        read_all(
            ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table}))), piece, np.uint8
        )
    file.rmdir()
    file.parent.rmdir()
    file.parent.touch()
    with pytest.raises(
        StorageError,
        match=rf"w\[0:1, 0:10\]: cannot read {file}: Not a directory; a file stands where",
    ):
        read_all(
            ChunkReader(ReadableChunks(store, WholeTable.of(FILES, {"w": table}))), piece, np.uint8
        )
