"""Lightning's Trainer with ShardckptIO: a training that was killed goes on as if nothing had been, on other processes too.

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


def test_a_killed_training_resumes_with_the_losses_of_one_that_was_not(job, killed, uninterrupted, tmp_path):
    there = shutil.copytree(killed, tmp_path / "there")
    resumed = job("train", 2, there, EPOCHS, None, there / "last.ckpt")
    for one, whole in zip(resumed, uninterrupted, strict=True):
        assert one["losses"] == whole["losses"][2 * STEPS :]
        assert (one["best"], one["kept"]) == (whole["best"], whole["kept"])


def test_another_number_of_processes_resumes_with_the_same_bits(job, killed, tmp_path):
    path = killed / f"step={2 * STEPS}.ckpt"
    (found,) = job("train", 1, tmp_path, 3, None, path)
    assert found["start"] == json.loads((killed / f"saved{2 * STEPS}").read_text())
    assert [step for step, _ in found["losses"]] == [*range(2 * STEPS, 3 * STEPS)]
    assert shardckpt.open(path).verify().ok


def test_only_what_lightning_keeps_is_kept(job, tmp_path):
    (found,) = job("train", 1, tmp_path, EPOCHS)
    there = [path.name for path in tmp_path.glob("*.ckpt") if _committed(path)]
    assert sorted(there) == sorted([*found["kept"], "last.ckpt"])


def test_what_would_be_pickled_is_refused_by_name_and_failures_surface_once(job, tmp_path):
    (found,) = job("refusals", 1, tmp_path)
    expected = {
        "hyperparameter": ("LeafError", "'hyper_parameters/extra'"),
        "ndarray": ("LeafError", "'a'"),
        "storage options": ("OptionError", "ShardckptIO(options="),
        "map_location": ("OptionError", "torch.device"),
        "not there": ("NotFoundError", "odd.ckpt"),
        "in the background": ("StorageError", "inside.ckpt"),
        "removed": ("NotFoundError", "removed by Lightning"),
        "exists": ("AlreadyExistsError", "second.ckpt"),
    }
    for case, (kind, words) in expected.items():
        assert found[case][0] == kind, (case, found)
        assert words in found[case][1], (case, found)
    assert found["kept when the next one fails"] == [1.0, 1.0, 1.0]
    assert found["loaded"] == [[0.0, 0.0, 0.0], "torch.bfloat16", True]


def _committed(path):
    try:
        shardckpt.open(path)
    except shardckpt.errors.NotFoundError:
        return False
    return True
