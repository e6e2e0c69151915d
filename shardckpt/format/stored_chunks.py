"""Chunks as they are stored: elements laid out, compressed, and with their checksums.

A chunk has little-endian row-major elements, optionally compressed with zstd, then their crc32c.
Chunks at a tensor's edge are padded with zeros to full size, as zarr requires.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

from shardckpt.errors import CorruptionError
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, ZSTD_LEVEL, room_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def lay_out(
    elements: NDArray[np.generic], chunk_shape: tuple[int, ...], rows: NDArray[np.uint8]
) -> None:
    """Copy a block of complete chunks into the stored form; `close` then finishes the chunks.

    Args:
        elements: the chunks' elements in the stored dtype, cut off at the array's edge.
        chunk_shape: shape of one chunk, to which edge chunks are padded.
        rows: (n, `room_for`) memory, one row per chunk in grid order.
    """
    lay_out_all([elements], chunk_shape, rows)


def lay_out_all(
    blocks: Sequence[NDArray[np.generic]], chunk_shape: tuple[int, ...], rows: NDArray[np.uint8]
) -> None:
    """Like `lay_out` for many blocks of one shape and dtype, one after another.

    In each dimension there are full chunks and, if the array ends inside a chunk, a partial last
    one. One copy is made for each combination of these, mostly one per block, however many chunks
    there are.
    """
    # numpy has 64 dimensions.
    sides = [
        (n, side)
        for n, side in zip(blocks[0].shape, chunk_shape, strict=True)
        if (n, side) != (1, 1)
    ]
    blocks = [elements.reshape([n for n, _ in sides]) for elements in blocks]
    shape, chunk_shape, itemsize = (
        blocks[0].shape,
        tuple(side for _, side in sides),
        blocks[0].itemsize,
    )
    # numpy copies these types fast.
    kind = np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else blocks[0].dtype
    grid = [-(-n // side) for n, side in zip(shape, chunk_shape, strict=True)]
    chunks = rows[:, :-CHECKSUM_BYTES].view(kind).reshape([len(blocks), *grid, *chunk_shape])
    # Two axes per dimension: the index of the chunk, and the index in the chunk.
    chunks = chunks.transpose(
        [0, *(axis for d in range(1, len(grid) + 1) for axis in (d, len(grid) + d))]
    )
    if any(n % side for n, side in zip(shape, chunk_shape, strict=True)):
        rows[:, :-CHECKSUM_BYTES] = 0
    for runs in product(*map(_runs, shape, chunk_shape)):
        # The ellipses make numpy return 0-d arrays instead of scalars.
        cells: Any = (
            slice(None),
            *(index for n, begin, side in runs for index in (slice(begin, begin + n), slice(side))),
        )
        first = [begin * full for (_, begin, _), full in zip(runs, chunk_shape, strict=True)]
        inside: Any = (
            *(slice(at, at + n * side) for (n, _, side), at in zip(runs, first, strict=True)),
            ...,
        )
        parts = chunks[cells]
        split = parts.shape[1:]
        for i, elements in enumerate(blocks):
            parts[i, ...] = elements.view(kind)[inside].reshape(split)


def chunks_in_place(
    blocks: Sequence[NDArray[np.generic]], chunk_shape: tuple[int, ...]
) -> list[NDArray[np.unsignedinteger[Any]]]:
    """The chunks of blocks as boxes of these, in the order of `lay_out_all`, as unsigned numbers.

    Empty if a chunk is cut off. Elements have 1, 2, 4 or 8 bytes.
    """
    shape, itemsize = blocks[0].shape, blocks[0].itemsize
    if any(n % side for n, side in zip(shape, chunk_shape, strict=True)):
        return []
    spans = [
        [slice(a, a + side) for a in range(0, n, side)]
        for n, side in zip(shape, chunk_shape, strict=True)
    ]
    # The ellipsis makes numpy return 0-d arrays instead of scalars.
    cells: list[Any] = [(*cell, ...) for cell in product(*spans)]
    return [
        part[cell] for part in (block.view(f"u{itemsize}") for block in blocks) for cell in cells
    ]


def _runs(n: int, side: int) -> list[tuple[int, int, int]]:
    """Groups of chunks of a dimension with equally many elements.

    A group is given as number of chunks, index of the first, and elements of each.
    """
    full, rest = divmod(n, side)
    return [run for run in ((full, 0, side), (1, full, rest)) if run[0] and run[2]]


def close(
    rows: NDArray[np.uint8], compression: str | None
) -> tuple[NDArray[np.uint8], list[int], list[int]]:
    """Add checksums to laid-out elements, and compress them if wanted.

    Args:
        rows: (n, size) filled by `lay_out`, contiguous; the last bytes of each row are overwritten.
        compression: None, "zstd" or "difference"; with the latter the chunks have all of their
            elements (`format.differences`).

    Returns:
        The bytes to store, one chunk after another (`rows` themselves without compression); the
        number of bytes of each chunk; and the crc32c at the end of each chunk.
    """
    if compression is not None:
        elements = [row[:-CHECKSUM_BYTES] for row in rows]
        return with_checksums(
            [compress(row) if compression == "zstd" else b"\0" + row.tobytes() for row in elements]
        )
    count, size = rows.shape
    data = rows.reshape(-1)
    with memoryview(data) as view:  # type: ignore[arg-type]  # an ndarray is a buffer
        crcs = [
            crc32c.crc32c(view[end - size : end - CHECKSUM_BYTES])
            for end in range(size, count * size + 1, size)
        ]
    rows[:, -CHECKSUM_BYTES:] = np.array(crcs, "<u4").view(np.uint8).reshape(count, CHECKSUM_BYTES)
    return data, [size] * count, crcs


def with_checksums(stored: Sequence[bytes]) -> tuple[NDArray[np.uint8], list[int], list[int]]:
    """Add checksums to encoded chunks; returns what `close` does."""
    crcs = [*map(crc32c.crc32c, stored)]
    parts = [
        part
        for chunk, crc in zip(stored, crcs, strict=True)
        for part in (chunk, crc.to_bytes(CHECKSUM_BYTES, "little"))
    ]
    return (
        np.frombuffer(b"".join(parts), np.uint8),
        [len(chunk) + CHECKSUM_BYTES for chunk in stored],
        crcs,
    )


def encode(
    elements: NDArray[np.generic], chunk_shape: tuple[int, ...], compression: str | None
) -> tuple[NDArray[np.uint8], int]:
    """Encode one chunk (`lay_out` and `close`).

    Return the bytes to store and the crc32c at their end.
    """
    rows = np.empty((1, room_for(chunk_shape, elements.itemsize)), np.uint8)
    lay_out(elements, chunk_shape, rows)
    data, _, (crc,) = close(rows, compression)
    return data, crc


def decompress(stored: NDArray[np.uint8], expected: int, where: str) -> NDArray[np.uint8]:
    """Decompress a zstd frame of `expected` bytes.

    Raises:
        CorruptionError: not a zstd frame of that size (its checksum was right, so the writer made
            an error).
    """
    out = np.empty(expected, np.uint8)
    try:
        # With an output buffer, numcodecs refuses a frame of more bytes, whatever its header says,
        # and one of fewer bytes only where the header does not say how many.
        data = _zstd().decompress(stored, out)
        declared, _ = _frame_header(bytes(stored[:_LONGEST_HEADER]))
    except (RuntimeError, ValueError) as e:
        raise CorruptionError(f"{where}: not a zstd frame of {expected} bytes ({e}).") from e
    if declared not in (None, expected):
        raise CorruptionError(f"{where}: not a zstd frame of {expected} bytes (it has fewer).")
    return np.frombuffer(data, np.uint8)


def compress(data: NDArray[np.uint8]) -> bytes:
    """Compress bytes to one zstd frame."""
    frame: bytes = _zstd().compress(data, ZSTD_LEVEL)
    return frame


@cache
def _zstd() -> Any:
    # Through the package: another thread may be in the middle of importing it.
    from numcodecs import zstd

    return zstd


_MAGIC = b"\x28\xb5\x2f\xfd"
_LONGEST_HEADER = 18
_REPEATED, _COMPRESSED = 1, 2
_BLOCK_BYTES = 1 << 17
"""Most bytes of a compressed block when it is decompressed."""


def _frame_header(frame: bytes) -> tuple[int | None, int]:
    """The bytes in memory that a zstd frame declares (None: it does not), and its header's length.

    See RFC 8878, section 3.1.1.1.

    Raises:
        ValueError: it does not begin as a frame.
    """
    if not frame.startswith(_MAGIC) or len(frame) < 6:
        raise ValueError("it is not a zstd frame")
    flags = frame[4]
    single_segment = flags >> 5 & 1
    begin = 6 - single_segment + (0, 1, 2, 4)[flags & 3]
    width = (single_segment, 2, 4, 8)[flags >> 6]
    size = int.from_bytes(frame[begin : begin + width], "little") + (256 if width == 2 else 0)
    return size if width else None, begin + width


def frame_limit(frame: bytes) -> int:
    """Most bytes of a zstd frame when it is decompressed (RFC 8878, section 3.1.1).

    Raises:
        ValueError: not one complete frame.
    """
    declared, at = _frame_header(frame)
    if declared is not None:
        return declared
    nbytes, last = 0, 0
    while not last:
        block = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        nbytes += _BLOCK_BYTES if kind == _COMPRESSED else size
        at += 3 + (1 if kind == _REPEATED else size)
        if at > len(frame):
            raise ValueError("the zstd frame is incomplete")
    if at + 4 * (frame[4] >> 2 & 1) != len(frame):
        raise ValueError("more than a zstd frame is there")
    return nbytes
