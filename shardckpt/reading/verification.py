"""Verification that everything in a checkpoint is as it was written.

1. The records and all chunk tables are compared with the digests that refer to them, and the table
   of all hosts with the hosts' own.
2. Every chunk is compared with the table; a chunk of a tensor in a base with the base's table.
3. The metadata for stock zarr readers is compared with record and table.

Damage does not stop the verification; all damage is reported. A storage that does not answer or
denies permission stops it. If anything is damaged or missing because another checkpoint has taken
this one's place, or none is there any more, that is an error, and no damage.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardckpt.commit.base_places import base_location
from shardckpt.commit.index_check import IndexCheck
from shardckpt.commit.publish import RECORD
from shardckpt.commit.table_reading import merge_tables, read_host_files, read_table
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    OptionError,
    ShardckptError,
    StorageError,
    extend,
)
from shardckpt.format.documents import envelope_digest, format_version
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.format.zarr_arrays import document_encoder
from shardckpt.io.failures import raise_unless_damage
from shardckpt.io.store import Store
from shardckpt.io.threads import SHORT_READ, collector_paused, map_on_threads
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.pieces import batches
from shardckpt.reading.inspection import every_chunk
from shardckpt.reading.locate import Request
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.missing import replaced_error
from shardckpt.reading.reader import ChunkReader, ReadStats, open_chunks, open_reader
from shardckpt.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.format.bases import Base
    from shardckpt.format.documents import FileReference, TableReference
    from shardckpt.format.structure import TensorRecord
    from shardckpt.format.table import Table

    T = TypeVar("T")
    R = TypeVar("R", FileReference, TableReference)
    Progress = Callable[[int, int, int], None]
    """Called with chunks checked so far and in all, and bytes of chunks that were read."""

_GROUP_TENSORS = 4096
"""Most tensors that are checked together: the data kept for each is small, but for 100,000 tensors
it is not."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a checkpoint that is not as it was written."""

    tensor: str | None
    """Tensor name; None for a metadata file."""
    box: Box | None
    """Index range of the damaged part of the tensor."""
    file: str
    """File relative to the checkpoint; for a tensor in a base, the base's url or a file below
    it."""
    reason: str


@dataclass(slots=True)
class VerifyReport:
    """Result of `Checkpoint.verify`."""

    chunks: int = 0
    """Number of chunks compared with their checksums, including those in bases."""
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)
    checked: bool = True
    """Whether everything was compared with checksums. False for formats without: everything could
    be read, and may still be damaged."""
    compared: int = 0
    """Number of tensors of another format that were compared with checksums which that format
    has."""

    @property
    def ok(self) -> bool:
        """Whether everything was compared with checksums, and nothing is damaged."""
        return self.checked and not self.damage

    @property
    def complete(self) -> bool:
        """Whether everything is there and could be read."""
        return not self.damage


def verify(
    store: Store,
    record: CheckpointRecord,
    progress: Progress | None = None,
    *,
    after: int = 0,
    group_bytes: int = every_chunk.CHECKED_BYTES,
    on_damage: Callable[[Damage], None] | None = None,
) -> VerifyReport:
    """Read everything and compare it with what was written; see `Checkpoint.verify`.

    A verification can be stopped by an exception of `progress` or `on_damage`, and resumed by
    another call with `after`. The order of chunks follows from the record alone. All metadata is
    checked by each call.

    Args:
        store: the checkpoint's place.
        record: its record at the time it was opened.
        progress: called before the first chunk and after each group, by the calling thread, with
            the number of chunks up to there, the number of all chunks, and the bytes of chunks that
            this call has read.
        after: number of chunks that need no check: one that an earlier call for the same record
            told `progress`.
        group_bytes: most bytes of elements that are checked between two calls of `progress`, unless
            one chunk has more.
        on_damage: called at once with each damage, by one thread at a time. Damage that was found
            in a group that did not end is found again by a call that resumes, and damage to
            metadata by each call.

    Raises:
        OptionError: `after` is not a number of chunks of the checkpoint.
        ReplacedError: the checkpoint was replaced or deleted before everything was read.
        StorageError: the storage does not answer, or denies permission.
    """
    with (
        collector_paused() if store.near and record.totals["bytes"] <= SHORT_READ else nullcontext()
    ):
        return _Verification(store, record, progress, on_damage, after, group_bytes).run()


