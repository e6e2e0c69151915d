"""What one host writes in one attempt: its chunks, then the table of where they are, then its record.

The record is written last, after everything it vouches for is durable, so its presence means the host is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.host_files import write_table
from shardckpt.format.record import FileReference, HostFiles, HostRecord, seal
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.io.threads import map_on_threads, run_on_threads
from shardckpt.writing.encoder import Encoder, gathered, portions
from shardckpt.writing.packed import PackedWriter
from shardckpt.writing.plain import PlainWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.contents import Contents
    from shardckpt.io.store import Store
    from shardckpt.layout.box import Box
    from shardckpt.plan.plan import Piece

__all__ = ["HostWriter", "describe"]


def describe(place: Store, contents: Contents) -> FileReference:
    """Write what a host says that the checkpoint holds into the attempt at `place`, unless another host says the same."""
    reference, data = contents.seal()
    if not place.exists(reference.key):
        place.write(reference.key, data)
    return reference


class HostWriter:
    """Takes a host's chunks in any order of tensors; `finish` or `abort` ends it."""

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
    ) -> None:
        """Write below `place`, the attempt.

        Args:
            place: the attempt's directory.
            attempt: its name.
            host: this writer's number.
            layout: "packed" or "zarr".
            compression: None or "zstd".
            memory_limit: bytes of encoded chunks that may wait for the storage.
            run: where several writers may be at work as the same host, what tells this one's files from theirs. Of the
                plain layout's chunks, which have one name each, the last one's are there.
            threads: that `put_all` may use, to data files on a local disk: each writes files of its own.
        """
        self._place = place
        self._attempt = attempt
        self._host = host
        self.folder = f"hosts/{host:05d}{'' if run is None else f'-{run}'}"
        """Where the host's own files are, relative to the attempt."""
        self._layout = layout
        self._compression = compression
        writers: list[PackedWriter | PlainWriter]
        if layout == "packed":
            several = threads if place.location.local is not None else 1
            writers = [PackedWriter(place, host, folder=self.folder, memory_limit=memory_limit, among=(i, several)) for i in range(several)]
        else:
            writers = [PlainWriter(place, in_flight_bytes=memory_limit, drafts=None if run is None else f"{self.folder}/drafts")]
        self._encoders = [Encoder(writer, compression) for writer in writers]
        self.vouches = False
        """Whether the host's record may be there. From then on others may commit what it vouches for, and nothing of that goes."""

    def put(self, piece: Piece, box: Box, elements: NDArray[np.generic]) -> None:
        """Write the chunks of an array that make a box.

        Args:
            piece: the array.
            box: in the tensor's indices.
            elements: of the box; copied before this returns.
        """
        self._encoders[0].put_all([(piece, box, elements)])

    def put_all(self, blocks: Iterable[tuple[Piece, Box, NDArray[np.generic]]], at_a_time: int) -> None:
        """Write many, each as `put` would, by as many threads as the writer has; nobody reads elements any more when this returns.

        Args:
            blocks: arrays, boxes and elements.
            at_a_time: bytes that a thread lays out at a time; a block may take more.
        """
        run_on_threads(portions(blocks, at_a_time), [encoder.put_all for encoder in self._encoders], "shardckpt-write")

    def put_laid_out(self, chunks: Sequence[tuple[Piece, int, NDArray[np.uint8]]]) -> None:
        """Write chunks of arrays, by position, of which the elements are laid out as they are stored; see `Encoder.put_laid_out`."""
        self._encoders[0].put_laid_out(chunks)

    def describe(self, contents: Contents) -> FileReference:
        """Write what the host says that the checkpoint holds, unless another host says the same."""
        return describe(self._place, contents)

    def finish(self, contents: Contents, *, hosts: int, prior: str | None, values: bytes | None = None) -> HostRecord:
        """`complete`, and then write the host's record.

        Args:
            contents: what the host says that the checkpoint holds.
            hosts: how many hosts write into the attempt.
            prior: SHA-256 of the commit record that the save found; None: there was none.
            values: file of what this process owns by itself; None: nothing.
        """
        record, _ = self.complete(self.describe(contents), hosts=hosts, prior=prior, values=values)
        self.vouches = True  # even if the write fails: its answer may be all that was lost
        self._place.write(record.key, seal(record.to_json()))
        return record

    def complete(self, contents: FileReference, *, hosts: int, prior: str | None, values: bytes | None = None) -> tuple[HostRecord, Table]:
        """Wait until all is durable, and write the chunk table and what else the host's record vouches for.

        Args:
            contents: file that says what the checkpoint holds.
            hosts: as for `finish`.
            prior: as for `finish`.
            values: as for `finish`.

        Returns:
            The record, which is not written yet, and the chunk table.
        """
        written = gathered(map_on_threads(Encoder.finish, self._encoders))
        extents = written.extents
        order = np.lexsort((written.chunk, written.path))
        counts = np.bincount(written.path, minlength=len(written.paths)).tolist()
        # Plain layout: the key tells the place, so the table names no files.
        file = extents.file if self._layout == "packed" else np.full(len(order), OWN_OBJECT)
        columns = (written.chunk, file, extents.offset, extents.length, written.crc)
        table = Table(
            list(extents.files), dict(zip(written.paths, counts, strict=True)), ArrayChunks.of_columns(*(c[order] for c in columns))
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
                lanes=tuple(lane for e in self._encoders if isinstance(e.writer, PackedWriter) for lane in e.writer.lanes),
                values=None if values is None else self._write_own("values.json", values),
            ),
            chunks=len(order),
            stored_bytes=int(extents.length.sum()),
        )
        return record, table

    def _write_own(self, name: str, data: bytes) -> FileReference:
        """Write a file of this host's own."""
        key = f"{self.folder}/{name}"
        self._place.write(key, data)
        return FileReference.of(key, data)

    def abort(self) -> None:
        """Give up; what was written stays as garbage of the attempt, and all of it does once the host vouches for it."""
        if not self.vouches:
            for encoder in self._encoders:
                encoder.writer.abort()
