"""Small trainings for the tests here: a model, its optimizer, and steps whose numbers show any
difference."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Two layers with a norm between, and a scale without dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale


def net(dtype=torch.float32):
    """The same one each time."""
    torch.manual_seed(0)
    return Net().to(dtype)


def groups(model, *, order=1):
    """Weights and the rest, in either order."""
    weights = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    rest = {
        "params": [p for p in model.parameters() if p.dim() <= 1],
        "lr": 0.003,
        "weight_decay": 0.0,
    }
    return [weights, rest][::order]


def steps(model, optimizer, first, last, *after):
    """Train on batches that follow from the step's number; the losses."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 5, generator=generator).to(next(model.parameters()).dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        for scheduler in after:
            scheduler.step(losses[-1]) if isinstance(
                scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
            ) else scheduler.step()
    return losses