class _Verification:
    """One run of `verify`."""

    def __init__(
        self,
        store: Store,
        record: CheckpointRecord,
        progress: Progress | None,
        on_damage: Callable[[Damage], None] | None,
        after: int,
        group_bytes: int,
    ) -> None:
        self.record = record
        self.store = store
        self.place = store.sub(record.attempt)
        self.progress = progress or (lambda _done, _all, _read: None)
        self.on_damage = on_damage or (lambda _damage: None)
        self.after = after
        self.group_bytes = group_bytes
        self.report = VerifyReport()
        self.lock = Lock()
        self.lanes: list[str] = []
        self.versions: list[tuple[int, int]] = []
        """Format versions in the hosts' files, except those of their values."""

    def run(self) -> VerifyReport:
        """The report; a storage that fails ends it, and its error has the damage up to there."""
        try:
            self._checked()
            if self.report.damage:
                self._refuse_replaced()
        except StorageError as e:
            damage = self.report.damage
            if damage:
                parts = count(len(damage), "damaged part")
                first = f"the first in {damage[0].file}: {damage[0].reason}"
                extend(e, after=f" Before that, {parts} came to light, {first}")
            raise
        return self.report

    def _checked(self) -> None:
        """Check the metadata first, then all chunks, then the metadata for stock readers."""
        total = sum(t.num_chunks for t in self.record.structure.tensors.values())
        if not 0 <= self.after <= total:
            raise OptionError(
                f"{self.store}: after={self.after} is not a number from 0 to {total}, the number "
                "of its chunks; begin again with 0."
            )
        version = self._record()
        table = self._table()
        if version is not None and self.versions and version != max(self.versions):
            self._damaged_record("it names another format version than the hosts' files")
        complete = self.report.ok
        stats = ReadStats()
        reader = ChunkReader(open_chunks(self.place, self.record, stats, table), stats=stats)
        self.progress(self.after, total, 0)
        for done, bytes_read in self._chunks(reader):
            self.report.bytes_read = bytes_read
            self.progress(done, total, bytes_read)
        self.report.chunks = total - self.after
        for file, error in longer_files(reader):
            self._damaged_file(file, error)
        # There is no index of differences. With an incomplete table the index would seem to have
        # extra entries.
        if complete and self.record.compression != "difference":
            self._index(table)

    def _chunks(self, own: ChunkReader) -> Iterator[tuple[int, int]]:
        """Compare all chunks with the tables that have them.

        This checkpoint's own chunks come first, then the chunks in bases, base by base.

        Returns:
            For each group, the number of chunks up to its end, and the bytes of chunks that were
            read so far.
        """
        held: dict[Base | None, list[TensorRecord]] = {None: []}
        for tensor in self.record.structure.tensors.values():
            held.setdefault(None if tensor.base is None else tensor.base.base, []).append(tensor)
        based = open_reader(self.place, self.record) if len(held) > 1 else own
        readers = [own] if based is own else [own, based]
        begin = 0
        for base, of_base in held.items():
            reader = own if base is None else based
            for tensors in batches(of_base, lambda _tensor: (1,), (_GROUP_TENSORS,)):
                for done in self._check(reader, base, tensors, begin):
                    yield done, sum(one.stats.bytes_read for one in readers)
                begin += sum(t.num_chunks for t in tensors)

    def _check(
        self, reader: ChunkReader, base: Base | None, tensors: Sequence[TensorRecord], begin: int
    ) -> Iterator[int]:
        """Compare the chunks of tensors that one checkpoint holds, in groups.

        Yield the number of all chunks up to the end of each.

        A tensor whose base cannot be read is damaged.

        Args:
            reader: reads them.
            base: the checkpoint; None: this one.
            tensors: the tensors.
            begin: number of chunks before theirs.
        """
        end = begin + sum(t.num_chunks for t in tensors)
        if end <= self.after:
            return
        place = self.record.attempt if base is None else base.url

        def damaged(name: str, box: Box, file: str, error: ShardckptError) -> None:
            self._report(Damage(name, box, f"{place}/{file}", str(error)))

        no_boxes = {ndim: BoxArray.of([], ndim) for ndim in {len(t.shape) for t in tensors}}
        requests = [Request.of(t, no_boxes[len(t.shape)], []) for t in tensors]
        try:
            groups = every_chunk.check(
                reader, requests, damaged, after=max(0, self.after - begin), most=self.group_bytes
            )
        except ShardckptError as e:
            raise_unless_damage(e, lambda key: self._store_of(base).read_versioned(key))
            if len(tensors) == 1:
                self._report(Damage(tensors[0].name, Box.full(tensors[0].shape), place, str(e)))
                yield end
                return
            for tensor in tensors:  # perhaps only some of them
                yield from self._check(reader, base, [tensor], begin)
                begin += tensor.num_chunks
            return
        for done in groups:
            yield begin + done

    def _store_of(self, base: Base | None) -> Store:
        """The place of a base; None: of this checkpoint."""
        return self.store if base is None else Store.open(base_location(self.store.location, base))

    def _record(self) -> tuple[int, int] | None:
        """Compare the current commit record with the opened one; return its format version.

        No digest covers the version. But digests cover the hosts' files completely, and the newest
        version among them is the record's.
        """
        try:
            data = self.store.read(RECORD)
            same = self.record.sha256 is not None and self.record.sha256 == envelope_digest(
                data, RECORD
            )
            if not same and parse_checkpoint(data, RECORD) != self.record:
                self._damaged_record(
                    "it is not the record that was there when the checkpoint was opened"
                )
            return format_version(data, RECORD)
        except ShardckptError as e:
            raise_unless_damage(e, self.place.read_versioned)
            self._damaged_record(str(e))
            return None

    def _table(self) -> WholeTable:
        """The chunk table of all hosts, compared with the hosts' own.

        The merged hosts' tables if it cannot be read.
        """
        own = self._host_tables()
        if self.record.table is None:
            return own
        try:
            table = read_table(self.place, self.record.table)
        except ShardckptError as e:
            raise_unless_damage(e, self.place.read_versioned)
            self._damaged_file(self.record.table.key, e)
            return own
        for path in _moved_arrays(own.table, table):
            self._damaged_file(
                self.record.table.key,
                FormatError(
                    f"{path}: the merged chunk table and the hosts' tables have its chunks at "
                    "different places."
                ),
            )
        return WholeTable(table)

    def _host_tables(self) -> WholeTable:
        """Merge all hosts' readable chunk tables and the committer's table of small tensors.

        Damage to hosts' files is reported.
        """
        own = [] if self.record.small_table is None else [self.record.small_table]
        others: dict[
            FileReference, None
        ] = {}  # each once, because hosts with the same contents share a file
        # The record need not have the version of hosts' values.
        own_version: set[FileReference | None] = set()
        for host in self._read_each(partial(read_host_files, self.place), self.record.hosts):
            self.lanes += host.lanes
            own.append(host.table)
            others |= dict.fromkeys(host.plain)
            own_version.add(host.values)
        if self.record.fingerprint is not None:
            others[self.record.fingerprint] = None

        def checked_version(part: FileReference) -> tuple[int, int] | None:
            data = self.place.read(part.key)
            part.check(data, f"{self.place}/{part.key}")
            return None if part in own_version else format_version(data, part.key)

        self.versions += self._read_each(checked_version, others)
        tables = self._read_each(partial(read_table, self.place), own)
        try:
            return WholeTable(merge_tables(tables))
        except FormatError as e:
            self._damaged_file("hosts", e)
            return WholeTable.of([], {})

    def _index(self, table: WholeTable) -> None:
        """Compare the metadata for stock zarr readers with the record and the table."""
        structure = self.record.structure
        document = document_encoder(structure, self.record.compression)
        arrays = {
            p.path: (t, p) for t in structure.tensors.values() if t.base is None for p in t.pieces
        }
        pieces = {path: piece for path, (_, piece) in arrays.items()}
        check = IndexCheck(self.place, lambda path: document(*arrays[path]), pieces, table.table)
        faults = check.packed(self.lanes) if self.record.layout == "packed" else check.plain()
        for file, reason in faults:
            self._report(Damage(None, None, f"{self.record.attempt}/{file}", reason))

    def _read_each(self, read: Callable[[R], T | None], references: Iterable[R]) -> list[T]:
        """Read files, several at once; report the damaged ones, and return what the others gave."""

        def read_or_report(reference: R) -> T | None:
            try:
                return read(reference)
            except ShardckptError as e:
                raise_unless_damage(e, self.place.read_versioned)
                self._damaged_file(reference.key, e)
                return None

        results = map_on_threads(read_or_report, references)
        return [result for result in results if result is not None]

    def _report(self, damage: Damage) -> None:
        """Report damage; called by several threads."""
        with self.lock:
            if not self.report.damage:
                self._refuse_replaced()
            self.report.damage.append(damage)
            self.on_damage(damage)

    def _refuse_replaced(self) -> None:
        """Raise if the data seems damaged because the checkpoint was replaced or deleted.

        A record that cannot be read is damage of its own.
        """
        replaced = None
        with suppress(StorageError):
            replaced = replaced_error(self.store, self.store.location, self.record.attempt)
        if replaced is not None:
            raise replaced

    def _damaged_record(self, reason: str) -> None:
        self._report(Damage(None, None, RECORD, reason))

    def _damaged_file(self, file: str, error: ShardckptError) -> None:
        self._report(Damage(None, None, f"{self.record.attempt}/{file}", str(error)))


