"""transformers models straight from a checkpoint, of one process and of two that share a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from paths import CHILDREN
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardckpt
from shardckpt import Mesh, SaveOptions, Sharding, errors
from shardckpt import PartitionSpec as P

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, and the url of a checkpoint of its training."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("trained")
    state = {"model": model.state_dict(), "optimizer": {"m": torch.zeros(3)}}
    # As a training on four devices cuts them.
    quarters = Sharding(Mesh((2, 2), ("a", "b")), P("a", "b"))
    on_paper = {
        f"model/{name}": quarters for name, tensor in state["model"].items() if tensor.ndim == 2
    }
    shardckpt.save(path / "run", state, options=SaveOptions(shardings=on_paper))
    config.save_pretrained(path / "config")
    return model, path


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_model_has_the_weights_of_the_checkpoint(trained, model_class):
    model, path = trained
    options = {"config": path / "config", "include": "model/**", "strip_prefix": "model/"}
    loaded = shardckpt.from_pretrained(model_class, path / "run", **options)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.dtype == torch.float32
    half = shardckpt.from_pretrained(model_class, path / "run", dtype=torch.bfloat16, **options)
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())


def test_what_an_import_kept_is_the_configuration(trained, tmp_path):
    model, _ = trained
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    shardckpt.import_checkpoint(tmp_path / "hf", tmp_path / "c")
    loaded = shardckpt.from_pretrained(AutoModelForCausalLM, tmp_path / "c")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.generation_config.max_new_tokens == 7


def test_without_a_configuration_there_is_no_model(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    shardckpt.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "c")
    with pytest.raises(errors.OptionError, match=r"config\.json"):
        shardckpt.from_pretrained(AutoModelForCausalLM, tmp_path / "c")


def test_weights_that_the_checkpoint_lacks_are_named_and_never_random(trained):
    _, path = trained
    options = {
        "config": path / "config",
        "include": "model/**",
        "strip_prefix": "model/",
        "exclude": "**/*up_proj.weight",
    }
    with pytest.raises(errors.NamesMismatchError, match=r"no weights for .*up_proj\.weight"):
        shardckpt.from_pretrained(AutoModelForCausalLM, path / "run", **options)
    _, info = shardckpt.from_pretrained(
        AutoModelForCausalLM, path / "run", output_loading_info=True, **options
    )
    assert len(info["missing_keys"]) == 2


@pytest.mark.parametrize(
    "config", [{}, [3], {"model_type": "nobody's"}, {"model_type": "llama", "self": 3}]
)
def test_a_configuration_that_is_no_models_is_refused(tmp_path, config):
    shardckpt.save(
        tmp_path / "c", {"w": torch.zeros(3)}, options=SaveOptions(metadata={"config.json": config})
    )
    with pytest.raises(errors.OptionError, match=r"config\.json"):
        shardckpt.from_pretrained(AutoModelForCausalLM, tmp_path / "c")


@pytest.mark.long
def test_of_two_processes_each_reads_what_it_keeps(trained, tmp_path):
    """With transformers' own plan for tensor parallelism."""
    model, path = trained
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        CHILDREN / "pretrained_tp.py",
    ]
    done = subprocess.run(
        [*map(str, command), str(path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        answer = json.loads((tmp_path / str(rank)).read_text())
        assert torch.allclose(torch.tensor(answer["logits"]), logits(model), atol=1e-5)
        assert answer["read"] <= 1.05 * answer["kept"]
        assert answer["kept"] < 0.75 * answer["all"]
