"""Oracle: what torch_xla says about shardings, on 8 virtual devices. Cases come as JSON on stdin,
answers go to stdout."""

import json
import os
import sys
from unittest import mock

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr


def spec_of(parts):
    return tuple(tuple(part) if isinstance(part, list) else part for part in parts)


def shards(case):
    mesh = xs.Mesh(case["devices"], tuple(case["mesh"]), tuple(case["axes"]))
    tensor = torch.zeros(case["shape"]).to("xla")
    xs.mark_sharding(tensor, mesh, spec_of(case["spec"]))
    (rows,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    boxes = [
        [replica, None if box is Ellipsis else [[s.start, s.stop] for s in box]]
        for replica, box in rows
    ]
    return {"text": torch_xla._XLAC._get_xla_sharding_spec(tensor), "shards": boxes}


def hybrid(case):
    attributes = [{"name": f"TPU:{d['id']}", **d} for d in case["devices"]]
    if len({d["slice_index"] for d in case["devices"]}) == 1:
        attributes = [{k: v for k, v in d.items() if k != "slice_index"} for d in attributes]
    # The oracle is told of devices that are not here; what it makes of them is its own.
    with (
        mock.patch.object(xr, "global_runtime_device_attributes", return_value=attributes),
        mock.patch.object(xr, "global_runtime_device_count", return_value=len(attributes)),
        mock.patch.object(xm, "xla_device_hw", return_value="TPU"),
    ):
        mesh = xs.HybridMesh(ici_mesh_shape=tuple(case["ici"]), dcn_mesh_shape=tuple(case["dcn"]))
    return mesh.device_ids.tolist()


def main():
    xr.use_spmd()
    torch_xla.device()
    cases = json.load(sys.stdin)
    answers = {
        "shards": [shards(case) for case in cases["shards"]],
        "hybrid": [hybrid(case) for case in cases["hybrid"]],
    }
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


main()
