"""Interconnect of torch.distributed: CPU tensors are sent within the default process group.

Every member sends its part to every other member. This sends as many bytes as a ring would, needs
no groups that all ranks would have to create first, and no padding where parts differ in size.
Bytes are sent as uint8, so that every dtype is possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class TorchInterconnect:
    """The interconnect of the default process group."""

    bandwidth = 1.25e9
    """Bytes per second of gloo over 10 Gbit/s."""

    def all_gather(
        self, members: Sequence[int], process: int, parts: Sequence[NDArray[np.uint8]]
    ) -> None:
        """See `Interconnect`."""
        tensors = dict(zip(members, map(torch.from_numpy, parts), strict=True))
        mine = tensors.pop(process)
        sent = [dist.P2POp(dist.isend, mine, peer) for peer in tensors if mine.numel()]
        received = [
            dist.P2POp(dist.irecv, tensor, peer)
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        try:
            for work in dist.batch_isend_irecv(sent + received) if sent or received else ():
                work.wait()
        except RuntimeError as e:  # errors of gloo and torch's DistError are RuntimeErrors
            raise CoordinationError(
                f"process {process} lost the connection to another of the processes "
                f"{list(members)!r:.200} in a cooperative restore "
                f"({str(e).partition(chr(10))[0]}); see why that one ended, and start the job "
                "again."
            ) from e


def connect() -> TorchInterconnect | str:
    """The default group, or the reason why it cannot be used.

    The group needs a backend for tensors in host memory.
    """
    backends = dist.get_backend_config()
    if "cpu:gloo" not in backends and "cpu:mpi" not in backends:
        return (
            f"the process group ({backends}) has no backend for CPU tensors; "
            "init_process_group('cpu:gloo,cuda:nccl') gives it one"
        )
    return TorchInterconnect()
