"""Where do the chunks lie that somebody wants?

The chunk table says for each its file, its place there, its length and its checksum. A table comes from somebody else: that it
has every chunk, and no length that a chunk cannot have, is checked before memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import FormatError, MissingDataError
from shardckpt.format.table import OWN_OBJECT, ArrayChunks
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, chunk_object_key, plain_key
from shardckpt.plan.overlaps import touched
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reading.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.errors import ShardckptError
    from shardckpt.io.store import Store
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.lookup import Lookup
    from shardckpt.reading.wanted import Request

    Ints = NDArray[np.int64]
    Damaged = Callable[[str, Box, str, ShardckptError], None]
    """Called with tensor name, index range, file and error for each chunk that is not as written."""

__all__ = ["MOST_CHUNKS", "ChunkFinder", "Located"]

MOST_CHUNKS = 1 << 14
"""Chunks that are looked up, sorted and read at a time."""
MOST_REPORTED = 10_000
"""Missing chunks of an array that are reported one by one."""
_FARTHEST = 1 << 62
"""An offset that no file reaches."""
_NO_CHUNKS = ArrayChunks.none()


@dataclass(frozen=True, slots=True)
class Located:
    """Chunks that are wanted, and where they lie; one row each."""

    wanted: Wanted
    files: Sequence[str]
    """The table's."""
    file: Ints
    """(n,) which file, or `OWN_OBJECT`."""
    offset: Ints
    """(n,) first byte."""
    length: Ints
    """(n,) bytes, the checksum included."""
    crc: NDArray[np.uint32]
    """(n,) of the bytes before the checksum."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.file)

    def take(self, rows: Ints) -> Located:
        """Some of them, in that order."""
        return Located(self.wanted.take(rows), self.files, self.file[rows], self.offset[rows], self.length[rows], self.crc[rows])

    def is_own_object(self, row: int) -> bool:
        """Whether the file is this chunk's alone."""
        return bool(self.file[row] == OWN_OBJECT)

    def file_of(self, row: int) -> str:
        """The file of a chunk, relative to the attempt."""
        if not self.is_own_object(row):
            return self.files[int(self.file[row])]
        return plain_key(chunk_object_key(self.wanted.part_of(row).piece, int(self.wanted.position[row])))

    def stop(self, row: int) -> int:
        """One past a chunk's last byte."""
        return int(self.offset[row] + self.length[row])


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

    def needed(self, requests: Sequence[Request]) -> Iterator[Located]:
        """The chunks that the requests' boxes touch, each once, however many boxes share it; some at a time."""
        wanted = Wanted.of_boxes(requests)
        for i in range(0, len(wanted), MOST_CHUNKS):
            yield self.located(wanted.take(np.arange(i, min(i + MOST_CHUNKS, len(wanted)))))

    def every(self, requests: Sequence[Request], damaged: Damaged) -> Iterator[Located]:
        """Every chunk of the requests' pieces that the table has, some at a time; the others are reported."""
        arrays = self._table.whole().arrays

        def held() -> Iterator[tuple[Request, Piece, Ints]]:
            for request in requests:
                for piece in request.pieces:
                    table = arrays.get(piece.path, _NO_CHUNKS)
                    self._report_missing(request, piece, table, damaged)
                    yield request, piece, table.chunk[table.chunk < piece.num_chunks].astype(np.int64)

        return self.some(held())

    def _report_missing(self, request: Request, piece: Piece, table: ArrayChunks, damaged: Damaged) -> None:
        """Call `damaged` for the chunks of an array that its table lacks."""
        missing = piece.num_chunks - int((table.chunk < piece.num_chunks).sum())
        if not missing:
            return
        # However many there are, the first of them are among the first of all.
        first = np.arange(min(piece.num_chunks, len(table) + MOST_REPORTED))
        first = first[table.find(first) < 0][:MOST_REPORTED]
        boxes = chunk_boxes(piece, first)
        for i in range(len(boxes)):
            damaged(request.name, boxes[i], piece.path, self._lost(request.name, boxes[i]))
        if missing > len(first):
            error = MissingDataError(f"{request.name}: {missing - len(first)} more of its chunks are in no host's chunk table.")
            damaged(request.name, piece.box, piece.path, error)

    def some(self, wanted: Iterable[tuple[Request, Piece, Ints]]) -> Iterator[Located]:
        """Chunks by their positions, so many at a time as are read together."""
        batch: list[tuple[Request, Piece, Ints]] = []
        room = MOST_CHUNKS
        for request, piece, positions in wanted:
            at = 0
            while at < len(positions):
                part = positions[at : at + room]
                batch.append((request, piece, part))
                at, room = at + len(part), room - len(part)
                if not room:
                    yield self.located(Wanted.of_positions(batch))
                    batch, room = [], MOST_CHUNKS
        if batch:
            yield self.located(Wanted.of_positions(batch))

    def located(self, wanted: Wanted) -> Located:
        """Those chunks with their places; MissingDataError where the table lacks one."""
        try:
            files, rows = self._table.find([part.piece.path for part in wanted.parts], wanted.part, wanted.position)
        except KeyError as e:
            row = e.args[0]
            raise self._lost(wanted.part_of(row).request.name, wanted.box(row)) from None
        offset = np.minimum(rows.offset, _FARTHEST).astype(np.int64)
        return Located(wanted, files, rows.file.astype(np.int64), offset, rows.length.astype(np.int64), rows.crc)

    def impossible(self, chunks: Located) -> Ints:
        """Rows of those with a length that the chunk cannot have."""
        least, most = np.array([self._lengths(part.chunk_bytes) for part in chunks.wanted.parts], np.int64).reshape(-1, 2).T
        part = chunks.wanted.part
        return np.flatnonzero((chunks.length < least[part]) | (chunks.length > most[part]))

    def refusal(self, chunks: Located, row: int) -> FormatError:
        """What is said of an impossible one."""
        least, most = self._lengths(chunks.wanted.part_of(row).chunk_bytes)
        return FormatError(
            f"{chunks.wanted.where(row)}: the chunk table gives it {chunks.length[row]} bytes of {self._place}/{chunks.file_of(row)}, "
            f"{least} to {most} are possible; the checkpoint was not written by shardckpt, or by a broken one."
        )

    def _lengths(self, nbytes: int) -> tuple[int, int]:
        """The least and the most bytes that a chunk of so many bytes of elements takes; of a hostile size, some that no table has."""
        least = most = min(nbytes, _FARTHEST) + CHECKSUM_BYTES
        if self._compression is not None:
            least, most = CHECKSUM_BYTES, most + (most >> 8) + 64  # ZSTD_compressBound
        return least, most

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
