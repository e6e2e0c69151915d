"""Metadata files: their envelope, references to them, and typed access to their contents.

Records and contents are JSON documents inside the same envelope. It has a digest that can be
checked without a JSON library: SHA-256 over the bytes of `record`, exactly as they stand in the
file.

```
{"format":"shardckpt","version":[1,0],"sha256":"<64 hex digits>","record":{…}}
```

A file refers to another one by its key, size and digest (`FileReference`). All input is untrusted:
types, sizes, keys and references are checked before use, and every error names the file.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.errors import FormatError, VersionError
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FORMAT_VERSION = (1, 0)
"""Major and minor version of all other documents. Readers refuse a newer major version; a newer
minor only adds fields to ignore."""
BASES_VERSION = (2, 0)
"""Version of contents and commit records with tensors that lie in other checkpoints."""
AXIS_VERSION = (3, 0)
"""Version of a host's values with positions on an axis of the mesh."""
LOCAL_VERSION = (4, 0)
"""Version of contents and commit records with values that belong to one process each."""
COMPOSITE_VERSION = (5, 0)
"""Version of contents and commit records with composite tensors."""
DIFFERENCE_VERSION = (6, 0)
"""Version of contents, host records and commit records with chunks that are differences. The newest
version that can be read."""
LAYOUTS = ("packed", "zarr")
COMPRESSIONS = (None, "zstd", "difference")

MOST_DIMENSIONS = 32
"""Most dimensions of a tensor."""
LARGEST_DIMENSION = 1 << 62
"""Most elements or bytes: larger sizes do not fit 64-bit arithmetic."""
DEEPEST_METADATA = 200
"""Deepest nesting of objects and lists in a user's metadata, as for states: deeper nesting is a
mistake."""
DEEPEST_READ = 500
"""Deepest nesting that is read: earlier versions stored as much as Python's stack allowed, which
was less than this."""


_ENVELOPE = re.compile(
    rb'\{"format":"shardckpt","version":\[(\d{1,9}),(\d{1,9})\],"sha256":"([0-9a-f]{64})","record":'
)


_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


def utc_now() -> str:
    """The current time as documents have it: UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def document_digest(document: object) -> str:
    """The SHA-256 of a JSON document, 64 hex digits."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


# --- the envelope


