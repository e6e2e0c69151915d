"""Lightning's ModelParallelStrategy with ShardedRun: a killed training resumes with equal losses,
on another mesh too.

Real jobs over gloo (`tests/children/integration_lightning_sharded.py`).
"""

from __future__ import annotations

import shutil

import pytest

import shardckpt

CHILDREN = "integration_lightning_sharded"
EPOCHS, STEPS = 4, 4
"""Of an epoch."""
DIES = 2 * STEPS + 2
"""In the middle of the third epoch."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)], ids=["FSDP2", "tensor parallelism"])
def test_a_killed_training_resumes_with_equal_losses_and_on_one_process(
    job, tmp_path, data, tensor
):
    whole = job("train", 2, tmp_path / "whole", data, tensor, EPOCHS)
    assert job("train", 2, tmp_path / "killed", data, tensor, EPOCHS, DIES) == [{"signal": 9}] * 2
    assert shardckpt.CheckpointManager(tmp_path / "killed").all_steps() == [STEPS, 2 * STEPS]
    shutil.copytree(tmp_path / "killed", tmp_path / "one")
    resumed = job("train", 2, tmp_path / "killed", data, tensor, EPOCHS)
    for before, after in zip(whole, resumed, strict=True):
        assert [step for step, _ in after["losses"]] == [*range(2 * STEPS, EPOCHS * STEPS)]
        assert after["losses"] == before["losses"][2 * STEPS :]
        assert after["mesh"] == before["mesh"]
    (alone,) = job("train", 1, tmp_path / "one", 1, 1, EPOCHS)
    average = [
        sum(loss for _, loss in losses) / 2
        for losses in zip(*(one["losses"] for one in whole), strict=True)
    ]
    assert [loss for _, loss in alone["losses"]] == pytest.approx(average[2 * STEPS :], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "by_signal"), [(1, True), (2, True), (2, False)])
def test_a_notice_to_one_process_ends_training_on_all_after_a_save(job, tmp_path, ranks, by_signal):
    answers = job("preempted", ranks, tmp_path, 50, by_signal)
    (step,) = shardckpt.CheckpointManager(tmp_path).all_steps()
    assert [len(answer["losses"]) for answer in answers] == [step] * ranks


def test_another_strategy_is_refused(job, tmp_path):
    (answer,) = job("train", 1, tmp_path, 1, 1, 1, None, "auto")
    assert answer == {
        "refused": [
            "OptionError",
            (
                "ShardedRun: the strategy is SingleDeviceStrategy; take ModelParallelStrategy, or "
                "ShardckptIO."
            ),
        ]
    }
