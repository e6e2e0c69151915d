"""The commit record, the host records and the hosts' contents, as JSON and as objects.

Every process describes its own state (`Contents`): the tree, how each tensor is stored, the
elements of small plain tensors, and the user's metadata. The description goes into a file named by
its digest, so that all processes with the same state share one file. The committer merges all
descriptions, and refuses contradictions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CommitError
from shardckpt.format.documents import (
    COMPRESSIONS,
    DIFFERENCE_VERSION,
    FORMAT_VERSION,
    LAYOUTS,
    Fields,
    FileReference,
    TableReference,
    envelope_digest,
    open_envelope,
    seal,
)
from shardckpt.format.merging import merge_structures
from shardckpt.format.replicas import ReplicasReference
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.state.composites import same_document
from shardckpt.state.names import shown
from shardckpt.text import numbered, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST_HOSTS = 1 << 20
"""Most hosts of a save; limits the work of naming missing hosts."""


@dataclass(frozen=True, slots=True)
class HostFiles:
    """References to a host's own files: the part of its record that readers need.

    Small, however many tensors there are.
    """

    table: TableReference
    """The host's chunk table."""
    lanes: tuple[str, ...]
    """OCDBT databases relative to the attempt (packed layout)."""
    contents: FileReference
    """The host's contents; hosts with the same contents refer to the same file."""
    values: FileReference | None
    """The values that the host's process owns by itself (`PerProcess`); None: it has none."""
    sums: FileReference | None = None
    """The host's contribution to the sums of the tensors (`format.fingerprint`); None if no
    fingerprint was requested."""
    replicas: ReplicasReference | None = None
    """Checksums of the boxes that other hosts hold, too; None if there are none, or they were not
    compared."""

    @property
    def plain(self) -> list[FileReference]:
        """All of these files but the table and the lanes."""
        replicas = None if self.replicas is None else self.replicas.file
        return [
            part for part in (self.contents, self.values, self.sums, replicas) if part is not None
        ]

    @classmethod
    def from_json(cls, doc: Any, where: str) -> HostFiles:
        """Read these fields of a host record's JSON form."""
        read = Fields(doc, where)
        return cls(
            table=TableReference.from_fields(read, "table"),
            lanes=tuple(read.keys("lanes")),
            contents=FileReference.from_fields(read, "contents"),
            values=None
            if read.value("values") is None
            else FileReference.from_fields(read, "values"),
            sums=FileReference.from_fields(read, "sums") if "sums" in read.doc else None,
            replicas=ReplicasReference.from_fields(read, "replicas")
            if "replicas" in read.doc
            else None,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "contents": self.contents.to_json(),
            "table": self.table.to_json(),
            "lanes": list(self.lanes),
            "values": None if self.values is None else self.values.to_json(),
            **({} if self.sums is None else {"sums": self.sums.to_json()}),
            **({} if self.replicas is None else {"replicas": self.replicas.to_json()}),
        }


def host_record_key(host: int) -> str:
    """Path of a host's record, relative to the attempt."""
    return f"records/{host:05d}.json"


