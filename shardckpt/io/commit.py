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

import datetime as dt
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt._version import __version__
from shardckpt.errors import AlreadyExistsError, CommitError
from shardckpt.io import index
from shardckpt.io.table import ArrayChunks, decode_table, merge_tables
from shardckpt.record import CheckpointRecord, FileReference, HostRecord, Structure, Tombstone, open_envelope, parse_checkpoint, seal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.store import Store
    from shardckpt.reshard.plan import Piece

__all__ = ["RECORD", "Prior", "commit", "new_attempt", "read_host_record", "read_prior", "read_table", "zarr_documents"]

LONGEST_TEXT = 1 << 14
"""Characters of OpSharding text that every array carries; metadata must not grow with devices × tensors."""
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


def read_prior(store: Store, *, overwrite: bool) -> Prior:
    """The present commit record.

    Raises:
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is False.
    """
    data, generation = store.read_versioned(RECORD)
    record = None if data is None else parse_checkpoint(data, f"{store}/{RECORD}")
    if isinstance(record, CheckpointRecord) and not overwrite:
        raise AlreadyExistsError(f"{store}: a checkpoint is committed there already; save elsewhere, or with SaveOptions(overwrite=True).")
    return Prior(record, generation)


def commit(store: Store, attempt: str, prior: Prior) -> CheckpointRecord:
    """Publish an attempt whose host records are all there.

    Args:
        store: the checkpoint's place.
        attempt: the attempt's name.
        prior: the commit record when the save began.

    Raises:
        CommitError: records that contradict each other, or chunks that nobody or more than one host wrote.
        AlreadyExistsError: somebody else published first.
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
    record = CheckpointRecord(
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
    data = seal(record.to_json())
    published = store.create(RECORD, data) if prior.record is None else store.replace(RECORD, data, prior.generation)
    if not published:
        raise AlreadyExistsError(
            f"{store}: somebody else committed there while this save was running; its attempt {attempt} was not published."
        )
    return record


def read_host_record(place: Store, reference: FileReference) -> HostRecord:
    """A host's record, checked against what the commit record vouches for."""
    data, where = place.read(reference.key), f"{place}/{reference.key}"
    reference.check(data, where)
    return HostRecord.from_json(open_envelope(data, where), where)


def read_table(place: Store, host: HostRecord) -> tuple[list[str], dict[str, ArrayChunks]]:
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
            if len(sharding["op_sharding"]) > LONGEST_TEXT:
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
    if not hosts:
        raise CommitError(f"{place}: no host has written a record; there is nothing to commit.")
    for host in hosts[1:]:
        if host.structure.to_json() != hosts[0].structure.to_json() or host.layout != hosts[0].layout:
            raise CommitError(f"{place}: hosts {hosts[0].host} and {host.host} saved different states; nothing was published.")
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
