"""Assignment of the chunks of a box to the processes that hold it: each chunk has one writer.

Every process computes the assignment alone, in time proportional to its own boxes, and all results
agree.

1. `box_holders`: the processes that hold a box are those whose devices have its tile. This follows
   from the layout and from the process of each device, once per layout and rank, whatever the
   number of tensors.
2. `deal`: all boxes with the same holders form one sequence of bytes (the *tape*), in order of
   tensor, piece and position. Each of the k holders owns one k-th of the tape, and the owner of a
   chunk's middle writes the chunk. So the bytes of two holders differ by less than two chunks per
   tape, and a holder's share is one run of the tape: adjacent chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import DeviceOwners


@dataclass(frozen=True, slots=True)
class Part:
    """The chunks of one piece that lie in one box."""

    tensor: str
    piece: str
    """Path of the piece; tensor, piece and start identify and order the parts with equal
    holders."""
    start: tuple[int, ...]
    """First index of the box."""
    holders: tuple[int, ...]
    """The processes that hold the box, ascending."""
    chunks: int
    """Number of chunks."""
    chunk_bytes: int
    """Stored bytes of each chunk."""


def deal(parts: Sequence[Part], process: int) -> list[range]:
    """Assign chunks to one process: per part, the range of its chunks, counted in grid order.

    Args:
        parts: all parts that the process holds, in any order; parts of other processes may be among
            them. For every tape that the process shares, all parts of the tape must be present.
        process: the process.

    >>> parts = [Part("w", "w", (0,), (0, 1, 2), 7, 1 << 20)]
    >>> [deal(parts, p)[0] for p in range(3)]
    [range(0, 2), range(2, 5), range(5, 7)]
    """
    tapes: dict[tuple[int, ...], list[int]] = {}
    known: dict[int, list[int]] = {}  # by identity: hashes each of the few long tuples once
    for i, part in enumerate(parts):
        tape = known.get(id(part.holders))
        if tape is None:
            tape = known[id(part.holders)] = tapes.setdefault(part.holders, [])
        tape.append(i)
    shares = [range(0)] * len(parts)
    for holders, tape in tapes.items():
        if process not in holders:
            continue
        if len(holders) == 1:
            for i in tape:
                shares[i] = range(parts[i].chunks)
            continue
        length = sum(parts[i].chunks * parts[i].chunk_bytes for i in tape)
        mine, offset = holders.index(process), 0
        for i in sorted(tape, key=lambda i: (parts[i].tensor, parts[i].piece, parts[i].start)):
            shares[i] = range(
                *(_first_chunk(parts[i], offset, length, m) for m in (mine, mine + 1))
            )
            offset += parts[i].chunks * parts[i].chunk_bytes
    return shares


def _first_chunk(part: Part, offset: int, tape: int, holder: int) -> int:
    """The first chunk of a part whose middle lies in the tape share of `holder` or a later one.

    Args:
        part: the part.
        offset: bytes of the tape before the part.
        tape: total bytes of the tape.
        holder: number of the holder, from 0; the number of holders means the end of the tape.
    """
    k, size = len(part.holders), part.chunk_bytes
    # The middle of chunk j is at offset + (j + 1/2) size, and the share begins at tape * holder /
    # k.
    first = -(-(2 * tape * holder - k * (2 * offset + size)) // (2 * size * k)) if size else 0
    return min(max(first, 0), part.chunks) if holder < k else part.chunks


def box_holders(
    layout: Layout, ndim: int, devices: ArrayLike, owners: DeviceOwners
) -> list[tuple[int, ...]]:
    """For each device, the processes whose devices hold the same tile, in ascending order.

    They hold the same tile of every tensor of rank `ndim`.

    Args:
        layout: layout of the tensors.
        ndim: rank of the tensors.
        devices: (n,) ids, such as the devices of this process.
        owners: process of each device.

    Raises:
        ShardingError: a device is not in the layout, or has no process.
    """
    return list(_box_holders(layout, ndim, tuple(np.asarray(devices, np.int64).tolist()), owners))


@lru_cache(maxsize=1024)
def _box_holders(
    layout: Layout, ndim: int, devices: tuple[int, ...], owners: DeviceOwners
) -> tuple[tuple[int, ...], ...]:
    """`box_holders`, cached: a process repeats the same call for a thousand tensors."""
    tiles = _tiles(layout, ndim, owners)
    ids = np.array(devices, np.int64)
    rows = np.minimum(np.searchsorted(tiles.device_ids, ids), len(tiles.device_ids) - 1)
    strangers = ids[tiles.device_ids[rows] != ids]
    if len(strangers):
        raise ShardingError(
            f"device {strangers[0]} holds nothing of a tensor laid out by {layout}; ask for its "
            "own devices only."
        )
    return tuple(_holders(tiles, tile) for tile in tiles.tile_of[rows].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """The tile of each device, and the processes of each tile."""

    device_ids: NDArray[np.int64]
    """(n,) ascending."""
    tile_of: NDArray[np.int64]
    """(n,) row-major number of the tile."""
    processes: NDArray[np.int64]
    """(tiles, replicas) the process of every replica."""


@lru_cache(maxsize=64)
def _tiles(layout: Layout, ndim: int, owners: DeviceOwners) -> _Tiles:
    tiling = layout.tiling(ndim)
    tile_of = tiling.tile_ids
    tiles = prod(tiling.parts)
    if len(tile_of) % tiles:
        raise ShardingError(
            f"{layout}: {len(tile_of)} devices cannot hold {tiles} tiles equally often."
        )
    order = np.argsort(tile_of, kind="stable")
    return _Tiles(
        tiling.device_ids, tile_of, owners.of_devices(tiling.device_ids[order]).reshape(tiles, -1)
    )


@lru_cache(maxsize=4096)
def _holders(tiles: _Tiles, tile: int) -> tuple[int, ...]:
    return tuple(np.unique(tiles.processes[tile]).tolist())
