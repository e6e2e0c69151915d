"""A disk on which there is no room for an export, or that somebody else fills meanwhile. A real
one, which takes root's rights."""

import os
import subprocess

import pytest
from convert_states import MiB, random, saved

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import local_files
from shardckpt.streaming import stream as streaming

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk takes root's rights")


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "shardckpt-test", place], check=True, timeout=30
    )
    yield place
    subprocess.run(["umount", "--lazy", place], check=True, timeout=30)


def test_nothing_is_begun_if_there_is_no_room(tmp_path, disk):
    saved(tmp_path / "c", {"w": random((9 * MiB // 4,))})
    with pytest.raises(
        errors.StorageError,
        match=r"the export needs 9 MiB there, and the disk has [\d.]+ [KM]iB free, .* too little; "
        r"make room",
    ):
        shardckpt.export(tmp_path / "c", disk / "a.safetensors")
    assert list(disk.iterdir()) == []


def test_a_disk_that_somebody_else_fills_stops_the_export_which_goes_on_when_there_is_room(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(streaming, "_BATCH", MiB)
    monkeypatch.setattr(local_files, "_NOTE_BYTES", MiB)
    state = {f"w{i}": random((MiB // 4,), seed=i) for i in range(6)}
    saved(tmp_path / "c", state)
    shardckpt.export(tmp_path / "c", tmp_path / "whole.safetensors")

    def fill(done, _total):
        if done == 3 * MiB:
            (disk / "other").write_bytes(bytes(4 * MiB))

    with pytest.raises(
        errors.StorageError, match=r"No space left on device; the disk is full; make room"
    ):
        shardckpt.export(tmp_path / "c", disk / "a.safetensors", progress=fill)
    assert sorted(path.name for path in disk.iterdir()) == [".a.safetensors.partial", "other"]
    (disk / "other").unlink()
    report = shardckpt.export(tmp_path / "c", disk / "a.safetensors")
    assert report.resumed_bytes >= MiB
    assert (disk / "a.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert [path.name for path in disk.iterdir()] == ["a.safetensors"]
