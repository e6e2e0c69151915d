"""Reader of a foreign checkpoint; it uses the code that reads shardckpt's own checkpoints.

1. All requests of a call are planned together, in columns (`reading.locate`). A chunk is read once, even for several requests.
2. Most pieces lie in a file as one run of bytes (`Foreign.run`), of which each chunk is a part. The places of these chunks are
   computed; then they are joined and read like chunks of a checkpoint (`reading.runs`, `reading.fetch`), but have no crc32c.
3. The format itself reads all other chunks, one by one.

Each thread holds in memory one such read: `joined` bytes, or one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardckpt.convert.arrangement import is_whole
from shardckpt.errors import CorruptionError
from shardckpt.io.threads import Workers
from shardckpt.layout.box import BoxArray
from shardckpt.reading.fetch import lay_out, scratch_buffer
from shardckpt.reading.locate import Located, RequestedChunks
from shardckpt.reading.runs import RunLimits, tasks
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.convert.arrangement import Arrangement
    from shardckpt.convert.foreign import Foreign
    from shardckpt.convert.span import StoredRun
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.locate import Request, RequestedArray
    from shardckpt.reading.reader import ReadStats
    from shardckpt.reading.runs import ReadTask

_MOST_JOINED = 256
"""Most chunks in one read: preadv accepts 1,024 pieces of memory, and there may be one more before each chunk."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _PieceRun:
    """A piece that is one run of bytes, of which each chunk is a contiguous part."""

    entry: StoredRun
    per_row: int
    """Chunks side by side along the dimension that is cut. A chunk has one index in each earlier dimension, and all of each later one."""
    row_bytes: int
    """Bytes of these chunks together."""
    chunk_bytes: int
    """Bytes of each chunk, except the last in a row."""

    @classmethod
    def of(cls, entry: StoredRun, piece: Piece, itemsize: int) -> _PieceRun | None:
        """The runs of a piece's chunks; None if chunks are not contiguous."""
        cut = next((d for d in reversed(range(len(piece.shape))) if piece.chunks[d] < piece.shape[d]), 0)
        if any(side != 1 for side in piece.chunks[:cut]):
            return None
        return cls(entry, prod(piece.grid[cut : cut + 1]), prod(piece.shape[cut:]) * itemsize, prod(piece.chunks[cut:]) * itemsize)


class ForeignReader:
    """Reads boxes of an arrangement's tensors. Safe to use from several threads."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement, stats: ReadStats, threads: int, joined: int) -> None:
        """Read on `threads` threads; `joined`: bytes to which chunks are joined for one read."""
        self._foreign = foreign
        self._tensors = foreign.structure.tensors
        self._views = arrangement.views
        self._stats = stats
        self._workers = Workers(threads, "shardckpt-import")
        self._limits = RunLimits(joined, gap=0, chunks=_MOST_JOINED)
        self._runs: dict[str, _PieceRun | None] = {}
        """Path of a piece → its run, filled on demand: small beside the piece itself, which is in `structure`."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError, CorruptionError: stored bytes are missing or damaged; the message names the tensor and the file.
            ReplacedError: the source has changed since it was opened.
            StorageError: it cannot be read.
        """
        self._stats.count(needed=sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests))
        foreign = _convert_alike(list(chain.from_iterable(map(self._foreign_requests, requests))))
        self._workers.do(lambda task: task(), self._tasks(_merge_rows(RequestedChunks.of_boxes(foreign))))

    def reads(self, groups: Sequence[Sequence[Request]]) -> list[Callable[[], None]]:
        """One function for each group of requests; it does the work of `read`."""
        return [partial(self.read, group) for group in groups]

    def _foreign_requests(self, request: Request) -> Iterator[Request]:
        """The request as requests for the foreign tensors from which its tensor is made."""
        views = self._views[request.name]
        for view in views:
            tensor = self._tensors[view.tensor]
            if is_whole(views, self._tensors):
                same = request.name == tensor.name and request.pieces is tensor.pieces
                yield request if same else replace(request, name=tensor.name, pieces=tensor.pieces)
                continue
            boxes, inside = request.boxes, view.inside
            which = boxes.overlapping(inside)
            common = BoxArray(np.maximum(boxes.start[which], inside.start), np.minimum(boxes.stop[which], inside.stop))
            begins, ends = (common.start - boxes.start[which]).tolist(), (common.stop - boxes.start[which]).tolist()
            parts = [
                view.part(request.buffers[i][(*map(slice, begin, end), ...)])
                for i, begin, end in zip(which.tolist(), begins, ends, strict=True)
            ]
            if parts:
                yield replace(request, name=tensor.name, pieces=tensor.pieces, boxes=view.back(common), buffers=parts)

    def _tasks(self, chunks: RequestedChunks) -> Iterator[Callable[[], None]]:
        """The units of work for threads."""
        if self._foreign.location.local is None:  # `run` may send requests; on a disk threads would only wait for each other
            self._workers.do(self._find_run, {part.piece.path: part for part in chunks.parts}.values())
        runs = [self._find_run(part) for part in chunks.parts]
        is_run = np.array([run is not None for run in runs], bool)[chunks.part]
        for row in np.flatnonzero(~is_run).tolist():
            yield partial(self._read_chunk, chunks, row)
        if is_run.any():
            located, group = _locate(chunks.take(np.flatnonzero(is_run)), runs)
            for task in tasks(located, self._limits, group):
                yield partial(self._read_task, task, runs)

    def _find_run(self, part: RequestedArray) -> _PieceRun | None:
        """The run of a piece, if it is one run of bytes."""
        piece = part.piece
        if piece.path not in self._runs:
            tensor = self._tensors[part.request.name]
            entry = self._foreign.run(tensor, piece)
            self._runs[piece.path] = None if entry is None else _PieceRun.of(entry, piece, tensor.dtype.itemsize)
        return self._runs[piece.path]

    def _read_task(self, task: ReadTask, runs: Sequence[_PieceRun | None]) -> None:
        """Read adjacent chunks, and copy those that were not read into their targets."""
        wanted, (run,) = task.chunks.wanted, task.runs
        entries = [one.entry for part in wanted.part[task.begin : task.end].tolist() if (one := runs[part]) is not None]
        file, row = entries[0].span.file, task.begin
        try:
            least = task.nbytes if self._foreign.location.local is None else self._limits.nbytes
            scratch = scratch_buffer(self._workers.local, task.nbytes, least)
            fetched, (vectors,) = lay_out(task, scratch, direct=True, checksum_bytes=0)
            file.read_into(run.start, vectors)
            for entry, some in groupby(range(len(entries)), entries.__getitem__):
                first, *others = some
                row = task.begin + first
                entry.check(fetched.payloads[first : first + 1 + len(others)])
        except CorruptionError as e:
            raise type(e)(f"{shown(wanted.part_of(row).request.name)}{wanted.box(row)}: {e}") from e
        self._stats.count(reads=1, read=task.nbytes)
        for band, places in fetched.bands:
            band.scatter(fetched.stored(band), places)

    def _read_chunk(self, chunks: RequestedChunks, row: int) -> None:
        """Read a chunk with the format's own `read`, and copy it into its targets."""
        part, box = chunks.part_of(row), chunks.box(row)
        elements = self._foreign.read(self._tensors[part.request.name], part.piece, box)
        assert (elements.dtype, elements.shape) == (part.request.dtype, box.shape)
        self._stats.count(reads=1, read=elements.nbytes)
        values = elements.view(part.request.convert_from or part.request.dtype)
        with np.errstate(all="ignore"):  # a value too large for the target's dtype becomes infinite, as requested
            for buffer, in_buffer, in_chunk in chunks.targets_of(row):
                np.copyto(buffer[in_buffer], values[in_chunk], casting="unsafe")


