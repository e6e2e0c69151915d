"""A committed checkpoint, open for reading.

Opening reads the commit record and nothing else; host records and chunk tables follow when the first
chunk is wanted.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from shardckpt import names as naming
from shardckpt.box import Box, BoxArray
from shardckpt.errors import (
    BudgetError,
    FormatError,
    MissingDataError,
    NamesMismatchError,
    NotFoundError,
    OptionError,
    ReplacedError,
    ShapeMismatchError,
    ShardckptError,
    UncommittedError,
)
from shardckpt.excerpt import excerpt
from shardckpt.fields import Fields
from shardckpt.io import index
from shardckpt.io.attempts import is_attempt
from shardckpt.io.commit import RECORD
from shardckpt.io.documents import zarr_documents
from shardckpt.io.host_files import read_host_files, read_table
from shardckpt.io.index_check import IndexCheck
from shardckpt.io.lookup import WholeTable
from shardckpt.io.opening import open_reader
from shardckpt.io.reader import OBJECT_MEMORY, ChunkReader, Request
from shardckpt.io.store import Store
from shardckpt.io.table import merge_tables, same_places
from shardckpt.io.url import parse
from shardckpt.record import CheckpointRecord, Tombstone, format_version, open_envelope, parse_checkpoint
from shardckpt.tree import alias_map
from shardckpt.tree import parse as parse_tree

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.dtypes import DType
    from shardckpt.io.stats import ReadStats
    from shardckpt.io.url import Location
    from shardckpt.io.zarr_store import CheckpointStore
    from shardckpt.record import FileReference
    from shardckpt.structure import StoredLayout, TensorRecord

__all__ = ["Checkpoint", "Damage", "TensorInfo", "VerifyReport", "open", "open_in_this_process"]

_opened: WeakSet[Checkpoint] = WeakSet()
_opening = Lock()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of one stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: StoredLayout | None
    """How it was laid out when it was saved: a `Sharding` with mesh and spec, an `OpSharding`, DTensor's `Placements` where
    neither says it, or None (plain)."""
    chunks: tuple[int, ...]
    """Shape of a chunk (of the first piece)."""
    num_chunks: int
    nbytes: int
    """Bytes of its elements."""
    tied_names: tuple[str, ...]
    """Other names of the same tensor."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written."""

    tensor: str | None
    """Name, or None where a metadata file is concerned."""
    box: Box | None
    """Index range of the tensor that is lost."""
    file: str
    """Relative to the checkpoint."""
    reason: str


@dataclass(slots=True)
class VerifyReport:
    """What `Checkpoint.verify` found."""

    chunks: int = 0
    """Chunks compared with their checksums."""
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damage


