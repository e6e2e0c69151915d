"""A process whose address space ends a little above what it has: each action is refused memory;
prints the kind of each error."""

import resource
import sys
import threading

import numpy as np

import shardckpt

place = sys.argv[1]
threading.stack_size(256 << 10)  # threads are not what memory is to be short of
shardckpt.save(f"{place}/small", {"w": np.ones(1000)})
# Imports what it needs.
shardckpt.export_safetensors(f"{place}/small", f"{place}/small.safetensors")
shardckpt.reshard(f"{place}/small", f"{place}/small2")
like = {"w": np.zeros(1000)}
large = np.zeros(64 << 20, np.uint8)
manager = shardckpt.CheckpointManager(f"{place}/run", every=1)
manager.save(1, like)
manager.wait()
saved = shardckpt.save_async(f"{place}/small3", like)
saved.wait()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), -1))
for name, action in {
    "export_safetensors": lambda: shardckpt.export_safetensors(
        f"{place}/large", f"{place}/large.safetensors", memory_limit="1GiB"
    ),
    "restore": lambda: shardckpt.restore(f"{place}/large"),
    "save_async": lambda: shardckpt.save_async(f"{place}/large2", {"w": large}).wait(),
    "manager": lambda: (manager.save(2, {"w": large}), manager.wait()),
}.items():
    try:
        action()
    except Exception as e:
        print(name, type(e).__name__, str(e)[:200])
