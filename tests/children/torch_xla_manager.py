"""Saves with torch_xla's CheckpointManager on 8 virtual devices: step 10, and step 20
asynchronously. The directory is JSON on stdin."""

import json
import os
import sys
import warnings

os.environ.update(
    PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="3", TORCH_CPP_LOG_LEVEL="ERROR"
)
warnings.simplefilter("ignore")

import numpy as np
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import CheckpointManager

directory = json.load(sys.stdin)
xr.use_spmd()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))


def put(tensor, spec):
    tensor = tensor.to("xla")
    xs.mark_sharding(tensor, mesh, spec)
    return tensor


def numbers(shape, dtype):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


layouts = {
    "both": ((8, 6), torch.float32, ("x", "y")),
    "uneven": ((10, 3), torch.bfloat16, (("x", "y"), None)),
    "columns": ((3, 16), torch.int64, (None, ("y", "x"))),
    "unsigned": ((16,), torch.uint16, (("x", "y"),)),
    "replicated": ((5,), torch.float32, (None,)),
    "dropped": ((8, 2), torch.float32, ("x", None)),
}
state = {
    "model": {
        name: put(numbers(shape, dtype), spec) for name, (shape, dtype, spec) in layouts.items()
    },
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    },
    "epoch": 2,
}
manager = CheckpointManager(directory, 1, chkpt_on_preemption=False)
assert manager.save(10, state)
assert manager.save_async(20, state)
manager.join()
