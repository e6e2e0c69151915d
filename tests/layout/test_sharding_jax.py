"""JAX and XLA are the oracles: boxes, HloSharding text, XLA's own parser and hybrid meshes, on 8 virtual devices.

One process answers all cases: `tests/children/sharding_jax.py`.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import CHILDREN

from shardckpt.errors import ShardingError
from shardckpt.layout.hybrid_mesh import Device, HybridMesh
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

CHILD = CHILDREN / "sharding_jax.py"
NAMED = 300
MESHES = [(8,), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 3), (5,), (1, 1), (2, 2, 1, 2)]

GSPMD = [  # text over 8 devices, parts per dimension
    ("{replicated}", (1, 1)),
    ("{devices=[4,2]0,1,2,3,4,5,6,7}", (4, 2)),
    ("{devices=[4,2]3,1,0,2,7,6,5,4}", (4, 2)),
    ("{devices=[4,2]<=[2,4]T(1,0)}", (4, 2)),
    ("{devices=[4,2]<=[2,2,2]T(2,0,1)}", (4, 2)),
    ("{devices=[4,2]<=[1,2,2,2,1]T(3,4,2,1,0)}", (4, 2)),
    ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", (4, 1)),
    ("{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dims={replicated}}", (2, 1)),
    ("{devices=[2,2,2]7,6,5,4,3,2,1,0 last_tile_dim_replicate}", (2, 2)),
    ("{devices=[2,1,2,2]7,3,5,4,6,2,1,0 last_tile_dims={replicated, replicated}}", (2, 1)),
    ("{devices=[2,1,2,2]<=[2,2,2]T(1,2,0) last_tile_dims={replicated, replicated}}", (2, 1)),
    ("{devices=[8,1,1]<=[2,2,2]T(0,1,2) last_tile_dim_replicate}", (8, 1)),
    ("{devices=[1,1,8]<=[8] last_tile_dim_replicate}", (1, 1)),
]
NORMAL = [  # beyond those above: XLA normalizes them, and so do we
    "{manual}",
    "{unknown}",
    "{unreduced}",
    "{maximal device=3}",
    "{ devices=[ 4 , 2 ] 0 , 1,2,3,\n4,5,6,7 }",
    "{devices=[2,2,2]<=[8] last_tile_dims={replicated, manual}}",
    "{devices=[2,2,2]<=[8] last_tile_dims={manual,replicated}}",
    "{devices=[2,2,2]3,2,1,0,7,5,6,4 last_tile_dims={manual,replicated}}",
    "{devices=[2,2,2]3,2,1,0,7,5,6,4 last_tile_dims={replicated,manual}}",
    "{devices=[2,2,1,2]0,1,2,3,4,5,6,7 last_tile_dims={manual,replicated}}",
    "{devices=[2,4]<=[8] last_tile_dims={unreduced}}",
    "{devices=[2,2,2]<=[8] last_tile_dims={unreduced, manual}}",
    "{devices=[1,2,4]<=[8] last_tile_dims={manual, manual}}",
    "{devices=[2,2,2]<=[8] last_tile_dims={manual, manual}}",
    "{devices=[1,2,4]<=[8] last_tile_dims={manual, replicated}}",
    "{devices=[2,2]0,1,2,3 last_tile_dims={}}",
    "{devices=[8]<=[2,2,2]T(2,1,0)}",
]
REFUSED = [  # by XLA's parser as well
    "{replicated",
    "replicated",
    "{replicated} x",
    "{maximal}",
    "{device=3}",
    "{devices=[]0}",
    "{devices=[8]<=[4,2]}",
    "{devices=[2,2,2]<=[8] last_tile_dims={unknown,manual}}",
]
TOPOLOGIES = [  # kind, torus of a slice and its cores per chip, ici, dcn
    ("TPU v4", (2, 2, 4, 1), (1, 4, 4), (2, 1, 1)),
    ("TPU v4", (4, 4, 4, 1), (2, 4, 8), (1, 2, 1)),
    ("TPU v4", (4, 4, 4, 1), (1, 16, 4), (4, 1, 1)),
    ("TPU v4", (2, 2, 1, 1), (4, 1), (2, 2)),
    ("TPU v5p", (4, 4, 8, 1), (2, 8, 8), (2, 1, 2)),
    ("TPU v5p", (4, 4, 4, 2), (8, 16), (2, 1)),
    ("TPU v5p", (4, 4, 4, 2), (64, 2), (1, 2)),
    ("TPU v5 lite", (4, 6, 1, 1), (3, 8), (1, 2)),
]


def random_spec(rng, axes, ndim):
    parts = [[] for _ in range(ndim)]
    for axis in rng.permutation(axes).tolist():
        place = rng.integers(-1, ndim)
        if place >= 0:
            parts[place].append(axis)
    return [part if len(part) > 1 else part[0] if part else None for part in parts]


def named_cases():
    rng = np.random.default_rng(8)
    for i in range(NAMED):
        mesh = MESHES[i % len(MESHES)]
        axes = [f"axis{a}" for a in range(len(mesh))]
        ndim = int(rng.integers(0, 4))
        spec = random_spec(rng, axes, ndim)
        size = dict(zip(axes, mesh, strict=True))
        parts = [int(np.prod([size[a] for a in ([p] if isinstance(p, str) else p or [])])) for p in spec]
        shape = [part * int(rng.integers(1, 4)) for part in parts]
        if i % 5 == 0:  # trailing dimensions that the spec leaves out
            shape += rng.integers(0, 4, size=1).tolist()
        devices = rng.permutation(8)[: int(np.prod(mesh))].tolist()
        yield {"mesh": mesh, "axes": axes, "devices": devices, "spec": spec, "shape": shape}


def gspmd_cases():
    rng = np.random.default_rng(9)
    for text, parts in GSPMD:
        yield {"text": text, "shape": [3 * part for part in parts], "devices": rng.permutation(8).tolist()}


def hybrid_cases():
    for kind, torus, ici, dcn in TOPOLOGIES:
        size = int(np.prod(torus))
        devices = []
        for s in reversed(range(int(np.prod(dcn)))):
            ids = 2048 * s + np.random.default_rng(s).permutation(size)
            for i, (*coords, core) in zip(ids.tolist(), np.ndindex(*torus), strict=True):
                devices.append({"id": i, "device_kind": kind, "slice_index": 7 + s, "coords": coords, "core_on_chip": core})
        yield {"devices": devices, "ici": ici, "dcn": dcn}


@pytest.fixture(scope="module")
def asked():
    cases = {
        "named": list(named_cases()),
        "gspmd": list(gspmd_cases()),
        "texts": [text for text, _ in GSPMD] + NORMAL + REFUSED,
        "hybrid": list(hybrid_cases()),
    }
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    child = subprocess.run(
        [sys.executable, CHILD], input=json.dumps(cases), capture_output=True, text=True, env=env, check=False, timeout=240
    )
    assert child.returncode == 0, child.stderr[-4000:]
    answers = json.loads(child.stdout.splitlines()[-1])
    return {kind: list(zip(cases[kind], answers[kind], strict=True)) for kind in cases}


def sharding_of(case):
    mesh = Mesh(case["mesh"], case["axes"], case["devices"])
    return Sharding(mesh, PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in case["spec"])))


def by_device(found):
    rows = zip(found.device_ids.tolist(), found.boxes.start.tolist(), found.boxes.stop.tolist(), strict=True)
    return {str(device): [list(ends) for ends in zip(start, stop, strict=True)] for device, start, stop in rows}


def test_boxes_are_those_of_a_named_sharding(asked):
    for case, answer in asked["named"]:
        assert by_device(sharding_of(case).device_boxes(case["shape"])) == answer["boxes"], case


def test_op_sharding_over_positions_is_the_text_jax_prints(asked):
    """JAX numbers the positions of the mesh; the ids come from the device list beside it."""
    for case, answer in asked["named"]:
        sharding = sharding_of(case)
        ndim = len(case["shape"])
        over_positions = Sharding(Mesh(case["mesh"], case["axes"]), sharding.spec).op_sharding(ndim)
        assert over_positions.to_hlo() == answer["text"], case
        relabelled = OpSharding.parse(answer["text"]).relabel(sharding.mesh.device_ids)
        assert relabelled.equivalent(sharding.op_sharding(ndim)), case
        assert by_device(relabelled.device_boxes(case["shape"])) == answer["boxes"], case


def test_the_spec_is_found_again_in_the_text_jax_prints(asked):
    for case, answer in asked["named"]:
        sharding = sharding_of(case)
        ndim = len(case["shape"])
        op_sharding = OpSharding.parse(answer["text"]).relabel(sharding.mesh.device_ids)
        inferred = Sharding.infer(sharding.mesh, op_sharding, ndim)
        assert inferred is not None, case
        assert inferred.op_sharding(ndim) == sharding.op_sharding(ndim), case


def test_boxes_of_a_text_are_those_of_a_gspmd_sharding(asked):
    for case, answer in asked["gspmd"]:
        found = OpSharding.parse(case["text"]).relabel(case["devices"]).device_boxes(case["shape"])
        assert by_device(found) == answer["boxes"], case


def test_the_normal_form_is_xlas(asked):
    for text, normal in asked["texts"]:
        if text not in REFUSED:
            assert OpSharding.parse(text).canonical().to_hlo("listed") == OpSharding.parse(normal).to_hlo("listed"), text
            assert OpSharding.parse(text).equivalent(OpSharding.parse(normal)), text


def test_an_iota_is_printed_as_xla_prints_it(asked):
    for text, normal in asked["texts"]:
        if "<=" in text and text not in REFUSED:
            assert OpSharding.parse(text).canonical().to_hlo("auto") == normal, text


def test_what_xlas_parser_refuses_is_refused(asked):
    for text, normal in asked["texts"]:
        if text in REFUSED:
            assert normal is None, text
            with pytest.raises(ShardingError):
                OpSharding.parse(text)


def test_a_hybrid_mesh_has_the_device_ids_of_jax(asked):
    for case, answer in asked["hybrid"]:
        devices = [Device(d["id"], d["slice_index"], tuple(d["coords"]), d["core_on_chip"]) for d in case["devices"]]
        assert HybridMesh(case["ici"], case["dcn"], None, devices).device_ids.tolist() == answer, case
