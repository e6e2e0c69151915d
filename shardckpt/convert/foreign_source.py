"""A foreign checkpoint as the source of a reshard.

1. `ForeignSpec` is sent to the workers; each opens the checkpoint for itself.
2. `ForeignSource` implements a reshard's source. Its record has the contents of a commit record:
   the structure of the new checkpoint (`arrangement`), and in place of an attempt a digest that
   identifies this source.
3. The reader of `reading/` reads the requested elements, with the lookup of `foreign_chunks`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.convert.arrangement import Arrangement
from shardckpt.convert.detect import module_of
from shardckpt.convert.foreign_chunks import ForeignChunks
from shardckpt.convert.options import NameOptions
from shardckpt.convert.strict_json import is_json
from shardckpt.errors import FormatError, ReplacedError, ShardckptError, out_of_memory_is_typed
from shardckpt.format.documents import document_digest
from shardckpt.format.hf_files import CONFIG
from shardckpt.format.record import CheckpointRecord
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.failures import raise_unless_damage, reading_takes_threads
from shardckpt.io.store import Store, kind_of
from shardckpt.io.threads import Workers
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.inspection.read_all import read_all
from shardckpt.reading.reader import OBJECT_MEMORY, OBJECT_THREADS, ChunkReader, ReadStats
from shardckpt.reading.runs import RunLimits
from shardckpt.reading.verification import Damage, VerifyReport
from shardckpt.streaming.memory import READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.convert.placed import Foreign
    from shardckpt.format.structure import Structure
    from shardckpt.io.url import Location
    from shardckpt.plan.views import View
    from shardckpt.reading.zarr_store import CheckpointStore

_JOINED = 4 << 20
"""Bytes to which chunks are joined for a read from a local disk, the memory of one thread there
(`streaming.memory`)."""
_OBJECT_JOINED = 8 << 20
"""Bytes to which chunks are joined for a read from an object store, where a request costs
milliseconds."""
_MOST_JOINED = 256
"""Most chunks in one read: preadv accepts 1,024 pieces of memory, and there may be one more before
each chunk."""


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """A foreign checkpoint to read, and its arrangement in the new one."""

    url: str
    """Location of the checkpoint."""
    format: str
    """Name of its format, as in `detect`."""
    trust_pickle: bool = False
    """Whether metadata that a format stores only in a pickle may be read from it."""
    into: str | None = None
    """Its place in the new state; see `Arrangement.below`."""
    names: NameOptions = field(default_factory=NameOptions)
    """Selection and naming of its tensors; see `Arrangement.named`."""

    def open(self) -> ForeignSource:
        """Open the checkpoint.

        Raises:
            FormatError, MissingDataError: it is malformed, or a part of it is missing.
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: names and
            mappings do not fit it.
        """
        foreign: Foreign = module_of(self.format).open_foreign(
            parse(self.url), trust_pickle=self.trust_pickle
        )
        arrangement = Arrangement.named(
            foreign.structure, self.names, str(foreign.location), foreign.metadata.get(CONFIG)
        )
        return ForeignSource(
            foreign, arrangement if self.into is None else arrangement.below(self.into)
        )


class ForeignSource(Checkpoint):
    """A checkpoint of another format, open for reading.

    It is the source of an import, and inspection looks at it.

    It has what a `Checkpoint` has, except what only shardckpt stores: attempts, checksums of
    chunks, and zarr arrays of all tensors.
    """

    native = False

    def __init__(self, foreign: Foreign, arrangement: Arrangement) -> None:
        self.foreign = foreign
        self._stats = ReadStats()
        metadata = {name: value for name, value in foreign.metadata.items() if is_json(value)}
        lost = [
            f"left behind: {name}, which other JSON readers refuse (NaN, or nested too deep)"
            for name in foreign.metadata.keys() - metadata
        ]
        self._notes = (*foreign.notes, *lost, *arrangement.notes)
        self._arrangement = arrangement
        self._limits = READERS, OBJECT_MEMORY
        made_of = [
            (name, [_text(view) for view in views]) for name, views in arrangement.views.items()
        ]
        seen = [foreign.format, foreign.identity, made_of]
        record = CheckpointRecord(
            attempt=document_digest(seen),
            created="",  # the attempt of an import has no time of its own
            writer=foreign.format,
            layout="packed",
            compression=None,
            hosts=(),
            structure=arrangement.structure,
            metadata=metadata,
            totals=_totals(arrangement.structure),
            saved_by=1,
        )
        self._describe(foreign.location, record)

    @property
    def format(self) -> str:
        """See `Checkpoint`."""
        return self.foreign.format

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about the files found and the parts left behind, a line each."""
        return self._notes

    @property
    def stats(self) -> ReadStats:
        """See `Checkpoint`."""
        return self._stats

    @cached_property
    def reader(self) -> ChunkReader:
        """The reader of its chunks; created on first use."""
        threads, memory = self._limits
        joined = _JOINED
        if not kind_of(self.location).near:
            joined = _OBJECT_JOINED
            chunk = max(joined, largest_chunk(self.foreign.structure.tensors.values()))
            threads = max(1, min(OBJECT_THREADS, memory // chunk))
        chunks = ForeignChunks(self.foreign, self._arrangement, self._stats)
        limits, workers = (
            RunLimits(joined, gap=0, chunks=_MOST_JOINED),
            Workers(threads, "shardckpt-import"),
        )
        return ChunkReader(chunks, stats=self._stats, workers=workers, limits=limits)

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """See `Source`. For an object store the memory limits the number of threads."""
        self._limits = threads or READERS, memory

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See `Checkpoint`. Each file is checked for changes whenever it is opened."""
        with reading_takes_threads(self.location):
            yield

    def check_unchanged(self) -> None:
        """See `Source`. Formats without zarr arrays check each file when they open it."""
        identify = self.foreign.identify
        if identify is not None and identify() != self.foreign.identity:
            raise ReplacedError(
                f"{self.location} was changed, replaced or deleted while it was being read; try "
                "again when no process writes there."
            )

    def process_values(self, process: int) -> dict[str, Any]:
        """An empty dict: no other format has per-process values."""
        del process
        return {}

    @out_of_memory_is_typed
    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read everything, and continue after damage.

        The report's `checked` is False: no other format has checksums of all its parts.

        The CRC-32 of the entries in zip archives, which torch writes, is compared.
        """
        with self.reading():
            compared, damage = self._compare_crcs(progress)
            report = read_all(
                self.reader, self.record, str(self.location), progress, compared=compared
            )
        report.damage[:0] = damage
        return report

    def _compare_crcs(
        self, progress: Callable[[int, int], None] | None
    ) -> tuple[list[str], list[Damage]]:
        """Compare the tensors that are stored with a CRC-32; return their names, and the damage."""
        compared, damage = [], []
        tensors = self.record.structure.tensors.values()
        done, total = 0, sum(tensor.num_chunks for tensor in tensors)
        for tensor in tensors if self._arrangement.is_unchanged else ():
            runs = [self.foreign.run(tensor, piece) for piece in tensor.pieces]
            known = [run for run in runs if run is not None and run.crc is not None]
            if len(known) < len(runs) or not tensor.nbytes:
                continue
            compared.append(tensor.name)
            if progress is not None:
                progress(done, total)
            done += tensor.num_chunks
            for run, piece in zip(known, tensor.pieces, strict=True):
                try:
                    run.check_all()
                except ShardckptError as e:
                    raise_unless_damage(e, Store.open(self.location).read_versioned)
                    damage.append(Damage(tensor.name, piece.box, str(run.span.file), str(e)))
        return compared, damage

    @property
    def place(self) -> Store:
        """Refused: there are no attempts; raises FormatError."""
        raise self._not_ours("has no attempts")

    def zarr_store(self) -> CheckpointStore:
        """Refused: its tensors need not be zarr arrays; raises FormatError."""
        raise self._not_ours("is not read as zarr arrays")

    def has_stock_reader(self, name: str) -> bool:
        """False for every tensor: the specs are those of shardckpt's own arrays."""
        self.tensor(name)
        return False

    def _stock_array(self, name: str) -> tuple[Location, str, str, str]:
        self.tensor(name)
        raise self._not_ours("is not read by TensorStore's specs of shardckpt")

    def _not_ours(self, lacks: str) -> FormatError:
        return FormatError(
            f"{self.location}: a checkpoint of the format {self.format} {lacks}; import it first "
            "(docs/import.md)."
        )


def _totals(structure: Structure) -> dict[str, int]:
    """Counts and bytes of the tensors, as a commit record has them.

    Stored bytes are those of the elements.
    """
    tensors = structure.tensors.values()
    nbytes = sum(t.nbytes for t in tensors)
    return {
        "tensors": len(tensors),
        "bytes": nbytes,
        "stored_bytes": nbytes,
        "chunks": sum(t.num_chunks for t in tensors),
    }


def _text(view: View) -> str:
    """A text that identifies a view."""
    return f"{view.tensor} {view.box.start} {view.box.stop} {view.permutation} {view.start}"
