"""A chunk as it is stored: little-endian row-major elements, zstd by choice, then their crc32c.

These are the zarr v3 codecs `bytes`, `zstd` and `crc32c`. Chunks at a tensor's edge are stored whole, padded with
zeros, as zarr asks.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

from shardckpt.errors import CorruptionError
from shardckpt.io.zarr_meta import ZSTD_LEVEL

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CHECKSUM_BYTES", "close", "decompress", "encode", "lay_out", "room_for"]

CHECKSUM_BYTES = 4


def room_for(chunk_shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes in which a chunk is laid out: its elements, and its checksum."""
    return prod(chunk_shape) * itemsize + CHECKSUM_BYTES


def lay_out(elements: NDArray[np.generic], chunk_shape: tuple[int, ...], raw: NDArray[np.uint8]) -> None:
    """Copy a chunk's elements to how they are stored; `close` then makes it a chunk.

    Args:
        elements: the chunk's elements, cut off at the tensor's edge, in the stored dtype.
        chunk_shape: the shape to pad to.
        raw: memory for it, of `room_for` bytes, aligned for the dtype.
    """
    whole = raw[:-CHECKSUM_BYTES].view(elements.dtype).reshape(chunk_shape)
    if elements.shape == chunk_shape:
        whole[...] = elements
    else:
        raw[:-CHECKSUM_BYTES] = 0
        whole[tuple(map(slice, elements.shape))] = elements


def close(raw: NDArray[np.uint8], compression: str | None) -> tuple[NDArray[np.uint8], int]:
    """Make a chunk of elements that are laid out.

    Args:
        raw: what `lay_out` filled; its last bytes are written to.
        compression: None or "zstd".

    Returns:
        The bytes to store, which are `raw` itself without compression, and the crc32c that ends them.
    """
    if compression is not None:
        packed = _zstd().encode(raw[:-CHECKSUM_BYTES])
        raw = np.empty(len(packed) + CHECKSUM_BYTES, np.uint8)
        raw[:-CHECKSUM_BYTES] = np.frombuffer(packed, np.uint8)
    crc = crc32c.crc32c(raw[:-CHECKSUM_BYTES])
    raw[-CHECKSUM_BYTES:] = np.frombuffer(crc.to_bytes(CHECKSUM_BYTES, "little"), np.uint8)
    return raw, crc


def encode(elements: NDArray[np.generic], chunk_shape: tuple[int, ...], compression: str | None) -> tuple[NDArray[np.uint8], int]:
    """Encode one chunk: `lay_out` in memory of its own, and `close`."""
    raw = np.empty(room_for(chunk_shape, elements.itemsize), np.uint8)
    lay_out(elements, chunk_shape, raw)
    return close(raw, compression)


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
