"""Layouts that `batch_dims` finds in small models of transformers, and claims that running the
models contradicts: prints JSON."""

import json
import warnings
from collections import Counter

import torch
import transformers
from models import exported, joint
from parts import contradictions, exported_inputs

from shardckpt.reshard.batch_dims import batch_dims

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 23,
    "max_position_embeddings": 16,
}
GPT2 = {
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 16,
    "vocab_size": 23,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


class Loss(Logits):
    def forward(self, ids):
        return torch.nn.functional.cross_entropy(
            super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


def described(kind, config, trace):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if config.model_type == "gpt2" else "sdpa"
    )
    ids = (torch.randint(0, 23, (8, 7)),)
    program = trace(kind(model.eval()), ids)
    if trace is exported:
        program = program.run_decompositions()
    inferred = batch_dims(program, even_counts=True)
    module = torch.fx.GraphModule(program.graph_module, inferred.program.graph)
    wrong, claims = contradictions(inferred, module, exported_inputs(program, ids), 2)
    return {
        "states": Counter(map(str, inferred.states.values())),
        "outputs": Counter(map(str, inferred.outputs.values())),
        "names": sorted(inferred.states),
        "unknown": inferred.unknown_operators,
        "claims": claims,
        "wrong": wrong,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    llama = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False)
    print(
        json.dumps(
            {
                "Llama's gradients": described(Loss, llama, joint),
                "Llama, tied": described(
                    Logits, transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True), exported
                ),
                "GPT-2": described(Logits, transformers.GPT2Config(**GPT2), exported),
            },
            default=str,
        )
    )
