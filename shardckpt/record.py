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
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from shardckpt import dtypes
from shardckpt.errors import DtypeError, FormatError, ShardingError, VersionError
from shardckpt.fields import LARGEST_DIMENSION, Fields
from shardckpt.mesh import Mesh
from shardckpt.names import array_path, piece_path
from shardckpt.op_sharding import OpSharding
from shardckpt.reshard.plan import Piece, coverage_gap
from shardckpt.sharding import Layout, Sharding
from shardckpt.tree import tensor_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.dtypes import DType

__all__ = [
    "FORMAT_VERSION",
    "CheckpointRecord",
    "FileReference",
    "HostFiles",
    "HostRecord",
    "Structure",
    "TensorRecord",
    "Tombstone",
    "format_version",
    "open_envelope",
    "parse_checkpoint",
    "seal",
]

FORMAT_VERSION = (1, 0)
"""Major and minor. Readers refuse a newer major; a newer minor only adds what they may ignore."""
LAYOUTS = ("packed", "zarr")
COMPRESSIONS = (None, "zstd")
_ENVELOPE = re.compile(rb'\{"format":"shardckpt","version":\[(\d{1,9}),(\d{1,9})\],"sha256":"([0-9a-f]{64})","record":')
_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_Devices = TypeVar("_Devices", Mesh, Layout)
MOST_DEVICES = 1 << 24
"""Over all meshes, and over all shardings: bounds the memory of believing a short record that names many large ones."""


def seal(record: Mapping[str, Any]) -> bytes:
    """A record's bytes, digest included."""
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    major, minor = FORMAT_VERSION
    return f'{{"format":"shardckpt","version":[{major},{minor}],"sha256":"{digest}","record":'.encode() + body + b"}\n"


