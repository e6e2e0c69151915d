"""Numbers that the checkpoint or `like` has where the other one has a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import StructureMismatchError
from shardckpt.format.structure import TensorRecord
from shardckpt.frameworks.base import InPlace
from shardckpt.layout.dtypes import by_name, of_numpy
from shardckpt.reading.landing import Landing
from shardckpt.reading.lazy_array import empty
from shardckpt.state.names import shown
from shardckpt.state.numbers import array_of_number

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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


def landings_of_numbers(
    checkpoint: Checkpoint, matched: Matched, *, cast: bool
) -> list[tuple[Landing, Array]]:
    """The places of tensors for which numbers are stored, and what goes there.

    Names of one tensor in `like` share a landing.

    Raises:
        StructureMismatchError: different numbers are stored for one tensor in `like`.
    """
    landings: dict[Hashable, tuple[Landing, Array]] = {}
    records: dict[tuple[str, bytes], TensorRecord] = {}
    for name, (leaf, number) in matched.filled.items():
        natural = np.asarray(number).dtype
        dtype = by_name("int64") if natural.kind == "O" else of_numpy(natural)
        sink = frameworks.target(name, leaf, (), dtype)
        array = array_of_number(number, sink.dtype.numpy, name, cast=cast)
        value = sink.dtype.name, array.tobytes()
        key: Hashable = sink.tie_key if isinstance(sink.tie_key, InPlace) else name
        if key not in landings:
            # Equal numbers are one record, so views of one memory may each get the number.
            if value not in records:
                records[value] = TensorRecord(name, (), sink.dtype, None, ())
            landings[key] = Landing(records[value], sink), array
        landing, first = landings[key]
        if first.tobytes() != value[1]:
            raise StructureMismatchError(
                f"{checkpoint.location}: {shown(landing.names[0])} and {shown(name)} are one "
                f"tensor in `like`, and the checkpoint has the numbers {first.item()} and "
                f"{array.item()} for them; give each a tensor of its own."
            )
        landing.names.append(name)
    return [*landings.values()]


def place_numbers(landings: Sequence[tuple[Landing, Array]]) -> dict[str, object]:
    """Place the numbers, and return the leaves by name."""
    restored: dict[str, object] = {}
    for landing, array in landings:
        leaf = landing.sink.place([array] if len(landing.sink.boxes) else [])
        restored |= dict.fromkeys(landing.names, leaf)
    return restored
