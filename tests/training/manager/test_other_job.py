"""Two live jobs on one root: the older one is told, and nothing of either is lost."""

import threading

import pytest
from processes import Processes
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.job import JobFence
from shardckpt.training import events
from shardckpt.writing import attempt


def test_the_older_job_is_told_of_both_runs_and_publishes_nothing_more(run):
    older, newer = SingleProcess(), SingleProcess()
    with run.manager(coordinator=older) as old, run.manager(coordinator=newer) as new:
        old.save(1, state(1))
        old.wait()
        assert new.restore().step == 1
        new.save(2, state(2))
        new.wait()
        old.save(3, state(3))
        with pytest.raises(errors.OtherJobError) as caught:
            old.wait()
        assert older.run_id in str(caught.value)
        assert newer.run_id in str(caught.value)
        new.save(4, state(4))
        new.wait()
        assert new.all_steps() == [1, 2, 4]
    assert [run.holds(step) for step in (1, 2, 4)] == [True] * 3


def test_the_older_job_deletes_nothing_more(run):
    with (
        run.manager(coordinator=SingleProcess(), keep=1) as old,
        run.manager(coordinator=SingleProcess()) as new,
    ):
        old.save(1, state(1))
        old.wait()
        new.restore()
        new.save(2, state(2))
        new.wait()
        old.save(3, state(3))
        with pytest.raises(errors.OtherJobError):
            old.wait()
        assert new.all_steps() == [1, 2]


def test_two_jobs_at_one_step_keep_the_first_save_and_the_older_job_learns_why(run):
    with (
        run.manager(coordinator=SingleProcess()) as old,
        run.manager(coordinator=SingleProcess()) as new,
    ):
        old.save(1, state(1))
        old.wait()
        new.restore()
        new.save(2, {**state(2), "by": "new"})
        new.wait()
        old.save(2, {**state(2), "by": "old"})
        with pytest.raises(errors.OtherJobError) as caught:
            old.wait()
        assert isinstance(caught.value.__cause__, errors.AlreadyExistsError)
    assert shardckpt.restore(run.root / "2")["by"] == "new"


def test_a_job_that_only_reads_takes_nothing_over(run):
    with (
        run.manager(coordinator=SingleProcess()) as writer,
        run.manager(coordinator=SingleProcess()) as reader,
    ):
        writer.save(1, state(1))
        writer.wait()
        assert reader.restore().step == 1
        assert reader.latest_step() == 1
        writer.save(2, state(2))


def test_a_save_that_fails_takes_nothing_over(run):
    with (
        run.manager(coordinator=SingleProcess()) as writer,
        run.manager(coordinator=SingleProcess()) as careless,
    ):
        writer.save(1, state(1))
        writer.wait()
        careless.save(1, state(1))
        with pytest.raises(errors.OtherJobError):
            careless.wait()
        writer.save(2, state(2))


def test_the_second_of_two_jobs_at_the_same_pace_is_told_of_the_other_at_every_step(run):
    with (
        run.manager(coordinator=SingleProcess()) as first,
        run.manager(coordinator=SingleProcess()) as second,
    ):
        for step in (1, 2):
            first.save(step, state(step))
            first.wait()
            second.save(step, state(step))
            with pytest.raises(errors.OtherJobError) as caught:
                second.wait()
            assert first._coordinator.run_id in str(caught.value)
            assert second._coordinator.run_id in str(caught.value)
            assert "overwrite" not in str(caught.value)
            assert isinstance(caught.value.__cause__, errors.AlreadyExistsError)


def test_two_jobs_that_publish_the_first_step_at_once_are_both_told(run, monkeypatch):
    """The second takes the root over and finds the step published: both have to end, and neither is
    told to overwrite."""
    first, second = (run.manager(coordinator=SingleProcess()) for _ in range(2))
    publish = attempt.publish

    def overtaken(*arguments):
        monkeypatch.undo()
        first.save(1, state(1))
        first.wait()
        return publish(*arguments)

    monkeypatch.setattr(attempt, "publish", overtaken)
    second.save(1, state(1))
    with pytest.raises(errors.OtherJobError, match=first._coordinator.run_id):
        second.wait()
    assert run.holds(1)


