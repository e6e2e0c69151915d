"""Processes of torch_xla, of which each owns half of the devices, that restore together over
gloo."""

import torch
from e2e_state import TENSORS
from e2e_torch import leave, tensor_of
from e2e_torch_xla import drawn, marked, shards, start

import shardckpt

SOME = [name for name in TENSORS if len(name) % 5 == 0]


def restored(coordinator, url):
    """First every device has all of it, then layouts are random."""
    ours = start(coordinator)
    outcomes = []
    for replicated in (True, False):
        cases = drawn("cooperative", ours.world.processes)
        for case in cases.values():
            case["spec"] = [None] * len(case["spec"]) if replicated else case["spec"]
        like = {
            name.replace("/", "."): marked(torch.zeros_like(tensor_of(name)), cases[name])
            for name in SOME
        }
        checkpoint = shardckpt.open(url)
        state = shardckpt.restore(checkpoint, like, cooperative=True, strict=False)
        held = {name: shards(name, state[name.replace("/", ".")]) for name in SOME}
        wrong = [
            name
            for name, pairs in held.items()
            if any(a.tobytes() != b.tobytes() for a, b in pairs)
        ]
        outcomes.append([checkpoint.stats.bytes_read, wrong])
    leave(coordinator)
    checkpoint = shardckpt.open(url)
    shardckpt.restore(checkpoint, only=[name.replace("/", ".") for name in SOME])
    return [*outcomes, checkpoint.stats.bytes_read]
