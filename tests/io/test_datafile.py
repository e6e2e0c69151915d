"""Files and objects that are written front to back."""

from __future__ import annotations

import dataclasses
import os
import sys

import numpy as np
import pytest
from crc32c import crc32c

from shardckpt.errors import StorageError
from shardckpt.io import datafile, extension
from shardckpt.io.datafile import BlocksOut, begin_write_back, create_data_file
from shardckpt.io.store import Store

MiB = 1 << 20


def test_what_was_appended_is_there_in_that_order(store):
    file = create_data_file(store, "d/0")
    for part in (b"ab", bytearray(b"cd"), memoryview(b"ef"), b""):
        file.append(part)
    file.seal()
    file.wait()
    assert store.read("d/0") == b"abcdef"


def test_many_parts_are_appended_in_their_order_however_few_the_kernel_takes(store, monkeypatch):
    writev = os.writev
    monkeypatch.setattr(
        os,
        "writev",
        lambda fd, parts: writev(fd, [*parts[:2], parts[2][:1]] if len(parts) > 2 else parts),
    )
    file = create_data_file(store, "d/0")
    parts = [b"%d," % i for i in range(3000)]
    file.append([memoryview(part) for part in parts])
    file.seal()
    file.wait()
    assert store.read("d/0") == b"".join(parts)


def test_a_disk_begins_with_a_file_while_it_is_appended_to_and_is_told_of_no_byte_twice(
    tmp_path, monkeypatch
):
    calls = []

    def begin(fd, offset, nbytes):
        calls.append((offset, nbytes, os.fstat(fd).st_size))
        return begin_write_back(fd, offset, nbytes)

    monkeypatch.setattr(datafile, "begin_write_back", begin)
    file = create_data_file(Store.open(tmp_path), "d/0")
    for _ in range(9):
        file.append(bytes(3 * MiB))
        file.append([memoryview(bytes(MiB))] * 2)
    assert calls == [
        (0, 8 * MiB, 8 * MiB),
        (8 * MiB, 10 * MiB, 18 * MiB),
        (18 * MiB, 10 * MiB, 28 * MiB),
        (28 * MiB, 10 * MiB, 38 * MiB),
    ]
    file.seal()
    file.wait()
    assert (tmp_path / "d/0").stat().st_size == 45 * MiB


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels are not told")
def test_linux_takes_the_hint(tmp_path):
    with (tmp_path / "0").open("wb", buffering=0) as file:
        file.write(bytes(MiB))
        assert begin_write_back(file.fileno(), 0, MiB)
        assert not begin_write_back(file.fileno(), -1, MiB), (
            "it was told what to write, and not something else"
        )


def test_a_kernel_that_cannot_be_told_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(datafile, "_sync_file_range", None)
    file = create_data_file(Store.open(tmp_path), "d/0")
    file.append(bytes(9 * MiB))
    file.seal()
    file.wait()
    assert (tmp_path / "d/0").stat().st_size == 9 * MiB


def test_a_lent_buffer_holds_nothing_of_the_file_before(store):
    buffer = np.empty(80, np.uint8)
    for i, size in enumerate((100, 60, 5, 100)):
        file = create_data_file(store, f"d/{i}", buffer)
        for _ in range(size):
            file.append(b"%d" % i)
        file.seal()
        file.wait()
        assert store.read(f"d/{i}") == b"%d" % i * size


def test_what_is_laid_out_in_the_room_of_an_object_is_not_copied(cloud_store):
    buffer = np.zeros(10, np.uint8)
    file = create_data_file(cloud_store, "d/0", buffer)
    file.append(b"ab")
    room = file.room(3)
    assert room.ctypes.data == buffer.ctypes.data + 2
    room[:] = memoryview(b"cde")
    file.append(room)
    assert file.room(6) is None
    file.append(b"fghij" * 2)
    file.seal()
    file.wait()
    assert cloud_store.read("d/0") == b"abcdefghijfghij"
    assert buffer.tobytes() == b"abcde" + bytes(5)


@pytest.mark.skipif(extension.moving is None, reason="the extension lays blocks out")
def test_an_object_of_blocks_has_the_checksum_that_the_service_is_told(cloud_store):
    file = create_data_file(cloud_store, "d/0", np.zeros(2 << 20, np.uint8))
    blocks = [np.arange(300_000, dtype=np.float32).reshape(600, 500) + i for i in range(2)]
    out = BlocksOut.of(blocks, (100, 150), np.empty(extension.SCRATCH_BYTES, np.uint8), 48)
    file.append(dataclasses.replace(out, first=0, last=7))
    file.append(dataclasses.replace(out, first=7, last=30))
    file.seal()
    file.wait()  # Cloud Storage answers with the checksum of what it has, which is compared
    stored = cloud_store.read("d/0")
    chunk = stored[: out.chunk_bytes]
    assert crc32c(chunk[:-4]) == int.from_bytes(chunk[-4:], "little") == out.crcs[0]
    assert len(stored) == 30 * out.chunk_bytes


def test_a_local_file_has_no_room(tmp_path):
    assert create_data_file(Store.open(tmp_path), "d/0").room(1) is None


def test_an_object_is_there_when_it_is_sealed_and_not_before(cloud_store):
    file = create_data_file(cloud_store, "d/0")
    file.append(b"ab")
    assert not cloud_store.exists("d/0")
    file.abandon()
    assert not cloud_store.exists("d/0")


def test_a_file_of_somebody_else_is_not_touched(tmp_path):
    store = Store.open(tmp_path)
    store.write("d/0", b"theirs")
    with pytest.raises(StorageError, match="File exists"):
        create_data_file(store, "d/0")
    assert store.read("d/0") == b"theirs"
