"""Processes of jobs whose tensors describe their own shards, or are replicated on several of
them."""

import gc
import threading
import weakref

import torch
from e2e_torch import join, leave

import shardckpt
from shardckpt import SaveOptions
from shardckpt.writing.background import Saver


def described(rank, ranks, columns, *, fill=None, whole=8):
    """Rows of a global tensor, evenly cut, with the last rows first in the local tensor and padding
    behind them."""
    rows = whole // ranks
    first = rank * rows
    numbers = (
        torch.arange(whole * columns, dtype=torch.float32).reshape(whole, columns)
        if fill is None
        else None
    )
    part = torch.full((rows, columns), fill) if numbers is None else numbers[first : first + rows]
    half = rows // 2
    local = torch.cat([part[half:], part[:half], torch.full((1, columns), -1.0)])
    local.global_shape = (whole, columns)
    local.global_offsets = ((first + half, 0), (first, 0))
    local.local_offsets = ((0, 0), (rows - half, 0))
    local.local_sizes = ((rows - half, columns), (half, columns))
    return local


def save_described(coordinator, url, columns, fill=None):
    rank, ranks = coordinator.world.process, coordinator.world.processes
    shardckpt.save(url, {"w": described(rank, ranks, columns, fill=fill)}, coordinator=coordinator)
    return "saved"


def restore_described(coordinator, url, columns):
    """Whether each rank's local tensor is filled where it is, its padding apart."""
    rank, ranks = coordinator.world.process, coordinator.world.processes
    like = {"w": described(rank, ranks, columns, fill=7.0)}
    restored = shardckpt.restore(url, like, coordinator=coordinator)["w"]
    return [
        restored is like["w"],
        bool(torch.equal(restored, described(rank, ranks, columns))),
        restored.global_shape == (8, columns),
    ]


def train_described(coordinator, url, resume):
    """Save or resume a module with a described parameter and its optimizer; the moments on this
    process."""
    rank, ranks = coordinator.world.process, coordinator.world.processes
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(described(rank, ranks, 40, fill=0.0 if resume else 1.0))
    for attribute in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(module.weight, attribute, getattr(described(rank, ranks, 40), attribute))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    state = shardckpt.train_state(model=module, optimizer=optimizer)
    if resume:
        shardckpt.restore(url, state, coordinator=coordinator)
        moment = optimizer.state[module.weight]["exp_avg"]
        return [
            module.weight[:-1].detach().unique().tolist(),
            moment[:-1].unique().tolist(),
            [*moment.shape],
        ]
    module.weight.grad = torch.full_like(module.weight, rank + 1.0)
    optimizer.step()
    # Which Adam made like the parameter, without a description.
    moment = optimizer.state[module.weight]["exp_avg"]
    shardckpt.save(url, state, coordinator=coordinator)
    return [
        module.weight[:-1].detach().unique().tolist(),
        moment[:-1].unique().tolist(),
        [*moment.shape],
    ]


def save_same_shard(coordinator, url):
    local = described(0, 1, 40)
    shardckpt.save(
        url, {"w": local}, coordinator=coordinator, options=SaveOptions(commit_timeout=60)
    )
    return "saved"


def mesh_of(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[: len(shape)])


def held(rank, case):
    """This rank's tensor "w" of 2,000,000 or fewer elements, with the difference that the case
    has."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    size, kind = case["size"], case["kind"]
    value = float(rank in case.get("drifted", ()))
    mesh = mesh_of(2, 2) if kind == "HSDP" else mesh_of(torch.distributed.get_world_size())
    local = torch.full((size // 2 if kind == "HSDP" else size,), value)
    if "at" in case:
        local[:] = 0
        local[case["at"]] = value
    if kind == "plain":
        return local
    return DTensor.from_local(
        local, mesh, [Replicate(), Shard(0)] if kind == "HSDP" else [Replicate()], run_check=False
    )


def save_held(coordinator, url, case, options=None):
    ours = join(coordinator)
    state = {"same": torch.arange(30_000.0), "w": held(ours.world.process, case)}
    if isinstance(options, list):  # one for each process
        options = options[ours.world.process]
    try:
        if case.get("background"):
            shardckpt.save_async(url, state, options=SaveOptions(**(options or {}))).wait()
        else:
            shardckpt.save(url, state, options=SaveOptions(**(options or {})))
    finally:
        leave(coordinator)
    return "saved"


def save_and_drop(coordinator, url):
    """Whether the tensor of a background save lives while it is written, though the program has
    dropped it."""
    rank, alive, dropped = join(coordinator).world.process, [], threading.Event()
    local = held(rank, {"kind": "replicated", "size": 2_000_000})
    reference = weakref.ref(local._local_tensor)

    def progress(_done, _total):
        dropped.wait(60)
        gc.collect()
        alive.append(reference() is not None)

    try:
        handle = Saver().begin(url, {"w": local}, SaveOptions(), progress=progress)
        del local
        dropped.set()
        handle.wait()
    finally:
        leave(coordinator)
    return sorted({*alive})


def fingerprint_held(coordinator, case):
    ours = join(coordinator)
    state = {"w": held(ours.world.process, case)}
    try:
        return shardckpt.fingerprint(state).tensors["w"]
    finally:
        leave(coordinator)


def fingerprint_small(coordinator, url, values):
    """The fingerprint of small plain tensors, of which each process has those that `values` gives
    it, and the one that a save of them records."""
    state = {
        name: torch.full((8,), value) for name, value in values[coordinator.world.process].items()
    }
    shardckpt.save(
        url,
        state,
        coordinator=coordinator,
        options=SaveOptions(fingerprint=True, commit_timeout=60),
    )
    live = shardckpt.fingerprint(state, coordinator=coordinator).tensors
    return [live, shardckpt.open(url).fingerprint().tensors]


def fingerprint_small_alone(coordinator, values):
    state = {
        name: torch.full((8,), value) for name, value in values[coordinator.world.process].items()
    }
    return shardckpt.fingerprint(state, coordinator=coordinator).tensors


def fingerprint_pair(coordinator, values):
    """The fingerprint of a tensor that processes 1 and 2 hold, and process 0 does not."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    rank = join(coordinator).world.process
    mesh = DeviceMesh("cpu", [1, 2])
    state = {"all": torch.ones(8)}
    if rank in (1, 2):
        local = torch.full((100,), values[rank])
        state["w"] = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    try:
        return shardckpt.fingerprint(state).tensors
    finally:
        leave(coordinator)


def save_aliases(coordinator, url, kind):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    join(coordinator)
    mesh = mesh_of(2)
    a = distribute_tensor(torch.zeros(8, 6000), mesh, [Shard(0)])
    aliases = {
        "the same": a,
        "detached": a.detach(),
        "local": a.to_local(),
        "replicated": DTensor.from_local(a.to_local(), mesh, [Replicate()], run_check=False),
        "other dimension": DTensor.from_local(a.to_local(), mesh, [Shard(1)], run_check=False),
        "view": DTensor.from_local(a.to_local().view(4, 6000), mesh, [Shard(0)], run_check=False),
    }
    try:
        shardckpt.save(url, {"a": a, "b": aliases[kind]}, options=SaveOptions(commit_timeout=60))
    finally:
        leave(coordinator)
    return "saved"
