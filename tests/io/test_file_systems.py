"""File systems that answer otherwise than ext4: their answers are given here in the system's place;
`make fuse` mounts real ones."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from inodes import renumber

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io import files, locks
from shardckpt.io.store import Store

STATE = {"w": np.arange(1000.0)}


@pytest.fixture
def refused(monkeypatch):
    """Takes the error with which each kind of lock is refused; None: the lock is taken."""

    def use(of_open_files, flock):
        really = fcntl.fcntl, fcntl.flock

        def asked_fcntl(fd, command, argument=0):
            if of_open_files is not None and command == fcntl.F_OFD_SETLK:
                raise OSError(of_open_files, "Refused")
            return really[0](fd, command, argument)

        def asked_flock(fd, how):
            if flock is not None:
                raise OSError(flock, "Refused")
            return really[1](fd, how)

        monkeypatch.setattr(fcntl, "fcntl", asked_fcntl)
        monkeypatch.setattr(fcntl, "flock", asked_flock)

    return use


def names(path):
    return sorted(entry.name for entry in path.iterdir())


# --- generations


def test_a_file_that_gets_another_inode_and_time_keeps_its_generation(tmp_path):
    store = Store.open(tmp_path)
    store.write("key", b"old")
    generation = store.read_versioned("key")[1]
    (tmp_path / "copy").write_bytes(b"old")
    (tmp_path / "copy").rename(tmp_path / "key")
    assert store.replace("key", b"new", generation)
    assert not store.replace("key", b"late", generation)
    assert store.remove("key", store.read_versioned("key")[1])


def test_only_whole_reads_with_a_generation_hash_anything(tmp_path, monkeypatch):
    store = Store.open(tmp_path)
    store.write("key", b"0123456789")
    hashed = []
    monkeypatch.setattr(files, "generation_of", lambda data: hashed.append(data) or b"x")
    store.read("key")
    store.read("key", 2, 5)
    store.read_into("key", 1, [memoryview(bytearray(4))])
    assert store.read_versioned("key", 2, 5) == (b"234", b"")
    assert hashed == []
    assert store.read_versioned("key") == (b"0123456789", b"x")


# --- inode numbers


def test_a_save_ends_where_every_look_up_makes_up_an_inode_number(tmp_path, monkeypatch):
    numbers = itertools.count(10**6)
    renumber(monkeypatch, lambda _: next(numbers))
    for step in (1, 2):
        shardckpt.save(tmp_path / "c", STATE, options=shardckpt.SaveOptions(overwrite=step == 2))
    store = Store.open(tmp_path)
    assert not store.replace("c/checkpoint.json", b"late", b"another")
    assert not store.remove("c/checkpoint.json", b"another")
    assert shardckpt.restore(tmp_path / "c")["w"][7] == 7
    assert not [*tmp_path.rglob("*.__lock")]


def test_of_many_writers_one_wins_where_every_look_up_makes_up_an_inode_number(
    tmp_path, monkeypatch
):
    numbers = itertools.count(10**6)
    renumber(monkeypatch, lambda _: next(numbers))
    store = Store.open(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for turn in range(10):
            generation = store.read_versioned("key")[1]
            written = [f"{turn} {i}".encode() for i in range(8)]
            won = list(pool.map(store.replace, ["key"] * 8, written, [generation] * 8))
            assert [data for data, is_mine in zip(written, won, strict=True) if is_mine] == [
                store.read("key")
            ]
    assert names(tmp_path) == ["key"]


def test_a_save_is_published_where_inode_numbers_change_while_it_runs(tmp_path, monkeypatch):
    epoch = 0
    renumber(monkeypatch, lambda number: number + epoch * 10**9)

    def expire(event):
        nonlocal epoch
        epoch += 1

    with shardckpt.CheckpointManager(tmp_path, every=1, keep=1, on_event=expire) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
    assert epoch > 2
    assert shardckpt.CheckpointManager(tmp_path).all_steps() == [2]


def test_a_file_that_is_another_one_at_every_look_is_not_written_and_the_error_says_so(
    tmp_path, monkeypatch
):
    """So does a file system whose locks exclude nobody."""
    numbers = itertools.count(10**6)
    renumber(monkeypatch, lambda _: next(numbers))
    monkeypatch.setattr(files, "lock_file", lambda _fd, _path: None)
    with pytest.raises(
        StorageError, match=r"key.__lock was another file at each of 101 looks.*no locks that hold"
    ):
        Store.open(tmp_path).write("key", b"new")
    assert not (tmp_path / "key").exists()


# --- locks


@pytest.mark.parametrize("unknown", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_flock_excludes_writers_where_locks_of_open_files_are_unknown(
    tmp_path, refused, unknown, monkeypatch
):
    refused(unknown, None)
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.1)
    store = Store.open(tmp_path)
    store.write("key", b"old")
    with (tmp_path / "key.__lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"waited 0\.1 s for the lock"):
            store.write("key", b"new")
    store.write("key", b"new")
    assert store.read("key") == b"new"


@pytest.mark.parametrize("unknown", [errno.ENOSYS, errno.ENOLCK])
def test_a_save_where_nothing_locks_is_refused_with_what_to_mount(tmp_path, refused, unknown):
    refused(unknown, unknown)
    with pytest.raises(
        StorageError,
        match=r"checkpoint.json: this file system has no locks \(Refused\); mount it with locks "
        r"\(Lustre: -o flock",
    ):
        shardckpt.save(tmp_path / "c", STATE)


@pytest.mark.parametrize(
    ("to", "name"), [("safetensors", "x.safetensors"), ("dcp", "x"), ("torch", "x.pt")]
)
def test_an_export_where_nothing_locks_is_refused_with_what_to_mount_and_leaves_nothing(
    tmp_path, refused, to, name
):
    shardckpt.save(tmp_path / "c", STATE)
    (tmp_path / "out").mkdir()
    refused(errno.ENOSYS, errno.ENOSYS)
    with pytest.raises(
        StorageError, match=r"this file system has no locks \(Refused\); mount it with locks"
    ):
        shardckpt.export(tmp_path / "c", tmp_path / "out" / name, to=to)
    assert names(tmp_path / "out") == []


def test_an_error_of_a_lock_that_says_nothing_about_the_file_system_is_kept(tmp_path, refused):
    refused(errno.EIO, None)
    with pytest.raises(StorageError, match="Refused; see"):
        Store.open(tmp_path).write("key", b"new")


# --- directories


def test_a_directory_that_cannot_be_synced_is_named_in_the_log_once_and_the_save_goes_on(
    tmp_path, monkeypatch, caplog
):
    really = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(fd)

    monkeypatch.setattr(files, "_unsynced", set())
    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        shardckpt.save(tmp_path / f"{step}", STATE)
    for to in ("safetensors", "dcp"):
        shardckpt.export(tmp_path / "1", tmp_path / to, to=to)
    assert (
        sum("cannot make directories durable" in record.message for record in caplog.records) == 1
    )


def test_a_file_system_that_cannot_rename_is_told_from_others_with_the_way_out(
    tmp_path, monkeypatch
):
    def rename(_path, _to):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(
        StorageError, match=r"Function not implemented.*use the bucket's own url \(s3://"
    ):
        shardckpt.save(tmp_path / "c", STATE)


def test_an_open_file_that_was_deleted_is_not_listed_and_its_directory_goes_when_it_is_closed(
    tmp_path,
):
    """NFS and FUSE keep it under a name of their own as long as it is open."""
    directory = tmp_path / "d"
    directory.mkdir()
    hidden = [
        directory / ".nfs0000000002be1234000001f5",
        directory / ".fuse_hidden0000000500000002",
    ]
    for path in hidden:
        path.touch()
    assert Store.open(directory).list() == Store.open(directory).list_children() == []
    closing = threading.Timer(0.05, lambda: [path.unlink() for path in hidden])
    closing.start()
    assert locks.remove_directory(directory)
    closing.join()
    assert not directory.exists()
    directory.mkdir()
    (directory / "mine").touch()
    assert not locks.remove_directory(directory)


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("asks_by", ["create", "replace", "read"])
def test_a_file_that_is_removed_between_being_opened_and_asked_for_its_status_is_opened_again(
    tmp_path, monkeypatch, error, asks_by
):
    store = Store.open(tmp_path)
    if asks_by != "create":
        store.write("key", b"old")
    really, failed = os.fstat, []

    def fstat(fd):
        if len(failed) < 3 and stat.S_ISREG(really(fd).st_mode):
            failed.append(fd)
            raise OSError(error, "gone")
        return really(fd)

    monkeypatch.setattr(os, "fstat", fstat)
    if asks_by == "create":
        assert store.create("key", b"new")
    elif asks_by == "replace":
        store.write("key", b"new")
    assert store.read("key") == (b"old" if asks_by == "read" else b"new")
    assert len(failed) == 3
    monkeypatch.undo()
    assert names(tmp_path) == ["key"]
