"""Files in a run's root besides its steps, and leftovers of earlier runs."""

from __future__ import annotations

import os

import pytest
from failing import removal_refused
from placeholders import undo_commit
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.runs import steps
from shardckpt.runs.collecting import delete


@pytest.fixture
def unpublished(run):
    """A run whose step 2 is complete and lacks its publication."""
    run.train(1, 2)
    undo_commit(run.root / "2")
    return run


@pytest.mark.parametrize(
    ("name", "target"),
    [("loop", "loop"), ("7", "7"), ("a", "b"), ("latest", "2"), ("nowhere", "gone"), ("dot", ".")],
)
def test_symbolic_links_in_the_root_disturb_nothing(unpublished, name, target):
    (unpublished.root / name).symlink_to(target)
    (unpublished.root / "b").symlink_to("a")
    with unpublished.manager(keep=2) as manager:
        assert manager.all_steps() == [1]
        assert manager.restore().step == 2
        assert manager.all_steps() == [1, 2]
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [2, 3]


def test_a_link_to_itself_where_a_step_would_be_saved_makes_that_save_fail_by_name(run):
    run.root.mkdir()
    (run.root / "7").symlink_to("7")
    with run.manager() as manager:
        manager.save(7, state(7))
        with pytest.raises(errors.StorageError, match="/run/7"):
            manager.wait()


def test_nothing_but_steps_is_looked_at(unpublished):
    foreign = unpublished.root / "lost+found" / "20260101T000000-00000000"
    foreign.mkdir(parents=True)
    (foreign / "records").write_text("a file where a directory would be")
    with unpublished.manager() as manager:
        assert manager.restore().step == 2


def test_a_run_that_goes_on_while_its_steps_are_listed_is_not_taken_for_a_new_one(run, monkeypatch):
    """With keep=1: the only step that the listing shows goes before its record is read, since there
    is another."""
    run.train(1)
    read = steps.read_step

    def late(root, step):
        monkeypatch.setattr(steps, "read_step", read)
        shardckpt.save(run.root / "2", state(2))
        delete(run.root / str(step))
        return read(root, step)

    monkeypatch.setattr(steps, "read_step", late)
    assert run.manager().latest_step() == 2


def test_leftovers_that_can_never_be_collected_are_named_in_the_log_once(run, caplog):
    caplog.set_level("WARNING", logger="shardckpt")
    run.train(1)
    left = run.root / "1" / "20200101T000000-0000000a" / "hosts" / "00000"
    left.mkdir(parents=True)
    (left / "table").write_bytes(b"of a killed save")
    for path in (left / "table", left, left.parent, left.parent.parent):
        # Idle for longer than any time in which a save may be at work.
        os.utime(path, (1_600_000_000, 1_600_000_000))
    with (
        removal_refused("00000"),
        run.manager(options=shardckpt.SaveOptions(commit_timeout=0.05)) as manager,
    ):
        manager.restore()
        for step in (2, 3, 4):
            manager.save(step, state(step))
            manager.wait()
    (message,) = [
        record.getMessage()
        for record in caplog.records
        if "cannot be collected" in record.getMessage()
    ]
    assert str(run.root / "1") in message
    assert "Input/output error" in message
