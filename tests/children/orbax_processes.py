"""One of two processes of test_from_orbax.py that save one state with Orbax, each what its own four
devices hold."""

import faulthandler
import sys
import warnings

warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(250, exit=True)  # it would wait for the other one for ever

import jax

ADDRESS, PROCESS, ROOT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, num_processes=2, process_id=PROCESS)

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
array = np.random.default_rng(0).standard_normal((32, 24)).astype("float32")


def put(*spec):
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: array[index]
    )


state = {
    "both": put("data", "model"),
    "tuple": put(("model", "data")),
    "replicated": put(),
    "numpy": np.arange(5),
    "step": 3,
}
for name, options in {
    "ocdbt": {"use_ocdbt": True, "use_zarr3": True},
    "plain": {"use_ocdbt": False},
}.items():
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(f"{ROOT}/{name}", args=ocp.args.PyTreeSave(state))