def longer_files(reader: ChunkReader) -> Iterator[tuple[str, ShardckptError]]:
    """The data files with more bytes than their chunks, between them or at the end.

    Readers never read those bytes.
    """
    place = reader.source.place
    for file, nbytes in reader.whole_table().bytes_in_files().items():
        try:
            if place.is_longer(file, nbytes):
                yield (
                    file,
                    CorruptionError(
                        f"{place}/{file} has more bytes than the {nbytes} of its chunks."
                    ),
                )
        except StorageError as e:
            raise_unless_damage(e, place.read_versioned)
            yield file, e


def _moved_arrays(own: Table, table: Table) -> list[str]:
    """Paths of the arrays of which another table lacks a chunk, or has one at another place."""
    paths, rows = list(own.counts), own.rows
    array = np.repeat(np.arange(len(paths)), np.fromiter(own.counts.values(), np.int64, len(paths)))
    row = table.find(paths, array, rows.chunk.astype(np.int64))
    same = row >= 0
    other = table.rows.take(row[same])
    numbers = {file: i for i, file in enumerate(dict.fromkeys([*own.files, *table.files]))}
    file, other_file = (
        # The last: objects of their own.
        np.array([*map(numbers.__getitem__, files), -1])[np.minimum(column, np.uint32(len(files)))]
        for files, column in ((own.files, rows.file[same]), (table.files, other.file))
    )
    mine = rows.take(np.flatnonzero(same))
    same[same] = (
        (mine.offset == other.offset)
        & (mine.length == other.length)
        & (mine.crc == other.crc)
        & (file == other_file)
    )
    wrong = set(array[~same].tolist())
    return [path for i, path in enumerate(paths) if i in wrong or path not in table.counts]
