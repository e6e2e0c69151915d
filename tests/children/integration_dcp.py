"""Jobs that save and load with torch.distributed.checkpoint, through shardckpt, as test_dcp.py
asks.

The trained tensors have the same elements on every mesh: gradients are given, and AdamW works
element by element.
"""

import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import torch
import torch._dynamo  # what a DTensor's first operation imports, in seconds
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from e2e_torch import connect, leave
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt
from shardckpt import PerProcess, SaveOptions, ShardckptError
from shardckpt.training.integrations.dcp import StorageReader, StorageWriter

VALUES = {
    "epoch": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "milestones": [1, [2, None]],
    "who": "naïve",
    "nan": float("inf"),
}
BLANK = {
    "epoch": 0,
    "lr": 0.0,
    "betas": (0.0, 0.0),
    "milestones": [0, [0, 0]],
    "who": "",
    "nan": 0.0,
}
dcp_errors = dcp.api.CheckpointException


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def trained(mesh, steps):
    """Model and optimizer after some steps, on a mesh of FSDP2 and TP: () for none, (dp,), or (dp,
    tp)."""
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.arange(parameter.numel(), dtype=torch.float32)
                .reshape(parameter.shape)
                .add_(1000 * i)
                .mul_(steps)
            )
    if mesh:
        devices = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("dp", "tp")[: len(mesh)])
        if len(mesh) == 2:
            parallelize_module(
                model, devices["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
        fully_shard(model, mesh=devices["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
    return model, optimizer


def state_of(mesh, steps):
    """The state that scripts save: nested, with plain tensors and values beside DTensors."""
    model, optimizer = trained(mesh, steps)
    weights, optimizer_state = get_state_dict(model, optimizer)
    plain = torch.arange(12, dtype=torch.bfloat16).mul_(steps)
    more = {
        "plain": plain,
        "tied": plain,
        "scalar": torch.tensor(7 * steps),
        "empty": torch.zeros(0, 3),
        "views": [
            torch.arange(20.0).mul(steps).reshape(4, 5).t(),
            {"buffer": torch.full((3,), steps > 0)},
        ],
        "values": dict(VALUES if steps else BLANK),
    }
    return {"model": weights, "optimizer": optimizer_state, "more": more}


def tensors_of(state, path=""):
    """By dotted name, as DCP has it."""
    if isinstance(state, torch.Tensor):
        return {path: local(state).detach()}
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    return {
        name: t for key, value in items for name, t in tensors_of(value, f"{path}.{key}").items()
    }


def same(actual, expected):
    """Whether two states are one, bit by bit; the names that differ."""
    a, b = tensors_of(actual), tensors_of(expected)
    assert a.keys() == b.keys()
    assert actual["more"]["values"] == VALUES
    assert actual["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    return [
        name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    ]


def failures(function):
    """Errors of the ranks as DCP reports them, or the error of shardckpt that was raised here
    alone."""
    try:
        function()
    except dcp_errors as e:
        return {
            rank: [type(error).__name__, str(error), isinstance(error, ShardckptError)]
            for rank, (error, _) in e.failures.items()
        }
    except ShardckptError as e:
        return {"here": [type(e).__name__, str(e), True]}
    return {}


def save(coordinator, url, mesh, how="dcp"):
    connect(coordinator)
    state = state_of(mesh, 1) | {"rng": PerProcess(torch.tensor([coordinator.world.process]))}
    if how == "shardckpt":
        shardckpt.save(url, state)
    elif how == "async":
        future = dcp.async_save(state, storage_writer=StorageWriter(url))
        kept = state["more"]["plain"].clone()
        future.result(timeout=60)
        assert torch.equal(kept, state["more"]["plain"])
    elif how == "changed at once":
        future = dcp.async_save(state, storage_writer=StorageWriter(url))
        for tensor in tensors_of(state).values():
            tensor.zero_()
        future.result(timeout=60)
    elif how == "without collectives":
        dcp.save(state, storage_writer=StorageWriter(url), use_collectives=False)
    else:
        dcp.save(state, checkpoint_id=url, storage_writer=StorageWriter())
    leave(coordinator)


def load(coordinator, url, mesh):
    connect(coordinator)
    state = state_of(mesh, 0)
    reader = StorageReader(url)
    dcp.load(state, storage_reader=reader)
    stats = reader._contents.checkpoint.stats
    # The same memory as another one, filled twice.
    needed = [t for name, t in tensors_of(state).items() if name != ".more.tied"]
    outcome = {
        "different": same(state, state_of(mesh, 1)),
        "needed": stats.bytes_needed - state["more"]["tied"].nbytes,
        "held": sum(t.nbytes for t in needed),
        "read": stats.bytes_read,
    }
    leave(coordinator)
    return outcome


def load_own(coordinator, url):
    """Values that processes own by themselves."""
    connect(coordinator)
    state = {"rng": None}
    errors = failures(lambda: dcp.load(state, storage_reader=StorageReader(url)))
    leave(coordinator)
    return errors or state["rng"].value.tolist()


def look(coordinator, url):
    """Findings of shardckpt alone in a checkpoint that DCP has saved."""
    connect(coordinator)
    ckpt = shardckpt.open(url)
    state = shardckpt.restore(url)
    expected = state_of((), 1)
    like = state_of((), 0)
    # DCP has turned keys into text, and only the checkpoint has `rng`.
    refilled = shardckpt.restore(url, like, strict=False)
    return {
        "ok": ckpt.verify().ok,
        "different": same(refilled, expected),
        "values": state["more"]["values"] == VALUES,
        "layouts": {
            name: ckpt.info(name).layout is not None
            for name in ("model/0.weight", "model/1.weight", "more/plain")
        },
        "hosts": len(ckpt.record.hosts),
        "rng": [value.tolist() for value in state["rng"]],
    }


def subset(coordinator, url):
    """A process group of one of two processes; and processes that read from different places."""
    connect(coordinator)
    rank = coordinator.world.process
    group = dist.new_group([0])
    state = {"w": torch.ones(4)}
    outcomes = {}
    if rank == 0:
        outcomes["save"] = failures(
            lambda: dcp.save(state, storage_writer=StorageWriter(f"{url}/a"), process_group=group)
        )
    dist.barrier()
    for name, value in (("b", 1), ("c", 2)):
        dcp.save({"w": torch.full((4,), value)}, storage_writer=StorageWriter(f"{url}/{name}"))
    outcomes["load"] = failures(
        lambda: dcp.load(dict(state), storage_reader=StorageReader(f"{url}/{'bc'[rank]}"))
    )
    bad = {"w": torch.ones(4), "x": object() if rank else 1}
    outcomes["one bad leaf"] = failures(
        lambda: dcp.save(bad, storage_writer=StorageWriter(f"{url}/d"))
    )
    outcomes["after it"] = failures(
        lambda: dcp.save(state, storage_writer=StorageWriter(f"{url}/e"))
    )
    outcomes["unequal"] = failures(
        lambda: dcp.save({"w": rank}, storage_writer=StorageWriter(f"{url}/f"))
    )
    leave(coordinator)
    return outcomes


class Doubles(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002
        return super().transform_object(write_item, object)


Pair = namedtuple("Pair", "a b")  # noqa: PYI024


def refusals(coordinator, url):
    connect(coordinator)
    warnings.simplefilter("ignore")  # that there is one process

    def saving(state, name="refused", **more):
        return failures(
            lambda: dcp.save(state, storage_writer=StorageWriter(f"{url}/{name}"), **more)
        )

    def loading(state, name="good", **more):
        return failures(
            lambda: dcp.load(state, storage_reader=StorageReader(f"{url}/{name}"), **more)
        )

    good = {
        "w": torch.arange(6.0),
        "v": torch.arange(6.0) + 1,
        "n": 3,
        "rest": {"a": torch.ones(2)},
    }
    dcp.save(good, storage_writer=StorageWriter(f"{url}/good"))
    shardckpt.save(f"{url}/dots", {"a": {"b": 1}, "a.b": 2})
    shardckpt.save(f"{url}/tuple", {"t": (torch.ones(2), 1), "w": torch.ones(2)})
    shardckpt.save(f"{url}/list", [torch.ones(2)])
    import ml_dtypes

    shardckpt.save(f"{url}/int4", {"w": np.ones(4, ml_dtypes.int4)})
    both = torch.zeros(6)
    unharmed = {"w": torch.full((6,), 9.0), "n": torch.full((2,), 9.0)}
    errors = {
        "ndarray": saving({"w": np.ones(3)}),
        "tuple of tensors": saving({"t": (torch.ones(2),)}),
        "named tuple": saving({"t": [Pair(1, 2)]}),
        "odd dict in a tuple": saving({"t": (OrderedDict(a=1),)}),
        "object": saving({"deep": {"o": object()}}),
        "planner": saving(good, planner=Doubles()),
        "exists": saving(good, "good"),
        "no url": failures(lambda: dcp.save(good, storage_writer=StorageWriter())),
        "options": failures(lambda: StorageWriter(f"{url}/x", options={"overwrite": True})),
        "not there": loading({"w": torch.ones(6)}, "nowhere"),
        "dtype": loading({"w": torch.zeros(6, dtype=torch.float64)}),
        "tensor for a value": loading(unharmed),
        "shared memory": loading({"w": both, "v": both}),
        "expanded": loading({"w": torch.zeros(1).expand(6)}),
        "dots": loading({"a.b": 1}, "dots"),
        "tensors in a tuple": loading({"t": (torch.zeros(2), 0)}, "tuple"),
        "no dict": loading({"0": torch.zeros(2)}, "list"),
        "int4": loading({"w": torch.zeros(4)}, "int4"),
    }
    replaced = failures(
        lambda: dcp.save(
            good, storage_writer=StorageWriter(f"{url}/good", options=SaveOptions(overwrite=True))
        )
    )
    beside = {"w": torch.zeros(2)}
    part = loading(beside, "tuple")
    everything = _load_state_dict_from_keys(storage_reader=StorageReader(f"{url}/good"))
    whole = {"w": torch.zeros(6), "n": 0}
    dcp.save(
        good,
        storage_writer=StorageWriter(f"{url}/flat"),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    flat = shardckpt.restore(f"{url}/flat")
    dcp.load(whole, storage_reader=StorageReader(f"{url}/flat"))
    return {
        "refused": errors,
        "unharmed": unharmed["w"].tolist(),
        "replaced": replaced,
        "part": [part, beside["w"].tolist()],
        "everything": [everything["w"].tolist(), everything["n"], everything["rest"]["a"].tolist()],
        "flat": [flat["rest"]["a"].tolist(), whole["w"].tolist(), whole["n"]],
    }


def damaged(coordinator, url):
    connect(coordinator)
    warnings.simplefilter("ignore")
    return failures(lambda: dcp.load({"w": torch.zeros(6)}, storage_reader=StorageReader(url)))


# --- States of any shape, with torch's own storage as the oracle ----------------------------------

KEYS = ["a", "b", "weight", "layers.0", "x/y", "~", "", 0, 7, True, None]
LEAVES = [
    None,
    True,
    3,
    -(2**70),
    0.1,
    float("inf"),
    1 - 2j,
    "text",
    "$tensor",
    b"\0",
    torch.bfloat16,
    torch.Size([2]),
    np.float32(0.5),
]


def tensor(rng):
    shape = [(), (0, 2), (3,), (2, 3), (5, 1, 2)][rng.integers(5)]
    dtype = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8][
        rng.integers(6)
    ]
    made = torch.from_numpy(rng.integers(0, 2, shape)).to(dtype)
    return made.transpose(0, -1) if made.dim() and rng.integers(2) else made


def drawn(rng, depth, *, tensors=True):
    """A part of a state; inside a tuple there are no tensors."""
    kind = rng.integers(2 if depth == 0 else 6)
    if kind == 0 and tensors:
        return tensor(rng)
    if kind <= 1:
        return LEAVES[rng.integers(len(LEAVES))]
    size = rng.integers(4)
    if kind in (2, 3):
        return {
            KEYS[i]: drawn(rng, depth - 1, tensors=tensors)
            for i in rng.permutation(len(KEYS))[:size]
        }
    if kind == 4:
        return [drawn(rng, depth - 1, tensors=tensors) for _ in range(size)]
    return tuple(drawn(rng, depth - 1, tensors=False) for _ in range(size))


def blank(value):
    """An empty target for loading a state: DCP flattens it in the same way as the saved state."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(
        isinstance(inner, torch.Tensor | dict) or isinstance(blank(inner), list) for inner in value
    ):
        return [blank(inner) for inner in value]
    return None


def describe(value):
    """All that can be seen of a state."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {repr(key): describe(inner) for key, inner in value.items()}
    return (
        [type(value).__name__, *map(describe, value)]
        if type(value) in (list, tuple)
        else repr(value)
    )


def like_torchs_own(coordinator, directory, count):
    """Random states; how many are loaded by both storages, and where these differ."""
    connect(coordinator)
    warnings.simplefilter("ignore")
    loaded, refused, different = 0, 0, []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        state = {f"top{i}": drawn(rng, 3) for i in range(3)}
        outcomes = []
        for kind in ("theirs", "ours"):
            place = f"{directory}/{kind}{seed}"
            writer = (
                {"storage_writer": StorageWriter(place)}
                if kind == "ours"
                else {"checkpoint_id": place}
            )
            reader = (
                {"storage_reader": StorageReader(place)}
                if kind == "ours"
                else {"checkpoint_id": place}
            )
            like = blank(state)
            try:
                dcp.save(state, **writer)
                dcp.load(like, **reader)
                outcomes.append(describe(like))
            except dcp_errors:
                outcomes.append("refused")
        failed = outcomes[0] == "refused"
        loaded, refused = loaded + (not failed), refused + failed
        if outcomes[0] != outcomes[1]:
            different.append([seed, repr(state), *outcomes])
    return {"loaded": loaded, "refused": refused, "different": different}
