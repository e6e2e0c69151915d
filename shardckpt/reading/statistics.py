"""Statistics and a histogram of a tensor's elements, of all of them or of a sample."""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import DtypeError
from shardckpt.layout.box import Box
from shardckpt.layout.dtypes import by_name, castable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.checkpoint import Checkpoint

BINS = 40
_MOST_BOXES = 64
_DIGITS = 12
_FLOAT = by_name("float64")


def tensor_statistics(checkpoint: Checkpoint, name: str, budget: int) -> dict[str, Any]:
    """Statistics of a tensor, as JSON.

    Args:
        checkpoint: the checkpoint that has it.
        name: name of the tensor.
        budget: most bytes of elements to read; of a larger tensor, boxes of chunks are read that are spread evenly over it.

    Returns:
        `elements` of the tensor and how many were `read`; `nans`, `infinities` and `zeros` among those; of the finite ones `min`, `max`,
        `mean` and `std` (None if there are none), and a `histogram` of counts in bins of equal width between `edges`.

    Raises:
        NamesMismatchError: there is no such tensor. DtypeError: its elements are complex.
        CorruptionError, MissingDataError, ReplacedError, StorageError: as for `Checkpoint.read`.
    """
    tensor = checkpoint.tensor(name)
    if not castable(tensor.dtype, _FLOAT):
        raise DtypeError(f"{name}: there are no statistics of {tensor.dtype.name}; read its elements instead.")
    parts = [checkpoint.read(name, box).astype(np.float64).reshape(-1) for box in _sample(tensor, budget)]
    values = np.concatenate(parts) if parts else np.empty(0)
    finite = values[np.isfinite(values)]
    found: dict[str, Any] = {
        "dtype": tensor.dtype.name,
        "elements": prod(tensor.shape),
        "read": len(values),
        "nans": int(np.isnan(values).sum()),
        "infinities": int(np.isinf(values).sum()),
        "zeros": int((values == 0).sum()),
        "min": None,
        "max": None,
        "mean": None,
        "std": None,
        "histogram": [],
        "edges": [],
    }
    if len(finite):
        low, high = float(finite.min()), float(finite.max())
        with np.errstate(over="ignore"):
            mean, std = float(finite.mean()), float(finite.std())
        found |= {"min": low, "max": high, "mean": mean if math.isfinite(mean) else None, "std": std if math.isfinite(std) else None}
        if math.isfinite(high - low):
            counts, edges = np.histogram(finite, BINS if high > low else 1)
            found |= {"histogram": counts.tolist(), "edges": [float(f"{edge:.{_DIGITS}g}") for edge in edges]}
    return found


def _sample(tensor: TensorRecord, budget: int) -> Iterator[Box]:
    """Boxes of a tensor with at most `budget` bytes, or one element each: all of it, or parts of chunks."""
    if not prod(tensor.shape):
        return
    if tensor.nbytes <= budget:
        yield Box.full(tensor.shape)
        return
    chunks = [(piece, k) for piece in tensor.pieces for k in (range(piece.num_chunks) if len(tensor.pieces) == 1 else (0,))]
    each = prod(tensor.pieces[0].chunks) * tensor.dtype.itemsize
    n = max(1, min(_MOST_BOXES, budget // max(each, 1), len(chunks)))
    most = max(1, budget // (n * tensor.dtype.itemsize))
    for i in range(n):
        piece, position = chunks[i * len(chunks) // n]
        index = np.unravel_index(position, piece.grid) if piece.grid else ()
        start = [a + int(j) * side for a, j, side in zip(piece.start, index, piece.chunks, strict=True)]
        shape = [min(side, a + length - b) for side, a, length, b in zip(piece.chunks, piece.start, piece.shape, start, strict=True)]
        for d in range(len(shape)):
            shape[d] = max(1, min(shape[d], most // prod(shape[d + 1 :])))
        yield Box(tuple(start), tuple(a + side for a, side in zip(start, shape, strict=True)))
