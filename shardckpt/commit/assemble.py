"""Assembly of the commit record from the records of all hosts.

A committer does this work before it publishes.

The hosts of an attempt have each left a record, and the committer needs nothing else from them. So
any process can do this at any time.

1. Read the host records and each host's chunk table, and check their digests. Take the union of the
   contents that they describe.
2. Check that together they hold every chunk exactly once.
3. Write the chunks of small plain tensors (`small_tensors`). Hosts put those elements into their
   contents instead of data files.
4. Build the metadata for stock zarr readers: the merged OCDBT index, or the `zarr.json` documents.
5. Write all chunk tables as one, so that a reader needs only one.

The only host of an attempt has written the merged index and the table of all itself, before its
record (layout "packed").

All files have the same names and the same bytes whichever process writes them. So two committers
that work at the same time, or one after the other's death, do not disturb each other.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt._version import __version__
from shardckpt.commit import index
from shardckpt.commit.fingerprints import write_fingerprint
from shardckpt.commit.index import TABLE, places_in_files, write_table
from shardckpt.commit.replicas import check_replicas
from shardckpt.commit.small_tensors import SMALL, SMALL_TABLE, small_chunks, small_table
from shardckpt.commit.table_reading import read_table
from shardckpt.errors import CommitError
from shardckpt.format.documents import (
    FileReference,
    TableReference,
    format_version,
    open_envelope,
    utc_now,
)
from shardckpt.format.record import (
    CheckpointRecord,
    Contents,
    HostRecord,
    host_record_key,
)
from shardckpt.format.table import OWN_OBJECT, Table
from shardckpt.format.zarr_arrays import (
    chunk_object_key,
    encoded_documents,
    plain_key,
    zarr_documents,
)
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import LARGEST_WHOLE, sync_directory
from shardckpt.io.threads import collector_paused, map_on_threads
from shardckpt.state.names import shown
from shardckpt.text import few, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.store import Store

    _Parts: TypeAlias = Sequence[tuple[Sequence[int], Contents]]
    """Different versions of the hosts' contents, each with the hosts that have it."""

_NAMED_HOSTS = 1000
"""Most missing hosts that a message names."""


class HostVersionError(CommitError):
    """A host's record has another format version than this process writes."""


