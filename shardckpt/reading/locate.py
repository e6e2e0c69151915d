"""Locating the stored chunks that some boxes of some tensors need.

The result says where the chunks lie, and where their elements go.

All data is in columns with a row per chunk. A restore of small tensors reads tens of thousands of
chunks, and Python code that runs once per chunk would slow it down.

1. The boxes of all requests are concatenated, each with the array that it is read from.
   `plan.pieces.overlaps_of` pairs the chunks of all arrays with the boxes that they touch.
2. The pairs of one chunk become its *targets*: for each box that needs a part of the chunk, which
   part, and where it goes.
3. The chunk table (`Lookup`) gives the file, offset, length and checksum of each chunk. The table
   is untrusted input. The code checks that it has every chunk, and that no length is impossible,
   before it allocates memory.
4. Rows are selected, sorted and cut as arrays. The names for a message are built from a row only
   when there is a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.table import OWN_OBJECT
from shardckpt.format.zarr_arrays import chunk_object_key, plain_key
from shardckpt.layout.box import BoxArray
from shardckpt.layout.records import record
from shardckpt.plan.pieces import chunk_boxes, overlaps_of, touched, touching

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.lookup import ChunkSource


Array = NDArray[np.generic]
Ints = NDArray[np.int64]
Index = tuple[slice | EllipsisType, ...]
MOST_CHUNKS = 1 << 14
"""Number of chunks that are looked up, sorted and read at a time."""
_FARTHEST = 1 << 62
"""An offset beyond the end of any file."""


@record
class Request:
    """The boxes of one tensor that are to be read."""

    name: str
    """Tensor name, for messages."""
    dtype: np.dtype[np.generic]
    """dtype of the stored elements."""
    pieces: Sequence[Piece]
    boxes: BoxArray
    """The requested boxes, in the tensor's indices."""
    buffers: Sequence[Array]
    """One array per box, with the box at its start (the array may be larger). Its dtype is `dtype`,
    or any other if elements convert."""
    convert_from: np.dtype[np.generic] | None = None
    """dtype that the stored elements mean, if buffers have another dtype; None: all buffers have
    `dtype`."""
    source: ChunkSource | None = None
    """The attempt that holds the chunks; None: the reader's own."""

    @classmethod
    def of(
        cls,
        tensor: TensorRecord,
        boxes: BoxArray,
        buffers: Sequence[Array],
        *,
        converts: bool = False,
    ) -> Request:
        """A request for boxes of a tensor.

        Buffers have its dtype, in memory or as stored; or any other, if elements are converted.
        """
        stored = tensor.dtype.storage
        if converts:
            return cls(
                tensor.name, stored, tensor.pieces, boxes, buffers, convert_from=tensor.dtype.numpy
            )
        stored_buffers = [
            buffer if buffer.dtype == stored else buffer.view(stored) for buffer in buffers
        ]
        return cls(tensor.name, stored, tensor.pieces, boxes, stored_buffers)


@record
class RequestedArray:
    """One array that a request reads from."""

    request: Request
    piece: Piece

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's elements in memory (uncompressed)."""
        return prod(self.piece.chunks) * self.request.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CopyTargets:
    """Destinations of the elements of chunks, with a row per (chunk, box) pair.

    The rows of one chunk are side by side.
    """

    buffers: Sequence[Array]
    """Buffers of all boxes of all requests."""
    first: Ints
    """(n,) row of each chunk's first pair."""
    count: Ints
    """(n,) number of pairs of each chunk."""
    box: Ints
    """(p,) index of the box, and so of the buffer. This field and the next two have a row per
    pair."""
    in_chunk: BoxArray
    """Common part, in the chunk. A tensor with fewer dimensions than others has leading dimensions
    0 to 1 added."""
    in_box: BoxArray
    """Common part, in the box and so in the buffer; dimensions are padded like in `in_chunk`."""

    @classmethod
    def none(cls, n: int) -> CopyTargets:
        """The targets of n chunks whose elements go nowhere."""
        empty, nothing = np.empty(0, np.int64), BoxArray.of([], 0)
        return cls([], np.zeros(n, np.int64), np.zeros(n, np.int64), empty, nothing, nothing)

    def take(self, rows: Ints) -> CopyTargets:
        """The targets of the chunks in `rows`, with their pairs in the same order."""
        count = self.count[rows]
        first = np.cumsum(count) - count
        pairs = np.repeat(self.first[rows] - first, count) + np.arange(int(count.sum()))
        in_chunk, in_box = (
            BoxArray(boxes.start[pairs], boxes.stop[pairs])
            for boxes in (self.in_chunk, self.in_box)
        )
        return CopyTargets(self.buffers, first, count, self.box[pairs], in_chunk, in_box)


