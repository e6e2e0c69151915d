"""Outputs for a model of transformers equal the files of its own `save_pretrained`: names, dtypes,
bytes, files."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import forks
import ml_dtypes
import numpy as np
import pytest
from arrays import Arrays, made, records
from paths import ROOT

import shardckpt
from shardckpt.convert.formats.safetensors.hf_index import split
from shardckpt.convert.naming.apply import Outputs, outputs_of
from shardckpt.convert.naming.choose import read_naming
from shardckpt.convert.options import NameOptions

if TYPE_CHECKING:
    from pathlib import Path

# Transformers imports half of torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Folders of small models, and what their maker says of them."""
    folder = tmp_path_factory.mktemp("models")
    environment = {**os.environ, "USE_TORCH_XLA": "0", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, ROOT / "tests" / "children" / "convert_hf.py", folder]
    done = forks.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def planned(folder: Path, **options: object) -> tuple[Outputs, Arrays]:
    """Outputs of a model's checkpoint by some options, and the arrays that they are."""
    checkpoint = shardckpt.open(folder / "state")
    arrays = {name: checkpoint.read(name) for name in checkpoint.names()}
    plan = outputs_of(
        checkpoint.record.structure,
        NameOptions(strip_prefix="model/", config=folder / "saved", **options),
        "",
    )  # type: ignore[arg-type]
    return plan, made(plan.tensors, arrays)


def saved(folder: Path) -> Arrays:
    """Arrays that `save_pretrained` wrote; the layout of such a file is a header of JSON, and the
    elements."""
    arrays = {}
    for file in (folder / "saved").glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                a, b = entry["data_offsets"]
                dtype = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}[
                    entry["dtype"]
                ]
                arrays[name] = np.frombuffer(data[start + a : start + b], dtype).reshape(
                    entry["shape"]
                )
    return arrays


def assert_same(ours: Arrays, theirs: Arrays) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape, ours[name].tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        ), name


@pytest.mark.parametrize(
    "name", ["llama-tied", "gpt2", "t5", pytest.param("llama", marks=pytest.mark.slow)]
)
def test_tensors_tied_names_and_files_are_those_of_save_pretrained(models, name: str) -> None:
    folder = models[0] / name
    plan, ours = planned(folder)
    assert_same(ours, saved(folder))
    sizes = {output.name: output.nbytes for output in plan.tensors}
    text = split(sizes, "40KB").index(sum(array.size for array in ours.values()))
    assert text == (folder / "saved" / "model.safetensors.index.json").read_text()
    assert "'step': no tensor, and not written." in plan.notes


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("llama-tied", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("gpt2", {"lm_head.weight": "transformer.wte.weight"}),
        (
            "t5",
            dict.fromkeys(
                ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
                "shared.weight",
            ),
        ),
    ],
)
def test_what_is_left_out_as_tied_is_listed_and_can_be_had(
    models, name: str, tied: dict[str, str]
) -> None:
    plan, ours = planned(models[0] / name)
    assert plan.tied == tied
    assert sum("is not written again" in note for note in plan.notes) == len(tied)
    twice, copies = planned(models[0] / name, ties="copies")
    assert not twice.tied
    assert set(copies) == {*ours, *tied}
    assert all(
        copies[further].tobytes() == ours[first].tobytes() for further, first in tied.items()
    )


@pytest.mark.parametrize(
    ("name", "mapping"), [("mixtral", "hf-mixtral-fused"), ("qwen2_moe", "hf-qwen-moe-fused")]
)
def test_experts_are_taken_apart_as_transformers_does_when_it_saves(
    models, name: str, mapping: str
) -> None:
    _, ours = planned(models[0] / name, mapping=mapping, invert_mapping=True)
    assert_same(ours, saved(models[0] / name))


def test_fused_projections_are_those_that_another_model_takes(models) -> None:
    """A Phi-3, which has q, k and v in one, and gate and up, gives the logits of the Llama whose
    weights it got."""
    assert models[1]["difference"] < 1e-5


def test_megatrons_layers_are_what_megatrons_own_conversion_makes(models) -> None:
    folder = models[0] / "llama"
    _, megatron = planned(folder, mapping="hf-llama-megatron")
    theirs = saved(folder)
    heads, groups, width, hidden = 4, 2, 8, 32
    layer = "model.layers.1.self_attn"
    q, k, v = (theirs[f"{layer}.{p}_proj.weight"] for p in "qkv")
    # As megatron/core/…/loader_llama does it: one group's queries, its key and its value, and then
    # the next group's.
    qkv = [
        q.reshape(groups, heads // groups * width, hidden),
        k.reshape(groups, width, hidden),
        v.reshape(groups, width, hidden),
    ]
    assert np.array_equal(
        megatron["decoder.layers.1.self_attention.linear_qkv.weight"],
        np.concatenate(qkv, 1).reshape(-1, hidden),
    )
    up = [theirs[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert np.array_equal(megatron["decoder.layers.0.mlp.linear_fc1.weight"], np.concatenate(up))
    assert len(megatron) == 3 + 2 * 6


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        ("llama", "hf-llama-megatron"),
        ("llama", "hf-llama-meta"),
        ("llama", "hf-llama-fused"),
        ("gpt2", "hf-gpt2-linear"),
    ],
)
def test_a_mapping_brings_back_what_it_has_made(models, name: str, mapping: str) -> None:
    folder = models[0] / name
    _, there = planned(folder, mapping=mapping)
    assert there.keys() != saved(folder).keys() or name == "gpt2"
    back = read_naming(
        NameOptions(mapping=mapping, invert_mapping=True, config=folder / "saved")
    ).mapping.outputs(records(there))
    assert_same(made(back, there), saved(folder))


def test_a_linear_layer_of_gpt2_does_what_its_conv1d_did(models) -> None:
    folder = models[0] / "gpt2"
    _, linear = planned(folder, mapping="hf-gpt2-linear")
    theirs = saved(folder)
    x = np.random.default_rng(0).normal(size=(5, 32))
    block = "transformer.h.1.attn"
    conv = x @ theirs[f"{block}.c_attn.weight"] + theirs[f"{block}.c_attn.bias"]
    parts = [
        x @ linear[f"{block}.{p}_proj.weight"].T + linear[f"{block}.{p}_proj.bias"] for p in "qkv"
    ]
    assert np.allclose(np.concatenate(parts, 1), conv)
