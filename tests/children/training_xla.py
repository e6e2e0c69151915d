"""Run by tests/training/test_xla.py on 8 virtual devices: a sharded training goes on in new
objects, on the same mesh and another.

Prints one JSON object with what was seen.
"""

import json
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla import _XLAC

import shardckpt

xr.use_spmd()
URL = sys.argv[1]


def compiles():
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def made(shape, dtype=torch.float32, kind=torch.optim.AdamW):
    """Model, optimizer and scheduler, sharded over a mesh of that shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.25), nn.Linear(32, 8)).to(dtype).to("xla")
    mesh = xs.Mesh(np.arange(8), shape, ("data", "model"))
    xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
    xs.mark_sharding(model[2].weight, mesh, ("data", "model"))
    optimizer = kind(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def steps(model, optimizer, scheduler, first, last):
    losses = []
    for step in range(first, last):
        x = (
            torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            .to(model[0].weight.dtype)
            .to("xla")
        )
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def of(model, optimizer, scheduler, **more):
    return shardckpt.train_state(model=model, optimizer=optimizer, scheduler=scheduler, **more)


def layouts(model, optimizer, moment="exp_avg"):
    """Of the first weight and of its moment."""
    weight = model[0].weight
    return [
        _XLAC._get_xla_sharding_spec(tensor) for tensor in (weight, optimizer.state[weight][moment])
    ]


def main():
    outcomes = {}
    ours = made((4, 2))
    steps(*ours, 0, 3)
    shardckpt.save(URL, of(*ours, step=3))
    outcomes["expected"] = steps(*ours, 3, 6)
    for shape in ((4, 2), (2, 4)):
        fresh = made(shape)
        torch_xla.sync()
        held = [id(parameter) for parameter in fresh[0].parameters()]
        state = of(*fresh)
        before = compiles()
        shardckpt.restore(URL, state)
        outcomes[str(shape)] = {
            "compiles": compiles() - before,
            "step": state.step,
            "layouts": layouts(*fresh[:2]),
            "same parameters": held == [id(parameter) for parameter in fresh[0].parameters()],
            "pending": sum(
                map(int, _XLAC._check_tensor_need_materialization(list(fresh[0].parameters())))
            ),
        }
        outcomes[str(shape)]["losses"] = steps(*fresh, 3, 6)
    narrow = made((4, 2), torch.bfloat16, torch.optim.SGD)
    narrow[1].state[narrow[0][0].weight]["momentum_buffer"] = torch.full((32, 16), 1 / 3).to("xla")
    shardckpt.save(URL + "-narrow", of(*narrow))
    fresh = made((2, 4), torch.bfloat16, torch.optim.SGD)
    shardckpt.restore(URL + "-narrow", of(*fresh))
    moment = fresh[1].state[fresh[0][0].weight]["momentum_buffer"]
    outcomes["wide moment"] = [
        str(moment.dtype),
        bool((moment.cpu() == 1 / 3).all()),
        layouts(*fresh[:2], "momentum_buffer"),
    ]
    print(json.dumps(outcomes))


main()
