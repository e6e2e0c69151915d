"""Sending bytes between processes through the framework that connects them.

One module per framework, imported when the job's coordinator is that framework's: nothing here imports torch or JAX for a
program without them. `cooperative` alone uses it, for restores that ask for it; nothing else in shardckpt sends tensors
between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.frameworks.coordination import Coordinator

__all__ = ["Interconnect", "interconnect_of"]


class Interconnect(Protocol):
    """A connection between all processes of a job."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that come in at a process, as a rule."""

    def all_gather(self, members: Sequence[int], process: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Have every member's part on all members. A collective of the members: all call it at the same point.

        Args:
            members: processes, ascending.
            process: this one's number; one of them.
            parts: contiguous, one per member: this one's is sent, the others are filled. Sizes are the same on all
                members, and may be zero.

        Raises:
            CoordinationError: a member is gone.
        """


def interconnect_of(coordinator: Coordinator) -> Interconnect | str:
    """What connects the processes of a coordinator, or why nothing does: the same answer on all of them."""
    kind = type(coordinator)
    if kind.__module__.startswith("shardckpt.frameworks.coordination."):
        if kind.__name__ == "TorchStore":
            from shardckpt.frameworks.interconnect import torch

            return torch.connect()
        if kind.__name__ == "JaxClient":
            from shardckpt.frameworks.interconnect import jax

            return jax.connect(coordinator)
    return f"a {kind.__name__} brings no interconnect that sends tensors; torch.distributed and jax.distributed do"
