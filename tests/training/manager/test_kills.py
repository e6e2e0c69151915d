"""Processes of a training are killed; nothing that was committed is lost, and the next run goes on
from it and cleans up."""

import random
import shutil

import numpy as np
import pytest
from processes import Processes

import shardckpt
from shardckpt import errors


@pytest.fixture(scope="module")
def job():
    with Processes("manager_jobs") as processes:
        yield processes


def listed(root):
    return shardckpt.CheckpointManager(root).all_steps()


@pytest.mark.long
def test_a_manager_that_is_killed_anywhere_loses_nothing_and_the_next_one_cleans_up(job, tmp_path):
    base = tmp_path / "base"
    job.run("train", 1, base, [1], 5)
    shardckpt.CheckpointManager(base).pin(2)
    left = job.run("clean_until_killed", 1, shutil.copytree(base, tmp_path / "whole"), 10_000)
    operations = 10_000 - left[0]
    assert listed(tmp_path / "whole") == [2, 5]
    for k in range(0, operations, max(1, operations // 14)):
        root = shutil.copytree(base, tmp_path / str(k))
        assert job.run("clean_until_killed", 1, root, k) == [{"signal": 9}]
        steps = listed(root)
        assert 2 in steps
        assert steps[-1] in (4, 5)
        assert all(shardckpt.open(root / str(step)).verify().ok for step in steps)
        (answer,) = job.run(
            "train", 1, root, [1], 1, None, None, None, {"keep": 1, "commit_timeout": 1e-3}
        )
        assert answer["from"] in (steps[-1], 5)  # what lacked nothing but its commit was committed
        assert answer["saved"] == [answer["from"] + 1]
        assert listed(root) == [2, answer["ended"]]
        for step in set(range(6)) - {2, answer["ended"]}:
            assert {path.name for path in (root / str(step)).glob("*")} <= {"checkpoint.json"}
        shutil.rmtree(root)


def latest_after_a_rollback(root, step):
    """The latest step, which is never one that the rollback to 2 has left behind once its first
    save is published."""
    try:
        saved_again = "again" in shardckpt.restore(root / str(step))
    except errors.NotFoundError:
        saved_again = False
    latest = shardckpt.CheckpointManager(root).latest_step()
    assert latest == step if saved_again else latest in (2, 4)
    return latest


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_a_rollback_whose_first_save_somebody_else_commits_is_a_rollback_all_the_same(
    job, tmp_path, step
):
    """A run with steps 0 to 4 goes back to 2 and dies anywhere in its first save; then who commits
    what it left dies anywhere."""
    base = tmp_path / "base"
    job.run("train", 1, base, [1], 5)
    (left,) = job.run(
        "roll_back_until_killed", 1, shutil.copytree(base, tmp_path / "whole"), 2, step, 10_000
    )
    assert latest_after_a_rollback(tmp_path / "whole", step) == step
    ends = set()
    operations = 10_000 - left
    for k in (*range(0, operations - 11, 15), *range(operations - 11, operations)):
        root = shutil.copytree(base, tmp_path / str(k))
        assert job.run("roll_back_until_killed", 1, root, 2, step, k) == [{"signal": 9}]
        latest_after_a_rollback(root, step)
        job.run("commit_until_killed", 1, root, k % 8)
        latest_after_a_rollback(root, step)
        shardckpt.commit(root)
        ends.add(latest_after_a_rollback(root, step))
        assert {1, 2, 3, 4} <= {*shardckpt.CheckpointManager(root).all_steps(superseded=True)}
        shutil.rmtree(root)
    # Not saved at all, or saved again; never the step that the run went back to.
    assert ends == {4, step}


@pytest.mark.long
def test_it_is_too_where_the_other_processes_of_the_job_live_on(job, tmp_path):
    job.run("train", 2, tmp_path, [1], 5)
    killed, other = job.run("roll_back_until_killed", 2, tmp_path, 2, 7, 10_000)
    assert (killed, other["error"]) == ({"signal": 9}, "CommitError")
    assert listed(tmp_path) == [1, 2, 3, 4]
    # By itself: the run's root is the directory above.
    (outcome,) = shardckpt.commit(tmp_path / "7")
    assert outcome.state == "committed"
    assert latest_after_a_rollback(tmp_path, 7) == 7
    assert listed(tmp_path) == [1, 2, 7]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_trainings_that_lose_a_process_anywhere_go_on_from_what_was_committed_last(
    job, tmp_path, seed
):
    """Each time on another number of processes, by another policy; the victim and its last
    operation are drawn."""
    draw = random.Random(seed)
    latest, kills = -1, 0
    for _ in range(5):
        processes = draw.choice([1, 2, 3])
        every = draw.choice([[1], [2], [1, "preemption"], ["continuous"]])
        victim, k = draw.randrange(processes), draw.randrange(120)
        answers = job.run(
            "train_and_die", processes, tmp_path, every, draw.randrange(3, 8), victim, k
        )
        kills += sum("signal" in answer for answer in answers)
        assert all(
            process == victim for process, answer in enumerate(answers) if "signal" in answer
        )
        assert {answer["error"] for answer in answers if "error" in answer} <= {
            "CommitError",
            "CoordinationError",
        }
        assert len({answer["from"] for answer in answers if "from" in answer}) <= 1
        steps = listed(tmp_path)
        assert max(steps, default=-1) >= latest
        latest = max(steps, default=-1)
        for step in steps:
            restored = shardckpt.restore(tmp_path / str(step))
            np.testing.assert_array_equal(restored["w"], np.full(40_000, step, np.float32))
            assert {own[1] for own in restored["own"]} == {step}
    assert kills