def open_envelope(data: bytes, where: str) -> dict[str, Any]:
    """The record in `data`, its version and digest checked.

    Raises:
        VersionError: a newer major version.
        FormatError: not a record, or not the one that was written.
    """
    match = _head(data, where)
    version = int(match[1]), int(match[2])
    if version[0] > FORMAT_VERSION[0]:
        ours = ".".join(map(str, FORMAT_VERSION))
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
class TensorRecord:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Layout | None
    """How it was laid out when it was saved; None: a plain host tensor."""
    pieces: tuple[Piece, ...]
    """The zarr arrays that hold it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements, without padding and checksums."""
        return prod(self.shape) * self.dtype.storage.itemsize

    @property
    def num_chunks(self) -> int:
        """Chunks over all pieces."""
        return sum(p.num_chunks for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a checkpoint holds, apart from the bytes: the tree, its small leaves, and every tensor's record."""

    tree: Any
    """JSON document of `tree.flatten`."""
    tensors: dict[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        """JSON form; equal meshes and shardings appear once."""
        meshes: dict[Mesh, int] = {}
        shardings: dict[tuple[Layout, int], int] = {}
        tensors = {}
        for name, t in self.tensors.items():
            entry: dict[str, Any] = {"shape": list(t.shape), "dtype": t.dtype.name}
            if t.layout is not None:
                # Told apart as objects, which is cheap; a mesh has as many ids as there are devices.
                entry["sharding"] = shardings.setdefault((t.layout, len(t.shape)), len(shardings))
            if [p.path for p in t.pieces] == [array_path(name)]:
                entry["chunks"] = list(t.pieces[0].chunks)
            else:
                entry["pieces"] = [{"start": list(p.start), "shape": list(p.shape), "chunks": list(p.chunks)} for p in t.pieces]
            tensors[name] = entry
        return {
            "shardings": [_layout_json(layout, ndim, meshes) for layout, ndim in shardings],
            "meshes": [mesh.to_json() for mesh in meshes],
            "tensors": tensors,
            "tree": self.tree,
        }

    @classmethod
    def from_json(cls, doc: Any, where: str) -> Structure:
        """Inverse of `to_json`; raises FormatError for anything that it would not write."""
        read = Fields(doc, where)
        layouts = _layouts(read)
        tensors: dict[str, TensorRecord] = {}
        suited: set[tuple[int, int]] = set()
        for name, entry in read.mapping("tensors").items():
            t = tensors[name] = _tensor(Fields(entry, f"{where}: tensor {name!r}"), name, layouts)
            if t.layout is not None and (id(t.layout), len(t.shape)) not in suited:
                try:
                    t.layout.parts(len(t.shape))
                except ShardingError as e:
                    raise FormatError(f"{where}: tensor {name!r}: {e}") from e
                suited.add((id(t.layout), len(t.shape)))
        tree = read.value("tree")
        named = tensor_names(tree)
        if set(named) != set(tensors):
            odd = min(set(named) ^ set(tensors))
            read.fail(f"the tree and the list of tensors disagree about {odd!r}")
        return cls(tree, {name: tensors[name] for name in named})


@dataclass(frozen=True, slots=True)
class HostFiles:
    """What a reader needs of a host's record: where the host's own files are. Cheap, however many tensors there are."""

    table: FileReference
    """The host's chunk table."""
    lanes: tuple[str, ...]
    """OCDBT databases relative to the attempt (packed layout)."""

    @classmethod
    def from_json(cls, doc: Any, where: str) -> HostFiles:
        """These parts of a host record's JSON form."""
        read = Fields(doc, where)
        return cls(FileReference.from_fields(read, "table"), tuple(read.keys("lanes")))


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What one host wrote: enough, with the other hosts' records, to commit the attempt."""

    attempt: str
    host: int
    layout: str
    compression: str | None
    table: FileReference
    """The host's chunk table."""
    lanes: tuple[str, ...]
    """OCDBT databases relative to the attempt (packed layout)."""
    chunks: int
    stored_bytes: int
    structure: Structure
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the user gave to `SaveOptions(metadata=…)`."""

    @property
    def key(self) -> str:
        """Where the record is, relative to the attempt."""
        return f"records/{self.host:05d}.json"

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "attempt": self.attempt,
            "host": self.host,
            "layout": self.layout,
            "compression": self.compression,
            "table": self.table.to_json(),
            "lanes": list(self.lanes),
            "chunks": self.chunks,
            "stored_bytes": self.stored_bytes,
            "metadata": self.metadata,
            "structure": self.structure.to_json(),
        }

    @classmethod
    def from_json(cls, doc: Any, where: str) -> HostRecord:
        """Inverse of `to_json`."""
        read = Fields(doc, where)
        return cls(
            attempt=_attempt(read),
            host=read.integer("host"),
            layout=read.one_of("layout", LAYOUTS),
            compression=read.one_of("compression", COMPRESSIONS),
            table=FileReference.from_fields(read, "table"),
            lanes=tuple(read.keys("lanes")),
            chunks=read.integer("chunks"),
            stored_bytes=read.integer("stored_bytes"),
            structure=Structure.from_json(read.value("structure"), where),
            metadata=read.mapping("metadata"),
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
    """`tensors`, `bytes` (elements), `stored_bytes` (with padding and checksums), `chunks`."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "attempt": self.attempt,
            "created": self.created,
            "writer": self.writer,
            "layout": self.layout,
            "compression": self.compression,
            "hosts": [h.to_json() for h in self.hosts],
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
            attempt=_attempt(read),
            created=read.string("created"),
            writer=read.string("writer"),
            layout=read.one_of("layout", LAYOUTS),
            compression=read.one_of("compression", COMPRESSIONS),
            hosts=tuple(FileReference.from_fields(Fields({"host": h}, where), "host") for h in hosts),
            structure=Structure.from_json(doc, where),
            metadata=read.mapping("metadata"),
            totals={k: totals.integer(k) for k in ("tensors", "bytes", "stored_bytes", "chunks")},
        )


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A commit record that says: nothing is here, and no attempt begun before may be published here."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"tombstone": self.reason}


def parse_checkpoint(data: bytes, where: str) -> CheckpointRecord | Tombstone:
    """What `checkpoint.json` holds."""
    doc = open_envelope(data, where)
    if "tombstone" in doc:
        return Tombstone(Fields(doc, where).string("tombstone"))
    return CheckpointRecord.from_json(doc, where)


def _layout_json(layout: Layout, ndim: int, meshes: dict[Mesh, int]) -> dict[str, Any]:
    """A layout's JSON form: always with OpSharding text, and with mesh (by position) and spec where they are known."""
    if isinstance(layout, Sharding):
        text = layout.op_sharding(ndim).to_hlo()
        return {**layout.to_json(meshes.setdefault(layout.mesh, len(meshes))), "op_sharding": text}
    doc = layout.to_json()
    return {"op_sharding": doc.pop("hlo"), **doc}


def _layouts(read: Fields) -> list[Layout]:
    """The shardings that tensors refer to by position."""
    # A newer minor version may add members; what is read is picked out here.
    meshes = _believed(read, "meshes", lambda doc: Mesh.from_json(_picked(doc, ("shape", "axes", "devices"))))

    def layout(doc: dict[str, Any]) -> Layout:
        if "mesh" in doc:
            return Sharding.from_json(_picked(doc, ("mesh", "spec")), meshes)
        return OpSharding.from_json({"hlo": doc.get("op_sharding"), **_picked(doc, ("devices",))})

    return _believed(read, "shardings", layout)


def _believed(read: Fields, key: str, parse: Callable[[dict[str, Any]], _Devices]) -> list[_Devices]:
    """All of a list of meshes or shardings, as long as their devices are not too many together."""
    found: list[_Devices] = []
    devices = 0
    for entry in read.sequence(key):
        try:
            found.append(parse(Fields(entry, read.where).doc))
        except (FormatError, ShardingError) as e:
            raise FormatError(f"{read.where}: a sharding that cannot be: {e}") from e
        last = found[-1]
        if not isinstance(last, OpSharding):
            devices += last.size if isinstance(last, Mesh) else last.num_devices
        elif last.tiles is not None:
            devices += last.tiles.num_devices
        if devices > MOST_DEVICES:
            read.fail(f"its {key} have more than {MOST_DEVICES} devices together")
    return found


def _picked(doc: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {k: doc[k] for k in keys if k in doc}


def _tensor(read: Fields, name: str, layouts: list[Layout]) -> TensorRecord:
    shape = read.dimensions("shape", least=0)
    try:
        dtype = dtypes.by_name(read.string("dtype"))
    except DtypeError as e:
        raise FormatError(f"{read.where}: {e}") from e
    layout = read.pick("sharding", layouts) if "sharding" in read.doc else None
    if "pieces" in read.doc:
        entries = [Fields(p, read.where) for p in read.sequence("pieces")]
        pieces = tuple(
            Piece(
                piece_path(name, i),
                e.dimensions("start", least=0),
                e.dimensions("shape", least=0),
                e.dimensions("chunks", least=1),
            )
            for i, e in enumerate(entries)
        )
    else:
        pieces = (Piece(array_path(name), (0,) * len(shape), shape, read.dimensions("chunks", least=1)),)
    if any(len(p.shape) != len(shape) for p in pieces):
        read.fail(f"its pieces have another rank than its shape {shape}")
    if any(prod(max(n, 1) for n in sides) * dtype.itemsize > LARGEST_DIMENSION for sides in (shape, *(p.chunks for p in pieces))):
        read.fail(f"its shape {shape} or its chunks have more bytes than can be addressed")
    gap = coverage_gap(shape, pieces)
    if gap is not None:
        read.fail(gap)
    if not pieces:
        read.fail("it has no pieces")  # of a tensor of no elements they would hold all
    return TensorRecord(name, shape, dtype, layout, pieces)


def _attempt(read: Fields) -> str:
    attempt = read.string("attempt")
    if not _ATTEMPT.fullmatch(attempt):
        read.fail(f"the attempt {attempt!r} is not a plain directory name")
    return attempt
