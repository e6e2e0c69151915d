"""Reading boxes of a foreign checkpoint's tensors into the buffers that request them.

1. All requests of a call are planned together, in columns (`reading.locate`): the chunks of the foreign tensors, and the targets of each
   part of them. A chunk is read once, even for several requests.
2. If chunks lie in files as runs of bytes (`Foreign.run`), adjacent chunks are read together. A chunk is read directly into its target,
   if that is one run of memory; otherwise into a buffer, from which it is copied. Answers of an object store are copied from the answer.
3. The format itself reads all other chunks, one by one.

Each thread holds in memory one such read: `joined` bytes, or one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.convert.arrangement import is_whole
from shardckpt.errors import CorruptionError
from shardckpt.io.threads import Workers
from shardckpt.layout.box import BoxArray
from shardckpt.reading.locate import RequestedChunks
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.convert.arrangement import Arrangement
    from shardckpt.convert.foreign import Foreign
    from shardckpt.convert.span import StoredRun
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.locate import Request, RequestedArray
    from shardckpt.reading.reader import ReadStats

__all__ = ["ForeignReader"]

_MOST_JOINED = 256
"""Most chunks in one read: preadv accepts 1,024 pieces of memory, and there may be one more before each chunk."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Lies:
    """A piece that is one run of bytes, of which each chunk is a contiguous part."""

    entry: StoredRun
    per_row: int
    """Chunks side by side along the dimension that is cut. A chunk has one index in each earlier dimension, and all of each later one."""
    row_bytes: int
    """Bytes of these chunks together."""
    chunk_bytes: int
    """Bytes of each chunk, except the last in a row."""

    @classmethod
    def of(cls, entry: StoredRun, piece: Piece, itemsize: int) -> _Lies | None:
        """The runs of a piece's chunks; None if chunks are not contiguous."""
        cut = next((d for d in reversed(range(len(piece.shape))) if piece.chunks[d] < piece.shape[d]), 0)
        if any(side != 1 for side in piece.chunks[:cut]):
            return None
        return cls(entry, prod(piece.grid[cut : cut + 1]), prod(piece.shape[cut:]) * itemsize, prod(piece.chunks[cut:]) * itemsize)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Requested chunks; rows of one chunk follow each other."""

    wanted: RequestedChunks
    begin: Ints
    """(n,) First row of each chunk."""
    end: Ints
    """(n,) One past the last row of each chunk."""

    @classmethod
    def of(cls, wanted: RequestedChunks) -> _Chunks:
        """Group the rows by chunk, so that each chunk is read once, even if several requests want the same array."""
        arrays: dict[str, int] = {}
        array = np.array([arrays.setdefault(part.piece.path, len(arrays)) for part in wanted.parts], np.int64)
        if len(arrays) < len(array):
            wanted = wanted.take(np.lexsort((wanted.position, array[wanted.part])))
        begin = np.flatnonzero(np.diff(array[wanted.part], prepend=-1) | np.diff(wanted.position, prepend=-1))
        return cls(wanted, begin, np.append(begin[1:], len(wanted)))

    def take(self, which: Ints) -> _Chunks:
        """Some of the chunks, in the given order."""
        return _Chunks(self.wanted, self.begin[which], self.end[which])

    def part(self, k: int) -> RequestedArray:
        """The requested array of chunk k."""
        return self.wanted.part_of(int(self.begin[k]))

    def where(self, k: int) -> str:
        """Tensor and index range of chunk k, for messages."""
        return f"{shown(self.part(k).request.name)}{self.wanted.box(int(self.begin[k]))}"

    def straight(self, k: int, nbytes: int) -> memoryview | None:
        """The target of chunk k as `nbytes` of memory, if it is the only target, contiguous and needs no conversion; else None."""
        row, targets = int(self.begin[k]), self.wanted.targets
        if self.end[k] - row != 1 or targets.count[row] != 1 or self.part(k).request.convert_from is not None:
            return None
        buffer, inside, _ = self.wanted.targets_of(row)[0]
        place = buffer[inside]
        return place.reshape(-1).view(np.uint8).data if place.nbytes == nbytes and place.flags.c_contiguous else None

    def scatter(self, k: int, elements: NDArray[Any]) -> None:
        """Copy chunk k into all its targets."""
        with np.errstate(all="ignore"):  # a value too large for the target's dtype becomes infinite, as requested
            for row in range(int(self.begin[k]), int(self.end[k])):
                meaning = self.wanted.part_of(row).request.convert_from
                values = elements if meaning is None else elements.view(meaning)
                for buffer, in_buffer, in_chunk in self.wanted.targets_of(row):
                    np.copyto(buffer[in_buffer], values[in_chunk], casting="unsafe")


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent chunks in a file."""

    entries: Sequence[StoredRun]
    """The stored run of each chunk."""
    chunks: _Chunks
    ends: Sequence[int]
    """End of each chunk, in bytes after the first one's start."""
    start: int
    """Offset of the first chunk in the file."""


