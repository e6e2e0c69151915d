"""A rank of two that load one model by transformers' plan for tensor parallelism.

    torchrun --nproc-per-node=2 pretrained_tp.py FOLDER OUT

As JSON in OUT/<rank>: logits, bytes read, bytes of its parameters, and bytes of all parameters.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import shardckpt

folder, out = map(Path, sys.argv[1:])
dist.init_process_group("gloo")
checkpoint = shardckpt.open(folder / "run")
options = {"config": folder / "config", "include": "model/**", "strip_prefix": "model/"}
plan = DistributedConfig(tp_size=2, tp_plan="auto")
model = shardckpt.from_pretrained(
    AutoModelForCausalLM, checkpoint, distributed_config=plan, **options
)
with torch.no_grad():
    logits = model(input_ids=torch.arange(24).reshape(2, 12)).logits
logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
parameters = [parameter.data for parameter in model.parameters()]
local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
document = {
    "logits": logits.tolist(),
    "read": checkpoint.stats.bytes_read,
    "kept": sum(p.numel() * p.element_size() for p in local),
    "all": sum(
        shardckpt.open(folder / "run").info(n).nbytes
        for n in checkpoint.names()
        if n.startswith("model/")
    ),
}
(out / os.environ["RANK"]).write_text(json.dumps(document))
dist.destroy_process_group()
