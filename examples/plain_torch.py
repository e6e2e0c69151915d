"""Plain PyTorch: save in the background, and resume after a crash where the run was.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on from the latest saved
step:

    python examples/plain_torch.py
    python examples/plain_torch.py

Needs `pip install 'shardckpt[torch] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/plain_torch.
"""

import torch
from torch import nn

import shardckpt

RUN = "runs/plain_torch"  # or gs://bucket/run, s3://bucket/run
STEPS = 100

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def train_step() -> float:
    """Fit the sum of sines of random inputs.

    A restored run draws the same batches and the same dropout.
    """
    x = torch.randn(512, 64)
    loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


# One object for all that a run needs in order to go on. The states of random number generators are
# included.
state = shardckpt.train_state(model=model, optimizer=optimizer, scheduler=scheduler, step=0)

with shardckpt.CheckpointManager(RUN, every=10, keep=2) as manager:
    if manager.restore(state):  # fills the objects; None: nothing was saved yet
        print(f"resumed from step {state.step}")
    for step in range(state.step + 1, STEPS + 1):
        loss = train_step()
        print(f"step {step} loss {loss:.6f}")
        state.step = step
        manager.save(step, state)  # saves every 10th step; returns when the state is copied
print(f"saved steps: {manager.all_steps()}")
