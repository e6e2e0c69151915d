"""Transfer of bytes between processes through the framework that connects them.

There is one module per framework, imported if the job's coordinator is of that framework: a program
without torch or JAX imports neither. Only `cooperative` uses this package, for restores that
request it; nothing else in shardckpt sends tensors between processes.
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
        """Typical bytes per second that arrive at a process."""

    def all_gather(
        self, members: Sequence[int], process: int, parts: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Send every member's part to all members.

        A collective of the members: all call it at the same point.

        Args:
            members: the numbers of the members, ascending.
            process: the number of this process, which is a member.
            parts: contiguous arrays, one per member: this process's is sent, the others are filled.
                Sizes are the same on all members, and may be zero.

        Raises:
            CoordinationError: a member is gone.
        """


def interconnect_of(coordinator: Coordinator) -> Interconnect | str:
    """The interconnect of a coordinator's processes, or the reason why there is none.

    All processes get the same answer.
    """
    kind = type(coordinator)
    if kind.__module__.startswith("shardckpt.frameworks.coordination."):
        if kind.__name__ == "TorchStore":
            from shardckpt.frameworks.interconnect import torch

            return torch.connect()
        if kind.__name__ == "JaxClient":
            from shardckpt.frameworks.interconnect import jax

            return jax.connect(coordinator)
    return (
        f"a {kind.__name__} brings no interconnect that sends tensors; torch.distributed and "
        "jax.distributed do"
    )