def encode(value: Any) -> str:
    """JSON text of a record, or of a part of one."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def seal(
    record: Mapping[str, Any], version: tuple[int, int] = FORMAT_VERSION, *, members: str = ""
) -> bytes:
    """A record's bytes in its envelope, with the digest.

    Args:
        record: the record; not empty if there are `members`.
        version: version of the format.
        members: text of further members, which are encoded already.
    """
    text = encode(record)
    body = (f"{text[:-1]},{members}}}" if members else text).encode()
    digest = hashlib.sha256(body).hexdigest()
    major, minor = version
    return (
        f'{{"format":"shardckpt","version":[{major},{minor}],"sha256":"{digest}","record":'.encode()
        + body
        + b"}\n"
    )


def open_envelope(data: bytes, where: str) -> dict[str, Any]:
    """The record in `data`, after a check of version and digest.

    Raises:
        VersionError: the record has a newer major version.
        FormatError: `data` is not a record, or is damaged.
    """
    body, _ = _checked_body(data, where)
    try:
        record = json.loads(
            body, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError, MemoryError) as e:
        raise FormatError(
            f"{where}: the record is not JSON that can be read here ({e or type(e).__name__})."
        ) from e
    if not isinstance(record, dict):
        raise FormatError(
            f"{where}: the record is a {type(record).__name__}, an object is expected."
        )
    return record


def envelope_digest(data: bytes, where: str) -> str:
    """The digest of the record in `data`, after the checks of `open_envelope` but the JSON's.

    The JSON itself is not checked.
    """
    return _checked_body(data, where)[1]


def _checked_body(data: bytes, where: str) -> tuple[bytes, str]:
    """The JSON of the record in `data`, and its digest, after a check of version and digest."""
    match = _head(data, where)
    version = int(match[1]), int(match[2])
    if version[0] > DIFFERENCE_VERSION[0]:
        newest = ".".join(map(str, DIFFERENCE_VERSION))
        raise VersionError(
            f"{where}: format version {version[0]}.{version[1]} is newer than this shardckpt "
            f"reads ({newest}); upgrade shardckpt."
        )
    end = data.rfind(b"}")
    body = data[match.end() : end]
    digest = hashlib.sha256(body).hexdigest()
    if digest != match[3].decode() or data[end:] not in (b"}", b"}\n"):
        raise FormatError(
            f"{where}: the record's digest does not agree with its contents; the file is damaged."
        )
    return body, digest


def format_version(data: bytes, where: str) -> tuple[int, int]:
    """The version in an envelope. The digest does not cover it."""
    match = _head(data, where)
    return int(match[1]), int(match[2])


def _head(data: bytes, where: str) -> re.Match[bytes]:
    match = _ENVELOPE.match(data)
    if match is None:
        raise FormatError(
            f"{where}: not a shardckpt record; it was written by something else or is damaged."
        )
    return match


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _finite(token: str) -> float:
    number = float(token)
    if math.isinf(number):
        raise ValueError(f"{clip(token)} is not a finite number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with distinct keys: readers do not agree on which of two equal keys counts."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("an object has the same key twice")
    return document


# --- references to files


@dataclass(frozen=True, slots=True)
class FileReference:
    """A reference to a metadata file, with its digest."""

    key: str
    """Path relative to the attempt."""
    size: int
    """Bytes."""
    sha256: str
    """Digest of the complete file, 64 hex digits."""

    @classmethod
    def of(cls, key: str, data: bytes) -> FileReference:
        """Make a reference to a file with those contents."""
        return cls(key, len(data), hashlib.sha256(data).hexdigest())

    @classmethod
    def from_fields(cls, read: Fields, key: str) -> FileReference:
        """Read the reference in the member `key`; inverse of `to_json`."""
        inner = Fields(read.mapping(key), f"{read.where}, {key}")
        return cls(
            inner.inside("key", inner.value("key")), inner.integer("size"), inner.string("sha256")
        )

    def check(self, data: bytes, where: str) -> None:
        """Raise FormatError unless `data` is the file that this refers to."""
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise FormatError(
                f"{where}: not the file that the checkpoint's record names; it is damaged or was "
                "replaced. Replace it with a backup."
            )

    def open(self, data: bytes, where: str) -> Fields:
        """The document in `data`; FormatError unless it is the file that this refers to."""
        self.check(data, where)
        return Fields(open_envelope(data, where), where)

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"key": self.key, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class TableReference:
    """A reference to a chunk table.

    It has the header's digest; the header has the digests of the blocks of rows.
    """

    key: str
    """Path relative to the attempt."""
    size: int
    """Bytes."""
    header: int
    """Bytes of the table's header."""
    sha256: str
    """Digest of the header, 64 hex digits."""

    @classmethod
    def of(cls, key: str, data: bytes, header: int) -> TableReference:
        """Make a reference to a table with those contents.

        The first `header` bytes of the contents are the header.
        """
        return cls(key, len(data), header, hashlib.sha256(data[:header]).hexdigest())

    @classmethod
    def from_fields(cls, read: Fields, key: str) -> TableReference:
        """Read the reference in the member `key`; inverse of `to_json`."""
        inner = Fields(read.mapping(key), f"{read.where}, {key}")
        return cls(
            inner.inside("key", inner.value("key")),
            inner.integer("size"),
            inner.integer("header"),
            inner.string("sha256"),
        )

    def check(self, header: bytes, where: str) -> None:
        """Raise FormatError unless `header` is the header of the table that this refers to."""
        if len(header) != self.header or hashlib.sha256(header).hexdigest() != self.sha256:
            raise FormatError(
                f"{where}: not the file that the checkpoint's record names; it is damaged or was "
                "replaced. Replace it with a backup."
            )

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"key": self.key, "size": self.size, "header": self.header, "sha256": self.sha256}


LARGEST_HEADER = 1 << 30
"""Most bytes of a chunk table's header, which is read at once."""
LARGEST_TABLE = 16 << 30
"""Most bytes of a chunk table."""


def check_sizes(reference: TableReference, where: str) -> None:
    """Raise FormatError if a record gives a table sizes beyond the limits.

    `where` is the table's url.
    """
    if (
        not reference.header <= min(reference.size, LARGEST_HEADER)
        or reference.size > LARGEST_TABLE
    ):
        raise FormatError(
            f"{where}: the record gives its chunk table {reference.size} bytes and a header of "
            f"{reference.header}: damaged."
        )


# --- the contents of a document


def is_choice(value: object, choices: Sequence[object]) -> bool:
    """Whether a value is one of some choices: an array, which `==` compares by element, is not."""
    return any(value is one or (isinstance(value, str) and value == one) for one in choices)


def is_deeper(value: object, most: int) -> bool:
    """Whether dicts and lists are nested deeper than `most`, or contain themselves.

    Does not recurse.

    >>> is_deeper([[], {"a": [1]}], 3), is_deeper([[], {"a": [1]}], 2)
    (False, True)
    """
    level = _containers([value])
    for _ in range(most):
        if not level:
            break
        level = _containers(
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        )
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    """The dicts, lists and tuples among values, each once."""
    return [
        *{id(value): value for value in values if isinstance(value, (dict, list, tuple))}.values()
    ]


def _unfit(name: str) -> bool:
    """Whether a name is invalid inside an attempt; `.__lock` is TensorStore's own suffix."""
    return name in ("", ".", "..") or name.endswith(".__lock")


