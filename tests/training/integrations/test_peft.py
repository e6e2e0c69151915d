"""PEFT 0.21.2 with ShardckptCallback in transformers' Trainer: adapters alone are saved, a killed
training goes on, PEFT loads the export.

Real jobs (`tests/children/integration_peft.py`): alone, under DDP over gloo, and under accelerate's
FSDP2. Adapters begin with random weights of another seed in the training that resumes, and have
dropout. QLoRA is bitsandbytes' NF4 with double quantization, on the CPU.
"""

from __future__ import annotations

import pytest

import shardckpt

CHILDREN = "integration_peft"
STEPS, SAVED, DIES = 9, 6, 8
"""The last step, the last one that is saved before the end, and where that is."""


def train(
    job, directory, ranks, form, *, sharding=False, dies_at=None, seed=1, wholly=False, steps=STEPS
):
    return job("train", ranks, directory, steps, form, sharding, dies_at, seed, wholly)


def names_in_model(directory, step):
    return {
        name
        for name in shardckpt.open(directory / "run" / str(step)).names()
        if name.startswith("model/")
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "ranks", "sharding"),
    [
        pytest.param("LoRA", 2, True, id="LoRA, FSDP2"),
        pytest.param("QLoRA", 1, False, id="QLoRA", marks=pytest.mark.slow),
        pytest.param("LoRA", 2, False, id="LoRA, DDP", marks=pytest.mark.slow),
        pytest.param("QLoRA", 2, False, id="QLoRA, DDP", marks=pytest.mark.slow),
        pytest.param("QLoRA", 2, True, id="QLoRA, FSDP2", marks=pytest.mark.slow),
        pytest.param(None, 2, True, id="all weights, FSDP2", marks=pytest.mark.slow),
        pytest.param("all of LoRA", 1, False, id="DoRA, tokens and a norm", marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_resumes_with_the_same_losses(job, tmp_path, form, ranks, sharding):
    whole = train(job, tmp_path / "whole", ranks, form, sharding=sharding)
    assert (
        train(job, tmp_path, ranks, form, sharding=sharding, dies_at=DIES)
        == [{"signal": 9}] * ranks
    )
    for again, once in zip(
        train(job, tmp_path, ranks, form, sharding=sharding, seed=2), whole, strict=True
    ):
        assert min(map(int, again["begins"])) == SAVED
        assert again["sharded"] == sharding
        assert again["losses"] == once["losses"]
        assert again["final"] == once["final"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        pytest.param("LoRA", (2, True), (1, False), id="LoRA, FSDP2 to one"),
        pytest.param(None, (1, False), (2, True), id="all weights, one to FSDP2"),
        pytest.param(
            None, (2, True), (2, False), id="all weights, FSDP2 to DDP", marks=pytest.mark.slow
        ),
        pytest.param(
            "LoRA", (1, False), (2, True), id="LoRA, one to FSDP2", marks=pytest.mark.slow
        ),
        pytest.param(
            "LoRA", (2, False), (2, True), id="LoRA, DDP to FSDP2", marks=pytest.mark.slow
        ),
    ],
)
def test_another_mesh_resumes_with_the_same_bits(job, tmp_path, form, first, second):
    assert (
        train(job, tmp_path, first[0], form, sharding=first[1], dies_at=DIES)
        == [{"signal": 9}] * first[0]
    )
    before = train(job, tmp_path / "whole", first[0], form, sharding=first[1])[0]["begins"][
        str(SAVED)
    ]
    for one in train(job, tmp_path, second[0], form, sharding=second[1], seed=2):
        assert one["begins"][str(SAVED)] == before
        assert list(one["losses"]) == [str(step) for step in range(1, STEPS + 1)]


def test_the_trained_parameters_are_saved_and_the_base_model_is_not(job, tmp_path):
    (answer,) = train(job, tmp_path, 1, "LoRA")
    stored = shardckpt.open(tmp_path / "run" / str(STEPS))
    assert all(".lora_" in name for name in names_in_model(tmp_path, STEPS))
    assert (
        sum(
            stored.info(name).nbytes
            for name in stored.names()
            if name.startswith(("model/", "optimizer/"))
        )
        == answer["bytes"]
    )
    assert {"config.json", "peft"} <= stored.metadata.keys()


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [pytest.param("LoRA", marks=pytest.mark.slow), "QLoRA", "all of LoRA"]
)
def test_peft_loads_what_is_exported(job, tmp_path, form):
    train(job, tmp_path, 1, form, steps=3)
    assert job("exported", 1, tmp_path, 3, form) == [
        {"same weights": True, "same configuration": True, "same outputs": True}
    ]


def test_another_base_model_is_refused(job, tmp_path):
    train(job, tmp_path, 1, "LoRA", steps=3)
    ((kind, message),) = job("refused", 1, tmp_path, 3)
    assert kind == "MismatchError"
    assert "layers.1.mlp.up_proj.weight differ" in message


@pytest.mark.long
def test_a_training_whose_base_model_was_saved_too_goes_on_and_saves_it_no_more(job, tmp_path):
    whole = train(job, tmp_path / "whole", 1, "LoRA")
    train(job, tmp_path, 1, "LoRA", wholly=True, dies_at=DIES)
    assert any("up_proj" in name for name in names_in_model(tmp_path, SAVED))
    assert train(job, tmp_path, 1, "LoRA", seed=2)[0]["losses"] == whole[0]["losses"]
    assert not any("up_proj" in name for name in names_in_model(tmp_path, STEPS))


def test_an_export_without_adapters_is_refused(tmp_path):
    shardckpt.save(tmp_path / "c", {"model": {"w": 1}})
    with pytest.raises(shardckpt.ShardckptError, match="no adapter of PEFT"):
        shardckpt.export(tmp_path / "c", tmp_path / "out", to="peft")