def open(url: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001  (shardckpt.open, as in gzip.open)
    """Open a committed checkpoint for reading.

    Raises:
        NotFoundError: there is none (UncommittedError: a save was begun there and not finished).
        FormatError: its record is damaged; VersionError: a newer format.
    """
    return Checkpoint(url)


class Checkpoint:
    """A committed checkpoint; everything is read-only."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """Read the commit record; see `shardckpt.open`."""
        self.location = parse(url)
        self._store = Store.open(self.location)
        self.record = _read_record(self._store)
        self._place = self._store.sub(self.record.attempt)
        self.parsed_tree = parse_tree(self.record.structure.tree)
        """The tree, read: for `shardckpt.tree`, whose functions would each read it anew."""
        self._opening = Lock()
        self._opened: ChunkReader | None = None
        self._reading: tuple[int | None, int] = (None, OBJECT_MEMORY)
        self._stored_name = {**{name: name for name in self.record.structure.tensors}, **alias_map(self.parsed_tree)}
        with _opening:
            _opened.add(self)

    @property
    def tree(self) -> Any:
        """The state's containers and small leaves, as a JSON document (docs/format.md)."""
        return self.record.structure.tree

    @property
    def metadata(self) -> dict[str, Any]:
        """What the user gave to `SaveOptions(metadata=…)`."""
        return self.record.metadata

    def names(self) -> list[str]:
        """Names of all tensors in tree order; then the further names of tied ones."""
        return list(self._stored_name)

    def tensor(self, name: str) -> TensorRecord:
        """The record of a tensor, by any of its names.

        Raises:
            NamesMismatchError: there is no such tensor; says which name is nearest.
            OptionError: that is no name.
        """
        if not isinstance(name, str):
            raise OptionError(f"{self.location}: {excerpt(name)} is no name of a tensor; give one of names(), as a str.")
        if name not in self._stored_name:
            raise NamesMismatchError(f"{self.location}: no tensor {name!r}{naming.did_you_mean(name, self._stored_name)}.")
        return self.record.structure.tensors[self._stored_name[name]]

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype, layout and chunks of a tensor."""
        t = self.tensor(name)
        return TensorInfo(
            name=name,
            shape=t.shape,
            dtype=t.dtype,
            layout=t.layout,
            chunks=t.pieces[0].chunks,
            num_chunks=t.num_chunks,
            nbytes=t.nbytes,
            tied_names=tuple(n for n in self._names_of[t.name] if n != name),
        )

    def read(self, name: str, box: Box | None = None) -> NDArray[Any]:
        """The elements of a tensor, or of a box of it, as a numpy array (ml_dtypes for bfloat16 and fp8).

        Raises:
            NamesMismatchError: no such tensor.
            ShapeMismatchError: the box lies outside it.
            OptionError: that is no box.
            CorruptionError: stored bytes are damaged or missing.
        """
        t = self.tensor(name)
        box = Box.full(t.shape) if box is None else box
        if not isinstance(box, Box):
            raise OptionError(f"{name}: {excerpt(box)} is no box; give shardckpt.Box((first, …), (one past the last, …)).")
        if box.ndim != len(t.shape) or not Box.full(t.shape).contains(box) or any(b > n for b, n in zip(box.stop, t.shape, strict=True)):
            raise ShapeMismatchError(f"{name}: the box {box} lies outside its shape {t.shape} in {self.location}.")
        out = empty(name, box.shape, t.dtype.storage)
        with self.reading():
            self.reader.read([Request(t.name, t.dtype.storage, t.pieces, BoxArray.of([box], box.ndim), [out])])
        return out.view(t.dtype.numpy)

    @cached_property
    def _names_of(self) -> dict[str, list[str]]:
        """Stored name → every name of the tensor."""
        names: dict[str, list[str]] = {}
        for name, stored in self._stored_name.items():
            names.setdefault(stored, []).append(name)
        return names

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Tell data that is gone because somebody replaced or deleted the checkpoint from data that is lost.

        Raises:
            ReplacedError: what was raised inside is because of that.
        """
        try:
            yield
        except MissingDataError as e:
            data, _ = self._store.read_versioned(RECORD)
            try:
                now = None if data is None else parse_checkpoint(data, f"{self._store}/{RECORD}")
            except FormatError:
                raise e from None
            if isinstance(now, CheckpointRecord) and now.attempt == self.record.attempt:
                raise
            what = "replaced" if isinstance(now, CheckpointRecord) else "deleted"
            raise ReplacedError(f"{self.location}: the checkpoint was {what} while it was being read; open it again.") from e

    @property
    def place(self) -> Store:
        """The attempt, for parts of the library that read its files."""
        return self._place

    @property
    def reader(self) -> ChunkReader:
        """Reads chunks by the chunk table, whose header is read when this is first asked for; all threads share it."""
        with self._opening:
            if self._opened is None:
                threads, memory = self._reading
                self._opened = open_reader(self._place, self.record, threads=threads, memory=memory)
            return self._opened

    def limit_reading(self, *, threads: int, memory: int) -> None:
        """Say what reading chunks may take, before the first is read.

        Args:
            threads: how many read at once, at most.
            memory: bytes of what is on its way from an object store.
        """
        assert self._opened is None, "its reader is at work already"
        self._reading = threads, memory

    @property
    def stats(self) -> ReadStats:
        """Reads and bytes, of chunks and of the chunk table, of everything read through this object so far."""
        return self.reader.stats

    def zarr_store(self) -> CheckpointStore:
        """A read-only store for zarr-python 3: `zarr.open_group(ckpt.zarr_store(), mode="r")`, in either layout."""
        from shardckpt.io.zarr_store import CheckpointStore

        return CheckpointStore(self.record, self.reader)

    def stock_spec(self, name: str) -> dict[str, Any]:
        """The spec with which stock TensorStore opens the array of a tensor (its first piece)."""
        return index.stock_spec(self.location, self.record.attempt, self.tensor(name).pieces[0].path, self.record.layout)

    def stock_url(self, name: str) -> str:
        """The same as a url, for people to paste."""
        return index.stock_url(self.location, self.record.attempt, self.tensor(name).pieces[0].path, self.record.layout)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read everything and compare it with what was written; nothing damaged stops it.

        Args:
            progress: called with chunks checked so far and in all.

        Returns:
            What was checked, and the damage: by tensor and index range for chunks, by file for metadata. Covers
            every chunk, that each is in its place, the host records, the chunk tables, and what stock zarr
            readers go by (the merged index, the zarr.json documents).
        """
        return _Verification(self, progress).run()

    def process_values(self, process: int) -> dict[str, Any]:
        """What a process owned by itself when it saved (`PerProcess`), by name, not decoded."""
        host = read_host_files(self._place, self.record.hosts[process])
        if host.values is None:
            return {}
        data, where = self._place.read(host.values.key), f"{self._place}/{host.values.key}"
        host.values.check(data, where)
        return Fields(open_envelope(data, where), where).mapping("values")

    def __repr__(self) -> str:
        """Url and size."""
        return f"<shardckpt.Checkpoint {self.location} with {len(self.record.structure.tensors)} tensors>"


def open_in_this_process(location: Location) -> bool:
    """Whether somebody in this process holds the checkpoint at a place open."""
    with _opening:
        return any(checkpoint.location == location for checkpoint in _opened)


class _Verification:
    """One run of `verify`."""

    def __init__(self, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> None:
        self.record = checkpoint.record
        self.store = checkpoint._store  # noqa: SLF001  (verification is a part of the checkpoint, in a class of its own)
        self.place = checkpoint._place  # noqa: SLF001
        self.progress = progress or (lambda _done, _all: None)
        self.report = VerifyReport()
        self.lanes: list[str] = []

    def run(self) -> VerifyReport:
        """Metadata first, then all chunks, then what other readers go by."""
        self._record()
        table = self._table()
        complete = self.report.ok
        reader = ChunkReader(self.place, table, compression=self.record.compression)
        tensors = list(self.record.structure.tensors.values())
        total = sum(t.num_chunks for t in tensors)
        done = 0
        self.progress(0, total)
        for some in _groups(tensors):
            none = [Request(t.name, t.dtype.storage, t.pieces, BoxArray.of([], len(t.shape)), []) for t in some]
            reader.check(none, self._damaged_chunk)
            done += sum(t.num_chunks for t in some)
            self.progress(done, total)
        self.report.chunks = total
        self.report.bytes_read = reader.stats.bytes_read
        for file, error in reader.longer_files():
            self._damaged_file(file, error)
        if complete:  # else every entry of an index would be news to an incomplete table
            self._index(table)
        return self.report

    def _record(self) -> None:
        """Compare the commit record as it is now with what was opened; its version with the host records'.

        No digest covers the version, but host records are covered whole, and one shardckpt writes them all.
        """
        try:
            data = self.store.read(RECORD)
            if parse_checkpoint(data, RECORD) != self.record:
                self._damaged_record("it is not the record that was there when the checkpoint was opened")
            version = format_version(data, RECORD)
        except ShardckptError as e:
            self._damaged_record(str(e))
            return
        for host in self.record.hosts:
            with suppress(ShardckptError):  # reported when it is read for its tables
                their_data = self.place.read(host.key)
                host.check(their_data, host.key)
                if format_version(their_data, host.key) != version:
                    self._damaged_record(f"it names another format version than {host.key}")
                    return

    def _table(self) -> WholeTable:
        """The chunk table of all hosts, compared with the hosts' own; where it cannot be read, theirs as one."""
        own = self._host_tables()
        if self.record.table is None:
            return own
        try:
            table = read_table(self.place, self.record.table)
        except ShardckptError as e:
            self._damaged_file(self.record.table.key, e)
            return own
        arrays = table.arrays()
        names, own_names = (np.array([*files, ""], object) for files in (table.files, own.files))
        for path, rows in own.arrays.items():
            row = arrays[path].find(rows.chunk.astype(np.int64)) if path in arrays else np.full(1, -1)
            if (row < 0).any() or not same_places(rows, own_names, arrays[path], names, row):
                self._damaged_file(self.record.table.key, FormatError(f"{path}: its chunks are not where the hosts' own tables have them."))
        return WholeTable(table.files, arrays)

    def _host_tables(self) -> WholeTable:
        """All hosts' chunk tables that can be read, and the committer's of small tensors, as one; damage to hosts' files is reported."""
        own = [] if self.record.small_table is None else [self.record.small_table]
        others: dict[FileReference, None] = {}  # each once, though hosts that say the same share a file
        for reference in self.record.hosts:
            with self._reporting(reference.key):
                host = read_host_files(self.place, reference)
                self.lanes += host.lanes
                own.append(host.table)
                others |= dict.fromkeys(part for part in (host.contents, host.values) if part is not None)
        for part in others:
            with self._reporting(part.key):
                part.check(self.place.read(part.key), f"{self.place}/{part.key}")
        tables = []
        for table in own:
            with self._reporting(table.key):
                tables.append(read_table(self.place, table))
        try:
            merged = merge_tables(tables)
        except FormatError as e:
            self._damaged_file("hosts", e)
            return WholeTable([], {})
        return WholeTable(merged.files, merged.arrays())

    def _index(self, table: WholeTable) -> None:
        """Compare what stock zarr readers go by with the record and the table."""
        structure = self.record.structure
        documents = zarr_documents(structure, self.record.compression)
        pieces = {p.path: p for t in structure.tensors.values() for p in t.pieces}
        check = IndexCheck(self.place, documents, pieces, table.files, table.arrays)
        found = check.packed(self.lanes) if self.record.layout == "packed" else check.plain()
        self.report.damage += [Damage(None, None, f"{self.record.attempt}/{file}", reason) for file, reason in found]

    @contextmanager
    def _reporting(self, file: str) -> Iterator[None]:
        """Report what is raised inside as damage to a file, and go on."""
        try:
            yield
        except ShardckptError as e:
            self._damaged_file(file, e)

    def _damaged_chunk(self, tensor: str, box: Box, file: str, error: ShardckptError) -> None:
        self.report.damage.append(Damage(tensor, box, f"{self.record.attempt}/{file}", str(error)))

    def _damaged_record(self, reason: str) -> None:
        self.report.damage.append(Damage(None, None, RECORD, reason))

    def _damaged_file(self, file: str, error: ShardckptError) -> None:
        self.report.damage.append(Damage(None, None, f"{self.record.attempt}/{file}", str(error)))


def empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory for a tensor.

    Raises:
        BudgetError: this machine has not enough, or none could have.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as e:
        raise BudgetError(f"{name}: there is no memory for an array of {shape} ({e}); read a box of it, or leave it out with only=.") from e


def _groups(tensors: Sequence[TensorRecord], limit: int = 512 << 20) -> list[list[TensorRecord]]:
    """Consecutive tensors whose bytes are about `limit` together: how often progress is told."""
    groups: list[list[TensorRecord]] = []
    size = limit
    for tensor in tensors:
        if size >= limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _read_record(store: Store) -> CheckpointRecord:
    """The commit record, or the reason why there is none."""
    try:
        found = parse_checkpoint(store.read(RECORD), f"{store}/{RECORD}")
    except MissingDataError:
        found = None
    if isinstance(found, CheckpointRecord):
        return found
    children = [child.removesuffix("/") for child in store.list_children() if child.endswith("/")]
    if isinstance(found, Tombstone):
        raise NotFoundError(f"{store}: the checkpoint was deleted ({found.reason}).")
    if any(is_attempt(store, child) for child in children):
        raise UncommittedError(f"{store}: a save was begun there and never committed; it holds no checkpoint. Look for an earlier one.")
    inside = [child for child in children if store.exists(f"{child}/{RECORD}")]
    hint = f"; did you mean {store}/{max(inside, key=naming.natural_key)}?" if inside else "."
    raise NotFoundError(f"{store}: no checkpoint there{hint}")
