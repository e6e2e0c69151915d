"""Does with real DTensors on the ranks of real gloo jobs what test_dtensor.py asks. JSON on stdin,
answers on stdout.

Importing torch takes longer than all the rest, so it is done once, and the ranks of one job after
the other are forked.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # what a DTensor's first operation imports, in seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardckpt
from shardckpt import frameworks
from shardckpt.errors import ShardckptError
from shardckpt.frameworks.base import Target
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.placements import Placement
from shardckpt.layout.world import World

SECONDS = 230
"""For one job."""
F32 = by_name("float32")
NAMES = ("a", "b", "c")


def world():
    return World(dist.get_rank(), dist.get_world_size())


def error(function, *args):
    try:
        function(*args)
    except ShardckptError as e:
        return [type(e).__name__, str(e)]
    return None


def numbered(shape, dtype=torch.float32):
    """Every element another number."""
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


@cache
def mesh_of(shape, ids=None, names=None):
    ranks = torch.tensor(ids) if ids else torch.arange(int(np.prod(shape)))
    return DeviceMesh("cpu", ranks.reshape(shape), mesh_dim_names=names)


def torch_placements(texts):
    parsed = map(Placement.parse, texts)
    return [
        Replicate()
        if p.dim is None
        else Shard(p.dim)
        if p.split_factor == 1
        else _StridedShard(p.dim, split_factor=p.split_factor)
        for p in parsed
    ]


def local_of(leaf):
    return leaf.detach()._local_tensor


def facts_of(leaf, full):
    """Facts about saving a leaf from this rank, and about restoring into it.

    Args:
        leaf: a DTensor.
        full: all of its elements, by another way.
    """
    local = local_of(leaf)
    before = local.clone()
    facts = {"local": before.reshape(-1).tolist(), "local shape": list(before.shape)}
    try:
        source = frameworks.source("w", leaf, world())
        sink = frameworks.target("w", leaf, (), F32)
    except ShardckptError as e:
        return facts | {"error": [type(e).__name__, str(e)]}
    whole = full.detach().numpy()
    (arrays,) = frameworks.fetch([source])
    boxes = [source.boxes[i] for i in range(len(source.boxes))]
    (last,) = frameworks.fetch([source], [range(len(boxes))[-1:]])
    facts |= {
        "boxes": [[box.start, box.stop] for box in boxes],
        "holders": source.holders,
        "layout": source.layout.to_json(),
        "shape": source.shape,
        "right": len(arrays) == len(boxes)
        and all(np.array_equal(a, whole[b.slices]) for a, b in zip(arrays, boxes, strict=True)),
        "last": all(np.array_equal(a, b) for a, b in zip(last, arrays[-1:], strict=True)),
        "views": source.staged_bytes == 0
        and all(np.shares_memory(a, local.numpy()) for a in arrays),
    }
    for destination, box in zip(sink.destinations, boxes, strict=True):
        destination[...] = whole[box.slices] + 1000
    restored = sink.place(sink.destinations)
    facts["filled"] = restored is leaf and torch.equal(local_of(leaf), before + 1000)
    restored = sink.place([whole[box.slices] + 2000 for box in boxes])
    facts["copied"] = restored is leaf and torch.equal(local_of(leaf), before + 2000)
    meta = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=leaf.shape,
        stride=leaf.stride(),
    )
    new = frameworks.target("w", meta.requires_grad_(), (), F32)
    made = new.place([whole[box.slices] + 3000 for box in boxes])
    facts["made"] = (
        isinstance(made, DTensor)
        and (made.placements, made.device_mesh, made.shape, made.stride())
        == (leaf.placements, leaf.device_mesh, leaf.shape, leaf.stride())
        and local_of(made).device.type == "cpu"
        and made.requires_grad
        and torch.equal(local_of(made), before + 3000)
    )
    with torch.no_grad():
        local.copy_(before)
    return facts


# --- Topics ---------------------------------------------------------------------------------------


def distributed(cases):
    """Tensors that torch distributes by placements."""
    answers = []
    for case in cases:
        mesh = mesh_of(tuple(case["mesh"]), tuple(case["ids"] or ()), NAMES[: len(case["mesh"])])
        full = numbered(case["shape"])
        # Every rank cuts out its own part: the placements' rule without any communication.
        leaf = distribute_tensor(
            full.clone(), mesh, torch_placements(case["placements"]), src_data_rank=None
        )
        facts = facts_of(leaf, full)
        if case.get("gather"):
            facts["gathered"] = torch.equal(leaf.full_tensor(), full)
        answers.append(facts)
    return answers


class Layers(nn.Module):
    """Linear layers of many sizes, whose weights tell all of their elements apart."""

    def __init__(self, rows, wide=3):
        super().__init__()
        self.out = nn.ModuleDict({str(n): nn.Linear(wide, n) for n in rows})
        self.into = nn.ModuleDict({str(n): nn.Linear(n, 5) for n in rows})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(parameter.shape))


def fsdp_over_tp(cases):
    """FSDP2 over tensor parallelism, of real modules."""
    answers = []
    for shape in cases:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp"))
        model = Layers(range(1, 14))
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
        parallelize_module(
            model, mesh["tp"], {"out.*": ColwiseParallel(), "into.*": RowwiseParallel()}
        )
        fully_shard(model, mesh=mesh["dp"])
        answers.append({name: facts_of(p, full[name]) for name, p in model.named_parameters()})
    return answers


def hsdp(cases):
    """FSDP2 on the second dimension of a mesh, replicas along the first."""
    answers = []
    for shape in cases:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard"))
        model = Layers(range(1, 8))
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
        fully_shard(model, mesh=mesh)
        answers.append({name: facts_of(p, full[name]) for name, p in model.named_parameters()})
    return answers


def trained(_):
    """A step of AdamW: what of its state is a DTensor, and does it lie as torch says?"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    leaves = {
        f"{i}/{key}": value
        for i, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if value.dim()
    } | dict(model.named_parameters())
    step = optimizer.state_dict()["state"][0]["step"]
    return {
        "facts": {name: facts_of(leaf, leaf.full_tensor()) for name, leaf in leaves.items()},
        "step": [type(step).__name__, frameworks.source("step", step, world()).holders],
    }


