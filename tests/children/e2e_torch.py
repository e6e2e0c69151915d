"""Common parts of the torch processes of the end-to-end tests: a gloo job, and tensors over the
elements that numpy knows."""

from datetime import timedelta

import torch
import torch._dynamo  # what a DTensor's first operation imports, in seconds
import torch.distributed as dist
from e2e_state import begin, expected

from shardckpt import Coordinator


def join(coordinator, **devices):
    """Become a rank of a gloo job; the coordinator that shardckpt finds there.

    Args:
        coordinator: over files, for what a launcher would say.
        devices: by framework, those that are this process's.
    """
    connect(coordinator)
    return Coordinator.current(devices=devices or None, timeout=60)


def connect(coordinator):
    """Become a rank of a gloo job, of which shardckpt has not heard yet."""
    begin()
    torch.set_num_threads(1)
    rank, ranks = coordinator.world.process, coordinator.world.processes
    if ranks > 1:
        server = (
            dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
            if rank == 0
            else None
        )
        port = coordinator.agree("port", lambda: server.port)
        store = server or dist.TCPStore(
            "127.0.0.1", port, ranks, is_master=False, timeout=timedelta(seconds=60)
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )


def leave(coordinator):
    """Nobody goes before all have done what they came for: rank 0 holds the store."""
    coordinator.share("leave", None)


def tensor_of(name):
    """The elements as a CPU tensor that knows nothing of our adapters."""
    whole = expected(name)
    dtype = getattr(torch, whole.dtype.name)
    empty = torch.zeros(whole.shape, dtype=dtype)
    return (
        torch.frombuffer(bytearray(whole.tobytes()), dtype=dtype).reshape(whole.shape)
        if whole.size
        else empty
    )


def bits_of(tensor, dtype):
    """A CPU tensor's elements as an array of a numpy dtype of the same width."""
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
