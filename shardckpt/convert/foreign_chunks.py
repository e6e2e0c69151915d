"""The chunks of a foreign checkpoint, for the reader of `reading/`.

1. `ForeignChunks.resolve` turns requests for tensors of the new checkpoint into one request for
   each foreign tensor, so that a chunk is read once, even for several requests.
2. Most pieces lie in a file as one run of bytes (`Foreign.run`), of which each chunk is a part.
   `ForeignChunks.find` computes the places of these chunks. They are read like chunks of a
   shardckpt checkpoint, but have no crc32c, and are not padded.
3. The format itself reads all other chunks, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.convert.arrangement import is_whole
from shardckpt.errors import CorruptionError, extend
from shardckpt.format.table import OWN_OBJECT, ArrayChunks
from shardckpt.io.store import Store, kind_of
from shardckpt.io.threads import map_on_threads
from shardckpt.layout.box import BoxArray
from shardckpt.reading.fetch import ReadableChunks, raw
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.read_list import ReadList
from shardckpt.reading.runs import places_of
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.arrangement import Arrangement
    from shardckpt.convert.placed import Foreign
    from shardckpt.convert.span import Readable, StoredRun
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.fetch import BandOfElements, FetchedChunks, ReadStored
    from shardckpt.reading.locate import Request
    from shardckpt.reading.reader import ReadStats
    from shardckpt.reading.runs import ReadTask

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _PieceRun:
    """A piece that is one run of bytes, of which each chunk is a contiguous part."""

    entry: StoredRun
    file: str
    per_row: int
    """Chunks side by side along the dimension that is cut. A chunk has one index in each earlier
    dimension, and all of each later one."""
    row_bytes: int
    """Bytes of these chunks together."""
    chunk_bytes: int
    """Bytes of each chunk, except the last in a row."""

    @classmethod
    def of(cls, entry: StoredRun, piece: Piece, itemsize: int) -> _PieceRun | None:
        """The runs of a piece's chunks; None if chunks are not contiguous."""
        cut = next(
            (d for d in reversed(range(len(piece.shape))) if piece.chunks[d] < piece.shape[d]), 0
        )
        if any(side != 1 for side in piece.chunks[:cut]):
            return None
        row_bytes, chunk_bytes = (
            prod(piece.shape[cut:]) * itemsize,
            prod(piece.chunks[cut:]) * itemsize,
        )
        return cls(
            entry, str(entry.span.file), prod(piece.grid[cut : cut + 1]), row_bytes, chunk_bytes
        )


