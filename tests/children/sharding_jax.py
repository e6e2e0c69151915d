"""Oracle: what JAX and XLA say about shardings, on 8 virtual devices. Cases come as JSON on stdin,
answers go to stdout."""

import json
import os
import sys
from types import SimpleNamespace

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def spec_of(parts):
    return PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in parts))


def boxes(sharding, shape):
    indices = sharding.devices_indices_map(tuple(shape))
    return {
        device.id: [list(s.indices(dim)[:2]) for s, dim in zip(box, shape, strict=True)]
        for device, box in indices.items()
    }


def named(case):
    devices = np.array(jax.devices())[case["devices"]].reshape(case["mesh"])
    sharding = NamedSharding(Mesh(devices, tuple(case["axes"])), spec_of(case["spec"]))
    return {
        "text": str(sharding._to_xla_hlo_sharding(len(case["shape"]))),
        "boxes": boxes(sharding, case["shape"]),
    }


def gspmd(case):
    devices = [jax.devices()[i] for i in case["devices"]]
    sharding = xla_client.HloSharding.from_string(case["text"])
    return {"text": str(sharding), "boxes": boxes(GSPMDSharding(devices, sharding), case["shape"])}


def normal(text):
    try:
        return str(xla_client.HloSharding.from_string(text))
    except Exception:
        return None


def hybrid(case):
    devices = [SimpleNamespace(platform="tpu", **d) for d in case["devices"]]
    mesh = create_hybrid_device_mesh(
        case["ici"], case["dcn"], devices, allow_split_physical_axes=True
    )
    return [device.id for device in mesh.reshape(-1)]


def main():
    cases = json.load(sys.stdin)
    verbs = {"named": named, "gspmd": gspmd, "texts": normal, "hybrid": hybrid}
    sys.stdout.write(
        "\n"
        + json.dumps({name: [verb(case) for case in cases[name]] for name, verb in verbs.items()})
        + "\n"
    )


main()
