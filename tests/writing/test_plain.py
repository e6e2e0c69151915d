"""Every chunk an object of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CommitError, StorageError
from shardckpt.io.store import Store
from shardckpt.writing.plain import PlainWriter


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text("abc12", min_size=1, max_size=8), st.binary(min_size=1, max_size=40), max_size=30), st.integers(0, 100))
def test_every_chunk_is_an_object_of_its_name(entries, in_flight_bytes):
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    writer = PlainWriter(store, in_flight_bytes=in_flight_bytes)
    for key, data in entries.items():
        writer.put(f"{key}/c/0", data)
    extents = writer.finish()
    assert {key: store.read(key) for key in store.list()} == {f"zarr/{key}/c/0": data for key, data in entries.items()}
    assert extents.length.tolist() == [len(data) for data in entries.values()]
    assert extents.files == ()
    assert not extents.offset.any()


def test_buffers_may_be_used_again_at_once(store):
    buffer = np.zeros(100, np.uint8)
    writer = PlainWriter(store, in_flight_bytes=250)
    for i in range(20):
        buffer[:] = i
        writer.put(f"w/c/{i}", buffer)
    writer.finish()
    assert [store.read(f"zarr/w/c/{i}") for i in range(20)] == [bytes([i]) * 100 for i in range(20)]


def test_a_chunk_put_twice_is_an_error_with_its_key(store):
    writer = PlainWriter(store)
    writer.put("w/c/0", b"1")
    with pytest.raises(CommitError, match="w/c/0 was put twice"):
        writer.put("w/c/0", b"2")
    writer.abort()


def test_after_an_error_nothing_can_be_finished(store):
    writer = PlainWriter(store)
    writer.put("w/c/0", b"1")
    with pytest.raises(CommitError):
        writer.put("w/c/0", b"2")
    for use in (writer.finish, lambda: writer.put("w/c/1", b"1")):
        with pytest.raises(CommitError, match="call abort"):
            use()
    writer.abort()


def test_a_chunk_without_bytes_is_an_error(store):
    writer = PlainWriter(store)
    with pytest.raises(CommitError, match="w/c/0 has no bytes"):
        writer.put("w/c/0", b"")
    writer.abort()


def test_a_chunk_of_another_host_is_not_overwritten(tmp_path):
    for host in range(2):
        writer = PlainWriter(Store.open(tmp_path))
        if host == 0:
            writer.put("w/c/0", b"1")
            writer.finish()
        else:
            with pytest.raises(StorageError, match="File exists"):
                writer.put("w/c/0", b"2")
            writer.abort()


def test_giving_up_leaves_no_file_open(tmp_path):
    writer = PlainWriter(Store.open(tmp_path))
    for i in range(100):
        writer.put(f"w/c/{i}", b"1")
    writer.abort()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(Path(os.path.realpath(fd)))]


def test_an_error_in_the_background_is_raised(cloud):
    with environment(cloud.env()):
        writer = PlainWriter(Store.open(f"{cloud.scheme}://no-such-bucket/run"))
        writer.put("w/c/0", b"1")
        with pytest.raises(StorageError, match=r"no-such-bucket/run/zarr/w/c/0"):
            writer.finish()
        with pytest.raises(CommitError, match="call abort"):
            writer.finish()
        writer.abort()


def test_giving_up_does_not_wait_for_a_storage_that_is_down(cloud):
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        writer = PlainWriter(Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run"))
        with proxy.rules.during(Rule("status", times=None)):
            for i in range(3):
                writer.put(f"w/c/{i}", b"1")
            writer.abort()  # a request is tried again for minutes


def test_memory_stays_within_the_limit(cloud):
    """In a process of its own: 96 MiB in chunks of 1 MiB, 16 MiB of them under way."""
    program = """
import sys
from shardckpt.writing.plain import PlainWriter
from shardckpt.io.store import Store
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024
store = Store.open(sys.argv[1])
store.write("first", b"x")
chunk = bytearray(1 << 20)
before = peak()
writer = PlainWriter(store, in_flight_bytes=16 << 20)
for i in range(96):
    writer.put(f"w/c/{i}", chunk)
writer.finish()
print(peak() - before)
"""
    command = [sys.executable, "-c", program, cloud.url(uuid.uuid4().hex)]
    run = subprocess.run(command, env={**os.environ, **cloud.env()}, capture_output=True, text=True, check=True, timeout=100)
    assert int(run.stdout) <= 16 + 24
