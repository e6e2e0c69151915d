"""Restore exported checkpoints with Orbax on 8 virtual devices. Argument: a directory with
`checkpoint`; answers as JSON."""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ |= {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
warnings.simplefilter("ignore")
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardckpt
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

root = Path(sys.argv[1])
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


def differences(actual, expected, name=""):
    """The names of what Orbax gives back otherwise than it was; it knows text keys and lists
    only."""
    if isinstance(expected, dict):
        if sorted(actual) != sorted(map(str, expected)):
            return [f"{name}: {sorted(actual)}"]
        return [
            odd
            for key, inner in expected.items()
            for odd in differences(actual[str(key)], inner, f"{name}/{key}")
        ]
    if isinstance(expected, list | tuple) and len(expected):
        return [
            odd
            for i, inner in enumerate(expected)
            for odd in differences(actual[i], inner, f"{name}/{i}")
        ]
    if isinstance(expected, np.ndarray):
        actual = np.asarray(actual)
        same = (actual.dtype, actual.shape, actual.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )
    else:
        same = actual == expected
    return [] if same else [f"{name}: {actual!r}"]


def targets(value):
    """Every array on a sharding of its own: its first dimension over one axis, or both, where they
    divide it."""
    if isinstance(value, dict):
        return {str(key): targets(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [targets(inner) for inner in value]
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    ways = {8: ("x", "y"), 4: "y", 2: "x"}
    spec = next(
        (
            axes
            for parts, axes in ways.items()
            if value.size and value.ndim and value.shape[0] % parts == 0
        ),
        None,
    )
    sharding = NamedSharding(MESH, PartitionSpec(spec) if value.ndim else PartitionSpec())
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def export(source, place, **options):
    write_state(
        Checkpoint(root / source),
        parse(root / place),
        "orbax",
        StateOptions(memory_limit=64 << 20, **options),
    )
    return root / place


answers = {}
expected = shardckpt.restore(root / "checkpoint")
everything = export("checkpoint", "everything")
pytree = ocp.PyTreeCheckpointer()
as_it_was = pytree.restore(everything)
answers["as it was"] = differences(as_it_was, expected)
answers["recorded"] = {
    name: [
        as_it_was["model"][name].sharding.mesh.device_ids.tolist(),
        str(as_it_was["model"][name].sharding.spec),
    ]
    for name in ("w", "wide", "replicated", "rows")
}
answers["arrays of numpy"] = sorted(
    name for name, array in as_it_was["model"].items() if isinstance(array, np.ndarray)
)

target = targets(expected)
args = ocp.args.PyTreeRestore(
    target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
)
placed = pytree.restore(everything, args=args)
answers["placed"] = differences(placed, expected)
answers["shardings"] = sum(
    array.sharding.is_equivalent_to(wish.sharding, array.ndim)
    for array, wish in zip(jax.tree.leaves(placed), jax.tree.leaves(target), strict=True)
    if isinstance(array, jax.Array)
)

standard = ocp.StandardCheckpointer()
arrays = export("checkpoint", "arrays", exclude="text")
fewer = {key: value for key, value in expected.items() if key != "text"}
answers["standard"] = differences(standard.restore(arrays, targets(fewer)), fewer)
answers["standard as it was"] = differences(standard.restore(arrays), fewer)

shardckpt.save(root / "jax", {"key": jax.random.key(3)})
keys = pytree.restore(
    export("jax", "keys"),
    restore_args={"key": ocp.ArrayRestoreArgs(sharding=NamedSharding(MESH, PartitionSpec()))},
)
answers["key"] = [str(jax.random.key_impl(keys["key"])), jax.random.key_data(keys["key"]).tolist()]

chunk = everything / "model.rows" / "c" / "0" / "0"
chunk.write_bytes(bytes(chunk.stat().st_size))
try:
    pytree.restore(everything)
except Exception as error:
    answers["damage"] = str(error.__cause__ or error.__context__)
print(json.dumps(answers))
