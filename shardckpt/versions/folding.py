"""Folding: a version gets an earlier base and the same contents.

So a late follower reads few differences.

The versions of a publisher are a chain: each differs from the one before, up to an anchor.
`bases_after_folding` gives some of them a base further back, so that every version is a few
differences from the anchor. To fold a version:

1. Read the differences from its new base to it, and join them chunk by chunk
   (`format.differences.Joined`). Few bytes are read, and elements only of chunks that have mostly
   changed.
2. Write an attempt with the same hosts, contents and sums, whose name begins with that of the
   present one (`commit.attempts.unfolded`): so pins, tags and other markers hold for both.
3. Publish it in place of the present attempt, if the commit record is still the same. Its
   fingerprint must be the same, too: followers and later versions identify a version by that.

The replaced attempt stays until it is collected, a grace period after the fold. A fold that is
killed leaves one attempt or the other.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.assemble import assemble, read_host_record
from shardckpt.commit.attempts import folded_name, step_of
from shardckpt.commit.base_places import base_url, chain_places, has_array
from shardckpt.commit.index import write_table
from shardckpt.commit.markers import is_superseded
from shardckpt.commit.publish import (
    Prior,
    is_published,
    publish,
    read_prior,
)
from shardckpt.commit.remove import discard_unfit, renew
from shardckpt.commit.table_reading import read_document, read_table
from shardckpt.errors import (
    AlreadyExistsError,
    CorruptionError,
    MissingDataError,
    NotFoundError,
    OptionError,
)
from shardckpt.format.bases import Base, names_beside
from shardckpt.format.differences import Joined, whole
from shardckpt.format.record import CheckpointRecord, Contents, HostFiles, host_record_key
from shardckpt.format.stored_chunks import with_checksums
from shardckpt.format.table import ArrayChunks, Table
from shardckpt.format.zarr_arrays import chunk_object_keys
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import check_whole
from shardckpt.plan.pieces import batches
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.reader import open_reader
from shardckpt.runs.steps import list_steps
from shardckpt.versions.cache import Needed, path_from, read_chunks
from shardckpt.writing.host import describe, write_record
from shardckpt.writing.packed import PackedWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import HostRecord
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.locate import Request
    from shardckpt.reading.reader import ChunkReader

    _Arrays = Mapping[str, tuple[TensorRecord, Piece]]
    """Array path → its tensor and itself."""
    _Joined = Mapping[tuple[str, int], Joined]
    """Array path and position of a chunk → its differences so far."""

DIFFERENCES = 8
"""Most differences that a reader of a version applies after folding, by default."""
LONGEST = 128
"""Most versions from an anchor to the next."""
NEWEST = 2
"""Newest versions that are not folded: followers that keep up apply these one by one."""
AT_A_TIME = 64 << 20
"""Most bytes of chunks whose differences are joined at a time, as elements."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A version that was folded."""

    step: int
    base: int
    """The step that it differs from now."""
    old_bytes: int
    """Stored bytes of the differences that a reader of the version read, back to that base."""
    new_bytes: int
    """Stored bytes of the one that it reads now."""


def bases_after_folding(count: int, most: int = DIFFERENCES) -> dict[int, int]:
    """The versions of a chain to fold, and the base of each, as numbers.

    The anchor is 0, and the newest version is `count` - 1.

    In base b, a multiple of b differs from the number without its last non-zero digit; all others
    differ from the number before. b is the least for which no version of a chain of 128 is more
    than `most` differences from the anchor; if there is no such b, none of this chain.

    Raises:
        OptionError: no b is so good.

    >>> bases_after_folding(30, 8)
    {3: 0, 6: 0, 9: 0, 12: 9, 15: 9, 18: 0, 21: 18, 24: 18, 27: 0}
    """
    if count <= most + 1:
        return {}
    for chain, b in product((LONGEST, count), range(2, most + 1)):
        digits = 0
        while b ** (digits + 1) < chain:
            digits += 1
        if NEWEST + b - 1 + digits <= most:
            return {i: _without_last_digit(i, b) for i in range(b, count - NEWEST, b)}
    raise OptionError(
        f"{most} differences are too few for chains of {count} versions: allow more, or publish "
        "with a smaller anchor_every."
    )


def _without_last_digit(number: int, b: int) -> int:
    unit = b
    while number % (unit * b) == 0:
        unit *= b
    return number - number % (unit * b)


def fold(url: str | os.PathLike[str], *, most: int = DIFFERENCES) -> list[Folded]:
    """Fold the newest versions of a publisher, back to their anchor.

    Return those that were folded, oldest first.

    Other processes may publish and delete there at the same time. A version that changes meanwhile
    is left as it is.

    Args:
        url: the place of all versions.
        most: differences that a reader of any of them applies at most.

    Raises:
        NotFoundError: there is no version.
        OptionError: `most` is too small for the chain.
        StorageError, CorruptionError: a version cannot be read or written; it is as it was.
    """
    most = check_whole(most, "fold(most")
    root = Store.open(parse(url))
    live = [info.step for info in list_steps(root) if info.state == "committed"]
    if not live:
        raise NotFoundError(f"{root}: no version is there; give the url of a `Publisher`.")
    chain = Checkpoint(root.sub(str(live[-1])).location).record.structure.chain
    return [*fold_chain(root, live[-1], chain, most, set(), AT_A_TIME)]


