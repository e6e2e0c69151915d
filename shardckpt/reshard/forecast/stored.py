"""The stored length and the writing host of each chunk of a tensor.

The chunk tables record both. Without them (only a record is known, or there are too many chunks), a
chunk's length is estimated as its elements and their checksum at the checkpoint's average
compression; a version that is stored as differences counts with all its elements, uncompressed. If
several hosts could have written a chunk, an equal share is assumed for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.layout.box import BoxArray
from shardckpt.plan.pieces import overlaps
from shardckpt.plan.readers import host_boxes
from shardckpt.reading.locate import MOST_CHUNKS
from shardckpt.reading.runs import count_runs
from shardckpt.reshard.forecast.hosts import Bins, Hosts, placed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.places import ChunkPlaces, Places
    from shardckpt.reading.runs import RunLimits

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """All chunks of a tensor, piece after piece, in grid order."""

    length: Ints
    """(n,) bytes."""
    writer: Ints
    """(n,) the row of `shares` for the chunk's writer."""
    shares: NDArray[np.float64]
    """(rows, bins of source hosts) the fraction written in each bin; rows sum to 1."""
    places: ChunkPlaces | None
    """Places of the chunks, if known."""


class ByTable:
    """Stored chunks according to the chunk tables."""

    exact = True
    """Whether the values are known; if not, they are estimates from layouts and averages."""

    def __init__(self, record: CheckpointRecord, places: Places) -> None:
        self.bins = Bins(max(1, len(record.hosts)))
        """Bins of the hosts that wrote the tensors."""
        self._places = places
        self._shares = np.eye(self.bins.number)

    def chunks(self, tensor: TensorRecord) -> StoredChunks:
        """The stored chunks of a tensor. Chunks from the committer count as the first host's."""
        places = self._places.of(tensor.name, tensor.pieces)
        return StoredChunks(
            places.length, self.bins.of(np.maximum(places.host, 0)), self._shares, places
        )


class ByLayout:
    """Stored chunks estimated from the record and averages."""

    exact = False

    def __init__(self, record: CheckpointRecord, compressed: float | None = None) -> None:
        """Prepare estimates for a checkpoint.

        Args:
            record: the checkpoint's record, with its hosts and tensors.
            compressed: stored bytes per uncompressed byte of chunks; None: derived from the
                record's totals.
        """
        tensors = record.structure.tensors.values()
        self._hosts = Hosts.of(
            ((placed(t.layout, len(t.shape)), len(t.shape)) for t in tensors),
            number=max(1, len(record.hosts)),
        )
        self.bins = Bins(self._hosts.number)
        self._ratio = 1.0 if compressed is None else compressed
        # The totals of a version have its differences; the elements are in other checkpoints.
        if compressed is None and record.compression not in (None, "difference"):
            unpacked = sum(
                _length(t, k) * p.num_chunks
                for t in tensors
                if t.base is None
                for k, p in enumerate(t.pieces)
            )
            self._ratio = record.totals["stored_bytes"] / unpacked if unpacked else 1.0

    def chunks(self, tensor: TensorRecord) -> StoredChunks:
        """The stored chunks of a tensor."""
        length = np.concatenate(
            [
                np.full(p.num_chunks, round(_length(tensor, k) * self._ratio))
                for k, p in enumerate(tensor.pieces)
            ]
        )
        held = host_boxes(
            placed(tensor.layout, len(tensor.shape)),
            tensor.shape,
            self._hosts.owners,
            self._hosts.number,
        )
        writer = []
        for piece in tensor.pieces:
            near = held.boxes.overlapping(piece.box)
            pairs = overlaps(piece, BoxArray(held.boxes.start[near], held.boxes.stop[near]))
            first = np.searchsorted(pairs.chunk, np.arange(piece.num_chunks))
            # A chunk lies in one shard.
            writer.append(near[pairs.box[np.minimum(first, max(0, len(pairs.box) - 1))]])
        # Per box, the number of hosts in each bin, over all groups that hold the box.
        in_bin = np.zeros((held.groups, self.bins.number))
        known = held.group >= 0
        np.add.at(
            in_bin, (held.group[known], self.bins.of(np.arange(self._hosts.number))[known]), 1.0
        )
        shares = np.zeros((len(held.boxes), self.bins.number))
        np.add.at(shares, held.held, in_bin[held.held_by])
        return StoredChunks(
            length,
            np.concatenate(writer),
            shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0),
            None,
        )


StoredTensors: TypeAlias = ByTable | ByLayout
"""Lengths and writers of the stored chunks of tensors."""


def count_requests(chunks: Iterable[tuple[Ints, Ints, Ints]], limits: RunLimits) -> int:
    """Number of requests that read chunks together.

    `chunks` are columns of files, offsets and lengths.
    """
    columns = list(chunks)
    if not columns:
        return 0
    file, offset, length = (np.concatenate(column) for column in zip(*columns, strict=True))
    parts = (slice(i, i + MOST_CHUNKS) for i in range(0, len(file), MOST_CHUNKS))
    return sum(count_runs(file[part], offset[part], length[part], limits)[0] for part in parts)


def _length(tensor: TensorRecord, piece: int) -> int:
    """Bytes of an uncompressed chunk."""
    return prod(tensor.pieces[piece].chunks) * tensor.dtype.storage.itemsize + CHECKSUM_BYTES
