"""Reshards by workers that others have started: `commit` and the destination decide the outcome."""

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shardckpt
from shardckpt import CheckpointManager, Mesh, PartitionSpec, SaveOptions, errors

OVER = {"mesh": Mesh((2,), ("m",)), "rules": {"w": PartitionSpec("m")}}


def test_of_two_complete_reshards_none_is_committed_and_the_same_call_alone_commits_its_own(
    tmp_path,
):
    w = np.arange(4096, dtype=np.float32).reshape(64, 64)
    shardckpt.save(tmp_path / "a", {"w": w})
    for dtype in ("float16", "bfloat16"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b", dtype=dtype, worker=(0, 1), **OVER)
    outcomes = shardckpt.commit(tmp_path / "b")
    assert [outcome.state for outcome in outcomes] == ["refused", "refused"]
    assert "different options" in outcomes[0].reason

    again = shardckpt.reshard(tmp_path / "a", tmp_path / "b", dtype="bfloat16", **OVER)

    assert again.done_before == again.tasks
    assert shardckpt.open(tmp_path / "b").info("w").dtype.name == "bfloat16"


def save_going_back(root, *parts):
    """Save steps; each part begins with a restore of the step that it goes back to, or of none."""

    def state(step):
        return {"w": np.full((64, 64), step, float)}

    for start, steps in parts:
        with CheckpointManager(root, every=1) as manager:
            if start is not None:
                manager.restore(state(0), step=start)
            for step in steps:
                manager.save(step, state(step))
                manager.wait()


def test_committing_a_reshard_of_a_run_s_step_supersedes_none_of_its_steps(tmp_path):
    save_going_back(tmp_path, (None, (1, 2)), (1, (3,)), (2, (4,)))
    with CheckpointManager(tmp_path, every=1) as manager:
        before = manager.all_steps()
    assert 2 in before
    assert "rollback" in shardckpt.open(tmp_path / "3").metadata
    shardckpt.reshard(tmp_path / "3", tmp_path / "3-laid-out", worker=(0, 1), **OVER)

    (outcome,) = shardckpt.commit(tmp_path / "3-laid-out")

    assert outcome.state == "committed"
    with CheckpointManager(tmp_path, every=1) as manager:
        assert manager.all_steps() == before


@pytest.mark.parametrize("by", ["the call", "a commit"])
def test_a_superseded_step_that_is_resharded_in_place_stays_superseded(tmp_path, by):
    save_going_back(tmp_path, (None, (1, 2, 3)), (1, (2,)))
    with CheckpointManager(tmp_path, every=1) as manager:
        assert manager.all_steps() == [1, 2]
        place = tmp_path / "3"
        if by == "the call":
            shardckpt.reshard(place, place, overwrite=True, **OVER)
        else:
            shardckpt.reshard(place, place, overwrite=True, worker=(0, 1), **OVER)
            assert [one.state for one in shardckpt.commit(place)] == ["committed"]
        assert manager.all_steps() == [1, 2]
        assert manager.all_steps(superseded=True) == [1, 2, 3]


KILLED = """
import os, signal, sys, shardckpt
rename = os.rename
def killed(source, target, **options):
    if os.path.basename(target) == "checkpoint.json":
        if sys.argv[2] == "after":
            rename(source, target, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **options)
os.rename = killed
shardckpt.commit(sys.argv[1])
"""
"""Commit, and die at the rename that publishes."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_superseded_step_stays_so_when_a_commit_of_its_reshard_is_killed(tmp_path, when):
    save_going_back(tmp_path, (None, (1, 2, 3)), (1, (2,)))
    place = tmp_path / "3"
    before = shardckpt.open(place).record.attempt
    shardckpt.reshard(place, place, overwrite=True, worker=(0, 1), **OVER)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(place), when])
    assert killed.returncode == -signal.SIGKILL
    assert (shardckpt.open(place).record.attempt == before) == (when == "before")
    for _ in range(2):
        with CheckpointManager(tmp_path, every=1) as manager:
            assert manager.latest_step() == 2
            assert manager.all_steps(superseded=True) == [1, 2, 3]
        shardckpt.commit(place)


def test_a_base_is_not_replaced_by_a_reshard_of_what_has_left_tensors_in_it(tmp_path):
    big = np.ones((256, 256))
    shardckpt.save(tmp_path / "base", {"w": big, "x": np.zeros(3)})
    tuned = SaveOptions(skip="w", base=str(tmp_path / "base"))
    shardckpt.save(tmp_path / "tuned", {"w": big, "x": np.ones(3)}, options=tuned)
    with pytest.raises(errors.OptionError, match="is the base of"):
        shardckpt.reshard(tmp_path / "tuned", tmp_path / "base", overwrite=True)
    assert np.array_equal(shardckpt.restore(tmp_path / "tuned")["w"], big)


def test_a_worker_that_lives_on_remembers_nothing_of_a_destination_that_was_removed_since(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": np.arange(4096.0).reshape(64, 64)})
    with ThreadPoolExecutor(1) as engine:
        for _ in range(2):
            shardckpt.reshard(tmp_path / "a", tmp_path / "b", engine=engine, **OVER)
            assert shardckpt.open(tmp_path / "b").verify().ok
            shutil.rmtree(tmp_path / "b")
