"""Processes of jobs whose tensors describe their own shards, or are replicated on several of them."""

import torch

import shardckpt
from shardckpt import SaveOptions


def described(rank, ranks, columns, *, fill=None, whole=8):
    """Rows of a global tensor, evenly cut, with the last rows first in the local tensor and padding behind them."""
    rows = whole // ranks
    first = rank * rows
    numbers = torch.arange(whole * columns, dtype=torch.float32).reshape(whole, columns) if fill is None else None
    part = torch.full((rows, columns), fill) if numbers is None else numbers[first : first + rows]
    half = rows // 2
    local = torch.cat([part[half:], part[:half], torch.full((1, columns), -1.0)])
    local.global_shape = (whole, columns)
    local.global_offsets = ((first + half, 0), (first, 0))
    local.local_offsets = ((0, 0), (rows - half, 0))
    local.local_sizes = ((rows - half, columns), (half, columns))
    return local


def save_described(coordinator, url, columns, fill=None):
    rank, ranks = coordinator.world.process, coordinator.world.processes
    shardckpt.save(url, {"w": described(rank, ranks, columns, fill=fill)}, coordinator=coordinator)
    return "saved"


def restore_described(coordinator, url, columns):
    """Whether each rank's local tensor is filled where it is, its padding apart."""
    rank, ranks = coordinator.world.process, coordinator.world.processes
    like = {"w": described(rank, ranks, columns, fill=7.0)}
    found = shardckpt.restore(url, like, coordinator=coordinator)["w"]
    return [found is like["w"], bool(torch.equal(found, described(rank, ranks, columns))), found.global_shape == (8, columns)]


def train_described(coordinator, url, resume):
    """Save or resume a module with a described parameter and its optimizer; the moments on this process."""
    rank, ranks = coordinator.world.process, coordinator.world.processes
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(described(rank, ranks, 40, fill=0.0 if resume else 1.0))
    for attribute in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(module.weight, attribute, getattr(described(rank, ranks, 40), attribute))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    state = shardckpt.train_state(model=module, optimizer=optimizer)
    if resume:
        shardckpt.restore(url, state, coordinator=coordinator)
        moment = optimizer.state[module.weight]["exp_avg"]
        return [module.weight[:-1].detach().unique().tolist(), moment[:-1].unique().tolist(), [*moment.shape]]
    module.weight.grad = torch.full_like(module.weight, rank + 1.0)
    optimizer.step()
    moment = optimizer.state[module.weight]["exp_avg"]  # which Adam made like the parameter, without a description
    shardckpt.save(url, state, coordinator=coordinator)
    return [module.weight[:-1].detach().unique().tolist(), moment[:-1].unique().tolist(), [*moment.shape]]


def save_same_shard(coordinator, url):
    local = described(0, 1, 40)
    shardckpt.save(url, {"w": local}, coordinator=coordinator, options=SaveOptions(commit_timeout=20))
    return "saved"
