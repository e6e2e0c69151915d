"""Program: a state on a mesh of JAX devices is saved to a kind of storage that is not ours, and
restored onto another mesh."""

import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardckpt
from shardckpt.io.url import SCHEMES

SCHEMES["latent"] = ("latent_store", "LatentStore")
URL = "latent://run/100"

values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
rows = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
blocks = NamedSharding(jax.make_mesh((2, 2), ("y", "z")), PartitionSpec("z", "y"))
shardckpt.save_async(URL, {"w": jax.device_put(values, rows)}).wait()
restored = shardckpt.restore(URL, like={"w": shardckpt.Target(sharding=blocks)})["w"]
assert restored.sharding == blocks
assert all(np.array_equal(shard.data, values[shard.index]) for shard in restored.addressable_shards)
print(len(restored.addressable_shards))
