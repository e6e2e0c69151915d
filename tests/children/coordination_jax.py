"""One process of a jax.distributed job on CPU, coordinated through its key-value store. JSON on
stdout."""

import json
import sys

import jax

address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, num_processes=2, process_id=process)

import torch.distributed as dist

# A group of one in each process, as scripts have it, is not the job.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

from shardckpt.errors import ShardckptError
from shardckpt.frameworks.coordination import Coordinator

ours = Coordinator.current(timeout=60)
owners = ours.world.devices["jax"]
answers = {
    "kind": type(ours).__name__,
    "same object": Coordinator.current() is ours,
    "world": [ours.world.process, ours.world.processes],
    "owners": owners.of_devices([d.id for d in jax.devices()]).tolist()
    == [d.process_index for d in jax.devices()],
    "own ids": [d.id for d in jax.local_devices()],
    "all ids": owners.device_ids.tolist(),
    "run_id": ours.run_id,
    "shared": ours.share("word", {"of": process, "text": "é/#"}),
    "agreed": ours.agree("resume", lambda: [7, process]),
    "before": ours.peek("step"),
}
ours.share("peeked", None)
if process == 1:
    ours.announce("step", 1)
    ours.announce("step", 2)
ours.share("announced", None)
answers["peeked"] = ours.peek("step")
jax.distributed.shutdown()
# Until the service is gone, which process 0 ends when both have shut down.
while "after the end" not in answers:
    try:
        ours.peek("step")
    except ShardckptError as error:
        answers["after the end"] = f"{error.code}: {error}"
try:
    Coordinator.current()
except ShardckptError as error:
    answers["alone"] = f"{error.code}: {error}"
sys.stdout.write(json.dumps(answers) + "\n")
