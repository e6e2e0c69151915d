"""Counts of each host's reads when a checkpoint is restored onto a layout.

1. Per tensor: the chunks that each group of hosts reads (`plan.readers`). Tensors of one shape,
   chunking and layout share the result.
2. The chunks' lengths (`stored`) give the bytes that each host reads. With the writer of each
   chunk, they also give the flow from writing hosts to reading hosts.
3. Requests: a host's chunks, in the batches of `restore`, are joined by the reader's rules. If many
   hosts differ, an evenly chosen sample is counted and extrapolated.

The counts apply to a `restore` into memory that `like` provides. If elements pass through staging,
batches may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.plan.pieces import batches
from shardckpt.plan.readers import chunks_read, host_boxes
from shardckpt.reading.restore import LARGEST_BATCH
from shardckpt.reshard.forecast.hosts import Bins
from shardckpt.reshard.forecast.stored import count_requests

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import StoredLayout, TensorRecord
    from shardckpt.plan.readers import ChunksRead, HostBoxes
    from shardckpt.reading.runs import RunLimits
    from shardckpt.reshard.forecast.hosts import Hosts
    from shardckpt.reshard.forecast.stored import StoredChunks, StoredTensors

    Ints = NDArray[np.int64]

MOST_COUNTED = 20_000
"""Maximum number of (host, tensor) pairs whose requests are counted one by one: about a second."""
MOST_CELLS = 1 << 20
"""Maximum cells of the matrix of writers by readers, for one tensor."""


@dataclass(frozen=True, slots=True)
class TensorReads:
    """Reads of one tensor, over all hosts together."""

    read: int
    """Bytes of chunks that all hosts read."""
    needed: int
    """Bytes of the boxes that the hosts' devices hold, each box once per host."""
    unpacked: int
    """Bytes of the elements of the chunks that all hosts read."""

    @property
    def amplification(self) -> float | None:
        """Elements read per element needed; None if none is needed."""
        return self.unpacked / self.needed if self.needed else None


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Bytes by writing host and reading host, with hosts in bins."""

    writers: Bins
    readers: Bins
    nbytes: Ints
    """(bins of writers, bins of readers)"""
    exact: bool
    """Whether the writers come from the chunk tables; otherwise an equal share of each box is
    assumed for each of its hosts."""


@dataclass(frozen=True, slots=True, eq=False)
class RestoreForecast:
    """Reads of a restore."""

    read: Ints
    """(hosts,) bytes of chunks."""
    needed: Ints
    """(hosts,) bytes of boxes."""
    requests: int | None
    """Read calls on a local disk, or requests to an object store, over all hosts; None: the places
    of chunks are not known."""
    requests_counted: int
    """Number of hosts that were counted; the same number of requests per byte is assumed for the
    others."""
    tensors: Mapping[str, TensorReads]
    flow: Flow

    @property
    def amplification(self) -> float:
        """Elements read per element needed, regardless of compression; 1 if nothing is needed."""
        return (
            sum(t.unpacked for t in self.tensors.values()) / int(self.needed.sum())
            if self.needed.any()
            else 1.0
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Common properties of tensors of one shape, chunking and layout."""

    held: HostBoxes
    reads: ChunksRead
    needed: Ints
    """(groups,) bytes"""
    unpacked: Ints
    """(groups,) bytes of the elements of all chunks that a host reads"""
    spread: Ints
    """(groups,) the row of `readers` for the group."""
    readers: NDArray[np.float64]
    """(distinct rows, bins of readers) number of hosts of a group in each bin."""


def forecast_restore(
    tensors: Sequence[TensorRecord],
    layouts: Mapping[str, StoredLayout | None],
    hosts: Hosts,
    stored: StoredTensors,
    limits: RunLimits | None = None,
) -> RestoreForecast:
    """Count the reads of all hosts.

    Args:
        tensors: the tensors to restore, in order.
        layouts: tensor's name → the layout of the restore; None: the complete tensor on every host.
        hosts: the restoring hosts.
        stored: the storage of the tensors.
        limits: the reader's limits for joining chunks.
    """
    bins = Bins(hosts.number)
    read, needed = np.zeros(hosts.number, np.int64), np.zeros(hosts.number, np.int64)
    flow = np.zeros((stored.bins.number, bins.number))
    kinds: dict[Hashable, _Kind] = {}
    counted: dict[Hashable, tuple[Ints, NDArray[np.float64]]] = {}
    by_tensor: dict[str, TensorReads] = {}
    of_tensor: list[tuple[_Kind, StoredChunks]] = []
    for tensor in tensors:
        cut = tuple((p.start, p.shape, p.chunks) for p in tensor.pieces)
        key = (tensor.shape, tensor.dtype.storage, cut, layouts[tensor.name])
        if key not in kinds:
            kinds[key] = _kind(tensor, layouts[tensor.name], hosts, bins)
        kind = kinds[key]
        if stored.exact or (key, tensor.layout) not in counted:
            chunks = stored.chunks(tensor)
            counted[key, tensor.layout] = _count(kind, chunks)
            if chunks.places is not None:
                of_tensor.append((kind, chunks))
        per_group, between = counted[key, tensor.layout]
        mine = kind.held.group >= 0
        reads, needs = per_group[kind.held.group[mine]], kind.needed[kind.held.group[mine]]
        read[mine] += reads
        needed[mine] += needs
        flow += between
        unpacked = int(kind.unpacked[kind.held.group[mine]].sum())
        by_tensor[tensor.name] = TensorReads(int(reads.sum()), int(needs.sum()), unpacked)
    requests, of_hosts = None, 0
    if limits is not None and len(of_tensor) == len(tensors):
        requests, of_hosts = _requests(of_tensor, read, limits)
    return RestoreForecast(
        read,
        needed,
        requests,
        of_hosts,
        by_tensor,
        Flow(stored.bins, bins, np.rint(flow).astype(np.int64), stored.exact),
    )


