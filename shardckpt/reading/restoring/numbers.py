"""Numbers that the checkpoint or `like` has where the other one has a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import StructureMismatchError
from shardckpt.layout.dtypes import by_name, of_numpy
from shardckpt.reading.lazy_array import empty
from shardckpt.state.names import shown
from shardckpt.state.numbers import array_of_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.state.match import Matched

    Array = NDArray[np.generic]


def arrays_for_numbers(
    checkpoint: Checkpoint, matched: Matched, record: Callable[[str], TensorRecord]
) -> dict[str, list[tuple[str, object]]]:
    """Arrays to read stored tensors into where `like` has numbers."""
    arrays: dict[str, list[tuple[str, object]]] = {}
    for stored, names in matched.numbers.items():
        tensor = record(stored)
        for name, number in names:
            if tensor.shape:
                raise StructureMismatchError(
                    f"{checkpoint.location}: {shown(name)} is a tensor of shape {tensor.shape} in "
                    f"the checkpoint, and in `like` a number ({type(number).__qualname__}); pass "
                    "a tensor, an ndarray or a shardckpt.Target there."
                )
            arrays.setdefault(stored, []).append((name, empty(name, (), tensor.dtype.numpy)))
    return arrays


def sink_of_number(name: str, leaf: object, number: object, *, cast: bool) -> tuple[Sink, Array]:
    """The place of a tensor for which a number is stored, and what goes there."""
    natural = np.asarray(number).dtype
    sink = frameworks.target(
        name, leaf, (), by_name("int64") if natural.kind == "O" else of_numpy(natural)
    )
    return sink, array_of_number(number, sink.dtype.numpy, name, cast=cast)
