"""The stored chunks that each host reads when a checkpoint is restored onto a layout.

The counterpart of `writers`, for all hosts at once and without communication.

1. `host_boxes`: a host reads the distinct boxes of its devices. Hosts whose devices hold the same
   boxes form a *group*: they read the same chunks, so each count is made once per group.
2. `chunks_read`: per group, the chunks that its boxes overlap, each once, however many of the boxes
   share it.

Both depend on a tensor's shape, chunks and layout alone, not on its name: among a thousand tensors
of a model, a few dozen differ. Cost is proportional to the devices, and to the pairs of a group and
a chunk that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.layout.box import Box, BoxArray, distinct_boxes
from shardckpt.layout.placements import Placements
from shardckpt.plan.pieces import overlaps_of, touching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import DeviceOwners
    from shardckpt.plan.pieces import Piece

    Ints = NDArray[np.int64]

_PAIRS = 2**16
"""Most pairs of pieces and boxes that are compared at a time, unless one piece has more."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBoxes:
    """The boxes of one tensor that each host's devices hold, with hosts grouped by equal boxes."""

    boxes: BoxArray
    """All distinct, non-empty boxes."""
    group: Ints
    """(hosts,) the group of each host; -1: its devices hold nothing of the tensor."""
    held_by: Ints
    """(n,) group of each pair of a group and a box that it holds, ascending."""
    held: Ints
    """(n,) the box of each pair."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.group.max(initial=-1)) + 1

    def elements(self) -> Ints:
        """(groups,) elements that each host of a group needs."""
        return np.bincount(self.held_by, self.boxes.sizes()[self.held], self.groups).astype(
            np.int64
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChunksRead:
    """The chunks of one tensor that each group of hosts reads: n pairs, by group, then by chunk."""

    group: Ints
    """(n,)"""
    chunk: Ints
    """(n,) number of the chunk, counted through all pieces in order, in grid order within each."""


def host_boxes(
    layout: Layout | Placements | None, shape: tuple[int, ...], owners: DeviceOwners, hosts: int
) -> HostBoxes:
    """Find the boxes that each host's devices hold.

    Args:
        layout: layout of the tensor; None: every host holds the complete tensor.
        shape: shape of the tensor.
        owners: host of each device; devices that the layout does not name hold nothing.
        hosts: number of hosts.

    Raises:
        ShardingError: a device of the layout has no host, or the layout does not fit the shape.
    """
    if layout is None:
        whole, where = distinct_boxes(BoxArray.of([Box.full(shape)], len(shape)))
        everyone = np.zeros(hosts, np.int64) if len(whole) else np.full(hosts, -1, np.int64)
        return HostBoxes(whole, everyone, where[where >= 0], where[where >= 0])
    if isinstance(layout, Placements):
        devices, every = layout.boxes(shape)
    else:
        tiles = layout.device_boxes(shape)
        devices, every = tiles.device_ids, tiles.boxes
    boxes, where = distinct_boxes(every)
    holds = where >= 0
    pairs = np.unique(np.stack([owners.of_devices(devices[holds]), where[holds]], axis=1), axis=0)
    # Hosts with the same boxes are found by the bytes of their lists.
    group = np.full(hosts, -1, np.int64)
    known: dict[bytes, int] = {}
    first: list[Ints] = []
    begin = np.searchsorted(pairs[:, 0], np.arange(hosts + 1))
    for host in np.unique(pairs[:, 0]).tolist():
        mine = pairs[begin[host] : begin[host + 1], 1]
        group[host] = known.setdefault(mine.tobytes(), len(known))
        if len(known) > len(first):
            first.append(mine)
    held_by = np.repeat(np.arange(len(first), dtype=np.int64), [len(mine) for mine in first])
    return HostBoxes(boxes, group, held_by, np.concatenate([*first, np.empty(0, np.int64)]))


def chunks_read(pieces: Sequence[Piece], held: HostBoxes) -> ChunksRead:
    """Find the chunks that each group of hosts reads.

    Args:
        pieces: the arrays that hold the tensor.
        held: the boxes that each group needs.
    """
    begins = np.cumsum([0, *(piece.num_chunks for piece in pieces)])
    # There may be as many pieces as boxes; each box is compared only with the pieces near it.
    piece, box = touching(pieces, held.boxes)
    order = np.argsort(piece, kind="stable")
    piece, box = piece[order], box[order]
    keys = [np.empty(0, np.int64)]
    # Of one piece, or of many that few boxes touch, at a time: there may be many pairs in all.
    pairs_before = np.searchsorted(piece, np.arange(len(pieces) + 1))
    begin = 0
    while begin < len(piece):
        fits = np.searchsorted(pairs_before, begin + _PAIRS, "right") - 1
        stop = int(pairs_before[max(fits, piece[begin] + 1)])
        keys.append(_chunk_keys(pieces, held, piece[begin:stop], box[begin:stop], begins))
        begin = stop
    # The batches share no chunks.
    group, chunk = np.divmod(np.sort(np.concatenate(keys)), max(int(begins[-1]), 1))
    return ChunksRead(group, chunk)


def _chunk_keys(
    pieces: Sequence[Piece], held: HostBoxes, piece: Ints, box: Ints, begins: Ints
) -> Ints:
    """`group * begins[-1] + chunk` for each chunk that a group reads, of pairs of piece and box."""
    near = BoxArray(held.boxes.start[box], held.boxes.stop[box])
    first, last = int(piece[0]), int(piece[-1])
    pairs = overlaps_of(pieces[first : last + 1], near, piece - first)
    of_box = box[pairs.box]
    order = np.argsort(of_box, kind="stable")
    numbers = (begins[piece[pairs.box]] + pairs.chunk)[order]
    begin = np.searchsorted(of_box[order], np.arange(len(held.boxes) + 1))
    counts = (begin[1:] - begin[:-1])[held.held]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk = numbers[np.repeat(begin[held.held], counts) + within]
    # A group's boxes may share chunks; each is read once.
    return np.unique(np.repeat(held.held_by, counts) * int(begins[-1]) + chunk)
