"""A small training with a vocabulary and experts, and the surgery of its state by hand: the oracle
of restores into other models."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

import shardckpt

VOCABULARY, WIDTH, EXPERTS = 6, 4, 3
STACK = """
[[map]]
from = "layers.{layer}.experts.{expert}.weight"
to = "layers.{layer}.experts"
stack = 0
"""


class Layer(nn.Module):
    """Experts, one by one or stacked; every token goes through all of them."""

    def __init__(self, stacked):
        super().__init__()
        kept = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)]
        self.experts = (
            nn.Parameter(torch.stack([one.weight.detach() for one in kept]))
            if stacked
            else nn.ModuleList(kept)
        )

    def forward(self, x):
        weights = (
            self.experts
            if isinstance(self.experts, nn.Parameter)
            else torch.stack([one.weight for one in self.experts])
        )
        return x + torch.einsum("bi,eoi->bo", x, weights).tanh()


class Model(nn.Module):
    """Tokens, two layers of experts, a head that may be tied."""

    def __init__(self, *, tokens="embed", vocabulary=VOCABULARY, stacked=False, tied=True):
        super().__init__()
        self.called = tokens
        self.add_module(tokens, nn.Embedding(vocabulary, WIDTH))
        self.layers = nn.ModuleList(Layer(stacked) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = getattr(self, tokens).weight

    def forward(self, x):
        x = getattr(self, self.called)(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Run:
    """A model, its optimizer of two groups, and a scheduler."""

    def __init__(self, seed=0, *, shard=None, **options):
        torch.manual_seed(seed)
        self.model = Model(**options)
        if shard is not None:
            shard(self.model)
        parts = (
            [p for n, p in self.model.named_parameters() if "layers" in n],
            [p for n, p in self.model.named_parameters() if "layers" not in n],
        )
        self.optimizer = torch.optim.AdamW(
            [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.02}], lr=0.01
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def state(self, **more):
        return shardckpt.train_state(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, rng=False, **more
        )

    def steps(self, count):
        losses = []
        for number in range(count):
            data = torch.randint(
                0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number)
            )
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(data[0])[:, :VOCABULARY], data[1])
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def by_hand(self, old, names, change):
        """Load the state of another run, of which `change` makes the tensors for a parameter here
        from a function of its old names."""
        changed = copy.deepcopy(old.model.state_dict())
        own = {name: change(name, lambda one: changed[one]) for name in self.model.state_dict()}
        self.model.load_state_dict(own)
        old_of = {parameter: old.optimizer.state[parameter] for parameter in old.model.parameters()}
        before = {name: old_of[parameter] for name, parameter in old.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            first = before[names(name)]
            self.optimizer.state[parameter] = {
                key: value.clone()
                if value.dim() == 0
                else change(name, lambda one, key=key: before[one][key].clone())
                for key, value in first.items()
            }
        for group, before_group in zip(
            self.optimizer.param_groups, old.optimizer.param_groups, strict=True
        ):
            group.update({key: value for key, value in before_group.items() if key != "params"})
        self.scheduler.load_state_dict(old.scheduler.state_dict())
