"""Saves and restores a tensor on the one device that there is, with SPMD or without. JSON on stdin,
answers on stdout."""

import json
import os
import sys

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", TF_CPP_MIN_LOG_LEVEL="3")

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr

from shardckpt import frameworks
from shardckpt.errors import LeafError
from shardckpt.frameworks.base import Target
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.op_sharding import OpSharding

if json.load(sys.stdin)["spmd"]:
    xr.use_spmd()

tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).to("xla")
torch_xla.sync()
expected = np.arange(12).reshape(3, 4)

source = frameworks.source("w", tensor)
((array,),) = frameworks.fetch([source])

sink = frameworks.target("w", tensor, (), by_name("float32"))
buffer = expected.astype(sink.dtype.numpy)
restored = sink.place([buffer])
buffer[...] = 77
try:
    frameworks.target("w", Target(OpSharding.replicated(1)), (3, 4), by_name("float32"))
    target = True
except LeafError:
    target = False

print(
    json.dumps(
        {
            "layout": str(source.layout),
            "fetched": bool((array == expected).all()),
            "restored": restored.dtype == torch.bfloat16
            and bool((restored.cpu().float().numpy() == expected).all()),
            "device": restored.device.type,
            "boxes": len(source.boxes),
            "target": target,
        }
    )
)