def slices(_):
    """Layouts of a tensor on a slice of a mesh, beside one on that mesh: itself a slice, or sliced
    on another thread than the one that saves."""
    root = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with warnings.catch_warnings(action="ignore"):  # of a slice of a slice
        stage, whole = root["dp", "tp"], init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        pairs = [(stage, stage["dp"]), (whole, whole["a"])]
    states = [
        {
            "wide": distribute_tensor(numbered((4, 2)), wide, [Shard(0), Shard(1)]),
            "narrow": distribute_tensor(numbered((4,)), narrow, [Shard(0)]),
        }
        for wide, narrow in pairs
    ]

    def layouts():
        return [frameworks.sources(one, world())["narrow"].layout.to_json() for one in states]

    with ThreadPoolExecutor(1) as pool:
        return {"here": layouts(), "on another thread": pool.submit(layouts).result()}


def partial(_):
    mesh = mesh_of((2,), None, ("dp",))
    leaf = DTensor.from_local(
        torch.full((3,), dist.get_rank() + 1.0), mesh, [Partial()], run_check=False
    )
    largest = DTensor.from_local(
        torch.full((3,), dist.get_rank() + 1.0), mesh, [Partial("max")], run_check=False
    )
    other = distribute_tensor(numbered((4,)), mesh, [Shard(0)])
    plain = torch.ones(1)
    leaves = {"z": leaf, "a": largest, "other": other, "plain": plain}
    reduced = frameworks.reduce_partial(leaves)
    sources = frameworks.sources(reduced, world())
    fetched = dict(zip(sources, frameworks.fetch(list(sources.values())), strict=True))
    return {
        "saved": error(frameworks.source, "grad", leaf, world()),
        "restored": error(frameworks.target, "grad", leaf, (3,), F32),
        "order": list(reduced),
        "untouched": reduced["other"] is other and reduced["plain"] is plain,
        "sum": fetched["z"][0].tolist(),
        "max": fetched["a"][0].tolist(),
        "holders": sources["z"].holders,
        "nothing to reduce": list(frameworks.reduce_partial({"plain": plain})),
    }


