"""Writes a training of Megatron-Core that the tests resume.

The command is `python tools/megatron_training.py DIRECTORY`.

It needs `megatron-core` (Apache-2.0; 0.16.1 with torch 2.13 made what is in
tests/golden/megatron_training). Two gloo processes, tensor parallel, train a small GPTModel for
five steps, and save as Megatron's training script does. A new training loads that checkpoint and
goes on for ten steps; losses.json has the losses of both. The library wants a GPU: its tensors are
on the CPU here.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_fixture import join, leave, main
from torch.overrides import TorchFunctionMode

RANKS, BEFORE, AFTER = 2, 5, 10
HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 16, 2, 2, 32, 8
LR, LAST = 0.02, 20
"""The learning rate falls from `LR` to 0 in `LAST` steps."""


class OnCpu(TorchFunctionMode):
    """Makes tensors for CUDA devices on the CPU.

    These tensors say that they are on a GPU when their type is asked for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        return (
            made.replace("torch.", "torch.cuda.", 1)
            if func is torch.Tensor.type and isinstance(made, str)
            else made
        )


class Training:
    """A model, its optimizer and its learning rate."""

    def __init__(self, seed: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(seed)
        unfused = dict.fromkeys(
            ("masked_softmax_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"), False
        )
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=2 * HIDDEN,
            tensor_model_parallel_size=RANKS,
            use_cpu_initialization=True,
            attention_dropout=0,
            hidden_dropout=0,
            normalization="RMSNorm",
            add_bias_linear=False,
            **unfused,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
        )
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=LR, min_lr=0.0, weight_decay=0.1, clip_grad=1.0),
            [self.model],
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=LR,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=LAST,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=LAST,
            wd_incr_style="constant",
        )

    def losses(self, first: int, steps: int) -> list[float]:
        """The losses of some steps."""
        losses = []
        positions, mask = (
            torch.arange(LENGTH).expand(4, LENGTH),
            torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        )
        for step in range(first, first + steps):
            tokens = torch.randint(
                VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step % 2)
            )
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
            loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
            loss.backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.scheduler.step(1)
            losses.append(loss.item())
        return losses

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """The state that Megatron's training script stores."""
        model = self.model.module.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading),
            "opt_param_scheduler": self.scheduler.state_dict(),
            "iteration": BEFORE,
            "checkpoint_version": 3.0,
            "args": argparse.Namespace(
                hidden_size=HIDDEN, num_layers=LAYERS, lr=LR, params_dtype=torch.float32
            ),
        }


def train(rank: int, directory: Path, port: int) -> None:
    """One process."""
    join(rank, RANKS, port)
    torch.set_num_threads(1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.initialize_model_parallel(RANKS)
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    place = directory / f"iter_{BEFORE:07d}"
    with OnCpu():
        whole = Training(0)
        before = whole.losses(0, BEFORE)
        if rank == 0:
            place.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(whole.state(), str(place))
        resumed = Training(1)
        state = dist_checkpointing.load(resumed.state(is_loading=True), str(place))
        resumed.model.module.load_state_dict(state["model"])
        resumed.optimizer.load_state_dict(state["optimizer"])
        resumed.scheduler.load_state_dict(state["opt_param_scheduler"])
        losses = resumed.losses(BEFORE, AFTER)
        if losses != whole.losses(BEFORE, AFTER):
            raise SystemExit("the resumed training is another one")
    if rank == 0:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
        (directory / "losses.json").write_text(
            json.dumps({"before": before, "after": losses}, indent=1) + "\n"
        )
    leave()


if __name__ == "__main__":
    main(train, RANKS)
