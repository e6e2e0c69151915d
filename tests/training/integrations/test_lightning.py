"""Lightning's Trainer with ShardckptIO: a training that was killed goes on as if nothing had been,
on other processes too.

Real DDP jobs over gloo (`tests/children/integration_lightning.py`).
"""

from __future__ import annotations

import json
import shutil

import pytest

import shardckpt

CHILDREN = "integration_lightning"
EPOCHS, STEPS = 5, 4
"""Of an epoch."""
DIES = 2 * STEPS + 2
"""In the middle of the third epoch."""


@pytest.fixture(scope="module")
def killed(job, tmp_path_factory):
    """The directory of a job of two processes that were killed."""
    directory = tmp_path_factory.mktemp("killed")
    assert job("train", 2, directory, EPOCHS, DIES) == [{"signal": 9}] * 2
    return directory


@pytest.fixture(scope="module")
def uninterrupted(job, tmp_path_factory):
    return job("train", 2, tmp_path_factory.mktemp("uninterrupted"), EPOCHS)


@pytest.mark.slow
def test_a_killed_training_resumes_with_the_losses_of_one_that_was_not(
    job, killed, uninterrupted, tmp_path
):
    there = shutil.copytree(killed, tmp_path / "there")
    resumed = job("train", 2, there, EPOCHS, None, there / "last.ckpt")
    for one, whole in zip(resumed, uninterrupted, strict=True):
        assert one["losses"] == whole["losses"][2 * STEPS :]
        assert (one["best"], one["kept"]) == (whole["best"], whole["kept"])


@pytest.mark.slow
def test_another_number_of_processes_resumes_with_the_same_bits(job, killed, tmp_path):
    path = killed / f"step={2 * STEPS}.ckpt"
    (answer,) = job("train", 1, tmp_path, 3, None, path)
    assert answer["start"] == json.loads((killed / f"saved{2 * STEPS}").read_text())
    assert [step for step, _ in answer["losses"]] == [*range(2 * STEPS, 3 * STEPS)]
    assert shardckpt.open(path).verify().ok


def test_a_training_goes_on_from_an_imported_file_of_lightnings_own(job, tmp_path):
    (tmp_path / "whole").mkdir()
    (whole,) = job("train", 1, tmp_path / "whole", EPOCHS)
    ((before, after),) = job("migrate", 1, tmp_path, 2, EPOCHS)
    assert before + after == whole["losses"]


def test_only_what_lightning_keeps_is_kept(job, tmp_path):
    (answer,) = job("train", 1, tmp_path, EPOCHS)
    there = [path.name for path in tmp_path.glob("*.ckpt")]
    assert sorted(there) == sorted([*answer["kept"], "last.ckpt"])


def test_a_link_to_the_last_checkpoint_is_made_in_a_new_directory(job, tmp_path):
    (answer,) = job("links", 1, tmp_path)
    assert answer == [[True, 1]] * 3
    (there,) = job("is_there_at_once", 1, tmp_path)
    assert there == [True] * 20


def test_a_second_run_gives_its_checkpoints_the_names_of_those_that_were_removed(job, tmp_path):
    (first, second), *_ = job("top", 1, tmp_path)
    assert len(first) == 3
    versions = [name for name in second if "-v" in name]
    assert len(second) == 6
    assert {name.replace("-v1", "") for name in versions} == {*first}  # those alone were in the way


def test_averaged_weights_are_saved_and_resumed(job, tmp_path):
    (whole,) = job("swa", 1, tmp_path, 5, None)
    (resumed,) = job("swa", 1, tmp_path / "resumed", 5, tmp_path / "epoch=2.ckpt")
    assert resumed["losses"] == whole["losses"][3 * STEPS :]
    assert resumed["averaged"] == whole["averaged"]


def test_an_exception_finishes_the_save_in_flight_and_is_not_hidden_by_one_that_fails(
    job, tmp_path
):
    ((saved, failed),) = job("raises", 1, tmp_path)
    assert saved == ["mine"]
    assert shardckpt.open(tmp_path / "saved.ckpt").verify().ok
    assert failed[0] == "mine"
    assert "a checkpoint was not saved" in failed[1]


def test_strategies_that_pass_plugins_by_are_refused_when_a_trainer_is_made(job, tmp_path):
    (answer,) = job("sharded", 1, tmp_path)
    kind, message = answer["refused"]
    assert kind == "OptionError"
    assert "ModelParallelStrategy shards the model" in message


def test_what_would_be_pickled_is_refused_by_name_and_failures_surface_once(job, tmp_path):
    (answer,) = job("refusals", 1, tmp_path)
    expected = {
        "hyperparameter": ("LeafError", "'hyper_parameters/extra'"),
        "ndarray": ("LeafError", "'a'"),
        "storage options": ("OptionError", "ShardckptIO(options="),
        "map_location": ("OptionError", "torch.device"),
        "not there": ("NotFoundError", "odd.ckpt"),
        "in the background": ("StorageError", "inside.ckpt"),
        "removed": ("NotFoundError", "first.ckpt"),
        "exists": ("AlreadyExistsError", "second.ckpt"),
    }
    for case, (kind, words) in expected.items():
        assert answer[case][0] == kind, (case, answer)
        assert words in answer[case][1], (case, answer)
    assert answer["kept when the next one fails"] == [1.0, 1.0, 1.0]
    assert answer["there"] == ["pinned.ckpt", "second.ckpt"]
    assert answer["loaded"] == [[0.0, 0.0, 0.0], "torch.bfloat16", True]
