"""DTensor's part in the end-to-end matrix: gloo jobs of 2 and 4 ranks."""

from functools import cache

import torch
from e2e_counts import account, torch_controls, torch_counter
from e2e_state import NAMES, TENSORS, compare, differing, expected, placements, rng_of, state
from e2e_torch import bits_of, join, leave, tensor_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardckpt
from shardckpt import SaveOptions, Target
from shardckpt.layout.placements import Placement

MESHES = {
    2: [((2,), (0, 1)), ((1, 2), (0, 1)), ((2, 1), (0, 1))],
    4: [((4,), (0, 1, 2, 3)), ((2, 2), (0, 1, 2, 3)), ((2, 2), (0, 2, 1, 3)), ((2,), (1, 3))],
}
"""By ranks; the last one of 4 leaves ranks out."""


@cache
def mesh_of(shape, ranks):
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=NAMES[: len(shape)])


def make_meshes(processes):
    """All of them, in one order on all ranks: each is a collective of its own."""
    for shape, ranks in MESHES[processes]:
        mesh_of(shape, ranks)


def laid_out(case):
    parsed = map(Placement.parse, case["placements"])
    ours = [
        Replicate()
        if p.dim is None
        else Shard(p.dim)
        if p.split_factor == 1
        else _StridedShard(p.dim, split_factor=p.split_factor)
        for p in parsed
    ]
    return mesh_of(case["mesh"], case["devices"]), ours


def drawn(processes, *text):
    return {
        n: placements(rng_of(*text, n), shape, MESHES[processes])
        for n, (shape, _) in TENSORS.items()
    }


def distributed(whole, case):
    """By torch's own rule; every rank cuts out its own part."""
    return distribute_tensor(whole, *laid_out(case), src_data_rank=None)


def save(coordinator, places, seed):
    ours = join(coordinator)
    make_meshes(ours.world.processes)
    layouts = {}
    for kind, (url, options) in places.items():
        layouts[kind] = cases = drawn(
            ours.world.processes, "DTensor saves", ours.world.processes, kind, seed
        )
        whole = state(
            lambda name, cases=cases: distributed(tensor_of(name), cases[name]),
            tensor_of,
            ours.world.process,
        )
        shardckpt.save(url, whole, options=SaveOptions(**options))
    leave(coordinator)
    return layouts


def restore(coordinator, places, seed):
    """Into DTensors in place, into meta ones, and by Target."""
    ours = join(coordinator)
    make_meshes(ours.world.processes)
    outcomes = {}
    for saver, (url, processes) in places.items():
        cases = drawn(ours.world.processes, "DTensor restores", ours.world.processes, saver, seed)

        def target_of(name, cases=cases):
            like = distributed(torch.zeros_like(tensor_of(name)), cases[name])
            empty = torch.empty_like(
                like._local_tensor if like.dim() else tensor_of(name), device="meta"
            )
            meta = DTensor.from_local(
                empty,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
            return [like, meta, Target(laid_out(cases[name]))][len(name) % 3]

        def shards(name, leaf, cases=cases):
            whole = expected(name)
            if not isinstance(leaf, DTensor):
                return [(whole, bits_of(leaf, whole.dtype))]
            right = distributed(tensor_of(name), cases[name])
            assert (leaf.placements, leaf.device_mesh, leaf.shape) == (
                right.placements,
                right.device_mesh,
                right.shape,
            ), name
            if leaf.device_mesh.get_coordinate() is None:
                return []
            return [tuple(bits_of(x._local_tensor, whole.dtype) for x in (right, leaf))]

        restored = shardckpt.restore(
            url, state(target_of, lambda name: torch.ones_like(tensor_of(name)), 0, rest=False)
        )
        unlike = differing(url, restored)
        outcomes[saver] = compare(restored, processes, shards) | {"layouts": cases}
        outcomes[saver]["wrong"] += unlike
    leave(coordinator)
    return outcomes


def count(coordinator, root):
    """Count the requests to the other ranks in ten saves and the rest of `account`."""
    ours = join(coordinator)
    make_meshes(ours.world.processes)
    cases = [drawn(ours.world.processes, "DTensor counts", i) for i in range(2)]
    states = [
        state(lambda n, c=case: distributed(tensor_of(n), c[n]), tensor_of, ours.world.process)
        for case in cases
    ]
    counts = account(ours, root, states, torch_counter(), torch_controls(_get_default_store()))
    leave(coordinator)
    return counts
