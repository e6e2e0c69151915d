"""The chunk tables that all hosts of a job leave, as readers find them in a bucket.

1. Whose each chunk is follows for all hosts at once from the rule by which each of them plans
   (`shardckpt.plan.writers`): of boxes that one host holds, all chunks; boxes with the same holders
   make one tape, of which each holder has a part. A test compares that with hosts' own plans.
2. A host's chunks lie in its data files in the order in which it writes them.
3. The table of all is there as bytes, digests included; of a host, record and table are made when
   somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, overload

import numpy as np

from shardckpt.format.documents import FileReference, TableReference, seal
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.format.table import ROW, ArrayChunks, Table, TableHeader
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io.url import Location, parse
from shardckpt.layout.box import distinct_boxes
from shardckpt.plan.pieces import Piece, overlaps
from shardckpt.writing.packed import OBJECT_BYTES
from tools.scale.host import ATTEMPT, DIGEST
from tools.scale.layouts import DEVICES_PER_HOST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.sharding import Sharding
    from tools.scale.host import Job

__all__ = ["Tables", "owners"]


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """The boxes in which the chunks of a tensor lie, and the hosts that hold them.

    They are the same for all tensors of one shape and layout.
    """

    chunk: NDArray[np.int64]
    """(n,) positions in the grid, box after box, ascending in each."""
    box: NDArray[np.int64]
    """(n,) the box of each."""
    holders: list[tuple[int, ...]]
    """Of each box the hosts, ascending."""


@lru_cache(maxsize=256)
def _dealt(layout: Sharding, shape: tuple[int, ...], chunks: tuple[int, ...]) -> _Dealt:
    held = layout.device_boxes(shape)
    boxes, where = distinct_boxes(held.boxes)
    box, host = np.unique(
        np.stack([where, held.device_ids // DEVICES_PER_HOST], 1)[where >= 0], axis=0
    ).T
    holders = [tuple(hosts.tolist()) for hosts in np.split(host, np.flatnonzero(np.diff(box)) + 1)]
    pairs = overlaps(Piece("", (0,) * len(shape), shape, chunks), boxes)
    order = np.lexsort((pairs.chunk, _place(boxes)[pairs.box]))
    return _Dealt(pairs.chunk[order], pairs.box[order], holders)


def _place(boxes: BoxArray) -> NDArray[np.int64]:
    """Of each box its place in order of where they begin."""
    place = np.empty(len(boxes), np.int64)
    place[np.lexsort(boxes.start.T[::-1])] = np.arange(len(boxes))
    return place


def owners(job: Job, records: dict[str, TensorRecord]) -> dict[str, NDArray[np.int64]]:
    """Of each tensor, the host that writes each chunk, in grid order."""
    by_tensor: dict[str, NDArray[np.int64]] = {}
    tapes: dict[tuple[int, ...], list[tuple[str, NDArray[np.int64], int]]] = {}
    for name in sorted(records):  # as tapes are put together
        (piece,) = records[name].pieces
        dealt = _dealt(job.layouts[name], piece.shape, piece.chunks)
        alone = np.array([holders[0] if len(holders) == 1 else -1 for holders in dealt.holders])
        by_tensor[name] = np.empty(piece.num_chunks, np.int64)
        by_tensor[name][dealt.chunk] = alone[dealt.box]
        for k in dict.fromkeys(dealt.box[alone[dealt.box] < 0].tolist()):
            tapes.setdefault(dealt.holders[k], []).append(
                (name, dealt.chunk[dealt.box == k], _chunk_bytes(records[name]))
            )
    for holders, tape in tapes.items():
        length, offset = sum(len(chunks) * size for _, chunks, size in tape), 0
        for name, chunks, size in tape:
            middle = 2 * offset + (2 * np.arange(len(chunks)) + 1) * size
            by_tensor[name][chunks] = np.array(holders)[middle * len(holders) // (2 * length)]
            offset += len(chunks) * size
    return {name: by_tensor[name] for name in records}


def _chunk_bytes(tensor: TensorRecord) -> int:
    return prod(tensor.pieces[0].chunks) * tensor.dtype.storage.itemsize


class Tables:
    """An attempt of which there are chunk tables and hosts' records only.

    As far as these are read, a `Store` in a bucket.
    """

    near = False
    """As of a `Store`."""

    def __init__(self, job: Job) -> None:
        """Make the table of all."""
        self.location: Location = parse(f"memory://scale/{ATTEMPT}")
        self.records = job.records()
        self.hosts = _Hosts(self, job.hosts)
        whose = owners(job, self.records)
        self._counts = {
            tensor.pieces[0].path: len(whose[name]) for name, tensor in self.records.items()
        }
        self._host = np.concatenate(list(whose.values()))
        self._rows = np.empty(len(self._host), ROW)
        written, row = np.zeros(job.hosts, np.int64), 0
        for name, host in whose.items():
            order, rows = np.argsort(host, kind="stable"), self._rows[row : row + len(host)]
            stored, each = (
                _chunk_bytes(self.records[name]) + CHECKSUM_BYTES,
                np.bincount(host, minlength=job.hosts),
            )
            nth = np.empty(len(host), np.int64)
            nth[order] = np.arange(len(host)) - np.repeat(np.cumsum(each) - each, each)
            at = written[host] + nth * stored
            rows["chunk"], rows["length"], rows["crc"] = np.arange(len(host)), stored, 0
            rows["file"], rows["offset"] = at // OBJECT_BYTES, at % OBJECT_BYTES
            written += each * stored
            row += len(host)
        files = -(-written // OBJECT_BYTES)
        self._first_file = np.cumsum(files) - files
        self._rows["file"] += self._first_file[self._host].astype(np.uint32)
        self._files = [
            f"hosts/{host:05d}/0/d/{i:05d}"
            for host, n in enumerate(files.tolist())
            for i in range(n)
        ]
        self._body = self._rows.view(np.uint8).data
        self._header = TableHeader.encode(self._files, self._counts, self._body)
        size = len(self._header) + len(self._body)
        self.reference = TableReference(
            "table", size, len(self._header), FileReference.of("", self._header).sha256
        )
        self._made: dict[str, bytes] = {}

    def path_of(self, key: str) -> str:
        """As `Store.path_of`."""
        return f"{self.location}/{key}"

    def __str__(self) -> str:
        """As a `Store`."""
        return str(self.location)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Store.read`."""
        if key != self.reference.key:
            return self._made[key][start:stop]
        n = len(self._header)
        stop = self.reference.size if stop is None else stop
        return self._header[start:stop] + bytes(self._body[max(0, start - n) : max(0, stop - n)])

    def record_of(self, host: int) -> FileReference:
        """A host's record, which refers to its table; from now on both are there."""
        mine = np.flatnonzero(self._host == host)
        begins = np.searchsorted(mine, np.cumsum([0, *self._counts.values()]))
        counts = dict(zip(self._counts, np.diff(begins).tolist(), strict=True))
        rows = self._rows[mine]
        rows["file"] -= np.uint32(self._first_file[host])
        files = [
            name
            for name in self._files[self._first_file[host] :][
                : int(rows["file"].max(initial=0)) + 1
            ]
            if len(rows)
        ]
        table = Table(
            files, {path: n for path, n in counts.items() if n}, ArrayChunks.of_records(rows)
        )
        data = table.encode()
        reference = TableReference.of(f"hosts/{host:05d}/table", data, len(data) - table.body_bytes)
        contents = FileReference(f"contents/{DIGEST}.json", 1, DIGEST)
        lanes = (f"hosts/{host:05d}/0",)
        record = HostRecord(
            ATTEMPT,
            host,
            len(self.hosts),
            None,
            "packed",
            None,
            HostFiles(reference, lanes, contents, None),
            len(rows),
            1 << 40,
        )
        key, sealed = f"records/{host:05d}.json", seal(record.to_json())
        self._made |= {reference.key: data, key: sealed}
        return FileReference.of(key, sealed)


@dataclass(frozen=True, slots=True)
class _Hosts(Sequence[FileReference]):
    """The hosts' records, each made when it is asked for."""

    tables: Tables
    number: int
    known: dict[int, FileReference] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, host: int) -> FileReference: ...
    @overload
    def __getitem__(self, host: slice) -> list[FileReference]: ...
    def __getitem__(self, host: int | slice) -> FileReference | list[FileReference]:
        if isinstance(host, slice):
            return [self[i] for i in range(*host.indices(self.number))]
        if host not in self.known:
            self.known[host] = self.tables.record_of(host)
        return self.known[host]
