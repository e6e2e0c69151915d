"""Upload of a large object to Google Cloud Storage, as a resumable upload of its JSON API.

1. A POST begins a session, with `ifGenerationMatch=0` if nothing may be replaced. The session's URI
   is the upload's id. Cloud Storage keeps it for a week.
2. Each part is a PUT of a range, one after the other. The response 308 says how many bytes the
   session has. After a failure the session is queried (`Content-Range: bytes */*`), and only
   missing bytes are sent again.
3. The last PUT has the object's size and the CRC32C of the complete object (`x-goog-hash`). If the
   CRC32C does not match, nothing becomes visible. The metadata of the finished object is compared
   once more.
4. The CRC32C is updated with each part. To resume elsewhere, `UploadState` has the CRC32C and the
   number of bytes that it covers. Bytes after those that the session already has are added to the
   CRC32C, and not sent.

https://cloud.google.com/storage/docs/resumable-uploads,
https://cloud.google.com/storage/docs/performing-resumable-uploads#json-api
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, Self

from crc32c import crc32c

from shardckpt.errors import CorruptionError
from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.bucket import pieces, spell_crc32c
from shardckpt.io.buckets.gcs import GcsBucket, checked, connection, refused
from shardckpt.io.buckets.retry import PassingError, Retry
from shardckpt.io.buckets.upload_session import (
    TOKEN,
    UploadState,
    already_exists,
    bucket_and_name,
    new_token,
    vanished,
)

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

    from shardckpt.io.url import Location

QUANTUM = 1 << 18
"""Bytes; the size of each part except the last is a multiple of this."""
_GONE = {404, 410, 499}
"""Response statuses of a session that has expired, or was ended."""
_RANGE = re.compile(r"bytes=0-(\d+)")


class GcsSession:
    """A session of a resumable upload."""

    parallel = 1

    def __init__(self, place: Location, state: UploadState) -> None:
        self.published = False
        self.durable = 0
        self.state = state
        self._place = place
        bucket, self._name = bucket_and_name(place)
        self._http = connection()
        self._bucket = GcsBucket(bucket)
        self._object = self._bucket.url_of(self._name)
        self._retry = Retry()
        self._unsure = False
        """Whether a request has failed since the session's last response."""

    @classmethod
    def begin(cls, place: Location, part_bytes: int, *, if_absent: bool) -> Self:
        """Begin an upload."""
        assert part_bytes % QUANTUM == 0, f"parts of {part_bytes} bytes"
        session = cls(place, UploadState("", new_token(), part_bytes, if_absent))
        session._http.require_credentials()
        if if_absent and session._look() is not None:
            raise already_exists(place)
        answer = session._ask(
            "POST",
            session._bucket.uploads,
            query={
                "uploadType": "resumable",
                "name": session._name,
                **({"ifGenerationMatch": "0"} if if_absent else {}),
            },
            body=json.dumps({"metadata": {TOKEN: session.state.token}}).encode(),
            headers={
                "X-Upload-Content-Type": "application/octet-stream",
                "Content-Type": "application/json",
            },
        )
        if answer.status == 412:
            raise already_exists(place)
        if answer.status == 404:
            raise OSError(f"there is no such bucket ({refused(answer)})")
        if answer.status != 200:
            raise refused(answer)
        session.state = dataclasses.replace(session.state, upload=answer.headers["Location"])
        return session

    @classmethod
    def resume(cls, place: Location, state: UploadState, *, if_absent: bool) -> Self | None:
        """Resume an upload; None if the service no longer knows it."""
        session = cls(place, state)
        there = session._look()
        session.published = _token_of(there) == state.token
        if session.published:
            return session
        if if_absent and there is not None:
            raise already_exists(place)
        if not session._is_ours_to_ask() or state.part_bytes % QUANTUM:
            return None
        answer = session._retry.call(session._query, GcsBucket.is_passing, session._http.origin)
        if answer.status in _GONE:
            return None
        session._take(answer)
        if session.durable < state.summed and not session.published:
            session.abort()
            return None
        return session

    @property
    def resume_at(self) -> int:
        """Offset of the first part to send, or to add to the CRC32C."""
        return self.state.summed

    def send(self, offset: int, data: memoryview) -> None:
        """Send a part."""
        self._put(offset, data, last=False)
        self.state = dataclasses.replace(
            self.state, summed=offset + len(data), crc32c=crc32c(data, self.state.crc32c)
        )

    def publish(self, offset: int, data: memoryview) -> None:
        """Send the last part, and make the object visible."""
        checksum = spell_crc32c(crc32c(data, self.state.crc32c))
        self._put(offset, data, last=True, headers={"x-goog-hash": f"crc32c={checksum}"})
        document = self._look()
        if document is None or _token_of(document) != self.state.token:
            return  # another writer has replaced it since, which is allowed
        if document.get("crc32c") != checksum or int(document["size"]) != offset + len(data):
            self._ask("DELETE", self._object, query={"ifGenerationMatch": document["generation"]})
            raise CorruptionError(
                f"{self._place}: the service received {document['size']} bytes with CRC32C "
                f"{document.get('crc32c')}, but {offset + len(data)} bytes with {checksum} were "
                "sent; the object was deleted. Upload again."
            )

    def give_up(self) -> None:
        """Do not retry requests that fail from now on."""
        self._retry.give_up()

    def abort(self) -> None:
        """End the session. The service responds with 499 on success."""
        self._retry = Retry()
        if self._is_ours_to_ask():
            # The session's URI may contain the precondition, which applies to the object and not to
            # the session.
            uri = self.state.upload.replace("&ifGenerationMatch=0", "")
            answer = self._ask("DELETE", uri, headers={"Content-Length": "0"})
            if answer.status in cloud.DENIED:
                raise refused(answer)

    def _is_ours_to_ask(self) -> bool:
        """Whether the session's URI belongs to the service.

        Anyone who may write to the bucket may have written the state.

        Our bytes and credentials go only to the service.
        """
        return self.state.upload.startswith(f"{self._bucket.uploads}?")

    def _put(
        self, offset: int, data: memoryview, *, last: bool, headers: dict[str, str] | None = None
    ) -> None:
        """Send a part of the object until the session has all of it."""
        end = offset + len(data)
        size = str(end) if last else "*"

        def once() -> None:
            if self._unsure:
                self._take(self._query())
            if self.published or (self.durable >= end and not last):
                return
            before = self.durable
            begin = max(offset, before)
            span = f"{begin}-{end - 1}" if begin < end else "*"
            body = pieces(data[begin - offset :]) if begin < end else b""
            self._unsure = True
            self._take(
                self._once(
                    "PUT",
                    self.state.upload,
                    body=body,
                    headers={
                        "Content-Range": f"bytes {span}/{size}",
                        "Content-Length": str(end - begin),
                        **(headers or {}),
                    },
                )
            )
            if not self.published and self.durable <= before:
                raise PassingError(
                    f"the service has confirmed {before} bytes and does not accept more"
                )

        while not self.published and (last or self.durable < end):
            self._retry.call(once, GcsBucket.is_passing, self._http.origin)

    def _query(self) -> BaseHTTPResponse:
        """Query how many bytes the session has."""
        return self._once(
            "PUT", self.state.upload, headers={"Content-Range": "bytes */*", "Content-Length": "0"}
        )

    def _take(self, answer: BaseHTTPResponse) -> None:
        """Update the state from a response of the session."""
        status = answer.status
        if status == 308:
            match = _RANGE.fullmatch(answer.headers.get("Range", ""))
            self.durable = int(match[1]) + 1 if match else 0
        elif status in (200, 201):
            self.published = True
        elif status == 412 or status in _GONE:
            if not self._is_ours():
                raise already_exists(self._place) if status == 412 else vanished(self._place)
            self.published = True
        else:
            raise refused(answer)
        self._unsure = False

    def _is_ours(self) -> bool:
        """Whether this upload made the object that is there."""
        return _token_of(self._look()) == self.state.token

    def _look(self) -> dict[str, Any] | None:
        """Metadata of the object that is there; None: there is none."""
        answer = self._ask("GET", self._object, query={"fields": "generation,size,crc32c,metadata"})
        if answer.status == 404:
            return None
        return checked(answer)

    def _ask(self, method: str, url: str, **given: Any) -> BaseHTTPResponse:
        """The response to a request, with retries."""
        return self._retry.call(
            lambda: self._once(method, url, **given), GcsBucket.is_passing, self._http.origin
        )

    def _once(self, method: str, url: str, **given: Any) -> BaseHTTPResponse:
        """The response to one attempt at a request, read to its end."""
        cloud.wait_for_rate("read" if method == "GET" else "write")
        return self._http.once(method, url, **given)


def _token_of(document: dict[str, Any] | None) -> str | None:
    """Token of the upload that made an object.

    None if there is no object, or it has no token of shardckpt.
    """
    token: str | None = (document or {}).get("metadata", {}).get(TOKEN)
    return token
