"""Hugging Face's Trainer with ShardckptCallback: a training that was killed goes on as if nothing had been, on other processes too.

Real DDP jobs over gloo (`tests/children/integration_hf_trainer.py`). There is dropout, so that the random number generators
count, and tied weights; epochs are of five steps, so that one save is in the middle of one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardckpt

CHILDREN = "integration_hf_trainer"
STEPS, SAVED, DIES = 12, 6, 8
"""The last step, the last one that is saved before the end, and where that is."""
LIMIT = 2
"""Steps that are kept, by the Trainer's own argument."""


@pytest.fixture(scope="module")
def uninterrupted(job, tmp_path_factory):
    return {ranks: job("train", ranks, tmp_path_factory.mktemp("whole"), STEPS) for ranks in (1, 2)}


@pytest.mark.parametrize(
    ("ranks", "dies"),
    [
        pytest.param(1, 11, id="1 process, after an epoch"),
        pytest.param(2, DIES, id="2 processes, within an epoch"),
        pytest.param(1, DIES, id="1 process, within an epoch", marks=pytest.mark.slow),
        pytest.param(2, 11, id="2 processes, after an epoch", marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_resumes_as_if_nothing_had_been(job, uninterrupted, tmp_path, ranks, dies):
    assert job("train", ranks, tmp_path, STEPS, dies) == [{"signal": 9}] * ranks
    for one, whole in zip(job("train", ranks, tmp_path, STEPS), uninterrupted[ranks], strict=True):
        assert one["losses"] == whole["losses"]
        assert one["final"] == whole["final"]
        assert one["rng"] == whole["rng"]
        assert one["start"][0] == dies // 3 * 3


@pytest.mark.parametrize(("saving", "resuming"), [(2, 1), (1, 2)])
def test_another_number_of_processes_resumes_with_the_same_bits(job, tmp_path, saving, resuming):
    assert job("train", saving, tmp_path, STEPS, DIES) == [{"signal": 9}] * saving
    before = json.loads(Path(tmp_path, "trainer", f"at{SAVED}").read_text())
    for one in job("train", resuming, tmp_path, STEPS):
        assert one["start"] == [SAVED, before]
        assert list(one["losses"]) == [str(step) for step in range(1, STEPS + 1)]


def test_the_trainer_writes_no_checkpoint_of_its_own_and_keeps_as_many_as_it_says(job, tmp_path):
    job("keep", 1, tmp_path, STEPS)
    assert not list(Path(tmp_path, "trainer").glob("checkpoint-*"))
    manager = shardckpt.CheckpointManager(tmp_path / "run")
    assert manager.all_steps() == [9, 12]
    assert set(manager.steps()[-1].metrics) >= {"eval_loss"}
    assert shardckpt.open(tmp_path / "run" / "12").verify().ok


def test_a_notice_to_one_process_ends_training_on_all_after_a_save(job, tmp_path):
    before = job("preempted", 2, tmp_path, 200)
    (step,) = shardckpt.CheckpointManager(tmp_path / "run").all_steps()
    assert [found["stopped"] for found in before] == [step + 1] * 2
    for notice in tmp_path.glob("notice*"):
        notice.unlink()
    assert job("preempted", 2, tmp_path, step + 4) == [{"stopped": step + 4, "own loading": True}] * 2


def test_the_weights_alone_are_found_for_inference(job, tmp_path):
    (trained,) = job("train", 1, tmp_path, 3)
    (found,) = job("weights", 1, tmp_path, 3)
    assert found["model"] == trained["final"][0]


def test_what_cannot_be_is_said(job, tmp_path):
    (found,) = job("refusals", 1, tmp_path)
    expected = {
        "another's": ("OptionError", "callbacks=[callback]"),
        "not passed on": ("OptionError", "resume_from_checkpoint="),
        "best": ("OptionError", "load_best_model_at_end"),
        "damaged": ("FormatError", "digest"),
    }
    for case, (kind, words) in expected.items():
        assert found[case][0] == kind, (case, found)
        assert words in found[case][1], (case, found)
