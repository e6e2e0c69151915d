"""Run by tests/versions/test_frameworks.py on 8 virtual devices: a training publishes its weights,
and samplers on other meshes follow.

Prints one JSON object with what was seen.
"""

import json
import sys

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla import _XLAC

import shardckpt
from shardckpt.versions import device

xr.use_spmd()
URL = sys.argv[1]


def model_on(shape, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32)).to(dtype).to("xla")
    mesh = xs.Mesh(np.arange(8), shape, ("data", "model"))
    xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
    xs.mark_sharding(model[1].weight, mesh, ("data", None))
    return model


def compiles():
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def on_host(model):
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def main():
    trained = model_on((4, 2), torch.float32)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    samplers = {str(shape): model_on(shape, torch.bfloat16) for shape in ((4, 2), (2, 4), (8, 1))}
    torch_xla.sync()
    layouts = {
        shape: _XLAC._get_xla_sharding_spec(model[0].weight) for shape, model in samplers.items()
    }
    followers = {
        shape: shardckpt.follow(URL, like=model.state_dict()) for shape, model in samplers.items()
    }
    versions = {shape: [] for shape in samplers}
    with shardckpt.Publisher(URL, dtype="bfloat16") as publisher:
        for step in range(4):
            publisher.publish(step, trained.state_dict())
            expected = {
                name: tensor.to(torch.bfloat16) for name, tensor in on_host(trained).items()
            }
            # The next step is computed while the version is being written.
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to("xla")
            optimizer.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
            publisher.wait()
            for shape, follower in followers.items():
                version = follower.poll()
                version.prepare()
                before = compiles()
                state = version.apply()
                compiled = compiles() - before
                versions[shape].append(
                    {
                        "step": version.step,
                        "base": version.base is not None,
                        "equal": all(
                            torch.equal(state[name].cpu(), expected[name]) for name in expected
                        ),
                        "proved": sorted(version.prove()),
                        "compiles": compiled,
                        "layout": _XLAC._get_xla_sharding_spec(state["0.weight"]) == layouts[shape],
                    }
                )
    device.LEAST_BYTES = 0
    refused = pytest.raises(
        shardckpt.errors.OptionError,
        match=r'torch_xla runs no program on one shard of a tensor.*snapshot="host"',
    )
    with shardckpt.Publisher(URL + "-device", snapshot="device") as publisher, refused:
        publisher.publish(0, trained.state_dict())
    print(json.dumps(versions))


main()
