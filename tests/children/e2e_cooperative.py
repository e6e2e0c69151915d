"""Ranks of a gloo job that restore together; what each has read, and whether it has the right
elements."""

import importlib
import logging
import os
import signal

import torch
from e2e_dtensor import distributed, drawn, laid_out, make_meshes, mesh_of
from e2e_state import TENSORS, expected
from e2e_torch import bits_of, connect, join, leave, tensor_of
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardckpt
from shardckpt import Coordinator, Target
from shardckpt.frameworks.interconnect.torch import TorchInterconnect
from shardckpt.reading.shared_reading import _Packed

restoring = importlib.import_module("shardckpt.reading.restore")


class Lines(logging.Handler):
    """Lines that shardckpt has logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("shardckpt").addHandler(self)
        logging.getLogger("shardckpt").setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


def flat(name):
    return name.replace("/", ".")


def _restored(url, like, options):
    """The state, and what this process has read for it."""
    lines = Lines()
    with_it = shardckpt.open(url)
    state = shardckpt.restore(with_it, like, **options)
    return state, {
        "read": with_it.stats.bytes_read,
        "said": [line.partition(": ")[2] for line in lines.lines],
    }


def plain(coordinator, url, options, differing=False):
    """Every rank has all tensors whole, as with DDP; `differing`: the last rank leaves one out."""
    ours = join(coordinator)
    names = [n for n in TENSORS if not (differing and ours.world.process and n == "host/large")]
    like = {flat(n): torch.ones_like(tensor_of(n)) for n in names}
    state, outcome = _restored(url, like, {**options, "strict": not differing})
    outcome["wrong"] = [
        n
        for n in names
        if bits_of(state[flat(n)], expected(n).dtype).tobytes() != expected(n).tobytes()
    ]
    outcome["in place"] = all(state[flat(n)] is like[flat(n)] for n in names)
    leave(coordinator)
    return outcome


def uneven(coordinator, url, most):
    """`plain`, with other numbers of threads on each rank, and batches of `most` bytes."""
    restoring.LARGEST_BATCH, restoring._OF_CORE = most, most // 4
    os.environ["SHARDCKPT_THREADS"] = str(8 >> coordinator.world.process)
    try:
        return plain(coordinator, url, {"cooperative": True})
    finally:
        restoring.LARGEST_BATCH, restoring._OF_CORE = 256 << 20, 64 << 20
        del os.environ["SHARDCKPT_THREADS"]


def arrays(coordinator, url):
    """Everything, as numpy arrays on every process."""
    join(coordinator)
    state, outcome = _restored(url, None, {"cooperative": True})
    outcome["wrong"] = [n for n in TENSORS if state[flat(n)].tobytes() != expected(n).tobytes()]
    leave(coordinator)
    return outcome


def dtensors(coordinator, url, seed, options):
    """Placements at random, over meshes that leave ranks out, too."""
    ours = join(coordinator)
    make_meshes(ours.world.processes)
    cases = drawn(ours.world.processes, "cooperative", seed)

    def target_of(name):
        like = distributed(torch.zeros_like(tensor_of(name)), cases[name])
        return like if len(name) % 2 else Target(laid_out(cases[name]))

    state, outcome = _restored(url, {flat(n): target_of(n) for n in TENSORS}, options)
    outcome["wrong"] = []
    for name in TENSORS:
        right, leaf = distributed(tensor_of(name), cases[name]), state[flat(name)]
        if right.device_mesh.get_coordinate() is None:
            continue
        dtype = expected(name).dtype
        if (
            bits_of(leaf._local_tensor, dtype).tobytes()
            != bits_of(right._local_tensor, dtype).tobytes()
        ):
            outcome["wrong"].append(name)
    leave(coordinator)
    return outcome


def hybrid(coordinator, url, shape, options):
    """HSDP: sharded over the one dimension of the mesh, replicated over the other."""
    join(coordinator)
    make_meshes(4)
    mesh = mesh_of((2, 2), (0, 1, 2, 3))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    like = {"w": Target((mesh, [Replicate(), Shard(0)])), "b": torch.zeros(1000)}
    state, outcome = _restored(url, like, options)
    right = distributed(
        whole, {"mesh": (2, 2), "devices": (0, 1, 2, 3), "placements": ["R", "S(0)"]}
    )
    outcome["wrong"] = not (
        isinstance(state["w"], DTensor)
        and torch.equal(state["w"]._local_tensor, right._local_tensor)
    )
    leave(coordinator)
    return outcome


def mismatched(coordinator, url, options):
    """Rank 1 has another shape, or these options, and comes to nothing before anything is read."""
    ours = join(coordinator)
    source = options.pop("source", url) if ours.world.process == 1 else url
    like = {flat(n): torch.ones_like(tensor_of(n)) for n in TENSORS}
    if ours.world.process == 1 and not options and source == url:
        like["host.large"] = torch.ones(3)
    try:
        shardckpt.restore(
            source, like, cooperative=True, **(options if ours.world.process == 1 else {})
        )
    except shardckpt.ShardckptError as e:
        return [type(e).__name__, str(e), bool((like["host.small"] == 1).all())]
    finally:
        leave(coordinator)


def managed(coordinator, root):
    """A run's latest step is damaged, and the one before it is restored instead; by all
    together."""
    join(coordinator)
    like = {flat(n): torch.ones_like(tensor_of(n)) for n in TENSORS}
    with shardckpt.CheckpointManager(root, every=1) as manager:
        restored = manager.restore(like, cooperative=True, fallback=True)
    leave(coordinator)
    return [
        restored.step,
        [
            n
            for n in TENSORS
            if bits_of(like[flat(n)], expected(n).dtype).tobytes() != expected(n).tobytes()
        ],
    ]


def interrupted(coordinator, url, where, how):
    """Rank 1 comes to an end in its third round: while it packs what it has read, or when the
    others wait for its bytes."""
    connect(coordinator)
    ours = Coordinator.current(timeout=12 if (where, how) == ("packing", "killed") else 60)
    place, name = {"packing": (_Packed, "pack"), "sending": (TorchInterconnect, "all_gather")}[
        where
    ]
    original, calls = getattr(place, name), []

    def act(*arguments):
        calls.append(1)
        if ours.world.process == 1 and len(calls) == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("there is none left")
        return original(*arguments)

    setattr(place, name, act)
    like = {flat(n): torch.ones_like(tensor_of(n)) for n in TENSORS}
    try:
        shardckpt.restore(url, like, cooperative=True, memory_limit="1MiB")
    except (shardckpt.ShardckptError, MemoryError) as e:
        return [type(e).__name__, str(e)]
    finally:
        if how != "killed":
            leave(coordinator)
    return ["nothing", ""]


def damaged(coordinator, url):
    """Some rank finds it."""
    join(coordinator)
    like = {flat(n): torch.ones_like(tensor_of(n)) for n in TENSORS}
    try:
        shardckpt.restore(url, like, cooperative=True, memory_limit="1MiB")
    finally:
        leave(coordinator)
