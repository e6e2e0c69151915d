"""A process was killed while it wrote a file: what it has left under the name of the lock is no part of the next write.

TensorStore by itself makes it one: bytes that were longer stay at the end of the new file.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading

import pytest
import tensorstore as ts
from aftermath import LAYOUTS, attempts, prepare, saved, value_of
from placeholders import put_placeholder

import shardckpt
from shardckpt.commit import collecting
from shardckpt.errors import StorageError
from shardckpt.io import files
from shardckpt.io.store import Store

PROCESSES = 2
LEFT = b"left by the dead " * 10_000
NEW = b"new"


def leave(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.__lock")
    lock.write_bytes(LEFT)
    return lock


def test_tensorstore_itself_takes_it_over(tmp_path):
    """Once this fails it has learnt to cut it off, and `clear` is not needed."""
    leave(tmp_path / "key")
    ts.KvStore.open(f"file://{tmp_path}/").result().write("key", NEW).result()
    assert (tmp_path / "key").read_bytes() == NEW + LEFT[len(NEW) :]


@pytest.mark.parametrize("there", [None, b"old"])
def test_a_write_takes_over_nothing(tmp_path, there):
    store = Store.open(tmp_path)
    for write in (store.write, store.create, lambda key, data: store.replace(key, data, store.read_versioned(key)[1])):
        if there is None or write == store.create:
            store.delete("key")
        else:
            store.write("key", there)
        leave(tmp_path / "key")
        write("key", NEW)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("key", NEW)]


def lock(file):
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def test_what_somebody_alive_is_writing_is_left_alone(tmp_path):
    locked = leave(tmp_path / "key")
    with locked.open("rb+") as file:
        lock(file)
        files.clear(tmp_path / "key")
        assert locked.read_bytes() == LEFT
    files.clear(tmp_path / "key")
    assert locked.read_bytes() == b""


def test_a_write_waits_for_another_one_of_the_same_file_and_says_so_when_it_has_waited_for_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    locked = leave(tmp_path / "key")
    with locked.open("rb+") as file:
        lock(file)
        with pytest.raises(StorageError, match=r"another process has locked .*key\.__lock for 0\.2 s"):
            Store.open(tmp_path).write("key", NEW)
        writing = threading.Thread(target=Store.open(tmp_path).write, args=("key", NEW))
        monkeypatch.setattr(files, "_LOCK_SECONDS", 60)
        writing.start()
        writing.join(0.2)
        assert writing.is_alive()
    writing.join()
    assert (tmp_path / "key").read_bytes() == NEW


def test_many_threads_and_tensorstore_write_one_file_and_each_write_is_whole(tmp_path):
    """Each of ours and of TensorStore's takes the other's lock."""
    store, theirs = Store.open(tmp_path), ts.KvStore.open(f"file://{tmp_path}/").result()
    values = {bytes([65 + i]) * (1 + 999 * i) for i in range(8)}
    seen = []

    def write(value):
        for k in range(30):
            (theirs.write("key", value).result() if k % 2 and len(value) > 6000 else store.write("key", value))
            seen.append(store.read("key"))

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {*seen} <= values
    assert len(seen) == 240
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_is_no_file_is_neither_cut_off_nor_written(tmp_path):
    (tmp_path / "precious").write_bytes(LEFT)
    (tmp_path / "link.__lock").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe.__lock")
    (tmp_path / "directory.__lock").mkdir()
    for key in ("link", "pipe", "directory", "nothing"):
        files.clear(tmp_path / key)
        if key != "nothing":
            with pytest.raises(StorageError):
                Store.open(tmp_path).write(key, NEW)
    assert (tmp_path / "precious").read_bytes() == LEFT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_committer_killed_in_the_write_of_its_record_harms_no_save_collection_or_deletion_after_it(tmp_path, jobs, layout):
    prepare(jobs, tmp_path, layout, PROCESSES, overwrite=False)
    url = tmp_path / "checkpoint"
    for value in (2, 3):
        leave(url / "checkpoint.json")
        saved(jobs, url, value, layout, PROCESSES, overwrite=value > 2)
        assert value_of(url, PROCESSES) == value
    leave(url / "checkpoint.json")
    collecting.delete(url, grace=0)
    assert value_of(url, PROCESSES) is None
    (url / "20260101T000000-00000000" / "records").mkdir(parents=True)
    leave(url / "checkpoint.json")
    assert [one.outcome for one in collecting.collect(url, grace=0)] == ["removed"]
    assert value_of(url, PROCESSES) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_committer_killed_in_any_write_leaves_what_another_can_commit(tmp_path, jobs, layout):
    url = tmp_path / "checkpoint"
    put_placeholder(url)
    before_the_record = {"process": 0, "act": "kill", "before": "checkpoint.json"}
    jobs.run("save", PROCESSES, url, 2, {"layout": layout, "commit_timeout": 30}, before_the_record)
    (attempt,) = attempts(url)
    for path in [url / "checkpoint.json", *(path for path in (url / attempt).rglob("*") if path.is_file())]:
        if not {"hosts", "d", "c"} & set(path.parts):  # of those every attempt has its own, and the committer writes none
            leave(path)
    assert [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
    assert value_of(url, PROCESSES) == 2
    for name in ("large", "second", "small"):
        ts.open(shardckpt.open(url).stock_spec(name)).result().read().result()
