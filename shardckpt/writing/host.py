"""Writing one host's part of an attempt: its chunks, the table of their places, then its record.

The record is written last, after everything that it refers to is durable. So its presence means
that the host has finished.

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

import os
from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardckpt.commit.assemble import write_merged, write_table
from shardckpt.errors import ShardckptError
from shardckpt.format.documents import FileReference, seal
from shardckpt.format.fingerprint import StateSums
from shardckpt.format.merging import merge_structures
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.format.replicas import ReplicasReference, seal_checksums
from shardckpt.format.stored_chunks import close, lay_out_all, with_checksums
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.format.zarr_arrays import (
    CHECKSUM_BYTES,
    chunk_object_key,
    chunk_places,
    room_for,
)
from shardckpt.io import extension
from shardckpt.io.buffers import round_up
from shardckpt.io.datafile import BlocksOut
from shardckpt.io.failures import storage_errors
from shardckpt.io.threads import run_on_threads
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.plan.blocks import cut_elements
from shardckpt.plan.pieces import batches, padded_size
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import Contents
    from shardckpt.format.replicas import Checksums
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.store import Store
    from shardckpt.layout.box import Box
    from shardckpt.plan.blocks import Block
    from shardckpt.plan.pieces import Piece
    from shardckpt.writing.kept import KeptChunks

    Array: TypeAlias = NDArray[np.generic]
    Elements: TypeAlias = tuple[Piece, Box, NDArray[np.generic]]
    """An array, a box of complete chunks of it (in the tensor's indices), and its elements."""


def describe(
    place: Store, contents: Contents, key: str | None = None, *, always: bool = False
) -> FileReference:
    """Write a host's contents into the attempt at `place`, unless they are there already.

    A host with the same contents may have written them. With `always` they are written in any case.
    """
    reference, data = contents.seal(key)
    if always or not place.exists(reference.key):
        place.write(reference.key, data)
    return reference


def write_record(place: Store, record: HostRecord, *, first: bool = False) -> bool:
    """Write a host's record, after everything that it refers to is durable.

    On a disk, a file may be visible although making it durable failed. Such a record is removed, or
    else emptied, so that nobody commits what it refers to.

    Args:
        place: the attempt.
        record: the host's record.
        first: write it only if there is none yet.

    Returns:
        Whether the record there is this one.
    """
    data = seal(record.to_json(), record.version)
    try:
        if first:
            return place.create(record.key, data)
        place.write(record.key, data)
    except BaseException:
        _take_back(place, record.key, data)
        raise
    return True


def _take_back(place: Store, key: str, data: bytes) -> None:
    """Remove a record from a disk, or empty it where nothing can be removed.

    If the record is durable, a crash may bring it back.
    """
    if (path := place.local_path(key)) is None:
        return
    with suppress(ShardckptError):
        there, generation = place.read_versioned(key)
        if there != data:
            return
        try:
            place.remove(key, generation)
        except ShardckptError:
            with storage_errors("empty", path):
                os.truncate(path, 0)


class HostWriter:
    """Writes a host's chunks, in any order of tensors, until `finish` or `abort`."""

    def __init__(
        self,
        place: Store,
        attempt: str,
        host: int,
        *,
        layout: str,
        compression: str | None,
        memory_limit: int,
        run: str | None = None,
        threads: int = 1,
        summed: Collection[TensorRecord] | None = None,
        kept: KeptChunks | None = None,
    ) -> None:
        """Write below `place`, the attempt.

        Args:
            place: the attempt's directory.
            attempt: its name.
            host: this writer's number.
            layout: "packed" or "zarr".
            compression: None, "zstd" or "difference".
            memory_limit: bytes of encoded chunks that may wait for the storage.
            run: a suffix that separates this writer's files from other writers' files, if several
                writers may work as the same host. In the plain layout each chunk has only one name,
                and the last writer's chunk stays.
            threads: threads that `append` may use on a local disk, and for differences; each writes
                data files of its own.
            summed: tensors whose sums are written beside the chunks, for a fingerprint; None: no
                sums.
            kept: the elements of all chunks written here are kept there, and differences are from
                those that it has.
        """
        self._place = place
        self._attempt = attempt
        self._host = host
        self.folder = f"hosts/{host:05d}{'' if run is None else f'-{run}'}"
        """Folder of the host's own files, relative to the attempt."""
        self._layout = layout
        self._compression = compression
        several = (
            threads if layout == "packed" and (place.appends or compression == "difference") else 1
        )
        self._writer: PackedWriter | PlainWriter
        if layout == "packed":
            self._writer = PackedWriter(
                place, host, folder=self.folder, memory_limit=memory_limit, threads=several
            )
        else:
            self._writer = PlainWriter(
                place,
                in_flight_bytes=memory_limit,
                drafts=None if run is None else f"{self.folder}/drafts",
            )
        self._encoders = [
            Encoder(
                self._writer,
                compression,
                None if summed is None else StateSums(summed),
                thread=i,
                kept=kept,
            )
            for i in range(several)
        ]
        self.vouches = False
        """Whether the host's record may exist. Then other processes may commit what it refers to,
        so none of that may be deleted."""
        self.table: Table | None = None
        """The chunk table, once it is written."""

    def append(self, portions: Iterable[Portion]) -> None:
        """Write portions on as many threads as the writer has.

        Their elements are not used any more when this returns.

        Args:
            portions: drawn one by one, by one thread at a time.
        """

        def write(encoder: Encoder, portion: Portion) -> None:
            encoder.append(portion.blocks)
            portion.written()

        run_on_threads(
            portions, [partial(write, encoder) for encoder in self._encoders], "shardckpt-write"
        )

    def portions(
        self,
        blocks: Iterable[Elements],
        at_a_time: int,
        nbytes: int,
        written: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Portion]:
        """Group blocks into portions.

        Args:
            blocks: boxes of arrays and their elements.
            at_a_time: bytes of elements that a thread may lay out at a time; one block may have
                more.
            nbytes: bytes of all elements.
            written: called with the bytes of the elements of each portion that is written, on the
                thread that has written it.
        """
        most = at_a_time
        if self._encoders[0].moves_blocks:  # larger portions, but still one for each thread
            most = max(at_a_time, min(extension.CALL_BYTES, nbytes // len(self._encoders)))
        for group in batches(blocks, lambda block: (_bytes_of_chunks(block),), (most,)):
            yield Portion(
                group, partial(written, sum([elements.nbytes for _, _, elements in group]))
            )

    def portions_of(
        self,
        blocks: Sequence[tuple[Block, Array]],
        at_a_time: int,
        written: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Portion]:
        """Cut blocks into boxes and group these; see `portions`.

        A box has at most `at_a_time` bytes with its padding, or is one chunk.
        """
        return self.portions(
            cut_elements(blocks, at_a_time),
            at_a_time,
            sum([elements.nbytes for _, elements in blocks]),
            written,
        )

    def append_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks of arrays by position from elements in their stored form.

        See `Encoder.append_laid_out`.
        """
        self._encoders[0].append_laid_out(chunks)

    def describe(self, contents: Contents) -> FileReference:
        """Write the host's contents, unless a host with the same contents has written them."""
        return describe(self._place, contents)

    def finish(
        self,
        contents: Contents,
        *,
        hosts: int,
        prior: str | None,
        values: bytes | None = None,
        replicas: Checksums | None = None,
    ) -> HostRecord:
        """Call `complete`, and then write the host's record.

        Args:
            contents: the host's contents.
            hosts: number of hosts of the attempt.
            prior: SHA-256 of the commit record that the save found; None: there was none.
            values: file of this process's own values; None: there are none.
            replicas: checksums of boxes that other hosts hold, too; None: there are none.
        """
        alone = (
            hosts == 1 and not contents.small
        )  # the committer adds the commit record alone, and there are few directories
        described = (
            describe(self._place, contents, f"{self.folder}/contents.json")
            if alone
            else self.describe(contents)
        )
        all_of = contents.structure if alone else None
        if all_of is not None and all_of.is_partial:
            all_of = merge_structures([((0,), all_of)])
        record, self.table = self.complete(
            described, hosts=hosts, prior=prior, values=values, replicas=replicas, all_of=all_of
        )
        self.vouches = True  # even if the write fails: perhaps only its response was lost
        write_record(self._place, record)
        return record

    def complete(
        self,
        contents: FileReference,
        *,
        hosts: int,
        prior: str | None,
        values: bytes | None = None,
        replicas: Checksums | None = None,
        all_of: Structure | None = None,
    ) -> tuple[HostRecord, Table]:
        """Wait until all chunks are durable.

        Write the chunk table and the other files that the host's record refers to.

        Args:
            contents: reference to the contents file.
            hosts: as for `finish`.
            prior: as for `finish`.
            values: as for `finish`.
            replicas: as for `finish`.
            all_of: the structure of which this host has all chunks; then it writes the merged index
                and table, too.

        Returns:
            The record, which is not written yet, and the chunk table.
        """
        packed = self._writer if isinstance(self._writer, PackedWriter) else None
        extents = packed.end() if packed else self._writer.finish()
        written = merge_written([encoder.finish() for encoder in self._encoders])
        order = np.lexsort((written.chunk, written.path))
        counts = dict(
            zip(
                written.paths,
                np.bincount(written.path, minlength=len(written.paths)).tolist(),
                strict=True,
            )
        )
        file = (
            extents.file if packed else np.full(len(order), OWN_OBJECT)
        )  # plain layout: the key determines the place
        columns = (written.chunk, file, extents.offset, extents.length, written.crc)
        table = Table(
            list(extents.files), counts, ArrayChunks.of_columns(*(c[order] for c in columns))
        )
        if (
            packed is not None and self._compression != "difference"
        ):  # zarr has no codec for these, and would show them for weights
            packed.seal(
                extents,
                None
                if all_of is None
                else partial(write_merged, self._place, table, all_of, self._compression),
            )
        record = HostRecord(
            attempt=self._attempt,
            host=self._host,
            hosts=hosts,
            prior=prior,
            layout=self._layout,
            compression=self._compression,
            files=HostFiles(
                contents=contents,
                table=write_table(self._place, f"{self.folder}/table", table),
                lanes=() if packed is None else tuple(packed.lanes),
                values=None if values is None else self._write_own("values.json", values),
                sums=self._write_sums(),
                replicas=None if not replicas else self._write_replicas(replicas),
            ),
            chunks=len(order),
            stored_bytes=int(extents.length.sum()),
            changed_bytes=sum(encoder.changed_bytes for encoder in self._encoders)
            if self._compression == "difference"
            else None,
        )
        self._place.make_parents(record.key)
        self._place.sync_names()
        return record, table

    def _write_sums(self) -> FileReference | None:
        """Write what the chunks of all encoders add to the tensors' sums."""
        first, *others = (encoder.sums for encoder in self._encoders)
        if first is None:
            return None
        for other in others:
            assert other is not None
            first.merge(other)
        return self._write_own("sums.json", seal({"sums": first.to_json()}))

    def _write_replicas(self, checksums: Checksums) -> ReplicasReference:
        digests, data = seal_checksums(checksums)
        return ReplicasReference(self._write_own("replicas.json", data), digests)

    def _write_own(self, name: str, data: bytes) -> FileReference:
        """Write a file of this host's own."""
        key = f"{self.folder}/{name}"
        self._place.write(key, data)
        return FileReference.of(key, data)

    def abort(self) -> None:
        """Give up: delete this host's files, unless its record may exist.

        If it may exist, the files stay as garbage of the attempt.
        """
        if not self.vouches:
            self._writer.abort()


_LEAST_BYTES = 1 << 10
"""Least bytes that a block counts for: its key, and the Python objects for it."""


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


class Portion(NamedTuple):
    """Blocks that one thread writes at a time."""

    blocks: list[Elements]
    written: Callable[[], None]
    """Called after these blocks are written."""


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

        All elements are added to `sums`, and kept in `kept`.
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

    def append(self, blocks: Iterable[Elements]) -> None:
        """Write the chunks of boxes of arrays; their elements are copied before this returns."""
        alike: dict[object, list[Elements]] = {}
        for block in blocks:
            piece, box, elements = block
            if elements.dtype == np.bool_:
                elements = with_plain_bools(elements)
                block = piece, box, elements  # noqa: PLW2901
            if self.sums is not None:
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
        differences = self._compression == "difference"
        each = (
            round_up(size) if differences else size
        )  # words are compared, and aligned ones faster
        nbytes = len(keys) * each
        memory = self._writer.room(nbytes) if self._compression is None else None
        if memory is None:
            if self._room.nbytes < nbytes:
                self._room = np.empty(nbytes, np.uint8)
            memory = self._room[:nbytes]
        rows = memory.reshape(-1, each)[:, :size]
        lay_out_all(elements, chunks, rows)
        if differences:
            assert self._kept is not None
            known = [*self._paths]
            paths = [known[number] for number in numbers]
            stored, changed = self._kept.differences(
                keys, paths, rows[:, :-CHECKSUM_BYTES], elements[0].itemsize
            )
            data, lengths, crcs = with_checksums(stored)
            self.changed_bytes += changed
        else:
            if self._kept is not None:
                self._kept.keep(keys, rows[:, :-CHECKSUM_BYTES])
            data, lengths, crcs = close(rows, self._compression)
        self._writer.append(keys, data, lengths, thread=self._thread)
        return crcs

    def append_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks from elements in their stored form (`stored_chunks.lay_out`).

        The input is not used after this returns.

        Args:
            chunks: for each chunk the array, its position in the grid, and the laid-out bytes.
        """
        together = (
            [chunks] if self._compression is None else [[chunk] for chunk in chunks]
        )  # one compressed chunk in memory at a time
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


def _bytes_of_chunks(block: Elements) -> int:
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


def merge_written(parts: Sequence[Written]) -> Written:
    """Merge what several encoders have written, one after another."""
    paths: dict[str, int] = {}
    numbers = [
        np.array([paths.setdefault(path, len(paths)) for path in part.paths], np.uint32)[part.path]
        for part in parts
    ]
    path, chunk = np.concatenate(numbers), np.concatenate([part.chunk for part in parts])
    return Written(tuple(paths), path, chunk, np.concatenate([part.crc for part in parts]))
