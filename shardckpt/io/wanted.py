"""Which stored chunks do some boxes of some tensors need, and where does each part of them go?

1. `plan.overlaps` pairs a piece's chunks with the boxes that they touch.
2. The chunk table says for each where it lies, how long it is and what its checksum is. A table comes from somebody
   else: that it has every chunk, and no length that a chunk cannot have, is checked before memory is taken.
3. A `Chunk` carries all that, and its `targets`: for each box that wants a part, which part and where to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import FormatError, MissingDataError, ShardckptError
from shardckpt.io.codec import CHECKSUM_BYTES
from shardckpt.io.keys import chunk_object_key
from shardckpt.io.plain import PLAIN_ROOT
from shardckpt.io.table import OWN_OBJECT, ArrayChunks
from shardckpt.planning.plan import Overlaps, Piece, chunk_boxes, overlaps, touched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.box import Box, BoxArray
    from shardckpt.io.lookup import Lookup
    from shardckpt.io.store import Store

__all__ = ["MOST_CHUNKS", "Chunk", "ChunkFinder", "Damaged", "Request"]

Array = NDArray[np.generic]
Index = tuple[slice | EllipsisType, ...]
Target = tuple[Array, Index, Index]
"""Where a part of a chunk goes: the buffer, where in the buffer, where in the chunk."""
if TYPE_CHECKING:
    Damaged = Callable[[str, Box, str, ShardckptError], None]
    """Called with tensor name, index range, file and error for each chunk that is not as written."""

MOST_CHUNKS = 1 << 14
"""Chunks that are planned, sorted and read at a time: at most, some 30 MB of Python objects."""
MOST_REPORTED = 10_000
"""Missing chunks of an array that are reported one by one."""
_NO_CHUNKS = ArrayChunks.none()


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor's boxes to be read."""

    name: str
    """The tensor, for messages."""
    dtype: np.dtype[np.generic]
    """dtype of what is stored."""
    pieces: Sequence[Piece]
    boxes: BoxArray
    """The boxes wanted, in the tensor's indices."""
    buffers: Sequence[Array]
    """Per box an array with the box at its start (it may be larger): of `dtype`, or of any other if it is converted."""
    convert_from: np.dtype[np.generic] | None = None
    """What the stored elements mean, where buffers are of another dtype than they; None: all are of `dtype`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk to be read: where it lies, what it must hold, where it goes."""

    request: Request
    piece: Piece
    position: int
    file: str
    own_object: bool
    """Whether the file is this chunk's alone."""
    offset: int
    length: int
    crc: int
    targets: Sequence[Target]

    @property
    def where(self) -> str:
        """For messages: tensor, index range."""
        return f"{self.request.name}{self.box}"

    @property
    def box(self) -> Box:
        """Its elements, in the tensor's indices."""
        return chunk_boxes(self.piece, np.array([self.position]))[0]

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.offset + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, as they lie in memory."""
        return prod(self.piece.chunks) * self.request.dtype.itemsize

    def destination(self) -> NDArray[np.uint8] | None:
        """Where the elements go, as bytes, if they go to one place only, all of them, side by side and as they are."""
        if self.request.convert_from is not None or len(self.targets) != 1:
            return None
        buffer, in_buffer, _ = self.targets[0]
        part = buffer[in_buffer]
        if part.shape != self.piece.chunks or not part.flags.c_contiguous or part.nbytes != self.length - CHECKSUM_BYTES:
            return None
        return part.reshape(-1).view(np.uint8)

    def scatter(self, raw: NDArray[np.uint8]) -> None:
        """Copy the elements, given as bytes, to every box that wants some of them."""
        elements = raw.view(self.request.convert_from or self.request.dtype).reshape(self.piece.chunks)
        with np.errstate(all="ignore"):  # what overflows becomes infinite, or NaN, as it was asked for
            for buffer, in_buffer, in_chunk in self.targets:
                np.copyto(buffer[in_buffer], elements[in_chunk], casting="unsafe")


class ChunkFinder:
    """Finds chunks by an attempt's chunk table."""

    def __init__(self, place: Store, table: Lookup, compression: str | None) -> None:
        """Find chunks below `place`, the attempt.

        Args:
            place: the attempt, for messages.
            table: where they are.
            compression: None or "zstd".
        """
        self._place = place
        self._table = table
        self._compression = compression

    def check_table(self, request: Request) -> None:
        """Raise MissingDataError unless the table has every chunk of the pieces, which a commit sees to.

        First of all: a record that claims a trillion chunks must not make us count them.
        """
        for piece in request.pieces:
            lost = self._table.first_missing(piece.path, piece.num_chunks)
            if lost is not None:
                raise self._lost(request.name, chunk_boxes(piece, np.array([lost]))[0])

    def prepare(self, requests: Sequence[Request]) -> None:
        """Read what the table says of all the requests' chunks, together; then as `check_table`."""
        self._table.prepare((piece, r.boxes) for r in requests for piece in touched(r.pieces, r.boxes))
        for request in requests:
            self.check_table(request)

    def needed(self, request: Request) -> Iterator[Chunk]:
        """The chunks that the request's boxes touch, each once, however many boxes share it."""
        for piece in touched(request.pieces, request.boxes):
            pairs = overlaps(piece, request.boxes)
            if not len(pairs.chunk):
                continue
            positions, first = np.unique(pairs.chunk, return_index=True)
            ends = np.append(first[1:], len(pairs.chunk))
            for i in range(0, len(positions), MOST_CHUNKS):
                some = slice(i, i + MOST_CHUNKS)
                begin = int(first[i])
                targets = _targets(request, pairs, slice(begin, int(ends[some][-1])))
                spans = zip((first[some] - begin).tolist(), (ends[some] - begin).tolist(), strict=True)
                yield from self.located(request, piece, positions[some], (targets[a:b] for a, b in spans))

    def every(self, request: Request, damaged: Damaged) -> Iterator[Chunk]:
        """Every chunk of the request's pieces that the table has; the others are reported."""
        arrays = self._table.whole().arrays
        for piece in request.pieces:
            table = arrays.get(piece.path, _NO_CHUNKS)
            inside = table.chunk < piece.num_chunks
            missing = piece.num_chunks - int(inside.sum())
            # However many there are, the first of them are among the first of all.
            first = np.arange(min(piece.num_chunks, len(table) + MOST_REPORTED))
            first = first[table.find(first) < 0][:MOST_REPORTED]
            boxes = chunk_boxes(piece, first)
            for i in range(len(boxes)):
                damaged(request.name, boxes[i], piece.path, self._lost(request.name, boxes[i]))
            if missing > len(first):
                error = MissingDataError(f"{request.name}: {missing - len(first)} more of its chunks are in no host's chunk table.")
                damaged(request.name, piece.box, piece.path, error)
            yield from self.located(request, piece, table.chunk[inside].astype(np.int64))

    def located(
        self, request: Request, piece: Piece, positions: NDArray[np.int64], targets: Iterable[Sequence[Target]] = repeat(())
    ) -> Iterator[Chunk]:
        """Those chunks with their places and where they go; MissingDataError where the table lacks one."""
        try:
            files, rows = self._table.find(piece.path, positions)
        except KeyError as e:
            raise self._lost(request.name, chunk_boxes(piece, np.array(e.args))[0]) from None
        columns = (rows.file, rows.offset, rows.length, rows.crc)
        for position, file, offset, length, crc, goes_to in zip(positions.tolist(), *(c.tolist() for c in columns), targets, strict=False):
            key = files[file] if file != OWN_OBJECT else f"{PLAIN_ROOT}/{chunk_object_key(piece, position)}"
            yield Chunk(request, piece, position, key, file == OWN_OBJECT, offset, length, crc, goes_to)

    def check_length(self, chunk: Chunk) -> None:
        """Refuse a length that the chunk cannot have, before memory is taken for it."""
        least = most = chunk.nbytes + CHECKSUM_BYTES
        if self._compression is not None:
            least, most = CHECKSUM_BYTES, chunk.nbytes + (chunk.nbytes >> 8) + 64 + CHECKSUM_BYTES  # ZSTD_compressBound
        if not least <= chunk.length <= most:
            raise FormatError(
                f"{chunk.where}: the chunk table gives it {chunk.length} bytes of {self._place}/{chunk.file}, {least} to {most} are "
                f"possible; the checkpoint was not written by shardckpt, or by a broken one."
            )

    def bytes_in_files(self) -> dict[str, int]:
        """How many bytes of each data file belong to a chunk."""
        table = self._table.whole()
        held = np.zeros(len(table.files), np.uint64)
        for rows in table.arrays.values():
            packed = rows.file != OWN_OBJECT
            np.add.at(held, rows.file[packed], rows.length[packed])
        return dict(zip(table.files, held.tolist(), strict=True))

    def _lost(self, name: str, box: Box) -> MissingDataError:
        return MissingDataError(
            f"{name}{box} at {self._place}: no host's chunk table has this chunk; run `shardckpt verify` for the full list."
        )


def _targets(request: Request, pairs: Overlaps, rows: slice) -> list[Target]:
    """Per pair of those: the buffer, where in the buffer, where in the chunk."""
    slices = []
    for boxes in (pairs.in_box, pairs.in_chunk):
        ranges = zip(boxes.start[rows].tolist(), boxes.stop[rows].tolist(), strict=True)
        # The ellipsis makes a view of a 0-d array, too.
        slices.append([(*map(slice, start, stop), ...) for start, stop in ranges])
    return [(request.buffers[b], in_box, in_chunk) for b, in_box, in_chunk in zip(pairs.box[rows].tolist(), *slices, strict=True)]
