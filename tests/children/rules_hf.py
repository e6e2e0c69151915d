"""Names, shapes and plans that transformers itself gives for the tensors of small models: prints
one JSON document.

By model_type: `config` (as in config.json), `tensors` (name → shape, class of the module, and where
its plan for tensor parallelism puts it), and `experts` (the same for its plan for expert
parallelism). Then `training`: names and shapes of a training's state.
"""

import json
import re
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

import shardckpt
from shardckpt.state import flatten

WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [0],
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "add_cross_attention": True}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def model(kind):
    """A small model on no device at all."""
    family = {"gpt2": GPT2, "t5": T5, "mt5": T5, "umt5": T5}.get(
        kind, EXPERTS if "mixtral" in kind or "moe" in kind else {}
    )
    config = transformers.CONFIG_MAPPING[kind](**{**WIDTHS, **family})
    auto = transformers.AutoModelForSeq2SeqLM if family is T5 else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def placed(of, name, plan, mesh):
    """DTensor's placement of a parameter by a plan, as text; None if the plan says nothing of
    it."""
    owner, _, last = name.rpartition(".")
    for pattern, style in plan.items():
        if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) or (
            re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), owner)
            and hasattr(of.get_submodule(owner), "weight")
        ):
            module = of.get_submodule(owner)
            ALL_PARALLEL_STYLES[style].shard_param(module, last, mesh)
            return str(getattr(module._parameters[last], "placements", ("R",))[0])
    return None


def described(kind, mesh):
    parallel, by_expert = model(kind), model(kind)
    description = {"config": parallel.config.to_dict(), "tensors": {}, "experts": {}}
    for name, tensor in parallel.state_dict().items():
        module = parallel.get_submodule(name.rpartition(".")[0])
        description["tensors"][name] = [list(tensor.shape), type(module).__name__, None]
    names = [name for name, _ in parallel.named_parameters()]
    for name in names:
        description["tensors"][name][2] = placed(parallel, name, parallel._tp_plan or {}, mesh)
        place = placed(
            by_expert,
            name,
            {
                f"model.{key}": style
                for key, style in (by_expert.config.base_model_ep_plan or {}).items()
            },
            mesh,
        )
        if place is not None:
            description["experts"][name] = place
    return description


def training(optimizer, **options):
    """Names and shapes of the state of a training, moments included."""
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**WIDTHS, tie_word_embeddings=False)
    )
    averaged = torch.optim.swa_utils.AveragedModel(net)
    steps = optimizer(net.parameters(), **options)
    net(
        input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)
    ).loss.backward()
    steps.step()
    state = shardckpt.train_state(model=net, optimizer=steps, ema=averaged, rng=False).state_dict()
    return {
        name: list(leaf.shape)
        for name, leaf in flatten(
            state, lambda leaf: isinstance(leaf, torch.Tensor)
        ).tensors.items()
    }


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    descriptions = {kind: described(kind, mesh) for kind in sys.argv[1:]}
    dist.destroy_process_group()
    descriptions["training"] = {
        kind.__name__: training(kind) for kind in (torch.optim.AdamW, torch.optim.Adafactor)
    }
    print(json.dumps(descriptions, default=str))
