"""torch_xla is the oracle: boxes, replica ids, OpSharding text and hybrid meshes, on 8 virtual devices.

One process answers all cases: `tests/children/sharding_xla.py`.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import CHILDREN

from shardckpt.layout.hybrid_mesh import Device, HybridMesh
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

pytestmark = pytest.mark.xla

CHILD = CHILDREN / "sharding_xla.py"
CASES = 480
MESHES = [(8,), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 2, 1, 2)]
TOPOLOGIES = [  # torus of a slice, ici, dcn
    ((2, 2, 4), (1, 16, 1), (2, 1, 1)),
    ((2, 2, 4), (1, 4, 4), (2, 1, 1)),
    ((2, 2, 4), (2, 2, 4), (2, 1, 2)),
    ((4, 4, 4), (1, 16, 4), (4, 1, 1)),
    ((4, 4, 4), (8, 8), (2, 1)),
    ((4, 4, 8), (2, 64), (3, 1)),
    ((2, 2, 1), (2, 2), (1, 4)),
    ((4, 4, 1), (2, 8), (2, 2)),
    ((4, 2, 3), (6, 4), (2, 1)),
    ((2, 2, 2), (1, 8, 1), (1, 1, 1)),
    ((4, 4, 4), (4, 16), (1, 1)),
]


def random_spec(rng, num_axes, ndim):
    """Every axis cuts a random dimension or none; every other spec lists its axes in another order."""
    parts = [[] for _ in range(ndim)]
    for axis in rng.permutation(num_axes).tolist():
        place = rng.integers(-1, ndim)
        if place >= 0:
            parts[place].append(axis)
    return [part if len(part) > 1 else part[0] if part else None for part in parts]


def shard_cases():
    rng = np.random.default_rng(20)
    for i in range(CASES):
        mesh = MESHES[i % len(MESHES)]
        axes = [f"axis{a}" for a in range(len(mesh))]
        shape = rng.integers(1, 19, size=rng.integers(0, 5)).tolist()
        if i % 40 == 0:
            shape = [0]  # torch_xla cannot pad empty tensors of more dimensions
        spec = random_spec(rng, len(mesh), len(shape))
        if i % 3 == 0:  # by name
            spec = [[axes[a] for a in p] if isinstance(p, list) else p if p is None else axes[p] for p in spec]
        devices = rng.permutation(8).tolist() if i % 4 else list(range(8))
        yield {"mesh": mesh, "axes": axes, "devices": devices, "spec": spec, "shape": shape}


def hybrid_cases():
    for torus, ici, dcn in TOPOLOGIES:
        devices = [
            {"id": s * int(np.prod(torus)) + i, "slice_index": s, "coords": [int(c) for c in at[::-1]], "core_on_chip": 0}
            for s in range(int(np.prod(dcn)))
            for i, at in enumerate(np.ndindex(*torus[::-1]))
        ]
        yield {"devices": devices, "ici": ici, "dcn": dcn}


@pytest.fixture(scope="module")
def asked():
    cases = {"shards": list(shard_cases()), "hybrid": list(hybrid_cases())}
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    child = subprocess.run(
        [sys.executable, CHILD], input=json.dumps(cases), capture_output=True, text=True, env=env, check=False, timeout=240
    )
    assert child.returncode == 0, child.stderr[-4000:]
    answers = json.loads(child.stdout.splitlines()[-1])
    return {kind: list(zip(cases[kind], answers[kind], strict=True)) for kind in cases}


def sharding_of(case):
    mesh = Mesh(case["mesh"], case["axes"], case["devices"])
    return Sharding(mesh, PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in case["spec"])))


def boxes_as_torch_xla_says_them(found):
    """Row by row in order of the device id, which is the order of torch_xla's local devices."""
    pairs = zip(found.boxes.start.tolist(), found.boxes.stop.tolist(), found.replica_id.tolist(), strict=True)
    return [[replica, [list(ends) for ends in zip(start, stop, strict=True)]] for start, stop, replica in pairs]


def expected_boxes(case, answer):
    whole = [[0, dim] for dim in case["shape"]]
    return [[replica, whole if box is None else box] for replica, box in answer["shards"]]


def test_boxes_and_replica_ids_are_those_of_torch_xla(asked, record_property):
    assert len(asked["shards"]) >= 400
    record_property("combinations", len(asked["shards"]))
    uneven = partial = permuted = tupled = 0
    for case, answer in asked["shards"]:
        found = sharding_of(case).device_boxes(case["shape"])
        assert found.device_ids.tolist() == list(range(8))
        assert boxes_as_torch_xla_says_them(found) == expected_boxes(case, answer), case
        uneven += any(dim % part for dim, part in zip(case["shape"], found.parts, strict=True))
        partial += "last_tile_dim_replicate" in answer["text"]
        permuted += case["devices"] != sorted(case["devices"])
        tupled += any(isinstance(part, list) for part in case["spec"])
    # The random cases do reach what they are there for.
    assert min(uneven, partial, permuted, tupled) >= 60


def test_the_text_torch_xla_prints_parses_to_the_same_boxes(asked):
    for case, answer in asked["shards"]:
        read = OpSharding.parse(answer["text"], num_devices=8)
        assert boxes_as_torch_xla_says_them(read.device_boxes(case["shape"])) == expected_boxes(case, answer), case


def test_our_op_sharding_listed_is_the_text_torch_xla_prints(asked):
    for case, answer in asked["shards"]:
        ours = sharding_of(case).op_sharding(len(case["shape"]))
        assert ours.to_hlo("listed") == answer["text"], case
        assert ours == OpSharding.parse(answer["text"], num_devices=8), case


def test_the_spec_is_found_again_in_the_text_torch_xla_prints(asked):
    for case, answer in asked["shards"]:
        sharding = sharding_of(case)
        inferred = Sharding.infer(sharding.mesh, OpSharding.parse(answer["text"]), len(case["shape"]))
        assert inferred is not None, case
        sizes = sharding.mesh.axis_sizes
        cuts = [[axis for axis in axes if sizes[axis] > 1] for axes in sharding.spec.axes]
        assert [list(axes) for axes in inferred.spec.axes] == cuts, case


def test_a_hybrid_mesh_has_the_device_ids_of_torch_xla(asked):
    for case, answer in asked["hybrid"]:
        devices = [Device(d["id"], d["slice_index"], tuple(d["coords"])) for d in case["devices"]]
        mesh = HybridMesh(case["ici"], case["dcn"], None, devices)
        assert mesh.device_ids.tolist() == answer, case
