"""Reuse of the source's files (hard links, server-side copies) where no chunk changes.

This applies when layout, compression, dtypes, names and all chunk grids equal the source's, and both places are on one file system
or in buckets of one object store that can copy by itself.
Each host of the source then becomes a host of the new attempt (`reshard.carrying`), with its own record that describes the new
checkpoint. Its chunks are read back and compared with their checksums, like the chunks of a task.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.assemble import read_host_files, read_table, write_table
from shardckpt.errors import ShardckptError
from shardckpt.format.documents import FileReference, seal
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.layout.box import BoxArray
from shardckpt.reading.locate import Request
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import ChunkReader
from shardckpt.reshard.carrying import carry_chunks, carry_lanes
from shardckpt.reshard.finished import finished_tasks
from shardckpt.reshard.memory import readers

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.format.table import Table
    from shardckpt.reshard.job import OpenJob


@dataclass(frozen=True, slots=True)
class Carried:
    """Result of reusing a checkpoint's files."""

    hosts: int
    done_before: int
    """Number of hosts that an earlier call had linked or copied."""
    read_bytes: int
    """Stored bytes that were read back."""


def carry(opened: OpenJob, progress: Callable[[int, int], None]) -> Carried:
    """Link or copy the files of all hosts of the source that are not done yet.

    Args:
        opened: a job whose source files can be reused (`OpenJob.carries`).
        progress: called with the bytes of elements done so far, and in all.

    Raises:
        CorruptionError, MissingDataError: a linked or copied file differs from the recorded checksums.
        StorageError: the storage failed.
        NotImplementedError: the object store cannot copy.
    """
    hosts, total = opened.plan.source.hosts, opened.plan.nbytes
    before, read = finished_tasks(opened.place), 0
    for number, reference in enumerate(hosts):
        if number not in before:
            read += _carry_host(opened, number, reference)
        progress(total * (number + 1) // len(hosts), total)
    return Carried(len(hosts), len(before), read)


def _carry_host(opened: OpenJob, number: int, reference: FileReference) -> int:
    """Link or copy the files of one host; return the bytes read back."""
    source, place, plan = opened.source_place, opened.place, opened.plan
    described = opened.described
    files = read_host_files(source, reference)
    table = read_table(source, files.table)
    folder = f"hosts/{number:05d}-{secrets.token_hex(4)}"
    try:
        lanes: list[str] = []
        if plan.layout == "packed":
            lanes, table = carry_lanes(source, place, files.lanes, table, folder)
        else:
            pieces = {piece.path: piece for tensor in plan.target.tensors.values() for piece in tensor.pieces}
            carry_chunks(source, place, table, pieces, f"{folder}/drafts")
        values = None
        if files.values is not None:
            data = source.read(files.values.key)
            files.values.check(data, source.path_of(files.values.key))
            values = FileReference.of(f"{folder}/values.json", data)
            place.write(values.key, data)
        read = read_back(opened, table) if opened.job.options.verify else 0
        written = HostFiles(write_table(place, f"{folder}/table", table), tuple(lanes), described, values)
    except BaseException:
        with suppress(ShardckptError):
            place.delete_prefix(f"{folder}/")
        raise
    record = HostRecord(
        attempt=opened.attempt,
        host=number,
        hosts=len(plan.source.hosts),
        prior=opened.prior.digest,
        layout=plan.layout,
        compression=plan.compression,
        files=written,
        chunks=len(table.rows),
        stored_bytes=int(table.rows.length.sum(dtype=np.int64)),
    )
    if not place.create(record.key, seal(record.to_json())):  # another process was first
        with suppress(ShardckptError):
            place.delete_prefix(f"{folder}/")
    return read


def read_back(opened: OpenJob, table: Table) -> int:
    """Compare the data in the new attempt with a chunk table; return the bytes read.

    Raises:
        CorruptionError, MissingDataError: a chunk is not as the table says.
    """
    plan, arrays = opened.plan, table.arrays()
    reader = ChunkReader(
        opened.place,
        WholeTable(table.files, arrays),
        compression=plan.compression,
        threads=readers(opened.place.location),
        memory=plan.memory.writing,
    )
    pieces = {piece.path: (tensor, piece) for tensor in plan.target.tensors.values() for piece in tensor.pieces if piece.path in arrays}
    reader.confirm(
        (Request(tensor.name, tensor.dtype.storage, [piece], BoxArray.of([], len(piece.shape)), []), piece, rows.chunk.astype(np.int64))
        for (tensor, piece), rows in ((pieces[path], rows) for path, rows in arrays.items())
    )
    return reader.stats.bytes_read