@dataclass(frozen=True, slots=True)
class HostRecord:
    """Record of what one host wrote. The records of all hosts are enough to commit the attempt."""

    attempt: str
    host: int
    hosts: int
    """Number of hosts that write into the attempt; it is complete when all their records are
    there."""
    prior: str | None
    """SHA-256 of the `checkpoint.json` that the save found and will replace; None: there was
    none."""
    layout: str
    compression: str | None
    files: HostFiles
    chunks: int
    stored_bytes: int
    changed_bytes: int | None = None
    """Bytes of its elements that differ from the version that was published before, or were not
    compared; None: without differences."""

    @property
    def key(self) -> str:
        """Path of the record, relative to the attempt."""
        return host_record_key(self.host)

    @property
    def fingerprint(self) -> bool:
        """Whether the host has recorded its part of a fingerprint."""
        return self.files.sums is not None

    @property
    def version(self) -> tuple[int, int]:
        """The oldest version of the format that can hold it.

        A committer that does not know differences must not publish them.
        """
        return DIFFERENCE_VERSION if self.compression == "difference" else FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "attempt": self.attempt,
            "host": self.host,
            "hosts": self.hosts,
            "prior": self.prior,
            "layout": self.layout,
            "compression": self.compression,
            **self.files.to_json(),
            "chunks": self.chunks,
            "stored_bytes": self.stored_bytes,
            **({} if self.changed_bytes is None else {"changed_bytes": self.changed_bytes}),
        }

    @classmethod
    def from_json(cls, doc: Any, where: str) -> HostRecord:
        """Inverse of `to_json`."""
        read = Fields(doc, where)
        return cls(
            attempt=read.attempt(),
            host=read.integer("host"),
            hosts=_hosts(read),
            prior=None if read.value("prior") is None else read.string("prior"),
            layout=read.one_of("layout", LAYOUTS),
            compression=read.one_of("compression", COMPRESSIONS),
            files=HostFiles.from_json(doc, where),
            chunks=read.integer("chunks"),
            stored_bytes=read.integer("stored_bytes"),
            changed_bytes=read.integer("changed_bytes") if "changed_bytes" in read.doc else None,
        )


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """`checkpoint.json`: the small object whose presence makes an attempt the checkpoint."""

    attempt: str
    created: str
    """Time of the commit: UTC, ISO 8601, by the committer's clock; for people."""
    writer: str
    """Software and version, for people."""
    layout: str
    compression: str | None
    hosts: tuple[FileReference, ...]
    """The host records."""
    structure: Structure
    metadata: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    """`tensors` and `bytes` (elements) include tensors in bases; `stored_bytes` (with padding and
    checksums) and `chunks` do not. Versions with differences have `changed_bytes`: of the elements
    that differ from the version that was published before."""
    table: TableReference | None = None
    """The chunk table of all hosts; None: there are only the hosts' own tables."""
    small_table: TableReference | None = None
    """The chunk table of the small plain tensors, which the committer wrote; None: there are
    none."""
    fence: str | None = field(default=None, compare=False)
    """A unique mark. A new value makes a new version of the same record, and committers that have
    seen the earlier version can no longer replace it."""
    fingerprint: FileReference | None = None
    """The fingerprint of the tensors that are not in a base; None: none was recorded."""
    saved_by: int | None = None
    """Number of processes that saved the state, if hosts are not processes (but tasks of a
    reshard): the first so many hosts have those processes' own values. None: every host is a
    process."""
    sha256: str | None = field(default=None, compare=False)
    """Digest of the stored form that it was read from; None: it was made here."""

    @property
    def processes(self) -> int:
        """Number of processes that saved the state."""
        return len(self.hosts) if self.saved_by is None else self.saved_by

    @property
    def version(self) -> tuple[int, int]:
        """The oldest version of the format that can hold this record."""
        return self.structure.version

    def seal(self) -> bytes:
        """The stored form."""
        return seal(self._own_json(), self.version, members=self.structure.encoded)

    def seal_without_tensors(self, *, tree: bool) -> bytes:
        """The stored form without the tensors, or also without the tree.

        It is made to try how the rest is read.
        """
        return seal(
            self._own_json(),
            self.version,
            members=self.structure.encoded_tree if tree else '"tree":{}',
        )

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {**self._own_json(), **self.structure.to_json()}

    def _own_json(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "created": self.created,
            "writer": self.writer,
            "layout": self.layout,
            "compression": self.compression,
            "hosts": [h.to_json() for h in self.hosts],
            **({} if self.table is None else {"table": self.table.to_json()}),
            **({} if self.small_table is None else {"small_table": self.small_table.to_json()}),
            **({} if self.fingerprint is None else {"fingerprint": self.fingerprint.to_json()}),
            **({} if self.saved_by is None else {"processes": self.saved_by}),
            **({} if self.fence is None else {"fence": self.fence}),
            "totals": self.totals,
            "metadata": self.metadata,
        }

    @classmethod
    def from_json(
        cls, doc: Any, where: str, tensors: dict[str, TensorRecord] | None = None
    ) -> CheckpointRecord:
        """Inverse of `to_json`; for `tensors` see `Structure.from_json`."""
        read = Fields(doc, where)
        hosts = read.sequence("hosts")
        totals = Fields(read.mapping("totals"), where)
        structure = Structure.from_json(doc, where, tensors=tensors)
        if bool(structure.chain) != (read.value("compression") == "difference"):
            read.fail(
                "its chunks are differences, and no base has the earlier elements, or the other "
                "way round"
            )
        return cls(
            attempt=read.attempt(),
            created=read.string("created"),
            writer=read.string("writer"),
            layout=read.one_of("layout", LAYOUTS),
            compression=read.one_of("compression", COMPRESSIONS),
            hosts=tuple(
                FileReference.from_fields(Fields({"host": h}, where), "host") for h in hosts
            ),
            structure=structure,
            metadata=read.metadata(),
            totals={
                **{
                    name: totals.integer(name)
                    for name in ("tensors", "bytes", "stored_bytes", "chunks")
                },
                **(
                    {"changed_bytes": totals.integer("changed_bytes")}
                    if "changed_bytes" in totals.doc
                    else {}
                ),
            },
            table=TableReference.from_fields(read, "table") if "table" in read.doc else None,
            small_table=TableReference.from_fields(read, "small_table")
            if "small_table" in read.doc
            else None,
            fingerprint=FileReference.from_fields(read, "fingerprint")
            if "fingerprint" in read.doc
            else None,
            saved_by=_processes(read, len(hosts)) if "processes" in read.doc else None,
            fence=read.string("fence") if "fence" in read.doc else None,
        )


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A commit record of a place without a checkpoint.

    No attempt begun before it may be published there.
    """

    reason: str
    nonce: str = ""
    """Makes every tombstone unique, because some storages derive an object's version from its
    contents."""
    begun: bool = False
    """Whether it is the placeholder of a save that has begun; publishing the save replaces it."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "tombstone": self.reason,
            "nonce": self.nonce,
            **({"begun": True} if self.begun else {}),
        }


