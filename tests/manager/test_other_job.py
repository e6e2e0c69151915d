"""Two live jobs on one root: the older one is told, and nothing of either is lost."""

import pytest
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.coordination.single import SingleProcess
from shardckpt.io.job import JobFence
from shardckpt.io.store import Store
from shardckpt.io.url import parse


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
    with run.manager(coordinator=SingleProcess(), keep=1) as old, run.manager(coordinator=SingleProcess()) as new:
        old.save(1, state(1))
        old.wait()
        new.restore()
        new.save(2, state(2))
        new.wait()
        old.save(3, state(3))
        with pytest.raises(errors.OtherJobError):
            old.wait()
        assert new.all_steps() == [1, 2]


def test_of_both_at_one_step_the_first_stays_and_the_older_job_learns_why(run):
    with run.manager(coordinator=SingleProcess()) as old, run.manager(coordinator=SingleProcess()) as new:
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


def test_who_only_reads_takes_nothing_over(run):
    with run.manager(coordinator=SingleProcess()) as writer, run.manager(coordinator=SingleProcess()) as reader:
        writer.save(1, state(1))
        writer.wait()
        assert reader.restore().step == 1
        assert reader.latest_step() == 1
        writer.save(2, state(2))


def test_a_save_that_fails_takes_nothing_over(run):
    with run.manager(coordinator=SingleProcess()) as writer, run.manager(coordinator=SingleProcess()) as careless:
        writer.save(1, state(1))
        writer.wait()
        careless.save(1, state(1))
        with pytest.raises(errors.AlreadyExistsError):
            careless.wait()
        writer.save(2, state(2))


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
