"""torch_xla's part in the end-to-end matrix: 8 virtual devices.

Several processes of torch_xla 2.9 cannot share CPU devices: each has all 8 and holds all of the
data. So two processes are told which of the devices each of them owns, and write what those hold.
"""

import os
from math import prod

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from e2e_counts import account, torch_controls, torch_counter, xla_counter
from e2e_state import NAMES, TENSORS, compare, differing, expected, layout, rng_of, sharding, state
from e2e_torch import bits_of, join, leave, tensor_of
from torch.distributed.distributed_c10d import _get_default_store
from torch_xla import _XLAC

import shardckpt
from shardckpt import SaveOptions, Target

OWNED = {
    1: [range(8)],
    2: [[0, 2, 3, 7], [1, 4, 5, 6]],
    4: [[5], [0, 3, 6], [1, 2], [4, 7]],
    8: [[3], [1], [4], [0], [5], [7], [2], [6]],
}
"""By processes: the devices of each."""


def start(coordinator):
    xr.use_spmd()
    process, processes = coordinator.world.process, coordinator.world.processes
    return join(coordinator, torch_xla=OWNED[processes][process])


def drawn(*text):
    return {name: layout(rng_of(*text, name), shape, 8) for name, (shape, _) in TENSORS.items()}


def marking(case):
    mesh = xs.Mesh(case["devices"], tuple(case["mesh"]), NAMES[: len(case["mesh"])])
    return mesh, tuple(tuple(part) if isinstance(part, list) else part for part in case["spec"])


def marked(tensor, case):
    tensor = tensor.to("xla")
    if tensor.numel() and tensor.dim():  # torch_xla cannot mark the others
        xs.mark_sharding(tensor, *marking(case))
    return tensor


def save(coordinator, places, seed):
    ours = start(coordinator)
    layouts = {}
    for kind, (url, options) in places.items():
        layouts[kind] = cases = drawn("torch_xla saves", ours.world.processes, kind, seed)
        whole = state(
            lambda name, cases=cases: marked(tensor_of(name), cases[name]),
            tensor_of,
            ours.world.process,
        )
        shardckpt.save(url, whole, options=SaveOptions(**options))
    leave(coordinator)
    return layouts


def restore(coordinator, places, seed):
    """Into sharded tensors' likeness, and by Target: ours and torch_xla's."""
    ours = start(coordinator)
    outcomes = {}
    for saver, (url, processes) in places.items():
        cases = drawn("torch_xla restores", ours.world.processes, saver, seed)

        def target_of(name, cases=cases):
            if len(name) % 3 == 0 and expected(name).ndim:
                return Target(marking(cases[name]))
            return (
                Target(sharding(cases[name]))
                if len(name) % 3 == 1
                else marked(torch.zeros_like(tensor_of(name)), cases[name])
            )

        restored = shardckpt.restore(
            url, state(target_of, lambda name: torch.ones_like(tensor_of(name)), 0, rest=False)
        )
        unlike = differing(url, restored)
        outcomes[saver] = compare(restored, processes, shards) | {"layouts": cases}
        outcomes[saver]["wrong"] += unlike
    leave(coordinator)
    return outcomes


def shards(name, leaf):
    """Expected and found elements of each device, without padding; torch_xla says which part each
    device holds."""
    whole = expected(name)
    if leaf.device.type == "cpu":
        return [(whole, bits_of(leaf, whole.dtype))]
    devices = _XLAC._xla_get_runtime_devices()
    (row,) = _XLAC._get_local_shards([leaf])
    (places,) = _XLAC._get_local_shard_replica_and_indices([leaf])
    held = []
    for device, (shard, at), (_, index) in zip(devices, row, places, strict=True):
        assert at == device
        actual = bits_of(shard, whole.dtype)
        if index is not Ellipsis:
            actual = actual[tuple(slice(part.stop - part.start) for part in index)]
        held.append((whole[index if index is Ellipsis else tuple(index)], actual))
    return held


def save_numbered(coordinator, url, cases):
    """Tensors whose elements are numbered; what of them each device has, by torch_xla's account.

    Args:
        coordinator: over files.
        url: where to.
        cases: name → shape and layout.
    """
    start(coordinator)
    numbered = {
        n: marked(torch.arange(prod(shape), dtype=torch.float32).reshape(shape), case)
        for n, (shape, case) in cases.items()
    }
    shardckpt.save(url, numbered)
    places = _XLAC._get_local_shard_replica_and_indices(list(numbered.values()))
    leave(coordinator)
    return {
        name: [
            [[0, n] for n in leaf.shape]
            if index is Ellipsis
            else [[part.start, part.stop] for part in index]
            for _, index in held
        ]
        for (name, leaf), held in zip(numbered.items(), places, strict=True)
    }


def count(coordinator, root):
    """Count the requests to the other process and to the compiler in ten saves and the rest of
    `account`."""
    ours = start(coordinator)
    cases = drawn("torch_xla counts")
    states = [
        state(lambda name: marked(tensor_of(name), cases[name]), tensor_of, ours.world.process)
    ]
    torch_xla.sync(wait=True)
    counters = torch_counter(), xla_counter()
    controls = torch_controls(_get_default_store())
    controls["a program"] = lambda: torch.ones(3, device="xla").sum().item()
    counts = account(ours, root, states, lambda: counters[0]() | counters[1](), controls)
    leave(coordinator)
    return counts
