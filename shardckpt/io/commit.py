"""Publishing an attempt: everything or nothing, by one conditional write of one small object.

An attempt is a directory that is never used again. Data, then the hosts' records, go there; as long as
`checkpoint.json` does not name it, it is no checkpoint. The committer

1. reads the host records of the attempt, and each host's chunk table, against their digests;
2. checks that they tell of one structure, and that together they hold every chunk exactly once;
3. builds what stock zarr readers need: the merged OCDBT index, or the `zarr.json` documents;
4. writes `checkpoint.json` if nobody has (`create`), or instead of the very record that was there when the save
   began (`replace`, a compare-and-swap). Losing that race publishes nothing.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt._version import __version__
from shardckpt.errors import AlreadyExistsError, CommitError, FormatError, StorageError, VersionError
from shardckpt.io import index
from shardckpt.io.table import ArrayChunks, decode_table, merge_tables
from shardckpt.record import (
    FORMAT_VERSION,
    CheckpointRecord,
    FileReference,
    HostFiles,
    HostRecord,
    Structure,
    Tombstone,
    format_version,
    open_envelope,
    parse_checkpoint,
    seal,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.store import Store
    from shardckpt.reshard.plan import Piece

__all__ = [
    "RECORD",
    "Prior",
    "assemble",
    "discard",
    "is_attempt",
    "new_attempt",
    "publish",
    "read_host_files",
    "read_prior",
    "read_table",
    "zarr_documents",
]

LONGEST_TEXT = 1 << 14
"""Characters of OpSharding text that every array carries; metadata must not grow with devices × tensors."""
_STAMP = re.compile(r"\d{8}T\d{6}-")
RECORD = "checkpoint.json"
"""The commit record, relative to the checkpoint."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What the commit record was when a save began."""

    record: CheckpointRecord | Tombstone | None
    generation: Any
    """The storage's version of it, for the conditional write."""


