"""Run by tests/reading/test_adapted_devices.py on 8 virtual devices: fitted and joined tensors of
torch_xla, unevenly cut, against numpy.

Prints what differs, as one line of JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import shardckpt

xr.use_spmd()
ROOT = Path(sys.argv[1])
ROOT.joinpath("m.toml").write_text('[[map]]\nfrom = "e/{i}"\nto = "e"\nstack = 0\n')


def fitted(array, shape):
    whole = np.zeros(shape, array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    whole[common] = array[common]
    return whole


def sharded(shape, mesh, spec):
    tensor = torch.ones(shape).to("xla")
    xs.mark_sharding(tensor, mesh, spec)
    return tensor


wrong, count = [], 0
rng = np.random.default_rng(0)
for number, (sides, spec) in enumerate(
    [((8,), ("x", None)), ((4, 2), ("x", "y")), ((2, 4), ("y", None)), ((4, 2), (None, None))]
):
    mesh = xs.Mesh(np.arange(8), sides, ("x", "y")[: len(sides)])
    for mode in ("pad", "slice"):
        small, large = (int(rng.integers(1, 9)), 5), (int(rng.integers(9, 20)), 11)
        stored, own = (small, large) if mode == "pad" else (large, small)
        array = (np.arange(stored[0] * stored[1]) + 1).astype(np.float32).reshape(stored)
        url = ROOT / f"{number}{mode}"
        shardckpt.save(url, {"w": array, "e": {"0": array, "1": -array}})
        like = {"v": sharded(own, mesh, spec), "e": sharded((2, *own), mesh, (None, *spec))}
        back = shardckpt.restore(
            url, like, rename="s/^w$/v/", mapping=ROOT / "m.toml", fit={"v": mode, "e": mode}
        )
        expected = fitted(array, own)
        arrays = {name: back[name].cpu().numpy() for name in back}
        count += 2
        if not np.array_equal(arrays["v"], expected):
            wrong.append([number, mode, "v"])
        if not np.array_equal(arrays["e"], np.stack([expected, -expected])):
            wrong.append([number, mode, "e"])
model = torch.nn.Embedding(16, 4).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.tensor([1, 2]).to("xla")).sum().backward()
optimizer.step()
torch_xla.sync()
shardckpt.save(ROOT / "t", shardckpt.train_state(model=model, optimizer=optimizer, step=1))
larger = torch.nn.Embedding(20, 4).to("xla")
xs.mark_sharding(larger.weight, xs.Mesh(np.arange(8), (8,), ("x",)), ("x", None))
moments = torch.optim.AdamW(larger.parameters())
shardckpt.restore(
    ROOT / "t",
    shardckpt.train_state(model=larger, optimizer=moments, step=0),
    fit={"model/weight": "pad"},
)
pairs = [(model.weight, larger.weight)]
pairs += [
    (optimizer.state[model.weight][key], moments.state[larger.weight][key])
    for key in ("exp_avg", "exp_avg_sq")
]
for number, (before, after) in enumerate(pairs):
    if not np.array_equal(
        after.detach().cpu().numpy(), fitted(before.detach().cpu().numpy(), (20, 4))
    ):
        wrong.append(["train_state", number])
layout = torch_xla._XLAC._get_xla_sharding_spec(moments.state[larger.weight]["exp_avg"])
print(json.dumps({"wrong": wrong, "count": count + len(pairs), "layout": layout}))
