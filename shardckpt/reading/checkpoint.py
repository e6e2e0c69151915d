"""A committed checkpoint, open for reading.

Opening reads only the commit record. Host records and chunk tables are read when the first
chunk is needed.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property, partial
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from shardckpt.commit import stock
from shardckpt.commit.attempts import same_elements
from shardckpt.commit.base_places import base_location
from shardckpt.commit.publish import RECORD
from shardckpt.commit.table_reading import read_host_files
from shardckpt.errors import (
    MissingDataError,
    NamesMismatchError,
    OptionError,
    ReplacedError,
    ShapeMismatchError,
    out_of_memory_is_typed,
)
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.io.failures import check_fork, reading_takes_threads
from shardckpt.io.store import Store, kind_of
from shardckpt.io.threads import collector_paused
from shardckpt.io.url import parse
from shardckpt.layout.box import Box, BoxArray
from shardckpt.reading.inspection import display
from shardckpt.reading.inspection.stock_arrays import compression, stock_array
from shardckpt.reading.inspection.tensor_info import TensorInfo
from shardckpt.reading.inspection.words import nodes_of
from shardckpt.reading.lazy_array import LazyArray, empty
from shardckpt.reading.locate import Request
from shardckpt.reading.missing import no_checkpoint, replaced_error
from shardckpt.reading.reader import OBJECT_MEMORY, ChunkReader, open_reader
from shardckpt.reading.stored_fingerprint import stored_fingerprint
from shardckpt.reading.verification import verify
from shardckpt.state import alias_map, per_process_names, stored_names, unflatten
from shardckpt.state import names as naming
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.fingerprint import Fingerprint
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.reading.reader import ReadStats
    from shardckpt.reading.verification import VerifyReport
    from shardckpt.reading.zarr_store import CheckpointStore
    from shardckpt.state.document import Node


_FOR_USERS = (
    "bases", "fingerprint", "format", "info", "location", "metadata", "names", "notes", "read",
    "record", "stats", "stock_spec", "stock_url", "tree", "verify", "zarr_store",
)  # fmt: skip
"""Members of a `Checkpoint` that docs and users refer to."""
_opened: WeakValueDictionary[int, Checkpoint] = WeakValueDictionary()
"""Open checkpoints by `id`; without a lock, which a signal handler could wait for in vain."""


def open(url: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001  (shardckpt.open, as in gzip.open)
    """Open a committed checkpoint for reading.

    Raises:
        NotFoundError: there is no checkpoint.
        UncommittedError: a save began there and did not finish.
        FormatError: the commit record is damaged.
        VersionError: the format is newer than this version of shardckpt.
    """
    return Checkpoint(url)


class Checkpoint:
    """A committed checkpoint, open for reading."""

    native = True
    """Whether it is stored in shardckpt's own format; a checkpoint of another format can be read,
    and has no attempts."""

    def __init__(self, url: str | os.PathLike[str] | Location) -> None:
        """Read the commit record; see `shardckpt.open`."""
        location = parse(url)
        self._store = Store.open(location)
        self._describe(location, self._record())
        self._place = self._store.sub(self.record.attempt)
        self._opening = RLock()  # a signal handler may read amid the opening, not amid a read
        self._opened: ChunkReader | None = None
        self._reading: tuple[int | None, int] = (None, OBJECT_MEMORY)
        _opened[id(self)] = self

    def _record(self) -> CheckpointRecord:
        try:
            data = self._store.read(RECORD)
            with collector_paused():
                record = parse_checkpoint(data, f"{self._store}/{RECORD}")
        except MissingDataError:
            record = None
        if isinstance(record, CheckpointRecord):
            return record
        raise no_checkpoint(self._store, record)

    def _describe(self, location: Location, record: CheckpointRecord) -> None:
        """Set the description of the contents: all of names, shapes and the tree is from it."""
        self.location = location
        self.record = record
        with collector_paused():
            self.parsed_tree = record.structure.nodes
            """The tree for functions of `shardckpt.state`, so that each need not parse it again."""
            self._stored_name = {
                **{name: name for name in record.structure.tensors},
                **alias_map(self.parsed_tree),
            }

    @property
    def format(self) -> str:
        """Name of the checkpoint's storage format: "shardckpt", or another (docs/import.md)."""
        return "shardckpt"

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about what was found and what cannot be shown, a line each.

        Only checkpoints of other formats have some.
        """
        return ()

    @property
    def tree(self) -> Any:
        """The state's containers and small leaves, as a JSON document (docs/format.md)."""
        return self.record.structure.tree

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of `SaveOptions(metadata=…)`."""
        return self.record.metadata

    def names(self) -> list[str]:
        """Names of all tensors in tree order, then the other names of tied tensors."""
        return list(self._stored_name)

    def tensor(self, name: str) -> TensorRecord:
        """The record of a tensor, by any of its names.

        Raises:
            NamesMismatchError: there is no such tensor; the error suggests the nearest name.
            OptionError: `name` is not a str.
        """
        if not isinstance(name, str):
            raise OptionError(
                f"{self.location}: {shorten(name)} is not a name of a tensor; give one of its "
                "names, as a str."
            )
        stored = self._stored_name.get(name)
        if stored is None:
            raise NamesMismatchError(
                f"{self.location}: no tensor "
                f"{name!r}{naming.did_you_mean(name, self._stored_name)}; `shardckpt info` lists "
                "its names."
            )
        return self.record.structure.tensors[stored]

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
            base=None if t.base is None else str(base_location(self.location, t.base.base)),
        )

    def read(self, name: str, box: Box | None = None) -> NDArray[Any]:
        """Read a tensor, or a box of it, into a numpy array (ml_dtypes for bfloat16 and fp8).

        Raises:
            NamesMismatchError: there is no such tensor.
            ShapeMismatchError: the box lies outside the tensor.
            OptionError: `box` is not a Box.
            CorruptionError: stored bytes are damaged or missing.
            MissingDataError: the base that holds the tensor is gone, or another checkpoint has
                replaced it.
        """
        t = self.tensor(name)
        box = Box.full(t.shape) if box is None else box
        if not isinstance(box, Box):
            raise OptionError(
                f"{name}: {shorten(box)} is not a box; give shardckpt.Box((first, …), (one past "
                "the last, …))."
            )
        if (
            box.ndim != len(t.shape)
            or not Box.full(t.shape).contains(box)
            or any(b > n for b, n in zip(box.stop, t.shape, strict=True))
        ):
            raise ShapeMismatchError(
                f"{name}: the box {box} lies outside its shape {t.shape} in {self.location}."
            )
        out = empty(name, box.shape, t.dtype.storage)
        self._read_boxes(t, [box], [out])
        return out.view(t.dtype.numpy)

    def __getitem__(self, name: str) -> Any:
        """A tensor, a container or another value by its name; no element of a tensor is read.

        A tensor is a `LazyArray`: indexing it reads only the selected part, as in
        `checkpoint["model/w"][8:16]`. A container is made of plain dicts, lists and tuples of such
        arrays and of small values, as in `checkpoint["model"]["w"]`; values that each process has
        for itself are left out.

        Raises:
            NamesMismatchError: there is no such name; the error suggests the nearest.
            OptionError: `name` is not a str.
            FormatError, MissingExtraError: a small value cannot be decoded.
        """
        if not isinstance(name, str) or name in self._stored_name or name not in self:
            return self._lazy(name)
        node = self._nodes[name]
        tensors = {stored: self._lazy(stored) for stored in stored_names(node)}
        of_processes = frozenset(per_process_names(node))
        return unflatten(node, tensors, lambda leaf: leaf not in of_processes)

    def __contains__(self, name: object) -> bool:
        """Whether a tensor, a container or another value has this name."""
        return isinstance(name, str) and (
            name in self._stored_name or (name in self._nodes and name != "")
        )

    def __len__(self) -> int:
        """Number of names of tensors."""
        return len(self._stored_name)

    def __bool__(self) -> bool:
        """True, also without tensors."""
        return True

    def __iter__(self) -> Iterator[str]:
        """The names of `names()`."""
        return iter(self._stored_name)

    def _lazy(self, name: str) -> LazyArray:
        """A tensor as a lazy array."""
        t = self.tensor(name)
        return LazyArray(
            name, t.shape, t.dtype, t.layout, partial(self._read_boxes, t), t.pieces[0].chunks
        )

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """Tensors, containers and other values by name; "" is the state itself."""
        return nodes_of(self.parsed_tree)

    def _read_boxes(
        self, t: TensorRecord, boxes: Sequence[Box], memory: Sequence[NDArray[Any]]
    ) -> None:
        """Read boxes of a tensor into arrays of the same shapes.

        The arrays have the tensor's dtype or its storage type.
        """
        with self.reading():
            self.reader.read([Request.of(t, BoxArray.of(list(boxes), len(t.shape)), memory)])

    @cached_property
    def _names_of(self) -> dict[str, list[str]]:
        """Stored name → every name of the tensor."""
        names: dict[str, list[str]] = {}
        for name, stored in self._stored_name.items():
            names.setdefault(stored, []).append(name)
        return names

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for reads that detects that the checkpoint was replaced or deleted.

        Raises:
            ReplacedError: instead of a MissingDataError inside, if the checkpoint was replaced or
                deleted.
            StorageError: Python is shutting down, and starts no threads to read with.
        """
        try:
            with reading_takes_threads(self.location):
                yield
        except MissingDataError as e:
            replaced = replaced_error(self._store, self.location, self.record.attempt)
            if replaced is None:
                raise
            raise replaced from e

    def check_unchanged(self) -> None:
        """See `Source`; an attempt's data never change."""

    def bases(self) -> list[str]:
        """Paths or urls of the checkpoints that hold tensors of this one.

        They are opened when such a tensor is read.
        """
        return [str(base_location(self.location, base)) for base in self.record.structure.bases]

    def open_bases(self, tensors: Iterable[TensorRecord]) -> None:
        """Open the bases of some tensors, so that errors of a base come before anything is read.

        Raises:
            MissingDataError, FormatError: a base is gone, was replaced, or does not hold the
                tensor.
        """
        requests = [
            Request.of(tensor, BoxArray.of([], len(tensor.shape)), [])
            for tensor in tensors
            if tensor.base is not None
        ]
        if requests:
            self.reader.source.resolve(requests)

    @property
    def place(self) -> Store:
        """The attempt's location, for library code that reads its files."""
        return self._place

    @property
    def reader(self) -> ChunkReader:
        """The reader of chunks, which all threads share.

        It reads the chunk table's header at first use.
        """
        check_fork(self.location)
        with self._opening:
            if self._opened is None:
                place, (threads, memory) = self._place, self._reading
                with self.reading():
                    self._opened = open_reader(place, self.record, threads=threads, memory=memory)
            return self._opened

    @contextmanager
    def reading_from(self, reader: ChunkReader) -> Iterator[None]:
        """Read chunks with another reader inside the block; for one thread."""
        with self._opening:
            before, self._opened = self._opened, reader
        try:
            yield
        finally:
            self._opened = before

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """Set the resources for reading chunks, before the first read.

        Args:
            threads: maximum number of threads that read; None lets `ChunkReader` choose.
            memory: maximum bytes in flight. A lower limit means smaller reads, and fewer at a time
                from an object store.
        """
        assert self._opened is None, "its reader is at work already"
        self._reading = threads, memory

    @property
    def stats(self) -> ReadStats:
        """Counts and bytes of this object's reads, for chunks and for the chunk table."""
        return self.reader.stats

    def zarr_store(self) -> CheckpointStore:
        """A read-only store for zarr-python 3: `zarr.open_group(ckpt.zarr_store(), mode="r")`.

        The store works for both layouts.
        """
        from shardckpt.reading.zarr_store import CheckpointStore

        return CheckpointStore(self.record, self.reader)

    def stock_spec(self, name: str) -> dict[str, Any]:
        """The spec with which TensorStore alone opens a tensor (its first piece).

        The spec refers to the checkpoint that holds the tensor.

        Raises:
            StorageError: TensorStore has no driver for the storage.
            FormatError: the chunks are differences from those of another checkpoint.
        """
        return stock.stock_spec(*self._stock_array(name))

    def stock_url(self, name: str) -> str:
        """The url with which TensorStore alone opens a tensor (its first piece)."""
        return stock.stock_url(*self._stock_array(name))

    def has_stock_reader(self, name: str) -> bool:
        """Whether TensorStore alone can open a tensor.

        TensorStore needs a driver for the storage and a codec for the chunks.
        """
        return (
            kind_of(self.location).has_driver
            and compression(self.record, self.tensor(name)) != "difference"
        )

    def _stock_array(self, name: str) -> tuple[Location, str, str, str]:
        """Checkpoint, attempt, array's path and layout of a tensor's first piece."""
        return stock_array(self.location, self.record, self.tensor(name))

    @out_of_memory_is_typed
    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check everything; continue after damage.

        Args:
            progress: called with chunks checked so far and in all.

        Returns:
            The number of checked chunks, and the damage: by tensor and index range for chunks, by
            file for metadata. The check covers every chunk and its position (also of tensors in
            bases), the host records, the chunk tables, and the metadata for zarr readers (the
            merged index, or the zarr.json documents).

        Raises:
            ReplacedError: the checkpoint was replaced or deleted before everything was read.
            StorageError: the storage does not answer, or denies permission.
        """
        check_fork(self.location)  # its errors would be reported as damage
        with reading_takes_threads(self.location):
            return verify(
                self._store,
                self.record,
                progress and (lambda done, total, _read: progress(done, total)),
            )

    @out_of_memory_is_typed
    def fingerprint(
        self, *, recorded: bool = True, progress: Callable[[int, int], None] | None = None
    ) -> Fingerprint:
        """The tensors' fingerprint, equal to `shardckpt.fingerprint` of the saved state.

        Args:
            recorded: use the values that `SaveOptions(fingerprint=True)` recorded, and read only
                the other tensors. False reads and verifies all tensors.
            progress: called with bytes read so far, and in all.

        Raises:
            CorruptionError, MissingDataError, ReplacedError, StorageError: as for `read`.
        """
        return stored_fingerprint(self, recorded=recorded, progress=progress)

    def process_values(self, process: int) -> dict[str, Any]:
        """The `PerProcess` values of one process at the save, by name, not decoded."""
        with self.reading():
            values = read_host_files(self._place, self.record.hosts[process]).values
            if values is None:
                return {}
            data = self._place.read(values.key)
            return values.open(data, self._place.path_of(values.key)).mapping("values")

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Location, str]]:
        """Pickle the place and the attempt, which unpickling opens again."""
        if not self.native:
            raise OptionError(
                f"{self.location}: a checkpoint of the format {self.format} cannot be pickled; "
                "pass its url, and open it there."
            )
        return _reopen, (self.location, self.record.attempt)

    def __dir__(self) -> list[str]:
        """Members for users; all others are internal."""
        return sorted(_FOR_USERS)

    def __repr__(self) -> str:
        """Url and size."""
        return display.checkpoint_repr(self)

    def __str__(self) -> str:
        """The tree of names, with shapes, dtypes and sizes."""
        return display.checkpoint_text(self)

    def _repr_html_(self) -> str:
        """The tree, for notebooks."""
        return display.checkpoint_html(self)


def _reopen(location: Location, attempt: str) -> Checkpoint:
    """Open an attempt after unpickling."""
    checkpoint = Checkpoint(location)
    if not same_elements(checkpoint.record.attempt, attempt):
        raise ReplacedError(f"{location}: it was replaced after it was pickled; open it again.")
    return checkpoint


def open_in_this_process(location: Location) -> bool:
    """Whether the checkpoint at a location is open in this process."""
    opened = (reference() for reference in _opened.valuerefs())
    return location in {one.location for one in opened if one is not None}
