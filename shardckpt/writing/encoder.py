"""Chunks of one host, made of elements many at a time, and handed to a writer.

1. Blocks are taken some MiB at a time (`portions`): a part of a large tensor, or many small ones.
2. Those of a portion that have one shape and are cut alike are laid out together, in memory that is used again and again, one
   behind the other as they will lie in the file: shards of a tensor, too. A block is one copy.
3. Each chunk gets its checksum there, and one call writes them all.

So what costs Python is paid per portion or block and not per chunk, but for the checksum and the key.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardckpt.errors import CommitError
from shardckpt.format.codec import close, lay_out_all, room_for
from shardckpt.format.extents import Extents
from shardckpt.format.keys import chunk_object_key
from shardckpt.io.store import byte_view
from shardckpt.plan.chunks import padded_size
from shardckpt.plan.plan import whole_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.layout.box import Box
    from shardckpt.plan.plan import Piece
    from shardckpt.writing.packed import PackedWriter
    from shardckpt.writing.plain import PlainWriter

    Elements: TypeAlias = tuple[Piece, Box, NDArray[np.generic]]
    """An array, a box of whole chunks of it (in the tensor's indices), and the elements there."""

__all__ = ["Encoder", "Written", "gathered", "portions"]


_LEAST_BYTES = 1 << 10
"""That a block counts for, however small it is: its key, and what Python has of it."""


@dataclass(frozen=True, slots=True)
class Written:
    """Chunks in the order in which they were written."""

    paths: tuple[str, ...]
    """Arrays that have some."""
    path: NDArray[np.uint32]
    """(n,) which of the arrays."""
    chunk: NDArray[np.uint64]
    """(n,) position in the array's grid."""
    crc: NDArray[np.uint32]
    """(n,) crc32c of what is stored."""
    extents: Extents
    """Where they are."""


class Encoder:
    """Makes chunks and hands them to a writer; for one thread."""

    def __init__(self, writer: PackedWriter | PlainWriter, compression: str | None) -> None:
        """Write with `writer`; `finish` ends it, or its own `abort`."""
        self.writer = writer
        self._compression = compression
        self._room = np.empty(0, np.uint8)
        """In which one block after another is laid out."""
        self._paths: dict[str, int] = {}
        self._path = array("I")
        self._chunk = array("Q")
        self._crc = array("I")

    def put_all(self, blocks: Iterable[Elements]) -> None:
        """Write the chunks of boxes of arrays; their elements are copied before this returns."""
        alike: dict[object, list[Elements]] = {}
        for block in blocks:
            piece, _, elements = block
            alike.setdefault((piece.chunks, elements.shape, elements.dtype), []).append(block)
        for some in alike.values():
            self._put_alike(some)

    def _put_alike(self, blocks: Sequence[Elements]) -> None:
        """Write blocks of one shape and dtype, cut into chunks of one shape, in their order."""
        known: dict[object, tuple[list[int], list[str]]] = {}
        numbers: list[int] = []
        positions: list[int] = []
        keys: list[str] = []
        for piece, box, _ in blocks:
            lies = (piece.start, piece.shape, box)
            if lies not in known:
                known[lies] = _places(piece, box)
            places, ends = known[lies]
            numbers += [self._paths.setdefault(piece.path, len(self._paths))] * len(places)
            positions += places
            keys += map(piece.path.__add__, ends)
        chunks, elements = blocks[0][0].chunks, [elements for _, _, elements in blocks]
        size = room_for(chunks, elements[0].itemsize)
        nbytes = len(keys) * size
        if self._room.nbytes < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        rows = self._room[:nbytes].reshape(-1, size)
        lay_out_all(elements, chunks, rows)
        data, lengths, crcs = close(rows, self._compression)
        self.writer.put_all(keys, data, lengths)
        self._path.extend(numbers)
        self._chunk.extend(positions)
        self._crc.extend(crcs)

    def put_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks of which the elements are laid out as they are stored (`codec.lay_out`); they are used before this returns.

        Args:
            chunks: of each the array, its position in the grid, and what is laid out.
        """
        together = [chunks] if self._compression is None else [[chunk] for chunk in chunks]  # of which one at a time is in memory
        for some in together:
            closed = [close(raw[None], self._compression) for _, _, raw in some]
            keys = [chunk_object_key(piece, position) for piece, position, _ in some]
            self.writer.put_each(keys, [byte_view(data) for data, _, _ in closed])
            self._path.extend([self._paths.setdefault(piece.path, len(self._paths)) for piece, _, _ in some])
            self._chunk.extend([position for _, position, _ in some])
            self._crc.extend([crc for _, _, (crc,) in closed])

    def finish(self) -> Written:
        """Wait until everything is durable."""
        extents = self.writer.finish()
        self._room = np.empty(0, np.uint8)
        columns = (np.array(self._path, np.uint32), np.array(self._chunk, np.uint64), np.array(self._crc, np.uint32))
        return Written(tuple(self._paths), *columns, extents)


def _places(piece: Piece, box: Box) -> tuple[list[int], list[str]]:
    """Of the chunks of an array that make a box: their positions in the grid, and how their keys end, behind the array's path."""
    positions, ends = [0], ["/c"]
    for span, n in zip(whole_chunks(piece, box), piece.grid, strict=True):
        positions = [row * n + i for row in positions for i in span]
        ends = [f"{end}/{i}" for end in ends for i in span]
    return positions, ends


def portions(blocks: Iterable[Elements], most: int) -> Iterator[list[Elements]]:
    """Blocks one after another, as many at a time as take no more than `most` bytes, or one that takes more."""
    some: list[Elements] = []
    room = most
    for block in blocks:
        piece, _, elements = block
        # As it is laid out: a host may have the edges of a thousand tensors, which are mostly padding.
        nbytes = elements.nbytes if elements.shape == piece.chunks else padded_size(elements.shape, piece.chunks) * elements.itemsize
        nbytes = max(nbytes, _LEAST_BYTES)
        if nbytes > room and some:
            yield some
            some, room = [], most
        some.append(block)
        room -= nbytes
    if some:
        yield some


def gathered(parts: Sequence[Written]) -> Written:
    """What several encoders have written, as one.

    Raises:
        CommitError: two of them have written the same chunk.
    """
    if len(parts) == 1:
        return parts[0]
    paths: dict[str, int] = {}
    numbers = [np.array([paths.setdefault(path, len(paths)) for path in part.paths], np.uint32)[part.path] for part in parts]
    path, chunk = np.concatenate(numbers), np.concatenate([part.chunk for part in parts])
    order = np.lexsort((chunk, path))
    twice = np.flatnonzero((np.diff(path[order]) == 0) & (np.diff(chunk[order]) == 0))
    if len(twice):
        row = order[twice[0]]
        raise CommitError(
            f"chunk {chunk[row]} of {[*paths][path[row]]} was put twice by one host; "
            f"two tensors, or two boxes of one, claim the same chunk."
        )
    extents = [part.extents for part in parts]
    before = np.cumsum([0, *(len(e.files) for e in extents[:-1])]).astype(np.uint32)
    places = Extents(
        tuple(file for e in extents for file in e.files),
        np.concatenate([e.file + n for e, n in zip(extents, before, strict=True)]),
        np.concatenate([e.offset for e in extents]),
        np.concatenate([e.length for e in extents]),
    )
    return Written(tuple(paths), path, chunk, np.concatenate([part.crc for part in parts]), places)
