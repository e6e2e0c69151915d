"""Ctrl-C at any moment leaks no open file and keeps no lock."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from interrupting import interrupted
from paths import CHILDREN

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io import requests
from shardckpt.io.buckets import retry
from shardckpt.io.deletion import remove_tree
from shardckpt.io.files import OpenFile
from shardckpt.io.requests import Upload


@pytest.mark.long
@pytest.mark.parametrize("call", ["save", "restore", "export", "torch", "dcp", "import"])
def test_a_storm_of_interrupts_leaks_no_open_file_and_locks_no_name(tmp_path, call):
    command = [sys.executable, CHILDREN / "interrupt_storm.py", tmp_path, call, "40"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    interrupted, leaked, raised = json.loads(finished.stdout)
    assert interrupted
    assert (leaked, raised) == ([], None)


@pytest.mark.parametrize(
    ("to", "name"),
    [("safetensors", "o.safetensors"), ("torch", "o.pt"), ("dcp", "o"), ("orbax", "o")],
)
def test_an_interrupt_right_after_a_lock_was_taken_leaves_the_name_free(
    tmp_path, monkeypatch, to, name
):
    shardckpt.save(tmp_path / "c", {"w": np.ones((30, 30), np.float32)})
    flock = fcntl.flock

    def interrupted(fd, how):
        flock(fd, how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last error
            shardckpt.export(tmp_path / "c", tmp_path / name, to=to)
    shardckpt.export(tmp_path / "c", tmp_path / name, to=to)
    assert kept.type is KeyboardInterrupt


def interrupted_after_each_call(work):
    """Call `work` with Ctrl-C after its first call of C code, its second, … and last without."""
    calls, left = 0, 0
    while left <= 0:
        calls += 1
        left = calls

        def interrupt(_frame, event, _called):
            nonlocal left
            left -= event == "c_return"
            if left == 0:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        yield
    assert calls > 3


# A destructor cannot raise KeyboardInterrupt.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_after_any_call_of_a_deletion_leaves_no_directory_open(tmp_path):
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").touch()
    for _ in interrupted_after_each_call(lambda: remove_tree(tree)):
        targets = [str(one.resolve()) for one in Path("/proc/self/fd").iterdir()]
        assert not [target for target in targets if str(tree) in target]
    assert not tree.exists()


def test_an_interrupt_after_any_call_leaves_the_coordinator_to_the_next():
    join = partial(shardckpt.Coordinator.current, timeout=1)
    for _ in interrupted_after_each_call(join):
        join()


def test_an_interrupt_of_giving_up_leaves_an_upload_that_can_be_given_up():
    files = (threading.__file__, retry.__file__)
    retry.note_answer("service")  # it is asked again for minutes

    def fail():
        raise retry.PassingError("not now")

    def write(asked):
        asked.call(fail, lambda _: True, "service")

    for at in count():
        upload = Upload("place", write, background=True)
        was_interrupted = interrupted(
            at,
            requests.__file__,
            lambda code: code.co_filename in files,
            upload.abandon,
            lambda: True,
        )
        clean_up = threading.Thread(target=upload.abandon, daemon=True)
        clean_up.start()
        clean_up.join(20)
        assert not clean_up.is_alive(), at
        with pytest.raises(StorageError, match="the upload was given up"):
            upload.wait()
        if was_interrupted is None:
            break
    assert at > 2


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