def test_a_step_that_this_run_has_saved_itself_exists(run):
    job = SingleProcess()
    with run.manager(coordinator=job) as manager, run.manager(coordinator=job) as again:
        manager.save(1, state(1))
        manager.wait()
        again.save(1, state(1))
        with pytest.raises(errors.AlreadyExistsError):
            again.wait()


def test_of_two_managers_of_one_process_the_one_that_began_first_is_told_and_what_is_saved_stays(
    run,
):
    with run.manager() as old, run.manager() as new:
        old.save(1, state(1))
        old.wait()
        assert new.restore().step == 1  # a reader takes nothing over
        old.save(2, state(2))
        old.wait()
        new.save(3, state(3))
        with pytest.raises(
            errors.OtherJobError,
            match="another CheckpointManager of this process has begun to save there",
        ) as caught:
            old.save(4, state(4))
        assert str(run.root) in str(caught.value)
        new.save(5, state(5))
        new.wait()
        old.wait()
        assert new.all_steps() == [1, 2, 3, 5]
        new.close()
        old.save(6, state(6))
        old.wait()
        assert old.all_steps() == [1, 2, 3, 5, 6]


def test_a_manager_that_lost_the_root_deletes_nothing_there(run):
    committed, go_on = threading.Event(), threading.Event()

    def hold(event):
        if isinstance(event, events.SaveCommitted):
            committed.set()
            assert go_on.wait(60)

    with run.manager(keep=1, on_event=hold) as old, run.manager(keep=3) as new:
        old.save(1, state(1))
        assert committed.wait(60)  # its deletions are still to come
        new.restore(step=1)
        for step in (2, 3):
            new.save(step, state(step))
            new.wait()
        go_on.set()
        old.wait()
        assert new.all_steps() == [1, 2, 3]


def test_a_save_that_begins_nothing_takes_nothing_over_and_is_an_event(run):
    seen = []
    with run.manager() as old, run.manager(on_event=seen.append) as new:
        old.save(1, state(1))
        old.wait()
        with pytest.raises(errors.LeafError):
            new.save(2, {"w": object()})
        old.save(2, state(2))
        old.wait()
        new.save(3, state(3))
        new.wait()
        with pytest.raises(errors.OtherJobError):
            old.save(4, state(4))
    assert [event.step for event in seen if isinstance(event, events.SaveFailed)] == [2]


def test_a_manager_that_is_gone_without_a_close_leaves_the_root(run):
    def save_by_another(step):
        manager = shardckpt.CheckpointManager(run.root)
        manager.save(step, state(step))
        manager.wait()

    with run.manager() as manager:
        manager.save(1, state(1))
        manager.wait()
        save_by_another(2)
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [1, 2, 3]


def test_a_link_to_the_root_and_a_relative_path_are_the_same_root(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(run.root.name)
    with run.manager() as old, shardckpt.CheckpointManager("link") as new:
        old.save(1, state(1))
        old.wait()
        new.save(2, state(2))
        with pytest.raises(errors.OtherJobError):
            old.save(3, state(3))


def test_the_first_save_of_a_run_says_in_the_log_where_it_begins(run, caplog):
    caplog.set_level("INFO", "shardckpt")
    for step in (1, 2):
        with run.manager() as manager:
            manager.save(step, state(step))
    (begun,) = [
        one.getMessage() for one in caplog.records if "a new run begins" in one.getMessage()
    ]
    assert begun.startswith(f"{run.root}: ")


@pytest.mark.long
def test_every_process_of_the_second_job_is_told_of_the_other(tmp_path):
    with Processes("manager_jobs") as jobs:
        assert jobs.run("save_steps", 2, tmp_path, [1]) == ["saved"] * 2
        assert jobs.run("save_steps", 2, tmp_path, [1]) == ["OtherJobError"] * 2


def test_every_process_of_a_job_is_told_that_another_took_over(tmp_path):
    """Process 0 sees it; the others hear it from there."""
    with Processes("manager_jobs") as jobs:
        assert jobs.run("save_steps", 2, tmp_path, [1, 2], 2) == ["OtherJobError"] * 2
    assert shardckpt.CheckpointManager(tmp_path).all_steps() == [1]


def test_a_damaged_claim_is_none(tmp_path):
    store = Store.open(parse(tmp_path))
    store.write("job.json", b"{}")
    JobFence(store, "a").hold()
    JobFence(store, "a").hold()
    fence = JobFence(store, "b")
    fence.check()
    fence.hold()
    store.delete("job.json")
    fence.hold()