def _convert_alike(requests: Sequence[Request]) -> list[Request]:
    """Give all requests for a tensor the same `convert_from`, if one of them has it."""
    meaning = {request.name: request.convert_from for request in requests if request.convert_from is not None}
    return [
        replace(request, convert_from=dtype, buffers=[buffer.view(dtype) for buffer in request.buffers])
        if request.convert_from is None and (dtype := meaning.get(request.name)) is not None
        else request
        for request in requests
    ]


def _merge_rows(wanted: RequestedChunks) -> RequestedChunks:
    """The same chunks, each once, even if several requests want the same array."""
    arrays: dict[str, int] = {}
    array = np.array([arrays.setdefault(part.piece.path, len(arrays)) for part in wanted.parts], np.int64)
    if len(arrays) == len(array):
        return wanted
    wanted = wanted.take(np.lexsort((wanted.position, array[wanted.part])))
    first = np.flatnonzero(np.diff(array[wanted.part], prepend=-1) | np.diff(wanted.position, prepend=-1))
    targets = replace(wanted.targets, first=wanted.targets.first[first], count=np.add.reduceat(wanted.targets.count, first))
    return replace(wanted, part=wanted.part[first], position=wanted.position[first], targets=targets)


def _locate(chunks: RequestedChunks, runs: Sequence[_PieceRun | None]) -> tuple[Located, Ints]:
    """The places of chunks that are runs of bytes, and a group for each chunk.

    Args:
        chunks: n chunks.
        runs: the run of each part of `chunks`.

    Returns:
        The chunks, and (n,) the number of each one's group: pieces whose bytes overlap are in different groups, so that each is read
        in one go.
    """
    numbers: dict[int, int] = {}
    names: list[str] = []
    columns = np.zeros((len(runs), 6), np.int64)
    for row, run in zip(columns, runs, strict=True):
        if run is not None:
            span = run.entry.span
            if id(span.file) not in numbers:
                numbers[id(span.file)] = len(names)
                names.append(str(span.file))
            row[:] = numbers[id(span.file)], span.start, span.stop, run.per_row, run.row_bytes, run.chunk_bytes
    # Several parts may have the same run, where one piece is read in several views; they stay in one group.
    group_of_run, reached = dict[int, int](), dict[int, int]()
    for part in np.lexsort((columns[:, 1], columns[:, 0])).tolist():
        file, start, stop = columns[part, :3].tolist()
        if runs[part] is not None and id(runs[part]) not in group_of_run:
            group_of_run[id(runs[part])] = part + 1 if start < reached.get(file, 0) else 0
        reached[file] = max(stop, reached.get(file, 0))
    group = np.array([group_of_run.get(id(run), 0) for run in runs], np.int64)
    file, begin, _, per_row, row_bytes, chunk_bytes = columns[chunks.part].T
    row, nth = np.divmod(chunks.position, per_row)
    length = np.minimum(chunk_bytes, row_bytes - nth * chunk_bytes)
    crc = np.zeros(len(chunks), np.uint32)
    return Located(chunks, names, file, begin + row * row_bytes + nth * chunk_bytes, length, crc), group[chunks.part]
