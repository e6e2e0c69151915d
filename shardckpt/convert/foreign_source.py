"""A foreign checkpoint as what a reshard reads.

1. `ForeignSpec` is what workers are told; each opens the checkpoint for itself.
2. `ForeignSource` is what a reshard asks of a source. Its record says what a commit record would say: the structure as it is to
   become (`arrangement`), and in place of an attempt what tells this source from any other.
3. `ForeignReader` reads what of it is wanted.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.convert.arrangement import Arrangement
from shardckpt.convert.detect import module_of
from shardckpt.convert.foreign_reader import ForeignReader
from shardckpt.convert.naming.choose import NameOptions
from shardckpt.format.documents import DEEPEST_METADATA, is_deeper
from shardckpt.format.record import CheckpointRecord
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.url import parse
from shardckpt.reading.reader import OBJECT_COPIES, OBJECT_MEMORY, OBJECT_THREADS, ReadStats
from shardckpt.reshard.memory import READERS

if TYPE_CHECKING:
    from shardckpt.convert.foreign import Foreign
    from shardckpt.io.url import Location
    from shardckpt.plan.views import View

__all__ = ["ForeignSource", "ForeignSpec"]

_JOINED = 4 << 20
"""Bytes to which chunks are read together from a local disk, which is what a thread has there (`reshard.memory`)."""
_OBJECT_JOINED = 8 << 20
"""The same of an object store, where a request costs milliseconds."""


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """Which foreign checkpoint is read, and as what."""

    url: str
    """Where it lies."""
    format: str
    """The name of its format, as `detect` has it."""
    trust_pickle: bool = False
    """Whether what only a pickle says may be read from one."""
    into: str | None = None
    """Where in the new state it goes; see `Arrangement.below`."""
    names: NameOptions = field(default_factory=NameOptions)
    """Which tensors are taken, under which names, made of what; see `Arrangement.named`."""

    def open(self) -> ForeignSource:
        """Open it.

        Raises:
            FormatError, MissingDataError: it makes no sense, or a part of it is gone.
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: names and mappings do not suit it.
        """
        foreign: Foreign = module_of(self.format).open_foreign(parse(self.url), trust_pickle=self.trust_pickle)
        arrangement = Arrangement.named(foreign.structure, self.names, str(foreign.location))
        return ForeignSource(foreign, arrangement if self.into is None else arrangement.below(self.into))


class ForeignSource:
    """A foreign checkpoint that is open for reading: a `reshard.source.Source`."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement) -> None:
        self.foreign = foreign
        self.location: Location = foreign.location
        self.stats = ReadStats()
        metadata = {name: value for name, value in foreign.metadata.items() if _is_json(value)}
        lost = [
            f"left behind: {name}, which no other JSON reader would take (NaN, or too deep)" for name in foreign.metadata.keys() - metadata
        ]
        self.notes: tuple[str, ...] = (*foreign.notes, *lost, *arrangement.notes)
        """What was seen, and what is left behind, in a line each."""
        self._arrangement = arrangement
        self._limits = READERS, OBJECT_MEMORY
        made_of = [(name, [_text(view) for view in views]) for name, views in arrangement.views.items()]
        seen = [foreign.format, foreign.identity, made_of]
        self.record = CheckpointRecord(
            attempt=hashlib.sha256(json.dumps(seen).encode()).hexdigest(),
            created="",  # the attempt of an import bears no time of its own
            writer=foreign.format,
            layout="packed",
            compression=None,
            hosts=(),
            structure=arrangement.structure,
            metadata=metadata,
            saved_by=1,
        )

    @cached_property
    def reader(self) -> ForeignReader:
        """Reads its chunks; made when it is first asked for."""
        threads, memory = self._limits
        joined = _JOINED
        if self.location.local is None:
            joined = _OBJECT_JOINED
            chunk = max(joined, largest_chunk(self.foreign.structure.tensors.values()))
            threads = max(1, min(OBJECT_THREADS, memory // (OBJECT_COPIES * chunk)))
        return ForeignReader(self.foreign, self._arrangement, self.stats, threads, joined)

    def limit_reading(self, *, threads: int | None, memory: int) -> None:
        """See `Source`. From an object store as many threads read as there is memory for."""
        self._limits = threads or READERS, memory

    def reading(self) -> AbstractContextManager[None]:
        """See `Source`. Each file is compared with what it was whenever it is opened."""
        return nullcontext()

    def process_values(self, process: int) -> dict[str, Any]:
        """None: no other format has such values."""
        del process
        return {}


def _is_json(value: object) -> bool:
    """Whether a record can hold it. A metric may be NaN, and Python's reader makes an infinity of `1e999`."""
    try:
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return not is_deeper(value, DEEPEST_METADATA - 1)


def _text(view: View) -> str:
    """Differs when the view does."""
    return f"{view.tensor} {view.box.start} {view.box.stop} {view.permutation} {view.start}"
