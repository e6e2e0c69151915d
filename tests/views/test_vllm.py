"""vLLM serves checkpoints: the same tokens as from an export, and each rank reads what it keeps.
For `make vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from paths import CHILDREN

import shardckpt
from shardckpt import Mesh, SaveOptions, Sharding
from shardckpt import PartitionSpec as P

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM has an environment of its own: run `make vllm`"
    ),
]

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
}
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
TRAINED = {"include": "model/**", "strip_prefix": "model/"}
FORMATS = dict.fromkeys(("load_format", "config_format", "tokenizer_mode"), "shardckpt")
AT_ONCE = {"bloom": {"aten.clone"}, "falcon": {"aten.cat"}, "mamba": {"aten.exp"}}
"""Operations of models that need elements at once."""
FUSED = {"phi3"}
"""Models of which a rank's rows lie in several parts of a fused tensor: at this size, a chunk has
rows of two ranks."""


def models():
    import transformers as t

    eight = {**SIZES, "num_key_value_heads": 8}
    four = {**SIZES, "num_key_value_heads": 4}
    moe = {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "n_group": 1,
    }
    low = {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_group": 1,
    }
    own = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 2048}
    # A mixture of experts comes first: vLLM makes its group of processes for the first model.
    return {
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8)
        ),
        "deepseek": lambda: t.DeepseekV2ForCausalLM(
            t.DeepseekV2Config(**eight, **low, **moe, first_k_dense_replace=1)
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=2)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**four)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**four, head_dim=64)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**four, head_dim=64)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(**own, ffn_dim=1024, max_position_embeddings=64)
        ),
        "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZES)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**eight, pad_token_id=0)),
        "bloom": lambda: t.BloomForCausalLM(
            t.BloomConfig(hidden_size=512, n_layer=2, n_head=8, vocab_size=2048)
        ),
        "falcon": lambda: t.FalconForCausalLM(t.FalconConfig(**own)),
        "mamba": lambda: t.MambaForCausalLM(
            t.MambaConfig(hidden_size=512, num_hidden_layers=2, vocab_size=2048)
        ),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with each model as Hugging Face's library saves it, and as a checkpoint of a
    training on four devices."""
    import torch

    where = tmp_path_factory.mktemp("models")
    quarters = Sharding(Mesh((2, 2), ("a", "b")), P("a", "b"))
    for name, make in models().items():
        torch.manual_seed(0)
        make().save_pretrained(where / name / "hf")
        shardckpt.import_checkpoint(where / name / "hf", where / name / "imported", workers=1)
        state = shardckpt.restore(where / name / "imported")
        layouts = {
            key: quarters
            for key, array in state.items()
            if array.ndim == 2 and min(array.shape) > 1
        }
        shardckpt.save(
            where / name / "c", state, options=SaveOptions(shardings=layouts, fingerprint=True)
        )
    return where


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_has_what_vllm_reads_itself_and_reads_hardly_more_than_it_keeps(saved, ranks):
    command = [sys.executable, str(CHILDREN / "vllm_rank.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(saved), *models()], env=environment, **pipes
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=800) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, outputs[0][1][-3000:]
    answers = [
        [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for out, _ in outputs
    ]
    for i, name in enumerate(models()):
        of_ranks = [one[i] for one in answers]
        assert [(one["model"], one["differing"]) for one in of_ranks] == [(name, [])] * ranks
        assert {operation for one in of_ranks for operation in one["at_once"]} == AT_ONCE.get(
            name, set()
        )
        read, kept = (sum(one[what] for one in of_ranks) for what in ("read", "kept"))
        print(
            f"{name}, {ranks} ranks: {read / kept:.4f} of the bytes kept, peak "
            f"{max(one['peak'] for one in of_ranks) / 1e6:.0f} MB"
        )
        assert name in {*FUSED, *AT_ONCE} or read <= 1.05 * kept, name
        assert all(one["peak"] <= (128 << 20) for one in of_ranks), "memory besides the parameters"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training's checkpoint with configuration and tokenizer, and its export."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    where = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4))
    for parameter in model.parameters():
        parameter.data.mul_(3)  # so that the next token depends on those before
    model.save_pretrained(where / "hf")
    words = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        *(f"w{n}" for n in range(2038)),
    ]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="zero"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="zero").save_pretrained(
        where / "hf"
    )
    shardckpt.import_checkpoint(where / "hf", where / "imported", workers=1)
    quarters = Sharding(Mesh((2, 2), ("a", "b")), P("a", "b"))
    state = {"model": model.state_dict(), "optimizer": {"m": torch.zeros(3)}}
    layouts = {
        f"model/{name}": quarters for name, tensor in state["model"].items() if tensor.ndim == 2
    }
    kept = shardckpt.open(where / "imported").metadata
    shardckpt.save(
        where / "run",
        state,
        options=SaveOptions(shardings=layouts, fingerprint=True, metadata=kept),
    )
    shardckpt.export_safetensors(where / "run", where / "export", **TRAINED)
    return where


def generated(model, **options):
    command = [sys.executable, str(CHILDREN / "vllm_generate.py"), str(model), json.dumps(options)]
    threads = (
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if options.get("tensor_parallel_size") == 2 else {}
    )
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, **threads},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("[["))
    ), done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_checkpoint_gives_the_tokens_of_its_export(trained, ranks):
    ours, log = generated(
        trained / "run", tensor_parallel_size=ranks, model_loader_extra_config=TRAINED, **FORMATS
    )
    theirs, _ = generated(trained / "export", tensor_parallel_size=ranks)
    assert ours == theirs
    print(f"{ranks} ranks: {ours}")
    assert "21 tensors proved by their fingerprint; operations that read at once: none" in log


def test_a_directory_is_the_model_of_a_checkpoint_elsewhere(trained):
    """As for buckets and web servers, of which vLLM takes no paths."""
    (trained / "small").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (trained / "small" / name).write_bytes((trained / "export" / name).read_bytes())
    ours, _ = generated(
        trained / "small",
        load_format="shardckpt",
        model_loader_extra_config={"url": str(trained / "run"), **TRAINED},
    )
    theirs, _ = generated(trained / "export")
    assert ours == theirs


def test_what_does_not_fit_is_refused_by_name(trained, tmp_path):
    for options, message in [
        ({"model_loader_extra_config": {}}, "choose and name tensors as the model does"),
        (
            {"model_loader_extra_config": {**TRAINED, "exclude": "**/*q_proj.*"}},
            "has no weights, or not all, for .*qkv_proj",
        ),
    ]:
        with pytest.raises(AssertionError, match=message):
            generated(trained / "run", **FORMATS, **options)
    shardckpt.save(tmp_path / "bare", shardckpt.restore(trained / "run"))
    with pytest.raises(AssertionError, match=r"has no config\.json"):
        generated(tmp_path / "bare", **FORMATS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM
def test_quantised_models_are_refused_by_name():
    from vllm.config.load import LoadConfig

    from shardckpt.views.vllm_plugin import CheckpointLoader

    loader = CheckpointLoader(LoadConfig(load_format="shardckpt"))
    with pytest.raises(
        shardckpt.errors.OptionError,
        match="run/100: shardckpt does not load quantised models, and this one is fp8",
    ):
        loader.load_weights(None, SimpleNamespace(model="run/100", quantization="fp8"))
