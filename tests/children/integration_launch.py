"""Common parts of jobs of libraries with trainers of their own: forks with the environment that a
launcher leaves behind."""

import hashlib
import os
import socket
import warnings

import torch
import torch._dynamo  # what trainers import in each process, in seconds
from e2e_state import begin


def digest(state):
    """Of all tensors, bit by bit, and of all else."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(
            state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
    if isinstance(state, dict):
        return {str(key): digest(value) for key, value in state.items()}
    return [digest(value) for value in state] if isinstance(state, list | tuple) else repr(state)


def launch(coordinator):
    """Set up the environment of a process as a launcher would; returns the number of processes."""
    begin()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks = coordinator.world.process, coordinator.world.processes
    if ranks > 1:

        def free_port():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return probe.getsockname()[1]

        port = coordinator.agree("port", free_port)
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": 0,
        }
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        os.environ.update({key: str(value) for key, value in environment.items()})
    return ranks
