"""Outputs made of arrays in memory, for tests of what outputs are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.structure import TensorRecord
from shardckpt.layout.dtypes import of_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.reading.naming.outputs import OutputTensor

Arrays = dict[str, np.ndarray[Any, Any]]


def records(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorRecord]:
    """A structure's records of arrays, without layouts and pieces, which nobody here asks for."""
    return {
        name: TensorRecord(name, array.shape, of_numpy(array.dtype), None, ())
        for name, array in arrays.items()
    }


def made(outputs: Iterable[OutputTensor], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """The outputs, each element of which is written once."""
    arrays_made = {}
    for output in outputs:
        array = np.zeros(output.shape, output.dtype.numpy)
        times = np.zeros(output.shape, np.int64)
        for view in output.sources:
            axes = [d for d in view.permutation if d is not None]
            lost = tuple(d for d in range(view.box.ndim) if d not in axes)
            kept = (
                arrays[view.tensor][view.box.slices]
                .squeeze(lost)
                .transpose(np.argsort(np.argsort(axes)))
            )
            array[view.inside.slices] = kept.reshape(view.shape).astype(array.dtype)
            times[view.inside.slices] += 1
        assert (times == 1).all()
        arrays_made[output.name] = array
    return arrays_made
