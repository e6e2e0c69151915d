"""Names of files and directories are durable before the checkpoint is published, and each directory
is synced few times."""

import os
from pathlib import Path

import numpy as np
import pytest

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.writing.host import HostWriter

STATE = {f"w{i}": np.full((8, 8), i, np.float32) for i in range(10)}
OPTIONS = {
    "packed": {},
    "compressed": {"compression": "zstd"},
    "an object per chunk": {"layout": "zarr"},
    "with a fingerprint": {"fingerprint": True},
}


class Disk:
    """Names that are not synced, and files whose bytes are not: a crash would take them."""

    def __init__(self, monkeypatch):
        self.names, self.files, self.syncs = set(), set(), []
        self.lost_at_record, self.lost_at_publication = None, None
        self.empty_records = []
        """Records whose bytes a crash would take, and not their names."""
        made, opened, renamed, replaced, synced = os.mkdir, os.open, os.rename, os.replace, os.fsync

        def mkdir(path, *args, **kwargs):
            made(path, *args, **kwargs)
            self.names.add(Path(path))

        def open_(path, flags, *args, **kwargs):
            is_new = flags & os.O_CREAT and not Path(path).exists()
            fd = opened(path, flags, *args, **kwargs)
            if is_new:
                self.names.add(Path(path))
                self.files.add(Path(path))
            return fd

        def moved(move):
            def to(source, target, *args, **kwargs):
                source, target = Path(source), Path(target)
                if target.parent.name == "records":
                    self.lost_at_record = self.lost(but=source)
                if source in self.files and (
                    target.name == "checkpoint.json" or target.parent.name == "records"
                ):
                    self.empty_records.append(target)
                if target.name == "checkpoint.json":
                    # Of the first one, that only holds the place, nothing is asked.
                    self.lost_at_publication = self.lost(but=source)
                move(source, target, *args, **kwargs)
                self.names -= {source}
                self.names.add(target)
                if source in self.files:
                    self.files -= {source}
                    self.files.add(target)

            return to

        def fsync(fd):
            path = Path(f"/proc/self/fd/{fd}").readlink()
            synced(fd)
            self.syncs.append(path)
            self.names = {name for name in self.names if name.parent != path}
            self.files -= {path}

        for name, function in {
            "mkdir": mkdir,
            "open": open_,
            "rename": moved(renamed),
            "replace": moved(replaced),
            "fsync": fsync,
        }.items():
            monkeypatch.setattr(os, name, function)

    def lost(self, but=None):
        """Names and files that a crash would take now, except the file that is being renamed."""
        return sorted(
            str(path) for path in (self.names | self.files) if path != but and path.exists()
        )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_everything_is_durable_before_the_hosts_record_and_before_the_publication(
    tmp_path, monkeypatch, options, save
):
    disk = Disk(monkeypatch)
    handle = getattr(shardckpt, save)(
        tmp_path / "a" / "b" / "c", STATE, options=shardckpt.SaveOptions(**options)
    )
    if save == "save_async":
        handle.wait()
    assert disk.lost_at_record == []
    assert disk.lost_at_publication == []
    assert disk.lost() == []
    assert disk.empty_records == []


def test_a_directory_of_runs_is_durable_before_a_save_beside_finds_it(tmp_path, monkeypatch):
    disk, writing = Disk(monkeypatch), HostWriter.finish
    lost = []

    def finish(*args, **kwargs):
        lost.append(tmp_path / "run" in disk.names)
        return writing(*args, **kwargs)

    monkeypatch.setattr(HostWriter, "finish", finish)
    shardckpt.save(tmp_path / "run" / "100", STATE)
    assert lost == [False]


def test_ten_small_tensors_take_few_syncs(tmp_path, monkeypatch):
    shardckpt.save(tmp_path / "first", STATE)
    disk = Disk(monkeypatch)
    shardckpt.save(tmp_path / "c", STATE)
    assert len(disk.syncs) <= 19
    assert len(disk.syncs) - len({*disk.syncs}) == 2, (
        "twice: the checkpoint's directory and record, before and when it is published"
    )


def test_an_object_per_chunk_takes_one_sync_each_and_few_per_directory(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    shardckpt.save(
        tmp_path / "c",
        {"w": np.zeros((4, 1024, 1024), np.float32)},
        options=shardckpt.SaveOptions(layout="zarr"),
    )
    files = sum(path.is_file() for path in (tmp_path / "c").rglob("*"))
    directories = sum(path.is_dir() for path in tmp_path.rglob("*"))
    assert len(disk.syncs) <= files + 2 * directories


def test_names_that_cannot_be_synced_are_not_vouched_for(tmp_path, monkeypatch):
    synced = os.fsync

    def fsync(fd):
        if Path(f"/proc/self/fd/{fd}").readlink().name == "hosts":
            raise OSError(5, "Input/output error")
        synced(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match="Input/output error"):
            shardckpt.save(tmp_path / "c", STATE)
    assert [*(tmp_path / "c").rglob("records/*")] == []
    shardckpt.save(tmp_path / "c", STATE)
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "c")["w3"], STATE["w3"])
