"""Requests to an object store: the operation that each asks for, and the outcomes of all of them.

`classify` reads a request's first line: the JSON API of Google Cloud Storage has its own paths
(`/storage/v1/b/…`, `/upload/storage/v1/b/…`, `/download/storage/v1/b/…`), everything else is S3
with the bucket in the path. An `Exchange` is a request and what came of it; `Traffic` collects and
counts them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Exchange", "Kind", "Operation", "Traffic", "classify", "with_name_from_body"]

Kind = Literal["upload", "read", "stat", "list", "delete", "compose", "copy", "other"]
_GCS = re.compile(r"/(?:(upload|download)/)?storage/v1/b/([^/]+)/o(?:/(.+))?/?")
_GCS_TO_OBJECT = re.compile(r"(.+)/(compose|(?:copyTo|rewriteTo)/b/([^/]+)/o/(.+))")
_MUTATING = {"upload", "delete", "compose", "copy"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a request asks for."""

    service: Literal["gcs", "s3"]
    method: str
    kind: Kind
    bucket: str = ""
    name: str = ""
    """The object that is read or changed; of a listing its prefix (or where it starts); "" if only
    the body tells."""
    query: Mapping[str, str] = field(default_factory=dict)
    """The parameters after the question mark."""

    @property
    def object(self) -> str:
        """Bucket and object, with a slash between."""
        return f"{self.bucket}/{self.name}"

    @property
    def mutates(self) -> bool:
        """Whether it changes the object."""
        return self.kind in _MUTATING or (
            self.kind == "other" and bool(self.name) and self.method not in {"GET", "HEAD"}
        )


def classify(method: str, target: str) -> Operation:
    """The operation that a request asks for.

    Args:
        method: `GET`, …
        target: path and query, percent-encoded as they came.
    """
    path, _, query_text = target.partition("?")
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    match = _GCS.fullmatch(path)
    if match:
        return _gcs(method, match[1], unquote(match[2]), match[3], query)
    if path.startswith(("/storage/", "/upload/", "/download/", "/batch/storage/")):
        return Operation("gcs", method, "other", query=query)
    bucket, _, key = unquote(path).removeprefix("/").partition("/")
    return Operation(
        "s3", method, _s3_kind(method, key, query), bucket, key or query.get("prefix", ""), query
    )


def _gcs(
    method: str, service: str | None, bucket: str, encoded: str | None, query: dict[str, str]
) -> Operation:
    """An operation of the JSON API on objects of a bucket."""
    kind: Kind = "other"
    name = unquote(encoded or "")
    to_object = _GCS_TO_OBJECT.fullmatch(encoded or "")
    if service == "upload":
        kind, name = ("upload" if method in {"POST", "PUT"} else "other"), query.get("name", "")
    elif method == "POST" and to_object:
        kind = "compose" if to_object[2] == "compose" else "copy"
        bucket, name = unquote(to_object[3] or bucket), unquote(to_object[4] or to_object[1])
    elif not encoded:
        kind, name = (
            ("list" if method == "GET" else "other"),
            query.get("prefix", query.get("startOffset", "")),
        )
    elif method in {"GET", "HEAD"}:
        kind = (
            "read"
            if method == "GET" and (query.get("alt") == "media" or service == "download")
            else "stat"
        )
    elif method == "DELETE":
        kind = "delete"
    return Operation("gcs", method, kind, bucket, name, query)


def _s3_kind(method: str, key: str, query: dict[str, str]) -> Kind:
    """Kind of an S3 request."""
    if not key:
        return (
            "delete"
            if method == "POST" and "delete" in query
            else "list"
            if method == "GET" and "list-type" in query
            else "other"
        )
    kinds: dict[str, Kind] = {
        "PUT": "upload",
        "POST": "upload",
        "GET": "read",
        "HEAD": "stat",
        "DELETE": "delete",
    }
    return kinds.get(method, "other")


def with_name_from_body(operation: Operation, body: bytes | bytearray) -> Operation:
    """An upload through the JSON API whose object only its body names.

    The name is in JSON, which is the whole body or the first of several parts.

    >>> with_name_from_body(Operation("gcs", "POST", "upload", "b"), b'{"name": "run/1"}').object
    'b/run/1'
    """
    start = body.find(b"{", 0, 4096)
    if start >= 0:
        try:
            doc, _ = json.JSONDecoder().raw_decode(
                body[start : start + (1 << 16)].decode(errors="replace")
            )
        except ValueError:
            return operation
        return replace(operation, name=str(doc.get("name", "")))
    return operation


@dataclass(slots=True)
class Exchange:
    """A request and what has come of it so far."""

    operation: Operation
    status: int | None = None
    """The code that the client was sent; None: none yet, or the connection was reset instead."""
    fault: str = ""
    """The fault that was injected: `status 503`, `reset`, …; "" for none."""
    forwarded: bool = False
    """Whether the storage saw it."""
    bytes_up: int = 0
    """Of the request's body, as far as it came."""
    bytes_down: int = 0
    """Of the answer's body, as far as it was sent."""
    round: int = 0
    """Length of the longest row of exchanges up to this one, each of which began after the end of
    the one before it."""


class Traffic:
    """All exchanges, in the order in which they began.

    A client that has its answer finds it counted.
    """

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._rounds = 0

    def add(self, exchange: Exchange) -> None:
        """Note one; for the proxy."""
        exchange.round = self._rounds + 1
        self._exchanges.append(exchange)

    def end(self, exchange: Exchange) -> None:
        """Note that the client has its answer, or will get none; for the proxy."""
        if any(one is exchange for one in reversed(self._exchanges)):  # else it was forgotten
            self._rounds = max(self._rounds, exchange.round)

    def reset(self) -> None:
        """Forget all."""
        self._exchanges, self._rounds = [], 0

    def exchanges(self, prefix: str = "") -> list[Exchange]:
        """Those about objects (or listings) whose `bucket/object` starts with `prefix`."""
        return [replace(e) for e in list(self._exchanges) if e.operation.object.startswith(prefix)]

    def uploaded(self, prefix: str = "") -> Counter[str]:
        """`bucket/object` → bytes sent to store it, in all tries together.

        Beyond the object's size they were resent.
        """
        counts: Counter[str] = Counter()
        for exchange in self.exchanges(prefix):
            if exchange.operation.kind == "upload":
                counts[exchange.operation.object] += exchange.bytes_up
        return counts

    def summary(self, prefix: str = "") -> dict[str, Any]:
        """Requests by kind, method, status and fault, and bytes, as a JSON document.

        It has the bytes each way, and the bytes uploaded by object.
        """
        exchanges = self.exchanges(prefix)
        return {
            "requests": len(exchanges),
            "kinds": dict(Counter(e.operation.kind for e in exchanges)),
            "methods": dict(Counter(e.operation.method for e in exchanges)),
            "statuses": dict(Counter(str(e.status or "none") for e in exchanges)),
            "faults": dict(Counter(e.fault for e in exchanges if e.fault)),
            "bytes_up": sum(e.bytes_up for e in exchanges),
            "bytes_down": sum(e.bytes_down for e in exchanges),
            "uploaded": dict(self.uploaded(prefix)),
        }
