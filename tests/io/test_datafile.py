"""Files and objects that are written front to back."""

from __future__ import annotations

import os
import sys

import pytest

from shardckpt.errors import StorageError
from shardckpt.io.datafile import create_data_file
from shardckpt.io.store import Store


def test_what_was_appended_is_there_in_that_order(store):
    file = create_data_file(store, "d/0")
    for part in (b"ab", bytearray(b"cd"), memoryview(b"ef"), b""):
        file.append(part)
    file.seal()
    file.wait()
    assert store.read("d/0") == b"abcdef"


def test_many_parts_are_appended_in_their_order_however_few_the_kernel_takes(store, monkeypatch):
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [*parts[:2], parts[2][:1]] if len(parts) > 2 else parts))
    file = create_data_file(store, "d/0")
    parts = [b"%d," % i for i in range(3000)]
    file.append_all([memoryview(part) for part in parts])
    file.seal()
    file.wait()
    assert store.read("d/0") == b"".join(parts)


def test_a_lent_buffer_holds_nothing_of_the_file_before(store):
    buffer = bytearray()
    for i, size in enumerate((100, 60, 5, 100)):
        file = create_data_file(store, f"d/{i}", buffer)
        for _ in range(size):
            file.append(b"%d" % i)
        file.seal()
        file.wait()
        assert store.read(f"d/{i}") == b"%d" % i * size


def test_a_lent_buffer_keeps_its_memory(cloud_store):
    buffer = bytearray()
    sizes = []
    for i, size in enumerate((1000, 900, 600, 1000)):
        file = create_data_file(cloud_store, f"d/{i}", buffer)
        file.append(bytes(size))
        file.seal()
        sizes.append(sys.getsizeof(buffer))
        file.wait()
    assert len(set(sizes)) == 1


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
