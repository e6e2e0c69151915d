"""Small models of transformers, as they are in memory and as transformers saves them.

    python convert_hf.py FOLDER

Below the folder, by model: `state/` (a checkpoint of `state_dict()`, its tied tensors tied) and
`saved/` (what `save_pretrained` makes of it, in files of 40 KB). Prints, as JSON, how far logits
differ of a Phi-3 with the weights of the Llama, which it takes fused.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from arrays import made

import shardckpt
from shardckpt.convert.naming.apply import outputs_of
from shardckpt.convert.options import NameOptions

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 3,
    "num_local_experts": 3,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
MODELS = {
    "llama": ("llama", {**SMALL, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "vocab_size": 100,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral": ("mixtral", {**SMALL, **EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "t5": (
        "t5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 100,
            "decoder_start_token_id": 0,
        },
    ),
}


def model(kind, widths):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**widths)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    return auto.from_config(config).to(torch.bfloat16 if kind == "mixtral" else torch.float32)


def fused_logits(llama, folder):
    """The largest difference of logits of the Llama and a Phi-3 with its weights."""
    checkpoint = shardckpt.open(folder / "state")
    options = NameOptions(mapping="hf-llama-fused", config=folder / "saved", strip_prefix="model/")
    outputs = outputs_of(checkpoint.record.structure, options, "").tensors
    arrays = made(outputs, {name: checkpoint.read(name) for name in checkpoint.names()})
    phi = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **SMALL,
            tie_word_embeddings=False,
            max_position_embeddings=2048,
            rms_norm_eps=llama.config.rms_norm_eps,
        )
    )
    phi.load_state_dict(
        {name: torch.from_numpy(array) for name, array in arrays.items()}, strict=True
    )
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        return float((phi.eval()(tokens).logits - llama.eval()(tokens).logits).abs().max())


if __name__ == "__main__":
    for name, (kind, widths) in MODELS.items():
        folder, one = Path(sys.argv[1]) / name, model(kind, widths)
        shardckpt.save(folder / "state", {"model": one.state_dict(), "step": 3})
        one.save_pretrained(folder / "saved", max_shard_size="40KB")
        if name == "llama":
            difference = fused_logits(one, folder)
    print(json.dumps({"difference": difference}))