class ForeignReader:
    """Reads boxes of an arrangement's tensors. Safe to use from several threads."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement, stats: ReadStats, threads: int, joined: int) -> None:
        """Read on `threads` threads; `joined`: bytes to which chunks are joined for one read."""
        self._foreign = foreign
        self._tensors = foreign.structure.tensors
        self._views = arrangement.views
        self._stats = stats
        self._workers = Workers(threads, "shardckpt-import")
        self._joined = joined
        self._lies: dict[str, _Lies | None] = {}
        """Path of a piece → its run, filled on demand: small beside the piece itself, which is in `structure`."""
        self._scratch = self._workers.local

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request's buffers.

        Raises:
            MissingDataError, CorruptionError: stored bytes are missing or damaged; the message names the tensor and the file.
            ReplacedError: the source has changed since it was opened.
            StorageError: it cannot be read.
        """
        self._stats.count(needed=sum(int(r.boxes.sizes().sum()) * r.dtype.itemsize for r in requests))
        chunks = _Chunks.of(RequestedChunks.of_boxes(list(chain.from_iterable(map(self._foreign_requests, requests)))))
        self._workers.do(lambda task: task(), self._tasks(chunks))

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

    def _tasks(self, chunks: _Chunks) -> Iterator[Callable[[], None]]:
        """The units of work for threads."""
        if self._foreign.location.local is None:  # `run` may send requests; on a disk threads would only wait for each other
            self._workers.do(self._lying, {part.piece.path: part for part in chunks.wanted.parts}.values())
        found = [self._lying(part) for part in chunks.wanted.parts]
        part = chunks.wanted.part[chunks.begin]
        lies = np.array([lying is not None for lying in found], bool)[part]
        for k in np.flatnonzero(~lies).tolist():
            yield partial(self._read_chunk, chunks, k)
        which = np.flatnonzero(lies)
        yield from (partial(self._read_run, run) for run in self._runs(chunks.take(which), found, part[which]))

    def _lying(self, part: RequestedArray) -> _Lies | None:
        """The run of a piece, if it is one run of bytes."""
        piece = part.piece
        if piece.path not in self._lies:
            tensor = self._tensors[part.request.name]
            entry = self._foreign.run(tensor, piece)
            self._lies[piece.path] = None if entry is None else _Lies.of(entry, piece, tensor.dtype.itemsize)
        return self._lies[piece.path]

    def _runs(self, chunks: _Chunks, found: Sequence[_Lies | None], part: Ints) -> Iterator[_Run]:
        """Sort chunks in the order of the files, and join adjacent ones.

        Args:
            chunks: n chunks that are runs of bytes.
            found: the run of each part of `chunks.wanted`.
            part: (n,) Index of each chunk's part.
        """
        if not len(part):
            return
        files: dict[int, int] = {}
        pieces: dict[int, int] = {}
        columns = [
            (
                files.setdefault(id(one.entry.span.file), len(files)),
                pieces.setdefault(id(one), len(pieces)),
                one.entry.span.start,
                one.per_row,
                one.row_bytes,
                one.chunk_bytes,
            )
            if one is not None
            else (0, 0, 0, 1, 0, 0)
            for one in found
        ]
        file, piece, begin, per_row, row_bytes, chunk_bytes = np.array(columns, np.int64)[part].T
        row, nth = np.divmod(chunks.wanted.position[chunks.begin], per_row)
        start = begin + row * row_bytes + nth * chunk_bytes
        stop = start + np.minimum(chunk_bytes, row_bytes - nth * chunk_bytes)
        order = np.lexsort((start, piece, begin, file))  # not by `start` alone: each view of shared bytes is read in one go
        file, start, stop, chunks, part = file[order], start[order], stop[order], chunks.take(order), part[order]
        apart = np.flatnonzero((np.diff(file) != 0) | (start[1:] != stop[:-1])) + 1
        for first, last in pairwise([0, *apart.tolist(), len(part)]):
            at = first
            while at < last:
                fitting = int(np.searchsorted(stop[at:last], start[at] + self._joined, side="right"))
                end = at + min(max(1, fitting), _MOST_JOINED)
                entries = [lying.entry for k in part[at:end].tolist() if (lying := found[k]) is not None]
                run = chunks.take(np.arange(at, end))
                yield _Run(entries, run, (stop[at:end] - start[at]).tolist(), int(start[at]))
                at = end

    def _read_run(self, run: _Run) -> None:
        """Read chunks, and copy those that were read into a buffer to their targets."""
        at = 0
        try:
            memory, later = self._in_place(run) if self._foreign.location.local is not None else self._answer(run)
            for entry, chunks in groupby(range(len(memory)), run.entries.__getitem__):
                at, *rest = chunks
                entry.check(memory[at : at + 1 + len(rest)])
        except CorruptionError as e:
            raise type(e)(f"{run.chunks.where(at)}: {e}") from e
        self._stats.count(reads=1, read=run.ends[-1])
        for k in later:
            part, box = run.chunks.part(k), run.chunks.wanted.box(int(run.chunks.begin[k]))
            run.chunks.scatter(k, np.frombuffer(memory[k], part.request.dtype).reshape(box.shape))

    def _in_place(self, run: _Run) -> tuple[Sequence[memoryview], Sequence[int]]:
        """Read each chunk into its target or a buffer; return the bytes of each chunk, and which chunks are in the buffer."""
        scratch = self._room(run.ends[-1])
        vectors, memory, later = list[memoryview](), list[memoryview](), list[int]()
        reached = 0  # bytes from here up to the next target go into the buffer
        for k, (begin, end) in enumerate(pairwise([0, *run.ends])):
            place = run.chunks.straight(k, end - begin)
            if place is None:
                memory.append(scratch[begin:end].data)
                later.append(k)
                continue
            vectors += [scratch[reached:begin].data, place] if reached < begin else [place]
            memory.append(place)
            reached = end
        if reached < run.ends[-1]:
            vectors.append(scratch[reached : run.ends[-1]].data)
        run.entries[0].span.file.read_into(run.start, vectors)
        return memory, later

    @staticmethod
    def _answer(run: _Run) -> tuple[Sequence[memoryview], Sequence[int]]:
        """Read all chunks into new memory, as an object store returns them, without another buffer; same result as `_in_place`."""
        data = run.entries[0].span.file.read(run.start, run.start + run.ends[-1]).data
        return [data[begin:end] for begin, end in pairwise([0, *run.ends])], range(len(run.ends))

    def _room(self, nbytes: int) -> NDArray[np.uint8]:
        """This thread's buffer, of at least `nbytes`; its earlier contents are lost."""
        room: NDArray[np.uint8] | None = getattr(self._scratch, "room", None)
        if room is None or room.nbytes < nbytes:
            room = self._scratch.room = np.empty(max(nbytes, self._joined), np.uint8)
        return room

    def _read_chunk(self, chunks: _Chunks, k: int) -> None:
        """Read a chunk with the format's own `read`, and copy it into its targets."""
        part, box = chunks.part(k), chunks.wanted.box(int(chunks.begin[k]))
        elements = self._foreign.read(self._tensors[part.request.name], part.piece, box)
        assert (elements.dtype, elements.shape) == (part.request.dtype, box.shape)
        self._stats.count(reads=1, read=elements.nbytes)
        chunks.scatter(k, elements)
