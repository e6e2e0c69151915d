"""Numbers that the checkpoint or `like` has where the other one has a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import StructureMismatchError
from shardckpt.format.structure import TensorRecord
from shardckpt.layout.dtypes import by_name, of_numpy
from shardckpt.reading.landing import Landing
from shardckpt.reading.lazy_array import empty
from shardckpt.state.names import shown
from shardckpt.state.numbers import array_of_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

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


def landings_of_numbers(matched: Matched, *, cast: bool) -> list[tuple[Landing, Array]]:
    """The places of tensors for which numbers are stored, and what goes there."""
    landings = []
    for name, (leaf, number) in matched.filled.items():
        natural = np.asarray(number).dtype
        dtype = by_name("int64") if natural.kind == "O" else of_numpy(natural)
        landing = Landing(
            TensorRecord(name, (), dtype, None, ()), frameworks.target(name, leaf, (), dtype)
        )
        landing.names.append(name)
        sink_dtype = landing.sink.dtype.numpy
        landings.append((landing, array_of_number(number, sink_dtype, name, cast=cast)))
    return landings


def place_numbers(landings: Sequence[tuple[Landing, Array]]) -> dict[str, object]:
    """Place the numbers, and return the leaves by name."""
    return {
        landing.names[0]: landing.sink.place([array] if len(landing.sink.boxes) else [])
        for landing, array in landings
    }
