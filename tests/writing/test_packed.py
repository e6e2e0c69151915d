"""One host's chunks in a few data files, indexed for TensorStore."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest
import tensorstore as ts
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CommitError, StorageError
from shardckpt.io.store import Store, shared_context
from shardckpt.writing.packed import PackedWriter

chunks = st.dictionaries(st.text("abc/12", min_size=1, max_size=8), st.binary(min_size=1, max_size=40), max_size=30)


def as_tensorstore_reads_it(store, lane):
    database = ts.KvStore.open({"driver": "ocdbt", "base": store.sub(lane).location.kvstore()}, context=shared_context()).result()
    return {key.decode(): bytes(database[key]) for key in database.list().result()}


def as_placed(store, extents):
    rows = zip(extents.file.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True)
    return [store.read(extents.files[f], o, o + n) for f, o, n in rows]


@settings(max_examples=60, deadline=None)
@given(chunks, st.integers(1, 100), st.integers(1, 10))
def test_every_chunk_is_where_it_is_said_to_be_and_where_tensorstore_looks(entries, data_file_bytes, lane_keys):
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    writer = PackedWriter(store, 3, data_file_bytes=data_file_bytes, lane_keys=lane_keys)
    for key, data in entries.items():
        writer.put(key, data)
    extents = writer.finish()

    assert as_placed(store, extents) == list(entries.values())
    lanes = [as_tensorstore_reads_it(store, lane) for lane in writer.lanes]
    assert all(len(lane) <= lane_keys for lane in lanes)
    assert sum(map(len, lanes)) == len(entries)
    assert {k: v for lane in lanes for k, v in lane.items()} == entries
    sizes = np.bincount(extents.file, extents.length, len(extents.files))
    counts = np.bincount(extents.file, minlength=len(extents.files))
    assert ((sizes <= data_file_bytes) | (counts == 1)).all()


def test_a_host_writes_into_its_own_directory_and_nowhere_else(store):
    writer = PackedWriter(store, 7, data_file_bytes=10)
    for i in range(3):
        writer.put(f"w/c/{i}", b"12345678")
    extents = writer.finish()
    assert writer.lanes == ["hosts/00007/0"]
    assert list(extents.files) == [f"hosts/00007/0/d/0000{i}" for i in range(3)]
    assert store.list() == [*extents.files, "hosts/00007/0/d/tree", "hosts/00007/0/manifest.ocdbt"]
    assert list(as_tensorstore_reads_it(store, "hosts/00007/0")) == ["w/c/0", "w/c/1", "w/c/2"]


def test_chunks_lie_side_by_side_in_the_order_in_which_they_were_put(store):
    writer = PackedWriter(store, 0)
    for i in (3, 1, 2):
        writer.put(f"w/c/{i}", b"%d" % i * i)
    extents = writer.finish()
    assert store.read(extents.files[0]) == b"333122"
    assert extents.offset.tolist() == [0, 3, 4]
    assert extents.length.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8), lambda b: memoryview(np.frombuffer(b, np.float32))]
)
def test_any_buffer_will_do_and_may_be_used_again_at_once(store, kind):
    buffer = bytearray(b"12345678")
    writer = PackedWriter(store, 0)
    writer.put("w/c/0", kind(buffer))
    buffer[:] = b"xxxxxxxx"
    writer.put("w/c/1", buffer)
    assert as_placed(store, writer.finish()) == [b"12345678", b"xxxxxxxx"]


def test_a_host_with_nothing_to_write_creates_nothing(store):
    writer = PackedWriter(store, 0)
    extents = writer.finish()
    assert (len(extents), extents.files, writer.lanes, store.list()) == (0, (), [], [])


def test_a_chunk_put_twice_is_an_error_with_its_key(store):
    writer = PackedWriter(store, 0, lane_keys=1)
    writer.put("w/c/0", b"1")
    writer.put("w/c/1", b"1")
    with pytest.raises(CommitError, match=r"w/c/0 was put twice"):
        writer.put("w/c/0", b"2")
    writer.abort()


def test_after_an_error_nothing_can_be_finished(store):
    writer = PackedWriter(store, 0)
    writer.put("w/c/0", b"1")
    with pytest.raises(CommitError):
        writer.put("w/c/0", b"2")
    for use in (writer.finish, lambda: writer.put("w/c/1", b"1")):
        with pytest.raises(CommitError, match="call abort"):
            use()
    writer.abort()


def test_a_chunk_without_bytes_is_an_error(store):
    writer = PackedWriter(store, 0)
    with pytest.raises(CommitError, match="w/c/0 has no bytes"):
        writer.put("w/c/0", b"")
    writer.abort()


def test_a_lane_that_was_not_finished_is_no_database(store):
    writer = PackedWriter(store, 0, data_file_bytes=1)
    writer.put("w/c/0", b"1")
    writer.put("w/c/1", b"1")
    assert not store.exists("hosts/00000/0/manifest.ocdbt")
    writer.abort()


def test_giving_up_leaves_nothing(store):
    store.write("hosts/00001/table", b"another host's")
    writer = PackedWriter(store, 0, data_file_bytes=1, lane_keys=2)
    for i in range(5):
        writer.put(f"w/c/{i}", b"1")
    writer.abort()
    assert store.list() == ["hosts/00001/table"]


def test_an_attempt_is_not_written_twice(tmp_path):
    store = Store.open(tmp_path)
    first = PackedWriter(store, 0)
    first.put("w/c/0", b"1")
    second = PackedWriter(store, 0)
    with pytest.raises(StorageError, match="File exists"):
        second.put("w/c/0", b"2")
    assert as_placed(store, first.finish()) == [b"1"]


def test_a_disk_that_takes_no_more_is_a_storage_error_with_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = PackedWriter(Store.open(tmp_path), 0)
    writer.put("w/c/0", bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, hard))
    try:
        with pytest.raises(StorageError, match=r"00000/0/d/00000: .*File too large"):
            writer.put("w/c/1", bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.abort()


def test_an_attempt_that_is_deleted_while_it_is_written_is_a_storage_error(tmp_path):
    writer = PackedWriter(Store.open(tmp_path), 0)
    writer.put("w/c/0", b"1")
    shutil.rmtree(tmp_path / "hosts")
    with pytest.raises(StorageError, match="hosts/00000/0"):
        writer.finish()
    writer.abort()


@pytest.mark.parametrize(
    ("place", "limit", "allowed"), [("file", 0, 24), ("memory", 96, 96 + 256 + 32), ("gs", 64, 64 + 16), ("s3", 64, 64 + 16)]
)
def test_memory_stays_within_the_limit(tmp_path, request, place, limit, allowed):
    """In a process of its own: 256 MiB in chunks of 1 MiB; what a memory store keeps is counted as allowed."""
    program = """
