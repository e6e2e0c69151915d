"""Copies of tensors on the tensors' own devices, and the changes of a tensor since its copy.

A device compares a tensor with its copy (`torch_snapshots`, `jax_snapshots`), brings the copy up to
date, and sends the positions and the values of what differs. The host has a copy, too (`HostCopy`).
With each change comes a sum that the device has made of the tensor itself: the host's copy must
have the same one, so a change that was missed, or a tensor that changed meanwhile, is found.

Elements are compared as words: unsigned integers of 1, 2 or 4 bytes. An element of 8 bytes is two
of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.dtypes import DType

    Words = NDArray[Any]

WORD: dict[int, np.dtype[Any]] = {nbytes: np.dtype(f"u{min(4, nbytes)}") for nbytes in (1, 2, 4, 8)}
"""Bytes of an element → the words that it is compared as; elements of other sizes are not compared
on devices."""
_SUMMED = 1 << 18
"""Words that are summed at a time, so that they stay in the processor's cache."""


class ChangedWords(NamedTuple):
    """The words of a tensor that have changed since its copy was made."""

    positions: NDArray[np.integer[Any]] | None
    """(n,) positions of the words that differ, ascending; None: all words are sent."""
    words: Words
    """(n,) their new values."""
    total: int
    """`sum_of` all words of the tensor, as its device has it."""


class Snapshot(Protocol):
    """A copy of a box of a tensor, on the tensor's device."""

    def take(self, elements: Any, dtype: DType) -> ChangedWords:
        """Compare a box of a tensor, cast to a dtype, with this copy, and update the copy.

        The copy has the same elements as the box afterwards.
        """


def sum_of(words: Words) -> int:
    """The sum of all words, each times an odd number that belongs to its position, modulo 2**32.

    A single word that differs always changes it, and two words that were exchanged do so, too,
    except by a rare accident.
    """
    total = 0
    for first in range(0, len(words), _SUMMED):
        part = words[first : first + _SUMMED].astype(np.uint32)
        weights = np.arange(first, first + len(part), dtype=np.uint64).astype(
            np.uint32
        ) * np.uint32(2) + np.uint32(1)
        total += int(np.sum(part * weights, dtype=np.uint32))
    return total % (1 << 32)


def merged(changes: Sequence[ChangedWords]) -> ChangedWords:
    """One change for several of one tensor, the oldest first."""
    whole = max((i for i, change in enumerate(changes) if change.positions is None), default=-1)
    if whole >= 0:
        words = changes[whole].words.copy()
        for positions, values, _ in changes[whole + 1 :]:
            words[positions] = values
        return ChangedWords(None, words, changes[-1].total)
    latest = np.concatenate(
        [change.positions for change in reversed(changes) if change.positions is not None]
    )
    values = np.concatenate([change.words for change in reversed(changes)])
    # Of equal ones the first, which is the newest.
    positions, first = np.unique(latest, return_index=True)
    return ChangedWords(positions, values[first], changes[-1].total)
