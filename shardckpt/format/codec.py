"""A chunk as it is stored: little-endian row-major elements, zstd by choice, then their crc32c.

These are the zarr v3 codecs `bytes`, `zstd` and `crc32c`. Chunks at a tensor's edge are stored whole, padded with
zeros, as zarr asks.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

from shardckpt.errors import CorruptionError
from shardckpt.format.zarr_meta import ZSTD_LEVEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord

__all__ = ["CHECKSUM_BYTES", "close", "decompress", "encode", "largest_chunk", "lay_out", "lay_out_all", "room_for"]

CHECKSUM_BYTES = 4


def room_for(chunk_shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes in which a chunk is laid out: its elements, and its checksum."""
    return prod(chunk_shape) * itemsize + CHECKSUM_BYTES


def largest_chunk(tensors: Iterable[TensorRecord]) -> int:
    """Bytes of the largest chunk of some tensors, with its checksum."""
    return max((room_for(p.chunks, t.dtype.itemsize) for t in tensors for p in t.pieces if p.num_chunks), default=0)


def lay_out(elements: NDArray[np.generic], chunk_shape: tuple[int, ...], rows: NDArray[np.uint8]) -> None:
    """Copy a block of whole chunks to how they are stored; `close` then makes chunks of it.

    Args:
        elements: the chunks' elements, cut off at the array's edge, in the stored dtype.
        chunk_shape: of one chunk, the shape to pad to.
        rows: (n, `room_for`) memory, one row per chunk in grid order.
    """
    lay_out_all([elements], chunk_shape, rows)


def lay_out_all(blocks: Sequence[NDArray[np.generic]], chunk_shape: tuple[int, ...], rows: NDArray[np.uint8]) -> None:
    """As `lay_out`, many blocks of one shape and dtype, one behind the other.

    Per dimension there are the chunks that are full and, where the array ends inside of one, the last. One copy is made of each
    combination of these: mostly one of a block, however many chunks.
    """
    sides = [(n, side) for n, side in zip(blocks[0].shape, chunk_shape, strict=True) if (n, side) != (1, 1)]  # numpy has 64 dimensions
    blocks = [elements.reshape([n for n, _ in sides]) for elements in blocks]
    shape, chunk_shape, itemsize = blocks[0].shape, tuple(side for _, side in sides), blocks[0].itemsize
    kind = np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else blocks[0].dtype  # numpy knows how to copy these fast
    grid = [-(-n // side) for n, side in zip(shape, chunk_shape, strict=True)]
    chunks = rows[:, :-CHECKSUM_BYTES].view(kind).reshape([len(blocks), *grid, *chunk_shape])
    # Axes by dimension: which chunk, and where in it.
    chunks = chunks.transpose([0, *(axis for d in range(1, len(grid) + 1) for axis in (d, len(grid) + d))])
    if any(n % side for n, side in zip(shape, chunk_shape, strict=True)):
        rows[:, :-CHECKSUM_BYTES] = 0
    for runs in product(*map(_runs, shape, chunk_shape)):
        # The ellipses keep 0-d arrays arrays.
        cells: Any = (slice(None), *(index for n, begin, side in runs for index in (slice(begin, begin + n), slice(side))))
        first = [begin * full for (_, begin, _), full in zip(runs, chunk_shape, strict=True)]
        inside: Any = (*(slice(at, at + n * side) for (n, _, side), at in zip(runs, first, strict=True)), ...)
        parts = chunks[cells]
        split = parts.shape[1:]
        for i, elements in enumerate(blocks):
            parts[i, ...] = elements.view(kind)[inside].reshape(split)


def _runs(n: int, side: int) -> list[tuple[int, int, int]]:
    """Chunks of a dimension that have equally many elements: how many, the first, and elements of each."""
    full, rest = divmod(n, side)
    return [run for run in ((full, 0, side), (1, full, rest)) if run[0] and run[2]]


def close(rows: NDArray[np.uint8], compression: str | None) -> tuple[NDArray[np.uint8], list[int], list[int]]:
    """Make chunks of elements that are laid out.

    Args:
        rows: (n, size) what `lay_out` filled, contiguous; the last bytes of each are written to.
        compression: None or "zstd".

    Returns:
        The bytes to store, one chunk behind the other, which are `rows` themselves without compression; of each chunk the bytes, and
        the crc32c that ends it.
    """
    if compression is not None:
        return _compressed(rows)
    count, size = rows.shape
    data = rows.reshape(-1)
    with memoryview(data) as view:  # type: ignore[arg-type]  # an ndarray is a buffer
        crcs = [crc32c.crc32c(view[end - size : end - CHECKSUM_BYTES]) for end in range(size, count * size + 1, size)]
    rows[:, -CHECKSUM_BYTES:] = np.array(crcs, "<u4").view(np.uint8).reshape(count, CHECKSUM_BYTES)
    return data, [size] * count, crcs


def _compressed(rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], list[int], list[int]]:
    zstd = _zstd()
    packed = [zstd.encode(row[:-CHECKSUM_BYTES]) for row in rows]
    crcs = [crc32c.crc32c(frame) for frame in packed]
    parts = [part for frame, crc in zip(packed, crcs, strict=True) for part in (frame, crc.to_bytes(CHECKSUM_BYTES, "little"))]
    return np.frombuffer(b"".join(parts), np.uint8), [len(frame) + CHECKSUM_BYTES for frame in packed], crcs


def encode(elements: NDArray[np.generic], chunk_shape: tuple[int, ...], compression: str | None) -> tuple[NDArray[np.uint8], int]:
    """Encode one chunk: `lay_out` in memory of its own, and `close`; the bytes to store, and the crc32c that ends them."""
    rows = np.empty((1, room_for(chunk_shape, elements.itemsize)), np.uint8)
    lay_out(elements, chunk_shape, rows)
    data, _, (crc,) = close(rows, compression)
    return data, crc


def decompress(stored: NDArray[np.uint8], expected: int, where: str) -> NDArray[np.uint8]:
    """The `expected` bytes that a zstd frame holds.

    Raises:
        CorruptionError: not a zstd frame of that size (its checksum passed, so it was written wrongly).
    """
    out = np.empty(expected, np.uint8)
    try:
        # numcodecs sizes nothing by the frame's own word when it is given where to decompress to.
        data = _zstd().decode(stored, out)
    except (RuntimeError, ValueError) as e:
        raise CorruptionError(f"{where}: not a zstd frame of {expected} bytes ({e}).") from e
    return np.frombuffer(data, np.uint8)


def _zstd() -> Any:
    from numcodecs.zstd import Zstd

    return Zstd(level=ZSTD_LEVEL)