class ForeignChunks(ReadableChunks):
    """The chunks of a foreign checkpoint, and the tensors that are made from them. A `Lookup`.

    Chunks that are not parts of runs count as objects of their own, which the format reads.
    """

    checksum_bytes = 0

    def __init__(self, foreign: Foreign, arrangement: Arrangement, stats: ReadStats) -> None:
        """Nothing is read yet; `stats` also counts the reads of the format."""
        super().__init__(Store.open(foreign.location), self, self._elements)
        self._foreign = foreign
        self._tensors = foreign.structure.tensors
        self._views = arrangement.views
        self._stats = stats
        self._pieces = {
            piece.path: (tensor, piece)
            for tensor in self._tensors.values()
            for piece in tensor.pieces
        }
        self._runs: dict[str, _PieceRun | None] = {}
        """Path of a piece → its run, filled on demand: small beside the piece itself, which is in
        `structure`."""
        self._files: dict[str, Readable] = {}
        """Files of the runs by their path or url."""

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`. None: `structure` has only what is stored."""
        del path, num_chunks
        return None

    def prepare(self, boxes: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`; finds the runs of pieces."""
        paths = dict.fromkeys(piece.path for piece, _ in boxes if piece.path not in self._runs)
        if not kind_of(
            self._foreign.location
        ).near:  # finding a run may send requests; on a disk threads would only wait for each other
            map_on_threads(self._find_run, paths)
            return
        for path in paths:
            self._find_run(path)

    def _find_run(self, path: str) -> None:
        tensor, piece = self._pieces[path]
        entry = self._foreign.run(tensor, piece)
        run = None if entry is None else _PieceRun.of(entry, piece, tensor.dtype.itemsize)
        if run is not None:
            self._files.setdefault(run.file, run.entry.span.file)
        self._runs[path] = run

    def find(
        self, paths: Sequence[str], array: Ints, chunks: Ints
    ) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`.

        A run whose bytes overlap those of others has a file of its own here, so that it is read in
        one go.
        """
        row_of = {path: row for row, path in enumerate(dict.fromkeys(paths))}
        columns = np.tile(np.array([OWN_OBJECT, 0, 1, 0, 0], np.int64), (len(row_of), 1))
        runs = [
            (run.file, run.entry.span.start, row, run)
            for path, row in row_of.items()
            if (run := self._runs.get(path)) is not None
        ]
        names: list[str] = []
        reached: dict[str, tuple[int, int]] = {}
        for file, start, row, run in sorted(runs, key=lambda one: one[:2]):
            number, end = reached.get(file, (len(names), start))
            mine = number if start >= end else len(names)
            if mine == len(names):
                names.append(file)
            reached[file] = number, max(end, run.entry.span.stop)
            columns[row] = mine, start, run.per_row, run.row_bytes, run.chunk_bytes
        rows = np.array([row_of[path] for path in paths], np.int64)
        file_number, begin, per_row, row_bytes, chunk_bytes = columns[rows[array]].T
        line, nth = np.divmod(chunks, per_row)
        length = np.minimum(chunk_bytes, row_bytes - nth * chunk_bytes)
        offset = begin + line * row_bytes + nth * chunk_bytes
        return names, ArrayChunks.of_columns(
            chunks, file_number, offset, length, np.zeros_like(chunks)
        )

    def whole(self) -> WholeTable:
        """See `Lookup`; finds all runs."""
        pieces = [piece for _, piece in self._pieces.values()]
        self.prepare((piece, BoxArray.of([], 0)) for piece in pieces)
        counts = np.array([piece.num_chunks for piece in pieces], np.int64)
        first = np.cumsum(counts) - counts
        array = np.repeat(np.arange(len(pieces)), counts)
        files, rows = self.find(list(self._pieces), array, np.arange(len(array)) - first[array])
        ranges = zip(self._pieces, first.tolist(), counts.tolist(), strict=True)
        return WholeTable.of(
            files, {path: rows.take(np.arange(begin, begin + n)) for path, begin, n in ranges}
        )

    def resolve(self, requests: Sequence[Request]) -> Sequence[Request]:
        """One request for each foreign tensor.

        It converts all elements if one of the requests converts any.
        """
        converts = {
            view.tensor
            for request in requests
            if request.convert_from is not None
            for view in self._views[request.name]
        }
        reads = ReadList()
        for request in requests:
            views = self._views[request.name]
            for view in views:
                tensor, buffers = self._tensors[view.tensor], request.buffers
                parts = reads.of(tensor, converts=view.tensor in converts)
                if view.tensor in converts and request.convert_from is None:
                    buffers = [buffer.view(tensor.dtype.numpy) for buffer in buffers]
                if is_whole(views, self._tensors):
                    parts.boxes.append(request.boxes)
                    parts.buffers += buffers
                else:
                    parts.add(view, request.boxes, buffers)
        return reads.requests()

    def lengths(self, nbytes: int) -> tuple[int, int]:
        """See `ReadableChunks`. Chunks at an edge are shorter."""
        return 0, nbytes

    def read_into(self, task: ReadTask, vectors: Sequence[Sequence[memoryview]]) -> None:
        """See `ReadableChunks`. A file is checked for changes whenever it is opened."""
        for run, into in zip(task.runs, vectors, strict=True):
            try:
                self._files[task.file].read_into(run.start, into)
            except CorruptionError as e:
                _put_name(e, task, run.begin)
                raise

    def verify(self, fetched: FetchedChunks) -> None:
        """Compare the checksum of each run that was read in one go.

        CorruptionError if one differs.
        """
        task = fetched.task
        requested, row = task.chunks.requested, 0
        for part, rows in groupby(requested.part[task.begin : task.end].tolist()):
            first, row = row, row + sum(1 for _ in rows)
            run = self._runs[requested.parts[part].piece.path]
            assert run is not None
            try:
                run.entry.check(fetched.payloads[first:row])
            except CorruptionError as e:
                _put_name(e, task, task.begin + first)
                raise

    def _elements(self, task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
        """The codec: chunks of runs are stored as their elements, the format decodes all others."""
        chunks, row = task.chunks, task.begin
        if not chunks.is_own_object(row):
            yield from raw(task, read)
            return
        part, box, (band,) = (
            chunks.requested.part_of(row),
            chunks.requested.box(row),
            task.runs[0].bands,
        )
        elements = self._foreign.read(self._tensors[part.request.name], part.piece, box)
        assert (elements.dtype, elements.shape) == (part.request.dtype, box.shape)
        self._stats.count(reads=1, read=elements.nbytes)
        yield (
            band,
            places_of([band])[0],
            np.ascontiguousarray(elements).reshape(1, -1).view(np.uint8),
        )


def _put_name(error: CorruptionError, task: ReadTask, row: int) -> None:
    """Put the tensor and the box of a chunk before an error's message."""
    requested = task.chunks.requested
    extend(error, before=f"{shown(requested.part_of(row).request.name)}{requested.box(row)}: ")