def from_local(_):
    """Local tensors that somebody has cut by their own rule."""
    rank = dist.get_rank()
    mesh = mesh_of((2,))

    def made(rows, **more):
        return DTensor.from_local(
            numbered((rows, 3)) + 9 * rank, mesh, [Shard(0)], run_check=False, **more
        )

    return {
        "uneven": facts_of(
            made((3, 2)[rank], shape=torch.Size((5, 3)), stride=(3, 1)), numbered((5, 3))
        ),
        "the other way": error(
            frameworks.source,
            "layer/w",
            made((2, 3)[rank], shape=torch.Size((5, 3)), stride=(3, 1)),
            world(),
        ),
        "the other way, restored": error(
            frameworks.target,
            "layer/w",
            made((2, 3)[rank], shape=torch.Size((5, 3)), stride=(3, 1)),
            (),
            F32,
        ),
        "transposed": facts_of(
            distribute_tensor(numbered((6, 4)), mesh, [Shard(1)]).t(), numbered((6, 4)).t()
        ),
    }


def outside(_):
    """A mesh of the second rank only, and a layer on each rank that the other one does not have."""
    rank = dist.get_rank()
    own = [mesh_of((1,), (r,)) for r in range(2)]  # every rank has to make every mesh
    leaf = distribute_tensor(numbered((4, 2)), own[1], [Shard(0)], src_data_rank=None)
    stage = distribute_tensor(numbered((4, 2)), own[rank], [Shard(0)], src_data_rank=None)
    return {"submesh": facts_of(leaf, numbered((4, 2))), "stage": facts_of(stage, numbered((4, 2)))}


def descending(folder):
    """Saves and restores on meshes whose ranks do not ascend along one of the dimensions."""
    stored, line, pairs = Path(folder, "stored"), mesh_of((4,), (3, 2, 1, 0)), (2, 2)
    shardckpt.save(stored, {"a": torch.ones(8), "w": numbered((8, 2))})
    crossed = mesh_of(pairs, (1, 0, 3, 2), ("dp", "tp"))
    tensor_parallel = parallelize_module(nn.Linear(2, 8), crossed["tp"], ColwiseParallel())
    leaves = {
        "distributed": distribute_tensor(numbered((8, 2)), line, [Shard(0)]),
        "FSDP2": fully_shard(nn.Linear(2, 8), mesh=line).weight,
        "HSDP": fully_shard(nn.Linear(2, 8), mesh=crossed).weight,
        "FSDP2 and TP": fully_shard(tensor_parallel, mesh=crossed["dp"]).weight,
    }
    refused = {}
    for kind, leaf in leaves.items():
        before, state = local_of(leaf).clone(), {"a": torch.zeros(8), "w": leaf}
        meta = DTensor.from_local(
            local_of(leaf).to("meta"), leaf.device_mesh, leaf.placements, run_check=False
        )
        new = Target((leaf.device_mesh, leaf.placements))
        refused[kind] = {
            "saved": error(shardckpt.save, Path(folder, kind), state),
            "restored": error(shardckpt.restore, stored, state),
            "meta": error(shardckpt.restore, stored, state | {"w": meta}),
            "new": error(shardckpt.restore, stored, state | {"w": new}),
        }
        dist.barrier()
        refused[kind]["written"] = Path(folder, kind).exists()
        refused[kind]["read"] = bool(state["a"].any()) or not torch.equal(before, local_of(leaf))
    whole, swapped = numbered((5, 4)), mesh_of(pairs, (2, 3, 0, 1))
    replicas = {
        "all": distribute_tensor(whole.clone(), line, [Replicate()]),
        "of slices": distribute_tensor(whole.clone(), swapped, [Replicate(), Shard(0)]),
    }
    return {
        "refused": refused,
        "replicas": {
            kind: facts_of(leaf, whole) | {"gathered": leaf.full_tensor().tolist()}
            for kind, leaf in replicas.items()
        },
    }


def lacking(folder):
    """A save of a sharded tensor that the second rank leaves out."""
    shared = distribute_tensor(numbered((8, 2)), mesh_of((4,)), [Shard(0)])
    state = {"w": shared} | ({} if dist.get_rank() == 1 else {"x": shared.clone()})
    return error(shardckpt.save, Path(folder, "lacking"), state)