class Fields:
    """Typed access to an untrusted JSON object."""

    def __init__(self, doc: Any, where: str) -> None:
        """Wrap `doc`, which must be an object; `where` is its file, for messages."""
        self.where = where
        if not isinstance(doc, dict):
            self.fail(f"expected an object, found a {type(doc).__name__}")
        self.doc: dict[str, Any] = doc

    def fail(self, why: str) -> NoReturn:
        """Raise FormatError with the name of the file."""
        raise FormatError(
            f"{self.where}: {why}; the record was not written by shardckpt, or by a faulty version."
        )

    def value(self, key: str) -> Any:
        """Any member; FormatError if it is missing, as in all methods below."""
        if key not in self.doc:
            self.fail(f"{key!r} is missing")
        return self.doc[key]

    def _require(self, key: str, kind: type, what: str) -> Any:
        value = self.value(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{key!r} is a {type(value).__name__}, {what} is expected")
        return value

    def string(self, key: str) -> str:
        """A string."""
        return str(self._require(key, str, "a string"))

    def integer(self, key: str) -> int:
        """A whole number from 0 to 2**62."""
        value = int(self._require(key, int, "a whole number"))
        if not 0 <= value <= LARGEST_DIMENSION:
            self.fail(f"{key!r} is {shorten(value)}, which is out of range")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object."""
        return dict(self._require(key, dict, "an object"))

    def metadata(self) -> dict[str, Any]:
        """The user's metadata, as given to `SaveOptions(metadata=…)`."""
        metadata = self.mapping("metadata")
        if is_deeper(metadata, DEEPEST_READ):
            self.fail(
                f"its metadata has more than {DEEPEST_READ} objects and lists, one within the other"
            )
        return metadata

    def sequence(self, key: str) -> list[Any]:
        """A list."""
        return list(self._require(key, list, "a list"))

    def one_of(self, key: str, allowed: Sequence[str | None]) -> Any:
        """One of a few values."""
        value = self.value(key)
        if not is_choice(value, allowed):
            self.fail(f"{key!r} is {shorten(value)}, one of {allowed} is expected")
        return value

    def pick(self, key: str, choices: Sequence[Any]) -> Any:
        """The entry of `choices` at the index in the member `key`."""
        i = self.integer(key)
        if i >= len(choices):
            self.fail(f"{key!r} refers to entry {i} of {len(choices)}")
        return choices[i]

    def dimensions(self, key: str, *, least: int) -> tuple[int, ...]:
        """Sizes or indices of a tensor, each at least `least`, with an addressable product."""
        values = self.sequence(key)
        if len(values) > MOST_DIMENSIONS or not all(
            type(n) is int and least <= n <= LARGEST_DIMENSION for n in values
        ):
            self.fail(
                f"{key!r} is {shorten(values)}, at most {MOST_DIMENSIONS} whole numbers >= "
                f"{least} are expected"
            )
        if math.prod(max(n, 1) for n in values) > LARGEST_DIMENSION:
            self.fail(f"{key!r} is {shorten(values)}, more elements than can be addressed")
        return tuple(values)

    def keys(self, key: str) -> list[str]:
        """A list of paths below the attempt."""
        values = self.sequence(key)
        for v in values:
            self.inside(key, v)
        return values

    def attempt(self) -> str:
        """The member `attempt`, a valid name of an attempt."""
        attempt = self.string("attempt")
        if not _ATTEMPT.fullmatch(attempt) or attempt.endswith(".__lock"):
            self.fail(f"the attempt {shorten(attempt)} is not a plain directory name")
        return attempt

    def inside(self, key: str, path: Any) -> str:
        """`path`, if it names a file below the attempt."""
        if (
            not isinstance(path, str)
            or not path.isprintable()
            or "\\" in path
            or any(map(_unfit, path.split("/")))
        ):
            self.fail(f"{key!r} names {shorten(path)}, which lies outside the attempt")
        return str(path)


# --- keys


def check_key(key: str, where: object) -> None:
    """Refuse a key that could leave the location it is relative to.

    It may come from an untrusted checkpoint.

    Raises:
        FormatError: the key names nothing below `where`.
    """
    why = unfit(key)
    if why:
        raise FormatError(f"{shorten(key)} is not a valid key below {where}: {why}.")


def unfit(path: str) -> str | None:
    """Reason for which some store cannot hold a slash-separated name; None if every store can."""
    if "\\" in path:
        return "TensorStore turns a backslash into a slash"
    if "\0" in path:
        return "it has a NUL in it"
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            return "it is not UTF-8"
    for name in path.split("/"):
        if name in ("", ".", ".."):
            return f"one of the names between its slashes is {name!r}"
        if name.endswith(".__lock"):
            return "names that end in .__lock are TensorStore's lock files"
    return None
