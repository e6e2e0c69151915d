"""LoRA: checkpoints store adapters alone, and refer to one stored base for the frozen weights.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on from the latest saved
step:

    python examples/lora.py
    python examples/lora.py

Needs `pip install 'shardckpt[torch] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/lora.
"""

import torch
from torch import nn

import shardckpt

# Checkpoints beside their base can be moved together with it.
RUN, BASE = "runs/lora", "runs/lora/base"
STEPS = 100


class LoraLinear(nn.Linear):
    """A linear layer with frozen weights, which keep their names, and a trained low-rank update."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen layer's output, and the update's."""
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


torch.manual_seed(0)
model = nn.Sequential(
    LoraLinear(64, 1024), nn.ReLU(), LoraLinear(1024, 1024), nn.ReLU(), LoraLinear(1024, 64)
)
frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def train_step() -> float:
    """Train the adapters on random inputs."""
    x = torch.randn(256, 64)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# The base: here random weights; in your training the pretrained model, by `shardckpt import`.
try:
    shardckpt.open(BASE)
except FileNotFoundError:
    shardckpt.save(BASE, {"model": frozen})
shardckpt.restore(BASE, {"model": frozen})  # fills the frozen weights in place

state = shardckpt.train_state(model=model, optimizer=optimizer, step=0)
options = shardckpt.SaveOptions(base=BASE, skip=[f"model/{name}" for name in frozen])

with shardckpt.CheckpointManager(RUN, every=10, keep=2, options=options) as manager:
    # Reads the adapters from the step, and the frozen weights from the base.
    if manager.restore(state):
        print(f"resumed from step {state.step}")
    for step in range(state.step + 1, STEPS + 1):
        loss = train_step()
        print(f"step {step} loss {loss:.6f}")
        state.step = step
        manager.save(step, state)
    manager.wait()
    if report := manager.last_report:
        model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(
            f"a step stores {report.nbytes:,} bytes of adapters and their optimizer; the model "
            f"has {model_bytes:,} bytes"
        )
