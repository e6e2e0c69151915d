"""One host's chunks in a few data files, indexed for TensorStore."""

from __future__ import annotations

import shutil
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorstore as ts
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CommitError, StorageError
from shardckpt.io.store import Store
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

chunks = st.dictionaries(
    st.text("abc/12", min_size=1, max_size=8), st.binary(min_size=1, max_size=40), max_size=30
)


def as_tensorstore_reads_it(store, lane):
    database = ts.KvStore.open(
        {"driver": "ocdbt", "base": store.sub(lane).location.kvstore()}, context=store.context()
    ).result()
    return {key.decode(): bytes(database[key]) for key in database.list().result()}


def as_placed(store, extents):
    rows = zip(extents.file.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True)
    return [store.read(extents.files[f], o, o + n) for f, o, n in rows]


@settings(max_examples=60, deadline=None)
@given(chunks, st.integers(1, 100), st.integers(1, 10))
def test_every_chunk_is_where_it_is_said_to_be_and_where_tensorstore_looks(
    entries, data_file_bytes, lane_keys
):
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    writer = PackedWriter(store, 3, data_file_bytes=data_file_bytes, lane_keys=lane_keys)
    for key, data in entries.items():
        writer.append([key], [data])
    extents = writer.finish()

    assert as_placed(store, extents) == list(entries.values())
    lanes = [as_tensorstore_reads_it(store, lane) for lane in writer.lanes]
    assert all(len(lane) <= lane_keys for lane in lanes)
    assert sum(map(len, lanes)) == len(entries)
    assert {k: v for lane in lanes for k, v in lane.items()} == entries
    sizes = np.bincount(extents.file, extents.length, len(extents.files))
    counts = np.bincount(extents.file, minlength=len(extents.files))
    assert ((sizes <= data_file_bytes) | (counts == 1)).all()


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=40), st.integers(1, 60), st.integers(1, 9))
def test_threads_share_the_databases_of_a_host(
    tmp_path_factory, counts, data_file_bytes, lane_keys
):
    """Three threads at once; no database gets more keys than it may have, and each chunk is in
    one."""
    store = Store.open(tmp_path_factory.mktemp("host"))
    writer = PackedWriter(store, 3, data_file_bytes=data_file_bytes, lane_keys=lane_keys, threads=3)
    entries = {
        f"{i}/c/{j}": f"{i}.{j}".encode() for i, count in enumerate(counts) for j in range(count)
    }

    def write(thread):
        for i in range(thread, len(counts), 3):
            keys = [f"{i}/c/{j}" for j in range(counts[i])]
            writer.append(keys, [entries[key] for key in keys], thread=thread)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, range(3)))
    extents = writer.finish()
    order = [
        f"{i}/c/{j}"
        for thread in range(3)
        for i in range(thread, len(counts), 3)
        for j in range(counts[i])
    ]
    assert as_placed(store, extents) == [entries[key] for key in order]
    lanes = [as_tensorstore_reads_it(store, lane) for lane in writer.lanes]
    assert all(len(lane) <= lane_keys for lane in lanes)
    assert sum(map(len, lanes)) == len(entries)
    assert {k: v for lane in lanes for k, v in lane.items()} == entries


def test_a_host_writes_into_its_own_directory_and_nowhere_else(store):
    writer = PackedWriter(store, 7, data_file_bytes=10)
    for i in range(3):
        writer.append([f"w/c/{i}"], [b"12345678"])
    extents = writer.finish()
    assert writer.lanes == ["hosts/00007/0"]
    assert list(extents.files) == [f"hosts/00007/0/d/0000{i}" for i in range(3)]
    assert store.list() == [*extents.files, "hosts/00007/0/d/tree", "hosts/00007/0/manifest.ocdbt"]
    assert list(as_tensorstore_reads_it(store, "hosts/00007/0")) == ["w/c/0", "w/c/1", "w/c/2"]


def test_chunks_lie_side_by_side_in_the_order_in_which_they_were_put(store):
    writer = PackedWriter(store, 0)
    for i in (3, 1, 2):
        writer.append([f"w/c/{i}"], [b"%d" % i * i])
    extents = writer.finish()
    assert store.read(extents.files[0]) == b"333122"
    assert extents.offset.tolist() == [0, 3, 4]
    assert extents.length.tolist() == [3, 1, 2]