def _kind(tensor: TensorRecord, layout: StoredLayout | None, hosts: Hosts, bins: Bins) -> _Kind:
    held = host_boxes(layout, tensor.shape, hosts.owners, hosts.number)
    readers = np.zeros((held.groups, bins.number))
    known = held.group >= 0
    np.add.at(readers, (held.group[known], bins.of(np.arange(hosts.number))[known]), 1.0)
    reads, itemsize = chunks_read(tensor.pieces, held), tensor.dtype.storage.itemsize
    size = np.repeat(
        [prod(p.chunks) * itemsize for p in tensor.pieces], [p.num_chunks for p in tensor.pieces]
    )
    unpacked = np.bincount(reads.group, size[reads.chunk], held.groups).astype(np.int64)
    # Many groups of one host each have few rows: one per bin.
    rows = readers.view(f"V{readers.itemsize * bins.number}").reshape(-1)  # quick to compare
    _, first, spread = np.unique(rows, return_index=True, return_inverse=True)
    needed = held.elements() * itemsize
    return _Kind(held, reads, needed, unpacked, spread, readers[first])


def _count(kind: _Kind, chunks: StoredChunks) -> tuple[Ints, NDArray[np.float64]]:
    """Bytes that a host of each group reads, and the flow of the tensor between bins."""
    groups, pairs = kind.held.groups, kind.reads
    length = chunks.length[pairs.chunk]
    per_group = np.bincount(pairs.group, length, groups).astype(np.int64)
    writer, reader = chunks.writer[pairs.chunk], kind.spread[pairs.group]
    rows, columns = len(chunks.shares), len(kind.readers)
    if rows * columns > MOST_CELLS:  # the matrix would have many more cells than there are pairs
        return per_group, (chunks.shares[writer] * length[:, None]).T @ kind.readers[reader]
    cells = np.bincount(writer * columns + reader, length, rows * columns)
    by_row = cells.reshape(rows, columns)
    return per_group, chunks.shares.T @ (by_row @ kind.readers)


def _requests(
    tensors: Sequence[tuple[_Kind, StoredChunks]], read: Ints, limits: RunLimits
) -> tuple[int, int]:
    """Requests of all hosts together, and the number of hosts that were counted."""
    distinct = {id(kind): kind for kind, _ in tensors}
    groups = (
        np.stack([kind.held.group for kind in distinct.values()], axis=1)
        if distinct
        else np.zeros((len(read), 0))
    )
    _, first, alike = np.unique(groups, axis=0, return_index=True, return_inverse=True)
    alike = alike.reshape(-1)
    most = max(1, MOST_COUNTED // max(1, len(tensors)))
    chosen = (
        np.unique(np.linspace(0, len(first) - 1, min(most, len(first))).astype(np.int64))
        if len(first)
        else np.empty(0, np.int64)
    )
    begins = {
        id(kind): np.searchsorted(kind.reads.group, np.arange(kind.held.groups + 1))
        for kind in distinct.values()
    }
    total = hosts = nbytes = 0
    for like in chosen.tolist():
        same = int((alike == like).sum())
        total += same * _requests_of(int(first[like]), tensors, begins, limits)
        hosts += same
        nbytes += same * int(read[first[like]])
    if hosts < len(read) and nbytes:
        total = round(total * int(read.sum()) / nbytes)
    return total, hosts


def _requests_of(
    host: int,
    tensors: Sequence[tuple[_Kind, StoredChunks]],
    begins: Mapping[int, Ints],
    limits: RunLimits,
) -> int:
    """Requests of one host."""

    def needs(entry: tuple[_Kind, StoredChunks]) -> tuple[int]:
        group = int(entry[0].held.group[host])
        return (int(entry[0].needed[group]) if group >= 0 else 0,)

    total = 0
    for batch in batches(tensors, needs, (LARGEST_BATCH,)):
        columns: list[tuple[Ints, Ints, Ints]] = []
        for kind, chunks in batch:
            group = int(kind.held.group[host])
            if group >= 0:
                begin = begins[id(kind)]
                mine = kind.reads.chunk[begin[group] : begin[group + 1]]
                assert chunks.places is not None
                columns.append(
                    (
                        chunks.places.file[mine],
                        chunks.places.offset[mine],
                        chunks.places.length[mine],
                    )
                )
        total += count_requests(columns, limits)
    return total
