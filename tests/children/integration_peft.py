"""A tiny Llama with adapters of PEFT, trained by Hugging Face's Trainer: alone, under DDP, or under
accelerate's FSDP2."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import peft
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from integration_hf_trainer import made, quiet
from integration_launch import digest
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainerCallback

import shardckpt
from shardckpt import ShardckptError

LORA = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.1,
    "task_type": "CAUSAL_LM",
}
FORMS = {
    "LoRA": LORA,
    "all of LoRA": {
        "r": 2,
        "target_modules": "all-linear",
        "use_dora": True,
        "trainable_token_indices": [1, 2],
        "modules_to_save": ["norm"],
    },
    "QLoRA": LORA | {"target_modules": "all-linear"},
}


class Sharding(Trainer):
    """A Trainer that shards by accelerate's FSDP2 on CPUs, where accelerate itself only allows it
    on accelerators."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        AcceleratorState._shared_state |= {
            "distributed_type": DistributedType.FSDP,
            "fsdp_plugin": plugin,
        }
        self.is_fsdp_enabled = True


def adapted(directory, form, seed):
    """Makes a model with adapters of the base model."""

    def adapt(model):
        if form == "QLoRA":
            model = peft.prepare_model_for_kbit_training(quantized(model, directory))
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(**FORMS[form]))

    return adapt if form else lambda model: model


def quantized(model, directory):
    base, own = Path(directory, "base"), Path(directory, f"base{os.getpid()}")
    if not base.exists():
        model.save_pretrained(own)
        with suppress(OSError):  # another process was first
            own.rename(base)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    return LlamaForCausalLM.from_pretrained(
        Path(directory, "base"), quantization_config=nf4, device_map="cpu"
    )


def new(ranks, directory, steps, form, sharding, seed):
    kind = Sharding if sharding and ranks > 1 else Trainer
    trainer, callback, watch = made(
        ranks, directory, steps, kind=kind, adapted=adapted(directory, form, seed)
    )
    trainer.remove_callback(watch)
    return trainer, callback


def full(state):
    """A state with whole tensors in place of shards."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state


class Begins(TrainerCallback):
    """Notes the trained parameters when a step begins; ends its process at a step, when the saves
    before it are committed."""

    def __init__(self, callback, dies_at):
        self.callback, self.dies_at, self.digests = callback, dies_at, {}

    def on_step_begin(self, args, state, control, model=None, **_kwargs):
        self.digests[state.global_step] = digest(full(trained(model)))
        if state.global_step == self.dies_at:
            self.callback._manager.wait()
            if args.world_size > 1:
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def train(coordinator, directory, steps, form, sharding, dies_at=None, seed=1, wholly=False):
    """Train, beginning where the last one ended; adapters begin with the weights of a seed.

    With `wholly`, the base model is saved, too, as 0.2.0 did.
    """
    ranks = quiet(coordinator)
    trainer, callback = new(ranks, directory, steps, form, sharding, seed)
    if wholly:
        callback._whole.find_adapters = lambda _trainer: None
    begins = Begins(callback, dies_at)
    trainer.add_callback(begins)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    outcome = {
        "begins": begins.digests,
        "losses": losses,
        "final": digest(full(trained(trainer.model))),
        "sharded": any(isinstance(one, DTensor) for one in trainer.model.parameters()),
        "bytes": nbytes(trainer),
    }
    coordinator.share("leave", None)
    return outcome


def trained(model):
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def nbytes(trainer):
    """Bytes of the trained parameters and of their optimizer's state."""
    values = [*trained(trainer.model).values()]
    values += [
        value for of in trainer.optimizer.state_dict()["state"].values() for value in of.values()
    ]
    return sum(value.nbytes for value in values)


def exported(coordinator, directory, step, form):
    """Load what an export has with PEFT; compare it with what PEFT itself saves of the trained
    model."""
    quiet(coordinator)
    trainer, callback = new(1, directory, step, form, sharding=False, seed=2)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    ours, theirs = Path(directory, "ours"), Path(directory, "theirs")
    shardckpt.export(Path(directory, "run", str(step)), ours, to="peft")
    trainer.model.save_pretrained(theirs)
    names = ("adapter_model.safetensors", "adapter_config.json")
    bare, _ = new(1, directory, step, None, sharding=False, seed=2)
    base = (
        peft.prepare_model_for_kbit_training(quantized(bare.model, directory))
        if form == "QLoRA"
        else bare.model
    )
    loaded = peft.PeftModel.from_pretrained(base, ours)
    tokens = torch.arange(8)[None]
    outputs = [model.eval()(tokens).logits for model in (trainer.model, loaded)]
    return {
        "same weights": Path(ours, names[0]).read_bytes() == Path(theirs, names[0]).read_bytes(),
        "same configuration": json.loads(Path(ours, names[1]).read_bytes())
        == json.loads(Path(theirs, names[1]).read_bytes()),
        "same outputs": torch.equal(*outputs),
    }


def refused(coordinator, directory, step):
    """Resume with another base model."""
    quiet(coordinator)

    def changed(model):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 2] += 1e-3
        return adapted(directory, "LoRA", 2)(model)

    trainer, callback, _ = made(1, directory, step + 3, adapted=changed)
    try:
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    except ShardckptError as e:
        return [type(e).__name__, str(e)]
    return []
