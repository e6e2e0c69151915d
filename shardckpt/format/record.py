"""The commit record and the host records: what they hold, and how they are written and read.

Both are JSON documents inside the same envelope, which binds them to a digest that anybody can check without a
JSON library: SHA-256 over the bytes of `record`, exactly as they stand in the file.

```
{"format":"shardckpt","version":[1,0],"sha256":"<64 hex digits>","record":{…}}
```

Everything read here was written by somebody else: types, sizes and references are checked before use, and
every error names the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.errors import FormatError, VersionError
from shardckpt.format.fields import COMPRESSIONS, LAYOUTS, Fields
from shardckpt.format.structure import Structure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BASES_VERSION",
    "FORMAT_VERSION",
    "CheckpointRecord",
    "FileReference",
    "HostFiles",
    "HostRecord",
    "TableReference",
    "Tombstone",
    "format_version",
    "open_envelope",
    "parse_checkpoint",
    "seal",
]

FORMAT_VERSION = (1, 0)
"""Major and minor, of all that needs no newer one. Readers refuse a newer major; a newer minor only adds what they may ignore."""
BASES_VERSION = (2, 0)
"""Of contents and commit records with tensors that lie in other checkpoints. The newest that is read."""
MOST_HOSTS = 1 << 20
"""Of one save: bounds what it takes to say which are missing."""
_ENVELOPE = re.compile(rb'\{"format":"shardckpt","version":\[(\d{1,9}),(\d{1,9})\],"sha256":"([0-9a-f]{64})","record":')


def seal(record: Mapping[str, Any], version: tuple[int, int] = FORMAT_VERSION) -> bytes:
    """A record's bytes, digest included."""
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    major, minor = version
    return f'{{"format":"shardckpt","version":[{major},{minor}],"sha256":"{digest}","record":'.encode() + body + b"}\n"


def open_envelope(data: bytes, where: str) -> dict[str, Any]:
    """The record in `data`, its version and digest checked.

    Raises:
        VersionError: a newer major version.
        FormatError: not a record, or not the one that was written.
    """
    match = _head(data, where)
    version = int(match[1]), int(match[2])
    if version[0] > BASES_VERSION[0]:
        ours = ".".join(map(str, BASES_VERSION))
        raise VersionError(
            f"{where}: format version {version[0]}.{version[1]} is newer than this shardckpt reads ({ours}); upgrade shardckpt."
        )
    end = data.rfind(b"}")
    body = data[match.end() : end]
    if hashlib.sha256(body).hexdigest() != match[3].decode() or data[end:] not in (b"}", b"}\n"):
        raise FormatError(f"{where}: the record's digest does not agree with its contents; the file is damaged.")
    try:
        record = json.loads(body, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError, MemoryError) as e:
        raise FormatError(f"{where}: the record is not JSON that can be read here ({e or type(e).__name__}).") from e
    if not isinstance(record, dict):
        raise FormatError(f"{where}: the record is a {type(record).__name__}, an object is expected.")
    return record


def format_version(data: bytes, where: str) -> tuple[int, int]:
    """The version that an envelope names. The digest does not cover it."""
    match = _head(data, where)
    return int(match[1]), int(match[2])


def _head(data: bytes, where: str) -> re.Match[bytes]:
    match = _ENVELOPE.match(data)
    if match is None:
        raise FormatError(f"{where}: not a shardckpt record; it was written by something else or is damaged.")
    return match


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, all of whose keys differ: readers do not agree on which of two equal ones counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


