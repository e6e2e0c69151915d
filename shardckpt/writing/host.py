"""Writing one host's part of an attempt: its chunks, the table of their places, then its record.

The record is written last, after everything that it refers to is durable. So its presence means
that the host has finished.

Elements are encoded some MiB at a time (`Portion`): a part of a large tensor, or many small
tensors (`encoder`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.index import MANIFEST, TREE, is_whole, write_merged, write_table
from shardckpt.errors import ShardckptError
from shardckpt.format.documents import FileReference, seal
from shardckpt.format.fingerprint import StateSums
from shardckpt.format.merging import merge_structures
from shardckpt.format.record import HostFiles, HostRecord
from shardckpt.format.replicas import ReplicasReference, seal_checksums
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.io import extension
from shardckpt.io.failures import storage_errors
from shardckpt.io.threads import run_on_threads
from shardckpt.plan.pieces import batches
from shardckpt.writing.encoder import Encoder, Portion, bytes_of_chunks, cut_elements, merge_written
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.commit.index import Lane
    from shardckpt.format.fingerprint import RunSums
    from shardckpt.format.record import Contents
    from shardckpt.format.replicas import Checksums
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.requests import ObjectWriter
    from shardckpt.io.store import Store
    from shardckpt.plan.blocks import Block
    from shardckpt.plan.pieces import Piece
    from shardckpt.writing.encoder import Array, Elements
    from shardckpt.writing.kept import KeptChunks
    from shardckpt.writing.packed import Extents


def describe(
    place: Store,
    contents: Contents,
    key: str | None = None,
    *,
    always: bool = False,
    to: ObjectWriter | None = None,
) -> FileReference:
    """Write a host's contents into the attempt at `place`, unless they are there already.

    A host with the same contents may have written them. With `always` they are written in any case.
    `to` are the uploads to the place to which they are added; None: they are written now.
    """
    reference, data = contents.seal(key)
    if always or not place.exists(reference.key):
        (to or place).write(reference.key, data)
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
        self._described: FileReference | None = None
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
                drafts=f"{self.folder}/drafts",
                shared=run is not None,
            )
        self._sums = None if summed is None else StateSums(summed)
        """Sums of the blocks of `add_sums`."""
        self._summed: set[tuple[str, tuple[int, ...]]] = set()
        """Paths and first indices of these blocks."""
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

    def add_sums(self, block: Block, sums: RunSums) -> None:
        """Add the sums of a block (`sums_of_run`): `append` does not sum it again."""
        if self._sums is not None:
            self._sums.add_run_sums(block.piece, sums)
            self._summed.add((block.piece.path, block.box.start))

    def append(
        self,
        portions: Iterable[Portion],
        fail: Callable[[BaseException], object] = lambda _: None,
    ) -> None:
        """Write portions on as many threads as the writer has.

        Their elements are not used any more when this returns.

        Args:
            portions: drawn one by one, by one thread at a time.
            fail: called with an error at once, on the thread that failed: another one may wait for
                the next portion.
        """

        def write(encoder: Encoder, portion: Portion) -> None:
            try:
                encoder.append(portion.blocks, summed=portion.summed)
                portion.written()
            except BaseException as e:
                fail(e)
                raise

        run_on_threads(
            portions, [partial(write, encoder) for encoder in self._encoders], "shardckpt-write"
        )

    def portions(
        self,
        blocks: Iterable[Elements],
        at_a_time: int,
        nbytes: int,
        written: Callable[[int], None] = lambda _: None,
        *,
        summed: bool = False,
    ) -> Iterator[Portion]:
        """Group blocks into portions.

        Args:
            blocks: boxes of arrays and their elements.
            at_a_time: bytes of elements that a thread may lay out at a time; one block may have
                more.
            nbytes: bytes of all elements.
            written: called with the bytes of the elements of each portion that is written, on the
                thread that has written it.
            summed: as in `Portion`.
        """
        most = at_a_time
        # Larger portions, but still one for each thread, of blocks that the extension moves.
        if self._encoders[0].moves_blocks:
            most = max(at_a_time, min(extension.CALL_BYTES, nbytes // len(self._encoders)))

        def weight(block: Elements) -> tuple[int]:
            nbytes = bytes_of_chunks(block)
            piece, _, elements = block
            if len(piece.shape) > extension.MOST_DIMS or elements.itemsize not in extension.KINDS:
                nbytes = nbytes * most // at_a_time  # numpy lays it out, in memory
            return (nbytes,)

        for group in batches(blocks, weight, (most,)):
            grouped = sum([elements.nbytes for _, _, elements in group])
            yield Portion(group, partial(written, grouped), summed)

    def portions_of(
        self,
        blocks: Sequence[tuple[Block, Array]],
        at_a_time: int,
        written: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Portion]:
        """Cut blocks into boxes and group these; see `portions`.

        A box has at most `at_a_time` bytes with its padding, or is one chunk. Blocks whose sums are
        known come last, so that the portions are not smaller where the two kinds alternate.
        """
        nbytes = sum([elements.nbytes for _, elements in blocks])
        groups: dict[bool, Sequence[tuple[Block, Array]]] = {False: blocks}
        if self._summed:
            others: list[tuple[Block, Array]] = []
            known: list[tuple[Block, Array]] = []
            for pair in blocks:
                key = pair[0].piece.path, pair[0].box.start
                (known if key in self._summed else others).append(pair)
            groups = {False: others, True: known}
        for summed, group in groups.items():
            parts = cut_elements(group, at_a_time)
            yield from self.portions(parts, at_a_time, nbytes, written, summed=summed)

    def append_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks of arrays by position from elements in their stored form.

        See `Encoder.append_laid_out`.
        """
        self._encoders[0].append_laid_out(chunks)

    def describe(
        self, contents: Contents, *, hosts: int, to: ObjectWriter | None = None
    ) -> FileReference:
        """Write the host's contents once; see the function `describe`.

        `hosts` is the number of hosts of the attempt.
        """
        if self._described is None:
            # The committer adds the commit record alone, and there are few directories.
            alone = hosts == 1 and not contents.small
            key = f"{self.folder}/contents.json" if alone else None
            self._described = describe(self._place, contents, key, always=alone, to=to)
        return self._described

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
        all_of = contents.structure if hosts == 1 and not contents.small else None
        if all_of is not None and all_of.is_partial:
            all_of = merge_structures([((0,), all_of)])
        record, self.table = self.complete(
            contents,
            hosts=hosts,
            prior=prior,
            values=values,
            replicas=replicas,
            all_of=all_of,
        )
        self.vouches = True  # even if the write fails: perhaps only its response was lost
        write_record(self._place, record)
        return record

    def complete(
        self,
        contents: FileReference | Contents,
        *,
        hosts: int,
        prior: str | None,
        values: bytes | None = None,
        replicas: Checksums | None = None,
        all_of: Structure | None = None,
    ) -> tuple[HostRecord, Table]:
        """Wait until all chunks are durable.

        Write the chunk table and the other files that the host's record refers to, at once where
        requests are slow.

        Args:
            contents: the host's contents, or the reference to their file, if it is written.
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
        table = self._table_of(extents, packed=packed is not None)
        checks: list[Callable[[], bool | None]] = []
        with self._place.uploads() as uploads:
            files = HostFiles(
                table=write_table(uploads, f"{self.folder}/table", table),
                lanes=() if packed is None else tuple(packed.lanes),
                values=None if values is None else self._write_own(uploads, "values.json", values),
                sums=self._write_sums(uploads),
                replicas=None if not replicas else self._write_replicas(uploads, replicas),
                contents=contents
                if isinstance(contents, FileReference)
                else self.describe(contents, hosts=hosts, to=uploads),
            )
            # zarr has no codec for these, and would show them for weights.
            if packed is not None and self._compression != "difference":
                checks = self._write_lanes(uploads, packed.lanes_of(extents), table, all_of)
            if packed is not None:
                packed.wait()
        if False in self._place.read_together(checks):
            self._place.delete(MANIFEST)
        record = HostRecord(
            attempt=self._attempt,
            host=self._host,
            hosts=hosts,
            prior=prior,
            layout=self._layout,
            compression=self._compression,
            files=files,
            chunks=len(table.rows),
            stored_bytes=int(extents.length.sum()),
            changed_bytes=sum(encoder.changed_bytes for encoder in self._encoders)
            if self._compression == "difference"
            else None,
        )
        self._place.make_parents(record.key)
        self._place.sync()
        return record, table

    def _table_of(self, extents: Extents, *, packed: bool) -> Table:
        """The table of all chunks, which have these places."""
        written = merge_written([encoder.finish() for encoder in self._encoders])
        order = np.lexsort((written.chunk, written.path))
        counts = dict(
            zip(
                written.paths,
                np.bincount(written.path, minlength=len(written.paths)).tolist(),
                strict=True,
            )
        )
        # Plain layout: the key determines the place.
        file = extents.file if packed else np.full(len(order), OWN_OBJECT)
        columns = (written.chunk, file, extents.offset, extents.length, written.crc)
        return Table(
            list(extents.files), counts, ArrayChunks.of_columns(*(c[order] for c in columns))
        )

    def _write_lanes(
        self, uploads: ObjectWriter, lanes: Iterator[Lane], table: Table, all_of: Structure | None
    ) -> list[Callable[[], bool | None]]:
        """Begin to write the host's first database, and write the others and the merged one.

        Returns:
            What checks the first and the merged one, when all are written; False: the merged one
            cannot be read (`is_whole`).
        """
        first = next(lanes, None)
        if first is None:
            return []
        objects, leaf = first.objects(), f"{first.name}/{TREE}"
        checks: list[Callable[[], bool | None]] = [partial(first.check, self._place)]
        for key, data in objects.items():
            if key != leaf or all_of is None:
                uploads.write(key, data)
        for lane in lanes:  # each has many keys, so one at a time is in memory
            lane.write(self._place)
        if all_of is not None:
            # The nodes of the merged database follow the first leaf in its file.
            merged = write_merged(
                self._place, table, all_of, self._compression, leaf, objects[leaf]
            )
            if merged is not None:
                checks.append(partial(is_whole, self._place, merged))
        return checks

    def _write_sums(self, uploads: ObjectWriter) -> FileReference | None:
        """Begin to write what the chunks of all encoders add to the tensors' sums."""
        if self._sums is None:
            return None
        for encoder in self._encoders:
            assert encoder.sums is not None
            self._sums.merge(encoder.sums)
        data = seal({"sums": self._sums.to_json(zeros=False)})
        return self._write_own(uploads, "sums.json", data)

    def _write_replicas(self, uploads: ObjectWriter, checksums: Checksums) -> ReplicasReference:
        digests, data = seal_checksums(checksums)
        return ReplicasReference(self._write_own(uploads, "replicas.json", data), digests)

    def _write_own(self, uploads: ObjectWriter, name: str, data: bytes) -> FileReference:
        """Begin to write a file of this host's own."""
        key = f"{self.folder}/{name}"
        uploads.write(key, data)
        return FileReference.of(key, data)

    def abort(self) -> None:
        """Give up: delete this host's files, unless its record may exist.

        If it may exist, the files stay as garbage of the attempt.
        """
        if not self.vouches:
            self._writer.abort()