def fold_chain(
    root: Store, newest: int, chain: Sequence[Base], most: int, done: set[int], at_a_time: int
) -> Iterator[Folded]:
    """Fold the versions of a chain that are due; errors are those of `fold`.

    Args:
        root: the place of all versions.
        newest: the newest version's step.
        chain: its chain.
        most: as for `fold`.
        done: steps that need no folding any more; those that are folded are added.
        at_a_time: bytes of chunks whose differences are joined at a time, as elements.
    """
    steps = [*reversed([_step(base) for base in chain]), newest]
    contents = [base.contents for base in reversed(chain)]
    if -1 in steps:
        raise OptionError(
            f"{root}: version {newest} differs from versions in other places; only versions "
            "beside each other are folded."
        )
    places = chain_places(root.location.join(str(newest)), chain)
    for number, base in bases_after_folding(len(steps), most).items():
        if steps[number] not in done:
            done.add(steps[number])  # before: one that failed would fail again
            folded = _fold_one(
                root,
                steps[number],
                steps[base],
                contents[number],
                contents[base],
                places,
                at_a_time,
            )
            if folded is not None:
                yield folded


def _step(base: Base) -> int:
    """The step of a version beside the one that names it; -1: it lies elsewhere."""
    (name,) = names_beside([base.url]) or [""]
    step = step_of(name)
    return -1 if step is None else step


def _fold_one(
    root: Store,
    step: int,
    base: int,
    contents: str,
    base_contents: str,
    places: frozenset[Location],
    at_a_time: int,
) -> Folded | None:
    """Fold a version; None if it has this base already, has changed, or needs another place."""
    store = root.sub(str(step))
    prior = read_prior(store, overwrite=True)
    record = prior.record
    if (
        not isinstance(record, CheckpointRecord)
        or record.fingerprint is None
        or record.fingerprint.sha256 != contents
        or not chain_places(store.location, record.structure.chain) <= places
    ):
        return None  # deleted or replaced since the newest version named it
    try:
        path = path_from(lambda one: _step(one) == base, store.sub(record.attempt), record, LONGEST)
        earlier = Checkpoint(root.sub(str(base)).location).record
        if (
            path is None
            or len(path) == 1
            or earlier.fingerprint is None
            or earlier.fingerprint.sha256 != base_contents
        ):
            return None
        url = base_url(store.location, root.location.join(str(base)))
        chain = (
            Base("", "packed", earlier.compression, url, base_contents),
            *earlier.structure.chain,
        )
        new = _Fold(store, prior, path, chain, earlier.structure, at_a_time).write()
        # Training goes back, and its publisher may replace this version.
        if is_superseded(store, record.attempt):
            discard_unfit(store, new.attempt, prior, complete=True)
            return None
        publish(store, new, prior)
    except AlreadyExistsError:
        return None  # pinned, replaced, deleted or folded meanwhile
    except (MissingDataError, NotFoundError):
        if is_published(store, record.attempt) and not is_superseded(store, record.attempt):
            raise
        return None  # deleted or replaced meanwhile
    old_bytes = sum(int(one.totals["stored_bytes"]) for _, one in path)
    return Folded(step, base, old_bytes, int(new.totals["stored_bytes"]))


