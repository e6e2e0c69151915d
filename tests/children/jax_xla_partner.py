"""torch_xla's half of what test_jax.py asks: save for JAX, and when stdin says so, restore what JAX
has saved."""

import json
import os
import random
import sys

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="3")

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from jax_cases import NAMES, draw_tensors, elements, layout, same_bits

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding, Target
from shardckpt.frameworks.torch import array_of, tensor_of
from shardckpt.layout.dtypes import by_name

ROOT, CROSS = sys.argv[1], int(sys.argv[2])
DTYPES = ["float32", "bfloat16", "int32", "bool", "uint8", "float8_e5m2", "complex64"]
xr.use_spmd()


def parts_of(case):
    return tuple(tuple(part) if isinstance(part, list) else part for part in case["spec"])


def save():
    rng = random.Random(4)
    state = {}
    for t in draw_tensors(CROSS, DTYPES, 2):
        array = elements(t["seed"], t["shape"], t["dtype"])
        tensor = tensor_of(array, by_name(t["dtype"])).to("xla")
        if array.size and array.ndim:
            case = layout(rng, t["shape"], even=False)
            xs.mark_sharding(
                tensor,
                xs.Mesh(case["devices"], tuple(case["mesh"]), NAMES[: len(case["mesh"])]),
                parts_of(case),
            )
        state[t["name"]] = tensor
    shardckpt.save(f"{ROOT}/torch_xla", state)


def restore():
    rng = random.Random(5)
    tensors = list(draw_tensors(CROSS, DTYPES, 3))
    like = {}
    for t in tensors:
        case = layout(rng, t["shape"], even=False)
        mesh = Mesh(case["mesh"], NAMES[: len(case["mesh"])], case["devices"])
        like[t["name"]] = Target(Sharding(mesh, PartitionSpec(*parts_of(case))))
    restored = shardckpt.restore(f"{ROOT}/jax", like)
    assert all(isinstance(r, torch.Tensor) and r.device.type == "xla" for r in restored.values())
    # On their way to the CPU torch_xla changes not-a-numbers and flushes subnormal numbers; there
    # are none here.
    arrays = {t["name"]: array_of(restored[t["name"]].cpu(), by_name(t["dtype"])) for t in tensors}
    return [
        t
        for t in tensors
        if not same_bits(
            arrays[t["name"]], elements(t["seed"], t["shape"], t["dtype"], normal=True)
        )
    ]


def jax_is_awake():
    """Whether anybody has made JAX look for devices. (torch_xla imports jax by itself.)"""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


save()
print("saved", flush=True)
sys.stdin.readline()
print(json.dumps({"wrong from jax": restore(), "jax is awake": jax_is_awake()}))
