"""JAX and torch_xla are the oracles: boxes, OpSharding text, specs and hybrid meshes, on 8 virtual
devices.

One process of each answers all cases: `tests/children/sharding_jax.py` and
`tests/children/sharding_xla.py`.
"""

from __future__ import annotations

import json
import os
import sys

import forks
import numpy as np
import pytest
from paths import CHILDREN

from shardckpt.errors import ShardingError
from shardckpt.layout.hybrid_mesh import Device, HybridMesh
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

JAX_CASES, XLA_CASES = 300, 480
JAX_MESHES = [
    (8,),
    (8, 1),
    (1, 8),
    (4, 2),
    (2, 4),
    (2, 2, 2),
    (1, 2, 4),
    (4, 1, 2),
    (2, 3),
    (5,),
    (1, 1),
    (2, 2, 1, 2),
]
XLA_MESHES = [(8,), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 2, 1, 2)]

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
JAX_TOPOLOGIES = [  # kind, torus of a slice and its cores per chip, ici, dcn
    ("TPU v4", (2, 2, 4, 1), (1, 4, 4), (2, 1, 1)),
    ("TPU v4", (4, 4, 4, 1), (2, 4, 8), (1, 2, 1)),
    ("TPU v4", (4, 4, 4, 1), (1, 16, 4), (4, 1, 1)),
    ("TPU v4", (2, 2, 1, 1), (4, 1), (2, 2)),
    ("TPU v5p", (4, 4, 8, 1), (2, 8, 8), (2, 1, 2)),
    ("TPU v5p", (4, 4, 4, 2), (8, 16), (2, 1)),
    ("TPU v5p", (4, 4, 4, 2), (64, 2), (1, 2)),
    ("TPU v5 lite", (4, 6, 1, 1), (3, 8), (1, 2)),
]
XLA_TOPOLOGIES = [  # torus of a slice, ici, dcn
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


def random_spec(rng, axes, ndim):
    """Every axis cuts a random dimension or none; every other spec lists its axes in another
    order."""
    parts = [[] for _ in range(ndim)]
    for axis in rng.permutation(axes).tolist():
        place = rng.integers(-1, ndim)
        if place >= 0:
            parts[place].append(axis)
    return [part if len(part) > 1 else part[0] if part else None for part in parts]


def jax_cases():
    rng = np.random.default_rng(8)
    for i in range(JAX_CASES):
        mesh = JAX_MESHES[i % len(JAX_MESHES)]
        axes = [f"axis{a}" for a in range(len(mesh))]
        ndim = int(rng.integers(0, 4))
        spec = random_spec(rng, axes, ndim)
        size = dict(zip(axes, mesh, strict=True))
        parts = [
            int(np.prod([size[a] for a in ([p] if isinstance(p, str) else p or [])])) for p in spec
        ]
        shape = [part * int(rng.integers(1, 4)) for part in parts]
        if i % 5 == 0:  # trailing dimensions that the spec leaves out
            shape += rng.integers(0, 4, size=1).tolist()
        devices = rng.permutation(8)[: int(np.prod(mesh))].tolist()
        yield {"mesh": mesh, "axes": axes, "devices": devices, "spec": spec, "shape": shape}


def xla_cases():
    rng = np.random.default_rng(20)
    for i in range(XLA_CASES):
        mesh = XLA_MESHES[i % len(XLA_MESHES)]
        axes = [f"axis{a}" for a in range(len(mesh))]
        shape = rng.integers(1, 19, size=rng.integers(0, 5)).tolist()
        if i % 40 == 0:
            shape = [0]  # torch_xla cannot pad empty tensors of more dimensions
        spec = random_spec(rng, range(len(mesh)), len(shape))
        if i % 3 == 0:  # by name
            spec = [
                [axes[a] for a in p] if isinstance(p, list) else p if p is None else axes[p]
                for p in spec
            ]
        devices = rng.permutation(8).tolist() if i % 4 else list(range(8))
        yield {"mesh": mesh, "axes": axes, "devices": devices, "spec": spec, "shape": shape}


def gspmd_cases():
    rng = np.random.default_rng(9)
    for text, parts in GSPMD:
        yield {
            "text": text,
            "shape": [3 * part for part in parts],
            "devices": rng.permutation(8).tolist(),
        }


def jax_hybrid_cases():
    for kind, torus, ici, dcn in JAX_TOPOLOGIES:
        size = int(np.prod(torus))
        devices = []
        for s in reversed(range(int(np.prod(dcn)))):
            ids = 2048 * s + np.random.default_rng(s).permutation(size)
            for i, (*coords, core) in zip(ids.tolist(), np.ndindex(*torus), strict=True):
                devices.append(
                    {
                        "id": i,
                        "device_kind": kind,
                        "slice_index": 7 + s,
                        "coords": coords,
                        "core_on_chip": core,
                    }
                )
        yield {"devices": devices, "ici": ici, "dcn": dcn}


def xla_hybrid_cases():
    for torus, ici, dcn in XLA_TOPOLOGIES:
        devices = [
            {
                "id": s * int(np.prod(torus)) + i,
                "slice_index": s,
                "coords": [int(c) for c in at[::-1]],
                "core_on_chip": 0,
            }
            for s in range(int(np.prod(dcn)))
            for i, at in enumerate(np.ndindex(*torus[::-1]))
        ]
        yield {"devices": devices, "ici": ici, "dcn": dcn}


def ask(program, cases, **environment):
    """Each case with the answer of a program that runs the oracle."""
    env = {**os.environ, **environment}
    child = forks.run(
        [sys.executable, CHILDREN / program],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    answers = json.loads(child.stdout.splitlines()[-1])
    return {kind: list(zip(cases[kind], answers[kind], strict=True)) for kind in cases}


class Jax:
    """Numbers the positions of a mesh in its text; the ids come from the device list beside it."""

    def __init__(self):
        texts = [text for text, _ in GSPMD] + NORMAL + REFUSED
        cases = {
            "named": list(jax_cases()),
            "gspmd": list(gspmd_cases()),
            "texts": texts,
            "hybrid": list(jax_hybrid_cases()),
        }
        self.asked = ask(
            "sharding_jax.py",
            cases,
            JAX_PLATFORMS="cpu",
            XLA_FLAGS="--xla_force_host_platform_device_count=8",
        )
        self.shardings, self.hybrid = self.asked["named"], self.asked["hybrid"]

    def text_of(self, sharding, ndim):
        return (
            Sharding(Mesh(sharding.mesh.shape, sharding.mesh.axis_names), sharding.spec)
            .op_sharding(ndim)
            .to_hlo()
        )

    def parse(self, text, mesh):
        return OpSharding.parse(text).relabel(mesh.device_ids)

    def boxes(self, _case, answer):
        return answer["boxes"]

    def replicas(self, _answer):
        return None


class TorchXla:
    """Prints lists of device ids; says boxes in the order of the ids, each with the number of its
    replica."""

    def __init__(self):
        cases = {"shards": list(xla_cases()), "hybrid": list(xla_hybrid_cases())}
        asked = ask("sharding_xla.py", cases, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
        self.shardings, self.hybrid = asked["shards"], asked["hybrid"]

    def text_of(self, sharding, ndim):
        return sharding.op_sharding(ndim).to_hlo("listed")

    def parse(self, text, _mesh):
        return OpSharding.parse(text, num_devices=8)

    def boxes(self, case, answer):
        whole = [[0, dim] for dim in case["shape"]]
        return {
            str(device): whole if box is None else box
            for device, (_, box) in enumerate(answer["shards"])
        }

    def replicas(self, answer):
        return [replica for replica, _ in answer["shards"]]


@pytest.fixture(scope="module")
def jax():
    return Jax()


@pytest.fixture(scope="module")
def torch_xla():
    return TorchXla()


@pytest.fixture(params=["jax", pytest.param("torch_xla", marks=pytest.mark.xla)])
def oracle(request):
    return request.getfixturevalue(request.param)


def sharding_of(case):
    mesh = Mesh(case["mesh"], case["axes"], case["devices"])
    return Sharding(
        mesh, PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in case["spec"]))
    )


def by_device(tiles):
    rows = zip(
        tiles.device_ids.tolist(),
        tiles.boxes.start.tolist(),
        tiles.boxes.stop.tolist(),
        strict=True,
    )
    return {
        str(device): [list(ends) for ends in zip(start, stop, strict=True)]
        for device, start, stop in rows
    }


def assert_as_the_oracle_says(tiles, oracle, case, answer):
    assert by_device(tiles) == oracle.boxes(case, answer), case
    replicas = oracle.replicas(answer)
    if replicas is not None:
        assert tiles.device_ids.tolist() == list(range(8))
        assert tiles.replica_id.tolist() == replicas, case


@pytest.mark.long
def test_boxes_are_those_of_the_oracle(oracle):
    for case, answer in oracle.shardings:
        assert_as_the_oracle_says(
            sharding_of(case).device_boxes(case["shape"]), oracle, case, answer
        )


def test_the_cases_of_torch_xla_reach_what_they_are_there_for(torch_xla, record_property):
    assert len(torch_xla.shardings) >= 400
    record_property("combinations", len(torch_xla.shardings))
    uneven = partial = permuted = tupled = 0
    for case, answer in torch_xla.shardings:
        parts = sharding_of(case).device_boxes(case["shape"]).parts
        uneven += any(dim % part for dim, part in zip(case["shape"], parts, strict=True))
        partial += "last_tile_dim_replicate" in answer["text"]
        permuted += case["devices"] != sorted(case["devices"])
        tupled += any(isinstance(part, list) for part in case["spec"])
    assert min(uneven, partial, permuted, tupled) >= 60


def test_the_text_is_the_one_that_the_oracle_prints(oracle):
    for case, answer in oracle.shardings:
        sharding, ndim = sharding_of(case), len(case["shape"])
        assert oracle.text_of(sharding, ndim) == answer["text"], case


def test_the_text_that_the_oracle_prints_parses_to_the_same_boxes(oracle):
    for case, answer in oracle.shardings:
        sharding = sharding_of(case)
        read = oracle.parse(answer["text"], sharding.mesh)
        assert read.equivalent(sharding.op_sharding(len(case["shape"]))), case
        assert_as_the_oracle_says(read.device_boxes(case["shape"]), oracle, case, answer)


def test_the_spec_is_found_again_in_the_text_that_the_oracle_prints(oracle):
    for case, answer in oracle.shardings:
        sharding, ndim = sharding_of(case), len(case["shape"])
        inferred = Sharding.infer(sharding.mesh, oracle.parse(answer["text"], sharding.mesh), ndim)
        assert inferred is not None, case
        assert inferred.op_sharding(ndim) == sharding.op_sharding(ndim), case
        sizes = sharding.mesh.axis_sizes
        cuts = [[axis for axis in axes if sizes[axis] > 1] for axes in sharding.spec.axes]
        assert [list(axes) for axes in inferred.spec.axes] == cuts + [[]] * (ndim - len(cuts)), case


def test_a_hybrid_mesh_has_the_device_ids_of_the_oracle(oracle):
    for case, answer in oracle.hybrid:
        devices = [
            Device(d["id"], d["slice_index"], tuple(d["coords"]), d["core_on_chip"])
            for d in case["devices"]
        ]
        assert HybridMesh(case["ici"], case["dcn"], None, devices).device_ids.tolist() == answer, (
            case
        )


# --- what XLA, through JAX, makes of a text


def test_boxes_of_a_text_are_those_of_a_gspmd_sharding(jax):
    for case, answer in jax.asked["gspmd"]:
        tiles = OpSharding.parse(case["text"]).relabel(case["devices"]).device_boxes(case["shape"])
        assert by_device(tiles) == answer["boxes"], case


def test_the_normal_form_is_xlas(jax):
    for text, normal in jax.asked["texts"]:
        if text not in REFUSED:
            assert OpSharding.parse(text).canonical().to_hlo("listed") == OpSharding.parse(
                normal
            ).to_hlo("listed"), text
            assert OpSharding.parse(text).equivalent(OpSharding.parse(normal)), text


def test_an_iota_is_printed_as_xla_prints_it(jax):
    for text, normal in jax.asked["texts"]:
        if "<=" in text and text not in REFUSED:
            assert OpSharding.parse(text).canonical().to_hlo("auto") == normal, text


def test_what_xlas_parser_refuses_is_refused(jax):
    for text, normal in jax.asked["texts"]:
        if text in REFUSED:
            assert normal is None, text
            with pytest.raises(ShardingError):
                OpSharding.parse(text)
