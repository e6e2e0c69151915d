"""torchtitan 0.3.0's Trainer with TorchtitanCheckpointer, on CPUs, in an environment of its own,
which `make torchtitan` makes.

The model is torchtitan's Llama 3 "debugmodel" with its ScaledDotProductAttention, because
FlexAttention has no backward pass on CPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
from paths import CHILDREN
from placeholders import undo_commit

import shardckpt

pytestmark = [
    pytest.mark.torchtitan,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        find_spec("torchtitan") is None,
        reason="torchtitan has an environment of its own: run `make torchtitan`",
    ),
]
STEPS, SAVED, DIES = 9, 6, 7


def job(directory, shard, tensor, dies_at=0, **environment):
    """Run the training in processes as torchrun starts them; their answers, or None if they are to
    be killed."""
    directory.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = shard * tensor
    command = [
        sys.executable,
        CHILDREN / "integration_torchtitan.py",
        directory,
        shard,
        tensor,
        STEPS,
        dies_at,
    ]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": world,
        "USE_TORCH_XLA": "0",
        **environment,
    }
    processes = []
    for rank in range(world):
        variables = {
            key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()
        }
        with (directory / f"log{rank}").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [str(one) for one in command], env=variables, stdout=log, stderr=log
                )
            )
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((directory / f"log{rank}").read_text()[-3000:] for rank in range(world))
    if dies_at:
        assert set(codes) == {-9}, logs
        return None
    assert not any(codes), logs
    return [json.loads((directory / f"answer{rank}").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run a training of so many data ranks twice: to the end, and killed after step 7; the folder
    and the answers, kept for other tests."""
    made = {}

    def train(shard):
        if shard not in made:
            folder = tmp_path_factory.mktemp(f"by{shard}")
            answers = job(folder / "whole", shard, 1)
            job(folder / "killed", shard, 1, DIES)
            made[shard] = folder, answers
        return made[shard]

    return train


def resume(folder, directory, shard, tensor):
    """Resume a copy of the killed run; its answers."""
    shutil.copytree(folder / "killed", directory)
    answers = job(directory, shard, tensor, SEED="2")
    assert shardckpt.CheckpointManager(directory / "checkpoint").all_steps() == [SAVED, STEPS]
    return answers


@pytest.mark.parametrize("shard", [1, 2])
def test_a_killed_training_goes_on_with_the_same_losses_and_bits(trained, tmp_path, shard):
    folder, whole = trained(shard)
    for rank, resumed in enumerate(resume(folder, tmp_path / "resumed", shard, 1)):
        assert (resumed["loaded"], resumed["first"]) == (True, SAVED)
        assert resumed["losses"] == {
            step: of for step, of in whole[rank]["losses"].items() if int(step) > SAVED
        }
        assert resumed["digests"] == {
            step: of for step, of in whole[rank]["digests"].items() if int(step) >= SAVED
        }


def test_a_killed_training_of_two_goes_on_in_four_processes_with_tensor_parallelism(
    trained, tmp_path
):
    """The resumed step has the same bits; then tensor parallelism sums in another order."""
    folder, whole = trained(2)
    for resumed in resume(folder, tmp_path / "resumed", 2, 2):
        assert (resumed["loaded"], resumed["first"]) == (True, SAVED)
        assert resumed["digests"][str(SAVED)] == whole[0]["digests"][str(SAVED)]
        for step in map(str, range(SAVED + 1, STEPS + 1)):
            average, largest, norm, rest = whole[0]["losses"][step]
            near = partial(pytest.approx, rel=1e-6)
            assert resumed["losses"][step] == [
                near(average),
                near(largest),
                pytest.approx(norm, rel=1e-4),
                rest,
            ]


def test_a_complete_step_that_the_killed_training_has_not_published_is_resumed(trained, tmp_path):
    folder, whole = trained(1)
    shutil.copytree(folder / "killed", tmp_path / "killed")
    undo_commit(tmp_path / "killed" / "checkpoint" / str(SAVED))
    (resumed,) = resume(tmp_path, tmp_path / "resumed", 1, 1)
    assert (resumed["loaded"], resumed["first"]) == (True, SAVED)
    assert resumed["digests"][str(SAVED)] == whole[0]["digests"][str(SAVED)]


def test_an_export_by_the_mapping_has_what_torchtitans_own_adapter_makes(trained, tmp_path):
    from safetensors.torch import load_file

    folder, _ = trained(1)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 256})
    )
    options = {
        "mapping": "hf-llama-torchtitan",
        "invert_mapping": True,
        "config": config,
        "include": "model/**",
        "strip_prefix": "model.",
    }
    shardckpt.export_safetensors(
        folder / "whole" / "checkpoint" / str(STEPS), tmp_path / "hf.safetensors", **options
    )
    ours, theirs = (
        load_file(tmp_path / "hf.safetensors"),
        load_file(folder / "whole" / "adapter.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("option", ["last_save_in_hf", "initial_load_in_hf"])
def test_hugging_faces_format_is_refused_by_the_options_name(option):
    from shardckpt.errors import OptionError
    from shardckpt.training.integrations.torchtitan import TorchtitanCheckpointer

    config = TorchtitanCheckpointer.Config(enable=True, **{option: True})
    with pytest.raises(OptionError, match=f"checkpoint.{option}"):
        config.build(
            dataloader=None,
            model_parts=[],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
        )
