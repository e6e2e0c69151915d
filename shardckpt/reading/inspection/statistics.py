"""Statistics and histograms of tensors: of all elements, or of a sample of one tensor.

Statistics of all elements are streamed within a memory limit.

Tensors of complex numbers have none; they are named with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite, nan, prod, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import DtypeError, NamesMismatchError, OptionError
from shardckpt.io.failures import reading_takes_threads
from shardckpt.layout.box import Box
from shardckpt.layout.dtypes import by_name, castable
from shardckpt.options import parse_bytes
from shardckpt.reading.compare_values import (
    DEFAULT_MEMORY_LIMIT,
    Pair,
    block_batches,
    read_blocks,
)
from shardckpt.reading.inspection.running import RunningStatistics
from shardckpt.state.select import selector, unused_patterns
from shardckpt.text import Message, file_size, given, named_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.compare_values import BlockOfPair

LEAST_MEMORY_LIMIT = 1 << 20
_MOST_BOXES = 64
_STRIDE = 1 << 16
_FLOAT = by_name("float64")


def tensor_statistics(checkpoint: Checkpoint, name: str, budget: int) -> dict[str, Any]:
    """Statistics of a tensor, as JSON.

    Args:
        checkpoint: the checkpoint that has it.
        name: name of the tensor.
        budget: most bytes of elements to read; of a larger tensor, boxes of chunks are read that
            are spread evenly over it.

    Returns:
        `elements` of the tensor and how many were `read`; `nans`, `infinities` and `zeros` among
        those; of the finite ones `min`, `max`, `mean`, `std` and `norm` (None if there are none),
        and a `histogram` of counts in bins of equal width between `edges`.

    Raises:
        NamesMismatchError: there is no such tensor. DtypeError: its elements are complex.
        CorruptionError, MissingDataError, ReplacedError, StorageError: as for `Checkpoint.read`.
    """
    tensor = checkpoint.tensor(name)
    if not castable(tensor.dtype, _FLOAT):
        raise DtypeError(
            f"{name}: there are no statistics of {tensor.dtype.name}; read its elements instead."
        )
    parts = [checkpoint.read(name, box).reshape(-1) for box in _sample(tensor, budget)]
    tally = RunningStatistics()
    if parts:
        tally.add(np.concatenate(parts))
    return {"dtype": tensor.dtype.name, "elements": prod(tensor.shape), **tally.to_json()}


@dataclass(frozen=True, slots=True)
class ElementChange:
    """The distance between the elements of a tensor in two checkpoints."""

    name: str
    norm: float
    """Euclidean norm of the difference of all elements."""
    relative: float | None
    """The norm as a part of the norm in the first checkpoint; None: that is zero, and the
    difference is not; NaN: no element there is finite, or its norm is too large for a float."""
    largest: float
    """Largest absolute difference of an element; 0: no element differs. NaN: an element is NaN in
    one checkpoint only."""


@dataclass(slots=True)
class StateStatistics:
    """Statistics of the tensors of a checkpoint, or of two beside each other."""

    totals: tuple[RunningStatistics, ...]
    """Statistics of all tensors together, in each checkpoint."""
    tensors: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    """Name → statistics in each checkpoint, as JSON."""
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    changes: list[ElementChange] = field(default_factory=list)
    """With two checkpoints: all tensors of one shape, largest relative change first. Changes
    from zero, to NaN and to infinity come before all others."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name → the reason why there are no statistics of it."""

    def add(self, name: str, tallies: Sequence[RunningStatistics]) -> None:
        """Add the statistics of a tensor in each checkpoint."""
        self.tensors[name] = tuple(tally.to_json() for tally in tallies)
        for total, tally in zip(self.totals, tallies, strict=True):
            total.merge(tally)

    def to_json(self, side: int = 0) -> dict[str, Any]:
        """All statistics of one checkpoint, as JSON."""
        tensors = [
            {
                "name": name,
                "dtype": self.dtypes[name],
                "shape": list(self.shapes[name]),
                **sides[side],
            }
            for name, sides in self.tensors.items()
        ]
        return {"tensors": tensors, "all": self.totals[side].to_json()}


