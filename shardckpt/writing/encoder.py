"""Encoding of chunks: elements laid out as they are stored, with checksums, and handed to a writer.

Elements of many chunks are encoded at a time:

1. Blocks are processed some MiB at a time (`Portion`): a part of a large tensor, or many small
   tensors.
2. The blocks of a portion with the same shape and chunk shape are laid out together, also across
   tensors, in reused memory, one after another as they will lie in the file. Each block is one
   copy.
3. Each chunk gets its checksum there, and one call writes them all.

So the cost of Python code is per portion or block and not per chunk, except for the checksum and
the key. Where the extension moves the elements (`io/extension.py`), steps 2 and 3 are one call, and
portions are larger.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardckpt.format.stored_chunks import (
    chunks_in_place,
    close,
    lay_out_all,
    with_checksums,
)
from shardckpt.format.zarr_arrays import (
    CHECKSUM_BYTES,
    chunk_object_key,
    chunk_places,
    room_for,
)
from shardckpt.io import extension
from shardckpt.io.buffers import round_up
from shardckpt.io.datafile import BlocksOut
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.plan.blocks import parts_of
from shardckpt.plan.pieces import padded_size
from shardckpt.writing.packed import PackedWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.fingerprint import StateSums
    from shardckpt.layout.box import Box
    from shardckpt.plan.blocks import Block
    from shardckpt.plan.pieces import Piece
    from shardckpt.writing.kept import Chunks, KeptChunks
    from shardckpt.writing.plain import PlainWriter

    Array: TypeAlias = NDArray[np.generic]
    Elements: TypeAlias = tuple[Piece, Box, NDArray[np.generic]]
    """An array, a box of complete chunks of it (in the tensor's indices), and its elements."""


@dataclass(frozen=True, slots=True)
class Written:
    """Chunks in the order in which they were written."""

    paths: tuple[str, ...]
    """Arrays that have chunks here."""
    path: NDArray[np.uint32]
    """(n,) index into `paths`."""
    chunk: NDArray[np.uint64]
    """(n,) position in the array's grid."""
    crc: NDArray[np.uint32]
    """(n,) crc32c of the stored bytes."""


class Encoder:
    """Encodes chunks and hands them to a writer; for one thread."""

    def __init__(
        self,
        writer: PackedWriter | PlainWriter,
        compression: str | None,
        sums: StateSums | None = None,
        *,
        thread: int = 0,
        kept: KeptChunks | None = None,
    ) -> None:
        """Write with `writer`, as its thread of this number.

        All elements are kept in `kept`, and their sums added to `sums`.
        """
        self.sums = sums
        self.changed_bytes = 0
        """Bytes of elements that differ from the version before."""
        self._kept = kept
        self._writer = writer
        self._thread = thread
        self._compression = compression
        self._room = np.empty(0, np.uint8)
        """Reused memory in which blocks are laid out, unless the writer has memory for them; or the
        extension's scratch."""
        self.moves_blocks = (
            extension.moving is not None
            and compression is None
            and kept is None
            and isinstance(writer, PackedWriter)
        )
        """Whether the extension moves elements to the file, or to the memory of an object."""
        self._paths: dict[str, int] = {}
        self._path = array("I")
        self._chunk = array("Q")
        self._crc = array("I")

    def append(self, blocks: Iterable[Elements], *, summed: bool = False) -> None:
        """Write the chunks of boxes of arrays; their elements are copied before this returns.

        They are added to `sums`, unless they are `summed` already.
        """
        alike: dict[object, list[Elements]] = {}
        for block in blocks:
            piece, box, elements = block
            if elements.dtype == np.bool_:
                elements = with_plain_bools(elements)
                block = piece, box, elements  # noqa: PLW2901
            if self.sums is not None and not summed:
                self.sums.add_box(piece, box.start, elements)
            alike.setdefault((piece.chunks, elements.shape, elements.dtype), []).append(block)
        for group in alike.values():
            self._append_alike(group)

    def _append_alike(self, blocks: Sequence[Elements]) -> None:
        """Write blocks of one shape and dtype, cut into chunks of one shape, in their order."""
        known: dict[object, tuple[list[int], list[str]]] = {}
        numbers: list[int] = []
        positions: list[int] = []
        keys: list[str] = []
        chunks, paths = blocks[0][0].chunks, self._paths
        only = "/c" + "/0" * len(chunks)
        for piece, box, _ in blocks:
            if piece.shape == chunks:  # an array of one chunk
                numbers.append(paths.setdefault(piece.path, len(paths)))
                positions.append(0)
                keys.append(piece.path + only)
                continue
            lies = (piece.start, piece.shape, box)
            if lies not in known:
                known[lies] = chunk_places(piece, box)
            places, ends = known[lies]
            numbers += [paths.setdefault(piece.path, len(paths))] * len(places)
            positions += places
            keys += map(piece.path.__add__, ends)
        elements = [elements for _, _, elements in blocks]
        size = room_for(chunks, elements[0].itemsize)
        crcs = (
            self._append_with_extension(keys, size, elements, chunks) if self.moves_blocks else None
        )
        if crcs is None:
            crcs = self._append_with_numpy(keys, size, elements, chunks, numbers)
        self._path.extend(numbers)
        self._chunk.extend(positions)
        self._crc.extend(crcs)

    def _append_with_extension(
        self, keys: Sequence[str], size: int, elements: list[Array], chunks: tuple[int, ...]
    ) -> list[int] | None:
        """Write chunks with the extension.

        Return their checksums, or None if it does not move such ones.
        """
        if len(chunks) > extension.MOST_DIMS or elements[0].itemsize not in extension.KINDS:
            return None
        if self._room.nbytes < extension.SCRATCH_BYTES:
            self._room = np.empty(extension.SCRATCH_BYTES, np.uint8)
        blocks = BlocksOut.of(elements, chunks, self._room, len(keys))
        self._writer.append(keys, blocks, [size] * len(keys), thread=self._thread)
        crcs: list[int] = blocks.crcs.tolist()
        return crcs

    def _append_with_numpy(
        self,
        keys: Sequence[str],
        size: int,
        elements: list[Array],
        chunks: tuple[int, ...],
        numbers: Sequence[int],
    ) -> list[int]:
        """Lay chunks out in memory and write them; return their checksums.

        `numbers` are those of their arrays' paths.
        """
        if self._compression == "difference":
            assert self._kept is not None
            known = [*self._paths]
            paths = [known[number] for number in numbers]
            parts: Chunks = []
            if elements[0].itemsize in extension.COMPARED and len(chunks) <= extension.MOST_DIMS:
                parts = chunks_in_place(elements, chunks)
            if not parts:
                # Rows begin at aligned addresses, which are compared faster.
                rows = self._lay_out_rows(elements, chunks, len(keys), size, round_up(size))
                parts = [*rows[:, :-CHECKSUM_BYTES]]
            stored, changed = self._kept.differences(keys, paths, parts, elements[0].itemsize)
            data, lengths, crcs = with_checksums(stored)
            self.changed_bytes += changed
        else:
            rows = self._lay_out_rows(elements, chunks, len(keys), size, size)
            if self._kept is not None:
                self._kept.keep(keys, rows[:, :-CHECKSUM_BYTES])
            data, lengths, crcs = close(rows, self._compression)
        self._writer.append(keys, data, lengths, thread=self._thread)
        return crcs

    def _lay_out_rows(
        self, elements: list[Array], chunks: tuple[int, ...], count: int, size: int, stride: int
    ) -> NDArray[np.uint8]:
        """(count, size) chunks in their stored form.

        Rows begin every `stride` bytes; their last 4 bytes are room for the checksum.
        """
        nbytes = count * stride
        memory = self._writer.room(nbytes) if self._compression is None else None
        if memory is None:
            if self._room.nbytes < nbytes:
                self._room = np.empty(nbytes, np.uint8)
            memory = self._room[:nbytes]
        rows = memory.reshape(-1, stride)[:, :size]
        lay_out_all(elements, chunks, rows)
        return rows

    def append_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks from elements in their stored form (`zarr_arrays.lay_out`).

        The input is not used after this returns.

        Args:
            chunks: for each chunk the array, its position in the grid, and the laid-out bytes.
        """
        # One compressed chunk in memory at a time.
        together = [chunks] if self._compression is None else [[chunk] for chunk in chunks]
        if self.sums is not None:
            for piece, position, raw in chunks:
                self.sums.add_chunk(piece, position, raw)
        for group in together:
            closed = [close(raw[None], self._compression) for _, _, raw in group]
            keys = [chunk_object_key(piece, position) for piece, position, _ in group]
            self._writer.append(keys, [data for data, _, _ in closed], thread=self._thread)
            self._path.extend(
                [self._paths.setdefault(piece.path, len(self._paths)) for piece, _, _ in group]
            )
            self._chunk.extend([position for _, position, _ in group])
            self._crc.extend([crc for _, _, (crc,) in closed])

    def finish(self) -> Written:
        """Free the memory, and return what was written."""
        self._room = np.empty(0, np.uint8)
        columns = (
            np.array(self._path, np.uint32),
            np.array(self._chunk, np.uint64),
            np.array(self._crc, np.uint32),
        )
        return Written(tuple(self._paths), *columns)


def merge_written(parts: Sequence[Written]) -> Written:
    """Merge what several encoders have written, one after another."""
    paths: dict[str, int] = {}
    numbers = [
        np.array([paths.setdefault(path, len(paths)) for path in part.paths], np.uint32)[part.path]
        for part in parts
    ]
    path, chunk = np.concatenate(numbers), np.concatenate([part.chunk for part in parts])
    return Written(tuple(paths), path, chunk, np.concatenate([part.crc for part in parts]))


_LEAST_BYTES = 1 << 10
"""Least bytes that a block counts for: its key, and the Python objects for it."""


class Portion(NamedTuple):
    """Blocks that one thread writes at a time."""

    blocks: list[Elements]
    written: Callable[[], None]
    """Called after these blocks are written."""
    summed: bool = False
    """Whether the sums of these blocks were given to `HostWriter.add_sums`."""


def bytes_of_chunks(block: Elements) -> int:
    """Bytes of a block's chunks with their padding.

    A host may have the edges of a thousand tensors, which are mostly padding.
    """
    piece, _, elements = block
    nbytes = (
        elements.nbytes
        if elements.shape == piece.chunks
        else padded_size(elements.shape, piece.chunks) * elements.itemsize
    )
    return max(nbytes, _LEAST_BYTES)


def cut_elements(blocks: Iterable[tuple[Block, Array]], most: int) -> Iterator[Elements]:
    """The parts of blocks, see `plan.blocks.parts_of`: the array, the box, and the elements.

    Those of small blocks are not indexed.
    """
    for block, elements in blocks:
        if block.padded_bytes <= most:
            yield block.piece, block.box, elements
        else:
            for box, index in parts_of(block, most):
                yield block.piece, box, elements[index]
