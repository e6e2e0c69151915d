"""Small models, and their programs."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.export import Dim
from torch.export.experimental import _export_forward_backward
from torch.nn import functional


def exported(model, arguments):
    """Exported with the first dimension of all arguments dynamic."""
    batch = Dim("batch")
    return torch.export.export(
        model, arguments, dynamic_shapes=tuple({0: batch} for _ in arguments)
    )


def joint(model, arguments):
    """Of its loss together with the gradients of its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it does here
        return _export_forward_backward(exported(model, arguments))


class Block(nn.Module):
    """Attention of two heads, and cross-entropy over 11 tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.attend = nn.Linear(16, 48)
        self.head = nn.Linear(16, 11)

    def forward(self, ids, targets):
        x = self.norm(self.embed(ids))
        batch, length, _ = x.shape
        q, k, v = self.attend(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).reshape(batch, length, 16)
        return functional.cross_entropy(
            self.head(functional.gelu(x)).flatten(0, 1), targets.flatten()
        )


class ConvNet(nn.Module):
    """A convolution with batch normalisation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).mean((2, 3)))


class Statistics(nn.Module):
    """Keeps what it has seen in buffers."""

    def __init__(self):
        super().__init__()
        for name in ("total", "average", "largest", "smallest", "norm"):
            self.register_buffer(name, torch.zeros(4))
        for name in ("steps", "seen"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x):
        self.total += x.sum(0)
        self.average.copy_(0.9 * self.average + 0.1 * x.mean(0))
        self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
        self.smallest.copy_(torch.minimum(self.smallest, x.amin(0)))
        self.norm += x.sum(0).tanh()
        self.steps += 1
        self.seen += x.shape[0]
        return x * 2


class CachedAttention(nn.Module):
    """One step of decoding: keys and values of earlier steps are in buffers, one of them with the
    samples in its second dimension."""

    def __init__(self, batch, length=3):
        super().__init__()
        self.batch = batch
        self.project = nn.Linear(5, 15)
        self.register_buffer("cache_k", torch.randn(batch, length, 5))
        self.register_buffer("cache_v", torch.randn(length, batch, 5))

    def forward(self, x, position):
        q, k, v = self.project(x).chunk(3, -1)
        self.cache_k.index_copy_(1, position, k)
        self.cache_v.index_copy_(0, position, v.transpose(0, 1))
        weights = (q @ self.cache_k.transpose(1, 2)).softmax(-1)
        return weights @ self.cache_v.transpose(0, 1)


class AverageLoss(nn.Module):
    """Divides by its number of samples itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y):
        return ((self.linear(x) - y) ** 2).sum() / x.shape[0]
