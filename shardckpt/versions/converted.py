"""Tensors that are converted to another dtype when they are fetched.

So no converted copy of the whole state exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt import frameworks
from shardckpt.frameworks.base import HostSource, SourceOf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.frameworks.base import Array, Source
    from shardckpt.layout.dtypes import DType


@dataclass(frozen=True, slots=True)
class ConvertedSource(SourceOf, HostSource):
    """A tensor to save in another dtype."""

    of: Source
    dtype: DType

    @property
    def staged_bytes(self) -> int:
        """Bytes of the converted elements, and of the copies that the tensor itself needs."""
        return self.of.staged_bytes + self.of.boxes.elements * self.dtype.numpy.itemsize

    @property
    def private(self) -> bool:
        """Converted elements are copies."""
        return True

    @classmethod
    def fetch(
        cls, sources: Sequence[ConvertedSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """The elements, converted; tensors of one class are fetched together."""
        results: list[list[Array]] = []
        pairs = zip(sources, positions, strict=True)
        for _, members in groupby(pairs, key=lambda pair: type(pair[0].of)):
            group = [*members]
            arrays = frameworks.fetch(
                [source.of for source, _ in group], [boxes for _, boxes in group]
            )
            for (source, _), of_source in zip(group, arrays, strict=True):
                results.append([converted(array, source.dtype) for array in of_source])
        return results


def converted(array: Array, dtype: DType) -> Array:
    """Elements rounded to another dtype, to the nearest, ties to even.

    `torch.Tensor.to` and `jax.numpy.astype` round in the same way.
    """
    torch: Any = sys.modules.get("torch")
    if (
        torch is not None
        and array.dtype == np.float32
        and dtype.name == "bfloat16"
        and array.flags.writeable
        and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    ):
        # Several times as fast as ml_dtypes.
        bits = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16)
        return bits.numpy().view(dtype.numpy)  # type: ignore[no-any-return]
    with np.errstate(all="ignore"):  # an overflow becomes infinite, as in the frameworks
        return array.astype(dtype.numpy)