def parse_checkpoint(
    data: bytes, where: str, tensors: dict[str, TensorRecord] | None = None
) -> CheckpointRecord | Tombstone:
    """Parse the contents of `checkpoint.json`; for `tensors` see `Structure.from_json`."""
    doc = open_envelope(data, where)
    if "tombstone" in doc:
        read = Fields(doc, where)
        return Tombstone(
            read.string("tombstone"),
            read.string("nonce") if "nonce" in doc else "",
            doc.get("begun") is True,
        )
    return replace(
        CheckpointRecord.from_json(doc, where, tensors), sha256=envelope_digest(data, where)
    )


def _hosts(read: Fields) -> int:
    hosts = read.integer("hosts")
    if not 0 < hosts <= MOST_HOSTS:
        read.fail(f"'hosts' is {hosts}, from 1 to {MOST_HOSTS} are expected")
    return hosts


def _processes(read: Fields, hosts: int) -> int:
    processes = read.integer("processes")
    if not 0 < processes <= hosts:
        read.fail(f"'processes' is {processes}, from 1 to the {hosts} hosts are expected")
    return processes


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contents:
    """The description of a state by one host, or the union over all hosts."""

    structure: Structure
    small: Mapping[str, bytes]
    """Elements of the small plain tensors of a job of several processes, as stored, in C order. No
    process knows which others have them, so each lists its own, and the committer writes them."""
    metadata: Mapping[str, Any]
    """The user's metadata, as given to `SaveOptions(metadata=…)`; each member comes from some or
    all processes."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """A checksum of some elements of each large plain tensor that all processes write together;
    written by early releases only."""
    processes: int | None = None
    """Number of processes that saved the state, if hosts are not processes; None: every host is
    one."""

    @classmethod
    def union(cls, parts: Sequence[tuple[Sequence[int], Contents]]) -> Contents:
        """Merge all hosts' contents.

        Args:
            parts: distinct contents, each with the processes that have it, ascending; sorted by
                lowest process.

        Raises:
            CommitError: processes contradict each other; the message names the subject and the
                processes.
        """
        process_counts = {part.processes for _, part in parts}
        if len(process_counts) > 1:
            raise CommitError(
                f"The hosts disagree on how many processes saved the state: {process_counts}. "
                "Nothing was published."
            )
        metadata = _agree(
            [(processes, part.metadata) for processes, part in parts],
            lambda key, one, other: (
                f"SaveOptions(metadata=…): {shorten(key)} differs between {one} and {other}; give "
                "all the same, or one of them alone, and put what differs into the state as "
                "shardckpt.PerProcess."
            ),
            same_document,
        )
        # Before the elements: where shapes differ, elements do too.
        structure = parts[0][1].structure
        if len(parts) > 1 or structure.is_partial:
            structure = merge_structures([(processes, part.structure) for processes, part in parts])
        small = _agree(
            [(processes, part.small) for processes, part in parts],
            lambda name, one, other: (
                f"{shown(name)}: this small plain tensor has other elements on {one} than on "
                f"{other}; make them equal (SyncBatchNorm does that for a BatchNorm's statistics), "
                "wrap it in shardckpt.PerProcess, or name it in train_state(local=…)."
            ),
        )
        samples = _agree(
            [(processes, part.samples) for processes, part in parts],
            lambda name, one, other: (
                f"{shown(name)}: this plain tensor has other elements on {one} than on {other}, "
                "and all write a part of it; make them equal, or give each its own name and "
                'SaveOptions(host_tensors="local").'
            ),
        )
        return cls(structure, small, metadata, samples, *process_counts)

    def seal(self, key: str | None = None) -> tuple[FileReference, bytes]:
        """The contents as a file: the reference to it, and its bytes.

        By default, the file's key is the one that equal contents share.
        """
        small = {name: base64.b64encode(elements).decode() for name, elements in self.small.items()}
        samples = {"samples": self.samples} if self.samples else {}
        processes = {} if self.processes is None else {"processes": self.processes}
        doc = {"metadata": self.metadata, "small": small, **samples, **processes}
        data = seal(
            doc, self.structure.version, members=f'"structure":{{{self.structure.encoded}}}'
        )
        return FileReference.of(
            key or f"contents/{hashlib.sha256(data).hexdigest()}.json", data
        ), data

    @classmethod
    def from_json(cls, doc: Any, where: str) -> Contents:
        """Read the contents that `seal` wrote."""
        read = Fields(doc, where)
        structure = Structure.from_json(read.value("structure"), where, allow_partial=True)
        small = {}
        for name, text in read.mapping("small").items():
            try:
                small[name] = base64.b64decode(text, validate=True)
            except (TypeError, ValueError, binascii.Error):
                read.fail(f"the elements of {shown(name)} are not base64")
            tensor = structure.tensors.get(name)
            if tensor is None or len(small[name]) != tensor.nbytes:
                read.fail(
                    f"there are {len(small[name])} bytes of elements of {shown(name)}, which no "
                    "tensor of that name has"
                )
            if any(
                c > max(n, 1)
                for piece in tensor.pieces
                for c, n in zip(piece.chunks, piece.shape, strict=True)
            ):
                read.fail(
                    f"chunks of {shown(name)} are larger than the tensor"
                )  # the committer would have to pad them
        samples = Fields(read.mapping("samples") if "samples" in read.doc else {}, where)
        processes = read.integer("processes") if "processes" in read.doc else None
        return cls(
            structure,
            small,
            read.metadata(),
            {name: samples.integer(name) for name in samples.doc},
            processes,
        )


def _agree(
    parts: Sequence[tuple[Sequence[int], Mapping[str, T]]],
    contradiction: Callable[[str, str, str], str],
    same: Callable[[T, T], bool] = lambda one, other: one == other,
) -> dict[str, T]:
    """Merge mappings; `contradiction` makes a message of a name and two processes."""
    merged: dict[str, T] = {}
    holders: dict[str, Sequence[int]] = {}
    for processes, part in parts:
        for name, value in part.items():
            if not same(merged.setdefault(name, value), value):
                one, other = numbered("process", holders[name]), numbered("process", processes)
                raise CommitError(f"{contradiction(name, one, other)} Nothing was published.")
            holders.setdefault(name, processes)
    return merged