def state_statistics(
    checkpoint: Checkpoint,
    other: Checkpoint | None = None,
    *,
    only: Sequence[str] | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> StateStatistics:
    """Compute statistics of all elements.

    Args:
        checkpoint: a checkpoint of any format.
        other: another one, to be compared with it: tensors of the same name and shape.
        only: patterns of names; None: all tensors.
        memory_limit: bytes of elements in memory at once.
        progress: called with bytes done so far and in all.

    Raises:
        OptionError: the memory limit is too low.
        NamesMismatchError: a pattern selects nothing.
        CorruptionError, MissingDataError, ReplacedError, StorageError: as for `Checkpoint.read`.
    """
    limit = parse_bytes(memory_limit, "memory_limit")
    if limit < LEAST_MEMORY_LIMIT:
        raise OptionError(
            Message(
                named_size("memory_limit", limit),
                f": statistics take at least {file_size(LEAST_MEMORY_LIMIT)}.",
            )
        )
    sides = [checkpoint] if other is None else [checkpoint, other]
    statistics = StateStatistics(_new_tallies(sides))
    pairs = _pairs(checkpoint, other, only, statistics)
    tallies = _new_tallies(sides)  # of one tensor after another
    distances = {} if other is None else {name: _Distance() for name in statistics.tensors}
    done, total = 0, sum(pair.nbytes for pair in pairs)
    with reading_takes_threads(checkpoint.location):
        for batch in block_batches(pairs, limit // 2 // len(sides)):
            if progress is not None:
                progress(done, total)
            tallies = _add_batch(sides, batch, tallies, statistics, distances)
            done += sum(block.nbytes for block in batch)
    if progress is not None:
        progress(total, total)
    norms = {name: statistics.tensors[name][0]["norm"] for name in distances}
    changes = [distance.result(name, norms[name]) for name, distance in distances.items()]
    statistics.changes = sorted(changes, key=_by_relative)
    return statistics


def _add_batch(
    sides: Sequence[Checkpoint],
    batch: Sequence[BlockOfPair],
    tallies: tuple[RunningStatistics, ...],
    statistics: StateStatistics,
    distances: dict[str, _Distance],
) -> tuple[RunningStatistics, ...]:
    """Read the blocks of a batch, and add their elements to the statistics and the distances.

    `tallies` are those of the first block's tensor; return those of the next tensor.
    """
    blocks = []
    for one, side in zip(sides, "ab", strict=False):
        with one.reading():
            blocks.append(read_blocks(one.reader, batch, side))
    for block, *elements in zip(batch, *blocks, strict=True):
        flat = [
            part.reshape(-1).view(of.dtype.numpy)
            for part, of in zip(elements, (block.pair.a, block.pair.b), strict=False)
        ]
        for tally, values in zip(tallies, flat, strict=True):
            tally.add(values)
        if len(flat) > 1:
            distances[block.pair.name].add(*flat)
        if block.last:
            statistics.add(block.pair.name, tallies)
            tallies = _new_tallies(sides)
    return tallies


def _new_tallies(sides: Sequence[Checkpoint]) -> tuple[RunningStatistics, ...]:
    """A tally for each checkpoint."""
    return tuple(RunningStatistics() for _ in sides)


def _by_relative(change: ElementChange) -> float:
    """Key of the order of changes: those that are not finite, or from zero, come first."""
    relative = change.relative
    return -relative if relative is not None and isfinite(relative) else -inf


def _pairs(
    checkpoint: Checkpoint,
    other: Checkpoint | None,
    only: Sequence[str] | None,
    statistics: StateStatistics,
) -> list[Pair]:
    """The tensors to read; those that have no statistics are left out, with the reason."""
    names = list(checkpoint.record.structure.tensors)
    selects = selector(None if only is None else list(only))
    unused = unused_patterns(None if only is None else list(only), names)
    if unused is not None:
        advice = " selects none of its tensors; `shardckpt info` lists them."
        raise NamesMismatchError(Message(f"{checkpoint.location}: ", given(only=unused), advice))
    pairs: list[Pair] = []
    nothing = tuple(tally.to_json() for tally in statistics.totals)
    theirs = {} if other is None else other.record.structure.tensors
    for name in filter(selects, names):
        one = checkpoint.tensor(name)
        two = one if other is None else theirs.get(name)
        if two is None:
            statistics.left_out[name] = "only in the first checkpoint"
        elif two.shape != one.shape:
            statistics.left_out[name] = "another shape in the second checkpoint"
        elif not castable(one.dtype, _FLOAT) or not castable(two.dtype, _FLOAT):
            statistics.left_out[name] = f"elements of {one.dtype.name}"
        else:
            statistics.tensors[name] = nothing
            statistics.dtypes[name], statistics.shapes[name] = one.dtype.name, one.shape
            pairs += [Pair(name, one, two)] if one.nbytes else []
    known = frozenset(names)
    statistics.left_out |= {
        name: "only in the second checkpoint"
        for name in filter(selects, theirs)
        if name not in known
    }
    return pairs


class _Distance:
    """Running distance between the elements of two tensors."""

    def __init__(self) -> None:
        self.squares = self.largest = 0.0

    def add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Add the elements of a block."""
        with np.errstate(all="ignore"):
            for begin in range(0, len(one), _STRIDE):
                apart = _differences(one[begin : begin + _STRIDE], other[begin : begin + _STRIDE])
                self.squares += float(np.dot(apart, apart))
                self.largest = float(np.maximum(self.largest, apart.max()))  # NaN if one is

    def result(self, name: str, norm: float | None) -> ElementChange:
        """The distance of all blocks, beside the norm of the first tensor, if that has one."""
        apart = sqrt(self.squares) or self.largest  # a small square is 0
        relative = None if norm == 0 else apart / (nan if norm is None else norm)
        return ElementChange(name, apart, relative if apart else 0.0, self.largest)


def _differences(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Absolute differences of elements; not 0 if elements differ, and NaN if only one is NaN."""
    if one.dtype == other.dtype and one.dtype.kind in "iu":
        apart = np.where(one > other, one - other, other - one)
        # The sign bit is a digit.
        magnitude: NDArray[np.float64] = apart.view(f"u{apart.itemsize}").astype(np.float64)
        return magnitude
    a, b = one.astype(np.float64), other.astype(np.float64)
    if one.dtype.kind in "iu" and other.dtype.kind in "iu":
        # numpy compares integers exactly, while both may round to one float.
        return np.where(one == other, 0.0, np.maximum(np.abs(a - b), 1.0))
    # Infinities of one sign are equal.
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(equal, 0.0, np.abs(a - b))


def _sample(tensor: TensorRecord, budget: int) -> Iterator[Box]:
    """Boxes of a tensor with at most `budget` bytes, or with one element each.

    They are all of the tensor, or parts of its chunks.
    """
    if not prod(tensor.shape):
        return
    if tensor.nbytes <= budget:
        yield Box.full(tensor.shape)
        return
    pieces = tensor.pieces  # of several, the first chunk of each is read
    number = pieces[0].num_chunks if len(pieces) == 1 else len(pieces)
    each = prod(pieces[0].chunks) * tensor.dtype.itemsize
    n = max(1, min(_MOST_BOXES, budget // max(each, 1), number))
    most = max(1, budget // (n * tensor.dtype.itemsize))
    for i in range(n):
        at = i * number // n
        piece, position = (pieces[0], at) if len(pieces) == 1 else (pieces[at], 0)
        index = np.unravel_index(position, piece.grid) if piece.grid else ()
        start = [
            a + int(j) * side for a, j, side in zip(piece.start, index, piece.chunks, strict=True)
        ]
        shape = [
            min(side, a + length - b)
            for side, a, length, b in zip(
                piece.chunks, piece.start, piece.shape, start, strict=True
            )
        ]
        for d in range(len(shape)):
            shape[d] = max(1, min(shape[d], most // prod(shape[d + 1 :])))
        yield Box(tuple(start), tuple(a + side for a, side in zip(start, shape, strict=True)))
