"""Sessions of resumable uploads to Cloud Storage, with the rules for their next requests.

Each session knows the bytes that it has.

fake-gcs-server takes a query (`Content-Range: bytes */*`) for the end of the upload and publishes
what is there, and stores bytes twice that are sent twice. The rules here are those of the API's
documentation ("Resumable uploads") and of Google's own test bench:

- A query is answered with 308, and in `Range` with how far the session is; without one if it has
  nothing.
- Bytes that a session has are ignored when they are sent again. Bytes beyond the next one are
  refused.
- What arrives of a part whose connection breaks stays, in multiples of 256 KiB.
- `bytes */N` ends an upload that has N bytes; the part that ends one may have its checksum in
  `x-goog-hash`, and is refused otherwise.
- A session that has ended by becoming an object answers with the object; one that was deleted, 404.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from fault_requests import Operation

__all__ = ["QUANTUM", "Part", "Resumable"]

QUANTUM = 1 << 18
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an upload that a request brings."""

    start: int | None
    """Of its first byte; None: it brings none."""
    total: int | None
    """Bytes of the object, if it says so."""

    @classmethod
    def of(cls, content_range: str) -> Part | None:
        """As a request's header says it; None if it makes no sense."""
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None:
            return None
        return cls(
            None if match[1] is None else int(match[1]), None if match[3] == "*" else int(match[3])
        )


@dataclass(slots=True)
class Resumable:
    """One session."""

    begun: Operation
    """The request that began it, with its preconditions."""
    persisted: int = 0
    """Bytes that it has."""
    checksum: int = 0
    """CRC32C of those."""
    published: bool = False
    deleted: bool = False

    @property
    def range(self) -> dict[str, str]:
        """The header that says how far it is."""
        return {"Range": f"bytes=0-{self.persisted - 1}"} if self.persisted else {}

    def new(self, part: Part, body: bytearray) -> bytearray | None:
        """The bytes of a part that the session does not have.

        None: the part begins beyond the next byte.
        """
        if part.start is None:
            return bytearray()
        return None if part.start > self.persisted else body[self.persisted - part.start :]

    def content_range(self, part: Part, new: bytearray) -> str:
        """The header for just what is new."""
        span = f"{self.persisted}-{self.persisted + len(new) - 1}" if new else "*"
        return f"bytes {span}/{'*' if part.total is None else part.total}"

    def ends(self, part: Part, new: bytearray) -> bool:
        """Whether a part ends the upload."""
        return part.total is not None and self.persisted + len(new) == part.total

    def agrees(self, hashes: str, new: bytearray) -> bool:
        """Whether the object would have the checksum that `x-goog-hash` names, if it names one."""
        expected = dict(one.split("=", 1) for one in hashes.split(",") if "=" in one).get("crc32c")
        return expected in (
            None,
            base64.b64encode(crc32c(bytes(new), self.checksum).to_bytes(4)).decode(),
        )

    def add(self, new: bytearray) -> None:
        """Note what was stored."""
        self.checksum = crc32c(bytes(new), self.checksum)
        self.persisted += len(new)
