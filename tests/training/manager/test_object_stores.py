"""A run in a bucket: the same steps, deletions, pins and rollbacks, and the same word for two jobs
in one place."""

from __future__ import annotations

import uuid

import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from placeholders import undo_commit
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.store import Store


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    """A place in a bucket, and the proxy before it, which sees to it that conditions hold."""
    emulator = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with (
        FaultProxy(emulator.endpoint) as proxy,
        environment(emulator.env(proxy.url) | {"SHARDCKPT_RETRY_SECONDS": "2"}),
    ):
        yield f"{emulator.scheme}://{emulator.new_bucket(f'b-{uuid.uuid4().hex}')}/run", proxy


@pytest.fixture
def root(cloud):
    return cloud[0]


@pytest.mark.long
def test_a_run_in_a_bucket(root):
    with shardckpt.CheckpointManager(root, every=1, keep=2, coordinator=SingleProcess()) as first:
        assert first.restore() is None
        for step in (1, 2, 3):
            first.save(step, state(step), {"loss": -step})
        first.wait()
        first.pin(2)
        for step in (4, 5):
            first.save(step, state(step))
        first.wait()
        assert first.all_steps() == [2, 4, 5]
        with shardckpt.CheckpointManager(root, every=1, coordinator=SingleProcess()) as second:
            assert second.restore(step=4).step == 4
            second.save(6, state(6))
            second.wait()
            assert [(info.step, info.state, info.pinned) for info in second.steps()] == [
                (2, "committed", True),
                (4, "committed", False),
                (5, "superseded", False),
                (6, "committed", False),
            ]
            assert second.best_step("loss") == 2
        first.save(7, state(7))
        with pytest.raises(errors.OtherJobError):
            first.wait()
    assert shardckpt.CheckpointManager(root).restore().step == 6


@pytest.mark.long
def test_nothing_is_left_of_steps_that_are_not_kept(root):
    place = Store.open(root)
    place.sub("100").write(
        "checkpoint.json", seal(Tombstone("deleted by an earlier version", "1").to_json())
    )
    place.write("deleted.json", b"of an earlier version")
    with shardckpt.CheckpointManager(root, every=1, keep=3, coordinator=SingleProcess()) as manager:
        for step in range(10):
            manager.save(step, state(step))
        manager.wait()
    assert place.list_children() == ["7/", "8/", "9/", "job.json"]
    shardckpt.save(f"{root}/5", state(5))
    assert shardckpt.CheckpointManager(root).all_steps() == [5, 7, 8, 9]


@pytest.mark.long
def test_a_start_asks_for_what_is_kept_and_nothing_of_what_was_deleted(root, monkeypatch):
    looks, read = [], Store.read_versioned
    with shardckpt.CheckpointManager(root, every=1, keep=1, coordinator=SingleProcess()) as manager:
        for step in range(6):
            manager.save(step, state(step))
        manager.wait()
    monkeypatch.setattr(
        Store,
        "read_versioned",
        lambda store, key, *span: looks.append(store.path_of(key)) or read(store, key, *span),
    )
    assert shardckpt.CheckpointManager(root, coordinator=SingleProcess()).restore().step == 5
    assert {key.removeprefix(f"{root}/").partition("/")[0] for key in looks} <= {"5", "job.json"}


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"fault": "status", "status": 403}, id="refused"),
        pytest.param({"fault": "truncate"}, id="truncated"),
    ],
)
@pytest.mark.parametrize("listed", ["run/2/*", "run/2/*/records/*"])
def test_a_listing_that_fails_while_leftovers_are_committed_makes_restore_fail_not_go_further_back(
    cloud, listed, fault
):
    root, proxy = cloud
    with shardckpt.CheckpointManager(root, every=1, coordinator=SingleProcess()) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    undo_commit(f"{root}/2")  # complete, and not published
    with (
        proxy.rules.during(Rule(**fault, kinds=("list",), objects=f"*/{listed}", times=None)),
        pytest.raises(errors.StorageError, match="cannot list"),
    ):
        shardckpt.CheckpointManager(root).restore()
    assert shardckpt.CheckpointManager(root).restore().step == 2


@pytest.mark.long
def test_a_read_that_fails_then_makes_restore_fail_too(cloud):
    root, proxy = cloud
    with shardckpt.CheckpointManager(root, every=1, coordinator=SingleProcess()) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    undo_commit(f"{root}/2")
    rule = Rule(
        "status", status=400, kinds=("read", "stat"), objects="*/run/2/checkpoint.json", times=None
    )
    with proxy.rules.during(rule), pytest.raises(errors.StorageError, match="cannot read"):
        shardckpt.CheckpointManager(root).restore()
    assert shardckpt.CheckpointManager(root).restore().step == 2


def test_a_process_that_may_only_read_restores_the_latest_step_that_is_published_and_says_why(
    cloud, caplog
):
    root, proxy = cloud
    with shardckpt.CheckpointManager(root, every=1, coordinator=SingleProcess()) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    undo_commit(f"{root}/2")
    with proxy.rules.during(Rule("status", status=403, kinds=("upload",), times=None)):
        assert shardckpt.CheckpointManager(root).restore().step == 1
    assert "/run/2: the unpublished attempt" in caplog.text