def test_a_chunk_put_twice_is_an_error_in_another_lane_too(store):
    writer = PackedWriter(store, 0, lane_keys=1)
    writer.append(["w/c/0"], [b"1"])
    writer.append(["w/c/1"], [b"1"])
    with pytest.raises(CommitError, match="w/c/0 was put twice"):
        writer.append(["w/c/0"], [b"2"])
    writer.abort()


def test_a_lane_that_was_not_finished_is_no_database(store):
    writer = PackedWriter(store, 0, data_file_bytes=1)
    writer.append(["w/c/0"], [b"1"])
    writer.append(["w/c/1"], [b"1"])
    assert not store.exists("hosts/00000/0/manifest.ocdbt")
    writer.abort()


def test_giving_up_leaves_nothing(store):
    store.write("hosts/00001/table", b"another host's")
    writer = PackedWriter(store, 0, data_file_bytes=1, lane_keys=2)
    for i in range(5):
        writer.append([f"w/c/{i}"], [b"1"])
    writer.abort()
    assert store.list() == ["hosts/00001/table"]


def test_an_attempt_that_is_deleted_while_it_is_written_is_a_storage_error(tmp_path):
    writer = PackedWriter(Store.open(tmp_path), 0)
    writer.append(["w/c/0"], [b"1"])
    shutil.rmtree(tmp_path / "hosts")
    with pytest.raises(StorageError, match="hosts/00000/0"):
        writer.finish()
    writer.abort()


@pytest.fixture
def proxied(cloud):
    """A proxy, and a store behind it in a bucket that TensorStore knows by this proxy alone."""
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        yield proxy, Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


@pytest.mark.long
def test_on_an_object_store_a_file_is_one_request_and_what_is_sent_again(proxied):
    proxy, store = proxied
    data = np.random.default_rng(0).integers(0, 256, (40, 1 << 14), np.uint8)
    with proxy.rules.during(
        Rule("status", kinds=("upload",), objects="*/d/00002"),
        Rule("reset", kinds=("upload",), objects="*/d/00003"),
    ):
        writer = PackedWriter(store, 0, data_file_bytes=8 << 14)
        for i, row in enumerate(data):
            writer.append([f"w/c/{i}"], [row])
        extents = writer.finish()
    assert as_placed(store, extents) == [row.tobytes() for row in data]
    sent = {
        name.rpartition("/")[2]: nbytes >> 14
        for name, nbytes in proxy.traffic.uploaded().items()
        if nbytes >= 1 << 14
    }
    assert sent == {"00000": 8, "00001": 8, "00002": 16, "00003": 16, "00004": 8}
    assert sum(e.operation.kind == "upload" for e in proxy.traffic.exchanges()) == 5 + 2 + 2


def test_the_memory_of_a_file_that_has_arrived_is_used_for_the_next_one():
    store, memory = Store.open(f"memory://{uuid.uuid4().hex}"), set()
    writer = PackedWriter(store, 0, data_file_bytes=1000)
    (files,) = writer._files
    for i in range(8):
        writer.append([f"w/c/{i}"], [bytes(1000)])
        memory.add(files._buffer.ctypes.data)
        for call, _, _ in files._waiting:
            call.result()
    writer.finish()
    assert len(memory) == 2, "one is filled, the one before it is on its way"


@pytest.mark.long
@pytest.mark.parametrize("kind", [partial(PackedWriter, host=0), PlainWriter])
def test_ctrl_c_in_the_wait_for_uploads_lets_each_of_them_be_ended(proxied, kind):
    proxy, store = proxied
    with proxy.rules.during(Rule("latency", seconds=3600, times=None, kinds=("upload",))):
        writer = kind(store)
        writer.append(["w/c/0"], [bytes(1 << 14)])
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
        writer.abort()


def test_files_are_on_their_way_while_the_next_one_fills(proxied):
    """As many as there is memory for: a fifth of the limit each, two at a time."""
    proxy, store = proxied
    with proxy.rules.during(
        Rule("latency", seconds=3600, times=None, kinds=("upload",), objects="*/d/0*")
    ):
        writer = PackedWriter(store, 0, memory_limit=5 << 14, data_file_bytes=1 << 20)
        for i in range(3):
            writer.append([f"w/c/{i}"], [bytes(1 << 14)])
        expected = [f"{store.location.bucket}/run/hosts/00000/0/d/0000{i}" for i in range(2)]
        deadline = time.monotonic() + 60
        # A request that has just begun has no name yet.
        while sorted(proxy.traffic.uploaded()) != expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.abort()
    assert sorted(proxy.traffic.uploaded()) == expected
