"""One training process of the demo: a Llama under torch_xla SPMD on 8 virtual devices.

It trains from scratch on one layout, saves once, and goes on until it is killed; or (`--resume`) it
restores the checkpoint onto another layout and goes on from there. What it does it tells its parent
on standard output, one JSON object per line; everything else that libraries print goes to standard
error.
"""

from __future__ import annotations

import os

# Read once, when torch_xla is imported.
os.environ |= {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

import argparse
import hashlib
import json
import random
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics  # every interpreter has it
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from demo_layouts import LAYOUTS, Layout
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import shardckpt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = dict[str, Any]

SEPARATOR = 256
"""The token between two documents; all others are bytes."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and of a batch."""

    hidden: int
    mlp: int
    layers: int
    batch: int
    """Sequences per step."""
    tokens: int
    """Per sequence."""

    def config(self) -> LlamaConfig:
        """A Llama of this size."""
        return LlamaConfig(
            vocab_size=SEPARATOR + 1,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=self.tokens,
            use_cache=False,
            attn_implementation="eager",
        )


FULL = Size(hidden=512, mlp=1376, layers=2, batch=16, tokens=64)
SMALL = Size(hidden=512, mlp=1376, layers=1, batch=8, tokens=16)


@cache
def text() -> torch.Tensor:
    """The text to learn, as tokens: the Python language reference."""
    return torch.tensor(
        [token for key in sorted(topics) for token in (*topics[key].encode(), SEPARATOR)]
    )


class Training:
    """Model, optimizer and schedule on a layout, and the state with which a run goes on."""

    def __init__(self, model: LlamaForCausalLM, layout: Layout, size: Size) -> None:
        self.model = model
        self.layout = layout
        self.size = size
        self.step = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=100)

    def train_step(self) -> float:
        """Train on the next batch, which torch's random state chooses; its loss."""
        starts = torch.randint(len(text()) - self.size.tokens, (self.size.batch, 1))
        batch = text()[starts + torch.arange(self.size.tokens)].to(torch_xla.device())
        xs.mark_sharding(batch, xla_mesh(self.layout), (self.layout.batch_axis, None))
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        torch_xla.sync()
        self.step += 1
        return float(loss.item())

    def state(self) -> State:
        """All that is saved."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "rng": {
                "torch": torch.get_rng_state(),
                "xla": xm.get_rng_state(),
                "python": random.getstate(),
            },
        }

    def load(self, state: State) -> None:
        """Go on from a restored state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"]["torch"])
        xm.set_rng_state(state["rng"]["xla"])
        random.setstate(state["rng"]["python"])


def start(layout: Layout, size: Size) -> Training:
    """A new run."""
    torch.manual_seed(0)
    random.seed(0)
    model = LlamaForCausalLM(size.config()).to(torch_xla.device())
    for name, parameter in model.named_parameters():
        xs.mark_sharding(parameter, xla_mesh(layout), layout.sharding(name).spec.parts)
    return Training(model, layout, size)


def resume(layout: Layout, size: Size, checkpoint: shardckpt.Checkpoint) -> Training:
    """A run that goes on from a checkpoint.

    Nothing is allocated on the devices before the restore, and nothing twice: the model is built on
    the meta device, `like` has nothing but shardings for it, and the optimizer gets its state
    without a step that would make one first.
    """
    config = size.config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = shardckpt.restore(checkpoint, like=where_things_go(Training(model, layout, size)))
    model.load_state_dict(state["model"], assign=True)
    # The one tensor that a Llama computes instead of loading.
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(torch_xla.device())
    training = Training(model, layout, size)
    training.load(state)
    return training


def where_things_go(training: Training) -> State:
    """The state of a run whose model is on the meta device.

    It has a Target for every tensor on the devices.
    """
    targets = {
        name: shardckpt.Target(training.layout.sharding(name))
        for name, _ in training.model.named_parameters()
    }
    # AdamW counts its steps on the host.
    moments = {
        i: {"step": torch.empty(()), "exp_avg": target, "exp_avg_sq": target}
        for i, target in enumerate(targets.values())
    }
    state = training.state()
    return {**state, "model": targets, "optimizer": {**state["optimizer"], "state": moments}}


