"""Small tensors in host memory, which a background save copies many at a time.

A state may have a hundred thousand of them. An array for each, and a call of numpy for each copy,
take several times as long as the copies themselves, and training waits meanwhile. Here nothing is
made for each tensor while training waits: the plan, which is used for many saves, keeps lists of
sizes and of places in the buffer, and a save adds only the addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, compress, groupby
from typing import TYPE_CHECKING

from shardckpt import frameworks
from shardckpt.io.buffers import round_up
from shardckpt.io.copying import copy_small

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Source
    from shardckpt.plan.blocks import Block

_MOST_BYTES = 32 << 10
"""Most bytes of such a tensor: a larger one takes longer to copy than its array takes to make."""
_LEAST_TENSORS = 64
"""Fewest consecutive small tensors that are grouped."""


@dataclass(frozen=True, slots=True)
class SmallBlocks:
    """Blocks that follow one another, each of them a complete small tensor."""

    names: list[str]
    """The tensors."""
    blocks: list[Block]
    sizes: list[int]
    """Bytes of each."""
    begins: list[int]
    """The position of each, in bytes, in a buffer that has all of them."""
    nbytes: int
    """Bytes of that buffer."""
    dtypes: list[np.dtype[np.generic]]

    @classmethod
    def of(cls, blocks: Mapping[str, Block], tensors: Mapping[str, TensorRecord]) -> SmallBlocks:
        """The blocks of these tensors."""
        sizes = [block.nbytes for block in blocks.values()]
        *begins, nbytes = accumulate(map(round_up, sizes), initial=0)
        dtypes = [tensors[name].dtype.storage for name in blocks]
        return cls([*blocks], [*blocks.values()], sizes, begins, nbytes, dtypes)

    def arrays(self, memory: NDArray[np.uint8]) -> Iterator[tuple[Block, NDArray[np.generic]]]:
        """The blocks with their elements in a buffer that has all of them."""
        for block, begin, size, dtype in zip(
            self.blocks, self.begins, self.sizes, self.dtypes, strict=True
        ):
            yield block, memory[begin : begin + size].view(dtype).reshape(block.box.shape)

    def copy(
        self, sources: Sequence[Source], addresses: list[int], memory: NDArray[np.uint8]
    ) -> None:
        """Copy the elements of these tensors, with their `addresses_of`, to such a buffer."""
        columns = [self.begins, addresses, self.sizes]
        without = [i for i, address in enumerate(addresses) if not address]
        if without:
            copies = [*self.arrays(memory)]
            views = frameworks.fetch([sources[i] for i in without])
            for i, (elements,) in zip(without, views, strict=True):
                copies[i][1][...] = elements.view(self.dtypes[i])
            columns = [[*compress(column, addresses)] for column in columns]
        copy_small(memory, *columns)


def addresses_of(sources: Sequence[Source]) -> list[int] | None:
    """The address of each tensor, 0 if its elements are not in order there.

    None if some of them are fetched into memory of their own, which must not be copied again.
    """
    addresses = [source.address for source in sources]
    return (
        None
        if any(
            source.private or source.resident or source.staged_bytes
            for source, address in zip(sources, addresses, strict=True)
            if not address
        )
        else addresses
    )


def group_blocks(
    blocks: Mapping[str, Sequence[Block]], tensors: Mapping[str, TensorRecord]
) -> list[SmallBlocks | list[str]]:
    """All tensors of a plan in order: small ones together, and the names of others."""

    def is_small(name: str) -> bool:
        of_tensor = blocks[name]
        size = of_tensor[0].nbytes
        return len(of_tensor) == 1 and size == tensors[name].nbytes and size <= _MOST_BYTES

    groups = [(small, [*names]) for small, names in groupby(blocks, is_small)]
    merged: list[SmallBlocks | list[str]] = []
    for together, pairs in groupby(groups, lambda pair: pair[0] and len(pair[1]) >= _LEAST_TENSORS):
        if together:
            merged += [
                SmallBlocks.of({n: blocks[n][0] for n in names}, tensors) for _, names in pairs
            ]
        else:
            merged.append([*chain.from_iterable(names for _, names in pairs)])
    return merged
