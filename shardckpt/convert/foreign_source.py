"""A foreign checkpoint as the source of a reshard.

1. `ForeignSpec` is sent to the workers; each opens the checkpoint for itself.
2. `ForeignSource` implements a reshard's source. Its record has the contents of a commit record: the structure of the new checkpoint
   (`arrangement`), and in place of an attempt a digest that identifies this source.
3. The reader of `reading/` reads the requested elements, with the lookup of `foreign_chunks`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.convert.arrangement import Arrangement
from shardckpt.convert.detect import module_of
from shardckpt.convert.foreign_chunks import ForeignChunks
from shardckpt.convert.naming.choose import NameOptions
from shardckpt.convert.strict_json import is_json
from shardckpt.format.documents import document_digest
from shardckpt.format.record import CheckpointRecord
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.threads import Workers
from shardckpt.io.url import parse
from shardckpt.reading.reader import OBJECT_MEMORY, OBJECT_THREADS, ChunkReader, ReadStats
from shardckpt.reading.runs import RunLimits
from shardckpt.reshard.memory import READERS

if TYPE_CHECKING:
    from shardckpt.convert.foreign import Foreign
    from shardckpt.io.url import Location
    from shardckpt.plan.views import View

_JOINED = 4 << 20
"""Bytes to which chunks are joined for a read from a local disk, the memory of one thread there (`reshard.memory`)."""
_OBJECT_JOINED = 8 << 20
"""Bytes to which chunks are joined for a read from an object store, where a request costs milliseconds."""
_MOST_JOINED = 256
"""Most chunks in one read: preadv accepts 1,024 pieces of memory, and there may be one more before each chunk."""


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
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: names and mappings do not fit it.
        """
        foreign: Foreign = module_of(self.format).open_foreign(parse(self.url), trust_pickle=self.trust_pickle)
        arrangement = Arrangement.named(foreign.structure, self.names, str(foreign.location))
        return ForeignSource(foreign, arrangement if self.into is None else arrangement.below(self.into))


class ForeignSource:
    """A foreign checkpoint that is open for reading: a `reshard.source.Source`."""

    native = False

    def __init__(self, foreign: Foreign, arrangement: Arrangement) -> None:
        self.foreign = foreign
        self.location: Location = foreign.location
        self.stats = ReadStats()
        metadata = {name: value for name, value in foreign.metadata.items() if is_json(value)}
        lost = [
            f"left behind: {name}, which other JSON readers refuse (NaN, or nested too deep)" for name in foreign.metadata.keys() - metadata
        ]
        self.notes: tuple[str, ...] = (*foreign.notes, *lost, *arrangement.notes)
        """Messages about the files found and the parts left behind, a line each."""
        self._arrangement = arrangement
        self._limits = READERS, OBJECT_MEMORY
        made_of = [(name, [_text(view) for view in views]) for name, views in arrangement.views.items()]
        seen = [foreign.format, foreign.identity, made_of]
        self.record = CheckpointRecord(
            attempt=document_digest(seen),
            created="",  # the attempt of an import has no time of its own
            writer=foreign.format,
            layout="packed",
            compression=None,
            hosts=(),
            structure=arrangement.structure,
            metadata=metadata,
            saved_by=1,
        )

    @cached_property
    def reader(self) -> ChunkReader:
        """The reader of its chunks; created on first use."""
        threads, memory = self._limits
        joined = _JOINED
        if self.location.local is None:
            joined = _OBJECT_JOINED
            chunk = max(joined, largest_chunk(self.foreign.structure.tensors.values()))
            threads = max(1, min(OBJECT_THREADS, memory // chunk))
        chunks = ForeignChunks(self.foreign, self._arrangement, self.stats)
        limits, workers = RunLimits(joined, gap=0, chunks=_MOST_JOINED), Workers(threads, "shardckpt-import")
        return ChunkReader(chunks, stats=self.stats, workers=workers, limits=limits)

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """See `Source`. For an object store the memory limits the number of threads."""
        self._limits = threads or READERS, memory

    def reading(self) -> AbstractContextManager[None]:
        """See `Source`. Each file is checked for changes whenever it is opened."""
        return nullcontext()

    def process_values(self, process: int) -> dict[str, Any]:
        """An empty dict: no other format has per-process values."""
        del process
        return {}


def _text(view: View) -> str:
    """A text that identifies a view."""
    return f"{view.tensor} {view.box.start} {view.box.stop} {view.permutation} {view.start}"
