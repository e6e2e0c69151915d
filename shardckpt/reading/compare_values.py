"""Comparison of the elements of pairs of tensors in bounded memory.

1. Every pair is cut into blocks: boxes within the memory limit that divide no chunk of either
   tensor if such borders are within reach, so that each stored chunk is read once.
2. Blocks are read in batches, small tensors many at a time, with one call per checkpoint and batch.
3. Elements are compared as bits. Only differing elements are compared as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.cut import Order, cut
from shardckpt.plan.pieces import batches
from shardckpt.reading.locate import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType
    from shardckpt.reading.reader import ChunkReader


DEFAULT_MEMORY_LIMIT = 256 << 20
"""Bytes of elements of both checkpoints together that are in memory at once."""
_MOST_BLOCKS = 4096
"""Most blocks in one batch; keeps planning cheap compared with reading."""
STRIDE = 1 << 16
"""Elements compared at a time, so that masks and differences fit the processor's cache."""

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one shape, and for a comparison of one dtype."""

    name: str
    a: TensorRecord
    b: TensorRecord

    @property
    def itemsize(self) -> int:
        """Bytes of an element, in the tensor where it has more."""
        return max(self.a.dtype.itemsize, self.b.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, in the tensor that has more."""
        return prod(self.a.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Difference between the elements of two tensors."""

    name: str
    differing: int
    """Number of elements with different bits."""
    size: int
    """Number of all elements."""
    largest: float | None
    """The largest absolute difference (exact for integers; 0 if only 0.0 and -0.0 differ; infinite
    beside an infinity) among differing elements that are not NaN in either tensor; None if there
    are none."""
    nans: int
    """Number of differing elements that are NaN in one or both."""
    first: tuple[int, ...]
    """Index of the first differing element, in row-major order."""
    relative: float | None = None
    """`largest`, divided by the largest magnitude among the differing elements of the first tensor;
    None: one of them is not finite, or the divisor is 0."""


@dataclass(frozen=True, slots=True)
class BlockOfPair:
    """A box of both tensors of a pair."""

    pair: Pair
    box: Box
    last: bool
    """Whether it is the pair's last block."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, in the tensor that has more."""
        return self.box.size * self.pair.itemsize


def compare_values(
    a: ChunkReader,
    b: ChunkReader,
    pairs: Sequence[Pair],
    limit: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[ValueChange]:
    """Compare pairs of tensors, and yield those that differ, in order.

    Args:
        a: Reads the pairs' first tensors.
        b: Reads their second ones.
        pairs: Pairs of equal shape and dtype.
        limit: Bytes for elements of both tensors.
        progress: Called with bytes compared so far and in all.
    """
    total = sum(pair.nbytes for pair in pairs)
    done = 0
    tally: _Tally | None = None
    for batch in block_batches(pairs, limit // 2):
        if progress is not None:
            progress(done, total)
        for block, one, other in zip(
            batch, read_blocks(a, batch, "a"), read_blocks(b, batch, "b"), strict=True
        ):
            if tally is None:
                tally = _Tally(block.pair)
            tally.add(block.box, one, other)
            done += block.nbytes
            if block.last:
                if tally.differing:
                    yield tally.result()
                tally = None
        del one, other  # the next batch needs the memory
    if progress is not None:
        progress(done, total)


def block_batches(pairs: Sequence[Pair], nbytes: int) -> Iterator[list[BlockOfPair]]:
    """All blocks of all pairs, in batches of at most `nbytes` in each of the tensors."""
    return batches(
        _cut_pairs(pairs, nbytes), lambda block: (block.nbytes, 1), (nbytes, _MOST_BLOCKS)
    )


def _cut_pairs(pairs: Sequence[Pair], nbytes: int) -> Iterator[BlockOfPair]:
    """All blocks of all pairs, in row-major order of each array of `a`.

    Each block has at most `nbytes` in each of the tensors.
    """
    for pair in pairs:
        pieces = [piece for piece in pair.a.pieces if prod(piece.shape)]
        most = max(1, nbytes // pair.itemsize)
        for piece in pieces:
            # Chunks of `b` are divided where no common border is within reach, those of `a` only if
            # one is too large.
            whole, others = (
                ([piece], pair.b.pieces)
                if prod(piece.chunks) <= most
                else ([], [piece, *pair.b.pieces])
            )
            for step in cut(piece.box, whole, most, Order.ROWS, sources=others, joined=most):
                yield BlockOfPair(
                    pair, step.box, last=piece is pieces[-1] and step.box.stop == piece.box.stop
                )


def read_blocks(reader: ChunkReader, batch: Sequence[BlockOfPair], side: str) -> list[NDArray[Any]]:
    """The elements of a batch's blocks, in the stored dtype."""
    requests = []
    for block in batch:
        tensor: TensorRecord = getattr(block.pair, side)
        out = np.empty(block.box.shape, tensor.dtype.storage)
        requests.append(Request.of(tensor, BoxArray.of([block.box], block.box.ndim), [out]))
    reader.read(requests)
    return [request.buffers[0] for request in requests]


class _Tally:
    """Running result for one pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.differing = 0
        self.nans = 0
        self.largest: float | None = None
        self.scale = 0.0
        self.first: tuple[int, ...] | None = None

    def add(self, box: Box, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Compare a block."""
        bits_a, bits_b = _bits(one), _bits(other)
        flat_a, flat_b = (array.reshape(-1).view(self.pair.a.dtype.numpy) for array in (one, other))
        for begin in range(0, len(bits_a), STRIDE):
            part = slice(begin, begin + STRIDE)
            unequal = bits_a[part] != bits_b[part]
            where = np.flatnonzero(unequal.any(axis=1))
            if len(where):
                self._differ(box, begin + int(where[0]), flat_a[part][where], flat_b[part][where])

    def _differ(self, box: Box, position: int, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Count elements that differ; the first is at `position` of the block."""
        self.differing += len(one)
        first = tuple(
            int(i) + start
            for i, start in zip(np.unravel_index(position, box.shape), box.start, strict=True)
        )
        self.first = first if self.first is None else min(self.first, first)
        largest, nans = _distance(one, other, self.pair.a.dtype)
        self.nans += nans
        if largest is not None:
            self.largest = largest if self.largest is None else max(self.largest, largest)
        self.scale = max(self.scale, _magnitude(one, self.pair.a.dtype))

    def result(self) -> ValueChange:
        """The result, after all blocks were added."""
        assert self.first is not None
        size, finite = prod(self.pair.a.shape), self.largest is not None and isfinite(self.largest)
        relative = (
            self.largest / self.scale
            if finite and self.largest is not None and self.scale
            else None
        )
        return ValueChange(
            self.pair.name, self.differing, size, self.largest, self.nans, self.first, relative
        )


def _bits(array: NDArray[Any]) -> Bits:
    """(elements, words): the elements as unsigned integers, in words of at most 8 bytes.

    Types wider than 8 bytes have several words per element.
    """
    word = min(array.itemsize, 8)
    return array.reshape(-1).view(f"u{word}").reshape(array.size, array.itemsize // word)


def _magnitude(array: NDArray[Any], dtype: DType) -> float:
    """The largest finite magnitude of some elements; 0: there is none."""
    with np.errstate(all="ignore"):
        sizes = np.abs(array.astype(np.complex128 if "complex" in dtype.name else np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _distance(one: NDArray[Any], other: NDArray[Any], dtype: DType) -> tuple[float | None, int]:
    """The largest absolute difference, and the number of pairs with a NaN.

    Pairs with a NaN have no difference.
    """
    if dtype.name == "bool":
        return 1, 0
    if dtype.name.startswith(("int", "uint")):
        if dtype.itemsize == 1:  # int4 and similar types have no arithmetic
            one, other = one.astype(np.int16), other.astype(np.int16)
        # Modular arithmetic of the same width: exact where the signed difference would overflow.
        unsigned = f"u{one.itemsize}"
        high, low = np.maximum(one, other).view(unsigned), np.minimum(one, other).view(unsigned)
        return int((high - low).max()), 0
    wide = np.complex128 if "complex" in dtype.name else np.float64
    with np.errstate(all="ignore"):
        difference = np.abs(one.astype(wide) - other.astype(wide))
        # Infinities of one sign have equal bits and do not get here, unless the type is complex;
        # their difference is NaN.
        is_nan = np.isnan(one.astype(wide)) | np.isnan(other.astype(wide))
    known = difference[~is_nan]
    largest = float(np.where(np.isnan(known), np.inf, known).max()) if len(known) else None
    return largest, int(is_nan.sum())
