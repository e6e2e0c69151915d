"""A training that goes on in another model, sharded by FSDP2 over the ranks of a gloo job."""

from adapted import Run
from e2e_torch import join, leave
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt


def resume(coordinator, url, wanted, given, count):
    join(coordinator)
    run = Run(2, shard=lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),))), **wanted)
    shardckpt.restore(url, run.state(step=0), **given)
    kinds = {type(value).__name__ for one in run.optimizer.state.values() for value in one.values() if value.dim()}
    losses = run.steps(count)
    leave(coordinator)
    return {"kinds": sorted(kinds), "losses": losses}