def new_attempt() -> str:
    """A name for one save attempt, never given twice; it sorts by time."""
    now = dt.datetime.now(dt.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def is_attempt(store: Store, name: str) -> bool:
    """Whether a directory of a checkpoint is what a save, finished or not, has written into."""
    inside = store.list_children(f"{name}/")
    return not {"hosts/", "records/"}.isdisjoint(inside) or ("zarr/" in inside and _STAMP.match(name) is not None)


def read_prior(store: Store, *, overwrite: bool) -> Prior:
    """The present commit record.

    Raises:
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is False.
        VersionError: a newer version's checkpoint is there, which is never replaced.
        FormatError: what is there is unreadable and `overwrite` is False.
    """
    data, generation = store.read_versioned(RECORD)
    record: CheckpointRecord | Tombstone | None = None
    try:
        record = None if data is None else parse_checkpoint(data, f"{store}/{RECORD}")
    except VersionError:
        raise
    except FormatError as e:
        if not overwrite:
            raise FormatError(f"{e} Save elsewhere, or replace it with SaveOptions(overwrite=True).") from e
        # Nothing can be read through it. Which attempt it named is unknown, so that stays as garbage.
        record = Tombstone("unreadable")
    if isinstance(record, CheckpointRecord) and not overwrite:
        raise AlreadyExistsError(f"{store}: a checkpoint is committed there already; save elsewhere, or with SaveOptions(overwrite=True).")
    return Prior(record, generation)


def assemble(store: Store, attempt: str) -> CheckpointRecord:
    """The commit record of an attempt whose host records are all there; the attempt then lacks nothing but this.

    Args:
        store: the checkpoint's place.
        attempt: the attempt's name.

    Raises:
        CommitError: records that contradict each other, or chunks that nobody or more than one host wrote.
    """
    place = store.sub(attempt)
    hosts, references = _host_records(place)
    first = hosts[0]
    _, arrays = merge_tables([read_table(place, host) for host in hosts])
    _check_coverage(place, first.structure, arrays)
    documents = zarr_documents(first.structure, first.compression)
    if first.layout == "packed":
        lanes = [lane for h in hosts for lane in h.lanes]
        index.merge_lanes(
            place, lanes, documents, expected_chunks=sum(h.chunks for h in hosts), expected_bytes=sum(h.stored_bytes for h in hosts)
        )
    else:
        index.write_plain_documents(place, documents)

    tensors = first.structure.tensors.values()
    return CheckpointRecord(
        attempt=attempt,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        writer=f"shardckpt {__version__}",
        layout=first.layout,
        compression=first.compression,
        hosts=tuple(references),
        structure=first.structure,
        metadata=first.metadata,
        totals={
            "tensors": len(first.structure.tensors),
            "bytes": sum(t.nbytes for t in tensors),
            "stored_bytes": sum(h.stored_bytes for h in hosts),
            "chunks": sum(h.chunks for h in hosts),
        },
    )


def publish(store: Store, record: CheckpointRecord, prior: Prior) -> None:
    """Make an assembled attempt the checkpoint, or remove it.

    What is removed must never be published afterwards. So it is removed only when the storage has answered, and has
    then shown another record than ours: a storage may lose its own answer, try again and find that "somebody" was
    first. A process that is interrupted while it waits for the answer leaves the attempt as garbage.

    Args:
        store: the checkpoint's place.
        record: what `assemble` returned.
        prior: the commit record when the save began.

    Raises:
        AlreadyExistsError: somebody else published first; the attempt is gone.
        StorageError: the storage failed. Unless the message says otherwise, the attempt is gone.
    """
    data = seal(record.to_json())
    try:
        published = store.create(RECORD, data) if prior.record is None else store.replace(RECORD, data, prior.generation)
    except StorageError as e:
        if store.read_versioned(RECORD)[0] == data:
            raise StorageError(f"{store}: the checkpoint is committed, but a crash of the machine now might undo that ({e})") from e
        discard(store.sub(record.attempt))
        raise
    if not published and store.read_versioned(RECORD)[0] != data:
        discard(store.sub(record.attempt))
        raise AlreadyExistsError(f"{store}: somebody else committed there while this save was running; nothing of it was kept.")


def discard(place: Store) -> None:
    """Remove an attempt that is not published and never will be; what cannot be removed stays as garbage."""
    with contextlib.suppress(StorageError):
        place.delete_prefix("")


def read_host_files(place: Store, reference: FileReference) -> HostFiles:
    """Where a host's files are, by its record, checked against what the commit record vouches for."""
    data, where = place.read(reference.key), f"{place}/{reference.key}"
    reference.check(data, where)
    return HostFiles.from_json(open_envelope(data, where), where)


def read_table(place: Store, host: HostFiles | HostRecord) -> tuple[list[str], dict[str, ArrayChunks]]:
    """A host's chunk table, checked against its record."""
    data, where = place.read(host.table.key), f"{place}/{host.table.key}"
    host.table.check(data, where)
    return decode_table(data, where)


def zarr_documents(structure: Structure, compression: str | None) -> dict[str, dict[str, Any]]:
    """Array path → zarr.json of every array of a checkpoint, with mesh, spec and OpSharding in its attributes."""
    from shardckpt.io.zarr_meta import array_json

    doc = structure.to_json()
    documents = {}
    for name, tensor in structure.tensors.items():
        entry = doc["tensors"][name]
        attribute: dict[str, Any] = {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        if "sharding" in entry:
            sharding = doc["shardings"][entry["sharding"]]
            attribute |= {k: v for k, v in sharding.items() if k != "mesh"}
            if "mesh" in sharding:
                attribute["mesh"] = dict(doc["meshes"][sharding["mesh"]])
            listed = attribute.get("mesh", attribute).get("devices")
            if max(len(sharding["op_sharding"]), 2 * len(listed) if isinstance(listed, list) else 0) > LONGEST_TEXT:
                # Ids that follow no pattern, of very many devices: the record has them once, not each array.
                for key in ("op_sharding", "devices"):
                    attribute.pop(key, None)
                attribute.get("mesh", {}).pop("devices", None)
        for piece in tensor.pieces:
            start = {} if piece.shape == tensor.shape else {"start": list(piece.start)}
            documents[piece.path] = array_json(piece.shape, tensor.dtype, piece.chunks, compression, {"shardckpt": {**attribute, **start}})
    return documents


def _host_records(place: Store) -> tuple[list[HostRecord], list[FileReference]]:
    """All host records of an attempt, in order of host, and the references that vouch for them."""
    hosts, references = [], []
    for key in sorted(place.list("records/")):
        data, where = place.read(key), f"{place}/{key}"
        hosts.append(HostRecord.from_json(open_envelope(data, where), where))
        references.append(FileReference.of(key, data))
        if format_version(data, where) != FORMAT_VERSION:
            raise CommitError(f"{where} has another format version than this process writes; run one shardckpt on all hosts of a save.")
    if not hosts:
        raise CommitError(f"{place}: no host has written a record; there is nothing to commit.")
    first = hosts[0].to_json()
    if hosts[0].attempt != place.location.name or len({host.host for host in hosts}) != len(hosts):
        raise CommitError(f"{place}: a host's record is of another attempt, or there twice; nothing was published.")
    for host in hosts[1:]:
        doc = host.to_json()
        for what in ("attempt", "layout", "compression", "metadata", "structure"):
            if doc[what] != first[what]:
                raise CommitError(f"{place}: hosts {hosts[0].host} and {host.host} disagree on the {what}; nothing was published.")
    return hosts, references


def _check_coverage(place: Store, structure: Structure, arrays: Mapping[str, ArrayChunks]) -> None:
    """Every chunk of every tensor, each once (the tables have refused doubles)."""
    for tensor in structure.tensors.values():
        for piece in tensor.pieces:
            missing = missing_chunks(piece, arrays.get(piece.path))
            if len(missing):
                raise CommitError(
                    f"{place}: {len(missing)} of {piece.num_chunks} chunks of {tensor.name} were not written; nothing was published."
                )
    known = {p.path for t in structure.tensors.values() for p in t.pieces}
    for path in arrays.keys() - known:
        raise CommitError(f"{place}: chunks were written for {path}, which is no tensor of this checkpoint; nothing was published.")


def missing_chunks(piece: Piece, rows: ArrayChunks | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of the chunks of a piece that the table does not have."""
    positions = np.arange(piece.num_chunks)
    return positions if rows is None else positions[rows.find(positions) < 0]