def finished_hosts(place: Store) -> list[int]:
    """The hosts that have written their record into an attempt.

    Takes one listing of few small objects.
    """
    names = (key.removeprefix("records/").removesuffix(".json") for key in place.list("records/"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_host_record(place: Store, host: int) -> tuple[HostRecord, FileReference]:
    """A host's record, and the reference that commits to its digest."""
    key = host_record_key(host)
    data, where = place.read(key), f"{place}/{key}"
    record = HostRecord.from_json(open_envelope(data, where), where)
    if format_version(data, where) != record.version:
        raise HostVersionError(
            f"{where} has another format version than this process writes; run the same version "
            "of shardckpt on all hosts."
        )
    if record.host != host or record.attempt != place.location.name:
        raise CommitError(
            f"{where} is the record of host {record.host} of attempt {record.attempt}: a wrong "
            "file; nothing was published. Save again."
        )
    return record, FileReference.of(key, data)


def assemble(
    place: Store,
    known: Mapping[FileReference, Contents] | None = None,
    written: Mapping[TableReference, Table] | None = None,
    finished: Sequence[int] | None = None,
) -> CheckpointRecord:
    """Build the commit record of an attempt whose host records are all there.

    Everything that the commit record refers to is written as well.

    Args:
        place: the attempt.
        known: contents that the caller already has, by their file: the file's digest is checked,
            and it is not parsed.
        written: chunk tables that the caller has written, in the same way.
        finished: the hosts that have written their record, if the caller knows that: sorted.

    Raises:
        CommitError: records contradict each other, or a chunk was written by no host or by several.
    """
    place = place.synced_later()
    with collector_paused() if place.near else nullcontext():
        present = finished_hosts(place) if finished is None else finished
        record = _assemble(place, present, known or {}, written or {})
    place.sync()
    return record


def _assemble(
    place: Store,
    present: Sequence[int],
    known: Mapping[FileReference, Contents],
    written: Mapping[TableReference, Table],
) -> CheckpointRecord:
    hosts, references = _host_records(place, present)
    # The only host is the caller itself.
    if (records := place.local_path("records")) is not None and not (written and len(hosts) == 1):
        with storage_errors("write", records):
            sync_directory(
                records
                # A host may have been killed, or be at work, between naming its record and making
                # the name durable.
            )
    first = hosts[0]
    packed = first.layout == "packed"
    # Zarr has no codec for differences, so there is no index of them: its readers fail, and do not
    # take them for elements.
    indexed = packed and first.compression != "difference"
    reads: list[Callable[[], Any]] = [
        partial(_contents, place, hosts, known),
        partial(_tables, place, hosts, written),
        partial(index.is_by_host, place) if indexed and len(hosts) == 1 else lambda: False,
    ]
    parts: _Parts
    parts, tables, by_host = place.read_together(reads)
    contents = Contents.union(parts)
    structure = contents.structure
    if len(hosts) > 1:
        check_replicas(place, hosts, structure.tensors)
    small, data = small_chunks(contents, first.compression) if contents.small else ([], b"")
    small_tables = [small_table(small, packed=packed)] if small else []
    table = _merge_tables(place, [*tables, *small_tables], parts, structure.tensors.values())
    _check_coverage(place, parts, structure.tensors.values(), table)
    _check_counts(place, hosts, tables)

    with place.uploads() as uploads:
        table_of_all = (
            replace(first.files.table, key=TABLE) if by_host else write_table(uploads, TABLE, table)
        )
        table_of_small = write_table(uploads, SMALL_TABLE, *small_tables) if small else None
        fingerprint = (
            write_fingerprint(place, hosts, contents, uploads) if first.fingerprint else None
        )
        if packed and small:
            uploads.write(SMALL, data)
        if indexed and not by_host:
            # Chunks that hosts wrote are there by reference; those of small tensors are values in
            # the index itself.
            values = {
                chunk_object_key(piece, position): stored.tobytes()
                for piece, position, stored, _ in small
            }
            index.write_index(
                place,
                places_in_files(table, structure),
                [*encoded_documents(structure, first.compression)],
                values,
            )
        if not packed:
            for piece, position, stored, _ in small:
                uploads.write(plain_key(chunk_object_key(piece, position)), stored)
            index.write_plain_documents(place, dict(zarr_documents(structure, first.compression)))
    return CheckpointRecord(
        attempt=first.attempt,
        created=utc_now(),
        writer=f"shardckpt {__version__}",
        layout=first.layout,
        compression=first.compression,
        hosts=tuple(references),
        structure=structure,
        metadata=dict(contents.metadata),
        totals={
            "tensors": len(structure.tensors),
            "bytes": sum(t.nbytes for t in structure.tensors.values()),
            "stored_bytes": sum(host.stored_bytes for host in hosts) + len(data),
            "chunks": len(table.rows),
            **(
                {"changed_bytes": sum(host.changed_bytes or 0 for host in hosts)}
                if first.compression == "difference"
                else {}
            ),
        },
        fingerprint=fingerprint,
        table=table_of_all,
        small_table=table_of_small,
        saved_by=contents.processes,
    )


def _host_records(
    place: Store, present: Sequence[int]
) -> tuple[list[HostRecord], list[FileReference]]:
    """All host records of an attempt, in order of host, and references.

    The references commit to the digests of the records. `present` has the hosts that have one.
    """
    if not present:
        raise CommitError(
            f"{place}: no host has finished this save, or `shardckpt gc` has removed it; save "
            "again."
        )
    read = map_on_threads(lambda host: read_host_record(place, host), present)
    hosts = [record for record, _ in read]
    first = hosts[0]
    if len(present) != first.hosts or [*present] != [*range(len(present))]:
        # A record may claim any number of hosts, so only the first missing ones are named.
        missing = sorted(set(range(min(first.hosts, len(present) + _NAMED_HOSTS))) - set(present))
        raise CommitError(
            f"{place}: the save has {first.hosts} hosts, and there are records of "
            f"{numbered('host', present)}"
            + (f"; {numbered('host', missing)} did not finish." if missing else ".")
            + " Nothing was published."
        )
    for host in hosts[1:]:
        for what in ("hosts", "prior", "layout", "compression", "fingerprint"):
            expected, value = getattr(first, what), getattr(host, what)
            if expected != value and what == "prior":
                raise CommitError(
                    f"{place}: while hosts 0 and {host.host} began to save, another checkpoint "
                    "was committed, or deleted, at this place; let one job at a time save there, "
                    "and save again. Nothing was published."
                )
            if expected != value:
                raise CommitError(
                    f"{place}: hosts 0 and {host.host} disagree on {what}: {expected!r} and "
                    f"{value!r}; save with the same options on all. Nothing was published."
                )
    return hosts, [reference for _, reference in read]


def _contents(
    place: Store, hosts: Sequence[HostRecord], known: Mapping[FileReference, Contents]
) -> list[tuple[list[int], Contents]]:
    """Different versions of the hosts' contents, each with the hosts that have it.

    Sorted by lowest host.
    """
    holders: dict[FileReference, list[int]] = {}
    for host in hosts:
        holders.setdefault(host.files.contents, []).append(host.host)

    def read(reference: FileReference) -> Contents:
        data, where = place.read(reference.key), f"{place}/{reference.key}"
        reference.check(data, where)
        if reference in known:
            return known[reference]
        return Contents.from_json(open_envelope(data, where), where)

    return list(zip(holders.values(), map_on_threads(read, holders), strict=True))


def _tables(
    place: Store, hosts: Sequence[HostRecord], written: Mapping[TableReference, Table]
) -> list[Table]:
    """Each host's chunk table."""

    def read(reference: TableReference) -> Table:
        known = written.get(reference)
        if (
            known is not None
            and reference.size <= LARGEST_WHOLE
            and known.is_stored_as(place.read(reference.key), reference)
        ):
            return known
        return read_table(place, reference)

    return map_on_threads(read, [host.files.table for host in hosts])


def _check_counts(place: Store, hosts: Sequence[HostRecord], tables: Sequence[Table]) -> None:
    """Check that every host's chunk table is as long as its record says.

    The chunks of a packed save must also lie in files, and all in the indexes that it names.
    """
    for host, table in zip(hosts, tables, strict=True):
        what = f"{place}: the chunk table of host {host.host} has"
        if len(table.rows) != host.chunks:
            raise CommitError(
                f"{what} {len(table.rows)} chunks, but its record says {host.chunks}; nothing was "
                "published."
            )
        nbytes = int(table.rows.length.sum())
        if nbytes != host.stored_bytes:
            raise CommitError(
                f"{what} chunks of {nbytes} bytes, but its record says {host.stored_bytes}; "
                "nothing was published."
            )
        if host.layout == "packed" and (table.rows.file == OWN_OBJECT).any():
            raise CommitError(
                f"{what} chunks in files of their own, but its record's layout is 'packed'; "
                "nothing was published."
            )
        lanes = {file.rpartition("/d/")[0] for file in table.files}
        if lanes != set(host.files.lanes):
            named = few(sorted(host.files.lanes)) if host.files.lanes else "no index"
            raise CommitError(
                f"{what} chunks in {few(sorted(lanes))}, but its record names {named}; nothing "
                "was published."
            )


def _merge_tables(
    place: Store, tables: Sequence[Table], parts: _Parts, tensors: Iterable[TensorRecord]
) -> Table:
    """Merge all tables; CommitError names the tensor if two hosts wrote the same chunk."""
    merged = Table.merge(tables)
    doubled = merged.doubled()
    if doubled is not None:
        name = next(
            (
                shown(tensor.name)
                for tensor in tensors
                if any(piece.path == doubled for piece in tensor.pieces)
            ),
            doubled,
        )
        describing = [
            p
            for processes, part in parts
            for t in part.structure.tensors.values()
            if t.partial
            for piece in t.pieces
            if piece.path == doubled
            for p in processes
        ]
        if describing:
            raise CommitError(
                f"{place}: {name} describes its own shards, and "
                f"{numbered('process', sorted(describing))} describe the same one; nothing was "
                "published. Let one process alone describe each shard, or pass a DTensor that is "
                "replicated on its mesh."
            )
        raise CommitError(
            f"{place}: more than one host wrote the same chunks of {name}; nothing was published. "
            "If processes hold different tensors under one name, rename them; give all processes "
            f"the same host_tensors= and check_replicas=.{_lacking(parts)}"
        )
    return merged


def _check_coverage(
    place: Store, parts: _Parts, tensors: Iterable[TensorRecord], table: Table
) -> None:
    """Check that the table has every chunk of every tensor, and no others.

    Duplicates have been refused by `_merge_tables`.
    """
    known, counts, last = set(), table.counts, table.last_chunks()
    for tensor in tensors:
        if tensor.base is not None:
            continue  # `skipping` has found all of its chunks in the base
        for piece in tensor.pieces:
            known.add(piece.path)
            # A table's chunks are ascending and distinct: if the count is right and the last chunk
            # is in the grid, none is missing.
            expected, written = piece.num_chunks, counts.get(piece.path, 0)
            outside = written > 0 and last[piece.path] >= expected
            if written == expected and not outside:
                continue
            what = f"of {expected} chunks of {shown(tensor.name)}"
            if outside:
                raise CommitError(
                    f"{place}: chunk {last[piece.path]} of {shown(tensor.name)} was written, but "
                    f"it has only the chunks 0 to {expected - 1}; nothing was published."
                )
            raise CommitError(
                f"{place}: {expected - written} {what} were not written; nothing was "
                f"published.{_lacking(parts, tensor)}"
            )
    for path in counts.keys() - known:
        raise CommitError(
            f"{place}: chunks were written for {path}, which is not a tensor of this checkpoint; "
            "nothing was published."
        )


def _lacking(parts: _Parts, *suspects: TensorRecord) -> str:
    """A sentence on a tensor that some processes lack; "" if there is none.

    The tensor is one of the large plain tensors or of the suspects.

    All processes together deal out all plain tensors, so a tensor that one process lacks may leave
    gaps in any other tensor.
    """
    plain = (
        t
        for _, part in parts
        for t in part.structure.tensors.values()
        if t.layout is None and t.base is None and t.name not in part.small
    )
    for tensor in sorted(chain(suspects, plain), key=lambda tensor: tensor.layout is not None):
        without = sorted(
            p
            for processes, part in parts
            if tensor.name not in part.structure.tensors
            for p in processes
        )
        if without and tensor.layout is not None:
            return (
                f" {shown(tensor.name)} is missing from {numbered('process', without)}: give it to "
                "all processes that hold a part of it or, if it is a plain tensor, to all; or save "
                "with host_tensors='local' if one process alone has it."
            )
        if without:
            return (
                f" All processes share the writing of plain tensors, and {shown(tensor.name)} is "
                f"missing from {numbered('process', without)}: give it to all, or, if one process "
                "alone has it, save with host_tensors='local'."
            )
    return ""
