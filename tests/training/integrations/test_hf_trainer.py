"""Hugging Face's Trainer with ShardckptCallback: a training that was killed goes on as if nothing
had been, on other processes too.

Real DDP jobs over gloo (`tests/children/integration_hf_trainer.py`). There is dropout, so that the
random number generators count, and tied weights; epochs are of five steps, so that one save is in
the middle of one.
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "dies"),
    [
        pytest.param(1, 11, id="1 process, after an epoch"),
        pytest.param(2, DIES, id="2 processes, within an epoch"),
        pytest.param(1, DIES, id="1 process, within an epoch", marks=pytest.mark.slow),
        pytest.param(2, 11, id="2 processes, after an epoch", marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_resumes_as_if_nothing_had_been(
    job, uninterrupted, tmp_path, ranks, dies
):
    assert job("train", ranks, tmp_path, STEPS, dies) == [{"signal": 9}] * ranks
    for one, whole in zip(job("train", ranks, tmp_path, STEPS), uninterrupted[ranks], strict=True):
        assert one["losses"] == whole["losses"]
        assert one["final"] == whole["final"]
        assert one["rng"] == whole["rng"]
        assert one["start"][0] == dies // 3 * 3


def test_a_training_goes_on_from_a_checkpoint_of_the_trainers_own(job, tmp_path):
    (answer,) = job("migrate", 1, tmp_path, SAVED, STEPS)
    assert answer["start"] == SAVED
    assert answer["final"][0] == answer["weights"]
    assert shardckpt.CheckpointManager(tmp_path / "run").all_steps() == [9, 12]


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("ours", "ours", id="own"),
        ("stock", "ours"),
        pytest.param("ours", "stock", id="exported"),
    ],
)
def test_all_that_the_trainers_own_checkpoints_keep_goes_on(job, stock, tmp_path, first, second):
    """Patience of early stopping, a callback's own count, the gradient scaler, FLOs, tokens,
    optimizer, generators and losses."""
    assert job("continued", 1, tmp_path, first, second, SAVED, STEPS) == stock


@pytest.fixture(scope="module")
def stock(job, tmp_path_factory):
    answers = job("continued", 1, tmp_path_factory.mktemp("stock"), "stock", "stock", SAVED, STEPS)
    assert answers[0]["state"][0] == 9, (
        "the patience ends the training early, or this shows nothing"
    )
    assert answers[0]["counting"] == ["one", 9]
    assert answers[0]["scaler"]["_growth_tracker"] > 0
    return answers


def test_configuration_tokenizer_and_arguments_are_stored_for_inference(job, tmp_path):
    (answer,) = job("for_inference", 1, tmp_path)
    assert answer == {"same": True, "tokens": [1, 2], "learning_rate": 1e-2}


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


@pytest.mark.long
def test_a_notice_to_one_process_ends_training_on_all_after_a_save(job, tmp_path):
    before = job("preempted", 2, tmp_path, 200)
    (step,) = shardckpt.CheckpointManager(tmp_path / "run").all_steps()
    assert [answer["stopped"] for answer in before] == [step + 1] * 2
    for notice in tmp_path.glob("notice*"):
        notice.unlink()
    assert (
        job("preempted", 2, tmp_path, step + 4) == [{"stopped": step + 4, "own loading": True}] * 2
    )


def test_the_weights_alone_are_found_for_inference(job, tmp_path):
    (trained,) = job("train", 1, tmp_path, 3)
    (answer,) = job("weights", 1, tmp_path, 3)
    assert answer["model"] == trained["final"][0]


@pytest.mark.parametrize(("ranks", "resumes_at"), [(1, None), (1, 4), (2, None)])
def test_training_ends_with_the_best_weights_that_were_saved(job, tmp_path, ranks, resumes_at):
    arguments = {
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "save_steps": 2,
        "save_total_limit": 1,
    }
    answers = job("best", ranks, tmp_path, 8, resumes_at, arguments)
    for one in answers:
        saved = {step: loss for step, loss in one["losses"].items() if int(step) % 2 == 0}
        best = max(saved, key=saved.get)
        assert best != "8", "the last step must not be the best, or this shows nothing"
        assert one["final"] == one["weights"][best]
        assert one["best"][1] == str(tmp_path / "run" / best)
    assert shardckpt.CheckpointManager(tmp_path / "run").all_steps() == [int(best), 8]
    assert not list(Path(tmp_path, "trainer").glob("checkpoint-*"))


def test_the_strategy_best_saves_where_the_metric_improves_and_the_trainer_writes_nothing(
    job, tmp_path
):
    arguments = {"save_strategy": "best", "save_total_limit": None, "load_best_model_at_end": True}
    (answer,) = job("best", 1, tmp_path, 8, None, arguments)
    improved, least = [], float("inf")
    for step, loss in answer["losses"].items():
        if loss < least:
            least = loss
            improved.append(int(step))
    assert shardckpt.CheckpointManager(tmp_path / "run").all_steps() == improved
    assert not list(Path(tmp_path, "trainer").glob("checkpoint-*"))
    assert answer["best"] == [improved[-1], str(tmp_path / "run" / str(improved[-1]))]
    assert answer["final"] == answer["weights"][str(improved[-1])]
    assert answer["strategy"] == "best"


@pytest.mark.parametrize("resumes", [True, False])
def test_an_exception_closes_the_manager_and_training_goes_on_from_the_last_save(
    job, tmp_path, resumes
):
    (answer,) = job("raises", 1, tmp_path, resumes)
    assert answer == {"raised": "mine", "handler is back": True, "ends at": 6, "left": []}
    assert shardckpt.CheckpointManager(tmp_path / "run").all_steps() == [3, 6]


def test_refusals_have_their_types_and_say_what_is_wrong(job, tmp_path):
    (answer,) = job("refusals", 1, tmp_path)
    expected = {
        "another's": ("OptionError", "callbacks=[callback]"),
        "not passed on": ("OptionError", "resume_from_checkpoint="),
        "damaged": ("FormatError", f"delete it (`shardckpt rm {tmp_path}/run/3`) to go on"),
        "fallback": ("OptionError", "`shardckpt rm`"),
    }
    for case, (kind, words) in expected.items():
        assert answer[case][0] == kind, (case, answer)
        assert words in answer[case][1], (case, answer)
