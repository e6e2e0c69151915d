"""Checkpoints that Megatron-Core 0.16.1 itself wrote (by tools/megatron_fixture.py):
tests/golden/megatron with torch 2.9, and tests/golden/megatron_torch_2_13, which has the plans of
all processes in its metadata, too.
"""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from foreign_contents import contents
from paths import GOLDEN

import shardckpt
from shardckpt import restore
from shardckpt.convert.detect import detect
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.formats.dcp import source as from_dcp
from shardckpt.convert.formats.megatron import source as from_megatron
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import FormatError, OptionError
from shardckpt.io.url import parse

NEWEST = GOLDEN / "megatron_torch_2_13"
GOLDEN = GOLDEN / "megatron"
WRITTEN = GOLDEN / "iter_0000010"


def check(state):
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(
        state["decoder.layers.mlp.linear_fc1.weight"], [weight, weight + 100, weight + 200]
    )
    embedding = state["embedding.word_embeddings.weight"]
    assert embedding.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(embedding.astype(np.float32), np.arange(40).reshape(8, 5))
    np.testing.assert_array_equal(
        state["output_layer.weight"], np.arange(12, dtype=np.float16).reshape(2, 6)
    )
    np.testing.assert_array_equal(
        state["decoder.final_layernorm.weight"], np.arange(5, dtype=np.float32)
    )
    np.testing.assert_array_equal(
        state["optimizer.state.exp_avg.output_layer.weight"], np.arange(12).reshape(2, 6) / 8
    )
    assert set(state["rng_state"]) == {
        "shard_0.0_2.2",
        "shard_0.1_2.2",
        "shard_1.0_2.2",
        "shard_1.1_2.2",
    }
    (rng,) = state["rng_state"]["shard_1.0_2.2"]
    assert rng["random"] == (3, (1, 2))
    np.testing.assert_array_equal(rng["torch"], np.arange(4) + 2)
    assert state["common"] == {
        "iteration": 10,
        "checkpoint_version": 3.0,
        "args": {"hidden_size": 6, "lr": 0.25, "params_dtype": torch.bfloat16, "data_path": None},
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 40},
    }


@pytest.mark.parametrize("written", [WRITTEN, NEWEST], ids=["torch 2.9", "torch 2.13"])
def test_sharded_tensors_objects_and_common_state_are_there(written):
    foreign = from_megatron.open_foreign(parse(written), trust_pickle=True)
    check(contents(foreign))
    pieces = foreign.structure.tensors["decoder.layers.mlp.linear_fc1.weight"].pieces
    assert sorted(piece.start for piece in pieces) == [
        (layer, row, 0) for layer in range(3) for row in (0, 2)
    ]


def test_of_the_directory_of_a_training_the_newest_is_taken(tmp_path):
    assert detect(parse(GOLDEN)).format == "megatron"
    report = import_checkpoint(GOLDEN, tmp_path / "ours", trust_pickle=True)
    assert "latest_checkpointed_iteration.txt says that iter_0000010 is the newest." in report.notes
    check(restore(tmp_path / "ours"))


def test_it_is_told_from_other_directories_of_dcp(tmp_path):
    assert (
        from_megatron.looks_like(Candidate.at(parse(WRITTEN)))
        == "a checkpoint of Megatron-Core, format torch_dist: metadata.json"
    )
    assert from_dcp.looks_like(Candidate.at(parse(WRITTEN))) is None
    (tmp_path / "metadata.json").write_text('{"weights": []}')
    assert from_megatron.looks_like(Candidate.at(parse(tmp_path))) is None


def test_its_metadata_is_a_pickle_as_any_of_dcp():
    with pytest.raises(OptionError, match="trust_pickle=True"):
        from_megatron.open_foreign(parse(WRITTEN))


@pytest.mark.parametrize("backend", ["zarr", "fully_parallel"])
def test_another_backend_is_refused_by_name(tmp_path, backend):
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    with pytest.raises(FormatError, match=f"its backend is '{backend}'; only torch_dist is read"):
        from_megatron.open_foreign(parse(tmp_path), trust_pickle=True)


def test_what_of_the_common_state_only_python_has_is_left_behind(tmp_path):
    copy = shutil.copytree(WRITTEN, tmp_path / "copy")
    common = torch.load(copy / "common.pt", weights_only=False)
    common["args"].model_type = slice(1)
    torch.save(common, copy / "common.pt")
    foreign = from_megatron.open_foreign(parse(copy), trust_pickle=True)
    check(contents(foreign))
    assert "common/args/model_type is left behind: it is a __builtin__.slice." in foreign.notes


def test_a_newest_iteration_that_is_none_is_refused(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    for read in (
        lambda: from_megatron.open_foreign(parse(tmp_path), trust_pickle=True),
        lambda: shardckpt.open(tmp_path),
        lambda: detect(parse(tmp_path)),
    ):
        with pytest.raises(FormatError, match=r"'\.\./\.\./etc' is not an iteration"):
            read()
    assert from_megatron.looks_like(Candidate.at(parse(tmp_path))) is None
