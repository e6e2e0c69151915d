"""Leases: what a reader holds is neither pruned nor collected, and a dead reader's lease ends."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

import shardckpt
from shardckpt.errors import NotFoundError, StorageError
from shardckpt.format.documents import seal
from shardckpt.io.store import Store
from shardckpt.runs import leases
from shardckpt.runs.catalog import catalog
from shardckpt.runs.cleaning import Cleaner
from shardckpt.runs.collecting import collect
from shardckpt.runs.leases import leased, leased_steps
from shardckpt.runs.retention import Latest
from shardckpt.runs.steps import read_step, step_numbers
from shardckpt.versions.folding import fold


def test_a_lease_lasts_while_it_is_held(store):
    assert leased_steps(store) == frozenset()
    with leased(store, [3, 5]) as held:
        assert held
        with leased(store, [7]):
            assert leased_steps(store) == {3, 5, 7}
        assert leased_steps(store) == {3, 5}
    assert leased_steps(store) == frozenset()
    assert store.list() == []


def test_a_lease_that_nobody_renews_ends_by_the_storage_s_clock_and_is_removed_later(tmp_path):
    store, path = Store.open(tmp_path), tmp_path / "leases" / "0.json"
    for age, steps, stays in ((0, {1}, True), (700, set(), True), (2 * 86400, set(), False)):
        store.write("leases/0.json", seal({"steps": [1], "holder": "here"}))
        os.utime(path, (time.time() - age, time.time() - age))
        assert leased_steps(store) == steps
        assert path.exists() == stays


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", seal({"steps": "all"}), seal({"steps": [True, "1", 1.0, None]}), b"x" * 100_000],
)
def test_what_is_no_lease_holds_nothing(store, data):
    store.write("leases/0.json", data)
    assert leased_steps(store) == frozenset()


def test_a_lease_that_ended_long_ago_and_cannot_be_removed_holds_nothing(tmp_path, monkeypatch):
    store, path = Store.open(tmp_path), tmp_path / "leases" / "0.json"
    store.write("leases/0.json", seal({"steps": [1], "holder": "here"}))
    os.utime(path, (1, 1))

    delete = type(store).delete

    def refused(self, key):
        if key == "leases/0.json":
            raise StorageError(f"cannot delete {key}: Permission denied")  # another user's
        delete(self, key)

    monkeypatch.setattr(type(store), "delete", refused)
    assert leased_steps(store) == frozenset()


def test_a_service_writes_leases_for_steps_that_are_there_only(tmp_path):
    store, lease = Store.open(tmp_path), {"steps": [3], "holder": "host", "version": None}
    with pytest.raises(NotFoundError, match="does not have the steps"):
        leases.write_lease(store, "0" * 16, lease)
    shardckpt.save(tmp_path / "3", {"w": np.zeros(3)})
    leases.write_lease(store, "0" * 16, lease)
    assert leased_steps(store) == {3}
    with pytest.raises(NotFoundError, match="does not have the steps"):
        leases.write_lease(store, "0" * 16, lease | {"steps": [3, 4]})


def test_a_lease_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    store, written = Store.open(tmp_path), []
    monkeypatch.setattr(leases, "SECONDS", 0.03)
    write = type(store).write
    monkeypatch.setattr(
        type(store),
        "write",
        lambda self, key, data: (written.append(key), write(self, key, data))[1],
    )
    with leased(store, [1]):
        while len(written) < 4:
            pass
    assert len({*written}) == 1
    assert store.list() == []


def test_a_slow_renewal_does_not_undo_a_lease_on_other_steps(tmp_path, monkeypatch):
    store, renews, goes_on = Store.open(tmp_path), threading.Event(), threading.Event()
    write = type(store).write

    def slow_in_the_background(self, key, data):
        if threading.current_thread() is not threading.main_thread() and not renews.is_set():
            renews.set()
            goes_on.wait(60)
        write(self, key, data)

    monkeypatch.setattr(leases, "SECONDS", 0.03)
    monkeypatch.setattr(type(store), "write", slow_in_the_background)
    lease = leases.ReaderLease(store)
    with lease.holding([]):
        pass
    assert renews.wait(60)
    monkeypatch.undo()
    threading.Timer(0.2, goes_on.set).start()
    with lease.holding([1]):
        assert goes_on.wait(60)
        assert leased_steps(store) == {1}
    lease.close()


def test_where_no_lease_can_be_written_it_is_told_once(tmp_path, caplog):
    (tmp_path / "leases").write_text("a file")
    for _ in range(2):
        with leased(Store.open(tmp_path), [1]) as held:
            assert not held
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (
        "no lease can be written there, so what this process reads may be pruned while it reads"
        in caplog.text
    )


def test_without_a_thread_that_renews_it_there_is_no_lease_until_one_can_be_started(
    tmp_path, monkeypatch, caplog
):
    root = Store.open(tmp_path)

    def refused(thread):
        raise RuntimeError("can't start new thread")

    lease = leases.ReaderLease(root)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with lease.holding([1]) as held:
                assert not held
            assert leased_steps(root) == frozenset()
    assert "can't start new thread" in caplog.text
    with lease.holding([1]) as held:
        assert held
        assert leased_steps(root) == {1}
    lease.close()
    assert root.list() == []


def test_steps_with_a_lease_stay_until_it_ends(tmp_path):
    root = Store.open(tmp_path)
    for step in range(5):
        shardckpt.save(tmp_path / str(step), {"w": np.arange(step)})
    cleaner = Cleaner(root, Latest(1), grace=0, deleted=lambda step: None)
    with leased(root, [1, 3]):
        cleaner.clean(read_step(root, 4))
        assert step_numbers(root) == [1, 3, 4]
    cleaner.clean(read_step(root, 4))
    assert step_numbers(root) == [4]


def test_a_lease_that_is_taken_while_steps_are_deleted_holds_those_that_are_left(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(leases, "_FRESH", 0.0)
    root = Store.open(tmp_path)
    for step in range(4):
        shardckpt.save(tmp_path / str(step), {"w": np.arange(step)})
    lease = leases.ReaderLease(root)
    with ExitStack() as reads:
        cleaner = Cleaner(
            root, Latest(1), grace=0, deleted=lambda step: reads.enter_context(lease.holding([2]))
        )
        cleaner.clean(read_step(root, 3))
        assert step_numbers(root) == [2, 3]
    lease.close()


def test_nothing_is_pruned_where_leases_cannot_be_listed(tmp_path, monkeypatch):
    root = Store.open(tmp_path)
    for step in range(3):
        shardckpt.save(tmp_path / str(step), {"w": np.arange(step)})
    cleaner = Cleaner(root, Latest(1), grace=0, deleted=lambda step: None)

    def refused(root):
        raise StorageError("refused")

    monkeypatch.setattr(leases, "leased_steps", refused)
    cleaner.clean(read_step(root, 2))
    assert step_numbers(root) == [0, 1, 2]
    assert "refused" in str(cleaner.failure)


def test_an_attempt_that_a_fold_replaced_is_not_collected_while_a_reader_holds_its_step(tmp_path):
    with shardckpt.Publisher(tmp_path, catch_up=None) as publisher:
        for step in range(12):
            publisher.publish(step, {"w": np.arange(1000) + step // 11})
            publisher.wait()
    assert fold(tmp_path)
    with leased(Store.open(tmp_path), [6]):
        assert {
            (one.location.name, one.outcome, one.reason)
            for one in collect(tmp_path, grace=0)
            if one.location.name == "6"
        } == {("6", "kept", "a reader holds a lease on it")}
        (tmp_path / "latest").symlink_to("6")
        for url in (tmp_path / "6", tmp_path / "latest"):
            assert [one.outcome for one in collect(url, grace=0)] == ["kept"]
        (tmp_path / "latest").unlink()
    assert {one.outcome for one in collect(tmp_path, grace=0)} == {"removed"}
    assert len(catalog(tmp_path)) == 12


def test_a_follower_holds_the_chain_of_the_version_that_it_prepares(tmp_path, monkeypatch):
    held = []
    with (
        shardckpt.Publisher(tmp_path) as publisher,
        shardckpt.follow(tmp_path, like={"w": np.zeros(1000)}) as follower,
    ):
        for step in range(3):
            publisher.publish(step, {"w": np.arange(1000.0) + step})
            publisher.wait()
        version = follower.poll()
        update = follower.cache.update
        monkeypatch.setattr(
            follower.cache,
            "update",
            lambda *a: (held.append(leased_steps(Store.open(tmp_path))), update(*a))[1],
        )
        version.prepare()
    assert held == [{0, 1, 2}]
    assert leased_steps(Store.open(tmp_path)) == frozenset()


def test_a_follower_without_threads_that_listen_or_renew_follows_all_the_same(
    tmp_path, monkeypatch
):
    start, like = threading.Thread.start, {"w": np.zeros(1000)}

    def refused(thread):
        if thread.name in ("shardckpt-lease", "shardckpt-listener"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": np.arange(1000.0)})
    monkeypatch.setenv("SHARDCKPT_SERVER", "http://127.0.0.1:9")
    monkeypatch.setattr(threading.Thread, "start", refused)
    with shardckpt.follow(tmp_path, like=like) as follower:
        follower.poll().prepare().apply()
    assert (like["w"] == np.arange(1000.0)).all()
    assert leased_steps(Store.open(tmp_path)) == frozenset()