@record
class RequestedChunks:
    """Chunks that requests need; one row each."""

    parts: Sequence[RequestedArray]
    part: Ints
    """(n,) index into `parts`: the request and array that each chunk belongs to."""
    position: Ints
    """(n,) position in the array's grid."""
    targets: CopyTargets

    @classmethod
    def of_boxes(cls, requests: Sequence[Request]) -> RequestedChunks:
        """The chunks that the requests' boxes touch, each once, in the requests' order.

        A chunk comes once even if several boxes share it.
        """
        together = _together([request.boxes for request in requests])
        counts = np.array([len(request.boxes) for request in requests], np.int64)
        # Nearly always: every box touches the one piece of its tensor.
        if all(len(request.pieces) == 1 for request in requests):
            parts = [RequestedArray(request, request.pieces[0]) for request in requests]
            of_part, of_box = np.repeat(np.arange(len(parts)), counts), np.arange(len(together))
        else:
            parts = []
            owner, box = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for request, first in zip(requests, (np.cumsum(counts) - counts).tolist(), strict=True):
                which, boxes = touching(request.pieces, request.boxes)
                held, nth = np.unique(which, return_inverse=True)
                owner.append(nth + len(parts))
                box.append(boxes + first)
                parts += [RequestedArray(request, request.pieces[k]) for k in held.tolist()]
            of_part, of_box = np.concatenate(owner), np.concatenate(box)
        buffers = [buffer for request in requests for buffer in request.buffers]
        pairs = overlaps_of(
            [part.piece for part in parts],
            BoxArray(together.start[of_box], together.stop[of_box]),
            of_part,
        )
        part = of_part[pairs.box]
        first = np.flatnonzero(np.diff(part, prepend=-1) | np.diff(pairs.chunk, prepend=-1))
        targets = CopyTargets(
            buffers,
            first,
            np.diff(first, append=len(part)),
            of_box[pairs.box],
            pairs.in_chunk,
            pairs.in_box,
        )
        return cls(parts, part[first], pairs.chunk[first], targets)

    @classmethod
    def of_positions(cls, places: Sequence[tuple[Request, Piece, Ints]]) -> RequestedChunks:
        """Chunks given by their positions in arrays, in that order; their elements go nowhere."""
        part = np.repeat(np.arange(len(places)), [len(positions) for _, _, positions in places])
        position = np.concatenate(
            [*(positions for _, _, positions in places), np.empty(0, np.int64)]
        )
        return cls(
            [RequestedArray(request, piece) for request, piece, _ in places],
            part,
            position,
            CopyTargets.none(len(part)),
        )

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.position)

    def take(self, rows: Ints) -> RequestedChunks:
        """The chunks in `rows`, in that order."""
        return RequestedChunks(
            self.parts, self.part[rows], self.position[rows], self.targets.take(rows)
        )

    def between(self, begin: int, end: int) -> RequestedChunks:
        """Consecutive chunks, with no other parts than theirs."""
        part = self.take(np.arange(begin, min(end, len(self))))
        if len(part) == len(self):
            return self
        first, last = int(part.part.min()), int(part.part.max())
        return RequestedChunks(
            self.parts[first : last + 1], part.part - first, part.position, part.targets
        )

    def part_of(self, row: int) -> RequestedArray:
        """The request and array that a chunk belongs to."""
        return self.parts[int(self.part[row])]

    def box(self, row: int) -> Box:
        """A chunk's elements, in the tensor's indices."""
        return chunk_boxes(self.part_of(row).piece, self.position[row : row + 1])[0]

    def where(self, row: int) -> str:
        """Tensor name and index range of a chunk, for messages."""
        return f"{self.part_of(row).request.name}{self.box(row)}"


