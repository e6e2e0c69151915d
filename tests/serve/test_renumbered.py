"""A service whose directories are on a file system that gives files other inode numbers, or coarse
times."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from inodes import renumber

import shardckpt
from shardckpt.errors import FormatError, StorageError
from shardckpt.serve.access.identity import Identity, begin_request
from shardckpt.serve.access.tokens import Tokens, add_token
from shardckpt.serve.catalogue.catalogue import Catalogue
from shardckpt.serve.jobs.journal import Journal
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.roots import Roots


def test_a_catalogue_whose_inode_number_changes_is_kept_and_one_that_was_deleted_is_made_anew(
    tmp_path, monkeypatch
):
    catalogue = Catalogue(tmp_path)
    with monkeypatch.context() as patch:
        calls = iter(range(10**6, 10**7))
        renumber(patch, lambda _: next(calls))
        assert not catalogue.renewed()
    (tmp_path / "catalogue.sqlite").unlink()
    assert catalogue.renewed()
    assert not catalogue.renewed()
    catalogue.close()


def test_a_journal_whose_inode_number_changes_takes_jobs_and_one_that_was_replaced_does_not(
    tmp_path, monkeypatch
):
    journal = Journal(tmp_path)
    path = tmp_path / "journal.sqlite"

    def add():
        return journal.add("verify", {}, {}, subject="a", destination=None, who="-", key=None)

    with monkeypatch.context() as patch:
        calls = iter(range(10**6, 10**7))
        renumber(patch, lambda _: next(calls))
        assert add()[1]
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    with pytest.raises(StorageError, match="was deleted or moved"):
        add()
    path.unlink()
    with pytest.raises(StorageError, match="was deleted or moved"):
        add()
    journal.close()


def test_a_token_that_was_replaced_in_the_same_tick_by_a_line_as_long_is_revoked(tmp_path):
    file = tmp_path / "tokens"
    first = add_token(file, "ann", "read")
    before = file.stat()
    tokens = Tokens(file)
    assert tokens.identity(first).name == "ann"
    other = tmp_path / "other"
    second = add_token(other, "ann", "read")
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tokens.identity(first) is None
    assert tokens.identity(second).name == "ann"


def test_an_open_checkpoint_stays_open_when_its_record_has_another_status_but_the_same_bytes(
    tmp_path,
):
    place = tmp_path / "runs" / "1"
    shardckpt.save(place, {"w": np.arange(5.0)})
    catalogue = Catalogue(tmp_path / "state")
    checkpoints = OpenCheckpoints(Roots([f"lab={tmp_path}"]), catalogue)
    opened = checkpoints.get("lab/runs/1")
    shutil.copy(place / "checkpoint.json", place / "copy")
    (place / "copy").rename(place / "checkpoint.json")
    assert checkpoints.get("lab/runs/1") is opened
    shardckpt.save(place, {"w": np.arange(5.0)}, options=shardckpt.SaveOptions(overwrite=True))
    assert checkpoints.get("lab/runs/1").attempt != opened.attempt
    catalogue.close()


def test_the_open_checkpoints_that_were_asked_for_last_stay_open(tmp_path):
    for step in range(33):
        shardckpt.save(tmp_path / str(step), {"w": np.zeros(1)})
    checkpoints = OpenCheckpoints(Roots([f"lab={tmp_path}"]))
    first = checkpoints.get("lab/0")
    for step in range(1, 33):
        checkpoints.get(f"lab/{step}")
        assert checkpoints.get("lab/0") is first
    begin = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        opened = pool.map(lambda _: (begin.wait(), checkpoints.get("lab/1"))[1], range(8))
        assert len({id(one) for one in opened}) == 1


def test_requests_that_wait_for_a_checkpoint_get_the_error_of_one_attempt(tmp_path):
    shardckpt.save(tmp_path / "base", {"w": np.zeros(1)})
    attempts, begin = [], threading.Barrier(8)

    class Slow(Roots):
        def check(self, checkpoint):
            attempts.append(checkpoint)
            time.sleep(0.5)
            raise FormatError("it cannot be read")

    checkpoints = OpenCheckpoints(Slow([f"lab={tmp_path}"]))

    def ask(_):
        begin.wait()
        with pytest.raises(FormatError, match="cannot be read"):
            checkpoints.get("lab/base")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert len(attempts) == 1
    with pytest.raises(FormatError):  # a later request tries again
        checkpoints.get("lab/base")
    assert len(attempts) == 2


def test_a_user_without_a_right_does_not_take_a_checkpoint_from_one_who_waits(tmp_path):
    state = {"w": np.arange(5.0)}
    shardckpt.save(tmp_path / "one" / "1", state)
    options = shardckpt.SaveOptions(base=tmp_path / "one" / "1", skip="w")
    shardckpt.save(tmp_path / "two" / "1", state | {"v": np.ones(2)}, options=options)
    slow, begun = threading.Event(), threading.Event()

    class Slow(Roots):
        def check(self, checkpoint):
            begun.set()
            assert slow.wait(60)
            return super().check(checkpoint)

    checkpoints = OpenCheckpoints(Slow([f"one={tmp_path / 'one'}", f"two={tmp_path / 'two'}"]))

    def ask(**rights):
        begin_request(Identity("ann", rights))
        return checkpoints.get("two/1")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, two="read")
        assert begun.wait(60)
        second = pool.submit(ask, one="read", two="read")
        time.sleep(0.3)
        slow.set()
        assert second.result().ident == "two/1"
        with pytest.raises(FormatError, match="outside of the roots"):
            first.result()