def xla_mesh(layout: Layout) -> xs.Mesh:
    """The mesh as torch_xla has it."""
    return xs.Mesh(layout.mesh.device_ids, layout.mesh.shape, layout.mesh.axis_names)


# --- what the proofs need -------------------------------------------------------------------------


def leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves of nested containers, by name."""
    if isinstance(node, dict | list | tuple):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            yield from leaves(child, f"{name}/{key}" if name else str(key))
    else:
        yield name, node


def digest(leaf: Any) -> str:
    """SHA-256 over type, shape and every bit of a leaf.

    A tensor is brought to the host whole, by torch_xla alone.
    """
    if isinstance(leaf, torch.Tensor):
        array = leaf.detach().cpu().numpy()
        return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
    return hashlib.sha256(f"{type(leaf).__name__} {leaf!r}".encode()).hexdigest()


def digests(state: State) -> dict[str, str]:
    """Every leaf's digest."""
    return {name: digest(leaf) for name, leaf in leaves(state)}


def compiles() -> int:
    """XLA compilations so far."""
    data = met.metric_data("CompileTime")
    return int(data[0]) if data else 0


def lie_as_asked(training: Training) -> tuple[int, list[str]]:
    """Number of tensors on the devices, and names of those that XLA lays out against the rules."""
    moments = training.optimizer.state
    tensors = [
        (name, tensor)
        for name, parameter in training.model.named_parameters()
        for tensor in (parameter, moments[parameter]["exp_avg"], moments[parameter]["exp_avg_sq"])
    ]
    wrong = []
    for name, tensor in tensors:
        in_xla = shardckpt.OpSharding.parse(torch_xla._XLAC._get_xla_sharding_spec(tensor))
        if shardckpt.Sharding.infer(
            training.layout.mesh, in_xla, tensor.ndim
        ) != training.layout.sharding(name):
            wrong.append(name)
    return len(tensors), wrong


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Run until the last step, or until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--checkpoint", required=True, help="where to save, or what to resume from")
    parser.add_argument(
        "--digests", type=Path, required=True, help="side file with the digest of every leaf saved"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-at", type=int, default=0, help="step after which to save")
    parser.add_argument("--steps", type=int, required=True, help="step after which to end")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()

    tell = events()
    xr.use_spmd()
    size, layout = (SMALL if args.small else FULL), LAYOUTS[args.layout]
    xs.set_global_mesh(xla_mesh(layout))  # so that a checkpoint knows the axes by name
    if args.resume:
        checkpoint = shardckpt.open(args.checkpoint)
        compiled, began = compiles(), time.perf_counter()
        training = resume(layout, size, checkpoint)
        xm.wait_device_ops()
        seconds, compiled = time.perf_counter() - began, compiles() - compiled
        stats = checkpoint.stats
        tell(
            "restored",
            step=training.step,
            seconds=seconds,
            compiles=compiled,
            read=stats.bytes_read,
            needed=stats.bytes_needed,
        )
        looked, wrong = lie_as_asked(training)
        tell("layouts", tensors=looked, wrong=wrong)
        saved, restored = json.loads(args.digests.read_text()), digests(training.state())
        different = sorted(
            name for name in saved.keys() | restored.keys() if saved.get(name) != restored.get(name)
        )
        tensors = sum(isinstance(leaf, torch.Tensor) for _, leaf in leaves(training.state()))
        tell("digests", tensors=tensors, values=len(saved) - tensors, different=different)
    else:
        training = start(layout, size)
    tell(
        "ready", parameters=sum(p.numel() for p in training.model.parameters()), layers=size.layers
    )

    while training.step < args.steps:
        loss = training.train_step()
        tell("loss", step=training.step, loss=loss)
        if training.step == args.save_at:
            state = training.state()
            args.digests.write_text(json.dumps(digests(state)))
            began = time.perf_counter()
            shardckpt.save(args.checkpoint, state)
            tell("saved", step=training.step, seconds=time.perf_counter() - began)


def events() -> Callable[..., None]:
    """A function that tells the parent of an event.

    Standard output belongs to it alone from now on.
    """
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(event: str, **fields: object) -> None:
        stream.write(json.dumps({"event": event, **fields}) + "\n")

    return tell


if __name__ == "__main__":
    main()
