"""A process was killed while it wrote a file: what it has left under the name of the lock is not a
part of the next write."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import threading

import pytest
import tensorstore as ts
from aftermath import LAYOUTS, attempts, prepare, saved, value_of
from placeholders import put_placeholder

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io import files
from shardckpt.io.locks import is_at
from shardckpt.io.store import Store
from shardckpt.runs import collecting

PROCESSES = 2
LEFT = b"left by the dead " * 10_000
NEW = b"new"


def leave(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.__lock")
    lock.write_bytes(LEFT)
    return lock


@pytest.mark.parametrize("there", [None, b"old"])
def test_a_write_takes_over_nothing(tmp_path, there):
    store = Store.open(tmp_path)
    for write in (
        store.write,
        store.create,
        lambda key, data: store.replace(key, data, store.read_versioned(key)[1]),
    ):
        if there is None or write == store.create:
            store.delete("key")
        else:
            store.write("key", there)
        leave(tmp_path / "key")
        write("key", NEW)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("key", NEW)]


def lock(file):
    fcntl.fcntl(
        file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    )


def test_a_write_waits_for_another_one_of_the_same_file_and_says_so_when_it_has_waited_for_too_long(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    locked = leave(tmp_path / "key")
    with locked.open("rb+") as file:
        lock(file)
        with pytest.raises(StorageError, match=r"waited 0\.2 s for the lock on .*key\.__lock"):
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
            (
                theirs.write("key", value).result()
                if k % 2 and len(value) > 6000
                else store.write("key", value)
            )
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
    for key in ("link", "pipe", "directory"):
        with pytest.raises(StorageError):
            Store.open(tmp_path).write(key, NEW)
    assert (tmp_path / "precious").read_bytes() == LEFT


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """Not the bytes that have filled the disk."""
    store = Store.open(tmp_path)
    store.write("key", b"old")

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="disk is full"):
            store.write("key", NEW)
    assert names(tmp_path) == ["key"]
    assert store.read("key") == b"old"


@pytest.mark.parametrize("again", [False, True])
def test_a_write_whose_directory_is_removed_meanwhile_is_not_taken_for_one(
    tmp_path, monkeypatch, again
):
    store, fsync = Store.open(tmp_path / "d"), os.fsync
    store.write("key", b"old")
    generation = store.read_versioned("key")[1]

    def removed(fd):
        if (tmp_path / "d" / "key.__lock").exists():
            shutil.rmtree(tmp_path / "d")
            if again:
                leave(tmp_path / "d" / "key")  # another writer's first bytes
        fsync(fd)

    for write in (
        lambda generation=generation: store.replace("key", NEW, generation),
        lambda: store.write("key", NEW),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", removed)
            try:
                assert not write()
            except StorageError as e:
                assert "removed" in str(e)  # noqa: PT017
        assert not (tmp_path / "d" / "key").exists()
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        Store.open(tmp_path / "d").write("key", b"old")
        generation = store.read_versioned("key")[1]


def test_of_what_is_not_there_nothing_is_removed_and_nothing_left(tmp_path):
    store = Store.open(tmp_path)
    generation = store.read_versioned("key")[1]
    assert not store.remove("key", b"another")
    assert not store.remove("below/key", b"another")
    assert names(tmp_path) == []
    store.write("key", NEW)
    assert not store.remove("key", generation)
    assert store.remove("key", store.read_versioned("key")[1])
    assert names(tmp_path) == []


@pytest.mark.filterwarnings("ignore:os.fork")  # where another test has imported JAX
def test_a_fork_holds_no_lock(tmp_path):
    lock = files.open_locked(tmp_path / "key")
    child = os.fork()
    if child == 0:
        os._exit(0 if all(file.fileno() < 0 for file in files._held) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert {file.fileno() for file in files._held} == {lock.fd}
    files.release(lock, delete=True)
    assert not files._held
    assert names(tmp_path) == []


def test_a_write_in_a_copy_by_hard_links_leaves_the_original_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "key").write_bytes(LEFT)
    os.link(tmp_path / "a" / "key", tmp_path / "b" / "key.__lock")
    Store.open(tmp_path / "b").write("key", NEW)
    assert (tmp_path / "a" / "key").read_bytes() == LEFT
    assert names(tmp_path / "b") == ["key"]


def test_of_two_writers_in_a_copy_by_hard_links_one_holds_the_lock(tmp_path, monkeypatch):
    """The other one opens the lock file of a killed writer just before the first puts its own
    there; the copy's files have it under further names."""
    key = tmp_path / "key"
    for name in ("a", "b"):
        os.link(leave(key), tmp_path / name)
    first, held, call = [], [], fcntl.fcntl

    def interleaved(fd, *rest):
        if not first:
            first.append(None)
            first[0] = files.open_locked(key)
        elif first[0] is not None:
            held.append(is_at(first[0].fd, first[0].path))
            files.release(first[0], delete=True)
            first[0] = None
        return call(fd, *rest)

    monkeypatch.setattr(fcntl, "fcntl", interleaved)
    files.replace(key, NEW, None)
    assert held == [True]
    assert key.read_bytes() == NEW
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == LEFT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_committer_killed_in_the_write_of_its_record_harms_no_later_save_collection_or_deletion(
    tmp_path, jobs, layout
):
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
    for path in [
        url / "checkpoint.json",
        *(path for path in (url / attempt).rglob("*") if path.is_file()),
    ]:
        # Of those every attempt has its own, and the committer writes none.
        if not {"hosts", "d", "c"} & set(path.parts):
            leave(path)
    assert [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
    assert value_of(url, PROCESSES) == 2
    for name in ("large", "second", "small"):
        ts.open(shardckpt.open(url).stock_spec(name)).result().read().result()