import sys
from shardckpt.writing.packed import PackedWriter
from shardckpt.io.store import Store
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024
store = Store.open(sys.argv[1])
store.write("first", b"x")
chunk = bytearray(1 << 20)
before = peak()
writer = PackedWriter(store, 0, memory_limit=int(sys.argv[2]) << 20)
for i in range(256):
    chunk[0] = i
    writer.put(f"w/c/{i}", chunk)
writer.finish()
print(peak() - before)
"""
    server = {"gs": "gcs_server", "s3": "s3_server"}.get(place)
    emulator = request.getfixturevalue(server) if server is not None else None
    url = emulator.url(uuid.uuid4().hex) if emulator is not None else {"file": str(tmp_path), "memory": "memory://x"}[place]
    variables = {**os.environ, **(emulator.env() if emulator is not None else {})}
    command = [sys.executable, "-c", program, url, str(limit)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=100)
    assert int(run.stdout) <= allowed


@pytest.fixture
def proxied(cloud):
    """A proxy, and a store behind it in a bucket that TensorStore knows by this proxy alone."""
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        yield proxy, Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


def test_on_an_object_store_a_file_is_one_request_and_what_is_sent_again(proxied):
    proxy, store = proxied
    data = np.random.default_rng(0).integers(0, 256, (40, 1 << 14), np.uint8)
    with proxy.rules.during(Rule("status", kinds=("upload",), objects="*/d/00002"), Rule("reset", kinds=("upload",), objects="*/d/00003")):
        writer = PackedWriter(store, 0, data_file_bytes=8 << 14)
        for i, row in enumerate(data):
            writer.put(f"w/c/{i}", row)
        extents = writer.finish()
    assert as_placed(store, extents) == [row.tobytes() for row in data]
    sent = {name.rpartition("/")[2]: nbytes >> 14 for name, nbytes in proxy.traffic.uploaded().items() if nbytes >= 1 << 14}
    assert sent == {"00000": 8, "00001": 8, "00002": 16, "00003": 16, "00004": 8}
    assert sum(e.operation.kind == "upload" for e in proxy.traffic.exchanges()) == 5 + 2 + 2


def test_files_are_on_their_way_while_the_next_one_fills(proxied):
    """As many as there is memory for: a fifth of the limit each, two at a time."""
    proxy, store = proxied
    with proxy.rules.during(Rule("latency", seconds=3600, times=None, kinds=("upload",), objects="*/d/0*")):
        writer = PackedWriter(store, 0, memory_limit=5 << 14, data_file_bytes=1 << 20)
        for i in range(3):
            writer.put(f"w/c/{i}", bytes(1 << 14))
        deadline = time.monotonic() + 60
        while len(proxy.traffic.exchanges()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.abort()
    assert sorted(proxy.traffic.uploaded()) == [f"{store.location.bucket}/run/hosts/00000/0/d/0000{i}" for i in range(2)]


def test_giving_up_does_not_wait_for_a_storage_that_is_down(proxied):
    proxy, store = proxied
    writer = PackedWriter(store, 0, data_file_bytes=1)
    with proxy.rules.during(Rule("status", times=None, kinds=("upload",))):
        for i in range(3):
            writer.put(f"w/c/{i}", b"1")
        writer.abort()  # a request is tried again for minutes


def test_a_file_that_cannot_be_written_is_named_and_leaves_no_database(cloud):
    with environment(cloud.env()):
        writer = PackedWriter(Store.open(f"{cloud.scheme}://no-such-bucket/run"), 0)
        writer.put("w/c/0", b"1")
        with pytest.raises(StorageError, match=r"no-such-bucket/run/hosts/00000/0/d/00000"):
            writer.finish()
        with pytest.raises(CommitError, match="call abort"):
            writer.finish()
        writer.abort()


def test_giving_up_raises_nothing_where_nothing_can_be_deleted(tmp_path):
    (tmp_path / "file").write_text("")
    writer = PackedWriter(Store.open(tmp_path / "file" / "attempt"), 0)
    with pytest.raises(StorageError, match="cannot make a directory"):
        writer.put("w/c/0", b"1")
    writer.abort()
