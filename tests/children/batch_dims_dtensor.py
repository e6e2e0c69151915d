"""DTensor's layout of the result of each operator on a tensor that is cut in its first dimension:
prints JSON, name → layout."""

import json

import torch
import torch.distributed as dist
from operators import CONSTANTS, OPERATORS, SAMPLES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def text(placement):
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, Partial):
        return f"Partial({'mean' if placement.reduce_op == 'avg' else placement.reduce_op})"
    assert isinstance(placement, Replicate), placement
    return "Replicate"


def placed(function, mesh):
    x = DTensor.from_local(torch.randn(SAMPLES[0] // 2, *SAMPLES[1:]), mesh, [Shard(0)])
    w = DTensor.from_local(torch.randn(CONSTANTS), mesh, [Replicate()])
    try:
        return text(function(x, w).placements[0])
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    print(json.dumps({name: placed(function, mesh) for name, function in OPERATORS.items()}))
    dist.destroy_process_group()
