"""Copies of torch tensors on their own devices; see `snapshots`.

They need torch alone, so every device works that torch has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import BudgetError
from shardckpt.frameworks import cuda_runtime
from shardckpt.frameworks.snapshots import WORD, ChangedWords, sum_of
from shardckpt.frameworks.torch import array_of, torch_dtype
from shardckpt.layout.dtypes import of_numpy

if TYPE_CHECKING:
    from shardckpt.frameworks.base import Array
    from shardckpt.layout.dtypes import DType

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_AT_A_TIME = 1 << 24
"""Words that are compared at a time: the masks and positions of so many are in the device's memory,
too."""


class TorchSnapshot:
    """See `snapshots.Snapshot`."""

    def __init__(self) -> None:
        """Have no copy yet."""
        self._words: Any = None

    def take(self, elements: Any, dtype: DType) -> ChangedWords:
        """See `snapshots.Snapshot`; the host waits for the work that is queued on the device.

        Raises:
            BudgetError: the device has no memory for the copy.
        """
        try:
            with torch.no_grad():
                return self._take(elements.detach(), dtype)
        except torch.OutOfMemoryError as e:
            raise BudgetError(
                f"{elements.device} has no memory left for a second copy of the weights ({e}); "
                'use Publisher(snapshot="host").'
            ) from e

    def _take(self, elements: Any, dtype: DType) -> ChangedWords:
        cast = elements.to(torch_dtype(dtype)).resolve_conj().resolve_neg()
        words = cast.contiguous().view(-1).view(_SIGNED[dtype.itemsize])
        if self._words is None or self._words.shape != words.shape:
            self._words = words.clone()
            return ChangedWords(None, _on_host(self._words, dtype), _sum(words))
        positions, values = [], []
        for first in range(0, len(words), _AT_A_TIME):
            new, old = words[first : first + _AT_A_TIME], self._words[first : first + _AT_A_TIME]
            at = torch.nonzero(new != old).view(-1)
            positions.append(at + first)
            values.append(new[at])
            old[at] = values[-1]  # what is sent, also where the tensor changes meanwhile
        total = _sum(words)
        if sum(map(len, positions)) > len(words) // 4:
            return ChangedWords(None, _on_host(self._words, dtype), total)
        every = torch.cat(positions).to(torch.int32 if len(words) < 1 << 31 else torch.int64)
        return ChangedWords(every.cpu().numpy(), _on_host(torch.cat(values), dtype), total)


def _on_host(words: Any, dtype: DType) -> Any:
    """A copy in host memory."""
    copy = words.clone() if words.device.type == "cpu" else words.cpu()
    return array_of(copy, of_numpy(WORD[dtype.itemsize]))


class QueuedSum:
    """`snapshots.sum_of` a tensor on a device with streams, queued on the device.

    The sum is queued behind the work of the thread that makes it.
    """

    def __init__(self, tensor: Any) -> None:
        """Queue it; nothing waits."""
        with torch.no_grad():
            plain = tensor.detach().resolve_conj().resolve_neg()
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            self._total = _total(plain.contiguous().view(-1).view(_SIGNED[plain.itemsize]))
        runtime = cuda_runtime.runtime
        self._word = WORD[int(plain.itemsize)]
        self._made = runtime.record(runtime.current_stream(runtime.device(tensor)))

    def equals(self, copy: Array) -> bool:
        """Whether a copy in host memory has this sum; any thread may ask."""
        cuda_runtime.runtime.synchronize(self._made)
        words: Array = copy.reshape(-1).view(self._word)
        return sum_of(words) == int(self._total.item()) % (1 << 32)


def _sum(words: Any) -> int:
    """`snapshots.sum_of` words, made on their device."""
    return int(_total(words).item()) % (1 << 32)


def _total(words: Any) -> Any:
    """A tensor with the sum, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    mask = (1 << 8 * words.itemsize) - 1
    for first in range(0, len(words), _AT_A_TIME):
        part = words[first : first + _AT_A_TIME].to(torch.int64).bitwise_and_(mask)
        weights = (
            torch.arange(first, first + len(part), dtype=torch.int64, device=words.device)
            .mul_(2)
            .add_(1)
        )
        total += part.mul_(weights).sum()
    return total


make = TorchSnapshot