def tied(_):
    """One row for two ranks: the second rank's shards are all empty."""
    model = nn.Sequential(*(nn.Linear(3, 1, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh_of((2,)))
    state = model.state_dict()
    cut = distribute_tensor(torch.ones(1, 3), mesh_of((2,)), [Shard(0)])
    same = [
        model[0].weight,
        model[1].weight,
        state["0.weight"],
        state["1.weight"],
        model[0].weight.detach(),
    ]
    apart = [
        state["0.weight"],
        state["2.weight"],
        cut,
        cut.clone(),
        cut.to(torch.bfloat16),
        distribute_tensor(torch.ones(1, 3), mesh_of((2,)), [Replicate()]),
    ]
    meta = DTensor.from_local(
        torch.empty(1, 3, device="meta"), mesh_of((2,)), [Shard(0)], run_check=False
    )
    held = 1 - dist.get_rank()
    own = nn.Parameter(cut.clone())
    in_buffers = [
        [
            DTensor.from_local(
                buffer[k * held : (k + 1) * held],
                mesh_of((2,)),
                [Shard(0)],
                run_check=False,
                shape=torch.Size((1,)),
                stride=(1,),
            )
            for k in range(2)
        ]
        for buffer in (torch.ones(2 * held), torch.ones(9))
    ]
    return {
        "in buffers": [
            len({frameworks.identity(leaf) for leaf in (first, first, second)})
            for first, second in in_buffers
        ],
        "held": [len(frameworks.source("w", leaf, world()).boxes) for leaf in (same[0], apart[1])],
        "same": len({frameworks.identity(leaf) for leaf in same}),
        "same, in its own memory": len(
            {frameworks.identity(leaf) for leaf in (own, own.detach(), own.data)}
        ),
        "apart": [len({frameworks.identity(leaf) for leaf in apart}), len(apart)],
        "none": [
            frameworks.identity(meta),
            frameworks.identity(distribute_tensor(torch.ones(0, 3), mesh_of((2,)), [Shard(0)])),
        ],
        "targets": frameworks.target("w", same[0], (), F32).tie_key
        == frameworks.target("w", same[1], (), F32).tie_key,
    }


def autograd(_):
    """Effects of a restore in place that autograd and modules can notice."""
    mesh = mesh_of((2,))
    weight = nn.Parameter(distribute_tensor(numbered((4, 2)), mesh, [Shard(0)]))
    loss = (weight * weight).sum()
    local = weight._local_tensor
    versions = weight._version, local._version
    sink = frameworks.target("w", weight, (), F32)
    sink.destinations[0][...] = 7
    restored = sink.place(sink.destinations)
    try:
        loss.backward()
        caught = None
    except RuntimeError as e:
        caught = str(e)
    with torch.inference_mode():
        inference = distribute_tensor(numbered((4, 2)), mesh, [Shard(0)])
    sink = frameworks.target("w", inference, (), F32)
    frozen = sink.place([np.full((2, 2), 5, np.float32)])
    return {
        "same object": restored is weight
        and isinstance(weight, nn.Parameter)
        and weight._local_tensor is local,
        "requires grad": [weight.requires_grad, weight.is_leaf],
        "versions": weight._version > versions[0] and local._version > versions[1],
        "caught": caught,
        "inference": frozen is inference and inference._local_tensor.tolist(),
    }


def modules(_):
    """distribute_module, buffers too."""
    mesh = mesh_of((2,))
    model = nn.BatchNorm1d(5)
    with torch.no_grad():
        model.weight.copy_(numbered((5,)))
        model.running_mean.copy_(numbered((5,)))

    def shard(_name, module, mesh):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    model = distribute_module(model, mesh, shard)
    state = model.state_dict()
    return {name: facts_of(state[name], numbered((5,))) for name in ("weight", "running_mean")}


class Sub(DTensor):
    pass


class Other(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def refusals(_):
    mesh = mesh_of((2,))
    cut = distribute_tensor(numbered((4, 2)), mesh, [Shard(0)])
    flat = distribute_tensor(torch.tensor([1 + 2j, 3 - 4j]), mesh, [Shard(0)])
    shared = DTensor.from_local(torch.zeros(1, 2).expand(2, 2), mesh, [Shard(0)], run_check=False)
    odd = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False)
    odd._local_tensor = torch.zeros(2, 2).as_subclass(Other)
    sub = distribute_tensor(numbered((4, 2)), mesh, [Shard(0)])
    sub.__class__ = Sub
    meta = DTensor.from_local(torch.empty(2, 2, device="meta"), mesh, [Shard(0)], run_check=False)
    conjugate = DTensor.from_local(flat._local_tensor.conj(), mesh, [Shard(0)], run_check=False)
    conjugate_source = frameworks.source("layer/w", conjugate, world())
    gone = distribute_tensor(numbered((4, 2)), mesh, [Shard(0)])
    gone._local_tensor.untyped_storage().resize_(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        "freed": error(frameworks.source, "layer/w", gone, world()),
        "freed, restored": error(frameworks.target, "layer/w", gone, (), F32),
        "alone": error(frameworks.source, "layer/w", cut),
        "renumbered": error(frameworks.source, "layer/w", cut, World(ranks - 1 - rank, ranks)),
        "more processes": error(frameworks.source, "layer/w", cut, World(rank, ranks + 1)),
        "meta": error(frameworks.source, "layer/w", meta, world()),
        "expanded": error(frameworks.target, "layer/w", shared, (), F32),
        "local subclass": error(frameworks.source, "layer/w", odd, world()),
        "subclass": error(frameworks.source, "layer/w", sub, world()),
        "conjugate": error(frameworks.target, "layer/w", conjugate, (), F32),
        "conjugate saved": [
            conjugate_source.staged_bytes,
            bool(
                (
                    frameworks.fetch([conjugate_source])[0][0]
                    == conjugate._local_tensor.resolve_conj().numpy()
                ).all()
            ),
        ],
        "dtype": error(
            frameworks.source,
            "layer/w",
            distribute_tensor(torch.zeros(2, dtype=torch.complex32), mesh, [Shard(0)]),
            world(),
        ),
    }


def targets(_):
    """New DTensors where a Target says."""
    mesh = mesh_of((2,), None, ("dp",))
    bfloat16 = Target((mesh, [Shard(0)]), dtype="bfloat16")
    sink = frameworks.target("w", bfloat16, (5, 2), F32)
    whole = numbered((5, 2)).numpy().astype(sink.dtype.numpy)
    made = sink.place([whole[sink.boxes[i].slices] for i in range(len(sink.boxes))])
    return {
        "dtype": str(made.dtype),
        "placements": str(made.placements),
        "mesh": made.device_mesh is mesh,
        "local": local_of(made).float().reshape(-1).tolist(),
        "shape": made.shape,
        "scalar": local_of(
            frameworks.target("w", Target((mesh, [Replicate()])), (), F32).place(
                [np.full((), 3, np.float32)]
            )
        ).item(),
        "requires grad": made.requires_grad,
        "tied": [
            frameworks.target("w", like, (5, 2), F32).tie_key == sink.tie_key
            for like in (
                bfloat16,
                Target((mesh, [Shard(1)]), dtype="bfloat16"),
                Target((mesh, [Shard(0)])),
            )
        ],
        "partial": error(frameworks.target, "w", Target((mesh, [Partial()])), (5, 2), F32),
        "too few": error(frameworks.target, "w", Target((mesh, [])), (5, 2), F32),
        "too many": error(frameworks.target, "w", Target((mesh, 2 * [Shard(0)])), (5, 2), F32),
        "before": error(frameworks.target, "w", Target((mesh, [Shard(-5)])), (5, 2), F32),
        "not placements": error(frameworks.target, "w", Target((mesh, "S(0)")), (5, 2), F32),
        "one placement": error(frameworks.target, "w", Target((mesh, Shard(0))), (5, 2), F32),
        "no placements": error(frameworks.target, "w", Target((mesh, None)), (5, 2), F32),
        "bits": error(frameworks.target, "w", Target((mesh, [Shard(0)])), (5, 2), by_name("int4")),
        "beyond": error(frameworks.target, "w", Target((mesh, [Shard(2)])), (5, 2), F32),
        "dtype that torch lacks": error(
            frameworks.target, "w", Target((mesh, [Shard(0)]), dtype="float8_e3m4"), (5, 2), F32
        ),
        "from the end": [
            str(b)
            for b in boxes_of(frameworks.target("w", Target((mesh, [Shard(-1)])), (5, 4), F32))
        ],
    }


def boxes_of(sink):
    return [sink.boxes[i] for i in range(len(sink.boxes))]


def pending(_):
    """A collective that has only been started."""
    mesh = mesh_of((2,))
    leaf = distribute_tensor(numbered((4, 2)), mesh, [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    source = frameworks.source("w", leaf, world())
    ((array,),) = frameworks.fetch([source])
    return {
        "local": type(leaf._local_tensor).__name__,
        "right": bool((array == numbered((4, 2)).numpy()).all()),
    }


def bits(dtypes):
    """Any bits of any dtype, there and back."""
    mesh = mesh_of((2,))
    outcomes = {}
    for dtype in dtypes:
        kind = by_name(dtype)
        raw = np.random.default_rng(3).integers(
            0, 2 if dtype == "bool" else 256, 15 * kind.itemsize, np.uint8
        )
        full = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(5, 3)
        leaf = distribute_tensor(full.clone(), mesh, [Shard(0)], src_data_rank=None)
        source = frameworks.source("w", leaf, world())
        (arrays,) = frameworks.fetch([source])
        expected = raw.view(kind.numpy).reshape(5, 3)[source.boxes[0].slices]
        like = distribute_tensor(
            torch.zeros(5, 3, dtype=full.dtype), mesh, [Shard(0)], src_data_rank=None
        )
        sink = frameworks.target("w", like, (5, 3), F32)
        sink.destinations[0][...] = expected
        sink.place(sink.destinations)
        outcomes[dtype] = (
            source.dtype == sink.dtype == kind
            and arrays[0].tobytes() == expected.tobytes()
            and torch.equal(local_of(like).view(torch.uint8), local_of(leaf).view(torch.uint8))
        )
    return outcomes


def protocol(folder):
    """A DTensor around shards of its own: two tables' columns on the first rank, one on the second;
    and what DCP makes of it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    rank, mesh, full = dist.get_rank(), mesh_of((2,)), numbered((4, 9))
    cuts = ([(0, 2), (2, 5)], [(5, 9)])[rank]
    shards = [full[:, a:b].clone() for a, b in cuts]
    wrapper = LocalShardsWrapper(shards, [(0, a) for a, _ in cuts])
    leaf = DTensor.from_local(
        wrapper, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=full.stride()
    )
    source = frameworks.source("w", leaf, world())
    (arrays,) = frameworks.fetch([source])
    fetched = [a.tolist() for a in arrays]
    dcp.save({"w": leaf}, checkpoint_id=folder)
    theirs = {"w": torch.zeros(4, 9)}
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    sink = frameworks.target("w", leaf, (), F32)
    held = leaf._local_tensor.local_shards()
    versions = [shard._version for shard in held]
    for destination, box in zip(sink.destinations, boxes_of(sink), strict=True):
        destination[...] = full.numpy()[box.slices] + 1000
    restored = sink.place(sink.destinations)
    return {
        "shape": source.shape,
        "boxes": [[box.start, box.stop] for box in boxes_of(source)],
        "arrays": fetched,
        "views": source.staged_bytes == 0
        and all(np.shares_memory(a, s.numpy()) for a, s in zip(arrays, shards, strict=True)),
        "theirs": theirs["w"].tolist(),
        "holders": source.holders,
        "layout": source.layout,
        "own pieces": source.own_pieces,
        "filled": restored is leaf
        and all(
            torch.equal(s, full[:, a:b] + 1000) for s, (a, b) in zip(shards, cuts, strict=True)
        ),
        "versions": all(s._version > v for s, v in zip(held, versions, strict=True)),
        "tied": frameworks.identity(leaf)
        == frameworks.identity(leaf)
        != frameworks.identity(wrapper),
    }


TOPICS = {
    f.__name__: f
    for f in (
        distributed,
        fsdp_over_tp,
        hsdp,
        trained,
        partial,
        from_local,
        outside,
        descending,
        lacking,
        tied,
        slices,
        autograd,
        modules,
        refusals,
        targets,
        pending,
        protocol,
        bits,
    )
}


# --- Jobs -----------------------------------------------------------------------------------------


def run_rank(rank, ranks, place, topics):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    answers = {}
    for topic, cases in topics.items():
        answers[topic] = TOPICS[topic](cases)
    (place / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()


def run_job(ranks, topics, place):
    """One job; the answers of its ranks."""
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(2, 1)  # gloo talks
                run_rank(rank, ranks, place, topics)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        running[pid] = rank
    deadline = time.monotonic() + SECONDS
    failed = []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = running.pop(pid)
            failed += [rank] if status else []
        elif failed or time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            raise SystemExit(
                f"a job of {ranks}: rank {failed} failed, {sorted(running.values())} were left"
            )
        else:
            time.sleep(0.01)
    if failed:
        raise SystemExit(f"a job of {ranks}: rank {failed} failed")
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    outcomes = []
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_job(job["ranks"], job["topics"], Path(folder)))
    sys.stdout.write(json.dumps(outcomes) + "\n")