@dataclass(frozen=True, slots=True)
class _Fold:
    """The fold of one version."""

    store: Store
    """Place of the version."""
    prior: Prior
    """The version's present record."""
    path: Sequence[tuple[Store, CheckpointRecord]]
    """Attempts and records from the version after the new base up to this one."""
    chain: tuple[Base, ...]
    """The new chain."""
    earlier: Structure
    """Structure of the new base."""
    at_a_time: int
    """See `fold_chain`."""

    @property
    def present(self) -> Store:
        """The present attempt."""
        return self.path[-1][0]

    def write(self) -> CheckpointRecord:
        """Write an attempt with the contents of the present one, as differences from the new base.

        Return its record.
        """
        record = self.path[-1][1]
        place = self.store.sub(folded_name(record.attempt, secrets.token_hex(4)))
        records: list[HostRecord] = []
        try:
            records = self._write_hosts(place)
            for of_host in records:
                write_record(place, of_host)
        except BaseException:
            # With its records there, another process may have published it.
            discard_unfit(self.store, place.location.name, self.prior, complete=bool(records))
            raise
        new = assemble(place)
        if (
            new.fingerprint is None
            or record.fingerprint is None
            or new.fingerprint.sha256 != record.fingerprint.sha256
        ):
            renew(self.store, record.attempt)  # from here on no other process publishes it
            discard_unfit(self.store, new.attempt, self.prior, complete=True)
            raise CorruptionError(
                f"{self.present}: folding it gives other sums than it has; run `shardckpt verify "
                f"{self.store}`."
            )
        key = host_record_key(0)
        self.present.write(key, self.present.read(key))  # its grace begins now
        return replace(new, created=record.created, writer=record.writer)

    def _write_hosts(self, place: Store) -> list[HostRecord]:
        """Write all but the records of the hosts, and return those."""
        record, records = self.path[-1][1], []
        arrays = {
            piece.path: (tensor, piece)
            for tensor in record.structure.tensors.values()
            for piece in tensor.pieces
        }
        versions = [
            (open_reader(store, of_version, memory=self.at_a_time), of_version.structure)
            for store, of_version in self.path
        ]
        for host in range(len(record.hosts)):
            old, _ = read_host_record(self.present, host)
            writer = PackedWriter(place, host)
            columns: list[tuple[str, NDArray[np.int64], list[int]]] = []
            try:
                for needed, stored in self._join(
                    arrays, versions, read_table(self.present, old.files.table)
                ):
                    data, lengths, crcs = with_checksums(stored)
                    writer.append(chunk_object_keys(needed.piece, needed.positions), data, lengths)
                    columns.append((needed.piece.path, needed.positions, crcs))
                records.append(self._finish(place, old, writer, columns))
            except BaseException:
                writer.stop()
                raise
        return records

    def _join(
        self, arrays: _Arrays, versions: Sequence[tuple[ChunkReader, Structure]], table: Table
    ) -> Iterator[tuple[Needed, list[bytes]]]:
        """The chunks of a table, part after part, as differences from the new base."""
        for group in batches(
            _parts(arrays, table, self.at_a_time),
            lambda part: (part.chunk_bytes * len(part.positions),),
            (self.at_a_time,),
        ):
            joined = {
                (part.piece.path, position): Joined(part.chunk_bytes, part.dtype.itemsize)
                for part in group
                for position in part.positions.tolist()
            }

            def take(
                request: Request, position: int, stored: NDArray[np.uint8], joined: _Joined = joined
            ) -> None:
                (piece,) = request.pieces
                joined[piece.path, position].add(
                    stored, f"{request.name}, chunk {position} of {piece.path} in {self.store}"
                )

            # Where one lacks the array, a later one has all elements.
            for reader, structure in versions:
                there = [part for part in group if has_array(structure, *arrays[part.piece.path])]
                reader.read_stored([part.request() for part in there], take)
            stored = {key: one.stored() for key, one in joined.items()}
            unknown = {key for key, chunk in stored.items() if chunk is None}
            lacking = [part.part(unknown.__contains__) for part in group]
            elements = read_chunks(Checkpoint(self.store.location), lacking) if unknown else {}
            chunks = stored | {key: whole(chunk) for key, chunk in elements.items()}
            for part in group:
                yield (
                    part,
                    [
                        chunk
                        for position in part.positions.tolist()
                        if (chunk := chunks[part.piece.path, position]) is not None
                    ],
                )

    def _finish(
        self,
        place: Store,
        old: HostRecord,
        writer: PackedWriter,
        columns: Sequence[tuple[str, NDArray[np.int64], list[int]]],
    ) -> HostRecord:
        """Write the other files of a host, and return its record."""
        present = self.present
        extents = writer.finish()
        counts: dict[str, int] = {}
        for path, positions, _ in columns:
            counts[path] = counts.get(path, 0) + len(positions)
        chunk = np.concatenate([np.empty(0, np.int64), *(positions for _, positions, _ in columns)])
        crc = np.array([crc for _, _, crcs in columns for crc in crcs], np.int64)
        table = Table(
            [*extents.files],
            counts,
            ArrayChunks.of_columns(chunk, extents.file, extents.offset, extents.length, crc),
        )
        document = read_document(present, old.files.contents)
        contents = Contents.from_json(document.doc, document.where)
        tensors = {
            name: replace(
                tensor,
                difference=tensor.difference
                and all(has_array(self.earlier, tensor, piece) for piece in tensor.pieces),
            )
            for name, tensor in contents.structure.tensors.items()
        }
        contents = replace(
            contents, structure=replace(contents.structure, tensors=tensors, chain=self.chain)
        )
        for file in (old.files.values, old.files.sums):
            if file is not None:
                place.write(file.key, present.read(file.key))
        files = HostFiles(
            table=write_table(place, f"hosts/{old.host:05d}/table", table),
            lanes=tuple(writer.lanes),
            contents=describe(place, contents),
            values=old.files.values,
            sums=old.files.sums,
        )
        return replace(
            old,
            attempt=place.location.name,
            prior=self.prior.digest,
            files=files,
            chunks=len(table.rows),
            stored_bytes=int(extents.length.sum()),
        )


def _parts(arrays: _Arrays, table: Table, most: int) -> Iterator[Needed]:
    """The chunks of a table, some of an array at a time: `most` bytes, or one chunk."""
    for path, rows in table.arrays().items():
        tensor, piece = arrays[path]
        array = Needed(tensor.name, tensor.dtype.storage, piece, rows.chunk.astype(np.int64))
        at_a_time = max(1, most // array.chunk_bytes)
        for first in range(0, len(rows.chunk), at_a_time):
            yield array._replace(positions=array.positions[first : first + at_a_time])
