"""Run by test_from_orbax.py on 8 virtual devices: checkpoints that Orbax writes, and what Orbax
itself reads of them.

Answers with a line of JSON: checkpoint → the state as Orbax restores it.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

warnings.simplefilter("ignore")
logging.disable()

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from foreign_states import described
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import msgpack_utils
from orbax.checkpoint._src.metadata.tree import PyTreeMetadataOptions
from orbax.checkpoint.experimental import v1

ROOT = sys.argv[1]
MESH = Mesh(np.array(jax.devices())[[1, 0, 2, 3, 4, 5, 7, 6]].reshape(4, 2), ("data", "model"))
answers = {}


class Moments(NamedTuple):
    mu: object
    nu: object


def put(array, *spec):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*spec)))


def numbers(shape, dtype):
    return np.random.default_rng(len(shape)).integers(0, 7, shape).astype(jnp.dtype(dtype))


def numpy(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def answer(name, state):
    answers[name] = described(jax.tree.map(numpy, state))


STATE = {
    "params": {
        "both": put(numbers((8, 12), "float32"), "data", "model"),
        "tuple": put(numbers((16, 3), "bfloat16"), ("model", "data")),
        "one axis": put(numbers((2, 6, 4), "int8"), None, "model"),
        "replicated": put(numbers((10,), "float16")),
        "small pieces": put(np.random.default_rng(0).standard_normal((64, 33)).astype("float32")),
    },
    "dtypes": {
        dtype: put(numbers((8, 3), dtype), "data")
        for dtype in ("int4", "float8_e4m3fn", "complex64", "bool", "uint32")
    },
    "one device": jax.device_put(numbers((3, 5), "float32"), jax.devices()[3]),
    "0-d": put(np.float32(3)),
    "numpy": {
        "zeros": np.zeros((4, 7), np.float32),
        "0-d": np.array(5, np.int16),
        "bfloat16": np.ones(4, jnp.bfloat16),
    },
    "scalars": {
        "int": 7,
        "float": float("nan"),
        "bool": True,
        "numpy": np.float64(2.5),
        "negative": -3,
    },
    "texts": {"a": "héllo", "nested/name": "…", "b.c": {"d": ""}},
    "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
    "list": [np.arange(3), {"a": np.ones(2)}, [np.zeros(1), (np.ones(1), np.zeros((2, 2)))]],
    "many": [np.full(2, i) for i in range(12)],
    "a.b": {"x/y": np.ones(2)},
    "integer keys": {3: np.ones(1), 4: np.zeros(2)},
    "named": Moments(np.ones(3), {"x": np.zeros(1)}),
    "keys": {"one": jax.random.key(3), "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 4)},
}


def layouts():
    """Every way in which Orbax stores arrays."""
    for name, options in {
        "ocdbt, zarr 2": {"use_ocdbt": True, "use_zarr3": False},
        "ocdbt, zarr 3": {"use_ocdbt": True, "use_zarr3": True},
        "zarr 2": {"use_ocdbt": False, "use_zarr3": False},
        "zarr 3": {"use_ocdbt": False, "use_zarr3": True},
        "uncompressed": {"use_ocdbt": True, "use_zarr3": True, "use_compression": False},
    }.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            arguments = ocp.args.PyTreeSave(
                STATE,
                save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 11), STATE),
            )
            checkpointer.save(f"{ROOT}/{name}", args=arguments)
            answer(name, checkpointer.restore(f"{ROOT}/{name}"))


def steps():
    """Write checkpoints with Orbax's managers."""
    small = {"w": STATE["params"]["both"], "t": (np.ones(2), 5)}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(f"{ROOT}/steps", options=options) as manager:
        for step in (9, 10):
            manager.save(
                step,
                args=ocp.args.StandardSave(small),
                metrics={"loss": 1.5},
                custom_metadata={"run": [7]},
            )
        answer("steps/10", manager.restore(10))
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=8)
    with ocp.CheckpointManager(f"{ROOT}/items", options=options) as manager:
        items = {
            "state": ocp.args.PyTreeSave(small),
            "params": ocp.args.StandardSave({"w": small["w"]}),
            "config": ocp.args.JsonSave({"x": [1, {"y": None}]}),
        }
        manager.save(5, args=ocp.args.Composite(**items))
        answer("items/step_00000005", dict(manager.restore(5).items()))
    v1.save(f"{ROOT}/v1", small)
    answer("v1", v1.load(f"{ROOT}/v1"))


def containers():
    """Tuples and named tuples, where Orbax is asked to tell them from lists and dicts."""
    handler = ocp.PyTreeCheckpointHandler(
        pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True)
    )
    with ocp.Checkpointer(handler) as checkpointer:
        state = {
            "t": (np.ones(2), [np.zeros(1)]),
            "m": Moments(np.ones(1), (np.ones(2),)),
            "empty": (),
        }
        checkpointer.save(f"{ROOT}/rich", args=ocp.args.PyTreeSave(state))
        restored = checkpointer.restore(f"{ROOT}/rich")
        answer("rich", {**restored, "m": restored["m"]._asdict()})


def older():
    """Write a checkpoint like those of older releases, which Orbax still reads: no metadata but a
    msgpack file, and no chunks of zeros."""
    place = Path(ROOT, "older")
    zeros = put(np.zeros((8, 2), np.float32), "data")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(
            place,
            args=ocp.args.PyTreeSave({"w": STATE["params"]["both"], "list": [zeros, np.ones(2)]}),
        )
        for file in (
            "_METADATA",
            "_CHECKPOINT_METADATA",
            "commit_success.txt",
            "list.0/0.0",
            "list.0/3.0",
        ):
            (place / file).unlink(missing_ok=not file.startswith("list"))
        tree = {
            "w": "PLACEHOLDER://w",
            "list": ["PLACEHOLDER://list.0", "PLACEHOLDER://list.1"],
            "array": np.arange(6).reshape(2, 3),
            "bfloat16": np.ones((2, 2), jnp.bfloat16),
            "small": {
                "step": 7,
                "text": "x",
                "none": None,
                "empty": {},
                "scalar": np.float32(2),
                "complex": 1 + 2j,
            },
        }
        (place / "checkpoint").write_bytes(msgpack_utils.msgpack_serialize(tree))
        answer("older", checkpointer.restore(place))


layouts()
steps()
containers()
older()
sys.stdout.write(json.dumps(answers) + "\n")
