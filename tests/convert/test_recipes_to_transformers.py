"""The recipes of the documentation from torchtitan and Megatron to transformers run, and give back
the same tensors, bit by bit."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch
from paths import DOCS
from safetensors.torch import load_file
from torch.distributed.checkpoint import save as dcp_save
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def original(tmp_path, monkeypatch):
    """The tensors of a small Llama with grouped heads, saved by transformers in `original`, with
    `config.json` beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40)).save_pretrained("original")
    (tmp_path / "config.json").write_text((tmp_path / "original/config.json").read_text())
    return load_file("original/model.safetensors")


def imported(mapping):
    """The tensors of the original under the names of a trainer."""
    shardckpt.import_checkpoint("original", f"{mapping}/0", mapping=mapping, config="config.json")
    return {
        name: torch.from_numpy(array) for name, array in shardckpt.restore(f"{mapping}/0").items()
    }


def run(page, *, after):
    """Run the first block of commands of a page after a text."""
    block = re.search(
        r"^ *```console\n(.*?)^ *```", page.partition(after)[2], re.MULTILINE | re.DOTALL
    )[1]
    for line in block.strip().splitlines():
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output


def check(original):
    written = load_file("hf/llama/model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[name].equal(original[name]) for name in original)


def test_a_checkpoint_of_torchtitan(original):
    weights = imported("hf-llama-torchtitan")
    assert {
        "tok_embeddings.weight",
        "layers.2.attention.qkv_linear.wq.weight",
        "norm.weight",
    } < weights.keys()
    shardckpt.save(
        "run/1000", {"model": weights, "train_state": {"step": 1000}, "optimizer": {"lr": 0.1}}
    )
    run((DOCS / "integrations.md").read_text(), after="## torchtitan")
    check(original)


def test_a_checkpoint_of_megatron_whose_tensors_hold_all_layers(original, tmp_path):
    weights = imported("hf-llama-megatron")
    layers = {name.split(".", 3)[3] for name in weights if name.startswith("decoder.layers.")}
    state = {
        name: tensor for name, tensor in weights.items() if not name.startswith("decoder.layers.")
    }
    state |= {
        f"decoder.layers.{name}": torch.stack(
            [weights[f"decoder.layers.{i}.{name}"] for i in range(3)]
        )
        for name in layers
    }
    moments = {
        f"optimizer.state.{kind}.{name}": torch.zeros_like(tensor)
        for name, tensor in state.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    folder = tmp_path / "checkpoints/iter_0000005"
    dcp_save(state | moments, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 5, "opt_param_scheduler": {"num_steps": 5}}, folder / "common.pt")
    versions = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(versions))
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("5")
    page = (DOCS / "import.md").read_text()
    (tmp_path / "layers.toml").write_text(
        re.search(r"```toml\n(.*?)```", page.partition("**Megatron-Core.**")[2], re.DOTALL)[1]
    )
    run(page, after="**Megatron-Core.**")
    check(original)