def _together(boxes: Sequence[BoxArray]) -> BoxArray:
    """Concatenate boxes.

    Tensors with fewer dimensions than others get leading dimensions of one element.
    """
    own = [array.start.shape[1] for array in boxes]
    ndim = max(own, default=0)
    if own.count(ndim) == len(own):
        return BoxArray.concatenate([BoxArray.of([], ndim), *boxes])
    start, stop = (np.full((sum(map(len, boxes)), ndim), fill, np.int64) for fill in (0, 1))
    row = 0
    for array in boxes:
        at = slice(row, row := row + len(array)), slice(ndim - array.start.shape[1], None)
        start[at], stop[at] = array.start, array.stop
    return BoxArray(start, stop)


@dataclass(frozen=True, slots=True)
class Located:
    """Chunks that requests need, with their places; one row each."""

    requested: RequestedChunks
    files: Sequence[str]
    """Files of the chunk tables; each file of each attempt has a number."""
    file: Ints
    """(n,) index into `files`, or `OWN_OBJECT`."""
    offset: Ints
    """(n,) offset of the first byte."""
    length: Ints
    """(n,) bytes, including the checksum."""
    crc: NDArray[np.uint32]
    """(n,) CRC of the bytes before the checksum."""
    own: ChunkSource | None = None
    """The attempt of the chunks whose requests name none."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.file)

    def take(self, rows: Ints) -> Located:
        """The chunks in `rows`, in that order."""
        columns = (self.file[rows], self.offset[rows], self.length[rows], self.crc[rows])
        return Located(self.requested.take(rows), self.files, *columns, self.own)

    def source_of(self, row: int) -> ChunkSource:
        """The attempt that holds a chunk."""
        source = self.requested.part_of(row).request.source or self.own
        assert source is not None
        return source

    def is_own_object(self, row: int) -> bool:
        """Whether the file holds this chunk alone."""
        return bool(self.file[row] == OWN_OBJECT)

    def file_of(self, row: int) -> str:
        """A chunk's file, relative to the attempt."""
        if not self.is_own_object(row):
            return self.files[int(self.file[row])]
        return plain_key(
            chunk_object_key(self.requested.part_of(row).piece, int(self.requested.position[row]))
        )

    def stop(self, row: int) -> int:
        """Offset one past a chunk's last byte."""
        return int(self.offset[row] + self.length[row])


