"""Small tensors on devices, which reach the contents of a background save late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt import frameworks
from shardckpt.io.buffers import round_up
from shardckpt.layout.dtypes import with_plain_bools

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.format.record import Contents
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.cuda import DeviceCopies
    from shardckpt.writing.state_share import StateShare


def late_bytes(share: StateShare) -> int:
    """Bytes of memory for `LateElements`."""
    return sum(round_up(share.plan.tensors[name].nbytes) for name in share.late)


class LateElements:
    """Small tensors on devices, on their way to the contents of a save."""

    def __init__(
        self,
        share: StateShare,
        sources: Mapping[str, Source],
        copies: DeviceCopies,
        memory: NDArray[np.uint8],
    ) -> None:
        """Queue their copies to `memory`."""
        self._order = share.plan.small
        self._arrays: dict[str, NDArray[np.generic]] = {}
        pairs = []
        for name in share.late:
            tensor = share.plan.tensors[name]
            array, memory = (
                memory[: tensor.nbytes].view(tensor.dtype.storage).reshape(tensor.shape),
                memory[round_up(tensor.nbytes) :],
            )
            self._arrays[name] = array
            # None of a tensor without elements.
            pairs += [(array, elements) for elements in frameworks.fetch([sources[name]])[0]]
        self._arrival = copies.copy(pairs)

    def added_to(self, contents: Contents) -> Contents:
        """The contents with these tensors, as soon as they have arrived."""
        self._arrival.wait()
        small = {
            **contents.small,
            **{name: with_plain_bools(array).tobytes() for name, array in self._arrays.items()},
        }
        return replace(contents, small={name: small[name] for name in self._order})
