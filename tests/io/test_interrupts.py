"""Ctrl-C at any moment leaks no open file and keeps no lock."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import CHILDREN

import shardckpt
from shardckpt.io.files import OpenFile


@pytest.mark.parametrize("call", ["save", "restore", "export", "torch", "dcp", "import"])
def test_a_storm_of_interrupts_leaks_no_open_file_and_locks_no_name(tmp_path, call):
    command = [sys.executable, CHILDREN / "interrupt_storm.py", tmp_path, call, "40"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    interrupted, leaked, raised = json.loads(finished.stdout)
    assert interrupted
    assert (leaked, raised) == ([], None)


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "orbax"])
def test_an_interrupt_right_after_a_lock_was_taken_leaves_the_name_free(tmp_path, monkeypatch, to):
    shardckpt.save(tmp_path / "c", {"w": np.ones((30, 30), np.float32)})
    flock = fcntl.flock

    def interrupted(fd, how):
        flock(fd, how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last error
            shardckpt.export(tmp_path / "c", tmp_path / "o.safetensors", to=to)
    shardckpt.export(tmp_path / "c", tmp_path / "o.safetensors", to=to)
    assert kept.type is KeyboardInterrupt


def test_an_open_file_is_closed_with_its_object(tmp_path):
    (tmp_path / "f").touch()
    file = OpenFile(tmp_path / "f", os.O_RDONLY)
    number = file.fileno()
    assert not os.get_inheritable(number)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with OpenFile(str(tmp_path / "f"), os.O_RDONLY) as number:
        assert os.fstat(number).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    file = OpenFile(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    file.close()
    file.close()
    assert file.fileno() == -1
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "nothing", os.O_RDONLY)
