"""Tests that both layouts' writers pass. Tests of one layout alone are in `test_packed.py` and
`test_plain.py`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

from shardckpt.errors import CommitError, StorageError
from shardckpt.io.store import Store
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

MEMORY_USE = """
import sys
from shardckpt.io.store import Store
from shardckpt.writing.{module} import {writer} as Writer
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
store = Store.open(sys.argv[1])
store.write("first", b"x")
chunk = bytearray(1 << 20)
before = peak()
writer = Writer(store, {options})
for i in range({chunks}):
    chunk[0] = i
    writer.append([f"w/c/{{i}}"], [chunk])
writer.finish()
print(peak() - before)
"""
CHUNKS = 128
"""Of 1 MiB each, more than any of the limits."""


class WriterTests(ABC):
    """The tests; a subclass for each layout."""

    memory: ClassVar[dict[str, tuple[int, int]]]
    """For each kind of storage: the limit, and the MiB that a process may take beyond what it had;
    a memory store keeps the chunks."""

    @abstractmethod
    def writer(self, store):
        """A new writer there."""

    @abstractmethod
    def object_of(self, key):
        """The object or file that holds the first chunk, whose key is this."""

    @abstractmethod
    def stored(self, store, keys, extents):
        """The bytes of the chunks of these keys, in the order in which they were put."""

    @abstractmethod
    def memory_program(self, limit):
        """Values that fill in `MEMORY_USE`."""

    @pytest.mark.parametrize(
        "kind",
        [
            bytes,
            bytearray,
            memoryview,
            lambda b: np.frombuffer(b, np.uint8),
            lambda b: memoryview(np.frombuffer(b, np.float32)),
        ],
    )
    def test_any_buffer_will_do_and_may_be_used_again_at_once(self, store, kind):
        buffer = bytearray(b"12345678")
        writer = self.writer(store)
        writer.append(["w/c/0"], [kind(buffer)])
        buffer[:] = b"xxxxxxxx"
        writer.append(["w/c/1"], [buffer])
        assert self.stored(store, ["w/c/0", "w/c/1"], writer.finish()) == [b"12345678", b"xxxxxxxx"]

    def test_a_host_with_nothing_to_write_creates_nothing(self, store):
        extents = self.writer(store).finish()
        assert (len(extents), extents.files, store.list()) == (0, (), [])

    def test_a_chunk_put_twice_is_an_error_with_its_key(self, store):
        writer = self.writer(store)
        writer.append(["w/c/0"], [b"1"])
        writer.append(["w/c/1"], [b"1"])
        with pytest.raises(CommitError, match="w/c/0 was put twice"):
            writer.append(["w/c/0"], [b"2"])
        writer.abort()

    def test_after_an_error_nothing_can_be_finished(self, store):
        writer = self.writer(store)
        writer.append(["w/c/0"], [b"1"])
        with pytest.raises(CommitError):
            writer.append(["w/c/0"], [b"2"])
        for use in (writer.finish, lambda: writer.append(["w/c/1"], [b"1"])):
            with pytest.raises(CommitError, match="call abort"):
                use()
        writer.abort()

    def test_a_chunk_without_bytes_is_an_error(self, store):
        writer = self.writer(store)
        with pytest.raises(CommitError, match="w/c/0 has no bytes"):
            writer.append(["w/c/0"], [b""])
        writer.abort()

    def test_what_another_writer_has_written_is_not_overwritten(self, tmp_path):
        store = Store.open(tmp_path)
        first, second = self.writer(store), self.writer(store)
        first.append(["w/c/0"], [b"1"])
        with pytest.raises(StorageError, match="File exists"):
            second.append(["w/c/0"], [b"2"])
        assert self.stored(store, ["w/c/0"], first.finish()) == [b"1"]

    def test_a_disk_that_takes_no_more_is_a_storage_error_with_the_file(self, tmp_path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        writer = self.writer(Store.open(tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, hard))
        try:
            with pytest.raises(StorageError, match=rf"{self.object_of('w/c/0')}: .*File too large"):
                writer.append(["w/c/0"], [bytes(2 << 20)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.abort()

    def test_an_object_that_cannot_be_written_is_named(self, cloud):
        with environment(cloud.env()):
            writer = self.writer(Store.open(f"{cloud.scheme}://no-such-bucket/run"))
            writer.append(["w/c/0"], [b"1"])
            with pytest.raises(StorageError, match=f"no-such-bucket/run/{self.object_of('w/c/0')}"):
                writer.finish()
            with pytest.raises(CommitError, match="call abort"):
                writer.finish()
            writer.abort()

    def test_giving_up_leaves_no_file_open(self, tmp_path):
        writer = self.writer(Store.open(tmp_path))
        for i in range(100):
            writer.append([f"w/c/{i}"], [b"1"])
        writer.abort()
        assert not [
            fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)
        ]

    def test_giving_up_does_not_wait_for_a_storage_that_is_down(self, cloud):
        with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
            store = Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")
            with proxy.rules.during(Rule("status", times=None, kinds=("upload",))):
                writer = self.writer(store)
                for i in range(3):
                    writer.append([f"w/c/{i}"], [bytes(1 << 14)])
                writer.abort()  # requests are tried again for longer than this test may take
            assert store.list() == []

    def test_giving_up_raises_nothing_where_nothing_can_be_deleted(self, tmp_path):
        (tmp_path / "file").write_text("")
        writer = self.writer(Store.open(tmp_path / "file" / "attempt"))
        with pytest.raises(StorageError, match="cannot make a directory"):
            writer.append(["w/c/0"], [b"1"])
        writer.abort()

    @pytest.mark.parametrize("place", ["file", "memory", "gs", "s3"])
    def test_memory_stays_within_the_limit(self, tmp_path, request, place):
        """In a process of its own."""
        limit, allowed = self.memory[place]
        server = {"gs": "gcs_server", "s3": "s3_server"}.get(place)
        emulator = request.getfixturevalue(server) if server is not None else None
        url = (
            emulator.url(uuid.uuid4().hex)
            if emulator is not None
            else {"file": str(tmp_path), "memory": "memory://x"}[place]
        )
        variables = {**os.environ, **(emulator.env() if emulator is not None else {})}
        program = MEMORY_USE.format(chunks=CHUNKS, **self.memory_program(limit << 20))
        run = subprocess.run(
            [sys.executable, "-c", program, url],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        )
        assert int(run.stdout) <= allowed


class TestPackedWriter(WriterTests):
    memory: ClassVar = {
        "file": (0, 24),
        "memory": (96, 96 + CHUNKS + 32),
        "gs": (64, 64 + 16),
        "s3": (64, 64 + 16),
    }

    def writer(self, store):
        return PackedWriter(store, 0, data_file_bytes=1 << 14)

    def object_of(self, key):
        return "hosts/00000/0/d/00000"

    def stored(self, store, keys, extents):
        rows = zip(
            extents.file.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True
        )
        return [
            store.read(extents.files[file], offset, offset + length)
            for file, offset, length in rows
        ]

    def memory_program(self, limit):
        return {"module": "packed", "writer": "PackedWriter", "options": f"0, memory_limit={limit}"}


class TestPlainWriter(WriterTests):
    memory: ClassVar = {
        "file": (0, 24),
        "memory": (16, 16 + CHUNKS + 32),
        "gs": (16, 16 + 24),
        "s3": (16, 16 + 24),
    }

    def writer(self, store):
        return PlainWriter(store)

    def object_of(self, key):
        return f"zarr/{key}"

    def stored(self, store, keys, extents):
        chunks = [store.read(self.object_of(key)) for key in keys]
        assert extents.length.tolist() == [len(chunk) for chunk in chunks]
        return chunks

    def memory_program(self, limit):
        return {"module": "plain", "writer": "PlainWriter", "options": f"in_flight_bytes={limit}"}
