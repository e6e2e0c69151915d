"""One of two JAX processes with 4 devices each: what of a global array is its own? JSON on stdout."""

import json
import sys

import jax

address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardckpt
from shardckpt import frameworks
from shardckpt.dtypes import by_name
from shardckpt.frameworks.base import Target

F32 = by_name("float32")
WHOLE = np.arange(64, dtype=np.float32).reshape(8, 8)
IDS = np.array([d.id for d in jax.devices()])
DEVICES = dict(zip(IDS.tolist(), jax.devices(), strict=True))


def seen(ids, shape, spec):
    """Save from and restore into a layout over devices of both processes."""
    devices = np.array([DEVICES[i] for i in ids]).reshape(shape)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*spec))
    leaf = jax.make_array_from_callback(WHOLE.shape, sharding, lambda index: WHOLE[index], dtype=np.float32)
    source = frameworks.source("w", leaf)
    (arrays,) = frameworks.fetch([source])
    ours = shardckpt.Sharding(shardckpt.Mesh(shape, ("x", "y"), ids), shardckpt.PartitionSpec(*spec))
    restored = []
    for like in (leaf, Target(ours), Target(sharding)):
        sink = frameworks.target("w", like, WHOLE.shape, F32)
        restored.append(sink.place([WHOLE[sink.boxes[i].slices].copy() for i in range(len(sink.boxes))]))
    return {
        "layout": repr(source.layout) == repr(ours),
        "boxes": [[box.start, box.stop] for box in (source.boxes[i] for i in range(len(source.boxes)))],
        "fetched": all((a == WHOLE[source.boxes[i].slices]).all() for i, a in enumerate(arrays)),
        "restored": all(
            r.shape == WHOLE.shape
            and r.sharding.is_equivalent_to(sharding, 2)
            and len(r.addressable_shards) == len(leaf.addressable_shards)
            and all((np.asarray(s.data) == WHOLE[s.index]).all() for s in r.addressable_shards)
            for r in restored
        ),
    }


order = np.argsort(IDS)
mine, others = ([d.id for d in jax.devices() if (d.process_index == process) is own] for own in (True, False))
first = IDS[order][:4].tolist()
answers = {
    "ids": IDS.tolist(),
    "rows": seen(IDS.tolist(), (4, 2), ("x", None)),
    "columns": seen(IDS[::-1].tolist(), (2, 4), (None, ("y", "x"))),
    "interleaved": seen(IDS.reshape(2, 4).T.reshape(-1).tolist(), (4, 2), ("x", "y")),
    "replicated": seen(IDS.tolist(), (4, 2), (None, None)),
    "first process only": seen(first, (2, 2), ("x", "y")),
}
sys.stdout.write(json.dumps(answers) + "\n")