class ChunkFinder:
    """Finds chunks with the help of the chunk tables of attempts."""

    def __init__(self, own: ChunkSource | None) -> None:
        """Find chunks in `own`, the attempt of the requests that name none."""
        self._own = own

    def source(self, request: Request) -> ChunkSource:
        """The attempt that holds the chunks of a request."""
        source = request.source or self._own
        assert source is not None
        return source

    def check_table(self, requests: Sequence[Request]) -> None:
        """Raise MissingDataError unless the table has every chunk of the pieces.

        A commit makes sure that the table has every chunk.

        This check comes first: a record that claims a trillion chunks must not make the process
        enumerate them.

        Args:
            requests: of one source; at least one.
        """
        first_missing = self.source(requests[0]).table.first_missing
        for request in requests:
            for piece in request.pieces:
                lost = first_missing(piece.path, piece.num_chunks)
                if lost is not None:
                    raise self.lost_error(request, chunk_boxes(piece, np.array([lost]))[0])

    def prepare(self, requests: Sequence[Request]) -> None:
        """Read the tables' rows for the chunks of all requests, and check the tables.

        The rows for all requests of one source are read together.
        """
        for source in dict.fromkeys([request.source for request in requests]):
            of_source = [request for request in requests if request.source is source]
            self.source(of_source[0]).table.prepare(
                [(piece, r.boxes) for r in of_source for piece in touched(r.pieces, r.boxes)]
            )
            self.check_table(of_source)

    def needed(self, requests: Sequence[Request]) -> Iterator[Located]:
        """Yield batches of the chunks that the requests' boxes touch.

        Each chunk comes once even if several boxes share it.
        """
        requested = RequestedChunks.of_boxes(requests)
        for i in range(0, len(requested), MOST_CHUNKS):
            yield self.located(requested.between(i, i + MOST_CHUNKS))

    def at_positions(self, places: Iterable[tuple[Request, Piece, Ints]]) -> Iterator[Located]:
        """Yield batches of chunks given by their positions.

        The chunks of a batch are read together.
        """
        batch: list[tuple[Request, Piece, Ints]] = []
        room = MOST_CHUNKS
        for request, piece, positions in places:
            at = 0
            while at < len(positions):
                part = positions[at : at + room]
                batch.append((request, piece, part))
                at, room = at + len(part), room - len(part)
                if not room:
                    yield self.located(RequestedChunks.of_positions(batch))
                    batch, room = [], MOST_CHUNKS
        if batch:
            yield self.located(RequestedChunks.of_positions(batch))

    def located(self, requested: RequestedChunks) -> Located:
        """Look up the places of chunks; MissingDataError if a table lacks one."""
        sources = list(map(self.source, (part.request for part in requested.parts)))
        paths = [part.piece.path for part in requested.parts]
        columns = np.zeros((4, len(requested)), np.int64)
        files: list[str] = []
        distinct = {source: i for i, source in enumerate(dict.fromkeys(sources))}
        number = np.array([distinct[source] for source in sources], np.int64)[requested.part]
        for source, i in distinct.items():
            rows = np.flatnonzero(number == i)
            try:
                named, places = source.table.find(
                    paths, requested.part[rows], requested.position[rows]
                )
            except KeyError as e:
                row = int(rows[e.args[0]])
                raise self.lost_error(requested.part_of(row).request, requested.box(row)) from None
            file = places.file.astype(np.int64)
            file[file != OWN_OBJECT] += len(files)
            files += named
            columns[:, rows] = file, np.minimum(places.offset, _FARTHEST), places.length, places.crc
        file, offset, length, crc = columns
        return Located(requested, files, file, offset, length, crc.astype(np.uint32), self._own)

    def impossible(self, chunks: Located) -> Ints:
        """Rows of the chunks whose length is impossible for that chunk."""
        forms = [(array.request.source, array.chunk_bytes) for array in chunks.requested.parts]
        known = {
            form: self._lengths(array)
            for form, array in dict(zip(forms, chunks.requested.parts, strict=True)).items()
        }
        least, most = np.array([known[form] for form in forms], np.int64).reshape(-1, 2).T
        part = chunks.requested.part
        return np.flatnonzero((chunks.length < least[part]) | (chunks.length > most[part]))

    def refusal(self, chunks: Located, row: int) -> FormatError:
        """The error for a chunk with an impossible length."""
        least, most = self._lengths(chunks.requested.part_of(row))
        return FormatError(
            f"{chunks.requested.where(row)}: the chunk table says {chunks.length[row]} bytes in "
            f"{chunks.source_of(row).place}/{chunks.file_of(row)}, not "
            f"{least}{f' to {most}' if most > least else ''}; the checkpoint was not written by "
            "shardckpt, or by a faulty version."
        )

    def _lengths(self, array: RequestedArray) -> tuple[int, int]:
        """Least and most stored bytes of a chunk of an array.

        Hostile chunk sizes give lengths that no table has.
        """
        return self.source(array.request).lengths(min(array.chunk_bytes, _FARTHEST))

    def lost_error(self, request: Request, box: Box) -> MissingDataError:
        """The error for a chunk that the table lacks."""
        return MissingDataError(
            f"{request.name}{box} at {self.source(request).place}: no host's chunk table has this "
            "chunk; run `shardckpt verify` for the full list."
        )
