"""The log of an export's progress: whose it is, and what it says after errors."""

from __future__ import annotations

import fcntl
import os

import pytest

from shardckpt.convert.files.notes import Notes, begun_files
from shardckpt.errors import StorageError

PLAN = bytes(range(32))


def test_a_log_that_its_last_holder_removes_at_this_moment_is_created_again_and_takes_notes(
    tmp_path, monkeypatch
):
    path, really = tmp_path / "notes", fcntl.flock
    removed = []

    def flock(fd, how):
        really(fd, how)
        if not removed:
            removed.append(path.unlink())

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = Notes(path)
    notes.begin(PLAN, ["a b", "größe"])
    with (tmp_path / "0").open("wb") as file:
        notes.add_later([1, 2], tmp_path / "0", file.fileno())
        notes.wait()
    assert notes.read(PLAN) == ([1, 2], False)
    with pytest.raises(StorageError, match="another export is writing there"):
        Notes(path)
    notes.close()
    notes.close()
    assert Notes(path).read(PLAN) == ([1, 2], False)
    assert begun_files(path) == ["a b", "größe"]
    assert begun_files(tmp_path / "another") == []


def test_blocks_whose_file_could_not_be_made_durable_are_not_noted_and_the_error_is_raised_once(
    tmp_path, monkeypatch
):
    notes = Notes(tmp_path / "notes")
    notes.begin(PLAN, ["a b", "größe"])
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fdatasync", lambda _fd: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        notes.add_later([1], tmp_path / "0", 0)
        with pytest.raises(StorageError, match="Input/output error"):
            notes.wait()
    notes.wait()
    assert notes.read(PLAN) == ([], False)
    notes.close()