@dataclass(frozen=True, slots=True)
class FileReference:
    """A metadata file that another one vouches for."""

    key: str
    """Where it is, relative to the attempt."""
    size: int
    """Bytes."""
    sha256: str
    """Of the whole file, 64 hex digits."""

    @classmethod
    def of(cls, key: str, data: bytes) -> FileReference:
        """Refer to a file with those contents."""
        return cls(key, len(data), hashlib.sha256(data).hexdigest())

    @classmethod
    def from_fields(cls, read: Fields, key: str) -> FileReference:
        """Inverse of `to_json`, of the member `key`."""
        inner = Fields(read.mapping(key), f"{read.where}, {key}")
        return cls(inner.inside("key", inner.value("key")), inner.integer("size"), inner.string("sha256"))

    def check(self, data: bytes, where: str) -> None:
        """Raise FormatError unless `data` is what was referred to."""
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise FormatError(f"{where}: not the file that the checkpoint's record vouches for; it is damaged or was replaced.")

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"key": self.key, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class TableReference:
    """A chunk table that a record vouches for: for its header, and that for each block of rows."""

    key: str
    """Where it is, relative to the attempt."""
    size: int
    """Bytes."""
    header: int
    """Bytes of its header."""
    sha256: str
    """Of the header, 64 hex digits."""

    @classmethod
    def of(cls, key: str, data: bytes, header: int) -> TableReference:
        """Refer to a table with those contents, of which the first `header` bytes are the header."""
        return cls(key, len(data), header, hashlib.sha256(data[:header]).hexdigest())

    @classmethod
    def from_fields(cls, read: Fields, key: str) -> TableReference:
        """Inverse of `to_json`, of the member `key`."""
        inner = Fields(read.mapping(key), f"{read.where}, {key}")
        return cls(inner.inside("key", inner.value("key")), inner.integer("size"), inner.integer("header"), inner.string("sha256"))

    def check(self, header: bytes, where: str) -> None:
        """Raise FormatError unless that is the header of what was referred to."""
        if len(header) != self.header or hashlib.sha256(header).hexdigest() != self.sha256:
            raise FormatError(f"{where}: not the file that the checkpoint's record vouches for; it is damaged or was replaced.")

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"key": self.key, "size": self.size, "header": self.header, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class HostFiles:
    """What a reader needs of a host's record: where the host's own files are. Cheap, however many tensors there are."""

    table: TableReference
    """The host's chunk table."""
    lanes: tuple[str, ...]
    """OCDBT databases relative to the attempt (packed layout)."""
    contents: FileReference
    """What the host says that the checkpoint holds; hosts that say the same refer to the same file."""
    values: FileReference | None
    """What the host's process owns by itself (`PerProcess`); None: nothing."""

    @classmethod
    def from_json(cls, doc: Any, where: str) -> HostFiles:
        """These parts of a host record's JSON form."""
        read = Fields(doc, where)
        return cls(
            table=TableReference.from_fields(read, "table"),
            lanes=tuple(read.keys("lanes")),
            contents=FileReference.from_fields(read, "contents"),
            values=None if read.value("values") is None else FileReference.from_fields(read, "values"),
        )

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "contents": self.contents.to_json(),
            "table": self.table.to_json(),
            "lanes": list(self.lanes),
            "values": None if self.values is None else self.values.to_json(),
        }


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What one host wrote: enough, with the other hosts' records, to commit the attempt."""

    attempt: str
    host: int
    hosts: int
    """How many write into the attempt; it is complete when all their records are there."""
    prior: str | None
    """SHA-256 of the `checkpoint.json` that the save found, and means to replace; None: there was none."""
    layout: str
    compression: str | None
    files: HostFiles
    chunks: int
    stored_bytes: int

    @property
    def key(self) -> str:
        """Where the record is, relative to the attempt."""
        return f"records/{self.host:05d}.json"

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
        )


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """`checkpoint.json`: the small object whose presence makes an attempt the checkpoint."""

    attempt: str
    created: str
    """UTC, ISO 8601, by the committer's clock; for people."""
    writer: str
    """Software and version, for people."""
    layout: str
    compression: str | None
    hosts: tuple[FileReference, ...]
    """The host records."""
    structure: Structure
    metadata: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    """`tensors` and `bytes` (elements) of all, those in bases too; `stored_bytes` (with padding and checksums) and `chunks` of its own."""
    table: TableReference | None = None
    """All hosts' chunk tables as one; None: only the hosts' own are there."""
    small_table: TableReference | None = None
    """The chunk table of what the committer wrote itself, small plain tensors; None: it wrote none."""
    fence: str | None = field(default=None, compare=False)
    """Changed to anything else, it makes the record another version of itself: committers that have seen the one
    before can no longer replace it."""
    saved_by: int | None = None
    """Processes that saved the state, where hosts are something else (tasks of a reshard): the first so many hosts have the values
    that those owned. None: every host is one."""

    @property
    def processes(self) -> int:
        """How many processes saved the state."""
        return len(self.hosts) if self.saved_by is None else self.saved_by

    @property
    def version(self) -> tuple[int, int]:
        """Of the format: the oldest that can say this."""
        return BASES_VERSION if self.structure.bases else FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "attempt": self.attempt,
            "created": self.created,
            "writer": self.writer,
            "layout": self.layout,
            "compression": self.compression,
            "hosts": [h.to_json() for h in self.hosts],
            **({} if self.table is None else {"table": self.table.to_json()}),
            **({} if self.small_table is None else {"small_table": self.small_table.to_json()}),
            **({} if self.saved_by is None else {"processes": self.saved_by}),
            **({} if self.fence is None else {"fence": self.fence}),
            "totals": self.totals,
            "metadata": self.metadata,
            **self.structure.to_json(),
        }

    @classmethod
    def from_json(cls, doc: Any, where: str) -> CheckpointRecord:
        """Inverse of `to_json`."""
        read = Fields(doc, where)
        hosts = read.sequence("hosts")
        totals = Fields(read.mapping("totals"), where)
        return cls(
            attempt=read.attempt(),
            created=read.string("created"),
            writer=read.string("writer"),
            layout=read.one_of("layout", LAYOUTS),
            compression=read.one_of("compression", COMPRESSIONS),
            hosts=tuple(FileReference.from_fields(Fields({"host": h}, where), "host") for h in hosts),
            structure=Structure.from_json(doc, where),
            metadata=read.metadata(),
            totals={k: totals.integer(k) for k in ("tensors", "bytes", "stored_bytes", "chunks")},
            table=TableReference.from_fields(read, "table") if "table" in read.doc else None,
            small_table=TableReference.from_fields(read, "small_table") if "small_table" in read.doc else None,
            saved_by=_processes(read, len(hosts)) if "processes" in read.doc else None,
            fence=read.string("fence") if "fence" in read.doc else None,
        )


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A commit record that says: nothing is here, and no attempt begun before may be published here."""

    reason: str
    nonce: str = ""
    """Makes every tombstone another: storages that know versions by their contents must tell them apart."""
    begun: bool = False
    """Whether a save has put it there as it began, to replace it when it is published."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"tombstone": self.reason, "nonce": self.nonce, **({"begun": True} if self.begun else {})}


def parse_checkpoint(data: bytes, where: str) -> CheckpointRecord | Tombstone:
    """What `checkpoint.json` holds."""
    doc = open_envelope(data, where)
    if "tombstone" in doc:
        read = Fields(doc, where)
        return Tombstone(read.string("tombstone"), read.string("nonce") if "nonce" in doc else "", doc.get("begun") is True)
    return CheckpointRecord.from_json(doc, where)


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
