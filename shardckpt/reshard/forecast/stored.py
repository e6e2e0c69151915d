"""The stored length and the writing host of each chunk of a tensor.

The chunk tables say both. Where they are not read (a record alone, or more chunks than are worth it), a chunk has the length of
its elements and their checksum, compressed as the checkpoint is on average; and of a chunk that several hosts could have written
each is taken to have written its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.layout.box import BoxArray
from shardckpt.plan.overlaps import overlaps
from shardckpt.plan.readers import host_boxes
from shardckpt.reshard.forecast.hosts import Bins, Hosts, placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.places import ChunkPlaces, Places

    Ints = NDArray[np.int64]

__all__ = ["ByLayout", "ByTable", "StoredChunks", "StoredTensors"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """All chunks of a tensor, piece after piece, in grid order."""

    length: Ints
    """(n,) bytes."""
    writer: Ints
    """(n,) which row of `shares` says who wrote it."""
    shares: NDArray[np.float64]
    """(rows, bins of source hosts) which part of it was written in each bin; rows sum to 1."""
    places: ChunkPlaces | None
    """Where each is, where that is known."""


class StoredTensors(Protocol):
    """Knows how tensors are stored."""

    bins: Bins
    """Of the hosts that wrote them."""
    exact: bool
    """Whether what it says is known, or follows from layouts and averages."""

    def chunks(self, tensor: TensorRecord) -> StoredChunks:
        """How a tensor is stored."""


class ByTable:
    """By the chunk tables."""

    exact = True

    def __init__(self, record: CheckpointRecord, places: Places) -> None:
        self.bins = Bins(max(1, len(record.hosts)))
        self._places = places
        self._shares = np.eye(self.bins.number)

    def chunks(self, tensor: TensorRecord) -> StoredChunks:
        """See `StoredTensors`. What the committer wrote counts as the first host's."""
        places = self._places.of(tensor.name, tensor.pieces)
        return StoredChunks(places.length, self.bins.of(np.maximum(places.host, 0)), self._shares, places)


class ByLayout:
    """By what the record says, and averages."""

    exact = False

    def __init__(self, record: CheckpointRecord, compressed: float | None = None) -> None:
        """Of a checkpoint with that record.

        Args:
            record: names its hosts and tensors.
            compressed: stored bytes per byte that chunks would have uncompressed; None: as the record's totals say.
        """
        tensors = record.structure.tensors.values()
        self._hosts = Hosts.of(((placed(t.layout, len(t.shape)), len(t.shape)) for t in tensors), number=max(1, len(record.hosts)))
        self.bins = Bins(self._hosts.number)
        self._ratio = 1.0 if compressed is None else compressed
        if compressed is None and record.compression is not None:
            unpacked = sum(_length(t, k) * p.num_chunks for t in tensors if t.base is None for k, p in enumerate(t.pieces))
            self._ratio = record.totals["stored_bytes"] / unpacked if unpacked else 1.0

    def chunks(self, tensor: TensorRecord) -> StoredChunks:
        """See `StoredTensors`."""
        length = np.concatenate([np.full(p.num_chunks, round(_length(tensor, k) * self._ratio)) for k, p in enumerate(tensor.pieces)])
        held = host_boxes(placed(tensor.layout, len(tensor.shape)), tensor.shape, self._hosts.owners, self._hosts.number)
        writer = []
        for piece in tensor.pieces:
            near = held.boxes.overlapping(piece.box)
            pairs = overlaps(piece, BoxArray(held.boxes.start[near], held.boxes.stop[near]))
            first = np.searchsorted(pairs.chunk, np.arange(piece.num_chunks))
            writer.append(near[pairs.box[np.minimum(first, max(0, len(pairs.box) - 1))]])  # a chunk lies in one shard
        # Of each box, the hosts of all groups that hold it: in each bin so many of them.
        in_bin = np.zeros((held.groups, self.bins.number))
        known = held.group >= 0
        np.add.at(in_bin, (held.group[known], self.bins.of(np.arange(self._hosts.number))[known]), 1.0)
        shares = np.zeros((len(held.boxes), self.bins.number))
        np.add.at(shares, held.held, in_bin[held.held_by])
        return StoredChunks(length, np.concatenate(writer), shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0), None)


def _length(tensor: TensorRecord, piece: int) -> int:
    """Bytes of a chunk that is not compressed."""
    return prod(tensor.pieces[piece].chunks) * tensor.dtype.storage.itemsize + CHECKSUM_BYTES
